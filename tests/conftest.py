"""Settings that every test shares: no GPU needed, seeded, and quiet about the machine."""

import os

import pytest
import torch

if (
    not torch.cuda.is_available()
):  # Triton reads this when a kernel is defined, so it is set before any import of one
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The tests are small, and several fork: the child of a process that has used OpenMP's threads waits for them for ever.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
