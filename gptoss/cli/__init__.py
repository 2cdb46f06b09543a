"""The command line: `gptoss <command> --help`, one page each.

Each command is a few lines over a function of the package, which it imports when it runs.
"""

from gptoss.cli.entry import main

__all__ = ["main"]
