"""Side-by-side timings, as ratios within one run: the sides alternate after a warm-up, and medians are compared.

    python bench.py oe      training step with hashed tables of 150,855 rows against 15,085, and against no tables
    python bench.py loss    chunked head loss against the plain one: time and peak memory, forward and backward
    python bench.py opt     training step of each family of OE arms against its native one
    python bench.py ddp     training step on two ranks against one process (on one machine they share its cores)
    python bench.py contraction   WM's 13 reward contractions of the d6 model against the paper's outer products and against bare GEMMs
    python bench.py wm-step step of delayed WM against exact backprop on the same weights (d6, 4 matrices): time and peak memory
    python bench.py gpu     every check that wants a GPU in one go: kernel errors, contraction, WM and OE steps, memory of the native regime;
                            on a CPU in miniature, to see that it runs
    python bench.py ablate  training step of the ablations' modern config against a plain nanoGPT-style one of the same shape
    python bench.py delta   chunked gated delta rule at 512 tokens against its recurrence and against softmax attention

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
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import common
from common import UserError, flag
from fast_weights import delta_chunk, delta_recurrent
from loss import chunked_loss, plain_loss
from model import GPT, GPTConfig, rotary_tables, rotate
from optim import PACKAGE, PACKAGE_SCHEDULE, MuonAdamW, native_groups, set_schedule
from wm import Pipeline, Rule
from wm_kernels import PRECISIONS, signs, wm_credit, wm_reward

LAPTOP = dict(depth=4, head_dim=64, sequence_len=256)   # the laptop preset's model and batch
LAPTOP_ROWS, LAPTOP_VOCAB, LAPTOP_WIDTH, SOFTCAP = 8, 8192, 256, 15.0


@dataclass(frozen=True)
class Config:
    """The options of bench.py."""
    pairs: int = flag(15, "timed repetitions of every side", low=3)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice", low=0)
    miniature: bool = flag(False, "contraction, wm-step, native: sizes that only show that it runs")


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
        print(f"{name:43} {s * 1e3:10.2f} ms   {s / seconds[b]:6.3f} x {b}")
    for key, value in more.items():
        print(f"{key:43} {value}")
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


def loss_memory(name, device, miniature=False):
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
    seconds, over = {}, {}
    for name, kw in families.items():   # each against its native in turn, so that the two of a pair stand next to each other in time
        base = name.split()[0] + " native"
        if name == base:
            continue
        s = interleave({base: step_of(device, **families[base]), name: step_of(device, **kw)}, config.pairs, device)
        over[name.replace(" ", "_") + "_over_native"] = round(s[name] / s[base], 4)
        seconds.update({name: s[name]} if "oe native" in seconds and name != "oe joint" else s)   # the headline's two sides are one pair
    report("opt", seconds, "oe joint", "oe native", config.pairs, **over)


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


def contraction_suite(device, shrink=1):
    """[(u, dy, W)] of the 13 matrices that the d6 model's rewards are read from."""
    gen = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen).to(device)
    sizes = [(count, J // shrink, I // shrink) for count, J, I in WM_SUITE]
    return [(draw(WM_TOKENS, J), draw(WM_TOKENS, I), draw(J, I)) for count, J, I in sizes for _ in range(count)]


def bench_contraction(config, device):
    """wm_reward over the suite at 2048 and 64 streams: torch (and Triton) against outer, a few times, and against u @ W alone."""
    # one run of outer takes most of a minute on two cores
    suite, few, more = contraction_suite(device, 16 if config.miniature else 1), 5 if device.type == "cuda" else 1, {}
    fast = [("torch", "ieee")] + [("triton", p) for p in PRECISIONS] * (device.type == "cuda")
    for streams in (64, WM_TOKENS):
        def run(impl, precision="ieee", group=WM_TOKENS // streams):
            for u, dy, W in suite:
                wm_reward(u, dy, W, group, impl=impl, precision=precision)

        def gemms():
            for u, _, W in suite:
                u @ W
        s = interleave({**{f"{i} {p}": lambda i=i, p=p: run(i, p) for i, p in fast}, "gemms": gemms}, config.pairs, device)
        slow = interleave({"outer": lambda: run("outer"), "torch ieee": lambda: run("torch")}, few, device, warmup=0)
        for name in s:
            if name != "gemms":
                more[f"{name}_over_gemms_G{streams}".replace(" ", "_")] = round(s[name] / s["gemms"], 4)
                more[f"outer_over_{name}_G{streams}".replace(" ", "_")] = round(slow["outer"] / (slow if name in slow else s)[name], 2)
    report("contraction", {"outer": slow["outer"], **s}, "torch ieee", "gemms", config.pairs, outer_pairs=few, tokens=WM_TOKENS, **more)


class PlainBlock(nn.Module):
    """A layer of the modern config the way nanoGPT would write it: one matrix for q, k and v, dropout, torch's own attention."""

    def __init__(self, cfg):
        super().__init__()
        C, self.n_head, self.drop = cfg.n_embd, cfg.n_head, nn.Dropout(cfg.dropout)
        self.norm_attn, self.norm_ffn = nn.RMSNorm(C), nn.RMSNorm(C)
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.c_fc, self.c_gate, self.c_out = (nn.Linear(i, o, bias=False) for i, o in ((C, cfg.hidden), (C, cfg.hidden), (cfg.hidden, C)))

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.n_head, -1) for z in self.c_attn(self.norm_attn(x)).split(C, dim=-1))
        q, k, v = (z.transpose(1, 2) for z in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop.p if self.training else 0.0)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))
        h = self.norm_ffn(x)
        return x + self.drop(self.c_out(F.silu(self.c_gate(h)) * self.c_fc(h)))


