"""Two processes on gloo: DDP and FSDP2 train the single process's model, and stop, skip and save as one."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import yaml
from ranks import on_ranks
from small_run import SMALL_MODEL

from gptoss.config import ModelConfig, TrainingConfig
from gptoss.model.transformer import GPTOSS
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.distributed import World, spread
from gptoss.training.journal import read_journal
from gptoss.training.optim import build_optimizer
from gptoss.training.pretrain import pretrain
from gptoss.training.schedule import Schedule
from gptoss.training.step import StepResult, TrainStep

# Micro-batches of one sequence: then two processes compute the very load-balancing losses that one does.
ONE_BY_ONE = {"micro_batch_size": 1, "gradient_accumulation_steps": 4}
ENGINES = ("ddp", "fsdp2")


def world_of(rank: int) -> World:
    return World(torch.device("cpu"), rank, dist.get_world_size())


def make_step(model: GPTOSS, world: World, engine: str = "ddp", **settings) -> TrainStep:
    module = spread(model, world, engine)
    training = TrainingConfig(**settings)
    return TrainStep(
        module, build_optimizer(module, 1e-2), Schedule(1e-2, 0, 99, 0.1), world, training
    )


def whole(model: GPTOSS) -> dict[str, torch.Tensor]:
    return {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_have_the_loss_curve_of_one(small_run, tmp_path, engine):
    alone = pretrain(small_run("alone", **ONE_BY_ONE), progress=False)

    def work(rank: int) -> None:
        result = pretrain(small_run("both", parallel=engine, **ONE_BY_ONE), progress=False)
        (tmp_path / f"losses{rank}").write_text(json.dumps([result.losses, result.tokens_per_step]))

    on_ranks(tmp_path, work)
    curves = [json.loads((tmp_path / f"losses{rank}").read_text()) for rank in (0, 1)]
    assert curves[0] == curves[1]
    assert curves[0][1] == alone.tokens_per_step == 128
    # fp32 sums in another order: a few units of 6e-8 a step, grown by ten steps of training.
    assert curves[0][0] == pytest.approx(alone.losses, rel=1e-4)
    steps = [
        r["step"] for r in read_journal(tmp_path / "both" / "metrics.jsonl") if "event" not in r
    ]
    assert steps == list(range(1, 11))  # one process writes, once


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_moves_between_one_process_and_two(small_run, tmp_path, engine):
    straight = pretrain(small_run("alone", **ONE_BY_ONE), progress=False)
    run = small_run("moving", parallel=engine, **ONE_BY_ONE)
    first = pretrain(run, progress=False, max_steps=3)

    def work(rank: int) -> None:
        result = pretrain(run, progress=False, max_steps=4)
        (tmp_path / f"middle{rank}").write_text(json.dumps(result.losses))

    on_ranks(tmp_path, work)
    middle = json.loads((tmp_path / "middle0").read_text())
    last = pretrain(run, progress=False)
    assert last.first_step == 7
    assert first.losses + middle + last.losses == pytest.approx(straight.losses, rel=1e-4)


def test_torchrun_trains_and_ends(small_run, tmp_path):
    run = small_run("launched", **ONE_BY_ONE)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(run.to_dict()))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [
        "-m",
        "gptoss",
        "pretrain",
        "--config",
        str(config),
        "--device",
        "cpu",
        "--max-steps",
        "2",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert CheckpointManager(run.training.save_dir).latest_step() == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_processes_with_unequal_targets_share_one_mean(tmp_path, engine):
    torch.manual_seed(0)
    model = GPTOSS(ModelConfig(**SMALL_MODEL))
    tokens = torch.randint(0, 64, (2, 1, 2, 17))  # (process, A, B, T + 1)
    targets = tokens[..., 1:].clone()
    targets[1, :, :, 3:] = -100
    reference = copy.deepcopy(model)
    step = make_step(reference, World(torch.device("cpu")))
    expected = step(
        tokens[:, 0, :, :-1], targets[:, 0]
    ).wait()  # both as micro-batches of one process

    def work(rank: int) -> None:
        mine = copy.deepcopy(model)
        result = make_step(mine, world_of(rank), engine)(
            tokens[rank, ..., :-1], targets[rank]
        ).wait()
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.aux == pytest.approx(
            expected.aux, rel=1e-5
        )  # the mean of both micro-batches'
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        for name, value in whole(mine).items():
            # Adam's first step is about the rate, 1e-2, whatever the gradient: 1e-4 of it.
            torch.testing.assert_close(value, reference.get_parameter(name), rtol=1e-4, atol=1e-5)

    on_ranks(tmp_path, work)


def test_processes_with_disjoint_experts_finish_with_the_right_gradients(tmp_path):
    torch.manual_seed(0)
    model = GPTOSS(ModelConfig(**SMALL_MODEL))
    direction = torch.randn(32)
    with torch.no_grad():
        model.embed.weight[1], model.embed.weight[2] = direction, -direction
        for block in model.blocks:
            for expert, sign in enumerate((1, 1, -1, -1)):
                block.moe.router.weight[expert] = sign * direction * (1 + 0.1 * expert)
    tokens = torch.ones(2, 1, 2, 16, dtype=torch.long)
    tokens[1] = 2  # process 0 sees token 1 only, process 1 token 2 only
    chosen = {}
    for rank in (0, 1):
        seen: set[int] = set()
        hooks = [
            block.moe.router.register_forward_hook(
                lambda *call, seen=seen: seen.update(call[2][0].flatten().tolist())
            )
            for block in model.blocks
        ]
        with torch.no_grad():
            model(tokens[rank, 0])
        chosen[rank] = seen
        for hook in hooks:
            hook.remove()
    assert chosen == {0: {0, 1}, 1: {2, 3}}
    reference = copy.deepcopy(model)
    make_step(reference, World(torch.device("cpu")))(tokens[:, 0], tokens[:, 0]).wait()

    def work(rank: int) -> None:
        mine = copy.deepcopy(model)
        assert make_step(mine, world_of(rank))(tokens[rank], tokens[rank]).wait().taken
        for name, value in whole(mine).items():
            torch.testing.assert_close(value, reference.get_parameter(name), rtol=1e-4, atol=1e-5)

    on_ranks(tmp_path, work)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_nan_on_one_process_is_refused_on_all(tmp_path, engine):
    torch.manual_seed(0)
    model = GPTOSS(ModelConfig(**SMALL_MODEL))
    tokens = torch.randint(0, 64, (1, 2, 17))

    def work(rank: int) -> None:
        mine = copy.deepcopy(model)
        step = make_step(mine, world_of(rank), engine)
        if rank == 1:
            original = step.module.forward

            def poisoned(*args, **kwargs):
                loss, aux = original(*args, **kwargs)
                return loss, aux + 0 * aux.detach() * float(
                    "nan"
                )  # a NaN aux loss on this process alone

            step.module.forward = poisoned
        assert not step(tokens[..., :-1], tokens[..., 1:]).wait().taken
        for name, value in whole(mine).items():
            assert torch.equal(value, model.get_parameter(name)), name
        step.module.__dict__.pop("forward", None)
        assert step(tokens[..., :-1], tokens[..., 1:]).wait().taken

    on_ranks(tmp_path, work)


def test_a_signal_to_one_process_ends_all_at_the_same_step(small_run, tmp_path):
    run = small_run("both", **ONE_BY_ONE)

    def work(rank: int) -> None:
        def interrupt(step: int, result: StepResult) -> None:
            import os
            import signal

            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        result = pretrain(run, progress=False, on_step=interrupt)
        assert result.step == 4  # the step that carried the news
        assert result.stopped_by == ("another process", "SIGTERM")[rank]

    on_ranks(tmp_path, work)
    assert CheckpointManager(tmp_path / "both").latest_step() == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_processes_write_samples_together(small_run, prepared, tmp_path, engine):
    data = {"train_data_path": str(prepared), "validation_data_path": None}
    settings = {"parallel": engine, "sample_interval": 2, "total_steps": 2, **ONE_BY_ONE}
    run = small_run(model={"vocab_size": 320}, data=data, **settings)

    def work(rank: int) -> None:
        result = pretrain(run, progress=False)
        (tmp_path / f"samples{rank}").write_text(json.dumps(result.samples))

    on_ranks(tmp_path, work)
    written = [json.loads((tmp_path / f"samples{rank}").read_text()) for rank in (0, 1)]
    assert written[0] == written[1]
    assert written[0][0][1].startswith("def ")


def test_an_error_of_the_main_process_is_everybodys(tmp_path):
    def work(rank: int) -> None:
        def fail() -> None:
            raise ValueError("no such data")

        with pytest.raises(ValueError, match="no such data"):
            world_of(rank).from_main(fail)
        assert world_of(rank).from_main(lambda: rank) == 0

    on_ranks(tmp_path, work)


def test_a_step_that_processes_cannot_share_is_refused(small_run, tmp_path):
    def work(rank: int) -> None:
        with pytest.raises(ValueError, match="start 1 or 3 processes"):
            pretrain(small_run(micro_batch_size=1, gradient_accumulation_steps=3), progress=False)

    on_ranks(tmp_path, work)
    assert not (tmp_path / "run").exists()
