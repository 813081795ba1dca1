"""Delayed Weight Maximization: the rule. Three stages of credit, and the comparators.

    stage  delay  weights                   probe                           reads the columns of
    3      0      lm_head                   none: local slope of the loss   -
    2      1      attn.c_proj, ffn.c_proj   x_L (tangent)                   lm_head
                  wte                       its rows (tangent)              the skip alpha_0 I
    1      2      ffn.c_fc                  pre-activation a                ffn.c_proj
                  attn.c_v, value_embeds    attention output y              attn.c_proj
                  attn.c_q, attn.c_k        q, k before rotary, per head    attn.c_proj

A stage perturbs its activation by sigma * xi, xi = +-1. The reward of unit i is the change of its
outgoing column's product with the receiver's modulation u (WM 1.1); reward * xi / sigma is the
credit, and credit x input the pseudo-gradient. wm_pipeline.py decides when each is made.

A new comparator is a function like sr_lnp() and a row of METHODS.

Shapes: B rows, T tokens, N = B T, C = n_embd, H heads, D = head_dim, V vocabulary, G = N / M_g
streams of M_g consecutive tokens. `u` is minus N times the gradient of the mean loss, `packet` what
the forward pass of one micro-batch leaves behind, gamma_l and alpha_0 see skip_gains().
`readers(name, W)` is the matrix that a reward reads where it would read W.
"""
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import common
from common import UserError, derive_seed, flag
from loss import chunked_loss
from model import attend as model_attend
from model import norm, relu2, rotate
from optim import MuonAdamW, homotopy
from wm_kernels import wm_credit, wm_credit_relu2, wm_reward

# clock -> age of a packet when stage 2 builds its reward, and when stage 1 does
CLOCKS = {"strict_post": (1, 2), "stage2_pre": (0, 2), "both_pre": (0, 1), "origin": (0, 0)}
HEAD_CHUNK = 128       # tokens whose logits are worked on at once: 4 MiB at V = 8192, as in a cache


# ---- the weights that learn, and their optimizer ----

STAGE_OF = {"lm_head": 3, "wte": 2, "c_proj": 2, "c_fc": 1, "c_v": 1, "value_embeds": 1,
            "c_q": 1, "c_k": 1, "q_log": 1}


def active_weights(model, rule):
    """{stage: {name: parameter}} of what the rule trains, stages 3, 2 and 1."""
    stages, learns = {3: {}, 2: {}, 1: {}}, METHODS[rule.method].learns
    for name, role, p in model.roles():
        part = name.split(".")[-2] if role == "matrix" else role
        place = part if part in ("lm_head", "wte") else "layers"
        frozen = part in ("c_q", "c_k") and part[-1] not in rule.active
        if part in STAGE_OF and place in learns and not frozen:
            stages[STAGE_OF[part]][name] = p
    return stages


def make_optimizer(model, rule, rank=0, world=1):
    """MuonAdamW over the active weights, those of layers together but for c_q, c_k and q_log."""
    adamw = dict(kind="adamw", betas=(0.8, 0.95))
    hidden = adamw
    if rule.hidden_opt == "muon":   # it equilibrates at full strength from step 25 on
        hidden = dict(kind="muon", momentum=rule.hidden_beta, equilibrate_tau=25)
    recipe = {
        "lm_head": dict(kind="adamw", betas=(rule.lm_beta1, 0.95), eps=rule.lm_eps,
                        pool=rule.lm_pool, initial_lr=rule.lm_lr),
        "wte": dict(adamw, initial_lr=rule.wte_lr),
        "value_embeds": dict(adamw, initial_lr=rule.ve_lr),
        "hidden": dict(hidden, initial_lr=rule.hidden_lr),
        "c_q": dict(hidden, momentum=rule.q_beta, initial_lr=rule.q_lr),
        "c_k": dict(hidden, momentum=rule.k_beta, initial_lr=rule.k_lr),
        "q_log": dict(adamw, initial_lr=0.005),
    }
    groups = {}
    for stage in active_weights(model, rule).values():
        for name, p in stage.items():
            group = next((part for part in recipe if part in name), "hidden")
            groups.setdefault(group, []).append(p)
    rows = [dict(recipe[name], role=name, params=params) for name, params in groups.items()]
    return MuonAdamW(rows, rank, world)


def set_rates(optimizer, step, steps, rule):
    """Set every group's rate at this step: on a line from its first one to lrm_min times it."""
    multiplier = 1 - (1 - rule.lrm_min) * min(step / max(1, steps - 1), 1.0)
    for group in optimizer.param_groups:
        falls = rule.adamw_anneal or group["kind"] == "muon"
        group["lr"] = group["initial_lr"] * (multiplier if falls else 1.0)
        tau = group.get("equilibrate_tau")
        group["equilibrate"] = homotopy(step, tau) if tau else 0.0


