"""Autoregressive generation: prefill in chunks, then one token at a time through the KV cache (chapter 15).

B batch, T prompt tokens, V vocabulary. Three doors to one loop: `stream` yields step by step, `generate` returns the
ids, `generate_with_result` returns ids, text and timings.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from .engine import Engine, choose_engine, ready_decoder, start_reader
from .prompts import Prompts
from .request import Request, check_request
from .text import TextStream, Tokenizer


@dataclass(frozen=True)
class Step:
    """One generated token of every row.

    `tokens[b]` is None once row b has stopped. `texts[b]` is what became whole characters in this step, empty without
    a tokenizer. `seconds` is the time that the step was waited for; that of step 0 holds the prefill. With the graph
    engine tokens come in blocks: the first of a block was waited for, the others were there.
    """

    index: int
    tokens: list[int | None]
    texts: list[str]
    seconds: float


@dataclass(frozen=True)
class GenerationResult:
    """What a generation gave.

    `ids` (B, T + n) holds prompt and new tokens, as `generate` returns them; `new_tokens` and `texts` have one entry a
    row, without padding; times are in seconds. `engine` is the one that ran, "eager" or "graph", and `prepare_seconds` is
    what its buffers and graph took, which is not part of the other times.
    """

    ids: Int[Tensor, "B T_plus_n"]
    new_tokens: list[list[int]]
    texts: list[str]
    rope_mode: str
    prefill_seconds: float
    decode_seconds: float
    engine: str = "eager"
    prepare_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows a second, the first of each row and the prefill left out; 0 if there are none."""
        decoded = sum(max(0, len(row) - 1) for row in self.new_tokens)
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0


def stream(
    model: nn.Module,
    input_ids: Prompts,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    use_cache: bool = True,
    *,
    top_k: int | None = None,
    min_new_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    seed: int | None = None,
    rope: str = "auto",
    prefill_chunk: int | None = None,
    key_start: Int[Tensor, "B"] | Sequence[int] | None = None,
    pad_id: int = 0,
    tokenizer: Tokenizer | None = None,
    engine: Engine = "auto",
) -> Iterator[Step]:
    """Generate token by token.

    Args:
        model: a GPTOSS.
        input_ids: ids (B, T), lists of ids of any lengths, a text or several texts (with `tokenizer`).
        max_new_tokens: at most this many a row; 0 gives none.
        temperature: 0 is greedy decoding.
        top_p: keep the smallest most probable set whose mass reaches top_p (see `sampling.top_p_filter`).
        use_cache: False reads the whole sequence again for each token; the tokens are the same.
        top_k: keep the k most probable tokens; None keeps all.
        min_new_tokens: stop ids cannot come before this many tokens.
        stop_ids: a row ends with the first of these; it is part of the row's tokens and not of its text.
        seed: of the draws; None uses the default generator.
        rope: "plain", "yarn" or "auto" (YaRN when prompt and new tokens exceed yarn_original_max_seq_len or when the
            model is set to YaRN). One mode holds for all rows and the whole sequence; the model's own is restored.
        prefill_chunk: how many prompt tokens the model reads at once (tokens); `choose_chunk_size` when left out. The
            result does not depend on it.
        key_start: padding tokens of each row, for ids (B, T) that are padded on the left.
        pad_id: fills the left of short prompts and the right of rows that stopped.
        tokenizer: for text in and out.
        engine: "eager" runs the model's layers step by step; "graph" replays a captured step (one sequence, Triton's
            kernels, a GPU; on a CPU the kernels are interpreted); "auto" takes the graph where `choose_engine` finds it
            worth capturing. A `Decoder` made beforehand spares capturing again. The tokens are the same up to rounding.

    Returns:
        An iterator of `Step`. The arguments are checked before it is returned.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, a setting outside its range, more tokens than
            eval_max_seq_len, or an engine that cannot serve the request; later, from the iterator, if the model's
            logits are NaN.

    Source: chapter 15.
    """
    request = check_request(
        model,
        input_ids,
        max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        use_cache=use_cache,
        top_k=top_k,
        min_new_tokens=min_new_tokens,
        stop_ids=stop_ids,
        seed=seed,
        rope=rope,
        prefill_chunk=prefill_chunk,
        key_start=key_start,
        pad_id=pad_id,
        tokenizer=tokenizer,
    )
    return _steps(model, request, choose_engine(model, request, engine))


