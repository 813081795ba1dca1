"""The delayed rule against autograd, enumeration and intervention; the comparators; the pipeline's clocks, packets and resumption."""
import contextlib
import dataclasses
import io
import itertools

import pytest
import torch
import torch.nn.functional as F

import wm
from common import UserError
from model import GPT, GPTConfig, norm
from wm import Pipeline, Rule, record, stage1, stage2
from wm_kernels import wm_credit

LIVE = lambda name, W: W  # noqa: E731
CFG = GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=53, sequence_len=12, window_pattern="SL")


def grown(seed=0, dtype=torch.float64, **kw):
    """A model whose zero-initialised projections and gates have been moved away from zero."""
    model = GPT(dataclasses.replace(CFG, **kw)).init_weights(seed).to(dtype)
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, role, p in model.roles():
            if "c_proj" in name or "ve_gate" in name:
                p.copy_(torch.randn(p.shape, generator=g, dtype=dtype) * 0.2)
            elif role == "lm_head":
                p.copy_(torch.randn(p.shape, generator=g, dtype=dtype) * 0.3)
            elif role == "resid_lambdas":
                p.copy_(torch.tensor([0.9, 1.1, 0.8])[:len(p)])
    return model


def batch(seed=0, rows=3, T=11):
    idx = torch.randint(0, CFG.vocab_size, (rows, T + 1), generator=torch.Generator().manual_seed(seed))
    return idx[:, :-1], idx[:, 1:]


def exact(model, idx, targets):
    """{name: gradient of the mean loss}, and minus N times the gradient at x_L [N, C]."""
    model.requires_grad_(True)
    trace = {}
    x_L = model.trunk(idx, model.wte(idx), None, trace)
    loss = F.cross_entropy(15 * torch.tanh(norm(x_L) @ model.lm_head.weight.T / 15).flatten(0, 1), targets.flatten())
    names, params = zip(*model.named_parameters())
    *grads, bus = torch.autograd.grad(loss, [*params, x_L], allow_unused=True)
    model.requires_grad_(False)
    return {n: g for n, g in zip(names, grads) if g is not None}, -bus.flatten(0, 1) * idx.numel()


def cosine(a, b):
    return (a * b).sum() / (a.norm() * b.norm())