class PlainGPT(nn.Module):
    """The modern config with nanoGPT's loss: all logits at once, then cross-entropy."""

    def __init__(self, cfg):
        super().__init__()
        self.wte, self.drop, self.norm = nn.Embedding(cfg.vocab_size, cfg.n_embd), nn.Dropout(cfg.dropout), nn.RMSNorm(cfg.n_embd)
        self.blocks = nn.ModuleList(PlainBlock(cfg) for _ in range(cfg.n_layer))
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.ndim > 1 else None
        for name, table in zip(("cos", "sin"), rotary_tables(cfg.sequence_len, cfg.head_dim, cfg.rope_base)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, idx, targets):
        x = self.drop(self.wte(idx))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def loop_step(model, x, y, **adamw):
    """A function that runs one training step with AdamW and clipping, and returns the loss."""
    model.train()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=3e-4, **adamw)

    def run():
        loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()
    return run


def bench_ablate(config, device):
    """The step that ablate.py takes for `modern` (a test compares them) against the plain one: 32 rows of 128 tokens, 8192 ids."""
    cfg = GPTConfig.modern()
    ids = torch.randint(0, cfg.vocab_size, (32, cfg.sequence_len + 1), generator=torch.Generator().manual_seed(0)).to(device)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    plain, modern = PlainGPT(cfg).to(device), GPT(cfg).init_weights(0).to(device)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (plain, modern)]
    assert sizes[0] == sizes[1], sizes
    s = interleave({"modern": loop_step(modern, x, y, fused=True), "plain": loop_step(plain, x, y)}, config.pairs, device)
    report("ablate", s, "modern", "plain", config.pairs, params=sizes[0])


def mixer_run(device, rows, tokens, **kw):
    """A function that runs forward and backward of the first attention layer of a modern model."""
    cfg = GPTConfig.modern(sequence_len=tokens, dropout=0.0, **kw)
    model = GPT(cfg).init_weights(0).to(device)
    gen = torch.Generator().manual_seed(0)
    x, up = (torch.randn(rows, tokens, cfg.n_embd, generator=gen).to(device) for _ in range(2))
    tables = (None, None) if model.cos is None else (model.cos, model.sin)

    def run():
        z = x.clone().requires_grad_()
        model.blocks[0].attn(z, None, *tables, None).backward(up)
    return run


