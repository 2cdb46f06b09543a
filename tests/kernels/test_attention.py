"""The attention kernels, interpreted in fp32, against the dense oracle in float64: outputs and every gradient.

Tolerance: fp32 sums of at most 100 terms, so relative errors of a few 1e-7 of the tensor's norm; 2e-5 leaves room for
exp2 and for cancellation in dS, and is far below what any wrong index or missing term leaves.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gptoss.bench.attention import cases, check
from gptoss.kernels.attention import triton_attention
from gptoss.model.attention.reference import manual_causal_attention

# The interpreter runs fp32 on the CPU: one core, a few seconds a case.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(B, H, K, T, S, D, sink=False, key_start=None):
    """Views as the model's projections hand them over: (B, n, heads, D) transposed, k and v out of one tensor."""
    q = torch.randn(B, T, H, D, device=DEVICE).transpose(1, 2).requires_grad_()
    k, v = torch.randn(B, S, 2, K, D, device=DEVICE).permute(2, 0, 3, 1, 4).unbind(0)
    inputs = [q, k.detach().requires_grad_(), v.detach().requires_grad_()]
    if sink:
        inputs.append(torch.randn(H, device=DEVICE).requires_grad_())
    start = None if key_start is None else torch.tensor(key_start, device=DEVICE)
    return inputs, start


def both(inputs, window=None, start=None, scale=None, do=None):
    """(out, gradients) of the kernels in fp32 and of the oracle in float64."""
    results = []
    for attend, dtype in ((triton_attention, None), (manual_causal_attention, torch.float64)):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
        sink = leaves[3] if len(leaves) > 3 else None
        out = attend(*leaves[:3], window, sink, scale=scale, key_start=start)
        grad = torch.ones_like(out) if do is None else do.to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    return results


def assert_equal(inputs, *args, **kwargs):
    got, wanted = both(inputs, *args, **kwargs)
    for name, a, b in zip(("out", "dq", "dk", "dv", "db"), got, wanted, strict=False):
        assert (a.double() - b).norm() <= 2e-5 * b.norm() + 1e-5, name
        assert a.isfinite().all(), name


@pytest.mark.parametrize(
    ("T", "S", "window"),
    [(37, 37, None), (37, 37, 5), (33, 50, None), (50, 50, 33), (17, 50, 20), (1, 33, 18)],
)
def test_outputs_and_gradients_equal_the_dense_oracle(T, S, window):
    inputs, _ = problem(1, 2, 1, T, S, 32, sink=True)
    assert_equal(inputs, window, do=torch.randn(1, 2, T, 32, device=DEVICE))


@pytest.mark.parametrize("D", [8, 24, 64, 96, 20])
def test_head_dims_of_one_piece_two_pieces_and_padded_ones(D):
    inputs, _ = problem(1, 1, 1, 18, 18, D)
    assert_equal(inputs, do=torch.randn(1, 1, 18, D, device=DEVICE))


def test_unequal_head_counts_read_their_own_kv_head():
    """H = 6 over K = 2: heads 0-2 read kv head 0, heads 3-5 kv head 1; a swapped order shows."""
    inputs, _ = problem(1, 6, 2, 17, 17, 16, sink=True)
    assert_equal(inputs, 7, do=torch.randn(1, 6, 17, 16, device=DEVICE))


def test_window_of_one_returns_the_own_value():
    (q, k, v), _ = problem(1, 2, 1, 20, 20, 16)
    out = triton_attention(q, k, v, 1)
    torch.testing.assert_close(out, v.expand(1, 2, 20, 16), rtol=1e-6, atol=1e-6)


def test_window_counts_the_query_itself():
    """All scores equal, so out is the mean of the visible values; with W = 2 these are v_i and v_(i-1)."""
    v = torch.arange(20.0, device=DEVICE).reshape(1, 1, 20, 1).repeat(1, 1, 1, 16)
    zeros = torch.zeros_like(v)
    out = triton_attention(zeros, zeros, v, 2)
    assert out[0, 0, :, 0].tolist() == [0.0, *[i - 0.5 for i in range(1, 20)]]


