"""Shards and their manifest: exact bytes, no wrap, clear errors, and nothing half-written."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from gptoss.data.manifest import dtype_for_vocabulary, read_manifest, verify_shards
from gptoss.data.shards import ShardWriter


def write(directory, ids, vocab_size=100, shard_tokens=4, **more):
    with ShardWriter(
        directory, vocab_size=vocab_size, eos_token_id=0, shard_tokens=shard_tokens, **more
    ) as writer:
        writer.write(ids)
    return directory


def edit_manifest(directory, **changes):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_bytes_and_manifest_are_exactly_these(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5, 99], tokenizer_sha256="abc")
    first, second = bytes([1, 0, 2, 0, 3, 0, 4, 0]), bytes([5, 0, 99, 0])
    assert (tmp_path / "shard_00000.bin").read_bytes() == first
    assert (tmp_path / "shard_00001.bin").read_bytes() == second
    assert json.loads((tmp_path / "manifest.json").read_text()) == {
        "dtype": "uint16",
        "vocab_size": 100,
        "eos_token_id": 0,
        "total_tokens": 6,
        "shard_count": 2,
        "shards": [
            {"name": "shard_00000.bin", "tokens": 4, "sha256": hashlib.sha256(first).hexdigest()},
            {"name": "shard_00001.bin", "tokens": 2, "sha256": hashlib.sha256(second).hexdigest()},
        ],
        "tokenizer_sha256": "abc",
        "documents": 0,
        "text_bytes": 0,
        "format_version": 1,
    }
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "shard_00000.bin", "shard_00001.bin"]


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "last"),
    [(65_536, "uint16", 65_535), (65_537, "uint32", 65_536), (200_019, "uint32", 200_018)],
)
def test_dtype_follows_the_vocabulary_and_the_last_id_survives(tmp_path, vocab_size, dtype, last):
    assert dtype_for_vocabulary(vocab_size) == dtype
    write(tmp_path, [0, last], vocab_size)
    manifest = verify_shards(tmp_path)
    assert manifest.dtype == dtype
    data = (tmp_path / "shard_00000.bin").read_bytes()
    width = len(data) // 2
    assert int.from_bytes(data[width:], "little") == last


@pytest.mark.parametrize(
    ("vocab_size", "bad"), [(65_536, 65_536), (65_536, -1), (100, 100), (200_019, 200_019)]
)
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path, vocab_size, bad):
    with pytest.raises(ValueError, match=f"token id {bad} is outside"):
        write(tmp_path, [1, bad], vocab_size)
    assert not (tmp_path / "manifest.json").exists()


def test_float_ids_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected integers"):
        write(tmp_path, np.array([1.0, 2.0]))


def test_an_exception_leaves_no_manifest(tmp_path):
    writer = ShardWriter(tmp_path, vocab_size=9, eos_token_id=0, shard_tokens=2)

    def fail_midway():
        with writer:
            writer.write([1, 2, 3])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_midway()
    assert not (tmp_path / "manifest.json").exists()
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json"):
        read_manifest(tmp_path)


def test_writing_nothing_or_over_finished_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no token was written"):
        write(tmp_path / "a", [])
    write(tmp_path / "b", [1])
    with pytest.raises(ValueError, match="already holds shards"):
        write(tmp_path / "b", [1])


@pytest.mark.parametrize("committed", [0, 1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("lost", [0, 1, 4, 9])
def test_going_on_from_a_commit_gives_the_same_bytes(tmp_path, committed, lost):
    ids = np.arange(1, 21)
    whole = write(tmp_path / "whole", ids)
    kept = {"vocab_size": 100, "eos_token_id": 0, "shard_tokens": 4}
    broken = ShardWriter(tmp_path / "broken", **kept)
    broken.write(ids[:committed])
    state = json.loads(json.dumps(broken.commit()))
    broken.write(ids[committed : committed + lost])
    if broken._file is not None:
        broken._file.flush()  # the lost tokens reach the disk, but no commit does
    with ShardWriter(tmp_path / "broken", **kept, state=state) as writer:
        assert writer.total_tokens == committed
        writer.write(ids[committed:])
    for name in os.listdir(whole):
        assert (whole / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()
    assert sorted(os.listdir(whole)) == sorted(os.listdir(tmp_path / "broken"))


def test_going_on_behind_a_finished_manifest_reopens_the_last_shard(tmp_path):
    kept = {"vocab_size": 100, "eos_token_id": 0, "shard_tokens": 4}
    writer = ShardWriter(tmp_path, **kept)
    writer.write([1, 2, 3, 4, 5])
    state = writer.commit()
    writer.close()
    with ShardWriter(tmp_path, **kept, state=state) as again:
        again.write([6, 7, 8, 9])
    assert verify_shards(tmp_path).total_tokens == 9


def test_going_on_without_the_earlier_bytes_names_the_file(tmp_path):
    kept = {"vocab_size": 100, "eos_token_id": 0, "shard_tokens": 4}
    writer = ShardWriter(tmp_path, **kept)
    writer.write([1, 2, 3, 4, 5, 6])
    state = writer.commit()
    os.truncate(tmp_path / ".shard_00001.bin.partial", 2)
    with pytest.raises(ValueError, match=r"shard_00001\.bin\.partial: shorter"):
        ShardWriter(tmp_path, **kept, state=state)
    os.truncate(tmp_path / "shard_00000.bin", 2)
    with pytest.raises(ValueError, match=r"shard_00000\.bin: missing or of another size"):
        ShardWriter(tmp_path, **kept, state=state)


def cut_odd(d):
    os.truncate(d / "shard_00001.bin", 3)


def cut_even(d):
    os.truncate(d / "shard_00001.bin", 2)


def empty(d):
    os.truncate(d / "shard_00001.bin", 0)


def remove(d):
    (d / "shard_00001.bin").unlink()


def remove_all(d):
    for path in d.glob("shard_*.bin"):
        path.unlink()


def stray(d):
    (d / "shard_00007.bin").write_bytes(b"\0\0")


FAULTS = [
    (cut_odd, r"shard_00001\.bin: 3 bytes is no whole number of uint16 tokens"),
    (cut_even, r"shard_00001\.bin: holds 1 tokens, but .*manifest\.json says 2"),
    (empty, r"shard_00001\.bin: empty shard"),
    (remove, r"shard_00001\.bin: missing"),
    (remove_all, r"no shard_\*\.bin here"),
    (stray, r"shard_00007\.bin: not listed"),
    (lambda d: edit_manifest(d, total_tokens=7), "total_tokens says 7, but the files hold 6"),
    (lambda d: edit_manifest(d, shard_count=3), "shard_count says 3, but the files hold 2"),
    (lambda d: edit_manifest(d, dtype="uint32"), r"shard_00000\.bin: holds 2 tokens"),
    (lambda d: edit_manifest(d, dtype=["uint16"]), "expected one of uint16, uint32"),
    (lambda d: edit_manifest(d, dtype="int64"), "dtype = 'int64': expected one of uint16, uint32"),
    (lambda d: edit_manifest(d, vocab_size=70_000), "70000 does not fit into uint16"),
    (lambda d: edit_manifest(d, vocab_size="x"), "vocab_size = 'x': expected an integer"),
    (lambda d: edit_manifest(d, eos_token_id=100), "eos_token_id = 100 is outside"),
    (lambda d: edit_manifest(d, format_version=2), "format_version = 2"),
    (lambda d: edit_manifest(d, shards=[{"x": 1}]), "shards: expected name, tokens and sha256"),
    (lambda d: (d / "manifest.json").write_text("{"), r"manifest\.json: not JSON"),
    (lambda d: (d / "manifest.json").write_text("{}"), "expected the keys dtype"),
    (lambda d: (d / "manifest.json").unlink(), r"no manifest\.json here"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_directory_that_is_wrong_is_refused_with_its_file_named(tmp_path, fault, message):
    write(tmp_path, [1, 2, 3, 4, 5, 6])
    read_manifest(tmp_path)
    fault(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_or_missing_directory_says_how_to_make_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no shard_\*\.bin and no manifest"):
        read_manifest(tmp_path)
    with pytest.raises(FileNotFoundError, match="gptoss prepare"):
        read_manifest(tmp_path / "nowhere")


def test_a_manifest_with_the_five_documented_keys_is_enough(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5, 6])
    five = {"dtype": "uint16", "vocab_size": 100, "eos_token_id": 0}
    five |= {"total_tokens": 6, "shard_count": 2}
    (tmp_path / "manifest.json").write_text(json.dumps(five))
    assert [shard.tokens for shard in verify_shards(tmp_path).shards] == [4, 2]


def test_verify_finds_a_flipped_bit_and_a_foreign_id(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5, 6])
    path = tmp_path / "shard_00001.bin"
    path.write_bytes(bytes([4, 0, 6, 0]))
    read_manifest(tmp_path)  # names and sizes are right
    with pytest.raises(ValueError, match=r"shard_00001\.bin: its checksum"):
        verify_shards(tmp_path)
    path.write_bytes(bytes([5, 0, 100, 0]))
    with pytest.raises(
        ValueError, match=r"shard_00001\.bin: token 1 is id 100, .* vocab_size is 100"
    ):
        verify_shards(tmp_path)


FILL_THE_DISK = """
import resource, signal, sys
from gptoss.data.shards import ShardWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    with ShardWriter(sys.argv[1], vocab_size=9, eos_token_id=0, shard_tokens=10**7) as writer:
        for _ in range(100):
            writer.write([1] * 100_000)
except OSError as error:
    print(error)
"""


def test_a_disk_that_takes_no_more_names_the_file_and_leaves_no_manifest(tmp_path):
    pytest.importorskip("resource", reason="resource limits are a Unix matter")
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "File too large" in done.stdout
    assert "shard_00000.bin" in done.stdout
    assert not (tmp_path / "manifest.json").exists()
