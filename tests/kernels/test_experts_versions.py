"""Versions 2 to 5 of the gated half in the interpreter, outputs and gradients, on shapes that have broken kernels."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from expert_cases import FLOAT32, RAGGED, assert_like_oracle, relative_error, stacks

from gptoss.kernels import swiglu, versions
from gptoss.kernels.reference import grouped_swiglu_reference
from gptoss.kernels.swiglu import grouped_swiglu, triton_moe_w1w3_silu
from gptoss.kernels.swiglu_documents import documents_backward, documents_backward_as_written
from gptoss.kernels.versions import chosen_version

COUNTS = torch.tensor(RAGGED)
ROWS = int(COUNTS.sum())
NAMED = ("documents", "tuned", "persistent")


@pytest.fixture(autouse=True)
def nan_where_nothing_was_written():
    """torch.empty comes filled with NaN, so an element that a kernel left out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def half(version: str, counts: torch.Tensor = COUNTS):
    return lambda x, w1, w3: grouped_swiglu(x, counts, w1, w3, version)


def oracle(x, w1, w3):
    return grouped_swiglu_reference(x, COUNTS, w1, w3)


@pytest.mark.parametrize("version", NAMED)
def test_sizes_that_no_tile_divides(version: str) -> None:
    w1, w3, _ = stacks(4, 96, 1560)
    x, grad = torch.randn(ROWS, 96), torch.randn(ROWS, 1560)
    assert_like_oracle(half(version), oracle, (x, w1, w3), grad, FLOAT32)


@pytest.mark.parametrize("version", NAMED)
def test_widths_that_are_not_whole_16_bytes(version: str) -> None:
    w1, w3, _ = stacks(4, 30, 53)
    x, grad = torch.randn(ROWS, 30), torch.randn(ROWS, 53)
    assert_like_oracle(half(version), oracle, (x, w1, w3), grad, FLOAT32)


@pytest.mark.parametrize("version", ["tuned", "persistent"])
def test_strided_rows_transposed_weights_and_broadcast_gradients(version: str) -> None:
    w1, w3, _ = stacks(4, 40, 64)
    x = torch.randn(ROWS, 80)[:, ::2]
    w1, w3 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w3))
    for grad in (torch.ones(1, 1).expand(ROWS, 64), torch.randn(64, ROWS).t()):
        assert_like_oracle(half(version), oracle, (x, w1, w3), grad, FLOAT32)


def test_gradient_through_a_concatenation() -> None:
    w1, w3, _ = stacks(4, 32, 64)
    x, z = torch.randn(ROWS, 32), torch.randn(ROWS, 3)
    wrap = lambda run: lambda *a: torch.cat([run(*a), z.to(a[0].dtype)], -1)  # noqa: E731  # two uses, one line
    grad = torch.ones(()).expand(ROWS, 67)
    assert_like_oracle(wrap(half("persistent")), wrap(oracle), (x, w1, w3), grad, FLOAT32)


@pytest.mark.parametrize("up_first", [False, True])
def test_either_weight_may_lie_lower_in_memory(up_first: bool) -> None:
    both = torch.randn(2, 4, 64, 32) * 32**-0.5
    w1, w3 = (both[1], both[0]) if up_first else (both[0], both[1])
    x, grad = torch.randn(ROWS, 32), torch.randn(ROWS, 64)
    assert_like_oracle(half("persistent"), oracle, (x, w1, w3), grad, FLOAT32)


@pytest.mark.parametrize("version", NAMED)
def test_nan_around_the_inputs_is_neither_read_nor_touched(version: str) -> None:
    def guarded(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.full([n + 8 for n in shape], float("nan"))
        inner = whole[tuple(slice(4, 4 + n) for n in shape)]
        return whole, inner.copy_(torch.randn(shape) * 0.2)

    (x_all, x), (w1_all, w1), (w3_all, w3) = (
        guarded(*s) for s in ((ROWS, 40), (4, 70, 40), (4, 70, 40))
    )
    before = [t.clone() for t in (x_all, w1_all, w3_all)]
    assert_like_oracle(half(version), oracle, (x, w1, w3), torch.randn(ROWS, 70), FLOAT32)
    for now, then in zip((x_all, w1_all, w3_all), before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))


