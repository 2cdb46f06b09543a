"""Checks of chapter 4: attention.

Shapes: B batch, T queries, S keys, H heads, D head_dim; n keys of one block.
"""

import math

import torch
from torch import Tensor

from gptoss.model.attention import causal_attention, count_visible_pairs, manual_causal_attention

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "04_attention"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. A softmax for rows that may be empty ------------------------------------------------------------------------------


def _softmax_reference(scores: Tensor, visible: Tensor) -> Tensor:
    empty = ~visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf).masked_fill(empty, 0.0), -1)
    return weights.masked_fill(~visible, 0.0)


def _softmax_by_sums(scores: Tensor, visible: Tensor) -> Tensor:
    top = scores.detach().masked_fill(~visible, -1e30).amax(-1, keepdim=True).clamp(min=-1e29)
    e = torch.exp((scores - top).masked_fill(~visible, 0.0)) * visible
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def _softmax_nan(scores: Tensor, visible: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)


def _softmax_cleaned(scores: Tensor, visible: Tensor) -> Tensor:
    hidden = torch.zeros_like(scores).masked_fill(~visible, -torch.inf)
    return torch.nan_to_num(torch.softmax(scores + hidden, -1), 0.0)


def _softmax_finite(scores: Tensor, visible: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(~visible, -1e9), -1)


def _softmax_cast(scores: Tensor, visible: Tensor) -> Tensor:
    return torch.softmax(scores + visible.to(scores.dtype), -1)


def _softmax_masked_after(scores: Tensor, visible: Tensor) -> Tensor:
    return torch.softmax(scores, -1).masked_fill(~visible, 0.0)


