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
from typing import NamedTuple, Optional

from common import atomic_path, finite
from records import Group

MOST_DRAWN = 80   # contrasts in one forest plot: more cannot be read
MOST_LEGEND = 12  # arms in one legend


@dataclass
class Row:
    """An arm, a contrast, a difference of differences (dod) or a ratio, in one metric."""
    kind: str
    name: str
    metric: str
    group: Group
    script: str
    n: int = 0
    mean: Optional[float] = None
    sd: Optional[float] = None
    ci: Optional[tuple] = None        # the interval at the alpha that was asked for
    ci95: Optional[tuple] = None
    per_seed: dict = field(default_factory=dict)
    terms: tuple = ()                 # ((sign, Arm), ...)
    table: Optional[str] = None       # where a paper prints it
    row: Optional[str] = None
    label: Optional[str] = None
    improved: Optional[int] = None    # seeds below 0
    separated: Optional[bool] = None
    params: Optional[float] = None
    seeds_needed: Optional[int] = None
    detectable: Optional[float] = None
    p: Optional[float] = None
    p_holm: Optional[float] = None
    printed: Optional[str] = None
    published: Optional[str] = None
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
    return "-" if row.improved is None else f"{row.improved}/{row.n}"


def ranges_text(row):
    return {True: "separated", False: "overlap", None: "-"}[row.separated]


def seeds_needed_text(row):
    return "-" if row.detectable is None else str(row.seeds_needed or "> 1,000,000")


def marks_text(row):
    return "; ".join(row.marks)


def printed_text(p):
    """A printed arm summary: its sd says whether it was divided by n or by n - 1."""
    by = "n" if p.sd_by == "n" else "(n-1)"
    sd = "" if p.sd is None else f" ± {text_of(p.sd)} (sd/{by})"
    ends = f", range {text_of(p.low)} .. {text_of(p.high)}"
    return text_of(p.mean) + sd + (ends if (p.low, p.high) != (None, None) else "")


def printed_contrast(item, metric):
    """A printed contrast with its place in the paper; None where the paper gives no one number."""
    printed = item["printed"][metric]
    if not isinstance(printed["mean"], float):
        return None
    sd = "" if printed["sd"] is None else f" ± {text_of(printed['sd'])}"
    ends = ""
    if printed["ci95"] is not None:
        ends = " [{}, {}]".format(*map(text_of, printed["ci95"]))
    place = item["table"] + (f" row {item['row']}" if item["row"] else "")
    return f"{text_of(printed['mean'])}{sd}{ends} ({place})"


# ---- the columns of every table ----

class Column(NamedTuple):
    """key: a value of a Row, its name in CSV and JSON; header: in tables, "" to leave it out.

    show: row -> text, or the format of a number. of: the rows that have it. wrap: class in HTML.
    optional: left out where it would be empty.
    """
    key: str
    header: str = ""
    show: object = None
    numeric: bool = False
    of: str = "both"
    optional: bool = False
    wrap: str = ""

    def text(self, row):
        """The cell of a row."""
        if callable(self.show):
            return self.show(row)
        value = getattr(row, self.key)
        if value is None or not isinstance(value, float):
            return "-" if value is None else str(value)
        return format(value, self.show) if self.show else text_of(value)

    def is_of(self, row):
        return self.of in ("both", "arm" if row.kind == "arm" else "contrast")


COLUMNS = (
    *(Column(key) for key in ("kind", "script", "depth", "width", "steps", "tokens", "corpus")),
    Column("table", of="contrast"),
    Column("row", "row", of="contrast", optional=True),
    Column("name", "arm", of="arm"),
    Column("name", "contrast", of="contrast"),
    Column("label", "what", of="contrast", optional=True, wrap="wrap"),
    Column("terms", of="contrast"),
    Column("metric", "metric", of="contrast"),
    Column("metric", of="arm"),
    Column("n", "n", numeric=True),
    Column("mean", "mean", numeric=True),
    Column("sd", "sd", numeric=True),
    Column("ci", "{coverage} % interval", interval_text, of="contrast"),
    Column("ci95", of="contrast"),
    Column("params", "params", ",.0f", numeric=True, of="arm"),
    Column("per_seed", "per seed", seeds_text, wrap="wrap"),
    Column("improved", "below 0", improved_text, numeric=True, of="contrast"),
    Column("separated", "ranges", ranges_text, of="contrast"),
    Column("seeds_needed", "seeds needed", seeds_needed_text, numeric=True, of="contrast", optional=True),
    Column("detectable", "detectable", numeric=True, of="contrast", optional=True),
    Column("p", "p", ".3g", numeric=True, of="contrast", optional=True),
    Column("p_holm", "p Holm", ".3g", numeric=True, of="contrast", optional=True),
    Column("printed", "printed", of="arm", optional=True, wrap="long"),
    Column("published", "published", optional=True, wrap="long"),
    Column("marks", "notes", marks_text, wrap="wrap mark"),
)


