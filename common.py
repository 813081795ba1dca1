"""What every script shares: flags from dataclasses, one-line errors, device and seeds, files, records.

Nothing here knows about models or data. The imports of the project point one way and this file
is their root.

    Flags       a frozen dataclass whose fields are made with flag(): each is a --snake_case option
    Errors      raise UserError("what was wrong; what to do"): cli() prints that one line and exits
                with code 2
    Files       every file appears whole or not at all (temporary name, fsync, rename)
    Records     one JSON a run, the same keys from every script (see runs.Run.finish)
    Same run    script, arm, seed, `changed` and the corpus' digest (see changed_flags, differences)
"""
import argparse
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import typing
from contextlib import contextmanager, nullcontext
from pathlib import Path

SCHEMA = 1                        # version of the result record
CHECKPOINT_FORMAT = "nanoarms-2"  # first thing looked for in a checkpoint
ROOT = Path(__file__).resolve().parent
OWN_SCRIPTS = ("train_oe.py", "train_wm.py", "ablate.py")   # runs of others bear their stem
OUT_OF_MEMORY = "not enough memory|out of memory|can't allocate memory"


class UserError(Exception):
    """A mistake of the user's: the message says in one line what was wrong and what to do."""


class BadFile(UserError):
    """A checkpoint or result is damaged, or another run's."""


def cli(main, argv=None):
    """Run main(argv) as a program: a UserError or a failed file operation is one line and code 2."""
    try:
        sys.stdout.reconfigure(errors="replace")  # a letter the terminal lacks becomes "?"
        code = main(argv)
        sys.stdout.flush()
        sys.exit(code or 0)
    except UserError as err:
        message = " ".join(str(err).split())
    except BrokenPipeError:  # `| head` closed the pipe: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as err:
        message = f"{err.filename}: {err.strerror}" if err.filename else f"{err.strerror or err}"
    except (MemoryError, RuntimeError) as err:  # torch has no common type for what does not fit
        if isinstance(err, RuntimeError) and not re.search(OUT_OF_MEMORY, str(err)):
            raise
        said = " ".join(str(err).split())[:120]
        message = f"out of memory ({said}); choose a smaller model, batch or table"
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- flags ----

def flag(default, help, choices=None, low=None, high=None, names=True):
    """A dataclass field that is also a command line option.

    choices: the allowed values. low, high: inclusive bounds of a number. names: does the flag say
    which run this is? False for where and how a run is computed: device, threads, paths.
    """
    meta = {"help": help, "choices": choices, "low": low, "high": high, "names": names}
    return dataclasses.field(default=default, metadata=meta)


def flag_fields(config):
    """The fields of a dataclass (or of an instance) that were made with flag()."""
    return [f for f in dataclasses.fields(config) if "help" in f.metadata]


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see {self.prog} --help")


class Once(argparse.Action):
    """Stores a value and refuses to store a second one."""

    def __call__(self, parser, namespace, value, option_string=None):
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, value)


class _OnceBool(argparse.BooleanOptionalAction):
    def __call__(self, parser, namespace, value, option_string=None):
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} is given twice (or with its opposite)")
        super().__call__(parser, namespace, value, option_string)


def show_flag(name, value):
    """A flag as it stands on a command line."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def show_flags(flags):
    """A dict of flags as they stand on a command line."""
    return " ".join(show_flag(name, value) for name, value in flags.items())


def make_parser(description):
    """An ArgumentParser whose mistakes are UserErrors and which takes no abbreviations."""
    return _Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                   formatter_class=argparse.RawDescriptionHelpFormatter)


def whole_number(text):
    """The int of a command line's text."""
    return int(text)


def finite_number(text):
    """The float of a command line's text; ValueError for nan and the infinities."""
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


# argparse says "invalid finite number value" where a text is none
whole_number.__name__, finite_number.__name__ = "whole number", "finite number"
TYPES = {int: whole_number, typing.Optional[int]: whole_number,
         float: finite_number, typing.Optional[float]: finite_number}


