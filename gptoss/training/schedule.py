"""The learning rate: linear warmup, then half a cosine down to a floor (chapter 12).

`make_warmup_cosine_lambda` is the curve. `Schedule` is the curve as a table on the training device beside a counter of
the updates that were taken there: the host may be a step ahead without knowing whether the last update was skipped, and
the rate is right all the same.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def make_warmup_cosine_lambda(
    warmup: int, total: int, min_ratio: float = 0.0
) -> Callable[[int], float]:
    """The factor on the peak learning rate as a function of the step.

        λ(s) = s/W                                      s < W
        λ(s) = m + (1 − m)·½(1 + cos π(s − W)/(T − W))  W ≤ s < T
        λ(s) = m                                        s ≥ T

    W = 0 starts at the peak. With W ≥ T the warmup is cut off at T, where the floor begins. The area under the curve is
    W/2 + (T − W)(1 + m)/2 steps at the peak rate: 31,950 for W = 3000, T = 61,000, m = 0.05.

    Args:
        warmup: W, steps.
        total: T, steps.
        min_ratio: m, the floor as a share of the peak.

    Returns:
        λ, also accepted by `torch.optim.lr_scheduler.LambdaLR`.

    Raises:
        ValueError: a negative length, no steps at all, or a floor outside [0, 1].

    Source: Loshchilov & Hutter 2017 (SGDR), section 3; chapter 12 of this book.
    """
    if warmup < 0 or total < 1:
        raise ValueError(f"warmup = {warmup}, total = {total}: expected warmup ≥ 0 and total ≥ 1")
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"min_ratio = {min_ratio}: expected a share of the peak in [0, 1]")

    def factor(step: int) -> float:
        if step >= total:
            return min_ratio
        if step < warmup:
            return step / warmup
        progress = (step - warmup) / (total - warmup)
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


class Schedule:
    """The learning rate of the next update, kept where the updates happen.

    Step n, counted from 1, is taken at lr·λ(n): the first update is not wasted on a rate of 0, and the line that a run
    prints for step n shows the rate of that step.

    Args:
        lr: the peak rate.
        warmup, total, min_ratio: as in `make_warmup_cosine_lambda`.
        device: where the optimiser's parameters live.
    """

    def __init__(
        self,
        lr: float,
        warmup: int,
        total: int,
        min_ratio: float,
        device: torch.device | str = "cpu",
    ) -> None:
        factor = make_warmup_cosine_lambda(warmup, total, min_ratio)
        rates = [lr * factor(step) for step in range(total + 1)]
        self.table = torch.tensor(rates, dtype=torch.float32, device=device)  # (total + 1,)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)

    def rate(self) -> Float[Tensor, ""]:
        """The rate of the next update, without asking the device for it."""
        return self.table.take((self.taken + 1).clamp(max=self.table.numel() - 1))

    def advance(self, taken: Bool[Tensor, ""]) -> None:
        """Count one update if it was taken."""
        self.taken += taken

    def state_dict(self) -> dict[str, int]:
        """The number of updates taken (waits for the device)."""
        return {"taken": int(self.taken)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved number of updates."""
        self.taken.fill_(int(state["taken"]))
