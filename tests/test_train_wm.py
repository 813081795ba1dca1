"""train_wm.py: every arm, exact resume and kills, ranks, records, names, a user's mistakes."""
import dataclasses
import json
import signal

import pytest
import torch

import common
import eval_heldout
import train_wm
from batches import BestFitBatches
from common import UserError
from helpers import DIES_AT, ROOT, argv_of, assert_same, assert_same_end, final, sh, signal_at
from runs import open_store, run_name
from train_wm import ARMS, Config, flags_of
from wm import METHODS, Rule, active_weights

TINY = dict(depth=2, head_dim=16, width=32, seq_len=16, batch_size=4, steps=6, eval_tokens=200,
            save_every=0)
PUBLISHED = [row for row in common.published("wm")["runs"] if not row["arm"].startswith("prose_")]
QK_PACKETS = dict(active="qk", probes=2, clock="both_pre", batch_size=8, micro_batch=4)


def flags(store, out, **kw):
    """The command line of a run of a second or so."""
    return argv_of({"data": store, "out": out, **TINY, **kw})


def run(store, out, **kw):
    return train_wm.train(train_wm.parse(flags(store, out, **kw)))


def regime_of(row):
    return "native" if row["regime"] == "native50m" else "d6"


# ---- arms ----

def test_every_tabulated_arm_is_here(capsys):
    train_wm.parse(["--list_arms", "--json"])
    rows = json.loads(capsys.readouterr().out)
    found = {(row["arm"], row["regime"]) for row in rows}
    assert found == {(row["arm"], regime_of(row)) for row in PUBLISHED} and len(rows) == 113
    assert train_wm.parse(["--list_arms"]) is None
    lines = capsys.readouterr().out.splitlines()
    (line,) = [x for x in lines if x.startswith("wm_G2048_codesigned_opt_triton ")]
    assert len(lines) == 114 and line.endswith("2.0682 +- 0.0006  (the defaults)")


# what the paper prints of a run: column -> flag
PRINTED = {"steps": "steps", "lr_wte": "wte_lr", "lr_ve": "ve_lr", "lrm_min": "lrm_min"}
PRINTED_HEAD = {"pool": "lm_pool", "beta1": "lm_beta1", "eps": "lm_eps"}
PRINTED_CLOCKS = {
    ("(t-1,t,t)", "(t-2,t,t)"): "strict_post", ("(t-1,t-1,t)", "(t-2,t,t)"): "stage2_pre",
    ("(t-1,t-1,t)", "(t-2,t-1,t)"): "both_pre", ("(t-1,t-1,t)", "(t-2,t-2,t)"): "origin"}


def active_params(config, counts={}):
    shape = (train_wm.width_of(config), config.depth, config.active, config.head_temp,
             METHODS[config.method].learns)
    if shape not in counts:
        with torch.device("meta"):
            model = train_wm.GPT(train_wm.model_config(config, 8192))
        stages = active_weights(model, config).values()
        counts[shape] = sum(p.numel() for stage in stages for p in stage.values())
    return counts[shape]


def test_arms_say_what_the_tables_say():
    """Steps, width, active parameters, streams, clocks, head optimizer, embedding rates and
    annealing, as far as they are printed."""
    counts = set()
    for row in PUBLISHED:
        arm, head = row["arm"], row.get("lm_opt") or {}
        config = Config(**flags_of(arm, regime_of(row)))
        train_wm.check(config)
        printed = {PRINTED[k]: row.get(k) for k in PRINTED}
        printed |= {PRINTED_HEAD[k]: head.get(k) for k in PRINTED_HEAD}
        for name, value in printed.items():
            assert value is None or getattr(config, name) == value, (arm, name)
        assert train_wm.width_of(config) == row["width"], arm
        built = row.get("clocks") or {}
        key = tuple(built.get(stage, "").replace(" [FP32]", "") for stage in ("stage2", "stage1"))
        if key in PRINTED_CLOCKS:
            assert config.clock == PRINTED_CLOCKS[key] and config.method == "wm", arm
        tokens = train_wm.rows_at_once(config) * config.seq_len
        streams = config.streams or tokens
        assert streams == (row.get("G") or streams), arm
        assert tokens // streams == (row.get("Mg") or tokens // streams), arm
        # printed, and not what 4 matrices of that width hold
        off = {256: 14.55 - 14.41792, 768: 67.11 - 66.84672}.get(row["width"], 0)
        count = active_params(config)
        counts.add(count)
        assert abs(count / 1e6 + off - row["active_params_M"]) < 0.011, (arm, count)
    assert {24_576_000, 46_137_344, 48_234_496, 50_331_648} <= counts


