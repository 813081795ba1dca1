"""train_oe.py and eval_heldout.py on a tiny corpus: exact resume, kills, divergence, records, and every mistake a user can make."""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import audit
import bench
import common
import eval_heldout
import train_oe
from common import UserError
from data import Store, prepare

ROOT = Path(__file__).resolve().parent.parent
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly mix ten jugs of pale ink and sing".split()


def text(seed, n=400):
    gen = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=gen).tolist()) + "\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(text(i, 60 + 20 * i))
    return str(prepare([str(folder)], vocab_size=300, out=f"{folder}-store"))


def flags(store, out, **kw):
    """Command line of a run of a second or so; True and False become --flag and --no-flag."""
    kw = {**dict(depth=2, head_dim=32, seq_len=32, batch_size=4, accum=2, steps=8, eval_tokens=500, save_every=0), **kw}
    argv = ["--data", store, "--out", str(out)]
    for key, value in kw.items():
        argv += [f"--{'' if value else 'no-'}{key}"] if isinstance(value, bool) else [f"--{key}", str(value)]
    return argv


def run(store, out, **kw):
    return train_oe.train(train_oe.parse(flags(store, out, **kw)))


def final(out):
    (path,) = Path(out).glob("*.ckpt")
    return common.load_checkpoint(path)


def assert_same_end(a, b):
    """Two checkpoints hold the same bits: weights, optimizer state, batch state, loss curve."""
    def same(x, y, where):
        if torch.is_tensor(x):
            assert torch.equal(x, y), where
        elif isinstance(x, dict):
            assert x.keys() == y.keys(), where
            for k in x:
                same(x[k], y[k], f"{where}.{k}")
        elif isinstance(x, (list, tuple)):
            assert len(x) == len(y), where
            for i, (p, q) in enumerate(zip(x, y)):
                same(p, q, f"{where}[{i}]")
        else:
            assert x == y, where
    for key in ("model", "optimizer", "batches", "curve", "step"):
        same(a[key], b[key], key)


def interrupt_after(step, monkeypatch):
    """Make the run behave as if SIGTERM arrived during this step."""
    real = train_oe.train_step
    def stepped(model, optimizer, batches, config, number, *rest):
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(model, optimizer, batches, config, number, *rest)
    monkeypatch.setattr(train_oe, "train_step", stepped)


@pytest.mark.parametrize("kw", [dict(), dict(oe_m=501, qk_scale="full", wte_route="separate", out_skip=True)])
def test_20_and_20_steps_equal_40_bit_for_bit_across_an_epoch(store, tmp_path, monkeypatch, kw):
    whole = run(store, tmp_path / "a", steps=40, **kw)
    assert final(tmp_path / "a")["batches"]["epoch"] >= 1            # the data ran out at least once on the way
    with monkeypatch.context() as m:
        interrupt_after(19, m)
        assert run(store, tmp_path / "b", steps=40, **kw)["status"] == "stopped"
    assert final(tmp_path / "b")["step"] == 20 and not list((tmp_path / "b").glob("*.json"))
    resumed = run(store, tmp_path / "b", steps=40, resume=True, **kw)
    assert_same_end(final(tmp_path / "a"), final(tmp_path / "b"))
    assert resumed["curve"] == whole["curve"] and resumed["metrics"] == whole["metrics"] and resumed["run"] == whole["run"]


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch, train_oe
torch.set_num_threads(1)
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
    run(store, tmp_path / "a", steps=12, oe_m=501)
    argv = flags(store, tmp_path / "b", steps=12, oe_m=501, save_every=5)
    done = subprocess.run([sys.executable, "-c", KILLED, str(ROOT), *argv], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert final(tmp_path / "b")["step"] == 5                        # the first one is still whole
    run(store, tmp_path / "b", steps=12, oe_m=501, save_every=5, resume=True)
    assert_same_end(final(tmp_path / "a"), final(tmp_path / "b"))


def test_the_same_run_twice_gives_the_same_numbers_and_another_seed_others(store, tmp_path):
    a, b, c = run(store, tmp_path / "a"), run(store, tmp_path / "b"), run(store, tmp_path / "c", seed=7)
    assert a["curve"] == b["curve"] and a["metrics"] == b["metrics"] and a["curve"] != c["curve"] and a["run"] != c["run"]
    d = run(store, tmp_path / "d", data_seed=1)
    assert d["curve"] != a["curve"] and d["run"] != a["run"]


def test_record_has_every_key_and_honest_numbers(store, tmp_path):
    record = run(store, tmp_path, oe_m=501, eval_tokens=0)
    path = tmp_path / f"{record['run']}.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    assert set(record) == {"schema", "script", "run", "arm", "status", "config", "depth", "width", "seed", "params", "steps", "tokens",
                           "metrics", "curve", "timing", "env"}
    assert record["status"] == "finished" and record["width"] == 128 and record["steps"] == 8 and record["tokens"] == 8 * 4 * 2 * 32
    assert record["params"]["oe"] == (4 * 501 + 12) * 32 and len(record["curve"]) == 8
    assert {"val_bpb", "heldout_bpb", "val_loss", "heldout_loss"} <= set(record["metrics"])
    data = Store(store)
    split = data.meta["splits"]["val"]
    nats = record["metrics"]["val_loss"] * split["tokens"]           # bits per byte from the loss, up to the bos targets
    assert abs(nats / 0.6931471805599453 / split["bytes"] / record["metrics"]["val_bpb"] - 1) < 0.05


