import pytest
import torch

from gptoss.model.norm import RMSNorm, rms_norm


def test_value_by_hand() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)  # mean square 12.5
    y = rms_norm(x, torch.tensor([1.0, 2.0], dtype=torch.float64), eps=0.0)
    torch.testing.assert_close(y, torch.tensor([3.0, 8.0], dtype=torch.float64) / 12.5**0.5)


def test_exact_gradient_is_the_gradient_of_the_function() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))


def test_exact_gradient_matches_the_documented_formula() -> None:
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight, dy = torch.randn(8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, 1e-5), x, dy)
    r, g = (x.detach().square().mean(-1, keepdim=True) + 1e-5).rsqrt(), dy * weight
    torch.testing.assert_close(dx, r * g - r**3 * x * (g * x).mean(-1, keepdim=True))


def test_detached_gradient_misses_the_second_term() -> None:
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(5, 8, dtype=torch.float64)
    y = rms_norm(x, torch.ones(8, dtype=torch.float64), 1e-5, detach_statistic=True)
    (dx,) = torch.autograd.grad(y, x, dy)
    r = (x.detach().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(dx, r * dy)
    torch.testing.assert_close(y, rms_norm(x, torch.ones(8, dtype=torch.float64), 1e-5))


def test_statistic_is_fp32_in_a_bf16_layer() -> None:
    x = torch.full((1, 4096), 200.0, dtype=torch.bfloat16)  # 200² overflows fp16 and rounds in bf16
    assert RMSNorm(4096).to(torch.bfloat16)(x).dtype == torch.bfloat16
    torch.testing.assert_close(RMSNorm(4096)(x), torch.ones_like(x), rtol=0, atol=2**-8)


def test_zero_vector_stays_finite() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    RMSNorm(4)(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("detach", [False, True])
def test_repr_says_which_gradient(detach: bool) -> None:
    assert ("detached" in repr(RMSNorm(4, detach_statistic=detach))) is detach
