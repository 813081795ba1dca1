"""Reads result files and the published tables into one shape: runs, printed values, arms.

    result record     one file a run, written by a training script (runs.Run.finish)
    published table   `runs` with a record's keys, printed summaries of arms, printed contrasts

Runs are one arm when script, arm and `changed` are equal; a flag that a record does not mention
stands for its default. They are compared inside a Group: equal size, budget and corpus.
"""
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional

from common import OWN_SCRIPTS, SCHEMA, UserError

TOO_LARGE = 1e100  # beyond it sums of squares overflow; no loss is that large
PREFERRED = ("val_bpb", "val_loss", "heldout_bpb")
# flags that runs must share to be averaged or paired; eval_heldout.py may have scored one anew
ALIKE = {"data_seed": "data order", "eval_tokens": "evaluation tokens"}
KINDS = {"script": str, "arm": str, "seed": int, "status": str, "metrics": dict, "changed": dict}
# files of the project that compute results; a run's own script is one too
COMPUTING = {"model.py", "optim.py", "loss.py", "fast_weights.py", "batches.py", "data.py", "wm.py",
             "wm_pipeline.py", "wm_kernels.py"}


class Group(NamedTuple):
    """What must be equal for runs to compare; table names a published table, "" for records."""
    table: str
    depth: Optional[int]
    width: Optional[int]
    steps: float = None
    tokens: float = None
    corpus: str = None   # its digest

    def __str__(self):
        size = [self.depth and f"d{self.depth}", self.width and f"w{self.width}"]
        parts = [" ".join(filter(None, [self.table, *size]))]
        budget = ((self.steps, "steps"), (self.tokens, "tokens"))
        parts += [f"{n:,.0f} {unit}" for n, unit in budget if n is not None]
        # cut as in the names of runs
        parts += [f"corpus {clean(self.corpus)[:6]}"] if self.corpus else []
        return ", ".join(filter(None, parts)) or "of no size"


@dataclass
class Run:
    """One result file, or one row of a published table."""
    path: str
    group: Group
    script: str
    arm: str
    seed: int
    status: str
    metrics: dict
    changed: dict    # the flags that differ from their defaults
    config: dict     # every flag
    params: Optional[float]
    sources: dict    # {file: digest} of the code that computed it
    curve: list      # [[step, loss], ...]


@dataclass
class Printed:
    """An arm's printed mean, sd (by n - 1 or by n), range ends and values, as far as given."""
    group: Group
    script: str
    arm: str
    metric: str
    mean: Optional[float]
    sd: float = None
    sd_by: str = "(n-1)"
    loose: tuple = ()      # values whose seeds are not named, so that nothing pairs with them
    low: float = None
    high: float = None
    params: float = None
    changed: dict = field(default_factory=dict)
    family: str = ""       # what the paper calls this arm, at whatever rate


@dataclass
class Batch:
    """What a set of files holds; plan: contrasts that a paper prints, names: its short names."""
    runs: list = field(default_factory=list)
    printed: list = field(default_factory=list)
    plan: list = field(default_factory=list)
    names: dict = field(default_factory=dict)

    def add(self, other):
        self.runs += other.runs
        self.printed += other.printed
        self.plan += other.plan
        for short, arms in other.names.items():
            self.names.setdefault(short, set()).update(arms)


# ---- values from foreign files ----

def number(value):
    """The float of a finite JSON number of sane size, else None (bool, text, NaN, too large)."""
    sane = type(value) in (int, float) and abs(value) < TOO_LARGE
    return float(value) if sane else None


def clean(text):
    """The text with control characters replaced: it goes to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def show(value):
    """A flag's value as a label shows it, to the last digit: two rates are two arms."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else clean(value)


# ---- one record ----

