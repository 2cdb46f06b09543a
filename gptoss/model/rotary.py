"""Rotary positions and YaRN: how far apart two tokens are, as an angle.

Pair i of a head (dimensions 2i and 2i+1) turns by ω_i radians a token. Plain RoPE has ω_i = θ^(−2i/D); YaRN slows the
slow pairs down by a factor s so that a context s times longer meets no phase that training has not.

Shapes: B batch, T tokens, H heads, D head_dim.
"""

import math
import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gptoss.config import ROPE_MODES


def apply_rope(
    x: Float[Tensor, "B H T D"],
    cos: Float[Tensor, "*B T D_half"],
    sin: Float[Tensor, "*B T D_half"],
) -> Float[Tensor, "B H T D"]:
    """Rotate each pair (x_2i, x_2i+1) by its angle.

    (x_2i, x_2i+1) ← (x_2i·cos − x_2i+1·sin, x_2i·sin + x_2i+1·cos)

    Args:
        x: queries or keys.
        cos, sin: tables from `YaRNRoPE`, (T, D/2) for one set of positions or (B, T, D/2) for one a row; a batch of
            one serves every row. They are cast to x's dtype last, so that q, k and v keep one dtype.

    Raises:
        ValueError: the tables do not fit x, or differ in shape.

    Source: Su et al. (2021), equation 34; chapter 8.
    """
    B, table = x.shape[0], (x.shape[-2], x.shape[-1] // 2)
    fits = cos.shape == table or cos.shape == (B, *table) or cos.shape == (1, *table)
    if not fits or sin.shape != cos.shape:
        raise ValueError(
            f"rotary tables for x {tuple(x.shape)}: expected cos and sin {table} or {(B, *table)}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}; compute them for these positions"
        )
    if cos.dim() == 3:  # (B, T, D/2) -> (B, 1, T, D/2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # each (B, H, T, D/2)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2)  # (B, H, T, D/2, 2) -> (B, H, T, D)


def compute_yarn_freqs(
    head_dim: int,
    theta: float,
    scale_factor: float,
    original_max_seq_len: int,
    target_seq_len: int,
    beta_fast: float = 32,
    beta_slow: float = 1,
    *,
    truncate: bool = False,
    device: torch.device | None = None,
) -> Float[Tensor, "D_half"]:
    """Angular frequency of each rotary pair under YaRN, in radians a token.

    The pair that makes r turns over the original length L₀ sits at c(r) = D·ln(L₀/(2πr)) / (2 ln θ). With
    low = c(β_fast), high = c(β_slow) and ramp_i = clamp((i − low)/(high − low), 0, 1):

        ω'_i = ω_i·(1 − ramp_i) + (ω_i/s)·ramp_i,     ω_i = θ^(−2i/D)

    Args:
        head_dim: D, even.
        theta: rotary base θ.
        scale_factor: s, how many times longer the context becomes; 1 is plain RoPE.
        original_max_seq_len: L₀, the training length in tokens.
        target_seq_len: the length to reach in tokens; it must exceed L₀ when s > 1.
        beta_fast, beta_slow: turns over L₀ above which a pair is kept, and below which it is slowed by s.
        truncate: round low down and high up to whole pairs. Either way they are clamped to [0, D − 1].

    Returns:
        (D/2,) in float64: at position 131,071 a float32 frequency is off by up to 2e-3 radians.

    Raises:
        ValueError: odd head_dim, a length or base that is not positive, s < 1, or s > 1 with target ≤ L₀.

    Warns:
        UserWarning: low ≥ high, so that there is no ramp; the frequencies stay plain.

    Source: Peng et al. (2024), section 3.2; chapter 8.
    """
    if head_dim <= 0 or head_dim % 2:
        raise ValueError(f"head_dim = {head_dim}: expected a positive even number of dimensions")
    if original_max_seq_len <= 0 or target_seq_len <= 0:
        raise ValueError(
            f"lengths {original_max_seq_len} and {target_seq_len}: expected positive numbers of tokens"
        )
    if theta <= 1 or beta_fast <= 0 or beta_slow <= 0:
        raise ValueError(
            f"theta = {theta}, beta_fast = {beta_fast}, beta_slow = {beta_slow}: expected theta > 1 and positive betas"
        )
    if scale_factor < 1:
        raise ValueError(f"scale_factor = {scale_factor}: expected at least 1 (1 is plain RoPE)")
    if scale_factor > 1 and target_seq_len <= original_max_seq_len:
        raise ValueError(
            f"scale_factor = {scale_factor} needs target_seq_len > original_max_seq_len, "
            f"got {target_seq_len} and {original_max_seq_len}"
        )
    pair = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    plain = theta ** (-2 * pair / head_dim)
    if scale_factor == 1:
        return plain

    def pair_with_turns(turns: float) -> float:
        return (
            head_dim
            * math.log(original_max_seq_len / (2 * math.pi * turns))
            / (2 * math.log(theta))
        )

    low, high = pair_with_turns(beta_fast), pair_with_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low >= high:
        warnings.warn(
            f"YaRN ramp from pair {low:.2f} to {high:.2f} is empty (beta_fast = {beta_fast}, "
            f"beta_slow = {beta_slow}): the frequencies stay plain",
            stacklevel=2,
        )
        return plain
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scale_factor * ramp


def compute_yarn_mscale(scale_factor: float) -> float:
    """The factor on cos and sin that keeps attention sharp over a longer context: 0.1·ln s + 1, and 1 for s ≤ 1.

    Source: Peng et al. (2024), equation 15 (there √(1/t)); chapter 8.
    """
    return 0.1 * math.log(scale_factor) + 1 if scale_factor > 1 else 1.0


class YaRNRoPE(nn.Module):
    """Tables of cos and sin for any positions, plain or YaRN by a run-time setting (chapter 8).

    `mode` is "plain" or "yarn". It is one for a whole sequence, because cached keys are already rotated.

    Raises:
        ValueError: an unknown mode, or a setting that `compute_yarn_freqs` refuses.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float = 100_000,
        scale_factor: float = 32,
        original_max_seq_len: int = 4096,
        target_seq_len: int = 131_072,
        beta_fast: float = 32,
        beta_slow: float = 1,
        *,
        use_mscale: bool = True,
        mscale_pruned: bool = False,
        truncate: bool = False,
        mode: str = "yarn",
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scale_factor = scale_factor
        self.original_max_seq_len = original_max_seq_len
        self.target_seq_len = target_seq_len
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.use_mscale = use_mscale
        self.mscale_pruned = mscale_pruned
        self.truncate = truncate
        self.mode = mode
        self.frequencies()  # raises on a bad setting here rather than in the first forward

    def frequencies(
        self, device: torch.device | None = None, mode: str | None = None
    ) -> Float[Tensor, "D_half"]:
        """Radians a token of each pair, float64, in the given mode or the current one.

        Raises:
            ValueError: an unknown mode.
        """
        mode = self.mode if mode is None else mode
        if mode not in ROPE_MODES:
            raise ValueError(f"rope mode {mode!r}: expected one of {', '.join(ROPE_MODES)}")
        return compute_yarn_freqs(
            self.head_dim,
            self.theta,
            1 if mode == "plain" else self.scale_factor,
            self.original_max_seq_len,
            self.target_seq_len,
            self.beta_fast,
            self.beta_slow,
            truncate=self.truncate,
            device=device,
        )

    def forward(
        self,
        positions: Int[Tensor, "*B T"],
        n_pruned_dims: int = 0,
        dtype: torch.dtype = torch.float32,
        mode: str | None = None,
    ) -> tuple[Float[Tensor, "*B T D_half"], Float[Tensor, "*B T D_half"]]:
        """cos and sin of position · frequency, times mscale in yarn mode.

        Args:
            positions: absolute positions in tokens, (T,) or (B, T).
            n_pruned_dims: how many of the fastest pairs stay unrotated: cos = 1, sin = 0. With `mscale_pruned` their
                cos is mscale as well, so that every dimension of q·k is sharpened alike.
            dtype: of the tables. The angles are float64 whatever the autocast state.
            mode: "plain" or "yarn" for this call; the current mode when left out.

        Raises:
            ValueError: n_pruned_dims outside [0, D/2], or an unknown mode.
        """
        if not 0 <= n_pruned_dims <= self.head_dim // 2:
            raise ValueError(
                f"n_pruned_dims = {n_pruned_dims}: expected 0 to {self.head_dim // 2} rotary pairs"
            )
        mode = self.mode if mode is None else mode
        angles = positions.double().unsqueeze(-1) * self.frequencies(positions.device, mode)
        sharpens = mode == "yarn" and self.use_mscale
        mscale = compute_yarn_mscale(self.scale_factor) if sharpens else 1.0
        pruned = torch.arange(self.head_dim // 2, device=positions.device) < n_pruned_dims
        cos = torch.where(pruned, mscale if self.mscale_pruned else 1.0, angles.cos() * mscale)
        sin = torch.where(pruned, 0.0, angles.sin() * mscale)
        return cos.to(dtype), sin.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.mode}, D={self.head_dim}, theta={self.theta:g}, scale={self.scale_factor:g}"
