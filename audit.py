"""Accounting and inspection: what an arm costs, what a checkpoint learned, what the first step really sees.

    python audit.py params             parameters of every OE arm at both depths, beside Table 1b
    python audit.py flops              operations a step beyond dense, by component and arm (OE section 3)
    python audit.py memory             persistent bytes beyond dense, by component and arm (OE section 3)
    python audit.py geometry CKPT...   stable ranks, mean-row energy, query gains by band and layer, terminal scalars (Tables 4, 5a, 8b)
    python audit.py step0              gradients of the residual scalars at step 0 by precision and epsilon, and steps 0..11 (OE 4.5)
    python audit.py wm-NAME --help     delayed Weight Maximization: wm-cosine, wm-drift, wm-kurtosis, wm-attention, wm-causality, wm-geometry;
                                       what each does stands in audit_wm.py

--json prints one JSON object instead of tables. Published values stand in columns of their own.
"""
import json
import math
import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F

import audit_wm
import common
import model as model_file
from audit_wm import stable_rank, table
from common import ROOT, UserError, flag
from data import DEFAULT_STORE, BestFitBatches, open_store
from model import GPT, GPTConfig
from optim import PACKAGE, PACKAGE_SCHEDULE, STEP0, MuonAdamW, first_step, native_groups, set_schedule

VOCAB, TOKENS, DEPTHS = 8192, 524_288, (6, 8)    # of the OE paper; tokens in a step
MIB = 2.0**20
# The paper prints 19.37 and 34.13 GFLOP a step for the Table-Neumann control. Both follow from its own formula at 506,847 to 506,996
# visited rows a step (84.0 % of 603,432); the paper does not print the number.
TABLE_NEUMANN_ROWS = 506_920


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
    dtype: str = flag("float32", "step0: precision of the trajectories (bfloat16 is slow on most CPUs)", choices=("float32", "bfloat16"))
    steps: int = flag(12, "step0: steps of the trajectories", low=1)


# ---- accounting (OE section 3) ----

def oe_arms():
    """{arm: {flag: value}} of train_oe.py, asked for by command line: scripts do not import each other."""
    out = subprocess.run([sys.executable, str(ROOT / "train_oe.py"), "--list_arms", "--json"], capture_output=True, text=True)
    if out.returncode:
        raise UserError(f"train_oe.py --list_arms failed: {out.stderr.strip().splitlines()[-1]}")
    return {row["arm"]: row["flags"] for row in json.loads(out.stdout)}


def arm_model(flags, depth):
    """GPT of an arm's flags on the meta device: shapes without memory."""
    keys = ("oe_m", "qk_scale", "wte_route", "out_skip")
    with torch.device("meta"):
        return GPT(GPTConfig.backbone(depth, **{k: flags[k] for k in keys if k in flags}))


def sizes(model):
    """Numbers of values by role."""
    count = defaultdict(int)
    for _, role, p in model.roles():
        count[role] += p.numel()
    return count


def neumann_flops(rows, cols):
    """Right-projected Neumann-Gram on a rows x cols gradient: 4 r c^2 + 14 r c + 3 c^2 + 3 c (OE section 3)."""
    return 4 * rows * cols**2 + 14 * rows * cols + 3 * cols**2 + 3 * cols


def step_flops(depth, tokens=TOKENS):
    """Dense model operations a step: 6 per matrix or head parameter and token, and 12 d per token and visible key of attention."""
    model = arm_model({}, depth)
    n = sizes(model)
    keys = sum(model.cfg.window(i) for i in range(depth))
    return tokens * (6 * (n["matrix"] + n["lm_head"]) + 12 * model.cfg.n_embd * keys)


