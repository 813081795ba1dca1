"""The delayed rule in time: packets, what is built and installed when, and the state of it all.

A forward pass leaves a Packet. In step t the head learns from batch t; what stage 2 makes of batch
t is installed in step t + 1, what stage 1 makes of it in step t + 2 (WM 1.1). The clock says when
rewards are built, and so which weights they read: those before the update of the step that builds.

    clock         step t builds before its forward pass        and after it
    strict_post   stage 2 of batch t - 1, stage 1 of t - 2     -
    stage2_pre    stage 1 of t - 2                             stage 2 of t
    both_pre      stage 1 of t - 1                             stage 2 of t
    origin        -                                            stages 2 and 1 of t
"""
from dataclasses import dataclass, replace

import torch

import common
from common import UserError, derive_seed
from model import norm
from optim import retract_spherical_
from wm import (CLOCKS, METHODS, NOW, active_weights, bus_credit, head_scores, make_optimizer,
                make_readers, set_rates)
from wm_kernels import signs

# what a layer's trace holds that a packet keeps
LAYER_KEYS = ("attn_in", "q", "k", "v", "gate", "y", "mlp_in", "pre", "hidden")

# part that learns -> what the formulas of its credit take the model to be
NEEDS = {
    "lm_head": dict(norm="rms", norm_eps=None, tie=False, oe_m=0, dropout=0.0),
    "wte": dict(embed_norm=True, x0_skip=True, wte_route="fused", out_skip=False, pos="rope",
                residual="plain", history=False),
    "layers": dict(attn="softmax", ffn="relu2", bias=False, qk_norm=True),
}


def check_model(cfg, rule):
    """UserError where the method's formulas do not describe the model of this GPTConfig."""
    method, needs = METHODS[rule.method], {}
    if method.autograd:
        return   # exact for whatever it is given
    for part in method.learns:
        needs.update(NEEDS[part])
    if "layers" in method.learns:
        needs["qk_scale"] = "head" if rule.head_temp else "none"
    if not cfg.softcap > 0:
        needs["softcap"] = "above 0"
    for name, value in needs.items():
        found = getattr(cfg, name)
        if found != value:
            wants = f"--method {rule.method} is derived for {name} {value}"
            raise UserError(f"{wants}; the model has {found}")


# ---- packets ----

@dataclass(eq=False)
class Packet:
    """What the forward pass of one micro-batch leaves for later stages.

    idx [B, T] ids. key: name of the micro-batch, from which the signs of its probes are drawn.
    first: number of its first token among those of all ranks. step: when it was made. layers: a
    dict of [B, T, ...] tensors each (LAYER_KEYS). s [N, V]: see head_scores(). x_final = norm(x_L)
    and x0 = norm(e), e rows of wte, all [N, C]. bus [N, C]: credit at x_L, once stage 2 has it.
    What no later stage reads is None.
    """
    idx: torch.Tensor
    key: str
    first: int
    step: int
    layers: list
    s: torch.Tensor = None
    x_L: torch.Tensor = None
    x_final: torch.Tensor = None
    e: torch.Tensor = None
    x0: torch.Tensor = None
    bus: torch.Tensor = None
    paid_by: "Packet" = None   # where rewards come from, if not from itself (mismatched_origin)

    @property
    def source(self):
        return self if self.paid_by is None else self.paid_by

    @property
    def tokens(self):
        return self.idx.numel()

    def site(self, name):
        """(seed, first row) of a site's signs."""
        return derive_seed(self.key, name), self.first

    def signs(self, name, cols, like):
        """The +-1 signs [N, cols] of a site, on the device and in the precision of `like`."""
        seed, first = self.site(name)
        return signs(self.tokens, cols, seed, first, device=like.device, dtype=like.dtype)

    def read(self, name, like):
        return ready(getattr(self, name), like)

    def layer(self, i, like, keys=None):
        """{name: tensor} of layer i, on the device and in the precision of `like`."""
        kept = self.layers[i]
        return {name: ready(kept[name], like) for name in keys or kept}

    def stow(self, rule, pinned):
        """Keep only what later stages read, in the precision and the place of packets."""
        unused, in_host = set(), rule.packets == "host"
        if not rule.probes_attention:
            unused.add("v")
        small = rule.packet_dtype != "float32" or self.layers[0]["pre"].dtype == torch.bfloat16
        if in_host or small:
            # made again from the pre-activation, so that --packets changes no bfloat16 run either
            unused.add("hidden")

        def place(t):
            t = t.to(torch.bfloat16) if rule.packet_dtype == "bfloat16" else t
            return pinned.put(t) if in_host and self.idx.is_cuda else t

        for i, layer in enumerate(self.layers):
            self.layers[i] = {k: place(t) for k, t in layer.items() if k not in unused}
        if self.s is not None:
            self.s = place(self.s)

    def forget(self, stage, rule, pinned):
        """Drop what no stage after this one reads."""
        done = LAYER_KEYS
        if stage == 2:
            pinned.give_back(self.s)
            self.s = self.x_L = self.x_final = self.e = self.x0 = None
            done = ("hidden",) if rule.probes_attention else ("hidden", "y")
        for layer in self.layers:
            for name in done:
                pinned.give_back(layer.pop(name, None))

    def as_dict(self):
        """{field: value} of what is there: tensors and plain values."""
        return {name: value for name, value in vars(self).items() if value is not None}


