"""Every update rule as a pure function, the schedules, and one optimizer class that calls them.

    rule                paper            formula
    polar_express       Polar Express    five odd polynomials of G / (1.02 |G|_F): G -> the nearest
                                         orthogonal matrix
    normuon_scale       NorMuon          rows (of wide matrices: columns) over the root of their
                                         running mean square
    entrywise_adamw     AdamW            m_hat / (sqrt(v_hat) + eps)
    row_isotropic_adamw WM 3.4           the same with v_hat averaged over the row
    retract_spherical_  WM 4.6           W * |W_0|_F / |W|_F
    oe_row_update       OE 2.1 A         visited rows: table -= lr * gbar / rms(gbar),
                                         gbar = grad / count; no moments, no decay
    equilibrate         OE 2.1 B, BiEq   rows, then columns, scaled towards equal root mean square
    neumann_whiten      OE 2.1 B         Uc - alpha/2 Uc (Uc^T Uc) / |Uc^T Uc|_F, Uc = U - mean row
    head_blocks         ABL 13, Kimi K3  Per-Head Muon: rows (of q, k, v) or columns (of proj) of
                                         each head are a matrix of their own
    qk_clip_            ABL 14, Kimi K2  MuonClip: a head's rows of q and k times sqrt(tau / smax)
                                         when its largest logit smax > tau
    keep_topk_          ABL 8, meProp    only the largest entries of each gradient survive

Matrix functions reduce over the last two dimensions only: a batch stays separate matrices. A group
of MuonAdamW is {"params", "kind", "initial_lr", ...}; set_schedule() turns step numbers into its
lr, momentum and weight decay before every step.

A new rule for the layers' matrices is a function (gradient, state, group) -> direction and a row
of KINDS: "mine": (partial(one_by_one, mine), dict(its defaults), ANY). A script whose flag has
choices=MATRIX_KINDS then offers it.
"""
import math
from functools import partial

import torch

from common import UserError, all_sum

