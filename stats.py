"""Paired contrasts from result files: is the difference between two arms more than seed noise?

    python stats.py results/*.json                                     arms, and every arm against the reference arm
    python stats.py results/*.json --contrast "12 - 10" --dod "(12 - 10) - (02 - 00)" --ratio "(11 - 10) / (01 - 00)"
    python stats.py published/oe.json --depth 8 --markdown             Tables 3, 5b, 6 and 8a of the OE paper from its runs alone
    python stats.py results/*.json --power 0.002 --holm --html report.html

Runs are grouped by (script, depth, width, arm); an arm that was run with several configs is shown as one row per config.
Pairing is by seed, never by order. Lower is better for every metric. For n paired differences d:

    mean      sum(d) / n
    sd        sqrt(sum((d - mean)^2) / (n - 1))                              none when n = 1
    interval  mean +- t(1 - alpha/2, n - 1) sd / sqrt(n)                     descriptive: not corrected for many contrasts
    separated the two arms' ranges over the paired seeds do not overlap
    power     P(|T| > t), T non-central t(n - 1, delta sqrt(n) / sd)
    Holm      step-down correction of the paired t-test's p over all contrasts shown

Not a number, diverged, stopped, unpaired or differently budgeted runs are named and left out. Exit code 0: everything was
used; 1: printed, but a file was skipped or a requested contrast has no pair; 2: refused, one line says why.
"""
import dataclasses
import difflib
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from common import ROOT, UserError, add_flags, atomic_path, check_bounds, cli, flag, make_parser
from records import clean, default_metrics, expand, make_cells, number, read_all, show, size, usable, varying
import report

PUBLISHED = ROOT / "published"
REFERENCES = ("00_dense_native", "modern", "native", "backprop", "baseline")
CAPACITY = 0.005   # relative difference in parameters above which a contrast is marked
POWER = 0.8
MOST_SEEDS = 10**6


@dataclass(frozen=True)
class Flags:
    """The options of stats.py."""
    ref: str = flag("", "reference arm of the default contrasts (default: the native or modern arm present)")
    metric: str = flag("", "metric, or several with commas (default: the one that most runs of a group have)")
    depth: Optional[int] = flag(None, "only runs of this depth")
    alpha: float = flag(0.05, "1 - coverage of the intervals, between 0 and 1")
    power: Optional[float] = flag(None, "difference to plan for: seeds needed to detect it at 80 % power, from the paired sd")
    holm: bool = flag(False, "add p-values of the paired t-test, Holm-corrected over the contrasts shown")
    published: bool = flag(False, "add the published value of the same arm or contrast beside each row")
    mixed: bool = flag(False, "compare across sizes, scripts, step counts, token budgets and corpora anyway, marked 'mixed'")
    list: bool = flag(False, "print the arms with the short names that --contrast takes, then stop")
    csv: bool = flag(False, "print one CSV table of arms and contrasts")
    markdown: bool = flag(False, "print Markdown tables")
    json: bool = flag(False, "print one JSON object with arms and contrasts")
    plot: str = flag("", "write a forest plot (png, svg or pdf)")
    html: str = flag("", "write one self-contained page with tables and figures")
    curves: bool = flag(False, "add the loss curves to --plot and --html")


# ---- arms ----

def mark_brackets(cells, metric):
    """Mark the best arm of every learning-rate bracket (same arm, configs that differ in one rate) when it lies at an edge.

    A run that failed counts as worse than any value: it does close the bracket on its side.
    """
    brackets = {}
    for cell in cells:
        for key, rate in cell.setting.items():
            if ("lr" in key or "learning_rate" in key) and number(rate) is not None:
                rest = tuple((k, show(v)) for k, v in cell.setting.items() if k != key)
                brackets.setdefault((cell.group, cell.base, key, rest), []).append((number(rate), cell))
    for (*_, key, _), points in brackets.items():
        points = [c for _, c in sorted(points, key=lambda p: p[0])]
        common = set.intersection(*[set(c.values[metric]) for c in points if c.values[metric]] or [set()])
        score = [mean([c.values[metric][s] for s in sorted(common) or c.values[metric]]) if c.values[metric]
                 else (c.printed[metric].mean if metric in c.printed else None) for c in points]
        if len(points) > 1 and any(v is not None for v in score):
            best = min(range(len(points)), key=lambda i: math.inf if score[i] is None else score[i])
            if best in (0, len(points) - 1):
                points[best].marks.append((metric, f"{key}: edge of bracket: extend before reading"))


