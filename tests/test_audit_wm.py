"""audit_wm.py: every measure against autograd, enumeration, torch's own optimizer or a loop."""
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import audit
import audit_wm
import common
import train_wm
import wm
from audit_wm import CELLS, Cosine, Drift, cosine, mean, run_of
from batches import Store, eval_batches
from common import UserError
from data import prepare
from helpers import argv_of
from model import GPT
from optim import POOL
from wm import Layer, live
from wm_kernels import signs
from wm_pipeline import forward

SMALL = dict(depth=2, width=64, head_dim=32, seq_len=17, batch_size=3, device="cpu",
             dtype="float64")


def said(name, capsys, *argv, **flags):
    """The JSON of an audit; flags of SMALL where there are any."""
    argv = [name, *argv, "--json", *(argv_of({**SMALL, **flags}) if flags else [])]
    assert not audit.main(argv)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def warmed(data, steps=4, **flags):
    """A pipeline after some steps of the rule in float64, and its batches."""
    pipeline, batches = audit_wm.start(run_of(Cosine(data=data, **SMALL), **flags))
    for step in range(steps):
        pipeline.step(step, 360, [batches.next()])
    return pipeline, batches


def moved(a, b):
    return ((b - a).norm() / a.norm()).item()


# ---- measures ----

def test_measures_of_matrices():
    W, V = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    a, b = W.flatten().double(), V.flatten().double()
    assert abs(cosine(W, V) - (a @ b / a.norm() / b.norm()).item()) < 1e-12
    assert math.isnan(cosine(W, 0 * V)) and abs(audit_wm.relative(2 * W, W) - 2) < 1e-12
    pairs = [abs(cosine(W[:, i], W[:, j])) for i in range(5) for j in range(5) if i != j]
    assert abs(audit_wm.coherence(W) - sum(pairs) / len(pairs)) < 1e-12
    for bad in (torch.eye(4)[:, :1], 0 * W):
        assert math.isnan(audit_wm.coherence(bad))
    assert audit_wm.coherence(torch.eye(4)) == 0
    assert abs(audit_wm.coherence(torch.ones(3, 4)) - 1) < 1e-12
    assert audit_wm.singleton_occupancy(torch.tensor([[3, 1, 3], [2, 9, 9]])) == 2 / 6


def test_cells_are_those_of_table_2():
    printed = common.published("wm")["drift"]
    assert {row["cell"]: (row["pool"], row["beta1"], row["eps"]) for row in printed} == CELLS


def test_exact_gradients_leave_no_trace(store):
    pipeline, batches = warmed(store)
    model, micros = pipeline.model, [batches.next(), batches.next()]
    before = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    names = ["wte.weight", "blocks.0.attn.c_q.weight", "lm_head.weight", "value_embeds.1.weight"]
    found = audit_wm.exact_gradients(model, micros, names)
    assert not any(p.requires_grad for p in model.parameters())
    for n, p in model.named_parameters():
        assert p.grad is before[n] or torch.equal(p.grad, before[n])
    twin = GPT(model.cfg).double()
    twin.load_state_dict(model.state_dict())
    sum(twin(*m) for m in micros).div(2).backward()
    for name in names:
        want = twin.get_parameter(name).grad
        torch.testing.assert_close(found[name], want, rtol=1e-10, atol=1e-14)


# ---- states ----

def test_a_state_is_that_of_the_run(store, tmp_path):
    """The weights that an audit sees are those of train_wm.py with the same flags."""
    path = trained(store, tmp_path, 3)
    want = common.load_checkpoint(path)["model"]
    pipeline, batches = audit_wm.start(run_of(Cosine(data=store, **SMALL)))
    for step in range(3):
        pipeline.step(step, 3, [batches.next()])
    for name, p in pipeline.model.named_parameters():
        assert torch.equal(p, want[name]), name


def trained(data, out, steps, **flags):
    """Path of a small run's checkpoint."""
    flags = {**SMALL, "data": data, "out": out, "steps": steps, "eval_tokens": 300,
             "save_every": 0, **flags}
    record = train_wm.train(train_wm.parse(argv_of(flags)))
    return f"{out}/{record['run']}.ckpt"


# ---- wm-cosine ----