@pytest.mark.parametrize("version", ["tuned", "persistent"])
def test_a_row_of_nan_stays_in_its_row_and_its_expert(version: str) -> None:
    w1, w3, _ = (t.requires_grad_() for t in stacks(4, 32, 64))
    x = torch.randn(ROWS, 32)
    x[16] = float(
        "nan"
    )  # first row of the last expert, in the tile that the one before reads past its end
    x.requires_grad_()
    hidden = half(version)(x, w1, w3)
    assert hidden.isnan().any(1).nonzero().flatten().tolist() == [16]
    dx, dw1, dw3 = torch.autograd.grad(hidden, (x, w1, w3), torch.randn(ROWS, 64))
    assert dx.isnan().any(1).nonzero().flatten().tolist() == [16]
    for dw in (dw1, dw3):
        assert dw.isnan().flatten(1).any(1).tolist() == [False, False, False, True]
        assert (dw[0] == 0).all()  # idle


@pytest.mark.parametrize("counts", [(33, 0, 0, 0), (0, 0, 0, 33), (1, 0, 0, 0), (0, 0, 0, 0)])
def test_all_rows_on_one_expert_one_row_and_none(counts: tuple[int, ...]) -> None:
    rows = torch.tensor(counts)
    w1, w3, _ = stacks(4, 32, 64)
    x, grad = torch.randn(int(rows.sum()), 32), torch.randn(int(rows.sum()), 64)
    for version in NAMED:
        assert_like_oracle(
            half(version, rows),
            lambda x, w1, w3: grouped_swiglu_reference(x, rows, w1, w3),
            (x, w1, w3), grad, FLOAT32,
        )  # fmt: skip


@pytest.mark.parametrize("version", NAMED)
def test_addresses_past_two_billion_elements(version: str, tmp_path: Path) -> None:
    # Five experts 2^29 + 1024 elements apart: the stride fits 32 bits, the last expert's offset, 2^31 + 4096, does not.
    # They lie in a file with holes, so nothing but the weights takes space.
    apart, width, ffn = 2**29 + 1024, 32, 16
    sparse, elements = tmp_path / "weights", 4 * apart + 2 * ffn * width
    with sparse.open("wb") as file:
        file.truncate(2 * elements)
    memory = torch.from_file(str(sparse), True, elements, dtype=torch.float16)
    w1 = memory.as_strided((5, ffn, width), (apart, width, 1))
    w3 = memory.as_strided((5, ffn, width), (apart, width, 1), ffn * width)
    truth = torch.randn(2, 5, ffn, width) * width**-0.5
    for w, value in zip((w1, w3), truth, strict=True):
        w.copy_(value)
    x, counts = torch.randn(5, width).half(), torch.tensor([1, 1, 0, 1, 2])
    found = grouped_swiglu(x, counts, w1, w3, version)
    want = grouped_swiglu_reference(x.double(), counts, *(t.half().double() for t in truth))
    assert relative_error(found, want) < 1e-3  # the result is rounded to float16, 2^-11


@pytest.mark.parametrize("version", ["tuned", "persistent"])
def test_first_call_equals_the_second(version: str) -> None:
    w1, w3, _ = (t.requires_grad_() for t in stacks(4, 32, 64))
    x = torch.randn(ROWS, 32, requires_grad=True)
    calls = []
    for _ in range(2):
        hidden = half(version)(x, w1, w3)
        calls.append((hidden, *torch.autograd.grad(hidden.sum(), (x, w1, w3))))
    for first, second in zip(*calls, strict=True):
        assert torch.equal(first, second)


def test_the_documents_backward_cannot_run_as_written() -> None:
    w1, w3, _ = stacks(4, 8, 16)
    x, grad = torch.randn(ROWS, 8), torch.randn(ROWS, 16)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        documents_backward_as_written(grad, x, COUNTS, w1, w3)
    assert [t.shape for t in documents_backward(grad, x, COUNTS, w1, w3)] == [x.shape, w1.shape, w3.shape]  # fmt: skip


