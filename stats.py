"""Paired contrasts from result files: is the difference between two arms more than seed noise?

    python stats.py results/*.json                    arms, and each against the reference arm
    python stats.py results/*.json --contrast "12 - 10" --dod "(12 - 10) - (02 - 00)"
    python stats.py results/*.json --ratio "(11 - 10) / (01 - 00)" --power 0.002 --holm
    python stats.py published/oe.json --depth 8 --markdown     the OE paper's tables, recomputed
    python stats.py results/*.json --html report.html

Runs are one arm when script, arm and changed flags are equal; the arms of a copied script bear its
name (train_mine/00_dense_native). Runs compare inside a group of equal depth, width, steps, tokens
and corpus, whichever script made them. Pairing is by seed, never by order. Lower is better. For n
paired differences d:

    mean      sum(d) / n
    sd        sqrt(sum((d - mean)^2) / (n - 1))                none when n = 1
    interval  mean +- t(1 - alpha/2, n - 1) sd / sqrt(n)       not corrected for many contrasts
    separated the two arms' ranges over the paired seeds do not overlap
    power     P(|T| > t), T non-central t(n - 1, delta sqrt(n) / sd)
    Holm      step-down correction of the paired t-test's p over all contrasts shown

Runs without a finite score and unpaired seeds are named and left out. A diverged seed is left out
of means and intervals, and worse than any value where ranges or learning rates are compared.

A name is an arm's whole name, a short name of the paper's tables, or a leading number that one
arm has (12 for 12_oe_joint); arm@d8 or arm@w256 keeps one group.

Exit code 0: everything was used; 1: printed, but a file was skipped or a requested contrast has no
pair; 2: refused, one line says why.
"""
import difflib
import math
import re
import sys
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import report
from common import (UserError, add_flags, atomic_path, check_bounds, cli, flag, make_parser,
                    published)
from records import (ALIKE, Batch, batch_of, changed_sources, clean, default_metrics, expand,
                     known_metrics, make_arms, number, read_all, show, usable, varying)
from report import Row

REFERENCES = ("00_dense_native", "modern", "native", "backprop", "baseline")
CAPACITY = 0.005   # relative difference in parameters above which a contrast is marked
POWER = 0.8
MOST_SEEDS = 10**6
EDGE = "edge of bracket: extend before reading"
FORMS = {"contrast": "A - B", "dod": "(A - B) - (C - D)", "ratio": "(A - B) / (C - D)"}
ASKS = {"contrast": "difference of two arms, instead of the default contrasts; may be repeated",
        "dod": "difference of two differences, over the seeds that all four arms have",
        "ratio": "ratio of two mean differences; descriptive, without an interval"}
# what pairs must agree in, where both runs say


@dataclass(frozen=True)
class Flags:
    """The options of stats.py."""
    ref: str = flag("", "reference arm (default: the native or modern arm present)")
    metric: str = flag("", "metrics, with commas (default: the one that most runs of a group have)")
    depth: Optional[int] = flag(None, "only runs of this depth")
    alpha: float = flag(0.05, "1 - coverage of the intervals, between 0 and 1", low=1e-6, high=0.999)
    power: Optional[float] = flag(None, "add the seeds needed to detect this difference at 80 % power", low=1e-9)
    holm: bool = flag(False, "add p-values of the paired t-test, Holm-corrected over the contrasts shown")
    published: bool = flag(False, "add the published value of the same arm or contrast beside each row")
    mixed: bool = flag(False, "let a contrast cross sizes, budgets and corpora, marked 'mixed'")
    list: bool = flag(False, "print the arms with the short names that --contrast takes, then stop")
    csv: bool = flag(False, "print one CSV table of arms and contrasts")
    markdown: bool = flag(False, "print Markdown tables")
    json: bool = flag(False, "print one JSON object with arms and contrasts")
    plot: str = flag("", "write a forest plot (png, svg or pdf)")
    html: str = flag("", "write one self-contained page with tables and figures")
    curves: bool = flag(False, "add the loss curves to --plot and --html")


