"""Where the time goes in one model: its parts, its expert dispatches, its decoding. Relative figures, for one machine.

Shapes: B batch, T tokens, C model width, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gptoss.bench.timing import median_seconds
from gptoss.config import ModelConfig
from gptoss.inference.generate import generate_with_result
from gptoss.kernels.versions import HAS_TRITON
from gptoss.model.attention import causal_attention, repeat_kv
from gptoss.model.moe import MoELayer
from gptoss.model.transformer import GPTOSS


@torch.no_grad()
def components(
    cfg: ModelConfig, device: torch.device, batch: int = 1, seq_len: int | None = None
) -> list[tuple[str, float]]:
    """Median forward time of each part of a model.

    Args:
        cfg: the model.
        device: where.
        batch: B, sequences.
        seq_len: T, tokens; max_seq_len when left out.

    Returns:
        (part, seconds) rows; the parts overlap, so they do not add up to the first.
    """
    T = seq_len or cfg.max_seq_len
    model = GPTOSS(cfg).to(device).eval()
    dtype = torch.bfloat16 if cfg.dtype == "bf16" else torch.float32
    idx = torch.randint(cfg.vocab_size, (batch, T), device=device)
    x = torch.randn(batch, T, cfg.d_model, device=device, dtype=dtype)  # (B, T, C)
    rotary = model.rotary_tables(torch.arange(T, device=device), dtype)
    kv = torch.randn(batch, cfg.n_kv_heads, T, cfg.head_dim, device=device, dtype=dtype)
    q = torch.randn(batch, cfg.n_heads, T, cfg.head_dim, device=device, dtype=dtype)
    windowed: Any = model.blocks[0]  # nn.ModuleList types its items as plain modules
    full: Any = model.blocks[min(1, cfg.n_layers - 1)]
    parts: dict[str, Callable[[], object]] = {
        "model, loss without logits": lambda: model(idx, targets=idx),
        "embedding": lambda: model.embed(idx),
        "RMSNorm": lambda: model.norm(x),
        "rotary tables": lambda: model.rotary_tables(torch.arange(T, device=device), dtype),
        "attention layer, windowed": lambda: windowed.attn(x, rotary[0]),
        "attention layer, global": lambda: full.attn(x, rotary[1]),
        "attention alone, windowed": lambda: causal_attention(q, kv, kv, cfg.window_size),
        "attention alone, global": lambda: causal_attention(q, kv, kv),
        "repeat_kv": lambda: repeat_kv(kv, cfg.n_heads // cfg.n_kv_heads),
        "router": lambda: windowed.moe.router(x.flatten(0, 1)),
        "expert layer": lambda: windowed.moe(x),
        "head, last position": lambda: model.head(x[:, -1:]),
    }
    return [(name, _seconds(part, device, dtype)) for name, part in parts.items()]


def moe(
    cfg: ModelConfig, device: torch.device, tokens: int = 4096
) -> list[tuple[str, float, float]]:
    """Median time of the expert layer under each dispatch: (dispatch, forward, forward and backward), seconds."""
    dtype = torch.bfloat16 if cfg.dtype == "bf16" else torch.float32
    names = ["stacked", "grouped_mm"]
    if HAS_TRITON and device.type == "cuda":
        names.append("triton_grouped")
    rows = []
    for name in names:
        layer = MoELayer(dataclasses.replace(cfg, moe_dispatch=name)).to(device)
        x = torch.randn(1, tokens, cfg.d_model, device=device, requires_grad=True)

        def forward(layer: MoELayer = layer, x: Tensor = x) -> Tensor:
            return layer(x)[0]

        def both(layer: MoELayer = layer, x: Tensor = x) -> None:
            layer(x)[0].float().sum().backward()

        with torch.no_grad():
            once = _seconds(forward, device, dtype)
        rows.append((name, once, _seconds(both, device, dtype)))
    return rows


def decode(
    cfg: ModelConfig, device: torch.device, prompts: Sequence[int] = (8, 32, 128), new: int = 64
) -> list[tuple[int, int, float, float]]:
    """Greedy decoding with random weights: (prompt tokens, new tokens, prefill seconds, decoded tokens a second).

    Prompts that do not fit eval_max_seq_len are left out.
    """
    dtype = torch.bfloat16 if cfg.dtype == "bf16" and device.type == "cuda" else torch.float32
    model = GPTOSS(cfg).to(device, dtype).eval()
    rows = []
    for length in (p for p in prompts if p + new <= cfg.eval_max_seq_len):
        ids = torch.randint(cfg.vocab_size, (1, length), device=device)
        generate_with_result(model, ids, 4, temperature=0.0)  # warm-up
        result = generate_with_result(model, ids, new, temperature=0.0)
        rows.append((length, new, result.prefill_seconds, result.tokens_per_second))
    return rows


def _seconds(run: Callable[[], object], device: torch.device, dtype: torch.dtype) -> float:
    with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
        return median_seconds(run, device, repeats=5 if device.type == "cpu" else 20)
