"""wm_pipeline.py: delays by intervention, what a clock reads, packets, state, ranks, refusals."""
import dataclasses
import functools
import io

import pytest
import torch

import train_wm
import wm
import wm_pipeline
from common import UserError
from helpers import assert_same
from model import GPT
from test_wm import CFG, batch, cosine
from wm import METHODS, Method, Rule, live, stage1, stage2
from wm_pipeline import Pipeline, forward


def fresh(seed=1, rank=0, world=1, **kw):
    """A Pipeline on the initial weights of a tiny float64 model."""
    cfg = dataclasses.replace(CFG, qk_scale="head" if kw.get("head_temp") else "none")
    return Pipeline(GPT(cfg).init_weights(seed).double(), Rule(**kw), seed, rank, world)


def run(steps=5, change=None, hook=None, **kw):
    """(pipeline, [weights after every step]) of a tiny run.

    change: the step whose targets differ. hook(step, pipeline) runs after every step.
    """
    pipeline, history = fresh(**kw), []
    for step in range(steps):
        idx, targets = batch(100 * step, T=12)
        if step == change:
            targets = (targets + 1) % CFG.vocab_size
        pipeline.step(step, steps, [(idx, targets)])
        history.append({n: p.detach().clone() for n, p in pipeline.model.named_parameters()})
        if hook:
            hook(step, pipeline)
    return pipeline, history


@functools.cache
def after(steps=5, **kw):
    """The weights at the end of run(); tests only read them."""
    return run(steps, **kw)[1][-1]


def installed(pipeline):
    """{name: gradient of the last step}."""
    return {n: p.grad for n, p in pipeline.model.named_parameters() if p.grad is not None}


def stage_of(name):
    if "lm_head" in name:
        return 3
    return 2 if "wte" in name or "c_proj" in name else 1


def differ(a, b, names):
    return any(not torch.equal(a[n], b[n]) for n in names)


@pytest.mark.parametrize("clock", wm.CLOCKS)
@pytest.mark.parametrize("kw", [{}, dict(active="qk"), dict(head_temp=True), dict(streams=12)],
                         ids=str)
def test_delay_by_intervention(clock, kw):
    """Other targets for batch t reach the head after step t, stage 2 after t + 1, stage 1 after
    t + 2, and nothing earlier."""
    _, plain = run(6, clock=clock, **kw)
    pipeline, other = run(6, clock=clock, change=2, **kw)
    first = {}
    for step in range(6):
        for name in plain[0]:
            if not torch.equal(plain[step][name], other[step][name]):
                first.setdefault(name, step)
    assert first == {name: {3: 2, 2: 3, 1: 4}[stage_of(name)] for name in pipeline.weights}


@pytest.mark.parametrize("clock, reads_head, reads_proj", [
    ("strict_post", True, True), ("stage2_pre", False, True), ("both_pre", False, False),
    ("origin", False, False)])
def test_which_receiver_a_clock_reads(clock, reads_head, reads_proj):
    """Moving lm_head after step 2 changes what stage 2 installs in step 3, and moving c_proj after
    step 3 what stage 1 installs in step 4, unless the clock had built it before."""
    def gradients(steps, moved=""):
        def move(step, pipeline):
            if step != steps - 2:
                return
            for name, p in pipeline.model.named_parameters():
                if moved and moved in name:
                    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(7))
                    p.add_(0.05 * noise)
        return installed(run(steps, hook=move, clock=clock)[0])
    plain, other = gradients(4), gradients(4, "lm_head")
    assert differ(plain, other, [n for n in plain if stage_of(n) == 2]) == reads_head
    assert not differ(plain, other, [n for n in plain if stage_of(n) == 1])
    plain, other = gradients(5), gradients(5, "c_proj")
    assert differ(plain, other, [n for n in plain if stage_of(n) == 1]) == reads_proj


@pytest.mark.parametrize("method", [name for name in METHODS if name != "backprop"])
def test_nothing_requires_grad(method, monkeypatch):
    def refuse(*args, **kw):
        raise AssertionError("a backward pass")
    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    monkeypatch.setattr(torch.autograd, "grad", refuse)
    seen = []

    def look(step, pipeline):
        wm_pipeline.each_tensor(pipeline.state_dict(), seen.append)
    pipeline, _ = run(4, method=method, draws=2, hook=look)
    seen += [*pipeline.model.parameters(), *installed(pipeline).values()]
    assert len(seen) > 20
    assert not any(t.requires_grad or t.grad_fn is not None for t in seen)


@pytest.mark.parametrize("kw", [
    dict(streams=12), dict(streams=12, scale_factor=3.0), dict(clock="stage2_pre"),
    dict(reader="muon_colnorm"), dict(active="q"), dict(active="k"), dict(head_temp=True),
    *[dict(method=name, draws=2) for name in METHODS if name != "wm"]], ids=str)
