"""Right answers by length and depth, each share with its interval, and the JSON that keeps them (chapter 16)."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NORMAL_QUANTILE_95 = 1.959964


def wilson_interval(
    n_right: int, n_trials: int, quantile: float = NORMAL_QUANTILE_95
) -> tuple[float, float]:
    """The score interval of a share, which stays inside [0, 1] and is honest at 0 and 100 percent.

    centre = (p + z²/2n) / (1 + z²/n);  half = z/(1 + z²/n) · √(p(1−p)/n + z²/4n²)

    Args:
        n_right: right answers.
        n_trials: n; 0 gives (0, 1).
        quantile: z; 1.96 gives 95 percent.

    Returns:
        (low, high), shares in [0, 1].

    Raises:
        ValueError: n_right outside [0, n_trials].

    Source: Wilson 1927; chapter 16.
    """
    if not 0 <= n_right <= n_trials:
        raise ValueError(f"expected 0 <= n_right <= n_trials, got {n_right} of {n_trials}")
    if n_trials == 0:
        return 0.0, 1.0
    share, z2 = n_right / n_trials, quantile**2
    scale = 1 + z2 / n_trials
    centre = (share + z2 / (2 * n_trials)) / scale
    half = (
        quantile
        / scale
        * math.sqrt(share * (1 - share) / n_trials + z2 / (4 * n_trials * n_trials))
    )
    low = 0.0 if n_right == 0 else max(0.0, centre - half)
    high = 1.0 if n_right == n_trials else min(1.0, centre + half)
    return low, high


@dataclass(frozen=True)
class Trial:
    """One question: where the key stood, what greedy decoding gave, and how sure the model was.

    `said` is the greedy answer when it is right and, when it is wrong, the tokens that were best at each place given
    the right ones before it. `answer_loss` is the mean cross-entropy of the answer (nats a token).
    """

    length: int
    depth: float
    key: str
    said: str
    right: bool
    answer_loss: float


@dataclass
class PasskeyResult:
    """All trials of an evaluation, and what they were run with."""

    trials: list[Trial]
    settings: dict[str, Any] = field(default_factory=dict)

    def lengths(self) -> list[int]:
        """The lengths that were asked (tokens), rising."""
        return sorted({trial.length for trial in self.trials})

    def depths(self) -> list[float]:
        """The depths that were asked, rising."""
        return sorted({trial.depth for trial in self.trials})

    def count(self, length: int, depth: float | None = None) -> tuple[int, int]:
        """(right, asked) at one length, over all depths or at one."""
        chosen = [
            trial.right
            for trial in self.trials
            if trial.length == length and (depth is None or trial.depth == depth)
        ]
        return sum(chosen), len(chosen)

    def accuracy(self) -> dict[int, float]:
        """{length: share of right answers}."""
        return {length: right / asked for length, (right, asked) in self._counts()}

    def intervals(self) -> dict[int, tuple[float, float]]:
        """{length: 95% Wilson interval of the share}."""
        return {length: wilson_interval(*counts) for length, counts in self._counts()}

    def grid(self) -> list[list[float]]:
        """Shares by depth (rows) and length (columns), as a heat map shows them; NaN where nothing was asked."""
        return [
            [_share(*self.count(length, d)) for length in self.lengths()] for d in self.depths()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: settings, a row a length, a cell a length and depth, and every trial."""
        rows = []
        for length, (right, asked) in self._counts():
            low, high = wilson_interval(right, asked)
            losses = [t.answer_loss for t in self.trials if t.length == length]
            rows.append(
                {
                    "length": length,
                    "right": right,
                    "trials": asked,
                    "accuracy": right / asked,
                    "low95": low,
                    "high95": high,
                    "answer_loss": sum(losses) / asked,
                }
            )
        cells = []
        for length in self.lengths():
            for depth in self.depths():
                right, asked = self.count(length, depth)
                if asked:
                    low, high = wilson_interval(right, asked)
                    cells.append(
                        {
                            "length": length,
                            "depth": depth,
                            "right": right,
                            "trials": asked,
                            "low95": low,
                            "high95": high,
                        }
                    )
        return {
            "settings": self.settings,
            "rows": rows,
            "cells": cells,
            "trials": [asdict(trial) for trial in self.trials],
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def _counts(self) -> list[tuple[int, tuple[int, int]]]:
        return [(length, self.count(length)) for length in self.lengths()]


def _share(right: int, asked: int) -> float:
    return right / asked if asked else math.nan
