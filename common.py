"""What every script shares: flags from dataclasses, one-line errors, device and seeds, checkpoints, result records.

Nothing here knows about models or data. The imports of the project point one way and this file is their root.

    Flags       a frozen dataclass whose fields are made with flag(); parse() turns it into --snake_case options
    Errors      raise UserError("what was wrong; what to do"): cli() prints that one line and exits with code 2
    Files       every file appears whole or not at all (temporary name, fsync, rename)
    Records     one JSON per run, the same keys from every script (see result_record)
"""
import argparse
import dataclasses
import glob
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

SCHEMA = 1                       # version of the result record
CHECKPOINT_FORMAT = "nanoarms-1"  # first thing looked for in a checkpoint
ROOT = Path(__file__).resolve().parent


class UserError(Exception):
    """A mistake of the user's: the message says in one line what was wrong and what to do."""


class Busy(UserError):
    """Another process is writing the same file."""


def cli(main, argv=None):
    """Run main(argv) as a command line program: a UserError or a failed file operation becomes one line and exit code 2."""
    try:
        if sys.stdout is None:  # started with it closed
            sys.stdout = open(os.devnull, "w")
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter shows a question mark
        code = main(argv)
        sys.stdout.flush()
        sys.exit(code or 0)
    except UserError as err:
        message = " ".join(str(err).split())
    except BrokenPipeError:  # `| head` closed the pipe: nobody is left to tell
        _drop_stdout()
        sys.exit(141)
    except OSError as err:
        message = f"{err.filename}: {err.strerror}" if err.filename else f"{err.strerror or err}"
    except (MemoryError, RuntimeError) as err:  # torch has no common type for what does not fit
        if isinstance(err, RuntimeError) and not re.search("not enough memory|out of memory|can't allocate memory", str(err)):
            raise
        message = f"out of memory ({' '.join(str(err).split())[:120]}); choose a smaller model, batch or table"
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    print(f"error: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # a full disk behind stdout
        _drop_stdout()
    sys.exit(2)


def _drop_stdout():
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- flags ----

def flag(default, help, choices=None, low=None, high=None):
    """A dataclass field that is also a command line option.

    choices: the allowed values. low, high: inclusive bounds of a number. The help text is shown with its default.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see {self.prog} --help")


class _Once(argparse.Action):
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


def show_flags(flags):
    """A dict of flags as they stand on a command line."""
    return " ".join(f"--{'' if v else 'no-'}{k}" if isinstance(v, bool) else f"--{k} {v}" for k, v in flags.items())


def make_parser(description):
    """An ArgumentParser whose mistakes are UserErrors and which takes no abbreviations."""
    return _Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                   formatter_class=argparse.RawDescriptionHelpFormatter)


def _number(kind):
    def convert(text):
        value = kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
        return value
    convert.__name__ = {int: "whole number", float: "finite number"}[kind]  # argparse prints it: "invalid finite number value"
    return convert


def add_flags(parser, cls):
    """Add an option for every field of the dataclass that was made with flag(); hyphens work for underscores."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if "help" not in f.metadata:
            continue
        names = list(dict.fromkeys(["--" + f.name, "--" + f.name.replace("_", "-")]))
        shown = "" if f.default in (None, "") else f" (default: {f.default})"
        kw = dict(dest=f.name, default=argparse.SUPPRESS, help=(f.metadata["help"] + shown).replace("%", "%%"))
        if hints[f.name] is bool:
            parser.add_argument(*names, action=_OnceBool, **kw)
            continue
        kind = next((k for k in (int, float) if hints[f.name] in (k, typing.Optional[k])), None)
        parser.add_argument(*names, action=_Once, type=_number(kind) if kind else str,
                            choices=f.metadata["choices"], metavar=None if f.metadata["choices"] else f.name.upper(), **kw)


def check_bounds(config):
    """Raise UserError when a field of the dataclass instance lies outside the choices or bounds of its flag()."""
    for f in dataclasses.fields(config):
        value, meta = getattr(config, f.name), f.metadata
        if value is None or "help" not in meta:
            continue
        if meta["choices"] and value not in meta["choices"]:
            raise UserError(f"--{f.name} {value}: choose one of {', '.join(map(str, meta['choices']))}")
        if meta["low"] is not None and value < meta["low"]:
            raise UserError(f"--{f.name} {value} is too small; the least is {meta['low']}")
        if meta["high"] is not None and value > meta["high"]:
            raise UserError(f"--{f.name} {value} is too large; the most is {meta['high']}")


# ---- device, dtype, seeds ----

def pick_device(name="auto"):
    """torch.device for auto | cpu | cuda | cuda:N | mps; auto is cuda where there is one, else the CPU."""
    import torch
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", name):
        raise UserError(f"--device {name} is no device; use auto, cpu, cuda, cuda:N or mps")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; use --device cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: this torch has no MPS; use --device cpu")
    return device


def pick_dtype(name, device):
    """torch.dtype for auto | float32 | bfloat16 | float64; auto is bfloat16 on CUDA, float32 elsewhere."""
    import torch
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def dtype_name(name, device):
    """The name of the dtype that pick_dtype() picks."""
    return str(pick_dtype(name, device)).split(".")[1]


def autocast(device, dtype):
    """The context of a run in this dtype: bfloat16 matrix work under torch.autocast, otherwise nothing."""
    import torch
    return torch.autocast(device.type, dtype) if dtype == torch.bfloat16 else nullcontext()


def derive_seed(*parts):
    """A 63-bit seed from any printable parts, stable over runs, machines and Python versions."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little") >> 1


# ---- files ----

def make_parent(path):
    """Path(path), after making its folder; UserError where a file is in the way."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path.parent} is a file or lies below one; name a folder with --out") from None
    return path


