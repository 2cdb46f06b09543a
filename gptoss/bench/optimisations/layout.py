"""OPT-2, OPT-4 and OPT-23: copies of key heads, and which dtype a norm and a rotation leave behind.

The last two are about bf16, so they are measured in bf16 on a CPU too.

Shapes: B batch, T tokens, H query heads, K kv heads, G = H/K, D head_dim, C model width.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.bench.attention import make_inputs
from gptoss.model.attention import causal_attention, repeat_kv
from gptoss.model.norm import rms_norm
from gptoss.model.rotary import YaRNRoPE, apply_rope

from .masks import Sizes
from .reading import Place, Row, compare, compare_peaks, compare_times, relative_error

EPS = 1e-5
BF16 = torch.bfloat16


def repeat_by_copy(x: Tensor, groups: int) -> Tensor:
    """(B, K, T, D) -> (B, H, T, D) by `repeat_interleave` and `contiguous`."""
    return x.repeat_interleave(groups, dim=1).contiguous()


def norm_upcast(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with all of x in fp32."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight).to(x.dtype)


def norm_native(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as the documents have it: a detached fp32 statistic, the product in x's dtype."""
    statistic = (x.detach().float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * (statistic * weight.to(statistic.dtype)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved RoPE with full-width tables (T, D), in the dtype that PyTorch promotes to."""
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack((-odd, even), dim=-1).flatten(-2)  # (B, H, T, D)
    return x * cos + turned * sin


def rotate_promoting(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp32 tables as they are."""
    return rotate(x, cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1))


def rotate_casting(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tables cast to x's dtype first."""
    return rotate(x, cos.repeat_interleave(2, -1).to(x.dtype), sin.repeat_interleave(2, -1).to(x.dtype))  # fmt: skip


def repeated_heads(place: Place) -> Iterator[Row]:
    """OPT-2: `expand` and `reshape` against `repeat_interleave`; the package's kernels take grouped heads as they are."""
    shape = Sizes.at(place).shape
    q, k, v, _ = (t.detach() for t in make_inputs(shape, place.device, place.dtype))
    groups = shape.heads // shape.kv_heads

    def attend(repeat: Callable[[Tensor, int], Tensor]) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k, groups), repeat(v, groups), is_causal=True)  # fmt: skip

    made = [
        0 if out.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() else out.nbytes
        for out in (repeat_by_copy(k, groups), repeat_kv(k, groups))
    ]
    sizes = f"T = {shape.tokens}, K = {shape.kv_heads}, H = {shape.heads}"
    yield compare_times(
        place,
        place.name(f"repeat_kv alone, {sizes}"),
        lambda: repeat_by_copy(k, groups),
        lambda: repeat_kv(k, groups),
    )
    yield compare_times(
        place,
        place.name(f"causal attention forward with it, {sizes}"),
        lambda: attend(repeat_by_copy),
        lambda: attend(repeat_kv),
        ours=lambda: causal_attention(q, k, v),
    )
    yield compare(place.name(f"copied by repeat_kv, {sizes}"), "bytes", made[:1], made[1:])  # fmt: skip


def norm_dtype(place: Place) -> Iterator[Row]:
    """OPT-4: RMSNorm in x's dtype with a detached fp32 statistic, against all of x in fp32."""
    N, C = (32_768, 768) if place.cuda else (1024, 256)
    x = torch.randn(N, C, device=place.device, dtype=BF16).requires_grad_()
    weight = torch.ones(C, device=place.device).requires_grad_()
    grad = torch.randn_like(x)
    # in the model each block is compiled, and the norm with it
    ours: Callable[..., Tensor] = torch.compile(rms_norm) if place.cuda else rms_norm

    def both(norm: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(norm(x, weight), (x, weight), grad)

    def forward(norm: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return norm(x, weight)

    wide = x.detach().double().requires_grad_()
    exact = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    truth = torch.autograd.grad(exact, wide, grad.double())[0]
    errors = [relative_error(both(norm)[0], truth) for norm in (norm_upcast, norm_native, ours)]
    kept = [kept_bytes(norm, x, weight) for norm in (norm_upcast, norm_native)]
    where = f"RMSNorm, {N:,} rows of {C}, bf16"
    yield compare_times(
        place,
        where + ", forward",
        lambda: forward(norm_upcast),
        lambda: forward(norm_native),
        ours=lambda: forward(ours),
    )
    yield compare_times(
        place,
        where + ", forward and backward",
        lambda: both(norm_upcast),
        lambda: both(norm_native),
        ours=lambda: both(ours),
    )
    yield from compare_peaks(
        place,
        where + ", forward and backward",
        lambda: both(norm_upcast),
        lambda: both(norm_native),
        lambda: both(ours),
    )
    yield compare(where, "bytes kept for the backward pass", kept[:1], kept[1:])
    yield compare(where, "error of the input's gradient against float64", errors[:1], errors[1:2], ours=errors[2])  # fmt: skip


def rotary_dtype(place: Place) -> Iterator[Row]:
    """OPT-23: tables cast to the dtype of q and k, against fp32 tables that promote them."""
    shape = Sizes.at(place).shape
    q, _, v, _ = (t.detach() for t in make_inputs(shape._replace(kv_heads=shape.heads), place.device, BF16))  # fmt: skip
    cos, sin = YaRNRoPE(shape.head_dim, mode="plain")(torch.arange(shape.tokens, device=place.device))  # fmt: skip
    outs = [turn(q, cos, sin) for turn in (rotate_promoting, rotate_casting, apply_rope)]
    truth = rotate_promoting(q.double(), *YaRNRoPE(shape.head_dim, mode="plain")(torch.arange(shape.tokens, device=place.device), dtype=torch.float64))  # fmt: skip
    errors = [relative_error(out, truth) for out in outs]
    where = f"RoPE of q, T = {shape.tokens}, H = {shape.heads}, bf16"
    yield compare_times(
        place,
        where,
        lambda: rotate_promoting(q, cos, sin),
        lambda: rotate_casting(q, cos, sin),
        ours=lambda: apply_rope(q, cos, sin),
    )
    yield compare(
        where, "bytes of the result", [outs[0].nbytes], [outs[1].nbytes], ours=outs[2].nbytes
    )
    yield compare(where, "error against float64", errors[:1], errors[1:2], ours=errors[2])
    yield compare(
        "SDPA takes the result beside v in bf16",
        "1 yes, 0 no",
        [_sdpa_takes(outs[0], v)],
        [_sdpa_takes(outs[1], v)],
        ours=_sdpa_takes(outs[2], v),
        compared="on - off",
        higher_is_better=True,
    )


def kept_bytes(run: Callable[..., Tensor], *inputs: Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward pass."""
    storages: dict[int, int] = {}
    held: list[Tensor] = []  # alive until counted, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(*inputs)
    return sum(storages.values())


def _sdpa_takes(q: Tensor, v: Tensor) -> int:
    try:
        F.scaled_dot_product_attention(q, q, v, is_causal=True)
    except RuntimeError:
        return 0
    return 1
