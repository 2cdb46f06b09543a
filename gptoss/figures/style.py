"""The style file, applied."""

from importlib import resources

import matplotlib.pyplot as plt

WIDTH = 6.4  # inches: every figure is one text column wide, so that words have one size on the page


def use_style() -> None:
    """Make every figure that follows a figure of this book.

    Applies `book.mplstyle` to matplotlib. In a notebook it also turns off the trimming of figures, which would
    give each its own width on the page. Figures are `WIDTH` inches wide; choose the height.

    Source: the palette's key, in the notation appendix.
    """
    with resources.as_file(resources.files("gptoss.figures") / "book.mplstyle") as path:
        plt.style.use(path)
    try:
        from IPython import get_ipython  # a notebook has it, a script need not
    except ImportError:
        return
    shell = get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        shell.run_line_magic("matplotlib", "inline")
        shell.run_line_magic("config", "InlineBackend.print_figure_kwargs = {'bbox_inches': None}")
        with resources.as_file(resources.files("gptoss.figures") / "book.mplstyle") as path:
            plt.style.use(path)  # the magic above resets some settings on first use
