"""Audits of delayed Weight Maximization: how good its credit is, and what the delay does to it.

    wm-cosine [CKPT]         cosine of pseudo-gradient and exact gradient (WM Table 1)
    wm-drift                 credit before and after its receiver moved (WM 4.3, Table 2)
    wm-kurtosis              fourth moments of x_final, and the |P b|^2 that they bound (Prop. 4)
    wm-attention             c_v, c_q and c_k under an oracle gradient (WM 4.6)
    wm-geometry CKPT [CKPT0] stable rank and coherence of both c_proj, attention shift (WM 4.6)

Run as audit.py NAME; each takes the flags that NAME --help prints. Published values stand in
columns of their own. A state that is audited is that of a run of train_wm.py with the same flags,
the defaults being the 4-matrix rule: initial weights (both c_proj are 0 there, so stage 1 has no
credit), then steps of the rule, every seed and batch the run's. The measures of matrices, here and
in audit.py, are float64.
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
import train_wm
from batches import DEFAULT_STORE, BestFitBatches, eval_batches
from common import UserError, flag
from model import GPT, GPTConfig
from optim import POOL
from report import as_text
from runs import open_store
from wm import (Layer, attention_map, attention_shift, bus_credit, bus_probe, fc_credit,
                filter_credit, future_sum, head_reward, layer_of, live, options, outer, qk_probe,
                skip_gains, stage1, stage2, tangent, v_credit)
from wm_kernels import wm_credit
from wm_pipeline import forward

HEAD_BETA2 = 0.95      # of lm_head, in every cell of the paper
ADAMW_LR = 0.001       # of hidden matrices under AdamW; the paper does not print its own
# optimizers of lm_head: {name: (pool, beta1, eps)}
CELLS = {f"{pool}_{cell}": (pool, head["lm_beta1"], head["lm_eps"])
         for pool in POOL for cell, head in train_wm.CELLS.items()}
# of the paper's batch-size sweep: its drift at 2,048 tokens is this cell's in Table 2
SWEEP_CELL = "entrywise_b05_eps1e8"
KINDS = ("lm_head", "wte", "attn.c_proj", "ffn.c_proj", "ffn.c_fc", "attn.c_v", "value_embeds",
         "attn.c_q", "attn.c_k")


# ---- flags ----

@dataclass(frozen=True)
class State:
    """Flags of the model, its text and its warm-up; the defaults are the paper's d6."""
    json: bool = flag(False, "print one JSON object instead of tables")
    data: str = flag(DEFAULT_STORE, "folder prepared by data.py; the default one is prepared when missing")
    depth: int = flag(6, "layers", low=1, high=1000)
    head_dim: int = flag(64, "channels of an attention head", low=2, high=4096)
    width: int = flag(0, "channels of the residual stream; 0: 64 x depth, in whole heads", low=0, high=2**20)
    seq_len: int = flag(256, "tokens in a row", low=1, high=2**20)
    batch_size: int = flag(8, "rows in a batch", low=1, high=2**20)
    seed: int = flag(46, "seed of the weights and probes", low=0, high=2**63 - 1)
    data_seed: int = flag(0, "seed of the data order", low=0, high=2**63 - 1)
    sigma: float = flag(1e-2, "size of the probes", low=1e-6, high=10)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = flag("float32", "precision of everything but the measures", choices=("float32", "float64"))


@dataclass(frozen=True)
class Cosine(State):
    """wm-cosine."""
    data: str = flag("", f"folder prepared by data.py (default: {DEFAULT_STORE}, or the checkpoint's own)")
    at: str = flag("10,50", "steps whose state is audited, with commas; with a checkpoint its own step is")
    streams: str = flag("256,64,1", "stream counts G beside one stream per token, with commas")
    run_steps: int = flag(360, "length of the run on whose schedule the warm-up stands", low=1, high=10**9)


@dataclass(frozen=True)
class Trajectory(State):
    """Audits of successive steps."""
    warm: int = flag(0, "steps before the audited ones", low=0, high=10**6)
    steps: int = flag(20, "audited steps", low=1, high=10**6)
    run_steps: int = flag(360, "length of the run on whose schedule the steps stand", low=1, high=10**9)


@dataclass(frozen=True)
class Drift(Trajectory):
    """wm-drift."""
    warm: int = flag(20, "steps before the audited ones", low=2, high=10**6)
    head_decay: float = flag(0.0, "weight decay of the head's shadow optimizers (the rule has none)", low=0, high=1)
    batch_sizes: str = flag("2,4,8,16,32", "rows in a batch of the batch-size sweep, with commas; 0 leaves it out")


@dataclass(frozen=True)
class AttentionTiers(State):
    """wm-attention."""
    layer: int = flag(0, "attention layer", low=0)
    probes: str = flag("1,4,16,64", "probe counts K, with commas")
    gammas: str = flag("0,0.5,0.75,0.85,0.9,0.95,0.98,1", "discounts of future queries, with commas")


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


# ---- states ----

OF_RUN = ("data", "depth", "head_dim", "width", "seq_len", "batch_size", "seed", "data_seed",
          "sigma", "device", "dtype")