def test_head_scores_are_autograds():
    model, (idx, targets) = grown(), batch()
    targets = targets.clone()
    targets[0, 3] = -1
    x = torch.randn(33, 32, dtype=torch.float64, requires_grad=True)
    W = model.lm_head.weight.detach().clone().requires_grad_(True)
    z = (x @ W.T).detach().requires_grad_(True)
    nats = F.cross_entropy(15 * torch.tanh(z / 15), targets.flatten(), ignore_index=-1, reduction="none")
    slope, = torch.autograd.grad(nats.sum(), z)
    for chunk in (5, 64):
        wm.HEAD_CHUNK, old = chunk, wm.HEAD_CHUNK
        with torch.no_grad():
            s, n, grad = wm.head_scores(x, W, targets.flatten(), 15.0)
        wm.HEAD_CHUNK = old
        torch.testing.assert_close(s, -slope, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(n, nats.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad, slope.T @ x.detach() / 33, rtol=1e-10, atol=1e-12)


def test_skip_gains_unroll_the_recurrence():
    model = grown()
    gamma, alpha = wm.skip_gains(model)
    x0, writes = torch.randn(7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    x = x0
    for lam, lam0, write in zip(model.resid_lambdas, model.x0_lambdas, writes):
        x = lam * x + lam0 * x0 + write
    torch.testing.assert_close(alpha * x0 + sum(g * w for g, w in zip(gamma, writes)), x.detach())


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 30.0])
def test_norm_shift_keeps_its_digits(size):
    """In float32 against float64, for probes down to the least --sigma, on and off the tangent space."""
    z, xi = 3 * torch.randn(40, 17, generator=torch.Generator().manual_seed(9)), wm.signs(40, 17, 5)
    for d in (xi, wm.tangent(xi, norm(z))):
        d = size * d
        exact = norm(z.double() + d.double()) - norm(z.double())
        torch.testing.assert_close(wm.norm_shift(z.double(), d.double()), exact, rtol=1e-9, atol=1e-14)
        assert (wm.norm_shift(z, d).double() - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize("scale, mean", [(1.0, 0.5), (2.0, 1.0)])
def test_moments_of_the_contraction_by_enumeration(scale, mean):
    """Prop. 1(a, b): every sign pattern of N = 4 tokens in G = 2 streams of 2, on the worked example and on random a and x."""
    N, group, gen = 4, 2, torch.Generator().manual_seed(3)
    for toy in (True, False):
        W = torch.randn(3, 1, generator=gen, dtype=torch.float64)
        u = torch.randn(N, 3, generator=gen, dtype=torch.float64)
        a = (u @ W).squeeze(1)
        u = u / a.unsqueeze(1) if toy else u
        a = torch.ones(N, dtype=torch.float64) if toy else a
        x = torch.ones(N, 1, dtype=torch.float64) if toy else torch.randn(N, 2, generator=gen, dtype=torch.float64)
        found = []
        for pattern in itertools.product((-1.0, 1.0), repeat=N):
            xi = torch.tensor(pattern, dtype=torch.float64).unsqueeze(1)
            credit = wm_credit(u, 0.3 * xi, W, xi, 0.3, group=group, scale=scale)
            found.append((credit.T @ x / N).flatten())
        found = torch.stack(found)
        expect = scale / group * (a.unsqueeze(1) * x).mean(0)
        torch.testing.assert_close(found.mean(0), expect)
        if toy:
            assert found.mean().item() == pytest.approx(mean, abs=1e-12)
        pairs = [a[m] * x[n] + a[n] * x[m] for g in range(0, N, group) for n in range(g, g + group) for m in range(n + 1, g + group)]
        covariance = (scale / group / N) ** 2 * sum(torch.outer(p, p) for p in pairs)
        torch.testing.assert_close((found - found.mean(0)).T @ (found - found.mean(0)) / len(found), covariance, atol=1e-12, rtol=1e-9)


def test_bus_credit_by_enumeration(monkeypatch):
    """Prop. 1(c): over all sign patterns the mean is P (a (1 - x^2 / C)) / rms, with or without the tangent probe, and its variance is the formula's."""
    C, V, gen = 5, 7, torch.Generator().manual_seed(5)
    x_L, s = torch.randn(2, C, generator=gen, dtype=torch.float64), torch.randn(2, V, generator=gen, dtype=torch.float64)
    W = torch.randn(V, C, generator=gen, dtype=torch.float64)
    model = type("M", (), {"lm_head": type("H", (), {"weight": W})})
    x, rms, a = norm(x_L), x_L.square().mean(-1, keepdim=True).sqrt(), s @ W
    packet = dict(key="k", first=0, idx=torch.zeros(1, 2), s=s, x_L=x_L, x_final=x)
    for tangent in (True, False):
        found = []
        for pattern in itertools.product((-1.0, 1.0), repeat=C):
            monkeypatch.setattr(wm, "draw", lambda *args: torch.tensor(pattern, dtype=torch.float64).expand(2, C))
            found.append(wm.bus_credit(model, packet, packet, Rule(sigma=1e-6, tangent=tangent, project=False), LIVE))
        found = torch.stack(found)
        torch.testing.assert_close(found.mean(0), a * (1 - x**2 / C) / rms, rtol=1e-5, atol=1e-5)
        variance = a**2 * x**2 * (C - x**2) / (C * rms) ** 2
        torch.testing.assert_close(found.var(0, unbiased=False), variance, rtol=1e-4, atol=1e-5)
        u = wm.bus_credit(model, packet, packet, Rule(sigma=1e-6, tangent=tangent), LIVE)
        assert (u * x).sum(-1).abs().max() < 1e-9


def test_monte_carlo_mean_is_the_projected_exact_credit():
    model, (idx, targets) = grown(), batch()
    with torch.no_grad():
        total, K = 0.0, 600
        for k in range(K):
            packet, *_ = record(model, idx, targets, f"probe {k}")
            total = total + wm.bus_credit(model, packet, packet, Rule(sigma=1e-5), LIVE) / K
        x, rms = packet["x_final"], packet["x_L"].square().mean(-1, keepdim=True).sqrt()
        expect = wm.tangent((packet["s"] @ model.lm_head.weight) * (1 - x**2 / x.size(1)) / rms, x)
    _, bus = exact(model, idx, targets)
    assert cosine(total, expect) > 0.99 and cosine(expect, bus) > 0.97
    torch.testing.assert_close(total, expect, rtol=0, atol=6 * expect.abs().max().item() / K**0.5)


@pytest.fixture(scope="module")
def oracle():
    """A grown model, a batch, its packet with the exact bus credit, and a function: surrogate gradients of layer i with that credit."""
    model, (idx, targets) = grown(qk_scale="head"), batch()
    grads, bus = exact(model, idx, targets)
    with torch.no_grad():
        packet, *_ = record(model, idx, targets, "oracle")
    packet["bus"], packet["step"] = bus, 0
    return model, idx, targets, grads, packet


def direct(model, packet, i, part):
    """{name: gradient} of -<bus, gamma_i * what layer i's sublayer writes> / N: the skip path only, by autograd through the traced inputs."""
    gamma, _ = wm.skip_gains(model)
    layer, block = packet["layers"][i], model.blocks[i]
    model.requires_grad_(True)
    if part == "ffn":
        out = block.ffn(layer["mlp_in"])
    else:
        ve = model.value_embeds[str(i)](packet["idx"]) if "gate" in layer else None
        T = packet["idx"].size(1)
        out = block.attn(layer["attn_in"], ve, model.cos[:T], model.sin[:T], model._masks(T, "cpu")[block.attn.window])
    loss = -(out.flatten(0, 1) * packet["bus"]).sum() * gamma[i] / packet["idx"].numel()
    names, params = zip(*model.named_parameters())
    found = torch.autograd.grad(loss, params, allow_unused=True)
    model.requires_grad_(False)
    return {n: g for n, g in zip(names, found) if g is not None}


def test_stage_1_is_exact_given_its_receiver(oracle):
    """One token per stream: c_fc, c_v, value embeddings and temperatures equal autograd along the skip path; so do the c_proj matrices."""
    model, idx, targets, grads, packet = oracle
    rule = Rule(sigma=1e-6, head_temp=True)
    with torch.no_grad():
        got = {**stage1(model, packet, packet, rule, LIVE), **stage2(model, packet, packet, rule, LIVE)}
    for i in range(3):
        want = {**direct(model, packet, i, "ffn"), **direct(model, packet, i, "attn")}
        names = [f"blocks.{i}.{k}" for k in ("ffn.c_fc.weight", "ffn.c_proj.weight", "attn.c_v.weight", "attn.c_proj.weight", "attn.q_log")]
        for name in names + ([f"value_embeds.{i}.weight"] if i % 2 == 0 else []):
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-7, msg=lambda m: f"{name}: {m}")
    torch.testing.assert_close(got["blocks.2.ffn.c_fc.weight"], grads["blocks.2.ffn.c_fc.weight"], rtol=1e-4, atol=1e-7)   # nothing above it
    torch.testing.assert_close(got["blocks.2.ffn.c_proj.weight"], grads["blocks.2.ffn.c_proj.weight"], rtol=1e-9, atol=1e-12)


