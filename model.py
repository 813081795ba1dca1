"""The model: one GPT, one frozen GPTConfig; every variant is a flag of the config.

    variant                 paper      what it does
    oe_m > 0                OE 2.1 A   four hashed bigram/trigram tables added to the token embedding before the first norm
    qk_scale full | masked  OE 2.1 B2  q <- q * exp(q_log) per head and rotary plane, after QK-norm; masked: not in layer 0, not in planes c < D/8
             head           WM 4.6     the same with one q_log per head: a temperature
    wte_route separate      OE 2.1 B3  a second anchor x0_wte = norm(w) joins x0 in every layer
              shared                   the anchor is w / s_{w+e}(eps), with the denominator of x0
    out_skip                OE 2.1 B3  the anchors are added once more, before the final norm

Shapes: B batch, T tokens, C = n_embd, H heads, D = head_dim, V = vocab_size, L = n_layer. `w` is a token's row of wte, `e` its
concatenated rows of the hashed tables, x0 = norm(w + e).

`python model.py` prints the parameter counts of the presets.
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import UserError, cli, derive_seed, make_parser

VE_GATE_CHANNELS = 32            # the value-embedding gate reads this many channels of its input


@dataclass(frozen=True)
class GPTConfig:
    """Everything that shapes the model. Build one with GPTConfig.backbone(depth, ...). Illegal combinations raise UserError."""
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 8192
    sequence_len: int = 2048
    window_pattern: str = "SSSL"   # per layer, repeated: L sees all of T, S the last T/2; the last layer is always L
    rope_base: float = 10_000.0
    softcap: float = 15.0          # logits are softcap * tanh(z / softcap)
    ffn: str = "relu2"
    oe_m: int = 0                  # base modulus of the hashed tables; 0: no tables
    qk_scale: str = "none"
    wte_route: str = "fused"
    out_skip: bool = False
    shared_eps: float = 1e-6

    @classmethod
    def backbone(cls, depth, head_dim=128, **kw):
        """The OE/WM backbone (SPEC 3): width 64 * depth rounded up to a multiple of head_dim."""
        if depth < 1 or head_dim < 1:
            raise UserError(f"depth {depth} and head_dim {head_dim} must be at least 1")
        n_head = -(-64 * depth // head_dim)
        return cls(n_layer=depth, n_head=n_head, n_embd=n_head * head_dim, **kw)

    def __post_init__(self):
        for name, allowed in (("ffn", FFN), ("qk_scale", ("none", "full", "masked", "head")), ("wte_route", ROUTE)):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}")
        if self.n_embd % self.n_head or self.n_embd // self.n_head % 2:
            raise UserError(f"n_embd {self.n_embd} does not split into {self.n_head} heads of even width (rotary planes are pairs)")
        if self.oe_m < 0 or self.oe_m and self.n_embd % 4:
            raise UserError(f"oe_m {self.oe_m} with n_embd {self.n_embd}: oe_m must be 0 (off) or positive, and n_embd a multiple of 4")
        if self.n_embd < VE_GATE_CHANNELS:
            raise UserError(f"n_embd {self.n_embd} is below the {VE_GATE_CHANNELS} channels that the value-embedding gate reads")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise UserError(f"window_pattern {self.window_pattern!r} must be made of S and L")
        if self.sequence_len < 1 or self.vocab_size < 1:
            raise UserError("sequence_len and vocab_size must be at least 1")
        if not self.shared_eps > 0:
            raise UserError(f"shared_eps {self.shared_eps} must be positive (the paper uses 1e-6 and 2^-23)")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    def window(self, i):
        """How far back layer i sees, in tokens: T (everything) or T/2."""
        is_long = i == self.n_layer - 1 or self.window_pattern[i % len(self.window_pattern)] == "L"
        return self.sequence_len if is_long else self.sequence_len // 2

    def has_value_embedding(self, i):
        """Every second layer, the last one included."""
        return i % 2 == (self.n_layer - 1) % 2


# ---- parts ----

def norm(x):
    """Parameter-free RMSNorm over the channels; eps None is the machine epsilon of the accumulation type, 2^-23 in float32."""
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)  # autocast may answer in float32


def rotary_tables(length, head_dim, base, device=None):
    """cos and sin, float32 [length, D/2]; plane c turns by t * base^(-2c/D)."""
    freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), freq)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary embedding in the half-split layout: plane c couples channels c and c + D/2. x is [B, T, H, D], cos and sin [T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Attention(nn.Module):
    """Causal softmax attention with rotary, then QK-norm, an optional gain on q, a window, and optional value embeddings."""

    def __init__(self, cfg, i):
        super().__init__()
        self.n_head, self.head_dim, self.window = cfg.n_head, cfg.head_dim, cfg.window(i)
        self.c_q = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.c_k = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.c_v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.ve_gate = nn.Linear(VE_GATE_CHANNELS, cfg.n_head, bias=False) if cfg.has_value_embedding(i) else None
        planes = 1 if cfg.qk_scale == "head" else cfg.head_dim // 2
        self.q_log = nn.Parameter(torch.zeros(cfg.n_head, planes)) if cfg.qk_scale != "none" else None
        free = torch.arange(cfg.head_dim // 2) >= (cfg.head_dim // 8 if i > 0 else cfg.head_dim)  # masked: the rest stays at exp(0)
        self.register_buffer("q_mask", free.float() if cfg.qk_scale == "masked" else None, persistent=False)

    def q_gain(self):
        """exp(q_log), the same for both channels of a plane: [H, D]; [H, 1] with one temperature per head."""
        log = self.q_log if self.q_mask is None else self.q_log * self.q_mask
        return log.exp().repeat(1, 2 if log.size(1) > 1 else 1)

    def forward(self, x, ve, cos, sin, mask, trace=None):
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.n_head, self.head_dim) for f in (self.c_q, self.c_k, self.c_v))
        gate = None
        if ve is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :VE_GATE_CHANNELS]))         # [B, T, H]
            v = v + gate.unsqueeze(-1) * ve.view(B, T, self.n_head, self.head_dim)
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        if self.q_log is not None:
            q = q * self.q_gain().to(q.dtype)
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), attn_mask=mask, is_causal=mask is None)
        y = y.transpose(1, 2).reshape(B, T, C)
        if trace is not None:
            trace.update(attn_in=x, q=q, k=k, v=v, gate=gate, y=y)
        return self.c_proj(y)


class ReLU2(nn.Module):
    """The backbone's feed-forward layer: c_proj(relu(c_fc(x))^2), hidden width 4C."""

    def __init__(self, cfg):
        super().__init__()
        self.c_fc = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x, trace=None):
        a = self.c_fc(x)
        h = F.relu(a).square()
        if trace is not None:
            trace.update(mlp_in=x, pre=a, hidden=h)
        return self.c_proj(h)


