"""One-axis-at-a-time ablations of a 3.3M-parameter GPT over seeds: architecture, optimizer, loss, schedule.

    python ablate.py --configs modern baseline highway_scalar --seeds 0 1 2 --max_iters 300
    python ablate.py --data FILE --tokenizer FILE --configs modern muon_vlo --seeds 0 1 2     the log's recipe, 2000 iterations
    python ablate.py --configs muon_vlo muon_ph_vlo --n_embd 384 --n_layer 6 --n_head 3 ...   another size (finding 15)
    python ablate.py --configs ... --shard 3/8                                                every 8th cell, for a job array
    python ablate.py --list                                                                   every config and its published value

A cell is one config with one seed. Each finished cell is OUT/<config>_i<max_iters>_seed<seed>.json (plus 8 hex digits when a recipe flag
was given); finished cells are skipped, so the same command resumes a sweep and any number of processes may share a folder. Weights,
batches and dropout have streams of their own: with one seed all configs see the same batches and start alike where they have the
same tensors. A config's own flags win over those of the command line. OUT/summary/ holds the table as JSON. A new config is a row of CONFIGS.

    what acts outside the model         finding   definition
    optimizer muon, muon_lr, adamw_lr   9, 25     Muon (no NorMuon, momentum 0.95, no decay) on the matrices of the layers, AdamW on the rest
    per_head                            13        Muon orthogonalises q, k, v rows and proj columns head by head
    qk_clip_tau                         14        after a step, heads whose largest logit of that step's batch exceeds tau are scaled down to it
    grad_topk                           8         only this share of every gradient's entries survives, before clipping
    curiosity c                         3         mean nats + c * mean(nats * surprise), surprise = nats / their mean, detached
    progress s                          4         mean(w * nats), see Progress
"""
import dataclasses
import functools
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from tqdm import tqdm

import common
import data
from common import UserError, derive_seed, flag
from data import DEFAULT_STORE, RandomBatches, evaluate_bpb, open_store, prepare
from model import GPT, GPTConfig, alibi_bias
from optim import MuonAdamW, keep_topk_, qk_clip_, warmup_multiplier
from runs import DIVERGED

CAPACITY = 0.005         # two arms whose parameters differ by more than this share do not compare mechanisms alone
CURVE_POINTS = 200
MUON_MOMENTUM = 0.95
FAST, SLOW, SIGHTINGS = 0.9, 0.99, 16   # finding 4: decays of the two averages, batches before an id counts


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes one cell besides its seed and corpus. The defaults are the log's `modern`."""
    max_iters: int = flag(2000, "optimizer steps; warm-up and schedule scale with them", low=1, high=10**9)
    batch_size: int = flag(32, "rows in a batch", low=1, high=2**20)
    seq_len: int = flag(128, "tokens in a row (the log's block size)", low=1, high=2**20)
    n_embd: int = flag(192, "width", low=1, high=2**16)
    n_head: int = flag(6, "attention heads", low=1, high=2**12)
    n_layer: int = flag(4, "layers", low=1, high=1000)
    dropout: float = flag(0.2, "dropout while training", low=0, high=0.999)
    norm: str = flag("rms_affine", "normalisation", choices=("rms", "rms_affine", "layer"))
    pos: str = flag("rope", "positions", choices=("rope", "learned", "none", "alibi", "hard_alibi"))
    attn: str = flag("softmax", "mixer of the tokens", choices=("softmax", "linear", "delta", "gated_delta", "gated_delta_scalar"))
    ffn: str = flag("swiglu", "feed-forward layer", choices=("swiglu", "relu", "relu2", "moe"))
    ffn_hidden: int = flag(0, "hidden width of the feed-forward layer; 0 is its own (8/3 or 4 times the width)", low=0, high=2**20)
    residual: str = flag("plain", "residual connection", choices=("plain", "highway", "highway_scalar"))
    history: bool = flag(False, "Neural History Compressor: a causal summary in mid-stack")
    oe_m: int = flag(0, "base modulus of the OE paper's hashed n-gram tables, added to the token embedding; 0 is off", low=0, high=2**31)
    oe_lr: float = flag(0.012, "their rate: the paper's 0.6 at an embedding of standard deviation 0.02 instead of 1", low=0, high=1e20)
    tie: bool = flag(True, "output layer shares the token embedding")
    bias: bool = flag(False, "biases in the linear layers")
    fast_weight_impl: str = flag("chunk", "form of the delta rules", choices=("chunk", "recurrent"))
    moe_experts: int = flag(4, "experts of --ffn moe", low=1, high=1024)
    moe_top_k: int = flag(1, "experts a token goes to", low=1, high=1024)
    moe_expert_hidden: str = flag("full", "width of an expert: the whole hidden width or its share", choices=("full", "split"))
    moe_router: str = flag("learned", "router of the experts", choices=("learned", "frozen"))
    router_progress: float = flag(0.0, "bias of the router towards experts whose loss falls; 0 is off", low=-1e6, high=1e6)
    optimizer: str = flag("adamw", "muon: Muon on the layers' matrices, AdamW on the rest", choices=("adamw", "muon"))
    adamw_lr: float = flag(3e-4, "AdamW's rate, also beside Muon", low=0, high=1e20)
    muon_lr: float = flag(0.02, "Muon's rate", low=0, high=1e20)
    per_head: bool = flag(False, "Muon head by head")
    qk_clip_tau: float = flag(0.0, "MuonClip's bound on attention logits; 0 is off", low=0, high=1e30)
    grad_topk: float = flag(1.0, "share of every gradient that is kept (meProp); hashed tables keep theirs", low=1e-9, high=1)
    curiosity: float = flag(0.0, "strength of the surprise-weighted auxiliary loss; 0 is off", low=0, high=1e6)
    progress: float = flag(0.0, "strength of the learning-progress weights; 0 is off", low=-1e6, high=1e6)
    schedule: str = flag("cosine", "learning rate after the warm-up", choices=("cosine", "wsd", "linear", "trapezoid"))
    warmup: Optional[int] = flag(None, "steps of warm-up (default: a tenth of --max_iters)", low=0, high=10**9)
    grad_clip: float = flag(1.0, "norm that gradients, hashed tables aside, are clipped to; 0 is off", low=0, high=1e30)
    beta1: float = flag(0.9, "of AdamW", low=0, high=0.9999999)
    beta2: float = flag(0.999, "of AdamW", low=0, high=0.9999999)
    weight_decay: float = flag(0.01, "of AdamW", low=0, high=1e10)
    eval_tokens: int = flag(131_072, "score this many tokens of val; 0 is all", low=0, high=2**53)
    dtype: str = flag("auto", "compute dtype; auto is bfloat16 on CUDA, float32 elsewhere", choices=("auto", "float32", "bfloat16", "float64"))


