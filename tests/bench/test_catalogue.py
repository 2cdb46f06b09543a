"""The catalogue's table: both sides of each optimisation compute the same, verdicts follow from numbers, failures are rows."""

import random
from contextlib import contextmanager

import pytest
import torch

from gptoss.bench import catalogue
from gptoss.bench.catalogue import ENTRIES, Entry, measure, run_entry
from gptoss.bench.evidence import check_evidence
from gptoss.bench.moe_inputs import Shape, make_inputs
from gptoss.bench.optimisations import (
    cache,
    decoding,
    experts,
    layout,
    masks,
    reading,
    router,
    shards,
    short_runs,
    trainer,
    update,
)
from gptoss.bench.optimisations.largest import extrapolate, largest_tensor
from gptoss.bench.optimisations.reading import Place, compare_times, judge
from gptoss.cli import recording
from gptoss.model.attention import causal_attention, manual_causal_attention, repeat_kv
from gptoss.model.moe import MoELayer
from gptoss.model.norm import rms_norm
from gptoss.model.rotary import apply_rope

CPU = Place(torch.device("cpu"), torch.float32)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes of a CPU")


def close(found, truth, rtol=1e-5):
    torch.testing.assert_close(found, truth, rtol=rtol, atol=1e-6)


def test_each_of_the_24_is_there_once():
    assert [entry.opt for entry in ENTRIES] == list(range(1, 25))
    assert len({entry.run for entry in ENTRIES}) == 24
    assert set(catalogue.LATE) <= set(range(1, 25))


def test_bench_all_leaves_it_out_and_the_list_names_it():
    assert "catalogue" in recording.OUTSIDE_ALL
    assert "catalogue" in recording._bench_tables()


# Verdicts, on numbers made by hand.


def test_a_ratio_beyond_its_spread_gains_or_costs():
    faster = judge([10.0, 10.2, 10.1], [5.0, 5.1, 5.05])
    assert (faster.effect, faster.compared, faster.verdict) == (2.0, "off / on", "gains")
    assert faster.noise == pytest.approx(0.2 / 10.1 + 0.1 / 5.05)
    assert judge([5.0, 5.1], [10.0, 10.1]).verdict == "costs"
    assert judge([5.0, 5.1], [10.0, 10.1], higher_is_better=True).verdict == "gains"
    # 1.5 times and its inverse, with a spread of 0.4: told apart both ways
    assert judge([1.2, 1.5, 1.8], [1.0] * 3).verdict == "gains"
    assert judge([1.0] * 3, [1.2, 1.5, 1.8]).verdict == "costs"


def test_a_ratio_within_its_spread_or_the_resolution_is_no_difference():
    assert judge([10.0, 14.0, 10.5], [9.0, 10.0, 9.5]).verdict == "no difference"
    assert judge([1.01], [1.0], resolution=0.02).verdict == "no difference"
    assert judge([1.01], [1.0]).verdict == "gains"


def test_differences_are_taken_in_pairs_and_held_against_a_95_percent_interval():
    # differences −1.0, −1.2, −0.8: mean −1, deviation 0.2, t(2) = 4.303, half-width 4.303 · 0.2 / √3 = 0.4969
    found = judge([5.0, 6.0, 7.0], [4.0, 4.8, 6.2], compared="on - off")
    assert found.effect == pytest.approx(-1.0)
    assert found.noise == pytest.approx(0.4969, abs=1e-4)
    assert found.verdict == "gains"
    # differences −1.0, +0.8, −0.8: mean −1/3, far within its interval
    assert judge([5.0, 6.0, 7.0], [4.0, 6.8, 6.2], compared="on - off").verdict == "no difference"


def test_numbers_without_noise_are_told_apart_exactly():
    assert judge([100], [100]).verdict == "no difference"
    assert judge([0], [100])[2:] == (100, "on - off", 0.0, "costs")
    assert judge([100], [50]).verdict == "gains"


def test_nothing_and_unpaired_numbers_are_refused():
    with pytest.raises(ValueError, match="both sides"):
        judge([], [1.0])
    with pytest.raises(ValueError, match="in pairs"):
        judge([1.0, 2.0], [1.0], compared="on - off")


