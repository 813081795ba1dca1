"""audit.py against Table 1b and section 3 of the OE paper, hand-made matrices, and closed forms; arms and step-0 modes."""
import json
import math

import pytest
import torch

import audit
import train_oe
from common import UserError
from model import GPT, GPTConfig, norm
from optim import STEP0, MuonAdamW, first_step, native_groups, set_schedule
from test_train_oe import final, run, store  # noqa: F401  (store is a fixture)

PUBLISHED = json.loads((audit.ROOT / "published" / "oe.json").read_text())
CELLS = [(depth, arm, row) for (depth, arm), row in audit.published_rows().items()]


def test_arms_are_those_of_the_paper():
    assert {r["arm"] for r in PUBLISHED["runs"]} == set(train_oe.ARMS)
    assert len({(r["arm"], r["depth"]) for r in PUBLISHED["runs"]}) == 34
    assert {json.dumps(v, sort_keys=True) for v in train_oe.ARMS.values()}.__len__() == len(train_oe.ARMS)   # no two arms are one
    assert audit.oe_arms() == train_oe.ARMS


@pytest.mark.parametrize("depth, arm, row", CELLS, ids=[f"d{d}-{a}" for d, a, _ in CELLS])
def test_table_1b(depth, arm, row):
    flags = train_oe.ARMS[arm]
    n = audit.arm_model(flags, depth).num_params()
    assert (n["backbone"], n["oe"], n["total"]) == (row["params_backbone"], row["params_oe"], row["params_total"])
    assert abs(sum(audit.arm_flops(flags, depth).values()) / 1e9 - row["extra_gflops_per_step"]) <= 0.0051
    # 319.31 is the sum of two printed roundings, 319.303 the sum of the parts
    assert abs(sum(audit.arm_memory(flags, depth).values()) / 2**20 - row["analytic_mem_delta_mib"]) <= 0.0101
    if depth == 8:  # at depth 6 the paper divides by 59.37 TFLOP, which its formula does not give (see the next test)
        assert abs(100 * sum(audit.arm_flops(flags, depth).values()) / audit.step_flops(depth) - row["extra_pct"]) <= 0.00051


def test_component_operations_to_the_printed_digit():
    printed = PUBLISHED["accounting"]["flops"]
    joint = {d: audit.arm_flops(train_oe.ARMS["12_oe_joint"], d) for d in (6, 8)}
    for d in (6, 8):
        for part, key in (("oe lookup", "oe_lookup_fwd_bwd"), ("oe update", "oe_mfree_step"), ("q scale", "post_qk_scaling")):
            assert round(joint[d][part] / 1e9, 4) == printed[key][str(d)]
        assert round((joint[d]["equilibrate"] + joint[d]["neumann"]) / 1e9, 4) == printed["opt_total"][str(d)]
        routes = [audit.arm_flops(train_oe.ARMS[a], d)["routing"] / 1e9 for a in ("12d_oe_decoupled_x0", "12do_oe_decoupled_x0_out")]
        table = audit.arm_flops(train_oe.ARMS["oe_table_neumann_native"], d)["table neumann"] / 1e9
        assert round(table, 2) == printed["table_neumann"][str(d)]
        low, high = printed["decoupled_routing"][str(d)]
        assert low - 0.005 <= min(routes + [audit.arm_flops(train_oe.ARMS["12d_bf16_shared_denom"], d)["routing"] / 1e9] * (d == 8))
        assert abs(max(routes) - high) < 0.005
    assert (round(joint[8]["equilibrate"] / 1e9, 4), round(joint[8]["neumann"] / 1e9, 4)) == (0.4027, 51.8967)
    # depth 6: printed 0.1695 and 24.3820; the same formulas give 0.1699 and 24.3816, and the same sum
    assert (round(joint[6]["equilibrate"] / 1e9, 4), round(joint[6]["neumann"] / 1e9, 4)) == (0.1699, 24.3816)
    assert round(audit.step_flops(8) / 1e12, 2) == 125.35 and round(audit.step_flops(6) / 1e12, 2) == 63.09


def test_component_memory():
    joint = {d: audit.arm_memory(train_oe.ARMS["12_oe_joint"], d) for d in (6, 8)}
    oe = {d: (joint[d]["oe weights + gradients"] + joint[d]["oe visit counts"]) / 2**20 for d in (6, 8)}
    assert (round(oe[6], 2), round(oe[8], 2)) == (223.29, 296.95)
    assert [joint[d]["float32 embedding state"] / 2**20 for d in (6, 8)] == [96.0, 160.0]
    assert "float32 embedding state" not in audit.arm_memory(train_oe.ARMS["oe_joint_bf16state"], 8)


