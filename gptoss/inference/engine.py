"""Which engine writes the tokens: the model's own layers, or the fast decoder with its graph (chapter 15).

    eager   any model, batch, padding and device; the host launches every operation of every step
    graph   one sequence: `Decoder` replays a captured step, and tokens come back in blocks, unwaited for

They give the same tokens up to rounding, and with a seed the same draws: both take them from `sample_next`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gptoss.inference.decoder import Decoder
from gptoss.inference.decoder_layer import unsupported
from gptoss.inference.prefill import prefill
from gptoss.inference.request import Request
from gptoss.inference.rope_mode import rope_mode
from gptoss.inference.sampling import forbid, sample_next
from gptoss.kernels.decode_checks import require_decode_kernels
from gptoss.model.cache import MixedKVCache, compute_dtype

ENGINES = ("auto", "eager", "graph")
LEAST_NEW_TOKENS = 64  # below, capturing the graph takes longer than it saves
STEPS_A_BLOCK = 8  # between two looks at the tokens

Engine = str | Decoder
Read = Callable[[list[int]], list[int]]


def choose_engine(model: nn.Module, request: Request, engine: Engine = "auto") -> Engine:
    """Decide for a request before anything runs.

    "auto" takes the graph on a CUDA GPU for one sequence with the cache, at least 64 new tokens and weights already in a
    16-bit compute dtype, so that nothing has to be copied; else the model's own layers.

    Args:
        model: a GPTOSS.
        request: checked.
        engine: "auto", "eager", "graph", or a `Decoder` made for this model, whose graph is then used again.

    Returns:
        "eager", "graph" or the decoder.

    Raises:
        ValueError: an unknown name, or a request that the graph or this decoder cannot serve; the message says why.
        ImportError: "graph" without Triton.

    Source: chapter 15.
    """
    if isinstance(engine, Decoder):
        problem = _unfit(engine, model, request) or _unserved(model, request)
        if problem:
            raise ValueError(f"this decoder cannot serve the request: {problem}")
        return engine
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)} or a Decoder, got {engine!r}")
    if engine == "graph":
        require_decode_kernels()
        if problem := _unserved(model, request):
            raise ValueError(f'engine="graph" cannot serve the request: {problem}; use "eager"')
        return "graph"
    parameter = next(model.parameters())
    worthwhile = (
        engine == "auto"
        and parameter.device.type == "cuda"
        and request.max_new_tokens >= LEAST_NEW_TOKENS
        and parameter.dtype in (torch.bfloat16, torch.float16)
        and parameter.dtype == compute_dtype(model)
    )
    if not worthwhile:
        return "eager"
    try:
        require_decode_kernels()
    except ImportError:
        return "eager"
    return "eager" if _unserved(model, request) else "graph"


def ready_decoder(model: nn.Module, request: Request, engine: Engine) -> Decoder | None:
    """The decoder of a chosen engine with its graph captured, or None for the model's own layers."""
    if engine == "eager":
        return None
    if isinstance(engine, Decoder):
        decoder = engine
    else:
        total = request.batch.ids.shape[1] + request.max_new_tokens
        decoder = Decoder(model, total, mode=request.mode)
    for choose in {_chooses(request, index) for index in range(1, request.max_new_tokens)}:
        if decoder.n_read >= decoder.max_len:
            decoder.restart()
        decoder.capture(choose)
    return decoder


def start_reader(model: nn.Module, request: Request, engine: Engine) -> Read:
    """Start a request on a chosen engine.

    The graph keeps the device a block of steps ahead of the host, so up to two blocks are computed in vain when a stop
    token comes.

    Returns:
        A function from the last column of tokens (one a row, empty at first) to the next. Its first call reads the
        prompt. It raises ValueError if the model's logits are NaN.
    """
    decoder = ready_decoder(model, request, engine)
    if decoder is None:
        return _eager_reader(model, request)
    tokens = _tokens(decoder, request)
    return lambda column: [next(tokens)]  # the decoder has its last token


