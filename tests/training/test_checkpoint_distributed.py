"""One checkpoint for any number of processes: DDP and FSDP2 on gloo, two ranks, into the plain model and back."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gptoss.config import ModelConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.checkpoint import CheckpointManager

TOKENS = torch.arange(24).remainder(17).view(2, 12)


def build(seed: int = 0, device: str = "cpu") -> GPTOSS:
    """A production model in small; heads and experts that two ranks do not divide evenly."""
    torch.manual_seed(seed)
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
    with torch.device(device):
        return GPTOSS(cfg)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> float:
    for _ in range(steps):
        loss, aux = model(TOKENS, targets=TOKENS)
        optimizer.zero_grad()
        (loss + aux).backward()
        optimizer.step()
    return loss.item()


def sharded(model: GPTOSS) -> GPTOSS:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_two_ranks(directory: Path, work: Callable[[int, Path], None], world: int = 2) -> None:
    """Run `work` on gloo in forked processes; its assertions are this test's."""

    def run(rank: int) -> None:
        store = dist.FileStore(str(directory / "rendezvous"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        work(rank, directory / "run")
        dist.destroy_process_group()

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=run, args=(rank,)) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * world
    (directory / "rendezvous").unlink(missing_ok=True)


@pytest.fixture
def plain_run(tmp_path: Path) -> tuple[GPTOSS, torch.optim.AdamW, Path]:
    """Two steps in one process, saved; then the two files to compare with."""
    model = build()
    optimizer = adamw(model)
    train(model, optimizer, 2)
    CheckpointManager(tmp_path / "plain").save(model, optimizer, 2)
    return model, optimizer, tmp_path


def tensors_of(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything but the random states, which belong to the ranks."""
    return {
        name: tensor
        for kind in ("model", "optim")
        for name, tensor in load_file(directory / f"{kind}_step_{step}.safetensors").items()
        if not name.startswith("random.")
    }


def test_compiled_ddp_saves_the_plain_models_files_and_loads_them(plain_run) -> None:
    _, _, directory = plain_run

    def work(rank: int, run: Path) -> None:
        model = torch.compile(DistributedDataParallel(build()), backend="eager")
        optimizer = adamw(model)
        train(model, optimizer, 2)
        CheckpointManager(run).save(model, optimizer, 2)
        other = torch.compile(DistributedDataParallel(build(seed=1)), backend="eager")
        other_optimizer = adamw(other)
        CheckpointManager(directory / "plain").load(other, 2, optimizer=other_optimizer)
        assert train(other, other_optimizer) == pytest.approx(train(model, optimizer), abs=1e-6)

    on_two_ranks(directory, work)
    plain, wrapped = tensors_of(directory / "plain", 2), tensors_of(directory / "run", 2)
    assert plain.keys() == wrapped.keys()
    for name in plain:
        torch.testing.assert_close(plain[name], wrapped[name])
    loaded = build(seed=2)
    CheckpointManager(directory / "run").load(loaded)
    assert loaded.head.weight is loaded.embed.weight


def test_fsdp2_gathers_and_scatters_the_plain_models_files(plain_run) -> None:
    """Loading and saving again moves no bit: every tensor is cut and put together exactly."""
    model, optimizer, directory = plain_run

    def work(rank: int, run: Path) -> None:
        other = sharded(build(seed=1))
        other_optimizer = adamw(other)
        CheckpointManager(directory / "plain").load(other, optimizer=other_optimizer)
        CheckpointManager(run).save(other, other_optimizer, 2)
        losses = train(other, other_optimizer, 3)
        (directory / f"loss{rank}").write_text(repr(losses))

    on_two_ranks(directory, work)
    plain, gathered = tensors_of(directory / "plain", 2), tensors_of(directory / "run", 2)
    assert plain.keys() == gathered.keys()
    assert all(torch.equal(plain[name], gathered[name]) for name in plain)
    expected = train(model, optimizer, 3)
    for rank in range(2):
        assert float((directory / f"loss{rank}").read_text()) == pytest.approx(expected, abs=1e-5)


def test_fsdp2_on_the_meta_device_becomes_real(plain_run) -> None:
    _, _, directory = plain_run

    def work(rank: int, run: Path) -> None:
        other = sharded(build(device="meta"))
        CheckpointManager(directory / "plain").load(other)
        assert not any(parameter.is_meta for parameter in other.parameters())
        optimizer = adamw(other)
        train(other, optimizer)
        CheckpointManager(run).save(other, optimizer, 3)

    on_two_ranks(directory, work)
    assert CheckpointManager(directory / "run").latest_step() == 3


def test_random_states_of_each_rank_come_back(tmp_path: Path) -> None:
    def work(rank: int, run: Path) -> None:
        model = build()
        torch.manual_seed(rank)
        manager = CheckpointManager(run)
        manager.save(model, None, 1)
        drawn = torch.rand(3)
        torch.manual_seed(77)
        manager.load(model, restore_random=True)
        assert torch.equal(torch.rand(3), drawn)

    on_two_ranks(tmp_path, work)


def test_failure_on_rank_0_reaches_every_rank(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")

    def work(rank: int, run: Path) -> None:
        with pytest.raises(OSError, match="step 1 not saved"):
            CheckpointManager(run).save(build(), None, 1)
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            CheckpointManager(run).load(build())

    on_two_ranks(tmp_path, work)