def test_float32_state_memory_is_what_the_optimizer_holds():
    def held(float32_state):
        model = GPT(GPTConfig.backbone(2, 64, vocab_size=50, sequence_len=8)).init_weights(0).set_dtype(torch.bfloat16)
        opt = MuonAdamW(native_groups(model.roles(), 128, float32_state=float32_state))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)).backward()
        opt.step()
        roles = {id(p): role for _, role, p in model.roles()}
        return sum(v.numel() * v.element_size() for p, s in opt.state.items() if roles[id(p)] in ("wte", "value_embeds")
                   for v in s.values() if torch.is_tensor(v))
    assert held(True) - held(False) == 8 * (50 * 128 + 50 * 128)


# ---- geometry ----

def test_stable_rank_and_mean_row():
    assert abs(audit.stable_rank(torch.eye(5, 9)) - 5) < 1e-9
    u, v = torch.randn(7, 1), torch.randn(1, 4)
    assert abs(audit.stable_rank(u @ v) - 1) < 1e-5
    W = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    assert abs(audit.stable_rank(W) - 14 / 9) < 1e-9 and abs(audit.stable_rank(torch.cat([W, torch.zeros(4, 3)])) - 14 / 9) < 1e-9
    assert abs(audit.mean_row_share(torch.ones(6, 3)) - 1) < 1e-12 and audit.mean_row_share(torch.tensor([[1.0], [-1.0]])) == 0
    M = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).double()
    assert abs(audit.mean_row_share(M) - 8 * (M.mean(0) ** 2).sum() / (M**2).sum()) < 1e-12
    assert abs(audit.stable_rank(M) - (M**2).sum() / torch.linalg.svdvals(M)[0] ** 2) < 1e-9
    assert math.isnan(audit.stable_rank(torch.zeros(3, 2)))


def test_geometry_of_a_checkpoint(store, tmp_path, capsys):  # noqa: F811
    record = run(store, tmp_path, arm="12m_oe_masked_qk", oe_m=501, steps=4)
    path = str(tmp_path / f"{record['run']}.ckpt")
    audit.main(["geometry", path, "--json"])
    g = json.loads(capsys.readouterr().out.splitlines()[-1])[path]
    P = final(tmp_path)["model"]
    assert g["q_gain"]["high"] == 1.0 and g["q_gain"]["layers"][0] == 1.0 and g["q_gain"]["layers"][1] != 1.0
    assert g["scalars"]["x0_lambdas"] == P["x0_lambdas"].tolist() and g["step"] == 4
    assert abs(g["stable_rank"]["lm_head"] - audit.stable_rank(P["lm_head.weight"])) < 1e-9 and 1 < g["stable_rank"]["oe_tables"] <= 32
    audit.main(["geometry", path])
    assert "stable_rank" in capsys.readouterr().out


def test_mistakes(tmp_path):
    for argv in (["geometry"], ["params", "x.ckpt"], ["nothing"], ["geometry", str(tmp_path / "none.ckpt")], ["step0", "--rows", "0"]):
        with pytest.raises(UserError):
            audit.main(argv)


# ---- the first step (OE 4.5) ----

def test_default_norm_epsilon_is_float32_machine_epsilon():
    x = torch.tensor([[1e-4, -2e-4, 3e-4, 0.0]])
    want = x / (x.square().mean(-1, keepdim=True) + 2.0**-23).sqrt()
    assert torch.finfo(torch.float32).eps == 2.0**-23
    torch.testing.assert_close(norm(x), want, rtol=1e-6, atol=0)
    assert not torch.allclose(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), rtol=1e-2)
    half = norm(x.bfloat16()).float()
    assert (half - want).abs().max() < 0.01 * want.abs().max()        # bfloat16 inputs use the same epsilon, not 2^-7


def test_shared_denominator_algebra():
    gen = torch.Generator().manual_seed(0)
    w, e = torch.randn(2, 5, 7, 64, generator=gen).double()
    for eps in (2.0**-23, 1e-6):
        s = ((w + e).square().mean(-1, keepdim=True) + eps).sqrt()
        x0, x0_w = (w + e) / s, audit.model_file._shared_denominator(w.float(), (w + e).float(), eps).double()
        a, b = 1.7, -0.6
        torch.testing.assert_close(a * x0 + b * x0_w, (a * e + (a + b) * w) / s, rtol=1e-5, atol=1e-5)
        exact = w * torch.rsqrt((w + e).square().mean(-1, keepdim=True) + eps)
        torch.testing.assert_close(a * x0 - a * exact, a * e / s, rtol=1e-12, atol=1e-12)    # b = -a cancels w
    z = torch.zeros_like(w).float()
    anchor = audit.model_file._shared_denominator(w.float(), w.float() + z, 2.0**-23)
    assert (norm(w.float()) - anchor).abs().max() < 1e-6               # without e both anchors are x0


