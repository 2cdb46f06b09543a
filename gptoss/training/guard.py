"""The NaN guard: what to do about steps whose loss or gradient norm is not finite (chapter 17).

The update itself is refused on the device (`optim.update`). This is the policy on top: a few refused steps in a row mean
that something is wrong with the weights or with a stretch of the data, so the run goes back to its latest checkpoint and
on behind the offending data.
"""

from dataclasses import dataclass, field


class TrainingStopped(RuntimeError):
    """Training cannot go on; the message says why and what is safe."""


@dataclass
class NanGuard:
    """Counts refused steps and rollbacks.

    Args:
        max_consecutive: refused steps in a row before a rollback.
        max_rollbacks: rollbacks without progress before the run stops. Progress is a step beyond the furthest one that
            the run had taken before.
    """

    max_consecutive: int = 5
    max_rollbacks: int = 3
    in_a_row: int = 0
    rollbacks: int = 0
    furthest: int = 0
    refused: list[tuple[int, int]] = field(default_factory=list)

    def take(self, step: int) -> None:
        """Note that a step was taken."""
        self.in_a_row = 0
        if step > self.furthest:
            self.furthest = step
            self.rollbacks = 0
            self.refused = []

    def refuse(self, first: int, last: int) -> bool:
        """Note that a step was refused, with the sequences that it held.

        Args:
            first, last: global positions of the step's first and last sequence.

        Returns:
            whether the run has to go back to a checkpoint now.

        Raises:
            TrainingStopped: it would have to, and has done so `max_rollbacks` times without progress.
        """
        self.in_a_row += 1
        self.refused.append((first, last))
        if self.in_a_row < self.max_consecutive:
            return False
        if self.rollbacks == self.max_rollbacks:
            batches = ", ".join(f"{a}-{b}" for a, b in self.refused)
            raise TrainingStopped(
                f"loss or gradient norm not finite after {self.rollbacks} rollbacks without progress beyond step "
                f"{self.furthest}; the refused batches held sequences {batches}"
            )
        self.rollbacks += 1
        self.in_a_row = 0
        return True
