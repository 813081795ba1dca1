"""Side-by-side timings, as ratios within one run: the sides alternate after a warm-up, and medians are compared.

    python bench.py oe      training step with hashed tables of 150,855 rows against 15,085, and against no tables
    python bench.py loss    chunked head loss against the plain one: time and peak memory, forward and backward

Single timings on a shared machine mean nothing; the ratio of two things in one run does. Each prints a table and, as its last
line, one JSON object: {"bench", "ratio", "a_median_s", "b_median_s", "pairs", ...}, ratio = a / b.
"""
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

import common
from common import UserError, flag
from model import GPT, GPTConfig, chunked_loss, plain_loss
from optim import MuonAdamW, native_groups, set_schedule

LAPTOP = dict(depth=4, head_dim=64, sequence_len=256)   # the laptop preset's model and batch
LAPTOP_ROWS, LAPTOP_VOCAB, LAPTOP_WIDTH, SOFTCAP = 8, 8192, 256, 15.0


@dataclass(frozen=True)
class Config:
    """The options of bench.py."""
    pairs: int = flag(15, "timed repetitions of every side", low=3)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice", low=0)


def interleave(sides, pairs, device, warmup=2):
    """Median seconds of each side: {name: function} run in turn, `pairs` times, after `warmup` rounds that do not count."""
    times = {name: [] for name in sides}
    for i in range(warmup + pairs):
        for name, f in sides.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            f()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: median(t) for name, t in times.items()}


def report(bench, seconds, a, b, pairs, **more):
    """Print the table of medians and the JSON line; a / b is the headline ratio."""
    for name, s in seconds.items():
        print(f"{name:24} {s * 1e3:10.2f} ms   {s / seconds[b]:6.3f} x {b}")
    for key, value in more.items():
        print(f"{key:24} {value}")
    print(json.dumps({"bench": bench, "ratio": round(seconds[a] / seconds[b], 4), "a": a, "b": b, "a_median_s": seconds[a],
                      "b_median_s": seconds[b], "pairs": pairs, "torch": torch.__version__, "threads": torch.get_num_threads(), **more}))


def step_of(device, **kw):
    """A function that runs one whole training step (forward, backward, optimizer) of a laptop-sized model on fresh tokens."""
    model = GPT(GPTConfig.backbone(**{**LAPTOP, **kw})).init_weights(0).to(device)
    optimizer = MuonAdamW(native_groups(model.roles(), model.cfg.n_embd))
    gen, step = torch.Generator().manual_seed(0), iter(range(1 << 30))

    def run():
        # Zipf-like ids: what repeats in text repeats in the tables
        rank = torch.rand(LAPTOP_ROWS, model.cfg.sequence_len + 1, generator=gen)
        ids = (LAPTOP_VOCAB ** rank - 1).long().clamp_(0, LAPTOP_VOCAB - 1).to(device)
        set_schedule(optimizer, next(step), 953)
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run


def table_mib(depth=6, m=150_855):
    """MiB of the hashed tables in bfloat16 after a step, weights + gradients + visit counts, read off the tensors."""
    model = GPT(GPTConfig.backbone(depth, sequence_len=16, oe_m=m)).set_dtype(torch.bfloat16)
    ids = torch.zeros(1, 16, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, ids).backward()
    return sum(z.numel() * z.element_size() for t in model.oe_tables for z in (t, t.grad, t.visits)) / 2**20


def bench_oe(config, device):
    """Cost of the tables per step: follows the rows visited, not the rows held."""
    sides = {"dense": step_of(device), "m=15085": step_of(device, oe_m=15_085), "m=150855": step_of(device, oe_m=150_855)}
    s = interleave(sides, config.pairs, device)
    report("oe", s, "m=150855", "m=15085", config.pairs, oe_over_dense=round(s["m=150855"] / s["dense"], 4),
           depth6_tables_mib=round(table_mib(), 2))


def loss_case(device):
    """(x, weight, targets) of the head loss at the laptop preset's shape."""
    gen = torch.Generator().manual_seed(0)
    n = LAPTOP_ROWS * LAPTOP["sequence_len"]
    x = torch.randn(n, LAPTOP_WIDTH, generator=gen).to(device).requires_grad_()
    w = (0.02 * torch.randn(LAPTOP_VOCAB, LAPTOP_WIDTH, generator=gen)).to(device).requires_grad_()
    return x, w, torch.randint(0, LAPTOP_VOCAB, (n,), generator=gen).to(device)


LOSSES = {"chunked": chunked_loss, "plain": plain_loss}


def loss_run(name, case):
    x, w, y = case
    x.grad = w.grad = None
    LOSSES[name](x, w, y, SOFTCAP).backward()


def loss_memory(name, device):
    """Peak MiB above the inputs during forward and backward. On the CPU: growth of this process's resident set, so run it in a fresh one."""
    case = loss_case(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_run(name, case)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    loss_run(name, case)
    return common.peak_mem_mib(device) - resident / 2**20


def fresh(*args):
    """Last line printed by bench.py in a fresh process, parsed."""
    out = subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True)
    if out.returncode:
        raise UserError(f"bench.py {' '.join(args)} failed: {out.stderr.strip().splitlines()[-1]}")
    return json.loads(out.stdout.splitlines()[-1])


def bench_loss(config, device):
    """The chunked head loss against the path that holds all tokens x vocabulary logits."""
    case = loss_case(device)
    s = interleave({name: lambda name=name: loss_run(name, case) for name in LOSSES}, config.pairs, device)
    mib = {name: fresh("loss-memory", "--device", config.device, "--side", name)["mib"] for name in LOSSES}
    report("loss", s, "chunked", "plain", config.pairs, memory_ratio=round(mib["chunked"] / mib["plain"], 4),
           chunked_peak_mib=round(mib["chunked"], 1), plain_peak_mib=round(mib["plain"], 1))


BENCHES = {"oe": bench_oe, "loss": bench_loss}


def main(argv=None):
    parser = common.make_parser(__doc__)
    parser.add_argument("bench", choices=[*BENCHES, "loss-memory"], metavar="NAME", help=" | ".join(BENCHES))
    parser.add_argument("--side", choices=list(LOSSES), help="loss-memory only: which loss to measure, in this process")
    common.add_flags(parser, Config)
    given = vars(parser.parse_args(argv))
    name, side, config = given.pop("bench"), given.pop("side", None), Config(**given)
    common.check_bounds(config)
    if (side is not None) != (name == "loss-memory"):
        raise UserError("--side goes with loss-memory and nothing else")
    device = common.pick_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    if name == "loss-memory":
        return print(json.dumps({"mib": loss_memory(side, device)}))
    BENCHES[name](config, device)


if __name__ == "__main__":
    common.cli(main)
