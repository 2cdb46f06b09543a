"""The decoding kernels, interpreted in fp32, against plain PyTorch in float64.

Tolerance: fp32 sums of at most some hundred terms: 1e-5 of the tensor's norm, far below what a wrong index leaves.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from gptoss.kernels.decode import (
    decode_attention,
    decode_experts,
    decode_linear,
    decode_moe,
    decode_qkv,
    decode_route,
)
from gptoss.kernels.decode_attention import launch_decode_attention
from gptoss.model.attention.reference import manual_causal_attention
from gptoss.model.moe.router import MoERouter
from gptoss.model.norm import rms_norm
from gptoss.model.rotary import apply_rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def assert_equal(got, wanted):
    wanted = wanted.double()
    assert got.isfinite().all()
    assert (got.double() - wanted).norm() <= 1e-5 * wanted.norm() + 1e-6


def caches(N, K, M, D):
    """Stored as (N, M, 2, K, D), as one buffer may hold both; rows that nothing wrote are NaN."""
    return torch.full((N, M, 2, K, D), torch.nan, device=DEVICE).permute(2, 0, 3, 1, 4).unbind(0)


@pytest.mark.parametrize(
    ("n", "T", "D"), [(1, 1, 16), (16, 1, 32), (49, 1, 96), (70, 1, 24), (33, 3, 16), (5, 4, 16)]
)
@pytest.mark.parametrize("sink", [True, False])
def test_decode_attention_equals_the_dense_oracle(n, T, D, sink):
    """70 rows of capacity, n of them written, read in three runs: empty, partial and whole runs occur."""
    k, v = caches(1, 2, 70, D)
    k[:, :, :n], v[:, :, :n] = randn(1, 2, n, D), randn(1, 2, n, D)
    q, b = randn(1, 6, T, D), randn(6) if sink else None
    if n < T:
        return
    got = decode_attention(q, k, v, torch.tensor([n], dtype=torch.int32, device=DEVICE), b)
    wanted = manual_causal_attention(
        q.double(),
        k[:, :, :n].double(),
        v[:, :, :n].double(),
        None,
        None if b is None else b.double(),
    )
    assert_equal(got, wanted)


def test_each_sequence_has_its_own_length_and_padding():
    """Padding that does not end on a block: no key is lost at either end."""
    k, v = caches(3, 1, 64, 16)
    lengths, starts = [33, 64, 20], [15, 0, 19]
    q = randn(3, 2, 1, 16)
    for i, (n, s) in enumerate(zip(lengths, starts, strict=True)):
        k[i, :, s:n], v[i, :, s:n] = randn(1, n - s, 16), randn(1, n - s, 16)
    n_keys, first = torch.tensor(lengths, device=DEVICE), torch.tensor(starts, device=DEVICE)
    got = decode_attention(q, k, v, n_keys, key_start=first)
    unsplit = launch_decode_attention(q, k, v, n_keys, None, first, 0.25, 1)
    assert_equal(unsplit, got)
    for i, (n, s) in enumerate(zip(lengths, starts, strict=True)):
        wanted = manual_causal_attention(
            q[i : i + 1].double(), k[i : i + 1, :, s:n].double(), v[i : i + 1, :, s:n].double()
        )
        assert_equal(got[i : i + 1], wanted)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_the_number_of_splits_changes_nothing(splits):
    q, k, v, b = randn(1, 4, 1, 16), randn(1, 2, 40, 16), randn(1, 2, 40, 16), randn(4)
    n, zero = (torch.tensor([x], device=DEVICE) for x in (37, 0))
    got = launch_decode_attention(q, k, v, n, b, zero, 0.25, splits)
    wanted = manual_causal_attention(
        q.double(), k[:, :, :37].double(), v[:, :, :37].double(), None, b.double(), scale=0.25
    )
    assert_equal(got, wanted)


@pytest.mark.parametrize("splits", [1, 3])
def test_an_empty_cache_gives_zeros(splits):
    k, v = caches(1, 1, 32, 16)
    zero = torch.tensor([0], device=DEVICE)
    for b in (None, torch.zeros(2, device=DEVICE)):
        out = launch_decode_attention(randn(1, 2, 1, 16), k, v, zero, b, zero, 0.25, splits)
        assert out.abs().max() == 0


def test_a_ring_may_hold_its_keys_in_any_order():
    q, k, v = randn(1, 2, 1, 16), randn(1, 1, 32, 16), randn(1, 1, 32, 16)
    n = torch.tensor([32], device=DEVICE)
    rolled = decode_attention(q, k.roll(5, 2), v.roll(5, 2), n)
    assert_equal(rolled, decode_attention(q, k, v, n))


@pytest.mark.parametrize("N", [1, 3])
def test_qkv_equals_norm_projection_and_rotary_and_writes_its_rows_only(N):
    C, H, K, D = 48, 3, 1, 16
    x, gamma = randn(N, C), randn(C)
    wq, wkv = randn(H * D, C), randn(2 * K * D, C)
    cos, sin = randn(N, D // 2), randn(N, D // 2)
    slots = torch.tensor([5, 0, 7][:N], device=DEVICE)
    k_cache, v_cache = caches(N, K, 8, D)
    q = decode_qkv(x, gamma, wq, wkv, cos, sin, slots, k_cache, v_cache)
    normed = rms_norm(x.double(), gamma.double())
    turn = lambda y: apply_rope(y.unsqueeze(2), cos[:, None].double(), sin[:, None].double())  # noqa: E731 (one line, used thrice)
    assert_equal(q, turn((normed @ wq.T.double()).view(N, H, D)))
    keys, values = (normed @ wkv.T.double()).view(N, 2, K, D).unbind(1)
    for n, slot in enumerate(slots.tolist()):
        assert_equal(k_cache[n, :, slot], turn(keys)[n, :, 0])
        assert_equal(v_cache[n, :, slot], values[n])
        k_cache[n, :, slot] = v_cache[n, :, slot] = torch.nan
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


@pytest.mark.parametrize(("N", "C", "O"), [(1, 48, 10), (5, 300, 7), (8, 16, 33)])
@pytest.mark.parametrize("extras", [False, True])
def test_linear_equals_matmul(N, C, O, extras):  # noqa: E741 (outputs)
    x, w = randn(N, C), randn(O, C)
    gamma, residual = (randn(C), randn(N, O)) if extras else (None, None)
    normed = x.double() if gamma is None else rms_norm(x.double(), gamma.double())
    wanted = normed @ w.T.double()
    got = decode_linear(x, w, gamma, residual)
    assert_equal(got, wanted if residual is None else wanted + residual.double())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_route_equals_the_router(k):
    x, gamma, router = randn(4, 40), randn(40), MoERouter(40, 6, k).to(DEVICE)
    y, indices, weights = decode_route(x, gamma, router.weight, k)
    normed = rms_norm(x, gamma)
    wanted_indices, wanted_weights, _ = router(normed)
    assert_equal(y, normed)
    assert torch.equal(indices.long(), wanted_indices)
    assert_equal(weights, wanted_weights.detach())


def test_route_by_hand_and_ties_to_the_lower_index():
    """Logits [2, 1, 0, -1]: 0.7311 and 0.2689. Equal logits: experts 0 and 1."""
    x = torch.ones(1, 4, device=DEVICE)  # its norm is itself, up to eps
    router = torch.diag(torch.tensor([2.0, 1.0, 0.0, -1.0], device=DEVICE))
    _, indices, weights = decode_route(x, torch.ones(4, device=DEVICE), router, 2, eps=0.0)
    assert indices.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([0.7311, 0.2689], abs=1e-4)
    _, indices, _ = decode_route(x, torch.ones(4, device=DEVICE), torch.zeros_like(router), 2)
    assert indices.tolist() == [[0, 1]]


CHOICES = {
    "one token": [[4, 1]],
    "a shared expert": [[0, 3], [3, 2], [0, 3]],
    "more slots than experts": [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]],
    "all on one": [[2], [2], [2]],
}


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("extras", [False, True])
def test_experts_equal_the_loop(case, extras):
    indices = torch.tensor(CHOICES[case], dtype=torch.int32, device=DEVICE)
    N, E, C, width = indices.shape[0], 5, 20, 24
    x, weights = randn(N, C), torch.rand(indices.shape, device=DEVICE)
    w1, w3, w2 = randn(E, width, C), randn(E, width, C), randn(E, C, width)
    shared = (randn(width, C), randn(width, C), randn(C, width)) if extras else None
    residual = randn(N, C) if extras else None
    for unread in set(range(E)) - set(indices.flatten().tolist()):
        w1[unread] = w3[unread] = w2[unread] = torch.nan  # an expert that nobody chose is not read

    def expert(row, a, b, c):
        return c.double() @ (F.silu(a.double() @ row) * (b.double() @ row))

    wanted = torch.zeros(N, C, dtype=torch.float64, device=DEVICE)
    for n in range(N):
        for e, w in zip(indices[n].tolist(), weights[n], strict=True):
            wanted[n] += w * expert(x[n].double(), w1[e], w3[e], w2[e])
        if shared is not None and residual is not None:
            wanted[n] += residual[n] + expert(x[n].double(), *shared)
    assert_equal(decode_experts(x, indices, weights, w1, w3, w2, shared, residual), wanted)


def test_a_lane_without_expert_adds_nothing(monkeypatch):
    """Two tokens on one expert leave the second lane idle: what its hidden rows hold (here NaN) reaches no output."""
    empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        tensor = empty(self, *args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    x, w1, w3, w2 = randn(2, 16), randn(3, 8, 16), randn(3, 8, 16), randn(3, 16, 8)
    indices = torch.tensor([[2], [2]], dtype=torch.int32, device=DEVICE)
    out = decode_experts(x, indices, torch.ones(2, 1, device=DEVICE), w1, w3, w2)
    assert_equal(out, (F.silu(x @ w1[2].T) * (x @ w3[2].T)) @ w2[2].T)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("with_shared", [False, True])
def test_moe_of_one_token_equals_route_and_experts(k, with_shared):
    """C = 300 takes two blocks of columns, F = 10 does not divide by the rows of a program."""
    E, C, F_ = 5, 300, 10
    x, gamma, router = randn(1, C), randn(C), randn(E, C)
    w1, w3, w2 = randn(E, F_, C) / C**0.5, randn(E, F_, C) / C**0.5, randn(E, C, F_)
    shared = (w1[0] + 0.1, w3[1] - 0.1, w2[2].clone()) if with_shared else None
    got = decode_moe(x, gamma, router, w1, w3, w2, k, shared)
    y, indices, weights = decode_route(x, gamma, router, k)
    assert_equal(got, decode_experts(y, indices, weights, w1, w3, w2, shared, x))
    y = rms_norm(x.double(), gamma.double())
    top, chosen = (y @ router.double().T).softmax(-1)[0].topk(k)
    wanted = x.double()
    for share, e in [
        *zip(top / top.sum(), chosen.tolist(), strict=True),
        *[(1, None)] * with_shared,
    ]:
        a, b, c = (w.double() for w in (shared if e is None else (w1[e], w3[e], w2[e])))
        wanted = wanted + share * (F.silu(y @ a.T) * (y @ b.T)) @ c.T
    assert_equal(got, wanted)


def test_the_operators_keep_their_promises_to_torch():
    utils = ("test_schema", "test_faketensor")
    k, v = randn(2, 1, 8, 16), randn(2, 1, 8, 16)
    slots = torch.tensor([1, 2], device=DEVICE)
    x, gamma = randn(2, 16), randn(16)
    stacks = (randn(3, 8, 16), randn(3, 8, 16), randn(3, 16, 8))
    ops = torch.ops.gptoss
    for op, args in (
        (ops.decode_attention, (randn(2, 2, 1, 16), k, v, slots, None, None, 0.25)),
        (
            ops.decode_qkv,
            (x, gamma, randn(32, 16), randn(32, 16), randn(2, 8), randn(2, 8), slots, k, v, 1e-5),
        ),
        (ops.decode_linear, (x, randn(6, 16), gamma, None, 1e-5)),
        (ops.decode_route, (x, gamma, randn(3, 16), 2, 1e-5, 1e-6)),
        (
            ops.decode_experts,
            (x, torch.tensor([[0], [2]], device=DEVICE), randn(2, 1), *stacks, [], None),
        ),
        (
            ops.decode_moe,
            (x[:1], gamma, randn(3, 16), *stacks, [], 2, 1e-5, 1e-6),
        ),
    ):
        torch.library.opcheck(op.default, args, test_utils=utils)


def test_bad_arguments_are_named():
    q, k = randn(1, 4, 1, 16), randn(1, 2, 8, 16)
    n = torch.tensor([3], device=DEVICE)
    with pytest.raises(ValueError, match="expected caches"):
        decode_attention(q[:, :3], k, k, n)
    with pytest.raises(ValueError, match="lengths"):
        decode_attention(q, k, k, n[:0])
    with pytest.raises(ValueError, match="one dtype"):
        decode_attention(q, k.half(), k.half(), n)
    with pytest.raises(ValueError, match="use causal_attention"):
        decode_attention(randn(1, 4, 40, 16), k, k, n)
    with pytest.raises(ValueError, match="1 to 8 rows"):
        decode_linear(randn(9, 16), randn(4, 16))
    with pytest.raises(ValueError, match="over 16 inputs"):
        decode_linear(randn(1, 16), randn(4, 8))
    with pytest.raises(ValueError, match="from 1 to 3 experts"):
        decode_route(randn(1, 16), randn(16), randn(3, 16), 4)
    stacks = (randn(3, 8, 16), randn(3, 8, 16), randn(3, 16, 8))
    with pytest.raises(ValueError, match="one row"):
        decode_moe(randn(2, 16), randn(16), randn(3, 16), *stacks, 2)
    with pytest.raises(ValueError, match="from 1 to 3 experts"):
        decode_moe(randn(1, 16), randn(16), randn(3, 16), *stacks, 4)
    with pytest.raises(ValueError, match="shared weights"):
        decode_moe(randn(1, 16), randn(16), randn(3, 16), *stacks, 2, stacks)


@pytest.mark.gpu
def test_bf16_on_the_gpu_stays_near_float64():
    """bf16 rounds P, hidden rows and outputs to 2^-9 = 2e-3 of each element."""
    from gptoss.bench.decode_kernels import check

    assert max(check().values()) < 1e-2
