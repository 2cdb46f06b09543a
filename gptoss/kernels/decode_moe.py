"""The experts of a decoding step as operators: the router with its norm, the chosen experts, and both in one.

Shapes: N tokens, C model width, E experts, k experts a token, F ffn width.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gptoss.kernels.decode_checks import check_rows, require_decode_kernels


def decode_route(
    x: Float[Tensor, "N C"],
    norm_weight: Float[Tensor, "C"],
    router_weight: Float[Tensor, "E C"],
    k: int,
    eps: float = 1e-5,
    weight_sum_min: float = 1e-6,
    overlap: bool = False,
) -> tuple[Float[Tensor, "N C"], Int[Tensor, "N k"], Float[Tensor, "N k"]]:
    """Normalise each token and choose its experts, as `MoERouter` does.

    p = softmax(W_r·norm(x)) over all experts in fp32; the k largest (the lower index among equals) over their sum.

    Args:
        x: up to 8 rows.
        norm_weight: γ of the RMSNorm in front; `eps` its ε.
        router_weight: W_r.
        k: experts a token.
        weight_sum_min: the least that their sum counts as.
        overlap: start before the kernel in front has ended, where the GPU can; `decode_overlap.py` says what that asks.

    Returns:
        norm(x); indices, int32, largest weight first; weights in fp32, summing to 1.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        ImportError: Triton is not installed.

    Source: chapters 9 and 15.
    """
    check_rows(x, router_weight, norm_weight)
    if not 0 < k <= router_weight.shape[0]:
        raise ValueError(f"expected k from 1 to {router_weight.shape[0]} experts, got {k}")
    require_decode_kernels()
    return _decode_route(x, norm_weight, router_weight, k, eps, weight_sum_min, overlap)


def decode_experts(
    x: Float[Tensor, "N C"],
    indices: Int[Tensor, "N k"],
    weights: Float[Tensor, "N k"],
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
    w2: Float[Tensor, "E C F"],
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    residual: Float[Tensor, "N C"] | None = None,
    overlap: bool = False,
) -> Float[Tensor, "N C"]:
    """The chosen experts of a few tokens, every selected weight read once whoever shares it.

    out = residual + Σ_j weights[n, j]·expert_{indices[n, j]}(x) + shared(x),  expert(x) = W2·(silu(W1 x) ∘ W3 x)

    Args:
        x: normalised rows, up to 8.
        indices, weights: of the chosen experts, on the device.
        w1, w3, w2: stacked weights of the routed experts.
        shared: w1 (F, C), w3 (F, C), w2 (C, F) of the shared expert. Several shared experts are one with their F
            concatenated; here F must equal the routed experts'.
        residual: added, in x's dtype.
        overlap: start before the kernel in front has ended, where the GPU can; `decode_overlap.py` says what that asks.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        ImportError: Triton is not installed.

    Source: chapters 9 and 15.
    """
    N = x.shape[0]
    check_rows(x, w1[0])
    _check_experts(w1, w3, w2, shared)
    if indices.shape != weights.shape or indices.ndim != 2 or indices.shape[0] != N:
        raise ValueError(
            f"expected indices and weights ({N}, k), got {tuple(indices.shape)} and {tuple(weights.shape)}"
        )
    require_decode_kernels()
    return _decode_experts(x, indices, weights, w1, w3, w2, list(shared or ()), residual, overlap)


def decode_moe(
    x: Float[Tensor, "1 C"],
    norm_weight: Float[Tensor, "C"],
    router_weight: Float[Tensor, "E C"],
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
    w2: Float[Tensor, "E C F"],
    k: int,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    eps: float = 1e-5,
    weight_sum_min: float = 1e-6,
    overlap: bool = False,
) -> Float[Tensor, "1 C"]:
    """x + MoE(norm(x)) of one token: `decode_route` and `decode_experts` with x as the residual, in two kernels for three.

    Args:
        x: residual stream, one row.
        norm_weight, router_weight, k, eps, weight_sum_min: as in `decode_route`.
        w1, w3, w2, shared: as in `decode_experts`.
        overlap: start before the kernel in front has ended, where the GPU can; `decode_overlap.py` says what that asks.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        ImportError: Triton is not installed.

    Source: chapters 9 and 15.
    """
    check_rows(x, router_weight, norm_weight, w1[0])
    E = w1.shape[0]
    if x.shape[0] != 1:
        raise ValueError(
            f"expected one row, got {tuple(x.shape)}: use decode_route and decode_experts"
        )
    if not 0 < k <= E or router_weight.shape[0] != E:
        raise ValueError(
            f"expected k from 1 to {E} experts and a router of {E} rows, got {k} and {tuple(router_weight.shape)}"
        )
    _check_experts(w1, w3, w2, shared)
    require_decode_kernels()
    return _decode_moe(
        x, norm_weight, router_weight, w1, w3, w2, list(shared or ()), k, eps, weight_sum_min, overlap
    )  # fmt: skip


def _check_experts(
    w1: Tensor, w3: Tensor, w2: Tensor, shared: tuple[Tensor, Tensor, Tensor] | None
) -> None:
    E, F, C = w1.shape
    stacks = (tuple(w1.shape), tuple(w3.shape), tuple(w2.shape))
    if stacks != ((E, F, C), (E, F, C), (E, C, F)):
        raise ValueError(f"expected w1, w3 (E, F, C) and w2 (E, C, F) for C = {C}, got {stacks}")
    if shared is not None and [tuple(t.shape) for t in shared] != [(F, C), (F, C), (C, F)]:
        raise ValueError(
            f"expected shared weights ({F}, {C}), ({F}, {C}), ({C}, {F}), got {[tuple(t.shape) for t in shared]}"
        )


@torch.library.custom_op("gptoss::decode_route", mutates_args=())
def _decode_route(
    x: Tensor,
    norm_weight: Tensor,
    router: Tensor,
    k: int,
    eps: float,
    weight_sum_min: float,
    overlap: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    from gptoss.kernels.decode_router import launch_route

    x, router = x.contiguous(), router.contiguous()
    return launch_route(x, norm_weight, router, k, eps, weight_sum_min, overlap)


@_decode_route.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor,
    router: Tensor,
    k: int,
    eps: float,
    weight_sum_min: float,
    overlap: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], k)
    return (
        x.new_empty(x.shape),
        x.new_empty(shape, dtype=torch.int32),
        x.new_empty(shape, dtype=torch.float32),
    )


@torch.library.custom_op("gptoss::decode_experts", mutates_args=())
def _decode_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared: list[Tensor],
    residual: Tensor | None,
    overlap: bool = False,
) -> Tensor:
    from gptoss.kernels.decode_experts import launch_experts

    if residual is not None:
        residual = residual.contiguous()
    x, indices, weights, w1, w3, w2, *rest = (
        t.contiguous() for t in (x, indices, weights, w1, w3, w2, *shared)
    )
    trio = (rest[0], rest[1], rest[2]) if rest else None
    return launch_experts(x, indices, weights, w1, w3, w2, trio, residual, overlap=overlap)


@_decode_experts.register_fake
def _(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared: list[Tensor],
    residual: Tensor | None,
    overlap: bool = False,
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("gptoss::decode_moe", mutates_args=())
def _decode_moe(
    x: Tensor,
    norm_weight: Tensor,
    router: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared: list[Tensor],
    k: int,
    eps: float,
    weight_sum_min: float,
    overlap: bool = False,
) -> Tensor:
    from gptoss.kernels.decode_experts import launch_moe

    x, router, w1, w3, w2, *rest = (t.contiguous() for t in (x, router, w1, w3, w2, *shared))
    trio = (rest[0], rest[1], rest[2]) if rest else None
    return launch_moe(
        x, norm_weight, router, w1, w3, w2, trio, k, eps, weight_sum_min, overlap=overlap
    )


@_decode_moe.register_fake
def _(
    x: Tensor,
    norm_weight: Tensor,
    router: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared: list[Tensor],
    k: int,
    eps: float,
    weight_sum_min: float,
    overlap: bool = False,
) -> Tensor:
    return x.new_empty(x.shape)