def test_sides_are_timed_in_turns(monkeypatch):
    order = []
    monkeypatch.setattr(reading, "median_seconds", lambda run, device, repeats: run())
    sides = {name: (lambda name=name, s=s: order.append(name) or s) for name, s in (("off", 3e-3), ("on", 1e-3), ("ours", 2e-3))}  # fmt: skip
    row = compare_times(CPU, "here", sides["off"], sides["on"], ours=sides["ours"], rounds=2)
    assert order == ["off", "on", "ours", "ours", "on", "off"]
    assert (row["off"], row["on"], row["ours"], row["effect"]) == (3, 1, 2, 3)


# On and off compute the same.


def test_a_window_mask_kept_or_built_hides_what_the_kernels_hide():
    expected = torch.tensor(
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool
    )
    cpu = torch.device("cpu")
    found = masks.causal_mask(4, cpu) & masks.window_mask(4, 4, 2, cpu)
    assert torch.equal(found, expected)
    assert torch.equal(masks.window_mask(1, 4, 2, cpu), expected[-1:])
    q, k, v = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    close(masks.masked_attention(q, k, v, found), causal_attention(q, k, v, 2))


def test_a_sink_in_the_mask_is_the_sink_of_the_softmax():
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    sink = torch.tensor([-3.0, 0.0, 2.0, 20.0])  # the last is clamped to 15
    found = masks.sink_attention(q, k, v, masks.causal_mask(6, q.device), sink)
    close(found, manual_causal_attention(q, k, v, None, sink.clamp(max=15)))


def test_heads_repeated_either_way_are_the_same_and_both_copy():
    x = torch.randn(2, 3, 5, 4)
    assert torch.equal(layout.repeat_by_copy(x, 2), repeat_kv(x, 2))
    copied = next(row for row in layout.repeated_heads(CPU) if row["measure"] == "bytes")
    assert copied["off"] == copied["on"] > 0
    assert copied["verdict"] == "no difference"


def test_norms_agree_forward_and_only_the_detached_gradient_differs():
    x, weight = torch.randn(7, 16, requires_grad=True), torch.rand(16)
    exact, native = layout.norm_upcast(x, weight), layout.norm_native(x, weight)
    close(exact, rms_norm(x, weight, layout.EPS))
    close(native, exact)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (exact, native)]
    assert (grads[0] - grads[1]).abs().max() > 0.1


def test_rotations_agree_and_only_the_cast_keeps_bf16():
    x, angles = torch.randn(1, 2, 5, 8), torch.randn(5, 4)
    cos, sin = angles.cos(), angles.sin()
    for turn in (layout.rotate_promoting, layout.rotate_casting):
        close(turn(x, cos, sin), apply_rope(x, cos, sin))
    low = x.bfloat16()
    assert layout.rotate_promoting(low, cos, sin).dtype == torch.float32
    assert layout.rotate_casting(low, cos, sin).dtype == torch.bfloat16


def test_dispatches_agree_in_outputs_and_gradients():
    inputs = make_inputs(Shape(tokens=40, experts=5, width=8, ffn=12), CPU.device, torch.float32)
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.weights, inputs.w1, inputs.w3, inputs.w2)]  # fmt: skip
    x, weights, *stacks = leaves
    grad = torch.randn(40, 8)
    found = []
    for layer in (experts.masked_loop, experts.sorted_loop, experts.package_layer("stacked")):
        out = layer(x, inputs.indices, weights, *stacks)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_bisection_finds_what_the_walk_finds_at_every_edge():
    offsets = [0, 3, 4, 10]
    expected = [0, 0, 0, 1, 2, 2, 2, 2, 2, 2]
    assert [shards.walk(offsets, token) for token in range(10)] == expected
    assert [shards.bisect(offsets, token) for token in range(10)] == expected
    with pytest.raises(IndexError):
        shards.walk(offsets, 10)
    draw = random.Random(1)
    many = sorted(draw.sample(range(1, 999), 50))
    offsets = [0, *many, 1000]
    for token in draw.sample(range(1000), 200):
        assert shards.walk(offsets, token) == shards.bisect(offsets, token)


