"""Oracle first: a softmax written out with Python loops; then the dense oracle; then every backend against that."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from gptoss.config import ModelConfig
from gptoss.model.attention import (
    SINK_CLAMP_MAX,
    SINK_CLAMP_MIN,
    GPTOSSAttention,
    causal_attention,
    count_visible_pairs,
    manual_causal_attention,
    repeat_kv,
    resolve_backend,
    visible_keys,
)
from gptoss.model.attention.blocked import _blocks, blocked_attention
from gptoss.model.attention.flex import band_block_mask
from gptoss.model.cache import MixedKVCache
from gptoss.model.rotary import YaRNRoPE


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, sink: Tensor | None, start: list[int]
) -> Tensor:
    """Softmax over the visible keys and the sink, one query at a time."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    out = torch.zeros(B, H, T, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            kv = h // (H // K)
            for i in range(T):
                at = S - T + i
                seen = [j for j in range(at + 1) if at - j < (window or S) and j >= start[b]]
                exps = [math.exp((q[b, h, i] @ k[b, kv, j]).item() / math.sqrt(D)) for j in seen]
                total = sum(exps) + (math.exp(sink[h].item()) if sink is not None else 0.0)
                for e, j in zip(exps, seen, strict=True):
                    out[b, h, i] += e / total * v[b, kv, j]
    return out


def inputs(B: int, H: int, K: int, T: int, S: int, D: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, T, D), (B, K, S, D), (B, K, S, D), (H,)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def test_window_counts_the_query_itself() -> None:
    index = torch.arange(5)
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 1, 1, 0, 0],
            [0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1],
        ]
    ).bool()
    assert torch.equal(visible_keys(index, index, window=2), expected)


def test_queries_are_the_last_of_the_keys() -> None:
    index = torch.arange(5)
    expected = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]).bool()
    assert torch.equal(visible_keys(index[3:], index, window=3), expected)


@pytest.mark.parametrize(("T", "window"), [(1, None), (7, None), (7, 1), (7, 3), (7, 7), (7, 9)])
def test_pair_count_is_the_mask_summed(T: int, window: int | None) -> None:
    index = torch.arange(T)
    assert count_visible_pairs(T, window) == visible_keys(index, index, window).sum().item()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_oracle_is_the_definition(window: int | None, sinks: bool) -> None:
    q, k, v, b = inputs(2, 6, 2, 5, 7, 4)  # H = 6 over K = 2 shows a swapped group order
    sink, start = b if sinks else None, torch.tensor([0, 3])
    out = manual_causal_attention(q, k, v, window, sink, key_start=start)
    torch.testing.assert_close(out, by_definition(q, k, v, window, sink, [0, 3]))


def test_sink_gradient_check_value() -> None:
    # one key, q = k = 1, v = 2, b = 0, scale 1: p = σ(1), dq = dk = v·p·(1 − p) = 0.39322
    for backend in ("reference", "blocked"):
        q, k = torch.ones(2, 1, 1, 1, 1, dtype=torch.float64).requires_grad_().unbind(0)
        v, b = torch.full((1, 1, 1, 1), 2.0).double(), torch.zeros(1).double().requires_grad_()
        out = causal_attention(q, k, v, None, b, scale=1.0, backend=backend)
        dq, dk, db = torch.autograd.grad(out.sum(), (q, k, b))
        expected = 2 / (1 + math.exp(-1)) * (1 - 1 / (1 + math.exp(-1)))
        assert round(expected, 5) == 0.39322
        for gradient in (dq, dk, -db):
            assert gradient.item() == pytest.approx(expected, abs=1e-12)


def test_sink_brings_no_value() -> None:
    q, k, v, _ = inputs(1, 2, 2, 4, 4, 8)
    drowned = causal_attention(q, k, v, None, torch.full((2,), 60.0).double(), backend="blocked")
    assert drowned.abs().max() < 1e-20  # all mass on the sink, and it is worth nothing
    absent = causal_attention(q, k, v, None, torch.full((2,), -60.0).double(), backend="blocked")
    torch.testing.assert_close(absent, causal_attention(q, k, v, backend="blocked"))


