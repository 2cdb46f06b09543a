"""The book's evidence: `gptoss bench`, `experiment`, `parallel` and `record`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gptoss.cli.options import Config

app = typer.Typer()

OUTSIDE_ALL = ("catalogue", "scaling")
"""Tables that `bench all` leaves out: they take minutes by themselves, or the CPU."""

UNTIMED = ("agreement", "kv_cache", "memory", "passkey")
"""Tables without a clock in them: `bench all` has them measured side by side, after the others."""


@app.command()
def bench(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Which, or all; without one, what there is is listed."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the JSON; book/evidence of the checkout when left out."),
    ] = None,
) -> None:
    """Measure a table of the book, print it with its machine and software, and keep it as evidence."""
    import torch

    from gptoss.bench import evidence
    from gptoss.bench.release import release_memory
    from gptoss.bench.side_by_side import measure_side_by_side

    known, beside = _bench_tables(), []
    if not tables:
        print("tables: " + ", ".join(known))
        return
    if tables == ["all"]:
        if not torch.cuda.is_available():
            raise ValueError(
                "bench all measures the book's evidence and needs a GPU; without one, name a table"
            )
        beside = [name for name in known if name in UNTIMED]
        tables = [name for name in known if name not in (*OUTSIDE_ALL, *UNTIMED)]
    for name in tables:
        if name.replace("-", "_") not in known:
            raise ValueError(f"no table {name!r}; there is: {', '.join(known)}")
    folder = evidence.prepare_folder(out)
    failed = []
    code = 1
    for place, name in enumerate(tables):
        try:
            _measure(name, folder, replace=out is not None)
        except KeyboardInterrupt:
            failed += [f"{name} (Ctrl-C)", *tables[place + 1 :], *beside]
            code, beside = 130, []
            break
        except Exception as error:  # the other tables still run; this one is named at the end
            if len(tables) == 1:
                raise
            failed.append(f"{name} ({' '.join(str(error).split()) or type(error).__name__})")
        release_memory()
    left = list(beside)
    try:
        for name, problem in measure_side_by_side(beside, out):
            left.remove(name)
            if problem is not None:
                failed.append(f"{name} ({problem})")
    except KeyboardInterrupt:
        failed += [f"{name} (Ctrl-C)" for name in left]
        code = 130
    if failed:
        print("not measured: " + "; ".join(failed), file=sys.stderr)
        raise typer.Exit(code)


def _measure(name: str, folder: Path, replace: bool) -> None:
    """One table: measured, printed and kept."""
    import importlib
    import time

    from gptoss.bench import evidence

    start = time.monotonic()
    module = importlib.import_module(f"gptoss.bench.{name.replace('-', '_')}")
    measured = module.measure(command=f"gptoss bench {name}")
    print(evidence.format_table(measured))
    print(evidence.keep_evidence(measured, folder, replace=replace))
    print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


@app.command()
def experiment(
    folder: Annotated[
        Path, typer.Argument(help="Takes checkpoints and results; going on is free.")
    ],
    config: Config = "nano",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="By name, as in yarn-pruned-sinks-1337; all eight when left out."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Of each arm.")] = 1250,
    trials: Annotated[int, typer.Option(help="Questions at each length.")] = 20,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a prompt; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the JSON; book/evidence of the checkout when left out."),
    ] = None,
) -> None:
    """Train plain or YaRN, pruned or not, with sinks or without, and read each model far beyond its length."""
    from gptoss.bench import evidence, long_context
    from gptoss.bench.arms import ARMS, parse_arm

    target = evidence.prepare_folder(out)
    names = arm or [one.name for one in ARMS]
    lengths = length or list(long_context.LENGTHS)
    command = f"gptoss experiment {folder} --config {config} --steps {steps} --trials {trials}"
    for option, values in (("--set", overrides), ("--arm", arm), ("--length", length)):
        command += "".join(f" {option} {value}" for value in values or ())
    try:
        table = long_context.experiment(
            folder,
            [parse_arm(name) for name in names],
            config=config,
            overrides=overrides or (),
            steps=steps,
            trials=trials,
            lengths=lengths,
            command=command,
        )
    except KeyboardInterrupt:
        print(f"left; {folder} keeps what is done, and the same command goes on", file=sys.stderr)
        raise typer.Exit(130) from None
    print(evidence.format_table(table))
    print(evidence.keep_evidence(table, target, replace=out is not None))


@app.command()
def parallel(
    config: Annotated[
        str | None,
        typer.Option(help="By name or a YAML file; pretrain_a100_502m on GPUs, else tiny."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Of each launch.")] = 40,
    processes: Annotated[
        int | None, typer.Option(help="That share a step; every GPU, or two on a CPU.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write the JSON; book/evidence of the checkout when left out."),
    ] = None,
) -> None:
    """Train the same steps in one process, with DDP and with FSDP2, and hold speed and losses side by side.

    Each launch saves a checkpoint, 6 GB for the production model, in the temporary folder; TMPDIR names another.
    """
    from gptoss.bench import evidence
    from gptoss.bench.parallel import compare_engines

    folder = evidence.prepare_folder(out)
    command = "gptoss parallel"
    if config is not None:
        command += f" --config {config}"
    command += "".join(f" --set {override}" for override in overrides or ())
    command += f" --steps {steps}"
    if processes is not None:
        command += f" --processes {processes}"
    try:
        table = compare_engines(
            config, overrides or (), steps=steps, processes=processes, command=command
        )
    except KeyboardInterrupt:
        print("left; the launch was ended, and nothing is written", file=sys.stderr)
        raise typer.Exit(130) from None
    print(evidence.format_table(table))
    print(evidence.keep_evidence(table, folder, replace=out is not None))
    failed = [row["who"] for row in table["rows"] if "error" in row]
    if failed:
        print("not measured: " + ", ".join(failed), file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def record(
    run: Annotated[Path, typer.Argument(help="A run's save_dir.")],
    name: Annotated[str, typer.Argument(help="Of the evidence file, without .json.")],
    title: Annotated[str, typer.Option(help="What the curve shows.")] = "A training run",
    command: Annotated[str, typer.Option(help="What started the run.")] = "gptoss pretrain",
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write it; book/evidence of the checkout when left out."),
    ] = None,
) -> None:
    """Keep a finished run's curve as evidence: loss, validation, speed, memory, samples."""
    from gptoss.bench import evidence
    from gptoss.bench.training_run import read_run

    folder = evidence.prepare_folder(out)
    table = read_run(run, name, title, command)
    print(evidence.keep_evidence(table, folder, replace=out is not None))


def _bench_tables() -> list[str]:
    """The modules of `gptoss.bench` that measure a table."""
    from importlib import resources

    return sorted(
        entry.name.removesuffix(".py")
        for entry in resources.files("gptoss.bench").iterdir()
        if entry.name.endswith(".py") and "\ndef measure(" in entry.read_text(encoding="utf-8")
    )
