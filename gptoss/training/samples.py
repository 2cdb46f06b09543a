"""A few words from the model in training, to see what the loss means (chapter 17)."""

import torch

from gptoss.data.tokenizers import Tokenizer
from gptoss.inference.generate import generate_with_result
from gptoss.training.assembly import Assembly
from gptoss.training.compiling import eager_blocks
from gptoss.training.distributed import World

MAX_NEW_TOKENS, TEMPERATURE, TOP_P = 64, 0.8, 0.95


def write_sample(
    built: Assembly, tokenizer: Tokenizer | None, prompt: str, seed: int, world: World
) -> str | None:
    """Prompt and continuation; None without a tokenizer. The training's random state is not touched.

    Every process takes part, because a sharded model can only run on all of them at once; the text is the same on each.
    """
    if tokenizer is None:
        return None
    room = built.model.cfg.eval_max_seq_len - len(tokenizer.encode(prompt))
    device = world.device.type
    enabled = built.autocast is not None
    was_training = built.model.training
    built.model.eval()
    with eager_blocks(built.model), torch.autocast(device, dtype=built.autocast, enabled=enabled):
        result = generate_with_result(
            built.model,
            prompt,
            max(0, min(MAX_NEW_TOKENS, room)),
            temperature=TEMPERATURE,
            top_p=TOP_P,
            stop_ids=[tokenizer.eos_token_id],
            seed=seed,
            tokenizer=tokenizer,
        )
    built.model.train(was_training)
    return prompt + result.texts[0]