def test_concatenated_sink_equals_gated_output() -> None:
    q, k, v, b = inputs(1, 4, 2, 6, 6, 8)
    scores = q @ repeat_kv(k, 2).transpose(-1, -2) / math.sqrt(8)
    lse = scores.masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf).logsumexp(-1)
    gated = manual_causal_attention(q, k, v) * torch.sigmoid(lse - b[:, None]).unsqueeze(-1)
    torch.testing.assert_close(gated, manual_causal_attention(q, k, v, None, b))


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 2),
    K=st.integers(1, 3),
    G=st.integers(1, 3),
    T=st.integers(1, 40),
    past=st.integers(0, 30),
    D=st.sampled_from([2, 6, 8]),
    window=st.none() | st.integers(1, 50),
    sinks=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocked_equals_the_oracle_with_gradients(
    B: int,
    K: int,
    G: int,
    T: int,
    past: int,
    D: int,
    window: int | None,
    sinks: bool,
    padded: bool,
    seed: int,
) -> None:
    q, k, v, b = inputs(B, K * G, K, T, T + past, D, seed)
    leaves = [q, k, v] + ([b] if sinks else [])
    start = torch.randint(0, T + past + 1, (B,)) if padded else None
    dout = torch.randn(q.shape, dtype=torch.float64)
    results = []
    for backend in ("reference", "blocked"):
        out = causal_attention(
            q, k, v, window, b if sinks else None, key_start=start, backend=backend
        )
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for expected, got in zip(*results, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(
            got, expected, rtol=1e-9, atol=1e-11
        )  # float64: sums of ≤ 70 terms


@pytest.mark.parametrize("window", [None, 100])
def test_blocked_is_right_across_many_blocks(window: int | None) -> None:
    q, k, v, b = inputs(1, 2, 1, 600, 700, 4)  # three blocks of 256 queries
    dout = torch.randn(q.shape, dtype=torch.float64)
    expected = manual_causal_attention(q, k, v, window, b)
    got = causal_attention(q, k, v, window, b, backend="blocked")
    torch.testing.assert_close(got, expected)
    for a, c in zip(
        torch.autograd.grad(got, (q, k, v, b), dout),
        torch.autograd.grad(expected, (q, k, v, b), dout),
        strict=True,
    ):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["expanded", "strided", "transposed"])
def test_any_strides(kind: str) -> None:
    q, k, v, b = (t.detach() for t in inputs(1, 4, 2, 9, 9, 16))
    if kind == "strided":
        q, k, v = (t.repeat_interleave(2, dim=-1)[..., ::2] for t in (q, k, v))
    if kind == "transposed":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    q, k, v, b = (t.requires_grad_() for t in (q, k, v, b))
    expected = manual_causal_attention(q, k, v, 4, b)
    got = causal_attention(q, k, v, 4, b, backend="blocked")
    torch.testing.assert_close(got, expected)
    loss = (
        (lambda o: o.sum()) if kind == "expanded" else (lambda o: torch.cat([o, o], -1).sin().sum())
    )
    for a, c in zip(
        torch.autograd.grad(loss(got), (q, k, v, b)),
        torch.autograd.grad(loss(expected), (q, k, v, b)),
        strict=True,
    ):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_blocked_gradients_are_its_own_derivatives(window: int | None, padded: bool) -> None:
    """T = 5 < S = 6, H = 4 over K = 2, one row whose first query sees padding alone."""
    shapes = ((2, 4, 5, 2), (2, 2, 6, 2), (2, 2, 6, 2), (4,))
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    key_start = torch.tensor([1, 3]) if padded else None

    def attend(q, k, v, sink):
        return blocked_attention(q, k, v, window, sink, key_start=key_start)

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize(("B", "T", "S"), [(0, 3, 5), (2, 0, 5), (2, 0, 0)])
def test_nothing_to_attend_from_gives_nothing_and_zero_gradients(B: int, T: int, S: int) -> None:
    q, k = torch.randn(B, 4, T, 8, requires_grad=True), torch.randn(B, 2, S, 8, requires_grad=True)
    sink = torch.zeros(4, requires_grad=True)
    out = causal_attention(q, k, k, 2, sink, backend="blocked")
    assert out.shape == (B, 4, T, 8)
    for gradient in torch.autograd.grad(out.sum(), (q, k, sink)):
        assert not gradient.any()


def test_a_query_that_sees_nothing_gets_zeros_and_no_nan() -> None:
    for backend in ("reference", "blocked"):
        q, k, v, _ = inputs(1, 2, 1, 4, 4, 4)
        out = causal_attention(q, k, v, key_start=torch.tensor([2]), backend=backend)
        assert (out[:, :, :2] == 0).all()
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.isfinite(g).all() for g in gradients)
        assert (gradients[1][:, :, :2] == 0).all()


