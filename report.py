"""How stats.py shows its rows: text, Markdown, CSV, JSON, a forest plot, loss curves, one page.

Every table is made of Rows and COLUMNS. matplotlib is imported by the functions that draw.
"""
import csv
import html
import io
import json
import math
import re
import warnings
from base64 import b64encode
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from common import atomic_path, finite
from records import Group

MOST_DRAWN = 80   # contrasts in one forest plot: more cannot be read
MOST_LEGEND = 12  # arms in one legend
SIGNS = (1, -1, -1, 1)   # of the arms in A - B and in (A - B) - (C - D)


@dataclass
class Row:
    """An arm, a contrast, a difference of differences (dod) or a ratio, in one metric."""
    kind: str
    name: str
    metric: str
    group: Group
    script: str
    n: int = 0
    mean: float = None
    sd: float = None
    ci: tuple = None        # the interval at the alpha that was asked for
    ci95: tuple = None
    per_seed: dict = field(default_factory=dict)
    terms: tuple = ()                 # its Arms, see SIGNS
    table: str = None       # where a paper prints it
    row: str = None
    label: str = None
    improved: int = None    # seeds below 0
    separated: bool = None
    params: float = None
    seeds_needed: int = None
    detectable: float = None
    p: float = None
    p_holm: float = None
    printed: str = None
    published: str = None
    marks: list = field(default_factory=list)


# ---- values as text ----

def text_of(value):
    """A number as the tables show it: six decimals in the usual range, '-' for None."""
    if value is None:
        return "-"
    if abs(value) < 1e-12:  # rounding noise of a difference
        return "0.000000"
    if 5e-7 <= abs(value) < 1e5:
        return f"{value:.6f}"
    return f"{value:.3g}"


def seeds_text(row):
    """Per-seed values as 'seed:value' words."""
    return " ".join(f"{s}:{text_of(v)}" for s, v in row.per_seed.items()) or "-"


def interval_text(row):
    """The interval of a contrast, with * when it excludes 0."""
    if row.kind == "ratio":
        return "none (descriptive)"
    if row.ci is None:
        return "none (n = 1)" if row.n == 1 else "-"
    low, high = row.ci
    return f"[{text_of(low)}, {text_of(high)}]" + (" *" if low > 0 or high < 0 else "")


def improved_text(row):
    """Seeds below 0, of how many."""
    return "-" if row.improved is None else f"{row.improved}/{row.n}"


def ranges_text(row):
    """The verdict of the seed ranges."""
    return {True: "separated", False: "overlap", None: "-"}[row.separated]


def seeds_needed_text(row):
    """Pairs that --power asks for."""
    return "-" if row.detectable is None else str(row.seeds_needed or "> 1,000,000")


def marks_text(row):
    """The remarks of a row."""
    return "; ".join(row.marks)


def printed_text(p):
    """A printed arm summary: its sd says whether it was divided by n or by n - 1."""
    sd = "" if p.sd is None else f" ± {text_of(p.sd)} (sd/{p.sd_by})"
    ends = f", range {text_of(p.low)} .. {text_of(p.high)}"
    return text_of(p.mean) + sd + (ends if (p.low, p.high) != (None, None) else "")


def printed_contrast(item, metric):
    """A printed contrast with its place in the paper; None where the paper gives no one number."""
    mean, sd, ends = (item["printed"][metric][key] for key in ("mean", "sd", "ci95"))
    if mean is None:
        return None
    text = text_of(mean) + ("" if sd is None else f" ± {text_of(sd)}")
    text += " [{}, {}]".format(*map(text_of, ends)) if ends else ""
    return f"{text} ({item['table']}" + (f" row {item['row']})" if item["row"] else ")")


# ---- the columns of every table ----

class Column(NamedTuple):
    """key: a value of a Row, its name in CSV and JSON; header: in tables, "" to leave it out.

    show: row -> text, or the format of a number. of: the rows that have it, "" for all. look: num
    for numbers, or a class in HTML. optional: left out where it would be empty.
    """
    key: str
    header: str = ""
    show: object = None
    look: str = ""
    of: str = ""
    optional: bool = False

    def text(self, row):
        """The cell of a row."""
        if callable(self.show):
            return self.show(row)
        value = getattr(row, self.key)
        if isinstance(value, float):
            return format(value, self.show) if self.show else text_of(value)
        return "-" if value is None else str(value)