def test_filtered_trace_as_the_paper_forms_it(oracle):
    """sum over tokens of credit x (attention-filtered input), formed whole, equals what stage 1 computes in the cheaper order."""
    model, idx, targets, _, packet = oracle
    rule = Rule()
    with torch.no_grad():
        got = stage1(model, packet, packet, rule, LIVE)
        for i in range(3):
            layer, window = packet["layers"][i], model.blocks[i].attn.window
            B, T, H, D = layer["q"].shape
            xbar = torch.einsum("bhts,bsc->bthc", wm.attention_map(layer, window), layer["attn_in"])          # [B, T, H, C]
            v = torch.einsum("bhts,bshd->bthd", wm.attention_map(layer, window), layer["v"])
            torch.testing.assert_close(v.flatten(2), layer["y"])
            gamma = wm.skip_gains(model)[0][i]
            credit = (gamma * packet["bus"] @ model.blocks[i].attn.c_proj.weight).view(B, T, H, D)
            want = -torch.einsum("bthd,bthc->hdc", credit, xbar).reshape(H * D, -1) / (B * T)
            torch.testing.assert_close(got[f"blocks.{i}.attn.c_v.weight"], want)
        unfiltered = stage1(model, packet, packet, Rule(filtered_v=False), LIVE)
        want = -(credit.reshape(B * T, -1).T @ layer["attn_in"].flatten(0, 1)) / (B * T)
        torch.testing.assert_close(unfiltered["blocks.2.attn.c_v.weight"], want)


