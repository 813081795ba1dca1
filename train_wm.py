"""Pretraining without a backward pass: delayed Weight Maximization, its comparators, and exact backprop on the same weights.

    python train_wm.py --data stores/books-8192 --seed 46                       the co-designed 4-matrix arm at d6 (hours on a laptop)
    python train_wm.py --width 256 --active qk --probes 2 --seed 46             all six matrices, two probes for q and k
    python train_wm.py --method backprop --seed 46                              the exact gradient of the same weights, same optimizer
    python train_wm.py --arm wm_G64_codesigned_opt_triton                       an arm of the paper; explicit flags win over the arm's
    python train_wm.py --list_arms                                              every tabulated arm, its flags and its published result

A new arm: pass flags, or copy this file and edit it; the rule itself is in wm.py. Each run writes OUT/<run>.json and OUT/<run>.ckpt,
where <run> is <arm>_d<depth>_seed<seed>, plus 8 hex digits when a flag that matters differs from the arm's.
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
from wm import Pipeline, Rule
from wm_kernels import choose_impl



@dataclass(frozen=True)
class Config(Rule):
    """All flags of train_wm.py: the rule's (wm.Rule) and the run's; the defaults are the co-designed 4-matrix arm in regime d6."""
    arm: str = flag("", "a named arm; its flags apply first (default: the arm that the other flags describe)")
    regime: str = flag("d6", "the paper's two settings: d6, or native (8 layers, 2048-token rows, 16 micro-batches of 4)",
                       choices=("d6", "native"))
    depth: int = flag(6, "layers", low=1, high=1000)
    head_dim: int = flag(64, "channels of an attention head", low=2, high=4096)
    width: int = flag(0, "channels of the residual stream (the paper: 256 to 768); 0 is 64 x depth", low=0, high=2**20)
    window_pattern: str = flag("L", "per layer, repeated: L sees the whole row, S half of it (the paper's runs: L)")
    data: str = flag(DEFAULT_STORE, "folder prepared by data.py; the default one is prepared when missing")
    seq_len: int = flag(256, "tokens in a row", low=1, high=2**20)
    batch_size: int = flag(8, "rows in a micro-batch", low=1, high=2**20)
    accum: int = flag(1, "micro-batches in a step", low=1, high=10**6)
    steps: int = flag(360, "optimizer steps", low=1, high=10**9)
    seed: int = flag(46, "seed of the weights and probes", low=0, high=2**63 - 1)
    data_seed: int = flag(0, "seed of the data order", low=0, high=2**63 - 1)
    eval_tokens: int = flag(262_144, "evaluate on this many tokens of each split; 0 is all of them", low=0, high=2**53)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    dtype: str = flag("float32", "precision of the forward pass; probes and credit are float32 at least",
                      choices=("float32", "bfloat16", "float64"))
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice", low=0, high=1024)
    out: str = flag("results", "folder of results and checkpoints")
    save_every: int = flag(100, "steps between checkpoints; 0 writes the last one only", low=0, high=10**9)
    resume: bool = flag(False, "continue the run's checkpoint, bit for bit; starts anew where there is none")
    force: bool = flag(False, "overwrite an existing result or checkpoint")


REGIMES = {
    "d6": {},
    "native": dict(depth=8, head_dim=128, seq_len=2048, batch_size=4, accum=16, steps=100, wte_lr=0.015, ve_lr=0.015, wte_route="head",
                   lm_beta1=0.5, lm_eps=1e-8, q_lr=0.068, lrm_min=0.5, adamw_anneal=False, packets="host", packet_dtype="bfloat16"),
}
# The paper prints these optimizers in part only; rates it does not print are the defaults of wm.Rule (AdamW on hidden matrices: 0.001)
PAPER20 = dict(wte_lr=0.004, ve_lr=0.004, lrm_min=1.0)
HEAD = dict(lm_beta1=0.5, lm_eps=1e-8)
ADAMW = dict(PAPER20, **HEAD, hidden_opt="adamw", hidden_lr=0.001)
CELLS = {"b05_eps1e8": dict(HEAD), "b09_eps1e8": dict(lm_beta1=0.9, lm_eps=1e-8), "b05_eps1e4": dict(lm_beta1=0.5, lm_eps=1e-4),
         "b09_eps1e4": dict(lm_beta1=0.9, lm_eps=1e-4)}
POOLS = {"entrywise": {}, "row_iso": dict(lm_pool="row_iso")}
COUPLED = dict(active="qk", qk_probe="coupled")
PLAIN_QK = dict(spherical=False, unit_rms_qk=False)
WEAK_QK = dict(PLAIN_QK, q_lr=0.001, k_lr=0.001, k_beta=0.95)
SAME_K = dict(k_lr=0.048, k_beta=0.95, gamma_k=0.0)
TUNED_NP = dict(wte_lr=0.008, ve_lr=0.008, lrm_min=0.1)
M8, M32 = dict(streams=1024), dict(streams=256)
EXP29 = dict(PAPER20, regime="native", wte_lr=0.003, ve_lr=0.003, **HEAD)
EXP43 = dict(regime="native", wte_lr=0.003, ve_lr=0.003)
D6_OPT = dict(wte_route="skip", lrm_min=0.2, adamw_anneal=True, lm_beta1=0.9, lm_eps=1e-4)
RAW = dict(tangent=False, project=False)

ARMS = {  # name -> flags that differ from the defaults; the names are the WM paper's ("..." is how it abbreviates them)
    "supplied_muon_adamw_backprop": dict(PAPER20, **HEAD, method="backprop", active="qk"),
    "backprop_prepolar_muon_damped_lm_frozen_qk_control": dict(PAPER20, method="backprop", lm_pool="row_iso"),
    "backprop_prepolar_muon_frozen_qk_control": dict(PAPER20, **HEAD, method="backprop"),
    "backprop_adamw_frozen_qk_control": dict(ADAMW, method="backprop"),
    "frozen_backbone_lm_head_only": dict(PAPER20, **HEAD, method="head_only"),
    "pure_lexical_x0_skip_only_true_zero": dict(PAPER20, **HEAD, method="lexical_only"),
    "causal_trace_wm_G2048_mismatched_origin_control": dict(ADAMW, method="mismatched_origin"),
    **{f"causal_trace_wm_G{g}_centered{tail}": dict(ADAMW, clock="both_pre", streams=g, **more)
       for g in (1, 64, 256) for tail, more in (("", {}), ("_scaleMg", dict(scale_factor=2048.0 / g)))},
    "causal_trace_wm_G2048_wtrace1_tangent_explore": dict(ADAMW, clock="both_pre"),
    **{f"d6_{name}_..._{pool}_{cell}": dict(PAPER20, **clock, **POOLS[pool], **CELLS[cell])
       for name, clock in (("pre_install", dict(clock="stage2_pre")), ("strict_post_install", {})) for pool in POOLS for cell in CELLS},
    **{f"d6_both_stages_pre_install_entrywise_{cell}": dict(PAPER20, clock="both_pre", **CELLS[cell]) for cell in CELLS},
    "d6_pre_install_fp32_cache_triton_b05_eps1e8": dict(PAPER20, **HEAD, clock="stage2_pre"),
    "d6_strict_post_install_fp32_cache_triton_b05_eps1e8": dict(PAPER20, **HEAD),
    "d6_strict_post_install_fp32_cache_triton_b09_eps1e4": PAPER20,
    "d6_pre_install_fp32_cache_entrywise_b05_eps1e8": dict(PAPER20, **HEAD, clock="stage2_pre", impl="torch"),
    "d6_strict_post_install_fp32_cache_entrywise_b05_eps1e8": dict(PAPER20, **HEAD, impl="torch"),
    "d6_strict_post_install_fp32_cache_entrywise_b09_eps1e4": dict(PAPER20, impl="torch"),
    "d6_strict_post_install_internal_muon_colnorm_reader_b05_eps1e8": dict(PAPER20, **HEAD, reader="muon_colnorm"),
    "d6_strict_post_install_internal_muon_colnorm_reader_b09_eps1e4": dict(PAPER20, reader="muon_colnorm"),
    "d6_strict_post_install_head_adamw_frobnorm_reader_b05_eps1e8": dict(PAPER20, **HEAD, reader="adamw_frobnorm"),
    "wm_G2048_paper20_opt_triton": PAPER20,
    "wm_G2048_scale_embed_const_lr": dict(lrm_min=1.0),
    "wm_G2048_scale_embed_lrm05": dict(lrm_min=0.5),
    "wm_G2048_codesigned_opt_triton": {},
    "wm_G2048_codesigned_per_head_temp_triton": dict(head_temp=True),
    "wm_G2048_codesigned_active_q_snr_matched_triton": dict(WEAK_QK, active="q"),
    "wm_G2048_codesigned_active_qk_snr_matched_triton": dict(WEAK_QK, **COUPLED, gamma_k=0.0),
    "wm_G2048_codesigned_euclidean_active_q_matched_hp_triton": dict(PLAIN_QK, active="q"),
    "wm_G2048_codesigned_unprojected_active_q_matched_hp_triton": dict(PLAIN_QK, active="q", tangent_qk=False),
    "wm_G2048_codesigned_spherical_active_q_triton": dict(active="q"),
    "wm_G2048_codesigned_spherical_active_k_triton": dict(SAME_K, active="k"),
    "wm_G2048_codesigned_spherical_active_k_future_g098_triton": dict(SAME_K, active="k", gamma_k=0.98),
    "wm_G2048_codesigned_spherical_active_qk_triton": dict(SAME_K, **COUPLED),
    "wm_d6_6mat_coupled_qk_samepos_g000_lrk012_triton": dict(COUPLED, gamma_k=0.0),
    "wm_d6_6mat_coupled_qk_future_g085_lrk012_triton": COUPLED,
    "wm_d6_6mat_decoupled_qk_samepos_g000_lrk012_triton": dict(active="qk", gamma_k=0.0),
    "wm_d6_6mat_multiplexed_qk_future_g098_lrk012_triton": dict(active="qk", qk_probe="multiplexed", gamma_k=0.98),
    "wm_d6_6mat_decoupled_qk_future_g098_lrk012_triton": dict(active="qk", gamma_k=0.98),
    "wm_d6_6mat_decoupled_qk_future_g085_lrk012_triton": dict(active="qk"),
    "wm_d6_6mat_decoupled_qk_future_g085_m2_lrk012_triton": dict(active="qk", probes=2),
    "wm_d6_6mat_decoupled_qk_future_g085_m2_rng_matched_lrk012_triton": dict(active="qk", probes=2),  # every probe has its own seed anyway
    "dust_K16_tuned_fast": dict(TUNED_NP, method="sr_lnp"),
    "dust_K16_matched_codesigned_opt": dict(method="sr_lnp"),
    "backprop_d6_paper20_opt": dict(PAPER20, method="backprop"),
    "backprop_d6_codesigned_opt": dict(method="backprop"),
    "backprop_d6_5mat_active_q_codesigned": dict(method="backprop", active="q"),
    "backprop_d6_6mat_active_qk_codesigned": dict(method="backprop", active="qk"),
    "dust_K4_tuned_fast": dict(TUNED_NP, method="sr_lnp", draws=4),
    "dust_K64_tuned_fast": dict(TUNED_NP, method="sr_lnp", draws=64),
    "faithful_dust_K76_adam": dict(method="sr_np", draws=4, hidden_opt="adamw", hidden_lr=0.001),
    "faithful_dust_K76_prepolar_muon": dict(method="sr_np", draws=4),
    "wm_G64_codesigned_opt_triton": dict(streams=64),
    "wm_G2048_codesigned_500steps_match_dustK16_time": dict(steps=500),
    "wm_G2048_codesigned_720steps_half_dustK64_time": dict(steps=720),
    **{f"width{w}_{name}": dict(width=w, **flags) for w in (256, 512, 768) for name, flags in (
        ("dust_K16_tuned", dict(TUNED_NP, method="sr_lnp")), ("dust_K64_tuned", dict(TUNED_NP, method="sr_lnp", draws=64)),
        ("wm_G2048_codesigned", {}), ("backprop_codesigned", dict(method="backprop")))},
    "unrestricted_adamw_backprop": dict(ADAMW, regime="native", method="backprop", active="qk"),
    "native50m_dust_K16_tuned_fast": dict(TUNED_NP, regime="native", method="sr_lnp"),
    "native50m_true_delayed_construction_M8_adamw": dict(EXP29, hidden_opt="adamw", hidden_lr=0.001, clock="both_pre", **M8),
    "native50m_wm_M8_bt_scaled_triton": dict(D6_OPT, regime="native", **M8),
    "native50m_wm_M8_codesigned_triton": dict(D6_OPT, regime="native", wte_lr=0.1, ve_lr=0.05, **M8),
    "native50m_causal_trace_wm_M32_filtered_v_tangent_prepolar_muon": dict(EXP29, clock="origin", **M32),
    "native50m_causal_trace_wm_M8_unprojected_prepolar_muon": dict(EXP29, clock="origin", **RAW, **M8),
    "native50m_true_delayed_construction_M8_unprojected_prepolar_muon": dict(EXP29, clock="both_pre", **RAW, **M8),
    "native50m_causal_trace_wm_M8_filtered_v_tangent_prepolar_muon": dict(EXP29, clock="origin", **M8),
    "native50m_true_delayed_construction_M8_filtered_v_tangent_prepolar_muon": dict(EXP29, clock="both_pre", **M8),
    "native50m_strict_post_install_M8_unprojected_prepolar_muon": dict(EXP43, **RAW, **M8),
    "native50m_strict_post_install_M8_filtered_v_tangent_prepolar_muon": dict(EXP43, **M8),
    "native50m_strict_post_install_M8_exp32_exact_triton": dict(EXP43, packets="device", **M8),
    "native50m_strict_post_install_M8_scaleMg8_triton": dict(EXP43, scale_factor=8.0, **M8),
    "native50m_strict_post_install_M1_wte15e3_eps1e4_triton": dict(regime="native", lm_eps=1e-4),
    "native50m_strict_post_install_M8_wte15e3_triton": dict(regime="native", packets="device", **M8),
    "native50m_strict_post_install_M1_exp32_exact_triton": dict(EXP43, packets="device"),
    "native50m_strict_post_install_M1_wte15e3_triton": dict(regime="native", packets="device"),
    "native50m_strict_post_install_M1_wte15e3_spherical_active_q_triton": dict(regime="native", active="q"),
    "native50m_strict_post_install_M1_wte15e3_6mat_decoupled_qk_future_g085_triton": dict(regime="native", active="qk"),
    "native50m_strict_post_install_M1_wte15e3_6mat_decoupled_qk_future_g085_m2_triton": dict(regime="native", active="qk", probes=2),
}
# tabulated with --regime native too
BOTH_REGIMES = ("supplied_muon_adamw_backprop", "frozen_backbone_lm_head_only", "pure_lexical_x0_skip_only_true_zero")
# how and where a run is computed
NOT_IN_NAME = {"arm", "seed", "device", "threads", "out", "save_every", "resume", "force", "impl", "packets"}


def flags_of(arm, regime=""):
    """All flags of an arm, its regime's included."""
    flags = ARMS.get(arm, {})
    regime = regime or flags.get("regime", "d6")
    return {**REGIMES[regime], **flags, "regime": regime}


