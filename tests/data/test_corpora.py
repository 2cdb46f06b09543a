"""Corpora: found by name in the same order everywhere, read a document at a time, taken up again anywhere."""

import json
import sysconfig
import tracemalloc
from pathlib import Path

import pytest

from gptoss.data.corpora import open_corpus, package_licence, stdlib_files
from gptoss.data.documents import PIECE_BYTES, is_validation


def texts(corpus, cursor=None):
    return [document.text for document in corpus.read(cursor)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "corpus"
    for name, text in {
        "b.txt": "second",
        "a.py": "first = 1\n",
        "sub/c.md": "third",
        "empty.txt": "",
        "picture.png": "no text",
        ".git/config.txt": "hidden",
        "__pycache__/x.py": "built",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_folder_is_read_by_name_without_hidden_built_or_foreign_files(folder):
    corpus = open_corpus(folder)
    assert texts(corpus) == ["first = 1\n", "second", "third"]
    assert [d.key for d in corpus.read(None)] == ["a.py", "b.txt", "sub/c.md"]
    assert corpus.size_bytes == 21


def test_globs_and_single_files(folder):
    assert texts(open_corpus(f"{folder}/*.txt")) == ["second"]
    assert texts(open_corpus(f"{folder}/**/*.md")) == ["third"]
    assert texts(open_corpus(folder / "b.txt")) == ["second"]


def test_several_sources_follow_each_other(folder):
    corpus = open_corpus([folder / "b.txt", folder / "a.py"])
    assert texts(corpus) == ["second", "first = 1\n"]
    assert corpus.size_bytes == 16


def test_a_byte_that_is_not_utf8_becomes_the_replacement_sign(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9!")
    assert texts(open_corpus(tmp_path)) == ["caf\ufffd!"]


def test_the_standard_library_comes_without_tests_and_packages():
    files = stdlib_files()
    names = [name for name, _ in files]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "lib2to3", "idlelib"}
    root = Path(sysconfig.get_paths()["stdlib"])
    assert all(path.is_relative_to(root) for _, path in files)
    held_out = [name for name in names if is_validation(name, 0.05)]
    assert 0.02 < len(held_out) / len(names) < 0.09


def test_an_installed_package_is_its_sources_and_states_its_licence():
    corpus = open_corpus("package:yaml")
    keys = [d.key for d in corpus.read(None)]
    assert "yaml/loader.py" in keys
    (about,) = corpus.about
    assert about["licence"].startswith("MIT")
    assert about["files"] == len(keys)
    assert package_licence("no_such_package") == {"version": "", "licence": ""}


def test_the_split_of_a_file_does_not_change_with_the_others():
    # computed once with blake2b: these do not move between machines and versions
    assert is_validation("a.py", 0.9) == (int.from_bytes(_blake("a.py"), "big") / 2**64 < 0.9)
    assert not is_validation("a.py", 0.0)
    share = sum(is_validation(f"file{i}.py", 0.2) for i in range(5000)) / 5000
    assert 0.18 < share < 0.22  # standard deviation 0.0057


def _blake(key):
    import hashlib

    return hashlib.blake2b(key.encode(), digest_size=8).digest()


def test_jsonl_reads_the_named_field(tmp_path):
    write_jsonl(
        tmp_path / "a.jsonl", [{"text": "one", "body": "uno"}, {"text": "zwei\n", "body": ""}]
    )
    assert texts(open_corpus(tmp_path)) == ["one", "zwei\n"]
    assert texts(open_corpus(tmp_path, column="body")) == ["uno", ""]


def test_equal_rows_fall_on_the_same_side_of_the_split(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "same"}, {"text": "other"}, {"text": "same"}])
    keys = [d.key for d in open_corpus(tmp_path).read(None)]
    assert keys[0] == keys[2] != keys[1]


