"""The loss of the head: capped logits and cross-entropy, whole or in chunks; running averages.

Shapes: x [..., C] final states, weight [V, C], targets [...] int64 with -1 ignored.
"""
import torch
import torch.nn.functional as F

# logits held at once by the chunked loss: 4 MiB in float32, which stays in a CPU's cache
LOSS_CHUNK_ELEMENTS = 1 << 20
FAST, SLOW = 0.9, 0.99   # decays of the two averages of a loss (ABL 4, 5)


def capped_logits(x, weight, softcap):
    """softcap * tanh(x weight^T / softcap) [..., V]; softcap 0: x weight^T.

    float32, or float64 for float64 inputs.
    """
    z = x @ weight.to(x.dtype).t()
    z = z if z.dtype == torch.float64 else z.float()
    return softcap * torch.tanh(z / softcap) if softcap else z


def plain_loss(x, weight, targets, softcap=0.0, reduction="mean"):
    """Cross-entropy over the vocabulary, all logits at once: the reference of chunked_loss."""
    z = capped_logits(x, weight, softcap).flatten(0, -2)
    loss = F.cross_entropy(z, targets.flatten(), ignore_index=-1, reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


class _ChunkedLoss(torch.autograd.Function):
    """(sum of nats times scale, nats [N]); the gradients, too, while a chunk's logits are in cache.

    Backward only scales them.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, scale, chunk):
        need_x, need_w = ctx.needs_input_grad[:2]
        w = weight.detach().to(x.dtype)
        acc = torch.promote_types(x.dtype, torch.float32)
        nats = torch.empty(len(x), dtype=acc, device=x.device)
        dx = torch.empty_like(x) if need_x else None
        dw = torch.zeros(weight.shape, dtype=acc, device=x.device) if need_w else None
        for i in range(0, len(x), chunk):
            part, y = x[i:i + chunk], targets[i:i + chunk]
            picked, keep = y.clamp_min(0).unsqueeze(1), (y >= 0).to(acc)
            z = (part @ w.t()).to(acc)
            if softcap:
                z.div_(softcap).tanh_()
            logp = torch.log_softmax(z * softcap if softcap else z, dim=-1)
            nats[i:i + chunk] = -logp.gather(1, picked).squeeze(1) * keep
            if not (need_x or need_w):
                continue
            # the slope in the logits: softmax - onehot, times the scale, 0 where ignored
            p = logp.exp_().scatter_add_(1, picked, -torch.ones_like(picked, dtype=acc))
            p.mul_((keep * scale[i:i + chunk]).unsqueeze(1))
            if softcap:
                p.addcmul_(z.square_(), p, value=-1)  # times 1 - tanh^2, the slope of the cap
            p = p.to(x.dtype)
            if need_x:
                torch.mm(p, w, out=dx[i:i + chunk])
            if need_w:
                dw.addmm_(p.t(), part) if acc == x.dtype else dw.add_(p.t() @ part)
        ctx.save_for_backward(dx, dw if dw is None else dw.to(weight.dtype))
        return (nats * scale).sum(), nats

    @staticmethod
    def backward(ctx, up, _):
        dx, dw = (None if z is None else z * up.to(z.dtype) for z in ctx.saved_tensors)
        return dx, dw, None, None, None, None


def chunked_loss(x, weight, targets, softcap=0.0, reduction="mean", chunk=None, with_nats=False):
    """plain_loss, in value and gradients, that holds no more than `chunk` tokens x V logits.

    reduction: mean (over the targets that count), sum, or none ([...] nats, 0 where ignored).
    with_nats: (loss, detached nats [...]).
    """
    flat, y = x.reshape(-1, x.size(-1)), targets.reshape(-1)
    if not torch.is_grad_enabled():
        # else their gradients would still be computed
        flat, weight = flat.detach(), weight.detach()
    chunk = chunk or max(1, LOSS_CHUNK_ELEMENTS // weight.size(0) * (16 if x.is_cuda else 1))
    if reduction == "none" and (flat.requires_grad or weight.requires_grad):
        nats = _recomputed_nats(flat, weight, y, softcap, chunk)
    else:
        n = (y >= 0).sum() if reduction == "mean" else torch.ones((), device=x.device)
        scale = (1 / n.to(torch.promote_types(x.dtype, torch.float32))).expand(len(flat))
        total, nats = _ChunkedLoss.apply(flat, weight, y, softcap, scale, chunk)
    nats = nats.view(targets.shape)
    loss = nats if reduction == "none" else total
    return (loss, nats.detach()) if with_nats else loss


def _recomputed_nats(x, weight, y, softcap, chunk):
    """Nats [N] with upstream gradients of their own: backward makes the logits again."""
    from torch.utils.checkpoint import checkpoint
    return torch.cat([checkpoint(plain_loss, x[i:i + chunk], weight, y[i:i + chunk], softcap,
                                 "none", use_reentrant=False) for i in range(0, len(x), chunk)])


@torch.no_grad()
def update_averages_(fast, slow, mean, here, first):
    """Move the fast and slow averages of a loss towards `mean`, in place; all of one shape.

    here (a loss was seen) and first (the averages start at it) are boolean.
    """
    for average, decay in ((fast, FAST), (slow, SLOW)):
        moved = decay * average + (1 - decay) * mean
        average.copy_(torch.where(first, mean, torch.where(here, moved, average)))