def test_cosine_falls_with_the_streams_and_without_the_filter(store, capsys):
    found = said("wm-cosine", capsys, data=store, at="2,4", streams="17,1", batch_size=4)
    assert list(found["steps"]) == ["2", "4"] and found["tokens"] == 68
    columns = {}
    for column, kinds in found["steps"]["4"].items():
        columns[column] = {kind: mean(values) for kind, values in kinds.items()}
    full, late, without = columns["G=N"], columns["as_installed"], columns["unfiltered"]
    assert abs(full["lm_head"] - 1) < 1e-12 and abs(late["lm_head"] - 1) < 1e-12
    for kind in ("wte", "attn.c_proj", "ffn.c_proj", "ffn.c_fc", "attn.c_v", "value_embeds"):
        assert full[kind] > max(0.9, columns["G=17"][kind] + 0.1), kind
        assert 0.5 < late[kind] < full[kind]
    assert without["attn.c_v"] < full["attn.c_v"] - 0.05
    assert without["value_embeds"] < 0.8 * full["value_embeds"]
    assert without["ffn.c_fc"] == full["ffn.c_fc"]
    assert columns["uncentred"]["wte"] > full["wte"]
    assert columns["uncentred"]["attn.c_v"] == full["attn.c_v"]
    assert 0 < full["attn.c_q"] < 0.6 and "attn.c_q" not in late


def test_no_credit_at_initial_weights_is_null(store, capsys):
    found = said("wm-cosine", capsys, data=store, at="0", streams="1")["steps"]["0"]["G=N"]
    assert found["ffn.c_fc"] == [None, None] and found["attn.c_proj"][0] > 0.5


def test_as_installed_is_the_credit_built_with_later_receivers(store):
    config = Cosine(data=store, at="3", streams="1", **SMALL)
    found = audit_wm.wm_cosine(config, [])["steps"][3]["as_installed"]
    pipeline, batches = warmed(store, 3)
    model, rule, batch = pipeline.model, pipeline.rule, batches.next()
    exact = audit_wm.exact_gradients(model, [batch], list(pipeline.weights))
    with torch.no_grad():
        packet = forward(model, *batch, "46/3/0")[0]
        pipeline.step(3, 360, [batch])
        packet.bus = wm.bus_credit(model, packet, rule, live)
        want = wm.stage2(model, packet, rule, live)
        pipeline.step(4, 360, [batches.next()])
        want.update(wm.stage1(model, packet, rule, live))
    want = audit_wm.by_kind({name: cosine(g, exact[name]) for name, g in want.items()})
    for kind, values in want.items():
        got = torch.tensor(found[kind])
        torch.testing.assert_close(got, torch.tensor(values), rtol=1e-12, atol=0)


def test_cosine_of_a_checkpoint_is_that_of_its_step(store, tmp_path, capsys):
    path = trained(store, tmp_path, 4)
    ours = said("wm-cosine", capsys, path, "--streams=1", "--device=cpu")["steps"]
    fresh = said("wm-cosine", capsys, data=store, at="4", streams="1", run_steps=4)["steps"]
    assert ours == fresh and list(ours) == ["4"]
    path = trained(store, tmp_path, 3, method="backprop", batch_size=6, micro_batch=3)
    audit.main(["wm-cosine", path, "--streams=17", "--device=cpu"])
    table = capsys.readouterr().out.split("\nstep 3\n")[1]
    assert "as_installed" not in table and "0.9139" in table
    (tmp_path / "other.txt").write_text("another corpus " * 400)
    out = str(tmp_path / "other")
    other = f"--data={prepare([str(tmp_path / 'other.txt')], vocab_size=265, out=out)}"
    for more, word in (("--seed=3", "checkpoint's own"), (path, "0 to 1"),
                       (f"--data={tmp_path}/none", "no such store"), (other, "another corpus")):
        with pytest.raises(UserError, match=word):
            audit.main(["wm-cosine", path, "--streams=1", more])
    with pytest.raises(UserError, match="another corpus"):
        audit.main(["wm-geometry", path, other])


# ---- wm-drift ----

