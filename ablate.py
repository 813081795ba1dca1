"""One-axis-at-a-time ablations of a 3.3M-parameter GPT over seeds.

    python ablate.py --configs modern baseline highway_scalar --seeds 0 1 2 --max_iters 300
    python ablate.py --data FILE --tokenizer FILE --configs modern muon_vlo    the log's recipe
    python ablate.py --configs muon_vlo muon_ph_vlo --n_embd 384 --n_layer 6 --n_head 3
    python ablate.py --configs ... --shard 3/8        every 8th cell, for a job array
    python ablate.py --list                           every config and its published value

A cell is one config with one seed. Each finished cell is OUT/<config>_i<max_iters>_seed<seed>.json;
a corpus of one's own and recipe flags that were given stand before the seed. Finished cells are
skipped and an unfinished one goes on from its checkpoint, so the same command resumes a sweep, and
any number of processes may share a folder. Weights, batches and dropout have streams of their own:
with one seed all configs see the same batches and start alike where they have the same tensors. A
config's own flags win over those of the command line. OUT/summary/ holds the table as JSON. A new
config is a row of CONFIGS.

    what acts outside the model         finding   definition
    optimizer muon, muon_lr, adamw_lr   9, 25     Muon (no NorMuon, momentum 0.95, no decay) on the
                                                  matrices of the layers, AdamW on the rest
    per_head                            13        Muon orthogonalises q, k, v rows and proj columns
                                                  head by head
    qk_clip_tau                         14        after a step, heads whose largest logit of that
                                                  step's batch exceeds tau are scaled down to it
    grad_topk                           8         only this share of every gradient's entries
                                                  survives, before clipping
    curiosity c                         3         mean nats + c * mean(nats * surprise), where
                                                  surprise = nats / their mean, detached
    progress s                          4         mean(w * nats), see Progress
"""
import dataclasses
import functools
import json
import math
import os
import re
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from tqdm import tqdm

import common
import runs
import stats
from batches import DEFAULT_STORE, RandomBatches, evaluate_bpb, fixed_windows
from common import BadFile, UserError, derive_seed, flag
from data import open_corpus
from loss import update_averages_
from model import (ATTN, FAST_WEIGHT_IMPL, FFN, GPT, MOE_HIDDEN, MOE_ROUTER, NORM, POS, RESID,
                   GPTConfig, alibi_bias)
from optim import SCHEDULES, MuonAdamW, keep_topk_, qk_clip_, warmup_multiplier
from report import as_text

CURVE_POINTS = 200      # of a record's loss curve; a sweep has many cells
MUON_MOMENTUM = 0.95
SIGHTINGS = 16          # batches before an id's loss averages count (finding 4)


@dataclass(frozen=True)
class Config:
    """Everything that shapes one cell; the defaults are the log's `modern`."""
    # --configs and --seeds set these two; a cell always goes on from its checkpoint
    arm: str = "modern"
    seed: int = 0
    resume: bool = True
    max_iters: int = flag(2000, "optimizer steps; warm-up and schedule scale with them", low=1, high=10**9)
    batch_size: int = flag(32, "rows in a batch", low=1, high=2**20)
    seq_len: int = flag(128, "tokens in a row (the log's block size)", low=1, high=2**20)
    n_embd: int = flag(192, "width", low=1, high=2**16)
    n_head: int = flag(6, "attention heads", low=1, high=2**12)
    n_layer: int = flag(4, "layers", low=1, high=1000)
    dropout: float = flag(0.2, "dropout while training", low=0, high=0.999)
    norm: str = flag("rms_affine", "normalisation", choices=tuple(NORM))
    pos: str = flag("rope", "positions", choices=POS)
    attn: str = flag("softmax", "mixer of the tokens", choices=tuple(ATTN))
    ffn: str = flag("swiglu", "feed-forward layer", choices=tuple(FFN))
    ffn_hidden: int = flag(0, "hidden width of the feed-forward layer; 0: its own, 8/3 or 4 times the width",
                           low=0, high=2**20)
    residual: str = flag("plain", "residual connection", choices=tuple(RESID))
    history: bool = flag(False, "Neural History Compressor: a causal summary in mid-stack")
    oe_m: int = flag(0, "base modulus of the OE paper's hashed n-gram tables, added to the token embedding; 0: off",
                     low=0, high=2**31)
    oe_lr: float = flag(0.012, "rate of the hashed tables: the paper's 0.6 at an embedding of standard deviation "
                        "0.02 instead of 1", low=0, high=1e20)
    tie: bool = flag(True, "the output layer shares the token embedding")
    bias: bool = flag(False, "biases in the linear layers")
    fast_weight_impl: str = flag("chunk", "form of the delta rules", choices=tuple(FAST_WEIGHT_IMPL))
    moe_experts: int = flag(4, "experts of --ffn moe", low=1, high=1024)
    moe_top_k: int = flag(1, "experts that a token goes to", low=1, high=1024)
    moe_expert_hidden: str = flag("full", "width of an expert: the whole hidden width or its share", choices=MOE_HIDDEN)
    moe_router: str = flag("learned", "router of the experts", choices=MOE_ROUTER)
    router_progress: float = flag(0.0, "bias of the router towards experts whose loss falls; 0: off",
                                  low=-1e6, high=1e6)
    optimizer: str = flag("adamw", "muon: Muon on the layers' matrices, AdamW on the rest", choices=("adamw", "muon"))
    adamw_lr: float = flag(3e-4, "AdamW's rate, also beside Muon", low=0, high=1e20)
    muon_lr: float = flag(0.02, "Muon's rate", low=0, high=1e20)
    per_head: bool = flag(False, "Muon orthogonalises the attention's matrices head by head")
    qk_clip_tau: float = flag(0.0, "MuonClip's bound on attention logits; 0: off", low=0, high=1e30)
    grad_topk: float = flag(1.0, "share of every gradient that is kept (meProp); hashed tables keep theirs whole",
                            low=1e-9, high=1)
    curiosity: float = flag(0.0, "strength of the surprise-weighted auxiliary loss; 0: off", low=0, high=1e6)
    progress: float = flag(0.0, "strength of the learning-progress weights; 0: off", low=-1e6, high=1e6)
    schedule: str = flag("cosine", "learning rate after the warm-up", choices=tuple(SCHEDULES))
    warmup: Optional[int] = flag(None, "steps of warm-up (default: a tenth of --max_iters)", low=0, high=10**9)
    grad_clip: float = flag(1.0, "norm that gradients, hashed tables aside, are clipped to; 0: off", low=0, high=1e30)
    beta1: float = flag(0.9, "beta1 of AdamW", low=0, high=0.9999999)
    beta2: float = flag(0.999, "beta2 of AdamW", low=0, high=0.9999999)
    weight_decay: float = flag(0.01, "weight decay of AdamW", low=0, high=1e10)
    eval_tokens: int = flag(131_072, "tokens of val to score; 0: all of them", low=0, high=2**53)
    dtype: str = flag("auto", "dtype of the matrix work; auto: bfloat16 on CUDA, float32 elsewhere",
                      choices=("auto", "float32", "bfloat16", "float64"))
    data: str = flag(DEFAULT_STORE, "store of data.py; or a text, jsonl or parquet file, or a folder of them",
                     names=False)
    tokenizer: str = flag("", "tokenizer.json of data.py: encodes --data when that is text; must be its own when that "
                          "is a store", names=False)
    vocab_size: Optional[int] = flag(None, "ids of the tokenizer that is trained on text (default: 8192)",
                                     low=260, high=2**20, names=False)
    out: str = flag("results", "folder of results", names=False)
    save_every: int = flag(100, "steps between a cell's checkpoints; 0: only after its last one", low=0, high=10**9,
                           names=False)
    keep_checkpoints: bool = flag(False, "keep the checkpoints of finished cells, for eval_heldout.py", names=False)
    force: bool = flag(False, "run again and overwrite what was finished before this process began", names=False)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps", names=False)
    threads: int = flag(0, "CPU threads; 0: torch's own choice", low=0, high=1024, names=False)

    @property
    def steps(self):
        return self.max_iters


