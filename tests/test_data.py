"""data.py and batches.py: splits, tokenizer, stores, packing, windows, bits per byte, bad input."""
import json
import math
import os
import random
import shutil
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import batches
import data
from batches import (BestFitBatches, RandomBatches, Store, eval_batches, evaluate_bpb,
                     evaluate_splits, find_pieces, fixed_windows)
from common import UserError, derive_seed
from data import Corpus, encode, open_corpus, prepare
from helpers import ROOT, text


def write_docs(folder, n, seed=0, size=40):
    """n files of `size` words, all different; returns their texts."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"{text(seed * 1000 + i, size)}{i}\n" for i in range(n)]
    for i, content in enumerate(texts):
        (folder / f"{i:03d}.txt").write_text(content)
    return texts


def documents(store, *splits):
    """The texts of some splits of a store, by default of all."""
    streams = [np.asarray(getattr(store, split)) for split in splits or batches.SPLITS]
    parts = [p for s in streams for p in np.split(s, np.flatnonzero(s == store.bos))[1:]]
    return [store.tokenizer.decode(p.tolist()) for p in parts]


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory):
    """The default corpus, but of every third file, which is quicker."""
    out, files = tmp_path_factory.mktemp("stores") / "stdlib", data.stdlib_files()
    with pytest.MonkeyPatch.context() as m:
        m.setattr(data, "stdlib_files", lambda: files[::3])
        return Store(prepare("stdlib", out=out, tokenizer_chars=1_000_000))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """(store, its texts, their folder): 60 documents, of which 5 occur twice."""
    folder = tmp_path_factory.mktemp("small")
    texts = write_docs(folder / "texts", 60)
    for i in range(5):
        (folder / "texts" / f"again{i}.txt").write_text(texts[i])
    return Store(prepare([folder / "texts"], 300, out=folder / "store")), texts, folder / "texts"


# ---- corpora and splits ----

def test_stdlib_store(stdlib):
    assert stdlib.train.dtype == np.uint16 and stdlib.train.ndim == 1
    assert stdlib.vocab_size == stdlib.tokenizer.get_vocab_size() == 8192
    assert stdlib.bos == stdlib.tokenizer.token_to_id("<|bos|>") == 8188
    sizes = stdlib.meta["splits"]
    total = sum(size["documents"] for size in sizes.values())
    assert total > 150 and 0.8 < sizes["train"]["documents"] / total < 0.97
    for name in batches.SPLITS:
        tokens = np.asarray(getattr(stdlib, name))
        assert tokens[0] == 8188 and (tokens == 8188).sum() == sizes[name]["documents"]
    train, val, heldout = (documents(stdlib, name) for name in batches.SPLITS)
    assert len(train) == len(set(train)) and not set(val) & set(heldout)
    assert not set(train) & {*val, *heldout}
    # all of it is what stands in the files
    files = {p.read_bytes().decode("utf-8", "replace") for p, _ in data.stdlib_files()}
    assert len(val) > 3 and {*train, *val, *heldout} <= files


def test_stdlib_files_leave_out_tests_and_packages():
    names = [p.as_posix() for p, _ in data.stdlib_files()]
    folders = {part for name in names for part in name.split("/")}
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert any(n.endswith("/argparse.py") for n in names) and names == sorted(names)
    assert all(n.endswith(".py") for n in names)
    assert sum(p.stat().st_size for p, _ in data.stdlib_files()) > 5e6


def test_duplicates_dropped_and_splits_disjoint(small):
    store, texts, _ = small
    assert Counter(documents(store)) == Counter(set(texts))
    assert all(documents(store, name) for name in batches.SPLITS)
    assert store.meta["dropped"]["duplicates"] == 5 and store.meta["distinct_documents"] == 60


def test_split_follows_content_not_order():
    digests = [data.digest_document(str(i)) for i in range(4000)]
    codes = data.assign(digests)
    assert codes[::-1] == data.assign(digests[::-1])
    assert all(abs(codes.count(c) / 4000 - 0.05) < 0.015 for c in (data.VAL, data.HELDOUT))
    assert codes[:2000] == data.assign(digests[:2000])          # adding documents moves none
    high = [bytes([255, i]) + bytes(14) for i in range(30)]     # all would be train
    expected = {data.TRAIN: 28, data.VAL: 1, data.HELDOUT: 1, data.DROP: 1}
    assert Counter(data.assign(high + [None])) == expected


def test_two_files_are_cut_into_spans(tmp_path):
    a, b = text(0, 600), text(1, 600) + "é" * 50 + "日本" * 40
    (tmp_path / "a.txt").write_text(a, encoding="utf-8")
    (tmp_path / "b.md").write_bytes(b.encode())
    store = Store(prepare([tmp_path / "a.txt", tmp_path / "b.md"], 300, out=tmp_path / "s"))
    splits = [documents(store, name) for name in batches.SPLITS]
    assert [len(s) for s in splits] == [2, 1, 1] and "".join(documents(store)) == a + b
    n = len(a + b)
    cuts = [0, n * 90 // 100, n * 95 // 100, n]
    assert [len("".join(s)) for s in splits] == np.diff(cuts).tolist()


def test_tokenizer_sees_train_only(tmp_path):
    """Words that occur in val and heldout alone never become tokens."""
    texts = write_docs(tmp_path / "t", 60)
    candidates = (f"zyxwvut zyxwvut zyxwvut zyxwvut {k}" for k in range(4000))
    odd = [t for t in candidates if data.split_of(data.digest_document(t)) != data.TRAIN][:20]
    for k, content in enumerate(odd):
        (tmp_path / "t" / f"odd{k}.txt").write_text(content)
    codes = data.assign([data.digest_document(t) for t in texts + odd])
    assert len(odd) == 20 and data.TRAIN not in codes[60:]
    vocab = Store(prepare(str(tmp_path / "t"), 320, out=tmp_path / "s")).tokenizer.get_vocab()
    assert not any(part in token for token in vocab for part in ("zy", "xw", "vut"))
    assert "Ġthe" in vocab


def test_formats_and_odd_bytes(tmp_path):
    folder = tmp_path / "mix"
    write_docs(folder / "sub", 25)
    rows = ('{"text": "row one", "id": 1}\n\n{"text": null}\n{"text": "lone \\ud83d end"}\n'
            '{"text": "pair \\ud83d\\ude00"}\n')
    for name, content in {"latin.txt": b"caf\xe9 au lait\r\nzwei\r\n", "rows.jsonl": rows.encode(),
                          "bom.txt": b"\xef\xbb\xbfmarked", "picture.dat": b"\x89PNG\0\0\0",
                          "blank.txt": b" \n\t\n", ".hidden.txt": b"never seen"}.items():
        (folder / name).write_bytes(content)
    table = pa.table({"text": ["from parquet", None, "  ", "日本語"], "n": [1, 2, 3, 4]})
    pq.write_table(table, folder / "t.parquet")
    invalid = pa.array([b"ok \xff bytes"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": invalid}), folder / "u.parquet")
    store = Store(prepare([folder, folder / "rows.jsonl"], 280, out=tmp_path / "s"))
    texts = set(documents(store))
    assert {"caf\ufffd au lait\r\nzwei\r\n", "marked", "row one", "lone \ufffd end", "pair 😀",
            "from parquet", "日本語", "ok \ufffd bytes"} <= texts
    assert len(texts) == 33 and not any("never" in t for t in texts)
    # the jsonl file is read twice: once in the folder, once by name
    dropped = {"duplicates": 3, "blank": 1 + 2 + 2 + 2, "binary_files": 1}
    assert store.meta["dropped"] == dropped
    assert store.meta["invalid_utf8_documents"] == 1 + 1 + 2


@pytest.mark.parametrize("encoding, content", [
    ("cp1251", "Това е книга за деца и за стари хора. "),
    ("latin-1", "Le café de l'été est fermé. ")], ids=["cp1251", "latin-1"])
def test_text_of_another_encoding_is_refused(tmp_path, encoding, content):
    """It would become a run of U+FFFD, three bytes each, and score a wonderful bpb."""
    odd = tmp_path / "odd.txt"
    odd.write_bytes("\n".join(f"{content}{i}" for i in range(4000)).encode(encoding))
    write_docs(tmp_path / "texts", 20)
    for corpus in ([odd], [tmp_path / "texts", odd]):
        with pytest.raises(UserError, match="odd.txt is not UTF-8 .*iconv"):
            prepare(corpus, 280, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_replaced_characters_are_counted_for_the_files_they_are_in(tmp_path):
    """The pinned shard and the training files share notes: one is not blamed for the other."""
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " + b"x" * 1000)
    (tmp_path / "b.txt").write_text("short")
    notes = Counter()
    for name in "ab":
        assert len(list(data.read_documents([(tmp_path / f"{name}.txt", True)], notes))) == 1
    assert notes["replaced"] == 1


def test_endless_runs_of_one_character_are_cut(tmp_path):
    """One run (base64, a genome) would cost the BPE trainer time quadratic in its length."""
    runs = [c * 100_000 for c in " \né#1"]
    whole = "a" * 200_000 + "\n" + "ab c\n" * 200 + "".join(runs)
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8")
    store = Store(prepare([tmp_path / "a.txt"], 290, out=tmp_path / "s"))
    assert "".join(documents(store)) == whole


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(),
                                  pa.large_string()], ids=str)
def test_every_kind_of_string_column_is_read(kind, tmp_path):
    column = pa.array([f"{text(i, 40)}{i}" for i in range(30)] + [None, " "])
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    meta = Store(prepare([tmp_path / "a.parquet"], 270, out=tmp_path / "s")).meta
    assert meta["distinct_documents"] == 30 and meta["dropped"]["blank"] == 2


# ---- tokenizer ----

HARD = ["", "plain text", "Привет, мир", "日本語のテキスト", "👩‍👩‍👧 and 🇫🇷", "a\r\nb\n\n\n  c\t\td",
        "\x00\x01\x7f\x85\u2028", "e\u0301 \u0000", "12345 3.14159", "bad \ufffd\ufffd bytes",
        "\U0010ffff\u200b\ufeff", "don't I'LL we've", " " * 100, "<|bos|>",
        "x<|bos|><|reserved_1|>y", "\x1c\x1d\n\x1cx"]


def wild(rng):
    """A text of characters from all of Unicode."""
    ranges = [(0, 128), (0, 0xD7FF), (0xE000, 0x110000)]
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(200))


def test_round_trip_and_token_bytes(stdlib):
    rng = random.Random(1)
    for content in HARD + [wild(rng) for _ in range(30)]:
        ids = encode(stdlib.tokenizer, content)
        assert stdlib.tokenizer.decode(ids) == content
        assert stdlib.token_bytes[ids].sum() == len(content.encode())
        assert all(i < stdlib.bos for i in ids)
    counts = stdlib.token_bytes
    assert counts.shape == (8192,) and (counts[-4:] == 0).all() and (counts[:-4] > 0).all()
    ids = encode(stdlib.tokenizer, "日")   # decoding its tokens one by one would count 3 bytes each
    assert len(ids) > 1 and counts[ids].sum() == 3
    lone, replaced = (encode(stdlib.tokenizer, f"lone {c}") for c in ("\ud800", "\ufffd"))
    assert lone == replaced


def test_digit_runs_are_at_most_two(stdlib):
    assert max(len(t) for t in stdlib.tokenizer.get_vocab() if t.isdigit()) == 2


def test_literal_bos_in_documents(tmp_path):
    """It is text, in a store and in the same text under the store's tokenizer, the same corpus."""
    write_docs(tmp_path / "t", 40)
    trap = "before <|bos|> after <|reserved_2|>"
    (tmp_path / "t" / "trap.txt").write_text(trap)
    store = Store(prepare([tmp_path / "t"], 290, out=tmp_path / "s"))
    again = open_corpus(str(tmp_path / "t"), str(tmp_path / "s" / "tokenizer.json"))
    assert isinstance(again, Corpus) and again.bos == store.bos and again.vocab_size == 290
    assert again.digest == store.digest and again.label == store.label == f"t-{store.digest[:6]}"
    for name in ("train", "val", "heldout", "token_bytes"):
        assert np.array_equal(getattr(store, name), getattr(again, name))
    tokens = np.concatenate([store.train, store.val, store.heldout])
    assert (tokens == store.bos).sum() == 41 and tokens.max() == store.bos
    assert trap in documents(store) and trap in documents(again)


