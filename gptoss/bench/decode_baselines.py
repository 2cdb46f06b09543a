"""transformers' GptOss at a model's sizes, decoding and prefill: what a user would pick instead.

Shapes: B batch, n tokens so far.
"""

import time
from typing import Any

import torch
from torch import Tensor

from gptoss.bench.transformers_sizes import gpt_oss_config
from gptoss.config import ModelConfig

SHORT, LONG = (
    33,
    129,
)  # new tokens of two runs with one static cache; the difference leaves the prefill out
FLEX_TOKENS = 17


def time_transformers(cfg: ModelConfig, context: int, static: bool) -> dict[str, Any]:
    """Decoding rate, and prefill where it can be told apart, in bf16 at batch 1.

    Top k + shared of the routed experts, since GptOss has no shared one.

    Args:
        cfg: sizes.
        context: prompt tokens.
        static: a static cache with the decoding step compiled, as transformers does by itself; else flex_attention with a
            dynamic cache, which is what reaches long contexts.

    Returns:
        Columns of the table of `gptoss bench decode`.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import GptOssForCausalLM

    theirs = gpt_oss_config(cfg, max(cfg.eval_max_seq_len, context + LONG))
    attention = "eager" if static else "flex_attention"
    model = GptOssForCausalLM._from_config(theirs, attn_implementation=attention)
    model = model.to("cuda", torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompt = torch.randint(cfg.vocab_size, (1, context), device="cuda")

    def seconds(most: int, stop_at: int | None = None) -> float:
        """Time of a generation of at most `most` tokens, ended after `stop_at`."""

        def ended(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            done = stop_at is not None and ids.shape[1] >= context + stop_at
            return torch.full((ids.shape[0],), done, dtype=torch.bool, device=ids.device)

        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=most,
            stopping_criteria=[ended],
            **({"cache_implementation": "static"} if static else {}),
        )
        torch.cuda.synchronize()
        return time.perf_counter() - start

    with torch.no_grad():
        if static:
            for _ in range(2):  # compiles, then records its graphs
                seconds(LONG, SHORT)
            short, long = seconds(LONG, SHORT), seconds(LONG, LONG)
            return {"new": LONG - SHORT, "tokens_per_s": round((LONG - SHORT) / (long - short), 1)}
        seconds(3)
        first, all_tokens = seconds(1), seconds(FLEX_TOKENS)
    rate = (FLEX_TOKENS - 1) / (all_tokens - first)
    return {
        "new": FLEX_TOKENS - 1,
        "tokens_per_s": round(rate, 1),
        "prefill_ms": round(first * 1e3, 2),
    }