def documents_arguments(**changes):
    w1, w3, _ = stacks(4, 32, 64)
    ids = torch.repeat_interleave(torch.arange(4), COUNTS)
    args = {"x_sorted": torch.randn(ROWS, 32), "expert_ids_sorted": ids, "counts": COUNTS,
            "offsets": COUNTS.cumsum(0) - COUNTS, "W1_stack": w1, "W3_stack": w3}  # fmt: skip
    return args | changes


def test_the_documents_signature() -> None:
    args = documents_arguments()
    want = grouped_swiglu_reference(args["x_sorted"], COUNTS, args["W1_stack"], args["W3_stack"])
    assert relative_error(triton_moe_w1w3_silu(**args), want) < FLOAT32


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"expert_ids_sorted": torch.zeros(5)}, "one id for each of the 33 slots"),
        ({"offsets": torch.zeros(5)}, "one entry for each of the 4 experts"),
        ({"counts": torch.tensor([1, 1, 1, 1])}, "sum to the number of rows"),
        ({"x_sorted": torch.randn(ROWS, 31)}, "expected x"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        triton_moe_w1w3_silu(**documents_arguments(**changes))


def test_without_triton_only_the_triton_path_fails() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch, gptoss
from gptoss.kernels.loop import grouped_swiglu_loop
from gptoss.kernels.swiglu import HAS_TRITON, triton_moe_w1w3_silu
w = torch.ones(1, 1, 1)
one = torch.tensor([1])
assert not HAS_TRITON
grouped_swiglu_loop(w[0], one, w, w)
try:
    triton_moe_w1w3_silu(w[0], one, one, one, w, w)
except ImportError as problem:
    print(problem)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install triton" in told.stdout
    assert "stacked" in told.stdout


def test_a_failing_kernel_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr("gptoss.kernels.swiglu_persistent.swiglu_persistent", broken)
    with pytest.raises(RuntimeError, match="out of resource"):
        triton_moe_w1w3_silu(**documents_arguments())


@pytest.mark.parametrize(
    ("capability", "dtype", "version"),
    [
        (None, torch.float32, "persistent"),
        ((9, 0), torch.bfloat16, "persistent"),
        ((10, 0), torch.bfloat16, "persistent"),
        ((8, 0), torch.bfloat16, "tuned"),
        ((8, 6), torch.bfloat16, "tuned"),
        ((7, 5), torch.float16, "tuned"),
    ],
)
def test_the_version_follows_the_gpu(capability, dtype: torch.dtype, version: str) -> None:
    assert chosen_version(capability, dtype).version == version


@pytest.mark.parametrize(
    ("capability", "dtype", "word"),
    [
        ((7, 5), torch.bfloat16, "has no bfloat16; run in float16"),
        ((7, 0), torch.float16, "7.5 or newer, got 7.0"),
        (None, torch.bfloat16, "interpreter multiplies bfloat16 wrongly"),
        ((9, 0), torch.float64, "float16, bfloat16 or float32"),
    ],
)
def test_what_does_not_run_is_said(capability, dtype: torch.dtype, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        chosen_version(capability, dtype)


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    versions._announce.cache_clear()
    with caplog.at_level(logging.INFO, logger=versions.__name__):
        for _ in range(2):
            swiglu.grouped_swiglu(torch.randn(ROWS, 8), COUNTS, *stacks(4, 8, 16)[:2])
    assert [record.getMessage() for record in caplog.records] == [
        "expert kernels: version 'persistent' in torch.float32 (Triton's interpreter, which takes every version)"
    ]


def test_compiles_whole() -> None:
    w1, w3, _ = stacks(4, 32, 64)
    x = torch.randn(ROWS, 32)
    leaves = [t.requires_grad_() for t in (x, w1, w3)]
    run = lambda x, w1, w3: half("auto")(x.sin(), w1, w3).cos()  # noqa: E731  # compiled below, called plainly too
    grad = torch.randn(ROWS, 64)
    eager = torch.autograd.grad(run(*leaves), leaves, grad)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves, grad), eager)
