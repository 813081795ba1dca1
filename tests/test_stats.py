"""stats.py on result files: arms, pairing, names, statistics, outputs, the page in a browser."""
import base64
import contextlib
import csv
import io
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import report
import stats
from common import cli
from records import Group
from report import Row

ROOT = Path(__file__).resolve().parent.parent
OE_FILE = str(ROOT / "published" / "oe.json")
SOURCES = {"model.py": "m1", "optim.py": "o1", "train_oe.py": "t1", "train_mine.py": "c1", "stats.py": "s1"}


def run(*argv):
    """(exit code, stdout, stderr) of `python stats.py argv`, in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as exit:
        cli(stats.main, [str(a) for a in argv])
    return exit.value.code, *(f.buffer.getvalue().decode() for f in (out, err))


def load(*argv, code=0):
    got, out, err = run(*argv, "--json")
    assert got == code, err
    return json.loads(out)


def refused(*argv):
    """The one line of an error with exit code 2."""
    code, out, err = run(*argv)
    last = err.strip().splitlines()[-1]
    assert code == 2 and out == "" and last.startswith("error: ") and "Traceback" not in err
    return last


@pytest.fixture
def results(tmp_path):
    """write(arm, seed, value, changed, config, **fields): one result file in write.folder; more config is no change."""
    count = itertools.count()

    def write(arm, seed, value, changed={}, config={}, **fields):
        flags = {"seed": seed, "data": "stores/a", "data_digest": "d1", "steps": 100, **(changed or {}), **config}
        record = dict(
            schema=1, script="train_oe.py", run=f"{arm}_{seed}", arm=arm, status="finished", seed=seed, depth=2, width=128,
            config=flags, changed=changed, params={"backbone": 1000, "oe": 0, "total": 1000}, steps=100, tokens=6400,
            metrics={"val_bpb": value}, curve=[[0, 9.0], [50, 4.0], [100, 3.0]], timing={}, env={"sources": SOURCES})
        record |= fields
        if changed is None:   # a record of before
            del record["changed"]
        path = tmp_path / "in" / f"{next(count):03d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record), encoding="utf-8")
        return path
    write.folder = tmp_path / "in"
    return write


def three(results, **arms):
    """Seeds 1, 2, ... of every arm with these values."""
    return {name: [results(name, s, v) for s, v in enumerate(values, 1)] for name, values in arms.items()}


# ---- statistics against references ----

def test_intervals_and_p_agree_with_scipy_for_n_2_to_30():
    from scipy.stats import ttest_rel
    rng = np.random.default_rng(7)
    for n in range(2, 31):
        a, b = rng.normal(1, 0.01, n), rng.normal(1.005, 0.01, n)
        deltas = list(a - b)
        for alpha in (0.05, 0.01, 0.4):
            reference = ttest_rel(a, b).confidence_interval(1 - alpha)
            assert stats.interval(deltas, alpha) == pytest.approx((reference.low, reference.high), rel=1e-9, abs=1e-15)
        assert stats.p_value(deltas) == pytest.approx(ttest_rel(a, b).pvalue, rel=1e-9)
        assert stats.deviation(deltas) == pytest.approx(np.std(deltas, ddof=1), rel=1e-10)
    assert stats.interval([-1.0, 0.0, 1.0], 0.05)[1] * math.sqrt(3) == pytest.approx(4.302652729911275, rel=1e-9)


def test_power_against_simulation():
    from scipy.stats import t
    rng = np.random.default_rng(3)
    for n, effect in ((3, 1.5), (5, 0.9), (12, 0.8)):
        x = rng.normal(effect, 1, (200_000, n))
        hits = np.abs(x.mean(1) / x.std(1, ddof=1) * math.sqrt(n)) > t.ppf(0.975, n - 1)
        assert stats.power(n, effect, 0.05) == pytest.approx(hits.mean(), abs=0.004)


def test_power_against_integration_where_scipy_has_nan():
    """P(|T| > t) = E over s of Phi(nc - t s) + Phi(-nc - t s), s^2 a chi-square over its degrees of freedom."""
    from scipy.special import gammaln, ndtr, nctdtr, stdtrit
    nans = 0
    for n in (2, 3, 5, 10, 30):
        t, df, u = stdtrit(n - 1, 0.975), n - 1, np.linspace(-30, 5, 200_001)
        s = np.exp(u)
        density = np.exp(math.log(2) + df / 2 * math.log(df / 2) - gammaln(df / 2) + df * u - df * s * s / 2)
        for shift in np.linspace(0.1, 40, 60):
            exact = np.trapezoid((ndtr(shift - t * s) + ndtr(-shift - t * s)) * density, u)
            assert stats.power(n, shift / math.sqrt(n), 0.05) == pytest.approx(exact, abs=2e-6)
            nans += math.isnan(nctdtr(df, shift, -t))
    assert nans > 10


def test_seeds_needed_and_detectable_difference():
    assert stats.seeds_needed(0.5, 1.0, 0.05) == 34  # the textbook answer for a paired t-test at d = 0.5
    assert stats.seeds_needed(0.8, 1.0, 0.05) == 15
    assert stats.seeds_needed(1.0, 0.0, 0.05) == 2 and stats.seeds_needed(1e-9, 1.0, 0.05) is None
    for delta in (0.3, 1.0, 2.5):
        n = stats.seeds_needed(delta, 1.0, 0.05)
        assert stats.power(n, delta, 0.05) >= 0.8 and (n == 2 or stats.power(n - 1, delta, 0.05) < 0.8)
    for n in (2, 3, 8):
        assert stats.power(n, stats.detectable(n, 2.0, 0.05) / 2.0, 0.05) == pytest.approx(0.8, abs=1e-6)
    assert stats.detectable(2, 1.0, 1e-9) is None  # beyond scipy's non-central t: said, not guessed


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]


INF = math.inf


@pytest.mark.parametrize("a, b, apart", [
    ([1, 2], [3, 4], True), ([3, 4], [1, 2], True), ([1, 3], [2, 4], False), ([1, 2], [2, 3], False), ([1], [2, 3], None), ([], [], None),
    ([1, INF], [3, 4], False), ([1, 2], [3, INF], True), ([INF, INF], [3, 4], True), ([INF, INF], [3, INF], False)])
def test_separated(a, b, apart):
    """A diverged seed is worse than any value."""
    assert stats.separated(a, b) is apart


@pytest.mark.parametrize("points, edge", [
    ({1: {0: 3.0}, 2: {0: 2.0}, 4: {0: 2.5}}, None), ({1: {0: 1.9}, 2: {0: 2.0}}, 1), ({4: {0: 1.0}, 2: {0: 2.0}}, 4), ({1: {0: 1.0}}, None),
    ({1: {0: 3.0}, 2: {0: 2.0}, 4: {0: INF}}, None), ({1: {0: 1.0, 1: 1.0}, 2: {0: 2.0, 1: INF}, 3: {}}, 1), ({1: {0: INF}, 2: {0: INF}}, None),
    ({1: {0: 5.0, 1: 1.0}, 2: {0: 4.0}, 3: {0: 4.5, 1: 9.0}}, None)])   # over the shared seed alone
def test_edge_of_a_bracket(points, edge):
    assert stats.edge_of(points) == edge


def test_one_seed_has_no_interval_and_says_so(results):
    three(results, modern=[1.0], other=[0.9])
    code, out, _ = run(results.folder)
    assert code == 0 and "none (n = 1)" in out
    c, = load(results.folder)["contrasts"]
    assert (c["n"], c["sd"], c["ci95"], c["separated"]) == (1, None, None, None) and c["mean"] == pytest.approx(-0.1)


def test_two_equal_deltas_are_marked(results):
    three(results, modern=[1.0, 1.1], other=[0.9, 1.0])
    assert "sd 0: are the runs copies?" in run(results.folder, "--power", 0.01, "--holm")[1]
    c, = load(results.folder, "--holm")["contrasts"]
    assert c["sd"] == 0 and c["p"] is None and c["ci95"][0] == c["ci95"][1]


# ---- which runs are one arm ----

def test_a_copy_of_a_script_stands_beside_its_original(results):
    """No flag is needed, also where the copy's arm has the reference's name."""
    for seed in (1, 2):
        results("00_dense_native", seed, 1.0 + seed / 9)
        for arm in ("00_dense_native", "12_oe_joint"):
            results(arm, seed, 0.9 + seed / 8, script="train_mine.py")
    got = load(results.folder)
    assert [a["arm"] for a in got["arms"]] == ["00_dense_native", "train_mine/00_dense_native", "train_mine/12_oe_joint"]
    assert [c["name"] for c in got["contrasts"]] == [f"train_mine/{arm} - 00_dense_native" for arm in ("00_dense_native", "12_oe_joint")]
    results("12_oe_joint", 1, 0.9)   # now the copy is held against what it copies as well
    assert "train_mine/12_oe_joint - 12_oe_joint" in {c["name"] for c in load(results.folder)["contrasts"]}
    assert "no arm '12_oe'" in refused(results.folder, "--contrast", "12_oe - 00")
    c, = load(results.folder, "--contrast", "train_mine/12_oe_joint - 00")["contrasts"]
    assert c["name"] == "train_mine/12_oe_joint - 00_dense_native"
    for path in results.folder.glob("*.json"):   # the copy alone: its own arms are all there is
        if json.loads(path.read_text())["script"] != "train_mine.py":
            path.unlink()
    assert {c["name"] for c in load(results.folder)["contrasts"]} == {"train_mine/12_oe_joint - train_mine/00_dense_native"}
    assert "near: train_mine/12_oe_joint" in refused(results.folder, "--contrast", "12_oe_joint - 00_dense_native")


def test_equal_names_of_two_own_scripts_are_told_apart(results):
    results("modern", 1, 1.0), results("modern", 1, 2.0, script="ablate.py")
    assert {a["arm"]: a["mean"] for a in load(results.folder)["arms"]} == {"train_oe/modern": 1.0, "ablate/modern": 2.0}


def test_a_flag_that_an_old_record_lacks_has_its_default(results):
    for seed in (1, 2):
        results("modern", seed, 1.0), results("x", seed, 0.9, {"lr": 1})
    results("modern", 3, 1.1, {}, {"new_flag": 0}), results("x", 3, 0.8, {"lr": 1}, {"new_flag": 0})
    assert [a["n"] for a in load(results.folder)["arms"]] == [3, 3]
    results("x", 4, 0.8, {"lr": 1, "new_flag": 2})
    assert [a["arm"] for a in load(results.folder)["arms"]] == ["modern", "x", "x [new_flag=2]"]


def test_how_a_run_was_computed_splits_no_arm(results):
    for s in (1, 2, 3):
        where = {"out": f"o{s}", "device": "cpu", "threads": s, "save_every": s, "resume": s == 1, "compile": s == 2, "impl": f"i{s}",
                 "micro_batch": s, "data": f"stores/{s}"}
        results("modern", s, 1.0, {}, where), results("old", s, 1.0, None, where)
    got = load(results.folder)
    assert [a["n"] for a in got["arms"]] == [3, 3]
    assert sum("records do not say what they changed" in n for n in got["notes"]) == 1


def test_records_without_changed_are_told_apart_by_their_config(results):
    for s in (1, 2):
        results("x", s, 1.0, None, {"lr": 1}), results("x", s, 2.0, None, {"lr": 2, "new_flag": 0})
    assert {a["arm"]: a["mean"] for a in load(results.folder)["arms"]} == {"x [lr=1]": 1.0, "x [lr=2]": 2.0}


def test_other_code_is_said_once(results):
    three(results, modern=[1.0, 1.1], x=[0.9, 1.0], y=[0.8, 0.9])
    assert not any("same code" in n for n in load(results.folder)["notes"])
    for arm in ("x", "y"):
        results(arm, 3, 0.9, env={"sources": {**SOURCES, "optim.py": "o2", "stats.py": "s2", "train_mine.py": "c2"}})
    results("modern", 3, 1.0), results("z", 3, 1.0, script="train_mine.py", env={})
    note, = [n for n in load(results.folder)["notes"] if "same code" in n]
    assert note.startswith("not the same code: optim.py changed between the runs of x - modern and 1 more")


# ---- pairing ----

def test_pairing_is_by_seed_whatever_the_order_of_files(results):
    a = [results("modern", s, v) for s, v in ((1, 1.0), (2, 2.0), (3, 4.0))]
    b = [results("x", s, v) for s, v in ((3, 4.1), (1, 1.2), (2, 2.3))]
    first = load(*a, *b)["contrasts"]
    assert first[0]["per_seed"] == pytest.approx({"1": 0.2, "2": 0.3, "3": 0.1})
    for order in itertools.islice(itertools.permutations(a + b), 5, 720, 97):
        assert load(*order)["contrasts"] == first


def test_missing_seeds_are_named_and_left_out(results):
    for s in (1, 2, 3):
        results("modern", s, 1 + s / 10)
    for s in (2, 3, 4):
        results("x", s, 1 + s / 10 - 0.05 * s)
    code, out, _ = run(results.folder)
    assert code == 0 and "left out of x - modern" in out
    assert "seed 1 unpaired (not in x)" in out and "seed 4 unpaired (not in modern)" in out
    c, = load(results.folder)["contrasts"]
    assert sorted(c["per_seed"]) == ["2", "3"] and c["mean"] == pytest.approx(-0.125) and "seeds left out" in c["marks"]


def test_duplicate_seeds_are_refused_with_both_files(results):
    first, second = results("modern", 1, 1.0), results("modern", 1, 1.1)
    line = refused(results.folder)
    assert "arm modern, seed 1 is in two files" in line and str(first) in line and str(second) in line


def test_a_file_named_twice_is_one_file(results):
    path = results("modern", 1, 1.0)
    results("x", 1, 0.9)
    assert len(load(path, path, results.folder, str(results.folder) + "/../in/000.json")["arms"]) == 2


@pytest.mark.parametrize("fields, why", [
    ({"status": "diverged", "steps": 7, "tokens": 448}, "status diverged; worse than any value"), ({"status": "stopped"}, "status stopped"),
    ({"status": "crashed\x1b[31m"}, r"status crashed\?"),
    ({"metrics": {"val_bpb": float("nan")}}, "val_bpb is NaN, not a finite number"), ({"metrics": {"val_bpb": None}}, "val_bpb is null"),
    ({"metrics": {"val_bpb": 1e308}}, r"val_bpb is 1e\+308, not"), ({"metrics": {"val_bpb": "1.0"}}, 'val_bpb is "1.0"'),
    ({"metrics": {"val_bpb": True}}, "val_bpb is true"), ({"metrics": {"val_loss": 1.0}}, "no metric val_bpb; it has val_loss"),
    ({"metrics": {}}, "no metric val_bpb; it has none")])
def test_unusable_runs_are_named_and_left_out(results, fields, why):
    three(results, modern=[1.0, 1.1, 1.3], x=[0.9, 1.0])
    bad = results("x", 3, 0.5, **fields)
    code, out, _ = run(results.folder)
    assert code == 0
    assert re.search(rf"left out: x, seed 3 \({re.escape(str(bad))}\): {why}", out), out
    arm = next(a for a in load(results.folder)["arms"] if a["arm"] == "x")
    assert sorted(arm["per_seed"]) == ["1", "2"] and arm["mean"] == pytest.approx(0.95)
    c, = load(results.folder)["contrasts"]
    assert sorted(c["per_seed"]) == ["1", "2"] and c["mean"] == pytest.approx(-0.1)


def test_a_diverged_seed_is_worse_than_any_value(results):
    """Left out of mean and interval, but its arm's range reaches to infinity, as in ablate.py."""
    three(results, modern=[1.0, 1.1, 1.2], x=[0.7, 0.8], y=[1.3, 1.4])
    assert {c["name"]: c["separated"] for c in load(results.folder)["contrasts"]} == {"x - modern": True, "y - modern": True}
    for arm in ("x", "y"):
        results(arm, 3, 0.5, status="diverged", metrics={})
    got = {c["name"]: c for c in load(results.folder)["contrasts"]}
    assert {name: c["separated"] for name, c in got.items()} == {"x - modern": False, "y - modern": True}
    assert got["x - modern"]["n"] == 2 and got["x - modern"]["mean"] == pytest.approx(-0.3)


