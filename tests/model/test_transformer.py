import dataclasses
import math
import pickle

import pytest
import torch
from torch.nn import functional as F

from gptoss.config import ModelConfig
from gptoss.model.cache import MixedKVCache
from gptoss.model.moe import expert_load
from gptoss.model.transformer import GPTOSS


def config(**changes: object) -> ModelConfig:
    base = {
        "vocab_size": 40, "d_model": 24, "n_layers": 4, "n_heads": 6, "n_kv_heads": 2, "head_dim": 4,
        "ffn_dim": 16, "n_routed_experts": 4, "window_size": 4, "yarn_original_max_seq_len": 16,
        "yarn_target_seq_len": 512, "max_seq_len": 16, "eval_max_seq_len": 512,
    }  # fmt: skip
    return ModelConfig(**(base | changes))  # type: ignore[arg-type]  # plain values


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 40, (batch, length))


def test_production_counts_are_exact() -> None:
    with torch.device("meta"):
        model = GPTOSS(ModelConfig())
        untied = GPTOSS(ModelConfig(weight_tying=False))
    assert model.num_parameters() == 501_836_640
    assert model.num_active_parameters() == 247_032_672
    assert untied.num_parameters() == 600_140_640
    block = model.blocks[0]
    assert sum(p.numel() for p in block.moe.parameters()) == 31_856_640
    assert 31_856_640 - 6 * 3 * 768 * 1536 == 10_622_976
    not_moe = model.num_parameters() - 12 * 31_856_640
    assert not_moe == 119_556_960


def test_loss_from_targets_equals_cross_entropy_of_the_logits() -> None:
    model, idx = GPTOSS(config()).double(), tokens(2, 9)
    targets = idx.roll(-1, 1)
    targets[0, 3] = -100
    logits, aux = model(idx)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss, same_aux = model(idx, targets=targets, loss_chunk_size=4)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(aux, same_aux)
    expected_gradients = torch.autograd.grad(expected + 0.01 * aux, list(model.parameters()))
    gradients = torch.autograd.grad(loss + 0.01 * same_aux, list(model.parameters()))
    for got, want in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, want)
    total, _ = model(idx, targets=targets, reduction="sum")
    torch.testing.assert_close(total, expected * 17)


def test_last_only_is_the_last_position() -> None:
    model, idx = GPTOSS(config()).double(), tokens(2, 9)
    torch.testing.assert_close(model(idx, last_only=True)[0], model(idx)[0][:, -1:])


def test_no_token_sees_the_future() -> None:
    model, idx = GPTOSS(config()).double(), tokens(1, 12)
    changed = idx.clone()
    changed[0, 7] = (idx[0, 7] + 1) % 40
    before, after = model(idx)[0], model(changed)[0]
    # another token may change how many rows an expert multiplies at once, so the last bits may move
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, 7], after[:, 7])


@pytest.mark.parametrize("every", [1, 2, 3])
def test_checkpointing_changes_no_number(every: int) -> None:
    model, idx = GPTOSS(config()).double(), tokens(2, 8)
    targets = idx.roll(-1, 1)

    def numbers() -> list[torch.Tensor]:
        loss, aux = model(idx, targets=targets)
        return [loss, aux, *torch.autograd.grad(loss + aux, list(model.parameters()))]

    plain = numbers()
    model.enable_gradient_checkpointing(every)
    assert all(torch.equal(a, b) for a, b in zip(plain, numbers(), strict=True))


