"""ablate.py on a tiny corpus: every config, exact off-switches, sweeps, resume, mistakes."""
import collections
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ablate
import common
import model
import runs
import stats
from ablate import CONFIGS, REFUSED, Config, Progress, config_of
from batches import RandomBatches, Store
from common import UserError, derive_seed
from helpers import ROOT, argv_of, assert_same, signal_at
from model import GPT, oe_ids
from optim import warmup_multiplier

SMALL = dict(n_embd=48, n_head=2, n_layer=2, seq_len=16, batch_size=4, max_iters=5,
             eval_tokens=128)


@pytest.fixture(scope="module")
def corpus(store):
    return Store(store)


def small(arm="modern", **kw):
    """The Config of a small cell; kw win over the config's own flags."""
    return dataclasses.replace(config_of(Config(**SMALL), arm), vocab_size=300, **kw)


def build(config):
    return GPT(ablate.model_config(config, 300)).init_weights(config.seed).train()


@pytest.fixture(scope="module")
def fresh(corpus, tmp_path_factory):
    """A function that trains a small cell: its record, or with weights=True those at its end."""
    def fresh(arm="modern", weights=False, **kw):
        out = tmp_path_factory.mktemp("cell")
        config = small(arm, out=str(out), keep_checkpoints=weights, **kw)
        record = ablate.train(config, corpus)
        if not weights:
            return record
        return common.load_checkpoint(only(out, "*.ckpt"))["model"]
    return fresh


@pytest.fixture(scope="module")
def train(fresh):
    """A function that gives the record of a small cell, each trained once."""
    known = functools.cache(lambda arm, kw: fresh(arm, **dict(kw)))
    return lambda arm="modern", **kw: known(arm, tuple(sorted(kw.items())))


def losses(record):
    return [loss for _, loss in record["curve"]] + [record["metrics"]["val_loss"]]


def argv(store, out, *more, configs=("modern", "pos"), seeds=(0, 1), **kw):
    """A small sweep's command line."""
    flags = argv_of({"data": store, "out": out, **SMALL, **kw})
    return [*flags, "--configs", *configs, "--seeds", *map(str, seeds), *more]


def one(store, out, *more, **kw):
    """The command line of one small cell."""
    return argv(store, out, *more, **{"configs": ["modern"], "seeds": (0,), **kw})


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def results(out):
    return {p.name: read(p) for p in sorted(Path(out).glob("*.json"))}


def only(out, pattern="*.json"):
    (path,) = Path(out).glob(pattern)
    return path


def rewrite(path, **changes):
    path.write_text(json.dumps({**read(path), **changes}))


def finished(out):
    """[(config, seed)] that a sweep said it had computed."""
    return re.findall(r"^\[\d+/\d+\] (\S+) seed (\d+):", out, re.M)


@pytest.fixture
def steps(monkeypatch):
    """The numbers of the steps that are taken."""
    taken, real = [], runs.Run.log

    def log(self, loss):
        taken.append(self.step)
        real(self, loss)
    monkeypatch.setattr(runs.Run, "log", log)
    return taken


class Child:
    """ablate.py in a process of its own, forked so that it need not import torch again.

    dies: (config, step) in which it is killed.
    """

    def __init__(self, args, log, dies=()):
        self.log = Path(log)
        self.pid = os.fork()
        if not self.pid:
            fd, code = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1
            os.dup2(fd, 1), os.dup2(fd, 2)
            real = runs.Run.log

            def killed(run, loss):
                if (run.config.arm, run.step) == dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(run, loss)
            try:
                runs.Run.log = killed
                sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
                common.cli(ablate.main, args)
            except SystemExit as end:
                code = end.code
            finally:
                os._exit(code)

    def end(self):
        """(exit code, what it printed)"""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, self.log.read_text()


# ---- configs ----

OFTEN_NAMED = """progress moe_fine gds_ctx512_rope hw_ctx512 gdn_hw_ctx512 muon_ph_ulo2 arch2_moe
    d32_hw_lr2400u4 gdn_muon_xlo muonclip_hi"""


def test_every_named_arm_of_the_log_is_a_config():
    printed = {row.get("config", row["arm"]) for row in common.published("ablate")["findings"]}
    # rows named by platform, side or rate; their configs carry other names
    named = {name for name in printed if name != "adamw" and not re.search("[( ]", name)}
    assert named | set(OFTEN_NAMED.split()) <= set(CONFIGS) and len(named) > 80
    recipe = (Config.max_iters, Config.adamw_lr, Config.dropout, Config.grad_clip)
    assert recipe == (2000, 3e-4, 0.2, 1.0)


PUBLISHED = {
    "modern": 5.1793, "baseline": 4.838, "muon_lo": 5.029, "muon_vlo": 4.992, "muon_hi": 5.54,
    "muon_ph_lo": 5.071, "muonclip_hi": 5.298, "d32_hw_lr1200u4": 4.507, "gdn_muon_ulo": 4.9696,
    "gdn_hw_muon_lo": 4.9215, "adamw_3e3": 4.6226, "muon_adamw_3e2": 4.5872, "d8_plain": 5.203,
    "arch2_plain": 4.5872, "f11_hw_muon": 4.9415, "moe_matched": 5.314}
LOST = "progress muon_vlo_wsd modern_wsd meprop_10 muonclip_lo muon_05 arch2_moe".split()


def test_published_values_belong_to_their_rates():
    assert {name: ablate.published(name)[1]["val_loss"] for name in PUBLISHED} == PUBLISHED
    assert {ablate.published(name) for name in LOST} == {(None, None)}


def test_list_shows_modern_beside_values_of_its_own_setting_only(capsys):
    ablate.main(["--list"])
    head, *lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    lines = {line.split()[0]: line for line in lines}
    assert list(lines) == list(CONFIGS) and "5.1793" in lines["modern"]
    main, other, flags = (head.index(word) for word in ("new128", "another", "flags"))
    assert lines["baseline"][main:other].split() == ["-", "1"]
    assert "old128: 4.8380 (modern 4.7120)" in lines["baseline"][other:flags]
    assert "local1500: 4.9907" in lines["f11_muon"] and "new512: 4.7967" in lines["modern_ctx512"]
    assert "new512: 4.7575..4.7736" in lines["hw_ctx512"] and "4.71" not in lines["modern"]
    ablate.main(["--list_configs", "--json"])
    rows = {r["config"]: r for r in json.loads(capsys.readouterr().out)}
    assert rows["modern"]["params"] == 3_344_064 and rows["modern"]["published"] == 5.1793
    assert rows["gds_ctx512_rope"]["refused"] and rows["baseline"]["published"] == 4.838
    levels = {(r["setting"], r["modern"]) for r in rows.values() if r["published"]}
    assert levels == {("new128", 5.1793), ("old128", 4.712), ("local1500", None),
                      ("new512", None), ("scale", None)}
    ablate.main(["--list", "--eval_tokens", "300", "--json"])   # another recipe than the log's
    assert not any(r["published"] for r in json.loads(capsys.readouterr().out))


