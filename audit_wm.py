"""Audits of delayed Weight Maximization: how good its credit is, what the delay does to it, and that the delay is real.

    wm-cosine [CKPT]         cosine of pseudo-gradient and exact gradient, by matrix and number of streams (WM Table 1)
    wm-drift                 credit before and after its receiver moved, by head optimizer and batch size (WM 4.3, Table 2)
    wm-kurtosis              fourth moments of x_final and the residue |P b|^2 that they bound (Prop. 4)
    wm-attention             c_v, c_q and c_k in one attention layer under an oracle gradient, by probes and discount (WM 4.6)
    wm-causality             delay by intervention: when changed targets, or a changed receiver, first reach each stage
    wm-geometry CKPT [CKPT0] stable rank and column coherence of both c_proj, and the shift of the attention maps (WM 4.6)

Run as audit.py NAME; each takes the flags that NAME --help prints. Published values stand in columns of their own.
`start` and `trajectory` say what state an audit sees: initial weights (both c_proj are 0 there, so stage 1 has no credit), warmed by
steps of the 4-matrix rule itself, in which every seed and batch is that of train_wm.py with the same flags.
"""
import dataclasses
import json
import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

import common
from common import ROOT, UserError, flag
from data import DEFAULT_STORE, BestFitBatches, eval_batches, open_store
from model import GPT, GPTConfig
from optim import POOL
from wm import (CLOCKS, Pipeline, Rule, attend, attention_map, bus_probe, fc_credit, filter_credit, future_sum, head_reward, load, options,
                outer, qk_probe, record, skip_gains, stage1, stage2, tangent, v_credit)
from wm_kernels import wm_credit

HEAD_BETA2 = 0.95      # of lm_head, in every cell of the paper
ADAMW_LR = 0.001       # of hidden matrices under AdamW; the paper does not print its own
CELLS = {f"{pool}_b{str(beta1).replace('.', '')}_eps{format(eps, '.0e').replace('-0', '')}": (pool, beta1, eps)
         for pool in POOL for eps in (1e-8, 1e-4) for beta1 in (0.5, 0.9)}
SWEEP_CELL = "entrywise_b05_eps1e8"    # of the paper's batch-size sweep: its drift at 2,048 tokens is this cell's in Table 2
KINDS = ("lm_head", "wte", "attn.c_proj", "ffn.c_proj", "ffn.c_fc", "attn.c_v", "value_embeds", "attn.c_q", "attn.c_k")


def published(part):
    """A part of published/wm.json."""
    return json.loads((ROOT / "published" / "wm.json").read_text())[part]


# ---- states ----

@dataclass(frozen=True)
class State:
    """Flags of the model, its text and its warm-up; the defaults are the paper's d6."""
    json: bool = flag(False, "print one JSON object instead of tables")
    data: str = flag(DEFAULT_STORE, "folder prepared by data.py; the default one is prepared when missing")
    depth: int = flag(6, "layers", low=1, high=1000)
    head_dim: int = flag(64, "channels of an attention head", low=2, high=4096)
    width: int = flag(0, "channels of the residual stream; 0 is 64 x depth", low=0, high=2**20)
    seq_len: int = flag(256, "tokens in a row", low=1, high=2**20)
    batch_size: int = flag(8, "rows in a batch", low=1, high=2**20)
    seed: int = flag(46, "seed of the weights and probes", low=0, high=2**63 - 1)
    data_seed: int = flag(0, "seed of the data order", low=0, high=2**63 - 1)
    sigma: float = flag(1e-2, "size of the probes", low=1e-6, high=10)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = flag("float32", "precision of everything but the cosines and norms, which are float64", choices=("float32", "float64"))


@dataclass(frozen=True)
class Cosine(State):
    """wm-cosine."""
    data: str = flag("", f"folder prepared by data.py (default: {DEFAULT_STORE}, or the checkpoint's own)")
    at: str = flag("10,50", "steps whose state is audited, with commas; with a checkpoint its own step is")
    streams: str = flag("256,64,1", "stream counts G beside one stream per token, with commas")
    run_steps: int = flag(360, "length of the run on whose schedule the warm-up stands", low=1, high=10**9)


@dataclass(frozen=True)
class Drift(State):
    """wm-drift."""
    warm: int = flag(20, "steps before the audited ones", low=2, high=10**6)
    steps: int = flag(20, "audited steps", low=1, high=10**6)
    run_steps: int = flag(360, "length of the run on whose schedule the steps stand", low=1, high=10**9)
    head_decay: float = flag(0.0, "weight decay of the head's shadow optimizers (the rule has none)", low=0, high=1)
    batch_sizes: str = flag("2,4,8,16,32", "rows in a batch of the batch-size sweep, with commas; 0 leaves the sweep out")


@dataclass(frozen=True)
class Kurtosis(State):
    """wm-kurtosis."""
    warm: int = flag(0, "steps before the audited ones", low=0, high=10**6)
    steps: int = flag(20, "audited steps", low=1, high=10**6)
    run_steps: int = flag(360, "length of the run on whose schedule the steps stand", low=1, high=10**9)


@dataclass(frozen=True)
class AttentionTiers(State):
    """wm-attention."""
    layer: int = flag(0, "attention layer", low=0)
    probes: str = flag("1,4,16,64", "probe counts K, with commas")
    gammas: str = flag("0,0.5,0.75,0.85,0.9,0.95,0.98,1", "discounts of future queries, with commas")


@dataclass(frozen=True)
class Causality:
    """wm-causality."""
    json: bool = flag(False, "print one JSON object instead of tables")
    active: str = flag("qk", "attention matrices that learn beyond c_v and c_proj", choices=("none", "q", "k", "qk"))
    seed: int = flag(46, "seed of weights, probes and random tokens", low=0, high=2**63 - 1)