def test_names(store):
    name = lambda *argv: train_oe.run_name(train_oe.parse(list(argv)))
    assert name("--depth", "8", "--oe_m", "150855", "--seed", "41") == "10_oe_native_d8_seed41"
    assert name() == "00_dense_native_d6_seed42" == name("--device", "cpu", "--save_every", "7")
    assert name("--arm", "10_oe_native") == "10_oe_native_d6_seed42" == name("--oe-m", "150855")
    other = name("--arm", "10_oe_native", "--steps", "900")
    assert other.startswith("10_oe_native_d6_seed42-") and len(other) == len("10_oe_native_d6_seed42-") + 8
    assert name("--oe_m", "999").startswith("custom_d6_seed42-") and name("--oe_m", "999") != name("--oe_m", "998")


def test_the_benches_time_the_preset():
    preset = train_oe.PRESETS["laptop"]
    assert bench.LAPTOP == {"depth": preset["depth"], "head_dim": preset["head_dim"], "sequence_len": preset["seq_len"]}
    assert bench.LAPTOP_ROWS == preset["batch_size"] * preset["accum"]
    assert bench.LAPTOP_WIDTH == train_oe.model_config(train_oe.parse(["--preset", "laptop"]), bench.LAPTOP_VOCAB).n_embd


def test_explicit_flags_win_over_arm_and_preset():
    config = train_oe.parse(["--preset", "laptop", "--arm", "10_oe_native", "--oe_m", "77", "--steps", "3"])
    assert (config.oe_m, config.steps, config.depth, config.seq_len) == (77, 3, 4, 256)


def test_micro_batches_see_the_same_rows(store, tmp_path):
    # only step 0 compares: its gradient on x0_lambdas is zero but for rounding, and AdamW turns that into a jump of +-0.5 (OE 4.5)
    a = run(store, tmp_path / "a", batch_size=8, accum=1, steps=1)
    b = run(store, tmp_path / "b", batch_size=2, accum=4, steps=1)
    assert abs(a["curve"][0][1] - b["curve"][0][1]) < 1e-5


def test_training_learns_and_the_tables_move(store, tmp_path):
    record = run(store, tmp_path, steps=40, oe_m=501, embed_lr=0.1, oe_lr=0.1)
    assert record["curve"][-1][1] < 0.75 * record["curve"][0][1]
    assert all((t != 0).any() for k, t in final(tmp_path)["model"].items() if "oe_tables" in k)


@pytest.mark.parametrize("residual, extra", [("highway", 2 * 2 * (128**2 + 128)), ("highway_scalar", 2 * 2 * 129)])
def test_highway_gates_on_the_backbone(store, tmp_path, residual, extra):
    plain, gated = (run(store, tmp_path / name, depth=2, residual=name) for name in ("plain", residual))
    assert gated["params"]["total"] - plain["params"]["total"] == extra
    assert gated["curve"][-1][1] < gated["curve"][0][1] and gated["run"] != plain["run"]


