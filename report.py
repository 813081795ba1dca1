"""How stats.py shows its rows: aligned text, Markdown, CSV, JSON, a forest plot, loss curves and one self-contained page.

Rows are the dicts of stats.arm_rows() and stats.make_row(). matplotlib is imported by the functions that draw.
"""
import csv
import html
import io
import json
import math
import re
import warnings
from base64 import b64encode

from common import atomic_path, finite
from records import size

NUMERIC = {"n", "mean", "sd", "params", "below 0", "seeds needed", "detectable", "p", "p Holm"}
WRAPPED = {"notes": "wrap", "what": "wrap", "per seed": "wrap", "printed": "long", "published": "long"}  # header -> class of its cells
MOST_DRAWN = 80   # contrasts in one forest plot: more cannot be read
MOST_LEGEND = 12  # arms in one legend


# ---- tables ----

def text_of(value):
    """A number as the tables show it: six decimals in the usual range, three digits beyond, '-' for None."""
    if value is None:
        return "-"
    if abs(value) < 1e-12:  # rounding noise of a difference
        return "0.000000"
    if 5e-7 <= abs(value) < 1e5:
        return f"{value:.6f}"
    return f"{value:.3g}"


def seeds_of(per_seed):
    """Per-seed values as 'seed:value' words."""
    return " ".join(f"{s}:{text_of(v)}" for s, v in per_seed.items()) or "-"


def printed_text(p):
    """A printed arm summary as text: its sd says whether it was divided by n or by n - 1."""
    sd = "" if p.sd is None else f" ± {text_of(p.sd)} (sd/{'n' if p.sd_by == 'n' else '(n-1)'})"
    ends = "" if p.low is None and p.high is None else f", range {text_of(p.low)} .. {text_of(p.high)}"
    return text_of(p.mean) + sd + ends


def printed_contrast(item, metric):
    """A printed contrast as text with its place in the paper; None where the paper gives no single number."""
    printed = item["printed"][metric]
    if not isinstance(printed["mean"], float):
        return None
    sd = "" if printed["sd"] is None else f" ± {text_of(printed['sd'])}"
    ends = "" if printed["ci95"] is None else " [{}, {}]".format(*map(text_of, printed["ci95"]))
    return f"{text_of(printed['mean'])}{sd}{ends} ({item['table']}{' row ' + item['row'] if item['row'] else ''})"


def arm_table(rows):
    """(headers, [[cell text]]) of arm rows; columns that would be empty are dropped."""
    extra = [(k, k) for k in ("printed", "published") if any(r.get(k) for r in rows)]
    headers = ["arm", "n", "mean", "sd", "params", "per seed", *(h for h, _ in extra), "notes"]
    return headers, [[r["arm"], str(r["n"]), text_of(r["mean"]), text_of(r["sd"]), "-" if r["params"] is None else f"{r['params']:,.0f}",
                      seeds_of(r["per_seed"]), *(r.get(k) or "-" for _, k in extra), "; ".join(r["marks"])] for r in rows]


def interval_text(row):
    """The interval of a contrast row, with * when it excludes 0."""
    if row["kind"] == "ratio":
        return "none (descriptive)"
    if row["ci"] is None:
        return "none (n = 1)" if row["n"] == 1 else "-"
    low, high = row["ci"]
    return f"[{text_of(low)}, {text_of(high)}]" + (" *" if low > 0 or high < 0 else "")


