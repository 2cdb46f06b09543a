"""Windows and batches: right tokens across shard edges, and a position that any run can take up again."""

import itertools
import os
import pickle

import numpy as np
import pytest
import torch

from gptoss.data.loader import PretrainDataset, batches
from gptoss.data.retrieval import RetrievalDataset
from gptoss.data.shards import ShardWriter
from gptoss.data.tokenizers import train_tokenizer


def shards(directory, ids, vocab_size=1000, shard_tokens=7, **more):
    with ShardWriter(
        directory, vocab_size=vocab_size, eos_token_id=0, shard_tokens=shard_tokens, **more
    ) as writer:
        writer.write(ids)
    return directory


def rows(iterator, count):
    return torch.cat([next(iterator)[0] for _ in range(count)])


def test_targets_are_the_inputs_one_later_across_shard_edges(tmp_path):
    dataset = PretrainDataset(shards(tmp_path, np.arange(1, 24)), max_seq_len=5)
    # 23 tokens: 4 windows of 5 need 21 with the last target; shards end after 7, 14 and 21
    assert len(dataset) == 4
    assert [dataset[i][0].tolist() for i in range(4)] == [
        [1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10],
        [11, 12, 13, 14, 15],
        [16, 17, 18, 19, 20],
    ]
    inputs, targets = dataset[1]
    assert targets.tolist() == [7, 8, 9, 10, 11]
    assert inputs.dtype == targets.dtype == torch.int64
    assert dataset.tokens(5, 22).tolist() == list(range(6, 23))  # three shards in one window


@pytest.mark.parametrize(("n_tokens", "windows"), [(6, 1), (10, 1), (11, 2), (16, 3)])
def test_the_last_window_needs_its_last_target(tmp_path, n_tokens, windows):
    assert len(PretrainDataset(shards(tmp_path, np.arange(n_tokens)), 5)) == windows


def test_a_stream_shorter_than_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="5 tokens make no window of max_seq_len = 5"):
        PretrainDataset(shards(tmp_path, np.arange(5)), 5)
    with pytest.raises(ValueError, match="max_seq_len = 0"):
        PretrainDataset(tmp_path, 0)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_outside_is_an_index_error(tmp_path, index):
    dataset = PretrainDataset(shards(tmp_path, np.arange(1, 24)), max_seq_len=5)
    with pytest.raises(IndexError, match=f"window {index}"):
        dataset[index]


def test_iterating_the_dataset_ends(tmp_path):
    dataset = PretrainDataset(shards(tmp_path, np.arange(1, 24)), max_seq_len=5)
    assert len(list(dataset)) == 4


def test_an_id_that_is_not_in_the_vocabulary_names_shard_and_place(tmp_path):
    shards(tmp_path, np.arange(1, 24))
    path = tmp_path / "shard_00001.bin"
    data = np.fromfile(path, "<u2")
    data[3] = 1000
    data.tofile(path)
    dataset = PretrainDataset(tmp_path, 5)
    dataset.window(0)
    with pytest.raises(ValueError, match=r"shard_00001\.bin: token 3 is id 1000, .* is 1000"):
        dataset.window(2)


def test_a_shard_that_shrinks_after_opening_is_named(tmp_path):
    dataset = PretrainDataset(shards(tmp_path, np.arange(1, 24)), 5)
    os.truncate(tmp_path / "shard_00001.bin", 6)
    with pytest.raises(ValueError, match=r"shard_00001\.bin: holds 3 tokens, but had 7"):
        dataset.window(1)


def test_large_ids_come_through(tmp_path):
    ids = [65_535, 65_536, 200_018, 0]
    assert PretrainDataset(shards(tmp_path, ids, 200_019), 3).window(0).tolist() == ids


def test_documents_are_told_apart_and_own_their_eos(tmp_path):
    ids = [5, 6, 0, 7, 0, 0, 8, 9, 4, 4, 4]
    dataset = PretrainDataset(shards(tmp_path, ids), 5)
    assert dataset.document_ids(0).tolist() == [0, 0, 0, 1, 1]
    assert dataset.document_ids(1).tolist() == [0, 1, 1, 1, 1]  # starts anew in each window