def idle(config):
    """The flags that act on nothing under the others: parts that are off, and parts of other methods."""
    c, hidden = config, config.method not in ("head_only", "lexical_only")   # do the layers learn?
    wm, muon = c.method in ("wm", "mismatched_origin"), hidden and c.hidden_opt == "muon"
    parts = {  # flags -> do they act?
        ("clock", "filtered_v", "reader"): wm,
        ("streams", "scale_factor", "project", "tangent", "center", "wte_route", "packet_dtype", "precision"):
            wm or c.method == "lexical_only",
        ("sigma",): c.method not in ("backprop", "head_only"), ("draws",): c.method in ("sr_lnp", "sr_np"),
        ("probes", "unit_rms_qk", "tangent_qk"): wm and c.active != "none", ("qk_probe",): wm and c.active == "qk",
        ("gamma_k",): wm and "k" in c.active,
        ("hidden_opt", "hidden_lr", "ve_lr"): hidden, ("wte_lr",): c.method != "head_only", ("hidden_beta",): muon,
        ("spherical",): c.active != "none", ("q_lr",): "q" in c.active, ("k_lr",): "k" in c.active,
        ("q_beta",): muon and "q" in c.active, ("k_beta",): muon and "k" in c.active}
    return {name for names, act in parts.items() if not act for name in names}


