"""Against an implementation that nobody here wrote: the GptOss classes of transformers."""

import pytest
import torch
from transformers import GptOssConfig, GptOssModel

from gptoss.config import ModelConfig
from gptoss.model.attention import GPTOSSAttention
from gptoss.model.rotary import YaRNRoPE

H, K, D, C, W, THETA = 4, 2, 8, 32, 5, 150_000.0


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection from half-split rotary layout (i, i + D/2) to interleaved pairs (2i, 2i + 1)."""
    halves = weight.view(heads, 2, D // 2, -1)  # (heads, half, pair, C)
    return halves.transpose(1, 2).reshape(heads * D, -1)


def to_double(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(to_double(item) for item in value)
    return (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


@pytest.mark.parametrize("layer_idx", [0, 1])
def test_attention_layer_equals_transformers(layer_idx: int) -> None:
    torch.manual_seed(0)
    theirs = GptOssModel(
        GptOssConfig(
            vocab_size=30, hidden_size=C, intermediate_size=16, num_hidden_layers=2, num_attention_heads=H,
            num_key_value_heads=K, head_dim=D, num_local_experts=2, num_experts_per_tok=1, sliding_window=W,
            attention_bias=False, max_position_embeddings=64 * 32, attn_implementation="eager",
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "rope_type": "yarn", "rope_theta": THETA, "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
            },
        )
    )  # fmt: skip
    attention = theirs.layers[layer_idx].self_attn
    with torch.no_grad():
        attention.sinks.normal_()
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.weight.normal_(std=0.3)
    seen: dict[str, object] = {}
    attention.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.update(kwargs), with_kwargs=True
    )
    theirs(torch.randint(0, 30, (2, 20)), use_cache=False)
    attention.double()
    seen = {name: to_double(value) for name, value in seen.items()}
    x = torch.randn(2, 20, C, dtype=torch.float64, requires_grad=True)
    expected = attention(**(seen | {"hidden_states": x, "past_key_values": None}))[0]

    cfg = ModelConfig(
        vocab_size=30, d_model=C, n_layers=2, n_heads=H, n_kv_heads=K, head_dim=D, window_size=W,
        rope_theta=THETA, yarn_original_max_seq_len=64, yarn_target_seq_len=64 * 32,
        yarn_prune_rope_global=False,
    )  # fmt: skip
    ours = GPTOSSAttention(cfg, layer_idx).double()
    with torch.no_grad():
        ours.q_proj.weight.copy_(interleave(attention.q_proj.weight, H))
        ours.kv_proj.weight.copy_(
            torch.cat([interleave(attention.k_proj.weight, K), attention.v_proj.weight])
        )
        ours.o_proj.weight.copy_(attention.o_proj.weight)
        ours.sink_bias.copy_(attention.sinks)
    rope = YaRNRoPE(D, THETA, 32, 64, 64 * 32)
    got = ours(x, rope(torch.arange(20), dtype=torch.float64))
    # their rotary tables are fp32: angles up to 20 rad carry 1e-6
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    dout = torch.randn_like(expected)
    leaves = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    dx, dq, dk, dv, do, db = torch.autograd.grad(
        expected, [x, *leaves, attention.o_proj.weight, attention.sinks], dout
    )
    our_leaves = [x, ours.q_proj.weight, ours.kv_proj.weight, ours.o_proj.weight, ours.sink_bias]
    for a, c in zip(
        torch.autograd.grad(got, our_leaves, dout),
        [dx, interleave(dq, H), torch.cat([interleave(dk, K), dv]), do, db],
        strict=True,
    ):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


def test_their_window_and_ours_admit_the_same_keys() -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    from gptoss.model.attention import visible_keys

    theirs = sliding_window_causal_mask_function(W)
    ours = visible_keys(torch.arange(12), torch.arange(12), W)
    for i in range(12):
        for j in range(12):
            assert bool(theirs(0, 0, torch.tensor(i), torch.tensor(j))) == bool(ours[i, j])