def code_path(arm):
    """What decides which code an arm runs: all but the sizes of its numbers."""
    config = Config(**flags_of(arm))
    values = {name: getattr(config, name) for name in (f.name for f in dataclasses.fields(Rule))}
    path = {name: v for name, v in values.items() if isinstance(v, (str, bool))}
    path |= {name: bool(values[name]) for name in ("streams", "gamma_k")}
    path |= {"probes": config.probes > 1, "micro_batch": bool(config.micro_batch)}
    acting = path.keys() - train_wm.idle(config) - {"impl", "adamw_anneal"}
    return tuple(sorted((name, path[name]) for name in acting))


CODE_PATHS = {code_path(arm): arm for arm in reversed(ARMS)}   # the first arm of each


@pytest.mark.parametrize("arm", CODE_PATHS.values())
def test_an_arm_of_every_code_path_trains(arm, store, tmp_path):
    own = flags_of(arm)
    small = dict(steps=4, draws=2, micro_batch=2 if own.get("micro_batch") else 0)
    if own.get("streams"):
        small["streams"] = 4
    record = run(store, tmp_path, arm=arm, **small)
    assert record["status"] == "finished" and record["arm"] == arm and record["steps"] == 4
    assert 0 < record["metrics"]["val_bpb"] < 10 and len(record["curve"]) == 4


def test_every_arm_parses_to_its_flags():
    assert 30 <= len(CODE_PATHS) <= 50 < len(ARMS)
    for arm, own in ARMS.items():
        config = train_wm.parse(["--arm", arm])
        assert config.arm == arm and all(getattr(config, k) == v for k, v in own.items()), arm
        unnamed = train_wm.parse(argv_of(flags_of(arm)))   # called after the first arm like it
        for same in (unnamed, train_wm.parse(["--arm", unnamed.arm])):
            assert common.changed_flags(same) == common.changed_flags(config), arm


# ---- exact resume ----

@pytest.mark.parametrize("kw", [{}, QK_PACKETS, dict(method="backprop")], ids=["wm", "qk", "bp"])
def test_resume_is_exact(kw, store, tmp_path, monkeypatch):
    """6 steps in one go equal 4 and 2, bit for bit: weights, optimizer, packets in flight, batches,
    curve."""
    run(store, tmp_path / "whole", **kw)
    with monkeypatch.context() as m:
        signal_at(3, m)
        assert run(store, tmp_path / "parts", save_every=3, **kw)["status"] == "stopped"
    assert final(tmp_path / "parts")["step"] == 4
    assert run(store, tmp_path / "parts", resume=True, **kw)["status"] == "finished"
    assert_same_end(final(tmp_path / "whole"), final(tmp_path / "parts"))


def test_a_kill_with_packets_in_flight_loses_nothing(store, tmp_path):
    """SIGKILL before a step is saved: the last checkpoint continues to the same end."""
    run(store, tmp_path / "whole")
    argv = flags(store, tmp_path / "parts", save_every=1)
    assert sh("-c", DIES_AT, ROOT, "train_wm", 4, *argv).returncode == -signal.SIGKILL
    assert final(tmp_path / "parts")["step"] == 4
    run(store, tmp_path / "parts", resume=True, save_every=1)
    assert_same_end(final(tmp_path / "whole"), final(tmp_path / "parts"))


@pytest.mark.parametrize("kw", [dict(active="qk"), dict(method="backprop"),
                                dict(method="mismatched_origin"), dict(method="sr_np", draws=2)],
                         ids=str)