def arm_rows(cells, metric, notes):
    """One dict per arm: arm, depth, n, mean, sd (n - 1), per_seed {seed: value}, script, width, metric, params, printed, marks.

    Printed values whose seeds are not named give n, mean and sd, but nothing to pair.
    """
    rows = []
    for c in cells:
        per_seed, printed = usable(c, metric, notes), c.printed.get(metric)
        values = list(per_seed.values()) or list(printed.loose if printed else ())
        rows.append({"arm": c.arm, "depth": c.depth, "n": len(values), "mean": mean(values) if values else None, "sd": deviation(values),
                     "per_seed": per_seed, "script": c.script, "width": c.width, "metric": metric, "params": c.params,
                     "printed": report.printed_text(printed) if printed else None, "base": c.base,
                     "marks": [text for m, text in c.marks if m == metric]})
    return rows


# ---- names and requests ----

def matches(name, cells, names):
    """The cells a name may mean: its label, its arm, a published short name, a prefix up to a '_' or the like, any prefix."""
    aliased = names.get(name, ())
    tests = (lambda c: c.arm == name, lambda c: c.base == name, lambda c: c.base in aliased,
             lambda c: re.match(re.escape(name) + r"(?![a-zA-Z0-9])", c.arm), lambda c: c.arm.startswith(name))
    return next((found for test in tests if name and (found := [c for c in cells if test(c)])), [])


def pick(name, cells, names):
    """The one cell a name means among these, None when it fits none; 'arm@d8' keeps one size. UserError when it fits several."""
    arm, _, where = name.rpartition("@")
    if arm and where and not any(name in (c.arm, c.base) for c in cells):
        cells, name = [c for c in cells if where in size(c.group).split() or where == size(c.group)], arm
    found = matches(name, cells, names)
    if len(found) > 1:
        listed = ", ".join(c.arm if len({f.group for f in found}) == 1 else f"{c.arm} ({size(c.group)})" for c in found[:8])
        raise UserError(f"'{name}' may mean {listed}{', ...' if len(found) > 8 else ''}; write more of the name"
                        + ("" if len({f.group for f in found}) == 1 else ", or arm@d8 for one size"))
    return found[0] if found else None


def cut(text, sep):
    """Every (left, right) that cutting text at one occurrence of sep gives: arm names may hold the separator themselves."""
    return [(text[:m.start()].strip(), text[m.end():].strip()) for m in re.finditer(re.escape(sep), text)]


def readings(kind, text):
    """Every way to read a request as ((sign, name), ...). UserError when it has not the form that kind asks for."""
    text = " ".join(text.replace("−", "-").split())
    if kind == "contrast":
        found = [((1, a), (-1, b)) for a, b in cut(text, " - ")]
    else:
        halves = cut(text, ") - (" if kind == "dod" else ") / (") if text.startswith("(") and text.endswith(")") else []
        found = [((1, a), (-1, b), (-1, c), (1, d)) for left, right in halves
                 for a, b in cut(left[1:], " - ") for c, d in cut(right[:-1], " - ")]
    if not found:
        form = {"contrast": "A - B", "dod": "(A - B) - (C - D)", "ratio": "(A - B) / (C - D)"}[kind]
        raise UserError(f"--{kind} '{clean(text)}': write \"{form}\", with spaces around the signs; --list shows the names")
    return found


