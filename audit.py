"""Accounting and inspection: what an arm costs, what a checkpoint learned, what step 0 really sees.

    python audit.py params           parameters of OE's arms beside Table 1b, and of other models
    python audit.py flops            operations a step beyond dense, by component (OE section 3)
    python audit.py memory           persistent bytes beyond dense, by component (OE section 3)
    python audit.py geometry CKPT    ranks, mean rows, query gains, scalars (Tables 4, 5a, 8b)
    python audit.py step0            the residual scalars' first gradients and steps (OE 4.5)
    python audit.py wm-NAME --help   delayed Weight Maximization: wm-cosine, wm-drift, wm-kurtosis,
                                     wm-attention, wm-geometry (see audit_wm.py)

--json prints one JSON object instead of tables. Published values stand in columns of their own.
"""
import functools
import json
import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import audit_wm
import common
import train_oe
from audit_wm import mean, mean_row_share, open_run, stable_rank, table
from batches import DEFAULT_STORE, BestFitBatches
from common import UserError, flag
from model import ATTN, GPT, GPTConfig
from optim import (PACKAGE, PACKAGE_SCHEDULE, STEP0, MuonAdamW, first_step, native_groups,
                   set_schedule)
from runs import open_store
from train_oe import ARMS

VOCAB, TOKENS, DEPTHS = 8192, 524_288, (6, 8)    # of the OE paper; tokens of a step
# The paper prints 19.37 and 34.13 GFLOP a step for the Table-Neumann control. Both follow from its
# own formula at 506,847 to 506,996 visited rows a step (84.0 % of 603,432), a number it leaves out.
TABLE_NEUMANN_ROWS = 506_920
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Config:
    """The options of audit.py."""
    json: bool = flag(False, "print one JSON object instead of tables")
    data: str = flag(DEFAULT_STORE, "step0: prepared corpus; the default one is prepared when missing")
    depth: int = flag(6, "step0: layers", low=1)
    rows: int = flag(4, "step0: rows in a batch", low=1)
    seq_len: int = flag(128, "step0: tokens in a row", low=1)
    oe_m: int = flag(15_085, "step0: base modulus of the hashed tables", low=1)
    seed: int = flag(42, "step0: seed of the weights", low=0)
    dtype: str = flag("float32", "step0: precision of the trajectories (bfloat16 is slow on most CPUs)",
                      choices=("float32", "bfloat16"))
    steps: int = flag(12, "step0: steps of the trajectories", low=1)


# ---- accounting (OE section 3) ----

@functools.cache
def shapes(cfg):
    """The GPT of a GPTConfig on the meta device: shapes without memory."""
    with torch.device("meta"):
        return GPT(cfg)


def arm_model(flags, depth):
    """The shapes of an arm's model."""
    return shapes(train_oe.model_config(train_oe.Config(depth=depth, **flags), VOCAB))


def sizes(model):
    """Numbers of values by role."""
    count = defaultdict(int)
    for _, role, p in model.roles():
        count[role] += p.numel()
    return count


def neumann_flops(rows, cols):
    """Right-projected Neumann-Gram on a rows x cols gradient (OE section 3)."""
    return 4 * rows * cols**2 + 14 * rows * cols + 3 * cols**2 + 3 * cols


def step_flops(depth):
    """Operations of a dense step.

    6 per matrix or head parameter and token, and 12 d per token and visible key of attention.
    """
    model = arm_model({}, depth)
    n, keys = sizes(model), sum(model.cfg.window(i) for i in range(depth))
    return TOKENS * (6 * (n["matrix"] + n["lm_head"]) + 12 * model.cfg.n_embd * keys)


