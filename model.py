"""The model: one GPT, one frozen GPTConfig; every variant is a flag of the config.

Two presets: GPTConfig.backbone(depth) is the OE/WM model, GPTConfig.modern() the ablation model; every flag works on both.

    variant                 paper      what it does
    oe_m > 0                OE 2.1 A   four hashed bigram/trigram tables added to the token embedding before the first norm
    qk_scale full | masked  OE 2.1 B2  q <- q * exp(q_log) per head and rotary plane, after QK-norm; masked: not in layer 0 nor in planes
                                       c < D/8
             head           WM 4.6     the same with one q_log per head: a temperature
    wte_route separate      OE 2.1 B3  a second anchor x0_wte = norm(w) joins x0 in every layer
              shared                   the anchor is w / s_{w+e}(eps), with the denominator of x0
    out_skip                OE 2.1 B3  the anchors are added once more, before the final norm
    norm rms_affine         ABL 1      RMSNorm with weights; layer: LayerNorm (with a bias where `bias` says so); rms has no parameters
    pos learned             ABL 17     a vector per position is added to the embedding; none: no positions at all
        alibi               ABL 20     logits minus slope_h * distance (Press et al. 2021)
        hard_alibi                     the first half of the heads see 1, 2, 3, ... tokens, the rest everything (Jelassi et al. 2024)
    attn linear             ABL 20     fast weights (fast_weights.py) for softmax attention, q and k through elu + 1
        delta               ABL 17     q and k through SiLU, then to length 1; b = sigmoid(c_beta(x)) per head
        gated_delta         ABL 17     and a = sigmoid(c_decay(x)) per key channel; gated_delta_scalar (ABL 19): per head
    ffn swiglu              ABL 1      c_proj(silu(c_gate(x)) * c_fc(x)); relu: c_proj(relu(c_fc(x)))
        moe                 ABL 5-7    a linear router sends each token to the top k of E SwiGLU experts (Switch)
    residual highway        ABL 2      x <- (1 - g) x + g f(norm(x)), g = sigmoid(gate(x)) per channel
        highway_scalar      ABL 2, 16  the same with one g per token
    history                 ABL 3      Neural History Compressor: in mid-stack x_t += c_proj(mean over s <= t of c_fc(norm(x_s)))

Shapes: B batch, T tokens, C = n_embd, H heads, D = head_dim, V = vocab_size, L = n_layer, E experts, N = B * T. `w` is a token's row of
wte, `e` its concatenated rows of the hashed tables, x0 = norm(w + e).

`python model.py` prints the parameter counts of the presets.
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import UserError, cli, derive_seed, make_parser
from fast_weights import delta_chunk, delta_recurrent, linear_chunk, linear_recurrent
from loss import capped_logits, chunked_loss

VE_GATE_CHANNELS = 32            # the value-embedding gate reads this many channels of its input
BALANCE_COEFFICIENT = 0.01       # of the routers' balance losses (ABL 5)
HIGHWAY_BIAS = -2.0              # carry first, as in the Highway paper
NORMAL_STD = 0.02                # of init "normal", as in GPT-2; no scaling by depth, which ABL 16 counts among what its recipe lacks
FAST, SLOW = 0.9, 0.99           # averages of an expert's loss, for router_progress (ABL 5)


@dataclass(frozen=True)
class GPTConfig:
    """Everything that shapes the model; the defaults are the backbone's. Build one with backbone(depth, ...) or modern(...).

    Combinations that cannot be, and flags that would do nothing, raise UserError.
    """
    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 8192
    sequence_len: int = 2048
    window_pattern: str = "SSSL"   # per layer, repeated: L sees all of T, S the last T/2; the last layer is always L
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
    ffn_hidden: int = 0            # 0: int(8/3 C) with gates (swiglu, moe), 4C otherwise
    history: bool = False
    tie: bool = False              # the head is wte
    bias: bool = False             # of the linear layers and of LayerNorm; gates and decays always have theirs
    dropout: float = 0.0           # of embeddings, attention probabilities and what attention and feed-forward layers add
    qk_norm: bool = True
    embed_norm: bool = True        # x0 = norm(w + e), otherwise x0 = w + e
    x0_skip: bool = True           # x <- resid_lambda x + x0_lambda x0 before every layer
    value_embeds: bool = True
    init: str = "uniform"          # the backbone's initial draws, or normal
    moe_experts: int = 4
    moe_top_k: int = 1
    moe_expert_hidden: str = "full"   # an expert is as wide as the dense layer, or has its share of the width
    moe_router: str = "learned"       # or frozen at its initial draw: no gradient, no balance loss
    router_progress: float = 0.0      # strength of the bias towards experts whose tokens' loss falls
    fast_weight_impl: str = "chunk"   # or recurrent, the reference

    @classmethod
    def backbone(cls, depth, head_dim=128, **kw):
        """The OE/WM backbone (SPEC 3): width 64 * depth rounded up to a multiple of head_dim."""
        if depth < 1 or head_dim < 1:
            raise UserError(f"depth {depth} and head_dim {head_dim} must be at least 1")
        n_head = -(-64 * depth // head_dim)
        return cls(n_layer=depth, n_head=n_head, n_embd=n_head * head_dim, **kw)

    @classmethod
    def modern(cls, **kw):
        """The ablation model (ABL, SPEC 3): rotary, RMSNorm with weights, SwiGLU, tied head, dropout 0.2."""
        return cls(**{**MODERN, **kw})

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}")
        if min(self.n_layer, self.n_head, self.n_embd, self.sequence_len, self.vocab_size) < 1:
            raise UserError("n_layer, n_head, n_embd, sequence_len and vocab_size must be at least 1")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise UserError(f"window_pattern {self.window_pattern!r} must be made of S and L")
        for broken, reason in (*self._sizes(), *self._conflicts()):
            if broken:
                raise UserError(reason)

    def _sizes(self):
        """(is it broken?, what to say) of every number."""
        moe = self.ffn == "moe"
        yield self.n_embd % self.n_head, f"n_embd {self.n_embd} does not split into {self.n_head} heads"
        yield (self.pos == "rope" and self.head_dim % 2,
               f"n_embd {self.n_embd} does not split into {self.n_head} heads of even width (rotary planes are pairs)")
        yield (self.oe_m < 0 or self.oe_m and self.n_embd % 4,
               f"oe_m {self.oe_m} with n_embd {self.n_embd}: oe_m must be 0 (off) or positive, and n_embd a multiple of 4")
        yield (self.value_embeds and self.n_embd < VE_GATE_CHANNELS,
               f"n_embd {self.n_embd} is below the {VE_GATE_CHANNELS} channels that the value-embedding gate reads")
        yield not self.shared_eps > 0, f"shared_eps {self.shared_eps} must be positive (the paper uses 1e-6 and 2^-23)"
        yield not 0 <= self.dropout < 1, f"dropout {self.dropout} must be at least 0 and below 1"
        yield self.ffn_hidden < 0, f"ffn_hidden {self.ffn_hidden} must be 0 (its own width) or positive"
        yield moe and not 1 <= self.moe_top_k <= self.moe_experts, f"moe_top_k {self.moe_top_k} must be 1 to moe_experts {self.moe_experts}"
        yield (moe and self.moe_expert_hidden == "split" and self.hidden % self.moe_experts,
               f"the hidden width {self.hidden} does not split into {self.moe_experts} experts; set ffn_hidden to a multiple")

    def _conflicts(self):
        """(is it broken?, what to say) of every pair of flags."""
        moe = {k: getattr(self, k) for k in MOE_DEFAULTS}
        yield self.ffn != "moe" and moe != MOE_DEFAULTS, f"{', '.join(MOE_DEFAULTS)} need ffn moe"
        fast = self.attn != "softmax"
        yield (fast and self.pos not in ("learned", "none"),
               f"attn {self.attn} has no logits for pos {self.pos} to act on; use learned or none")
        yield fast and self.qk_norm, f"attn {self.attn} maps q and k itself; set qk_norm to False"
        yield fast and self.qk_scale != "none", f"attn {self.attn} has no logits for qk_scale {self.qk_scale} to scale"
        yield fast and "S" in self.window_pattern, f"attn {self.attn} has no window; set window_pattern to L"
        yield not fast and self.fast_weight_impl != "chunk", f"fast_weight_impl {self.fast_weight_impl} needs attn linear, delta or gated"
        yield self.pos == "hard_alibi" and self.n_head < 2, "hard_alibi needs two heads: the first half have a window"
        yield self.rope_base != 10_000.0 and self.pos != "rope", f"rope_base {self.rope_base} needs pos rope"
        yield self.router_progress and self.moe_experts == 1, "router_progress needs two experts to choose from"
        yield (self.qk_scale in ("full", "masked") and self.pos != "rope",
               f"qk_scale {self.qk_scale} scales rotary planes and needs pos rope; qk_scale head does not")
        yield (self.wte_route != "fused" and not (self.embed_norm and self.x0_skip),
               f"wte_route {self.wte_route} needs embed_norm and x0_skip: its anchor is a part of x0")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def hidden(self):
        """Hidden width of a dense feed-forward layer."""
        return self.ffn_hidden or (8 * self.n_embd // 3 if self.ffn in ("swiglu", "moe") else 4 * self.n_embd)

    def window(self, i):
        """How far back layer i sees, in tokens: T (everything) or T/2."""
        is_long = i == self.n_layer - 1 or self.window_pattern[i % len(self.window_pattern)] == "L"
        return self.sequence_len if is_long else self.sequence_len // 2

    def has_value_embedding(self, i):
        """Every second layer, the last one included."""
        return self.value_embeds and i % 2 == (self.n_layer - 1) % 2


# ---- parts ----

def norm(x):
    """Parameter-free RMSNorm over the channels; eps None is the machine epsilon of the accumulation type, 2^-23 in float32."""
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)  # autocast may answer in float32


class RMSNorm(nn.Module):
    """norm() times a weight per channel."""

    def __init__(self, cfg):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cfg.n_embd))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight).to(x.dtype)


NORM = {"rms": lambda cfg: norm, "rms_affine": RMSNorm, "layer": lambda cfg: nn.LayerNorm(cfg.n_embd, bias=cfg.bias)}   # config -> (x -> x)


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


def alibi_slopes(n_head):
    """Slopes [H] of ALiBi: 2^(-8h/n), h = 1..n, for n the power of two up to H; the other heads take every second slope of 2n heads."""
    n = 1 << (n_head.bit_length() - 1)
    slopes = [2 ** (-8 * h / n) for h in range(1, n + 1)] + [2 ** (-4 * h / n) for h in range(1, 2 * n, 2)]
    return torch.tensor(slopes[:n_head])


def alibi_bias(pos, n_head, age):
    """What positions add to the logits, float32 [H, T, T], from age [T, T] (query minus key position); the future is up to the mask."""
    if pos == "alibi":
        return -alibi_slopes(n_head).to(age.device)[:, None, None] * age
    reach = torch.arange(1, n_head + 1, device=age.device)[:, None, None].expand(-1, *age.shape)
    hard = (reach <= n_head // 2) & (age >= reach)
    return torch.zeros(hard.shape, device=age.device).masked_fill_(hard, -torch.inf)


def drop(x, p):
    """F.dropout(x, p); on a CPU p is a multiple of 2^-16 and four elements share a 64-bit draw: torch's own draws take a sixth of a step."""
    if x.device.type != "cpu" or not p:
        return F.dropout(x, p)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2**63, None).view(torch.int16)[:x.numel()].view(x.shape)
    level = round(p * 2**16)
    return x * (bits >= level - 2**15).to(x.dtype).mul_(2**16 / (2**16 - level))


