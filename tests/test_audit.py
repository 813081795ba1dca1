"""audit.py against Table 1b and section 3 of the OE paper, by hand, and by closed forms."""
import json
import math

import pytest
import torch

import audit
import train_oe
from common import UserError, published
from helpers import argv_of, final
from model import GPT, GPTConfig, norm, shared_denominator
from optim import STEP0, MuonAdamW, first_step, native_groups, set_schedule
from train_oe import ARMS

PRINTED = published("oe")
SMALL = dict(depth=2, head_dim=16, seq_len=32, batch_size=4, micro_batch=4, steps=6,
             eval_tokens=100, save_every=0, device="cpu")


def run(store, out, **flags):
    """The record of a small run of train_oe.py."""
    flags = {**SMALL, "data": store, "out": out, **flags}
    return train_oe.train(train_oe.parse(argv_of(flags)))


def losses(record):
    return [loss for _, loss in record["curve"]]


def said(capsys, *argv):
    """The JSON of an audit."""
    audit.main([*map(str, argv), "--json"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# ---- accounting ----

def test_arms_are_those_of_the_paper():
    assert {r["arm"] for r in PRINTED["runs"]} == set(ARMS)
    assert len({(r["arm"], r["depth"]) for r in PRINTED["runs"]}) == 34
    assert len({json.dumps(flags, sort_keys=True) for flags in ARMS.values()}) == len(ARMS)


def test_table_1b():
    for (depth, arm), row in audit.published_rows().items():
        n = audit.arm_model(ARMS[arm], depth).num_params()
        assert n["backbone"] == row["params_backbone"], arm
        assert (n["oe"], n["total"]) == (row["params_oe"], row["params_total"]), arm
        flops = sum(audit.arm_flops(ARMS[arm], depth).values())
        assert abs(flops / 1e9 - row["extra_gflops_per_step"]) <= 0.0051, arm
        # 319.31 is the sum of two printed roundings, 319.303 the sum of the parts
        mib = sum(audit.arm_memory(ARMS[arm], depth).values()) / 2**20
        assert abs(mib - row["analytic_mem_delta_mib"]) <= 0.0101, arm
        if depth == 8:   # at depth 6 the paper divides by 59.37 TFLOP, not what its formula gives
            assert abs(100 * flops / audit.step_flops(depth) - row["extra_pct"]) <= 0.00051, arm


def test_component_operations_to_the_printed_digit():
    printed = PRINTED["accounting"]["flops"]

    def gflop(arm, depth):
        return {k: v / 1e9 for k, v in audit.arm_flops(ARMS[arm], depth).items()}
    for d in (6, 8):
        joint = gflop("12_oe_joint", d)
        for part, key in (("oe lookup", "oe_lookup_fwd_bwd"), ("oe update", "oe_mfree_step"),
                          ("q scale", "post_qk_scaling")):
            assert round(joint[part], 4) == printed[key][str(d)]
        package = joint["equilibrate"] + joint["neumann"]
        assert round(package, 4) == printed["opt_total"][str(d)]
        table = gflop("oe_table_neumann_native", d)["table neumann"]
        assert round(table, 2) == printed["table_neumann"][str(d)]
        low, high = printed["decoupled_routing"][str(d)]
        arms = ["12d_oe_decoupled_x0", "12do_oe_decoupled_x0_out"]
        arms += ["12d_bf16_shared_denom"] if d == 8 else []
        routes = [gflop(arm, d)["routing"] for arm in arms]
        assert low - 0.005 <= min(routes) and abs(max(routes) - high) < 0.005
    # depth 6: printed 0.1695 and 24.3820; the same formulas give these, and the same sum
    for d, parts in ((6, (0.1699, 24.3816)), (8, (0.4027, 51.8967))):
        joint = gflop("12_oe_joint", d)
        assert (round(joint["equilibrate"], 4), round(joint["neumann"], 4)) == parts
    assert round(audit.step_flops(8) / 1e12, 2) == 125.35
    assert round(audit.step_flops(6) / 1e12, 2) == 63.09


def test_component_memory():
    for d, tables, state in ((6, 223.29, 96.0), (8, 296.95, 160.0)):
        joint = audit.arm_memory(ARMS["12_oe_joint"], d)
        held = joint["oe weights + gradients"] + joint["oe visit counts"]
        assert round(held / 2**20, 2) == tables
        assert joint["float32 embedding state"] / 2**20 == state
    assert "float32 embedding state" not in audit.arm_memory(ARMS["oe_joint_bf16state"], 8)


def test_float32_state_memory_is_what_the_optimizer_holds():
    def held(float32_state):
        cfg = GPTConfig.backbone(2, 64, vocab_size=50, sequence_len=8)
        model = GPT(cfg).init_weights(0).set_dtype(torch.bfloat16)
        opt = MuonAdamW(native_groups(model.roles(), 128, float32_state=float32_state))
        ids = torch.ones(1, 8, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, ids).backward()
        opt.step()
        count = 0
        for _, role, p in model.roles():
            if role in ("wte", "value_embeds"):
                tensors = [v for v in opt.state[p].values() if torch.is_tensor(v)]
                count += sum(v.numel() * v.element_size() for v in tensors)
        return count
    assert held(True) - held(False) == 8 * (50 * 128 + 50 * 128)


def test_accounts_as_json_and_tables(capsys):
    found = said(capsys, "params")
    assert [row["arm"] for row in found["arms"]] == 2 * list(ARMS)
    totals = {row["model"]: row["total"] for row in found["models"]}
    assert totals["depth 6"] == 26_345_772 and totals["depth 8"] == 50_332_176
    assert totals["modern"] == 3_344_064 and totals["moe"] == 6_886_080
    row = said(capsys, "flops")["arms"][0]
    assert row["total"] == 0 and row["paper_total"] is not None
    for name, words in (("params", "26,345,772"), ("flops", "125.35"), ("memory", "319.31")):
        audit.main([name])
        assert words in capsys.readouterr().out


# ---- geometry ----

def test_stable_rank_and_mean_row():
    gen = torch.Generator().manual_seed(0)
    u, v, M = (torch.randn(*shape, generator=gen) for shape in ((7, 1), (1, 4), (8, 5)))
    W, M = torch.diag(torch.tensor([3.0, 2.0, 1.0])), M.double()
    top = torch.linalg.svdvals(M)[0]
    for matrix, rank in ((torch.eye(5, 9), 5), (u @ v, 1), (W, 14 / 9), (M, M.norm()**2 / top**2),
                         (torch.cat([W, torch.zeros(4, 3)]), 14 / 9)):
        assert abs(audit.stable_rank(matrix) - rank) < 1e-5
    assert math.isnan(audit.stable_rank(torch.zeros(3, 2)))
    for matrix, share in ((torch.ones(6, 3), 1), (torch.tensor([[1.0], [-1.0]]), 0),
                          (M, 8 * (M.mean(0) ** 2).sum() / (M**2).sum())):
        assert abs(audit.mean_row_share(matrix) - share) < 1e-12


def test_geometry_of_a_checkpoint(store, tmp_path, capsys):
    record = run(store, tmp_path, arm="12m_oe_masked_qk", oe_m=501, steps=4)
    path = str(tmp_path / f"{record['run']}.ckpt")
    g, P = said(capsys, "geometry", path)[path], final(tmp_path)["model"]
    layers, logs = g["q_gain"]["layers"], P["blocks.1.attn.q_log"].double()
    assert g["q_gain"]["high"] == layers[0] == 1.0 != layers[1]
    slow = logs[:, logs.size(1) // 4:]
    assert abs(layers[1] - (slow.exp().sum() + logs.numel() - slow.numel()) / logs.numel()) < 1e-12
    assert g["scalars"]["x0_lambdas"] == P["x0_lambdas"].tolist() and g["step"] == 4
    assert abs(g["stable_rank"]["lm_head"] - audit.stable_rank(P["lm_head.weight"])) < 1e-9
    squares = [P[f"blocks.{i}.attn.c_{n}.weight"] for i in (0, 1) for n in ("q", "k", "v", "proj")]
    want = sum(map(audit.stable_rank, squares)) / 8
    assert abs(g["stable_rank"]["attention"] - want) < 1e-9
    assert 1 < g["stable_rank"]["oe_tables"] <= 32
    audit.main(["geometry", path])
    assert "stable_rank" in capsys.readouterr().out


def test_mistakes(tmp_path):
    for argv in (["geometry"], ["params", "x.ckpt"], ["nothing"], ["step0", "--rows", "0"],
                 ["geometry", str(tmp_path / "none.ckpt")]):
        with pytest.raises(UserError):
            audit.main(argv)


# ---- the first step (OE 4.5) ----

def test_default_norm_epsilon_is_float32_machine_epsilon():
    x = torch.tensor([[1e-4, -2e-4, 3e-4, 0.0]])
    power = x.square().mean(-1, keepdim=True)
    want = x / (power + 2.0**-23).sqrt()
    assert torch.finfo(torch.float32).eps == 2.0**-23
    torch.testing.assert_close(norm(x), want, rtol=1e-6, atol=0)
    assert not torch.allclose(norm(x), x / (power + 1e-6).sqrt(), rtol=1e-2)
    # bfloat16 inputs use the same epsilon, not 2^-7
    assert (norm(x.bfloat16()).float() - want).abs().max() < 0.01 * want.abs().max()


def test_shared_denominator_algebra():
    w, e = torch.randn(2, 5, 7, 64, generator=torch.Generator().manual_seed(0)).double()
    a, b = 1.7, -0.6
    for eps in (2.0**-23, 1e-6):
        s = ((w + e).square().mean(-1, keepdim=True) + eps).sqrt()
        x0, x0_w = (w + e) / s, shared_denominator(w.float(), (w + e).float(), eps).double()
        want = (a * e + (a + b) * w) / s
        torch.testing.assert_close(a * x0 + b * x0_w, want, rtol=1e-5, atol=1e-5)
        # b = -a cancels w
        torch.testing.assert_close(a * x0 - a * w / s, a * e / s, rtol=1e-12, atol=1e-12)
    anchor = shared_denominator(w.float(), w.float(), 2.0**-23)
    assert (norm(w.float()) - anchor).abs().max() < 1e-6   # without e both anchors are x0


def test_step0_gradients_by_precision():
    config = audit.Config(depth=2, rows=4, seq_len=32, oe_m=101, seed=5)
    x, y = torch.randint(0, 300, (2, 4, 32), generator=torch.Generator().manual_seed(1))
    g = audit.step0_gradients(config, x, y, 300)
    for family in ("x0_lambdas", "wte_lambdas", "out_lambdas"):
        exact, larger = g["float64, eps 2^-23"], g["float64, eps 1e-6"]
        assert abs(g["float64, eps 0"][family]) < 1e-15
        for row in (exact, larger):
            assert abs(row[family] - row["closed_form"]) < 1e-6 * abs(row[family])
        # linear in eps
        assert abs(larger[family] / exact[family] / (1e-6 * 2**23) - 1) < 1e-4
        assert abs(g["bfloat16"][family]) > 1e3 * abs(exact[family])


def stepped(mode):
    """(model, optimizer, first weights) after one first step on made-up gradients."""
    cfg = GPTConfig.backbone(2, 64, vocab_size=50, sequence_len=8, oe_m=19, **audit.SKIP_ARM)
    model = GPT(cfg).init_weights(3)
    opt = MuonAdamW(native_groups(model.roles(), 128))
    set_schedule(opt, 0, 953)
    for _, role, p in model.roles():
        p.grad = torch.full_like(p, 0.01)
        if role == "oe":
            p.visits = torch.ones(len(p))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    first_step(opt, model.roles(), mode) if mode else opt.step()
    return model, opt, start


@pytest.mark.parametrize("mode", STEP0)
def test_step0_modes_keep_what_the_paper_says(mode):
    model, opt, start = stepped(mode)
    plain, plain_opt, _ = stepped(None)
    chosen, kept = STEP0[mode]
    for name, role, p in model.roles():
        q = plain.get_parameter(name)
        state, whole, as_plain = opt.state[p], plain_opt.state[q], torch.equal(p, q)
        if role not in chosen:
            assert as_plain and state.get("step") == whole.get("step")
            continue
        moved = not torch.equal(p, start[name])
        assert moved == ("displacement" in kept) and (as_plain or not moved)
        assert state.get("step", 0) == (1 if "counter" in kept else 0)
        full = [(state[k] != 0).all() for k in ("exp_avg", "exp_avg_sq") if k in state]
        assert (bool(full) and all(full)) == ("moments" in kept)
    assert {"full": 0, "nostep0_all": 4}.get(mode, 2) == len(chosen)


def test_bias_correction_after_a_kept_counter_is_the_papers_factor():
    """Step 1 with zeroed moments and counter 1 moves sqrt(1.95) / 1.96 = 0.7125 of what it moves
    with a cleared counter (OE 4.5)."""
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


def test_trajectories_begin_alike_and_part_where_the_displacement_is_dropped(store, capsys):
    flags = argv_of(dict(data=store, depth=2, rows=2, seq_len=16, oe_m=101))
    found = said(capsys, "step0", "--steps=3", *flags)
    curves = {mode: [row["loss"] for row in rows] for mode, rows in found["trajectories"].items()}
    full, away = curves["full"], found["largest_loss_difference_from_full"]
    assert set(curves) == set(STEP0) and away["full"] == 0
    for mode, (chosen, kept) in STEP0.items():
        assert curves[mode][0] == full[0]
        displaced = not chosen or "displacement" in kept
        assert (curves[mode][1] == full[1]) == displaced, mode
        assert away[mode] == max(abs(a - b) for a, b in zip(curves[mode], full))
        counter = found["trajectories"][mode][0]["counter"]
        assert counter == (1 if not chosen or "counter" in kept else 0)
    audit.main(["step0", *flags, "--steps=1"])
    assert "loss by step" in capsys.readouterr().out


# ---- an arm of every code path trains; that all parse is tested in test_train_oe.py ----

PATHS = ("00_dense_native", "01_dense_opt_lr141", "02m_dense_masked_qk", "oe_table_neumann_joint",
         "12d_oe_bf16_decoupled_x0", "12do_shared_denom_f32eps", "12do_oe_decoupled_x0_out",
         "12do_nostep0")


def test_an_arm_of_every_code_path_trains(store, tmp_path):
    curves = {}
    for arm in PATHS:
        tables = dict(oe_m=501) if ARMS[arm].get("oe_m") else {}
        record = run(store, tmp_path, arm=arm, embed_lr=0.1, oe_lr=0.1, **tables)
        curves[arm] = losses(record)
        assert record["status"] == "finished" and record["arm"] == arm
        assert curves[arm][-1] < curves[arm][0]
        assert record["run"].startswith(f"{arm}_d2_") and record["run"].endswith("_seed42")
    full, dropped = curves["12do_oe_decoupled_x0_out"], curves["12do_nostep0"]
    assert full[0] == dropped[0] and full[1] != dropped[1]


PACKAGE_FLAGS = [
    dict(equilibrate_tau=3), dict(neumann_tau=3), dict(table_neumann_tau=3), dict(lr_scale=1.4),
    dict(momentum_cooldown=True), dict(muon_wd_scale=30.0), dict(weight_decay=0.0),
    dict(schedule="cosine")]


def test_package_flags_act(store, tmp_path):
    plain = losses(run(store, tmp_path, oe_m=501))
    for flags in PACKAGE_FLAGS:
        assert losses(run(store, tmp_path, oe_m=501, **flags)) != plain, flags
    # in float32 there is nothing for these two to change, and the record says the dtype
    same = run(store, tmp_path, oe_m=501, float32_state=True, float32_polar=True)
    assert losses(same) == plain and same["config"]["dtype"] == "float32"


def test_step0_without_route_scalars_is_refused():
    with pytest.raises(UserError, match="step0"):
        train_oe.parse(["--step0", "nostep0"])