FFN = {"relu2": ReLU2}           # every value: config -> module (x [B, T, C], trace) -> [B, T, C]


class Block(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward, each added to the residual stream."""

    def __init__(self, cfg, i):
        super().__init__()
        self.attn, self.ffn = Attention(cfg, i), FFN[cfg.ffn](cfg)

    def forward(self, x, ve, cos, sin, mask, trace=None):
        x = x + self.attn(norm(x), ve, cos, sin, mask, trace)
        return x + self.ffn(norm(x), trace)


# ---- hashed n-gram tables (OE 2.1, family A) ----

def oe_ids(idx, m, vocab_size):
    """Rows of the four hashed tables for every position: four int64 tensors [B, T] from token ids idx [B, T] (OE 2.1).

    Bigram key x_t + (V+1) x_{t-1} for tables 0 and 1, trigram key plus (V+1)^2 x_{t-2} for 2 and 3, each modulo m + 2j. Left of
    the row stands the sentinel V. int64 holds the keys up to V = 2 million.
    """
    idx, base = idx.long(), vocab_size + 1
    before = F.pad(idx, (2, 0), value=vocab_size)           # before[:, t + 2 - r] is x_{t-r}
    bigram = idx + base * before[:, 1:-1]
    trigram = bigram + base**2 * before[:, :-2]
    return [key % (m + 2 * j) for j, key in enumerate((bigram, bigram, trigram, trigram))]


def _add_rows(table, ids, grad):
    """Add a micro-batch's gradient to the rows it visited, in place, and count the visits."""
    if table.grad is None:
        table.grad, table.visits = torch.zeros_like(table), torch.zeros(len(table), device=table.device)
    ids = ids.flatten()
    table.grad.index_add_(0, ids, grad.reshape(-1, table.size(1)).to(table.dtype))
    table.visits.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))


