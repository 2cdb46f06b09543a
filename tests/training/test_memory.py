"""The memory prediction: its parts add up, and it is right where it can be measured."""

from dataclasses import replace

import pytest
import torch

from gptoss.config import ModelConfig, TrainingConfig, load_config
from gptoss.inference.prefill import prefill
from gptoss.model.cache import MixedKVCache
from gptoss.model.transformer import GPTOSS
from gptoss.training.distributed import World
from gptoss.training.memory import (
    count_parameters,
    largest_micro_batch,
    measure_training_peak,
    predict_inference_memory,
    predict_run_memory,
    predict_training_memory,
)
from gptoss.training.memory_measured import LiveBytes
from gptoss.training.validation import validate

SMALL = {
    "vocab_size": 512,
    "d_model": 96,
    "n_layers": 6,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 192,
    "window_size": 32,
    "max_seq_len": 128,
    "attention_backend": "blocked",
}


def small(**changes) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changes", [{}, {"sink_bias": False}, {"n_shared_experts": 0}], ids=str)
def test_weight_bytes_are_those_of_the_summed_parameters(tied: bool, changes: dict) -> None:
    cfg = small(weight_tying=tied, **changes)
    with torch.device("meta"):
        model = GPTOSS(cfg)
    summed = sum(p.numel() * p.element_size() for p in model.parameters())
    predicted = predict_training_memory(cfg, batch=1)
    assert {moment.weights for moment in predicted.moments} == {summed}
    assert predict_inference_memory(cfg, dtype="fp32").weights == summed
    assert predicted.peak.optimizer == 2 * summed


def test_production_model_has_the_documents_counts() -> None:
    assert count_parameters(ModelConfig()) == 501_836_640
    assert count_parameters(ModelConfig(weight_tying=False)) == 600_140_640


@pytest.mark.parametrize(
    ("dtype", "dispatch", "every", "accumulation"),
    [
        ("bf16", "stacked", 0, 1),
        ("bf16", "stacked", 1, 2),
        ("bf16", "grouped_mm", 0, 2),
        ("bf16", "grouped_mm", 3, 1),
        ("fp32", "stacked", 0, 1),
        ("fp32", "grouped_mm", 1, 1),
    ],
)
def test_predicted_peak_is_within_10_percent_on_a_cpu(dtype, dispatch, every, accumulation) -> None:
    cfg = small(dtype=dtype, moe_dispatch=dispatch)
    arguments = {
        "batch": 2,
        "seq_len": 128,
        "every": every,
        "loss_chunk": 128,
        "accumulation": accumulation,
        "device": "cpu",
    }
    predicted = predict_training_memory(cfg, **arguments).peak.total
    assert measure_training_peak(cfg, **arguments) == pytest.approx(predicted, rel=0.1)


def test_checkpointing_every_block_saves_most_and_every_sixth_least() -> None:
    """The order that the documents' factor has upside down, predicted and measured: 1 < 2 < 3 < 6 < off."""
    order = (1, 2, 3, 6, 0)
    cfg = small()
    common = {"batch": 2, "seq_len": 128, "loss_chunk": 128, "device": "cpu"}
    measured = [measure_training_peak(cfg, every=every, **common) for every in order]
    predicted = [predict_training_memory(cfg, every=e, **common).peak.total for e in order]
    assert measured == sorted(measured)
    assert predicted == sorted(predicted)
    assert measured == pytest.approx(predicted, rel=0.1)


def test_peak_of_a_large_vocabulary_is_at_the_head() -> None:
    assert "head" in predict_training_memory(small(vocab_size=500_000), batch=8).peak.name
    assert "block" in predict_training_memory(small(vocab_size=64), batch=8).peak.name


def test_chunk_of_the_loss_counts_once_it_is_the_peak() -> None:
    """Bytes of one more token's logits in bf16: V · 2 on a GPU, V · (2 + 4 + 4) on a CPU."""
    cfg = small(vocab_size=500_000)
    for device, bytes_ in (("cuda", 2), ("cpu", 10)):
        one, two = (
            predict_training_memory(cfg, batch=80, loss_chunk=c, device=device).peak.total
            for c in (4000, 4001)
        )
        assert two - one == 500_000 * bytes_


