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
import dataclasses
import difflib
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import report
from common import (UserError, add_flags, atomic_path, check_bounds, cli, flag, make_parser,
                    published)
from records import (Batch, Group, batch_of, changed_sources, clean, default_metrics, expand,
                     known_metrics, make_arms, number, read_all, show, usable, varying)
from report import Row

REFERENCES = ("00_dense_native", "modern", "native", "backprop", "baseline")
TABLES = ("oe", "wm", "ablate")
CAPACITY = 0.005   # relative difference in parameters above which a contrast is marked
POWER = 0.8
MOST_SEEDS = 10**6
EDGE = "edge of bracket: extend before reading"
FORMS = {"contrast": "A - B", "dod": "(A - B) - (C - D)", "ratio": "(A - B) / (C - D)"}


@dataclass(frozen=True)
class Flags:
    """The options of stats.py."""
    ref: str = flag("", "reference arm (default: the native or modern arm present)")
    metric: str = flag("", "metrics, with commas (default: the one that most runs of a group have)")
    depth: Optional[int] = flag(None, "only runs of this depth")
    alpha: float = flag(0.05, "1 - coverage of the intervals, between 0 and 1")
    power: Optional[float] = flag(None, "add the seeds needed to detect this difference at 80 % power")
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
    low, high = 1, 2
    while power(high, delta / sd, alpha) < POWER:
        low, high = high, high * 2
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if power(middle, delta / sd, alpha) >= POWER:
            high = middle
        else:
            low = middle
    return high


def detectable(n, sd, alpha):
    """Smallest true mean that n pairs with this sd detect at 80 % power; None if beyond scipy."""
    low, high = 0.0, 1.0
    reached = power(n, high, alpha)
    while reached < POWER and high < 1e6:
        high *= 2
        reached = power(n, high, alpha)
    if math.isnan(reached) or reached < POWER:
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
    rates = {k for arm in arms for k in arm.setting if "lr" in k or "learning_rate" in k}
    for key in sorted(rates):
        brackets = {}
        for arm in arms:
            rate = number(arm.config.get(key))
            if rate is not None:
                rest = sorted((k, show(v)) for k, v in arm.setting.items() if k != key)
                family = next((p.family for p in arm.printed.values()), "")
                bracket = brackets.setdefault((arm.group, arm.script, family, *rest), {})
                bracket.setdefault(rate, []).append(arm)
        for bracket in brackets.values():
            points = {rate: bracket_values(found, metric) for rate, found in bracket.items()}
            for arm in bracket.get(edge_of(points), ()):
                arm.marks.append((metric, f"{key}: {EDGE}"))


def bracket_values(arms, metric):
    """{seed: value} of the arms at one rate; a printed mean stands for seeds that are not named."""
    values = {}
    for arm in arms:
        values |= with_diverged(arm, metric)
        printed = arm.printed.get(metric)
        if not arm.runs and printed and printed.mean is not None:
            values["printed"] = printed.mean
    return values


def arm_row(arm, metric):
    """The Row of an arm. Values whose seeds are not named give n, mean and sd, but no pairs."""
    per_seed, printed = arm.values[metric], arm.printed.get(metric)
    values = list(per_seed.values()) or list(printed.loose if printed else ())
    return Row("arm", arm.label, metric, arm.group, arm.script, n=len(values),
               mean=mean(values) if values else None, sd=deviation(values), per_seed=per_seed,
               params=arm.params, printed=report.printed_text(printed) if printed else None,
               marks=[text for m, text in arm.marks if m == metric], terms=((1, arm),))


# ---- names ----

def matches(name, arms, names):
    """The arms a name means: a label, an arm's own name, a paper's short name, a leading number."""
    own, aliased = [arm for arm in arms if arm.own], names.get(name, ())
    ways = ([arm for arm in arms if arm.label == name],
            [arm for arm in own if arm.base == name],
            [arm for arm in own if arm.base in aliased],
            [arm for arm in own if name and leading_number(arm.base) == name])
    return next((found for found in ways if found), [])


