"""Checks of chapter 11: the tape, and paying for memory in time.

Shapes: N rows, C columns.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gptoss.model.norm import rms_norm
from gptoss.training.memory_measured import kept_for_backward

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "11_memory"

Computation = Callable[..., Tensor]
Pair = tuple[Tensor, Tensor]


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. Weigh the tape ----------------------------------------------------------------------------------------------------


def _kept_reference(f: Computation, x: Tensor, w: Tensor) -> int:
    _, storages = kept_for_backward(lambda: f(x, w), (x, w))
    return sum(storages.values())


def _kept(f: Computation, x: Tensor, w: Tensor, kind: str) -> int:
    """What a slip counts: every call, views by their own size, both, the inputs too, or four bytes for every number."""
    there = {t.untyped_storage().data_ptr() for t in (x, w)}
    sizes: dict[int, int] = {}
    calls = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if kind == "inputs" or address not in there:
            calls.append(tensor.nbytes if kind == "as they come" else size)
            narrow = size // tensor.element_size() * 4
            sizes[address] = {"views": tensor.nbytes, "four": narrow}.get(kind, size)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = f(x, w)
    assert result is not None
    return sum(calls) if kind in ("calls", "as they come") else sum(sizes.values())


def _kept_afterwards(f: Computation, x: Tensor, w: Tensor) -> int:
    """Right, and written differently: holds the tensors and compares their storages at the end."""
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        held.append(tensor)
        return len(held) - 1

    with saved_tensors_hooks(pack, lambda place: held[place]):
        result = f(x, w)
    assert result is not None
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    for tensor in (x, w):
        storages.pop(tensor.untyped_storage()._cdata, None)
    return sum(storages.values())


def _weigh(label: str, f: Computation) -> Trial:
    def make() -> tuple[Computation, Tensor, Tensor]:
        x, w = _numbers(6, 4, seed=0), _numbers(5, 4, seed=1)
        return f, x.requires_grad_(), w.requires_grad_()

    return Trial(label, make)


def _gate(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(x @ w.T) * torch.tanh(x @ w.T)


def _halves(x: Tensor, w: Tensor) -> Tensor:
    y = x.exp()
    return y[:3] * y[3:]


def _in_bf16(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w)


def _softmax_thrice(x: Tensor, w: Tensor) -> Tensor:
    p = torch.softmax(x @ w.T, -1)
    return p * p * p


check_kept_bytes = Exercise(
    function="kept_bytes",
    title="Weigh the tape",
    dots=2,
    minutes=15,
    reference=_kept_reference,
    trials=(
        _weigh("a product, then exp", lambda x, w: (x @ w.T).exp()),
        _weigh("a gate", _gate),
        _weigh("a sum, which keeps nothing", lambda x, w: x + x),
        _weigh("the two halves of one tensor, multiplied", _halves),
        _weigh("a product under bf16 autocast", _in_bf16),
        _weigh("a softmax that several operations keep", _softmax_thrice),
        _weigh("a sort", lambda x, w: x.sort(-1)[0] * w.sum()),
    ),
    mistakes=(
        Mistake(
            "every call counted",
            "a tensor that two operations keep was counted twice. Count storages, each once.",
            lambda f, x, w: _kept(f, x, w, "calls"),
        ),
        Mistake(
            "tensors, not storages",
            "a view keeps its whole storage alive: ask the storage for its bytes, not the tensor.",
            lambda f, x, w: _kept(f, x, w, "views"),
        ),
        Mistake(
            "tensors as they come",
            "every tensor was added up as it came. Two may share a storage, and a view keeps all of it.",
            lambda f, x, w: _kept(f, x, w, "as they come"),
        ),
        Mistake(
            "inputs counted",
            "x and w exist anyway. Leave their storages out.",
            lambda f, x, w: _kept(f, x, w, "inputs"),
        ),
        Mistake(
            "four bytes for every number",
            "not every number has four bytes: think of bf16 copies, of indices, of masks.",
            lambda f, x, w: _kept(f, x, w, "four"),
        ),
    ),
    alternatives=(_kept_afterwards,),
    hints=(
        "torch.autograd.graph.saved_tensors_hooks(pack, unpack) calls pack on every tensor that goes onto the tape.",
        "Two tensors share memory when tensor.untyped_storage().data_ptr() is the same.",
        "A dict from address to storage.nbytes() counts each storage once. Hold on to f's result while you count.",
    ),
)


# 2. Where to cut ------------------------------------------------------------------------------------------------------


def _best_runs(layers: int, kept: float, stream: float) -> int:
    return min(range(1, layers + 1), key=lambda g: (g * stream + -(-layers // g) * kept, g))


def _best_runs_loop(layers: int, kept: float, stream: float) -> int:
    best, smallest = 1, stream + layers * kept
    for runs in range(2, layers + 1):
        longest = layers // runs + (layers % runs > 0)
        if runs * stream + longest * kept < smallest:
            best, smallest = runs, runs * stream + longest * kept
    return best


def _root(layers: int, kept: float, stream: float) -> int:
    return max(1, round(layers**0.5))


def _rounded_optimum(layers: int, kept: float, stream: float) -> int:
    return min(layers, max(1, round((layers * kept / stream) ** 0.5)))


def _cut(layers: int, kept: float, stream: float) -> Trial:
    return Trial(
        f"{layers} layers of {kept:g} bytes, inputs of {stream:g}", lambda: (layers, kept, stream)
    )


check_best_runs = Exercise(
    function="best_runs",
    title="Where to cut",
    dots=1,
    minutes=10,
    reference=_best_runs,
    trials=(
        _cut(36, 1, 1),
        _cut(12, 33_224, 1_536),
        _cut(12, 1, 1),
        _cut(7, 3, 2),
        _cut(100, 1, 30),
        _cut(50, 2, 3),
        _cut(1, 5, 1),
    ),
    mistakes=(
        Mistake(
            "always the root",
            "that is √L whatever a layer keeps. What if a layer keeps twenty times as much as its input?",
            _root,
        ),
        Mistake(
            "rounded optimum",
            "the best real number, rounded, need not be the best whole one: the longest run jumps. Try all of them.",
            _rounded_optimum,
        ),
        Mistake(
            "shortest run",
            "12 layers in 5 runs: one of them has 3 layers. The peak belongs to the longest run, not to the shortest.",
            lambda layers, kept, stream: min(
                range(1, layers + 1), key=lambda g: g * stream + layers // g * kept
            ),
        ),
        Mistake(
            "inputs forgotten",
            "every run also keeps its own input, and all of these wait at the same time.",
            lambda layers, kept, stream: layers,
        ),
    ),
    alternatives=(_best_runs_loop,),
    hints=(
        "Write the peak for a given number of runs first.",
        "The longest of g runs has layers/g layers, rounded up.",
        "min(range(1, layers + 1), key=…) returns the first of the smallest.",
    ),
)


# 3. A schedule for a budget -------------------------------------------------------------------------------------------

Numbers = tuple[float, ...]


def _schedule_peak(
    kept: Numbers, stream: float, again: Sequence[bool], *, work: bool = True, inputs: bool = True
) -> float:
    waits = [(stream if inputs else 0) if a else k for a, k in zip(again, kept, strict=True)]
    peak = sum(waits)
    for i, a in enumerate(again):
        at_work = kept[i] + (stream if a and inputs else 0)
        if work:
            peak = max(peak, sum(waits[:i]) + at_work)
    return peak


def _least(
    kept: Numbers,
    time: Numbers,
    stream: float,
    budget: float,
    *,
    work: bool = True,
    inputs: bool = True,
    by_count: bool = False,
    plans: Sequence[Sequence[bool]] | None = None,
) -> float:
    every = plans or list(itertools.product((False, True), repeat=len(kept)))
    fits = [p for p in every if _schedule_peak(kept, stream, p, work=work, inputs=inputs) <= budget]
    extra = [(sum(p), sum(t for t, a in zip(time, p, strict=True) if a)) for p in fits]
    if not extra:
        return float(sum(time))
    return float(min(extra)[1] if by_count else min(cost for _, cost in extra))


def _periodic(n: int) -> list[list[bool]]:
    return [[False] * n] + [[i % g == 0 for i in range(n)] for g in range(1, n + 1)]


def _largest_first(kept: Numbers, time: Numbers, stream: float, budget: float) -> float:
    again = [False] * len(kept)
    for i in sorted(range(len(kept)), key=lambda i: -kept[i]):
        if _schedule_peak(kept, stream, again) <= budget:
            break
        again[i] = True
    return float(sum(t for t, a in zip(time, again, strict=True) if a))


def _walk_backwards(kept: Numbers, time: Numbers, stream: float, budget: float) -> float:
    """Right, and written differently: a search that gives up what costs too much or cannot fit."""
    best = float(sum(time))

    def visit(i: int, waiting: float, cost: float) -> None:
        nonlocal best
        if cost > best or waiting > budget:
            return
        if i == len(kept):
            best = min(best, cost)
            return
        if waiting + kept[i] <= budget:
            visit(i + 1, waiting + kept[i], cost)
        if waiting + kept[i] + stream <= budget:
            visit(i + 1, waiting + stream, cost + time[i])

    visit(0, 0.0, 0.0)
    return best


def _budget(label: str, kept: Numbers, time: Numbers, stream: float, budget: float) -> Trial:
    return Trial(label, lambda: (kept, time, stream, budget))


EQUAL = (20.0,) * 6
MIXED = (30.0, 12.0, 25.0, 12.0, 40.0, 12.0, 25.0, 12.0)
TIMES = (5.0, 1.0, 6.0, 1.5, 4.0, 1.0, 3.0, 2.5)

check_least_extra_time = Exercise(
    function="least_extra_time",
    title="A schedule for a budget",
    dots=3,
    minutes=30,
    reference=lambda kept, time, stream, budget: _least(kept, time, stream, budget),
    trials=(
        _budget("six equal blocks, room for four", EQUAL, (1.0,) * 6, 1.0, 85.0),
        _budget("room for everything", EQUAL, (1.0,) * 6, 1.0, 120.0),
        _budget(
            "the last block costs nothing and saves nothing",
            EQUAL,
            (2, 2, 2, 2, 2, 0.1),
            1.0,
            119.0,
        ),
        _budget("room for one block and the inputs", EQUAL, (3, 1, 4, 1, 5, 9), 1.0, 26.0),
        _budget("large blocks are slow", MIXED, TIMES, 2.0, 120.0),
        _budget("inputs of a quarter of a block", EQUAL, (1.0,) * 6, 5.0, 85.0),
        _budget("one large slow block", (40, 15, 15, 15, 15), (10, 1, 1, 1, 1), 1.0, 75.0),
        _budget("a tight budget", MIXED, TIMES, 2.0, 60.0),
        _budget("the cheap blocks are enough", (20.0,) * 8, (9, 1, 9, 1, 9, 1, 9, 1), 1.0, 125.0),
        _budget("inputs nearly as large as blocks", (10.0,) * 5, (1, 2, 3, 4, 5), 8.0, 48.0),
    ),
    mistakes=(
        Mistake(
            "block at work forgotten",
            "the bytes that wait at the loss fit. But in its backward pass a block is whole again, beside all that wait before it.",
            lambda kept, time, stream, budget: _least(kept, time, stream, budget, work=False),
        ),
        Mistake(
            "inputs forgotten",
            "a checkpointed block is not free: its input waits.",
            lambda kept, time, stream, budget: _least(kept, time, stream, budget, inputs=False),
        ),
        Mistake(
            "fewest blocks",
            "that is the smallest number of blocks. The question is for the least time, and two quick blocks may beat a slow one.",
            lambda kept, time, stream, budget: _least(kept, time, stream, budget, by_count=True),
        ),
        Mistake(
            "every g-th block",
            "only schedules of the form 0, g, 2g, … were tried. Any set of blocks is allowed.",
            lambda kept, time, stream, budget: _least(
                kept, time, stream, budget, plans=_periodic(len(kept))
            ),
        ),
        Mistake(
            "largest first",
            "the block that keeps most is given up first. It may be slow, or the last one, which saves nothing.",
            _largest_first,
        ),
    ),
    alternatives=(_walk_backwards,),
    hints=(
        "Write a function for the peak of one schedule first, a tuple of True and False.",
        "Ten blocks have 1,024 schedules: itertools.product((False, True), repeat=n) lists them.",
        "Keep those whose peak fits, and take the smallest sum of times.",
    ),
)


# 4. A checkpoint of your own ------------------------------------------------------------------------------------------


class _TellRuns(torch.autograd.Function):
    """The identity, whose gradient is multiplied by how often the computation around it has run by then."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, runs: list[int]) -> Tensor:
        ctx.save_for_backward(y)
        ctx.runs = runs
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # whoever makes the tensors again does so before the count is read
        return dy * ctx.runs[0], None