def test_bf16_stays_close_to_the_oracle() -> None:
    q, k, v, b = (t.detach() for t in inputs(1, 4, 2, 64, 64, 32))
    got = causal_attention(*(t.bfloat16() for t in (q, k, v)), 16, b.float(), backend="blocked")
    assert got.dtype == torch.bfloat16
    exact = manual_causal_attention(*(t.bfloat16().double() for t in (q, k, v)), 16, b)
    # scores and sums are fp32; what is left is the rounding of the output to 8 bits: 2⁻⁹ relative
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-6)


def test_windowed_cost_follows_the_window_not_the_square() -> None:
    def scores_computed(T: int, window: int | None) -> int:
        q, k = torch.empty(1, 1, T, 1), torch.empty(1, 1, T, 1)
        return sum(mask.numel() for _, _, mask in _blocks(q, k, None, window))

    assert scores_computed(8192, 128) == pytest.approx(2 * scores_computed(4096, 128), rel=0.02)
    assert scores_computed(8192, None) > 3.8 * scores_computed(4096, None)
    assert scores_computed(8192, 128) < 3 * count_visible_pairs(8192, 128)


def test_long_sequence_needs_linear_memory() -> None:
    # a dense fp32 score matrix of one head would be 1 GiB at T = 16,384; the process may use 700 MiB in all
    program = """
import resource, torch
torch.set_num_threads(1)
from gptoss.model.attention import causal_attention
q, k, v = (torch.randn(1, h, 16_384, 32, requires_grad=True) for h in (2, 1, 1))
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + 700 * 2**20,) * 2)
for window in (128, None):
    out = causal_attention(q, k, v, window, torch.zeros(2), backend="blocked")
    if window:
        out.sum().backward()
try:
    causal_attention(q, k, v, None, torch.zeros(2), backend="reference")
    print("the oracle fits: the limit proves nothing")
except RuntimeError:
    print("linear")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "linear", result.stderr[-2000:]


@pytest.mark.parametrize(
    ("T", "S", "window"),
    [
        (300, 300, None),
        (300, 300, 128),
        (256, 256, 1),
        (512, 512, 200),
        (200, 456, 100),
        (130, 1000, None),
    ],
)
def test_flex_blocks_are_the_ones_that_the_band_touches(T: int, S: int, window: int | None) -> None:
    mask = band_block_mask(T, S, window, None, torch.device("cpu"))
    reference = create_block_mask(
        lambda b, h, i, j: (i + S - T >= j) & (i + S - T - j < (window or S)),
        None,
        None,
        T,
        S,
        device="cpu",
    )
    assert torch.equal(mask.to_dense(), reference.to_dense())
    # a block that claims to need no mask must be wholly visible
    visible = visible_keys(torch.arange(S - T, S), torch.arange(S), window)
    for row in range(mask.full_kv_num_blocks.shape[-1]):
        for block in mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist():
            part = visible[row * 128 : (row + 1) * 128, block * 128 : (block + 1) * 128]
            assert part.all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # meant on a CPU
@pytest.mark.parametrize("window", [None, 100])
def test_flex_forward_equals_the_oracle(window: int | None) -> None:
    q, k, v, b = (t.detach().float() for t in inputs(2, 4, 2, 150, 200, 16))
    start = torch.tensor([0, 20])
    with torch.no_grad():
        got = causal_attention(q, k, v, window, b, key_start=start, backend="flex")
    expected = manual_causal_attention(q, k, v, window, b, key_start=start)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)  # fp32 sums of 200 terms


def test_repeat_kv_gives_each_group_its_head() -> None:
    x = torch.arange(6.0).view(1, 2, 3, 1)
    assert repeat_kv(x, 3).squeeze().tolist() == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert repeat_kv(x, 1) is x
    with pytest.raises(ValueError, match="n_rep"):
        repeat_kv(x, 0)


def test_repeat_kv_copies() -> None:
    x = torch.randn(1, 2, 3, 4)
    assert repeat_kv(x, 2).untyped_storage().nbytes() == 2 * x.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("shapes", "window", "words"),
    [
        (((1, 3, 4, 8), (1, 2, 4, 8)), None, "evenly"),
        (((1, 0, 4, 8), (1, 2, 4, 8)), None, "evenly"),
        (((1, 2, 4, 0), (1, 2, 4, 0)), None, "head_dim >= 1"),
        (((1, 2, 5, 8), (1, 2, 4, 8)), None, "last T"),
        (((1, 2, 4, 8), (2, 2, 4, 8)), None, "batch"),
        (((1, 2, 4, 8), (1, 2, 4, 8)), 0, "window"),
        (((2, 4, 8), (1, 2, 4, 8)), None, "B, H, T, D"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], window: int | None, words: str
) -> None:
    q, k = (torch.randn(s) for s in shapes)
    with pytest.raises(ValueError, match=words):
        causal_attention(q, k, k, window)


def test_integers_are_refused() -> None:
    k = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="floating inputs"):
        causal_attention(torch.ones(1, 2, 3, 4, dtype=torch.long), k, k)


def test_auto_backend_is_blocked_on_a_cpu_and_unknown_names_are_refused() -> None:
    assert resolve_backend("auto", torch.device("cpu"), torch.float32) == "blocked"
    with pytest.raises(ValueError, match="expected one of"):
        resolve_backend("flash", torch.device("cpu"), torch.float32)


def small(**changes: object) -> ModelConfig:
    settings = {
        "vocab_size": 50, "d_model": 24, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "head_dim": 4,
        "ffn_dim": 16, "window_size": 4, "yarn_original_max_seq_len": 16, "yarn_target_seq_len": 512,
        "max_seq_len": 16, "eval_max_seq_len": 512,
    }  # fmt: skip
    return ModelConfig(**(settings | changes))  # type: ignore[arg-type]  # plain values


def test_sink_is_clamped_in_the_forward_pass_and_has_no_gradient_outside() -> None:
    layer = GPTOSSAttention(small(), 1).double()
    rotary = YaRNRoPE(4, original_max_seq_len=16, target_seq_len=512)(
        torch.arange(5), dtype=torch.float64
    )
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        layer.sink_bias.copy_(torch.tensor([-40.0, SINK_CLAMP_MIN, 0.0, 3.0, SINK_CLAMP_MAX, 99.0]))
    layer(x, rotary).square().sum().backward()
    gradient = layer.sink_bias.grad
    assert gradient[0] == 0 == gradient[5]
    assert (gradient[1:5] != 0).all()
    out = layer(x, rotary)
    with torch.no_grad():
        layer.sink_bias.clamp_(SINK_CLAMP_MIN, SINK_CLAMP_MAX)
    assert torch.equal(out, layer(x, rotary))


def test_layer_kinds_alternate_and_say_so() -> None:
    first, second = (GPTOSSAttention(ModelConfig(**_production()), i) for i in (0, 1))
    assert first.window == 128
    assert first.n_pruned_pairs == 0
    assert second.window is None
    assert second.n_pruned_pairs == 24
    assert "layer=0 (SWA), H=8/4, D=96, window=128" in first.extra_repr()
    assert "layer=1 (Full, pruned=24), H=8/4, D=96" in second.extra_repr()
    assert "backend=auto" in first.extra_repr()


def _production() -> dict[str, int]:
    return {"vocab_size": 8}


@pytest.mark.parametrize("layer_idx", [0, 1])
@pytest.mark.parametrize("chunks", [[7], [16], [6, 5], [6, 1, 1, 1, 1, 1], [1] * 12, [3, 9, 2]])
def test_chunks_through_the_cache_equal_one_pass(layer_idx: int, chunks: list[int]) -> None:
    layer = GPTOSSAttention(small(), layer_idx).double()
    rope = YaRNRoPE(4, original_max_seq_len=16, target_seq_len=512)
    T = sum(chunks)
    x = torch.randn(2, T, 24, dtype=torch.float64)
    table = lambda first, last: rope(torch.arange(first, last), dtype=torch.float64)  # noqa: E731
    with torch.no_grad():
        whole = layer(x, table(0, T))
        cache, parts, done = MixedKVCache(2, 2, 4, 4, batch_size=2, dtype=torch.float64), [], 0
        for size in chunks:
            part = slice(done, done + size)
            parts.append(layer(x[:, part], table(done, done + size), cache))
            done += size
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_the_oracle_stays_in_float32_under_autocast() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind(0)
    exact = manual_causal_attention(q.double(), k.double(), v.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = manual_causal_attention(q, k, v)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)


def test_the_blocks_stay_in_float32_under_autocast_forward_and_backward() -> None:
    inputs = [torch.randn(1, heads, 40, 8, requires_grad=True) for heads in (4, 2, 2)]
    sink, dout = torch.randn(4, requires_grad=True), torch.randn(1, 4, 40, 8, dtype=torch.float64)
    exact = manual_causal_attention(*(x.double() for x in inputs), 9, sink.double())
    wanted = torch.autograd.grad(exact, (*inputs, sink), dout)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # bf16 products would be off by 1e-2
        out = blocked_attention(*inputs, 9, sink)
        gradients = torch.autograd.grad(out, (*inputs, sink), dout.float())
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)
