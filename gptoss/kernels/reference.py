"""Oracles of the expert layer: plain PyTorch, one expert after another, gradients by autograd.

Every kernel in this room computes one of these functions, with the same arguments and layout. Run them in float64 to judge
the others.

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import torch
import torch.nn.functional as functional
from jaxtyping import Float, Int
from torch import Tensor


def grouped_swiglu_reference(
    x_sorted: Float[Tensor, "R C"],
    counts: Int[Tensor, "E"],
    w1: Float[Tensor, "E F C"],
    w3: Float[Tensor, "E F C"],
) -> Float[Tensor, "R F"]:
    """Apply the gated half of each expert to its own run of rows.

        h[r] = silu(W1[e] x[r]) * (W3[e] x[r]),     e = the expert whose run holds row r

    Args:
        x_sorted: (R, C) token rows, expert 0's rows first, then expert 1's, ...
        counts: (E,) integer, rows per expert; they sum to R.
        w1: (E, F, C) gate weights.
        w3: (E, F, C) up weights, same dtype as w1.

    Returns:
        (R, F) hidden rows in the order of ``x_sorted``.

    Raises:
        ValueError: when the counts do not sum to R.

    Source: Shazeer 2020, "GLU variants improve Transformer", section 2; chapter 9.
    """
    rows = _rows_per_expert(counts, x_sorted.shape[0])
    hidden = [
        functional.silu(functional.linear(x, gate)) * functional.linear(x, up)  # (rows[e], F)
        for x, gate, up in zip(x_sorted.split(rows), w1, w3, strict=True)
    ]
    return torch.cat(hidden)  # (R, F)


def grouped_linear_reference(
    h: Float[Tensor, "R F"],
    counts: Int[Tensor, "E"],
    w2: Float[Tensor, "E C F"],
) -> Float[Tensor, "R C"]:
    """Apply the down projection of each expert to its own run of rows: y[r] = W2[e] h[r].

    Args:
        h: (R, F) hidden rows sorted by expert.
        counts: (E,) integer, rows per expert; they sum to R.
        w2: (E, C, F) down weights.

    Returns:
        (R, C) expert outputs in the order of ``h``.

    Raises:
        ValueError: when the counts do not sum to R.

    Source: Shazeer 2020, "GLU variants improve Transformer", section 2; chapter 9.
    """
    rows = _rows_per_expert(counts, h.shape[0])
    return torch.cat(
        [functional.linear(x, down) for x, down in zip(h.split(rows), w2, strict=True)]
    )


def _rows_per_expert(counts: Tensor, n_rows: int) -> list[int]:
    rows = counts.tolist()
    if sum(rows) != n_rows:
        raise ValueError(
            f"counts must sum to the number of rows: expected {n_rows}, got {sum(rows)}; "
            "count the same sorted expert ids that ordered the rows"
        )
    return rows
