"""Checks of chapter 5: grouped-query attention.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim, C model width.
"""

import math

import torch
from torch import Tensor

from gptoss.model.attention import causal_attention, repeat_kv
from gptoss.model.cache import kv_cache_bytes

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "05_gqa"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. What sharing saves ------------------------------------------------------------------------------------------------


def _saves_reference(
    n_heads: int, n_kv_heads: int, head_dim: int, d_model: int, tokens: int, bytes_per_number: int
) -> tuple[int, int]:
    cache = kv_cache_bytes(tokens, 0, 1, n_kv_heads, head_dim, 1, bytes_per_number)
    return cache, 2 * n_heads * head_dim * d_model - 2 * n_kv_heads * head_dim * d_model


def _saves(
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    d_model: int,
    tokens: int,
    bytes_per_number: int,
    *,
    tensors: int = 2,
    kept: int = 2,
    saved: bool = True,
    shared: bool = True,
) -> tuple[int, int]:
    cache = kept * (n_kv_heads if shared else n_heads) * head_dim * bytes_per_number * tokens
    heads = n_heads - n_kv_heads if saved else n_kv_heads
    return cache, tensors * heads * head_dim * d_model


def _saves_by_shapes(
    n_heads: int, n_kv_heads: int, head_dim: int, d_model: int, tokens: int, bytes_per_number: int
) -> tuple[int, int]:
    """Right, written differently: tensors without storage, counted."""

    def numbers(*shape: int) -> int:
        return torch.empty(*shape, device="meta").numel()

    wide, narrow = (numbers(2, n, head_dim, d_model) for n in (n_heads, n_kv_heads))
    return numbers(2, n_kv_heads, tokens, head_dim) * bytes_per_number, wide - narrow


def _saves_trial(*sizes: int) -> Trial:
    H, K, D, C, tokens, itemsize = sizes
    label = f"H = {H}, K = {K}, D = {D}, C = {C}, {tokens:,} tokens, {itemsize} bytes a number"
    return Trial(label, lambda: (H, K, D, C, tokens, itemsize))


check_sharing_saves = Exercise(
    function="sharing_saves",
    title="What sharing saves",
    dots=1,
    minutes=5,
    reference=_saves_reference,
    trials=(
        _saves_trial(8, 4, 96, 768, 1, 2),
        _saves_trial(8, 4, 96, 768, 131_072, 2),
        _saves_trial(6, 2, 5, 30, 7, 4),
        _saves_trial(64, 8, 64, 2880, 4096, 2),
        _saves_trial(3, 3, 10, 30, 11, 8),
    ),
    mistakes=(
        Mistake(
            "keys or values alone",
            "the bytes are half of what they should be: a token leaves a key and a value.",
            lambda *sizes: _saves(*sizes, kept=1),
        ),
        Mistake(
            "query heads cached",
            "the cache does not depend on the number of query heads: only keys and values are kept.",
            lambda *sizes: _saves(*sizes, shared=False),
        ),
        Mistake(
            "parameters left, not saved",
            "the second number is what the key-value projection has. Asked for is how much less that is than with n_kv_heads = n_heads.",
            lambda *sizes: _saves(*sizes, saved=False),
        ),
        Mistake(
            "one projection",
            "the parameters are half of what they should be: keys have a projection, and so have values.",
            lambda *sizes: _saves(*sizes, tensors=1),
        ),
        Mistake(
            "queries thinned out too",
            "too many parameters saved. Queries and the output keep all their heads; only keys and values share.",
            lambda *sizes: _saves(*sizes, tensors=4),
        ),
    ),
    alternatives=(_saves_by_shapes,),
    hints=(
        "A token leaves one key and one value of head_dim numbers in each key-value head.",
        "The projection of keys and values has 2 · n_kv_heads · head_dim rows of d_model numbers.",
    ),
)


# 2. Grouped attention without a wide tensor ---------------------------------------------------------------------------


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    order: str = "interleave",
    values: str = "interleave",
    aligned: str = "last",
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    (T, D), S, G = q.shape[-2:], k.shape[-2], q.shape[1] // k.shape[1]

    def widen(x: Tensor, how: str) -> Tensor:
        return repeat_kv(x, G) if how == "interleave" else x.repeat(1, G, 1, 1)

    scores = q @ widen(k, order).mT * (D**-0.5 if scale is None else scale)
    if causal:
        shift = S - T if aligned == "last" else 0
        scores = scores.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(shift), -torch.inf)
    return scores.softmax(-1) @ widen(v, values)


