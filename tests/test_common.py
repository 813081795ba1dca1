"""common.py: one line and exit code 2 for every mistake, whole files, flags that name a run."""
import dataclasses
import errno
import json
import math
import os
import subprocess
import sys

import pytest
import torch

import common
from common import UserError, flag

SAYS = """
import sys
sys.path.insert(0, {root!r})
import common
def main(argv):
    {body}
common.cli(main)
"""


def cli(body, **kw):
    code = SAYS.format(root=str(common.ROOT), body=body)
    return subprocess.run([sys.executable, "-S", "-c", code], text=True, capture_output=True, **kw)


NO_MEMORY = "DefaultCPUAllocator: {}: you tried to allocate 9 bytes"


@pytest.mark.parametrize("body, said", [
    ("raise common.UserError('a\\nb')", "error: a b"),
    ("open('/no/such/file')", "error: /no/such/file: No such file"),
    ("raise OSError(28, 'No space left on device')", "error: No space left on device"),
    ("raise MemoryError", "error: out of memory"),
    (f"raise RuntimeError('{NO_MEMORY.format('not enough memory')}')", "error: out of memory"),
    (f'raise RuntimeError("{NO_MEMORY.format(chr(99) + "an" + chr(39) + "t allocate memory")}")',
     "error: out of memory"),
])
def test_mistakes_are_one_line_and_exit_code_2(body, said):
    done = cli(body)
    assert done.returncode == 2 and done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_defects_keep_their_traceback_and_codes_pass_through():
    assert "Traceback" in cli("raise RuntimeError('a bug of 4 bytes in memory')").stderr
    assert cli("return 7").returncode == 7 and cli("pass").returncode == 0


def test_a_closed_pipe_is_nobodys_error():
    code = SAYS.format(root=str(common.ROOT), body="print('x' * 10**6)")
    done = subprocess.run(f"'{sys.executable}' -S -c \"$CODE\" | head -c 1", shell=True, text=True,
                          capture_output=True, env={**os.environ, "CODE": code})
    assert done.stdout == "x" and done.stderr == ""


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
    assert json.loads(path.read_text()) == {"a": [1.5, None, None]}
    assert os.listdir(path.parent) == ["x.json"]
    with pytest.raises(UserError, match="is a file"):
        common.write_json(path / "below.json", 1)


def test_a_full_disk_behind_a_checkpoint(tmp_path, monkeypatch):
    def full(*args):
        raise RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="disk full"):
        common.save_checkpoint(tmp_path / "a.ckpt", {})
    assert os.listdir(tmp_path) == []


def test_a_full_disk_names_the_file(tmp_path, monkeypatch, capsys):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as stopped:
        common.cli(lambda argv: common.write_json(tmp_path / "run.json", {}))
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and "run.json" in err and "No space" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tpu", "meta", "xpu", "cuda:x", "", "CPU", "cuda:1000"])
def test_unknown_devices(name):
    with pytest.raises(UserError, match="no device"):
        common.pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:256", "cuda:999"])
def test_devices_that_are_not_here(name):
    with pytest.raises(UserError, match="--device cpu"):
        common.pick_device(name)


def test_seeds_and_hashes_are_stable_over_machines():
    assert common.derive_seed(42, "wte.weight") == 2816367569617930299
    same = common.short_hash({"b": 1, "a": 2})
    assert same == common.short_hash({"a": 2, "b": 1}) != common.short_hash({"a": 2})


# ---- which run is this? ----

@dataclasses.dataclass(frozen=True)
class Flags:
    rate: float = flag(0.1, "a rate")
    device: str = flag("cpu", "a device", names=False)
    plain: int = 3


def test_only_flags_that_name_a_run_and_differ_are_kept():
    assert common.changed_flags(Flags(device="cuda", plain=4)) == {}
    assert common.changed_flags(Flags(rate=0.2)) == {"rate": 0.2}
    assert common.changed_flags(Flags(rate=0.2), idle={"rate"}) == {}


def test_two_runs_are_the_same_by_five_things():
    run = dict(script="a.py", arm="x", seed=1, changed={"rate": 0.2}, data_digest="d")
    assert common.differences(run, dict(run)) == []
    for key, other in (("script", "b.py"), ("arm", "y"), ("seed", 2), ("data_digest", "e"),
                       ("changed", {}), ("changed", {"rate": 0.2, "more": 1})):
        found = common.differences(run, {**run, key: other})
        assert len(found) == 1 and common.differences({**run, key: other}, run)
    assert "--rate 0.2 (now at its default)" in common.differences(run, {**run, "changed": {}})