def leading_number(base):
    """The 12 of 12_oe_joint, the 02m of 02m_dense_masked_qk; "" for other names."""
    found = re.match(r"(\d+[a-z]*)_", base)
    return found[1] if found else ""


def words(group):
    """The words that may follow an @ to choose a group."""
    return str(group).replace(",", "").split()


def pick(name, arms, names):
    """The one arm a name means, None when it fits none; UserError when it fits several.

    'arm@d8' keeps the groups that have this word.
    """
    start, _, word = name.rpartition("@")
    if start and word and not any(name in (arm.label, arm.base) for arm in arms):
        arms, name = [arm for arm in arms if word in words(arm.group)], start
    found = matches(name, arms, names)
    if len(found) > 1:
        several = len({arm.group for arm in found}) > 1
        listed = [f"{a.label} ({a.group})" if several else a.label for a in found[:8]]
        listed += ["..."] if len(found) > 8 else []
        how = "write more of the name" + (", or arm@d8 for one size" if several else "")
        raise UserError(f"'{clean(name)}' may mean {', '.join(listed)}; {how}")
    return found[0] if found else None


def near(name, arms, names):
    """What the user may have meant, as the end of an error message."""
    known = list(dict.fromkeys([arm.label for arm in arms] + list(names)))
    found = [k for k in known if name and k.rpartition("/")[2].startswith(name)][:3]
    found += difflib.get_close_matches(name, known, 3, 0.5)
    found = list(dict.fromkeys(found))[:4]
    return (f"; near: {', '.join(found)}" if found else "") + "; --list shows the names"


def cut(text, sep):
    """Every (left, right) around an occurrence of sep: arm names may hold the separator too."""
    places = [m.span() for m in re.finditer(re.escape(sep), text)]
    return [(text[:start].strip(), text[end:].strip()) for start, end in places]


def readings(kind, text):
    """Every way to read a request as ((sign, name), ...). UserError when it has another form."""
    text, found = " ".join(text.replace("−", "-").split()), []
    if kind == "contrast":
        found = [((1, a), (-1, b)) for a, b in cut(text, " - ")]
    elif text.startswith("(") and text.endswith(")"):
        for left, right in cut(text, ") - (" if kind == "dod" else ") / ("):
            for a, b in cut(left[1:], " - "):
                for c, d in cut(right[:-1], " - "):
                    found.append(((1, a), (-1, b), (-1, c), (1, d)))
    if not found:
        how = "with spaces around the signs; --list shows the names"
        raise UserError(f"--{kind} '{clean(text)}': write \"{FORMS[kind]}\", {how}")
    return found


def locate(found, arms, names):
    """((sign, Arm), ...) of the first reading all of whose names exist, or None."""
    for reading in found:
        terms = [(sign, pick(name, arms, names)) for sign, name in reading]
        if all(arm is not None for _, arm in terms):
            return tuple(terms)
    return None


def request(kind, text, arms, names, mixed):
    """[item] of one --contrast, --dod or --ratio: one for every group that has all its arms."""
    found, said = readings(kind, text), f"--{kind} '{clean(text)}'"

    def exists(name):
        return matches(name, arms, names) or matches(name.rpartition("@")[0], arms, names)
    known = [reading for reading in found if all(exists(name) for _, name in reading)]
    if not known:
        unknown = next(name for _, name in found[0] if not exists(name))
        raise UserError(f"{said}: no arm '{clean(unknown)}'{near(unknown, arms, names)}")
    hits = [locate(known, inside, names) for inside in groups_of(arms).values()]
    hits = [terms for terms in hits if terms]
    crossing = None if hits else locate(known, arms, names)
    if crossing and not mixed:
        where = "; ".join(dict.fromkeys(f"{arm.label} is in {arm.group}" for _, arm in crossing))
        raise UserError(f"{said} crosses groups ({where}); --mixed compares them anyway")
    if not hits and not crossing:
        raise UserError(f"{said}: no group has these arms; --list shows the names")
    hits = hits or [crossing]
    for terms in hits:
        named = [arm for _, arm in terms]
        with_itself = any(a is b for a, b in zip(named[::2], named[1::2]))
        if with_itself or named[:2] == named[2:]:
            raise UserError(f"{said} compares an arm with itself; name two arms")
    return [{"kind": kind, "name": name_of(kind, terms), "terms": terms} for terms in hits]