# ---- statistics ----

def mean(values):
    """The mean of at least one number, summed exactly."""
    return math.fsum(values) / len(values)


def deviation(values):
    """Standard deviation with n - 1; None for fewer than two values, 0 for rounding noise."""
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
    t = float(stdtrit(len(values) - 1, 1 - alpha / 2))
    half = t * deviation(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def p_value(values):
    """Two-sided p of the paired t-test that the mean is 0; None where n < 2 or all are equal."""
    sd = deviation(values)
    if not sd:
        return None
    from scipy.special import stdtr
    return float(2 * stdtr(len(values) - 1, -abs(mean(values)) / sd * math.sqrt(len(values))))


def holm(ps):
    """Holm's step-down adjusted p-values in the given order; None stays None, uncounted."""
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])
    adjusted, worst = [None] * len(ps), 0.0
    for k, i in enumerate(order):
        worst = max(worst, min(1.0, ps[i] * (len(order) - k)))
        adjusted[i] = worst
    return adjusted


def power(n, effect, alpha):
    """Power of the two-sided paired t-test at n pairs for a true mean of `effect` sds.

    NaN where scipy has none.
    """
    from scipy.special import nctdtr, stdtrit
    t, shift = float(stdtrit(n - 1, 1 - alpha / 2)), effect * math.sqrt(n)
    below, far = (float(nctdtr(n - 1, shift, x)) for x in (t, -t))
    # scipy gives NaN where a tail underflows: it is 0
    if math.isnan(below) and shift > t + 10 * math.sqrt(1 + t * t / (2 * n - 2)):
        below = 0.0
    return 1 - below + (0.0 if math.isnan(far) else far)


def seeds_needed(delta, sd, alpha):
    """Smallest n with 80 % power to detect a mean of delta at this sd; None beyond a million."""
    if sd == 0:
        return 2

    def reached(n):
        return power(n, delta / sd, alpha) >= POWER
    n = bisect_left(range(MOST_SEEDS + 1), True, lo=2, key=reached)
    return n if n <= MOST_SEEDS else None


def detectable(n, sd, alpha):
    """Smallest true mean that n pairs with this sd detect at 80 % power; None if beyond scipy."""
    low, high = 0.0, 1.0
    while power(n, high, alpha) < POWER and high < 1e6:
        high *= 2
    if not power(n, high, alpha) >= POWER:   # NaN too
        return None
    for _ in range(60):
        middle = (low + high) / 2
        if power(n, middle, alpha) >= POWER:
            high = middle
        else:
            low = middle
    return high * sd


def separated(a, b):
    """Do the ranges of two lists of values not overlap? None with fewer than two in either.

    A diverged seed is math.inf: worse than any value.
    """
    if min(len(a), len(b)) < 2:
        return None
    return max(a) < min(b) or max(b) < min(a)


def differ_in_size(a, b):
    """Do two parameter counts differ by more than CAPACITY? False where one is unknown."""
    return bool(a and b) and abs(a - b) > CAPACITY * max(a, b)


def edge_of(points):
    """The best rate of a bracket when it is its lowest or highest, else None.

    points: {rate: {seed: value}}, compared over the seeds that all rates have. A rate at which
    one of them diverged (math.inf) is worse than any other: it closes the bracket on its side.
    """
    points = {rate: values for rate, values in points.items() if values}
    if len(points) < 2:
        return None
    shared = set.intersection(*[set(values) for values in points.values()])
    score = {}
    for rate, values in points.items():
        score[rate] = mean([v for seed, v in values.items() if seed in shared or not shared])
    best = min(sorted(score), key=score.get)
    is_edge = best in (min(score), max(score)) and score[best] < math.inf
    return best if is_edge else None


# ---- arms ----

