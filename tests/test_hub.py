"""The climbmix path of data.py against a server on 127.0.0.1 that answers as the hub does."""
import hashlib
import http.server
import io
import os
import re
import subprocess
import sys
import threading

import huggingface_hub.constants
import huggingface_hub.file_download
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data
from batches import Store
from common import UserError
from helpers import ROOT, text
from test_data import documents

PINNED, EVAL_TOKENS = 7, 3000
CHUNK = 4096  # the hub keeps what has arrived in whole chunks, of 10 MB by default
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shard(seed, *extra):
    """(rows, parquet file) of 200 documents and some more."""
    rows = [f"{text(1000 * seed + i, 40)}{seed} {i}" for i in range(200)] + list(extra)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), buffer, compression="none")
    return rows, buffer.getvalue()


ROWS, FILES = {}, {}
ROWS[PINNED], FILES[PINNED] = shard(PINNED)
# training text that repeats evaluation text, and other training text
ROWS[0], FILES[0] = shard(0, ROWS[PINNED][3], ROWS[PINNED][190])
ROWS[1], FILES[1] = shard(1, None, "  ", ROWS[0][0])


class Hub(http.server.BaseHTTPRequestHandler):
    """HEAD and GET (with Range) of the shards, with the hub's headers."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(send=False)

    def do_GET(self):
        self.answer(send=True)

    def answer(self, send):
        wanted, fault = self.headers.get("Range"), self.server.fault
        self.server.seen.append((self.command, self.path, wanted))
        pattern = rf"/datasets/{data.CLIMBMIX}/resolve/main/shard_(\d+)\.parquet"
        m = re.fullmatch(pattern, self.path)
        body = FILES.get(int(m[1])) if m else None
        if body is None:
            code = "EntryNotFound" if m else "RepoNotFound"
            return self.head(404, {"X-Error-Code": code, "Content-Length": 0})
        size, etag = len(body), f'"{hashlib.sha256(body).hexdigest()}"'
        if send and fault == "short":
            body = body[:-100]
        if send and fault == "changed":
            body = body[:500] + b"\0" + body[501:]
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted else 0
        headers = {"ETag": etag, "X-Linked-ETag": etag, "X-Linked-Size": size,
                   "Accept-Ranges": "bytes", "Content-Length": len(body) - start}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self.head(206 if start else 200, headers)
        if send and fault == "break" and start == 0:
            self.wfile.write(body[:len(body) // 2])
            self.close_connection = True
        elif send:
            self.wfile.write(body[start:])

    def head(self, code, headers):
        self.send_response(code)
        for name, value in {"X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.fault = [], None
    serve = dict(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    threading.Thread(**serve).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, value in {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template,
                        "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False,
                        "DOWNLOAD_CHUNK_SIZE": CHUNK}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    # between the hub's retries
    monkeypatch.setattr(huggingface_hub.file_download.time, "sleep", lambda seconds: None)
    yield server
    server.shutdown()
    server.server_close()


def prepare(out, shards=2, vocab_size=300, eval_tokens=EVAL_TOKENS):
    return Store(data.prepare_climbmix(vocab_size, shards, out, eval_tokens=eval_tokens,
                                       pinned=PINNED))


def gets(server):
    """What was fetched, as (shard, Range)."""
    fetched = [(path, part) for method, path, part in server.seen if method == "GET"]
    return [(int(p[-13:-8]), part) for p, part in fetched if p.endswith(".parquet")]


def test_download_and_splits(hub, tmp_path):
    store = prepare(tmp_path / "s")
    assert len(store.val) == len(store.heldout) == EVAL_TOKENS
    train, val, heldout = (documents(store, name) for name in ("train", "val", "heldout"))
    rows, n = ROWS[PINNED], len(val)
    # the first tokens of the shard, and as many from the next document on
    assert val[:-1] == rows[:n - 1] and rows[n - 1].startswith(val[-1])
    assert heldout[:-1] == rows[n:n + len(heldout) - 1] and heldout[0] == rows[n]
    assert train == ROWS[0][:200] + ROWS[1][:200] and not set(train) & set(rows)
    assert store.meta["dropped"] == {"duplicates": 3, "blank": 2, "binary_files": 0}
    assert store.meta["splits"]["val"]["documents"] == n and store.meta["settings"]["shards"] == 2
    assert gets(hub) == [(PINNED, None), (0, None), (1, None)]
    # the store is there: the hub is not asked again; nor for a second one, whose shards are there
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
    expected = []
    for index in (PINNED, 0):
        arrived = len(FILES[index]) // 2 // CHUNK * CHUNK
        expected += [(index, None), (index, f"bytes={arrived}-")]
    assert gets(hub) == expected and resumed.digest == whole.digest


@pytest.mark.parametrize("fault", ["short", "changed"])
def test_damaged_shards_are_refused(hub, tmp_path, fault):
    hub.fault = fault
    with pytest.raises(UserError, match="shard_00007.parquet") as err:
        prepare(tmp_path / "s")
    assert "\n" not in str(err.value) and not (tmp_path / "s").exists()
    hub.fault = None                     # and nothing of it is left to be believed later
    assert len(prepare(tmp_path / "s").val) == EVAL_TOKENS


def test_damage_in_the_cache_is_noticed(hub):
    os.truncate(data.fetch_shard(1), 1000)
    with pytest.raises(UserError, match="damaged and was deleted; run again"):
        data.fetch_shard(1)
    assert data.fetch_shard(1).read_bytes() == FILES[1]


@pytest.mark.parametrize("kw, match", [
    (dict(shards=1, eval_tokens=15_000), "are left for heldout"),
    (dict(shards=3), "cannot fetch shard_00002.parquet .*EntryNotFound.*--corpus stdlib")],
    ids=["a small evaluation shard", "a shard the hub does not have"])
def test_shards_that_will_not_do(hub, tmp_path, kw, match):
    with pytest.raises(UserError, match=match):
        prepare(tmp_path / "s", **kw)
    assert not (tmp_path / "s").exists()


def test_without_network_one_line_names_stdlib(tmp_path):
    command = [sys.executable, str(ROOT / "data.py"), "--corpus", "climbmix", "--out", "s"]
    env = {**os.environ, "NO_PROXY": "127.0.0.1", "HF_HOME": str(tmp_path / "home")}
    pipes = dict(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both = [subprocess.Popen(command, env={**env, **extra}, **pipes)
            for extra in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"})]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 2 and out == "" and err.count("\n") == 1
        assert err.startswith("error: cannot fetch shard_06542.parquet")
        assert "--corpus stdlib" in err
    assert not (tmp_path / "s").exists()
