import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gptoss.config import ModelConfig
from gptoss.model.moe import MoELayer, MoERouter, SwiGLUExpert, aux_load_balancing_loss
from gptoss.model.moe.dispatch import combine_rows, gather_rows, plan_dispatch, run_experts
from gptoss.model.moe.router import renormalised_weights, top_k


def config(**changes: object) -> ModelConfig:
    base = {
        "vocab_size": 20, "d_model": 8, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4,
        "ffn_dim": 6, "n_routed_experts": 4, "n_activated_experts": 2, "n_shared_experts": 1,
    }  # fmt: skip
    return ModelConfig(**(base | changes))  # type: ignore[arg-type]  # plain values


def router_with_logits(logits: list[float], k: int) -> tuple[MoERouter, Tensor]:
    """A router over 1-dimensional tokens whose logits are the given ones for x = 1."""
    router = MoERouter(1, len(logits), k).double()
    with torch.no_grad():
        router.weight.copy_(torch.tensor(logits).view(-1, 1))
    return router, torch.ones(1, 1, dtype=torch.float64)


def test_weights_by_hand() -> None:
    router, x = router_with_logits([2, 1, 0, -1], k=2)
    indices, weights, logits = router(x)
    assert indices.tolist() == [[0, 1]]
    assert [round(w, 4) for w in weights[0].tolist()] == [0.7311, 0.2689]  # σ(1), σ(−1)
    assert logits.tolist() == [[2, 1, 0, -1]]


def test_renormalised_top_k_is_a_softmax_over_the_selected_logits() -> None:
    logits = torch.randn(50, 8, dtype=torch.float64)
    selected, indices = top_k(logits, 3)
    weights = renormalised_weights(logits.softmax(-1).gather(1, indices))
    torch.testing.assert_close(weights, selected.softmax(-1))


def test_ties_go_to_the_lower_index() -> None:
    _, indices = top_k(torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]]), 2)
    assert indices.tolist() == [[1, 2], [0, 1]]


def test_nan_row_keeps_valid_indices_and_spoils_no_other_row() -> None:
    layer = MoELayer(config()).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    clean, _ = layer(x)
    x[0, 2] = torch.nan
    out, _ = layer(x)
    assert torch.isnan(out[0, 2]).all()
    keep = [0, 1, 3, 4]
    torch.testing.assert_close(out[0, keep], clean[0, keep])


def test_equal_rows_route_the_same_way_when_recomputed() -> None:
    layer = MoELayer(config(n_routed_experts=8)).to(torch.bfloat16)
    with torch.no_grad():
        layer.router.weight.zero_()  # every expert ties for every row
    chosen: list[Tensor] = []
    layer.router.register_forward_hook(lambda _m, _i, output: chosen.append(output[0]))
    x = torch.ones(1, 4096, 8, dtype=torch.bfloat16, requires_grad=True)
    out, aux = checkpoint(layer, x, use_reentrant=False)
    (out.float().sum() + aux).backward()
    assert len(chosen) == 2
    assert torch.equal(*chosen)
    assert torch.isfinite(x.grad).all()


def by_definition(layer: MoELayer, x: Tensor) -> Tensor:
    """Each token through its experts, one at a time."""
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            row = x[b, t]
            logits = layer.router.weight @ row
            best = sorted(range(len(logits)), key=lambda e: (-logits[e].item(), e))[
                : layer.n_activated
            ]
            for weight, e in zip(logits[best].softmax(0), best, strict=True):
                hidden = F.silu(layer.experts.w1[e] @ row) * (layer.experts.w3[e] @ row)
                out[b, t] = out[b, t] + weight * (layer.experts.w2[e] @ hidden)
            for expert in layer.shared:
                out[b, t] = out[b, t] + expert(row)
    return out


