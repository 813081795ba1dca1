"""README.md and results/README.md: commands parse, tables are the committed results, pictures too."""
import dataclasses
import importlib
import json
import re
import shlex
import subprocess

import pytest

import common
import runs
from helpers import ROOT, sh

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
SCRIPTS = ("train_oe", "train_wm", "ablate")   # the ones with a parse() that touches no file


def commands():
    """[(script, argv)] of the command lines that hold no shell variable or placeholder."""
    found = []
    for line in (README + RESULTS).splitlines():
        line = line.split("  #")[0]
        call = re.match(rf"    .*(?:python|torchrun) .*?({'|'.join(SCRIPTS)})\.py(.*)", line)
        if call and not re.search(r"[$|]|\.\.\. ", call[2]):
            found.append((call[1], shlex.split(call[2])))
    return found


def section(title):
    """The text of results/README.md below a heading, up to the next one."""
    return re.split(r"\n#+ ", RESULTS.split(f"\n## {title}\n")[1])[0]


def results(folder):
    paths = sorted((ROOT / "results" / folder).glob("*.json"))
    return [json.loads(p.read_text(encoding="utf-8")) for p in paths]


def test_there_are_commands():
    assert {script for script, _ in commands()} == set(SCRIPTS) and len(commands()) > 7


def shown(value):
    return value if isinstance(value, str) else " ".join(value)


@pytest.mark.parametrize("script, argv", commands(), ids=shown)
def test_a_command_parses(script, argv, capsys):
    importlib.import_module(script).parse(argv)   # UserError otherwise


def test_the_sizes_of_the_pages():
    for text, most in ((README, 240), (RESULTS, 220)):
        lines = text.splitlines()
        prose = [line for line in lines if not line.startswith(("|", "    ", "!"))]
        assert len(lines) < most and max(map(len, prose)) <= 100


def test_every_file_of_the_house_is_in_the_table():
    table = README.split("## The house")[1].split("\n## ")[0]
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    here = [name for name in files.stdout.split() if "/" not in name]
    assert here and not [name for name in here if name not in table]


def test_laptop_tables_are_the_results():
    text = section("Laptop preset")
    found = re.findall(r"^\| (\w+) \| (1\.\d{4} \| 1\.\d{4} \| 1\.\d{4}) \|$", text, re.M)
    want = {}
    for r in sorted(results("laptop"), key=lambda r: r["seed"]):
        want.setdefault(r["arm"], []).append(r["metrics"]["val_bpb"])
    cells = {arm: " | ".join(f"{v:.4f}" for v in values) for arm, values in want.items()}
    assert dict(found) == cells and len(cells) == 6
    deltas = re.findall(r"^\| (\w+) - (\w+) \| 3 \| ([-+]\d\.\d{4})", text, re.M)
    assert len(deltas) == 5
    for a, b, delta in deltas:
        mean = sum(x - y for x, y in zip(want[a], want[b])) / 3
        assert f"{mean:+.4f}" == delta


def test_wm_tables_are_the_results():
    """Every "validation / held-out" pair is a run's, and every run at the default rates has one."""
    def pair(r):
        return f"{r['metrics']['val_bpb']:.4f} / {r['metrics']['heldout_bpb']:.4f}"
    printed = set(re.findall(r"\d\.\d{4} / \d\.\d{4}", section("Delayed WM on English prose")))
    runs = results("wm")
    assert printed <= {pair(r) for r in runs}
    rates = [(r["config"]["lm_lr"], r["config"]["hidden_lr"]) for r in runs]
    assert {pair(r) for r, rate in zip(runs, rates) if rate == (0.008, 0.006)} <= printed