# ---- small pieces of the credit ----

def skip_gains(model):
    """(gamma [L], alpha_0): how much of a layer's output, and of x0, x_L holds by the skip path."""
    gamma, product = [], 1.0
    for lam in reversed(model.resid_lambdas.tolist()):
        gamma.insert(0, product)
        product *= lam
    return gamma, product + sum(a * g for a, g in zip(model.x0_lambdas.tolist(), gamma))


def norm_shift(z, d):
    """norm(z + d) - norm(z), unsubtracted: in float32 a small d leaves it few digits."""
    eps = torch.finfo(z.dtype).eps   # norm()'s own
    before = z.square().mean(-1, keepdim=True).add_(eps).sqrt_()
    after = (z + d).square().mean(-1, keepdim=True).add_(eps).sqrt_()
    growth = (d * (2 * z + d)).mean(-1, keepdim=True) / (after + before)   # after - before
    return (d - z * (growth / before)) / after


def tangent(v, x):
    """P_x v = v - x <x, v> / C for x of root mean square 1, over the last dimension."""
    return v - x * ((v * x).sum(-1, keepdim=True) / x.size(-1))


def outer(u, x, scale):
    """scale * u^T x [J, I], of u [*, J] and x [*, I]."""
    u, x = u.flatten(0, -2), x.flatten(0, -2)
    return torch.addmm(u.new_zeros(()), u.t(), x, beta=0, alpha=scale)


def scatter(idx, rows, table):
    """-(1/N) (one-hot of idx)^T rows, in the shape of the embedding table."""
    rows = (rows * (-1 / idx.numel())).to(table.dtype)
    return torch.zeros_like(table).index_add_(0, idx.flatten(), rows)


def group_size(n, rule):
    """Tokens M_g of a stream; UserError when --streams does not divide the micro-batch's n."""
    if rule.streams and n % rule.streams:
        raise UserError(f"--streams {rule.streams} does not divide the {n} tokens of a micro-batch")
    return n // rule.streams if rule.streams else 1


def options(packet, rule):
    """Keyword arguments of the contraction."""
    return dict(group=group_size(packet.tokens, rule), scale=rule.scale_factor,
                impl=rule.impl, precision=rule.precision)


# ---- stage 3 ----

def head_scores(x, weight, targets, softcap):
    """(s [N, V], nats [N], gradient -(1/N) s^T x [V, C]) of final states x [N, C], targets [N].

    s = (onehot - softmax) (1 - tanh^2) is minus the slope of a token's loss in the raw logits.
    Targets of -1 are ignored.
    """
    s = x.new_empty(len(x), len(weight))
    nats, grad = x.new_empty(len(x)), torch.zeros_like(weight, dtype=x.dtype)
    w, chunk = weight.to(x.dtype), HEAD_CHUNK * (64 if x.is_cuda else 1)
    keep = (targets >= 0).to(x.dtype).unsqueeze(1)
    buffer = x.new_empty(min(chunk, len(x)), len(weight))
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        part, kept, out = x[rows], keep[rows], s[rows]
        y = targets[rows].clamp_min(0).unsqueeze(1)
        t = torch.addmm(out, part, w.t(), beta=0, alpha=1 / softcap, out=out).tanh_()
        # at most softcap: exp needs no maximum taken off
        z = torch.mul(t, softcap, out=buffer[:len(t)])
        nats_y = z.gather(1, y)
        total = z.exp_().sum(1, keepdim=True)
        nats[rows] = ((total.log() - nats_y) * kept).squeeze(1)
        p = z.mul_(-kept / total).scatter_add_(1, y, kept)   # onehot - softmax
        torch.addcmul(p, p, t.square_(), value=-1, out=t)    # times 1 - tanh^2
        grad.addmm_(t.t(), part, alpha=-1 / len(x))
    return s, nats, grad


# ---- stage 2 ----
# Rewards come from `packet.source`: the packet itself, but for the mismatched_origin control.

def norm_probe(packet, name, z, x, rule):
    """(signs, displacement of x = norm(z)), both [N, C]: z moves by sigma times (tangent) signs."""
    xi, moved = (p.signs(name, z.size(1), z) for p in (packet, packet.source))
    if rule.tangent:
        moved = tangent(moved, x)
    return xi, norm_shift(z, rule.sigma * moved)