def run_of(config, **flags):
    """The train_wm.Config (which is a wm.Rule) of the run whose states an audit sees."""
    shared = {name: getattr(config, name) for name in OF_RUN}
    shared["data"] = shared["data"] or DEFAULT_STORE
    return train_wm.Config(**shared, **flags)


def start(run):
    """(Pipeline on the device, its weights the initial ones; batches) of a train_wm.Config."""
    train_wm.check(run)
    device, store = common.pick_device(run.device), open_store(run.data)
    model = train_wm.build_model(run, store.vocab_size).to(device)
    return train_wm.build_pipeline(run, model), batches_of(run, store)


def batches_of(run, store):
    """The micro-batches of a train_wm.Config."""
    rows = train_wm.rows_at_once(run)
    return BestFitBatches(store.train, store.bos, rows, run.seq_len, run.data_seed)


def draw_batch(batches, model):
    """The next (idx, targets) on the model's device."""
    device = model.lm_head.weight.device
    return tuple(z.to(device) for z in batches.next())


def trajectory(config, run, label):
    """Train config.warm + config.steps steps; yields (step, pipeline, targets, weights) after each.

    config: a Trajectory; run: a train_wm.Config. weights: {name: copy} of lm_head and both c_proj
    as they stood before the step. pipeline.packets holds this step's packets and the last one's.
    """
    last = config.warm + config.steps
    if last > config.run_steps:
        asked = f"--warm {config.warm} and --steps {config.steps}"
        raise UserError(f"{asked} do not fit into a run of --run_steps {config.run_steps}")
    pipeline, batches = start(run)
    watched = {**pipeline.active[2], **pipeline.active[3]}
    del watched["wte.weight"]
    for step in tqdm(range(last), desc=label, leave=False, disable=None):
        batch = draw_batch(batches, pipeline.model)
        weights = {name: p.detach().clone() for name, p in watched.items()}
        pipeline.step(step, config.run_steps, [batch])
        yield step, pipeline, batch[1], weights


def audited(config, run, label):
    """The steps of trajectory() behind the warm-up."""
    for step, *found in trajectory(config, run, label):
        if step >= config.warm:
            yield step, *found


def open_run(path, keys=()):
    """(saved, GPT with its weights) of a checkpoint."""
    keys = ("script", "config", "model_config", "model", "step", "data_digest", *keys)
    saved = common.load_checkpoint(path, keys)
    with common.reading(path):
        model = GPT(GPTConfig(**saved["model_config"]))
        if saved["model"]["wte.weight"].dtype == torch.float64:
            model.double()
        model.load_state_dict(saved["model"])
    return saved, model


def store_of(path, saved, data):
    """The store that a checkpoint was trained on, at `data` or where it was; UserError if not."""
    with common.reading(path):
        store = open_store(data or saved["config"]["data"])
    if store.digest != saved["data_digest"]:
        why = f"was trained on another corpus or tokenizer than {store.folder}"
        raise UserError(f"{path} {why}; name the right --data")
    return store


# ---- measures ----

def cosine(a, b):
    """Cosine of two tensors; NaN where one is zero."""
    a, b = a.detach().flatten().double(), b.detach().flatten().double()
    size = (a.norm() * b.norm()).item()
    return (a @ b).item() / size if size > 0 else math.nan


def relative(change, base):
    """|change| / |base|; NaN where base is zero."""
    size = base.double().norm().item()
    return change.double().norm().item() / size if size > 0 else math.nan


def mean(values):
    """Mean of an iterable, NaN of an empty one."""
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def stable_rank(W):
    """|W|_F^2 / |W|_2^2 of a matrix [m, n], through its smaller Gram matrix.

    NaN where W is zero or not finite.
    """
    W = W.double()
    if not W.isfinite().all():
        return math.nan
    gram = W.T @ W if W.size(0) >= W.size(1) else W @ W.T
    top = torch.linalg.eigvalsh(gram)[-1].item()
    return gram.trace().item() / top if top > 0 else math.nan


def mean_row_share(W):
    """Energy share of the mean row: M |mean row|^2 / |W|_F^2 of a matrix [M, n]."""
    W = W.double()
    total = W.square().sum().item()
    return len(W) * W.mean(0).square().sum().item() / total if total > 0 else math.nan


def coherence(W):
    """Mean |cosine| between two different columns of W [m, n].

    NaN where a column is zero or there is only one.
    """
    W = W.double()
    size, n = W.norm(dim=0), W.size(1)
    if not (size > 0).all() or n < 2:
        return math.nan
    gram = ((W / size).T @ (W / size)).abs()
    return (gram.sum() - gram.trace()).item() / (n * (n - 1))


@contextmanager
def grads_on(model):
    """Every parameter requires a gradient inside the block, and what it required before after."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with torch.enable_grad():
            model.requires_grad_(True)
            yield
    finally:
        for p, needed in before:
            p.requires_grad_(needed)


def exact_gradients(model, micro_batches, names):
    """{name: d loss / d parameter} by autograd, the loss being the mean over micro-batches.

    Leaves .grad and requires_grad as they were.
    """
    params, total = [model.get_parameter(name) for name in names], {}
    with grads_on(model):
        for idx, targets in micro_batches:
            loss = model(idx, targets) / len(micro_batches)
            add(total, dict(zip(names, torch.autograd.grad(loss, params))))
    return total


def add(total, more, share=1):
    """Add each of `more`'s tensors, divided by `share`, to that of its name in total."""
    for name, value in more.items():
        part = value / share
        total[name] = total[name] + part if name in total else part


