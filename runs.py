"""One training run from its claim on the output files to its record: what train_oe.py and train_wm.py share.

A script brings its Config, its model and one training step; here are the command line of arms, the loop over steps with progress, checkpoints
and requests to stop, the rules about existing files, and the record. Every rank of a data-parallel run calls these; rank 0 writes and speaks.
"""
import dataclasses
import json
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm

import common
from common import UserError
from data import evaluate_splits, open_store

DIVERGED = 100.0   # a loss above this (nats) or NaN ends a run


# ---- the command line ----

def parse_arms(doc, cls, list_arms, argv=None):
    """{flag: value} as given on the command line of a script with arms; None after --list_arms, which calls list_arms(as_json)."""
    parser = common.make_parser(doc)
    common.add_flags(parser, cls)
    parser.add_argument("--list_arms", "--list-arms", action="store_true", help="print every arm: flags, published result")
    parser.add_argument("--json", action="store_true", help="with --list_arms: print JSON")
    given = vars(parser.parse_args(argv))
    as_json = given.pop("json", False)
    if given.pop("list_arms", False):
        if given:
            raise UserError(f"--list_arms takes no other flag than --json, not --{next(iter(given))}")
        return list_arms(as_json)
    if as_json:
        raise UserError("--json goes with --list_arms; results are always written as JSON")
    return given


def check_run_flags(config):
    """UserError for flags out of bounds, empty paths and an evaluation that scores nothing."""
    common.check_bounds(config)
    if not config.out or not config.data:
        raise UserError("an empty --out or --data would mean the current folder; write . for it")
    if config.eval_tokens == 1:
        raise UserError("--eval_tokens 1 holds no byte to score (the first token begins a document); give more, or 0 for all")


# ---- files ----

def claim(config, result, checkpoint):
    """Refuse to lose an earlier run's files. Returns the record of a finished run when asked to resume it, else None."""
    if config.force:
        return None
    if result.exists() and config.resume:
        with common.reading(result, "result"):
            record = json.loads(result.read_text(encoding="utf-8"))
        print(f"{result} is already finished")
        return record
    if result.exists():
        raise UserError(f"{result} exists; --force overwrites it, another --seed or --out keeps it")
    if checkpoint.exists() and not config.resume:
        raise UserError(f"{checkpoint} holds an unfinished run; --resume continues it, --force starts anew")


def announce(record, out):
    """Print how a run ended (rank 0 only) and return the script's exit code: 130 for a run that was stopped."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    if record["status"] == "stopped":
        return 130
    path = Path(out) / f"{record['run']}.json"
    if record["status"] == "diverged":
        print(f"diverged at step {record['steps']} (loss {record['curve'][-1][1]}); see {path}")
        return 0
    m, t = record["metrics"], record["timing"]
    print(f"val {m['val_bpb']:.4f} bpb, held-out {m['heldout_bpb']:.4f} bpb "
          f"({t['train_s']:.0f} s of training, {t['tok_per_s']:,.0f} tok/s, peak {t['peak_mem_mib']:,.0f} MiB); {path}")
    return 0


def check_same_run(path, saved, script, flags, data_digest, data):
    """UserError unless the checkpoint `saved` comes from the same script, corpus and flags (a dict of those that can change a result)."""
    if saved["script"] != script:
        raise UserError(f"{path} was written by {saved['script']}, not by {script}")
    if saved["data_digest"] != data_digest:
        raise UserError(f"{path} was trained on another corpus or tokenizer than {data}; name the right --data")
    with common.reading(path):
        old = {**flags, **saved["config"]}
        changed = [k for k in flags if old[k] != flags[k] and k != "data"]  # the digest speaks for the data
    if changed:
        raise UserError(f"{path} was trained with " + ", ".join(f"--{k} {old[k]} (now {flags[k]})" for k in changed) + "; pass the same flags")


def restore(path, script, config, flags, store, parts):
    """Load a checkpoint of the same run into `parts` ({its key: what has a load_state_dict()}); returns its {"step", "curve", "train_s"}."""
    saved = common.load_checkpoint(path, ("script", "config", "data_digest", *parts, "step", "curve", "train_s"))
    check_same_run(path, saved, script, flags, store.digest, config.data)
    with common.reading(path):
        for key, part in parts.items():
            part.load_state_dict(saved[key])
    return {k: saved[k] for k in ("step", "curve", "train_s")}


def one_run(config, run, body):
    """Call body(result path, checkpoint path, rank, world, device) once the run's files are this process's; returns the result record.

    Written as OUT/<run>.json unless its status is stopped: a run stopped by SIGINT or SIGTERM has its checkpoint only.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    result, checkpoint = Path(config.out) / f"{run}.json", Path(config.out) / f"{run}.ckpt"
    with common.ranks(config.device) as (rank, world, device), common.locked(result) if rank == 0 else nullcontext():
        if config.batch_size % world:
            raise UserError(f"--batch_size {config.batch_size} does not split over {world} ranks; choose a multiple")
        finished = claim(config, result, checkpoint) if rank == 0 else None
        if rank == 0:
            open_store(config.data)  # prepares it; the others wait
        common.wait_for_all(world)
        if common.agree(finished is not None, world, device):
            return finished or {"status": "finished elsewhere"}
        record = body(result, checkpoint, rank, world, device)
        if rank == 0 and record["status"] != "stopped":
            common.write_json(result, record)
        return record


