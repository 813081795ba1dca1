"""wm.py: the credits against autograd and enumeration, and the comparators."""
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import wm
from common import UserError
from model import GPT, GPTConfig, norm
from wm import Rule, live, stage1, stage2
from wm_kernels import signs, wm_credit
from wm_pipeline import Packet, Pinned, forward

CFG = GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=53, sequence_len=12, window_pattern="SL")
close = torch.testing.assert_close


def grown(seed=0, **kw):
    """A float64 model whose zero-initialised projections and gates are moved away from zero."""
    model = GPT(dataclasses.replace(CFG, **kw)).init_weights(seed).double()
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, role, p in model.roles():
            if "c_proj" in name or "ve_gate" in name or role == "lm_head":
                size = 0.3 if role == "lm_head" else 0.2
                p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype) * size)
            elif role == "resid_lambdas":
                p.copy_(torch.tensor([0.9, 1.1, 0.8])[:len(p)])
    return model.requires_grad_(False)


def batch(seed=0, rows=3, T=11):
    gen = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, CFG.vocab_size, (rows, T + 1), generator=gen)
    return idx[:, :-1], idx[:, 1:]


def gradients(model, loss, *more):
    """({name: gradient} of what the loss depends on, gradients of `more`)."""
    names, params = zip(*model.named_parameters())
    found = torch.autograd.grad(loss, [*params, *more], allow_unused=True)
    model.requires_grad_(False)
    mine = {n: g.detach() for n, g in zip(names, found) if g is not None}
    return mine, found[len(names):]


def exact(model, idx, targets):
    """({name: gradient of the mean loss}, minus N times the gradient at x_L [N, C])."""
    model.requires_grad_(True)
    x_L = model.trunk(idx, model.wte(idx), None)
    logits = 15 * torch.tanh(norm(x_L) @ model.lm_head.weight.T / 15)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    grads, (bus,) = gradients(model, loss, x_L)
    return grads, -bus.flatten(0, 1) * idx.numel()


def cosine(a, b):
    return (a * b).sum() / (a.norm() * b.norm())


def with_bus(model, packet, rule):
    packet.bus = wm.bus_credit(model, packet, rule, live)
    return packet


def stages(model, packet, rule):
    """{name: pseudo-gradient} of both stages."""
    with torch.no_grad():
        return {**stage2(model, packet, rule, live), **stage1(model, packet, rule, live)}


@pytest.mark.parametrize("chunk", [5, 64])
def test_head_scores_are_autograds(chunk, monkeypatch):
    monkeypatch.setattr(wm, "HEAD_CHUNK", chunk)
    targets = batch()[1].flatten().clone()
    targets[3] = -1
    x, W = torch.randn(33, 32, dtype=torch.float64), grown().lm_head.weight
    z = (x @ W.T).requires_grad_(True)
    nats = F.cross_entropy(15 * torch.tanh(z / 15), targets, ignore_index=-1, reduction="none")
    slope, = torch.autograd.grad(nats.sum(), z)
    s, n, grad = wm.head_scores(x, W, targets, 15.0)
    for found, want in ((s, -slope), (n, nats.detach()), (grad, slope.T @ x / 33)):
        close(found, want, rtol=1e-10, atol=1e-12)


def test_skip_gains_unroll_the_recurrence():
    model = grown()
    gamma, alpha = wm.skip_gains(model)
    x0 = x = torch.randn(7, dtype=torch.float64)
    writes = torch.randn(3, 7, dtype=torch.float64)
    for lam, lam0, write in zip(model.resid_lambdas, model.x0_lambdas, writes):
        x = lam * x + lam0 * x0 + write
    close(alpha * x0 + sum(g * w for g, w in zip(gamma, writes)), x)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 30.0])
def test_norm_shift_keeps_its_digits(size):
    """In float32 against float64, for probes down to the least --sigma, tangent or not."""
    gen = torch.Generator().manual_seed(9)
    z, xi = 3 * torch.randn(40, 17, generator=gen), signs(40, 17, 5)
    for d in (size * xi, size * wm.tangent(xi, norm(z))):
        want = norm(z.double() + d.double()) - norm(z.double())
        close(wm.norm_shift(z.double(), d.double()), want, rtol=1e-9, atol=1e-14)
        assert (wm.norm_shift(z, d).double() - want).abs().max() < 2e-6 * want.abs().max()


