"""Checks of chapter 15: generation and the KV cache.

Shapes: B batch, T new tokens, R runs of keys, H heads, G query heads of a group, D head_dim, V vocabulary, W window.
"""

import math

import torch
from torch import Tensor

from gptoss.inference.sampling import token_probabilities, top_p_filter
from gptoss.model.attention import manual_causal_attention, visible_keys

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "15_generation"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. Pairs, with a cache and without -----------------------------------------------------------------------------------


def _pairs_by_masks(prompt: int, new: int, cached: bool) -> int:
    """Add up the masks of the passes, one after the other."""
    total, kept = 0, 0
    for length in range(prompt, prompt + new):
        keys = torch.arange(length)
        queries = keys[kept:] if cached else keys
        total += int(visible_keys(queries, keys, None).sum())
        kept = length
    return total


def _pairs_by_formula(prompt: int, new: int, cached: bool, *, last: int = 1, first: int = 0) -> int:
    def triangle(n: int) -> int:
        return n * (n + 1) // 2

    if cached:
        return triangle(prompt + new - last)
    return sum(triangle(prompt + i + first) for i in range(new))


def _pairs_square(prompt: int, new: int, cached: bool) -> int:
    if cached:
        return prompt * prompt + sum(prompt + i for i in range(1, new))
    return sum((prompt + i) ** 2 for i in range(new))


def _pairs_prompt_forgotten(prompt: int, new: int, cached: bool) -> int:
    if not cached:
        return _pairs_by_formula(prompt, new, cached)
    return sum(prompt + i for i in range(1, new))


def _pairs_old_keys_only(prompt: int, new: int, cached: bool) -> int:
    if not cached:
        return _pairs_by_formula(prompt, new, cached)
    return prompt * (prompt + 1) // 2 + sum(prompt + i - 1 for i in range(1, new))


def _pairs_trial(prompt: int, new: int, cached: bool) -> Trial:
    how = "with a cache" if cached else "without"
    return Trial(f"prompt of {prompt}, {new} new, {how}", lambda: (prompt, new, cached))


check_pairs_compared = Exercise(
    function="pairs_compared",
    title="Pairs, with a cache and without",
    dots=1,
    minutes=10,
    reference=_pairs_by_masks,
    trials=(
        _pairs_trial(5, 3, True),
        _pairs_trial(5, 3, False),
        _pairs_trial(1, 1, True),
        _pairs_trial(1, 1, False),
        _pairs_trial(40, 25, True),
        _pairs_trial(40, 25, False),
    ),
    mistakes=(
        Mistake(
            "last token read",
            "the last new token is chosen and never read again: the passes read one token fewer than the text has.",
            lambda prompt, new, cached: _pairs_by_formula(prompt, new, cached, last=0, first=1),
        ),
        Mistake(
            "last token read, cached",
            "with a cache the last new token is counted as read. Nobody asks what comes after it.",
            lambda prompt, new, cached: _pairs_by_formula(prompt, new, cached, last=0),
        ),
        Mistake(
            "whole square",
            "the pass over the prompt counts pairs that causality hides. Query i sees i + 1 keys.",
            _pairs_square,
        ),
        Mistake(
            "prompt forgotten",
            "with a cache the first pass reads the prompt, and its pairs count as well.",
            _pairs_prompt_forgotten,
        ),
        Mistake(
            "own key forgotten",
            "a new token sees the cached keys and its own.",
            _pairs_old_keys_only,
        ),
    ),
    alternatives=(_pairs_by_formula,),
    hints=(
        "Write down which tokens each pass reads, for a prompt of 2 and 2 new tokens.",
        "Read at once or token by token, a text of n tokens has the same visible pairs: n(n + 1)/2.",
        "With a cache the passes together read prompt + new − 1 tokens, each once.",
    ),
)


# 2. Merge the runs ----------------------------------------------------------------------------------------------------


def _merge_reference(m: Tensor, t: Tensor, u: Tensor, b: Tensor) -> Tensor:
    scores = torch.cat((m + torch.log(t), b[None]))  # a run's log-sum-exp; −∞ for an empty one
    shares = torch.softmax(scores, 0)[:-1]
    outs = u / torch.where(t > 0, t, 1)[..., None]
    return (shares[..., None] * outs).sum(0)