class Dropout(nn.Dropout):
    """drop() while training."""

    def forward(self, x):
        return drop(x, self.p) if self.training else x


def dropout(cfg):
    """The config's dropout layer; nothing at 0."""
    return Dropout(cfg.dropout) if cfg.dropout else nn.Identity()


def attend(q, k, v, mask, p=0.0):
    """Softmax attention [B, H, T, D] of q, k, v [B, H, T, D]; mask None is causal; p of the weights are dropped."""
    if not p or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=p)
    if mask is None:
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    z = q @ k.mT * q.size(-1) ** -0.5
    z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask
    return drop(z.softmax(-1), p) @ v


class Attention(nn.Module):
    """Causal softmax attention: rotary, then QK-norm, an optional gain on q, a window or a bias, and optional value embeddings."""

    def __init__(self, cfg, i):
        super().__init__()
        self.n_head, self.head_dim, self.window = cfg.n_head, cfg.head_dim, cfg.window(i)
        self.qk_norm, self.p_drop, self.drop = cfg.qk_norm, cfg.dropout, dropout(cfg)
        self.c_q = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.c_k = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.c_v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)
        self.ve_gate = nn.Linear(VE_GATE_CHANNELS, cfg.n_head, bias=False) if cfg.has_value_embedding(i) else None
        planes = 1 if cfg.qk_scale == "head" else cfg.head_dim // 2
        self.q_log = nn.Parameter(torch.zeros(cfg.n_head, planes)) if cfg.qk_scale != "none" else None
        free = torch.arange(cfg.head_dim // 2) >= (cfg.head_dim // 8 if i > 0 else cfg.head_dim)  # masked: the rest stays at exp(0)
        self.register_buffer("q_mask", free.float() if cfg.qk_scale == "masked" else None, persistent=False)

    def q_gain(self):
        """exp(q_log), the same for both channels of a plane: [H, D]; [H, 1] with one temperature per head."""
        log = self.q_log if self.q_mask is None else self.q_log * self.q_mask
        return log.exp().repeat(1, 2 if log.size(1) > 1 else 1)

    def mix(self, x, q, k, v, cos, sin, mask):
        """(y [B, T, H, D], what the trace shows of q and k) from q, k, v [B, T, H, D]."""
        if cos is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.qk_norm:
            q, k = norm(q), norm(k)
        if self.q_log is not None:
            q = q * self.q_gain().to(q.dtype)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        y = attend(*(z.transpose(1, 2) for z in (q, k, v)), mask, self.p_drop if self.training else 0.0)
        return y.transpose(1, 2), dict(q=q, k=k)

    def forward(self, x, ve, cos, sin, mask, trace=None):
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.n_head, self.head_dim) for f in (self.c_q, self.c_k, self.c_v))
        gate = None
        if ve is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :VE_GATE_CHANNELS]))         # [B, T, H]
            v = v + gate.unsqueeze(-1) * ve.view(B, T, self.n_head, self.head_dim)
        y, seen = self.mix(x, q, k, v, cos, sin, mask)
        y = y.reshape(B, T, C)
        if trace is not None:
            trace.update(attn_in=x, v=v, gate=gate, y=y, **seen)
        return self.drop(self.c_proj(y))