BUDGETS = [({"steps": 50}, "50 steps"), ({"tokens": 12800}, "12,800 tokens"), ({"config": {"data_digest": "d2"}}, "corpus d2"),
           ({"depth": 4}, "d4 w128"), ({"width": 64}, "d2 w64"), ({"config": {"data": ["a", "b"], "data_digest": None}}, 'corpus \\["a", "b"\\]')]


@pytest.mark.parametrize("fields, said", BUDGETS)
def test_unequal_size_budget_or_corpus_is_compared_only_when_asked(results, fields, said):
    three(results, modern=[1.0, 1.1, 1.2])
    for s in (1, 2, 3):
        results("x", s, 0.9, **fields)
    code, out, _ = run(results.folder)
    assert code == 0 and not load(results.folder)["contrasts"] and re.search(f"Arms: .*{said}.*, val_bpb", out)
    line = refused(results.folder, "--contrast", "x - modern")
    assert "crosses groups" in line and re.search(f"x is in .*{said}", line)
    c, = load(results.folder, "--mixed", "--contrast", "x - modern")["contrasts"]
    assert c["n"] == 3 and "mixed" in c["marks"]


@pytest.mark.parametrize("flag, other, why", [("data_seed", 4, "mixed data order 4, 0"), ("eval_tokens", 5, "mixed evaluation tokens 5, 0"), ("data_seed", None, "")])
def test_data_order_and_evaluation_must_agree_where_both_say(results, flag, other, why):
    for s in (1, 2, 3):
        results("modern", s, 1.0 + s / 9, {}, {flag: 0}), results("x", s, 0.9, {flag: other}, {flag: other})
    code, out, _ = run(results.folder, "--contrast", "x - modern")
    if not why:
        assert code == 0
        return
    assert code == 1 and f"seed 1: {why} (--mixed pairs them)" in out
    assert load(results.folder, "--contrast", "x - modern", code=1)["contrasts"][0]["mean"] is None
    c, = load(results.folder, "--mixed")["contrasts"]
    assert c["n"] == 3 and "mixed" in c["marks"]