def _counted(inner: Computation) -> Callable[..., Pair]:
    """A stream and a loss beside it, as a block returns them."""
    runs = [0]

    def f(x: Tensor, w: Tensor) -> Pair:
        runs[0] += 1
        stream = inner(x, w)
        loss = (stream.mean(0) * w.square().mean()).sum()
        return _TellRuns.apply(stream, runs), _TellRuns.apply(loss, runs)

    return f


def _torch_checkpoint(f: Callable[..., Any], x: Tensor, w: Tensor) -> Any:
    return checkpoint(f, x, w, use_reentrant=False)


def _lazily(f: Callable[..., Pair], x: Tensor, w: Tensor) -> Pair:
    """Right, and written differently: numbers on the tape, tensors made again on demand."""
    again: list[Tensor] = []
    count = itertools.count()

    def unpack(place: int) -> Tensor:
        if not again:
            with (
                torch.enable_grad(),
                saved_tensors_hooks(lambda t: again.append(t.detach()), lambda _: x),
            ):
                f(x, w)
        return again[place]

    with saved_tensors_hooks(lambda _: next(count), unpack):
        return f(x, w)


def _own(
    f: Callable[..., Pair],
    x: Tensor,
    w: Tensor,
    *,
    only_x: bool = False,
    only_stream: bool = False,
    ones: bool = False,
    tape: bool = True,
    detach: bool = True,
) -> Pair:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Pair:
            ctx.save_for_backward(x, w)
            return f(x, w)

        @staticmethod
        def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
            kept, needed = ctx.saved_tensors, ctx.needs_input_grad
            kept = [t.detach() for t in kept] if detach else kept
            x, w = (t.requires_grad_(n) for t, n in zip(kept, needed, strict=True))
            with torch.set_grad_enabled(tape):  # off inside a backward pass
                results = f(x, w)
            if ones:
                incoming = tuple(torch.ones_like(result) for result in results)
            count = 1 if only_stream else 2
            torch.autograd.backward(results[:count], incoming[:count])
            return x.grad, None if only_x else w.grad

    return Again.apply(x, w)


