"""One training run, from its claim on the output files to its record; the command line of arms.

A script brings its flags, its model and its training step, and writes them down in one function:

    with Run(__file__, config, base, size) as run:     # device, ranks, corpus, name, lock
        if run.record is not None:                     # --resume of a finished run
            return run.record
        model, optimizer, batches = ...
        run.resume(model=model, optimizer=optimizer, batches=batches)
        for step in run.steps():                       # saves and stops between two steps
            ...
            run.log(loss)
        metrics = ... if run.status == "finished" else {}
        return run.finish(model, metrics)

The run belongs to the script that was started: a copy of train_oe.py has names, records and
checkpoints of its own. Every rank of a data-parallel run does all this; rank 0 writes and speaks.
"""
import dataclasses
import glob
import json
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import common
from batches import DEFAULT_STORE, Store
from common import BadFile, UserError

DIVERGED = 100.0   # a loss above this (nats) or NaN ends a run


class Busy(UserError):
    """Another process is writing the same file."""


# ---- the command line ----

def parse_command_line(doc, cls, arms, list_arms, argv=None):
    """{flag: value} as given to a script with arms; None after --list_arms, which prints them."""
    parser = common.make_parser(doc)
    common.add_flags(parser, cls)
    parser.add_argument("--list_arms", "--list-arms", action="store_true",
                        help="print every arm with its flags and its published result")
    parser.add_argument("--json", action="store_true", help="with --list_arms: print JSON")
    given = vars(parser.parse_args(argv))
    known = {f.name for f in common.flag_fields(cls)}
    for name, flags in arms.items():
        if unknown := sorted(flags.keys() - known):
            why = f"there is no flag {', '.join(unknown)}"
            raise UserError(f"arm {name} of ARMS: {why}; --help lists them")
    as_json = given.pop("json", False)
    if given.pop("list_arms", False):
        if given:
            other = next(iter(given))
            raise UserError(f"--list_arms takes no other flag than --json, not --{other}")
        return list_arms(as_json)
    if as_json:
        raise UserError("--json goes with --list_arms; results are always written as JSON")
    if given.get("arm") and given["arm"] not in arms:
        raise UserError(f"--arm {given['arm']} is unknown; --list_arms prints all {len(arms)}")
    return given


def checked(config):
    """The config, its micro-batch no larger than its batch; UserError for flags out of bounds."""
    common.check_bounds(config)
    if config.micro_batch > config.batch_size:
        config = dataclasses.replace(config, micro_batch=config.batch_size)
    if not config.out or not config.data:
        raise UserError("an empty --out or --data would mean the current folder; write . for it")
    if config.eval_tokens == 1:
        why = "holds no byte to score (the first token begins a document)"
        raise UserError(f"--eval_tokens 1 {why}; give more, or 0 for all")
    if config.batch_size % config.micro_batch:
        split = f"--micro_batch {config.micro_batch} does not divide --batch_size"
        raise UserError(f"{split} {config.batch_size}; choose a divisor")
    return config


def arm_of(config, arms):
    """The arm that an unnamed run is called after: it has all of the arm's flags, and no arm more.

    arms: {name: flags}, published ones only, so that a row of one's own renames no run.
    """
    defaults, best, most = type(config)(), None, -1
    for name, flags in arms.items():
        size = sum(value != getattr(defaults, k) for k, value in flags.items())
        if size > most and all(getattr(config, k) == value for k, value in flags.items()):
            best, most = name, size
    return best


# ---- names ----

def flag_text(name, value):
    """A flag as a part of a run's name: muon_lr0.02, residual-highway, out_skip, no-tie."""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    separator = "-" if isinstance(value, str) else ""
    return re.sub(r"[^\w.+-]", "_", f"{name}{separator}{value}")


def prefix(script):
    """What the names of a script's files begin with: a copy's with its own name."""
    return "" if script in common.OWN_SCRIPTS else f"{Path(script).stem}-"


def run_name(script, config, base, size, label="", idle=()):
    """[<copy>-]<arm>_<size>[_<corpus>][_<flags>]_seed<seed>: a name that a person can read.

    base: {flag: value} that arm and size stand for. What differs from it is written out where it
    is one flag or two, else it becomes 8 hex digits. label: of the corpus, "" for the default one.
    """
    other = {}
    for f in common.flag_fields(config):
        value = getattr(config, f.name)
        expected = base.get(f.name, f.default)
        if f.metadata["names"] and f.name not in idle and value != expected:
            other[f.name] = value
    words = [flag_text(name, value) for name, value in other.items()]
    if len(words) > 2:
        words = [common.short_hash(other)]
    parts = [f"{prefix(script)}{config.arm}", size, label, *words, f"seed{config.seed}"]
    return "_".join(part for part in parts if part)


