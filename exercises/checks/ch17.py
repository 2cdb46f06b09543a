"""Checks of chapter 17: the full pretraining run.

Shapes: A micro-batches of a step, N tokens of one, V vocabulary, S steps, D features.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.config import TrainingConfig
from gptoss.training.losses import chunked_cross_entropy
from gptoss.training.plan import plan_batches
from gptoss.training.schedule import make_warmup_cosine_lambda

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "17_pretraining"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. Warmup, cosine, floor ---------------------------------------------------------------------------------------------


def _rate(
    step: int,
    warmup: int,
    total: int,
    min_ratio: float,
    *,
    ramp_shift: int = 0,
    whole: bool = False,
    floor: bool = True,
    ends: bool = True,
) -> float:
    if step < warmup and (step < total or not ends):
        return (step + ramp_shift) / warmup
    if step >= total and ends:
        return min_ratio
    start = 0 if whole else warmup
    wave = 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, total - start)))
    return min_ratio + (1 - min_ratio) * wave if floor else max(min_ratio, wave)


def _rate_half_angle(step: int, warmup: int, total: int, min_ratio: float) -> float:
    """Right, written differently: cos² of half the angle."""
    if step >= total:
        return min_ratio
    if step < warmup:
        return 1 - (warmup - step) / warmup
    angle = math.pi / 2 * (step - warmup) / (total - warmup)
    return min_ratio * math.sin(angle) ** 2 + math.cos(angle) ** 2


def _rate_end_late(step: int, warmup: int, total: int, min_ratio: float) -> float:
    if step == total == warmup:
        return 1.0
    return _rate(step, warmup, total, min_ratio)


def _rate_trial(label: str, *arguments: float) -> Trial:
    return Trial(label, lambda: arguments)


check_rate_factor = Exercise(
    function="rate_factor",
    title="Warmup, cosine, floor",
    dots=1,
    minutes=10,
    reference=lambda step, warmup, total, min_ratio: make_warmup_cosine_lambda(
        warmup, total, min_ratio
    )(step),
    trials=(
        _rate_trial("a quarter into the cosine of the production run", 17_500, 3000, 61_000, 0.05),
        _rate_trial("in the warmup", 750, 3000, 61_000, 0.05),
        _rate_trial("the last step of the warmup", 3000, 3000, 61_000, 0.05),
        _rate_trial("step 0 without a warmup", 0, 0, 20, 0.1),
        _rate_trial("warmup longer than the run, half way", 5, 20, 10, 0.2),
        _rate_trial("warmup as long as the run, at its end", 10, 10, 10, 0.2),
        _rate_trial("warmup longer than the run, behind its end", 12, 20, 10, 0.2),
        _rate_trial("behind the end", 35, 2, 20, 0.1),
    ),
    mistakes=(
        Mistake(
            "cosine from step 0",
            "the cosine must start at the end of the warmup, at 1. Its progress is (step − warmup)/(total − warmup).",
            lambda *a: _rate(*a, whole=True),
        ),
        Mistake(
            "floor as a maximum",
            "the curve was cut off at the floor. It must be squeezed: min_ratio + (1 − min_ratio) · cosine part.",
            lambda *a: _rate(*a, floor=False),
        ),
        Mistake(
            "no end",
            "behind `total` the cosine rises again. From there on the factor is min_ratio, whatever the warmup says.",
            lambda *a: _rate(*a, ends=False),
        ),
        Mistake(
            "warmup one step ahead",
            "the line is one step ahead: 0 at step 0, 1 at step warmup.",
            lambda *a: _rate(*a, ramp_shift=1),
        ),
        Mistake(
            "warmup squeezed",
            "a warmup longer than the run was squeezed into it. Its line stays step / warmup, and is cut off at `total`.",
            lambda step, warmup, total, min_ratio: _rate(
                step, min(warmup, total), total, min_ratio
            ),
        ),
        Mistake(
            "end one step late",
            "at step `total` itself the factor is min_ratio already, whatever the warmup says.",
            _rate_end_late,
        ),
    ),
    alternatives=(_rate_half_angle,),
    hints=(
        "Three cases. Which must be asked first, so that warmup ≥ total works?",
        "In the middle case let progress run from 0 at `warmup` to 1 at `total`.",
        "min_ratio + (1 − min_ratio) · ½(1 + cos(π · progress)).",
    ),
)


# 2. The loss of a step ------------------------------------------------------------------------------------------------


def _sums(logits: Tensor, targets: Tensor) -> tuple[list[Tensor], list[int]]:
    pairs = list(zip(logits, targets, strict=True))
    return (
        [F.cross_entropy(z, t, ignore_index=-100, reduction="sum") for z, t in pairs],
        [int((t != -100).sum()) for _, t in pairs],
    )


def _by_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Right, written differently: every target picked by hand."""
    counts = targets != -100
    chosen = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -(chosen * counts).sum() / max(1, int(counts.sum()))