def test_step0_gradients_by_precision():
    config = audit.Config(depth=2, rows=4, seq_len=32, oe_m=101, seed=5)
    x, y = torch.randint(0, 300, (2, 4, 32), generator=torch.Generator().manual_seed(1))
    g = audit.step0_gradients(config, x, y, 300)
    for family in ("x0_lambdas", "wte_lambdas", "out_lambdas"):
        exact = g["float64, eps 2^-23"][family]
        assert abs(g["float64, eps 0"][family]) < 1e-15
        assert abs(exact - g["float64, eps 2^-23"]["closed_form"]) < 1e-6 * abs(exact)
        assert abs(g["float64, eps 1e-6"][family] - g["float64, eps 1e-6"]["closed_form"]) < 1e-6 * abs(g["float64, eps 1e-6"][family])
        assert abs(g["float64, eps 1e-6"][family] / exact / (1e-6 * 2**23) - 1) < 1e-4        # linear in eps
        assert abs(g["bfloat16"][family]) > 1e3 * abs(exact)


@pytest.mark.parametrize("mode", STEP0)
def test_step0_modes_keep_what_the_paper_says(mode):
    def make():
        model = GPT(GPTConfig.backbone(2, 64, vocab_size=50, sequence_len=8, oe_m=19, qk_scale="full", wte_route="separate", out_skip=True))
        model.init_weights(3)
        opt = MuonAdamW(native_groups(model.roles(), 128))
        set_schedule(opt, 0, 953)
        for _, role, p in model.roles():
            p.grad = torch.full_like(p, 0.01)
            if role == "oe":
                p.visits = torch.ones(len(p))
        return model, opt
    model, opt = make()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    first_step(opt, model.roles(), mode)
    plain, plain_opt = make()
    plain_opt.step()
    chosen, kept = STEP0[mode]
    for name, role, p in model.roles():
        state, whole = opt.state[p], plain_opt.state[plain.get_parameter(name)]
        if role not in chosen:
            assert torch.equal(p, plain.get_parameter(name)) and state.get("step") == whole.get("step")
            continue
        moved = not torch.equal(p, start[name])
        assert moved == ("displacement" in kept) and (not moved or torch.equal(p, plain.get_parameter(name)))
        assert state.get("step", 0) == (1 if "counter" in kept else 0)
        assert ("exp_avg" in state and bool((state["exp_avg"] != 0).all() and (state["exp_avg_sq"] != 0).all())) == ("moments" in kept)
    assert {"full": 0, "nostep0_all": 4}.get(mode, 2) == len(chosen)


def test_bias_correction_after_a_kept_counter_is_the_papers_factor():
    """Step 1 with zeroed moments and counter 1 moves sqrt(1.95) / 1.96 = 0.7125 of what it moves with a cleared counter (OE 4.5)."""
    def second(clear):
        p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        opt = MuonAdamW([dict(params=[p], kind="adamw", betas=(0.96, 0.95), lr=0.5)])
        for step in range(2):
            p.grad = torch.full_like(p, 0.3)
            before = p.item()
            opt.step()
            if step == 0 and clear:
                opt.state[p].clear()
            elif step == 0:
                opt.state[p]["exp_avg"].zero_(), opt.state[p]["exp_avg_sq"].zero_()
        return p.item() - before
    assert abs(second(False) / second(True) - math.sqrt(1.95) / 1.96) < 1e-6


# ---- every arm trains ----

@pytest.mark.parametrize("arm", train_oe.ARMS)
def test_each_arm_trains_6_steps(store, tmp_path, arm):  # noqa: F811
    tables = dict(oe_m=501) if train_oe.ARMS[arm].get("oe_m") else {}
    record = run(store, tmp_path, arm=arm, steps=6, eval_tokens=100, embed_lr=0.1, oe_lr=0.1, **tables)
    losses = [loss for _, loss in record["curve"]]
    assert record["status"] == "finished" and record["arm"] == arm and losses[-1] < losses[0]
    assert record["run"].startswith(f"{arm}_d2_seed42-")


def test_step0_modes_share_the_first_loss_and_part_afterwards(store, tmp_path):  # noqa: F811
    curves = {mode: [loss for _, loss in run(store, tmp_path / mode, arm="12do_oe_decoupled_x0_out", oe_m=501, steps=4, step0=mode)["curve"]]
              for mode in STEP0}
    assert len({c[0] for c in curves.values()}) == 1
    assert len({c[3] for c in curves.values()}) == len(STEP0)


def test_package_flags_act(store, tmp_path):  # noqa: F811
    plain = run(store, tmp_path / "plain", steps=6, oe_m=501)["curve"]
    for i, kw in enumerate((dict(equilibrate_tau=3), dict(neumann_tau=3), dict(table_neumann_tau=3), dict(momentum_cooldown=True),
                            dict(lr_scale=1.4), dict(muon_wd_scale=30.0), dict(weight_decay=0.0), dict(schedule="cosine"))):
        assert run(store, tmp_path / str(i), steps=6, oe_m=501, **kw)["curve"] != plain, kw
    # in float32 there is nothing for these two to change, and the record says the dtype
    assert run(store, tmp_path / "f", steps=6, oe_m=501, float32_state=True, float32_polar=True)["curve"] == plain


def test_step0_without_route_scalars_is_refused(store, tmp_path):  # noqa: F811
    with pytest.raises(UserError, match="step0"):
        run(store, tmp_path, step0="nostep0")