def kind_of(name):
    """The kind of a matrix, from its name: wte, value_embeds, lm_head, attn.c_q and the like."""
    parts = name.split(".")
    return ".".join(parts[2:4]) if parts[0] == "blocks" else parts[0]


def by_kind(found):
    """{kind: [value by layer]} of {parameter's name: value}."""
    out = defaultdict(list)
    for name, value in found.items():
        out[kind_of(name)].append(value)
    return {kind: out[kind] for kind in KINDS if kind in out}


# ---- wm-cosine (WM Table 1) ----

@torch.no_grad()
def undelayed(model, packets, rule):
    """{name: pseudo-gradient} of stages 2 and 1 from packets of these very weights, undelayed."""
    total = {}
    for packet in packets:
        packet.bus = bus_credit(model, packet, rule, live)
        for build in (stage2, stage1):
            add(total, build(model, packet, rule, live), len(packets))
    return total


def variants(rule, streams):
    """{column: rule} of wm-cosine. With G=N q and k are probed too: they change nothing else."""
    whole = replace(rule, method="wm", streams=0, active="qk", qk_probe="decoupled", probes=1,
                    head_temp=False)
    plain = replace(whole, active="none")
    fewer = {f"G={g}": replace(plain, streams=g) for g in streams}
    return {"G=N": whole, **fewer, "unfiltered": replace(plain, filtered_v=False),
            "uncentred": replace(plain, center=False)}


def audit_step(model, micro_batches, rules, key, step):
    """({column: {kind: [cosine by layer]}}, exact gradients) at the model's weights."""
    packets, head = [], 0.0
    with torch.no_grad():
        for i, (idx, targets) in enumerate(micro_batches):
            packet, _, grad = forward(model, idx, targets, f"{key}/{i}", step)
            packets.append(packet)
            head = head + grad / len(micro_batches)
    exact, found = None, {}
    for column, rule in rules.items():
        estimate = {"lm_head.weight": head, **undelayed(model, packets, rule)}
        exact = exact or exact_gradients(model, micro_batches, list(estimate))
        found[column] = by_kind({name: cosine(g, exact[name]) for name, g in estimate.items()})
    return found, exact


def installed(pipeline, exact, step, found):
    """Fill found[origin]["as_installed"]: what this step gave the weights, against the truth.

    exact: {step: exact gradients of its own batch at its own weights}.
    """
    for stage, age in ((3, 0), (2, 1), (1, 2)):
        origin = step - age
        if origin in exact:
            at, names = found[origin].setdefault("as_installed", {}), pipeline.active[stage]
            pairs = {name: (p.grad, exact[origin][name]) for name, p in names.items()
                     if name in exact[origin]}
            at.update(by_kind({name: cosine(*pair) for name, pair in pairs.items()}))
    exact.pop(step - 2, None)


def wm_cosine(config, paths):
    """Cosine of pseudo-gradient and exact gradient, by step, column, kind of matrix and layer.

    The columns: G=N (one stream per token) and fewer streams, both without delay; the same without
    the attention filter, and without centring; and as_installed, what the pipeline made of it.
    """
    streams = numbers(config.streams, "streams")
    if paths:
        run, pipeline, batches, first = from_checkpoint(paths[0], config)
        at, last = [first], run.steps
        state = f"checkpoint {paths[0]}"
    else:
        run, at, first, last = run_of(config), numbers(config.at, "at"), 0, config.run_steps
        if max(at) > last:
            raise UserError(f"--at {max(at)} lies behind the end of a run of --run_steps {last}")
        pipeline, batches = start(run)
        state = f"initial weights of seed {run.seed}, then steps of the 4-matrix WM rule itself"
    tokens = batches.batch_size * batches.seq_len
    for g in streams:
        if g == 0 or tokens % g:
            why = f"does not divide the {tokens} tokens of a batch"
            raise UserError(f"--streams {g} {why}; pass other --streams")
    model, found, exact = pipeline.model, {}, {}
    rules, delayed = variants(pipeline.rule, streams), run.method == "wm"
    end = max(at) + (3 if delayed else 1)
    for step in tqdm(range(first, end), desc="training and auditing", leave=False, disable=None):
        micros = run.batch_size // batches.batch_size
        micro_batches = [draw_batch(batches, model) for _ in range(micros)]
        if step in at:
            key = f"audit/{run.seed}/{step}"
            found[step], exact[step] = audit_step(model, micro_batches, rules, key, step)
        if delayed:
            pipeline.step(step, last, micro_batches)
            installed(pipeline, exact, step, found)
    return {"state": state, "tokens": tokens, "sigma": run.sigma, "steps": found}


