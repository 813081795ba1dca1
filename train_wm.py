"""Pretraining without a backward pass: delayed Weight Maximization, and what it is compared with.

    python train_wm.py --data stores/books-8192 --seed 46    co-designed 4-matrix arm at depth 6
    python train_wm.py --width 256 --active qk --probes 2    all six matrices, two probes of q and k
    python train_wm.py --method backprop --seed 46           exact gradient of the same weights
    python train_wm.py --arm wm_G64_codesigned_opt_triton    an arm of the paper; flags given win
    python train_wm.py --list_arms                           every arm with its published result
    torchrun --nproc_per_node 2 train_wm.py --seed 46        the same run, its rows split

A new arm: pass flags, add a row to ARMS, or copy this file and edit train(); the rule itself is in
wm.py, its timing in wm_pipeline.py. Each run writes OUT/<run>.json and OUT/<run>.ckpt; <run> is the
arm, what differs from it, and the seed.
"""
import dataclasses
import json
from dataclasses import dataclass

import torch

import common
import runs
from batches import DEFAULT_STORE, BestFitBatches, evaluate_splits
from common import UserError, flag
from model import GPT, GPTConfig
from wm import METHOD_FLAGS, METHODS, Rule, group_size, set_rates
from wm_kernels import choose_impl
from wm_pipeline import Pipeline, forward


@dataclass(frozen=True)
class Config(Rule):
    """The rule's flags and the run's; the defaults are the co-designed arm at depth 6."""
    arm: str = flag("", "named arm; its flags apply first (default: what the flags describe)", names=False)
    regime: str = flag("d6", "setting; native: 8 layers, rows of 2048 tokens", choices=("d6", "native"), names=False)
    depth: int = flag(6, "layers", low=1, high=1000)
    head_dim: int = flag(64, "channels of an attention head", low=2, high=4096)
    width: int = flag(0, "channels of the residual stream; 0: 64 x depth, in whole heads", low=0, high=2**20)
    window_pattern: str = flag("L", "per layer, repeated: L sees the whole row, S half of it")
    data: str = flag(DEFAULT_STORE, "folder prepared by data.py; the default one is prepared when missing", names=False)
    seq_len: int = flag(256, "tokens in a row", low=1, high=2**20)
    batch_size: int = flag(8, "rows of an optimizer step", low=1, high=2**30)
    micro_batch: int = flag(0, "rows taken at once; streams are counted within them; 0: all", low=0, high=2**20)
    steps: int = flag(360, "optimizer steps", low=1, high=10**9)
    seed: int = flag(46, "seed of the weights and probes", low=0, high=2**63 - 1, names=False)
    data_seed: int = flag(0, "seed of the data order", low=0, high=2**63 - 1)
    eval_tokens: int = flag(262_144, "tokens of each split to score; 0: all of them", low=0, high=2**53)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps", names=False)
    dtype: str = flag("float32", "precision of the forward pass", choices=("float32", "bfloat16", "float64"))
    threads: int = flag(0, "CPU threads; 0: torch's own choice", low=0, high=1024, names=False)
    out: str = flag("results", "folder of results and checkpoints", names=False)
    save_every: int = flag(100, "steps between checkpoints; 0: only after the last one", low=0, high=10**9, names=False)
    resume: bool = flag(False, "continue the run's checkpoint, bit for bit, if there is one", names=False)
    force: bool = flag(False, "overwrite an existing result or checkpoint", names=False)


REGIMES = {
    "d6": {},
    "native": dict(depth=8, head_dim=128, seq_len=2048, batch_size=64, micro_batch=4, steps=100,
                   wte_lr=0.015, ve_lr=0.015, wte_route="head", lm_beta1=0.5, lm_eps=1e-8,
                   q_lr=0.068, lrm_min=0.5, adamw_anneal=False, packets="host",
                   packet_dtype="bfloat16"),
}
# The paper prints these optimizers in part; rates it does not print are the defaults of wm.Rule
# (AdamW on hidden matrices: 0.001)
PAPER20 = dict(wte_lr=0.004, ve_lr=0.004, lrm_min=1.0)
HEAD = dict(lm_beta1=0.5, lm_eps=1e-8)
PRINTED = dict(PAPER20, **HEAD)
HIDDEN_ADAMW = dict(hidden_opt="adamw", hidden_lr=0.001)
ADAMW = dict(PRINTED, **HIDDEN_ADAMW)
TRACE = dict(ADAMW, clock="both_pre")
CELLS = {"b05_eps1e8": HEAD, "b09_eps1e8": dict(lm_beta1=0.9, lm_eps=1e-8),
         "b05_eps1e4": dict(lm_beta1=0.5, lm_eps=1e-4), "b09_eps1e4": dict(lm_beta1=0.9, lm_eps=1e-4)}