def with_diverged(arm, metric):
    """{seed: value} of an arm whose usable() was called; infinity for its diverged seeds."""
    return {**arm.values[metric], **dict.fromkeys(arm.diverged, math.inf)}


def mark_brackets(arms, metric):
    """Mark the best arm of every bracket (settings that differ in one rate) at its edge."""
    for key in sorted({k for arm in arms for k in arm.setting if "lr" in k}):
        brackets = {}
        for arm in arms:
            rest = sorted((k, show(v)) for k, v in arm.setting.items() if k != key)
            family = next((p.family for p in arm.printed.values()), "")
            bracket = brackets.setdefault((arm.script, family, *rest), [])
            rate = number(arm.config.get(key))
            bracket += [] if rate is None else [(rate, arm)]
        for bracket in brackets.values():
            points = {}
            for rate, arm in bracket:
                points.setdefault(rate, {}).update(bracket_values(arm, metric))
            best = edge_of(points)
            for rate, arm in bracket:
                arm.marks += [(metric, f"{key}: {EDGE}")] if rate == best else []


def bracket_values(arm, metric):
    """{seed: value} of an arm; a printed mean stands for seeds that are not named."""
    printed = arm.printed.get(metric)
    if not arm.runs and printed and printed.mean is not None:
        return {"printed": printed.mean}
    return with_diverged(arm, metric)


def arm_row(arm, metric):
    """The Row of an arm. Values whose seeds are not named give n, mean and sd, but no pairs."""
    per_seed, printed = arm.values[metric], arm.printed.get(metric)
    values = list(per_seed.values()) or list(printed.loose if printed else ())
    return Row("arm", arm.label, metric, arm.group, arm.script, n=len(values),
               mean=mean(values) if values else None, sd=deviation(values), per_seed=per_seed,
               params=arm.params, printed=report.printed_text(printed) if printed else None,
               marks=[text for m, text in arm.marks if m == metric], terms=(arm,))


def groups_of(arms):
    """{group: [its arms]}"""
    groups = {}
    for arm in arms:
        groups.setdefault(arm.group, []).append(arm)
    return groups


# ---- names ----

def named(name, arms, names):
    """The arms a name means: a label, an arm's own name, a paper's short name, a leading number.

    'arm@d8' keeps the groups that have this word.
    """
    start, _, word = name.rpartition("@")
    if start and not any(name in (arm.label, arm.base) for arm in arms):
        arms = [arm for arm in arms if word in str(arm.group).replace(",", "").split()]
        name = start
    own, is_number = [arm for arm in arms if arm.own], re.fullmatch(r"\d+[a-z]*", name)
    ways = ([arm for arm in arms if arm.label == name],
            [arm for arm in own if arm.base == name],
            [arm for arm in own if arm.base in names.get(name, ())],
            [arm for arm in own if is_number and arm.base.startswith(f"{name}_")])
    return next(filter(None, ways), [])


def pick(name, arms, names):
    """The one arm a name means, None when it fits none; UserError when it fits several."""
    found = named(name, arms, names)
    if len(found) > 1:
        listed = ", ".join(dict.fromkeys(arm.label for arm in found[:8]))
        how = "write more of the name, or arm@d8 for one size"
        raise UserError(f"'{clean(name)}' may mean {listed}; {how}")
    return found[0] if found else None


def near(name, arms, names):
    """What the user may have meant, as the end of an error message."""
    known = list(dict.fromkeys([arm.label for arm in arms] + list(names)))
    found = [k for k in known if k.rpartition("/")[2].startswith(name)][:3]
    found += difflib.get_close_matches(name, known, 3, 0.5)
    found = list(dict.fromkeys(found))[:4]
    return (f"; near: {', '.join(found)}" if found else "") + "; --list shows the names"


