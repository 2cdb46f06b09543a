"""Compile a decoding step's kernels for a GPU that is not there and print their code; run by test_decode_overlap.py.

The step is the decoder's own: a stand-in driver names the GPU, every launch stops after compiling, and torch's CPU does
the rest, on numbers that mean nothing.
Usage: python compile_decode_step.py [OVERLAP [SHARED]] [--production] [--cubins FOLDER]
prints one JSON line a launch, in order.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import gptoss.inference.decoder as decoder_module
import gptoss.kernels.decode_attention as attention_module
import gptoss.kernels.decode_overlap as overlap_module
from gptoss.config import ModelConfig
from gptoss.inference.decoder import Decoder
from gptoss.model.transformer import GPTOSS

CAPABILITY = 90
# A windowed layer, whose keys one program reads, and a global one, whose runs are merged.
SMALL = {
    "vocab_size": 256,
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 64,
    "n_routed_experts": 4,
    "window_size": 16,
    "max_seq_len": 64,
    "yarn_original_max_seq_len": 64,
    "yarn_target_seq_len": 512,
    "eval_max_seq_len": 512,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("overlap", type=int, nargs="?", default=1)
    parser.add_argument("shared", type=int, nargs="?", default=1)
    parser.add_argument("--production", action="store_true")
    parser.add_argument("--cubins", type=Path)
    arguments = parser.parse_args()
    target = GPUTarget("cuda", CAPABILITY, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    # Three places that ask the GPU, or for one.
    overlap_module._can_overlap = lambda device: True
    decoder_module.unsupported = lambda *_: None
    attention_module.check_device = lambda *_: None
    run = JITFunction.run
    launches = 0

    def compile_only(self, *args, grid, warmup, **options):
        nonlocal launches
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        name = self.fn.__name__
        told = {
            "kernel": name,
            "launch_pdl": kernel.metadata.launch_pdl,
            "parameters": [n for n, kind in kernel.src.signature.items() if kind != "constexpr"],
            "ttir": str(kernel.asm["ttir"]),
            "ptx": kernel.asm["ptx"],
        }
        print(json.dumps(told))
        if arguments.cubins:
            file = arguments.cubins / f"{launches:02}_{name}.cubin"
            file.write_bytes(kernel.asm["cubin"])
        launches += 1

    JITFunction.run = compile_only
    sizes = {} if arguments.production else SMALL
    cfg = ModelConfig(n_layers=2, n_shared_experts=arguments.shared, **sizes)
    model = GPTOSS(cfg).to(torch.bfloat16)
    Decoder(model, 400, overlap=bool(arguments.overlap)).step()


if __name__ == "__main__":
    main()
