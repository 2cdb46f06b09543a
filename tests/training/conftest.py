"""Shards and a configuration for runs of a second."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import small_config, write_shards

from gptoss.config import RunConfig
from gptoss.data.prepare import prepare


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    write_shards(root / "train", 40_000, 0)
    write_shards(root / "validation", 3_000, 1)
    return root


@pytest.fixture
def small_run(shards: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """`small_config` on these shards, saving into a directory of the test's own (named by the first argument)."""

    def make(name: str = "run", **settings: object) -> RunConfig:
        return small_config(shards, tmp_path / name, **settings)

    return make


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text that went through `prepare`: tokenizer.json, train/ and validation/."""
    root = tmp_path_factory.mktemp("text")
    (root / "texts").mkdir()
    for number in range(40):
        lines = [f"def f_{number}_{i}(x):\n    return x + {i}\n" for i in range(12)]
        (root / "texts" / f"{number:02d}.py").write_text("\n".join(lines))
    prepare(root / "texts", root / "data", vocab_size=300, val_fraction=0.2, progress=False)
    return root / "data"


@pytest.fixture
def text_run(small_run: Callable[..., RunConfig], prepared: Path) -> Callable[..., RunConfig]:
    """A run on text, with a tokenizer of 300 tokens; the model holds 64 tokens."""

    def make(**settings: object) -> RunConfig:
        data = {"train_data_path": str(prepared), "validation_data_path": None}
        return small_run(model={"vocab_size": 320}, data=data, **settings)

    return make
