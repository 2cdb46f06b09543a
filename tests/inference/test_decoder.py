"""The decoder's program: the same tokens as the model's own layers, whatever the ring, the prompt and the settings.

Triton's interpreter takes a second for each step of the smallest model. So the program's bookkeeping (tape, ring,
positions, angles, blocks of tokens) is tested with plain PyTorch in the kernels' place, and a few runs take the kernels.
"""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton is not installed")

import gptoss.inference.decoder as decoder_module
import gptoss.inference.decoder_layer as layer_module
from gptoss.config import ModelConfig
from gptoss.inference.decoder import Decoder, StaticCache
from gptoss.inference.decoder_layer import unsupported
from gptoss.inference.engine import STEPS_A_BLOCK, choose_engine
from gptoss.inference.generate import generate, generate_with_result, stream
from gptoss.inference.prefill import prefill
from gptoss.inference.request import check_request
from gptoss.kernels.decode_step import BLOCK, NOT_A_TOKEN, begin_step, choose_token
from gptoss.model.attention.reference import manual_causal_attention
from gptoss.model.norm import rms_norm
from gptoss.model.prefill_chunk import choose_chunk_size
from gptoss.model.rotary import apply_rope
from gptoss.model.transformer import GPTOSS

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the graph is tested, in test_decoder_gpu.py"
)
W = 4
SMALLEST = {
    "vocab_size": 23,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 1,
    "ffn_dim": 8,
    "n_routed_experts": 3,
}


def prompt(length, vocab=61, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (1, length), generator=generator)


# Plain PyTorch with the kernels' signatures


def qkv(x, norm, wq, wkv, cos, sin, slots, k_cache, v_cache, eps=1e-5, overlap=True):
    (N, _), (K, D) = x.shape, k_cache.shape[1::2]
    y = rms_norm(x, norm, eps)
    q = (y @ wq.T).view(N, -1, 1, D)
    k, v = (y @ wkv.T).view(N, 2, K, 1, D).unbind(1)
    turn = (cos[:, None], sin[:, None])  # (N, D/2) -> (N, 1, D/2)
    for n, slot in enumerate(slots.tolist()):
        k_cache[n, :, slot], v_cache[n, :, slot] = apply_rope(k, *turn)[n, :, 0], v[n, :, 0]
    return apply_rope(q, *turn)


def attention(q, k_cache, v_cache, lengths, sink=None, overlap=True):
    n = int(lengths)
    return manual_causal_attention(q, k_cache[:, :, :n], v_cache[:, :, :n], None, sink)


def linear(x, weight, norm=None, residual=None, eps=1e-5, overlap=True):
    y = (x if norm is None else rms_norm(x, norm, eps)) @ weight.T
    return y if residual is None else y + residual


def route(x, norm, router, k, eps=1e-5, overlap=True):
    y = rms_norm(x, norm, eps)
    top, indices = torch.sort((y @ router.T).softmax(-1), descending=True, stable=True)
    return y, indices[:, :k].int(), top[:, :k] / top[:, :k].sum(-1, keepdim=True)


def experts(x, indices, weights, w1, w3, w2, shared=None, residual=None, overlap=True):
    run = lambda a, b, c: (F.silu(x @ a.T) * (x @ b.T)) @ c.T  # noqa: E731 (one line, used twice)
    out = sum(
        w * run(w1[e], w3[e], w2[e]) for e, w in zip(indices[0].tolist(), weights[0], strict=True)
    )
    out = out if shared is None else out + run(*shared)
    return out if residual is None else out + residual


def moe(x, norm, router, w1, w3, w2, k, shared=None, eps=1e-5, overlap=True):
    return experts(*route(x, norm, router, k, eps), w1, w3, w2, shared, x)


@pytest.fixture
def plain(monkeypatch):
    """Everything but the kernels of decode_step.py in plain PyTorch."""
    for name, function in (
        ("decode_qkv", qkv),
        ("decode_attention", attention),
        ("decode_linear", linear),
        ("decode_moe", moe),
        ("decode_route", route),
        ("decode_experts", experts),
    ):
        monkeypatch.setattr(layer_module, name, function)
    monkeypatch.setattr(decoder_module, "decode_linear", linear)


def same(model, ids, new, **settings):
    """Tokens of both engines, which must be equal."""
    settings = {"temperature": 0} | settings
    eager = generate_with_result(model, ids, new, engine="eager", **settings)
    graph = generate_with_result(model, ids, new, engine="graph", **settings)
    assert (eager.engine, graph.engine) == ("eager", "graph")
    assert torch.equal(eager.ids, graph.ids)
    assert eager.new_tokens == graph.new_tokens
    return graph


