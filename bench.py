"""Side-by-side timings, as ratios within one run: the sides alternate after a warm-up, and medians are compared.

    python bench.py oe      training step with hashed tables of 150,855 rows against 15,085, and against no tables
    python bench.py loss    chunked head loss against the plain one: time and peak memory, forward and backward
    python bench.py opt     training step of each family of OE arms against its native one
    python bench.py ddp     training step on two ranks against one process (on one machine they share its cores)
    python bench.py contraction   WM's 13 reward contractions of the d6 model against the papers' outer products and against the bare GEMMs

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
from optim import PACKAGE, PACKAGE_SCHEDULE, MuonAdamW, native_groups, set_schedule
from wm_kernels import PRECISIONS, wm_reward

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


def step_of(device, groups={}, schedule={}, rank=0, world=1, **kw):
    """A function that runs one whole training step (forward, backward, optimizer) of a laptop-sized model on fresh tokens."""
    model = GPT(GPTConfig.backbone(**{**LAPTOP, **kw})).init_weights(0).to(device)
    optimizer = MuonAdamW(native_groups(model.roles(), model.cfg.n_embd, **groups), rank, world)
    gen, step = torch.Generator().manual_seed(0), iter(range(1 << 30))

    def run():
        # Zipf-like ids: what repeats in text repeats in the tables
        uniform = torch.rand(LAPTOP_ROWS, model.cfg.sequence_len + 1, generator=gen)
        ids = (LAPTOP_VOCAB ** uniform - 1).long().clamp_(0, LAPTOP_VOCAB - 1).to(device)
        set_schedule(optimizer, 100 + next(step), 953, **schedule)   # past the ramps: every part at full strength
        ids = ids[rank::world]
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return run


def table_mib(depth=6, m=150_855):
    """MiB of the hashed tables in bfloat16 after a step, weights + gradients + visit counts, read off the tensors."""
    model = GPT(GPTConfig.backbone(depth, sequence_len=16, oe_m=m)).set_dtype(torch.bfloat16)
    ids = torch.zeros(1, 16, dtype=torch.long)
    with common.autocast(torch.device("cpu"), torch.bfloat16):
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
    """Forward and backward of one head loss."""
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


def fresh(*args, start=(sys.executable,)):
    """Last line printed by bench.py in a fresh process, parsed."""
    out = subprocess.run([*start, __file__, *args], capture_output=True, text=True)
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


def bench_opt(config, device):
    """What the package, the joint package and the routes cost over native steps, dense and with tables."""
    package, tables = dict(groups=PACKAGE, schedule=PACKAGE_SCHEDULE), dict(oe_m=150_855)
    joint = dict(package, qk_scale="full")
    families = {"dense native": {}, "dense opt": package, "dense joint": joint,
                "oe native": tables, "oe opt": dict(tables, **package), "oe joint": dict(tables, **joint),
                "oe separate + skip": dict(tables, **joint, wte_route="separate", out_skip=True),
                "oe shared + skip": dict(tables, **joint, wte_route="shared", out_skip=True),
                "oe table neumann": dict(tables, groups=dict(table_neumann_tau=80))}
    s = interleave({name: step_of(device, **kw) for name, kw in families.items()}, config.pairs, device)
    over = {name.replace(" ", "_") + "_over_native": round(s[name] / s["oe native" if name.startswith("oe") else "dense native"], 4)
            for name in s if "native" not in name}
    report("opt", s, "oe joint", "oe native", config.pairs, **over)


def bench_ddp(config, device):
    """A step of one process with all threads against two ranks with half of them each, in processes of their own, in turn."""
    threads = max(1, torch.get_num_threads() // 2)
    times = {"two ranks": [], "one process": []}
    for _ in range(3):
        for name, world, n in (("one process", 1, 2 * threads), ("two ranks", 2, threads)):
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"] if world > 1 else [sys.executable]
            times[name].append(fresh("ddp-step", "--pairs", str(config.pairs), "--threads", str(n), "--device", config.device, start=start)["s"])
    report("ddp", {name: median(t) for name, t in times.items()}, "two ranks", "one process", 3)


def ddp_step(config):
    """Median seconds of a step of the model with tables, on as many ranks as torchrun started; rank 0 prints it."""
    with common.ranks(config.device) as (rank, world, device):
        s = interleave({"step": step_of(device, rank=rank, world=world, oe_m=15_085)}, config.pairs, device)["step"]
        if rank == 0:
            print(json.dumps({"s": s}), flush=True)


WM_TOKENS = 2048
WM_SUITE = ((1, 8192, 384), (6, 384, 1536), (6, 384, 384))   # count, J, I of lm_head, mlp.c_proj, attn.c_proj at depth 6 (WM 3.5, Table 4)


def contraction_suite(device):
    """[(u, dy, W)] of the 13 matrices that the d6 model's rewards are read from."""
    gen = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen).to(device)
    return [(draw(WM_TOKENS, J), draw(WM_TOKENS, I), draw(J, I)) for count, J, I in WM_SUITE for _ in range(count)]


def bench_contraction(config, device):
    """wm_reward over the suite at 2048 and 64 streams: torch (and Triton) against outer, a few times, and against u @ W alone."""
    suite, few, more = contraction_suite(device), 3, {}
    fast = [("torch", "ieee")] + [("triton", p) for p in PRECISIONS] * (device.type == "cuda")
    for streams in (64, WM_TOKENS):
        def run(impl, precision="ieee", group=WM_TOKENS // streams):
            for u, dy, W in suite:
                wm_reward(u, dy, W, group, impl=impl, precision=precision)

        def gemms():
            for u, _, W in suite:
                u @ W
        s = interleave({**{f"{i} {p}": lambda i=i, p=p: run(i, p) for i, p in fast}, "gemms": gemms}, config.pairs, device)
        slow = interleave({"outer": lambda: run("outer"), "torch ieee": lambda: run("torch")}, few, device, warmup=1)
        for name in s:
            if name != "gemms":
                more[f"{name}_over_gemms_G{streams}".replace(" ", "_")] = round(s[name] / s["gemms"], 4)
                more[f"outer_over_{name}_G{streams}".replace(" ", "_")] = round(slow["outer"] / (slow if name in slow else s)[name], 2)
    report("contraction", {"outer": slow["outer"], **s}, "torch ieee", "gemms", config.pairs, outer_pairs=few, tokens=WM_TOKENS, **more)


BENCHES = {"oe": bench_oe, "loss": bench_loss, "opt": bench_opt, "ddp": bench_ddp, "contraction": bench_contraction}
INNER = ("loss-memory", "ddp-step")   # what the benches above start in processes of their own


def main(argv=None):
    parser = common.make_parser(__doc__)
    parser.add_argument("bench", choices=[*BENCHES, *INNER], metavar="NAME", help=" | ".join(BENCHES))
    parser.add_argument("--side", choices=list(LOSSES), help="loss-memory only: which loss to measure, in this process")
    common.add_flags(parser, Config)
    given = vars(parser.parse_args(argv))
    name, side, config = given.pop("bench"), given.pop("side", None), Config(**given)
    common.check_bounds(config)
    if (side is not None) != (name == "loss-memory"):
        raise UserError("--side goes with loss-memory and nothing else")
    if config.threads:
        torch.set_num_threads(config.threads)
    if name == "ddp-step":
        return ddp_step(config)
    device = common.pick_device(config.device)
    if name == "loss-memory":
        return print(json.dumps({"mib": loss_memory(side, device)}))
    BENCHES[name](config, device)


if __name__ == "__main__":
    common.cli(main)