POOLS = {"entrywise": {}, "row_iso": dict(lm_pool="row_iso")}
INSTALLS = {"pre": dict(PAPER20, clock="stage2_pre"), "strict_post": PAPER20}
PRE = dict(INSTALLS["pre"], **HEAD)
COUPLED = dict(active="qk", qk_probe="coupled")
PLAIN_QK = dict(spherical=False, unit_rms_qk=False)
WEAK_QK = dict(PLAIN_QK, q_lr=0.001, k_lr=0.001, k_beta=0.95)
SAME_K = dict(k_lr=0.048, k_beta=0.95, gamma_k=0.0)
BP = dict(method="backprop")
LNP = dict(method="sr_lnp", wte_lr=0.008, ve_lr=0.008, lrm_min=0.1)
NATIVE = dict(regime="native")
M8, M32 = dict(streams=1024), dict(streams=256)
EXP43 = dict(NATIVE, wte_lr=0.003, ve_lr=0.003)
EXP29 = {**PAPER20, **EXP43, **HEAD}
ORIGIN, BUILT = dict(EXP29, clock="origin"), dict(EXP29, clock="both_pre")
D6_OPT = dict(NATIVE, wte_route="skip", lrm_min=0.2, adamw_anneal=True, lm_beta1=0.9, lm_eps=1e-4)
RAW = dict(tangent=False, project=False)
WIDTHS = {"dust_K16_tuned": LNP, "dust_K64_tuned": dict(LNP, draws=64), "wm_G2048_codesigned": {},
          "backprop_codesigned": BP}
