"""The command line: `gptoss <command> --help` (one page each). Each command is a few lines over a function of the package.

What a user got wrong (ValueError, OSError) is one line on standard error and exit code 2; `--traceback`, anywhere on the
line, shows where it was found.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gptoss.data.tokenizers import Tokenizer
    from gptoss.model.transformer import GPTOSS

app = typer.Typer(
    name="gptoss",
    help="GPT-OSS-Lite from first principles. Add --traceback to any command to see where an error was found.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Checkpoint = Annotated[
    Path | None, typer.Option(help="A run's save_dir; its latest complete checkpoint is used.")
]
Step = Annotated[int | None, typer.Option(help="Which checkpoint, when not the latest.")]
Shipped = Annotated[str | None, typer.Option("--model", help='A model of the package: "nano".')]
Device = Annotated[
    str | None, typer.Option(help="cuda, cuda:1, cpu; a GPU where there is one when left out.")
]
Rope = Annotated[str, typer.Option(help='Rotary mode: "auto", "plain" or "yarn".')]


@app.command()
def pretrain(
    config: Annotated[
        str, typer.Option(help="A configuration of the package (tiny, …) or a YAML file.")
    ] = "tiny",
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

    run = load_config(config, overrides or ())
    at = int(resume) if resume.lstrip("-").isdigit() else resume
    try:
        result = run_pretraining(
            run, resume=at, device=device, progress=not quiet, max_steps=max_steps
        )
    except KeyboardInterrupt:
        print(f"left at once; {run.training.save_dir} keeps what was saved before", file=sys.stderr)
        raise typer.Exit(130) from None
    if quiet or not _is_main_process():
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
    )
    print(f"train       {done.train}")
    print(f"validation  {done.validation or 'none'}")
    print(f"tokenizer   {done.tokenizer}")


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    checkpoint: Checkpoint = None,
    model: Shipped = None,
    step: Step = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Mass of the likeliest tokens to draw from.")] = 0.95,
    top_k: Annotated[int | None, typer.Option(help="Number of likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws.")] = None,
    rope: Rope = "auto",
    use_cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep keys and values.")
    ] = True,
    device: Device = None,
) -> None:
    """Write text with a trained model, token by token."""
    from gptoss.inference.generate import generate_with_result

    net, tokenizer = _load(checkpoint, model, step, device)

    def show(new: Any) -> None:
        print(new.texts[0], end="", flush=True)

    # The prompt is checked before it is printed, so that an error stands alone.
    printed = False

    def show_first(new: Any) -> None:
        nonlocal printed
        if not printed:
            print(prompt, end="")
            printed = True
        show(new)

    result = generate_with_result(
        net,
        prompt,
        max_new_tokens,
        on_token=show_first,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        rope=rope,
        use_cache=use_cache,
        stop_ids=[tokenizer.eos_token_id],
        tokenizer=tokenizer,
    )
    print("" if printed else prompt)
    if sys.stderr.isatty():
        count = len(result.new_tokens[0])
        rate = result.tokens_per_second
        print(f"[{count} tokens, {rate:,.0f} tokens/s, {result.rope_mode} RoPE]", file=sys.stderr)


@app.command()
def passkey(
    checkpoint: Checkpoint = None,
    model: Shipped = None,
    step: Step = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of a prompt; may be repeated.")
    ] = None,
    trials: Annotated[int, typer.Option(help="At each length, spread over ten depths.")] = 20,
    distractors: Annotated[int, typer.Option(help="Other keys in the same prompt.")] = 0,
    rope: Rope = "auto",
    seed: Annotated[int, typer.Option(help="Of keys and places.")] = 42,
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    device: Device = None,
) -> None:
    """Hide a number in long text and ask for it: accuracy by length, with 95% intervals."""
    import json

    from gptoss.inference.passkey import DEFAULT_LENGTHS, PasskeyEvaluator

    net, tokenizer = _load(checkpoint, model, step, device)
    lengths = length or [n for n in DEFAULT_LENGTHS if n <= net.cfg.eval_max_seq_len]
    evaluator = PasskeyEvaluator(net, tokenizer, n_distractors=distractors, rope=rope, seed=seed)
    result = evaluator.evaluate_grid(lengths, trials)
    print(f"{'tokens':>8}  {'right':>9}  {'accuracy':>8}  95% interval")
    for row in result.to_dict()["rows"]:
        share = f"{row['right']}/{row['trials']}"
        interval = f"{row['low95']:.0%} to {row['high95']:.0%}"
        print(f"{row['length']:>8,}  {share:>9}  {row['accuracy']:>8.0%}  {interval}")
    if out is not None:
        out.write_text(json.dumps(result.to_dict(), indent=2) + "\n")


@app.command("kv-cache")
def kv_cache(
    allocate: Annotated[
        bool, typer.Option(help="Also make the buffers and count their bytes.")
    ] = True,
    device: Device = "cpu",
) -> None:
    """The KV cache of the production model, all layers full against alternating windows; exit 1 below 1.8×."""
    from gptoss.bench import kv_cache as table

    rows = table.run(allocate=allocate, device=device or "cpu")
    head = f"{'tokens':>8}  {'full GiB':>9}  {'mixed GiB':>9}  {'ratio':>6}"
    print(head + (f"  {'allocated':>9}" if allocate else ""))
    for row in rows:
        line = f"{row['length']:>8,}  {row['full_bytes'] / 2**30:>9.3f}  {row['mixed_bytes'] / 2**30:>9.3f}"
        line += f"  {row['ratio']:>5.2f}×"
        print(line + (f"  {row['allocated_ratio']:>8.2f}×" if allocate else ""))
    if not table.reaches_target(rows):
        print(f"below {table.TARGET_RATIO}×", file=sys.stderr)
        raise typer.Exit(1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    from gptoss.training.guard import TrainingStopped

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    warnings.showwarning = _show_warning
    try:
        app(arguments)
    except (ValueError, OSError, ImportError, TrainingStopped) as error:
        if show_traceback:
            raise
        if _is_main_process():
            print(
                f"gptoss: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr
            )
        sys.exit(1 if isinstance(error, TrainingStopped) else 2)


def _show_warning(message: Any, category: Any, *where: Any, **more: Any) -> None:
    if issubclass(category, UserWarning) and _is_main_process():
        print(f"gptoss: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _is_main_process() -> bool:
    """Whether this is the one process of the run that speaks; torchrun numbers them."""
    return os.environ.get("RANK", "0") == "0"


def _load(
    checkpoint: Path | None, shipped: str | None, step: int | None, device: str | None
) -> "tuple[GPTOSS, Tokenizer]":
    """The model that a command names, in its own way to be named, on its device."""
    import torch

    if (checkpoint is None) == (shipped is None):
        raise ValueError("expected a model: --checkpoint DIRECTORY or --model NAME, one of the two")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device {place}: PyTorch sees no CUDA device here; leave it out or say cpu"
        )
    if shipped is not None:
        from gptoss.pretrained import load_pretrained

        net, words = load_pretrained(shipped)
        return net.to(place), words
    from gptoss.training.restore import load_run

    assert checkpoint is not None
    model, tokenizer, _ = load_run(checkpoint, step, place)
    if tokenizer is None:
        raise ValueError(
            f"{checkpoint} has no tokenizer.json: put the one of the training text there"
        )
    return model, tokenizer
