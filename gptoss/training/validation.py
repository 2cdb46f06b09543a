"""How good is the model: loss on held-out text, bits per byte, and what counting tokens alone would give (chapter 17).

B batch, T queries, V vocabulary, S windows.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from gptoss.training.distributed import World

if TYPE_CHECKING:
    from gptoss.data.loader import PretrainDataset


@dataclass(frozen=True)
class Validation:
    """Validation after some step: mean cross-entropy in nats a token, and the same in bits a byte of text.

    The second is None where there is no tokenizer to say how many bytes a token stands for.
    """

    step: int
    loss: float
    bits_per_byte: float | None


def validation_windows(dataset: "PretrainDataset", count: int) -> Int[Tensor, "S T_plus_1"]:
    """The same windows each time: `count` of them (or all, if fewer), spread evenly over the dataset."""
    chosen = np.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().astype(int)
    return torch.from_numpy(np.stack([dataset.window(int(i)) for i in chosen]))


def bits_per_byte(
    nats_per_token: float, targets: Int[Tensor, "..."], token_bytes: Int[np.ndarray, " V"]
) -> float:
    """A loss per token as bits per byte of the text that the tokens stand for; it does not depend on the tokenizer.

        (Σ nats / ln 2) / Σ bytes

    Args:
        nats_per_token: mean over the targets.
        targets: token ids.
        token_bytes: bytes of text of each id (`Tokenizer.token_byte_lengths`).
    """
    total_bytes = int(token_bytes[targets.numpy()].sum())
    return nats_per_token * targets.numel() / math.log(2) / max(1, total_bytes)


class Validator:
    """Validates a model on fixed windows, and knows what counting tokens alone would give there.

    Args:
        module: the model, or what wraps it.
        windows: token ids of the held-out windows.
        batch_size: windows at once on one process.
        world: the processes; they share the work.
        token_bytes: bytes of text of each id, or None where there is no tokenizer.
        unigram_loss: from `unigram_baseline`.
        autocast: the dtype of activations, or None.
        loss_chunk_size: tokens whose logits exist at once.
    """

    def __init__(
        self,
        module: nn.Module,
        windows: Int[Tensor, "S T_plus_1"],
        batch_size: int,
        world: World,
        token_bytes: Int[np.ndarray, " V"] | None,
        unigram_loss: float,
        autocast: torch.dtype | None = None,
        loss_chunk_size: int = 4096,
    ) -> None:
        self.module, self.windows, self.batch_size = module, windows, batch_size
        self.world, self.token_bytes, self.unigram_loss = world, token_bytes, unigram_loss
        self.autocast, self.loss_chunk_size = autocast, loss_chunk_size

    def bits_per_byte(self, nats_per_token: float) -> float | None:
        """A loss on these windows as bits per byte; None without a tokenizer."""
        if self.token_bytes is None:
            return None
        return bits_per_byte(nats_per_token, self.windows[:, 1:], self.token_bytes)

    def __call__(self, step: int) -> Validation:
        """Validate the model as it is after a step."""
        loss = validate(
            self.module,
            self.windows,
            self.batch_size,
            self.world,
            self.autocast,
            self.loss_chunk_size,
        )
        return Validation(step, loss, self.bits_per_byte(loss))


@torch.no_grad()
def validate(
    module: nn.Module,
    windows: Int[Tensor, "S T_plus_1"],
    batch_size: int,
    world: World,
    autocast: torch.dtype | None = None,
    loss_chunk_size: int = 4096,
) -> float:
    """Mean cross-entropy over windows, in nats a token; the processes share the work.

    Args:
        module: the model, or what wraps it.
        windows: token ids; inputs and targets are these, one apart.
        batch_size: windows at once on one process.
        world: the processes; each takes every size-th batch.
        autocast: the dtype of activations, or None.
        loss_chunk_size: tokens whose logits exist at once.
    """
    device = world.device
    totals = torch.zeros(2, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
    parts = windows.split(batch_size)
    was_training = module.training
    module.eval()
    # Every process runs equally many batches, repeats among them, because a sharded model gathers in each.
    for turn in range(math.ceil(len(parts) / world.size)):
        index = turn * world.size + world.rank
        part = parts[min(index, len(parts) - 1)].to(device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            loss, _ = module(
                part[:, :-1],
                targets=part[:, 1:].contiguous(),
                reduction="sum",
                loss_chunk_size=loss_chunk_size,
            )
        if index < len(parts):
            totals += torch.stack(
                [loss.double(), torch.tensor(part[:, 1:].numel()).to(loss.double())]
            )
    module.train(was_training)
    world.sum(totals)
    return float(totals[0] / totals[1])


def unigram_baseline(
    dataset: "PretrainDataset",
    training_tokens: int,
    windows: Int[Tensor, "S T_plus_1"],
    vocab_size: int,
    max_tokens: int = 4_000_000,
) -> float:
    """The loss of a model that knows only how often each token occurs, in nats a token.

        −(1/n) Σ log p(t),   p(t) = (count(t) + 1) / (total + V)

    Args:
        dataset: where the training tokens are; they are counted in evenly spread stretches.
        training_tokens: how many of its first tokens are trained on; what follows is held out.
        windows: the validation windows.
        vocab_size: V.
        max_tokens: at most so many are counted.
    """
    stretches = max(1, min(64, training_tokens // 1024))
    length = min(training_tokens, max_tokens) // stretches
    counts = np.ones(vocab_size, dtype=np.int64)
    for start in np.linspace(0, training_tokens - length, stretches).astype(int):
        counts += np.bincount(dataset.tokens(int(start), int(start) + length), minlength=vocab_size)
    log_p = np.log(counts) - np.log(counts.sum())
    return float(-log_p[windows[:, 1:].numpy()].mean())