def _softmax_no_maximum(scores: Tensor, visible: Tensor) -> Tensor:
    e = torch.exp(scores) * visible
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def _softmax_trial(
    label: str,
    T: int,
    S: int,
    seed: int,
    shift: float = 0.0,
    empty: tuple[int, ...] = (),
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Trial:
    def make() -> tuple[Tensor, Tensor]:
        scores = 2 * _numbers(T, S, seed=seed, dtype=dtype) + shift
        visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        if not causal:
            visible = _numbers(T, S, seed=seed + 1) > 0.3
        for row in empty:
            visible[row] = False
        return scores.requires_grad_(), visible

    return Trial(label, make)


check_masked_softmax = Exercise(
    function="masked_softmax",
    title="A softmax for rows that may be empty",
    dots=1,
    minutes=10,
    reference=_softmax_reference,
    trials=(
        _softmax_trial("a causal mask, 5 × 5", 5, 5, 0),
        _softmax_trial("a first row that sees nothing", 4, 4, 1, empty=(0,)),
        _softmax_trial(
            "an arbitrary mask with empty rows, float64",
            6,
            9,
            2,
            empty=(2, 5),
            causal=False,
            dtype=torch.float64,
        ),
        _softmax_trial("scores near 300", 3, 7, 3, shift=300.0, empty=(1,)),
        _softmax_trial("scores near −300", 3, 7, 4, shift=-300.0),
        _softmax_trial("one row, one key, hidden", 1, 1, 5, empty=(0,)),
    ),
    mistakes=(
        Mistake(
            "NaN in empty rows",
            "a row without a visible key came out as NaN: there the softmax divides 0 by 0. Such a row's weights are to be 0.",
            _softmax_nan,
        ),
        Mistake(
            "NaN cleaned afterwards",
            "the NaN were swept out of the result, but the softmax's gradient in such a row is still NaN, and adding −∞ passes it on to the scores. Give the row harmless scores before the softmax.",
            _softmax_cleaned,
        ),
        Mistake(
            "large negative number",
            "a row without a visible key shares out its attention evenly: the softmax cannot tell equal numbers from zeros, however negative.",
            _softmax_finite,
        ),
        Mistake(
            "boolean cast",
            "nothing is hidden: a 1 was added to the visible scores and a 0 to the others. A hidden score must become −∞.",
            _softmax_cast,
        ),
        Mistake(
            "hidden after the softmax",
            "the visible weights of a row no longer sum to 1: hidden keys took a share of the denominator and were removed afterwards.",
            _softmax_masked_after,
        ),
        Mistake(
            "no maximum",
            "exp(300) does not fit into float32, and exp(−300) is 0 there. Take the row's largest score off first, or let torch.softmax do it.",
            _softmax_no_maximum,
        ),
    ),
    alternatives=(_softmax_by_sums,),
    hints=(
        "visible.any(dim=-1, keepdim=True) says which rows see something.",
        "An empty row may go through the softmax with any finite scores, as long as its weights are set to 0 afterwards.",
        "Fill with −∞ only where a key is hidden and the row is not empty; then the softmax; then masked_fill(~visible, 0).",
    ),
)


# 2. One step of the online softmax ------------------------------------------------------------------------------------


def _step_reference(
    m: Tensor, total: Tensor, a: Tensor, s: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new = torch.maximum(m, s.amax(-1, keepdim=True))
    top = new.masked_fill(new == -torch.inf, 0.0)
    shrink, e = torch.exp(m - top), torch.exp(s - top)
    return new, shrink * total + e.sum(-1, keepdim=True), shrink * a + e @ v


def _step_by_logs(
    m: Tensor, total: Tensor, a: Tensor, s: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Right, and written differently: the old state is one more key whose value is a and whose weight is total."""
    new = torch.cat((m, s), -1).max(-1, keepdim=True).values
    factors = torch.exp(
        torch.cat((m, s), -1) - torch.where(new.isinf(), torch.zeros_like(new), new)
    )
    l_new = (factors * torch.cat((total, torch.ones_like(s)), -1)).sum(-1, keepdim=True)
    return new, l_new, factors[:, :1] * a + torch.einsum("tn,nd->td", factors[:, 1:], v)


def _step_forgetful(
    m: Tensor, total: Tensor, a: Tensor, s: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new = torch.maximum(m, s.amax(-1, keepdim=True))
    e = torch.exp(s - new.masked_fill(new == -torch.inf, 0.0))
    return new, total + e.sum(-1, keepdim=True), a + e @ v


def _step_values_forgotten(
    m: Tensor, total: Tensor, a: Tensor, s: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new, total, _ = _step_reference(m, total, a, s, v)
    return new, total, _step_forgetful(m, total, a, s, v)[2]


def _step_block_maximum(
    m: Tensor, total: Tensor, a: Tensor, s: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new = s.amax(-1, keepdim=True)
    top = new.masked_fill(new == -torch.inf, 0.0)
    shrink, e = torch.exp(m - top), torch.exp(s - top)
    return new, shrink * total + e.sum(-1, keepdim=True), shrink * a + e @ v


def _step_upside_down(
    m: Tensor, total: Tensor, a: Tensor, s: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new = torch.maximum(m, s.amax(-1, keepdim=True))
    top = new.masked_fill(new == -torch.inf, 0.0)
    grow, e = torch.exp(top - m.masked_fill(m == -torch.inf, 0.0)), torch.exp(s - top)
    return new, grow * total + e.sum(-1, keepdim=True), grow * a + e @ v


def _step_nan(
    m: Tensor, total: Tensor, a: Tensor, s: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new = torch.maximum(m, s.amax(-1, keepdim=True))
    shrink, e = torch.exp(m - new), torch.exp(s - new)
    return new, shrink * total + e.sum(-1, keepdim=True), shrink * a + e @ v


def _step_normalised(
    m: Tensor, total: Tensor, a: Tensor, s: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new, total, mixed = _step_reference(m, total, a, s, v)
    return new, total, mixed / total


def _step_trial(
    label: str,
    T: int,
    n: int,
    D: int,
    seed: int,
    first: bool = False,
    hidden: str = "",
    shift: float = 0.0,
    rising: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Trial:
    # no gradients are asked for: the maximum's own gradient is a matter of convention
    def make() -> tuple[Tensor, ...]:
        s = 2 * _numbers(T, n, seed=seed, dtype=dtype) + shift + rising
        v = _numbers(n, D, seed=seed + 1, dtype=dtype)
        if hidden == "all":
            s[0] = -torch.inf
        elif hidden == "some":
            s = s.masked_fill(torch.ones(T, n, dtype=torch.bool).triu(1), -torch.inf)
        m = _numbers(T, 1, seed=seed + 2, dtype=dtype) + shift
        total = 1 + _numbers(T, 1, seed=seed + 3, dtype=dtype).abs()
        a = _numbers(T, D, seed=seed + 4, dtype=dtype)
        if first:
            m, total, a = (
                torch.full_like(m, -torch.inf),
                torch.zeros_like(total),
                torch.zeros_like(a),
            )
        return m, total, a, s, v

    return Trial(label, make)


check_online_step = Exercise(
    function="online_step",
    title="One step of the online softmax",
    dots=2,
    minutes=20,
    reference=_step_reference,
    trials=(
        _step_trial("a later block, 5 queries, 4 keys", 5, 4, 3, 0),
        _step_trial("the first block", 5, 4, 3, 10, first=True),
        _step_trial(
            "a block whose scores are all larger, float64",
            3,
            7,
            2,
            20,
            rising=9.0,
            dtype=torch.float64,
        ),
        _step_trial(
            "a block whose scores are all smaller, float64",
            3,
            7,
            2,
            30,
            rising=-9.0,
            dtype=torch.float64,
        ),
        _step_trial("a causal block", 4, 4, 3, 40, hidden="some"),
        _step_trial("a later block that one query does not see at all", 3, 5, 2, 50, hidden="all"),
        _step_trial(
            "a first block that one query does not see at all",
            3,
            5,
            2,
            60,
            first=True,
            hidden="all",
        ),
        _step_trial("scores near 200", 3, 4, 2, 70, shift=200.0),
        _step_trial("scores near −200", 3, 4, 2, 80, shift=-200.0),
        _step_trial("one query, one key", 1, 1, 1, 90, dtype=torch.float64),
    ),
    mistakes=(
        Mistake(
            "old sums not rescaled",
            "total and a were made relative to the old maximum. When the maximum moves, both must be moved to the new one.",
            _step_forgetful,
        ),
        Mistake(
            "values not rescaled",
            "total was moved to the new maximum, a was not. Both are sums of the same exponentials.",
            _step_values_forgotten,
        ),
        Mistake(
            "maximum of the block alone",
            "the new maximum looks at the new block only. It is the largest of all scores so far.",
            _step_block_maximum,
        ),
        Mistake(
            "rescaled the wrong way",
            "the old sums grow where they should shrink: the factor is exp(old − new), never above 1.",
            _step_upside_down,
        ),
        Mistake(
            "−∞ minus −∞",
            "there is NaN where a query has not seen any key yet: −∞ − (−∞). Subtract 0 there instead.",
            _step_nan,
        ),
        Mistake(
            "normalised too early",
            "a was divided by total. That is the last thing to do, after all blocks; the next step needs the bare sum.",
            _step_normalised,
        ),
    ),
    alternatives=(_step_by_logs,),
    hints=(
        "Start with the new maximum: torch.maximum of m and the largest score of each row of the block.",
        "The old total and a are multiplied by exp(m − new maximum); the block adds exp(s − new maximum), alone and times v.",
        "Where the new maximum is −∞, subtract 0 in its place: exp(−∞ − 0) is 0.",
    ),
)


# 3. Backward from the log-sum-exp -------------------------------------------------------------------------------------


def _causal_scores(q: Tensor, k: Tensor, aligned: str = "last") -> Tensor:
    (T, D), S = q.shape, k.shape[0]
    hidden = torch.ones(T, S, dtype=torch.bool).triu(1 + (S - T if aligned == "last" else 0))
    return (q @ k.T / math.sqrt(D)).masked_fill(hidden, -torch.inf)


def _gradients_reference(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.detach()[None, None].requires_grad_() for x in (q, k, v)]
    result = causal_attention(*leaves, backend="blocked")
    return tuple(g[0, 0] for g in torch.autograd.grad(result, leaves, dout[None, None]))


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    delta: bool = True,
    scale: bool = True,
    aligned: str = "last",
    by_rows: bool = False,
    transposed: bool = False,
) -> tuple[Tensor, ...]:
    P = torch.exp(_causal_scores(q, k, aligned) - lse[:, None])
    dP = dout @ v.T
    if by_rows:  # Δ as the row sum of P ∘ dP: the same number
        row = (P * dP).sum(-1, keepdim=True)
    else:
        row = (dout * out).sum(-1, keepdim=True) * (1.0 if delta else 0.0)
    dS = P * (dP - row) * (q.shape[1] ** -0.5 if scale else 1.0)
    return dS @ k, dS.T @ q, (dout.T @ P).T if transposed else P.T @ dout


def _gradients_trial(
    label: str,
    T: int,
    S: int,
    D: int,
    seed: int,
    size: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Trial:
    def make() -> tuple[Tensor, ...]:
        q = size * _numbers(T, D, seed=seed, dtype=dtype)
        k, v = (_numbers(S, D, seed=seed + n, dtype=dtype) for n in (1, 2))
        out = manual_causal_attention(q[None, None], k[None, None], v[None, None])[0, 0]
        lse = torch.logsumexp(_causal_scores(q, k), -1)
        return q, k, v, out, lse, _numbers(T, D, seed=seed + 3, dtype=dtype)

    return Trial(label, make)


check_attention_gradients = Exercise(
    function="attention_gradients",
    title="Backward from the log-sum-exp",
    dots=3,
    minutes=30,
    reference=_gradients_reference,
    trials=(
        _gradients_trial("6 queries, 6 keys, float64", 6, 6, 8, 0),
        _gradients_trial("3 queries, the last of 9 positions", 3, 9, 5, 10),
        _gradients_trial("one query, one key", 1, 1, 4, 20),
        _gradients_trial("large scores", 7, 7, 6, 30, size=6.0),
        _gradients_trial("float32, odd length", 11, 11, 16, 40, dtype=torch.float32),
    ),
    mistakes=(
        Mistake(
            "Δ forgotten",
            "a weight that grows takes from the others in its row. dS = P ∘ (dP − Δ), with Δ the dot product of dout and out.",
            lambda q, k, v, out, lse, dout: _gradients(q, k, v, out, lse, dout, delta=False),
        ),
        Mistake(
            "√D forgotten",
            "dv is right; dq and dk are too large by √D. The scores were divided by it, and so is their gradient on its way to q and k.",
            lambda q, k, v, out, lse, dout: _gradients(q, k, v, out, lse, dout, scale=False),
        ),
        Mistake(
            "aligned at the first key",
            "right only where T = S. The queries are the last T of the S positions: query i sees the keys up to i + S − T.",
            lambda q, k, v, out, lse, dout: _gradients(q, k, v, out, lse, dout, aligned="first"),
        ),
    ),
    alternatives=(
        lambda q, k, v, out, lse, dout: _gradients(
            q, k, v, out, lse, dout, by_rows=True, transposed=True
        ),
    ),
    hints=(
        "First make the weights again: P = exp(scores − lse[:, None]), with hidden scores at −∞.",
        "dv = Pᵀ dout and dP = dout vᵀ. Then Δ = (dout · out) summed over the head dimension.",
        "dS = P ∘ (dP − Δ[:, None]); dq = dS k / √D; dk = dSᵀ q / √D.",
    ),
)


# 4. What attention costs ----------------------------------------------------------------------------------------------


def _cost_reference(
    batch: int, heads: int, tokens: int, head_dim: int, bytes_per_number: int
) -> tuple[int, int]:
    flops = 4 * head_dim * batch * heads * count_visible_pairs(tokens)
    return flops, bytes_per_number * batch * heads * tokens * tokens


def _cost(
    batch: int,
    heads: int,
    tokens: int,
    head_dim: int,
    bytes_per_number: int,
    *,
    per_pair: int = 4,
    pairs: str = "triangle",
    half: bool = False,
) -> tuple[int, int]:
    square, triangle = tokens * tokens, tokens * (tokens + 1) // 2
    counted = {"triangle": triangle, "square": square, "strict": tokens * (tokens - 1) // 2}[pairs]
    scores = batch * heads * bytes_per_number * (triangle if half else square)
    return per_pair * head_dim * batch * heads * counted, scores


def _cost_trial(*sizes: int) -> Trial:
    batch, heads, tokens, head_dim, itemsize = sizes
    label = f"B = {batch}, H = {heads}, T = {tokens}, D = {head_dim}, {itemsize} bytes a number"
    return Trial(label, lambda: (batch, heads, tokens, head_dim, itemsize))


check_attention_cost = Exercise(
    function="attention_cost",
    title="What attention costs",
    dots=1,
    minutes=5,
    reference=_cost_reference,
    trials=(
        _cost_trial(1, 8, 4096, 96, 4),
        _cost_trial(1, 8, 131072, 96, 2),
        _cost_trial(8, 3, 7, 5, 2),
        _cost_trial(2, 1, 1, 1, 8),
    ),
    mistakes=(
        Mistake(
            "the whole square",
            "the FLOPs count hidden pairs too. Query i sees i + 1 keys: add them up.",
            lambda *sizes: _cost(*sizes, pairs="square"),
        ),
        Mistake(
            "scores only",
            "a pair costs 2·D for its score and 2·D again for its share of the values.",
            lambda *sizes: _cost(*sizes, per_pair=2),
        ),
        Mistake(
            "a multiplication counted once",
            "a multiplication and an addition are 2 FLOPs. A pair needs D of each, twice.",
            lambda *sizes: _cost(*sizes, per_pair=1),
        ),
        Mistake(
            "the query's own key forgotten",
            "a query sees itself too: T(T+1)/2 pairs, and one pair at T = 1.",
            lambda *sizes: _cost(*sizes, pairs="strict"),
        ),
        Mistake(
            "half the table",
            "the FLOPs are right. Dense scores store the hidden pairs as well: −∞ takes as many bytes as any number.",
            lambda *sizes: _cost(*sizes, half=True),
        ),
    ),
    alternatives=(
        lambda batch, heads, tokens, head_dim, bytes_per_number: (
            2 * head_dim * (tokens**2 + tokens) * batch * heads,
            torch.empty(batch, heads, tokens, tokens, device="meta").numel() * bytes_per_number,
        ),
    ),
    hints=(
        "Query i sees i + 1 keys, and 1 + 2 + … + T = T(T+1)/2.",
        "A dot product of D numbers is D multiplications and D additions. The values cost the same again.",
        "The dense scores have the shape (B, H, T, T).",
    ),
)


# 5. Find the bug ------------------------------------------------------------------------------------------------------


def _dense(
    q: Tensor, k: Tensor, v: Tensor, *, diagonal: str = "last", extra: int = 0, scale: bool = True
) -> Tensor:
    T, S, D = q.shape[-2], k.shape[-2], q.shape[-1]
    shift = {"last": S - T, "first": 0, "none": S, "reversed": T - S}[diagonal] + extra
    scores = q @ k.mT * (D**-0.5 if scale else 1.0)
    scores = scores.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(shift), -torch.inf)
    return torch.softmax(scores, -1) @ v


def _by_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right, and written differently: one query at a time over the keys that it sees."""
    T, S, rows = q.shape[-2], k.shape[-2], []
    for i in range(T):
        end = i + S - T + 1
        s = torch.einsum("bhd,bhsd->bhs", q[:, :, i], k[:, :, :end]) / math.sqrt(q.shape[-1])
        rows.append(torch.einsum("bhs,bhsd->bhd", s.softmax(-1), v[:, :, :end]))
    return torch.stack(rows, 2)


def _bug_trial(
    label: str, T: int, S: int, seed: int, dtype: torch.dtype = torch.float64, strided: bool = False
) -> Trial:
    def make() -> tuple[Tensor, ...]:
        tensors = []
        for place, length in enumerate((T, S, S)):
            shape = (2, length, 3, 8) if strided else (2, 3, length, 8)
            x = _numbers(*shape, seed=seed + place, dtype=dtype)
            tensors.append((x.transpose(1, 2) if strided else x).requires_grad_())
        return tuple(tensors)

    return Trial(label, make)


check_repaired_attention = Exercise(
    function="repaired_attention",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=lambda q, k, v: causal_attention(q, k, v, backend="blocked"),
    trials=(
        _bug_trial("as in training, T = S = 5", 5, 5, 0),
        _bug_trial("one new query over 9 keys", 1, 9, 10),
        _bug_trial("a chunk of 4 queries, the last of 7 positions", 4, 7, 20),
        _bug_trial("strided, float32, odd length", 3, 11, 30, dtype=torch.float32, strided=True),
        _bug_trial("one query, one key", 1, 1, 40),
    ),
    mistakes=(
        Mistake(
            "aligned at the first key",
            "right only where T = S. With one new query over nine keys, which key does the mask let it see?",
            lambda q, k, v: _dense(q, k, v, diagonal="first"),
        ),
        Mistake(
            "mask removed",
            "right for a single query, but in a chunk of several the earlier queries see the later ones.",
            lambda q, k, v: _dense(q, k, v, diagonal="none"),
        ),
        Mistake(
            "one key too few",
            "a query sees the keys up to its own position, itself included; here its own key is hidden.",
            lambda q, k, v: _dense(q, k, v, extra=-1),
        ),
        Mistake(
            "one key too many",
            "each query sees the key after its own.",
            lambda q, k, v: _dense(q, k, v, extra=1),
        ),
    ),
    alternatives=(lambda q, k, v: _dense(q, k, v), _by_rows),
    hints=(
        "Write the mask down for T = 1 and S = 3.",
        "Query i stands at position i + S − T.",
        "torch.tril takes a second argument, the diagonal.",
    ),
)
