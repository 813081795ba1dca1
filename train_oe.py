"""Backprop pretraining of the OE paper's arms: dense or with hashed n-gram tables.

    python train_oe.py --preset laptop                          minutes on two CPU cores
    python train_oe.py --depth 8 --oe_m 150855 --seed 42        the paper's recipe; wants a GPU
    python train_oe.py --arm 12_oe_joint --depth 6 --seed 41    an arm of the paper; flags given win
    python train_oe.py --list_arms                              every arm with its published result
    torchrun --nproc_per_node 8 train_oe.py --depth 8           the same run, split over 8 GPUs

A new arm: pass flags, add a row to ARMS, or copy this file and edit it. Each run writes
OUT/<run>.json and OUT/<run>.ckpt; <run> begins with the arm (a copy's with the copy's name), ends
with the seed, and says between them what differs from the arm.
"""
import dataclasses
import json
from dataclasses import dataclass

import torch

import common
import runs
from batches import DEFAULT_STORE, BestFitBatches, evaluate_splits
from common import UserError, flag
from model import GPT, QK_SCALE, RESID, ROUTE, GPTConfig
from optim import (MATRIX_KINDS, PACKAGE, PACKAGE_SCHEDULE, SCHEDULES, STEP0, MuonAdamW,
                   first_step, native_groups, set_schedule)


@dataclass(frozen=True)
class Config:
    """All flags of train_oe.py; the defaults are the OE paper's native dense recipe."""
    arm: str = flag("", "named arm; its flags apply first (default: the one that the flags describe)", names=False)
    preset: str = flag("", "laptop: a size for two CPU cores", choices=("", "laptop"), names=False)
    depth: int = flag(6, "layers; the width is 64 x depth rounded up to whole heads", low=1, high=1000)
    head_dim: int = flag(128, "channels of an attention head", low=2, high=4096)
    oe_m: int = flag(0, "base modulus of the four hashed n-gram tables; 0: dense (the paper: 150855)", low=0, high=2**31)
    qk_scale: str = flag("none", "learned gain on q after QK-norm", choices=QK_SCALE)
    wte_route: str = flag("fused", "unigram anchor in the residual stream", choices=tuple(ROUTE))
    out_skip: bool = flag(False, "add the anchors once more before the final norm")
    shared_eps: float = flag(1e-6, "epsilon of the shared denominator (the paper: 1e-6 and 1.1920929e-07)")
    residual: str = flag("plain", "residual connection, beside the paper's own scalars", choices=tuple(RESID))
    data: str = flag(DEFAULT_STORE, "folder prepared by data.py; the default one is prepared when missing", names=False)
    seq_len: int = flag(2048, "tokens in a row", low=1, high=2**20)
    batch_size: int = flag(256, "rows of an optimizer step", low=1, high=2**30)
    micro_batch: int = flag(64, "rows taken at once, as many as fit into memory", low=1, high=2**20, names=False)
    steps: int = flag(953, "optimizer steps", low=1, high=10**9)
    head_lr: float = flag(0.004, "AdamW rate of lm_head, times (width / 768)^-1/2", low=0, high=1e20)
    embed_lr: float = flag(0.6, "AdamW rate of wte and value embeddings, times (width / 768)^-1/2", low=0, high=1e20)
    oe_lr: float = flag(0.6, "rate of the hashed tables, times (width / 768)^-1/2", low=0, high=1e20)
    matrix_rule: str = flag("muon", "update rule of the layers' matrices, at the rate --muon_lr", choices=MATRIX_KINDS)
    muon_lr: float = flag(0.04, "rate of the layers' matrices", low=0, high=1e20)
    weight_decay: float = flag(0.2, "Muon's cautious weight decay at the start; it goes to 0 with progress", low=0, high=1e10)
    lr_scale: float = flag(1.0, "multiplies every learning rate; momentum follows the unscaled schedule", low=0, high=1e10)
    muon_wd_scale: float = flag(1.0, "multiplies Muon's weight decay", low=0, high=1e10)
    equilibrate_tau: int = flag(0, "steps until Muon's matrices are fully equilibrated; 0: off (the package: 25)", low=0)
    neumann_tau: int = flag(0, "steps until gradients of embeddings and head are fully whitened; 0: off (the package: 80)", low=0)
    table_neumann_tau: int = flag(0, "steps until the hashed tables' gradients are fully whitened; 0: off", low=0)
    momentum_cooldown: bool = flag(False, "Muon's momentum falls from 0.95 to 0.85 over the last half")
    cosine_decay: bool = flag(False, "the weight decay follows a cosine instead of a line")
    float32_state: bool = flag(False, "float32 moments and master copies of bfloat16 embeddings")
    float32_polar: bool = flag(False, "orthogonalise in float32 where the run is bfloat16")
    step0: str = flag("full", "what of the residual scalars' first step survives (OE 4.5)", choices=tuple(STEP0))
    schedule: str = flag("trapezoid", "learning-rate schedule", choices=tuple(SCHEDULES))
    seed: int = flag(42, "seed of the weights", low=0, high=2**63 - 1, names=False)
    data_seed: int = flag(0, "seed of the data order", low=0, high=2**63 - 1)
    eval_tokens: int = flag(0, "tokens of each split to score; 0: all of them", low=0, high=2**53)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps", names=False)
    dtype: str = flag("auto", "dtype of the matrix work; auto: bfloat16 on CUDA, float32 elsewhere",
                      choices=("auto", "float32", "bfloat16", "float64"))
    compile: bool = flag(False, "torch.compile the layers", names=False)
    threads: int = flag(0, "CPU threads; 0: torch's own choice", low=0, high=1024, names=False)
    out: str = flag("results", "folder of results and checkpoints", names=False)
    save_every: int = flag(100, "steps between checkpoints; 0: only after the last one", low=0, high=10**9, names=False)
    resume: bool = flag(False, "continue the run's checkpoint, bit for bit; start anew where there is none", names=False)
    force: bool = flag(False, "overwrite an existing result or checkpoint", names=False)


