"""The fast decoder: one model's decoding step as a fixed program, captured as a CUDA graph and replayed (chapter 15).

A step at batch 1 reads every active weight once and does nothing else that takes time, so what is left to lose is the
host: some seventy launches for every token. Here every buffer is allocated once, and token, position, ring slot and length stay on
the device; then a step is the same launches each time, and the GPU can repeat them alone.

    tape      ids of the sequence; a step reads tape[p] and, when it chooses, writes tape[p + 1]
    cache     K and V: a ring of W slots in windowed layers, `max_len` slots in global ones; the prefill writes there too
    table     cos and sin of every position for both kinds of layer

Shapes: T prompt tokens, C model width, D head_dim, V vocabulary, W window.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gptoss.config import ModelConfig
from gptoss.inference.decoder_layer import (
    Place,
    pack_layer,
    run_layer,
    unsupported,
)
from gptoss.inference.prefill import prefill
from gptoss.inference.rope_mode import rope_mode
from gptoss.kernels.decode import decode_linear
from gptoss.kernels.decode_checks import require_decode_kernels
from gptoss.model.cache import MixedKVCache, compute_dtype

WARM_UP_STEPS = 2


class StaticCache(MixedKVCache):
    """A `MixedKVCache` with all its memory from the start, whose buffers a captured graph may keep the addresses of."""

    def buffers(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, K, M, D) of one layer as they are stored: position p in slot p, in a ring in p mod W."""
        layer = self._layers[layer_idx]
        if layer is None:
            raise ValueError(
                "a static cache needs max_len, so that its buffers exist from the start"
            )
        return layer.k, layer.v


