"""A walk over tiles that the reader steers: group and cache size decide what is fetched again, in HTML without outside scripts (chapter 10)."""

import json
from collections.abc import Sequence

from .palette import CARD, COLORS, INK, QUIET, RULE, tint
from .slider_style import slider_style

CELL = 26  # side of a tile in SVG units
LEFT, TOP = 74, 24
GROUPS, STRIPS = range(1, 9), range(2, 33)
MARKS = ("", "·", "●")  # strips fetched for a tile: none, one, both

_STYLE = slider_style(
    "tile-walk",
    COLORS["routed"],
    f"""\
#tile-walk svg {{ width: 100%; height: auto; display: block; }}
#tile-walk svg text {{ fill: {INK}; font-size: 11px; }}
#tile-walk rect {{ fill: {CARD}; stroke: {RULE}; }}
#tile-walk rect.s0 {{ fill: {tint("routed", 0.35)}; stroke: {QUIET}; }}
#tile-walk rect.s1 {{ fill: {tint("bytes", 0.35)}; stroke: {QUIET}; }}
#tile-walk rect.s2 {{ fill: {tint("bytes", 0.75)}; stroke: {QUIET}; }}
#tile-walk rect.now {{ stroke: {INK}; stroke-width: 3; }}
#tile-walk .ask {{ margin: 0.4em 0; }}
""",
)

_SCRIPT = """
(function () {
  const root = document.getElementById("tile-walk"), c = CONSTANTS;
  const [group, cache, done] = root.querySelectorAll("input"), outputs = root.querySelectorAll("output");
  const cells = root.querySelectorAll("rect"), marks = root.querySelectorAll("text.mark"), said = root.querySelector("p");
  const rows = c.owner.length, columns = c.columns;
  function draw() {
    const g = Number(group.value), strips = Number(cache.value), last = Number(done.value), held = [];
    let fetched = 0;
    cells.forEach((cell, i) => { cell.setAttribute("class", ""); marks[i].textContent = ""; });
    for (let i = 0; i < last; i++) {
      const first = Math.floor(i / (g * columns)) * g, size = Math.min(rows - first, g), within = i % (g * columns);
      const row = first + within % size, column = Math.floor(within / size);
      let misses = 0;
      for (const strip of ["x" + row, "w" + c.owner[row] + "," + column]) {
        const place = held.indexOf(strip);
        if (place >= 0) held.splice(place, 1); else misses += 1;
        held.push(strip);
        if (held.length > strips) held.shift();
      }
      fetched += misses;
      const at = row * columns + column;
      cells[at].setAttribute("class", "s" + misses + (i == last - 1 ? " now" : ""));
      marks[at].textContent = c.marks[misses];
    }
    outputs[0].textContent = g; outputs[1].textContent = strips; outputs[2].textContent = last;
    group.setAttribute("aria-valuetext", "groups of " + g + " row tiles");
    cache.setAttribute("aria-valuetext", strips + " strips");
    done.setAttribute("aria-valuetext", last + " programs");
    const share = last ? 100 * (1 - fetched / (2 * last)) : 0;
    said.textContent = "After " + last + " of " + rows * columns + " programs: " + 2 * last + " strips asked for, " + fetched
      + " fetched from main memory, " + share.toFixed(0) + "% found in the cache.";
  }
  [group, cache, done].forEach(e => e.addEventListener("input", draw));
  draw();
})();
"""


def walk_misses(
    owner: Sequence[int], columns: int, group: int, strips: int
) -> list[tuple[int, int, int]]:
    """Walk over all tiles in groups of row tiles, with a cache of strips that forgets the least recently used.

    A tile asks for two strips: its rows of x, and its expert's columns of W1 and W3.

    Args:
        owner: the expert of each row tile.
        columns: column tiles.
        group: row tiles that are walked together, column by column.
        strips: what the cache holds.

    Returns:
        (row tile, column tile, strips fetched) in the order of the walk.

    Source: chapter 10.
    """
    rows = len(owner)
    held: list[tuple[str, int, int]] = []
    walked = []
    for i in range(rows * columns):
        first = i // (group * columns) * group
        size, within = min(rows - first, group), i % (group * columns)
        row, column = first + within % size, within // size
        misses = 0
        for strip in (("x", row, 0), ("w", owner[row], column)):
            if strip in held:
                held.remove(strip)
            else:
                misses += 1
            held.append(strip)
            if len(held) > strips:
                held.pop(0)
        walked.append((row, column, misses))
    return walked


