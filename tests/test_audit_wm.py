"""audit_wm.py: every measure against autograd, enumeration, torch's own optimizer or a loop; a delay that is wrong is called so."""
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
from audit_wm import CELLS, Cosine, Drift, cosine
from common import UserError
from data import prepare
from model import GPT, GPTConfig
from optim import POOL
from wm import Rule, record
from wm_kernels import signs

SMALL = dict(depth=2, width=64, head_dim=32, seq_len=17, batch_size=3, device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder, gen = tmp_path_factory.mktemp("corpus"), torch.Generator().manual_seed(0)
    words = "the quick brown fox jumps over a lazy dog while seven wizards quietly mix ten jugs of pale ink and sing".split()
    for i in range(30):
        chosen = torch.randint(0, len(words), (60 + 20 * i,), generator=gen)
        (folder / f"{i:02}.txt").write_text(" ".join(words[j] for j in chosen.tolist()))
    return str(prepare([str(folder)], vocab_size=300, out=f"{folder}-store"))


def argv(name, data, *more, **flags):
    flags = {**SMALL, "data": data, **flags}
    return [name, *[f"--{k}={v}" for k, v in flags.items()], *more]


def warmed(data, steps=4, **flags):
    """A pipeline after some steps of the rule in float64, and its batches."""
    config = Cosine(data=data, **SMALL)
    pipeline, batches = audit_wm.start(config, Rule(**flags))
    for step in range(steps):
        pipeline.step(step, 360, [batches.next()])
    return pipeline, batches


def said(name, capsys, data, **flags):
    """The JSON of an audit."""
    assert audit.main(argv(name, data, "--json", **flags)) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# ---- measures ----

def test_measures_of_matrices():
    gen = torch.Generator().manual_seed(0)
    W, V = torch.randn(2, 7, 5, generator=gen)
    a, b = W.flatten().tolist(), V.flatten().tolist()
    dot = lambda x, y: sum(p * q for p, q in zip(x, y))
    assert abs(cosine(W, V) - dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))) < 1e-12
    assert math.isnan(cosine(W, 0 * V)) and abs(audit_wm.relative(2 * W, W) - 2) < 1e-12
    pairs = [abs(cosine(W[:, i], W[:, j])) for i in range(5) for j in range(5) if i != j]
    assert abs(audit_wm.coherence(W) - sum(pairs) / len(pairs)) < 1e-12
    assert math.isnan(audit_wm.coherence(torch.eye(4)[:, :1])) and math.isnan(audit_wm.coherence(0 * W))
    assert audit_wm.coherence(torch.eye(4)) == 0 and abs(audit_wm.coherence(torch.ones(3, 4)) - 1) < 1e-12


def test_singletons():
    assert audit_wm.singleton_occupancy(torch.tensor([[3, 1, 3], [2, 9, 9]])) == 2 / 6


def test_cells_are_those_of_table_2():
    assert {row["cell"]: (row["pool"], row["beta1"], row["eps"]) for row in audit_wm.published("drift")} == CELLS


def test_exact_gradients_leave_no_trace(store):
    pipeline, batches = warmed(store)
    model, micros = pipeline.model, [batches.next(), batches.next()]
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    names = ["wte.weight", "blocks.0.attn.c_q.weight", "lm_head.weight", "value_embeds.1.weight"]
    found = audit_wm.exact_gradients(model, micros, names)
    assert not any(p.requires_grad for p in model.parameters())
    assert all(p.grad is grads[n] or torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())
    twin = GPT(model.cfg).double()
    twin.load_state_dict(model.state_dict())
    sum(twin(*m) for m in micros).div(2).backward()
    for name in names:
        torch.testing.assert_close(found[name], twin.get_parameter(name).grad, rtol=1e-10, atol=1e-14)


# ---- wm-cosine ----