def generate(
    model: nn.Module,
    input_ids: Prompts,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    use_cache: bool = True,
    *,
    on_token: Callable[[Step], None] | None = None,
    **settings: Any,
) -> Int[Tensor, "B T_plus_n"]:
    """Generate and return prompt and new tokens.

    Args:
        model, input_ids, max_new_tokens, temperature, top_p, use_cache: as in `stream`.
        on_token: called with every `Step` as soon as it exists.
        settings: the other keywords of `stream`.

    Returns:
        (B, T + n) int64 on the model's device: the prompts, padded on the left, then the n steps that were taken. Rows
        that stopped earlier end in `pad_id`.

    Raises:
        ValueError: as in `stream`.

    Source: chapter 15.
    """
    return generate_with_result(
        model,
        input_ids,
        max_new_tokens,
        on_token=on_token,
        temperature=temperature,
        top_p=top_p,
        use_cache=use_cache,
        **settings,
    ).ids


def generate_with_result(
    model: nn.Module,
    input_ids: Prompts,
    max_new_tokens: int,
    *,
    on_token: Callable[[Step], None] | None = None,
    engine: Engine = "auto",
    **settings: Any,
) -> GenerationResult:
    """Generate and return tokens, text and timings.

    Args:
        model, input_ids, max_new_tokens: as in `stream`.
        on_token: called with every `Step` as soon as it exists.
        engine: as in `stream`; `result.engine` says which one ran.
        settings: the other arguments of `stream`, by name.

    Returns:
        The result; `result.tokens_per_second` is the decoding speed.

    Raises:
        ValueError: as in `stream`.

    Source: chapter 15.
    """
    request = check_request(model, input_ids, max_new_tokens, **settings)
    chosen = choose_engine(model, request, engine)
    began = time.perf_counter()
    decoder = ready_decoder(model, request, chosen) if request.max_new_tokens else None
    prepare_seconds = time.perf_counter() - began
    ids = request.batch.ids
    B = ids.shape[0]
    new_tokens: list[list[int]] = [[] for _ in range(B)]
    texts = [""] * B
    columns = []
    seconds = []
    for step in _steps(model, request, chosen if decoder is None else decoder):
        for row, token in enumerate(step.tokens):
            if token is not None:
                new_tokens[row].append(token)
        texts = [old + new for old, new in zip(texts, step.texts, strict=False)] or texts
        columns.append([request.pad_id if token is None else token for token in step.tokens])
        seconds.append(step.seconds)
        if on_token is not None:
            on_token(step)
    if columns:
        new = torch.tensor(columns, dtype=torch.long, device=ids.device).T  # (B, n)
        ids = torch.cat([ids, new], dim=1)
    return GenerationResult(
        ids,
        new_tokens,
        texts,
        request.mode,
        sum(seconds[:1]),
        sum(seconds[1:]),
        "eager" if decoder is None else "graph",
        prepare_seconds,
    )


def _steps(model: nn.Module, request: Request, engine: Engine) -> Iterator[Step]:
    """The loop. Nothing of it stays switched on in the model while the caller holds a step."""
    B = request.batch.ids.shape[0]
    stop_ids = set(request.stop_ids.tolist())
    alive = [True] * B
    writers = [] if request.tokenizer is None else [TextStream(request.tokenizer) for _ in range(B)]
    column: list[int] = []
    if request.max_new_tokens == 0:
        return
    read = start_reader(model, request, engine)
    for index in range(request.max_new_tokens):
        began = time.perf_counter()
        drawn = read(column)  # waits for the device, so the time below is the step's
        seconds = time.perf_counter() - began
        tokens = [token if live else None for token, live in zip(drawn, alive, strict=True)]
        column = [request.pad_id if token is None else token for token in tokens]

        alive = [token is not None and token not in stop_ids for token in tokens]
        done = not any(alive) or index == request.max_new_tokens - 1
        texts = []
        for row, writer in enumerate(writers):
            token = tokens[row]
            text = "" if token is None or token in stop_ids else writer.push(token)
            if token is not None and (done or not alive[row]):
                text += writer.flush()
            texts.append(text)
        yield Step(index, tokens, texts, seconds)
        if done:
            return