def locate(found, cells, names):
    """[((sign, Cell), ...)] for the first reading all of whose names exist, None when there is none."""
    for reading in found:
        terms = [(sign, pick(name, cells, names)) for sign, name in reading]
        if all(c is not None for _, c in terms):
            return tuple(terms)
    return None


def request(kind, text, cells, names, mixed):
    """[{kind, name, terms}] of one --contrast, --dod or --ratio: one per group that has all its arms. UserError with what to type."""
    found, groups = readings(kind, text), {c.group: None for c in cells}
    hits = [t for g in groups if (t := locate(found, [c for c in cells if c.group == g], names))]
    if not hits and (terms := locate(found, cells, names)):
        if not mixed:
            where = "; ".join(dict.fromkeys(f"{c.arm} is in {size(c.group)}" for _, c in terms))
            raise UserError(f"--{kind} '{clean(text)}' crosses groups ({where}); --mixed compares them anyway")
        hits = [terms]
    if not hits:
        unknown = next(name for _, name in found[0] if pick(name, cells, names) is None)
        near = difflib.get_close_matches(unknown, [c.arm for c in cells] + list(names), 3, 0.5)
        near = f"; near: {', '.join(near)}" if near else ""
        raise UserError(f"--{kind} '{clean(text)}': no arm '{clean(unknown)}'{near}; --list shows the names")
    for terms in hits:
        arms = [c for _, c in terms]
        if any(a is b for a, b in zip(arms[::2], arms[1::2])) or arms[:2] == arms[2:]:
            raise UserError(f"--{kind} '{clean(text)}' compares an arm with itself; name two arms")
    return [{"kind": kind, "name": " ".join(clean(text).split()), "terms": t} for t in hits]


def as_list(cells, names):
    """The arms of every group with the short names that pick them."""
    lines = []
    for group in dict.fromkeys(c.group for c in cells):
        inside = [c for c in cells if c.group == group]
        table = []
        for c in inside:
            parts = re.split(r"(?<=[a-zA-Z0-9])(?=[^a-zA-Z0-9])", c.arm)
            tries = [n for n in names if c.base in names[n]] + ["".join(parts[:i]) for i in range(1, len(parts))]
            short = [n for n in dict.fromkeys(tries) if n.count("[") == n.count("]") and matches(n, inside, names) == [c]]
            table.append([c.arm, ", ".join(short[:3]) or "-", " ".join(map(str, sorted(c.runs))) or "-",
                          ", ".join(dict.fromkeys(m for r in c.runs.values() for m in r.metrics) or c.printed)])
        lines += [f"{size(group)}", report.as_text(["arm", "short names", "seeds", "metrics"], table, False), ""]
    return "\n".join(lines)


# ---- statistics ----

def mean(values):
    """The mean of at least one number, summed exactly."""
    return math.fsum(values) / len(values)


def deviation(values):
    """Standard deviation with n - 1; None for fewer than two values. Rounding noise of equal values is 0."""
    if len(values) < 2:
        return None
    center = mean(values)
    sd = math.sqrt(math.fsum((v - center) ** 2 for v in values) / (len(values) - 1))
    return 0.0 if sd < 1e-12 * max(1e-3, *map(abs, values)) else sd


def interval(values, alpha):
    """(low, high) of the t interval at coverage 1 - alpha; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit
    half = float(stdtrit(len(values) - 1, 1 - alpha / 2)) * deviation(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def p_value(values):
    """Two-sided p of the paired t-test that the mean is 0; None where n < 2 or all values are equal."""
    if not (sd := deviation(values)):
        return None
    from scipy.special import stdtr
    return float(2 * stdtr(len(values) - 1, -abs(mean(values)) / sd * math.sqrt(len(values))))


def holm(ps):
    """Holm's step-down adjusted p-values in the given order; None stays None and does not count."""
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    adjusted, worst = [None] * len(ps), 0.0
    for k, i in enumerate(order):
        worst = max(worst, min(1.0, ps[i] * (len(order) - k)))
        adjusted[i] = worst
    return adjusted