def test_cosine_falls_with_the_streams_and_without_the_filter(store, capsys):
    found = said("wm-cosine", capsys, store, at="2,4", streams="17,1", batch_size=4, seq_len=17)
    assert list(found["steps"]) == ["2", "4"] and found["tokens"] == 68
    columns = {c: {k: audit_wm.mean(v) for k, v in kinds.items()} for c, kinds in found["steps"]["4"].items()}
    assert abs(columns["G=N"]["lm_head"] - 1) < 1e-12 and abs(columns["as_installed"]["lm_head"] - 1) < 1e-12
    for kind in ("wte", "attn.c_proj", "ffn.c_proj", "ffn.c_fc", "attn.c_v", "value_embeds"):
        assert columns["G=N"][kind] > 0.9 and columns["G=N"][kind] > columns["G=17"][kind] + 0.1, kind
        assert 0.5 < columns["as_installed"][kind] < columns["G=N"][kind]
    assert columns["unfiltered"]["attn.c_v"] < columns["G=N"]["attn.c_v"] - 0.05
    assert columns["unfiltered"]["value_embeds"] < 0.8 * columns["G=N"]["value_embeds"]
    assert columns["unfiltered"]["ffn.c_fc"] == columns["G=N"]["ffn.c_fc"]
    assert columns["uncentred"]["wte"] > columns["G=N"]["wte"] and columns["uncentred"]["attn.c_v"] == columns["G=N"]["attn.c_v"]
    assert 0 < columns["G=N"]["attn.c_q"] < 0.6 and "attn.c_q" not in columns["as_installed"]


def test_no_credit_at_initial_weights_is_null(store, capsys):
    kinds = said("wm-cosine", capsys, store, at="0", streams="1")["steps"]["0"]["G=N"]
    assert kinds["ffn.c_fc"] == [None, None] and kinds["attn.c_proj"][0] > 0.5


def test_as_installed_is_the_credit_built_with_later_receivers(store):
    found = audit_wm.wm_cosine(Cosine(data=store, at="3", streams="1", **SMALL), [])["steps"][3]["as_installed"]
    pipeline, batches = warmed(store, 3)
    model, batch, want = pipeline.model, batches.next(), {}
    names = [name for stage in pipeline.active.values() for name in stage]
    exact = audit_wm.exact_gradients(model, [batch], names)
    with torch.no_grad():
        packet = record(model, *batch, "46/3/0")[0]
        pipeline.step(3, 360, [batch])
        want.update(wm.stage2(model, packet, packet, pipeline.rule, audit_wm.live))
        pipeline.step(4, 360, [batches.next()])
        want.update(wm.stage1(model, packet, packet, pipeline.rule, audit_wm.live))
    for kind, values in audit_wm.by_kind({name: cosine(g, exact[name]) for name, g in want.items()}).items():
        torch.testing.assert_close(torch.tensor(found[kind]), torch.tensor(values), rtol=1e-12, atol=0)


def trained(data, out, steps, **flags):
    """Path of a small run's checkpoint."""
    flags = {**SMALL, "data": data, "out": out, "steps": steps, "eval_tokens": 300, "save_every": 0, **flags}
    record = train_wm.train(train_wm.parse([f"--{k}={v}" for k, v in flags.items()]))
    return f"{out}/{record['run']}.ckpt"


def test_cosine_of_a_checkpoint_is_that_of_its_step(store, tmp_path, capsys):
    path = trained(store, tmp_path, 4)
    audit.main(["wm-cosine", path, "--streams=1", "--json", "--device=cpu"])
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]
    assert ours == said("wm-cosine", capsys, store, at="4", streams="1", run_steps=4)["steps"] and list(ours) == ["4"]
    path = trained(store, tmp_path, 3, method="backprop", accum=2)
    audit.main(["wm-cosine", path, "--streams=17", "--device=cpu"])
    text = capsys.readouterr().out
    table = text.split("\nstep 3\n")[1]
    assert "as_installed" not in table and "0.9139" in table
    (tmp_path / "other.txt").write_text("another corpus " * 400)
    other = f"--data={prepare([str(tmp_path / 'other.txt')], vocab_size=265, out=str(tmp_path / 'other'))}"
    for more, word in ((["--seed=3"], "checkpoint's own"), ([f"--data={tmp_path}/none"], "no such store"), ([path], "0 to 1"),
                       ([other], "another corpus")):
        with pytest.raises(UserError, match=word):
            audit.main(["wm-cosine", path, "--streams=1", *more])
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
    config, rule = Drift(data=store, **SMALL, warm=2, steps=2), Rule()
    shadows = audit_wm.Shadows(CELLS)
    for _, pipeline, _, weights in audit_wm.trajectory(config, rule, ""):
        W, head = weights["lm_head.weight"], pipeline.model.lm_head.weight
        lr = next(g["lr"] for g in pipeline.optimizer.param_groups if g["role"] == "lm_head")
        moves = {cell: sum(parts().values()) for cell, parts in shadows.displacements(W, head.grad, lr, 0.0).items()}
        torch.testing.assert_close(W + moves["entrywise_b09_eps1e4"], head.detach(), rtol=1e-9, atol=1e-13)
    assert len({f"{move.norm().item():.6f}" for move in moves.values()}) == 8