def _merge_direct(
    m: Tensor,
    t: Tensor,
    u: Tensor,
    b: Tensor,
    *,
    shift: bool = True,
    rescale: bool = True,
    sinks: float = 1.0,
) -> Tensor:
    top = torch.maximum(m.amax(0), b.detach())
    if not shift:
        top = top * 0
    weight = torch.exp(m - top) if rescale else (m > -torch.inf).to(m.dtype)
    total = (weight * t).sum(0) + sinks * torch.exp(b - top)
    return (weight[..., None] * u).sum(0) / total[:, None]


def _merge_one_by_one(m: Tensor, t: Tensor, u: Tensor, b: Tensor) -> Tensor:
    """Right, and written differently: the sink is the first state, and runs are taken in one after the other."""
    top, total, sums = b.detach(), torch.exp(b - b.detach()), u[0] * 0
    for run in range(len(m)):
        new = torch.maximum(top, m[run])
        old, fresh = torch.exp(top - new), torch.exp(m[run] - new)
        total = old * total + fresh * t[run]
        sums = old[:, None] * sums + fresh[:, None] * u[run]
        top = new
    return sums / total[:, None]


def _merge_mean(m: Tensor, t: Tensor, u: Tensor, b: Tensor) -> Tensor:
    outs = u / torch.where(t > 0, t, 1)[..., None]
    lse = torch.logsumexp(m + torch.log(t), 0)
    return outs.mean(0) * torch.sigmoid(lse - b)[:, None]


def _merge_sink_unshifted(m: Tensor, t: Tensor, u: Tensor, b: Tensor) -> Tensor:
    top = m.amax(0)
    weight = torch.exp(m - top)
    return (weight[..., None] * u).sum(0) / ((weight * t).sum(0) + b.exp())[:, None]


def _merge_maximum_of_runs(m: Tensor, t: Tensor, u: Tensor, b: Tensor) -> Tensor:
    top = m.amax(0)
    weight = torch.exp(m - top)
    return (weight[..., None] * u).sum(0) / ((weight * t).sum(0) + torch.exp(b - top))[:, None]


def _merge_empty(m: Tensor, t: Tensor, u: Tensor, b: Tensor) -> Tensor:
    outs = u / t[..., None]
    shares = torch.softmax(torch.cat((m + torch.log(t), b[None])), 0)[:-1]
    return (shares[..., None] * outs).sum(0)