def test_every_choice_acts(kw):
    """Those that test_train_wm.py's idle flags leave out."""
    plain, other = after(), after(**kw)
    assert plain.keys() != other.keys() or differ(plain, other, plain)
    assert all(p.isfinite().all() for p in other.values())


@pytest.mark.parametrize("kw", [dict(qk_probe="multiplexed"), dict(spherical=False)], ids=str)
def test_queries_and_keys_keep_their_norm(kw):
    plain, other = after(active="qk"), after(active="qk", **kw)
    assert differ(plain, other, [n for n in plain if "c_q" in n or "c_k" in n])
    before = fresh().model.state_dict()
    ratios = [(other[n].norm() / before[n].norm()).item() for n in other if "c_q" in n]
    assert all(abs(r - 1) < 1e-6 for r in ratios) == kw.get("spherical", True)


def test_probe_seeds_are_isolated():
    """A second probe leaves every other draw as it was, so that M = 1 and M = 2 agree in the other
    matrices until q and k have moved."""
    one, two = after(3, active="qk", probes=1), after(3, active="qk", probes=2)
    qk = [n for n in one if "c_q" in n or "c_k" in n]
    assert not differ(one, two, one.keys() - set(qk)) and differ(one, two, qk)


def test_micro_batches_average():
    """The same micro-batch twice gives the head the gradient of one; their probes have two keys."""
    pipeline = fresh()
    model = GPT(CFG).init_weights(1).double().requires_grad_(False)
    pipeline.step(0, 3, [batch(1), batch(1)])
    _, _, grad = forward(model, *batch(1), "x")
    torch.testing.assert_close(pipeline.model.lm_head.weight.grad, grad)
    (packets,) = pipeline.packets.values()
    assert [p.key for p in packets] == ["1/0/0", "1/0/1"]


IN_FLIGHT = [
    dict(), dict(clock="stage2_pre", streams=12), dict(clock="both_pre"),
    dict(clock="origin", reader="muon_colnorm"), dict(head_temp=True),
    dict(active="qk", probes=2, packet_dtype="bfloat16", packets="host"),
    dict(active="qk", qk_probe="multiplexed"), dict(method="backprop", active="q"),
    dict(method="mismatched_origin", active="k"),
    *[dict(method=name, draws=2) for name in ("sr_lnp", "sr_np", "head_only", "lexical_only")]]


@pytest.mark.parametrize("kw", IN_FLIGHT, ids=str)
def test_state_survives_a_copy_after_every_step(kw):
    """Saved and read again between any two steps, with nothing, one batch or two in flight."""
    pipeline = fresh(**kw)
    for step in range(5):
        file = io.BytesIO()
        torch.save([pipeline.model.state_dict(), pipeline.state_dict()], file)
        file.seek(0)
        model, state = torch.load(file, weights_only=True)
        pipeline = fresh(99, **kw)
        pipeline.seed = 1
        pipeline.model.load_state_dict(model)
        pipeline.load_state_dict(state)
        pipeline.step(step, 5, [batch(100 * step, T=12)])
    assert_same(dict(pipeline.model.named_parameters()), after(**kw))


@pytest.mark.parametrize("kw", [dict(active="qk", center=False),
                                dict(clock="both_pre", streams=12, center=False)], ids=str)
