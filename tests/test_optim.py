"""optim.py: every rule against its formula in float64, one whole native step against an independent re-implementation."""
import math

import numpy as np
import pytest
import torch

from common import UserError
from model import GPT, GPTConfig
from optim import (MuonAdamW, POLAR_COEFFICIENTS, entrywise_adamw, equilibrate, homotopy, lr_multiplier, muon_momentum, native_groups,
                   neumann_whiten, neumann_whiten_rows, normuon_scale, oe_row_update, polar_express, run_progress, set_schedule)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- schedules ----

def test_progress_and_multiplier_at_the_papers_steps():
    assert [run_progress(s, 953) for s in (0, 11, 482, 953)] == [0.0, 0.0, 0.5, 1.0]
    assert run_progress(477, 953) == 466 / 942 and run_progress(952, 953) == 941 / 942
    assert [run_progress(s, 40) for s in (0, 10, 40)] == [0.0, 0.25, 1.0] and run_progress(5, 100) == 0.0
    assert [lr_multiplier(p) for p in (0, 0.5, 0.75, 1)] == [1, 1, 0.5, 0]
    assert [lr_multiplier(p, "linear") for p in (0, 0.25, 1)] == [1, 0.75, 0]
    assert [round(lr_multiplier(p, "cosine"), 12) for p in (0, 0.5, 1)] == [1, 0.5, 0]
    assert [round(lr_multiplier(p, "wsd"), 12) for p in (0.5, 0.8, 0.9, 1)] == [1, 1, 0.5, 0]
    with pytest.raises(UserError):
        lr_multiplier(0.5, "step")


def test_momentum_rises_and_cools_down():
    assert muon_momentum(0, 0) == 0.85 and abs(muon_momentum(150, 0.1) - 0.9) < 1e-12 and abs(muon_momentum(900, 0.9) - 0.95) < 1e-12
    assert abs(muon_momentum(900, 0.5, True) - 0.95) < 1e-12 and abs(muon_momentum(953, 1.0, True) - 0.85) < 1e-12
    assert abs(muon_momentum(900, 0.75, True) - 0.90) < 1e-12
    assert [round(homotopy(s, 25), 12) for s in (0, 5, 25, 99)] == [0, 0.04, 1, 1]


# ---- polar step and NorMuon ----

@pytest.mark.parametrize("shape", [(7, 7), (5, 13), (13, 5), (3, 9, 4), (2, 3, 6, 6), (1, 1)])
def test_polar_equals_the_polynomial_of_the_singular_values(shape):
    G = random(*shape)
    U, s, Vh = torch.linalg.svd(G, full_matrices=False)
    s = s / (G.norm(dim=(-2, -1)).unsqueeze(-1) * 1.02 + 1e-6)
    for a, b, c in POLAR_COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(polar_express(G), U @ torch.diag_embed(s) @ Vh, rtol=1e-9, atol=1e-9)


def test_polar_singular_values_near_one_and_commutes_with_rotations():
    for shape in ((24, 24), (16, 40), (3, 40, 16)):
        G = random(*shape, seed=3)
        U, s, Vh = torch.linalg.svd(G, full_matrices=False)
        G = U @ torch.diag_embed(torch.linspace(0.1, 1, s.size(-1), dtype=torch.float64).expand(s.shape)) @ Vh   # condition number 10
        out = torch.linalg.svdvals(polar_express(G))
        assert out.min() > 0.85 and out.max() < 1.15
        Q, R = torch.linalg.qr(random(shape[-2], shape[-2], seed=4))[0], torch.linalg.qr(random(shape[-1], shape[-1], seed=5))[0]
        torch.testing.assert_close(polar_express(Q @ G @ R), Q @ polar_express(G) @ R, rtol=1e-9, atol=1e-9)


def test_a_batch_of_matrices_is_a_batch_of_separate_matrices():
    G = random(3, 6, 10)
    for f in (polar_express, lambda M: equilibrate(M, 0.7), lambda M: neumann_whiten(M, 0.6)):
        torch.testing.assert_close(f(G), torch.stack([f(g) for g in G]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (5, 5)])
def test_normuon_equals_loops_and_keeps_the_norm(shape):
    O, rows = random(*shape), shape[0] >= shape[1]
    v = random(*((shape[0], 1) if rows else (1, shape[1])), seed=1).abs()
    got, v_new = normuon_scale(O, v, 0.9)
    want, lines = O.clone(), O if rows else O.T
    for i, line in enumerate(lines):
        second = 0.9 * v.flatten()[i] + 0.1 * (line**2).mean()
        assert abs(second - v_new.flatten()[i]) < 1e-12
        (want if rows else want.T)[i] = line / second.sqrt()
    want *= O.norm() / want.norm()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert abs(got.norm() - O.norm()) < 1e-10
    zero, _ = normuon_scale(torch.zeros(shape, dtype=torch.float64), torch.zeros_like(v), 0.9)
    assert (zero == 0).all()


