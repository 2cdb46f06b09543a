"""The order of windows: a permutation for each epoch, computed from (seed, position) alone."""

import numpy as np
import pytest

from gptoss.data.order import permute, window_at


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize("key", [0, 1, -5, 2**70])
def test_every_index_comes_exactly_once(length, key):
    assert sorted(permute(i, length, key) for i in range(length)) == list(range(length))


def test_each_epoch_visits_every_window_in_another_order():
    epochs = [[window_at(7, e * 50 + i, 50) for i in range(50)] for e in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_another_seed_is_another_order():
    orders = {tuple(window_at(seed, i, 50) for i in range(50)) for seed in range(100)}
    assert len(orders) == 100


def test_neither_neighbours_nor_places_stick():
    """A uniform permutation of n has one fixed point and one kept neighbour on average."""
    n, seeds = 200, 100
    order = np.array([[window_at(s, i, n) for i in range(n)] for s in range(seeds)])
    fixed = (order == np.arange(n)).sum() / seeds
    kept = (np.diff(order, axis=1) == 1).sum() / seeds
    # both are Poisson(1) a permutation: the mean of 100 has standard deviation 0.1
    assert 0.5 < fixed < 1.5
    assert 0.5 < kept < 1.5
    # each place's mean window is (n-1)/2, with standard error n/sqrt(12·seeds) = 5.8: 5 sigma
    assert np.abs(order.mean(axis=0) - (n - 1) / 2).max() < 29


def test_a_huge_dataset_costs_no_memory():
    assert 0 <= window_at(1, 10**15 + 3, 10**12) < 10**12


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_is_refused(index):
    with pytest.raises(ValueError, match="0 <= index < length = 5"):
        permute(index, 5, 0)