def name_of(kind, terms):
    """A request in the whole names of its arms."""
    labels = dict(zip("ABCD", (arm.label for _, arm in terms)))
    return re.sub("[A-D]", lambda letter: labels[letter[0]], FORMS[kind])


def groups_of(arms):
    """{group: [its arms]}"""
    groups = {}
    for arm in arms:
        groups.setdefault(arm.group, []).append(arm)
    return groups


def as_list(arms, names):
    """The arms of every group with the short names that pick them."""
    lines = []
    for group, inside in groups_of(arms).items():
        table = []
        for arm in inside:
            tries = [n for n in names if arm.base in names[n]] + [leading_number(arm.base)]
            short = [n for n in dict.fromkeys(tries) if matches(n, inside, names) == [arm]]
            seeds = " ".join(map(str, sorted(arm.runs)))
            metrics = [m for run in arm.runs.values() for m in run.metrics] or arm.printed
            table.append([arm.label, ", ".join(short[:3]) or "-", seeds or "-",
                          ", ".join(dict.fromkeys(metrics))])
        headers = ["arm", "short names", "seeds", "metrics"]
        lines += [str(group), report.as_text(headers, table), ""]
    return "\n".join(lines)


# ---- contrasts ----

def paired(terms, metric, mixed, notes):
    """({seed: [value of each term]}, [why seeds are left out], was something mixed?)."""
    values = [usable(arm, metric, notes) for _, arm in terms]
    pairs, reasons, mixes = {}, [], len({arm.group for _, arm in terms}) > 1
    for seed in sorted(set().union(*values)):
        lacking = [arm.label for v, (_, arm) in zip(values, terms) if seed not in v]
        if lacking:
            where = ", ".join(dict.fromkeys(lacking))
            reasons.append(f"seed {seed} unpaired (not in {where})")
            continue
        said = [arm.runs[seed].alike for _, arm in terms]
        clash = [k for k in said[0] if len({s.get(k) for s in said} - {None}) > 1]
        if clash and not mixed:
            told = [f"{k} {', '.join(show(s.get(k)) for s in said)}" for k in clash]
            reasons.append(f"seed {seed}: mixed {'; '.join(told)} (--mixed pairs them)")
            continue
        mixes |= bool(clash)
        pairs[seed] = [v[seed] for v in values]
    return pairs, reasons, mixes


def verdict(terms, metric, pairs):
    """Are the ranges of two arms disjoint, diverged seeds included? None if unknown."""
    if len(terms) != 2:
        return None
    a, b = (arm for _, arm in terms)
    if not (a.runs or b.runs):
        return printed_verdict(a.printed.get(metric), b.printed.get(metric))
    ours, theirs = with_diverged(a, metric), with_diverged(b, metric)
    seeds = [s for s in ours if s in theirs and (s in pairs or s in a.diverged | b.diverged)]
    return separated([ours[s] for s in seeds], [theirs[s] for s in seeds])


def printed_verdict(a, b):
    """Are two printed ranges disjoint, as far as their ends are known?"""
    if a is None or b is None:
        return None

    def below(high, low):
        return None if high is None or low is None else high < low
    answers = [below(a.high, b.low), below(b.high, a.low)]
    if True in answers:
        return True
    return None if None in answers else False