def request(kind, text, arms, names, mixed):
    """[item] of one --contrast, --dod or --ratio: one for every group that has all its arms."""
    said, form = f"--{kind} '{clean(text)}'", re.sub("[A-D]", "(.+)", re.escape(FORMS[kind]))
    asked = re.fullmatch(form, " ".join(text.replace("−", "-").split()))
    if not asked:
        how = "with spaces around the signs; --list shows the names"
        raise UserError(f"{said}: write \"{FORMS[kind]}\", {how}")
    for name in asked.groups():
        if not named(name, arms, names):
            raise UserError(f"{said}: no arm '{clean(name)}'{near(name, arms, names)}")

    def located(arms):
        return tuple(pick(name, arms, names) for name in asked.groups())
    hits = [located(inside) for inside in groups_of(arms).values()]
    hits = [terms for terms in hits if None not in terms] or [located(arms)]
    where = dict.fromkeys(f"{arm.label} is in {arm.group}" for arm in hits[0])
    if len({arm.group for arm in hits[0]}) > 1 and not mixed:
        raise UserError(f"{said} crosses groups ({'; '.join(where)}); --mixed compares them anyway")
    for a, b, *rest in hits:
        if a is b or rest and (rest[0] is rest[1] or rest == [a, b]):
            raise UserError(f"{said} compares an arm with itself; name two arms")
    return [item_of(kind, terms) for terms in hits]


def item_of(kind, terms):
    """A contrast of these arms, in their whole names."""
    labels = dict(zip("ABCD", (arm.label for arm in terms)))
    name = re.sub("[A-D]", lambda letter: labels[letter[0]], FORMS[kind])
    return {"kind": kind, "name": name, "terms": terms}


def as_list(arms, names):
    """The arms of every group with the short names that pick them."""
    lines = []
    for group, inside in groups_of(arms).items():
        table = []
        for arm in inside:
            tries = [*(n for n in names if arm.base in names[n]), arm.base.partition("_")[0]]
            short = [n for n in dict.fromkeys(tries)
                     if n != arm.label and named(n, inside, names) == [arm]]
            seeds = " ".join(map(str, sorted(arm.runs)))
            metrics = [m for run in arm.runs.values() for m in run.metrics] or arm.printed
            table.append([arm.label, ", ".join(short[:3]) or "-", seeds or "-",
                          ", ".join(dict.fromkeys(metrics))])
        table = report.as_text(["arm", "short names", "seeds", "metrics"], table)
        lines += [str(group), table, ""]
    return "\n".join(lines)


# ---- contrasts ----

def paired(terms, metric, mixed, notes):
    """({seed: [value of each term]}, [why seeds are left out], was something mixed?)."""
    values = [usable(arm, metric, notes) for arm in terms]
    pairs, reasons, mixes = {}, [], len({arm.group for arm in terms}) > 1
    for seed in sorted(set().union(*values)):
        lacking = [arm.label for arm, v in zip(terms, values) if seed not in v]
        if lacking:
            where = ", ".join(dict.fromkeys(lacking))
            reasons.append(f"seed {seed} unpaired (not in {where})")
            continue
        said = {word: [arm.runs[seed].config.get(k) for arm in terms] for k, word in ALIKE.items()}
        clash = [word for word, told in said.items() if len({*told} - {None}) > 1]
        if clash and not mixed:
            told = "; ".join(f"{word} {', '.join(map(show, said[word]))}" for word in clash)
            reasons.append(f"seed {seed}: mixed {told} (--mixed pairs them)")
            continue
        mixes |= bool(clash)
        pairs[seed] = [v[seed] for v in values]
    return pairs, reasons, mixes


def verdict(a, b, metric, pairs):
    """Are the ranges of two arms disjoint, diverged seeds included? None if unknown."""
    if a.runs or b.runs:
        ours, theirs = with_diverged(a, metric), with_diverged(b, metric)
        seeds = [s for s in ours if s in theirs and (s in pairs or s in a.diverged | b.diverged)]
        return separated([ours[s] for s in seeds], [theirs[s] for s in seeds])
    if metric not in a.printed or metric not in b.printed:
        return None
    a, b = a.printed[metric], b.printed[metric]
    known = [ends for ends in ((a.high, b.low), (b.high, a.low)) if None not in ends]
    if any(high < low for high, low in known):
        return True
    return False if len(known) == 2 else None


