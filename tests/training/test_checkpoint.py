"""What goes into a checkpoint comes out of it, by name and bit for bit."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gptoss.config import ModelConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.checkpoint_files import CheckpointError


class TiedModel(nn.Module):
    """Embedding and head share one tensor, as in the production model."""

    def __init__(self, width: int = 4, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


def build(lr: float = 0.1, tie: bool = True) -> tuple[TiedModel, torch.optim.AdamW]:
    model = TiedModel(tie=tie)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Steps on random tokens, so that the losses also show the state of the generator."""
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 6, (3, 5))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_files_have_the_documents_names_and_leave_nothing_else(tmp_path: Path) -> None:
    model, optimizer = build()
    CheckpointManager(tmp_path).save(model, optimizer, 2000)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "meta_step_2000.json",
        "model_step_2000.safetensors",
        "optim_step_2000.safetensors",
    ]


def test_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = build()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (s + 1))
    train(model, optimizer, 3)
    schedule.step()
    CheckpointManager(tmp_path).save(model, optimizer, 3, schedule)
    straight = train(model, optimizer, 3)
    drawn = random.random(), np.random.rand()  # noqa: NPY002 (the global generator is what is tested)

    torch.manual_seed(99)
    other, other_optimizer = build(lr=0.7)
    other_schedule = torch.optim.lr_scheduler.LambdaLR(other_optimizer, lambda s: 1 / (s + 1))
    CheckpointManager(tmp_path).load(other, 3, optimizer=other_optimizer, scheduler=other_schedule)
    assert train(other, other_optimizer, 3) == straight
    assert (random.random(), np.random.rand()) == drawn  # noqa: NPY002
    assert other_schedule.state_dict()["last_epoch"] == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_random_states_stay_where_no_optimizer_is_restored(tmp_path: Path) -> None:
    model, optimizer = build()
    manager = CheckpointManager(tmp_path)
    manager.save(model, optimizer, 1)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    manager.load(model)
    assert torch.rand(1) == expected
    manager.load(model, restore_random=True)
    first = torch.rand(1)
    manager.load(model, restore_random=True)
    assert torch.rand(1) == first


def test_meta_holds_the_callers_values_and_tensors(tmp_path: Path) -> None:
    model, optimizer = build()
    manager = CheckpointManager(tmp_path)
    guard = {"consecutive": 2, "batches": [5, 6], "loss": 0.1, "best": float("inf")}
    manager.save(
        model, optimizer, 7, extra_meta={"guard": guard}, extra_state={"x": torch.arange(3)}
    )
    meta = manager.load(model)
    assert meta["step"] == 7
    assert meta["guard"] == guard
    assert meta["extra_state"]["x"].tolist() == [0, 1, 2]
    assert json.loads((tmp_path / "meta_step_7.json").read_text())["guard"]["batches"] == [5, 6]


def test_optimizer_state_follows_the_name_not_the_position(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    CheckpointManager(tmp_path).save(model, optimizer, 2)
    other = TiedModel()
    backwards = torch.optim.AdamW(list(other.parameters())[::-1], lr=0.5)
    CheckpointManager(tmp_path).load(other, optimizer=backwards)
    for name, parameter in model.named_parameters():
        partner = dict(other.named_parameters())[name]
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[parameter][kind], backwards.state[partner][kind])
    assert backwards.param_groups[0]["lr"] == 0.1


def test_group_settings_follow_their_parameters(tmp_path: Path) -> None:
    def groups(model: TiedModel) -> list[dict]:
        return [
            {"params": [model.embed.weight], "weight_decay": 0.0},
            {"params": list(model.norm.parameters()), "weight_decay": 0.3},
        ]

    model = TiedModel()
    optimizer = torch.optim.AdamW(groups(model), lr=0.1, betas=(0.8, 0.9))
    CheckpointManager(tmp_path).save(model, optimizer, 0)
    other = TiedModel()
    swapped = torch.optim.AdamW(groups(other)[::-1], lr=0.2, weight_decay=0.7, fused=True)
    CheckpointManager(tmp_path).load(other, optimizer=swapped)
    assert [group["weight_decay"] for group in swapped.param_groups] == [0.3, 0.0]
    assert swapped.param_groups[0]["betas"] == (0.8, 0.9)
    assert swapped.param_groups[0]["fused"] is True  # how to compute stays the machine's


def test_optimizer_of_other_parameters_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    CheckpointManager(tmp_path).save(model, optimizer, 2)
    other = TiedModel()
    before = other.embed.weight.clone()
    partial = torch.optim.AdamW(other.norm.parameters())
    with pytest.raises(CheckpointError, match=r"optim_step_2\.safetensors.*embed\.weight"):
        CheckpointManager(tmp_path).load(other, optimizer=partial)
    assert torch.equal(other.embed.weight, before)