def power(n, effect, alpha):
    """Power of the two-sided paired t-test at n pairs for a true mean of `effect` standard deviations; NaN where scipy has none."""
    from scipy.special import nctdtr, stdtrit
    t, shift = float(stdtrit(n - 1, 1 - alpha / 2)), effect * math.sqrt(n)
    below, far = (float(nctdtr(n - 1, shift, x)) for x in (t, -t))
    if math.isnan(below) and shift > t + 10 * math.sqrt(1 + t * t / (2 * n - 2)):  # scipy gives NaN where a tail underflows: it is 0
        below = 0.0
    return 1 - below + (0.0 if math.isnan(far) else far)


def seeds_needed(delta, sd, alpha):
    """Smallest n with at least 80 % power to detect a mean of delta at this paired sd; None beyond a million."""
    if sd == 0:
        return 2
    enough = lambda n: power(n, delta / sd, alpha) >= POWER
    high = 2
    while not enough(high):
        high *= 2
        if high > MOST_SEEDS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def detectable(n, sd, alpha):
    """Smallest true mean that n pairs with this sd detect at 80 % power; None where it cannot be computed."""
    low, high = 0.0, 1.0
    while (reached := power(n, high, alpha)) < POWER and high < 1e6:
        high *= 2
    if math.isnan(reached) or reached < POWER:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if power(n, middle, alpha) >= POWER else (middle, high)
    return high * sd


# ---- contrasts ----

def paired(terms, metric, mixed, notes):
    """({seed: [value of each term]}, [reasons for seeds left out], whether budgets were mixed): seeds that all terms have."""
    values = [usable(c, metric, notes) for _, c in terms]
    pairs, reasons, mixes = {}, [], len({c.group for _, c in terms}) > 1
    for seed in sorted(set().union(*values)):
        lacking = dict.fromkeys(c.arm for v, (_, c) in zip(values, terms) if seed not in v)
        budgets = [c.runs[seed].budget for _, c in terms] if not lacking else []
        clash = [k for k in dict.fromkeys(k for b in budgets for k in b) if len({b.get(k) for b in budgets} - {None}) > 1]
        if lacking:
            reasons.append(f"seed {seed} unpaired (not in {', '.join(lacking)})")
        elif clash and not mixed:
            told = "; ".join(f"{k} {', '.join(show(b.get(k)) for b in budgets)}" for k in clash)
            reasons.append(f"seed {seed}: mixed {told} (--mixed pairs them)")
        else:
            mixes |= bool(clash)
            pairs[seed] = [v[seed] for v in values]
    return pairs, reasons, mixes


def separated(pairs, terms, metric):
    """Whether the ranges of two arms over the paired seeds are disjoint; from printed ranges without pairs; None if unknown."""
    if len(terms) != 2 or len(pairs) == 1:
        return None
    if pairs:
        (alow, ahigh), (blow, bhigh) = [(min(v), max(v)) for v in zip(*pairs.values())]
    else:
        a, b = (c.printed.get(metric) for _, c in terms)
        alow, ahigh, blow, bhigh = [None if p is None else x for p in (a, b) for x in ((p.low, p.high) if p else (None, None))]
    known = lambda *ends: None not in ends
    if known(ahigh, blow) and ahigh < blow or known(bhigh, alow) and bhigh < alow:
        return True
    return False if known(alow, ahigh, blow, bhigh) or known(ahigh, blow, bhigh, alow) else None


def contrast_marks(terms, metric, mixes):
    """Warnings of a contrast: capacity, mixed budgets, a rate at the edge of its bracket."""
    marks = ["mixed"] if mixes else []
    sides = [(a.params, b.params) for (_, a), (_, b) in zip(terms[::2], terms[1::2])]
    if any(a and b and abs(a - b) > CAPACITY * max(a, b) for a, b in sides):
        marks.append("capacity")
    return marks + list(dict.fromkeys(f"{c.arm}: {text}" for _, c in terms for m, text in c.marks if m == metric))


