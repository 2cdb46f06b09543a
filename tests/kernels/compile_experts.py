"""Compile the expert kernels for a GPU that is not there and report what each binary needs; run by test_experts_compile.py.

The launches are the package's own: a stand-in driver names the GPU, and every launch stops after compiling.
Usage: python compile_experts.py CAPABILITY [all]        prints one JSON line a kernel and set of block sizes.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from gptoss.bench.moe_inputs import Shape, make_inputs
from gptoss.bench.moe_sweep import CANDIDATES, runner
from gptoss.kernels.expert_order import order_by_expert
from gptoss.kernels.rows import gather_rows, sum_rows
from gptoss.kernels.swiglu_derivative import swiglu_derivative
from gptoss.kernels.swiglu_documents import swiglu_documents
from gptoss.kernels.tuning import tiles_for

compiled = []


def usage(kernel) -> dict[str, int]:
    """Registers and stack bytes a thread, shared bytes a program."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    registers, stack = map(
        int, re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr).groups()
    )
    return {"registers": registers, "stack": stack, "shared": kernel.metadata.shared}


def main() -> None:
    capability = int(sys.argv[1])
    key, dtype = (capability // 10, capability % 10), torch.bfloat16
    if capability < 80:
        dtype = torch.float16
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, kernel))

    JITFunction.run = compile_only
    inputs = make_inputs(Shape(tokens=256), torch.device("cpu"), dtype)
    jobs = [(kernel, tiles_for(kernel.split()[0], key, dtype)) for kernel in CANDIDATES]
    if len(sys.argv) > 2:
        jobs = [
            (k, tiles)
            for k, many in CANDIDATES.items()
            for tiles in many
            if sys.argv[2] in (k, "all")
        ]
    for kernel, tiles in jobs:
        compiled.clear()
        try:
            runner(kernel, tiles, inputs)()
        except Exception as problem:  # reported; the test decides
            print(json.dumps({"kernel": kernel, "tiles": str(tiles), "error": str(problem)[-300:]}))
            continue
        for name, binary in compiled:
            print(
                json.dumps({"kernel": kernel, "name": name, "tiles": str(tiles), **usage(binary)})
            )
        sys.stdout.flush()
    compiled.clear()
    swiglu_documents(inputs.rows, inputs.counts, inputs.w1, inputs.w3)
    order_by_expert(inputs.indices, 8)
    gather_rows(inputs.x, torch.arange(512, dtype=torch.int32), 2, inputs.weights)
    sum_rows(inputs.rows, torch.arange(512, dtype=torch.int32), 2)
    d_hidden, gate_up = (inputs.rows.new_empty(512, width) for width in (1536, 3072))
    order = torch.arange(512, dtype=torch.int32)
    swiglu_derivative(d_hidden, gate_up, torch.ones(512), order, inputs.weights)
    for name, binary in compiled:
        print(json.dumps({"kernel": "around", "name": name, **usage(binary)}))


if __name__ == "__main__":
    main()