# ---- equilibration and whitening ----

def test_equilibrate_identity_limit_and_loops():
    M = random(7, 12) * torch.logspace(-2, 2, 7, dtype=torch.float64)[:, None]
    assert torch.equal(equilibrate(M, 0.0), M)
    E = equilibrate(M, 1.0, passes=200)
    rows, cols = E.square().mean(1).sqrt(), E.square().mean(0).sqrt()
    assert (rows - rows.mean()).abs().max() < 1e-6 and (cols - rows.mean()).abs().max() < 1e-6
    want, alpha = M.clone(), 0.37
    for axis in (0, 1):
        whole = math.sqrt((want**2).mean())
        want = want.clone()
        for r in range(M.size(axis)):
            line = want[r] if axis == 0 else want[:, r]
            line *= (whole / math.sqrt((line**2).mean())) ** alpha
    torch.testing.assert_close(equilibrate(M, alpha, passes=1), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(equilibrate(M, alpha), equilibrate(equilibrate(M, alpha, 1), alpha, 1), rtol=1e-12, atol=1e-12)
    M[3], M[:, 5] = 0, 0
    E = equilibrate(M, 1.0)
    assert torch.isfinite(E).all() and (E[3] == 0).all() and (E[:, 5] == 0).all() and (E != 0).sum() == (M != 0).sum()
    assert (equilibrate(torch.zeros(3, 4), 1.0) == 0).all()


def test_neumann_equals_its_formula_and_removes_the_mean_row():
    U, alpha = random(11, 5), 0.8
    C = U.numpy() - U.numpy().mean(0)
    gram = C.T @ C
    want = C - alpha / 2 * C @ gram / (np.linalg.norm(gram) + 1e-30)
    got = neumann_whiten(U, alpha)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
    assert got.mean(0).abs().max() < 1e-14 and torch.equal(neumann_whiten(U, 0.0), U - U.mean(0))
    assert (neumann_whiten(torch.zeros(4, 3), 1.0) == 0).all()


@pytest.mark.parametrize("zero", [0.0, 0.3, 0.8, 1.0])
def test_neumann_of_sparse_rows_is_the_same(zero):
    U = random(40, 7, seed=9)
    U[torch.rand(40, generator=torch.Generator().manual_seed(1)) < zero] = 0
    torch.testing.assert_close(neumann_whiten_rows(U, 0.8), neumann_whiten(U, 0.8), rtol=1e-12, atol=1e-14)


# ---- hashed tables ----

@pytest.mark.parametrize("whiten", [0.0, 0.5])
def test_oe_row_update_equals_a_row_by_row_reference(whiten):
    table, grad = random(23, 6, seed=1), random(23, 6, seed=2)
    count = torch.tensor([float(i % 4) for i in range(23)])
    grad[count == 0] = 0
    want, visited = table.clone(), [r for r in range(23) if count[r] > 0]
    gbar = torch.stack([grad[r] / count[r] for r in visited])
    gbar = neumann_whiten(gbar, whiten) if whiten else gbar
    rms = math.sqrt(sum(float(x) ** 2 for x in gbar.flatten()) / gbar.numel())
    for r, g in zip(visited, gbar):
        want[r] -= 0.7 * g / rms
    before, n = table.clone(), count.clone()
    rows = oe_row_update(table, grad, n, 0.7, whiten)
    torch.testing.assert_close(table, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(table[count == 0], before[count == 0]) and (n == 0).all() and rows.tolist() == visited


def test_oe_row_update_of_nothing_and_of_zero_gradients():
    table = random(5, 4)
    before = table.clone()
    assert len(oe_row_update(table, torch.zeros_like(table), torch.zeros(5), 1.0)) == 0
    oe_row_update(table, torch.zeros_like(table), torch.ones(5), 1.0)
    assert torch.equal(table, before)


def small_model(**kw):
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=50, sequence_len=8, **kw)).init_weights(3)