def test_query_and_key_credit_in_the_mean():
    """Over many probes q's credit, and k's at gamma 1, point along autograd's gradient of the skip path; at gamma 0 k's does not."""
    model, (idx, targets) = grown(n_layer=1, window_pattern="L"), batch(rows=1, T=6)
    with torch.no_grad():
        packet, *_ = record(model, idx, targets, "qk")
    packet.update(bus=exact(model, idx, targets)[1], step=0)
    model.resid_lambdas.fill_(1.0)
    want = direct(model, packet, 0, "attn")

    def found(**kw):
        with torch.no_grad():
            got = stage1(model, packet, packet, Rule(sigma=1e-5, active="qk", probes=600, **kw), LIVE)
        return [cosine(got[f"blocks.0.attn.c_{w}.weight"], want[f"blocks.0.attn.c_{w}.weight"]).item() for w in "qk"]
    q, k = found(gamma_k=1.0)
    assert q > 0.9 and k > 0.85
    assert found(gamma_k=0.0)[1] < 0.6
    assert found(gamma_k=1.0, qk_probe="coupled")[0] > 0.85


@pytest.mark.parametrize("kw", [dict(active="qk"), dict(active="qk", qk_probe="coupled"), dict(head_temp=True)], ids=str)
def test_rounded_packets_keep_the_credit_of_q_and_k(kw):
    """A bfloat16 packet's pseudo-gradients are close to the unrounded one's: a displacement is taken between outputs of the same precision."""
    model, (idx, targets), found = grown(qk_scale="head" if "head_temp" in kw else "none"), batch(), []
    with torch.no_grad():
        for dtype in ("float32", "bfloat16"):
            rule = Rule(packet_dtype=dtype, **kw)
            packet, *_ = record(model, idx, targets, "b")
            stage2(model, packet, packet, rule, LIVE)
            packet = Pipeline(model, rule, 0)._stow({**packet, "step": 0})
            found.append(stage1(model, packet, packet, rule, LIVE))
    for name in found[0]:
        assert cosine(found[1][name], found[0][name]) > 0.999, name


