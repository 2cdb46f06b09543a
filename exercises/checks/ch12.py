"""Checks of chapter 12: numbers and the optimiser.

Shapes: A micro-batches, P parameters, N tokens, C model width, F rows of a layer, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.model.head import linear_cross_entropy

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "12_numbers"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. Eight bits by hand ------------------------------------------------------------------------------------------------


def _by_spacing(x: Tensor, rounding: str = "even", bits: int = 7, fixed: bool = False) -> Tensor:
    exponent = torch.zeros_like(x, dtype=torch.int32) if fixed else torch.frexp(x).exponent - 1
    spacing = torch.ldexp(torch.ones_like(x), exponent - bits)
    steps = x / spacing
    if rounding == "even":
        return torch.round(steps) * spacing
    if rounding == "cut":
        return torch.trunc(steps) * spacing
    return torch.sign(steps) * torch.floor(steps.abs() + 0.5) * spacing


def _by_bits(x: Tensor) -> Tensor:
    """Right, written differently: fp32's bits, with half a spacing added before the lower half is cut."""
    bits = x.contiguous().view(torch.int32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & -(2**16)).view(torch.float32)


check_round_bf16 = Exercise(
    function="round_bf16",
    title="Eight bits by hand",
    dots=1,
    minutes=15,
    reference=lambda x: x.to(torch.bfloat16).float(),
    trials=(
        Trial("random numbers around 1", lambda: (_numbers(50, seed=0),)),
        Trial("numbers halfway between two", lambda: (torch.arange(129, 256, 2) / 128 + 2**-8,)),
        Trial(
            "sizes from 1e-3 to 1e4, shape (5, 7)",
            lambda: (_numbers(5, 7, seed=1) * 10.0 ** torch.linspace(-3, 4, 7),),
        ),
        Trial("negative halves, 0 and powers of two", lambda: (
            torch.tensor([0.0, -1.0, 2.0, -0.25, -(1 + 2**-8), -(1 + 3 * 2**-8), 257.0, 259.0]),
        )),
    ),
    mistakes=(
        Mistake(
            "cut off",
            "every result is the neighbour towards zero. Cutting bits off is not rounding to the nearest.",
            lambda x: _by_spacing(x, "cut"),
        ),
        Mistake(
            "halves away from zero",
            "right, except halfway between two numbers: there the one whose last bit is even is meant.",
            lambda x: _by_spacing(x, "away"),
        ),
        Mistake(
            "one bit too many",
            "there are nine significant bits. Eight, with the leading 1 among them: seven are stored.",
            lambda x: _by_spacing(x, bits=8),
        ),
        Mistake(
            "eight bits behind the point",
            "the spacing is the same everywhere. It must follow the number's size: 2^(e − 7) for 2^e ≤ |x| < 2^(e + 1).",
            lambda x: _by_spacing(x, fixed=True),
        ),
    ),
    alternatives=(_by_bits,),
    hints=(
        "Between 2^e and 2^(e+1) the numbers are 2^(e−7) apart. How many spacings is x?",
        "torch.frexp(x).exponent − 1 is e; torch.ldexp(1, n) is 2^n.",
        "torch.round rounds halves to the even integer, which is what is asked for.",
    ),
)  # fmt: skip


# 2. One step of AdamW -------------------------------------------------------------------------------------------------


