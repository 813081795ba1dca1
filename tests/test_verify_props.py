"""verify_props.py against torch and statistics; constants, formulas and ledger rows broken."""
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from random import Random

import pytest
import torch
import torch.nn.functional as F

import verify_props as vp
from helpers import ROOT
from optim import entrywise_adamw, row_isotropic_adamw


def t64(x):
    return torch.tensor(x, dtype=torch.float64)


def close(a, b, atol=1e-12):
    return torch.allclose(a, b, atol=atol, rtol=0)


def failed(capsys):
    """Names of the checks that fail, in this process."""
    code = vp.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["failed"] else 0) and found["ok"] == (code == 0)
    assert found["failed"] == [c["name"] for c in found["checks"] if not c["ok"]]
    return found["failed"]


def script(*argv, cwd=None, where=ROOT):
    command = [sys.executable, "-S", "-I", str(where / "verify_props.py"), *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def is_one_line(done):
    return (done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")
            and done.stderr.count("\n") == 1)


# ---- the program ----

def test_without_site_packages_from_any_folder(tmp_path):
    done = script(cwd=tmp_path)
    lines = done.stdout.splitlines()
    n = len(lines) - 1
    assert done.returncode == 0 and done.stderr == "" and n > 70
    assert all("  ok" in line for line in lines[:-1]) and lines[-1] == f"{n} of {n} checks ok"
    assert "own inputs (KEY_TOY): the paper prints none" in done.stdout
    assert json.loads(script("--json", cwd=tmp_path).stdout)["ok"] is True


def test_imports_only_the_standard_library():
    lines = (ROOT / "verify_props.py").read_text().splitlines()
    names = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert names and names <= sys.stdlib_module_names


def test_cpu_time_of_one_run():
    """The paper claims 0.3 s for its own script; a generous bound, start of Python included."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert script().returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.slow
def test_under_three_tenths_of_a_second():
    def once():
        start = time.perf_counter()
        script()
        return time.perf_counter() - start
    assert min(once() for _ in range(9)) < 0.3


@pytest.mark.parametrize("argv", [["--jsn"], ["--json", "--json"], ["x"]])
def test_unknown_arguments_are_one_line(argv):
    assert is_one_line(script(*argv))


@pytest.mark.parametrize("text", [None, "not json", "{}", "[]",
                                  '{"runs": [{"dev_bpb_per_seed": [1.0]}]}'])
def test_a_ledger_that_cannot_be_read_is_one_line(tmp_path, text):
    shutil.copy(ROOT / "verify_props.py", tmp_path)
    if text is not None:
        (tmp_path / "published").mkdir()
        (tmp_path / "published" / "wm.json").write_text(text)
    assert is_one_line(script(where=tmp_path))


def test_fresh_random_inputs():
    for seed in range(20):
        assert [c["name"] for c in vp.propositions(Random(seed)) if not c["ok"]] == [], seed


# ---- constants ----

def test_constants_are_those_of_the_published_file():
    ledger = json.loads(vp.LEDGER.read_text())
    for unit in ledger["units"]:
        value = math.sqrt(2.5) if unit["value"] == "sqrt(2.5)" else unit["value"]
        assert vp.PRINTED[unit["id"]] == (tuple(value) if isinstance(value, list) else value)
    counts, kurtosis = ledger["setup"]["counts"], ledger["drift_extra"]["kurtosis"]
    assert (vp.PRINTED["arms"], vp.PRINTED["runs"]) == (counts["arms"], counts["runs"])
    keys = (("wm_arms", "wm_runs"), ("np_arms", "np_runs"), ("anchors", "anchor_runs"),
            ("local_pullback_arms", "local_pullback_runs"), ("bp_arms", "bp_runs"))
    for name, (arms, runs) in zip(vp.CLASSES, keys):
        assert vp.PRINTED[name][:2] == (counts[arms], counts[runs])
    assert vp.PRINTED["kappa4_mean"] == kurtosis["kappa4_token_mean"]
    assert vp.PRINTED["kappa4_bound"] == kurtosis["bound_mean"]
    assert vp.PRINTED["d6_eta_Q"] == ledger["setup"]["attention"]["eta_Q"]


def changed(value, i):
    """A constant with one unit of the last printed digit of its i-th part added or taken."""
    parts = list(value) if isinstance(value, tuple) else [value]
    digits = 0 if isinstance(parts[i], int) else min(9, len(repr(parts[i]).partition(".")[2]))
    parts[i] += (-1)**i * 10**-digits
    return tuple(parts) if isinstance(value, tuple) else parts[0]


# two of every proposition or section
SAMPLED = [("P1a_mean_scaleMg", 0), ("P1c_mean", 0), ("P1c_var", 0), ("P4_b", 1), ("P4_Pb", 0),
           ("P4_sparse_ratio", 0), ("kappa4_bound", 0), ("tier3_same_position", 1),
           ("tier3_future", 0), ("snp_draws", 1), ("native_eta_Q", 0), ("sqrtD", 0), ("runs", 0),
           ("Delayed WM", 3), ("anchors", 0)]


@pytest.mark.parametrize("key, i", SAMPLED)
def test_a_changed_constant_fails(monkeypatch, capsys, key, i):
    monkeypatch.setitem(vp.PRINTED, key, changed(vp.PRINTED[key], i))
    assert failed(capsys)


def test_a_changed_constant_ends_the_program_with_1(tmp_path):
    text = (ROOT / "verify_props.py").read_text()
    assert text.count('"P1c_var": 0.064') == 1
    wrong = text.replace('"P1c_var": 0.064', '"P1c_var": 0.065')
    (tmp_path / "verify_props.py").write_text(wrong)
    (tmp_path / "published").mkdir()
    shutil.copy(vp.LEDGER, tmp_path / "published")
    done = script(where=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1] == "FAILED: 1(c) variance"


# ---- formulas: name -> (function, what becomes of its result and arguments, groups that fail) ----

def times(factor):
    return lambda out, *args: [[factor * v for v in row] for row in out]


def shift_term(i):
    def change(out, *args):
        terms = list(out["terms"])
        terms[i] = [1.01 * v for v in terms[i]]
        return {**out, "terms": tuple(terms)}
    return change


def no_sign(out, z, i, a, h, xi):
    return [v * xi[i] for v in out]


def short_oblique(out, z, xi):
    _, b_rad, oblique = out
    return [r - o / 2 for r, o in zip(b_rad, oblique)], b_rad, [o / 2 for o in oblique]


def small_bound(out, *args):
    return {**out, "bound_times_eps": [v / 1e3 for v in out["bound_times_eps"]]}


def sd_over_n(out, values):
    return out[0], out[1] * math.sqrt((len(values) - 1) / len(values))


def late_gamma(out, keep, skip):
    return out[0], [k * g for k, g in zip(keep, out[1])]


def not_by_group(out, u, w, dy, trace, x, group, scale):
    return [group * v for v in out]


def nobody(out, arm):
    return None if arm == "dust_K4_tuned_fast" else out


BROKEN = {
    "tangent is the identity": ("tangent", lambda out, x, v: list(v), {"1(c)", "4"}),
    "reward not divided by M_g": ("stream_estimator", not_by_group, {"1(a)", "1(b)"}),
    "covariance off": ("predicted", lambda out, *a: (out[0], times(1.01)(out[1])), {"1(b)"}),
    "interface estimator without its sign": ("interface_estimator", no_sign, {"1(c)"}),
    "b_oblique half as long": ("split", short_oblique, {"4"}),
    "W_v is not linear": ("dot", lambda out, a, b: out**3, {"2"}),
    "skip rewards off": ("diagonal_rewards", times(1.01), {"3"}),
    "no centring": ("centred", lambda out, rewards: rewards, {"3"}),
    "gamma one layer late": ("unroll", late_gamma, {"3"}),
    **{f"term {i} of the credit shift": ("credit_shift", shift_term(i), {"4"}) for i in range(4)},
    "bound too small": ("credit_shift", small_bound, {"4"}),
    "softmax does not sum to 1": ("softmax", lambda out, z: [1.001 * v for v in out], {"keys"}),
    "key derivative off": ("key_derivative", times(1.001), {"keys"}),
    "key rewards of the next query": ("head_rewards", lambda out, *a: out[1:] + out[:1], {"keys"}),
    "no discount": ("discounted", lambda out, c, gamma: [sum(c[t:]) for t in range(len(c))],
                    {"SR-NP"}),
    "sd divides by n": ("mean_sd", sd_over_n, {"ledger"}),
    "perplexity in bits": ("perplexity", lambda out, *a: (math.log(out[0]), *out[1:]), {"ledger"}),
    "an arm of no class": ("classify", nobody, {"ledger"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_formula_fails(monkeypatch, capsys, name):
    target, change, groups = BROKEN[name]
    real = getattr(vp, target)
    monkeypatch.setattr(vp, target, lambda *args, **kw: change(real(*args, **kw), *args))
    assert groups <= {f.split()[0] for f in failed(capsys)}


def test_a_wrong_optimizer_step_fails(monkeypatch, capsys):
    """The decomposition holds only for the step of Section 3.4, eps outside the root."""
    real = vp.adamw

    def other_eps(head, lr, decay, beta1, beta2, eps, step, row_iso):
        new, _ = real(head, lr, decay, beta1, beta2, eps, step, row_iso)
        return new, real(head, lr, decay, beta1, beta2, eps * 1.01, step, row_iso)[1]
    monkeypatch.setattr(vp, "adamw", other_eps)
    assert [f for f in failed(capsys) if f.startswith("4 post - pre")]


# ---- the parts against torch and statistics ----

def test_norm_and_its_jacobian():
    def norm(v):
        return F.rms_norm(v, (7,))
    rng = Random(0)
    z, xi = vp.vector(rng, 7), [rng.choice((1, -1)) for _ in range(7)]
    assert close(t64(vp.rms_norm(z)), norm(t64(z)))
    _, moved = torch.autograd.functional.jvp(norm, t64(z), t64(xi))
    assert close(t64(vp.tangent(vp.rms_norm(z), xi)) / vp.rms(z), moved)


def test_stream_estimator_against_einsum():
    rng = Random(1)
    n, j, d, group, scale = 15, 4, 3, 5, 2.5
    u, x = vp.vectors(rng, n, j), vp.vectors(rng, n, d)
    w, dy, trace = (vp.vector(rng, k) for k in (j, n, n))
    streams = t64(u).view(3, 5, j), t64(w), t64(dy).view(3, 5)
    reward = scale / group * torch.einsum("gmj,j,gm->g", *streams)
    rows = t64(trace).view(3, 5), t64(x).view(3, 5, d)
    wanted = torch.einsum("g,gm,gmd->d", reward, *rows) / n
    assert close(t64(vp.stream_estimator(u, w, dy, trace, x, group, scale)), wanted)


def test_head_modulation_is_the_gradient_of_the_softcapped_loss():
    """s = -d loss / d (W x), so that the batch gradient of W is -(1/N) s^T x."""
    head = vp.tiny_head(Random(3))
    x, s, w = t64(head["x"]), t64(head["s"]), t64(head["w"]).requires_grad_()
    targets = s.argmax(1)   # the only positive component of onehot - softmax
    F.cross_entropy(15 * torch.tanh(x @ w.T / 15), targets).backward()
    assert ((s > 0).sum(1) == 1).all() and close(w.grad, -s.T @ x / len(x))


@pytest.mark.parametrize("row_iso", [False, True])
def test_adamw_against_torch_and_optim(row_iso):
    lr, decay, beta1, beta2, eps, step = 0.03, 0.2, 0.7, 0.9, 1e-3, 4
    head = vp.tiny_head(Random(5))
    ours, scales = vp.adamw(head, lr, decay, beta1, beta2, eps, step, row_iso)
    w, g = t64(head["w"]), -t64(head["s"]).T @ t64(head["x"]) / len(head["x"])
    m = beta1 * t64(head["m"]) + (1 - beta1) * g
    v = beta2 * t64(head["v"]) + (1 - beta2) * g**2
    rule = row_isotropic_adamw if row_iso else entrywise_adamw
    assert close(t64(ours), w * (1 - lr * decay) - lr * rule(m, v, step, beta1, beta2, eps))
    assert (t64(scales).std(1) < 1e-9).all() == row_iso
    if not row_iso:
        p = torch.nn.Parameter(w.clone())
        p.grad = g
        opt = torch.optim.AdamW([p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
        opt.state[p] = {"step": torch.tensor(float(step - 1)), "exp_avg": t64(head["m"]),
                        "exp_avg_sq": t64(head["v"])}
        opt.step()
        assert close(t64(ours), p.detach())


def test_key_derivative_against_autograd():
    toy = {name: vp.vectors(Random(ord(name)), 5, 3) for name in "qkvg"}
    q, k, v, g = (t64(toy[name]) for name in "qkvg")
    k.requires_grad_()
    y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    rewards = (y * g).sum(1)
    assert close(t64(vp.head_rewards(**toy)), rewards.detach())
    # [t, s, D_h]
    by_query = torch.stack([torch.autograd.grad(r, k, retain_graph=True)[0] for r in rewards])
    for gamma in (0, 0.85, 1):
        age = torch.arange(5)[:, None] - torch.arange(5)
        weight = torch.where(age >= 0, float(gamma) ** age.clamp_min(0).double(), 0)
        want = (weight[..., None] * by_query).sum(0)
        assert close(t64(vp.key_derivative(toy, gamma)), want)
    assert close(t64(vp.central_difference(toy, 2)), by_query.sum(0)[2], atol=1e-8)


def test_rounding_slack_is_reached_and_never_passed():
    rng = Random(2)
    for n in (2, 3, 7):
        values, slack = [rng.uniform(1.8, 2.4) for _ in range(n)], vp.sd_slack(n)
        m, sd = vp.mean_sd(values)
        assert math.isclose(m, statistics.mean(values))
        assert math.isclose(sd, statistics.stdev(values))
        for _ in range(50):
            moved = [v + rng.uniform(-0.5e-4, 0.5e-4) for v in values]
            assert abs(statistics.stdev(moved) - sd) <= slack + 1e-12
        corners = [[0.5e-4 * s for s in corner] for corner in vp.signs(n)]
        assert math.isclose(max(map(statistics.stdev, corners)), slack)
    assert round(vp.sd_slack(3) / 1e-4, 3) == 0.577


# ---- the ledger, tampered with ----

PUBLISHED = json.loads(vp.LEDGER.read_text())
SEEDED = [i for i, r in enumerate(PUBLISHED["runs"]) if r["dev_bpb_per_seed"]]
FAULTS = [f["where"] for f in PUBLISHED["known_faults"]]


@pytest.fixture
def tampered(tmp_path, monkeypatch):
    """f(change): the failing ledger checks, name and note, after change(ledger) edited a copy."""
    def check(change):
        ledger = json.loads(vp.LEDGER.read_text())
        change(ledger)
        with monkeypatch.context() as m:
            (tmp_path / "wm.json").write_text(json.dumps(ledger))
            m.setattr(vp, "LEDGER", tmp_path / "wm.json")
            return [f"{c['name']}: {c['note']}" for c in vp.ledger_checks() if not c["ok"]]
    assert check(lambda ledger: None) == []
    return check


@pytest.mark.parametrize("field, by", [("dev_mean", 2e-4), ("dev_sd", 2.2e-4), ("dev_ppl", 0.7),
                                       ("dev_bpb_per_seed", 0.001)])
def test_printed_values_and_seeds_are_checked(tampered, field, by):
    for i in SEEDED[::16]:
        def change(ledger):
            row = ledger["runs"][i]
            if isinstance(row[field], list):
                row[field][-1] += by
            else:
                row[field] += by
        found = tampered(change)
        assert any(PUBLISHED["runs"][i]["arm"] in f for f in found), (field, i)


def test_every_known_fault_is_recomputed(tampered):
    for i, where in enumerate(FAULTS):
        def wrong(ledger):
            ledger["known_faults"][i]["recomputed"] *= 1.01

        def no_fault(ledger):
            fault = ledger["known_faults"][i]
            fault["printed"] = fault["recomputed"]
        assert tampered(wrong) and tampered(no_fault)
        if "PPL" in where:   # without its entry the arm itself fails
            found = tampered(lambda ledger: ledger["known_faults"].pop(i))
            assert any(where.split(", ")[1] in f for f in found)


def test_a_fault_that_nothing_recomputes_fails(tampered):
    added = [{"where": where, "printed": 2, "recomputed": 1, "kind": ""}
             for where in ("Table 9", "Table 3, no_such_arm, DEV PPL against DEV BPB")]
    assert len(tampered(lambda ledger: ledger["known_faults"].extend(added))) == 2


def test_counts_see_missing_doubled_and_nameless_arms(tampered):
    i = SEEDED[20]
    for change, word in ((lambda runs: runs.pop(i), "tabulated: Delayed WM"),
                         (lambda runs: runs.append(runs[i]), "twice"),
                         (lambda runs: runs[i].update(arm="mystery"), "no class: mystery")):
        assert any(word in f for f in tampered(lambda ledger: change(ledger["runs"])))


def test_classes_of_the_ledger():
    assert vp.classify("wm_G2048_codesigned_500steps_match_dustK16_time") == "Delayed WM"
    assert vp.classify("d6_pre_install_fp32_cache_triton_b05_eps1e8") == "Delayed WM"
    for r in (PUBLISHED["runs"][i] for i in SEEDED):   # by what the tables print beside the names
        kind, exact = vp.classify(r["arm"]), "backprop" in r["arm"]
        if "bwd" in r:
            exact = "BP" in (r["detail"] or "") or r["bwd"] == 1
        assert (r["exp"] or "").startswith("exp36") == (kind == "local pullback")
        assert exact == (kind == "exact backpropagation")
        assert (r["matrices"] is None) == (kind == "anchors")