@dataclass(frozen=True)
class Geometry:
    """wm-geometry."""
    json: bool = flag(False, "print one JSON object instead of tables")
    data: str = flag("", "corpus whose first validation rows are attended over (default: the checkpoint's own)")
    batch_size: int = flag(8, "rows of the validation batch", low=1, high=2**20)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")


def numbers(text, name, kind=int):
    """The numbers of a flag like 10,50; UserError when they are none, or negative."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if not all(0 <= v < math.inf for v in values):
        raise UserError(f"--{name} {text} must be numbers with commas between them, as in 1,4")
    return values


def rule_of(config, **flags):
    """The 4-matrix rule of train_wm.py's defaults, with the audit's --sigma."""
    return Rule(sigma=config.sigma, **flags)


def start(config, rule, batch_size=None):
    """(Pipeline with initial weights on the device, batches): step for step the run of train_wm.py with the same flags."""
    width = config.width or -(-64 * config.depth // config.head_dim) * config.head_dim
    if width % config.head_dim:
        raise UserError(f"--width {width} is no multiple of --head_dim {config.head_dim}")
    device, store = common.pick_device(config.device), open_store(config.data or DEFAULT_STORE)
    model = GPT(GPTConfig(n_layer=config.depth, n_head=width // config.head_dim, n_embd=width, vocab_size=store.vocab_size,
                          sequence_len=config.seq_len, window_pattern="L")).init_weights(config.seed)
    model = (model.double() if config.dtype == "float64" else model).to(device)
    batches = BestFitBatches(store.train, store.bos, batch_size or config.batch_size, config.seq_len, config.data_seed)
    return Pipeline(model, rule, config.seed), batches


def draw_batch(batches, model):
    """The next (idx, targets) on the model's device."""
    return tuple(z.to(model.lm_head.weight.device) for z in batches.next())


def trajectory(config, rule, label, batch_size=None):
    """Train config.warm + config.steps steps from the initial weights; yields (step, pipeline, targets, weights) after each.

    The rule is train_wm.py's (strict_post, head at beta1 0.9 and eps 1e-4), whatever the audit then asks of its states. weights: {name:
    copy} of lm_head and both c_proj as they stood before the step. Packets of this step and the one before are in pipeline.packets.
    """
    if config.warm + config.steps > config.run_steps:
        raise UserError(f"--warm {config.warm} and --steps {config.steps} do not fit into a run of --run_steps {config.run_steps}")
    pipeline, batches = start(config, rule, batch_size)
    watched = [name for name in pipeline.active[2] | pipeline.active[3] if name != "wte.weight"]
    params = dict(pipeline.model.named_parameters())
    for step in tqdm(range(config.warm + config.steps), desc=label, leave=False, disable=None):
        batch = draw_batch(batches, pipeline.model)
        weights = {name: params[name].clone() for name in watched}
        pipeline.step(step, config.run_steps, [batch])
        yield step, pipeline, batch[1], weights


def open_run(path, keys=()):
    """(saved, GPT with its weights) of a checkpoint."""
    saved = common.load_checkpoint(path, ("script", "config", "model_config", "model", "step", *keys))
    with common.reading(path):
        model = GPT(GPTConfig(**saved["model_config"]))
        model = model.double() if saved["model"]["wte.weight"].dtype == torch.float64 else model
        model.load_state_dict(saved["model"])
    return saved, model


# ---- measures ----

def cosine(a, b):
    """Cosine of two tensors, accumulated in float64; NaN where one is zero."""
    a, b = a.detach().flatten().double(), b.detach().flatten().double()
    size = (a.norm() * b.norm()).item()
    return (a @ b).item() / size if size > 0 else math.nan


def relative(change, base):
    """|change| / |base|, accumulated in float64; NaN where base is zero."""
    size = base.double().norm().item()
    return change.double().norm().item() / size if size > 0 else math.nan


def mean(values):
    """Mean of an iterable, NaN of an empty one."""
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def stable_rank(W):
    """|W|_F^2 / |W|_2^2 of a matrix [m, n], in float64 through its smaller Gram matrix; NaN where W is zero or not finite."""
    W = W.double()
    if not W.isfinite().all():
        return math.nan
    gram = W.T @ W if W.size(0) >= W.size(1) else W @ W.T
    top = torch.linalg.eigvalsh(gram)[-1].item()
    return gram.trace().item() / top if top > 0 else math.nan


def coherence(W):
    """Mean |cosine| between two different columns of W [m, n], in float64; NaN where a column is zero or there is only one."""
    W = W.double()
    size = W.norm(dim=0)
    if not (size > 0).all() or W.size(1) < 2:
        return math.nan
    gram = ((W / size).T @ (W / size)).abs()
    return (gram.sum() - gram.trace()).item() / (W.size(1) * (W.size(1) - 1))


def exact_gradients(model, micro_batches, names):
    """{name: d loss / d parameter} by autograd, the loss being the mean over micro-batches; leaves .grad and requires_grad as they were."""
    params, total = dict(model.named_parameters()), {}
    with grads_on(model):
        for idx, targets in micro_batches:
            found = torch.autograd.grad(model(idx, targets) / len(micro_batches), [params[name] for name in names])
            total = {name: total[name] + g if name in total else g for name, g in zip(names, found)}
    return total


