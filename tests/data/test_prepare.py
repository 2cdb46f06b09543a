"""Preparing a corpus: the same bytes by any number of processes and after any interruption."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest

from gptoss.data import encoding
from gptoss.data import prepare as module
from gptoss.data.corpora import stdlib_files
from gptoss.data.loader import PretrainDataset
from gptoss.data.manifest import read_manifest, verify_shards
from gptoss.data.prepare import prepare
from gptoss.data.tokenizers import Tokenizer, train_tokenizer

SETTINGS = {"vocab_size": 400, "val_fraction": 0.2, "shard_tokens": 700}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """60 small documents with every kind of awkward text."""
    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["def", "return", "naïve", "日本", "x1", "\u2028", "<|endoftext|>", "  ", "\n", "2026"]
    for i in range(60):
        text = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 80)))
        (root / f"{i:02d}.txt").write_text(text)
    (root / "empty.txt").write_text("")
    return root


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", 300)
    monkeypatch.setattr(module, "COMMIT_BYTES", 600)


def contents(out):
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(Path(out).rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def prepared(corpus, tmp_path):
    return prepare(corpus, tmp_path / "prepared", **SETTINGS)


def test_the_tokens_are_the_documents_each_with_its_end(corpus, prepared):
    tokenizer = Tokenizer.load(prepared.tokenizer)
    documents = {"train": [], "validation": []}
    for split, path in (("train", prepared.train), ("validation", prepared.validation)):
        manifest = verify_shards(path)
        assert manifest.tokenizer_sha256 == tokenizer.sha256
        dataset = PretrainDataset(path, 1)
        stream = dataset.tokens(0, manifest.total_tokens).tolist()
        assert stream[-1] == tokenizer.eos_token_id
        text = [[]]
        for token in stream[:-1]:
            if token == tokenizer.eos_token_id:
                text.append([])
            else:
                text[-1].append(token)
        documents[split] = [tokenizer.decode(ids) for ids in text]
        assert manifest.documents == len(documents[split])
        assert manifest.text_bytes == sum(len(t.encode()) for t in documents[split])
    files = {path.name: path.read_text() for path in sorted(corpus.glob("[0-9]*.txt"))}
    held_out = [name for name in files if encoding.is_validation(name, 0.2)]
    assert documents["validation"] == [files[name] for name in held_out]
    assert documents["train"] == [files[name] for name in files if name not in held_out]
    assert read_manifest(prepared.train).shard_count > 2


def test_any_number_of_processes_writes_the_same_bytes(corpus, prepared, tmp_path):
    other = prepare(corpus, tmp_path / "two", **SETTINGS, processes=2)
    assert contents(other.train.parent) == contents(prepared.train.parent)


def test_chunking_does_not_show_in_the_bytes(corpus, prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK_CHARACTERS", 10**6)
    other = prepare(corpus, tmp_path / "large", **SETTINGS)
    assert contents(other.train.parent) == contents(prepared.train.parent)


def test_a_second_call_returns_at_once(corpus, prepared, monkeypatch):
    monkeypatch.setattr(module, "_write_shards", None)  # would raise
    assert prepare(corpus, prepared.train.parent, **SETTINGS) == prepared


class Stop(Exception):
    pass


@pytest.mark.parametrize("calls", [1, 2, 5, 13])
def test_interrupted_at_any_write_it_goes_on_to_the_same_bytes(
    corpus, prepared, tmp_path, monkeypatch, calls
):
    """Stops at the n-th write to any file of shards, again and again until it gets through."""
    out = tmp_path / "broken"
    real = module.ShardWriter.write
    for _ in range(100):
        left = [calls]

        def write(self, *args, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise Stop
            real(self, *args)

        monkeypatch.setattr(module.ShardWriter, "write", write)
        try:
            prepare(corpus, out, **SETTINGS)
            break
        except Stop:
            # with few writes between stops no commit is reached, so allow more each time
            calls += 1
    else:
        pytest.fail("never finished")
    assert contents(out) == contents(prepared.train.parent)


def test_a_continued_call_does_not_encode_again_what_is_committed(corpus, tmp_path, monkeypatch):
    seen = []
    real = encoding.encode_chunk

    def encode(tokenizer, texts):
        seen.extend(text for some in texts.values() for text in some)
        if len(seen) == stop_after:
            raise Stop
        return real(tokenizer, texts)

    monkeypatch.setattr(encoding, "encode_chunk", encode)
    monkeypatch.setattr(module, "COMMIT_BYTES", 1)
    monkeypatch.setattr(encoding, "CHUNK_DOCUMENTS", 1)
    stop_after = 30
    with pytest.raises(Stop):
        prepare(corpus, tmp_path / "out", **SETTINGS)
    stop_after = None
    prepare(corpus, tmp_path / "out", **SETTINGS)
    assert len(seen) == 60 + 1  # the one that was under way comes twice


def prepare_and_die(corpus, out, calls_left):
    """In a child: SIGKILL itself at the n-th fsync or rename, before it or after it."""
    left = [calls_left]

    def deadly(call):
        def counted(*args):
            for half in (0, 1):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if not half:
                    call(*args)

        return counted

    os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
    prepare(corpus, out, **SETTINGS)


def test_kill_9_at_any_moment_loses_nothing(corpus, prepared, tmp_path):
    rng = random.Random(0)
    fork = multiprocessing.get_context("fork")  # a child of its own, which starts at once
    kills = 0
    for trial in range(12):
        out = tmp_path / f"out{trial}"
        for _ in range(3):
            moment = rng.randrange(1, 200)
            child = fork.Process(target=prepare_and_die, args=(corpus, out, moment))
            child.start()
            child.join(60)
            assert child.exitcode in (0, -signal.SIGKILL)
            kills += child.exitcode != 0
        prepare(corpus, out, **SETTINGS)
        assert contents(out) == contents(prepared.train.parent)
    assert kills >= 20


@pytest.mark.parametrize("room", [1, 600, 1500, 3000])
def test_a_full_disk_is_told_and_a_second_call_goes_on(
    corpus, prepared, tmp_path, monkeypatch, room
):
    """Files take `room` bytes in all, then writes fail as they do on a full disk."""
    left = [room]

    class FullDisk:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            left[0] -= len(data)
            if left[0] < 0:
                self.file.write(data[: len(data) // 2])
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    def open_(path, mode="r", *args, **kwargs):
        file = open(path, mode, *args, **kwargs)  # noqa: SIM115 # the writer closes it
        return FullDisk(file) if "r" not in mode else file

    with monkeypatch.context() as patch:
        patch.setattr("gptoss.data.shards.open", open_, raising=False)
        with pytest.raises(OSError, match=r"No space left on device: .*shard_0000\d\.bin"):
            prepare(corpus, tmp_path / "out", **SETTINGS)
    for split in ("train", "validation"):
        assert not (tmp_path / "out" / split / "manifest.json").exists()
    with pytest.raises(FileNotFoundError, match="gptoss prepare"):
        read_manifest(tmp_path / "out" / "train")
    prepare(corpus, tmp_path / "out", **SETTINGS)
    assert contents(tmp_path / "out") == contents(prepared.train.parent)


def test_a_real_file_system_of_one_megabyte(corpus, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        text = tmp_path / "text"
        text.mkdir()
        for i in range(40):
            (text / f"{i}.txt").write_text(f"{i} " + "abcdefghij 0123456789\n" * 4000)
        tokenizer = train_tokenizer(["abcdefghij"], 260)
        with pytest.raises(OSError, match="No space left on device"):
            prepare(text, place / "out", tokenizer=tokenizer)
        assert not (place / "out" / "train" / "manifest.json").exists()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_other_settings_or_changed_files_are_refused(corpus, prepared, tmp_path):
    out = prepared.train.parent
    with pytest.raises(ValueError, match="was prepared from vocab_size = 400, now asked for 500"):
        prepare(corpus, out, **(SETTINGS | {"vocab_size": 500}))
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    first = prepare(copy, tmp_path / "copied", **SETTINGS)
    (copy / "00.txt").write_text("changed its length")
    with pytest.raises(ValueError, match="files that have changed since") as changed:
        prepare(copy, first.train.parent, **SETTINGS)
    other = train_tokenizer(["x"], 257)
    with pytest.raises(
        ValueError, match="was prepared with another tokenizer; choose"
    ) as tokenizer:
        prepare(corpus, out, tokenizer=other, val_fraction=0.2, shard_tokens=700)
    for error in (changed, tokenizer):
        assert "delete this one" in str(error.value)
        assert "now asked for" not in str(error.value)  # a hash tells a reader nothing


@pytest.mark.parametrize("source", ["", "**/*"])
def test_a_directory_inside_its_own_source_is_not_read(corpus, tmp_path, source):
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    source, out = f"{copy}/{source}", copy / "data" / "mine"
    outside = prepare(source, tmp_path / "outside", **SETTINGS)
    first = prepare(source, out, **SETTINGS)
    assert prepare(source, out, **SETTINGS) == first
    assert contents(out) == contents(outside.train.parent)


def test_a_folder_prepared_into_itself_is_refused(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    with pytest.raises(ValueError, match="holds other files; choose an empty or a new directory"):
        prepare(copy, copy, **SETTINGS)


def test_a_directory_with_other_files_is_left_alone(corpus, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        prepare(corpus, tmp_path, **SETTINGS)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_two_at_once_in_one_directory_are_refused(corpus, tmp_path):
    filelock = pytest.importorskip("filelock")
    (tmp_path / "out").mkdir()
    with (
        filelock.FileLock(tmp_path / "out" / ".lock"),
        pytest.raises(ValueError, match="another process is preparing this directory"),
    ):
        prepare(corpus, tmp_path / "out", **SETTINGS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 100}, "vocab_size = 100: expected at least 257"),
        ({"val_fraction": 1.0}, "val_fraction = 1.0"),
        ({"processes": 0}, "processes = 0"),
        ({"shard_tokens": 0}, "shard_tokens = 0"),
        ({"tokenizer_bytes": 0}, "tokenizer_bytes = 0"),
        ({"val_fraction": 0.9999999, "tokenizer": "given"}, "all of it fell into validation"),
    ],
)
def test_bad_arguments_leave_nothing_behind(corpus, tmp_path, wrong, message):
    if "tokenizer" in wrong:
        wrong = wrong | {"tokenizer": train_tokenizer(["x"], 257)}
    with pytest.raises(ValueError, match=message):
        prepare(corpus, tmp_path / "out", **(SETTINGS | wrong))
    assert not (tmp_path / "out").exists()


def test_no_document_in_validation_is_a_warning(tmp_path):
    (tmp_path / "only.txt").write_text("a single text")
    with pytest.warns(UserWarning, match="no document fell into validation"):
        result = prepare(tmp_path / "only.txt", tmp_path / "out", vocab_size=257, val_fraction=0.01)
    assert result.validation is None
    assert not (tmp_path / "out" / "validation").exists()
    silent = prepare(tmp_path / "only.txt", tmp_path / "out2", vocab_size=257, val_fraction=0)
    assert silent.validation is None


def test_a_given_tokenizer_is_copied_beside_its_shards(corpus, tmp_path):
    tokenizer = train_tokenizer(["some other text"], 280)
    tokenizer.save(tmp_path / "mine.json")
    result = prepare(corpus, tmp_path / "out", tokenizer=tmp_path / "mine.json", val_fraction=0)
    assert Tokenizer.load(result.tokenizer).sha256 == tokenizer.sha256
    assert read_manifest(result.train).tokenizer_sha256 == tokenizer.sha256


def test_a_wide_vocabulary_is_written_as_uint32(corpus, tmp_path):
    import tokenizers

    base = json.loads(train_tokenizer(["x"], 257).backend.to_str())
    base["model"]["vocab"]["zzz"] = 200_018
    backend = tokenizers.Tokenizer.from_str(json.dumps(base))
    backend.add_tokens(["naïve"])
    result = prepare(corpus, tmp_path / "out", tokenizer=Tokenizer(backend), val_fraction=0)
    manifest = verify_shards(result.train)
    assert manifest.dtype == "uint32"
    assert manifest.vocab_size >= 200_019


def test_special_tokens_in_the_text_do_not_end_documents(corpus, prepared):
    manifest = read_manifest(prepared.train)
    stream = PretrainDataset(prepared.train, 1).tokens(0, manifest.total_tokens)
    assert (stream == manifest.eos_token_id).sum() == manifest.documents


def test_no_text_is_on_both_sides_of_the_split(tmp_path):
    """30 texts under two names each, and the names alone would put many of them on both sides."""
    names = {
        f"{copy}{i:02d}.txt": f"text number {i:02d}\n"
        for copy in ("first", "second")
        for i in range(30)
    }
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    out = prepare(tmp_path, tmp_path / "out", vocab_size=300, val_fraction=0.5)
    tokenizer = Tokenizer.load(out.tokenizer)
    sides = []
    for path in (out.train, out.validation):
        manifest = read_manifest(path)
        stream = PretrainDataset(path, 1).tokens(0, manifest.total_tokens).tolist()
        ends = [-1, *(i for i, token in enumerate(stream) if token == tokenizer.eos_token_id)]
        sides.append([tokenizer.decode(stream[a + 1 : b]) for a, b in pairwise(ends)])
    train, validation = sides
    assert sorted(train + validation) == sorted(names.values())
    assert not set(train) & set(validation)
    held_out = {
        text for name, text in names.items() if name < "s" and encoding.is_validation(name, 0.5)
    }
    assert set(validation) == held_out  # on the side of the first name


def test_the_tokenizer_never_sees_validation_text(tmp_path):
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text("common words here\n" * 3)
    held_out = next(f"{i}.txt" for i in range(50) if encoding.is_validation(f"{i}.txt", 0.2))
    (tmp_path / held_out).write_text("qqqqzzzz " * 999)
    result = prepare(tmp_path, tmp_path / "out", vocab_size=300, val_fraction=0.2)
    assert len(Tokenizer.load(result.tokenizer).encode("qqqqzzzz")) == 8


def test_the_bar_is_silent_when_nobody_watches_and_shows_when_asked(corpus, tmp_path, capfd):
    prepare(corpus, tmp_path / "quiet", **SETTINGS)
    assert capfd.readouterr() == ("", "")
    prepare(corpus, tmp_path / "loud", **SETTINGS, progress=True)
    assert "tokens" in capfd.readouterr().err


class Timed:
    """The library's tokenizer, with the processor time that its encoding takes."""

    def __init__(self, backend):
        self.__dict__.update(backend=backend, seconds=0.0)

    def encode_batch_fast(self, *args, **kwargs):
        start = time.process_time()
        encoded = self.backend.encode_batch_fast(*args, **kwargs)
        self.__dict__["seconds"] += time.process_time() - start
        return encoded

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def __setattr__(self, name, value):
        setattr(self.backend, name, value)


