"""The whole model: embedding, blocks, final norm and tied head.

Shapes: B batch, T tokens, C model width, V vocabulary, L layers.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gptoss.config import ATTENTION_BACKENDS, ROPE_MODES, ModelConfig

from .attention import GPTOSSAttention
from .cache import MixedKVCache
from .head import linear_cross_entropy
from .moe import MoELayer, MoERouter, StackedExperts
from .norm import RMSNorm
from .rotary import YaRNRoPE

Rotary = tuple[Tensor, Tensor]


class GPTOSSBlock(nn.Module):
    """One pre-norm block: x ← x + Attn(norm(x)), then x ← x + MoE(norm(x)) (chapters 1 and 14)."""

    def __init__(self, cfg: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(cfg.d_model, cfg.rms_norm_eps, cfg.rms_norm_detach)
        self.attn = GPTOSSAttention(cfg, layer_idx)
        self.norm2 = RMSNorm(cfg.d_model, cfg.rms_norm_eps, cfg.rms_norm_detach)
        self.moe = MoELayer(cfg)

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        rotary: Rotary,
        cache: MixedKVCache | None = None,
        key_start: Int[Tensor, "B"] | None = None,
    ) -> tuple[Float[Tensor, "B T C"], Float[Tensor, ""]]:
        """Returns the new residual stream and the layer's load-balancing loss."""
        x = x + self.attn(self.norm1(x), rotary, cache, key_start)
        moe_out, aux = self.moe(self.norm2(x))
        return x + moe_out, aux