@contextmanager
def grads_on(model):
    """Every parameter requires a gradient inside the block, and what it required before afterwards."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with torch.enable_grad():
            model.requires_grad_(True)
            yield
    finally:
        for p, needed in before:
            p.requires_grad_(needed)


def live(name, W):
    """The reader of weights as they are."""
    return W


def kind_of(name):
    """The matrix kind of a parameter name: wte, value_embeds, lm_head, or attn.c_q and the like."""
    parts = name.split(".")
    return ".".join(parts[2:4]) if parts[0] == "blocks" else parts[0]


# ---- wm-cosine (WM Table 1) ----

def by_kind(found):
    """{kind: [cosine by layer]} of {name: cosine}."""
    out = defaultdict(list)
    for name, value in found.items():
        out[kind_of(name)].append(value)
    return {kind: out[kind] for kind in KINDS if kind in out}


@torch.no_grad()
def undelayed(model, packets, rule):
    """{name: pseudo-gradient} of stages 2 and 1 from packets of these very weights: the estimator without its delay."""
    total = {}
    for packet in packets:
        packet.pop("bus", None)        # of another rule
        for build in (stage2, stage1):
            for name, g in build(model, packet, packet, rule, live).items():
                total[name] = total[name] + g / len(packets) if name in total else g / len(packets)
    return total


def variants(rule, streams):
    """{column: rule} of wm-cosine. With one stream per token q and k are probed too: they change nothing else."""
    whole = replace(rule, method="wm", streams=0, active="qk", qk_probe="decoupled", probes=1, head_temp=False)
    plain = replace(whole, active="none")
    return {"G=N": whole, **{f"G={g}": replace(plain, streams=g) for g in streams},
            "unfiltered": replace(plain, filtered_v=False), "uncentred": replace(plain, center=False)}


def audit_step(model, micro_batches, rules, key, step):
    """({column: {kind: [cosine by layer]}}, exact gradients) at the model's weights."""
    packets, head = [], 0.0
    with torch.no_grad():
        for i, (idx, targets) in enumerate(micro_batches):
            packet, _, grad = record(model, idx, targets, f"{key}/{i}")
            packets.append({**packet, "step": step})
            head = head + grad / len(micro_batches)
    exact, found = None, {}
    for column, rule in rules.items():
        estimate = {"lm_head.weight": head, **undelayed(model, packets, rule)}
        exact = exact or exact_gradients(model, micro_batches, list(estimate))
        found[column] = by_kind({name: cosine(g, exact[name]) for name, g in estimate.items()})
    return found, exact


def installed(pipeline, pending, step, found):
    """Add to found[origin]["as_installed"] the cosines of what this step gave the weights with the exact gradients of its own batch."""
    for stage, age in ((3, 0), (2, 1), (1, 2)):
        if step - age in pending:
            at, exact = found[step - age].setdefault("as_installed", {}), pending[step - age]
            at.update(by_kind({name: cosine(p.grad, exact[name]) for name, p in pipeline.active[stage].items() if name in exact}))
    pending.pop(step - 2, None)


def wm_cosine(config, paths):
    """{step: {column: {kind: [by layer]}}}: G=N and fewer streams without delay, and as_installed, what the pipeline made of that batch."""
    streams, keep = numbers(config.streams, "streams"), None
    if paths:
        pipeline, batches, micros, at, keep, last = from_checkpoint(paths[0], config)
    else:
        at, micros, last = sorted(set(numbers(config.at, "at"))), 1, config.run_steps
        if at[-1] > last:
            raise UserError(f"--at {at[-1]} lies behind the end of a run of --run_steps {last}")
        pipeline, batches = start(config, rule_of(config))
    tokens = batches.batch_size * batches.seq_len
    if bad := [g for g in streams if g == 0 or tokens % g]:
        raise UserError(f"--streams {bad[0]} does not divide the {tokens} tokens of a batch; pass other --streams")
    model, found, pending, rules = pipeline.model, {}, {}, variants(pipeline.rule, streams)
    delayed = pipeline.rule.method == "wm"
    for step in tqdm(range(keep or 0, at[-1] + (3 if delayed else 1)), desc="training and auditing", leave=False, disable=None):
        batch = [draw_batch(batches, model) for _ in range(micros)]
        if step in at:
            found[step], pending[step] = audit_step(model, batch, rules, f"audit/{pipeline.seed}/{step}", step)
        if delayed:
            pipeline.step(step, last, batch)
            installed(pipeline, pending, step, found)
    state = f"checkpoint {paths[0]}" if paths else f"initial weights of seed {config.seed}, then steps of the 4-matrix WM rule itself"
    return {"state": state, "tokens": tokens, "sigma": pipeline.rule.sigma, "steps": found}


def from_checkpoint(path, config):
    """(pipeline, batches, micro-batches a step, [step], step, run length) of a run of train_wm.py, to be continued."""
    saved, model = open_run(path, ("pipeline", "batches", "data_digest"))
    if saved["script"] != "train_wm.py":
        raise UserError(f"{path} was written by {saved['script']}; wm-cosine continues runs of train_wm.py")
    with common.reading(path):
        old = saved["config"]
        rule = Rule(**{f.name: old[f.name] for f in dataclasses.fields(Rule)})
        store = open_store(config.data or old["data"])
        if store.digest != saved["data_digest"]:
            raise UserError(f"{path} was trained on another corpus or tokenizer than {store.folder}; name the right --data")
        pipeline = Pipeline(model.to(common.pick_device(config.device)), rule, old["seed"])
        pipeline.load_state_dict(saved["pipeline"])
        batches = BestFitBatches(store.train, store.bos, old["batch_size"], old["seq_len"], old["data_seed"])
        batches.load_state_dict(saved["batches"])
        return pipeline, batches, old["accum"], [saved["step"]], saved["step"], old["steps"]


