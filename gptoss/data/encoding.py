"""Documents to token ids by any number of processes, results in the documents' order (chapter 13)."""

import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from gptoss.data.corpora import Reader
from gptoss.data.documents import is_validation
from gptoss.data.manifest import DTYPES, dtype_for_vocabulary
from gptoss.data.tokenizers import THREADS_VARIABLE, Tokenizer

CHUNK_CHARACTERS = 1 << 20
CHUNK_DOCUMENTS = 1024
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Chunk:
    """Some consecutive documents by split, and where the reader stands behind them."""

    texts: dict[str, list[str]]
    cursor: Any


@dataclass(frozen=True)
class Encoded:
    """One split's part of a chunk: (N,) ids, each document ended by EOS; how many documents; their UTF-8 size."""

    ids: np.ndarray
    documents: int
    text_bytes: int


def chunks(reader: Reader, val_fraction: float) -> Iterator[Chunk]:
    """Gather documents into chunks of about a million characters; empty documents are left out."""
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    characters = documents = 0
    for document in reader:
        if not document.text:
            continue
        split = SPLITS[is_validation(document.key, val_fraction)]
        texts[split].append(document.text)
        characters += len(document.text)
        documents += 1
        if characters >= CHUNK_CHARACTERS or documents >= CHUNK_DOCUMENTS:
            yield Chunk(texts, reader.cursor())
            texts = {split: [] for split in SPLITS}
            characters = documents = 0
    if documents:
        yield Chunk(texts, reader.cursor())


def encode_chunk(tokenizer: Tokenizer, texts: dict[str, list[str]]) -> dict[str, Encoded]:
    """Token ids of a chunk's documents, by split."""
    return {split: _encode_texts(tokenizer, some) for split, some in texts.items() if some}


def encode_chunks(
    source: Iterator[Chunk], tokenizer: Tokenizer, processes: int
) -> Iterator[tuple[Chunk, dict[str, Encoded]]]:
    """Encode chunks and give them back in order, with two chunks a process under way at most.

    Args:
        source: from `chunks`.
        tokenizer: sent to each process once.
        processes: 1 encodes in this one.

    Raises:
        OSError: a process was killed.
    """
    if processes == 1:
        for chunk in source:
            yield chunk, encode_chunk(tokenizer, chunk.texts)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),  # a fork would copy the parent's threads' locks
        initializer=_start_worker,
        initargs=(tokenizer,),
    )
    pending: deque[tuple[Chunk, Future[dict[str, Encoded]]]] = deque()
    try:
        for chunk in source:
            pending.append((chunk, pool.submit(_encode_in_worker, chunk.texts)))
            if len(pending) > 2 * processes:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool as error:
        raise OSError(
            "a tokenising process ended early (out of memory, or a script without "
            '`if __name__ == "__main__":`); the same call again goes on from here, perhaps with fewer processes'
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode_texts(tokenizer: Tokenizer, texts: list[str]) -> Encoded:
    dtype = DTYPES[dtype_for_vocabulary(tokenizer.vocab_size)]
    pieces = [
        np.array([*ids, tokenizer.eos_token_id], dtype=dtype)
        for ids in tokenizer.encode_batch(texts)
    ]
    sizes = (len(text.encode("utf-8", errors="surrogatepass")) for text in texts)
    return Encoded(np.concatenate(pieces), len(texts), sum(sizes))


_worker_tokenizer: Tokenizer  # set in worker processes only, by the pool's initialiser


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    os.environ[THREADS_VARIABLE] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer


def _encode_in_worker(texts: dict[str, list[str]]) -> dict[str, Encoded]:
    return encode_chunk(_worker_tokenizer, texts)
