"""Every entry of the block-size table compiles for its GPU, within its shared memory and registers, without that GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptoss.kernels.tuning import shared_memory_limit

HERE = Path(__file__).parent
STACK_BYTES = 64  # a handful of spilled registers; hundreds mean that a tile does not fit


@pytest.mark.parametrize("capability", [90])
def test_the_table_fits_its_gpu(capability: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, HERE / "compile_experts.py", str(capability)],
        capture_output=True, text=True, check=True, env=environment, cwd=HERE.parents[1],
    )  # fmt: skip
    binaries = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    assert not [b["error"] for b in binaries if "error" in b]
    assert {b["name"] for b in binaries} >= {
        *("_tuned_kernel", "_persistent_kernel", "_rows_kernel", "_weight_gradients_kernel"),
        *("_documents_kernel", "_gather_kernel", "_sum_kernel", "_place_kernel"),
        "_derivative_kernel",
    }
    limit = shared_memory_limit((capability // 10, capability % 10))
    for binary in binaries:
        assert binary["shared"] <= limit, binary
        assert binary["stack"] <= STACK_BYTES, binary


def test_shared_memory_limits_by_gpu() -> None:
    assert shared_memory_limit((7, 5)) == 65_536
    assert shared_memory_limit((8, 6)) == 101_376
    assert shared_memory_limit((9, 0)) == 232_448
    assert shared_memory_limit((12, 0)) == 101_376
    assert shared_memory_limit((10, 0)) == 232_448  # not in the table: the nearest older one