def begin(config, run, result, checkpoint, restore, rank):
    """{"step", "curve", "train_s"} to go on from: restore()'s under --resume, else a new run's. --force removes the old files here."""
    if config.force and not config.resume and rank == 0:  # only now: everything that a user can get wrong has been read
        result.unlink(missing_ok=True)
        checkpoint.unlink(missing_ok=True)
    if not (config.resume and checkpoint.exists()):
        return {"step": 0, "curve": [], "train_s": 0.0}
    done = restore()
    if rank == 0:
        print(f"resuming {run} at step {done['step']}")
    return done


# ---- the loop ----

def run_steps(config, done, one_step, save, checkpoint, rank, world, device):
    """one_step(step) -> this rank's mean loss, up to config.steps, keeping `done`; save() at checkpoints. finished | diverged | stopped."""
    tokens, quiet = tokens_per_step(config), None if rank == 0 else True
    with common.stop_requests() as stop, tqdm(total=config.steps, initial=done["step"], unit="step", disable=quiet) as bar:
        for step in range(done["step"], config.steps):
            start = time.perf_counter()
            loss = one_step(step)
            sums = torch.tensor([loss, float(bool(stop))], dtype=torch.float64, device=device if world > 1 else "cpu")
            common.all_sum([sums], world)  # ranks agree on the loss, and on stopping
            loss, stopping = sums[0].item() / world, sums[1].item() > 0
            done["train_s"] += time.perf_counter() - start
            done["curve"].append([step, loss])
            done["step"] = step + 1
            speed = f"loss {loss:.4f}, {tokens * (step + 1) / done['train_s']:,.0f} tok/s"
            bar.set_postfix_str(speed, refresh=False)
            bar.update()
            if bar.disable and rank == 0 and (step + 1) % max(1, config.steps // 10) == 0:
                print(f"step {step + 1}/{config.steps}  {speed}", flush=True)
            if not loss <= DIVERGED:
                return "diverged"
            last = step + 1 == config.steps
            if last or stopping or config.save_every and (step + 1) % config.save_every == 0:
                save()
            if stopping and not last:
                if rank == 0:
                    print(f"stopped at step {step + 1}; --resume continues {checkpoint}")
                return "stopped"
    return "finished"


def tokens_per_step(config):
    """Tokens of a step over all ranks."""
    return config.batch_size * config.seq_len * config.accum


def finish(script, config, run, status, model, store, done, params, autocast, rank, world, device, env):
    """Score a finished run and make its record; a run whose last update destroyed it is called diverged."""
    metrics = {}
    if status == "finished":
        with autocast:
            metrics = evaluate_splits(model, store, config.batch_size, config.eval_tokens, device, rank, world)
        if not math.isfinite(metrics["val_loss"] + metrics["heldout_loss"]):
            status, metrics = "diverged", {}
    tokens = done["step"] * tokens_per_step(config)
    return common.result_record(
        script=script, run=run, arm=config.arm, status=status,
        config={**dataclasses.asdict(config), "data_digest": store.digest, "ranks": world},
        depth=config.depth, width=model.cfg.n_embd, seed=config.seed, params=params, steps=done["step"], tokens=tokens,
        metrics=metrics, curve=done["curve"], env=env,
        timing={"train_s": done["train_s"], "tok_per_s": tokens / done["train_s"], "peak_mem_mib": common.peak_mem_mib(device)})
