"""Passkey retrieval: does the model still find one number in very much text? (chapter 16)

B batch, L length of prompt and answer, A answer tokens, V vocabulary.

**One prefill instead of decoding.** Greedy decoding of a prompt x gives the answer a_1 … a_A if and only if, for every
i, a_i = argmax p(· | x, a_1 … a_(i−1)). If all hold, decoding takes a_1, then a_2 after it, and so on. If the first that
fails is i, decoding has given a_1 … a_(i−1) and now takes another token, so its answer differs. All A conditions can be
read off one forward pass over x and the answer, since position i sees only what stands before it.
"""

import random
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from gptoss.data.retrieval import KEY_DIGITS
from gptoss.model.cache import MixedKVCache

from .accuracy import PasskeyResult, Trial
from .passkey_prompt import PasskeyPrompt, build_passkey_prompt
from .prefill import prefill
from .rope_mode import choose_rope_mode, rope_mode
from .text import Tokenizer

DEFAULT_LENGTHS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
DEFAULT_DEPTHS = tuple((i + 0.5) / 10 for i in range(10))


class PasskeyEvaluator:
    """Asks a model for numbers hidden in text of exact lengths.

    Args:
        model: a GPTOSS. Its precision is its own; wrap the calls in torch.autocast for mixed precision.
        tokenizer: the model's.
        device: moves the model there; None leaves it where it is.
        filler: (n,) token ids of a held-out text, an array or a tensor; None repeats the classic sentence.
        n_distractors: other keys with other names in the same prompt.
        n_near_misses: lines with the same name, another sentence and another number.
        rope: "auto", "plain" or "yarn", as in `generate`; "auto" decides for each length.
        prefill_chunk: tokens that the model reads at once, of all rows together; `choose_chunk_size` when left out.
        batch_tokens: prompts of one length are read together while they hold at most this many tokens.
        seed: of names, keys and filler; a trial depends on the seed, its length and its number only.

    Raises:
        ValueError: the filler is not a row of ids, or a size is not positive.

    Source: Mohtashami and Jaggi 2023, section 4.2, with the number kept out of the question; chapter 16.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        device: torch.device | str | None = None,
        *,
        filler: Int[np.ndarray, "n"] | Int[Tensor, "n"] | None = None,
        n_distractors: int = 0,
        n_near_misses: int = 0,
        rope: str = "auto",
        prefill_chunk: int | None = None,
        batch_tokens: int = 65_536,
        seed: int = 42,
    ) -> None:
        if isinstance(filler, Tensor):
            filler = filler.cpu().numpy()
        if filler is not None and (filler.ndim != 1 or filler.dtype.kind not in "iu"):
            raise ValueError(
                f"expected filler as (n,) token ids, got {filler.shape} of {filler.dtype}"
            )
        if batch_tokens < 1 or (prefill_chunk is not None and prefill_chunk < 1):
            raise ValueError(
                f"prefill_chunk and batch_tokens must be positive, got {prefill_chunk} and {batch_tokens}"
            )
        self.model = model if device is None else model.to(device)
        self.tokenizer = tokenizer
        self.filler = filler
        self.n_distractors = n_distractors
        self.n_near_misses = n_near_misses
        self.rope = rope
        self.prefill_chunk = prefill_chunk
        self.batch_tokens = batch_tokens
        self.seed = seed

    def build_prompt(
        self, length: int, depth: float = 0.5, key: str | None = None, trial: int = 0
    ) -> PasskeyPrompt:
        """The prompt of one trial.

        Args:
            length: of prompt and answer together (tokens).
            depth: where in the filler the key line stands, in [0, 1].
            key: the number to hide; None draws one.
            trial: number of the trial; the same number gives the same prompt.

        Returns:
            The prompt with its answer.

        Raises:
            ValueError: as in `build_passkey_prompt`.
        """
        return build_passkey_prompt(
            self.tokenizer,
            length,
            depth,
            random.Random(f"{self.seed} {length} {trial}"),
            key=key,
            filler=self.filler,
            n_distractors=self.n_distractors,
            n_near_misses=self.n_near_misses,
        )

    @staticmethod
    def extract_passkey_from_output(text: str) -> str | None:
        """The first number of exactly five digits in a model's answer, or None.

        Args:
            text: what the model wrote after the question.

        Returns:
            Five digits, or None when there is no such number; a longer number is not one.
        """
        found = re.search(rf"(?<!\d)\d{{{KEY_DIGITS}}}(?!\d)", text, re.ASCII)
        return None if found is None else found.group()

    def evaluate(
        self,
        lengths: Sequence[int] = DEFAULT_LENGTHS,
        n_trials: int = 10,
        depths: Sequence[float] = DEFAULT_DEPTHS,
        progress: bool | None = None,
    ) -> dict[int, float]:
        """The share of right answers at each length.

        Args, Raises: as in `evaluate_grid`.

        Returns:
            {length: accuracy}.
        """
        return self.evaluate_grid(lengths, n_trials, depths, progress).accuracy()

    @torch.no_grad()
    def evaluate_grid(
        self,
        lengths: Sequence[int] = DEFAULT_LENGTHS,
        n_trials: int = 10,
        depths: Sequence[float] = DEFAULT_DEPTHS,
        progress: bool | None = None,
    ) -> PasskeyResult:
        """Every trial, by length and depth.

        Args:
            lengths: of prompt and answer together (tokens).
            n_trials: at each length; trial i takes depth i modulo their number, so depths share them evenly.
            depths: places of the key line, in [0, 1].
            progress: show a bar on stderr; None shows it only when stderr is a terminal.

        Returns:
            The result, with accuracy, 95% intervals, the depth × length grid and JSON.

        Raises:
            ValueError: no length, depth or trial, a length twice, one below 1 or beyond the model's eval_max_seq_len,
                or filler of another vocabulary.
        """
        model: Any = self.model  # nn.Module types every attribute as a tensor or a module
        cfg = model.cfg
        if self.filler is not None and self.filler.size:
            low, high = int(self.filler.min()), int(self.filler.max())
            if low < 0 or high >= cfg.vocab_size:
                raise ValueError(
                    f"filler holds ids {low} to {high} and the model knows 0 to {cfg.vocab_size - 1}; "
                    "write it with the model's tokenizer"
                )
        if not lengths or not depths or n_trials < 1:
            raise ValueError("expected at least one length, one depth and one trial")
        if min(lengths) < 1 or len(set(lengths)) < len(lengths):
            raise ValueError(
                f"lengths {list(lengths)}: expected positive ones, each once: the same length asks the same questions"
            )
        if max(lengths) > cfg.eval_max_seq_len:
            raise ValueError(
                f"length {max(lengths)} exceeds eval_max_seq_len = {cfg.eval_max_seq_len}; ask for shorter ones"
            )
        modes = {
            length: choose_rope_mode(
                self.rope, model.rope_mode, length, cfg.yarn_original_max_seq_len
            )
            for length in lengths
        }
        trials: list[Trial] = []
        seconds: dict[int, float] = {}
        console = Console(stderr=True)
        shown = console.is_terminal if progress is None else progress
        with Progress(console=console, disable=not shown) as bar:
            for length in lengths:
                task = bar.add_task(f"{length:,} tokens", total=n_trials)
                began = time.perf_counter()
                rows = max(1, self.batch_tokens // length)
                for first in range(0, n_trials, rows):
                    numbers = range(first, min(first + rows, n_trials))
                    prompts = [
                        self.build_prompt(length, depths[i % len(depths)], trial=i) for i in numbers
                    ]
                    with rope_mode(self.model, modes[length]):
                        trials += self.ask(prompts)
                    bar.advance(task, len(prompts))
                seconds[length] = round(time.perf_counter() - began, 3)
        settings = {
            "filler": "repeated sentence" if self.filler is None else "held-out text",
            "n_distractors": self.n_distractors,
            "n_near_misses": self.n_near_misses,
            "n_trials": n_trials,
            "depths": list(depths),
            "rope": self.rope,
            "rope_mode": {str(length): mode for length, mode in modes.items()},
            "seconds": {str(length): value for length, value in seconds.items()},
            "seed": self.seed,
        }
        return PasskeyResult(trials, settings)

    @torch.no_grad()
    def ask(self, prompts: Sequence[PasskeyPrompt]) -> list[Trial]:
        """Greedy answers to prompts of one length, by the rule at the top of the file, in the model's rotary mode.

        Args:
            prompts: of equal `length`, read as one batch.

        Returns:
            One trial a prompt.

        Raises:
            ValueError: no prompt, or prompts of different lengths.
        """
        lengths = sorted({prompt.length for prompt in prompts})
        if len(lengths) != 1:
            raise ValueError(f"expected prompts of one length, got {len(prompts)} of {lengths}")
        device = next(self.model.parameters()).device
        answers = [torch.tensor(prompt.answer_ids) for prompt in prompts]
        ids = torch.stack(
            [torch.cat([p.ids, a]) for p, a in zip(prompts, answers, strict=True)]
        ).to(device)  # (B, L)
        B, L = ids.shape
        A = max(map(len, answers))
        cache = MixedKVCache.for_model(self.model, B, max_len=L - 1)
        head, tail = ids[:, : L - 1 - A], ids[:, L - 1 - A : -1]  # tail (B, A) predicts the last A
        if head.shape[1]:
            chunk = self.prefill_chunk and max(1, self.prefill_chunk // B)
            prefill(self.model, head, cache, chunk_size=chunk)
        logits, _ = self.model(tail, cache=cache)  # (B, A, V)
        best = logits.argmax(dim=-1)  # (B, A)
        losses = torch.nn.functional.cross_entropy(
            logits.float().transpose(1, 2), ids[:, -A:], reduction="none"
        )  # (B, A)
        trials = []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            said = best[row, A - len(answer) :].cpu()
            trials.append(
                Trial(
                    length=prompt.length,
                    depth=prompt.depth,
                    key=prompt.key,
                    said=_decode(self.tokenizer, said.tolist()),
                    right=torch.equal(said, answer),
                    answer_loss=float(losses[row, A - len(answer) :].mean()),
                )
            )
        return trials


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """For the record only: ids that name no token do not stop an evaluation."""
    try:
        return tokenizer.decode(ids)
    except ValueError:
        return ""
