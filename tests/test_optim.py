"""optim.py: every rule against its formula in float64, one whole native step against numpy."""
import copy
import math
from functools import partial

import numpy as np
import pytest
import torch

import optim
from common import UserError
from helpers import assert_same
from model import GPT, GPTConfig
from optim import (ANY, KINDS, MATRIX_KINDS, POLAR_COEFFICIENTS, SCHEDULES, MuonAdamW,
                   entrywise_adamw, equilibrate, homotopy, muon_momentum, native_groups,
                   neumann_whiten, neumann_whiten_rows, normuon_scale, oe_row_update, one_by_one,
                   polar_express, run_progress, set_schedule)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- schedules ----

def test_progress_and_multiplier_at_the_papers_steps():
    assert [run_progress(s, 953) for s in (0, 11, 482, 953)] == [0.0, 0.0, 0.5, 1.0]
    assert run_progress(477, 953) == 466 / 942 and run_progress(952, 953) == 941 / 942
    assert [run_progress(s, 40) for s in (0, 10, 40)] == [0.0, 0.25, 1.0]
    assert run_progress(5, 100) == 0.0
    points = {"trapezoid": {0: 1, 0.5: 1, 0.75: 0.5, 1: 0}, "linear": {0: 1, 0.25: 0.75, 1: 0},
              "cosine": {0: 1, 0.5: 0.5, 1: 0}, "wsd": {0.5: 1, 0.8: 1, 0.9: 0.5, 1: 0}}
    assert points.keys() == SCHEDULES.keys()
    for name, values in points.items():
        for progress, value in values.items():
            assert abs(SCHEDULES[name](progress) - value) < 1e-12, name


def test_momentum_rises_and_cools_down():
    for args, want in (((0, 0), 0.85), ((150, 0.1), 0.9), ((900, 0.9), 0.95),
                       ((900, 0.5, True), 0.95), ((900, 0.75, True), 0.9),
                       ((953, 1.0, True), 0.85)):
        assert abs(muon_momentum(*args) - want) < 1e-12
    assert [round(homotopy(s, 25), 12) for s in (0, 5, 25, 99)] == [0, 0.04, 1, 1]


# ---- polar step and NorMuon ----

@pytest.mark.parametrize("shape", [(7, 7), (5, 13), (13, 5), (3, 9, 4), (2, 3, 6, 6), (1, 1)])
def test_polar_equals_the_polynomial_of_the_singular_values(shape):
    G = random(*shape)
    U, s, Vh = torch.linalg.svd(G, full_matrices=False)
    s = s / (G.norm(dim=(-2, -1)).unsqueeze(-1) * 1.02 + 1e-6)
    for a, b, c in POLAR_COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    close(polar_express(G), U @ torch.diag_embed(s) @ Vh, 1e-9)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (3, 40, 16)])
def test_polar_singular_values_near_one_and_commutes_with_rotations(shape):
    U, s, Vh = torch.linalg.svd(random(*shape, seed=3), full_matrices=False)
    s = torch.linspace(0.1, 1, s.size(-1), dtype=torch.float64).expand(s.shape)  # condition 10
    G = U @ torch.diag_embed(s) @ Vh
    out = torch.linalg.svdvals(polar_express(G))
    assert out.min() > 0.85 and out.max() < 1.15
    Q, R = (torch.linalg.qr(random(n, n, seed=n))[0] for n in shape[-2:])
    close(polar_express(Q @ G @ R), Q @ polar_express(G) @ R, 1e-9)


def test_a_batch_of_matrices_is_a_batch_of_separate_matrices():
    G = random(3, 6, 10)
    for f in (polar_express, lambda M: equilibrate(M, 0.7), lambda M: neumann_whiten(M, 0.6)):
        close(f(G), torch.stack([f(g) for g in G]))


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
    close(got, want, 1e-10)
    assert abs(got.norm() - O.norm()) < 1e-10
    zero, _ = normuon_scale(0 * O, 0 * v, 0.9)
    assert (zero == 0).all()


# ---- equilibration and whitening ----

def test_the_schedules_momentum_is_muons():
    groups = [dict(params=[torch.nn.Parameter(torch.ones(2, 2))], kind=kind) for kind in KINDS]
    optimizer = MuonAdamW(groups)
    for group in optimizer.param_groups:
        group["momentum"] = 0.123          # a rule's own
    set_schedule(optimizer, 5, 200)
    told = {group["kind"]: group["momentum"] for group in optimizer.param_groups}
    assert told.pop("muon") != 0.123 and set(told.values()) == {0.123}