def contrast_row(item, metric, args, notes):
    """The Row of one contrast, difference of differences or ratio in one metric."""
    terms = item["terms"]
    pairs, reasons, mixes = paired(terms, metric, args.mixed, notes)
    said = {key: item.get(key) for key in ("kind", "name", "terms", "table", "row", "label")}
    row = Row(**said, metric=metric, group=terms[0].group, script=terms[0].script, n=len(pairs),
              marks=["mixed"] if mixes else [])
    if len(terms) == 2:
        row.separated = verdict(*terms, metric, pairs)
    if any(differ_in_size(a.params, b.params) for a, b in zip(terms[::2], terms[1::2])):
        row.marks.append("capacity")
    edges = [(arm.label, text) for arm in terms for m, text in arm.marks if m == metric]
    row.marks += [f"{label}: {text}" for label, text in dict.fromkeys(edges)]
    if reasons:
        row.marks.append("seeds left out")
        notes.append(f"left out of {row.name} ({row.group}): {'; '.join(reasons)}")
    (fill_ratio if row.kind == "ratio" else fill_difference)(row, pairs, args)
    return row


def fill_ratio(row, pairs, args):
    """Put the ratio of two mean differences into a row."""
    tops = [a - b for a, b, *_ in pairs.values()]
    bottoms = [c - d for *_, c, d in pairs.values()]
    row.per_seed = {s: x / y if y else None for s, x, y in zip(pairs, tops, bottoms)}
    if pairs and mean(bottoms):
        row.mean = mean(tops) / mean(bottoms)
    ends = interval(bottoms, args.alpha)
    if ends is None or ends[0] <= 0 <= ends[1]:
        row.marks.append("denominator not separated from 0")


def fill_difference(row, pairs, args):
    """Put the paired differences into a row, or without runs that of the printed means."""
    row.per_seed = {seed: signed_sum(values) for seed, values in pairs.items()}
    deltas = list(row.per_seed.values())
    if deltas:
        row.mean, row.sd = mean(deltas), deviation(deltas)
        row.ci, row.ci95 = interval(deltas, args.alpha), interval(deltas, 0.05)
        row.improved = sum(d < 0 for d in deltas)
        row.marks += ["sd 0: are the runs copies?"] if row.sd == 0 else []
        return
    printed = [arm.printed[row.metric].mean for arm in row.terms if row.metric in arm.printed]
    known = len(printed) == len(row.terms) and None not in printed
    if known and not all(arm.runs for arm in row.terms):
        row.mean = signed_sum(printed)
        row.marks.append("unpaired: printed means")


def signed_sum(values):
    """A - B, or (A - B) - (C - D), rounded once."""
    return math.fsum(sign * v for sign, v in zip(report.SIGNS, values))


def add_planning(rows, args):
    """Add what --power and --holm ask for to the rows of contrasts."""
    rows = [row for row in rows if row.sd is not None]
    for row in rows if args.power is not None else ():
        row.seeds_needed = seeds_needed(args.power, row.sd, args.alpha)
        row.detectable = detectable(row.n, row.sd, args.alpha)
    ps = [p_value(list(row.per_seed.values())) for row in rows] if args.holm else ()
    for row, p, corrected in zip(rows, ps, holm(ps)):
        row.p, row.p_holm = p, corrected


def note_sources(items, notes):
    """One note when runs that are compared were computed by different code."""
    touched = {}
    for item in items:
        found = changed_sources([run for arm in item["terms"] for run in arm.runs.values()])
        touched |= {item["name"]: found} if found else {}
    if touched:
        files = ", ".join(sorted(set().union(*touched.values())))
        more = f" and {len(touched) - 1} more" if len(touched) > 1 else ""
        notes.append(f"not the same code: {files} changed between the runs of "
                     f"{next(iter(touched))}{more} (env.sources of the records)")