def _eager_reader(model: nn.Module, request: Request) -> Read:
    ids, key_start = request.batch.ids, request.batch.key_start
    B, T = ids.shape
    cache = None
    index = 0

    def read(column: list[int]) -> list[int]:
        nonlocal ids, cache, index
        if column:
            new = torch.tensor(column, dtype=torch.long, device=ids.device)[:, None]  # (B, 1)
            # A cached step needs the last token only; the uncached one the whole sequence.
            ids = new if request.use_cache else torch.cat([ids, new], dim=1)
        with torch.no_grad(), rope_mode(model, request.mode):
            if not request.use_cache:
                logits, _ = model(ids, key_start=key_start, last_only=True)
                logits = logits[:, -1]  # (B, 1, V) -> (B, V)
            else:
                if cache is None:
                    cache = MixedKVCache.for_model(model, B, max_len=T + request.max_new_tokens)
                logits = prefill(
                    model, ids, cache, key_start=key_start, chunk_size=request.prefill_chunk
                )
            if bool(logits.isnan().any()):
                raise ValueError(_nan_message(index))
            if index < request.min_new_tokens:
                logits = forbid(logits, request.stop_ids)
            index += 1
            return sample_next(
                logits, request.temperature, request.top_k, request.top_p, request.generator
            ).tolist()

    return read


def _tokens(decoder: Decoder, request: Request) -> Iterator[int]:
    logits = decoder.read(request.batch.ids, request.prefill_chunk)
    sequence = decoder.n_sequences
    decoder.put(_draw(logits, request, 0))
    blocks = deque([_fetch(decoder, decoder.n_read, 1)])
    first = index = 1  # `index` counts the tokens asked for, `first` those handed out
    yield _checked(blocks.popleft()()[0], 0)
    while first < request.max_new_tokens:
        if decoder.n_sequences != sequence:
            raise ValueError(
                "the decoder was given another prompt before this stream ended: take one Decoder a stream, or end it first"
            )
        while index < request.max_new_tokens and len(blocks) < 2:
            start, last = decoder.n_read + 1, min(index + STEPS_A_BLOCK, request.max_new_tokens)
            for step in range(index, last):
                chooses = _chooses(request, step)
                logits = decoder.step(chooses)
                if not chooses:
                    decoder.put(_draw(logits, request, step))
            blocks.append(_fetch(decoder, start, last - index))
            index = last
        for token in blocks.popleft()():
            yield _checked(token, first)
            first += 1


def _chooses(request: Request, index: int) -> bool:
    """Whether the graph itself chooses new token `index`: greedy, and no stop token to keep out."""
    barred = index < request.min_new_tokens and len(request.stop_ids) > 0
    return request.temperature == 0 and not barred


def _draw(logits: Tensor, request: Request, index: int) -> Tensor:
    """The next token (1,) on the device, −1 where the logits hold NaN. Nothing waits for the device."""
    if index < request.min_new_tokens:
        logits = forbid(logits, request.stop_ids)
    token = sample_next(
        logits, request.temperature, request.top_k, request.top_p, request.generator
    )
    return torch.where(logits.isnan().any(), -1, token)


def _fetch(decoder: Decoder, start: int, count: int) -> Callable[[], list[int]]:
    """Ask for tape[start : start + count]; the call that is returned waits for them."""
    tokens = decoder.tape[start : start + count]
    if not tokens.is_cuda:
        return tokens.clone().tolist
    on_host = torch.empty(count, dtype=tokens.dtype, pin_memory=True)
    on_host.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tokens.device))

    def wait() -> list[int]:
        copied.synchronize()
        return on_host.tolist()

    return wait


def _checked(token: int, index: int) -> int:
    if token < 0:
        raise ValueError(_nan_message(index))
    return token


def _nan_message(index: int) -> str:
    return f"the model's logits are NaN at new token {index}; look for NaN in its weights or lower precision"


def _unserved(model: nn.Module, request: Request) -> str | None:
    """Why a request needs the model's own layers, or None."""
    gptoss: Any = model  # nn.Module types every attribute as a tensor or a module
    rows = request.batch.ids.shape[0]
    if rows != 1:
        return f"it decodes one sequence at a time, got {rows}"
    if request.batch.key_start is not None:
        return "it takes no left padding (key_start)"
    if not request.use_cache:
        return "it always uses the cache (use_cache=False)"
    return unsupported(gptoss.cfg, compute_dtype(model), next(model.parameters()).device)


def _unfit(decoder: Decoder, model: nn.Module, request: Request) -> str | None:
    total = request.batch.ids.shape[1] + request.max_new_tokens
    if decoder.model is not model:
        return "it was made for another model"
    if total > decoder.max_len:
        return f"prompt and new tokens are {total}, its max_len is {decoder.max_len}"
    if decoder.mode != request.mode:
        return f"it rotates in mode {decoder.mode!r}, the request needs {request.mode!r}; say which with rope"
    if decoder.dtype != compute_dtype(model):
        return f"it computes in {decoder.dtype}, the model here in {compute_dtype(model)}"
    return None
