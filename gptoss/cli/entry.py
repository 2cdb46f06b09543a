"""`gptoss`: the commands together, and what happens to errors.

What a user got wrong (ValueError, OSError) is one line on standard error and exit code 2; `--traceback`, anywhere on the
line, shows where it was found. Training that cannot go on is exit code 1.
"""

import sys
import warnings
from typing import Any

import typer

from gptoss.cli import measuring, recording, training, using
from gptoss.cli.options import is_main_process

app = typer.Typer(
    name="gptoss",
    help="GPT-OSS-Lite from first principles. Add --traceback to any command to see where an error was found.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for room in (training, using, measuring, recording):
    app.add_typer(room.app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    from gptoss.training.guard import TrainingStopped

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    warnings.showwarning = _show_warning
    if getattr(sys.stdout, "errors", None) == "strict":  # a terminal that is not UTF-8 shows "?"
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a text stream has it
    try:
        app(arguments)
    except (ValueError, OSError, ImportError, TrainingStopped) as error:
        if show_traceback:
            raise
        if is_main_process():
            print(
                f"gptoss: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr
            )
        sys.exit(1 if isinstance(error, TrainingStopped) else 2)


def _show_warning(message: Any, category: Any, *where: Any, **more: Any) -> None:
    if issubclass(category, UserWarning) and is_main_process():
        print(f"gptoss: warning: {' '.join(str(message).split())}", file=sys.stderr)