def ready(t, like):
    """t on the device and in the precision of `like`."""
    return t.to(device=like.device, dtype=like.dtype, non_blocking=True)


def each_tensor(value, f):
    """Nested dicts and lists with f(t) in place of every tensor t."""
    if isinstance(value, dict):
        return {k: each_tensor(v, f) for k, v in value.items()}
    if isinstance(value, list):
        return [each_tensor(v, f) for v in value]
    return f(value) if torch.is_tensor(value) else value


class Pinned:
    """A pool of pinned host buffers."""

    def __init__(self):
        self.free = {}   # copies share a stream: a buffer may be used again once they are queued

    def put(self, t):
        pool = self.free.get((t.shape, t.dtype))
        buffer = pool.pop() if pool else torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        return buffer.copy_(t, non_blocking=True)

    def give_back(self, t):
        if t is not None and t.is_pinned():
            self.free.setdefault((t.shape, t.dtype), []).append(t)


def forward(model, idx, targets, key, step=0, first=0):
    """Run idx, targets [B, T]: (Packet, mean loss (float), its gradient [V, C] at the head).

    key, step, first: see Packet.
    """
    trace, e = {}, model.wte(idx)
    x_L = model.trunk(idx, e, None, trace).flatten(0, 1)
    x_final = norm(x_L)
    head = model.lm_head.weight
    s, nats, grad = head_scores(x_final, head, targets.flatten(), model.cfg.softcap)
    layers = [{k: layer[k] for k in LAYER_KEYS if layer.get(k) is not None}
              for layer in trace["layers"]]
    e, x0 = e.flatten(0, 1), trace["x0"].flatten(0, 1)
    packet = Packet(idx, key, first, step, layers, s, x_L, x_final, e, x0)
    return packet, nats.sum().item() / idx.numel(), grad


# ---- the pipeline ----

