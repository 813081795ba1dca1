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
# files of the project that compute results; a run's own script is one too
COMPUTING = {"model.py", "optim.py", "loss.py", "fast_weights.py", "batches.py", "data.py", "wm.py",
             "wm_pipeline.py", "wm_kernels.py"}
# what does not name a run, for records that do not say what they changed
NOT_NAMING = {"arm", "seed", "preset", "data", "data_digest", "vocab_size", "out", "out_dir", "run",
              "name", "device", "threads", "ranks", "compile", "impl", "packets", "resume", "force",
              "save_every", "log_every", "eval_every", "micro_batch", "shard", "seeds", "configs"}


class Group(NamedTuple):
    """What must be equal for runs to compare; table names a published table, "" for records."""
    table: str
    depth: Optional[int]
    width: Optional[int]
    steps: Optional[float] = None
    tokens: Optional[float] = None
    corpus: object = None

    def __str__(self):
        depth = "" if self.depth is None else f"d{self.depth}"
        width = "" if self.width is None else f"w{self.width}"
        parts = [" ".join(filter(None, (self.table, depth, width)))]
        for n, unit in ((self.steps, "steps"), (self.tokens, "tokens")):
            parts += [] if n is None else [f"{n:,.0f} {unit}"]
        if self.corpus is not None:
            text = clean(self.corpus)
            # a digest is cut as in the names of runs, a path is not
            parts.append("corpus " + (text[:6] if re.fullmatch("[0-9a-f]{16,}", text) else text))
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
    params: Optional[float] = None
    changed: Optional[dict] = None                # None: an old record, see settings()
    config: dict = field(default_factory=dict)
    alike: dict = field(default_factory=dict)     # what else pairs must agree in, where both say
    sources: dict = field(default_factory=dict)   # {file: digest} of the code that computed it
    curve: object = None                          # as found in the file; see points()

    def points(self):
        """[[step, loss], ...]: the finite points of the loss curve."""
        rows = self.curve if isinstance(self.curve, list) else []
        pairs = [p for p in rows if isinstance(p, list) and len(p) == 2]
        return [p for p in pairs if None not in map(number, p)]


@dataclass
class Printed:
    """An arm's printed mean, sd (by n - 1 or by n), range ends and values, as far as given."""
    group: Group
    script: str
    arm: str
    metric: str
    mean: Optional[float]
    sd: Optional[float] = None
    sd_by: str = "n-1"
    loose: tuple = ()      # values whose seeds are not named, so that nothing pairs with them
    low: Optional[float] = None
    high: Optional[float] = None
    params: Optional[float] = None
    changed: dict = field(default_factory=dict)
    family: str = ""       # what the paper calls this arm, at whatever rate

    @property
    def config(self):
        return self.changed


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
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < TOO_LARGE else None  # False for NaN


def whole(value):
    """The int of a whole number or of its decimal text, else None."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    v = number(value)
    return int(value) if v is not None and v == int(v) else None


def clean(text):
    """The text with control characters replaced: it goes to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def show(value):
    """A flag's value as a label shows it."""
    return f"{value:g}" if isinstance(value, float) else clean(value)


def given(value, kind=number):
    """The value, or None. ValueError where it is no number (or no text): the file was edited."""
    wrong = not isinstance(value, str) if kind is str else number(value) is None
    if value is not None and wrong:
        raise ValueError(f"damaged: {clean(value)[:40]} stands where a {kind.__name__} should")
    return value


def plain(value):
    """The value, as JSON text where it is a list or an object, so that it can be compared."""
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value)


# ---- one record ----

def run_of(data, path, table=""):
    """Run of a dict with a record's keys. ValueError says what is wrong with it."""
    missing = [k for k in ("arm", "seed", "status", "metrics") if k not in data]
    if missing:
        raise ValueError(f"not a whole result record (no {', '.join(missing)})")
    if not isinstance(data["metrics"], dict) or not isinstance(data["arm"], str):
        raise ValueError("arm is no text or metrics no object")
    seed = whole(data["seed"])
    if seed is None:
        raise ValueError(f"seed {clean(json.dumps(data['seed']))} is not a whole number")
    parts = [data.get(k) for k in ("config", "env", "params", "changed")]
    config, env, params, changed = [p if isinstance(p, dict) else None for p in parts]
    config, env, params = config or {}, env or {}, params or {}
    corpus = config.get("data_digest") or env.get("data_digest") or config.get("data")
    group = Group(table, whole(data.get("depth")), whole(data.get("width")),
                  *planned_budget(data, config), plain(corpus))
    sources = env.get("sources") if isinstance(env.get("sources"), dict) else {}
    alike = {"data order": plain(config.get("data_seed")),
             "evaluation tokens": plain(config.get("eval_tokens"))}
    return Run(str(path), group, clean(data.get("script") or table or "?"),
               clean(data["arm"]) or "(unnamed)", seed, clean(data["status"]), data["metrics"],
               number(params.get("total")), {} if table else changed, config, alike, sources,
               data.get("curve"))


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
    contrasts = data["claims" if "findings" in data else "contrasts"]
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
    params = number(row.get("active_params_M")) and row["active_params_M"] * 1e6
    group = Group(table, row["depth"], row["width"], number(row["steps"]), number(row["tokens"]))
    for metric, word in metrics.items():
        for seed, value in zip(row.get("seeds", ()), row.get(f"{word}_bpb_per_seed") or ()):
            one = {**row, "seed": seed, "metrics": {metric: value}, "params": {"total": params}}
            batch.runs.append(run_of(one, path, table))
        if row.get(f"{word}_mean") is not None:
            values = given(row[f"{word}_mean"]), given(row.get(f"{word}_sd"))
            batch.printed.append(Printed(group, table, row["arm"], metric, *values, params=params))