@pytest.mark.parametrize("pool", POOL)
def test_head_parts_sum_to_adamw(pool):
    """Five steps of torch's AdamW (entrywise), or of the formula of WM 3.4 (row_iso)."""
    gen, lr, beta1, eps, decay = torch.Generator().manual_seed(1), 0.03, 0.7, 1e-3, 0.2
    W = torch.randn(5, 3, generator=gen).double()
    ref = torch.nn.Parameter(W.clone())
    opt = torch.optim.AdamW([ref], lr=lr, betas=(beta1, 0.95), eps=eps, weight_decay=decay)
    m = v = torch.zeros_like(W)
    for step in range(1, 6):
        g = torch.randn(W.shape, generator=gen).double()
        v = 0.95 * v + 0.05 * g**2
        parts = audit_wm.head_parts(W, m, v, g, step, lr, beta1, eps, pool, decay)
        m = beta1 * m + (1 - beta1) * g
        if pool == "entrywise":
            ref.grad = g
            opt.step()
            want = ref.detach()
        else:
            d = 1 / ((v.mean(1, keepdim=True) / (1 - 0.95**step)).sqrt() + eps)
            want = W - lr * decay * W - lr / (1 - beta1**step) * d * m
        W = W + sum(parts.values())
        torch.testing.assert_close(W, want, rtol=1e-12, atol=1e-14)
    assert all(p.abs().max() > 1e-4 for p in parts.values())


def test_shadow_of_the_runs_own_cell_moves_the_head_as_the_run_does(store):
    config, shadows = Drift(data=store, **SMALL, warm=2, steps=2), audit_wm.Shadows(CELLS)
    for _, pipeline, _, weights in audit_wm.trajectory(config, run_of(config), ""):
        W, head = weights["lm_head.weight"], pipeline.model.lm_head.weight
        groups = {g["role"]: g for g in pipeline.optimizer.param_groups}
        parts = shadows.displacements(W, head.grad, groups["lm_head"]["lr"], 0.0)
        moves = {cell: sum(found().values()) for cell, found in parts.items()}
        ours = W + moves["entrywise_b09_eps1e4"]
        torch.testing.assert_close(ours, head.detach(), rtol=1e-9, atol=1e-13)
    assert len({f"{move.norm().item():.6f}" for move in moves.values()}) == 8


