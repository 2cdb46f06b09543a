"""The moments of the experts' backward pass, held against the allocations of the operator itself."""

import pytest
import torch

from gptoss.config import ModelConfig
from gptoss.kernels.tuning import INTERPRETER
from gptoss.training.kept_tensors import Setting, block_kept, shared_kept, total_bytes
from gptoss.training.memory import predict_training_memory
from gptoss.training.memory_experts import experts_backward, experts_backward_peak
from gptoss.training.memory_measured import LiveBytes

MIB = 2**20
PRODUCTION = {"batch": 8, "seq_len": 4096, "dispatch": "triton_grouped", "backend": "triton"}


def production(compiled: bool = True) -> Setting:
    return Setting(8, 4096, "bf16", "triton_grouped", "triton", compiled)


def test_production_moments_by_hand() -> None:
    """R = 65,536: (R, C) in bf16 is 96 MiB, (R, F) 192, the experts' three gradients 54, and R numbers in fp32 ¼."""
    moments = experts_backward(ModelConfig(), production())
    found = {name: sum(tensors.values()) / MIB for name, tensors in moments.items()}
    assert found == {
        "derivative of the SwiGLU": 96 + 384 + 192 + 0.25,
        "weight gradients": 96 + 384 + 192 + 0.25 + 54,
        "input gradient": 384 + 54 + 0.25 + 96 + 48,
    }
    assert experts_backward_peak(ModelConfig(), production()) == 726.25 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the allocations on CPU tensors")
@pytest.mark.parametrize("tokens", [16, 512], ids=["weights are large", "rows are many"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"ffn_dim": 38}, {"head_dim": 6, "ffn_dim": 38}, {"n_activated_experts": 3}],
    ids=str,
)
def test_operator_allocates_the_listed_bytes(changes, tokens, monkeypatch) -> None:
    """The operator's own lines, without its kernels: what they allocate does not depend on what they compute."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs Triton")
    from gptoss.kernels.expert_layer import _experts, _experts_backward

    values = {"vocab_size": 50, "d_model": 40, "n_heads": 5, "n_kv_heads": 1, "head_dim": 8}
    values |= {"ffn_dim": 96, "n_routed_experts": 4, "dtype": "bf16", **changes}
    cfg = ModelConfig(**{**values, "d_model": 5 * values["head_dim"]})
    E, k, C, F = cfg.n_routed_experts, cfg.n_activated_experts, cfg.d_model, cfg.ffn_dim
    half = torch.float16  # as wide as bf16, which the interpreter refuses
    x, w1, w3, w2 = (
        torch.zeros(shape, dtype=half) for shape in ((tokens, C), (E, F, C), (E, F, C), (E, C, F))
    )
    weights, order = torch.zeros(tokens, k), torch.arange(tokens * k)
    plan = (weights, order, order, torch.zeros(E, dtype=torch.int32))
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    _, *kept = _experts._init_fn(x, *plan, w1, w3, w2, False)
    inputs = (torch.zeros_like(x), x, *plan, w1, w3, w2, *kept)
    with LiveBytes(inputs) as live:
        before = live.now
        results = _experts_backward._init_fn(*inputs)
    assert [result.shape for result in results] == [t.shape for t in (x, weights, w1, w3, w2)]
    setting = Setting(1, tokens, "bf16", "triton_grouped", "triton", True)
    listed = experts_backward_peak(cfg, setting)
    tile_rows = INTERPRETER["down"].m
    table = 4 * 4 * (3 * (tokens * k // tile_rows + E) // 4 + 12)  # a few int32 a tile
    assert listed <= live.peak - before <= listed + table


def test_block_at_work_is_its_tape_its_operators_and_the_incoming_gradient() -> None:
    """Compiled, everything that the block keeps is there; its input, which it keeps itself, counts once."""
    cfg, setting = ModelConfig(), production()
    predicted = predict_training_memory(cfg, every=1, compiled=True, **PRODUCTION)
    kept = total_bytes(block_kept(cfg, setting))
    other = predicted.peak.weights + predicted.peak.gradients + predicted.peak.optimizer
    other += 32 * MIB + 8 * 4096 * 8  # cuBLAS, token ids
    other += 2 * 2 * 4096 * 48 * 2  # rotary tables
    assert predicted.peak.name == "backward of block 0"
    assert predicted.peak.total - other == kept + (726.25 + 48) * MIB


def test_shared_expert_is_done_first_in_an_eager_block() -> None:
    cfg, setting = ModelConfig(), production(compiled=False)
    at = {m.name: m for m in predict_training_memory(cfg, every=0, **PRODUCTION).moments}
    shared = total_bytes(k for k in shared_kept(cfg, setting) if not k.weight_copy)
    everything = total_bytes(k for k in block_kept(cfg, setting) if not k.weight_copy)
    rest = 8 * 4096 * 8 + 2 * 2 * 4096 * 48 * 2  # token ids, rotary tables
    assert at["backward of block 0"].activations == everything - shared + 48 * MIB + rest