def _runs_trial(
    label: str,
    runs: int,
    heads: int,
    D: int,
    seed: int,
    *,
    shift: float = 0.0,
    empty: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Trial:
    def make() -> tuple[Tensor, ...]:
        scores = 2 * _numbers(runs, heads, 5, seed=seed, dtype=dtype) + shift
        values = _numbers(runs, heads, 5, D, seed=seed + 1, dtype=dtype)
        m = scores.amax(-1)
        e = torch.exp(scores - m[..., None])
        t, u = e.sum(-1), (e[..., None] * values).sum(-2)
        for run in empty:
            m[run], t[run], u[run] = -torch.inf, 0, 0
        b = _numbers(heads, seed=seed + 2, dtype=dtype) + shift
        leaves = (t, u, b) if not empty else (u, b)  # the logarithm of an empty run has no gradient
        for leaf in leaves:
            leaf.requires_grad_()
        return m, t, u, b

    return Trial(label, make)


check_merge_runs = Exercise(
    function="merge_runs",
    title="Merge the runs",
    dots=2,
    minutes=20,
    reference=_merge_reference,
    trials=(
        _runs_trial("3 runs, 2 heads", 3, 2, 4, 0),
        _runs_trial("one run, float64", 1, 3, 5, 10, dtype=torch.float64),
        _runs_trial("the first and the last run without keys", 4, 2, 3, 20, empty=(0, 3)),
        _runs_trial("scores near 300", 3, 2, 4, 30, shift=300.0),
        _runs_trial("scores near −300", 3, 2, 4, 40, shift=-300.0),
        _runs_trial("no run has keys", 2, 2, 3, 50, empty=(0, 1)),
    ),
    mistakes=(
        Mistake(
            "not rescaled",
            "the runs' sums were added as they are. Each is scaled by exp(−m) of its own run; bring all to one maximum first.",
            lambda m, t, u, b: _merge_direct(m, t, u, b, rescale=False),
        ),
        Mistake(
            "plain mean",
            "the runs' outputs were averaged. A run counts by exp(m)·t, the sum of its exponentials.",
            _merge_mean,
        ),
        Mistake(
            "no maximum",
            "exp(300) does not fit into float32. Take the largest exponent (b is one of them) off all of them first.",
            lambda m, t, u, b: _merge_direct(m, t, u, b, shift=False),
        ),
        Mistake(
            "sink in each run",
            "the sink stands in the denominator once for every run. There is one sink for all keys.",
            lambda m, t, u, b: _merge_direct(m, t, u, b, sinks=float(len(m))),
        ),
        Mistake(
            "sink forgotten",
            "the runs are merged rightly, but the sink takes no share.",
            lambda m, t, u, b: _merge_direct(m, t, u, b, sinks=0.0),
        ),
        Mistake(
            "sink not shifted",
            "the maximum was taken off the runs but not off b. Every exponent in the fraction must lose the same number.",
            _merge_sink_unshifted,
        ),
        Mistake(
            "empty run",
            "an empty run has t = 0 and u = 0, and 0/0 is NaN. Don't divide before the runs are added.",
            _merge_empty,
        ),
        Mistake(
            "maximum of the runs alone",
            "where no run has keys, the largest m is −∞, and −∞ − (−∞) is NaN. b is one of the exponents too.",
            _merge_maximum_of_runs,
        ),
    ),
    alternatives=(_merge_one_by_one, _merge_direct),
    hints=(
        "What must a run's t and u be multiplied by, so that they refer to the largest score of all?",
        "top = the largest of all m and of b, one a head; then the factors are exp(m − top), and exp(b − top) for the sink.",
        "Add up u and t with these factors over the runs, add the sink's exponential to the denominator, then divide once.",
    ),
)


# 3. The nucleus -------------------------------------------------------------------------------------------------------


def _nucleus_reference(p: Tensor, top_p: float) -> Tensor:
    return top_p_filter(p.log(), top_p).softmax(-1).to(p.dtype)


def _nucleus_by_loop(p: Tensor, top_p: float) -> Tensor:
    kept, mass = torch.zeros_like(p), 0.0
    for token in p.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token], mass = p[token], mass + float(p[token])
    return kept / kept.sum()


def _nucleus_masses(
    p: Tensor, top_p: float, *, short: bool = False, normed: bool = True, rising: bool = False
) -> Tensor:
    ordered, order = p.sort(descending=not rising)
    mass = ordered.cumsum(0)
    keep = mass <= top_p if short else mass - ordered < top_p
    kept = torch.where(keep, ordered, 0)
    if normed:
        kept = kept / kept.sum()
    return torch.zeros_like(p).scatter(0, order, kept)


def _nucleus_sorted(p: Tensor, top_p: float) -> Tensor:
    return _nucleus_reference(p.sort(descending=True).values, top_p)


def _nucleus_in_order(p: Tensor, top_p: float) -> Tensor:
    kept = torch.where(p.cumsum(0) - p < top_p, p, 0)
    return kept / kept.sum()


def _nucleus_threshold(p: Tensor, top_p: float) -> Tensor:
    kept = torch.where(p >= (1 - top_p) * p.max(), p, 0)
    return kept / kept.sum()


def _p_trial(label: str, p: list[float], top_p: float, dtype: torch.dtype = torch.float64) -> Trial:
    return Trial(label, lambda: (torch.tensor(p, dtype=dtype), top_p))


def _many_trial(V: int, top_p: float, seed: int) -> Trial:
    def make() -> tuple[Tensor, float]:
        return (2 * _numbers(V, seed=seed, dtype=torch.float64)).softmax(0), top_p

    return Trial(f"{V} tokens, top_p = {top_p}", make)


