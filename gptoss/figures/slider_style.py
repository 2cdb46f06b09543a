"""What the book's sliders look like: the rules of style that all of them share."""

from .palette import CARD, COLORS, INK, RULE


def slider_style(name: str, accent: str, own: str, focus: str | None = None) -> str:
    """CSS of a slider's card: frame and font, then its own rules, then labels, ranges and the line of text below them.

    Args:
        name: id of the outermost element.
        accent: colour of the ranges.
        own: the slider's own rules, one a line.
        focus: rules for what the keyboard has reached; a ring around inputs unless given.

    Returns:
        The text of a style element.
    """
    if focus is None:
        focus = f"#{name} input:focus-visible {{ outline: 3px solid {COLORS['queries']}; outline-offset: 2px; }}\n"
    return f"""
html .bd-content div.cell_output .text_html:has(> #{name}) {{ background: none !important; padding: 0 !important; }}
#{name} {{ background: {CARD}; color: {INK}; border: 1px solid {RULE}; border-radius: 8px; padding: 0.8em 1em;
  font-family: "DejaVu Sans", Verdana, sans-serif; font-size: 0.9em; line-height: 1.5; }}
{own}#{name} label {{ display: block; color: {INK}; }}
#{name} input[type=range] {{ width: 100%; accent-color: {accent}; min-height: 1.6em; }}
{focus}#{name} p {{ margin: 0.4em 0 0; color: {INK}; }}
"""