@pytest.mark.parametrize(("every", "calls"), [(0, 0), (1, 4), (2, 2), (3, 2), (4, 1)])
def test_checkpointing_wraps_every_nth_block(
    every: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gptoss.model.transformer as module

    count, real = [], module.checkpoint
    monkeypatch.setattr(module, "checkpoint", lambda *a, **k: (count.append(1), real(*a, **k))[1])
    model = GPTOSS(config())
    model.enable_gradient_checkpointing(every)
    model(tokens(1, 4))
    assert len(count) == calls
    with torch.no_grad():
        model(tokens(1, 4))
    assert len(count) == calls


def test_checkpointing_refuses_a_negative_period() -> None:
    with pytest.raises(ValueError, match="every = -1"):
        GPTOSS(config()).enable_gradient_checkpointing(-1)


def test_expert_load_counts_every_slot_once() -> None:
    model, idx = GPTOSS(config()), tokens(3, 11)
    load = expert_load(model, idx)
    assert load.shape == (4, 4)
    assert load.sum(1).tolist() == [3 * 11 * 2] * 4
    model.enable_gradient_checkpointing(1)
    assert torch.equal(expert_load(model, idx), load)


def test_initial_weights_follow_the_rule() -> None:
    model = GPTOSS(config(d_model=96, n_heads=6, head_dim=16, ffn_dim=128, vocab_size=2000))
    for name, parameter in model.named_parameters():
        if "sink" in name:
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            # the standard error of a standard deviation from n draws is σ/√(2n); five of them
            assert abs(parameter.std().item() - 0.02) < 5 * 0.02 / math.sqrt(
                2 * parameter.numel()
            ), name


def test_untrained_loss_is_the_vocabulary_plus_half_the_variance() -> None:
    model = GPTOSS(config(d_model=96, n_heads=6, head_dim=16, vocab_size=4000))
    loss, _ = model(torch.randint(0, 4000, (4, 64)), targets=torch.randint(0, 4000, (4, 64)))
    # the head sees unit RMS: logits have variance 96·0.02²; E log Σ exp = ln V + var/2
    assert loss.item() == pytest.approx(math.log(4000) + 96 * 0.02**2 / 2, abs=0.05)


def test_tied_head_shares_storage_after_meta_init_and_casts() -> None:
    with torch.device("meta"):
        model = GPTOSS(config())
    model.to_empty(device="cpu")
    model.init_weights()
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    model.to(torch.bfloat16)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert torch.isfinite(model(tokens(1, 5))[0]).all()
    assert GPTOSS(config(weight_tying=False)).head.weight is not model.embed.weight


def test_tied_head_stays_tied_when_a_state_dict_is_assigned() -> None:
    source = GPTOSS(config())
    with torch.device("meta"):
        model = GPTOSS(config())
    model.load_state_dict(source.state_dict(), assign=True)
    assert model.head.weight is model.embed.weight
    assert model.num_parameters() == source.num_parameters()
    idx = tokens(1, 5)
    assert torch.equal(model(idx)[0], source(idx)[0])
    twin = pickle.loads(pickle.dumps(model))
    assert twin.head.weight is twin.embed.weight


def test_rope_mode_is_a_setting_of_the_model() -> None:
    model, idx = GPTOSS(config()).double(), tokens(1, 16)
    assert model.rope_mode == "yarn"
    yarn = model(idx)[0]
    model.set_rope_mode("plain")
    assert not torch.allclose(model(idx)[0], yarn)
    model.set_rope_mode("yarn")
    assert torch.equal(model(idx)[0], yarn)
    with pytest.raises(ValueError, match="plain, yarn"):
        model.set_rope_mode("ntk")


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_backends_give_one_model(backend: str, sinks: bool) -> None:
    model, idx = GPTOSS(config(sink_bias=sinks)).double(), tokens(2, 14)
    expected = model(idx)[0]
    model.set_attention_backend(backend)
    assert f"backend={backend}" in repr(model)
    torch.testing.assert_close(model(idx)[0], expected)


def test_left_padded_rows_equal_their_single_runs() -> None:
    model = GPTOSS(config()).double()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.sink_bias.normal_()
    short, long = tokens(1, 3), tokens(1, 12)
    padded = torch.cat([F.pad(short, (9, 0)), long])
    pads = torch.tensor([9, 0])
    together, _ = model(padded, key_start=pads)
    assert torch.isfinite(together).all()
    torch.testing.assert_close(together[:1, 9:], model(short)[0])
    torch.testing.assert_close(together[1:], model(long)[0])
    gradients = torch.autograd.grad(together.sum(), list(model.parameters()))
    assert all(torch.isfinite(g).all() for g in gradients)


def test_left_padded_rows_equal_their_single_runs_through_the_cache() -> None:
    model = GPTOSS(config()).double().eval()
    short, long = tokens(1, 3), tokens(1, 12)
    padded, pads = torch.cat([F.pad(short, (9, 0)), long]), torch.tensor([9, 0])
    new = tokens(2, 20)
    with torch.no_grad():
        cache = MixedKVCache.for_model(model, batch_size=2)
        model(padded, cache=cache, key_start=pads)
        for step in range(20):
            got, _ = model(new[:, step : step + 1], cache=cache, key_start=pads)
            for row, prompt in enumerate((short, long)):
                sequence = torch.cat([prompt, new[row : row + 1, : step + 1]], 1)
                torch.testing.assert_close(got[row, -1], model(sequence)[0][0, -1])


def test_autocast_keeps_a_bf16_stream_and_fp32_gradients() -> None:
    model, idx = GPTOSS(config()), tokens(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, aux = model(idx)
        loss, _ = model(idx, targets=idx)
    assert logits.dtype == torch.bfloat16
    assert aux.dtype == torch.float32
    (loss + 0.01 * aux).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(logits.float(), model(idx)[0], rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(3, dtype=torch.long),
        *(torch.zeros(*s, dtype=torch.long) for s in ((1, 0), (0, 3))),
    ],
)
def test_bad_ids_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected \\(B, T\\)"):
        GPTOSS(config())(bad)


def test_targets_must_match() -> None:
    with pytest.raises(ValueError, match="targets"):
        GPTOSS(config())(tokens(1, 4), targets=tokens(1, 5))


def test_detached_norm_reaches_every_layer() -> None:
    model = GPTOSS(dataclasses.replace(config(), rms_norm_detach=True))
    assert repr(model).count("statistic detached") == 2 * 4 + 1