def print_cosine(found):
    """Tables of cosine(), the paper's Table 1 beside them."""
    paper = {row["G"]: row for row in published("cosines")}
    name = {"ffn.c_proj": "mlp.c_proj", "ffn.c_fc": "mlp.c_fc", "attn.c_v": "attn.c_v_filtered"}
    print("Cosine of pseudo-gradient and exact gradient, mean over layers\n"
          f"({found['state']}; sigma {found['sigma']:g}, N = {found['tokens']:,} tokens).\n"
          "as_installed: what the pipeline installs, one or two steps late, against the gradient of its own batch at its own weights.\n"
          "paper: Table 1, at initialisation and without delay, N = 2,048.")
    for step, columns in found["steps"].items():
        print(f"\nstep {step}")
        rows = []
        for kind in columns["G=N"]:
            acts = {"unfiltered": ("attn.c_v", "value_embeds"), "uncentred": ("wte",)}       # elsewhere they repeat the first column
            row = {"matrix": kind, **{c: mean(v[kind]) if kind in acts.get(c, v) and kind in v else None for c, v in columns.items()}}
            row |= {f"paper G={'N' if g == 2048 else g}": paper[g].get(name.get(kind, kind)) for g in sorted(paper, reverse=True)}
            rows.append({**row, "paper unfiltered": paper[2048]["attn.c_v_unfiltered"] if kind == "attn.c_v" else None})
        table(rows, ".4f")


# ---- wm-drift (WM 4.3) ----

def head_parts(W, m, v, g, step, lr, beta1, eps, pool, decay=0.0):
    """{decay, momentum, current}: the parts of AdamW's displacement of lm_head [V, C] that Prop. 4 sums (all of one shape).

    m: first moment before the step, v: second moment with g in it, step: updates including this one.
    """
    direction = lambda z: POOL[pool](z, v, step, beta1, HEAD_BETA2, eps)        # linear in z
    return {"decay": -lr * decay * W, "momentum": -lr * direction(beta1 * m), "current": -lr * direction((1 - beta1) * g)}


def bus_drift(packet, rule, W, parts):
    """How far the bus credit of a packet moves when lm_head moves from W by the sum of `parts`: the row of Table 2 without |P b| / |b|.

    The contraction is linear in the weights it reads, so each part of the displacement has its own part of the shift.
    """
    xi, dx = bus_probe(packet, rule)
    read = lambda M: wm_credit(load(packet, dx, ("s",))["s"], dx, M, xi, rule.sigma, **options(packet, rule)).double()
    before, shift = read(W), {k: read(M) for k, M in parts.items() if M.any()}
    x = packet["x_final"].double()
    after = before + sum(shift.values())
    P = lambda u: tangent(u, x)
    none = torch.zeros_like(before)
    return {"bus_unproj_cos": cosine(before, after), "bus_unproj_rel_l2": relative(after - before, before),
            "bus_tangent_cos": cosine(P(before), P(after)), "bus_tangent_rel_l2": relative(P(after - before), P(before)),
            "cur_grad_only_drift": relative(P(shift.get("current", none)), P(before)),
            "momentum_only_drift": relative(P(shift.get("momentum", none)), P(before))}


class Shadows:
    """First moments (by beta1) and the second moment of lm_head's gradients along a trajectory: what each cell's AdamW would hold."""

    def __init__(self, cells):
        self.cells, self.step, self.v, self.m = cells, 0, 0.0, {beta1: 0.0 for _, beta1, _ in cells.values()}

    def displacements(self, W, g, lr, decay):
        """{cell: () -> its head_parts()} for the gradient g [V, C] of the next step, from the weights W of the shared trajectory."""
        self.step += 1
        self.v = HEAD_BETA2 * self.v + (1 - HEAD_BETA2) * g.square()
        m = {beta1: torch.zeros_like(g) if self.step == 1 else m for beta1, m in self.m.items()}
        parts = {cell: partial(head_parts, W, m[beta1], self.v, g, self.step, lr, beta1, eps, pool, decay)
                 for cell, (pool, beta1, eps) in self.cells.items()}
        self.m = {beta1: beta1 * m[beta1] + (1 - beta1) * g for beta1 in m}
        return parts    # computed when called: three matrices of the head's size at a time


def singleton_occupancy(targets):
    """Share of the targets that occur once in the batch."""
    _, count = targets.flatten().unique(return_counts=True)
    return (count == 1).sum().item() / targets.numel()


def head_drift(config, rule, cells, label, batch_size=None, receivers=None):
    """({cell: means of bus_drift over the audited steps}, mean |P b| / |b|, mean singleton occupancy) along a trajectory.

    With a list as `receivers` it also gets receiver_drift() of every audited step.
    """
    shadows, rows, ratio, alone = Shadows(cells), defaultdict(list), [], []
    for step, pipeline, targets, weights in trajectory(config, rule, label, batch_size):
        head = next(g for g in pipeline.optimizer.param_groups if g["role"] == "lm_head")
        W, packet = weights["lm_head.weight"], pipeline.packets[step][0]
        moves = shadows.displacements(W, pipeline.model.lm_head.weight.grad, head["lr"], config.head_decay)
        if step < config.warm:
            continue
        for cell, parts in moves.items():
            rows[cell].append(bus_drift(packet, rule, W, parts()))
        b, _ = prop4(packet["x_L"], draw_bus(packet, rule))
        ratio.append((tangent(b, packet["x_final"].double()).norm(dim=1) / b.norm(dim=1)).mean().item())
        alone.append(singleton_occupancy(targets))
        if receivers is not None:
            receivers.append(receiver_drift(pipeline, step, weights))
    return {cell: {k: mean(r[k] for r in found) for k in found[0]} for cell, found in rows.items()}, mean(ratio), mean(alone)