def tile_walk(
    tiles: Sequence[int] = (4, 0, 1, 5), columns: int = 12, group: int = 1, strips: int = 8
) -> str:
    """HTML of the walk over row and column tiles, with sliders for the group, the cache and the time.

    Without scripts, and in print, it shows the whole walk at the given group and cache.

    Args:
        tiles: row tiles of each expert; 0 is an idle one.
        columns: column tiles.
        group: row tiles walked together at the start, 1 to 8.
        strips: strips in the cache at the start, 2 to 32.

    Returns:
        HTML with its style and script inside, for `IPython.display.HTML`. One a page.

    Raises:
        ValueError: no tile, or a group or cache that the sliders do not reach.

    Source: chapter 10; Triton's matrix-product tutorial for the order.
    """
    owner = [expert for expert, n in enumerate(tiles) for _ in range(n)]
    if not owner or columns < 1:
        raise ValueError(
            f"expected at least one row tile and one column; got {len(owner)} and {columns}"
        )
    if group not in GROUPS or strips not in STRIPS:
        raise ValueError(
            f"group must be 1 to 8 and strips 2 to 32; got {group} and {strips}: the sliders end there"
        )
    walked = walk_misses(owner, columns, group, strips)
    misses = {(row, column): n for row, column, n in walked}
    cells = "".join(
        f'<rect class="s{misses[row, column]}" x="{LEFT + CELL * column}" y="{TOP + CELL * row}" '
        f'width="{CELL - 2}" height="{CELL - 2}"/>'
        f'<text class="mark" x="{LEFT + CELL * column + CELL / 2 - 1:.0f}" y="{TOP + CELL * row + 16}" '
        f'text-anchor="middle">{MARKS[misses[row, column]]}</text>'
        for row in range(len(owner))
        for column in range(columns)
    )
    names = "".join(
        f'<text x="{LEFT - 8}" y="{TOP + CELL * row + 16}" text-anchor="end">'
        f"{f'expert {expert}' if row == owner.index(expert) else ''}</text>"
        for row, expert in enumerate(owner)
    )
    width, height = LEFT + CELL * columns + 150, TOP + CELL * len(owner) + 8
    x = LEFT + CELL * columns + 12
    legend = "".join(
        f'<text x="{x}" y="{TOP + 16 + 22 * n}">{mark or "(blank)"} {words}</text>'
        for n, (mark, words) in enumerate(
            zip(MARKS, ("both found", "one fetched", "both fetched"), strict=True)
        )
    )
    picture = (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Row tiles by column tiles, marked by strips fetched">'
        f'<text x="{LEFT}" y="14">column tiles of W1 and W3</text>{names}{cells}{legend}</svg>'
    )
    total, fetched = len(walked), sum(n for _, _, n in walked)
    constants = {"owner": owner, "columns": columns, "marks": MARKS}
    return (
        f'<style>{_STYLE}</style><div id="tile-walk" role="group" aria-label="A walk over tiles">{picture}'
        f'<div class="ask"><label>Row tiles walked together: <output>{group}</output>'
        f'<input type="range" min="{GROUPS[0]}" max="{GROUPS[-1]}" step="1" value="{group}"></label></div>'
        f'<div class="ask"><label>Strips that the cache holds: <output>{strips}</output>'
        f'<input type="range" min="{STRIPS[0]}" max="{STRIPS[-1]}" step="1" value="{strips}"></label></div>'
        f'<div class="ask"><label>Programs done: <output>{total}</output>'
        f'<input type="range" min="0" max="{total}" step="1" value="{total}"></label></div>'
        f'<p aria-live="polite">After {total} of {total} programs: {2 * total} strips asked for, {fetched} fetched from '
        f"main memory, {100 * (1 - fetched / (2 * total)):.0f}% found in the cache.</p></div>"
        f"<script>{_SCRIPT.replace('CONSTANTS', json.dumps(constants))}</script>"
    )