def identify(script, config, base, size, idle, store, device):
    """(name, {what makes a run this run}): see run_name() and common.differences().

    A --dtype that is the device's default in other words is no change.
    """
    default = common.pick_dtype(type(config).dtype, device)
    if common.pick_dtype(config.dtype, device) == default:
        idle = {*idle, "dtype"}
    identity = {"script": script, "arm": config.arm, "seed": config.seed,
                "changed": common.changed_flags(config, idle), "data_digest": store.digest}
    return run_name(script, config, base, size, store.label, idle), identity


# ---- the corpus ----

def open_store(folder):
    """Store(folder); the default one is prepared first where it is missing."""
    if str(folder) == DEFAULT_STORE and not Path(folder).exists():
        import data   # only here: a run on a prepared store never touches data.py
        data.prepare_default()
    return Store(folder)


# ---- locks, signals, ranks ----

@contextmanager
def locked(path, wait=False):
    """Hold an exclusive lock beside `path` for the block. Clears away its dead owners' files.

    While another process holds it: Busy, or with `wait` this one waits.
    """
    import fcntl
    lock = common.make_parent(path).parent / f".{Path(path).name}.lock"
    how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        with open(lock, "w", encoding="utf-8") as f:
            try:
                fcntl.flock(f, how)
            except BlockingIOError:
                why = "is being written by another process"
                raise Busy(f"{path} {why}; wait for it, or name another --out") from None
            except OSError as err:
                why = f"{lock} cannot be locked ({err.strerror})"
                raise UserError(f"{why}; name an --out on a file system that has locks") from None
            try:
                ours = os.path.samestat(os.fstat(f.fileno()), os.stat(lock))
            except FileNotFoundError:
                ours = False
            # its owner removed it between our open and our lock: another may hold a new one
            if not ours:
                continue
            # a process that was killed while it wrote left these
            for left in lock.parent.glob(f".{glob.escape(Path(path).stem)}.*.tmp"):
                left.unlink(missing_ok=True)
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