def test_bus_drift_is_what_reading_the_moved_head_gives(store):
    pipeline, batches = warmed(store)
    model, rule, gen = pipeline.model, Rule(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        packet, _, _ = record(model, *batches.next(), "x")
        W = model.lm_head.weight.clone()
        parts = {k: 3e-4 * torch.randn(W.shape, generator=gen).double() for k in ("momentum", "current")} | {"decay": -0.1 * W}
        read = lambda M, project: wm.bus_credit(model, packet, packet, replace(rule, project=project), lambda name, _: M)
        found = audit_wm.bus_drift(packet, rule, W, parts)
        moved = W + sum(parts.values())
        for project, name in ((False, "bus_unproj"), (True, "bus_tangent")):
            a, b = read(W, project), read(moved, project)
            assert abs(found[f"{name}_cos"] - cosine(a, b)) < 1e-10
            assert abs(found[f"{name}_rel_l2"] - ((b - a).norm() / a.norm()).item()) < 1e-10
        for part, name in (("current", "cur_grad_only_drift"), ("momentum", "momentum_only_drift")):
            a, b = read(W, True), read(W + parts[part], True)
            assert abs(found[name] - ((b - a).norm() / a.norm()).item()) < 1e-10
        # decay + momentum + current = total
        shift = {k: read(W + M, False) - read(W, False) for k, M in parts.items()}
        torch.testing.assert_close(sum(shift.values()), read(moved, False) - read(W, False), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(shift["decay"], -0.1 * read(W, False), rtol=1e-9, atol=1e-12)
    only = audit_wm.bus_drift(packet, rule, W, {"current": 0 * W, "decay": -0.1 * W})
    assert only["cur_grad_only_drift"] == only["momentum_only_drift"] == 0 and abs(only["bus_tangent_rel_l2"] - 0.1) < 1e-12


def test_receiver_drift_by_hand(store):
    config, rule = Drift(data=store, **SMALL, warm=3, steps=1), Rule()
    for step, pipeline, _, weights in audit_wm.trajectory(config, rule, ""):
        pass
    found, packet, model = audit_wm.receiver_drift(pipeline, step, weights), pipeline.packets[step - 1][0], pipeline.model
    pairs = []
    for i, layer in enumerate(packet["layers"]):
        a, u = layer["pre"].flatten(0, 1), packet["bus"]        # resid_lambdas are 1, and so is every gamma
        xi = signs(*a.shape, *wm.site(packet, f"fc{i}"), dtype=a.dtype)
        slope = (F.relu(a + rule.sigma * xi) ** 2 - F.relu(a) ** 2) * xi / rule.sigma
        names = (f"blocks.{i}.{part}.c_proj.weight" for part in ("ffn", "attn"))
        ffn, attn = ((weights[name], model.get_parameter(name)) for name in names)
        pairs += [tuple(slope * (u @ W) for W in ffn), tuple(u @ W for W in attn)]
    a, b = (torch.cat([pair[k].flatten() for pair in pairs]) for k in (0, 1))
    assert abs(found["both"][0] - (a @ b / a.norm() / b.norm()).item()) < 1e-10
    assert abs(found["both"][1] - ((b - a).norm() / a.norm()).item()) < 1e-10 and found["both"][1] > 1e-3
    assert abs(found["ffn"][1] - sum(((b - a).norm() / a.norm()).item() for a, b in pairs[::2]) / 2) < 1e-10


def test_drift_acts_and_prints(store, capsys):
    small = dict(warm=3, steps=2, batch_sizes="2,4")
    found = said("wm-drift", capsys, store, **small)
    assert set(found["cells"]) == set(CELLS) and [row["BT"] for row in found["batch_occupancy"]] == [34, 68]
    strong = found["cells"]["entrywise_b05_eps1e8"]
    assert strong["cur_grad_only_drift"] > found["cells"]["entrywise_b09_eps1e4"]["cur_grad_only_drift"] > 0
    assert found["stage1_receiver_drift"]["AdamW"]["both"] != found["stage1_receiver_drift"]["Pre-Polar Muon"]["both"]
    decayed = said("wm-drift", capsys, store, head_decay=0.9, **{**small, "batch_sizes": "0"})
    assert decayed["batch_occupancy"] == [] and decayed["cells"]["row_iso_b05_eps1e4"] != found["cells"]["row_iso_b05_eps1e4"]
    assert decayed["cells"]["row_iso_b05_eps1e4"]["cur_grad_only_drift"] == found["cells"]["row_iso_b05_eps1e4"]["cur_grad_only_drift"]
    audit_wm.print_drift(found)
    text = capsys.readouterr().out
    assert "0.3941" in text and "23.5600" in text and "singleton" in text


# ---- wm-kurtosis ----

def test_prop4_by_enumeration():
    for z in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2, 0, 0, 0, 0, 0]), torch.randn(7, generator=torch.Generator().manual_seed(3))):
        xi = torch.tensor(list(itertools.product((1.0, -1.0), repeat=len(z))))
        kappa, ratio = audit_wm.residue(z.expand_as(xi), xi)
        D, rms = len(z), z.double().square().mean().sqrt()
        x = z.double() / rms
        want = []
        for s in xi.double():
            b = x * s * (s - x * (x @ s) / D) / rms
            want.append(((b - x * (x @ b) / D) ** 2).sum() / ((x / rms) ** 2).sum())
        torch.testing.assert_close(ratio, torch.stack(want), rtol=1e-10, atol=1e-12)
        assert ratio.mean() <= kappa[0] / D + 1e-12 and abs(kappa[0] - (x**4).mean()) < 1e-10
        if D == 7:
            sparse = z[2:].abs().max() == 0
            assert not sparse or abs(ratio.mean() - 0.0576) < 1e-9 and abs(kappa[0] / D - 0.68) < 1e-9
    b, rad = audit_wm.prop4(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2))
    torch.testing.assert_close(torch.cat([b, rad]), torch.tensor([[0.16, -0.16], [0.4, 0.8]]).double(), rtol=1e-7, atol=0)