def oe_lookup(tables, ids):
    """Rows of the tables at ids, concatenated: [B, T, 4 * columns]. Backward adds to table.grad and table.visits by row.

    autograd's own dense gradient would touch every row in every micro-batch (58 million values at depth 6 for a few thousand rows
    that changed), so each gathered block is a leaf whose hook scatters its gradient. `optim.MuonAdamW` clears only those rows.
    """
    parts = []
    for table, rows in zip(tables, ids):
        part = F.embedding(rows, table.detach())
        if torch.is_grad_enabled() and table.requires_grad:
            part.requires_grad_().register_hook(partial(_add_rows, table, rows))
        parts.append(part)
    return torch.cat(parts, dim=-1)


# ---- the unigram anchor of residual routing (OE 2.1, tier 3): (w, w + e, eps) -> [B, T, C] or None ----

def _shared_denominator(w, u, eps):
    return (w.float() * torch.rsqrt(u.float().square().mean(-1, keepdim=True) + eps)).to(w.dtype)


ROUTE = {"fused": lambda w, u, eps: None, "separate": lambda w, u, eps: norm(w), "shared": _shared_denominator}


# ---- head and loss ----

LOSS_CHUNK_ELEMENTS = 1 << 20    # logits held at once by the chunked loss: 4 MiB in float32, which stays in a CPU's cache


def capped_logits(x, weight, softcap):
    """softcap * tanh(x weight^T / softcap), float32 (float64 for float64 inputs). x is [..., C], weight [V, C]."""
    z = x @ weight.to(x.dtype).t()
    z = z if z.dtype == torch.float64 else z.float()
    return softcap * torch.tanh(z / softcap) if softcap else z


def plain_loss(x, weight, targets, softcap=0.0, reduction="mean"):
    """Cross-entropy over the vocabulary with all logits at once: the reference of chunked_loss."""
    logits = capped_logits(x, weight, softcap)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction=reduction)
    return loss.view_as(targets) if reduction == "none" else loss


