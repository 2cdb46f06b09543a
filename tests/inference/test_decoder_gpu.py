"""The captured decoder on a GPU against the model's own layers: tokens in fp32, logits in bf16, long positions, the host.

In fp32 both sides round to 1e-7 and greedy tokens are equal. In bf16 every rounding is 2^-9 = 2e-3 of an element, some
twenty of them to a logit: a relative error about 1e-2. Rarely two experts tie within rounding and the sides choose
differently, so bf16 is held by the median step. A wrong slot, length or angle would be in every step.
"""

import dataclasses
import statistics

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gptoss.config import ModelConfig
from gptoss.inference.decoder import Decoder
from gptoss.inference.generate import generate_with_result
from gptoss.inference.prefill import prefill
from gptoss.inference.rope_mode import rope_mode
from gptoss.model.cache import MixedKVCache
from gptoss.model.transformer import GPTOSS

pytestmark = pytest.mark.gpu
MEDIAN_BF16 = 3e-2
TINY = ModelConfig(
    vocab_size=997,
    d_model=192,
    n_layers=4,
    n_heads=6,
    n_kv_heads=2,
    head_dim=32,
    ffn_dim=64,
    n_routed_experts=4,
    window_size=8,
    yarn_original_max_seq_len=64,
    yarn_target_seq_len=512,
    max_seq_len=64,
    eval_max_seq_len=512,
    init_std=0.1,
    weight_tying=False,
)
# The production shape, two layers of it. Untied heads, so that greedy text of random weights does not repeat itself.
PRODUCTION = ModelConfig(n_layers=2, weight_tying=False, eval_max_seq_len=140_000)


def make(cfg, dtype, **changes):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPTOSS(dataclasses.replace(cfg, **changes)).to(dtype).eval()
        with torch.no_grad():
            for block in model.blocks:
                block.attn.sink_bias.normal_()
    return model


def random_ids(model, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.cfg.vocab_size, (1, length), generator=generator).cuda()


def both(model, ids, new, **settings):
    settings = {"temperature": 0} | settings
    eager = generate_with_result(model, ids, new, engine="eager", **settings)
    graph = generate_with_result(model, ids, new, engine="graph", **settings)
    assert (eager.engine, graph.engine) == ("eager", "graph")
    return eager.new_tokens[0], graph.new_tokens[0]


@torch.no_grad()
def exact_logits(model, ids):
    """(T, V) logits of the same weights in fp32 with dense attention and the loop over experts."""
    cfg = dataclasses.replace(model.cfg, dtype="fp32", moe_dispatch="stacked", attention_backend="reference")  # fmt: skip
    with torch.device("cuda"):
        exact = GPTOSS(cfg).eval()
    exact.load_state_dict(model.state_dict())  # bf16 values, exactly
    with rope_mode(exact, "plain"):
        return exact(ids)[0][0].float()


@torch.no_grad()
def forced_errors(model, ids, start, mode="plain"):
    """Relative error of each step's logits when decoder and model read the same ids; and the two caches."""
    decoder = Decoder(model, ids.shape[1], mode=mode)
    cache = MixedKVCache.for_model(model, 1, ids.shape[1])
    errors = []
    decoder.read(ids[:, :start])
    with rope_mode(model, mode):
        prefill(model, ids[:, :start], cache)
        for index in range(start, ids.shape[1]):
            decoder.put(ids[0, index])
            got = decoder.step(choose=False).double()
            wanted = prefill(model, ids[:, index : index + 1], cache).double()
            errors.append(((got - wanted).norm() / wanted.norm()).nan_to_num(torch.inf).item())
    return errors, decoder, cache


# Tokens in fp32


@pytest.mark.parametrize("length", [1, 7, 8, 9, 29])
def test_tiny_fp32_tokens_equal_through_many_turns_of_the_ring(length):
    model = make(TINY, torch.float32)
    eager, graph = both(model, random_ids(model, length), 60)
    assert eager == graph
    assert len(set(graph)) > 10


def test_production_shape_fp32_tokens_equal_after_the_ring_wraps():
    model = make(PRODUCTION, torch.float32)
    eager, graph = both(model, random_ids(model, 100), 300)  # W = 128: wraps twice
    assert eager == graph
    assert len(set(graph)) > 10


