"""Reads result files and the published tables (published/*.json) into one shape: runs, printed summaries, printed contrasts.

    result record         common.result_record, one file a run         -> one Run
    published/oe.json     per-seed values of every arm                 -> Runs, Printed arms, the contrasts of its tables as a plan
    published/wm.json     per-seed values and arms with a mean only    -> Runs, Printed arms, the contrasts of its prose as a plan
    published/ablate.json means and seed ranges whose seeds are not named -> Printed arms, its claims as a plan
"""
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from common import SCHEMA, UserError

TOO_LARGE = 1e100  # beyond it sums of squares overflow; no loss is that large
PREFERRED = ("val_bpb", "val_loss", "heldout_bpb")
# where a run was computed and stored is no part of what was computed; budget and corpus are compared on their own
NOT_CONFIG = {"arm", "seed", "data_seed", "data", "data_digest", "eval_tokens", "out", "out_dir", "run", "name", "preset", "device",
              "threads", "ranks", "compile", "resume", "force", "save_every", "log_every", "eval_every", "shard", "seeds", "configs"}


@dataclass
class Run:
    """One result file, or one row of a published table."""
    path: str
    script: str
    depth: Optional[int]
    width: Optional[int]
    arm: str
    seed: int
    status: str
    metrics: dict
    params: Optional[float] = None
    budget: dict = field(default_factory=dict)  # what must agree within an arm and within a pair: steps, tokens, corpus, ...
    config: dict = field(default_factory=dict)
    curve: object = None  # as found in the file; points() makes sense of it

    def points(self):
        """[[step, loss], ...]: the finite points of the loss curve."""
        rows = self.curve if isinstance(self.curve, list) else []
        return [p for p in rows if isinstance(p, list) and len(p) == 2 and None not in map(number, p)]


@dataclass
class Printed:
    """An arm's printed summary: mean, sd (by n - 1 or by n), range ends and seed values as far as a paper gives them."""
    script: str
    depth: Optional[int]
    width: Optional[int]
    arm: str
    metric: str
    mean: Optional[float]
    sd: Optional[float] = None
    sd_by: str = "n-1"
    loose: tuple = ()  # values whose seeds are not named, so that nothing can be paired with them
    low: Optional[float] = None
    high: Optional[float] = None
    params: Optional[float] = None
    config: dict = field(default_factory=dict)
    finding: Optional[int] = None


@dataclass
class Batch:
    """What a set of files holds; plan: contrasts that a paper prints, names: its short names."""
    runs: list = field(default_factory=list)
    printed: list = field(default_factory=list)
    plan: list = field(default_factory=list)
    names: dict = field(default_factory=dict)


def size(group):
    """A group as text: script, depth, width."""
    script, depth, width = group
    return script + (f" d{depth}" if depth is not None else "") + (f" w{width}" if width is not None else "")


def show(value):
    """A config value as a label shows it."""
    return f"{value:g}" if isinstance(value, float) else clean(value)


def number(value):
    """The float of a finite JSON number of sane size, else None (bool, text, null, NaN, infinities, beyond TOO_LARGE)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < TOO_LARGE else None  # False for NaN


def whole(value):
    """The int of a whole number or of its decimal text, else None."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return int(value) if (v := number(value)) is not None and v == int(v) else None


def clean(text):
    """The text with control characters replaced: it goes to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


def read_record(path, data):
    """Batch of one result record (common.result_record). ValueError says what is wrong with it."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema {clean(data['schema'])} instead of {SCHEMA}" if "schema" in data else "not a result file (no schema)")
    missing = [k for k in ("arm", "seed", "status", "metrics") if k not in data]
    if missing or not isinstance(data["metrics"], dict) or not isinstance(data["arm"], str):
        raise ValueError(f"not a whole result record (no {', '.join(missing)})" if missing else "arm is no text or metrics no object")
    if (seed := whole(data["seed"])) is None:
        raise ValueError(f"seed {clean(json.dumps(data['seed']))} is not a whole number")
    config, env, params = (data.get(k) if isinstance(data.get(k), dict) else {} for k in ("config", "env", "params"))
    plain = lambda v: v if v is None or isinstance(v, (str, int, float)) else json.dumps(v)
    budget = {"steps": number(data.get("steps")), "tokens": number(data.get("tokens")),
              "corpus": plain(config.get("data_digest") or env.get("data_digest") or config.get("data")),
              "data order": plain(config.get("data_seed")), "evaluation tokens": plain(config.get("eval_tokens"))}
    return Batch([Run(str(path), clean(data.get("script") or "?"), whole(data.get("depth")), whole(data.get("width")),
                      clean(data["arm"]) or "(unnamed)", seed, clean(data["status"]), data["metrics"],
                      number(params.get("total")), budget, config, data.get("curve"))])