OE = dict(oe_m=150_855)
OPT = dict(PACKAGE, **PACKAGE_SCHEDULE)
JOINT = dict(OPT, qk_scale="full")
BF16 = dict(JOINT, float32_state=False)
LR141 = dict(lr_scale=1.41421356, muon_wd_scale=0.70710678)
SKIP = dict(OE, **JOINT, wte_route="separate", out_skip=True)
ARMS = {  # name -> flags that differ from the native dense recipe; the names are the OE paper's
    "00_dense_native": {},
    "01_dense_opt": OPT,
    "02_dense_joint": JOINT,
    "02m_dense_masked_qk": dict(OPT, qk_scale="masked"),
    "00_dense_native_lr141": LR141,
    "01_dense_opt_lr141": dict(OPT, **LR141),
    "02_dense_joint_lr141": dict(JOINT, **LR141),
    "10_oe_native": OE,
    "11_oe_opt": dict(OE, **OPT),
    "12_oe_joint": dict(OE, **JOINT),
    "12m_oe_masked_qk": dict(OE, **OPT, qk_scale="masked"),
    "oe_joint_bf16state": dict(OE, **BF16),
    "oe_table_neumann_native": dict(OE, table_neumann_tau=80),
    "oe_table_neumann_joint": dict(OE, **JOINT, table_neumann_tau=80),
    "12d_oe_decoupled_x0": dict(OE, **JOINT, wte_route="separate"),
    "12d_oe_bf16_decoupled_x0": dict(OE, **BF16, wte_route="separate"),
    "12d_bf16_shared_denom": dict(OE, **BF16, wte_route="shared"),
    "12do_oe_decoupled_x0_out": SKIP,
    "12do_oe_bf16_decoupled_x0_out": dict(OE, **BF16, wte_route="separate", out_skip=True),
    "12do_shared_denom": dict(SKIP, wte_route="shared"),
    "12do_shared_denom_f32eps": dict(SKIP, wte_route="shared", shared_eps=2.0**-23),
    **{f"12do_{mode}": dict(SKIP, step0=mode) for mode in STEP0 if mode != "full"},
}
PRESETS = {
    "": {},
    # 256 wide; the rates are the paper's, which tuning on the dense arm hardly bettered
    "laptop": dict(depth=4, head_dim=64, seq_len=256, batch_size=8, micro_batch=8, steps=120),
}


# ---- one run, top to bottom ----