def test_equilibrate_identity_limit_and_loops():
    M = random(7, 12) * torch.logspace(-2, 2, 7, dtype=torch.float64)[:, None]
    assert torch.equal(equilibrate(M, 0.0), M)
    E = equilibrate(M, 1.0, passes=200)
    rows, cols = E.square().mean(1).sqrt(), E.square().mean(0).sqrt()
    assert (rows - rows.mean()).abs().max() < 1e-6 and (cols - rows.mean()).abs().max() < 1e-6
    want, alpha = M.clone(), 0.37
    for lines in (want, want.T):
        whole = math.sqrt((want**2).mean())
        for line in lines:
            line *= (whole / math.sqrt((line**2).mean())) ** alpha
    close(equilibrate(M, alpha, passes=1), want)
    close(equilibrate(M, alpha), equilibrate(equilibrate(M, alpha, 1), alpha, 1))
    M[3], M[:, 5] = 0, 0
    E = equilibrate(M, 1.0)
    assert torch.isfinite(E).all() and torch.equal(E == 0, M == 0)
    assert (equilibrate(torch.zeros(3, 4), 1.0) == 0).all()


def test_neumann_equals_its_formula_and_removes_the_mean_row():
    U, alpha = random(11, 5), 0.8
    C = U.numpy() - U.numpy().mean(0)
    gram = C.T @ C
    want = C - alpha / 2 * C @ gram / (np.linalg.norm(gram) + 1e-30)
    got = neumann_whiten(U, alpha)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
    assert got.mean(0).abs().max() < 1e-14
    assert torch.equal(neumann_whiten(U, 0.0), U - U.mean(0))
    assert (neumann_whiten(torch.zeros(4, 3), 1.0) == 0).all()


@pytest.mark.parametrize("zero", [0.0, 0.3, 0.8, 1.0])
def test_neumann_of_sparse_rows_is_the_same(zero):
    U = random(40, 7, seed=9)
    U[torch.rand(40, generator=torch.Generator().manual_seed(1)) < zero] = 0
    close(neumann_whiten_rows(U, 0.8), neumann_whiten(U, 0.8))


# ---- hashed tables ----

@pytest.mark.parametrize("whiten", [0.0, 0.5])
def test_oe_row_update_equals_a_row_by_row_reference(whiten):
    table, grad = random(23, 6, seed=1), random(23, 6, seed=2)
    count = torch.arange(23.0) % 4
    grad[count == 0] = 0
    want, visited = table.clone(), [r for r in range(23) if count[r] > 0]
    gbar = torch.stack([grad[r] / count[r] for r in visited])
    gbar = neumann_whiten(gbar, whiten) if whiten else gbar
    rms = math.sqrt(sum(float(x) ** 2 for x in gbar.flatten()) / gbar.numel())
    for r, g in zip(visited, gbar):
        want[r] -= 0.7 * g / rms
    before, n = table.clone(), count.clone()
    rows = oe_row_update(table, grad, n, 0.7, whiten)
    close(table, want)
    assert torch.equal(table[count == 0], before[count == 0])
    assert (n == 0).all() and rows.tolist() == visited


def test_oe_row_update_of_nothing_and_of_zeros():
    table = random(5, 4)
    before, zero = table.clone(), torch.zeros_like(table)
    assert len(oe_row_update(table, zero, torch.zeros(5), 1.0)) == 0
    oe_row_update(table, zero, torch.ones(5), 1.0)
    assert torch.equal(table, before)


def small_model(**kw):
    cfg = GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=50, sequence_len=8, **kw)
    return GPT(cfg).init_weights(3)


def test_micro_batches_give_the_same_tables():
    idx, y = torch.randint(0, 50, (2, 16, 8), generator=torch.Generator().manual_seed(1))

    def tables_after(rows):
        model = small_model(oe_m=19).double()
        opt = MuonAdamW(native_groups(model.roles(), 64, dtype=torch.float64))
        for step in range(2):
            set_schedule(opt, step, 953)
            for a in range(0, 16, rows):
                (model(idx[a:a + rows], y[a:a + rows]) * rows / 16).backward()
            assert sum(t.visits.sum().item() for t in model.oe_tables) == 4 * 16 * 8
            opt.step()
            opt.zero_grad()
        return [t.detach() for t in model.oe_tables]
    whole = tables_after(16)
    for rows in (8, 4):
        close(whole, tables_after(rows), 1e-6)


def test_zero_grad_clears_visited_rows_with_and_without_a_step():
    model = small_model(oe_m=19)
    opt = MuonAdamW(native_groups(model.roles(), 64))
    idx = torch.randint(0, 50, (4, 8))
    for with_step in (True, False):
        model(idx, idx).backward()
        if with_step:
            opt.step()
        # audits may read it after a step
        assert any((t.grad != 0).any() for t in model.oe_tables)
        opt.zero_grad()
        assert all((t.grad == 0).all() and (t.visits == 0).all() for t in model.oe_tables)
        assert all(p.grad is None for _, role, p in model.roles() if role != "oe")


