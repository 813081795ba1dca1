"""The ablation model: counts, every axis against a token-by-token float64 reference, MoE, dropout, causality, all pairs of flags."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import model as model_module
from common import UserError
from model import (ATTN, BALANCE_COEFFICIENT, CHOICES, FFN, GPT, NORM, RESID, GPTConfig, Highway, RMSNorm, alibi_bias, alibi_slopes, attend, drop, norm,
                   rotary_tables)
from optim import MuonAdamW, native_groups, set_schedule

FAST = tuple(name for name in ATTN if name != "softmax")
NOPE = dict(pos="none")


def config(**kw):
    return GPTConfig.modern(**{**dict(n_embd=24, n_head=3, n_layer=2, sequence_len=11, vocab_size=37, dropout=0.0), **kw})


def tiny(shake=0.3, seed=1, double=False, **kw):
    """A small model whose tensors are moved, so that every part acts."""
    model = GPT(config(**kw)).init_weights(seed)
    gen = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _, _, p in model.roles():
            p.add_(shake * torch.randn(p.shape, generator=gen))
    if double:
        model = model.double()
        if model.cos is not None:
            angle = torch.outer(torch.arange(11).double(), 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8))
            model.cos, model.sin = angle.cos(), angle.sin()
    return model


def tokens(B=2, T=9, V=37, seed=3):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


# ---- counts ----

def count(**kw):
    with torch.device("meta"):
        return GPT(GPTConfig.modern(**kw)).num_params()["total"]


GDS = dict(attn="gated_delta_scalar", sequence_len=512)
BASELINE = dict(norm="layer", pos="learned", ffn="relu", tie=False, bias=True)


@pytest.mark.parametrize("kw, want", [
    ({}, 3_344_064), (dict(n_embd=384, n_layer=6), 13_767_552), (dict(n_layer=32), 15_741_120), (dict(GDS, pos="learned"), 3_451_632),
    (dict(GDS, **NOPE, ffn_hidden=555), 3_452_400), (dict(residual="highway"), 3_344_064 + 296_448),
    (dict(residual="highway_scalar"), 3_344_064 + 1_544), (dict(attn="delta", **NOPE), 3_344_064 + 4_632),
    (dict(attn="gated_delta", **NOPE), 3_344_064 + 4_632 + 148_224), (dict(attn="gated_delta_scalar", **NOPE), 3_344_064 + 2 * 4_632),
    (dict(attn="linear", **NOPE), 3_344_064), (dict(GDS, **NOPE), 3_353_328), (dict(norm="rms"), 3_344_064 - 9 * 192),
    (dict(pos="alibi"), 3_344_064), (dict(pos="hard_alibi"), 3_344_064), (dict(tie=False), 3_344_064 + 8192 * 192),
])
def test_parameter_counts_to_the_digit(kw, want):
    assert count(**kw) == want


@pytest.mark.parametrize("kw, millions", [(BASELINE, 4.95), (dict(residual="highway_scalar"), 3.35), (dict(ffn="moe"), 6.89),
                                          (dict(pos="learned"), 3.37), (dict(attn="delta", pos="learned"), 3.37),
                                          (dict(attn="gated_delta", pos="learned"), 3.52), (dict(attn="gated_delta", **NOPE), 3.50),
                                          (dict(attn="gated_delta_scalar", **NOPE), 3.35)])
def test_parameter_counts_to_two_decimals(kw, millions):
    assert round(count(**kw) / 1e6, 2) == millions


def test_matched_experts_have_the_parameters_of_the_dense_layer():
    for kw in (dict(), dict(moe_experts=16, moe_top_k=4)):
        n = kw.get("moe_experts", 4)
        assert count(ffn="moe", moe_expert_hidden="split", **kw) == count() + 4 * 192 * n   # the routers are all there is on top
    assert abs(count(ffn="moe", moe_expert_hidden="split") / count() - 1) < 0.005


# ---- every axis against the formulas, token by token ----

def reference_attention(cfg, P, pre, x):
    """y [T, C] of one row x [T, C]; P holds the tensors, pre the layer's prefix."""
    T, C = x.shape
    H, D = cfg.n_head, C // cfg.n_head
    lin = lambda name, v: P[f"{pre}attn.{name}.weight"] @ v + P.get(f"{pre}attn.{name}.bias", 0)
    q, k, v = ([lin(f"c_{n}", x[t]).view(H, D) for t in range(T)] for n in "qkv")
    rms = lambda z: z / (z.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()
    out = []
    if cfg.attn == "softmax":
        for t, z in itertools.product(range(T), (q, k)):
            if cfg.pos == "rope":
                turn = torch.polar(torch.ones(D // 2).double(), -t * 10_000.0 ** (-torch.arange(D // 2).double() * 2 / D))
                plane = torch.view_as_complex(torch.stack((z[t][:, :D // 2], z[t][:, D // 2:]), -1)) * turn
                z[t] = torch.cat((plane.real, plane.imag), -1)
            z[t] = rms(z[t]) if cfg.qk_norm else z[t]
        slopes = {1: [1 / 256], 3: [1 / 16, 1 / 256, 1 / 4]}.get(H)
        for t in range(T):
            y = []
            for h in range(H):
                seen = [s for s in range(t + 1) if not (cfg.pos == "hard_alibi" and h < H // 2 and t - s > h)]
                z = torch.stack([q[t][h] @ k[s][h] / D**0.5 - (slopes[h] * (t - s) if cfg.pos == "alibi" else 0) for s in seen])
                y.append(sum(w * v[s][h] for w, s in zip(z.softmax(0), seen)))
            out.append(torch.cat(y))
        return torch.stack(out)
    silu = lambda z: z / (1 + (-z).exp())
    for t in range(T):
        y = []
        for h in range(H):
            S, z = torch.zeros(D, D).double(), torch.zeros(D).double()
            for s in range(t + 1):
                key, val = k[s][h], v[s][h]
                if cfg.attn == "linear":
                    key = torch.where(key > 0, key + 1, key.exp())
                    S, z = S + torch.outer(val, key), z + key
                    continue
                key = silu(key) / silu(key).norm()
                if cfg.attn != "delta":
                    a = 1 / (1 + (-lin("c_decay", x[s])).exp())
                    S = S * (a[h] if cfg.attn == "gated_delta_scalar" else a.view(H, 1, D)[h])
                beta = 1 / (1 + (-lin("c_beta", x[s])[h]).exp())
                S = S + beta * torch.outer(val - S @ key, key)
            query = q[t][h]
            if cfg.attn == "linear":
                query = torch.where(query > 0, query + 1, query.exp())
                y.append(S @ query / (z @ query + 1e-6))
            else:
                y.append(S @ (silu(query) / silu(query).norm()))
        out.append(torch.cat(y))
    return torch.stack(out)


def reference_ffn(cfg, P, pre, x):
    """What the feed-forward layer makes of one token x [C]."""
    silu = lambda z: z / (1 + (-z).exp())
    def dense(e=...):
        lin = lambda name, v: P[f"{pre}ffn.{name}.weight"][e] @ v + (P[f"{pre}ffn.{name}.bias"][e] if cfg.bias else 0)
        a = lin("c_fc", x)
        a = a.clamp_min(0) if cfg.ffn == "relu" else a.clamp_min(0) ** 2 if cfg.ffn == "relu2" else silu(lin("c_gate", x)) * a
        return lin("c_proj", a)
    if cfg.ffn != "moe":
        return dense()
    p = (P[f"{pre}ffn.router.weight"] @ x).exp()
    p = p / p.sum()
    best = sorted(range(len(p)), key=lambda e: -p[e])[:cfg.moe_top_k]
    return sum(p[e] * dense(e) for e in best)


def reference_logits(model, idx):
    """The ablation model as the papers write it: one row and one token at a time, float64."""
    cfg, P, out = model.cfg, model.state_dict(), []
    def normed(name, v):
        if cfg.norm == "layer":
            return (v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt() * P[f"{name}.weight"] + P.get(f"{name}.bias", 0)
        return v / (v.square().mean() + torch.finfo(torch.float64).eps).sqrt() * P.get(f"{name}.weight", 1)
    def join(name, v, y):
        if cfg.residual == "plain":
            return v + y
        g = 1 / (1 + (-(P[f"{name}.gate.weight"] @ v + P[f"{name}.gate.bias"])).exp())
        return (1 - g) * v + g * y
    for row in idx.tolist():
        x = [P["wte.weight"][i] + (P["wpe.weight"][t] if cfg.pos == "learned" else 0) for t, i in enumerate(row)]
        for i in range(cfg.n_layer):
            pre = f"blocks.{i}."
            if cfg.history and i == cfg.n_layer // 2:
                bias = lambda name: P.get(f"history.{name}.bias", 0)
                h = [P["history.c_fc.weight"] @ normed("history.norm", v) + bias("c_fc") for v in x]
                x = [v + P["history.c_proj.weight"] @ (sum(h[:t + 1]) / (t + 1)) + bias("c_proj") for t, v in enumerate(x)]
            y = reference_attention(cfg, P, pre, torch.stack([normed(f"{pre}norm_attn", v) for v in x]))
            y = [P[f"{pre}attn.c_proj.weight"] @ v + P.get(f"{pre}attn.c_proj.bias", 0) for v in y]
            x = [join(f"{pre}mix_attn", v, y[t]) for t, v in enumerate(x)]
            x = [join(f"{pre}mix_ffn", v, reference_ffn(cfg, P, pre, normed(f"{pre}norm_ffn", v))) for v in x]
        out.append(torch.stack([P["lm_head.weight"] @ normed("norm", v) for v in x]))
    return torch.stack(out)


ARMS = [
    {}, BASELINE, dict(norm="rms"), dict(norm="layer"), dict(norm="layer", bias=True), dict(pos="learned"), NOPE, dict(pos="alibi"),
    dict(pos="hard_alibi"), dict(qk_norm=True), dict(ffn="relu"), dict(ffn="relu2"), dict(ffn_hidden=7), dict(tie=False), dict(bias=True),
    dict(residual="highway"), dict(residual="highway_scalar"), dict(history=True), dict(history=True, bias=True, n_layer=3),
    dict(n_head=1, n_embd=8, pos="alibi"),
    *(dict(attn=attn, pos=pos, bias=bias) for attn, (pos, bias) in itertools.product(FAST, (("none", False), ("learned", True)))),
    dict(ffn="moe"), dict(ffn="moe", moe_top_k=2, bias=True), dict(ffn="moe", moe_experts=5, moe_top_k=5),
    dict(ffn="moe", moe_experts=8, moe_top_k=3, moe_expert_hidden="split", moe_router="frozen"),
    dict(attn="gated_delta", ffn="moe", residual="highway", history=True, norm="layer", **NOPE),
]


@pytest.mark.parametrize("kw", ARMS, ids=lambda kw: "-".join(f"{v}" for v in kw.values()) or "modern")
def test_forward_equals_the_token_by_token_reference(kw):
    model, idx = tiny(double=True, **kw).eval(), tokens()
    with torch.no_grad():
        torch.testing.assert_close(model(idx), reference_logits(model, idx), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("attn", FAST)
@pytest.mark.parametrize("norm_", ["rms", "layer"])
def test_chunked_and_recurrent_models_agree_in_loss_and_every_gradient(attn, norm_):
    grads = []
    for impl in ("chunk", "recurrent"):
        model = tiny(double=True, attn=attn, fast_weight_impl=impl, norm=norm_, **NOPE)
        loss = model(tokens(3, 11), tokens(3, 11, seed=4))
        loss.backward()
        grads.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    assert grads[0].keys() == grads[1].keys()
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-8, atol=1e-10)


def test_alibi_slopes_and_bias():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(6).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]      # n = 4, then every second of n = 8
    age = torch.arange(5)[:, None] - torch.arange(5)
    hard = alibi_bias("hard_alibi", 6, age)
    for h in range(6):
        seen = (hard[h, 4] == 0).sum()
        assert seen == (h + 1 if h < 3 else 5) and set(hard[h, 4].tolist()) <= {0.0, -math.inf}
    assert alibi_bias("alibi", 6, age)[1, 4, 1] == -3 / 16


def test_alibi_respects_windows():
    kw = dict(pos="alibi", window_pattern="S", n_layer=2)
    model = tiny(**kw)
    assert model._masks(11, "cpu")[5][0, 10].isinf().tolist() == [True] * 5 + [False] * 6       # layer 0: the last T/2 and itself
    assert model._masks(11, "cpu")[11][0, 10].isfinite().all()                                  # the last layer is long


# ---- MoE ----

def test_moe_balance_loss_by_hand_and_only_in_training():
    kw = dict(ffn="moe", moe_experts=3, moe_top_k=2)
    model, idx, y = tiny(double=True, **kw), tokens(), tokens(seed=4)
    plain, trace = model.eval()(idx, y), {}
    model.train()
    total = model(idx, y, trace=trace)
    assert model.blocks[0].ffn.balance is None                        # nothing holds the graph
    by_hand = 0.0
    for layer in trace["layers"]:
        p, chosen = layer["router"].flatten(0, 1), layer["chosen"].flatten(0, 1)
        share = [sum(e in row for row in chosen.tolist()) / (2 * len(chosen)) for e in range(3)]
        by_hand += 3 * sum(share[e] * p[:, e].mean() for e in range(3))
    torch.testing.assert_close(total, plain + BALANCE_COEFFICIENT * by_hand, rtol=1e-12, atol=0)
    assert torch.equal(model(idx, y, reduction="none").mean().detach(), model.eval()(idx, y, reduction="none").mean())
    torch.testing.assert_close(model.train()(idx, y, reduction="sum"), plain * y.numel(), rtol=1e-12, atol=0)


def test_balance_loss_is_one_for_even_routing_and_reaches_the_router():
    model = tiny(ffn="moe", shake=0.0)
    with torch.no_grad():
        for block in model.blocks:
            block.ffn.router.weight.zero_()                            # probabilities 1/E: E sum_e f_e / E = 1 whatever is chosen
    idx, y = tokens(), tokens(seed=4)
    assert abs(model.train()(idx, y).item() - model.eval()(idx, y).item() - 2 * 0.01) < 1e-6
    ffn, x = tiny(ffn="moe").blocks[0].ffn, torch.randn(2, 5, 24)
    ffn(x)
    ffn.balance.backward()
    assert ffn.router.weight.grad.abs().sum() > 0 and ffn.c_fc.weight.grad is None


def test_frozen_router_gets_no_gradient_and_no_balance_loss():
    model, idx, y = tiny(ffn="moe", moe_router="frozen"), tokens(), tokens(seed=4)
    loss = model.train()(idx, y)
    loss.backward()
    assert torch.equal(loss, model.eval()(idx, y))
    for block in model.blocks:
        assert block.ffn.router.weight.grad is None and block.ffn.c_fc.weight.grad.abs().sum() > 0
    start = {k: v for k, v in GPT(config(ffn="moe")).init_weights(1).state_dict().items() if "router" in k}
    frozen = GPT(config(ffn="moe", moe_router="frozen")).init_weights(1).state_dict()
    assert start and all(torch.equal(frozen[k], v) and v.abs().sum() > 0 for k, v in start.items())


def test_one_expert_is_the_dense_layer_to_the_bit():
    dense, one = (GPT(config(ffn=ffn, **kw)).init_weights(1) for ffn, kw in (("swiglu", {}), ("moe", dict(moe_experts=1))))
    idx, y = tokens(), tokens(seed=4)
    assert torch.equal(dense.eval()(idx, y), one.eval()(idx, y))
    a, b = dense.train()(idx, y), one.train()(idx, y)
    torch.testing.assert_close(b - a, torch.tensor(2 * 0.01), rtol=0, atol=1e-6)    # the balance loss of one expert is 1 in each layer
    a.backward(), b.backward()
    for name, p in dense.named_parameters():
        assert torch.equal(p.grad, dict(one.named_parameters())[name].grad.view(p.shape)), name


def test_split_experts_split_exactly_and_are_used_where_they_win():
    model = GPT(config(ffn="moe", moe_expert_hidden="split", moe_experts=8)).init_weights(1)
    ffn, dense = model.blocks[0].ffn, GPT(config()).blocks[0].ffn
    for name in ("c_fc", "c_gate", "c_proj"):
        assert getattr(ffn, name).weight.numel() == getattr(dense, name).weight.numel()
    with pytest.raises(UserError, match="does not split"):
        config(ffn="moe", moe_expert_hidden="split", moe_experts=5)
    first = model.blocks[0].ffn.c_fc.weight
    assert not torch.equal(first[0], first[1])


def test_an_expert_nobody_chose_has_zero_gradient():
    ffn = tiny(ffn="moe").blocks[0].ffn
    with torch.no_grad():
        ffn.router.weight.zero_()
        ffn.router.weight[2] = 1.0
    ffn(torch.rand(2, 5, 24) + 0.1).sum().backward()
    used = ffn.c_fc.weight.grad.flatten(1).abs().sum(1) > 0
    assert used.tolist() == [False, False, True, False]


def test_router_progress_averages_and_bias_by_hand():
    model = tiny(ffn="moe", router_progress=0.5, moe_top_k=2)
    by_hand, idx = [{}, {}], tokens(3, 7)
    for step in range(4):
        y, trace = tokens(3, 7, seed=step), {}
        y[0, :3] = -1
        nats = model.eval()(idx, y, reduction="none").flatten()
        model.train()(idx, y, trace=trace, reduction=("mean", "none")[step % 2])
        for layer, (old, block) in enumerate(zip(by_hand, model.blocks)):
            chosen = trace["layers"][layer]["chosen"].flatten(0, 1)
            for e in range(4):
                mine = [n for n, c, t in zip(nats.tolist(), chosen.tolist(), y.flatten().tolist()) if e in c and t >= 0]
                if mine:
                    m = sum(mine) / len(mine)
                    fast, slow = old.get(e, (m, m))
                    old[e] = (0.9 * fast + 0.1 * m, 0.99 * slow + 0.01 * m) if e in old else (m, m)
            falling = torch.tensor([old[e][1] - old[e][0] if e in old else 0.0 for e in range(4)])
            z = (falling - falling.mean()) / falling.std(correction=0).clamp_min(1e-8)
            torch.testing.assert_close(block.ffn.bias(), 0.5 * z, rtol=1e-2, atol=1e-2)
            for e, (fast, slow) in old.items():
                torch.testing.assert_close(block.ffn.averages[:2, e], torch.tensor([fast, slow]), rtol=1e-5, atol=1e-6)
    before = model.eval()(idx)
    assert torch.equal(before, model(idx))                                           # no update in eval mode
    for block in model.blocks:
        block.ffn.averages.zero_()
    assert not torch.equal(before, model(idx))


def test_router_progress_favours_the_expert_whose_loss_falls():
    ffn = tiny(ffn="moe", router_progress=2.0).blocks[0].ffn
    ffn.chosen = torch.arange(4).view(4, 1)
    for step in range(30):
        ffn.observe(torch.tensor([[5.0 - 0.1 * step, 5.0, 5.0, 5.0 + 0.1 * step]]), torch.ones(1, 4, dtype=torch.bool))
    bias = ffn.bias()
    assert bias[0] > bias[1] > bias[3] and abs(bias.mean()) < 1e-6 and abs(bias.std(correction=0) - 2.0) < 1e-4


def test_router_progress_is_in_the_checkpoint_and_off_costs_nothing():
    assert any("averages" in k for k in tiny(ffn="moe", router_progress=0.5).state_dict())
    assert not any("averages" in k for k in tiny(ffn="moe").state_dict())


# ---- dropout ----

def test_dropout_acts_in_training_only():
    idx, y = tokens(), tokens(seed=4)
    for kw in ({}, dict(attn="delta", **NOPE), dict(ffn="moe"), dict(history=True)):
        off, on = tiny(**kw), tiny(dropout=0.5, **kw)
        assert torch.equal(off.eval()(idx, y), on.eval()(idx, y))
        on.train(), torch.manual_seed(0)
        a = on(idx, y)
        assert not torch.equal(a, on(idx, y)) and torch.equal(off.train()(idx, y), off(idx, y))
        torch.manual_seed(0)
        assert torch.equal(a, on(idx, y))


def test_dropout_reaches_embedding_attention_and_feed_forward_and_the_probabilities():
    model = tiny(dropout=0.4, history=True).train()
    sites = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)]
    assert sites == ["blocks.0.attn.drop", "blocks.0.ffn.drop", "blocks.1.attn.drop", "blocks.1.ffn.drop", "drop", "history.drop"]
    for site in sites:                                                               # each one alone changes the output
        for name, m in model.named_modules():
            if isinstance(m, torch.nn.Dropout):
                m.p = 0.4 if name == site else 0.0
        for block in model.blocks:
            block.attn.p_drop = 0.0
        assert not torch.equal(model(tokens()), model(tokens())), site
    attn, trace = model.blocks[0].attn, {}
    attn.drop.p, attn.p_drop = 0.0, 0.4
    attn(torch.randn(64, 11, 24), None, model.cos, model.sin, None, trace)
    first = trace["y"].view(64, 11, 3, 8)[:, 0] / trace["v"][:, 0]                   # token 0 has one probability: dropped, or 1 / 0.6
    kept = (first.mean(-1) - 1 / 0.6).abs() < 1e-4
    assert ((first.abs().amax(-1) < 1e-6) | kept).all() and 0.45 < kept.float().mean() < 0.75


# ---- causality, independence, flags ----

AXES = dict(
    attn=tuple(ATTN), norm=tuple(NORM), pos=CHOICES["pos"], ffn=tuple(FFN), residual=tuple(RESID), history=(False, True), tie=(True, False),
    bias=(False, True), ffn_hidden=(64, 8), qk_norm=(False, True), embed_norm=(False, True), x0_skip=(False, True),
    value_embeds=(False, True), oe_m=(0, 13), qk_scale=CHOICES["qk_scale"], out_skip=(False, True), window_pattern=("L", "SL"),
    init=("normal", "uniform"), softcap=(0.0, 15.0),
    moe_router=("learned", "frozen"), moe_expert_hidden=("full", "split"), moe_top_k=(1, 2), moe_experts=(4, 2), router_progress=(0.0, 0.5),
    fast_weight_impl=("chunk", "recurrent"), wte_route=tuple(CHOICES["wte_route"]))
NEEDS = {"moe_": dict(ffn="moe"), "router": dict(ffn="moe"), "fast": dict(attn="delta"), "wte_route": dict(embed_norm=True, x0_skip=True)}


def single(axis, value):
    """The flags of an arm with one axis moved, and what that value cannot be without."""
    kw = next((v for k, v in NEEDS.items() if axis.startswith(k) and value != AXES[axis][0]), {})
    kw = {**kw, axis: value}
    return {**kw, "pos": "none"} if kw.get("attn", "softmax") != "softmax" and "pos" not in kw else kw


def wide(**kw):
    return GPTConfig.modern(**{**dict(n_embd=32, n_head=4, n_layer=2, sequence_len=10, vocab_size=37, dropout=0.0, ffn_hidden=64), **kw})


SINGLES = [single(axis, value) for axis, values in AXES.items() for value in values]


@pytest.mark.parametrize("kw", SINGLES, ids=str)
def test_causal_and_rows_are_independent(kw):
    model = GPT(wide(**kw)).init_weights(1).double().eval()
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=gen, dtype=torch.float64))
        idx = tokens(3, 10)
        a, other = model(idx), idx.clone()
        other[0, 6] = (other[0, 6] + 1) % 37
        b, alone = model(other), model(idx[1:2, :7])
    torch.testing.assert_close(a[0, :6], b[0, :6], rtol=1e-10, atol=1e-12)
    assert (a[0, 6:] - b[0, 6:]).abs().amax(-1).min() > 1e-9                          # and what follows does depend on it
    torch.testing.assert_close(a[1:], b[1:], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(a[1:2, :7], alone, rtol=1e-10, atol=1e-12)             # nor on the rows beside it or the tokens after it


def test_every_axis_trains_under_the_oe_recipe():
    idx, y = tokens(2, 10), tokens(2, 10, seed=4)
    for kw in SINGLES:
        model = GPT(wide(n_layer=1, **kw)).init_weights(0)
        optimizer = MuonAdamW(native_groups(model.roles(), 32))
        losses = []
        for step in range(4):
            set_schedule(optimizer, step, 4, lr_scale=0.05)
            loss = model(idx, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], kw


@pytest.mark.parametrize("p", [0.2, 0.5, 0.001, 0.999])
def test_dropout_drops_and_rescales(p):
    torch.manual_seed(3)
    x = torch.ones(1001, 1003, dtype=torch.float64, requires_grad=True)
    y = drop(x, p)
    y.sum().backward()
    kept, n = y.detach() > 0, x.numel()
    sd = (p * (1 - p) / n) ** 0.5
    assert abs((~kept).double().mean().item() - p) < 5 * sd + 2**-17
    assert torch.equal(x.grad, y.detach()) and y.detach()[kept].unique().numel() == 1 and abs(y.detach().max().item() * (1 - p) - 1) < 2**-16 / (1 - p)
    z = (kept.double() - (1 - p)).flatten() / (p * (1 - p)) ** 0.5
    for lag in (1, 2, 3, 4, 8, 1003):                       # elements that share a draw know nothing of each other
        assert abs((z[lag:] * z[:-lag]).mean().item()) < 5 / n**0.5
    assert not torch.equal(drop(x, p), y) and torch.equal(drop(x, 0.0), x)


@pytest.mark.parametrize("mask", ["causal", "bool", "float"])
def test_attention_with_dropout_is_attention(mask, monkeypatch):
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 7, 5, generator=gen, dtype=torch.float64) for _ in range(3))
    m = {"causal": None, "bool": torch.ones(7, 7, dtype=torch.bool).tril().triu(-2),
         "float": torch.randn(3, 7, 7, generator=gen, dtype=torch.float64).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)}[mask]
    want = attend(q, k, v, m)
    monkeypatch.setattr(model_module, "drop", lambda z, p: z)
    torch.testing.assert_close(attend(q, k, v, m, 0.5), want, rtol=1e-12, atol=1e-12)


PAIRS = [(single(a, va), single(b, vb)) for a, b in itertools.combinations(AXES, 2) for va in AXES[a][1:] for vb in AXES[b][1:]]


def test_all_pairs_of_flags_train_or_are_refused_with_a_reason():
    idx, y, ran, refused = tokens(2, 10), tokens(2, 10, seed=4), 0, []
    for one, two in PAIRS:
        if any(one[k] != two[k] for k in one.keys() & two.keys()):
            continue                                                                  # they need different things
        try:
            cfg = wide(n_layer=1, **{**one, **two})
        except UserError as err:
            refused.append(str(err))
            continue
        model = GPT(cfg).init_weights(0)
        loss = model(idx, y)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert loss.isfinite() and all(g is not None and g.isfinite().all() for g in grads), (one, two)
        ran += 1
    reasons = ("has no logits for pos", "maps q and k itself", "no logits for qk_scale", "has no window", "scales rotary planes")
    assert ran > 550 and refused and all(any(r in err for r in reasons) for err in refused)


@pytest.mark.parametrize("kw, reason", [
    (dict(attn="delta"), "pos rope"), (dict(attn="linear", pos="alibi"), "pos alibi"),
    (dict(attn="gated_delta", pos="hard_alibi"), "hard_alibi"),
    (dict(attn="gated_delta_scalar", pos="none", qk_norm=True), "qk_norm"), (dict(attn="delta", pos="none", qk_scale="head"), "qk_scale"),
    (dict(attn="delta", pos="none", window_pattern="SL"), "window"), (dict(fast_weight_impl="recurrent"), "fast_weight_impl"),
    (dict(moe_experts=8), "need ffn moe"), (dict(router_progress=0.5), "need ffn moe"), (dict(ffn="moe", moe_top_k=5), "moe_top_k"),
    (dict(ffn="moe", moe_top_k=0), "moe_top_k"), (dict(ffn="moe", moe_experts=0), "moe_top_k"), (dict(dropout=1.0), "dropout"),
    (dict(dropout=-0.1), "dropout"), (dict(ffn_hidden=-1), "ffn_hidden"), (dict(n_head=5), "split"), (dict(n_embd=18, n_head=6), "even"),
    (dict(n_layer=0), "at least 1"), (dict(pos="sine"), "pos"), (dict(norm="batch"), "norm"), (dict(attn="mamba"), "attn"),
    (dict(residual="dense"), "residual"), (dict(pos="none", qk_scale="full"), "rotary"), (dict(wte_route="separate"), "embed_norm"),
    (dict(ffn="moe", moe_experts=1, router_progress=1.0), "two experts"), (dict(pos="none", rope_base=500.0), "rope_base"),
    (dict(pos="hard_alibi", n_head=1), "two heads"), (dict(init="xavier"), "init"),
])
def test_illegal_configs_are_refused_with_a_reason(kw, reason):
    with pytest.raises(UserError, match=reason):
        GPTConfig.modern(**kw)


@pytest.mark.parametrize("kw", [
    dict(residual="highway"), dict(residual="highway_scalar"), dict(ffn="swiglu"), dict(ffn="moe", moe_top_k=2), dict(pos="learned"),
    dict(pos="alibi", window_pattern="L"), dict(norm="rms_affine"), dict(history=True), dict(tie=True), dict(dropout=0.1),
    dict(attn="gated_delta", pos="none", qk_norm=False, window_pattern="L", oe_m=13, wte_route="separate", out_skip=True),
    dict(ffn="relu", bias=True, oe_m=13)])
def test_axes_work_on_the_backbone_and_leave_its_tensors_as_they_were(kw):
    make = lambda **kw: GPT(GPTConfig.backbone(2, 32, sequence_len=12, vocab_size=37, **kw)).init_weights(1)
    plain, model, idx, y = make(), make(**kw), tokens(2, 12), tokens(2, 12, seed=4)
    shared = plain.state_dict()
    same = {k: v for k, v in model.state_dict().items() if k in shared and v.shape == shared[k].shape}
    same.pop("lm_head.weight") if "tie" in kw else None
    assert len(same) > 10 and all(torch.equal(shared[k], v) for k, v in same.items())
    with torch.no_grad():
        for p in [*plain.parameters(), *model.parameters()]:
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    loss = model(idx, y)
    loss.backward()
    assert loss.isfinite() and loss != plain(idx, y)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_every_flag_acts_and_shared_tensors_start_equal():
    base = GPT(wide()).init_weights(1)
    shared, idx = base.state_dict(), tokens(2, 10)
    def moved(model):
        with torch.no_grad():
            for name, _, p in model.roles():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        return model
    plain = moved(GPT(wide()).init_weights(1)).eval()(idx)
    for kw in SINGLES:
        cfg = wide(**kw)
        fresh = GPT(cfg).init_weights(1)
        if cfg.init == "normal":
            state = fresh.state_dict()
            both = [k for k in shared if k in state and state[k].shape == shared[k].shape and k != "lm_head.weight"]
            assert len(both) > 9 and all(torch.equal(state[k], shared[k]) for k in both), kw
        if cfg != wide() and kw.keys() & {"fast_weight_impl", "router_progress"} == set():
            got = moved(fresh).eval()(idx)
            assert got.shape == plain.shape and not torch.equal(got, plain), kw       # router_progress acts from the second batch on


# ---- initial values, neutral settings, precision ----

def test_initial_values():
    model = GPT(GPTConfig.modern(residual="highway", attn="gated_delta", pos="learned", bias=True, norm="layer", tie=False)).init_weights(3)
    for name, role, p in model.roles():
        leaf = name.split(".")[-1]
        if "norm" in name:
            assert (p == (leaf == "weight")).all()
        elif leaf == "bias":
            assert (p == (-2 if ".gate." in name else 0)).all(), name
        else:
            assert abs(p.std() / 0.02 - 1) < 0.05 and abs(p.mean()) < 0.002, name    # no smaller for the projections: see NORMAL_STD
    tied = GPT(GPTConfig.modern()).init_weights(3)
    assert tied.lm_head.weight is tied.wte.weight and torch.equal(tied.wte.weight, model.wte.weight)
    assert {role for _, role, _ in model.roles()} == {"wte", "wpe", "lm_head", "matrix", "vector"}


@pytest.mark.parametrize("kw", [{}, BASELINE, dict(attn="gated_delta_scalar", pos="none", residual="highway_scalar"), dict(ffn="moe")])
def test_loss_at_init_is_log_vocabulary(kw):
    model = GPT(GPTConfig.modern(n_layer=2, sequence_len=32, **kw)).init_weights(5).eval()
    assert abs(model(tokens(4, 32, 8192), tokens(4, 32, 8192, seed=4)).item() - math.log(8192)) < 0.2


def test_norm_weights_of_one_are_neutral():
    x = torch.randn(3, 7, 24)
    assert torch.equal(RMSNorm(config())(x), norm(x))
    torch.testing.assert_close(NORM["layer"](config())(x), F.layer_norm(x, (24,)))


def test_a_shut_highway_carries_and_an_open_one_replaces():
    x, y = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    for kind, width in (("highway", 24), ("highway_scalar", 1)):
        gate = Highway(config(residual=kind))
        assert gate.gate.weight.shape == (width, 24)
        with torch.no_grad():
            gate.gate.weight.zero_()
            for bias, want in ((-200.0, x), (200.0, y), (0.0, (x + y) / 2)):
                gate.gate.bias.fill_(bias)
                torch.testing.assert_close(gate(x, y), want)


@pytest.mark.parametrize("kw", [{}, BASELINE, dict(ffn="moe", moe_top_k=2, router_progress=0.5), dict(residual="highway"),
                                dict(history=True), dict(pos="alibi"), *(dict(attn=attn, **NOPE) for attn in FAST)], ids=str)
def test_bfloat16_autocast_stays_close_to_float32(kw):
    model, idx, y = tiny(shake=0.1, **kw), tokens(), tokens(seed=4)
    want = model(idx, y)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, y)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss - want) < 0.05 and all(p.grad.isfinite().all() for p in model.parameters())


def test_trace_of_the_ablation_model():
    for kw in ({}, dict(attn="gated_delta", **NOPE), dict(ffn="moe"), dict(residual="highway", history=True)):
        model, trace = tiny(**kw).eval(), {}
        idx, y = tokens(), tokens(seed=4)
        loss = model(idx, y, trace=trace)
        layer = trace["layers"][1]
        assert layer["q"].shape == layer["k"].shape == (2, 9, 3, 8) and layer["y"].shape == (2, 9, 24)
        torch.testing.assert_close(loss, F.cross_entropy(trace["logits"].flatten(0, 1), y.flatten()))
        torch.testing.assert_close(trace["x_final"], model.norm(trace["x_L"]))
    assert torch.equal(trace["logits"], model(idx))


def test_tied_head_is_one_parameter_and_gets_both_gradients():
    model, idx, y = tiny(double=True), tokens(), tokens(seed=4)
    model(idx, y).backward()
    tied = model.wte.weight.grad
    apart = tiny(double=True, tie=False)
    with torch.no_grad():
        for name, p in apart.named_parameters():
            p.copy_(model.get_parameter(name))
    apart(idx, y).backward()
    torch.testing.assert_close(tied, apart.wte.weight.grad + apart.lm_head.weight.grad)
    assert len([n for n, _, _ in model.roles() if n in ("wte.weight", "lm_head.weight")]) == 1
    model.load_state_dict(tiny(double=True, seed=2).state_dict())
    assert model.lm_head.weight is model.wte.weight


def test_rotary_is_not_built_where_nobody_uses_it():
    assert tiny(**NOPE).cos is None and torch.equal(tiny().cos, rotary_tables(11, 8, 10_000.0)[0])
