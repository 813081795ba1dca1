"""runs.py: locks, signals, ranks, names, and the rule of what is the same run."""
import dataclasses
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import common
import runs
import train_oe
import train_wm
from common import UserError
from helpers import ROOT, argv_of, assert_same_end, final, sh, signal_at

TINY = dict(depth=2, head_dim=32, seq_len=32, batch_size=4, micro_batch=4, steps=4,
            eval_tokens=200, save_every=0)


def flags(store, out, **kw):
    return argv_of({"data": store, "out": out, **TINY, **kw})


def run(store, out, script=train_oe, **kw):
    return script.train(script.parse(flags(store, out, **kw)))


def name_of(*argv, label=""):
    """The name that a command line's run would have."""
    config = train_oe.parse(list(argv))
    base, size, idle = train_oe.naming(config)
    return runs.run_name("train_oe.py", config, base, size, label, idle)


# ---- locks ----

def test_locks_exclude_and_leave_no_file(tmp_path):
    with runs.locked(tmp_path / "run.json"):
        with pytest.raises(UserError, match="another process"), runs.locked(tmp_path / "run.json"):
            pass
    assert os.listdir(tmp_path) == []


LEAVES_HALF_FILES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import common
names = ("a[1]_seed4.ckpt", "a[1]_seed46.ckpt")
held = [common.atomic_path(os.path.join(sys.argv[2], name)) for name in names]
for h in held:
    h.__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lock_clears_away_what_a_killed_owner_left(tmp_path):
    command = [sys.executable, "-S", "-c", LEAVES_HALF_FILES, str(ROOT), str(tmp_path)]
    subprocess.run(command)
    assert len(os.listdir(tmp_path)) == 2
    with runs.locked(tmp_path / "a[1]_seed4.json"):
        pass
    # another run's may be in use
    assert [name[:16] for name in os.listdir(tmp_path)] == [".a[1]_seed46.ckp"]


def test_a_lock_taken_on_a_removed_file_is_taken_again(tmp_path, monkeypatch):
    """The file may vanish between opening and locking it, and another process hold a new one."""
    import fcntl
    path, flock, calls = tmp_path / "cell", fcntl.flock, []

    def late(f, how):
        calls.append(f)
        if len(calls) == 1:
            (tmp_path / ".cell.lock").unlink()
        return flock(f, how)
    monkeypatch.setattr(fcntl, "flock", late)
    with runs.locked(path):
        assert len(calls) == 2 and (tmp_path / ".cell.lock").exists()
        with pytest.raises(UserError, match="another process"), runs.locked(path):
            pass
    assert not (tmp_path / ".cell.lock").exists()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    import fcntl

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="cannot be locked") as told:
        with runs.locked(tmp_path / "run.json"):
            pass
    assert not isinstance(told.value, runs.Busy)


def test_a_waiting_lock_comes_after_its_holder(tmp_path):
    order, begun = [], threading.Event()

    def second():
        begun.set()
        with runs.locked(tmp_path / "a.json", wait=True):
            order.append("second")
    with runs.locked(tmp_path / "a.json"):
        thread = threading.Thread(target=second)
        thread.start()
        begun.wait()
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"] and os.listdir(tmp_path) == []


@pytest.mark.parametrize("env", [dict(WORLD_SIZE="abc"), dict(WORLD_SIZE="2"),
                                 dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="x")])
def test_half_a_torchrun_environment(env, monkeypatch):
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="torchrun"), runs.ranks("cpu"):
        pass


# ---- names ----

def test_names():
    assert name_of() == "00_dense_native_d6_seed42" == name_of("--device", "cpu", "--threads", "7")
    assert name_of("--depth", "8", "--oe_m", "150855", "--seed", "41") == "10_oe_native_d8_seed41"
    assert name_of("--arm", "10_oe_native") == "10_oe_native_d6_seed42" == name_of("--oe-m", "150855")
    assert name_of("--preset", "laptop") == "00_dense_native_laptop_seed42"
    assert name_of("--preset", "laptop", "--depth", "3") == "00_dense_native_laptop_depth3_seed42"
    assert name_of("--muon_lr", "0.02") == "00_dense_native_d6_muon_lr0.02_seed42"
    both = name_of("--muon_lr", "0.02", "--out_skip")
    assert both == "00_dense_native_d6_out_skip_muon_lr0.02_seed42"
    three = name_of("--muon_lr", "0.02", "--out_skip", "--residual", "highway")
    assert len(three.split("_")[-2]) == 8 and three.startswith("00_dense_native_d6_")
    assert name_of(label="books-1a2b3c") == "00_dense_native_d6_books-1a2b3c_seed42"