def elu_plus_one(z):
    """elu(z) + 1 without the cancellation: z + 1 above 0, e^z below."""
    return F.relu(z) + z.clamp_max(0).exp()


class FastWeights(Attention):
    """Attention whose softmax is replaced by a fast-weight memory: linear, delta, gated_delta or gated_delta_scalar (fast_weights.py)."""

    def __init__(self, cfg, i):
        super().__init__(cfg, i)
        chunked = cfg.fast_weight_impl == "chunk"
        self.linear, self.delta = (linear_chunk, delta_chunk) if chunked else (linear_recurrent, delta_recurrent)
        gates = {"gated_delta": cfg.n_embd, "gated_delta_scalar": cfg.n_head}.get(cfg.attn)
        self.c_beta = nn.Linear(cfg.n_embd, cfg.n_head) if cfg.attn != "linear" else None
        self.c_decay = nn.Linear(cfg.n_embd, gates) if gates else None

    def mix(self, x, q, k, v, cos, sin, mask):
        # products of up to T decays and the triangular solve want float32 even under autocast
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        heads = lambda z: z.to(wide).transpose(1, 2)                                  # [B, H, T, ...]
        seen = {}
        if self.c_beta is not None:
            seen["beta"] = torch.sigmoid(self.c_beta(x).to(wide))                     # [B, T, H]
        if self.c_decay is not None:
            z = self.c_decay(x).to(wide)
            seen["log_decay"] = F.logsigmoid(z if z.size(-1) == self.n_head else z.unflatten(-1, (self.n_head, -1)))
        with torch.autocast(x.device.type, enabled=False):
            if self.c_beta is None:
                q, k = elu_plus_one(q.to(wide)), elu_plus_one(k.to(wide))
                y = self.linear(heads(q), heads(k), heads(v))
            else:
                q, k = (F.normalize(F.silu(z.to(wide)), dim=-1) for z in (q, k))
                y = self.delta(heads(q), heads(k), heads(v), *(heads(z) for z in seen.values()))
        return y.transpose(1, 2).to(v.dtype), dict(q=q, k=k, **seen)


