"""The book's one visual language: a style, a palette with fixed meanings, a small set of drawing helpers."""

from .bars import compare_bars, series_line
from .blocks import Block, diagram, flow_arrow, operation_block, tensor_block
from .grids import attention_map, mask_grid
from .load_slider import load_slider
from .palette import (
    CARD,
    COLORS,
    INK,
    LINESTYLES,
    MARKERS,
    QUIET,
    RULE,
    contrast,
    ramp,
    text_on,
    tint,
)
from .roofline_slider import roofline_slider
from .sink_slider import sink_slider
from .style import WIDTH, use_style
from .tile_walk import tile_walk
from .window_slider import window_slider
from .yarn_slider import yarn_slider

__all__ = [
    "CARD",
    "COLORS",
    "INK",
    "LINESTYLES",
    "MARKERS",
    "QUIET",
    "RULE",
    "WIDTH",
    "Block",
    "attention_map",
    "compare_bars",
    "contrast",
    "diagram",
    "flow_arrow",
    "load_slider",
    "mask_grid",
    "operation_block",
    "ramp",
    "roofline_slider",
    "series_line",
    "sink_slider",
    "tensor_block",
    "text_on",
    "tile_walk",
    "tint",
    "use_style",
    "window_slider",
    "yarn_slider",
]