def make_row(item, metric, args, notes):
    """The row (dict) of one contrast, difference of differences or ratio in one metric; see columns() for what it holds."""
    terms = item["terms"]
    pairs, reasons, mixes = paired(terms, metric, args.mixed, notes)
    first = terms[0][1]
    row = {"kind": item["kind"], "name": item["name"], "metric": metric, "script": first.script, "depth": first.depth,
           "width": first.width, "terms": [[s, c.arm] for s, c in terms], "table": item.get("table"), "row": item.get("row"),
           "label": item.get("label"), "separated": separated(pairs, terms, metric), "marks": contrast_marks(terms, metric, mixes),
           "n": len(pairs), "mean": None, "sd": None, "ci": None, "ci95": None, "improved": None, "bases": [(s, c.base) for s, c in terms]}
    if reasons:
        row["marks"].append("seeds left out")
        notes.append(f"left out of {item['name']} ({size(first.group)}): {'; '.join(reasons)}")
    if item["kind"] == "ratio":
        tops, bottoms = {s: v[0] - v[1] for s, v in pairs.items()}, {s: v[2] - v[3] for s, v in pairs.items()}
        row["per_seed"] = {s: tops[s] / bottoms[s] if bottoms[s] else None for s in pairs}
        if pairs and mean(list(bottoms.values())):
            row["mean"] = mean(list(tops.values())) / mean(list(bottoms.values()))
        ends = interval(list(bottoms.values()), args.alpha)
        if ends is None or ends[0] <= 0 <= ends[1]:
            row["marks"].append("denominator not separated from 0")
        return row
    row["per_seed"] = {seed: math.fsum(s * v for (s, _), v in zip(terms, vs)) for seed, vs in pairs.items()}
    deltas = list(row["per_seed"].values())
    if deltas:
        row.update(mean=mean(deltas), sd=deviation(deltas), ci=interval(deltas, args.alpha), ci95=interval(deltas, 0.05),
                   improved=sum(d < 0 for d in deltas))
        row["marks"] += ["sd 0: are the runs copies?"] if row["sd"] == 0 else []
    elif not all(c.runs for _, c in terms) and all(c.printed.get(metric) and c.printed[metric].mean is not None for _, c in terms):
        row.update(mean=math.fsum(s * c.printed[metric].mean for s, c in terms))
        row["marks"].append("unpaired: printed means")
    return row


def add_planning(rows, args):
    """Add what --power and --holm ask for to the rows of contrasts."""
    rows = [r for r in rows if r["kind"] != "ratio"]
    for row in rows:
        planned = args.power is not None and row["sd"] is not None
        row["seeds_needed"] = seeds_needed(args.power, row["sd"], args.alpha) if planned else None
        row["detectable"] = detectable(row["n"], row["sd"], args.alpha) if planned else None
        row["p"] = p_value(list(row["per_seed"].values())) if args.holm else None
    for row, p in zip(rows, holm([r["p"] for r in rows])):
        row["p_holm"] = p


def reference(cells, wanted, notes):
    """The reference cell of a group, None when --ref names an arm it lacks. A default one is announced in notes."""
    if wanted:
        return wanted(cells)
    live = [c for c in cells if c.runs or c.printed]
    exact = [c for r in REFERENCES for c in live if c.base == r]
    words = [c for r in REFERENCES for c in live if r in re.split(r"[^a-z]+", c.base.lower())]
    found = exact or words or live
    same = [c for c in found if c.base == found[0].base]
    best = max(same, key=lambda c: len(c.runs))
    if len(cells) > 1 and not exact:
        notes.append(f"reference of {size(best.group)}: {best.arm} ({'by its name' if words else 'first by name'}); choose with --ref")
    elif len(same) > 1:
        notes.append(f"reference of {size(best.group)}: {best.base}, for every arm in the one of {len(same)} configs nearest its own; choose with --ref")
    return best


