"""model.py, its parts: positions, fast weights, experts, dropout, gates; loss.py."""
import copy
import math

import pytest
import torch
import torch.nn.functional as F

import model as model_file
from loss import capped_logits, chunked_loss, plain_loss, update_averages_
from model import (BALANCE_COEFFICIENT, GPT, NORM, Highway, RMSNorm, alibi_bias, alibi_slopes,
                   attend, drop, norm)
from reference_model import FAST, NOPE, double, modern, shaken, tokens


def tiny(**kw):
    return shaken(modern(**kw))


# ---- positions ----

def test_alibi_slopes_and_bias():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    # n = 4, then every second of n = 8
    assert alibi_slopes(6).tolist() == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    age = torch.arange(5)[:, None] - torch.arange(5)
    hard = alibi_bias("hard_alibi", 6, age)
    for h in range(6):
        seen = (hard[h, 4] == 0).sum()
        assert seen == (h + 1 if h < 3 else 5) and set(hard[h, 4].tolist()) <= {0.0, -math.inf}
    assert alibi_bias("alibi", 6, age)[1, 4, 1] == -3 / 16


def test_alibi_respects_windows():
    masks = tiny(pos="alibi", window_pattern="S")._masks(11, "cpu")
    assert masks[5][0, 10].isinf().tolist() == [True] * 5 + [False] * 6   # T/2 and itself
    assert masks[11][0, 10].isfinite().all()   # the last layer is long


# ---- fast weights ----

@pytest.mark.parametrize("attn", FAST)
@pytest.mark.parametrize("norm_", ["rms", "layer"])
def test_chunked_and_recurrent_models_agree_in_loss_and_every_gradient(attn, norm_):
    grads = []
    for impl in ("chunk", "recurrent"):
        model = double(tiny(attn=attn, fast_weight_impl=impl, norm=norm_, **NOPE))
        loss = model(tokens(3, 11), tokens(3, 11, seed=4))
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        grads.append({"loss": loss.detach(), **found})
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)


# ---- experts ----

def test_moe_balance_loss_by_hand_and_only_in_training():
    model, idx, y = double(tiny(ffn="moe", moe_experts=3, moe_top_k=2)), tokens(), tokens(seed=4)
    plain, trace = model.eval()(idx, y), {}
    model.train()
    total = model(idx, y, trace=trace)
    assert model.blocks[0].ffn.balance is None   # nothing holds the graph
    by_hand = 0.0
    for layer in trace["layers"]:
        p, chosen = layer["router"].flatten(0, 1), layer["chosen"].flatten(0, 1).tolist()
        for e in range(3):
            share = sum(e in row for row in chosen) / (2 * len(chosen))
            by_hand += 3 * share * p[:, e].mean()
    want = plain + BALANCE_COEFFICIENT * by_hand
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
    each = model(idx, y, reduction="none").mean().detach()
    assert torch.equal(each, model.eval()(idx, y, reduction="none").mean())
    whole = model.train()(idx, y, reduction="sum")
    torch.testing.assert_close(whole, plain * y.numel(), rtol=1e-12, atol=0)


def test_balance_loss_is_one_for_even_routing_and_reaches_the_router():
    model = GPT(modern(ffn="moe")).init_weights(1)
    with torch.no_grad():
        for block in model.blocks:   # probabilities 1/E: E sum_e f_e / E = 1 whatever is chosen
            block.ffn.router.weight.zero_()
    idx, y = tokens(), tokens(seed=4)
    assert abs(model.train()(idx, y).item() - model.eval()(idx, y).item() - 2 * 0.01) < 1e-6
    ffn = tiny(ffn="moe").blocks[0].ffn
    ffn(torch.randn(2, 5, 24))
    ffn.balance.backward()
    assert ffn.router.weight.grad.abs().sum() > 0 and ffn.c_fc.weight.grad is None


