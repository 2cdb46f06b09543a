"""Eight steps from end to end on a small model, in a minute: what to run after a change, or on a new machine.

Every step is a function that returns what it saw and raises where that is wrong. On a machine without a GPU the same
steps run on the CPU in fp32; the Triton kernels need a GPU and are skipped there, with the reason.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gptoss.config import ModelConfig, RunConfig, TrainingConfig
from gptoss.inference.generate import generate
from gptoss.kernels.versions import HAS_TRITON
from gptoss.model.moe import MoELayer
from gptoss.model.transformer import GPTOSS
from gptoss.training.assembly import Assembly, assemble
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.distributed import World

BATCH, TOKENS = 4, 128


class Skipped(Exception):
    """A step that cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One step: its title, "ok", "skipped" or "failed", and what was seen."""

    title: str
    status: str
    detail: str


class Smoke:
    """The eight steps, on one model.

    Args:
        device: where to run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.cfg = ModelConfig(
            vocab_size=512,
            d_model=128,
            n_layers=4,
            n_heads=4,
            n_kv_heads=2,
            head_dim=32,
            ffn_dim=128,
            window_size=16,
            rope_theta=10_000,
            yarn_scale_factor=4,
            yarn_original_max_seq_len=TOKENS,
            yarn_target_seq_len=4 * TOKENS,
            max_seq_len=TOKENS,
            eval_max_seq_len=4 * TOKENS,
            dtype="bf16" if on_gpu else "fp32",
        )
        self.training = TrainingConfig(
            micro_batch_size=BATCH,
            gradient_accumulation_steps=1,
            warmup_steps=1,
            total_steps=100,
            lr=1e-2,
            grad_checkpoint_every=2,
            compile=False,
        )
        self.tokens = torch.randint(
            self.cfg.vocab_size,
            (1, BATCH, TOKENS + 1),
            generator=torch.Generator().manual_seed(0),
        ).to(device)
        self.built: Assembly | None = None

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        """(title, step) in order; later ones build on earlier ones."""
        return [
            ("build a 4-layer model", self.build),
            ("forward and backward: every parameter has a gradient", self.gradients),
            ("experts: all dispatches agree", self.dispatches),
            ("expert layer with the Triton kernels, backward included", self.triton_layer),
            ("five training steps: the loss falls", self.train),
            ("checkpoint: save, load, same weights", self.checkpoint),
            ("generation with the cache equals generation without", self.generation),
            ("YaRN beyond the trained length", self.long_forward),
        ]

    def run(self) -> Iterator[Outcome]:
        """Run all steps, the rest too where one fails."""
        for title, step in self.steps():
            try:
                yield Outcome(title, "ok", step())
            except Skipped as reason:
                yield Outcome(title, "skipped", str(reason))
            except Exception as error:  # the next steps still say something
                detail = " ".join(str(error).split())[:300]
                yield Outcome(title, "failed", f"{type(error).__name__}: {detail}")

    def build(self) -> str:
        run = RunConfig(self.cfg, self.training)
        self.built = assemble(run, World(self.device))
        return f"{self.built.model.num_parameters():,} parameters on {self.device}"

    def gradients(self) -> str:
        model = self._assembly().model
        loss, aux = model(self.tokens[0, :, :-1], targets=self.tokens[0, :, 1:])
        (loss + 0.01 * aux).backward()
        without = [n for n, p in model.named_parameters() if p.grad is None]
        bad = [
            n
            for n, p in model.named_parameters()
            if p.grad is not None and not p.grad.isfinite().all()
        ]
        model.zero_grad()
        _expect(not without, f"no gradient: {without[:3]}")
        _expect(not bad, f"gradient not finite: {bad[:3]}")
        return f"loss {loss.item():.3f}, load-balancing loss {aux.item():.3f}"

    def dispatches(self) -> str:
        names = ["stacked", "grouped_mm"] + ["triton_grouped"] * self._has_kernels()
        first, *others = (self._layer_output(name) for name in names)
        for name, other in zip(names[1:], others, strict=True):
            # bf16 keeps 8 bits, and the dispatches round between operations in different places.
            bound = 2e-2 if self.device.type == "cuda" else 1e-5
            error = ((other - first).norm() / first.norm()).item()
            _expect(error < bound, f"{name} differs from stacked by {error:.1e}")
        return ", ".join(names)

    def triton_layer(self) -> str:
        if not self._has_kernels():
            raise Skipped("needs a CUDA GPU and Triton")
        out = self._layer_output("triton_grouped", backward=True)
        return f"output norm {out.norm().item():.3f}"

    def train(self) -> str:
        built = self._assembly()
        inputs, targets = self.tokens[..., :-1], self.tokens[..., 1:]
        results = [built.take_step(inputs, targets).wait() for _ in range(5)]
        _expect(all(r.taken for r in results), "a step was not taken")
        _expect(results[-1].loss < results[0].loss, "the loss did not fall")
        return f"loss {results[0].loss:.3f} to {results[-1].loss:.3f}"

    def checkpoint(self) -> str:
        built = self._assembly()
        with tempfile.TemporaryDirectory() as folder:
            manager = CheckpointManager(folder)
            manager.save(built.model, built.optimizer, 5, scheduler=built.schedule)
            other = GPTOSS(self.cfg)
            manager.load(other)
        for name, value in built.model.state_dict().items():
            _expect(torch.equal(value.cpu(), other.state_dict()[name]), f"{name} differs")
        return "every tensor equal"

    def generation(self) -> str:
        model = self._assembly().model.eval()
        prompt = self.tokens[0, :1, :40]  # longer than the window
        with_cache, without = (
            generate(model.float(), prompt, 16, temperature=0.0, use_cache=use)
            for use in (True, False)
        )
        _expect(torch.equal(with_cache, without), "the tokens differ")
        return f"{with_cache.shape[1]} tokens"

    @torch.no_grad()
    def long_forward(self) -> str:
        model = self._assembly().model.eval()
        model.set_rope_mode("yarn")
        long = self.tokens[0, :1, :TOKENS].repeat(1, 4)
        logits, _ = model(long, last_only=True)
        _expect(bool(logits.isfinite().all()), "logits not finite")
        return f"{long.shape[1]} tokens, trained on {TOKENS}"

    def _assembly(self) -> Assembly:
        if self.built is None:
            raise Skipped("there is no model")
        return self.built

    def _has_kernels(self) -> bool:
        return HAS_TRITON and self.device.type == "cuda"

    def _layer_output(self, dispatch: str, backward: bool = False) -> Tensor:
        torch.manual_seed(0)
        layer = MoELayer(dataclasses.replace(self.cfg, moe_dispatch=dispatch)).to(self.device)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.normal_(std=0.1)
        x = torch.randn(2, 64, self.cfg.d_model).to(self.device).requires_grad_()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            out, aux = layer(x)
        if backward:
            (out.float().sum() + aux).backward()
            missing = [n for n, p in layer.named_parameters() if p.grad is None]
            _expect(not missing, f"no gradient: {missing[:3]}")
        return out.detach().float()


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
