"""The mixed cache: what it hands out, what it keeps, what it costs, and that nobody can tell it from no cache."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from gptoss.config import ModelConfig
from gptoss.model.cache import MixedKVCache, kv_cache_bytes
from gptoss.model.transformer import GPTOSS

GIB = 2**30


def numbered(
    first: int, count: int, batch: int = 1, heads: int = 1, width: int = 2
) -> torch.Tensor:
    """Keys that say their own position."""
    return (torch.arange(first, first + count).float().view(1, 1, count, 1)).expand(
        batch, heads, count, width
    )


def positions_of(keys: torch.Tensor) -> list[int]:
    return keys[0, 0, :, 0].int().tolist()


def small_cache(window: int, max_len: int | None = None, **other) -> MixedKVCache:
    return MixedKVCache(2, 1, 2, window, max_len=max_len, dtype=torch.float32, **other)


def small_model(window: int = 4, seed: int = 0, **changes) -> GPTOSS:
    """Six query heads over two kv heads, so that a swapped group order shows."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 61,
        "d_model": 48,
        "n_layers": 4,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 8,
        "ffn_dim": 32,
        "n_routed_experts": 4,
        "window_size": window,
        "yarn_original_max_seq_len": 64,
        "yarn_target_seq_len": 512,
        "max_seq_len": 64,
        "eval_max_seq_len": 512,
        "init_std": 0.3,
    }
    model = GPTOSS(ModelConfig(**sizes | changes)).double()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.sink_bias.normal_()
    return model


# What a call hands out


def test_update_hands_out_the_old_ring_and_the_new_keys_before_it_drops_any():
    cache = small_cache(window=4)
    handed = [
        positions_of(cache.update(0, numbered(n, t), numbered(n, t), True, 4)[0])
        for n, t in ((0, 1), (1, 3), (4, 5), (9, 1), (10, 9), (19, 1))
    ]
    assert handed == [
        [0],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [5, 6, 7, 8, 9],
        [6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18],
        [15, 16, 17, 18, 19],
    ]
    assert positions_of(cache.get(0, True)[0]) == [16, 17, 18, 19]


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 9),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    given_length=st.booleans(),
)
def test_any_chunks_come_back_in_order_and_leave_the_last_window(window, chunks, given_length):
    total = sum(chunks)
    cache = small_cache(window, total if given_length else None)
    n = 0
    for t in chunks:
        k = numbered(n, t)
        ring_k, ring_v = cache.update(0, k, -k, True, window)
        all_k, all_v = cache.update(1, k, -k, False, None)
        assert positions_of(ring_k) == list(range(max(0, n - window), n + t))
        assert positions_of(all_k) == list(range(n + t))
        assert torch.equal(ring_v, -ring_k)
        assert torch.equal(all_v, -all_k)
        n += t
        assert cache.n_seen == n
        assert cache.seq_len(0, True) == min(n, window)
        assert cache.seq_len(1, False) == n
        assert positions_of(cache.get(0, True)[0]) == list(range(max(0, n - window), n))
        assert positions_of(cache.get(1, False)[0]) == list(range(n))
        needed = kv_cache_bytes(n, 1, 1, 1, 2, window, 4)
        if given_length:
            assert cache.allocated_bytes() == kv_cache_bytes(total, 1, 1, 1, 2, window, 4)
        else:
            assert needed <= cache.allocated_bytes() <= 1.5 * needed


def test_append_stores_what_update_stores():
    one, other = small_cache(3), small_cache(3)
    n = 0
    for t in (2, 1, 7, 1, 1):
        one.append(0, numbered(n, t), numbered(n, t), True, 3)
        other.update(0, numbered(n, t), numbered(n, t), True, 3)
        n += t
    assert torch.equal(one.get(0, True)[0], other.get(0, True)[0])


def test_rows_and_heads_of_a_batch_keep_apart():
    cache = MixedKVCache(1, 3, 4, window=2, batch_size=2, dtype=torch.float64)
    k = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    v = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    for t in range(7):
        cache.append(0, k[:, :, t : t + 1], v[:, :, t : t + 1], True, 2)
    kept_k, kept_v = cache.get(0, True)
    assert torch.equal(kept_k, k[:, :, 5:])
    assert torch.equal(kept_v, v[:, :, 5:])


def test_later_writes_do_not_change_a_ring_that_was_handed_out():
    cache = small_cache(window=3)
    handed, _ = cache.update(0, numbered(0, 3), numbered(0, 3), True, 3)
    again, _ = cache.update(0, numbered(3, 3), numbered(3, 3), True, 3)
    assert positions_of(handed) == [0, 1, 2]
    assert positions_of(again) == [0, 1, 2, 3, 4, 5]


