"""stats.py on result files: arms, pairing, names, statistics, outputs, the page."""
import base64
import contextlib
import csv
import io
import itertools
import json
import math
import re
import shutil
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import report
import stats
from common import cli
from helpers import ROOT, sh
from records import Group
from report import Row

OE_FILE = str(ROOT / "published" / "oe.json")
INF = math.inf
SOURCES = {"model.py": "m1", "optim.py": "o1", "train_oe.py": "t1", "train_mine.py": "c1",
           "stats.py": "s1"}


def run(*argv):
    """(exit code, stdout, stderr) of `python stats.py argv`, in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as exit:
            cli(stats.main, [str(a) for a in argv])
    return exit.value.code, *(f.buffer.getvalue().decode() for f in (out, err))


def load(*argv, code=0):
    got, out, err = run(*argv, "--json")
    assert got == code, err
    return json.loads(out)


def arms(*argv):
    return {a["arm"]: a for a in load(*argv)["arms"]}


def contrasts(*argv):
    return {c["name"]: c for c in load(*argv)["contrasts"]}


def refused(*argv):
    """The one line of an error with exit code 2."""
    code, out, err = run(*argv)
    last = err.strip().splitlines()[-1]
    assert code == 2 and out == "" and last.startswith("error: ") and "Traceback" not in err
    return last


@pytest.fixture
def results(tmp_path):
    """write(arm, seed, value, changed, config, **fields): one result file in write.folder.

    config: flags of the record's config that are no change.
    """
    count = itertools.count()

    def write(arm, seed, value, changed={}, config={}, **fields):
        flags = {"seed": seed, "data_digest": "d1", "steps": 100, **changed, **config}
        record = dict(
            schema=1, script="train_oe.py", run=f"{arm}_{seed}", arm=arm, status="finished",
            seed=seed, depth=2, width=128, config=flags, changed=changed, params={"total": 1000},
            steps=100, tokens=6400, metrics={"val_bpb": value}, env={"sources": SOURCES},
            curve=[[0, 9.0], [50, 4.0], [100, 3.0]])
        path = write.folder / f"{next(count):03d}.json"
        path.write_text(json.dumps(record | fields), encoding="utf-8")
        return path
    write.folder = tmp_path / "in"
    write.folder.mkdir()
    return write


def write(results, arms={}, /, **more):
    """Seeds 1, 2, ... of every arm with these values."""
    return {name: [results(name, s, v) for s, v in enumerate(values, 1)]
            for name, values in {**arms, **more}.items()}


# ---- statistics against references ----

def test_intervals_and_p_agree_with_scipy_for_n_2_to_30():
    from scipy.stats import ttest_rel
    rng = np.random.default_rng(7)
    for n in range(2, 31):
        a, b = rng.normal(1, 0.01, n), rng.normal(1.005, 0.01, n)
        deltas, test = list(a - b), ttest_rel(a, b)
        for alpha in (0.05, 0.01, 0.4):
            ends = tuple(test.confidence_interval(1 - alpha))
            assert stats.interval(deltas, alpha) == pytest.approx(ends, rel=1e-9, abs=1e-15)
        assert stats.p_value(deltas) == pytest.approx(test.pvalue, rel=1e-9)
        assert stats.deviation(deltas) == pytest.approx(np.std(deltas, ddof=1), rel=1e-10)
    end = stats.interval([-1.0, 0.0, 1.0], 0.05)[1]
    assert end * math.sqrt(3) == pytest.approx(4.302652729911275, rel=1e-9)


def test_power_against_simulation():
    from scipy.stats import t
    rng = np.random.default_rng(3)
    for n, effect in ((3, 1.5), (5, 0.9), (12, 0.8)):
        x = rng.normal(effect, 1, (200_000, n))
        hits = np.abs(x.mean(1) / x.std(1, ddof=1) * math.sqrt(n)) > t.ppf(0.975, n - 1)
        assert stats.power(n, effect, 0.05) == pytest.approx(hits.mean(), abs=0.004)


def test_power_against_integration_where_scipy_has_nan():
    """P(|T| > t) = E over s of Phi(nc - t s) + Phi(-nc - t s), s^2 a chi-square over its df."""
    from scipy.special import gammaln, ndtr, nctdtr, stdtrit
    nans = 0
    for n in (2, 3, 5, 10, 30):
        t, df, u = stdtrit(n - 1, 0.975), n - 1, np.linspace(-30, 5, 200_001)
        s = np.exp(u)
        scale = math.log(2) + df / 2 * math.log(df / 2) - gammaln(df / 2)
        density = np.exp(scale + df * u - df * s * s / 2)
        for shift in np.linspace(0.1, 40, 60):
            exact = np.trapezoid((ndtr(shift - t * s) + ndtr(-shift - t * s)) * density, u)
            assert stats.power(n, shift / math.sqrt(n), 0.05) == pytest.approx(exact, abs=2e-6)
            nans += math.isnan(nctdtr(df, shift, -t))
    assert nans > 10


def test_seeds_needed_and_detectable_difference():
    assert stats.seeds_needed(0.5, 1.0, 0.05) == 34  # the textbook's answer at d = 0.5
    assert stats.seeds_needed(0.8, 1.0, 0.05) == 15
    assert stats.seeds_needed(1.0, 0.0, 0.05) == 2
    assert stats.seeds_needed(1e-9, 1.0, 0.05) is None
    for delta in (0.3, 1.0, 2.5):
        n = stats.seeds_needed(delta, 1.0, 0.05)
        assert stats.power(n, delta, 0.05) >= 0.8
        assert n == 2 or stats.power(n - 1, delta, 0.05) < 0.8
    for n in (2, 3, 8):
        effect = stats.detectable(n, 2.0, 0.05) / 2.0
        assert stats.power(n, effect, 0.05) == pytest.approx(0.8, abs=1e-6)
    assert stats.detectable(2, 1.0, 1e-9) is None  # beyond scipy: said, not guessed


def test_holm_by_hand():
    adjusted = [0.03, 0.06, None, 0.06, 0.02]
    assert stats.holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx(adjusted)
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize("a, b, apart", [
    ([1, 2], [3, 4], True), ([3, 4], [1, 2], True), ([1, 3], [2, 4], False),
    ([1, 2], [2, 3], False), ([1], [2, 3], None), ([], [], None), ([1, INF], [3, 4], False),
    ([1, 2], [3, INF], True), ([INF, INF], [3, 4], True), ([INF, INF], [3, INF], False)])
def test_separated(a, b, apart):
    """A diverged seed is worse than any value."""
    assert stats.separated(a, b) is apart


@pytest.mark.parametrize("points, edge", [
    ({1: {0: 3.0}, 2: {0: 2.0}, 4: {0: 2.5}}, None), ({1: {0: 1.9}, 2: {0: 2.0}}, 1),
    ({4: {0: 1.0}, 2: {0: 2.0}}, 4), ({1: {0: 1.0}}, None),
    ({1: {0: 3.0}, 2: {0: 2.0}, 4: {0: INF}}, None), ({1: {0: INF}, 2: {0: INF}}, None),
    ({1: {0: 1.0, 1: 1.0}, 2: {0: 2.0, 1: INF}, 3: {}}, 1),
    ({1: {0: 5.0, 1: 1.0}, 2: {0: 4.0}, 3: {0: 4.5, 1: 9.0}}, None)])   # over the shared seed alone
def test_edge_of_a_bracket(points, edge):
    assert stats.edge_of(points) == edge


def test_one_seed_has_no_interval_and_says_so(results):
    write(results, modern=[1.0], other=[0.9])
    assert "none (n = 1)" in run(results.folder)[1]
    c, = load(results.folder)["contrasts"]
    assert (c["n"], c["sd"], c["ci95"], c["separated"]) == (1, None, None, None)
    assert c["mean"] == pytest.approx(-0.1)


def test_two_equal_deltas_are_marked(results):
    write(results, modern=[1.0, 1.1], other=[0.9, 1.0])
    assert "sd 0: are the runs copies?" in run(results.folder, "--power", 0.01, "--holm")[1]
    c, = load(results.folder, "--holm")["contrasts"]
    assert c["sd"] == 0 and c["p"] is None and c["ci95"][0] == c["ci95"][1]


# ---- which runs are one arm ----

def test_a_copy_of_a_script_stands_beside_its_original(results):
    """No flag is needed, also where the copy's arm has the reference's name."""
    mine = ["train_mine/00_dense_native", "train_mine/12_oe_joint"]
    for seed in (1, 2):
        results("00_dense_native", seed, 1.0 + seed / 9)
        for arm in ("00_dense_native", "12_oe_joint"):
            results(arm, seed, 0.9 + seed / 8, script="train_mine.py")
    assert list(arms(results.folder)) == ["00_dense_native", *mine]
    assert list(contrasts(results.folder)) == [f"{arm} - 00_dense_native" for arm in mine]
    results("12_oe_joint", 1, 0.9)   # now the copy is held against what it copies as well
    assert f"{mine[1]} - 12_oe_joint" in contrasts(results.folder)
    assert "no arm '12_oe'" in refused(results.folder, "--contrast", "12_oe - 00")
    asked = contrasts(results.folder, "--contrast", f"{mine[1]} - 00")
    assert list(asked) == [f"{mine[1]} - 00_dense_native"]
    for path in results.folder.glob("*.json"):   # the copy alone: its own arms are all there is
        if json.loads(path.read_text())["script"] != "train_mine.py":
            path.unlink()
    assert list(contrasts(results.folder)) == [f"{mine[1]} - {mine[0]}"]
    line = refused(results.folder, "--contrast", "12_oe_joint - 00_dense_native")
    assert f"near: {mine[1]}" in line


def test_equal_names_of_two_own_scripts_are_told_apart(results):
    results("modern", 1, 1.0), results("modern", 1, 2.0, script="ablate.py")
    means = {name: a["mean"] for name, a in arms(results.folder).items()}
    assert means == {"train_oe/modern": 1.0, "ablate/modern": 2.0}


def test_a_flag_that_an_old_record_lacks_has_its_default(results):
    for seed in (1, 2):
        results("modern", seed, 1.0), results("x", seed, 0.9, {"lr": 1})
    results("modern", 3, 1.1, {}, {"new_flag": 0}), results("x", 3, 0.8, {"lr": 1}, {"new_flag": 0})
    assert [a["n"] for a in load(results.folder)["arms"]] == [3, 3]
    results("x", 4, 0.8, {"lr": 1, "new_flag": 2})
    assert list(arms(results.folder)) == ["modern", "x", "x [new_flag=2]"]


def test_how_a_run_was_computed_splits_no_arm(results):
    for s in (1, 2, 3):
        results("modern", s, 1.0, {}, {
            "out": f"o{s}", "device": "cpu", "threads": s, "save_every": s, "resume": s == 1,
            "compile": s == 2, "impl": f"i{s}", "micro_batch": s, "data": f"stores/{s}"})
    assert arms(results.folder)["modern"]["n"] == 3


def test_other_code_is_said_once(results):
    write(results, modern=[1.0, 1.1], x=[0.9, 1.0], y=[0.8, 0.9])
    assert not any("same code" in n for n in load(results.folder)["notes"])
    other = {**SOURCES, "optim.py": "o2", "stats.py": "s2", "train_mine.py": "c2"}
    for arm in ("x", "y"):
        results(arm, 3, 0.9, env={"sources": other})
    results("modern", 3, 1.0), results("z", 3, 1.0, script="train_mine.py", env={})
    note, = [n for n in load(results.folder)["notes"] if "same code" in n]
    which = "optim.py changed between the runs of x - modern and 1 more"
    assert note.startswith(f"not the same code: {which}")


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
        results("x", s + 1, 1 + (s + 1) / 10 - 0.05 * (s + 1))
    code, out, _ = run(results.folder)
    assert code == 0 and "left out of x - modern" in out
    assert "seed 1 unpaired (not in x)" in out and "seed 4 unpaired (not in modern)" in out
    c, = load(results.folder)["contrasts"]
    assert sorted(c["per_seed"]) == ["2", "3"] and c["mean"] == pytest.approx(-0.125)
    assert "seeds left out" in c["marks"]


def test_duplicate_seeds_are_refused_with_both_files(results):
    first, second = results("modern", 1, 1.0), results("modern", 1, 1.1)
    line = refused(results.folder)
    assert "arm modern, seed 1 is in two files" in line
    assert str(first) in line and str(second) in line


def test_a_file_named_twice_is_one_file(results):
    path = results("modern", 1, 1.0)
    results("x", 1, 0.9)
    assert len(arms(path, path, results.folder, f"{results.folder}/../in/000.json")) == 2


@pytest.mark.parametrize("fields, why", [
    ({"status": "diverged", "steps": 7, "tokens": 448}, "status diverged; worse than any value"),
    ({"status": "stopped"}, "status stopped"),
    ({"status": "crashed\x1b[31m"}, "status crashed?"),
    ({"metrics": {"val_bpb": float("nan")}}, "val_bpb is NaN, not a finite number"),
    ({"metrics": {"val_bpb": None}}, "val_bpb is null"),
    ({"metrics": {"val_bpb": 1e308}}, "val_bpb is 1e+308, not"),
    ({"metrics": {"val_bpb": "1.0"}}, 'val_bpb is "1.0"'),
    ({"metrics": {"val_bpb": True}}, "val_bpb is true"),
    ({"metrics": {"val_loss": 1.0}}, "no metric val_bpb; it has val_loss"),
    ({"metrics": {}}, "no metric val_bpb; it has none")])
def test_unusable_runs_are_named_and_left_out(results, fields, why):
    write(results, modern=[1.0, 1.1, 1.3], x=[0.9, 1.0])
    bad = results("x", 3, 0.5, **fields)
    code, out, _ = run(results.folder)
    assert code == 0 and f"left out: x, seed 3 ({bad}): {why}" in out
    arm = arms(results.folder)["x"]
    assert sorted(arm["per_seed"]) == ["1", "2"] and arm["mean"] == pytest.approx(0.95)
    c, = load(results.folder)["contrasts"]
    assert sorted(c["per_seed"]) == ["1", "2"] and c["mean"] == pytest.approx(-0.1)


def test_a_diverged_seed_is_worse_than_any_value(results):
    """Left out of mean and interval, but its arm's range reaches to infinity, as in ablate.py."""
    write(results, modern=[1.0, 1.1, 1.2], x=[0.7, 0.8], y=[1.3, 1.4])

    def verdicts():
        return {name: c["separated"] for name, c in contrasts(results.folder).items()}
    assert verdicts() == {"x - modern": True, "y - modern": True}
    for arm in ("x", "y"):
        results(arm, 3, 0.5, status="diverged", metrics={})
    assert verdicts() == {"x - modern": False, "y - modern": True}
    c = contrasts(results.folder)["x - modern"]
    assert c["n"] == 2 and c["mean"] == pytest.approx(-0.3)


