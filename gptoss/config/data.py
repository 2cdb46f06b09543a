"""Where the tokens come from."""

import os
from dataclasses import dataclass


@dataclass
class DataConfig:
    """Where the tokens come from (chapter 13).

    `train_data_path` is a directory of shards written by `gptoss prepare`; without one, `corpus` names the text that is
    prepared once and cached: a source of `gptoss prepare` ("stdlib", the Python standard library of the running
    interpreter; "package:NAME"; "hf:NAME"; a folder, a file, a glob), or several separated by commas.
    `retrieval_share` of the training windows carry `retrieval_keys` named keys, `retrieval_near_misses` lines that look
    like them, and `retrieval_questions` questions about the keys (chapter 16).
    """

    train_data_path: str | None = None
    validation_data_path: str | None = None
    corpus: str | None = "stdlib"
    tokenizer: str | None = None
    retrieval_share: float = 0.0
    retrieval_keys: int = 8
    retrieval_questions: int = 6
    retrieval_near_misses: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"DataConfig.{name} = {getattr(self, name)!r}: {rule}")

        require(
            self.corpus is None or all(part.strip() for part in self.corpus.split(",")),
            "corpus",
            'must name a text, as "stdlib" does, or several separated by commas, or be None',
        )
        for name in ("train_data_path", "validation_data_path", "tokenizer"):
            if getattr(self, name) is not None:
                setattr(self, name, os.path.expanduser(getattr(self, name)))
        require(0 <= self.retrieval_share <= 1, "retrieval_share", "must lie in [0, 1]")
        require(self.retrieval_keys > 0, "retrieval_keys", "must be positive")
        require(
            0 < self.retrieval_questions <= self.retrieval_keys,
            "retrieval_questions",
            "must be positive and at most retrieval_keys",
        )
        for name in ("retrieval_near_misses", "num_workers"):
            require(getattr(self, name) >= 0, name, "must not be negative")