def finding(row, table):
    """Printed of a row of the ablation log, which names no seeds and divides its sd by n."""
    low, high = row.get("range") or (None, None)
    loose = tuple(row["seeds"] or ())
    # losses compare inside one setting and size
    level = [table, row["setting"].split("-")[0], *([row["size"]] if "size" in row else [])]
    return Printed(
        Group(" ".join(level), None, None), table, row.get("config", row["arm"]),
        row.get("metric", "val_loss"), given(row["val_loss"]), given(row["std"]), "n", loose,
        given(min(loose, default=low)), given(max(loose, default=high)),
        row["params_M"] and row["params_M"] * 1e6,
        {k: row[k] for k in ("lr", "adamw_lr") if row.get(k) is not None}, row["arm"])


def plan_of(rows, table):
    """[item]: the printed contrasts, each with all of its metrics; claims between two arms."""
    plan = {}
    for c in rows:
        if "margin" in c and "terms" not in c:
            continue   # a claim about something else
        terms = []
        for sign, arm, ref in c.get("terms") or [["+", c["arm"], c["ref"]]]:
            one = 1 if sign == "+" else -1
            terms += [(one, arm), (-one, ref)]
        item = {"source": f"{table} {c.get('level', '')}".strip(), "depth": c.get("depth"),
                "table": place_of(c), "row": given(c.get("row"), str),
                "name": c.get("name", f"{arm} - {ref}"),
                "label": given(c.get("label", c.get("claim")), str), "terms": tuple(terms)}
        item = plan.setdefault(str(item), {**item, "printed": {}})
        mean, ends = c.get("mean", c.get("margin")), c.get("ci95")
        item["printed"][c.get("metric", "val_loss")] = {
            # a claim may give a range of margins
            "mean": given(mean) if not isinstance(mean, list) else None,
            "sd": given(c.get("sd")), "ci95": ends and [given(end) for end in ends]}
    return list(plan.values())


def place_of(c):
    """Where a contrast is printed."""
    if "finding" in c:
        return f"Finding {c['finding']}"
    where = c["table"]
    if where.startswith("text "):
        return f"Section {where[5:]}"
    return f"Table {where}" if where[0].isdigit() else where


# ---- files ----

def batch_of(path, data):
    """Batch of a parsed file; ValueError with the reason when it is none of ours or damaged."""
    if not isinstance(data, dict):
        raise ValueError("not a result file (no object)")
    try:
        if "runs" in data or "findings" in data:
            return read_table(path, data)
        if data.get("schema") != SCHEMA:
            found = f"schema {clean(data.get('schema'))} instead of {SCHEMA}"
            raise ValueError(found if "schema" in data else "not a result file (no schema)")
        return Batch([run_of(data, path)])
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as err:
        raise ValueError(f"damaged: {type(err).__name__} {clean(err)}") from None


def read_file(path):
    """Batch of one file; ValueError with the reason when it cannot be read."""
    try:
        data = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as err:
        raise ValueError(err.strerror) from None
    except (ValueError, RecursionError):
        raise ValueError("not readable as JSON (truncated?)") from None
    return batch_of(path, data)


def expand(names):
    """The files that the arguments name, each once; a folder stands for its *.json."""
    paths = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(path.glob("*.json"))
            if not inside:
                raise UserError(f"{name}: a folder without .json files; name result files")
        elif path.exists():
            inside = [path]
        else:
            raise UserError(f"{name}: no such file; name result files such as results/*.json")
        for p in inside:
            paths.setdefault(p.resolve(), p)
    return list(paths.values())


def read_all(paths):
    """(Batch, [a line for every skipped file])."""
    total, skipped = Batch(), []
    for path in paths:
        try:
            total.add(read_file(path))
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
    params: Optional[float] = None
    runs: dict = field(default_factory=dict)       # seed -> Run
    printed: dict = field(default_factory=dict)    # metric -> Printed
    values: dict = field(default_factory=dict)     # metric -> {seed: value}, see usable()
    diverged: set = field(default_factory=set)     # seeds
    marks: list = field(default_factory=list)      # [(metric, remark)]
    order: list = field(default_factory=list)      # the varying flags, for sorting

    @property
    def own(self):
        """Is it an arm of the project's own scripts, or of a paper?"""
        return bool(self.group.table) or self.script in OWN_SCRIPTS

    @property
    def config(self):
        """Every flag of its first run."""
        return next((item.config for item in [*self.runs.values(), *self.printed.values()]), {})


