"""Draws the README's pictures: python pictures.py

    forest.svg   every arm of results/laptop against the dense one, paired by seed, by stats.py
    house.svg    which file imports which; what follows from other arrows is left out
"""
import ast
import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import stats
from common import ROOT, add_flags, check_bounds, cli, flag, make_parser

SCRIPTS = ("ablate", "audit", "bench", "eval_heldout", "train_oe", "train_wm")
COLORS = {"scripts": "#dcebdc", "rooms": "#e4e9f2"}   # light: grey printers show the text


@dataclass(frozen=True)
class Config:
    """The options of pictures.py."""
    out: str = flag("pictures", "folder of the pictures")


def imports_of(path, known):
    """Names of the project's files that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found & known


def reachable(name, graph):
    """Everything that a file imports, directly or not."""
    found = set(graph[name])
    for other in graph[name]:
        found |= reachable(other, graph)
    return found


def house():
    """({file: the imports to draw}, [[files of a floor]]), the lowest floor first.

    Drawn are SCRIPTS and what they import, all but common.py, which nearly all files import.
    """
    paths = {p.stem: p for p in sorted(ROOT.glob("*.py"))}
    graph = {name: imports_of(path, set(paths)) for name, path in paths.items()}
    kept = sorted(set(SCRIPTS).union(*(reachable(name, graph) for name in SCRIPTS)) - {"common"})
    arrows, floors = {}, {}
    for name in kept:
        indirect = set().union(*(reachable(other, graph) for other in graph[name]))
        arrows[name] = sorted(graph[name] - indirect - {"common"})
    while len(floors) < len(kept):
        for name in kept:
            below = [floors.get(other) for other in graph[name] - {"common"}]
            if name not in floors and None not in below:
                floors[name] = 1 + max(below, default=-1)
    rows = [[name for name in kept if floors[name] == i] for i in range(max(floors.values()) + 1)]
    return arrows, untangled(rows, arrows)


def untangled(rows, arrows):
    """The floors, each in an order in which files stand near what they import."""
    def place(name):
        row = next(row for row in rows if name in row)
        return (row.index(name) + 0.5) / len(row)

    def wish(name):
        near = arrows[name] + [other for other, below in arrows.items() if name in below]
        return sum(map(place, near)) / max(1, len(near))
    for _ in range(20):
        for i, row in enumerate(rows):
            rows[i] = sorted(row, key=wish)
    return rows


def draw_house(path):
    """The files as boxes, floor by floor, and an arrow from each to what it imports."""
    import report
    arrows, rows = house()
    imported = {name for below in arrows.values() for name in below}
    places = {}
    for floor, row in enumerate(rows):
        for i, name in enumerate(row):
            places[name] = ((i + 0.5) / len(row), floor)

    def draw(axis):
        axis.axis("off")
        axis.set_xlim(0, 1)
        axis.set_ylim(-1.3, len(rows) - 0.6)
        for name, others in arrows.items():
            for other in others:
                (x, y), (to_x, to_y) = places[name], places[other]
                axis.annotate("", (to_x, to_y + 0.2), (x, y - 0.2), arrowprops=dict(
                    arrowstyle="-|>", color="#8a8a8a", lw=0.8, shrinkA=0, shrinkB=0))
        for name, (x, y) in places.items():
            color = COLORS["rooms" if name in imported else "scripts"]
            box = dict(boxstyle="round,pad=0.35", fc=color, ec="#555555", lw=0.8)
            axis.text(x, y, f"{name}.py", ha="center", va="center", bbox=box)
        ground = dict(boxstyle="round,pad=0.35", fc=COLORS["rooms"], ec="#555555", lw=0.8)
        text = "common.py, on which all but loss.py and fast_weights.py stand"
        axis.text(0.5, -0.95, text, ha="center", va="center", bbox=ground)
    report.save_figure(path, [(0.7 * (len(rows) + 1), draw)])


def draw_forest(path):
    """stats.py's own figure of the committed laptop results."""
    results = sorted(map(str, (ROOT / "results" / "laptop").glob("*.json")))
    with contextlib.redirect_stdout(io.StringIO()):
        stats.main([*results, "--plot", str(path)])


def main(argv=None):
    parser = make_parser(__doc__)
    add_flags(parser, Config)
    config = Config(**vars(parser.parse_args(argv)))
    check_bounds(config)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("forest.svg", draw_forest), ("house.svg", draw_house)):
        draw(out / name)
        print(out / name)


if __name__ == "__main__":
    cli(main)