ARMS = {  # name -> flags that differ from the defaults; the names are the WM paper's
    "supplied_muon_adamw_backprop": dict(PRINTED, **BP, active="qk"),
    "backprop_prepolar_muon_damped_lm_frozen_qk_control": dict(PAPER20, **BP, lm_pool="row_iso"),
    "backprop_prepolar_muon_frozen_qk_control": dict(PRINTED, **BP),
    "backprop_adamw_frozen_qk_control": dict(ADAMW, **BP),
    "frozen_backbone_lm_head_only": dict(PRINTED, method="head_only"),
    "pure_lexical_x0_skip_only_true_zero": dict(PRINTED, method="lexical_only"),
    "causal_trace_wm_G2048_mismatched_origin_control": dict(ADAMW, method="mismatched_origin"),
    **{f"causal_trace_wm_G{g}_centered": dict(TRACE, streams=g) for g in (1, 64, 256)},
    **{f"causal_trace_wm_G{g}_centered_scaleMg": dict(TRACE, streams=g, scale_factor=2048.0 / g)
       for g in (1, 64, 256)},
    "causal_trace_wm_G2048_wtrace1_tangent_explore": TRACE,
    **{f"d6_{when}_install_..._{pool}_{cell}": dict(INSTALLS[when], **POOLS[pool], **CELLS[cell])
       for when in INSTALLS for pool in POOLS for cell in CELLS},
    **{f"d6_both_stages_pre_install_entrywise_{cell}": dict(PAPER20, clock="both_pre", **CELLS[cell])
       for cell in CELLS},
    "d6_pre_install_fp32_cache_triton_b05_eps1e8": PRE,
    "d6_strict_post_install_fp32_cache_triton_b05_eps1e8": PRINTED,
    "d6_strict_post_install_fp32_cache_triton_b09_eps1e4": PAPER20,
    "d6_pre_install_fp32_cache_entrywise_b05_eps1e8": dict(PRE, impl="torch"),
    "d6_strict_post_install_fp32_cache_entrywise_b05_eps1e8": dict(PRINTED, impl="torch"),
    "d6_strict_post_install_fp32_cache_entrywise_b09_eps1e4": dict(PAPER20, impl="torch"),
    "d6_strict_post_install_internal_muon_colnorm_reader_b05_eps1e8": dict(PRINTED, reader="muon_colnorm"),
    "d6_strict_post_install_internal_muon_colnorm_reader_b09_eps1e4": dict(PAPER20, reader="muon_colnorm"),
    "d6_strict_post_install_head_adamw_frobnorm_reader_b05_eps1e8": dict(PRINTED, reader="adamw_frobnorm"),
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
    # every probe has a seed of its own anyway
    "wm_d6_6mat_decoupled_qk_future_g085_m2_rng_matched_lrk012_triton": dict(active="qk", probes=2),
    "dust_K16_tuned_fast": LNP,
    "dust_K16_matched_codesigned_opt": dict(method="sr_lnp"),
    "backprop_d6_paper20_opt": dict(PAPER20, **BP),
    "backprop_d6_codesigned_opt": BP,
    "backprop_d6_5mat_active_q_codesigned": dict(BP, active="q"),
    "backprop_d6_6mat_active_qk_codesigned": dict(BP, active="qk"),
    "dust_K4_tuned_fast": dict(LNP, draws=4),
    "dust_K64_tuned_fast": dict(LNP, draws=64),
    "faithful_dust_K76_adam": dict(HIDDEN_ADAMW, method="sr_np", draws=4),
    "faithful_dust_K76_prepolar_muon": dict(method="sr_np", draws=4),
    "wm_G64_codesigned_opt_triton": dict(streams=64),
    "wm_G2048_codesigned_500steps_match_dustK16_time": dict(steps=500),
    "wm_G2048_codesigned_720steps_half_dustK64_time": dict(steps=720),
    **{f"width{width}_{name}": dict(flags, width=width)
       for width in (256, 512, 768) for name, flags in WIDTHS.items()},
    "unrestricted_adamw_backprop": dict(ADAMW, **NATIVE, **BP, active="qk"),
    "native50m_dust_K16_tuned_fast": dict(LNP, **NATIVE),
    "native50m_true_delayed_construction_M8_adamw": dict(BUILT, **HIDDEN_ADAMW, **M8),
    "native50m_wm_M8_bt_scaled_triton": dict(D6_OPT, **M8),
    "native50m_wm_M8_codesigned_triton": dict(D6_OPT, wte_lr=0.1, ve_lr=0.05, **M8),
    "native50m_causal_trace_wm_M32_filtered_v_tangent_prepolar_muon": dict(ORIGIN, **M32),
    "native50m_causal_trace_wm_M8_unprojected_prepolar_muon": dict(ORIGIN, **RAW, **M8),
    "native50m_true_delayed_construction_M8_unprojected_prepolar_muon": dict(BUILT, **RAW, **M8),
    "native50m_causal_trace_wm_M8_filtered_v_tangent_prepolar_muon": dict(ORIGIN, **M8),
    "native50m_true_delayed_construction_M8_filtered_v_tangent_prepolar_muon": dict(BUILT, **M8),
    "native50m_strict_post_install_M8_unprojected_prepolar_muon": dict(EXP43, **RAW, **M8),
    "native50m_strict_post_install_M8_filtered_v_tangent_prepolar_muon": dict(EXP43, **M8),
    "native50m_strict_post_install_M8_exp32_exact_triton": dict(EXP43, packets="device", **M8),
    "native50m_strict_post_install_M8_scaleMg8_triton": dict(EXP43, scale_factor=8.0, **M8),
    "native50m_strict_post_install_M1_wte15e3_eps1e4_triton": dict(NATIVE, lm_eps=1e-4),
    "native50m_strict_post_install_M8_wte15e3_triton": dict(NATIVE, packets="device", **M8),
    "native50m_strict_post_install_M1_exp32_exact_triton": dict(EXP43, packets="device"),
    "native50m_strict_post_install_M1_wte15e3_triton": dict(NATIVE, packets="device"),
    "native50m_strict_post_install_M1_wte15e3_spherical_active_q_triton": dict(NATIVE, active="q"),
    "native50m_strict_post_install_M1_wte15e3_6mat_decoupled_qk_future_g085_triton": dict(NATIVE, active="qk"),
    "native50m_strict_post_install_M1_wte15e3_6mat_decoupled_qk_future_g085_m2_triton":
        dict(NATIVE, active="qk", probes=2),
}


# ---- one run, top to bottom ----