def _mean_of_means(logits: Tensor, targets: Tensor) -> Tensor:
    sums, counts = _sums(logits, targets)
    return torch.stack([s / max(1, n) for s, n in zip(sums, counts, strict=True)]).mean()


def _all_positions(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.stack(_sums(logits, targets)[0]).sum() / targets.numel()


def _plain_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def _loss_trial(
    label: str, A: int, N: int, hidden: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Trial:
    """Micro-batch m has its last hidden[m] targets masked."""

    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(A * 100 + N)
        targets = torch.randint(0, 7, (A, N), generator=generator)
        for m, count in enumerate(hidden):
            targets[m, N - count :] = -100
        return _numbers(A, N, 7, seed=A + N, dtype=dtype).requires_grad_(), targets

    return Trial(label, make)


check_step_loss = Exercise(
    function="step_loss",
    title="The loss of a step",
    dots=2,
    minutes=15,
    reference=lambda logits, targets: chunked_cross_entropy(logits, targets, 4),
    trials=(
        _loss_trial("2 micro-batches, all targets count", 2, 6, (0, 0)),
        _loss_trial("micro-batches with 5 and 1 targets", 2, 5, (0, 4)),
        _loss_trial("one micro-batch without a target", 3, 4, (0, 4, 1)),
        _loss_trial("no target at all", 2, 3, (3, 3)),
        _loss_trial("one micro-batch, float64", 1, 9, (2,), torch.float64),
    ),
    mistakes=(
        Mistake(
            "mean of means",
            "a micro-batch with one target weighs as much as one with five. Add up first, divide once.",
            _mean_of_means,
        ),
        Mistake(
            "masked targets counted",
            "the sum was divided by all positions. Divide by the targets that count.",
            _all_positions,
        ),
        Mistake(
            "NaN without targets",
            "with no target at all this is 0 divided by 0. Divide by at least 1.",
            _plain_mean,
        ),
    ),
    alternatives=(_by_log_softmax,),
    hints=(
        "What does a target in a short micro-batch weigh, and what in a long one?",
        'reduction="sum" gives the numerator, over all micro-batches together.',
        "The denominator is (targets != −100).sum(), at least 1.",
    ),
)


# 3. The same step on other GPUs ---------------------------------------------------------------------------------------


def _cut(tokens: int, seq_len: int, gpus: int, largest: int) -> tuple[int, int]:
    sequences = tokens // seq_len
    if sequences % gpus:
        return 0, 0
    training = TrainingConfig(micro_batch_size=1, gradient_accumulation_steps=sequences)
    share = sequences // gpus
    for micro_batch in range(min(largest, share), 0, -1):
        if share % micro_batch == 0:
            training.micro_batch_size = micro_batch
            training.gradient_accumulation_steps = sequences // micro_batch
            break
    plan = plan_batches(training, seq_len, gpus)
    return plan.micro_batch, plan.accumulation


def _cut_downwards(tokens: int, seq_len: int, gpus: int, largest: int) -> tuple[int, int]:
    """Right, written differently: count down from the largest."""
    share, rest = divmod(tokens, seq_len * gpus)
    if rest:
        return 0, 0
    micro_batch = min(largest, share)
    while share % micro_batch:
        micro_batch -= 1
    return micro_batch, share // micro_batch


def _cut_rounded(tokens: int, seq_len: int, gpus: int, largest: int) -> tuple[int, int]:
    if (tokens // seq_len) % gpus:
        return 0, 0
    share = tokens // seq_len // gpus
    micro_batch = min(largest, share)
    return micro_batch, math.ceil(share / micro_batch)


def _cut_trial(label: str, *arguments: int) -> Trial:
    return Trial(label, lambda: arguments)


check_cut_step = Exercise(
    function="cut_step",
    title="The same step on other GPUs",
    dots=1,
    minutes=10,
    reference=_cut,
    trials=(
        _cut_trial("the production step on 4 GPUs, 8 fit", 131_072, 4096, 4, 8),
        _cut_trial("on one GPU, 8 fit", 131_072, 4096, 1, 8),
        _cut_trial("on 2 GPUs, 6 fit", 131_072, 4096, 2, 6),
        _cut_trial("on 16 GPUs, 8 fit", 131_072, 4096, 16, 8),
        _cut_trial("12 sequences on one GPU, 5 fit", 12 * 1024, 1024, 1, 5),
        _cut_trial("on 5 GPUs", 131_072, 4096, 5, 8),
    ),
    mistakes=(
        Mistake(
            "GPUs ignored",
            "every process reads the whole step: with n processes that is n times the tokens. Each has a share.",
            lambda tokens, seq_len, gpus, largest: _cut(tokens, seq_len, 1, largest),
        ),
        Mistake(
            "does not divide",
            "micro-batch times accumulation is not each process's share. The micro-batch must divide the share.",
            _cut_rounded,
        ),
        Mistake(
            "order of the results",
            "micro-batch first, then accumulation.",
            lambda *a: _cut(*a)[::-1],
        ),
    ),
    alternatives=(_cut_downwards,),
    hints=(
        "How many sequences are there in a step, and how many does one process read?",
        "The micro-batch is a divisor of the share, and at most `largest`.",
        "The accumulation is share // micro-batch.",
    ),
)


# 4. A guard that holds ------------------------------------------------------------------------------------------------


Tensors = list[Tensor]


def _guarded(
    weights: Tensors,
    gradients: Tensors,
    loss: float,
    lr: float,
    clip: float,
    *,
    look_at_loss: bool = True,
    look_at_norm: bool = True,
    only_nan: bool = False,
    clean: bool = False,
    apart: bool = False,
) -> Tensors:
    def fine(x: Tensor) -> bool:
        return bool(~torch.isnan(x) if only_nan else torch.isfinite(x))

    if clean:
        gradients = [torch.nan_to_num(g, 0.0, 0.0, 0.0) for g in gradients]
    norm = torch.nn.utils.get_total_norm(gradients)
    if (look_at_loss and not fine(torch.tensor(loss))) or (look_at_norm and not fine(norm)):
        return weights
    norms = [g.norm() for g in gradients] if apart else [norm] * len(gradients)
    return [
        w - lr * g / (n / clip).clamp(min=1.0)
        for w, g, n in zip(weights, gradients, norms, strict=True)
    ]


def _guarded_entry_by_entry(
    weights: Tensors, gradients: Tensors, loss: float, lr: float, clip: float
) -> Tensors:
    """Right, written differently: every number is looked at, and the norm is a square root of a sum."""
    numbers = [loss, *(x for g in gradients for x in g.flatten().tolist())]
    if not all(math.isfinite(x) for x in numbers):
        return [w.clone() for w in weights]
    norm = math.sqrt(sum(x * x for x in numbers[1:]))
    rate = lr * min(1.0, clip / norm) if norm else lr
    return [w - rate * g for w, g in zip(weights, gradients, strict=True)]


def _guard_trial(
    label: str,
    bad: float | None = None,
    loss: float = 1.5,
    size: float = 1.0,
    lr: float = 0.1,
    clip: float = 1.0,
) -> Trial:
    def make() -> tuple[Tensors, Tensors, float, float, float]:
        shapes = ((3, 4), (5,))
        gradients = [size * _numbers(*shape, seed=n) for n, shape in enumerate(shapes, start=2)]
        if bad is not None:
            gradients[0][1, 2] = bad
        return (
            [_numbers(*shape, seed=n) for n, shape in enumerate(shapes)],
            gradients,
            loss,
            lr,
            clip,
        )

    return Trial(label, make)


check_guarded_update = Exercise(
    function="guarded_update",
    title="A guard that holds",
    dots=2,
    minutes=10,
    reference=lambda weights, gradients, loss, lr, clip: _guarded(
        weights, gradients, loss, lr, clip
    ),
    trials=(
        _guard_trial("a long gradient, to be clipped to 0.5", lr=0.3, clip=0.5),
        _guard_trial("a gradient a little shorter than clip, left as it is", size=0.2),
        _guard_trial("one NaN in the gradient, finite loss", bad=math.nan),
        _guard_trial("one infinity in the gradient, finite loss", bad=math.inf),
        _guard_trial("NaN loss, finite gradient", loss=math.nan),
        _guard_trial("infinite loss, finite gradient", loss=math.inf),
        _guard_trial("a gradient of zeros", size=0.0),
    ),
    mistakes=(
        Mistake(
            "loss only",
            "a NaN gradient under a finite loss went through, and every weight with it. Look at the norm as well.",
            lambda *a: _guarded(*a, look_at_norm=False),
        ),
        Mistake(
            "norm only",
            "the step of a loss that is NaN was taken.",
            lambda *a: _guarded(*a, look_at_loss=False),
        ),
        Mistake(
            "infinity passes",
            "infinity is no NaN, and went through. torch.isfinite asks for both.",
            lambda *a: _guarded(*a, only_nan=True),
        ),
        Mistake(
            "NaN replaced by zero",
            "the rest of a gradient with a NaN in it cannot be trusted either. Refuse the whole update.",
            lambda *a: _guarded(*a, clean=True),
        ),
        Mistake(
            "norms one by one",
            "each tensor was clipped by its own norm. The norm is one number over all gradients together.",
            lambda *a: _guarded(*a, apart=True),
        ),
        Mistake(
            "clip ignored",
            "the norm was held at 1. Its limit is the argument `clip`.",
            lambda weights, gradients, loss, lr, clip: _guarded(weights, gradients, loss, lr, 1.0),
        ),
    ),
    alternatives=(_guarded_entry_by_entry,),
    hints=(
        "One number says whether any entry of any gradient is NaN or infinite.",
        "The square root of the sum of all squared norms; math.isfinite of it and of the loss, before anything else.",
        "A clipped gradient is g / max(1, norm / clip).",
    ),
)


# 5. Find the bug ------------------------------------------------------------------------------------------------------


def _fit(
    weight: Tensor,
    inputs: Tensor,
    targets: Tensor,
    lr: float,
    *,
    zero: str = "step",
    mean: bool = True,
) -> Tensor:
    weight = weight.detach().clone().requires_grad_()
    for x, y in zip(inputs, targets, strict=True):
        if zero == "step":
            weight.grad = None
        for micro_x, micro_y in zip(x, y, strict=True):
            if zero == "micro-batch":
                weight.grad = None
            loss = (micro_x @ weight - micro_y).square().mean()
            (loss / len(x) if mean else loss).backward()
        assert weight.grad is not None
        with torch.no_grad():
            weight -= lr * weight.grad
    return weight.detach()


def _fit_in_closed_form(weight: Tensor, inputs: Tensor, targets: Tensor, lr: float) -> Tensor:
    """Right, written differently: the gradient of the whole step by its formula."""
    for x, y in zip(inputs.flatten(1, 2), targets.flatten(1, 2), strict=True):
        weight = weight - lr * 2 * x.mT @ (x @ weight - y) / len(y)
    return weight


def _fit_trial(label: str, S: int, A: int, N: int, D: int, dtype: torch.dtype) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor, float]:
        inputs = _numbers(S, A, N, D, seed=1, dtype=dtype)
        targets = _numbers(S, A, N, seed=2, dtype=dtype)
        return _numbers(D, seed=0, dtype=dtype), inputs, targets, 0.05

    return Trial(label, make)


check_repaired_training = Exercise(
    function="repaired_training",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=lambda weight, inputs, targets, lr: _fit(weight, inputs, targets, lr),
    trials=(
        _fit_trial("3 steps of 4 micro-batches", 3, 4, 5, 3, torch.float32),
        _fit_trial("one micro-batch a step", 4, 1, 6, 2, torch.float32),
        _fit_trial("one step, float64", 1, 3, 4, 5, torch.float64),
    ),
    mistakes=(
        Mistake(
            "zeroed in every micro-batch",
            "the gradients of all micro-batches but the last are thrown away. When should a gradient be cleared?",
            lambda *a: _fit(*a, zero="micro-batch"),
        ),
        Mistake(
            "never zeroed",
            "now the gradients of earlier steps stay in. Clear them once a step, before the first micro-batch.",
            lambda *a: _fit(*a, zero="never"),
        ),
        Mistake(
            "sum instead of mean",
            "the gradient is A times too large: divide each micro-batch's loss by their number.",
            lambda *a: _fit(*a, mean=False),
        ),
    ),
    alternatives=(_fit_in_closed_form,),
    hints=(
        "Print weight.grad after each micro-batch.",
        "backward() adds to .grad. What takes it away again, and how often?",
        "Move one line out of the inner loop.",
    ),
)