def read_oe(path, data):
    """Batch of published/oe.json: runs at six decimals, printed arms, every contrast the paper tabulates."""
    setup, params = data["setup"], {(a["depth"], n): a["params_total"] for a in data["accounting"]["table1b"] for n in a["arms"]}
    budget = {"steps": setup["steps"], "tokens": setup["tokens_total"]}
    width = {int(d): w for d, w in setup["d_model"].items()}
    at = lambda r: ("oe.json", r["depth"], width[r["depth"]], r["arm"])
    runs = [Run(str(path), *at(r), r["seed"], "finished", {m: r[m] for m in ("val_bpb", "heldout_bpb")},
                params.get((r["depth"], r["arm"])), budget) for r in data["runs"]]
    printed = [Printed(*at(a), m + "_bpb", a[m + "_mean"], a[m + "_sd"]) for a in data["arm_stats"] for m in ("val", "heldout")]
    plan, names = {}, {short: {arm} for short, arm in data["aliases"].items()}
    for c in data["contrasts"]:
        terms = [(1 if s == "+" else -1, a, -1 if s == "+" else 1, r) for s, a, r in c.get("terms") or [["+", c["arm"], c["ref"]]]]
        terms = tuple(pair for sa, a, sr, r in terms for pair in ((sa, a), (sr, r)))
        table, row = "Section " + c["table"][5:] if c["table"].startswith("text ") else "Table " + c["table"], c["row"]
        key = (c["depth"], table, row, c["name"])
        item = plan.setdefault(key, {"script": "oe.json", "depth": c["depth"], "table": table, "row": row, "name": c["name"],
                                     "label": c["label"], "terms": terms, "printed": {}})
        item["printed"][c["metric"]] = {k: c[k] for k in ("mean", "sd", "ci95")}
        if len(terms) == 2:
            for short, arm in zip(c["name"].split(" - "), (c["arm"], c["ref"])):
                names.setdefault(short, set()).add(arm)
    return Batch(runs, printed, list(plan.values()), names)


def read_wm(path, data):
    """Batch of published/wm.json; val_bpb is its DEV BPB, heldout_bpb its VAL-B BPB (mean and sd only), params are those trained."""
    runs, printed = [], []
    for r in data["runs"]:
        at = ("wm.json", 8 if r["regime"] == "native50m" else 6, r["width"], r["arm"])
        params = r["active_params_M"] * 1e6
        budget = {"steps": r["steps"], "tokens": r["tokens_M"] * 1e6}
        runs += [Run(str(path), *at, s, "finished", {"val_bpb": v}, params, budget)
                 for s, v in zip(r["seeds"], r["dev_bpb_per_seed"] or [])]
        printed += [Printed(*at, m, r.get(k + "_mean"), r.get(k + "_sd"), params=params)
                    for m, k in (("val_bpb", "dev"), ("heldout_bpb", "valb")) if r.get(k + "_mean") is not None]
    plan = [{"script": "wm.json", "depth": None, "table": f"Section {c['source']}" if c["source"][0].isdigit() else c["source"],
             "row": None, "name": f"{c['arm']} - {c['ref']}", "label": c["name"], "terms": ((1, c["arm"]), (-1, c["ref"])),
             "printed": {"val_bpb": {"mean": c["mean"], "sd": c["sd"], "ci95": None}}} for c in data["contrasts"]]
    return Batch(runs, printed, plan, {})