def test_kurtosis_of_a_trajectory(store, capsys):
    found = said("wm-kurtosis", capsys, store, warm=1, steps=3)
    assert found["token_evaluations"] == 3 * 51 and found["D"] == 64 and 1 <= found["kappa4_token_mean"] <= found["kappa4_token_max"] <= 64
    assert abs(found["bound_mean"] - found["kappa4_token_mean"] / 64) < 1e-12
    assert 0.5 < found["empirical_ratio_mean"] / found["bound_mean"] < 1.1       # 153 draws whose expectation is below the bound
    pipeline, batches = warmed(store, 1)
    with torch.no_grad():
        packet, _, _ = record(pipeline.model, *batches.next(), "46/1/0")
    assert audit_wm.residue(packet["x_L"], audit_wm.draw_bus(packet, Rule()))[0].mean() <= found["kappa4_token_max"]
    audit_wm.print_kurtosis(found)
    assert "2.9398" in capsys.readouterr().out


# ---- wm-attention ----

def test_oracle_and_block_give_the_whole_gradient(store):
    """A layer's input does not depend on its own c_q, c_k, c_v: with the true downstream gradient its gradient is the model's."""
    pipeline, batches = warmed(store)
    model, (idx, targets) = pipeline.model, batches.next()
    with torch.no_grad():
        packet, _, _ = record(model, idx, targets, "x")
    for i in (0, 1):
        S = audit_wm.oracle(model, idx, targets, i)
        found = audit_wm.exact_attention(model, packet["layers"][i], idx, S, i)
        want = audit_wm.exact_gradients(model, [(idx, targets)], [f"blocks.{i}.attn.{part}.weight" for part in found])
        for part, g in found.items():
            torch.testing.assert_close(g, want[f"blocks.{i}.attn.{part}.weight"], rtol=1e-8, atol=1e-13)
    # where c_proj is 0 it is read as the identity
    proj = model.blocks[0].attn.c_proj.weight.data
    proj.copy_(1e-7 * torch.eye(64))
    near = audit_wm.oracle(model, idx, targets, 0) / 1e-7
    proj.zero_()
    torch.testing.assert_close(audit_wm.oracle(model, idx, targets, 0), near, rtol=1e-3, atol=1e-4 * near.abs().max().item())
    assert not any(p.requires_grad for p in model.parameters())


