"""The model: one GPT, one frozen GPTConfig; every variant is a flag of the config.

Two sizes to start from, with every flag: GPTConfig.backbone(depth) and GPTConfig.modern().

    variant              paper      what it does
    oe_m > 0             OE 2.1 A   four hashed bigram/trigram tables join the token embedding
    qk_scale full        OE 2.1 B2  q <- q * exp(q_log) per head and rotary plane, after QK-norm
        masked                      the same, not in layer 0 nor in planes c < D/8
        head             WM 4.6     the same with one q_log per head: a temperature
    wte_route separate   OE 2.1 B3  a second anchor x0_wte = norm(w) joins x0 in every layer
        shared                      the anchor is w / s_{w+e}(eps), the denominator that of x0
    out_skip             OE 2.1 B3  the anchors are added once more, before the final norm
    norm rms_affine      ABL 1      RMSNorm with weights; rms has none; layer: LayerNorm
    pos learned          ABL 17     a vector per position joins the embedding; none: no positions
        alibi            ABL 20     logits minus slope_h * distance (Press et al. 2021)
        hard_alibi                  the first half of the heads see 1, 2, 3, ... tokens, the rest
                                    everything (Jelassi et al. 2024)
    attn linear          ABL 20     fast weights (fast_weights.py), q and k through elu + 1
        delta            ABL 17     q and k through SiLU, to length 1; b = sigmoid(c_beta(x))
        gated_delta      ABL 17     and a = sigmoid(c_decay(x)) per key channel;
                                    gated_delta_scalar (ABL 19): per head
    ffn relu             ABL 1      c_proj(relu(c_fc(x))); relu2: relu(x)^2, the backbone's
        swiglu           ABL 1      c_proj(silu(c_gate(x)) * c_fc(x))
        moe              ABL 5-7    a linear router sends each token to the top k of E SwiGLU
                                    experts (Switch)
    residual highway     ABL 2      x <- (1 - g) x + g f(norm(x)), g = sigmoid(gate(x)) per channel
        highway_scalar   ABL 2, 16  the same with one g per token (Srivastava et al. 2015)
    history              ABL 3      x_t += c_proj(mean over s <= t of c_fc(norm(x_s))) in mid-stack,
                                    a causal summary (Schmidhuber 1992)

A new value of an axis is a line in its table (FFN, NORM, ATTN, RESID, ROUTE), from which the
scripts take their choices: "gelu": dense(F.gelu) in FFN is all that a new activation needs.

Shapes: B batch, T tokens, C = n_embd, H heads, D = head_dim, V = vocab_size, L = n_layer,
E experts, N = B * T. `w` is a token's row of wte, `e` its concatenated rows of the hashed tables.
"""
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import UserError, derive_seed
from fast_weights import delta_chunk, delta_recurrent, linear_chunk, linear_recurrent
from loss import capped_logits, chunked_loss, update_averages_

VE_GATE_CHANNELS = 32        # the value-embedding gate reads this many channels of its input
BALANCE_COEFFICIENT = 0.01   # of the routers' balance losses (ABL 5)
HIGHWAY_BIAS = -2.0          # carry first, as in the Highway paper
NORMAL_STD = 0.02            # of init "normal", as in GPT-2, without its scaling by depth


