"""train_oe.py on a tiny corpus: exact resume, kills, divergence, records, a user's mistakes."""
import json
import math
import os
import re
import signal

import pytest
import torch

import train_oe
from batches import Store
from common import UserError, published
from helpers import ROOT, argv_of, assert_same_end, final, sh, signal_at
from optim import MuonAdamW

TINY = dict(depth=2, head_dim=32, seq_len=32, batch_size=8, micro_batch=4, steps=8,
            eval_tokens=500, save_every=0)
ALL_PARTS = dict(oe_m=501, qk_scale="full", wte_route="separate", out_skip=True)


def flags(store, out, **kw):
    """The command line of a run of a second or so."""
    return argv_of({"data": store, "out": out, **TINY, **kw})


def run(store, out, **kw):
    return train_oe.train(train_oe.parse(flags(store, out, **kw)))


@pytest.mark.parametrize("kw", [dict(), ALL_PARTS], ids=["dense", "all parts"])
def test_20_and_20_steps_equal_40_across_an_epoch(store, tmp_path, monkeypatch, kw):
    whole = run(store, tmp_path / "a", steps=40, **kw)
    assert final(tmp_path / "a")["batches"]["epoch"] >= 1   # the data ran out once on the way
    with monkeypatch.context() as m:
        signal_at(19, m)
        assert run(store, tmp_path / "b", steps=40, **kw)["status"] == "stopped"
    assert final(tmp_path / "b")["step"] == 20 and not list((tmp_path / "b").glob("*.json"))
    resumed = run(store, tmp_path / "b", steps=40, resume=True, **kw)
    assert_same_end(final(tmp_path / "a"), final(tmp_path / "b"))
    for key in ("curve", "metrics", "run"):
        assert resumed[key] == whole[key]


