"""The KV cache of a model whose layers alternate between a sliding window and full attention (chapters 6, 15).

B batch, T new positions of one call, S keys to attend over, K kv heads, D head_dim, W window.

A windowed layer needs the last W keys only and keeps them in a ring. A global layer keeps every key in a buffer that
grows by half whenever it is full, or has its final length from the start.
"""

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gptoss.config import ModelConfig

from .layer_store import LayerStore


def kv_cache_bytes(
    n_tokens: int,
    n_windowed: int,
    n_global: int,
    n_kv_heads: int,
    head_dim: int,
    window: int,
    bytes_per_value: int = 2,
    batch_size: int = 1,
) -> int:
    """Bytes of keys and values after `n_tokens` positions.

    bytes = B · (n_windowed · min(n_tokens, W) + n_global · n_tokens) · 2 · K · D · bytes_per_value

    Args:
        n_tokens: positions seen (tokens).
        n_windowed, n_global: layers of each kind; a cache that keeps everything has n_windowed = 0.
        n_kv_heads, head_dim, window: K, D and W.
        bytes_per_value: 2 for bf16, 4 for fp32 (bytes).
        batch_size: B.

    Returns:
        The sum over layers (bytes).

    Source: the documents' 1536 bytes a token and layer (2 · 4 · 96 · 2); chapters 6 and 15.
    """
    positions = n_windowed * min(n_tokens, window) + n_global * n_tokens
    return batch_size * positions * 2 * n_kv_heads * head_dim * bytes_per_value


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Autocast's dtype where autocast is on for the model's device, else that of its parameters."""
    parameter = next(model.parameters())
    kind = parameter.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype


class MixedKVCache:
    """Keys and values of every layer: the last W for windowed layers, all of them for global ones.

    `update` hands out what the new queries attend over, old keys and new ones, and only then lets the ring drop what
    left the window: a prompt longer than W is attended in full. Keys come back in order of position, so key j of the
    S returned ones has position n_seen − S + j.

    A layer is windowed or global from its first call on. Values are cast to `dtype` when they are written and come back
    in the dtype of the call. Gradients reach the keys of the current call; cached keys are constants.

    Args:
        n_layers: number of layers.
        n_kv_heads: K.
        head_dim: D.
        window: W, the keys that a windowed layer sees, the query's own included (tokens).
        batch_size: B.
        max_len: the longest sequence (tokens). With it, buffers have their final size from the first call on; without,
            they grow by half and hold at most 1.5 times what is needed.
        dtype: of the stored values.
        device: of the stored values.
        full: keep every key in windowed layers too (for comparison; the outputs are the same).

    Raises:
        ValueError: a size is not positive.

    Source: Beltagy et al. 2020 (sliding windows); the documents' mixed cache; chapters 6 and 15.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        window: int,
        batch_size: int = 1,
        max_len: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        *,
        full: bool = False,
    ) -> None:
        sizes = {
            "n_layers": n_layers,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "window": window,
            "batch_size": batch_size,
            "max_len": 1 if max_len is None else max_len,
        }
        for name, size in sizes.items():
            if size <= 0:
                raise ValueError(f"MixedKVCache: {name} must be positive, got {size}")
        self.n_layers = n_layers
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.batch_size = batch_size
        self.max_len = max_len
        self.dtype = dtype
        self.device = torch.device("cpu" if device is None else device)
        self.full = full
        self._layers: list[LayerStore | None] = [None] * n_layers

    @classmethod
    def for_config(
        cls,
        cfg: ModelConfig,
        batch_size: int = 1,
        max_len: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        *,
        full: bool = False,
    ) -> "MixedKVCache":
        """A cache of a configuration's sizes, already allocated when `max_len` (tokens) is given.

        Args:
            cfg: the model's configuration.
            batch_size, max_len, dtype, device, full: as in the constructor.

        Returns:
            An empty cache.
        """
        cache = cls(
            cfg.n_layers,
            cfg.n_kv_heads,
            cfg.head_dim,
            cfg.window_size,
            batch_size,
            max_len,
            dtype,
            device,
            full=full,
        )
        if max_len is not None:
            for layer_idx in range(cfg.n_layers):
                cache._store(layer_idx, cfg.is_windowed(layer_idx))
        return cache

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        batch_size: int = 1,
        max_len: int | None = None,
        full: bool = False,
        dtype: torch.dtype | None = None,
    ) -> "MixedKVCache":
        """A cache on the model's device, in the dtype in which its keys will arrive.

        Args:
            model: a GPTOSS.
            batch_size, max_len, full: as in the constructor.
            dtype: of the stored values; None takes autocast's dtype where autocast is on, else the parameters'.

        Returns:
            An empty cache.
        """
        cfg, device = cast(ModelConfig, model.cfg), next(model.parameters()).device
        dtype = compute_dtype(model) if dtype is None else dtype
        return cls.for_config(cfg, batch_size, max_len, dtype, device, full=full)

    @property
    def n_seen(self) -> int:
        """Positions seen so far (tokens), those that the rings have dropped included.

        While a forward pass is under way this already counts the positions of the pass.
        """
        return max(0 if layer is None else layer.seen for layer in self._layers)

    def update(
        self,
        layer_idx: int,
        k: Float[Tensor, "B K T D"],
        v: Float[Tensor, "B K T D"],
        is_windowed: bool,
        window: int | None = None,
    ) -> tuple[Float[Tensor, "B K S D"], Float[Tensor, "B K S D"]]:
        """Store one layer's new keys and values and return all that the new queries attend over.

        S = T + min(n, W) in a windowed layer and T + n in a global one, with n positions seen before the call.

        Args:
            layer_idx: which layer, from 0.
            k: (B, K, T, D), rotated keys of the T new positions.
            v: (B, K, T, D), their values.
            is_windowed: whether the layer attends through the window.
            window: W, or None for the cache's own.

        Returns:
            (keys, values), each (B, K, S, D) in order of position, the new ones last, in the dtype of `k`. They may
            share memory with the cache: read them before the next call.

        Raises:
            ValueError: wrong layer, shape, window or kind, or more positions than `max_len`.
        """
        layer = self._checked(layer_idx, k, v, is_windowed, window)
        needs_gradient = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
        if layer.window is not None or needs_gradient:
            old_k, old_v = layer.read()  # before the ring drops any
            k_all = torch.cat([old_k, k.to(self.dtype)], dim=2)  # (B, K, S, D)
            v_all = torch.cat([old_v, v.to(self.dtype)], dim=2)
            layer.write(k, v)
        else:
            layer.write(k, v)
            k_all, v_all = layer.read()  # no copy of a long buffer: (B, K, n + T, D)
        return k_all.to(k.dtype), v_all.to(v.dtype)

    def append(
        self,
        layer_idx: int,
        k_rot: Float[Tensor, "B K T D"],
        v: Float[Tensor, "B K T D"],
        is_windowed: bool,
        window: int | None = None,
    ) -> None:
        """Store one layer's new keys and values; a windowed layer keeps the last W.

        Args, Raises: as in `update`. To attend, use `update`: after an append the ring has already dropped keys that
        the first of the new queries may see.
        """
        self._checked(layer_idx, k_rot, v, is_windowed, window).write(k_rot, v)

    def get(
        self, layer_idx: int, is_windowed: bool
    ) -> tuple[Float[Tensor, "B K S D"], Float[Tensor, "B K S D"]]:
        """The stored keys and values of one layer in order of position.

        Args:
            layer_idx: which layer, from 0.
            is_windowed: True for at most the last W positions, False for all of them.

        Returns:
            (keys, values), each (B, K, S, D) with S = `seq_len(layer_idx, is_windowed)`, in the cache's dtype.

        Raises:
            ValueError: no such layer, or all positions are asked of a ring.
        """
        length = self.seq_len(layer_idx, is_windowed)
        layer = self._layers[layer_idx]
        if layer is None:
            empty = self._empty()
            return empty, empty.clone()
        k, v = layer.read()
        start = k.shape[2] - length  # a full cache holds more of a windowed layer than is asked for
        return k[:, :, start:], v[:, :, start:]

    def seq_len(self, layer_idx: int, is_windowed: bool) -> int:
        """How many positions one layer holds (tokens): min(n, W) when windowed, else n.

        Raises:
            ValueError: no such layer, or all positions are asked of a ring.
        """
        self._check_layer(layer_idx)
        layer = self._layers[layer_idx]
        if layer is None:
            return 0
        if layer.window is not None and not is_windowed:
            raise ValueError(_kind_message(layer_idx, self.window))
        return min(layer.seen, self.window) if is_windowed else layer.seen

    def reset(self) -> None:
        """Forget every position; the memory stays allocated for the next sequence."""
        for layer in self._layers:
            if layer is not None:
                layer.seen = 0

    def allocated_bytes(self) -> int:
        """Bytes that the buffers take now; `kv_cache_bytes` says what they should."""
        return sum(
            layer.k.numel() * layer.k.element_size() + layer.v.numel() * layer.v.element_size()
            for layer in self._layers
            if layer is not None
        )

    def __repr__(self) -> str:
        kind = "every key in every layer" if self.full else f"last {self.window} in windowed layers"
        return (
            f"MixedKVCache({self.n_layers} layers, {kind}, batch {self.batch_size}, "
            f"{self.n_seen} positions seen, {self.allocated_bytes()} bytes)"
        )

    def _empty(self) -> Tensor:
        shape = (self.batch_size, self.n_kv_heads, 0, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _store(self, layer_idx: int, is_windowed: bool) -> LayerStore:
        """The layer's store, made on its first use, of the kind that is asked for."""
        layer = self._layers[layer_idx]
        if layer is None:
            window = self.window if is_windowed and not self.full else None
            limits = [limit for limit in (self.max_len, window) if limit is not None]
            layer = LayerStore(window, min(limits, default=None), self._empty())
            if self.max_len is not None:
                layer.reserve(self.max_len)  # at once, so that decoding never reallocates
            self._layers[layer_idx] = layer
        elif layer.window is not None and not is_windowed:
            raise ValueError(_kind_message(layer_idx, self.window))
        return layer

    def _check_layer(self, layer_idx: int) -> None:
        if not 0 <= layer_idx < self.n_layers:
            raise ValueError(
                f"MixedKVCache: layer_idx must lie in 0..{self.n_layers - 1}, got {layer_idx}"
            )

    def _checked(
        self, layer_idx: int, k: Tensor, v: Tensor, is_windowed: bool, window: int | None
    ) -> LayerStore:
        """Refuse what does not fit before anything is written."""
        self._check_layer(layer_idx)
        expected = (self.batch_size, self.n_kv_heads, "T", self.head_dim)
        for name, x in (("k", k), ("v", v)):
            if x.ndim != 4 or (x.shape[0], x.shape[1], "T", x.shape[3]) != expected:
                raise ValueError(
                    f"MixedKVCache: expected {name} of shape {expected}, got {tuple(x.shape)}; "
                    "the cache is made for one batch size and one model"
                )
        if k.shape[2] != v.shape[2]:
            raise ValueError(
                f"MixedKVCache: k has {k.shape[2]} new positions and v has {v.shape[2]}; give equal numbers"
            )
        if is_windowed and window is not None and window != self.window:
            raise ValueError(
                f"MixedKVCache: made for a window of {self.window}, called with {window}; use one window"
            )
        layer = self._store(layer_idx, is_windowed)
        if self.max_len is not None and layer.seen + k.shape[2] > self.max_len:
            raise ValueError(
                f"MixedKVCache: {layer.seen} positions seen and {k.shape[2]} more came, max_len is {self.max_len}; "
                "reset() it or make a longer cache"
            )
        return layer


def _kind_message(layer_idx: int, window: int) -> str:
    return (
        f"MixedKVCache: layer {layer_idx} keeps only the last {window} positions, all of them were asked for; "
        "use is_windowed=True, or a cache with full=True"
    )