def nearest(cell, refs):
    """The cell of refs whose config differs from the cell's in the fewest keys, so that a contrast changes little besides the arm."""
    config = lambda c: next((r.config for r in c.runs.values()), c.setting)
    return min(refs, key=lambda r: len(varying([config(cell), config(r)])))   # ties: the first


def planned_items(plan, cells, args, notes):
    """[{kind, name, terms, ...}] of the contrasts a paper prints whose arms are among the cells."""
    items = []
    for item in plan:
        near = [c for c in cells if c.script == item["script"] and item["depth"] in (None, c.depth)]
        arms = [[c for c in near if c.base == arm and (not config or any(p.config == config[0] for p in c.printed.values()))]
                for _, arm, *config in item["terms"]]
        if any(len(found) != 1 for found in arms):
            continue
        terms = tuple((term[0], found[0]) for term, found in zip(item["terms"], arms))
        if len({c.group for _, c in terms}) > 1 and not args.mixed:
            notes.append(f"left out: {item['label']}: its arms differ in size; --mixed compares them anyway")
            continue
        items.append({**item, "kind": "contrast" if len(terms) == 2 else "dod", "terms": terms})
    return items


# ---- published values beside ----

def published_context():
    """(cells, plan) of the published tables."""
    batch, skipped = read_all(sorted(PUBLISHED.glob("*.json")))
    if not batch.runs:
        raise UserError(f"--published: {PUBLISHED} holds no published tables" + (f" ({skipped[0]})" if skipped else ""))
    return make_cells(batch, []), batch.plan


def add_published(arms, rows, args):
    """Give rows the published value of the same arm or contrast in the same metric: same depth first, else every depth, labelled."""
    cells, plan = published_context()
    items = planned_items(plan, cells, dataclasses.replace(args, mixed=True), [])

    def beside(row, found):
        same = [text for depth, text in found if depth == row["depth"]]
        row["published"] = "; ".join(same or dict.fromkeys(f"d{d}: {t}" if d else t for d, t in found)) or None

    for row in [r for r in arms if not r["printed"]]:
        named = [c for c in cells if c.base == row["base"] and row["metric"] in c.printed]
        beside(row, [(c.depth, report.printed_text(c.printed[row["metric"]])) for c in named])
    for row in [r for r in rows if r["kind"] != "ratio"]:
        same = [i for i in items if [(s, c.base) for s, c in i["terms"]] == row["bases"] and row["metric"] in i["printed"]]
        found = [(i["depth"], report.printed_contrast(i, row["metric"])) for i in same]
        beside(row, [f for f in found if f[1]] or recomputed(row, cells, args))


def recomputed(row, cells, args):
    """[(depth, text)] of a contrast that no table prints, from the published values of its arms' seeds."""
    found = []
    for group in dict.fromkeys(c.group for c in cells):
        terms = [(s, [c for c in cells if c.group == group and c.base == base and c.runs]) for s, base in row["bases"]]
        if all(len(named) == 1 for _, named in terms):
            item = {"kind": row["kind"], "name": row["name"], "terms": tuple((s, named[0]) for s, named in terms)}
            r = make_row(item, row["metric"], args, [])
            if r["mean"] is not None:
                numbers = f"{report.text_of(r['mean'])} ± {report.text_of(r['sd'])} {report.interval_text(r)}"
                found.append((group[1], f"{numbers} (from its seeds)"))
    return found


# ---- command line ----

