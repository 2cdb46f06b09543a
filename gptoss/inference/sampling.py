"""From logits to one token: temperature, top-k, the nucleus rule and a draw (chapter 15).

B batch, V vocabulary. Every function is pure: it returns new tensors and takes its randomness from a generator.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

NUCLEUS_TOLERANCE = 1e-6


def check_sampling(temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> None:
    """Refuse settings that have no meaning.

    Raises:
        ValueError: temperature negative or not finite, top_k < 1, or top_p outside [0, 1].
    """
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature must be finite and at least 0, got {temperature}; 0 is greedy decoding"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}; leave it out to keep every token")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p must lie in [0, 1], got {top_p}; 1 keeps every token")


def top_k_filter(logits: Float[Tensor, "B V"], k: int) -> Float[Tensor, "B V"]:
    """Keep the k largest logits of each row and set the others to −inf; of equal ones the lower id stays.

    Args:
        logits: (B, V), any floating dtype.
        k: how many tokens stay; k ≥ V keeps all.

    Returns:
        (B, V) in the dtype of `logits`.

    Raises:
        ValueError: k < 1.

    Source: Fan et al. 2018, section 5.4; chapter 15.
    """
    check_sampling(top_k=k)
    if k >= logits.shape[-1]:
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)  # (B, V)
    return logits.scatter(-1, order[..., k:], -math.inf)


def top_p_filter(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """Keep the smallest set of most probable tokens whose mass reaches p, and set the others to −inf.

    Tokens are sorted by falling probability, equal ones by rising id. A token stays while the mass *before* it is less
    than p, so the token that reaches p is the last one kept and the first token always stays:

    token r is kept  ⇔  r = 0  or  p_(0) + … + p_(r−1) < p − 10⁻⁶

    The sum is taken in float64, and 10⁻⁶ is the exact boundary's share of rounding: with probabilities
    (.5, .3, .1, .1) two tokens stay at p = 0.79 and two at p = 0.8, although fp32 logits give .5 + .3 only to 1e-7.

    Args:
        logits: (B, V), any floating dtype.
        p: mass to keep, in [0, 1]; 1 keeps every token, 0 the most probable one.

    Returns:
        (B, V) in the dtype of `logits`.

    Raises:
        ValueError: p outside [0, 1].

    Source: Holtzman et al. 2020, section 3.1; chapter 15.
    """
    check_sampling(top_p=p)
    if p == 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)  # (B, V) both
    probabilities = ordered.double().softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities  # (B, V)
    dropped = mass_before >= p - NUCLEUS_TOLERANCE
    dropped[..., 0] = False
    return logits.scatter(-1, order, ordered.masked_fill(dropped, -math.inf))


def token_probabilities(
    logits: Float[Tensor, "B V"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Float[Tensor, "B V"]:
    """The distribution that `sample_next` draws from: temperature first, then top-k, then the nucleus.

    p = softmax(filter(logits / temperature)); temperature 0 puts all mass on the largest logit (the lowest id of equal
    ones), which is greedy decoding.

    Args:
        logits: (B, V), any floating dtype.
        temperature: at least 0.
        top_k: as in `top_k_filter`; None keeps all.
        top_p: as in `top_p_filter`.

    Returns:
        (B, V) float64, each row sums to 1.

    Raises:
        ValueError: a setting outside its range.

    Source: chapter 15.
    """
    check_sampling(temperature, top_k, top_p)
    scaled = logits.double()
    if temperature == 0:
        scaled, top_k = top_k_filter(scaled, 1), None
    else:
        # The largest logit becomes 0 first, so that a tiny temperature cannot overflow to inf − inf.
        scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / temperature
    if top_k is not None:
        scaled = top_k_filter(scaled, top_k)
    return top_p_filter(scaled, top_p).softmax(dim=-1)


def sample_next(
    logits: Float[Tensor, "B V"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "B"]:
    """Draw one token per row; greedy at temperature 0, which uses no randomness.

    Draws by inverting the cumulative distribution: the first token whose cumulative mass exceeds a uniform number. A
    token of probability 0 can then never come out, and V has no limit.

    Args:
        logits: (B, V), any floating dtype.
        temperature, top_k, top_p: as in `token_probabilities`.
        generator: on the device of `logits`; None takes the default one.

    Returns:
        (B,) int64 token ids.

    Raises:
        ValueError: a setting outside its range.

    Source: chapter 15.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1)
    cumulative = token_probabilities(logits, temperature, top_k, top_p).cumsum(dim=-1)  # (B, V)
    uniform = torch.rand(
        logits.shape[0], 1, dtype=torch.float64, device=logits.device, generator=generator
    )
    threshold = uniform * cumulative[:, -1:]  # (B, 1), below the total mass
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)  # (B,)


def forbid(logits: Float[Tensor, "B V"], token_ids: Int[Tensor, "n"]) -> Float[Tensor, "B V"]:
    """Set the logits of some tokens to −inf, as for stop tokens before the least length is reached.

    Args:
        logits: (B, V).
        token_ids: (n,) ids that must not come next.

    Returns:
        (B, V), a new tensor.
    """
    return logits.index_fill(-1, token_ids, -math.inf)
