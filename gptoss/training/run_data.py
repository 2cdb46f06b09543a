"""The data of a run: what it trains on, what it is held against, and how text becomes tokens (chapters 13 and 17)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptoss.config import RunConfig
from gptoss.data.default import default_dataset
from gptoss.data.loader import PretrainDataset, SequenceSource
from gptoss.data.manifest import MANIFEST
from gptoss.data.retrieval import RetrievalDataset
from gptoss.data.tokenizers import Tokenizer
from gptoss.training.distributed import World

HELD_OUT_SHARE, HELD_OUT_AT_MOST = 0.01, 512


@dataclass(frozen=True)
class RunData:
    """`source` is what training reads: the training windows, with retrieval examples among them where asked for."""

    source: SequenceSource
    train: PretrainDataset
    validation: PretrainDataset
    tokenizer: Tokenizer | None

    def sizes(self) -> dict[str, int]:
        """How much text there is: tokens to train on and held out, and their bytes where the shards know them."""
        found: dict[str, int] = {}
        for name, dataset in (("training", self.train), ("held_out", self.validation)):
            if isinstance(
                dataset, FirstWindows | LastWindows
            ):  # a share of one folder, cut by windows
                found[f"{name}_tokens"] = len(dataset) * dataset.max_seq_len
                continue
            found[f"{name}_tokens"] = dataset.manifest.total_tokens
            if dataset.manifest.text_bytes:
                found[f"{name}_bytes"] = dataset.manifest.text_bytes
        return found


class FirstWindows(PretrainDataset):
    """A dataset without its last windows, which another holds out."""

    def __init__(self, data_path: str | Path, max_seq_len: int, held_out: int) -> None:
        self._held_out = 0
        super().__init__(data_path, max_seq_len)
        self._held_out = held_out

    def __len__(self) -> int:
        return super().__len__() - self._held_out


class LastWindows(PretrainDataset):
    """The last windows of a dataset."""

    def __init__(self, data_path: str | Path, max_seq_len: int, count: int) -> None:
        self._first = 0
        super().__init__(data_path, max_seq_len)
        self._first = super().__len__() - count

    def __len__(self) -> int:
        return super().__len__() - self._first

    def window(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index}: the dataset has {len(self)}")
        start = (self._first + index) * self.max_seq_len
        return self.tokens(start, start + self.max_seq_len + 1)


def open_run_data(run: RunConfig, world: World) -> RunData:
    """Open a run's shards and tokenizer.

    `data.train_data_path` is a directory of shards, or one that `gptoss prepare` made with train/, validation/ and
    tokenizer.json in it; the latter two are also found beside a directory of shards. Without validation shards anywhere
    the last 1% of the training windows (512 at most) are held out. Without `train_data_path` the default corpus is
    prepared once and cached.

    Args:
        run: `data` says where, `model` how long a window is and how many token ids there are.
        world: the main process prepares what has to be prepared; the others then find it.

    Raises:
        FileNotFoundError, ValueError: no data, or data that do not fit the model; the message says which.
    """
    config, seq_len = run.data, run.model.max_seq_len
    train_path, validation_path, tokenizer_path = world.from_main(lambda: _locate(run))
    if validation_path is not None:
        train = PretrainDataset(train_path, seq_len)
        validation = PretrainDataset(validation_path, seq_len)
    else:
        train, validation = _split(train_path, seq_len)
    for dataset in (train, validation):
        if dataset.manifest.vocab_size > run.model.vocab_size:
            raise ValueError(
                f"{dataset.data_path} has token ids up to {dataset.manifest.vocab_size - 1}, but model.vocab_size = "
                f"{run.model.vocab_size}: set model.vocab_size={dataset.manifest.vocab_size} or prepare the text again"
            )
    tokenizer = Tokenizer.load(tokenizer_path) if tokenizer_path is not None else None
    if tokenizer is not None and tokenizer.vocab_size > run.model.vocab_size:
        raise ValueError(
            f"{tokenizer_path} has a vocabulary of {tokenizer.vocab_size}, but model.vocab_size = "
            f"{run.model.vocab_size}: set model.vocab_size={tokenizer.vocab_size} or choose another tokenizer"
        )
    written_with = train.manifest.tokenizer_sha256
    if tokenizer is not None and written_with and written_with != tokenizer.sha256:
        raise ValueError(
            f"{train_path} was written with another tokenizer than {tokenizer_path}: give data.tokenizer the one that "
            "`gptoss prepare` left beside the shards"
        )
    source: SequenceSource = train
    if config.retrieval_share:
        if tokenizer is None:
            raise ValueError(
                "data.retrieval_share needs the tokenizer that the shards were written with: set data.tokenizer"
            )
        source = RetrievalDataset(
            train,
            tokenizer,
            config.retrieval_share,
            config.retrieval_keys,
            config.retrieval_questions,
            config.retrieval_near_misses,
        )
    return RunData(source, train, validation, tokenizer)


def _locate(run: RunConfig) -> tuple[Path, Path | None, Path | None]:
    """(training shards, validation shards or None, tokenizer.json or None); prepares the default corpus if need be."""
    config = run.data
    if config.train_data_path is None:
        if config.corpus is None:
            raise ValueError(
                "no data: set data.train_data_path to shards of `gptoss prepare`, or data.corpus=stdlib"
            )
        prepared = default_dataset(config, run.model.vocab_size)
        return prepared.train, prepared.validation, prepared.tokenizer
    train = Path(config.train_data_path)
    if not (train / MANIFEST).exists() and (train / "train" / MANIFEST).is_file():
        train = train / "train"
    validation = tokenizer = None
    if config.validation_data_path is not None:
        validation = Path(config.validation_data_path)
    elif (train.parent / "validation" / MANIFEST).is_file() and train.name == "train":
        validation = train.parent / "validation"
    if config.tokenizer is not None:
        tokenizer = Path(config.tokenizer)
    else:
        places = (train / "tokenizer.json", train.parent / "tokenizer.json")
        tokenizer = next((place for place in places if place.is_file()), None)
    return train, validation, tokenizer


def _split(path: Path, seq_len: int) -> tuple[PretrainDataset, PretrainDataset]:
    whole = PretrainDataset(path, seq_len)
    held_out = min(HELD_OUT_AT_MOST, max(1, int(len(whole) * HELD_OUT_SHARE)))
    if held_out >= len(whole):
        raise ValueError(
            f"{path}: {whole.manifest.total_tokens} tokens are one window of {seq_len}, none is left for validation: "
            "give more text, a shorter max_seq_len, or data.validation_data_path"
        )
    return FirstWindows(path, seq_len, held_out), LastWindows(path, seq_len, held_out)
