"""The architecture as numbers, and the rules that they keep."""

import warnings
from dataclasses import dataclass

MOE_DISPATCHES = ("stacked", "triton_grouped", "grouped_mm")
ATTENTION_BACKENDS = ("auto", "reference", "blocked", "flex", "triton")
ROPE_MODES = ("plain", "yarn")
YARN_LAYERS = ("global", "all")
DTYPES = ("fp32", "bf16")


@dataclass
class ModelConfig:
    """The architecture. Every default is the 502M production model (chapters 1, 5-9, 14).

    `rms_norm_detach` takes RMSNorm's statistic out of the gradient, as the source documents do (chapter 1).
    `yarn_truncate` rounds YaRN's ramp bounds to whole pairs (chapter 8). `yarn_layers` says which layers YaRN changes:
    "global", or "all" as in the source documents; `yarn_mscale_pruned` sharpens the pruned pairs too, which the source
    documents leave at 1. Chapters 8 and 16 measure both.
    `attention_backend` names the attention kernel; "auto" is explained in chapter 6.

    Raises:
        ValueError: a field breaks its rule; the message names the field, the value and the rule.
    """

    vocab_size: int = 128_000
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 96
    ffn_dim: int = 1536
    n_routed_experts: int = 8
    n_activated_experts: int = 2
    n_shared_experts: int = 1
    window_size: int = 128
    sink_bias: bool = True
    rope_theta: float = 100_000
    yarn_scale_factor: float = 32
    yarn_original_max_seq_len: int = 4096
    yarn_target_seq_len: int = 131_072
    yarn_beta_fast: float = 32
    yarn_beta_slow: float = 1
    yarn_mscale: bool = True
    yarn_truncate: bool = False
    yarn_prune_rope_global: bool = True
    yarn_layers: str = "global"
    yarn_mscale_pruned: bool = True
    max_seq_len: int = 4096
    eval_max_seq_len: int = 131_072
    dtype: str = "bf16"
    weight_tying: bool = True
    rms_norm_eps: float = 1e-5
    rms_norm_detach: bool = False
    init_std: float = 0.02
    moe_dispatch: str = "stacked"
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"ModelConfig.{name} = {getattr(self, name)!r}: {rule}")

        for name in (
            *("vocab_size", "d_model", "n_layers", "window_size", "ffn_dim"),
            *("rope_theta", "rms_norm_eps", "max_seq_len", "eval_max_seq_len"),
            *("yarn_original_max_seq_len", "yarn_target_seq_len"),
        ):
            require(getattr(self, name) > 0, name, "must be positive")
        for name in ("n_heads", "n_kv_heads"):
            require(getattr(self, name) > 0, name, "n_heads and n_kv_heads must be positive")
        require(
            self.n_heads % self.n_kv_heads == 0,
            "n_heads",
            f"n_heads must be a multiple of n_kv_heads ({self.n_kv_heads})",
        )
        require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            "head_dim",
            "head_dim must be a positive even int",
        )
        require(
            self.n_heads * self.head_dim == self.d_model,
            "head_dim",
            f"n_heads * head_dim must equal d_model ({self.n_heads} * {self.head_dim} is not {self.d_model})",
        )
        require(
            0 < self.n_activated_experts <= self.n_routed_experts,
            "n_activated_experts",
            f"0 < n_activated_experts <= n_routed_experts ({self.n_routed_experts}) required",
        )
        require(self.n_shared_experts >= 0, "n_shared_experts", "must not be negative")
        require(self.init_std >= 0, "init_std", "must not be negative")
        require(self.yarn_scale_factor >= 1, "yarn_scale_factor", "must be at least 1")
        require(
            self.yarn_scale_factor == 1
            or self.yarn_original_max_seq_len < self.yarn_target_seq_len,
            "yarn_original_max_seq_len",
            "yarn_scale_factor > 1 requires yarn_original_max_seq_len < yarn_target_seq_len "
            f"({self.yarn_target_seq_len})",
        )
        for name, known in (
            ("moe_dispatch", MOE_DISPATCHES),
            ("attention_backend", ATTENTION_BACKENDS),
            ("dtype", DTYPES),
            ("yarn_layers", YARN_LAYERS),
        ):
            require(getattr(self, name) in known, name, f"must be one of {', '.join(known)}")

        if self.n_activated_experts == 1 and self.n_routed_experts > 1:
            warnings.warn(
                "n_activated_experts = 1: the one renormalised routing weight is always 1, so the router "
                "gets no gradient from the language-model loss",
                stacklevel=3,
            )
        if self.yarn_prune_rope_global and self.n_layers % 2 == 1:
            warnings.warn(
                f"yarn_prune_rope_global with n_layers = {self.n_layers}: the last layer is windowed, "
                "so it is not pruned",
                stacklevel=3,
            )
        if self.eval_max_seq_len < self.max_seq_len:
            warnings.warn(
                f"eval_max_seq_len = {self.eval_max_seq_len} is shorter than max_seq_len = {self.max_seq_len}",
                stacklevel=3,
            )

    def is_windowed(self, layer: int) -> bool:
        """Whether a layer attends through the sliding window: the even layers do."""
        return layer % 2 == 0

    def n_pruned_pairs(self, layer: int) -> int:
        """How many of a layer's fastest rotary pairs are left unrotated (D/4 on global layers, else 0)."""
        return (
            0 if self.is_windowed(layer) or not self.yarn_prune_rope_global else self.head_dim // 4
        )