# Tokens


@pytest.mark.parametrize("length", [1, W - 1, W, W + 1, 3 * W + 5])
def test_tokens_equal_the_models_own_through_two_turns_of_the_ring(make_model, plain, length):
    model = make_model(window=W, dtype=torch.float32)
    result = same(model, prompt(length), 2 * W + 6)
    assert len(set(result.new_tokens[0])) > 4  # not one token again and again


@pytest.mark.parametrize("rope", ["plain", "yarn"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shared", [0, 1, 3])
def test_modes_heads_and_shared_experts(make_model, plain, rope, tied, shared):
    model = make_model(
        window=W, dtype=torch.float32, weight_tying=tied, n_shared_experts=shared, seed=shared
    )
    same(model, prompt(7), 12, rope=rope)


def test_a_prompt_that_outgrows_the_trained_length_is_read_with_yarn(make_model, plain):
    model = make_model(window=W, dtype=torch.float32)
    model.set_rope_mode("plain")
    result = same(model, prompt(60), 12)  # 72 > 64
    assert result.rope_mode == "yarn"
    assert model.rope_mode == "plain"


@pytest.mark.parametrize("changes", [{"sink_bias": False}, {"yarn_prune_rope_global": False}])
def test_without_sinks_or_pruning(plain, changes):
    torch.manual_seed(0)
    cfg = ModelConfig(**SMALLEST, head_dim=8, window_size=W, init_std=0.3, **changes)
    same(GPTOSS(cfg), prompt(9, 23), 12)


def test_a_window_longer_than_the_whole_sequence(make_model, plain):
    same(make_model(window=100, dtype=torch.float32), prompt(5), 9)


@pytest.mark.parametrize("length", [1, 2, 3, 11])
def test_the_interpreted_kernels_give_the_same_tokens(length):
    """W = 2: prompts of W - 1, W, W + 1 and 3W + 5 tokens; from the first, five steps turn the ring twice."""
    torch.manual_seed(0)
    model = GPTOSS(ModelConfig(**SMALLEST, head_dim=8, window_size=2, init_std=0.3))
    with torch.no_grad():
        for block in model.blocks:
            block.attn.sink_bias.normal_()
    same(model, prompt(length, 23), 6 if length == 1 else 3)


def test_a_decoder_serves_one_sequence_after_another(make_model, plain):
    model = make_model(window=W, dtype=torch.float32)
    decoder = Decoder(model, 40, mode="yarn")
    for length in (17, 2, 9):
        ids = prompt(length, seed=length)
        result = generate_with_result(model, ids, 14, temperature=0, engine=decoder)
        assert result.new_tokens == generate_with_result(model, ids, 14, temperature=0).new_tokens


def test_logits_of_given_tokens_equal_the_model_read_at_once(make_model, plain):
    model, ids = make_model(window=W, dtype=torch.float32), prompt(25)
    wanted = model(ids)[0][0]
    decoder = Decoder(model, 25)
    assert torch.allclose(decoder.read(ids[:, :6])[0], wanted[5], atol=1e-4)
    for index in range(6, 25):
        decoder.put(ids[0, index])
        assert torch.allclose(decoder.step(choose=False)[0], wanted[index], atol=1e-4)
    with pytest.raises(ValueError, match="max_len = 25"):
        decoder.step()


def test_a_stream_whose_decoder_was_given_another_prompt_ends_with_an_error(make_model, plain):
    model = make_model(window=W, dtype=torch.float32)
    decoder = Decoder(model, 60)
    first = stream(model, prompt(5), 40, temperature=0, engine=decoder)
    next(first)
    second = stream(model, prompt(9, seed=2), 40, temperature=0, engine=decoder)
    taken = [next(second).tokens[0]]
    with pytest.raises(ValueError, match=r"another prompt.*one Decoder a stream"):
        list(first)
    taken += [step.tokens[0] for step in second]
    assert taken == generate(model, prompt(9, seed=2), 40, temperature=0)[0, 9:].tolist()


@pytest.mark.parametrize("ids", [[[61]], [[-1]], [[1.5]], [[]], [[1], [2]], [1]])
def test_a_decoder_reads_one_row_of_ids_of_the_vocabulary(make_model, plain, ids):
    decoder = Decoder(make_model(window=W, dtype=torch.float32), 8)
    with pytest.raises(ValueError, match="expected"):
        decoder.read(torch.tensor(ids))


@pytest.mark.parametrize("token", [61, -1])
def test_a_decoder_takes_no_token_outside_the_vocabulary(make_model, plain, token):
    decoder = Decoder(make_model(window=W, dtype=torch.float32), 8)
    decoder.read(prompt(3))
    with pytest.raises(ValueError, match=rf"token {token}: expected .*61"):
        decoder.put(token)


def test_a_decoder_of_a_model_without_weights_says_so(make_model):
    with pytest.raises(ValueError, match=r"meta device.*load"):
        Decoder(make_model(window=W, dtype=torch.float32).to("meta"), 8)


# Sampling, stops, errors


@pytest.mark.parametrize("new", [1, 2, STEPS_A_BLOCK, STEPS_A_BLOCK + 1, 3 * STEPS_A_BLOCK + 2])
def test_sampled_tokens_are_the_same_with_one_seed(make_model, plain, new):
    model = make_model(window=W, dtype=torch.float32)
    same(model, prompt(6), new, temperature=0.8, top_k=30, top_p=0.9, seed=11)


@pytest.mark.parametrize("place", [0, 1, 7, 9, 16])
def test_generation_ends_at_the_stop_token_and_hands_out_none_behind_it(make_model, plain, place):
    model, ids = make_model(window=W, dtype=torch.float32), prompt(6)
    free = generate_with_result(model, ids, 24, temperature=0, engine="eager").new_tokens[0]
    result = same(model, ids, 24, stop_ids=[free[place]])
    assert len(result.new_tokens[0]) == free.index(free[place]) + 1


def test_stop_tokens_cannot_come_before_the_least_length(make_model, plain):
    model, ids = make_model(window=W, dtype=torch.float32), prompt(6)
    free = generate_with_result(model, ids, 20, temperature=0, engine="eager").new_tokens[0]
    result = same(model, ids, 20, stop_ids=free[:3], min_new_tokens=10)
    assert len(result.new_tokens[0]) >= 11


def test_tokens_and_text_are_streamed_alike(make_model, plain, plain_tokenizer):
    model = make_model(window=W, dtype=torch.float32, vocab_size=256)
    runs = [
        [(s.index, s.tokens, s.texts) for s in stream(model, "abc", 12, 0, tokenizer=plain_tokenizer, engine=engine)]
        for engine in ("eager", "graph")
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert len(runs[1]) == 12


def test_nan_logits_are_an_error_and_not_a_token(make_model, plain):
    model, ids = make_model(window=W, dtype=torch.float32), prompt(6)
    first = generate_with_result(model, ids, 1, temperature=0).new_tokens[0][0]
    with torch.no_grad():
        model.embed.weight[first] = (
            torch.nan
        )  # read in the first step; with the tied head, seen at once
    for settings in ({"temperature": 0}, {"temperature": 1.0}):
        with pytest.raises(ValueError, match="NaN at new token 0"):
            generate(model, ids, 5, engine="graph", **settings)
    untied = make_model(window=W, dtype=torch.float32, weight_tying=False)
    first = generate_with_result(untied, ids, 1, temperature=0).new_tokens[0][0]
    with torch.no_grad():
        untied.embed.weight[first] = torch.nan
    with pytest.raises(ValueError, match="NaN at new token 1"):
        generate(untied, ids, 5, temperature=0, engine="graph")


# Choice


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, "one sequence at a time, got 2"),
        ({"key_start": [1]}, "left padding"),
        ({"use_cache": False}, "always uses the cache"),
    ],
)
def test_what_the_graph_cannot_serve_is_refused_and_auto_serves_it(make_model, settings, words):
    model = make_model(window=W, dtype=torch.float32)
    settings = {"input_ids": prompt(3), "max_new_tokens": 2, "temperature": 0} | settings
    with pytest.raises(ValueError, match=words):
        generate(model, engine="graph", **settings)
    assert generate_with_result(model, **settings).engine == "eager"