def bus_probe(packet, rule):
    """The probe of x_L: (signs, displacement of x_final), both [N, C]."""
    return norm_probe(packet, "bus", packet.source.x_L, packet.source.x_final, rule)


def bus_credit(model, packet, rule, readers):
    """Credit u_bus [N, C] of the residual stream at x_L (WM 3.2)."""
    xi, dx = bus_probe(packet, rule)
    s, W = packet.source.read("s", dx), readers("lm_head", model.lm_head.weight)
    u = wm_credit(s, dx, W, xi, rule.sigma, **options(packet, rule))
    return tangent(u, packet.x_final) if rule.project else u


def lexical_stage2(model, packet, rule, readers, world=1):
    """{"wte.weight": pseudo-gradient} by --wte_route; reads the source's bus."""
    source, (_, alpha) = packet.source, skip_gains(model)
    xi, dx0 = norm_probe(packet, "wte", source.e, source.x0, rule)
    opts = options(packet, rule)
    if rule.wte_route == "head":
        dx = norm_shift(source.x_L, alpha * dx0)
        W = readers("lm_head", model.lm_head.weight)
        R = wm_reward(source.read("s", dx), dx, W, **opts)
    else:
        R = (alpha * source.bus * dx0).unflatten(0, (-1, opts["group"])).mean(1) * rule.scale_factor
    if rule.center:   # R is [G, C]; the streams of all ranks have one mean
        total = torch.cat([R.sum(0), R.new_tensor([len(R)])])
        common.all_sum([total], world)
        R = R - total[:-1] / total[-1] if total[-1] > 1 else R
    credit = R.repeat_interleave(opts["group"], 0) * xi / rule.sigma
    if rule.project:
        credit = tangent(credit, packet.x0)
    return {"wte.weight": scatter(packet.idx, credit, model.wte.weight)}


def stage2(model, packet, rule, readers, world=1):
    """{name: pseudo-gradient} of wte and c_proj; reads the packet's bus and its source's."""
    grads = lexical_stage2(model, packet, rule, readers, world)
    u, (gamma, _) = packet.bus, skip_gains(model)
    for i, kept in enumerate(packet.layers):
        layer = packet.layer(i, u, ("y", "hidden" if "hidden" in kept else "pre"))
        h = layer["hidden"] if "hidden" in layer else relu2(layer["pre"])
        scale = -gamma[i] / packet.tokens
        grads[f"blocks.{i}.attn.c_proj.weight"] = outer(u, layer["y"], scale)
        grads[f"blocks.{i}.ffn.c_proj.weight"] = outer(u, h, scale)
    return grads


# ---- stage 1 ----

@dataclass
class Layer:
    """Layer i of a packet as stage 1 sees it.

    own, theirs: what the packet and its source keep. u [N, C]: credit of what the layer adds to the
    residual stream. W: attn.c_proj as it is read. S [N, C]: u W, for streams of one token.
    """
    i: int
    window: int
    own: dict
    theirs: dict
    u: torch.Tensor
    W: torch.Tensor = None
    S: torch.Tensor = None

    def mask(self):
        """[T, T] booleans, None where plain causal attention says the same."""
        q = self.own["q"]
        T = q.size(1)
        return None if self.window >= T - 1 else visible(T, q.device, self.window)


def layer_of(model, packet, i, gamma, rule, readers):
    """What stage 1 reads of layer i; gamma: the share of its output that reaches x_L."""
    source, attn = packet.source, model.blocks[i].attn
    u = source.bus * gamma
    own = packet.layer(i, u)
    theirs = own if source is packet else source.layer(i, u)
    W = readers(f"blocks.{i}.attn", attn.c_proj.weight)
    layer = Layer(i, attn.window, own, theirs, u, W)
    if rule.probes_attention:
        if source.layers[i]["y"].dtype != u.dtype:
            # a bfloat16 y is rounded by about what a probe of q or k does to it
            layer.theirs = {**theirs, "y": attend(theirs, layer.mask()).flatten(2)}
        if group_size(packet.tokens, rule) == 1:
            layer.S = torch.mm(u, W.to(u.dtype)).mul_(rule.scale_factor)
    return layer


def visible(T, device, window):
    """[T, T] booleans: may query row see key column?"""
    position = torch.arange(T, device=device)
    age = position[:, None] - position
    return (age >= 0) & (age <= window)


