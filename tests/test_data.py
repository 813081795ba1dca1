"""data.py: documents and splits, tokenizer, stores, packing, random crops, evaluation windows, bits per byte, bad input."""
import hashlib
import json
import math
import os
import random
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

import data
from common import UserError
from data import BestFitBatches, RandomBatches, Store, encode, eval_batches, evaluate_bpb, prepare

ROOT = Path(data.__file__).resolve().parent
WORDS = "the cat sat on a mat while seven dogs ran over hills and rivers towards old towns of stone".split()


def sentence(rng, n=40):
    return " ".join(rng.choice(WORDS) for _ in range(n)) + f" {rng.random()}\n"


def write_docs(folder, n, seed=0, size=40):
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    texts = [sentence(rng, size) for _ in range(n)]
    for i, text in enumerate(texts):
        (folder / f"{i:03d}.txt").write_text(text)
    return texts


def documents(tokens, bos, tokenizer):
    """The texts of a token stream."""
    return [tokenizer.decode(part.tolist()) for part in np.split(np.asarray(tokens), np.flatnonzero(tokens == bos))[1:]]


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory):
    out = tmp_path_factory.mktemp("stores") / "stdlib"
    return Store(prepare("stdlib", out=out))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """60 documents, of which 5 occur twice."""
    folder = tmp_path_factory.mktemp("small")
    texts = write_docs(folder / "texts", 60)
    for i in range(5):
        (folder / "texts" / f"again{i}.txt").write_text(texts[i])
    return Store(prepare([folder / "texts"], 300, out=folder / "store")), texts


# ---- corpora and splits ----

def test_stdlib_store(stdlib):
    assert stdlib.train.dtype == np.uint16 and stdlib.train.ndim == 1 and stdlib.vocab_size == 8192 and stdlib.bos == 8188
    assert stdlib.tokenizer.get_vocab_size() == 8192 and stdlib.tokenizer.token_to_id("<|bos|>") == 8188
    assert stdlib.train[0] == stdlib.val[0] == stdlib.heldout[0] == 8188
    sizes = stdlib.meta["splits"]
    total = sum(s["bytes"] for s in sizes.values())
    assert total > 5e6 and 0.85 < sizes["train"]["bytes"] / total < 0.95
    assert all((tokens == 8188).sum() == sizes[name]["documents"] for name, tokens in zip(data.SPLITS, (stdlib.train, stdlib.val, stdlib.heldout)))
    # its own source, compared with the file on disk
    found = {t for split in (stdlib.val, stdlib.heldout, stdlib.train[:200_000]) for t in documents(split, 8188, stdlib.tokenizer)}
    files = {p.read_bytes().decode("utf-8", "replace") for p, _ in data.stdlib_files()}
    assert len(found) > 50 and len(found - files) <= 1  # the slice of train ends inside a document


def test_stdlib_documents_are_disjoint(stdlib):
    sets = [set(documents(s, stdlib.bos, stdlib.tokenizer)) for s in (stdlib.val, stdlib.heldout)]
    train = documents(stdlib.train, stdlib.bos, stdlib.tokenizer)
    assert len(train) == len(set(train)) and not sets[0] & sets[1] and not set(train) & (sets[0] | sets[1])


