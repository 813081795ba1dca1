"""The forward pass of every GPTConfig as the papers write it: one row, token and head at a time, in
float64, and small models."""
import torch

from model import GPT, GPTConfig, oe_ids

FAST = ("linear", "delta", "gated_delta", "gated_delta_scalar")
NOPE = dict(pos="none")
BASELINE = dict(norm="layer", pos="learned", ffn="relu", tie=False, bias=True)
# heads -> slopes of ALiBi
SLOPES = {1: [1 / 256], 3: [1 / 16, 1 / 256, 1 / 4]}


def tokens(B=2, T=9, V=37, seed=3):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def shaken(cfg, shake=0.3, seed=1):
    """The model of a config, its tensors moved, so that every part acts."""
    model = GPT(cfg).init_weights(seed)
    gen = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _, _, p in model.roles():
            p.add_(shake * torch.randn(p.shape, generator=gen))
    return model


def backbone(T=12, V=97, **kw):
    sizes = dict(n_layer=3, n_head=2, n_embd=64, vocab_size=V, sequence_len=T)
    return GPTConfig(**{**sizes, **kw})


def modern(**kw):
    sizes = dict(n_embd=24, n_head=3, n_layer=2, sequence_len=11, vocab_size=37, dropout=0.0)
    return GPTConfig.modern(**{**sizes, **kw})


def double(model):
    """The model in float64, its rotary tables included."""
    model, cfg = model.double(), model.cfg
    if model.cos is not None:
        freq = cfg.rope_base ** (-torch.arange(0, cfg.head_dim, 2).double() / cfg.head_dim)
        angle = torch.outer(torch.arange(cfg.sequence_len).double(), freq)
        model.cos, model.sin = angle.cos(), angle.sin()
    return model


def sigmoid(z):
    return 1 / (1 + (-z).exp())


def silu(z):
    return z * sigmoid(z)


def elu1(z):
    return torch.where(z > 0, z + 1, z.exp())


def rms(z, eps=None):
    eps = torch.finfo(torch.float64).eps if eps is None else eps
    return z / (z.square().mean(-1, keepdim=True) + eps).sqrt()


