"""fast_weights.py: chunks against the recurrence in value and gradients, at extremes, and against
closed forms."""
import math

import pytest
import torch
import torch.nn.functional as F

from fast_weights import delta_chunk, delta_recurrent, linear_chunk, linear_recurrent

KINDS = ("delta", "scalar", "channel")   # no decay, one per head, one per key channel


def case(kind, B=2, H=3, T=7, D=5, extreme=False, dtype=torch.float64, seed=0):
    """Leaves q, k, v, beta (, log decay).

    Extreme: beta within 1e-6 of 0 and 1, decays 1e-6, 1 - 1e-6 and 1e-30 among ordinary ones.
    """
    gen = torch.Generator().manual_seed(seed)

    def r(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    def some(z, share, far):
        """z with entries of `far` in places."""
        far = torch.tensor(far, dtype=torch.float64)
        places = r(*z.shape) > share
        return torch.where(places, z, far[torch.randint(0, len(far), z.shape, generator=gen)])
    q, k = (F.normalize(r(B, H, T, D), dim=-1) for _ in "qk")
    inputs = [q, k, r(B, H, T, D), torch.sigmoid(r(B, H, T))]
    if kind != "delta":
        inputs.append(F.logsigmoid(r(B, H, T, D) if kind == "channel" else r(B, H, T)))
    if extreme:
        inputs[3] = some(inputs[3], 0.5, [1e-6, 1 - 1e-6, 1.0, 0.0])
        if kind != "delta":
            logs = [math.log(1e-6), math.log1p(-1e-6), math.log(1e-30), 0.0]
            inputs[4] = some(inputs[4], 0.7, logs)
        # the same key again and again: I + A at its worst
        inputs[1] = torch.where(r(B, H, T, 1) > 0, k, k[:, :, :1])
    return [z.to(dtype).requires_grad_() for z in inputs]


def outputs_and_gradients(f, inputs, seed=5):
    y = f(*inputs)
    gen = torch.Generator().manual_seed(seed)
    up = torch.randn(y.shape, generator=gen, dtype=torch.float64).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, inputs, up)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T, chunk", [
    (1, 32), (2, 1), (7, 4), (13, 8), (33, 32), (70, 16), (64, 64)])
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
    qkv = torch.rand(3, 2, 3, T, 5, generator=gen, dtype=torch.float64)
    inputs = [z.requires_grad_() for z in qkv.unbind()]
    want = outputs_and_gradients(linear_recurrent, inputs)
    got = outputs_and_gradients(lambda *z: linear_chunk(*z, chunk=chunk), inputs)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extreme", [False, True])
def test_float32_chunks_agree_over_a_long_row(kind, extreme):
    inputs = case(kind, B=1, H=2, T=300, D=16, extreme=extreme, dtype=torch.float32)
    exact = [z.detach().double().requires_grad_() for z in inputs]
    want = outputs_and_gradients(delta_recurrent, exact)
    for a, b in zip(want, outputs_and_gradients(delta_chunk, inputs)):
        assert b.isfinite().all() and (a - b).abs().max() < 1e-4 * max(1.0, a.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    inputs = case(kind, B=1, H=1, T=5, D=2, seed=3)
    assert torch.autograd.gradcheck(lambda *z: delta_chunk(*z, chunk=4), inputs)
    assert torch.autograd.gradcheck(delta_recurrent, inputs)
    if kind == "delta":
        positive = [z.detach().abs().requires_grad_() for z in inputs[:3]]
        assert torch.autograd.gradcheck(lambda *z: linear_chunk(*z, chunk=2), positive)


@pytest.mark.parametrize("f", [delta_recurrent, delta_chunk])
def test_delta_with_beta_one_and_orthonormal_keys_recalls_what_was_stored(f):
    D = 8
    k = torch.eye(D, dtype=torch.float64)[None, None]
    v = torch.randn(1, 1, D, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    once = torch.cat((torch.ones(1, 1, D), torch.zeros(1, 1, D)), 2).double()

    def second_half(keys, values, beta, *decay):
        keys, values = torch.cat((k, keys), 2), torch.cat((v, values), 2)
        return f(keys, keys, values, beta, *decay)[:, :, D:]
    # written once, then asked for backwards with beta 0
    assert torch.equal(second_half(k.flip(2), 0 * v, once), v.flip(2))
    # a second write replaces the first
    assert torch.equal(second_half(k, -v, torch.ones_like(once)), -v)
    # D decays lie between write and question
    halved = torch.full_like(once, math.log(0.5))
    torch.testing.assert_close(second_half(k, v, once, halved), v * 0.5**D)


def test_equal_decays_are_the_decay_of_a_head_and_no_decay_is_the_plain_rule():
    *inputs, g = case("scalar", T=37, D=6)
    plain, decayed = delta_chunk(*inputs), delta_chunk(*inputs, g)
    by_channel = g.unsqueeze(-1).expand(-1, -1, -1, 6)
    torch.testing.assert_close(delta_chunk(*inputs, by_channel), decayed)
    torch.testing.assert_close(delta_chunk(*inputs, 0 * g), plain)
    assert not torch.allclose(decayed, plain)


def test_linear_is_attention_with_positive_weights():
    gen = torch.Generator().manual_seed(1)
    q, k, v = torch.rand(3, 1, 1, 9, 4, generator=gen, dtype=torch.float64).unbind()
    w = (q @ k.mT).tril()
    want = w @ v / (w.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(linear_chunk(q, k, v, chunk=4), want)


def test_a_decay_of_zero_forgets_everything():
    inputs = case("delta", T=20)
    g = torch.zeros(2, 3, 20, dtype=torch.float64)
    g[:, :, 11] = -1e4   # far below what exp can hold
    tail = delta_chunk(*(z[:, :, 11:] for z in inputs))
    for log_decay in (g, g.unsqueeze(-1).expand(-1, -1, -1, 5)):
        torch.testing.assert_close(delta_chunk(*inputs, log_decay)[:, :, 11:], tail)
