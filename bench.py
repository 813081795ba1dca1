"""Side-by-side timings, as ratios within one run: the sides alternate, and medians are compared.

    python bench.py oe            training step with tables of 150,855 rows, of 15,085, and without
    python bench.py loss          chunked head loss against the plain one: time and peak memory
    python bench.py opt           training step of each family of OE arms against its native one
    python bench.py ddp           training step on two ranks against one process, on the same cores
    python bench.py contraction   the 13 reward contractions of WM's d6 model against the paper's
                                  outer products and against bare matrix products
    python bench.py wm-step       step of delayed WM against exact backprop on the same weights
    python bench.py ablate        step of the ablations' modern config against plain nanoGPT's
    python bench.py delta         chunked gated delta rule against its recurrence and softmax
    python bench.py gpu           every check that wants a GPU: kernel errors, contraction, WM and
                                  OE steps, memory of the native regime; on a CPU in miniature

A single timing on a shared machine means nothing; the ratio of two things in one run does. Each
prints a table and, as its last line, one JSON object: {"bench", "ratio", "a_median_s",
"b_median_s", "pairs", ...}, where ratio = a / b.
"""
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import ablate
import common
import runs
import train_oe
import train_wm
from common import UserError, flag
from fast_weights import delta_chunk, delta_recurrent
from loss import chunked_loss, plain_loss
from model import GPT, GPTConfig, rotary_tables, rotate
from optim import PACKAGE, PACKAGE_SCHEDULE, MuonAdamW, native_groups, set_schedule
from wm_kernels import PRECISIONS, signs, wm_credit, wm_reward

LAPTOP, VOCAB, SOFTCAP = train_oe.PRESETS["laptop"], 8192, 15.0


@dataclass(frozen=True)
class Config:
    """The options of bench.py."""
    pairs: int = flag(15, "timed repetitions of every side", low=3)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    threads: int = flag(0, "CPU threads; 0: torch's own choice", low=0, high=1024)
    miniature: bool = flag(False, "contraction, wm-step, native: sizes that only show that it runs")


def interleave(sides, pairs, device, warmup=2):
    """Median seconds of each side: {name: function}, in turn, `pairs` times after `warmup`."""
    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()
    times = {name: [] for name in sides}
    for i in range(warmup + pairs):
        for name, f in sides.items():
            wait()
            start = time.perf_counter()
            f()
            wait()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: median(t) for name, t in times.items()}


def ratio(seconds, a, b, digits=4):
    """a's seconds over b's."""
    return round(seconds[a] / seconds[b], digits)


def report(bench, seconds, a, b, pairs, **more):
    """Print the table of medians and the JSON line; a / b is the headline ratio."""
    for name, s in seconds.items():
        print(f"{name:43} {s * 1e3:10.2f} ms   {s / seconds[b]:6.3f} x {b}")
    for key, value in more.items():
        print(f"{key:43} {value}")
    print(json.dumps({
        "bench": bench, "ratio": ratio(seconds, a, b), "a": a, "b": b, "a_median_s": seconds[a],
        "b_median_s": seconds[b], "pairs": pairs, "torch": torch.__version__,
        "threads": torch.get_num_threads(), **more}))


def fresh(*args, start=(sys.executable,)):
    """Last line printed by bench.py in a fresh process, parsed."""
    out = subprocess.run([*start, __file__, *args], capture_output=True, text=True)
    if out.returncode:
        said = out.stderr.strip().splitlines()[-1]
        raise UserError(f"bench.py {' '.join(args)} failed: {said}")
    return json.loads(out.stdout.splitlines()[-1])


def draws(device, *shapes):
    """Normal draws of these shapes, the same in every process."""
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=gen).to(device) for shape in shapes]


def text_like(rows, tokens, gen):
    """Token ids [rows, tokens], Zipf-like: what repeats in text repeats in the tables."""
    uniform = torch.rand(rows, tokens, generator=gen)
    return (VOCAB ** uniform - 1).long().clamp_(0, VOCAB - 1)


# ---- the OE paper's steps ----