@dataclass(frozen=True)
class GPTConfig:
    """Everything that shapes the model; the defaults are the backbone's.

    Combinations that cannot be, and flags that would do nothing, raise UserError.
    """
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 8192
    sequence_len: int = 2048
    # per layer, repeated: L sees all of T, S the last T/2; the last layer is an L
    window_pattern: str = "SSSL"
    rope_base: float = 10_000.0
    softcap: float = 15.0          # logits are softcap * tanh(z / softcap); 0: as they are
    ffn: str = "relu2"
    oe_m: int = 0                  # base modulus of the hashed tables; 0: no tables
    qk_scale: str = "none"
    wte_route: str = "fused"
    out_skip: bool = False
    shared_eps: float = 1e-6
    norm: str = "rms"
    pos: str = "rope"
    attn: str = "softmax"
    residual: str = "plain"
    ffn_hidden: int = 0            # 0: int(8/3 C) with a gate (swiglu, moe), 4C otherwise
    history: bool = False
    tie: bool = False              # the head is wte
    bias: bool = False             # of linear layers and LayerNorm; gates and decays have theirs
    dropout: float = 0.0           # of embeddings, attention weights and what the layers add
    qk_norm: bool = True
    embed_norm: bool = True        # x0 = norm(w + e), otherwise x0 = w + e
    x0_skip: bool = True           # x <- resid_lambda x + x0_lambda x0 before every layer
    value_embeds: bool = True
    init: str = "uniform"          # or normal
    moe_experts: int = 4
    moe_top_k: int = 1
    moe_expert_hidden: str = "full"   # an expert is as wide as the dense layer; split: its share
    moe_router: str = "learned"       # frozen at its initial draw: no gradient, no balance loss
    router_progress: float = 0.0      # strength of the bias towards experts whose loss falls
    fast_weight_impl: str = "chunk"   # or recurrent, the reference
    norm_eps: Optional[float] = None  # of norms without parameters; None: see norm()

    @classmethod
    def backbone(cls, depth, head_dim=128, **kw):
        """The OE/WM model: width 64 * depth rounded up to a multiple of head_dim."""
        if depth < 1 or head_dim < 1:
            raise UserError(f"depth {depth} and head_dim {head_dim} must be at least 1")
        n_head = -(-64 * depth // head_dim)
        return cls(n_layer=depth, n_head=n_head, n_embd=n_head * head_dim, **kw)

    @classmethod
    def modern(cls, **kw):
        """The ablation model: rotary, RMSNorm with weights, SwiGLU, tied head, dropout 0.2."""
        return cls(**{**MODERN, **kw})

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"{name} {value!r} is unknown; choose one of {', '.join(allowed)}")
        sizes = ("n_layer", "n_head", "n_embd", "sequence_len", "vocab_size")
        if min(getattr(self, name) for name in sizes) < 1:
            raise UserError(f"{', '.join(sizes)} must be at least 1")
        for broken, reason in chain(self._sizes(), self._conflicts()):
            if broken:
                raise UserError(reason.format(**vars(self), hidden=self.hidden))

    def _sizes(self):
        """Yield (is it broken?, what to say) of every flag; {names} stand for the flags' values."""
        odd, moe = self.n_embd // self.n_head % 2, self.ffn == "moe"
        heads = "n_embd {n_embd} does not split into {n_head} heads"
        yield (not self.window_pattern or set(self.window_pattern) - set("SL"),
               "window_pattern {window_pattern!r} must be made of S and L")
        yield self.n_embd % self.n_head, heads
        yield self.pos == "rope" and odd, heads + " of even width (rotary planes are pairs)"
        yield (self.oe_m < 0 or self.oe_m and self.n_embd % 4,
               "oe_m {oe_m} must be 0 (off) or positive, and n_embd {n_embd} a multiple of 4")
        yield (self.value_embeds and self.n_embd < VE_GATE_CHANNELS,
               f"value_embeds needs an n_embd of {VE_GATE_CHANNELS} or more, not {{n_embd}}")
        yield not self.shared_eps > 0, "shared_eps {shared_eps} must be positive"
        yield (self.norm_eps is not None and not self.norm_eps >= 0,
               "norm_eps {norm_eps} must be at least 0")
        yield not 0 <= self.dropout < 1, "dropout {dropout} must be at least 0 and below 1"
        yield self.ffn_hidden < 0, "ffn_hidden {ffn_hidden} must be 0 (its own width) or positive"
        yield (moe and not 1 <= self.moe_top_k <= self.moe_experts,
               "moe_top_k {moe_top_k} must be 1 to moe_experts {moe_experts}")
        yield (moe and self.moe_expert_hidden == "split" and self.hidden % self.moe_experts,
               "the hidden width {hidden} does not split into {moe_experts} experts")

    def _conflicts(self):
        """The same of every pair of flags."""
        moe = {k: getattr(self, k) for k in MOE_DEFAULTS}
        fast, rope = self.attn != "softmax", self.pos == "rope"
        yield self.ffn != "moe" and moe != MOE_DEFAULTS, f"{', '.join(MOE_DEFAULTS)} need ffn moe"
        yield (fast and self.pos not in ("learned", "none"),
               "attn {attn} has no logits for pos {pos} to act on; use learned or none")
        yield fast and self.qk_norm, "attn {attn} maps q and k itself; set qk_norm to False"
        yield (fast and self.qk_scale != "none",
               "attn {attn} has no logits for qk_scale {qk_scale} to scale")
        yield (fast and "S" in self.window_pattern,
               "attn {attn} has no window; set window_pattern to L")
        yield (not fast and self.fast_weight_impl != "chunk",
               "fast_weight_impl {fast_weight_impl} needs attn linear, delta or gated")
        yield (self.pos == "hard_alibi" and self.n_head < 2,
               "hard_alibi needs two heads: the first half have a window")
        yield self.rope_base != 10_000.0 and not rope, "rope_base {rope_base} needs pos rope"
        yield (self.router_progress and self.moe_experts == 1,
               "router_progress needs two experts to choose from")
        yield (self.qk_scale in ("full", "masked") and not rope,
               "qk_scale {qk_scale} scales rotary planes and needs pos rope; head does not")
        yield (self.wte_route != "fused" and not (self.embed_norm and self.x0_skip),
               "wte_route {wte_route} needs embed_norm and x0_skip: its anchor is a part of x0")
        yield (self.norm_eps is not None
               and self.norm != "rms" and not self.qk_norm and not self.embed_norm,
               "norm_eps {norm_eps} needs norm rms, qk_norm or embed_norm")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def hidden(self):
        """Hidden width of a dense feed-forward layer; a gate is a third matrix, paid from it."""
        has_gate = getattr(FFN[self.ffn], "gated", False)
        return self.ffn_hidden or (8 * self.n_embd // 3 if has_gate else 4 * self.n_embd)

    def window(self, i):
        """How far back layer i sees, in tokens: T (everything) or T/2."""
        is_last = i == self.n_layer - 1
        is_long = is_last or self.window_pattern[i % len(self.window_pattern)] == "L"
        return self.sequence_len if is_long else self.sequence_len // 2

    def has_value_embedding(self, i):
        """Every second layer, the last one included."""
        return self.value_embeds and i % 2 == (self.n_layer - 1) % 2


# ---- norms: config -> (x -> x) ----

def norm(x, eps=None):
    """RMSNorm of x [..., C] over its channels, without parameters, in x's dtype.

    eps None is the machine epsilon of the dtype that the sum is taken in: 2^-23 in float32.
    """
    return F.rms_norm(x, (x.size(-1),), eps=eps).to(x.dtype)  # autocast may answer in float32


class RMSNorm(nn.Module):
    """norm() times a weight per channel."""

    def __init__(self, cfg):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cfg.n_embd))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight).to(x.dtype)