def test_frozen_router_gets_no_gradient_and_no_balance_loss():
    model, idx, y = tiny(ffn="moe", moe_router="frozen"), tokens(), tokens(seed=4)
    loss = model.train()(idx, y)
    loss.backward()
    assert torch.equal(loss, model.eval()(idx, y))
    start = GPT(modern(ffn="moe")).init_weights(1)
    frozen = GPT(modern(ffn="moe", moe_router="frozen")).init_weights(1)
    for i, block in enumerate(model.blocks):
        assert block.ffn.router.weight.grad is None
        assert block.ffn.c_fc.weight.grad.abs().sum() > 0
        a, b = (m.blocks[i].ffn.router.weight for m in (start, frozen))
        assert torch.equal(a, b) and a.abs().sum() > 0


def test_one_expert_is_the_dense_layer_to_the_bit():
    dense = GPT(modern(ffn="swiglu")).init_weights(1)
    one = GPT(modern(ffn="moe", moe_experts=1)).init_weights(1)
    idx, y = tokens(), tokens(seed=4)
    assert torch.equal(dense.eval()(idx, y), one.eval()(idx, y))
    a, b = dense.train()(idx, y), one.train()(idx, y)
    # the balance loss of one expert is 1 in each layer
    torch.testing.assert_close(b - a, torch.tensor(2 * 0.01), rtol=0, atol=1e-6)
    a.backward(), b.backward()
    for name, p in dense.named_parameters():
        assert torch.equal(p.grad, one.get_parameter(name).grad.view(p.shape)), name


def test_split_experts_split_exactly():
    experts = GPT(modern(ffn="moe", moe_expert_hidden="split", moe_experts=8)).init_weights(1)
    split, dense = experts.blocks[0].ffn, GPT(modern()).blocks[0].ffn
    for name in ("c_fc", "c_gate", "c_proj"):
        assert getattr(split, name).weight.numel() == getattr(dense, name).weight.numel()
    assert not torch.equal(split.c_fc.weight[0], split.c_fc.weight[1])


def test_an_expert_nobody_chose_has_zero_gradient():
    ffn = tiny(ffn="moe").blocks[0].ffn
    with torch.no_grad():
        ffn.router.weight.zero_()
        ffn.router.weight[2] = 1.0
    ffn(torch.rand(2, 5, 24) + 0.1).sum().backward()
    used = ffn.c_fc.weight.grad.flatten(1).abs().sum(1) > 0
    assert used.tolist() == [False, False, True, False]


def mean_by_expert(trace, layer, nats, y):
    """{expert: mean nats of its tokens that count}."""
    sums = {}
    chosen = trace["layers"][layer]["chosen"].flatten(0, 1).tolist()
    for experts, loss, target in zip(chosen, nats.tolist(), y.flatten().tolist()):
        for e in experts if target >= 0 else ():
            sums.setdefault(e, []).append(loss)
    return {e: sum(losses) / len(losses) for e, losses in sums.items()}


def test_router_progress_averages_and_bias_by_hand():
    model = tiny(ffn="moe", router_progress=0.5, moe_top_k=2)
    by_hand, idx = [{}, {}], tokens(3, 7)
    for step in range(4):
        y, trace = tokens(3, 7, seed=step), {}
        y[0, :3] = -1
        nats = model.eval()(idx, y, reduction="none").flatten()
        model.train()(idx, y, trace=trace, reduction=("mean", "none")[step % 2])
        for layer, (known, block) in enumerate(zip(by_hand, model.blocks)):
            for e, m in mean_by_expert(trace, layer, nats, y).items():
                fast, slow = known.get(e, (m, m))
                known[e] = 0.9 * fast + 0.1 * m, 0.99 * slow + 0.01 * m
            falling = torch.zeros(4)
            for e, (fast, slow) in known.items():
                falling[e] = slow - fast
                got, want = block.ffn.averages[:2, e], torch.tensor([fast, slow])
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            z = (falling - falling.mean()) / falling.std(correction=0).clamp_min(1e-8)
            torch.testing.assert_close(block.ffn.bias(), 0.5 * z, rtol=1e-2, atol=1e-2)
    before = model.eval()(idx)
    assert torch.equal(before, model(idx))   # no update in eval mode
    for block in model.blocks:
        block.ffn.averages.zero_()
    assert not torch.equal(before, model(idx))