def oe_step(device, groups={}, schedule={}, rank=0, world=1, **flags):
    """A function that runs a whole training step of a laptop-sized model on fresh tokens."""
    config = train_oe.Config(**{**LAPTOP, **flags})
    model = GPT(train_oe.model_config(config, VOCAB)).init_weights(0).to(device)
    rules = native_groups(model.roles(), model.cfg.n_embd, **groups)
    optimizer = MuonAdamW(rules, rank, world)
    gen, steps = torch.Generator().manual_seed(0), count(100)   # past the ramps

    def run():
        ids = text_like(config.batch_size, config.seq_len + 1, gen).to(device)[rank::world]
        set_schedule(optimizer, next(steps), 953, **schedule)
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return run


def table_mib(depth=6, m=150_855):
    """MiB of the bfloat16 hashed tables after a step: weights, gradients and visit counts."""
    model = GPT(GPTConfig.backbone(depth, sequence_len=16, oe_m=m)).set_dtype(torch.bfloat16)
    ids = torch.zeros(1, 16, dtype=torch.long)
    with common.autocast(torch.device("cpu"), torch.bfloat16):
        model(ids, ids).backward()
    held = [z for table in model.oe_tables for z in (table, table.grad, table.visits)]
    return sum(z.numel() * z.element_size() for z in held) / 2**20


def bench_oe(config, device):
    """Cost of the tables per step: it follows the rows visited, not the rows held."""
    sides = {"dense": oe_step(device), "m=15085": oe_step(device, oe_m=15_085),
             "m=150855": oe_step(device, oe_m=150_855)}
    s = interleave(sides, config.pairs, device)
    report("oe", s, "m=150855", "m=15085", config.pairs,
           oe_over_dense=ratio(s, "m=150855", "dense"), depth6_tables_mib=round(table_mib(), 2))


def bench_opt(config, device):
    """What the package, the joint package and the routes cost over native steps."""
    tables, package = dict(oe_m=150_855), dict(groups=PACKAGE, schedule=PACKAGE_SCHEDULE)
    joint = dict(package, qk_scale="full")
    families = {
        "dense native": {}, "dense opt": package, "dense joint": joint,
        "oe native": tables, "oe opt": dict(tables, **package), "oe joint": dict(tables, **joint),
        "oe separate + skip": dict(tables, **joint, wte_route="separate", out_skip=True),
        "oe shared + skip": dict(tables, **joint, wte_route="shared", out_skip=True),
        "oe table neumann": dict(tables, groups=dict(table_neumann_tau=80))}
    seconds, over = {}, {}
    # each against its native in turn, so that the two of a pair stand next to each other in time
    for name, flags in families.items():
        base = name.split()[0] + " native"
        if name == base:
            continue
        sides = {base: oe_step(device, **families[base]), name: oe_step(device, **flags)}
        s = interleave(sides, config.pairs, device)
        over[f"{name.replace(' ', '_')}_over_native"] = ratio(s, name, base)
        # the headline's two sides are one pair
        both = base not in seconds or name == "oe joint"
        seconds.update(s if both else {name: s[name]})
    report("opt", seconds, "oe joint", "oe native", config.pairs, **over)


def bench_ddp(config, device):
    """A step of one process with all threads against two ranks with half of them each, in turn."""
    threads = max(1, torch.get_num_threads() // 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    sides = {"one process": ([sys.executable], 2 * threads), "two ranks": (torchrun, threads)}
    times = {name: [] for name in ("two ranks", "one process")}
    for _ in range(3):
        for name, (start, each) in sides.items():
            found = fresh("ddp-step", "--pairs", str(config.pairs), "--threads", str(each),
                          "--device", config.device, start=start)
            times[name].append(found["s"])
    seconds = {name: median(t) for name, t in times.items()}
    report("ddp", seconds, "two ranks", "one process", 3)


def ddp_step(config):
    """Seconds of a step on as many ranks as torchrun started; rank 0 prints them."""
    with runs.ranks(config.device) as (rank, world, device):
        step = oe_step(device, rank=rank, world=world, oe_m=15_085)
        s = interleave({"step": step}, config.pairs, device)["step"]
        if rank == 0:
            print(json.dumps({"s": s}), flush=True)


# ---- the head loss ----

def loss_case(device):
    """(x, weight, targets) of the head loss at the laptop preset's shape."""
    n, width = LAPTOP["batch_size"] * LAPTOP["seq_len"], 64 * LAPTOP["depth"]
    x, w = draws(device, (n, width), (VOCAB, width))
    targets = torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(0))
    return x.requires_grad_(), (0.02 * w).requires_grad_(), targets.to(device)


