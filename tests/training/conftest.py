"""Shards and a configuration for runs of a second."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_run import small_config, write_shards

from gptoss.config import RunConfig


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
