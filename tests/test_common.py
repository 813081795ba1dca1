"""common.py: one line and exit code 2 for every kind of mistake, files that appear whole or not at all."""
import errno
import json
import math
import os
import subprocess
import sys
import threading

import pytest
import torch

import common
from common import UserError

SAYS = "import sys; sys.path.insert(0, {root!r}); import common\ndef main(argv): {body}\ncommon.cli(main)"


def cli(body, **kw):
    code = SAYS.format(root=str(common.ROOT), body=body)
    return subprocess.run([sys.executable, "-S", "-c", code], text=True, stderr=subprocess.PIPE, stdout=kw.pop("stdout", subprocess.PIPE), **kw)


@pytest.mark.parametrize("body, said", [
    ("raise common.UserError('a\\nb')", "error: a b"), ("open('/no/such/file')", "error: /no/such/file: No such file"),
    ("raise OSError(28, 'No space left on device')", "error: No space left on device"), ("raise MemoryError", "error: out of memory"),
    ("raise RuntimeError('DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes')", "error: out of memory"),
    ('raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 9 bytes")', "error: out of memory"),
])
def test_mistakes_are_one_line_and_exit_code_2(body, said):
    done = cli(body)
    assert done.returncode == 2 and done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1


def test_defects_keep_their_traceback_and_codes_pass_through():
    assert "Traceback" in cli("raise RuntimeError('a bug of 4 bytes in memory')").stderr and cli("return 7").returncode == 7 and cli("pass").returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_stdout():
    with open("/dev/full", "w") as full:
        done = cli("print('x' * 100000)", stdout=full)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_stdout_closed_from_the_start():
    for body, code in (("print('x')", 0), ("raise common.UserError('a')", 2)):
        done = subprocess.run([sys.executable, "-S", "-c", SAYS.format(root=str(common.ROOT), body=body)], stderr=subprocess.PIPE, text=True,
                              preexec_fn=lambda: os.close(1))
        assert done.returncode == code and done.stderr == ("error: a\n" if code else "")


def test_a_terminal_without_the_letters():
    done = cli("print('привет')", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout == "??????\n"


def test_atomic_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "x.json"
    common.write_json(path, {"a": [1.5, math.nan, math.inf]})
    assert json.loads(path.read_text()) == {"a": [1.5, None, None]}
    with pytest.raises(ZeroDivisionError), common.atomic_path(path) as tmp:
        tmp.write_text("half")
        1 / 0
    assert json.loads(path.read_text()) == {"a": [1.5, None, None]} and os.listdir(path.parent) == ["x.json"]
    with pytest.raises(UserError, match="is a file"):
        common.write_json(path / "below.json", 1)


def test_a_full_disk_behind_a_checkpoint(tmp_path, monkeypatch):
    def full(*args):
        raise RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="disk full"):
        common.save_checkpoint(tmp_path / "a.ckpt", {})
    assert os.listdir(tmp_path) == []


def test_locks_exclude_and_leave_no_file(tmp_path):
    with common.locked(tmp_path / "run.json"):
        with pytest.raises(UserError, match="another process"), common.locked(tmp_path / "run.json"):
            pass
    assert os.listdir(tmp_path) == []


def test_a_lock_clears_away_what_a_killed_owner_left(tmp_path):
    code = (f"import os, signal, sys; sys.path.insert(0, {str(common.ROOT)!r}); import common\n"
            "held = [common.atomic_path(os.path.join(sys.argv[1], name)) for name in ('a[1]_seed4.ckpt', 'a[1]_seed46.ckpt')]\n"
            "for h in held:\n    h.__enter__()\n"
            "os.kill(os.getpid(), signal.SIGKILL)")
    subprocess.run([sys.executable, "-S", "-c", code, str(tmp_path)])
    assert len(os.listdir(tmp_path)) == 2
    with common.locked(tmp_path / "a[1]_seed4.json"):
        pass
    assert [name[:16] for name in os.listdir(tmp_path)] == [".a[1]_seed46.ckp"]                    # another run's may be in use


@pytest.mark.parametrize("env", [dict(WORLD_SIZE="abc"), dict(WORLD_SIZE="2"), dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="x")])
def test_half_a_torchrun_environment(env, monkeypatch):
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="torchrun"), common.ranks("cpu"):
        pass


@pytest.mark.parametrize("name", ["tpu", "meta", "xpu", "cuda:x", "", "CPU"])
def test_unknown_devices(name):
    with pytest.raises(UserError, match="no device"):
        common.pick_device(name)


def test_seeds_are_stable_over_machines():
    assert common.derive_seed(42, "wte.weight") == 2816367569617930299
    assert common.config_hash({"b": 1, "a": 2}) == common.config_hash({"a": 2, "b": 1}) != common.config_hash({"a": 2})


def test_a_lock_taken_on_a_removed_file_is_taken_again(tmp_path, monkeypatch):
    """The file may vanish between opening and locking it, with another process then holding a new one of the same name."""
    import fcntl
    path, flock, calls = tmp_path / "cell", fcntl.flock, []

    def late(f, how):
        calls.append(f)
        if len(calls) == 1:
            (tmp_path / ".cell.lock").unlink()
        return flock(f, how)
    monkeypatch.setattr(fcntl, "flock", late)
    with common.locked(path):
        assert len(calls) == 2 and (tmp_path / ".cell.lock").exists()
        with pytest.raises(UserError, match="another process"), common.locked(path):
            pass
    assert not (tmp_path / ".cell.lock").exists()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    import fcntl

    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match="cannot be locked") as told, common.locked(tmp_path / "run.json"):
        pass
    assert not isinstance(told.value, common.Busy)


def test_a_full_disk_names_the_file(tmp_path, monkeypatch, capsys):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as stopped:
        common.cli(lambda argv: common.write_json(tmp_path / "run.json", {}))
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and "run.json" in err and "No space" in err and not list(tmp_path.iterdir())


def test_a_waiting_lock_comes_after_its_holder(tmp_path):
    order, begun = [], threading.Event()

    def second():
        begun.set()
        with common.locked(tmp_path / "a.json", wait=True):
            order.append("second")
    with common.locked(tmp_path / "a.json"):
        thread = threading.Thread(target=second)
        thread.start()
        begun.wait()
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"] and os.listdir(tmp_path) == []
