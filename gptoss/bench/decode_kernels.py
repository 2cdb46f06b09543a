"""The decoding kernels, measured one by one and chained: milliseconds and bytes a token against the memory's bandwidth.

`python -m gptoss.bench.decode_kernels --out FOLDER` prints the tables and writes `decode_kernels.json`; with `--sweep`
it tries block sizes too. Every time is of CUDA graph replays over the weights of twelve layers, so that none stays in
the L2 cache from one use to the next.

Shapes: N sequences, L layers, H query heads, K kv heads, D head_dim, C model width, F ffn width, E experts, V vocabulary.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gptoss.bench.attention import graph_seconds
from gptoss.config import ModelConfig
from gptoss.kernels.decode import (
    decode_attention,
    decode_experts,
    decode_linear,
    decode_moe,
    decode_qkv,
    decode_route,
)
from gptoss.kernels.decode_attention import choose_splits, launch_decode_attention
from gptoss.kernels.decode_experts import launch_experts, launch_moe
from gptoss.kernels.decode_rows import launch_linear, launch_qkv
from gptoss.model.attention.reference import manual_causal_attention
from gptoss.model.norm import rms_norm

LENGTHS = (128, 4096, 32_768, 131_072)
Layer = dict[str, Tensor]


class Decoder:
    """The production model's decoding step with random weights: what its kernels need, and nothing of a model."""

    def __init__(
        self,
        n_sequences: int,
        context: int,
        cfg: ModelConfig | None = None,
        overlap: bool = True,
    ) -> None:
        self.overlap = overlap
        self.cfg = cfg = cfg or ModelConfig()
        self.n, self.context, self.device = n_sequences, context, torch.device("cuda")
        C, F_, E, K, D = (
            cfg.d_model,
            cfg.ffn_dim,
            cfg.n_routed_experts,
            cfg.n_kv_heads,
            cfg.head_dim,
        )
        H = cfg.n_heads

        def random(*shape: int) -> Tensor:
            return 0.02 * torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

        self.layers: list[Layer] = []
        for layer in range(cfg.n_layers):
            rows = min(context, cfg.window_size) if cfg.is_windowed(layer) else context
            n = torch.full((n_sequences,), rows, dtype=torch.int32, device=self.device)
            cache = random(n_sequences, 2, K, rows, D)
            self.layers.append(
                dict(
                    n1=1 + random(C), n2=1 + random(C), q=random(H * D, C), kv=random(2 * K * D, C),
                    o=random(C, H * D), router=random(E, C),
                    w1=random(E, F_, C), w3=random(E, F_, C), w2=random(E, C, F_),
                    s1=random(F_, C), s3=random(F_, C), s2=random(C, F_),
                    k=cache[:, 0], v=cache[:, 1], length=n, slot=n - 1, sink=torch.zeros(H, device=self.device),
                )
            )  # fmt: skip
        self.x = torch.randn(n_sequences, C, device=self.device, dtype=torch.bfloat16)
        self.cos, self.sin = random(n_sequences, D // 2), random(n_sequences, D // 2)
        self.norm, self.head = 1 + random(C), random(cfg.vocab_size, C)
        chosen = [(n, (n + 3) % E) for n in range(n_sequences)]
        self.indices = torch.tensor(chosen, dtype=torch.int32, device=self.device)
        self.weights = torch.full((n_sequences, 2), 0.5, device=self.device)

    def step(self) -> Tensor:
        """One token for every sequence: the chosen token ids."""
        x = self.x
        for layer in self.layers:
            q = decode_qkv(
                x, layer["n1"], layer["q"], layer["kv"], self.cos, self.sin, layer["slot"], layer["k"], layer["v"],
                overlap=self.overlap,
            )  # fmt: skip
            a = decode_attention(
                q, layer["k"], layer["v"], layer["length"], layer["sink"], overlap=self.overlap
            )
            x = decode_linear(a.flatten(1), layer["o"], residual=x, overlap=self.overlap)
            experts = (layer["w1"], layer["w3"], layer["w2"])
            shared = (layer["s1"], layer["s3"], layer["s2"])
            if self.n == 1:
                x = decode_moe(
                    x, layer["n2"], layer["router"], *experts, 2, shared, overlap=self.overlap
                )
                continue
            y, indices, weights = decode_route(
                x, layer["n2"], layer["router"], 2, overlap=self.overlap
            )
            x = decode_experts(y, indices, weights, *experts, shared, x, self.overlap)
        return decode_linear(x, self.head, self.norm, overlap=self.overlap).argmax(-1)

    def bytes_per_step(self, distinct_experts: int = 2) -> int:
        """Bytes that one step must read: the weights of the chosen experts and of all else, and the caches."""
        c = self.cfg
        attention = (2 * c.n_heads + 2 * c.n_kv_heads) * c.head_dim * c.d_model
        experts = (
            3 * (distinct_experts + 1) * c.ffn_dim * c.d_model + c.n_routed_experts * c.d_model
        )
        cache = sum(
            2 * self.n * c.n_kv_heads * c.head_dim * layer["k"].shape[2] for layer in self.layers
        )
        return 2 * (c.n_layers * (attention + experts) + self.head.numel() + cache)


def check() -> dict[str, float]:
    """Relative errors of the kernels in bf16 against float64 on the device."""
    device, errors = torch.device("cuda"), {}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def error(got: Tensor, wanted: Tensor) -> float:
        return float(
            f"{((got.double() - wanted).norm() / wanted.norm()).nan_to_num(torch.inf):.1e}"
        )

    for n, N, T in ((5, 1, 1), (1000, 2, 1), (4096, 1, 3), (30_001, 1, 1)):
        k, v = torch.full((2, N, 4, n + 50, 96), torch.nan, device=device, dtype=torch.bfloat16)
        k[:, :, :n], v[:, :, :n] = random(N, 4, n, 96), random(N, 4, n, 96)
        q, sink = random(N, 8, T, 96), torch.randn(8, device=device)
        length = torch.full((N,), n, dtype=torch.int32, device=device)
        got = decode_attention(q, k, v, length, sink)
        exact = [t.double() for t in (q, k[:, :, :n], v[:, :, :n])]
        errors[f"attention n={n} T={T}"] = error(
            got, manual_causal_attention(exact[0], exact[1], exact[2], None, sink.double())
        )
    for N in (1, 3, 8):
        d = Decoder(N, 256)
        layer = d.layers[0]
        exact_x = d.x.double()
        normed = rms_norm(exact_x, layer["n1"].double())
        errors[f"linear N={N}"] = error(
            decode_linear(d.x, layer["q"], layer["n1"]), normed @ layer["q"].T.double()
        )
        wanted = exact_x.clone()
        for row, expert in enumerate(d.indices.tolist()):
            for e in expert:
                w1, w3, w2 = (layer[name][e].double() for name in ("w1", "w3", "w2"))
                wanted[row] += 0.5 * (w2 @ (F.silu(w1 @ exact_x[row]) * (w3 @ exact_x[row])))
            s1, s3, s2 = (layer[name].double() for name in ("s1", "s3", "s2"))
            wanted[row] += s2 @ (F.silu(s1 @ exact_x[row]) * (s3 @ exact_x[row]))
        got = decode_experts(
            d.x, d.indices, d.weights, layer["w1"], layer["w3"], layer["w2"],
            (layer["s1"], layer["s3"], layer["s2"]), d.x,
        )  # fmt: skip
        errors[f"experts N={N}"] = error(got, wanted)
    return errors


def time_kernels(d: Decoder, bandwidth: float) -> list[dict[str, Any]]:
    """Each kernel over all layers: microseconds a layer, bytes, and the share of the copy's bandwidth."""
    C, F_ = d.cfg.d_model, d.cfg.ffn_dim
    q = torch.randn(d.n, d.cfg.n_heads, 1, d.cfg.head_dim, device=d.device, dtype=torch.bfloat16)
    y = torch.randn_like(d.x)
    windowed = [layer for i, layer in enumerate(d.layers) if d.cfg.is_windowed(i)]
    whole = [layer for i, layer in enumerate(d.layers) if not d.cfg.is_windowed(i)]
    cache = 2 * 2 * d.n * d.cfg.n_kv_heads * d.cfg.head_dim

    def attend(layer: Layer) -> object:
        return decode_attention(q, layer["k"], layer["v"], layer["length"], layer["sink"])

    runs: list[tuple[str, list[Layer], int, Callable[[Layer], object]]] = [
        ("qkv", d.layers, 4 * C * C, lambda w: decode_qkv(d.x, w["n1"], w["q"], w["kv"], d.cos, d.sin, w["slot"], w["k"], w["v"])),
        ("attention, window", windowed, cache * min(d.context, d.cfg.window_size), attend),
        ("attention, whole", whole, cache * d.context, attend),
        ("output projection", d.layers, 2 * C * C, lambda w: decode_linear(d.x, w["o"], residual=y)),
        ("route", d.layers, 2 * 8 * C, lambda w: decode_route(d.x, w["n2"], w["router"], 2)),
        ("experts", d.layers, 2 * 3 * (min(8, 2 * d.n) + 1) * C * F_, lambda w: decode_experts(
            y, d.indices, d.weights, w["w1"], w["w3"], w["w2"], (w["s1"], w["s3"], w["s2"]), d.x)),
        ("router and experts of one token", d.layers, 2 * C * (3 * 3 * F_ + 8), lambda w: decode_moe(
            d.x[:1], w["n2"], w["router"], w["w1"], w["w3"], w["w2"], 2, (w["s1"], w["s3"], w["s2"]))),
        ("head", [d.layers[0]] * 2, 2 * C * d.cfg.vocab_size, lambda w: decode_linear(d.x, d.head, d.norm)),
    ]  # fmt: skip
    rows = []
    for name, layers, size, run in runs:
        seconds = graph_seconds(lambda run=run, layers=layers: [run(w) for w in layers])  # type: ignore[misc]  # bound now
        us = seconds / len(layers) * 1e6
        rows.append({"kernel": name, "context": d.context, "sequences": d.n, "us": round(us, 2), "bytes": size, "share": round(size / us / bandwidth * 1e6, 3)})  # fmt: skip
    return rows


def sweep(d: Decoder) -> list[dict[str, Any]]:
    """Block sizes of the matrix-times-rows kernels and of the attention over long caches."""
    rows: list[dict[str, Any]] = []

    def add(kernel: str, options: dict[str, int], run: Callable[[Layer], object], layers: list[Layer]) -> None:  # fmt: skip
        row: dict[str, Any] = {"kernel": kernel, **options}
        try:
            row["us"] = round(graph_seconds(lambda: [run(w) for w in layers]) / len(layers) * 1e6, 2)  # fmt: skip
        except Exception as problem:
            row["problem"] = " ".join(str(problem).split())[:100]
        rows.append(row)

    y, H = torch.randn_like(d.x), d.cfg.n_heads
    q = torch.randn(d.n, H, 1, d.cfg.head_dim, device=d.device, dtype=torch.bfloat16)
    for out_rows, warps in ((2, 4), (4, 2), (4, 4), (8, 4), (16, 4), (16, 8)):
        options = {"rows": out_rows, "warps": warps}
        add("output projection", options, lambda w, r=out_rows, p=warps: launch_linear(d.x, w["o"], None, y, 1e-5, r, p), d.layers)  # type: ignore[misc]  # fmt: skip
        if out_rows >= 4:
            add("qkv", options, lambda w, r=out_rows, p=warps: launch_qkv(d.x, w["q"], w["kv"], w["n1"], d.cos, d.sin, w["slot"], w["k"], w["v"], 1e-5, r, p), d.layers)  # type: ignore[misc]  # fmt: skip
        add("head", options, lambda w, r=out_rows, p=warps: launch_linear(d.x, d.head, d.norm, None, 1e-5, r, p), d.layers[:2])  # type: ignore[misc]  # fmt: skip
    for up, down, warps in ((4, 4, 4), (4, 4, 2), (8, 4, 4), (8, 8, 4), (4, 8, 4), (2, 2, 2), (8, 8, 8), (16, 8, 8), (2, 4, 4)):  # fmt: skip
        add("experts", {"up_rows": up, "down_rows": down, "warps": warps}, lambda w, u=up, o=down, p=warps: launch_experts(y, d.indices, d.weights, w["w1"], w["w3"], w["w2"], (w["s1"], w["s3"], w["s2"]), d.x, u, o, p), d.layers)  # type: ignore[misc]  # fmt: skip
    for up, down, up_warps, down_warps in ((4, 2, 4, 2), (2, 2, 2, 2), (4, 4, 4, 4), (8, 2, 8, 2), (8, 4, 8, 2), (2, 1, 2, 1), (4, 4, 2, 2)):  # fmt: skip
        add("router and experts of one token", {"up_rows": up, "down_rows": down, "up_warps": up_warps, "down_warps": down_warps}, lambda w, o=(up, down, up_warps, down_warps): launch_moe(d.x[:1], w["n2"], w["router"], w["w1"], w["w3"], w["w2"], (w["s1"], w["s3"], w["s2"]), 2, 1e-5, 1e-6, *o), d.layers)  # type: ignore[misc]  # fmt: skip
    whole = [layer for i, layer in enumerate(d.layers) if not d.cfg.is_windowed(i)]
    base = choose_splits(d.n, d.cfg.n_kv_heads, d.context, d.device)
    for keys, warps, stages, splits in ((64, 4, 3, base), (64, 4, 3, 2 * base), (64, 4, 3, base // 2), (64, 4, 2, base), (64, 4, 4, base), (128, 4, 2, base), (128, 4, 3, base), (32, 2, 4, 2 * base), (32, 4, 4, base), (64, 2, 3, base), (128, 8, 3, base), (64, 4, 2, 3 * base // 2)):  # fmt: skip
        options = {"keys": keys, "warps": warps, "stages": stages, "splits": splits}
        add("attention, whole", options, lambda w, o=options: launch_decode_attention(q, w["k"], w["v"], w["length"], w["sink"], None, 0.1, o["splits"], o["keys"], o["warps"], o["stages"]), whole)  # type: ignore[misc]  # fmt: skip
    return sorted(rows, key=lambda r: (r["kernel"], r.get("us", 1e9)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    start = time.monotonic()
    result: dict[str, Any] = {"errors": check()}
    print(f"errors {result['errors']} after {time.monotonic() - start:.0f} s", flush=True)
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / graph_seconds(lambda: target.copy_(source))
    del source, target
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    result["kernels"], result["steps"] = [], []
    for n, context in [(1, length) for length in LENGTHS] + [(8, 4096)]:
        d = Decoder(n, context)
        if context in (LENGTHS[0], LENGTHS[-1]) or n > 1:
            result["kernels"] += time_kernels(d, bandwidth)
            for row in result["kernels"][-8:]:
                print(*row.values(), flush=True)
        seconds = graph_seconds(d.step)
        needed = d.bytes_per_step(min(8, 2 * n)) / bandwidth
        step = {"sequences": n, "context": context, "us": round(seconds * 1e6, 1), "tokens_per_s": round(n / seconds), "of_bandwidth": round(needed / seconds, 3)}  # fmt: skip
        result["steps"].append(step)
        print(*step.items(), f"after {time.monotonic() - start:.0f} s", flush=True)
        if arguments.sweep and context == LENGTHS[-1]:
            result["sweep"] = sweep(d)
        del d
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "decode_kernels.json").write_text(json.dumps(result, indent=1))
    seen: dict[str, int] = {}
    for row in result.get("sweep", []):
        seen[row["kernel"]] = seen.get(row["kernel"], 0) + 1
        if seen[row["kernel"]] <= 6 or "problem" in row:
            print(*row.items(), flush=True)
    print(f"done after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
