"""What each operation keeps, held against autograd to the byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss.config import ModelConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.kept_tensors import (
    Setting,
    block_kept,
    head_kept,
    rotary_kept,
    total_bytes,
)
from gptoss.training.memory_measured import kept_for_backward


def config(**changes) -> ModelConfig:
    """A small model; widths are multiples of 8, as grouped_mm wants them."""
    values = {
        "vocab_size": 50,
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 8,
        "ffn_dim": 40,
        "n_routed_experts": 4,
        "window_size": 4,
        "attention_backend": "blocked",
    }
    return ModelConfig(**{**values, **changes})


def setting_of(cfg: ModelConfig, batch: int, seq_len: int, compiled: bool = False) -> Setting:
    backend = cfg.attention_backend
    return Setting(batch, seq_len, cfg.dtype, cfg.moe_dispatch, backend, compiled)


def measured_block(
    cfg: ModelConfig, batch: int, seq_len: int, layer: int = 0, compiled: bool = False
) -> int:
    """Bytes that wait after one block's forward pass; parameters and rotary tables left out."""
    model = GPTOSS(cfg)
    autocast = cfg.dtype == "bf16"
    dtype = torch.bfloat16 if autocast else torch.float32
    x = torch.randn(batch, seq_len, cfg.d_model, dtype=dtype, requires_grad=True)
    tables = model.rotary_tables(torch.arange(seq_len), dtype)
    block = model.blocks[layer]
    backend = "aot_eager_decomp_partition"  # the compiler's partitioner without its code generator
    run = torch.compile(block.forward, fullgraph=True, backend=backend) if compiled else block
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        _, storages = kept_for_backward(
            lambda: run(x, tables[layer % 2]), [*model.parameters(), *tables[0], *tables[1]]
        )
    return sum(storages.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dispatch", ["stacked", "grouped_mm"])
@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sink_bias": False},
        {"rms_norm_detach": True},
        {"n_shared_experts": 0},
        {"n_shared_experts": 2},
        {"n_activated_experts": 3},
        {"n_heads": 2, "head_dim": 24},
    ],
    ids=str,
)
def test_block_keeps_the_listed_bytes(dtype, dispatch, backend, changes) -> None:
    cfg = config(dtype=dtype, moe_dispatch=dispatch, attention_backend=backend, **changes)
    kept = block_kept(cfg, setting_of(cfg, 2, 7))
    assert measured_block(cfg, 2, 7) == total_bytes(kept)


needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs the Triton kernels on CPU tensors, interpreted"
)


@needs_interpreter
@pytest.mark.parametrize("changes", [{}, {"ffn_dim": 38}, {"sink_bias": False}], ids=str)
def test_triton_block_keeps_the_listed_bytes(changes: dict) -> None:
    cfg = config(dtype="fp32", moe_dispatch="triton_grouped", attention_backend="triton", **changes)
    kept = block_kept(cfg, setting_of(cfg, 2, 7))
    assert measured_block(cfg, 2, 7) == total_bytes(kept)


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 4),
    seq_len=st.integers(2, 33),
    layer=st.integers(0, 1),
    experts=st.integers(2, 6),
    dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_block_keeps_the_listed_bytes_at_any_size(batch, seq_len, layer, experts, dtype) -> None:
    cfg = config(dtype=dtype, n_routed_experts=experts)
    kept = block_kept(cfg, setting_of(cfg, batch, seq_len))
    assert measured_block(cfg, batch, seq_len, layer) == total_bytes(kept)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_whole_model_keeps_inputs_of_checkpointed_blocks_and_everything_of_the_others(
    dtype: str, every: int
) -> None:
    cfg = config(dtype=dtype, n_layers=5, yarn_prune_rope_global=False)
    model = GPTOSS(cfg)
    model.enable_gradient_checkpointing(every)
    idx = torch.randint(0, cfg.vocab_size, (2, 9))

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss, aux = model(idx, targets=idx)
        return loss + aux

    _, storages = kept_for_backward(forward, model.parameters())
    setting = setting_of(cfg, 2, 9)
    checkpointed = [every > 0 and layer % every == 0 for layer in range(5)]
    expected = total_bytes(head_kept(cfg, setting)) + idx.numel() * 8
    kinds = {layer % 2 for layer in range(5) if not checkpointed[layer]}  # whose tables are read
    expected += total_bytes(rotary_kept(cfg, setting)) * len(kinds) // 2
    expected += total_bytes(block_kept(cfg, setting)) * checkpointed.count(False)
    expected += idx.numel() * cfg.d_model * setting.width * checkpointed.count(True)
    scalars = sum(size for size in storages.values() if size <= 8)
    assert sum(storages.values()) - scalars == expected


@pytest.mark.parametrize(
    ("dtype", "dispatch"),
    [
        ("bf16", "grouped_mm"),
        ("bf16", "stacked"),
        ("fp32", "stacked"),
        pytest.param("fp32", "triton_grouped", marks=needs_interpreter),
    ],
)
def test_compiled_block_keeps_the_listed_bytes(dtype: str, dispatch: str) -> None:
    """The compiler's own choices, so 2% are allowed; sizes are such that the choices are those of a large model."""
    cfg = config(dtype=dtype, moe_dispatch=dispatch, n_routed_experts=8, ffn_dim=96)
    seq_len = 32 if dispatch == "triton_grouped" else 256  # interpreted kernels are slow
    kept = total_bytes(block_kept(cfg, setting_of(cfg, 2, seq_len, compiled=True)))
    assert measured_block(cfg, 2, seq_len, compiled=True) == pytest.approx(kept, rel=0.02)


def test_views_and_doubles_count_once_and_what_is_let_go_not_at_all() -> None:
    x = torch.ones(100, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x.exp()  # keeps its output: 400 bytes
        (y.sin()).sum()  # nobody holds this sum: its graph is gone
        return (y[:50] * y[50:]).sum()  # two views of y

    _, storages = kept_for_backward(forward)
    assert list(storages.values()) == [400]
