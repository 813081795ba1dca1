"""Every update rule as a pure function, the schedules, and one optimizer class that calls them by group.

    rule                paper            formula
    polar_express       Polar Express    five odd polynomials of G / (1.02 |G|_F): G -> the nearest orthogonal matrix
    normuon_scale       NorMuon          rows (or columns, of wide matrices) divided by the root of their running mean square
    entrywise_adamw     AdamW            m_hat / (sqrt(v_hat) + eps)
    row_isotropic_adamw WM 3.4           the same with v_hat averaged over the row
    retract_spherical_  WM 4.6           W * |W_0|_F / |W|_F after the step
    oe_row_update       OE 2.1 A         visited rows: table -= lr * gbar / rms(gbar), gbar = grad / count; no moments, no decay
    equilibrate         OE 2.1 B, BiEq   rows, then columns, scaled towards equal root mean square before the polar step
    neumann_whiten      OE 2.1 B         Uc - alpha/2 Uc (Uc^T Uc) / |Uc^T Uc|_F, Uc = U - mean row
    head_blocks         ABL 13, Kimi K3  Per-Head Muon: rows (of q, k, v) or columns (of proj) of each head are a matrix of their own
    qk_clip_            ABL 14, Kimi K2  MuonClip: a head's rows of q and k times sqrt(tau / smax) when its largest logit smax > tau
    keep_topk_          ABL 8, meProp    only the largest entries of each gradient survive

Matrix functions reduce over the last two dimensions only: a batch of matrices stays a batch of separate matrices.
A group of MuonAdamW is {"params", "kind": adamw | muon | oe, "initial_lr", ...}; set_schedule() turns step numbers into its lr,
momentum and weight decay before every step.
"""
import math

import torch

from common import UserError, all_sum

