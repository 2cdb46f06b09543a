"""From a corpus to shards: split, tokenise in several processes, write, and go on after an interruption (chapter 13).

A prepared directory:
    tokenizer.json                   the tokenizer, trained here or copied in
    train/, validation/              shard_*.bin and manifest.json each
    prepare.json                     what was asked for and how far it is
Documents are cut into chunks in their order, chunks are encoded by any number of processes, and their results are
written in the chunks' order: the bytes do not depend on the number of processes nor on interruptions.
"""

import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from gptoss.data.atomic import remove_partial, write_atomically
from gptoss.data.corpora import Corpus, open_corpus
from gptoss.data.documents import is_validation
from gptoss.data.encoding import SPLITS, chunks, encode_chunks
from gptoss.data.manifest import FORMAT_VERSION, MANIFEST, read_manifest
from gptoss.data.progress import ByteProgress
from gptoss.data.retrieval import retrieval_words
from gptoss.data.shards import ShardWriter
from gptoss.data.tokenizers import Tokenizer, train_tokenizer

COMMIT_BYTES = 16 << 20
STATE = "prepare.json"
TOKENIZER = "tokenizer.json"
LOCK = ".lock"


class PreparedDataset(NamedTuple):
    """Where a prepared corpus lies; validation is None when no document fell into it."""

    train: Path
    validation: Path | None
    tokenizer: Path