def test_sharding_divides_what_fsdp2_divides() -> None:
    cfg = ModelConfig()
    alone = predict_training_memory(cfg, batch=8).peak
    shared = predict_training_memory(cfg, batch=8, parallel="fsdp2", world_size=8).peak
    assert shared.optimizer == alone.optimizer // 8
    assert shared.activations == alone.activations
    assert shared.weights < alone.weights
    replicated = predict_training_memory(cfg, batch=8, world_size=8).peak
    assert replicated.weights == alone.weights
    assert replicated.gradients == alone.weights  # DDP's buckets stay


def test_largest_micro_batch_fits_and_the_next_does_not() -> None:
    run = load_config("pretrain_a100_502m")
    sizes = []
    for budget in (16.0, 24.0, 40.0, 80.0):
        size = largest_micro_batch(run.model, run.training, budget)
        assert predict_run_memory(run.model, run.training, size).gib <= budget
        assert predict_run_memory(run.model, run.training, size + 1).gib > budget
        sizes.append(size)
    assert sizes == sorted(sizes)
    assert sizes[0] >= 1


@pytest.mark.parametrize("dispatch", ["stacked", "grouped_mm"])
@pytest.mark.parametrize("n_layers", [2, 6])
def test_beside_a_recorded_step_there_is_room_for_a_validation(
    n_layers: int, dispatch: str
) -> None:
    cfg = small(n_layers=n_layers, moe_dispatch=dispatch)
    model = GPTOSS(cfg)
    windows = torch.randint(cfg.vocab_size, (4, cfg.max_seq_len + 1))
    with LiveBytes([*model.parameters(), windows]) as live:
        before = live.now
        validate(model, windows, 4, World(torch.device("cpu")), torch.bfloat16, 256)
    ordinary, recorded = (
        predict_training_memory(cfg, batch=4, loss_chunk=256, device="cpu", recorded=r).peak.total
        for r in (False, True)
    )
    needed = live.peak - before
    assert needed < recorded - ordinary < 2.5 * needed


def test_a_recorded_run_fits_fewer_sequences() -> None:
    run = load_config("pretrain_a100_502m")
    recorded = replace(run.training, cuda_graph=True)
    ordinary, fewer = (largest_micro_batch(run.model, t, 80.0) for t in (run.training, recorded))
    assert fewer < ordinary
    assert predict_run_memory(run.model, recorded, fewer).peak.name.startswith("a validation")


def test_nothing_fits_a_tiny_budget() -> None:
    assert largest_micro_batch(ModelConfig(), TrainingConfig(), 1.0) == 0


def test_inference_holds_the_documents_cache() -> None:
    """At 131,072 tokens: 6 layers of 128 and 6 of all, 1536 bytes a token and layer: 1.13 GiB."""
    memory = predict_inference_memory(ModelConfig(), context=131_072)
    assert memory.cache == (6 * 128 + 6 * 131_072) * 1536
    assert f"{memory.cache / 2**30:.2f}" == "1.13"
    assert memory.weights == 2 * 501_836_640
    assert memory.gib == (memory.cache + memory.weights + memory.scratch) / 2**30


def test_inference_cache_is_what_the_models_cache_allocates() -> None:
    cfg = small(dtype="fp32", n_layers=2)
    cache = MixedKVCache.for_config(cfg, batch_size=3, max_len=200, dtype=torch.float32)
    with torch.no_grad():
        GPTOSS(cfg)(torch.zeros(3, 40, dtype=torch.long), cache=cache)
    predicted = predict_inference_memory(cfg, batch=3, context=200)
    assert cache.allocated_bytes() == predicted.cache