# ---- the contrasts shown when none is asked for ----

def default_items(batch, arms, args, notes):
    """Those a paper prints for its own arms, else every arm against the reference."""
    if args.ref and not named(args.ref, arms, batch.names):
        raise UserError(f"--ref {args.ref}: no such arm{near(args.ref, arms, batch.names)}")
    items = [] if args.ref else planned_items(batch.plan, arms, args.mixed, notes)
    planned = {item["source"] for item in items}
    for group, inside in groups_of(arms).items():
        if group.table in planned:
            continue
        ref = pick(args.ref, inside, batch.names) if args.ref else reference(inside, notes)
        if ref is None:
            notes.append(f"no arm {args.ref} in {group}: no contrasts there")
        else:
            items += against(ref, inside, bool(args.ref))
    return items


def reference(arms, notes):
    """The reference arm of a group, the project's own before a copy's. A guess is announced."""
    arms = sorted(arms, key=lambda arm: not arm.own)
    exact = [arm for name in REFERENCES for arm in arms if arm.base == name]
    words = [arm for name in REFERENCES for arm in arms
             if name in re.split(r"[^a-z]+", arm.base.lower())]
    first = (exact or words or arms)[0]
    same = [arm for arm in arms if (arm.base, arm.script) == (first.base, first.script)]
    best = max(same, key=lambda arm: len(arm.runs))
    if len(arms) > 1 and not exact:
        why = "by its name" if words else "first by name"
        notes.append(f"reference of {best.group}: {best.label} ({why}); choose with --ref")
    elif len(same) > 1:
        notes.append(f"reference of {best.group}: {best.base}, for every arm in the one of "
                     f"{len(same)} settings nearest its own; choose with --ref")
    return best


def against(ref, arms, asked):
    """[item]: every arm against the reference, a copy's arm also against the arm it copies."""
    refs, items = [ref], []
    if not asked:
        refs += [a for a in arms if (a.base, a.script) == (ref.base, ref.script) and a is not ref]
    for arm in arms:
        if arm is ref:
            continue
        others = [ref if arm in refs else nearest(arm, refs)]
        origins = [a for a in arms if a.own and a.base == arm.base]
        if not (asked or arm.own) and origins:
            others.append(nearest(arm, origins))
        items += [item_of("contrast", (arm, other)) for other in dict.fromkeys(others)]
    return items


def nearest(arm, refs):
    """The arm of refs whose flags differ in the fewest from the arm's; the first of equals."""
    return min(refs, key=lambda ref: len(varying([arm.setting, ref.setting])))


def sides(bases, arms):
    """The arms of these names, as a tuple; None unless each is exactly one arm."""
    found = [[arm for arm in arms if arm.base == base] for base in bases]
    return tuple(arm for arm, in found) if all(len(f) == 1 for f in found) else None


def planned_items(plan, arms, mixed, notes):
    """[item] of the contrasts that a paper prints and whose arms are among these."""
    items = []
    for item in plan:
        close = [arm for arm in arms if arm.group.table == item["source"]
                 and item["depth"] in (None, arm.group.depth)]
        terms = sides(item["terms"], close)
        if terms and len({arm.group for arm in terms}) > 1 and not mixed:
            how = "its arms differ in size or budget; --mixed compares them anyway"
            notes.append(f"left out: {item['label']}: {how}")
        elif terms:
            items.append({**item, "kind": "contrast" if len(terms) == 2 else "dod", "terms": terms})
    return items


# ---- published values beside ----

def add_published(rows, args):
    """Give rows the published value of the same arm or contrast in the same metric."""
    batch = Batch()
    for name in ("oe", "wm", "ablate"):
        batch.add(batch_of(f"{name}.json", published(name)))
    arms = make_arms(batch, [])
    items = planned_items(batch.plan, arms, True, [])
    for row in rows:
        # a copy's arm is no published one, whatever its name
        if row.kind != "ratio" and all(arm.own for arm in row.terms):
            row.published = beside(row, arms, items, args)