@contextmanager
def atomic_path(path):
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed over `path`, else removed."""
    path = make_parent(path)
    fd, tmp = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(fd)
    try:
        yield Path(tmp)
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())
        os.chmod(tmp, 0o666 & ~_umask())
        os.replace(tmp, path)
    except OSError as err:
        err.filename = err.filename or str(path)   # a full disk does not say which file
        raise
    finally:
        Path(tmp).unlink(missing_ok=True)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def finite(value):
    """The same nested value with NaN and infinities replaced by None, so that strict JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def write_json(path, value):
    """Write strict JSON (NaN becomes null), whole or not at all."""
    with atomic_path(path) as tmp:
        tmp.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def save_checkpoint(path, payload):
    """torch.save of {"format": CHECKPOINT_FORMAT, **payload}, whole or not at all; payload holds tensors and plain values only."""
    import torch
    with atomic_path(path) as tmp:
        try:
            torch.save({"format": CHECKPOINT_FORMAT, **payload}, tmp)
        except RuntimeError as err:  # torch's own type for a full disk
            raise UserError(f"{path} cannot be written ({str(err).splitlines()[0][:80]}); is the disk full?") from None


def load_checkpoint(path, keys=(), map_location="cpu"):
    """Read a checkpoint without running any code in it. UserError when it is missing, truncated, not ours or lacks one of `keys`."""
    import torch
    if not Path(path).is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        payload = torch.load(path, map_location=map_location, weights_only=True)
    except Exception:  # torch raises half a dozen types for a broken archive
        raise UserError(f"{path} is truncated or not a checkpoint; delete it or name another") from None
    if not isinstance(payload, dict) or payload.get("format") != CHECKPOINT_FORMAT:
        raise UserError(f"{path} is a torch file but not a checkpoint of this project (no format {CHECKPOINT_FORMAT!r})")
    if missing := [k for k in keys if k not in payload]:
        raise UserError(f"{path} is a damaged checkpoint (it lacks {', '.join(missing)}); delete it or name another")
    kinds = {"step": int, **dict.fromkeys(("config", "model_config", "model"), dict)}
    if wrong := [k for k, kind in kinds.items() if k in payload and not isinstance(payload[k], kind)]:
        raise UserError(f"{path} is a damaged checkpoint (its {', '.join(wrong)} cannot be read); delete it or name another")
    return payload


@contextmanager
def reading(path, what="checkpoint"):
    """For code that takes a file apart: what its contents make fail becomes a UserError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as err:
        raise UserError(f"{path} is a damaged {what} ({type(err).__name__}); delete it or name another") from None


# ---- records ----

def config_hash(config):
    """8 hex digits of the sha256 of a JSON-able dict."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]