def test_inference_scratch_is_that_of_the_chunk_that_generation_reads() -> None:
    """Per token, bf16: (3 + 2·2) · 768 and 3 · 2 · 1536 numbers, 29,184 bytes; a GPU reads 32,768 tokens, a CPU 4,096."""
    cfg = ModelConfig()
    for device, batch, context, tokens in (
        ("cuda", 1, 131_072, 32_768),
        ("cuda", 1, 10_000, 10_000),
        ("cuda", 8, 131_072, 32_768),
        ("cuda", 64, 131_072, 64 * 1024),
        ("cpu", 1, 131_072, 4096),
        ("cpu", 8, 131_072, 8 * 1024),
    ):
        memory = predict_inference_memory(cfg, batch=batch, context=context, device=device)
        assert memory.scratch == 29_184 * tokens, (device, batch, context)
    told = predict_inference_memory(cfg, context=131_072, prefill_chunk=2048)
    assert told.scratch == 29_184 * 2048


def test_inference_scratch_follows_what_prefill_passes_to_the_model() -> None:
    """The longest pass that `prefill` really makes, on the CPU, without being told a chunk."""
    cfg = small(dtype="fp32", n_layers=1, eval_max_seq_len=6000)
    passes = []

    def model(chunk, **_):
        passes.append(chunk.numel())
        return torch.zeros(chunk.shape[0], 1, 1), None

    for batch in (1, 3):
        passes.clear()
        cache = MixedKVCache.for_config(cfg, batch_size=batch, max_len=8, dtype=torch.float32)
        prefill(model, torch.zeros(batch, 6000, dtype=torch.long), cache)
        chosen, told = (
            predict_inference_memory(cfg, batch=batch, context=6000, device="cpu", **chunk)
            for chunk in ({}, {"prefill_chunk": max(passes) // batch})
        )
        assert chosen == told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"context": 0}, "context = 0"),
        ({"prefill_chunk": 0}, "prefill_chunk = 0"),
        ({"dtype": "fp16"}, "dtype = 'fp16': expected one of bf16, fp32"),
        ({"device": "tpu"}, "device = 'tpu': expected one of cuda, cpu"),
    ],
)
def test_wrong_arguments_of_inference_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict_inference_memory(small(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch = 0: expected at least 1"),
        ({"seq_len": -1}, "seq_len = -1"),
        ({"every": -1}, "every = -1"),
        ({"dtype": "fp16"}, "dtype = 'fp16': expected one of bf16, fp32"),
        ({"dispatch": "loop"}, "dispatch = 'loop'"),
        ({"optimizer": "lion"}, "optimizer = 'lion'"),
        ({"parallel": "tp"}, "parallel = 'tp'"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"backend": "sdpa"}, "backend 'sdpa'"),
    ],
)
def test_wrong_arguments_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict_training_memory(small(), **{"batch": 1, **changes})


def test_table_names_the_peak_and_its_parts() -> None:
    table = predict_training_memory(ModelConfig(), batch=8, compiled=True).table()
    assert "GiB at the peak:" in table
    assert "optimizer" in table


def test_live_bytes_follow_allocation_and_release() -> None:
    kept = torch.zeros(1000)
    with LiveBytes([kept]) as live:
        first = torch.ones(500)
        assert live.now == 6000
        view = first[:10]
        del first
        assert live.now == 6000  # the view holds it
        del view
        assert live.now == 4000
        live.enter("second")
        torch.ones(10)
    assert live.peaks["start"] == 6000
    assert live.peaks["second"] == 4040


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "seq_len", "every"), [(4, 4096, 0), (8, 4096, 3), (2, 8192, 1)])
def test_predicted_peak_is_within_10_percent_on_a_gpu(batch: int, seq_len: int, every: int) -> None:
    cfg = ModelConfig(moe_dispatch="grouped_mm")
    common = {"batch": batch, "seq_len": seq_len, "every": every, "compiled": True}
    predicted = predict_training_memory(cfg, **common).peak.total
    assert measure_training_peak(cfg, **common) == pytest.approx(predicted, rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "every"), [(8, 1), (4, 0)])
def test_predicted_peak_with_the_triton_experts_is_within_3_percent(batch: int, every: int) -> None:
    """With every block checkpointed the peak is inside the experts' backward pass, which is listed tensor by tensor."""
    cfg = ModelConfig(moe_dispatch="triton_grouped")
    common = {"batch": batch, "seq_len": 4096, "every": every, "compiled": True}
    predicted = predict_training_memory(cfg, **common).peak.total
    assert measure_training_peak(cfg, **common) == pytest.approx(predicted, rel=0.03)