DIES_WHILE_SAVING = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch, train_oe
real, calls = torch.save, []
def cut(payload, path):
    calls.append(1)
    real(payload, path)
    if len(calls) == 2:                       # the second checkpoint dies half written
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = cut
train_oe.train(train_oe.parse(sys.argv[2:]))
"""


def test_sigkill_during_a_checkpoint_loses_nothing(store, tmp_path):
    kw = dict(steps=12, oe_m=501, save_every=5)
    run(store, tmp_path / "a", **kw)
    done = sh("-c", DIES_WHILE_SAVING, ROOT, *flags(store, tmp_path / "b", **kw))
    assert done.returncode == -signal.SIGKILL
    assert final(tmp_path / "b")["step"] == 5                # the first one is still whole
    run(store, tmp_path / "b", resume=True, **kw)
    assert_same_end(final(tmp_path / "a"), final(tmp_path / "b"))


def test_a_second_signal_interrupts_at_once(store, tmp_path, monkeypatch):
    calls, before = [], signal.getsignal(signal.SIGINT)
    signal_at(2, monkeypatch)
    real = MuonAdamW.step

    def step(self, closure=None):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)
    monkeypatch.setattr(MuonAdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_same_run_twice_gives_the_same_numbers_and_another_seed_others(store, tmp_path):
    a, b, c = run(store, tmp_path / "a"), run(store, tmp_path / "b"), run(store, tmp_path, seed=7)
    assert a["curve"] == b["curve"] and a["metrics"] == b["metrics"]
    assert a["curve"] != c["curve"] and a["run"] != c["run"]
    d = run(store, tmp_path, data_seed=1)
    assert d["curve"] != a["curve"] and d["run"] != a["run"]


def test_record_has_every_key_and_honest_numbers(store, tmp_path):
    record = run(store, tmp_path, oe_m=501, eval_tokens=0)
    path = tmp_path / f"{record['run']}.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    assert set(record) == {
        "schema", "script", "run", "arm", "status", "config", "changed", "depth", "width", "seed",
        "params", "steps", "tokens", "metrics", "curve", "timing", "env"}
    assert record["status"] == "finished" and record["width"] == 128
    assert record["steps"] == 8 and record["tokens"] == 8 * 8 * 32
    assert record["params"]["oe"] == (4 * 501 + 12) * 32 and len(record["curve"]) == 8
    assert record["script"] == "train_oe.py" and record["env"]["ranks"] == 1
    assert record["changed"]["oe_m"] == 501 and "data" not in record["changed"]
    assert record["config"]["dtype"] == "float32"
    assert record["config"]["data_digest"] == Store(store).digest
    split = Store(store).meta["splits"]["val"]
    nats = record["metrics"]["val_loss"] * split["tokens"]
    # bits per byte from the loss, up to the bos targets
    bpb = nats / math.log(2) / split["bytes"]
    assert abs(bpb / record["metrics"]["val_bpb"] - 1) < 0.05


def test_explicit_flags_win_over_arm_and_preset():
    argv = ["--preset", "laptop", "--arm", "10_oe_native", "--oe_m", "77", "--steps", "3"]
    config = train_oe.parse(argv)
    assert (config.oe_m, config.steps, config.depth, config.seq_len) == (77, 3, 4, 256)


def test_every_arm_parses_to_its_flags():
    for name, arm_flags in train_oe.ARMS.items():
        config = train_oe.parse(["--arm", name])
        assert all(getattr(config, k) == v for k, v in arm_flags.items())
        if name in {run["arm"] for run in published("oe")["runs"]}:   # a row of one's own names no run
            unnamed = train_oe.parse(argv_of(arm_flags))
            assert train_oe.ARMS[unnamed.arm] == arm_flags


def test_micro_batches_see_the_same_rows(store, tmp_path):
    # only step 0 compares: its gradient on x0_lambdas is zero but for rounding, and AdamW turns
    # that into a jump of +-0.5 (OE 4.5)
    a = run(store, tmp_path / "a", micro_batch=8, steps=1)
    b = run(store, tmp_path / "b", micro_batch=2, steps=1)
    assert abs(a["curve"][0][1] - b["curve"][0][1]) < 1e-5 and a["run"] == b["run"]


def test_training_learns_and_the_tables_move(store, tmp_path):
    record = run(store, tmp_path, steps=40, oe_m=501, embed_lr=0.1, oe_lr=0.1)
    assert record["curve"][-1][1] < 0.75 * record["curve"][0][1]
    tables = [t for name, t in final(tmp_path)["model"].items() if "oe_tables" in name]
    assert len(tables) == 4 and all((t != 0).any() for t in tables)


def test_the_matrices_have_another_rule(store, tmp_path):
    muon, adamw = (run(store, tmp_path, steps=3, matrix_rule=name) for name in ("muon", "adamw"))
    assert adamw["changed"]["matrix_rule"] == "adamw" and adamw["run"] != muon["run"]
    assert muon["curve"][0] == adamw["curve"][0] and muon["curve"][2] != adamw["curve"][2]


GATES = [("highway", 2 * 2 * (128**2 + 128)), ("highway_scalar", 2 * 2 * 129)]


@pytest.mark.parametrize("residual, extra", GATES)
def test_highway_gates_on_the_backbone(store, tmp_path, residual, extra):
    plain, gated = (run(store, tmp_path, steps=4, residual=name) for name in ("plain", residual))
    assert gated["params"]["total"] - plain["params"]["total"] == extra
    assert gated["curve"][-1][1] < gated["curve"][0][1] and gated["run"] != plain["run"]


def test_divergence_is_recorded(store, tmp_path):
    record = run(store, tmp_path, embed_lr=1e20, muon_lr=1e20)
    assert record["status"] == "diverged" and record["metrics"] == {} and record["steps"] < 8
    saved = json.loads((tmp_path / f"{record['run']}.json").read_text())
    assert saved["status"] == "diverged" and not list(tmp_path.glob("*.ckpt"))


def test_a_run_destroyed_by_its_last_step_is_diverged(store, tmp_path):
    record = run(store, tmp_path, steps=1, muon_lr=1e20, embed_lr=1e20)
    assert record["status"] == "diverged" and record["metrics"] == {}
    assert math.isfinite(record["curve"][0][1])


# ---- mistakes: one line each, exit code 2, nothing written ----

def refused(argv, match=""):
    with pytest.raises(UserError, match=match) as err:
        train_oe.train(train_oe.parse(argv))
    assert "\n" not in str(err.value)


@pytest.mark.parametrize("kw, match", [
    (dict(oe_m=-5), "oe_m"), (dict(head_dim=33), "heads"), (dict(steps=0), "steps"),
    (dict(arm="13_nothing"), "list_arms"), (dict(preset="desktop"), "choice"),
    (dict(depth=0), "depth"), (dict(batch_size=0), "batch_size"),
    (dict(micro_batch=-1), "micro_batch"), (dict(micro_batch=3), "divide"),
    (dict(seq_len=0), "seq_len"), (dict(depth="two"), "whole number"),
    (dict(muon_lr="nan"), "finite"), (dict(dtype="float8"), "choice"),
    (dict(wte_route="shared", shared_eps=0), "shared_eps"), (dict(eval_tokens=1), "eval_tokens"),
    (dict(muon_lr="1e300"), "too large"), (dict(threads=10**11), "too large"),
    (dict(oe_m=10**11), "too large"), (dict(device="meta"), "device"),
    (dict(seq_len=10**6), "row"), (dict(device="tpu9000"), "device"),
    (dict(qk_scale="half"), "choice"), (dict(step0="nostep0"), "step0"),
])
def test_bad_flags(store, tmp_path, kw, match):
    refused(flags(store, tmp_path / "out", **kw), match)
    assert not list(tmp_path.rglob("*.json")) and not list(tmp_path.rglob("*.ckpt"))


def test_empty_paths(store):
    refused(["--out", "", "--data", store], "empty")
    refused(["--data", ""], "empty")


def test_unknown_repeated_and_abbreviated_flags(store, tmp_path):
    base = flags(store, tmp_path)
    for extra, match in ((["--dept", "3"], "unrecognized"), (["--steps", "3"], "twice"),
                         (["--compile", "--no-compile"], "twice"), (["stray"], "unrecognized"),
                         (["--seed"], "expected"), (["--list_arms"], "no other"),
                         (["--json"], "list_arms")):
        refused(base + extra, match)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda(store, tmp_path):
    refused(flags(store, tmp_path, device="cuda"), "--device cpu")


def test_missing_and_foreign_data(store, tmp_path):
    refused(flags(tmp_path / "nowhere", tmp_path), "data.py")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "meta.json").write_text("{}")
    refused(flags(tmp_path / "foreign", tmp_path), "not a store")


def test_an_unwritable_out(store, tmp_path):
    (tmp_path / "file").write_text("")
    refused(flags(store, tmp_path / "file" / "deep"), "is a file")


def test_exit_codes_of_the_command_line(store, tmp_path):
    bad = sh("train_oe.py", "--steps", "0")
    assert bad.returncode == 2 and bad.stderr.startswith("error: --steps 0")
    assert len(bad.stderr.splitlines()) == 1
    good = sh("train_oe.py", *flags(store, tmp_path, steps=2))
    assert good.returncode == 0 and re.search(r"val \d\.\d{4} bpb", good.stdout)
    assert "step 2/2" in good.stdout                # no terminal: lines instead of a bar


def test_list_arms_and_help(capsys):
    assert train_oe.main(["--list_arms"]) == 0
    shown = capsys.readouterr().out
    assert "10_oe_native" in shown and "0.979503" in shown and "50,332,176" in shown
    train_oe.main(["--list_arms", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in rows] == list(train_oe.ARMS)
    assert sum(row["published_d6"] is not None or row["published_d8"] is not None
               for row in rows) == 26
    with pytest.raises(SystemExit) as done:
        train_oe.main(["--help"])
    assert done.value.code == 0


@pytest.mark.slow
def test_compiled_layers_give_the_same_loss(store, tmp_path):
    plain = run(store, tmp_path / "a", steps=2, oe_m=501)
    quick = run(store, tmp_path / "b", steps=2, oe_m=501, compile=True)
    assert plain["run"] == quick["run"]
    assert abs(plain["curve"][0][1] - quick["curve"][0][1]) < 1e-4
    assert quick["curve"][1][1] < quick["curve"][0][1]
