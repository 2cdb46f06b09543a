"""A recorded step is the step: the same losses, refusals and weights, and who may record."""

import math
from collections.abc import Callable

import pytest
import torch

from gptoss.config import ModelConfig, RunConfig, TrainingConfig
from gptoss.training.assembly import Assembly, assemble
from gptoss.training.distributed import World
from gptoss.training.preflight import check_recording
from gptoss.training.pretrain import pretrain
from gptoss.training.recorded_step import ORDINARY_STEPS, RecordedStep
from gptoss.training.step import TrainStep

CPU = World(torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "world", "words"),
    [
        ({}, CPU, "one process on one GPU, got 1 on cpu"),
        ({}, World(torch.device("cuda", 0), size=2), "got 2 on cuda"),
        ({"moe_dispatch": "stacked"}, World(torch.device("cuda", 0)), "rows of each expert"),
        ({"attention_backend": "flex"}, World(torch.device("cuda", 0)), "attention_backend"),
    ],
)
def test_what_cannot_be_recorded_is_refused(model: dict, world: World, words: str) -> None:
    cfg = ModelConfig(**{"moe_dispatch": "triton_grouped", **model})
    with pytest.raises(ValueError, match=words):
        check_recording(RunConfig(cfg, TrainingConfig(cuda_graph=True)), world)
    check_recording(RunConfig(cfg, TrainingConfig()), world)