def from_checkpoint(path, config):
    """(train_wm.Config, pipeline, batches, step) of a run of train_wm.py, to be continued."""
    saved, model = open_run(path, ("pipeline", "batches"))
    if saved["script"] != "train_wm.py":
        raise UserError(f"{path} was written by {saved['script']}, but wm-cosine continues runs "
                        "of train_wm.py")
    store = store_of(path, saved, config.data)
    with common.reading(path):
        known = {f.name for f in dataclasses.fields(train_wm.Config)}
        old = {name: value for name, value in saved["config"].items() if name in known}
        run = train_wm.Config(**old)
        pipeline = train_wm.build_pipeline(run, model.to(common.pick_device(config.device)))
        pipeline.load_state_dict(saved["pipeline"])
        batches = batches_of(run, store)
        batches.load_state_dict(saved["batches"])
        return run, pipeline, batches, saved["step"]


PAPER_NAMES = {"ffn.c_proj": "mlp.c_proj", "ffn.c_fc": "mlp.c_fc", "attn.c_v": "attn.c_v_filtered"}
# columns that change these kinds only, and repeat the first column elsewhere
ACTS_ON = {"unfiltered": ("attn.c_v", "value_embeds"), "uncentred": ("wte",)}


def cosine_row(kind, columns, paper):
    """A row of wm-cosine's table: means over layers, the paper's beside them."""
    row = {"matrix": kind}
    for column, values in columns.items():
        acts = kind in values and kind in ACTS_ON.get(column, values)
        row[column] = mean(values[kind]) if acts else None
    for g in sorted(paper, reverse=True):
        name = "N" if g == 2048 else g
        row[f"paper G={name}"] = paper[g].get(PAPER_NAMES.get(kind, kind))
    if kind == "attn.c_v":
        row["paper unfiltered"] = paper[2048]["attn.c_v_unfiltered"]
    return row


def print_cosine(found):
    """Tables of wm_cosine(), the paper's Table 1 beside them."""
    paper = {row["G"]: row for row in common.published("wm")["cosines"]}
    print("Cosine of pseudo-gradient and exact gradient, mean over layers\n"
          f"({found['state']}; sigma {found['sigma']:g}, N = {found['tokens']:,} tokens).\n"
          "as_installed: what the pipeline installs, one or two steps late, against the gradient\n"
          "of its own batch at its own weights.\n"
          "paper: Table 1, at initialisation and without delay, N = 2,048.")
    for step, columns in found["steps"].items():
        print(f"\nstep {step}")
        table([cosine_row(kind, columns, paper) for kind in columns["G=N"]], ".4f")


# ---- wm-drift (WM 4.3) ----

def head_parts(W, m, v, g, step, lr, beta1, eps, pool, decay=0.0):
    """{decay, momentum, current}: the parts of AdamW's displacement of lm_head [V, C] (Prop. 4).

    m: first moment before the step; v: second moment with g in it; step: updates with this one.
    """
    def direction(z):   # linear in z
        return POOL[pool](z, v, step, beta1, HEAD_BETA2, eps)
    return {"decay": -lr * decay * W, "momentum": -lr * direction(beta1 * m),
            "current": -lr * direction((1 - beta1) * g)}


def bus_drift(packet, rule, W, parts):
    """How far a packet's bus credit moves when lm_head moves from W by the sum of `parts`.

    A row of Table 2 without |P b| / |b|. The contraction is linear in the weights it reads, so each
    part of the displacement has its own part of the shift.
    """
    xi, dx = bus_probe(packet, rule)
    s, x = packet.read("s", dx), packet.x_final.double()

    def read(M):
        return wm_credit(s, dx, M, xi, rule.sigma, **options(packet, rule)).double()

    def projected(u):
        return tangent(u, x)
    before = read(W)
    shift = {name: read(M) for name, M in parts.items() if M.any()}
    total, none = sum(shift.values()), torch.zeros_like(before)
    base = projected(before)
    alone = {name: relative(projected(shift.get(name, none)), base)
             for name in ("current", "momentum")}
    after = before + total
    return {"bus_unproj_cos": cosine(before, after),
            "bus_unproj_rel_l2": relative(after - before, before),
            "bus_tangent_cos": cosine(base, projected(after)),
            "bus_tangent_rel_l2": relative(projected(after - before), base),
            "cur_grad_only_drift": alone["current"], "momentum_only_drift": alone["momentum"]}


class Shadows:
    """What each cell's AdamW of lm_head would hold along one trajectory.

    First moments (by beta1), and the second moment.
    """

    def __init__(self, cells):
        self.cells, self.step, self.v = cells, 0, 0.0
        self.m = {beta1: None for _, beta1, _ in cells.values()}

    def displacements(self, W, g, lr, decay):
        """{cell: () -> its head_parts()} for the next step's gradient g [V, C], from weights W.

        Computed when called: three matrices of the head's size at a time.
        """
        self.step += 1
        self.v = HEAD_BETA2 * self.v + (1 - HEAD_BETA2) * g.square()
        m = {beta1: torch.zeros_like(g) if m is None else m for beta1, m in self.m.items()}
        parts = {}
        for cell, (pool, beta1, eps) in self.cells.items():
            parts[cell] = partial(head_parts, W, m[beta1], self.v, g, self.step, lr, beta1, eps,
                                  pool, decay)
        self.m = {beta1: beta1 * m[beta1] + (1 - beta1) * g for beta1 in m}
        return parts