def test_an_unknown_engine_and_an_unfit_decoder_are_named(make_model):
    model, ids = make_model(window=W, dtype=torch.float32), prompt(6)
    with pytest.raises(ValueError, match="auto, eager, graph"):
        stream(model, ids, 3, engine="fast")  # before the iterator is used
    decoder = Decoder(model, 8, mode="plain")
    with pytest.raises(ValueError, match="max_len is 8"):
        generate(model, ids, 3, engine=decoder, rope="plain")
    with pytest.raises(ValueError, match="mode 'plain'"):
        generate(model, ids, 2, engine=decoder, rope="yarn")
    with pytest.raises(ValueError, match="another model"):
        generate(make_model(window=W, dtype=torch.float32), ids, 2, engine=decoder, rope="plain")
    with pytest.raises(ValueError, match="T from 1 to max_len = 8"):
        decoder.read(prompt(9))


def test_a_model_that_the_kernels_do_not_take_is_named(make_model):
    for model, words in (
        (make_model(dtype=torch.float64), "float64"),
        (make_model(dtype=torch.bfloat16), "interpreter multiplies wrongly"),
        (make_model(dtype=torch.float32, d_model=36, head_dim=6), "head_dim is 6"),
    ):
        with pytest.raises(ValueError, match=words):
            Decoder(model, 8)
        with pytest.raises(ValueError, match=words):
            generate(model, prompt(3), 2, engine="graph")
    cfg = dataclasses.replace(model.cfg, d_model=1600, n_heads=200, n_kv_heads=2, head_dim=8)
    assert "100 query heads" in unsupported(cfg, torch.float32, torch.device("cpu"))