@pytest.mark.parametrize("fields, said", [
    ({"steps": 50}, "50 steps"), ({"tokens": 12800}, "12,800 tokens"), ({"depth": 4}, "d4 w128"),
    ({"width": 64}, "d2 w64"), ({"config": {"data_digest": "d2"}}, "corpus d2")])
def test_unequal_size_budget_or_corpus_is_compared_only_when_asked(results, fields, said):
    write(results, modern=[1.0, 1.1, 1.2])
    for s in (1, 2, 3):
        results("x", s, 0.9, **fields)
    code, out, _ = run(results.folder)
    assert code == 0 and not contrasts(results.folder)
    assert re.search(f"Arms: .*{said}.*, val_bpb", out)
    line = refused(results.folder, "--contrast", "x - modern")
    assert "crosses groups" in line and re.search(f"x is in .*{said}", line)
    c, = load(results.folder, "--mixed", "--contrast", "x - modern")["contrasts"]
    assert c["n"] == 3 and "mixed" in c["marks"]


@pytest.mark.parametrize("flag, other, why", [
    ("data_seed", 4, "mixed data order 4, 0"), ("eval_tokens", 5, "mixed evaluation tokens 5, 0"),
    ("data_seed", None, "")])
def test_data_order_and_evaluation_must_agree_where_both_say(results, flag, other, why):
    for s in (1, 2, 3):
        results("modern", s, 1.0 + s / 9, {}, {flag: 0})
        results("x", s, 0.9, {flag: other}, {flag: other})
    code, out, _ = run(results.folder, "--contrast", "x - modern")
    assert code == bool(why) and (not why or f"seed 1: {why} (--mixed pairs them)" in out)
    c, = load(results.folder, "--contrast", "x - modern", code=code)["contrasts"]
    assert c["n"] == (0 if why else 3) and (c["mean"] is None) == bool(why)
    c, = load(results.folder, "--mixed")["contrasts"]
    assert c["n"] == 3 and ("mixed" in c["marks"]) == bool(why)