def settings(items):
    """[{flag: value}]: what tells the runs of one arm apart.

    That is `changed`. Where a record of the arm lacks it, they are told apart by the flags that
    all of their configs have.
    """
    if all(item.changed is not None for item in items):
        return [item.changed for item in items]
    shared = set.intersection(*[set(item.config) for item in items]) - NOT_NAMING
    return [{k: item.config[k] for k in sorted(shared)} for item in items]


def varying(dicts):
    """The keys, sorted, in which these dicts differ; a missing key is the default."""
    def texts(key):
        return {json.dumps(d.get(key), sort_keys=True) for d in dicts}
    return sorted(key for key in {k for d in dicts for k in d} if len(texts(key)) > 1)


def names_of_arms(found):
    """{(group, script, arm): name}: copies, and arms that two scripts have, bear the script's."""
    own = Counter((group, arm) for group, script, arm in found if script in OWN_SCRIPTS)
    names = {}
    for group, script, arm in found:
        bare = group.table or script in OWN_SCRIPTS and own[group, arm] == 1
        names[group, script, arm] = arm if bare else f"{Path(script).stem}/{arm}"
    return names


def make_arms(batch, notes):
    """[Arm] in order of group and name, one per setting.

    UserError when two files hold the same arm, setting and seed.
    """
    found, arms = {}, {}
    for item in [*batch.runs, *batch.printed]:
        found.setdefault((item.group, item.script, item.arm), []).append(item)
    names = names_of_arms(found)
    for place, items in found.items():
        group, script, base = place
        said = settings(items)
        keys = varying(said)
        for item, setting in zip(items, said):
            told = {k: setting[k] for k in keys if setting.get(k) is not None}
            words = " ".join(f"{k}={show(v)}" for k, v in told.items())
            label = names[place] + (f" [{words}]" if told else "")
            arm = arms.setdefault((*place, label), Arm(group, script, base, label, setting))
            arm.order = [(k, number(v) or 0, show(v)) for k, v in told.items()]
            arm.params = arm.params if item.params is None else item.params
            if isinstance(item, Printed):
                arm.printed[item.metric] = item
                continue
            other = arm.runs.setdefault(item.seed, item)
            if other is not item:
                twice = f"arm {label}, seed {item.seed} is in two files"
                raise UserError(f"{twice}: {other.path} and {item.path}; name only one of them")
        if keys and any(isinstance(item, Run) for item in items):
            notes.append(f"arm {names[place]} ({group}) was run with different "
                         f"{', '.join(keys)}: one row per setting")
    old = [run.path for run in batch.runs if run.changed is None]
    if old:
        notes.append(f"{len(old)} records do not say what they changed ({old[0]}, ...): told apart "
                     "by the flags that all records of an arm have")
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
    ranks = {m: i for i, m in enumerate(PREFERRED)}
    return sorted(counts, key=lambda m: (-counts[m], ranks.get(m, len(ranks)), m))[:1]


def known_metrics(arms):
    """The names of the metrics that hold a number, once for every run or printed value."""
    runs = [run.metrics for arm in arms for run in arm.runs.values()]
    found = [m for metrics in runs for m, v in metrics.items() if number(v) is not None]
    return found + [m for arm in arms for m in arm.printed]


def usable(arm, metric, notes):
    """{seed: value} of an arm's finished runs; every run left out is named in notes, once."""
    if metric in arm.values:
        return arm.values[metric]
    kept = {}
    for seed, run in sorted(arm.runs.items()):
        value, why = run.metrics.get(metric), None
        if run.status != "finished":
            why = f"status {run.status}"
        elif metric not in run.metrics:
            has = ", ".join(map(clean, run.metrics)) or "none"
            why = f"no metric {metric}; it has {has}"
        elif number(value) is None:
            why = f"{metric} is {clean(json.dumps(value))[:40]}, not a finite number"
        if run.status == "diverged":
            arm.diverged.add(seed)
            why += "; worse than any value where ranges are compared"
        line = f"left out: {arm.label}, seed {seed} ({run.path}): {why}"
        if why is None:
            kept[seed] = number(value)
        elif line not in notes:   # other metrics may have named it
            notes.append(line)
    arm.values[metric] = kept
    return kept


def changed_sources(runs):
    """The files that compute results and differ among these runs, where they say; sorted."""
    told = [run for run in runs if run.sources]
    files = COMPUTING | ({told[0].script} if len({run.script for run in told}) == 1 else set())
    return sorted(f for f in files if len({run.sources.get(f) for run in told}) > 1)