def test_parameter_counts_of_the_log():
    def count(name, **kw):
        return ablate.count_params(config_of(Config(**kw), name), 8192)
    assert count("modern") == 3_344_064 and count("d32_plain") == 15_741_120
    assert count("modern", n_embd=384, n_layer=6) == 13_767_552
    assert count("gds_ctx512_learned") == 3_451_632 and count("gds_ctx512_wide") == 3_452_400
    millions = {"baseline": 4.95, "highway_scalar": 3.35, "moe": 6.89, "pos": 3.37, "delta": 3.37,
                "gated_delta": 3.52, "gdn_hw_ctx512": 3.35}
    assert {name: round(count(name) / 1e6, 2) for name in millions} == millions
    assert abs(count("moe_matched") / count("modern") - 1) < 0.005


def code_paths():
    """[[names]]: configs that differ in rates, depth or the length of rows alone are one path."""
    paths, sizes = {}, ("adamw_lr", "muon_lr", "n_layer", "grad_topk", "seq_len")
    for name, flags in CONFIGS.items():
        kind = {k: v for k, v in flags.items() if k not in sizes}
        key = json.dumps(kind, sort_keys=True), "grad_topk" in flags
        paths.setdefault(key, []).append(name)
    return [names for names in paths.values() if names[0] not in REFUSED]


@pytest.mark.parametrize("name", [names[0] for names in code_paths()] + ["d32_plain", "gd_ctx512"])
def test_every_code_path_trains(train, name):
    record = train(name, max_iters=3, eval_tokens=CONFIGS[name].get("seq_len", 128))
    assert record["status"] == "finished" and record["steps"] == len(record["curve"]) == 3
    assert all(math.isfinite(v) and v < 20 for v in losses(record))
    rate = config_of(Config(), name).adamw_lr
    assert record["config"]["adamw_lr"] == rate and record["arm"] == name