def test_one_run_of_another_budget_is_shown_apart_and_its_seed_named(results):
    three(results, modern=[1.0, 1.1, 1.2], x=[0.9, 0.8])
    results("x", 3, 0.1, {"steps": 50}, steps=50, tokens=3200)
    got = load(results.folder)
    assert {(a["arm"], a["steps"]): a["n"] for a in got["arms"]} == {("modern", 100): 3, ("x", 100): 2, ("x", 50): 1}
    assert {c["name"]: c["n"] for c in got["contrasts"]} == {"x - modern": 2} and "seed 3 unpaired (not in x)" in " ".join(got["notes"])


def test_all_diverged_is_refused_after_naming_each(results):
    paths = [results(arm, s, 1.0, status="diverged") for arm in ("modern", "x") for s in (1, 2)]
    code, out, err = run(results.folder)
    assert code == 2 and out == "" and all(str(p) in err for p in paths)
    assert "every run was left out" in refused(results.folder)


def test_mixed_metric_names(results):
    three(results, modern=[1.0, 1.1])
    for s in (1, 2):
        results("x", s, 0, metrics={"val_loss": 3.0 + s})
    assert run(results.folder)[1].count("no metric val_bpb; it has val_loss") == 2
    assert "no run has it; these exist: val_bpb, val_loss" in refused(results.folder, "--metric", "accuracy")
    assert {a["arm"]: a["n"] for a in load(results.folder, "--metric", "val_loss")["arms"]} == {"modern": 0, "x": 2}
    assert [a["metric"] for a in load(results.folder, "--metric", "val_bpb,val_loss")["arms"]] == ["val_bpb"] * 2 + ["val_loss"] * 2