def test_window_wider_than_the_sequence_hides_nothing():
    (q, k, v), _ = problem(1, 1, 1, 20, 20, 16)
    torch.testing.assert_close(triton_attention(q, k, v, 99), triton_attention(q, k, v))


def test_a_single_key_and_a_sink_by_hand():
    """q = k = 1, v = 2, b = 0, scale 1: out = 2·σ(1) = 1.46212, dq = dk = 2·σ'(1) = 0.39322, db = -0.39322."""
    one = torch.zeros(1, 1, 1, 16, device=DEVICE)
    one[..., 0] = 1
    q, k = (one.clone().requires_grad_() for _ in range(2))
    v = (2 * one).requires_grad_()
    b = torch.zeros(1, device=DEVICE, requires_grad=True)
    out = triton_attention(q, k, v, None, b, scale=1.0)
    out[..., 0].sum().backward()
    assert out[0, 0, 0, 0].item() == pytest.approx(1.462117, abs=1e-5)
    assert q.grad[0, 0, 0, 0].item() == pytest.approx(0.393224, abs=1e-5)
    assert k.grad[0, 0, 0, 0].item() == pytest.approx(0.393224, abs=1e-5)
    assert v.grad[0, 0, 0, 0].item() == pytest.approx(0.731059, abs=1e-5)
    assert b.grad.item() == pytest.approx(-0.393224, abs=1e-5)


@pytest.mark.parametrize(("window", "sink"), [(None, False), (9, True)])
def test_padding_on_the_left_is_invisible_whatever_it_holds(window, sink):
    """Rows of 0, 7 and 20 padded keys; NaN in them stays there, and queries on padding give zeros."""
    inputs, start = problem(3, 1, 1, 22, 22, 16, sink, key_start=[0, 7, 20])
    do = torch.randn(3, 1, 22, 16, device=DEVICE)
    with torch.no_grad():
        for tensor in inputs[1:3]:
            tensor[1, :, :7] = 0
            tensor[2, :, :20] = 0
    got, wanted = both(inputs, window, start, do=do)
    with torch.no_grad():
        for tensor in inputs[1:3]:
            tensor[1, :, :7] = torch.nan
            tensor[2, :, :20] = torch.nan
    poisoned, _ = both(inputs, window, start, do=do)
    for a, b, c in zip(got, wanted, poisoned, strict=True):
        assert (a.double() - b).norm() <= 2e-5 * b.norm() + 1e-5
        assert torch.equal(a, c)
    assert got[0][1, :, :7].abs().max() == 0
    assert got[2][2, :, :20].abs().max() == 0


@pytest.mark.parametrize("how", ["stride-0", "sliced", "head_dim strided"])
def test_incoming_gradients_and_inputs_of_any_stride(how):
    inputs, _ = problem(1, 2, 1, 18, 18, 16)
    do = torch.randn(1, 2, 18, 32, device=DEVICE)
    if how == "stride-0":
        do = torch.randn(1, device=DEVICE).expand(1, 2, 18, 16)
    elif how == "sliced":
        do = do[..., 16:]
    else:
        do = do[..., ::2]
        inputs[0] = torch.randn(1, 2, 16, 36, device=DEVICE)[..., ::2].transpose(-1, -2)
        inputs[1] = torch.randn(1, 18, 18, device=DEVICE)[..., :16].unsqueeze(1)
    got, wanted = [], []
    for results, attend, dtype in (
        (got, triton_attention, torch.float32),
        (wanted, manual_causal_attention, torch.float64),
    ):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        out = attend(*leaves)
        results += [out.detach(), *torch.autograd.grad(out, leaves, do.to(dtype))]
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b).norm() <= 2e-5 * b.norm() + 1e-5