def test_reset_forgets_and_keeps_the_memory():
    cache = small_cache(window=3, max_len=9)
    cache.append(0, numbered(0, 8), numbered(0, 8), True, 3)
    before = cache.allocated_bytes()
    cache.reset()
    assert (cache.n_seen, cache.seq_len(0, True), cache.allocated_bytes()) == (0, 0, before)
    handed, _ = cache.update(0, numbered(0, 2), numbered(0, 2), True, 3)
    assert positions_of(handed) == [0, 1]


def test_a_full_cache_keeps_every_key_of_a_windowed_layer():
    cache = small_cache(window=2, full=True)
    for n in range(5):
        handed, _ = cache.update(0, numbered(n, 1), numbered(n, 1), True, 2)
    assert positions_of(handed) == [0, 1, 2, 3, 4]
    assert positions_of(cache.get(0, True)[0]) == [3, 4]
    assert positions_of(cache.get(0, False)[0]) == [0, 1, 2, 3, 4]


def test_values_are_cast_on_write_whatever_comes():
    for stored, incoming in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        cache = MixedKVCache(2, 1, 2, window=3, dtype=stored)
        x = (torch.rand(1, 1, 5, 2) + 1 / 3).to(incoming)
        for layer, windowed in ((0, True), (1, False)):
            k, v = cache.update(layer, x, x, windowed, 3)
            assert k.dtype == v.dtype == incoming
            assert torch.equal(
                k, x.to(stored).to(incoming)
            )  # what comes back is what a later step will see
            assert cache.get(layer, windowed)[0].dtype == stored


def test_gradients_reach_the_keys_of_this_call_and_no_older_ones():
    cache = small_cache(window=2)
    for layer, windowed in ((0, True), (1, False)):
        old = numbered(0, 3).clone().requires_grad_()
        cache.update(layer, old, old, windowed, 2)
        new = numbered(3, 2).clone().requires_grad_()
        k, v = cache.update(layer, new, new, windowed, 2)
        (k.sum() + 2 * v.sum()).backward()
        assert torch.equal(new.grad, torch.full_like(new, 3.0))
        assert old.grad is None


# What it costs


def test_bytes_at_131072_tokens_are_half_of_a_full_cache():
    mixed = MixedKVCache.for_config(ModelConfig(), max_len=131_072, device="meta")
    full = MixedKVCache.for_config(ModelConfig(), max_len=131_072, device="meta", full=True)
    # 12 layers · 131,072 positions · 2 · 4 heads · 96 · 2 bytes; half of the layers keep 128 positions instead
    assert full.allocated_bytes() == 12 * 131_072 * 1536
    assert mixed.allocated_bytes() == 6 * 131_072 * 1536 + 6 * 128 * 1536
    assert full.allocated_bytes() / GIB == 2.25
    assert round(mixed.allocated_bytes() / GIB, 3) == 1.126


@pytest.mark.parametrize("max_len", [1, 3, 4, 5, 100])
def test_a_given_length_is_allocated_at_once_and_never_again(max_len):
    cfg = small_model().cfg
    cache = MixedKVCache.for_config(cfg, 2, max_len, torch.float32)
    expected = kv_cache_bytes(max_len, 2, 2, 2, 8, 4, bytes_per_value=4, batch_size=2)
    assert cache.allocated_bytes() == expected
    x = torch.zeros(2, 2, 1, 8)
    buffers = set()
    for _ in range(max_len):
        for layer in range(4):
            cache.append(layer, x, x, cfg.is_windowed(layer), 4)
        buffers.add(cache.get(1, False)[0].data_ptr())
    assert len(buffers) == 1
    assert cache.allocated_bytes() == expected


def test_growth_copies_a_bounded_number_of_times():
    cache = small_cache(window=4)
    sizes = set()
    for n in range(1000):
        cache.append(1, numbered(n, 1), numbered(n, 1), False)
        sizes.add(cache.allocated_bytes())
    assert len(sizes) <= 20  # log(1000) / log(1.5) = 17, and the first few sizes
    assert positions_of(cache.get(1, False)[0]) == list(range(1000))