def contrast_table(rows, args):
    """(headers, [[cell text]]) of contrast rows."""
    columns = {"row": lambda r: r["row"] or "", "contrast": lambda r: r["name"], "what": lambda r: r["label"] or "",
               "metric": lambda r: r["metric"], "n": lambda r: str(r["n"]), "mean": lambda r: text_of(r["mean"]), "sd": lambda r: text_of(r["sd"]),
               f"{100 * (1 - args.alpha):g} % interval": interval_text, "per seed": lambda r: seeds_of(r["per_seed"]),
               "below 0": lambda r: "-" if r["improved"] is None else f"{r['improved']}/{r['n']}",
               "ranges": lambda r: {True: "separated", False: "overlap", None: "-"}[r["separated"]]}
    if args.power is not None:
        columns["seeds needed"] = lambda r: "-" if r.get("detectable") is None else str(r["seeds_needed"] or "> 1,000,000")
        columns["detectable"] = lambda r: text_of(r.get("detectable"))
    if args.holm:
        columns["p"] = lambda r: "-" if r.get("p") is None else f"{r['p']:.3g}"
        columns["p Holm"] = lambda r: "-" if r.get("p_holm") is None else f"{r['p_holm']:.3g}"
    if args.published:
        columns["published"] = lambda r: r.get("published") or "-"
    columns["notes"] = lambda r: "; ".join(r["marks"])
    for name in ("row", "what"):
        if not any(r[{"what": "label"}.get(name, name)] for r in rows):
            del columns[name]
    return list(columns), [[show_cell(r) for show_cell in columns.values()] for r in rows]


def sections(arms, rows, args):
    """[(title, headers, rows)]: arms by group and metric, contrasts by group and paper table."""
    found = {}
    for r in arms:
        found.setdefault(("Arms", size((r["script"], r["depth"], r["width"])), r["metric"]), []).append(r)
    for r in rows:
        found.setdefault(("Contrasts", size((r["script"], r["depth"], r["width"])), r["table"]), []).append(r)
    return [(f"{kind}: {group}" + (f", {last}" if last else ""), *(arm_table(rs) if kind == "Arms" else contrast_table(rs, args)))
            for (kind, group, last), rs in found.items()]


def as_text(headers, rows, markdown):
    """A table as aligned text or as Markdown."""
    if markdown:
        escape = lambda line: [re.sub(r"([\\|*_`<>])", r"\\\1", cell) for cell in line]
        rule = ["---:" if h in NUMERIC else ":---" for h in headers]
        return "\n".join("| " + " | ".join(line) + " |" for line in [escape(headers), rule, *map(escape, rows)])
    widths = [max(map(len, column)) for column in zip(headers, *rows)]
    return "\n".join("  ".join(c.rjust(w) if h in NUMERIC else c.ljust(w) for c, w, h in zip(line, widths, headers)).rstrip()
                     for line in [headers, *rows])


def as_csv(arms, rows):
    """One CSV table: a line per arm and per contrast, per-seed values as 'seed=value' joined by ';'."""
    keys = ["kind", "script", "depth", "width", "metric", "name", "table", "row", "n", "mean", "sd", "low", "high", "low95", "high95",
            "improved", "separated", "params", "seeds_needed", "detectable", "p", "p_holm", "printed", "published", "marks", "per_seed"]
    out = io.StringIO()
    writer = csv.DictWriter(out, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for r in [{**a, "kind": "arm", "name": a["arm"]} for a in arms] + rows:
        low, high = r.get("ci") or (None, None)
        low95, high95 = r.get("ci95") or (None, None)
        writer.writerow({**r, "low": low, "high": high, "low95": low95, "high95": high95, "marks": "; ".join(r["marks"]),
                         "per_seed": ";".join(f"{s}={v!r}" for s, v in r["per_seed"].items())})
    return out.getvalue()


def as_json(arms, rows, args, notes, skipped):
    """One strict JSON object; an interval at another alpha is under 'ci', 'ci95' is always the 95 % one."""
    hidden = {"bases", "base"} | (set() if args.alpha != 0.05 else {"ci"})
    plain = lambda r: {k: {str(s): x for s, x in v.items()} if k == "per_seed" else v for k, v in r.items() if k not in hidden}
    return json.dumps(finite({"alpha": args.alpha, "arms": [plain(r) for r in arms], "contrasts": [plain(r) for r in rows],
                              "notes": notes, "skipped": skipped}), indent=1, allow_nan=False, ensure_ascii=False)


def legend_lines(args, rows):
    """The lines that say how to read the contrasts."""
    lines = [f"Differences are paired by seed; lower is better. * the {100 * (1 - args.alpha):g} % t interval excludes 0: descriptive, "
             "not corrected for the number of contrasts. sd divides by n - 1."]
    if args.power is not None:
        lines.append(f"seeds needed: pairs needed to detect a difference of {args.power:g} at 80 % power (two-sided, alpha {args.alpha:g}, "
                     "non-central t); detectable: smallest difference at the present n.")
        for n in sorted({r["n"] for r in rows if r["sd"]}):
            from scipy.special import chdtri
            low, high = (math.sqrt((n - 1) / float(chdtri(n - 1, p))) for p in (0.025, 0.975))
            lines.append(f"An sd from {n} pairs is itself uncertain: the true one is {low:.2f} to {high:.2f} times it (95 %).")
    if args.holm:
        family = sum(r.get("p") is not None for r in rows)
        lines.append(f"p: paired t-test; p Holm: corrected over the {family} contrasts shown (the intervals are not).")
    return lines


# ---- figures ----

def figure(panels):
    """A matplotlib figure with one row per (height in inches, draw(axes)); text is never read as mathematics."""
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"text.parse_math": False, "svg.hashsalt": "nanoarms", "font.size": 9})
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(len(panels), 1, figsize=(10, sum(h for h, _ in panels)), squeeze=False, layout="constrained",
                             gridspec_kw={"height_ratios": [h for h, _ in panels]})
    for (_, draw), axis in zip(panels, axes[:, 0]):
        draw(axis)
        axis.spines[["top", "right"]].set_visible(False)
    return fig