@torch.no_grad()
def test_bus_drift_is_what_reading_the_moved_head_gives(store):
    pipeline, batches = warmed(store)
    model, rule, gen = pipeline.model, pipeline.rule, torch.Generator().manual_seed(5)
    packet = forward(model, *batches.next(), "x")[0]
    W = model.lm_head.weight.clone()

    def read(M, project):
        changed = replace(rule, project=project)
        return wm.bus_credit(model, packet, changed, lambda name, _: M)

    def noise():
        return 3e-4 * torch.randn(W.shape, generator=gen).double()
    parts = {"momentum": noise(), "current": noise(), "decay": -0.1 * W}
    found, after = audit_wm.bus_drift(packet, rule, W, parts), W + sum(parts.values())
    for project, name in ((False, "bus_unproj"), (True, "bus_tangent")):
        a, b = read(W, project), read(after, project)
        assert abs(found[f"{name}_cos"] - cosine(a, b)) < 1e-10
        assert abs(found[f"{name}_rel_l2"] - moved(a, b)) < 1e-10
    for part, name in (("current", "cur_grad_only_drift"), ("momentum", "momentum_only_drift")):
        alone = moved(read(W, True), read(W + parts[part], True))
        assert abs(found[name] - alone) < 1e-10
    # decay + momentum + current = total
    base = read(W, False)
    shift = {name: read(W + M, False) - base for name, M in parts.items()}
    total = read(after, False) - base
    torch.testing.assert_close(sum(shift.values()), total, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(shift["decay"], -0.1 * base, rtol=1e-9, atol=1e-12)
    only = audit_wm.bus_drift(packet, rule, W, {"current": 0 * W, "decay": -0.1 * W})
    assert only["cur_grad_only_drift"] == only["momentum_only_drift"] == 0
    assert abs(only["bus_tangent_rel_l2"] - 0.1) < 1e-12


def test_receiver_drift_by_hand(store):
    config = Drift(data=store, **SMALL, warm=3, steps=1)
    for step, pipeline, _, weights in audit_wm.trajectory(config, run_of(config), ""):
        pass
    found, packet = audit_wm.receiver_drift(pipeline, step, weights), pipeline.packets[step - 1][0]
    pairs, sigma = {"ffn": [], "attn": []}, pipeline.rule.sigma
    for i, layer in enumerate(packet.layers):
        a, u = layer["pre"].flatten(0, 1), packet.bus   # resid_lambdas are 1, and so is every gamma
        xi = signs(*a.shape, *packet.site(f"fc{i}"), dtype=a.dtype)
        slope = (F.relu(a + sigma * xi) ** 2 - F.relu(a) ** 2) * xi / sigma
        for part in pairs:
            name = f"blocks.{i}.{part}.c_proj.weight"
            both = (weights[name], pipeline.model.get_parameter(name).detach())
            pairs[part].append([(u @ W) * (slope if part == "ffn" else 1) for W in both])
    a, b = (torch.cat([pair[k].flatten() for part in pairs.values() for pair in part])
            for k in (0, 1))
    assert abs(found["both"]["cos"] - cosine(a, b)) < 1e-10
    assert abs(found["both"]["rel_l2"] - moved(a, b)) < 1e-10 and found["both"]["rel_l2"] > 1e-3
    for part in pairs:
        assert abs(found[part]["rel_l2"] - mean(moved(*pair) for pair in pairs[part])) < 1e-10


def test_drift_acts_and_prints(store, capsys):
    small = dict(data=store, warm=3, steps=2, batch_sizes="2,4")
    found = said("wm-drift", capsys, **small)
    cells = found["cells"]
    assert set(cells) == set(CELLS)
    assert [row["BT"] for row in found["batch_occupancy"]] == [34, 68]
    strong, weak = cells["entrywise_b05_eps1e8"], cells["entrywise_b09_eps1e4"]
    assert strong["cur_grad_only_drift"] > weak["cur_grad_only_drift"] > 0
    receivers = found["stage1_receiver_drift"]
    assert receivers["AdamW"]["both"] != receivers["Pre-Polar Muon"]["both"]
    decayed = said("wm-drift", capsys, head_decay=0.9, **{**small, "batch_sizes": "0"})
    ours, plain = (found_["cells"]["row_iso_b05_eps1e4"] for found_ in (decayed, found))
    assert decayed["batch_occupancy"] == [] and ours != plain
    assert ours["cur_grad_only_drift"] == plain["cur_grad_only_drift"]
    audit_wm.print_drift(found)
    text = capsys.readouterr().out
    assert "0.3941" in text and "23.5600" in text and "singleton" in text


# ---- wm-kurtosis ----

def test_prop4_by_enumeration():
    sparse, gen = torch.tensor([1.0, 2, 0, 0, 0, 0, 0]), torch.Generator().manual_seed(3)
    for z in (torch.tensor([1.0, 2.0]), sparse, torch.randn(7, generator=gen)):
        xi = torch.tensor(list(itertools.product((1.0, -1.0), repeat=len(z))))
        kappa, ratio = audit_wm.residue(z.expand_as(xi), xi)
        D, rms = len(z), z.double().square().mean().sqrt()
        x, want = z.double() / rms, []
        for s in xi.double():
            b = x * s * (s - x * (x @ s) / D) / rms
            want.append(((b - x * (x @ b) / D) ** 2).sum() / ((x / rms) ** 2).sum())
        torch.testing.assert_close(ratio, torch.stack(want), rtol=1e-10, atol=1e-12)
        assert ratio.mean() <= kappa[0] / D + 1e-12 and abs(kappa[0] - (x**4).mean()) < 1e-10
        if z is sparse:
            assert abs(ratio.mean() - 0.0576) < 1e-9 and abs(kappa[0] / D - 0.68) < 1e-9
    b, b_rad = audit_wm.prop4(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))
    want = torch.tensor([[0.16, -0.16], [0.4, 0.8]]).double()
    torch.testing.assert_close(torch.cat([b, b_rad]), want, rtol=1e-7, atol=0)