def test_one_run_of_another_budget_is_shown_apart_and_its_seed_named(results):
    write(results, modern=[1.0, 1.1, 1.2], x=[0.9, 0.8])
    results("x", 3, 0.1, {"steps": 50}, steps=50, tokens=3200)
    got = load(results.folder)
    assert [(a["arm"], a["steps"], a["n"]) for a in got["arms"]] == [
        ("x", 50, 1), ("modern", 100, 3), ("x", 100, 2)]
    assert [(c["name"], c["n"]) for c in got["contrasts"]] == [("x - modern", 2)]
    assert "seed 3 unpaired (not in x)" in " ".join(got["notes"])


def test_all_diverged_is_refused_after_naming_each(results):
    paths = [results(a, s, 1.0, status="diverged") for a in ("modern", "x") for s in (1, 2)]
    assert "every run was left out" in refused(results.folder)
    err = run(results.folder)[2]
    assert all(str(p) in err for p in paths)


def test_mixed_metric_names(results):
    write(results, modern=[1.0, 1.1])
    for s in (1, 2):
        results("x", s, 0, metrics={"val_loss": 3.0 + s})
    assert run(results.folder)[1].count("no metric val_bpb; it has val_loss") == 2
    line = refused(results.folder, "--metric", "accuracy")
    assert "no run has it; these exist: val_bpb, val_loss" in line
    got = arms(results.folder, "--metric", "val_loss")
    assert {name: a["n"] for name, a in got.items()} == {"modern": 0, "x": 2}
    both = load(results.folder, "--metric", "val_bpb,val_loss")["arms"]
    assert [a["metric"] for a in both] == ["val_bpb"] * 2 + ["val_loss"] * 2