@dataclass(frozen=True)
class Sweep:
    """Which cells there are, which of them to compute, and what they are compared with."""
    configs: list
    seeds: list
    ref: str
    shard: tuple    # (i, n): every n-th cell from the i-th on


# ---- configs ----

HW = dict(residual="highway_scalar")
MATCHED = dict(ffn="moe", moe_expert_hidden="split")
POSITIONS, NOPE = dict(pos="learned"), dict(pos="none")
GDN = dict(attn="gated_delta_scalar", **NOPE)


def muon(lr=0.02, **kw):
    """Flags of a config under Muon at this rate."""
    return dict(optimizer="muon", muon_lr=lr, **kw)


MUON_RATES = {"_ulo": 0.0025, "_vlo": 0.005, "_lo": 0.01, "": 0.02, "_hi": 0.04}
DEPTH_RATES = {"lr1e4": 1e-4, "lr2e4": 2e-4, "lr6e4": 6e-4, "lr1200u4": 1.2e-3, "lr2400u4": 2.4e-3}
ADAMW_RATES = {"1e4": 1e-4, "1e3": 1e-3, "3e3": 3e-3, "1e2": 1e-2, "3e2": 3e-2}
MUON_RATES_TUNED = {"_vlo": 0.005, "_lo": 0.01, "_hi": 0.04, "_vhi": 0.08}
GDN_MUON_RATES = {"xxlo": 0.000625, "xlo": 0.00125, "ulo": 0.0025, "lo": 0.01}
RESIDUALS = {"plain": {}, "hw": HW}
TUNED = dict(adamw_lr=3e-2)   # finding 25: what the AdamW side of Muon wants at 3.3M
# name -> flags that differ from modern. The names are the log's; behind a row are its findings.
CONFIGS = {
    "modern": {},   # 1, 4
    "baseline": dict(norm="layer", pos="learned", ffn="relu", tie=False, bias=True),   # 1: all of nanoGPT
    "layernorm": dict(norm="layer"), "relu": dict(ffn="relu"), "untied": dict(tie=False),   # its parts, beside pos
    "highway": dict(residual="highway"), "highway_scalar": HW,   # 2
    "hierarchical": dict(history=True), "curiosity": dict(curiosity=0.5),   # 3
    "progress": dict(progress=0.5),   # 4
    "moe": dict(ffn="moe"), "moe_progress": dict(ffn="moe", router_progress=0.5),   # 5
    "moe_matched": MATCHED, "moe_random": dict(MATCHED, moe_router="frozen"),   # 6
    "ffn_small": dict(ffn_hidden=128),
    "moe_fine": dict(MATCHED, moe_experts=16, moe_top_k=2),   # 7
    "moe_fine_wide": dict(MATCHED, moe_experts=16, moe_top_k=4),
    **{f"meprop_{percent}": dict(grad_topk=percent / 100) for percent in (50, 25, 10, 5)},   # 8: the doses are ours
    **{f"muon{rate}": muon(lr) for rate, lr in MUON_RATES.items()},   # 9, 10, 13
    # 11: B .. H of the log, at Muon's 0.01, the best rate known by then
    "f11_muon": muon(0.01), "f11_highway_muon": muon(0.01, residual="highway"),
    "f11_moe_muon": muon(0.01, ffn="moe"),
    "f11_highway_moe_muon": muon(0.01, residual="highway", ffn="moe"),
    "f11_hw_muon": muon(0.01, **HW), "f11_moe_matched_muon": muon(0.01, **MATCHED),
    "f11_hw_moe_matched_muon": muon(0.01, **HW, **MATCHED),
    "muon_vlo_wsd": muon(0.005, schedule="wsd"), "muon_lo_wsd": muon(0.01, schedule="wsd"),   # 12
    "modern_wsd": dict(schedule="wsd"),
    "muon_ph_ulo2": muon(0.00125, per_head=True),   # 13, 15
    **{f"muon_ph{rate}": muon(lr, per_head=True) for rate, lr in MUON_RATES.items()},
    **{f"muonclip{rate}": muon(lr, qk_clip_tau=100.0) for rate, lr in MUON_RATES.items()},   # 14
    **{f"d{n}_{k}": dict(n_layer=n, **flags) for n in (4, 8, 16, 32) for k, flags in RESIDUALS.items()},   # 16
    "pos": POSITIONS, "delta": dict(attn="delta", **POSITIONS),   # 17
    "gated_delta": dict(attn="gated_delta", **POSITIONS),
    "pos_none": NOPE, "delta_nope": dict(attn="delta", **NOPE), "gated_delta_nope": GDN,   # 18
    "gated_delta_scalar": dict(attn="gated_delta_scalar", **POSITIONS),   # 18, 19
    "linear": dict(attn="linear", **POSITIONS), "linear_nope": dict(attn="linear", **NOPE),   # 20
    "alibi": dict(pos="alibi"), "hard_alibi": dict(pos="hard_alibi"),
    "gated_delta_none": dict(attn="gated_delta", **NOPE),
    **{f"d{n}_{k}_{rate}": dict(n_layer=n, adamw_lr=lr, **flags)   # 21
       for n in (4, 32) for k, flags in RESIDUALS.items() for rate, lr in DEPTH_RATES.items()},
    "gdn_hw": dict(GDN, **HW), "hw_muon": muon(0.005, **HW), "gdn_muon": muon(0.005, **GDN),   # 22
    "gdn_hw_muon": muon(0.005, **GDN, **HW),
    **{f"gdn_muon_{rate}": muon(lr, **GDN) for rate, lr in GDN_MUON_RATES.items()},
    "modern_ctx512": dict(seq_len=512), "softmax_nope_ctx512": dict(seq_len=512, **NOPE),   # 23
    "gd_ctx512": dict(seq_len=512, attn="gated_delta", **NOPE), "gds_ctx512": dict(seq_len=512, **GDN),
    "gds_ctx512_learned": dict(seq_len=512, attn="gated_delta_scalar", **POSITIONS),
    "gds_ctx512_wide": dict(seq_len=512, ffn_hidden=555, **GDN),
    "hw_ctx512": dict(seq_len=512, **HW), "gdn_hw_ctx512": dict(seq_len=512, **GDN, **HW),   # 24
    "gdn_hw_muon_ulo": muon(0.0025, **GDN, **HW), "gdn_hw_muon_lo": muon(0.01, **GDN, **HW),
    **{f"adamw_{rate}": dict(adamw_lr=lr) for rate, lr in ADAMW_RATES.items()},   # 25
    "muon_05": muon(0.05), "muon_05_adamw_3e2": muon(0.05, **TUNED),
    **{f"muon{rate}_adamw_3e2": muon(lr, **TUNED) for rate, lr in MUON_RATES_TUNED.items()},
    "arch2_plain": muon(**TUNED), "arch2_hw": muon(**TUNED, **HW), "arch2_moe": muon(**TUNED, ffn="moe"),
    "arch2_moe_matched": muon(**TUNED, **MATCHED),
    **{f"muon_adamw_{rate}": muon(adamw_lr=ADAMW_RATES[rate]) for rate in ("1e3", "3e3", "1e2", "3e2")},   # 25, 26
    "muon01_adamw3e4": muon(0.01),   # 26, at the 29M size
    "gds_ctx512_rope": dict(seq_len=512, attn="gated_delta_scalar"),   # 23: cannot exist, and is refused
}
REFUSED = ("gds_ctx512_rope",)


