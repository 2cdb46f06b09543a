"""How a training step grows on a CPU: compiled or eager, with the tokens of a sequence, with the experts.

`gptoss bench scaling`. The model is `tiny`, the step the trainer's own, the device the CPU
on every machine. Beside each time stands the time that the step's FLOPs would take at the rate of a large matrix product.

Shapes: B batch, T tokens of a sequence, E routed experts, k experts of a token.
"""

import dataclasses
import gc
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from gptoss.bench.evidence import make_evidence
from gptoss.config import ModelConfig, RunConfig, load_config
from gptoss.training.assembly import assemble
from gptoss.training.distributed import World
from gptoss.training.flops import training_flops_per_token

COLUMNS = {
    "series": "which question the row belongs to: compile, length or experts; its settings are timed in turn",
    "compiled": "whether the blocks are compiled",
    "batch": "sequences of a step",
    "seq_len": "tokens of a sequence",
    "attention": "alternating: every second layer sees a window; full: all layers see everything before them",
    "experts": "routed experts",
    "active": "routed experts that a token goes through",
    "dispatch": "how the experts are run",
    "ms": "median time of a step in ms: forward, backward, clip and AdamW",
    "update_ms": "of that, AdamW's update in ms, median",
    "products": "share of a step inside matrix products, under PyTorch's profiler, which slows small calls; growth with the length alone",
    "operations": "calls of PyTorch's operators in a step, nested ones counted too; growth with the length alone",
    "tokens_per_s": "trained tokens a second",
    "gflop": "GFLOP of a step",
    "floor_ms": "time that these FLOPs take at the rate of a large matrix product, in ms",
    "factor": "ms / floor_ms",
    "compile_s": "first step less a later one, in s: with nothing kept from an earlier compilation",
    "parameters": "parameters of the model",
    "state_mib": "weights, gradients and AdamW's two moments in MiB",
    "error": "why there is no number",
}
CONVENTION = "FLOPs a token = 6 x active parameters + attention by visible pairs; attention's mask, softmax and AdamW count nothing"  # fmt: skip
ROUNDS = {"compile": 15, "length": 5, "experts": 7}  # fewer where a round takes long
SIDE = 1024  # of the square fp32 product that gives the rate
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table. What is left out is `tiny` itself."""

    series: str
    compiled: bool = False
    batch: int = 4
    seq_len: int = 256
    attention: str = "alternating"
    experts: int = 8
    active: int = 2
    dispatch: str = "stacked"


LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
EXPERTS = ((2, 2), (4, 2), (8, 2), (16, 2), (8, 1), (8, 4))  # (E, k)
SETTINGS = (
    *(Setting("compile", compiled=compiled) for compiled in (False, True)),
    *(Setting("length", batch=1, seq_len=length) for length in LENGTHS),
    *(Setting("length", batch=1, seq_len=length, attention="full") for length in LENGTHS[4:]),
    *(
        Setting("experts", experts=experts, active=active, dispatch=dispatch)
        for dispatch in ("stacked", "grouped_mm")
        for experts, active in EXPERTS
    ),
)


class _Timed:
    """A setting's training step with its clock: a call takes a step, `latest` says how long it took."""

    def __init__(self, setting: Setting, run: RunConfig) -> None:
        self.setting = setting
        self.architecture = _architecture(setting, run.model)
        training = dataclasses.replace(
            run.training,
            micro_batch_size=setting.batch,
            gradient_accumulation_steps=1,
            grad_checkpoint=False,
            compile=setting.compiled,
            compile_mode="default",
        )
        whole = RunConfig(self.architecture, training, run.data)
        self._parts = assemble(whole, World(torch.device("cpu")))
        shape = (1, setting.batch, setting.seq_len + 1)
        self._tokens = torch.randint(0, self.architecture.vocab_size, shape)
        self._update: list[float] = []  # when AdamW's update began and ended
        for register in ("register_step_pre_hook", "register_step_post_hook"):
            getattr(self._parts.optimizer, register)(lambda *_: self._update.append(time.perf_counter()))  # fmt: skip
        self()
        self.first = self.latest
        self.kept: list[tuple[float, float]] = []

    def __call__(self) -> None:
        self._update.clear()
        start = time.perf_counter()
        self._parts.take_step(self._tokens[..., :-1], self._tokens[..., 1:]).wait()
        seconds = time.perf_counter() - start
        self.latest = (seconds, self._update[1] - self._update[0])

    def row(self, rate: float) -> dict[str, Any]:
        """The row's numbers; `rate` in FLOP/s."""
        setting, model = self.setting, self._parts.model
        tokens, active = setting.batch * setting.seq_len, model.num_active_parameters()
        flops = tokens * training_flops_per_token(self.architecture, active, setting.seq_len)
        seconds, update = (statistics.median(times) for times in zip(*self.kept, strict=True))
        weights = sum(parameter.nbytes for parameter in model.parameters())
        state = self._parts.optimizer.state.values()
        moments = sum(one["exp_avg"].nbytes + one["exp_avg_sq"].nbytes for one in state)
        row = {
            "ms": round(seconds * 1e3, 2),
            "update_ms": round(update * 1e3, 2),
            "tokens_per_s": round(tokens / seconds),
            "gflop": round(flops / 1e9, 3),
            "floor_ms": round(flops / rate * 1e3, 3),
            "factor": round(seconds * rate / flops, 2),
            "parameters": model.num_parameters(),
            "state_mib": round((2 * weights + moments) / 2**20, 1),  # gradients are as large as weights
        }  # fmt: skip
        if setting.compiled:
            return row | {"compile_s": round(self.first[0] - seconds, 1)}
        if (setting.series, setting.attention) == ("length", "alternating"):
            return row | self._inside()  # takes many times a step's time
        return row

    def _inside(self) -> dict[str, Any]:
        """What an eager step consists of."""
        with torch.autograd.profiler.profile(use_kineto=False) as profiled:  # the faster of its two ways  # fmt: skip
            self()
        calls = [call for call in profiled.function_events if call.name.startswith("aten::")]
        products = sum(call.self_cpu_time_total for call in calls if call.name in PRODUCTS)
        return {"products": round(products / 1e6 / self.latest[0], 3), "operations": len(calls)}