def test_train_is_the_step_that_audits_take(kw, store, tmp_path):
    """train() writes a step out, Pipeline.step composes it: the same bits."""
    run(store, tmp_path, batch_size=8, micro_batch=4, **kw)
    saved, corpus = final(tmp_path), open_store(store)
    config = Config(**{k: v for k, v in saved["config"].items() if k != "data_digest"})
    model = train_wm.build_model(config, corpus.vocab_size)
    pipeline = train_wm.build_pipeline(config, model)
    batches = BestFitBatches(corpus.train, corpus.bos, 4, 16, 0)
    losses = [pipeline.step(step, 6, [batches.next() for _ in range(2)]) for step in range(6)]
    assert saved["curve"] == [[step, loss] for step, loss in enumerate(losses)]
    assert_same(saved["model"], model.state_dict())
    assert_same(saved["pipeline"], pipeline.state_dict())


# ---- ranks ----

def torchrun(script, *argv, ranks=2):
    launch = ("torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}")
    done = sh("-m", *launch, script, *argv, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def assert_close_weights(one, two):
    a, b = final(one)["model"], final(two)["model"]
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6, msg=name)


STOP_RANK_1 = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import runs, train_wm
real = runs.Run.log
def log(self, loss):
    if self.step == 2 and self.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    real(self, loss)
