"""OPT-21: the chunk of the documents' cross-entropy, whose logits exist whole, beside the head that never has them.

Shapes: N tokens, C model width, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gptoss.model.head import linear_cross_entropy
from gptoss.training.losses import chunked_cross_entropy

from .reading import Place, Row, compare_peaks, compare_times, relative_error


def loss_chunks(place: Place) -> Iterator[Row]:
    """OPT-21: head and loss, forward and backward, in time and peak memory."""
    N, C, V = (16_384, 768, 128_000) if place.cuda else (256, 64, 2000)
    small, large = (4096, 8192) if place.cuda else (64, 128)
    hidden = torch.randn(N, C, device=place.device, dtype=place.dtype).requires_grad_()
    weight = (0.02 * torch.randn(V, C, device=place.device)).to(place.dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), device=place.device)

    def documents(chunk: int) -> tuple[Tensor, ...]:
        loss = chunked_cross_entropy(hidden @ weight.T, targets, chunk)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    def ours() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(hidden, weight, targets, chunk_size=small)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    for name, chunk in ((f"a chunk of {small:,}", small), ("the whole at once", N)):
        where = place.name(f"head and loss, forward and backward, {N:,} x {V:,} logits; {large:,} a chunk against {name}")  # fmt: skip

        def off(chunk: int = chunk) -> tuple[Tensor, ...]:
            return documents(chunk)

        def on() -> tuple[Tensor, ...]:
            return documents(large)

        row = compare_times(place, where, off, on, ours=ours, repeats=1)
        row["difference"] = float(f"{relative_error(on()[0], off()[0]):.2e}")
        yield row
        yield from compare_peaks(place, where, off, on, ours)