LOSSES = {"chunked": chunked_loss, "plain": plain_loss}


def loss_run(name, case):
    """Forward and backward of one head loss."""
    x, w, y = case
    x.grad = w.grad = None
    LOSSES[name](x, w, y, SOFTCAP).backward()


def loss_memory(name, config, device):
    """Peak MiB above the inputs during forward and backward.

    On the CPU it is the growth of this process's resident set, so run it in a fresh one.
    """
    case = loss_case(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_run(name, case)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    loss_run(name, case)
    return common.peak_mem_mib(device) - pages * resource.getpagesize() / 2**20


def peaks(bench, sides, config):
    """{side: peak MiB} of a bench of memory, each in a process of its own."""
    more = ["--device", config.device, "--threads", str(torch.get_num_threads())]
    more += ["--miniature"] if config.miniature else []
    return {side: fresh(bench, "--side", side, *more)["mib"] for side in sides}


def bench_loss(config, device):
    """The chunked head loss against the path that holds all tokens x vocabulary logits."""
    case = loss_case(device)
    s = interleave({name: partial(loss_run, name, case) for name in LOSSES}, config.pairs, device)
    mib = peaks("loss-memory", LOSSES, config)
    report("loss", s, "chunked", "plain", config.pairs,
           memory_ratio=ratio(mib, "chunked", "plain"),
           chunked_peak_mib=round(mib["chunked"], 1), plain_peak_mib=round(mib["plain"], 1))


# ---- delayed WM ----

WM_TOKENS = 2048
# count, J, I of lm_head, mlp.c_proj, attn.c_proj at depth 6 (WM 3.5, Table 4)
WM_SUITE = ((1, 8192, 384), (6, 384, 1536), (6, 384, 384))


def contraction_suite(device, shrink=1):
    """[(u, dy, W)] of the 13 matrices that the d6 model's rewards are read from."""
    shapes = []
    for times, J, I in WM_SUITE:
        J, I = J // shrink, I // shrink
        shapes += [(WM_TOKENS, J), (WM_TOKENS, I), (J, I)] * times
    flat = iter(draws(device, *shapes))
    return list(zip(flat, flat, flat))


def contract(suite, streams, impl, precision="ieee"):
    """All rewards of the suite."""
    for u, dy, W in suite:
        wm_reward(u, dy, W, WM_TOKENS // streams, impl=impl, precision=precision)


def multiply(suite):
    """The matrix products u W alone."""
    for u, _, W in suite:
        u @ W


def implementations(device):
    """(impl, precision) of the contraction that run on the device."""
    triton = [("triton", precision) for precision in PRECISIONS]
    return [("torch", "ieee"), *(triton if device.type == "cuda" else [])]


def bench_contraction(config, device):
    """wm_reward over the suite at 2048 and 64 streams against `outer` and against u @ W alone."""
    suite = contraction_suite(device, 16 if config.miniature else 1)
    # one run of outer takes most of a minute on two cores
    few, more = 5 if device.type == "cuda" else 1, {}
    for streams in (64, WM_TOKENS):
        sides = {}
        for impl, precision in implementations(device):
            sides[f"{impl} {precision}"] = partial(contract, suite, streams, impl, precision)
        s = interleave({**sides, "gemms": partial(multiply, suite)}, config.pairs, device)
        both = {name: partial(contract, suite, streams, name.split()[0])
                for name in ("outer", "torch ieee")}
        slow = interleave(both, few, device, warmup=0)
        for name in sides:
            ours, key = slow.get(name, s[name]), name.replace(" ", "_")
            more[f"{key}_over_gemms_G{streams}"] = ratio(s, name, "gemms")
            more[f"outer_over_{key}_G{streams}"] = round(slow["outer"] / ours, 2)
    report("contraction", {"outer": slow["outer"], **s}, "torch ieee", "gemms", config.pairs,
           outer_pairs=few, tokens=WM_TOKENS, **more)


MINIATURE = dict(depth=2, head_dim=32, seq_len=32)


def wm_step(device, **flags):
    """A function that runs a whole step of train_wm.py under these flags, on fresh tokens."""
    config = train_wm.Config(**flags)
    pipeline = train_wm.build_pipeline(config, train_wm.build_model(config, VOCAB).to(device))
    gen, steps = torch.Generator().manual_seed(0), count(25)   # past the ramp of equilibration
    rows = train_wm.rows_at_once(config)

    def run():
        batches = []
        for _ in range(config.batch_size // rows):
            ids = text_like(rows, config.seq_len + 1, gen).to(device)
            batches.append((ids[:, :-1], ids[:, 1:]))
        pipeline.step(next(steps), 1 << 20, batches)
    return run


WM_SIDES = {"wm": {}, "backprop": dict(method="backprop")}


def wm_memory(side, config, device):
    """Peak MiB of a process that trains a few steps; on the CPU its resident set."""
    size = MINIATURE if config.miniature else {}
    run = wm_step(device, **size, **WM_SIDES[side])
    for _ in range(5):   # until the pipeline is full
        run()
    return common.peak_mem_mib(device)


def bench_wm_step(config, device):
    """One token per stream against autograd on the same active weights, 4 matrices and 6."""
    size, sides = MINIATURE if config.miniature else {}, {}
    for name, flags in WM_SIDES.items():
        sides[name] = wm_step(device, **size, **flags)
        sides[f"{name} 6 matrices"] = wm_step(device, **size, **flags, active="qk")
    s = interleave(sides, config.pairs, device, warmup=4)
    mib = peaks("wm-memory", WM_SIDES, config)
    report("wm-step", s, "wm", "backprop", config.pairs,
           six_over_six=ratio(s, "wm 6 matrices", "backprop 6 matrices"),
           memory_ratio=ratio(mib, "wm", "backprop"), wm_peak_mib=round(mib["wm"], 1),
           backprop_peak_mib=round(mib["backprop"], 1))


def native(config, device):
    """Seconds a step and peak GiB of the native regime: 16 micro-batches of 4 x 2048 tokens."""
    found, regime = {}, train_wm.REGIMES["native"]
    if config.miniature:
        regime = {**regime, **MINIATURE, "batch_size": 8}
    for name, active in (("4 matrices", "none"), ("6 matrices", "qk")):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run = wm_step(device, **regime, active=active)
        seconds = interleave({"step": run}, 3, device, warmup=3)["step"]
        found[name] = {"step_s": seconds, "peak_gib": common.peak_mem_mib(device) / 1024}
        del run
    print(json.dumps(found))


def kernel_errors(device):
    """{implementation and precision: largest relative error of wm_credit against float64}.

    Relative to the largest value, at a ragged shape.
    """
    gen = torch.Generator().manual_seed(0)
    u, dy, W = (torch.randn(*shape, generator=gen, dtype=torch.float64)
                for shape in ((96, 65), (96, 97), (65, 97)))
    xi, errors = signs(96, 97, 1, dtype=torch.float64), {}
    own = [z.float().to(device) for z in (u, dy, W)]
    for group in (1, 8):
        want = wm_credit(u, dy, W, xi, 0.01, group=group, impl="torch")
        for impl, precision in implementations(device):
            got = wm_credit(*own, (1, 0), 0.01, group=group, impl=impl, precision=precision)
            error = (got.double().cpu() - want).abs().max() / want.abs().max()
            errors[f"{impl} {precision} M={group}"] = error.item()
    return errors


# ---- the ablations ----

class PlainBlock(nn.Module):
    """A layer of the modern config as nanoGPT would write it: one matrix for q, k and v."""

    def __init__(self, cfg):
        super().__init__()
        C, hidden = cfg.n_embd, cfg.hidden
        self.n_head, self.drop = cfg.n_head, nn.Dropout(cfg.dropout)
        self.norm_attn, self.norm_ffn = nn.RMSNorm(C), nn.RMSNorm(C)
        self.c_attn, self.c_proj = linear(C, 3 * C), linear(C, C)
        self.c_fc, self.c_gate, self.c_out = linear(C, hidden), linear(C, hidden), linear(hidden, C)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        qkv = self.c_attn(self.norm_attn(x)).split(C, dim=-1)
        q, k, v = (z.view(B, T, self.n_head, -1) for z in qkv)
        q, k, v = (z.transpose(1, 2) for z in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        p = self.drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))
        h = self.norm_ffn(x)
        return x + self.drop(self.c_out(F.silu(self.c_gate(h)) * self.c_fc(h)))


def linear(n_in, n_out):
    """A matrix without a bias."""
    return nn.Linear(n_in, n_out, bias=False)


class PlainGPT(nn.Module):
    """The modern config with nanoGPT's loss: all logits at once, then cross-entropy."""

    def __init__(self, cfg):
        super().__init__()
        self.wte, self.norm = nn.Embedding(cfg.vocab_size, cfg.n_embd), nn.RMSNorm(cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(PlainBlock(cfg) for _ in range(cfg.n_layer))
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)
        cos, sin = rotary_tables(cfg.sequence_len, cfg.head_dim, cfg.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, idx, targets):
        x = self.drop(self.wte(idx))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def clipped_step(model, optimizers, x, y):
    """A function that runs a training step with clipping, and returns the loss."""
    model.train()

    def run():
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()
    return run


def bench_ablate(config, device):
    """The step that ablate.py takes for `modern`, as a test checks, against the plain one."""
    cell = ablate.Config()
    cfg = ablate.model_config(cell, VOCAB)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (cell.batch_size, cell.seq_len + 1), generator=gen).to(device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    plain, modern = PlainGPT(cfg).to(device), GPT(cfg).init_weights(0).to(device)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (plain, modern)]
    assert sizes[0] == sizes[1], sizes
    ours = ablate.make_optimizers(modern, cell).values()
    theirs = [torch.optim.AdamW(plain.parameters(), lr=3e-4)]
    sides = {"modern": clipped_step(modern, ours, x, y),
             "plain": clipped_step(plain, theirs, x, y)}
    s = interleave(sides, config.pairs, device)
    report("ablate", s, "modern", "plain", config.pairs, params=sizes[0])


def mixer_run(device, rows, tokens, **fields):
    """A function that runs forward and backward of the first attention layer of a modern model."""
    cfg = GPTConfig.modern(sequence_len=tokens, dropout=0.0, **fields)
    model = GPT(cfg).init_weights(0).to(device)
    x, up = draws(device, *[(rows, tokens, cfg.n_embd)] * 2)

    def run():
        z = x.clone().requires_grad_()
        model.blocks[0].attn(z, None, model.cos, model.sin, None).backward(up)
    return run


def rule_run(device, rows, tokens, rule, per_channel, heads=6, channels=32):
    """A function that runs forward and backward of a delta rule alone, at a layer's shape."""
    q, k, v, gate = draws(device, *[(rows, heads, tokens, channels)] * 4)
    decay = F.logsigmoid(gate if per_channel else gate[..., 1])
    parts = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, gate[..., 0].sigmoid(), decay]

    def run():
        rule(*(z.detach().requires_grad_() for z in parts)).sum().backward()
    return run


