"""Validation and held-out bits per byte of checkpoints, on fixed windows that cover each split once.

    python eval_heldout.py results/*.ckpt                     scores them and writes the scores into the result JSON beside each
    python eval_heldout.py run.ckpt --sample "def main("      prints a continuation instead of scoring

The corpus is the one the checkpoint was trained on (its folder is in the checkpoint; --data names it where it has moved).
"""
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

import common
from common import UserError, flag
from data import Store, encode, evaluate_splits
from model import GPT, GPTConfig


@dataclass(frozen=True)
class Config:
    """The options of eval_heldout.py."""
    data: str = flag("", "prepared corpus (default: the folder named in the checkpoint)")
    batch_size: int = flag(0, "rows at once; 0 is the training run's micro-batch", low=0)
    eval_tokens: int = flag(0, "score this many tokens of each split; 0 is all of them", low=0)
    device: str = flag("auto", "auto, cpu, cuda, cuda:N or mps")
    sample: Optional[str] = flag(None, "print a continuation of this text instead of scoring; it may be empty")
    sample_tokens: int = flag(100, "tokens of the continuation", low=1)
    temperature: float = flag(0.8, "softmax temperature of the continuation; 0 takes the most likely token", low=0, high=1000)
    seed: int = flag(0, "seed of the continuation", low=0, high=2**63 - 1)
    write: bool = flag(True, "write the scores into the result JSON beside the checkpoint, unless they cover less than the ones there")


def load(path, config, device):
    """(model, store, checkpoint) of a checkpoint file; UserError when it is damaged or its vocabulary is not the store's."""
    saved = common.load_checkpoint(path, ("config", "model_config", "model", "data_digest", "step"))
    with common.reading(path):
        data, model = config.data or saved["config"]["data"], GPT(GPTConfig(**saved["model_config"]))
        model.set_dtype(saved["model"]["wte.weight"].dtype)
        model.load_state_dict(saved["model"])
    if not config.data and not Path(data).exists():
        raise UserError(f"{path} was trained on {data}, which is not here; name its corpus with --data")
    store = Store(data)
    if store.vocab_size != model.cfg.vocab_size:
        raise UserError(f"{path} has a vocabulary of {model.cfg.vocab_size}, {store.folder} one of {store.vocab_size}; name its own corpus with --data")
    if store.digest != saved["data_digest"]:
        raise UserError(f"{path} was trained with another corpus or tokenizer than {store.folder}; name its own corpus with --data")
    return model.to(device).eval(), store, saved


@torch.no_grad()
def continuation(model, store, text, tokens, temperature, seed):
    """Text that follows `text`, sampled token by token until a bos; the model sees the last sequence_len tokens of bos and text."""
    gen = torch.Generator().manual_seed(seed)
    ids = [store.bos, *encode(store.tokenizer, text)]
    start = len(ids)
    for _ in range(tokens):
        row = torch.tensor([ids[-model.cfg.sequence_len:]], device=model.lm_head.weight.device)
        logits = model(row)[0, -1].double().cpu()
        logits[store.bos + 1:] = -torch.inf  # the reserved ids never occur in training
        ids.append(int(logits.argmax() if temperature == 0 else torch.multinomial(((logits - logits.max()) / temperature).softmax(0), 1, generator=gen)))
        if ids[-1] == store.bos:  # the document ends
            break
    return store.tokenizer.decode([i for i in ids[start:] if i < store.bos])


def write_back(path, metrics, step, whole):
    """Merge scores into the result JSON beside the checkpoint; False where there is none, or where they would say less than those there.

    whole: they cover the whole splits. Others are written only over scores of as many tokens. UserError when the JSON is no record.
    """
    result = Path(path).with_suffix(".json")
    if not result.exists():
        return False
    try:
        record = json.loads(result.read_text(encoding="utf-8"))
        old, config = record["metrics"], record["config"]
        same = all(old.get(k) == metrics[k] for k in ("val_tokens", "heldout_tokens"))
        if record["steps"] != step or record["status"] != "finished" or not (whole or same) or not math.isfinite(metrics["val_loss"]):
            return False
        old.update(metrics)
        config["eval_tokens"] = 0 if whole else config["eval_tokens"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{result} is not a result record; move it away or pass --no-write") from None
    common.write_json(result, record)
    return True


def treat(path, config, device):
    """Score one checkpoint, or print its continuation."""
    model, store, saved = load(path, config, device)
    # as in training: train_oe.py keeps the tables of a bfloat16 run in bfloat16, train_wm.py all weights in float32
    dtype = torch.bfloat16 if saved["config"].get("dtype") == "bfloat16" else model.wte.weight.dtype
    with common.autocast(device, dtype):
        if config.sample is not None:
            return print(config.sample + continuation(model, store, config.sample, config.sample_tokens, config.temperature, config.seed))
        metrics = evaluate_splits(model, store, config.batch_size or saved["config"]["batch_size"], config.eval_tokens, device)
    note = "" if config.write and write_back(path, metrics, saved["step"], not config.eval_tokens) else "  (not written to a result)"
    print(f"{path}: step {saved['step']}, val {metrics['val_bpb']:.6f} bpb, held-out {metrics['heldout_bpb']:.6f} bpb{note}")


def main(argv=None):
    parser = common.make_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="checkpoint files")
    common.add_flags(parser, Config)
    given = vars(parser.parse_args(argv))
    paths, config, failed = given.pop("checkpoints"), Config(**given), []
    common.check_bounds(config)
    device = common.pick_device(config.device)
    for path in paths:
        try:
            treat(path, config, device)
        except UserError as err:
            if len(paths) == 1:
                raise
            failed.append(path)
            print(f"error: {err}", file=sys.stderr)
    return 2 if failed else 0


if __name__ == "__main__":
    common.cli(main)