def contrast_row(item, metric, args, notes):
    """The Row of one contrast, difference of differences or ratio in one metric."""
    terms, first = item["terms"], item["terms"][0][1]
    pairs, reasons, mixes = paired(terms, metric, args.mixed, notes)
    row = Row(item["kind"], item["name"], metric, first.group, first.script, terms=terms,
              table=item.get("table"), row=item.get("row"), label=item.get("label"),
              separated=verdict(terms, metric, pairs), n=len(pairs),
              marks=["mixed"] if mixes else [])
    sizes = [(a.params, b.params) for (_, a), (_, b) in zip(terms[::2], terms[1::2])]
    if any(differ_in_size(a, b) for a, b in sizes):
        row.marks.append("capacity")
    edges = [f"{arm.label}: {text}" for _, arm in terms for m, text in arm.marks if m == metric]
    row.marks += dict.fromkeys(edges)
    if reasons:
        row.marks.append("seeds left out")
        notes.append(f"left out of {row.name} ({row.group}): {'; '.join(reasons)}")
    (fill_ratio if row.kind == "ratio" else fill_difference)(row, pairs, args)
    return row


def fill_ratio(row, pairs, args):
    """Put the ratio of two mean differences into a row."""
    tops = {seed: v[0] - v[1] for seed, v in pairs.items()}
    bottoms = {seed: v[2] - v[3] for seed, v in pairs.items()}
    row.per_seed = {s: tops[s] / bottoms[s] if bottoms[s] else None for s in pairs}
    if pairs and mean(list(bottoms.values())):
        row.mean = mean(list(tops.values())) / mean(list(bottoms.values()))
    ends = interval(list(bottoms.values()), args.alpha)
    if ends is None or ends[0] <= 0 <= ends[1]:
        row.marks.append("denominator not separated from 0")


def fill_difference(row, pairs, args):
    """Put the paired differences into a row, or without runs that of the printed means."""
    signs = [sign for sign, _ in row.terms]
    for seed, values in pairs.items():
        row.per_seed[seed] = math.fsum(sign * v for sign, v in zip(signs, values))
    deltas = list(row.per_seed.values())
    if deltas:
        row.mean, row.sd = mean(deltas), deviation(deltas)
        row.ci, row.ci95 = interval(deltas, args.alpha), interval(deltas, 0.05)
        row.improved = sum(d < 0 for d in deltas)
        if row.sd == 0:
            row.marks.append("sd 0: are the runs copies?")
        return
    printed = [arm.printed.get(row.metric) for _, arm in row.terms]
    known = all(p is not None and p.mean is not None for p in printed)
    if known and not all(arm.runs for _, arm in row.terms):
        row.mean = math.fsum(sign * p.mean for sign, p in zip(signs, printed))
        row.marks.append("unpaired: printed means")


def add_planning(rows, args):
    """Add what --power and --holm ask for to the rows of contrasts."""
    rows = [row for row in rows if row.kind != "ratio"]
    for row in rows:
        if args.power is not None and row.sd is not None:
            row.seeds_needed = seeds_needed(args.power, row.sd, args.alpha)
            row.detectable = detectable(row.n, row.sd, args.alpha)
        if args.holm:
            row.p = p_value(list(row.per_seed.values()))
    for row, p in zip(rows, holm([row.p for row in rows])):
        row.p_holm = p


def note_sources(items, notes):
    """One note when runs that are compared were computed by different code."""
    files, touched = {}, []
    for item in items:
        runs = [run for _, arm in item["terms"] for run in arm.runs.values()]
        found = changed_sources(runs)
        files |= dict.fromkeys(found)
        touched += [item["name"]] if found else []
    if touched:
        which = touched[0] + (f" and {len(touched) - 1} more" if len(touched) > 1 else "")
        notes.append(f"not the same code: {', '.join(sorted(files))} changed between the runs of "
                     f"{which} (env.sources of the records)")


# ---- the contrasts shown when none is asked for ----