# What it refuses


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda c: c.append(0, numbered(0, 2, batch=2), numbered(0, 2), True, 3),
            "expected k of shape",
        ),
        (
            lambda c: c.append(0, numbered(0, 2), numbered(0, 2, width=3), True, 3),
            "expected v of shape",
        ),
        (
            lambda c: c.append(0, numbered(0, 2), numbered(0, 3), True, 3),
            "2 new positions and v has 3",
        ),
        (lambda c: c.append(0, numbered(0, 2)[0], numbered(0, 2), True, 3), "expected k of shape"),
        (
            lambda c: c.append(2, numbered(0, 2), numbered(0, 2), True, 3),
            "layer_idx must lie in 0..1",
        ),
        (
            lambda c: c.append(-1, numbered(0, 2), numbered(0, 2), True, 3),
            "layer_idx must lie in 0..1",
        ),
        (
            lambda c: c.append(0, numbered(0, 2), numbered(0, 2), True, 5),
            "window of 3, called with 5",
        ),
        (lambda c: c.append(0, numbered(0, 9), numbered(0, 9), True, 3), "max_len is 8"),
        (lambda c: c.get(5, True), "layer_idx must lie in 0..1"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(act, message):
    cache = small_cache(window=3, max_len=8)
    with pytest.raises(ValueError, match=message) as error:
        act(cache)
    assert "\n" not in str(error.value)
    assert cache.n_seen == 0


def test_a_ring_does_not_pretend_to_hold_everything():
    cache = small_cache(window=3)
    cache.append(0, numbered(0, 5), numbered(0, 5), True, 3)
    for ask in (lambda: cache.get(0, False), lambda: cache.seq_len(0, False)):
        with pytest.raises(ValueError, match="keeps only the last 3"):
            ask()


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="window must be positive, got 0"):
        MixedKVCache(2, 1, 2, 0)
    with pytest.raises(ValueError, match="max_len must be positive, got 0"):
        MixedKVCache(2, 1, 2, 4, max_len=0)


# With the model


def cached_logits(model, ids, chunks, key_start=None, **cache_settings):
    cache = MixedKVCache.for_model(model, ids.shape[0], **cache_settings)
    parts, n = [], 0
    with torch.no_grad():
        for t in chunks:
            parts.append(model(ids[:, n : n + t], cache=cache, key_start=key_start)[0])
            n += t
    assert n == ids.shape[1]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("prompt", [6, 7, 8, 9])
def test_ring_near_full_and_after_wraps_equals_the_uncached_model(prompt, full):
    model = small_model(window=8)
    ids = torch.randint(0, 61, (2, prompt + 20))
    with torch.no_grad():
        expected = model(ids)[0]
    found = cached_logits(model, ids, [prompt] + [1] * 20, full=full)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunks", [[7, 1, 1], [16, 1, 1], [6, 5, 1], [6, 5, 9, 3]])
def test_prefill_and_chunks_longer_than_the_window_equal_one_shot(chunks):
    model = small_model(window=4)
    ids = torch.randint(0, 61, (1, sum(chunks)))
    with torch.no_grad():
        expected = model(ids)[0]
    found = cached_logits(model, ids, chunks)
    assert not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunks", [[12] + [1] * 8, [5] * 4, [1] * 20])
def test_left_padded_rows_equal_their_single_runs(chunks):
    model = small_model(window=4)
    ids = torch.randint(0, 61, (2, 20))
    found = cached_logits(model, ids, chunks, key_start=torch.tensor([9, 0]))
    assert not found.isnan().any()  # also not where a row is all padding
    for row, start in enumerate((9, 0)):
        with torch.no_grad():
            alone = model(ids[row : row + 1, start:])[0]
        torch.testing.assert_close(found[row : row + 1, start:], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("stored", [None, torch.bfloat16, torch.float32])
def test_any_weights_autocast_and_cache_dtype_decode_like_the_uncached_model(
    weights, autocast, stored
):
    model = small_model(init_std=0.05).to(weights)
    ids = torch.randint(0, 61, (2, 11))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        expected = model(ids)[0]
        found = cached_logits(model, ids, [6, 1, 1, 3], dtype=stored)
        cache = MixedKVCache.for_model(model)
    lowest = torch.bfloat16 if autocast or weights == torch.bfloat16 else torch.float32
    assert cache.dtype == lowest  # the dtype in which keys arrive
    assert found.dtype == expected.dtype
    # bf16 keeps 8 bits: relative 2^-8 = 0.004 an operation, about twenty of them in a row, on logits below 1
    exact = lowest == torch.float32 and stored != torch.bfloat16
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=0, atol=1e-5 if exact else 0.05
    )


def test_twenty_compiled_decode_steps_recompile_a_bounded_number_of_times():
    model = small_model(window=16)
    ids = torch.randint(0, 61, (1, 40))
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)  # a graph break is an error
    cache = MixedKVCache.for_model(model, max_len=40)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(ids[:, :10], cache=cache)
        for step in range(10, 40):  # fills the ring and wraps it
            logits, _ = compiled(ids[:, step : step + 1], cache=cache)
            if step % 7 == 0 or step in (15, 16, 17):
                expected = model(ids[:, : step + 1], last_only=True)[0]
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        # first call, then with symbolic lengths: before the ring is full, when it is full, and after
        assert counter.frame_count <= 4
