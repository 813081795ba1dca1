"""Fast weights: a memory S [D, D] per head, written at every token, read by a query.

    linear          S_t = S_{t-1} + v_t k_t^T,  z_t = z_{t-1} + k_t,                 (ABL 20)
                    y_t = S_t q_t / (z_t . q_t)
    delta           S_t = S_{t-1} + b_t (v_t - S_{t-1} k_t) k_t^T,  y_t = S_t q_t    (ABL 17)
    gated delta     the same with S_{t-1} Diag(a_t) in place of S_{t-1},             (ABL 17-19)
                    a_t in (0, 1] per key channel or per head

Each rule comes step by step and, with equal results, in chunks of C tokens. In one that starts from
S_0, with G_t the sum of log a up to t, the writes u_t = b_t (v_t - S_{t-1} Diag(a_t) k_t) solve

    u_t + b_t sum_{s<t} <k_t, k_s e^(G_t - G_s)> u_s = b_t (v_t - S_0 (k_t e^(G_t))),

a unit triangular system (the UT transform of Yang et al. 2024). Only G_t - G_s with t >= s are
exponentiated, so that no decay overflows, however small.

Shapes: B rows, H heads, T tokens, D channels of a head, C tokens of a chunk, N = B * H * chunks.
"""
import torch
import torch.nn.functional as F

CHUNK = 32
EPS = 1e-6   # added to linear attention's normaliser


def linear_recurrent(q, k, v):
    """Linear attention token by token: y, like positive q and k and values v [B, H, T, D]."""
    S, z = v.new_zeros(*v.shape[:2], v.size(-1), k.size(-1)), torch.zeros_like(k[:, :, 0])
    out = []
    for t in range(q.size(2)):
        S, z = S + v[:, :, t, :, None] * k[:, :, t, None], z + k[:, :, t]
        read = (S @ q[:, :, t, :, None]).squeeze(-1)
        out.append(read / ((z * q[:, :, t]).sum(-1, keepdim=True) + EPS))
    return torch.stack(out, 2)


def linear_chunk(q, k, v, chunk=CHUNK):
    """linear_recurrent in chunks: masked products within, a running sum of states between them."""
    # the column of ones becomes the normaliser
    T, counted = q.size(2), F.pad(v, (0, 1), value=1.0)
    q, k, v = _chunks((q, k, counted), chunk)  # [B, H, T/C, C, .]
    state = k.mT @ v  # [B, H, T/C, D, D + 1]
    y = (q @ k.mT).tril() @ v + q @ (state.cumsum(2) - state)
    y = y.flatten(2, 3)[:, :, :T]
    return y[..., :-1] / (y[..., -1:] + EPS)


def delta_recurrent(q, k, v, beta, log_decay=None):
    """The delta rule token by token: y, like q, k, v [B, H, T, D]; beta [B, H, T].

    log_decay: log a, [B, H, T] or [B, H, T, D], or None.
    """
    S, out = v.new_zeros(*v.shape[:2], v.size(-1), k.size(-1)), []
    for t in range(q.size(2)):
        if log_decay is not None:
            a = log_decay[:, :, t].exp()
            S = S * (a[..., None, None] if a.ndim == 2 else a[:, :, None])
        u = beta[:, :, t, None] * (v[:, :, t] - (S @ k[:, :, t, :, None]).squeeze(-1))
        S = S + u[..., None] * k[:, :, t, None]
        out.append((S @ q[:, :, t, :, None]).squeeze(-1))
    return torch.stack(out, 2)


def delta_chunk(q, k, v, beta, log_decay=None, chunk=CHUNK):
    """delta_recurrent in chunks of up to `chunk` tokens (a power of two)."""
    B, H, T, D = q.shape
    wide = log_decay is not None and log_decay.ndim == 4
    parts = [q, k, v, beta.unsqueeze(-1)]
    if log_decay is not None:
        parts.append(log_decay if wide else log_decay.unsqueeze(-1))
    q, k, v, beta, *logs = (z.flatten(0, 2) for z in _chunks(parts, chunk))  # [N, C, D]
    if logs:
        G = logs[0].cumsum(1)  # [N, C, D] or [N, C, 1]
        to_start, to_end, whole = G.exp(), (G[:, -1:] - G).exp(), G[:, -1].exp().expand(-1, D)
    else:
        G, to_start, to_end, whole = None, 1, 1, torch.ones_like(k[:, 0])
    A, P = _channel_products(q, k, G) if wide else _products(q, k, G)  # [N, C, C]
    given = beta * torch.cat((v, k * to_start), -1)
    X = torch.linalg.solve_triangular(beta * A, given, upper=False, unitriangular=True)
    # with [U | W] = X the state behind a chunk is S (Diag(whole) - W^T kd) + U^T kd
    write, erase = (X.mT @ (k * to_end)).split(D, 1)  # [N, D, D]
    keep = torch.diag_embed(whole) - erase
    S, states = write.new_zeros(B * H, D, D), []
    # unbind and split instead of indexing: backward then fills one buffer, not one per chunk
    for gain, new in zip(*(z.unflatten(0, (B * H, -1)).unbind(1) for z in (keep, write))):
        states.append(S)
        S = torch.baddbmm(new, S, gain)
    U, W = (P @ X).split(D, -1)
    y = U + (q * to_start - W) @ torch.stack(states, 1).flatten(0, 1).mT
    return y.view(B, H, -1, D)[:, :, :T]