def test_stdlib_files_leave_out_tests_and_packages():
    paths = [p for p, _ in data.stdlib_files()]
    assert not {part for p in paths for part in p.parts} & {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = [p.as_posix() for p in paths]
    assert any(n.endswith("/argparse.py") for n in names) and all(n.endswith(".py") for n in names) and names == sorted(names)


def test_duplicates_dropped_and_splits_disjoint(small):
    store, texts = small
    splits = [documents(s, store.bos, store.tokenizer) for s in (store.train, store.val, store.heldout)]
    together = [t for s in splits for t in s]
    assert Counter(together) == Counter(set(texts)) and all(splits)
    assert store.meta["dropped"]["duplicates"] == 5 and store.meta["distinct_documents"] == 60


def test_split_follows_content_not_order(tmp_path):
    rng = random.Random(5)
    digests = [hashlib.blake2b(sentence(rng).encode(), digest_size=16).digest() for _ in range(4000)]
    codes = data.assign(digests)
    assert codes[::-1] == data.assign(digests[::-1])
    assert abs(codes.count(data.VAL) / 4000 - 0.05) < 0.015 and abs(codes.count(data.HELDOUT) / 4000 - 0.05) < 0.015
    assert all(a == b for a, b in zip(codes, data.assign(digests[:2000])))   # adding documents moves none
    high = [bytes([255, i]) + bytes(14) for i in range(30)]                 # all would be train
    assert Counter(data.assign(high + [None])) == {data.TRAIN: 28, data.VAL: 1, data.HELDOUT: 1, data.DROP: 1}


def test_two_files_are_cut_into_spans(tmp_path):
    a, b = (sentence(random.Random(i), 600) for i in range(2))
    b += "é" * 50 + "日本" * 40
    (tmp_path / "a.txt").write_text(a, encoding="utf-8")
    (tmp_path / "b.md").write_bytes(b.encode())
    store = Store(prepare([tmp_path / "a.txt", tmp_path / "b.md"], 300, out=tmp_path / "s"))
    splits = [documents(s, store.bos, store.tokenizer) for s in (store.train, store.val, store.heldout)]
    assert [len(s) for s in splits] == [2, 1, 1]
    assert "".join(t for s in splits for t in s) == a + b
    total = len(a + b)
    assert [len("".join(s)) for s in splits] == [total * 90 // 100, total * 95 // 100 - total * 90 // 100, total - total * 95 // 100]


def test_tokenizer_sees_train_only(tmp_path):
    """Words that occur in val and heldout alone never become tokens."""
    rng = random.Random(3)
    texts = {}
    for i in range(60):
        text = sentence(rng)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        texts[text] = digest
    codes = data.assign(list(texts.values()))
    folder = tmp_path / "t"
    folder.mkdir()
    n = 0
    for k in range(4000):  # add documents of one strange word until some land outside train
        text = f"zyxwvut zyxwvut zyxwvut zyxwvut {k}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if data.assign([*texts.values(), digest])[-1] in (data.VAL, data.HELDOUT):
            (folder / f"odd{k}.txt").write_text(text)
            n += 1
        if n == 20:
            break
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    assert n == 20 and len(set(codes)) == 3
    store = Store(prepare(str(folder), 320, out=tmp_path / "s"))
    assert not any("zy" in t or "xw" in t or "vut" in t for t in store.tokenizer.get_vocab())
    assert "Ġthe" in store.tokenizer.get_vocab()


def test_formats_and_odd_bytes(tmp_path):
    folder = tmp_path / "mix"
    write_docs(folder / "sub", 25)
    (folder / "latin.txt").write_bytes(b"caf\xe9 au lait\r\nzwei\r\n")
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (folder / "picture.dat").write_bytes(b"\x89PNG\0\0\0")
    (folder / "blank.txt").write_text(" \n\t\n")
    (folder / ".hidden.txt").write_text("never seen")
    (folder / "rows.jsonl").write_text('{"text": "row one", "id": 1}\n\n{"text": null}\n{"text": "lone \\ud83d end"}\n{"text": "pair \\ud83d\\ude00"}\n')
    pq.write_table(pa.table({"text": ["from parquet", None, "  ", "日本語"], "n": [1, 2, 3, 4]}), folder / "t.parquet")
    bad = pa.array([b"ok \xff bytes"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), folder / "u.parquet")
    store = Store(prepare([folder, folder / "rows.jsonl"], 280, out=tmp_path / "s"))
    texts = {t for s in (store.train, store.val, store.heldout) for t in documents(s, store.bos, store.tokenizer)}
    for text in ("caf\ufffd au lait\r\nzwei\r\n", "marked", "row one", "lone \ufffd end", "pair 😀", "from parquet", "日本語", "ok \ufffd bytes"):
        assert text in texts
    assert len(texts) == 33 and not any("never" in t for t in texts)
    # the jsonl file is read twice: once in the folder, once by name
    assert store.meta["dropped"] == {"duplicates": 3, "blank": 1 + 2 + 2 + 2, "binary_files": 1}
    assert store.meta["invalid_utf8_documents"] == 1 + 1 + 2


@pytest.mark.parametrize("encoding, text", [("cp1251", "Това е книга за деца и за стари хора. "), ("latin-1", "Le caf\xe9 de l'\xe9t\xe9 est ferm\xe9. ")])
def test_text_of_another_encoding_is_refused(tmp_path, encoding, text):
    """It would become a run of U+FFFD, three bytes each, and score a wonderful bpb."""
    odd = tmp_path / "odd.txt"
    odd.write_bytes("\n".join(f"{text}{i}" for i in range(4000)).encode(encoding))
    with pytest.raises(UserError, match="odd.txt is not UTF-8 .*iconv"):
        prepare([odd], 280, out=tmp_path / "s")
    write_docs(tmp_path / "texts", 20)
    with pytest.raises(UserError, match="odd.txt is not UTF-8"):
        prepare([tmp_path / "texts", odd], 280, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_replaced_characters_are_counted_for_the_files_they_are_in(tmp_path):
    """The pinned shard and the training files share their notes: what one had replaced is no fault of the other."""
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " + b"x" * 1000)
    (tmp_path / "b.txt").write_text("short")
    notes = Counter()
    for name in "ab":
        assert len(list(data.read_documents([(tmp_path / f"{name}.txt", True)], notes))) == 1
    assert notes["replaced"] == 1


def test_same_corpus_gives_the_same_bytes(small, tmp_path):
    store, texts = small
    again = Store(prepare([store.folder.parent / "texts"], 300, out=tmp_path / "again"))
    assert again.digest == store.digest
    for name in ("tokenizer.json", "train.bin", "token_bytes.npy"):
        assert (again.folder / name).read_bytes() == (store.folder / name).read_bytes()


# ---- tokenizer ----

HARD = ["", "plain text", "Привет, мир", "日本語のテキスト", "👩‍👩‍👧 and 🇫🇷", "a\r\nb\n\n\n  c\t\td", "\x00\x01\x7f\x85\u2028", "e\u0301 \u0000", "12345 3.14159",
        "bad \ufffd\ufffd bytes", "\U0010ffff\u200b\ufeff", "don't I'LL we've", " " * 100, "<|bos|>", "x<|bos|><|reserved_1|>y", "\x1c\x1d\n\x1cx"]


def test_round_trip_and_token_bytes(stdlib):
    rng = random.Random(1)
    wild = ["".join(chr(rng.choice([rng.randrange(128), rng.randrange(0xD7FF), rng.randrange(0xE000, 0x110000)])) for _ in range(200)) for _ in range(30)]
    for text in HARD + wild:
        ids = encode(stdlib.tokenizer, text)
        assert stdlib.tokenizer.decode(ids) == text
        assert stdlib.token_bytes[ids].sum() == len(text.encode())
        assert all(i < stdlib.bos for i in ids)
    assert stdlib.token_bytes.shape == (8192,) and (stdlib.token_bytes[-4:] == 0).all() and (stdlib.token_bytes[:-4] > 0).all()
    ids = encode(stdlib.tokenizer, "日")
    assert len(ids) > 1 and stdlib.token_bytes[ids].sum() == 3  # decoding its tokens one by one would count 3 bytes each
    assert encode(stdlib.tokenizer, "lone \ud800") == encode(stdlib.tokenizer, "lone \ufffd")


def test_digit_runs_are_at_most_two(stdlib):
    assert max(len(t) for t in stdlib.tokenizer.get_vocab() if t.isdigit()) == 2


def test_literal_bos_in_documents(tmp_path):
    write_docs(tmp_path / "t", 40)
    (tmp_path / "t" / "trap.txt").write_text("before <|bos|> after <|reserved_2|>")
    store = Store(prepare([tmp_path / "t"], 290, out=tmp_path / "s"))
    tokens = np.concatenate([store.train, store.val, store.heldout])
    assert (tokens == store.bos).sum() == 41 and tokens.max() == store.bos
    assert "before <|bos|> after <|reserved_2|>" in documents(tokens, store.bos, store.tokenizer)


def test_cutting_long_documents_changes_no_token(stdlib):
    rng = random.Random(2)
    texts = ["".join(rng.choice(["\n", "\r\n", " ", "  ", "a", "'s", "12", "7", "(", ")\n\n", "é", "\t", "\x1c", "\u2028", "\x85"]) for _ in range(3000)) for _ in range(5)]
    texts.append(Path(data.__file__).read_text())
    for text in texts:
        pieces = list(data.cut_document(text, 50))
        assert "".join(pieces) == text and len(pieces) > 20
        assert sum((encode(stdlib.tokenizer, p) for p in pieces), []) == encode(stdlib.tokenizer, text)


def test_uint32_above_65536_ids(tmp_path):
    token_bytes = np.ones(70_000, dtype=np.int64)

    class Fake:
        def encode_batch_fast(self, texts, add_special_tokens):
            return [type("E", (), {"ids": [69_000 + len(t)]}) for t in texts]
    parts = [(data.TRAIN, "ab"), (data.VAL, "a"), (data.HELDOUT, "abc")]
    splits = data.write_tokens(tmp_path, parts, Fake(), token_bytes, 6)
    assert np.fromfile(tmp_path / "train.bin", dtype="<u4").tolist() == [69_996, 69_002] and splits["train"]["tokens"] == 2


# ---- stores ----

def test_a_store_is_reused_or_refused(small, tmp_path):
    store, _ = small
    texts = store.folder.parent / "texts"
    before = (store.folder / "meta.json").stat().st_mtime_ns
    assert prepare([texts], 300, out=store.folder) == store.folder and (store.folder / "meta.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="vocab_size 300, asked for 301"):
        prepare([texts], 301, out=store.folder)
    with pytest.raises(UserError, match="corpus .*asked for stdlib"):
        prepare("stdlib", 300, out=store.folder)
    other = tmp_path / "texts"
    write_docs(other, 60, size=41)
    assert Store(prepare([other], 300, out=tmp_path / "other")).digest != store.digest
    with pytest.raises(UserError, match="another text"):
        prepare([other], 300, out=store.folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not a store"):
        prepare([texts], 300, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert Store(prepare([texts], 300, out=tmp_path / "empty")).digest == store.digest


def copy_store(store, to):
    to.mkdir()
    for p in store.folder.iterdir():
        (to / p.name).write_bytes(p.read_bytes())
    return to


def test_broken_stores_are_named(small, tmp_path):
    store, _ = small
    with pytest.raises(UserError, match="no such store"):
        Store(tmp_path / "nowhere")
    cut = copy_store(store, tmp_path / "cut")
    os.truncate(cut / "val.bin", 10)
    with pytest.raises(UserError, match="val.bin was cut"):
        Store(cut)
    (cut / "val.bin").unlink()
    with pytest.raises(UserError, match="val.bin is missing"):
        prepare([store.folder.parent / "texts"], 300, out=cut)
    changed = copy_store(store, tmp_path / "changed")
    raw = bytearray((changed / "token_bytes.npy").read_bytes())
    raw[-8] ^= 1
    (changed / "token_bytes.npy").write_bytes(raw)
    with pytest.raises(UserError, match="token_bytes.npy was cut or changed"):
        Store(changed)
    for content in ("{", "[]", '{"format": "other"}'):
        (changed / "meta.json").write_text(content)
        with pytest.raises(UserError, match="meta.json"):
            Store(changed)


def test_two_processes_and_a_killed_one(tmp_path):
    write_docs(tmp_path / "t", 40)
    leftover = tmp_path / ".s.abc.tmp"   # what a killed process leaves
    leftover.mkdir()
    (leftover / "train.bin").write_bytes(b"half")
    command = [sys.executable, str(ROOT / "data.py"), "--corpus", str(tmp_path / "t"), "--vocab-size", "290", "--out", str(tmp_path / "s")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outs = [p.communicate(timeout=60) for p in runs]
    assert [p.returncode for p in runs] == [0, 0], outs
    assert outs[0][0] == outs[1][0] and "train" in outs[0][0]
    Store(tmp_path / "s")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".s.abc.tmp", "s", "t"]


def test_losing_the_race_keeps_the_winner(small, tmp_path, monkeypatch):
    store, _ = small
    out, settings = tmp_path / "s", store.meta["settings"]
    monkeypatch.setattr(data, "make_store", lambda folder, *rest: ((folder / "mine").write_text("x"), copy_store(store, out)))
    data.build(out, settings, [])
    assert Store(out).digest == store.digest and sorted(p.name for p in tmp_path.iterdir()) == ["s"]


# ---- best-fit packing ----

def stream(rng, n, longest, shortest=0, bos=99):
    out = []
    for _ in range(n):
        length = rng.choice([shortest, shortest + 1, shortest + 2, rng.randrange(shortest, longest)])
        out += [bos] + [rng.randrange(bos) for _ in range(length)]
    return np.array(out, dtype=np.uint16)


class PlainScan:
    """Best fit written plainly: a list in order of arrival, scanned for every choice."""

    def __init__(self, tokens, bos, batch_size, seq_len, seed, buffer_size):
        pieces, self.size, self.batch_size, self.buffer_size = [], seq_len + 1, batch_size, buffer_size
        for doc in np.split(tokens, np.flatnonzero(tokens == bos))[1:]:
            text = doc[1:].tolist()
            pieces += [[bos] + text[i:i + seq_len] for i in range(0, max(len(text), 1), seq_len)]
        orders = (np.argsort(np.random.PCG64(data.derive_seed("bestfit", seed, e)).random_raw(len(pieces)), kind="stable") for e in range(10**9))
        self.supply, self.buffer = (pieces[i] for order in orders for i in order), []

    def row(self):
        row = []
        while len(row) < self.size:
            while len(self.buffer) < self.buffer_size:
                self.buffer.append(next(self.supply))
            space = self.size - len(row)
            fitting = [p for p in self.buffer if len(p) <= space]
            choice = max(fitting, key=len) if fitting else min(self.buffer, key=len)  # both give the earliest of equals
            del self.buffer[next(i for i, p in enumerate(self.buffer) if p is choice)]
            row += choice[:space]
        return row


@pytest.mark.parametrize("docs, shortest, longest, seq_len, buffer_size", [
    (60, 0, 20, 16, 10), (200, 0, 70, 16, 50), (3, 0, 12, 8, 1000), (40, 0, 5, 33, 7),
    (60, 4, 9, 16, 10), (90, 5, 16, 16, 30)])  # the last two have no piece for a small rest: something is cropped in most rows
def test_best_fit_equals_a_plain_scan(docs, shortest, longest, seq_len, buffer_size):
    tokens = stream(random.Random(docs), docs, longest, shortest)
    fast = BestFitBatches(tokens, 99, 4, seq_len, 7, buffer_size)
    slow = PlainScan(tokens, 99, 4, seq_len, 7, buffer_size)
    for _ in range(60):
        x, y = fast.next()
        rows = torch.tensor([slow.row() for _ in range(4)])
        assert x.dtype == torch.int64 and torch.equal(x, rows[:, :-1]) and torch.equal(y, rows[:, 1:])
        assert (x[:, 0] == 99).all()
    assert fast.epoch >= 2


def test_no_text_of_long_documents_is_lost():
    rng = random.Random(0)
    tokens = np.array([99] + [rng.randrange(99) for _ in range(100)] + [99] + [5] * 7, dtype=np.uint16)
    starts, lengths = data.find_pieces(tokens, 99, 16)
    assert lengths.tolist() == [17] * 6 + [5, 8]
    covered = np.concatenate([np.arange(s, s + n - 1) for s, n in zip(starts, lengths)])
    assert covered.tolist() == [i for i in range(len(tokens)) if tokens[i] != 99]
    starts, lengths = data.find_pieces(np.array([1, 2, 99, 99, 3]), 99, 16)   # no bos in front, an empty document
    assert starts.tolist() == [0, 3, 4] and lengths.tolist() == [3, 1, 2]
    assert data.find_pieces(np.array([1, 2, 3]), 99, 2)[1].tolist() == [3, 2]


@pytest.mark.parametrize("warm", [1, 9, 40])
def test_best_fit_restores_exactly(warm):
    tokens = stream(random.Random(4), 150, 40)
    make = lambda: BestFitBatches(tokens, 99, 3, 16, 11, 30)
    a = make()
    for _ in range(warm):
        a.next()
    state = json.loads(json.dumps(a.state_dict()))
    start = a.epoch
    expected = [a.next() for _ in range(60)]
    assert a.epoch > start  # the comparison crosses the end of an epoch
    b = make()
    b.next()
    b.load_state_dict(state)
    for x, y in expected:
        bx, by = b.next()
        assert torch.equal(x, bx) and torch.equal(y, by)
    assert b.state_dict() == a.state_dict() and b.epoch == a.epoch


def test_best_fit_restores_when_the_buffer_spans_many_epochs():
    tokens = stream(random.Random(4), 3, 12)
    a, b = BestFitBatches(tokens, 99, 2, 8, 0), BestFitBatches(tokens, 99, 2, 8, 0)
    a.next()
    b.load_state_dict(a.state_dict())
    assert a.epoch > 300 and all(torch.equal(a.next()[0], b.next()[0]) for _ in range(20))


def test_batches_refuse_another_state():
    tokens = stream(random.Random(4), 150, 40)
    state = BestFitBatches(tokens, 99, 3, 16, 11).state_dict()
    for other in (BestFitBatches(tokens, 99, 3, 16, 12), BestFitBatches(tokens, 99, 3, 15, 11), BestFitBatches(tokens[:500], 99, 3, 16, 11), RandomBatches(tokens, 3, 16, 11)):
        with pytest.raises(UserError, match="saved batch state has"):
            other.load_state_dict(state)


def test_seed_and_grouping():
    tokens = stream(random.Random(4), 150, 40)
    rows = lambda b, n: torch.cat([b.next()[0] for _ in range(n)])
    whole = rows(BestFitBatches(tokens, 99, 16, 16, 1), 1)
    assert torch.equal(whole, rows(BestFitBatches(tokens, 99, 4, 16, 1), 4))
    assert not torch.equal(whole, rows(BestFitBatches(tokens, 99, 16, 16, 2), 1))


def test_random_crops(stdlib):
    make = lambda seed=3: RandomBatches(stdlib.train, 4, 64, seed)
    a = make()
    first = a.next()
    text = np.asarray(stdlib.train).tobytes()
    for x, y in zip(*first):
        assert np.append(x.numpy(), y[-1]).astype("<u2").tobytes() in text and torch.equal(x[1:], y[:-1])
    state = json.loads(json.dumps(a.state_dict()))
    later = [a.next() for _ in range(3)]
    b = make()
    b.load_state_dict(state)
    assert all(torch.equal(p, q) for pair, other in zip(later, (b.next() for _ in range(3))) for p, q in zip(pair, other))
    assert not torch.equal(first[0], make(4).next()[0]) and torch.equal(first[0], make().next()[0])
    tiny = RandomBatches(np.arange(10, dtype=np.uint16), 500, 8, 0)    # every start and no other occurs
    assert set(tiny.next()[0][:, 0].tolist()) == {0, 1} and tiny.epoch == 400


def test_a_split_shorter_than_a_row():
    for make in (lambda t: BestFitBatches(t, 99, 2, 16, 0), lambda t: RandomBatches(t, 2, 16, 0)):
        with pytest.raises(UserError, match="has 16 tokens, one row needs 17"):
            make(np.full(16, 99, dtype=np.uint16))
        make(np.full(17, 99, dtype=np.uint16)).next()


# ---- evaluation ----

@pytest.mark.parametrize("n, world", [(1000, 1), (1000, 3), (96, 4), (5, 2), (1024, 2)])
def test_every_token_is_a_target_once(n, world):
    tokens = np.random.default_rng(0).integers(0, 99, n).astype(np.uint16)
    rows = {}
    for rank in range(world):
        seen = list(eval_batches(tokens, 99, 4, 16, rank=rank, world=world))
        mine = torch.cat([y for _, y in seen]) if seen else torch.empty(0, 16)
        for k, y in enumerate(mine[(mine[:, 0] >= 0)] if len(mine) else []):
            rows[rank + k * world] = y
        for x, y in seen:
            assert x.shape == y.shape and x.shape[1] == 16 and (x[:, 0] == 99).all()
            real = y[:, :-1] >= 0
            assert torch.equal(x[:, 1:][real], y[:, :-1][real]) and (x[:, 1:][~real] == 99).all()
    stream = torch.cat([rows[k] for k in sorted(rows)])
    assert stream[stream >= 0].tolist() == tokens.tolist() and (stream < 0).sum() == -n % 16


def test_the_paper_counts_320_batches():
    """At a 64th of the row length, on a split a 64th as long."""
    tokens = np.zeros(data.EVAL_TOKENS // 64, dtype=np.uint16)
    count = lambda **kw: [tuple(y.shape) for _, y in eval_batches(tokens, 99, 32, 32, **kw)]
    assert count() == [(32, 32)] * 320 and count(rank=1, world=8) == [(32, 32)] * 40
    assert count(max_tokens=1025) == [(32, 32)] * 2 and count(max_tokens=40) == [(2, 32)]


class Uniform(torch.nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.modes = vocab, []

    def forward(self, idx, targets, reduction):
        assert reduction == "none" and not torch.is_grad_enabled()
        self.modes.append(self.training)
        return torch.nn.functional.cross_entropy(torch.zeros(*idx.shape, self.vocab).transpose(1, 2), targets, ignore_index=-1, reduction="none")


def test_bpb_of_a_uniform_model(small):
    store, _ = small
    text = "Привет 日本 👩‍👩‍👧 \ufffd plain"
    ids = encode(store.tokenizer, text)
    tokens = np.array([store.bos] + ids, dtype=np.uint16)
    model = Uniform(store.vocab_size).train()
    got = evaluate_bpb(model, eval_batches(tokens, store.bos, 2, 8), store.token_bytes)
    assert got["bytes"] == len(text.encode()) and got["tokens"] == len(ids) + 1  # bos is a target without bytes
    assert got["bpb"] == pytest.approx(math.log2(store.vocab_size) * len(ids) / len(text.encode()), rel=1e-6)
    assert got["loss"] == pytest.approx(math.log(store.vocab_size), rel=1e-6)
    assert got["nats"] == pytest.approx(math.log(store.vocab_size) * len(ids), rel=1e-6)
    assert not any(model.modes) and model.training
    half = [evaluate_bpb(model.eval(), eval_batches(tokens, store.bos, 2, 8, rank=r, world=2), store.token_bytes, progress="val") for r in range(2)]
    assert sum(h["bytes"] for h in half) == got["bytes"] and sum(h["nats"] for h in half) == pytest.approx(got["nats"])
    assert not model.training
    assert math.isnan(evaluate_bpb(model, eval_batches(tokens[:0], store.bos, 2, 8), store.token_bytes)["bpb"])


def test_bpb_weighs_each_target(small):
    """Unequal losses and byte counts, against the sum written out."""
    token_bytes = np.array([1, 2, 3, 0], dtype=np.int64)
    nats = torch.tensor([[0.5, 1.25, 2.0, 4.0]])

    class Fixed(torch.nn.Module):
        def forward(self, idx, targets, reduction):
            return nats.masked_fill(targets < 0, 0.0)
    got = evaluate_bpb(Fixed(), [(torch.zeros(1, 4).long(), torch.tensor([[2, 3, 0, -1]]))], token_bytes)
    assert got["nats"] == 2.5 and got["bytes"] == 4 and got["tokens"] == 3
    assert got["bpb"] == pytest.approx(2.5 / (4 * math.log(2)), rel=1e-12) and got["loss"] == pytest.approx(3.75 / 3)


def test_both_splits_are_scored(small):
    store, _ = small
    model = Uniform(store.vocab_size)
    model.cfg = types.SimpleNamespace(sequence_len=16)
    got = data.evaluate_splits(model, store, 4)
    for name in ("val", "heldout"):
        size = store.meta["splits"][name]
        assert got[f"{name}_tokens"] == size["tokens"] and got[f"{name}_bytes"] == size["bytes"]
        texts = size["tokens"] - size["documents"]
        assert got[f"{name}_bpb"] == pytest.approx(math.log2(store.vocab_size) * texts / size["bytes"], rel=1e-6)
    assert data.evaluate_splits(model, store, 4, max_tokens=33)["heldout_tokens"] == 33


# ---- bad input ----

def bad(path, name, content):
    p = path / name
    p.write_bytes(content) if isinstance(content, bytes) else p.write_text(content)
    return [p]


def truncated_parquet(path):
    pq.write_table(pa.table({"text": ["a" * 100] * 50}), path / "cut.parquet")
    os.truncate(path / "cut.parquet", 200)
    return [path / "cut.parquet"]


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path / "t.parquet")
    return [path / "t.parquet"]


BAD = {
    "missing": (lambda p: [p / "none.txt"], "none.txt: no such file"),
    "empty file": (lambda p: bad(p, "e.txt", ""), "e.txt is empty"),
    "blank file": (lambda p: bad(p, "b.txt", " \n"), "no text .*1 blank"),
    "binary file": (lambda p: bad(p, "x.bin", b"\x7fELF\0\0"), "x.bin is a binary file"),
    "folder without text": (lambda p: [bad(p, "x.bin", b"\0")[0].parent], "no text .*0 blank documents, 1 binary"),
    "jsonl without text": (lambda p: bad(p, "r.jsonl", '{"text": "a"}\n{"body": 1}\n'), r'r.jsonl, line 2: .*"text"'),
    "jsonl list": (lambda p: bad(p, "r.jsonl", "[1]\n"), "r.jsonl, line 1"),
    "jsonl number": (lambda p: bad(p, "r.jsonl", "7\n"), "r.jsonl, line 1"),
    "jsonl not json": (lambda p: bad(p, "r.jsonl", '{"text": "a"}\n\n{"text"'), "r.jsonl, line 3"),
    "jsonl text a number": (lambda p: bad(p, "r.jsonl", '{"text": 5}'), "line 1: \"text\" is a int"),
    "jsonl binary": (lambda p: bad(p, "r.jsonl", b"\0\1\2\xff"), "r.jsonl, line 1"),
    "truncated parquet": (truncated_parquet, "cut.parquet is not a readable"),
    "parquet that is text": (lambda p: bad(p, "t.parquet", "hello"), "t.parquet is not a readable"),
    "parquet without text": (lambda p: parquet(p, body=["a"]), 'no column "text" .it has body'),
    "parquet of numbers": (lambda p: parquet(p, text=[1, 2]), "holds int64"),
    "too small for the vocabulary": (lambda p: bad(p, "s.txt", "abc " * 200), "too small for 8192 ids: it yields .*--vocab_size"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_corpora(name, tmp_path):
    make, message = BAD[name]
    folder = tmp_path / "in"
    folder.mkdir()
    corpus = make(folder)
    with pytest.raises(UserError, match=message) as err:
        prepare(corpus, out=tmp_path / "out")
    assert "\n" not in str(err.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]  # nothing was written


def test_the_suggested_vocabulary_works(tmp_path):
    corpus = bad(tmp_path, "s.txt", sentence(random.Random(0), 300))
    with pytest.raises(UserError) as err:
        prepare(corpus, out=tmp_path / "out")
    size = int(str(err.value).split("--vocab_size ")[1].split()[0])
    assert Store(prepare(corpus, size, out=tmp_path / "out")).vocab_size == size > 260
    with pytest.raises(UserError):
        prepare(corpus, size + 1, out=tmp_path / "more")


def test_a_few_characters_are_too_few(tmp_path):
    with pytest.raises(UserError, match="0 tokens are left for val"):
        prepare(bad(tmp_path, "s.txt", "abcdefgh"), 260, out=tmp_path / "out")


def run(*args):
    return subprocess.run([sys.executable, str(ROOT / "data.py"), *map(str, args)], capture_output=True, text=True, timeout=60)


def cli_error(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        data.cli(data.main, [str(a) for a in args])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_command_line_mistakes(capsys, tmp_path):
    text = bad(tmp_path, "a.txt", "some text")[0]
    assert "least is 260" in cli_error(capsys, "--vocab_size", 259)
    assert "--shards belongs to" in cli_error(capsys, "--shards", 3)
    assert "the most is 6542" in cli_error(capsys, "--corpus", "climbmix", "--shards", 6543)
    assert "--corpus is given twice" in cli_error(capsys, "--corpus", text, "--corpus", text)
    assert "given twice" in cli_error(capsys, "--out", "a", "--out", "b")
    assert "--vocab" in cli_error(capsys, "--vocab", 300)
    assert "is a file" in cli_error(capsys, "--corpus", text, "--out", text)
    assert "cannot prepare" in cli_error(capsys, "--corpus", text, "--out", text / "below")
    assert "expected at least one" in cli_error(capsys, "--corpus")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_command_line_end_to_end(tmp_path):
    write_docs(tmp_path / "t", 40)
    done = run("--corpus", tmp_path / "t", "--vocab-size", 290, "--out", tmp_path / "s")
    assert done.returncode == 0 and done.stderr == "" and "heldout" in done.stdout and "bytes/token" in done.stdout
    assert Store(tmp_path / "s").vocab_size == 290


def test_endless_runs_of_one_character_are_cut(tmp_path):
    """Files that are one run (base64, genomes, blank lines) would cost the BPE trainer time quadratic in their length."""
    text = "a" * 200_000 + "\n" + "ab c\n" * 200 + " " * 100_000 + "\n" * 100_000 + "é" * 100_000 + "#" * 100_000 + "1" * 100_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    store = Store(prepare([tmp_path / "a.txt"], 290, out=tmp_path / "s"))
    whole = "".join("".join(documents(np.asarray(getattr(store, s)), store.bos, store.tokenizer)) for s in ("train", "val", "heldout"))
    assert whole == text


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string()], ids=str)
def test_every_kind_of_string_column_is_read(kind, tmp_path):
    texts = [sentence(random.Random(i)) for i in range(30)] + [None, " "]
    column = pa.array(texts)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    meta = Store(prepare([tmp_path / "a.parquet"], 270, out=tmp_path / "s")).meta
    assert meta["distinct_documents"] == 30 and meta["dropped"]["blank"] == 2


def test_two_text_columns_are_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="parquet"):
        prepare([tmp_path / "a.parquet"], 270, out=tmp_path / "s")


@pytest.mark.parametrize("change", [dict(files={}), dict(digest="0" * 16), dict(files=None), dict(digest=None)])
def test_an_edited_meta_is_not_trusted(small, tmp_path, change):
    copy_store(small[0], tmp_path / "s")
    meta = json.loads((tmp_path / "s" / "meta.json").read_text())
    meta = {k: v for k, v in {**meta, **change}.items() if v is not None}
    (tmp_path / "s" / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="not a store"):
        Store(tmp_path / "s")


def test_another_vocabulary_in_meta_and_other_tokens_of_the_same_size(small, tmp_path):
    copy_store(small[0], tmp_path / "s")
    path = tmp_path / "s" / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "settings": {**meta["settings"], "vocab_size": meta["settings"]["vocab_size"] + 1}}))
    with pytest.raises(UserError, match="was changed"):
        Store(tmp_path / "s")
    path.write_text(json.dumps(meta))
    tokens = (tmp_path / "s" / "train.bin").read_bytes()
    (tmp_path / "s" / "train.bin").write_bytes(b"\xff" * len(tokens))
    with pytest.raises(UserError, match="cut or changed"):
        Store(tmp_path / "s")


def test_out_inside_the_corpus_and_empty_paths(tmp_path):
    write_docs(tmp_path / "c", 25)
    for corpus, out in (([tmp_path / "c"], tmp_path / "c" / "store"), ([""], tmp_path / "s"), ([tmp_path / "c"], "")):
        with pytest.raises(UserError, match="inside|empty"):
            prepare(corpus, 270, out=out)
    assert not (tmp_path / "c" / "store").exists()