@settings(max_examples=25, deadline=None)
@given(
    n_experts=st.integers(2, 6),
    k=st.integers(2, 6),
    shared=st.integers(0, 2),
    T=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_layer_is_the_definition_with_gradients(
    n_experts: int, k: int, shared: int, T: int, seed: int
) -> None:
    torch.manual_seed(seed)
    cfg = config(
        n_routed_experts=n_experts, n_activated_experts=min(k, n_experts), n_shared_experts=shared
    )
    layer = MoELayer(cfg).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    x = torch.randn(2, T, 8, dtype=torch.float64, requires_grad=True)
    leaves, dout = [x, *layer.parameters()], torch.randn(2, T, 8, dtype=torch.float64)
    got, expected = layer(x)[0], by_definition(layer, x)
    torch.testing.assert_close(got, expected)
    for a, c in zip(
        torch.autograd.grad(got, leaves, dout),
        torch.autograd.grad(expected, leaves, dout, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, torch.zeros_like(a) if c is None else c)


@pytest.mark.parametrize("other", ["grouped_mm", "triton_grouped"])
def test_dispatches_agree_with_the_loop(other: str) -> None:
    layer = MoELayer(
        config(d_model=16, head_dim=8, ffn_dim=32)
    )  # grouped_mm wants strides of 16 bytes
    x = torch.randn(2, 33, 16, requires_grad=True)
    results = []
    for dispatch in ("stacked", other):
        layer.dispatch = dispatch
        out, aux = layer(x)
        results.append(
            (out, *torch.autograd.grad(out.square().sum() + aux, [x, *layer.parameters()]))
        )
    for a, c in zip(*results, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-6)  # fp32, sums of up to 66 terms


@pytest.mark.parametrize("dispatch", ["stacked", "grouped_mm", "triton_grouped"])
def test_idle_experts_get_zero_gradients(dispatch: str) -> None:
    layer = MoELayer(config(d_model=16, head_dim=8, ffn_dim=32, moe_dispatch=dispatch))
    with torch.no_grad():
        layer.router.weight.zero_()  # all ties: experts 0 and 1 take everything
    out, _ = layer(torch.randn(1, 7, 16))
    out.sum().backward()
    for weight in layer.experts.parameters():
        assert (weight.grad[2:] == 0).all()
        assert (weight.grad[:2] != 0).any()


def test_one_token() -> None:
    layer = MoELayer(config()).double()
    x = torch.randn(1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], by_definition(layer, x))


def test_plan_sorts_groups_and_returns() -> None:
    indices = torch.tensor([[2, 0], [1, 2], [2, 1]])
    plan = plan_dispatch(indices, 4)
    assert plan.order.tolist() == [1, 2, 5, 0, 3, 4]  # stable: slots of one expert keep their order
    assert plan.counts.tolist() == [1, 2, 3, 0]
    x = torch.tensor([[10.0], [20.0], [30.0]])
    rows = gather_rows(x, plan, 2)
    assert rows.flatten().tolist() == [10, 20, 30, 10, 20, 30]
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    assert combine_rows(rows, weights, plan).flatten().tolist() == [10, 20, 30]


def test_gather_and_combine_have_exact_gradients() -> None:
    plan = plan_dispatch(torch.tensor([[2, 0], [1, 2], [2, 1]]), 3)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: combine_rows(gather_rows(x, plan, 2).sin(), w, plan), (x, weights)
    )


def test_same_input_gives_the_same_bits() -> None:
    layer = MoELayer(config(n_routed_experts=8))
    x = torch.randn(2, 64, 8)
    first = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    second = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    assert all(torch.equal(a, c) for a, c in zip(first, second, strict=True))


def test_unknown_dispatch_is_refused() -> None:
    plan = plan_dispatch(torch.zeros(1, 1, dtype=torch.long), 1)
    w = torch.randn(1, 2, 2)
    with pytest.raises(ValueError, match="expected one of"):
        run_experts(torch.randn(1, 2), torch.ones(1, 1), plan, w, w, w, "fastest")


def test_aux_loss_is_one_at_uniform_routing() -> None:
    logits = (
        torch.eye(4, dtype=torch.float64) * 1e-9
    )  # each token tips one expert, all probabilities 1/4
    assert aux_load_balancing_loss(logits, 4, 1).item() == pytest.approx(1.0, abs=1e-8)


def test_aux_loss_is_four_at_full_collapse_of_two_in_eight() -> None:
    logits = torch.full((100, 8), -50.0).double()
    logits[:, :2] = 50.0
    assert aux_load_balancing_loss(logits, 8, 2).item() == pytest.approx(4.0, abs=1e-9)


def test_aux_loss_can_fall_below_one() -> None:
    probabilities = torch.tensor([[0.34, 0.33, 0.33], [1e-12, 0.51, 0.49]], dtype=torch.float64)
    # f = (1/2, 1/2, 0), P = (0.17, 0.42, 0.41): 3·(0.085 + 0.21)
    assert aux_load_balancing_loss(probabilities.log(), 3, 1).item() == pytest.approx(
        0.885, abs=1e-6
    )


def test_aux_loss_gradient_is_the_formula() -> None:
    logits = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(aux_load_balancing_loss(logits, 4, 2), logits)
    p = logits.detach().softmax(-1)
    f = torch.bincount(logits.topk(2).indices.flatten(), minlength=4) / 20
    # ∂L/∂logit_ne = (E/N)·p_ne·(f_e − Σ_j f_j p_nj)
    torch.testing.assert_close(got, 4 / 10 * p * (f - (f * p).sum(-1, keepdim=True)))


def test_layer_returns_the_aux_loss_of_its_logits() -> None:
    layer, x = MoELayer(config()).double(), torch.randn(2, 9, 8, dtype=torch.float64)
    _, _, logits = layer.router(x.flatten(0, 1))
    torch.testing.assert_close(layer(x)[1], aux_load_balancing_loss(logits, 4, 2))


@pytest.mark.parametrize("k", [1, 2, 4])
def test_every_dispatch_makes_the_same_plan(k: int) -> None:
    indices = torch.rand(600, 6).argsort(1)[:, :k]
    for a, b in zip(
        plan_dispatch(indices, 6), plan_dispatch(indices, 6, "triton_grouped"), strict=True
    ):
        assert torch.equal(a.long(), b.long())


def test_aux_loss_refuses_other_widths() -> None:
    with pytest.raises(ValueError, match="expected"):
        aux_load_balancing_loss(torch.randn(3, 4), 8, 2)


def test_expert_by_hand() -> None:
    expert = SwiGLUExpert(1, 1)
    with torch.no_grad():
        for layer, value in ((expert.w1, 2.0), (expert.w3, 3.0), (expert.w2, 5.0)):
            layer.weight.fill_(value)
    silu = 2 / (1 + math.exp(-2))
    assert expert(torch.ones(1, 1)).item() == pytest.approx(5 * silu * 3, rel=1e-6)


def test_router_refuses_more_choices_than_experts() -> None:
    with pytest.raises(ValueError, match="expected 1 to"):
        MoERouter(4, 2, 3)