def forest_panels(rows, alpha):
    """Panels of a forest plot, one per group and metric: per-seed dots, mean and t interval of every contrast that has a pair."""
    groups = {}
    for r in [r for r in rows if r["kind"] != "ratio" and r["mean"] is not None][:MOST_DRAWN]:
        groups.setdefault((r["script"], r["depth"], r["width"], r["metric"]), []).append(r)

    def drawer(group, inside):
        def draw(axis):
            for y, r in enumerate(inside):
                color = "#1b6e3c" if r["ci"] and r["ci"][1] < 0 else "#a8321e" if r["ci"] and r["ci"][0] > 0 else "#555555"
                if r["ci"]:
                    axis.plot(r["ci"], [y, y], color=color, lw=2, solid_capstyle="butt", zorder=2)
                axis.plot(r["mean"], y, "D", color=color, ms=4.5, zorder=4)
                axis.plot(list(r["per_seed"].values()), [y + 0.27] * r["n"], "o", color="white", mec=color, ms=4, mew=0.9, zorder=3)
            axis.axvline(0, color="black", lw=0.8)
            axis.set_yticks(range(len(inside)), [clip(r["name"]) for r in inside])
            axis.set_ylim(len(inside) - 0.3, -0.6)
            axis.set_title(f"{size(group[:3])}: {group[3]}, paired differences", loc="left", fontsize=10)
            reading = f"diamond: mean, bar: {100 * (1 - alpha):g} % t interval, circles: seeds"
            axis.set_xlabel(f"difference in {group[3]} (lower is better); {reading}")
            axis.grid(axis="x", color="#dddddd", lw=0.6)
            axis.set_axisbelow(True)
        return draw
    return [(1.1 + 0.3 * len(inside), drawer(group, inside)) for group, inside in groups.items()]