def test_auto_keeps_the_models_own_layers_on_a_cpu(make_model):
    model = make_model(window=W, dtype=torch.float32)
    assert choose_engine(model, check_request(model, prompt(3), 100)) == "eager"


# Prefill


def test_no_chunk_moves_or_reallocates_what_is_cached(make_model):
    model, ids = make_model(window=W, dtype=torch.float32), prompt(40)
    cache = StaticCache.for_model(model, 1, 60)
    places = [t.data_ptr() for layer in range(4) for t in cache.buffers(layer)]
    keys, _ = cache.buffers(1)
    assert keys.shape == (1, 2, 60, 8)
    keys.fill_(torch.nan)
    prefill(model, ids[:, :17], cache, chunk_size=7)
    first = keys[:, :, :17].clone()
    with torch.no_grad():
        handed_out = []
        update = cache.update
        cache.update = lambda *a: handed_out.append(update(*a)) or handed_out[-1]
        prefill(model, ids[:, 17:], cache, chunk_size=9)
    assert [t.data_ptr() for layer in range(4) for t in cache.buffers(layer)] == places
    assert torch.equal(keys[:, :, :17], first)
    assert keys[:, :, 40:].isnan().all()
    # A global layer attends over a view of its buffer, not over a copy.
    assert all(k.data_ptr() == places[2] for k, _ in handed_out[1::4])


def test_chunks_are_chosen_by_device_and_batch():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_chunk_size(cpu) == 4096
    assert choose_chunk_size(cuda) == 32_768
    assert choose_chunk_size(cuda, 8) == 4096
    assert choose_chunk_size(cuda, 100) == 1024


def test_a_request_that_names_no_chunk_gets_the_one_of_its_batch(make_model):
    model = make_model()
    assert check_request(model, [[1]], 1).prefill_chunk == 4096
    assert check_request(model, [[1]] * 4, 1).prefill_chunk == 1024
    assert check_request(model, [[1]] * 4, 1, prefill_chunk=7).prefill_chunk == 7


# The ends of a step


def test_begin_step_hands_out_rows_and_counters():
    embedding, table = torch.randn(7, 20), torch.randn(50, 12)
    tape = torch.tensor([3, 6, 2, 5, NOT_A_TOKEN])
    x, angles = torch.zeros(1, 20), torch.zeros(1, 12)
    position, length, slot, ring = (torch.zeros(1, dtype=torch.int32) for _ in range(4))
    for p, token in enumerate(
        (3, 6, 2, 5, 0)
    ):  # p = 3 wraps a ring of 3; what is no token reads row 0
        position.fill_(p)
        begin_step(tape, position, embedding, table, x, angles, length, slot, ring, 3)
        assert torch.equal(x[0], embedding[token])
        assert torch.equal(angles[0], table[p])
        counters = [int(t) for t in (position, length, slot, ring)]
        assert counters == [p, p + 1, p % 3, min(p + 1, 3)]


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ({5: 9.0}, 5),
        ({BLOCK + 7: 9.0, BLOCK + 8: 9.0, 2 * BLOCK + 3: 9.0}, BLOCK + 7),  # the lowest of equals
        ({2 * BLOCK + 9: 0.5}, 2 * BLOCK + 9),  # the last; behind it only padding
        ({BLOCK + 1: torch.nan, 3: torch.inf}, NOT_A_TOKEN),
    ],
)
def test_choose_token_is_argmax_with_nan_as_no_token(places, wanted):
    logits = torch.full((1, 2 * BLOCK + 10), -1.0)
    for place, value in places.items():
        logits[0, place] = value
    tape, position = torch.zeros(9, dtype=torch.long), torch.zeros(1, dtype=torch.int32)
    choose_token(logits, torch.tensor([6], dtype=torch.int32), tape, position)
    assert tape.tolist() == [0, 0, 0, 0, 0, 0, wanted, 0, 0]
    assert position.tolist() == [6]