def _one_gradient(f: Callable[..., Pair], x: Tensor, w: Tensor) -> Pair:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Pair:
            ctx.save_for_backward(x, w)
            return f(x, w)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # two come
            raise AssertionError("not reached")

    return Again.apply(x, w)


def _norm_then_linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(rms_norm(x, torch.ones_like(x[0])) @ w.T, -1)


def _own_trial(
    label: str,
    inner: Computation,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    seed: int,
    dtype: torch.dtype = torch.float64,
    strided: bool = False,
    needed: tuple[bool, bool] = (True, True),
) -> Trial:
    def make() -> tuple[Callable[..., Pair], Tensor, Tensor]:
        x = _numbers(*(x_shape[::-1] if strided else x_shape), seed=seed, dtype=dtype)
        w = _numbers(*w_shape, seed=seed + 1, dtype=dtype)
        x = x.mT if strided else x
        return _counted(inner), x.requires_grad_(needed[0]), w.requires_grad_(needed[1])

    return Trial(label, make)


check_checkpointed = Exercise(
    function="checkpointed",
    title="A checkpoint of your own",
    dots=3,
    minutes=30,
    reference=_torch_checkpoint,
    trials=(
        _own_trial("a gate, 5 rows of 4", _gate, (5, 4), (3, 4), 0),
        _own_trial("a norm, a product and a softmax", _norm_then_linear, (7, 6), (5, 6), 10),
        _own_trial("x without a gradient", _gate, (5, 4), (3, 4), 20, needed=(False, True)),
        _own_trial("w without a gradient", _gate, (5, 4), (3, 4), 30, needed=(True, False)),
        _own_trial("strided x, float32", _gate, (6, 3), (2, 3), 40, torch.float32, strided=True),
        _own_trial("one number", _gate, (1, 1), (1, 1), 50),
    ),
    mistakes=(
        Mistake(
            "never run again",
            "f ran once: its tensors waited on the tape. In the backward pass it must run a second time.",
            lambda f, x, w: f(x, w),
        ),
        Mistake(
            "weight forgotten",
            "the gradient of w was not returned. backward returns one gradient for each argument of forward.",
            lambda f, x, w: _own(f, x, w, only_x=True),
        ),
        Mistake(
            "dy ignored",
            "the incoming gradients were not used; the second run's backward pass must start from them.",
            lambda f, x, w: _own(f, x, w, ones=True),
        ),
        Mistake(
            "no tape the second time",
            "inside backward no tape is written unless asked for: torch.enable_grad(); "
            "or the copies do not require gradients.",
            lambda f, x, w: _own(f, x, w, tape=False),
        ),
        Mistake(
            "not detached",
            "the saved tensors are x and w themselves. In training every gradient would be added to .grad twice: "
            "by your backward pass, and again by the one around it.",
            lambda f, x, w: _own(f, x, w, detach=False),
        ),
        Mistake(
            "loss forgotten",
            "what comes back through the loss is missing. The second backward pass starts from both results.",
            lambda f, x, w: _own(f, x, w, only_stream=True),
        ),
        Mistake(
            "one gradient for two results",
            "backward is called with one gradient for each result of forward, and here there are two results.",
            _one_gradient,
        ),
    ),
    alternatives=(_lazily, _own),
    hints=(
        "A torch.autograd.Function writes no tape in its forward. Give f to it as an argument and keep x and w.",
        "In backward: detach the inputs, require gradients where ctx.needs_input_grad says so, run f under torch.enable_grad().",
        "Then torch.autograd.backward(results, gradients), and return None for f, and the .grad of both copies.",
    ),
)