def test_equal_files_have_the_key_of_the_first_and_the_others_keep_their_names(tmp_path):
    for name, text in {"a": "one", "b": "two", "c": "one", "d": "three", "e": "one"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    keys = ["a.txt", "b.txt", "a.txt", "d.txt", "a.txt"]
    assert [d.key for d in open_corpus(tmp_path).read(None)] == keys
    reader = open_corpus(tmp_path).read(None)
    next(reader), next(reader)
    continued = open_corpus(tmp_path).read(reader.cursor())
    assert [d.key for d in continued] == keys[2:]


def test_equal_files_of_two_sources_have_one_key(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"{place}.py").write_text("pass\n")
    keys = [d.key for d in open_corpus([tmp_path / "one", tmp_path / "two"]).read(None)]
    assert keys == ["one.py", "one.py"]
    assert [d.key for d in open_corpus(tmp_path / "two").read(None)] == ["two.py"]


def test_the_pieces_of_equal_large_files_have_keys_in_pairs(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(f"line {i}\n" for i in range(PIECE_BYTES // 8)))
    keys = [d.key for d in open_corpus(tmp_path).read(None)]
    assert keys == ["a.txt", "a.txt#1", "a.txt", "a.txt#1"]


def test_only_text_files_of_one_size_are_compared(tmp_path):
    """Rows have keys of their own, so that no Parquet file of gigabytes is read for nothing."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": "same"}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "same"}])
    (tmp_path / "c.txt").write_text("long enough")
    (tmp_path / "d.txt").write_text("short")
    corpus = open_corpus(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptoss.data.equal_files._digest", None)  # would raise
        assert [d.key for d in corpus.read(None)][2:] == ["c.txt", "d.txt"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl, line 2: not JSON"),
        ('{"body": "x"}', r"a\.jsonl, line 2: expected text in the field 'text'; it has body"),
        ('{"text": 3}', r"a\.jsonl, line 2: expected text"),
        ("[1]", r"a\.jsonl, line 2: expected text .* it has list"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        texts(open_corpus(tmp_path))


def write_parquet(path, rows, **more):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": rows, "id": list(range(len(rows)))}), path, **more)


def test_parquet_reads_the_named_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one", "zwei", "日本"], row_group_size=2)
    assert texts(open_corpus(tmp_path)) == ["one", "zwei", "日本"]
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'body'; it has text, id"):
        texts(open_corpus(tmp_path, column="body"))
    with pytest.raises(ValueError, match="expected text in the field 'id'"):
        texts(open_corpus(tmp_path, column="id"))
    (tmp_path / "a.parquet").write_bytes(b"PAR0 nothing")
    with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file"):
        texts(open_corpus(tmp_path))


def test_a_hugging_face_dataset_is_streamed_by_the_same_loader(tmp_path):
    pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [f"row {i}" for i in range(50)]
    for part in range(2):
        write_parquet(tmp_path / f"train-{part}.parquet", rows[25 * part : 25 * part + 25])
    corpus = open_corpus(f"hf:{tmp_path}")
    assert texts(corpus) == rows
    assert corpus.size_bytes is None
    with pytest.raises(ValueError, match="expected text in the field 'body'; it has text, id"):
        texts(open_corpus(f"hf:{tmp_path}", column="body"))
    with pytest.raises(ValueError, match=r"hf:.*: cannot be opened"):
        texts(open_corpus(f"hf:{tmp_path}/nothing"))


@pytest.mark.parametrize("kind", ["text", "long text", "jsonl", "parquet", "hf", "several"])
def test_a_reader_goes_on_behind_any_document(tmp_path, kind):
    rows = [f"document {i}" for i in range(12)]
    source = tmp_path
    if kind in ("text", "several"):
        for i, row in enumerate(rows):
            (tmp_path / f"{i:02d}.txt").write_text(row)
    if kind == "long text":
        (tmp_path / "a.txt").write_text("line\n" * (PIECE_BYTES // 2))
        (tmp_path / "b.txt").write_text("end")
    if kind == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", [{"text": row} for row in rows[:5]])
        write_jsonl(tmp_path / "b.jsonl", [{"text": row} for row in rows[5:]])
    if kind in ("parquet", "hf"):
        write_parquet(tmp_path / "a.parquet", rows[:5], row_group_size=2)
        write_parquet(tmp_path / "b.parquet", rows[5:])
    if kind == "hf":
        pytest.importorskip("datasets", reason="datasets is not installed")
        source = f"hf:{tmp_path}"
    if kind == "several":
        source = [tmp_path / f"{i:02d}.txt" for i in range(12)]
    corpus = open_corpus(source)
    whole = texts(corpus)
    assert len(whole) == (4 if kind == "long text" else 12)
    for stop in range(len(whole) + 1):
        reader = corpus.read(None)
        before = [next(reader).text for _ in range(stop)]
        cursor = json.loads(json.dumps(reader.cursor()))
        assert before + texts(corpus, cursor) == whole


def test_a_large_text_file_comes_in_pieces_cut_at_lines(tmp_path):
    line = "0123456789" * 10 + "\n"
    (tmp_path / "large.txt").write_text(line * 30_000)  # 3.03 MB
    pieces = texts(open_corpus(tmp_path))
    assert "".join(pieces) == line * 30_000
    assert len(pieces) == 3
    assert all(piece.endswith("\n") for piece in pieces)
    assert len({d.key for d in open_corpus(tmp_path).read(None)}) == 3


@pytest.mark.parametrize("character", ["é", "日", "🙂"])
def test_a_line_longer_than_a_piece_is_cut_between_characters(tmp_path, character):
    for before in range(len(character.encode())):
        text = "x" * before + character * (5 * PIECE_BYTES // len(character.encode()))
        (tmp_path / "line.txt").write_text(text)
        pieces = texts(open_corpus(tmp_path))
        assert len(pieces) == 3
        assert "".join(pieces) == text


def test_bytes_that_are_not_utf8_do_not_lengthen_a_piece(tmp_path):
    """At a line's end, where nothing is cut, and beyond the three bytes that may belong to a character."""
    line = b"x" * (PIECE_BYTES + 9) + b"\n"
    (tmp_path / "a.txt").write_bytes(line + b"\x80" * (3 * PIECE_BYTES))
    assert [len(piece) for piece in texts(open_corpus(tmp_path))] == [
        len(line),
        2 * PIECE_BYTES + 3,
        PIECE_BYTES - 3,
    ]


def test_reading_keeps_one_piece_in_memory(tmp_path):
    (tmp_path / "large.txt").write_text("0123456789\n" * 3_000_000)  # 33 MB
    write_jsonl(tmp_path / "rows.jsonl", ({"text": "x" * 1000} for _ in range(10_000)))
    tracemalloc.start()
    count = sum(len(document.text) for document in open_corpus(tmp_path).read(None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 43_000_000
    assert peak < 12 * PIECE_BYTES


def test_the_fingerprint_follows_names_and_sizes(folder):
    before = open_corpus(folder).fingerprint
    assert open_corpus(folder).fingerprint == before
    assert open_corpus(folder, column="body").fingerprint != before
    (folder / "b.txt").write_text("second!")
    assert open_corpus(folder).fingerprint != before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:no_such_package", "no installed package of that name"),
        ("package:../x", "no installed package of that name"),
        ("nowhere/at/all", "no such file or folder"),
        ("*.nothing", "nothing to read"),
        ([], "no source of text was given"),
        ("", 'a source is blank: expected "stdlib", a folder, a file'),
        (["stdlib", " "], "a source is blank"),
    ],
)
def test_what_cannot_be_found_is_said_in_one_line(source, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_corpus(source)
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="nothing to read"):
        open_corpus(tmp_path)
