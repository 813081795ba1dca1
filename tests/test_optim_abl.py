"""optim.py, the rules of the ablations, against loops written from their definitions."""
import math

import pytest
import torch

from optim import (SCHEDULES, MuonAdamW, head_blocks, join_heads, keep_topk_, polar_express,
                   qk_clip_, warmup_multiplier)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- schedule ----

def test_warmup_is_a_line_and_the_rest_the_schedule():
    assert [warmup_multiplier(s, 100, 4) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    for name, schedule in SCHEDULES.items():
        for step in (4, 5, 17, 52, 99, 100):
            assert warmup_multiplier(step, 100, 4, name) == schedule((step - 4) / 96)
    assert warmup_multiplier(0, 100, 0) == 1 and abs(warmup_multiplier(50, 100, 0) - 0.5) < 1e-12
    assert warmup_multiplier(5, 5, 5) == 1   # all warm-up: nothing left to divide by


# ---- per-head Muon ----

@pytest.mark.parametrize("axis", [-2, -1])
def test_head_blocks_are_the_heads_slices(axis):
    W = random(3, 15, 10, seed=1)
    blocks = head_blocks(W, 5, axis)
    for h in range(5):
        rows, columns = W[:, 3 * h:3 * h + 3], W[:, :, 2 * h:2 * h + 2]
        assert torch.equal(blocks[:, h], rows if axis == -2 else columns)
    assert torch.equal(join_heads(blocks, axis), W)


def muon_step(params, grads, steps=3, **group):
    """Weights after a few MuonAdamW steps of one muon group."""
    params = [p.clone().requires_grad_() for p in params]
    shared = dict(kind="muon", params=params, lr=0.1, momentum=0.9, polar_dtype=torch.float64)
    opt = MuonAdamW([dict(shared, **group)])
    for i in range(steps):
        for p, g in zip(params, grads):
            p.grad = g * (i + 1)
        opt.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("axis, shape", [
    (-2, (12, 7)), (-1, (7, 12)), (-2, (12, 40)), (-1, (5, 4))])
def test_per_head_muon_equals_a_loop_over_heads(axis, shape):
    p, g = random(*shape, seed=2), random(*shape, seed=3)
    n = 4
    want, buf = p.clone(), torch.zeros_like(p)
    for i in range(3):
        buf = 0.9 * buf + 0.1 * g * (i + 1)
        u = 0.1 * g * (i + 1) + 0.9 * buf
        size = shape[axis] // n
        for h in range(n):
            block, target = (z.narrow(axis, h * size, size) for z in (u, want))
            scale = max(1, block.size(0) / block.size(1)) ** 0.5
            target -= 0.1 * scale * polar_express(block)
    (got,) = muon_step([p], [g], normuon=False, heads=n, head_axis=axis)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    (whole,) = muon_step([p], [g], normuon=False)
    assert (got - whole).abs().max() > 1e-3


@pytest.mark.parametrize("normuon", [True, False])
def test_one_block_is_plain_muon_bit_for_bit(normuon):
    ps, gs = ([random(6, 9, seed=s) for s in seeds] for seeds in ((1, 2), (3, 4)))
    group = dict(normuon=normuon, weight_decay=0.1)
    plain = muon_step(ps, gs, **group)
    for axis in (-2, -1):
        for a, b in zip(plain, muon_step(ps, gs, heads=1, head_axis=axis, **group)):
            assert torch.equal(a, b)


def test_a_stack_of_matrices_is_updated_matrix_by_matrix():
    p, g = random(3, 6, 9, seed=5), random(3, 6, 9, seed=6)
    for normuon in (True, False):
        (stacked,) = muon_step([p], [g], normuon=normuon)
        separate = muon_step(list(p), list(g), normuon=normuon)
        torch.testing.assert_close(stacked, torch.stack(separate), rtol=1e-12, atol=1e-12)


def test_normuon_switch_acts():
    p, g = random(8, 5, seed=7), random(8, 5, seed=8)
    (on,), (off,) = (muon_step([p], [g], normuon=normuon) for normuon in (True, False))
    assert (on - off).abs().max() > 1e-3


# ---- MuonClip ----

def logits(x, wq, wk, heads):
    q, k = ((x @ w.T).unflatten(-1, (heads, -1)).transpose(0, 1) for w in (wq, wk))
    return q @ k.mT / q.size(-1) ** 0.5   # [heads, T, T]


def test_qk_clip_brings_each_hot_head_to_tau_and_leaves_the_rest():
    x, wq, wk = random(11, 9, seed=1), random(12, 9, seed=2), random(12, 9, seed=3)
    before = logits(x, wq, wk, 4).amax(dim=(1, 2))
    tau = before.median().item() * 1.01   # some heads above, some below
    a, b = wq.clone(), wk.clone()
    qk_clip_(a, b, before, tau)
    after = logits(x, a, b, 4).amax(dim=(1, 2))
    torch.testing.assert_close(after, before.clamp_max(tau), rtol=1e-12, atol=1e-12)
    for h in range(4):
        rows = slice(3 * h, 3 * h + 3)
        kept = bool(before[h] <= tau)
        assert torch.equal(a[rows], wq[rows]) == torch.equal(b[rows], wk[rows]) == kept
    assert 0 < (before > tau).sum() < 4


def test_qk_clip_scales_biases_and_is_inert_below_tau():
    bias = random(12, seed=4)
    a, b = bias.clone(), bias.clone()
    qk_clip_(a, b, torch.tensor([8.0, 1.0, 2.0, 1.0]), 2.0)
    assert torch.equal(a[:3], bias[:3] * 0.5) and torch.equal(a[3:], bias[3:]) and torch.equal(a, b)
    w = random(12, 9, seed=5, dtype=torch.float32)
    a, b = w.clone(), w.clone()
    qk_clip_(a, b, torch.tensor([3.0, 1.0, 2.0, 3.0]), 3.0)
    assert torch.equal(a, w) and torch.equal(b, w)


# ---- meProp ----

@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.37, 0.999])
def test_keep_topk_keeps_the_largest_of_each_tensor(fraction):
    grads = [random(7, 13, seed=1), random(5, seed=2), random(3, 4, 5, seed=3)]
    want = []
    for g in grads:
        k = math.ceil(fraction * g.numel())
        order = sorted(range(g.numel()), key=lambda i: -abs(g.flatten()[i].item()))[:k]
        kept = torch.zeros(g.numel(), dtype=g.dtype)
        kept[order] = g.flatten()[order]
        want.append(kept.view_as(g))
    keep_topk_(grads, fraction)
    assert all(torch.equal(a, b) for a, b in zip(grads, want))


def test_keep_topk_counts_as_written():
    for fraction, n, kept in ((0.07, 100, 7), (0.55, 100, 55), (0.1, 101, 11), (1e-9, 50, 1)):
        g = torch.arange(1.0, n + 1)
        keep_topk_([g], fraction)
        assert (g != 0).sum() == kept


def test_keep_topk_all_is_the_identity_and_strides_do_not_matter():
    g = random(6, 5, seed=1)
    whole = g.clone()
    keep_topk_([g], 1.0)
    assert torch.equal(g, whole)
    turned = whole.clone().T
    keep_topk_([turned], 0.2)
    keep_topk_([g], 0.2)
    assert torch.equal(turned.T, g) and (g != 0).sum() == 6