def add_flags(parser, cls):
    """Add an option for every flag() of the dataclass; hyphens work for underscores."""
    hints = typing.get_type_hints(cls)
    for f in flag_fields(cls):
        names = list(dict.fromkeys(["--" + f.name, "--" + f.name.replace("_", "-")]))
        shown = "" if f.default in (None, "") else f" (default: {f.default})"
        help_text = (f.metadata["help"] + shown).replace("%", "%%")
        options = dict(dest=f.name, default=argparse.SUPPRESS, help=help_text)
        if hints[f.name] is bool:
            parser.add_argument(*names, action=_OnceBool, **options)
            continue
        options["type"] = TYPES.get(hints[f.name], str)
        options["choices"] = f.metadata["choices"]
        options["metavar"] = None if f.metadata["choices"] else f.name.upper()
        parser.add_argument(*names, action=Once, **options)


def check_bounds(config):
    """UserError when a field of the instance lies outside the choices or bounds of its flag()."""
    for f in flag_fields(config):
        value, meta = getattr(config, f.name), f.metadata
        if value is None:
            continue
        if meta["choices"] and value not in meta["choices"]:
            known = ", ".join(map(str, meta["choices"]))
            raise UserError(f"--{f.name} {value}: choose one of {known}")
        if meta["low"] is not None and value < meta["low"]:
            raise UserError(f"--{f.name} {value} is too small; the least is {meta['low']}")
        if meta["high"] is not None and value > meta["high"]:
            raise UserError(f"--{f.name} {value} is too large; the most is {meta['high']}")


# ---- which run is this? ----

def changed_flags(config, idle=()):
    """{flag: value} of the flags that name a run and differ from today's defaults.

    idle: flags that act on nothing under the others. A flag added later is missing from older
    records and stands for its default, so adding one leaves every run what it was.
    """
    fields = [f for f in flag_fields(config) if f.metadata["names"] and f.name not in idle]
    values = {f.name: getattr(config, f.name) for f in fields}
    return {f.name: values[f.name] for f in fields if values[f.name] != f.default}


def differences(old, new):
    """In words, what keeps two runs from being the same; [] when they are.

    old, new: dicts (records, checkpoints) with script, arm, seed, changed and data_digest.
    """
    keys = ("script", "arm", "seed")
    found = [f"{k} {old[k]} (now {new[k]})" for k in keys if old[k] != new[k]]
    before, now = old["changed"], new["changed"]
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            was, wants = (flags.get(name, "at its default") for flags in (before, now))
            found.append(f"--{name} {was} (now {wants})")
    if old["data_digest"] != new["data_digest"]:
        found.append("another corpus or tokenizer")
    return found


# ---- device, dtype, seeds ----

def pick_device(name="auto"):
    """torch.device for auto | cpu | cuda | cuda:N | mps; auto is cuda where there is one."""
    import torch
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", name):
        raise UserError(f"--device {name} is no device; use auto, cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    # torch keeps the number in a byte: cuda:256 would be cuda:0
    index = int(name.partition(":")[2] or 0)
    if device.type == "cuda" and index >= torch.cuda.device_count():
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        raise UserError(f"--device {name}: {seen}; use --device cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this torch has no MPS; use --device cpu")
    return device


def pick_dtype(name, device):
    """torch.dtype for auto | float32 | bfloat16 | float64; auto is bfloat16 on CUDA only."""
    import torch
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def autocast(device, dtype):
    """The context of a run in this dtype: torch.autocast for bfloat16, otherwise nothing."""
    import torch
    return torch.autocast(device.type, dtype) if dtype == torch.bfloat16 else nullcontext()


def derive_seed(*parts):
    """A 63-bit seed from any printable parts, stable over runs, machines and Python versions."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


# ---- files ----

def make_parent(path):
    """Path(path), after making its folder; UserError where a file is in the way."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        where = f"{path.parent} is a file or lies below one"
        raise UserError(f"{where}; name a folder with --out") from None
    return path


@contextmanager
def atomic_path(path):
    """Yield a temporary path beside `path`; on success it is flushed and renamed, else removed."""
    path = make_parent(path)
    fd, tmp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(fd)
    try:
        yield Path(tmp)
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())
        os.umask(mask := os.umask(0))   # the only way to read it
        os.chmod(tmp, 0o666 & ~mask)
        os.replace(tmp, path)
    except OSError as err:
        err.filename = err.filename or str(path)   # a full disk does not say which file
        raise
    finally:
        Path(tmp).unlink(missing_ok=True)


