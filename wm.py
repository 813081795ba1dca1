"""Delayed Weight Maximization: three stages of credit without a backward pass, the comparators, and the pipeline that delays them.

    stage  delay  weights                              probe                                    reads the columns of
    3      0      lm_head                              none: local slope of the loss            -
    2      1      wte, attn.c_proj, ffn.c_proj         x_L (tangent), wte rows (tangent)        lm_head; the skip alpha_0 I
    1      2      ffn.c_fc, attn.c_v, value_embeds     pre-activation a; attention output y     ffn.c_proj, attn.c_proj
                  attn.c_q, attn.c_k (--active)        q, k before rotary, per head             attn.c_proj

A stage perturbs its activation by sigma * xi, xi = +-1; the reward of unit i is the change of its outgoing column's product with the
receiver's modulation u (WM 1.1); reward * xi / sigma is the credit, and credit x input the pseudo-gradient. Nothing here records a
graph: every function runs under no_grad.

Shapes: B rows, T tokens, N = B T, C = n_embd, H heads, D = head_dim, V vocabulary, G = N / M_g streams of M_g consecutive tokens.
`u` is minus N times the gradient of the mean loss (the direction that lowers it), `packet` what the forward pass of one micro-batch
leaves behind. gamma_l is the product of resid_lambdas above layer l, alpha_0 the coefficient of x0 in x_L (WM 3.1).
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import common
from common import UserError, derive_seed, flag
from loss import chunked_loss
from model import attend as model_attend, norm, rotate
from optim import MuonAdamW, homotopy, retract_spherical_
from wm_kernels import signs, wm_credit, wm_credit_relu2, wm_reward

# clock -> (age of a packet when stage 2 builds its reward, the same for stage 1); they install at ages 1 and 2 whatever the clock
CLOCKS = {"strict_post": (1, 2), "stage2_pre": (0, 2), "both_pre": (0, 1), "origin": (0, 0)}
METHODS = ("wm", "backprop", "sr_lnp", "sr_np", "head_only", "lexical_only", "mismatched_origin")
EQUILIBRATE_TAU = 25     # Pre-Polar Muon equilibrates before the polar step, at full strength after this many steps
HEAD_CHUNK = 128         # tokens whose logits are worked on at once: 4 MiB at V = 8192, which stays in a CPU's cache


@dataclass(frozen=True)
class Rule:
    """The flags of the learning rule and its optimizer, which train_wm.Config extends. Defaults: the co-designed 4-matrix arm."""
    method: str = flag("wm", "learning rule; backprop is the exact gradient of the same active weights", choices=METHODS)
    clock: str = flag("strict_post", "when stages 2 and 1 build their rewards (WM 1.1)", choices=tuple(CLOCKS))
    streams: int = flag(0, "token streams G of a micro-batch; 0 is one per token", low=0, high=2**40)
    scale_factor: float = flag(1.0, "multiplies rewards; --scale_factor M_g undoes the mean over a stream's M_g tokens", low=0, high=1e9)
    sigma: float = flag(1e-2, "size of the probes", low=1e-6, high=10)
    project: bool = flag(True, "project stage-2 credit onto the tangent space of the norm it passed (reward side)")
    tangent: bool = flag(True, "project stage-2 probes likewise (forward side)")
    center: bool = flag(True, "subtract the mean over streams from wte's rewards (no effect with one stream)")
    wte_route: str = flag("skip", "wte's receiver: the skip alpha_0 I (Prop. 3), or lm_head once more", choices=("skip", "head"))
    filtered_v: bool = flag(True, "pair c_v's credit with the attention-filtered input (Prop. 2)")
    active: str = flag("none", "attention matrices that learn beyond c_v and c_proj", choices=("none", "q", "k", "qk"))
    qk_probe: str = flag("decoupled", "q and k probed apart, in one pass, or on alternate steps",
                         choices=("decoupled", "coupled", "multiplexed"))
    gamma_k: float = flag(0.85, "discount of future queries' rewards in a key's credit; 0 is its own position only", low=0, high=1)
    probes: int = flag(1, "q and k probes M averaged before the outer product", low=1, high=4096)
    spherical: bool = flag(True, "c_q and c_k keep their first Frobenius norm")
    unit_rms_qk: bool = flag(True, "scale q and k probes to unit rms per head")
    tangent_qk: bool = flag(True, "project q and k probes onto the tangent space of the QK-norm")
    head_temp: bool = flag(False, "learn one temperature per head")
    reader: str = flag("live", "weights the rewards read (exp36 B): as they are, or through an optimizer",
                       choices=("live", "muon_colnorm", "adamw_frobnorm"))
    draws: int = flag(16, "K of sr_lnp, K_site of sr_np (the paper: 4)", low=1, high=2**20)
    hidden_opt: str = flag("muon", "optimizer of the hidden matrices", choices=("muon", "adamw"))
    hidden_lr: float = flag(0.006, "rate of the hidden matrices", low=0, high=1e10)
    hidden_beta: float = flag(0.95, "momentum of the hidden matrices under Muon", low=0, high=0.9999)
    q_lr: float = flag(0.048, "rate of c_q (the paper: 0.006 sqrt(D))", low=0, high=1e10)
    k_lr: float = flag(0.012, "rate of c_k", low=0, high=1e10)
    q_beta: float = flag(0.95, "momentum of c_q", low=0, high=0.9999)
    k_beta: float = flag(0.98, "momentum of c_k", low=0, high=0.9999)
    lm_lr: float = flag(0.008, "rate of lm_head", low=0, high=1e10)
    lm_pool: str = flag("entrywise", "second moment of lm_head: per entry, or averaged over a row", choices=("entrywise", "row_iso"))
    lm_beta1: float = flag(0.9, "first-moment decay of lm_head", low=0, high=0.9999)
    lm_eps: float = flag(1e-4, "epsilon of lm_head, outside the root", low=0, high=10)
    wte_lr: float = flag(0.12, "rate of wte", low=0, high=1e10)
    ve_lr: float = flag(0.06, "rate of the value embeddings", low=0, high=1e10)
    lrm_min: float = flag(0.2, "rates fall on a line to this fraction", low=0, high=1)
    adamw_anneal: bool = flag(True, "AdamW's rates fall too, not only Muon's")
    packets: str = flag("device", "where delayed packets wait: on the device, or in pinned host memory (the same on a CPU)",
                        choices=("device", "host"))
    packet_dtype: str = flag("float32", "precision of what layers leave in a packet", choices=("float32", "bfloat16"))
    impl: str = flag("auto", "contraction: Triton on CUDA, else torch; outer is the materialising baseline",
                     choices=("auto", "torch", "triton", "outer"))
    precision: str = flag("ieee", "input precision of the Triton kernels", choices=("ieee", "tf32x3", "tf32", "bf16"))


# ---- the model seen by the rule ----

def active_weights(model, rule):
    """{name: parameter} of what the rule trains, by stage: {3: {...}, 2: {...}, 1: {...}}."""
    stages = {3: {}, 2: {}, 1: {}}
    qk = {"c_q": rule.active in ("q", "qk"), "c_k": rule.active in ("k", "qk")}
    for name, role, p in model.roles():
        part = name.split(".")[-2] if role == "matrix" else role
        if role == "lm_head":
            stages[3][name] = p
        elif rule.method != "head_only" and role == "wte":
            stages[2][name] = p
        elif rule.method in ("head_only", "lexical_only"):
            continue
        elif part == "c_proj":
            stages[2][name] = p
        elif part in ("c_fc", "c_v", "value_embeds") or qk.get(part) or role == "q_log":
            stages[1][name] = p
    return stages


def make_optimizer(model, rule, rank=0, world=1):
    """MuonAdamW over the active weights: head, wte, value embeddings, hidden matrices, and c_q, c_k, temperatures where active."""
    lists = {}
    for stage in active_weights(model, rule).values():
        for name, p in stage.items():
            part = next((k for k in ("lm_head", "wte", "value_embeds", "c_q", "c_k", "q_log") if k in name), "hidden")
            lists.setdefault(part, []).append(p)
    adamw = dict(kind="adamw", betas=(0.8, 0.95))
    if rule.hidden_opt == "muon":
        hidden = dict(kind="muon", momentum=rule.hidden_beta, equilibrate_tau=EQUILIBRATE_TAU)
    else:
        hidden = adamw
    recipe = {
        "lm_head": dict(kind="adamw", betas=(rule.lm_beta1, 0.95), eps=rule.lm_eps, pool=rule.lm_pool, initial_lr=rule.lm_lr),
        "wte": dict(adamw, initial_lr=rule.wte_lr), "value_embeds": dict(adamw, initial_lr=rule.ve_lr),
        "hidden": dict(hidden, initial_lr=rule.hidden_lr),
        "c_q": {**hidden, "momentum": rule.q_beta, "initial_lr": rule.q_lr},
        "c_k": {**hidden, "momentum": rule.k_beta, "initial_lr": rule.k_lr},
        "q_log": dict(adamw, initial_lr=0.005),
    }
    return MuonAdamW([dict(recipe[part], role=part, params=params) for part, params in lists.items()], rank, world)


def set_rates(optimizer, step, steps, rule):
    """Every group's rate for `step` of `steps`: linear from 1 to lrm_min times its initial one; returns the multiplier."""
    multiplier = 1 - (1 - rule.lrm_min) * min(step / max(1, steps - 1), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * (multiplier if rule.adamw_anneal or group["kind"] == "muon" else 1.0)
        group["equilibrate"] = homotopy(step, group["equilibrate_tau"]) if group.get("equilibrate_tau") else 0.0
    return multiplier


def skip_gains(model):
    """(gamma [L], alpha_0): how much of layer l's output, and of x0, reaches x_L along the skip path (WM 3.1). Python floats."""
    gamma, product = [], 1.0
    for lam in reversed(model.resid_lambdas.tolist()):
        gamma.insert(0, product)
        product *= lam
    return gamma, product + sum(a * g for a, g in zip(model.x0_lambdas.tolist(), gamma))


def norm_shift(z, d):
    """norm(z + d) - norm(z) [*, C], without the subtraction: in float32 a small d leaves it few digits."""
    eps = torch.finfo(z.dtype).eps                                         # norm()'s own
    before = z.square().mean(-1, keepdim=True).add_(eps).sqrt_()
    after = (z + d).square().mean(-1, keepdim=True).add_(eps).sqrt_()
    growth = (d * (2 * z + d)).mean(-1, keepdim=True) / (after + before)   # after - before
    return (d - z * (growth / before)) / after


def tangent(v, x):
    """P_x v = v - x <x, v> / C for x of root mean square 1, over the last dimension."""
    return v - x * ((v * x).sum(-1, keepdim=True) / x.size(-1))


# ---- stage 3, and the packet ----

def head_scores(x, weight, targets, softcap):
    """(s [N, V], nats [N], head gradient [V, C]) of final states x [N, C] and targets [N] (-1 ignored), chunk by chunk.

    s = (onehot - softmax) (1 - tanh^2) is minus the slope of a token's loss in the raw logits; the gradient is -(1/N) s^T x (stage 3).
    """
    s = x.new_empty(len(x), len(weight))
    nats, grad = x.new_empty(len(x)), torch.zeros_like(weight, dtype=x.dtype)
    w, chunk = weight.to(x.dtype), HEAD_CHUNK * (64 if x.is_cuda else 1)
    keep, buffer = (targets >= 0).to(x.dtype).unsqueeze(1), x.new_empty(min(chunk, len(x)), len(weight))
    for i in range(0, len(x), chunk):
        part, y, kept = x[i:i + chunk], targets[i:i + chunk].clamp_min(0).unsqueeze(1), keep[i:i + chunk]
        t = torch.addmm(s[i:i + chunk], part, w.t(), beta=0, alpha=1 / softcap, out=s[i:i + chunk]).tanh_()
        z = torch.mul(t, softcap, out=buffer[:len(t)])         # at most softcap: exp needs no maximum taken off
        nats_y = z.gather(1, y)
        total = z.exp_().sum(1, keepdim=True)
        nats[i:i + chunk] = ((total.log() - nats_y) * kept).squeeze(1)
        p = z.mul_(-kept / total).scatter_add_(1, y, kept)     # onehot - softmax
        torch.addcmul(p, p, t.square_(), value=-1, out=t)      # times 1 - tanh^2
        grad.addmm_(t.t(), part, alpha=-1 / len(x))
    return s, nats, grad


def record(model, idx, targets, key, first=0):
    """Run the forward pass of a micro-batch: (packet, summed nats, head gradient).

    key names the micro-batch (its probes' signs are regenerated from it), first is the number of its first token in the whole batch.
    """
    trace = {}
    e = model.wte(idx)
    x_L = model.trunk(idx, e, None, trace).flatten(0, 1)
    x_final = norm(x_L)
    s, nats, grad = head_scores(x_final, model.lm_head.weight, targets.flatten(), model.cfg.softcap)
    layers = [{k: v for k, v in layer.items() if k in ("attn_in", "q", "k", "v", "gate", "y", "mlp_in", "pre", "hidden") and v is not None}
              for layer in trace["layers"]]
    packet = dict(key=key, first=first, idx=idx, s=s, x_L=x_L, x_final=x_final, e=e.flatten(0, 1), x0=trace["x0"].flatten(0, 1),
                  layers=layers)
    return packet, nats.sum(), grad


def load(layer, like, keys=None):
    """A packet's layer (or only `keys` of it) on the device and in the precision of `like`; no copy where it is there already."""
    return {k: layer[k].to(device=like.device, dtype=like.dtype, non_blocking=True) for k in keys or layer}


def site(packet, name):
    """(seed, first row) of the signs that perturb the site `name` in this packet."""
    return derive_seed(packet["key"], name), packet["first"]


def draw(packet, name, cols, like):
    """The +-1 signs [N, cols] of a site."""
    seed, first = site(packet, name)
    return signs(packet["idx"].numel(), cols, seed, first, device=like.device, dtype=like.dtype)


def group_size(packet, rule):
    """Tokens M_g of a stream; UserError when --streams does not divide the micro-batch."""
    n = packet["idx"].numel()
    if rule.streams and n % rule.streams:
        raise UserError(f"--streams {rule.streams} does not divide the {n} tokens of a micro-batch")
    return n // rule.streams if rule.streams else 1


def options(packet, rule):
    """Keyword arguments of the contraction."""
    return dict(group=group_size(packet, rule), scale=rule.scale_factor, impl=rule.impl, precision=rule.precision)


# ---- stage 2 ----

def bus_probe(packet, rule):
    """(signs, displacement of x_final), both [N, C]: x_L is moved by sigma times the (tangent) signs."""
    xi = draw(packet, "bus", packet["x_L"].size(1), packet["x_L"])
    moved = tangent(xi, packet["x_final"]) if rule.tangent else xi
    return xi, norm_shift(packet["x_L"], rule.sigma * moved)


def bus_credit(model, packet, reward, rule, readers):
    """Credit u_bus [N, C] of the residual stream at x_L (WM 3.2). `reward` is the packet the reward comes from: itself, or a control."""
    xi, dx = bus_probe(reward, rule)
    xi = xi if packet is reward else bus_probe(packet, rule)[0]
    s = load(reward, dx, ("s",))["s"]
    u = wm_credit(s, dx, readers("lm_head", model.lm_head.weight), xi, rule.sigma, **options(packet, rule))
    return tangent(u, packet["x_final"]) if rule.project else u


def wte_probe(packet, rule):
    """(signs, displacement of x0), both [N, C]: the embedding rows are moved by sigma times the (tangent) signs."""
    xi = draw(packet, "wte", packet["e"].size(1), packet["e"])
    moved = tangent(xi, packet["x0"]) if rule.tangent else xi
    return xi, norm_shift(packet["e"], rule.sigma * moved)


def wte_credit(model, packet, reward, rule, readers, alpha, world=1):
    """Credit [N, C] of the embedding rows: by the diagonal skip alpha_0 I (Prop. 3), or by lm_head's columns (--wte_route head)."""
    xi, dx0 = wte_probe(reward, rule)
    xi = xi if packet is reward else wte_probe(packet, rule)[0]
    opts = options(packet, rule)
    if rule.wte_route == "head":
        dx = norm_shift(reward["x_L"], alpha * dx0)
        R = wm_reward(load(reward, dx, ("s",))["s"], dx, readers("lm_head", model.lm_head.weight), **opts)
    else:
        R = (alpha * reward["bus"] * dx0).unflatten(0, (-1, opts["group"])).mean(1) * rule.scale_factor     # [G, C]
    if rule.center:
        total = torch.cat([R.sum(0), R.new_tensor([len(R)])])
        common.all_sum([total], world)
        R = R - total[:-1] / total[-1] if total[-1] > 1 else R
    credit = R.repeat_interleave(opts["group"], 0) * xi / rule.sigma
    return tangent(credit, packet["x0"]) if rule.project else credit


def stage2(model, packet, reward, rule, readers, world=1):
    """{name: pseudo-gradient} of wte and the c_proj matrices; leaves u_bus in the packet for stage 1."""
    n, (gamma, alpha) = len(packet["x_L"]), skip_gains(model)
    if "bus" not in reward:
        reward["bus"] = bus_credit(model, reward, reward, rule, readers)
    u = reward["bus"] if packet is reward else bus_credit(model, packet, reward, rule, readers)
    grads = {"wte.weight": scatter(packet["idx"], wte_credit(model, packet, reward, rule, readers, alpha, world), model.wte.weight, -1 / n)}
    if rule.method == "lexical_only":
        return grads
    for i, layer in enumerate(packet["layers"]):
        layer = load(layer, u, ("y", "hidden" if "hidden" in layer else "pre"))
        h = layer["hidden"] if "hidden" in layer else F.relu(layer["pre"]).square_()
        for part, inputs in (("attn", layer["y"]), ("ffn", h)):
            grads[f"blocks.{i}.{part}.c_proj.weight"] = outer(u, inputs.flatten(0, 1), -gamma[i] / n)
    return grads


def outer(u, x, scale):
    """scale * u^T x: [N, J], [N, I] -> [J, I]."""
    return torch.addmm(u.new_zeros(()), u.t(), x, beta=0, alpha=scale)


def scatter(idx, rows, table, scale):
    """scale * (one-hot of idx)^T rows, in the shape of the embedding table."""
    return torch.zeros_like(table).index_add_(0, idx.flatten(), (rows * scale).to(table.dtype))


# ---- stage 1 ----

def attention_map(layer, window=None):
    """The causal attention weights [B, H, T, T] of a traced layer, rebuilt from its q and k."""
    B, T, H, D = layer["q"].shape
    q, k = (layer[z].transpose(1, 2).reshape(B * H, T, D) for z in ("q", "k"))
    bias = q.new_zeros(T, T).masked_fill_(~visible(T, q.device, window), -torch.inf)
    return torch.baddbmm(bias, q, k.mT, alpha=D**-0.5).softmax(-1).view(B, H, T, T)


def visible(T, device, window=None):
    """[T, T] booleans: may query row see key column?"""
    age = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
    return (age >= 0) & (age <= (T if window is None else window))


def fc_credit(packet, reward, source, u, W, rule, i):
    """Credit [N, 4C] of the pre-activation, read off c_proj's columns: displacement relu(a + sigma xi)^2 - relu(a)^2."""
    opts, pre = options(packet, rule), source["pre"].flatten(0, 1)
    if packet is reward:
        return wm_credit_relu2(u, pre, W, site(packet, f"fc{i}"), rule.sigma, **opts)
    moved = F.relu(pre + rule.sigma * draw(reward, f"fc{i}", pre.size(1), pre)).square_()
    return wm_credit(u, moved - F.relu(pre).square_(), W, site(packet, f"fc{i}"), rule.sigma, **opts)


def v_credit(packet, reward, u, W, rule, i):
    """Credit [N, C] of the attention output y, moved by sigma xi itself: with one token per stream xi^2 = 1 leaves the contraction."""
    opts = options(packet, rule)
    if opts["group"] == 1 and packet is reward and rule.impl != "outer":
        return torch.mm(u, W.to(u.dtype)).mul_(rule.scale_factor)
    dy = rule.sigma * draw(reward, f"y{i}", u.size(1), u)
    return wm_credit(u, dy, W, site(packet, f"y{i}"), rule.sigma, **opts)


def filter_credit(layer, credit, rule, window=None):
    """Sum credit [N, C] over the queries that saw each position: [B, T, H, D] (without --filtered_v the credit itself).

    The filtered trace of Prop. 2 is xbar(tau) = sum_s A(tau, s) x(s), and c_v's pseudo-gradient sum_tau credit(tau) xbar(tau)^T =
    sum_s [sum_tau A(tau, s) credit(tau)] x(s)^T: the bracket costs C / D times less than xbar, and serves the value embeddings too,
    whose filtered one-hot trace is A itself. A test forms xbar.
    """
    B, T, H, D = layer["q"].shape
    credit = credit.view(B, T, H, D)
    if not rule.filtered_v:
        return credit
    return (attention_map(layer, window).mT @ credit.transpose(1, 2)).transpose(1, 2)


def qk_probe(packet, layer, model, which, name, rule):
    """(perturbed q or k [B, T, H, D], carrier [B, T, H, D]): the carrier moves the vector before rotary, on the sphere of the QK-norm."""
    cos, sin = (z[:layer["q"].size(1)] for z in (model.cos, model.sin))
    gain = layer[which].square().mean(-1, keepdim=True).sqrt()                   # 1, or a head's temperature
    plain = rotate(layer[which] / gain, cos, -sin)
    carrier = draw(packet, name, plain[0, 0].numel(), plain).view_as(plain)
    carrier = tangent(carrier, plain) if rule.tangent_qk else carrier
    carrier = norm(carrier) if rule.unit_rms_qk else carrier
    return rotate(norm(plain + rule.sigma * carrier), cos, sin) * gain, carrier


def attend(q, k, v, mask):
    """Causal attention output [B, T, H, D]."""
    return model_attend(*(z.transpose(1, 2) for z in (q, k, v)), mask).transpose(1, 2)


def attention_output(layer, window):
    """y [B, T, C] once more, from a layer's q, k and v."""
    T = layer["q"].size(1)
    mask = None if window >= T - 1 else visible(T, layer["q"].device, window)
    return attend(layer["q"], layer["k"], layer["v"], mask).flatten(2)


def head_reward(packet, dy, u, W, S, rule):
    """One reward per token and head [B, T, H]: dy [B, T, H, D] against c_proj's columns, summed over the head's channels.

    S [N, C] = u W, or None where streams hold several tokens and the mean over a stream comes first.
    """
    if S is not None:
        return (dy * S.view_as(dy)).sum(-1)
    opts = options(packet, rule)
    R = wm_reward(u, dy.flatten(2).flatten(0, 1), W, **opts).repeat_interleave(opts["group"], 0)
    return R.view_as(dy).sum(-1)


def future_sum(R, gamma, window):
    """sum over tau >= s, tau - s <= window, of gamma^(tau - s) R(tau): [B, T, H] -> [B, T, H]; gamma 0 keeps R."""
    T = R.size(1)
    age = torch.arange(T, device=R.device)[None, :] - torch.arange(T, device=R.device)[:, None]     # tau - s
    weight = torch.where((age >= 0) & (age <= window), float(gamma) ** age.clamp_min(0).to(R.dtype), 0)
    return torch.einsum("st,bth->bsh", weight, R)


def qk_credit(model, packet, reward, layer, source, i, u, W, S, rule):
    """{"c_q": credit, "c_k": credit} [N, C] averaged over M probes, and the key and query rewards' carriers undone by rotary (WM 4.6)."""
    window = model.blocks[i].attn.window
    T, v = layer["q"].size(1), source["v"]
    mask = None if window >= T - 1 else visible(T, v.device, window)
    wanted = [w for w in ("q", "k") if w in rule.active]
    if rule.qk_probe == "multiplexed" and len(wanted) == 2:
        wanted = [wanted[packet["step"] % 2]]
    total = {w: 0.0 for w in wanted}
    for r in range(rule.probes):
        moved, own = {}, {}
        for w in wanted:
            moved[w], own[w] = qk_probe(reward, source, model, w, f"{w}{i}.{r}", rule)
            if packet is not reward:
                own[w] = qk_probe(packet, layer, model, w, f"{w}{i}.{r}", rule)[1]
        if rule.qk_probe == "coupled":
            both = attend(moved.get("q", source["q"]), moved.get("k", source["k"]), v, mask) - source["y"].view_as(v)
        for w in wanted:
            q, k = (moved["q"], source["k"]) if w == "q" else (source["q"], moved["k"])
            dy = both if rule.qk_probe == "coupled" else attend(q, k, v, mask) - source["y"].view_as(v)
            R = head_reward(packet, dy, u, W, S, rule)
            R = future_sum(R, rule.gamma_k, window) if w == "k" else R
            total[w] = total[w] + R.unsqueeze(-1) * own[w]
    return {f"c_{w}": (z / (rule.probes * rule.sigma)).flatten(2).flatten(0, 1) for w, z in total.items()}


def temperature_credit(model, packet, reward, source, i, u, W, S, rule):
    """Credit [N, H] of the log-temperatures: q times exp(sigma xi), one sign per token and head."""
    window = model.blocks[i].attn.window
    B, T, H, D = source["q"].shape
    mask = None if window >= T - 1 else visible(T, u.device, window)
    xi = draw(reward, f"temp{i}", H, u)
    q = source["q"] * torch.exp(rule.sigma * xi).view(B, T, H, 1)
    R = head_reward(packet, attend(q, source["k"], source["v"], mask) - source["y"].view_as(q), u, W, S, rule)
    return R.flatten(0, 1) * (xi if packet is reward else draw(packet, f"temp{i}", H, u)) / rule.sigma


def stage1(model, packet, reward, rule, readers):
    """{name: pseudo-gradient} of c_fc, c_v, the value embeddings and, where active, c_q, c_k and temperatures. Needs reward["bus"]."""
    n, (gamma, _) = packet["idx"].numel(), skip_gains(model)
    grads = {}
    for i, layer in enumerate(packet["layers"]):
        block, u, name = model.blocks[i], reward["bus"] * gamma[i], f"blocks.{i}."
        layer = load(layer, u)
        source = layer if packet is reward else load(reward["layers"][i], u)
        if (rule.active != "none" or rule.head_temp) and reward["layers"][i]["y"].dtype != u.dtype:
            # what a probe of q or k does to y is about as small as the rounding of a bfloat16 y
            source = {**source, "y": attention_output(source, block.attn.window)}
        credit = fc_credit(packet, reward, source, u, readers(f"{name}ffn", block.ffn.c_proj.weight), rule, i)
        grads[f"{name}ffn.c_fc.weight"] = outer(credit, layer["mlp_in"].flatten(0, 1), -1 / n)
        W = readers(f"{name}attn", block.attn.c_proj.weight)
        credit = v_credit(packet, reward, u, W, rule, i)
        inputs, pooled = layer["attn_in"].flatten(0, 1), filter_credit(layer, credit, rule, block.attn.window)
        grads[f"{name}attn.c_v.weight"] = outer(pooled.flatten(2).flatten(0, 1), inputs, -1 / n)
        if "gate" in layer:
            rows = (pooled * layer["gate"].unsqueeze(-1)).flatten(2).flatten(0, 1)
            grads[f"value_embeds.{i}.weight"] = scatter(packet["idx"], rows, model.value_embeds[str(i)].weight, -1 / n)
        S = None
        if rule.active != "none" or rule.head_temp:
            opts = options(packet, rule)
            S = torch.mm(u, W.to(u.dtype)).mul_(rule.scale_factor) if opts["group"] == 1 else None
        if rule.active != "none":
            for part, credit in qk_credit(model, packet, reward, layer, source, i, u, W, S, rule).items():
                grads[f"{name}attn.{part}.weight"] = outer(credit, inputs, -1 / n)
        if rule.head_temp:
            grads[f"{name}attn.q_log"] = (temperature_credit(model, packet, reward, source, i, u, W, S, rule).sum(0) / -n).unsqueeze(1)
    return grads


# ---- the weights that rewards read (exp36 B) ----

def make_readers(model, optimizer, rule):
    """readers(name, W) -> the matrix whose columns a reward reads; name is lm_head or blocks.<i>.attn | ffn (their c_proj).

    live: W. muon_colnorm: (M M^T)^(-1/2) W with the momentum M of the receiver, each column rescaled to its norm in W: the update's
    orthogonalisation folded into the reader. adamw_frobnorm: lm_head divided by its sqrt(v_hat) + eps, rescaled to |W|_F.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def read(name, W):
        state = optimizer.state.get(W, {})
        if rule.reader == "muon_colnorm" and "momentum_buffer" in state:
            M = state["momentum_buffer"].double()
            values, vectors = torch.linalg.eigh(M @ M.T)
            root = values.clamp_min(1e-12 * values[-1].item() + 1e-300).rsqrt()
            P = ((vectors * root) @ vectors.T).to(W.dtype) @ W
            return P * (W.norm(dim=0) / P.norm(dim=0).clamp_min(1e-30))
        if rule.reader == "adamw_frobnorm" and name == "lm_head" and "exp_avg_sq" in state:
            group = groups[id(W)]
            v = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])
            v = v.mean(-1, keepdim=True) if group["pool"] == "row_iso" else v
            P = W / (v.sqrt() + group["eps"])
            return P * (W.norm() / P.norm())
        return W
    return read


# ---- node-perturbation comparators: credit in the same step (WM 3.5) ----

def token_nats(model, x_L, targets):
    """Loss of every token [N] at residual states x_L [N, C]."""
    return chunked_loss(norm(x_L), model.lm_head.weight, targets.flatten(), model.cfg.softcap, "none")


def sr_lnp(model, packet, targets, rule):
    """{name: pseudo-gradient} of surrogate-routed local node perturbation: K tokenwise probes everywhere, one scalar reward per token.

    The bus estimate from K perturbed heads is used at once; hidden units, values (scored at their own position only) and embeddings
    are rewarded by the inner product of their displacement with it, along the skip path.
    """
    K, sigma, n, (gamma, alpha) = rule.draws, rule.sigma, len(packet["x_L"]), skip_gains(model)
    x_L, base = packet["x_L"], token_nats(model, packet["x_L"], targets)

    def estimate(name, cols, reward):  # mean over draws of (scalar reward per row) * signs / sigma
        total = 0.0
        for k in range(K):
            xi = draw(packet, f"{name}.{k}", cols, x_L)
            total = total + reward(xi) * xi
        return total / (K * sigma)

    u = estimate("bus", x_L.size(1), lambda xi: (base - token_nats(model, x_L + sigma * xi, targets)).unsqueeze(1))
    rows = estimate("wte", x_L.size(1), lambda xi: (alpha * u * norm_shift(packet["e"], sigma * xi)).sum(1, keepdim=True))
    grads = {"wte.weight": scatter(packet["idx"], rows, model.wte.weight, -1 / n)}
    for i, layer in enumerate(packet["layers"]):
        block, name, layer = model.blocks[i], f"blocks.{i}.", load(layer, u)
        y, pre, inputs = layer["y"].flatten(0, 1), layer["pre"].flatten(0, 1), layer["attn_in"].flatten(0, 1)
        h = F.relu(pre).square_()
        grads[f"{name}attn.c_proj.weight"], grads[f"{name}ffn.c_proj.weight"] = outer(u, y, -gamma[i] / n), outer(u, h, -gamma[i] / n)
        S = gamma[i] * u @ block.ffn.c_proj.weight
        credit = estimate(f"fc{i}", pre.size(1), lambda xi: ((F.relu(pre + sigma * xi).square_() - h) * S).sum(1, keepdim=True))
        grads[f"{name}ffn.c_fc.weight"] = outer(credit, layer["mlp_in"].flatten(0, 1), -1 / n)
        S = (gamma[i] * u @ block.attn.c_proj.weight).view_as(layer["q"])
        A = attention_map(layer, block.attn.window)

        def by_head(xi):
            dy = (A @ (sigma * xi).view_as(layer["q"]).transpose(1, 2)).transpose(1, 2)
            return (dy * S).sum(-1).repeat_interleave(S.size(-1), -1).flatten(0, 1)
        credit = estimate(f"v{i}", y.size(1), by_head)
        grads.update(value_grads(model, packet, i, layer, credit, inputs))
    return grads


def value_grads(model, packet, i, layer, credit, inputs):
    """{name: pseudo-gradient} of c_v and the value embedding of layer i from credit [N, C] of the value vectors."""
    n, grads = len(credit), {f"blocks.{i}.attn.c_v.weight": outer(credit, inputs, -1 / len(credit))}
    if "gate" in layer:
        rows = credit * layer["gate"].flatten(0, 1).repeat_interleave(layer["q"].size(-1), -1)
        grads[f"value_embeds.{i}.weight"] = scatter(packet["idx"], rows, model.value_embeds[str(i)].weight, -1 / n)
    return grads


def suffix(model, idx, x, x0, start, states=None):
    """Residual state [B, T, C] at the end, from state x after layer start - 1; appends each layer's output to `states`."""
    T = idx.size(1)
    masks = model._masks(T, idx.device)
    for i in range(start, model.cfg.n_layer):
        block = model.blocks[i]
        x = model.resid_lambdas[i] * x + model.x0_lambdas[i] * x0
        ve = model.value_embeds[str(i)](idx) if model.cfg.has_value_embedding(i) else None
        x = block(x, ve, model.cos[:T], model.sin[:T], masks[block.attn.window])
        if states is not None:
            states.append(x)
    return x


def sr_np(model, packet, targets, rule, gamma=0.98):
    """{name: pseudo-gradient} of suffix-recomputed node perturbation: K Gaussian draws at 3 L + 1 sites, and K per layer inside attention.

    A draw moves one site, the rest of the network is recomputed, and each token's loss, centred over the draws, is its reward. Both
    projections use the site behind the block (as the paper does, which omits attn.c_proj's path through its own block's MLP); values
    are rewarded by the alignment of the moved attention output with its own estimate, plus gamma-discounted future tokens.
    """
    K, sigma, idx, n = rule.draws, rule.sigma, packet["idx"], len(packet["x_L"])
    B, T = idx.shape
    x0, states = packet["x0"].view(B, T, -1), []
    suffix(model, idx, x0, x0, 0, states)

    def gauss(name, k, shape):  # one generator per row of the whole batch: ranks draw what one process would
        first = packet["first"] // T
        return torch.stack([torch.randn(shape[1:], generator=torch.Generator().manual_seed(derive_seed(packet["key"], name, k, first + b)))
                            for b in range(B)]).to(x0)

    def estimate(name, shape, end):  # end(perturbation) -> x_L; returns credit [N, cols]
        a = [gauss(name, k, shape) for k in range(K)]
        loss = torch.stack([token_nats(model, end(sigma * z).flatten(0, 1), targets) for z in a])
        reward = loss.mean(0) - loss
        return sum(r.view(B, T, 1) * z for r, z in zip(reward, a)).flatten(0, 1) / (K * sigma)

    def whole(z):
        moved = norm(packet["e"].view(B, T, -1) + z)
        return suffix(model, idx, moved, moved, 0)
    grads = {"wte.weight": scatter(idx, estimate("wte", x0.shape, whole), model.wte.weight, -1 / n)}
    for i, layer in enumerate(packet["layers"]):
        block, name, layer = model.blocks[i], f"blocks.{i}.", load(layer, x0)
        h = F.relu(layer["pre"]).square_()
        middle = states[i] - block.ffn.c_proj(h)                       # between the block's two sublayers
        start = middle - block.attn.c_proj(layer["y"])
        rest = lambda x: suffix(model, idx, x, x0, i + 1)              # noqa: E731
        u = estimate(f"out{i}", x0.shape, lambda z: rest(states[i] + z))
        grads[f"{name}attn.c_proj.weight"] = outer(u, layer["y"].flatten(0, 1), -1 / n)
        grads[f"{name}ffn.c_proj.weight"] = outer(u, h.flatten(0, 1), -1 / n)
        credit = estimate(f"fc{i}", h.shape, lambda z: rest(middle + block.ffn.c_proj(F.relu(layer["pre"] + z).square())))
        grads[f"{name}ffn.c_fc.weight"] = outer(credit, layer["mlp_in"].flatten(0, 1), -1 / n)

        def after_attention(z):
            x = start + block.attn.c_proj(layer["y"] + z)
            return rest(x + block.ffn(norm(x)))
        out = estimate(f"y{i}", x0.shape, after_attention).view_as(layer["q"])
        A, credit = attention_map(layer, block.attn.window), 0.0
        for k in range(K):
            a = gauss(f"v{i}", k, x0.shape).view_as(out)
            dy = (A @ a.transpose(1, 2)).transpose(1, 2)
            credit = credit + future_sum((out * dy).sum(-1), gamma, block.attn.window).unsqueeze(-1) * a / K
        grads.update(value_grads(model, packet, i, layer, credit.flatten(2).flatten(0, 1), layer["attn_in"].flatten(0, 1)))
    return grads


# ---- the pipeline ----

def each_tensor(value, f):
    """Nested dicts and lists with f(t) in place of every tensor t."""
    if isinstance(value, dict):
        return {k: each_tensor(v, f) for k, v in value.items()}
    if isinstance(value, list):
        return [each_tensor(v, f) for v in value]
    return f(value) if torch.is_tensor(value) else value


class Pinned:
    """A pool of pinned host buffers. Copies share the device's stream, so a buffer may be reused as soon as its last copy is queued."""

    def __init__(self):
        self.free = {}

    def put(self, t):
        pool = self.free.get((t.shape, t.dtype))
        buffer = pool.pop() if pool else torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        return buffer.copy_(t, non_blocking=True)

    def give_back(self, t):
        if t.is_pinned():
            self.free.setdefault((t.shape, t.dtype), []).append(t)


class Pipeline:
    """One training step of any --method, and the packets in flight between steps.

    Rewards are built from the weights as they stand before the step's update. strict_post: stage 2 of batch t is built and installed
    in step t + 1, stage 1 in step t + 2 (WM 1.1); the other clocks build earlier and wait. `state_dict` holds everything in flight.
    """

    def __init__(self, model, rule, seed, rank=0, world=1):
        self.model, self.rule, self.seed, self.rank, self.world = model, rule, seed, rank, world
        self.active = active_weights(model, rule)
        names = {name for stage in self.active.values() for name in stage}
        for name, p in model.named_parameters():
            p.requires_grad_(rule.method == "backprop" and name in names)
        self.optimizer = make_optimizer(model, rule, rank, world)
        self.readers = make_readers(model, self.optimizer, rule)
        self.delays = {2: 0, 1: 0} if rule.method in ("lexical_only", "sr_lnp", "sr_np") else {2: 1, 1: 2}
        self.packets, self.waiting, self.pinned = {}, {2: {}, 1: {}}, Pinned()
        self.norms = {name: p.norm().item() for stage in self.active.values() for name, p in stage.items()
                      if rule.spherical and (".c_q." in name or ".c_k." in name)}

    def step(self, step, steps, batches, autocast=None):
        """Train on this rank's rows of the micro-batches [(idx, targets), ...], a consecutive slice; returns the mean loss in nats."""
        set_rates(self.optimizer, step, steps, self.rule)
        self.optimizer.zero_grad()
        autocast = autocast or common.autocast(torch.device("cpu"), torch.float32)
        if self.rule.method == "backprop":
            loss = self._backprop(batches, autocast)
        else:
            with torch.no_grad():
                assert not torch.is_grad_enabled()
                loss = self._forward_only(step, batches, autocast)
        self.optimizer.reduce_gradients()
        self.optimizer.step()
        weights = {name: p for stage in self.active.values() for name, p in stage.items()}
        for name, norm0 in self.norms.items():
            retract_spherical_(weights[name], norm0)
        return loss

    def _backprop(self, batches, autocast):
        total = 0.0
        for idx, targets in batches:
            with autocast:
                loss = self.model(idx, targets)
            (loss / len(batches)).backward()
            total += loss.item() / len(batches)
        return total

    def _forward_only(self, step, batches, autocast):
        rule = self.rule
        pipelined = rule.method in ("wm", "lexical_only", "mismatched_origin")
        late = rule.method == "mismatched_origin"      # its rewards come from the current batch: nothing is built before the forward pass
        if pipelined and not late:
            self._build(step, lambda age: age > 0)
        total, head = 0.0, 0.0
        self.packets[step] = []
        for micro, (idx, targets) in enumerate(batches):
            with autocast:
                packet, nats, grad = record(self.model, idx, targets, f"{self.seed}/{step}/{micro}", self.rank * idx.numel())
            packet["step"] = step
            total += nats.item() / idx.numel() / len(batches)
            head = head + grad / len(batches)
            if rule.method in ("sr_lnp", "sr_np"):
                self._add(2, step, {"sr_lnp": sr_lnp, "sr_np": sr_np}[rule.method](self.model, packet, targets, rule), len(batches))
            elif pipelined:
                self.packets[step].append(self._stow(packet))
        if pipelined:
            self._build(step, lambda age: late or age == 0)
        self._install(step, head)
        return total

    def _stow(self, packet):
        """Keep only what later stages read, in the packet's precision, on the device or in pinned host memory."""
        rule, device = self.rule, packet["idx"].device
        unused = set() if rule.active != "none" or rule.head_temp else {"v"}
        if rule.packets == "host" or rule.packet_dtype != "float32" or packet["layers"][0]["pre"].dtype == torch.bfloat16:
            # made again from the pre-activation: packets are meant to be small, and --packets must not change a bfloat16 run
            unused.add("hidden")
        dtype = torch.bfloat16 if rule.packet_dtype == "bfloat16" else None
        place = self.pinned.put if rule.packets == "host" and device.type == "cuda" else (lambda t: t)
        packet["layers"] = [{k: place(v.to(dtype) if dtype else v) for k, v in layer.items() if k not in unused}
                            for layer in packet["layers"]]
        if "s" in packet:
            packet["s"] = place(packet["s"].to(dtype) if dtype else packet["s"])
        return packet

    def _build(self, step, when):
        """Build the rewards of every packet whose age in this step is the clock's and satisfies `when`."""
        ages = dict(zip((2, 1), (0, 0) if self.rule.method == "lexical_only" else CLOCKS[self.rule.clock]))
        for stage, rule_of in ((2, stage2), (1, stage1)):
            origin = step - ages[stage]
            if not when(ages[stage]) or stage == 1 and self.rule.method == "lexical_only":
                continue
            rewards = self.packets.get(step, []) if self.rule.method == "mismatched_origin" else self.packets.get(origin, [])
            for packet, reward in zip(self.packets.get(origin, []), rewards):
                more = (self.world,) if stage == 2 else ()
                self._add(stage, origin, rule_of(self.model, packet, reward, self.rule, self.readers, *more), len(rewards))
                if self.rule.method != "mismatched_origin":
                    self._forget(packet, stage)
            if stage == 1 or self.rule.method == "lexical_only":
                self.packets.pop(origin, None)

    def _forget(self, packet, stage):
        """Drop what no later stage reads."""
        if stage == 2:
            gone = [packet.pop(k) for k in ("s", "x_L", "e", "x0", "x_final")][:1]
            done = ("hidden",) if self.rule.active != "none" or self.rule.head_temp else ("hidden", "y")
            gone += [layer.pop(k) for layer in packet["layers"] for k in done if k in layer]
        else:
            gone = [t for layer in packet["layers"] for t in layer.values()]
        for t in gone:
            self.pinned.give_back(t)

    def _add(self, stage, origin, grads, micros):
        """Add a micro-batch's share to the pseudo-gradients of batch `origin` that wait for their installation."""
        total = self.waiting[stage].setdefault(origin, {})
        for name, g in grads.items():
            g = g if micros == 1 else g / micros
            total[name] = total[name] + g if name in total else g

    def _install(self, step, head):
        """Give the weights the pseudo-gradients that are due: the head its own, the stages those of a batch as old as their delay."""
        self.active[3]["lm_head.weight"].grad = head
        for stage in (2, 1):
            due = self.waiting[stage].pop(step - self.delays[stage], {})
            for name, g in due.items():
                (self.active[1] | self.active[2])[name].grad = g
        if self.rule.method in ("sr_lnp", "sr_np", "head_only"):
            self.packets.clear()

    def state_dict(self):
        """Optimizer, packets in flight and pseudo-gradients that wait; tensors and plain values only.

        They are the whole batch's, not this rank's, so that a run can go on with another number of ranks: every rank must call this.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        packets, waiting, device = self.packets, self.waiting, self.model.lm_head.weight.device
        if self.world > 1:
            packets = each_tensor(packets, lambda t: common.all_rows(t.to(device), self.world).cpu())
            waiting = each_tensor(waiting, lambda t: common.all_mean(t, self.world))
        return {"optimizer": self.optimizer.state_dict(), "packets": packets, "waiting": waiting, "norms": self.norms}

    def load_state_dict(self, state):
        """Take up what state_dict() returned: of packets this rank's rows."""
        self.optimizer.load_state_dict(state["optimizer"])
        device = self.model.lm_head.weight.device
        packets = each_tensor(state["packets"], lambda t: t.chunk(self.world)[self.rank].to(device))
        for packet in (packet for micro_batches in packets.values() for packet in micro_batches):
            packet["first"] = self.rank * packet["idx"].numel()
        self.packets = {step: [self._stow(packet) for packet in micro_batches] for step, micro_batches in packets.items()}
        self.waiting, self.norms = each_tensor(state["waiting"], lambda t: t.to(device)), dict(state["norms"])