# 5. Find the bug ------------------------------------------------------------------------------------------------------


def _with_generator(
    f: Computation,
    x: Tensor,
    w: Tensor,
    *,
    restore: bool = True,
    fixed: bool = False,
    detach: bool = True,
) -> Tensor:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            if fixed:
                torch.manual_seed(0)
            ctx.state = torch.get_rng_state()
            return f(x, w)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            kept = [t.detach() for t in ctx.saved_tensors] if detach else ctx.saved_tensors
            x, w = (t.requires_grad_() for t in kept)
            today = torch.get_rng_state()
            if restore:
                torch.set_rng_state(ctx.state)
            with torch.enable_grad():
                y = f(x, w)
            torch.set_rng_state(today)
            torch.autograd.backward(y, dy)
            return x.grad, w.grad

    return Again.apply(x, w)


def _fresh_mask(f: Computation, x: Tensor, w: Tensor) -> Tensor:
    return _with_generator(f, x, w, restore=False)


def _dropping(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.dropout(x @ w.T, 0.5))


def _dropping_twice(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.tanh(F.dropout(x, 0.3) @ w.T), 0.3)


def _noise(x: Tensor, w: Tensor) -> Tensor:
    return (x + torch.randn(x.shape, dtype=x.dtype)) @ w.T