def test_wte_credit_in_the_mean():
    model, (idx, targets) = grown(), batch()
    with torch.no_grad():
        total, K = 0.0, 600
        for k in range(K):
            packet, *_ = record(model, idx, targets, f"wte {k}")
            packet["bus"] = torch.randn(33, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            total = total + stage2(model, packet, packet, Rule(sigma=1e-5, center=False), LIVE)["wte.weight"] / K
    w = model.wte.weight.detach().clone().requires_grad_(True)
    alpha = wm.skip_gains(model)[1]
    (-(alpha * norm(F.embedding(idx, w)).flatten(0, 1) * packet["bus"]).sum() / 33).backward()
    assert cosine(total, w.grad) > 0.98
    assert 0.9 < (total.norm() / w.grad.norm()).item() < 1.1


def test_future_sum_is_the_loop():
    R = torch.randn(2, 7, 3, dtype=torch.float64)
    for gamma, window in ((0.0, 7), (0.85, 7), (1.0, 7), (0.5, 2)):
        want = torch.zeros_like(R)
        for s in range(7):
            for tau in range(s, min(7, s + window + 1)):
                want[:, s] += gamma ** (tau - s) * R[:, tau]
        torch.testing.assert_close(wm.future_sum(R, gamma, window), want)


def test_streams():
    """A stream's reward is the mean over its tokens; scale_factor M_g undoes the division; sizes that do not divide are refused."""
    model, (idx, targets) = grown(), batch(T=12)
    with torch.no_grad():
        packet, *_ = record(model, idx, targets, "s")
        rule = Rule(streams=9)
        xi, dx = wm.bus_probe(packet, rule)
        S = packet["s"] @ model.lm_head.weight
        want = (S * dx).view(9, 4, -1).mean(1).repeat_interleave(4, 0) * xi / rule.sigma
        got = wm.bus_credit(model, packet, packet, dataclasses.replace(rule, project=False), LIVE)
        torch.testing.assert_close(got, want)
        got = wm.bus_credit(model, packet, packet, dataclasses.replace(rule, project=False, scale_factor=4.0), LIVE)
        torch.testing.assert_close(got, 4 * want)
        with pytest.raises(UserError, match="does not divide"):
            wm.bus_credit(model, packet, packet, Rule(streams=7), LIVE)


def run(steps=5, cfg=CFG, dtype=torch.float64, seed=1, change=None, hook=None, micros=1, **kw):
    """(pipeline, [weights after every step]) of a tiny run; change: (step) whose targets differ; hook(step, pipeline) runs after a step."""
    model = GPT(dataclasses.replace(cfg, qk_scale="head") if kw.get("head_temp") else cfg).init_weights(seed).to(dtype)
    pipeline, history = Pipeline(model, Rule(**kw), seed), []
    for step in range(steps):
        batches = [batch(100 * step + m, T=12) for m in range(micros)]
        if step == change:
            batches = [(x, (y + 1) % CFG.vocab_size) for x, y in batches]
        pipeline.step(step, steps, batches)
        history.append({n: p.detach().clone() for n, p in model.named_parameters()})
        if hook:
            hook(step, pipeline)
    return pipeline, history


STAGE = lambda name: 3 if "lm_head" in name else 2 if "wte" in name or "c_proj" in name else 1  # noqa: E731


@pytest.mark.parametrize("clock", wm.CLOCKS)
@pytest.mark.parametrize("kw", [{}, dict(active="qk"), dict(head_temp=True), dict(streams=12)], ids=str)
def test_delay_by_intervention(clock, kw):
    """Other targets for batch t = 2 reach the head after step 2, stage 2 after step 3, stage 1 after step 4, and nothing earlier."""
    _, plain = run(6, clock=clock, **kw)
    pipeline, other = run(6, clock=clock, change=2, **kw)
    first = {}
    for step in range(6):
        for name in plain[0]:
            if not torch.equal(plain[step][name], other[step][name]):
                first.setdefault(name, step)
    weights = {name for stage in pipeline.active.values() for name in stage}
    assert first == {name: {3: 2, 2: 3, 1: 4}[STAGE(name)] for name in weights}


@pytest.mark.parametrize("clock, reads_head, reads_proj", [("strict_post", True, True), ("stage2_pre", False, True), ("both_pre", False, False)])
def test_which_receiver_a_clock_reads(clock, reads_head, reads_proj):
    """Altering lm_head between steps 2 and 3 changes the credit that stage 2 installs in step 3 under strict_post only; altering the c_proj
    matrices between steps 3 and 4 changes what stage 1 installs in step 4 unless it was built before."""
    def altered(after, which):
        def hook(step, pipeline):
            for name, p in pipeline.model.named_parameters():
                if step == after and which in name:
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(7), dtype=p.dtype) * 0.05)
        return hook

    def installed(hook, at):  # the pseudo-gradients of step `at`
        pipeline, _ = run(at + 1, clock=clock, hook=hook)
        return {n: p.grad for n, p in pipeline.model.named_parameters() if p.grad is not None}
    plain, moved = installed(None, 3), installed(altered(2, "lm_head"), 3)
    assert any(not torch.equal(plain[n], moved[n]) for n in plain if STAGE(n) == 2) == reads_head
    assert all(torch.equal(plain[n], moved[n]) for n in plain if STAGE(n) == 1)
    plain, moved = installed(None, 4), installed(altered(3, "c_proj"), 4)
    assert any(not torch.equal(plain[n], moved[n]) for n in plain if STAGE(n) == 1) == reads_proj


@pytest.mark.parametrize("method", [m for m in wm.METHODS if m != "backprop"])
def test_nothing_requires_grad(method, monkeypatch):
    def refuse(*args, **kw):
        raise AssertionError("a backward pass")
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    seen = []

    def look(value):
        if torch.is_tensor(value):
            seen.append(value)
        for v in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            look(v)
    pipeline, _ = run(4, method=method, draws=2, hook=lambda step, p: look(p.state_dict()))
    seen += [p for p in pipeline.model.parameters()] + [p.grad for p in pipeline.model.parameters() if p.grad is not None]
    assert len(seen) > 20 and not any(t.requires_grad or t.grad_fn is not None for t in seen)


