"""Decay groups to the unit, and an update that the device may refuse."""

import copy

import pytest
import torch
from small_run import SMALL_MODEL
from torch import nn

from gptoss.config import ModelConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.optim import build_optimizer, decay_groups, gradient_norm, update


def count(parameters) -> int:
    return sum(p.numel() for p in parameters)


def production(**changes) -> GPTOSS:
    with torch.device("meta"):
        return GPTOSS(ModelConfig(**changes))


def test_production_groups_to_the_unit():
    decay, plain = decay_groups(production())
    assert count(decay) == 403_513_344
    assert count(plain) == 98_323_296  # 128,000 · 768 + 25 norms · 768 + 12 · 8 sinks


def test_an_untied_head_decays_and_its_embedding_does_not():
    decay, plain = decay_groups(production(weight_tying=False))
    assert count(decay) == 403_513_344 + 98_304_000
    assert count(plain) == 98_323_296


def test_the_embedding_is_found_by_identity_under_any_name():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 6, bias=True)
            self.lookup = nn.Embedding(6, 4)
            self.lookup.weight = self.out.weight  # first met as out.weight

    model = Odd()
    decay, plain = decay_groups(model)
    assert decay == []
    assert {id(p) for p in plain} == {id(model.out.weight), id(model.out.bias)}


def test_each_tensor_is_in_one_group_once_and_frozen_ones_in_none():
    model = GPTOSS(ModelConfig(**SMALL_MODEL))
    model.norm.weight.requires_grad_(False)
    decay, plain = decay_groups(model)
    ids = [id(p) for p in (*decay, *plain)]
    assert len(ids) == len(set(ids)) == len(list(model.parameters())) - 1


def test_settings_reach_adamw():
    optimizer = build_optimizer(nn.Linear(2, 2), 3e-4, (0.8, 0.9), 1e-5, 0.2)
    matrix, bias = optimizer.param_groups
    assert (matrix["weight_decay"], bias["weight_decay"]) == (0.2, 0.0)
    assert all((g["lr"], g["betas"], g["eps"]) == (3e-4, (0.8, 0.9), 1e-5) for g in (matrix, bias))


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameter"):
        build_optimizer(nn.ReLU(), 1e-3)


def pair() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    return model, copy.deepcopy(model)


def backward(model: nn.Module, scale: float) -> None:
    model.zero_grad()
    (model(torch.tensor([1, 2])).pow(2).sum() * scale).backward()


@pytest.mark.parametrize("scale", [0.01, 100.0])  # below the clip and far above it
def test_update_equals_clip_and_adamw(scale):
    mine, reference = pair()
    optimizer = build_optimizer(mine, lr=0.5)  # the rate given to update counts, not this
    decay, plain = decay_groups(reference)
    oracle = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-6,
        foreach=False,
    )
    for _ in range(4):
        backward(mine, scale)
        backward(reference, scale)
        norm = gradient_norm(mine.parameters())
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.testing.assert_close(norm, expected)
        update(optimizer, torch.tensor(1e-2), norm, 1.0, torch.tensor(True))
        oracle.step()
    for a, b in zip(mine.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_refused_update_changes_nothing_even_with_nan_gradients():
    model, _ = pair()
    optimizer = build_optimizer(model, lr=1e-2)
    backward(model, 1.0)
    update(
        optimizer, torch.tensor(1e-2), gradient_norm(model.parameters()), 1.0, torch.tensor(True)
    )
    weights = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    backward(model, float("nan"))
    norm = gradient_norm(model.parameters())
    update(optimizer, torch.tensor(1e-2), norm, 1.0, torch.isfinite(norm))
    for before, after in zip(weights, model.parameters(), strict=True):
        assert torch.equal(before, after)
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, values in state["state"].items():
        for name, value in values.items():
            assert torch.equal(value, after["state"][key][name]), name


def test_the_saved_state_stays_plain_numbers():
    model, _ = pair()
    optimizer = build_optimizer(model, lr=1e-2)
    backward(model, 1.0)
    update(optimizer, torch.tensor(5e-3), torch.tensor(1.0), 1.0, torch.tensor(True))
    assert [g["lr"] for g in optimizer.param_groups] == [1e-2, 1e-2]
    assert not hasattr(optimizer, "found_inf")