def test_cutting_long_documents_changes_no_token(stdlib):
    rng, bits = random.Random(2), ["\n", "\r\n", " ", "  ", "a", "'s", "12", "7", "(", ")\n\n", "é",
                                   "\t", "\x1c", "\u2028", "\x85"]
    texts = ["".join(rng.choice(bits) for _ in range(3000)) for _ in range(5)]
    for content in [*texts, Path(data.__file__).read_text()]:
        pieces = list(data.cut_document(content, 50))
        assert "".join(pieces) == content and len(pieces) > 20
        joined = sum((encode(stdlib.tokenizer, p) for p in pieces), [])
        assert joined == encode(stdlib.tokenizer, content)


def test_uint32_above_65536_ids(tmp_path):
    class Fake:
        def encode_batch_fast(self, texts, add_special_tokens):
            return [types.SimpleNamespace(ids=[69_000 + len(t)]) for t in texts]
    parts = [(data.TRAIN, "ab"), (data.VAL, "a"), (data.HELDOUT, "abc")]
    sizes = data.write_tokens(tmp_path, parts, Fake(), np.ones(70_000, dtype=np.int64), 6)
    assert np.fromfile(tmp_path / "train.bin", dtype="<u4").tolist() == [69_996, 69_002]
    assert sizes["train"]["tokens"] == 2