def science(config):
    """The flags that can change a result, as a dict: idle ones are left out, a path is spelled one way."""
    flags = {k: v for k, v in dataclasses.asdict(config).items() if k not in NOT_IN_NAME | idle(config)}
    return {**flags, "data": os.path.normpath(config.data), "width": width_of(config)}


def width_of(config):
    """Channels of the residual stream."""
    return config.width or -(-64 * config.depth // config.head_dim) * config.head_dim


def run_name(config):
    """<arm>_d<depth>_seed<seed>, with the hash of the flags when they differ from the arm's own."""
    plain = science(Config(**flags_of(config.arm, config.regime)))
    return common.run_name(f"{config.arm}_d{config.depth}_seed{config.seed}", science(config), plain)


def parse(argv=None):
    """Config from the command line: defaults, then the regime's flags, then the arm's, then explicit ones. None after --list_arms."""
    given = runs.parse_arms(__doc__, Config, list_arms, argv)
    if given is None:
        return None
    arm, regime = given.get("arm", ""), given.get("regime", "")
    if arm and arm not in ARMS:
        raise UserError(f"--arm {arm} is unknown; --list_arms prints all {len(ARMS)}")
    config = Config(**{**flags_of(arm, regime), **given})
    runs.check_run_flags(config)
    check(config)
    if not arm:
        config = dataclasses.replace(config, arm=arm_of(config))
    return config


def arm_of(config):
    """The arm that a config's flags describe, its number of steps and its width aside where no arm has them; else custom."""
    tunable = set().union(*ARMS.values())
    pick = lambda c, aside: {k: v for k, v in science(c).items() if k in tunable and k not in aside}
    for aside in ((), ("steps",), ("steps", "width")):
        for name in ARMS:
            if pick(config, aside) == pick(Config(**flags_of(name)), aside):
                return name
    return "custom"


def check(config):
    """Refuse what cannot run, with the reason."""
    if config.width % config.head_dim:
        raise UserError(f"--width {config.width} is no multiple of --head_dim {config.head_dim}")
    tokens = config.batch_size * config.seq_len
    if config.streams and tokens % config.streams:
        raise UserError(f"--streams {config.streams} does not divide the {tokens} tokens of a micro-batch")
    comparator = config.method not in ("wm", "backprop", "mismatched_origin")
    if comparator and (config.active != "none" or config.head_temp):
        raise UserError(f"--method {config.method} has no rule for q, k or temperatures; drop --active and --head_temp")
    if config.head_temp and config.active != "none":
        raise UserError("--head_temp and --active are arms of their own in the paper; choose one")
    if config.method == "sr_np" and config.draws == 1:
        raise UserError("--draws 1 gives --method sr_np no credit (a draw's loss counts against the draws' mean); give 2 or more")
    if config.method != "wm" and config.reader != "live":
        raise UserError(f"--reader {config.reader} belongs to --method wm")
    if config.reader == "muon_colnorm" and config.hidden_opt != "muon":
        raise UserError("--reader muon_colnorm reads Muon's momentum; use --hidden_opt muon")


def list_arms(as_json=False):
    """Print every arm: regime, flags and the published DEV bits per byte (mean and sd over seeds)."""
    published = json.loads((common.ROOT / "published" / "wm.json").read_text())
    scores = {(r["arm"], "native" if r["regime"] == "native50m" else "d6"): (r["dev_mean"], r["dev_sd"]) for r in published["runs"]}
    rows = []
    for name, flags in ARMS.items():
        for regime in ("d6", "native") if name in BOTH_REGIMES else (flags.get("regime", "d6"),):
            mean, sd = scores[name, regime]
            rows.append({"arm": name, "regime": regime, "flags": flags, "published_dev_bpb": mean, "published_sd": sd})
    if as_json:
        return print(json.dumps(rows))
    print(f"{'arm':82} {'regime':6} {'published':>16}  flags (published: DEV bits per byte, mean +- sd)")
    for row in rows:
        flags = common.show_flags({k: v for k, v in row["flags"].items() if k != "regime"})
        print(f"{row['arm']:82} {row['regime']:6} {row['published_dev_bpb']:.4f} +- {row['published_sd']:.4f}  {flags or '(the defaults)'}")


def model_config(config, vocab_size):
    """GPTConfig of a Config."""
    width = width_of(config)
    return GPTConfig(n_layer=config.depth, n_head=width // config.head_dim, n_embd=width, vocab_size=vocab_size,
                     sequence_len=config.seq_len, window_pattern=config.window_pattern, qk_scale="head" if config.head_temp else "none")


def build(config, vocab_size, device, rank=0, world=1):
    """Pipeline (model and optimizer inside) of a Config, initialised, on the device."""
    model = GPT(model_config(config, vocab_size)).init_weights(config.seed)
    model = (model.double() if config.dtype == "float64" else model).to(device)
    if "precision" not in idle(config):
        choose_impl(config.impl, config.precision, device, model.lm_head.weight.dtype)   # refuses before the first step
    return Pipeline(model, config, config.seed, rank, world)


def next_batches(batches, config, device, rank=0, world=1):
    """This rank's share of a step's micro-batches: consecutive rows, so that streams and probes fall as in one process."""
    share = config.batch_size // world
    rows = slice(rank * share, (rank + 1) * share)
    return [tuple(z[rows].to(device, non_blocking=True) for z in batches.next()) for _ in range(config.accum)]


def save(path, config, store, pipeline, batches, done):
    """Write a checkpoint after done["step"] steps, packets in flight included: those of every rank, so every rank calls this."""
    in_flight = pipeline.state_dict()
    if pipeline.rank == 0:
        common.save_checkpoint(path, {
            "script": "train_wm.py", "config": dataclasses.asdict(config), "model_config": dataclasses.asdict(pipeline.model.cfg),
            "data_digest": store.digest, "model": pipeline.model.state_dict(), "pipeline": in_flight,
            "batches": batches.state_dict(), **done})


def train(config):
    """Train and evaluate one run; writes checkpoint and result JSON and returns the result record (see runs.one_run)."""
    run = run_name(config)
    return runs.one_run(config, run, lambda *where: _train(config, run, *where))


def _train(config, run, result, checkpoint, rank, world, device):
    if config.streams % world:
        raise UserError(f"--streams {config.streams} does not split over {world} ranks; choose a multiple")
    store, env = open_store(config.data), common.env_record(device)  # of the sources as loaded, not as they are when a long run ends
    pipeline = build(dataclasses.replace(config, streams=config.streams // world), store.vocab_size, device, rank, world)
    batches = BestFitBatches(store.train, store.bos, config.batch_size, config.seq_len, config.data_seed)
    parts = {"model": pipeline.model, "pipeline": pipeline, "batches": batches}
    done = runs.begin(config, run, result, checkpoint,
                      lambda: runs.restore(checkpoint, "train_wm.py", config, science(config), store, parts), rank)
    autocast, params = common.autocast(device, getattr(torch, config.dtype)), pipeline.model.num_params()
    params["active"] = sum(p.numel() for stage in pipeline.active.values() for p in stage.values())
    if rank == 0:
        print(f"{run}: {params['active']:,} of {params['total']:,} parameters active, {config.steps} steps of "
              f"{runs.tokens_per_step(config):,} tokens on {world} x {device.type}")

    def one_step(step):
        return pipeline.step(step, config.steps, next_batches(batches, config, device, rank, world), autocast)

    def checkpoint_now():
        save(checkpoint, config, store, pipeline, batches, done)

    status = runs.run_steps(config, done, one_step, checkpoint_now, checkpoint, rank, world, device)
    return runs.finish("train_wm.py", config, run, status, pipeline.model, store, done, params, autocast, rank, world, device, env)


def main(argv=None):
    config = parse(argv)
    if config is None:
        return 0
    return runs.announce(train(config), config.out)


if __name__ == "__main__":
    common.cli(main)
