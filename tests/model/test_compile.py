"""torch.compile(fullgraph=True) takes the model whole, and new lengths do not compile it again and again."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from gptoss.config import ModelConfig
from gptoss.model.cache import MixedKVCache
from gptoss.model.moe import MoELayer
from gptoss.model.transformer import GPTOSS


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def config(**changes: object) -> ModelConfig:
    base = {
        "vocab_size": 40, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
        "ffn_dim": 32, "n_routed_experts": 4, "window_size": 16, "yarn_original_max_seq_len": 64,
        "yarn_target_seq_len": 2048, "max_seq_len": 64, "eval_max_seq_len": 2048,
    }  # fmt: skip
    return ModelConfig(**(base | changes))  # type: ignore[arg-type]  # plain values


@pytest.mark.parametrize("dispatch", ["stacked", "grouped_mm"])
def test_training_step_compiles_whole_and_keeps_its_numbers(dispatch: str) -> None:
    model = GPTOSS(config(moe_dispatch=dispatch))
    idx = torch.randint(0, 40, (2, 24))
    leaves = list(model.parameters())
    bf16 = dispatch == "grouped_mm"  # its meta kernel takes nothing else

    def numbers(forward) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]  # a compiled module
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss, aux = forward(idx, targets=idx.roll(-1, 1))
        return [loss, aux, *torch.autograd.grad(loss + aux, leaves)]

    eager = numbers(model)
    compiled = numbers(torch.compile(model, fullgraph=True, backend="aot_eager"))
    # fp32: the same sums in another order; bf16: intermediates keep 8 bits, and where they are rounded moves
    tolerance = {"rtol": 0.02, "atol": 5e-3} if bf16 else {"rtol": 1e-4, "atol": 1e-5}
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


def test_lengths_100_to_130_compile_twice() -> None:
    model = GPTOSS(config())
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in range(100, 131):
        compiled(torch.randint(0, 40, (1, length)), targets=torch.randint(0, 40, (1, length)))
    assert counter.frame_count <= 2  # one length, then any length


def test_twenty_decode_steps_compile_a_bounded_number_of_times() -> None:
    model = GPTOSS(config()).eval()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        cache = MixedKVCache.for_model(model, max_len=64)
        model(torch.randint(0, 40, (1, 20)), cache=cache)
        frames = []
        for _ in range(20):
            compiled(torch.randint(0, 40, (1, 1)), cache=cache)
            frames.append(counter.frame_count)
    assert frames[-1] <= 3, frames
    assert frames[-1] == frames[4], frames  # nothing new after the first few steps


def test_an_idle_expert_does_not_recompile() -> None:
    layer = MoELayer(config())
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    x = torch.randn(1, 30, 32)
    compiled(x)
    with torch.no_grad():
        layer.router.weight.zero_()
    compiled(x)
    assert counter.frame_count == 1
