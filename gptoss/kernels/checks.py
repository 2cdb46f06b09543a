"""What every version asks of its arguments, said once.

Shapes: R routed rows sorted by expert, C model width, F ffn width, E experts.
"""

import torch
from torch import Tensor


def check_swiglu(x: Tensor, counts: Tensor, w1: Tensor, w3: Tensor) -> None:
    """Raise ValueError unless x is (R, C), counts (E,) integer, w1 and w3 (E, F, C), all of one floating dtype and device."""
    if x.ndim != 2 or w1.ndim != 3 or w1.shape != w3.shape or w1.shape[2] != x.shape[1]:
        raise ValueError(
            f"expected x (R, C), w1 and w3 (E, F, C); got {_shape(x)}, {_shape(w1)}, {_shape(w3)}; "
            "flatten the tokens and stack the experts' (F, C) weights"
        )
    _check_together(counts, w1.shape[0], x, w1, w3)


def check_linear(h: Tensor, counts: Tensor, w2: Tensor) -> None:
    """Raise ValueError unless h is (R, F), counts (E,) integer, w2 (E, C, F), all of one floating dtype and device."""
    if h.ndim != 2 or w2.ndim != 3 or w2.shape[2] != h.shape[1]:
        raise ValueError(
            f"expected h (R, F) and w2 (E, C, F); got {_shape(h)}, {_shape(w2)}; "
            "flatten the tokens and stack the experts' (C, F) weights"
        )
    _check_together(counts, w2.shape[0], h, w2)


def check_layer(
    x: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, counts: Tensor,
    w1: Tensor, w3: Tensor, w2: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError unless the arguments of a whole expert layer fit each other."""
    check_swiglu(x, counts, w1, w3)
    if w2.shape != (w1.shape[0], w1.shape[2], w1.shape[1]):
        raise ValueError(
            f"expected w2 (E, C, F) beside w1 (E, F, C) = {_shape(w1)}, got {_shape(w2)}; transpose it"
        )
    _check_together(counts, w2.shape[0], x, w2)
    if weights.ndim != 2 or weights.shape[0] != x.shape[0] or not weights.is_floating_point():
        raise ValueError(
            f"expected floating routing weights (N, k) with N = {x.shape[0]}, got {weights.dtype} {_shape(weights)}; "
            "pass one weight for each token and choice"
        )
    for name, index in (("order", order), ("inverse", inverse)):
        if index.shape != (weights.numel(),) or index.is_floating_point():
            raise ValueError(
                f"expected integer {name} ({weights.numel()},), got {index.dtype} {_shape(index)}; "
                "sort the flattened (N, k) expert ids"
            )


def autocast_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the autocast dtype where autocast is on, as it does for ``F.linear``; custom operators are not on its list."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def rows_per_expert(counts: Tensor, n_rows: int) -> list[int]:
    """Read the counts on the host (one synchronisation on a GPU); ValueError unless they sum to n_rows."""
    rows = counts.tolist()
    if sum(rows) != n_rows or min(rows, default=0) < 0:
        raise ValueError(
            f"counts must sum to the number of rows: expected {n_rows}, got {rows}; "
            "count the same sorted expert ids that ordered the rows"
        )
    return rows


def _check_together(counts: Tensor, n_experts: int, *tensors: Tensor) -> None:
    if counts.shape != (n_experts,) or counts.is_floating_point():
        raise ValueError(
            f"expected integer counts ({n_experts},), got {counts.dtype} {_shape(counts)}; "
            "pass one row count for each expert of the stacked weights"
        )
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) > 1 or not tensors[0].is_floating_point():
        raise ValueError(
            f"expected one floating dtype for rows and weights, got {sorted(map(str, dtypes))}; "
            "cast them or run under autocast"
        )
    devices = {t.device for t in (counts, *tensors)}
    if len(devices) > 1:
        raise ValueError(
            f"expected one device, got {sorted(map(str, devices))}; move the tensors together"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