def test_one_configuration_has_one_name():
    assert name_of("--oe_lr", "0.3") == name_of("--shared_eps", "1e-5") == name_of()
    assert name_of("--micro_batch", "32") == name_of() != name_of("--batch_size", "128")
    assert name_of("--oe_m", "501") != name_of("--oe_m", "501", "--oe_lr", "0.3")
    assert name_of("--oe_m", "999") != name_of("--oe_m", "998")


def test_a_row_added_to_ARMS_renames_no_run(monkeypatch):
    asked = ["--oe_m", "150855", "--muon_lr", "0.02"]
    before = name_of(*asked)
    monkeypatch.setitem(train_oe.ARMS, "mine", dict(oe_m=150855, muon_lr=0.02))
    assert name_of(*asked) == before == "10_oe_native_d6_muon_lr0.02_seed42"
    assert name_of("--arm", "mine") == "mine_d6_seed42"


def test_a_run_is_the_same_under_another_device_dtype_name_thread_count_or_split(store, tmp_path):
    first = run(store, tmp_path)
    same = dict(device="cpu", dtype="float32", threads=1, micro_batch=2, compile=True, save_every=3)
    assert run(store, tmp_path, resume=True, **same) == json.loads(
        (tmp_path / f"{first['run']}.json").read_text())
    assert run(store, tmp_path, dtype="float64")["run"] != first["run"]


def test_a_moved_store_and_another_split_go_on(store, tmp_path, monkeypatch):
    run(store, tmp_path / "whole")
    with monkeypatch.context() as m:
        signal_at(1, m)
        assert run(store, tmp_path / "b")["status"] == "stopped"
    moved = shutil.copytree(store, tmp_path / "elsewhere")
    assert run(moved, tmp_path / "b", resume=True, threads=1)["status"] == "finished"
    assert_same_end(final(tmp_path / "whole"), final(tmp_path / "b"))


def with_new_flag(monkeypatch, default):
    """train_oe.Config as it will be when somebody has added a flag."""
    added = [("brand_new", float, common.flag(default, "a flag of tomorrow"))]
    wider = dataclasses.make_dataclass("Config", added, bases=(train_oe.Config,), frozen=True)
    monkeypatch.setattr(train_oe, "Config", wider)


def test_a_new_flag_with_a_neutral_default_orphans_nothing(store, tmp_path, monkeypatch):
    run(store, tmp_path / "whole")
    with monkeypatch.context() as m:
        signal_at(1, m)
        run(store, tmp_path / "b")
    with_new_flag(monkeypatch, 0.5)
    assert run(store, tmp_path / "b", resume=True)["steps"] == TINY["steps"]
    assert_same_end(final(tmp_path / "whole"), final(tmp_path / "b"))
    record = run(store, tmp_path / "whole", resume=True)
    assert record["status"] == "finished" and "brand_new" not in record["config"]
    run(store, tmp_path / "whole", seed=7)      # old and new results are one arm
    shown = json.loads(sh("stats.py", *(tmp_path / "whole").glob("*.json"), "--json").stdout)
    assert [(arm["arm"], arm["n"]) for arm in shown["arms"]] == [("00_dense_native", 2)]
    other = run(store, tmp_path / "whole", brand_new=0.7)
    assert other["changed"]["brand_new"] == 0.7 and other["run"] != record["run"]


def copied(tmp_path, edit, source="train_oe.py"):
    """A module train_mine: a script with some text replaced, in a folder of its own."""
    text = (ROOT / source).read_text(encoding="utf-8")
    for old, new in edit:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "train_mine.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("train_mine", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_mine"] = module   # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SIGN_STEP = [("            optimizer.reduce_gradients()\n",
              "            for p in model.parameters():\n"
              "                if p.grad is not None:\n"
              "                    p.grad.mul_(2)\n"
              "            optimizer.reduce_gradients()\n")]


