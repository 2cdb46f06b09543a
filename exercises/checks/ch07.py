"""Checks of chapter 7: attention sinks.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim.
"""

import math

import torch
from torch import Tensor

from gptoss.model.attention import SINK_CLAMP_MAX, SINK_CLAMP_MIN, causal_attention

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "07_sinks"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. A softmax with one more term ------------------------------------------------------------------------------------


def _with_column(scores: Tensor, b: Tensor) -> Tensor:
    column = b[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)


def _softmax_reference(scores: Tensor, b: Tensor) -> Tensor:
    return _with_column(scores, b)[..., :-1]


def _softmax_by_gate(scores: Tensor, b: Tensor) -> Tensor:
    total = torch.logaddexp(torch.logsumexp(scores, -1), b[:, None])
    return torch.exp(scores - total[..., None])


def _softmax_unshifted_sink(scores: Tensor, b: Tensor) -> Tensor:
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    e = torch.exp(scores - top)
    return e / (e.sum(-1, keepdim=True) + b.exp()[:, None, None])


def _softmax_maximum_of_scores(scores: Tensor, b: Tensor, *, detach: bool = False) -> Tensor:
    top = (scores.detach() if detach else scores).amax(-1, keepdim=True).clamp(min=-1e30)
    e = torch.exp(scores - top)
    return e / (e.sum(-1, keepdim=True) + torch.exp(b[:, None, None] - top))


def _softmax_no_maximum(scores: Tensor, b: Tensor) -> Tensor:
    e = torch.exp(scores)
    return e / (e.sum(-1, keepdim=True) + b.exp()[:, None, None])


def _softmax_fixed_one(scores: Tensor, b: Tensor) -> Tensor:
    return _softmax_reference(scores, b * 0)


def _softmax_renormalised(scores: Tensor, b: Tensor) -> Tensor:
    weights = _softmax_reference(scores, b)
    return weights / weights.sum(-1, keepdim=True)