@dataclass(frozen=True)
class Sweep:
    """Where a sweep reads, writes and computes."""
    data: str = flag(DEFAULT_STORE, "store of data.py, or a text, jsonl or parquet file or a folder of them")
    tokenizer: str = flag("", "tokenizer.json of data.py: encodes --data when that is text, must be its own when that is a store")
    vocab_size: Optional[int] = flag(None, "ids of the tokenizer trained on text (default: 8192)", low=260, high=2**20)
    ref: str = flag("modern", "config that the others are compared with (without modern in the sweep: its first)")
    shard: str = flag("1/1", "i/n: run every n-th cell, beginning with the i-th")
    out: str = flag("results/ablate", "folder of results")
    force: bool = flag(False, "run again and overwrite what was finished before this process began")
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    threads: int = flag(0, "CPU threads; 0 leaves torch's choice", low=0, high=1024)


# ---- configs: name -> flags that differ from `modern` (the log's names, its findings in the comments) ----

HW, POS, NOPE = dict(residual="highway_scalar"), dict(pos="learned"), dict(pos="none")
MATCHED = dict(ffn="moe", moe_expert_hidden="split")
GDN = dict(attn="gated_delta_scalar", **NOPE)


def muon(lr=0.02, **kw):
    """Flags of a config under Muon at this rate."""
    return dict(optimizer="muon", muon_lr=lr, **kw)


MUON_RATES = {"_ulo": 0.0025, "_vlo": 0.005, "_lo": 0.01, "": 0.02, "_hi": 0.04}
DEPTH_RATES = {"lr1e4": 1e-4, "lr2e4": 2e-4, "lr6e4": 6e-4, "lr1200u4": 1.2e-3, "lr2400u4": 2.4e-3}
ADAMW_RATES = {"1e4": 1e-4, "1e3": 1e-3, "3e3": 3e-3, "1e2": 1e-2, "3e2": 3e-2}
TUNED = dict(adamw_lr=3e-2)   # finding 25: what the AdamW side of Muon wants at 3.3M
CONFIGS = {
    "modern": {},                                                                                         # 1, 4
    "baseline": dict(norm="layer", pos="learned", ffn="relu", tie=False, bias=True),                      # 1: all of nanoGPT at once
    "layernorm": dict(norm="layer"), "relu": dict(ffn="relu"), "untied": dict(tie=False),                 # its parts; the fourth is pos
    "highway": dict(residual="highway"), "highway_scalar": HW,                                            # 2
    "hierarchical": dict(history=True), "curiosity": dict(curiosity=0.5),                                 # 3
    "progress": dict(progress=0.5),                                                                       # 4
    "moe": dict(ffn="moe"), "moe_progress": dict(ffn="moe", router_progress=0.5),                         # 5
    "moe_matched": MATCHED, "moe_random": dict(MATCHED, moe_router="frozen"), "ffn_small": dict(ffn_hidden=128),    # 6
    "moe_fine": dict(MATCHED, moe_experts=16, moe_top_k=2), "moe_fine_wide": dict(MATCHED, moe_experts=16, moe_top_k=4),  # 7
    **{f"meprop_{p}": dict(grad_topk=p / 100) for p in (50, 25, 10, 5)},                                  # 8: the doses are ours
    **{f"muon{k}": muon(lr) for k, lr in MUON_RATES.items()},                                             # 9, 10, 13
    # 11: B .. H at Muon's 0.01, the best rate known by then
    "f11_muon": muon(0.01), "f11_highway_muon": muon(0.01, residual="highway"), "f11_moe_muon": muon(0.01, ffn="moe"),
    "f11_highway_moe_muon": muon(0.01, residual="highway", ffn="moe"), "f11_hw_muon": muon(0.01, **HW),
    "f11_moe_matched_muon": muon(0.01, **MATCHED), "f11_hw_moe_matched_muon": muon(0.01, **HW, **MATCHED),
    "muon_vlo_wsd": muon(0.005, schedule="wsd"), "muon_lo_wsd": muon(0.01, schedule="wsd"), "modern_wsd": dict(schedule="wsd"),  # 12
    "muon_ph_ulo2": muon(0.00125, per_head=True), **{f"muon_ph{k}": muon(lr, per_head=True) for k, lr in MUON_RATES.items()},  # 13, 15
    **{f"muonclip{k}": muon(lr, qk_clip_tau=100.0) for k, lr in MUON_RATES.items()},                      # 14
    **{f"d{n}_{k}": dict(n_layer=n, **r) for n in (4, 8, 16, 32) for k, r in (("plain", {}), ("hw", HW))},  # 16
    "pos": POS, "delta": dict(attn="delta", **POS), "gated_delta": dict(attn="gated_delta", **POS),       # 17
    "pos_none": NOPE, "delta_nope": dict(attn="delta", **NOPE), "gated_delta_nope": GDN,                  # 18
    "gated_delta_scalar": dict(attn="gated_delta_scalar", **POS),                                         # 18, 19
    "linear": dict(attn="linear", **POS), "linear_nope": dict(attn="linear", **NOPE),                     # 20
    "alibi": dict(pos="alibi"), "hard_alibi": dict(pos="hard_alibi"), "gated_delta_none": dict(attn="gated_delta", **NOPE),
    **{f"d{n}_{k}_{name}": dict(n_layer=n, adamw_lr=lr, **r)                                              # 21
       for n in (4, 32) for k, r in (("plain", {}), ("hw", HW)) for name, lr in DEPTH_RATES.items()},
    "gdn_hw": dict(GDN, **HW), "hw_muon": muon(0.005, **HW), "gdn_muon": muon(0.005, **GDN), "gdn_hw_muon": muon(0.005, **GDN, **HW),  # 22
    **{f"gdn_muon_{k}": muon(lr, **GDN) for k, lr in (("xxlo", 0.000625), ("xlo", 0.00125), ("ulo", 0.0025), ("lo", 0.01))},
    "modern_ctx512": dict(seq_len=512), "softmax_nope_ctx512": dict(seq_len=512, **NOPE),                 # 23
    "gd_ctx512": dict(seq_len=512, attn="gated_delta", **NOPE), "gds_ctx512": dict(seq_len=512, **GDN),
    "gds_ctx512_learned": dict(seq_len=512, attn="gated_delta_scalar", **POS), "gds_ctx512_wide": dict(seq_len=512, ffn_hidden=555, **GDN),
    "hw_ctx512": dict(seq_len=512, **HW), "gdn_hw_ctx512": dict(seq_len=512, **GDN, **HW),                # 24
    "gdn_hw_muon_ulo": muon(0.0025, **GDN, **HW), "gdn_hw_muon_lo": muon(0.01, **GDN, **HW),
    **{f"adamw_{k}": dict(adamw_lr=lr) for k, lr in ADAMW_RATES.items()},                                 # 25
    "muon_05": muon(0.05), "muon_05_adamw_3e2": muon(0.05, **TUNED),
    **{f"muon{k}_adamw_3e2": muon(lr, **TUNED) for k, lr in (("_vlo", 0.005), ("_lo", 0.01), ("_hi", 0.04), ("_vhi", 0.08))},
    "arch2_plain": muon(**TUNED), "arch2_hw": muon(**TUNED, **HW), "arch2_moe": muon(**TUNED, ffn="moe"), "arch2_moe_matched": muon(**TUNED, **MATCHED),
    **{f"muon_adamw_{k}": muon(adamw_lr=lr) for k, lr in ADAMW_RATES.items() if k != "1e4"},              # 25, 26
    "muon01_adamw3e4": muon(0.01),                                                                        # 26, at the 29M size
    "gds_ctx512_rope": dict(seq_len=512, attn="gated_delta_scalar"),     # 23: cannot exist, and is refused
}
REFUSED = ("gds_ctx512_rope",)
# name in CONFIGS -> name in published/ablate.json, where they differ; rates tell the rows apart
PRINTED = {"f11_muon": "B muon", "f11_moe_muon": "D moe+muon", "f11_highway_moe_muon": "E highway+moe+muon", "f11_hw_muon": "F highway-scalar+muon",
           "f11_moe_matched_muon": "G moe-matched+muon", "f11_hw_moe_matched_muon": "H highway-scalar+moe-matched+muon", "arch2_plain": "muon",
           "muon_vlo_wsd": "", "muon_lo_wsd": "", "modern_wsd": ""}   # finding 12 is another model, corpus and metric