def test_seeds_as_text_pair_with_numbers(results):
    results("modern", 7, 1.0), results("x", "7", 0.9)
    c, = load(results.folder)["contrasts"]
    assert list(c["per_seed"]) == ["7"]
    for bad in ("seven", 1.5, True, [1]):
        path = results("y", bad, 0.9)
        code, _, err = run(results.folder)
        assert code == 1 and f"skipped {path}: seed {json.dumps(bad)} is not a whole number" in err
        path.unlink()


def test_depths_are_chosen(results):
    three(results, modern=[1.0, 1.1], x=[0.9, 1.0])
    for s in (1, 2):
        results("x", s, 5.0, depth=4, width=256)
    assert {(a["depth"], a["arm"]): a["mean"] for a in load(results.folder)["arms"]} == pytest.approx(
        {(2, "modern"): 1.05, (2, "x"): 0.95, (4, "x"): 5.0})
    assert len(load(results.folder, "--depth", 4)["arms"]) == 1
    assert "no such runs; depths here: 2, 4" in refused(results.folder, "--depth", 3)
    assert "no arm 'nope'" in refused(results.folder, "--contrast", "x - nope") and "no group has" in refused(results.folder, "--contrast", "x@d9 - modern")
    c, = load(results.folder, "--mixed", "--contrast", "x@d4 - modern")["contrasts"]
    assert c["mean"] == pytest.approx(3.95) and "mixed" in c["marks"]


# ---- names ----

AWKWARD = ["modern", "F highway-scalar+muon", "modern (AdamW)", "a - b", "naïve-Ω 模型", "x) - (y", "[lr=1]", "100%", "|*_`", "12_oe_joint", "12d_oe", "12_bf16"]


def test_every_pair_of_awkward_names_can_be_asked_for(results):
    for i, arm in enumerate(AWKWARD):
        for s in (1, 2):
            results(arm, s, i + s / 10)
    for a, b in itertools.permutations(AWKWARD, 2):
        c, = load(results.folder, "--contrast", f"{a} - {b}")["contrasts"]
        assert c["terms"] == [[1, a], [-1, b]] and c["mean"] == pytest.approx(AWKWARD.index(a) - AWKWARD.index(b))
    c, = load(results.folder, "--dod", "(F highway-scalar+muon - modern (AdamW)) - (a - b - x) - (y)")["contrasts"]
    assert c["terms"] == [[1, AWKWARD[1]], [-1, AWKWARD[2]], [-1, "a - b"], [1, "x) - (y"]]


@pytest.mark.parametrize("name, depth, arm", [
    ("12", 6, "12_oe_joint"), ("12", 8, "12_oe_joint"), ("00", 6, "00_dense_native"), ("01*", 6, "01_dense_opt_lr141"), ("12do", 6, "12do_oe_decoupled_x0_out"),
    ("12_bf16", 8, "oe_joint_bf16state"), ("12d_bf16", 8, "12d_oe_bf16_decoupled_x0"), ("02m", 6, "02m_dense_masked_qk"), ("#3b", 6, "oe_table_neumann_joint")])
def test_short_names_of_the_paper(name, depth, arm):
    c = load(OE_FILE, "--depth", depth, "--contrast", f"{name} - 10_oe_native", "--metric", "val_bpb")["contrasts"][0]
    assert c["terms"] == [[1, arm], [-1, "10_oe_native"]] and c["name"] == f"{arm} - 10_oe_native"


def test_short_names_without_the_paper(results):
    three(results, **{"00_dense_native": [1.0, 1.1], "12_oe_joint": [0.9, 0.8], "12d_oe": [0.7, 0.7]})
    c, = load(results.folder, "--contrast", "12 - 00")["contrasts"]
    assert c["terms"] == [[1, "12_oe_joint"], [-1, "00_dense_native"]] and c["name"] == "12_oe_joint - 00_dense_native"