class Fake:
    """Notes who took a step; stands for the ordinary step and for the graph."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def __call__(self, *_: object) -> None:
        self.taken.append("ordinary")

    def replay(self) -> None:
        self.taken.append("replayed")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> tuple[RecordedStep, Fake]:
    """A `RecordedStep` without a device, and who took its steps."""
    fake = Fake()

    def record(self: RecordedStep, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        fake.taken.append("recorded")
        self._inputs, self._targets, self._stop = inputs.clone(), targets.clone(), torch.zeros(())
        self._graph, self._values = fake, torch.zeros(6)  # type: ignore[assignment]

    monkeypatch.setattr(RecordedStep, "_record", record)
    return RecordedStep(fake), fake  # type: ignore[arg-type]


def test_the_first_steps_and_other_shapes_are_ordinary(recorder) -> None:
    recorded, fake = recorder
    tokens = torch.ones(1, 2, 4, dtype=torch.int64)
    for _ in range(ORDINARY_STEPS + 2):
        recorded(tokens, tokens)
    recorded(2 * tokens, 3 * tokens, stop=True)
    assert fake.taken == [*["ordinary"] * ORDINARY_STEPS, "recorded", *["replayed"] * 3]
    assert torch.equal(recorded._inputs, 2 * tokens)
    assert torch.equal(recorded._targets, 3 * tokens)
    assert recorded._stop == 1
    recorded(tokens[:, :1], tokens[:, :1])
    assert fake.taken[-1] == "ordinary"
    recorded.forget()
    del fake.taken[:]
    for _ in range(ORDINARY_STEPS + 1):  # a checkpoint may hold no moments yet
        recorded(tokens, tokens)
    assert fake.taken == [*["ordinary"] * ORDINARY_STEPS, "recorded", "replayed"]


def test_each_shape_is_compiled_before_it_is_recorded(recorder) -> None:
    recorded, fake = recorder
    long, short = (torch.ones(1, 2, length, dtype=torch.int64) for length in (8, 4))
    for tokens in [long] * ORDINARY_STEPS + [short] * ORDINARY_STEPS:
        recorded(tokens, tokens)
    assert set(fake.taken) == {"ordinary"}
    recorded(short, short)
    assert fake.taken[-2:] == ["recorded", "replayed"]


def built(cuda_graph: bool, every: int = 0, accumulation: int = 2) -> Assembly:
    model = ModelConfig(
        vocab_size=512, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=128,
        moe_dispatch="triton_grouped", max_seq_len=128, window_size=32,
    )  # fmt: skip
    training = TrainingConfig(
        gradient_accumulation_steps=accumulation, total_steps=20, warmup_steps=2, lr=1e-3,
        compile_mode="default", grad_checkpoint=every > 0, grad_checkpoint_every=every,
        cuda_graph=cuda_graph,
    )  # fmt: skip
    return assemble(RunConfig(model, training), World(torch.device("cuda")))


@pytest.mark.gpu
@pytest.mark.parametrize("every", [0, 2])
def test_recorded_steps_are_the_ordinary_ones(every: int) -> None:
    data = torch.randint(512, (10, 2, 4, 129), device="cuda")
    results = []
    for cuda_graph in (False, True):
        parts = built(cuda_graph, every)
        assert isinstance(parts.take_step, RecordedStep if cuda_graph else TrainStep)
        pending = [parts.take_step(step[..., :-1], step[..., 1:]) for step in data]
        results.append(([one.wait() for one in pending], parts))
    (plain, theirs), (recorded, ours) = results
    assert [r.lr for r in recorded] == [r.lr for r in plain]
    for a, b in zip(recorded, plain, strict=True):
        assert math.isclose(a.loss, b.loss, rel_tol=1e-4)
        assert math.isclose(a.grad_norm, b.grad_norm, rel_tol=1e-2)
    assert ours.schedule.state_dict() == theirs.schedule.state_dict() == {"taken": 10}
    steps = {int(s["step"]) for s in ours.optimizer.state_dict()["state"].values()}
    assert steps == {10}
    assert not any(group["capturable"] for group in ours.optimizer.param_groups)


@pytest.mark.gpu
def test_a_recorded_step_refuses_what_is_not_finite_and_goes_on() -> None:
    parts = built(True)
    tokens = torch.randint(512, (2, 4, 129), device="cuda")
    take = lambda: parts.take_step(tokens[..., :-1], tokens[..., 1:]).wait()  # noqa: E731
    for _ in range(ORDINARY_STEPS + 1):
        assert take().taken
    weight = parts.model.norm.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight[0] = math.nan
    before = parts.model.embed.weight.detach().clone()
    assert not take().taken
    assert torch.equal(parts.model.embed.weight, before)
    with torch.no_grad():
        weight.copy_(good)
    assert take().taken
    assert parts.take_step(tokens[..., :-1], tokens[..., 1:], stop=True).wait().stop


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [True, False])
def test_a_forgotten_recording_is_made_anew(moments: bool) -> None:
    parts = built(True)
    tokens = torch.randint(512, (2, 4, 129), device="cuda")
    losses = []
    for step in range(13):
        if step == 8:
            parts.optimizer.load_state_dict(parts.optimizer.state_dict())  # new tensors
            if not moments:
                parts.optimizer.state.clear()  # as after a checkpoint of step 0
            parts.forget_recording()
        losses.append(parts.take_step(tokens[..., :-1], tokens[..., 1:]).wait().loss)
    assert losses[7] < losses[0]
    assert losses[-1] < losses[0]
    taken = {int(s["step"]) for s in parts.optimizer.state_dict()["state"].values()}
    assert taken == {13 if moments else 5}


@pytest.mark.gpu
def test_a_recorded_run_validates_saves_and_goes_on(small_run: Callable[..., RunConfig]) -> None:
    model = {"moe_dispatch": "triton_grouped", "d_model": 64, "head_dim": 16, "ffn_dim": 64}
    settings = {"model": model, "total_steps": 20, "compile": True, "compile_mode": "default"}
    plain = pretrain(small_run("plain", **settings), progress=False)
    recorded = small_run("recorded", **settings, cuda_graph=True)
    parts = [pretrain(recorded, progress=False, max_steps=n) for n in (12, 8)]
    assert [part.first_step for part in parts] == [0, 12]
    losses = [loss for part in parts for loss in part.losses]
    assert len(losses) == 20
    assert losses == pytest.approx(plain.losses, rel=1e-2)
    curve = [v.loss for part in parts for v in part.validation]
    assert curve[-1] == pytest.approx(plain.validation[-1].loss, rel=1e-2)
    assert losses[-1] < losses[0]