# config, layer -> module (x [B, T, C], ve, cos, sin, mask, trace) -> [B, T, C]
ATTN = {"softmax": Attention, "linear": FastWeights, "delta": FastWeights, "gated_delta": FastWeights, "gated_delta_scalar": FastWeights}


# ---- feed-forward layers: config -> module (x [B, T, C], trace) -> [B, T, C] ----

class MLP(nn.Module):
    """c_proj(act(c_fc(x))); the backbone's act is relu^2."""

    def __init__(self, cfg, act):
        super().__init__()
        self.act, self.drop = act, dropout(cfg)
        self.c_fc = nn.Linear(cfg.n_embd, cfg.hidden, bias=cfg.bias)
        self.c_proj = nn.Linear(cfg.hidden, cfg.n_embd, bias=cfg.bias)

    def forward(self, x, trace=None):
        a = self.c_fc(x)
        h = self.act(a)
        if trace is not None:
            trace.update(mlp_in=x, pre=a, hidden=h)
        return self.drop(self.c_proj(h))


def relu2(x):
    """relu(x)^2."""
    return F.relu(x).square()


class SwiGLU(nn.Module):
    """c_proj(silu(c_gate(x)) * c_fc(x))."""

    def __init__(self, cfg):
        super().__init__()
        self.drop = dropout(cfg)
        self.c_fc = nn.Linear(cfg.n_embd, cfg.hidden, bias=cfg.bias)
        self.c_gate = nn.Linear(cfg.n_embd, cfg.hidden, bias=cfg.bias)
        self.c_proj = nn.Linear(cfg.hidden, cfg.n_embd, bias=cfg.bias)

    def forward(self, x, trace=None):
        a = self.c_fc(x)
        h = F.silu(self.c_gate(x)) * a
        if trace is not None:
            trace.update(mlp_in=x, pre=a, hidden=h)
        return self.drop(self.c_proj(h))