def _bug_trial(
    label: str,
    f: Computation,
    shape: tuple[int, int],
    seed: int,
    dtype: torch.dtype = torch.float64,
) -> Trial:
    def make() -> tuple[Computation, Tensor, Tensor]:
        x = _numbers(*shape, seed=seed, dtype=dtype).requires_grad_()
        w = _numbers(5, shape[1], seed=seed + 1, dtype=dtype).requires_grad_()
        torch.manual_seed(seed)
        return f, x, w

    return Trial(label, make)


check_repaired_checkpoint = Exercise(
    function="repaired_checkpoint",
    title="Find the bug",
    dots=2,
    minutes=15,
    reference=_torch_checkpoint,
    trials=(
        _bug_trial("dropout of one half", _dropping, (6, 4), 0),
        _bug_trial("no random numbers", _gate, (6, 4), 10),
        _bug_trial("two dropouts, float32", _dropping_twice, (9, 7), 20, torch.float32),
        _bug_trial("normal noise on the input", _noise, (5, 3), 30),
        _bug_trial("one row", _dropping, (1, 4), 40),
    ),
    mistakes=(
        Mistake(
            "another mask",
            "the output is right, the gradient belongs to another mask: the second run drew new random numbers.",
            _fresh_mask,
        ),
        Mistake(
            "a fixed seed",
            "the two runs agree now, but the output has changed: the first run must draw what it would have drawn anyway.",
            lambda f, x, w: _with_generator(f, x, w, fixed=True),
        ),
        Mistake(
            "not detached",
            "the saved tensors are x and w themselves. In training every gradient would be added to .grad twice: "
            "by your backward pass, and again by the one around it.",
            lambda f, x, w: _with_generator(f, x, w, detach=False),
        ),
    ),
    alternatives=(_with_generator,),
    hints=(
        "Call f twice with dropout inside. What differs?",
        "What must be the same at the start of the second run as at the start of the first?",
        "Keep torch.get_rng_state() in ctx before f runs, and set it before f runs again; put today's state back afterwards.",
    ),
)