def finite(value):
    """The nested value with None for NaN and infinities, so that strict JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def write_json(path, value):
    """Write strict JSON (NaN becomes null), whole or not at all."""
    text = json.dumps(finite(value), indent=1, allow_nan=False)
    with atomic_path(path) as tmp:
        tmp.write_text(text + "\n", encoding="utf-8")


@functools.cache
def published(name):
    """The parsed published/<name>.json: what a source paper prints (oe, wm or ablate)."""
    return json.loads((ROOT / "published" / f"{name}.json").read_text(encoding="utf-8"))


def save_checkpoint(path, payload):
    """torch.save of {"format": ..., **payload}, whole or not at all; tensors and plain values only."""
    import torch
    with atomic_path(path) as tmp:
        try:
            torch.save({"format": CHECKPOINT_FORMAT, **payload}, tmp)
        except RuntimeError as err:  # torch's own type for a full disk
            said = str(err).splitlines()[0][:80]
            raise UserError(f"{path} cannot be written ({said}); is the disk full?") from None


def load_checkpoint(path, keys=(), map_location="cpu"):
    """Read a checkpoint without running any code in it.

    BadFile when it is missing, truncated, not ours or lacks one of `keys`.
    """
    import torch
    if not Path(path).is_file():
        raise BadFile(f"{path}: no such checkpoint")
    try:
        payload = torch.load(path, map_location=map_location, weights_only=True)
    except Exception:  # torch raises half a dozen types for a broken archive
        why = "is truncated or not a checkpoint"
        raise BadFile(f"{path} {why}; delete it or name another") from None
    if not isinstance(payload, dict) or payload.get("format") != CHECKPOINT_FORMAT:
        why = f"is a torch file but not a checkpoint of this version (format {CHECKPOINT_FORMAT!r})"
        raise BadFile(f"{path} {why}; delete it or name another")
    kinds = {"step": int, **dict.fromkeys(("config", "model_config", "model", "changed"), dict)}
    wrong = [k for k in keys if k not in payload]
    wrong += [k for k, kind in kinds.items() if k in payload and not isinstance(payload[k], kind)]
    if wrong:
        why = f"its {', '.join(wrong)} cannot be read"
        raise BadFile(f"{path} is a damaged checkpoint ({why}); delete it or name another")
    return payload


@contextmanager
def reading(path, what="checkpoint"):
    """For code that takes a file apart: what its contents make fail becomes a BadFile."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as err:
        kind = type(err).__name__
        raise BadFile(f"{path} is a damaged {what} ({kind}); delete it or name another") from None


# ---- records ----

def short_hash(value):
    """8 hex digits of the sha256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _git(*args):
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True,
                              timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def env_record(device, script):
    """What a stranger needs to repeat a run: versions, device, threads, git, sources, command.

    sources: the script and the project's files that it has imported, as they were first looked at.
    """
    import torch
    imported = [Path(getattr(m, "__file__", None) or "") for m in list(sys.modules.values())]
    files = {path.name: path for path in imported if path.parent == ROOT}
    files[Path(script).name] = Path(script)
    digests = {name: hashlib.sha256(path.read_bytes()) for name, path in sorted(files.items())}
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    changes = _git("status", "--porcelain", "-uno")
    return {"torch": torch.__version__, "python": platform.python_version(),
            "platform": platform.platform(), "device": f"{device.type}: {name}",
            "threads": torch.get_num_threads(), "git": _git("rev-parse", "HEAD"),
            "dirty": None if changes is None else bool(changes),
            "sources": {name: sha.hexdigest()[:12] for name, sha in digests.items()},
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}


def peak_mem_mib(device):
    """Peak memory in MiB: of the CUDA allocator on a GPU, else the process's resident set."""
    import resource
    import torch
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:  # ru_maxrss would also count the process that started this one
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        unit = 2**20 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# ---- sums over the ranks of a data-parallel run; with one rank they do nothing ----

def all_sum(tensors, world):
    """Sum each tensor over the ranks, in place; one message per dtype and device."""
    import torch
    import torch.distributed as dist
    if world == 1:
        return
    groups = {}
    for t in tensors:
        groups.setdefault((t.dtype, t.device), []).append(t)
    for same in groups.values():
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.all_reduce(flat)
        for t, part in zip(same, flat.split([t.numel() for t in same])):
            t.copy_(part.view_as(t))


def all_mean(t, world):
    """The mean of every rank's t, as a new tensor."""
    mean = t.clone()
    all_sum([mean], world)
    return mean.div_(world)


def all_rows(t, world):
    """A tensor of every rank's t, one rank's rows after the other's; t itself on one rank."""
    import torch
    import torch.distributed as dist
    if world == 1:
        return t
    parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)
