"""Checks of chapter 9: mixture of experts.

Shapes: N tokens, C model width, F ffn width, E experts, k experts a token, R = N·k routed rows.
"""

from typing import Any

import torch
from torch import Tensor

from gptoss.model.moe.balance import aux_load_balancing_loss
from gptoss.model.moe.dispatch import combine_rows, plan_dispatch, run_experts
from gptoss.model.moe.router import renormalised_weights, router_probabilities, top_k

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "09_experts"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. Two of eight --------------------------------------------------------------------------------------------------------


def _route(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    top, indices = top_k(router_probabilities(z), k)
    return renormalised_weights(top), indices


def _route_by_logits(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    chosen, indices = top_k(z, k)
    return torch.softmax(chosen, -1), indices


def _route_by_rank(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Right, and written quite differently: count who beats each expert, and mask the rest out of the softmax."""
    E = z.shape[1]
    lower = torch.ones(E, E, dtype=torch.bool).tril(-1)  # [e, other]: other has the lower index
    beats = (z[:, None, :] > z[:, :, None]) | ((z[:, None, :] == z[:, :, None]) & lower)
    rank = beats.sum(-1)  # (N, E)
    indices = torch.stack([(rank == j).float().argmax(-1) for j in range(k)], -1)
    p = torch.softmax(z.masked_fill(rank >= k, -torch.inf), -1)
    return p.gather(1, indices), indices


def _route_not_renormalised(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return top_k(torch.softmax(z, -1), k)


def _route_twice(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    top, indices = top_k(torch.softmax(z, -1), k)
    return torch.softmax(top, -1), indices


def _route_high_index(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    chosen, indices = top_k(z.flip(-1), k)
    return torch.softmax(chosen, -1), z.shape[1] - 1 - indices


def _route_by_index(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    indices = top_k(z, k)[1].sort(-1).values
    return torch.softmax(z.gather(1, indices), -1), indices


def _route_no_maximum(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    e, indices = top_k(z, k)
    e = torch.exp(e)
    return e / e.sum(-1, keepdim=True), indices


def _logits(
    n: int, experts: int, k: int, seed: int, dtype: torch.dtype = torch.float32, shift: float = 0.0
) -> Trial:
    def make() -> tuple[Tensor, int]:
        return (_numbers(n, experts, seed=seed, dtype=dtype) + shift).requires_grad_(), k

    where = f" near {shift:g}" if shift else ""
    label = f"{n} tokens, {k} of {experts} experts{where}, {str(dtype).removeprefix('torch.')}"
    return Trial(label, make)


def _by_hand() -> tuple[Tensor, int]:
    return torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True), 2


def _ties() -> tuple[Tensor, int]:
    return torch.tensor([[0.0] * 8, [1.0, 3.0, 1.0, 1.0, 0.0, 3.0, 1.0, 0.0]]), 3


check_route = Exercise(
    function="route",
    title="Two of eight",
    dots=1,
    minutes=10,
    reference=_route,
    trials=(
        Trial("the logits 2, 1, 0, −1 with k = 2", _by_hand),
        _logits(6, 8, 2, 0),
        _logits(5, 7, 3, 1),
        _logits(4, 8, 2, 2, shift=200.0),
        Trial("equal logits, of which the lower index wins", _ties),
        _logits(1, 3, 3, 3, dtype=torch.float64),
    ),
    mistakes=(
        Mistake(
            "not renormalised",
            "the weights of a token do not sum to 1. Divide by the sum of the chosen ones.",
            _route_not_renormalised,
        ),
        Mistake(
            "softmax twice",
            "a softmax of probabilities is nearly flat. Renormalise by division, or take the softmax of the chosen *logits*.",
            _route_twice,
        ),
        Mistake(
            "ties to the higher index",
            "right, until two logits are equal: the lower index must win, every time.",
            _route_high_index,
        ),
        Mistake(
            "sorted by index",
            "the right experts in the wrong order: the largest weight comes first.",
            _route_by_index,
        ),
        Mistake(
            "no maximum",
            "exp(200) does not fit into float32. torch.softmax takes the largest logit off first.",
            _route_no_maximum,
        ),
    ),
    alternatives=(_route_by_logits, _route_by_rank),
    hints=(
        "Choose first, by a sort of the logits. Then ask what the weights of the chosen depend on.",
        "torch.sort(z, descending=True, stable=True) leaves equal logits in the order of their index.",
        "The weights are the softmax of the k chosen logits.",
    ),
)


# 2. The balance loss by hand ----------------------------------------------------------------------------------------------


def _balance_by_autograd(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    z = logits.detach().clone().requires_grad_()
    loss = aux_load_balancing_loss(z, z.shape[1], k)
    return loss.detach(), torch.autograd.grad(loss, z)[0]


def _balance(
    logits: Tensor,
    k: int,
    *,
    mean: bool = True,
    centred: bool = True,
    first: bool = False,
    soft: bool = False,
    per_token: bool = False,
    scaled: bool = True,
) -> tuple[Tensor, Tensor]:
    N, E = logits.shape
    p = torch.softmax(logits, -1)
    indices = top_k(p, 1 if first else k)[1]
    f = torch.nn.functional.one_hot(indices, E).sum((0, 1)).to(p.dtype)
    f = f / (N if per_token else indices.numel())
    if soft:
        f = p.mean(0)
    scale = E if scaled else 1
    loss = scale * (f * p.mean(0)).sum()
    centre = (p * f).sum(-1, keepdim=True) if centred else 0
    return loss, scale * p * (f - centre) / (N if mean else 1)


def _balance_jacobian(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Right, written differently: one token at a time, by the full Jacobian of its softmax."""
    N, E = logits.shape
    f = logits.new_zeros(E)
    for z in logits:
        for e in sorted(range(E), key=lambda e: -float(z[e]))[:k]:  # a tie goes to the lower e
            f[e] += 1 / (N * k)
    rows, mean = [], logits.new_zeros(E)
    for z in logits:
        p = z.softmax(0)
        mean = mean + p / N
        rows.append((torch.diag(p) - torch.outer(p, p)) @ (E * f / N))
    return E * torch.dot(f, mean), torch.stack(rows)


def _plain_logits(
    n: int, experts: int, k: int, seed: int, dtype: torch.dtype = torch.float64, tilt: float = 0.0
) -> Trial:
    def make() -> tuple[Tensor, int]:
        z = _numbers(n, experts, seed=seed, dtype=dtype)
        z[:, 0] += tilt
        return z, k

    words = ", one expert ahead" if tilt else ""
    label = f"{n} tokens, {k} of {experts} experts{words}, {str(dtype).removeprefix('torch.')}"
    return Trial(label, make)


def _below_one() -> tuple[Tensor, int]:
    return torch.tensor([[0.34, 0.33, 0.33], [1e-9, 0.51, 0.49]], dtype=torch.float64).log(), 1


check_balance_gradient = Exercise(
    function="balance_gradient",
    title="The balance loss by hand",
    dots=2,
    minutes=20,
    reference=_balance_by_autograd,
    trials=(
        _plain_logits(6, 4, 2, 0),
        _plain_logits(5, 8, 2, 1, tilt=3.0),
        _plain_logits(9, 5, 3, 2, dtype=torch.float32),
        _plain_logits(1, 8, 2, 3),
        Trial("two tokens whose loss is below 1", _below_one),
    ),
    mistakes=(
        Mistake(
            "1/N forgotten",
            "the loss is right, the gradient is N times too large: P is a mean over tokens.",
            lambda z, k: _balance(z, k, mean=False),
        ),
        Mistake(
            "not centred",
            "the loss is right. Raising one logit lowers the other probabilities of that token: each row of the gradient must sum to 0.",
            lambda z, k: _balance(z, k, centred=False),
        ),
        Mistake(
            "first choice only",
            "f counted each token's first expert only. All N·k slots count.",
            lambda z, k: _balance(z, k, first=True),
        ),
        Mistake(
            "f out of probabilities",
            "f is a count of slots, not a mean probability. It says who works, P says who is likely to.",
            lambda z, k: _balance(z, k, soft=True),
        ),
        Mistake(
            "shares of tokens",
            "loss and gradient are k times too large: f is a share of the N·k slots and sums to 1.",
            lambda z, k: _balance(z, k, per_token=True),
        ),
        Mistake(
            "E forgotten",
            "loss and gradient are E times too small: even work must give a loss of 1.",
            lambda z, k: _balance(z, k, scaled=False),
        ),
    ),
    alternatives=(_balance_jacobian,),
    hints=(
        "f is a count: no gradient passes through it. Only P moves.",
        "dL/dP_e = E·f_e, and each token holds 1/N of P.",
        "Through the softmax: p·(g − Σ p·g) with g = E·f/N.",
    ),
)


# 3. Bring the answers home --------------------------------------------------------------------------------------------------


def _combine_reference(y: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    n_experts = int(indices.max()) + 1
    return combine_rows(y, weights, plan_dispatch(indices, n_experts))


def _combine(
    y: Tensor,
    indices: Tensor,
    weights: Tensor,
    *,
    wrong_way: bool = False,
    modulo: bool = False,
    weighted: bool = True,
    weights_sorted: bool = True,
    reversed_ties: bool = False,
) -> Tensor:
    N, k = indices.shape
    flat = indices.flatten()
    order = torch.argsort(flat, stable=True)
    if reversed_ties:
        order = (flat.numel() - 1) - torch.argsort(flat.flip(0), stable=True)
    if wrong_way:
        order = torch.argsort(order)
    w = weights.flatten()[order] if weights_sorted else weights.flatten()
    rows = y * w[:, None] if weighted else y
    out = y.new_zeros(N, y.shape[1])
    return out.index_add(0, order % N if modulo else order // k, rows)


def _combine_by_inverse(y: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    order = torch.argsort(indices.flatten(), stable=True)
    answers = y[torch.argsort(order)].view(*indices.shape, -1)  # (N, k, C)
    return torch.einsum("nkc,nk->nc", answers, weights)


def _combine_one_by_one(y: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Right, without a sort: walk over the experts, and over the slots of each in their order."""
    N, k = indices.shape
    rows: list[Any] = [0.0] * N
    row = 0
    for e in range(int(indices.max()) + 1):
        for n in range(N):
            for j in range(k):
                if indices[n, j] == e:
                    rows[n] = rows[n] + weights[n, j] * y[row]
                    row += 1
    return torch.stack(rows)


def _rows(
    label: str, indices: list[list[int]], seed: int, dtype: torch.dtype = torch.float64
) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.tensor(indices)
        y = _numbers(chosen.numel(), 3, seed=seed, dtype=dtype).requires_grad_()
        weights = torch.softmax(_numbers(*chosen.shape, seed=seed + 1, dtype=dtype), -1)
        return y, chosen, weights.requires_grad_()

    return Trial(label, make)


check_combine = Exercise(
    function="combine",
    title="Bring the answers home",
    dots=2,
    minutes=20,
    reference=_combine_reference,
    trials=(
        _rows("4 tokens, 2 of 3 experts", [[0, 2], [1, 0], [2, 1], [0, 1]], 0),
        _rows("all tokens on experts 1 and 4, the others idle", [[1, 4], [4, 1], [1, 4]], 10),
        _rows("one token", [[5, 2]], 20),
        _rows("one expert a token", [[1], [0], [1], [1], [0]], 30),
        _rows(
            "5 tokens, 3 experts each, float32",
            [[3, 0, 2], [1, 2, 3], [0, 1, 2], [2, 3, 0], [3, 1, 0]],
            40,
            torch.float32,
        ),
    ),
    mistakes=(
        Mistake(
            "weights not sorted",
            "the rows are in sorted order, the weights are not. Row r needs the weight of slot order[r].",
            lambda y, i, w: _combine(y, i, w, weights_sorted=False),
        ),
        Mistake(
            "modulo",
            "slot s belongs to token s // k: a token's slots stand side by side.",
            lambda y, i, w: _combine(y, i, w, modulo=True),
        ),
        Mistake(
            "permutation the wrong way",
            "order says which slot each sorted row came from. It was used as where each slot went.",
            lambda y, i, w: _combine(y, i, w, wrong_way=True),
        ),
        Mistake(
            "ties reversed",
            "rows of one expert keep the order of their slots: the sort must be stable.",
            lambda y, i, w: _combine(y, i, w, reversed_ties=True),
        ),
        Mistake(
            "unweighted",
            "the answers were added without their weights.",
            lambda y, i, w: _combine(y, i, w, weighted=False),
        ),
    ),
    alternatives=(_combine_by_inverse, _combine_one_by_one),
    hints=(
        "Rebuild the order in which the rows were sorted: a stable argsort of indices.flatten().",
        "Row r is slot order[r]. Its token is order[r] // k, its weight weights.flatten()[order[r]].",
        "torch.argsort(order) is the way back: y[that] has the rows in slot order, ready for .view(N, k, C).",
    ),
)


# 4. What a token pays -----------------------------------------------------------------------------------------------------------


def _cost_reference(
    d_model: int, ffn_dim: int, experts: int, k: int, shared: int
) -> tuple[int, int, int]:
    router = torch.empty(experts, d_model, device="meta").numel()
    one = sum(
        torch.empty(shape, device="meta").numel()
        for shape in ((ffn_dim, d_model), (ffn_dim, d_model), (d_model, ffn_dim))
    )
    active = router + (k + shared) * one
    return router + (experts + shared) * one, active, 2 * active


def _cost(
    d_model: int,
    ffn_dim: int,
    experts: int,
    k: int,
    shared: int,
    *,
    router: int = 1,
    with_shared: int = 1,
    matrices: int = 3,
    flops: int = 2,
) -> tuple[int, int, int]:
    one = matrices * d_model * ffn_dim
    gate = router * experts * d_model
    active = gate + (k + with_shared * shared) * one
    return gate + (experts + with_shared * shared) * one, active, flops * active


def _cost_trial(*sizes: int) -> Trial:
    label = "C = {}, F = {}, {} experts, {} a token, {} shared".format(*sizes)
    return Trial(label, lambda: sizes)


check_layer_cost = Exercise(
    function="layer_cost",
    title="What a token pays",
    dots=1,
    minutes=5,
    reference=_cost_reference,
    trials=(
        _cost_trial(768, 1536, 8, 2, 1),
        _cost_trial(2880, 2880, 32, 4, 0),
        _cost_trial(7, 5, 3, 1, 2),
        _cost_trial(64, 32, 1, 1, 0),
    ),
    mistakes=(
        Mistake(
            "router forgotten",
            "the router is a matrix too, E × C, and every token goes through the whole of it.",
            lambda *sizes: _cost(*sizes, router=0),
        ),
        Mistake(
            "shared forgotten",
            "the shared experts are stored, and every token uses all of them.",
            lambda *sizes: _cost(*sizes, with_shared=0),
        ),
        Mistake(
            "two matrices",
            "a SwiGLU expert has three matrices: W1 and W3 up, W2 down.",
            lambda *sizes: _cost(*sizes, matrices=2),
        ),
        Mistake(
            "one FLOP a weight",
            "the parameters are right. A weight costs a multiplication and an addition: 2 FLOPs.",
            lambda *sizes: _cost(*sizes, flops=1),
        ),
        Mistake(
            "with the backward pass",
            "the parameters are right. 6 FLOPs a parameter is training; the forward pass alone is asked for.",
            lambda *sizes: _cost(*sizes, flops=6),
        ),
    ),
    alternatives=(
        lambda d_model, ffn_dim, experts, k, shared: (
            d_model * (experts + 3 * ffn_dim * (experts + shared)),
            d_model * (experts + 3 * ffn_dim * (k + shared)),
            2 * d_model * experts + 6 * d_model * ffn_dim * (k + shared),
        ),
    ),
    hints=(
        "One expert: W1 and W3 are F × C, W2 is C × F.",
        "Stored: the router and all experts. Active: the router, k experts and the shared ones.",
        "The forward pass costs 2 FLOPs for each active parameter.",
    ),
)


# 5. Find the bug ------------------------------------------------------------------------------------------------------------------


def _layer_reference(
    x: Tensor, router: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, k: int
) -> Tensor:
    weights, indices = _route(x @ router.mT, k)
    plan = plan_dispatch(indices, w1.shape[0])
    return run_experts(x, weights, plan, w1, w3, w2, "stacked")


def _layer(
    x: Tensor,
    router: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    k: int,
    *,
    row: str = "right",
    weight: str = "right",
    detach: bool = False,
) -> Tensor:
    silu = torch.nn.functional.silu
    weights, indices = _route(x @ router.mT, k)
    flat, weights = indices.flatten(), weights.flatten()
    order = torch.argsort(flat, stable=True)
    token = order % x.shape[0] if row == "modulo" else order // k
    rows, out = x[token], torch.zeros_like(x)
    if row == "unsorted":
        rows = x.repeat_interleave(k, 0)
    start = 0
    for e, count in enumerate(torch.bincount(flat, minlength=w1.shape[0]).tolist()):
        group = slice(start, start + count)
        y = (silu(rows[group] @ w1[e].mT) * (rows[group] @ w3[e].mT)) @ w2[e].mT
        w = {
            "right": weights[order[group]],
            "unsorted": weights[group],
            "none": 1 + 0 * weights[group],
        }[weight]
        out = out.index_add(0, token[group], y * (w.detach() if detach else w)[:, None])
        start += count
    return out


def _layer_dense(x: Tensor, router: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, k: int) -> Tensor:
    """Right, and written differently: every expert on every token, then the few answers picked out."""
    weights, indices = _route(x @ router.mT, k)
    up = torch.einsum("nc,efc->enf", x, w3)
    gate = torch.nn.functional.silu(torch.einsum("nc,efc->enf", x, w1))
    every = torch.einsum("enf,ecf->nec", gate * up, w2)  # (N, E, C)
    chosen = every.gather(1, indices[..., None].expand(*indices.shape, x.shape[1]))
    return (chosen * weights[..., None]).sum(1)


def _layer_trial(
    label: str,
    n: int,
    experts: int,
    k: int,
    seed: int,
    dtype: torch.dtype = torch.float64,
    few: bool = False,
) -> Trial:
    def make() -> tuple[Any, ...]:
        C, F = 6, 4
        x = _numbers(n, C, seed=seed, dtype=dtype)
        router = _numbers(experts, C, seed=seed + 1, dtype=dtype)
        if few:  # all tokens on the first k experts
            x[:, 0], router[:, 0] = 5.0, 0.0
            router[:k, 0] = 4.0
        stacks = (
            _numbers(experts, *shape, seed=seed + 2 + place, dtype=dtype)
            for place, shape in enumerate(((F, C), (F, C), (C, F)))
        )
        return (*(t.requires_grad_() for t in (x, router, *stacks)), k)

    return Trial(label, make)


check_repaired_layer = Exercise(
    function="repaired_layer",
    title="Find the bug",
    dots=2,
    minutes=15,
    reference=_layer_reference,
    trials=(
        _layer_trial("7 tokens, 2 of 4 experts", 7, 4, 2, 0),
        _layer_trial("idle experts", 5, 6, 2, 10, few=True),
        _layer_trial("one token, 3 of 5", 1, 5, 3, 20),
        _layer_trial("float32, 2 of 8", 9, 8, 2, 30, dtype=torch.float32),
    ),
    mistakes=(
        Mistake(
            "weights not sorted",
            "the experts and their rows fit. Look at which token's weight each answer is multiplied with.",
            lambda *a: _layer(*a, weight="unsorted"),
        ),
        Mistake(
            "unweighted",
            "the answers are now added without their weights.",
            lambda *a: _layer(*a, weight="none"),
        ),
        Mistake(
            "weights detached",
            "the output is right, but the router gets no gradient: nothing may cut the weights off.",
            lambda *a: _layer(*a, detach=True),
        ),
        Mistake(
            "modulo",
            "slot s belongs to token s // k, not s % N.",
            lambda *a: _layer(*a, row="modulo"),
        ),
        Mistake(
            "rows not sorted",
            "the experts now read rows in slot order, so most tokens meet an expert that the router did not choose.",
            lambda *a: _layer(*a, row="unsorted"),
        ),
    ),
    alternatives=(_layer_dense,),
    hints=(
        "With k = 1 it is right. Which numbers are then all the same?",
        "Three things go through the sort: rows, tokens and weights. Follow each.",
        "weights.flatten() is in slot order. The groups are in sorted order.",
    ),
)