def rule_run(device, rows, tokens, rule, per_channel, heads=6, channels=32):
    """A function that runs forward and backward of a delta rule alone, at the shape of a modern model's layer."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, gate = (torch.randn(rows, heads, tokens, channels, generator=gen).to(device) for _ in range(4))
    parts = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, gate[..., 0].sigmoid(), F.logsigmoid(gate if per_channel else gate[..., 1])]

    def run():
        rule(*(z.detach().requires_grad_() for z in parts)).sum().backward()
    return run


def bench_delta(config, device):
    """Gated delta rules at 512 tokens, forward and backward, without dropout: in chunks, step by step, and softmax beside them.

    Timed are the whole layer and, as `rule`, what differs between the two forms alone.

    The recurrence works on all rows at once, so that its calls cost less per row the more rows there are: measured at 1 row and at 8.
    """
    tokens, few, more, seconds, names = 512, 3, {}, {}, ("gated_delta", "gated_delta_scalar")
    for rows in (8, 1):
        def make(attn="softmax", **kw):
            return mixer_run(device, rows, tokens, attn=attn, **({} if attn == "softmax" else {"pos": "none"}), **kw)
        s = interleave({n: make(n) for n in (*names, "softmax")}, config.pairs, device)
        slow = interleave({n + tag: make(n, fast_weight_impl=impl) for n in names for tag, impl in ((" recurrent", "recurrent"), ("", "chunk"))},
                          few, device, warmup=1)
        forms = {"recurrent": delta_recurrent, "chunk": delta_chunk}
        alone = interleave({f"{n} rule, {form}": rule_run(device, rows, tokens, rule, n == "gated_delta") for n in names for form, rule in forms.items()},
                           few, device, warmup=1)
        for n in names:
            more[f"recurrent_over_{n}_rows{rows}"] = round(slow[n + " recurrent"] / slow[n], 2)
            more[f"recurrent_over_{n}_rule_rows{rows}"] = round(alone[f"{n} rule, recurrent"] / alone[f"{n} rule, chunk"], 2)
            more[f"{n}_over_softmax_rows{rows}"] = round(s[n] / s["softmax"], 4)
        seconds.update({f"{n}, {rows} rows": t for n, t in {**slow, **alone, **s}.items()})
    report("delta", seconds, "gated_delta_scalar, 8 rows", "softmax, 8 rows", config.pairs, recurrent_pairs=few, tokens=tokens, **more)


WM_D6 = dict(depth=6, head_dim=64, sequence_len=256)
WM_NATIVE = dict(depth=8, head_dim=128, sequence_len=2048)
MINIATURE = dict(depth=2, head_dim=32, sequence_len=32)


def wm_step_of(device, size=WM_D6, rows=8, accum=1, **rule):
    """A function that runs one whole step (forward, rule, optimizer) of a model under a wm.Rule, on fresh tokens."""
    model = GPT(GPTConfig.backbone(**size, window_pattern="L")).init_weights(0).to(device)
    pipeline, gen, step = Pipeline(model, Rule(**rule), 0), torch.Generator().manual_seed(0), iter(range(1 << 30))

    def run():
        ids = [(8192 ** torch.rand(rows, size["sequence_len"] + 1, generator=gen) - 1).long().clamp_(0, 8191).to(device) for _ in range(accum)]  # Zipf-like
        pipeline.step(25 + next(step), 1 << 20, [(z[:, :-1], z[:, 1:]) for z in ids])                # past the ramp of the equilibration
    return run


WM_SIDES = ("wm", "backprop")


def wm_memory(method, device, miniature=False):
    """Peak MiB of a process that trains a few steps, the pipeline full; on the CPU its resident set."""
    run = wm_step_of(device, MINIATURE if miniature else WM_D6, method=method)
    for _ in range(5):
        run()
    return common.peak_mem_mib(device)


def bench_wm_step(config, device):
    """The delayed rule at one token per stream against autograd on the same active weights and optimizer; six matrices beside it."""
    sides = {"wm": dict(), "backprop": dict(method="backprop"), "wm 6 matrices": dict(active="qk"), "backprop 6 matrices": dict(method="backprop", active="qk")}
    size = MINIATURE if config.miniature else WM_D6
    s = interleave({name: wm_step_of(device, size, **rule) for name, rule in sides.items()}, config.pairs, device, warmup=4)
    mib = {name: fresh("wm-memory", "--device", config.device, "--side", name, "--threads", str(torch.get_num_threads()), *["--miniature"] * config.miniature)["mib"]
           for name in WM_SIDES}
    report("wm-step", s, "wm", "backprop", config.pairs, six_over_six=round(s["wm 6 matrices"] / s["backprop 6 matrices"], 4),
           memory_ratio=round(mib["wm"] / mib["backprop"], 4), wm_peak_mib=round(mib["wm"], 1), backprop_peak_mib=round(mib["backprop"], 1))


def native(config, device):
    """Seconds a step and peak GiB of the native regime (16 micro-batches of 4 x 2048), packets in host memory, 4 and 6 matrices."""
    found = {}
    for name, rule in (("4 matrices", {}), ("6 matrices", dict(active="qk"))):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        run = wm_step_of(device, MINIATURE if config.miniature else WM_NATIVE, 4, 2 if config.miniature else 16, wte_route="head", packets="host",
                         packet_dtype="bfloat16", **rule)
        seconds = interleave({"step": run}, 3, device, warmup=3)["step"]
        found[name] = {"step_s": seconds, "peak_gib": common.peak_mem_mib(device) / 1024}
        del run
    print(json.dumps(found))


def kernel_errors(device):
    """Largest relative error (of the largest value) of wm_credit against float64 at a ragged shape, by implementation and precision."""
    gen = torch.Generator().manual_seed(0)
    u, dy, W = (torch.randn(*shape, generator=gen, dtype=torch.float64) for shape in ((96, 65), (96, 97), (65, 97)))
    xi, errors = signs(96, 97, 1, dtype=torch.float64), {}
    for group in (1, 8):
        want = wm_credit(u, dy, W, xi, 0.01, group=group, impl="torch")
        for impl, precision in [("torch", "ieee")] + [("triton", p) for p in PRECISIONS] * (device.type == "cuda"):
            got = wm_credit(*(z.float().to(device) for z in (u, dy, W)), (1, 0), 0.01, group=group, impl=impl, precision=precision)
            errors[f"{impl} {precision} M={group}"] = ((got.double().cpu() - want).abs().max() / want.abs().max()).item()
    return errors


def bench_gpu(config, device):
    """The checks that want a GPU, each in a process of its own; one JSON object of all of them."""
    on_gpu, begin = device.type == "cuda", time.perf_counter()
    found = {"kernel_errors": kernel_errors(device)}
    names = ("contraction", "wm-step", "native") + (("oe", "loss", "opt") if on_gpu else ())
    for name in tqdm(names, desc="gpu checks", disable=None):
        found[name] = fresh(name, "--device", config.device, "--pairs", str(min(config.pairs, 7)), *([] if on_gpu else ["--miniature"]))
    for name, value in found.items():
        print(name, *(f"    {k}: {v}" for k, v in value.items()), sep="\n")
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu, in miniature"
    step = found["wm-step"]
    print(json.dumps({"bench": "gpu", "ratio": step["ratio"], "a": step["a"], "b": step["b"], "a_median_s": step["a_median_s"], "b_median_s": step["b_median_s"],
                      "pairs": step["pairs"], "device": name, "seconds": round(time.perf_counter() - begin, 1), **found}))


BENCHES = {"oe": bench_oe, "loss": bench_loss, "opt": bench_opt, "ddp": bench_ddp, "contraction": bench_contraction, "ablate": bench_ablate,
           "delta": bench_delta, "wm-step": bench_wm_step, "gpu": bench_gpu}
MEMORY = {"loss-memory": (LOSSES, loss_memory), "wm-memory": (WM_SIDES, wm_memory)}   # name -> (its sides, MiB of one of them)
INNER = (*MEMORY, "ddp-step", "native")   # what the benches above start in processes of their own


def main(argv=None):
    parser = common.make_parser(__doc__)
    parser.add_argument("bench", choices=[*BENCHES, *INNER], metavar="NAME", help=" | ".join(BENCHES))
    parser.add_argument("--side", choices=[*LOSSES, *WM_SIDES], help="loss-memory and wm-memory only: what to measure, in this process")
    common.add_flags(parser, Config)
    given = vars(parser.parse_args(argv))
    name, side, config = given.pop("bench"), given.pop("side", None), Config(**given)
    common.check_bounds(config)
    if (side is not None) != (name in MEMORY) or side and side not in MEMORY[name][0]:
        raise UserError(f"--side goes with {' and '.join(MEMORY)} and nothing else, and names one of their sides")
    if config.threads:
        torch.set_num_threads(config.threads)
    if name == "ddp-step":
        return ddp_step(config)
    device = common.pick_device(config.device)
    if name == "native":
        return native(config, device)
    if name in MEMORY:
        return print(json.dumps({"mib": MEMORY[name][1](side, device, config.miniature)}))
    BENCHES[name](config, device)


if __name__ == "__main__":
    common.cli(main)