def test_rows_beyond_a_view_are_neither_read_nor_written():
    """q, k and v are slices of NaN-filled buffers: nothing of the surroundings reaches an output."""
    views = []
    for heads in (2, 1, 1):
        buffer = torch.full((1, 40, heads + 1, 32), torch.nan, device=DEVICE)
        view = buffer[:, 3:22, :heads, :16].transpose(1, 2)
        view.copy_(torch.randn(1, heads, 19, 16))
        views.append(view)
    assert_equal(views, 6)


def test_every_output_element_is_written(monkeypatch):
    """Empty tensors come prefilled with NaN: one that stays shows."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *a, **k: empty(self, *a, **k).fill_(torch.nan),
    )
    inputs, _ = problem(1, 1, 1, 19, 35, 24, sink=True)
    assert_equal(inputs, 7)


def test_two_backward_passes_agree_bit_for_bit():
    inputs, _ = problem(1, 2, 1, 20, 20, 16, sink=True)
    first, second = (both(inputs)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_very_large_scores_do_not_overflow():
    inputs, _ = problem(1, 1, 1, 18, 18, 16)
    inputs = [100 * t.detach() for t in inputs]
    got, _ = both(inputs)
    assert all(t.isfinite().all() for t in got)
    with torch.no_grad():
        out = manual_causal_attention(*(t.double() for t in inputs))
    assert (
        got[0].double() - out
    ).norm() < 1e-3 * out.norm()  # scores near 1e5 carry fp32 errors of 1e-2


def test_compiles_without_a_graph_break():
    inputs, _ = problem(1, 2, 1, 17, 17, 16, sink=True)

    def step(q, k, v, b):
        return triton_attention(2 * q, k, v, 5, b).transpose(1, 2).flatten(2) * 3

    out = step(*inputs)
    wanted = torch.autograd.grad(out.sum(), inputs)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(compiled, out)
    torch.testing.assert_close(torch.autograd.grad(compiled.sum(), inputs), wanted)


@pytest.mark.parametrize("sink", [False, True])
def test_the_operator_keeps_its_promises_to_torch(sink):
    """Schema, fake tensors (shape, dtype, strides) and autograd registration."""
    inputs, _ = problem(1, 2, 1, 5, 9, 16, sink=sink)
    args = (*inputs[:3], inputs[3] if sink else None, None, 4, 0.25)
    torch.library.opcheck(
        torch.ops.gptoss.attention.default,
        args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    out, lse = torch.ops.gptoss.attention.default(*args)
    torch.library.opcheck(
        torch.ops.gptoss.attention_backward.default,
        tuple(
            t.detach() if isinstance(t, torch.Tensor) else t
            for t in (torch.randn_like(out), *args[:3], out, lse, *args[3:])
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_no_queries_or_no_rows():
    (q, k, v), _ = problem(2, 2, 1, 4, 6, 16)
    out = triton_attention(q[:, :, :0], k, v)
    assert out.shape == (2, 2, 0, 16)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk.abs().max() == 0


def test_bad_arguments_are_named():
    (q, k, v), _ = problem(1, 6, 4, 5, 5, 16)
    with pytest.raises(ValueError, match="multiple of K"):
        triton_attention(q, k, v)
    q = q[:, :4]
    with pytest.raises(ValueError, match="T <= S"):
        triton_attention(q, k[:, :, :3], v[:, :, :3])
    with pytest.raises(ValueError, match="window of at least 1"):
        triton_attention(q, k, v, 0)
    with pytest.raises(ValueError, match="positive scale"):
        triton_attention(q, k, v, scale=-1.0)
    with pytest.raises(ValueError, match="float64"):
        triton_attention(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="sink_bias"):
        triton_attention(q, k, v, sink_bias=torch.zeros(3, device=DEVICE))
    with pytest.raises(ValueError, match="head_dim"):
        triton_attention(q[..., :8], k, v)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="interpreter multiplies bfloat16"):
            triton_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [c for D in (96, 64, 128, 32) for c in cases(torch.bfloat16, D)], ids=str
)
def test_bf16_on_the_gpu_stays_near_float64(case):
    """bf16 rounds P, dS, out and the gradients to 2^-9 = 2e-3 of each element; cancellation in dS adds some."""
    assert check(case) < 2e-2