def default_items(batch, arms, args, notes):
    """Those a paper prints for its own arms, else every arm against the reference."""
    items = [] if args.ref else planned_items(batch.plan, arms, args.mixed, notes)
    planned, known = {item["source"] for item in items}, False
    for group, inside in groups_of(arms).items():
        if group.table in planned:
            continue
        ref = pick(args.ref, inside, batch.names) if args.ref else reference(inside, notes)
        if ref is None:
            notes.append(f"no arm {args.ref} in {group}: no contrasts there")
            continue
        known = True
        items += against(ref, inside, bool(args.ref))
    if args.ref and not known:
        raise UserError(f"--ref {args.ref}: no such arm{near(args.ref, arms, batch.names)}")
    return items


def reference(arms, notes):
    """The reference arm of a group, the project's own before a copy's. A guess is announced."""
    live = [arm for arm in arms if arm.runs or arm.printed]
    live.sort(key=lambda arm: not arm.own)
    exact = [arm for name in REFERENCES for arm in live if arm.base == name]
    words = [arm for name in REFERENCES for arm in live
             if name in re.split(r"[^a-z]+", arm.base.lower())]
    first = (exact or words or live)[0]
    same = [arm for arm in live if (arm.base, arm.script) == (first.base, first.script)]
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
    refs = [ref]
    if not asked:
        refs += [a for a in arms if (a.base, a.script) == (ref.base, ref.script) and a is not ref]
    items = []
    for arm in arms:
        if arm is ref:
            continue
        others = [ref if arm in refs else nearest(arm, refs)]
        origins = [a for a in arms if a.own and a.base == arm.base]
        if not (asked or arm.own) and origins:
            others.append(nearest(arm, origins))
        for other in dict.fromkeys(others):
            terms = ((1, arm), (-1, other))
            items.append({"kind": "contrast", "name": name_of("contrast", terms), "terms": terms})
    return items


def nearest(arm, refs):
    """The arm of refs whose flags differ in the fewest from the arm's; the first of equals."""
    return min(refs, key=lambda ref: len(varying([arm.setting, ref.setting])))


def sides(bases, arms):
    """((sign, Arm), ...) for ((sign, arm's name), ...); None unless each is exactly one arm."""
    found = [(sign, [arm for arm in arms if arm.base == base]) for sign, base in bases]
    if any(len(named) != 1 for _, named in found):
        return None
    return tuple((sign, named[0]) for sign, named in found)


def planned_items(plan, arms, mixed, notes):
    """[item] of the contrasts that a paper prints and whose arms are among these."""
    items = []
    for item in plan:
        close = [arm for arm in arms if arm.group.table == item["source"]]
        close = [arm for arm in close if item["depth"] in (None, arm.group.depth)]
        terms = sides(item["terms"], close)
        if terms is None:
            continue
        if len({arm.group for _, arm in terms}) > 1 and not mixed:
            how = "its arms differ in size or budget; --mixed compares them anyway"
            notes.append(f"left out: {item['label']}: {how}")
            continue
        kind = "contrast" if len(terms) == 2 else "dod"
        items.append({**item, "kind": kind, "terms": terms})
    return items


# ---- published values beside ----

def add_published(rows, args):
    """Give rows the published value of the same arm or contrast in the same metric."""
    batch = Batch()
    for name in TABLES:
        batch.add(batch_of(f"{name}.json", published(name)))
    arms = make_arms(batch, [])
    items = planned_items(batch.plan, arms, True, [])
    for row in rows:
        bases = [(sign, arm.base) for sign, arm in row.terms]
        if not all(arm.own for _, arm in row.terms):
            continue   # a copy's arm is no published one, whatever its name
        if row.kind == "arm" and not row.group.table:
            found = [(arm.group, report.printed_text(arm.printed[row.metric])) for arm in arms
                     if arm.base == bases[0][1] and row.metric in arm.printed]
        elif row.kind in ("contrast", "dod"):
            same = [item for item in items if row.metric in item["printed"]
                    and [(sign, arm.base) for sign, arm in item["terms"]] == bases]
            found = [(item["terms"][0][1].group, report.printed_contrast(item, row.metric))
                     for item in same]
            found = [f for f in found if f[1]] or recomputed(row, bases, arms, args)
        else:
            continue
        row.published = beside(row.group, found)