def test_ablation_table_is_the_results():
    """Parameters, losses by seed, and the mean paired difference from modern, of all configs."""
    text = section("Ablations at 300 iterations")
    runs = {(r["arm"], r["seed"]): r for r in results("ablate")}
    # one seed, which explains another row
    assert f"{runs.pop(('untied', 0))['metrics']['val_loss']:.4f}" in text
    loss = {k: r["metrics"]["val_loss"] for k, r in runs.items()}
    number = r"(\d\.\d{4})"
    row = rf"^\| (\w+) \| ([\d,]{{9}}) \| {number} \| {number} \| {number} \| \d\.\d{{4}} \| ([-+]\d\.\d{{4}})?"
    want = []
    for arm in dict.fromkeys(arm for arm, _ in runs):
        values = [f"{loss[arm, s]:.4f}" for s in range(3)]
        delta = sum(loss[arm, s] - loss["modern", s] for s in range(3)) / 3
        params = f"{runs[arm, 0]['params']['total']:,}"
        want.append((arm, params, *values, f"{delta:+.4f}" if arm != "modern" else ""))
    assert sorted(re.findall(row, text, re.M)) == sorted(want) and len(runs) == 27


def test_cube_table_is_the_results():
    """Pre-install, strict post-install and their difference, for both pools, in every row."""
    keys = ("lm_beta1", "lm_eps", "lm_pool", "clock")
    bpb = {tuple(r["config"][k] for k in keys): r["metrics"]["val_bpb"] for r in results("cube")}
    text = section("Delayed WM on English prose")
    rows = re.findall(r"^\| (0\.[59]), (1e-[48]) \| (.*) \|$", text, re.M)
    for beta1, eps, cells in rows:
        want = []
        for pool in ("entrywise", "row_iso"):
            cell = (float(beta1), float(eps), pool)
            pre, post = bpb[*cell, "stage2_pre"], bpb[*cell, "strict_post"]
            want += [f"{pre:.4f}", f"{post:.4f}", f"{post - pre:+.4f}"]
        assert cells.split(" | ") == want
    assert len(rows) == 4 and len(bpb) == 16


LABELS = {"3c329c78aa7b6cb7": "", "ddb1dd233836a563": "books-ddb1dd"}


@pytest.mark.parametrize("script, folder", [("train_oe", "laptop"), ("train_wm", "wm"),
                                            ("train_wm", "cube"), ("ablate", "ablate")])
def test_committed_results_are_runs_of_todays_flags(script, folder):
    """Their flags still give what they say has changed, and the names of their files."""
    module = importlib.import_module(script)
    fields = {f.name for f in dataclasses.fields(module.Config)}
    paths = sorted((ROOT / "results" / folder).glob("*.json"))
    for path, record in zip(paths, results(folder)):
        flags = {k: v for k, v in record["config"].items() if k in fields}
        flags.update(arm=record["arm"], seed=record["seed"], dtype=module.Config.dtype)
        config = module.Config(**flags)
        base, size, idle = module.naming(config)
        assert common.changed_flags(config, idle) == record["changed"]
        label = LABELS[record["config"]["data_digest"]]
        name = runs.run_name(record["script"], config, base, size, label, idle)
        assert name == record["run"] == path.stem
    assert paths


def words(path):
    """The texts of an SVG, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


def test_the_pictures_are_made_by_one_command(tmp_path):
    """python pictures.py draws what the README shows: the same names and numbers."""
    done = sh("pictures.py", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    linked = re.findall(r"\(pictures/(\w+\.svg)\)", README + RESULTS)
    assert set(linked) == {p.name for p in tmp_path.iterdir()}
    for name in linked:
        fresh = words(tmp_path / name)
        assert fresh == words(ROOT / "pictures" / name) and len(fresh) > 8


def test_published_tables_have_one_reader():
    """Only common.published opens them (verify_props.py, which imports nothing, has its own)."""
    for path in ROOT.glob("*.py"):
        if path.name not in ("common.py", "verify_props.py"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"published\W+(oe|wm|ablate)\.json.*(read_text|open|loads)", text)
    assert common.published("oe") is common.published("oe")
