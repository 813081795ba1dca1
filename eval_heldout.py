"""Validation and held-out bits per byte of checkpoints, on fixed windows that cover each split once.

    python eval_heldout.py results/*.ckpt                     scores them and writes the scores into the result JSON beside each
    python eval_heldout.py run.ckpt --sample "def main("      prints a continuation instead of scoring

The corpus is the one the checkpoint was trained on (its folder is in the checkpoint; --data names it where it has moved).
"""
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

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
    sample: str = flag("", "print a continuation of this text instead of scoring")
    sample_tokens: int = flag(100, "tokens of the continuation", low=1)
    temperature: float = flag(0.8, "softmax temperature of the continuation; 0 takes the most likely token", low=0)
    seed: int = flag(0, "seed of the continuation", low=0)
    write: bool = flag(True, "write the scores into the result JSON beside the checkpoint")


def load(path, config, device):
    """(model, store, checkpoint) of a checkpoint file; UserError when its vocabulary is not the store's."""
    saved = common.load_checkpoint(path)
    store = Store(config.data or saved["config"]["data"])
    model = GPT(GPTConfig(**saved["model_config"]))
    if store.vocab_size != model.cfg.vocab_size:
        raise UserError(f"{path} has a vocabulary of {model.cfg.vocab_size}, {store.folder} one of {store.vocab_size}; name its own corpus with --data")
    if store.digest != saved["data_digest"]:
        raise UserError(f"{path} was trained with another corpus or tokenizer than {store.folder}; name its own corpus with --data")
    model.set_dtype(saved["model"]["wte.weight"].dtype)
    model.load_state_dict(saved["model"])
    return model.to(device).eval(), store, saved


@torch.no_grad()
def continuation(model, store, text, tokens, temperature, seed):
    """Text that follows `text`, sampled token by token; the model sees the last sequence_len tokens, bos first."""
    gen = torch.Generator().manual_seed(seed)
    ids = [store.bos, *encode(store.tokenizer, text)]
    start = len(ids)
    for _ in range(tokens):
        row = torch.tensor([ids[-model.cfg.sequence_len:]], device=model.lm_head.weight.device)
        logits = model(row)[0, -1].float().cpu()
        logits[store.bos + 1:] = -torch.inf  # the reserved ids never occur in training
        ids.append(int(logits.argmax() if temperature == 0 else torch.multinomial((logits / temperature).softmax(0), 1, generator=gen)))
        if ids[-1] == store.bos:  # the document ends
            break
    return store.tokenizer.decode([i for i in ids[start:] if i < store.bos])


def write_back(path, metrics):
    """Merge the metrics into the result JSON beside the checkpoint; False where there is none."""
    result = Path(path).with_suffix(".json")
    if not result.exists():
        return False
    try:
        record = json.loads(result.read_text(encoding="utf-8"))
        record["metrics"].update(metrics)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{result} is not a result record; move it away or pass --no-write") from None
    common.write_json(result, record)
    return True


def main(argv=None):
    parser = common.make_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="checkpoint files")
    common.add_flags(parser, Config)
    given = vars(parser.parse_args(argv))
    paths, config = given.pop("checkpoints"), Config(**given)
    common.check_bounds(config)
    device = common.pick_device(config.device)
    for path in paths:
        model, store, saved = load(path, config, device)
        dtype = torch.bfloat16 if model.wte.weight.dtype == torch.bfloat16 else None
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            if config.sample:
                print(config.sample + continuation(model, store, config.sample, config.sample_tokens, config.temperature, config.seed))
                continue
            metrics = evaluate_splits(model, store, config.batch_size or saved["config"]["batch_size"], config.eval_tokens, device)
        note = "" if config.write and write_back(path, metrics) else "  (not written to a result)"
        print(f"{path}: step {saved['step']}, val {metrics['val_bpb']:.6f} bpb, held-out {metrics['heldout_bpb']:.6f} bpb{note}")


if __name__ == "__main__":
    common.cli(main)
