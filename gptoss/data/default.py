"""The data of a run that names no shards: a built-in corpus, prepared once and kept in the user's cache (chapter 13)."""

import shutil
from pathlib import Path

import filelock
import platformdirs

from gptoss.config import DataConfig
from gptoss.data.corpora import open_corpus
from gptoss.data.manifest import FORMAT_VERSION, MANIFEST, read_manifest
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
    """The training and validation shards and the tokenizer of a run.

    With train_data_path set, the paths that the configuration names; missing ones are looked for where `prepare` puts
    them, beside the training shards. Otherwise `corpus` (sources separated by commas) is prepared into the cache: one in
    twenty files held out, a tokenizer of vocab_size trained on at most 8 MiB of the rest, everything tokenised. Several
    processes may ask at once: one works, the others wait. A damaged cache is made again.

    Args:
        config_data: the run's data section.
        vocab_size: of the tokenizer to train, where the configuration names none.
        cache_dir: None is the user's cache directory (platformdirs: ~/.cache/gptoss on Linux).
        progress: as `prepare`.

    Returns:
        (train directory, validation directory or None, tokenizer.json).

    Raises:
        ValueError, OSError: as `prepare`; neither train_data_path nor corpus; a tokenizer that is not there.

    Source: chapters 13 and 17.
    """
    if config_data.train_data_path is not None:
        return _named_dataset(config_data)
    if config_data.corpus is None:
        raise ValueError(
            "DataConfig names neither train_data_path nor corpus: give a directory of shards, or corpus: stdlib"
        )
    sources = [part.strip() for part in config_data.corpus.split(",")]
    corpus = open_corpus(sources)
    tokenizer = Tokenizer.load(config_data.tokenizer) if config_data.tokenizer else None
    names = config_data.retrieval_share > 0
    what = tokenizer.sha256[:12] if tokenizer else f"{vocab_size}{'n' if names else ''}"
    label = "+".join(source.removeprefix("package:") for source in sources)[:80]
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


def _named_dataset(config_data: DataConfig) -> PreparedDataset:
    train = Path(config_data.train_data_path or "")
    if (train / "train" / MANIFEST).is_file():
        train = train / "train"
    manifest = read_manifest(train)
    beside = train.parent / "validation"
    if config_data.validation_data_path is not None:
        validation: Path | None = Path(config_data.validation_data_path)
        read_manifest(config_data.validation_data_path)
    else:
        validation = beside if train.name == "train" and (beside / MANIFEST).is_file() else None
    named = (
        Path(config_data.tokenizer) if config_data.tokenizer else train.parent / "tokenizer.json"
    )
    if not named.exists():
        raise FileNotFoundError(
            f"no tokenizer at {named}: set data.tokenizer to the tokenizer.json that {train} was written with"
        )
    tokenizer = Tokenizer.load(named)
    if manifest.tokenizer_sha256 and manifest.tokenizer_sha256 != tokenizer.sha256:
        raise ValueError(
            f"{train} was written with another tokenizer than {named}; name the right one"
        )
    return PreparedDataset(train, validation, named)