POLAR_COEFFICIENTS = (  # Polar Express, five steps, as published
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
WARM_STEPS = 11   # the OE paper's untimed steps: progress counts from there ...
SHORT_RUN = 100   # ... except in runs shorter than this
MUON_RAMP = 300   # steps over which Muon's momentum rises from 0.85 to 0.95
TINY = 1e-30


# ---- schedules: progress in [0, 1] -> factor of the learning rate ----

def ramp_down(parts, progress):
    """1, then a line to 0 over the last 1/parts of the run."""
    return min(1.0, parts * (1 - progress))


def cosine(progress):
    """Half a wave from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * progress))


SCHEDULES = {"trapezoid": partial(ramp_down, 2), "cosine": cosine,
             "wsd": partial(ramp_down, 5), "linear": partial(ramp_down, 1)}


def run_progress(step, steps):
    """The fraction of the run that the schedules see: clip((step - 11) / (steps - 11), 0, 1)."""
    warm = WARM_STEPS if steps >= SHORT_RUN else 0
    return min(max((step - warm) / (steps - warm), 0.0), 1.0)


def warmup_multiplier(step, steps, warmup, schedule="cosine"):
    """Factor of the learning rate at `step` (0-based): (step + 1) / warmup, then the schedule."""
    if step < warmup:
        return (step + 1) / warmup
    return SCHEDULES[schedule]((step - warmup) / max(1, steps - warmup))


def muon_momentum(step, progress, cooldown=False):
    """0.85 -> 0.95 over the first 300 steps; cooldown: 0.95 -> 0.85 over the run's last half."""
    ramp = 0.85 + 0.10 * min(step / MUON_RAMP, 1.0)
    return ramp - 0.10 * max(0.0, 2 * progress - 1) if cooldown else ramp


def homotopy(step, tau):
    """alpha_t = min(t / tau, 1)^2, the strength with which a preconditioner is switched on."""
    return min(step / tau, 1.0) ** 2


# ---- rules ----

def polar_express(G, steps=5):
    """Polar factor of G [..., m, n], in G's dtype: singular values go to about 1."""
    X = G / (G.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    wide = G.size(-2) <= G.size(-1)
    X = X if wide else X.mT
    for a, b, c in POLAR_COEFFICIENTS[:steps]:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c) if A.ndim == 3 else b * A + c * (A @ A)
        X = torch.baddbmm(X, B, X, beta=a) if X.ndim == 3 else a * X + B @ X
    return X if wide else X.mT


def normuon_scale(O, v, beta2=0.95):
    """NorMuon: (O scaled, new v) of O [..., m, n], at O's Frobenius norm.

    v is the running mean square of each row [..., m, 1] if m >= n, else of each column [..., 1, n].
    """
    dim = -1 if O.size(-2) >= O.size(-1) else -2
    square = O.to(v.dtype).square().mean(dim=dim, keepdim=True)
    v = v.lerp(square, 1 - beta2)
    scale = v.clamp_min(1e-10).rsqrt()
    # |O|_F up to the factor that cancels in the ratio
    before = square.sum(dim=(-2, -1), keepdim=True).sqrt()
    after = (square * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return O * (scale * (before / after.clamp_min(1e-10))).to(O.dtype), v


def equilibrate(M, alpha, passes=2):
    """BiEq homotopy on M [..., m, n].

    Per pass rows, then columns, are multiplied by (rms(M) / rms(row or column))^alpha. alpha 0
    is the identity, alpha 1 with many passes makes all row and column rms equal; zeros stay zero.
    """
    # the matrix is r M c at every moment: its energies are products of M^2 with c^2 and r^2
    energy = M.square()
    r, c = torch.ones_like(M[..., :1]), torch.ones_like(M[..., :1, :])

    def factor(line):
        whole = line.mean(dim=(-2, -1), keepdim=True)
        return torch.where(line > 0, (whole / line).pow(alpha / 2), 1)

    for _ in range(passes):
        r = r * factor(r.square() * (energy @ c.square().mT) / M.size(-1))
        c = c * factor(c.square() * (r.square().mT @ energy) / M.size(-2))
    return M * r * c


def neumann_whiten(U, alpha):
    """Right-projected Neumann-Gram step on U [..., rows, n]: see the table."""
    U = U - U.mean(dim=-2, keepdim=True)
    gram = U.mT @ U
    return U - (alpha / 2) * (U @ (gram / (gram.norm(dim=(-2, -1), keepdim=True) + TINY)))


def neumann_whiten_rows(U, alpha):
    """neumann_whiten of U [rows, n] of which many rows are zero, as in an embedding's gradient.

    With m the mean row, G = U^T U - rows m^T m, and zero rows become -m + alpha/2 m G / |G|_F.
    """
    hit = (U.abs().amax(dim=1) != 0).nonzero().squeeze(1)  # also where it is NaN
    if len(hit) > 0.5 * len(U):
        return neumann_whiten(U, alpha)
    some, mean = U[hit], U.mean(dim=0, keepdim=True)
    gram = some.T @ some - len(U) * (mean.T @ mean)
    gram = (alpha / 2) * gram / (gram.norm() + TINY)
    rest = mean @ gram - mean
    return rest.repeat(len(U), 1).index_copy_(0, hit, some - some @ gram + rest)


def entrywise_adamw(m, v, step, beta1, beta2, eps):
    """AdamW's direction from its moments after `step` updates."""
    root = (v / (1 - beta2**step)).sqrt_().add_(eps)
    return m / root.mul_(1 - beta1**step)


def row_isotropic_adamw(m, v, step, beta1, beta2, eps):
    """entrywise_adamw with v averaged over its last dimension."""
    return entrywise_adamw(m, v.mean(dim=-1, keepdim=True), step, beta1, beta2, eps)


# (m, v, step, beta1, beta2, eps) -> direction
POOL = {"entrywise": entrywise_adamw, "row_iso": row_isotropic_adamw}


@torch.no_grad()
def retract_spherical_(W, norm0):
    """Rescale W [..., m, n], in place, to the Frobenius norm norm0, a number or [..., 1, 1]."""
    return W.mul_(norm0 / W.norm(dim=(-2, -1), keepdim=True).clamp_min(TINY))


def head_blocks(W, n, dim=-2):
    """W [..., r, c] as n matrices [..., n, r', c']: blocks of rows (dim -2) or columns (-1)."""
    if dim == -2:
        return W.unflatten(-2, (n, -1))
    return W.unflatten(-1, (n, -1)).movedim(-2, -3)


def join_heads(blocks, dim=-2):
    """The inverse of head_blocks()."""
    return blocks.flatten(-3, -2) if dim == -2 else blocks.movedim(-3, -2).flatten(-2)


@torch.no_grad()
def qk_clip_(wq, wk, smax, tau):
    """MuonClip, in place: afterwards the same input's logits reach tau where they went beyond.

    smax [H]: each head's largest logit. wq, wk [H * D, C], or biases [H * D]. Where no head exceeds
    tau nothing is written.
    """
    if not bool((smax > tau).any()):
        return
    scale = torch.where(smax > tau, (tau / smax.clamp_min(TINY)).sqrt(), 1)
    for w in (wq, wk):
        heads = w.unflatten(0, (len(scale), -1))
        w.copy_((heads * scale.to(w.dtype).view(-1, *[1] * w.ndim)).flatten(0, 1))


@torch.no_grad()
def keep_topk_(grads, fraction):
    """meProp, in place: a tensor keeps the ceil(fraction * n) largest of its n entries, else 0."""
    if fraction >= 1:
        return
    for g in grads:
        flat = g.flatten()
        n = math.ceil(round(fraction * len(flat), 6))  # 0.07 * 100 is 7.000000000000001
        kept = flat.abs().topk(max(1, n), sorted=False).indices
        g.copy_(torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view_as(g))


def oe_row_update(table, grad, count, lr, whiten=0.0):
    """Moment-free update of a hashed table's visited rows, in place; returns those rows (int64).

    table, grad [rows, n]; count [rows] float32, visits since the last update, which is set to 0.
    The rms is over all visited entries. whiten: strength of a Neumann step on gbar before (the
    paper's Table-Neumann control). Rows with count 0 keep every bit.
    """
    rows = count.nonzero().squeeze(1)
    if len(rows):
        acc = torch.promote_types(table.dtype, torch.float32)
        gbar = grad[rows].to(acc) / count[rows].to(acc).unsqueeze(1)
        gbar = neumann_whiten(gbar, whiten) if whiten else gbar
        rms = gbar.square().mean().sqrt().clamp_min(TINY)
        table.index_copy_(0, rows, (table[rows].to(acc) - lr * gbar / rms).to(table.dtype))
        count.index_fill_(0, rows, 0)
    return rows


# ---- kinds of groups: (optimizer, parameters of one shape, group) updates them in place ----

def one_by_one(rule, optimizer, params, group):
    """W <- (1 - lr * weight_decay) W - lr * rule(gradient, state, group).

    float32_state: a bfloat16 W has a master copy in float32, and gradient and state are float32.
    """
    for p in params:
        state = optimizer.state[p]
        wide = group["float32_state"] and p.dtype == torch.bfloat16
        if wide and "master" not in state:
            state["master"] = p.float()
        weight = state["master"] if wide else p
        direction = rule(p.grad.to(weight.dtype), state, group)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"])
        if wide:
            p.copy_(weight)


def adamw(gradient, state, group):
    """The rule of kind adamw."""
    if "step" not in state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
    if group["neumann"] and gradient.ndim == 2:
        gradient = neumann_whiten_rows(gradient, group["neumann"])
    (beta1, beta2), m, v = group["betas"], state["exp_avg"], state["exp_avg_sq"]
    state["step"] += 1
    m.lerp_(gradient, 1 - beta1)
    v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return POOL[group["pool"]](m, v, state["step"], beta1, beta2, group["eps"])


def muon(optimizer, params, group):
    """Muon of matrices, which share each matrix product."""
    states = [optimizer.state[p] for p in params]
    for p, state in zip(params, states):
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        if group["normuon"] and "second_moment" not in state:
            *lead, rows, cols = p.shape
            line = (rows, 1) if rows >= cols else (1, cols)
            state["second_moment"] = p.new_zeros(*lead, *line)
    grads, buffers = [p.grad for p in params], [state["momentum_buffer"] for state in states]
    torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
    # Nesterov's momentum: [K, ..., rows, cols]
    u = torch.stack(grads).lerp_(torch.stack(buffers), group["momentum"])
    blocks = head_blocks(u, group["heads"], group["head_axis"])  # [K, ..., heads, rows', cols']
    flat = blocks.flatten(0, -3)
    if group["equilibrate"]:
        flat = equilibrate(flat, group["equilibrate"])
    flat = optimizer._share(polar_express, flat.to(group["polar_dtype"]))
    u = join_heads(flat.view(blocks.shape), group["head_axis"])
    if group["normuon"]:
        moments = torch.stack([state["second_moment"] for state in states])
        u, moments = normuon_scale(u, moments, group["beta2"])
        for state, moment in zip(states, moments):
            state["second_moment"].copy_(moment)
    lr = group["lr"] * max(1.0, blocks.size(-2) / blocks.size(-1)) ** 0.5
    for p, direction in zip(params, u.to(params[0].dtype)):
        if group["weight_decay"]:  # cautious: only where it agrees with the update
            direction = direction + group["weight_decay"] * p * (direction * p >= 0)
        p.add_(direction, alpha=-lr)


def oe_rows(optimizer, params, group):
    """oe_row_update of hashed tables."""
    for p in params:
        p.visited = oe_row_update(p, p.grad, p.visits, group["lr"], group["neumann"])


COMMON = dict(kind="adamw", lr=0.0, initial_lr=0.0, weight_decay=0.0, initial_decay=0.0,
              float32_state=False)
# kind -> its update, what its groups have where they say nothing, least and most dimensions
ANY = (0, math.inf)
KINDS = {
    # neumann: whiten the gradients of matrices. pool: a key of POOL
    "adamw": (partial(one_by_one, adamw),
              dict(betas=(0.8, 0.95), eps=1e-10, neumann=0.0, pool="entrywise"), ANY),
    # leading dimensions are separate matrices. heads, head_axis: so are the blocks of head_blocks()
    "muon": (muon, dict(momentum=0.95, beta2=0.95, equilibrate=0.0, polar_dtype=torch.float32,
                        normuon=True, heads=1, head_axis=-2), (2, math.inf)),
    "oe": (oe_rows, dict(neumann=0.0), (2, 2)),
}
MATRIX_KINDS = tuple(kind for kind in KINDS if kind != "oe")   # what the layers' matrices can have


# ---- the optimizer ----

class MuonAdamW(torch.optim.Optimizer):
    """Updates every group by the row of KINDS that it names; step() never overwrites p.grad.

    KeyError for an unknown kind, ValueError for parameters that its kind cannot update. rank,
    world: this process among those that train together.
    """

    def __init__(self, groups, rank=0, world=1):
        self.rank, self.world, defaults = rank, world, COMMON
        for _, kind, _ in KINDS.values():   # every group has the keys of every kind
            defaults = {**kind, **defaults}
        own = [KINDS[group.get("kind", "adamw")][1] for group in groups]
        super().__init__([{**kind, **group} for kind, group in zip(own, groups)], defaults)
        for group in self.param_groups:
            _, _, (least, most) = KINDS[group["kind"]]
            if not all(least <= p.ndim <= most for p in group["params"]):
                raise ValueError(f"kind {group['kind']} takes matrices only")

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every group; parameters without a gradient are left alone."""
        if closure is not None:
            raise ValueError("MuonAdamW takes no closure")
        for group in self.param_groups:
            update, shapes = KINDS[group["kind"]][0], {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for params in shapes.values():
                update(self, params, group)

    def _share(self, f, stack):
        """f of a stack [K, rows, cols] of matrices, each rank computing its share of any K."""
        if self.world == 1:
            return f(stack)
        import torch.distributed as dist
        share = -(-len(stack) // self.world)
        mine = stack.new_zeros(share, *stack.shape[1:])
        part = stack[self.rank * share:(self.rank + 1) * share]
        mine[:len(part)] = f(part) if len(part) else part
        gathered = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(gathered, mine)
        return torch.cat(gathered)[:len(stack)]

    @torch.no_grad()
    def reduce_gradients(self):
        """Average gradients over the ranks, of hashed tables the rows that any of them visited."""
        if self.world == 1:
            return
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        tables = [p for p in params if hasattr(p, "visits")]
        all_sum([p.visits for p in tables], self.world)
        rows = [p.visits.nonzero().squeeze(1) for p in tables]
        blocks = [p.grad[r] for p, r in zip(tables, rows)]
        dense = [p.grad for p in params if not hasattr(p, "visits")]
        all_sum(dense + blocks, self.world)
        for p, r, block in zip(tables, rows, blocks):
            p.grad.index_copy_(0, r, block / self.world)
        torch._foreach_div_(dense, self.world)

    def zero_grad(self, set_to_none=True):
        """Drop gradients; of hashed tables clear the rows visited: the cost follows the batch."""
        for p in (p for group in self.param_groups for p in group["params"]):
            if not hasattr(p, "visits"):
                p.grad = None
            elif p.grad is not None:
                for rows in (getattr(p, "visited", None), p.visits.nonzero().squeeze(1)):
                    if rows is not None:
                        p.grad.index_fill_(0, rows, 0)
                p.visited = None
                p.visits.zero_()

    def load_state_dict(self, state_dict):
        """As in torch, but moments keep the dtype they were saved in, not the parameter's."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for i, saved in state_dict["state"].items():
            for key, value in saved.items():
                if torch.is_tensor(value):
                    self.state[params[i]][key] = value.to(params[i].device, copy=True)


def set_schedule(optimizer, step, steps, *, schedule="trapezoid", momentum_cooldown=False,
                 cosine_decay=False, lr_scale=1.0, decay_scale=1.0):
    """Set every group's lr, momentum, weight decay and homotopies for `step` of `steps` (0-based).

    Returns the lr multiplier. Momentum follows the unscaled schedule.
    """
    progress = run_progress(step, steps)
    multiplier = SCHEDULES[schedule](progress)
    decay = SCHEDULES["cosine" if cosine_decay else "linear"](progress) * decay_scale
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier * lr_scale
        group["weight_decay"] = group["initial_decay"] * decay
        if group["kind"] == "muon":
            group["momentum"] = muon_momentum(step, progress, momentum_cooldown)
        for name in ("equilibrate", "neumann"):
            tau = group.get(name + "_tau")
            group[name] = homotopy(step, tau) if tau else 0.0
    return multiplier


# The OE paper's 0-parameter optimizer package (tier 1), of native_groups() and set_schedule()
PACKAGE = dict(equilibrate_tau=25, neumann_tau=80, float32_state=True, float32_polar=True)
PACKAGE_SCHEDULE = dict(momentum_cooldown=True, cosine_decay=True)


def native_groups(roles, width, *, matrix_kind="muon", head_lr=0.004, embed_lr=0.6, muon_lr=0.04,
                  resid_lr=0.005, x0_lr=0.5, q_lr=0.005, oe_lr=None, weight_decay=0.2,
                  dtype=torch.float32, equilibrate_tau=0, neumann_tau=0, table_neumann_tau=0,
                  float32_state=False, float32_polar=False):
    """Parameter groups of the OE paper's native recipe from GPT.roles(); each parameter is in one.

    The rates of head, embeddings and tables scale by (width / 768)^-1/2; oe_lr None means embed_lr.
    muon_lr and weight_decay are of the layers' matrices under any of MATRIX_KINDS (else UserError).
    The polar step runs in `dtype` (the run's), with float32_polar in float32 at least. The taus and
    float32 switches are the package's; table_neumann_tau is the Table-Neumann control.
    """
    if matrix_kind not in MATRIX_KINDS:
        raise UserError(f"kind {matrix_kind!r} is none of {', '.join(MATRIX_KINDS)}")
    by_role = {}
    for _, role, p in roles:
        by_role.setdefault(role, []).append(p)
    scale = (width / 768) ** -0.5
    oe_lr = embed_lr if oe_lr is None else oe_lr
    polar_dtype = torch.float32 if float32_polar and dtype == torch.bfloat16 else dtype
    tau = dict(neumann_tau=neumann_tau)
    embed = dict(tau, initial_lr=embed_lr * scale, float32_state=float32_state)
    head, resid = dict(initial_lr=head_lr * scale), dict(initial_lr=resid_lr)
    x0 = dict(initial_lr=x0_lr, betas=(0.96, 0.95))
    recipe = {   # of kind adamw, but for matrices and tables
        "lm_head": {**head, **tau}, "wte": embed, "value_embeds": embed,
        "resid_lambdas": resid, "x0_lambdas": x0, "wte_lambdas": x0, "out_lambdas": x0,
        "q_log": dict(initial_lr=q_lr),
        "matrix": dict(kind=matrix_kind, initial_lr=muon_lr, initial_decay=weight_decay,
                       equilibrate_tau=equilibrate_tau, polar_dtype=polar_dtype),
        "oe": dict(kind="oe", initial_lr=oe_lr * scale, neumann_tau=table_neumann_tau),
        "vector": resid, "wpe": head,  # of ablated parts
    }
    return [{"kind": "adamw", **recipe[role], "role": role, "params": params}
            for role, params in by_role.items()]


# ---- step-0 controls (OE 4.5) ----

ROUTE_SCALARS = ("wte_lambdas", "out_lambdas")
STEP0 = {  # mode -> (roles it acts on, what of their first step survives)
    "full": ((), "displacement, moments, counter"),
    "nostep0": (ROUTE_SCALARS, "nothing"),
    "mom_only_nodisp": (ROUTE_SCALARS, "moments, counter"),
    "disp_only_nomom": (ROUTE_SCALARS, "displacement"),
    "disp_stepcount_nomom": (ROUTE_SCALARS, "displacement, counter"),
    "nostep0_all": (("resid_lambdas", "x0_lambdas", *ROUTE_SCALARS), "nothing"),
}


@torch.no_grad()
def first_step(optimizer, roles, mode):
    """optimizer.step(), of which only what STEP0[mode] names survives."""
    chosen, kept = STEP0[mode]
    params = [p for _, role, p in roles if role in chosen]
    before = [p.clone() for p in params]
    if kept == "nothing":
        for p in params:
            p.grad = None
    optimizer.step()
    for p, old in zip(params, before):
        if "displacement" not in kept:
            p.copy_(old)
        if kept == "displacement":
            optimizer.state[p].clear()
        elif "moments" not in kept and kept != "nothing":
            optimizer.state[p]["exp_avg"].zero_()
            optimizer.state[p]["exp_avg_sq"].zero_()