# ---- stores ----

def test_a_store_is_reused_or_refused(small, tmp_path):
    store, _, texts = small
    written = (store.folder / "meta.json").stat().st_mtime_ns
    assert prepare([texts], 300, out=store.folder) == store.folder
    assert (store.folder / "meta.json").stat().st_mtime_ns == written
    other = tmp_path / "texts"
    write_docs(other, 60, size=41)
    for corpus, vocab_size, match in ((["stdlib"], 300, "corpus .*asked for stdlib"),
                                      ([texts], 301, "vocab_size 300, asked for 301"),
                                      ([other], 300, "another text")):
        with pytest.raises(UserError, match=match):
            prepare(corpus, vocab_size, out=store.folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not a store"):
        prepare([texts], 300, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    again = Store(prepare([texts], 300, out=tmp_path / "empty"))
    assert again.digest == store.digest
    for name in ("tokenizer.json", "train.bin", "token_bytes.npy"):
        assert (again.folder / name).read_bytes() == (store.folder / name).read_bytes()


def test_labels_are_short_and_safe_in_names_of_files(stdlib):
    assert stdlib.label == ""
    stdlib.meta["settings"]["corpus"] = ["my books (2)", "more.jsonl", "x" * 50]
    try:
        assert stdlib.label == f"my-books-2-+more+xxxxxx-{stdlib.digest[:6]}"
    finally:
        stdlib.meta["settings"]["corpus"] = "stdlib"
    assert batches.label_of(["..."], "0123456789") == "corpus-012345"
    assert batches.label_of(["книга.txt"], "0123456789") == "книга-012345"


@pytest.mark.parametrize("damage, match", [
    (lambda f: shutil.rmtree(f), "no such store"),
    (lambda f: os.truncate(f / "val.bin", 10), "val.bin was cut"),
    (lambda f: (f / "val.bin").unlink(), "val.bin is missing"),
    (lambda f: flip(f / "token_bytes.npy"), "token_bytes.npy was cut or changed"),
    (lambda f: flip(f / "train.bin"), "train.bin was cut or changed"),
    (lambda f: (f / "meta.json").unlink(), "not a store"),
    (lambda f: (f / "meta.json").write_text("{"), "meta.json"),
    (lambda f: (f / "meta.json").write_text("[]"), "meta.json"),
    (lambda f: edit_meta(f, format="other"), "not a store"),
    (lambda f: edit_meta(f, files={}), "not a store"),
    (lambda f: edit_meta(f, files=None), "not a store"),
    (lambda f: edit_meta(f, digest="0" * 16), "not a store"),
    (lambda f: edit_meta(f, digest=None), "not a store"),
    (lambda f: edit_meta(f, settings={"vocab_size": 301}), "meta.json was changed")])
def test_broken_stores_are_named(small, tmp_path, damage, match):
    folder = shutil.copytree(small[0].folder, tmp_path / "s")
    damage(folder)
    with pytest.raises(UserError, match=match):
        Store(folder)
    if folder.exists():   # nor is one overwritten, or taken for text
        for reopen in (lambda: prepare([small[2]], 300, out=folder), lambda: open_corpus(folder)):
            with pytest.raises(UserError, match=match):
                reopen()


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-8] ^= 1
    path.write_bytes(raw)


def edit_meta(folder, **change):
    """Change the keys of meta.json; None takes one away."""
    meta = {**json.loads((folder / "meta.json").read_text()), **change}
    meta = {key: value for key, value in meta.items() if value is not None}
    (folder / "meta.json").write_text(json.dumps(meta))


def test_two_processes_and_a_killed_one(tmp_path):
    """The command line, twice at once."""
    write_docs(tmp_path / "t", 40)
    left = tmp_path / ".s.abc.tmp"   # by a process that was killed
    left.mkdir()
    (left / "train.bin").write_bytes(b"half")
    command = [sys.executable, str(ROOT / "data.py"), "--corpus", str(tmp_path / "t"),
               "--vocab-size", "290", "--out", str(tmp_path / "s")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    (out, err), other = [p.communicate(timeout=120) for p in both]
    assert [p.returncode for p in both] == [0, 0] and (out, err) == other and err == ""
    assert all(word in out for word in ("train", "heldout", "bytes/token", f"--data {tmp_path}/s"))
    assert Store(tmp_path / "s").vocab_size == 290
    assert sorted(p.name for p in tmp_path.iterdir()) == [".s.abc.tmp", "s", "t"]


def test_losing_the_race_keeps_the_winner(small, tmp_path, monkeypatch):
    store, out = small[0], tmp_path / "s"

    def slow(folder, *rest):
        (folder / "mine").write_text("x")
        shutil.copytree(store.folder, out)
    monkeypatch.setattr(data, "make_store", slow)
    data.build(out, store.meta["settings"], [])
    assert Store(out).digest == store.digest and [p.name for p in tmp_path.iterdir()] == ["s"]


# ---- a store, text, or text under a tokenizer ----

def test_text_becomes_a_store(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, word in (("a", "lamp"), ("b", "stone")):
        Path(folder).mkdir()
        lines = [f"{word} {i} of the old house" for i in range(3000)]
        Path(folder, "input.txt").write_bytes("\n".join(lines).encode()[:40000] + b"\xff")
    store = open_corpus("a/input.txt", vocab_size=280)
    assert store.folder == Path("stores/input-280") and store.label.startswith("input-")
    note = "note: invalid UTF-8 was replaced in 1 documents of a/input.txt\n"
    assert capsys.readouterr().err == note
    assert open_corpus("a/input.txt", vocab_size=280).digest == store.digest
    with pytest.raises(UserError, match="another text"):   # of the same name and size
        open_corpus("b/input.txt", vocab_size=280)


def test_a_stores_own_tokenizer_is_accepted_and_no_other(store, tmp_path):
    own, other = f"{store}/tokenizer.json", tmp_path / "other.json"
    assert open_corpus(store, shutil.copy(own, tmp_path / "copy.json")).vocab_size == 300
    changed = json.loads(Path(own).read_text())
    changed["model"]["merges"].pop()
    other.write_text(json.dumps(changed))
    (tmp_path / "junk.json").write_text('{"a": 1}')
    from tokenizers import Tokenizer, models
    foreign = Tokenizer(models.BPE({c: i for i, c in enumerate("abcd")}, []))
    foreign.save(str(tmp_path / "foreign.json"))
    (tmp_path / "a.txt").write_text("some text")
    for corpus, tokenizer, vocab_size, match in [
            (store, other, None, "not the one"),
            (store, tmp_path / "junk.json", None, "is no tokenizer.json"),
            (store, tmp_path / "foreign.json", None, "was not written by data.py"),
            (store, tmp_path / "missing.json", None, r"is no tokenizer.json \("),
            (store, "", 400, "the store .* has its own"),
            (tmp_path / "a.txt", own, 300, "brings its own"),
            (tmp_path / "nowhere.txt", "", None, "no such file")]:
        with pytest.raises(UserError, match=match):
            open_corpus(str(corpus), str(tokenizer), vocab_size)


def test_the_default_store_is_prepared_where_it_is_missing(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = []

    def fake(corpus, out):
        made.append(corpus)
        shutil.copytree(small[0].folder, out)
    monkeypatch.setattr(data, "prepare", fake)
    digests = {open_corpus(batches.DEFAULT_STORE).digest for _ in range(2)}
    assert made == ["stdlib"] and digests == {small[0].digest}
    assert capsys.readouterr().err.count("preparing the default corpus") == 1


# ---- best-fit packing ----

def stream(seed, n, longest, shortest=0, bos=99):
    """Token ids of n documents, many of them as short as they may be."""
    rng, out = random.Random(seed), []
    for _ in range(n):
        short = [shortest, shortest + 1, shortest + 2]
        length = rng.choice([*short, rng.randrange(shortest, longest)])
        out += [bos] + [rng.randrange(bos) for _ in range(length)]
    return np.array(out, dtype=np.uint16)


class PlainScan:
    """Best fit written plainly: a list in order of arrival, scanned for every choice."""

    def __init__(self, tokens, bos, seq_len, seed, buffer_size):
        pieces, self.size, self.buffer_size = [], seq_len + 1, buffer_size
        for doc in np.split(tokens, np.flatnonzero(tokens == bos))[1:]:
            ids = doc[1:].tolist()
            starts = range(0, max(len(ids), 1), seq_len)
            pieces += [[bos] + ids[i:i + seq_len] for i in starts]
        self.supply, self.buffer = self.supplied(pieces, seed), []

    @staticmethod
    def supplied(pieces, seed):
        for epoch in range(10**9):
            source = np.random.PCG64(derive_seed("bestfit", seed, epoch))
            for i in np.argsort(source.random_raw(len(pieces)), kind="stable"):
                yield pieces[i]

    def row(self):
        row = []
        while len(row) < self.size:
            while len(self.buffer) < self.buffer_size:
                self.buffer.append(next(self.supply))
            space = self.size - len(row)
            fitting = [p for p in self.buffer if len(p) <= space]
            # both give the earliest of equals
            choice = max(fitting, key=len) if fitting else min(self.buffer, key=len)
            del self.buffer[next(i for i, p in enumerate(self.buffer) if p is choice)]
            row += choice[:space]
        return row


@pytest.mark.parametrize("docs, shortest, longest, seq_len, buffer_size", [
    (60, 0, 20, 16, 10), (200, 0, 70, 16, 50), (3, 0, 12, 8, 1000), (40, 0, 5, 33, 7),
    # no piece for a small rest: something is cropped in most rows
    (60, 4, 9, 16, 10), (90, 5, 16, 16, 30)])
def test_best_fit_equals_a_plain_scan(docs, shortest, longest, seq_len, buffer_size):
    tokens = stream(docs, docs, longest, shortest)
    fast = BestFitBatches(tokens, 99, 4, seq_len, 7, buffer_size)
    slow = PlainScan(tokens, 99, seq_len, 7, buffer_size)
    for _ in range(60):
        x, y = fast.next()
        rows = torch.tensor([slow.row() for _ in range(4)])
        assert torch.equal(x, rows[:, :-1]) and torch.equal(y, rows[:, 1:])
        assert x.dtype == torch.int64 and (x[:, 0] == 99).all()
    assert fast.epoch >= 2


def test_no_text_of_long_documents_is_lost():
    tokens = np.array([99, *range(90), *range(10), 99] + [5] * 7, dtype=np.uint16)
    starts, lengths = find_pieces(tokens, 99, 16)
    assert lengths.tolist() == [17] * 6 + [5, 8]
    covered = np.concatenate([np.arange(s, s + n - 1) for s, n in zip(starts, lengths)])
    assert covered.tolist() == np.flatnonzero(tokens != 99).tolist()
    # no bos in front, an empty document
    starts, lengths = find_pieces(np.array([1, 2, 99, 99, 3]), 99, 16)
    assert starts.tolist() == [0, 3, 4] and lengths.tolist() == [3, 1, 2]
    assert find_pieces(np.array([1, 2, 3]), 99, 2)[1].tolist() == [3, 2]


def same_batches(a, b, n):
    """Do the next n batches of both agree in every bit?"""
    pairs = [(a.next(), b.next()) for _ in range(n)]
    return all(torch.equal(p, q) for one, other in pairs for p, q in zip(one, other))


@pytest.mark.parametrize("warm", [1, 9, 40])
def test_best_fit_restores_exactly(warm):
    tokens = stream(4, 150, 40)
    a, b = (BestFitBatches(tokens, 99, 3, 16, 11, 30) for _ in range(2))
    for _ in range(warm):
        a.next()
    b.next()
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    start = a.epoch
    assert same_batches(a, b, 60) and a.epoch > start   # the comparison crosses an epoch's end
    assert b.state_dict() == a.state_dict() and b.epoch == a.epoch


def test_best_fit_restores_when_the_buffer_spans_many_epochs():
    tokens = stream(4, 3, 12)
    a, b = (BestFitBatches(tokens, 99, 2, 8, 0) for _ in range(2))
    a.next()
    b.load_state_dict(a.state_dict())
    assert a.epoch > 300 and same_batches(a, b, 20)


def test_batches_refuse_another_state():
    tokens = stream(4, 150, 40)
    state = BestFitBatches(tokens, 99, 3, 16, 11).state_dict()
    for other in (BestFitBatches(tokens, 99, 3, 16, 12), BestFitBatches(tokens, 99, 3, 15, 11),
                  BestFitBatches(tokens[:500], 99, 3, 16, 11), RandomBatches(tokens, 3, 16, 11)):
        with pytest.raises(UserError, match="saved batch state has"):
            other.load_state_dict(state)


def test_seed_and_grouping():
    def rows(batch_size, seed):
        made = BestFitBatches(stream(4, 150, 40), 99, batch_size, 16, seed)
        return torch.cat([made.next()[0] for _ in range(16 // batch_size)])
    assert torch.equal(rows(16, 1), rows(4, 1)) and not torch.equal(rows(16, 1), rows(16, 2))


def test_random_crops(small):
    tokens = small[0].train
    a, b, same, other = (RandomBatches(tokens, 4, 64, seed) for seed in (3, 3, 3, 4))
    first = a.next()
    for x, y in zip(*first):
        crop = np.append(x.numpy(), y[-1]).astype("<u2")
        assert crop.tobytes() in np.asarray(tokens).tobytes() and torch.equal(x[1:], y[:-1])
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert same_batches(a, b, 3)
    assert torch.equal(first[0], same.next()[0]) and not torch.equal(first[0], other.next()[0])
    tiny = RandomBatches(np.arange(10, dtype=np.uint16), 500, 8, 0)
    # every start and no other occurs
    assert set(tiny.next()[0][:, 0].tolist()) == {0, 1} and tiny.epoch == 400


@pytest.mark.parametrize("make", [lambda t: BestFitBatches(t, 99, 2, 16, 0),
                                  lambda t: RandomBatches(t, 2, 16, 0)], ids=["bestfit", "random"])
def test_a_split_shorter_than_a_row(make):
    with pytest.raises(UserError, match="has 16 tokens, one row needs 17"):
        make(np.full(16, 99, dtype=np.uint16))
    make(np.full(17, 99, dtype=np.uint16)).next()


# ---- evaluation ----

@pytest.mark.parametrize("n, world", [(1000, 1), (1000, 3), (96, 4), (5, 2), (1024, 2)])
def test_every_token_is_a_target_once(n, world):
    tokens, rows = np.random.default_rng(0).integers(0, 99, n).astype(np.uint16), {}
    for rank in range(world):
        mine = []
        for x, y in eval_batches(tokens, 99, 4, 16, rank=rank, world=world):
            assert x.shape == y.shape and x.shape[1] == 16 and (x[:, 0] == 99).all()
            shown = torch.where(y[:, :-1] >= 0, y[:, :-1], 99)
            assert torch.equal(x[:, 1:], shown)
            mine += [row for row in y if row[0] >= 0]   # the last batch may be filled up
        rows.update({rank + k * world: row for k, row in enumerate(mine)})
    targets = torch.cat([rows[k] for k in sorted(rows)])
    assert targets[targets >= 0].tolist() == tokens.tolist() and (targets < 0).sum() == -n % 16


def test_the_paper_counts_320_batches():
    """At a 64th of the row length, on a split a 64th as long."""
    tokens = np.zeros(data.EVAL_TOKENS // 64, dtype=np.uint16)

    def shapes(**kw):
        return [tuple(y.shape) for _, y in eval_batches(tokens, 99, 32, 32, **kw)]
    assert shapes() == [(32, 32)] * 320 and shapes(rank=1, world=8) == [(32, 32)] * 40
    assert shapes(max_tokens=1025) == [(32, 32)] * 2 and shapes(max_tokens=40) == [(2, 32)]


def test_windows_show_every_token_once():
    tokens = np.arange(100, dtype=np.uint16)
    parts = list(fixed_windows(tokens, 3, 7))
    x, y = (torch.cat([p[i].flatten() for p in parts]) for i in (0, 1))
    assert x.tolist() == list(range(98)) and y.tolist() == list(range(1, 99))
    assert parts[0][0].shape == (3, 7) and parts[-1][0].shape == (2, 7)
    assert sum(p[1].numel() for p in fixed_windows(tokens, 3, 7, 50)) == 49
    assert torch.equal(list(fixed_windows(tokens, 3, 7))[1][0], parts[1][0])


class Uniform(torch.nn.Module):
    """Gives every id the same probability."""

    def __init__(self, vocab, seq_len=16):
        super().__init__()
        self.vocab, self.modes = vocab, []
        self.cfg = types.SimpleNamespace(sequence_len=seq_len)

    def forward(self, idx, targets, reduction):
        assert reduction == "none" and not torch.is_grad_enabled()
        self.modes.append(self.training)
        nats = torch.full(idx.shape, math.log(self.vocab))
        return nats.masked_fill(targets < 0, 0.0)


def test_bpb_of_a_uniform_model(small):
    store = small[0]
    content = "Привет 日本 👩‍👩‍👧 \ufffd plain"
    ids, size = encode(store.tokenizer, content), len(content.encode())
    tokens = np.array([store.bos] + ids, dtype=np.uint16)
    model = Uniform(store.vocab_size).train()

    def score(tokens, progress=None, **kw):
        rows = eval_batches(tokens, store.bos, 2, 8, **kw)
        return evaluate_bpb(model, rows, store.token_bytes, progress=progress)
    got, nats = score(tokens), math.log(store.vocab_size)
    assert not any(model.modes) and model.training
    assert got["bytes"] == size and got["tokens"] == len(ids) + 1  # bos is a target without bytes
    assert got["bpb"] == pytest.approx(nats / math.log(2) * len(ids) / size, rel=1e-6)
    assert got["loss"] == pytest.approx(nats, rel=1e-6)
    assert got["nats"] == pytest.approx(nats * len(ids), rel=1e-6)
    model.eval()
    half = [score(tokens, "val", rank=rank, world=2) for rank in range(2)]
    assert sum(h["bytes"] for h in half) == size and not model.training
    assert sum(h["nats"] for h in half) == pytest.approx(got["nats"])
    assert math.isnan(score(tokens[:0])["bpb"])


def test_bpb_weighs_each_target():
    """Unequal losses and byte counts, against the sum written out."""
    nats = torch.tensor([[0.5, 1.25, 2.0, 4.0]])

    class Fixed(torch.nn.Module):
        def forward(self, idx, targets, reduction):
            return nats.masked_fill(targets < 0, 0.0)
    rows = [(torch.zeros(1, 4).long(), torch.tensor([[2, 3, 0, -1]]))]
    got = evaluate_bpb(Fixed(), rows, np.array([1, 2, 3, 0], dtype=np.int64))
    assert got["nats"] == 2.5 and got["bytes"] == 4 and got["tokens"] == 3
    assert got["bpb"] == pytest.approx(2.5 / (4 * math.log(2)), rel=1e-12)
    assert got["loss"] == pytest.approx(3.75 / 3)


def test_both_splits_are_scored(small):
    store, model = small[0], Uniform(300)
    got = evaluate_splits(model, store, 4)
    for name in ("val", "heldout"):
        size = store.meta["splits"][name]
        assert got[f"{name}_tokens"] == size["tokens"] and got[f"{name}_bytes"] == size["bytes"]
        bits = math.log2(300) * (size["tokens"] - size["documents"])
        assert got[f"{name}_bpb"] == pytest.approx(bits / size["bytes"], rel=1e-6)
    assert evaluate_splits(model, store, 4, max_tokens=33)["heldout_tokens"] == 33


# ---- bad input ----

def one_file(name, content):
    """A function that writes this file into a folder and returns the corpus."""
    def make(folder):
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return [path]
    return make


def parquet(*names, cut=False, **columns):
    def make(folder):
        path = folder / "t.parquet"
        table = pa.Table.from_arrays(list(map(pa.array, columns.values())), names or list(columns))
        pq.write_table(table, path)
        if cut:
            os.truncate(path, 200)
        return [path]
    return make


def only_a_binary_file(folder):
    return [one_file("x.bin", b"\0")(folder)[0].parent]


BAD = {
    "missing": (lambda folder: [folder / "none.txt"], "none.txt: no such file"),
    "empty file": (one_file("e.txt", ""), "e.txt is empty"),
    "blank file": (one_file("b.txt", " \n"), "no text .*1 blank"),
    "binary file": (one_file("x.bin", b"\x7fELF\0\0"), "x.bin is a binary file"),
    "folder without text": (only_a_binary_file, "no text .*0 blank documents, 1 binary"),
    "jsonl without text": (one_file("r.jsonl", '{"text": "a"}\n{"body": 1}\n'), r'r.jsonl, line 2: .*"text"'),
    "jsonl list": (one_file("r.jsonl", "[1]\n"), "r.jsonl, line 1"),
    "jsonl number": (one_file("r.jsonl", "7\n"), "r.jsonl, line 1"),
    "jsonl not json": (one_file("r.jsonl", '{"text": "a"}\n\n{"text"'), "r.jsonl, line 3"),
    "jsonl text a number": (one_file("r.jsonl", '{"text": 5}'), 'line 1: "text" is a int'),
    "jsonl binary": (one_file("r.jsonl", b"\0\1\2\xff"), "r.jsonl, line 1"),
    "truncated parquet": (parquet(text=["a" * 100] * 50, cut=True), "t.parquet is not a readable"),
    "parquet that is text": (one_file("t.parquet", "hello"), "t.parquet is not a readable"),
    "parquet without text": (parquet(body=["a"]), 'no column "text" .it has body'),
    "parquet of numbers": (parquet(text=[1, 2]), "holds int64"),
    "two text columns": (parquet("text", "text", a=["a"], b=["b"]), "parquet"),
    "too small": (one_file("s.txt", "abc " * 200), "too small for 8192 ids: it yields .*--vocab_size"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_corpora(name, tmp_path):
    make, message = BAD[name]
    (tmp_path / "in").mkdir()
    corpus = make(tmp_path / "in")
    with pytest.raises(UserError, match=message) as err:
        prepare(corpus, out=tmp_path / "out")
    assert "\n" not in str(err.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]  # nothing was written


def test_the_suggested_vocabulary_works(tmp_path):
    corpus = one_file("s.txt", text(0, 300))(tmp_path)
    with pytest.raises(UserError) as err:
        prepare(corpus, out=tmp_path / "out")
    size = int(str(err.value).split("--vocab_size ")[1].split()[0])
    assert Store(prepare(corpus, size, out=tmp_path / "out")).vocab_size == size > 260
    with pytest.raises(UserError):
        prepare(corpus, size + 1, out=tmp_path / "more")


def test_a_few_characters_are_too_few(tmp_path):
    with pytest.raises(UserError, match="0 tokens are left for val"):
        prepare(one_file("s.txt", "abcdefgh")(tmp_path), 260, out=tmp_path / "out")


def test_out_inside_the_corpus_and_empty_paths(tmp_path):
    folder = tmp_path / "c"
    write_docs(folder, 25)
    for corpus, out in (([folder], folder / "store"), ([""], tmp_path / "s"), ([folder], "")):
        with pytest.raises(UserError, match="inside|empty"):
            prepare(corpus, 270, out=out)
    assert not (folder / "store").exists()


def test_command_line_mistakes(capsys, tmp_path):
    path = one_file("a.txt", "some text")(tmp_path)[0]
    for argv, message in [
            (["--vocab_size", 259], "least is 260"), (["--shards", 3], "--shards belongs to"),
            (["--corpus", "climbmix", "--shards", 6543], "the most is 6542"),
            (["--corpus", path, "--corpus", path], "--corpus is given twice"),
            (["--out", "a", "--out", "b"], "given twice"), (["--vocab", 300], "--vocab"),
            (["--corpus", path, "--out", path], "is a file"),
            (["--corpus", path, "--out", path / "below"], "cannot prepare"),
            (["--corpus"], "expected at least one")]:
        with pytest.raises(SystemExit) as stop:
            data.cli(data.main, [str(a) for a in argv])
        out, err = capsys.readouterr()
        assert stop.value.code == 2 and out == "" and err.count("\n") == 1
        assert err.startswith("error: ") and message in err
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
