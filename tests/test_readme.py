"""README.md: its commands parse, its result tables are the committed results."""
import importlib
import json
import re
import shlex

import pytest

import common

README = (common.ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = ("train_oe", "train_wm", "ablate")   # the ones with a parse() that touches no file


def commands():
    """[(script, argv)] of the README's command lines that hold no shell variable or placeholder."""
    found = []
    for line in README.splitlines():
        line = line.split("  #")[0]
        if (m := re.match(rf"    .*(?:python|torchrun) .*?({'|'.join(SCRIPTS)})\.py(.*)", line)) and not re.search(r"[$|]|\.\.\. ", m[2]):
            found.append((m[1], shlex.split(m[2])))
    return found


def section(title):
    """The text below a heading, up to the next one."""
    return re.split(r"\n#+ ", README.split(f"\n### {title}\n")[1])[0]


def results(folder):
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted((common.ROOT / "results" / folder).glob("*.json"))]


def test_there_are_commands():
    assert {script for script, _ in commands()} == set(SCRIPTS) and len(commands()) > 12


@pytest.mark.parametrize("script, argv", commands(), ids=lambda v: v if isinstance(v, str) else " ".join(v))
def test_a_command_parses(script, argv, capsys):
    importlib.import_module(script).parse(argv)   # UserError otherwise


def test_laptop_table_is_the_results():
    rows = dict(re.findall(r"^\| (\w+) \| (1\.\d{4} \| 1\.\d{4} \| 1\.\d{4}) \|$", section("Laptop preset"), re.M))
    want = {}
    for r in sorted(results("laptop"), key=lambda r: r["seed"]):
        want.setdefault(r["arm"], []).append(f"{r['metrics']['val_bpb']:.4f}")
    assert rows == {arm: " | ".join(values) for arm, values in want.items()} and len(rows) == 6


def test_wm_tables_are_the_results():
    """Every "validation / held-out" pair is a run's, and every run at the default rates has its pair."""
    def pair(r):
        return f"{r['metrics']['val_bpb']:.4f} / {r['metrics']['heldout_bpb']:.4f}"
    printed = set(re.findall(r"\d\.\d{4} / \d\.\d{4}", section("Delayed WM on English prose")))
    runs = results("wm")
    assert printed <= {pair(r) for r in runs}
    assert {pair(r) for r in runs if (r["config"]["lm_lr"], r["config"]["hidden_lr"]) == (0.008, 0.006)} <= printed


def test_ablation_table_is_the_results():
    """Parameters, the seeds' validation losses and the mean paired difference from modern, of every config that ran."""
    runs = {(r["arm"], r["seed"]): r for r in results("ablate")}
    assert f"{runs.pop(('untied', 0))['metrics']['val_loss']:.4f}" in section("Ablations at 300 iterations")   # one seed, to explain another
    loss = {k: r["metrics"]["val_loss"] for k, r in runs.items()}
    rows = re.findall(r"^\| (\w+) \| ([\d,]{9}) \| (5\.\d{4}|4\.\d{4}) \| (\d\.\d{4}) \| (\d\.\d{4}) \| \d\.\d{4} \| ([-+]\d\.\d{4})?", section("Ablations at 300 iterations"), re.M)
    want = []
    for arm in dict.fromkeys(a for a, _ in runs):
        delta = sum(loss[arm, s] - loss["modern", s] for s in range(3)) / 3
        want.append((arm, f"{runs[arm, 0]['params']['total']:,}", *(f"{loss[arm, s]:.4f}" for s in range(3)), f"{delta:+.4f}" if arm != "modern" else ""))
    assert sorted(rows) == sorted(want) and len(runs) == 27


def test_cube_table_is_the_results():
    """Pre-install, strict post-install and their difference, for both pools, in every row."""
    bpb = {tuple(r["config"][k] for k in ("lm_beta1", "lm_eps", "lm_pool", "clock")): r["metrics"]["val_bpb"] for r in results("cube")}
    rows = re.findall(r"^\| (0\.[59]), (1e-[48]) \| (.*) \|$", section("Delayed WM on English prose"), re.M)
    for beta1, eps, cells in rows:
        want = []
        for pool in ("entrywise", "row_iso"):
            pre, post = (bpb[float(beta1), float(eps), pool, clock] for clock in ("stage2_pre", "strict_post"))
            want += [f"{pre:.4f}", f"{post:.4f}", f"{post - pre:+.4f}"]
        assert cells.split(" | ") == want
    assert len(rows) == 4 and len(bpb) == 16