class Experts(nn.Module):
    """E linear layers in one tensor [E, out, in]."""

    def __init__(self, n, n_in, n_out, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n, n_out)) if bias else None

    def forward(self, x, e):
        return F.linear(x, self.weight[e], None if self.bias is None else self.bias[e])


class MoE(nn.Module):
    """A token's k most probable of E SwiGLU experts, each weighted by its probability, which is not renormalised (Switch; ABL 5-7).

    After a training forward `balance` holds the Switch loss E sum_e f_e P_e: f_e the share of the assignments, P_e the mean probability.
    """

    def __init__(self, cfg):
        super().__init__()
        n, width = cfg.moe_experts, cfg.hidden // (cfg.moe_experts if cfg.moe_expert_hidden == "split" else 1)
        self.n_experts, self.top_k, self.frozen, self.strength = n, cfg.moe_top_k, cfg.moe_router == "frozen", cfg.router_progress
        self.drop, self.balance, self.chosen = dropout(cfg), None, None
        self.router = nn.Linear(cfg.n_embd, n, bias=False)
        self.router.weight.requires_grad_(not self.frozen)
        self.c_fc = Experts(n, cfg.n_embd, width, cfg.bias)
        self.c_gate = Experts(n, cfg.n_embd, width, cfg.bias)
        self.c_proj = Experts(n, width, cfg.n_embd, cfg.bias)
        # mean nats of the tokens sent to an expert: fast and slow averages, and whether there are any yet
        self.register_buffer("averages", torch.zeros(3, n) if self.strength else None)

    def bias(self):
        """[E]: slow minus fast average of an expert's loss, standardised over the experts, times the strength (ABL 5)."""
        fast, slow, seen = self.averages
        falling = (slow - fast) * seen
        return self.strength * (falling - falling.mean()) / (falling.std(correction=0) + 1e-8)

    @torch.no_grad()
    def observe(self, nats, counts):
        """Update the averages with the losses nats [B, T] of the tokens of the last forward pass, where counts [B, T] is true."""
        chosen, dtype = self.chosen.flatten(), self.averages.dtype
        each, kept = (z.reshape(-1, 1).expand(-1, self.top_k).flatten().to(dtype) for z in (nats, counts))
        count = torch.zeros_like(self.averages[0]).index_add_(0, chosen, kept)
        mean = torch.zeros_like(count).index_add_(0, chosen, each * kept) / count.clamp_min(1)
        fast, slow, seen = self.averages
        for average, decay in ((fast, FAST), (slow, SLOW)):
            average.copy_(torch.where(count > 0, torch.where(seen > 0, decay * average + (1 - decay) * mean, mean), average))
        seen.copy_(seen.maximum((count > 0).to(seen.dtype)))

    def forward(self, x, trace=None):
        flat = x.reshape(-1, x.size(-1))                                      # [N, C]
        logits = self.router(flat)
        p = torch.softmax(logits if self.averages is None else logits + self.bias(), dim=-1)     # [N, E]
        weight, self.chosen = p.topk(self.top_k, dim=-1)                      # [N, k]
        count = torch.bincount(self.chosen.flatten(), minlength=self.n_experts)
        if self.training and not self.frozen:
            self.balance = self.n_experts * (count.to(p.dtype) / self.chosen.numel() * p.mean(0)).sum()
        order = self.chosen.flatten().argsort(stable=True)                    # assignments, expert by expert
        rows = order // self.top_k
        parts = flat.index_select(0, rows).split(count.tolist())
        y = torch.cat([self.c_proj(F.silu(self.c_gate(part, e)) * self.c_fc(part, e), e) for e, part in enumerate(parts)])
        y = torch.zeros_like(flat, dtype=y.dtype).index_add(0, rows, y * weight.flatten()[order].unsqueeze(1).to(y.dtype))
        if trace is not None:
            trace.update(mlp_in=x, router=p.view(*x.shape[:-1], -1), chosen=self.chosen.view(*x.shape[:-1], -1))
        return self.drop(y.view(x.shape))


