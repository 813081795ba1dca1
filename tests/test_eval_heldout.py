"""eval_heldout.py: scores like training's, what is written back, sampling, damaged checkpoints."""
import dataclasses
import json
import os
import shutil

import pytest
import torch

import common
import eval_heldout
import train_oe
from batches import Store
from common import UserError
from data import open_corpus, prepare
from helpers import argv_of, text, write_corpus
from model import GPT, GPTConfig


@pytest.fixture(scope="module")
def trained(store, tmp_path_factory):
    """A checkpoint of train_oe.py with its record beside it."""
    out = tmp_path_factory.mktemp("trained")
    flags = dict(data=store, out=out, depth=2, head_dim=32, seq_len=32, batch_size=8,
                 micro_batch=4, steps=20, oe_m=501, save_every=0)
    train_oe.train(train_oe.parse(argv_of(flags)))
    (path,) = out.glob("*.ckpt")
    return path


@pytest.fixture
def ckpt(trained, tmp_path):
    """A copy of it that a test may change."""
    shutil.copy(trained.with_suffix(".json"), tmp_path / "run.json")
    return shutil.copy(trained, tmp_path / "run.ckpt")


def record_of(path):
    return json.loads(path.with_suffix(".json").read_text())


def edit_record(path, **change):
    path.with_suffix(".json").write_text(json.dumps({**record_of(path), **change}))


def said(capsys, *argv):
    """What eval_heldout.py prints on stdout; it succeeds."""
    capsys.readouterr()
    assert not eval_heldout.main([str(a) for a in argv])
    return capsys.readouterr().out


def refused(match, *argv):
    with pytest.raises(UserError, match=match) as err:
        eval_heldout.main([str(a) for a in argv])
    assert "\n" not in str(err.value)


def test_scores_as_training_did_and_writes_back(ckpt, capsys):
    metrics = record_of(ckpt)["metrics"]
    edit_record(ckpt, metrics={**metrics, "val_bpb": 99.0})
    out = said(capsys, ckpt, "--device", "cpu")
    assert record_of(ckpt)["metrics"] == metrics and f"{metrics['val_bpb']:.6f}" in out
    out = said(capsys, ckpt, "--no-write", "--batch_size", 3)
    assert abs(float(out.split("held-out ")[1].split()[0]) - metrics["heldout_bpb"]) < 2e-6


def test_partial_and_foreign_scores_are_not_written_back(ckpt, store, capsys):
    record = record_of(ckpt)
    whole, few = record["metrics"], dict(val_tokens=200, heldout_tokens=200)
    # the record of a run that scored only 200 tokens
    config = {**record["config"], "eval_tokens": 200}
    edit_record(ckpt, config=config, metrics={**whole, **few})
    said(capsys, ckpt, "--eval_tokens", 200)
    after = record_of(ckpt)
    assert after["metrics"]["val_bpb"] != whole["val_bpb"] and after["config"] == config
    assert "not written" in said(capsys, ckpt, "--eval_tokens", 60) and record_of(ckpt) == after
    # the whole splits say more, and the record says that it holds them now
    assert "not written" not in said(capsys, ckpt)
    assert record_of(ckpt)["metrics"] == whole and record_of(ckpt)["config"]["eval_tokens"] == 0
    assert whole["val_tokens"] == Store(store).meta["splits"]["val"]["tokens"]
    for change in (dict(steps=7), dict(status="diverged"), dict(metrics={"val_loss": 1.0})):
        edit_record(ckpt, **{**record, **change})
        assert "not written" in said(capsys, ckpt)
        assert record_of(ckpt) == {**record, **change}
    ckpt.with_suffix(".json").write_text("[]")
    refused("not a result record", ckpt)


def test_a_broken_checkpoint_does_not_stop_the_others(trained, ckpt, capsys):
    saved = common.load_checkpoint(ckpt)
    for damage in (dict(step=None), dict(model_config={"n_layer": 1}), dict(model={}),
                   dict(config=None), dict(model_config={**saved["model_config"], "n_layer": 3})):
        kept = {k: v for k, v in {**saved, **damage}.items() if v is not None}
        common.save_checkpoint(ckpt, kept)
        assert eval_heldout.main([str(ckpt), str(trained)]) == 2
        out, err = capsys.readouterr()
        assert "damaged" in err and len(err.strip().splitlines()) == 1 and str(trained) in out