def prepare(
    source: str | Path | Sequence[str | Path],
    out_dir: str | Path,
    *,
    tokenizer: Tokenizer | str | Path | None = None,
    vocab_size: int = 32_768,
    val_fraction: float = 0.005,
    processes: int = 1,
    shard_tokens: int = 50_000_000,
    column: str = "text",
    tokenizer_bytes: int = 64 << 20,
    retrieval_names: bool = False,
    progress: bool | None = None,
) -> PreparedDataset:
    """Turn a corpus into shards of token ids, documents ended by the EOS token.

    Called again with the same arguments it continues where it was interrupted, and returns at once when it is done.
    The same input gives the same bytes whatever the number of processes.

    The 8-billion-token run of the production preset reads FineWeb-Edu's 10-billion-token sample (ODC-By 1.0), column
    "text", with LLaMA-3's tokenizer (128,000 tokens and 256 special ones; vocab_size becomes 128256) or one trained here:
        gptoss prepare hf:HuggingFaceFW/fineweb-edu:sample-10BT data/fineweb-edu --vocab-size 128000 --processes 16
        gptoss pretrain --config pretrain_a100_502m --set data.train_data_path=data/fineweb-edu/train

    Args:
        source: what `open_corpus` takes: "stdlib", "package:NAME", "hf:NAME:CONFIG", a folder, a file, a glob, a list.
        out_dir: made if missing; where it lies inside a source, what it holds is not read.
        tokenizer: a Tokenizer or the path of any tokenizer.json; None trains one on a sample of the training documents.
        vocab_size: of the tokenizer to train.
        val_fraction: share of documents held out, chosen by a hash of the document's key (its file's name, the first
            one of equal files, or a row's text); 0 for none.
        processes: that tokenise; 1 stays in this one.
        shard_tokens: tokens in each shard but the last.
        column: the field with the text in JSONL, Parquet and Hugging Face datasets.
        tokenizer_bytes: how much text at most the tokenizer is trained on.
        retrieval_names: also train the tokenizer on the passkey lines' words, so that each name is one token.
        progress: a bar on stderr; None shows one when stderr is a terminal.

    Returns:
        (train directory, validation directory or None, tokenizer.json).

    Raises:
        ValueError: bad arguments, an empty corpus, a directory that holds something else or that another process is
            preparing.
        OSError: the disk is full or cannot be written; the message names the file, and a second call continues.

    Source: chapter 13.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction = {val_fraction}: must lie in [0, 1)")
    for name, value in (("processes", processes), ("tokenizer_bytes", tokenizer_bytes)):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be positive")
    out = Path(out_dir)
    if out.is_dir() and not (out / STATE).exists() and any(map(_is_foreign, out.iterdir())):
        raise ValueError(f"{out}: holds other files; choose an empty or a new directory")
    corpus = open_corpus(source, column, leave_out=out)
    given = Tokenizer.load(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    settings = {
        "source": corpus.name,
        "fingerprint": corpus.fingerprint,
        "tokenizer": given.sha256 if given else "trained here",
        "eos_token": given.eos_token if given else None,
        "vocab_size": given.vocab_size if given else vocab_size,
        "tokenizer_bytes": None if given else tokenizer_bytes,
        "retrieval_names": None if given else retrieval_names,
        "val_fraction": val_fraction,
        "shard_tokens": shard_tokens,
        "format_version": FORMAT_VERSION,
    }
    out.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(out / LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise ValueError(
            f"{out}: another process is preparing this directory; wait for it or choose another"
        ) from error
    try:
        return _prepare_locked(corpus, out, settings, given, processes, progress)
    except ValueError:
        _remove_unless_committed(out)
        raise
    finally:
        lock.release()


def _prepare_locked(
    corpus: Corpus,
    out: Path,
    settings: dict[str, Any],
    given: Tokenizer | None,
    processes: int,
    progress: bool | None,
) -> PreparedDataset:
    for name in (STATE, TOKENIZER):
        remove_partial(out, name)
    state = _read_state(out / STATE, settings)
    if not state.get("done"):
        if "cursor" not in state:
            _write_state(out, settings, corpus)
        with ByteProgress(corpus.size_bytes, progress) as bar:
            tokenizer = _tokenizer(corpus, out, settings, given, state, bar, processes > 1)
            _write_shards(corpus, out, settings, tokenizer, state, processes, bar)
    read_manifest(out / "train")
    validation: Path | None = out / "validation"
    if not (out / "validation" / MANIFEST).is_file():
        validation = None
        if settings["val_fraction"]:
            warnings.warn(
                f"{out}: no document fell into validation at val_fraction = {settings['val_fraction']}; "
                "raise it or give more documents",
                stacklevel=4,
            )
    return PreparedDataset(out / "train", validation, out / TOKENIZER)


def _tokenizer(
    corpus: Corpus,
    out: Path,
    settings: dict[str, Any],
    given: Tokenizer | None,
    state: dict[str, Any],
    bar: ByteProgress,
    threads: bool,
) -> Tokenizer:
    path = out / TOKENIZER
    if "cursor" in state:
        return Tokenizer.load(path, settings["eos_token"])
    if given is not None:
        given.save(path)
        return given
    bar.stage("tokenizer")
    texts = _sample(corpus, settings, bar)
    tokenizer = train_tokenizer(texts, settings["vocab_size"], threads=threads)
    tokenizer.save(path)
    return tokenizer


def _sample(corpus: Corpus, settings: dict[str, Any], bar: ByteProgress) -> Iterator[str]:
    """Texts of training documents, tokenizer_bytes at most, spread over the corpus where its size is known."""
    limit, size = settings["tokenizer_bytes"], corpus.size_bytes
    share = 1.0 if size is None else min(1.0, limit / max(1, size))
    if settings["retrieval_names"]:
        yield from retrieval_words()
    read = 0
    for text in _training_texts(corpus, settings["val_fraction"], share):
        data = text.encode("utf-8", errors="surrogatepass")
        fits = read + len(data) <= limit
        yield text if fits else data[: limit - read].decode("utf-8", errors="ignore")
        read += len(data)
        bar.advance(len(data))
        if read >= limit:
            return


def _training_texts(corpus: Corpus, val_fraction: float, share: float) -> Iterator[str]:
    """A share of the training documents, chosen by their hash; all of them where none has such a hash."""
    found = False
    for document in corpus.read(None):
        held_out = is_validation(document.key, val_fraction)
        if not held_out and (share == 1.0 or is_validation(f"sample {document.key}", share)):
            found = found or bool(document.text)
            yield document.text
    if not found and share < 1.0:
        yield from _training_texts(corpus, val_fraction, 1.0)


def _write_shards(
    corpus: Corpus,
    out: Path,
    settings: dict[str, Any],
    tokenizer: Tokenizer,
    state: dict[str, Any],
    processes: int,
    bar: ByteProgress,
) -> None:
    nothing = {"shards": [], "open_tokens": 0, "documents": 0, "text_bytes": 0}
    writers = {
        split: ShardWriter(
            out / split,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_token_id,
            shard_tokens=settings["shard_tokens"],
            tokenizer_sha256=tokenizer.sha256,
            state=state.get(split, nothing),
        )
        for split in SPLITS
    }
    bar.stage("tokens")
    bar.advance(sum(writer.text_bytes for writer in writers.values()))
    uncommitted = 0
    todo = chunks(corpus.read(state.get("cursor")), settings["val_fraction"])
    for chunk, parts in encode_chunks(todo, tokenizer, processes):
        for split, part in parts.items():
            writers[split].write(part.ids, part.documents, part.text_bytes)
            bar.advance(part.text_bytes)
            uncommitted += part.text_bytes
        if uncommitted >= COMMIT_BYTES:
            committed = {split: writer.commit() for split, writer in writers.items()}
            _write_state(out, settings, corpus, cursor=chunk.cursor, **committed)
            uncommitted = 0
    if not writers["train"].total_tokens:
        _write_state(out, settings, corpus)  # nothing here is worth going on from
        raise ValueError(
            f"{corpus.name}: no text for training: the corpus is empty or all of it fell into validation "
            f"(val_fraction = {settings['val_fraction']}); give more text"
        )
    for writer in writers.values():
        if writer.total_tokens:
            writer.close()
        else:
            writer.directory.rmdir()
    _write_state(out, settings, corpus, done=True)


def _is_foreign(path: Path) -> bool:
    return path.name != LOCK and not path.name.startswith(f".{STATE}.")


def _write_state(out: Path, settings: dict[str, Any], corpus: Corpus, **more: Any) -> None:
    content = {"settings": settings, "about": corpus.about, **more}
    write_atomically(out / STATE, (json.dumps(content, indent=2) + "\n").encode())


def _read_state(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an earlier call left, {} if none.

    Raises:
        ValueError: it was asked for something else.
    """
    if not path.exists():
        return {}
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        before = state["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged; delete {path.parent} and prepare again") from error
    for key, value in settings.items():
        if before.get(key) != value:
            what = {  # hashes, which would tell a reader nothing
                "fingerprint": "from files that have changed since, or by another rule for the split",
                "tokenizer": "with another tokenizer",
            }.get(key, f"from {key} = {before.get(key)!r}, now asked for {value!r}")
            raise ValueError(
                f"{path.parent}: was prepared {what}; choose another directory or delete this one"
            )
    return state


def _remove_unless_committed(out: Path) -> None:
    """Bad input leaves nothing behind, unless an earlier part of the work was committed."""
    try:
        state = json.loads((out / STATE).read_text())
    except (OSError, ValueError):
        return
    if "cursor" in state or "done" in state:
        return
    for split in SPLITS:
        shutil.rmtree(out / split, ignore_errors=True)
    for name in (TOKENIZER, STATE, LOCK):
        (out / name).unlink(missing_ok=True)
    if not any(out.iterdir()):
        out.rmdir()