def read_ablate(path, data):
    """Batch of published/ablate.json: printed arms only, since the log names no seeds; its claims are the plan."""
    printed = []
    for f in data["findings"]:
        low, high = f.get("range") or (None, None)
        loose = tuple(f["seeds"] or ())
        level = " ".join(["ablate.json", f["setting"].split("-")[0], *([f["size"]] if "size" in f else [])])  # losses compare inside one
        printed.append(Printed(level, None, None, f["arm"], f.get("metric", "val_loss"),
                               f["val_loss"], f["std"], "n", loose, min(loose, default=low), max(loose, default=high),
                               f["params_M"] and f["params_M"] * 1e6,
                               {k: f[k] for k in ("lr", "adamw_lr") if f.get(k) is not None}, f["finding"]))

    def find(text, claim):
        base, _, last = (text or "").rpartition(" ")
        lr = float(last) if base and re.fullmatch(r"[\d.]+(e-?\d+)?", last) else None
        named = [p for p in printed if p.arm == (text if lr is None else base) and "adamw_lr" not in p.config]
        named = [p for p in named if lr is None or p.config.get("lr") == lr]
        return [p for p in named if p.finding == claim["finding"]] or named

    plan = []
    for c in data["claims"]:
        pairs = [(a, b) for a in find(c.get("arm"), c) for b in find(c.get("ref"), c) if a.script == b.script]
        if len(pairs) == 1 and "size" not in c:
            a, b = pairs[0]
            plan.append({"script": a.script, "depth": None, "table": f"Finding {c['finding']}", "row": None,
                         "name": f"{c['arm']} - {c['ref']}", "label": c["claim"], "terms": ((1, a.arm, a.config), (-1, b.arm, b.config)), "claim": c,
                         "printed": {a.metric: {"mean": c["margin"], "sd": None, "ci95": None}}})
    return Batch([], printed, plan, {})


def checked(batch):
    """The batch, when every name in it is text and every number one. ValueError names what is not: a published file was edited."""
    for x in [*batch.runs, *batch.printed]:
        numbers = {"depth": x.depth, "width": x.width, "params": x.params}
        if isinstance(x, Printed):
            numbers |= {"mean": x.mean, "sd": x.sd, "range": x.low, "range end": x.high, **dict(enumerate(x.loose))}
        wrong = [k for k, v in numbers.items() if v is not None and number(v) is None]
        if not isinstance(x.arm, str) or wrong or isinstance(x, Run) and whole(x.seed) is None:
            raise ValueError(f"damaged: arm {clean(x.arm)}: {', '.join(map(str, wrong)) or 'name or seed'} is wrong")
    for item in batch.plan:
        texts = [item[k] for k in ("name", "label", "row", "table") if item[k] is not None]
        values = [v for p in item["printed"].values() for x in p.values() for v in (x if isinstance(x, list) else [x]) if v is not None]
        if not all(isinstance(x, str) for x in texts) or any(number(v) is None for v in values):
            raise ValueError(f"damaged: contrast {clean(item['name'])} is wrong")
    return batch


def read_file(path):
    """Batch of one file; ValueError with the reason when it cannot be read or is none of ours."""
    try:
        data = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as err:
        raise ValueError(err.strerror) from None
    except (ValueError, RecursionError):
        raise ValueError("not readable as JSON (truncated?)") from None
    if not isinstance(data, dict):
        raise ValueError("not a result file (no object)")
    readers = {("runs", "arm_stats"): read_oe, ("runs", "cosines"): read_wm, ("findings", "claims"): read_ablate}
    reader = next((r for keys, r in readers.items() if all(k in data for k in keys)), read_record)
    try:
        return checked(reader(path, data))
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as err:
        raise ValueError(f"damaged: {type(err).__name__} {clean(err)}") from None


def expand(names):
    """The files that the arguments name, each once; a folder stands for its *.json. UserError for a missing or empty one."""
    paths = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(path.glob("*.json"))
            if not inside:
                raise UserError(f"{name}: a folder without .json files; name result files")
            paths.update((p.resolve(), p) for p in inside)
        elif not path.exists():
            raise UserError(f"{name}: no such file; name result files such as results/*.json")
        else:
            paths.setdefault(path.resolve(), path)
    return list(paths.values())


def read_all(paths):
    """(Batch, [line for every skipped file]). UserError when nothing is left."""
    total, skipped = Batch(), []
    for path in paths:
        try:
            batch = read_file(path)
        except ValueError as err:
            skipped.append(f"skipped {clean(path)}: {clean(err)}")
            continue
        total.runs += batch.runs
        total.printed += batch.printed
        total.plan += batch.plan
        for short, arms in batch.names.items():
            total.names.setdefault(short, set()).update(arms)
    return total, skipped


# ---- arms ----

