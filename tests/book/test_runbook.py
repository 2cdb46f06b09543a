"""The operations runbook: each command on it exists as printed, each message is one that the package gives."""

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from predicted_memory import predicted_gib

from gptoss.cli.entry import app
from gptoss.config import load_config
from gptoss.pretrained import load_pretrained

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "book/runbook.md").read_text()
SHELL = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line for block in SHELL for line in block.replace("\\\n", " ").splitlines() if line.strip()
]
INLINE = re.findall(r"`((?:gptoss|make) [^`]*)`", PAGE)
TARGETS = set(re.findall(r"^([a-z]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
TABLES = {path.stem for path in (ROOT / "gptoss/bench").glob("*.py")}


def fault(command: str) -> str | None:
    """What is wrong with a command line, None when the command line itself would take it."""
    program, *words = shlex.split(command)
    if program == "make":
        return None if set(words) <= TARGETS else f"no target {words}"
    if program == "torchrun":
        place = words.index("-m")
        assert words[place + 1] == "gptoss"
        program, words = "gptoss", words[place + 2 :]
    if program != "gptoss":
        return f"{program} is not looked into"
    try:
        return fault_of_words(words)
    except (ValueError, OSError) as error:
        return str(error)
    except Exception as error:  # of click, which typer brings along under a name of its own
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())


def fault_of_words(words: list[str]) -> str | None:
    group: Any = typer.main.get_command(app)
    name, command, rest = "gptoss", group, words
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(command.context_class(command), rest)
    given = command.make_context(name, list(rest)).params
    if config := given.get("config"):
        kept = config == "runs/502m/config.json"  # as a run of the page keeps it
        load_config("pretrain_a100_502m" if kept else config, given.get("overrides") or ())
    if name == "bench":
        unknown = {table.replace("-", "_") for table in given["tables"]} - TABLES - {"all"}
        return f"no table {unknown}" if unknown else None
    return None


def test_the_page_has_the_commands_that_it_is_for() -> None:
    group: Any = typer.main.get_command(app)
    named = {shlex.split(line)[1] for line in COMMANDS + INLINE if line.startswith("gptoss ")}
    assert set(group.list_commands(group.context_class(group))) - named == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_taken_as_printed(command: str) -> None:
    assert fault(command) is None


@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_a_sentence_exists(command: str) -> None:
    """Where options are left out that a command asks for, its name and the options that are there are looked at."""
    found = fault(command)
    allowed = r"COMMAND|Missing (option|argument)|no table \{'TABLE'\}"
    assert found is None or re.search(allowed, found), found


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("gptoss pretrian", "No such command"),
        ("gptoss vram --batchsize 8", "No such option"),
        ("gptoss vram --batch-size many", "Invalid value"),
        ("gptoss pretrain --set training.learning=1", "learning"),
        ("gptoss pretrain --config tyni", "tyni"),
        ("gptoss profile layers", "No such command"),
        ("gptoss bench kernels", "no table"),
        ("gptoss generate --model nano", "Missing option"),
        ("torchrun --nproc-per-node 2 -m gptoss train", "No such command"),
        ("make evidences", "no target"),
    ],
)
def test_a_wrong_command_is_seen(command: str, expected: str) -> None:
    assert expected in str(fault(command))


def texts_of_the_package() -> list[str]:
    """Every text in the sources, f-strings with a gap for each value."""
    found = []
    for path in (ROOT / "gptoss").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_said(message: str, texts: list[str]) -> bool:
    """Whether one text has the message's words, in their order, … standing for anything."""
    pattern = re.compile(
        ".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL
    )
    return any(pattern.search(text) for text in texts)


def test_every_message_is_one_that_the_package_gives() -> None:
    messages = re.findall(r"`([^`]+)`{\.message}", PAGE)
    assert len(messages) > 10
    texts = texts_of_the_package()
    assert [message for message in messages if not is_said(message, texts)] == []
    assert not is_said("another trainer worked here", texts)
    assert not is_said("more than the … is predicted to take", texts)


def test_a_run_goes_on_with_the_configuration_that_it_keeps(tmp_path) -> None:
    run = load_config("pretrain_a100_502m", ["training.lr=2e-4", "data.num_workers=4"])
    importlib.import_module("gptoss.training.restore").write_description(tmp_path, run, None)
    assert load_config(tmp_path / "config.json") == run


def test_settings_in_sentences_exist() -> None:
    run = load_config("tiny")
    named = set(re.findall(r"`(?:--set )?((?:model|training|data)\.\w+)", PAGE))
    assert len(named) > 12
    for setting in named:
        section, name = setting.split(".")
        assert hasattr(getattr(run, section), name), setting


def test_python_on_the_page_runs(tmp_path, monkeypatch, capsys) -> None:
    """The blocks in their order, in one directory, where a run's directory is there and its model is the shipped one."""
    model, tokenizer = load_pretrained("nano")
    run = load_config("nano")
    restore = importlib.import_module("gptoss.training.restore")
    monkeypatch.setattr(restore, "load_run", lambda directory: (model, tokenizer, run))
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text((ROOT / "README.md").read_text())
    Path("runs/502m").mkdir(parents=True)
    lines = [{"step": 1, "loss": 2.5}, {"event": "refused", "step": 1, "first": 0, "last": 7}]
    Path("runs/502m/metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    names: dict = {}
    assert len(PYTHON) == 3
    for block in PYTHON:
        exec(block, names)
    said = capsys.readouterr().out
    assert "{'step': 1, 'loss': 2.5}" in said
    assert "'event': 'refused'" in said
    torch.testing.assert_close(
        names["load"].sum(dim=1), torch.full_like(names["load"][:, 0], names["load"][0].sum())
    )
    assert torch.equal(names["again"].embed.weight, model.embed.weight)  # nano is bf16 already


def test_the_memory_table_is_the_trainers_own_prediction() -> None:
    whole = predicted_gib("pretrain_a100_502m", [])
    saved = predicted_gib("pretrain_a100_502m", ["training.grad_checkpoint_every=1"])
    assert 0 < saved < whole
    with pytest.raises(ValueError, match="8 sequences a step"):
        predicted_gib("pretrain_a100_502m", ["training.micro_batch_size=2"])
    with pytest.raises(ValueError, match="3 processes cannot share"):
        predicted_gib("pretrain_a100_502m", [], 3)


def test_each_line_of_the_memory_table_needs_less_than_the_one_above() -> None:
    body = re.search(r"```{predicted-memory} (\w+)\n(.*?)```", PAGE, re.DOTALL)
    assert body
    settings, column = [], []
    for line in body[2].splitlines():
        settings += re.findall(r"\w+\.\w+=\S+", line.split("|")[0])
        gpus = 8 if "on 8 GPUs" in line else 1
        column.append(predicted_gib(body[1], settings, gpus))
    assert column == sorted(column, reverse=True)
    assert len(set(column)) == len(column) > 4


def test_the_page_types_no_measured_number() -> None:
    assert re.findall(r"\d[\d.,]*\s?(?:tokens/s|TFLOP/s|GiB|ms)\b", PAGE) == []
