"""What a trained model does: `gptoss generate` and `gptoss passkey`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gptoss.cli.options import Checkpoint, Device, Rope, Shipped, Step, load_model, writable

app = typer.Typer()


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

    net, tokenizer = load_model(checkpoint, model, step, device)

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
    filler: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to hide it in: a folder, a file, package:NAME, …; may be repeated; the classic repeated sentence "
            "when left out."
        ),
    ] = None,
    filler_tokens: Annotated[
        int,
        typer.Option(
            help="How many tokens of it to read, at least the longest prompt's; with more, prompts share less of it."
        ),
    ] = 0,
    distractors: Annotated[int, typer.Option(help="Other keys in the same prompt.")] = 0,
    rope: Rope = "auto",
    seed: Annotated[int, typer.Option(help="Of keys and places.")] = 42,
    out: Annotated[Path | None, typer.Option(help="Where to write the JSON.")] = None,
    device: Device = None,
) -> None:
    """Hide a number in long text and ask for it: accuracy by length, with 95% intervals."""
    from gptoss.inference.filler import read_filler
    from gptoss.inference.passkey import DEFAULT_LENGTHS, PasskeyEvaluator

    writable(out)
    net, tokenizer = load_model(checkpoint, model, step, device)
    lengths = length or [n for n in DEFAULT_LENGTHS if n <= net.cfg.eval_max_seq_len]
    if not lengths:
        raise ValueError(
            f"the model reads {net.cfg.eval_max_seq_len} tokens at most: name a --length up to that"
        )
    text = read_filler(tokenizer, filler, max(*lengths, filler_tokens)) if filler else None
    evaluator = PasskeyEvaluator(
        net, tokenizer, filler=text, n_distractors=distractors, rope=rope, seed=seed
    )
    result = evaluator.evaluate_grid(lengths, trials)
    print(f"{'tokens':>8}  {'right':>9}  {'accuracy':>8}  95% interval")
    for row in result.to_dict()["rows"]:
        share = f"{row['right']}/{row['trials']}"
        interval = f"{row['low95']:.0%} to {row['high95']:.0%}"
        print(f"{row['length']:>8,}  {share:>9}  {row['accuracy']:>8.0%}  {interval}")
    if out is not None:
        result.save(out)
