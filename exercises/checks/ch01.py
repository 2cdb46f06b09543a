"""Checks of chapter 1: a decoder from first principles.

Shapes: B batch, T tokens, C model width, F ffn width, H query heads, K kv heads, E routed experts, V vocabulary, L layers.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.config import ModelConfig
from gptoss.model.norm import rms_norm
from gptoss.model.transformer import GPTOSS

from .exercise import Exercise, Mistake, Trial

NOTEBOOK = "01_decoder"


def _numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# 1. The loss of a text -----------------------------------------------------------------------------------------------


def _text_loss_reference(logits: Tensor, idx: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())


def _text_loss_by_log_softmax(logits: Tensor, idx: Tensor) -> Tensor:
    log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
    return -log_p[:, :-1].gather(-1, idx[:, 1:, None]).mean()


def _not_shifted(logits: Tensor, idx: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), idx.flatten())


def _shifted_back(logits: Tensor, idx: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 1:].flatten(0, 1), idx[:, :-1].flatten())


def _wrapped(logits: Tensor, idx: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), idx.roll(-1, 1).flatten())


def _summed(logits: Tensor, idx: Tensor) -> Tensor:
    return _text_loss_reference(logits, idx) * idx[:, 1:].numel()


def _divided_by_all(logits: Tensor, idx: Tensor) -> Tensor:
    return _text_loss_reference(logits, idx) * idx[:, 1:].numel() / idx.numel()


def _no_maximum(logits: Tensor, idx: Tensor) -> Tensor:
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -p[:, :-1].gather(-1, idx[:, 1:, None]).log().mean()


def _text(
    label: str,
    B: int,
    T: int,
    V: int,
    seed: int,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Trial:
    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        idx = torch.randint(V, (B, T), generator=generator)
        return (size * _numbers(B, T, V, seed=seed + 1, dtype=dtype)).requires_grad_(), idx

    return Trial(label, make)


check_text_loss = Exercise(
    function="text_loss",
    title="The loss of a text",
    dots=1,
    minutes=10,
    reference=_text_loss_reference,
    trials=(
        _text("2 texts of 5 tokens, 7 words", 2, 5, 7, 0),
        _text("1 text of 2 tokens: one prediction", 1, 2, 3, 2),
        _text("3 texts of 9 tokens, float64", 3, 9, 4, 4, dtype=torch.float64),
        _text("logits near 300, float32", 2, 4, 6, 6, size=300.0),
    ),
    mistakes=(
        Mistake(
            "not shifted",
            "each position is graded on the token that it has just read. What it must guess is the next one.",
            _not_shifted,
        ),
        Mistake(
            "shifted back",
            "each position is graded on the token before it. The logits at t belong to the token at t + 1.",
            _shifted_back,
        ),
        Mistake(
            "wrapped around",
            "the last position is graded on the first token of the text. It has no next token here; leave it out.",
            _wrapped,
        ),
        Mistake("sum", "this is the sum over the predictions; the mean is asked for.", _summed),
        Mistake(
            "divided by all tokens",
            "the sum is right and the count is not: a text of T tokens holds T - 1 predictions.",
            _divided_by_all,
        ),
        Mistake(
            "no maximum",
            "exp(300) does not fit into float32. Use a log-softmax that takes the largest logit off first.",
            _no_maximum,
        ),
    ),
    alternatives=(_text_loss_by_log_softmax,),
    hints=(
        "How many predictions can be graded in a text of T tokens? Which logits have no answer?",
        "Cut the last position off the logits and the first token off the answers.",
        "torch.nn.functional.cross_entropy wants (N, V) and (N,): flatten both.",
    ),
)


# 2. RMSNorm backward -------------------------------------------------------------------------------------------------


def _norm_reference(x: Tensor, weight: Tensor, eps: float, dy: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(rms_norm(x, weight, eps), (x, weight), dy)


def _norm_backward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dy: Tensor,
    *,
    second: float = 1.0,
    power: int = 3,
    summed: bool = False,
    bare: bool = False,
    no_eps: bool = False,
    rows: bool = True,
    raw: bool = False,
) -> tuple[Tensor, Tensor]:
    r = (x.square().mean(-1, keepdim=True) + (0.0 if no_eps else eps)).rsqrt()
    g = dy * weight
    inner = ((dy if bare else g) * x).sum(-1, keepdim=True)
    inner = inner if summed else inner / x.shape[-1]
    dx = r * g - second * r**power * x * inner
    dweight = dy * (x if raw else x * r)
    return dx, dweight.reshape(-1, x.shape[-1]).sum(0) if rows else dweight


def _norm_by_projection(x: Tensor, weight: Tensor, eps: float, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Right, in other words: project on the normalised vector."""
    C = x.shape[-1]
    r = 1 / torch.sqrt(torch.einsum("...c,...c->...", x, x) / C + eps)
    unit = r[..., None] * x
    g = weight * dy
    along = torch.einsum("...c,...c->...", g, unit) / C
    return (g - along[..., None] * unit) * r[..., None], torch.einsum(
        "nc,nc->c", dy.reshape(-1, C), unit.reshape(-1, C)
    )