def test_depths_are_chosen(results):
    write(results, modern=[1.0, 1.1], x=[0.9, 1.0])
    for s in (1, 2):
        results("x", s, 5.0, depth=4, width=256)
    means = [(a["depth"], a["arm"], round(a["mean"], 6)) for a in load(results.folder)["arms"]]
    assert means == [(2, "modern", 1.05), (2, "x", 0.95), (4, "x", 5.0)]
    assert len(arms(results.folder, "--depth", 4)) == 1
    assert "no such runs; depths here: 2, 4" in refused(results.folder, "--depth", 3)
    for contrast, name in (("x - nope", "nope"), ("x@d9 - modern", "x@d9")):
        assert f"no arm '{name}'" in refused(results.folder, "--contrast", contrast)
    c, = load(results.folder, "--mixed", "--contrast", "x@d4 - modern")["contrasts"]
    assert c["mean"] == pytest.approx(3.95) and "mixed" in c["marks"]


# ---- names ----

AWKWARD = ["modern", "F highway-scalar+muon", "modern (AdamW)", "a-b", "naïve-Ω 模型", "[lr=1]",
           "100%", "|*_`", "12_oe_joint", "12d_oe", "12_bf16"]


def test_every_pair_of_awkward_names_can_be_asked_for(results):
    write(results, {arm: [i, i + 0.1] for i, arm in enumerate(AWKWARD)})
    for a, b in itertools.permutations(AWKWARD, 2):
        c, = load(results.folder, "--contrast", f"{a} - {b}")["contrasts"]
        assert c["terms"] == [[1, a], [-1, b]]
        assert c["mean"] == pytest.approx(AWKWARD.index(a) - AWKWARD.index(b))
    dod = "(F highway-scalar+muon - modern (AdamW)) - (a-b - 100%)"
    c, = load(results.folder, "--dod", dod)["contrasts"]
    assert c["terms"] == [[1, AWKWARD[1]], [-1, AWKWARD[2]], [-1, "a-b"], [1, "100%"]]


@pytest.mark.parametrize("name, depth, arm", [
    ("12", 6, "12_oe_joint"), ("12", 8, "12_oe_joint"), ("00", 6, "00_dense_native"),
    ("01*", 6, "01_dense_opt_lr141"), ("12do", 6, "12do_oe_decoupled_x0_out"),
    ("12_bf16", 8, "oe_joint_bf16state"), ("12d_bf16", 8, "12d_oe_bf16_decoupled_x0"),
    ("02m", 6, "02m_dense_masked_qk"), ("#3b", 6, "oe_table_neumann_joint")])
def test_short_names_of_the_paper(name, depth, arm):
    asked = ("--contrast", f"{name} - 10_oe_native", "--metric", "val_bpb")
    c, = load(OE_FILE, "--depth", depth, *asked)["contrasts"]
    assert c["terms"] == [[1, arm], [-1, "10_oe_native"]] and c["name"] == f"{arm} - 10_oe_native"


def test_short_names_without_the_paper(results):
    write(results, {"00_dense_native": [1.0, 1.1], "12_oe_joint": [0.9, 0.8], "12d_oe": [0.7, 0.7]})
    assert list(contrasts(results.folder, "--contrast", "12 - 00")) == [
        "12_oe_joint - 00_dense_native"]