NORM = {"rms": lambda cfg: partial(norm, eps=cfg.norm_eps), "rms_affine": RMSNorm,
        "layer": lambda cfg: nn.LayerNorm(cfg.n_embd, bias=cfg.bias)}


# ---- positions ----

POS = ("rope", "learned", "none", "alibi", "hard_alibi")


def rotary_tables(length, head_dim, base):
    """cos and sin, float32 [length, D/2]; plane c turns by t * base^(-2c/D)."""
    freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), freq)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x [B, T, H, D] turned by cos and sin [T, D/2]; plane c couples channels c and c + D/2."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def alibi_slopes(n_head):
    """Slopes [H] of ALiBi: 2^(-8h/n), h = 1..n, for n the power of two up to H."""
    n = 1 << (n_head.bit_length() - 1)
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)]
    # the other heads take every second slope of 2n heads
    slopes += [2 ** (-4 * h / n) for h in range(1, 2 * n, 2)]
    return torch.tensor(slopes[:n_head])


def alibi_bias(pos, n_head, age):
    """What positions add to the logits, float32 [H, T, T]; age [T, T]: query minus key position."""
    if pos == "alibi":
        return -alibi_slopes(n_head).to(age.device)[:, None, None] * age
    reach = torch.arange(1, n_head + 1, device=age.device)[:, None, None].expand(-1, *age.shape)
    hard = (reach <= n_head // 2) & (age >= reach)
    return torch.zeros(hard.shape, device=age.device).masked_fill_(hard, -torch.inf)


# ---- dropout ----

def drop(x, p):
    """F.dropout(x, p), on a CPU from 16 random bits an element: torch's take a sixth of a step."""
    if x.device.type != "cpu" or not p:
        return F.dropout(x, p)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2**63, None)
    bits = draws.view(torch.int16)[:x.numel()].view(x.shape)
    level = round(p * 2**16)
    return x * (bits >= level - 2**15).to(x.dtype).mul_(2**16 / (2**16 - level))


class Dropout(nn.Dropout):
    """drop() while training."""

    def forward(self, x):
        return drop(x, self.p) if self.p and self.training else x


# ---- attention: config, layer -> module (x [B, T, C], ve, cos, sin, mask, trace) -> [B, T, C] ----

QK_SCALE = ("none", "full", "masked", "head")


def attend(q, k, v, mask, p=0.0):
    """Softmax attention [B, H, T, D] of q, k, v [B, H, T, D].

    mask: None (causal), boolean or float [T, T] or [H, T, T]. p of the weights are dropped.
    """
    if not p or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, mask, p, is_causal=mask is None)
    if mask is None:
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    z = q @ k.mT * q.size(-1) ** -0.5
    z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask
    return drop(z.softmax(-1), p) @ v