def singleton_occupancy(targets):
    """Share of the targets that occur once in the batch."""
    _, count = targets.flatten().unique(return_counts=True)
    return (count == 1).sum().item() / targets.numel()


def mean_rows(rows):
    """{name: mean over rows} of dicts with the same names."""
    return {name: mean(row[name] for row in rows) for name in rows[0]}


def head_drift(config, run, cells, label, receivers=None):
    """({cell: mean bus_drift()}, mean |P b| / |b|, mean singleton occupancy) of audited steps.

    With a list as `receivers` it also gets receiver_drift() of every audited step.
    """
    shadows, rows, ratio, alone = Shadows(cells), defaultdict(list), [], []
    for step, pipeline, targets, weights in trajectory(config, run, label):
        groups = {group["role"]: group for group in pipeline.optimizer.param_groups}
        W, packet = weights["lm_head.weight"], pipeline.packets[step][0]
        gradient = pipeline.model.lm_head.weight.grad
        moves = shadows.displacements(W, gradient, groups["lm_head"]["lr"], config.head_decay)
        if step < config.warm:
            continue
        for cell, parts in moves.items():
            rows[cell].append(bus_drift(packet, run, W, parts()))
        b, _ = prop4(packet.x_L, draw_bus(packet, run))
        projected = tangent(b, packet.x_final.double())
        ratio.append((projected.norm(dim=1) / b.norm(dim=1)).mean().item())
        alone.append(singleton_occupancy(targets))
        if receivers is not None:
            receivers.append(receiver_drift(pipeline, step, weights))
    return {cell: mean_rows(found) for cell, found in rows.items()}, mean(ratio), mean(alone)


@torch.no_grad()
def receiver_drift(pipeline, step, weights):
    """{part: {"cos", "rel_l2"}}: how stage 1's credit of batch step - 1 moves with its receiver.

    Before against after that batch's stage-2 update of c_proj. part: ffn (c_fc's credit), attn
    (c_v's), both; mean over layers, `both` over all values of all layers.
    """
    model, rule, packet = pipeline.model, pipeline.rule, pipeline.packets[step - 1][0]
    pairs = {"ffn": [], "attn": []}
    gamma, _ = skip_gains(model)
    for i, block in enumerate(model.blocks):
        layer, name = layer_of(model, packet, i, gamma[i], rule, live), f"blocks.{i}."
        for part, module, credit in (("ffn", block.ffn, fc_credit), ("attn", block.attn, v_credit)):
            before, after = weights[f"{name}{part}.c_proj.weight"], module.c_proj.weight
            pairs[part].append([credit(packet, layer, W, rule).flatten() for W in (before, after)])

    def moved(before, after):
        return {"cos": cosine(before, after), "rel_l2": relative(after - before, before)}
    out = {part: mean_rows([moved(*pair) for pair in found]) for part, found in pairs.items()}
    both = [torch.cat(side) for side in zip(*pairs["ffn"], *pairs["attn"])]
    return {**out, "both": moved(*both)}


def wm_drift(config, paths):
    """Table 2, stage-1 receivers under Muon and AdamW, and the batch-size sweep."""
    run, sizes = run_of(config), numbers(config.batch_sizes, "batch_sizes")
    if len(sizes) > 1 and 0 in sizes:
        raise UserError("--batch_sizes 0 leaves the sweep out; it does not go with other sizes")
    muon, adamw, sweep = [], [], []
    cells, ratio, _ = head_drift(config, run, CELLS, "head optimizers", receivers=muon)
    other = replace(run, hidden_opt="adamw", hidden_lr=ADAMW_LR)
    for step, pipeline, _, weights in audited(config, other, "AdamW receivers"):
        adamw.append(receiver_drift(pipeline, step, weights))
    for rows in sizes if sizes != [0] else []:
        smaller, cell = replace(run, batch_size=rows), {SWEEP_CELL: CELLS[SWEEP_CELL]}
        found, _, alone = head_drift(config, smaller, cell, f"{rows} rows")
        drift = 100 * found[SWEEP_CELL]["bus_tangent_rel_l2"]
        sweep.append({"BT": rows * config.seq_len, "singleton_target_occupancy": alone,
                      "rel_l2_drift_pct": drift})
    receivers = {"Pre-Polar Muon": receiver_means(muon), "AdamW": receiver_means(adamw)}
    state = (f"initial weights of seed {config.seed}, {config.warm} steps of the 4-matrix WM rule, "
             f"then {config.steps} audited steps of it")
    return {"state": state, "cells": cells, "proj_b_norm_ratio": ratio,
            "stage1_receiver_drift": receivers, "batch_occupancy": sweep}


def receiver_means(steps):
    """{part: {"cos", "rel_l2_pct"}}: means of receiver_drift() over steps."""
    out = {}
    for part in steps[0]:
        found = mean_rows([step[part] for step in steps])
        out[part] = {"cos": found["cos"], "rel_l2_pct": 100 * found["rel_l2"]}
    return out


