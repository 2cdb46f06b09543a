"""Byte-level BPE: text to token ids and back without loss (chapter 13).

Text is split into words by `SPLIT_PATTERN` (letters, single digits, punctuation, whitespace), each word is written in
256 characters that stand for its bytes, and merges learned from counts join frequent neighbours. Every byte has a token,
so nothing is unknown. Training, merging and the file format are the `tokenizers` library's.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from gptoss.data.atomic import write_atomically

EOS_TOKEN = "<|endoftext|>"
KNOWN_EOS_TOKENS = (EOS_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")
THREADS_VARIABLE = "TOKENIZERS_PARALLELISM"
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SURROGATE = re.compile("([\ud800-\udfff])")


class Tokenizer:
    """A tokenizer.json with the few methods that training, generation and evaluation need.

    Lossless on any str that is valid Unicode. Lone surrogates, which no UTF-8 text holds, follow two rules: U+DC80 to
    U+DCFF (Python's `surrogateescape`) stand for the raw bytes 0x80 to 0xFF and become those bytes' tokens; any other
    becomes U+FFFD.

    Args:
        backend: the library's tokenizer; truncation and padding that its file asks for are switched off.
        eos_token: the token that ends a document; None looks for a usual one (`KNOWN_EOS_TOKENS`).

    Raises:
        ValueError: no such token in the vocabulary.

    Source: chapter 13.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token: str | None = None):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        candidates = KNOWN_EOS_TOKENS if eos_token is None else (eos_token,)
        found = [(t, i) for t in candidates if (i := backend.token_to_id(t)) is not None]
        if not found:
            raise ValueError(
                f"expected one of the end-of-text tokens {', '.join(candidates)} in the tokenizer, found none; "
                "name the right one as eos_token"
            )
        self.eos_token, self.eos_token_id = found[0]
        # Ids may have holes (o200k: 199,999 then 200,018), so the count of tokens is not the size of the table.
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any str; see the class for lone surrogates.
            allow_special: read "<|endoftext|>" and its like in the text as special tokens. Off, they are text like
                any other, so that no document can end itself.

        Returns:
            ids, each in [0, vocab_size).
        """
        self.backend.encode_special_tokens = not allow_special
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            return self._encode_with_surrogates(text)

    def encode_batch(self, texts: Sequence[str], allow_special: bool = False) -> list[list[int]]:
        """Token ids of several texts, on one thread; `prepare` uses processes."""
        self.backend.encode_special_tokens = not allow_special
        try:
            with one_thread():
                # The fast call leaves out character offsets, which nobody reads here.
                encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [e.ids for e in encoded]
        except TypeError:  # some text holds a lone surrogate
            return [self.encode(text, allow_special) for text in texts]

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes: valid UTF-8 by the merges, each stray byte by its own token.

        `decode_bytes(encode_bytes(data)) == data` for a byte-level tokenizer.
        """
        return self.encode(data.decode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 (a character cut in half) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of token ids, special tokens as their text.

        Raises:
            ValueError: an id outside [0, vocab_size) or one that names no token.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size or self._bytes_of_id[i] is None:
                raise ValueError(
                    f"token id {i}: expected a token of this vocabulary of {self.vocab_size}; "
                    "was the text encoded by another tokenizer?"
                )
        if not self._is_byte_level:
            return self.backend.decode(ids, skip_special_tokens=False).encode()
        return b"".join(self._bytes_of_id[i] or b"" for i in ids)

    @property
    def is_lossless(self) -> bool:
        """Whether every byte has its token and no normalizer changes the text."""
        return self._is_byte_level and self.backend.normalizer is None

    def token_byte_lengths(self) -> np.ndarray:
        """Bytes of text that each id stands for, (V,) int64; special tokens and holes count 0.

        Bits per byte of a window are its summed loss in nats / ln 2 / the summed lengths of its targets.
        """
        special = {i for i, t in self.backend.get_added_tokens_decoder().items() if t.special}
        return np.array(
            [0 if i in special else len(b or b"") for i, b in enumerate(self._bytes_of_id)],
            dtype=np.int64,
        )

    @cached_property
    def sha256(self) -> str:
        """Hash of the whole tokenizer, the same whatever white space its file has."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json: whole or not at all."""
        write_atomically(Path(path), self.backend.to_str(pretty=True).encode())

    @classmethod
    def load(cls, path: str | Path, eos_token: str | None = None) -> "Tokenizer":
        """Read any tokenizer.json (ours, LLaMA-3, o200k, ...), or the one inside a directory.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a tokenizer.json, or no end-of-text token in it.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}: give the path of a tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ValueError(f"{path}: not a tokenizer.json: {error}") from error
        try:
            return cls(backend, eos_token)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __getstate__(self) -> dict[str, str]:
        return {"json": self.backend.to_str(), "eos": self.eos_token}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__init__(tokenizers.Tokenizer.from_str(state["json"]), state["eos"])  # type: ignore[misc] # same object, rebuilt

    def _encode_with_surrogates(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _SURROGATE.split(text):
            byte = ord(piece) - 0xDC00 if len(piece) == 1 else 0
            if 0x80 <= byte <= 0xFF:
                ids.append(self._id_of_byte(byte))
            elif piece:
                piece = _SURROGATE.sub("\ufffd", piece)
                ids += self.backend.encode(piece, add_special_tokens=False).ids
        return ids

    def _id_of_byte(self, byte: int) -> int:
        character = _characters_of_bytes()[byte]
        found = self.backend.token_to_id(character) if self._is_byte_level else None
        if found is None:
            raise ValueError(
                f"byte 0x{byte:02x} has no token: this tokenizer is not byte-level; clean the text of bytes "
                "that are not UTF-8"
            )
        return found

    @cached_property
    def _is_byte_level(self) -> bool:
        vocab = self.backend.get_vocab(with_added_tokens=False)
        return all(character in vocab for character in _characters_of_bytes())

    @cached_property
    def _bytes_of_id(self) -> list[bytes | None]:
        table: list[bytes | None] = [None] * self.vocab_size
        byte_of = {character: byte for byte, character in enumerate(_characters_of_bytes())}
        for token, i in self.backend.get_vocab(with_added_tokens=False).items():
            known = self._is_byte_level and all(c in byte_of for c in token)
            table[i] = bytes(byte_of[c] for c in token) if known else token.encode()
        for i, added in self.backend.get_added_tokens_decoder().items():
            table[i] = added.content.encode()
        return table


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep the library's calls on one thread.

    Once it has used threads, every later fork of the process (a data loader's workers) prints its warning. The variable
    is the library's only switch; it is put back.
    """
    before = os.environ.get(THREADS_VARIABLE)
    os.environ[THREADS_VARIABLE] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS_VARIABLE]
        else:
            os.environ[THREADS_VARIABLE] = before


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = (EOS_TOKEN,),
    threads: bool = False,
) -> Tokenizer:
    """Learn a byte-level BPE from texts.

    Starts from the 256 bytes and the special tokens, then adds the most frequent pair of neighbouring tokens within a
    word, again and again, until vocab_size is reached (or no pair occurs twice). Digits stay single.

    Args:
        texts: any iterable of str, read once; lone surrogates are left out of the counts.
        vocab_size: tokens in all, at least 256 + the special tokens.
        special_tokens: tokens that stand for no text, each one id; the first ends documents.
        threads: count on all cores; see `one_thread` for what it costs.

    Returns:
        the tokenizer; the same texts give the same one.

    Raises:
        ValueError: vocab_size too small, no special token, or no text.

    Source: Sennrich et al. 2016, section 3.2; Radford et al. 2019, section 2.2; chapter 13.
    """
    least = 256 + len(special_tokens)
    if not special_tokens or len(set(special_tokens)) < len(special_tokens):
        raise ValueError(
            f"special_tokens = {list(special_tokens)}: expected at least one, each once; the first ends documents"
        )
    if vocab_size < least:
        raise ValueError(
            f"vocab_size = {vocab_size}: expected at least {least} (256 bytes and {len(special_tokens)} special "
            "tokens); choose a larger vocabulary"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    seen = 0

    def valid_texts() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            text = _SURROGATE.sub("", text)
            seen += len(text)
            yield text

    with contextlib.nullcontext() if threads else one_thread():
        backend.train_from_iterator(valid_texts(), trainer)
    if not seen:
        raise ValueError("the texts to train a tokenizer on are empty: give at least one document")
    return Tokenizer(backend, special_tokens[0])


def _characters_of_bytes() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + n) for n, byte in enumerate(moved)}
    return [table[byte] for byte in range(256)]
