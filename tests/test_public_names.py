"""Every public name says what it takes, and its shape annotations hold when they are checked at run time."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import TypeCheckError, jaxtyped

import gptoss
from gptoss.model.head import linear_cross_entropy
from gptoss.model.moe.router import renormalised_weights, top_k
from gptoss.model.norm import rms_norm

PUBLIC = {name: getattr(gptoss, name) for name in gptoss.__all__}
FUNCTIONS = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing)}


def test_names_of_the_specification_are_public() -> None:
    specified = [
        "ModelConfig",
        "RMSNorm",
        "GPTOSSBlock",
        "GPTOSS",
        "repeat_kv",
        "manual_causal_attention",
        "causal_attention",
        "GPTOSSAttention",
        "SINK_CLAMP_MIN",
        "SINK_CLAMP_MAX",
        "apply_rope",
        "compute_yarn_freqs",
        "compute_yarn_mscale",
        "YaRNRoPE",
        "SwiGLUExpert",
        "MoERouter",
        "aux_load_balancing_loss",
        "MoELayer",
        "triton_moe_w1w3_silu",
        "HAS_TRITON",
        "MixedKVCache",
        "generate",
        "PasskeyEvaluator",
        "CheckpointManager",
        "TrainingLogger",
        "estimate_model_memory_gb",
        "assert_fits_in_available_gpu",
        "PretrainDataset",
        "chunked_cross_entropy",
        "make_warmup_cosine_lambda",
        "seed_everything",
        "load_pretrained",
    ]
    assert set(specified) <= set(PUBLIC)


def test_type_checkers_see_the_names_that_are_there() -> None:
    """The imports that only type checkers read, `__all__` and the modules that names are loaded from agree."""
    tree = ast.parse(Path(gptoss.__file__).read_text(encoding="utf-8"))
    seen = {
        alias.name: (node.module or "").removeprefix("gptoss.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gptoss.")
        for alias in node.names
    }
    assert seen == vars(gptoss)["_HOME_OF"]
    assert sorted(seen) == sorted(gptoss.__all__) == sorted(set(dir(gptoss)) & set(seen))


def test_the_package_loads_pytorch_with_the_first_name_that_needs_it() -> None:
    code = (
        "import sys, gptoss, gptoss.cli; assert 'torch' not in sys.modules; gptoss.ModelConfig; "
        "assert 'torch' not in sys.modules; from gptoss import *; assert GPTOSS is gptoss.model.transformer.GPTOSS"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="GPTOS'"):
        gptoss.GPTOS  # type: ignore[attr-defined]  # noqa: B018 # that it is not there is the test


@pytest.mark.parametrize("name", [n for n, t in PUBLIC.items() if callable(t)])
def test_public_names_have_docstrings(name: str) -> None:
    assert len(inspect.getdoc(PUBLIC[name]) or "") > 40


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_annotate_every_argument(name: str) -> None:
    function = FUNCTIONS[name]
    signature = inspect.signature(function)
    bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert not bare
    assert signature.return_annotation is not signature.empty


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    integers_are_numbers = BeartypeConf(is_pep484_tower=True)  # as for every type checker
    return jaxtyped(function, typechecker=beartype(conf=integers_are_numbers))


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    q, k = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 7, 4)
    cos = torch.rand(5, 2)
    logits, ids = torch.randn(9, 8), torch.randint(0, 8, (9,))
    return {
        "rms_norm": (rms_norm, (torch.randn(3, 4), torch.ones(4))),
        "apply_rope": (gptoss.apply_rope, (q, cos, cos)),
        "compute_yarn_freqs": (gptoss.compute_yarn_freqs, (96, 1e5, 32, 4096, 131_072)),
        "repeat_kv": (gptoss.repeat_kv, (k, 3)),
        "manual_causal_attention": (gptoss.manual_causal_attention, (q, k, k, 3, torch.zeros(6))),
        "causal_attention": (gptoss.causal_attention, (q, k, k, 3, torch.zeros(6))),
        "top_k": (top_k, (logits, 2)),
        "renormalised_weights": (renormalised_weights, (torch.rand(9, 2),)),
        "aux_load_balancing_loss": (gptoss.aux_load_balancing_loss, (logits, 8, 2)),
        "chunked_cross_entropy": (gptoss.chunked_cross_entropy, (logits, ids, 4)),
        "linear_cross_entropy": (linear_cross_entropy, (torch.randn(9, 3), torch.randn(8, 3), ids)),
    }


@pytest.mark.parametrize("name", calls())
def test_shapes_are_as_annotated(name: str) -> None:
    function, arguments = calls()[name]
    checked(function)(*arguments)


def test_the_check_sees_a_wrong_shape() -> None:
    with pytest.raises(TypeCheckError):
        checked(gptoss.repeat_kv)(torch.randn(2, 3), 3)
    with pytest.raises(TypeCheckError):
        checked(rms_norm)(torch.randn(3, 4), torch.ones(5))