check_nucleus = Exercise(
    function="nucleus",
    title="The nucleus",
    dots=2,
    minutes=15,
    reference=_nucleus_reference,
    trials=(
        _p_trial("(.3, .12, .08, .5) with 0.79: two tokens", [0.3, 0.12, 0.08, 0.5], 0.79),
        _p_trial("(.3, .12, .08, .5) with 0.81: three", [0.3, 0.12, 0.08, 0.5], 0.81),
        _p_trial("(.3, .12, .08, .5) with 0.2: one", [0.3, 0.12, 0.08, 0.5], 0.2),
        _p_trial("one token", [1.0], 0.5),
        _many_trial(50, 0.9, 1),
        _many_trial(500, 0.35, 2),
        _p_trial("float32", [0.05, 0.6, 0.25, 0.1], 0.7, torch.float32),
    ),
    mistakes=(
        Mistake(
            "one short",
            "the token that reaches top_p is missing. Look at the mass before a token, not at the mass with it.",
            lambda p, top_p: _nucleus_masses(p, top_p, short=True),
        ),
        Mistake(
            "not renormalised",
            "what is kept does not sum to 1.",
            lambda p, top_p: _nucleus_masses(p, top_p, normed=False),
        ),
        Mistake(
            "sorted result",
            "the masses are right and stand in sorted order. Put each back at its token's place.",
            _nucleus_sorted,
        ),
        Mistake(
            "not sorted",
            "tokens were taken in the order of their ids. The likeliest come first.",
            _nucleus_in_order,
        ),
        Mistake(
            "rising order",
            "the least probable tokens were taken first.",
            lambda p, top_p: _nucleus_masses(p, top_p, rising=True),
        ),
        Mistake(
            "threshold",
            "tokens were kept by their own probability. The nucleus asks for the mass of those before them.",
            _nucleus_threshold,
        ),
    ),
    alternatives=(_nucleus_by_loop, _nucleus_masses),
    hints=(
        "p.sort(descending=True) gives the sorted masses and where each came from.",
        "ordered.cumsum(0) − ordered is the mass before each token; keep where it is less than top_p.",
        "torch.zeros_like(p).scatter(0, order, kept) puts them back.",
    ),
)


# 4. Min-p -------------------------------------------------------------------------------------------------------------