FAMILIES = ("gdn_hw_muon", "gdn_muon", "muonclip", "muon_ph", "muon", "adamw", "d4_plain", "d4_hw", "d32_plain", "d32_hw")


@functools.cache
def _findings():
    return json.loads((common.ROOT / "published" / "ablate.json").read_text(encoding="utf-8"))["findings"]


def published(name):
    """The row of published/ablate.json for a config (dict: val_loss or range, finding, setting), or None where the log's table is lost."""
    cell = cell_of(Recipe(), name)
    family = next((f for f in FAMILIES if name == f or name.startswith(f + "_")), name)
    family = PRINTED.get(name, {"muon_ph": "muon_perhead"}.get(family, family))

    def fits(row):
        side = row.get("adamw_lr") or (cell.adamw_lr if cell.optimizer == "adamw" else 3e-4)
        lr = cell.muon_lr if cell.optimizer == "muon" else cell.adamw_lr
        size = row.get("size") in (None, "3.4M")
        return row["arm"] in (name, family) and row.get("lr") in (None, lr) and side == cell.adamw_lr and size
    found = [row for row in _findings() if fits(row)]
    return min(found, key=lambda row: (row["arm"] != name, row["setting"] == "old128"), default=None)


def cell_of(recipe, arm):
    """The Recipe of a config: the flags given, then the config's own. UserError for a row of CONFIGS with an unknown flag."""
    if unknown := CONFIGS[arm].keys() - {f.name for f in dataclasses.fields(Recipe)}:
        raise UserError(f"config {arm} of CONFIGS: there is no flag {', '.join(sorted(unknown))}; --help lists them")
    return dataclasses.replace(recipe, **CONFIGS[arm])


def model_config(cell, vocab_size):
    """GPTConfig of a Recipe; UserError for a combination that cannot be."""
    names = ("n_embd", "n_head", "n_layer", "dropout", "norm", "pos", "attn", "ffn", "residual", "ffn_hidden", "tie", "bias", "history", "moe_experts",
             "moe_top_k", "moe_expert_hidden", "moe_router", "router_progress", "fast_weight_impl", "oe_m")
    return GPTConfig.modern(sequence_len=cell.seq_len, vocab_size=vocab_size, **{k: getattr(cell, k) for k in names})


@functools.cache
def _count(config):
    with torch.device("meta"):
        return GPT(config).num_params()["total"]


def count_params(cell, vocab_size):
    """Parameters of a cell's model, without giving it memory."""
    return _count(model_config(cell, vocab_size))


# ---- data ----

@dataclass(frozen=True)
class Corpus:
    """What a sweep reads: token ids of train and val (1-D), bytes of every id, digest of corpus and tokenizer."""
    train: np.ndarray
    val: np.ndarray
    token_bytes: np.ndarray
    digest: str

    @property
    def vocab_size(self):
        return len(self.token_bytes)


def load_tokenizer(path):
    """A tokenizer that data.py wrote; UserError for any other file."""
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as err:  # tokenizers raises plain Exception
        raise UserError(f"--tokenizer {path} is no tokenizer.json ({' '.join(str(err).split())[:80]})") from None
    n = tokenizer.get_vocab_size()
    if tuple(tokenizer.id_to_token(i) for i in range(n - len(data.SPECIALS), n)) != data.SPECIALS:
        raise UserError(f"--tokenizer {path} was not written by data.py (its last ids are not {', '.join(data.SPECIALS)})")
    tokenizer.encode_special_tokens = True   # the file does not keep it: the text "<|bos|>" is text
    return tokenizer