def arm_flops(flags, depth, tokens=TOKENS):
    """Operations a step beyond dense, by component: {name: FLOP}."""
    model = arm_model(flags, depth)
    n, d, L = sizes(model), model.cfg.n_embd, depth
    parts = {}
    if flags.get("oe_m"):
        parts["oe lookup"] = 8 * tokens * d             # keys, gather, scatter, addition to x0
        parts["oe update"] = 5 * n["oe"]
    if flags.get("equilibrate_tau"):
        square = sum(p.numel() for name, role, p in model.roles() if role == "matrix" and "ve_gate" not in name)
        parts["equilibrate"] = 16 * square              # two passes of rows and columns, 4 each
    if flags.get("neumann_tau"):
        tables = 2 + len(model.value_embeds)
        parts["neumann"] = tables * neumann_flops(VOCAB, d)
    if flags.get("table_neumann_tau"):
        parts["table neumann"] = sum(neumann_flops(TABLE_NEUMANN_ROWS / 4, d // 4) for _ in range(4))
    if flags.get("qk_scale", "none") != "none":
        parts["q scale"] = 4 * tokens * L * d
    if flags.get("wte_route", "fused") != "fused":
        # 4 per layer for the scaled addition and its gradient; 4 for norm(w), or -2 where the denominator is reused; 8 for the skip
        per = 4 * L + (4 if flags["wte_route"] == "separate" else -2) + (8 if flags.get("out_skip") else 0)
        parts["routing"] = per * tokens * d
    return parts


def arm_memory(flags, depth):
    """Persistent bytes beyond dense, by component: {name: bytes}, with bfloat16 embeddings and tables."""
    model = arm_model(flags, depth)
    n, parts = sizes(model), {}
    if flags.get("oe_m"):
        parts["oe weights + gradients"] = 4 * n["oe"]
        parts["oe visit counts"] = 4 * sum(len(t) for t in model.oe_tables)
    if flags.get("float32_state"):
        parts["float32 embedding state"] = 8 * (n["wte"] + n["value_embeds"])  # master 4, two moments 2 more each
    if n["q_log"]:
        parts["q scale"] = 16 * n["q_log"]                                     # weight, gradient, two moments
    return parts


def published_rows():
    """{(depth, arm): row} of Table 1b."""
    table = json.loads((ROOT / "published" / "oe.json").read_text())["accounting"]["table1b"]
    return {(row["depth"], arm): row for row in table for arm in row["arms"]}


def account(what):
    """Rows (depth, arm, values..., published values...) of params, flops or memory for every arm at both depths."""
    table, rows = published_rows(), []
    arms = oe_arms()
    for depth in DEPTHS:
        base = step_flops(depth)
        for arm, flags in arms.items():
            paper = table.get((depth, arm), {})
            if what == "params":
                n = arm_model(flags, depth).num_params()
                row = {**n, "paper_backbone": paper.get("params_backbone"), "paper_total": paper.get("params_total")}
            elif what == "flops":
                parts = arm_flops(flags, depth)
                total = sum(parts.values())
                row = {**{k: round(v / 1e9, 4) for k, v in parts.items()}, "total": round(total / 1e9, 4), "percent": round(100 * total / base, 4),
                       "paper_total": paper.get("extra_gflops_per_step"), "paper_percent": paper.get("extra_pct")}
            else:
                parts = arm_memory(flags, depth)
                row = {**{k: round(v / MIB, 3) for k, v in parts.items()}, "total": round(sum(parts.values()) / MIB, 2),
                       "paper_total": paper.get("analytic_mem_delta_mib"), "paper_peak": paper.get("peak_vram_delta_mib")}
            rows.append({"depth": depth, "arm": arm, **row})
    return rows


NOTES = {
    "params": "Table 1b prints 34 (depth, arm) cells; the others are what the same flags would have at that depth.",
    "flops": "GFLOP a step of 524,288 tokens beyond dense. The paper prints 24.3820 + 0.1695 for the two parts of the package at depth 6; its own"
             " formulas give 24.3816 + 0.1699: the same sum, 24.5515.\n"
             "Dense step: {d6:.2f} TFLOP at depth 6, {d8:.2f} at depth 8 (6 per parameter of matrices and head, 12 d per visible key). The paper"
             " prints 125.35 at depth 8, which agrees, and 59.37 at depth 6, which\ndoes not: 59.37 would follow with 6,656 visible keys summed over"
             " layers instead of 8,192. Percentages here are of our own dense step.",
    "memory": "MiB beyond dense, persistent. paper_peak is the measured peak of an RTX 4090, which also holds activations of the routing arms.\n"
              "Depth 6 arms with a q scale: 223.285 + 96.000 + 0.018 = 319.30; the paper prints 319.31, the sum of its rounded parts.",
}


# ---- geometry of a checkpoint (OE Tables 4, 5a, 8b) ----

def mean_row_share(W):
    """Energy share of the mean row: M |mean row|^2 / |W|_F^2 of a matrix [M, n]."""
    W = W.double()
    total = W.square().sum().item()
    return len(W) * W.mean(0).square().sum().item() / total if total > 0 else math.nan


def mean(values):
    """Mean of an iterable, None of an empty one."""
    values = list(values)
    return sum(values) / len(values) if values else None


def geometry(path):
    """Everything Tables 4, 5a and 8b report of one checkpoint, as a nested dict."""
    saved = common.load_checkpoint(path, ("model", "model_config", "config", "step"))
    with common.reading(path):
        GPT(GPTConfig(**saved["model_config"])).load_state_dict(saved["model"])  # every tensor is there, in its shape
    P, depth = saved["model"], saved["model_config"]["n_layer"]
    square = [f"blocks.{i}.attn.c_{n}.weight" for i in range(depth) for n in ("q", "k", "v", "proj")]
    rect = [f"blocks.{i}.ffn.{n}.weight" for i in range(depth) for n in ("c_fc", "c_proj")]
    oe = [P[k] for k in P if k.startswith("oe_tables.")]
    out = {"step": saved["step"], "stable_rank": {
        "wte": stable_rank(P["wte.weight"]), "lm_head": stable_rank(P["lm_head.weight"]), "oe_tables": mean(map(stable_rank, oe)),
        "value_embeds": mean(stable_rank(P[k]) for k in P if k.startswith("value_embeds.")),
        "attention": mean(stable_rank(P[k]) for k in square), "mlp": mean(stable_rank(P[k]) for k in rect)},
        "mean_row_share": {"wte": mean_row_share(P["wte.weight"]), "lm_head": mean_row_share(P["lm_head.weight"]),
                           "oe_tables": mean(map(mean_row_share, oe))},
        "scalars": {k: P[k].tolist() for k in ("x0_lambdas", "wte_lambdas", "resid_lambdas", "out_lambdas") if k in P}}
    if "blocks.0.attn.q_log" in P:
        gain = torch.stack([P[f"blocks.{i}.attn.q_log"] for i in range(depth)]).double().exp()      # [L, H, D/2]
        if saved["model_config"]["qk_scale"] == "masked":
            gain[0], gain[:, :, :gain.size(2) // 4] = 1.0, 1.0
        bands = gain.size(2)
        edge = [0, bands // 4, 3 * bands // 4, bands]  # planes 0-15, 16-47, 48-63 of 64
        out["q_gain"] = {"mean": gain.mean().item(), "sd": gain.std().item(), "layers": gain.mean((1, 2)).tolist(),
                         **{name: gain[:, :, a:b].mean().item() for name, a, b in zip(("high", "mid", "low"), edge, edge[1:])}}
    return out


# ---- the first step (OE 4.5) ----

SKIP_ARM = dict(qk_scale="full", wte_route="separate", out_skip=True)
EPSILONS = {"0": 0.0, "2^-23": 2.0**-23, "1e-6": 1e-6}


CPU = torch.device("cpu")


def scalar_gradients(model, idx, targets, autocast=nullcontext()):
    """d loss / d scalar of each family of residual scalars, the mean over the family's entries (all equal but for rounding)."""
    model.zero_grad()
    with autocast:
        model(idx, targets).backward()
    grads = {role: p.grad.double().mean().item() for _, role, p in model.roles() if role in ("x0_lambdas", "wte_lambdas", "out_lambdas")}
    model.zero_grad()
    return grads


def closed_form(model, idx, targets, eps):
    """d loss / d alpha at x_out = alpha x0, through N(alpha x0): sum of dL/dN . eps x0 / (alpha^2 q + eps)^(3/2), q = mean x0^2, in float64."""
    w = model.wte.weight[idx].detach().double()
    x0 = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    alpha = 1 + 0.1 * model.cfg.n_layer
    q = x0.square().mean(-1, keepdim=True)
    n = (alpha * x0 / (alpha**2 * q + eps).sqrt()).requires_grad_()
    logits = 15 * torch.tanh(n @ model.lm_head.weight.detach().double().T / 15)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return (n.grad * eps * x0 / (alpha**2 * q + eps) ** 1.5).sum().item()


def step0_gradients(config, idx, targets, vocab):
    """{precision: {family: gradient}} at initialisation: float64 at three epsilons with the closed form, and both precisions of runs."""
    cfg = GPTConfig.backbone(config.depth, vocab_size=vocab, sequence_len=config.seq_len, oe_m=config.oe_m, **SKIP_ARM)
    out = {}
    for name, eps in EPSILONS.items():
        with mock.patch.object(model_file, "norm", lambda x, eps=eps: F.rms_norm(x, (x.size(-1),), eps=eps)):
            exact = GPT(cfg).init_weights(config.seed).double()     # it takes its norm when it is built
            out[f"float64, eps {name}"] = {**scalar_gradients(exact, idx, targets), "closed_form": closed_form(exact, idx, targets, eps)}
    for dtype in (torch.float32, torch.bfloat16):
        own = GPT(cfg).init_weights(config.seed).set_dtype(dtype)
        out[str(dtype).split(".")[1]] = scalar_gradients(own, idx, targets, common.autocast(CPU, dtype))
    return out


def step0_trajectory(config, mode, store):
    """Loss, first scalars and step counter over the first steps of arm 12do under a --step0 mode: a list of dicts."""
    dtype = getattr(torch, config.dtype)
    cfg = GPTConfig.backbone(config.depth, vocab_size=store.vocab_size, sequence_len=config.seq_len, oe_m=config.oe_m, **SKIP_ARM)
    model = GPT(cfg).init_weights(config.seed).set_dtype(dtype)
    optimizer = MuonAdamW(native_groups(model.roles(), cfg.n_embd, dtype=dtype, **PACKAGE))
    batches, rows = BestFitBatches(store.train, store.bos, config.rows, config.seq_len, 0), []
    for step in range(config.steps):
        set_schedule(optimizer, step, 953, **PACKAGE_SCHEDULE)
        x, y = batches.next()
        with common.autocast(CPU, dtype):
            loss = model(x, y)
        loss.backward()
        first_step(optimizer, model.roles(), mode) if step == 0 else optimizer.step()
        optimizer.zero_grad()
        rows.append({"step": step, "loss": loss.item(), "x0": model.x0_lambdas[0].item(), "wte": model.wte_lambdas[0].item(),
                     "out": model.out_lambdas[0].item(), "counter": optimizer.state[model.wte_lambdas].get("step", 0)})
    return rows


def step0(config):
    """The whole audit: gradients by precision, trajectories by mode, and how closely each tracks the full run."""
    store = open_store(config.data)
    x, y = BestFitBatches(store.train, store.bos, config.rows, config.seq_len, 0).next()
    trajectories = {mode: step0_trajectory(config, mode, store) for mode in STEP0}
    away = {mode: max((abs(a["loss"] - b["loss"]) for a, b in zip(rows, trajectories["full"])), default=0.0) for mode, rows in trajectories.items()}
    return {"gradients": step0_gradients(config, x, y, store.vocab_size), "trajectories": trajectories, "largest_loss_difference_from_full": away}


# ---- printing ----

def print_geometry(path, g):
    """What geometry() found, one line a part."""
    print(f"{path} at step {g['step']}")
    flat = lambda d: "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {[round(x, 3) for x in v]}" for k, v in d.items() if v is not None)
    for part in ("stable_rank", "mean_row_share", "q_gain", "scalars"):
        if part in g:
            print(f"  {part:15} {flat(g[part])}")


def print_step0(found):
    """What step0() found, as three tables."""
    print("gradient of the loss on one residual scalar at step 0 (mean over the family)")
    table([{"precision": k, **v} for k, v in found["gradients"].items()])
    print("\nloss by step")
    table([{"mode": mode, **{str(r["step"]): round(r["loss"], 4) for r in rows}, "max |diff|": found["largest_loss_difference_from_full"][mode]}
           for mode, rows in found["trajectories"].items()])
    print("\nafter step 0: x0_lambdas[0], wte_lambdas[0], out_lambdas[0], counter of wte_lambdas")
    table([{"mode": mode, **{k: rows[0][k] for k in ("x0", "wte", "out", "counter")}} for mode, rows in found["trajectories"].items()])


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in audit_wm.AUDITS:
        return audit_wm.main(argv[0], argv[1:])
    parser = common.make_parser(__doc__)
    parser.add_argument("audit", choices=("params", "flops", "memory", "geometry", "step0"), metavar="NAME",
                        help="params, flops, memory, geometry, step0; the wm- audits have flags of their own: audit.py wm-NAME --help")
    parser.add_argument("checkpoints", nargs="*", metavar="CKPT", help="geometry: checkpoint files")
    common.add_flags(parser, Config)
    given = vars(parser.parse_intermixed_args(argv))
    name, paths, config = given.pop("audit"), given.pop("checkpoints", []), Config(**given)
    common.check_bounds(config)
    if bool(paths) != (name == "geometry"):
        raise UserError("audit.py geometry takes checkpoint files, the other audits take none")
    if name == "geometry":
        found = {path: geometry(path) for path in paths}
        if config.json:
            return print(json.dumps(common.finite(found)))
        for path, g in found.items():
            print_geometry(path, g)
        return None
    if name == "step0":
        found = step0(config)
        return print(json.dumps(common.finite(found))) if config.json else print_step0(found)
    rows = account(name)
    if config.json:
        return print(json.dumps(rows))
    table(rows)
    print("\n" + NOTES[name].format(**{f"d{d}": step_flops(d) / 1e12 for d in DEPTHS}))


if __name__ == "__main__":
    common.cli(main)