def test_optimizer_of_another_model_is_refused_at_save(tmp_path: Path) -> None:
    model, _ = build()
    _, foreign = build()
    with pytest.raises(ValueError, match="is no parameter of the model"):
        CheckpointManager(tmp_path).save(model, foreign, 1)
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_without_an_optimizer_leaves_it_alone(tmp_path: Path, caplog) -> None:
    model, optimizer = build()
    CheckpointManager(tmp_path).save(model, None, 1)
    train(model, optimizer)
    CheckpointManager(tmp_path).load(model, optimizer=optimizer)
    assert optimizer.state[model.embed.weight]["step"] == 2
    assert "holds no optimiser" in caplog.text


def test_state_that_is_no_tensor_comes_back(tmp_path: Path) -> None:
    model = TiedModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.norm.bias] = {"momentum_buffer": None, "calls": 3}
    CheckpointManager(tmp_path).save(model, optimizer, 2)
    again = torch.optim.SGD(model.parameters(), lr=0.3)
    CheckpointManager(tmp_path).load(model, optimizer=again)
    assert again.state[model.norm.bias] == {"momentum_buffer": None, "calls": 3}


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    CheckpointManager(tmp_path).save(model, optimizer, 2)
    assert set(load_file(tmp_path / "model_step_2.safetensors")) == {
        "embed.weight",
        "norm.weight",
        "norm.bias",
    }
    with torch.device("meta"):
        other = TiedModel()
    CheckpointManager(tmp_path).load(other)
    assert other.head.weight is other.embed.weight
    assert sum(p.numel() for p in other.parameters()) == 6 * 4 + 2 * 4
    tokens = torch.arange(6)
    assert torch.equal(model(tokens), other(tokens))


def test_tied_checkpoint_fills_an_untied_model(tmp_path: Path) -> None:
    model, optimizer = build()
    CheckpointManager(tmp_path).save(model, optimizer, 1)
    untied = TiedModel(tie=False)
    CheckpointManager(tmp_path).load(untied)
    assert torch.equal(untied.head.weight, model.embed.weight)
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()