def attention_map(layer, window):
    """The causal attention weights [B, H, T, T] of a traced layer, rebuilt from its q and k."""
    B, T, H, D = layer["q"].shape
    q, k = (layer[z].transpose(1, 2).reshape(B * H, T, D) for z in ("q", "k"))
    bias = q.new_zeros(T, T).masked_fill_(~visible(T, q.device, window), -torch.inf)
    return torch.baddbmm(bias, q, k.mT, alpha=D**-0.5).softmax(-1).view(B, H, T, T)


def attend(layer, mask):
    """Attention output [B, T, H, D] of a layer's q, k and v."""
    return model_attend(*(layer[z].transpose(1, 2) for z in "qkv"), mask).transpose(1, 2)


def fc_credit(packet, layer, W, rule):
    """Credit [N, 4C] of the pre-activation, moved by sigma xi, off the columns of W [C, 4C]."""
    name, opts = f"fc{layer.i}", options(packet, rule)
    pre, site = layer.theirs["pre"].flatten(0, 1), packet.site(name)
    if packet.source is packet:
        return wm_credit_relu2(layer.u, pre, W, site, rule.sigma, **opts)
    xi = packet.source.signs(name, pre.size(1), pre)
    dh = relu2(pre + rule.sigma * xi) - relu2(pre)
    return wm_credit(layer.u, dh, W, site, rule.sigma, **opts)


def v_credit(packet, layer, W, rule):
    """Credit [N, C] of the attention output y, moved by sigma xi, off the columns of W [C, C]."""
    name, u, opts = f"y{layer.i}", layer.u, options(packet, rule)
    if opts["group"] == 1 and packet.source is packet and rule.impl != "outer":
        # with one token per stream xi^2 = 1 leaves the contraction
        return torch.mm(u, W.to(u.dtype)).mul_(rule.scale_factor)
    dy = rule.sigma * packet.source.signs(name, u.size(1), u)
    return wm_credit(u, dy, W, packet.site(name), rule.sigma, **opts)


def filter_credit(layer, credit, rule, window):
    """Sum credit [N, C] over the queries that saw each position: [B, T, H, D] (--filtered_v).

    c_v's pseudo-gradient sum_tau credit(tau) xbar(tau)^T with the filtered trace xbar = A x (Prop.
    2) is sum_s [A^T credit](s) x(s)^T. The bracket costs C / D times less than xbar.
    """
    B, T, H, D = layer["q"].shape
    credit = credit.view(B, T, H, D)
    if not rule.filtered_v:
        return credit
    return (attention_map(layer, window).mT @ credit.transpose(1, 2)).transpose(1, 2)


def attention_shift(layer, moved):
    """What y [B, T, H, D] changes by when {"q": ..., "k": ...} or one of them is moved."""
    y = attend({**layer.theirs, **moved}, layer.mask())
    return y - layer.theirs["y"].view_as(y)


def head_reward(packet, dy, layer, rule):
    """One reward per token and head [B, T, H]: dy [B, T, H, D] against attn.c_proj's columns."""
    if layer.S is not None:
        return (dy * layer.S.view_as(dy)).sum(-1)
    opts = options(packet, rule)
    R = wm_reward(layer.u, dy.flatten(2).flatten(0, 1), layer.W, **opts)
    return R.repeat_interleave(opts["group"], 0).view_as(dy).sum(-1)


def future_sum(R, gamma, window):
    """sum over tau >= s, tau - s <= window, of gamma^(tau - s) R(tau), of R [B, T, H]."""
    position = torch.arange(R.size(1), device=R.device)
    age = (position - position[:, None]).clamp_min(0)   # tau - s
    seen = visible(R.size(1), R.device, window).T
    weight = torch.where(seen, float(gamma) ** age.to(R.dtype), 0)
    return torch.einsum("st,bth->bsh", weight, R)


def qk_probe(model, packet, layer, which, name, rule):
    """(perturbed q or k, carrier), both [B, T, H, D], of a packet's layer (a dict)."""
    cos, sin = (z[:layer["q"].size(1)] for z in (model.cos, model.sin))
    # the vector moves before rotary, on the sphere of the QK-norm; gain: 1, or its temperature
    gain = layer[which].square().mean(-1, keepdim=True).sqrt()
    plain = rotate(layer[which] / gain, cos, -sin)
    carrier = packet.signs(name, plain[0, 0].numel(), plain).view_as(plain)
    if rule.tangent_qk:
        carrier = tangent(carrier, plain)
    if rule.unit_rms_qk:
        carrier = norm(carrier)
    return rotate(norm(plain + rule.sigma * carrier), cos, sin) * gain, carrier