def test_tiers_are_those_of_qk_credit(store, capsys):
    found = said("wm-attention", capsys, store, layer=1, probes="1,3", gammas="0,0.8,1")["tiers"]
    rows = {(r["matrix"], r["gamma_k"], r["K"]): r["cosine"] for r in found}
    assert abs(rows["c_v", None, 1] - 1) < 1e-12 and len(rows) == 1 + 2 + 6
    pipeline, batches = audit_wm.start(Cosine(data=store, **SMALL), Rule(active="qk"))
    model, (idx, targets) = pipeline.model, batches.next()
    S = audit_wm.oracle(model, idx, targets, 1)
    with torch.no_grad():
        packet, _, _ = record(model, idx, targets, "audit/46")
    layer = packet["layers"][1]
    exact = audit_wm.exact_attention(model, layer, idx, S, 1)
    for K in (1, 3):
        for gamma in (0.0, 0.8, 1.0):
            rule = Rule(active="qk", probes=K, gamma_k=gamma)
            for part, credit in wm.qk_credit(model, packet, packet, layer, layer, 1, None, None, S, rule).items():
                g = credit.T @ layer["attn_in"].flatten(0, 1) / -len(S)
                assert abs(rows[part, None if part == "c_q" else gamma, K] - cosine(g, exact[part])) < 1e-10


def test_more_probes_come_closer(store, capsys):
    found = said("wm-attention", capsys, store, probes="1,64", gammas="0,1")["tiers"]
    rows = {(r["matrix"], r["gamma_k"], r["K"]): r["cosine"] for r in found}
    assert rows["c_q", None, 64] > 0.6 > rows["c_q", None, 1] and rows["c_k", 1.0, 64] > 0.5 > rows["c_k", 0.0, 64]
    audit.main(argv("wm-attention", store, probes="1", gammas="0.85"))
    assert "0.1357" in capsys.readouterr().out


# ---- wm-causality ----