def test_untied_checkpoint_is_refused_by_a_tied_model(tmp_path: Path) -> None:
    model, optimizer = build(tie=False)
    CheckpointManager(tmp_path).save(model, optimizer, 1)
    with pytest.raises(CheckpointError, match=r"head\.weight and embed\.weight differ"):
        CheckpointManager(tmp_path).load(TiedModel())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = TiedModel().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    train(model, optimizer)
    CheckpointManager(tmp_path).save(model, optimizer, 1)
    tensors = load_file(tmp_path / "model_step_1.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    other = TiedModel().to(dtype)
    restored = torch.optim.AdamW(other.parameters())
    CheckpointManager(tmp_path).load(other, optimizer=restored)
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert restored.state[other.embed.weight]["exp_avg"].dtype == dtype


def test_fp32_moments_of_bf16_weights_stay_fp32(tmp_path: Path) -> None:
    model = TiedModel().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = optimizer.state[model.embed.weight]
    state["exp_avg"] = state["exp_avg"].float() + 1e-6  # a value that bf16 cannot hold
    CheckpointManager(tmp_path).save(model, optimizer, 1)
    restored = torch.optim.AdamW(model.parameters())
    CheckpointManager(tmp_path).load(model, optimizer=restored)
    assert torch.equal(restored.state[model.embed.weight]["exp_avg"], state["exp_avg"])


def test_compiled_model_loads_into_the_plain_one_and_back(tmp_path: Path) -> None:
    model, optimizer = build()
    compiled = torch.compile(model, backend="eager")
    train(compiled, optimizer)
    manager = CheckpointManager(tmp_path)
    manager.save(compiled, optimizer, 2)
    assert "embed.weight" in load_file(tmp_path / "model_step_2.safetensors")
    plain, plain_optimizer = build()
    manager.load(plain, optimizer=plain_optimizer)
    assert torch.equal(plain.norm.weight, model.norm.weight)
    manager.save(plain, plain_optimizer, 3)
    nn.init.zeros_(model.norm.weight)
    manager.load(compiled, 3, optimizer=optimizer)
    assert torch.equal(plain.norm.weight, model.norm.weight)


def test_submodule_compiled_on_its_own_keeps_the_plain_names(tmp_path: Path) -> None:
    model = TiedModel()
    model.norm = torch.compile(model.norm, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    CheckpointManager(tmp_path).save(model, optimizer, 1)
    assert "norm.weight" in load_file(tmp_path / "model_step_1.safetensors")
    plain, plain_optimizer = build()
    CheckpointManager(tmp_path).load(plain, optimizer=plain_optimizer)
    state = plain_optimizer.state[plain.norm.weight]["exp_avg"]
    assert torch.equal(state, optimizer.state[model.norm._orig_mod.weight]["exp_avg"])


def test_strict_names_what_is_missing_and_loose_loads_the_rest(tmp_path: Path, caplog) -> None:
    model, optimizer = build()
    CheckpointManager(tmp_path).save(model, optimizer, 1)
    larger = TiedModel()
    larger.extra = nn.Linear(2, 2)
    del larger.norm
    with pytest.raises(RuntimeError, match=r"extra\.weight.*norm\.weight"):
        CheckpointManager(tmp_path).load(larger)
    assert not torch.equal(larger.embed.weight, model.embed.weight)
    CheckpointManager(tmp_path).load(larger, strict=False)
    assert torch.equal(larger.embed.weight, model.embed.weight)
    assert "extra.weight" in caplog.text


def test_another_width_is_refused_with_both_shapes(tmp_path: Path) -> None:
    model, optimizer = build()
    CheckpointManager(tmp_path).save(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"embed\.weight has shape \(6, 4\), the model's \(6, 8\)"):
        CheckpointManager(tmp_path).load(TiedModel(width=8))


def test_listing_deleting_and_keeping(tmp_path: Path) -> None:
    model, optimizer = build()
    manager = CheckpointManager(tmp_path / "deep" / "er")
    assert manager.latest_step() is None
    assert manager.list_checkpoints() == []
    for step in (100, 20, 3, 1000):
        manager.save(model, optimizer, step)
    assert manager.list_checkpoints() == [3, 20, 100, 1000]
    assert manager.latest_step() == 1000
    assert manager.latest_step(at_most=999) == 100
    manager.delete_checkpoint(1000)
    manager.delete_checkpoint(555)
    assert manager.latest_step() == 100
    manager.keep_last_n(2)
    assert manager.list_checkpoints() == [20, 100]
    manager.keep_last_n(5)
    assert manager.list_checkpoints() == [20, 100]
    with pytest.raises(ValueError, match="at least 1"):
        manager.keep_last_n(0)


def test_keeping_never_counts_a_damaged_step(tmp_path: Path) -> None:
    model, optimizer = build()
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(model, optimizer, step)
    (tmp_path / "optim_step_3.safetensors").unlink()
    manager.keep_last_n(1)
    assert manager.list_checkpoints() == [2]
    assert not list(tmp_path.glob("*_step_1.*"))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"step": 3}, "'step', which checkpoints use"),
        ({"loss": torch.tensor(1.0)}, r"meta\.loss is a Tensor"),
        ({"guard": {"seen": [1, {2}]}}, r"meta\.guard\.seen\[1\] is a set"),
        ({"by_rank": {0: 1}}, r"meta\.by_rank has the key 0"),
    ],
)
def test_values_that_would_not_come_back_are_refused(tmp_path: Path, meta, message: str) -> None:
    model, optimizer = build()
    with pytest.raises(ValueError, match=message):
        CheckpointManager(tmp_path).save(model, optimizer, 1, extra_meta=meta)
    assert list(tmp_path.iterdir()) == []


def test_negative_step_is_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    with pytest.raises(ValueError, match="step = -1"):
        CheckpointManager(tmp_path).save(model, optimizer, -1)


def test_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    for place in ("a", "b"):
        CheckpointManager(tmp_path / place).save(model, optimizer, 1)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_tied_embedding_survives_the_meta_device_a_step_and_a_checkpoint(tmp_path: Path) -> None:
    cfg = ModelConfig(
        vocab_size=17,
        d_model=12,
        n_layers=2,
        n_heads=3,
        n_kv_heads=1,
        head_dim=4,
        ffn_dim=10,
        n_routed_experts=3,
        window_size=4,
        dtype="fp32",
    )
    with torch.device("meta"):
        model, other = GPTOSS(cfg), GPTOSS(cfg)
    model.to_empty(device="cpu").init_weights()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(17)[None]
    model(tokens, targets=tokens)[0].backward()
    optimizer.step()
    CheckpointManager(tmp_path).save(model, optimizer, 1)
    CheckpointManager(tmp_path).load(other)
    assert other.head.weight is other.embed.weight
    assert other.num_parameters() == model.num_parameters()
    assert torch.equal(other(tokens, targets=tokens)[0], model(tokens, targets=tokens)[0])