@pytest.mark.parametrize("changes", [{"n_shared_experts": 0}, {"n_shared_experts": 3}, {"weight_tying": True, "n_kv_heads": 1}])  # fmt: skip
def test_other_shapes_fp32(changes):
    model = make(TINY, torch.float32, **changes)
    eager, graph = both(model, random_ids(model, 11), 40, rope="yarn")
    assert eager == graph


def test_sampled_tokens_and_stops_fp32():
    model = make(TINY, torch.float32)
    ids = random_ids(model, 11)
    eager, graph = both(model, ids, 40, temperature=0.8, top_k=50, top_p=0.9, seed=5)
    assert eager == graph
    free = both(model, ids, 40)[0]
    eager, graph = both(model, ids, 40, stop_ids=[free[17]], min_new_tokens=5)
    assert eager == graph
    assert len(graph) <= 40


# Logits in bf16


@pytest.mark.parametrize("cfg", [TINY, PRODUCTION], ids=["tiny", "production"])
def test_bf16_logits_stay_near_the_models_own(cfg):
    model = make(cfg, torch.bfloat16)
    ids = random_ids(model, 330)
    errors, _, _ = forced_errors(model, ids, 90)
    assert statistics.median(errors) < MEDIAN_BF16
    assert statistics.median(errors[-50:]) < MEDIAN_BF16  # nothing builds up


def test_bf16_decoder_rounds_no_more_than_the_models_own_layers():
    """Both against the same weights in fp32, the same text read: bf16 costs the decoder what it costs the model."""
    model = make(PRODUCTION, torch.bfloat16, n_routed_experts=2)  # no expert can tie with another
    ids = random_ids(model, 250)
    decoder = Decoder(model, 250, mode="plain")
    decoder.read(ids[:, :100])
    own = MixedKVCache.for_model(model, 1, 250)
    steps = []
    with torch.no_grad(), rope_mode(model, "plain"):
        prefill(model, ids[:, :100], own)
        for index in range(100, 250):
            decoder.put(ids[0, index])
            steps.append((decoder.step(choose=False)[0].float(), prefill(model, ids[:, index : index + 1], own)[0].float()))  # fmt: skip
        exact = exact_logits(model, ids)[100:]
    errors = [[(got - wanted).norm() / wanted.norm() for got in both] for both, wanted in zip(steps, exact, strict=True)]  # fmt: skip
    decoders, models = (statistics.median(float(error) for error in side) for side in zip(*errors, strict=True))  # fmt: skip
    assert decoders < 1.2 * models, f"{decoders:.2e} against {models:.2e}"


def test_bf16_greedy_tokens_agree_until_two_logits_tie():
    """Where the two texts part, the two candidates lie, in fp32, within a few roundings of each other.

    Both of two experts are always selected, so that none can be exchanged for another that ties with it.
    """
    model = make(PRODUCTION, torch.bfloat16, n_routed_experts=2)
    ids = random_ids(model, 100)
    eager, graph = both(model, ids, 200, rope="plain")
    parted = next((i for i, (a, b) in enumerate(zip(eager, graph, strict=True)) if a != b), None)
    if parted is None:
        return
    read = torch.cat([ids, torch.tensor([eager[:parted]], dtype=torch.long, device="cuda")], 1)
    exact = exact_logits(model, read)[-1]
    with torch.no_grad(), rope_mode(model, "plain"):
        rounding = (model(read, last_only=True)[0][0, -1].float() - exact).std()
    gap = (exact[eager[parted]] - exact[graph[parted]]).abs()
    # A side errs in the difference of two logits by √2 roundings; four times that is met once in 16,000 steps.
    assert gap < 4 * 2**0.5 * rounding, f"parted at {parted}: a gap of {gap:.4f}, a rounding is {rounding:.4f}"  # fmt: skip


def test_positions_near_131072():
    """One global layer that looks sharply at few of its 131,000 keys, so that a lost or misplaced key shows."""
    model = make(PRODUCTION, torch.bfloat16, yarn_prune_rope_global=False)
    with torch.no_grad():
        model.blocks[1].attn.q_proj.weight.mul_(15)
    length = 131_072
    ids = random_ids(model, length)
    errors, decoder, cache = forced_errors(model, ids, length - 40, mode="yarn")
    assert decoder.n_read == length
    # The sharp softmax turns a score's rounding into some percent; another key's value would be an error of 1.
    assert statistics.median(errors) < 0.1
    for layer, windowed in ((0, True), (1, False)):
        stored = decoder.cache.buffers(layer)
        wanted = cache.get(layer, windowed)
        for got, want in zip(stored, wanted, strict=True):
            if windowed:  # position p stands in slot p mod 128, and 131,072 is a multiple of it
                assert got.shape[2] == 128
            got, want = got[:, :, -40:].double(), want[:, :, -40:].double()
            errors = ((got - want).norm(dim=(1, 3)) / want.norm(dim=(1, 3)))[0].tolist()
            assert statistics.median(errors) < MEDIAN_BF16