runs.Run.log = log
train_wm.train(train_wm.parse(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_stopped_on_two_ranks_goes_on(ranks, store, tmp_path):
    """With packets of both ranks in flight it is taken up by as many ranks, or by one, and ends
    where one process ends."""
    kw = dict(dtype="float64", active="qk", streams=8)
    one = run(store, tmp_path / "one", **kw)
    (tmp_path / "stop.py").write_text(STOP_RANK_1)
    argv = flags(store, tmp_path / "two", **kw)
    torchrun(tmp_path / "stop.py", ROOT, *argv)
    half = final(tmp_path / "two")
    shapes = [p[0]["idx"].shape for p in half["pipeline"]["packets"].values()]
    assert half["step"] == 3 and shapes == [(4, 16)] * 2
    torchrun(ROOT / "train_wm.py", *argv, "--resume", ranks=ranks)
    assert len(one["curve"]) == 6
    assert_close_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("kw", [{}, dict(active="qk", streams=8), dict(method="backprop"),
                                dict(method="sr_np", draws=2)], ids=str)
def test_two_ranks_equal_one(kw, store, tmp_path):
    one = run(store, tmp_path / "one", dtype="float64", **kw)
    torchrun(ROOT / "train_wm.py", *flags(store, tmp_path / "two", dtype="float64", **kw))
    (path,) = (tmp_path / "two").glob("*.json")
    two = json.loads(path.read_text())
    assert two["run"] == one["run"] and two["env"]["ranks"] == 2
    assert max(abs(a[1] - b[1]) for a, b in zip(one["curve"], two["curve"])) < 1e-8
    assert_close_weights(tmp_path / "one", tmp_path / "two")


def test_what_does_not_split_over_ranks_is_refused():
    for name, value in (("micro_batch", 1), ("streams", 3)):
        with pytest.raises(UserError, match=f"--{name} {value} does not split over 2 ranks"):
            train_wm.share_of(Config(**{name: value}), 2)


# ---- records and names ----

def test_the_record_can_be_read_by_stats(store, tmp_path, capsys):
    for seed in (1, 2):
        for method in ("wm", "backprop"):
            run(store, tmp_path, method=method, seed=seed, steps=2)
    import stats
    assert not stats.main([str(p) for p in sorted(tmp_path.glob("*.json"))])
    out = capsys.readouterr().out
    assert "wm_G2048_codesigned_opt_triton" in out and "backprop_d6_codesigned_opt" in out


@pytest.mark.parametrize("kw", [dict(dtype="bfloat16"), dict(dtype="float64", method="backprop"),
                                dict(head_temp=True)], ids=str)
def test_eval_heldout_scores_as_training_did(kw, store, tmp_path, capsys):
    record = run(store, tmp_path, eval_tokens=0, **kw)
    eval_heldout.main([str(tmp_path / f"{record['run']}.ckpt"), "--device", "cpu"])
    val, heldout = record["metrics"]["val_bpb"], record["metrics"]["heldout_bpb"]
    assert f"val {val:.6f} bpb, held-out {heldout:.6f} bpb" in capsys.readouterr().out
    again = json.loads((tmp_path / f"{record['run']}.json").read_text())
    nats = record["metrics"]["val_nats"]
    assert again["metrics"]["val_nats"] == pytest.approx(nats, rel=1e-9)


def test_impl_and_precision_are_refused_before_the_first_step(store, tmp_path):
    """What the machine cannot do ends the run before it begins, and spares what is there; what the
    method does not read does not matter."""
    record = run(store, tmp_path, steps=1)
    for kw in (dict(impl="triton"), dict(precision="tf32"), dict(impl="outer", precision="bf16")):
        with pytest.raises(UserError, match="impl"):
            run(store, tmp_path, steps=1, force=True, **kw)
        plain = run(store, tmp_path / "bp", steps=1, method="backprop", force=True, **kw)
        assert plain["status"] == "finished"
    kept = {p.name for p in tmp_path.glob("*.*")}
    assert kept == {f"{record['run']}.json", f"{record['run']}.ckpt"}


def test_the_record_names_the_sources_it_started_from(store, tmp_path, monkeypatch):
    """A file edited while a run trains is not what the run ran."""
    draw = BestFitBatches.next

    def rows(batches):
        monkeypatch.setattr(common, "env_record", None)   # too late to look
        return draw(batches)
    monkeypatch.setattr(BestFitBatches, "next", rows)
    sources = run(store, tmp_path, steps=2)["env"]["sources"]
    assert sources.keys() >= {"wm.py", "wm_pipeline.py", "train_wm.py"}


def name(*argv):
    config = train_wm.parse(list(argv))
    base, size, idle = train_wm.naming(config)
    return run_name("train_wm.py", config, base, size, "", idle)


def test_names():
    plain, qk = "wm_G2048_codesigned_opt_triton_d6", "wm_d6_6mat_decoupled_qk_future_g085_lrk012"
    both = "frozen_backbone_lm_head_only"
    for argv, want in (
            ("", f"{plain}_seed46"),
            ("--gamma_k 0.5", f"{plain}_seed46"),     # a flag of a part that is off
            ("--width 384 --micro_batch 8 --impl torch --packets host", f"{plain}_seed46"),
            ("--sigma 0.02", f"{plain}_sigma0.02_seed46"),
            ("--method backprop --width 256", "width256_backprop_codesigned_d6_seed46"),
            ("--gamma_k 0.5 --active qk", f"{qk}_triton_d6_gamma_k0.5_seed46"),
            ("--method lexical_only --seed 47", "lexical_only_d6_seed47"),
            ("--method sr_np", "sr_np_d6_seed46"),    # the paper's has 4 draws
            ("--regime native", "native50m_strict_post_install_M1_wte15e3_triton_d8_seed46"),
            ("--batch_size 64 --micro_batch 4", f"{plain}_batch_size64_micro_batch4_seed46"),
            (f"--arm {both} --regime native", f"{both}_d8_seed46"),
            (f"--arm {both}", f"{both}_d6_seed46")):
        assert name(*argv.split()) == want


# ---- idle flags ----

OTHER = dict(
    streams=2, scale_factor=3.0, sigma=0.03, project=False, tangent=False, center=False,
    wte_route="head", filtered_v=False, clock="both_pre", reader="adamw_frobnorm",
    qk_probe="coupled", gamma_k=0.5, probes=2, spherical=False, unit_rms_qk=False,
    tangent_qk=False, draws=3, hidden_opt="adamw", hidden_lr=0.01, hidden_beta=0.9, q_lr=0.1,
    k_lr=0.1, q_beta=0.5, k_beta=0.5, wte_lr=0.01, ve_lr=0.01, packet_dtype="bfloat16",
    precision="bf16", lm_lr=0.01, lm_pool="row_iso", lm_beta1=0.1, lm_eps=1e-3, lrm_min=0.9,
    adamw_anneal=False)
# no other flags may change what they do: the methods and matrices below, and how a run is computed
ELSEWHERE = {"method", "active", "head_temp", "impl", "packets"}


def trained(config):
    """The weights after a few steps of a Config on random ids."""
    ids = torch.randint(0, 61, (5, 2, 7), generator=torch.Generator().manual_seed(4))
    model = train_wm.build_model(config, 61)
    pipeline = train_wm.build_pipeline(config, model)
    for step, rows in enumerate(ids):
        pipeline.step(step, len(ids), [(rows[:, :-1], rows[:, 1:])])
    return list(model.parameters())


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("kw", [
    {}, *[dict(active=which) for which in ("q", "k", "qk")], dict(head_temp=True),
    dict(active="qk", hidden_opt="adamw", hidden_lr=0.001), dict(method="backprop", active="qk"),
    dict(method="mismatched_origin", active="k"),
    *[dict(method=m) for m in ("backprop", "sr_lnp", "sr_np", "head_only", "lexical_only")],
], ids=str)
def test_idle_flags_are_those_that_change_nothing(kw):
    """All idle flags together leave the weights bitwise as they are and the run its name; each
    other flag changes them."""
    assert OTHER.keys() | ELSEWHERE == {f.name for f in dataclasses.fields(Rule)}
    base = Config(depth=1, head_dim=16, width=32, seq_len=6, batch_size=2, dtype="float64",
                  **{"draws": 2, **kw})
    plain, idle = trained(base), train_wm.idle(base)
    # check() refuses --reader where it is idle
    changed = dataclasses.replace(base, **{k: OTHER[k] for k in OTHER if k in idle - {"reader"}})
    assert common.changed_flags(changed, idle) == common.changed_flags(base, idle)
    assert train_wm.idle(changed) == idle and same(plain, trained(changed))
    for name in OTHER.keys() - idle:
        value = OTHER[name] if OTHER[name] != getattr(base, name) else "muon"
        assert not same(plain, trained(dataclasses.replace(base, **{name: value}))), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_where_packets_wait_changes_nothing(dtype, store, tmp_path):
    found = []
    for where in ("device", "host"):
        run(store, tmp_path / where, dtype=dtype, packets=where, active="qk", steps=4)
        found.append(final(tmp_path / where))
    assert_same(found[0]["model"], found[1]["model"])
    assert found[0]["curve"] == found[1]["curve"] and found[0]["changed"] == found[1]["changed"]


# ---- mistakes ----

@pytest.mark.parametrize("argv, message", [
    ("--method sr_np --draws 1", "no credit"), ("--arm nobody", "unknown"),
    ("--regime d7", "choice"), ("--width 100", "multiple"), ("--streams 7", "does not divide"),
    ("--micro_batch 3", "does not divide"), ("--method sr_lnp --active q", "no rule"),
    ("--reader muon_colnorm --hidden_opt adamw", "momentum"),
    ("--method backprop --reader muon_colnorm", "belongs"),
    ("--method mismatched_origin --reader adamw_frobnorm", "belongs"),
    ("--head_temp --active q", "choose one"), ("--clock late", "choose"),
    ("--gamma_k 1.5", "too large"), ("--sigma 0", "too small"), ("--eval_tokens 1", "no byte")])
def test_mistakes(argv, message):
    with pytest.raises(UserError, match=message):
        train_wm.parse(argv.split())


def test_damaged_packets_are_refused(store, tmp_path):
    record = run(store, tmp_path, steps=2)
    path = tmp_path / f"{record['run']}.ckpt"
    (tmp_path / f"{record['run']}.json").unlink()
    whole = common.load_checkpoint(path)
    for pipeline in ({"optimizer": 3}, 3, {**whole["pipeline"], "packets": {0: [{"key": 1}]}}):
        common.save_checkpoint(path, {**whole, "pipeline": pipeline})
        with pytest.raises(UserError, match="damaged"):
            run(store, tmp_path, steps=2, resume=True)