def test_divergence_is_recorded(store, tmp_path):
    record = run(store, tmp_path, embed_lr=1e20, muon_lr=1e20)
    assert record["status"] == "diverged" and record["metrics"] == {} and record["steps"] < 8
    saved = json.loads((tmp_path / f"{record['run']}.json").read_text())
    assert saved["status"] == "diverged" and not list(tmp_path.glob("*.ckpt"))


def test_a_run_destroyed_by_its_last_step_is_diverged(store, tmp_path):
    record = run(store, tmp_path, steps=1, muon_lr=1e20, embed_lr=1e20)
    assert record["status"] == "diverged" and record["metrics"] == {} and math.isfinite(record["curve"][0][1])


def test_force_keeps_the_old_result_until_everything_is_read(store, tmp_path):
    record = run(store, tmp_path)
    path = tmp_path / f"{record['run']}.json"
    broken = tmp_path / "store"
    shutil.copytree(store, broken)
    with open(broken / "train.bin", "ab") as f:
        f.write(b"x")
    path.rename(tmp_path / (name := train_oe.run_name(train_oe.parse(flags(str(broken), tmp_path))) + ".json"))
    refused(flags(str(broken), tmp_path, force=True), match="cut or changed")
    assert (tmp_path / name).exists()


def test_one_configuration_has_one_name(store, tmp_path):
    name = lambda **kw: train_oe.run_name(train_oe.parse(flags(store, tmp_path, **kw)))
    assert name() == name(dtype="float32") == name(oe_lr=0.3) == name(shared_eps=1e-5) == name(threads=1)
    assert name() == train_oe.run_name(train_oe.parse(flags(store + "/./", tmp_path))) and name() != name(dtype="float64")
    assert name(oe_m=501) != name(oe_m=501, oe_lr=0.3) and name().startswith("00_dense_native")


# ---- eval_heldout.py ----

def test_eval_heldout_scores_as_training_did_and_writes_back(store, tmp_path, capsys):
    record = run(store, tmp_path, eval_tokens=0, oe_m=501)
    path = tmp_path / f"{record['run']}.json"
    saved = json.loads(path.read_text())
    saved["metrics"]["val_bpb"] = 99.0
    path.write_text(json.dumps(saved))
    eval_heldout.main([str(path.with_suffix(".ckpt")), "--device", "cpu"])
    after = json.loads(path.read_text())
    assert after["metrics"] == record["metrics"] and f"{record['metrics']['val_bpb']:.6f}" in capsys.readouterr().out
    eval_heldout.main([str(path.with_suffix(".ckpt")), "--no-write", "--batch_size", "3"])
    score = float(capsys.readouterr().out.split("held-out ")[1].split()[0])
    assert abs(score - record["metrics"]["heldout_bpb"]) < 2e-6


def test_partial_and_foreign_scores_are_not_written_back(store, tmp_path, capsys):
    record = run(store, tmp_path, eval_tokens=200)
    path = tmp_path / f"{record['run']}.json"
    ckpt = str(path.with_suffix(".ckpt"))
    eval_heldout.main([ckpt, "--eval_tokens", "60"])
    assert json.loads(path.read_text()) == json.loads(json.dumps(record)) and "not written" in capsys.readouterr().out
    eval_heldout.main([ckpt, "--eval_tokens", "200"])
    assert json.loads(path.read_text())["metrics"] == record["metrics"]
    eval_heldout.main([ckpt])                                        # the whole splits say more: the record says that it holds them now
    after = json.loads(path.read_text())
    assert after["config"]["eval_tokens"] == 0 and after["metrics"]["val_tokens"] == Store(store).meta["splits"]["val"]["tokens"]
    path.write_text(json.dumps({**after, "steps": 7}))
    eval_heldout.main([ckpt])
    assert json.loads(path.read_text())["steps"] == 7 and "not written" in capsys.readouterr().out.splitlines()[-1]


