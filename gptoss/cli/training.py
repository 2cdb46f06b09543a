"""From text to a trained model: `gptoss pretrain` and `gptoss prepare`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gptoss.cli.options import Config, Device, device_of, is_main_process

app = typer.Typer()


@app.command()
def pretrain(
    config: Config = "tiny",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value, as in training.lr=1e-3; may be repeated."),
    ] = None,
    resume: Annotated[
        str, typer.Option(help='"auto", "never", or the step of a checkpoint.')
    ] = "auto",
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after this many steps; the schedule stays.")
    ] = None,
    device: Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No plan, no log, no bar.")] = False,
) -> None:
    """Train a model: the whole run, resumable at any moment.

    Text, checkpoint, schedule and model come from the configuration. Ctrl-C finishes the step, saves and leaves; the
    same command goes on from there. With several GPUs: torchrun --nproc-per-node 8 -m gptoss pretrain …
    """
    from gptoss.config import load_config
    from gptoss.training.pretrain import pretrain as run_pretraining

    if device is not None:
        device_of(device)  # a wrong name is found before anything is read
    run = load_config(config, overrides or ())
    at = int(resume) if resume.lstrip("-").isdigit() else resume
    try:
        result = run_pretraining(
            run, resume=at, device=device, progress=not quiet, max_steps=max_steps
        )
    except KeyboardInterrupt:
        print(f"left at once; {run.training.save_dir} keeps what was saved before", file=sys.stderr)
        raise typer.Exit(130) from None
    if quiet or not is_main_process():
        return
    if result.validation:
        last = result.validation[-1]
        print(
            f"validation loss at step {last.step}: {last.loss:.4f} nats a token; counting tokens alone gives "
            f"{result.unigram_baseline:.4f}"
        )
    if result.tokenizer is not None and result.stopped_by is None:
        prompt = run.training.sample_prompt
        print(f'next: gptoss generate --checkpoint {result.checkpoint_dir} --prompt "{prompt}"')


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE… OUT",
            help='What to read ("stdlib", "package:NAME", "hf:NAME:CONFIG", folders, files, globs), then the directory '
            "to write.",
        ),
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json; one is trained when left out.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Of the tokenizer to train.")] = 32_768,
    val_fraction: Annotated[float, typer.Option(help="Share of documents held out.")] = 0.005,
    processes: Annotated[int, typer.Option(help="Processes that tokenise.")] = 1,
    shard_tokens: Annotated[int, typer.Option(help="Tokens in a shard.")] = 50_000_000,
    column: Annotated[
        str, typer.Option(help="The field with the text in JSONL, Parquet and datasets.")
    ] = "text",
    retrieval_names: Annotated[
        bool,
        typer.Option(help="Also learn the words of the passkey lines, each as one token."),
    ] = False,
) -> None:
    """Turn text into shards of tokens, with a tokenizer and a manifest.

    Interrupted and started again it goes on; the same input gives the same bytes. The 8B-token run's text:
    gptoss prepare hf:HuggingFaceFW/fineweb-edu:sample-10BT data/fineweb-edu --vocab-size 128000 --processes 16
    """
    from gptoss.data.prepare import prepare as run_preparation

    if len(sources) < 2:
        raise ValueError(
            "expected at least one source and the directory to write: gptoss prepare stdlib data/stdlib"
        )
    *names, out = sources
    done = run_preparation(
        names[0] if len(names) == 1 else names,
        out,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val_fraction=val_fraction,
        processes=processes,
        shard_tokens=shard_tokens,
        column=column,
        retrieval_names=retrieval_names,
    )
    print(f"train       {done.train}")
    print(f"validation  {done.validation or 'none'}")
    print(f"tokenizer   {done.tokenizer}")