@pytest.mark.parametrize("kw", [
    dict(streams=12), dict(streams=12, scale_factor=3.0), dict(sigma=0.3), dict(project=False), dict(tangent=False), dict(center=False), dict(wte_route="head"),
    dict(filtered_v=False), dict(clock="stage2_pre"), dict(clock="both_pre"), dict(hidden_opt="adamw"), dict(hidden_lr=0.01), dict(hidden_beta=0.5), dict(lm_lr=0.01),
    dict(lm_pool="row_iso"), dict(lm_beta1=0.1), dict(lm_eps=1e-8), dict(wte_lr=0.01), dict(ve_lr=0.01), dict(lrm_min=0.9), dict(adamw_anneal=False),
    dict(reader="muon_colnorm"), dict(reader="adamw_frobnorm"), dict(packet_dtype="bfloat16"), dict(active="q"), dict(active="k"), dict(head_temp=True),
    dict(method="head_only"), dict(method="lexical_only"), dict(method="mismatched_origin"), dict(method="backprop"), dict(method="sr_lnp"), dict(method="sr_np", draws=2)], ids=str)
def test_every_flag_acts(kw):
    _, plain = run(5)
    _, other = run(5, **kw)
    assert any(not torch.equal(plain[-1][n], other[-1].get(n, plain[-1][n])) or n not in other[-1] for n in plain[-1])
    assert all(p.isfinite().all() for p in other[-1].values())


@pytest.mark.parametrize("kw", [dict(qk_probe="coupled"), dict(qk_probe="multiplexed"), dict(gamma_k=0.0), dict(probes=2), dict(spherical=False),
                                dict(unit_rms_qk=False), dict(tangent_qk=False), dict(q_lr=0.1), dict(k_lr=0.1), dict(q_beta=0.3), dict(k_beta=0.3)], ids=str)
def test_every_query_key_flag_acts(kw):
    _, plain = run(5, active="qk")
    pipeline, other = run(5, active="qk", **kw)
    assert any(not torch.equal(plain[-1][n], other[-1][n]) for n in plain[-1] if "c_q" in n or "c_k" in n)
    norms = [(p.norm() / GPT(CFG).init_weights(1).double().get_parameter(n).norm()).item() for n, p in pipeline.model.named_parameters() if "c_q" in n]
    assert all(abs(r - 1) < 1e-6 for r in norms) != (kw == dict(spherical=False))


def test_probe_seeds_are_isolated():
    """A second probe leaves every other draw as it was: the 4-matrix weights of M = 1 and M = 2 agree until q and k have moved."""
    _, one = run(3, active="qk", probes=1)
    _, two = run(3, active="qk", probes=2)
    assert all(torch.equal(one[2][n], two[2][n]) for n in one[2] if "c_q" not in n and "c_k" not in n)
    assert any(not torch.equal(one[2][n], two[2][n]) for n in one[2] if "c_q" in n)


def test_micro_batches_average():
    """The same micro-batch twice gives the head the same gradient as once; its stage-2 probes differ by their key."""
    model = GPT(CFG).init_weights(1).double()
    pipeline = Pipeline(model, Rule(), 1)
    pipeline.step(0, 3, [batch(1), batch(1)])
    head, _, grad = record(GPT(CFG).init_weights(1).double().requires_grad_(False), *batch(1), "x")
    torch.testing.assert_close(model.lm_head.weight.grad, grad)
    assert [len(p) for p in pipeline.packets.values()] == [2]


def test_sr_lnp_and_sr_np_find_the_direction():
    """With many draws both comparators point along the exact gradient where their surrogates allow it."""
    model, (idx, targets) = grown(n_layer=2), batch(rows=1, T=5)
    grads, _ = exact(model, idx, targets)
    with torch.no_grad():
        packet, *_ = record(model, idx, targets, "np")
        lnp = wm.sr_lnp(model, packet, targets, Rule(sigma=1e-4, draws=1000))
        snp = wm.sr_np(model, packet, targets, Rule(sigma=1e-4, draws=300))
    for name, least in (("blocks.1.ffn.c_proj.weight", 0.95), ("blocks.1.ffn.c_fc.weight", 0.85)):
        assert cosine(lnp[name], grads[name]) > least, name
        assert cosine(snp[name], grads[name]) > least - 0.15, name
    assert cosine(snp["blocks.0.ffn.c_proj.weight"], grads["blocks.0.ffn.c_proj.weight"]) > 0.5      # it sees the layers above
    assert cosine(snp["wte.weight"], grads["wte.weight"]) > 0.5


