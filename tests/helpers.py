"""What several test files share: a small corpus, command lines, comparisons bit for bit."""
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("the quick brown fox jumps over a lazy dog while seven wizards quietly mix ten jugs of "
         "pale ink and sing").split()


def text(seed, n=400):
    """n words in an order that depends on the seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=n)) + "\n"


def write_corpus(folder, documents=30):
    """Text files of growing length in the folder, which is returned."""
    for i in range(documents):
        (folder / f"{i:02}.txt").write_text(text(i, 60 + 20 * i), encoding="utf-8")
    return folder


def argv_of(flags):
    """{flag: value} as a command line; True and False become --flag and --no-flag."""
    argv = []
    for name, value in flags.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        else:
            argv += [f"--{name}", str(value)]
    return argv


def sh(script, *argv, timeout=240, cwd=ROOT, **kw):
    """Run a script of the project (or python -c and the like) as a user would."""
    return subprocess.run([sys.executable, str(script), *map(str, argv)], cwd=cwd, timeout=timeout,
                          capture_output=True, text=True, **kw)


def assert_same(a, b, where=""):
    """Nested dicts, lists and tensors are equal bit for bit."""
    if torch.is_tensor(a):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def assert_same_end(a, b, skip=("config", "train_s", "sources")):
    """Two checkpoints hold the same bits, but for where and how fast they were computed."""
    assert a.keys() == b.keys()
    for key in a.keys() - set(skip):
        assert_same(a[key], b[key], key)


def final(out):
    """The only checkpoint in a folder."""
    import common
    (path,) = Path(out).glob("*.ckpt")
    return common.load_checkpoint(path)


def signal_at(step, monkeypatch, number=signal.SIGTERM):
    """Send this process a signal during the step of any run that follows."""
    import runs
    real = runs.Run.log

    def log(self, loss):
        if self.step == step:
            os.kill(os.getpid(), number)
        real(self, loss)
    monkeypatch.setattr(runs.Run, "log", log)


# python -c DIES_AT ROOT MODULE STEP ARGV...: SIGKILL during the step of a script's run
DIES_AT = """
import importlib, os, signal, sys
sys.path.insert(0, sys.argv[1])
import runs
script, step, real = importlib.import_module(sys.argv[2]), int(sys.argv[3]), runs.Run.log
def log(self, loss):
    if self.step == step:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, loss)
runs.Run.log = log
script.main(sys.argv[4:])
"""