class GPTOSS(nn.Module):
    """GPT-OSS-Lite: a decoder with grouped queries, alternating windows, learned sinks, YaRN and routed experts.

    `rope_mode` is "plain" or "yarn" and holds for whole sequences (`set_rope_mode`). Weights start as N(0, init_std²),
    norms at 1, sinks at 0.

    Source: chapter 14.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.blocks = nn.ModuleList(GPTOSSBlock(cfg, layer) for layer in range(cfg.n_layers))
        self.norm = RMSNorm(cfg.d_model, cfg.rms_norm_eps, cfg.rms_norm_detach)
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        self.rope = YaRNRoPE(
            cfg.head_dim,
            cfg.rope_theta,
            cfg.yarn_scale_factor,
            cfg.yarn_original_max_seq_len,
            cfg.yarn_target_seq_len,
            cfg.yarn_beta_fast,
            cfg.yarn_beta_slow,
            use_mscale=cfg.yarn_mscale,
            mscale_pruned=cfg.yarn_mscale_pruned,
            truncate=cfg.yarn_truncate,
        )
        self.checkpoint_every = 0
        _tie_head(self)
        self.register_load_state_dict_post_hook(_tie_head)  # assign=True takes two tensors for one
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw every matrix from N(0, init_std²), set norms to 1 and sinks to 0 (chapter 1)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | MoERouter | StackedExperts):
                for weight in module.parameters(recurse=False):
                    nn.init.normal_(weight, std=self.cfg.init_std)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, GPTOSSAttention) and module.sink_bias is not None:
                nn.init.zeros_(module.sink_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GPTOSS":
        """Move or cast as every module does; a tied head is tied again, since to_empty() makes two tensors of one."""
        super()._apply(fn, recurse)
        _tie_head(self)
        return self

    def forward(
        self,
        idx: Int[Tensor, "B T"],
        positions: Int[Tensor, "*B T"] | None = None,
        *,
        targets: Int[Tensor, "B T"] | None = None,
        reduction: str = "mean",
        cache: MixedKVCache | None = None,
        key_start: Int[Tensor, "B"] | None = None,
        last_only: bool = False,
        loss_chunk_size: int = 4096,
    ) -> tuple[Tensor, Float[Tensor, ""]]:
        """Next-token logits, or the cross-entropy of given targets.

        Args:
            idx: token ids.
            positions: absolute positions in tokens, (T,) or (B, T); counted from the cache's length when left out.
            targets: next-token ids; −100 is ignored. The loss comes from the chunked head: logits of the whole batch
                never exist.
            reduction: "mean" over the targets that count, or "sum".
            cache: keys and values of earlier tokens; it takes up those of idx.
            key_start: how many left-padding tokens each row has.
            last_only: logits of the last position only.
            loss_chunk_size: tokens whose logits exist at once when targets are given.

        Returns:
            (logits (B, T, V), or (B, 1, V) with `last_only`; aux), or (cross-entropy, aux) with targets. aux is the
            load-balancing loss, averaged over the layers.

        Raises:
            ValueError: idx is not (B, T) with B and T ≥ 1, or targets do not match it.
        """
        if idx.dim() != 2 or idx.numel() == 0:
            raise ValueError(f"idx {tuple(idx.shape)}: expected (B, T) token ids, at least one")
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets {tuple(targets.shape)}: expected {tuple(idx.shape)}, as idx")
        if positions is None:
            start = 0 if cache is None else cache.n_seen
            positions = torch.arange(start, start + idx.shape[1], device=idx.device)
            if key_start is not None:
                positions = (positions - key_start[:, None]).clamp(min=0)  # (B, T)
        x = self.embed(idx)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # a bf16 residual stream
        rotary = self.rotary_tables(positions, x.dtype)
        aux_losses = []
        for layer, block in enumerate(self.blocks):
            inputs = (x, rotary[layer % 2], cache, key_start)
            if (
                self.checkpoint_every
                and layer % self.checkpoint_every == 0
                and torch.is_grad_enabled()
            ):
                # Nothing in a block is random, so there is no state of a generator to come back to.
                x, aux = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, aux = block(*inputs)
            aux_losses.append(aux)
        aux = torch.stack(aux_losses).mean()
        x = self.norm(x[:, -1:] if last_only else x)
        if targets is None:
            return self.head(x), aux
        loss = linear_cross_entropy(
            x.flatten(0, 1),
            self.head.weight,
            targets.flatten(),
            chunk_size=loss_chunk_size,
            reduction=reduction,
        )
        return loss, aux

    def rotary_tables(
        self, positions: Int[Tensor, "*B T"], dtype: torch.dtype
    ) -> tuple[Rotary, Rotary]:
        """cos and sin for the windowed layers (even) and for the global ones (odd), which may be pruned.

        With `yarn_layers` "global" the windowed layers stay plain in either mode: no distance inside a window is new.
        """
        windowed = "plain" if self.cfg.yarn_layers == "global" else None
        return (
            self.rope(positions, self.cfg.n_pruned_pairs(0), dtype, windowed),
            self.rope(positions, self.cfg.n_pruned_pairs(1), dtype),
        )

    @property
    def rope_mode(self) -> str:
        """The rotary mode in use, "plain" or "yarn"."""
        return self.rope.mode

    def set_rope_mode(self, mode: str) -> None:
        """Use plain RoPE or YaRN from the next sequence on. Keys cached before are rotated the old way.

        Raises:
            ValueError: an unknown mode.
        """
        if mode not in ROPE_MODES:
            raise ValueError(f"rope mode {mode!r}: expected one of {', '.join(ROPE_MODES)}")
        self.rope.mode = mode

    def set_attention_backend(self, backend: str) -> None:
        """Choose the attention kernel of every layer; see `causal_attention`.

        Raises:
            ValueError: an unknown name.
        """
        if backend not in ATTENTION_BACKENDS:
            raise ValueError(
                f"attention backend {backend!r}: expected one of {', '.join(ATTENTION_BACKENDS)}"
            )
        for module in self.modules():
            if isinstance(module, GPTOSSAttention):
                module.backend = backend

    def enable_gradient_checkpointing(self, every: int = 3) -> None:
        """Keep only the input of blocks 0, every, 2·every, … and recompute the rest in the backward pass; 0 is off.

        It acts while gradients are enabled (chapter 11).

        Raises:
            ValueError: every is negative.
        """
        if every < 0:
            raise ValueError(f"every = {every}: expected 0 (off) or a positive number of blocks")
        self.checkpoint_every = every

    def num_parameters(self) -> int:
        """Stored parameters, a tied tensor counted once: 501,836,640 for the production model."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the routed experts that it is not sent to (247,032,672)."""
        cfg = self.cfg
        idle = cfg.n_routed_experts - cfg.n_activated_experts
        return self.num_parameters() - cfg.n_layers * idle * 3 * cfg.d_model * cfg.ffn_dim

    def extra_repr(self) -> str:
        cfg = self.cfg
        return (
            f"d_model={cfg.d_model}, n_layers={cfg.n_layers}, vocab={cfg.vocab_size}, "
            f"experts={cfg.n_activated_experts}/{cfg.n_routed_experts}+{cfg.n_shared_experts}, "
            f"window={cfg.window_size}, rope={self.rope_mode}, params={self.num_parameters():,}"
        )


def _tie_head(model: GPTOSS, _keys: object = None) -> None:
    """Make the head's matrix the embedding's again, where the model ties them."""
    if model.cfg.weight_tying:
        model.head.weight = model.embed.weight