def test_a_name_is_never_taken_for_another(results):
    """Another arm's numbers under the name that was asked for: moe did not run, moe_matched did."""
    three(results, modern=[1.0, 1.1], moe_matched=[1.2, 1.3], **{"12do_oe": [1.0, 1.0], "12do_shared": [1.0, 1.0]})
    line = refused(results.folder, "--contrast", "moe - modern")
    assert "no arm 'moe'; near: moe_matched" in line and "--list shows the names" in line
    for name in ("moe_", "moe_match", "mod", "12do_o", "1"):
        assert f"no arm '{name}'" in refused(results.folder, "--contrast", f"{name} - modern")
    assert "'12do' may mean 12do_oe, 12do_shared; write more of the name" in refused(results.folder, "--contrast", "12do - modern")
    assert "no such arm; near: moe_matched" in refused(results.folder, "--ref", "moe")


def test_unknown_and_ambiguous_names_say_what_exists(results):
    three(results, modern=[1.0], **{"3_a": [1.0], "3_b": [1.0]})
    assert "'3' may mean 3_a, 3_b; write more of the name" in refused(results.folder, "--contrast", "3 - modern")
    assert "no arm 'moderm'; near: modern; --list shows the names" in refused(results.folder, "--contrast", "3_a - moderm")
    for form in ("3_a-modern", "3_a", "", " - "):
        refused(results.folder, "--contrast", form)
    assert 'write "(A - B) - (C - D)"' in refused(results.folder, "--dod", "3_a - modern - 3_b - modern")
    assert 'write "(A - B) / (C - D)"' in refused(results.folder, "--ratio", "3_a / modern")
    for kind, text in (("contrast", "modern - modern"), ("dod", "(modern - 3_a) - (modern - 3_a)"), ("ratio", "(modern - 3_a) / (3_b - 3_b)")):
        assert "compares an arm with itself" in refused(results.folder, f"--{kind}", text)


def test_list_shows_names_that_work():
    code, out, _ = run(OE_FILE, "--list", "--depth", 8)
    assert code == 0
    shown = [re.split(r"  +", line) for line in out.splitlines() if re.match(r"\S+ +\S.* +4[12]", line)]
    assert len(shown) == 12 and sum(short != "-" for _, short, *_ in shown) > 9
    for arm, short, *_ in shown:
        other = "00" if "02" in arm else "02_dense_joint"
        for name in short.split(", "):
            got = name == "-" or load(OE_FILE, "--depth", 8, "--contrast", f"{name} - {other}", "--metric", "val_bpb")["contrasts"][0]
            assert got is True or got["terms"][0] == [1, arm]


def test_reference(results):
    three(results, zeta=[1.0, 1.1], modern=[1.0, 1.2], alpha=[2.0, 2.1])
    assert {c["name"] for c in load(results.folder)["contrasts"]} == {"zeta - modern", "alpha - modern"}
    assert {c["name"] for c in load(results.folder, "--ref", "zeta")["contrasts"]} == {"modern - zeta", "alpha - zeta"}


def test_a_reference_that_was_guessed_is_announced(results):
    three(results, zeta=[1.0], alpha=[2.0])
    assert "reference of d2 w128, 100 steps, 6,400 tokens, corpus d1: alpha (first by name); choose with --ref" in run(results.folder)[1]


def test_an_arm_is_compared_with_the_reference_of_its_own_recipe(results):
    """modern ran at two dropouts, the others at one each: every contrast changes the arm alone; --ref takes the one it names."""
    for seed in (0, 1):
        for arm, dropout, own in (("modern", 0.1, {}), ("modern", 0.2, {}), ("muon", 0.1, {"muon": 1}), ("highway", 0.2, {"residual": "highway"})):
            results(arm, seed, 1.0 + seed / 8 + dropout, {"dropout": dropout, **own})
    two = "modern [dropout=0.2]"
    assert {c["name"]: c["mean"] for c in load(results.folder)["contrasts"]} == pytest.approx(
        {f"highway - {two}": 0, "muon - modern [dropout=0.1]": 0, f"{two} - modern [dropout=0.1]": 0.1})
    assert "modern, for every arm in the one of 2 settings nearest its own" in run(results.folder)[1]
    assert {c["name"] for c in load(results.folder, "--ref", two)["contrasts"]} == {f"{a} - {two}" for a in ("highway", "muon", "modern [dropout=0.1]")}


# ---- marks ----

@pytest.mark.parametrize("total, marked", [(1005, False), (1006, True), (995, False), (994, True), (None, False)])
def test_capacity_mark(results, total, marked):
    three(results, modern=[1.0, 1.1])
    for s in (1, 2):
        results("x", s, 0.9 + s / 10, params={"total": total})
    c, = load(results.folder)["contrasts"]
    assert ("capacity" in c["marks"]) == marked == stats.differ_in_size(1000, total)


@pytest.mark.parametrize("names", [lambda lr: "x", lambda lr: f"x_{lr}"], ids=["one arm", "a name a rate"])
@pytest.mark.parametrize("losses, edge", [({0.1: 3.0, 0.2: 2.0, 0.4: 2.5}, None), ({0.1: 1.9, 0.2: 2.0, 0.4: 2.5}, 0.1), ({0.1: 3.0, 0.2: 2.0, 10: 1.0}, 10),
                                          ({0.1: 3.0, 0.2: 2.0, 0.4: None}, None), ({0.1: 3.0, 0.2: 2.0}, 0.2)])
def test_learning_rate_bracket(results, losses, edge, names):
    """0.2 is the default, which `changed` does not mention."""
    for s in (1, 2):
        results("modern", s, 3.0 + s, {}, {"muon_lr": 0.2})
        for lr, loss in losses.items():
            rate = {} if lr == 0.2 else {"muon_lr": lr}
            results(names(lr), s, (loss or 0) + s, {"dim": 3, **rate}, {"muon_lr": lr}, status="finished" if loss else "diverged")
    got = load(results.folder)
    marked = {a["arm"]: a["marks"] for a in got["arms"] if a["marks"]}
    label = names(edge) + (f" [muon_lr={edge or 0:g}]" if names(1) == "x" and edge != 0.2 else "")
    assert marked == ({label: ["muon_lr: edge of bracket: extend before reading"]} if edge else {})
    named = [c["name"] for c in got["contrasts"] if any("edge of bracket" in m for m in c["marks"])]
    assert named == ([f"{label} - modern"] if edge else [])


