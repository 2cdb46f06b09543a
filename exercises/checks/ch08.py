"""Checks of chapter 8: rotary positions and YaRN.

Shapes: B batch, T tokens, H heads, D head_dim, C model width.
"""

import math
from functools import partial

import torch
from torch import Tensor

from gptoss.model.rotary import apply_rope, compute_yarn_freqs

from .exercise import TOLERANCES, Exercise, Mistake, Trial

NOTEBOOK = "08_yarn"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def _plain(head_dim: int, theta: float) -> Tensor:
    pair = torch.arange(head_dim // 2, dtype=torch.float64)
    return theta ** (-2 * pair / head_dim)


# 1. Turn the pairs ----------------------------------------------------------------------------------------------------


def _rotate_reference(x: Tensor, angles: Tensor) -> Tensor:
    return apply_rope(x, angles.cos(), angles.sin())


def _rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(torch.ones_like(angles), angles).to(z.dtype)
    return torch.view_as_real(z * turn).flatten(-2)


def _rotate_half_split(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def _rotate_not_interleaved(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1)


def _rotate_overwritten(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    even = even * cos - odd * sin
    return torch.stack((even, even * sin + odd * cos), -1).flatten(-2)


def _rotate_trial(
    label: str,
    shape: tuple[int, ...],
    seed: int,
    dtype: torch.dtype,
    strided: bool = False,
    first: int = 0,
) -> Trial:
    def make() -> tuple[Tensor, Tensor]:
        B, H, T, D = shape
        x = _numbers(B, T, H, D, seed=seed, dtype=dtype).transpose(1, 2)
        x = x if strided else x.contiguous()
        positions = torch.arange(T, dtype=torch.float64) * 7 + seed + first
        return x.requires_grad_(), positions[:, None] * _plain(D, 100.0)

    return Trial(label, make)


check_rotate = Exercise(
    function="rotate",
    title="Turn the pairs",
    dots=1,
    minutes=10,
    reference=_rotate_reference,
    trials=(
        _rotate_trial("2 heads, 5 tokens, D = 8", (2, 2, 5, 8), 0, torch.float32),
        _rotate_trial("strided input, odd length, D = 6", (1, 3, 7, 6), 1, torch.float32, True),
        _rotate_trial("one token, one pair, float64", (1, 1, 1, 2), 2, torch.float64),
        _rotate_trial(
            "positions from 131,069 on, D = 12", (2, 1, 4, 12), 3, torch.float32, first=131_066
        ),
    ),
    mistakes=(
        Mistake(
            "half split",
            "you paired dimension i with i + D/2. Here a pair is (2i, 2i + 1), neighbours.",
            _rotate_half_split,
        ),
        Mistake(
            "not interleaved again",
            "the pairs are turned rightly, but all first members stand before all second ones. Put them back in turns.",
            _rotate_not_interleaved,
        ),
        Mistake(
            "turned backwards",
            "the pairs turn the wrong way: the sign of sin is swapped.",
            lambda x, angles: _rotate_reference(x, -angles),
        ),
        Mistake(
            "overwritten",
            "the second member was computed from the new first member. Both need the old ones.",
            _rotate_overwritten,
        ),
        Mistake(
            "angles rounded",
            "the angles were cast before their cosine: float32 holds an angle of 131,069 only to 0.004. Cast the "
            "cosine and the sine.",
            lambda x, angles: _rotate_reference(x, angles.to(x.dtype)),
        ),
    ),
    alternatives=(_rotate_complex,),
    hints=(
        "x[..., 0::2] are the first members of all pairs, x[..., 1::2] the second.",
        "The angles are float64: cast cos and sin to x's dtype, or the result is float64 too.",
        "torch.stack((first, second), dim=-1).flatten(-2) puts two tensors back in turns.",
    ),
)


# 2. Backwards ---------------------------------------------------------------------------------------------------------


def _backward_by_autograd(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = torch.zeros_like(dy).requires_grad_()
    return torch.autograd.grad(apply_rope(x, cos, sin), x, dy)[0]


def _backward_matrix(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    jacobian = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
    return torch.einsum("...tij,tijk->...tik", dy.unflatten(-1, (-1, 2)), jacobian).flatten(-2)


def _backward_trial(label: str, T: int, D: int, size: float, seed: int) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor]:
        angles = torch.arange(T, dtype=torch.float64)[:, None] * _plain(D, 50.0) + seed
        dy = _numbers(2, 3, T, D, seed=seed, dtype=torch.float64)
        return dy, size * angles.cos(), size * angles.sin()

    return Trial(label, make)


check_rotate_backward = Exercise(
    function="rotate_backward",
    title="The gradient of a rotation",
    dots=2,
    minutes=10,
    reference=_backward_by_autograd,
    trials=(
        _backward_trial("4 tokens, D = 8, mscale 1", 4, 8, 1.0, 1),
        _backward_trial("5 tokens, D = 6, mscale 1.35", 5, 6, 1.35, 2),
        _backward_trial("one token, one pair", 1, 2, 1.2, 3),
    ),
    mistakes=(
        Mistake(
            "turned forwards",
            "the gradient was turned forwards once more. It takes the transpose of the forward matrix.",
            lambda dy, cos, sin: apply_rope(dy, cos, sin),
        ),
        Mistake(
            "inverse",
            "this is the inverse of the forward pass. The gradient needs the transpose, and with mscale in the tables they differ.",
            lambda dy, cos, sin: apply_rope(dy, cos, -sin) / (cos**2 + sin**2)[0, 0],
        ),
        Mistake(
            "mscale lost",
            "the gradient has the right direction and has lost the length of the tables: mscale multiplies it too.",
            lambda dy, cos, sin: apply_rope(dy, cos, -sin) / (cos**2 + sin**2)[0, 0].sqrt(),
        ),
    ),
    alternatives=(_backward_matrix,),
    hints=(
        "Write the forward pass of one pair as a 2 × 2 matrix. What is its transpose?",
        "The transpose of a rotation is the rotation by minus the angle.",
        "Forward with −sin in the place of sin.",
    ),
)


# 3. YaRN's frequencies ------------------------------------------------------------------------------------------------


def _yarn_reference(
    head_dim: int,
    theta: float,
    scale_factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    target = math.ceil(scale_factor * original_length)
    return compute_yarn_freqs(
        head_dim, theta, scale_factor, original_length, target, beta_fast, beta_slow
    )


def _yarn(
    head_dim: int,
    theta: float,
    scale_factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
    *,
    circle: float = 2 * math.pi,
    rounded: bool = False,
    reversed_ramp: bool = False,
    unclamped: bool = False,
    periods: bool = False,
    ramp_over_turns: bool = False,
    low_below_zero: bool = False,
    top: float | None = None,
) -> Tensor:
    omega = _plain(head_dim, theta)
    pair = torch.arange(head_dim // 2, dtype=torch.float64)
    low, high = (
        head_dim * math.log(original_length / (circle * beta)) / (2 * math.log(theta))
        for beta in (beta_fast, beta_slow)
    )
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    low = low if low_below_zero else max(low, 0)
    high = min(high, head_dim - 1 if top is None else top)
    ramp = (pair - low) / (high - low)
    if ramp_over_turns:
        turns = original_length * omega / circle
        ramp = (beta_fast - turns) / (beta_fast - beta_slow)
    if not unclamped:
        ramp = ramp.clamp(0, 1)
    if reversed_ramp:
        ramp = 1 - ramp
    if periods:
        return 1 / ((1 - ramp) / omega + ramp * scale_factor / omega)
    return omega * (1 - ramp) + omega / scale_factor * ramp


def _yarn_by_loop(
    head_dim: int,
    theta: float,
    scale_factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """Right, written differently: pair by pair, the ramp in logarithms of turns."""
    first = original_length / (2 * math.pi)  # turns of pair 0
    found = []
    top = math.log(min(beta_fast, first))
    bottom = math.log(max(beta_slow, first * theta ** (-2 * (head_dim - 1) / head_dim)))
    for i in range(head_dim // 2):
        turns = first * theta ** (-2 * i / head_dim)
        ramp = min(max((top - math.log(turns)) / (top - bottom), 0.0), 1.0)
        found.append(theta ** (-2 * i / head_dim) * (1 - ramp + ramp / scale_factor))
    return torch.tensor(found, dtype=torch.float64)


def _yarn_trial(label: str, *arguments: float) -> Trial:
    return Trial(label, lambda: arguments)


check_yarn_frequencies = Exercise(
    function="yarn_frequencies",
    title="The ramp",
    dots=2,
    minutes=20,
    reference=_yarn_reference,
    trials=(
        _yarn_trial("the production model", 96, 1e5, 32, 4096, 32, 1),
        _yarn_trial("D = 64, θ = 150,000 (gpt-oss)", 64, 150_000, 32, 4096, 32, 1),
        _yarn_trial("a short training length: low would lie below pair 0", 32, 1e3, 8, 64, 32, 1),
        _yarn_trial("θ = 10: high would lie beyond D − 1", 16, 10.0, 4, 100_000, 10_000, 1),
    ),
    mistakes=(
        Mistake(
            "2π forgotten",
            "a turn is 2π radians: L₀·ω counts radians, L₀·ω/2π turns.",
            partial(_yarn, circle=1.0),
        ),
        Mistake(
            "bounds rounded",
            "low and high were rounded to whole pairs. The formula of this chapter does not.",
            partial(_yarn, rounded=True),
        ),
        Mistake(
            "ramp reversed",
            "the fast pairs are slowed and the slow ones kept. It must be the other way round.",
            partial(_yarn, reversed_ramp=True),
        ),
        Mistake(
            "ramp not clamped",
            "outside low … high the ramp leaves 0 … 1. Clamp it.",
            partial(_yarn, unclamped=True),
        ),
        Mistake(
            "periods blended",
            "you blended the periods. YaRN blends the frequencies.",
            partial(_yarn, periods=True),
        ),
        Mistake(
            "ramp over turns",
            "your ramp is straight in the number of turns. It must be straight in the number of the pair.",
            partial(_yarn, ramp_over_turns=True),
        ),
        Mistake(
            "low below 0",
            "the training length is so short here that low falls below pair 0. Hold it at 0.",
            partial(_yarn, low_below_zero=True),
        ),
        Mistake(
            "high not held",
            "θ is so small here that high rises beyond D − 1. Hold it there.",
            partial(_yarn, top=math.inf),
        ),
        Mistake(
            "high held at the last pair",
            "high was held at D/2 − 1, the last pair. The bound is D − 1.",
            lambda head_dim, *rest: _yarn(head_dim, *rest, top=head_dim // 2 - 1),
        ),
        Mistake(
            "position interpolation",
            "every pair was divided by s. That is PI; YaRN keeps the fast pairs.",
            lambda head_dim, theta, scale_factor, original_length, beta_fast, beta_slow: (
                _plain(head_dim, theta) / scale_factor
            ),
        ),
    ),
    alternatives=(_yarn, _yarn_by_loop),
    hints=(
        "Start with ω_i = θ^(−2i/D) in float64, and c(r) = D·ln(L₀/(2πr))/(2 ln θ).",
        "low = max(c(beta_fast), 0) and high = min(c(beta_slow), D − 1).",
        "ramp = ((i − low)/(high − low)).clamp(0, 1); ω·(1 − ramp) + ω/s·ramp.",
    ),
)


# 4. Phases that training never showed ---------------------------------------------------------------------------------


def _unseen_reference(trained: Tensor, trained_reach: int, read: Tensor, read_reach: int) -> int:
    """The package holds no such count: this is the chapter's formula."""
    seen = (trained * trained_reach).clamp(max=2 * math.pi)
    met = (read * read_reach).clamp(max=2 * math.pi)
    return int((met > 1.01 * seen).sum())


def _unseen_by_walking(trained: Tensor, trained_reach: int, read: Tensor, read_reach: int) -> int:
    """Right, written differently: pair by pair, in turns."""
    count = 0
    for omega, other in zip(trained.tolist(), read.tolist(), strict=True):
        turns = omega * trained_reach / (2 * math.pi)
        new_turns = min(other * read_reach / (2 * math.pi), 1.0)
        if turns < 1 and new_turns > 1.01 * turns:
            count += 1
    return count


def _unseen_trial(
    label: str, trained_scale: float, trained_reach: int, read_scale: float, read_reach: int
) -> Trial:
    def make() -> tuple[Tensor, int, Tensor, int]:
        frequencies = [
            compute_yarn_freqs(96, 1e5, scale, 4096, 131_072)
            for scale in (trained_scale, read_scale)
        ]
        return frequencies[0], trained_reach, frequencies[1], read_reach

    return Trial(label, make)


check_unseen_pairs = Exercise(
    function="unseen_pairs",
    title="Phases that training never showed",
    dots=1,
    minutes=10,
    reference=_unseen_reference,
    trials=(
        _unseen_trial("trained plain, read plain at 128K", 1, 4095, 1, 131_071),
        _unseen_trial("trained with YaRN, read with YaRN at 128K", 32, 4095, 32, 131_071),
        _unseen_trial("trained plain, read with YaRN at 128K", 1, 4095, 32, 131_071),
        _unseen_trial("trained with YaRN, read plain, both at 1K", 32, 1023, 1, 1023),
        _unseen_trial("read at the trained length", 1, 4095, 1, 4095),
    ),
    mistakes=(
        Mistake(
            "full circles counted",
            "pairs that made a full turn in training were counted. They have seen every phase there is.",
            lambda trained, trained_reach, read, read_reach: int(
                (read * read_reach > 1.01 * trained * trained_reach).sum()
            ),
        ),
        Mistake(
            "every slow pair",
            "every pair with less than one turn in training was counted, also those that stay within what they saw.",
            lambda trained, trained_reach, read, read_reach: int(
                (trained * trained_reach < 2 * math.pi).sum()
            ),
        ),
        Mistake(
            "no margin",
            "pairs that go a little further than in training were counted, by less than 1%.",
            lambda trained, trained_reach, read, read_reach: int(
                (
                    (read * read_reach).clamp(max=2 * math.pi)
                    > (trained * trained_reach).clamp(max=2 * math.pi)
                ).sum()
            ),
        ),
        Mistake(
            "one turn is 1",
            "a full turn is 2π radians.",
            lambda trained, trained_reach, read, read_reach: int(
                (
                    (read * read_reach).clamp(max=1) > 1.01 * (trained * trained_reach).clamp(max=1)
                ).sum()
            ),
        ),
        Mistake(
            "trained frequencies twice",
            "the frequencies that the text is read with were not used.",
            lambda trained, trained_reach, read, read_reach: _unseen_reference(
                trained, trained_reach, trained, read_reach
            ),
        ),
    ),
    alternatives=(_unseen_by_walking,),
    hints=(
        "A pair that turns by ω·reach radians has seen the phases from 0 to there, and all of them from 2π on.",
        "Compare two angles a pair, each cut off at 2π.",
        "((read·read_reach).clamp(max=2π) > 1.01·(trained·trained_reach).clamp(max=2π)).sum()",
    ),
)


# 5. From one layout to the other --------------------------------------------------------------------------------------


def _layout_reference(weight: Tensor, n_heads: int) -> Tensor:
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _layout_by_index(weight: Tensor, n_heads: int) -> Tensor:
    D = weight.shape[0] // n_heads
    order = [h * D + d for h in range(n_heads) for d in (*range(0, D, 2), *range(1, D, 2))]
    return weight[order]


def _layout_trial(label: str, n_heads: int, D: int, C: int, seed: int) -> Trial:
    return Trial(
        label,
        lambda: (_numbers(n_heads * D, C, seed=seed).requires_grad_(), n_heads),
    )


check_to_half_split = Exercise(
    function="to_half_split",
    title="From one layout to the other",
    dots=2,
    minutes=15,
    reference=_layout_reference,
    trials=(
        _layout_trial("2 heads of 8", 2, 8, 5, 0),
        _layout_trial("3 heads of 6", 3, 6, 4, 1),
        _layout_trial("one head of 12", 1, 12, 3, 2),
        _layout_trial("4 heads of 2: nothing moves", 4, 2, 3, 3),
    ),
    mistakes=(
        Mistake(
            "other direction",
            "this is the way back, from half-split to neighbours.",
            lambda weight, n_heads: (
                weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            ),
        ),
        Mistake(
            "heads mixed",
            "rows moved from one head to another. The order changes inside each head alone.",
            lambda weight, n_heads: torch.cat((weight[0::2], weight[1::2])),
        ),
        Mistake(
            "columns moved",
            "the columns belong to the model's width. The head's dimensions are rows: a linear layer's weight is (out, in).",
            lambda weight, n_heads: torch.cat((weight[:, 0::2], weight[:, 1::2]), 1),
        ),
    ),
    alternatives=(_layout_by_index,),
    hints=(
        "Row 2i of a head must become row i, row 2i + 1 must become row i + D/2.",
        "Give the rows three indices: head, pair, member. Which two must change places?",
        "unflatten(0, (n_heads, -1, 2)), transpose(1, 2), flatten(0, 2).",
    ),
)


# 6. Find the bug ------------------------------------------------------------------------------------------------------


def _tables(
    positions: Tensor,
    frequencies: Tensor,
    mscale: float,
    dtype: torch.dtype,
    *,
    angles: torch.dtype | None = torch.float64,
    scaled_angle: bool = False,
) -> tuple[Tensor, Tensor]:
    angles = dtype if angles is None else angles
    turned = positions.to(angles)[:, None] * frequencies.to(angles)
    if scaled_angle:
        turned, mscale = turned * mscale, 1.0
    return (turned.cos() * mscale).to(dtype), (turned.sin() * mscale).to(dtype)


def _tables_reference(
    positions: Tensor, frequencies: Tensor, mscale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _tables(positions, frequencies, mscale, dtype)


def _tables_complex(
    positions: Tensor, frequencies: Tensor, mscale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    angles = torch.outer(positions.double(), frequencies.double())
    turn = torch.polar(torch.full_like(angles, mscale), angles)
    return turn.real.to(dtype), turn.imag.to(dtype)


def _tables_trial(label: str, first: int, T: int, dtype: torch.dtype) -> Trial:
    return Trial(
        label, lambda: (torch.arange(first, first + T), _plain(96, 100_000.0), 1.34657, dtype)
    )


check_repaired_tables = Exercise(
    function="repaired_tables",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=_tables_reference,
    trials=(
        _tables_trial("the first 8 positions, float32", 0, 8, torch.float32),
        _tables_trial("positions around 131,071, float32", 131_064, 8, torch.float32),
        _tables_trial("positions around 4,095, bf16", 4_090, 6, torch.bfloat16),
        _tables_trial("positions around 131,071, bf16", 131_064, 8, torch.bfloat16),
    ),
    mistakes=(
        Mistake(
            "angles in the activations' dtype",
            "the angles are made in the dtype of the activations. Which whole numbers near 131,071 does bf16 have?",
            partial(_tables, angles=None),
        ),
        Mistake(
            "float32 angles",
            "better, but a float32 angle near 131,071 is still off by up to thousandths of a radian. These angles are few: float64 costs nothing.",
            partial(_tables, angles=torch.float32),
        ),
        Mistake(
            "mscale in the angle",
            "mscale makes the hands longer. It must not make them turn further.",
            partial(_tables, scaled_angle=True),
        ),
    ),
    alternatives=(_tables_complex,),
    hints=(
        "Print torch.tensor(131071.).bfloat16().",
        "A dtype is asked for the tables, not for what they are made from.",
        "Angles in float64, cos and sin of them, mscale, and the cast last.",
    ),
    # tables in bf16 have 8 binary digits: a last digit may differ by how a library rounds on the way
    tolerances={**TOLERANCES, torch.bfloat16: (1e-2, 1e-2)},
)
