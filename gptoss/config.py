"""What a run is: the model, its training and its data, as three dataclasses and one YAML file.

The field names are the YAML keys. The defaults of `ModelConfig` and `TrainingConfig` are the 502M production run.
A file may leave any key out; a key that no field has is an error that names the nearest one.
"""

import dataclasses
import difflib
import types
import typing
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Union

import yaml

MOE_DISPATCHES = ("stacked", "triton_grouped", "grouped_mm")
ATTENTION_BACKENDS = ("auto", "reference", "blocked", "flex", "triton")
ROPE_MODES = ("plain", "yarn")
YARN_LAYERS = ("global", "all")
DTYPES = ("fp32", "bf16")
Section = typing.TypeVar("Section")


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


@dataclass
class TrainingConfig:
    """How a model is trained. Lengths are optimiser steps unless said otherwise (chapters 11-13, 17).

    `micro_batch_size` counts sequences on one device at once; "auto" picks the largest that fits. Tokens a step are
    micro_batch_size · gradient_accumulation_steps · max_seq_len as written here, on any number of devices.
    `rope` is the rotary mode in training: "yarn" is the source documents' recipe (chapter 8).
    """

    micro_batch_size: int | str = 8
    gradient_accumulation_steps: int = 4
    total_steps: int = 61_000
    warmup_steps: int = 3000
    lr: float = 4e-4
    min_lr_ratio: float = 0.05
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-6
    grad_clip: float = 1.0
    grad_checkpoint: bool = True
    grad_checkpoint_every: int = 3
    compile: bool = True
    compile_mode: str = "max-autotune"
    save_interval: int = 2000
    log_interval: int = 50
    nan_guard: bool = True
    nan_guard_max_consecutive: int = 5
    aux_loss_alpha: float = 0.01
    save_dir: str = "checkpoints/pretrain_a100"
    seed: int = 1337
    rope: str = "plain"
    keep_last: int = 3
    loss_chunk_size: int = 4096
    validation_interval: int = 500
    validation_batches: int = 16
    sample_interval: int = 0
    sample_prompt: str = "def "
    parallel: str = "ddp"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"TrainingConfig.{name} = {getattr(self, name)!r}: {rule}")

        for name in (
            *("gradient_accumulation_steps", "total_steps", "lr", "save_interval", "log_interval"),
            *("nan_guard_max_consecutive", "adam_eps", "grad_clip", "loss_chunk_size"),
        ):
            require(getattr(self, name) > 0, name, "must be positive")
        for name in (
            *("warmup_steps", "weight_decay", "grad_checkpoint_every", "aux_loss_alpha"),
            *("keep_last", "validation_interval", "validation_batches", "sample_interval"),
        ):
            require(getattr(self, name) >= 0, name, "must not be negative")
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "must lie in [0, 1]")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, "must lie in [0, 1)")
        require(
            self.micro_batch_size == "auto"
            or (isinstance(self.micro_batch_size, int) and self.micro_batch_size > 0),
            "micro_batch_size",
            'must be a positive int or "auto"',
        )
        require(self.rope in ROPE_MODES, "rope", f"must be one of {', '.join(ROPE_MODES)}")
        require(self.parallel in ("ddp", "fsdp2"), "parallel", "must be one of ddp, fsdp2")


@dataclass
class DataConfig:
    """Where the tokens come from (chapter 13).

    `train_data_path` is a directory of shards written by `gptoss prepare`; without one, `corpus` names a built-in text
    ("stdlib": the Python standard library of the running interpreter) that is prepared once and cached.
    `retrieval_share` of the training windows carry `retrieval_keys` named keys, `retrieval_near_misses` lines that look
    like them, and `retrieval_questions` questions about the keys (chapter 16).
    """

    train_data_path: str | None = None
    validation_data_path: str | None = None
    corpus: str | None = "stdlib"
    tokenizer: str | None = None
    retrieval_share: float = 0.0
    retrieval_keys: int = 8
    retrieval_questions: int = 6
    retrieval_near_misses: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                raise ValueError(f"DataConfig.{name} = {getattr(self, name)!r}: {rule}")

        require(self.corpus in (None, "stdlib"), "corpus", 'must be "stdlib" or left out')
        require(0 <= self.retrieval_share <= 1, "retrieval_share", "must lie in [0, 1]")
        require(self.retrieval_keys > 0, "retrieval_keys", "must be positive")
        require(
            0 < self.retrieval_questions <= self.retrieval_keys,
            "retrieval_questions",
            "must be positive and at most retrieval_keys",
        )
        for name in ("retrieval_near_misses", "num_workers"):
            require(getattr(self, name) >= 0, name, "must not be negative")