# ---- groups and one whole step ----

ALL = dict(oe_m=19, qk_scale="full", wte_route="separate", out_skip=True)


def test_every_parameter_is_in_exactly_one_group():
    model = small_model(**ALL)
    groups = native_groups(model.roles(), 384)
    ids = [(g["role"], id(p)) for g in groups for p in g["params"]]
    assert sorted(ids) == sorted((role, id(p)) for _, role, p in model.roles())
    assert {i for _, i in ids} == {id(p) for p in model.parameters()}
    kinds = {g["role"]: g["kind"] for g in groups}
    assert kinds == dict.fromkeys(kinds, "adamw") | {"oe": "oe", "matrix": "muon"}
    rate = {g["role"]: round(g["initial_lr"], 6) for g in groups}
    assert rate == {
        "lm_head": 0.005657, "wte": 0.848528, "value_embeds": 0.848528, "oe": 0.848528,
        "matrix": 0.04, "q_log": 0.005, "resid_lambdas": 0.005, "x0_lambdas": 0.5,
        "wte_lambdas": 0.5, "out_lambdas": 0.5}
    wider = {g["role"]: round(g["initial_lr"], 6) for g in native_groups(model.roles(), 512)}
    assert wider["oe"] == 0.734847


def numpy_step(role, p, g, state, step, steps, width):
    """The native recipe for one parameter, written again in float64 numpy.

    state: the moments before the step, updated in place.
    """
    t = 0 if step < 11 else (step - 11) / (steps - 11)
    mult, scale = min(1, 2 - 2 * t), math.sqrt(768 / width)
    if role == "oe":
        hit = state["visits"] > 0
        gbar = g[hit] / state["visits"][hit][:, None]
        p = p.copy()
        p[hit] -= 0.6 * scale * mult * gbar / max(np.sqrt((gbar**2).mean()), 1e-30)
        return p
    if role != "matrix":
        lr = {"lm_head": 0.004 * scale, "wte": 0.6 * scale, "value_embeds": 0.6 * scale,
              "resid_lambdas": 0.005, "q_log": 0.005}.get(role, 0.5)
        b1 = 0.96 if role in ("x0_lambdas", "wte_lambdas", "out_lambdas") else 0.8
        state["step"] += 1
        state["exp_avg"] = b1 * state["exp_avg"] + (1 - b1) * g
        state["exp_avg_sq"] = 0.95 * state["exp_avg_sq"] + 0.05 * g * g
        m = state["exp_avg"] / (1 - b1 ** state["step"])
        v = state["exp_avg_sq"] / (1 - 0.95 ** state["step"])
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
    line = (u**2).mean(axis, keepdims=True)
    state["second_moment"] = 0.95 * state["second_moment"] + 0.05 * line
    w = u / np.sqrt(state["second_moment"])
    u = w * np.linalg.norm(u) / np.linalg.norm(w)
    lr = 0.04 * mult * math.sqrt(max(1, p.shape[0] / p.shape[1]))
    # the sign that steers the cautious decay is below float32 rounding
    state["undecided"] = np.abs(u) < 1e-5
    return p - lr * (u + 0.2 * (1 - t) * p * (u * p >= 0))


def drawn_state(role, p, step, rng):
    """A state in mid-run for one parameter, float32."""
    def normal(scale):
        return torch.from_numpy(scale * rng.standard_normal(p.shape)).float()
    rows, cols = p.shape[0], p.shape[-1]
    if role == "oe":
        return {"visits": torch.from_numpy(rng.integers(0, 3, rows)).float()}
    if role == "matrix":
        line = rng.random((rows, 1) if rows >= cols else (1, cols))
        return {"momentum_buffer": normal(0.01), "second_moment": torch.from_numpy(line).float()}
    return {"step": step, "exp_avg": normal(0.01), "exp_avg_sq": normal(0.01).square()}


@pytest.mark.parametrize("step", [0, 11, 300, 477, 952])
def test_one_native_step_equals_the_numpy_reference(step):
    model = small_model(**ALL)
    opt = MuonAdamW(native_groups(model.roles(), 64))
    rng = np.random.default_rng(step)
    want, states = {}, {}
    for name, role, p in model.roles():
        with torch.no_grad():
            p.add_(0.1 * torch.from_numpy(rng.standard_normal(p.shape)).float())
        p.grad = torch.from_numpy(0.01 * rng.standard_normal(p.shape)).float()
        state = drawn_state(role, p, step, rng)
        states[name] = {k: v.double().numpy() if torch.is_tensor(v) else v
                        for k, v in state.items()}
        if role == "oe":
            p.visits = state["visits"].clone()
            p.grad[p.visits == 0] = 0
        else:
            opt.state[p].update(copy.deepcopy(state))
        weight, grad = (z.detach().double().numpy() for z in (p, p.grad))
        want[name] = numpy_step(role, weight, grad, states[name], step, 953, 64)
    set_schedule(opt, step, 953)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    opt.step()
    for name, role, p in model.roles():
        sure = ~states[name].pop("undecided", np.zeros(p.shape, bool))
        assert sure.mean() > 0.99 and torch.equal(p.grad, grads[name]), name
        np.testing.assert_allclose(p.detach().numpy()[sure], want[name][sure], rtol=2e-5,
                                   atol=3e-6, err_msg=name)
        for key, value in opt.state[p].items():
            np.testing.assert_allclose(value, states[name][key], rtol=1e-5, atol=1e-8,
                                       err_msg=f"{name} {key}")


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
    close(p.detach(), q)


