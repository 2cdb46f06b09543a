"""Decoding at batch 1 and prefill, measured: the decoder's graph, eager generation, and transformers' GptOss beside them.

`gptoss bench decode`. The kernels one by one are in `decode_kernels.py`.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gptoss.bench.decode_baselines import time_transformers
from gptoss.bench.evidence import make_evidence
from gptoss.bench.timing import median_seconds
from gptoss.config import ModelConfig, load_config
from gptoss.inference.decoder import Decoder
from gptoss.inference.generate import GenerationResult, generate_with_result
from gptoss.inference.rope_mode import choose_rope_mode
from gptoss.model.cache import kv_cache_bytes
from gptoss.model.prefill_chunk import choose_chunk_size
from gptoss.model.transformer import GPTOSS

COLUMNS = {
    "who": "what was run",
    "context": "prompt tokens",
    "new": "tokens that were timed after it, the first left out",
    "tokens_per_s": "new tokens a second, all of the host's work included",
    "step_us": "GPU time of one step in µs, replays back to back",
    "bytes": "bytes that a step must read at the mean length of the run",
    "limit_tokens_per_s": "bandwidth of the copy over those bytes",
    "share": "tokens a second as a share of that limit",
    "against": "times the tokens a second of the transformers row of the same context",
    "prefill_ms": "reading the prompt to the first new token in ms: the median of five, of one in the rows of eager and transformers",
    "chunk": "prompt tokens read at once",
    "prefill_against": "times faster to the first token than the transformers row of the same context",
    "prepare_s": "buffers, compilation and capture in s, once a decoder",
    "error": "why there is no number",
}
CONVENTION = (
    "bytes = 2 x active parameters (each weight that a token uses once, the head's matrix included) + keys and values: the "
    "last W positions in windowed layers, all in global ones; bandwidth = that of a 2 GiB copy in the same run, read and write"
)
CONTEXTS = (100, 4096, 32_768, 131_072)
CHUNKS = (4096, 16_384, 131_072)  # tried for the longest prompt beside the chunk that is chosen
NEW_TOKENS = 256
PREFILLS = 5  # the median is taken
EAGER_TOKENS = 12
SPARE = 64  # room in the decoder for the replays that are timed alone


def measure(
    contexts: Sequence[int] | None = None,
    *,
    config: str | None = None,
    baselines: bool = True,
    baselines_until_s: float = 120.0,
    command: str = "gptoss bench decode",
    commit: str | None = None,
) -> dict[str, Any]:
    """Time greedy decoding after prompts of several lengths, in bf16 on a GPU; eagerly at small sizes on a CPU.

    Args:
        contexts: prompt lengths (tokens); 100 to 131,072 on a GPU, 16 and 64 on a CPU.
        config: a packaged configuration; the production model on a GPU, "tiny" on a CPU. Weights are random.
        baselines: also time transformers' GptOss of the same sizes, if it is installed and a GPU is there.
        baselines_until_s: no baseline is begun later than this (s), so that the whole table keeps its time.
        command, commit: for the evidence file.

    Returns:
        The evidence. What fails is a row with the reason.
    """
    began = time.monotonic()
    cuda = torch.cuda.is_available()
    contexts = contexts or (CONTEXTS if cuda else (16, 64))
    config = config or ("pretrain_a100_502m" if cuda else "tiny")
    cfg = dataclasses.replace(
        load_config(config).model,
        eval_max_seq_len=max(contexts) + NEW_TOKENS + SPARE,
        moe_dispatch="triton_grouped" if cuda else "stacked",
    )
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = GPTOSS(cfg).to(torch.bfloat16 if cuda else torch.float32).eval()
    rows: list[dict[str, Any]] = []
    notes = []
    bandwidth = copy_bandwidth() if cuda else None
    if bandwidth is None:
        notes.append(
            f"no GPU here: eager generation of the {config} model in float32; the decoder's kernels would be interpreted"
        )
    else:
        notes.append(f"a 2 GiB copy in this run: {bandwidth / 1e12:.2f} TB/s")
    for context in contexts:
        prompt = torch.randint(cfg.vocab_size, (1, context), device=model.embed.weight.device)
        if bandwidth is not None:
            rows.append(_attempt("gptoss decoder", context, _decoder, model, prompt, bandwidth))
        if context in (min(contexts), max(contexts)):
            rows.append(_attempt("gptoss eager", context, _eager, model, prompt))
    if cuda:
        chunks = [c for c in CHUNKS if c <= max(contexts)]
        rows += [
            _attempt("gptoss prefill", max(contexts), _prefill, model, prompt, chunk)
            for chunk in chunks
        ]
    del model
    if baselines and cuda:
        for static, context in ((True, min(contexts)), (False, max(contexts))):
            name = "static cache, compiled" if static else "flex_attention"
            who = f"transformers GptOss, {name}"
            if time.monotonic() - began > baselines_until_s:
                reason = f"left out: {baselines_until_s:.0f} s had passed"
                rows.append({"who": who, "context": context, "error": reason})
                continue
            rows.append(_attempt(who, context, time_transformers, cfg, context, static))
        _compare(rows)
    notes.append(f"the table took {time.monotonic() - began:.0f} s")
    return make_evidence(
        "decode", f"Decoding, batch 1, greedy, {config}", COLUMNS, rows,
        command=command, convention=CONVENTION if cuda else "", notes=notes, commit=commit,
    )  # fmt: skip


def step_bytes(cfg: ModelConfig, n_keys: float, bytes_per_value: int = 2) -> int:
    """Bytes that one decoding step must read: every active weight once and the cached keys and values.

    An untied embedding counts as one row; tied, its matrix is the head's.

    Args:
        cfg: the model.
        n_keys: positions in the cache (tokens), the step's own included; a mean may be fractional.
        bytes_per_value: 2 for bf16 (bytes).

    Returns:
        The sum (bytes).

    Source: BASELINES' bandwidth limit; chapter 15.
    """
    with torch.device("meta"):
        active = GPTOSS(cfg).num_active_parameters()
    if not cfg.weight_tying:
        active -= (cfg.vocab_size - 1) * cfg.d_model
    windowed = sum(cfg.is_windowed(layer) for layer in range(cfg.n_layers))
    sizes = (cfg.n_kv_heads, cfg.head_dim, cfg.window_size, bytes_per_value)
    ring = kv_cache_bytes(min(round(n_keys), cfg.window_size), windowed, 0, *sizes)
    whole = kv_cache_bytes(1, 0, cfg.n_layers - windowed, *sizes) * n_keys
    return round(active * bytes_per_value + ring + whole)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a 2 GiB copy on the GPU."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), source.device)


def _decoder(model: GPTOSS, prompt: Tensor, bandwidth: float) -> dict[str, Any]:
    cfg, context = model.cfg, prompt.shape[1]
    mode = _mode(cfg, context + NEW_TOKENS)
    start = time.perf_counter()
    decoder = Decoder(model, context + NEW_TOKENS + SPARE, mode=mode)
    decoder.capture()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"prepare_s": round(time.perf_counter() - start, 2)}

    def run(new: int) -> GenerationResult:
        return generate_with_result(model, prompt, new, temperature=0.0, rope=mode, engine=decoder)

    run(8)  # compiles what the prefill needs
    results = [run(NEW_TOKENS) for _ in range(2)]
    rate = max(result.tokens_per_second for result in results)
    results += [run(1) for _ in range(PREFILLS - len(results))]
    prefill_seconds = statistics.median(result.prefill_seconds for result in results)
    needed = step_bytes(cfg, context + NEW_TOKENS / 2)
    return row | {
        "new": NEW_TOKENS - 1,
        "tokens_per_s": round(rate, 1),
        "step_us": round(median_seconds(decoder.step, decoder.device) * 1e6, 1),
        "bytes": needed,
        "limit_tokens_per_s": round(bandwidth / needed, 1),
        "share": round(rate * needed / bandwidth, 4),
        "prefill_ms": round(prefill_seconds * 1e3, 2),
        "chunk": min(context, choose_chunk_size(decoder.device)),
    }


def _eager(model: GPTOSS, prompt: Tensor) -> dict[str, Any]:
    mode = _mode(model.cfg, prompt.shape[1] + NEW_TOKENS)

    def run(new: int) -> GenerationResult:
        return generate_with_result(model, prompt, new, temperature=0.0, rope=mode, engine="eager")

    run(3)
    result = run(EAGER_TOKENS)
    return {
        "new": EAGER_TOKENS - 1,
        "tokens_per_s": round(result.tokens_per_second, 1),
        "prefill_ms": round(result.prefill_seconds * 1e3, 2),
        "chunk": min(prompt.shape[1], choose_chunk_size(prompt.device)),
    }


def _prefill(model: GPTOSS, prompt: Tensor, chunk: int) -> dict[str, Any]:
    decoder = Decoder(model, prompt.shape[1] + 1, mode=_mode(model.cfg, prompt.shape[1]))
    seconds = []
    for _ in range(PREFILLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        decoder.read(prompt, chunk)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"prefill_ms": round(statistics.median(seconds) * 1e3, 2), "chunk": chunk}


def _mode(cfg: ModelConfig, n_tokens: int) -> str:
    return choose_rope_mode("auto", "plain", n_tokens, cfg.yarn_original_max_seq_len)


def _attempt(who: str, context: int, run: Any, *arguments: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"who": who, "context": context}
    try:
        row |= run(*arguments)
    except Exception as problem:  # the reason is the row; the others still run
        row["error"] = " ".join(str(problem).split())[:200] or type(problem).__name__
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


def _compare(rows: list[dict[str, Any]]) -> None:
    """Hold each row of ours against transformers' at the same context."""
    theirs = {row["context"]: row for row in rows if row["who"].startswith("transformers")}
    for row in rows:
        other = theirs.get(row["context"], {})
        if other is row:
            continue
        if "tokens_per_s" in row and "tokens_per_s" in other:
            row["against"] = round(row["tokens_per_s"] / other["tokens_per_s"], 2)
        if "prefill_ms" in row and "prefill_ms" in other:
            row["prefill_against"] = round(other["prefill_ms"] / row["prefill_ms"], 2)
