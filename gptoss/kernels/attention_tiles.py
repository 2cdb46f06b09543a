"""What the attention kernels share on the device: rows of head_dim in two pieces, and who sees whom.

**head_dim 96 is 64 + 32.** Triton's tiles have power-of-two sides. Padding 96 to 128 multiplies a third more numbers and
holds a third more of them; two pieces multiply exactly 96 columns and cost one more instruction a tile. So a tensor
(B, heads, rows, D) is handed to a kernel as a pair of descriptors, of tiles WIDTH and REST columns wide, and a loaded
block of its rows is a tuple of one or two tiles. Columns past D (head_dims that are no sum of two powers of two) and
rows past the end read as zeros and are not written: the descriptor knows the tensor's bounds and strides. On Hopper the
tensor memory accelerator does that arithmetic, which frees a third of the registers; elsewhere Triton writes it out.

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
def load_rows(
    source, batch, head, start, ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr
):
    """ROWS rows from `start` on of one head, in pieces (ROWS, WIDTH) and (ROWS, REST)."""
    first = source[0].load([batch, head, start, 0]).reshape(ROWS, WIDTH)
    if REST > 0:
        return (first, source[1].load([batch, head, start, WIDTH]).reshape(ROWS, REST))
    else:
        return (first,)


@triton.jit
def store_rows(
    target, pieces, batch, head, start,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Write the pieces of ROWS rows in the target's dtype."""
    first = pieces[0].to(target[0].dtype).reshape(1, 1, ROWS, WIDTH)
    target[0].store([batch, head, start, 0], first)
    if REST > 0:
        rest = pieces[1].to(target[1].dtype).reshape(1, 1, ROWS, REST)
        target[1].store([batch, head, start, WIDTH], rest)


@triton.jit
def zero_rows(ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    """An fp32 accumulator of (ROWS, D), in pieces."""
    if REST > 0:
        return (tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, REST), tl.float32))
    else:
        return (tl.zeros((ROWS, WIDTH), tl.float32),)


@triton.jit
def scale_rows(pieces, factor):
    """Every piece times a factor that broadcasts to it."""
    if len(pieces) > 1:
        return (pieces[0] * factor, pieces[1] * factor)
    else:
        return (pieces[0] * factor,)


@triton.jit
def keep_rows(pieces, kept):
    """The rows that `kept` (rows,) names; zeros elsewhere, whatever stood there."""
    if len(pieces) > 1:
        return (tl.where(kept[:, None], pieces[0], 0.0), tl.where(kept[:, None], pieces[1], 0.0))
    else:
        return (tl.where(kept[:, None], pieces[0], 0.0),)


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
    first = tl.dot(weights, rows[0], total[0], input_precision=PRECISION)
    if len(rows) > 1:
        return (first, tl.dot(weights, rows[1], total[1], input_precision=PRECISION))
    else:
        return (first,)


@triton.jit
def sum_of_products(a, b):
    """Σ_d a[r, d]·b[r, d] in fp32, one number a row."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) > 1:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def visible_pairs(positions, keys, window, WINDOWED: tl.constexpr):
    """Whether each position sees each key; the two broadcast against one another."""
    distance = positions - keys
    visible = distance >= 0
    if WINDOWED:
        visible = visible & (distance < window)
    return visible


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