@pytest.mark.parametrize("kw", [
    dict(), dict(clock="stage2_pre", streams=12), dict(clock="both_pre"), dict(clock="origin", reader="muon_colnorm"), dict(head_temp=True),
    dict(active="qk", probes=2, packet_dtype="bfloat16", packets="host"), dict(active="qk", qk_probe="multiplexed"), dict(method="backprop", active="q"),
    dict(method="sr_lnp", draws=2), dict(method="sr_np", draws=2), dict(method="head_only"), dict(method="lexical_only"),
    dict(method="mismatched_origin", active="k")], ids=str)
def test_state_survives_a_copy_after_every_step(kw):
    """A pipeline that is saved and read again between any two steps (nothing, one batch, two in flight) ends where one that was not does."""
    _, whole = run(6, **kw)
    cfg = dataclasses.replace(CFG, qk_scale="head" if kw.get("head_temp") else "none")
    pipeline = Pipeline(GPT(cfg).init_weights(1).double(), Rule(**kw), 1)
    for step in range(6):
        file = io.BytesIO()
        torch.save({"model": pipeline.model.state_dict(), "pipeline": pipeline.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        pipeline = Pipeline(GPT(cfg).init_weights(99).double(), Rule(**kw), 1)
        pipeline.model.load_state_dict(saved["model"])
        pipeline.load_state_dict(saved["pipeline"])
        pipeline.step(step, 6, [batch(100 * step, T=12)])
    assert all(torch.equal(p, whole[-1][n]) for n, p in pipeline.model.named_parameters())


@pytest.mark.parametrize("kw", [dict(active="qk", center=False), dict(clock="both_pre", streams=12, center=False)], ids=str)
def test_ranks_share_out_what_is_in_flight(kw):
    """Three ranks that take up one process's state, each with a third of the rows, install on average what the process would."""
    one, _ = run(3, **kw)
    state, weights, (idx, targets) = one.state_dict(), one.model.state_dict(), batch(300, T=12)
    found = []
    for rank in range(3):
        rule = dataclasses.replace(one.rule, streams=one.rule.streams // 3)
        part = Pipeline(GPT(CFG).init_weights(1).double(), rule, 1, rank, 3)
        part.model.load_state_dict(weights)
        part.load_state_dict(state)
        rows = slice(rank * len(idx) // 3, (rank + 1) * len(idx) // 3)
        with torch.no_grad():
            part._forward_only(3, [(idx[rows], targets[rows])], contextlib.nullcontext())
        found.append({n: p.grad for n, p in part.model.named_parameters() if p.grad is not None})
    one.optimizer.zero_grad()
    with torch.no_grad():
        one._forward_only(3, [(idx, targets)], contextlib.nullcontext())
    want = {n: p.grad for n, p in one.model.named_parameters() if p.grad is not None}
    assert want.keys() == found[0].keys() and {"wte.weight", "blocks.0.attn.c_v.weight", "blocks.1.ffn.c_proj.weight"} <= want.keys()
    for name, g in want.items():
        torch.testing.assert_close(sum(f[name] for f in found) / 3, g, rtol=1e-9, atol=1e-14, msg=name)


def test_mismatched_origin_pairs_noise():
    """Its pseudo-gradients are uncorrelated with the matched ones of the same packets."""
    matched, _ = run(5)
    control, _ = run(5, method="mismatched_origin")
    for name in ("blocks.1.ffn.c_proj.weight", "blocks.2.ffn.c_fc.weight"):
        a, b = (p.model.get_parameter(name).grad for p in (matched, control))
        assert abs(cosine(a, b)) < 0.4


def test_readers():
    pipeline, _ = run(3, reader="muon_colnorm", lm_pool="row_iso")
    W = pipeline.model.blocks[0].ffn.c_proj.weight
    read = pipeline.readers("blocks.0.ffn", W)
    M = pipeline.optimizer.state[W]["momentum_buffer"]
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    want = U @ torch.diag(1 / S) @ U.T @ W
    want = want * (W.norm(dim=0) / want.norm(dim=0))
    assert cosine(read, want) > 1 - 1e-6
    assert pipeline.readers("lm_head", pipeline.model.lm_head.weight) is not None
    pipeline, _ = run(3, reader="adamw_frobnorm")
    W = pipeline.model.lm_head.weight
    v = pipeline.optimizer.state[W]["exp_avg_sq"] / (1 - 0.95**3)
    want = W / (v.sqrt() + 1e-4)
    torch.testing.assert_close(pipeline.readers("lm_head", W), want * W.norm() / want.norm())