def test_a_broken_checkpoint_does_not_stop_the_others(store, tmp_path, capsys):
    record = run(store, tmp_path)
    good = tmp_path / f"{record['run']}.ckpt"
    bad = tmp_path / "a.ckpt"
    saved = common.load_checkpoint(good)
    for damage in ({"step": None}, {"model_config": {"n_layer": 1}}, {"model": {}}, {"config": None}, {"model_config": {**saved["model_config"], "n_layer": 3}}):
        kept = {k: v for k, v in {**saved, **damage}.items() if v is not None}
        common.save_checkpoint(bad, kept)
        assert eval_heldout.main([str(bad), str(good)]) == 2
        said = capsys.readouterr()
        assert "damaged" in said.err and len(said.err.strip().splitlines()) == 1 and str(good) in said.out
        with pytest.raises(UserError, match="damaged|no model"):
            audit.geometry(bad)
        good.rename(tmp_path / "keep"), bad.rename(good)
        (tmp_path / f"{record['run']}.json").rename(tmp_path / "json")
        if not {"model", "step"}.isdisjoint(damage):
            refused(flags(store, tmp_path, resume=True), match="damaged")
        (tmp_path / "keep").rename(good), (tmp_path / "json").rename(tmp_path / f"{record['run']}.json")


def test_sampling_continues_the_text(store, tmp_path, capsys):
    record = run(store, tmp_path, steps=20)
    ckpt = str(tmp_path / f"{record['run']}.ckpt")
    capsys.readouterr()
    outs = []
    eval_heldout.main([ckpt, "--sample", "", "--temperature", "1e-40"])
    assert capsys.readouterr().out and not eval_heldout.main([ckpt, "--sample", "x" * 500])
    capsys.readouterr()
    for extra in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--temperature", "0"]):
        eval_heldout.main([ckpt, "--sample", "the quick <|bos|> ж", "--sample_tokens", "40", *extra])
        outs.append(capsys.readouterr().out)
    assert all(o.startswith("the quick <|bos|> ж") for o in outs)
    assert outs[0] == outs[1] != outs[2] and len(outs[3]) > len("the quick <|bos|> ж\n")


# ---- mistakes: one line each, exit code 2, nothing written or lost ----

def refused(argv, script=train_oe, match=""):
    with pytest.raises(UserError, match=match) as err:
        config = script.parse(argv) if script is train_oe else script.main(argv)
        train_oe.train(config)
    assert "\n" not in str(err.value)


@pytest.mark.parametrize("kw, match", [
    (dict(oe_m=-5), "oe_m"), (dict(head_dim=33), "heads"), (dict(steps=0), "steps"), (dict(arm="13_nothing"), "list_arms"),
    (dict(preset="desktop"), "preset|choice"), (dict(depth=0), "depth"), (dict(batch_size=0), "batch_size"), (dict(accum=-1), "accum"),
    (dict(seq_len=0), "seq_len"), (dict(depth="two"), "whole number"), (dict(muon_lr="nan"), "finite"), (dict(dtype="float8"), "choice"),
    (dict(wte_route="shared", shared_eps=0), "shared_eps"), (dict(eval_tokens=1), "eval_tokens"), (dict(muon_lr="1e300"), "too large"),
    (dict(threads=10**11), "too large"), (dict(oe_m=10**11), "too large"), (dict(device="meta"), "device"), (dict(seq_len=10**6), "row"), (dict(device="tpu9000"), "device"), (dict(qk_scale="half"), "choice"),
])
def test_bad_flags(store, tmp_path, kw, match):
    refused(flags(store, tmp_path / "out", **kw), match=match)
    assert not list(tmp_path.rglob("*.json")) and not list(tmp_path.rglob("*.ckpt"))


def test_empty_paths(store, tmp_path):
    refused(["--out", "", "--data", store], match="empty")
    refused(["--data", ""], match="empty")


def test_unknown_repeated_and_abbreviated_flags(store, tmp_path):
    base = flags(store, tmp_path)
    for extra, match in ((["--dept", "3"], "unrecognized"), (["--steps", "3"], "twice"), (["--compile", "--no-compile"], "twice"),
                         (["stray"], "unrecognized"), (["--seed"], "expected"), (["--list_arms"], "no other")):
        refused(base + extra, match=match)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda(store, tmp_path):
    refused(flags(store, tmp_path, device="cuda"), match="--device cpu")


def test_missing_and_foreign_data(store, tmp_path):
    refused(flags(str(tmp_path / "nowhere"), tmp_path), match="data.py")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "meta.json").write_text("{}")
    refused(flags(str(tmp_path / "foreign"), tmp_path), match="not a store")