@pytest.mark.parametrize("rows, accum", [(16, 1), (8, 2), (4, 4)])
def test_micro_batches_give_the_same_tables(rows, accum):
    idx, y = torch.randint(0, 50, (2, 16, 8), generator=torch.Generator().manual_seed(1))
    def run(rows, accum):
        model = small_model(oe_m=19).double()
        opt = MuonAdamW(native_groups(model.roles(), 64, dtype=torch.float64))
        for step in range(2):
            set_schedule(opt, step, 953)
            for k in range(accum):
                (model(idx[k * rows:(k + 1) * rows], y[k * rows:(k + 1) * rows]) / accum).backward()
            if step == 0:
                visits = sum(t.visits.sum().item() for t in model.oe_tables)
            opt.step()
            opt.zero_grad()
        assert visits == 4 * 16 * 8
        return [t.detach() for t in model.oe_tables]
    for a, b in zip(run(16, 1), run(rows, accum)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_zero_grad_clears_visited_rows_with_and_without_a_step():
    model = small_model(oe_m=19)
    opt = MuonAdamW(native_groups(model.roles(), 64))
    idx = torch.randint(0, 50, (4, 8))
    for with_step in (True, False):
        model(idx, idx).backward()
        if with_step:
            opt.step()
        assert any((t.grad != 0).any() for t in model.oe_tables)    # audits may read it after the step
        opt.zero_grad()
        assert all((t.grad == 0).all() and (t.visits == 0).all() for t in model.oe_tables)
        assert all(p.grad is None for _, role, p in model.roles() if role != "oe")


# ---- groups and one whole step ----

def test_every_parameter_is_in_exactly_one_group():
    model = small_model(oe_m=19, qk_scale="full", wte_route="separate", out_skip=True)
    groups = native_groups(model.roles(), 384)
    ids = [id(p) for g in groups for p in g["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    kind = {id(p): g["kind"] for g in groups for p in g["params"]}
    assert all(kind[id(p)] == ("oe" if role == "oe" else "muon" if role == "matrix" else "adamw") for _, role, p in model.roles())
    assert {role for _, role, p in model.roles() if kind[id(p)] == "muon"} == {"matrix"}
    rate = {g["role"]: round(g["initial_lr"], 6) for g in groups}
    assert rate == {"lm_head": 0.005657, "wte": 0.848528, "value_embeds": 0.848528, "oe": 0.848528, "matrix": 0.04, "q_log": 0.005,
                    "resid_lambdas": 0.005, "x0_lambdas": 0.5, "wte_lambdas": 0.5, "out_lambdas": 0.5}
    assert [round(g["initial_lr"], 6) for g in native_groups(model.roles(), 512) if g["role"] == "oe"] == [0.734847]


def numpy_step(name, role, p, g, state, step, steps, width):
    """The native recipe for one parameter, written again in float64 numpy. state: the moments before the step, updated in place."""
    t = 0 if step < 11 else (step - 11) / (steps - 11)
    mult = 1 if t < 0.5 else 2 - 2 * t
    scale = math.sqrt(768 / width)
    if role == "oe":
        n = state["visits"]
        hit = n > 0
        gbar = g[hit] / n[hit][:, None]
        p = p.copy()
        p[hit] -= 0.6 * scale * mult * gbar / max(np.sqrt((gbar**2).mean()), 1e-30)
        return p
    if role != "matrix":
        lr = {"lm_head": 0.004 * scale, "wte": 0.6 * scale, "value_embeds": 0.6 * scale, "resid_lambdas": 0.005, "q_log": 0.005}.get(role, 0.5)
        b1 = 0.96 if role in ("x0_lambdas", "wte_lambdas", "out_lambdas") else 0.8
        state["step"] += 1
        state["exp_avg"] = b1 * state["exp_avg"] + (1 - b1) * g
        state["exp_avg_sq"] = 0.95 * state["exp_avg_sq"] + 0.05 * g * g
        m, v = state["exp_avg"] / (1 - b1 ** state["step"]), state["exp_avg_sq"] / (1 - 0.95 ** state["step"])
        return p - lr * mult * m / (np.sqrt(v) + 1e-10)
    mom = 0.85 + 0.1 * min(step / 300, 1)
    state["momentum_buffer"] = mom * state["momentum_buffer"] + (1 - mom) * g
    u = (1 - mom) * g + mom * state["momentum_buffer"]
    U, s, Vh = np.linalg.svd(u, full_matrices=False)
    s = s / (1.02 * np.linalg.norm(u) + 1e-6)
    for a, b, c in POLAR_COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    u = U @ np.diag(s) @ Vh
    axis = 1 if p.shape[0] >= p.shape[1] else 0
    state["second_moment"] = 0.95 * state["second_moment"] + 0.05 * (u**2).mean(axis, keepdims=True)
    w = u / np.sqrt(state["second_moment"])
    u = w * np.linalg.norm(u) / np.linalg.norm(w)
    lr = 0.04 * mult * math.sqrt(max(1, p.shape[0] / p.shape[1]))
    state["undecided"] = np.abs(u) < 1e-5      # the sign that steers the cautious decay is below float32 rounding
    return p - lr * (u + 0.2 * (1 - t) * p * (u * p >= 0))


@pytest.mark.parametrize("step", [0, 11, 300, 477, 952])
def test_one_native_step_equals_the_numpy_reference(step):
    model = small_model(oe_m=19, qk_scale="full", wte_route="separate", out_skip=True)
    opt = MuonAdamW(native_groups(model.roles(), 64))
    rng = np.random.default_rng(step)
    want, states = {}, {}
    for name, role, p in model.roles():
        with torch.no_grad():
            p.add_(0.1 * torch.from_numpy(rng.standard_normal(p.shape)).float())
        p.grad = torch.from_numpy(0.01 * rng.standard_normal(p.shape)).float()
        rows, cols = (p.shape[0], p.shape[-1])
        if role == "oe":
            p.visits = torch.from_numpy(rng.integers(0, 3, rows)).float()
            p.grad[p.visits == 0] = 0
            state = {"visits": p.visits.double().numpy().copy()}
        elif role == "matrix":
            state = {"momentum_buffer": torch.from_numpy(0.01 * rng.standard_normal(p.shape)).float(),
                     "second_moment": torch.from_numpy(rng.random((rows, 1) if rows >= cols else (1, cols))).float()}
            opt.state[p].update({k: v.clone() for k, v in state.items()})
        else:
            state = {"step": step, "exp_avg": torch.from_numpy(0.01 * rng.standard_normal(p.shape)).float(),
                     "exp_avg_sq": torch.from_numpy(1e-4 * rng.random(p.shape)).float()}
            opt.state[p].update({k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()})
        states[name] = {k: v.double().numpy() if torch.is_tensor(v) else v for k, v in state.items()}
        want[name] = numpy_step(name, role, p.detach().double().numpy(), p.grad.double().numpy(), states[name], step, 953, 64)
    set_schedule(opt, step, 953)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    opt.step()
    for name, role, p in model.roles():
        sure = ~states[name].pop("undecided", np.zeros(p.shape, bool))
        assert sure.mean() > 0.99
        np.testing.assert_allclose(p.detach().numpy()[sure], want[name][sure], rtol=2e-5, atol=3e-6, err_msg=name)
        assert torch.equal(p.grad, grads[name]), name
        for key, value in opt.state[p].items():
            np.testing.assert_allclose(value, states[name][key], rtol=1e-5, atol=1e-8, err_msg=f"{name} {key}")


def test_entrywise_adamw_is_torchs_adam():
    p = random(6, 4).requires_grad_()
    ref = torch.optim.Adam([p], lr=0.1, betas=(0.8, 0.95), eps=1e-3)
    m = v = torch.zeros(6, 4, dtype=torch.float64)
    q = p.detach().clone()
    for t in range(1, 5):
        p.grad = random(6, 4, seed=t)
        ref.step()
        m, v = m.lerp(p.grad, 0.2), v.lerp(p.grad**2, 0.05)
        q -= 0.1 * entrywise_adamw(m, v, t, 0.8, 0.95, 1e-3)
    torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-12)


def test_weight_decay_acts_and_follows_progress():
    def step(decay, step_number):
        model = small_model()
        opt = MuonAdamW(native_groups(model.roles(), 64, weight_decay=decay))
        model(torch.ones(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)).backward()
        set_schedule(opt, step_number, 953)
        opt.step()
        return model.blocks[0].ffn.c_fc.weight.detach()
    assert not torch.equal(step(0.2, 0), step(0.0, 0)) and torch.equal(step(0.2, 953), step(0.0, 953))


def test_bfloat16_parameters_can_keep_float32_states():
    p = torch.nn.Parameter(random(8, 4).bfloat16())
    opt = MuonAdamW([dict(params=[p], kind="adamw", float32_state=True, lr=1e-3)])
    for t in range(20):  # steps far below the bfloat16 spacing add up in the master copy
        p.grad = torch.ones_like(p)
        opt.step()
    s = opt.state[p]
    assert s["master"].dtype == s["exp_avg"].dtype == torch.float32 and torch.equal(p, s["master"].bfloat16())
    torch.testing.assert_close(s["master"], random(8, 4).bfloat16().float() - 0.02, rtol=0, atol=1e-4)
    again = MuonAdamW([dict(params=[p], kind="adamw", float32_state=True, lr=1e-3)])
    again.load_state_dict(opt.state_dict())
    assert again.state[p]["exp_avg_sq"].dtype == torch.float32 and torch.equal(again.state[p]["master"], s["master"])


def test_unknown_kinds_and_vectors_under_muon_are_refused():
    p = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(KeyError):
        MuonAdamW([dict(params=[p], kind="sgd")])
    with pytest.raises(ValueError):
        MuonAdamW([dict(params=[p], kind="muon")])
