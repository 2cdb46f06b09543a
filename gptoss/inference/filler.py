"""Text for a passkey prompt to hide a number in, from any source that `gptoss prepare` reads (chapter 16)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from gptoss.data.corpora import open_corpus

from .text import Tokenizer, encode_text


def read_filler(
    tokenizer: Tokenizer, source: str | Sequence[str], n_tokens: int
) -> Int[np.ndarray, "n"]:
    """The first tokens of a text that the model should not have been trained on.

    Args:
        tokenizer: the model's.
        source: "package:NAME", a folder, a file, a glob, … as `open_corpus` takes it, or several, read one after the other.
        n_tokens: how many at least; reading stops after the document that reaches it. A prompt cuts a stretch anywhere, so
            prompts nearly as long as this share most of their text: several times a prompt's length keeps them apart.

    Returns:
        (n,) int64 token ids, n ≥ n_tokens.

    Raises:
        ValueError: nothing found under that name, or too little text.
    """
    corpus = open_corpus(source)
    ids: list[int] = []
    for document in corpus.read(None):
        ids += encode_text(tokenizer, document.text)
        if len(ids) >= n_tokens:
            return np.asarray(ids, dtype=np.int64)
    raise ValueError(
        f"{corpus.name} has {len(ids):,} tokens and {n_tokens:,} are needed; name a longer text"
    )
