"""The data of a run that names no shards: a corpus, prepared once and kept in the user's cache (chapter 13)."""

import re
import shutil
from pathlib import Path

import filelock
import platformdirs

from gptoss.config import DataConfig
from gptoss.data.corpora import open_corpus
from gptoss.data.manifest import FORMAT_VERSION
from gptoss.data.prepare import PreparedDataset, prepare
from gptoss.data.tokenizers import Tokenizer

VALIDATION_FRACTION = 0.05
TOKENIZER_BYTES = 8 << 20


def default_dataset(
    config_data: DataConfig,
    vocab_size: int,
    cache_dir: str | Path | None = None,
    progress: bool | None = None,
) -> PreparedDataset:
    """Prepare `corpus` once and return its shards and tokenizer, from the cache ever after.

    One in twenty documents is held out, a tokenizer of vocab_size is trained on at most 8 MiB of the rest, and all text
    is tokenised. Several processes may ask at once: one works, the others wait. A damaged cache is made again, and so is
    one whose files have other names or sizes now.

    Args:
        config_data: `corpus` is a source of `open_corpus`, or several separated by commas ("stdlib, package:sympy,
            texts/*.md"; a path with a comma in it is for `gptoss prepare`); `tokenizer` may name a
            tokenizer.json; a retrieval_share above 0 has the tokenizer learn the passkey lines' words.
        vocab_size: of the tokenizer to train, where the configuration names none.
        cache_dir: None is the user's cache directory (platformdirs: ~/.cache/gptoss on Linux).
        progress: as `prepare`.

    Returns:
        (train directory, validation directory or None, tokenizer.json).

    Raises:
        ValueError, OSError: as `prepare`; no corpus, or one that is not there; a tokenizer that is not there.

    Source: chapters 13 and 17.
    """
    if config_data.corpus is None:
        raise ValueError(
            "DataConfig.corpus = None: expected a corpus to prepare; set data.corpus=stdlib, or data.train_data_path"
        )
    sources = [part.strip() for part in config_data.corpus.split(",")]
    try:
        corpus = open_corpus(sources)
    except ValueError as error:
        raise ValueError(f"data.corpus = {config_data.corpus}: {error}") from error
    tokenizer = Tokenizer.load(config_data.tokenizer) if config_data.tokenizer else None
    names = config_data.retrieval_share > 0
    what = tokenizer.sha256[:12] if tokenizer else f"{vocab_size}{'n' if names else ''}"
    label = "+".join(_file_name(source.removeprefix("package:")) for source in sources)[:80]
    root = Path(cache_dir) if cache_dir else platformdirs.user_cache_path("gptoss")
    out = root / "data" / f"{label}-{what}-f{FORMAT_VERSION}-{corpus.fingerprint[:12]}"
    out.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{out}.lock"):
        for attempt in (1, 2):
            try:
                return prepare(
                    sources,
                    out,
                    tokenizer=tokenizer,
                    vocab_size=vocab_size,
                    val_fraction=VALIDATION_FRACTION,
                    tokenizer_bytes=TOKENIZER_BYTES,
                    retrieval_names=names,
                    progress=progress,
                )
            except (ValueError, FileNotFoundError):
                if attempt == 2 or not out.exists():
                    raise
                shutil.rmtree(out)
    raise AssertionError("the second attempt returns or raises")


def _file_name(source: str) -> str:
    """A source's name with what a file's name cannot hold, a path's slashes first of all, as hyphens."""
    return re.sub(r"[^\w.-]+", "-", source).strip("-")