def config_of(config, arm):
    """The Config of a row of CONFIGS: the flags given, then the row's own.

    UserError for a row with an unknown flag.
    """
    known = {f.name for f in common.flag_fields(config) if f.metadata["names"]}
    if unknown := sorted(CONFIGS[arm].keys() - known):
        why = f"there is no flag {', '.join(unknown)}"
        raise UserError(f"config {arm} of CONFIGS: {why}; --help lists them")
    return dataclasses.replace(config, arm=arm, **CONFIGS[arm])


def naming(config):
    """(base, size, idle) of a cell's name: what arm and size stand for, flags that do nothing."""
    idle = set()
    if config.optimizer != "muon":
        idle.add("muon_lr")
    if not config.oe_m:
        idle.add("oe_lr")
    base = {**CONFIGS[config.arm], "max_iters": config.max_iters}
    return base, f"i{config.max_iters}", idle


def model_config(config, vocab_size):
    """GPTConfig of a Config; UserError for a combination that cannot be."""
    ours = {f.name for f in common.flag_fields(config)} - {"vocab_size"}
    shared = [f.name for f in dataclasses.fields(GPTConfig) if f.name in ours]
    flags = {name: getattr(config, name) for name in shared}
    return GPTConfig.modern(sequence_len=config.seq_len, vocab_size=vocab_size, **flags)


@functools.cache
def _count(config):
    with torch.device("meta"):
        return GPT(config).num_params()["total"]


def count_params(config, vocab_size):
    """All parameters of a cell's model, counted without giving it memory."""
    return _count(model_config(config, vocab_size))


# ---- losses ----

class Progress:
    """Learning-progress weights (finding 4): 1 + strength * z, at least 0, of mean 1 in a batch.

    Every target id has a fast (0.9) and a slow (0.99) average of its mean nats in the batches it
    was seen in; both start at the first. z is slow - fast, standardised over the batch's tokens:
    positive where the loss falls (the log prints fast minus slow and means the falling loss to
    weigh more; a negative strength turns it round). Ids seen in fewer than 16 earlier batches have
    z = 0.
    """

    def __init__(self, vocab_size, strength, device="cpu"):
        self.strength = strength
        self.fast, self.slow, self.seen = (torch.zeros(vocab_size, device=device) for _ in range(3))

    def weights(self, targets):
        """[B, T] weights of targets [B, T] from the batches seen so far."""
        ready, signal = self.seen[targets] >= SIGHTINGS, (self.slow - self.fast)[targets]
        known = signal[ready]
        if known.numel() < 2 or known.std() == 0:
            return torch.ones_like(signal)
        z = torch.where(ready, (signal - known.mean()) / known.std(), 0)
        w = (1 + self.strength * z).clamp_min(0)
        return w / w.mean()

    def update(self, targets, nats):
        """Take in a batch: targets and their nats [B, T]."""
        targets, nats = targets.flatten(), nats.detach().flatten().to(self.fast.dtype)
        count = torch.zeros_like(self.fast).index_add_(0, targets, torch.ones_like(nats))
        mean = torch.zeros_like(self.fast).index_add_(0, targets, nats) / count.clamp_min(1)
        here = count > 0
        update_averages_(self.fast, self.slow, mean, here, here & (self.seen == 0))
        self.seen += here

    def state_dict(self):
        return {"fast": self.fast, "slow": self.slow, "seen": self.seen}

    def load_state_dict(self, state):
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])