@pytest.mark.parametrize("toy", [True, False], ids=["worked example", "random"])
@pytest.mark.parametrize("scale, mean", [(1.0, 0.5), (2.0, 1.0)])
def test_moments_of_the_contraction_by_enumeration(scale, mean, toy):
    """Prop. 1(a, b): every sign pattern of N = 4 tokens in G = 2 streams of 2."""
    N, group, gen = 4, 2, torch.Generator().manual_seed(3)
    like = dict(generator=gen, dtype=torch.float64)
    W, u, x = torch.randn(3, 1, **like), torch.randn(N, 3, **like), torch.randn(N, 2, **like)
    a = (u @ W).squeeze(1)
    if toy:
        u, a, x = u / a.unsqueeze(1), torch.ones_like(a), torch.ones_like(x[:, :1])
    found = []
    for pattern in itertools.product((-1.0, 1.0), repeat=N):
        xi = torch.tensor(pattern, dtype=torch.float64).unsqueeze(1)
        credit = wm_credit(u, 0.3 * xi, W, xi, 0.3, group=group, scale=scale)
        found.append((credit.T @ x / N).flatten())
    found = torch.stack(found)
    close(found.mean(0), scale / group * (a.unsqueeze(1) * x).mean(0))
    if toy:
        assert found.mean().item() == pytest.approx(mean, abs=1e-12)
    pairs = [a[m] * x[n] + a[n] * x[m] for n, m in ((0, 1), (2, 3))]
    covariance = (scale / group / N) ** 2 * sum(torch.outer(p, p) for p in pairs)
    spread = found - found.mean(0)
    close(spread.T @ spread / len(found), covariance, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("tangent", [True, False])
def test_bus_credit_by_enumeration(monkeypatch, tangent):
    """Prop. 1(c): over all sign patterns the mean is P (a (1 - x^2 / C)) / rms, with the tangent
    probe or without, and the variance is the formula's."""
    C, V, like = 5, 7, dict(generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x_L, s, W = torch.randn(2, C, **like), torch.randn(2, V, **like), torch.randn(V, C, **like)
    model = SimpleNamespace(lm_head=SimpleNamespace(weight=W))
    x, rms, a = norm(x_L), x_L.square().mean(-1, keepdim=True).sqrt(), s @ W
    packet = Packet(torch.zeros(1, 2), "k", 0, 0, [], s=s, x_L=x_L, x_final=x)
    found = []
    for pattern in itertools.product((-1.0, 1.0), repeat=C):
        xi = torch.tensor(pattern, dtype=torch.float64).expand(2, C)
        monkeypatch.setattr(Packet, "signs", lambda *args: xi)
        rule = Rule(sigma=1e-6, tangent=tangent, project=False)
        found.append(wm.bus_credit(model, packet, rule, live))
    found = torch.stack(found)
    close(found.mean(0), a * (1 - x**2 / C) / rms, rtol=1e-5, atol=1e-5)
    variance = a**2 * x**2 * (C - x**2) / (C * rms) ** 2
    close(found.var(0, unbiased=False), variance, rtol=1e-4, atol=1e-5)
    u = wm.bus_credit(model, packet, Rule(sigma=1e-6, tangent=tangent), live)
    assert (u * x).sum(-1).abs().max() < 1e-9


def test_monte_carlo_mean_is_the_projected_exact_credit():
    model, (idx, targets), total, K = grown(), batch(), 0.0, 400
    for k in range(K):
        packet, *_ = forward(model, idx, targets, f"probe {k}")
        total = total + wm.bus_credit(model, packet, Rule(sigma=1e-5), live) / K
    x, rms = packet.x_final, packet.x_L.square().mean(-1, keepdim=True).sqrt()
    slope = (packet.s @ model.lm_head.weight) * (1 - x**2 / x.size(1)) / rms
    expect = wm.tangent(slope, x)
    _, bus = exact(model, idx, targets)
    assert cosine(total, expect) > 0.99 and cosine(expect, bus) > 0.97
    close(total, expect, rtol=0, atol=6 * expect.abs().max().item() / K**0.5)


@pytest.fixture(scope="module")
def oracle():
    """A grown model, the exact gradients of a batch, and its packet with the exact bus credit."""
    model, (idx, targets) = grown(qk_scale="head"), batch()
    grads, bus = exact(model, idx, targets)
    packet, *_ = forward(model, idx, targets, "oracle")
    packet.bus = bus
    return model, grads, packet


def direct(model, packet, i, part):
    """{name: gradient} of -<bus, gamma_i * what a sublayer writes> / N, along the skip path."""
    gamma, _ = wm.skip_gains(model)
    layer, block, T = packet.layers[i], model.blocks[i], packet.idx.size(1)
    model.requires_grad_(True)
    if part == "ffn":
        out = block.ffn(layer["mlp_in"])
    else:
        ve = model.value_embeds[str(i)](packet.idx) if "gate" in layer else None
        mask = model._masks(T, "cpu")[block.attn.window]
        out = block.attn(layer["attn_in"], ve, model.cos[:T], model.sin[:T], mask)
    loss = -(out.flatten(0, 1) * packet.bus).sum() * gamma[i] / packet.tokens
    return gradients(model, loss)[0]


def test_stage_1_is_exact_given_its_receiver(oracle):
    """One token per stream: what stage 1 trains, and c_proj, equal autograd along the skip path."""
    model, grads, packet = oracle
    got = stages(model, packet, Rule(sigma=1e-6, head_temp=True))
    parts = ("ffn.c_fc.weight", "ffn.c_proj.weight", "attn.c_v.weight", "attn.c_proj.weight",
             "attn.q_log")
    for i in range(3):
        want = {**direct(model, packet, i, "ffn"), **direct(model, packet, i, "attn")}
        tables = [f"value_embeds.{i}.weight"] if i % 2 == 0 else []
        for name in [f"blocks.{i}.{part}" for part in parts] + tables:
            close(got[name], want[name], rtol=1e-4, atol=1e-7, msg=lambda m: f"{name}: {m}")
    # nothing above the last layer's feed-forward sublayer
    fc, proj = "blocks.2.ffn.c_fc.weight", "blocks.2.ffn.c_proj.weight"
    close(got[fc], grads[fc], rtol=1e-4, atol=1e-7)
    close(got[proj], grads[proj], rtol=1e-9, atol=1e-12)


def test_filtered_trace_as_the_paper_forms_it(oracle):
    """sum over tokens of credit x (attention-filtered input), formed whole, is what stage 1 has."""
    model, _, packet = oracle
    got = stages(model, packet, Rule())
    for i, block in enumerate(model.blocks):
        layer = packet.layers[i]
        A, (B, T, H, D) = wm.attention_map(layer, block.attn.window), layer["q"].shape
        close(torch.einsum("bhts,bshd->bthd", A, layer["v"]).flatten(2), layer["y"])
        xbar = torch.einsum("bhts,bsc->bthc", A, layer["attn_in"])
        gamma = wm.skip_gains(model)[0][i]
        credit = (gamma * packet.bus @ block.attn.c_proj.weight).view(B, T, H, D)
        want = -torch.einsum("bthd,bthc->hdc", credit, xbar).reshape(H * D, -1) / (B * T)
        close(got[f"blocks.{i}.attn.c_v.weight"], want)
    unfiltered = stages(model, packet, Rule(filtered_v=False))
    want = -(credit.reshape(B * T, -1).T @ layer["attn_in"].flatten(0, 1)) / (B * T)
    close(unfiltered["blocks.2.attn.c_v.weight"], want)


def test_query_and_key_credit_in_the_mean():
    """Over many probes q's credit, and k's at gamma 1, point along autograd's; not at gamma 0."""
    model, (idx, targets) = grown(n_layer=1, window_pattern="L"), batch(rows=1, T=6)
    packet, *_ = forward(model, idx, targets, "qk")
    packet.bus = exact(model, idx, targets)[1]
    model.resid_lambdas.fill_(1.0)
    want = direct(model, packet, 0, "attn")

    def found(**kw):
        got = stages(model, packet, Rule(sigma=1e-5, active="qk", probes=400, **kw))
        names = [f"blocks.0.attn.c_{which}.weight" for which in "qk"]
        return [cosine(got[name], want[name]).item() for name in names]
    q, k = found(gamma_k=1.0)
    assert q > 0.9 and k > 0.85
    assert found(gamma_k=0.0)[1] < 0.6
    assert found(gamma_k=1.0, qk_probe="coupled")[0] > 0.85


@pytest.mark.parametrize("kw", [dict(active="qk"), dict(active="qk", qk_probe="coupled"),
                                dict(head_temp=True)], ids=str)
def test_rounded_packets_keep_the_credit_of_q_and_k(kw):
    """A bfloat16 packet's pseudo-gradients are close to the unrounded one's: a displacement is
    taken between outputs of the same precision."""
    model, found = grown(qk_scale="head" if "head_temp" in kw else "none"), []
    for dtype in ("float32", "bfloat16"):
        rule = Rule(packet_dtype=dtype, **kw)
        packet = with_bus(model, forward(model, *batch(), "b")[0], rule)
        packet.stow(rule, Pinned())
        found.append(stage1(model, packet, rule, live))
    for name in found[0]:
        assert cosine(found[1][name], found[0][name]) > 0.999, name


def test_wte_credit_in_the_mean():
    model, (idx, targets), total, K = grown(), batch(), 0.0, 400
    rule, gen = Rule(sigma=1e-5, center=False), torch.Generator().manual_seed(1)
    bus = torch.randn(33, 32, generator=gen, dtype=torch.float64)
    for k in range(K):
        packet, *_ = forward(model, idx, targets, f"wte {k}")
        packet.bus = bus
        total = total + stage2(model, packet, rule, live)["wte.weight"] / K
    w = model.wte.weight.clone().requires_grad_(True)
    x0 = norm(F.embedding(idx, w)).flatten(0, 1)
    (-(wm.skip_gains(model)[1] * x0 * bus).sum() / 33).backward()
    assert cosine(total, w.grad) > 0.98
    assert 0.9 < (total.norm() / w.grad.norm()).item() < 1.1


def test_future_sum_is_the_loop():
    R = torch.randn(2, 7, 3, dtype=torch.float64)
    for gamma, window in ((0.0, 7), (0.85, 7), (1.0, 7), (0.5, 2)):
        want = torch.zeros_like(R)
        for s in range(7):
            for tau in range(s, min(7, s + window + 1)):
                want[:, s] += gamma ** (tau - s) * R[:, tau]
        close(wm.future_sum(R, gamma, window), want)


def test_streams():
    """A stream's reward is the mean over its tokens; scale_factor M_g undoes the division."""
    model = grown()
    packet, *_ = forward(model, *batch(T=12), "s")
    rule = Rule(streams=9, project=False)
    xi, dx = wm.bus_probe(packet, rule)
    reward = (packet.s @ model.lm_head.weight * dx).view(9, 4, -1).mean(1)
    want = reward.repeat_interleave(4, 0) * xi / rule.sigma
    close(wm.bus_credit(model, packet, rule, live), want)
    scaled = dataclasses.replace(rule, scale_factor=4.0)
    close(wm.bus_credit(model, packet, scaled, live), 4 * want)
    with pytest.raises(UserError, match="does not divide"):
        wm.bus_credit(model, packet, Rule(streams=7), live)


def test_sr_lnp_and_sr_np_find_the_direction():
    """With many draws both point along the exact gradient where their surrogates allow it."""
    model, (idx, targets) = grown(n_layer=2), batch(rows=1, T=5)
    grads, _ = exact(model, idx, targets)
    packet, *_ = forward(model, idx, targets, "np")
    lnp = wm.sr_lnp(model, packet, targets, Rule(sigma=1e-4, draws=500))
    snp = wm.sr_np(model, packet, targets, Rule(sigma=1e-4, draws=200))
    for part, least in (("c_proj", 0.95), ("c_fc", 0.85)):
        name = f"blocks.1.ffn.{part}.weight"
        assert cosine(lnp[name], grads[name]) > least, name
        assert cosine(snp[name], grads[name]) > least - 0.15, name
    for name in ("blocks.0.ffn.c_proj.weight", "wte.weight"):   # sr_np sees the layers above
        assert cosine(snp[name], grads[name]) > 0.5