def test_kurtosis_of_a_trajectory(store, capsys):
    found = said("wm-kurtosis", capsys, data=store, warm=1, steps=3)
    most = found["kappa4_token_max"]
    assert found["token_evaluations"] == 3 * 51 and found["D"] == 64
    assert 1 <= found["kappa4_token_mean"] <= most <= 64
    assert abs(found["bound_mean"] - found["kappa4_token_mean"] / 64) < 1e-12
    # 153 draws whose expectation is below the bound
    assert 0.5 < found["empirical_ratio_mean"] / found["bound_mean"] < 1.1
    pipeline, batches = warmed(store, 1)
    with torch.no_grad():
        packet = forward(pipeline.model, *batches.next(), "46/1/0")[0]
    kappa, _ = audit_wm.residue(packet.x_L, audit_wm.draw_bus(packet, pipeline.rule))
    assert kappa.max() <= most
    audit_wm.print_kurtosis(found)
    assert "2.9398" in capsys.readouterr().out


# ---- wm-attention ----

def test_oracle_and_layer_give_the_whole_gradient(store):
    """A layer's input does not depend on its own c_q, c_k, c_v: with the true downstream gradient
    its gradient is the model's."""
    pipeline, batches = warmed(store)
    model, batch = pipeline.model, batches.next()
    for i in (0, 1):
        _, found = audit_wm.oracle(model, *batch, i)
        names = {part: f"blocks.{i}.attn.{part}.weight" for part in found}
        want = audit_wm.exact_gradients(model, [batch], list(names.values()))
        for part, g in found.items():
            torch.testing.assert_close(g, want[names[part]], rtol=1e-8, atol=1e-13)
    # where c_proj is 0 it is read as the identity
    proj = model.blocks[0].attn.c_proj.weight.data
    proj.copy_(1e-7 * torch.eye(64))
    near = audit_wm.oracle(model, *batch, 0)[0] / 1e-7
    proj.zero_()
    found, room = audit_wm.oracle(model, *batch, 0)[0], 1e-4 * near.abs().max().item()
    torch.testing.assert_close(found, near, rtol=1e-3, atol=room)
    assert not any(p.requires_grad for p in model.parameters())


def tiers(capsys, **flags):
    rows = said("wm-attention", capsys, **flags)["tiers"]
    return {(row["matrix"], row["gamma_k"], row["K"]): row["cosine"] for row in rows}


def test_tiers_are_those_of_qk_credit(store, capsys):
    found = tiers(capsys, data=store, layer=1, probes="1,3", gammas="0,0.8,1")
    assert abs(found["c_v", None, 1] - 1) < 1e-12 and len(found) == 1 + 2 + 6
    pipeline, batches = warmed(store, 0, active="qk")
    model, (idx, targets) = pipeline.model, batches.next()
    S, exact = audit_wm.oracle(model, idx, targets, 1)
    with torch.no_grad():
        packet = forward(model, idx, targets, "audit/46")[0]
    kept = packet.layers[1]
    layer = Layer(1, model.blocks[1].attn.window, kept, kept, u=None, S=S)
    for K, gamma in itertools.product((1, 3), (0.0, 0.8, 1.0)):
        rule = wm.Rule(active="qk", probes=K, gamma_k=gamma)
        for part, credit in wm.qk_credit(model, packet, layer, rule).items():
            g = credit.T @ kept["attn_in"].flatten(0, 1) / -len(S)
            ours = found[part, None if part == "c_q" else gamma, K]
            assert abs(ours - cosine(g, exact[part])) < 1e-10


def test_more_probes_come_closer(store, capsys):
    found = tiers(capsys, data=store, probes="1,64", gammas="0,1")
    assert found["c_q", None, 64] > 0.6 > found["c_q", None, 1]
    assert found["c_k", 1.0, 64] > 0.5 > found["c_k", 0.0, 64]
    flags = argv_of(dict(SMALL, data=store, probes="1", gammas="0.85"))
    audit.main(["wm-attention", *flags])
    assert "0.1357" in capsys.readouterr().out


# ---- wm-geometry ----