def _scores(
    *shape: int,
    seed: int,
    shift: float = 0.0,
    sink_shift: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Trial:
    at = shift if sink_shift is None else sink_shift

    def make() -> tuple[Tensor, Tensor]:
        scores = _numbers(*shape, seed=seed, dtype=dtype) + shift
        b = _numbers(shape[0], seed=seed + 1, dtype=dtype) + at
        return scores.requires_grad_(), b.requires_grad_()

    apart = "" if sink_shift is None else f" and b near {at:g}"
    return Trial(f"scores {shape} near {shift:g}{apart}, {str(dtype).removeprefix('torch.')}", make)


def _hidden_scores() -> tuple[Tensor, Tensor]:
    scores = _numbers(2, 4, 4, seed=5).masked_fill(torch.ones(4, 4).triu().bool(), -torch.inf)
    # no gradient asked for: torch.logsumexp has none in a row of −∞, and an answer may well be built on it
    return scores, torch.tensor([0.5, -3.0])


_B_IN_MAXIMUM = (
    "b may lie 300 above all scores, and exp(300) does not fit into float32. b is one of the exponents: the maximum "
    "is over it too."
)

check_softmax_with_sink = Exercise(
    function="softmax_with_sink",
    title="A softmax with one more term",
    dots=1,
    minutes=10,
    reference=_softmax_reference,
    trials=(
        _scores(2, 3, 4, seed=0),
        _scores(3, 5, 7, seed=1, sink_shift=300.0),
        _scores(2, 3, 5, seed=2, shift=300.0),
        _scores(2, 3, 5, seed=3, shift=-300.0),
        Trial("a first query that sees no key (its scores are all −∞)", _hidden_scores),
        _scores(1, 1, 1, seed=4, dtype=torch.float64),
    ),
    mistakes=(
        Mistake(
            "sink not shifted",
            "the maximum was taken off the scores but not off b. Every exponent in the fraction must lose the same number.",
            _softmax_unshifted_sink,
        ),
        Mistake(
            "no maximum",
            "exp(300) does not fit into float32. Take the largest exponent (b is one of them) off all of them first.",
            _softmax_no_maximum,
        ),
        Mistake(
            "maximum of the scores alone",
            _B_IN_MAXIMUM,
            _softmax_maximum_of_scores,
        ),
        Mistake(
            "maximum of the scores alone, detached",
            _B_IN_MAXIMUM,
            lambda scores, b: _softmax_maximum_of_scores(scores, b, detach=True),
        ),
        Mistake(
            "b ignored",
            "the denominator has exp(0) = 1 where exp(b) belongs.",
            _softmax_fixed_one,
        ),
        Mistake(
            "renormalised",
            "the weights sum to 1 again. The sink's share must stay missing: that is all that it does.",
            _softmax_renormalised,
        ),
        Mistake(
            "sink column kept",
            "the sink's own column is still there. Cut it off after the softmax.",
            _with_column,
        ),
    ),
    alternatives=(_softmax_by_gate,),
    hints=(
        "Put b beside the scores, as if it were the score of one more key. What does softmax do then?",
        "torch.cat needs b with the shape (H, T, 1): b[:, None, None].expand(…).",
        "Softmax over S + 1 columns, then keep the first S.",
    ),
)


# 2. The gate: attention with a sink from a plain attention and its log-sum-exp ----------------------------------------


def _visible(T: int, window: int | None) -> Tensor:
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    return (distance >= 0) & (distance < (window or T))


def _gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    window: int | None,
    *,
    detach: bool = False,
    tile: bool = False,
    extra: int = 0,
    scale: float | None = None,
    value: bool = False,
    probability: bool = False,
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    if tile:
        k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = _visible(q.shape[2], None if window is None else window + extra)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    if detach:
        lse = lse.detach()
    gate = torch.sigmoid(lse - b[:, None, None])
    out = torch.softmax(scores, -1) @ v
    if probability:
        return out * (1 - gate)
    return out * gate + ((1 - gate) * v.mean(2, keepdim=True) if value else 0)


def _attention_trial(
    label: str,
    heads: int,
    kv_heads: int,
    T: int,
    D: int,
    window: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    strided: bool = False,
    size: float = 1.0,
) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor, Tensor, int | None]:
        tensors = []
        for place, h in enumerate((heads, kv_heads, kv_heads)):
            shape = (2, T, h, D) if strided else (2, h, T, D)
            x = size * _numbers(*shape, seed=3 * seed + place, dtype=dtype)
            tensors.append((x.transpose(1, 2) if strided else x).requires_grad_())
        b = _numbers(heads, seed=seed + 50, dtype=dtype).requires_grad_()
        return tensors[0], tensors[1], tensors[2], b, window

    return Trial(label, make)