def receiver_drift(pipeline, step, weights):
    """{part: (cosine, relative L2)} of the stage-1 credit of the packet of step - 1, c_proj before and after that batch's stage-2 update.

    part: ffn (c_fc's credit), attn (c_v's), both; mean over layers, `both` over all values of all layers.
    """
    model, rule, packet = pipeline.model, pipeline.rule, pipeline.packets[step - 1][0]
    pairs = {"ffn": [], "attn": []}
    gamma, _ = skip_gains(model)
    for i, layer in enumerate(packet["layers"]):
        u, block, name = packet["bus"] * gamma[i], model.blocks[i], f"blocks.{i}."
        layer = load(layer, u, ("pre",))
        for part, module, credit in (("ffn", block.ffn, lambda W: fc_credit(packet, packet, layer, u, W, rule, i)),
                                     ("attn", block.attn, lambda W: v_credit(packet, packet, u, W, rule, i))):
            pairs[part].append((credit(weights[f"{name}{part}.c_proj.weight"]).flatten(), credit(module.c_proj.weight).flatten()))
    out = {part: (mean(cosine(a, b) for a, b in found), mean(relative(b - a, a) for a, b in found)) for part, found in pairs.items()}
    a, b = (torch.cat([pair[k] for found in pairs.values() for pair in found]) for k in (0, 1))
    return {**out, "both": (cosine(a, b), relative(b - a, a))}


def wm_drift(config, paths):
    """Table 2, stage-1 receivers under Muon and AdamW, and the batch-size sweep; see trajectory() for the states."""
    rule, sizes = rule_of(config), numbers(config.batch_sizes, "batch_sizes")
    if len(sizes) > 1 and 0 in sizes:
        raise UserError("--batch_sizes 0 leaves the sweep out; it does not go with other sizes")
    muon, adamw, sweep = [], [], []
    cells, ratio, _ = head_drift(config, rule, CELLS, "head optimizers", receivers=muon)
    other = replace(rule, hidden_opt="adamw", hidden_lr=ADAMW_LR)
    for step, pipeline, _, weights in trajectory(config, other, "AdamW receivers"):
        if step >= config.warm:
            adamw.append(receiver_drift(pipeline, step, weights))
    for rows in sizes if sizes != [0] else []:
        found, _, alone = head_drift(config, rule, {SWEEP_CELL: CELLS[SWEEP_CELL]}, f"{rows} rows", rows)
        drift = 100 * found[SWEEP_CELL]["bus_tangent_rel_l2"]
        sweep.append({"BT": rows * config.seq_len, "singleton_target_occupancy": alone, "rel_l2_drift_pct": drift})
    average = lambda pairs: {"cos": mean(c for c, _ in pairs), "rel_l2_pct": 100 * mean(r for _, r in pairs)}
    receivers = {name: {part: average([f[part] for f in found]) for part in found[0]}
                 for name, found in (("Pre-Polar Muon", muon), ("AdamW", adamw))}
    state = f"initial weights of seed {config.seed}, {config.warm} steps of the 4-matrix WM rule, then {config.steps} audited steps of it"
    return {"state": state, "cells": cells, "proj_b_norm_ratio": ratio, "stage1_receiver_drift": receivers, "batch_occupancy": sweep}


def print_drift(found):
    """Tables of drift(), the paper's Table 2 and 4.3 beside them."""
    print(f"Credit before and after its receiver's update ({found['state']};\n"
          "mean over steps; the cells share one trajectory and differ in the shadow optimizer that moves lm_head; below each the paper's)")
    rows = []
    for row in published("drift"):
        ours = {**found["cells"][row["cell"]], "proj_b_norm_ratio": found["proj_b_norm_ratio"]}
        rows += [{"head optimizer": row["cell"], **ours}, {"head optimizer": "  paper", **{k: row[k] for k in ours}}]
    table(rows, ".4f")
    print("\nstage-1 credit before and after c_proj's update")
    paper = {row["optimizer"]: row for row in reversed(published("drift_extra")["stage1_receiver_drift"])}
    table([{"hidden optimizer": name, "part": part, **v, "paper cos": paper[name]["cos"] if part == "both" else None,
            "paper rel_l2_pct": paper[name]["rel_l2_pct"] if part == "both" else None}
           for name, parts in found["stage1_receiver_drift"].items() for part, v in parts.items()], ".4f")
    if found["batch_occupancy"]:
        print(f"\nbatch size ({SWEEP_CELL})")
        paper = {row["BT"]: row for row in published("drift_extra")["batch_occupancy"]}
        keys = ("singleton_target_occupancy", "rel_l2_drift_pct")
        table([{**row, **{f"paper {k}": paper.get(row["BT"], {}).get(k) for k in keys}} for row in found["batch_occupancy"]], ".4f")


# ---- wm-kurtosis (Prop. 4) ----

def draw_bus(packet, rule):
    """The signs [N, C] that perturb x_L in this packet."""
    return bus_probe(packet, rule)[0]


def prop4(z, xi):
    """(b, b_rad) [N, C] of Prop. 4 for states z and signs xi [N, C], in float64: b = x * xi * P_x xi / rms(z), b_rad = x / rms(z)."""
    z, xi = z.double(), xi.double()
    rms = z.square().mean(1, keepdim=True).sqrt()
    x = z / rms
    return x * xi * tangent(xi, x) / rms, x / rms


def residue(z, xi):
    """(kappa4(x), |P b|^2 / |b_rad|^2) of every token [N], x = z / rms(z)."""
    b, rad = prop4(z, xi)
    x = z.double() / z.double().square().mean(1, keepdim=True).sqrt()
    return x.pow(4).mean(1), tangent(b, x).square().sum(1) / rad.square().sum(1)