def parse(argv):
    """(Flags, files, [(kind, text)]) of a command line; UserError for what cannot be asked."""
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="result JSON files, folders of them, published/*.json")
    for kind, form, what in (("contrast", "A - B", "difference of two arms, instead of the default contrasts; may be repeated, as the next two"),
                             ("dod", "(A - B) - (C - D)", "difference of two differences, over the seeds all four arms have"),
                             ("ratio", "(A - B) / (C - D)", "ratio of two mean differences; descriptive, no interval")):
        parser.add_argument(f"--{kind}", action="append", metavar=f'"{form}"', help=what)
    add_flags(parser, Flags)
    given = vars(parser.parse_args(argv))
    files, asked = given.pop("files"), [(k, t) for k in ("contrast", "dod", "ratio") for t in given.pop(k, [])]
    args = Flags(**given)
    check_bounds(args)
    if not 0 < args.alpha < 1:
        raise UserError(f"--alpha {args.alpha:g}: give a number between 0 and 1, such as 0.05")
    if args.power is not None and args.power <= 0:
        raise UserError(f"--power {args.power:g}: give the difference to detect, a positive number")
    if sum((args.csv, args.markdown, args.json)) > 1:
        raise UserError("--csv, --markdown and --json all print to the terminal; choose one")
    if args.list and (args.csv or args.markdown or args.json or args.plot or args.html or asked):
        raise UserError("--list prints names and nothing else; leave the other outputs away")
    if args.curves and not (args.plot or args.html):
        raise UserError("--curves draws into --plot or --html; name one of them")
    return args, files, asked


