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
