"""The climbmix path of data.py against a server on 127.0.0.1 that answers as the hub does."""
import hashlib
import http.server
import io
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.file_download
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data
from common import UserError
from data import Store

ROOT = Path(data.__file__).resolve().parent
WORDS = "the cat sat on a mat while seven dogs ran over hills and rivers towards old towns of stone".split()
PINNED, EVAL_TOKENS = 7, 3000
CHUNK = 4096  # the hub keeps what has arrived in whole chunks, of 10 MB by default
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shard(seed, extra=()):
    rng = random.Random(seed)
    rows = [" ".join(rng.choice(WORDS) for _ in range(40)) + f" {rng.random()}" for _ in range(200)] + list(extra)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), buffer, compression="none")
    return rows, buffer.getvalue()


ROWS, FILES = {}, {}
ROWS[PINNED], FILES[PINNED] = shard(PINNED)
ROWS[0], FILES[0] = shard(0, extra=[ROWS[PINNED][3], ROWS[PINNED][190]])  # training text that repeats evaluation text
ROWS[1], FILES[1] = shard(1, extra=[None, "  ", ROWS[0][0]])


class Hub(http.server.BaseHTTPRequestHandler):
    """HEAD and GET (with Range) of datasets/REPO/resolve/main/shard_NNNNN.parquet, with the hub's headers."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(send=False)

    def do_GET(self):
        self.answer(send=True)

    def answer(self, send):
        self.server.seen.append((self.command, self.path, self.headers.get("Range")))
        m = re.fullmatch(rf"/datasets/{data.CLIMBMIX}/resolve/main/shard_(\d+)\.parquet", self.path)
        body = FILES.get(int(m[1])) if m else None
        if body is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if m else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size, etag = len(body), hashlib.sha256(body).hexdigest()
        if send and self.server.fault == "short":
            body = body[:-100]
        if send and self.server.fault == "changed":
            body = body[:500] + b"\0" + body[501:]
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) if self.headers.get("Range") else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        for name, value in {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "X-Linked-ETag": f'"{etag}"', "X-Linked-Size": size,
                            "Accept-Ranges": "bytes", "Content-Length": len(body) - start}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if send and self.server.fault == "break" and start == 0:
            self.wfile.write(body[:len(body) // 2])
            self.close_connection = True
        elif send:
            self.wfile.write(body[start:])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.fault = [], None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    constants = huggingface_hub.constants
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)  # between the hub's retries
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    yield server
    server.shutdown()
    server.server_close()


def prepare(out, shards=2, vocab_size=300):
    return Store(data.prepare_climbmix(vocab_size, shards, out, eval_tokens=EVAL_TOKENS, pinned=PINNED))


def gets(server):
    """What was fetched, as (shard, Range)."""
    return [(int(path[-13:-8]), rng) for method, path, rng in server.seen if method == "GET" and path.endswith(".parquet")]


def texts(store, tokens):
    return [store.tokenizer.decode(part.tolist()) for part in np.split(np.asarray(tokens), np.flatnonzero(tokens == store.bos))[1:]]


def test_download_and_splits(hub, tmp_path):
    store = prepare(tmp_path / "s")
    assert len(store.val) == len(store.heldout) == EVAL_TOKENS
    val, heldout, train = (texts(store, s) for s in (store.val, store.heldout, store.train))
    rows = ROWS[PINNED]
    assert val[:-1] == rows[:len(val) - 1] and rows[len(val) - 1].startswith(val[-1])      # the first tokens of the shard
    assert heldout[0] == rows[len(val)] and heldout[:-1] == rows[len(val):len(val) + len(heldout) - 1]
    repeated = {rows[3], rows[190]}
    assert train == [r for r in ROWS[0] if r not in repeated] + ROWS[1][:200]
    assert not set(train) & set(rows)
    assert store.meta["dropped"] == {"duplicates": 3, "blank": 2, "binary_files": 0}
    assert store.meta["splits"]["val"]["documents"] == len(val) and store.meta["settings"]["shards"] == 2
    assert gets(hub) == [(PINNED, None), (0, None), (1, None)]
    # the store is there: nothing is asked of the hub again; nor for a second store, whose shards are in the cache
    hub.seen.clear()
    prepare(tmp_path / "s")
    prepare(tmp_path / "other", vocab_size=310)
    assert hub.seen == []
    with pytest.raises(UserError, match="shards 2, asked for 1"):
        prepare(tmp_path / "s", shards=1)


def test_broken_connection_resumes(hub, tmp_path, monkeypatch):
    whole = prepare(tmp_path / "whole", shards=1)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache2"))
    hub.fault = "break"
    hub.seen.clear()
    resumed = prepare(tmp_path / "resumed", shards=1)
    arrived = {index: len(FILES[index]) // 2 // CHUNK * CHUNK for index in (PINNED, 0)}
    assert gets(hub) == [(PINNED, None), (PINNED, f"bytes={arrived[PINNED]}-"), (0, None), (0, f"bytes={arrived[0]}-")]
    assert resumed.digest == whole.digest


@pytest.mark.parametrize("fault", ["short", "changed"])
def test_damaged_shards_are_refused(hub, tmp_path, fault):
    hub.fault = fault
    with pytest.raises(UserError, match="shard_00007.parquet") as err:
        prepare(tmp_path / "s")
    assert "\n" not in str(err.value) and not (tmp_path / "s").exists()
    hub.fault = None                     # and nothing of it is left to be believed later
    assert len(prepare(tmp_path / "s").val) == EVAL_TOKENS


def test_damage_in_the_cache_is_noticed(hub, tmp_path):
    path = data.fetch_shard(1)
    os.truncate(path, 1000)
    with pytest.raises(UserError, match="damaged and was deleted; run again"):
        data.fetch_shard(1)
    assert data.fetch_shard(1).read_bytes() == FILES[1]


def test_a_small_evaluation_shard_is_refused(hub, tmp_path):
    with pytest.raises(UserError, match="are left for heldout"):
        data.prepare_climbmix(300, 1, tmp_path / "s", eval_tokens=15_000, pinned=PINNED)
    assert not (tmp_path / "s").exists()


def test_a_shard_the_hub_does_not_have(hub, tmp_path):
    with pytest.raises(UserError, match="cannot fetch shard_00002.parquet .*EntryNotFound.*--corpus stdlib"):
        prepare(tmp_path / "s", shards=3)


@pytest.mark.parametrize("extra", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_without_network_one_line_names_stdlib(extra, tmp_path):
    env = {**os.environ, "NO_PROXY": "127.0.0.1", "HF_HOME": str(tmp_path / "home"), **extra}
    done = subprocess.run([sys.executable, str(ROOT / "data.py"), "--corpus", "climbmix", "--out", str(tmp_path / "s")],
                          env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: cannot fetch shard_06542.parquet") and "--corpus stdlib" in done.stderr
    assert not (tmp_path / "s").exists()