def test_a_name_is_never_taken_for_another(results):
    """moe did not run, moe_matched did: its numbers are not shown under the other's name."""
    same = [1.0, 1.0]
    write(results, {"12do_oe": same, "12do_shared": same, "3_a": same, "3_b": same},
          modern=same, moe_matched=same)
    line = refused(results.folder, "--contrast", "moe - modern")
    assert "no arm 'moe'; near: moe_matched, modern; --list shows the names" in line
    for name in ("moe_", "moe_match", "mod", "12do_o", "1"):
        line = refused(results.folder, "--contrast", f"{name} - modern")
        assert f"no arm '{name}'" in line
    for name, found in (("12do", "12do_oe, 12do_shared"), ("3", "3_a, 3_b")):
        line = refused(results.folder, "--contrast", f"{name} - modern")
        assert f"'{name}' may mean {found}; write more of the name" in line
    assert "no such arm; near: moe_matched" in refused(results.folder, "--ref", "moe")
    assert "no arm 'moderm'; near: modern" in refused(results.folder, "--contrast", "3_a - moderm")


def test_requests_of_another_form_are_refused(results):
    write(results, {"3_a": [1.0], "3_b": [1.0]}, modern=[1.0])
    for kind, form, texts in (
            ("contrast", "A - B", ("3_a-modern", "3_a", "", " - ")),
            ("dod", "(A - B) - (C - D)", ("3_a - modern - 3_b - modern",)),
            ("ratio", "(A - B) / (C - D)", ("3_a / modern",))):
        for text in texts:
            assert f'write "{form}"' in refused(results.folder, f"--{kind}", text)
    for kind, text in (("contrast", "modern - modern"),
                       ("dod", "(modern - 3_a) - (modern - 3_a)"),
                       ("ratio", "(modern - 3_a) / (3_b - 3_b)")):
        assert "compares an arm with itself" in refused(results.folder, f"--{kind}", text)


def test_list_shows_names_that_work():
    code, out, _ = run(OE_FILE, "--list", "--depth", 8)
    rows = [re.split(r"  +", x) for x in out.splitlines() if re.match(r"\S+ +\S.* +4[12]", x)]
    assert code == 0 and len(rows) == 12 and sum(short != "-" for _, short, *_ in rows) > 9
    for arm, short, *_ in rows:
        other = "00" if "02" in arm else "02_dense_joint"
        for name in short.split(", ") if short != "-" else ():
            asked = ("--contrast", f"{name} - {other}", "--metric", "val_bpb")
            c, = load(OE_FILE, "--depth", 8, *asked)["contrasts"]
            assert c["terms"][0] == [1, arm]


def test_reference(results):
    write(results, zeta=[1.0, 1.1], alpha=[2.0, 2.1])
    guess = "d2 w128, 100 steps, 6,400 tokens, corpus d1: alpha (first by name); choose with --ref"
    assert f"reference of {guess}" in run(results.folder)[1]
    write(results, modern=[1.0, 1.2])
    assert set(contrasts(results.folder)) == {"zeta - modern", "alpha - modern"}
    assert set(contrasts(results.folder, "--ref", "zeta")) == {"modern - zeta", "alpha - zeta"}


def test_an_arm_is_compared_with_the_reference_of_its_own_recipe(results):
    """modern ran at two dropouts, the others at one each: a contrast changes the arm alone."""
    for seed in (0, 1):
        for arm, dropout, own in (("modern", 0.1, {}), ("modern", 0.2, {}),
                                  ("muon", 0.1, {"muon": 1}), ("highway", 0.2, {"residual": "h"})):
            results(arm, seed, 1.0 + seed / 8 + dropout, {"dropout": dropout, **own})
    one, two = "modern [dropout=0.1]", "modern [dropout=0.2]"
    means = {name: c["mean"] for name, c in contrasts(results.folder).items()}
    shown = {f"highway - {two}": 0, f"muon - {one}": 0, f"{two} - {one}": 0.1}
    assert means == pytest.approx(shown)
    said = "modern, for every arm in the one of 2 settings nearest its own"
    assert said in run(results.folder)[1]
    asked = contrasts(results.folder, "--ref", two)
    assert set(asked) == {f"{a} - {two}" for a in ("highway", "muon", one)}


# ---- marks ----

@pytest.mark.parametrize("total, marked", [
    (1005, False), (1006, True), (995, False), (994, True), (None, False)])
def test_capacity_mark(results, total, marked):
    write(results, modern=[1.0, 1.1])
    for s in (1, 2):
        results("x", s, 0.9 + s / 10, params={"total": total})
    c, = load(results.folder)["contrasts"]
    assert ("capacity" in c["marks"]) == marked == stats.differ_in_size(1000, total)


@pytest.mark.parametrize("name", ["x", "x_{}"], ids=["one arm", "a name a rate"])
@pytest.mark.parametrize("losses, edge", [
    ({0.1: 3.0, 0.2: 2.0, 0.4: 2.5}, None), ({0.1: 1.9, 0.2: 2.0, 0.4: 2.5}, 0.1),
    ({0.1: 3.0, 0.2: 2.0, 10: 1.0}, 10), ({0.1: 3.0, 0.2: 2.0, 0.4: None}, None),
    ({0.1: 3.0, 0.2: 2.0}, 0.2)])
def test_learning_rate_bracket(results, losses, edge, name):
    """0.2 is the default, which `changed` does not mention."""
    for s in (1, 2):
        results("modern", s, 3.0 + s, {}, {"muon_lr": 0.2})
        for lr, loss in losses.items():
            changed = {"dim": 3, **({} if lr == 0.2 else {"muon_lr": lr})}
            status = "finished" if loss else "diverged"
            results(name.format(lr), s, (loss or 0) + s, changed, {"muon_lr": lr}, status=status)
    got = load(results.folder)
    marked = {a["arm"]: a["marks"] for a in got["arms"] if a["marks"]}
    label = name.format(edge)
    if name == "x" and edge and edge != 0.2:
        label += f" [muon_lr={edge:g}]"
    text = "muon_lr: edge of bracket: extend before reading"
    assert marked == ({label: [text]} if edge else {})
    named = [c["name"] for c in got["contrasts"] if f"{label}: {text}" in c["marks"]]
    assert named == ([f"{label} - modern"] if edge else [])