def _chunks(parts, chunk):
    """Each [B, H, T, .] as [B, H, T/C, C, .], C a power of two; zeros (no write, no decay) fill."""
    T = parts[0].size(2)
    C = min(chunk, 1 << (T - 1).bit_length())
    return [F.pad(z, (0, 0, 0, -T % C)).unflatten(2, (-1, C)) for z in parts]


def _products(q, k, G):
    """(A, P) [N, C, C]: <k_t, k_s> for s < t and <q_t, k_s> for s <= t, times e^(G_t - G_s).

    G [N, C, 1] or None.
    """
    A, P = k @ k.mT, q @ k.mT
    if G is not None:
        future = torch.ones(A.shape[1:], dtype=torch.bool, device=A.device).triu(1)
        decay = (G - G.mT).masked_fill(future, -torch.inf).exp()
        A, P = A * decay, P * decay
    return A.tril(-1), P.tril()


def _halves(z, h):
    """The earlier and later halves of every 2h rows of z [N, C, ...]: views [N, blocks, h, ...]."""
    return z.unflatten(1, (-1, 2, h)).unbind(2)


def _corners(M, h):
    """View [N, h, 2, h, blocks] of M [N, C, 2, C], of every block of 2h tokens.

    Its rows are the block's later half, its columns the earlier one.
    """
    N, C, _, _ = M.shape
    return M.view(N, -1, 2 * h, 2, C // (2 * h), 2 * h).diagonal(dim1=1, dim2=4)[:, h:, :, :h]


class _ChannelProducts(torch.autograd.Function):
    """M [N, C, 2, C]: sum_c left[t, r, c] k[s, c] e^(G[t, c] - G[s, c]) for s < t, else 0.

    left [N, C, 2, D], k and G [N, C, D]. Pairs (t, s) in different halves of a block of 2h tokens
    are joined at the boundary b of the halves: e^(G_t - G_b) e^(G_b - G_s), both at most 1. Blocks
    of 2, 4, ..., C tokens cover every pair once. G scales left and unscales k, so its gradient is
    left * (gradient of left) - k * (gradient of k).
    """

    @staticmethod
    def forward(ctx, left, k, G):
        M, h, factors = left.new_zeros(*left.shape[:3], len(G[0])), 1, []
        while h < G.size(1):
            (g0, g1), lo, hi = _halves(G, h), _halves(k, h)[0], _halves(left, h)[1]
            edge = g0[:, :, -1:]  # [N, blocks, 1, D]
            f0, f1 = (edge - g0).exp_(), (g1 - edge).exp_().unsqueeze(3)
            cross = (hi * f1).flatten(2, 3) @ (lo * f0).mT  # [N, blocks, 2h, h]
            _corners(M, h).copy_(cross.unflatten(2, (h, 2)).permute(0, 2, 3, 4, 1))
            factors += [f0, f1]
            h *= 2
        ctx.save_for_backward(left, k, *factors)
        return M

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dM):
        left, k, *factors = ctx.saved_tensors
        dleft, dk, h = torch.zeros_like(left), torch.zeros_like(k), 1
        for f0, f1 in zip(factors[::2], factors[1::2]):
            lo, hi = _halves(k, h)[0], _halves(left, h)[1]
            cross = _corners(dM, h).permute(0, 4, 1, 2, 3).flatten(2, 3)  # [N, blocks, 2h, h]
            _halves(dleft, h)[1].addcmul_((cross @ (lo * f0)).unflatten(2, (h, 2)), f1)
            _halves(dk, h)[0].addcmul_(cross.mT @ (hi * f1).flatten(2, 3), f0)
            h *= 2
        return dleft, dk, (left * dleft).sum(2).sub_(k * dk)


def _channel_products(q, k, G):
    """_products with one decay per channel, G [N, C, D]."""
    A, P = _ChannelProducts.apply(torch.stack((k, q), 2), k, G).unbind(2)
    return A, P + torch.diag_embed((q * k).sum(-1))