def _norm_trial(
    label: str, *shape: int, seed: int, eps: float = 1e-5, size: float = 1.0, strided: bool = False
) -> Trial:
    def make() -> tuple[Tensor, Tensor, float, Tensor]:
        double = (*shape[:-1], 2 * shape[-1]) if strided else shape
        x = size * _numbers(*double, seed=seed, dtype=torch.float64)
        x = x[..., ::2] if strided else x
        weight = 1 + 0.5 * _numbers(shape[-1], seed=seed + 1, dtype=torch.float64)
        return x, weight, eps, _numbers(*shape, seed=seed + 2, dtype=torch.float64)

    return Trial(label, make)


check_rms_norm_gradients = Exercise(
    function="rms_norm_gradients",
    title="RMSNorm backward by hand",
    dots=2,
    minutes=25,
    reference=_norm_reference,
    trials=(
        _norm_trial("5 vectors of 8", 5, 8, seed=0),
        _norm_trial("a batch: 2 texts, 3 tokens, width 7", 2, 3, 7, seed=3),
        _norm_trial("every second entry of a wider tensor", 4, 6, seed=6, strided=True),
        _norm_trial("vectors so small that ε counts", 3, 4, seed=9, eps=1e-2, size=0.1),
        _norm_trial("width 1: the gradient of x nearly vanishes", 3, 1, seed=12),
    ),
    mistakes=(
        Mistake(
            "statistic detached",
            "this is the source documents' gradient: r counts as a constant. x moves r too, and that path is missing.",
            lambda x, w, e, d: _norm_backward(x, w, e, d, second=0.0),
        ),
        Mistake(
            "sign",
            "the second term has the wrong sign. A larger x makes r smaller.",
            lambda x, w, e, d: _norm_backward(x, w, e, d, second=-1.0),
        ),
        Mistake(
            "power of r",
            "the second term has the wrong power of r. Differentiate (mean(x²) + ε) to the power −1/2.",
            lambda x, w, e, d: _norm_backward(x, w, e, d, power=2),
        ),
        Mistake(
            "sum for mean",
            "the second term is C times too large: the statistic is a mean, so its derivative carries 1/C.",
            lambda x, w, e, d: _norm_backward(x, w, e, d, summed=True),
        ),
        Mistake(
            "weight missing in the mean",
            "the mean holds dy where γ·dy belongs: the gradient passes γ before it reaches the normalised vector.",
            lambda x, w, e, d: _norm_backward(x, w, e, d, bare=True),
        ),
        Mistake(
            "eps forgotten",
            "it is right for vectors of unit size alone. r holds ε.",
            lambda x, w, e, d: _norm_backward(x, w, e, d, no_eps=True),
        ),
        Mistake(
            "dγ not summed",
            "γ serves every vector, so its gradient is a sum over all of them, of shape (C,).",
            lambda x, w, e, d: _norm_backward(x, w, e, d, rows=False),
        ),
        Mistake(
            "dγ from x",
            "γ multiplies the normalised vector, not x.",
            lambda x, w, e, d: _norm_backward(x, w, e, d, raw=True),
        ),
    ),
    alternatives=(_norm_by_projection,),
    hints=(
        "Write y = γ ∘ (r x). Two paths lead from x to y: directly, and through r.",
        "∂r/∂x_j = −r³ x_j / C. The direct path gives r·g with g = γ ∘ dy.",
        "dx = r·g − r³·x·mean(g ∘ x); dγ is the sum over all vectors of dy ∘ (r x).",
    ),
)


