"""train_wm.py: every arm, exact resume and kills, ranks, records, and the mistakes a user can make."""
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
import common
import eval_heldout
import stats
import train_wm
from common import UserError
from data import prepare
from train_wm import ARMS, BOTH_REGIMES, Config, flags_of
from wm import Rule, active_weights

ROOT = Path(__file__).resolve().parent.parent
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly mix ten jugs of pale ink and sing".split()
PUBLISHED = [r for r in json.loads((ROOT / "published" / "wm.json").read_text())["runs"] if not r["arm"].startswith("prose_")]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder, gen = tmp_path_factory.mktemp("corpus"), torch.Generator().manual_seed(0)
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(" ".join(WORDS[j] for j in torch.randint(0, len(WORDS), (200,), generator=gen).tolist()))
    return str(prepare([str(folder)], vocab_size=300, out=f"{folder}-store"))


def flags(store, out, **kw):
    """Command line of a run of a second or so; True and False become --flag and --no-flag."""
    kw = {**dict(data=store, out=out, depth=2, head_dim=16, width=32, seq_len=16, batch_size=4, steps=6, eval_tokens=200, save_every=0), **kw}
    argv = []
    for key, value in kw.items():
        argv += [f"--{'' if value else 'no-'}{key}"] if isinstance(value, bool) else [f"--{key}", str(value)]
    return argv


def run(store, out, **kw):
    return train_wm.train(train_wm.parse(flags(store, out, **kw)))


def checkpoint(out):
    (path,) = Path(out).glob("*.ckpt")
    return common.load_checkpoint(path)


def assert_same(x, y, where=""):
    if torch.is_tensor(x):
        assert torch.equal(x, y), where
    elif isinstance(x, dict):
        assert x.keys() == y.keys(), where
        for k in x:
            assert_same(x[k], y[k], f"{where}/{k}")
    elif isinstance(x, (list, tuple)):
        assert len(x) == len(y), where
        for i, (a, b) in enumerate(zip(x, y)):
            assert_same(a, b, f"{where}/{i}")
    else:
        assert x == y, where


def assert_same_end(a, b):
    for part in ("model", "pipeline", "batches", "curve"):
        assert_same(a[part], b[part], part)


def test_every_tabulated_arm_is_here():
    named = {(name, regime) for name, f in ARMS.items() for regime in (("d6", "native") if name in BOTH_REGIMES else (f.get("regime", "d6"),))}
    assert named == {(r["arm"], "native" if r["regime"] == "native50m" else "d6") for r in PUBLISHED} and len(named) == 113