def beside(group, found):
    """Published texts [(group, text)] as one: those of the same depth, else all, labelled."""
    same = [text for where, text in found if where.depth == group.depth]
    labelled = []
    for where, text in found:
        short = f"d{where.depth}" if where.depth else where.table.partition(" ")[2]
        labelled.append(f"{short}: {text}" if short else text)
    return "; ".join(dict.fromkeys(same or labelled)) or None


def recomputed(row, bases, arms, args):
    """[(group, text)] of a contrast that no table prints, from its arms' published seeds."""
    found = []
    for group, inside in groups_of(arms).items():
        terms = sides(bases, [arm for arm in inside if arm.runs])
        if terms is None:
            continue
        item = {"kind": row.kind, "name": row.name, "terms": terms}
        r = contrast_row(item, row.metric, args, [])
        if r.mean is not None:
            numbers = f"{report.text_of(r.mean)} ± {report.text_of(r.sd)}"
            found.append((group, f"{numbers} {report.interval_text(r)} (from its seeds)"))
    return found


# ---- command line ----

def parse(argv):
    """(Flags, files, [(kind, text)]) of a command line; UserError for what cannot be asked."""
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE",
                        help="result JSON files, folders of them, published/*.json")
    meanings = {
        "contrast": "difference of two arms, instead of the default contrasts; may be repeated",
        "dod": "difference of two differences, over the seeds that all four arms have",
        "ratio": "ratio of two mean differences; descriptive, without an interval"}
    for kind, meaning in meanings.items():
        parser.add_argument(f"--{kind}", action="append", metavar=f'"{FORMS[kind]}"', help=meaning)
    add_flags(parser, Flags)
    given = vars(parser.parse_args(argv))
    files = given.pop("files")
    asked = [(kind, text) for kind in FORMS for text in given.pop(kind, [])]
    args = Flags(**given)
    check_flags(args, asked)
    return args, files, asked


def check_flags(args, asked):
    """UserError for values and combinations that make no sense."""
    check_bounds(args)
    if not 0 < args.alpha < 1:
        raise UserError(f"--alpha {args.alpha:g}: give a number between 0 and 1, such as 0.05")
    if args.power is not None and args.power <= 0:
        how = "give the difference to detect, a positive number"
        raise UserError(f"--power {args.power:g}: {how}")
    if sum((args.csv, args.markdown, args.json)) > 1:
        raise UserError("--csv, --markdown and --json all print to the terminal; choose one")
    others = args.csv or args.markdown or args.json or args.plot or args.html or asked
    if args.list and others:
        raise UserError("--list prints names and nothing else; leave the other outputs away")
    if args.curves and not (args.plot or args.html):
        raise UserError("--curves draws into --plot or --html; name one of them")