def test_averages_start_at_the_first_mean_and_move_where_something_was_seen():
    fast, slow = torch.tensor([[0.0, 4.0, 4.0], [0.0, 6.0, 6.0]]).double()
    here, first = torch.tensor([[True, True, False], [True, False, False]])
    update_averages_(fast, slow, torch.tensor([5.0, 2.0, 9.0]).double(), here, first)
    torch.testing.assert_close(fast, torch.tensor([5.0, 3.8, 4.0]).double())
    torch.testing.assert_close(slow, torch.tensor([5.0, 5.96, 6.0]).double())


def test_router_progress_favours_the_expert_whose_loss_falls():
    ffn = tiny(ffn="moe", router_progress=2.0).blocks[0].ffn
    ffn.chosen = torch.arange(4).view(4, 1)
    for step in range(30):
        nats = torch.tensor([[5.0 - 0.1 * step, 5.0, 5.0, 5.0 + 0.1 * step]])
        ffn.observe(nats, torch.ones(1, 4, dtype=torch.bool))
    bias = ffn.bias()
    assert bias[0] > bias[1] > bias[3]
    assert abs(bias.mean()) < 1e-6 and abs(bias.std(correction=0) - 2.0) < 1e-4


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


def test_dropout_reaches_embedding_attention_feed_forward_and_the_probabilities():
    model = tiny(dropout=0.4, history=True).train()
    sites = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert list(sites) == ["blocks.0.attn.drop", "blocks.0.ffn.drop", "blocks.1.attn.drop",
                           "blocks.1.ffn.drop", "drop", "history.drop"]
    for block in model.blocks:
        block.attn.p_drop = 0.0
    for name in sites:   # each one alone changes the output
        for other, m in sites.items():
            m.p = 0.4 if other == name else 0.0
        assert not torch.equal(model(tokens()), model(tokens())), name
    attn, trace = model.blocks[0].attn, {}
    attn.drop.p, attn.p_drop = 0.0, 0.4
    attn(torch.randn(64, 11, 24), None, model.cos, model.sin, None, trace)
    # token 0 has one probability: dropped, or 1 / 0.6
    first = trace["y"].view(64, 11, 3, 8)[:, 0] / trace["v"][:, 0]
    kept = (first.mean(-1) - 1 / 0.6).abs() < 1e-4
    assert ((first.abs().amax(-1) < 1e-6) | kept).all() and 0.45 < kept.float().mean() < 0.75


@pytest.mark.parametrize("p", [0.2, 0.5, 0.001, 0.999])
def test_dropout_drops_and_rescales(p):
    torch.manual_seed(3)
    x = torch.ones(1001, 1003, dtype=torch.float64, requires_grad=True)
    y = drop(x, p)
    y.sum().backward()
    kept, n, level = y.detach() > 0, x.numel(), y.detach().max().item()
    assert abs((~kept).double().mean().item() - p) < 5 * (p * (1 - p) / n) ** 0.5 + 2**-17
    assert torch.equal(x.grad, y.detach()) and torch.equal(y.detach(), level * kept.double())
    assert abs(level * (1 - p) - 1) < 2**-16 / (1 - p)
    z = (kept.double() - (1 - p)).flatten() / (p * (1 - p)) ** 0.5
    for lag in (1, 2, 3, 4, 8, 1003):   # elements that share a draw know nothing of each other
        assert abs((z[lag:] * z[:-lag]).mean().item()) < 5 / n**0.5
    assert not torch.equal(drop(x, p), y) and torch.equal(drop(x, 0.0), x)