COLUMNS = (
    *map(Column, ("kind", "script", "depth", "width", "steps", "tokens", "corpus")),
    Column("table", of="contrast"),
    Column("row", "row", of="contrast", optional=True),
    Column("name", "arm", of="arm"),
    Column("name", "contrast", of="contrast"),
    Column("label", "what", look="wrap", of="contrast", optional=True),
    Column("terms", of="contrast"),
    Column("metric", "metric", of="contrast"),
    Column("metric", of="arm"),
    Column("n", "n", look="num"),
    Column("mean", "mean", look="num"),
    Column("sd", "sd", look="num"),
    Column("ci", "{coverage} % interval", interval_text, of="contrast"),
    Column("ci95", of="contrast"),
    Column("params", "params", ",.0f", "num", of="arm"),
    Column("per_seed", "per seed", seeds_text, "wrap"),
    Column("improved", "below 0", improved_text, "num", of="contrast"),
    Column("separated", "ranges", ranges_text, of="contrast"),
    Column("seeds_needed", "seeds needed", seeds_needed_text, "num", of="contrast", optional=True),
    Column("detectable", "detectable", look="num", of="contrast", optional=True),
    Column("p", "p", ".3g", "num", of="contrast", optional=True),
    Column("p_holm", "p Holm", ".3g", "num", of="contrast", optional=True),
    Column("printed", "printed", look="long", of="arm", optional=True),
    Column("published", "published", look="long", optional=True),
    Column("marks", "notes", marks_text, "wrap mark"),
)


def columns_of(row):
    """The columns that this kind of row has."""
    return [c for c in COLUMNS if c.of in ("", "arm" if row.kind == "arm" else "contrast")]


def values_of(row):
    """{key of a column: value} of a row, as JSON holds it."""
    terms = [[sign, arm.label] for sign, arm in zip(SIGNS, row.terms)]
    there = {**row.group._asdict(), **vars(row), "terms": terms}
    return {c.key: there[c.key] for c in columns_of(row)}


def sections(rows, alpha):
    """[(title, columns, their headers, [cells as text])]: arms by group and metric, contrasts by
    group and the paper's table.
    """
    found, tables = {}, []
    for row in rows:
        kind, last = ("Arms", row.metric) if row.kind == "arm" else ("Contrasts", row.table)
        title = f"{kind}: {row.group}" + (f", {last}" if last else "")
        found.setdefault(title, []).append(row)
    for title, inside in found.items():
        columns = [c for c in columns_of(inside[0]) if c.header]
        columns = [c for c in columns if not c.optional or {c.text(r) for r in inside} != {"-"}]
        headers = [c.header.format(coverage=f"{100 * (1 - alpha):g}") for c in columns]
        lines = [[c.text(row) for c in columns] for row in inside]
        tables.append((title, columns, headers, lines))
    return tables