def training_loss(model, x, y, config, progress, trace=None):
    """The scalar that a step descends."""
    if not config.curiosity and not config.progress:
        return model(x, y, trace=trace)
    nats = model(x, y, reduction="none", trace=trace)
    loss = nats.mean()
    if config.progress:
        loss = (progress.weights(y) * nats).mean()
        progress.update(y, nats)
    if config.curiosity:
        surprise = nats.detach()
        loss = loss + config.curiosity * (surprise / surprise.mean() * nats).mean()
    return loss


# ---- optimizers ----

def update_of(name, role, config):
    """What updates a parameter: tables, adamw, or Muon on the whole, rows or columns (by head)."""
    if role == "oe":
        return "tables"
    if config.optimizer == "adamw" or role != "matrix" or not name.startswith("blocks."):
        return "adamw"
    layer = name.split(".")[-2]
    if config.per_head and ".attn." in name and layer in ("c_q", "c_k", "c_v"):
        return "rows"
    if config.per_head and ".attn." in name and layer == "c_proj":
        return "columns"
    return "whole"


def make_optimizers(model, config):
    """{"adamw": ..., and where there is something for them "muon", "tables"}.

    Every parameter that learns is in exactly one; each group has its rate as initial_lr.
    """
    found = {}
    for name, role, p in model.roles():
        if p.requires_grad:
            found.setdefault(update_of(name, role, config), []).append(p)
    made = {"adamw": torch.optim.AdamW(
        found["adamw"], lr=config.adamw_lr, betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay, fused=True)}
    rule = dict(kind="muon", lr=config.muon_lr, momentum=MUON_MOMENTUM, normuon=False)
    by_head = dict(rule, heads=config.n_head)
    rules = {"whole": rule, "rows": dict(by_head, head_axis=-2),
             "columns": dict(by_head, head_axis=-1)}
    groups = [dict(rules[k], params=found[k]) for k in rules if k in found]
    if groups:
        made["muon"] = MuonAdamW(groups)
    if "tables" in found:
        made["tables"] = MuonAdamW([dict(kind="oe", lr=config.oe_lr, params=found["tables"])])
    for optimizer in made.values():
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return made


def set_rates(optimizers, step, config):
    """Warm-up and schedule."""
    warmup = round(config.max_iters / 10) if config.warmup is None else config.warmup
    multiplier = warmup_multiplier(step, config.max_iters, warmup, config.schedule)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier


@torch.no_grad()
def logit_peaks(trace, pos="rope"):
    """[[H] per layer]: the largest attention logit that each head can use.

    trace: of a forward pass. The logits are those before any bias of positions.
    """
    peaks = []
    for layer in trace["layers"]:
        q, k = (layer[name].float().transpose(1, 2) for name in ("q", "k"))     # [B, H, T, D]
        z = q @ k.mT / q.size(-1) ** 0.5
        age = torch.arange(z.size(-1), device=z.device)
        age = age[:, None] - age
        unseen = age < 0
        if pos == "hard_alibi":
            unseen = unseen | alibi_bias(pos, z.size(1), age).isinf()
        peaks.append(z.masked_fill_(unseen, -math.inf).amax(dim=(0, 2, 3)))
    return peaks


def clip_logits_(model, trace, tau):
    """MuonClip on every layer after a step, from that step's trace."""
    for block, peak in zip(model.blocks, logit_peaks(trace, model.cfg.pos)):
        qk_clip_(block.attn.c_q.weight, block.attn.c_k.weight, peak, tau)
        if block.attn.c_q.bias is not None:
            qk_clip_(block.attn.c_q.bias, block.attn.c_k.bias, peak, tau)


class DropoutStream:
    """Seeds torch's own generator of a device, from which dropout draws; its state can be saved."""

    def __init__(self, seed, device):
        torch.manual_seed(seed)
        self.where = [device] if device.type == "cuda" else []
        self.torch = {"cpu": torch, "cuda": torch.cuda, "mps": torch.mps}[device.type]

    def state_dict(self):
        return {"state": self.torch.get_rng_state(*self.where)}

    def load_state_dict(self, state):
        self.torch.set_rng_state(state["state"], *self.where)


# ---- one cell, top to bottom ----

def train(config, corpus, meter=None):
    """Train and score one cell; writes its checkpoints and its result, and returns the record.

    None where it is finished already. meter: shows progress in place of the run's own bar.
    """
    with runs.Run(__file__, config, *naming(config), store=corpus, show=meter is None) as run:
        if run.record is not None:
            return None
        model = GPT(model_config(config, corpus.vocab_size)).init_weights(config.seed)
        model = model.to(run.device).train()
        if run.dtype == torch.float64:
            model.double()
        optimizers = make_optimizers(model, config)
        batches = RandomBatches(corpus.train, config.batch_size, config.seq_len,
                                derive_seed("ablate batches", config.seed))
        progress = Progress(corpus.vocab_size, config.progress, run.device)
        dropout = DropoutStream(derive_seed("ablate dropout", config.seed), run.device)
        run.resume(model=model, **optimizers, batches=batches, progress=progress, dropout=dropout)
        if meter:
            meter.begin(run)

        for step in run.steps():
            set_rates(optimizers, step, config)
            x, y = (z.to(run.device, non_blocking=True) for z in batches.next())
            # MuonClip reads the q and k of this step's forward pass
            trace = {} if config.qk_clip_tau else None
            with run.autocast:
                loss = training_loss(model, x, y, config, progress, trace)
            loss.backward()
            # hashed tables normalise their own rows
            learning = [p for p in model.parameters() if p.grad is not None]
            dense = [p for p in learning if not hasattr(p, "visits")]
            if config.grad_topk < 1:
                keep_topk_([p.grad for p in dense], config.grad_topk)
            if config.grad_clip:
                torch.nn.utils.clip_grad_norm_(dense, config.grad_clip)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            if config.qk_clip_tau:
                clip_logits_(model, trace, config.qk_clip_tau)
            run.log(loss.item())
            if meter:
                meter.step(run)

        metrics = {}
        if run.status == "finished":
            windows = fixed_windows(corpus.val, config.batch_size, config.seq_len,
                                    config.eval_tokens)
            with run.autocast:
                found = evaluate_bpb(model, windows, corpus.token_bytes, run.device)
            metrics = {f"val_{name}": value for name, value in found.items()}
        record = run.finish(model, metrics, curve=thinned(run.curve, config.max_iters))
        if record["status"] != "stopped" and not config.keep_checkpoints:
            run.checkpoint.unlink(missing_ok=True)
        if meter:
            meter.end(run)
        return record


