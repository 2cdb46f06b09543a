"""The loop: steps, and what happens between them (chapter 17)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gptoss.config import RunConfig
from gptoss.training.assembly import Assembly, weights_are_finite
from gptoss.training.checkpoint import CheckpointManager
from gptoss.training.distributed import World
from gptoss.training.guard import NanGuard, TrainingStopped
from gptoss.training.interrupt import StopRequest
from gptoss.training.micro_batches import MicroBatches
from gptoss.training.preflight import Preflight
from gptoss.training.reporter import Reporter
from gptoss.training.samples import write_sample
from gptoss.training.step import PendingResult, StepResult
from gptoss.training.validation import Validation, Validator

OnStep = Callable[[int, StepResult], None]


@dataclass
class Progress:
    """What the steps of one call came to."""

    losses: list[float] = field(default_factory=list)
    validation: list[Validation] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)


class Trainer:
    """Takes steps, and saves, validates, samples and goes back to a checkpoint between them.

    On a GPU the host runs one step ahead of what it has read (`lag`): it launches step n, fetches the data of step
    n + 1, and then reads the result of step n − 1, so that the device never waits. Nothing wrong can come of it: an
    update is refused on the device, where the learning rate is chosen as well. Before anything that needs the model as
    of a known step, the host waits until nothing is in flight.

    Args:
        run: the configuration.
        ready: what was found before the run.
        world: the processes.
        built: model, optimiser, schedule.
        validator: holds the model against held-out text.
        reporter: is told.
        request: becomes true when somebody asks the run to end.
        on_step: called with (step, result) after each step that was taken.
        lag: steps that the host may run ahead; 1 on a GPU, 0 on a CPU when left out.
    """

    def __init__(
        self,
        run: RunConfig,
        ready: Preflight,
        world: World,
        built: Assembly,
        validator: Validator,
        reporter: Reporter,
        request: StopRequest,
        on_step: OnStep | None = None,
        lag: int | None = None,
    ) -> None:
        self.run, self.settings, self.world, self.built = run, run.training, world, built
        self.validator, self.reporter, self.request = validator, reporter, request
        self.on_step = on_step
        self.lag = lag if lag is not None else int(world.device.type == "cuda")
        self.tokenizer = ready.data.tokenizer
        self.sequences_per_step = ready.batch.sequences_per_step
        self.data = MicroBatches(
            ready.data.source, ready.batch, self.settings.seed, world, run.data.num_workers
        )
        self.manager = CheckpointManager(self.settings.save_dir)
        self.guard = NanGuard(self.settings.nan_guard_max_consecutive, furthest=ready.first_step)
        self.flight: deque[tuple[PendingResult, int]] = deque()
        self.first_step = self.step = ready.first_step
        self.done = Progress()
        self.stopping = False
        # The step at which validation, sample and save were last seen to; nothing is due where a run begins.
        self.visited = ready.first_step
        self.saved: int | None = None  # the step that was last saved or loaded
        # Steps of an earlier branch, when the run goes on from a step that is not the latest.
        self.superseded = [s for s in ready.checkpoints if s > ready.first_step]
        if ready.resumes:
            self._load(ready.first_step)
            self.saved = ready.first_step

    def train(self, last_step: int) -> Progress:
        """Take steps until `last_step` or until asked to end; the model is saved on the way out.

        Raises:
            TrainingStopped: losses stay non-finite, or the weights are; what was saved before is safe.
        """
        if self.saved is None and self.settings.nan_guard:
            self._save()  # something to go back to, and a full disk is found now
        while self.step < last_step and not self._must_stop():
            self._launch()
            ahead = 0 if self._is_stop(self.step + len(self.flight), last_step) else self.lag
            while len(self.flight) > ahead:
                self._land()
            if not self.flight and self.step != self.visited:
                self._visit(last_step)
        while self.flight:
            self._land()
        if self.step == self.first_step == last_step:  # nothing to do: say how good the model is
            self._validate()
        if self.step != self.saved:
            self._save()
        return self.done

    def close(self) -> None:
        """End the worker processes."""
        self.data.close()

    def _must_stop(self) -> bool:
        # Several processes stop together: they learn of the request with a step's result.
        return self.stopping or (self.world.size == 1 and bool(self.request))

    def _is_stop(self, step: int, last_step: int) -> bool:
        """Whether the host has to know where it is at a step: something is due there, or a step was just refused."""
        intervals = (
            self.settings.save_interval,
            self.settings.validation_interval,
            self.settings.sample_interval,
        )
        due = any(interval and step % interval == 0 for interval in intervals)
        return due or step >= last_step or self.guard.in_a_row > 0

    def _launch(self) -> None:
        first = self.data.position
        inputs, targets = self.data.next_step()
        self.flight.append((self.built.take_step(inputs, targets, bool(self.request)), first))

    def _land(self) -> None:
        """Read the oldest step in flight and act on it."""
        pending, first = self.flight.popleft()
        result = pending.wait()
        behind = first + self.sequences_per_step
        self.stopping |= result.stop
        if result.taken:
            self.step += 1
            self.guard.take(self.step)
            self.done.losses.append(result.loss)
            self.reporter.step(self.step, result, behind)
            if self.on_step:
                self.on_step(self.step, result)
            return
        self.reporter.event(
            "refused", self.step, first=first, last=behind - 1, loss=repr(result.loss)
        )
        self.reporter.say(
            f"[guard] step {self.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}: not taken "
            f"(sequences {first}-{behind - 1})"
        )
        if self.guard.refuse(first, behind - 1):
            self._roll_back()

    def _roll_back(self) -> None:
        """Weights, optimiser and schedule as of the latest checkpoint; the data goes on behind what was refused.

        The latest of this run: behind a chosen step, those of the branch that it left lie on the disk until the next save.
        """
        while self.flight:
            self.flight.popleft()[0].wait()
        position, reached = self.data.position, self.step
        step = self.world.from_main(lambda: self.manager.latest_step(at_most=self.saved))
        if step is None:
            raise TrainingStopped(
                f"{self.guard.max_consecutive} steps in a row were not finite and {self.settings.save_dir} holds no "
                "checkpoint to go back to"
            )
        self._load(step)
        self.data.seek(position)
        kept = max(0, step - self.first_step)
        del self.done.losses[kept:]
        self.done.validation = [v for v in self.done.validation if v.step <= step]
        self.done.samples = [(at, text) for at, text in self.done.samples if at <= step]
        self.reporter.rewind(step)
        self.reporter.event("rollback", step, reached=reached, position=position)
        self.reporter.say(
            f"[guard] {self.guard.max_consecutive} steps in a row were not finite: back from step {reached} to {step}, "
            f"on behind sequence {position - 1}"
        )
        self.visited = self.saved = step

    def _visit(self, last_step: int) -> None:
        """See to what is due at the step where the run is."""
        self.visited = step = self.step
        settings = self.settings
        with self.reporter.pause():
            if settings.sample_interval and step % settings.sample_interval == 0:
                self._sample()
            every = settings.validation_interval
            if step == last_step or (every and step % every == 0):
                self._validate()
        if step % settings.save_interval == 0:
            self._save()

    def _validate(self) -> None:
        entry = self.validator(self.step)
        self.done.validation.append(entry)
        per_byte = entry.bits_per_byte
        known = {} if per_byte is None else {"bits_per_byte": per_byte}
        self.reporter.event("validation", self.step, loss=entry.loss, **known)
        self.reporter.say(
            f"[validation] step {self.step}: {entry.loss:.4f} nats a token"
            + (f", {per_byte:.4f} bits a byte" if per_byte is not None else "")
            + f" (counting tokens alone: {self.validator.unigram_loss:.4f} nats)"
        )

    def _sample(self) -> None:
        text = write_sample(
            self.built, self.tokenizer, self.settings.sample_prompt, self.settings.seed, self.world
        )
        if text is not None:
            self.done.samples.append((self.step, text))
            self.reporter.event("sample", self.step, text=text)
            self.reporter.say(f"[sample] step {self.step}: {text!r}")

    def _save(self) -> None:
        with self.reporter.pause():
            if not weights_are_finite(self.built.model, self.world):
                raise TrainingStopped(
                    f"the weights hold values that are not finite at step {self.step}: not saved; "
                    f"{self.settings.save_dir} keeps what was saved before"
                )
            self.reporter.sync()
            self.manager.save(
                self.built.module,
                self.built.optimizer,
                self.step,
                scheduler=self.built.schedule,
                extra_meta={
                    "position": self.data.position,
                    "seed": self.settings.seed,
                    "tokens_per_step": self.sequences_per_step * self.run.model.max_seq_len,
                },
            )
            if self.world.is_main:
                for step in self.superseded:
                    if step != self.step:
                        self.manager.delete_checkpoint(step)
                if self.settings.keep_last:
                    self.manager.keep_last_n(self.settings.keep_last)
        self.superseded = []
        self.saved = self.step

    def _load(self, step: int) -> None:
        meta = self.manager.load(
            self.built.module,
            step,
            device=self.world.device,
            optimizer=self.built.optimizer,
            scheduler=self.built.schedule,
        )
        self.built.forget_recording()
        self.data.seek(int(meta["position"]))
        self.step = step