def wm_kurtosis(config, paths):
    """kappa4 of x_final along a trajectory, the bound kappa4 / D it sets, and the ratio of Prop. 4 under the run's own probes."""
    rule, kappa, ratio = rule_of(config), [], []
    for step, pipeline, _, _ in trajectory(config, rule, "training"):
        if step >= config.warm:
            packet = pipeline.packets[step][0]
            k, r = residue(packet["x_L"], draw_bus(packet, rule))
            kappa.append(k), ratio.append(r)
    kappa, ratio, D = torch.cat(kappa), torch.cat(ratio), pipeline.model.cfg.n_embd
    return {"kappa4_token_mean": kappa.mean().item(), "kappa4_token_max": kappa.max().item(), "bound_mean": kappa.mean().item() / D,
            "empirical_ratio_mean": ratio.mean().item(), "empirical_ratio_token_max": ratio.max().item(), "token_evaluations": len(kappa),
            "D": D}


def print_kurtosis(found):
    """The moments beside the paper's."""
    paper = published("drift_extra")["kurtosis"]
    print("Fourth moment of x_final and |P b|^2 / |b_rad|^2 over all tokens of the audited steps of the 4-matrix WM rule\n"
          "(paper: exp35, a trajectory that trains lm_head and the c_proj of block 0's feed-forward layer only)")
    table([{"quantity": k, "value": v, "paper": paper[k]} for k, v in found.items()])


# ---- wm-attention (WM 4.6) ----

def oracle(model, idx, targets, i):
    """S [N, C]: minus N times the gradient of the loss at layer i's attention output y, by autograd.

    Where c_proj is 0, as it is initially, y has none: then c_proj is read as the identity and S is the gradient at its output.
    """
    kept, attn = {}, model.blocks[i].attn
    hook = attn.c_proj.register_forward_hook(lambda module, inputs, out: kept.update(out=out))
    with grads_on(model):
        loss = model(idx, targets)
        g = torch.autograd.grad(loss, kept["out"])[0]
    hook.remove()
    u = -idx.numel() * g.flatten(0, 1)
    return u @ attn.c_proj.weight.detach() if attn.c_proj.weight.any() else u


def exact_attention(model, layer, idx, S, i):
    """{part: exact gradient of -sum(S * y) / N} by autograd through layer i's own attention, its input and S [N, C] held fixed."""
    attn, T = model.blocks[i].attn, idx.size(1)
    ve = model.value_embeds[str(i)](idx) if model.cfg.has_value_embedding(i) else None
    trace, parts = {}, ("c_v", "c_q", "c_k")
    with grads_on(model):
        attn(layer["attn_in"], ve, model.cos[:T], model.sin[:T], model._masks(T, idx.device)[attn.window], trace)
        found = torch.autograd.grad(-(S * trace["y"].flatten(0, 1)).sum() / len(S), [getattr(attn, part).weight for part in parts])
    return dict(zip(parts, found))


@torch.no_grad()
def tiers(model, packet, S, exact, i, rule, probes, gammas):
    """[(part, gamma_k, K, cosine)] for layer i: c_v, then c_q by probes K, then c_k by K and discount; the probes of wm.qk_credit."""
    layer, x, window = packet["layers"][i], packet["layers"][i]["attn_in"].flatten(0, 1), model.blocks[i].attn.window
    n, T = len(x), layer["q"].size(1)
    mask = model._masks(T, x.device)[window]
    score = lambda part, credit: cosine(outer(credit.flatten(2).flatten(0, 1), x, -1 / n), exact[part])
    found = [("c_v", None, 1, score("c_v", filter_credit(layer, S, rule, window)))]
    for which in "qk":
        total = {gamma: 0.0 for gamma in (gammas if which == "k" else [None])}
        for r in tqdm(range(max(probes)), desc=f"c_{which}", leave=False, disable=None):
            moved, carrier = qk_probe(packet, layer, model, which, f"{which}{i}.{r}", rule)
            q, k = (moved, layer["k"]) if which == "q" else (layer["q"], moved)
            R = head_reward(packet, attend(q, k, layer["v"], mask) - layer["y"].view_as(q), None, None, S, rule)
            for gamma in total:
                total[gamma] = total[gamma] + (R if gamma is None else future_sum(R, gamma, window)).unsqueeze(-1) * carrier
                if r + 1 in probes:
                    found.append((f"c_{which}", gamma, r + 1, score(f"c_{which}", total[gamma] / ((r + 1) * rule.sigma))))
    return found


def wm_attention(config, paths):
    """The three tiers at initial weights: rows of part, gamma_k, K and cosine with the exact gradient through one attention layer."""
    if config.layer >= config.depth:
        raise UserError(f"--layer {config.layer}: the model has layers 0 to {config.depth - 1}")
    probes, gammas = numbers(config.probes, "probes"), numbers(config.gammas, "gammas", float)
    if 0 in probes or max(gammas) > 1:
        raise UserError("--probes start at 1, and --gammas lie between 0 and 1")
    rule = rule_of(config, active="qk")
    pipeline, batches = start(config, rule)
    model, i = pipeline.model, config.layer
    idx, targets = draw_batch(batches, model)
    with torch.no_grad():
        packet, _, _ = record(model, idx, targets, f"audit/{config.seed}")
    S = oracle(model, idx, targets, i)
    found = tiers(model, packet, S, exact_attention(model, packet["layers"][i], idx, S, i), i, rule, probes, gammas)
    found.sort(key=lambda row: ("vqk".index(row[0][2]), row[1] or 0, row[2]))
    return {"layer": i, "head_dim": model.cfg.head_dim, "tokens": idx.numel(), "sigma": rule.sigma,
            "tiers": [dict(zip(("matrix", "gamma_k", "K", "cosine"), row)) for row in found]}


