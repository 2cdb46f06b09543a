"""A model small enough to read in full for each token, and tokenizers without files."""

from collections.abc import Callable

import pytest
import torch

from gptoss.config import ModelConfig
from gptoss.model.transformer import GPTOSS


@pytest.fixture(scope="session")
def make_model() -> Callable[..., GPTOSS]:
    """Six query heads over two kv heads, sinks that are not 0, weights large enough for varied greedy text."""

    def make(
        window: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64, **changes
    ) -> GPTOSS:
        torch.manual_seed(seed)
        sizes = {
            "vocab_size": 61,
            "d_model": 48,
            "n_layers": 4,
            "n_heads": 6,
            "n_kv_heads": 2,
            "head_dim": 8,
            "ffn_dim": 32,
            "n_routed_experts": 4,
            "window_size": window,
            "yarn_original_max_seq_len": 64,
            "yarn_target_seq_len": 512,
            "max_seq_len": 64,
            "eval_max_seq_len": 512,
            "init_std": 0.3,
        }
        model = GPTOSS(ModelConfig(**sizes | changes)).to(dtype)
        with torch.no_grad():
            for block in model.blocks:
                block.attn.sink_bias.normal_()
        return model

    return make


class ByteTokenizer:
    """One token a byte; text only through `decode`, as a library's tokenizer gives it."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class BytesTokenizer(ByteTokenizer):
    """The same, with bytes on offer; ids from 250 on name no token."""

    def decode_bytes(self, ids) -> bytes:
        if any(i >= 250 for i in ids):
            raise ValueError("no such token")
        return bytes(ids)


@pytest.fixture(
    scope="session", params=[ByteTokenizer, BytesTokenizer], ids=["decode", "decode_bytes"]
)
def byte_tokenizer(request):
    return request.param()


@pytest.fixture(scope="session")
def plain_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def bytes_tokenizer() -> BytesTokenizer:
    return BytesTokenizer()
