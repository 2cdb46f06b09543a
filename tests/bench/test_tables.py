"""The tables that a GPU fills, run at small sizes on a CPU: their form, and that their numbers belong together."""

import torch

from gptoss.bench import agreement, kv_cache, memory, passkey
from gptoss.bench.timing import seconds_in_turns


def test_passkey_has_a_row_for_each_recipe_and_length() -> None:
    table = passkey.measure(lengths=(160,), trials=2, other_trials=2, commit="abc1234")
    assert {row["recipe"] for row in table["rows"]} == set(passkey.RECIPES)
    assert all(0 <= row["low95"] <= row["right"] / row["trials"] <= row["high95"] for row in table["rows"])  # fmt: skip
    best = [row for row in table["rows"] if row["recipe"] == passkey.BEST]
    assert [row["right"] for row in best] == [2, 2, 2]  # within the training length it is perfect


def test_memory_is_predicted_near_what_is_measured() -> None:
    table = memory.measure([memory.Case(1, 64, 0), memory.Case(2, 64, 2)], commit="abc1234")
    for row in table["rows"]:
        assert 0.9 < row["ratio"] < 1.1


def test_the_cache_table_is_the_formula_and_the_buffers() -> None:
    rows = kv_cache.measure(commit="abc1234")["rows"]
    assert all(row["mixed_bytes"] == row["mixed_allocated_bytes"] for row in rows)
    assert round(rows[-1]["ratio"], 2) == 2.0


def test_fast_and_oracle_losses_stay_within_the_band() -> None:
    table = agreement.measure(40, commit="abc1234")
    rows = table["rows"]
    assert [row["steps"] for row in rows] == [20, 40]
    assert all(abs(row["difference"]) < 0.003 for row in rows)  # seen: 0.00015
    # It learns: 0.07 to 0.16 nats, as the text, this package's source, goes from one version to the next.
    assert rows[1]["oracle"] < rows[0]["oracle"] - 0.03
    assert "inside" in table["notes"][0]


def test_contenders_take_turns_and_one_that_fails_says_why() -> None:
    order: list[str] = []

    def fail() -> None:
        order.append("broken")
        raise ValueError("no such tile")

    runs = {"a": lambda: order.append("a"), "broken": fail, "b": lambda: order.append("b")}
    took = seconds_in_turns(runs, torch.device("cpu"), rounds=3)
    turns = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert turns == ["a", "broken", "b", "a", "b", "a", "b"]
    assert str(took["broken"]) == "no such tile"
    assert all(0 <= took[name].seconds < 1 for name in "ab")
