"""Backprop pretraining of the OE paper's arms: dense or with hashed n-gram tables, native optimizer or the package.

    python train_oe.py --preset laptop                          a real model on real text in minutes on two CPU cores
    python train_oe.py --depth 8 --oe_m 150855 --seed 42        the paper's recipe (500M tokens; wants a GPU)
    python train_oe.py --arm 12_oe_joint --depth 6 --seed 41    an arm of the paper; explicit flags win over the arm's
    python train_oe.py --list_arms                              every arm, its flags and its published result
    torchrun --nproc_per_node 8 train_oe.py --depth 8           the same run, its batch split over 8 GPUs

A new arm: pass flags, or copy this file and edit it. Each run writes OUT/<run>.json and OUT/<run>.ckpt, where <run> is
<arm>_d<depth>_seed<seed>, plus 8 hex digits when a flag that matters differs from the arm's.
"""
import dataclasses
import json
import os
from dataclasses import dataclass

import torch

import common
import runs
from common import UserError, flag
from data import DEFAULT_STORE, BestFitBatches, open_store
from model import GPT, GPTConfig
from optim import PACKAGE, PACKAGE_SCHEDULE, STEP0, MuonAdamW, first_step, native_groups, set_schedule


@dataclass(frozen=True)
class Config:
    """All flags of train_oe.py; the defaults are the OE paper's native dense recipe."""
    arm: str = flag("", "a named arm; its flags apply first (default: the arm that the other flags describe)")
    preset: str = flag("", "laptop: a size and rates for two CPU cores", choices=("", "laptop"))
    depth: int = flag(6, "layers; the width is 64 x depth rounded up to whole heads", low=1, high=1000)
    head_dim: int = flag(128, "channels of an attention head", low=2, high=4096)
    oe_m: int = flag(0, "base modulus of the four hashed n-gram tables; 0 is dense (the paper uses 150855)", low=0, high=2**31)
    qk_scale: str = flag("none", "learned gain on q after QK-norm", choices=("none", "full", "masked"))
    wte_route: str = flag("fused", "unigram anchor in the residual stream", choices=("fused", "separate", "shared"))
    out_skip: bool = flag(False, "add the anchors once more before the final norm")
    shared_eps: float = flag(1e-6, "epsilon of the shared denominator (the paper: 1e-6 and 1.1920929e-07)")
    residual: str = flag("plain", "residual connection (ABL 2); beside the paper's own scalars", choices=("plain", "highway", "highway_scalar"))
    data: str = flag(DEFAULT_STORE, "folder prepared by data.py; the default one is prepared when missing")
    seq_len: int = flag(2048, "tokens in a row", low=1, high=2**20)
    batch_size: int = flag(64, "rows in a micro-batch", low=1, high=2**20)
    accum: int = flag(4, "micro-batches in a step", low=1, high=10**6)
    steps: int = flag(953, "optimizer steps", low=1, high=10**9)
    head_lr: float = flag(0.004, "AdamW rate of lm_head, times (width / 768)^-1/2", low=0, high=1e20)
    embed_lr: float = flag(0.6, "AdamW rate of wte and value embeddings, times (width / 768)^-1/2", low=0, high=1e20)
    oe_lr: float = flag(0.6, "rate of the hashed tables, times (width / 768)^-1/2", low=0, high=1e20)
    muon_lr: float = flag(0.04, "Muon rate of the matrices", low=0, high=1e20)
    weight_decay: float = flag(0.2, "Muon's cautious weight decay at the start; goes to 0 with progress", low=0, high=1e10)
    lr_scale: float = flag(1.0, "multiplies every learning rate; momentum follows the unscaled schedule", low=0, high=1e10)
    muon_wd_scale: float = flag(1.0, "multiplies Muon's weight decay", low=0, high=1e10)
    equilibrate_tau: int = flag(0, "equilibrate Muon's matrices, at full strength after this many steps; 0 is off (the package: 25)", low=0)
    neumann_tau: int = flag(0, "whiten gradients of wte, value embeddings and head likewise; 0 is off (the package: 80)", low=0)
    table_neumann_tau: int = flag(0, "whiten the hashed tables' mean gradients likewise; 0 is off", low=0)
    momentum_cooldown: bool = flag(False, "Muon's momentum falls from 0.95 to 0.85 over the last half")
    cosine_decay: bool = flag(False, "the weight decay follows a cosine instead of a line")
    float32_state: bool = flag(False, "float32 moments and master copies of bfloat16 embeddings")
    float32_polar: bool = flag(False, "orthogonalise in float32 where the run is bfloat16")
    step0: str = flag("full", "what of the residual scalars' first step survives (OE 4.5)", choices=tuple(STEP0))
    schedule: str = flag("trapezoid", "learning-rate schedule", choices=("trapezoid", "cosine", "wsd", "linear"))
    seed: int = flag(42, "seed of the weights", low=0, high=2**63 - 1)
    data_seed: int = flag(0, "seed of the data order", low=0, high=2**63 - 1)
    eval_tokens: int = flag(0, "evaluate on this many tokens of each split; 0 is all of them", low=0, high=2**53)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = flag("auto", "compute dtype; auto is bfloat16 on CUDA, float32 elsewhere", choices=("auto", "float32", "bfloat16", "float64"))
    compile: bool = flag(False, "torch.compile the layers")
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice", low=0, high=1024)
    out: str = flag("results", "folder of results and checkpoints")
    save_every: int = flag(100, "steps between checkpoints; 0 writes the last one only", low=0, high=10**9)
    resume: bool = flag(False, "continue the run's checkpoint, bit for bit; starts anew where there is none")
    force: bool = flag(False, "overwrite an existing result or checkpoint")


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
    # depth 4 is 256 wide; the rates are the paper's: tuned on the dense arm they came out within 0.004 bpb of the best (README)
    "laptop": dict(depth=4, head_dim=64, seq_len=256, batch_size=8, accum=1, steps=120),
}
NOT_IN_NAME = {"arm", "preset", "seed", "device", "compile", "threads", "out", "save_every", "resume", "force"}  # how and where a run is computed