def _by_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right, and written differently: einsum over the group, one query at a time."""
    K, T, S = k.shape[1], q.shape[2], k.shape[2]
    grouped, outs = q.unflatten(1, (K, -1)), []
    for i in range(T):
        end = i + S - T + 1
        s = torch.einsum("bkgd,bksd->bkgs", grouped[..., i, :], k[:, :, :end]) / math.sqrt(
            q.shape[-1]
        )
        outs.append(torch.einsum("bkgs,bksd->bkgd", s.softmax(-1), v[:, :, :end]))
    return torch.stack(outs, 3).flatten(1, 2)


def _attend_trial(
    label: str,
    H: int,
    K: int,
    T: int,
    S: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
) -> Trial:
    def make() -> tuple[Tensor, ...]:
        tensors = []
        for place, (heads, length) in enumerate(((H, T), (K, S), (K, S))):
            shape = (2, length, heads, 8) if strided else (2, heads, length, 8)
            x = _numbers(*shape, seed=seed + place, dtype=dtype)
            tensors.append((x.transpose(1, 2) if strided else x).requires_grad_())
        return tuple(tensors)

    return Trial(label, make)


check_grouped_attention = Exercise(
    function="grouped_attention",
    title="Grouped attention without a wide tensor",
    dots=2,
    minutes=20,
    reference=lambda q, k, v: causal_attention(q, k, v, backend="blocked"),
    trials=(
        _attend_trial("4 query heads over 4 kv heads", 4, 4, 5, 5, 0),
        _attend_trial("6 query heads over 2 kv heads", 6, 2, 5, 5, 10),
        _attend_trial("6 over 3, float64, odd length", 6, 3, 7, 7, 20, torch.float64),
        _attend_trial("8 over 1", 8, 1, 4, 4, 30),
        _attend_trial("strided, as a projection leaves them", 6, 2, 5, 5, 40, strided=True),
        _attend_trial("3 queries, the last of 9 positions", 6, 2, 3, 9, 50, torch.float64),
        _attend_trial("one query, one key", 4, 2, 1, 1, 60, torch.float64),
    ),
    mistakes=(
        Mistake(
            "groups in the wrong order",
            "right with equal heads and with one kv head, wrong between. Which kv head does query head 1 read?",
            lambda q, k, v: _attend(q, k, v, order="tile", values="tile"),
        ),
        Mistake(
            "values in the wrong order",
            "the keys are matched rightly, but the values come from another kv head: both follow one rule.",
            lambda q, k, v: _attend(q, k, v, values="tile"),
        ),
        Mistake(
            "aligned at the first key",
            "right only where T = S. The queries are the last T of the S positions.",
            lambda q, k, v: _attend(q, k, v, aligned="first"),
        ),
        Mistake(
            "no causal mask",
            "queries see keys that come after them.",
            lambda q, k, v: _attend(q, k, v, causal=False),
        ),
        Mistake(
            "no scale",
            "the scores were not divided by √D.",
            lambda q, k, v: _attend(q, k, v, scale=1.0),
        ),
    ),
    alternatives=(_by_rows, lambda q, k, v: _attend(q, k, v)),
    hints=(
        "q.reshape(B, K, G·T, D) puts the heads of each group below one another.",
        "The scores are then (B, K, G·T, S). Split them into (B, K, G, T, S) before the mask, which is (T, S).",
        "Merge G and T again, multiply with v, and reshape to (B, H, T, D).",
    ),
)


# 3. The gradient of a shared head -------------------------------------------------------------------------------------


def _gradients_reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach()[None].requires_grad_() for x in (q, k, v)]
    out = causal_attention(*leaves, backend="blocked")
    return tuple(g[0] for g in torch.autograd.grad(out, leaves, dout[None]))


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    gather: str = "sum",
    delta: bool = True,
    scale: bool = True,
) -> tuple[Tensor, ...]:
    """Head by head over repeated keys, gathered at the end."""
    T, D, K = *q.shape[1:], k.shape[0]
    wide_k, wide_v = (repeat_kv(x[None], q.shape[0] // K)[0] for x in (k, v))
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    p = (q @ wide_k.mT / math.sqrt(D)).masked_fill(hidden, -torch.inf).softmax(-1)
    dp = dout @ wide_v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True) * delta) * (D**-0.5 if scale else 1.0)

    def narrow(x: Tensor) -> Tensor:
        if gather == "tile":
            return x.unflatten(0, (-1, K)).sum(0)
        groups = x.unflatten(0, (K, -1))
        one_head = {"first": groups[:, 0], "last": groups[:, -1]}
        return {"sum": groups.sum(1), "mean": groups.mean(1), **one_head}[gather]

    return ds @ wide_k, narrow(ds.mT @ q), narrow(p.mT @ dout)


def _gradients_trial(
    label: str, H: int, K: int, T: int, D: int, seed: int, dtype: torch.dtype = torch.float64
) -> Trial:
    def make() -> tuple[Tensor, ...]:
        heads = (H, K, K, H)
        return tuple(
            _numbers(n, T, D, seed=seed + place, dtype=dtype) for place, n in enumerate(heads)
        )

    return Trial(label, make)


check_shared_gradients = Exercise(
    function="shared_gradients",
    title="The gradient of a shared head",
    dots=3,
    minutes=30,
    reference=_gradients_reference,
    trials=(
        _gradients_trial("4 query heads over 4 kv heads", 4, 4, 5, 6, 0),
        _gradients_trial("6 over 2", 6, 2, 5, 6, 10),
        _gradients_trial("6 over 3, odd sizes", 6, 3, 7, 3, 20),
        _gradients_trial("8 over 1, float32", 8, 1, 4, 8, 30, torch.float32),
        _gradients_trial("one token", 4, 2, 1, 4, 40),
    ),
    mistakes=(
        Mistake(
            "mean over the group",
            "dk and dv are too small by G. A head that is used G times hears from all of them: its gradient is a sum.",
            lambda *inputs: _gradients(*inputs, gather="mean"),
        ),
        Mistake(
            "one head of the group",
            "dk and dv hold what the first head of each group sends back; the others of the group read the same keys.",
            lambda *inputs: _gradients(*inputs, gather="first"),
        ),
        Mistake(
            "last head of the group",
            "dk and dv hold what the last head of each group sends back. In a loop over the heads, add to what is there.",
            lambda *inputs: _gradients(*inputs, gather="last"),
        ),
        Mistake(
            "summed over the wrong heads",
            "dk and dv sum heads that are K apart. The heads of a group are neighbours.",
            lambda *inputs: _gradients(*inputs, gather="tile"),
        ),
        Mistake(
            "√D forgotten",
            "dv is right; dq and dk are too large by √D.",
            lambda *inputs: _gradients(*inputs, scale=False),
        ),
        Mistake(
            "Δ forgotten",
            "a weight that grows takes from the others in its row: dS = P ∘ (dP − Δ), with Δ the dot product of dout and the output.",
            lambda *inputs: _gradients(*inputs, delta=False),
        ),
    ),
    alternatives=(lambda *inputs: _gradients(*inputs),),
    hints=(
        "Fold first: q.reshape(K, G·T, D), and dout in the same way. The mask must then be repeated G times, (G·T, T).",
        "From there it is chapter 4's backward pass with a batch of K heads.",
        "dk = dSᵀ rows: its inner dimension runs over the heads of the group and their queries.",
    ),
)


# 4. Merge the heads of a trained model --------------------------------------------------------------------------------


def _pool(
    weight: Tensor,
    n_heads: int,
    n_kv_heads: int,
    *,
    how: str = "mean",
    order: str = "neighbours",
    layout: str = "keys first",
) -> Tensor:
    D = weight.shape[0] // (2 * n_heads)
    if layout == "keys first":
        heads = weight.view(2, n_heads, D, -1)
    else:  # a key head, its value head, the next key head …
        heads = weight.view(n_heads, 2, D, -1).transpose(0, 1)
    G = n_heads // n_kv_heads
    if order == "neighbours":
        groups = heads.unflatten(1, (n_kv_heads, G))  # (2, K, G, D, C)
    else:
        groups = heads.unflatten(1, (G, n_kv_heads)).transpose(1, 2)
    one = {"mean": groups.mean(2), "sum": groups.sum(2), "first": groups[:, :, 0]}[how]
    if layout != "keys first":
        one = one.transpose(0, 1)
    return one.reshape(2 * n_kv_heads * D, -1)


def _pool_by_matrix(weight: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
    """Right, written differently: a matrix with 1/G where a head belongs to a group."""
    G = n_heads // n_kv_heads
    member = torch.arange(n_kv_heads)[:, None] == torch.arange(n_heads) // G  # (K, H)
    keys, values = weight.chunk(2)
    parts = []
    for part in (keys, values):
        heads = part.reshape(n_heads, -1)  # (H, D·C)
        parts.append((member.to(heads.dtype) / G @ heads).reshape(-1, weight.shape[1]))
    return torch.cat(parts)


def _pool_trial(
    label: str, H: int, K: int, D: int, C: int, seed: int, dtype: torch.dtype = torch.float64
) -> Trial:
    return Trial(
        label, lambda: (_numbers(2 * H * D, C, seed=seed, dtype=dtype).requires_grad_(), H, K)
    )


check_pooled_weight = Exercise(
    function="pooled_weight",
    title="Merge the heads of a trained model",
    dots=2,
    minutes=15,
    reference=lambda weight, n_heads, n_kv_heads: _pool(weight, n_heads, n_kv_heads),
    trials=(
        _pool_trial("8 heads into 4, head_dim 6", 8, 4, 6, 10, 0, torch.float32),
        _pool_trial("6 into 2, head_dim 5", 6, 2, 5, 7, 10),
        _pool_trial("6 into 3, head_dim 1", 6, 3, 1, 6, 20),
        _pool_trial("4 into 1", 4, 1, 3, 12, 30),
        _pool_trial("4 into 4, which changes nothing", 4, 4, 3, 12, 40),
    ),
    mistakes=(
        Mistake(
            "heads that are K apart",
            "each new head averages old heads that are K apart. A group's heads are neighbours: h // G.",
            lambda *inputs: _pool(*inputs, order="apart"),
        ),
        Mistake(
            "keys mixed with values",
            "the rows were read as key head, value head, key head, … All keys' rows come first, then all values'.",
            lambda *inputs: _pool(*inputs, layout="pairs"),
        ),
        Mistake(
            "sum",
            "the new heads are too large by G: asked for is the mean. Scores would grow by G as well.",
            lambda *inputs: _pool(*inputs, how="sum"),
        ),
        Mistake(
            "first head kept",
            "each group keeps its first head alone. Asked for is the mean of all.",
            lambda *inputs: _pool(*inputs, how="first"),
        ),
    ),
    alternatives=(_pool_by_matrix,),
    hints=(
        "The rows are (2, H, D): keys or values, head, number. D follows from the number of rows.",
        "Split H into (K, G), in this order.",
        "weight.view(2, K, G, D, C).mean(dim=2), then back to two dimensions.",
    ),
)


# 5. Find the bug ------------------------------------------------------------------------------------------------------


def _step(
    q: Tensor, k: Tensor, v: Tensor, *, rows: str = "neighbours", back: str = "neighbours"
) -> Tensor:
    (B, H, _, D), K = q.shape, k.shape[1]
    grouped = (
        q.reshape(B, K, H // K, D)
        if rows == "neighbours"
        else q.reshape(B, H // K, K, D).transpose(1, 2)
    )
    out = (grouped @ k.mT / math.sqrt(D)).softmax(-1) @ v  # (B, K, G, D)
    return (out if back == "neighbours" else out.transpose(1, 2)).reshape(B, H, 1, D)


def _step_trial(
    label: str, H: int, K: int, S: int, seed: int, dtype: torch.dtype = torch.float64
) -> Trial:
    def make() -> tuple[Tensor, ...]:
        shapes = ((2, H, 1, 8), (2, K, S, 8), (2, K, S, 8))
        return tuple(
            _numbers(*shape, seed=seed + place, dtype=dtype).requires_grad_()
            for place, shape in enumerate(shapes)
        )

    return Trial(label, make)


check_repaired_step = Exercise(
    function="repaired_step",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=lambda q, k, v: causal_attention(q, k, v, backend="blocked"),
    trials=(
        _step_trial("4 query heads over 4 kv heads", 4, 4, 9, 0),
        _step_trial("8 over 1", 8, 1, 9, 10),
        _step_trial("8 over 4, as in this book's model", 8, 4, 9, 20, torch.float32),
        _step_trial("6 over 2", 6, 2, 7, 30),
        _step_trial("6 over 3, one key", 6, 3, 1, 40),
    ),
    mistakes=(
        Mistake(
            "heads that are K apart",
            "right with H = K and with K = 1, wrong between. With 8 heads over 4, which rows stand in the matrix of kv head 0?",
            lambda q, k, v: _step(q, k, v, rows="apart", back="apart"),
        ),
        Mistake(
            "mended on the way in only",
            "now each query meets its own keys, but the outputs are put back in another order than the queries came.",
            lambda q, k, v: _step(q, k, v, back="apart"),
        ),
        Mistake(
            "mended on the way out only",
            "the outputs are put back in order, but the queries were grouped in another one.",
            lambda q, k, v: _step(q, k, v, rows="apart"),
        ),
    ),
    alternatives=(
        lambda q, k, v: _step(q, k, v),
        lambda q, k, v: _attend(q, k, v),
        lambda q, k, v: _by_rows(q, k, v),
    ),
    hints=(
        "Write down which query heads stand in `rows` for kv head 0, with H = 6 and K = 2.",
        "Neighbouring heads form a group: K is the outer dimension, G the inner one.",
        "Both reshapes change: on the way in and on the way out.",
    ),
)