DELTA_TOKENS = 512
DELTA_RULES = {"gated_delta": True, "gated_delta_scalar": False}   # is there a decay per channel?
DELTA_FORMS = {"recurrent": delta_recurrent, "chunk": delta_chunk}


def delta_times(rows, pairs, few, device):
    """(seconds of each layer, {layer and form: seconds}, {layer and form: seconds of the rule}).

    The layers are timed `pairs` times, the forms, whole and without the rest, a `few` times.
    """
    fast = {"softmax": mixer_run(device, rows, DELTA_TOKENS)}
    whole, alone = {}, {}
    for name, per_channel in DELTA_RULES.items():
        fields = dict(attn=name, pos="none")
        fast[name] = mixer_run(device, rows, DELTA_TOKENS, **fields)
        for form, rule in DELTA_FORMS.items():
            key = name, form
            whole[key] = mixer_run(device, rows, DELTA_TOKENS, fast_weight_impl=form, **fields)
            alone[key] = rule_run(device, rows, DELTA_TOKENS, rule, per_channel)
    slow = [interleave(sides, few, device, warmup=1) for sides in (whole, alone)]
    return interleave(fast, pairs, device), *slow


def bench_delta(config, device):
    """Gated delta rules, forward and backward: in chunks, step by step, and softmax beside them.

    Timed are the whole layer and, as `rule`, what differs between the forms. The recurrence works
    on all rows at once, so that its calls cost less per row the more rows there are: 1 row and 8.
    """
    few, more, seconds = 3, {}, {}
    for rows in (8, 1):
        fast, whole, alone = delta_times(rows, config.pairs, few, device)
        for name in DELTA_RULES:
            forms = (name, "recurrent"), (name, "chunk")
            more[f"recurrent_over_{name}_rows{rows}"] = ratio(whole, *forms, digits=2)
            more[f"recurrent_over_{name}_rule_rows{rows}"] = ratio(alone, *forms, digits=2)
            more[f"{name}_over_softmax_rows{rows}"] = ratio(fast, name, "softmax")
            seconds[f"{name} recurrent, {rows} rows"] = whole[name, "recurrent"]
        for (name, form), s in alone.items():
            seconds[f"{name} rule, {form}, {rows} rows"] = s
        seconds.update({f"{name}, {rows} rows": s for name, s in fast.items()})
    report("delta", seconds, "gated_delta_scalar, 8 rows", "softmax, 8 rows", config.pairs,
           recurrent_pairs=few, tokens=DELTA_TOKENS, **more)