@pytest.mark.parametrize("content", [None, b"", b"hello", {"model": {}}], ids=str)
def test_no_checkpoint_is_named(ckpt, content):
    if content is None:
        os.truncate(ckpt, ckpt.stat().st_size // 2)
    elif isinstance(content, dict):
        torch.save(content, ckpt)
    else:
        ckpt.write_bytes(content)
    refused("checkpoint", ckpt)


def test_its_corpus_is_found_again_or_named(ckpt, store, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    other.mkdir()
    made = prepare(write_corpus(other), vocab_size=280, out=tmp_path / "made")
    refused("another corpus or tokenizer", ckpt, "--data", made)
    refused("no such store", ckpt, "--data", tmp_path / "nowhere")
    moved, saved = shutil.copytree(store, tmp_path / "moved"), common.load_checkpoint(ckpt)
    for old, how in (("gone", "name its corpus with --data$"), ("stores/stdlib-8192", "data.py$")):
        config = {**saved["config"], "data": old}
        common.save_checkpoint(ckpt, {**saved, "config": config})
        monkeypatch.chdir(tmp_path)
        refused(f"trained on {old}, which is not here; .*{how}", ckpt)
    assert "val" in said(capsys, ckpt, "--data", moved)
    # a folder that is no store any more is not read as text: this checkpoint never saw text
    texts = tmp_path / "texts"
    texts.mkdir()
    write_corpus(texts)
    common.save_checkpoint(ckpt, {**saved, "config": {**saved["config"], "data": str(texts)}})
    refused("is not a store", ckpt)
    assert not (tmp_path / "stores").exists()


def test_sampling_continues_the_text(trained, capsys):
    def sample(prompt, *extra):
        return said(capsys, trained, "--sample", prompt, "--sample_tokens", 40, *extra)
    assert sample("", "--temperature", 1e-40)
    assert sample("x" * 500).startswith("x" * 500)   # longer than the model's rows
    prompt = "the quick <|bos|> ж"
    one, again, two = (sample(prompt, "--seed", seed) for seed in (1, 1, 2))
    likely = sample(prompt, "--temperature", 0)
    assert all(out.startswith(prompt) for out in (one, two, likely))
    assert one == again != two and len(likely) > len(prompt) + 1


@pytest.mark.parametrize("flags", [{}, dict(attn="gated_delta_scalar", pos="none"),
                                   dict(ffn="moe")], ids=["modern", "delta", "moe"])
def test_a_model_of_ablate_and_text_under_a_tokenizer(flags, store, tmp_path, capsys):
    """Its corpus may be text; its record's loss is of other windows and stays."""
    (tmp_path / "book.txt").write_text("".join(text(i, 100) for i in range(30)))
    config = dict(data=str(tmp_path / "book.txt"), tokenizer=f"{store}/tokenizer.json",
                  vocab_size=300, batch_size=4, dtype="float32")
    corpus = open_corpus(config["data"], config["tokenizer"])
    model_config = GPTConfig.modern(n_embd=32, n_head=2, n_layer=2, sequence_len=16,
                                    vocab_size=300, **flags)
    model = GPT(model_config).init_weights(0)
    ckpt, record = tmp_path / "cell.ckpt", dict(status="finished", steps=3, config=config,
                                                metrics=dict(val_loss=1.0, val_tokens=64))
    common.save_checkpoint(ckpt, dict(
        config=config, model_config=dataclasses.asdict(model_config), model=model.state_dict(),
        data_digest=corpus.digest, step=3))
    ckpt.with_suffix(".json").write_text(json.dumps(record))
    assert said(capsys, ckpt, "--sample", "the fox").startswith("the fox")
    out = said(capsys, ckpt, "--eval_tokens", 64)
    assert "step 3, val" in out and "not written" in out and record_of(ckpt) == record