def test_a_copy_of_train_wm_is_a_run_of_its_own(store, tmp_path):
    sign = [("            optimizer.reduce_gradients()\n",
             "            for p in pipeline.weights.values():\n"
             "                if p.grad is not None:\n"
             "                    p.grad.neg_()\n"
             "            optimizer.reduce_gradients()\n")]
    mine = copied(tmp_path, sign, "train_wm.py")
    tiny = dict(width=64, micro_batch=0)
    own, copy = (run(store, tmp_path / "out", script, **tiny) for script in (train_wm, mine))
    assert copy["run"] == "train_mine-" + own["run"] and copy["script"] == "train_mine.py"
    assert own["curve"][0] == copy["curve"][0] and own["curve"] != copy["curve"]
    done = sh("stats.py", *(tmp_path / "out").glob("*.json"))
    arm = own["arm"]
    assert f"train_mine/{arm} - {arm}" in done.stdout, done.stdout


@pytest.mark.parametrize("first", ["own", "copy"])
def test_a_copied_script_is_a_run_of_its_own(store, tmp_path, monkeypatch, first):
    mine, out = copied(tmp_path, SIGN_STEP), tmp_path / "out"
    order = (train_oe, mine) if first == "own" else (mine, train_oe)
    records = {}
    for script in order:                      # one folder, nothing refused
        with monkeypatch.context() as m:
            signal_at(1, m)
            run(store, out, script)
        records[script] = run(store, out, script, resume=True)
    own, copy = records[train_oe], records[mine]
    assert copy["run"] == "train_mine-" + own["run"]
    assert (own["script"], copy["script"]) == ("train_oe.py", "train_mine.py")
    assert own["curve"][:1] == copy["curve"][:1] and own["curve"] != copy["curve"]
    before = {p.name: p.read_bytes() for p in out.glob(f"{own['run']}*")}
    run(store, out, mine, force=True)
    assert before == {p.name: p.read_bytes() for p in out.glob(f"{own['run']}*")}
    done = sh("stats.py", *sorted(out.glob("*.json")))
    assert "train_mine/00_dense_native" in done.stdout and done.returncode == 0, done.stderr
    assert "train_mine/00_dense_native" in done.stdout.split("Contrasts")[1]


# ---- refusals ----

def refused(argv, match):
    with pytest.raises(UserError, match=match) as err:
        train_oe.train(train_oe.parse(argv))
    assert "\n" not in str(err.value)


def test_two_runs_at_once_of_the_same_name(store, tmp_path):
    name = run(store, tmp_path / "a")["run"]
    with runs.locked(tmp_path / f"{name}.json"):
        refused(flags(store, tmp_path), "another process")
    assert run(store, tmp_path)["status"] == "finished"


def test_an_existing_result_is_never_lost(store, tmp_path):
    record = run(store, tmp_path)
    path = tmp_path / f"{record['run']}.json"
    before = path.read_bytes(), path.with_suffix(".ckpt").read_bytes()
    refused(flags(store, tmp_path), "--force")
    # a requeued job that was done is done
    assert run(store, tmp_path, resume=True) == json.loads(path.read_text())
    assert before == (path.read_bytes(), path.with_suffix(".ckpt").read_bytes())
    path.unlink()
    refused(flags(store, tmp_path), "--resume")   # a checkpoint alone is an unfinished run
    again = run(store, tmp_path, resume=True)
    assert again["metrics"] == record["metrics"] and path.exists()
    assert run(store, tmp_path, force=True)["curve"] == record["curve"]