def test_an_existing_result_is_never_lost(store, tmp_path):
    record = run(store, tmp_path)
    path = tmp_path / f"{record['run']}.json"
    before = path.read_bytes(), path.with_suffix(".ckpt").read_bytes()
    refused(flags(store, tmp_path), match="--force")
    assert run(store, tmp_path, resume=True) == json.loads(path.read_text())     # a requeued job that was done is done
    assert before == (path.read_bytes(), path.with_suffix(".ckpt").read_bytes())
    path.unlink()
    refused(flags(store, tmp_path), match="--resume")                # a checkpoint alone is an unfinished run
    again = run(store, tmp_path, resume=True)
    assert again["metrics"] == record["metrics"] and path.exists()
    assert run(store, tmp_path, force=True)["curve"] == record["curve"]


@pytest.mark.parametrize("damage", ["truncate", "text", "foreign", "empty"])
def test_broken_checkpoints_are_refused(store, tmp_path, damage):
    record = run(store, tmp_path)
    ckpt = tmp_path / f"{record['run']}.ckpt"
    ckpt.with_suffix(".json").unlink()
    if damage == "truncate":
        os.truncate(ckpt, ckpt.stat().st_size // 2)
    elif damage == "foreign":
        torch.save({"model": {}}, ckpt)
    else:
        ckpt.write_text("hello" if damage == "text" else "")
    refused(flags(store, tmp_path, resume=True), match="checkpoint")
    refused([str(ckpt)], eval_heldout, match="checkpoint")


def test_resume_with_other_flags_or_data_is_refused(store, tmp_path):
    record = run(store, tmp_path)
    ckpt = tmp_path / f"{record['run']}.ckpt"
    saved = common.load_checkpoint(ckpt)
    ckpt.with_suffix(".json").unlink()
    for change, match in ((dict(config={**saved["config"], "muon_lr": 0.5}), "muon_lr"), (dict(data_digest="0"), "corpus")):
        common.save_checkpoint(ckpt, {**saved, **change})
        refused(flags(store, tmp_path, resume=True), match=match)


def test_checkpoint_of_another_vocabulary(store, tmp_path):
    record = run(store, tmp_path)
    (tmp_path / "t").mkdir()
    for i in range(20):
        (tmp_path / "t" / f"{i}.txt").write_text(text(1000 + i, 300))
    other = prepare([str(tmp_path / "t")], vocab_size=280, out=str(tmp_path / "other"))
    refused([str(tmp_path / f"{record['run']}.ckpt"), "--data", str(other)], eval_heldout, match="vocabulary")


def test_unwritable_out(store, tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run([sys.executable, str(ROOT / "train_oe.py"), *flags(store, tmp_path / "file" / "deep")], capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr


def test_two_runs_at_once_of_the_same_name(store, tmp_path):
    config = train_oe.parse(flags(store, tmp_path))
    with common.locked(tmp_path / f"{train_oe.run_name(config)}.json"):
        refused(flags(store, tmp_path), match="another process")
    assert run(store, tmp_path)["status"] == "finished"


def test_exit_codes_of_the_command_line(store, tmp_path):
    def go(*argv):
        return subprocess.run([sys.executable, str(ROOT / "train_oe.py"), *argv], capture_output=True, text=True)
    bad = go("--steps", "0")
    assert bad.returncode == 2 and bad.stderr.startswith("error: --steps 0") and len(bad.stderr.splitlines()) == 1
    arms = go("--list_arms")
    assert arms.returncode == 0 and "10_oe_native" in arms.stdout and "0.979503" in arms.stdout
    good = go(*flags(store, tmp_path, steps=2, threads=1))
    assert good.returncode == 0 and "val" in good.stdout and "bpb" in good.stdout
    assert go("--help").returncode == 0


@pytest.mark.slow
def test_compiled_layers_give_the_same_loss(store, tmp_path):
    plain = run(store, tmp_path / "a", steps=2, oe_m=501)
    quick = run(store, tmp_path / "b", steps=2, oe_m=501, compile=True)
    assert plain["run"] == quick["run"] and abs(plain["curve"][0][1] - quick["curve"][0][1]) < 1e-4
    assert quick["curve"][1][1] < quick["curve"][0][1]
