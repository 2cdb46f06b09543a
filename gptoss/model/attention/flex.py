"""Attention through PyTorch's flex_attention, with the sink applied to its log-sum-exp.

For CUDA: on a CPU flex_attention has no backward, and its forward here is the dense one. The block mask is computed from the band's arithmetic, two numbers a
block row, so that no T × T object exists; its table has (T/128)² entries.

Shapes: B batch, T queries, S keys, H query heads, K kv heads, D head_dim.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
# Compiles on the first call of each shape; eager flex is dense. Lengths stay constants in the kernel: with symbolic ones
# torch 2.11 cannot lower the block mask. For a fixed training length that costs nothing; where lengths vary take "triton".
fused_flex_attention = torch.compile(flex_attention, dynamic=False)


def flex_causal_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S D"],
    window: int | None = None,
    sink_bias: Float[Tensor, "H"] | None = None,
    *,
    scale: float | None = None,
    key_start: Int[Tensor, "B"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """The function of `manual_causal_attention` as one fused kernel and one multiplication.

    out = softmax-attention · σ(lse − b), where lse is the log-sum-exp that the kernel returns. Its gradient flows back
    through lse, and both dQ and dK need it (chapter 7).

    Args and shapes as in `manual_causal_attention`.

    Source: Dong et al. (2024); chapter 7 for the identity.
    """
    compiled_already = torch.compiler.is_compiling() or q.device.type == "cpu"
    attend: Any = flex_attention if compiled_already else fused_flex_attention
    out, aux = attend(
        q,
        k,
        v,
        block_mask=band_block_mask(q.shape[2], k.shape[2], window, key_start, q.device),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sink_bias is None:
        return out
    gate = torch.sigmoid(aux.lse - sink_bias.to(aux.lse.dtype)[:, None])  # (B, H, T)
    return (out * gate.unsqueeze(-1)).to(q.dtype)


def band_block_mask(
    T: int,
    S: int,
    window: int | None,
    key_start: Int[Tensor, "B"] | None,
    device: torch.device,
) -> BlockMask:
    """The blocks of 128 × 128 pairs that a causal band touches, those wholly inside it marked as needing no mask.

    Args:
        T, S: queries and keys in tokens; the queries are the last T.
        window: W in tokens, or None.
        key_start: padding keys, one number a row; the blocks are then all masked.
        device: of the tables.
    """
    offset = S - T
    n_rows, n_columns = -(-T // BLOCK), -(-S // BLOCK)
    row = torch.arange(n_rows, device=device)
    column = torch.arange(n_columns, device=device)
    first_query, last_query = row * BLOCK + offset, (row * BLOCK + BLOCK).clamp(max=T) - 1 + offset
    low = torch.zeros_like(row) if window is None else (first_query - window + 1).clamp(min=0)
    first_block, end_block = low // BLOCK, last_query // BLOCK + 1  # half-open, (n_rows,)
    # a block is full when its last key is seen by the first query and its first key by the last one
    end_full = (first_query + 1) // BLOCK
    first_full = (
        torch.zeros_like(row)
        if window is None
        else -(-(last_query - window + 1).clamp(min=0) // BLOCK)
    )
    if key_start is not None:
        end_full = first_full
    touched = (column >= first_block[:, None]) & (column < end_block[:, None])
    full = touched & (column >= first_full[:, None]) & (column < end_full[:, None])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + offset - key
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        return seen if key_start is None else seen & (key >= key_start[batch])

    return BlockMask.from_kv_blocks(
        *_as_lists(touched & ~full),
        *_as_lists(full),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
        seq_lengths=(T, S),
    )


def _as_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are set, and their columns first: (1, 1, n_rows) and (1, 1, n_rows, n_columns)."""
    count = blocks.sum(dim=-1, dtype=torch.int32)
    order = torch.argsort((~blocks).to(torch.uint8), dim=-1, stable=True).to(torch.int32)
    return count[None, None], order[None, None]