def run_of(data, path, table=""):
    """Run of a dict with a record's keys. ValueError says what is wrong with it."""
    data = {"script": table, "changed": {}, **data} if table else data
    wrong = [key for key, kind in KINDS.items() if type(data.get(key)) is not kind]
    if wrong:
        raise ValueError(f"not a whole result record (see its {', '.join(wrong)})")
    config, params = data.get("config", {}), data.get("params") or {}
    group = Group(table, data.get("depth"), data.get("width"), *planned_budget(data, config),
                  config.get("data_digest"))
    curve = [point for point in data.get("curve", ()) if None not in map(number, point)]
    return Run(str(path), group, clean(data["script"]), clean(data["arm"]), data["seed"],
               clean(data["status"]), data["metrics"], data["changed"], config,
               number(params.get("total")), data.get("env", {}).get("sources", {}), curve)


def planned_budget(data, config):
    """(steps, tokens) of a run; of one that ended early those that it was to take."""
    steps, tokens = number(data.get("steps")), number(data.get("tokens"))
    asked = number(config.get("steps", config.get("max_iters")))
    if data["status"] == "finished" or not steps or asked is None:
        return steps, tokens
    return asked, None if tokens is None else tokens / steps * asked


# ---- published tables ----

def read_table(path, data):
    """Batch of a published table: rows of one seed, rows of one arm, and printed contrasts."""
    table, batch = Path(path).name, Batch()
    for row in [*data.get("runs", ()), *data.get("arm_stats", ())]:
        if "seed" in row:
            batch.runs.append(run_of(row, path, table))
        else:
            add_arm(batch, row, data["metrics"], path, table)
    batch.printed += [finding(row, table) for row in data.get("findings", ())]
    contrasts = data.get("contrasts", data.get("claims"))
    batch.plan = plan_of(contrasts, table)
    batch.names = {short: {arm} for short, arm in data.get("aliases", {}).items()}
    for c in contrasts:
        if "per_seed" in c and "terms" not in c:   # named as "12 - 10"
            for short, arm in zip(c["name"].split(" - "), (c["arm"], c["ref"])):
                batch.names.setdefault(short, set()).add(arm)
    return batch


def add_arm(batch, row, metrics, path, table):
    """Add a row of one arm: `<word>_mean`, `<word>_sd`, and `<word>_bpb_per_seed` by `seeds`.

    metrics: {our name of a metric: the word that the paper has for it}.
    """
    params = row.get("active_params_M", 0) * 1e6 or None
    group = Group(table, row["depth"], row["width"], number(row["steps"]), number(row["tokens"]))
    for metric, word in metrics.items():
        for seed, value in zip(row.get("seeds", ()), row.get(f"{word}_bpb_per_seed") or ()):
            one = {**row, "seed": seed, "metrics": {metric: value}, "params": {"total": params}}
            batch.runs.append(run_of(one, path, table))
        mean, sd = number(row.get(f"{word}_mean")), number(row.get(f"{word}_sd"))
        if mean is not None:
            batch.printed.append(Printed(group, table, row["arm"], metric, mean, sd, params=params))


def finding(row, table):
    """Printed of a row of the ablation log, which names no seeds and divides its sd by n."""
    low, high = row.get("range", (None, None))
    loose = tuple(row["seeds"] or ())
    # losses compare inside one setting and size
    level = [table, row["setting"].split("-")[0], *([row["size"]] if "size" in row else [])]
    rates = {k: row[k] for k in ("lr", "adamw_lr") if row.get(k) is not None}
    return Printed(
        Group(" ".join(level), None, None), table, row.get("config", row["arm"]),
        row.get("metric", "val_loss"), row["val_loss"], row["std"], "n", loose,
        min(loose, default=low), max(loose, default=high),
        row["params_M"] and row["params_M"] * 1e6, rates, row["arm"])


def plan_of(rows, table):
    """[item]: the printed contrasts, each with all of its metrics; claims between two arms."""
    plan = {}
    for c in rows:
        if "margin" in c and "terms" not in c:
            continue   # a claim about something else
        sides = [term[1:] for term in c["terms"]] if "terms" in c else [(c["arm"], c["ref"])]
        terms = tuple(arm for side in sides for arm in side)
        item = {"source": f"{table} {c.get('level', '')}".strip(), "depth": c.get("depth"),
                "table": place_of(c), "row": c.get("row"), "name": c.get("name", " - ".join(terms)),
                "label": c.get("label", c.get("claim")), "terms": terms}
        item = plan.setdefault(str(item), {**item, "printed": {}})
        item["printed"][c.get("metric", "val_loss")] = {
            # a claim may give a range of margins: no one number
            "mean": number(c.get("mean", c.get("margin"))), "sd": number(c.get("sd")),
            "ci95": c.get("ci95")}
    return list(plan.values())


