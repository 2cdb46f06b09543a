"""From tensors to launches: strides, outputs, grids, and the tile of each attention kernel.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, G = H/K, D head_dim.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
    """The tiles for a shape and a device, cut down where shared memory is small.

    On a GPU with much shared memory and 16-bit rows: the fastest of those that `gptoss.bench.attention_sweep` tries on one
    H200. Elsewhere: what fits.
    """
    if device.type != "cuda":
        return Plan(*[Tile(16, 16, 4, 1, one_run=window is not None and window <= 16)] * 3)
    properties = torch.cuda.get_device_properties(device)
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # the stub lacks it
    if dtype == torch.float32 or head_dim > 128 or shared_memory < 160 * 1024:
        stages = 1 if shared_memory < 96 * 1024 else 2
        return Plan(*[Tile(32, 32, 4, stages)] * 3)
    if window is not None and window <= 512:
        return Plan(
            Tile(64, 32, 4, 3, one_run=True),
            Tile(64, 32, 4, 2, one_run=True),
            Tile(32, 64, 4, 2, one_run=True),
        )
    return Plan(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3))


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
    check_device(attention_forward_kernel, q)
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    out = empty_rows(q)
    lse = torch.empty((B, H, T), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    with torch.cuda.device_of(q):
        attention_forward_kernel[(triton.cdiv(T, tile.queries) * B * H,)](
            *describe(tile.queries, q),
            *describe(tile.keys, k, v),
            *describe(tile.queries, out),
            *(lse, sink, key_start),
            *(H, H // K, T, S, window or 0, scale * LOG2_E.value),
            HAS_SINK=sink is not None,
            **_constants(D, window, key_start, tile),
        )
    return out, lse


def launch_query_gradient(
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
    tile: Tile,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq, stored as (B, T, H, D), delta (B, H, T), and dsink, None without a sink."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    dq, delta = empty_rows(q), torch.empty_like(lse)
    blocks = triton.cdiv(T, tile.queries)
    parts = None if sink is None else lse.new_empty((B, H, blocks))
    if lse.numel():
        with torch.cuda.device_of(q):
            query_gradient_kernel[(B * H * blocks,)](
                *describe(tile.queries, do, q),
                *describe(tile.keys, k, v),
                *describe(tile.queries, out, dq),
                *(lse, delta, sink, parts, key_start),
                *(H, H // K, T, S, window or 0, scale, scale * LOG2_E.value),
                HAS_SINK=sink is not None,
                **_constants(D, window, key_start, tile),
            )
    if sink is None or parts is None:
        return dq, delta, None
    return dq, delta, parts.sum((0, 2)).to(sink.dtype)


def launch_key_gradient(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    key_start: Tensor | None,
    window: int | None,
    scale: float,
    tile: Tile,
) -> tuple[Tensor, Tensor]:
    """dk and dv, stored as (B, S, K, D)."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    dk, dv = empty_rows(k), empty_rows(v)
    if lse.numel() == 0:
        return dk.zero_(), dv.zero_()
    with torch.cuda.device_of(q):
        key_gradient_kernel[(B * K * triton.cdiv(S, tile.keys),)](
            *describe(tile.queries, do, q),
            *describe(tile.keys, k, v, dk, dv),
            *(lse, delta, key_start),
            *(H, H // K, T, S, window or 0, scale, scale * LOG2_E.value),
            **_constants(D, window, key_start, tile),
        )
    return dk, dv


def empty_rows(tensor: Tensor) -> Tensor:
    """An empty (B, heads, n, D) tensor of the same shape and dtype, stored as the projections store it: (B, n, heads, D)."""
    B, heads, n, D = tensor.shape
    return tensor.new_empty((B, n, heads, D)).transpose(1, 2)


def describe(rows: int, *tensors: Tensor) -> list[TensorDescriptor | None]:
    """For each (B, heads, n, D) tensor two descriptors, of `rows` times the first and the other columns of head_dim."""
    descriptors: list[TensorDescriptor | None] = []
    for tensor in tensors:
        shape, strides = list(tensor.shape), _readable_strides(tensor)
        if strides is None:
            tensor = tensor.contiguous()
            strides = list(tensor.stride())
        for columns in head_dim_pieces(shape[-1]):
            descriptors.append(
                TensorDescriptor(tensor, shape, strides, [1, 1, rows, columns]) if columns else None
            )
    return descriptors


def _readable_strides(tensor: Tensor) -> list[int] | None:
    """The strides if descriptors can express them, else None: rows contiguous, every step a multiple of 16 bytes."""
    aligned = 16 // tensor.element_size()
    if tensor.stride(-1) != 1 or tensor.data_ptr() % 16:
        return None
    strides = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            stride = tensor.shape[-1]  # never stepped; torch leaves anything there
        if stride <= 0 or stride % aligned:
            return None
        strides.append(stride)
    return [*strides, 1]


def _constants(
    head_dim: int, window: int | None, key_start: Tensor | None, tile: Tile
) -> dict[str, int | bool | str]:
    width, rest = head_dim_pieces(head_dim)
    return dict(
        WIDTH=width,
        REST=rest,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        WINDOWED=window is not None,
        ONE_RUN=tile.one_run,
        HAS_KEY_START=key_start is not None,
        PRECISION="ieee",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def check_device(kernel: object, tensor: Tensor) -> None:
    """Refuse what would fail obscurely: a CPU tensor outside the interpreter, bf16 where nothing multiplies it."""
    if not isinstance(kernel, triton.runtime.JITFunction):
        if tensor.dtype == torch.bfloat16:
            raise ValueError("Triton's interpreter multiplies bfloat16 wrongly: use float32")
        return
    if not tensor.is_cuda:
        raise ValueError(
            f"expected CUDA tensors, got {tensor.device}: choose another attention backend there, "
            "or set TRITON_INTERPRET=1 before importing triton to interpret the kernels"
        )
    if tensor.dtype == torch.bfloat16 and torch.cuda.get_device_capability(tensor.device) < (8, 0):
        raise ValueError(
            f"{torch.cuda.get_device_name(tensor.device)} has no bfloat16 matrix units: use float16 or float32"
        )