def beside(row, arms, items, args):
    """The published texts of a row: those of the same depth, else all, labelled. None: none."""
    bases, found = [arm.base for arm in row.terms], []
    if row.kind != "arm":
        for item in items:
            if row.metric in item["printed"] and [arm.base for arm in item["terms"]] == bases:
                text = report.printed_contrast(item, row.metric)
                found += [(item["terms"][0].group, text)] if text else []
        found = found or recomputed(row, bases, arms, args)
    elif not row.group.table:
        found = [(arm.group, report.printed_text(arm.printed[row.metric])) for arm in arms
                 if arm.base == bases[0] and row.metric in arm.printed]
    texts = [text for group, text in found if group.depth == row.group.depth]
    if not texts:
        places = [f"d{g.depth}" if g.depth else g.table.partition(" ")[2] for g, _ in found]
        texts = [f"{place}: {text}" if place else text for place, (_, text) in zip(places, found)]
    return "; ".join(dict.fromkeys(texts)) or None


def recomputed(row, bases, arms, args):
    """[(group, text)] of a contrast that no table prints, from its arms' published seeds."""
    found = []
    for group, inside in groups_of(arms).items():
        terms = sides(bases, [arm for arm in inside if arm.runs])
        if terms:
            r = contrast_row(item_of(row.kind, terms), row.metric, args, [])
            numbers = f"{report.text_of(r.mean)} ± {report.text_of(r.sd)}"
            text = f"{numbers} {report.interval_text(r)} (from its seeds)"
            found += [(group, text)] if r.n else []
    return found


# ---- command line ----

def parse(argv):
    """(Flags, files, [(kind, text)]) of a command line; UserError for what cannot be asked."""
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE",
                        help="result JSON files, folders of them, published/*.json")
    for kind, meaning in ASKS.items():
        parser.add_argument(f"--{kind}", action="append", metavar=f'"{FORMS[kind]}"', help=meaning)
    add_flags(parser, Flags)
    given = vars(parser.parse_args(argv))
    files = given.pop("files")
    asked = [(kind, text) for kind in FORMS for text in given.pop(kind, [])]
    args = Flags(**given)
    check_bounds(args)
    printed = args.csv + args.markdown + args.json
    if printed > 1:
        raise UserError("--csv, --markdown and --json all print to the terminal; choose one")
    if args.list and (printed or args.plot or args.html or asked):
        raise UserError("--list prints names and nothing else; leave the other outputs away")
    if args.curves and not (args.plot or args.html):
        raise UserError("--curves draws into --plot or --html; name one of them")
    return args, files, asked


