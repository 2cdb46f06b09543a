"""The table of a step's growth: on the CPU on every machine, its counts those of the formulas, its failures rows."""

import dataclasses
import time
import warnings

import pytest
import torch

from gptoss.bench import scaling
from gptoss.bench.evidence import check_evidence
from gptoss.bench.scaling import SETTINGS, Setting
from gptoss.training.provenance import machine

SMALL = Setting("experts", batch=1, seq_len=16)


def test_each_setting_is_a_row_whose_numbers_belong_together():
    few = (dataclasses.replace(SMALL, experts=2), dataclasses.replace(SMALL, experts=4, dispatch="grouped_mm"))  # fmt: skip
    table = scaling.measure(few, rounds=2, commit="test")
    check_evidence(table, "scaling")
    assert [(row["experts"], row["dispatch"]) for row in table["rows"]] == [(2, "stacked"), (4, "grouped_mm")]  # fmt: skip
    for row in table["rows"]:
        assert 0 < row["update_ms"] < row["ms"]
        assert row["tokens_per_s"] == pytest.approx(16 / row["ms"] * 1e3, rel=0.01)
        assert row["factor"] == pytest.approx(row["ms"] / row["floor_ms"], rel=0.02)
        assert row["state_mib"] == pytest.approx(16 * row["parameters"] / 2**20, abs=0.06)
        assert not {"compile_s", "error"} & set(row)
    # two more experts in each of 4 layers: 3 matrices of 128 x 128, and a router's row of 128 each
    first, second = table["rows"]
    assert second["parameters"] - first["parameters"] == 4 * 2 * (3 * 128 * 128 + 128)


def test_more_experts_cost_flops_in_the_router_alone_and_more_active_ones_three_matrices():
    wide = dataclasses.replace(SMALL, experts=16)
    more = dataclasses.replace(SMALL, active=4)
    base, wider, taking = scaling.measure((SMALL, wide, more), rounds=1, commit="test")["rows"]
    router = 6 * 16 * 4 * 8 * 128  # 6 FLOPs, 16 tokens, 4 layers, 8 more rows of 128
    matrices = 6 * 16 * 4 * 2 * 3 * 128 * 128  # 2 more experts of three matrices
    assert (wider["gflop"] - base["gflop"]) * 1e9 == pytest.approx(router, abs=1e6)
    assert (taking["gflop"] - base["gflop"]) * 1e9 == pytest.approx(matrices, abs=1e6)


def test_full_layers_cost_the_pairs_that_the_window_hides():
    long = Setting("length", batch=1, seq_len=128)
    full = dataclasses.replace(long, attention="full")
    windowed, every = scaling.measure((long, full), rounds=1, commit="test")["rows"]
    hidden = 64 * 65 // 2  # queries 64 to 127 lose 1, 2, ... 64 keys: a triangle
    assert 0.05 < windowed["products"] < 1
    assert windowed["operations"] > 1000
    more = 2 * 12 * 128 * hidden  # two windowed layers, 12 FLOPs a pair and number of a row
    assert (every["gflop"] - windowed["gflop"]) * 1e9 == pytest.approx(more, abs=1e6)


def test_the_machine_is_the_cpu_where_there_is_a_gpu_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert machine() == "one NVIDIA H200"
    assert machine(on_cpu=True).startswith("CPU, ")
    seen = []
    monkeypatch.setattr(scaling, "assemble", lambda run, world: seen.append(world.device.type) or 1 / 0)  # fmt: skip
    assert scaling.measure((SMALL,), rounds=1, commit="test")["machine"].startswith("CPU, ")
    assert seen == ["cpu"]


def test_a_setting_that_fails_is_a_row_with_its_reason_and_the_others_are_timed(monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("no C++\ncompiler")

    monkeypatch.setattr("gptoss.training.assembly.compile_blocks", no_compiler)
    compiled = Setting("compile", compiled=True, batch=1, seq_len=16)
    eager = dataclasses.replace(compiled, compiled=False)
    broken, timed = scaling.measure((compiled, eager), rounds=1, commit="test")["rows"]
    assert broken == {**dataclasses.asdict(compiled), "error": "no C++ compiler"}
    assert timed["ms"] > 0


def test_a_compiled_step_says_how_long_it_took_to_compile(monkeypatch):
    def slow_at_first(model, *_):
        first, forward = iter([True]), model.blocks[0].forward

        def forwards(*arguments):
            if next(first, False):
                time.sleep(0.5)
            return forward(*arguments)

        model.blocks[0].forward = forwards

    monkeypatch.setattr("gptoss.training.assembly.compile_blocks", slow_at_first)
    compiled = Setting("compile", compiled=True, batch=1, seq_len=16)
    (row,) = scaling.measure((compiled,), rounds=2, commit="test")["rows"]
    assert 0.4 <= row["compile_s"] < 5
    assert row["ms"] < 400


def test_the_table_asks_each_question_with_the_rest_held_still():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a table that starts by warning of its own settings
        for setting in SETTINGS:
            built = scaling._architecture(setting, scaling.load_config("tiny").model)
            assert built.moe_dispatch == setting.dispatch
    assert len(set(SETTINGS)) == len(SETTINGS)
    lengths = [s for s in SETTINGS if s.series == "length"]
    assert {s.batch for s in lengths} == {1}
    assert max(s.seq_len for s in lengths) == 4096
    tables = [s for s in SETTINGS if s.series == "experts" and s.dispatch == "stacked"]
    assert {s.experts for s in tables if s.active == 2} == {2, 4, 8, 16}
    assert {s.active for s in tables if s.experts == 8} == {1, 2, 4}
    assert {s.batch * s.seq_len for s in tables} == {1024}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 0}, "at least 1"),
        ({"settings": ()}, "at least 1"),
        ({"settings": (Setting("length", seq_len=0),)}, "at least 1"),
        ({"settings": (Setting("length", attention="none"),)}, "alternating or full"),
        ({"settings": (Setting("experts", experts=2, active=4),)}, "n_activated_experts"),
    ],
)
def test_nothing_to_time_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        scaling.measure(**wrong)
