"""model.py: counts, ids, gradients by row, causality, a slow float64 reference of the whole forward pass, and the chunked loss."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from common import UserError
from loss import capped_logits, chunked_loss, plain_loss
from model import GPT, GPTConfig, norm, oe_ids, rotary_tables, rotate


def tiny(depth=3, T=12, V=97, seed=1, shake=0.3, **kw):
    """A small model (width 64) whose zero-initialised tensors are moved, so that every part acts."""
    model = GPT(GPTConfig(n_layer=depth, n_head=2, n_embd=64, vocab_size=V, sequence_len=T, **kw)).init_weights(seed)
    gen = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _, _, p in model.roles():
            p.add_(shake * torch.randn(p.shape, generator=gen) / max(1, p.size(-1)) ** 0.5)
    return model


@pytest.mark.parametrize("kw, backbone, oe", [
    (dict(depth=6), 26_345_772, 0), (dict(depth=8), 50_332_176, 0), (dict(depth=6, head_dim=64), 26_346_060, 0),
    (dict(depth=6, oe_m=150_855), 26_345_772, 57_929_472), (dict(depth=8, oe_m=150_855), 50_332_176, 77_239_296),
    (dict(depth=6, qk_scale="full"), 26_345_772 + 1_152, 0), (dict(depth=8, qk_scale="masked"), 50_332_176 + 2_048, 0),
    (dict(depth=6, wte_route="separate"), 26_345_772 + 6, 0), (dict(depth=6, wte_route="shared", out_skip=True), 26_345_772 + 8, 0),
    (dict(depth=8, wte_route="shared"), 50_332_176 + 8, 0), (dict(depth=8, wte_route="separate", out_skip=True), 50_332_176 + 10, 0),
])
def test_parameter_counts_to_the_digit(kw, backbone, oe):
    with torch.device("meta"):
        model = GPT(GPTConfig.backbone(**kw))
    assert model.num_params() == {"backbone": backbone, "oe": oe, "total": backbone + oe}
    if oe:
        assert sum(len(t) for t in model.oe_tables) == 603_432


@pytest.mark.parametrize("V, m", [(8192, 150_855), (8191, 1001), (2_000_003, 999_983), (3, 1)])
def test_oe_ids_are_the_integers_of_the_paper(V, m):
    idx = torch.randint(0, V, (3, 9), generator=torch.Generator().manual_seed(V))
    idx[0, :4] = V - 1                                            # the largest keys
    for j, got in enumerate(oe_ids(idx, m, V)):
        assert got.dtype == torch.int64 and got.shape == idx.shape
        for row, want_row in zip(got.tolist(), idx.tolist()):
            for t, value in enumerate(row):
                x = [want_row[t - r] if t - r >= 0 else V for r in range(3)]
                key = x[0] + (V + 1) * x[1] + ((V + 1) ** 2 * x[2] if j >= 2 else 0)
                assert value == key % (m + 2 * j)


def test_oe_gradient_by_row_equals_autograd_and_counts_every_visit():
    model = tiny(oe_m=11)
    idx, y = torch.randint(0, 97, (2, 4, 12), generator=torch.Generator().manual_seed(0))
    model(idx, y).backward()
    got = [t.grad.clone() for t in model.oe_tables]
    ids = oe_ids(idx, 11, 97)
    dense = [t.detach().clone().requires_grad_() for t in model.oe_tables]
    e = torch.cat([F.embedding(i, t) for i, t in zip(ids, dense)], -1)
    chunked_loss(norm(model.trunk(idx, model.wte(idx), e)), model.lm_head.weight, y, 15.0).backward()
    for table, i, mine, auto in zip(model.oe_tables, ids, got, dense):
        torch.testing.assert_close(mine, auto.grad, rtol=1e-5, atol=1e-8)
        assert torch.equal(table.visits, torch.bincount(i.flatten(), minlength=len(table)).float())


def test_oe_lookup_without_gradient_leaves_no_trace():
    model = tiny(oe_m=11)
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long))
    assert all(t.grad is None for t in model.oe_tables)


COMBINATIONS = list(itertools.product((0, 13), ("none", "full", "masked"), ("fused", "separate", "shared"), (False, True), ("SSSL", "L")))


@pytest.mark.parametrize("oe_m, qk, route, skip, windows", COMBINATIONS)
def test_causal_for_every_combination(oe_m, qk, route, skip, windows):
    model = tiny(oe_m=oe_m, qk_scale=qk, wte_route=route, out_skip=skip, window_pattern=windows)
    idx = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(3))
    other = idx.clone()
    other[:, 7] = (other[:, 7] + 1) % 97
    with torch.no_grad():
        a, b = model(idx), model(other)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7], b[:, 7])


@pytest.mark.parametrize("kw", [{}, dict(oe_m=1009, qk_scale="full", wte_route="separate", out_skip=True)])
def test_loss_at_init_is_log_vocabulary(kw):
    model = GPT(GPTConfig.backbone(2, 64, sequence_len=32, **kw)).init_weights(5)
    idx, y = torch.randint(0, 8192, (2, 8, 32), generator=torch.Generator().manual_seed(4))
    assert abs(model(idx, y).item() - math.log(8192)) < 0.05


def reference_logits(model, idx):
    """The forward pass as the papers write it, token by token in float64."""
    cfg, P = model.cfg, {k: v.double() for k, v in model.state_dict().items()}
    rms = lambda v: v / (v.square().mean() + torch.finfo(torch.float64).eps).sqrt()
    D, out = cfg.head_dim, []
    ids = oe_ids(idx, cfg.oe_m, cfg.vocab_size) if cfg.oe_m else None
    for b in range(idx.size(0)):
        T = idx.size(1)
        w = [P["wte.weight"][idx[b, t]] for t in range(T)]
        e = [torch.cat([P[f"oe_tables.{j}"][ids[j][b, t]] for j in range(4)]) if ids else torch.zeros(cfg.n_embd).double() for t in range(T)]
        x0 = [rms(w[t] + e[t]) for t in range(T)]
        anchor = [{"separate": lambda: rms(w[t]), "fused": lambda: 0 * w[t],
                   "shared": lambda: w[t] / ((w[t] + e[t]).square().mean() + cfg.shared_eps).sqrt()}[cfg.wte_route]() for t in range(T)]
        x = list(x0)
        for i in range(cfg.n_layer):
            pre = f"blocks.{i}."
            wl = P["wte_lambdas"][i] if "wte_lambdas" in P else 0.0
            x = [P["resid_lambdas"][i] * x[t] + P["x0_lambdas"][i] * x0[t] + wl * anchor[t] for t in range(T)]
            q, k, v = [], [], []
            for t in range(T):
                h = rms(x[t])
                heads = {n: (P[f"{pre}attn.c_{n}.weight"] @ h).view(cfg.n_head, D) for n in "qkv"}
                if cfg.has_value_embedding(i):
                    gate = 2 / (1 + (-(P[f"{pre}attn.ve_gate.weight"] @ h[:32])).exp())
                    heads["v"] = heads["v"] + gate[:, None] * P[f"value_embeds.{i}.weight"][idx[b, t]].view(cfg.n_head, D)
                for n in "qk":
                    for c in range(D // 2):
                        angle = t * cfg.rope_base ** (-2 * c / D)
                        one, two = heads[n][:, c].clone(), heads[n][:, c + D // 2].clone()
                        heads[n][:, c] = one * math.cos(angle) + two * math.sin(angle)
                        heads[n][:, c + D // 2] = two * math.cos(angle) - one * math.sin(angle)
                    heads[n] = torch.stack([rms(z) for z in heads[n]])
                if cfg.qk_scale != "none":
                    g = P[f"{pre}attn.q_log"].clone()
                    if cfg.qk_scale == "masked":
                        g[:, :D // 8] = 0
                        g = g * (i > 0)
                    heads["q"] = heads["q"] * torch.cat([g.exp(), g.exp()], 1)
                q.append(heads["q"]), k.append(heads["k"]), v.append(heads["v"])
            for t in range(T):
                seen = range(max(0, t - cfg.window(i)), t + 1)
                y = []
                for h in range(cfg.n_head):
                    s = torch.stack([q[t][h] @ k[u][h] / D**0.5 for u in seen]).softmax(0)
                    y.append(sum(s[n] * v[u][h] for n, u in enumerate(seen)))
                x[t] = x[t] + P[f"{pre}attn.c_proj.weight"] @ torch.cat(y)
                x[t] = x[t] + P[f"{pre}ffn.c_proj.weight"] @ (P[f"{pre}ffn.c_fc.weight"] @ rms(x[t])).clamp_min(0) ** 2
        for t in range(T):
            if "out_lambdas" in P:
                x[t] = x[t] + P["out_lambdas"][0] * x0[t] + (P["out_lambdas"][1] * anchor[t] if len(P["out_lambdas"]) > 1 else 0)
            out.append(15 * torch.tanh(P["lm_head.weight"] @ rms(x[t]) / 15))
    return torch.stack(out).view(*idx.shape, -1)


@pytest.mark.parametrize("kw", [dict(), dict(oe_m=7, qk_scale="full", wte_route="separate", out_skip=True, window_pattern="S"),
                                dict(oe_m=7, qk_scale="masked", wte_route="shared", out_skip=False), dict(out_skip=True)])
def test_forward_equals_the_token_by_token_reference(kw):
    model = tiny(T=8, V=31, **kw)
    idx = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(8))
    want = reference_logits(model, idx)
    model = model.double()
    model.cos, model.sin = (z.double() for z in rotary_tables(8, 32, 10_000.0))
    cos64 = torch.outer(torch.arange(8).double(), 10_000.0 ** (-torch.arange(0, 32, 2).double() / 32))
    model.cos, model.sin = cos64.cos(), cos64.sin()
    with torch.no_grad():
        torch.testing.assert_close(model(idx).double(), want, rtol=1e-6, atol=1e-6)


def test_every_flag_acts_and_shared_tensors_start_equal():
    base = tiny()
    idx = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(3))
    plain = GPT(base.cfg).init_weights(1).state_dict()
    for kw in (dict(oe_m=13), dict(qk_scale="full"), dict(qk_scale="masked"), dict(wte_route="separate"), dict(wte_route="shared"),
               dict(out_skip=True), dict(window_pattern="L"), dict(softcap=0.0), dict(rope_base=500.0)):
        other = tiny(**kw)
        assert not torch.equal(base(idx), other(idx)), kw
        fresh = GPT(other.cfg).init_weights(1).state_dict()
        assert all(torch.equal(fresh[k], plain[k]) for k in plain), kw
    assert not torch.equal(GPT(base.cfg).init_weights(2).wte.weight, plain["wte.weight"])


@pytest.mark.parametrize("kw", [dict(oe_m=13), dict(qk_scale="full"), dict(wte_route="separate"), dict(wte_route="shared", out_skip=True)])
def test_parts_are_neutral_at_their_initial_values(kw):
    idx = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(3))
    def shaken(**kw):  # move the shared tensors only
        model = GPT(GPTConfig(n_layer=3, n_head=2, n_embd=64, vocab_size=97, sequence_len=12, **kw)).init_weights(1)
        with torch.no_grad():
            for name, role, p in model.roles():
                if role == "matrix":
                    p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name) + p.numel())))
        return model
    assert torch.equal(shaken()(idx), shaken(**kw)(idx))


def test_masked_scale_freezes_layer_0_and_the_fast_planes():
    model = tiny(qk_scale="masked")
    idx, y = torch.randint(0, 97, (2, 4, 12), generator=torch.Generator().manual_seed(3))
    model(idx, y).backward()
    for i, block in enumerate(model.blocks):
        gain, grad = block.attn.q_gain(), block.attn.q_log.grad
        frozen = slice(None) if i == 0 else slice(0, 32 // 8)
        assert (gain[:, frozen] == 1).all() and (grad[:, frozen][:, :16] == 0).all()
        assert i == 0 or ((gain[:, 4:16] != 1).all() and (grad[:, 4:] != 0).all())
        assert torch.equal(gain[:, :16], gain[:, 16:])


def test_windows():
    cfg = GPTConfig.backbone(6)
    assert [cfg.window(i) for i in range(6)] == [1024, 1024, 1024, 2048, 1024, 2048]
    assert [cfg.has_value_embedding(i) for i in range(6)] == [False, True] * 3
    model = tiny(depth=1, T=12, window_pattern="S")
    block = model.blocks[0]
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = (lambda age: (age >= 0) & (age <= 6))(torch.arange(12)[:, None] - torch.arange(12))
    block.attn(x, None, model.cos, model.sin, mask)[0, 11].sum().backward()
    assert (x.grad[0, :5] == 0).all() and (x.grad[0, 5:] != 0).any(1).all()


def test_rotary_depends_on_distance_only():
    cos, sin = rotary_tables(40, 16, 10_000.0)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).unsqueeze(1).expand(2, 40, 16)
    q, k = (rotate(z.reshape(1, 40, 1, 16), cos, sin)[0, :, 0] for z in (q, k))
    assert abs(q[30] @ k[25] - q[9] @ k[4]) < 1e-5 and abs(q[30] @ k[25] - q[30] @ k[20]) > 1e-3


def test_trace_holds_what_the_forward_pass_computed():
    model, trace = tiny(oe_m=13), {}
    idx, y = torch.randint(0, 97, (2, 4, 12), generator=torch.Generator().manual_seed(3))
    loss = model(idx, y, trace=trace)
    assert len(trace["layers"]) == 3 and trace["layers"][2]["gate"].shape == (4, 12, 2) and trace["layers"][1]["gate"] is None
    first = trace["layers"][0]
    torch.testing.assert_close(first["pre"], model.blocks[0].ffn.c_fc(first["mlp_in"]))
    torch.testing.assert_close(first["hidden"], first["pre"].clamp_min(0) ** 2)
    torch.testing.assert_close(trace["x_final"], norm(trace["x_L"]))
    torch.testing.assert_close(trace["x0"], norm(trace["wte"] + trace["oe"]))
    torch.testing.assert_close(loss, F.cross_entropy(trace["logits"].flatten(0, 1), y.flatten()))
    assert torch.equal(loss, model(idx, y)) and torch.equal(trace["logits"], model(idx))


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape, chunk", [((3, 17), 8), ((51,), 51), ((2, 5), 64), ((1, 1), 1)])
def test_chunked_loss_equals_the_plain_path(softcap, reduction, shape, chunk):
    gen = torch.Generator().manual_seed(7)
    def case():
        gen.manual_seed(7)
        x = torch.randn(*shape, 12, generator=gen, dtype=torch.float64).requires_grad_()
        w = (3 * torch.randn(29, 12, generator=gen, dtype=torch.float64)).requires_grad_()
        y = torch.randint(-1, 29, shape, generator=gen)
        y.view(-1)[0] = 4
        return x, w, y
    x, w, y = case()
    a = plain_loss(x, w, y, softcap, reduction)
    up = torch.randn(a.shape, generator=gen, dtype=torch.float64)
    want = torch.autograd.grad(a, (x, w), up)
    x, w, y = case()
    b = chunked_loss(x, w, y, softcap, reduction, chunk=chunk)
    got = torch.autograd.grad(b, (x, w), up)
    for p, q in ((a, b), *zip(want, got)):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


def test_chunked_loss_without_gradients_and_with_one_side_frozen():
    x, w, y = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 8, -1, 3, 2, 2])
    torch.testing.assert_close(chunked_loss(x, w, y, 15.0, "none", 4), plain_loss(x, w, y, 15.0, "none"))
    for frozen in (0, 1):
        xs = [x.clone(), w.clone()]
        xs[1 - frozen].requires_grad_()
        chunked_loss(*xs, y, 15.0, chunk=4).backward()
        ys = [x.clone(), w.clone()]
        ys[1 - frozen].requires_grad_()
        plain_loss(*ys, y, 15.0).backward()
        torch.testing.assert_close(xs[1 - frozen].grad, ys[1 - frozen].grad)


def test_logits_are_capped_in_float32_even_from_bfloat16():
    logits = capped_logits(torch.randn(3, 8).bfloat16() * 100, torch.randn(5, 8) * 100, 15.0)
    assert logits.dtype == torch.float32 and logits.abs().max() <= 15


@pytest.mark.parametrize("kw", [dict(oe_m=-1), dict(qk_scale="half"), dict(wte_route="both"), dict(window_pattern="X"), dict(window_pattern=""),
                                dict(shared_eps=0.0), dict(head_dim=3), dict(depth=0), dict(ffn="gelu"), dict(vocab_size=0)])
def test_illegal_configs_are_refused_with_a_reason(kw):
    with pytest.raises(UserError):
        GPTConfig.backbone(**{"depth": 2, **kw})


def test_rows_longer_than_the_model_are_refused():
    with pytest.raises(ValueError, match="13"):
        tiny()(torch.zeros(1, 13, dtype=torch.long))


def test_bfloat16_embeddings_only():
    model = tiny(oe_m=13).set_dtype(torch.bfloat16)
    assert {role for _, role, p in model.roles() if p.dtype == torch.bfloat16} == {"wte", "value_embeds", "oe"}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.zeros(1, 12, dtype=torch.long), torch.ones(1, 12, dtype=torch.long))
    loss.backward()
    assert loss.dtype == torch.float32 and model.oe_tables[0].grad.dtype == torch.bfloat16