class Decoder:
    """Decode one sequence at a time with a fixed program; a new `read` ends the one before.

    On a GPU the step is captured as a CUDA graph on first use. On a CPU the same kernels run in Triton's interpreter, in
    fp32, for study and tests. The tokens are those of `generate` up to rounding.

    The decoder reads the model's own weights where their dtype is right, and copies otherwise: make a new one after the
    weights have changed.

    Args:
        model: a GPTOSS.
        max_len: the longest sequence, prompt and new tokens (tokens).
        mode: rotary mode, "plain" or "yarn"; the model's own when left out. It holds for every sequence.
        dtype: of weights, activations and cache; autocast's where autocast is on, else the parameters', when left out.
        graph: False launches each kernel anew also on a GPU.
        overlap: start each kernel while the one before it ends, where the GPU can (compute capability 9.0). The tokens
            are the same bits; False is for measuring.

    Raises:
        ValueError: a model, dtype or device that the decoding kernels do not serve; the message says which.
        ImportError: Triton is not installed.

    Source: chapter 15.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        max_len: int,
        *,
        mode: str | None = None,
        dtype: torch.dtype | None = None,
        graph: bool = True,
        overlap: bool = True,
    ) -> None:
        gptoss: Any = model  # nn.Module types every attribute as a tensor or a module
        self.model = model
        self.cfg: ModelConfig = gptoss.cfg
        self.max_len = max_len
        self.mode = gptoss.rope_mode if mode is None else mode
        self.device = gptoss.embed.weight.device
        if self.device.type == "meta":
            raise ValueError("the model is on the meta device, without weights: load them first")
        self.dtype = dtype or compute_dtype(model)
        require_decode_kernels()
        if problem := unsupported(self.cfg, self.dtype, self.device):
            raise ValueError(f"the decoder cannot serve this model: {problem}")
        cache = StaticCache.for_model(model, 1, max_len, dtype=self.dtype)
        self.cache = cast(StaticCache, cache)  # for_model is annotated with its base class
        self._overlap = overlap
        self._captures = graph and self.device.type == "cuda"
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.n_sequences = 0  # begun so far; whoever reads along sees that another one was begun
        self.n_read = 0  # positions in the cache, known to the host without asking: the next step reads tape[n_read]

        def take(weight: Tensor) -> Tensor:
            return weight.detach().to(self.dtype).contiguous()

        self._embedding = take(gptoss.embed.weight)  # (V, C)
        self._head = self._embedding if self.cfg.weight_tying else take(gptoss.head.weight)
        self._norm, self._eps = gptoss.norm.weight.detach(), gptoss.norm.eps
        self._layers = [pack_layer(block, self.dtype) for block in gptoss.blocks]
        positions = torch.arange(max_len, device=self.device)
        with rope_mode(model, self.mode):
            tables = [t for kind in gptoss.rotary_tables(positions, self.dtype) for t in kind]
        self._table = torch.cat(
            tables, dim=1
        )  # (max_len, 4·D/2): cos, sin windowed; cos, sin global

        def counter() -> Tensor:
            return torch.zeros(1, dtype=torch.int32, device=self.device)

        self.tape = torch.zeros(max_len + 1, dtype=torch.long, device=self.device)
        self._position, self._length = counter(), counter()
        self._ring_slot, self._ring_length = counter(), counter()
        self._x = torch.zeros(1, self.cfg.d_model, dtype=self.dtype, device=self.device)
        self._angles = self._table.new_zeros(1, self._table.shape[1])
        angles = self._angles.chunk(4, dim=1)
        self._windowed = Place(self._ring_slot, self._ring_length, angles[0], angles[1])
        self._global = Place(self._position, self._length, angles[2], angles[3])

    @torch.no_grad()
    def read(self, ids: Int[Tensor, "1 T"], chunk_size: int | None = None) -> Float[Tensor, "1 V"]:
        """Start a new sequence: read a prompt into the cache, chunk by chunk, with the model's own layers.

        Args:
            ids: (1, T) token ids, 1 ≤ T ≤ max_len.
            chunk_size: tokens read at once; `prefill` chooses when left out.

        Returns:
            (1, V) logits of the next token, for which `put` has the place.

        Raises:
            ValueError: more than one row, a prompt longer than `max_len`, or what is no id of the vocabulary.
        """
        if ids.ndim != 2 or ids.shape[0] != 1 or not 0 < ids.shape[1] <= self.max_len:
            raise ValueError(
                f"expected ids (1, T) with T from 1 to max_len = {self.max_len}, got {tuple(ids.shape)}"
            )
        V = self.cfg.vocab_size
        if ids.is_floating_point() or bool(((ids < 0) | (ids >= V)).any()):
            raise ValueError(
                f"expected integer ids in the vocabulary [0, {V}), got {ids.dtype} from {ids.min()} to {ids.max()}"
            )
        T = ids.shape[1]
        self.restart()
        self.tape[:T] = ids[0]
        casts = self.dtype != next(self.model.parameters()).dtype
        with (
            rope_mode(self.model, self.mode),
            torch.autocast(self.device.type, self.dtype if casts else None, enabled=casts),
        ):
            logits = prefill(self.model, ids, self.cache, chunk_size=chunk_size)
        self.n_read = T
        self._position.fill_(T)
        return logits

    def restart(self) -> None:
        """Forget the sequence; memory and graphs stay."""
        self.cache.reset()
        self.n_sequences += 1
        self.n_read = 0
        self._position.zero_()

    def put(self, token: Int[Tensor, "1"] | int) -> None:
        """Write the token that the next step reads; the host does not wait, so a tensor's value is not looked at.

        Raises:
            ValueError: a number outside the vocabulary.
        """
        if isinstance(token, int) and not 0 <= token < self.cfg.vocab_size:
            raise ValueError(
                f"token {token}: expected an id of the vocabulary [0, {self.cfg.vocab_size})"
            )
        self.tape[self.n_read : self.n_read + 1] = token

    @torch.no_grad()
    def step(self, choose: bool = True) -> Float[Tensor, "1 V"]:
        """Read the next token of the tape; with `choose`, write the greedy choice after it.

        Args:
            choose: False leaves the choice to the caller, who writes it with `put`.

        Returns:
            (1, V) logits, overwritten by the next step.

        Raises:
            ValueError: the sequence has `max_len` tokens.
        """
        self._require_room()
        if not self._captures:
            logits = self._run(choose)
        else:
            self.capture(choose)
            graph, logits = self._graphs[choose]
            with torch.cuda.device(self.device):
                graph.replay()
        self.n_read += 1
        return logits

    @torch.no_grad()
    def capture(self, choose: bool = True) -> None:
        """Capture the step now rather than in its first use; does nothing where it is captured or where there is no GPU.

        What is in the cache stays: the warm-up computes the next step, and its position is put back. After a sequence
        of `max_len` tokens there is no next step: `restart` first.

        Raises:
            ValueError: the sequence has `max_len` tokens.
        """
        if not self._captures or choose in self._graphs:
            return
        self._require_room()
        with torch.cuda.device(self.device):
            # Kernels are compiled and loaded before the capture, which allows neither.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    self._position.fill_(self.n_read)
                    self._run(choose)
                self._position.fill_(self.n_read)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads (a data loader's) may go on allocating meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                logits = self._run(choose)
        self._graphs[choose] = graph, logits

    def _require_room(self) -> None:
        if self.n_read >= self.max_len:
            raise ValueError(
                f"the decoder holds max_len = {self.max_len} tokens: make a longer one, or restart()"
            )

    def _run(self, choose: bool) -> Tensor:
        from gptoss.kernels.decode_step import begin_step, choose_token

        begin_step(
            self.tape, self._position, self._embedding, self._table, self._x, self._angles,
            self._length, self._ring_slot, self._ring_length, self.cfg.window_size, self._overlap,
        )  # fmt: skip
        x = self._x
        for layer, weights in enumerate(self._layers):
            place = self._windowed if self.cfg.is_windowed(layer) else self._global
            x = run_layer(x, weights, place, *self.cache.buffers(layer), self._overlap)
        logits = decode_linear(
            x, self._head, self._norm, eps=self._eps, overlap=self._overlap
        )  # (1, V)
        if choose:
            choose_token(logits, self._length, self.tape, self._position, self._overlap)
        else:
            self._position.copy_(self._length)
        return logits