def arm_flops(flags, depth):
    """Operations of an arm's step beyond dense, by component: {name: FLOP}."""
    model = arm_model(flags, depth)
    n, d, route = sizes(model), model.cfg.n_embd, model.cfg.wte_route
    parts = {}
    if flags.get("oe_m"):
        parts["oe lookup"] = 8 * TOKENS * d   # keys, gather, scatter, addition to x0
        parts["oe update"] = 5 * n["oe"]
    if flags.get("equilibrate_tau"):
        matrices = [p.numel() for name, role, p in model.roles()
                    if role == "matrix" and "ve_gate" not in name]
        parts["equilibrate"] = 16 * sum(matrices)   # two passes of rows and columns, 4 each
    if flags.get("neumann_tau"):
        tables = 2 + len(model.value_embeds)
        parts["neumann"] = tables * neumann_flops(VOCAB, d)
    if flags.get("table_neumann_tau"):
        parts["table neumann"] = 4 * neumann_flops(TABLE_NEUMANN_ROWS / 4, d // 4)
    if model.cfg.qk_scale != "none":
        parts["q scale"] = 4 * TOKENS * depth * d
    if route != "fused":
        per_value = 4 * depth   # the scaled addition and its gradient in every layer
        per_value += 4 if route == "separate" else -2   # norm(w); a denominator that is used again
        per_value += 8 if model.cfg.out_skip else 0
        parts["routing"] = per_value * TOKENS * d
    return parts


def arm_memory(flags, depth):
    """Persistent bytes beyond dense, by component, with bfloat16 embeddings and tables."""
    model = arm_model(flags, depth)
    n, parts = sizes(model), {}
    if flags.get("oe_m"):
        parts["oe weights + gradients"] = 4 * n["oe"]
        parts["oe visit counts"] = 4 * sum(len(t) for t in model.oe_tables)
    if flags.get("float32_state"):
        # master 4, two moments 2 more each
        parts["float32 embedding state"] = 8 * (n["wte"] + n["value_embeds"])
    if n["q_log"]:
        parts["q scale"] = 16 * n["q_log"]   # weight, gradient, two moments
    return parts


def published_rows():
    """{(depth, arm): row} of Table 1b."""
    printed = common.published("oe")["accounting"]["table1b"]
    return {(row["depth"], arm): row for row in printed for arm in row["arms"]}


def count_row(flags, depth, printed):
    """Parameters of an arm, the paper's beside them."""
    return {**arm_model(flags, depth).num_params(),
            "paper_backbone": printed.get("params_backbone"),
            "paper_total": printed.get("params_total")}


def flops_row(flags, depth, printed):
    """GFLOP of an arm's step beyond dense, the paper's beside them."""
    parts = arm_flops(flags, depth)
    total = sum(parts.values())
    return {**{name: round(value / 1e9, 4) for name, value in parts.items()},
            "total": round(total / 1e9, 4), "percent": round(100 * total / step_flops(depth), 4),
            "paper_total": printed.get("extra_gflops_per_step"),
            "paper_percent": printed.get("extra_pct")}


def memory_row(flags, depth, printed):
    """MiB of an arm beyond dense, the paper's beside them."""
    parts = arm_memory(flags, depth)
    return {**{name: round(value / 2**20, 3) for name, value in parts.items()},
            "total": round(sum(parts.values()) / 2**20, 2),
            "paper_total": printed.get("analytic_mem_delta_mib"),
            "paper_peak": printed.get("peak_vram_delta_mib")}


ACCOUNTS = {"params": count_row, "flops": flops_row, "memory": memory_row}


def account(name):
    """{"arms": [row]} of every arm at both depths; of params {"models": [row]} as well."""
    printed, rows = published_rows(), []
    for depth in DEPTHS:
        for arm, flags in ARMS.items():
            found = ACCOUNTS[name](flags, depth, printed.get((depth, arm), {}))
            rows.append({"depth": depth, "arm": arm, **found})
    return {"arms": rows, "models": model_rows()} if name == "params" else {"arms": rows}


MODELS = {  # name -> fields of the backbone's config (with depth) or of the modern one
    "depth 6": dict(depth=6),
    "depth 8": dict(depth=8),
    "depth 6, head_dim 64": dict(depth=6, head_dim=64),
    "laptop (depth 4, head_dim 64)": dict(depth=4, head_dim=64),
    "modern": {},
    "modern, 384d, 6 layers": dict(n_embd=384, n_layer=6),
    "modern, 32 layers": dict(n_layer=32),
    "baseline (nanoGPT)": dict(norm="layer", pos="learned", ffn="relu", tie=False, bias=True),
    "highway": dict(residual="highway"),
    "highway_scalar": dict(residual="highway_scalar"),
    "history": dict(history=True),
    "moe": dict(ffn="moe"),
    "moe_matched": dict(ffn="moe", moe_expert_hidden="split"),
    "pos": dict(pos="learned"),
    **{f"{attn}, learned positions": dict(attn=attn, pos="learned") for attn in ATTN if attn != "softmax"},
    "gated_delta_scalar, learned, T 512": dict(attn="gated_delta_scalar", pos="learned", sequence_len=512),
    "gated_delta_scalar, none, 555, T 512": dict(attn="gated_delta_scalar", pos="none", sequence_len=512,
                                                 ffn_hidden=555),
}


def model_rows():
    """Width, heads and parameters of MODELS."""
    rows = []
    for name, fields in MODELS.items():
        cfg = GPTConfig.backbone(**fields) if "depth" in fields else GPTConfig.modern(**fields)
        total = shapes(cfg).num_params()["total"]
        rows.append({"model": name, "width": cfg.n_embd, "heads": cfg.n_head, "total": total})
    return rows


NOTES = {
    "params": "Table 1b prints 34 cells (depth, arm); the others are what the same flags would have "
              "at that depth.",
    "flops": """\
GFLOP a step of 524,288 tokens beyond dense. The paper prints 24.3820 + 0.1695 for the two parts of
the package at depth 6; its own formulas give 24.3816 + 0.1699: the same sum, 24.5515.
Dense step: {d6:.2f} TFLOP at depth 6, {d8:.2f} at depth 8 (6 per parameter of matrices and head,
12 d per visible key). The paper prints 125.35 at depth 8, which agrees, and 59.37 at depth 6, which
does not: 59.37 would follow with 6,656 visible keys summed over layers instead of 8,192.
Percentages here are of our own dense step.""",
    "memory": """\
MiB beyond dense, persistent. paper_peak is the measured peak of an RTX 4090, which also holds
activations of the routing arms. Depth 6 arms with a q scale: 223.285 + 96.000 + 0.018 = 319.30; the
paper prints 319.31, the sum of its rounded parts.""",
}


# ---- geometry of a checkpoint (OE Tables 4, 5a, 8b) ----

def geometry(path):
    """Everything Tables 4, 5a and 8b report of one checkpoint, as a nested dict."""
    saved, model = open_run(path)
    groups = matrices_of(model)
    ranks = {name: mean(map(stable_rank, found)) for name, found in groups.items()}
    shares = {name: mean(map(mean_row_share, groups[name]))
              for name in ("wte", "lm_head", "oe_tables")}
    scalars = {name: getattr(model, name) for name in LAMBDAS}
    scalars = {name: p.tolist() for name, p in scalars.items() if p is not None}
    out = {"step": saved["step"], "stable_rank": ranks, "mean_row_share": shares,
           "scalars": scalars}
    if model.cfg.qk_scale != "none":
        out["q_gain"] = gains(model)
    return out


LAMBDAS = ("x0_lambdas", "wte_lambdas", "resid_lambdas", "out_lambdas")


def matrices_of(model):
    """{group: its matrices} that the tables tell apart."""
    attention, mlp = [], []
    for block in model.blocks:
        attention += [block.attn.c_q, block.attn.c_k, block.attn.c_v, block.attn.c_proj]
        mlp += [block.ffn.c_fc, block.ffn.c_proj]
    groups = {"wte": [model.wte], "lm_head": [model.lm_head],
              "value_embeds": model.value_embeds.values(), "attention": attention, "mlp": mlp}
    out = {name: [layer.weight.detach() for layer in layers] for name, layers in groups.items()}
    return {**out, "oe_tables": [p.detach() for p in model.oe_tables or ()]}


def gains(model):
    """Mean exp(q) over layers and heads, by layer, and by thirds of the rotary planes."""
    planes = model.blocks[0].attn.q_log.size(1)
    with torch.no_grad():
        found = [block.double().attn.q_gain()[:, :planes] for block in model.blocks]
    gain = torch.stack(found)                          # [L, H, D/2]
    edge = [0, planes // 4, 3 * planes // 4, planes]   # planes 0-15, 16-47, 48-63 of 64
    bands = {name: gain[:, :, a:b].mean().item()
             for name, a, b in zip(("high", "mid", "low"), edge, edge[1:])}
    return {"mean": gain.mean().item(), "sd": gain.std().item(),
            "layers": gain.mean((1, 2)).tolist(), **bands}


# ---- the first step (OE 4.5) ----

SKIP_ARM = dict(qk_scale="full", wte_route="separate", out_skip=True)
EPSILONS = {"0": 0.0, "2^-23": 2.0**-23, "1e-6": 1e-6}


def skip_model(config, vocab_size, norm_eps=None):
    """The model of arm 12do at its initial weights."""
    cfg = GPTConfig.backbone(config.depth, vocab_size=vocab_size, sequence_len=config.seq_len,
                             oe_m=config.oe_m, norm_eps=norm_eps, **SKIP_ARM)
    return GPT(cfg).init_weights(config.seed)


def scalar_gradients(model, idx, targets, autocast=nullcontext()):
    """{family: d loss / d scalar} of the residual scalars.

    The mean over the family's entries, which are all equal but for rounding.
    """
    model.zero_grad()
    with autocast:
        model(idx, targets).backward()
    families = ("x0_lambdas", "wte_lambdas", "out_lambdas")
    grads = {name: getattr(model, name).grad.double().mean().item() for name in families}
    model.zero_grad()
    return grads


def closed_form(model, idx, targets, eps):
    """d loss / d alpha at x_out = alpha x0 through the final norm N, in float64.

    The sum of dL/dN . eps x0 / (alpha^2 q + eps)^(3/2), q the mean of x0^2.
    """
    w = model.wte.weight[idx].detach().double()
    x0 = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    alpha = 1 + 0.1 * model.cfg.n_layer
    q = x0.square().mean(-1, keepdim=True)
    n = (alpha * x0 / (alpha**2 * q + eps).sqrt()).requires_grad_()
    logits = 15 * torch.tanh(n @ model.lm_head.weight.detach().double().T / 15)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return (n.grad * eps * x0 / (alpha**2 * q + eps) ** 1.5).sum().item()


def step0_gradients(config, idx, targets, vocab_size):
    """{precision: {family: gradient}} at initialisation.

    float64 at three epsilons, with the closed form, and the two precisions of runs.
    """
    out = {}
    for name, eps in EPSILONS.items():
        exact = skip_model(config, vocab_size, eps).double()
        out[f"float64, eps {name}"] = {**scalar_gradients(exact, idx, targets),
                                       "closed_form": closed_form(exact, idx, targets, eps)}
    for dtype in (torch.float32, torch.bfloat16):
        own = skip_model(config, vocab_size).set_dtype(dtype)
        autocast = common.autocast(CPU, dtype)
        out[str(dtype).split(".")[1]] = scalar_gradients(own, idx, targets, autocast)
    return out


def step0_trajectory(config, mode, store):
    """First steps of arm 12do under a --step0 mode: loss, first scalars, step counter of each."""
    dtype = getattr(torch, config.dtype)
    model = skip_model(config, store.vocab_size).set_dtype(dtype)
    groups = native_groups(model.roles(), model.cfg.n_embd, dtype=dtype, **PACKAGE)
    optimizer, rows = MuonAdamW(groups), []
    batches = BestFitBatches(store.train, store.bos, config.rows, config.seq_len, 0)
    for step in range(config.steps):
        set_schedule(optimizer, step, 953, **PACKAGE_SCHEDULE)
        idx, targets = batches.next()
        with common.autocast(CPU, dtype):
            loss = model(idx, targets)
        loss.backward()
        if step == 0:
            first_step(optimizer, model.roles(), mode)
        else:
            optimizer.step()
        optimizer.zero_grad()
        rows.append({"step": step, "loss": loss.item(), "x0": model.x0_lambdas[0].item(),
                     "wte": model.wte_lambdas[0].item(), "out": model.out_lambdas[0].item(),
                     "counter": optimizer.state[model.wte_lambdas].get("step", 0)})
    return rows


def step0(config):
    """Gradients by precision, trajectories by mode, and how closely each tracks the full run."""
    store = open_store(config.data)
    batches = BestFitBatches(store.train, store.bos, config.rows, config.seq_len, 0)
    gradients = step0_gradients(config, *batches.next(), store.vocab_size)
    trajectories = {mode: step0_trajectory(config, mode, store) for mode in STEP0}
    full, away = trajectories["full"], {}
    for mode, rows in trajectories.items():
        away[mode] = max(abs(a["loss"] - b["loss"]) for a, b in zip(rows, full))
    return {"gradients": gradients, "trajectories": trajectories,
            "largest_loss_difference_from_full": away}


# ---- printing ----

def print_account(name, found):
    """The arms, the models, and what to know of the paper's numbers."""
    table(found["arms"])
    if "models" in found:
        print("\nModels of both families, at 8,192 ids.")
        table(found["models"])
    dense = {f"d{depth}": step_flops(depth) / 1e12 for depth in DEPTHS}
    print("\n" + NOTES[name].format(**dense))


def print_geometry(path, found):
    """What geometry() found, one line a part."""
    print(f"{path} at step {found['step']}")
    for part in ("stable_rank", "mean_row_share", "q_gain", "scalars"):
        words = []
        for name, value in found.get(part, {}).items():
            if isinstance(value, list):
                words.append(f"{name} {[round(x, 3) for x in value]}")
            elif value == value:
                words.append(f"{name} {value:.4g}")
        if words:
            print(f"  {part:15} {'  '.join(words)}")


def print_step0(found):
    """What step0() found, as three tables."""
    print("gradient of the loss on one residual scalar at step 0 (mean over the family)")
    table([{"precision": name, **grads} for name, grads in found["gradients"].items()])
    losses, firsts = [], []
    for mode, rows in found["trajectories"].items():
        by_step = {str(row["step"]): round(row["loss"], 4) for row in rows}
        away = found["largest_loss_difference_from_full"][mode]
        losses.append({"mode": mode, **by_step, "max |diff|": away})
        firsts.append({"mode": mode, **{k: rows[0][k] for k in ("x0", "wte", "out", "counter")}})
    print("\nloss by step")
    table(losses)
    print("\nafter step 0: x0_lambdas[0], wte_lambdas[0], out_lambdas[0], counter of wte_lambdas")
    table(firsts)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in audit_wm.AUDITS:
        return audit_wm.main(argv[0], argv[1:])
    names = (*ACCOUNTS, "geometry", "step0")
    parser = common.make_parser(__doc__)
    parser.add_argument("audit", choices=names, metavar="NAME",
                        help=f"{', '.join(names)}; or wm-NAME, which has flags of its own: "
                             "audit.py wm-NAME --help")
    parser.add_argument("checkpoints", nargs="*", metavar="CKPT", help="geometry: checkpoint files")
    common.add_flags(parser, Config)
    given = vars(parser.parse_intermixed_args(argv))
    name, paths = given.pop("audit"), given.pop("checkpoints", [])
    config = Config(**given)
    common.check_bounds(config)
    if bool(paths) != (name == "geometry"):
        raise UserError("audit.py geometry takes checkpoint files, the other audits take none")
    if name == "geometry":
        found = {path: geometry(path) for path in paths}
    else:
        found = step0(config) if name == "step0" else account(name)
    if config.json:
        print(json.dumps(common.finite(found)))
    elif name == "geometry":
        for path in paths:
            print_geometry(path, found[path])
    elif name == "step0":
        print_step0(found)
    else:
        print_account(name, found)


if __name__ == "__main__":
    common.cli(main)
