"""Compiled blocks: the same step, unchanged names, no CUDA graphs, and few compilations."""

import copy

import pytest
import torch
from small_run import SMALL_MODEL

from gptoss.config import ModelConfig
from gptoss.model.moe import expert_load
from gptoss.model.transformer import GPTOSS
from gptoss.training.compiling import (
    block_compile_mode,
    compile_blocks,
    drop_compiled_blocks,
    eager_blocks,
)
from gptoss.training.pretrain import pretrain

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


@pytest.fixture
def captured(monkeypatch):
    """Whatever Dynamo captures, kept and run as it is."""
    compile_, graphs = torch.compile, []

    def note(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(
        torch, "compile", lambda f, fullgraph, mode: compile_(f, fullgraph=fullgraph, backend=note)
    )
    torch._dynamo.reset()
    return graphs


def has_symbolic_size(graph):
    inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
    return any(isinstance(node.meta["example_value"], torch.SymInt) for node in inputs)


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_four_configurations_compile_in_one_process_as_each_would_alone(captured, checkpoint_every):
    """Two kinds of block, with gradients and without: 16 graphs in all, where Dynamo keeps eight for one function."""
    limit = torch._dynamo.config.recompile_limit
    assert limit < 16
    symbolic = []
    for batch, head_dim in enumerate((4, 8, 12, 16), 1):
        width = 4 * head_dim
        config = ModelConfig(**{**SMALL_MODEL, "d_model": width, "head_dim": head_dim})
        model = GPTOSS(config)
        model.enable_gradient_checkpointing(checkpoint_every)
        compile_blocks(model, "default", CPU)
        tokens = torch.randint(0, 64, (batch, 17))
        captured.clear()
        loss, aux = model(tokens[:, :-1], targets=tokens[:, 1:])
        (loss + aux).backward()
        with torch.no_grad():
            model(tokens[:, :-1])
        assert len(captured) == 4
        symbolic += map(has_symbolic_size, captured)
    assert not any(symbolic)  # each as if no other size had been seen
    assert torch._dynamo.config.recompile_limit == limit


def test_eager_blocks_come_back_compiled():
    model = GPTOSS(ModelConfig(**SMALL_MODEL))
    compile_blocks(model, "default", CPU)
    compiled = [block.forward for block in model.blocks]
    with eager_blocks(model):
        assert all("forward" not in block.__dict__ for block in model.blocks)
    assert [block.forward for block in model.blocks] == compiled


def test_expert_load_of_compiled_blocks_is_that_of_plain_ones(captured):
    """A graph that was compiled before the hooks knows nothing of them."""
    model, tokens = GPTOSS(ModelConfig(**SMALL_MODEL)).eval(), torch.randint(0, 64, (2, 16))
    expected = expert_load(model, tokens)
    compile_blocks(model, "default", CPU)
    with torch.no_grad():
        model(tokens, last_only=True)
    graphs = len(captured)
    assert graphs
    assert torch.equal(expert_load(model, tokens), expected)
    with torch.no_grad():
        model(tokens, last_only=True)  # compiled as before, and not again
    assert len(captured) == graphs


def test_dropped_blocks_are_plain_for_good(captured):
    model, tokens = GPTOSS(ModelConfig(**SMALL_MODEL)), torch.randint(0, 64, (2, 16))
    compile_blocks(model, "default", CPU)
    drop_compiled_blocks(model)
    drop_compiled_blocks(model)  # twice is fine
    model(tokens)
    assert not captured


def test_a_run_returns_its_model_with_plain_blocks(captured, small_run):
    """Each length of a text would be compiled for: 24 s for a dozen tokens."""
    graphs_at_step = []
    result = pretrain(
        small_run(compile=True),
        progress=False,
        max_steps=2,
        on_step=lambda step, result: graphs_at_step.append(len(captured)),
    )
    assert graphs_at_step[0] > 0  # the steps were compiled
    graphs = len(captured)
    with torch.no_grad():
        for length in (3, 5):
            result.model(torch.randint(0, 64, (1, length)))
    result.model(torch.randint(0, 64, (1, 4)))[0].sum().backward()
    assert len(captured) == graphs
    assert pretrain(small_run(compile=True), progress=False, max_steps=1).step == 3
    assert len(captured) > graphs  # a call that goes on compiles again