# 3. Count another model ----------------------------------------------------------------------------------------------

SIZES = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
EXPERTS = ("n_routed_experts", "n_activated_experts", "n_shared_experts")


def _built(sizes: dict[str, int]) -> tuple[int, int]:
    """Build the model without memory and let it count itself."""
    with torch.device("meta"):
        model = GPTOSS(ModelConfig(**sizes, head_dim=sizes["d_model"] // sizes["n_heads"]))
    return model.num_parameters(), model.num_active_parameters()


def _counted(
    sizes: dict[str, int],
    *,
    untied: bool = False,
    full_kv: bool = False,
    sinks: bool = True,
    router: bool = True,
    norms: bool = True,
    matrices: int = 3,
    shared_active: bool = True,
) -> tuple[int, int]:
    V, C, L, H, K, F_ = (sizes[name] for name in SIZES)
    E, k, shared = (sizes[name] for name in EXPERTS)
    kv = C if full_kv else K * C // H
    attention = 2 * C * C + 2 * C * kv + (H if sinks else 0)
    rest = attention + (E * C if router else 0) + (2 * C if norms else 0)
    outside = V * C * (2 if untied else 1) + (C if norms else 0)
    expert = matrices * C * F_
    active = k + shared if shared_active else k
    return outside + L * (rest + (E + shared) * expert), outside + L * (rest + active * expert)


def _sizes_trial(label: str, *numbers: int) -> Trial:
    return Trial(label, lambda: (dict(zip((*SIZES, *EXPERTS), numbers, strict=True)),))


check_count_parameters = Exercise(
    function="count_parameters",
    title="Count another model",
    dots=2,
    minutes=20,
    reference=_built,
    trials=(
        _sizes_trial("the production model", 128_000, 768, 12, 8, 4, 1536, 8, 2, 1),
        _sizes_trial("6 query heads over 2 kv heads", 1000, 96, 4, 6, 2, 100, 4, 2, 1),
        _sizes_trial("no shared expert", 500, 64, 2, 4, 4, 48, 6, 3, 0),
        _sizes_trial("two shared experts, all routed ones used", 70, 8, 2, 2, 1, 5, 3, 3, 2),
    ),
    mistakes=(
        Mistake(
            "tied twice",
            "V·C parameters too many: the head and the embedding are one matrix.",
            lambda sizes: _counted(sizes, untied=True),
        ),
        Mistake(
            "as many kv heads as query heads",
            "keys and values have K heads of D numbers each, not H.",
            lambda sizes: _counted(sizes, full_kv=True),
        ),
        Mistake(
            "sinks forgotten",
            "a few are missing, H a layer: the sinks.",
            lambda sizes: _counted(sizes, sinks=False),
        ),
        Mistake(
            "router forgotten",
            "E·C are missing a layer: the router that scores the experts.",
            lambda sizes: _counted(sizes, router=False),
        ),
        Mistake(
            "norms forgotten",
            "(2L + 1)·C are missing: each norm has one factor a channel, and one norm stands after the last layer.",
            lambda sizes: _counted(sizes, norms=False),
        ),
        Mistake(
            "two matrices an expert",
            "an expert has three matrices: W1, W3 and W2.",
            lambda sizes: _counted(sizes, matrices=2),
        ),
        Mistake(
            "shared expert idle",
            "the total is right. The shared experts work on every token, so they are active.",
            lambda sizes: _counted(sizes, shared_active=False),
        ),
    ),
    alternatives=(_counted,),
    hints=(
        "Take the table of the chapter and replace each number by letters. D = C / H.",
        "Attention has q (C × C), k and v together (2·K·D × C), o (C × C) and H sinks.",
        "Active: the same sum with k + shared experts a layer instead of E + shared.",
    ),
)


# 4. What an untrained model says -------------------------------------------------------------------------------------


def _untrained(vocab_size: int, d_model: int, init_std: float) -> float:
    return math.log(vocab_size) + init_std**2 * d_model / 2


check_untrained_loss = Exercise(
    function="untrained_loss",
    title="The first number on the screen",
    dots=1,
    minutes=10,
    reference=_untrained,
    trials=(
        Trial("the production model", lambda: (128_000, 768, 0.02)),
        Trial("a small vocabulary, larger weights", lambda: (256, 64, 0.1)),
        Trial("all weights zero", lambda: (1000, 512, 0.0)),
        Trial("a wide model", lambda: (50_000, 4096, 0.02)),
    ),
    mistakes=(
        Mistake(
            "uniform",
            "this is the loss of a model that says nothing. Random logits cost something on top.",
            lambda vocab_size, d_model, init_std: math.log(vocab_size),
        ),
        Mistake(
            "whole variance",
            "half of the logits' variance, not all of it: the mean of e^z is e^(τ²/2).",
            lambda vocab_size, d_model, init_std: math.log(vocab_size) + init_std**2 * d_model,
        ),
        Mistake(
            "standard deviation",
            "half of the standard deviation was added; it is the variance that counts.",
            lambda vocab_size, d_model, init_std: (
                math.log(vocab_size) + init_std * math.sqrt(d_model) / 2
            ),
        ),
        Mistake(
            "bits",
            "this is in bits. The book counts in nats: use the natural logarithm.",
            lambda vocab_size, d_model, init_std: math.log2(vocab_size) + init_std**2 * d_model / 2,
        ),
    ),
    alternatives=(
        lambda vocab_size, d_model, init_std: torch.tensor(
            vocab_size * math.exp((init_std * math.sqrt(d_model)) ** 2 / 2), dtype=torch.float64
        ).log(),
    ),
    hints=(
        "The head sees vectors of unit root mean square. What is the variance of one logit?",
        "A logit is a sum of C products: variance σ²·C. What is the mean of e^z for a normal z?",
        "ln(V · e^(τ²/2)) with τ² = σ²·C.",
    ),
)


# 5. Find the bug: a block --------------------------------------------------------------------------------------------


def _block(x: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    return x + torch.tanh(rms_norm(x, weight) @ w.T)


def _plain_norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def _block_trial(label: str, *shape: int, seed: int, size: float = 1.0) -> Trial:
    def make() -> tuple[Tensor, Tensor, Tensor]:
        C = shape[-1]
        x = size * _numbers(*shape, seed=seed, dtype=torch.float64)
        weight = 1 + 0.3 * _numbers(C, seed=seed + 1, dtype=torch.float64)
        w = _numbers(C, C, seed=seed + 2, dtype=torch.float64)
        return x.requires_grad_(), weight.requires_grad_(), w.requires_grad_()

    return Trial(label, make)


def _normalised_stream(x: Tensor, weight: Tensor, w: Tensor) -> Tensor:
    x = weight * _plain_norm(x)
    return x + torch.tanh(x @ w.T)


check_repaired_block = Exercise(
    function="repaired_block",
    title="Find the bug",
    dots=2,
    minutes=10,
    reference=_block,
    trials=(
        _block_trial("2 texts, 3 tokens, width 8", 2, 3, 8, seed=0),
        _block_trial("a stream of size 30", 1, 4, 5, seed=3, size=30.0),
        _block_trial("one token, width 1", 1, 1, 1, seed=6),
    ),
    mistakes=(
        Mistake(
            "stream normalised",
            "the stream itself was normalised, so the block's input is lost. What should the sum start from?",
            _normalised_stream,
        ),
        Mistake(
            "post-norm",
            "now the sum is normalised: that is the post-norm block of 2017. The norm belongs on the branch, before tanh.",
            lambda x, weight, w: weight * _plain_norm(x + torch.tanh(x @ w.T)),
        ),
        Mistake(
            "no stream",
            "only the branch is left. Its output is added to the stream.",
            lambda x, weight, w: torch.tanh(weight * _plain_norm(x) @ w.T),
        ),
        Mistake(
            "no norm",
            "the branch reads the stream as it is. It should read the normalised stream.",
            lambda x, weight, w: x + torch.tanh(x @ w.T),
        ),
        Mistake(
            "weight lost",
            "the norm's weight no longer takes part.",
            lambda x, weight, w: x + torch.tanh(_plain_norm(x) @ w.T),
        ),
    ),
    alternatives=(
        lambda x, weight, w: torch.tanh(F.linear(_plain_norm(x), w * weight)).add(x),
        lambda x, weight, w: x + torch.tanh((weight * _plain_norm(x)) @ w.T),
    ),
    hints=(
        "Give the block a stream of size 30 and look at the size of what comes out.",
        "Count how often the name x changes its meaning.",
        "Keep the normalised vector under a name of its own.",
    ),
)