def train(config):
    """Train and score one run; writes its checkpoints and its result, and returns the record."""
    with runs.Run(__file__, config, *naming(config)) as run:
        if run.record is not None:   # --resume of a finished run
            return run.record
        rows = share_of(config, run.world)
        model = build_model(config, run.store.vocab_size).to(run.device)
        pipeline = build_pipeline(config, model, run.rank, run.world)
        optimizer = pipeline.optimizer
        batches = BestFitBatches(run.store.train, run.store.bos, rows_at_once(config),
                                 config.seq_len, config.data_seed)
        run.resume(model=model, pipeline=pipeline, batches=batches)
        micros = config.batch_size // rows_at_once(config)
        params = {**model.num_params(), "active": sum(map(torch.numel, pipeline.weights.values()))}
        if run.rank == 0:
            print(f"{run.name}: {params['active']:,} of {params['total']:,} parameters active, "
                  f"{config.steps} steps of {run.tokens_per_step:,} tokens on "
                  f"{run.world} x {run.device.type}")

        def own_rows():
            # consecutive ones, so that streams and probes fall as in one process
            mine = slice(run.rank * rows, (run.rank + 1) * rows)
            return [z[mine].to(run.device, non_blocking=True) for z in batches.next()]

        for step in run.steps():
            set_rates(optimizer, step, config.steps, config)
            optimizer.zero_grad()
            mean_loss, head = 0.0, 0.0
            if pipeline.method.autograd:
                for _ in range(micros):
                    with run.autocast:
                        loss = model(*own_rows())
                    (loss / micros).backward()
                    mean_loss += loss.item() / micros
            else:
                with torch.no_grad():
                    # what earlier batches left, rewarded by the weights as they stand
                    pipeline.build(step)
                    for micro in range(micros):
                        idx, targets = own_rows()
                        key, first = f"{config.seed}/{step}/{micro}", run.rank * idx.numel()
                        with run.autocast:
                            packet, loss, grad = forward(model, idx, targets, key, step, first)
                        pipeline.take(packet, targets, micros)
                        head = head + grad / micros
                        mean_loss += loss / micros
                    pipeline.build(step, this_batch=True)
                    pipeline.install(step, head)
            optimizer.reduce_gradients()
            optimizer.step()
            pipeline.keep_norms()
            run.log(mean_loss)

        metrics = {}
        if run.status == "finished":
            with run.autocast:
                metrics = evaluate_splits(model, run.store, rows_at_once(config),
                                          config.eval_tokens, run.device, run.rank, run.world)
        return run.finish(model, metrics, params)


def model_config(config, vocab_size):
    """GPTConfig of a Config."""
    width = width_of(config)
    return GPTConfig(n_layer=config.depth, n_head=width // config.head_dim, n_embd=width,
                     vocab_size=vocab_size, sequence_len=config.seq_len,
                     window_pattern=config.window_pattern,
                     qk_scale="head" if config.head_temp else "none")


def build_model(config, vocab_size):
    """The model of a Config with its first weights, on the CPU."""
    model = GPT(model_config(config, vocab_size)).init_weights(config.seed)
    return model.double() if config.dtype == "float64" else model