def place_of(c):
    """Where a contrast is printed."""
    if "finding" in c:
        return f"Finding {c['finding']}"
    where = re.sub("^text ", "Section ", c["table"])
    return f"Table {where}" if where[0].isdigit() else where


# ---- files ----

def batch_of(path, data):
    """Batch of a parsed file; ValueError with the reason when it is none of ours or damaged."""
    try:
        if "runs" in data or "findings" in data:
            return read_table(path, data)
        if "schema" not in data:
            raise ValueError("not a result file (no schema)")
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {clean(data['schema'])} instead of {SCHEMA}")
        return Batch([run_of(data, path)])
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as err:
        raise ValueError(f"damaged: {type(err).__name__} {clean(err)}") from None


def expand(names):
    """The files that the arguments name, each once; a folder stands for its *.json."""
    paths = {}
    for name in names:
        path = Path(name)
        if not path.exists():
            raise UserError(f"{name}: no such file; name result files such as results/*.json")
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{name}: a folder without .json files; name result files")
        for p in inside:
            paths.setdefault(p.resolve(), p)
    return list(paths.values())


def read_all(paths):
    """(Batch, [a line for every skipped file])."""
    total, skipped = Batch(), []
    for path in paths:
        try:
            total.add(batch_of(path, json.loads(path.read_bytes())))
        except OSError as err:
            skipped.append(f"skipped {clean(path)}: {err.strerror}")
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            skipped.append(f"skipped {clean(path)}: not readable as JSON (truncated?)")
        except ValueError as err:
            skipped.append(f"skipped {clean(path)}: {clean(err)}")
    return total, skipped


# ---- arms ----

@dataclass(eq=False)
class Arm:
    """The runs of one arm with one setting: a row of the arm table, a side of a contrast."""
    group: Group
    script: str
    base: str       # the arm's name in its script
    label: str      # what tells it from the others of its group
    setting: dict   # the flags that differ from the defaults
    config: dict    # every flag of its first run
    order: list     # the varying flags, for sorting
    params: float = None
    runs: dict = field(default_factory=dict)       # seed -> Run
    printed: dict = field(default_factory=dict)    # metric -> Printed
    values: dict = field(default_factory=dict)     # metric -> {seed: value}, see usable()
    diverged: set = field(default_factory=set)     # seeds
    marks: list = field(default_factory=list)      # [(metric, remark)]

    @property
    def own(self):
        """Is it an arm of the project's own scripts, or of a paper?"""
        return bool(self.group.table) or self.script in OWN_SCRIPTS


def varying(dicts):
    """The keys, sorted, in which these dicts differ; a missing key is the default."""
    def texts(key):
        return {json.dumps(d.get(key), sort_keys=True) for d in dicts}
    return sorted(key for key in set().union(*dicts) if len(texts(key)) > 1)