class Pipeline:
    """The pseudo-gradients of any --method, in time; step() shows the order of the calls.

    rule: a wm.Rule, its streams this rank's. UserError for a model that its formulas do not fit.
    """

    def __init__(self, model, rule, seed, rank=0, world=1):
        check_model(model.cfg, rule)
        self.model, self.rule, self.seed, self.rank, self.world = model, rule, seed, rank, world
        self.method = METHODS[rule.method]
        self.delays = NOW if self.method.gradients else self.method.delays
        self.active = active_weights(model, rule)
        self.weights = {name: p for stage in self.active.values() for name, p in stage.items()}
        for name, p in model.named_parameters():
            p.requires_grad_(self.method.autograd and name in self.weights)
        self.optimizer = make_optimizer(model, rule, rank, world)
        self.readers = make_readers(self.optimizer, rule)
        self.packets, self.waiting, self.pinned = {}, {2: {}, 1: {}}, Pinned()
        on_sphere = (".c_q.", ".c_k.") if rule.spherical else ()
        self.norms = {name: p.norm().item() for name, p in self.weights.items()
                      if any(part in name for part in on_sphere)}

    def build(self, step, this_batch=False):
        """Build the rewards that are due: before the forward pass, or with this_batch after it."""
        assert not torch.is_grad_enabled()
        ages = dict(zip((2, 1), CLOCKS[self.rule.clock]))
        for stage in self.method.stages:
            age = min(ages[stage], self.delays[stage])
            after_forward = self.method.late or age == 0
            if after_forward != this_batch:
                continue
            origin = step - age
            due = self.packets.get(origin, [])
            payers = self.packets.get(step, []) if self.method.late else due
            for packet, payer in zip(due, payers):
                self._build_one(stage, packet, payer, len(payers))
            if stage == min(self.method.stages):
                self.packets.pop(origin, None)

    def _build_one(self, stage, packet, payer, micros):
        paired = packet if payer is packet else replace(packet, paid_by=payer, bus=None)
        if stage == 2:
            for each in (payer, paired):
                if each.bus is None:
                    each.bus = bus_credit(self.model, each, self.rule, self.readers)
        credit = self.method.stages[stage]
        grads = credit(self.model, paired, self.rule, self.readers, self.world)
        self._add(stage, packet.step, grads, micros)
        if not self.method.late:
            packet.forget(stage, self.rule, self.pinned)

    def take(self, packet, targets, micros):
        """Keep a micro-batch's packet, or find its gradients at once."""
        if self.method.stages:
            self._keep(packet)
        elif self.method.gradients:
            grads = self.method.gradients(self.model, packet, targets, self.rule)
            self._add(2, packet.step, grads, micros)

    def _keep(self, packet):
        packet.stow(self.rule, self.pinned)
        self.packets.setdefault(packet.step, []).append(packet)

    def _add(self, stage, origin, grads, micros):
        """Add a micro-batch's share to what waits of batch `origin`."""
        total = self.waiting[stage].setdefault(origin, {})
        for name, g in grads.items():
            share = g / micros
            total[name] = total[name] + share if name in total else share

    def install(self, step, head):
        """Give the weights the gradients that are due."""
        self.weights["lm_head.weight"].grad = head
        for stage in (2, 1):
            due = self.waiting[stage].pop(step - self.delays[stage], {})
            for name, g in due.items():
                self.weights[name].grad = g

    def keep_norms(self):
        """Scale c_q and c_k back to their first norms (--spherical)."""
        for name, norm0 in self.norms.items():
            retract_spherical_(self.weights[name], norm0)

    def step(self, step, steps, batches):
        """The mean loss of one step, as in train_wm.train(); for audits and tests.

        batches: [(idx, targets), ...], this rank's consecutive rows of each micro-batch.
        """
        mean_loss, head, micros = 0.0, 0.0, len(batches)
        set_rates(self.optimizer, step, steps, self.rule)
        self.optimizer.zero_grad()
        if self.method.autograd:
            for idx, targets in batches:
                loss = self.model(idx, targets)
                (loss / micros).backward()
                mean_loss += loss.item() / micros
        else:
            with torch.no_grad():
                self.build(step)
                for micro, (idx, targets) in enumerate(batches):
                    key, first = f"{self.seed}/{step}/{micro}", self.rank * idx.numel()
                    packet, loss, grad = forward(self.model, idx, targets, key, step, first)
                    self.take(packet, targets, micros)
                    head = head + grad / micros
                    mean_loss += loss / micros
                self.build(step, this_batch=True)
                self.install(step, head)
        self.optimizer.reduce_gradients()
        self.optimizer.step()
        self.keep_norms()
        return mean_loss

    def state_dict(self):
        """All that is in flight, on all ranks: each calls this, and another number may load it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        packets = {step: [p.as_dict() for p in some] for step, some in self.packets.items()}
        waiting, device = self.waiting, self.model.lm_head.weight.device

        def whole(t):
            return common.all_rows(t.to(device), self.world).cpu()

        if self.world > 1:
            packets = each_tensor(packets, whole)
            waiting = each_tensor(waiting, lambda t: common.all_mean(t, self.world))
        return {"optimizer": self.optimizer.state_dict(), "packets": packets, "waiting": waiting,
                "norms": self.norms}

    def load_state_dict(self, state):
        """Take up what state_dict() returned: of packets this rank's rows."""
        self.optimizer.load_state_dict(state["optimizer"])
        device = self.model.lm_head.weight.device

        def own_rows(t):
            return t.chunk(self.world)[self.rank].to(device)

        self.packets = {}
        for saved in each_tensor(list(state["packets"].values()), own_rows):
            for values in saved:
                packet = Packet(**values)
                packet.first = self.rank * packet.tokens
                self._keep(packet)
        self.waiting = each_tensor(state["waiting"], lambda t: t.to(device))
        self.norms = dict(state["norms"])
