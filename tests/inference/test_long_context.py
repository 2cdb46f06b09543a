"""The loss by position equals the one-shot loss, and its means are means."""

import pytest
import torch
from torch.nn import functional as F

from gptoss.inference.long_context import loss_by_position, mean_between


@pytest.mark.parametrize("chunk_size", [1, 7, 1024])
@pytest.mark.parametrize("rope", ["plain", "yarn"])
def test_chunks_give_the_loss_of_one_forward_pass(make_model, rope, chunk_size):
    model, ids = make_model(window=4), torch.randint(0, 61, (2, 31))
    model.set_rope_mode(rope)
    with torch.no_grad():
        logits = model(ids[:, :-1])[0]
    expected = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").float()
    found = loss_by_position(model, ids, rope=rope, chunk_size=chunk_size)
    torch.testing.assert_close(found, expected)


def test_auto_takes_yarn_beyond_the_trained_length_and_puts_the_mode_back(make_model):
    model, ids = make_model(window=4), torch.randint(0, 61, (1, 66))
    model.set_rope_mode("plain")
    assert torch.equal(loss_by_position(model, ids), loss_by_position(model, ids, rope="yarn"))
    assert torch.equal(
        loss_by_position(model, ids[:, :65]), loss_by_position(model, ids[:, :65], rope="plain")
    )
    assert model.rope_mode == "plain"


def test_means_lie_between_edges():
    losses = torch.tensor([[0.0, 1, 2, 3], [2, 3, 4, 5]])
    assert mean_between(losses, [0, 1, 4]) == [1.0, 3.0]
    for edges in ([0], [2, 1], [0, 5], [-1, 2]):
        with pytest.raises(ValueError, match="rising edges"):
            mean_between(losses, edges)


def test_texts_that_cannot_be_scored_are_refused(make_model):
    for ids, message in (
        (torch.zeros(1, 1, dtype=torch.long), "at least 2 tokens"),
        (torch.zeros(1, 600, dtype=torch.long), "599 tokens exceed eval_max_seq_len = 512"),
    ):
        with pytest.raises(ValueError, match=message):
            loss_by_position(make_model(), ids)