def _min_p_reference(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    p = token_probabilities(logits[None], temperature)[0]
    p = p * (p >= min_p * p.max())
    return (p / p.sum()).to(logits.dtype)


def _min_p_by_logits(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    """Right, and without a probability: a share of the largest is a distance of logits."""
    low = logits.max() + temperature * (math.log(min_p) if min_p > 0 else -math.inf)
    return (logits.masked_fill(logits < low, -math.inf) / temperature).softmax(-1)


def _min_p_plain(
    logits: Tensor,
    temperature: float,
    min_p: float,
    *,
    relative: bool = True,
    normed: bool = True,
    before: bool = False,
    hot: bool = True,
) -> Tensor:
    p = torch.softmax(logits / temperature if hot else logits, -1)
    rule = torch.softmax(logits, -1) if before else p
    keep = rule >= min_p * (rule.max() if relative else 1)
    p = p * keep
    return p / p.sum() if normed else p


def _min_p_unshifted(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    e = torch.exp(logits / temperature)
    e = e * (e >= min_p * e.max())
    return e / e.sum()


def _logits_trial(
    label: str, V: int, temperature: float, min_p: float, seed: int, shift: float = 0.0
) -> Trial:
    return Trial(label, lambda: (2 * _numbers(V, seed=seed) + shift, temperature, min_p))


check_min_p_distribution = Exercise(
    function="min_p_distribution",
    title="Min-p",
    dots=1,
    minutes=10,
    reference=_min_p_reference,
    trials=(
        _logits_trial("8 tokens, temperature 1", 8, 1.0, 0.2, 0),
        _logits_trial("60 tokens, temperature 2", 60, 2.0, 0.15, 1),
        _logits_trial("60 tokens, temperature 0.5", 60, 0.5, 0.05, 2),
        _logits_trial("min_p 0 keeps all", 9, 1.5, 0.0, 3),
        _logits_trial("min_p 1 keeps the largest", 9, 1.5, 1.0, 4),
        _logits_trial("logits near 2,000", 20, 1.0, 0.1, 5, shift=2000.0),
    ),
    mistakes=(
        Mistake(
            "absolute",
            "min_p was taken as a probability. It is a share of the largest probability.",
            lambda logits, temperature, min_p: _min_p_plain(
                logits, temperature, min_p, relative=False
            ),
        ),
        Mistake(
            "not renormalised",
            "what is kept does not sum to 1.",
            lambda logits, temperature, min_p: _min_p_plain(
                logits, temperature, min_p, normed=False
            ),
        ),
        Mistake(
            "cut before the temperature",
            "the cut looked at the distribution of temperature 1. The temperature comes first.",
            lambda logits, temperature, min_p: _min_p_plain(
                logits, temperature, min_p, before=True
            ),
        ),
        Mistake(
            "temperature forgotten",
            "the temperature changes nothing in the result.",
            lambda logits, temperature, min_p: _min_p_plain(logits, temperature, min_p, hot=False),
        ),
        Mistake(
            "no maximum",
            "exp(2000) does not fit into float32. A softmax takes the largest logit off first.",
            _min_p_unshifted,
        ),
    ),
    alternatives=(_min_p_by_logits, _min_p_plain),
    hints=(
        "p = softmax(logits / temperature); which p are at least min_p · max(p)?",
        "Set the others to 0, then divide by the sum.",
    ),
)


# 5. Positions of a padded batch ---------------------------------------------------------------------------------------


def _padded_reference(key_start: Tensor, seen: int, T: int, W: int) -> tuple[Tensor, Tensor]:
    rows_positions, rows_seen = [], []
    for start in key_start.tolist():
        columns = torch.arange(seen, seen + T)
        rows_positions.append((columns - start).clamp(min=0))
        table = torch.zeros(T, W, dtype=torch.bool)
        for t, column in enumerate(columns.tolist()):
            for place in range(W):
                table[t, place] = start <= column - (W - 1 - place)
        rows_seen.append(table)
    return torch.stack(rows_positions), torch.stack(rows_seen)


def _padded(
    key_start: Tensor,
    seen: int,
    T: int,
    W: int,
    *,
    begin: int | None = None,
    clamp: bool = True,
    shifted: bool = True,
    off: int = 0,
    zero: bool = False,
) -> tuple[Tensor, Tensor]:
    columns = torch.arange(T) + (seen if begin is None else begin)
    start = key_start[:, None]
    positions = columns - start if shifted else columns.expand(len(key_start), T)
    if clamp:
        positions = positions.clamp(min=0)
    keys = columns[:, None] - torch.arange(W - 1, -1, -1)
    table = keys >= (0 if zero else key_start[:, None, None] + off)
    return positions, table.expand(len(key_start), T, W)


def _padded_by_lengths(key_start: Tensor, seen: int, T: int, W: int) -> tuple[Tensor, Tensor]:
    """Right, and written differently: count the real columns up to each query."""
    columns = torch.arange(seen, seen + T)
    real = columns - key_start[:, None] + 1  # real tokens up to the query's own
    back = torch.arange(W).flip(0)
    return (real - 1).clamp(min=0), back < real[..., None]


def _padded_trial(label: str, key_start: list[int], seen: int, T: int, W: int) -> Trial:
    return Trial(label, lambda: (torch.tensor(key_start), seen, T, W))


check_padded_batch = Exercise(
    function="padded_batch",
    title="Positions of a padded batch",
    dots=2,
    minutes=10,
    reference=_padded_reference,
    trials=(
        _padded_trial("a prompt of 6 columns, window of 4", [0, 2, 5], 0, 6, 4),
        _padded_trial("one new token after 6", [0, 2, 5], 6, 1, 4),
        _padded_trial("a chunk of 3 after 20", [3, 19, 0], 20, 3, 5),
        _padded_trial("no padding", [0], 0, 3, 8),
        _padded_trial("a window of 1", [1, 0], 0, 4, 1),
        _padded_trial("a chunk that still lies in the padding", [9], 2, 3, 4),
    ),
    mistakes=(
        Mistake(
            "seen ignored",
            "columns are counted from 0 in every call. The new ones begin at `seen`.",
            lambda key_start, seen, T, W: _padded(key_start, seen, T, W, begin=0),
        ),
        Mistake(
            "padding counted",
            "positions count the padding. A row's first real token has position 0.",
            lambda key_start, seen, T, W: _padded(key_start, seen, T, W, shifted=False),
        ),
        Mistake(
            "negative positions",
            "padding got positions below 0; it was to get 0.",
            lambda key_start, seen, T, W: _padded(key_start, seen, T, W, clamp=False),
        ),
        Mistake(
            "padding seen",
            "the positions are right, and the table lets queries see padding.",
            lambda key_start, seen, T, W: _padded(key_start, seen, T, W, zero=True),
        ),
        Mistake(
            "first token hidden",
            "the table hides one key too many: a row's first real token stands in column key_start.",
            lambda key_start, seen, T, W: _padded(key_start, seen, T, W, off=1),
        ),
    ),
    alternatives=(_padded_by_lengths, _padded),
    hints=(
        "The new columns are torch.arange(seen, seen + T). A row's padding is subtracted from them.",
        "The column of place w, for the query in column c, is c − (W − 1 − w).",
        "A key is real when its column is at least key_start.",
    ),
)


# 6. Find the bug ------------------------------------------------------------------------------------------------------

StepResult = tuple[Tensor, Tensor, Tensor]


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    p: int,
    *,
    rule: str = "right",
    written: bool = True,
) -> StepResult:
    W, D = keys.shape
    slot = torch.tensor([p % W])
    old_keys, old_values = keys, values
    keys, values = keys.index_copy(0, slot, k[None]), values.index_copy(0, slot, v[None])
    places = torch.arange(W)
    filled = {
        "right": places <= p,
        "wrapped": places <= p % W,
        "all": places >= 0,
        "own missing": (places <= p) & (places != p % W) if p else places <= p,
    }[rule]
    seen_keys, seen_values = (keys, values) if written else (old_keys, old_values)
    scores = (q @ seen_keys.T / math.sqrt(D)).masked_fill(~filled, -torch.inf)
    return torch.softmax(scores, -1) @ seen_values, keys, values


def _step_reference(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, p: int
) -> StepResult:
    """The ring put in order, with the package's oracle."""
    W = len(keys)
    _, new_keys, new_values = _step(q, k, v, keys, values, p)
    slots = torch.arange(max(0, p + 1 - W), p + 1) % W
    heads = [x[slots].expand(1, len(q), -1, -1) for x in (new_keys, new_values)]
    out = manual_causal_attention(q[None, :, None], heads[0], heads[1])
    return out[0, :, 0], new_keys, new_values


def _step_by_count(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, p: int
) -> StepResult:
    n = min(p + 1, len(keys))
    _, keys, values = _step(q, k, v, keys, values, p)
    weights = torch.softmax(q @ keys[:n].T / math.sqrt(keys.shape[1]), -1)
    return weights @ values[:n], keys, values


def _step_trial(label: str, W: int, p: int, seed: int, G: int = 2, D: int = 6) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        q = _numbers(G, D, seed=seed, dtype=torch.float64)
        k, v = (_numbers(D, seed=seed + n, dtype=torch.float64) for n in (1, 2))
        rings = [_numbers(W, D, seed=seed + n, dtype=torch.float64) for n in (3, 4)]
        for ring in rings:
            ring[p:] = 0  # slots that nothing was written to
        return q, k, v, rings[0], rings[1], p

    return Trial(label, make)


check_repaired_step = Exercise(
    function="repaired_step",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=_step_reference,
    trials=(
        _step_trial("position 3, a ring of 8", 8, 3, 0),
        _step_trial("position 7, the ring becomes full", 8, 7, 10),
        _step_trial("position 8, the ring goes round", 8, 8, 20),
        _step_trial("position 29", 8, 29, 30),
        _step_trial("position 0", 5, 0, 40),
        _step_trial("a ring of 1", 1, 4, 50, G=1),
    ),
    mistakes=(
        Mistake(
            "filled slots wrapped",
            "right until the ring is full. After that, which slots hold a key of the window?",
            lambda *a: _step(*a, rule="wrapped"),
        ),
        Mistake(
            "empty slots seen",
            "now the empty slots of a young ring take part: zeros have a score of 0, and that is not −∞.",
            lambda *a: _step(*a, rule="all"),
        ),
        Mistake(
            "own key missing",
            "the new token does not see itself.",
            lambda *a: _step(*a, rule="own missing"),
        ),
        Mistake(
            "attended before written",
            "the ring was read before the new key was in it: the token sees the position that leaves the window, and not itself.",
            lambda *a: _step(*a, written=False),
        ),
    ),
    alternatives=(_step, _step_by_count),
    hints=(
        "Print `filled` for p = 7, 8 and 9 with W = 8.",
        "From position W − 1 on, every slot holds one of the last W positions.",
        "Compare the slots with p, not with p mod W.",
    ),
)