def test_arms_say_what_the_tables_say():
    """Steps, width, active parameters, streams, clocks, head optimizer, embedding rates and annealing, as far as they are printed."""
    clocks = {("(t-1,t,t)", "(t-2,t,t)"): "strict_post", ("(t-1,t-1,t)", "(t-2,t,t)"): "stage2_pre", ("(t-1,t-1,t)", "(t-2,t-1,t)"): "both_pre",
              ("(t-1,t-1,t)", "(t-2,t-2,t)"): "origin"}
    counts = {}
    for r in PUBLISHED:
        c = Config(**flags_of(r["arm"], "native" if r["regime"] == "native50m" else "d6"))
        train_wm.check(c)
        assert c.steps == r["steps"] and train_wm.width_of(c) == r["width"], r["arm"]
        if r.get("lm_opt"):
            for key, value in (("lm_pool", r["lm_opt"]["pool"]), ("lm_beta1", r["lm_opt"]["beta1"]), ("lm_eps", r["lm_opt"]["eps"])):
                assert value is None or getattr(c, key) == value, r["arm"]
        for key in ("lr_wte", "lr_ve", "lrm_min"):
            if r.get(key) is not None:
                assert getattr(c, {"lr_wte": "wte_lr", "lr_ve": "ve_lr"}.get(key, key)) == r[key], (r["arm"], key)
        stages = {k: v.replace(" [FP32]", "") for k, v in (r.get("clocks") or {}).items()}
        if (key := (stages.get("stage2"), stages.get("stage1"))) in clocks:
            assert c.clock == clocks[key] and c.method == "wm", r["arm"]
        if r.get("G"):
            assert (c.streams or c.batch_size * c.seq_len) == r["G"], r["arm"]
        if r.get("Mg"):
            assert c.batch_size * c.seq_len // (c.streams or c.batch_size * c.seq_len) == r["Mg"], r["arm"]
        shape = (train_wm.width_of(c), c.depth, c.active, c.method in ("head_only", "lexical_only") and c.method, c.head_temp)
        if shape not in counts:
            with torch.device("meta"):
                model = train_wm.GPT(train_wm.model_config(c, 8192))
            counts[shape] = sum(p.numel() for stage in active_weights(model, c).values() for p in stage.values())
        off = {256: 14.55 - 14.41792, 768: 67.11 - 66.84672}.get(r["width"], 0)  # printed, and not what 4 matrices of that width hold
        assert abs(counts[shape] / 1e6 + off - r["active_params_M"]) < 0.011, (r["arm"], counts[shape])
    assert {24_576_000, 46_137_344, 48_234_496, 50_331_648} <= set(counts.values())


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains(arm, store, tmp_path):
    small = dict(steps=4, streams=4) if flags_of(arm).get("streams") else dict(steps=4)
    small |= dict(draws=2) if ARMS[arm].get("method") in ("sr_lnp", "sr_np") else {}
    small |= dict(accum=2) if ARMS[arm].get("regime") == "native" else {}
    record = run(store, tmp_path, arm=arm, **small)
    assert record["status"] == "finished" and record["arm"] == arm and record["steps"] == 4
    assert 0 < record["metrics"]["val_bpb"] < 10 and len(record["curve"]) == 4


def test_list_arms(capsys):
    assert train_wm.parse(["--list_arms"]) is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 114 and "2.0682 +- 0.0006  (the defaults)" in next(x for x in lines if x.startswith("wm_G2048_codesigned_opt_triton"))


def test_resume_is_exact(store, tmp_path):
    """6 steps in one go equal 3 and 3, bit for bit: weights, optimizer, packets in flight, batches, curve."""
    for name, kw in (("wm", {}), ("qk", dict(active="qk", probes=2, clock="both_pre", accum=2)), ("lnp", dict(method="sr_lnp", draws=2)), ("bp", dict(method="backprop"))):
        run(store, tmp_path / f"{name}-whole", **kw)
        config = train_wm.parse(flags(store, tmp_path / f"{name}-parts", save_every=3, **kw))
        old = train_wm.Pipeline.step

        def stop_after_3(self, step, *args):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return old(self, step, *args)
        train_wm.Pipeline.step = stop_after_3
        try:
            assert train_wm.train(config)["status"] == "stopped"
        finally:
            train_wm.Pipeline.step = old
        assert checkpoint(tmp_path / f"{name}-parts")["step"] == 4
        assert run(store, tmp_path / f"{name}-parts", resume=True, **kw)["status"] == "finished"
        assert_same_end(checkpoint(tmp_path / f"{name}-whole"), checkpoint(tmp_path / f"{name}-parts"))