def print_attention(found):
    """The three tiers beside the paper's."""
    print(f"Cosine with the exact gradient through the attention of layer {found['layer']}, initial weights, {found['tokens']:,} tokens.\n"
          "The oracle is the exact gradient behind c_proj, which is 0 here and read as the identity. "
          f"1 / sqrt(D) = {found['head_dim'] ** -0.5:.4f} at D = {found['head_dim']}.")
    tier = published("attention_tiers")
    paper = {("c_v", None, 1): tier["W_V"][0]["cos"], **{("c_q", None, r["K"]): r["cos"] for r in tier["W_Q"]},
             **{("c_k", r["gamma_K"], r["K"]): r["cos"] for r in tier["W_K"]}}
    rows = defaultdict(dict)
    for row in found["tiers"]:
        rows[row["matrix"], row["gamma_k"]][row["K"]] = row["cosine"]
    counts = sorted({K for row in rows.values() for K in row})
    table([{"matrix": part, "gamma_k": gamma, **{f"K={K}": row.get(K) for K in counts},
            **{f"paper K={K}": paper.get((part, gamma, K)) for K in counts}} for (part, gamma), row in rows.items()], ".4f")


# ---- wm-causality ----

TINY = dict(n_layer=3, n_head=2, n_embd=32, vocab_size=67, sequence_len=12, window_pattern="L")
AT, STEPS = 3, 7      # the step whose batch or receivers are changed (stage 1 has had credit by then), and the length of the run


def tensors_of(value):
    """Every tensor in nested dicts and lists."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)


def causal_run(rule, seed, flip=None, nudge=None):
    """STEPS steps of the tiny model on random tokens: ([{name: (weight, installed pseudo-gradient)} after each step], tensors seen).

    flip: the step whose targets are others. nudge: (step, part of a name): between that step and the next these weights are moved by noise.
    RuntimeError when any parameter, packet, waiting pseudo-gradient or optimizer state requires a gradient.
    """
    gen = torch.Generator().manual_seed(seed)
    pipeline = Pipeline(GPT(GPTConfig(**TINY)).init_weights(seed), rule, seed)
    after, seen = [], 0
    for step in range(STEPS):
        idx, targets, others = torch.randint(0, TINY["vocab_size"], (3, 2, TINY["sequence_len"]), generator=gen)
        pipeline.step(step, STEPS, [(idx, others if step == flip else targets)])
        weights = {name: p for stage in pipeline.active.values() for name, p in stage.items()}
        after.append({name: (p.detach().clone(), None if p.grad is None else p.grad.clone()) for name, p in weights.items()})
        everything = list(tensors_of([dict(pipeline.model.named_parameters()), [p.grad for p in weights.values()], pipeline.packets,
                                      pipeline.waiting, list(pipeline.optimizer.state.values())]))
        seen += len(everything)
        if any(t.requires_grad or t.grad_fn is not None for t in everything):
            raise RuntimeError(f"a tensor of step {step} requires a gradient")
        if nudge and nudge[0] == step:
            for name, p in weights.items():
                if nudge[1] in name:
                    p.data.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    return after, seen


def wm_causality(config, paths):
    """By clock: the age at which changed targets first reach the weights of each stage, and whether a stage's reward of a packet in flight
    reads a receiver that is changed after age 0 or 1; with what CLOCKS says should happen."""
    clocks, seen = {}, 0
    for clock, ages in CLOCKS.items():
        rule = Rule(clock=clock, active=config.active)
        plain, n = causal_run(rule, config.seed)
        flipped, _ = causal_run(rule, config.seed, flip=AT)
        stages = Pipeline(GPT(GPTConfig(**TINY)), rule, 0).active
        differ = lambda a, b, names, what: any(not torch.equal(a[n][what], b[n][what]) for n in names)
        first = {str(stage): next((step - AT for step in range(STEPS) if differ(plain[step], flipped[step], names, 0)), None)
                 for stage, names in stages.items()}
        reads, want = {}, {}
        for stage, receiver, built in ((2, "lm_head", ages[0]), (1, "c_proj", ages[1])):
            due = AT + {2: 1, 1: 2}[stage]
            for age in range(due - AT):
                moved, _ = causal_run(rule, config.seed, nudge=(AT + age, receiver))
                reads[f"stage {stage}, {receiver} moved after age {age}"] = differ(plain[due], moved[due], stages[stage], 1)
                want[f"stage {stage}, {receiver} moved after age {age}"] = age < built
        clocks[clock] = {"first_change": first, "reads": reads, "reads_expected": want}
        seen += n
    right = all(c["first_change"] == {"3": 0, "2": 1, "1": 2} and c["reads"] == c["reads_expected"] for c in clocks.values())
    return {"clocks": clocks, "as_expected": right, "tensors": seen, "require_grad": 0}


def print_causality(found):
    """One line per clock."""
    print("Age at which changed targets first reach the weights (0: in the same step; expected 0, 1, 2 on every clock), and whether the\n"
          "pseudo-gradient of a packet in flight changes when its receiver is moved after the step of that age (yes: it is built later)")
    yes = {True: "yes", False: "no"}
    table([{"clock": clock, "builds at": "{}, {}".format(*CLOCKS[clock]), **{f"stage {k}": v for k, v in c["first_change"].items()},
            **{k.replace(" moved after age", ", age"): yes[v] for k, v in c["reads"].items()}} for clock, c in found["clocks"].items()])
    right = "yes" if found["as_expected"] else "NO"
    print(f"as expected: {right}; of {found['tensors']:,} tensors {found['require_grad']} require a gradient")


# ---- wm-geometry (WM 4.6) ----

def shapes_of(P, depth):
    """{part: [{srank, coherence} by layer]} of both c_proj in a state dict."""
    out = {}
    for part in ("ffn", "attn"):
        W = [P[f"blocks.{i}.{part}.c_proj.weight"] for i in range(depth)]
        out[f"{part}.c_proj"] = [{"srank": stable_rank(w), "coherence": coherence(w)} for w in W]
    return out


@torch.no_grad()
def attention_maps(model, idx):
    """[A [B, H, T, T] of each layer]."""
    trace = {}
    model.trunk(idx, model.wte(idx), None, trace)
    return [attention_map(layer, block.attn.window) for layer, block in zip(trace["layers"], model.blocks)]


def wm_geometry(config, paths):
    """Stable rank and coherence of both c_proj by layer, and |A - A_0|_F / |A_0|_F by layer on the first validation rows.

    A are the attention maps, A_0 those of CKPT0 or else of the initial weights that the checkpoint's config and seed give."""
    saved, model = open_run(paths[0], ("data_digest",))
    if len(paths) > 1:
        other, first = open_run(paths[1])
        if other["model_config"] != saved["model_config"]:
            raise UserError(f"{paths[0]} and {paths[1]} hold models of different shape")
    else:
        with common.reading(paths[0]):
            first = GPT(model.cfg).init_weights(saved["config"]["seed"])
    if model.oe_tables is not None or model.cfg.attn != "softmax":
        raise UserError(f"{paths[0]}: wm-geometry reads models with softmax attention and without hashed tables")
    store = open_store(config.data or saved["config"]["data"])
    if store.digest != saved["data_digest"]:
        raise UserError(f"{paths[0]} was trained on another corpus or tokenizer than {store.folder}; name the right --data")
    device = common.pick_device(config.device)
    idx = next(iter(eval_batches(store.val, store.bos, config.batch_size, model.cfg.sequence_len)))[0].to(device)
    now, then = (attention_maps(m.to(device).double(), idx) for m in (model, first))
    return {"checkpoint": paths[0], "step": saved["step"], "arm": saved["config"].get("arm", ""), "rows": len(idx),
            "compared_with": paths[1] if len(paths) > 1 else f"initial weights of seed {saved['config']['seed']}",
            "matrices": shapes_of(model.state_dict(), model.cfg.n_layer),
            "attention_shift": [relative(a - b, b) for a, b in zip(now, then)]}