class Attention(nn.Module):
    """Causal softmax attention: rotary, then QK-norm, and what the config adds."""

    def __init__(self, cfg, i):
        super().__init__()
        C, H, D = cfg.n_embd, cfg.n_head, cfg.head_dim
        self.n_head, self.head_dim, self.window = H, D, cfg.window(i)
        self.qk_norm, self.norm_eps = cfg.qk_norm, cfg.norm_eps
        self.p_drop, self.drop = cfg.dropout, Dropout(cfg.dropout)
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(C, C, cfg.bias) for _ in range(4))
        self.ve_gate, self.q_log = None, None
        if cfg.has_value_embedding(i):
            self.ve_gate = nn.Linear(VE_GATE_CHANNELS, H, bias=False)
        if cfg.qk_scale != "none":
            planes = 1 if cfg.qk_scale == "head" else D // 2
            self.q_log = nn.Parameter(torch.zeros(H, planes))
        # masked planes stay at exp(0): those that turn fast, and all of layer 0
        free = torch.arange(D // 2) >= (D // 8 if i > 0 else D)
        q_mask = free.float() if cfg.qk_scale == "masked" else None
        self.register_buffer("q_mask", q_mask, persistent=False)

    def q_gain(self):
        """exp(q_log): [H, D], alike for both channels of a plane, or [H, 1]: a temperature."""
        log = self.q_log if self.q_mask is None else self.q_log * self.q_mask
        return log.exp().repeat(1, 2 if log.size(1) > 1 else 1)

    def mix(self, x, q, k, v, cos, sin, mask):
        """(y [B, T, H, D], what the trace shows of q and k) from q, k, v [B, T, H, D]."""
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.qk_norm:
            q, k = norm(q, self.norm_eps), norm(k, self.norm_eps)
        if self.q_log is not None:
            q = q * self.q_gain().to(q.dtype)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        p = self.p_drop if self.training else 0.0
        y = attend(*(z.transpose(1, 2) for z in (q, k, v)), mask, p)
        return y.transpose(1, 2), dict(q=q, k=k)

    def forward(self, x, ve, cos, sin, mask, trace=None):
        B, T, C = x.shape
        heads = (B, T, self.n_head, self.head_dim)
        q, k, v = (f(x).view(heads) for f in (self.c_q, self.c_k, self.c_v))
        gate = None
        if ve is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :VE_GATE_CHANNELS]))  # [B, T, H]
            v = v + gate.unsqueeze(-1) * ve.view(heads)
        y, seen = self.mix(x, q, k, v, cos, sin, mask)
        y = y.reshape(B, T, C)
        if trace is not None:
            trace.update(attn_in=x, v=v, gate=gate, y=y, **seen)
        return self.drop(self.c_proj(y))


# impl -> (linear, delta), with equal results
FAST_WEIGHT_IMPL = {"chunk": (linear_chunk, delta_chunk),
                    "recurrent": (linear_recurrent, delta_recurrent)}


def elu_plus_one(z):
    """elu(z) + 1 without the cancellation: z + 1 above 0, e^z below."""
    return F.relu(z) + z.clamp_max(0).exp()


class FastWeights(Attention):
    """Attention with a fast-weight memory for its softmax (fast_weights.py)."""

    def __init__(self, cfg, i):
        super().__init__(cfg, i)
        self.linear, self.delta = FAST_WEIGHT_IMPL[cfg.fast_weight_impl]
        gates = {"gated_delta": cfg.n_embd, "gated_delta_scalar": cfg.n_head}.get(cfg.attn)
        self.c_beta = nn.Linear(cfg.n_embd, cfg.n_head) if cfg.attn != "linear" else None
        self.c_decay = nn.Linear(cfg.n_embd, gates) if gates else None

    def mix(self, x, q, k, v, cos, sin, mask):
        # products of up to T decays and the triangular solve want float32 even under autocast
        wide = torch.promote_types(x.dtype, torch.float32)
        seen = {}
        if self.c_beta is not None:
            seen["beta"] = torch.sigmoid(self.c_beta(x).to(wide))  # [B, T, H]
        if self.c_decay is not None:
            z = self.c_decay(x).to(wide)
            if z.size(-1) != self.n_head:
                z = z.unflatten(-1, (self.n_head, -1))
            seen["log_decay"] = F.logsigmoid(z)  # [B, T, H(, D)]
        with torch.autocast(x.device.type, enabled=False):
            if self.c_beta is None:
                rule, q, k = self.linear, elu_plus_one(q.to(wide)), elu_plus_one(k.to(wide))
            else:
                rule = self.delta
                q, k = (F.normalize(F.silu(z.to(wide)), dim=-1) for z in (q, k))
            by_head = (z.to(wide).transpose(1, 2) for z in (q, k, v, *seen.values()))
            y = rule(*by_head)  # [B, H, T, D]
        return y.transpose(1, 2).to(v.dtype), dict(q=q, k=k, **seen)


ATTN = {"softmax": Attention, "linear": FastWeights, "delta": FastWeights,
        "gated_delta": FastWeights, "gated_delta_scalar": FastWeights}


# ---- feed-forward layers: config -> module (x [B, T, C], trace) -> [B, T, C] ----

class MLP(nn.Module):
    """c_proj(act(c_fc(x))), or with a gate c_proj(act(c_gate(x)) * c_fc(x))."""

    def __init__(self, cfg, act, gated=False):
        super().__init__()
        self.act, self.drop = act, Dropout(cfg.dropout)
        self.c_fc = nn.Linear(cfg.n_embd, cfg.hidden, bias=cfg.bias)
        self.c_gate = nn.Linear(cfg.n_embd, cfg.hidden, bias=cfg.bias) if gated else None
        self.c_proj = nn.Linear(cfg.hidden, cfg.n_embd, bias=cfg.bias)

    def forward(self, x, trace=None):
        a = self.c_fc(x)
        h = self.act(a) if self.c_gate is None else self.act(self.c_gate(x)) * a
        if trace is not None:
            trace.update(mlp_in=x, pre=a, hidden=h)
        return self.drop(self.c_proj(h))