def qk_credit(model, packet, layer, rule):
    """{"c_q": credit, "c_k": credit} [N, C] of what learns, averaged over M probes (WM 4.6)."""
    wanted = [which for which in "qk" if which in rule.active]
    if rule.qk_probe == "multiplexed" and len(wanted) == 2:
        wanted = [wanted[packet.step % 2]]
    total = dict.fromkeys(wanted, 0.0)
    for r in range(rule.probes):
        moved, carrier = {}, {}
        for w in wanted:
            name = f"{w}{layer.i}.{r}"
            moved[w], carrier[w] = qk_probe(model, packet.source, layer.theirs, w, name, rule)
            if packet.source is not packet:
                _, carrier[w] = qk_probe(model, packet, layer.own, w, name, rule)
        if rule.qk_probe == "coupled":
            dy = dict.fromkeys(wanted, attention_shift(layer, moved))
        else:
            dy = {w: attention_shift(layer, {w: moved[w]}) for w in wanted}
        for w in wanted:
            R = head_reward(packet, dy[w], layer, rule)
            if w == "k":
                R = future_sum(R, rule.gamma_k, layer.window)
            total[w] = total[w] + R.unsqueeze(-1) * carrier[w]
    scale = rule.probes * rule.sigma
    return {f"c_{w}": (z / scale).flatten(2).flatten(0, 1) for w, z in total.items()}


def temperature_credit(packet, layer, rule):
    """Credit [N, H] of the log-temperatures: q times exp(sigma xi), a sign per token and head."""
    q = layer.theirs["q"]
    B, T, H, D = q.shape
    xi, theirs = (p.signs(f"temp{layer.i}", H, layer.u) for p in (packet, packet.source))
    moved = q * torch.exp(rule.sigma * theirs).view(B, T, H, 1)
    R = head_reward(packet, attention_shift(layer, {"q": moved}), layer, rule)
    return R.flatten(0, 1) * xi / rule.sigma


def value_grads(model, packet, i, layer, credit):
    """{name: pseudo-gradient} of layer i's c_v and value embedding, from credit [N, C]."""
    grads = {f"blocks.{i}.attn.c_v.weight": outer(credit, layer["attn_in"], -1 / packet.tokens)}
    if "gate" in layer:
        rows = (credit.view_as(layer["q"]) * layer["gate"].unsqueeze(-1)).flatten(2).flatten(0, 1)
        table = model.value_embeds[str(i)].weight
        grads[f"value_embeds.{i}.weight"] = scatter(packet.idx, rows, table)
    return grads


def stage1(model, packet, rule, readers, world=1):
    """{name: pseudo-gradient} of what learns and is no c_proj; reads the source's bus."""
    gamma, _ = skip_gains(model)
    n, grads = packet.tokens, {}
    for i, block in enumerate(model.blocks):
        name, layer = f"blocks.{i}.", layer_of(model, packet, i, gamma[i], rule, readers)
        W = readers(f"{name}ffn", block.ffn.c_proj.weight)
        credit = fc_credit(packet, layer, W, rule)
        grads[f"{name}ffn.c_fc.weight"] = outer(credit, layer.own["mlp_in"], -1 / n)
        credit = v_credit(packet, layer, layer.W, rule)
        pooled = filter_credit(layer.own, credit, rule, layer.window)
        grads.update(value_grads(model, packet, i, layer.own, pooled.flatten(2).flatten(0, 1)))
        if rule.active != "none":
            for part, credit in qk_credit(model, packet, layer, rule).items():
                grads[f"{name}attn.{part}.weight"] = outer(credit, layer.own["attn_in"], -1 / n)
        if rule.head_temp:
            credit = temperature_credit(packet, layer, rule)
            grads[f"{name}attn.q_log"] = (credit.sum(0) / -n).unsqueeze(1)
    return grads


# ---- the weights that rewards read ----

def live(name, W):
    """The reader of weights as they are."""
    return W


def muon_colnorm(W, momentum):
    """(M M^T)^(-1/2) W with the momentum M of W, each column rescaled to its norm in W."""
    M = momentum.double()
    values, vectors = torch.linalg.eigh(M @ M.T)
    root = values.clamp_min(1e-12 * values[-1].item() + 1e-300).rsqrt()
    P = ((vectors * root) @ vectors.T).to(W.dtype) @ W
    return P * (W.norm(dim=0) / P.norm(dim=0).clamp_min(1e-30))


def adamw_frobnorm(W, state, group):
    """lm_head divided by its sqrt(v_hat) + eps, rescaled to |W|_F."""
    v = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])
    v = v.mean(-1, keepdim=True) if group["pool"] == "row_iso" else v
    P = W / (v.sqrt() + group["eps"])
    return P * (W.norm() / P.norm())


