"""fast_weights.py: chunks against the step-by-step recurrence in value and gradients, at extremes, and against closed forms."""
import math

import pytest
import torch
import torch.nn.functional as F

from fast_weights import delta_chunk, delta_recurrent, linear_chunk, linear_recurrent

KINDS = ("delta", "scalar", "channel")   # no decay, one per head, one per key channel


def case(kind, B=2, H=3, T=7, D=5, extreme=False, dtype=torch.float64, seed=0):
    """Leaves q, k, v, beta (, log decay). Extreme: beta within 1e-6 of 0 and 1, decays 1e-6, 1 - 1e-6 and 1e-30 among ordinary ones."""
    gen = torch.Generator().manual_seed(seed)
    r = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    q, k = (F.normalize(r(B, H, T, D), dim=-1) for _ in "qk")
    inputs = [q, k, r(B, H, T, D), torch.sigmoid(r(B, H, T))]
    if kind != "delta":
        inputs.append(F.logsigmoid(r(B, H, T, D) if kind == "channel" else r(B, H, T)))
    if extreme:
        far = torch.tensor([1e-6, 1 - 1e-6, 1.0, 0.0], dtype=torch.float64)
        inputs[3] = torch.where(r(B, H, T) > 0.5, inputs[3], far[torch.randint(0, 4, (B, H, T), generator=gen)])
        if kind != "delta":
            shape = inputs[4].shape
            far = torch.tensor([math.log(1e-6), math.log1p(-1e-6), math.log(1e-30), 0.0], dtype=torch.float64)
            inputs[4] = torch.where(r(*shape) > 0.7, inputs[4], far[torch.randint(0, 4, shape, generator=gen)])
        inputs[1] = torch.where(r(B, H, T, 1) > 0, k, k[:, :, :1])                   # the same key again and again: I + A at its worst
    return [z.to(dtype).requires_grad_() for z in inputs]


def outputs_and_gradients(f, inputs, seed=5):
    y = f(*inputs)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, inputs, up)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T, chunk", [(1, 32), (2, 1), (7, 4), (13, 8), (33, 32), (70, 16), (64, 64)])
@pytest.mark.parametrize("extreme", [False, True])
def test_delta_chunks_equal_the_recurrence_in_outputs_and_gradients(kind, T, chunk, extreme):
    inputs = case(kind, T=T, extreme=extreme, seed=T)
    want = outputs_and_gradients(delta_recurrent, inputs)
    got = outputs_and_gradients(lambda *z: delta_chunk(*z, chunk=chunk), inputs)
    for a, b in zip(want, got):
        assert b.isfinite().all()
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("T, chunk", [(1, 32), (2, 1), (7, 4), (33, 16), (64, 64)])
def test_linear_chunks_equal_the_recurrence_in_outputs_and_gradients(T, chunk):
    gen = torch.Generator().manual_seed(T)
    inputs = [torch.rand(2, 3, T, 5, generator=gen, dtype=torch.float64).requires_grad_() for _ in "qkv"]
    want = outputs_and_gradients(linear_recurrent, inputs)
    for a, b in zip(want, outputs_and_gradients(lambda *z: linear_chunk(*z, chunk=chunk), inputs)):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extreme", [False, True])
def test_float32_chunks_agree_over_a_long_row(kind, extreme):
    inputs = case(kind, B=1, H=2, T=300, D=16, extreme=extreme, dtype=torch.float32)
    exact = outputs_and_gradients(delta_recurrent, [z.detach().double().requires_grad_() for z in inputs])
    for a, b in zip(exact, outputs_and_gradients(delta_chunk, inputs)):
        assert b.isfinite().all() and (a - b).abs().max() < 1e-4 * max(1.0, a.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    inputs = case(kind, B=1, H=1, T=5, D=2, seed=3)
    assert torch.autograd.gradcheck(lambda *z: delta_chunk(*z, chunk=4), inputs)
    assert torch.autograd.gradcheck(delta_recurrent, inputs)
    if kind == "delta":
        assert torch.autograd.gradcheck(lambda *z: linear_chunk(*z, chunk=2), [z.detach().abs().requires_grad_() for z in inputs[:3]])


@pytest.mark.parametrize("f", [delta_recurrent, delta_chunk])
def test_delta_with_beta_one_and_orthonormal_keys_recalls_what_was_stored(f):
    D = 8
    k = torch.eye(D, dtype=torch.float64)[None, None]
    v = torch.randn(1, 1, D, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    store = torch.cat((k, k.flip(2)), 2), torch.cat((v, 0 * v), 2)                   # written once, then asked for backwards with beta 0
    beta = torch.cat((torch.ones(1, 1, D), torch.zeros(1, 1, D)), 2).double()
    assert torch.equal(f(store[0], *store, beta)[:, :, D:], v.flip(2))
    twice = f(torch.cat((k, k), 2), torch.cat((k, k), 2), torch.cat((v, -v), 2), torch.ones(1, 1, 2 * D).double())
    assert torch.equal(twice[:, :, D:], -v)                                          # a second write replaces the first
    decayed = f(torch.cat((k, k), 2), torch.cat((k, k), 2), torch.cat((v, v), 2), beta, torch.full((1, 1, 2 * D), math.log(0.5)).double())
    torch.testing.assert_close(decayed[:, :, D:], v * 0.5**D)                        # D decays lie between write and question


def test_equal_decays_of_channels_are_the_decay_of_a_head_and_no_decay_is_the_plain_rule():
    q, k, v, beta, g = case("scalar", T=37, D=6)
    torch.testing.assert_close(delta_chunk(q, k, v, beta, g.unsqueeze(-1).expand(-1, -1, -1, 6)), delta_chunk(q, k, v, beta, g))
    torch.testing.assert_close(delta_chunk(q, k, v, beta, 0 * g), delta_chunk(q, k, v, beta))
    assert not torch.allclose(delta_chunk(q, k, v, beta, g), delta_chunk(q, k, v, beta))


def test_linear_is_attention_with_positive_weights():
    gen = torch.Generator().manual_seed(1)
    q, k, v = (torch.rand(1, 1, 9, 4, generator=gen, dtype=torch.float64) for _ in "qkv")
    w = (q @ k.mT).tril()
    torch.testing.assert_close(linear_chunk(q, k, v, chunk=4), w @ v / (w.sum(-1, keepdim=True) + 1e-6))


def test_a_decay_of_zero_forgets_everything():
    q, k, v, beta, _ = case("scalar", T=20)
    g = torch.zeros(2, 3, 20, dtype=torch.float64)
    g[:, :, 11] = -1e4                                                               # far below what exp can hold
    for log_decay in (g, g.unsqueeze(-1).expand(-1, -1, -1, 5)):
        whole = delta_chunk(q, k, v, beta, log_decay)
        tail = delta_chunk(*(z[:, :, 11:] for z in (q, k, v, beta)))
        torch.testing.assert_close(whole[:, :, 11:], tail)