def print_drift(found):
    """Tables of wm_drift(), the paper's Table 2 and 4.3 beside them."""
    extra, rows = common.published("wm")["drift_extra"], []
    print(f"Credit before and after its receiver's update ({found['state']};\n"
          "mean over steps; the cells share one trajectory and differ in the shadow optimizer that "
          "moves lm_head; below each the paper's)")
    for row in common.published("wm")["drift"]:
        ours = {**found["cells"][row["cell"]], "proj_b_norm_ratio": found["proj_b_norm_ratio"]}
        rows.append({"head optimizer": row["cell"], **ours})
        rows.append({"head optimizer": "  paper", **{name: row[name] for name in ours}})
    table(rows, ".4f")
    print("\nstage-1 credit before and after c_proj's update")
    # of two values for Muon the first
    paper, rows = {row["optimizer"]: row for row in reversed(extra["stage1_receiver_drift"])}, []
    for name, parts in found["stage1_receiver_drift"].items():
        for part, values in parts.items():
            printed = paper[name] if part == "both" else {}
            beside = {f"paper {key}": printed.get(key) for key in values}
            rows.append({"hidden optimizer": name, "part": part, **values, **beside})
    table(rows, ".4f")
    if found["batch_occupancy"]:
        print(f"\nbatch size ({SWEEP_CELL})")
        paper, rows = {row["BT"]: row for row in extra["batch_occupancy"]}, []
        for row in found["batch_occupancy"]:
            printed = paper.get(row["BT"], {})
            rows.append({**row, **{f"paper {key}": printed.get(key) for key in row if key != "BT"}})
        table(rows, ".4f")


# ---- wm-kurtosis (Prop. 4) ----

def draw_bus(packet, rule):
    """The signs [N, C] that perturb x_L in this packet."""
    return bus_probe(packet, rule)[0]


def rms(z):
    """Root mean square of every row of z [N, C], as [N, 1]."""
    return z.square().mean(1, keepdim=True).sqrt()


def prop4(z, xi):
    """(b, b_rad) [N, C] of Prop. 4 for states z and signs xi [N, C], in float64.

    b = x * xi * P_x xi / rms(z), b_rad = x / rms(z).
    """
    z, xi = z.double(), xi.double()
    x = z / rms(z)
    return x * xi * tangent(xi, x) / rms(z), x / rms(z)


def residue(z, xi):
    """(kappa4(x), |P b|^2 / |b_rad|^2) of every token [N], x = z / rms(z)."""
    b, b_rad = prop4(z, xi)
    x = z.double() / rms(z.double())
    return x.pow(4).mean(1), tangent(b, x).square().sum(1) / b_rad.square().sum(1)


def wm_kurtosis(config, paths):
    """kappa4 of x_final along a trajectory, the bound it sets, and Prop. 4's ratio by the probes."""
    run, found = run_of(config), []
    for step, pipeline, _, _ in audited(config, run, "training"):
        packet = pipeline.packets[step][0]
        found.append(residue(packet.x_L, draw_bus(packet, run)))
    kappa, ratio = (torch.cat(values) for values in zip(*found))
    D = pipeline.model.cfg.n_embd
    return {"kappa4_token_mean": kappa.mean().item(), "kappa4_token_max": kappa.max().item(),
            "bound_mean": kappa.mean().item() / D, "empirical_ratio_mean": ratio.mean().item(),
            "empirical_ratio_token_max": ratio.max().item(), "token_evaluations": len(kappa),
            "D": D}


def print_kurtosis(found):
    """The moments beside the paper's."""
    paper = common.published("wm")["drift_extra"]["kurtosis"]
    print("Fourth moment of x_final and |P b|^2 / |b_rad|^2 over all tokens of the audited steps\n"
          "of the 4-matrix WM rule (paper: exp35, a trajectory that trains lm_head and the c_proj\n"
          "of block 0's feed-forward layer only)")
    rows = [{"quantity": key, "value": v, "paper": paper[key]} for key, v in found.items()]
    table(rows)


# ---- wm-attention (WM 4.6) ----

def oracle(model, idx, targets, i):
    """(S [N, C], {part: exact gradient}) of layer i's attention, by autograd.

    S is minus N times the gradient of the loss at the attention output y. Where c_proj is 0, as it
    is initially, y has none: then c_proj is read as the identity and S is the gradient at its
    output. The gradients are those of -sum(S * y) / N in c_v, c_q and c_k, S held fixed: the
    layer's input does not depend on them.
    """
    kept, trace, attn = {}, {}, model.blocks[i].attn

    def keep(module, inputs, out):
        kept["out"] = out
    hook = attn.c_proj.register_forward_hook(keep)
    with grads_on(model):
        loss = model(idx, targets, trace=trace)
        hook.remove()
        g = torch.autograd.grad(loss, kept["out"], retain_graph=True)[0]
        S = -idx.numel() * g.flatten(0, 1)
        if attn.c_proj.weight.any():
            S = S @ attn.c_proj.weight.detach()
        reward = (S * trace["layers"][i]["y"].flatten(0, 1)).sum() / len(S)
        parts = ("c_v", "c_q", "c_k")
        found = torch.autograd.grad(-reward, [getattr(attn, part).weight for part in parts])
    return S, dict(zip(parts, found))


