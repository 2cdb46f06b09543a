"""Text in and out of generation: prompts to ids, and ids to text that never shows half a character (chapter 15).

A byte-level token may end in the middle of a UTF-8 character. What a stream shows must wait for the rest.
"""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

LONGEST_CHARACTER = 4  # bytes in UTF-8


class Tokenizer(Protocol):
    """What generation needs of a tokenizer: `gptoss.data.tokenizers.Tokenizer` has it, `tokenizers.Tokenizer` too.

    Where there is a method `decode_bytes(ids) -> bytes`, the stream of text uses that.
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


class TextStream:
    """Turns tokens into text one by one and holds bytes back until their character is whole.

    The pieces joined are the text of all tokens decoded at once; bytes that are no UTF-8 become U+FFFD. An id that the
    tokenizer does not know (a model's vocabulary may be padded) stands for no text.

    Args:
        tokenizer: any of the kinds that `Tokenizer` allows.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode_bytes = getattr(tokenizer, "decode_bytes", None)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[int] = []  # only for tokenizers that cannot give bytes

    def push(self, token_id: int) -> str:
        """Text that became whole with this token; empty while a character is unfinished."""
        if self._decode_bytes is not None:
            try:
                new_bytes = self._decode_bytes([token_id])
            except ValueError:
                return ""
            return self._decoder.decode(new_bytes)
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending)
        if not text.endswith("\ufffd"):
            self._pending.clear()
            return text
        # The last character may be unfinished. What stands before it can go, where cutting there changes nothing.
        for cut in range(len(self._pending) - 1, 0, -1):
            whole = self._tokenizer.decode(self._pending[:cut])
            if whole + self._tokenizer.decode(self._pending[cut:]) == text:
                del self._pending[:cut]
                return whole
        if len(self._pending) < LONGEST_CHARACTER:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole, else nothing."""
        if self._pending:
            text = self._tokenizer.decode(self._pending)
            self._pending.clear()
            return text
        return self._decoder.decode(b"", final=True)