def dense(act):
    """The entry of FFN for an MLP with this activation."""
    return partial(MLP, act=act)


def gated(act):
    """The entry of FFN for an MLP with this activation on its gate."""
    entry = partial(MLP, act=act, gated=True)
    entry.gated = True   # GPTConfig.hidden asks
    return entry


def relu2(x):
    """relu(x)^2."""
    return F.relu(x).square()


MOE_HIDDEN, MOE_ROUTER = ("full", "split"), ("learned", "frozen")


class Experts(nn.Module):
    """E linear layers in one tensor [E, out, in]."""

    def __init__(self, n, n_in, n_out, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n, n_out)) if bias else None

    def forward(self, x, e):
        return F.linear(x, self.weight[e], None if self.bias is None else self.bias[e])


class MoE(nn.Module):
    """A token's k most probable of E SwiGLU experts, weighted by these probabilities as they are.

    After a training forward `balance` is E sum_e f_e P_e: share of assignments, mean probability.
    """
    gated = True

    def __init__(self, cfg):
        super().__init__()
        n = cfg.moe_experts
        width = cfg.hidden // n if cfg.moe_expert_hidden == "split" else cfg.hidden
        self.n_experts, self.top_k = n, cfg.moe_top_k
        self.frozen, self.strength = cfg.moe_router == "frozen", cfg.router_progress
        self.drop, self.balance, self.chosen = Dropout(cfg.dropout), None, None
        self.router = nn.Linear(cfg.n_embd, n, bias=False)
        self.router.weight.requires_grad_(not self.frozen)
        self.c_fc, self.c_gate = (Experts(n, cfg.n_embd, width, cfg.bias) for _ in range(2))
        self.c_proj = Experts(n, width, cfg.n_embd, cfg.bias)
        # mean nats of an expert's tokens: fast and slow averages, and whether there are any yet
        self.register_buffer("averages", torch.zeros(3, n) if self.strength else None)

    def bias(self):
        """[E]: an expert's slow minus fast average, standardised, times the strength (ABL 5)."""
        fast, slow, seen = self.averages
        falling = (slow - fast) * seen
        return self.strength * (falling - falling.mean()) / (falling.std(correction=0) + 1e-8)

    @torch.no_grad()
    def observe(self, nats, counts):
        """Take in the nats [B, T] of the last forward pass, where counts [B, T] is true."""
        chosen, k, dtype = self.chosen.flatten(), self.top_k, self.averages.dtype
        each, kept = (z.to(dtype).flatten().repeat_interleave(k) for z in (nats, counts))
        count = torch.zeros_like(self.averages[0]).index_add_(0, chosen, kept)
        mean = torch.zeros_like(count).index_add_(0, chosen, each * kept) / count.clamp_min(1)
        fast, slow, seen = self.averages
        here = count > 0
        update_averages_(fast, slow, mean, here, here & (seen == 0))
        seen.copy_(seen.maximum(here.to(seen.dtype)))

    def forward(self, x, trace=None):
        flat = x.reshape(-1, x.size(-1))  # [N, C]
        logits = self.router(flat)
        if self.averages is not None:
            logits = logits + self.bias()
        p = torch.softmax(logits, dim=-1)  # [N, E]
        weight, self.chosen = p.topk(self.top_k, dim=-1)  # [N, k]
        count = torch.bincount(self.chosen.flatten(), minlength=self.n_experts)
        if self.training and not self.frozen:
            share = count.to(p.dtype) / self.chosen.numel()
            self.balance = self.n_experts * (share * p.mean(0)).sum()
        order = self.chosen.flatten().argsort(stable=True)  # expert by expert
        rows = order // self.top_k
        parts = flat.index_select(0, rows).split(count.tolist())
        y = torch.cat([self._expert(part, e) for e, part in enumerate(parts)])
        y = y * weight.flatten()[order].unsqueeze(1).to(y.dtype)
        y = torch.zeros_like(flat, dtype=y.dtype).index_add(0, rows, y)
        if trace is not None:
            shape = (*x.shape[:-1], -1)
            trace.update(mlp_in=x, router=p.view(shape), chosen=self.chosen.view(shape))
        return self.drop(y.view(x.shape))

    def _expert(self, x, e):
        return self.c_proj(F.silu(self.c_gate(x, e)) * self.c_fc(x, e), e)


FFN = {"relu2": dense(relu2), "relu": dense(F.relu), "swiglu": gated(F.silu), "moe": MoE}


# ---- residual connections: config -> (x, f(norm(x)) -> new x) ----