def test_causality_holds_on_every_clock(capsys):
    assert audit.main(["wm-causality", "--json", "--seed=7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["as_expected"] and set(found["clocks"]) == set(wm.CLOCKS) and found["tensors"] > 1000 and found["require_grad"] == 0
    assert all(c["first_change"] == {"3": 0, "2": 1, "1": 2} for c in found["clocks"].values())
    lm_head, late = "stage 2, lm_head moved after age 0", "stage 1, c_proj moved after age 1"
    reads = lambda what: [found["clocks"][c]["reads"][what] for c in ("strict_post", "stage2_pre", "both_pre", "origin")]
    assert reads(lm_head) == [True, False, False, False] and reads(late) == [True, True, False, False]


def test_causality_sees_a_wrong_delay(monkeypatch, capsys):
    monkeypatch.setattr(audit_wm, "CLOCKS", {"strict_post": (1, 2)})
    real = audit_wm.Pipeline

    class Hasty(real):
        def __init__(self, *args):
            super().__init__(*args)
            self.delays = {2: 0, 1: 2}
    with monkeypatch.context() as m:                        # a pipeline that does not wait with stage 2
        m.setattr(audit_wm, "Pipeline", Hasty)
        m.setattr(wm, "CLOCKS", {"strict_post": (0, 2)})
        assert audit.main(["wm-causality", "--active=none"]) == 1
        assert "as expected: NO" in capsys.readouterr().out
    with monkeypatch.context() as m:                        # rewards built before the receiver's update, under a clock that says after
        m.setattr(wm, "CLOCKS", {"strict_post": (0, 2)})
        found = audit_wm.wm_causality(audit_wm.Causality(active="none"), [])
        assert not found["as_expected"] and found["clocks"]["strict_post"]["first_change"] == {"3": 0, "2": 1, "1": 2}

    class Graph(real):
        def step(self, *args):
            super().step(*args)
            self.model.wte.weight.requires_grad_(True)
    with monkeypatch.context() as m:
        m.setattr(audit_wm, "Pipeline", Graph)
        with pytest.raises(RuntimeError, match="requires a gradient"):
            audit_wm.wm_causality(audit_wm.Causality(), [])


# ---- wm-geometry ----

def test_geometry_by_hand(store, tmp_path, capsys):
    late, early = trained(store, tmp_path / "a", 5), trained(store, tmp_path / "b", 2)

    def read(*paths):
        assert audit.main(["wm-geometry", *paths, "--json", "--batch_size=2", "--device=cpu"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])
    found, other = read(late), read(late, early)
    _, model = audit_wm.open_run(late)
    W = model.blocks[1].ffn.c_proj.weight.detach()
    layer = found["matrices"]["ffn.c_proj"][1]
    assert abs(layer["srank"] - (W.square().sum() / torch.linalg.svdvals(W)[0] ** 2).item()) < 1e-9
    pairs = [abs(cosine(W[:, i], W[:, j])) for i, j in itertools.combinations(range(0, 256, 1), 2) if j < 12]
    some = audit_wm.coherence(W[:, :12])
    assert abs(some - sum(pairs) / len(pairs)) < 1e-10 and abs(layer["coherence"] - audit_wm.coherence(W)) < 1e-12

    idx = next(iter(audit_wm.eval_batches(audit_wm.open_store(store).val, audit_wm.open_store(store).bos, 2, 17)))[0]

    def maps(model):
        """Attention weights row by row, from the traced q and k."""
        trace = {}
        with torch.no_grad():
            model(idx, trace=trace)
        out = []
        for layer in trace["layers"]:
            q, k = layer["q"], layer["k"]
            A = torch.zeros(*idx.shape, 2, idx.size(1)).double()
            for t in range(idx.size(1)):
                A[:, t, :, :t + 1] = (torch.einsum("bhd,bshd->bhs", q[:, t], k[:, :t + 1]) / 32**0.5).softmax(-1)
            out.append(A)
        return out
    first = GPT(GPTConfig(**vars(model.cfg))).init_weights(46).double()
    for base, what in ((first, found), (audit_wm.open_run(early)[1], other)):
        want = [((a - b).norm() / b.norm()).item() for a, b in zip(maps(model), maps(base))]
        torch.testing.assert_close(torch.tensor(what["attention_shift"]), torch.tensor(want), rtol=1e-6, atol=1e-8)
        assert min(want) > 1e-4
    assert read(late, late)["attention_shift"] == [0, 0]
    audit.main(["wm-geometry", late, "--batch_size=1", "--device=cpu"])
    text = capsys.readouterr().out
    assert "141.3300" in text and "0.8587" in text


def test_damaged_checkpoints(store, tmp_path):
    path = trained(store, tmp_path, 2)
    good = common.load_checkpoint(path)
    for damage in ({"config": {}}, {"config": 3}, {"model": {}}, {"model_config": None}, {"step": "2"}):
        common.save_checkpoint(path, {**good, **damage})
        for name in ("wm-geometry", "wm-cosine"):
            with pytest.raises(UserError, match="damaged"):
                audit.main([name, path, "--device=cpu"])


# ---- the command line ----

@pytest.mark.parametrize("line, word", [
    ("wm-cosine --at x", "numbers"), ("wm-cosine --at -3", "numbers"), ("wm-cosine --at 1 --at 2", "twice"),
    ("wm-cosine --width 65", "multiple"), ("wm-cosine --at 5 --run_steps 4", "behind the end"),
    ("wm-kurtosis --warm 3 --steps 2 --run_steps 4", "do not fit"),
    ("wm-cosine --streams 7 --seq_len 16 --batch_size 2 --depth 1", "divide"), ("wm-cosine none.ckpt", "no such"),
    ("wm-drift --warm 1", "too small"), ("wm-drift --batch_sizes 0,2", "does not go"), ("wm-drift x.ckpt", "unrecognized"),
    ("wm-kurtosis --layer 1", "unrecognized"),
    ("wm-attention --layer 6", "layers 0 to 5"), ("wm-attention --gammas 2", "between 0 and 1"),
    ("wm-attention --probes 0,1", "start at 1"),
    ("wm-geometry", "1 to 2"), ("wm-geometry a b c", "1 to 2"), ("wm-causality --active z", "choose"), ("wm-nothing", "choose"),
    ("params --layer 1", "unrecognized")])
def test_mistakes(line, word, store):
    data = ["--data", store] if any(a in line for a in ("wm-cosine", "wm-attention", "wm-drift --b")) and ".ckpt" not in line else []
    with pytest.raises(UserError, match=word):
        audit.main(line.split() + data)


def test_flags_act(store, capsys):
    base = dict(warm=1, steps=2)
    plain = said("wm-kurtosis", capsys, store, **base)
    for change in (dict(sigma=1.0), dict(seed=1), dict(data_seed=1), dict(run_steps=3), dict(depth=1), dict(head_dim=16), dict(width=32),
                   dict(seq_len=16), dict(batch_size=2), dict(warm=2), dict(steps=3), dict(dtype="float32")):
        assert said("wm-kurtosis", capsys, store, **{**base, **change}) != plain, change