def test_settings_that_differ_in_more_than_a_rate_are_no_bracket(results):
    for s in (1, 2):
        results("x", s, 2.0, {"lr": 0.1, "width_mult": 1})
        results("x", s, 1.0, {"lr": 0.2, "width_mult": 2})
    got = load(results.folder)
    assert not any(a["marks"] for a in got["arms"])
    assert "run with different lr, width_mult: one row per setting" in " ".join(got["notes"])


def test_ranges_and_sign_count(results):
    write(results, modern=[1.0, 1.1, 1.2], below=[0.7, 0.8, 0.9], touch=[0.9, 1.0, 1.3])
    got = contrasts(results.folder)
    assert {n: (c["separated"], c["improved"]) for n, c in got.items()} == {
        "below - modern": (True, 3), "touch - modern": (False, 2)}
    out = run(results.folder)[1]
    assert all(word in out for word in ("3/3", "2/3", "separated", "overlap"))


# ---- files ----

def test_foreign_and_broken_files_are_skipped_with_one_line_each(results):
    write(results, modern=[1.0, 1.1], x=[0.9, 1.0])
    whole = (results.folder / "000.json").read_text()
    bad = {"empty": "", "cut": whole[:-40], "list": "[1]", "other": '{"a": 1}',
           "schema": whole.replace('"schema": 1', '"schema": 2'),
           "noseed": '{"schema": 1, "arm": "x"}', "seed": whole.replace('"seed": 1', '"seed": 1.5'),
           "old": whole.replace('"changed"', '"before"'),
           "arm": whole.replace('"arm": "modern"', '"arm": 3'), "deep": "[" * 100_000,
           "digits": '{"schema": ' + "1" * 5000 + "}", "oe": '{"runs": [], "arm_stats": []}',
           "wm": '{"runs": [{}], "cosines": []}', "abl": '{"findings": 3, "claims": []}'}
    for name, text in bad.items():
        (results.folder / f"z_{name}.json").write_text(text)
    (results.folder / "z_binary.json").write_bytes(b"\xff\xfe\x00\x80")
    code, out, err = run(results.folder)
    assert code == 1 and "x - modern" in out  # the rest is still shown
    skipped = [line.partition(".json: ")[0] for line in err.splitlines()]
    assert sorted(skipped) == sorted(f"skipped {results.folder}/z_{n}" for n in [*bad, "binary"])
    assert "schema 2 instead of 1" in err and "truncated?" in err
    assert len(load(results.folder, code=1)["skipped"]) == len(bad) + 1


@pytest.mark.parametrize("where, value, code", [
    (("runs", 0, "arm"), [1], 1), (("runs", 0, "seed"), "x", 1), (("aliases",), None, 1),
    (("metrics",), [], 1), (("runs", 0, "steps"), None, 0), (("arm_stats", 0, "val_sd"), [2], 0),
    (("contrasts", 0, "mean"), "x", 0), (("contrasts", 0, "label"), 7, 0)])
def test_an_edited_published_file_is_skipped_or_read_without_the_value(
        results, tmp_path, where, value, code):
    data = at = json.loads(Path(OE_FILE).read_text(encoding="utf-8"))
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    (tmp_path / "oe.json").write_text(json.dumps(data))
    results("modern", 1, 1.0)
    got, out, err = run(results.folder, tmp_path / "oe.json")
    assert got == code and "modern" in out
    assert len(err.splitlines()) == code and err.startswith("skipped" if code else "")