def train(config):
    """Train and score one run; writes its checkpoints and its result, and returns the record."""
    with runs.Run(__file__, config, *naming(config)) as run:
        if run.record is not None:   # --resume of a finished run
            return run.record
        if config.micro_batch % run.world:
            rows = f"--micro_batch {config.micro_batch}"
            raise UserError(f"{rows} does not split over {run.world} ranks; choose a multiple")
        model = GPT(model_config(config, run.store.vocab_size)).init_weights(config.seed)
        model = model.set_dtype(run.dtype).to(run.device)
        groups = native_groups(
            model.roles(), model.cfg.n_embd, dtype=run.dtype, head_lr=config.head_lr,
            embed_lr=config.embed_lr, oe_lr=config.oe_lr, matrix_kind=config.matrix_rule,
            muon_lr=config.muon_lr, weight_decay=config.weight_decay,
            equilibrate_tau=config.equilibrate_tau, neumann_tau=config.neumann_tau,
            table_neumann_tau=config.table_neumann_tau,
            float32_state=config.float32_state, float32_polar=config.float32_polar)
        optimizer = MuonAdamW(groups, run.rank, run.world)
        batches = BestFitBatches(run.store.train, run.store.bos, config.micro_batch,
                                 config.seq_len, config.data_seed)
        run.resume(model=model, optimizer=optimizer, batches=batches)
        if config.compile:
            model.trunk = torch.compile(model.trunk)
        micro_batches = config.batch_size // config.micro_batch
        if run.rank == 0:
            count = model.num_params()
            print(f"{run.name}: {count['total']:,} parameters ({count['oe']:,} in hashed tables), "
                  f"{config.steps} steps of {run.tokens_per_step:,} tokens on "
                  f"{run.world} x {run.device.type}")

        for step in run.steps():
            set_schedule(optimizer, step, config.steps, schedule=config.schedule,
                         momentum_cooldown=config.momentum_cooldown,
                         cosine_decay=config.cosine_decay,
                         lr_scale=config.lr_scale, decay_scale=config.muon_wd_scale)
            mean_loss = 0.0
            for _ in range(micro_batches):
                idx, targets = batches.next()
                # every rank takes every world-th row
                idx = idx[run.rank::run.world].to(run.device, non_blocking=True)
                targets = targets[run.rank::run.world].to(run.device, non_blocking=True)
                with run.autocast:
                    loss = model(idx, targets)
                (loss / micro_batches).backward()
                mean_loss += loss.item() / micro_batches
            optimizer.reduce_gradients()
            if step == 0:
                first_step(optimizer, model.roles(), config.step0)
            else:
                optimizer.step()
            optimizer.zero_grad()
            run.log(mean_loss)

        metrics = {}
        if run.status == "finished":
            with run.autocast:
                metrics = evaluate_splits(model, run.store, config.micro_batch, config.eval_tokens,
                                          run.device, run.rank, run.world)
        return run.finish(model, metrics)


def model_config(config, vocab_size):
    """GPTConfig of a Config."""
    return GPTConfig.backbone(
        config.depth, config.head_dim, vocab_size=vocab_size, sequence_len=config.seq_len,
        oe_m=config.oe_m, qk_scale=config.qk_scale, wte_route=config.wte_route,
        out_skip=config.out_skip, shared_eps=config.shared_eps, residual=config.residual)


def naming(config):
    """(base, size, idle) of a run's name: see runs.run_name and runs.Run."""
    size = PRESETS[config.preset] or {"depth": config.depth}
    idle = set() if config.oe_m else {"oe_lr", "table_neumann_tau"}
    if config.wte_route != "shared":
        idle.add("shared_eps")
    return {**size, **ARMS[config.arm]}, config.preset or f"d{config.depth}", idle


# ---- the command line ----

def parse(argv=None):
    """Config of a command line: defaults, then preset, arm, and what was given.

    None after --list_arms.
    """
    given = runs.parse_command_line(__doc__, Config, ARMS, list_arms, argv)
    if given is None:
        return None
    preset, arm = PRESETS.get(given.get("preset", ""), {}), ARMS.get(given.get("arm"), {})
    config = runs.checked(Config(**{**preset, **arm, **given}))
    if not config.arm:
        printed = {run["arm"] for run in common.published("oe")["runs"]}
        known = {name: flags for name, flags in ARMS.items() if name in printed}
        config = dataclasses.replace(config, arm=runs.arm_of(config, known))
    has_scalars = config.wte_route != "fused" or config.out_skip
    if not has_scalars and config.step0 not in ("full", "nostep0_all"):
        acts = "acts on the scalars of --wte_route and --out_skip"
        raise UserError(f"--step0 {config.step0} {acts}; this run has neither")
    return config


def list_arms(as_json=False):
    """Print every arm: flags, parameters, and the published mean of bits per byte by depth."""
    printed = {}
    for row in common.published("oe")["runs"]:
        printed.setdefault((row["arm"], row["depth"]), []).append(row["metrics"]["val_bpb"])
    rows = []
    for name, flags in ARMS.items():
        row = {"arm": name, "flags": flags}
        for depth in (6, 8):
            values = printed.get((name, depth))
            row[f"params_d{depth}"] = count_params(depth, flags)
            row[f"published_d{depth}"] = round(sum(values) / len(values), 6) if values else None
        rows.append(row)
    if as_json:
        return print(json.dumps(rows))
    print(f"{'arm':30} {'params d6':>11} {'params d8':>11} {'val d6':>8} {'val d8':>8}  "
          "flags (val: published mean of validation bits per byte)")
    for row in rows:
        values = [row["published_d6"], row["published_d8"]]
        shown = [f"{v:8.6f}" if v else f"{'-':>8}" for v in values]
        flags = common.show_flags(row["flags"]) or "(the defaults)"
        counts = f"{row['params_d6']:11,} {row['params_d8']:11,}"
        print(f"{row['arm']:30} {counts} {' '.join(shown)}  {flags}")


def count_params(depth, flags):
    """All parameters of an arm's model, counted without giving it memory."""
    with torch.device("meta"):
        model = GPT(model_config(Config(depth=depth, **flags), 8192))
    return model.num_params()["total"]


def main(argv=None):
    config = parse(argv)
    if config is None:
        return 0
    return runs.announce(train(config), config.out)


if __name__ == "__main__":
    common.cli(main)