def test_geometry_by_hand(store, tmp_path, capsys):
    late, early = trained(store, tmp_path / "a", 5), trained(store, tmp_path / "b", 2)
    flags = ["--batch_size=2", "--device=cpu"]
    found = said("wm-geometry", capsys, late, *flags)
    other = said("wm-geometry", capsys, late, early, *flags)
    model = audit_wm.open_run(late)[1]
    W = model.blocks[1].ffn.c_proj.weight.detach()
    layer = found["matrices"]["ffn.c_proj"][1]
    rank = (W.square().sum() / torch.linalg.svdvals(W)[0] ** 2).item()
    assert abs(layer["srank"] - rank) < 1e-9
    assert abs(layer["coherence"] - audit_wm.coherence(W)) < 1e-12
    text = Store(store)
    idx = next(iter(eval_batches(text.val, text.bos, 2, 17)))[0]

    @torch.no_grad()
    def maps(model):
        """Attention weights row by row, from the traced q and k."""
        trace, out = {}, []
        model(idx, trace=trace)
        for layer in trace["layers"]:
            q, k = layer["q"], layer["k"]
            A = torch.zeros(*idx.shape, 2, idx.size(1)).double()
            for t in range(idx.size(1)):
                z = torch.einsum("bhd,bshd->bhs", q[:, t], k[:, :t + 1])
                A[:, t, :, :t + 1] = (z / 32**0.5).softmax(-1)
            out.append(A)
        return out
    first = GPT(model.cfg).init_weights(46).double()
    for base, what in ((first, found), (audit_wm.open_run(early)[1], other)):
        want = [moved(b, a) for a, b in zip(maps(model), maps(base))]
        ours = torch.tensor(what["attention_shift"])
        torch.testing.assert_close(ours, torch.tensor(want), rtol=1e-6, atol=1e-8)
        assert min(want) > 1e-4
    assert said("wm-geometry", capsys, late, late, *flags)["attention_shift"] == [0, 0]
    audit.main(["wm-geometry", late, *flags])
    shown = capsys.readouterr().out
    assert "141.3300" in shown and "0.8587" in shown


def test_damaged_checkpoints(store, tmp_path):
    path = trained(store, tmp_path, 2)
    good = common.load_checkpoint(path)
    for damage in ({"config": {}}, {"config": 3}, {"model": {}}, {"model_config": None},
                   {"step": "2"}):
        common.save_checkpoint(path, {**good, **damage})
        for name in ("wm-geometry", "wm-cosine"):
            with pytest.raises(UserError, match="damaged"):
                audit.main([name, path, "--device=cpu"])


# ---- the command line ----

@pytest.mark.parametrize("line, word", [
    ("wm-cosine --at x", "numbers"), ("wm-cosine --at -3", "numbers"),
    ("wm-cosine --at 1 --at 2", "twice"), ("wm-cosine --width 65", "multiple"),
    ("wm-cosine --at 5 --run_steps 4", "behind the end"), ("wm-cosine none.ckpt", "no such"),
    ("wm-cosine --streams 7 --seq_len 16 --batch_size 2 --depth 1", "divide"),
    ("wm-kurtosis --warm 3 --steps 2 --run_steps 4", "do not fit"),
    ("wm-kurtosis --layer 1", "unrecognized"), ("wm-drift --warm 1", "too small"),
    ("wm-drift --batch_sizes 0,2", "does not go"), ("wm-drift x.ckpt", "unrecognized"),
    ("wm-attention --layer 6", "layers 0 to 5"), ("wm-attention --gammas 2", "between 0 and 1"),
    ("wm-attention --probes 0,1", "start at 1"), ("wm-geometry", "1 to 2"),
    ("wm-geometry a b c", "1 to 2"), ("wm-nothing", "choose"),
    ("params --layer 1", "unrecognized")])
def test_mistakes(line, word, store):
    fresh = line.split()[0] in ("wm-cosine", "wm-attention") and ".ckpt" not in line
    with pytest.raises(UserError, match=word):
        audit.main(line.split() + (["--data", store] if fresh else []))


FLAGS = [dict(sigma=1.0), dict(seed=1), dict(data_seed=1), dict(run_steps=3), dict(depth=1),
         dict(head_dim=16), dict(width=32), dict(seq_len=16), dict(batch_size=2), dict(warm=2),
         dict(steps=3), dict(dtype="float32")]


def test_flags_act(store, capsys):
    base = dict(data=store, warm=1, steps=2)
    plain = said("wm-kurtosis", capsys, **base)
    for change in FLAGS:
        assert said("wm-kurtosis", capsys, **{**base, **change}) != plain, change
