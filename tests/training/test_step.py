"""One step: accumulation weighted by tokens, the load-balancing loss, and steps that must not be taken."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small_run import SMALL_MODEL

from gptoss.config import ModelConfig, TrainingConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.distributed import World
from gptoss.training.optim import build_optimizer
from gptoss.training.schedule import Schedule
from gptoss.training.step import TrainStep

CPU = World(torch.device("cpu"))


def make_step(model: GPTOSS, **settings) -> TrainStep:
    optimizer = build_optimizer(model, lr=1e-2)
    schedule = Schedule(1e-2, 0, 100, 0.1)
    return TrainStep(model, optimizer, schedule, CPU, TrainingConfig(**settings))


@pytest.fixture
def model() -> GPTOSS:
    torch.manual_seed(1)
    return GPTOSS(ModelConfig(**SMALL_MODEL))


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, 3, 33), generator=torch.Generator().manual_seed(3))
    return tokens[..., :-1], tokens[..., 1:].clone()  # (A, B, T)


def same_weights(a: GPTOSS, b: GPTOSS) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_micro_batch_weighs_as_much_as_it_has_targets(model, data):
    inputs, targets = data
    targets[1, :, 3:] = -100  # 96 targets in the first micro-batch, 9 in the second
    reference = copy.deepcopy(model).double()
    seen = {}
    step = make_step(model, aux_loss_alpha=0.0, grad_clip=1e9)
    hook = step.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    result = step(inputs, targets).wait()
    hook.remove()
    logits, _ = reference(inputs.flatten(0, 1))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # one mean over 105 targets
    expected.backward()
    assert result.loss == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(seen[name].double(), parameter.grad, rtol=1e-3, atol=1e-6)


def test_nothing_to_predict_is_finite_and_taken(model, data):
    inputs, targets = data
    result = make_step(model)(inputs, torch.full_like(targets, -100)).wait()
    assert result.loss == 0
    assert result.taken
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_load_balancing_loss_is_the_mean_over_micro_batches(model, data):
    inputs, targets = data
    with torch.no_grad():
        each = [model(inputs[m])[1].item() for m in range(2)]
        whole = model(inputs.flatten(0, 1))[1].item()
    result = make_step(model)(inputs, targets).wait()
    assert result.aux == pytest.approx(sum(each) / 2, abs=1e-6)
    assert result.aux != pytest.approx(whole, abs=1e-6)  # not that of all tokens together


def test_alpha_scales_the_load_balancing_gradient(model, data):
    inputs, targets = data
    targets = torch.full_like(
        targets, -100
    )  # the router's gradient is the load-balancing loss's alone
    norms = [
        make_step(copy.deepcopy(model), aux_loss_alpha=alpha)(inputs, targets).wait().grad_norm
        for alpha in (0.01, 0.02)
    ]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-4)
    assert norms[0] > 0


def test_a_nan_gradient_under_a_finite_loss_is_not_taken(model, data):
    step, before = make_step(model), copy.deepcopy(model)
    hook = model.blocks[0].norm1.weight.register_hook(lambda g: g * float("nan"))
    result = step(*data).wait()
    assert torch.isfinite(torch.tensor(result.loss))
    assert not torch.isfinite(torch.tensor(result.grad_norm))
    assert not result.taken
    assert same_weights(model, before)
    assert step.schedule.state_dict() == {"taken": 0}
    hook.remove()
    assert step(*data).wait().taken  # nothing of it is left behind
    assert not same_weights(model, before)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_weights_that_are_already_nan_are_not_taken_further(model, data):
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    before = copy.deepcopy(model)
    assert not make_step(model)(*data).wait().taken
    for a, b in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_without_the_guard_the_step_is_taken(model, data):
    step = make_step(model, nan_guard=False)
    model.blocks[0].norm1.weight.register_hook(lambda g: g * float("nan"))
    assert step(*data).wait().taken
    assert not all(torch.isfinite(p).all() for p in model.parameters())


def test_gradient_checkpointing_takes_the_same_step(model, data):
    other = copy.deepcopy(model)
    other.enable_gradient_checkpointing(1)
    results = [make_step(m)(*data).wait() for m in (model, other)]
    assert results[0] == results[1]
    assert same_weights(model, other)


def test_autocast_keeps_fp32_weights_and_a_near_loss(model, data):
    other = copy.deepcopy(model)
    step = make_step(other)
    step.autocast = torch.bfloat16
    full, half = make_step(model)(*data).wait(), step(*data).wait()
    assert half.loss == pytest.approx(full.loss, rel=1e-2)  # bf16 keeps 8 bits: 0.4% a product
    assert all(p.dtype == torch.float32 for p in other.parameters())


def test_a_request_to_stop_comes_back_with_the_result(model, data):
    step = make_step(model)
    assert [step(*data, stop=s).wait().stop for s in (False, True)] == [False, True]