def test_pickling_carries_no_tokens(tmp_path):
    dataset = PretrainDataset(shards(tmp_path, np.arange(900), shard_tokens=10**6), 5)
    dataset.window(3)
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    assert pickle.loads(data).window(3).tolist() == dataset.window(3).tolist()


@pytest.fixture
def dataset(tmp_path):
    return PretrainDataset(shards(tmp_path, np.arange(1, 102)), 5)  # 20 windows


def test_an_epoch_visits_each_window_once_and_the_next_reshuffles(dataset):
    seen = rows(batches(dataset, 4, seed=3), 10)[:, 0]
    first, second = seen[:20].tolist(), seen[20:].tolist()
    assert sorted(first) == sorted(second) == list(range(1, 101, 5))
    assert first != second
    assert first == [5 * dataset.order(3, p) + 1 for p in range(20)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_holds_the_same_sequences_on_any_number_of_ranks(dataset, batch_size, world_size):
    """Steps of 48 sequences over 20 windows, so that steps cross epochs."""
    ranks = [
        batches(dataset, batch_size, seed=3, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    accumulation = 48 // (batch_size * world_size)
    for step in range(3):
        parts = [rows(rank, accumulation) for rank in ranks]
        got = sorted(torch.cat(parts)[:, 0].tolist())
        want = sorted(5 * dataset.order(3, 48 * step + i) + 1 for i in range(48))
        assert got == want
        assert all(rank.position == 48 * (step + 1) for rank in ranks)


@pytest.mark.parametrize("stop", range(0, 12, 3))
@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_position_goes_on_exactly(dataset, stop, workers):
    whole = rows(batches(dataset, 3, seed=1), 12)
    first = batches(dataset, 3, seed=1, num_workers=workers)
    before = [next(first)[0] for _ in range(stop)]
    second = batches(dataset, 3, seed=1, start=first.position, num_workers=workers and 1)
    assert torch.cat([*before, rows(second, 12 - stop)]).equal(whole)


def test_resuming_on_more_ranks_goes_on_with_the_same_steps(dataset):
    one = batches(dataset, 4, seed=5)
    rows(one, 3)
    ranks = [batches(dataset, 2, seed=5, start=one.position, rank=r, world_size=2) for r in (0, 1)]
    assert torch.cat([next(rank)[0] for rank in ranks]).equal(next(one)[0])


def test_seeking_skips_offending_data_and_goes_back(dataset):
    iterator = batches(dataset, 2, seed=1, num_workers=1)
    whole = rows(batches(dataset, 2, seed=1), 8)
    rows(iterator, 2)
    iterator.seek(10)
    assert iterator.position == 10
    assert next(iterator)[0].equal(whole[10:12])
    iterator.seek(2)
    assert next(iterator)[0].equal(whole[2:4])
    iterator.close()


def test_batches_leave_the_runs_random_numbers_alone(dataset):
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    for workers in (0, 1):
        next(batches(dataset, 2, seed=1, num_workers=workers))
    assert torch.rand(3).equal(want)


def test_shapes_and_shift(dataset):
    inputs, targets = next(batches(dataset, 3, seed=1))
    assert inputs.shape == targets.shape == (3, 5)
    assert inputs.dtype == torch.int64
    assert targets.equal(inputs + 1)  # the stream counts up


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"start": -1},
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"world_size": 0},
        {"num_workers": -1},
    ],
)
def test_arguments_out_of_range_are_named(dataset, wrong):
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"{name} = "):
        batches(dataset, **({"batch_size": 2, "seed": 1} | wrong))


def test_workers_read_the_same_retrieval_windows(tmp_path):
    tokenizer = train_tokenizer(["the text of a window"] * 9, 280)
    text = tokenizer.encode("the text of a window " * 2000)
    directory = shards(
        tmp_path, text, tokenizer.vocab_size, 10**6, tokenizer_sha256=tokenizer.sha256
    )
    mixed = RetrievalDataset(PretrainDataset(directory, 400), tokenizer, 0.5, 2, 1)
    alone, helped = batches(mixed, 4, seed=2), batches(mixed, 4, seed=2, num_workers=2)
    for a, b in itertools.islice(zip(alone, helped, strict=False), 8):
        assert a[0].equal(b[0])
        assert a[1].equal(b[1])