def test_weight_decay_acts_and_follows_progress():
    def after(decay, step):
        model = small_model()
        opt = MuonAdamW(native_groups(model.roles(), 64, weight_decay=decay))
        ones = torch.ones(1, 8, dtype=torch.long)
        model(ones, ones).backward()
        set_schedule(opt, step, 953)
        opt.step()
        return model.blocks[0].ffn.c_fc.weight.detach()
    assert not torch.equal(after(0.2, 0), after(0.0, 0))
    assert torch.equal(after(0.2, 953), after(0.0, 953))


def test_bfloat16_parameters_can_keep_float32_states():
    def optimizer():
        return MuonAdamW([dict(params=[p], kind="adamw", float32_state=True, lr=1e-3)])
    p = torch.nn.Parameter(random(8, 4).bfloat16())
    opt = optimizer()
    for _ in range(20):  # steps far below the bfloat16 spacing add up in the master copy
        p.grad = torch.ones_like(p)
        opt.step()
    s = opt.state[p]
    assert s["master"].dtype == s["exp_avg"].dtype == torch.float32
    assert torch.equal(p, s["master"].bfloat16())
    start = random(8, 4).bfloat16().float()
    torch.testing.assert_close(s["master"], start - 0.02, rtol=0, atol=1e-4)
    again = optimizer()
    again.load_state_dict(opt.state_dict())
    assert again.state[p]["exp_avg_sq"].dtype == torch.float32
    assert_same(dict(again.state[p]), dict(s))


# ---- kinds ----

def test_a_new_rule_is_a_function_and_a_row(monkeypatch):
    def heavy_ball(gradient, state, group):
        state["velocity"] = gradient + group["friction"] * state.get("velocity", 0)
        return state["velocity"]
    row = partial(one_by_one, heavy_ball), dict(friction=0.9), ANY
    monkeypatch.setitem(KINDS, "mine", row)
    monkeypatch.setattr(optim, "MATRIX_KINDS", (*MATRIX_KINDS, "mine"))
    model = small_model().double()
    W = model.blocks[0].ffn.c_fc.weight
    ref = W.detach().clone().requires_grad_()
    opt = MuonAdamW(native_groups(model.roles(), 64, matrix_kind="mine", weight_decay=0.0))
    torch_opt = torch.optim.SGD([ref], lr=0.04, momentum=0.9)
    for step in range(3):
        set_schedule(opt, 0, 953)
        for _, _, p in model.roles():
            p.grad = random(*p.shape, seed=step)
        ref.grad = W.grad.clone()
        opt.step(), torch_opt.step()
    close(W.detach(), ref.detach())


@pytest.mark.parametrize("kind", MATRIX_KINDS)
def test_every_kind_for_matrices_trains(kind):
    model, idx = small_model(), torch.randint(0, 50, (4, 8))
    opt, losses = MuonAdamW(native_groups(model.roles(), 64, matrix_kind=kind)), []
    for step in range(5):
        set_schedule(opt, step, 5, lr_scale=0.1)
        losses.append(model(idx, idx))
        losses[-1].backward()
        opt.step()
        opt.zero_grad()
    assert losses[-1] < losses[0]


def test_unknown_kinds_and_what_a_kind_cannot_update_are_refused():
    vector, stack = (torch.nn.Parameter(torch.zeros(*shape)) for shape in ((3,), (2, 3, 4)))
    with pytest.raises(KeyError):
        MuonAdamW([dict(params=[vector], kind="sgd")])
    for p, kind in ((vector, "muon"), (vector, "oe"), (stack, "oe")):
        with pytest.raises(ValueError, match="matrices only"):
            MuonAdamW([dict(params=[p], kind=kind)])
    with pytest.raises(UserError, match="is none of adamw"):
        native_groups(small_model().roles(), 64, matrix_kind="oe")
    with pytest.raises(ValueError, match="closure"):
        MuonAdamW([dict(params=[stack], kind="muon")]).step(lambda: 0)