def thinned(curve, steps):
    """About CURVE_POINTS of a curve's [step, loss], the last one always."""
    every = max(1, steps // CURVE_POINTS)
    return [point for point in curve if point[0] % every == 0 or point is curve[-1]]


# ---- the sweep ----

@dataclass(frozen=True, eq=False)
class Cell:
    """One config with one seed: what a process locks, computes and writes."""
    config: Config
    path: Path        # of its result
    identity: dict    # what makes it this cell, see common.differences()


def make_cells(config, sweep, corpus):
    """[Cell], seeds outermost: a sweep that is cut short has all configs of its first seeds."""
    script, device, cells = Path(__file__).name, common.pick_device(config.device), []
    for seed in sweep.seeds:
        for arm in sweep.configs:
            # the sweep, not the cell, decides what --force overwrites
            mine = dataclasses.replace(config_of(config, arm), seed=seed, force=False)
            name, identity = runs.identify(script, mine, *naming(mine), corpus, device)
            cells.append(Cell(mine, Path(config.out) / f"{name}.json", identity))
    return cells


def is_there(path, since=0.0):
    """Does the file exist, written since that time?"""
    try:
        return path.stat().st_mtime >= since
    except OSError:
        return False


def read_cells(cells, since=0.0):
    """({cell: record} of the finished ones, {cell: what is wrong with its file})."""
    records, wrong = {}, {}
    for cell in cells:
        if is_there(cell.path, since):
            try:
                records[cell] = runs.read_record(cell.path, cell.identity)
            except BadFile as err:
                wrong[cell] = str(err)
    return records, wrong


def forget(cell, since):
    """Remove the files of a cell from before that time."""
    with runs.locked(cell.path):
        for path in (cell.path, cell.path.with_suffix(".ckpt")):
            if path.exists() and not is_there(path, since):
                path.unlink()


class Meter:
    """Progress over the whole sweep: a bar where there is a terminal, and a line per cell.

    Work is counted in iterations of the cheapest cell.
    """

    def __init__(self, configs, vocab_size):
        cost = {c: count_params(c, vocab_size) * c.batch_size * c.seq_len for c in configs}
        least = min(cost.values(), default=1)
        self.cost = {c: value / least for c, value in cost.items()}
        self.left = {c: value * c.max_iters for c, value in self.cost.items()}
        self.total, self.cells, self.done = sum(self.left.values()), len(configs), 0
        self.here = self.elsewhere = 0.0    # done by this process, and by others meanwhile
        self.before = 0                     # steps that this cell's checkpoint had
        self.asked_to_stop = False
        self.bar = tqdm(total=round(self.total), disable=None,
                        bar_format="{l_bar}{bar}| {elapsed}{postfix}")
        self.start = time.perf_counter()

    def begin(self, run):
        """A cell begins, or goes on."""
        self.before = run.step

    def step(self, run):
        """A cell has done one more step."""
        config = run.config
        done = self.total - sum(self.left.values()) + self.cost[config] * run.step
        self.bar.n = min(self.bar.total, round(done))
        place = f"cell {self.done + 1}/{self.cells} {config.arm} seed {config.seed}"
        told = f"{place} step {run.step} loss {run.curve[-1][1]:.3f}"
        self.bar.set_postfix_str(told, refresh=False)
        self.bar.update(0)

    def end(self, run):
        """A cell has ended, or was stopped."""
        # a signal in a cell's last step stops the sweep, not the cell
        self.asked_to_stop = bool(run.asked_to_stop)

    def finish(self, config, record):
        """A cell is done: say how it ended and how long the rest will take."""
        self.done += 1
        del self.left[config]
        self.here += self.cost[config] * (record["steps"] - self.before)
        metrics, seconds = record["metrics"], record["timing"]["train_s"]
        result = f"val {metrics['val_loss']:.4f}" if metrics else record["status"]
        spent = (time.perf_counter() - self.start) / 60
        minutes = spent * sum(self.left.values()) / max(self.here + self.elsewhere, 1e-9)
        place = f"[{self.done}/{self.cells}] {config.arm} seed {config.seed}"
        self.bar.write(f"{place}: {result}, {seconds:.0f} s; about {minutes:.0f} min left",
                       file=sys.stdout)
        sys.stdout.flush()

    def skip(self, config):
        """Another process has computed this cell."""
        if config in self.left:
            self.elsewhere += self.left.pop(config)
            self.cells -= 1


def run_cells(cells, corpus, since=0.0):
    """Compute the cells that nobody has finished or is computing; returns an exit code.

    A cell is taken under a lock and looked for once more behind it, so that no two processes
    compute it; what others hold is tried again after the rest. since: results from before that
    time do not count. A file that cannot be read is named, its cell left alone: 2. 130: stopped.
    """
    records, wrong = read_cells(cells, since)
    for text in wrong.values():
        print(f"error: {text}", file=sys.stderr)
    if records:
        print(f"{len(records)} of {len(cells)} cells are already finished", flush=True)
    pending = [c for c in cells if c not in records and c not in wrong]
    meter = Meter([c.config for c in pending], corpus.vocab_size)
    with runs.stop_requests() as stop, meter.bar:
        while pending:
            busy = []
            for cell in pending:
                try:
                    run_cell(cell, corpus, since, meter, pending)
                except runs.Busy:
                    busy.append(cell)
                except BadFile as err:   # its checkpoint
                    print(f"error: {err}", file=sys.stderr)
                    wrong[cell] = str(err)
                    meter.skip(cell.config)
                if stop or meter.asked_to_stop:
                    return 130
            if len(busy) == len(pending):
                break
            pending = busy
    if pending:
        names = ", ".join(f"{c.config.arm} seed {c.config.seed}" for c in pending)
        print(f"{len(pending)} cells are being computed by other processes: {names}")
    return 2 if wrong else 0


def run_cell(cell, corpus, since, meter, pending):
    """Compute one of the pending cells; Busy when another process does."""
    record = None
    if not is_there(cell.path, since):
        if since:
            forget(cell, since)
        record = train(cell.config, corpus, meter)
    if record is None:   # another process was faster
        meter.skip(cell.config)
    elif record["status"] != "stopped":
        for other in pending:
            if other is not cell and is_there(other.path, since):
                meter.skip(other.config)
        meter.finish(cell.config, record)


# ---- the table ----

def summarise(arms, seeds, results, ref):
    """[row] in the order of arms from {(arm, seed): record}.

    A row has params, values by seed, mean, sd (n - 1), range, and the comparison with ref: delta is
    the mean difference over the seeds that both have finished. A diverged seed is left out of means
    and is worse than any value where ranges are compared. Rows of another block size than ref's are
    not compared.
    """
    rows = [summary_row(arm, seeds, results) for arm in arms]
    base = next((r for r in rows if r["arm"] == ref), None)
    for row in rows:
        if base and row is not base and row["seq_len"] == base["seq_len"]:
            ours, theirs = with_diverged(row), with_diverged(base)
            shared = [s for s in seeds if s in ours and s in theirs]
            finite = [s for s in shared if math.inf not in (ours[s], theirs[s])]
            if finite:
                row["delta"] = stats.mean([ours[s] - theirs[s] for s in finite])
                sides = [[values[s] for s in shared] for values in (ours, theirs)]
                row["separated"] = stats.separated(*sides)
    return rows


def summary_row(arm, seeds, results):
    """The row of one arm, not yet compared."""
    found = {s: results[arm, s] for s in seeds if (arm, s) in results}
    finished = {s: r for s, r in found.items() if r["status"] == "finished"}
    per_seed = {s: r["metrics"]["val_loss"] for s, r in finished.items()}
    bpb = [r["metrics"]["val_bpb"] for r in finished.values()]
    bpb = [value for value in bpb if value is not None]
    values, some = list(per_seed.values()), next(iter(found.values()), None)
    return {"arm": arm, "params": some and some["params"]["total"],
            "seq_len": some and some["config"]["seq_len"], "per_seed": per_seed,
            "diverged": sorted(s for s in found if s not in finished),
            "missing": [s for s in seeds if s not in found],
            "mean": stats.mean(values) if values else None, "sd": stats.deviation(values),
            "min": min(values, default=None), "max": max(values, default=None),
            "val_bpb": stats.mean(bpb) if bpb else None, "delta": None, "separated": None}


def with_diverged(row):
    """{seed: value} of a row, infinity for its diverged seeds."""
    return {**row["per_seed"], **dict.fromkeys(row["diverged"], math.inf)}


def warnings(rows, config, ref):
    """Lines about what the table does not license.

    Unequal sizes, seeds without a value, rate brackets whose best is at the edge.
    """
    lines, base = [], next((r for r in rows if r["arm"] == ref), None)
    for row in rows:
        arm = row["arm"]
        if row["delta"] is not None and stats.differ_in_size(row["params"], base["params"]):
            change = f"{row['params'] / base['params'] - 1:+.1%}"
            lines.append(f"capacity confound: {arm} has {change} of {ref}'s parameters")
        if row["diverged"]:
            seeds = ", ".join(map(str, row["diverged"]))
            how = "not in its mean, worse than any value in its range"
            lines.append(f"diverged: {arm}, seed {seeds}; {how}")
        if row["missing"]:
            seeds = ", ".join(map(str, row["missing"]))
            lines.append(f"not finished: {arm}, seed {seeds}; compared over the other seeds")
        if row["seq_len"] and base and base["seq_len"] and row["seq_len"] != base["seq_len"]:
            how = f"reads rows of {row['seq_len']} tokens, {ref} of {base['seq_len']}"
            lines.append(f"not compared: {arm} {how}; use --ref")
    return lines + edges(rows, config)


def edges(rows, config):
    """A line for every bracket (configs equal but for one rate) whose best is at its edge."""
    brackets = {}
    for row in rows:
        mine = config_of(config, row["arm"])
        setting = common.changed_flags(mine, naming(mine)[-1])
        for key in ("adamw_lr", "muon_lr") if mine.optimizer == "muon" else ("adamw_lr",):
            others = json.dumps({k: v for k, v in setting.items() if k != key}, sort_keys=True)
            points = brackets.setdefault((key, others), {})
            points.setdefault(getattr(mine, key), []).append(row)
    lines = []
    for (key, _), points in brackets.items():
        # two names of one config are one point, under the first name
        values = {rate: {} for rate in points}
        for rate, same in points.items():
            for row in same:
                values[rate] = {**with_diverged(row), **values[rate]}
        best = stats.edge_of(values)
        if best is not None:
            rates = sorted(rate for rate in values if values[rate])
            end = "lowest" if best == rates[0] else "highest"
            said = f"the {end} of {key} {', '.join(f'{r:g}' for r in rates)}"
            arm = next(row["arm"] for row in points[best] if with_diverged(row))
            lines.append(f"edge of bracket: {arm} is best at {said}; "
                         "extend it before reading a best")
    return lines


def shown(value, form):
    """A number of the table, "-" for none."""
    return "-" if value is None else format(value, form)


TABLE = {"arm": "", "params": ",", "val loss": ".4f", "sd": ".4f", "min": ".4f", "max": ".4f",
         "n": "", "val bpb": ".4f", "- ref": "+.4f", "separated": ""}   # column: format


def print_table(rows, ref):
    """The arms with their means over seeds, and how they stand to ref."""
    lines, verdicts = [], {True: "yes", False: "no", None: None}
    for r in rows:
        verdict = "" if r["arm"] == ref else verdicts[r["separated"]]
        cells = [r["arm"], r["params"], r["mean"], r["sd"], r["min"], r["max"],
                 len(r["per_seed"]), r["val_bpb"], r["delta"], verdict]
        lines.append([shown(cell, form) for cell, form in zip(cells, TABLE.values())])
    headers = [f"- {ref}" if name == "- ref" else name for name in TABLE]
    print(as_text(headers, lines, range(1, 9)))
    print("sd: n - 1; separated: the seed ranges do not overlap (the log's rule; "
          "for paired intervals: python stats.py OUT/*.json)")


def conclude(config, sweep, cells):
    """Read every finished cell, print table and warnings, write OUT/summary/<name>.json.

    The script's exit code: 2 when a file could not be read.
    """
    arms, seeds = sweep.configs, sweep.seeds
    ref = sweep.ref if sweep.ref in arms else arms[0]
    identity = {"script": cells[0].identity["script"], "changed": common.changed_flags(config),
                "arms": arms, "seeds": seeds, "ref": ref,
                "data_digest": cells[0].identity["data_digest"]}
    stem = runs.prefix(identity["script"])
    more = f"+{len(arms) - 1}" if len(arms) > 1 else ""
    name = f"{stem}{arms[0]}{more}_i{config.max_iters}-{common.short_hash(identity)}.json"
    path = Path(config.out) / "summary" / name
    # or who read before the last cell was there could write after who has it
    with runs.locked(path, wait=True):
        records, wrong = read_cells(cells)
        results = {(c.config.arm, c.config.seed): record for c, record in records.items()}
        rows = summarise(arms, seeds, results, ref)
        lines = warnings(rows, config, ref)
        lines += [f"left out: {text}" for text in wrong.values()]
        common.write_json(path, {"kind": "ablate summary", **identity, "rows": rows,
                                 "warnings": lines, "cells": [c.path.name for c in cells]})
    print_table(rows, ref)
    for line in lines:
        print(f"warning: {line}")
    print(path)
    return 2 if wrong else 0


# ---- the published log ----

MAIN = "new128"   # the log's main setting: its rebuilt corpus, 2000 iterations, rows of 128 tokens


@functools.cache
def printed():
    """[(config, setting, row)] of the log at 3.4M parameters; losses compare in a setting."""
    found = []
    for row in common.published("ablate")["findings"]:
        if row.get("size") in (None, "3.4M") and "metric" not in row:
            found.append((row.get("config", row["arm"]), row["setting"].split("-")[0], row))
    return found


def published(name):
    """(setting, row) for a config from published/ablate.json, the main setting's where it has one.

    row: val_loss or range (nats), finding. (None, None) where the log's table is lost. A config of
    another name with the same flags counts too.
    """
    found = []
    for i, (config, setting, _) in enumerate(printed()):
        if CONFIGS.get(config) == CONFIGS[name]:
            found.append((config != name, setting != MAIN, i))
    return printed()[min(found)[-1]][1:] if found else (None, None)


def list_configs(config, as_json=False):
    """Print every config: its flags, its parameters and the log's validation loss.

    The log's values are those of its own recipe: with other flags there are none.
    """
    rows, plain = [], not common.changed_flags(config)
    modern = {setting: row["val_loss"] for name, setting, row in printed() if name == "modern"}
    for name, flags in CONFIGS.items():
        try:
            params, why = count_params(config_of(config, name), config.vocab_size or 8192), None
        except UserError as err:
            params, why = None, str(err)
        setting, row = published(name) if plain else (None, None)
        rows.append({"config": name, "flags": flags, "params": params, "refused": why,
                     "published": row and (row["val_loss"] or row["range"]),
                     "finding": row and row["finding"], "setting": setting,
                     "modern": modern.get(setting)})
    if as_json:
        return print(json.dumps(rows))
    print(f"Values are the log's validation loss in nats. {MAIN} is its main setting;")
    print("others differ in corpus, iterations or rows; their own modern stands beside them.\n")
    headers = ["config", "params", MAIN, "finding", "another setting", "flags"]
    print(as_text(headers, [list_line(row) for row in rows], (1, 2, 3)))


def list_line(row):
    """The cells of a line of --list: only values of the main setting stand below its modern."""
    value, setting = row["published"], row["setting"]
    if value is not None:
        ends = value if isinstance(value, list) else [value]
        value = "..".join(f"{end:.4f}" for end in ends)
    main, other = value, None
    if value and setting != MAIN:
        main, other = None, f"{setting}: {value}"
        if row["modern"]:
            other += f" (modern {row['modern']:.4f})"
    flags = common.show_flags(row["flags"]) or "(the defaults)"
    if row["refused"]:
        flags += f"  refused: {row['refused']}"
    cells = [row["config"], row["params"], main, row["finding"], other, flags]
    return [shown(cell, form) for cell, form in zip(cells, ("", ",", "", "", "", ""))]


# ---- command line ----

def parse(argv=None):
    """(Config, Sweep) of a command line, or None after --list."""
    parser = common.make_parser(__doc__)
    whole = common.whole_number
    parser.add_argument("--configs", nargs="+", action=common.Once, metavar="CONFIG",
                        help="configs of the sweep (default: modern); --list prints them")
    parser.add_argument("--seeds", nargs="+", action=common.Once, metavar="SEED", type=whole,
                        help="seeds of every config (default: 0 1 2)")
    parser.add_argument("--ref", action=common.Once, metavar="CONFIG",
                        help="config that the others are compared with (default: modern)")
    parser.add_argument("--shard", action=common.Once, metavar="I/N",
                        help="compute every N-th cell, beginning with the I-th")
    common.add_flags(parser, Config)
    parser.add_argument("--list", "--list_configs", "--list-configs", dest="list",
                        action="store_true",
                        help="print every config, its flags, parameters and published value")
    parser.add_argument("--json", action="store_true", help="with --list: print JSON")
    given = vars(parser.parse_args(argv))
    listing, as_json = given.pop("list", False), given.pop("json", False)
    asked = {k: given.pop(k) for k in ("configs", "seeds", "ref", "shard") if k in given}
    config = Config(**given)
    common.check_bounds(config)
    recipe = {f.name for f in common.flag_fields(config) if f.metadata["names"]}
    if listing:
        useless = sorted({*asked, *given} - recipe - {"vocab_size"})
        if useless:
            raise UserError(f"--list runs nothing: leave out --{useless[0]}")
        return list_configs(config, as_json)
    if as_json:
        raise UserError("--json goes with --list; results are always written as JSON")
    if not config.out or not config.data:
        raise UserError("an empty --out or --data would mean the current folder; write . for it")
    sweep = read_sweep(asked)
    check_effects({k: v for k, v in given.items() if k in recipe}, config, sweep.configs)
    return config, sweep


def read_sweep(asked):
    """Sweep of what was given of its flags; UserError for what cannot be meant."""
    arms, seeds = asked.get("configs", ["modern"]), asked.get("seeds", [0, 1, 2])
    for name in arms:
        if name not in CONFIGS:
            raise UserError(f"--configs {name} is unknown; --list prints them")
    for what, values in (("--configs", arms), ("--seeds", seeds)):
        twice = [str(value) for value, n in Counter(values).items() if n > 1]
        if twice:
            raise UserError(f"{what} {', '.join(twice)} is given twice; a cell runs once")
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise UserError(f"--seeds {seed} is out of range; seeds go from 0 to 2^63 - 1")
    ref = asked.get("ref", "modern")
    if ref not in CONFIGS:
        raise UserError(f"--ref {ref} is unknown; --list prints the configs")
    if "ref" in asked and ref not in arms:
        raise UserError(f"--ref {ref} is not in the sweep; add it to --configs")
    return Sweep(arms, seeds, ref, read_shard(asked.get("shard", "1/1")))


def read_shard(text):
    """(i, n) of "i/n", 1 <= i <= n."""
    found = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        how = "write i/n with i from 1 to n, such as 1/4"
        raise UserError(f"--shard {text[:40]} is no shard; {how}")
    return int(found[1]), int(found[2])


@contextmanager
def about(arm):
    """For checks of a config: a UserError names it."""
    try:
        yield
    except UserError as err:
        raise UserError(f"config {arm}: {err}") from None


WITHOUT_EFFECT = {"muon_lr": "no config that takes it uses Muon",
                  "oe_lr": "no config of the sweep has hashed tables; add --oe_m"}


def check_effects(given, config, arms):
    """UserError for recipe flags that would change nothing, and for configs that cannot be."""
    cells = {arm: config_of(config, arm) for arm in arms}
    for name, value in given.items():
        takers = [cell for cell in cells.values() if getattr(cell, name) == value]
        if not takers:
            why = "every config of the sweep sets its own; leave it out"
            raise UserError(f"--{name} {value} has no effect: {why}")
        if all(name in naming(cell)[-1] for cell in takers):
            raise UserError(f"--{name} has no effect: {WITHOUT_EFFECT[name]}")
        keepers = {arm: getattr(cell, name) for arm, cell in cells.items()}
        keepers = [f"{arm} ({kept})" for arm, kept in keepers.items() if kept != value]
        if keepers:
            names = ", ".join(keepers)
            print(f"note: --{name} {value} does not act on {names}: a config's own flags win",
                  file=sys.stderr)
    for arm, cell in cells.items():
        with about(arm):
            common.check_bounds(cell)
            check_combinations(cell)


def check_combinations(config):
    """UserError for flags that act outside the model and do not go together."""
    weighed = config.curiosity or config.progress
    too_long = f"a warm-up of {config.warmup} steps does not fit into"
    for broken, why in (
            ((config.warmup or 0) > config.max_iters,
             f"{too_long} --max_iters {config.max_iters}"),
            (config.per_head and config.optimizer != "muon",
             "per_head is Muon's; add --optimizer muon"),
            (config.qk_clip_tau and config.attn != "softmax",
             f"qk_clip_tau bounds the logits of softmax attention; {config.attn} has none"),
            (config.ffn == "moe" and weighed,
             "curiosity and progress weigh tokens one by one, without the routers' balance loss; "
             "use a dense ffn")):
        if broken:
            raise UserError(why)


def check_cells(cells, corpus):
    """UserError before any training: models that cannot be, rows longer than the data."""
    for cell in {c.config.arm: c.config for c in cells}.values():
        with about(cell.arm):
            model_config(cell, corpus.vocab_size)
            for split, tokens in (("train", corpus.train), ("val", corpus.val)):
                if len(tokens) < cell.seq_len + 1:
                    raise UserError(f"rows of {cell.seq_len} tokens do not fit into the "
                                    f"{len(tokens)} tokens of {split}; "
                                    "use more text or a smaller --seq_len")
            if 0 < cell.eval_tokens < cell.seq_len:
                raise UserError(f"--eval_tokens {cell.eval_tokens} is less than one row "
                                f"of {cell.seq_len}")


def main(argv=None):
    parsed = parse(argv)
    if parsed is None:
        return 0
    config, sweep = parsed
    if os.environ.get("WORLD_SIZE", "1") != "1":
        how = "start this script several times, or use --shard"
        raise UserError(f"WORLD_SIZE is set, but one process trains a cell; {how}")
    corpus = open_corpus(config.data, config.tokenizer, config.vocab_size)
    config = dataclasses.replace(config, vocab_size=corpus.vocab_size)
    cells = make_cells(config, sweep, corpus)
    check_cells(cells, corpus)
    i, n = sweep.shard
    code = run_cells(cells[i - 1::n], corpus, time.time() if config.force else 0.0)
    if code == 130:
        print("stopped; the same command goes on where it was", file=sys.stderr)
        return code
    return conclude(config, sweep, cells) or code


if __name__ == "__main__":
    common.cli(main)