# The graph


def test_a_replay_gives_the_very_bits_of_the_launches():
    model = make(PRODUCTION, torch.bfloat16)
    ids = random_ids(model, 140)
    logits = []
    for graph in (True, False):
        decoder = Decoder(model, 300, graph=graph)
        decoder.read(ids)
        decoder.put(7)
        logits.append([decoder.step().clone() for _ in range(20)])
        tape = decoder.tape[140:161].clone()
        logits[-1].append(tape)
    for replayed, launched in zip(*logits, strict=True):
        assert torch.equal(replayed, launched)


@pytest.mark.parametrize("graph", [True, False])
def test_overlapping_kernels_give_the_very_bits_of_those_that_wait(graph):
    """Logits and caches after each of 200 steps: a kernel that reads too early reads what the step before left there."""
    model = make(dataclasses.replace(PRODUCTION, n_layers=12), torch.bfloat16)
    ids = random_ids(model, 140)
    kept = []
    for overlap in (True, False):
        decoder = Decoder(model, 400, graph=graph, overlap=overlap)
        decoder.read(ids)
        decoder.put(7)
        kept.append([decoder.step().clone() for _ in range(200)])
        buffers = [t for layer in range(12) for t in decoder.cache.buffers(layer)]
        kept[-1] += [t[:, :, :340].clone() for t in buffers]  # what was written
        kept[-1].append(decoder.tape[140:341].clone())
    for overlapped, waited in zip(*kept, strict=True):
        assert torch.equal(overlapped, waited)


def test_a_graph_serves_one_sequence_after_another():
    model = make(TINY, torch.float32)
    decoder = Decoder(model, 100, mode="plain")
    for length in (29, 3, 12):
        ids = random_ids(model, length, seed=length)
        again = generate_with_result(model, ids, 30, temperature=0, engine=decoder, rope="plain")
        eager = generate_with_result(model, ids, 30, temperature=0, engine="eager", rope="plain")
        assert again.new_tokens == eager.new_tokens


def test_capturing_in_the_middle_of_a_sequence_disturbs_nothing():
    model = make(TINY, torch.float32)
    ids = random_ids(model, 21)
    tapes = []
    for early in (True, False):
        decoder = Decoder(model, 60)
        if early:
            decoder.capture(True)
            decoder.capture(False)
        logits = decoder.read(ids)
        decoder.put(logits.argmax(-1))
        for index in range(20):
            logits = decoder.step(choose=index % 2 == 0)
            if index % 2:
                decoder.put(logits.argmax(-1))
        tapes.append(decoder.tape[:42].tolist())
    assert tapes[0] == tapes[1]


def test_a_step_never_waits_for_the_device_and_allocates_nothing():
    model = make(TINY, torch.bfloat16)
    decoder = Decoder(model, 200)
    decoder.read(random_ids(model, 20))
    decoder.put(3)
    decoder.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before


def test_auto_takes_the_graph_for_long_enough_16_bit_generation():
    model = make(TINY, torch.bfloat16)
    ids = random_ids(model, 9)
    assert generate_with_result(model, ids, 64, temperature=0).engine == "graph"
    assert generate_with_result(model, ids, 8, temperature=0).engine == "eager"
    assert generate_with_result(model, ids.repeat(2, 1), 64, temperature=0).engine == "eager"
    assert generate_with_result(make(TINY, torch.float32), ids, 64).engine == "eager"


def test_fp32_weights_decode_in_bf16_under_autocast():
    model = make(TINY, torch.float32)
    ids = random_ids(model, 20)
    with torch.autocast("cuda", torch.bfloat16):
        errors, decoder, _ = forced_errors(model, random_ids(model, 80), 20)
        assert decoder.dtype == decoder.cache.dtype == torch.bfloat16
        assert (
            generate_with_result(model, ids, 64, temperature=0).engine == "eager"
        )  # auto copies nothing
        assert generate_with_result(model, ids, 4, temperature=0, engine="graph").engine == "graph"
    assert statistics.median(errors) < MEDIAN_BF16
