"""bench.py: the sides take turns, time what they say, and every report ends with one JSON line.

That its ablation step is the one ablate.py takes is tested in test_ablate.py.
"""
import json

import pytest
import torch

import bench
import train_oe
from common import UserError

CPU = torch.device("cpu")


def test_sides_take_turns_and_the_report_is_json(capsys):
    calls = []
    seconds = bench.interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
                               3, CPU, warmup=1)
    assert "".join(calls) == "abababab" and set(seconds) == {"a", "b"}
    bench.report("name", {"a": 3.0, "b": 2.0}, "a", "b", 3, extra=1)
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert "1.500 x b" in table[0] and found["ratio"] == 1.5 and found["extra"] == 1
    assert (found["bench"], found["a_median_s"], found["b_median_s"]) == ("name", 3.0, 2.0)


def test_the_benches_time_the_preset():
    model = bench.GPT(train_oe.model_config(train_oe.parse(["--preset", "laptop"]), bench.VOCAB))
    x, w, targets = bench.loss_case(CPU)
    assert x.shape == (8 * 256, model.cfg.n_embd) and w.shape == model.lm_head.weight.shape
    assert targets.shape == (8 * 256,) and bench.table_mib(2, 101) < 1


def test_kernels_are_as_exact_as_float32():
    errors = bench.kernel_errors(CPU)
    assert len(errors) == 2 and max(errors.values()) < 2e-6


@pytest.mark.slow
def test_the_checks_that_want_a_gpu_run_in_miniature(capsys):
    """bench.py gpu without a GPU: every part runs, in processes of their own."""
    bench.main(["gpu", "--pairs", "3", "--device", "cpu", "--threads", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert max(found["kernel_errors"].values()) < 2e-6
    assert found["contraction"]["outer_over_torch_ieee_G2048"] > 1
    assert found["wm-step"]["memory_ratio"] > 0.5
    assert found["native"]["6 matrices"]["step_s"] > 0


@pytest.mark.parametrize("argv", [["oe", "--side", "wm"], ["wm-memory", "--side", "plain"],
                                  ["loss-memory"], ["nothing"], ["oe", "--pairs", "1"]])
def test_mistakes(argv):
    with pytest.raises(UserError):
        bench.main(argv)
