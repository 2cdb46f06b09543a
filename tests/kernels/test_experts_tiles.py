"""The tables made on the device: row tiles of every expert, and the stable order of token slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss.kernels.expert_order import order_by_expert
from gptoss.kernels.expert_tiles import tile_table


def test_tiles_of_ragged_runs_by_hand() -> None:
    table = tile_table(torch.tensor([0, 1, 15, 17, 0]), 33, 16)
    used = table.used.item()
    assert used == 4  # none, one, one, two, none
    assert table.expert[:used].tolist() == [1, 2, 3, 3]
    assert table.row[:used].tolist() == [0, 1, 16, 32]
    assert table.end[:used].tolist() == [1, 16, 33, 33]
    assert table.start.tolist() == [0, 0, 1, 16, 33]
    assert table.heavy_first.tolist() == [3, 2, 1, 0, 4]


def test_no_rows_at_all_use_no_tiles() -> None:
    assert tile_table(torch.zeros(3, dtype=torch.int64), 0, 16).used.item() == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=9), st.sampled_from([16, 24, 32]))
def test_tiles_cover_every_row_once_and_stay_in_their_run(counts: list[int], height: int) -> None:
    rows = sum(counts)
    table = tile_table(torch.tensor(counts, dtype=torch.int32), rows, height)
    used = table.used.item()
    assert used == sum(-(-n // height) for n in counts) <= table.bound
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    seen = torch.zeros(rows, dtype=torch.int64)
    for e, first, end in zip(*(t[:used].tolist() for t in (table.expert, table.row, table.end)), strict=True):  # fmt: skip
        mine = slice(first, min(first + height, end))
        assert (owner[mine] == e).all()
        seen[mine] += 1
    assert (seen == 1).all()
    heavy = table.heavy_first.tolist()
    assert heavy == sorted(range(len(counts)), key=lambda e: (-counts[e], e))


@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(1, 1, 1), (1, 2, 8), (300, 2, 8), (700, 3, 5), (257, 4, 33)]
)
def test_order_is_the_stable_sort(tokens: int, k: int, experts: int) -> None:
    indices = torch.randint(0, experts, (tokens, k))
    order, inverse, counts = order_by_expert(indices, experts)
    flat = indices.flatten()
    truth = flat.argsort(stable=True)
    assert torch.equal(order.long(), truth)
    assert torch.equal(inverse.long(), truth.argsort())
    assert torch.equal(counts.long(), torch.bincount(flat, minlength=experts))


def test_equal_rows_keep_their_order() -> None:
    order, _, counts = order_by_expert(torch.full((600, 2), 3), 8)  # more than one block of slots
    assert order.tolist() == list(range(1200))
    assert counts.tolist() == [0, 0, 0, 1200, 0, 0, 0, 0]


def test_no_tokens() -> None:
    order, inverse, counts = order_by_expert(torch.empty(0, 2, dtype=torch.int64), 4)
    assert order.numel() == inverse.numel() == 0
    assert counts.tolist() == [0, 0, 0, 0]