def run_name(stem, flags, plain):
    """The stem, with the hash of the `flags` (a dict) that differ from those the stem stands for, `plain`."""
    changed = {k: v for k, v in flags.items() if v != plain.get(k)}  # only these: a flag added later leaves old names alone
    return f"{stem}-{config_hash(changed)}" if changed else stem


def _git(*args):
    try:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def env_record(device):
    """What a stranger needs to repeat a run: versions, device, threads, git revision (and whether it was dirty), sources, command."""
    import torch
    sources = {p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:12] for p in sorted(ROOT.glob("*.py"))}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else (platform.processor() or platform.machine())
    return {"torch": torch.__version__, "python": platform.python_version(), "platform": platform.platform(),
            "device": f"{device.type}: {name}", "threads": torch.get_num_threads(),
            "git": _git("rev-parse", "HEAD"), "dirty": None if (s := _git("status", "--porcelain", "-uno")) is None else bool(s),
            "sources": sources, "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}


def result_record(*, script, run, arm, status, config, depth, width, seed, params, steps, tokens, metrics, curve, timing, env):
    """The one shape of a result file: what stats.py reads from every script.

    status: finished | diverged | stopped. params: {"backbone", "oe", "total"}. curve: [[step, loss in nats], ...].
    metrics: val_bpb, heldout_bpb (bits per byte), val_loss (nats per token), ... timing: train_s, tok_per_s, peak_mem_mib.
    """
    return {"schema": SCHEMA, **{k: v for k, v in locals().items()}}


def peak_mem_mib(device):
    """Peak memory in MiB: of the CUDA allocator on a GPU, else the resident set of the process (whole life)."""
    import resource
    import torch
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:  # ru_maxrss would also count the process that started this one
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


# ---- running ----

@contextmanager
def locked(path, wait=False):
    """Hold an exclusive lock beside `path` for the block. Clears away its dead owners' files.

    While another process holds it: Busy, or with `wait` this one waits.
    """
    import fcntl
    lock = make_parent(path).parent / f".{Path(path).name}.lock"
    while True:
        with open(lock, "w") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise Busy(f"{path} is being written by another process; wait for it, or name another --out") from None
            except OSError as err:
                raise UserError(f"{lock} cannot be locked ({err.strerror}); name an --out on a file system that has locks") from None
            if not _same_file(f, lock):  # its owner removed it between our open and our lock: another process may hold a new one
                continue
            for left in lock.parent.glob(f".{glob.escape(Path(path).stem)}.*.tmp"):  # of a process that was killed while it wrote
                left.unlink(missing_ok=True)
            try:
                yield
            finally:
                os.unlink(lock)
            return


def _same_file(f, path):
    try:
        return os.path.samestat(os.fstat(f.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def stop_requests():
    """Yield a list that SIGINT or SIGTERM appends to, so that a loop can stop at a clean boundary; a second SIGINT interrupts at once."""
    import signal
    import threading
    asked, old = [], {}

    def ask(number, frame):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is threading.main_thread():
        old = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for s, handler in old.items():
            signal.signal(s, handler)


# ---- data parallel: torchrun starts the same script once per rank ----

@contextmanager
def ranks(device_name):
    """Yield (rank, world, device): joins torchrun's process group (nccl on CUDA, gloo elsewhere), or (0, 1, device) without torchrun."""
    import torch
    import torch.distributed as dist
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield 0, 1, pick_device(device_name)
        return
    if not all(os.environ.get(k, "").isdigit() for k in ("WORLD_SIZE", "RANK", "LOCAL_RANK")):
        raise UserError("WORLD_SIZE is set but not RANK and LOCAL_RANK, or they are no numbers; start with torchrun, or unset WORLD_SIZE")
    world = int(os.environ["WORLD_SIZE"])
    device = pick_device(device_name)
    if device.type == "cuda" and device.index is None:
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), world, device
    finally:
        dist.destroy_process_group()


def wait_for_all(world):
    """Return when every rank has come here."""
    import torch.distributed as dist
    if world > 1:
        dist.barrier()


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


def agree(flag, world, device):
    """True on every rank when any rank says True."""
    import torch
    said = torch.tensor([float(flag)], device=device if world > 1 else "cpu")
    all_sum([said], world)
    return said.item() > 0
