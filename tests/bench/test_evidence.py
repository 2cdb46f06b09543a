import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptoss.bench.evidence import (
    check_evidence,
    evidence_folder,
    format_table,
    keep_evidence,
    load_evidence,
    make_evidence,
    prepare_folder,
    write_evidence,
)


def table() -> dict[str, Any]:
    return make_evidence(
        "speed",
        "How fast",
        {"who": "what was run", "ms": "time of a run in ms"},
        [{"who": "us", "ms": 1.5}, {"who": "them"}],
        command="gptoss bench speed",
        commit="abc1234",
    )


@pytest.mark.parametrize("path", sorted(evidence_folder().glob("*.json")), ids=lambda p: p.stem)
def test_every_evidence_file_follows_the_format(path: Path) -> None:
    check_evidence(json.loads(path.read_text()), path.stem)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = table()
    assert write_evidence(written, tmp_path / "new") == tmp_path / "new" / "speed.json"
    assert load_evidence("speed", tmp_path / "new") == written
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["speed.json"]


def test_a_missing_file_names_those_there_are(tmp_path: Path) -> None:
    write_evidence(table(), tmp_path)
    with pytest.raises(FileNotFoundError, match="there is: speed"):
        load_evidence("sped", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"commit": None}, "'commit' must be there"),
        ({"rows": []}, "no rows"),
        ({"rows": [{"tokens": 1}]}, "columns without a meaning: tokens"),
        ({"name": "other"}, "its file's name"),
        ({"date": "yesterday"}, "isoformat"),
    ],
)
def test_a_file_that_breaks_the_format_is_refused(change: dict[str, Any], words: str) -> None:
    evidence = copy.deepcopy(table()) | change
    with pytest.raises(ValueError, match=words):
        check_evidence(evidence, "speed")


@pytest.mark.parametrize("name", ["", "../speed", "speed.json", "a b", "-x"])
def test_a_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(ValueError, match=r"without \.json"):
        check_evidence(table() | {"name": name}, name)


def test_a_folder_that_cannot_take_the_evidence_is_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file: name a folder"):
        prepare_folder(tmp_path / "file")
    assert prepare_folder(tmp_path / "a" / "b").is_dir()
    assert prepare_folder(None) == evidence_folder()


@pytest.mark.parametrize(
    ("there", "new", "replace", "kept"),
    [
        ("one NVIDIA H200", "CPU, 2 cores, x86_64", False, "one NVIDIA H200"),
        ("one NVIDIA H200", "CPU, 2 cores, x86_64", True, "CPU, 2 cores, x86_64"),
        ("one NVIDIA H200", "one NVIDIA A100", False, "one NVIDIA A100"),
        ("CPU, 8 cores, arm64", "CPU, 2 cores, x86_64", False, "CPU, 2 cores, x86_64"),
    ],
)
def test_a_cpu_does_not_take_a_gpus_place_unasked(tmp_path, there, new, replace, kept) -> None:
    write_evidence(table() | {"machine": there}, tmp_path)
    line = keep_evidence(table() | {"machine": new}, tmp_path, replace=replace)
    assert load_evidence("speed", tmp_path)["machine"] == kept
    assert line.startswith("written" if kept == new else "not written")


def test_the_table_says_where_it_comes_from() -> None:
    text = format_table(table())
    assert "abc1234" in text
    assert "them  -" in text
    assert text.startswith("How fast\nwho   ms\n")


@pytest.mark.parametrize("there", [b"", b"<<<<<<< HEAD", b"[]", b"\xff", b'{"machine": 3}'])
def test_a_damaged_file_is_named_and_stays(tmp_path: Path, there: bytes) -> None:
    """It may be a GPU's, as with the marks of a merge in it."""
    path = tmp_path / "speed.json"
    path.write_bytes(there)
    with pytest.raises(ValueError, match="speed"):
        load_evidence("speed", tmp_path)
    line = keep_evidence(table() | {"machine": "CPU, 2 cores"}, tmp_path, replace=False)
    assert line.startswith("not written: ")
    assert "speed.json" in line
    assert path.read_bytes() == there
    assert keep_evidence(table(), tmp_path, replace=True).startswith("written")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "speed.json").mkdir()
    with pytest.raises(OSError, match=r"speed\.json"):
        write_evidence(table(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


def test_a_package_without_its_book_asks_for_a_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gptoss.bench.evidence.__file__", str(tmp_path / "a" / "b" / "c.py"))
    with pytest.raises(FileNotFoundError, match=r"book/evidence is missing.*--out"):
        prepare_folder(None)


def test_files_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    script = (
        "from gptoss.bench import evidence, kv_cache; from gptoss.config import list_configs, load_config; import sys\n"
        "for name in list_configs(): load_config(name)\n"
        "evidence.write_evidence(kv_cache.measure(), evidence.prepare_folder(evidence.Path(sys.argv[1])))\n"
        "evidence.load_evidence('kv_cache', evidence.Path(sys.argv[1]))"
    )
    odd = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # what is left is ASCII
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=os.environ | odd, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "·" in (tmp_path / "kv_cache.json").read_text(encoding="utf-8")