@torch.no_grad()
def tiers(model, packet, S, exact, i, rule, probes, gammas):
    """{(part, gamma_k, K): cosine} for layer i, by the probes of wm.qk_credit().

    c_v, then c_q by the number of probes K, then c_k by discount and K.
    """
    kept, found = packet.layers[i], {}
    layer = Layer(i, model.blocks[i].attn.window, kept, kept, u=None, S=S)
    x = kept["attn_in"].flatten(0, 1)

    def score(part, credit):
        flat = credit.flatten(2).flatten(0, 1)
        return cosine(outer(flat, x, -1 / len(x)), exact[part])

    found["c_v", None, 1] = score("c_v", filter_credit(kept, S, rule, layer.window))
    for which in "qk":
        discounts = gammas if which == "k" else [None]
        total = dict.fromkeys(discounts, 0.0)
        for r in tqdm(range(max(probes)), desc=f"c_{which}", leave=False, disable=None):
            moved, carrier = qk_probe(model, packet, kept, which, f"{which}{i}.{r}", rule)
            R = head_reward(packet, attention_shift(layer, {which: moved}), layer, rule)
            for gamma in total:
                pooled = R if gamma is None else future_sum(R, gamma, layer.window)
                total[gamma] = total[gamma] + pooled.unsqueeze(-1) * carrier
                if r + 1 in probes:
                    mean_credit = total[gamma] / ((r + 1) * rule.sigma)
                    found[f"c_{which}", gamma, r + 1] = score(f"c_{which}", mean_credit)
    return dict(sorted(found.items(), key=tier_order))


def tier_order(item):
    """c_v, c_q, c_k; then the discount, then the number of probes."""
    part, gamma, K = item[0]
    return "vqk".index(part[2]), gamma or 0, K


def wm_attention(config, paths):
    """Cosines of c_v, c_q and c_k with the exact gradient through one layer, at initial weights."""
    if config.layer >= config.depth:
        layers = f"layers 0 to {config.depth - 1}"
        raise UserError(f"--layer {config.layer}: the model has {layers}")
    probes, gammas = numbers(config.probes, "probes"), numbers(config.gammas, "gammas", float)
    if 0 in probes or max(gammas) > 1:
        raise UserError("--probes start at 1, and --gammas lie between 0 and 1")
    run, i = run_of(config, active="qk"), config.layer
    pipeline, batches = start(run)
    model = pipeline.model
    idx, targets = draw_batch(batches, model)
    with torch.no_grad():
        packet, _, _ = forward(model, idx, targets, f"audit/{config.seed}")
    found = tiers(model, packet, *oracle(model, idx, targets, i), i, run, probes, gammas)
    rows = [{"matrix": part, "gamma_k": gamma, "K": K, "cosine": value}
            for (part, gamma, K), value in found.items()]
    return {"layer": i, "head_dim": model.cfg.head_dim, "tokens": idx.numel(), "sigma": run.sigma,
            "tiers": rows}


def print_attention(found):
    """The three tiers beside the paper's."""
    D, N = found["head_dim"], found["tokens"]
    print(f"Cosine with the exact gradient through the attention of layer {found['layer']}, "
          f"initial weights, {N:,} tokens.\n"
          "The oracle is the exact gradient behind c_proj, which is 0 here and read as the "
          f"identity. 1 / sqrt(D) = {D ** -0.5:.4f} at D = {D}.")
    tier = common.published("wm")["attention_tiers"]
    paper = {("c_v", None, 1): tier["W_V"][0]["cos"]}
    paper.update({("c_q", None, row["K"]): row["cos"] for row in tier["W_Q"]})
    paper.update({("c_k", row["gamma_K"], row["K"]): row["cos"] for row in tier["W_K"]})
    lines = defaultdict(dict)
    for row in found["tiers"]:
        lines[row["matrix"], row["gamma_k"]][row["K"]] = row["cosine"]
    counts, rows = sorted({row["K"] for row in found["tiers"]}), []
    for (part, gamma), by_count in lines.items():
        ours = {f"K={K}": by_count.get(K) for K in counts}
        theirs = {f"paper K={K}": paper.get((part, gamma, K)) for K in counts}
        rows.append({"matrix": part, "gamma_k": gamma, **ours, **theirs})
    table(rows, ".4f")


# ---- wm-geometry (WM 4.6) ----

def shapes_of(model):
    """{part: [{"srank", "coherence"} by layer]} of both c_proj."""
    out = {}
    for part in ("ffn", "attn"):
        matrices = [getattr(block, part).c_proj.weight.detach() for block in model.blocks]
        out[f"{part}.c_proj"] = [{"srank": stable_rank(W), "coherence": coherence(W)}
                                 for W in matrices]
    return out


@torch.no_grad()
def attention_maps(model, idx):
    """[A [B, H, T, T] of each layer]."""
    trace = {}
    model.trunk(idx, model.wte(idx), None, trace)
    return [attention_map(layer, block.attn.window)
            for layer, block in zip(trace["layers"], model.blocks)]