def test_preparing_keeps_four_fifths_of_the_librarys_own_throughput(tmp_path, monkeypatch):
    """The library's share of one run's processor time; measured apart, a busy machine would blur it."""
    monkeypatch.undo()
    text = tmp_path / "text"
    text.mkdir()
    for number, (_, path) in enumerate(stdlib_files()[:80]):
        shutil.copy(path, text / f"{number:03d}.py")
    samples = [path.read_text() for path in sorted(text.iterdir())[:20]]
    tokenizer = train_tokenizer(samples, 2048)
    tokenizer.backend = Timed(tokenizer.backend)
    start = time.process_time()
    prepare(text, tmp_path / "out", tokenizer=tokenizer, val_fraction=0.05)
    assert tokenizer.backend.seconds / (time.process_time() - start) >= 0.8


def test_where_no_document_falls_into_the_sample_the_first_ones_train_the_tokenizer(tmp_path):
    """Three files of 20 kB and a sample of one part in 60: their hashes leave all of them out."""
    untaken = (f"{i}.txt" for i in range(50) if not encoding.is_validation(f"sample {i}.txt", 0.02))
    for name, word in zip(sorted(next(untaken) for _ in range(3)), "abc", strict=True):
        (tmp_path / name).write_text(f"{word}{word}{word} " * 5000)
    settings = {"tokenizer_bytes": 1000, "val_fraction": 0.0, "retrieval_names": False}
    corpus = module.open_corpus(tmp_path)
    (text,) = module._sample(corpus, settings, module.ByteProgress(None, False))
    assert text == "aaa " * 250
    prepare(tmp_path, tmp_path / "out", vocab_size=300, tokenizer_bytes=1000, val_fraction=0)


def test_the_tokenizers_text_is_limited_in_bytes_whatever_the_script(tmp_path):
    taken = next(f"{i}.txt" for i in range(50) if encoding.is_validation(f"sample {i}.txt", 0.6))
    (tmp_path / taken).write_text("日本語" * 700)  # 2,100 characters of three bytes
    settings = {"tokenizer_bytes": 4000, "val_fraction": 0.0, "retrieval_names": False}
    corpus = module.open_corpus(tmp_path)
    (text,) = module._sample(corpus, settings, module.ByteProgress(None, False))
    assert text == "日本語" * 444 + "日"  # 3,999 bytes: the last whole character
