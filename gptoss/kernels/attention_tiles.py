"""What the attention kernels share on the device: rows of head_dim in two pieces, and who sees whom.

**head_dim 96 is 64 + 32.** Triton's tiles have power-of-two sides. Padding 96 to 128 multiplies a third more numbers and
holds a third more of them; two pieces multiply exactly 96 columns and cost one more instruction a tile. A matrix of
(rows, D) is therefore a tuple of one tile (D a power of two) or two, WIDTH and REST columns wide. Only a D that is not
the sum of two powers of two is padded.

**Visibility.** Query row i of T stands at position S - T + i; it sees key j when 0 <= position - j < window and
j >= first_key. The keys that a block of queries sees split into three runs of blocks: an edge that the window or the
padding cuts, a middle that every row sees whole, and an edge that the diagonal cuts. Only edges pay for masks; blocks
outside are never visited, so a windowed layer costs window·T. The same holds for the queries that see a block of keys.
"""

import triton
import triton.language as tl


def head_dim_pieces(head_dim: int) -> tuple[int, int]:
    """WIDTH and REST for one head_dim: 96 -> (64, 32), 64 -> (64, 0). tl.dot wants at least 16 columns."""
    width = max(16, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - width
    return width, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


@triton.jit
def offset(index, stride):
    """index · stride in 64 bits: 2^31 elements are fewer than some caches hold."""
    return tl.cast(index, tl.int64) * stride


@triton.jit
def _load_piece(
    pointer, rows, stride, low, high, FROM: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    columns = FROM + tl.arange(0, N)
    pointers = pointer + rows[:, None] * stride + columns[None, :]
    if CHECK and FROM + N > D:
        inside = (rows >= low)[:, None] & (rows < high)[:, None] & (columns < D)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=((rows >= low) & (rows < high))[:, None], other=0.0)
    elif FROM + N > D:
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_rows(
    pointer, rows, stride, low, high, D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """The rows of a (n, D) matrix, in pieces. With CHECK, rows outside [low, high) are not read: they are 0."""
    pieces = (_load_piece(pointer, rows, stride, low, high, 0, WIDTH, D, CHECK),)
    if REST > 0:
        pieces = pieces + (_load_piece(pointer, rows, stride, low, high, WIDTH, REST, D, CHECK),)
    return pieces


@triton.jit
def store_rows(
    pointer, pieces, rows, stride, high, D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr
):
    """Write the pieces to the rows below `high`, in the pointer's dtype."""
    columns = tl.arange(0, WIDTH)
    inside = (rows < high)[:, None] & (columns < D)[None, :]
    pointers = pointer + rows[:, None] * stride
    tl.store(pointers + columns[None, :], pieces[0].to(pointer.dtype.element_ty), mask=inside)
    if REST > 0:
        columns = WIDTH + tl.arange(0, REST)
        inside = (rows < high)[:, None] & (columns < D)[None, :]
        tl.store(pointers + columns[None, :], pieces[1].to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def zero_rows(ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    """An fp32 accumulator of (ROWS, D), in pieces."""
    pieces = (tl.zeros((ROWS, WIDTH), tl.float32),)
    if REST > 0:
        pieces = pieces + (tl.zeros((ROWS, REST), tl.float32),)
    return pieces


@triton.jit
def scale_rows(pieces, factor):
    """Every piece times a factor that broadcasts to it."""
    scaled = (pieces[0] * factor,)
    if len(pieces) > 1:
        scaled = scaled + (pieces[1] * factor,)
    return scaled


@triton.jit
def keep_rows(pieces, kept):
    """The rows that `kept` (rows, 1) names; zeros elsewhere, whatever stood there."""
    rows = (tl.where(kept, pieces[0], 0.0),)
    if len(pieces) > 1:
        rows = rows + (tl.where(kept, pieces[1], 0.0),)
    return rows


@triton.jit
def dot_rows(a, b, PRECISION: tl.constexpr):
    """a · bᵀ: the (rows of a, rows of b) inner products over D."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if len(a) > 1:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision=PRECISION)
    return product


@triton.jit
def add_weighted_rows(total, weights, rows, PRECISION: tl.constexpr):
    """total + weights · rows, with the weights rounded to the rows' dtype for the tensor cores."""
    weights = weights.to(rows[0].dtype)
    sums = (tl.dot(weights, rows[0], total[0], input_precision=PRECISION),)
    if len(rows) > 1:
        sums = sums + (tl.dot(weights, rows[1], total[1], input_precision=PRECISION),)
    return sums


@triton.jit
def sum_of_products(a, b):
    """Σ_d a[r, d]·b[r, d] in fp32, one number a row."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) > 1:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def key_runs(
    position, S, window, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """Where the keys of QUERIES rows from `position` on begin, where every row sees them all (from, to), and end."""
    begin = first_key
    whole_from = first_key
    if WINDOWED:
        begin = tl.maximum(begin, position - window + 1)
        whole_from = tl.maximum(whole_from, position + QUERIES - window)
    begin = begin // KEYS * KEYS
    whole_to = tl.maximum((position + 1) // KEYS * KEYS, begin)
    whole_from = tl.minimum(tl.maximum(tl.cdiv(whole_from, KEYS) * KEYS, begin), whole_to)
    return begin, whole_from, whole_to, tl.minimum(position + QUERIES, S)


@triton.jit
def query_runs(
    key, shift, T, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr
):
    """The same for the query rows that see KEYS keys from `key` on; `shift` is S - T."""
    begin = tl.maximum(key - shift, 0) // QUERIES * QUERIES
    end = T
    whole_to = T // QUERIES * QUERIES
    if WINDOWED:
        end = tl.minimum(end, tl.maximum(key + KEYS - 1 + window - shift, 0))
        whole_to = tl.minimum(whole_to, tl.maximum(key + window - shift, 0) // QUERIES * QUERIES)
    whole_to = tl.maximum(whole_to, begin)
    whole_from = tl.cdiv(tl.maximum(key + KEYS - 1 - shift, 0), QUERIES) * QUERIES
    return begin, tl.minimum(tl.maximum(whole_from, begin), whole_to), whole_to, end