LONG = [n for n in CONFIGS if re.match(r"d(16|32)_.*|.*ctx512.*", n) and n not in REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_every_long_or_deep_config_trains(train, name):
    assert train(name, eval_tokens=0)["status"] == "finished"


def test_every_other_name_is_a_command_line_and_a_model():
    for name in set(CONFIGS) - set(REFUSED):
        config, sweep = ablate.parse(["--configs", name])
        mine = config_of(config, name)
        assert sweep.configs == [name]
        assert all(getattr(mine, k) == v for k, v in CONFIGS[name].items())
        assert ablate.count_params(mine, 8192) > 2e6
    assert 40 < len(code_paths()) < 50


def test_the_arm_that_cannot_exist_is_refused_before_training(store, tmp_path):
    for name in REFUSED:
        with pytest.raises(UserError, match=name):
            ablate.main(argv(store, tmp_path, configs=["modern", name]))
    assert not list(tmp_path.iterdir())


def imported(path, name):
    """The script at `path` as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module   # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


AXES = ("ffn", "norm", "attn", "residual", "pos", "fast_weight_impl", "moe_router",
        "moe_expert_hidden")


def test_a_new_activation_is_at_once_a_choice(store, tmp_path, monkeypatch):
    """One line in model.FFN, and --ffn knows it."""
    monkeypatch.setitem(model.FFN, "sine", model.dense(torch.sin))
    again = imported(ROOT / "ablate.py", "ablate_again")
    assert again.main(one(store, tmp_path, ffn="sine")) == 0
    assert read(only(tmp_path))["changed"]["ffn"] == "sine"
    choices = {f.name: f.metadata["choices"] for f in common.flag_fields(again.Config)}
    assert all(choices[name] == tuple(model.CHOICES[name]) for name in AXES)


# ---- training ----

def test_a_cell_equals_a_plain_loop(train, corpus):
    """modern against the recipe: nanoGPT's loss, torch's AdamW, warm-up and cosine, clipping."""
    kw = dict(max_iters=20, dropout=0.0, dtype="float64", adamw_lr=0.01, seed=3, eval_tokens=640)
    record = train(**kw)
    plain = build(small(**kw)).double()
    opt = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)
    batches = RandomBatches(corpus.train, 4, 16, derive_seed("ablate batches", 3))
    for i, (_, loss) in enumerate(record["curve"]):
        x, y = batches.next()
        mine = F.cross_entropy(plain(x).flatten(0, 1), y.flatten())
        assert abs(mine.item() - loss) < 1e-9
        cosine = 0.5 * (1 + math.cos(math.pi * (i - 2) / 18))
        opt.param_groups[0]["lr"] = 0.01 * ((i + 1) / 2 if i < 2 else cosine)
        mine.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in plain.parameters()))
        for p in plain.parameters():
            p.grad *= min(1, 1 / (norm + 1e-6))   # torch's guard against a norm of 0
        opt.step()
        opt.zero_grad()
    assert len(record["curve"]) == 20
    total = n = 0
    plain.eval()
    with torch.no_grad():
        for i in range(0, 640, 16):
            row = torch.from_numpy(np.asarray(corpus.val[i:i + 17]).astype(np.int64))
            logits = plain(row[None, :-1])[0]
            total += F.cross_entropy(logits, row[1:], reduction="sum").item()
            n += 16
    assert abs(total / n - record["metrics"]["val_loss"]) < 1e-6
    assert record["metrics"]["val_tokens"] == n == 640


def test_same_seed_same_numbers_other_seed_others(train, fresh):
    a, b, c = losses(train()), losses(fresh()), losses(train(seed=1))
    assert a == b and not set(a) & set(c)


def test_arms_of_a_seed_share_batches_and_first_weights(fresh, monkeypatch):
    seen, first, real = {}, {}, RandomBatches.next

    def spy(self):
        seen.setdefault(arm, []).append(real(self))
        return seen[arm][-1]
    monkeypatch.setattr(RandomBatches, "next", spy)
    for arm in ("modern", "highway_scalar", "muon", "delta", "baseline"):
        first[arm] = fresh(arm, True, seed=5, adamw_lr=0.0, muon_lr=0.0, weight_decay=0.0)
        del first[arm]["lm_head.weight"]   # where it is tied it is wte
        assert_same(seen["modern"], seen[arm])
        shared = [name for name, tensor in first["modern"].items()
                  if name in first[arm] and tensor.shape == first[arm][name].shape]
        assert len(shared) > 4
        assert all(torch.equal(first["modern"][name], first[arm][name]) for name in shared)
    assert not torch.equal(seen["modern"][0][0], seen["modern"][1][0])


def test_dropout_acts_in_training_and_not_in_scoring(train):
    assert losses(train())[0] != losses(train(dropout=0.0))[0]
    still = dict(max_iters=1, adamw_lr=0.0, weight_decay=0.0)
    scores = {train(dropout=d, **still)["metrics"]["val_loss"] for d in (0.0, 0.5)}
    assert len(scores) == 1


OFF = [("muonclip", dict(qk_clip_tau=1e9)), ("muon_ph", dict(n_head=1)),
       ("meprop_10", dict(grad_topk=1.0)), ("progress", dict(progress=0.0)),
       ("curiosity", dict(curiosity=0.0))]


@pytest.mark.parametrize("arm, kw", OFF)
def test_off_switches_are_exact(train, arm, kw):
    plain = "muon" if arm.startswith("muon") else "modern"
    shared = {k: v for k, v in kw.items() if k == "n_head"}
    off, base = train(arm, max_iters=20, **kw), train(plain, max_iters=20, **shared)
    assert losses(off) == losses(base)
    acting = dict(qk_clip_tau=1e-3) if arm == "muonclip" else {}
    on, base = train(arm, max_iters=20, **acting), train(plain, max_iters=20)
    assert losses(on)[-1] != losses(base)[-1]


TOGETHER = [("muonclip", dict(progress=0.5)), ("curiosity", dict(qk_clip_tau=1.0)),
            ("modern", dict(progress=0.5, qk_clip_tau=1.0)),
            ("muonclip", dict(grad_topk=0.1, per_head=True, curiosity=0.5, oe_m=13)),
            ("meprop_10", dict(progress=0.5, curiosity=0.5))]


@pytest.mark.parametrize("arm, kw", TOGETHER)
def test_what_acts_outside_the_model_composes(train, arm, kw):
    record = train(arm, max_iters=24, **kw)
    assert record["status"] == "finished" and losses(record)[-1] < losses(record)[0]


GROUPED = ("modern", "baseline", "muon", "muon_ph", "gdn_hw_muon", "arch2_moe",
           "f11_hw_moe_matched_muon")


@pytest.mark.parametrize("arm, bias", [*itertools.product(GROUPED, (False, True))])
def test_every_parameter_is_in_one_group(arm, bias):
    config = small(arm, bias=bias)
    made = build(config)
    optimizers = ablate.make_optimizers(made, config).values()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    ids = [id(p) for g in groups for p in g["params"]]
    learning = {name: p for name, p in made.named_parameters() if p.requires_grad}
    assert len(ids) == len(set(ids)) and set(ids) == set(map(id, learning.values()))
    kinds = {id(p): g.get("kind", "adamw") for g in groups for p in g["params"]}
    for name, p in learning.items():
        # an expert's biases are [E, C]
        is_matrix = name.startswith("blocks.") and p.ndim >= 2 and not name.endswith("bias")
        by_muon = is_matrix and config.optimizer == "muon"
        assert kinds[id(p)] == ("muon" if by_muon else "adamw"), name
    split = {name: (g["heads"], g["head_axis"]) for name, p in learning.items() for g in groups
             if g.get("heads", 1) > 1 and any(p is q for q in g["params"])}
    assert len(split) == (4 * config.n_layer if arm == "muon_ph" else 0)
    for name, how in split.items():
        assert ".attn." in name and how == (2, -1 if "c_proj" in name else -2)


@pytest.mark.parametrize("arm", ["modern", "muon", "highway_scalar"])
def test_hashed_tables_have_a_rule_of_their_own(fresh, corpus, arm):
    """Visited rows move, outside the clipping of the rest, by oe_lr in rms over all of them."""
    x, _ = RandomBatches(corpus.train, 4, 16, derive_seed("ablate batches", 0)).next()
    end = fresh(arm, True, oe_m=97, warmup=0, max_iters=1)
    lr = Config.oe_lr * warmup_multiplier(0, 1, 0)
    for j, rows in enumerate(oe_ids(x, 97, 300)):
        table = end[f"oe_tables.{j}"]
        moved = table.abs().sum(1) > 0
        assert moved.sum() > 1
        assert set(moved.nonzero().flatten().tolist()) == set(rows.flatten().tolist())
        assert table[moved].square().mean().sqrt().item() == pytest.approx(lr, rel=1e-5)


def test_hashed_tables_learn_and_carry_nothing_into_the_next_step(train, fresh, monkeypatch):
    real, left = ablate.MuonAdamW.zero_grad, []

    def spy(self):
        real(self)
        tables = [p for g in self.param_groups for p in g["params"] if hasattr(p, "visits")]
        left.extend(bool(p.grad.any() or p.visits.any()) for p in tables)
    monkeypatch.setattr(ablate.MuonAdamW, "zero_grad", spy)
    with_tables, without = losses(fresh(max_iters=20, oe_m=97)), losses(train(max_iters=20))
    assert with_tables[0] == without[0] and with_tables[-1] < with_tables[0]
    assert with_tables[-1] != without[-1] and left == [False] * 80


def test_two_rates_are_two_knobs(fresh):
    still = fresh("muon", True, muon_lr=0.0, adamw_lr=0.0, weight_decay=0.0)

    def moved(**kw):
        end = fresh("muon", True, weight_decay=0.0, **kw)
        return {name for name in end if not torch.equal(end[name], still[name])}
    layers, rest = moved(adamw_lr=0.0), moved(muon_lr=0.0)
    assert layers and rest and not layers & rest and "wte.weight" in rest
    assert all(name.startswith("blocks.") for name in layers)


def test_bench_times_the_step_that_is_taken(fresh, monkeypatch):
    """bench.py takes the same steps on one batch, bit for bit."""
    import bench
    x = torch.arange(64).view(4, 16)
    monkeypatch.setattr(RandomBatches, "next", lambda self: (x, x + 1))
    # the trapezoid's rate is flat in the first half
    record = fresh(warmup=0, schedule="trapezoid", max_iters=8)
    made = build(small())
    timed = bench.clipped_step(made, ablate.make_optimizers(made, small()).values(), x, x + 1)
    torch.manual_seed(derive_seed("ablate dropout", 0))
    assert [timed() for _ in range(4)] == losses(record)[:4]


def test_divergence_is_a_status(train):
    record = train(max_iters=12, adamw_lr=1e6, grad_clip=0.0)
    assert record["status"] == "diverged" and record["metrics"] == {}
    assert record["steps"] == record["curve"][-1][0] + 1 < 12


def test_long_curves_are_thinned():
    for steps, every in ((300, 1), (2000, 10), (2007, 10)):
        kept = [i for i, _ in ablate.thinned([[i, 1.0] for i in range(steps)], steps)]
        assert kept == sorted({*range(0, steps, every), steps - 1})
    ended_early = ablate.thinned([[i, 1.0] for i in range(16)], 2000)
    assert ended_early == [[0, 1.0], [10, 1.0], [15, 1.0]]


# ---- losses ----

def test_progress_weights_equal_a_loop():
    gen = torch.Generator().manual_seed(0)
    V, strength = 7, 0.8
    tracker, fast, slow, seen = Progress(V, strength), {}, {}, collections.Counter()
    acted = 0
    for _ in range(60):
        y = (torch.rand(3, 5, generator=gen) ** 2 * V).long()
        nats = torch.rand(3, 5, generator=gen) + 1 / (1 + seen[0])
        got = tracker.weights(y)
        ids = y.flatten().tolist()
        ready = [slow[i] - fast[i] for i in ids if seen[i] >= 16]
        want = [1.0] * len(ids)
        if len(ready) > 1 and statistics.stdev(ready) > 0:
            m, s = statistics.fmean(ready), statistics.stdev(ready)
            raw = [max(0.0, 1 + strength * (slow[i] - fast[i] - m) / s) if seen[i] >= 16 else 1.0
                   for i in ids]
            want = [w / statistics.fmean(raw) for w in raw]
            acted += max(want) > 1.1
        torch.testing.assert_close(got.flatten(), torch.tensor(want), rtol=1e-3, atol=1e-3)
        assert abs(got.mean().item() - 1) < 1e-5
        tracker.update(y, nats)
        for i in set(ids):
            mean = statistics.fmean([v for j, v in zip(ids, nats.flatten().tolist()) if j == i])
            fast[i] = 0.9 * fast[i] + 0.1 * mean if seen[i] else mean
            slow[i] = 0.99 * slow[i] + 0.01 * mean if seen[i] else mean
            seen[i] += 1
    assert acted > 20
    tracker.strength = 0.0
    assert torch.equal(tracker.weights(y), torch.ones(3, 5))


def test_progress_weighs_ids_whose_loss_falls():
    tracker = Progress(3, 0.5)
    y = torch.tensor([[0, 1, 2]])
    for i in range(30):
        tracker.update(y, torch.tensor([[3.0 - 0.05 * i, 2.0, 1.0 + 0.05 * i]]))
    w = tracker.weights(y)[0].tolist()
    assert w[0] > w[1] > w[2] >= 0


def test_curiosity_is_the_stated_sum(corpus):
    config = small("curiosity", dropout=0.0)
    made = build(config)
    x, y = RandomBatches(corpus.train, 4, 16, 0).next()
    nats = made(x, y, reduction="none")
    auxiliary = sum(v.item() * v for v in nats.flatten()) / nats.numel() / nats.mean().item()
    want = nats.mean() + 0.5 * auxiliary
    got = ablate.training_loss(made, x, y, config, None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    a, b = (torch.autograd.grad(v, made.wte.weight, retain_graph=True)[0] for v in (got, want))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_logit_peaks_are_the_largest_causal_logits():
    gen = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 5, 3, 4, generator=gen) for _ in range(2))
    trace = {"layers": [{"q": q, "k": k}]}

    def largest(h, reach):
        pairs = [(t, s) for t in range(5) for s in range(t + 1) if t - s < reach]
        return max(float(q[b, t, h] @ k[b, s, h]) / 2 for b in range(2) for t, s in pairs)
    (peaks,), (near,) = ablate.logit_peaks(trace), ablate.logit_peaks(trace, "hard_alibi")
    for h in range(3):
        assert peaks[h].item() == pytest.approx(largest(h, 5), rel=1e-5)
        # with hard_alibi heads 1 .. H/2 see only the h latest tokens
        assert near[h].item() == pytest.approx(largest(h, 1 if h < 1 else 5), rel=1e-5)


def test_muonclip_bounds_the_logits_of_the_batch(fresh, corpus):
    """With every rate 0 only the clip acts: afterwards the batch's logits reach tau, no more."""
    still = dict(dropout=0.0, muon_lr=0.0, adamw_lr=0.0, weight_decay=0.0, max_iters=1)
    made = build(small("muonclip", **still))
    x, y = RandomBatches(corpus.train, 4, 16, derive_seed("ablate batches", 0)).next()

    def peaks():
        trace = {}
        made(x, y, trace=trace)
        return torch.stack(ablate.logit_peaks(trace))
    before = peaks()
    tau = before.max().item() / 3
    made.load_state_dict(fresh("muonclip", True, qk_clip_tau=tau, **still))
    first = peaks()[0]   # later layers see other inputs
    torch.testing.assert_close(first, before[0].clamp_max(tau), rtol=1e-4, atol=1e-6)
    assert (before > tau).any()


# ---- a cell resumes ----

# every part of a checkpoint: dropout, both optimizers, hashed tables, batches, the averages of
# Progress and of the routers
PARTS = {"progress": dict(configs=["progress"], optimizer="muon", oe_m=97, seq_len=32),
         "moe_progress": dict(configs=["moe_progress"], per_head=True, optimizer="muon",
                              schedule="wsd")}


@pytest.mark.parametrize("arm", PARTS)
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_cell_goes_on_bit_for_bit(store, tmp_path, monkeypatch, capsys, steps, arm, how):
    flags = dict(max_iters=24, save_every=6, keep_checkpoints=True, **PARTS[arm])
    whole, args = tmp_path / "whole", one(store, tmp_path / "b", **flags)
    ablate.main(one(store, whole, **flags))
    if how == "killed":
        assert Child(args, tmp_path / "log", (arm, 20)).end()[0] == -signal.SIGKILL
    else:
        with monkeypatch.context() as m:
            signal_at(19, m)
            assert ablate.main(args) == 130
        assert "stopped; the same command goes on" in capsys.readouterr().err
    at = 18 if how == "killed" else 20
    assert common.load_checkpoint(only(tmp_path / "b", "*.ckpt"))["step"] == at
    assert not results(tmp_path / "b")
    steps.clear()
    assert ablate.main(args) == 0 and steps == list(range(at, 24))
    a, b = (common.load_checkpoint(only(out, "*.ckpt")) for out in (whole, tmp_path / "b"))
    for key in a.keys() - {"config", "train_s"}:
        assert_same(a[key], b[key], key)
    a, b = (read(only(out)) for out in (whole, tmp_path / "b"))
    assert all(a[key] == b[key] for key in ("curve", "metrics", "run"))


def test_a_checkpoint_is_removed_with_its_result_unless_it_is_wanted(store, tmp_path):
    ablate.main(one(store, tmp_path / "a"))
    ablate.main(one(store, tmp_path / "b", "--keep_checkpoints"))
    assert [len(list((tmp_path / d).glob("*.ckpt"))) for d in "ab"] == [0, 1]


def test_a_signal_in_the_last_step_of_a_cell_stops_the_sweep(store, tmp_path, monkeypatch, capsys):
    args = argv(store, tmp_path, seeds=(0,))
    with monkeypatch.context() as m:
        signal_at(4, m, signal.SIGINT)
        assert ablate.main(args) == 130
    assert [r["arm"] for r in results(tmp_path).values()] == ["modern"]
    assert ablate.main(args) == 0 and finished(capsys.readouterr().out)[-1] == ("pos", "0")


# ---- sweeps ----

KEYS = {"schema", "script", "run", "arm", "status", "config", "changed", "depth", "width", "seed",
        "params", "steps", "tokens", "metrics", "curve", "timing", "env"}


def test_sweep_writes_records_table_and_summary_and_resumes(store, tmp_path, capsys):
    args = argv(store, tmp_path, configs=["modern", "pos", "muon_vlo", "muon_lo"])
    assert ablate.main(args) == 0
    out = capsys.readouterr().out
    found = results(tmp_path)
    assert len(found) == len(finished(out)) == 8
    for name, record in found.items():
        assert set(record) == KEYS and record["run"] == Path(name).stem
        assert record["script"] == "ablate.py" and record["tokens"] == 5 * 4 * 16
        assert (record["depth"], record["width"], record["config"]["vocab_size"]) == (2, 48, 300)
        assert record["config"]["data_digest"] == Store(store).digest
        assert "data" not in record["changed"] and record["changed"]["seq_len"] == 16
        m = record["metrics"]
        assert abs(m["val_bpb"] - m["val_nats"] / math.log(2) / m["val_bytes"]) < 1e-12
    rows = {r["arm"]: r for r in read(only(tmp_path / "summary"))["rows"]}
    values = {(r["arm"], r["seed"]): r["metrics"]["val_loss"] for r in found.values()}
    a, b = ([values[arm, s] for s in (0, 1)] for arm in ("modern", "pos"))
    for arm, v in (("modern", a), ("pos", b)):
        assert abs(rows[arm]["mean"] - sum(v) / 2) < 1e-12 and f"{rows[arm]['mean']:.4f}" in out
        assert abs(rows[arm]["sd"] - statistics.stdev(v)) < 1e-12
    assert rows["pos"]["separated"] == (max(a) < min(b) or max(b) < min(a))
    for words in ("capacity confound: pos", "edge of bracket: muon_", "val loss"):
        assert words in out
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.json")}
    assert ablate.main(args) == 0
    out = capsys.readouterr().out
    assert not finished(out) and "8 of 8 cells are already finished" in out
    assert stamps == {p: p.stat().st_mtime_ns for p in stamps}
    assert ablate.main([*args, "--force"]) == 0
    assert len(finished(capsys.readouterr().out)) == 8
    assert all(p.stat().st_mtime_ns > stamps[p] for p in stamps)
    again = {(r["arm"], r["seed"]): r["metrics"]["val_loss"] for r in results(tmp_path).values()}
    assert again == values and not list(tmp_path.rglob(".*"))
    stats.main([str(tmp_path), "--metric", "val_loss"])
    out = capsys.readouterr().out
    assert "pos - modern" in out and "skipped" not in out


def name_of(arm, label="", seed=0, **flags):
    config = dataclasses.replace(config_of(Config(**flags), arm), seed=seed)
    base, size, idle = ablate.naming(config)
    return runs.run_name("ablate.py", config, base, size, label, idle)


def test_names():
    assert name_of("modern") == "modern_i2000_seed0"
    assert name_of("modern", "books-12ab34") == "modern_i2000_books-12ab34_seed0"
    assert name_of("modern", norm="layer") == "modern_i2000_norm-layer_seed0"
    assert name_of("muon", max_iters=300, seed=7) == "muon_i300_seed7"
    assert name_of("pos", pos="learned", seed=1) == "pos_i2000_seed1"       # its own axis
    assert name_of("modern", muon_lr=0.1, max_iters=9) == "modern_i9_seed0"   # no Muon there
    assert re.fullmatch(r"modern_i5_[0-9a-f]{8}_seed0", name_of("modern", **SMALL))


def test_a_new_row_renames_nothing_and_a_neutral_flag_orphans_nothing(
        store, tmp_path, monkeypatch, capsys, steps):
    ablate.main(argv(store, tmp_path, seeds=(0,)))
    with monkeypatch.context() as m:
        signal_at(2, m)
        ablate.main(one(store, tmp_path, seeds=(1,)))
    before = set(results(tmp_path))
    monkeypatch.setitem(CONFIGS, "mine", dict(norm="layer"))
    added = [("brand_new", float, common.flag(0.5, "a flag of tomorrow"))]
    wider = dataclasses.make_dataclass("Config", added, bases=(Config,), frozen=True)
    monkeypatch.setattr(ablate, "Config", wider)
    capsys.readouterr()
    args = argv(store, tmp_path, configs=["modern", "pos", "mine"], seeds=(0,))
    assert ablate.main(args) == 0
    out = capsys.readouterr().out
    assert "2 of 3 cells are already finished" in out and finished(out) == [("mine", "0")]
    assert before < set(results(tmp_path))
    steps.clear()
    ablate.main(one(store, tmp_path, seeds=(1,)))
    assert steps == [3, 4]
    ablate.main(one(store, tmp_path, brand_new=0.7))
    assert finished(capsys.readouterr().out)[-1] == ("modern", "0")


@pytest.mark.parametrize("first", ["own", "copy"])
def test_a_copied_script_has_cells_of_its_own(store, tmp_path, capsys, first):
    path, source = tmp_path / "ablate_mine.py", (ROOT / "ablate.py").read_text(encoding="utf-8")
    row = 'CONFIGS = {\n    "sharp": dict(norm="rms", dropout=0.0),\n'
    path.write_text(source.replace("CONFIGS = {\n", row), encoding="utf-8")
    mine, out = imported(path, "ablate_mine"), tmp_path / "out"
    sweeps = [(ablate, argv(store, out)), (mine, argv(store, out, configs=["modern", "sharp"]))]
    if first == "copy":
        sweeps.reverse()
    for script, args in sweeps:   # one folder, nothing refused
        before = {p: p.read_bytes() for p in out.glob("*.json")}
        assert script.main(args) == 0
        assert all(p.read_bytes() == content for p, content in before.items())
    records = results(out)
    for name, record in records.items():
        is_mine = name.startswith("ablate_mine-")
        assert record["script"] == ("ablate_mine.py" if is_mine else "ablate.py")
    assert len(records) == 8 and not list(out.rglob(".*"))
    assert len(list((out / "summary").glob("ablate_mine-modern+1_i5-*"))) == 1
    capsys.readouterr()
    stats.main([str(out)])
    said = capsys.readouterr().out
    for contrast in ("ablate_mine/sharp - modern", "ablate_mine/modern - modern", "pos - modern"):
        assert contrast in said


def test_shards_share_the_cells(corpus):
    sweep = ablate.Sweep(["modern", "pos", "muon"], [0, 1, 2], "modern", (1, 1))
    cells = ablate.make_cells(Config(), sweep, corpus)
    for n in (1, 2, 4, 9, 20):
        firsts = [ablate.read_shard(f"{i}/{n}")[0] for i in range(1, n + 1)]
        shared = [c.path for i in firsts for c in cells[i - 1::n]]
        assert sorted(shared) == sorted(c.path for c in cells)
    assert [c.config.seed for c in cells] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_two_processes_share_a_folder(store, tmp_path):
    """Every cell is computed by one of them, and the files are those of a single process."""
    kw = dict(configs=["modern", "pos", "muon"], seeds=(0, 1, 2), max_iters=8)
    args = argv(store, tmp_path / "two", **kw)
    ends = [child.end() for child in [Child(args, tmp_path / f"log{i}") for i in range(2)]]
    assert [code for code, _ in ends] == [0, 0], ends
    done = [finished(said) for _, said in ends]
    wanted = [(arm, str(seed)) for arm in kw["configs"] for seed in kw["seeds"]]
    assert all(done) and sorted(done[0] + done[1]) == sorted(wanted)
    ablate.main(argv(store, tmp_path / "one", **kw))
    alone, shared = results(tmp_path / "one"), results(tmp_path / "two")
    assert alone.keys() == shared.keys() and len(alone) == 9
    for name in alone:
        assert all(alone[name][key] == shared[name][key] for key in ("metrics", "curve"))
    assert not list(tmp_path.rglob(".*"))


def test_a_cell_held_by_another_process_is_left_to_it(store, tmp_path, capsys):
    args = argv(store, tmp_path, seeds=(0,))
    ablate.main(one(store, tmp_path))
    held = only(tmp_path)
    held.unlink()
    capsys.readouterr()
    with runs.locked(held):
        assert ablate.main(args) == 0
    out = capsys.readouterr().out
    assert finished(out) == [("pos", "0")] and not held.exists()
    assert "1 cells are being computed by other processes: modern seed 0" in out
    assert "not finished: modern, seed 0" in out
    assert ablate.main(args) == 0 and finished(capsys.readouterr().out) == [("modern", "0")]


def test_a_killed_and_a_stopped_sweep_go_on(store, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    args = argv(store, out, configs=["modern", "relu"], seeds=(0,), max_iters=12)
    code, said = Child(args, tmp_path / "log", ("relu", 5)).end()
    assert code == -signal.SIGKILL and finished(said) == [("modern", "0")]
    files = results(out)
    assert len(files) == 1
    with monkeypatch.context() as m:
        signal_at(7, m)
        assert ablate.main(args) == 130
    told = capsys.readouterr()
    assert "1 of 2 cells are already finished" in told.out and "stopped" in told.err
    assert results(out) == files
    assert ablate.main(args) == 0 and finished(capsys.readouterr().out) == [("relu", "0")]
    assert len(results(out)) == 2 and not list(out.rglob(".*"))


def refused(store, out, capsys, match):
    """modern's file is named and left alone, and the other cell is computed."""
    path = only(out, "modern_*.json")
    before = path.read_text()
    for other in out.glob("pos_*"):
        other.unlink()
    assert ablate.main(argv(store, out, seeds=(0,))) == 2
    told = capsys.readouterr()
    assert re.fullmatch(f"error: {re.escape(str(path))} .*{match}.*\n", told.err), told.err
    assert f"warning: left out: {path}" in told.out and path.read_text() == before
    assert finished(told.out)[-1:] == [("pos", "0")]


def broken_results(record):
    yield from ('{"schema": 1', "{}", "[]")
    for key, value in [("metrics", {}), ("metrics", {"val_loss": None, "val_bpb": 1.0}),
                       ("metrics", {"val_loss": "low", "val_bpb": 1.0}), ("status", "stopped"),
                       ("config", []), ("params", {}), ("timing", None)]:
        yield json.dumps({**record, key: value})


def test_a_damaged_checkpoint_is_named_and_blocks_no_other(store, tmp_path, capsys):
    ablate.main(one(store, tmp_path))
    path = only(tmp_path)
    path.unlink()
    path.with_suffix(".ckpt").write_text("x")
    assert ablate.main(argv(store, tmp_path, configs=["modern", "pos"], seeds=(0,))) == 2
    said = capsys.readouterr()
    assert f"{path.with_suffix('.ckpt')} is truncated" in said.err
    assert finished(said.out)[-1] == ("pos", "0")
    path.with_suffix(".ckpt").unlink()
    assert ablate.main(argv(store, tmp_path, configs=["modern", "pos"], seeds=(0,))) == 0


def test_a_damaged_result_is_named_and_blocks_no_other(store, tmp_path, capsys):
    ablate.main(one(store, tmp_path))
    path = only(tmp_path)
    for content in broken_results(read(path)):
        path.write_text(content)
        refused(store, tmp_path, capsys, "damaged")
    assert ablate.main(one(store, tmp_path, "--force")) == 0


OTHER = [("n_embd", dict(n_embd=999)), ("dtype", dict(dtype="bfloat16")), ("seed", dict(seed=77)),
         ("arm", dict(arm="pos")), ("script", dict(script="mine.py")), ("another corpus", {})]


@pytest.mark.parametrize("word, change", OTHER)
def test_a_file_is_not_trusted_by_its_name(store, tmp_path, capsys, word, change):
    ablate.main(one(store, tmp_path))
    path = only(tmp_path)
    record = read(path)
    if not change:
        change = {"config": {**record["config"], "data_digest": "0" * 16}}
    elif not set(change) <= set(record):
        change = {"changed": {**record["changed"], **change}}
    rewrite(path, **change)
    refused(store, tmp_path, capsys, f"is another run: .*{word}")


def test_an_explicit_default_is_the_same_cell(store, tmp_path, capsys):
    ablate.main(one(store, tmp_path))
    same = dict(dtype="float32", device="cpu", threads=1, save_every=2)
    ablate.main(one(store, tmp_path, **same))
    assert "1 of 1 cells are already finished" in capsys.readouterr().out
    assert len(results(tmp_path)) == 1


def test_text_without_bytes_has_no_bits_per_byte(store, tmp_path):
    """Tokens that stand for no byte: the loss counts, bits per byte are null, nothing stops."""
    ablate.main(one(store, tmp_path))
    path = only(tmp_path)
    rewrite(path, metrics={**read(path)["metrics"], "val_bpb": None})
    assert ablate.main(one(store, tmp_path)) == 0
    assert read(only(tmp_path / "summary"))["rows"][0]["val_bpb"] is None


def test_force_in_two_processes_runs_a_cell_once(store, tmp_path, capsys):
    args = argv(store, tmp_path, "--force", seeds=(0,))
    ablate.main(args)
    # as though another process had finished it after this one began
    os.utime(only(tmp_path, "modern_*.json"), (time.time() + 3600,) * 2)
    capsys.readouterr()
    ablate.main(args)
    assert finished(capsys.readouterr().out) == [("pos", "0")]


def test_force_begins_a_cell_anew(store, tmp_path, monkeypatch, steps):
    with monkeypatch.context() as m:
        signal_at(2, m)
        ablate.main(one(store, tmp_path))
    steps.clear()
    assert ablate.main(one(store, tmp_path, "--force")) == 0 and steps == [0, 1, 2, 3, 4]


def test_two_references_are_two_summaries(store, tmp_path):
    for ref in ("modern", "pos"):
        ablate.main(argv(store, tmp_path, "--ref", ref))
    found = [read(p)["ref"] for p in (tmp_path / "summary").glob("*.json")]
    assert sorted(found) == ["modern", "pos"]


def metered(n, ago):
    """(configs, Meter) of n equal cells of 100 steps, begun `ago` seconds ago."""
    configs = [Config(max_iters=100, seed=s) for s in range(n)]
    meter = ablate.Meter(configs, 300)
    meter.start -= ago
    return configs, meter


def ended(steps, status="finished"):
    metrics = {"val_loss": 5.0} if status == "finished" else {}
    return {"metrics": metrics, "status": status, "steps": steps, "timing": {"train_s": 1.0}}


def minutes_left(capsys):
    return int(re.search(r"about (\d+) min left", capsys.readouterr().out)[1])


def test_the_time_left_survives_a_divergence(capsys):
    configs, meter = metered(2, 10)   # ten seconds for the first cell's two steps
    meter.begin(SimpleNamespace(config=configs[0], step=0))
    meter.step(SimpleNamespace(config=configs[0], step=1, curve=[[0, 5.0]]))
    meter.finish(configs[0], ended(2, "diverged"))
    assert minutes_left(capsys) == pytest.approx(10 / 2 * 100 / 60, abs=1)


def test_the_time_left_counts_what_other_processes_do(capsys):
    """Four cells, ten minutes in: one done here, one elsewhere; the other two take ten more."""
    configs, meter = metered(4, 600)
    meter.skip(configs[1])
    meter.skip(configs[1])
    meter.finish(configs[0], ended(100))
    assert meter.cells == 3 and minutes_left(capsys) == 10


def test_the_time_left_does_not_count_what_a_checkpoint_had(capsys):
    configs, meter = metered(2, 60)   # a minute for the last ten steps of a cell
    meter.begin(SimpleNamespace(config=configs[0], step=90))
    meter.finish(configs[0], ended(100))
    assert minutes_left(capsys) == 10


# ---- table and warnings ----

def table(values, params=(), seq_len=(), lost=()):
    """({arm: row}, warnings) of {arm: losses by seed}; None: not run, or diverged in `lost`."""
    found, params, seq_len = {}, dict(params), dict(seq_len)
    for arm, losses in values.items():
        for seed, loss in enumerate(losses):
            if loss is not None or arm in lost:
                metrics = {} if loss is None else {"val_loss": loss, "val_bpb": loss / 3}
                found[arm, seed] = {
                    "status": "finished" if metrics else "diverged", "metrics": metrics,
                    "params": {"total": params.get(arm, 1000)},
                    "config": {"seq_len": seq_len.get(arm, 128)}}
    rows = ablate.summarise(list(values), [0, 1, 2], found, "modern")
    return {r["arm"]: r for r in rows}, ablate.warnings(rows, Config(), "modern")


def test_separation_is_by_seed_ranges():
    rows, _ = table({"modern": (3.0, 3.1, 3.2), "pos": (3.21, 3.5, 3.3), "alibi": (3.2, 3.5, 3.3),
                     "highway": (2.9, 2.8, 2.99), "delta": (2.0, None, None)})
    assert {arm: r["separated"] for arm, r in rows.items()} == {
        "modern": None, "pos": True, "alibi": False, "highway": True, "delta": None}
    assert abs(rows["pos"]["delta"] - (10.01 / 3 - 3.1)) < 1e-12
    assert rows["delta"]["sd"] is None and rows["delta"]["missing"] == [1, 2]


def test_missing_and_diverged_seeds_in_a_comparison():
    rows, lines = table({"modern": (5.0, 5.5, 6.0), "pos": (5.05, 5.45, None)})
    assert rows["pos"]["delta"] == pytest.approx(0, abs=1e-12)
    assert rows["pos"]["separated"] is False and rows["pos"]["mean"] == pytest.approx(5.25)
    assert any("pos, seed 2; compared over the other seeds" in line for line in lines)
    values = {"modern": (5.0, 5.5, 6.0), "muon": (4.0, 4.1, None), "muon_hi": (6.5, None, None)}
    rows, _ = table(values, lost=("muon", "muon_hi"))
    # one seed was lost: no clean win
    assert rows["muon"]["separated"] is False
    assert rows["muon"]["delta"] == pytest.approx(-1.2)
    # worse with every seed
    assert rows["muon_hi"]["separated"] is True
    assert rows["muon_hi"]["delta"] == pytest.approx(1.5)


def test_capacity_confound_beyond_half_a_percent():
    values = dict.fromkeys(("modern", "pos", "moe", "alibi"), (3.2, 3.5, 3.3))
    _, lines = table(values, params=dict(pos=1005, moe=994, alibi=995))
    told = "capacity confound: moe has -0.6% of modern's parameters"
    assert [line for line in lines if "capacity" in line] == [told]


def edges(values, **kw):
    return [line for line in table(values, **kw)[1] if line.startswith("edge of bracket: ")]


def test_edge_of_bracket():
    values = {"muon_vlo": (3, 3, 3), "muon_lo": (2, 2, 2), "muon": (4, 4, 4), "modern": (5, 5, 5),
              "adamw_1e3": (4, 4, 4), "adamw_3e3": (4.5, 5, 5)}
    assert not edges(values)
    (line,) = edges({**values, "muon": (1.5, 2, 2)})
    assert "muon is best at the highest of muon_lr 0.005, 0.01, 0.02" in line
    (line,) = edges({**values, "modern": (1, 1, 1)})
    assert "modern is best at the lowest of adamw_lr 0.0003, 0.001, 0.003" in line
    # a failed rate closes the bracket
    failed = {**values, "muon": (1.5, 2, 2), "muon_hi": (None, None, None)}
    assert not edges(failed, lost=["muon_hi"])
    # two names of one config
    (line,) = edges({"muon_lo": (2, 2, 2), "f11_muon": (3, 3, 3), "muon_vlo": (4, 4, 4)})
    assert "muon_lo is best at the highest of muon_lr 0.005, 0.01" in line
    # the best mean, and the worst of seed 0
    assert not edges({"muon_vlo": (2, 9, 9), "muon_lo": (1, 8, 8), "muon": (3, None, None)})
    # no two of them differ in a rate alone
    assert not edges({"muon_vlo": (3, 3, 3), "muonclip_lo": (2, 2, 2), "gdn_muon": (4, 4, 4),
                      "modern": (5, 5, 5)})
    # a flag at its default is no difference
    (line,) = edges({"d4_plain": (1, 1, 1), "adamw_1e3": (2, 2, 2)})
    assert "d4_plain is best at the lowest" in line


def test_other_block_sizes_and_diverged_seeds_are_not_compared():
    values = {"modern": (3.0, 3.1, 3.2), "modern_ctx512": (2, 2, 2), "muon_hi": (None, None, None)}
    rows, lines = table(values, seq_len=dict(modern_ctx512=512), lost=["muon_hi"])
    assert rows["modern_ctx512"]["delta"] is None
    assert rows["muon_hi"]["mean"] is None and rows["muon_hi"]["diverged"] == [0, 1, 2]
    for words in ("not compared: modern_ctx512", "diverged: muon_hi, seed 0, 1, 2"):
        assert any(words in line for line in lines)


# ---- text, mistakes ----

SYLLABLES = "ба ва га да же за ка ла ма на по ра са та че ши ще ът юн яв ми ко ро ли".split()


def test_cyrillic_text_needs_no_special_case(tmp_path, monkeypatch):
    """From a text file to bits per byte, where a letter has two bytes."""
    monkeypatch.chdir(tmp_path)
    gen = np.random.default_rng(0)

    def word():
        return "".join(gen.choice(SYLLABLES, gen.integers(1, 4)))
    lines = [" ".join(word() for _ in range(12)).capitalize() + "." for _ in range(1500)]
    Path("книга.txt").write_text("\n".join(lines), encoding="utf-8")
    kw = dict(max_iters=30, eval_tokens=640)
    assert ablate.main(one("книга.txt", "out", vocab_size=400, **kw)) == 0
    found, store = read(only("out")), Store("stores/книга-400")
    ids = [int(i) for i in store.val[1:641]]
    scored, m = store.tokenizer.decode(ids, skip_special_tokens=True), found["metrics"]
    # a window may end inside a letter
    assert m["val_tokens"] == 640 and abs(m["val_bytes"] - len(scored.encode())) <= 4
    assert m["val_bytes"] > 1.7 * len(scored) and 0 < m["val_bpb"] < 5
    assert abs(m["val_bpb"] - m["val_nats"] / math.log(2) / m["val_bytes"]) < 1e-12
    # the same text under the store's tokenizer is the same corpus, and the same cell
    own = "stores/книга-400/tokenizer.json"
    assert ablate.main(one("книга.txt", "out2", tokenizer=own, **kw)) == 0
    again = read(only("out2"))
    assert all(again[key] == found[key] for key in ("metrics", "run", "changed"))


def bad_inputs(store, tmp_path):
    """(what is said, command line)"""
    other, changed = tmp_path / "other.json", read(f"{store}/tokenizer.json")
    changed["model"]["merges"].pop()
    other.write_text(json.dumps(changed))
    (tmp_path / "junk.json").write_text('{"a": 1}')
    from tokenizers import Tokenizer, models
    foreign = Tokenizer(models.BPE({c: i for i, c in enumerate("abcd")}, []))
    foreign.save(str(tmp_path / "foreign.json"))
    short, nameless = tmp_path / "short", tmp_path / "nameless"
    short.mkdir(), nameless.mkdir()
    for i in range(25):
        (short / f"{i}.txt").write_text(f"ab {i}")
    for path in Path(store).iterdir():
        if path.name != "meta.json":
            (nameless / path.name).write_bytes(path.read_bytes())
    out, own = ["--out", str(tmp_path / "out")], f"{store}/tokenizer.json"
    text = ["--data", str(short), "--tokenizer", own, *out]
    base = ["--data", store, *out]
    sweep = [*base, "--configs"]
    return [
        ("unknown", [*sweep, "modren"]),
        ("not the one", [*base, "--tokenizer", str(other)]),
        ("no tokenizer.json", [*base, "--tokenizer", str(tmp_path / "junk.json")]),
        ("was not written by data.py", [*base, "--tokenizer", str(tmp_path / "foreign.json")]),
        ("is no tokenizer.json (", [*base, "--tokenizer", str(tmp_path / "missing.json")]),
        ("--seeds 1 is given twice", [*base, "--seeds", "1", "2", "1"]),
        ("--seeds is given twice", [*base, "--seeds", "1", "--seeds", "2"]),
        ("--configs pos is given twice", [*sweep, "pos", "modern", "pos"]),
        ("do not fit into", [*base, "--seq_len", "100000"]),
        ("less than one row", [*base, "--eval_tokens", "100"]),
        ("--shard 3/2", [*base, "--shard", "3/2"]),
        ("--shard 0/2", [*base, "--shard", "0/2"]),
        ("--shard 1", [*base, "--shard", "1"]),
        ("--shard -1/2", [*base, "--shard=-1/2"]),
        ("--shard 1/999", [*base, "--shard", "1/" + "9" * 5000]),
        ("out of range", [*base, "--seeds", "-1"]),
        ("invalid whole number", [*base, "--seeds", "a"]),
        ("the store", [*base, "--vocab_size", "400"]),
        ("brings its own", [*text, "--vocab_size", "300"]),
        ("config modern: rows of 128 tokens", text),
        ("no such file", ["--data", str(tmp_path / "nowhere.txt")]),
        ("too large", [*base, "--grad_topk", "1.5"]),
        ("--ref nobody", [*base, "--ref", "nobody"]),
        ("--ref pos is not in the sweep", [*base, "--ref", "pos"]),
        ("goes with --list", [*base, "--json"]),
        ("--list runs nothing: leave out --seeds", ["--list", "--seeds", "1"]),
        ("--list runs nothing: leave out --save_every", ["--list", "--save_every", "1"]),
        ("is not a store", ["--data", str(nameless), *out]),
        ("the store stores/stdlib-8192 has its own", ["--vocab_size", "512", *out]),
        ("--muon_lr has no effect", [*base, "--muon_lr", "0.01"]),
        ("no config that takes it uses Muon", [*sweep, "modern", "muon_hi", "--muon_lr", "0.3"]),
        ("add --oe_m", [*base, "--oe_lr", "0.1"]),
        ("unrecognized", [*base, "--max_iter", "5"]),
        ("unrecognized arguments: --seed", [*base, "--seed", "5"]),
        ("config gds_ctx512", [*sweep, "gds_ctx512", "--n_embd", "33"]),
        ("config delta", [*sweep, "delta", "--n_head", "5"]),
        ("config modern", [*base, "--attn", "delta"]),
        ("--seq_len 64 has no effect", [*sweep, "gds_ctx512", "--seq_len", "64"]),
        ("a warm-up of 50 steps does not fit", [*base, "--warmup", "50", "--max_iters", "3"]),
        ("per_head is Muon's", [*base, "--per_head"]),
        ("softmax attention; delta has none", [*sweep, "delta", "--qk_clip_tau", "9"]),
        ("use a dense ffn", [*sweep, "moe", "--progress", "1"]),
        ("config modern: fast_weight_impl", [*base, "--fast_weight_impl", "recurrent"]),
        ("config moe: moe_top_k", [*sweep, "moe", "--moe_top_k", "9"]),
        ("is a file or lies below one", ["--data", store, "--out", str(tmp_path / "junk.json")]),
        ("would mean the current folder", ["--data", store, "--out", ""])]


def test_mistakes_are_one_line_and_leave_nothing(store, tmp_path, capsys):
    for words, args in bad_inputs(store, tmp_path):
        with pytest.raises(SystemExit) as stopped:
            common.cli(ablate.main, args)
        err = capsys.readouterr().err
        assert stopped.value.code == 2 and err.startswith("error: "), (words, err)
        assert err.count("\n") == 1 and words in err, (words, err)
    assert not (tmp_path / "out").exists()


MISTAKES = [(dict(fnn="relu"), "config mine of CONFIGS: there is no flag fnn"),
            (dict(ffn="relo"), "config mine: .*ffn.*relo"),
            (dict(dropout=1.5), "config mine: .*dropout"), (dict(out="x"), "there is no flag out")]


@pytest.mark.parametrize("row, says", MISTAKES)
def test_a_config_with_a_mistake_is_named(store, tmp_path, monkeypatch, row, says):
    monkeypatch.setitem(CONFIGS, "mine", row)
    with pytest.raises(UserError, match=says):
        ablate.main(one(store, tmp_path / "out", configs=["mine"]))


def test_under_torchrun_it_is_refused(store, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--shard"):
        ablate.main(one(store, tmp_path))


def test_a_flag_that_some_configs_do_not_take_is_told(capsys):
    both = ["--configs", "modern", "highway_scalar"]
    config, _ = ablate.parse([*both, "--residual", "highway"])
    told = "--residual highway does not act on highway_scalar (highway_scalar)"
    assert told in capsys.readouterr().err
    assert config_of(config, "modern").residual == "highway"
    assert config_of(config, "highway_scalar").residual == "highway_scalar"
    ablate.parse([*both, "--n_layer", "3"])
    assert not capsys.readouterr().err