def _adamw_by_torch(
    theta: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int,
    lr: float, b1: float, b2: float, eps: float, decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    p = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.AdamW([p], lr, (b1, b2), eps, decay, foreach=False)
    optimizer.state[p] = {
        "step": torch.tensor(float(t - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()
    }  # fmt: skip
    p.grad = g.clone()
    optimizer.step()
    state = optimizer.state[p]
    return p.detach(), state["exp_avg"], state["exp_avg_sq"]


def _adamw(
    theta: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int,
    lr: float, b1: float, b2: float, eps: float, decay: float,
    *, coupled: bool = False, corrected: str = "mv", inside: bool = False, late: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if coupled:
        g = g + decay * theta
        decay = 0.0
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    n = t - 1 if late and t > 1 else t
    m_hat = m / (1 - b1**n) if "m" in corrected else m
    v_hat = v / (1 - b2**n) if "v" in corrected else v
    root = (v_hat + eps).sqrt() if inside else v_hat.sqrt() + eps
    return theta - lr * decay * theta - lr * m_hat / root, m, v


def _adamw_trial(
    label: str, t: int, size: float, decay: float, seed: int,
    eps: float = 1e-6, lr: float = 0.01, b1: float = 0.9, b2: float = 0.95,
) -> Trial:  # fmt: skip
    def make() -> tuple:
        theta, g, m = (
            _numbers(3, 4, seed=seed + n, dtype=torch.float64) * f
            for n, f in ((0, 1.0), (1, size), (2, size if t > 1 else 0.0))
        )
        v = (_numbers(3, 4, seed=seed + 3, dtype=torch.float64) * (size if t > 1 else 0.0)) ** 2
        return theta, g, m, v, t, lr, b1, b2, eps, decay

    return Trial(label, make)


check_adamw_step = Exercise(
    function="adamw_step",
    title="One step of AdamW",
    dots=2,
    minutes=15,
    reference=_adamw_by_torch,
    trials=(
        _adamw_trial("step 7, no decay", 7, 1.0, 0.0, 0),
        _adamw_trial("step 1, both means at 0", 1, 1.0, 0.1, 10),
        _adamw_trial(
            "step 3 with decay, β₁ = 0.8, β₂ = 0.99", 3, 1.0, 0.5, 20, lr=0.3, b1=0.8, b2=0.99
        ),
        _adamw_trial("gradients of 1e-4, ε = 1e-3", 5, 1e-4, 0.1, 30, eps=1e-3),
        _adamw_trial("step 4000", 4000, 0.1, 0.1, 40),
    ),
    mistakes=(
        Mistake(
            "decay in the gradient",
            "the decay joined the gradient and was divided by √v with it. It must act on the weight directly.",
            lambda *a: _adamw(*a, coupled=True),
        ),
        Mistake(
            "no bias correction",
            "early steps have the wrong size: both means start at 0. Divide by 1 − β^t.",
            lambda *a: _adamw(*a, corrected=""),
        ),
        Mistake(
            "only m corrected",
            "m is corrected for its start at 0, v is not.",
            lambda *a: _adamw(*a, corrected="m"),
        ),
        Mistake(
            "ε inside the root",
            "ε stands under the root. It is added to the root: √v̂ + ε.",
            lambda *a: _adamw(*a, inside=True),
        ),
        Mistake(
            "step counted from 0",
            "the correction uses t − 1. The first step has t = 1.",
            lambda *a: _adamw(*a, late=True),
        ),
    ),
    alternatives=(_adamw,),
    hints=(
        "Both running means first: m = β₁ m + (1 − β₁) g, and v the same with g².",
        "The returned m and v are the uncorrected ones; the corrected ones live for this step only.",
        "(1 − lr · decay) · theta − lr · m̂ / (√v̂ + eps).",
    ),
)


# 3. Accumulate, then clip ---------------------------------------------------------------------------------------------


def _together(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat((weight.flatten(), bias.flatten())).norm()


def _clipped_reference(
    weight_parts: Tensor, bias_parts: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    weight, bias = weight_parts.mean(0), bias_parts.mean(0)
    factor = (_together(weight, bias) / clip).clamp(min=1.0)
    return weight / factor, bias / factor


def _clipped_by_torch(
    weight_parts: Tensor, bias_parts: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    parameters = []
    for parts in (weight_parts, bias_parts):
        p = torch.nn.Parameter(torch.zeros_like(parts[0]))
        p.grad = sum(part / len(parts) for part in parts)
        parameters.append(p)
    torch.nn.utils.clip_grad_norm_(parameters, clip)
    return parameters[0].grad, parameters[1].grad


def _clipped_each_tensor(
    weight_parts: Tensor, bias_parts: Tensor, clip: float
) -> tuple[Tensor, ...]:
    means = (weight_parts.mean(0), bias_parts.mean(0))
    return tuple(g / (g.norm() / clip).clamp(min=1.0) for g in means)


def _clipped_each_part(
    weight_parts: Tensor, bias_parts: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    pairs = [
        _clipped_reference(w[None], b[None], clip)
        for w, b in zip(weight_parts, bias_parts, strict=True)
    ]
    return torch.stack([w for w, _ in pairs]).mean(0), torch.stack([b for _, b in pairs]).mean(0)


def _clipped_sum(weight_parts: Tensor, bias_parts: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    count = len(weight_parts)
    return _clipped_reference(count * weight_parts, count * bias_parts, clip)


def _always_scaled(weight_parts: Tensor, bias_parts: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    weight, bias = weight_parts.mean(0), bias_parts.mean(0)
    factor = clip / _together(weight, bias)
    return weight * factor, bias * factor


def _clip_by_value(weight_parts: Tensor, bias_parts: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    return weight_parts.mean(0).clamp(-clip, clip), bias_parts.mean(0).clamp(-clip, clip)


def _clip_trial(label: str, A: int, size: float, clip: float, seed: int) -> Trial:
    def make() -> tuple[Tensor, Tensor, float]:
        weight = size * _numbers(A, 3, 4, seed=seed)
        bias = 3 * size * _numbers(A, 3, seed=seed + 1)
        if A > 2:
            weight[1] *= 20
        return weight, bias, clip

    return Trial(label, make)


check_clipped_step = Exercise(
    function="clipped_step",
    title="Accumulate, then clip",
    dots=2,
    minutes=10,
    reference=_clipped_reference,
    trials=(
        _clip_trial("4 micro-batches, one of them large", 4, 1.0, 1.0, 0),
        _clip_trial("a short gradient, which stays as it is", 4, 1e-3, 1.0, 10),
        _clip_trial("one micro-batch", 1, 2.0, 0.5, 20),
        _clip_trial("3 micro-batches, clip at 2.5", 3, 0.5, 2.5, 30),
        _clip_trial("2 micro-batches, near the limit", 2, 0.3, 1.0, 40),
    ),
    mistakes=(
        Mistake(
            "each tensor on its own",
            "weight and bias were clipped apart. One norm over both, one factor for both: the direction must stay.",
            _clipped_each_tensor,
        ),
        Mistake(
            "each micro-batch",
            "each micro-batch was clipped, then the mean was taken. The mean is the step's gradient: clip that.",
            _clipped_each_part,
        ),
        Mistake(
            "sum for mean",
            "the micro-batches were added. The step's gradient is their mean.",
            _clipped_sum,
        ),
        Mistake(
            "short ones stretched",
            "a gradient shorter than `clip` came out longer. It must stay as it is.",
            _always_scaled,
        ),
        Mistake(
            "clipped entry by entry",
            "each entry was bounded on its own. That turns the gradient; divide all of it by one number.",
            _clip_by_value,
        ),
    ),
    alternatives=(_clipped_by_torch,),
    hints=(
        "First the mean over dimension 0, for both.",
        "The norm of both together is the root of the sum of all squares.",
        "Divide both by max(1, norm / clip).",
    ),
)


# 4. The head in chunks ------------------------------------------------------------------------------------------------


def _head_reference(h: Tensor, W: Tensor, y: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (h, W)]
    loss = linear_cross_entropy(*leaves, y, chunk_size=chunk)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def _head_whole(h: Tensor, W: Tensor, y: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (h, W)]
    loss = F.cross_entropy(leaves[0] @ leaves[1].T, y)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def _head(
    h: Tensor, W: Tensor, y: Tensor, chunk: int,
    *, onehot: bool = True, mean: str = "counted", ignore: bool = True, last_only: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    counted = (y != -100).sum() if mean != "all" else torch.tensor(len(y))
    pieces = -(-len(y) // chunk)
    loss, dh, dW = torch.zeros((), dtype=h.dtype), torch.zeros_like(h), torch.zeros_like(W)
    for start in range(0, len(y), chunk):
        rows = slice(start, start + chunk)
        use = (y[rows] != -100).to(h.dtype)
        n = counted if mean != "chunks" else use.sum().clamp(min=1) * pieces
        label = y[rows].clamp(min=0)
        log_p = torch.log_softmax(h[rows] @ W.T, -1)
        loss = loss - (log_p[torch.arange(len(label)), label] * use).sum() / n
        dz = log_p.exp() - (F.one_hot(label, len(W)) if onehot else 0)
        dz = dz * (use[:, None] if ignore else 1.0) / n
        dh[rows] = dz @ W
        dW = dz.T @ h[rows] + (0 if last_only else dW)
    return loss, dh, dW


def _head_trial(
    label: str, N: int, C: int, V: int, chunk: int, seed: int, ignored: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Trial:  # fmt: skip
    def make() -> tuple[Tensor, Tensor, Tensor, int]:
        h, W = _numbers(N, C, seed=seed, dtype=dtype), _numbers(V, C, seed=seed + 1, dtype=dtype)
        y = torch.randint(V, (N,), generator=torch.Generator().manual_seed(seed + 2))
        if ignored:
            y[: N // 2 : 2] = -100
            y[-1] = -100
        return h, W, y, chunk

    return Trial(label, make)


check_head_gradients = Exercise(
    function="head_gradients",
    title="The head in chunks",
    dots=3,
    minutes=25,
    reference=_head_reference,
    trials=(
        _head_trial("8 tokens in chunks of 4", 8, 5, 11, 4, 0),
        _head_trial("10 tokens in chunks of 4: the last has 2", 10, 5, 11, 4, 10),
        _head_trial("13 tokens, some with target −100", 13, 3, 7, 5, 20, ignored=True),
        _head_trial("one token, a chunk larger than it", 1, 4, 6, 8, 30),
        _head_trial("float32", 9, 6, 20, 2, 40, ignored=True, dtype=torch.float32),
    ),
    mistakes=(
        Mistake(
            "one-hot forgotten",
            "the gradients push every logit down, the right one too. dz is the softmax less 1 at the target.",
            lambda *a: _head(*a, onehot=False),
        ),
        Mistake(
            "divided by all",
            "the sum was divided by N. Only targets that are not −100 count.",
            lambda *a: _head(*a, mean="all"),
        ),
        Mistake(
            "mean of chunk means",
            "each chunk's mean was averaged, so a short last chunk weighs too much. Sum all, divide once.",
            lambda *a: _head(*a, mean="chunks"),
        ),
        Mistake(
            "ignored rows pull",
            "rows with target −100 send gradients. Their dz must be 0.",
            lambda *a: _head(*a, ignore=False),
        ),
        Mistake(
            "dW overwritten",
            "dW is the last chunk's alone. It is a sum over all chunks.",
            lambda *a: _head(*a, last_only=True),
        ),
    ),
    alternatives=(_head, _head_whole),
    hints=(
        "Count the targets that are not −100 before the loop: every chunk divides by that number.",
        "A row's dz is its softmax, less 1 at the target, divided by the count; 0 where the target is −100.",
        "dh[rows] = dz @ W; dW += dz.T @ h[rows].",
    ),
)


# 5. Find the bug ------------------------------------------------------------------------------------------------------


def _unscale_reference(scaled: Tensor, scale: float, clip: float) -> Tensor:
    g = scaled.float() / scale
    return g / (g.norm() / clip).clamp(min=1.0)


def _clip_before(scaled: Tensor, scale: float, clip: float) -> Tensor:
    g = scaled.float()
    return g / (g.norm() / clip).clamp(min=1.0) / scale


def _scaled_limit(scaled: Tensor, scale: float, clip: float) -> Tensor:
    """Right, written differently: the limit is scaled instead of the gradient."""
    g = scaled.float()
    return g / (g.norm() / (clip * scale)).clamp(min=1.0) / scale


def _half_norm(scaled: Tensor, scale: float, clip: float) -> Tensor:
    norm = scaled.square().sum().sqrt().float() / scale
    return scaled.float() / scale / (norm / clip).clamp(min=1.0)


def _unscale_trial(label: str, size: float, scale: float, clip: float, seed: int) -> Trial:
    def make() -> tuple[Tensor, float, float]:
        return (size * scale * _numbers(40, seed=seed)).half(), scale, clip

    return Trial(label, make)


check_repaired_unscale = Exercise(
    function="repaired_unscale",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=_unscale_reference,
    trials=(
        _unscale_trial("a gradient of norm 6, scale 1024", 1.0, 1024.0, 1.0, 0),
        _unscale_trial("a short gradient, scale 4096", 0.01, 4096.0, 1.0, 10),
        _unscale_trial("scale 1", 0.5, 1.0, 1.0, 20),
        _unscale_trial("clip at 0.1", 0.3, 256.0, 0.1, 30),
    ),
    mistakes=(
        Mistake(
            "clipped before unscaling",
            "with scale 1 it is right. The norm that is held against `clip` is the scaled gradient's.",
            _clip_before,
        ),
        Mistake(
            "never clipped",
            "the gradient is unscaled but no longer clipped.",
            lambda scaled, scale, clip: scaled.float() / scale,
        ),
        Mistake(
            "scale left in",
            "now it is clipped, but the scale is still in it.",
            lambda scaled, scale, clip: (
                scaled.float() / (scaled.float().norm() / clip).clamp(min=1.0)
            ),
        ),
        Mistake(
            "squares in fp16",
            "squares of large numbers leave fp16. Go to float32 before the norm.",
            _half_norm,
        ),
    ),
    alternatives=(_scaled_limit,),
    hints=(
        "Which gradient should have norm `clip` at most: the one times `scale`, or the true one?",
        "Divide by the scale first.",
    ),
)