def test_stores_hold_the_same_keys_in_order():
    old = torch.arange(3.0).view(1, 1, 3, 1)
    ring, grown, stored = cache.Ring(4, old), cache.Growing(old, -old), (old, -old)
    for t in range(3):
        ring.append(old[:, :, t : t + 1], -old[:, :, t : t + 1])
    for t in range(3, 11):
        new = torch.full((1, 1, 1, 1), float(t))
        ring.append(new, -new)
        grown.append(new, -new)
        stored = cache.concatenate(stored, new, -new)
        for mine, theirs in zip(grown.get(), stored, strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(ring.get(), stored, strict=True):
            assert torch.equal(mine, theirs[:, :, -4:])
    # 3 -> int(3 · 1.5) + 1 = 5 -> 8 -> 13 slots
    assert grown.slots.shape[3] == 13


def test_tables_of_one_position_are_the_general_ones():
    inverse = torch.rand(6)
    position = torch.tensor([1234])
    for a, b in zip(decoding.tables_of_one(position, inverse, 1.3), decoding.tables_general(position, inverse, 1.3), strict=True):  # fmt: skip
        close(a, b)


@without_gpu
def test_sinks_clamped_once_give_the_same_logits_and_leave_no_trace():
    step = decoding.DecodeStep(CPU)
    before = step.attentions[0].clamped_sink()
    with torch.no_grad():
        step.attentions[0].sink_bias[0] = 99.0
    kept = decoding.ClampedOnce()
    seen = step.cache.n_seen
    plain = step()
    for layer in step.cache._layers:
        layer.seen = seen  # the same position again
    with decoding.sinks_kept(step.attentions, kept):
        assert torch.equal(step(), plain)
    assert len(kept.kept) == len(step.attentions)
    assert "clamped_sink" not in vars(step.attentions[0])
    assert step.attentions[0].clamped_sink()[0] == 15.0 != before[0]


def test_a_bf16_router_is_the_layer_up_to_bf16(monkeypatch):
    cfg = short_runs.configuration(CPU).model
    layer, x = MoELayer(cfg), torch.randn(2, 8, cfg.d_model)
    found, aux = router.bf16_forward(layer, x)
    truth, exact = layer(x)
    torch.testing.assert_close(found, truth, rtol=0.02, atol=1e-3)
    assert aux.item() == pytest.approx(exact.item(), rel=0.02)
    assert aux.dtype == torch.bfloat16


def test_settings_come_back_also_after_an_error():
    def state():
        cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
        return cuda.preferred_blas_library, cuda.matmul.allow_tf32, cudnn.benchmark, cudnn.allow_tf32, cudnn.benchmark_limit  # fmt: skip

    before = state()

    @trainer.documents_settings()
    def fails():
        assert torch.backends.cuda.preferred_blas_library == "cublaslt"
        assert torch.backends.cuda.matmul.allow_tf32
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert state() == before


def test_the_two_adamw_flags_together_are_a_row_that_raises():
    *_, together = update.adamw(CPU)
    assert together["verdict"] == "raises"
    assert "fused" in together["problem"]
    assert "off" not in together


# What is counted.


def test_the_largest_tensor_is_seen_and_extrapolated():
    x = torch.ones(64, 1)
    assert largest_tensor(lambda: x @ x.T) == 64 * 64 * 4
    # 3t² + 5t at 4 and 8, then at 100
    assert extrapolate(3 * 16 + 20, 3 * 64 + 40, 8, 100) == 30_500
    assert extrapolate(10, 20, 8, 100) == 250
    assert extrapolate(20, 20, 8, 100) == 250  # grows more slowly than the length: the linear bound


def test_bytes_kept_for_the_backward_pass_count_each_storage_once():
    x = torch.randn(10, requires_grad=True)
    assert layout.kept_bytes(lambda t: t * t, x) == 40
    assert layout.kept_bytes(lambda t: t.exp() * t, x) == 80


# The table.


@without_gpu
def test_a_few_entries_make_a_table_in_the_catalogues_order(capsys):
    table = measure([22, 2, 10, 24, 2], commit="test")
    check_evidence(table, "catalogue")
    assert list(dict.fromkeys(row["opt"] for row in table["rows"])) == [2, 10, 22, 24]
    for row in table["rows"]:
        assert row["verdict"] in ("gains", "no difference", "costs", "raises")
        assert ("effect" in row) != ("problem" in row)
    assert "no GPU here" in table["notes"][0]
    assert capsys.readouterr().out.count("[opt] OPT-") == 4


@without_gpu
def test_masks_at_a_length_that_does_not_fit_are_computed():
    rows = {row["place"]: row for row in masks.one_query_mask(CPU)}
    long = rows["the mask of one query, T = 131,072, computed"]
    assert long["off"] == 8 * 131_072**2  # int64 distances of an (S, S) mask
    assert long["on"] == 8 * 131_072


def test_a_failure_is_a_row_and_keeps_the_rows_before_it(capsys):
    def breaks(place):
        yield reading.compare("first", "bytes", [1], [2])
        raise RuntimeError("no such\nkernel")

    rows = run_entry(Entry(7, "broken", breaks), CPU)
    assert [row["verdict"] for row in rows] == ["costs", "raises"]
    assert rows[1] == {"opt": 7, "title": "broken", "place": "what follows", "measure": "-", "verdict": "raises", "problem": "no such kernel"}  # fmt: skip
    assert "OPT-7 broken: costs, raises" in capsys.readouterr().out


def test_a_failing_entry_does_not_stop_the_others(monkeypatch):
    @contextmanager
    def nothing():
        yield

    def breaks(place):
        raise RuntimeError("no such kernel")

    good = Entry(2, "good", lambda place: [reading.compare("here", "bytes", [1], [1])])
    monkeypatch.setattr(catalogue, "ENTRIES", (Entry(1, "broken", breaks), good))
    monkeypatch.setattr(catalogue, "release_memory", lambda: None)
    rows = measure(commit="test")["rows"]
    assert [(row["opt"], row["verdict"]) for row in rows] == [(1, "raises"), (2, "no difference")]


@pytest.mark.parametrize("only", [[0], [25], []])
def test_a_number_that_the_catalogue_lacks_is_refused(only):
    with pytest.raises(ValueError, match="catalogue"):
        measure(only)


@without_gpu
def test_short_runs_share_the_documented_side_and_change_one_setting(monkeypatch):
    asked = []

    def train(place, run, seed, prepare=None):
        asked.append((run.training.adam_eps, run.training.warmup_steps, run.training.aux_loss_alpha, seed))  # fmt: skip
        return short_runs.Outcome(2.0 + seed + 100 * run.training.adam_eps, 1.5)

    monkeypatch.setattr(short_runs, "train", train)
    place = Place(torch.device("cpu"), torch.float32)
    (row,) = short_runs.adam_eps(place)
    loss, load = short_runs.aux_loss(place)
    documented = [(1e-6, 5, 0.01, 0), (1e-6, 5, 0.01, 1)]
    assert asked[:4] == [*documented, (1e-8, 5, 0.01, 0), (1e-8, 5, 0.01, 1)]
    assert asked[4:] == [(1e-6, 5, 0.0, 0), (1e-6, 5, 0.0, 1)]
    assert row["effect"] == pytest.approx(100 * (1e-6 - 1e-8), rel=1e-3)
    assert [one["verdict"] for one in (row, loss, load)] == ["no difference"] * 3


@without_gpu
def test_a_short_run_learns_and_reports_its_load():
    run, text = short_runs.configuration(CPU), torch.randint(0, 40, (500,))
    place = Place(torch.device("cpu"), torch.float32, {"text": text})
    found = short_runs.train(place, run, seed=0)
    assert found == short_runs.train(place, run, seed=0)
    assert (
        3.0 < found.loss < 8.2
    )  # log 40 = 3.7 is what these tokens hold; log 4096 = 8.3 is the start
    assert 1.0 <= found.imbalance <= 4.0  # E/k at most
