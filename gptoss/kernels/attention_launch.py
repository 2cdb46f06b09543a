"""From tensors to launches: strides, outputs, grids, and the tile of each attention kernel.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gptoss.kernels.attention_backward import key_gradient_kernel, query_gradient_kernel
from gptoss.kernels.attention_forward import LOG2_E, attention_forward_kernel
from gptoss.kernels.attention_tiles import head_dim_pieces


class Tile(NamedTuple):
    """One kernel's block of queries and of keys, the warps of a program, and the stages of its load pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int
    one_run: bool = False


class Plan(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


def choose_plan(
    head_dim: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Plan:
    """The tiles for a shape and a device: measured on an H200, cut down where shared memory is small."""
    if device.type != "cuda":
        return Plan(*[Tile(16, 16, 4, 1, one_run=window is not None and window <= 16)] * 3)
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if dtype == torch.float32 or head_dim > 128 or shared_memory < 160 * 1024:
        stages = 1 if shared_memory < 96 * 1024 else 2
        return Plan(*[Tile(32, 32, 4, stages)] * 3)
    if window is not None and window <= 512:
        return Plan(
            Tile(64, 64, 4, 3, one_run=True),
            Tile(64, 64, 4, 2, one_run=True),
            Tile(64, 64, 4, 2, one_run=True),
        )
    return Plan(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    """out (B, H, T, D), stored as (B, T, H, D), and lse (B, H, T) in fp32."""
    _check_device(attention_forward_kernel, q)
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    q, k, v = map(_rows_in_place, (q, k, v))
    out = q.new_empty((B, T, H, D)).transpose(1, 2)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    width, rest = head_dim_pieces(D)
    with torch.cuda.device_of(q):
        attention_forward_kernel[(triton.cdiv(T, tile.queries) * B * H,)](
            *(q, k, v, out, lse, sink, key_start),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
            *(H, H // K, T, S, window or 0, scale * LOG2_E.value),
            D=D,
            WIDTH=width,
            REST=rest,
            **_tile_arguments(tile),
            WINDOWED=window is not None,
            HAS_SINK=sink is not None,
            HAS_KEY_START=key_start is not None,
            PRECISION="ieee",
        )
    return out, lse


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink); dsink is None without a sink."""
    _check_device(query_gradient_kernel, q)
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    do, q, k, v, out = map(_rows_in_place, (do, q, k, v, out))
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    if lse.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), None if sink is None else torch.zeros_like(sink)
    width, rest = head_dim_pieces(D)
    delta = torch.empty_like(lse)
    blocks = triton.cdiv(T, plan.query_gradient.queries)
    dsink_parts = None if sink is None else lse.new_empty((B, H, blocks))
    common = dict(
        D=D,
        WIDTH=width,
        REST=rest,
        WINDOWED=window is not None,
        HAS_KEY_START=key_start is not None,
        PRECISION="ieee",
    )
    sizes = (H, H // K, T, S, window or 0, scale, scale * LOG2_E.value)
    inputs = (*do.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    with torch.cuda.device_of(q):
        query_gradient_kernel[(B * H * blocks,)](
            *(do, q, k, v, out, lse, sink, key_start, dq, delta, dsink_parts),
            *(*inputs, *out.stride()[:3], *dq.stride()[:3]),
            *sizes,
            HAS_SINK=sink is not None,
            **common,
            **_tile_arguments(plan.query_gradient),
        )
        key_gradient_kernel[(B * K * triton.cdiv(S, plan.key_gradient.keys),)](
            *(do, q, k, v, lse, delta, key_start, dk, dv),
            *(*inputs, *dk.stride()[:3], *dv.stride()[:3]),
            *sizes,
            **common,
            **_tile_arguments(plan.key_gradient),
        )
    if sink is None or dsink_parts is None:
        return dq, dk, dv, None
    return dq, dk, dv, dsink_parts.sum((0, 2)).to(sink.dtype)


def _tile_arguments(tile: Tile) -> dict[str, int | bool]:
    return dict(
        QUERIES=tile.queries,
        KEYS=tile.keys,
        ONE_RUN=tile.one_run,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _rows_in_place(tensor: Tensor) -> Tensor:
    """The tensor itself when its rows are contiguous in memory; a copy when they are not."""
    return tensor if tensor.stride(-1) == 1 and tensor.stride(-2) < 2**23 else tensor.contiguous()


def _check_device(kernel: object, tensor: Tensor) -> None:
    """Refuse what would fail obscurely: a CPU tensor outside the interpreter, bf16 on a GPU that has none."""
    if not isinstance(kernel, triton.runtime.JITFunction):
        return  # the interpreter takes any device
    if not tensor.is_cuda:
        raise ValueError(
            f"expected CUDA tensors, got {tensor.device}: choose another attention backend there, "
            "or set TRITON_INTERPRET=1 before importing triton to interpret the kernels"
        )
    if tensor.dtype == torch.bfloat16 and torch.cuda.get_device_capability(tensor.device) < (8, 0):
        raise ValueError(
            f"{torch.cuda.get_device_name(tensor.device)} has no bfloat16 matrix units: use float16 or float32"
        )