def test_settings_that_differ_in_more_than_a_rate_are_no_bracket(results):
    for s in (1, 2):
        results("x", s, 2.0, {"lr": 0.1, "width_mult": 1}), results("x", s, 1.0, {"lr": 0.2, "width_mult": 2})
    got = load(results.folder)
    assert not any(a["marks"] for a in got["arms"]) and any("run with different lr, width_mult: one row per setting" in n for n in got["notes"])


def test_ranges_and_sign_count(results):
    three(results, modern=[1.0, 1.1, 1.2], below=[0.7, 0.8, 0.9], touch=[0.9, 1.0, 1.3])
    got = {c["name"]: c for c in load(results.folder)["contrasts"]}
    assert got["below - modern"]["separated"] is True and got["touch - modern"]["separated"] is False
    assert got["below - modern"]["improved"] == 3 and got["touch - modern"]["improved"] == 2
    out = run(results.folder)[1]
    assert "3/3" in out and "2/3" in out and "separated" in out and "overlap" in out


# ---- files ----

def test_foreign_and_broken_files_are_skipped_with_one_line_each(results):
    three(results, modern=[1.0, 1.1], x=[0.9, 1.0])
    whole = (results.folder / "000.json").read_text()
    bad = {"empty": "", "cut": whole[:-40], "list": "[1]", "other": '{"a": 1}', "schema": whole.replace('"schema": 1', '"schema": 2'), "noseed": '{"schema": 1, "arm": "x"}',
           "arm": whole.replace('"arm": "modern"', '"arm": 3'), "deep": "[" * 100_000, "oe": '{"runs": [], "arm_stats": []}', "digits": '{"schema": ' + "1" * 5000 + "}",
           "wm": '{"runs": [{}], "cosines": []}', "abl": '{"findings": 3, "claims": []}'}
    for name, text in bad.items():
        (results.folder / f"z_{name}.json").write_text(text)
    (results.folder / "z_binary.json").write_bytes(b"\xff\xfe\x00\x80")
    code, out, err = run(results.folder)
    assert code == 1 and "Traceback" not in err
    lines = err.splitlines()
    assert len(lines) == len(bad) + 1 and all(any(f"skipped {results.folder}/z_{n}.json: " in line for line in lines) for n in [*bad, "binary"])
    assert "schema 2 instead of 1" in err and "truncated?" in err
    assert "x - modern" in out  # the rest is still shown
    assert len(load(results.folder, code=1)["skipped"]) == len(bad) + 1


@pytest.mark.parametrize("where, value", [(("runs", 0, "arm"), [1]), (("runs", 0, "seed"), "x"), (("arm_stats", 0, "val_sd"), [2]), (("contrasts", 0, "mean"), "x"),
                                          (("contrasts", 0, "label"), 7), (("runs", 0, "steps"), None), (("aliases",), None), (("metrics",), [])])
def test_an_edited_published_file_is_skipped(results, tmp_path, where, value):
    data = at = json.loads(Path(OE_FILE).read_text(encoding="utf-8"))
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    (tmp_path / "oe.json").write_text(json.dumps(data))
    results("modern", 1, 1.0)
    code, out, err = run(results.folder, tmp_path / "oe.json")
    if "steps" in where:  # unknown steps are no damage
        assert code == 0
    else:
        assert code == 1 and err.startswith("skipped") and len(err.splitlines()) == 1 and "modern" in out