def check_outputs(args, paths):
    """UserError when an output has an unknown ending or would overwrite an input or the other output."""
    if args.plot and Path(args.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {args.plot}: name a .png, .svg or .pdf file")
    taken = {p.resolve(): "an input file" for p in paths}
    for name, value in (("--plot", args.plot), ("--html", args.html)):
        if value:
            where = Path(value).resolve()
            if where in taken or where.is_dir():
                raise UserError(f"{name} {value} is {taken.get(where, 'a folder')}; name another file")
            taken[where] = f"the file of {name}"


def cells_of(batch, args, notes):
    """The arms of --depth, or all of them. UserError when there are none."""
    if args.depth is not None:
        depths = sorted({x.depth for x in [*batch.runs, *batch.printed] if x.depth is not None})
        if args.depth not in depths:
            raise UserError(f"--depth {args.depth}: no such runs; depths here: {', '.join(map(str, depths)) or 'none'}")
        batch = dataclasses.replace(batch, runs=[r for r in batch.runs if r.depth == args.depth],
                                    printed=[p for p in batch.printed if p.depth == args.depth])
    return make_cells(batch, notes)


def collect(batch, args, asked, notes):
    """(cells, arm rows, contrast rows) of what was read and asked for."""
    cells = cells_of(batch, args, notes)
    wanted = [m.strip() for m in args.metric.split(",") if m.strip()]
    known = {m for c in cells for r in c.runs.values() for m, v in r.metrics.items() if number(v) is not None}
    known |= {m for c in cells for m in c.printed}
    for metric in wanted:
        if metric not in known:
            raise UserError(f"--metric {metric}: no run has it; these exist: {', '.join(sorted(map(clean, known))) or 'none'}")
    groups = {g: [c for c in cells if c.group == g] for g in dict.fromkeys(c.group for c in cells)}
    metrics = {g: wanted or default_metrics(inside, batch.plan) for g, inside in groups.items()}
    arms = []
    for group, inside in groups.items():
        for metric in metrics[group]:
            for cell in inside:
                usable(cell, metric, notes)
            mark_brackets(inside, metric)
            arms += arm_rows(inside, metric, notes)
    items = [item for kind, text in asked for item in request(kind, text, cells, batch.names, args.mixed)] \
        or default_items(batch, cells, groups, args, notes)
    rows = [make_row(item, metric, args, notes) for item in items
            for metric in wanted or item.get("printed") or metrics[item["terms"][0][1].group]]
    return cells, arms, rows


def default_items(batch, cells, groups, args, notes):
    """The contrasts shown when none is asked for: those a paper prints for its own arms, else every arm against the reference."""
    planned = [] if args.ref else planned_items(batch.plan, cells, args, notes)
    items, scripts = list(planned), {i["script"] for i in planned}
    wanted = (lambda inside: pick(args.ref, inside, batch.names)) if args.ref else None
    for group, inside in groups.items():
        if group[0] in scripts:
            continue
        ref = reference(inside, wanted, notes)
        if ref is None:
            notes.append(f"no arm {args.ref} in {size(group)}: no contrasts there")
            continue
        refs = [ref] if args.ref else [ref] + [c for c in inside if c.base == ref.base and c is not ref]
        pairs = [(c, ref if c.base == ref.base else nearest(c, refs)) for c in inside if c is not ref]
        items += [{"kind": "contrast", "name": f"{c.arm} - {r.arm}", "terms": ((1, c), (-1, r))} for c, r in pairs]
    if args.ref and not items and not any(pick(args.ref, inside, batch.names) for inside in groups.values()):
        raise UserError(f"--ref {args.ref}: no such arm; --list shows the names")
    return items


def show_results(args, cells, arms, rows, notes, skipped, files):
    """Print and write everything that was asked for."""
    legend, tables = report.legend_lines(args, rows), report.sections(arms, rows, args)
    figures = [("Contrasts", report.forest_panels(rows, args.alpha))]
    if args.curves:
        figures.append(("Loss curves", report.curve_panels(cells)))
    drawable = sum(r["kind"] != "ratio" and r["mean"] is not None for r in rows)
    if (args.plot or args.html) and drawable > report.MOST_DRAWN:
        notes.append(f"the figure shows the first {report.MOST_DRAWN} of {drawable} contrasts; choose with --contrast, --metric or --depth")
    if args.curves and not figures[1][1]:
        raise UserError("--curves: none of these files has a loss curve; leave it away")
    if args.plot:
        if not (panels := [p for _, ps in figures for p in ps]):
            raise UserError("--plot: there is no contrast to draw; see the printed notes for what was left out")
        report.save_figure(args.plot, panels)
    if args.html:
        title = "Paired contrasts: " + ", ".join(dict.fromkeys(size(c.group) for c in cells))
        summary = f"{len(cells)} arms and {len(rows)} contrasts from {files} file{'s' * (files > 1)}."
        text = report.page(tables, figures, legend, skipped + notes, title, summary)
        with atomic_path(args.html) as tmp:
            tmp.write_text(text, encoding="utf-8")
    if args.csv:
        print(report.as_csv(arms, rows), end="")
    elif args.json:
        print(report.as_json(arms, rows, args, notes, skipped))
    else:
        for title, headers, lines in tables:
            print(f"### {title}\n" if args.markdown else title)
            print(report.as_text(headers, lines, args.markdown) + "\n")
        print("\n".join(f"{'- ' if args.markdown else ''}{line}" for line in (legend if rows else []) + notes))
    if args.csv or args.json:
        print("\n".join(notes), end="\n" if notes else "", file=sys.stderr)


def main(argv=None):
    """Exit code of the command line `argv` (default: sys.argv); see the top of this file."""
    args, names, asked = parse(argv)
    paths = expand(names)
    check_outputs(args, paths)
    batch, skipped = read_all(paths)
    for line in skipped:
        print(line, file=sys.stderr)
    if not batch.runs and not batch.printed:
        raise UserError(f"no result in {len(paths)} file{'s' * (len(paths) > 1)}; name JSON files that a training script wrote")
    notes = []
    if args.list:
        print(as_list(cells_of(batch, args, notes), batch.names))
        return 1 if skipped else 0
    cells, arms, rows = collect(batch, args, asked, notes)
    if not any(r["n"] or r["printed"] for r in arms):
        print("\n".join(notes), file=sys.stderr)
        raise UserError("every run was left out (see the lines above); there is nothing to average")
    if args.power is not None or args.holm:
        add_planning(rows, args)
    if args.published:
        add_published(arms, rows, args)
    show_results(args, cells, arms, rows, notes, skipped, len(paths))
    return 1 if skipped or asked and any(r["mean"] is None for r in rows) else 0


if __name__ == "__main__":
    cli(main)