@dataclass(eq=False)
class Cell:
    """The runs of one arm with one config: what a row of the arm table shows and a contrast subtracts."""
    script: str
    depth: Optional[int]
    width: Optional[int]
    base: str
    arm: str
    setting: dict
    params: Optional[float] = None
    runs: dict = field(default_factory=dict)     # seed -> Run
    printed: dict = field(default_factory=dict)  # metric -> Printed
    values: dict = field(default_factory=dict)   # metric -> {seed: value}, filled by usable()
    marks: list = field(default_factory=list)

    @property
    def group(self):
        return self.script, self.depth, self.width


def varying(configs):
    """The keys, sorted, in which these configs differ (a missing key is None)."""
    keys = {k for c in configs for k in c} - NOT_CONFIG
    return sorted(k for k in keys if len({json.dumps(c.get(k), sort_keys=True) for c in configs}) > 1)


def make_cells(batch, notes):
    """[Cell] in order of group and arm. One cell per config; UserError when two files hold the same arm, config and seed."""
    found, cells = {}, {}
    for item in [*batch.runs, *batch.printed]:
        found.setdefault((item.script, item.depth, item.width, item.arm), []).append(item)
    for (script, depth, width, base), items in found.items():
        keys = varying([i.config for i in items])
        for item in items:
            setting = {k: item.config[k] for k in keys if item.config.get(k) is not None}
            label = base + (f" [{' '.join(f'{k}={show(v)}' for k, v in setting.items())}]" if setting else "")
            cell = cells.setdefault((script, depth, width, label), Cell(script, depth, width, base, label, setting))
            cell.params = cell.params if item.params is None else item.params
            if isinstance(item, Printed):
                cell.printed[item.metric] = item
            elif (other := cell.runs.setdefault(item.seed, item)) is not item:
                raise UserError(f"arm {label}, seed {item.seed} is in two files: {other.path} and {item.path}; name only one of them")
        if keys and any(isinstance(i, Run) for i in items):
            notes.append(f"arm {base} ({size((script, depth, width))}) was run with different {', '.join(keys)}: one row per config")
    order = lambda c: (c.script, c.depth or 0, c.width or 0, c.base, [(k, number(v) or 0, show(v)) for k, v in c.setting.items()])
    return sorted(cells.values(), key=order)


def default_metrics(cells, plan):
    """The metrics a group is read in: those of its printed contrasts, else the one most runs have (ties: val_bpb, val_loss, ...)."""
    planned = {m: None for item in plan if item["script"] == cells[0].script for m in item["printed"]}
    if planned:
        return list(planned)
    counts = Counter(m for c in cells for r in c.runs.values() for m, v in r.metrics.items() if number(v) is not None)
    counts.update(m for c in cells for m in c.printed)
    rank = {m: i for i, m in enumerate(PREFERRED)}
    return sorted(counts, key=lambda m: (-counts[m], rank.get(m, len(rank)), m))[:1]


def usable(cell, metric, notes):
    """{seed: value} of a cell's finished runs with one common budget; every run left out is named in notes, once."""
    if metric in cell.values:
        return cell.values[metric]
    kept, out = {}, lambda run, why: notes.append(f"left out: {cell.arm}, seed {run.seed} ({run.path}): {why}")
    for seed, run in sorted(cell.runs.items()):
        value = run.metrics.get(metric)
        if run.status != "finished":
            out(run, f"status {run.status}")
        elif metric not in run.metrics:
            out(run, f"no metric {metric}; it has {', '.join(map(clean, run.metrics)) or 'none'}")
        elif number(value) is None:
            out(run, f"{metric} is {clean(json.dumps(value))[:40]}, not a finite number")
        else:
            kept[seed] = number(value)
    for key in sorted({k for s in kept for k in cell.runs[s].budget}):
        counts = Counter(cell.runs[s].budget.get(key) for s in kept).most_common(2)
        tied = len(counts) > 1 and counts[0][1] == counts[1][1]
        for seed in [s for s in kept if tied or cell.runs[s].budget.get(key) != counts[0][0]] if len(counts) > 1 else []:
            others = "no majority among its seeds" if tied else f"{show(counts[0][0])} in the arm's other seeds"
            out(cell.runs[seed], f"mixed {key}: {show(cell.runs[seed].budget.get(key))} here, {others}")
            del kept[seed]
    cell.values[metric] = kept
    return kept
