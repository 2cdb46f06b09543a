"""What it costs: `gptoss kv-cache`, `smoke`, `profile`, `vram` and `step-time`."""

import sys
from typing import Annotated

import typer

from gptoss.cli.options import Config, Device, device_of

app = typer.Typer()


@app.command("kv-cache")
def kv_cache(
    allocate: Annotated[
        bool, typer.Option(help="Also make the buffers and count their bytes.")
    ] = True,
    device: Device = "cpu",
) -> None:
    """The KV cache of the production model, all layers full against alternating windows; exit 1 below 1.8×."""
    from gptoss.bench import kv_cache as table

    rows = table.run(allocate=allocate, device=device_of(device or "cpu"))
    head = f"{'tokens':>8}  {'full GiB':>9}  {'mixed GiB':>9}  {'ratio':>6}"
    print(head + (f"  {'allocated':>9}" if allocate else ""))
    for row in rows:
        line = f"{row['length']:>8,}  {row['full_bytes'] / 2**30:>9.3f}  {row['mixed_bytes'] / 2**30:>9.3f}"
        line += f"  {row['ratio']:>5.2f}×"
        print(line + (f"  {row['allocated_ratio']:>8.2f}×" if allocate else ""))
    if not table.reaches_target(rows):
        print(f"below {table.TARGET_RATIO}×", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def smoke(device: Device = None) -> None:
    """Eight end-to-end steps on a small model, about a minute; exit 1 when one fails."""
    from gptoss.bench.smoke import Smoke

    marks = {"ok": "✓", "skipped": "–", "failed": "✗"}
    failed = 0
    for number, outcome in enumerate(Smoke(device_of(device)).run(), start=1):
        print(f"{marks[outcome.status]} {number} {outcome.title}: {outcome.detail}", flush=True)
        failed += outcome.status == "failed"
    print("all steps passed" if not failed else f"{failed} of 8 steps failed")
    raise typer.Exit(1 if failed else 0)


profile_app = typer.Typer(
    help="Where the time goes: components, moe or decode.", no_args_is_help=True
)
app.add_typer(profile_app, name="profile")


@profile_app.command("components")
def profile_components(
    config: Config = "tiny",
    batch: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 1,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.", min=1)] = None,
    device: Device = None,
) -> None:
    """Forward time of each part of a model."""
    from gptoss.bench import profile
    from gptoss.config import load_config

    rows = profile.components(load_config(config).model, device_of(device), batch, seq_len)
    for name, seconds in rows:
        print(f"{name:<28}{seconds * 1e3:>10.3f} ms")


@profile_app.command("moe")
def profile_moe(
    config: Config = "tiny",
    tokens: Annotated[int, typer.Option(help="Tokens at once.", min=1)] = 4096,
    device: Device = None,
) -> None:
    """The expert layer under each dispatch."""
    from gptoss.bench import profile
    from gptoss.config import load_config

    print(f"{'dispatch':<16}{'forward':>12}{'and backward':>16}")
    for name, forward, both in profile.moe(load_config(config).model, device_of(device), tokens):
        print(f"{name:<16}{forward * 1e3:>9.3f} ms{both * 1e3:>13.3f} ms")


@profile_app.command("decode")
def profile_decode(
    config: Config = "tiny",
    new: Annotated[int, typer.Option(help="Tokens to write.", min=1)] = 64,
    device: Device = None,
) -> None:
    """Greedy decoding for several prompt lengths, random weights."""
    from gptoss.bench import profile
    from gptoss.config import load_config

    rows = profile.decode(load_config(config).model, device_of(device), new=new)
    for length, count, prefill, rate in rows:
        print(f"prompt={length}, new={count}: prefill {prefill * 1e3:.1f} ms, {rate:,.0f} tokens/s")


@app.command()
def vram(
    config: Config = "pretrain_a100_502m",
    batch_size: Annotated[int, typer.Option(help="Sequences of a micro-batch.", min=1)] = 8,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.", min=1)] = None,
    every: Annotated[
        int | None,
        typer.Option(
            help="Checkpoint every so many blocks, 0 for none; as configured when left out."
        ),
    ] = None,
    threshold_gib: Annotated[float, typer.Option(help="Exit 1 above this, in GiB.")] = 25.0,
    measure: Annotated[
        bool, typer.Option(help="Take two steps on the GPU, where there is one, and compare.")
    ] = True,
) -> None:
    """Memory of a training step: predicted, and measured where there is a GPU."""
    import dataclasses

    import torch

    from gptoss.config import load_config
    from gptoss.training.memory import measure_training_peak, predict_training_memory

    run = load_config(config)
    training, length = run.training, seq_len or run.model.max_seq_len
    if every is None:
        every = training.grad_checkpoint_every if training.grad_checkpoint else 0
    cuda = torch.cuda.is_available()
    model = dataclasses.replace(run.model, max_seq_len=length)
    predicted = predict_training_memory(
        model,
        batch=batch_size,
        every=every,
        loss_chunk=training.loss_chunk_size,
        compiled=training.compile,
        device="cuda" if cuda else "cpu",
    )
    print(predicted.table())
    peak = predicted.gib
    print(
        f"predicted peak   {peak:8.2f} GiB  (batch {batch_size}, {length:,} tokens, every {every})"
    )
    if measure and cuda:
        peak = (
            measure_training_peak(
                model,
                batch=batch_size,
                seq_len=length,
                every=every,
                loss_chunk=training.loss_chunk_size,
                compiled=training.compile,
            )
            / 2**30
        )
        print(f"measured peak    {peak:8.2f} GiB")
    elif measure:
        print("no GPU here: predicted only")
    if peak > threshold_gib:
        print(f"above {threshold_gib} GiB", file=sys.stderr)
        raise typer.Exit(1)


@app.command("step-time")
def step_time(
    config: Annotated[
        str | None,
        typer.Option(help="Name or YAML file; the 502M run on a GPU, tiny on a CPU when left out."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences of a step.", min=1)] = 8,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Timed steps, after four untimed ones.", min=1)] = 20,
    every: Annotated[
        int, typer.Option(help="Checkpoint every so many blocks; 0 for none.", min=0)
    ] = 0,
    dispatch: Annotated[
        str | None, typer.Option(help="Expert dispatch; as configured when left out.")
    ] = None,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Record the step and replay it; on a GPU.")
    ] = False,
) -> None:
    """Training throughput of one process: tokens/s, MFU and peak memory, by the convention that is printed."""
    from gptoss.bench import step
    from gptoss.bench.evidence import format_table
    from gptoss.config import load_config

    config = config or step.default_config()
    configured = load_config(config).model
    variant = step.Variant(
        dispatch=dispatch or configured.moe_dispatch,
        attention=configured.attention_backend,
        batch=batch_size,
        every=every,
        cuda_graph=cuda_graph,
    )
    evidence = step.measure(
        (variant,),
        config=config,
        seq_len=seq_len,
        steps=steps,
        baselines=False,
        command="gptoss step-time",
    )
    print(format_table(evidence))
    if problem := evidence["rows"][0].get("error"):
        print(f"no time: {problem}", file=sys.stderr)
        raise typer.Exit(1)