class Highway(nn.Module):
    """(1 - g) x + g y, g = sigmoid(gate(x)) per channel, or one per token."""

    def __init__(self, cfg):
        super().__init__()
        width = 1 if cfg.residual == "highway_scalar" else cfg.n_embd
        self.gate = nn.Linear(cfg.n_embd, width)

    def forward(self, x, y):
        return torch.lerp(x, y.to(x.dtype), torch.sigmoid(self.gate(x)).to(x.dtype))


RESID = {"plain": lambda cfg: torch.add, "highway": Highway, "highway_scalar": Highway}


class Block(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward, each joined to the stream."""

    def __init__(self, cfg, i):
        super().__init__()
        self.attn, self.ffn = ATTN[cfg.attn](cfg, i), FFN[cfg.ffn](cfg)
        self.norm_attn, self.norm_ffn = NORM[cfg.norm](cfg), NORM[cfg.norm](cfg)
        self.mix_attn, self.mix_ffn = RESID[cfg.residual](cfg), RESID[cfg.residual](cfg)

    def forward(self, x, ve, cos, sin, mask, trace=None):
        x = self.mix_attn(x, self.attn(self.norm_attn(x), ve, cos, sin, mask, trace))
        return self.mix_ffn(x, self.ffn(self.norm_ffn(x), trace))


class HistoryCompressor(nn.Module):
    """x_t + c_proj(mean over s <= t of c_fc(norm(x_s))), C -> C/4 -> C."""

    def __init__(self, cfg):
        super().__init__()
        width = -(-cfg.n_embd // 4)
        self.norm, self.drop = NORM[cfg.norm](cfg), Dropout(cfg.dropout)
        self.c_fc = nn.Linear(cfg.n_embd, width, bias=cfg.bias)
        self.c_proj = nn.Linear(width, cfg.n_embd, bias=cfg.bias)

    def forward(self, x):
        h = self.c_fc(self.norm(x)).cumsum(1)
        h = h / torch.arange(1, x.size(1) + 1, device=x.device, dtype=h.dtype).unsqueeze(1)
        return x + self.drop(self.c_proj(h))


# ---- hashed n-gram tables (OE 2.1, family A) ----

def oe_ids(idx, m, vocab_size):
    """Rows of the four hashed tables: four int64 tensors [B, T] from token ids idx [B, T] (OE 2.1).

    Bigram key x_t + (V+1) x_{t-1} for tables 0 and 1, trigram key plus (V+1)^2 x_{t-2} for 2 and 3,
    each modulo m + 2j. Left of the row stands V. int64 holds the keys up to V = 2 million.
    """
    idx, base = idx.long(), vocab_size + 1
    before = F.pad(idx, (2, 0), value=vocab_size)  # before[:, t + 2 - r] is x_{t-r}
    bigram = idx + base * before[:, 1:-1]
    trigram = bigram + base**2 * before[:, :-2]
    return [key % (m + 2 * j) for j, key in enumerate((bigram, bigram, trigram, trigram))]


def _add_rows(table, ids, grad):
    """Add a micro-batch's gradient to the rows it visited, in place, and count the visits."""
    if table.grad is None:
        table.grad = torch.zeros_like(table)
        table.visits = torch.zeros(len(table), device=table.device)
    ids = ids.flatten()
    table.grad.index_add_(0, ids, grad.reshape(-1, table.size(1)).to(table.dtype))
    table.visits.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))


def oe_lookup(tables, ids):
    """Rows of the tables at ids, concatenated: [B, T, 4 * columns].

    Each gathered block is a leaf whose hook adds to table.grad and table.visits by row: autograd's
    dense gradient would touch all rows (58 million values at depth 6) in every micro-batch.
    """
    parts = []
    for table, rows in zip(tables, ids):
        part = F.embedding(rows, table.detach())
        if torch.is_grad_enabled() and table.requires_grad:
            part.requires_grad_().register_hook(partial(_add_rows, table, rows))
        parts.append(part)
    return torch.cat(parts, dim=-1)


# ---- residual routing (OE 2.1, tier 3): config, w, w + e -> the anchor [B, T, C] or None ----

def shared_denominator(w, u, eps):
    """w / sqrt(mean u^2 + eps) [..., C], computed in float32, in w's dtype."""
    scale = torch.rsqrt(u.float().square().mean(-1, keepdim=True) + eps)
    return (w.float() * scale).to(w.dtype)


ROUTE = {"fused": lambda cfg, w, u: None,
         "separate": lambda cfg, w, u: norm(w, cfg.norm_eps),
         "shared": lambda cfg, w, u: shared_denominator(w, u, cfg.shared_eps)}


# ---- the model ----

INIT = ("uniform", "normal")
CHOICES = {
    "ffn": FFN, "norm": NORM, "attn": ATTN, "residual": RESID, "wte_route": ROUTE,
    "pos": POS, "qk_scale": QK_SCALE, "init": INIT, "fast_weight_impl": FAST_WEIGHT_IMPL,
    "moe_expert_hidden": MOE_HIDDEN, "moe_router": MOE_ROUTER,
}
MOE_DEFAULTS = dict(moe_experts=4, moe_top_k=1, moe_expert_hidden="full", moe_router="learned",
                    router_progress=0.0)