def _by_rows(q: Tensor, k: Tensor, v: Tensor, b: Tensor, window: int | None) -> Tensor:
    """Right, and written quite differently: one query at a time, a sink of value zero as a real row."""
    B, H, T, D = q.shape
    group = H // k.shape[1]
    heads = []
    for h in range(H):
        keys, values, rows = k[:, h // group], v[:, h // group], []
        for i in range(T):
            first = 0 if window is None else max(0, i - window + 1)
            seen, worth = keys[:, first : i + 1], values[:, first : i + 1]
            score = torch.einsum("bd,bsd->bs", q[:, h, i], seen) / math.sqrt(D)
            score = torch.cat((score, b[h].expand(B, 1)), 1)
            worth = torch.cat((worth, torch.zeros_like(worth[:, :1])), 1)
            rows.append(torch.einsum("bs,bsd->bd", score.softmax(1), worth))
        heads.append(torch.stack(rows, 1))
    return torch.stack(heads, 1)


check_sink_attention = Exercise(
    function="sink_attention",
    title="The sink as a gate",
    dots=2,
    minutes=20,
    reference=lambda q, k, v, b, window: causal_attention(q, k, v, window, b),
    trials=(
        _attention_trial("4 heads, as many kv heads, no window", 4, 4, 6, 8),
        _attention_trial("6 query heads over 2 kv heads", 6, 2, 5, 8, seed=1),
        _attention_trial("window of 3 over 9 tokens", 2, 1, 9, 4, window=3, seed=2),
        _attention_trial("window of 1: each token sees itself alone", 2, 2, 4, 4, window=1, seed=3),
        _attention_trial("strided inputs, odd length", 6, 3, 7, 6, strided=True, seed=4),
        _attention_trial("one token, float64", 2, 1, 1, 4, dtype=torch.float64, seed=5),
        _attention_trial(
            "large scores, float64", 2, 2, 6, 8, dtype=torch.float64, size=6.0, seed=6
        ),
    ),
    mistakes=(
        Mistake(
            "LSE detached",
            "the log-sum-exp carries no gradient. The output is right without it; the gradients of q and k are not.",
            lambda q, k, v, b, window: _gated(q, k, v, b, window, detach=True),
        ),
        Mistake(
            "group order swapped",
            "query head h read kv head h mod K. It must read h // (H/K): repeat_interleave, not repeat. Equal head counts hide this.",
            lambda q, k, v, b, window: _gated(q, k, v, b, window, tile=True),
        ),
        Mistake(
            "window off by one",
            "the window has one key too many. W keys, the query's own included: 0 ≤ i − j < W.",
            lambda q, k, v, b, window: _gated(q, k, v, b, window, extra=1),
        ),
        Mistake(
            "window one short",
            "the window has one key too few. W keys, the query's own included: 0 ≤ i − j < W.",
            lambda q, k, v, b, window: _gated(q, k, v, b, window and max(window - 1, 1)),
        ),
        Mistake(
            "sink with a value",
            "the sink adds something to the output. Its value is zero: it takes mass and gives nothing back.",
            lambda q, k, v, b, window: _gated(q, k, v, b, window, value=True),
        ),
        Mistake(
            "gate upside down",
            "the output was multiplied by the sink's share instead of what the sink leaves: σ(b − lse) for σ(lse − b).",
            lambda q, k, v, b, window: _gated(q, k, v, b, window, probability=True),
        ),
        Mistake(
            "no scale",
            "the scores were not divided by √D.",
            lambda q, k, v, b, window: _gated(q, k, v, b, window, scale=1.0),
        ),
    ),
    alternatives=(_by_rows,),
    hints=(
        "Start with attention as if there were no sink. Keep the masked scores: you need them twice.",
        "lse = torch.logsumexp(scores, -1) has shape (B, H, T). The gate is one number a query.",
        "out · torch.sigmoid(lse − b[:, None])[..., None], and no .detach() anywhere.",
    ),
)


# 3. The backward pass by hand -----------------------------------------------------------------------------------------


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    dout: Tensor,
    *,
    sign: float = -1.0,
    clamp: bool = True,
    delta: float = 1.0,
    scale: float | None = None,
    sinkless: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    T, D = q.shape
    sink = b.clamp(SINK_CLAMP_MIN, SINK_CLAMP_MAX)
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(~_visible(T, None), -torch.inf)
    total = torch.logaddexp(torch.logsumexp(scores, -1), sink)
    P = torch.exp(scores - total[:, None])
    p_sink = torch.exp(sink - total)
    dot = (dout * (P @ v)).sum(-1)
    if sinkless:
        P = torch.softmax(scores, -1)
    dS = P * (dout @ v.mT - delta * dot[:, None])
    scale = 1 / math.sqrt(D) if scale is None else scale
    inside = ((b >= SINK_CLAMP_MIN) & (b <= SINK_CLAMP_MAX)).to(b.dtype) if clamp else 1.0
    return scale * dS @ k, scale * dS.mT @ q, P.mT @ dout, sign * (p_sink * dot).sum() * inside


def _backward_by_autograd(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    raw = b.detach().clone().requires_grad_()
    heads = [x[None, None] for x in leaves]
    sink = raw.clamp(SINK_CLAMP_MIN, SINK_CLAMP_MAX)[None]
    out = causal_attention(heads[0], heads[1], heads[2], None, sink)[0, 0]
    return torch.autograd.grad(out, (*leaves, raw), dout)


def _backward_jacobian(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Right, written differently: the full Jacobian of a softmax over S + 1 columns, row by row."""
    T, D = q.shape
    sink = b.clamp(SINK_CLAMP_MIN, SINK_CLAMP_MAX)
    dq, dk, dv, db = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), b * 0
    for i in range(T):
        p = torch.cat((k[: i + 1] @ q[i] / math.sqrt(D), sink[None])).softmax(0)
        jacobian = torch.diag(p) - torch.outer(p, p)
        dp = torch.cat((v[: i + 1] @ dout[i], b[None] * 0))
        ds = jacobian @ dp
        dq[i] = ds[:-1] @ k[: i + 1] / math.sqrt(D)
        dk[: i + 1] += torch.outer(ds[:-1], q[i]) / math.sqrt(D)
        dv[: i + 1] += torch.outer(p[:-1], dout[i])
        db = db + ds[-1]
    return dq, dk, dv, db if sink == b else db * 0


def _backward_trial(label: str, T: int, D: int, b: float, seed: int, dtype: torch.dtype) -> Trial:
    def make() -> tuple[Tensor, ...]:
        q, k, v, dout = (_numbers(T, D, seed=seed + n, dtype=dtype) for n in range(4))
        return q, k, v, torch.tensor(b, dtype=dtype), dout

    return Trial(label, make)


check_sink_gradients = Exercise(
    function="sink_gradients",
    title="The backward pass by hand",
    dots=3,
    minutes=30,
    reference=_backward_by_autograd,
    trials=(
        _backward_trial("5 tokens, b = 0.5", 5, 4, 0.5, 0, torch.float32),
        _backward_trial("one token", 1, 6, 0.0, 10, torch.float64),
        _backward_trial("7 tokens, b = −3", 7, 3, -3.0, 20, torch.float64),
        _backward_trial("b = 16, beyond the clamp", 4, 4, 16.0, 30, torch.float64),
        _backward_trial("b = −11, beyond the clamp", 4, 4, -11.0, 40, torch.float64),
    ),
    mistakes=(
        Mistake(
            "clamp ignored",
            "b = 16 lies outside the clamp. A clamp is flat there: what is the slope of a flat line?",
            lambda *a: _backward(*a, clamp=False),
        ),
        Mistake(
            "sign of db",
            "db has the wrong sign. More sink means less output: where Δ = do·o is positive, db is negative.",
            lambda *a: _backward(*a, sign=1.0),
        ),
        Mistake(
            "delta left out",
            "ds lacks the term with Δ = do·o. Raising one score lowers all other shares.",
            lambda *a: _backward(*a, delta=0.0),
        ),
        Mistake(
            "scale forgotten",
            "dq and dk lack the factor 1/√D that turned q·k into a score.",
            lambda *a: _backward(*a, scale=1.0),
        ),
        Mistake(
            "p without the sink",
            "p sums to 1 over the keys. It must be exp(s − L′), with the sink inside L′.",
            lambda *a: _backward(*a, sinkless=True),
        ),
    ),
    alternatives=(_backward_jacobian,),
    hints=(
        "Go forward first: scores, L′ = logaddexp(lse, clamped b), p = exp(s − L′), o = p v.",
        "With delta = (dout · o) summed over the head dimension: ds = p ∘ (dout vᵀ − delta[:, None]).",
        "db = −Σ exp(b − L′)·delta, times 1 inside the clamp and 0 outside.",
    ),
)


# 4. Two halves of the keys --------------------------------------------------------------------------------------------


def _merge_reference(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, b: Tensor
) -> Tensor:
    shares = torch.softmax(torch.stack((lse_a, lse_b, b.expand_as(lse_a))), 0)
    return shares[0][:, None] * out_a + shares[1][:, None] * out_b


def _merge_by_gate(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, b: Tensor) -> Tensor:
    share = torch.sigmoid(lse_a - lse_b)[:, None]
    both = share * out_a + (1 - share) * out_b
    return both * torch.sigmoid(torch.logaddexp(lse_a, lse_b) - b)[:, None]


def _merge_twice(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, b: Tensor) -> Tensor:
    a = out_a * torch.sigmoid(lse_a - b)[:, None]
    other = out_b * torch.sigmoid(lse_b - b)[:, None]
    share = torch.sigmoid(lse_a - lse_b)[:, None]
    return share * a + (1 - share) * other


def _merge_two_sinks(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, b: Tensor
) -> Tensor:
    return _merge_reference(out_a, lse_a, out_b, lse_b, b + math.log(2))


def _merge_mean(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, b: Tensor) -> Tensor:
    gate = torch.sigmoid(torch.logaddexp(lse_a, lse_b) - b)[:, None]
    return (out_a + out_b) / 2 * gate


def _merge_unstable(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, b: Tensor
) -> Tensor:
    ea, eb = lse_a.exp()[:, None], lse_b.exp()[:, None]
    return (ea * out_a + eb * out_b) / (ea + eb + b.exp())


def _merge_forgotten(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, b: Tensor
) -> Tensor:
    return _merge_reference(out_a, lse_a, out_b, lse_b, b * 0 - 1e30)


def _merge_trial(
    label: str, T: int, D: int, seed: int, shift: float = 0.0, dtype: torch.dtype = torch.float32
) -> Trial:
    def make() -> tuple[Tensor, ...]:
        out_a, out_b = (_numbers(T, D, seed=seed + n, dtype=dtype) for n in (0, 1))
        lse_a, lse_b = (2 * _numbers(T, seed=seed + n, dtype=dtype) + shift for n in (2, 3))
        b = torch.tensor(0.7 + shift, dtype=dtype)
        return tuple(x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b, b))

    return Trial(label, make)


check_merge_halves = Exercise(
    function="merge_halves",
    title="Two halves of the keys, one sink",
    dots=2,
    minutes=15,
    reference=_merge_reference,
    trials=(
        _merge_trial("5 queries", 5, 4, 0),
        _merge_trial("one query, float64", 1, 3, 10, dtype=torch.float64),
        _merge_trial("log-sum-exps near 200", 3, 4, 20, shift=200.0),
        _merge_trial("log-sum-exps near −200", 3, 4, 30, shift=-200.0),
    ),
    mistakes=(
        Mistake(
            "sink in each half",
            "each half was gated by the sink on its own. There is one sink for all keys: merge first, then gate.",
            _merge_twice,
        ),
        Mistake(
            "sink counted twice",
            "exp(b) stands twice in the denominator. One sink serves both halves.",
            _merge_two_sinks,
        ),
        Mistake(
            "plain mean",
            "the halves were averaged. Each half's share is exp of its own log-sum-exp over the sum of both.",
            _merge_mean,
        ),
        Mistake(
            "no maximum",
            "exp(200) does not fit into float32. Use a softmax or a sigmoid of differences.",
            _merge_unstable,
        ),
        Mistake(
            "sink forgotten",
            "the halves are merged rightly, but the sink takes no share.",
            _merge_forgotten,
        ),
    ),
    alternatives=(_merge_by_gate,),
    hints=(
        "A half is one key whose score is its lse and whose value is its out. The sink is one more, of value zero.",
        "So three scores enter a softmax: lse_a, lse_b and b.",
        "torch.stack((lse_a, lse_b, b.expand_as(lse_a))).softmax(0); drop the third share.",
    ),
)


# 5. What the mask costs -----------------------------------------------------------------------------------------------


def _mask_trial(n_heads: int, T: int, itemsize: int) -> Trial:
    return Trial(
        f"H = {n_heads}, T = {T}, {itemsize} bytes a number", lambda: (n_heads, T, itemsize)
    )


check_mask_bytes = Exercise(
    function="mask_bytes",
    title="What the mask costs",
    dots=1,
    minutes=5,
    reference=lambda n_heads, T, itemsize: n_heads * T * (T + 1) * itemsize,
    trials=(
        _mask_trial(8, 4096, 2),
        _mask_trial(8, 131072, 2),
        _mask_trial(1, 3, 4),
        _mask_trial(5, 1, 8),
    ),
    mistakes=(
        Mistake(
            "sink column forgotten",
            "the mask is (H, T, T + 1): the sink has a column of its own.",
            lambda n_heads, T, itemsize: n_heads * T * T * itemsize,
        ),
        Mistake(
            "one head",
            "b differs from head to head, so every head needs its own mask.",
            lambda n_heads, T, itemsize: T * (T + 1) * itemsize,
        ),
        Mistake(
            "triangle only",
            "a dense mask stores the hidden pairs as well: they hold −∞, and −∞ takes as many bytes as 0.",
            lambda n_heads, T, itemsize: n_heads * (T * (T + 1) // 2 + T) * itemsize,
        ),
        Mistake(
            "GiB",
            "the answer is asked for in bytes; this is GiB.",
            lambda n_heads, T, itemsize: n_heads * T * (T + 1) * itemsize / 2**30,
        ),
    ),
    alternatives=(
        lambda n_heads, T, itemsize: (
            torch.empty(n_heads, T, T + 1, device="meta").numel() * itemsize
        ),
    ),
    hints=(
        "How many numbers has a tensor of shape (H, T, T + 1)?",
        "Multiply the three sizes, then the bytes of one number.",
    ),
)


# 6. Find the bug ------------------------------------------------------------------------------------------------------


def _column_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    *,
    scaled: bool = False,
    scale: float | None = None,
    sigma: bool = False,
    hidden: bool = False,
) -> Tensor:
    T, D = q.shape[-2:]
    scale = D**-0.5 if scale is None else scale
    scores = (q @ k.mT).masked_fill(~_visible(T, None), -torch.inf)
    column = b[:, None, None].expand(*scores.shape[:-1], 1)
    if hidden:
        column = column.masked_fill(torch.arange(T)[:, None] == 0, -torch.inf)
    if scaled:
        weights = torch.softmax(torch.cat((scores, column), -1) * scale, -1)
    else:
        weights = torch.softmax(torch.cat((scores * scale, column), -1), -1)
    return weights[..., :T] @ v


def _bug_trial(label: str, H: int, T: int, D: int, seed: int, dtype: torch.dtype) -> Trial:
    def make() -> tuple[Tensor, ...]:
        q, k, v = (_numbers(1, H, T, D, seed=seed + n, dtype=dtype) for n in range(3))
        b = 2 * _numbers(H, seed=seed + 3, dtype=dtype) + 1
        return tuple(x.requires_grad_() for x in (q, k, v, b))

    return Trial(label, make)


check_repaired_attention = Exercise(
    function="repaired_attention",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=lambda q, k, v, b: causal_attention(q, k, v, None, b),
    trials=(
        _bug_trial("head_dim 16", 2, 6, 16, 0, torch.float32),
        _bug_trial("head_dim 3, odd length", 3, 5, 3, 10, torch.float64),
        _bug_trial("head_dim 1, where dividing by √D does nothing", 2, 4, 1, 20, torch.float64),
        _bug_trial("one token", 2, 1, 8, 30, torch.float64),
    ),
    mistakes=(
        Mistake(
            "sink scaled",
            "the output is right for head_dim 1 alone. Which number does √D reach that is no product of a query and a key?",
            lambda q, k, v, b: _column_attention(q, k, v, b, scaled=True),
        ),
        Mistake(
            "scale removed",
            "now nothing is divided by √D. The scores still must be; b must not.",
            lambda q, k, v, b: _column_attention(q, k, v, b, scale=1.0),
        ),
        Mistake(
            "no sink for the first query",
            "the first query lost its sink. Causality hides later keys; the sink is no key and every query sees it.",
            lambda q, k, v, b: _column_attention(q, k, v, b, hidden=True),
        ),
    ),
    alternatives=(
        lambda q, k, v, b: _column_attention(q, k, v, b),
        lambda q, k, v, b: _column_attention(q, k, v, b * q.shape[-1] ** 0.5, scaled=True),
        lambda q, k, v, b: _gated(q, k, v, b, None),
    ),
    hints=(
        "Print the weights for head_dim 1 and 16 with q = k = 0. Should the sink's share depend on head_dim?",
        "Follow b from the argument to the softmax. What is done to it on the way?",
        "Scale the scores before the sink's column is put beside them.",
    ),
)