def test_nothing_usable_is_refused(tmp_path):
    assert "no such file" in refused(tmp_path / "none.json")
    assert "a folder without .json files" in refused(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    code, _, err = run(tmp_path / "a.json")
    assert code == 2 and "skipped" in err and "no result in 1 file" in err
    assert "FILE" in refused()


@pytest.mark.parametrize("argv, says", [
    (["--alpha", "0"], "--alpha 0"), (["--alpha", "1"], "--alpha 1"), (["--alpha", "2"], "between 0 and 1"), (["--alpha", "nan"], "finite number"), (["--power", "0"], "positive"),
    (["--power", "-1"], "positive"), (["--power", "inf"], "finite number"), (["--json", "--csv"], "choose one"), (["--csv", "--markdown"], "choose one"),
    (["--list", "--json"], "--list"), (["--curves"], "--plot or --html"), (["--plot", "x.txt"], ".png, .svg or .pdf"), (["--unknown"], "--unknown"),
    (["--alpha", "0.1", "--alpha", "0.2"], "given twice"), (["--depth", "two"], "whole number")])
def test_mistakes_on_the_command_line(results, argv, says):
    three(results, modern=[1.0, 1.1], x=[0.9, 1.0])
    assert says in refused(results.folder, *argv)


def test_outputs_do_not_overwrite_inputs_or_each_other(results, tmp_path):
    paths = three(results, modern=[1.0, 1.1], x=[0.9, 1.0])
    before = paths["x"][0].read_bytes()
    assert "is an input file" in refused(results.folder, "--html", paths["x"][0])
    assert paths["x"][0].read_bytes() == before
    assert "is the file of --plot" in refused(results.folder, "--plot", tmp_path / "a.svg", "--html", f"{tmp_path}/in/../a.svg")
    assert "is a folder" in refused(results.folder, "--html", tmp_path)
    (tmp_path / "file").write_text("")
    code, _, err = run(results.folder, "--html", tmp_path / "file" / "r.html")
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err
    code, _, err = run(results.folder, "--plot", "/proc/none/f.png")
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1


# ---- outputs ----

def test_json_has_the_shape_of_the_specification(results):
    three(results, modern=[1.0, 1.1, 1.3], x=[0.9, 1.0, 1.4])
    got = load(results.folder, "--alpha", 0.1)
    arm, = [a for a in got["arms"] if a["arm"] == "x"]
    assert (arm["depth"], arm["n"]) == (2, 3) and arm["mean"] == pytest.approx(1.1) and arm["per_seed"] == {"1": 0.9, "2": 1.0, "3": 1.4}
    assert arm["sd"] == pytest.approx(np.std([0.9, 1.0, 1.4], ddof=1))
    c, = got["contrasts"]
    assert {"name", "metric", "n", "mean", "sd", "ci95", "per_seed", "separated"} <= set(c)
    assert (c["name"], c["metric"], c["n"], c["separated"]) == ("x - modern", "val_bpb", 3, False)
    # 'ci95' stays the 95 % interval; the one that was asked for is 'ci'
    assert c["ci95"][1] - c["ci95"][0] > c["ci"][1] - c["ci"][0] and got["alpha"] == 0.1
    assert "ci" not in load(results.folder)["contrasts"][0]


def test_csv_reads_back_and_notes_do_not_spoil_it(results):
    three(results, **{"modern": [1.0, 1.1, 1.2], 'x, "q"': [0.9, 1.05]})
    code, out, err = run(results.folder, "--csv", "--holm", "--power", 0.1)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [r["kind"] for r in rows] == ["arm", "arm", "contrast"] and rows[1]["name"] == 'x, "q"'
    c = rows[2]
    assert float(c["mean"]) == pytest.approx(-0.075) and dict(p.split("=") for p in c["per_seed"].split(";")).keys() == {"1", "2"}
    assert float(c["p"]) == float(c["p_holm"]) > 0 and int(c["seeds_needed"]) >= 2 and float(c["detectable"]) > 0
    assert float(c["low"]) < float(c["mean"]) < float(c["high"]) and "seed 3 unpaired" in err and "unpaired" not in out


def test_power_and_holm_are_printed_and_labelled(results):
    three(results, modern=[1.0, 1.1, 1.3], x=[0.9, 1.05, 1.1], y=[1.1, 1.0, 1.35])
    out = run(results.folder, "--power", 0.05, "--holm")[1]
    assert "seeds needed: pairs needed to detect a difference of 0.05 at 80 % power" in out and "corrected over the 2 contrasts shown" in out
    assert "An sd from 3 pairs is itself uncertain: the true one is 0.52 to 6.28 times it (95 %)." in out
    for c in load(results.folder, "--power", 0.05, "--holm")["contrasts"]:
        assert c["seeds_needed"] == stats.seeds_needed(0.05, c["sd"], 0.05) and c["p_holm"] >= c["p"]
    assert "seeds needed" not in run(results.folder)[1] and "p Holm" not in run(results.folder)[1]


def test_published_rows_beside(results):
    three(results, **{"00_dense_native": [1.0, 1.1], "12_oe_joint": [0.9, 1.05], "11_oe_opt": [0.9, 1.0]})
    code, out, _ = run(results.folder, "--published")
    assert code == 0 and "d6: 1.048678 ± 0.002098" in out and "(Table 3 row 8)" in out and "-0.017821 ± 0.001181 [-0.020755, -0.014886]" in out
    assert re.search(r"11_oe_opt - 00_dense_native.*from its seeds", out)  # in no table, but both arms are published
    for s in (1, 2):
        results("00_dense_native", s, 1.0, depth=8, width=512), results("12_oe_joint", s, 0.9 + s / 99, depth=8, width=512)
    row = next(c for c in load(results.folder, "--depth", 8, "--published")["contrasts"])
    assert row["published"] == "-0.017821 ± 0.001181 [-0.020755, -0.014886] (Table 3 row 8)"  # its own depth only
    assert "published" not in run(results.folder)[1]


def test_published_ablations_beside_by_our_names(results):
    for arm in ("modern", "muon_vlo"):
        results(arm, 0, 0, metrics={"val_loss": 5.0})
    results("modern", 0, 0, metrics={"val_loss": 5.0}, script="my_ablate.py")
    got = {a["arm"]: a["published"] for a in load(results.folder, "--published")["arms"]}
    assert got["my_ablate/modern"] is None   # an edited copy is not what the log printed
    assert "new128: 5.179300" in got["modern"] and "old128: 4.712000" in got["modern"] and "new128: 4.99" in got["muon_vlo"]


def test_markdown_escapes_names(results):
    three(results, **{"modern": [1.0, 1.1], "a|b*c": [0.9, 1.0]})
    code, out, _ = run(results.folder, "--markdown")
    assert "\n| a\\|b\\*c | 2 |" in out and "\n| a\\|b\\*c - modern | val\\_bpb | 2 |" in out
    assert len({len(re.findall(r"(?<!\\)\|", x)) for x in out.split("### Arms")[1].split("###")[0].splitlines() if x.startswith("|")}) == 1


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_plot_draws_every_contrast(results, tmp_path, ending):
    three(results, **{"modern": [1.0, 1.1], "x $_^$": [0.9, 1.05], "模型": [1.2, 1.1]})
    target = tmp_path / f"f.{ending}"
    code, _, err = run(results.folder, "--plot", target, "--curves")
    assert (code, err) == (0, "")
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert target.read_bytes().startswith(start) and target.stat().st_size > 5000
    assert not list(tmp_path.glob(".*"))


def test_forest_plot_shows_the_numbers():
    rows = [Row("contrast", f"a{i} - b", "m", Group("", 1, 2), "s", n=2, mean=-0.1 * i, ci=(-0.2 * i, 0.1), per_seed={1: -0.3, 2: 0.1})
            for i in range(1, 4)]
    (_, draw), = report.forest_panels(rows, 0.05)
    axis = report.figure([(2, draw)]).axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["a1 - b", "a2 - b", "a3 - b"]
    drawn = [tuple(float(x) for x in np.atleast_1d(line.get_xdata())) for line in axis.lines]
    for r in rows:
        assert r.ci in drawn and (r.mean,) in drawn and tuple(r.per_seed.values()) in drawn


def test_curves_without_curves_is_refused(results, tmp_path):
    results("modern", 1, 1.0, curve=[]), results("x", 1, 1.0, curve=[["a", None], [1, float("nan")], 3])
    assert "none of these files has a loss curve" in refused(results.folder, "--html", tmp_path / "r.html", "--curves")
    assert not (tmp_path / "r.html").exists()


# ---- the page ----

EVIL = '<img src=x onerror="document.title=1">&amp; "q" </script><script>throw 1</script>'


@pytest.fixture
def page(results, tmp_path):
    three(results, **{"modern": [1.0, 1.1, 1.25], "x": [0.9, 1.05, 1.1], EVIL: [1.4, 1.2, 1.5], "z": [0.99, 1.15, 1.2]})
    target = tmp_path / "report.html"
    code, _, err = run(results.folder, "--html", target, "--curves", "--power", 0.05, "--holm", "--published")
    assert (code, err) == (0, "")
    return target


def test_page_is_self_contained_and_escaped(page):
    text = page.read_text(encoding="utf-8")
    links, tags, parser = [], set(), HTMLParser()
    parser.handle_starttag = lambda tag, attrs: (tags.add(tag), links.extend(v for k, v in attrs if k in ("src", "href", "action", "srcset", "data")))
    parser.feed(text)
    assert not tags & {"link", "iframe", "object", "embed", "form", "base"}
    assert len(links) == 2 and all(v.startswith("data:image/svg+xml;base64,") for v in links) and "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text and "<img src=x" not in text and "throw 1</script>" not in text
    assert text.count("<table>") == 2 and text.count('<img alt="') == 2 and "How to read this" in text
    for data in links:
        ElementTree.fromstring(base64.b64decode(data.partition(",")[2]))


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def chromium(page, folder):
    """(DOM, console lines, requested URLs) of a page in a fresh headless browser."""
    log = folder / "net.json"
    got = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
                          "--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}",
                          "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
                         capture_output=True, text=True, timeout=60)
    console = [line for line in got.stderr.splitlines() if "CONSOLE" in line]
    text = log.read_text(encoding="utf-8")
    try:
        events = json.loads(text)["events"]
    except ValueError:  # the browser ended before it closed the list
        events = json.loads(text.rstrip().rstrip(",") + "]}")["events"]
    starts = [e["params"] for e in events if "initiator" in (e.get("params") or {})]
    return got.stdout, console, [p["url"] for p in starts if p["initiator"] != "not an origin"]  # the browser's own requests have no origin


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_page_in_a_browser(page, tmp_path):
    probe = """<script>
    const names = () => [...document.querySelectorAll("table")][0].tBodies[0].rows, text = () => [...names()].map(r => r.cells[2].innerText + "|" + r.cells[3].innerText);
    const button = [...document.querySelectorAll("th button")].find(b => b.innerText.trim() === "mean");
    const before = text(); button.click(); const up = text(); button.click(); const down = text();
    window.onload = () => { const out = document.createElement("pre"); out.id = "probe";
      out.textContent = JSON.stringify({before, up, down, images: [...document.images].map(i => i.naturalWidth), title: document.title}); document.body.append(out); };
    </script></body>"""
    seen = tmp_path / "seen.html"
    seen.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    dom, console, urls = chromium(seen, tmp_path)
    assert console == [] and urls == []
    got = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)[1].replace("&amp;", "&"))
    means = [float(x.split("|")[1]) for x in got["up"]]
    assert means == sorted(means) and [float(x.split("|")[1]) for x in got["down"]] == means[::-1] and got["before"] != got["up"]
    assert len(got["images"]) == 2 and min(got["images"]) > 300 and got["title"].startswith("Paired contrasts")
    # the detectors do detect
    (tmp_path / "bad").mkdir()
    bad = tmp_path / "bad.html"
    bad.write_text('<script>console.error("oops")</script><img src="http://127.0.0.1:9/x.png">')
    _, console, urls = chromium(bad, tmp_path / "bad")
    assert any("oops" in line for line in console) and urls