def wm_geometry(config, paths):
    """Stable rank and coherence of both c_proj, and |A - A_0|_F / |A_0|_F, by layer.

    A are the attention maps on the first validation rows, A_0 those of CKPT0 or else of the initial
    weights that the checkpoint's config and seed give.
    """
    saved, model = open_run(paths[0])
    if len(paths) > 1:
        other, first = open_run(paths[1])
        if other["model_config"] != saved["model_config"]:
            raise UserError(f"{paths[0]} and {paths[1]} hold models of different shape")
        origin = paths[1]
    else:
        with common.reading(paths[0]):
            seed = saved["config"]["seed"]
            first = GPT(model.cfg).init_weights(seed)
        origin = f"initial weights of seed {seed}"
    if model.oe_tables is not None or model.cfg.attn != "softmax":
        what = "models with softmax attention and without hashed tables"
        raise UserError(f"{paths[0]}: wm-geometry reads {what}")
    store = store_of(paths[0], saved, config.data)
    device, cfg = common.pick_device(config.device), model.cfg
    windows = eval_batches(store.val, store.bos, config.batch_size, cfg.sequence_len)
    idx = next(iter(windows))[0].to(device)
    shapes = shapes_of(model)
    now, then = (attention_maps(m.to(device).double(), idx) for m in (model, first))
    return {"checkpoint": paths[0], "step": saved["step"], "arm": saved["config"].get("arm", ""),
            "rows": len(idx), "compared_with": origin, "matrices": shapes,
            "attention_shift": [relative(a - b, b) for a, b in zip(now, then)]}


def print_geometry(found):
    """One table per checkpoint, the paper's three arms beside block 0."""
    paper, rows = common.published("wm")["geometry"], []
    print(f"{found['checkpoint']} at step {found['step']} ({found['arm']}); "
          "the paper's three arms at step 360, block 0, seed 46")
    arms = {"adamw": "adamw_hidden", "paper20": "paper20_prepolar",
            "codesigned": "codesigned_prepolar"}
    for part, layers in found["matrices"].items():
        for what, label in (("srank", "stable rank"), ("coherence", "column coherence")):
            known = paper.get(f"{part.replace('ffn', 'mlp').replace('.', '_')}_{what}", {})
            ours = {f"layer {i}": layer[what] for i, layer in enumerate(layers)}
            theirs = {f"paper {short}": known.get(arm) for short, arm in arms.items()}
            rows.append({"quantity": f"{part} {label}", **ours, **theirs})
    table(rows, ".4f")
    print(f"\nshift of the attention maps on {found['rows']} validation rows, "
          f"from {found['compared_with']}")
    shifts = {"this run": found["attention_shift"]}
    shifts.update({f"paper {arm}": v for arm, v in paper["attn_map_shift_per_layer"].items()})
    rows = []
    for who, values in shifts.items():
        layers = {f"layer {i}": v for i, v in enumerate(values)}
        rows.append({"shift": who, **layers, "mean": mean(values)})
    table(rows, ".4f")


# ---- command line ----

def shown(value, digits):
    """A value as a table shows it; "-" for none and NaN."""
    if value is None or value != value:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return format(value, digits) if isinstance(value, float) else str(value)


def table(rows, digits=".6g"):
    """Print dicts as a table; a column appears when any row has it."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[shown(row.get(name), digits) for name in names] for row in rows]
    numeric = [i for i, name in enumerate(names)
               if not any(isinstance(row.get(name), str) for row in rows)]
    print(as_text(names, lines, numeric))


AUDITS = {  # name -> (flags, audit: (config, checkpoints) -> dict, printing, fewest and most checkpoints)
    "wm-cosine": (Cosine, wm_cosine, print_cosine, 0, 1),
    "wm-drift": (Drift, wm_drift, print_drift, 0, 0),
    "wm-kurtosis": (Trajectory, wm_kurtosis, print_kurtosis, 0, 0),
    "wm-attention": (AttentionTiers, wm_attention, print_attention, 0, 0),
    "wm-geometry": (Geometry, wm_geometry, print_geometry, 1, 2),
}
# what wm-cosine CKPT still takes; the rest is the checkpoint's
FROM_CHECKPOINT = ("json", "data", "streams", "device")


def main(name, argv):
    """Run the audit `name` on the rest of the command line."""
    flags, audit, show, fewest, most = AUDITS[name]
    parser = common.make_parser(f"{name}: {audit.__doc__}")
    parser.prog = f"audit.py {name}"
    if most:
        parser.add_argument("checkpoints", nargs="*", metavar="CKPT",
                            help="checkpoints of train_wm.py")
    common.add_flags(parser, flags)
    given = vars(parser.parse_intermixed_args(argv))
    paths, config = given.pop("checkpoints", []), flags(**given)
    common.check_bounds(config)
    if not fewest <= len(paths) <= most:
        raise UserError(f"{name} takes {fewest} to {most} checkpoint files, not {len(paths)}")
    own = set(given) - set(FROM_CHECKPOINT)
    if name == "wm-cosine" and paths and own:
        takes = ", ".join(f"--{flag_name}" for flag_name in FROM_CHECKPOINT)
        raise UserError(f"--{min(own)} is the checkpoint's own; wm-cosine CKPT takes {takes}")
    found = audit(config, paths)
    if config.json:
        print(json.dumps(common.finite(found)))
    else:
        show(found)
