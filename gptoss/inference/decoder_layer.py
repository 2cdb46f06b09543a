"""One layer of a decoding step: which models the kernels take, their weights, and the kernels in order (chapter 15).

H query heads, K kv heads, D head_dim, C model width, F ffn width, E experts, S shared experts, M capacity of the cache.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gptoss.config import ModelConfig
from gptoss.kernels.decode import (
    MAX_QUERY_ROWS,
    decode_attention,
    decode_experts,
    decode_linear,
    decode_moe,
    decode_qkv,
    decode_route,
)


class Place(NamedTuple):
    """Where a step's keys go and how many there are then, on the device; and the angles of its position."""

    slot: Int[Tensor, "1"]
    length: Int[Tensor, "1"]
    cos: Float[Tensor, "1 D_half"]
    sin: Float[Tensor, "1 D_half"]


class LayerWeights(NamedTuple):
    """A block's weights: the model's own tensors where their dtype fits, else copies made once."""

    norm1: Float[Tensor, "C"]
    q: Float[Tensor, "HD C"]
    kv: Float[Tensor, "2KD C"]
    o: Float[Tensor, "C HD"]
    sink: Float[Tensor, "H"] | None
    norm2: Float[Tensor, "C"]
    router: Float[Tensor, "E C"]
    w1: Float[Tensor, "E F C"]
    w3: Float[Tensor, "E F C"]
    w2: Float[Tensor, "E C F"]
    shared: tuple[Tensor, Tensor, Tensor] | None
    more_shared: tuple[Tensor, Tensor, Tensor] | None  # (S - 1, ...) stacks of the others
    n_activated: int
    eps: float


def unsupported(cfg: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the decoding kernels cannot run a model, or None.

    Args:
        cfg: the model's configuration.
        dtype: of weights and activations.
        device: where it runs.
    """
    D = cfg.head_dim
    if D % 8 or D > 256:
        return f"head_dim is {D}, the kernels take multiples of 8 up to 256"
    if cfg.n_heads // cfg.n_kv_heads > MAX_QUERY_ROWS:
        return f"{cfg.n_heads // cfg.n_kv_heads} query heads share a kv head, at most {MAX_QUERY_ROWS} may"
    if dtype == torch.float64:
        return "it is in float64, the kernels take float32 or narrower"
    if device.type != "cuda":
        import triton

        from gptoss.kernels.decode_step import begin_kernel

        if isinstance(begin_kernel, triton.runtime.JITFunction):
            return f"it is on {device}, the kernels run on CUDA (or interpreted, with TRITON_INTERPRET=1 set before triton is imported)"
        if dtype != torch.float32:
            return f"it is in {dtype}, which Triton's interpreter multiplies wrongly; use float32"
        return None
    properties = torch.cuda.get_device_properties(device)
    if dtype == torch.bfloat16 and properties.major < 8:
        return f"{properties.name} has no bfloat16 matrix units; use float16 or float32"
    # Three stages of 64 keys and values, and the queries, in the attention kernel's shared memory.
    needed = (3 * 2 * 64 + 64) * math.ceil(D / 16) * 16 * dtype.itemsize
    there = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # the stub lacks it
    if needed > there:
        return f"head_dim {D} in {dtype} needs {needed} bytes of shared memory, {properties.name} has {there}"
    return None


def pack_layer(block: nn.Module, dtype: torch.dtype) -> LayerWeights:
    """Take a block's weights for decoding in `dtype`; norms and sinks keep theirs, since the kernels read them in fp32.

    The first shared expert runs beside the routed ones. Others are stacked like routed experts that every token selects.

    Args:
        block: a GPTOSSBlock.
        dtype: of the activations.

    Returns:
        The weights, detached. Tensors that had to be cast, clamped or stacked do not follow later changes of the model.
    """
    own: Any = block  # nn.Module types every attribute as a tensor or a module
    attn, moe = own.attn, own.moe

    def take(weight: Tensor) -> Tensor:
        return weight.detach().to(dtype).contiguous()

    shared = [tuple(take(getattr(e, w).weight) for w in ("w1", "w3", "w2")) for e in moe.shared]
    sink = attn.clamped_sink()
    return LayerWeights(
        norm1=own.norm1.weight.detach(),
        q=take(attn.q_proj.weight),
        kv=take(attn.kv_proj.weight),
        o=take(attn.o_proj.weight),
        sink=None if sink is None else sink.detach().clone(),
        norm2=own.norm2.weight.detach(),
        router=take(moe.router.weight),
        w1=take(moe.experts.w1),
        w3=take(moe.experts.w3),
        w2=take(moe.experts.w2),
        shared=(shared[0][0], shared[0][1], shared[0][2]) if shared else None,
        more_shared=_stacked(shared[1:]) if len(shared) > 1 else None,
        n_activated=moe.n_activated,
        eps=own.norm1.eps,
    )


def run_layer(
    x: Float[Tensor, "1 C"],
    weights: LayerWeights,
    place: Place,
    k_cache: Float[Tensor, "1 K M D"],
    v_cache: Float[Tensor, "1 K M D"],
    overlap: bool = False,
) -> Float[Tensor, "1 C"]:
    """x ← x + Attn(norm(x)), then x ← x + MoE(norm(x)) for one token; its key and value go into the caches.

    Args:
        x: residual stream.
        weights: of the layer.
        place: slot, length and angles for this kind of layer.
        k_cache, v_cache: a ring or the whole sequence, changed in place.
        overlap: start each kernel while the one before it ends, where the GPU can.

    Returns:
        The new residual stream.

    Source: chapter 15.
    """
    w = weights
    q = decode_qkv(
        x, w.norm1, w.q, w.kv, place.cos, place.sin, place.slot, k_cache, v_cache, w.eps, overlap
    )
    a = decode_attention(q, k_cache, v_cache, place.length, w.sink, overlap=overlap)  # (1, H, 1, D)
    x = decode_linear(a.flatten(1), w.o, residual=x, overlap=overlap)  # (1, H·D) -> (1, C)
    if w.more_shared is None:
        return decode_moe(
            x, w.norm2, w.router, w.w1, w.w3, w.w2, w.n_activated, w.shared, w.eps, overlap=overlap
        )
    y, indices, given = decode_route(x, w.norm2, w.router, w.n_activated, w.eps, overlap=overlap)
    x = decode_experts(y, indices, given, w.w1, w.w3, w.w2, w.shared, x, overlap)
    n = w.more_shared[0].shape[0]
    every = torch.arange(n, dtype=torch.int32, device=x.device)[None]  # (1, S - 1)
    ones = torch.ones((1, n), device=x.device)
    return decode_experts(y, every, ones, *w.more_shared, None, x, overlap)


def _stacked(experts: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    w1, w3, w2 = (torch.stack(list(matrices)) for matrices in zip(*experts, strict=True))
    return w1, w3, w2
