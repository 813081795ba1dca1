"""model.py, the whole model: counts, every axis against a token-by-token reference, causality, what
flags do and do not touch, hashed tables, what is refused."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from common import UserError
from loss import chunked_loss
from model import (ATTN, CHOICES, FFN, GPT, RESID, ROUTE, GPTConfig, dense, gated, norm, oe_ids,
                   rotary_tables, rotate)
from optim import MuonAdamW, native_groups, set_schedule
from reference_model import (BASELINE, FAST, NOPE, Reference, backbone, double, modern, shaken,
                             tokens)


def tiny(**kw):
    """A shaken backbone of width 64."""
    return shaken(backbone(**kw), 0.05)


def fresh(cfg, seed=1):
    return GPT(cfg).init_weights(seed)


# ---- counts ----

def count(cfg):
    with torch.device("meta"):
        return GPT(cfg).num_params()


D6, D8, OE = 26_345_772, 50_332_176, 150_855


@pytest.mark.parametrize("kw, body, tables", [
    (dict(depth=6), D6, 0), (dict(depth=8), D8, 0), (dict(depth=6, head_dim=64), 26_346_060, 0),
    (dict(depth=6, oe_m=OE), D6, 57_929_472), (dict(depth=8, oe_m=OE), D8, 77_239_296),
    (dict(depth=6, qk_scale="full"), D6 + 1_152, 0),
    (dict(depth=8, qk_scale="masked"), D8 + 2_048, 0),
    (dict(depth=6, wte_route="separate"), D6 + 6, 0),
    (dict(depth=6, wte_route="shared", out_skip=True), D6 + 8, 0),
    (dict(depth=8, wte_route="shared"), D8 + 8, 0),
    (dict(depth=8, wte_route="separate", out_skip=True), D8 + 10, 0)])
def test_backbone_counts_to_the_digit(kw, body, tables):
    cfg = GPTConfig.backbone(**kw)
    assert count(cfg) == {"backbone": body, "oe": tables, "total": body + tables}


M, GDS = 3_344_064, dict(attn="gated_delta_scalar", sequence_len=512)


@pytest.mark.parametrize("kw, want", [
    ({}, M), (dict(n_embd=384, n_layer=6), 13_767_552), (dict(n_layer=32), 15_741_120),
    (dict(GDS, pos="learned"), 3_451_632), (dict(GDS, **NOPE, ffn_hidden=555), 3_452_400),
    (dict(residual="highway"), M + 296_448), (dict(residual="highway_scalar"), M + 1_544),
    (dict(attn="delta", **NOPE), M + 4_632), (dict(attn="linear", **NOPE), M),
    (dict(attn="gated_delta", **NOPE), M + 4_632 + 148_224),
    (dict(attn="gated_delta_scalar", **NOPE), M + 2 * 4_632), (dict(GDS, **NOPE), 3_353_328),
    (dict(norm="rms"), M - 9 * 192), (dict(pos="alibi"), M), (dict(pos="hard_alibi"), M),
    (dict(tie=False), M + 8192 * 192),
    # the routers are all there is on top of experts that share the dense width
    (dict(ffn="moe", moe_expert_hidden="split"), M + 4 * 192 * 4),
    (dict(ffn="moe", moe_expert_hidden="split", moe_experts=16, moe_top_k=4), M + 4 * 192 * 16)])
def test_ablation_counts_to_the_digit(kw, want):
    assert count(GPTConfig.modern(**kw))["total"] == want


@pytest.mark.parametrize("kw, millions", [
    (BASELINE, 4.95), (dict(ffn="moe"), 6.89), (dict(pos="learned"), 3.37),
    (dict(attn="delta", pos="learned"), 3.37), (dict(attn="gated_delta", pos="learned"), 3.52)])
def test_ablation_counts_as_printed(kw, millions):
    assert round(count(GPTConfig.modern(**kw))["total"] / 1e6, 2) == millions


# ---- the reference ----

ARMS = [
    {}, BASELINE, dict(norm="rms"), dict(norm="layer"), dict(norm="layer", bias=True),
    dict(pos="learned"), NOPE, dict(pos="alibi"), dict(pos="hard_alibi"), dict(qk_norm=True),
    dict(ffn="relu"), dict(ffn="relu2"), dict(ffn_hidden=7), dict(tie=False), dict(bias=True),
    dict(residual="highway"), dict(residual="highway_scalar"), dict(history=True),
    dict(history=True, bias=True, n_layer=3), dict(n_head=1, n_embd=8, pos="alibi"),
    *(dict(attn=attn, **NOPE) for attn in FAST),
    *(dict(attn=attn, pos="learned", bias=True) for attn in FAST),
    dict(ffn="moe"), dict(ffn="moe", moe_top_k=2, bias=True),
    dict(ffn="moe", moe_experts=5, moe_top_k=5),
    dict(ffn="moe", moe_experts=8, moe_top_k=3, moe_expert_hidden="split", moe_router="frozen"),
    dict(attn="gated_delta", ffn="moe", residual="highway", history=True, norm="layer", **NOPE)]
FULL = dict(oe_m=7, qk_scale="full", wte_route="separate", out_skip=True, window_pattern="S")
BACKBONES = [
    {}, FULL, dict(FULL, norm_eps=0.1, rope_base=500.0), dict(out_skip=True, norm_eps=0.0),
    dict(oe_m=7, qk_scale="masked", wte_route="shared"), dict(qk_scale="head", softcap=0.0)]


@pytest.mark.parametrize("cfg", [*(modern(**kw) for kw in ARMS),
                                 *(backbone(T=8, V=31, **kw) for kw in BACKBONES)])
def test_forward_equals_the_token_by_token_reference(cfg):
    model = double(shaken(cfg, 0.3 if cfg.n_embd == 24 else 0.05)).eval()
    idx = tokens(1, cfg.sequence_len - 2, cfg.vocab_size)
    with torch.no_grad():
        want = Reference(model).logits(idx)
        torch.testing.assert_close(model(idx).double(), want, rtol=1e-6, atol=1e-6)


# ---- causality, and what flags do ----

def test_the_backbone_is_causal_in_every_combination():
    idx = tokens(2, 12, 97)
    other = idx.clone()
    other[:, 7] = (other[:, 7] + 1) % 97
    axes = dict(oe_m=(0, 13), qk_scale=("none", "full", "masked"), wte_route=ROUTE,
                out_skip=(False, True), window_pattern=("SSSL", "L"))
    for values in itertools.product(*axes.values()):
        model = tiny(n_layer=2, **dict(zip(axes, values)))
        with torch.no_grad():
            a, b = model(idx), model(other)
        assert torch.equal(a[:, :7], b[:, :7]), values
        assert not torch.equal(a[:, 7], b[:, 7]), values


AXES = dict(
    attn=ATTN, norm=("rms_affine", "rms", "layer"), pos=CHOICES["pos"], bias=(False, True),
    ffn=("swiglu", "relu2", "relu", "moe"), residual=RESID, history=(False, True),
    ffn_hidden=(64, 8), qk_norm=(False, True), embed_norm=(False, True), x0_skip=(False, True),
    value_embeds=(False, True), oe_m=(0, 13), qk_scale=CHOICES["qk_scale"],
    out_skip=(False, True), window_pattern=("L", "SL"), init=("normal", "uniform"),
    softcap=(0.0, 15.0), moe_router=("learned", "frozen"), moe_expert_hidden=("full", "split"),
    moe_top_k=(1, 2), moe_experts=(4, 2), router_progress=(0.0, 0.5),
    fast_weight_impl=("chunk", "recurrent"), wte_route=ROUTE, tie=(True, False))
AXES = {name: tuple(values) for name, values in AXES.items()}
NEEDS = {"moe_": dict(ffn="moe"), "router": dict(ffn="moe"), "fast": dict(attn="delta"),
         "wte_route": dict(embed_norm=True, x0_skip=True)}


def single(axis, value):
    """The flags of an arm with one axis moved, and what that value cannot be without."""
    kw = {axis: value}
    for start, needed in NEEDS.items():
        if axis.startswith(start):
            kw.update(needed)
    if "attn" in kw:
        kw["pos"] = "none"
    return kw


def wide(**kw):
    sizes = dict(n_embd=32, n_head=4, n_layer=2, sequence_len=10, ffn_hidden=64)
    return modern(**{**sizes, **kw})


SINGLES = [single(axis, value) for axis, values in AXES.items() for value in values[1:]]


def test_every_axis_is_causal_and_keeps_rows_apart():
    idx = tokens(3, 10)
    other = idx.clone()
    other[0, 6] = (other[0, 6] + 1) % 37
    close = dict(rtol=1e-10, atol=1e-12)
    for kw in SINGLES:
        model = shaken(wide(**kw)).double().eval()
        with torch.no_grad():
            a, b, alone = model(idx), model(other), model(idx[1:2, :7])
        torch.testing.assert_close(a[0, :6], b[0, :6], **close)
        # what follows the changed token does depend on it
        assert (a[0, 6:] - b[0, 6:]).abs().amax(-1).min() > 1e-9, kw
        torch.testing.assert_close(a[1:], b[1:], **close)
        # neither the rows beside a row nor the tokens after one change it
        torch.testing.assert_close(a[1:2, :7], alone, **close)


def test_every_axis_trains_under_the_oe_recipe():
    idx, y = tokens(2, 10), tokens(2, 10, seed=4)
    for kw in SINGLES:
        model = fresh(wide(n_layer=1, **kw), 0)
        optimizer, losses = MuonAdamW(native_groups(model.roles(), 32)), []
        for step in range(3):
            set_schedule(optimizer, step, 3, lr_scale=0.05)
            losses.append(model(idx, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0], kw


def test_all_pairs_of_flags_train_or_are_refused_with_a_reason():
    idx, y, legal, refused = tokens(2, 10), tokens(2, 10, seed=4), [], []

    def join(one, two):
        """Both flags, or None where they need different things or are refused."""
        both = {**one, **two}
        try:
            wide(**both)
        except UserError as err:
            refused.append(str(err))
            return None
        return both if one.items() <= both.items() else None
    for a, b in itertools.combinations(AXES, 2):
        for va, vb in itertools.product(AXES[a][1:], AXES[b][1:]):
            legal += filter(None, [join(single(a, va), single(b, vb))])
    reasons = ("has no logits for pos", "maps q and k itself", "no logits for qk_scale",
               "has no window", "scales rotary planes")
    assert refused and all(any(r in err for r in reasons) for err in refused)
    assert len(legal) > 550
    while legal:   # a model has as many of the pairs as go together
        kw = {}
        for pair in legal:
            kw = join(kw, pair) or kw
        legal = [pair for pair in legal if not pair.items() <= kw.items()]
        model = fresh(wide(n_layer=1, **kw), 0)
        loss = model(idx, y)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        # a missing one would be None
        assert loss.isfinite() and sum(g.sum() for g in grads).isfinite(), kw


def test_every_flag_acts_and_shared_tensors_start_equal():
    for make, flags in (
            (wide, SINGLES),
            (backbone, [dict(oe_m=13), dict(qk_scale="full"), dict(qk_scale="masked"),
                        dict(wte_route="separate"), dict(wte_route="shared"),
                        dict(out_skip=True), dict(window_pattern="L"), dict(softcap=0.0),
                        dict(rope_base=500.0), dict(norm_eps=0.1)])):
        base = make()
        idx = tokens(2, 10, base.vocab_size)
        plain = moved(base).eval()(idx)
        for kw in flags:
            cfg = make(**kw)
            assert cfg.init != base.init or same_start(base, cfg), kw
            # the two forms agree, and router_progress acts from the second batch on
            if not kw.keys() & {"fast_weight_impl", "router_progress"}:
                got = moved(cfg).eval()(idx)
                assert got.shape == plain.shape and not torch.equal(got, plain), kw
        assert not torch.equal(fresh(base, 2).wte.weight, fresh(base).wte.weight)


def same_start(base, cfg):
    """Do the tensors that two models share start equal?"""
    start, state = fresh(base).state_dict(), fresh(cfg).state_dict()
    both = [k for k in start if k in state and state[k].shape == start[k].shape]
    if cfg.tie != base.tie:
        both.remove("lm_head.weight")
    return len(both) > 9 and all(torch.equal(state[k], start[k]) for k in both)


def moved(cfg, by=0.3, roles=()):
    """A model whose tensors (of some roles) are moved by their shapes: alike in all variants."""
    model = fresh(cfg)
    with torch.no_grad():
        for p in [p for _, role, p in model.roles() if role in roles or not roles]:
            p.add_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


@pytest.mark.parametrize("kw", [
    dict(oe_m=13), dict(qk_scale="full"), dict(wte_route="separate"),
    dict(wte_route="shared", out_skip=True), dict(norm_eps=2.0**-23)])
def test_parts_are_neutral_at_their_initial_values(kw):
    idx = tokens(2, 12, 97)
    plain, model = (moved(backbone(**flags), 0.05, ["matrix"]) for flags in ({}, kw))
    assert torch.equal(plain(idx), model(idx))


@pytest.mark.parametrize("kw", [
    dict(residual="highway"), dict(residual="highway_scalar"), dict(ffn="swiglu"),
    dict(ffn="moe", moe_top_k=2), dict(pos="learned"), dict(pos="alibi", window_pattern="L"),
    dict(norm="rms_affine"), dict(history=True), dict(tie=True), dict(dropout=0.1),
    dict(attn="gated_delta", pos="none", qk_norm=False, window_pattern="L", oe_m=13,
         wte_route="separate", out_skip=True),
    dict(ffn="relu", bias=True, oe_m=13)])
def test_axes_work_on_the_backbone_and_leave_its_tensors_as_they_were(kw):
    def make(**kw):
        return GPTConfig.backbone(2, 32, sequence_len=12, vocab_size=37, **kw)
    assert same_start(make(), make(**kw))
    model, idx, y = moved(make(**kw), 0.1), tokens(2, 12), tokens(2, 12, seed=4)
    loss = model(idx, y)
    loss.backward()
    assert loss.isfinite() and loss != moved(make(), 0.1)(idx, y)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_new_activation_is_one_line_of_ffn(monkeypatch):
    monkeypatch.setitem(FFN, "gelu", dense(F.gelu))
    monkeypatch.setitem(FFN, "geglu", gated(F.gelu))
    plain, with_gate = shaken(modern(ffn="gelu")), shaken(modern(ffn="geglu"))
    assert plain.cfg.hidden == 4 * 24 and with_gate.cfg.hidden == 8 * 24 // 3
    x, ffn = torch.randn(2, 24), plain.blocks[0].ffn
    torch.testing.assert_close(ffn(x), F.gelu(x @ ffn.c_fc.weight.T) @ ffn.c_proj.weight.T)
    ffn = with_gate.blocks[0].ffn
    want = (F.gelu(x @ ffn.c_gate.weight.T) * (x @ ffn.c_fc.weight.T)) @ ffn.c_proj.weight.T
    torch.testing.assert_close(ffn(x), want)


# ---- hashed tables ----

@pytest.mark.parametrize("V, m", [(8192, 150_855), (8191, 1001), (2_000_003, 999_983), (3, 1)])
def test_oe_ids_are_the_integers_of_the_paper(V, m):
    idx = tokens(3, 9, V)
    idx[0, :4] = V - 1   # the largest keys
    for j, got in enumerate(oe_ids(idx, m, V)):
        assert got.dtype == torch.int64 and got.shape == idx.shape
        for row, ids in zip(got.tolist(), idx.tolist()):
            padded = [V, V, *ids]
            for t, value in enumerate(row):
                older, old, new = padded[t:t + 3]
                key = new + (V + 1) * old + ((V + 1) ** 2 * older if j >= 2 else 0)
                assert value == key % (m + 2 * j)


def test_oe_gradient_by_row_equals_autograd_and_counts_every_visit():
    model = tiny(oe_m=11)
    idx, y = tokens(4, 12, 97), tokens(4, 12, 97, seed=4)
    model(idx, y).backward()
    got, ids = [t.grad.clone() for t in model.oe_tables], oe_ids(idx, 11, 97)
    leaves = [t.detach().clone().requires_grad_() for t in model.oe_tables]
    e = torch.cat([F.embedding(i, t) for i, t in zip(ids, leaves)], -1)
    x = norm(model.trunk(idx, model.wte(idx), e))
    chunked_loss(x, model.lm_head.weight, y, 15.0).backward()
    for table, i, mine, auto in zip(model.oe_tables, ids, got, leaves):
        torch.testing.assert_close(mine, auto.grad, rtol=1e-5, atol=1e-8)
        assert torch.equal(table.visits, torch.bincount(i.flatten(), minlength=len(table)).float())


def test_oe_lookup_without_gradient_leaves_no_trace():
    model = tiny(oe_m=11)
    with torch.no_grad():
        model(tokens(1, 5))
    assert all(t.grad is None for t in model.oe_tables)


# ---- parts of the backbone ----

def test_masked_scale_freezes_layer_0_and_the_fast_planes():
    model = tiny(qk_scale="masked")
    model(tokens(4, 12, 97), tokens(4, 12, 97, seed=4)).backward()
    for i, block in enumerate(model.blocks):
        gain, grad = block.attn.q_gain(), block.attn.q_log.grad   # planes: D/2 = 16
        frozen = slice(0, 16 if i == 0 else 4)
        assert (gain[:, frozen] == 1).all() and (grad[:, frozen] == 0).all()
        assert i == 0 or ((gain[:, 4:16] != 1).all() and (grad[:, 4:] != 0).all())
        assert torch.equal(gain[:, :16], gain[:, 16:])


def test_windows():
    cfg = GPTConfig.backbone(6)
    assert [cfg.window(i) for i in range(6)] == [1024, 1024, 1024, 2048, 1024, 2048]
    assert [cfg.has_value_embedding(i) for i in range(6)] == [False, True] * 3
    model = tiny(window_pattern="S")
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = model._masks(12, "cpu")[6]
    model.blocks[0].attn(x, None, model.cos, model.sin, mask)[0, 11].sum().backward()
    assert (x.grad[0, :5] == 0).all() and (x.grad[0, 5:] != 0).any(1).all()


def test_rotary_depends_on_distance_only_and_is_not_built_where_nobody_uses_it():
    cos, sin = rotary_tables(40, 16, 10_000.0)
    both = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    q, k = (rotate(z.expand(1, 40, 1, 16), cos, sin)[0, :, 0] for z in both)
    near, again, far = q[30] @ k[25], q[9] @ k[4], q[30] @ k[20]
    assert abs(near - again) < 1e-5 and abs(near - far) > 1e-3
    assert fresh(modern(**NOPE)).cos is None
    assert torch.equal(fresh(modern()).cos, rotary_tables(11, 8, 10_000.0)[0])


@pytest.mark.parametrize("cfg", [
    backbone(oe_m=13), modern(), modern(attn="gated_delta", **NOPE), modern(ffn="moe"),
    modern(residual="highway", history=True)])
def test_trace_holds_what_the_forward_pass_computed(cfg):
    model, trace, T = shaken(cfg, 0.05).eval(), {}, 9
    idx, y = tokens(2, T, cfg.vocab_size), tokens(2, T, cfg.vocab_size, seed=4)
    loss = model(idx, y, trace=trace)
    first, last = trace["layers"][0], trace["layers"][-1]
    assert len(trace["layers"]) == cfg.n_layer
    assert last["q"].shape == last["k"].shape == (2, T, cfg.n_head, cfg.head_dim)
    assert last["y"].shape == (2, T, cfg.n_embd)
    want = F.cross_entropy(trace["logits"].flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(trace["x_final"], model.norm(trace["x_L"]))
    assert torch.equal(loss, model(idx, y)) and torch.equal(trace["logits"], model(idx))
    if cfg.oe_m:
        assert last["gate"].shape == (2, T, 2) and trace["layers"][1]["gate"] is None
        torch.testing.assert_close(first["pre"], model.blocks[0].ffn.c_fc(first["mlp_in"]))
        torch.testing.assert_close(first["hidden"], first["pre"].clamp_min(0) ** 2)
        torch.testing.assert_close(trace["x0"], norm(trace["wte"] + trace["oe"]))


@pytest.mark.parametrize("cfg", [
    backbone(oe_m=13, wte_route="shared"), modern(history=True, n_layer=4), modern(pos="alibi")])
def test_layers_go_on_from_any_of_them(cfg):
    model, idx, trace, states = shaken(cfg, 0.05).eval(), tokens(2, 9), {}, []
    model(idx, trace=trace)
    x0, anchor = trace["x0"], trace["anchor"]
    seen = [{} for _ in model.blocks]
    end = model.layers(idx, x0, x0, anchor, seen=seen, states=states)
    assert torch.equal(end, trace["x_L"]) and torch.equal(states[-1], end)
    assert torch.equal(seen[-1]["mlp_in"], trace["layers"][-1]["mlp_in"])
    for i, state in enumerate(states):
        assert torch.equal(model.layers(idx, state, x0, anchor, start=i + 1), end)


# ---- initial values and precision ----

def test_initial_values():
    cfg = GPTConfig.modern(residual="highway", attn="gated_delta", pos="learned", bias=True,
                           norm="layer", tie=False)
    model, tied = fresh(cfg, 3), fresh(GPTConfig.modern(), 3)
    for name, role, p in model.roles():
        leaf = name.split(".")[-1]
        if "norm" in name:
            assert (p == (leaf == "weight")).all()
        elif leaf == "bias":
            assert (p == (-2 if ".gate." in name else 0)).all(), name
        else:   # no smaller for the projections
            assert abs(p.std() / 0.02 - 1) < 0.05 and abs(p.mean()) < 0.002, name
    assert tied.lm_head.weight is tied.wte.weight
    assert torch.equal(tied.wte.weight, model.wte.weight)
    assert {role for _, role, _ in model.roles()} == {"wte", "wpe", "lm_head", "matrix", "vector"}


GATED = dict(attn="gated_delta_scalar", pos="none", residual="highway_scalar")
SKIPS = dict(oe_m=1009, qk_scale="full", wte_route="separate", out_skip=True)


@pytest.mark.parametrize("cfg, away", [
    *((GPTConfig.backbone(2, 64, sequence_len=32, **kw), 0.05) for kw in ({}, SKIPS)),
    *((GPTConfig.modern(n_layer=2, sequence_len=32, **kw), 0.2)
      for kw in ({}, BASELINE, GATED, dict(ffn="moe")))])
def test_loss_at_init_is_log_vocabulary(cfg, away):
    loss = fresh(cfg, 5).eval()(tokens(8, 32, 8192), tokens(8, 32, 8192, seed=4))
    assert abs(loss.item() - math.log(8192)) < away


@pytest.mark.parametrize("kw", [
    {}, BASELINE, dict(ffn="moe", moe_top_k=2, router_progress=0.5), dict(residual="highway"),
    dict(history=True), dict(pos="alibi"), *(dict(attn=attn, **NOPE) for attn in FAST)], ids=str)
def test_bfloat16_autocast_stays_close_to_float32(kw):
    model, idx, y = shaken(modern(**kw), 0.1), tokens(), tokens(seed=4)
    want = model(idx, y)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, y)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss - want) < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_bfloat16_embeddings_only():
    model = tiny(oe_m=13).set_dtype(torch.bfloat16)
    low = {role for _, role, p in model.roles() if p.dtype == torch.bfloat16}
    assert low == {"wte", "value_embeds", "oe"}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens(1, 12), tokens(1, 12, seed=4))
    loss.backward()
    assert loss.dtype == torch.float32 and model.oe_tables[0].grad.dtype == torch.bfloat16


# ---- what is refused ----

@pytest.mark.parametrize("kw, reason", [
    (dict(attn="delta"), "pos rope"), (dict(attn="linear", pos="alibi"), "pos alibi"),
    (dict(attn="gated_delta", pos="hard_alibi"), "hard_alibi"),
    (dict(attn="gated_delta_scalar", pos="none", qk_norm=True), "qk_norm"),
    (dict(attn="delta", pos="none", qk_scale="head"), "qk_scale"),
    (dict(attn="delta", pos="none", window_pattern="SL"), "window"),
    (dict(fast_weight_impl="recurrent"), "fast_weight_impl"), (dict(moe_experts=8), "need ffn moe"),
    (dict(router_progress=0.5), "need ffn moe"), (dict(ffn="moe", moe_top_k=5), "moe_top_k"),
    (dict(ffn="moe", moe_top_k=0), "moe_top_k"), (dict(ffn="moe", moe_experts=0), "moe_top_k"),
    (dict(dropout=1.0), "dropout"), (dict(dropout=-0.1), "dropout"),
    (dict(ffn_hidden=-1), "ffn_hidden"), (dict(n_head=5), "split"),
    (dict(n_embd=18, n_head=6), "even"), (dict(n_layer=0), "at least 1"), (dict(pos="sine"), "pos"),
    (dict(norm="batch"), "norm"), (dict(attn="mamba"), "attn"),
    (dict(residual="dense"), "residual"),
    (dict(pos="none", qk_scale="full"), "rotary"), (dict(wte_route="separate"), "embed_norm"),
    (dict(ffn="moe", moe_experts=1, router_progress=1.0), "two experts"),
    (dict(pos="none", rope_base=500.0), "rope_base"), (dict(norm_eps=1e-6), "norm_eps"),
    (dict(pos="hard_alibi", n_head=1), "two heads"), (dict(init="xavier"), "init"),
    (dict(ffn="moe", moe_expert_hidden="split", moe_experts=5), "does not split")])
def test_illegal_ablations_are_refused_with_a_reason(kw, reason):
    with pytest.raises(UserError, match=reason):
        GPTConfig.modern(**kw)


@pytest.mark.parametrize("kw", [
    dict(oe_m=-1), dict(qk_scale="half"), dict(wte_route="both"), dict(window_pattern="X"),
    dict(window_pattern=""), dict(shared_eps=0.0), dict(head_dim=3), dict(depth=0),
    dict(ffn="none of them"), dict(vocab_size=0), dict(norm_eps=-1.0)])
def test_illegal_backbones_are_refused(kw):
    with pytest.raises(UserError):
        GPTConfig.backbone(**{"depth": 2, **kw})


def test_rows_longer_than_the_model_and_parameters_without_a_role_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match="13"):
        model(torch.zeros(1, 13, dtype=torch.long))
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(KeyError, match="extra"):
        list(model.roles())