@contextmanager
def stop_requests():
    """Yield a list that SIGINT or SIGTERM appends to, so that a loop can stop between two steps.

    A second signal interrupts at once.
    """
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
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def ranks(device_name):
    """Yield (rank, world, device): (0, 1, device), or what torchrun says.

    Under torchrun it joins the process group: nccl on CUDA, gloo elsewhere.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield 0, 1, common.pick_device(device_name)
        return
    needed = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    if not all(os.environ.get(k, "").isdigit() for k in needed):
        why = "WORLD_SIZE is set but not RANK and LOCAL_RANK, or they are no numbers"
        raise UserError(f"{why}; start with torchrun, or unset WORLD_SIZE")
    world, device = int(os.environ["WORLD_SIZE"]), common.pick_device(device_name)
    if device.type == "cuda" and device.index is None:
        device = common.pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), world, device
    finally:
        dist.destroy_process_group()


# ---- the run ----

class Run:
    """A training run as a context manager; the top of this file shows its use.

    script: __file__ of the caller. config: a dataclass of flags with arm, seed, steps, batch_size,
    seq_len, data, out, device, dtype, threads, save_every, resume and force. base, size: see
    run_name(). idle: flags that act on nothing. store: the corpus, where it is not --data's store.
    show: draw a progress bar, or print ten lines where there is no terminal.

    On entering: rank, world, device, dtype, autocast, store, name, identity, and `record`, which is
    None unless --resume found the run finished. Later: step (steps done), curve, train_s,
    asked_to_stop (truthy after a signal), and status: running, then finished, diverged or stopped.
    """

    def __init__(self, script, config, base, size, idle=(), store=None, show=True):
        self.script, self.config, self.store, self.show = Path(script), config, store, show
        self.naming = base, size, idle
        self.step, self.curve, self.train_s, self.status = 0, [], 0.0, "running"
        self.tokens_per_step = config.batch_size * config.seq_len
        self.parts, self.record = {}, None

    def __enter__(self):
        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)
        with ExitStack() as stack:
            self.rank, self.world, self.device = stack.enter_context(ranks(config.device))
            if self.rank == 0:
                self.store = self.store or open_store(config.data)   # prepares it; others wait
            if self.world > 1:
                dist.barrier()
                self.store = self.store or open_store(config.data)
            self.name, self.identity = identify(
                self.script.name, config, *self.naming, self.store, self.device)
            self.dtype = common.pick_dtype(config.dtype, self.device)
            self.autocast = common.autocast(self.device, self.dtype)
            self.flags = {**dataclasses.asdict(config), "dtype": str(self.dtype).split(".")[1],
                          "data_digest": self.store.digest}
            self.result = Path(config.out) / f"{self.name}.json"
            self.checkpoint = Path(config.out) / f"{self.name}.ckpt"
            if self.rank == 0:
                stack.enter_context(locked(self.result))
                self.record = self._claim()
            if self.world > 1 and self._anyone(self.record is not None):
                self.record = self.record or {"status": "finished elsewhere"}
            self.env = {**common.env_record(self.device, self.script), "ranks": self.world}
            self._stack = stack.pop_all()   # a refusal above gives everything back
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def _claim(self):
        """Refuse to lose an earlier run's files. The record of a finished run under --resume."""
        if self.config.force:
            return None
        if self.result.exists() and self.config.resume:
            record = read_record(self.result, self.identity)
            print(f"{self.result} is already finished")
            return record
        if self.result.exists():
            how = "--force overwrites it, another --seed or --out keeps it"
            raise UserError(f"{self.result} exists; {how}")
        if self.checkpoint.exists() and not self.config.resume:
            how = "--resume continues it, --force starts anew"
            raise UserError(f"{self.checkpoint} holds an unfinished run; {how}")
        return None

    def _anyone(self, said):
        """True on every rank when any rank says True."""
        votes = torch.tensor([float(said)], device=self.device)
        common.all_sum([votes], self.world)
        return votes.item() > 0

    def resume(self, **parts):
        """Name what a checkpoint holds, and under --resume load it from the one that is there.

        parts: objects with state_dict() and load_state_dict(). A state_dict() may gather from all
        ranks: every rank calls it. `model` has its config under `cfg`.
        """
        self.parts = parts
        if self.config.force and not self.config.resume and self.rank == 0:
            # only now: everything that a user can get wrong has been read
            self.result.unlink(missing_ok=True)
            self.checkpoint.unlink(missing_ok=True)
        if not self.config.resume or not self.checkpoint.exists():
            return
        keys = (*self.identity, "config", "sources", *parts, "step", "curve", "train_s")
        saved = common.load_checkpoint(self.checkpoint, keys)
        check_same(self.checkpoint, saved, self.identity)
        was, now = saved["config"].get("dtype"), self.flags["dtype"]
        if was != now:   # --dtype auto on another device
            raise UserError(f"{self.checkpoint} was trained in {was}; go on with --dtype {was}")
        with common.reading(self.checkpoint):
            for name, part in parts.items():
                part.load_state_dict(saved[name])
            self.step, self.curve, self.train_s = saved["step"], saved["curve"], saved["train_s"]
            if not 0 <= self.step == len(self.curve) <= self.config.steps or self.train_s < 0:
                raise ValueError(self.step)
            then, now = saved["sources"], self.env["sources"]
            edited = [name for name in then if now.get(name, then[name]) != then[name]]
        if self.rank == 0 and self.show:
            print(f"resuming {self.name} at step {self.step}")
        if self.rank == 0 and edited:
            print(f"note: {', '.join(edited)} changed since step {self.step} of {self.name}",
                  file=sys.stderr)

    def save(self):
        """Write a checkpoint; every rank calls it."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        if self.rank == 0:
            common.save_checkpoint(self.checkpoint, {
                **self.identity, "config": self.flags, "sources": self.env["sources"],
                "model_config": dataclasses.asdict(self.parts["model"].cfg), **states,
                "step": self.step, "curve": self.curve, "train_s": self.train_s})

    def steps(self):
        """Yield the numbers of the steps to do; between two of them save, stop, or end."""
        steps, every = self.config.steps, self.config.save_every
        with ExitStack() as stack:
            self.asked_to_stop = stack.enter_context(stop_requests())
            hidden = None if self.rank == 0 and self.show else True
            bar = tqdm(total=steps, initial=self.step, unit="step", disable=hidden)
            self._bar = stack.enter_context(bar)
            loop = stack.pop_all()
        self._stack.push(loop)   # an exception in the caller's loop leaves this generator open
        while self.step < steps and self.status == "running":
            step, self._started = self.step, time.perf_counter()
            yield step
            if self.step != step + 1:
                raise RuntimeError("the loop must call run.log(loss) once in every step")
            last = self.step == steps
            if not self.curve[-1][1] <= DIVERGED:
                self.status = "diverged"
                break
            if last or self._stopping or every and self.step % every == 0:
                self.save()
            if self._stopping and not last:
                self.status = "stopped"
                if self.rank == 0 and self.show:
                    print(f"stopped at step {self.step}; --resume continues {self.checkpoint}")
        if self.status == "running":
            self.status = "finished"
        loop.close()   # from here on Ctrl-C interrupts at once

    def log(self, loss):
        """Take this rank's mean loss (nats) of the step that ends: curve, clock, progress."""
        said = [loss, float(bool(self.asked_to_stop))]
        if self.world > 1:   # ranks agree on the loss, and on stopping
            sums = torch.tensor(said, dtype=torch.float64, device=self.device)
            common.all_sum([sums], self.world)
            said = [sums[0].item() / self.world, sums[1].item()]
        loss, self._stopping = said[0], said[1] > 0
        self.train_s += time.perf_counter() - self._started
        self.curve.append([self.step, loss])
        self.step += 1
        speed = self.tokens_per_step * self.step / self.train_s
        text = f"loss {loss:.4f}, {speed:,.0f} tok/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        no_terminal = self.rank == 0 and self.show and self._bar.disable
        if no_terminal and self.step % max(1, self.config.steps // 10) == 0:
            print(f"step {self.step}/{self.config.steps}  {text}", flush=True)

    def finish(self, model, metrics, params=None, curve=None):
        """Write and return the record, the one shape of a result file, which stats.py reads.

        metrics: {} unless the status is finished, else val_bpb, heldout_bpb (bits per byte),
        val_loss (nats per token), ... A run whose scores are not finite was destroyed by its last
        update and is called diverged; one that was stopped has its checkpoint only. params, curve:
        instead of the model's own counts {"backbone", "oe", "total"} and of all [step, loss].
        """
        scores = [value for name, value in metrics.items() if name.endswith("_loss")]
        if not all(map(math.isfinite, scores)):
            self.status, metrics = "diverged", {}
        tokens = self.step * self.tokens_per_step
        timing = {"train_s": self.train_s, "tok_per_s": tokens / max(self.train_s, 1e-9),
                  "peak_mem_mib": common.peak_mem_mib(self.device)}
        self.record = {
            "schema": common.SCHEMA, "script": self.script.name, "run": self.name,
            "arm": self.config.arm, "status": self.status, "config": self.flags,
            "changed": self.identity["changed"],
            "depth": model.cfg.n_layer, "width": model.cfg.n_embd, "seed": self.config.seed, "params": params or model.num_params(), "steps": self.step,
            "tokens": tokens, "metrics": metrics, "curve": self.curve if curve is None else curve,
            "timing": timing, "env": self.env}
        if self.rank == 0 and self.status != "stopped":
            common.write_json(self.result, self.record)
        return self.record


def check_same(path, old, new, what="checkpoint"):
    """BadFile unless the checkpoint or result `old` belongs to the run `new`."""
    with common.reading(path, what):
        found = common.differences(old, new)
    if found:
        how = "pass the same flags and --data, or name another --out"
        raise BadFile(f"{path} is another run: {', '.join(found)}; {how}")


def read_record(path, identity):
    """The record of a finished run; BadFile when it is damaged or another run's."""
    with common.reading(path, "result"):
        record = json.loads(path.read_text(encoding="utf-8"))
        digest = record["config"]["data_digest"]
        float(record["params"]["total"]), float(record["timing"]["train_s"])
        if record["status"] == "finished":
            # null: the scored tokens hold no bytes
            float(record["metrics"]["val_loss"]), float(record["metrics"]["val_bpb"] or 0)
        elif record["status"] != "diverged":
            raise ValueError(record["status"])
    check_same(path, {**record, "data_digest": digest}, identity, "result")
    return record


def announce(record, out):
    """Print how a run ended (rank 0 only); the script's exit code: 130 for one that was stopped."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    if record["status"] == "stopped":
        return 130
    path = Path(out) / f"{record['run']}.json"
    if record["status"] == "diverged":
        loss = record["curve"][-1][1]
        print(f"diverged at step {record['steps']} (loss {loss}); see {path}")
        return 0
    metrics, timing = record["metrics"], record["timing"]
    with common.reading(path, "result"):
        print(f"val {metrics['val_bpb']:.4f} bpb, held-out {metrics['heldout_bpb']:.4f} bpb "
              f"({timing['train_s']:.0f} s of training, {timing['tok_per_s']:,.0f} tok/s, "
              f"peak {timing['peak_mem_mib']:,.0f} MiB); {path}")
    return 0