def test_nothing_usable_is_refused(tmp_path):
    assert "no such file" in refused(tmp_path / "none.json")
    assert "a folder without .json files" in refused(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    assert "no result in these files" in refused(tmp_path / "a.json")
    assert "FILE" in refused()


@pytest.mark.parametrize("argv, says", [
    ("--alpha 0", "--alpha 0"), ("--alpha 1", "--alpha 1"), ("--alpha 2", "most is 0.999"),
    ("--alpha nan", "finite number"), ("--power 0", "too small"), ("--power -1", "too small"),
    ("--power inf", "finite number"), ("--json --csv", "choose one"),
    ("--csv --markdown", "choose one"), ("--list --json", "--list"), ("--unknown", "--unknown"),
    ("--curves", "--plot or --html"), ("--plot x.txt", ".png, .svg or .pdf"),
    ("--alpha 0.1 --alpha 0.2", "given twice"), ("--depth two", "whole number")])
def test_mistakes_on_the_command_line(results, argv, says):
    write(results, modern=[1.0, 1.1], x=[0.9, 1.0])
    assert says in refused(results.folder, *argv.split())


def test_outputs_do_not_overwrite_inputs_or_each_other(results, tmp_path):
    path = write(results, modern=[1.0, 1.1], x=[0.9, 1.0])["x"][0]
    before = path.read_bytes()
    assert "is an input file" in refused(results.folder, "--html", path)
    assert path.read_bytes() == before
    both = ("--plot", tmp_path / "a.svg", "--html", f"{tmp_path}/in/../a.svg")
    assert "is the file of --plot" in refused(results.folder, *both)
    assert "is a folder" in refused(results.folder, "--html", tmp_path)
    (tmp_path / "file").write_text("")
    refused(results.folder, "--html", tmp_path / "file" / "r.html")
    refused(results.folder, "--plot", "/proc/none/f.png")


# ---- outputs ----

def test_json_has_the_shape_of_the_specification(results):
    values = [0.9, 1.0, 1.4]
    write(results, modern=[1.0, 1.1, 1.3], x=values)
    arm, = [a for a in load(results.folder)["arms"] if a["arm"] == "x"]
    assert (arm["depth"], arm["n"]) == (2, 3) and arm["mean"] == pytest.approx(1.1)
    assert arm["per_seed"] == dict(zip("123", values))
    assert arm["sd"] == pytest.approx(np.std(values, ddof=1))
    got = load(results.folder, "--alpha", 0.1)
    c, = got["contrasts"]
    assert {"name", "metric", "n", "mean", "sd", "ci95", "per_seed", "separated"} <= set(c)
    said = c["name"], c["metric"], c["n"], c["separated"]
    assert said == ("x - modern", "val_bpb", 3, False)
    # 'ci95' stays the 95 % interval; the one that was asked for is 'ci'
    assert c["ci95"][1] - c["ci95"][0] > c["ci"][1] - c["ci"][0] and got["alpha"] == 0.1
    assert "ci" not in load(results.folder)["contrasts"][0]


def test_csv_reads_back_and_notes_do_not_spoil_it(results):
    write(results, {"modern": [1.0, 1.1, 1.2], 'x, "q"': [0.9, 1.05]})
    code, out, err = run(results.folder, "--csv", "--holm", "--power", 0.1)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and [r["kind"] for r in rows] == ["arm", "arm", "contrast"]
    assert rows[1]["name"] == 'x, "q"'
    c = rows[2]
    assert [pair.partition("=")[0] for pair in c["per_seed"].split(";")] == ["1", "2"]
    assert float(c["mean"]) == pytest.approx(-0.075)
    assert float(c["low"]) < float(c["mean"]) < float(c["high"])
    assert float(c["p"]) == float(c["p_holm"]) > 0
    assert int(c["seeds_needed"]) >= 2 and float(c["detectable"]) > 0
    assert "seed 3 unpaired" in err and "unpaired" not in out


def test_power_and_holm_are_printed_and_labelled(results):
    write(results, modern=[1.0, 1.1, 1.3], x=[0.9, 1.05, 1.1], y=[1.1, 1.0, 1.35])
    out = run(results.folder, "--power", 0.05, "--holm")[1]
    for words in ("seeds needed: pairs needed to detect a difference of 0.05 at 80 % power",
                  "corrected over the 2 contrasts shown", "An sd from 3 pairs is itself uncertain: "
                  "the true one is 0.52 to 6.28 times it (95 %)."):
        assert words in out
    for c in load(results.folder, "--power", 0.05, "--holm")["contrasts"]:
        assert c["seeds_needed"] == stats.seeds_needed(0.05, c["sd"], 0.05)
        assert c["p_holm"] >= c["p"]
    out = run(results.folder)[1]
    assert "seeds needed" not in out and "p Holm" not in out


def test_published_rows_beside(results):
    write(results, {"00_dense_native": [1.0, 1.1], "12_oe_joint": [0.9, 1.05],
                    "11_oe_opt": [0.9, 1.0]})
    deep = "-0.017821 ± 0.001181 [-0.020755, -0.014886] (Table 3 row 8)"
    code, out, _ = run(results.folder, "--published")
    assert code == 0 and "d6: 1.048678 ± 0.002098" in out and deep in out
    # in no table, but both arms are published
    assert re.search(r"11_oe_opt - 00_dense_native.*from its seeds", out)
    for s in (1, 2):
        results("00_dense_native", s, 1.0, depth=8, width=512)
        results("12_oe_joint", s, 0.9 + s / 99, depth=8, width=512)
    c, = load(results.folder, "--depth", 8, "--published")["contrasts"]
    assert c["published"] == deep  # its own depth only
    assert "published" not in run(results.folder)[1]


def test_published_ablations_beside_by_our_names(results):
    for arm, script in (("modern", "ablate.py"), ("muon_vlo", "ablate.py"), ("modern", "mine.py")):
        results(arm, 0, 0, metrics={"val_loss": 5.0}, script=script)
    got = {name: a["published"] for name, a in arms(results.folder, "--published").items()}
    assert got["mine/modern"] is None   # an edited copy is not what the log printed
    assert "new128: 5.179300" in got["modern"] and "old128: 4.712000" in got["modern"]
    assert "new128: 4.99" in got["muon_vlo"]


def test_markdown_escapes_names(results):
    write(results, {"modern": [1.0, 1.1], "a|b*c": [0.9, 1.0]})
    out = run(results.folder, "--markdown")[1]
    assert "\n| a\\|b\\*c | 2 |" in out and "\n| a\\|b\\*c - modern | val\\_bpb | 2 |" in out
    table = [x for x in out.split("###")[1].splitlines() if x.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


@pytest.mark.parametrize("ending, start", [
    ("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot_draws_every_contrast(results, tmp_path, ending, start):
    write(results, {"modern": [1.0, 1.1], "x $_^$": [0.9, 1.05], "模型": [1.2, 1.1]})
    target = tmp_path / f"f.{ending}"
    code, _, err = run(results.folder, "--plot", target, "--curves")
    assert (code, err) == (0, "")
    assert target.read_bytes().startswith(start) and target.stat().st_size > 5000
    assert not list(tmp_path.glob(".*"))


def test_forest_plot_shows_the_numbers():
    rows = [Row("contrast", f"a{i} - b", "m", Group("", 1, 2), "s", n=2, mean=-0.1 * i,
                ci=(-0.2 * i, 0.1), per_seed={1: -0.3, 2: 0.1}) for i in range(1, 4)]
    axis = report.figure(report.forest_panels(rows, 0.05)).axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == [row.name for row in rows]
    drawn = [tuple(map(float, np.atleast_1d(line.get_xdata()))) for line in axis.lines]
    for r in rows:
        assert {r.ci, (r.mean,), tuple(r.per_seed.values())} <= set(drawn)


def test_curves_without_curves_is_refused(results, tmp_path):
    results("modern", 1, 1.0, curve=[])
    results("x", 1, 1.0, curve=[["a", None], [1, float("nan")]])
    line = refused(results.folder, "--html", tmp_path / "r.html", "--curves")
    assert "none of these files has a loss curve" in line and not (tmp_path / "r.html").exists()


EVIL = '<img src=x onerror="document.title=1">&amp; "q" </script><script>throw 1</script>'


def test_page_is_self_contained_and_escaped(results, tmp_path):
    write(results, {EVIL: [1.4, 1.2, 1.5]}, modern=[1.0, 1.1, 1.25], x=[0.9, 1.05, 1.1])
    target, more = tmp_path / "r.html", ("--power", 0.05, "--holm", "--published")
    code, _, err = run(results.folder, "--html", target, "--curves", *more)
    assert (code, err) == (0, "")
    text = target.read_text(encoding="utf-8")
    links, tags, parser = [], set(), HTMLParser()

    def start(tag, attributes):
        tags.add(tag)
        links.extend(v for k, v in attributes if k in ("src", "href", "action", "srcset", "data"))
    parser.handle_starttag = start
    parser.feed(text)
    assert not tags & {"script", "link", "iframe", "object", "embed", "form", "base"}
    assert "@import" not in text and "url(" not in text and "default-src 'none'" in text
    assert text.count("<table>") == 2 and "How to read this" in text and "<img src=x" not in text
    assert len(links) == 2
    for data in links:
        head, _, image = data.partition(",")
        assert head == "data:image/svg+xml;base64"
        ElementTree.fromstring(base64.b64decode(image))


# ---- speed ----

def five_hundred(results):
    curve = [[i, 3.0] for i in range(100)]
    for s, i in itertools.product(range(50), range(10)):
        results(f"arm_{i}" if i else "modern", s, 1 + s / 100 + i / 1000, curve=curve)


@pytest.mark.slow  # a timed assertion: run it on a quiet machine
def test_500_files_in_two_seconds(results):
    five_hundred(results)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        got = sh("stats.py", results.folder)
        times.append(time.perf_counter() - start)
        assert got.returncode == 0 and "arm_3 - modern" in got.stdout
    assert min(times) < 2


def test_nothing_heavy_is_imported(results):
    """500 files without torch, matplotlib or scipy.stats; names and one seed without scipy."""
    def run_without(modules, *argv):
        code = ("import sys, stats; stats.main(sys.argv[2:]); "
                "assert not set(sys.argv[1].split(',')) & set(sys.modules)")
        got = sh("-c", code, modules, results.folder, *argv)
        assert got.returncode == 0 and got.stderr == ""
        return got.stdout
    write(results, modern=[1.0], x=[1.1])
    for argv in ("--list", "--json"):
        run_without("torch,scipy,numpy,matplotlib", argv)
    shutil.rmtree(results.folder)
    results.folder.mkdir()
    five_hundred(results)
    assert "arm_3 - modern" in run_without("torch,matplotlib,scipy.stats,pandas")


def test_help_names_every_flag():
    out = run("--help")[1]
    for word in ("contrast", "dod", "ratio", "metric", "alpha", "published", "csv", "markdown",
                 "json", "power", "holm", "plot", "curves", "html", "depth", "ref", "list",
                 "mixed"):
        assert f"--{word}" in out
    assert "Exit code" in out


def test_an_arm_averages_no_scores_over_different_amounts_of_text(results):
    """eval_heldout.py may have scored one seed anew, over all tokens."""
    for seed, tokens in ((1, 500), (2, 500), (3, 0)):
        results("a", seed, 3.0 + seed, config={"eval_tokens": tokens})
    got = load(results.folder)
    assert got["arms"][0]["n"] == 2 and got["arms"][0]["mean"] == 4.5
    assert any("seed 3" in n and "mixed evaluation tokens: 0 here, 500" in n for n in got["notes"])
    results("a", 4, 7.0, config={"eval_tokens": 0})
    code, _, err = run(results.folder)
    assert code == 2 and "no majority among its seeds" in err


def test_two_rates_that_nearly_agree_are_two_arms(results):
    for seed, rate in enumerate((0.0123456, 0.01234561, 0.0123456), 1):
        results("a", seed, 3.0, changed={"muon_lr": rate})
    assert {name: a["n"] for name, a in arms(results.folder).items()} == {
        "a [muon_lr=0.0123456]": 2, "a [muon_lr=0.01234561]": 1}


def test_a_copy_edited_between_two_runs_is_told(results):
    """Beside its original a copy is another script; beside its own other runs it is edited."""
    write(results, x=(3.0, 3.1))
    for seed, digest in ((1, "one"), (2, "two")):
        sources = {"model.py": SOURCES["model.py"], "mine.py": digest}
        results("x", seed, 2.9, script="mine.py", env={"sources": sources})
    notes = load(results.folder)["notes"]
    assert any("not the same code: mine.py changed" in note for note in notes), notes
