"""The default corpus: prepared once, by one process of many, and made again when it is damaged."""

import multiprocessing

import pytest

from gptoss.config import DataConfig
from gptoss.data import corpora
from gptoss.data.corpora import open_corpus
from gptoss.data.default import default_dataset
from gptoss.data.documents import is_validation
from gptoss.data.manifest import verify_shards
from gptoss.data.tokenizers import Tokenizer


@pytest.fixture
def small_stdlib(monkeypatch):
    """A few modules, one of them held out, stand for the whole library."""
    everything = corpora.stdlib_files()
    held_out = [file for file in everything if is_validation(file[0], 0.05)]
    files = [*(file for file in everything if file[0].startswith("json/")), held_out[0]]
    monkeypatch.setattr(corpora, "stdlib_files", lambda: files)


def test_the_first_call_prepares_and_the_second_finds(small_stdlib, tmp_path, monkeypatch):
    first = default_dataset(DataConfig(corpus="stdlib"), 400, tmp_path)
    assert verify_shards(first.train).vocab_size == 400
    assert verify_shards(first.validation).total_tokens > 0
    assert Tokenizer.load(first.tokenizer).vocab_size == 400
    stamp = (first.train / "manifest.json").stat().st_mtime_ns
    assert default_dataset(DataConfig(corpus="stdlib"), 400, tmp_path) == first
    assert (first.train / "manifest.json").stat().st_mtime_ns == stamp


def test_other_vocabularies_and_retrieval_have_places_of_their_own(small_stdlib, tmp_path):
    plain = default_dataset(DataConfig(corpus="stdlib"), 800, tmp_path)
    wider = default_dataset(DataConfig(corpus="stdlib"), 900, tmp_path)
    names = default_dataset(DataConfig(corpus="stdlib", retrieval_share=0.1), 800, tmp_path)
    assert len({plain.train, wider.train, names.train}) == 3
    assert len(Tokenizer.load(names.tokenizer).encode(" zephyr")) == 1
    assert len(Tokenizer.load(plain.tokenizer).encode(" zephyr")) > 1


def test_a_damaged_cache_is_made_again(small_stdlib, tmp_path):
    first = default_dataset(DataConfig(corpus="stdlib"), 400, tmp_path)
    before = (first.train / "shard_00000.bin").read_bytes()
    (first.train / "shard_00000.bin").unlink()
    default_dataset(DataConfig(corpus="stdlib"), 400, tmp_path)
    assert (first.train / "shard_00000.bin").read_bytes() == before
    (first.train.parent / "prepare.json").write_text("{")
    default_dataset(DataConfig(corpus="stdlib"), 400, tmp_path)
    assert (first.train / "shard_00000.bin").read_bytes() == before


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "my texts"
    place.mkdir()
    for i in range(120):  # of which a few are held out
        (place / f"{i}.txt").write_text(f"text number {i}\n")
    return place


def test_several_corpora_of_any_kind_are_prepared_inside_the_cache(folder, tmp_path):
    cache = tmp_path / "cache"
    both = default_dataset(DataConfig(corpus=f"package:yaml, {folder}"), 400, cache)
    assert both.train.is_relative_to(cache / "data")
    manifests = [verify_shards(path) for path in (both.train, both.validation)]
    everything = [*open_corpus("package:yaml").read(None), *open_corpus(folder).read(None)]
    assert sum(manifest.documents for manifest in manifests) == len(everything)
    alone = default_dataset(DataConfig(corpus=str(folder)), 400, cache)
    assert alone.train.is_relative_to(cache / "data")
    assert alone.train != both.train
    (folder / "0.txt").write_text("a text of another length")
    assert default_dataset(DataConfig(corpus=str(folder)), 400, cache).train != alone.train


def test_a_corpus_that_is_not_there_is_named_with_what_could_be(tmp_path):
    with pytest.raises(
        ValueError, match=r"data\.corpus = stdlib, stdlb: stdlb: .*stdlib, package:"
    ):
        default_dataset(DataConfig(corpus="stdlib, stdlb"), 400, tmp_path)
    with pytest.raises(ValueError, match=r"DataConfig\.corpus = 'stdlib,': must name a text"):
        DataConfig(corpus="stdlib,")


def test_no_corpus_says_what_to_set(tmp_path):
    with pytest.raises(ValueError, match=r"data\.train_data_path"):
        default_dataset(DataConfig(corpus=None), 400, tmp_path)


def test_bad_vocabulary_leaves_no_dataset_in_the_cache(small_stdlib, tmp_path):
    with pytest.raises(ValueError, match="vocab_size = 100"):
        default_dataset(DataConfig(corpus="stdlib"), 100, tmp_path)
    assert not list(tmp_path.rglob("manifest.json"))


def test_processes_that_ask_at_once_get_one_dataset(small_stdlib, tmp_path):
    config = DataConfig(corpus="stdlib")
    fork = multiprocessing.get_context("fork")  # keeps the small library
    runs = [
        fork.Process(target=default_dataset, args=(config, 400, tmp_path / "cache"))
        for _ in range(3)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert [run.exitcode for run in runs] == [0, 0, 0]
    alone = default_dataset(config, 400, tmp_path / "alone")
    shared = default_dataset(config, 400, tmp_path / "cache")
    assert verify_shards(shared.train) == verify_shards(alone.train)