def test_force_keeps_the_old_result_until_everything_is_read(store, tmp_path):
    record = run(store, tmp_path)
    before = (tmp_path / f"{record['run']}.json").read_bytes()
    refused(flags(store, tmp_path, force=True, head_dim=33, depth=2), "heads")
    broken = shutil.copytree(store, tmp_path / "store")
    with open(broken / "train.bin", "ab") as f:
        f.write(b"x")
    refused(flags(broken, tmp_path, force=True), "cut or changed")
    assert (tmp_path / f"{record['run']}.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["truncate", "text", "foreign", "empty"])
def test_broken_checkpoints_are_refused(store, tmp_path, damage):
    record = run(store, tmp_path)
    path = tmp_path / f"{record['run']}.ckpt"
    path.with_suffix(".json").unlink()
    if damage == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "foreign":
        torch.save({"model": {}}, path)
    else:
        path.write_text("hello" if damage == "text" else "")
    refused(flags(store, tmp_path, resume=True), "checkpoint")


@pytest.mark.parametrize("change, match", [
    (dict(changed={"muon_lr": 0.5}), "muon_lr"), (dict(data_digest="0"), "corpus"),
    (dict(script="train_other.py"), "train_other"), (dict(seed=1), "seed"),
    (dict(model={}), "damaged"), (dict(step=None), "damaged"), (dict(changed=3), "damaged")])
def test_another_runs_checkpoint_is_refused(store, tmp_path, change, match):
    record = run(store, tmp_path)
    path = tmp_path / f"{record['run']}.ckpt"
    path.with_suffix(".json").unlink()
    common.save_checkpoint(path, {**common.load_checkpoint(path), **change})
    refused(flags(store, tmp_path, resume=True), match)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"status": "finished", "config": {}}'])
def test_a_damaged_result_is_refused(store, tmp_path, text):
    record = run(store, tmp_path)
    (tmp_path / f"{record['run']}.json").write_text(text)
    refused(flags(store, tmp_path, resume=True), "damaged result")


def test_a_loop_that_logs_nothing_is_a_defect(store, tmp_path):
    config = train_oe.parse(flags(store, tmp_path))
    with runs.Run(__file__, config, *train_oe.naming(config)) as mine:
        with pytest.raises(RuntimeError, match="run.log"):
            for _ in mine.steps():
                pass


@pytest.mark.parametrize("change", [dict(step=-3), dict(step=99), dict(curve=[]),
                                    dict(train_s="x"), dict(train_s=-1.0)])
def test_a_checkpoint_that_cannot_be_is_damaged(store, tmp_path, change):
    record = run(store, tmp_path)
    path = tmp_path / f"{record['run']}.ckpt"
    path.with_suffix(".json").unlink()
    common.save_checkpoint(path, {**common.load_checkpoint(path), **change})
    refused(flags(store, tmp_path, resume=True), "damaged")


def test_a_checkpoint_goes_on_in_its_own_dtype(store, tmp_path, monkeypatch):
    """--dtype auto is bfloat16 on CUDA and float32 here: both are the default, under one name."""
    real = common.pick_dtype

    def as_on_cuda(name, device):
        return torch.bfloat16 if name == "auto" else real(name, device)
    with monkeypatch.context() as m:
        m.setattr(common, "pick_dtype", as_on_cuda)
        signal_at(1, m)
        run(store, tmp_path)
    refused(flags(store, tmp_path, resume=True), "bfloat16")


def test_an_edited_script_is_told_when_its_run_goes_on(store, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as m:
        signal_at(1, m)
        run(store, tmp_path)
    (path,) = tmp_path.glob("*.ckpt")
    saved = common.load_checkpoint(path)
    assert {"train_oe.py", "model.py"} <= saved["sources"].keys()
    saved["sources"]["model.py"] = "another"
    common.save_checkpoint(path, saved)
    assert run(store, tmp_path, resume=True)["status"] == "finished"
    assert "model.py changed since step 2" in capsys.readouterr().err


def test_a_row_with_an_unknown_flag_is_named(monkeypatch):
    monkeypatch.setitem(train_oe.ARMS, "mine", dict(muon_rate=0.02))
    for argv in (["--arm", "mine"], ["--list_arms"]):
        with pytest.raises(UserError, match="arm mine of ARMS: there is no flag muon_rate"):
            train_oe.parse(argv)


def test_a_lock_that_was_removed_ends_no_run_badly(tmp_path):
    with runs.locked(tmp_path / "run.json"):
        (tmp_path / ".run.json.lock").unlink()