def build_pipeline(config, model, rank=0, world=1):
    """The Pipeline (optimizer inside) of a Config on one of `world` ranks."""
    if "precision" not in idle(config):
        weight = model.lm_head.weight
        # refuses before the first step what this machine has not
        choose_impl(config.impl, config.precision, weight.device, weight.dtype)
    rule = dataclasses.replace(config, streams=config.streams // world)
    return Pipeline(model, rule, config.seed, rank, world)


def share_of(config, world):
    """Rows of a micro-batch on each rank; UserError where they or the streams do not split."""
    for name, count in (("micro_batch", rows_at_once(config)), ("streams", config.streams)):
        if count % world:
            how = f"does not split over {world} ranks; choose a multiple"
            raise UserError(f"--{name} {count} {how}")
    return rows_at_once(config) // world


def rows_at_once(config):
    """Rows of a micro-batch, over all ranks."""
    return min(config.micro_batch or config.batch_size, config.batch_size)


def width_of(config):
    """Channels of the residual stream."""
    return config.width or -(-64 * config.depth // config.head_dim) * config.head_dim


# ---- the run's name ----

def flags_of(arm, regime=""):
    """All flags of an arm (or a method) in a regime: its own, or this one."""
    flags = ARMS.get(arm, {"method": arm} if arm in METHODS else {})
    regime = regime or flags.get("regime", "d6")
    return {**REGIMES[regime], **flags, "regime": regime}


def published():
    """{(arm, regime): (mean, sd)} of the DEV bits per byte that the paper prints over its seeds."""
    regimes = {"native50m": "native"}
    return {(row["arm"], regimes.get(row["regime"], "d6")): (row["dev_mean"], row["dev_sd"])
            for row in common.published("wm")["runs"]}


def arm_of(config):
    """The published arm of its method that a config's flags describe, else the method itself."""
    printed, known = published(), {}
    named = {f.name for f in common.flag_fields(config) if f.metadata["names"]}
    for name, flags in ARMS.items():
        same_method = flags.get("method", "wm") == config.method
        if same_method and (name, config.regime) in printed:
            known[name] = {k: v for k, v in flags.items() if k in named}
    known[config.method] = {"method": config.method}
    return runs.arm_of(config, known)


def naming(config):
    """(base, size, idle) of a run's name: see runs.run_name and runs.Run."""
    base = {**flags_of(config.arm, config.regime), "depth": config.depth}
    return base, f"d{config.depth}", idle(config)


def idle(config):
    """The flags that act on nothing: those of other methods, and of parts that are off."""
    method = METHODS[config.method]
    layers, muon = "layers" in method.learns, config.hidden_opt == "muon"
    q, k = "q" in config.active, "k" in config.active
    flags = METHOD_FLAGS - method.flags
    parts = {  # flags: do they act?
        "hidden_opt hidden_lr ve_lr": layers,
        "hidden_beta": layers and muon,
        "wte_lr": "wte" in method.learns,
        "probes unit_rms_qk tangent_qk spherical": q or k,
        "qk_probe": q and k,
        "q_lr": q,
        "q_beta": q and muon,
        "k_lr gamma_k": k,
        "k_beta": k and muon,
    }
    for names, act in parts.items():
        if not act:
            flags.update(names.split())
    return flags


# ---- the command line ----

def parse(argv=None):
    """Config of a command line: defaults, then the regime's flags, the arm's, and what was given.

    None after --list_arms.
    """
    given = runs.parse_command_line(__doc__, Config, ARMS, list_arms, argv)
    if given is None:
        return None
    config = Config(**{**flags_of(given.get("arm", ""), given.get("regime", "")), **given})
    runs.checked(dataclasses.replace(config, micro_batch=rows_at_once(config)))
    check(config)
    # one way to say one thing, so that one run has one name
    if config.micro_batch >= config.batch_size:
        config = dataclasses.replace(config, micro_batch=0)
    plain = dataclasses.replace(config, width=0)
    if config.width == width_of(plain):
        config = plain
    return config if config.arm else dataclasses.replace(config, arm=arm_of(config))


def check(config):
    """UserError for what cannot run."""
    method = METHODS[config.method]
    if config.width % config.head_dim:
        raise UserError(f"--width {config.width} is no multiple of --head_dim {config.head_dim}")
    group_size(rows_at_once(config) * config.seq_len, config)
    if config.probes_attention and not method.probes_qk:
        what = "has no rule for --active and --head_temp"
        raise UserError(f"--method {config.method} {what}")
    if config.head_temp and config.active != "none":
        raise UserError("--head_temp and --active are arms of their own in the paper; choose one")
    if config.draws < method.min_draws:
        least = f"give {method.min_draws} or more"
        raise UserError(f"--method {config.method}: no credit from --draws {config.draws}; {least}")
    if config.reader != "live" and "reader" not in method.flags:
        raise UserError(f"--reader {config.reader} belongs to --method wm")
    if config.reader == "muon_colnorm" and config.hidden_opt != "muon":
        raise UserError("--reader muon_colnorm reads Muon's momentum; use --hidden_opt muon")


def list_arms(as_json=False):
    """Print every arm: regime, flags and the published DEV bits per byte [mean, sd]."""
    rows, printed = [], published()
    for name, flags in ARMS.items():
        for regime in REGIMES:
            score = printed.get((name, regime))
            if score or regime == flags_of(name)["regime"]:
                rows.append({"arm": name, "regime": regime, "flags": flags, "published": score})
    if as_json:
        return print(json.dumps(rows))
    print(f"{'arm':82} {'regime':6} {'published':>16}  "
          "flags (published: DEV bits per byte, mean +- sd)")
    for row in rows:
        flags = {k: v for k, v in row["flags"].items() if k != "regime"}
        shown, score = common.show_flags(flags) or "(the defaults)", "-"
        if row["published"]:
            score = "{:.4f} +- {:.4f}".format(*row["published"])
        print(f"{row['arm']:82} {row['regime']:6} {score:>16}  {shown}")


def main(argv=None):
    config = parse(argv)
    if config is None:
        return 0
    return runs.announce(train(config), config.out)


if __name__ == "__main__":
    common.cli(main)