FFN = {"relu2": lambda cfg: MLP(cfg, relu2), "relu": lambda cfg: MLP(cfg, F.relu), "swiglu": SwiGLU, "moe": MoE}


# ---- residual connections: config -> module (x, f(norm(x))) -> new x ----

class Plain(nn.Module):
    """x + y."""

    def __init__(self, cfg):
        super().__init__()

    def forward(self, x, y):
        return x + y


class Highway(nn.Module):
    """(1 - g) x + g y, g = sigmoid(gate(x)) per channel, or one per token (Srivastava et al. 2015; ABL 2)."""

    def __init__(self, cfg):
        super().__init__()
        self.gate = nn.Linear(cfg.n_embd, 1 if cfg.residual == "highway_scalar" else cfg.n_embd)

    def forward(self, x, y):
        return torch.lerp(x, y.to(x.dtype), torch.sigmoid(self.gate(x)).to(x.dtype))


RESID = {"plain": Plain, "highway": Highway, "highway_scalar": Highway}


class Block(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward, each joined to the residual stream."""

    def __init__(self, cfg, i):
        super().__init__()
        self.attn, self.ffn = ATTN[cfg.attn](cfg, i), FFN[cfg.ffn](cfg)
        self.norm_attn, self.norm_ffn = NORM[cfg.norm](cfg), NORM[cfg.norm](cfg)
        self.mix_attn, self.mix_ffn = RESID[cfg.residual](cfg), RESID[cfg.residual](cfg)

    def forward(self, x, ve, cos, sin, mask, trace=None):
        x = self.mix_attn(x, self.attn(self.norm_attn(x), ve, cos, sin, mask, trace))
        return self.mix_ffn(x, self.ffn(self.norm_ffn(x), trace))


class HistoryCompressor(nn.Module):
    """x_t + c_proj(mean over s <= t of c_fc(norm(x_s))), C -> C/4 -> C: the causal summary in mid-stack (Schmidhuber 1992; ABL 3)."""

    def __init__(self, cfg):
        super().__init__()
        width = -(-cfg.n_embd // 4)
        self.norm, self.drop = NORM[cfg.norm](cfg), dropout(cfg)
        self.c_fc = nn.Linear(cfg.n_embd, width, bias=cfg.bias)
        self.c_proj = nn.Linear(width, cfg.n_embd, bias=cfg.bias)

    def forward(self, x):
        h = self.c_fc(self.norm(x)).cumsum(1)
        h = h / torch.arange(1, x.size(1) + 1, device=x.device, dtype=h.dtype).unsqueeze(1)
        return x + self.drop(self.c_proj(h))


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


CHOICES = {"ffn": FFN, "qk_scale": ("none", "full", "masked", "head"), "wte_route": ROUTE, "norm": NORM, "attn": ATTN, "residual": RESID,
           "pos": ("rope", "learned", "none", "alibi", "hard_alibi"), "init": ("uniform", "normal"),
           "moe_expert_hidden": ("full", "split"), "moe_router": ("learned", "frozen"), "fast_weight_impl": ("chunk", "recurrent")}
MOE_DEFAULTS = dict(moe_experts=4, moe_top_k=1, moe_expert_hidden="full", moe_router="learned", router_progress=0.0)
MODERN = dict(n_layer=4, n_head=6, n_embd=192, sequence_len=128, window_pattern="L", softcap=0.0, ffn="swiglu", norm="rms_affine", tie=True,
              dropout=0.2, qk_norm=False, embed_norm=False, x0_skip=False, value_embeds=False, init="normal")


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
        self.norm, self.drop = NORM[cfg.norm](cfg), dropout(cfg)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie:
            self.lm_head.weight = self.wte.weight
        self.wpe = nn.Embedding(cfg.sequence_len, cfg.n_embd) if cfg.pos == "learned" else None
        self.history = HistoryCompressor(cfg) if cfg.history else None
        self.resid_lambdas = nn.Parameter(torch.ones(cfg.n_layer)) if cfg.x0_skip else None
        self.x0_lambdas = nn.Parameter(torch.full((cfg.n_layer,), 0.1)) if cfg.x0_skip else None
        self.oe_tables, self.wte_lambdas, self.out_lambdas = None, None, None
        if cfg.oe_m:
            self.oe_tables = nn.ParameterList([torch.zeros(cfg.oe_m + 2 * j, cfg.n_embd // 4) for j in range(4)])
        if cfg.wte_route != "fused":
            self.wte_lambdas = nn.Parameter(torch.zeros(cfg.n_layer))
        if cfg.out_skip:
            self.out_lambdas = nn.Parameter(torch.zeros(1 if cfg.wte_route == "fused" else 2))
        cos, sin = rotary_tables(cfg.sequence_len, cfg.head_dim, cfg.rope_base) if cfg.pos == "rope" else (None, None)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def roles(self):
        """Yield (name, role, parameter) for every parameter once; the optimizer's groups and the initial draws go by role."""
        for name, p in self.named_parameters():
            top, leaf = name.split(".")[0], name.split(".")[-1]
            if top in ("wte", "wpe", "value_embeds", "lm_head", "resid_lambdas", "x0_lambdas", "wte_lambdas", "out_lambdas"):
                role = top
            elif top == "oe_tables":
                role = "oe"
            elif top in ("blocks", "history", "norm"):
                role = "q_log" if leaf == "q_log" else "matrix" if leaf == "weight" and p.ndim > 1 else "vector"
            else:
                raise KeyError(f"parameter {name} has no role")
            yield name, role, p

    @torch.no_grad()
    def init_weights(self, seed):
        """Draw every tensor from a generator seeded with (seed, its own name), on the CPU in float32: two variants share what they share.

        uniform: wte N(0, 1), head N(0, 0.001^2), matrices and value embeddings U(-s, s) with s = sqrt(3/C), projections and value-embedding
        gates 0. normal: all of these N(0, 0.02^2). Both: routers, highway gates, decays, betas and positions N(0, 0.02^2), norms 1, biases
        0 (highway -2). The first of E experts starts as the dense layer would.
        """
        for name, role, p in self.roles():
            gen = torch.Generator().manual_seed(derive_seed(seed, name))
            for part in p if p.ndim > 2 else (p,):   # one expert after another
                part.copy_(self._draw(name, role, part.shape, gen))
        return self

    def _draw(self, name, role, shape, gen):
        owner, leaf = ("." + name).split(".")[-2:]
        if role == "vector":
            return torch.full(shape, 1.0 if "norm" in owner and leaf == "weight" else HIGHWAY_BIAS if owner == "gate" else 0.0)
        if role not in ("wte", "wpe", "lm_head", "value_embeds", "matrix"):   # lambdas, q gains, hashed tables
            return torch.full(shape, {"resid_lambdas": 1.0, "x0_lambdas": 0.1}.get(role, 0.0))
        if self.cfg.init == "normal" or role == "wpe" or owner in ("router", "gate", "c_beta", "c_decay"):
            return torch.randn(shape, generator=gen) * NORMAL_STD
        if role in ("wte", "lm_head"):
            return torch.randn(shape, generator=gen) * (0.001 if role == "lm_head" else 1)
        if "c_proj" in name or "ve_gate" in name:
            return torch.zeros(shape)
        bound = (3 / self.cfg.n_embd) ** 0.5
        return torch.rand(shape, generator=gen) * (2 * bound) - bound

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
        """Boolean [T, T] attention masks by window, or float [H, T, T] ones with ALiBi; None where plain causal attention says the same."""
        masks, biased = {}, self.cfg.pos in ("alibi", "hard_alibi")
        for window in {block.attn.window for block in self.blocks}:
            age = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
            masks[window] = None if window >= T - 1 and not biased else (age >= 0) & (age <= window)
            if biased:
                masks[window] = alibi_bias(self.cfg.pos, self.cfg.n_head, age).masked_fill_(~masks[window], -torch.inf)
        return masks

    def trunk(self, idx, w, e, trace=None):
        """From embedding rows w (and hashed rows e, or None), all [B, T, C], to the state before the final norm."""
        cfg, T = self.cfg, idx.size(1)
        cos, sin = (None, None) if self.cos is None else (self.cos[:T], self.sin[:T])
        masks = self._masks(T, idx.device)
        u = w if e is None else w + e
        if self.wpe is not None:
            u = u + self.wpe.weight[:T]
        x = x0 = self.drop(norm(u) if cfg.embed_norm else u)
        anchor = ROUTE[cfg.wte_route](w, u, cfg.shared_eps)
        layers = [] if trace is None else trace.setdefault("layers", [{} for _ in self.blocks])
        for i, block in enumerate(self.blocks):
            if self.history is not None and i == cfg.n_layer // 2:
                x = self.history(x)
            if self.x0_lambdas is not None:
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

        reduction: mean | sum (scalar), none ([B, T], 0 where ignored). While training, mean includes the routers' balance losses. A dict
        given as `trace` receives what the delayed rules read: wte, oe, x0, anchor, x_L, x_final, logits, and per layer attn_in, q, k (after
        norm and gain), v, gate, y, mlp_in, pre, hidden. ValueError when a row is longer than config.sequence_len.
        """
        if idx.size(1) > self.cfg.sequence_len:
            raise ValueError(f"{idx.size(1)} tokens in a row, but the model was built for {self.cfg.sequence_len}")
        e = None
        if self.oe_tables is not None:
            e = oe_lookup(self.oe_tables, oe_ids(idx, self.cfg.oe_m, self.cfg.vocab_size))
        x_final = self.norm(self.trunk(idx, self.wte(idx), e, trace))
        if trace is not None or targets is None:
            logits = capped_logits(x_final, self.lm_head.weight, self.cfg.softcap)
            if trace is not None:
                trace.update(x_final=x_final, logits=logits)
            if targets is None:
                return logits
        if self.cfg.ffn != "moe" or not self.training:
            return chunked_loss(x_final, self.lm_head.weight, targets, self.cfg.softcap, reduction)
        loss, nats = chunked_loss(x_final, self.lm_head.weight, targets, self.cfg.softcap, reduction, with_nats=True)
        return self._moe_loss(loss, nats, targets >= 0, reduction)

    def _moe_loss(self, loss, nats, counts, reduction):
        """The loss with the routers' balance losses (mean only); the experts' averages see the nats."""
        for ffn in (block.ffn for block in self.blocks):
            if reduction == "mean" and ffn.balance is not None:
                loss = loss + BALANCE_COEFFICIENT * ffn.balance
            if ffn.averages is not None:
                ffn.observe(nats, counts)
            ffn.balance = None  # the graph ends with the step
        return loss


PRESETS = {  # what `python model.py` counts
    "depth 6": dict(depth=6), "depth 8": dict(depth=8), "depth 6, head_dim 64": dict(depth=6, head_dim=64),
    "depth 6 + OE": dict(depth=6, oe_m=150_855), "depth 8 + OE": dict(depth=8, oe_m=150_855),
    "depth 6 + OE + q scale": dict(depth=6, oe_m=150_855, qk_scale="full"),
    "depth 8 + OE + q scale": dict(depth=8, oe_m=150_855, qk_scale="full"),
    "depth 6 + OE + q scale + route + skip": dict(depth=6, oe_m=150_855, qk_scale="full", wte_route="separate", out_skip=True),
    "depth 8 + OE + q scale + route + skip": dict(depth=8, oe_m=150_855, qk_scale="full", wte_route="separate", out_skip=True),
    "laptop (depth 4, head_dim 64)": dict(depth=4, head_dim=64),
    "modern": {}, "modern, 384d, 6 layers": dict(n_embd=384, n_layer=6), "modern, 32 layers": dict(n_layer=32),
    "baseline (nanoGPT)": dict(norm="layer", pos="learned", ffn="relu", tie=False, bias=True),
    "highway": dict(residual="highway"), "highway_scalar": dict(residual="highway_scalar"), "history": dict(history=True),
    "moe": dict(ffn="moe"), "moe_matched": dict(ffn="moe", moe_expert_hidden="split"), "pos": dict(pos="learned"),
    **{f"{attn}, learned positions": dict(attn=attn, pos="learned") for attn in ATTN if attn != "softmax"},
    "gated_delta_scalar, learned, T 512": dict(attn="gated_delta_scalar", pos="learned", sequence_len=512),
    "gated_delta_scalar, none, 555, T 512": dict(attn="gated_delta_scalar", pos="none", sequence_len=512, ffn_hidden=555),
}


def main(argv=None):
    make_parser(__doc__).parse_args(argv)
    print(f"{'preset':40} {'width':>5} {'heads':>5} {'backbone':>12} {'oe':>12} {'total':>12}")
    for name, kw in PRESETS.items():
        cfg = GPTConfig.backbone(**kw) if "depth" in kw else GPTConfig.modern(**kw)
        with torch.device("meta"):
            n = GPT(cfg).num_params()
        print(f"{name:40} {cfg.n_embd:5} {cfg.n_head:5} {n['backbone']:12,} {n['oe']:12,} {n['total']:12,}")


if __name__ == "__main__":
    cli(main)