def check_outputs(args, paths):
    """UserError when an output has an unknown ending or would overwrite another file."""
    if args.plot and Path(args.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {args.plot}: name a .png, .svg or .pdf file")
    taken = {p.resolve(): "an input file" for p in paths}
    for name, value in (("--plot", args.plot), ("--html", args.html)):
        if not value:
            continue
        where = Path(value).resolve()
        if where in taken or where.is_dir():
            what = taken.get(where, "a folder")
            raise UserError(f"{name} {value} is {what}; name another file")
        taken[where] = f"the file of {name}"


def arms_of(batch, args, notes):
    """The arms of --depth, or all of them. UserError when there are none."""
    if args.depth is None:
        return make_arms(batch, notes)
    depths = {x.group.depth for x in [*batch.runs, *batch.printed]} - {None}
    if args.depth not in depths:
        known = ", ".join(map(str, sorted(depths))) or "none"
        raise UserError(f"--depth {args.depth}: no such runs; depths here: {known}")
    runs, printed = ([x for x in xs if x.group.depth == args.depth]
                     for xs in (batch.runs, batch.printed))
    return make_arms(dataclasses.replace(batch, runs=runs, printed=printed), notes)


def collect(batch, args, asked, notes):
    """(arms, rows of arms, rows of contrasts) of what was read and asked for."""
    arms = arms_of(batch, args, notes)
    wanted = [m.strip() for m in args.metric.split(",") if m.strip()]
    known = set(known_metrics(arms))
    for metric in wanted:
        if metric not in known:
            have = ", ".join(sorted(map(clean, known))) or "none"
            raise UserError(f"--metric {metric}: no run has it; these exist: {have}")
    groups, metrics, arm_rows = groups_of(arms), {}, []
    for group, inside in groups.items():
        metrics[group] = wanted or default_metrics(inside, batch.plan)
        for metric in metrics[group]:
            for arm in inside:
                usable(arm, metric, notes)
            mark_brackets(inside, metric)
            arm_rows += [arm_row(arm, metric) for arm in inside]
    items = []
    for kind, text in asked:
        items += request(kind, text, arms, batch.names, args.mixed)
    if not asked:
        items = default_items(batch, arms, args, notes)
    note_sources(items, notes)
    rows = []
    for item in items:
        shown = wanted or item.get("printed") or metrics[item["terms"][0][1].group]
        rows += [contrast_row(item, metric, args, notes) for metric in shown]
    return arms, arm_rows, rows


def draw(args, arms, rows, notes):
    """[(title, panels)] of the figures; UserError when there is nothing to draw."""
    figures = [("Contrasts", report.forest_panels(rows, args.alpha))]
    if args.curves:
        figures.append(("Loss curves", report.curve_panels(arms)))
        if not figures[1][1]:
            raise UserError("--curves: none of these files has a loss curve; leave it away")
    drawable = sum(row.kind != "ratio" and row.mean is not None for row in rows)
    if (args.plot or args.html) and drawable > report.MOST_DRAWN:
        notes.append(f"the figure shows the first {report.MOST_DRAWN} of {drawable} contrasts; "
                     "choose with --contrast, --metric or --depth")
    if args.plot:
        panels = [panel for _, some in figures for panel in some]
        if not panels:
            why = "the printed notes say what was left out"
            raise UserError(f"--plot: there is no contrast to draw; {why}")
        report.save_figure(args.plot, panels)
    return figures


def show_results(args, arms, arm_rows, rows, notes, skipped, files):
    """Print and write everything that was asked for."""
    legend = report.legend_lines(args, rows)
    tables = report.sections(arm_rows + rows, args.alpha)
    figures = draw(args, arms, rows, notes)
    if args.html:
        title = "Paired contrasts: " + "; ".join(map(str, groups_of(arms)))
        counts = f"{len(arms)} arms and {len(rows)} contrasts"
        summary = f"{counts} from {files} file{'s' * (files > 1)}."
        text = report.page(tables, figures, legend, skipped + notes, title, summary)
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
        count = f"{len(paths)} file{'s' * (len(paths) > 1)}"
        raise UserError(f"no result in {count}; name JSON files that a training script wrote")
    notes = []
    if args.list:
        print(as_list(arms_of(batch, args, notes), batch.names))
        return 1 if skipped else 0
    arms, arm_rows, rows = collect(batch, args, asked, notes)
    if not any(row.n or row.printed for row in arm_rows):
        print("\n".join(notes), file=sys.stderr)
        raise UserError("every run was left out (see the lines above); there is nothing to average")
    if args.power is not None or args.holm:
        add_planning(rows, args)
    if args.published:
        add_published(arm_rows + rows, args)
    show_results(args, arms, arm_rows, rows, notes, skipped, len(paths))
    return 1 if skipped or asked and any(row.mean is None for row in rows) else 0


if __name__ == "__main__":
    cli(main)