def make_readers(optimizer, rule):
    """readers(name, W); name is lm_head or blocks.<i>.attn | ffn, whose c_proj W is."""
    groups = {group["role"]: group for group in optimizer.param_groups}

    def read(name, W):
        state = optimizer.state.get(W, {})
        if rule.reader == "muon_colnorm" and "momentum_buffer" in state:
            return muon_colnorm(W, state["momentum_buffer"])
        if rule.reader == "adamw_frobnorm" and name == "lm_head" and "exp_avg_sq" in state:
            return adamw_frobnorm(W, state, groups[name])
        return W
    return read


# ---- node-perturbation comparators: credit in the same step (WM 3.5) ----

def token_nats(model, x_L, targets):
    """Loss of every token [N] at residual states x_L [N, C]."""
    head = model.lm_head.weight
    return chunked_loss(norm(x_L), head, targets.flatten(), model.cfg.softcap, "none")


def sr_lnp(model, packet, targets, rule):
    """Surrogate-routed local node perturbation: K tokenwise probes, a scalar reward per token.

    The rewards of hidden units, values (at their own position only) and embeddings are the inner
    products of their displacements, along the skip path, with the bus estimate of K heads.
    """
    K, sigma, n = rule.draws, rule.sigma, packet.tokens
    x_L, (gamma, alpha) = packet.x_L, skip_gains(model)
    base = token_nats(model, x_L, targets)

    def estimate(name, cols, reward):
        total = 0.0
        for k in range(K):
            xi = packet.signs(f"{name}.{k}", cols, x_L)
            total = total + reward(xi) * xi
        return total / (K * sigma)

    def bus_reward(xi):
        return (base - token_nats(model, x_L + sigma * xi, targets)).unsqueeze(1)

    def wte_reward(xi):
        return (alpha * u * norm_shift(packet.e, sigma * xi)).sum(1, keepdim=True)

    u = estimate("bus", x_L.size(1), bus_reward)
    rows = estimate("wte", x_L.size(1), wte_reward)
    grads = {"wte.weight": scatter(packet.idx, rows, model.wte.weight)}
    for i, block in enumerate(model.blocks):
        name, layer = f"blocks.{i}.", packet.layer(i, u)
        pre = layer["pre"].flatten(0, 1)
        h = relu2(pre)
        grads[f"{name}attn.c_proj.weight"] = outer(u, layer["y"], -gamma[i] / n)
        grads[f"{name}ffn.c_proj.weight"] = outer(u, h, -gamma[i] / n)
        S_ffn = gamma[i] * u @ block.ffn.c_proj.weight
        S_attn = (gamma[i] * u @ block.attn.c_proj.weight).view_as(layer["q"])
        A = attention_map(layer, block.attn.window)

        def fc_reward(xi):
            return ((relu2(pre + sigma * xi) - h) * S_ffn).sum(1, keepdim=True)

        def v_reward(xi):
            dy = (A @ (sigma * xi).view_as(S_attn).transpose(1, 2)).transpose(1, 2)
            per_head = (dy * S_attn).sum(-1)
            return per_head.repeat_interleave(S_attn.size(-1), -1).flatten(0, 1)

        credit = estimate(f"fc{i}", pre.size(1), fc_reward)
        grads[f"{name}ffn.c_fc.weight"] = outer(credit, layer["mlp_in"], -1 / n)
        credit = estimate(f"v{i}", x_L.size(1), v_reward)
        grads.update(value_grads(model, packet, i, layer, credit))
    return grads


