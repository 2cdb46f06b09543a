"""Curves kept elsewhere: TensorBoard when the config asks, Weights & Biases when its environment variables do."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gptoss.training.metrics import Tracker


class TensorBoardTracker:
    """Scalars in TensorBoard's event files.

    Args:
        directory: where the files go.
        step: the step that the run goes on from; what an earlier process wrote behind it is hidden.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path, step: int = 0) -> None:
        self._directory = directory
        self._writer = self._open(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        """Go on in a new file, which hides what the earlier ones hold behind a step."""
        self._writer.close()
        self._writer = self._open(step)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()

    def _open(self, step: int) -> Any:
        return summary_writer()(str(self._directory), purge_step=step + 1)


class WandbTracker:
    """Scalars in a Weights & Biases run, one and the same run after each resume.

    Args:
        wandb: the imported `wandb` package.
        project, name: WANDB_PROJECT and WANDB_RUN_NAME.
        directory: the run's directory, where the id of the W&B run is remembered.
        config: the whole configuration.
    """

    def __init__(
        self, wandb: Any, project: str, name: str | None, directory: Path, config: dict[str, Any]
    ) -> None:
        memory = directory / "wandb_id.txt"
        known = memory.read_text().strip() if memory.exists() else None
        self._run = wandb.init(
            project=project, name=name, id=known, resume="allow", dir=str(directory), config=config
        )
        memory.write_text(f"{self._run.id}\n")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step. Steps that W&B has seen before a resume or a rollback are ignored by it."""
        self._run.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """Nothing: W&B takes no value back, so the steps behind this one keep what they have."""

    def close(self) -> None:
        """Tell W&B that the run ended."""
        self._run.finish()


def summary_writer() -> Any:
    """TensorBoard's writer class.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "training.tensorboard: TensorBoard is not installed; pip install tensorboard, or set "
            "training.tensorboard=false"
        ) from error
    return SummaryWriter


def require_tensorboard() -> None:
    """See that TensorBoard is there, before anything is written.

    Raises:
        ValueError: it is not installed.
    """
    summary_writer()


def open_trackers(
    directory: Path,
    step: int,
    config: dict[str, Any],
    tensorboard: bool,
    environment: Mapping[str, str] = os.environ,
    echo: Callable[[str], None] = print,
) -> list[Tracker]:
    """The trackers that were asked for.

    Args:
        directory: the run's directory.
        step: the step that the run goes on from.
        config: the whole configuration, as plain values.
        tensorboard: the `training.tensorboard` setting.
        environment: read for WANDB_PROJECT (asks for W&B) and WANDB_RUN_NAME (optional).
        echo: told when W&B is wanted and missing.
    """
    trackers: list[Tracker] = []
    if tensorboard:
        trackers.append(TensorBoardTracker(directory / "tensorboard", step))
    if project := environment.get("WANDB_PROJECT"):
        try:
            import wandb
        except ImportError:
            echo("[logging] wandb not installed -- skipping WandB integration")
        else:
            name = environment.get("WANDB_RUN_NAME")
            trackers.append(WandbTracker(wandb, project, name, directory, config))
    return trackers