# ---- command line ----

def bench_gpu(config, device):
    """The checks that want a GPU, each in a process of its own; one JSON object of all of them."""
    on_gpu, begin = device.type == "cuda", time.perf_counter()
    found = {"kernel_errors": kernel_errors(device)}
    names, where = ["contraction", "wm-step", "native"], "cpu, in miniature"
    options = ["--device", config.device, "--pairs", str(min(config.pairs, 7))]
    if on_gpu:
        names, where = [*names, "oe", "loss", "opt"], torch.cuda.get_device_name(device)
    else:
        options.append("--miniature")
    for name in tqdm(names, desc="gpu checks", disable=None):
        found[name] = fresh(name, *options)
    for name, values in found.items():
        print(name, *(f"    {key}: {value}" for key, value in values.items()), sep="\n")
    step = {key: found["wm-step"][key]
            for key in ("ratio", "a", "b", "a_median_s", "b_median_s", "pairs")}
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({"bench": "gpu", **step, "device": where, "seconds": seconds, **found}))


BENCHES = {"oe": bench_oe, "loss": bench_loss, "opt": bench_opt, "ddp": bench_ddp,
           "contraction": bench_contraction, "ablate": bench_ablate, "delta": bench_delta,
           "wm-step": bench_wm_step, "gpu": bench_gpu}
