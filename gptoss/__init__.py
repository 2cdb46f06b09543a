"""GPT-OSS-Lite: the package that the book derives, piece by piece.

The names below are the ones that the chapters use; each is documented where it is defined. A name's module is loaded when
the name is first asked for, so that `gptoss --help` does not wait for PyTorch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptoss.config import DataConfig, ModelConfig, RunConfig, TrainingConfig, load_config
    from gptoss.data.loader import PretrainDataset
    from gptoss.data.tokenizers import Tokenizer
    from gptoss.inference.generate import generate
    from gptoss.inference.passkey import PasskeyEvaluator
    from gptoss.kernels.reference import grouped_swiglu_reference
    from gptoss.kernels.swiglu import triton_moe_w1w3_silu
    from gptoss.kernels.versions import HAS_TRITON
    from gptoss.model.attention import (
        SINK_CLAMP_MAX,
        SINK_CLAMP_MIN,
        GPTOSSAttention,
        causal_attention,
        manual_causal_attention,
        repeat_kv,
    )
    from gptoss.model.cache import MixedKVCache
    from gptoss.model.moe import (
        MoELayer,
        MoERouter,
        SwiGLUExpert,
        aux_load_balancing_loss,
        expert_load,
    )
    from gptoss.model.norm import RMSNorm
    from gptoss.model.rotary import YaRNRoPE, apply_rope, compute_yarn_freqs, compute_yarn_mscale
    from gptoss.model.transformer import GPTOSS, GPTOSSBlock
    from gptoss.pretrained import load_pretrained
    from gptoss.training.checkpoint import CheckpointManager
    from gptoss.training.losses import chunked_cross_entropy
    from gptoss.training.memory_documents import (
        assert_fits_in_available_gpu,
        estimate_model_memory_gb,
    )
    from gptoss.training.metrics import TrainingLogger
    from gptoss.training.schedule import make_warmup_cosine_lambda
    from gptoss.training.seeding import seed_everything
else:
    import importlib

    _HOMES = {
        "config": "DataConfig ModelConfig RunConfig TrainingConfig load_config",
        "data.loader": "PretrainDataset",
        "data.tokenizers": "Tokenizer",
        "inference.generate": "generate",
        "inference.passkey": "PasskeyEvaluator",
        "kernels.reference": "grouped_swiglu_reference",
        "kernels.swiglu": "triton_moe_w1w3_silu",
        "kernels.versions": "HAS_TRITON",
        "model.attention": "SINK_CLAMP_MAX SINK_CLAMP_MIN GPTOSSAttention causal_attention manual_causal_attention repeat_kv",
        "model.cache": "MixedKVCache",
        "model.moe": "MoELayer MoERouter SwiGLUExpert aux_load_balancing_loss expert_load",
        "model.norm": "RMSNorm",
        "model.rotary": "YaRNRoPE apply_rope compute_yarn_freqs compute_yarn_mscale",
        "model.transformer": "GPTOSS GPTOSSBlock",
        "pretrained": "load_pretrained",
        "training.checkpoint": "CheckpointManager",
        "training.losses": "chunked_cross_entropy",
        "training.memory_documents": "assert_fits_in_available_gpu estimate_model_memory_gb",
        "training.metrics": "TrainingLogger",
        "training.schedule": "make_warmup_cosine_lambda",
        "training.seeding": "seed_everything",
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "GPTOSS",
    "HAS_TRITON",
    "SINK_CLAMP_MAX",
    "SINK_CLAMP_MIN",
    "CheckpointManager",
    "DataConfig",
    "GPTOSSAttention",
    "GPTOSSBlock",
    "MixedKVCache",
    "MoELayer",
    "MoERouter",
    "ModelConfig",
    "PasskeyEvaluator",
    "PretrainDataset",
    "RMSNorm",
    "RunConfig",
    "SwiGLUExpert",
    "Tokenizer",
    "TrainingConfig",
    "TrainingLogger",
    "YaRNRoPE",
    "apply_rope",
    "assert_fits_in_available_gpu",
    "aux_load_balancing_loss",
    "causal_attention",
    "chunked_cross_entropy",
    "compute_yarn_freqs",
    "compute_yarn_mscale",
    "estimate_model_memory_gb",
    "expert_load",
    "generate",
    "grouped_swiglu_reference",
    "load_config",
    "load_pretrained",
    "make_warmup_cosine_lambda",
    "manual_causal_attention",
    "repeat_kv",
    "seed_everything",
    "triton_moe_w1w3_silu",
]