class Reference:
    """logits(idx) of a model, token by token."""

    def __init__(self, model):
        self.cfg = model.cfg
        self.P = {name: p.double() for name, p in model.state_dict().items()}

    def linear(self, name, v):
        return self.P[name + ".weight"] @ v + self.P.get(name + ".bias", 0)

    def norm(self, name, v):
        if self.cfg.norm == "layer":
            v = (v - v.mean()) / (v.var(correction=0) + 1e-5).sqrt()
            return v * self.P[name + ".weight"] + self.P.get(name + ".bias", 0)
        eps = self.cfg.norm_eps if self.cfg.norm == "rms" else None
        return rms(v, eps) * self.P.get(name + ".weight", 1)

    def join(self, name, v, y):
        if self.cfg.residual == "plain":
            return v + y
        g = sigmoid(self.linear(name + ".gate", v))
        return (1 - g) * v + g * y

    def position(self, z, t):
        """A head's q or k [D] at position t: rotary, then QK-norm."""
        cfg, D = self.cfg, len(z)
        if cfg.pos == "rope":
            angle = -t * cfg.rope_base ** (-torch.arange(D // 2).double() * 2 / D)
            turn = torch.polar(torch.ones(D // 2).double(), angle)
            plane = torch.complex(z[:D // 2], z[D // 2:]) * turn
            z = torch.cat((plane.real, plane.imag))
        return rms(z, cfg.norm_eps) if cfg.qk_norm else z

    def gain(self, i):
        """exp(q_log) [H, D], or 1."""
        cfg, D = self.cfg, self.cfg.head_dim
        if cfg.qk_scale == "none":
            return torch.ones(cfg.n_head, 1).double()
        log = self.P[f"blocks.{i}.attn.q_log"].clone()
        if cfg.qk_scale == "masked":
            log[:, :D // 8] = 0
            log = log * (i > 0)
        return (log if cfg.qk_scale == "head" else torch.cat((log, log), 1)).exp()

    def softmax_head(self, i, h, t, q, k, v):
        """What head h reads at t, from its q, k, v [T, D]."""
        cfg, z, values = self.cfg, [], []
        for s in range(max(0, t - cfg.window(i)), t + 1):
            if cfg.pos == "hard_alibi" and h < cfg.n_head // 2 and t - s > h:
                continue
            slope = SLOPES[cfg.n_head][h] if cfg.pos == "alibi" else 0
            z.append(q[t] @ k[s] / len(q[t]) ** 0.5 - slope * (t - s))
            values.append(v[s])
        return sum(w * value for w, value in zip(torch.stack(z).softmax(0), values))

    def memory_head(self, name, h, t, x, q, k, v):
        """The same with fast weights instead of softmax; x holds the layer's inputs."""
        cfg, D = self.cfg, len(q[t])
        S, z = torch.zeros(D, D).double(), torch.zeros(D).double()
        for s in range(t + 1):
            if cfg.attn == "linear":
                S, z = S + torch.outer(v[s], elu1(k[s])), z + elu1(k[s])
                continue
            if cfg.attn != "delta":
                a = sigmoid(self.linear(name + ".c_decay", x[s]))
                S = S * (a[h] if cfg.attn == "gated_delta_scalar" else a.view(-1, 1, D)[h])
            key = silu(k[s]) / silu(k[s]).norm()
            beta = sigmoid(self.linear(name + ".c_beta", x[s])[h])
            S = S + beta * torch.outer(v[s] - S @ key, key)
        if cfg.attn == "linear":
            return S @ elu1(q[t]) / (z @ elu1(q[t]) + 1e-6)
        return S @ (silu(q[t]) / silu(q[t]).norm())

    def attention(self, i, x, ids):
        """y [C] at every token, from the normed inputs x."""
        cfg, name, T, H = self.cfg, f"blocks.{i}.attn", len(x), self.cfg.n_head
        q, k, v = ([self.linear(f"{name}.c_{n}", z).view(H, -1) for z in x] for n in "qkv")
        if cfg.has_value_embedding(i):
            gates = [2 * sigmoid(self.linear(name + ".ve_gate", z[:32])) for z in x]
            rows = [self.P[f"value_embeds.{i}.weight"][n].view(H, -1) for n in ids]
            v = [a + g[:, None] * row for a, g, row in zip(v, gates, rows)]
        if cfg.attn == "softmax":
            q, k = ([torch.stack([self.position(z, t) for z in heads])
                     for t, heads in enumerate(part)] for part in (q, k))
            q = [heads * self.gain(i) for heads in q]
        out = [[] for _ in x]
        for h in range(H):
            mine = [[heads[h] for heads in part] for part in (q, k, v)]
            for t in range(T):
                if cfg.attn == "softmax":
                    out[t].append(self.softmax_head(i, h, t, *mine))
                else:
                    out[t].append(self.memory_head(name, h, t, x, *mine))
        return [torch.cat(y) for y in out]

    def ffn(self, name, x):
        """What the feed-forward layer makes of one token x [C]."""
        cfg, P = self.cfg, self.P

        def dense(e=...):
            def lin(part, v):
                bias = P[f"{name}.{part}.bias"][e] if cfg.bias else 0
                return P[f"{name}.{part}.weight"][e] @ v + bias
            a = lin("c_fc", x)
            if cfg.ffn in ("relu", "relu2"):
                a = a.clamp_min(0) ** (1 if cfg.ffn == "relu" else 2)
            else:
                a = silu(lin("c_gate", x)) * a
            return lin("c_proj", a)
        if cfg.ffn != "moe":
            return dense()
        p = (P[f"{name}.router.weight"] @ x).softmax(0)
        best = sorted(range(len(p)), key=lambda e: -p[e])[:cfg.moe_top_k]
        return sum(p[e] * dense(e) for e in best)

    def row(self, ids):
        """Logits [T, V] of one row."""
        cfg, P, T = self.cfg, self.P, len(ids)
        w = [P["wte.weight"][n] for n in ids]
        u = list(w)
        if cfg.oe_m:
            hashed = oe_ids(torch.tensor([ids]), cfg.oe_m, cfg.vocab_size)
            e = [[P[f"oe_tables.{j}"][hashed[j][0, t]] for j in range(4)] for t in range(T)]
            u = [a + torch.cat(parts) for a, parts in zip(w, e)]
        if cfg.pos == "learned":
            u = [a + P["wpe.weight"][t] for t, a in enumerate(u)]
        x0 = [rms(a, cfg.norm_eps) for a in u] if cfg.embed_norm else u
        anchor = [0 * a for a in w]
        if cfg.wte_route == "separate":
            anchor = [rms(a, cfg.norm_eps) for a in w]
        elif cfg.wte_route == "shared":
            anchor = [a / (b.square().mean() + cfg.shared_eps).sqrt() for a, b in zip(w, u)]
        x = list(x0)
        for i in range(cfg.n_layer):
            name = f"blocks.{i}"
            if cfg.history and i == cfg.n_layer // 2:
                h = [self.linear("history.c_fc", self.norm("history.norm", v)) for v in x]
                means = [sum(h[:t + 1]) / (t + 1) for t in range(T)]
                x = [v + self.linear("history.c_proj", m) for v, m in zip(x, means)]
            if cfg.x0_skip:
                a, b = P["resid_lambdas"][i], P["x0_lambdas"][i]
                c = P["wte_lambdas"][i] if "wte_lambdas" in P else 0
                x = [a * v + b * z + c * r for v, z, r in zip(x, x0, anchor)]
            y = self.attention(i, [self.norm(name + ".norm_attn", v) for v in x], ids)
            y = [self.linear(name + ".attn.c_proj", v) for v in y]
            x = [self.join(name + ".mix_attn", v, new) for v, new in zip(x, y)]
            y = [self.ffn(name + ".ffn", self.norm(name + ".norm_ffn", v)) for v in x]
            x = [self.join(name + ".mix_ffn", v, new) for v, new in zip(x, y)]
        if cfg.out_skip:
            a, *b = P["out_lambdas"]
            x = [v + a * z + (b[0] * r if b else 0) for v, z, r in zip(x, x0, anchor)]
        z = torch.stack([P["lm_head.weight"] @ self.norm("norm", v) for v in x])
        return cfg.softcap * torch.tanh(z / cfg.softcap) if cfg.softcap else z

    def logits(self, idx):
        return torch.stack([self.row(ids) for ids in idx.tolist()])
