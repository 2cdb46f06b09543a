"""The data of a run: what it trains on, what it is held against, and how text becomes tokens (chapters 13 and 17)."""

from dataclasses import dataclass

from gptoss.config import RunConfig
from gptoss.data.loader import PretrainDataset, SequenceSource
from gptoss.data.tokenizers import Tokenizer
from gptoss.training.distributed import World


@dataclass(frozen=True)
class RunData:
    """`source` is what training reads: the training windows, with retrieval examples among them where asked for."""

    source: SequenceSource
    train: PretrainDataset
    validation: PretrainDataset
    tokenizer: Tokenizer | None


def open_run_data(run: RunConfig, world: World) -> RunData:
    """Open a run's shards.

    Args:
        run: `data` says where they are, `model` how long a window is and how many token ids there are.
        world: the main process prepares what has to be prepared; the others then find it.

    Raises:
        FileNotFoundError, ValueError: no data, or data that do not fit the model; the message says which.
    """
    config = run.data
    if config.train_data_path is None or config.validation_data_path is None:
        raise NotImplementedError
    train = PretrainDataset(config.train_data_path, run.model.max_seq_len)
    validation = PretrainDataset(config.validation_data_path, run.model.max_seq_len)
    return RunData(train, train, validation, None)