def print_geometry(found):
    """One table per checkpoint, the paper's three arms beside block 0."""
    paper, rows = published("geometry"), []
    print(f"{found['checkpoint']} at step {found['step']} ({found['arm']}); the paper's three arms at step 360, block 0, seed 46")
    names = {"adamw": "adamw_hidden", "paper20": "paper20_prepolar", "codesigned": "codesigned_prepolar"}
    for part, layers in found["matrices"].items():
        for what, label in (("srank", "stable rank"), ("coherence", "column coherence")):
            known = paper.get(f"{part.replace('ffn', 'mlp').replace('.', '_')}_{what}", {})
            rows.append({"quantity": f"{part} {label}", **{f"layer {i}": layer[what] for i, layer in enumerate(layers)},
                         **{f"paper {short}": known.get(arm) for short, arm in names.items()}})
    table(rows, ".4f")
    print(f"\nshift of the attention maps on {found['rows']} validation rows, from {found['compared_with']}")
    shift, known = found["attention_shift"], paper["attn_map_shift_per_layer"]
    both = {"this run": shift, **{f"paper {arm}": known[arm] for arm in known}}
    table([{"shift": who, **{f"layer {i}": v for i, v in enumerate(values)}, "mean": mean(values)} for who, values in both.items()], ".4f")


# ---- command line ----

def table(rows, digits=".6g"):
    """Print dicts as a table; a column appears when any row has it."""
    names = list(dict.fromkeys(k for row in rows for k in row))
    cell = lambda v: ("-" if v is None or v != v else f"{v:,}" if isinstance(v, int) else format(v, digits) if isinstance(v, float)
                      else str(v))
    grid = [names, *[[cell(row.get(n)) for n in names] for row in rows]]
    text = {n for n in names if any(isinstance(row.get(n), str) for row in rows)}
    width = [max(len(line[i]) for line in grid) for i in range(len(names))]
    for line in grid:
        print("  ".join(c.ljust(w) if n in text else c.rjust(w) for c, w, n in zip(line, width, names)).rstrip())


AUDITS = {  # name -> (flags, audit: (config, checkpoint paths) -> dict, printing, fewest and most checkpoints)
    "wm-cosine": (Cosine, wm_cosine, print_cosine, 0, 1), "wm-drift": (Drift, wm_drift, print_drift, 0, 0),
    "wm-kurtosis": (Kurtosis, wm_kurtosis, print_kurtosis, 0, 0), "wm-attention": (AttentionTiers, wm_attention, print_attention, 0, 0),
    "wm-causality": (Causality, wm_causality, print_causality, 0, 0), "wm-geometry": (Geometry, wm_geometry, print_geometry, 1, 2)}
FROM_CHECKPOINT = ("json", "data", "streams", "device")      # what wm-cosine CKPT still takes; the rest is the checkpoint's


def main(name, argv):
    """Run the audit `name` on the rest of the command line; returns the exit code."""
    flags, audit, show, fewest, most = AUDITS[name]
    parser = common.make_parser(f"{name}: {audit.__doc__}")
    parser.prog = f"audit.py {name}"
    if most:
        parser.add_argument("checkpoints", nargs="*", metavar="CKPT", help="checkpoints of train_wm.py")
    common.add_flags(parser, flags)
    given = vars(parser.parse_intermixed_args(argv))
    paths, config = given.pop("checkpoints", []), flags(**given)
    common.check_bounds(config)
    if not fewest <= len(paths) <= most:
        raise UserError(f"{name} takes {fewest} to {most} checkpoint files, not {len(paths)}")
    if name == "wm-cosine" and paths and (extra := set(given) - set(FROM_CHECKPOINT)):
        raise UserError(f"--{min(extra)} is the checkpoint's own; wm-cosine CKPT takes {', '.join('--' + k for k in FROM_CHECKPOINT)}")
    found = audit(config, paths)
    print(json.dumps(common.finite(found))) if config.json else show(found)
    return 0 if found.get("as_expected", True) else 1
