"""Text in and out of generation: prompts to ids, and ids to text that never shows half a character (chapter 15).

A byte-level token may end in the middle of a UTF-8 character. What a stream shows must wait for the rest.
"""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


class Tokenizer(Protocol):
    """What generation needs of a tokenizer. A `tokenizers.Tokenizer` fits too.

    Where it has a method `token_bytes(token_id) -> bytes`, the stream of text uses that.
    """

    def encode(self, text: str) -> Any: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of a text, whether the tokenizer returns a list or an object with `.ids`.

    Args:
        tokenizer: with an `encode` method.
        text: any string.

    Returns:
        A list of ids.
    """
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))


def byte_alphabet() -> dict[str, int]:
    """The letters in which byte-level BPE vocabularies write bytes: printable Latin-1 as itself, the rest from U+0100.

    Returns:
        A dict from each of the 256 letters to its byte.

    Source: Radford et al. 2019, section 2.2; chapter 13.
    """
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    letters = {chr(byte): byte for byte in _PRINTABLE}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def token_bytes(tokenizer: Tokenizer, token_id: int, alphabet: dict[str, int]) -> bytes:
    """The bytes of one token: from the tokenizer itself, its vocabulary's letters, or its decoded text.

    Args:
        tokenizer: any of the kinds that `Tokenizer` allows.
        token_id: an id.
        alphabet: from `byte_alphabet`.

    Returns:
        Its bytes, perhaps a part of a character only; none for an id that the vocabulary does not have.
    """
    own = getattr(tokenizer, "token_bytes", None)
    if own is not None:
        return own(token_id)
    lookup = getattr(tokenizer, "id_to_token", None)
    if lookup is None:
        return tokenizer.decode([token_id]).encode()
    token = lookup(token_id)
    if token is None:
        return b""
    if all(letter in alphabet for letter in token):
        return bytes(alphabet[letter] for letter in token)
    return token.encode()


class TextStream:
    """Turns tokens into text one by one and holds bytes back until their character is whole.

    Args:
        tokenizer: any of the kinds that `Tokenizer` allows.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became whole with this token; empty while a character is unfinished."""
        return self._decoder.decode(token_bytes(self._tokenizer, token_id, self._alphabet))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole, else nothing."""
        return self._decoder.decode(b"", final=True)