def check_outputs(args, paths):
    """UserError when an output has an unknown ending or would overwrite another file."""
    if args.plot and Path(args.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {args.plot}: name a .png, .svg or .pdf file")
    taken = {p.resolve(): "an input file" for p in paths}
    for name, value in (("--plot", args.plot), ("--html", args.html)):
        where = Path(value).resolve()
        if value and (where in taken or where.is_dir()):
            raise UserError(f"{name} {value} is {taken.get(where, 'a folder')}; name another file")
        taken[where] = f"the file of {name}"


def keep_depth(batch, depth):
    """Leave only this depth in a batch. UserError when nothing has it."""
    depths = {x.group.depth for x in [*batch.runs, *batch.printed]} - {None}
    if depth not in depths:
        known = ", ".join(map(str, sorted(depths))) or "none"
        raise UserError(f"--depth {depth}: no such runs; depths here: {known}")
    for found in (batch.runs, batch.printed):
        found[:] = [x for x in found if x.group.depth == depth]


def collect(batch, arms, args, asked, notes):
    """(rows of arms, rows of contrasts) of what was read and asked for."""
    wanted, known = re.findall(r"[^,\s]+", args.metric), set(known_metrics(arms))
    for metric in set(wanted) - known:
        have = ", ".join(sorted(map(clean, known))) or "none"
        raise UserError(f"--metric {metric}: no run has it; these exist: {have}")
    metrics, arm_rows, items = {}, [], []
    for group, inside in groups_of(arms).items():
        metrics[group] = wanted or default_metrics(inside, batch.plan)
        for metric in metrics[group]:
            for arm in inside:
                usable(arm, metric, notes)
            mark_brackets(inside, metric)
            arm_rows += [arm_row(arm, metric) for arm in inside]
    for kind, text in asked:
        items += request(kind, text, arms, batch.names, args.mixed)
    if not asked:
        items = default_items(batch, arms, args, notes)
    note_sources(items, notes)
    rows = []
    for item in items:
        shown = wanted or item.get("printed") or metrics[item["terms"][0].group]
        rows += [contrast_row(item, metric, args, notes) for metric in shown]
    return arm_rows, rows


def draw(args, arms, rows, notes):
    """[(title, panels)] of the figures; UserError when there is nothing to draw."""
    if not args.plot and not args.html:
        return []
    figures = [("Contrasts", report.forest_panels(rows, args.alpha))]
    if args.curves:
        figures.append(("Loss curves", report.curve_panels(arms)))
        if not figures[1][1]:
            raise UserError("--curves: none of these files has a loss curve; leave it away")
    drawable = sum(row.kind != "ratio" and row.mean is not None for row in rows)
    if drawable > report.MOST_DRAWN:
        notes.append(f"the figure shows the first {report.MOST_DRAWN} of {drawable} contrasts; "
                     "choose with --contrast, --metric or --depth")
    panels = [panel for _, some in figures for panel in some]
    if args.plot and not panels:
        raise UserError("--plot: there is no contrast to draw; name files with two arms")
    if args.plot:
        report.save_figure(args.plot, panels)
    return figures


def show_results(args, arms, arm_rows, rows, notes, skipped):
    """Print and write everything that was asked for."""
    legend = report.legend_lines(args, rows)
    tables = report.sections(arm_rows + rows, args.alpha)
    figures = draw(args, arms, rows, notes)
    if args.html:
        title = "Paired contrasts: " + "; ".join(map(str, groups_of(arms)))
        text = report.page(title, tables, figures, legend, skipped + notes)
        with atomic_path(args.html) as tmp:
            tmp.write_text(text, encoding="utf-8")
    if args.csv:
        print(report.as_csv(arm_rows + rows), end="")
    elif args.json:
        print(report.as_json(arm_rows, rows, args.alpha, notes, skipped))
    else:
        print(report.as_tables(tables, (legend if rows else []) + notes, args.markdown))
    if notes and (args.csv or args.json):
        print("\n".join(notes), file=sys.stderr)


def main(argv=None):
    """Exit code of the command line `argv` (default: sys.argv); see the top of this file."""
    args, names, asked = parse(argv)
    paths = expand(names)
    check_outputs(args, paths)
    batch, skipped = read_all(paths)
    for line in skipped:
        print(line, file=sys.stderr)
    if not batch.runs and not batch.printed:
        raise UserError("no result in these files; name JSON files that a training script wrote")
    if args.depth is not None:
        keep_depth(batch, args.depth)
    notes = []
    arms = make_arms(batch, notes)
    if args.list:
        print(as_list(arms, batch.names))
        return 1 if skipped else 0
    arm_rows, rows = collect(batch, arms, args, asked, notes)
    if not any(row.n or row.printed for row in arm_rows):
        print("\n".join(notes), file=sys.stderr)
        raise UserError("every run was left out (see the lines above); there is nothing to average")
    add_planning(rows, args)
    if args.published:
        add_published(arm_rows + rows, args)
    show_results(args, arms, arm_rows, rows, notes, skipped)
    return 1 if skipped or asked and any(row.mean is None for row in rows) else 0


if __name__ == "__main__":
    cli(main)