def test_a_kill_between_stages_loses_nothing(store, tmp_path):
    """SIGKILL in the middle of a step, after stage 2 was built: the last checkpoint continues to the same end."""
    run(store, tmp_path / "whole")
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import train_wm, wm
old = wm.stage1
def killed(model, packet, *rest):
    if packet["step"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return old(model, packet, *rest)
wm.stage1 = killed
train_wm.main({[*flags(store, tmp_path / 'parts', save_every=1)]!r})
"""
    done = subprocess.run([sys.executable, "-c", code.replace("PosixPath", "str")], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert checkpoint(tmp_path / "parts")["step"] == 4
    run(store, tmp_path / "parts", resume=True, save_every=1)
    assert_same_end(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_stopped_on_two_ranks_goes_on(ranks, store, tmp_path):
    """With packets of both ranks in flight it is taken up by as many ranks, or by one, and ends where one process ends."""
    kw = dict(dtype="float64", threads=1, active="qk", streams=8)
    one = run(store, tmp_path / "one", **kw)
    script = tmp_path / "stop.py"
    script.write_text("import os, signal, sys; sys.path.insert(0, sys.argv[1]); import train_wm, wm\n"
                      "real = wm.Pipeline.step\n"
                      "def step(self, n, *rest):\n"
                      "    if n == 2 and self.rank == 1: os.kill(os.getpid(), signal.SIGTERM)\n"
                      "    return real(self, n, *rest)\n"
                      "wm.Pipeline.step = step\n"
                      "train_wm.train(train_wm.parse(sys.argv[2:]))\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    argv = flags(store, tmp_path / "two", **kw)
    done = subprocess.run([*torchrun, "2", str(script), str(ROOT), *argv], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    half = checkpoint(tmp_path / "two")
    assert half["step"] == 3 and [p[0]["idx"].shape for p in half["pipeline"]["packets"].values()] == [(4, 16)] * 2
    done = subprocess.run([*torchrun, str(ranks), str(ROOT / "train_wm.py"), *argv, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(one["curve"]) == 6
    a, b = checkpoint(tmp_path / "one")["model"], checkpoint(tmp_path / "two")["model"]
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kw", [{}, dict(active="qk", streams=8), dict(method="backprop"), dict(method="sr_np", draws=2)], ids=str)
def test_two_ranks_equal_one(kw, store, tmp_path):
    one = run(store, tmp_path / "one", dtype="float64", threads=1, **kw)
    argv = flags(store, tmp_path / "two", dtype="float64", threads=1, **kw)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "train_wm.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "two").glob("*.json")
    two = json.loads(path.read_text())
    assert two["run"] == one["run"] and two["config"]["ranks"] == 2
    assert max(abs(a[1] - b[1]) for a, b in zip(one["curve"], two["curve"])) < 1e-8
    a, b = checkpoint(tmp_path / "one")["model"], checkpoint(tmp_path / "two")["model"]
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6, msg=name)


def test_the_record_can_be_read_by_stats(store, tmp_path, capsys):
    for seed in (1, 2):
        for method in ("wm", "backprop"):
            run(store, tmp_path, method=method, seed=seed)
    (tmp_path / "x.ckpt").unlink(missing_ok=True)
    assert not stats.main([str(p) for p in sorted(tmp_path.glob("*.json"))])
    out = capsys.readouterr().out
    assert "wm_G2048_codesigned_opt_triton" in out and "backprop_d6_codesigned_opt" in out


@pytest.mark.parametrize("kw", [dict(dtype="bfloat16"), dict(dtype="float64", method="backprop"), dict(head_temp=True)], ids=str)
def test_eval_heldout_scores_as_training_did(kw, store, tmp_path, capsys):
    record = run(store, tmp_path, eval_tokens=0, **kw)
    eval_heldout.main([str(tmp_path / f"{record['run']}.ckpt"), "--device", "cpu"])
    assert f"val {record['metrics']['val_bpb']:.6f} bpb, held-out {record['metrics']['heldout_bpb']:.6f} bpb" in capsys.readouterr().out
    again = json.loads((tmp_path / f"{record['run']}.json").read_text())
    assert again["metrics"]["val_nats"] == pytest.approx(record["metrics"]["val_nats"], rel=1e-9)


def test_impl_and_precision_are_refused_before_the_first_step(store, tmp_path):
    """Whatever the rule would not read does not matter; what it cannot have ends the run before it begins, and spares what is there."""
    record = run(store, tmp_path, steps=1)
    for kw in (dict(impl="triton"), dict(precision="tf32"), dict(impl="outer", precision="bf16")):
        with pytest.raises(UserError, match="impl"):
            run(store, tmp_path, steps=1, force=True, **kw)
        assert run(store, tmp_path / "bp", steps=1, method="backprop", force=True, **kw)["status"] == "finished"
    assert {p.name for p in tmp_path.glob("*.*")} == {f"{record['run']}.json", f"{record['run']}.ckpt"}


def test_the_record_names_the_sources_it_started_from(store, tmp_path, monkeypatch):
    """A file edited while a run trains is not what the run ran."""
    order, env, step = [], common.env_record, train_wm.Pipeline.step
    monkeypatch.setattr(common, "env_record", lambda device: order.append("env") or env(device))
    monkeypatch.setattr(train_wm.Pipeline, "step", lambda *args: order.append("step") or step(*args))
    assert run(store, tmp_path, steps=2)["env"]["sources"].keys() >= {"wm.py", "train_wm.py"} and order == ["env", "step", "step"]


def test_names(store, tmp_path):
    name = lambda *argv: train_wm.run_name(train_wm.parse(list(argv)))  # noqa: E731
    assert name() == "wm_G2048_codesigned_opt_triton_d6_seed46"
    assert name("--method", "backprop", "--width", "256") == "width256_backprop_codesigned_d6_seed46"
    assert name("--gamma_k", "0.5") == name()                                   # a flag of a part that is off
    assert name("--active", "qk", "--gamma_k", "0.5") != name("--active", "qk")
    assert name("--sigma", "0.02").startswith("wm_G2048_codesigned_opt_triton_d6_seed46-")                # no arm is about sigma
    assert name("--sigma", "0.02") != name("--sigma", "0.03")
    assert name("--gamma_k", "0.5", "--active", "qk").startswith("custom_d6_seed46-")
    assert name("--arm", "wm_G64_codesigned_opt_triton", "--seed", "47") == "wm_G64_codesigned_opt_triton_d6_seed47"
    assert name("--arm", BOTH_REGIMES[0], "--regime", "native").startswith(f"{BOTH_REGIMES[0]}_d8_seed46")


OTHER = dict(streams=2, scale_factor=3.0, sigma=0.03, project=False, tangent=False, center=False, wte_route="head", filtered_v=False, clock="both_pre",
             reader="adamw_frobnorm", qk_probe="coupled", gamma_k=0.5, probes=2, spherical=False, unit_rms_qk=False, tangent_qk=False, draws=3,
             hidden_opt="adamw", hidden_lr=0.01, hidden_beta=0.9, q_lr=0.1, k_lr=0.1, q_beta=0.5, k_beta=0.5, wte_lr=0.01, ve_lr=0.01,
             packet_dtype="bfloat16", precision="bf16")
ALWAYS = {"lm_lr", "lm_pool", "lm_beta1", "lm_eps", "lrm_min", "adamw_anneal"}             # see test_wm.test_every_flag_acts
ELSEWHERE = {"method", "active", "head_temp", "impl", "packets"}                          # the cases below, and how a run is computed


@pytest.mark.parametrize("kw", [
    {}, dict(active="q"), dict(active="k"), dict(active="qk"), dict(active="qk", hidden_opt="adamw", hidden_lr=0.001), dict(head_temp=True),
    dict(method="backprop"), dict(method="backprop", active="qk"), dict(method="sr_lnp"), dict(method="sr_np"), dict(method="head_only"),
    dict(method="lexical_only"), dict(method="mismatched_origin", active="k")], ids=str)
def test_idle_flags_are_those_that_change_nothing(kw):
    """All idle flags together leave the weights bitwise as they are, and each other flag changes them (those of plain WM are tried there)."""
    assert OTHER.keys() | ALWAYS | ELSEWHERE == {f.name for f in dataclasses.fields(Rule)}
    base = Config(depth=1, head_dim=16, width=32, seq_len=6, batch_size=2, dtype="float64", **{"draws": 2, **kw})
    ids = torch.randint(0, 61, (5, 2, 7), generator=torch.Generator().manual_seed(4))

    def weights(config):
        pipeline = train_wm.build(config, 61, torch.device("cpu"))
        for step, batch in enumerate(ids):
            pipeline.step(step, len(ids), [(batch[:, :-1], batch[:, 1:])])
        return list(pipeline.model.parameters())
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a, b))  # noqa: E731
    plain, idle = weights(base), train_wm.idle(base)
    changed = dataclasses.replace(base, **{k: v for k, v in OTHER.items() if k in idle - {"reader"}})   # check() refuses that one
    assert train_wm.science(changed) == train_wm.science(base) and same(plain, weights(changed))
    tried = OTHER.keys() - train_wm.idle(Config()) if kw and base.method == "wm" else set()
    for name in OTHER.keys() - idle - tried:
        config = dataclasses.replace(base, **{name: OTHER[name] if OTHER[name] != getattr(base, name) else "muon"})
        assert name == "reader" and config.method != "wm" or not same(plain, weights(config)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_where_packets_wait_changes_nothing(dtype, store, tmp_path):
    for where in ("device", "host"):
        run(store, tmp_path / where, dtype=dtype, packets=where, active="qk", steps=4)
    a, b = (checkpoint(tmp_path / where) for where in ("device", "host"))
    assert_same(a["model"], b["model"])
    assert a["curve"] == b["curve"]


@pytest.mark.parametrize("argv, message", [
    (["--method", "sr_np", "--draws", "1"], "no credit"), (["--arm", "nobody"], "unknown"), (["--regime", "d7"], "choice"), (["--width", "100"], "multiple"), (["--streams", "7"], "does not divide"),
    (["--method", "sr_lnp", "--active", "q"], "no rule"), (["--reader", "muon_colnorm", "--hidden_opt", "adamw"], "momentum"),
    (["--method", "backprop", "--reader", "muon_colnorm"], "belongs"), (["--head_temp", "--active", "q"], "choose one"), (["--clock", "late"], "choose"),
    (["--gamma_k", "1.5"], "too large"), (["--sigma", "0"], "too small"), (["--sigma", "nan"], "finite"), (["--probes", "0"], "too small"), (["--eval_tokens", "1"], "no byte"),
    (["--json"], "goes with"), (["--list_arms", "--seed", "1"], "no other flag"), (["--seed", "1", "--seed", "2"], "twice"), (["--out", ""], "empty")])
def test_mistakes(argv, message):
    with pytest.raises(UserError, match=message):
        train_wm.parse(argv)


def test_foreign_checkpoints_and_existing_results(store, tmp_path):
    record = run(store, tmp_path, steps=2)
    with pytest.raises(UserError, match="exists"):
        run(store, tmp_path, steps=2)
    path = tmp_path / f"{record['run']}.ckpt"
    (tmp_path / f"{record['run']}.json").unlink()
    with pytest.raises(UserError, match="unfinished"):
        run(store, tmp_path, steps=2)
    other = common.load_checkpoint(path)
    common.save_checkpoint(path, {**other, "script": "train_oe.py"})
    with pytest.raises(UserError, match="train_oe.py"):
        run(store, tmp_path, steps=2, resume=True)
    for damage in ({"pipeline": {"optimizer": 3}}, {"step": None}, {"config": []}, {"model": 3}, {"batches": 3}):
        common.save_checkpoint(path, {**other, **damage})
        with pytest.raises(UserError, match="damaged"):
            run(store, tmp_path, steps=2, resume=True)
    common.save_checkpoint(path, {**other, "config": {**other["config"], "lm_lr": 0.5}})
    with pytest.raises(UserError, match="lm_lr"):
        run(store, tmp_path, steps=2, resume=True)
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_benches_of_wm_run_in_miniature(capsys):
    """bench.py gpu without a GPU: every part runs, in processes of their own, and the kernel errors are those of float32."""
    bench.main(["gpu", "--pairs", "3", "--device", "cpu", "--threads", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert max(found["kernel_errors"].values()) < 2e-6
    assert found["contraction"]["outer_over_torch_ieee_G2048"] > 1 and found["wm-step"]["memory_ratio"] > 0.5
    assert found["native"]["6 matrices"]["step_s"] > 0