def as_text(headers, lines, numeric=()):
    """A table as aligned text; numeric: the places of columns that are numbers."""
    widths = [max(map(len, cells)) for cells in zip(headers, *lines)]
    out = []
    for line in [headers, *lines]:
        cells = [c.rjust(w) if i in numeric else c.ljust(w)
                 for i, (c, w) in enumerate(zip(line, widths))]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def as_markdown(headers, lines, numeric=()):
    """A table as Markdown."""
    rule = ["---:" if i in numeric else ":---" for i in range(len(headers))]
    lines = [[re.sub(r"([\\|*_`<>])", r"\\\1", cell) for cell in line]
             for line in [headers, *lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def as_tables(tables, remarks, markdown):
    """Everything that goes to the terminal as text or Markdown."""
    draw, heading, item = (as_markdown, "### ", "- ") if markdown else (as_text, "", "")
    out = []
    for title, columns, headers, lines in tables:
        numeric = [i for i, c in enumerate(columns) if c.look == "num"]
        out += [heading + title + "\n" * markdown, draw(headers, lines, numeric) + "\n"]
    return "\n".join(out + [item + line for line in remarks])


def as_csv(rows):
    """One CSV table: a line per row, per-seed values as 'seed=value' joined by ';'."""
    keys = list(dict.fromkeys(c.key for c in COLUMNS if c.key != "terms"))
    place = keys.index("ci")
    keys[place:place + 2] = ["low", "high", "low95", "high95"]
    out = io.StringIO()
    writer = csv.DictWriter(out, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        low, high = row.ci or (None, None)
        low95, high95 = row.ci95 or (None, None)
        seeds = ";".join(f"{s}={v!r}" for s, v in row.per_seed.items())
        writer.writerow({**values_of(row), "low": low, "high": high, "low95": low95,
                         "high95": high95, "marks": marks_text(row), "per_seed": seeds})
    return out.getvalue()


def as_json(arms, rows, alpha, notes, skipped):
    """One strict JSON object; 'ci95' is the 95 % interval, 'ci' one at another alpha."""
    lists = [[values_of(row) for row in some] for some in (arms, rows)]
    for row in lists[0]:
        row["arm"] = row.pop("name")
    for row in lists[1] if alpha == 0.05 else ():
        del row["ci"]
    found = {"alpha": alpha, "arms": lists[0], "contrasts": lists[1], "notes": notes,
             "skipped": skipped}
    return json.dumps(finite(found), indent=1, allow_nan=False, ensure_ascii=False)


def legend_lines(args, rows):
    """The lines that say how to read the contrasts."""
    coverage = f"{100 * (1 - args.alpha):g}"
    lines = [f"Differences are paired by seed; lower is better. * the {coverage} % t interval "
             "excludes 0: descriptive, not corrected for the number of contrasts. "
             "sd divides by n - 1."]
    if args.power is not None:
        lines.append(
            f"seeds needed: pairs needed to detect a difference of {args.power:g} at 80 % power "
            f"(two-sided, alpha {args.alpha:g}, non-central t); detectable: smallest difference at "
            "the present n.")
        for n in sorted({row.n for row in rows if row.sd}):
            from scipy.special import chdtri
            low, high = (math.sqrt((n - 1) / float(chdtri(n - 1, p))) for p in (0.025, 0.975))
            lines.append(f"An sd from {n} pairs is itself uncertain: the true one is {low:.2f} to "
                         f"{high:.2f} times it (95 %).")
    if args.holm:
        family = sum(row.p is not None for row in rows)
        lines.append(f"p: paired t-test; p Holm: corrected over the {family} contrasts shown "
                     "(the intervals are not).")
    return lines


# ---- figures ----

def figure(panels):
    """A matplotlib figure with one row per (height in inches, draw(axes))."""
    import matplotlib
    matplotlib.use("Agg")
    # text is never read as mathematics
    matplotlib.rcParams.update({"text.parse_math": False, "svg.hashsalt": "nanoarms",
                                "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt
    heights = [height for height, _ in panels]
    fig, axes = plt.subplots(len(panels), 1, figsize=(10, sum(heights)), squeeze=False,
                             layout="constrained", gridspec_kw={"height_ratios": heights})
    for (_, draw), axis in zip(panels, axes[:, 0]):
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
    return fig


def forest_panels(rows, alpha):
    """Panels of a forest plot, one per group and metric, of the contrasts that have a value."""
    groups = {}
    for row in [r for r in rows if r.kind != "ratio" and r.mean is not None][:MOST_DRAWN]:
        groups.setdefault((row.group, row.metric), []).append(row)
    return [(1.1 + 0.3 * len(some), partial(draw_forest, some, alpha)) for some in groups.values()]


def draw_forest(rows, alpha, axis):
    """The contrasts of one group in one metric, one below the other."""
    for y, row in enumerate(rows):
        draw_contrast(axis, y, row)
    metric = rows[0].metric
    axis.axvline(0, color="black", lw=0.8)
    axis.set_yticks(range(len(rows)), [clip(row.name) for row in rows])
    axis.set_ylim(len(rows) - 0.3, -0.6)
    axis.set_title(f"{rows[0].group}: {metric}, paired differences", loc="left", fontsize=10)
    axis.set_xlabel(f"difference in {metric} (lower is better); diamond: mean, "
                    f"bar: {100 * (1 - alpha):g} % t interval, circles: seeds")
    axis.grid(axis="x", color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)


def draw_contrast(axis, y, row):
    """One line of a forest plot: seeds, mean and interval, coloured when it excludes 0."""
    low, high = row.ci or (row.mean, row.mean)
    color = "#555555"
    if row.ci and (high < 0 or low > 0):
        color = "#1b6e3c" if high < 0 else "#a8321e"
    axis.plot((low, high), [y, y], color=color, lw=2, solid_capstyle="butt", zorder=2)
    axis.plot(row.mean, y, "D", color=color, ms=4.5, zorder=4)
    seeds = list(row.per_seed.values())
    axis.plot(seeds, [y + 0.27] * row.n, "o", color="white", mec=color, ms=4, mew=0.9, zorder=3)


def clip(text, most=70):
    """The text, cut in its middle when it is longer than a figure can hold."""
    return text if len(text) <= most else text[:most // 2 - 1] + "…" + text[-most // 2:]


def curve_panels(arms):
    """Panels of loss curves, one per group: every run a line, every arm a colour."""
    groups = {}
    for arm in arms:
        curves = [run.curve for run in arm.runs.values() if run.curve]
        if curves:
            groups.setdefault(arm.group, {})[arm.label] = curves
    return [(3.8, partial(draw_curves, group, curves)) for group, curves in groups.items()]


def draw_curves(group, curves, axis):
    """The curves {label: [curve]} of a group; the legend holds the first MOST_LEGEND."""
    import matplotlib.pyplot as plt
    colors = plt.get_cmap("tab20" if len(curves) > 10 else "tab10")
    for i, (label, lines) in enumerate(curves.items()):
        text = clip(label, 40) if i < MOST_LEGEND else None
        if i == MOST_LEGEND:
            text = f"and {len(curves) - MOST_LEGEND} more"
        for points in lines:
            axis.plot(*zip(*points), color=colors(i % 20), lw=0.9, alpha=0.85, label=text)
            text = None
    axis.set_title(f"{group}: loss curves, one line per seed", loc="left", fontsize=10)
    axis.set_xlabel("step")
    axis.set_ylabel("loss (nats per token)")
    axis.legend(loc="upper right", fontsize=7, frameon=False)


def write_figure(panels, target, **options):
    """Draw the panels into a file or buffer."""
    import matplotlib.pyplot as plt
    fig = figure(panels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the font lacks is drawn as a box
        fig.savefig(target, **options)
    plt.close(fig)


def save_figure(path, panels):
    """Write the panels to a png, svg or pdf file, whole or not at all."""
    with atomic_path(path) as tmp:
        write_figure(panels, tmp, format=str(path).rpartition(".")[2].lower(), dpi=150)


# ---- the page ----

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; margin: 2rem auto; max-width: 100rem;
  padding: 0 1.5rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
p, li { max-width: 60rem } img { max-width: 100% }
.scroll { overflow-x: auto; border: 1px solid #d8d8d8 }
table { border-collapse: collapse; font-size: 13px; width: 100% }
th { text-align: left; background: #f3f4f2; white-space: nowrap }
th, td { padding: .3rem .6rem; vertical-align: top }
td { border-top: 1px solid #e6e6e6; white-space: nowrap }
.num { text-align: right } .mark { color: #a8321e }
td.wrap { white-space: normal; min-width: 9rem } td.long { white-space: normal; min-width: 18rem }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{style}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def html_table(columns, headers, lines):
    """A table in HTML; every text is escaped."""
    rows = []
    for cell, line in [("th", headers), *(("td", line) for line in lines)]:
        texts = [f'<{cell} class="{column.look}">{html.escape(text)}</{cell}>'
                 for column, text in zip(columns, line)]
        rows.append(f"<tr>{''.join(texts)}</tr>\n")
    return f'<div class="scroll"><table>\n{"".join(rows)}</table></div>'


def inline(panels, alt):
    """A figure as an <img> that carries its own SVG."""
    out = io.BytesIO()
    write_figure(panels, out, format="svg", metadata={"Date": None})
    data = b64encode(out.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def html_list(lines):
    """Lines as a list; every text is escaped."""
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def page(heading, tables, figures, legend, notes):
    """The text of one self-contained page. figures: (title, panels). legend, notes: lines."""
    parts = [(name, inline(panels, name)) for name, panels in figures if panels]
    # contrasts first: they are what is asked
    for title, *table in sorted(tables, key=lambda table: table[0].startswith("Arms")):
        parts.append((title, html_table(*table)))
    parts.append(("How to read this", html_list(legend)))
    if notes:
        parts.append(("Left out, and remarks", html_list(notes)))
    body = "\n".join(f"<h2>{html.escape(name)}</h2>{part}" for name, part in parts)
    return PAGE.format(title=html.escape(heading), style=STYLE, body=body)