MODERN = dict(
    n_layer=4, n_head=6, n_embd=192, sequence_len=128, window_pattern="L", softcap=0.0,
    ffn="swiglu", norm="rms_affine", tie=True, dropout=0.2, qk_norm=False, embed_norm=False,
    x0_skip=False, value_embeds=False, init="normal")
LAMBDAS = ("resid_lambdas", "x0_lambdas", "wte_lambdas", "out_lambdas")
OWN_ROLES = ("wte", "wpe", "value_embeds", "lm_head", *LAMBDAS)   # named as their parameters
# what no generator draws
FIRST_VALUES = dict(zip(LAMBDAS, (1.0, 0.1, 0.0, 0.0)), q_log=0.0, oe=0.0)


class GPT(nn.Module):
    """The language model: GPT(config).init_weights(seed)."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        V, C, L = cfg.vocab_size, cfg.n_embd, cfg.n_layer
        self.wte = nn.Embedding(V, C)
        self.value_embeds = nn.ModuleDict({
            str(i): nn.Embedding(V, C) for i in range(L) if cfg.has_value_embedding(i)})
        self.blocks = nn.ModuleList([Block(cfg, i) for i in range(L)])
        self.norm, self.drop = NORM[cfg.norm](cfg), Dropout(cfg.dropout)
        self.lm_head = nn.Linear(C, V, bias=False)
        if cfg.tie:
            self.lm_head.weight = self.wte.weight
        # what is off is None: no parameters, nothing in the checkpoint
        self.wpe, self.resid_lambdas, self.x0_lambdas, self.oe_tables = None, None, None, None
        self.wte_lambdas, self.out_lambdas, cos, sin = None, None, None, None
        anchored = cfg.wte_route != "fused"
        if cfg.pos == "learned":
            self.wpe = nn.Embedding(cfg.sequence_len, C)
        self.history = HistoryCompressor(cfg) if cfg.history else None
        if cfg.x0_skip:
            self.resid_lambdas = nn.Parameter(torch.ones(L))
            self.x0_lambdas = nn.Parameter(torch.full((L,), 0.1))
        if cfg.oe_m:
            tables = [torch.zeros(cfg.oe_m + 2 * j, C // 4) for j in range(4)]
            self.oe_tables = nn.ParameterList(tables)
        if anchored:
            self.wte_lambdas = nn.Parameter(torch.zeros(L))
        if cfg.out_skip:
            self.out_lambdas = nn.Parameter(torch.zeros(1 + anchored))
        if cfg.pos == "rope":
            cos, sin = rotary_tables(cfg.sequence_len, cfg.head_dim, cfg.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def roles(self):
        """Yield (name, role, parameter) of every parameter; KeyError for a name without a role."""
        for name, p in self.named_parameters():
            top, leaf = name.split(".")[0], name.split(".")[-1]
            if top in OWN_ROLES:
                role = top
            elif top == "oe_tables":
                role = "oe"
            elif top not in ("blocks", "history", "norm"):
                raise KeyError(f"parameter {name} has no role")
            elif leaf == "q_log":
                role = "q_log"
            else:
                role = "matrix" if leaf == "weight" and p.ndim > 1 else "vector"
            yield name, role, p

    @torch.no_grad()
    def init_weights(self, seed):
        """Draw every tensor on the CPU in float32 from a generator of (seed, its own name).

        So two variants start with what they share, and the first of E experts as the dense layer.
        """
        for name, role, p in self.roles():
            gen = torch.Generator().manual_seed(derive_seed(seed, name))
            for part in p if p.ndim > 2 else (p,):  # one expert after another
                part.copy_(self._draw(name, role, part.shape, gen))
        return self

    def _draw(self, name, role, shape, gen):
        """First values of a tensor of this shape."""
        owner, leaf = ("." + name).split(".")[-2:]
        if role in FIRST_VALUES:
            return torch.full(shape, FIRST_VALUES[role])
        if role == "vector":
            is_gain = "norm" in owner and leaf == "weight"
            return torch.full(shape, HIGHWAY_BIAS if owner == "gate" else float(is_gain))
        by_default = role == "wpe" or owner in ("router", "gate", "c_beta", "c_decay")
        if self.cfg.init == "normal" or by_default:
            return torch.randn(shape, generator=gen) * NORMAL_STD
        if role in ("wte", "lm_head"):
            return torch.randn(shape, generator=gen) * (0.001 if role == "lm_head" else 1)
        if "c_proj" in name or "ve_gate" in name:
            return torch.zeros(shape)
        bound = (3 / self.cfg.n_embd) ** 0.5
        return torch.rand(shape, generator=gen) * (2 * bound) - bound

    def set_dtype(self, dtype):
        """The model in a run's precision: bfloat16 of embeddings by token, float64 of all."""
        if dtype == torch.float64:
            return self.double()
        for _, role, p in self.roles():
            if role in ("wte", "value_embeds", "oe"):
                p.data = p.data.to(dtype)
        return self

    def num_params(self):
        """{"backbone", "oe", "total"}: the OE paper's scaling parameters, its tables, their sum."""
        count = {"backbone": 0, "oe": 0}
        for _, role, p in self.roles():
            count["oe" if role == "oe" else "backbone"] += p.numel()
        return {**count, "total": sum(count.values())}

    def _masks(self, T, device):
        """{window: mask}: None (causal), boolean [T, T], or float [H, T, T] with ALiBi."""
        masks, biased = {}, self.cfg.pos in ("alibi", "hard_alibi")
        for window in {block.attn.window for block in self.blocks}:
            age = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
            seen = (age >= 0) & (age <= window)
            if biased:
                bias = alibi_bias(self.cfg.pos, self.cfg.n_head, age)
                masks[window] = bias.masked_fill_(~seen, -torch.inf)
            else:
                masks[window] = None if window >= T - 1 else seen
        return masks

    def layers(self, idx, x, x0, anchor=None, start=0, seen=None, states=None):
        """Residual state [B, T, C] behind the last layer, from the state x before layer `start`.

        idx [B, T] token ids; x0 and anchor [B, T, C] as in trunk(). seen: a dict for every layer,
        which receives its trace. states: a list that receives every layer's output.
        """
        cfg, T = self.cfg, idx.size(1)
        cos, sin = (None, None) if self.cos is None else (self.cos[:T], self.sin[:T])
        masks = self._masks(T, idx.device)
        for i in range(start, cfg.n_layer):
            block = self.blocks[i]
            if self.history is not None and i == cfg.n_layer // 2:
                x = self.history(x)
            if self.x0_lambdas is not None:
                x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            if anchor is not None:
                x = x + self.wte_lambdas[i] * anchor
            ve = self.value_embeds[str(i)](idx) if cfg.has_value_embedding(i) else None
            trace = seen and seen[i]
            x = block(x, ve, cos, sin, masks[block.attn.window], trace)
            if states is not None:
                states.append(x)
        return x

    def trunk(self, idx, w, e, trace=None):
        """State [B, T, C] before the final norm; w: rows of wte, e: of hashed tables or None."""
        cfg = self.cfg
        u = w if e is None else w + e
        if self.wpe is not None:
            u = u + self.wpe.weight[:idx.size(1)]
        x0 = self.drop(norm(u, cfg.norm_eps) if cfg.embed_norm else u)
        anchor = ROUTE[cfg.wte_route](cfg, w, u)
        seen = None if trace is None else trace.setdefault("layers", [{} for _ in self.blocks])
        x = self.layers(idx, x0, x0, anchor, seen=seen)
        if self.out_lambdas is not None:
            x = x + self.out_lambdas[0] * x0
            if anchor is not None:
                x = x + self.out_lambdas[1] * anchor
        if trace is not None:
            trace.update(wte=w, oe=e, x0=x0, anchor=anchor, x_L=x)
        return x

    def forward(self, idx, targets=None, reduction="mean", trace=None):
        """Logits [B, T, V] (float32) of token ids idx [B, T], or the loss in nats.

        With targets [B, T] (-1 ignored) it is the loss: reduction mean | sum (scalar), none
        ([B, T], 0 where ignored). While training, mean includes the routers' balance losses. A dict
        `trace` receives wte, oe, x0, anchor, x_L, x_final, logits, and per layer attn_in, q, k
        (after norm and gain), v, gate, y, mlp_in, pre, hidden. ValueError for a row longer than
        config.sequence_len.
        """
        cfg, T = self.cfg, idx.size(1)
        if T > cfg.sequence_len:
            raise ValueError(f"{T} tokens in a row, but the model was built for {cfg.sequence_len}")
        e = None
        if self.oe_tables is not None:
            e = oe_lookup(self.oe_tables, oe_ids(idx, cfg.oe_m, cfg.vocab_size))
        x_final = self.norm(self.trunk(idx, self.wte(idx), e, trace))
        head = self.lm_head.weight
        if trace is not None or targets is None:
            logits = capped_logits(x_final, head, cfg.softcap)
            if trace is not None:
                trace.update(x_final=x_final, logits=logits)
            if targets is None:
                return logits
        loss, nats = chunked_loss(x_final, head, targets, cfg.softcap, reduction, with_nats=True)
        if cfg.ffn == "moe" and self.training:
            for ffn in (block.ffn for block in self.blocks):
                if reduction == "mean" and ffn.balance is not None:
                    loss = loss + BALANCE_COEFFICIENT * ffn.balance
                if ffn.averages is not None:
                    ffn.observe(nats, targets >= 0)
                ffn.balance = None  # the graph ends with the step
        return loss