# what these start in processes of their own: name -> (its sides, MiB of one of them)
MEMORY = {"loss-memory": (LOSSES, loss_memory), "wm-memory": (WM_SIDES, wm_memory)}
INNER = (*MEMORY, "ddp-step", "native")


def main(argv=None):
    parser = common.make_parser(__doc__)
    parser.add_argument("bench", choices=[*BENCHES, *INNER], metavar="NAME",
                        help=" | ".join(BENCHES))
    parser.add_argument("--side", choices=[*LOSSES, *WM_SIDES],
                        help="loss-memory and wm-memory only: what to measure, in this process")
    common.add_flags(parser, Config)
    given = vars(parser.parse_args(argv))
    name, side, config = given.pop("bench"), given.pop("side", None), Config(**given)
    common.check_bounds(config)
    sides = MEMORY[name][0] if name in MEMORY else [None]
    if side not in sides:
        raise UserError(f"--side goes with {' and '.join(MEMORY)} and nothing else, and names one "
                        "of their sides")
    if config.threads:
        torch.set_num_threads(config.threads)
    if name == "ddp-step":
        return ddp_step(config)
    device = common.pick_device(config.device)
    if name in MEMORY:
        return print(json.dumps({"mib": MEMORY[name][1](side, config, device)}))
    bench = native if name == "native" else BENCHES[name]
    bench(config, device)


if __name__ == "__main__":
    common.cli(main)