def test_ranks_share_out_what_is_in_flight(kw, monkeypatch):
    """Three ranks that take up one process's state, each with a third of the rows, install on
    average what the process would."""
    one, (idx, targets), found = run(3, **kw)[0], batch(300, T=12), []
    state, weights = one.state_dict(), one.model.state_dict()
    # each rank's own gradients, before they would be averaged
    monkeypatch.setattr(wm.MuonAdamW, "reduce_gradients", lambda self: None)
    monkeypatch.setattr(wm.MuonAdamW, "step", lambda self: None)
    for rank in range(3):
        part = fresh(rank=rank, world=3, **{**kw, "streams": kw.get("streams", 0) // 3})
        part.model.load_state_dict(weights)
        part.load_state_dict(state)
        rows = slice(rank, rank + 1)
        part.step(3, 4, [(idx[rows], targets[rows])])
        found.append(installed(part))
    one.step(3, 4, [(idx, targets)])
    want = installed(one)
    assert want.keys() == found[0].keys()
    assert {"wte.weight", "blocks.0.attn.c_v.weight", "blocks.1.ffn.c_proj.weight"} <= want.keys()
    for name, g in want.items():
        mean = sum(f[name] for f in found) / 3
        torch.testing.assert_close(mean, g, rtol=1e-9, atol=1e-14, msg=name)


def test_mismatched_origin_pairs_noise():
    """Its pseudo-gradients are uncorrelated with the matched ones of the same packets."""
    matched, control = (run(5, method=name)[0] for name in ("wm", "mismatched_origin"))
    for name in ("blocks.1.ffn.c_proj.weight", "blocks.2.ffn.c_fc.weight"):
        a, b = (p.model.get_parameter(name).grad for p in (matched, control))
        assert abs(cosine(a, b)) < 0.4


def test_a_packet_of_another_batch_pays_for_rewards_alone():
    """The control's credit is its payer's displacement and slope times its own signs, projected at
    its own activation; neither packet is changed."""
    model = fresh().model
    own, payer = (forward(model, *batch(n), f"{n}", step=n)[0] for n in (1, 2))
    pair, rule = dataclasses.replace(own, paid_by=payer), Rule()
    _, dx = wm.bus_probe(payer, rule)
    xi = own.signs("bus", 32, dx)
    want = (payer.s @ model.lm_head.weight) * dx * xi / rule.sigma
    found = wm.bus_credit(model, pair, rule, live)
    torch.testing.assert_close(found, wm.tangent(want, own.x_final))
    assert own.bus is payer.bus is None and own.source is own


@pytest.mark.parametrize("stage", [stage2, stage1])
def test_a_stage_leaves_its_packet_alone(stage):
    model = fresh().model
    packet, *_ = forward(model, *batch(), "x")
    packet.bus = wm.bus_credit(model, packet, Rule(), live)
    before = {k: v.clone() if torch.is_tensor(v) else v for k, v in packet.as_dict().items()}
    before["layers"] = [{k: t.clone() for k, t in layer.items()} for layer in packet.layers]
    stage(model, packet, Rule(), live)
    assert_same(packet.as_dict(), before)


def test_readers():
    pipeline, _ = run(3, reader="muon_colnorm", lm_pool="row_iso")
    W, head = pipeline.model.blocks[0].ffn.c_proj.weight, pipeline.model.lm_head.weight
    U, S, Vh = torch.linalg.svd(pipeline.optimizer.state[W]["momentum_buffer"], full_matrices=False)
    want = U @ torch.diag(1 / S) @ U.T @ W
    want = want * (W.norm(dim=0) / want.norm(dim=0))
    assert cosine(pipeline.readers("blocks.0.ffn", W), want) > 1 - 1e-6
    assert pipeline.readers("lm_head", head) is head
    pipeline, _ = run(3, reader="adamw_frobnorm")
    W = pipeline.model.lm_head.weight
    v = pipeline.optimizer.state[W]["exp_avg_sq"] / (1 - 0.95**3)
    want = W / (v.sqrt() + 1e-4)
    torch.testing.assert_close(pipeline.readers("lm_head", W), want * W.norm() / want.norm())


def test_a_new_comparator_is_a_row(monkeypatch):
    """A function and a row of METHODS: it trains, and what it returns is installed at once."""
    def sign_of_nothing(model, packet, targets, rule):
        return {"wte.weight": torch.full_like(model.wte.weight, rule.sigma)}
    row = Method(gradients=sign_of_nothing, learns=("lm_head", "wte"))
    monkeypatch.setitem(METHODS, "mine", row)
    # a row that does not say which flags act leaves none of them idle
    assert not train_wm.idle(train_wm.Config(method="mine")) & {"sigma", "draws", "streams"}
    pipeline, _ = run(1, method="mine")
    assert pipeline.weights.keys() == {"lm_head.weight", "wte.weight"}
    assert (pipeline.model.wte.weight.grad == 0.01).all() and not pipeline.packets


REFUSED = [
    dict(ffn="relu"), dict(ffn="swiglu"), dict(residual="highway"), dict(norm="layer"),
    dict(norm="rms_affine"), dict(pos="learned"), dict(pos="none"), dict(qk_norm=False),
    dict(attn="linear", pos="none", qk_norm=False, window_pattern="L"), dict(tie=True),
    dict(x0_skip=False), dict(embed_norm=False), dict(bias=True), dict(oe_m=101),
    dict(wte_route="separate"), dict(out_skip=True), dict(history=True), dict(dropout=0.1),
    dict(softcap=0.0), dict(qk_scale="full"), dict(qk_scale="head")]


@pytest.mark.parametrize("kw", REFUSED, ids=str)
def test_a_model_that_the_formulas_do_not_describe_is_refused(kw):
    """Backprop alone is exact for whatever it is given."""
    model = GPT(dataclasses.replace(CFG, **kw)).init_weights(1)
    for method in ("wm", "sr_np", "mismatched_origin"):
        with pytest.raises(UserError, match="|".join(kw)):
            Pipeline(model, Rule(method=method), 1)
    Pipeline(model, Rule(method="backprop"), 1)


def test_a_method_needs_only_what_its_formulas_need():
    """The head's slope holds for any feed-forward layer, the skip path for a new activation too."""
    model = GPT(dataclasses.replace(CFG, ffn="relu")).init_weights(1).double()
    for method in ("head_only", "lexical_only"):
        Pipeline(model, Rule(method=method), 1).step(0, 2, [batch()])
    with pytest.raises(UserError, match="head_temp|qk_scale"):
        wm_pipeline.check_model(CFG, Rule(head_temp=True))
