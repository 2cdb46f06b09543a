"""Results written by the copy engine: the same numbers as by threads, and nothing outside a run's rows and columns."""

from dataclasses import replace

import pytest
import torch
from expert_cases import FLOAT32, RAGGED, relative_error, stacks
from torch import Tensor

from gptoss.kernels.expert_tiles import tile_table
from gptoss.kernels.grouped_rows import grouped_rows, swiglu_derivative_kept
from gptoss.kernels.reference import grouped_linear_reference, grouped_swiglu_reference
from gptoss.kernels.swiglu_persistent import swiglu_derivative_recomputed, swiglu_persistent
from gptoss.kernels.tuning import INTERPRETER, Tiles

THREADS = INTERPRETER["derivative"]
COUNTS = [RAGGED, (33, 0, 0, 0), (0, 0, 0, 1), (16, 0, 16, 32)]


@pytest.fixture(autouse=True)
def nan_where_nothing_was_written():
    """torch.empty comes filled with NaN, so an element that a kernel left out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=[1, 2, 4], ids=lambda pieces: f"{pieces}_pieces")
def tiles(request) -> Tiles:
    return replace(THREADS, pieces=request.param, engine_stores=True)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("ffn", [128, 200, 36])
def test_derivative_equals_the_one_that_threads_store(counts, ffn: int, tiles: Tiles) -> None:
    n, rows = sum(counts), torch.tensor(counts)
    w2 = stacks(len(counts), 40, ffn)[2]
    d_y, gate_up, weights = torch.randn(n, 40), torch.randn(n, 2 * ffn), torch.rand(n)
    table = tile_table(rows, n, tiles.m)
    threads = replace(tiles, engine_stores=False)
    found = swiglu_derivative_kept(d_y, table, w2, gate_up, weights, tiles)
    truth = swiglu_derivative_kept(d_y, table, w2, gate_up, weights, threads)
    for a, b in zip(found, truth, strict=True):
        assert torch.equal(a, b)  # the same arithmetic; NaN fails too


def derivative_oracle(d_y, counts, w2, gate_up, weights) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden = grouped_linear_reference(d_y.double(), counts, w2.double().transpose(1, 2))
    gate, up = (t.double().requires_grad_() for t in gate_up.chunk(2, 1))
    weight = weights.double().requires_grad_()
    hidden = torch.nn.functional.silu(gate) * up * weight[:, None]
    d_gate, d_up, d_weight = torch.autograd.grad(hidden, (gate, up, weight), d_hidden)
    return torch.cat((d_gate, d_up), 1), hidden.detach(), d_weight


def test_derivative_equals_the_oracle(tiles: Tiles) -> None:
    counts, ffn = torch.tensor(RAGGED), 200
    n, w2 = int(counts.sum()), stacks(4, 40, ffn)[2]
    args = (torch.randn(n, 40), w2, torch.randn(n, 2 * ffn), torch.rand(n))
    d_y, _, gate_up, weights = args
    found = swiglu_derivative_kept(d_y, tile_table(counts, n, tiles.m), w2, gate_up, weights, tiles)
    truth = derivative_oracle(d_y, counts, w2, gate_up, weights)
    for a, b in zip((*found[:2], found[2].sum(0)), truth, strict=True):
        assert relative_error(a, b) <= FLOAT32


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("ffn", [128, 200, 36])
def test_forward_equals_the_oracle_and_keeps_gate_and_up(counts, ffn: int, tiles: Tiles) -> None:
    n, rows = sum(counts), torch.tensor(counts)
    w1, w3, _ = stacks(len(counts), 40, ffn)
    x = torch.randn(n, 40)
    table = tile_table(rows, n, tiles.m)
    hidden, gate_up = swiglu_persistent(x, table, w1, w3, tiles, keep=True)
    assert gate_up is not None
    assert (
        relative_error(hidden, grouped_swiglu_reference(x.double(), rows, w1.double(), w3.double()))
        <= FLOAT32
    )
    for side, w in zip(gate_up.chunk(2, 1), (w1, w3), strict=True):
        assert relative_error(side, grouped_linear_reference(x, rows, w)) <= FLOAT32


def test_recomputed_derivative_equals_the_one_that_threads_store(tiles: Tiles) -> None:
    counts = torch.tensor(RAGGED)
    n, (w1, w3, _) = int(counts.sum()), stacks(4, 40, 200)
    d_hidden, x, weights = torch.randn(n, 200), torch.randn(n, 40), torch.rand(n)
    table = tile_table(counts, n, tiles.m)
    found, truth = (
        swiglu_derivative_recomputed(d_hidden, x, table, w1, w3, t, row_weights=weights)
        for t in (tiles, replace(tiles, engine_stores=False))
    )
    for a, b in zip(found, truth, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_times_weights_equal_the_oracle(transposed: bool, tiles: Tiles) -> None:
    counts = torch.tensor(RAGGED)
    n, w2 = int(counts.sum()), stacks(4, 200, 40)[2]  # (E, 200, 40)
    a = torch.randn(n, 40 if transposed else 200)
    found = grouped_rows(a, tile_table(counts, n, tiles.m), (w2,), tiles, transposed=transposed)
    by = w2 if transposed else w2.transpose(1, 2)
    assert relative_error(found, grouped_linear_reference(a, counts, by)) <= FLOAT32


@pytest.mark.parametrize("sides", [1, 2])
def test_guards_around_a_run_stay_untouched(sides: int, monkeypatch, tiles: Tiles) -> None:
    # The results lie inside a larger allocation of NaN: rows before and behind them, and nothing may leak there.
    # The runs of experts 0 and 2 are left out of the table, so their rows are guards as well.
    counts, ffn, guard = torch.tensor([5, 17, 3, 20]), 36, 4
    n = int(counts.sum())
    w1, w3, w2 = stacks(4, 40, ffn)
    table = tile_table(counts, n, tiles.m)
    used = int(table.used)
    keep = [i for i in range(used) if table.expert[i] in (1, 3)]
    for column in (table.expert, table.row, table.end):
        column[: len(keep)] = column[keep]
    table.used[0] = len(keep)
    wholes = []
    new_empty, empty_like = Tensor.new_empty, torch.empty_like

    def guarded(rows: int, columns: int) -> Tensor:
        wholes.append(torch.full((rows + 2 * guard, columns), float("nan")))
        return wholes[-1][guard : guard + rows]

    monkeypatch.setattr(
        Tensor, "new_empty", lambda t, *s, **k: guarded(*s) if len(s) == 2 else new_empty(t, *s, **k)
    )  # fmt: skip
    monkeypatch.setattr(torch, "empty_like", lambda t, **k: guarded(*t.shape))
    if sides == 1:
        grouped_rows(torch.randn(n, ffn), table, (w2,), tiles, transposed=True)
    else:
        swiglu_persistent(torch.randn(n, 40), table, w1, w3, tiles, keep=True)
        d_y, gate_up = torch.randn(n, 40), torch.randn(n, 2 * ffn)
        swiglu_derivative_kept(d_y, table, w2, gate_up, torch.rand(n), tiles)
    monkeypatch.undo()
    del empty_like
    mine = torch.zeros(n + 2 * guard, dtype=torch.bool)
    mine[guard + 5 : guard + 22] = mine[guard + 25 : guard + 45] = True
    assert len(wholes) == (1 if sides == 1 else 4)
    for whole in wholes:
        assert not whole[mine].isnan().any()
        assert whole[~mine].isnan().all()