def sr_np(model, packet, targets, rule):
    """Suffix-recomputed node perturbation: K Gaussian draws at each of 3 L + 1 sites.

    A draw moves one site, the rest of the network is recomputed, and each token's loss, centred
    over the draws, is its reward. Both projections use the site behind the block, as in the paper.
    K more draws per layer move values, rewarded by the alignment of the moved attention output with
    its own estimate, plus that of later tokens, discounted.
    """
    K, sigma, n, idx = rule.draws, rule.sigma, packet.tokens, packet.idx
    B, T = idx.shape
    x0, states = packet.x0.view(B, T, -1), []
    model.layers(idx, x0, x0, states=states)

    def gauss(name, k, shape):
        # one generator per row of the whole batch: ranks draw what one process would
        rows = []
        for row in range(packet.first // T, packet.first // T + B):
            gen = torch.Generator().manual_seed(derive_seed(packet.key, name, k, row))
            rows.append(torch.randn(shape[1:], generator=gen))
        return torch.stack(rows).to(x0)

    def estimate(name, end, shape=x0.shape):
        # end(perturbation) -> x_L; returns credit [N, cols]
        draws = [gauss(name, k, shape) for k in range(K)]
        ends = (end(sigma * z).flatten(0, 1) for z in draws)
        loss = torch.stack([token_nats(model, x_L, targets) for x_L in ends])
        reward = (loss.mean(0) - loss).view(K, B, T, 1)
        return sum(r * z for r, z in zip(reward, draws)).flatten(0, 1) / (K * sigma)

    def all_layers(z):
        moved = norm(packet.e.view_as(x0) + z)
        return model.layers(idx, moved, moved)

    rows = estimate("wte", all_layers)
    grads = {"wte.weight": scatter(idx, rows, model.wte.weight)}
    for i, block in enumerate(model.blocks):
        name, layer = f"blocks.{i}.", packet.layer(i, x0)
        h = relu2(layer["pre"])
        middle = states[i] - block.ffn.c_proj(h)   # between the block's two sublayers
        start = middle - block.attn.c_proj(layer["y"])

        def rest(x):
            return model.layers(idx, x, x0, start=i + 1)

        def behind_fc(z):
            return rest(middle + block.ffn.c_proj(relu2(layer["pre"] + z)))

        def behind_attention(z):
            x = start + block.attn.c_proj(layer["y"] + z)
            return rest(x + block.ffn(norm(x)))

        u = estimate(f"out{i}", lambda z: rest(states[i] + z))
        grads[f"{name}attn.c_proj.weight"] = outer(u, layer["y"], -1 / n)
        grads[f"{name}ffn.c_proj.weight"] = outer(u, h, -1 / n)
        credit = estimate(f"fc{i}", behind_fc, h.shape)
        grads[f"{name}ffn.c_fc.weight"] = outer(credit, layer["mlp_in"], -1 / n)
        out = estimate(f"y{i}", behind_attention).view_as(layer["q"])
        A, credit = attention_map(layer, block.attn.window), 0.0
        for k in range(K):
            a = gauss(f"v{i}", k, x0.shape).view_as(out)
            dy = (A @ a.transpose(1, 2)).transpose(1, 2)
            R = future_sum((out * dy).sum(-1), 0.98, block.attn.window)
            credit = credit + R.unsqueeze(-1) * a / K
        grads.update(value_grads(model, packet, i, layer, credit.flatten(2).flatten(0, 1)))
    return grads


# ---- the methods ----

NOW = {2: 0, 1: 0}
DRAWS = {"sigma", "draws"}
STREAMS = {"sigma", "streams", "scale_factor", "project", "tangent", "center", "wte_route",
           "packet_dtype", "precision"}
DELAYED = STREAMS | {"clock", "filtered_v", "reader", "qk_probe", "gamma_k", "probes",
                     "unit_rms_qk", "tangent_qk"}
METHOD_FLAGS = DELAYED | DRAWS   # flags of Rule that not all methods have


@dataclass(frozen=True)
class Method:
    """How a method finds its gradients: stages, gradients, autograd, or the head's alone.

    stages: {stage: (model, packet, rule, readers, world) -> {name: pseudo-gradient}}. gradients:
    (model, packet, targets, rule) -> the same. autograd: by a backward pass. delays: {stage: age of
    a packet when its credit is installed}; gradients come in their own step. late: rewards come
    from the batch of the step that builds them. learns: the parts that have a rule. probes_qk: so
    have q, k and temperatures. min_draws: fewer give no credit. flags: those of METHOD_FLAGS that
    act; all of them where a row does not say.
    """
    stages: dict = field(default_factory=dict)
    gradients: Callable = None
    autograd: bool = False
    delays: dict = field(default_factory={2: 1, 1: 2}.copy)
    late: bool = False
    learns: tuple = ("lm_head", "wte", "layers")
    probes_qk: bool = False
    min_draws: int = 1
    flags: set = field(default_factory=METHOD_FLAGS.copy)


METHODS = {
    "wm": Method({2: stage2, 1: stage1}, probes_qk=True, flags=DELAYED),
    "backprop": Method(autograd=True, probes_qk=True, flags=set()),
    "sr_lnp": Method(gradients=sr_lnp, flags=DRAWS),
    "sr_np": Method(gradients=sr_np, min_draws=2, flags=DRAWS),
    "head_only": Method(learns=("lm_head",), flags=set()),
    "lexical_only": Method({2: lexical_stage2}, delays=NOW, flags=STREAMS,
                           learns=("lm_head", "wte")),
    "mismatched_origin": Method({2: stage2, 1: stage1}, late=True, probes_qk=True,
                                flags=DELAYED - {"reader"}),
}


# ---- the flags ----

RATE, BETA = dict(low=0, high=1e10), dict(low=0, high=0.9999)


@dataclass(frozen=True)
class Rule:
    """Flags of the rule and its optimizer; the defaults are the co-designed 4-matrix arm."""
    method: str = flag("wm", "learning rule; backprop is exact, for the same weights", choices=tuple(METHODS))
    clock: str = flag("strict_post", "when stages 2 and 1 build their rewards (WM 1.1)", choices=tuple(CLOCKS))
    streams: int = flag(0, "token streams G of a micro-batch; 0: one per token", low=0, high=2**40)
    scale_factor: float = flag(1.0, "factor of all rewards; M_g undoes the mean over a stream", low=0, high=1e9)
    sigma: float = flag(1e-2, "size of the probes", low=1e-6, high=10)
    project: bool = flag(True, "stage-2 credit is tangent to the norm it passed")
    tangent: bool = flag(True, "stage-2 probes are tangent to the norm they pass")
    center: bool = flag(True, "subtract the mean over streams, if several, from wte's rewards")
    wte_route: str = flag("skip", "wte's receiver: the skip alpha_0 I (Prop. 3), or lm_head", choices=("skip", "head"))
    filtered_v: bool = flag(True, "pair c_v's credit with the attention-filtered input (Prop. 2)")
    active: str = flag("none", "attention matrices that learn beside c_v and c_proj", choices=("none", "q", "k", "qk"))
    qk_probe: str = flag("decoupled", "probe q and k apart, in one pass, or on alternate steps",
                         choices=("decoupled", "coupled", "multiplexed"))
    gamma_k: float = flag(0.85, "discount of future queries' rewards in a key's credit", low=0, high=1)
    probes: int = flag(1, "probes of q and k averaged before the outer product", low=1, high=4096)
    spherical: bool = flag(True, "c_q and c_k keep their first Frobenius norm")
    unit_rms_qk: bool = flag(True, "q and k probes have root mean square 1 per head")
    tangent_qk: bool = flag(True, "q and k probes are tangent to the QK-norm")
    head_temp: bool = flag(False, "learn one temperature per head")
    reader: str = flag("live", "weights that rewards read", choices=("live", "muon_colnorm", "adamw_frobnorm"))
    draws: int = flag(16, "draws K of sr_lnp, and of each site of sr_np (the paper: 4)", low=1, high=2**20)
    hidden_opt: str = flag("muon", "optimizer of the hidden matrices", choices=("muon", "adamw"))
    hidden_lr: float = flag(0.006, "rate of the hidden matrices", **RATE)
    hidden_beta: float = flag(0.95, "Muon's momentum of the hidden matrices", **BETA)
    q_lr: float = flag(0.048, "rate of c_q (the paper: 0.006 sqrt(D))", **RATE)
    k_lr: float = flag(0.012, "rate of c_k", **RATE)
    q_beta: float = flag(0.95, "Muon's momentum of c_q", **BETA)
    k_beta: float = flag(0.98, "Muon's momentum of c_k", **BETA)
    lm_lr: float = flag(0.008, "rate of lm_head", **RATE)
    lm_pool: str = flag("entrywise", "second moments of lm_head: by entry or row", choices=("entrywise", "row_iso"))
    lm_beta1: float = flag(0.9, "beta1 of lm_head's AdamW", **BETA)
    lm_eps: float = flag(1e-4, "epsilon of lm_head's AdamW, outside the root", low=0, high=10)
    wte_lr: float = flag(0.12, "rate of wte", **RATE)
    ve_lr: float = flag(0.06, "rate of the value embeddings", **RATE)
    lrm_min: float = flag(0.2, "fraction of the rates that is left at the end", low=0, high=1)
    adamw_anneal: bool = flag(True, "AdamW's rates fall too, not only Muon's")
    packets: str = flag("device", "memory in which packets wait", choices=("device", "host"), names=False)
    packet_dtype: str = flag("float32", "precision of what layers leave in a packet", choices=("float32", "bfloat16"))
    impl: str = flag("auto", "contraction; auto: Triton on CUDA, else torch; outer: the materialising baseline",
                     choices=("auto", "torch", "triton", "outer"), names=False)
    precision: str = flag("ieee", "input precision of the Triton kernels", choices=("ieee", "tf32x3", "tf32", "bf16"))

    @property
    def probes_attention(self):
        """Do stage 1's probes move q or k, so that packets keep v and y?"""
        return self.active != "none" or self.head_temp