def measure(
    settings: Sequence[Setting] = SETTINGS,
    *,
    rounds: int | None = None,
    command: str = "gptoss bench scaling",
    commit: str | None = None,
) -> dict[str, Any]:
    """Time the tiny model's training step on the CPU, one row a setting.

    The settings of a series take their steps in turn, round after round, with a matrix product in each round: what else
    the machine does falls on all of them alike.

    Args:
        settings: what to run.
        rounds: timed steps of each setting, an untimed one before each; `ROUNDS` when left out.
        command, commit: for the evidence file.

    Returns:
        The evidence. A setting that fails, as a compiled one does where there is no C++ compiler, is a row with the reason.

    Raises:
        ValueError: no settings, a number of rounds, sequences or tokens below 1, or a setting that no model has.
    """
    if (
        (rounds is not None and rounds < 1)
        or not settings
        or any(one.batch < 1 or one.seq_len < 1 for one in settings)
    ):
        raise ValueError(f"expected settings, and rounds, batch and seq_len of at least 1, got rounds = {rounds} and {list(settings)}")  # fmt: skip
    run = load_config("tiny")
    for setting in settings:
        _architecture(setting, run.model)  # refused before anything is timed
    rows, products = [], []
    for series in dict.fromkeys(setting.series for setting in settings):
        members = [setting for setting in settings if setting.series == series]
        measured, seconds = _time_in_turn(members, run, rounds or ROUNDS[series])
        products += seconds
        rate = 2 * SIDE**3 / statistics.median(seconds)
        for setting, timed in zip(members, measured, strict=True):
            reason = {"error": timed} if isinstance(timed, str) else timed.row(rate)
            rows.append(dataclasses.asdict(setting) | reason)
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        del measured
        gc.collect()
    rate = 2 * SIDE**3 / statistics.median(products)
    repeats = ", ".join(f"{rounds or count} ({series})" for series, count in ROUNDS.items())
    notes = [
        f"{torch.get_num_threads()} threads, fp32; each step is timed after an untimed one; timed steps of each setting: {repeats}",
        f"fp32 {SIDE}^3 product in this run: {rate / 1e9:.0f} GFLOP/s; floor_ms takes the median of its own series",
        "tokens are random; grouped_mm in fp32 runs on a CPU, but does not compile there",
    ]
    return make_evidence(
        "scaling",
        "Growth of a training step on a CPU, tiny",
        COLUMNS,
        rows,
        command=command,
        convention=CONVENTION,
        notes=notes,
        commit=commit,
        on_cpu=True,
    )


def _architecture(setting: Setting, base: ModelConfig) -> ModelConfig:
    """`tiny` with a setting's length, windows and experts."""
    if setting.attention not in ("alternating", "full"):
        raise ValueError(f"attention {setting.attention!r}: expected alternating or full")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "n_activated_experts = 1")  # it matters to what is learnt, not to the time  # fmt: skip
        return dataclasses.replace(
            base,
            max_seq_len=setting.seq_len,
            eval_max_seq_len=max(setting.seq_len, base.eval_max_seq_len),
            window_size=setting.seq_len if setting.attention == "full" else base.window_size,
            n_routed_experts=setting.experts,
            n_activated_experts=setting.active,
            moe_dispatch=setting.dispatch,
        )


def _time_in_turn(
    settings: Sequence[Setting], run: RunConfig, rounds: int
) -> tuple[list[_Timed | str], list[float]]:
    """Time the steps of all settings in turn: what was timed, or why it failed, and the seconds of each round's product."""
    from torch._inductor.utils import fresh_cache  # takes a second to import

    made: list[_Timed | str] = []
    products = []
    square = torch.randn(SIDE, SIDE)
    torch._dynamo.reset()
    with fresh_cache():  # an earlier compilation would be found again
        for setting in settings:
            try:
                made.append(_Timed(setting, run))
            except Exception as error:  # the reason is the row; the other settings still run
                made.append(" ".join(str(error).split())[:200])
        for _ in range(rounds):
            for _ in range(2):
                start = time.perf_counter()
                square @ square
                seconds = time.perf_counter() - start
            products.append(seconds)
            for one in made:
                if isinstance(one, _Timed):
                    one()  # brings its own weights into the cache, where a run has them
                    one()
                    one.kept.append(one.latest)
    return made, products