def science(config):
    """The flags that can change a result, as a dict: a flag of a part that is off is left out, a path is spelled one way."""
    off = {"oe_lr", "table_neumann_tau"} if not config.oe_m else set()
    off |= {"shared_eps"} if config.wte_route != "shared" else set()
    flags = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_IN_NAME | off}
    return {**flags, "data": os.path.normpath(config.data), "dtype": resolved_dtype(config)}


def resolved_dtype(config):
    """The name of the dtype that --dtype stands for on --device."""
    return common.dtype_name(config.dtype, common.pick_device(config.device))


def run_name(config):
    """<arm>_d<depth>_seed<seed>, with the hash of the flags when they differ from the arm's own."""
    plain = science(dataclasses.replace(Config(), **ARMS.get(config.arm, {}), depth=config.depth, device=config.device))
    return common.run_name(f"{config.arm}_d{config.depth}_seed{config.seed}", science(config), plain)


def parse(argv=None):
    """Config from the command line: defaults, then the preset's flags, then the arm's, then explicit ones. None after --list_arms."""
    given = runs.parse_arms(__doc__, Config, list_arms, argv)
    if given is None:
        return None
    arm, preset = given.get("arm", ""), given.get("preset", "")
    if arm and arm not in ARMS:
        raise UserError(f"--arm {arm} is unknown; --list_arms prints them: {', '.join(ARMS)}")
    if preset not in PRESETS and preset:
        raise UserError(f"--preset {preset} is unknown; choose one of {', '.join(PRESETS)}")
    config = Config(**{**PRESETS.get(preset, {}), **ARMS.get(arm, {}), **given})
    runs.check_run_flags(config)
    if not arm:
        tunable = set().union(*ARMS.values())
        pick = lambda c: {k: v for k, v in science(c).items() if k in tunable}
        same = [name for name, flags in ARMS.items() if pick(config) == pick(dataclasses.replace(Config(), **flags))]
        config = dataclasses.replace(config, arm=same[0] if same else "custom")
    if config.step0 != "full" and config.step0 != "nostep0_all" and config.wte_route == "fused" and not config.out_skip:
        raise UserError(f"--step0 {config.step0} acts on the scalars of --wte_route and --out_skip; this run has neither")
    return config


def list_arms(as_json=False):
    """Print every arm: flags, parameters and the published mean validation BPB at depth 6 and 8."""
    published = json.loads((common.ROOT / "published" / "oe.json").read_text())
    runs, rows, counts = {}, [], {}
    for r in published["runs"]:
        runs.setdefault((r["arm"], r["depth"]), []).append(r["val_bpb"])
    for name, flags in ARMS.items():
        row = {"arm": name, "flags": flags}
        for depth in (6, 8):
            cfg = model_config(Config(depth=depth, **flags), 8192)
            if cfg not in counts:
                with torch.device("meta"):
                    counts[cfg] = GPT(cfg).num_params()["total"]
            scores = runs.get((name, depth))
            row[f"params_d{depth}"], row[f"published_d{depth}"] = counts[cfg], scores and round(sum(scores) / len(scores), 6)
        rows.append(row)
    if as_json:
        return print(json.dumps(rows))
    print(f"{'arm':30} {'params d6':>11} {'params d8':>11} {'val d6':>8} {'val d8':>8}  flags (published means of validation bits per byte)")
    for row in rows:
        values = [f"{row[f'published_d{d}']:.6f}" if row[f"published_d{d}"] else "-" for d in (6, 8)]
        print(f"{row['arm']:30} {row['params_d6']:11,} {row['params_d8']:11,} {values[0]:>8} {values[1]:>8}  "
              f"{common.show_flags(row['flags']) or '(the defaults)'}")