# ---- speed ----

def five_hundred(results):
    for s in range(50):
        for arm in ["modern", *(f"arm_{i}" for i in range(9))]:
            results(arm, s, 1 + s / 100 + len(arm) / 1000, curve=[[i, 3.0] for i in range(100)])
    assert len(list(results.folder.iterdir())) == 500


@pytest.mark.slow  # a timed assertion: run it on a quiet machine
def test_500_files_in_two_seconds(results):
    five_hundred(results)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        got = subprocess.run([sys.executable, str(ROOT / "stats.py"), str(results.folder)], capture_output=True, text=True, cwd=ROOT)
        times.append(time.perf_counter() - start)
        assert got.returncode == 0 and "arm_3 - modern" in got.stdout
    assert min(times) < 2


def test_nothing_heavy_is_imported(results):
    """500 files without torch, matplotlib or scipy.stats; names and one seed without scipy and numpy."""
    three(results, modern=[1.0], x=[1.1])
    light = ("import sys, stats; stats.main(sys.argv[1:])\n"
             "print(*[m for m in sys.argv.pop(0).split(',') if m in sys.modules], file=sys.stderr)")
    for argv in (["--list"], ["--json"]):
        code = light.replace("sys.argv.pop(0)", "'torch,scipy,numpy,matplotlib'")
        got = subprocess.run([sys.executable, "-c", code, str(results.folder), *argv], cwd=ROOT, capture_output=True, text=True)
        assert got.returncode == 0 and got.stderr.strip() == ""
    shutil.rmtree(results.folder)
    five_hundred(results)
    code = light.replace("sys.argv.pop(0)", "'torch,matplotlib,scipy.stats,pandas'")
    got = subprocess.run([sys.executable, "-c", code, str(results.folder)], cwd=ROOT, capture_output=True, text=True)
    assert got.returncode == 0 and got.stderr.strip() == "" and "arm_3 - modern" in got.stdout


def test_help_names_every_flag():
    got = subprocess.run([sys.executable, str(ROOT / "stats.py"), "--help"], capture_output=True, text=True)
    assert got.returncode == 0
    for word in ("--contrast", "--dod", "--ratio", "--metric", "--alpha", "--published", "--csv", "--markdown", "--json", "--power", "--holm", "--plot", "--curves", "--html",
                 "--depth", "--ref", "--list", "--mixed", "Exit code"):
        assert word in got.stdout