POLAR_COEFFICIENTS = (  # Polar Express, five steps, as published
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
WARM_STEPS = 11        # the OE paper's untimed steps: progress starts to count after them ...
SHORT_RUN = 100        # ... except in runs shorter than this, which count from step 0
MUON_RAMP = 300        # steps over which Muon's momentum rises from 0.85 to 0.95
TINY = 1e-30


# ---- schedules ----

def run_progress(step, steps):
    """Fraction of the run in [0, 1] that the schedules see: clip((step - 11) / (steps - 11), 0, 1)."""
    warm = WARM_STEPS if steps >= SHORT_RUN else 0
    return min(max((step - warm) / (steps - warm), 0.0), 1.0)


def lr_multiplier(progress, kind="trapezoid"):
    """Learning-rate factor in [0, 1]: trapezoid (1, then linear to 0 over the last half), cosine, wsd (last fifth), or linear."""
    if kind == "trapezoid":
        return min(1.0, 2 * (1 - progress))
    if kind == "wsd":
        return min(1.0, 5 * (1 - progress))
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if kind == "linear":
        return 1 - progress
    raise UserError(f"schedule {kind!r} is unknown; choose trapezoid, cosine, wsd or linear")


def warmup_multiplier(step, steps, warmup, kind="cosine"):
    """Learning-rate factor of `step` (0-based): (step + 1) / warmup in the first `warmup` steps, then lr_multiplier over the rest."""
    if step < warmup:
        return (step + 1) / warmup
    return lr_multiplier((step - warmup) / max(1, steps - warmup), kind)


def muon_momentum(step, progress, cooldown=False):
    """0.85 -> 0.95 over the first 300 steps; with cooldown 0.95 -> 0.85 again over the last half of the run."""
    ramp = 0.85 + 0.10 * min(step / MUON_RAMP, 1.0)
    return ramp - 0.10 * max(0.0, 2 * progress - 1) if cooldown else ramp


def homotopy(step, tau):
    """alpha_t = min(t / tau, 1)^2, the strength with which a preconditioner is switched on."""
    return min(step / tau, 1.0) ** 2


# ---- rules ----

def polar_express(G, steps=5):
    """Approximate polar factor of G [..., m, n] (any float dtype, computed in it): singular values go to about 1.

    Each step is X <- aX + (bA + cA^2)X with A = X X^T on the smaller side, after X = G / (1.02 |G|_F + 1e-6).
    """
    X = G / (G.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    wide = G.size(-2) <= G.size(-1)
    X = X if wide else X.mT
    for a, b, c in POLAR_COEFFICIENTS[:steps]:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c) if A.ndim == 3 else b * A + c * (A @ A)
        X = torch.baddbmm(X, B, X, beta=a) if X.ndim == 3 else a * X + B @ X
    return X if wide else X.mT


def normuon_scale(O, v, beta2=0.95):
    """NorMuon: (O scaled, new v). v is the running mean square of each row [..., m, 1] if m >= n, else of each column [..., 1, n].

    Each row is divided by sqrt(v), then the whole is rescaled to the Frobenius norm of O.
    """
    dim = -1 if O.size(-2) >= O.size(-1) else -2
    square = O.to(v.dtype).square().mean(dim=dim, keepdim=True)
    v = v.lerp(square, 1 - beta2)
    scale = v.clamp_min(1e-10).rsqrt()
    before = square.sum(dim=(-2, -1), keepdim=True).sqrt()   # |O|_F up to the factor that cancels in the ratio
    after = (square * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return O * (scale * (before / after.clamp_min(1e-10))).to(O.dtype), v


def equilibrate(M, alpha, passes=2):
    """BiEq homotopy on M [..., m, n]: per pass rows, then columns, times (rms(M) / rms(row or column))^alpha.

    alpha 0 is the identity, alpha 1 with many passes makes all row and column rms equal; zero rows and columns stay zero.
    """
    if alpha == 0:
        return M
    # the scaled matrix is r M c at every moment, so its row and column energies are products of M^2 with c^2 and r^2
    energy = M.square()
    r, c = torch.ones_like(M[..., :1]), torch.ones_like(M[..., :1, :])

    def factor(line):
        return torch.where(line > 0, (line.mean(dim=(-2, -1), keepdim=True) / line).pow(alpha / 2), 1)
    for _ in range(passes):
        r = r * factor(r.square() * (energy @ c.square().mT) / M.size(-1))
        c = c * factor(c.square() * (r.square().mT @ energy) / M.size(-2))
    return M * r * c


def neumann_whiten(U, alpha):
    """Right-projected Neumann-Gram step on U [..., rows, n]: Uc - alpha/2 Uc G / (|G|_F + 1e-30), G = Uc^T Uc, Uc = U - mean row."""
    U = U - U.mean(dim=-2, keepdim=True)
    gram = U.mT @ U
    return U - (alpha / 2) * (U @ (gram / (gram.norm(dim=(-2, -1), keepdim=True) + TINY)))


def neumann_whiten_rows(U, alpha):
    """neumann_whiten of a matrix U [rows, n] of which many rows are zero, as in an embedding's gradient: products with the others only.

    With m the mean row, G = U^T U - rows m^T m, and every zero row becomes -m + alpha/2 m G / |G|_F.
    """
    hit = (U.abs().amax(dim=1) != 0).nonzero().squeeze(1)   # also where it is NaN
    if len(hit) > 0.5 * len(U):
        return neumann_whiten(U, alpha)
    some, mean = U[hit], U.mean(dim=0, keepdim=True)
    gram = some.T @ some - len(U) * (mean.T @ mean)
    gram = (alpha / 2) * gram / (gram.norm() + TINY)
    rest = mean @ gram - mean
    return rest.repeat(len(U), 1).index_copy_(0, hit, some - some @ gram + rest)


def entrywise_adamw(m, v, step, beta1, beta2, eps):
    """AdamW's direction from its moments after `step` updates: m_hat / (sqrt(v_hat) + eps), eps outside the root."""
    root = (v / (1 - beta2**step)).sqrt_().add_(eps)
    return m / root.mul_(1 - beta1**step)


def row_isotropic_adamw(m, v, step, beta1, beta2, eps):
    """entrywise_adamw with v averaged over the last dimension: each row is scaled as a whole (WM 3.4, `row_iso`)."""
    return entrywise_adamw(m, v.mean(dim=-1, keepdim=True), step, beta1, beta2, eps)


POOL = {"entrywise": entrywise_adamw, "row_iso": row_isotropic_adamw}   # (m, v, step, beta1, beta2, eps) -> direction


@torch.no_grad()
def retract_spherical_(W, norm0):
    """Rescale W [..., m, n], in place, to the Frobenius norm it started with (WM 4.6); norm0 is a number or [..., 1, 1]."""
    return W.mul_(norm0 / W.norm(dim=(-2, -1), keepdim=True).clamp_min(TINY))


def head_blocks(W, n, dim=-2):
    """W [..., r, c] as n matrices [..., n, r', c'] (Per-Head Muon, ABL 13): blocks of rows for dim -2, of columns for dim -1.

    W holds the heads one after another, as q, k and v do in their rows and proj in its columns. join_heads() is the inverse.
    """
    if dim == -2:
        return W.unflatten(-2, (n, -1))
    return W.unflatten(-1, (n, -1)).movedim(-2, -3)


def join_heads(blocks, dim=-2):
    """The matrix [..., r, c] whose head_blocks() are `blocks` [..., n, r', c']."""
    return blocks.flatten(-3, -2) if dim == -2 else blocks.movedim(-3, -2).flatten(-2)


@torch.no_grad()
def qk_clip_(wq, wk, smax, tau):
    """MuonClip (ABL 14): of every head whose largest logit smax [H] exceeds tau, the rows of wq and wk times sqrt(tau / smax), in place.

    wq, wk [H * D, C], or biases [H * D]. The head's logits on the same input then reach tau. Where no head exceeds it nothing is written.
    """
    if bool((smax > tau).any()):
        scale = torch.where(smax > tau, (tau / smax.clamp_min(TINY)).sqrt(), 1)
        for w in (wq, wk):
            w.copy_((w.unflatten(0, (len(scale), -1)) * scale.to(w.dtype).view(-1, *[1] * w.ndim)).flatten(0, 1))


@torch.no_grad()
def keep_topk_(grads, fraction):
    """meProp (ABL 8): in each tensor the ceil(fraction * n) entries of largest magnitude stay and the rest become 0, in place; 1 keeps all."""
    if fraction >= 1:
        return
    for g in grads:
        flat = g.flatten()
        kept = flat.abs().topk(max(1, math.ceil(round(fraction * len(flat), 6))), sorted=False).indices   # 0.07 * 100 is 7.000000000000001
        g.copy_(torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view_as(g))


def oe_row_update(table, grad, count, lr, whiten=0.0):
    """Moment-free update of the visited rows of a hashed table, in place; count is set to 0; returns the visited rows (int64).

    table, grad [rows, n]; count [rows] float32, visits since the last update. gbar = grad / count row by row; table -= lr * gbar /
    max(rms of gbar over all visited entries, 1e-30). whiten > 0 applies the Neumann step of that strength to gbar first (the
    paper's Table-Neumann control). Rows with count 0 keep every bit.
    """
    rows = count.nonzero().squeeze(1)
    if len(rows):
        acc = torch.float64 if table.dtype == torch.float64 else torch.float32
        gbar = grad[rows].to(acc) / count[rows].to(acc).unsqueeze(1)
        gbar = neumann_whiten(gbar, whiten) if whiten else gbar
        rms = gbar.square().mean().sqrt().clamp_min(TINY)
        table.index_copy_(0, rows, (table[rows].to(acc) - lr * gbar / rms).to(table.dtype))
        count.index_fill_(0, rows, 0)
    return rows


# ---- the optimizer ----

class MuonAdamW(torch.optim.Optimizer):
    """Groups of kind adamw, muon or oe; see native_groups() for the OE paper's recipe.

    adamw: lr, betas, eps, weight_decay; neumann: whiten 2-D gradients; float32_state: keep moments and a master copy of bfloat16
    parameters in float32; pool: entrywise | row_iso. muon: lr, momentum, beta2, weight_decay (cautious: only where it agrees with the update), equilibrate,
    polar_dtype, normuon; heads, head_axis: orthogonalise the blocks of head_blocks(). Leading dimensions of a muon parameter are separate
    matrices. oe: lr, neumann. p.grad is never overwritten by step(); zero_grad() clears only visited rows of hashed tables.
    """

    def __init__(self, groups, rank=0, world=1):
        self.rank, self.world = rank, world
        defaults = dict(kind="adamw", lr=0.0, initial_lr=0.0, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, initial_decay=0.0,
                        momentum=0.95, beta2=0.95, equilibrate=0.0, neumann=0.0, polar_dtype=torch.float32, float32_state=False,
                        pool="entrywise", normuon=True, heads=1, head_axis=-2)
        super().__init__(groups, defaults)
        for group in self.param_groups:
            if group["kind"] not in ("adamw", "muon", "oe"):
                raise KeyError(group["kind"])
            if group["kind"] != "adamw" and any(p.ndim < 2 or p.ndim > 2 and group["kind"] == "oe" for p in group["params"]):
                raise ValueError(f"kind {group['kind']} takes matrices only")

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every group; parameters without a gradient are left alone."""
        if closure is not None:
            raise ValueError("MuonAdamW takes no closure")
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if group["kind"] == "adamw":
                for p in params:
                    self._adamw(p, group)
            elif group["kind"] == "oe":
                for p in params:
                    p.visited = oe_row_update(p, p.grad, p.visits, group["lr"], group["neumann"])
            else:
                shapes = {}  # matrices of one shape share each matrix product
                for p in params:
                    shapes.setdefault(p.shape, []).append(p)
                for same in shapes.values():
                    self._muon(same, group)

    def _adamw(self, p, group):
        s, (beta1, beta2) = self.state[p], group["betas"]
        wide = group["float32_state"] and p.dtype == torch.bfloat16
        if not s:
            s["step"] = 0
            s["exp_avg"] = torch.zeros_like(p, dtype=torch.float32 if wide else p.dtype)
            s["exp_avg_sq"] = torch.zeros_like(s["exp_avg"])
            if wide:
                s["master"] = p.float()
        s["step"] += 1
        weight = s["master"] if wide else p
        g = p.grad.to(weight.dtype)
        if group["neumann"] and p.ndim == 2:
            g = neumann_whiten_rows(g, group["neumann"])
        s["exp_avg"].lerp_(g, 1 - beta1)
        s["exp_avg_sq"].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(POOL[group["pool"]](s["exp_avg"], s["exp_avg_sq"], s["step"], beta1, beta2, group["eps"]), alpha=-group["lr"])
        if wide:
            p.copy_(weight)

    def _muon(self, params, group):
        rows, cols = params[0].shape[-2:]
        for p in params:
            if not (s := self.state[p]):
                s["momentum_buffer"] = torch.zeros_like(p)
                if group["normuon"]:
                    shape = (*p.shape[:-2], rows, 1) if rows >= cols else (*p.shape[:-2], 1, cols)
                    s["second_moment"] = torch.zeros(shape, dtype=p.dtype, device=p.device)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, [p.grad for p in params], 1 - group["momentum"])
        u = torch.stack([p.grad for p in params]).lerp_(torch.stack(buffers), group["momentum"])    # Nesterov: [K, ..., rows, cols]
        blocks = head_blocks(u, group["heads"], group["head_axis"])                                 # [K, ..., heads, rows', cols']
        flat = equilibrate(blocks.flatten(0, -3), group["equilibrate"])
        flat = self._share(polar_express, flat.to(group["polar_dtype"]))
        u = join_heads(flat.view(blocks.shape), group["head_axis"])
        if group["normuon"]:
            u, v = normuon_scale(u, torch.stack([self.state[p]["second_moment"] for p in params]), group["beta2"])
            for p, moment in zip(params, v):
                self.state[p]["second_moment"].copy_(moment)
        lr = group["lr"] * max(1.0, blocks.size(-2) / blocks.size(-1)) ** 0.5
        for p, direction in zip(params, u.to(params[0].dtype)):
            if group["weight_decay"]:
                direction = direction + group["weight_decay"] * p * (direction * p >= 0)
            p.add_(direction, alpha=-lr)

    def _share(self, f, stack):
        """f of a stack [K, rows, cols] of matrices, each rank computing its share; K need not be a multiple of the ranks."""
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
        """Average gradients over the ranks; of hashed tables sum the visits and average the rows that any rank visited."""
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
        """Drop gradients; of hashed tables clear only the rows visited, so that the cost follows the batch and not the table."""
        for group in self.param_groups:
            for p in group["params"]:
                if group["kind"] != "oe":
                    p.grad = None
                elif p.grad is not None:
                    for rows in (getattr(p, "visited", None), p.visits.nonzero().squeeze(1)):
                        if rows is not None:
                            p.grad.index_fill_(0, rows, 0)
                    p.visited = None
                    p.visits.zero_()

    def load_state_dict(self, state_dict):
        """As in torch, but moments keep the dtype they were saved in (torch would cast them to the parameter's)."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for i, saved in state_dict["state"].items():
            for key, value in saved.items():
                if torch.is_tensor(value):
                    self.state[params[i]][key] = value.to(params[i].device, copy=True)


def set_schedule(optimizer, step, steps, *, schedule="trapezoid", momentum_cooldown=False, cosine_decay=False, lr_scale=1.0, decay_scale=1.0):
    """Set every group's lr, momentum, weight decay and homotopies for `step` of `steps` (0-based); returns the lr multiplier.

    Groups marked equilibrate_tau / neumann_tau get alpha = min(step / tau, 1)^2. Momentum follows the unscaled schedule.
    """
    progress = run_progress(step, steps)
    multiplier = lr_multiplier(progress, schedule)
    decay = lr_multiplier(progress, "cosine" if cosine_decay else "linear") * decay_scale
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier * lr_scale
        group["weight_decay"] = group["initial_decay"] * decay
        group["momentum"] = muon_momentum(step, progress, momentum_cooldown)
        group["equilibrate"] = homotopy(step, group["equilibrate_tau"]) if group.get("equilibrate_tau") else 0.0
        group["neumann"] = homotopy(step, group["neumann_tau"]) if group.get("neumann_tau") else 0.0
    return multiplier


# The OE paper's 0-parameter optimizer package (tier 1): arguments of native_groups() and set_schedule()
PACKAGE = dict(equilibrate_tau=25, neumann_tau=80, float32_state=True, float32_polar=True)
PACKAGE_SCHEDULE = dict(momentum_cooldown=True, cosine_decay=True)


def native_groups(roles, width, *, head_lr=0.004, embed_lr=0.6, muon_lr=0.04, resid_lr=0.005, x0_lr=0.5, q_lr=0.005, oe_lr=None,
                  weight_decay=0.2, dtype=torch.float32, equilibrate_tau=0, neumann_tau=0, table_neumann_tau=0, float32_state=False,
                  float32_polar=False):
    """Parameter groups of the OE paper's native recipe from GPT.roles(); every parameter lands in exactly one group.

    The rates of head, embeddings and tables scale by (width / 768)^-1/2; oe_lr None means embed_lr. weight_decay is Muon's. The polar
    step runs in `dtype` (the run's), with float32_polar in float32 at least. The taus and float32 switches are the package's: see
    PACKAGE; table_neumann_tau is the Table-Neumann control.
    """
    by_role = {}
    for _, role, p in roles:
        by_role.setdefault(role, []).append(p)
    scale = (width / 768) ** -0.5
    oe_lr = embed_lr if oe_lr is None else oe_lr
    adamw = dict(kind="adamw", betas=(0.8, 0.95))
    embed = dict(adamw, initial_lr=embed_lr * scale, neumann_tau=neumann_tau, float32_state=float32_state)
    x0 = dict(kind="adamw", initial_lr=x0_lr, betas=(0.96, 0.95))
    recipe = {
        "lm_head": dict(adamw, initial_lr=head_lr * scale, neumann_tau=neumann_tau),
        "wte": embed, "value_embeds": embed,
        "resid_lambdas": dict(adamw, initial_lr=resid_lr),
        "x0_lambdas": x0, "wte_lambdas": x0, "out_lambdas": x0,
        "q_log": dict(adamw, initial_lr=q_lr),
        "vector": dict(adamw, initial_lr=resid_lr), "wpe": dict(adamw, initial_lr=head_lr * scale),    # of ablated parts; the backbone has none
        "matrix": dict(kind="muon", initial_lr=muon_lr, initial_decay=weight_decay, equilibrate_tau=equilibrate_tau,
                       polar_dtype=torch.float32 if float32_polar and dtype == torch.bfloat16 else dtype),
        "oe": dict(kind="oe", initial_lr=oe_lr * scale, neumann_tau=table_neumann_tau),
    }
    return [dict(recipe[role], role=role, params=params, lr=0.0) for role, params in by_role.items()]


# ---- step-0 controls (OE 4.5) ----

ROUTE_SCALARS = ("wte_lambdas", "out_lambdas")
ALL_SCALARS = ("resid_lambdas", "x0_lambdas", *ROUTE_SCALARS)
STEP0 = {  # mode -> (roles it acts on, what of their first step survives)
    "full": ((), "displacement, moments, counter"),
    "nostep0": (ROUTE_SCALARS, "nothing"),
    "mom_only_nodisp": (ROUTE_SCALARS, "moments, counter"),
    "disp_only_nomom": (ROUTE_SCALARS, "displacement"),
    "disp_stepcount_nomom": (ROUTE_SCALARS, "displacement, counter"),
    "nostep0_all": (ALL_SCALARS, "nothing"),
}


@torch.no_grad()
def first_step(optimizer, roles, mode):
    """optimizer.step() at step 0, after which only what STEP0[mode] names survives for the scalars it names."""
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
