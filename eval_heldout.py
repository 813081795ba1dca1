"""Scores and samples of checkpoints: bits per byte on val and held-out text, continuations.

    python eval_heldout.py results/*.ckpt                     scores them, and writes the scores
                                                              into the result JSON beside each
    python eval_heldout.py run.ckpt --sample "def main("      prints a continuation instead

Every token of a split is scored once. The corpus is the one that the checkpoint was trained on: its
folder is in the checkpoint, --data names it where it has moved.
"""
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

import common
from batches import DEFAULT_STORE, Store, evaluate_splits
from common import UserError, flag
from data import encode, looks_like_a_store, open_corpus
from model import GPT, GPTConfig


@dataclass(frozen=True)
class Config:
    """The options of eval_heldout.py."""
    data: str = flag("", "prepared corpus (default: the one named in the checkpoint)")
    batch_size: int = flag(0, "rows scored at once; 0: as many as in training", low=0)
    eval_tokens: int = flag(0, "score this many tokens of each split; 0: all of them", low=0)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    sample: Optional[str] = flag(None, "print a continuation of this text instead of scoring; it may be empty")
    sample_tokens: int = flag(100, "length of the continuation in tokens", low=1)
    temperature: float = flag(0.8, "softmax temperature of the continuation; 0: the likeliest token", low=0, high=1000)
    seed: int = flag(0, "seed of the continuation", low=0, high=2**63 - 1)
    write: bool = flag(True, "write the scores into the result JSON beside the checkpoint, "
                             "unless they cover less than the ones there")


def load_model(path, saved, device):
    """The model of a checkpoint's contents, ready to score; UserError when they do not fit."""
    with common.reading(path):
        model = GPT(GPTConfig(**saved["model_config"]))
        model.set_dtype(saved["model"]["wte.weight"].dtype)
        model.load_state_dict(saved["model"])
    return model.to(device).eval()


def open_own_corpus(path, saved, folder):
    """The Store (or Corpus) that a checkpoint was trained on; UserError when it is another one.

    folder: what --data says, "" for what the checkpoint says.
    """
    with common.reading(path):
        trained_on, digest = saved["config"]["data"], saved["data_digest"]
        reads_text = "tokenizer" in saved["config"]   # ablate.py's flag
        tokenizer = saved["config"].get("tokenizer")
        vocab_size = None if tokenizer else saved["config"].get("vocab_size")
    if not folder and not Path(trained_on).exists():
        how = "name its corpus with --data"
        if trained_on == DEFAULT_STORE:
            how += ", or prepare it here with python data.py"
        raise UserError(f"{path} was trained on {trained_on}, which is not here; {how}")
    if folder or not reads_text or looks_like_a_store(trained_on):
        store = Store(folder or trained_on)
    else:
        store = open_corpus(trained_on, tokenizer, vocab_size)
    if store.digest != digest:
        why = f"was trained with another corpus or tokenizer than {folder or trained_on}"
        raise UserError(f"{path} {why}; name its own with --data")
    return store


@torch.no_grad()
def continuation(model, store, text, tokens, temperature, seed):
    """Text that follows `text`, sampled token by token until a bos.

    The model sees the last sequence_len tokens of bos and text.
    """
    gen = torch.Generator().manual_seed(seed)
    ids = [store.bos, *encode(store.tokenizer, text)]
    start = len(ids)
    for _ in range(tokens):
        row = torch.tensor([ids[-model.cfg.sequence_len:]], device=model.lm_head.weight.device)
        logits = model(row)[0, -1].double().cpu()
        logits[store.bos + 1:] = -torch.inf  # the reserved ids never occur in training
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            scaled = (logits - logits.max()) / temperature
            ids.append(int(torch.multinomial(scaled.softmax(0), 1, generator=gen)))
        if ids[-1] == store.bos:  # the document ends
            break
    return store.tokenizer.decode([i for i in ids[start:] if i < store.bos])


def write_back(path, metrics, step, whole):
    """Merge scores into the result JSON beside the checkpoint; False where that would be wrong.

    whole: they cover the whole splits. Others are written only over scores of as many tokens.
    UserError when the JSON is no record.
    """
    result = Path(path).with_suffix(".json")
    if not result.exists():
        return False
    try:
        record = json.loads(result.read_text(encoding="utf-8"))
        old, config = record["metrics"], record["config"]
        ended_here = record["steps"] == step and record["status"] == "finished"
        # ablate.py's loss is of other windows, and of val alone
        same_kind = metrics.keys() <= old.keys()
        as_many = all(old.get(k) == metrics[k] for k in ("val_tokens", "heldout_tokens"))
        says_more = whole or as_many
        if not (ended_here and same_kind and says_more and math.isfinite(metrics["val_loss"])):
            return False
        old.update(metrics)
        if whole:
            config["eval_tokens"] = 0
    except (ValueError, KeyError, TypeError, AttributeError):
        how = "move it away or pass --no-write"
        raise UserError(f"{result} is not a result record; {how}") from None
    common.write_json(result, record)
    return True


def treat(path, config, device):
    """Score one checkpoint, or print its continuation."""
    saved = common.load_checkpoint(path, ("config", "model_config", "model", "data_digest", "step"))
    store = open_own_corpus(path, saved, config.data)
    model = load_model(path, saved, device)
    # As in training: train_oe.py keeps the tables of a bfloat16 run in bfloat16, the others all
    # weights in float32.
    trained, dtype = saved["config"], model.wte.weight.dtype
    if trained.get("dtype") == "bfloat16":
        dtype = torch.bfloat16
    with common.autocast(device, dtype):
        if config.sample is not None:
            more = continuation(model, store, config.sample, config.sample_tokens,
                                config.temperature, config.seed)
            return print(config.sample + more)
        with common.reading(path):
            rows = config.batch_size or trained.get("micro_batch") or trained["batch_size"]
        metrics = evaluate_splits(model, store, rows, config.eval_tokens, device)
    whole = not config.eval_tokens
    written = config.write and write_back(path, metrics, saved["step"], whole)
    note = "" if written else "  (not written to a result)"
    print(f"{path}: step {saved['step']}, val {metrics['val_bpb']:.6f} bpb, "
          f"held-out {metrics['heldout_bpb']:.6f} bpb{note}")


def main(argv=None):
    parser = common.make_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="checkpoint files")
    common.add_flags(parser, Config)
    given = vars(parser.parse_args(argv))
    paths, config = given.pop("checkpoints"), Config(**given)
    common.check_bounds(config)
    device, failed = common.pick_device(config.device), False
    for path in paths:
        try:
            treat(path, config, device)
        except UserError as err:
            if len(paths) == 1:
                raise
            failed = True
            print(f"error: {err}", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    common.cli(main)
