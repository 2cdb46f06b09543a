"""Compiled blocks: the same step, unchanged names, no CUDA graphs, and few compilations."""

import copy

import pytest
import torch
from small_run import SMALL_MODEL

from gptoss.config import ModelConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.compiling import block_compile_mode, compile_blocks, eager_blocks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("max-autotune", "max-autotune-no-cudagraphs"),
        ("reduce-overhead", "default"),
        ("default", "default"),
        ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ],
)
def test_no_mode_records_cuda_graphs(mode, expected):
    assert block_compile_mode(mode, CUDA) == expected
    assert block_compile_mode(mode, CPU) == "default"


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="fastest"):
        block_compile_mode("fastest", CUDA)


def test_compiled_blocks_take_the_same_step_under_the_same_names(monkeypatch):
    """Captured as on a GPU and run by autograd's own operators: the C++ compiler would take two minutes."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, fullgraph, mode: compile_(f, fullgraph=fullgraph, backend="aot_eager"),
    )
    torch.manual_seed(0)
    plain = GPTOSS(ModelConfig(**{**SMALL_MODEL, "n_layers": 4}))
    compiled = copy.deepcopy(plain)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compile_blocks(compiled, "max-autotune", CPU)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    tokens = torch.randint(0, 64, (2, 33))
    for model in (plain, compiled):
        loss, aux = model(tokens[:, :-1], targets=tokens[:, 1:])
        (loss + 0.01 * aux).backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 2  # one for windowed blocks, one for global ones
    assert not counters["graph_break"]


def test_eager_blocks_come_back_compiled():
    model = GPTOSS(ModelConfig(**SMALL_MODEL))
    compile_blocks(model, "default", CPU)
    compiled = [block.forward for block in model.blocks]
    with eager_blocks(model):
        assert all("forward" not in block.__dict__ for block in model.blocks)
    assert [block.forward for block in model.blocks] == compiled