def model_config(config, vocab_size):
    """GPTConfig of a Config."""
    return GPTConfig.backbone(config.depth, config.head_dim, vocab_size=vocab_size, sequence_len=config.seq_len, oe_m=config.oe_m,
                              qk_scale=config.qk_scale, wte_route=config.wte_route, out_skip=config.out_skip, shared_eps=config.shared_eps,
                              residual=config.residual)


def build(config, vocab_size, device, dtype, rank=0, world=1):
    """(model, optimizer) of a Config, initialised, on the device."""
    model = GPT(model_config(config, vocab_size)).init_weights(config.seed).set_dtype(dtype).to(device)
    names = ("head_lr", "embed_lr", "oe_lr", "muon_lr", "weight_decay", "equilibrate_tau", "neumann_tau", "table_neumann_tau",
             "float32_state", "float32_polar")
    groups = native_groups(model.roles(), model.cfg.n_embd, dtype=dtype, **{name: getattr(config, name) for name in names})
    return model, MuonAdamW(groups, rank, world)


def train_step(model, optimizer, batches, config, step, device, autocast, rank=0, world=1):
    """One optimizer step over config.accum micro-batches, of which each rank takes every world-th row; returns this rank's mean loss."""
    set_schedule(optimizer, step, config.steps, schedule=config.schedule, momentum_cooldown=config.momentum_cooldown,
                 cosine_decay=config.cosine_decay, lr_scale=config.lr_scale, decay_scale=config.muon_wd_scale)
    total = 0.0
    for _ in range(config.accum):
        x, y = (z[rank::world].to(device, non_blocking=True) for z in batches.next())
        with autocast:
            loss = model(x, y)
        (loss / config.accum).backward()
        total += loss.item() / config.accum
    optimizer.reduce_gradients()
    first_step(optimizer, model.roles(), config.step0) if step == 0 else optimizer.step()
    optimizer.zero_grad()
    return total


def save(path, config, store, model, optimizer, batches, done):
    """Write a checkpoint after done["step"] steps."""
    common.save_checkpoint(path, {
        "script": "train_oe.py", "config": dataclasses.asdict(config), "model_config": dataclasses.asdict(model.cfg),
        "data_digest": store.digest, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "batches": batches.state_dict(), **done})


def train(config):
    """Train and evaluate one run; writes checkpoint and result JSON and returns the result record (see runs.one_run)."""
    run = run_name(config)
    return runs.one_run(config, run, lambda *where: _train(config, run, *where))


def _train(config, run, result, checkpoint, rank, world, device):
    config = dataclasses.replace(config, dtype=resolved_dtype(config))  # what the checkpoint and the record will say
    dtype, env = getattr(torch, config.dtype), common.env_record(device)  # of the sources as loaded, not as they are when a long run ends
    store = open_store(config.data)
    model, optimizer = build(config, store.vocab_size, device, dtype, rank, world)
    batches = BestFitBatches(store.train, store.bos, config.batch_size, config.seq_len, config.data_seed)
    parts = {"model": model, "optimizer": optimizer, "batches": batches}
    done = runs.begin(config, run, result, checkpoint,
                      lambda: runs.restore(checkpoint, "train_oe.py", config, science(config), store, parts), rank)
    if config.compile:
        model.trunk = torch.compile(model.trunk)
    autocast, params = common.autocast(device, dtype), model.num_params()
    if rank == 0:
        print(f"{run}: {params['total']:,} parameters ({params['oe']:,} in hashed tables), {config.steps} steps of "
              f"{runs.tokens_per_step(config):,} tokens on {world} x {device.type}")

    def one_step(step):
        return train_step(model, optimizer, batches, config, step, device, autocast, rank, world)

    def checkpoint_now():
        if rank == 0:
            save(checkpoint, config, store, model, optimizer, batches, done)

    status = runs.run_steps(config, done, one_step, checkpoint_now, checkpoint, rank, world, device)
    return runs.finish("train_oe.py", config, run, status, model, store, done, params, autocast, rank, world, device, env)


def main(argv=None):
    config = parse(argv)
    if config is None:
        return 0
    return runs.announce(train(config), config.out)


if __name__ == "__main__":
    common.cli(main)