@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
def test_attention_with_dropout_is_attention(kind, monkeypatch):
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 7, 5, generator=gen, dtype=torch.float64) for _ in range(3))
    past = torch.ones(7, 7, dtype=torch.bool).tril()
    bias = torch.randn(3, 7, 7, generator=gen, dtype=torch.float64).masked_fill(~past, -torch.inf)
    mask = {"causal": None, "bool": past.triu(-2), "float": bias}[kind]
    want = attend(q, k, v, mask)
    monkeypatch.setattr(model_file, "drop", lambda z, p: z)
    torch.testing.assert_close(attend(q, k, v, mask, 0.5), want, rtol=1e-12, atol=1e-12)


# ---- norms, gates, the tied head ----

def test_norms_by_their_formulas():
    x, rms = torch.randn(3, 7, 24), NORM["rms"](modern(norm="rms", norm_eps=0.5))
    assert torch.equal(RMSNorm(modern())(x), norm(x))   # weights of 1 are neutral
    torch.testing.assert_close(NORM["layer"](modern())(x), F.layer_norm(x, (24,)))
    torch.testing.assert_close(rms(x), x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt())
    assert torch.equal(norm(x), norm(x, 2.0**-23)) and norm(x.bfloat16()).dtype == torch.bfloat16


def test_a_shut_highway_carries_and_an_open_one_replaces():
    x, y = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    for kind, width in (("highway", 24), ("highway_scalar", 1)):
        gate = Highway(modern(residual=kind))
        assert gate.gate.weight.shape == (width, 24)
        with torch.no_grad():
            gate.gate.weight.zero_()
            for bias, want in ((-200.0, x), (200.0, y), (0.0, (x + y) / 2)):
                gate.gate.bias.fill_(bias)
                torch.testing.assert_close(gate(x, y), want)


def test_tied_head_is_one_parameter_and_gets_both_gradients():
    model, idx, y = double(tiny()), tokens(), tokens(seed=4)
    model(idx, y).backward()
    apart = double(tiny(tie=False))
    apart.load_state_dict(copy.deepcopy(model.state_dict()))
    apart(idx, y).backward()
    want = apart.wte.weight.grad + apart.lm_head.weight.grad
    torch.testing.assert_close(model.wte.weight.grad, want)
    assert len([n for n, _, _ in model.roles() if n in ("wte.weight", "lm_head.weight")]) == 1
    model.load_state_dict(double(shaken(modern(), seed=2)).state_dict())
    assert model.lm_head.weight is model.wte.weight


# ---- the loss ----

@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape, chunk", [((3, 17), 8), ((51,), 51), ((2, 5), 64), ((1, 1), 1)])
def test_chunked_loss_equals_the_plain_path(softcap, reduction, shape, chunk):
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(*shape, 12, generator=gen, dtype=torch.float64).requires_grad_()
    w = (3 * torch.randn(29, 12, generator=gen, dtype=torch.float64)).requires_grad_()
    y = torch.randint(-1, 29, shape, generator=gen)
    y.view(-1)[0] = 4
    found = []
    for loss in (plain_loss(x, w, y, softcap, reduction),
                 chunked_loss(x, w, y, softcap, reduction, chunk=chunk)):
        gen.manual_seed(8)
        up = torch.randn(loss.shape, generator=gen, dtype=torch.float64)
        found.append((loss, *torch.autograd.grad(loss, (x, w), up)))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_chunked_loss_without_gradients_and_with_one_side_frozen():
    x, w, y = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 8, -1, 3, 2, 2])
    a, b = chunked_loss(x, w, y, 15.0, "none", 4), plain_loss(x, w, y, 15.0, "none")
    torch.testing.assert_close(a, b)
    for leaf in (x, w):
        leaf.requires_grad_()
        (got,) = torch.autograd.grad(chunked_loss(x, w, y, 15.0, chunk=4), leaf)
        (want,) = torch.autograd.grad(plain_loss(x, w, y, 15.0), leaf)
        torch.testing.assert_close(got, want)
        leaf.requires_grad_(False)


def test_logits_are_capped_in_float32_even_from_bfloat16():
    logits = capped_logits(torch.randn(3, 8).bfloat16() * 100, torch.randn(5, 8) * 100, 15.0)
    assert logits.dtype == torch.float32 and logits.abs().max() <= 15