class _ChunkedLoss(torch.autograd.Function):
    """Per-token nats [N] times a per-token scale; the gradient is computed chunk by chunk in the forward pass.

    Linear, softcap and cross-entropy are linear in the upstream gradient once the logits are known, so for one scalar loss the
    gradients can be finished while a chunk's logits are still in cache, and scaled in backward.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, softcap, scale, chunk):
        need_x, need_w = ctx.needs_input_grad[:2]
        w = weight.detach().to(x.dtype)
        acc = torch.float64 if x.dtype == torch.float64 else torch.float32
        nats = torch.empty(len(x), dtype=acc, device=x.device)
        dx = torch.empty_like(x) if need_x else None
        dw = torch.zeros(weight.shape, dtype=acc, device=x.device) if need_w else None
        for i in range(0, len(x), chunk):
            part, y = x[i:i + chunk], targets[i:i + chunk]
            picked, keep = y.clamp_min(0).unsqueeze(1), (y >= 0).to(acc)
            if softcap:
                t = (part @ w.t()).to(acc).div_(softcap).tanh_()
                logp = torch.log_softmax(t * softcap, dim=-1)
            else:
                logp = torch.log_softmax((part @ w.t()).to(acc), dim=-1)
            nats[i:i + chunk] = -logp.gather(1, picked).squeeze(1) * keep
            if not (need_x or need_w):
                continue
            p = logp.exp_().scatter_add_(1, picked, -torch.ones_like(picked, dtype=acc)).mul_((keep * scale[i:i + chunk]).unsqueeze(1))
            if softcap:
                p.addcmul_(t.square_(), p, value=-1)       # times 1 - tanh^2, the slope of the cap
            p = p.to(x.dtype)
            if need_x:
                torch.mm(p, w, out=dx[i:i + chunk])
            if need_w:
                dw.addmm_(p.t(), part) if acc == x.dtype else dw.add_(p.t() @ part)
        ctx.save_for_backward(dx, dw if dw is None else dw.to(weight.dtype))
        return (nats * scale).sum(), nats

    @staticmethod
    def backward(ctx, up, _):
        dx, dw = ctx.saved_tensors
        return None if dx is None else dx * up.to(dx.dtype), None if dw is None else dw * up.to(dw.dtype), None, None, None, None


def chunked_loss(x, weight, targets, softcap=0.0, reduction="mean", chunk=None):
    """Cross-entropy of capped logits that never holds more than `chunk` tokens x V logits, in training too.

    x [..., C], weight [V, C], targets [...] int64 with -1 ignored. reduction: mean (over the targets that count), sum, or none
    ([...] nats, 0 where ignored). Equal to plain_loss; a test compares values and gradients in float64.
    """
    flat, y = x.reshape(-1, x.size(-1)), targets.reshape(-1)
    if not torch.is_grad_enabled():
        flat, weight = flat.detach(), weight.detach()  # else the Function below would still compute their gradients
    chunk = chunk or max(1, LOSS_CHUNK_ELEMENTS // weight.size(0) * (16 if x.is_cuda else 1))
    if reduction == "none" and (flat.requires_grad or weight.requires_grad):
        # each token has its own upstream gradient, unknown until backward: recompute a chunk's logits there
        from torch.utils.checkpoint import checkpoint
        parts = [checkpoint(plain_loss, flat[i:i + chunk], weight, y[i:i + chunk], softcap, "none", use_reentrant=False)
                 for i in range(0, len(flat), chunk)]
        return torch.cat(parts).view(targets.shape)
    n = (y >= 0).sum() if reduction == "mean" else torch.ones((), device=x.device)
    scale = (1 / n.to(torch.float64 if flat.dtype == torch.float64 else torch.float32)).expand(len(flat))
    total, nats = _ChunkedLoss.apply(flat, weight, y, softcap, scale, chunk)
    return nats.view(targets.shape) if reduction == "none" else total


# ---- the model ----

class GPT(nn.Module):
    """The language model. `GPT(config).init_weights(seed)`; it can be built under torch.device("meta") to count parameters."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(cfg.vocab_size, cfg.n_embd)
                                           for i in range(cfg.n_layer) if cfg.has_value_embedding(i)})
        self.blocks = nn.ModuleList([Block(cfg, i) for i in range(cfg.n_layer)])
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(cfg.n_layer))
        self.x0_lambdas = nn.Parameter(torch.full((cfg.n_layer,), 0.1))
        self.oe_tables, self.wte_lambdas, self.out_lambdas = None, None, None
        if cfg.oe_m:
            self.oe_tables = nn.ParameterList([torch.zeros(cfg.oe_m + 2 * j, cfg.n_embd // 4) for j in range(4)])
        if cfg.wte_route != "fused":
            self.wte_lambdas = nn.Parameter(torch.zeros(cfg.n_layer))
        if cfg.out_skip:
            self.out_lambdas = nn.Parameter(torch.zeros(1 if cfg.wte_route == "fused" else 2))
        cos, sin = rotary_tables(cfg.sequence_len, cfg.head_dim, cfg.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def roles(self):
        """Yield (name, role, parameter) for every parameter once; the optimizer's groups and the initial draws go by role."""
        for name, p in self.named_parameters():
            top, leaf = name.split(".")[0], name.split(".")[-1]
            if top in ("wte", "value_embeds", "lm_head", "resid_lambdas", "x0_lambdas", "wte_lambdas", "out_lambdas"):
                role = top
            elif top == "oe_tables":
                role = "oe"
            elif top == "blocks":
                role = "q_log" if leaf == "q_log" else "matrix"
            else:
                raise KeyError(f"parameter {name} has no role")
            yield name, role, p

    @torch.no_grad()
    def init_weights(self, seed):
        """Draw every tensor from a generator seeded with (seed, its own name), on the CPU in float32: two variants share what they share."""
        bound = (3 / self.cfg.n_embd) ** 0.5
        for name, role, p in self.roles():
            gen = torch.Generator().manual_seed(derive_seed(seed, name))
            if role == "wte":
                value = torch.randn(p.shape, generator=gen)
            elif role == "lm_head":
                value = torch.randn(p.shape, generator=gen) * 0.001
            elif role == "value_embeds" or role == "matrix" and "c_proj" not in name and "ve_gate" not in name:
                value = torch.rand(p.shape, generator=gen) * (2 * bound) - bound
            else:  # projections and gates start at 0; the lambdas at 1 and 0.1
                value = torch.full(p.shape, {"resid_lambdas": 1.0, "x0_lambdas": 0.1}.get(role, 0.0))
            p.copy_(value)
        return self

    def set_dtype(self, dtype):
        """Precision of a run: bfloat16 keeps the token, value and hashed tables in it and the rest in float32; float64 is all float64."""
        if dtype == torch.float64:
            return self.double()
        for _, role, p in self.roles():
            if role in ("wte", "value_embeds", "oe"):
                p.data = p.data.to(dtype)
        return self

    def num_params(self):
        """{"backbone", "oe", "total"}: the OE paper's scaling parameters, its tables, and their sum."""
        count = {"backbone": 0, "oe": 0}
        for _, role, p in self.roles():
            count["oe" if role == "oe" else "backbone"] += p.numel()
        return {**count, "total": sum(count.values())}

    def _masks(self, T, device):
        """Boolean [T, T] attention masks by window; None where plain causal attention says the same."""
        masks = {}
        for window in {block.attn.window for block in self.blocks}:
            age = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
            masks[window] = None if window >= T - 1 else (age >= 0) & (age <= window)
        return masks

    def trunk(self, idx, w, e, trace=None):
        """From embedding rows w (and hashed rows e, or None), all [B, T, C], to the state before the final norm."""
        cfg, T = self.cfg, idx.size(1)
        cos, sin, masks = self.cos[:T], self.sin[:T], self._masks(T, idx.device)
        u = w if e is None else w + e
        x = x0 = norm(u)
        anchor = ROUTE[cfg.wte_route](w, u, cfg.shared_eps)
        layers = [] if trace is None else trace.setdefault("layers", [{} for _ in self.blocks])
        for i, block in enumerate(self.blocks):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            if anchor is not None:
                x = x + self.wte_lambdas[i] * anchor
            ve = self.value_embeds[str(i)](idx) if cfg.has_value_embedding(i) else None
            x = block(x, ve, cos, sin, masks[block.attn.window], layers[i] if layers else None)
        if self.out_lambdas is not None:
            x = x + self.out_lambdas[0] * x0
            x = x if anchor is None else x + self.out_lambdas[1] * anchor
        if trace is not None:
            trace.update(wte=w, oe=e, x0=x0, anchor=anchor, x_L=x)
        return x

    def forward(self, idx, targets=None, reduction="mean", trace=None):
        """Logits [B, T, V] (float32) of token ids idx [B, T], or with targets [B, T] (-1 ignored) the loss in nats.

        reduction: mean | sum (scalar), none ([B, T], 0 where ignored). A dict given as `trace` receives what the delayed rules
        read: wte, oe, x0, anchor, x_L, x_final, logits, and per layer attn_in, q, k (after norm and gain), v, gate, y, mlp_in, pre,
        hidden. ValueError when a row is longer than config.sequence_len.
        """
        if idx.size(1) > self.cfg.sequence_len:
            raise ValueError(f"{idx.size(1)} tokens in a row, but the model was built for {self.cfg.sequence_len}")
        e = None
        if self.oe_tables is not None:
            e = oe_lookup(self.oe_tables, oe_ids(idx, self.cfg.oe_m, self.cfg.vocab_size))
        x = self.trunk(idx, self.wte(idx), e, trace)
        x_final = norm(x)
        if trace is not None or targets is None:
            logits = capped_logits(x_final, self.lm_head.weight, self.cfg.softcap)
            if trace is not None:
                trace.update(x_final=x_final, logits=logits)
            if targets is None:
                return logits
        return chunked_loss(x_final, self.lm_head.weight, targets, self.cfg.softcap, reduction)


PRESETS = {  # what `python model.py` counts
    "depth 6": dict(depth=6), "depth 8": dict(depth=8), "depth 6, head_dim 64": dict(depth=6, head_dim=64),
    "depth 6 + OE": dict(depth=6, oe_m=150_855), "depth 8 + OE": dict(depth=8, oe_m=150_855),
    "depth 6 + OE + q scale": dict(depth=6, oe_m=150_855, qk_scale="full"),
    "depth 8 + OE + q scale": dict(depth=8, oe_m=150_855, qk_scale="full"),
    "depth 6 + OE + q scale + route + skip": dict(depth=6, oe_m=150_855, qk_scale="full", wte_route="separate", out_skip=True),
    "depth 8 + OE + q scale + route + skip": dict(depth=8, oe_m=150_855, qk_scale="full", wte_route="separate", out_skip=True),
    "laptop (depth 4, head_dim 64)": dict(depth=4, head_dim=64),
}


def main(argv=None):
    make_parser(__doc__).parse_args(argv)
    print(f"{'preset':40} {'width':>5} {'heads':>5} {'backbone':>12} {'oe':>12} {'total':>12}")
    for name, kw in PRESETS.items():
        cfg = GPTConfig.backbone(**kw)
        with torch.device("meta"):
            n = GPT(cfg).num_params()
        print(f"{name:40} {cfg.n_embd:5} {cfg.n_head:5} {n['backbone']:12,} {n['oe']:12,} {n['total']:12,}")


if __name__ == "__main__":
    cli(main)
