"""Generation: the cache changes nothing, padding changes nothing, settings do what they say, errors come early."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss.inference.generate import Step, generate, generate_with_result, stream
from gptoss.inference.rope_mode import choose_rope_mode, rope_mode
from gptoss.model.cache import MixedKVCache

W = 4


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


# Cached equals uncached


@pytest.mark.parametrize("length", [1, W - 1, W, W + 1, 3 * W + 5])
def test_cached_equals_uncached_token_by_token(make_model, length):
    model, ids = make_model(window=W), prompt(length, batch=2)
    new = 2 * W + 6  # the ring wraps twice after any prompt
    cached = generate(model, ids, new, temperature=0)
    uncached = generate(model, ids, new, temperature=0, use_cache=False)
    assert cached.shape == (2, length + new)
    assert torch.equal(cached, uncached)
    assert torch.equal(cached[:, :length], ids)
    assert len(set(cached[0, length:].tolist())) > 4  # not one token again and again


def test_sampled_tokens_are_the_same_with_and_without_the_cache(make_model):
    model, ids = make_model(window=W), prompt(6, batch=3)
    settings_ = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 11}
    assert torch.equal(
        generate(model, ids, 15, **settings_),
        generate(model, ids, 15, use_cache=False, **settings_),
    )


@settings(max_examples=15, deadline=None)
@given(
    window=st.integers(1, 9),
    length=st.integers(1, 24),
    chunk=st.integers(1, 30),
    new=st.integers(1, 12),
    seed=st.integers(0, 3),
)
def test_any_window_prompt_and_chunk_equal_the_uncached_run(
    make_model, window, length, chunk, new, seed
):
    model = make_model(window=window, seed=seed, n_layers=2)
    ids = prompt(length, seed=seed)
    assert torch.equal(
        generate(model, ids, new, 0, prefill_chunk=chunk),
        generate(model, ids, new, 0, use_cache=False),
    )


def test_bfloat16_weights_generate_with_a_bfloat16_cache(make_model, monkeypatch):
    model = make_model(window=W, dtype=torch.bfloat16)
    made = []
    build = MixedKVCache.for_model
    monkeypatch.setattr(
        MixedKVCache, "for_model", lambda *a, **k: made.append(build(*a, **k)) or made[-1]
    )
    out = generate(model, prompt(9), 12, temperature=0)
    assert out.shape == (1, 21)
    assert made[0].dtype == torch.bfloat16
    assert made[0].n_seen == 20  # the last token is never read
    with torch.autocast("cpu", torch.bfloat16):
        generate(make_model(window=W, dtype=torch.float32), prompt(9), 3, temperature=0)
    assert made[1].dtype == torch.bfloat16


# Batches


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("chunk", [2, 5, 4096])
def test_left_padded_rows_equal_their_single_runs(make_model, use_cache, chunk):
    model = make_model(window=W)
    prompts = [prompt(3)[0].tolist(), prompt(12, seed=2)[0].tolist()]
    together = generate_with_result(
        model, prompts, 20, temperature=0, use_cache=use_cache, prefill_chunk=chunk
    )
    for row, ids in enumerate(prompts):
        alone = generate(model, [ids], 20, temperature=0)
        assert together.new_tokens[row] == alone[0, len(ids) :].tolist()
    assert together.ids[0, :9].tolist() == [0] * 9  # padding stays on the left


def test_padding_that_the_caller_made_is_named_by_key_start(make_model):
    model, ids = make_model(window=W), prompt(5)
    padded = torch.cat([torch.full((1, 7), 33), ids], dim=1)
    found = generate(model, padded, 10, temperature=0, key_start=[7])
    assert torch.equal(found[:, 7:], generate(model, ids, 10, temperature=0))
    assert not torch.equal(found[:, 7:], generate(model, padded, 10, temperature=0)[:, 7:])


# Lengths and stops


def test_zero_new_tokens_return_the_prompt(make_model):
    ids = prompt(5)
    assert torch.equal(generate(make_model(), ids, 0), ids)
    assert list(stream(make_model(), ids, 0)) == []


def test_each_row_stops_at_its_own_stop_token(make_model):
    model, ids = make_model(window=W), prompt(6, batch=2)
    free = generate(model, ids, 20, temperature=0)[:, 6:].tolist()
    # a token that the first row says early and the second late or never
    stop = next(t for t in free[0][:10] if t not in free[1][:10])
    result = generate_with_result(model, ids, 20, temperature=0, stop_ids=[stop], pad_id=60)
    for row in range(2):
        end = free[row].index(stop) + 1 if stop in free[row] else 20
        assert result.new_tokens[row] == free[row][:end]  # the stop token is part of the row
        rest = result.ids[row, 6 + end :].tolist()
        assert rest == [60] * len(rest)
    assert len(result.new_tokens[0]) < len(result.new_tokens[1])
    assert result.ids.shape[1] == 6 + max(map(len, result.new_tokens))


def test_generation_ends_when_every_row_has_stopped(make_model):
    model, ids = make_model(window=W), prompt(6)
    first = generate(model, ids, 1, temperature=0)[0, -1].item()
    for stops in ([first], {first}, iter([first]), torch.tensor([first])):
        assert generate(model, ids, 20, temperature=0, stop_ids=stops).shape == (1, 7)


def test_stop_tokens_cannot_come_before_the_least_length(make_model):
    model, ids = make_model(window=W), prompt(6)
    free = generate(model, ids, 20, temperature=0)[0, 6:].tolist()
    place = next(i for i in range(3, 20) if free[i] not in free[:i])
    ask = {"temperature": 0, "stop_ids": [free[place]]}
    allowed = generate_with_result(model, ids, 20, min_new_tokens=place, **ask).new_tokens[0]
    assert allowed == free[: place + 1]  # `place` tokens came before it
    later = generate_with_result(model, ids, 20, min_new_tokens=place + 1, **ask).new_tokens[0]
    assert later[:place] == free[:place]
    assert later[place] != free[place]
    assert len(later) > place + 1


def test_a_seed_repeats_and_another_seed_differs(make_model):
    model, ids = make_model(), prompt(4, batch=2)
    one, again, other = (generate(model, ids, 20, seed=s) for s in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_seed_leaves_the_default_generator_alone(make_model):
    model = make_model()
    state = torch.get_rng_state()
    generate(model, prompt(4), 5, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


# Streaming


def test_the_stream_the_callback_and_the_tensor_agree(make_model):
    model, ids = make_model(window=W), prompt(6, batch=2)
    heard: list[Step] = []
    out = generate(model, ids, 9, temperature=0, on_token=heard.append)
    seen = list(stream(model, ids, 9, temperature=0))
    assert [s.tokens for s in heard] == [s.tokens for s in seen] == out[:, 6:].T.tolist()
    assert [s.index for s in seen] == list(range(9))


def test_text_comes_out_whole_character_by_whole_character(make_model, byte_tokenizer):
    model = make_model(vocab_size=250, window=W, seed=3)
    texts = ["def f(x):", "é"]
    steps = list(stream(model, texts, 40, tokenizer=byte_tokenizer, seed=1))
    result = generate_with_result(model, texts, 40, tokenizer=byte_tokenizer, seed=1)
    for row in range(2):
        decoded = byte_tokenizer.decode(result.new_tokens[row])
        assert result.texts[row] == "".join(s.texts[row] for s in steps) == decoded


def test_a_stop_token_is_not_part_of_the_text(make_model, plain_tokenizer):
    model = make_model(vocab_size=250, window=W)
    free = generate(model, "abc", 10, 0, tokenizer=plain_tokenizer)[0, 3:].tolist()
    result = generate_with_result(
        model, "abc", 10, temperature=0, stop_ids=[free[3]], tokenizer=plain_tokenizer
    )
    end = free.index(free[3])
    assert result.new_tokens == [free[: end + 1]]
    assert result.texts == [plain_tokenizer.decode(free[:end])]


def test_speed_counts_the_tokens_after_the_first(make_model):
    result = generate_with_result(make_model(), prompt(6, batch=2), 5, temperature=0)
    assert result.prefill_seconds > 0
    assert result.tokens_per_second == pytest.approx(2 * 4 / result.decode_seconds)
    assert generate_with_result(make_model(), prompt(6), 1).tokens_per_second == 0


# The rotary mode


@pytest.mark.parametrize(
    ("rope", "own", "tokens", "mode"),
    [
        ("auto", "plain", 64, "plain"),
        ("auto", "plain", 65, "yarn"),
        ("auto", "yarn", 3, "yarn"),
        ("plain", "yarn", 65, "plain"),
        ("yarn", "plain", 3, "yarn"),
    ],
)
def test_which_rotary_mode_a_sequence_gets(rope, own, tokens, mode):
    assert choose_rope_mode(rope, own, tokens, original_max_seq_len=64) == mode


def test_one_mode_holds_for_the_whole_sequence_and_the_models_own_comes_back(make_model):
    model = make_model(window=W)
    model.set_rope_mode("plain")
    ids = prompt(60)
    crossing = generate_with_result(
        model, ids, 10, temperature=0
    )  # 70 > 64, from the first token on
    assert crossing.rope_mode == "yarn"
    assert model.rope_mode == "plain"
    model.set_rope_mode("yarn")
    assert torch.equal(crossing.ids, generate(model, ids, 10, temperature=0, use_cache=False))
    model.set_rope_mode("plain")
    plain = generate_with_result(model, ids, 10, temperature=0, rope="plain")
    assert plain.rope_mode == "plain"
    assert not torch.equal(plain.ids, crossing.ids)


def test_the_models_mode_is_its_own_while_a_stream_waits_and_after_an_error(make_model):
    model = make_model()
    model.set_rope_mode("plain")
    for _ in stream(model, prompt(6), 3, rope="yarn"):
        assert model.rope_mode == "plain"
    with rope_mode(model, "yarn"):
        assert model.rope_mode == "yarn"
    assert model.rope_mode == "plain"
    model.forward = None  # calling it is an error
    with pytest.raises(TypeError):
        generate(model, prompt(6), 3, rope="yarn")
    assert model.rope_mode == "plain"


# Errors


@pytest.mark.parametrize(
    ("ids", "kwargs", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, "empty prompt"),
        ([[1, 2], []], {}, "empty prompt"),
        ([], {}, "empty prompt"),
        ([1, 2, 3], {}, "a single prompt is"),
        (torch.zeros(3, dtype=torch.long), {}, "single prompt is ids.None."),
        (torch.zeros(1, 3), {}, "expected token ids"),
        ("text", {}, "needs a tokenizer"),
        ([[61]], {}, "token id 61 is outside the vocabulary .0, 61."),
        ([[-1]], {}, "token id -1 is outside"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must not be negative, got -1"),
        (
            [[1]],
            {"max_new_tokens": 512},
            "1 prompt tokens . 512 new ones = 513 exceed eval_max_seq_len = 512",
        ),
        ([[1]], {"min_new_tokens": 6}, "min_new_tokens must lie in .0, max_new_tokens = 5., got 6"),
        ([[1]], {"stop_ids": [61]}, "stop_ids"),
        ([[1]], {"pad_id": -1}, "pad_id"),
        ([[1]], {"seed": 2**70}, "seed = 11.*: expected an integer of 64 bits"),
        ([[1]], {"seed": 1.5}, "seed = 1.5: expected an integer"),
        ([[1]], {"pad_id": None}, "pad_id .None,.: expected ids"),
        ([[1]], {"stop_ids": 5}, "stop_ids = 5: expected a sequence of token ids"),
        ([[1]], {"stop_ids": [None]}, "stop_ids .None,.: expected ids"),
        ([[1.5, 2]], {}, "expected token ids as integers, got 1.5"),
        ([["a"]], {}, "expected token ids as integers, got 'a'"),
        (torch.ones(1, 3, dtype=torch.bool), {}, "expected token ids"),
        ([[1]], {"rope": "ntk"}, "rope must be one of auto, plain, yarn"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"top_k": 0}, "top_k"),
        ([[1]], {"stop_ids": list(range(61)), "min_new_tokens": 1}, "every id is a stop id"),
        (torch.ones(2, 3, dtype=torch.long), {"key_start": [1]}, "expected key_start of shape"),
        (torch.ones(1, 3, dtype=torch.long), {"key_start": [3]}, "empty prompt"),
        (torch.ones(1, 3, dtype=torch.long), {"key_start": [-1]}, "key_start counts padding"),
        ([[1]], {"key_start": [0]}, "key_start belongs to ids"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(make_model, ids, kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        stream(make_model(), ids, **{"max_new_tokens": 5} | kwargs)  # not even asked for a step
    assert "\n" not in str(error.value)


def test_a_model_without_weights_says_so(make_model):
    with pytest.raises(ValueError, match=r"meta device.*load"):
        generate(make_model().to("meta"), prompt(3), 2)


def test_a_poisoned_model_is_named_and_does_not_babble(make_model):
    model = make_model()
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    for temperature in (0, 1.0):
        with pytest.raises(ValueError, match="logits are NaN at new token 0"):
            generate(model, prompt(3), 2, temperature)


def test_an_empty_text_is_an_empty_prompt(make_model, plain_tokenizer):
    with pytest.raises(ValueError, match="empty prompt"):
        generate(make_model(), ["a", ""], 5, tokenizer=plain_tokenizer)


def test_steps_are_plain_values(make_model):
    step = next(iter(stream(make_model(), prompt(2), 1)))
    assert dataclasses.asdict(step)["tokens"][0] in range(61)