@dataclass
class RunConfig:
    """One run: the three sections of a YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The run as plain values, ready for YAML or JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, sections: dict[str, Any]) -> "RunConfig":
        """Build a run from plain sections.

        Raises:
            ValueError: an unknown section or key (with the nearest known name), a value of the wrong type, or a rule
                of the section that does not hold.
        """
        known = {f.name: f.default_factory for f in dataclasses.fields(cls)}
        for name in sections:
            _require_known(name, known, "section")
        return cls(
            **{
                name: section_from_dict(typing.cast(type, factory), sections.get(name) or {})
                for name, factory in known.items()
            }
        )

    @classmethod
    def from_saved(cls, sections: Any) -> "RunConfig":
        """Build a run from the config.json that it left beside its weights, also from before some fields existed.

        A field that came later takes its default, unless the model was trained as something else: YaRN once changed all
        layers and left pruned pairs at 1, so a model trained with YaRN keeps that.

        Raises:
            ValueError: as in `from_dict`, or another form.
        """
        _require_sections(sections)
        model, training = sections.get("model") or {}, sections.get("training") or {}
        if training.get("rope") == "yarn":
            model = {"yarn_layers": "all", "yarn_mscale_pruned": False} | model
        return cls.from_dict(sections | {"model": model})


def list_configs() -> list[str]:
    """The names of the configurations that come with the package."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files("gptoss").joinpath("configs").iterdir()
        if entry.name.endswith(".yaml")
    )


def load_config(name_or_path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run from a packaged name ("tiny") or a YAML file, then apply overrides.

    Args:
        name_or_path: one of `list_configs()`, or the path of a YAML file with `model:`, `training:` and `data:`.
        overrides: strings such as "training.lr=1e-3", read as YAML and applied in order.

    Raises:
        FileNotFoundError: neither a packaged name nor a file.
        ValueError: the file is not YAML of that form, or a key or value is wrong; the message says which.
    """
    name = str(name_or_path)
    path = Path(name)
    if name in list_configs():
        text = resources.files("gptoss").joinpath("configs", f"{name}.yaml").read_text()
    elif path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: not UTF-8 text: {error}; give a YAML file") from error
    else:
        raise FileNotFoundError(
            f"no configuration {name!r}: give a YAML file or one of {', '.join(list_configs())}"
        )
    sections = _read_yaml(text, name) or {}
    _require_sections(sections, f"{name}: ")
    for override in overrides:
        _apply_override(sections, override)
    return RunConfig.from_dict(sections)


def section_from_dict(section: type[Section], values: dict[str, Any]) -> Section:
    """Build one section's dataclass from plain values, checking names and types.

    Raises:
        ValueError: an unknown key (with the nearest known name), or a value of the wrong type.
    """
    hints = typing.get_type_hints(section)
    for key in values:
        _require_known(key, hints, f"key in {section.__name__}")
    return section(
        **{key: _coerce(f"{section.__name__}.{key}", v, hints[key]) for key, v in values.items()}
    )


def _apply_override(sections: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ValueError(
            f"override {override!r}: expected section.key=value, as in training.lr=1e-3"
        )
    if sections.get(section) is None:
        sections[section] = {}
    sections[section][key] = _read_yaml(text, f"override {override!r}")


def _read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error


def _require_sections(sections: Any, where: str = "") -> None:
    if not isinstance(sections, dict) or not all(
        section is None or isinstance(section, dict) for section in sections.values()
    ):
        raise ValueError(f"{where}expected sections model:, training: and data:, each with keys")


def _require_known(name: Any, known: Iterable[str], what: str) -> None:
    known = list(known)
    if not isinstance(name, str):
        raise ValueError(f"unknown {what}: {name!r}; known: {', '.join(known)}")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"unknown {what}: {name!r}; {hint}")


def _coerce(name: str, value: Any, wanted: Any) -> Any:
    """Read a YAML value as the field's type; YAML 1.1 reads 1e-3 as text, so numbers are parsed here."""
    options = (
        typing.get_args(wanted)
        if typing.get_origin(wanted) in (Union, types.UnionType)
        else (wanted,)
    )
    if value is None and type(None) in options:
        return None
    if isinstance(value, bool):
        if bool in options:
            return value
    elif int in options and isinstance(value, int | float) and value % 1 == 0:
        return int(value)  # neither infinity nor NaN has a remainder of 0
    elif float in options and isinstance(value, int | float | str):
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            pass
    if str in options and isinstance(value, str):
        return value
    names = " or ".join("nothing" if o is type(None) else o.__name__ for o in options)
    raise ValueError(f"{name} = {value!r}: expected {names}")