def plain(row, column):
    """A row's value of a column as JSON holds it."""
    if column.key in Group._fields and column.key != "table":
        return getattr(row.group, column.key)
    if column.key == "terms":
        return [[sign, arm.label] for sign, arm in row.terms]
    return getattr(row, column.key)


class Table(NamedTuple):
    """title, the columns shown, their headers, and the cells as text."""
    title: str
    columns: list
    headers: list
    lines: list


def table_of(title, rows, alpha):
    """Table of rows of one kind, without the columns that would be empty."""
    columns = [c for c in COLUMNS if c.header and c.is_of(rows[0])]
    columns = [c for c in columns if not c.optional or any(c.text(row) != "-" for row in rows)]
    headers = [c.header.format(coverage=f"{100 * (1 - alpha):g}") for c in columns]
    return Table(title, columns, headers, [[c.text(row) for c in columns] for row in rows])


def sections(rows, alpha):
    """[Table]: arms by group and metric, contrasts by group and the paper's table."""
    found = {}
    for row in rows:
        is_arm = row.kind == "arm"
        last = row.metric if is_arm else row.table
        found.setdefault(("Arms" if is_arm else "Contrasts", row.group, last), []).append(row)
    titles = [f"{kind}: {group}" + (f", {last}" if last else "") for kind, group, last in found]
    return [table_of(title, inside, alpha) for title, inside in zip(titles, found.values())]


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
    def escaped(line):
        return [re.sub(r"([\\|*_`<>])", r"\\\1", cell) for cell in line]
    lines = [escaped(headers), rule, *map(escaped, lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_tables(tables, remarks, markdown):
    """Everything that goes to the terminal as text or Markdown."""
    out = []
    for table in tables:
        numeric = [i for i, c in enumerate(table.columns) if c.numeric]
        draw = as_markdown if markdown else as_text
        out += [f"### {table.title}\n" if markdown else table.title,
                draw(table.headers, table.lines, numeric) + "\n"]
    return "\n".join(out + [f"- {line}" if markdown else line for line in remarks])


def as_csv(rows):
    """One CSV table: a line per row, per-seed values as 'seed=value' joined by ';'."""
    keys = list(dict.fromkeys(c.key for c in COLUMNS if c.key != "terms"))
    place = keys.index("ci")
    keys[place:place + 2] = ["low", "high", "low95", "high95"]
    out = io.StringIO()
    writer = csv.DictWriter(out, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {c.key: plain(row, c) for c in COLUMNS if c.is_of(row)}
        low, high = row.ci or (None, None)
        low95, high95 = row.ci95 or (None, None)
        seeds = ";".join(f"{s}={v!r}" for s, v in row.per_seed.items())
        writer.writerow({**values, "low": low, "high": high, "low95": low95, "high95": high95,
                         "marks": marks_text(row), "per_seed": seeds})
    return out.getvalue()


def as_json(arms, rows, alpha, notes, skipped):
    """One strict JSON object; 'ci95' is the 95 % interval, 'ci' one at another alpha."""
    def values(row):
        keys = {c.key: plain(row, c) for c in COLUMNS if c.is_of(row)}
        keys["per_seed"] = {str(seed): value for seed, value in row.per_seed.items()}
        if alpha == 0.05:
            keys.pop("ci", None)
        if row.kind == "arm":
            keys["arm"] = keys.pop("name")
        return keys
    found = {"alpha": alpha, "arms": [values(row) for row in arms],
             "contrasts": [values(row) for row in rows], "notes": notes, "skipped": skipped}
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
                                "svg.fonttype": "none",
                                "font.size": 9})
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

    def drawer(group, metric, inside):
        def draw(axis):
            for y, row in enumerate(inside):
                draw_contrast(axis, y, row)
            axis.axvline(0, color="black", lw=0.8)
            axis.set_yticks(range(len(inside)), [clip(row.name) for row in inside])
            axis.set_ylim(len(inside) - 0.3, -0.6)
            axis.set_title(f"{group}: {metric}, paired differences", loc="left", fontsize=10)
            coverage = f"{100 * (1 - alpha):g} % t interval"
            axis.set_xlabel(f"difference in {metric} (lower is better); diamond: mean, "
                            f"bar: {coverage}, circles: seeds")
            axis.grid(axis="x", color="#dddddd", lw=0.6)
            axis.set_axisbelow(True)
        return draw
    return [(1.1 + 0.3 * len(inside), drawer(*key, inside)) for key, inside in groups.items()]


def draw_contrast(axis, y, row):
    """One line of a forest plot: seeds, mean and interval, coloured when it excludes 0."""
    color = "#555555"
    if row.ci and row.ci[1] < 0:
        color = "#1b6e3c"
    elif row.ci and row.ci[0] > 0:
        color = "#a8321e"
    if row.ci:
        axis.plot(row.ci, [y, y], color=color, lw=2, solid_capstyle="butt", zorder=2)
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
        curves = [points for points in (run.points() for run in arm.runs.values()) if points]
        if curves:
            groups.setdefault(arm.group, []).append((arm.label, curves))

    def drawer(group, inside):
        def draw(axis):
            for i, (label, curves) in enumerate(inside):
                draw_curves(axis, i, label, curves, len(inside))
            axis.set_title(f"{group}: loss curves, one line per seed", loc="left", fontsize=10)
            axis.set_xlabel("step")
            axis.set_ylabel("loss (nats per token)")
            axis.legend(loc="upper right", fontsize=7, frameon=False)
        return draw
    return [(3.8, drawer(group, inside)) for group, inside in groups.items()]


def draw_curves(axis, i, label, curves, arms):
    """The curves of the i-th of so many arms; the legend holds the first MOST_LEGEND."""
    import matplotlib.pyplot as plt
    color = plt.get_cmap("tab20")(i % 20) if arms > 10 else plt.get_cmap("tab10")(i)
    text = clip(label, 40) if i < MOST_LEGEND else None
    if i == MOST_LEGEND:
        text = f"and {arms - MOST_LEGEND} more"
    for points in curves:
        axis.plot(*zip(*points), color=color, lw=0.9, alpha=0.85, label=text)
        text = None


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
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
p, li { max-width: 60rem }
.scroll { overflow-x: auto; border: 1px solid #d8d8d8; border-radius: 6px }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums;
  width: 100% }
th { text-align: left; background: #f3f4f2; position: sticky; top: 0; white-space: nowrap }
th button { all: unset; cursor: pointer; padding: .4rem .6rem; display: block; width: 100%;
  box-sizing: border-box }
th button:focus-visible { outline: 2px solid #2b6cb0 }
th[aria-sort=ascending] button::after { content: " \\25B2" }
th[aria-sort=descending] button::after { content: " \\25BC" }
td { padding: .3rem .6rem; border-top: 1px solid #e6e6e6; vertical-align: top; white-space: nowrap }
td.num, th.num button { text-align: right } td.mark { color: #a8321e }
td.wrap { white-space: normal; min-width: 9rem } td.long { white-space: normal; min-width: 18rem }
tr:hover td { background: #faf8ef } img { max-width: 100% }
"""

SORT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  const key = row => row.cells[head.cellIndex].dataset.sort;
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const order = (a, b) => a === "" || b === "" ? (a === "") - (b === "")
    : isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
  body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * order(key(a), key(b))));
};
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>{style}</style></head><body>
<h1>{title}</h1><p>{summary}</p>
{body}
<script>{script}</script></body></html>
"""


def sort_key(text):
    """What a cell sorts by: a number, of an interval its lower end, else the text; '' is last."""
    if text == "-":
        return ""
    share = re.fullmatch(r"(\d+)/(\d+)", text)
    if share:
        return str(int(share[1]) / max(1, int(share[2])))
    if re.fullmatch(r"[\d,]+", text):
        return text.replace(",", "")
    first = text.split(", ")[0].lstrip("[")
    return first if re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", first) else text


def html_table(table):
    """A table whose headers sort it; every text is escaped."""
    kinds = ["num" if c.numeric else c.wrap for c in table.columns]
    head = ""
    for text, kind in zip(table.headers, kinds):
        button = f'<button type="button">{html.escape(text)}</button>'
        head += f'<th scope="col" class="{kind}">{button}</th>'
    body = ""
    for line in table.lines:
        body += "<tr>"
        for text, kind in zip(line, kinds):
            key = html.escape(sort_key(text))
            body += f'<td class="{kind}" data-sort="{key}">{html.escape(text)}</td>'
        body += "</tr>\n"
    return (f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>\n{body}</tbody></table></div>")


def inline(panels, alt):
    """A figure as an <img> that carries its own SVG."""
    out = io.BytesIO()
    write_figure(panels, out, format="svg", metadata={"Date": None})
    data = b64encode(out.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def html_list(lines):
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def page(tables, figures, legend, notes, title, summary):
    """The text of one self-contained page. figures: (title, panels). legend, notes: lines."""
    body = []
    for name, panels in figures:
        if panels:
            body.append(f"<h2>{html.escape(name)}</h2>{inline(panels, name)}")
    # contrasts first: they are what is asked
    for table in sorted(tables, key=lambda t: t.title.startswith("Arms")):
        body.append(f"<h2>{html.escape(table.title)}</h2>{html_table(table)}")
    body.append(f"<h2>How to read this</h2>{html_list(legend)}")
    if notes:
        body.append(f"<h2>Left out, and remarks</h2>{html_list(notes)}")
    return PAGE.format(title=html.escape(title), summary=html.escape(summary), style=STYLE,
                       script=SORT, body="\n".join(body))