def encode_text(path, tokenizer_path):
    """Corpus of text files under a given tokenizer, split as data.py splits them."""
    tokenizer, notes = load_tokenizer(tokenizer_path), Counter()
    files, _ = data.path_files([path])
    parts, token_bytes = data.split_documents(files, [], notes), data.count_token_bytes(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        data.write_tokens(Path(folder), parts(), tokenizer, token_bytes, notes["chars"])
        np.save(Path(folder) / "token_bytes.npy", token_bytes, allow_pickle=False)   # the digest is that of a store with these files
        kept = {p.name: {"sha256": data.sha256_of(p)} for p in Path(folder).iterdir()}
        kept["tokenizer.json"] = {"sha256": data.sha256_of(tokenizer_path)}
        dtype = "<u2" if len(token_bytes) <= 65536 else "<u4"
        train, val = (np.fromfile(Path(folder) / f"{name}.bin", dtype=dtype) for name in ("train", "val"))
    warn_of_bytes(notes["invalid_utf8"], path)
    return Corpus(train, val, token_bytes, data.digest_of(kept))


def warn_of_bytes(documents, path):
    """Say on stderr that some documents were no UTF-8."""
    if documents:
        print(f"note: invalid UTF-8 was replaced in {documents} documents of {path}", file=sys.stderr)


def open_corpus(sweep):
    """Corpus of --data, --tokenizer and --vocab_size: an existing store, text that becomes one, or text under a given tokenizer."""
    path = Path(sweep.data)
    is_store = sweep.data == DEFAULT_STORE or any((path / name).exists() for name in ("meta.json", "train.bin", "token_bytes.npy"))   # even a broken one
    if not is_store and sweep.tokenizer:
        if sweep.vocab_size:
            raise UserError("--vocab_size is for a tokenizer trained on --data; --tokenizer brings its own")
        return encode_text(sweep.data, sweep.tokenizer)
    if is_store and sweep.vocab_size:
        raise UserError(f"--vocab_size is for a tokenizer trained on text; the store {sweep.data} has its own: leave the flag out, or name text with --data")
    store = open_store(sweep.data if is_store else prepare([sweep.data], sweep.vocab_size or 8192))
    if not is_store:
        warn_of_bytes(store.meta["invalid_utf8_documents"], path)
    if sweep.tokenizer:
        load_tokenizer(sweep.tokenizer)
        if data.sha256_of(sweep.tokenizer) != store.meta["files"]["tokenizer.json"]["sha256"]:
            raise UserError(f"--tokenizer {sweep.tokenizer} is not the one that the store {sweep.data} was encoded with; leave it out, or give text")
    return Corpus(store.train, store.val, store.token_bytes, store.digest)


def fixed_windows(tokens, batch_size, seq_len, max_tokens=0):
    """Yield (inputs, targets) LongTensors [B, T] of consecutive windows, nanoGPT's x and y: the same for every cell; the last batch may be smaller."""
    rows = (min(len(tokens), max_tokens + 1 if max_tokens else len(tokens)) - 1) // seq_len
    for i in range(0, rows, batch_size):
        n = min(batch_size, rows - i)
        part = np.asarray(tokens[i * seq_len:(i + n) * seq_len + 1]).astype(np.int64)
        yield torch.from_numpy(part[:-1].reshape(n, seq_len)), torch.from_numpy(part[1:].reshape(n, seq_len))


# ---- losses ----

class Progress:
    """Learning-progress weights (finding 4): 1 + strength * z, at least 0, scaled to mean 1 over the batch.

    Every target id has a fast (0.9) and a slow (0.99) average of its mean nats in the batches it was seen in; both start at the first. z is
    slow - fast, standardised over the batch's tokens: positive where the loss falls (the log prints fast minus slow and means the falling
    loss to weigh more; a negative strength turns it round). Ids seen in fewer than 16 earlier batches have z = 0.
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
        here, first = count > 0, (count > 0) & (self.seen == 0)
        for average, decay in ((self.fast, FAST), (self.slow, SLOW)):
            average.copy_(torch.where(first, mean, torch.where(here, decay * average + (1 - decay) * mean, average)))
        self.seen += here


def training_loss(model, x, y, cell, progress, trace=None):
    """The scalar that a step descends."""
    if not cell.curiosity and not cell.progress:
        return model(x, y, trace=trace)
    nats = model(x, y, reduction="none", trace=trace)
    loss = nats.mean()
    if cell.progress:
        loss = (progress.weights(y) * nats).mean()
        progress.update(y, nats)
    if cell.curiosity:
        surprise = nats.detach()
        loss = loss + cell.curiosity * (surprise / surprise.mean() * nats).mean()
    return loss


# ---- one cell ----

def optimizers(model, cell):
    """[AdamW] or, for Muon, [AdamW of what is no layer's matrix, MuonAdamW of the rest], then hashed tables; every parameter once, lr as initial_lr."""
    layers, rest, tables, heads = [], [], [], {-2: [], -1: []}
    for name, role, p in model.roles():
        if not p.requires_grad:
            continue
        if role == "oe":
            tables.append(p)
        elif cell.optimizer == "adamw" or role != "matrix" or not name.startswith("blocks."):
            rest.append(p)
        elif cell.per_head and ".attn." in name and name.split(".")[-2] in ("c_q", "c_k", "c_v", "c_proj"):
            heads[-1 if "c_proj" in name else -2].append(p)
        else:
            layers.append(p)
    made = [torch.optim.AdamW(rest, lr=cell.adamw_lr, betas=(cell.beta1, cell.beta2), weight_decay=cell.weight_decay, fused=True)]
    if cell.optimizer == "muon":
        shared = dict(kind="muon", lr=cell.muon_lr, momentum=MUON_MOMENTUM, normuon=False)
        groups = [dict(shared, params=layers)] + [dict(shared, params=ps, heads=cell.n_head, head_axis=axis) for axis, ps in heads.items()]
        made.append(MuonAdamW([g for g in groups if g["params"]]))
    if tables:
        made.append(MuonAdamW([dict(kind="oe", lr=cell.oe_lr, params=tables)]))
    for opt in made:
        for group in opt.param_groups:
            group["initial_lr"] = group["lr"]
    return made


@torch.no_grad()
def logit_peaks(trace, pos="rope"):
    """Largest attention logit that every head [H] of every layer can use, before any bias of positions, from the trace of a forward pass."""
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


def clip_logits(model, trace, tau):
    """MuonClip on every layer after a step, from that step's trace."""
    for block, peak in zip(model.blocks, logit_peaks(trace, model.cfg.pos)):
        qk_clip_(block.attn.c_q.weight, block.attn.c_k.weight, peak, tau)
        if block.attn.c_q.bias is not None:
            qk_clip_(block.attn.c_q.bias, block.attn.c_k.bias, peak, tau)


def train_step(model, made, x, y, cell, step, progress, autocast):
    """One optimizer step on inputs and targets [B, T]; returns the loss."""
    warmup = round(cell.max_iters / 10) if cell.warmup is None else cell.warmup
    multiplier = warmup_multiplier(step, cell.max_iters, warmup, cell.schedule)
    for opt in made:
        for group in opt.param_groups:
            group["lr"] = group["initial_lr"] * multiplier
    trace = {} if cell.qk_clip_tau else None
    with autocast:
        loss = training_loss(model, x, y, cell, progress, trace)
    loss.backward()
    params = [p for p in model.parameters() if p.grad is not None and not hasattr(p, "visits")]   # tables normalise their own rows
    if cell.grad_topk < 1:
        keep_topk_([p.grad for p in params], cell.grad_topk)
    if cell.grad_clip:
        torch.nn.utils.clip_grad_norm_(params, cell.grad_clip)
    for opt in made:
        opt.step()
        opt.zero_grad()
    if trace is not None:
        clip_logits(model, trace, cell.qk_clip_tau)
    return loss.item()


@functools.cache
def _env(device):
    return common.env_record(device)   # of the sources as they were loaded, not as they are when a long sweep ends


def train_cell(cell, arm, seed, corpus, device, run="", on_step=lambda step, loss: False):
    """Train and score one cell; returns its result record. on_step(step, loss) ends it early by returning True: status "stopped"."""
    dtype = common.pick_dtype(cell.dtype, device)
    model = GPT(model_config(cell, corpus.vocab_size)).init_weights(seed).to(device=device)
    model = model.double() if dtype == torch.float64 else model
    model.train()
    made = optimizers(model, cell)
    batches = RandomBatches(corpus.train, cell.batch_size, cell.seq_len, derive_seed("ablate batches", seed))
    torch.manual_seed(derive_seed("ablate dropout", seed))
    progress = Progress(corpus.vocab_size, cell.progress, device)
    autocast, every = common.autocast(device, dtype), max(1, cell.max_iters // CURVE_POINTS)
    curve, status, steps, start = [], "finished", 0, time.perf_counter()
    for step in range(cell.max_iters):
        x, y = (z.to(device, non_blocking=True) for z in batches.next())
        loss = train_step(model, made, x, y, cell, step, progress, autocast)
        steps = step + 1
        if step % every == 0 or steps == cell.max_iters or not loss <= DIVERGED:
            curve.append([step, loss])
        if not loss <= DIVERGED:
            status = "diverged"
            break
        if on_step(step, loss):
            status = "stopped"
            break
    train_s, metrics = time.perf_counter() - start, {}
    if status == "finished":
        with autocast:
            found = evaluate_bpb(model, fixed_windows(corpus.val, cell.batch_size, cell.seq_len, cell.eval_tokens), corpus.token_bytes, device)
        metrics = {f"val_{key}": value for key, value in found.items()}
        if not math.isfinite(metrics["val_loss"]):  # destroyed by its last update
            status, metrics = "diverged", {}
    tokens = steps * cell.batch_size * cell.seq_len
    config = {**dataclasses.asdict(cell), "dtype": str(dtype).split(".")[1], "data_digest": corpus.digest, "vocab_size": corpus.vocab_size}
    return common.result_record(
        script="ablate.py", run=run, arm=arm, status=status, config=config, depth=cell.n_layer, width=cell.n_embd, seed=seed,
        params=model.num_params(), steps=steps, tokens=tokens, metrics=metrics, curve=curve,
        timing={"train_s": train_s, "tok_per_s": tokens / train_s, "peak_mem_mib": common.peak_mem_mib(device)}, env=_env(device))


# ---- the sweep ----

@dataclass(frozen=True)
class Cell:
    """One config with one seed: what a process locks, computes and writes."""
    arm: str
    seed: int
    recipe: Recipe
    path: Path


def run_name(recipe, arm, seed):
    """<arm>_i<max_iters>_seed<seed>, with the hash of the recipe flags that were given."""
    cell, plain = cell_of(recipe, arm), cell_of(Recipe(max_iters=recipe.max_iters), arm)
    off = ({"muon_lr"} if cell.optimizer != "muon" else set()) | ({"oe_lr"} if not cell.oe_m else set())
    flags = {k: v for k, v in dataclasses.asdict(cell).items() if k not in off}
    return common.run_name(f"{arm}_i{cell.max_iters}_seed{seed}", flags, dataclasses.asdict(plain))


def make_cells(recipe, arms, seeds, out):
    """[Cell], seeds outermost: a sweep that is cut short has all configs of its first seeds."""
    return [Cell(arm, seed, cell_of(recipe, arm), Path(out) / f"{run_name(recipe, arm, seed)}.json") for seed in seeds for arm in arms]


def read_shard(text):
    """(i, n) of "i/n", 1 <= i <= n."""
    if not (found := re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)) or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"--shard {text[:40]} is no shard; write i/n with i from 1 to n, such as 1/4")
    return int(found[1]), int(found[2])


def read_result(cell, corpus, device):
    """The record of a finished cell, or None. UserError when the file is damaged or is not this cell's."""
    if not cell.path.exists():
        return None
    expected = {**dataclasses.asdict(cell.recipe), "dtype": common.dtype_name(cell.recipe.dtype, device)}
    with common.reading(cell.path, "result"):
        record = json.loads(cell.path.read_text(encoding="utf-8"))
        config, plain = record["config"], Recipe()
        other = [k for k, v in expected.items() if config.get(k, getattr(plain, k)) != v]   # a flag added later had its default
        other += [k for k, v in (("arm", cell.arm), ("seed", cell.seed)) if record[k] != v]
        same = config["data_digest"] == corpus.digest
        if record["status"] not in ("finished", "diverged"):
            raise ValueError(record["status"])
        float(record["params"]["total"]), record["timing"]["train_s"]
        if record["status"] == "finished":
            float(record["metrics"]["val_loss"]), float(record["metrics"]["val_bpb"] or 0)   # null: the scored tokens hold no bytes
    if not same or other:
        what = f"{other[0]} is not this sweep's" if same else "it was computed on another corpus or tokenizer"
        raise UserError(f"{cell.path}: {what}; name another --out, or overwrite it with --force")
    return record


class Meter:
    """Progress over the whole sweep: a bar in iterations of the cheapest cell, or a line per cell where there is no terminal."""

    def __init__(self, cells, vocab_size):
        self.cost = {c: self._weight(c.recipe, vocab_size) for c in cells}
        least = min(self.cost.values(), default=1)
        self.cost = {c: w / least for c, w in self.cost.items()}
        self.cells, self.done, self.known = len(cells), 0, set()   # known: how they ended has been taken into account
        self.ended, self.elsewhere = 0.0, 0.0                      # iterations computed here, and by other processes meanwhile
        self.bar = tqdm(total=round(sum(self.cost[c] * c.recipe.max_iters for c in cells)), unit="it", disable=None,
                        bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}")
        self.start = time.perf_counter()

    @staticmethod
    def _weight(r, vocab_size):
        return count_params(r, vocab_size) * r.batch_size * r.seq_len

    def step(self, cell, step, loss):
        """One iteration of a cell is done."""
        self.bar.n = min(self.bar.total, round(self.ended + self.cost[cell] * (step + 1)))
        self.bar.set_postfix_str(f"cell {self.done + 1}/{self.cells} {cell.arm} seed {cell.seed} step {step + 1} loss {loss:.3f}", refresh=False)
        self.bar.update(0)

    def finish(self, cell, record):
        """A cell is done: say how it ended and how long the rest will take."""
        self.done += 1
        self.known.add(cell)
        self.bar.total -= round(self.cost[cell] * (cell.recipe.max_iters - record["steps"]))   # a diverged cell ends early
        self.ended += self.cost[cell] * record["steps"]
        self.bar.n = min(self.bar.total, round(self.ended))
        ended = f"val {record['metrics']['val_loss']:.4f}" if record["metrics"] else record["status"]
        spent = time.perf_counter() - self.start
        left = spent * max(0.0, self.bar.total - self.ended) / (self.ended + self.elsewhere)
        self.bar.write(f"[{self.done}/{self.cells}] {cell.arm} seed {cell.seed}: {ended}, {record['timing']['train_s']:.0f} s; "
                       f"about {left / 60:.0f} min left", file=sys.stdout)
        sys.stdout.flush()

    def skip(self, cell):
        """Another process has computed this cell."""
        if cell not in self.known:
            self.known.add(cell)
            self.bar.total -= round(self.cost[cell] * cell.recipe.max_iters)
            self.elsewhere += self.cost[cell] * cell.recipe.max_iters
            self.cells -= 1

    def close(self):
        self.bar.close()


def run_cells(cells, corpus, device, force, vocab_size):
    """Compute the cells that nobody has finished or is computing; returns "finished", "elsewhere" or "stopped".

    A cell is taken under a lock and looked for once more behind it, so that no two processes compute it; what others hold is tried
    again after the rest. force: results from before this call do not count.
    """
    begun = time.time()

    def ready(cell):
        old = force and (not cell.path.exists() or cell.path.stat().st_mtime < begun)
        return not old and read_result(cell, corpus, device) is not None

    with common.stop_requests() as stop:
        pending = [c for c in cells if not ready(c)]
        meter = Meter(pending, vocab_size)
        if len(cells) > len(pending):
            print(f"{len(cells) - len(pending)} of {len(cells)} cells are already finished", flush=True)
        while pending:
            busy = []
            for cell in pending:
                with ExitStack() as stack:
                    try:
                        stack.enter_context(common.locked(cell.path))
                    except common.Busy:
                        busy.append(cell)
                        continue
                    if ready(cell):
                        meter.skip(cell)
                        continue
                    record = train_cell(cell.recipe, cell.arm, cell.seed, corpus, device, cell.path.stem,
                                        lambda step, loss: meter.step(cell, step, loss) or bool(stop))
                    if record["status"] != "stopped":
                        common.write_json(cell.path, record)
                        for other in pending:
                            if other is not cell and other not in meter.known and ready(other):
                                meter.skip(other)
                        meter.finish(cell, record)
                if stop:
                    meter.close()
                    return "stopped"
            if len(busy) == len(pending):
                break
            pending = busy
    meter.close()
    if pending:
        print(f"{len(pending)} cells are being computed by other processes: " + ", ".join(f"{c.arm} seed {c.seed}" for c in pending))
    return "elsewhere" if pending else "finished"


# ---- the table ----

def separated(a, b):
    """True when the ranges of two lists do not overlap; None with fewer than two values in either."""
    return None if min(len(a), len(b)) < 2 else max(a) < min(b) or max(b) < min(a)


def summarise(arms, seeds, results, ref):
    """[row] in the order of arms from {(arm, seed): record}: params, values by seed, mean, sd (n - 1), range, and the comparison with ref.

    delta is the mean difference over the seeds that both have finished. A diverged seed is worse than any value where ranges are
    compared. Rows of another block size than ref's are not compared.
    """
    rows = []
    for arm in arms:
        found = {s: results[arm, s] for s in seeds if (arm, s) in results}
        values = {s: r["metrics"]["val_loss"] for s, r in found.items() if r["status"] == "finished"}
        bpb = [b for r in found.values() if r["status"] == "finished" and (b := r["metrics"]["val_bpb"]) is not None]
        v, any_record = list(values.values()), next(iter(found.values()), None)
        rows.append({"arm": arm, "params": any_record and any_record["params"]["total"], "seq_len": any_record and any_record["config"]["seq_len"],
                     "per_seed": values, "diverged": sorted(s for s, r in found.items() if r["status"] == "diverged"),
                     "missing": [s for s in seeds if s not in found], "mean": statistics.fmean(v) if v else None,
                     "sd": statistics.stdev(v) if len(v) > 1 else None, "min": min(v, default=None), "max": max(v, default=None),
                     "val_bpb": statistics.fmean(bpb) if bpb else None, "delta": None, "separated": None})
    base = next((r for r in rows if r["arm"] == ref), None)
    for row in rows:
        if base and row is not base and row["seq_len"] == base["seq_len"]:
            ours, theirs = with_diverged(row), with_diverged(base)
            pairs = [(ours[s], theirs[s]) for s in seeds if s in ours and s in theirs]
            if both := [p for p in pairs if math.inf not in p]:
                row["delta"] = statistics.fmean(a - b for a, b in both)
                row["separated"] = separated(*map(list, zip(*pairs)))
    return rows


def with_diverged(row):
    """{seed: value} of a row, infinity for its diverged seeds."""
    return {**row["per_seed"], **dict.fromkeys(row["diverged"], math.inf)}


def warnings(rows, recipe, ref):
    """Lines about what the table does not license: unequal sizes, rate brackets whose best is at the edge, seeds without a value."""
    lines, base = [], next((r for r in rows if r["arm"] == ref), None)
    for row in rows:
        if row["delta"] is not None and abs(row["params"] - base["params"]) > CAPACITY * base["params"]:
            lines.append(f"capacity confound: {row['arm']} has {row['params'] / base['params'] - 1:+.1%} of {ref}'s parameters")
        if row["diverged"]:
            lines.append(f"diverged: {row['arm']}, seed {', '.join(map(str, row['diverged']))}; not in its mean, worse than any value in its range")
        if row["missing"]:
            lines.append(f"not finished: {row['arm']}, seed {', '.join(map(str, row['missing']))}; compared over the other seeds")
        if row["seq_len"] and base and base["seq_len"] and row["seq_len"] != base["seq_len"]:
            lines.append(f"not compared: {row['arm']} reads rows of {row['seq_len']} tokens, {ref} of {base['seq_len']}; use --ref")
    return lines + edges(rows, recipe)


def edges(rows, recipe):
    """A line for every bracket (configs equal but for one rate) whose best mean is at its lowest or highest rate.

    A rate at which a seed diverged is worse than any other: it closes the bracket on its side.
    """
    brackets = {}
    for row in rows:
        if not with_diverged(row):
            continue
        flags = dataclasses.asdict(cell_of(recipe, row["arm"]))
        if flags["optimizer"] == "adamw":
            flags.pop("muon_lr")
        for key in {"muon_lr", "adamw_lr"} & flags.keys():
            rest = json.dumps({k: v for k, v in flags.items() if k != key}, sort_keys=True)
            brackets.setdefault((key, rest), []).append((flags[key], row))
    lines = []
    for (key, _), points in brackets.items():
        shared = set.intersection(*[set(with_diverged(row)) for _, row in points])
        scores = [statistics.fmean(v for s, v in with_diverged(row).items() if s in shared or not shared) for _, row in points]
        rates, (rate, row) = sorted({r for r, _ in points}), points[scores.index(min(scores))]
        if len(rates) > 1 and rate in (rates[0], rates[-1]) and min(scores) < math.inf:
            lines.append(f"edge of bracket: {row['arm']} is best at the {'lowest' if rate == rates[0] else 'highest'} of "
                         f"{key} {', '.join(f'{r:g}' for r in rates)}; extend it before reading a best")
    return lines


def print_table(rows, ref):
    """The arms with their means over seeds, and how they stand to ref."""
    word = {True: "yes", False: "no", None: "-"}
    number = lambda v, form: "-" if v is None else format(v, form)
    print(f"{'arm':24} {'params':>11} {'val loss':>9} {'sd':>7} {'min':>8} {'max':>8} {'n':>2} {'val bpb':>8} {'- ' + ref:>12}  separated")
    for r in rows:
        print(f"{r['arm']:24} {number(r['params'], ','):>11} {number(r['mean'], '.4f'):>9} {number(r['sd'], '.4f'):>7} {number(r['min'], '.4f'):>8} "
              f"{number(r['max'], '.4f'):>8} {len(r['per_seed']):2} {number(r['val_bpb'], '.4f'):>8} {number(r['delta'], '+.4f'):>12}  "
              f"{'' if r['arm'] == ref else word[r['separated']]}")
    print("sd: n - 1; separated: the seed ranges do not overlap (the log's rule; for paired intervals: python stats.py OUT/*.json)")


def report(recipe, sweep, arms, seeds, corpus, device):
    """Read every finished cell of the sweep, print table and warnings, write OUT/summary/<name>.json."""
    cells, ref = make_cells(recipe, arms, seeds, sweep.out), sweep.ref if sweep.ref in arms else arms[0]
    identity = {"recipe": dataclasses.asdict(recipe), "arms": arms, "seeds": seeds, "data_digest": corpus.digest, "ref": ref}
    name = f"{arms[0]}{f'+{len(arms) - 1}' if len(arms) > 1 else ''}_i{recipe.max_iters}-{common.config_hash(identity)}"
    path = Path(sweep.out) / "summary" / f"{name}.json"
    with common.locked(path, wait=True):   # or a process that read before the last cell was there could write after the one that has it
        results = {(c.arm, c.seed): r for c in cells if (r := read_result(c, corpus, device))}
        rows = summarise(arms, seeds, results, ref)
        lines = warnings(rows, recipe, ref)
        common.write_json(path, {"kind": "ablate summary", **identity, "rows": rows, "warnings": lines, "cells": [c.path.name for c in cells]})
    print_table(rows, ref)
    for line in lines:
        print(f"warning: {line}")
    print(f"{path}")


# ---- command line ----

def list_configs(recipe, vocab_size, as_json=False):
    """Print every config: what differs from modern, its parameters and, for the log's recipe, the published validation loss."""
    rows = []
    for name, flags in CONFIGS.items():
        try:
            params, why = count_params(cell_of(recipe, name), vocab_size), None
        except UserError as err:
            params, why = None, str(err)
        row = published(name) if recipe == Recipe() else None   # the log's values are those of its own recipe
        rows.append({"config": name, "flags": flags, "params": params, "refused": why, "published": row and (row.get("val_loss") or row.get("range")),
                     "finding": row and row["finding"], "setting": row and row["setting"]})
    if as_json:
        return print(json.dumps(rows))
    print(f"{'config':24} {'params':>11} {'published':>12} {'finding':>7} {'setting':12}  flags (the log's validation loss in nats; other corpora, other levels)")
    for r in rows:
        shown = "-" if r["published"] is None else "..".join(f"{v:.3f}" for v in r["published"]) if isinstance(r["published"], list) else f"{r['published']:.4f}"
        print(f"{r['config']:24} {r['params'] or 0:11,} {shown:>12} {r['finding'] or '-':>7} {r['setting'] or '-':12}  "
              f"{common.show_flags(r['flags']) or '(the defaults)'}{'  refused: ' + r['refused'] if r['refused'] else ''}")


def parse(argv=None):
    """(Recipe, Sweep, configs, seeds) from the command line, or None after --list."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--configs", nargs="+", action=common._Once, metavar="CONFIG", help="configs of the sweep (default: modern); --list prints them")
    parser.add_argument("--seeds", nargs="+", action=common._Once, metavar="SEED", type=common._number(int), help="seeds of every config (default: 0 1 2)")
    common.add_flags(parser, Recipe)
    common.add_flags(parser, Sweep)
    parser.add_argument("--list", "--list_configs", "--list-configs", dest="list", action="store_true", help="print every config, its flags, parameters and published value")
    parser.add_argument("--json", action="store_true", help="with --list: print JSON")
    given = vars(parser.parse_args(argv))
    asked = set(given)
    listing, as_json = given.pop("list", False), given.pop("json", False)
    arms, seeds = given.pop("configs", ["modern"]), given.pop("seeds", [0, 1, 2])
    fields = {f.name for f in dataclasses.fields(Recipe)}
    recipe = Recipe(**{k: v for k, v in given.items() if k in fields})
    sweep = Sweep(**{k: v for k, v in given.items() if k not in fields})
    common.check_bounds(recipe)
    common.check_bounds(sweep)
    if as_json and not listing:
        raise UserError("--json goes with --list; results are always written as JSON")
    if listing:
        if useless := sorted({"configs", "seeds", *(f.name for f in dataclasses.fields(Sweep))} - {"vocab_size"} & asked):
            raise UserError(f"--list runs nothing: leave out --{useless[0]}")
        return list_configs(recipe, sweep.vocab_size or 8192, as_json)
    check_names(arms, seeds, sweep)
    if "ref" in asked and sweep.ref not in arms:
        raise UserError(f"--ref {sweep.ref} is not in the sweep; add it to --configs")
    check_effects({k: v for k, v in given.items() if k in fields}, recipe, arms)
    return recipe, sweep, arms, seeds


def check_names(arms, seeds, sweep):
    """UserError for configs, seeds or folders that cannot be meant."""
    for name in arms:
        if name not in CONFIGS:
            raise UserError(f"--configs {name} is unknown; --list prints them")
    for what, values in (("--configs", arms), ("--seeds", seeds)):
        if twice := [str(v) for v, n in Counter(values).items() if n > 1]:
            raise UserError(f"{what} {', '.join(twice)} is given twice; a cell runs once")
    if bad := [s for s in seeds if not 0 <= s < 2**63]:
        raise UserError(f"--seeds {bad[0]} is out of range; seeds go from 0 to 2^63 - 1")
    if sweep.ref not in CONFIGS:
        raise UserError(f"--ref {sweep.ref} is unknown; --list prints the configs")
    if not sweep.out or not sweep.data:
        raise UserError("an empty --out or --data would mean the current folder; write . for it")
    read_shard(sweep.shard)


def check_effects(given, recipe, arms):
    """UserError for recipe flags that would change nothing, and for combinations of flags that act outside the model."""
    cells = {arm: cell_of(recipe, arm) for arm in arms}
    uses = {"muon_lr": (lambda c: c.optimizer == "muon", "no config that takes it uses Muon"),
            "oe_lr": (lambda c: c.oe_m, "no config of the sweep has hashed tables; add --oe_m")}
    for k, v in given.items():
        takers, (used, why) = [cell for cell in cells.values() if getattr(cell, k) == v], uses.get(k, (bool, ""))
        if not takers:
            raise UserError(f"--{k} {v} has no effect: every config of the sweep sets its own; leave it out")
        if not any(map(used, takers)):
            raise UserError(f"--{k} has no effect: {why}")
        if keepers := [f"{arm} ({getattr(cell, k)})" for arm, cell in cells.items() if getattr(cell, k) != v]:
            print(f"note: --{k} {v} does not act on {', '.join(keepers)}: a config's own flags win", file=sys.stderr)
    for arm, cell in cells.items():
        try:
            common.check_bounds(cell)
        except UserError as err:
            raise UserError(f"config {arm}: {err}") from None
        if (cell.warmup or 0) > cell.max_iters:
            raise UserError(f"config {arm}: a warm-up of {cell.warmup} steps does not fit into --max_iters {cell.max_iters}")
        if cell.per_head and cell.optimizer != "muon":
            raise UserError(f"config {arm}: per_head is Muon's; add --optimizer muon")
        if cell.qk_clip_tau and cell.attn != "softmax":
            raise UserError(f"config {arm}: qk_clip_tau bounds the logits of softmax attention; {cell.attn} has none")
        if cell.ffn == "moe" and (cell.curiosity or cell.progress):
            raise UserError(f"config {arm}: curiosity and progress weigh tokens one by one, without the routers' balance loss; use a dense ffn")


def check_cells(cells, corpus):
    """UserError before any training: combinations the model refuses, rows longer than the data."""
    for cell in {c.arm: c for c in cells}.values():
        try:
            model_config(cell.recipe, corpus.vocab_size)
        except UserError as err:
            raise UserError(f"config {cell.arm}: {err}") from None
        for split, tokens in (("train", corpus.train), ("val", corpus.val)):
            if len(tokens) < cell.recipe.seq_len + 1:
                raise UserError(f"config {cell.arm}: rows of {cell.recipe.seq_len} tokens do not fit into the {len(tokens)} tokens of {split}; "
                                "use more text or a smaller --seq_len")
        if 0 < cell.recipe.eval_tokens < cell.recipe.seq_len:
            raise UserError(f"config {cell.arm}: --eval_tokens {cell.recipe.eval_tokens} is less than one row of {cell.recipe.seq_len}")


def main(argv=None):
    parsed = parse(argv)
    if parsed is None:
        return 0
    recipe, sweep, arms, seeds = parsed
    if sweep.threads:
        torch.set_num_threads(sweep.threads)
    device = common.pick_device(sweep.device)
    if recipe.dtype == common.dtype_name("auto", device):
        recipe = dataclasses.replace(recipe, dtype="auto")   # one name for one computation
    corpus = open_corpus(sweep)
    cells = make_cells(recipe, arms, seeds, sweep.out)
    check_cells(cells, corpus)
    common.make_parent(cells[0].path)
    _env(device)
    i, n = read_shard(sweep.shard)
    ended = run_cells(cells[i - 1::n], corpus, device, sweep.force, corpus.vocab_size)
    if ended == "stopped":
        print("stopped; the same command goes on with the cells that are not finished", file=sys.stderr)
        return 130
    report(recipe, sweep, arms, seeds, corpus, device)
    return 0


if __name__ == "__main__":
    common.cli(main)