def make_arms(batch, notes):
    """[Arm] in order of group and name, one per setting.

    UserError when two files hold the same arm, setting and seed.
    """
    found, arms = {}, {}
    for item in [*batch.runs, *batch.printed]:
        found.setdefault((item.group, item.script, item.arm), []).append(item)
    own = Counter((group, arm) for group, script, arm in found if script in OWN_SCRIPTS)
    for place, items in found.items():
        group, script, name = place
        # copies, and arms that two scripts have, bear the script's name
        if not group.table and (script not in OWN_SCRIPTS or own[group, name] > 1):
            name = f"{Path(script).stem}/{name}"
        keys = varying([item.changed for item in items])
        for item in items:
            told = {k: item.changed[k] for k in keys if item.changed.get(k) is not None}
            words = " ".join(f"{k}={show(v)}" for k, v in told.items())
            label = name + (f" [{words}]" if told else "")
            order = [(k, number(v) or 0, show(v)) for k, v in told.items()]
            config = item.config if isinstance(item, Run) else item.changed
            arm = arms.setdefault((place, label), Arm(*place, label, item.changed, config, order))
            arm.params = arm.params if item.params is None else item.params
            if isinstance(item, Printed):
                arm.printed[item.metric] = item
                continue
            other = arm.runs.setdefault(item.seed, item)
            if other is not item:
                twice = f"arm {label}, seed {item.seed} is in two files"
                raise UserError(f"{twice}: {other.path} and {item.path}; name only one of them")
        if keys and isinstance(items[0], Run):
            notes.append(f"arm {name} ({group}) was run with different {', '.join(keys)}: one row "
                         "per setting")
    return sorted(arms.values(), key=_order)


def _order(arm):
    size = [(x is None, x or 0) for x in arm.group[1:5]]
    where = arm.group.table, size, str(arm.group.corpus)
    return *where, arm.base, not arm.own, arm.script, arm.order


def default_metrics(arms, plan):
    """The metrics a group is read in: those of its printed contrasts, else the commonest one."""
    planned = [m for item in plan if item["source"] == arms[0].group.table for m in item["printed"]]
    if planned:
        return list(dict.fromkeys(planned))
    counts = Counter(known_metrics(arms))
    ranked = [*(m for m in PREFERRED if m in counts), *sorted(counts)]
    return sorted(counts, key=lambda m: (-counts[m], ranked.index(m)))[:1]


def known_metrics(arms):
    """The names of the metrics that hold a number, once for every run or printed value."""
    runs = [run.metrics for arm in arms for run in arm.runs.values()]
    found = [m for metrics in runs for m, v in metrics.items() if number(v) is not None]
    return found + [m for arm in arms for m in arm.printed]


def usable(arm, metric, notes):
    """{seed: value} of an arm's finished runs; every run left out is named in notes, once."""
    if metric in arm.values:
        return arm.values[metric]
    kept = arm.values[metric] = {}
    for seed, run in sorted(arm.runs.items()):
        value = run.metrics.get(metric)
        if run.status == "diverged":
            arm.diverged.add(seed)
            why = "status diverged; worse than any value where ranges are compared"
        elif run.status != "finished":
            why = f"status {run.status}"
        elif metric not in run.metrics:
            why = f"no metric {metric}; it has {', '.join(map(clean, run.metrics)) or 'none'}"
        elif number(value) is None:
            why = f"{metric} is {clean(json.dumps(value))[:40]}, not a finite number"
        else:
            kept[seed] = number(value)
            continue
        leave_out(arm, seed, why, notes)
    for key, word in ALIKE.items():
        told = {seed: arm.runs[seed].config.get(key) for seed in kept}
        (most, n), *others = Counter(told.values()).most_common() or [(None, 0)]
        tied = bool(others) and others[0][1] == n
        for seed, value in told.items():
            if tied or value != most:
                rest = "no majority among its seeds" if tied else f"{show(most)} in its other seeds"
                leave_out(arm, seed, f"mixed {word}: {show(value)} here, {rest}", notes)
                del kept[seed]
    return kept


def leave_out(arm, seed, why, notes):
    """Name a run that is left out; once, since another metric may have named it."""
    line = f"left out: {arm.label}, seed {seed} ({arm.runs[seed].path}): {why}"
    notes += [line] if line not in notes else []


def changed_sources(runs):
    """The files that compute results and differ among these runs, where they say; sorted."""
    told = [run for run in runs if run.sources]
    shared = {f: {run.sources[f] for run in told if f in run.sources} for f in COMPUTING}
    # a copy differs from its original, but not from itself
    own = {script: {run.sources.get(script) for run in told if run.script == script}
           for script in {run.script for run in told}}
    return sorted(f for f, digests in {**shared, **own}.items() if len(digests) > 1)