def clip(text, most=70):
    """The text, cut in its middle when it is longer than a figure can hold."""
    return text if len(text) <= most else text[:most // 2 - 1] + "…" + text[-most // 2:]


def curve_panels(cells):
    """Panels of loss curves, one per group: every run a line, every arm a colour."""
    groups = {}
    for c in cells:
        if curves := [points for r in c.runs.values() if (points := r.points())]:
            groups.setdefault(c.group, []).append((c.arm, curves))

    def drawer(group, inside):
        def draw(axis):
            import matplotlib.pyplot as plt
            for i, (arm, curves) in enumerate(inside):
                shade = plt.get_cmap("tab20")(i % 20) if len(inside) > 10 else plt.get_cmap("tab10")(i)
                label = clip(arm, 40) if i < MOST_LEGEND else f"and {len(inside) - MOST_LEGEND} more" if i == MOST_LEGEND else None
                for points in curves:
                    axis.plot(*zip(*points), color=shade, lw=0.9, alpha=0.85, label=label)
                    label = None
            axis.set_title(f"{size(group)}: loss curves, one line per seed", loc="left", fontsize=10)
            axis.set_xlabel("step")
            axis.set_ylabel("loss (nats per token)")
            axis.legend(loc="upper right", fontsize=7, frameon=False)
        return draw
    return [(3.8, drawer(group, inside)) for group, inside in groups.items()]


def save_figure(path, panels):
    """Write the panels to a png, svg or pdf file, whole or not at all."""
    import matplotlib.pyplot as plt
    fig = figure(panels)
    with atomic_path(path) as tmp, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the font lacks is drawn as a box
        fig.savefig(tmp, format=str(path).rpartition(".")[2].lower(), dpi=150)
    plt.close(fig)


# ---- the page ----

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; margin: 2rem auto; max-width: 100rem; padding: 0 1.5rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem } p, li { max-width: 60rem }
.scroll { overflow-x: auto; border: 1px solid #d8d8d8; border-radius: 6px }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100% }
th { text-align: left; background: #f3f4f2; position: sticky; top: 0; white-space: nowrap }
th button { all: unset; cursor: pointer; padding: .4rem .6rem; display: block; width: 100%; box-sizing: border-box } th button:focus-visible { outline: 2px solid #2b6cb0 }
th[aria-sort=ascending] button::after { content: " \\25B2" } th[aria-sort=descending] button::after { content: " \\25BC" }
td { padding: .3rem .6rem; border-top: 1px solid #e6e6e6; vertical-align: top; white-space: nowrap } td.num { text-align: right }
td.wrap { white-space: normal; min-width: 9rem } td.long { white-space: normal; min-width: 18rem }
th.num button { text-align: right } tr:hover td { background: #faf8ef } img { max-width: 100% } .mark { color: #a8321e }
"""

SORT = """
for (const button of document.querySelectorAll("th button")) button.onclick = () => {
  const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending", key = row => row.cells[head.cellIndex].dataset.sort;
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const order = (a, b) => a === "" || b === "" ? (a === "") - (b === "") : isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
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
    """What a cell sorts by: a number (of an interval its lower end, of a count its share), else the text; '' comes last."""
    if fraction := re.fullmatch(r"(\d+)/(\d+)", text):
        return str(int(fraction[1]) / max(1, int(fraction[2])))
    first = text.replace(",", "") if re.fullmatch(r"[\d,]+", text) else text.split(", ")[0].lstrip("[")
    return "" if text == "-" else first if re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", first) else text


def html_table(headers, rows):
    """A table whose headers sort it; every text is escaped."""
    def kind(header):
        return "num" if header in NUMERIC else WRAPPED.get(header, "")

    def cell(text, header):
        key = sort_key(text)
        inner = f'<span class="mark">{html.escape(text)}</span>' if header == "notes" else html.escape(text)
        return f'<td class="{kind(header)}" data-sort="{html.escape(key)}">{inner}</td>'

    head = "".join(f'<th scope="col" class="{kind(h)}"><button type="button">{html.escape(h)}</button></th>' for h in headers)
    body = "\n".join("<tr>" + "".join(map(cell, row, headers)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def inline(panels, alt):
    """A figure as an <img> that carries its own SVG."""
    import matplotlib.pyplot as plt
    fig, out = figure(panels), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fig.savefig(out, format="svg", metadata={"Date": None})
    plt.close(fig)
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{b64encode(out.getvalue()).decode()}">'


def page(tables, figures, legend, notes, title, summary):
    """The text of one self-contained page. tables: (title, headers, rows). figures: (title, panels). legend, notes: lines."""
    listed = lambda lines: "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"
    body = [f"<h2>{html.escape(name)}</h2>{inline(panels, name)}" for name, panels in figures if panels]
    for name, headers, rows in sorted(tables, key=lambda t: t[0].startswith("Arms")):  # contrasts first: they are what is asked
        body.append(f"<h2>{html.escape(name)}</h2>{html_table(headers, rows)}")
    body.append(f"<h2>How to read this</h2>{listed(legend)}")
    if notes:
        body.append(f"<h2>Left out, and remarks</h2>{listed(notes)}")
    return PAGE.format(title=html.escape(title), summary=html.escape(summary), style=STYLE, script=SORT, body="\n".join(body))
