"""From a corpus to batches: documents, splits, BPE tokenizer, token stores, packing, bits per byte.

    python data.py                                  the standard library of this Python, about 12 MB, no download
    python data.py --corpus climbmix --shards 10    the corpus of the OE paper, from the Hugging Face hub
    python data.py --corpus my_texts/ more.jsonl    your own text, jsonl (key "text"), parquet (column "text"), folders

A store is a folder that appears whole or not at all:

    train.bin val.bin heldout.bin   token ids, little-endian uint16 (uint32 above 65,536 ids), bos before each document
    tokenizer.json                  byte-level BPE trained on train only; the last four ids are special, bos first of them
    token_bytes.npy                 true bytes of every id, 0 for the special ones: what bits per byte divides by
    meta.json                       settings, documents, tokens and bytes of each split, what was dropped, digests, versions

Splits: exact duplicates are dropped first, then a hash of each document's bytes sends it to train, val or heldout (90/5/5 %).
Under 20 documents the text is cut into contiguous 90/5/5 % spans. climbmix evaluates on its pinned last shard.
A process killed on the way leaves a hidden .NAME.*.tmp folder beside the store: harmless, never read, delete it when you like.
"""
import codecs
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
import sysconfig
import uuid
from bisect import bisect_right, insort
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from tqdm import tqdm

from common import UserError, add_flags, all_sum, check_bounds, cli, derive_seed, flag, make_parser, write_json

BOS = "<|bos|>"
SPECIALS = (BOS, "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>")
STORE_FORMAT = "nanoarms-store-1"
SPLITS = ("train", "val", "heldout")
STORE_FILES = {*(f"{s}.bin" for s in SPLITS), "token_bytes.npy", "tokenizer.json"}
HASHED_AT_START = 64 << 20   # bytes
TRAIN, VAL, HELDOUT, DROP = range(4)

MIN_HASHED = 20                  # fewer documents than this are cut into spans instead
TOKENIZER_CHARS = 1_000_000_000  # the tokenizer is trained on at most this much of train
CHUNK_CHARS = 1 << 18            # long documents are encoded in pieces of about this size
BATCH_CHARS = 1 << 22            # characters handed to the encoder at a time
MOST_REPLACED = 0.01                # share of characters that may be invalid UTF-8
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # of the standard library

CLIMBMIX = "karpathy/climbmix-400b-shuffle"
PINNED_SHARD = 6542
EVAL_TOKENS = 20_971_520         # 320 batches of 32 x 2048 targets, the OE paper's evaluation
# The OE paper trains on 499,646,464 tokens; a shard is about 250 MB of text, some 60 million tokens, of which packing drops 3 %.
DEFAULT_SHARDS = 10

# GPT-4's pre-split with digit runs of at most two, and other runs of at most 256: BPE takes time quadratic in the length of a run,
# and some files are one run. No alternative reaches over a newline into a character that is not white space: cut_document()
# relies on it.
PRE_SPLIT = "|".join([
    r"'(?i:s|d|m|t|ll|ve|re)",                        # English contractions
    r"[^\r\n\p{L}\p{N}]?\p{L}{1,256}",               # a word with the character before it
    r"\p{N}{1,2}",
    r" ?[^\s\p{L}\p{N}]{1,256}[\r\n]{0,256}",        # punctuation
    r"\s{0,256}[\r\n]{1,256}", r"\s{1,256}(?!\S)", r"\s{1,256}",
])
SAFE_CUT = re.compile(r"\n(?=\S)")


# ---- documents ----

def decode(raw, notes):
    """bytes -> str: invalid UTF-8 becomes U+FFFD and is counted, a byte order mark goes, line ends stay as they are."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        notes["invalid_utf8"] += 1
        notes["replaced"] += text.count("\ufffd") - raw.count("\ufffd".encode())
        return text


def mend(text):
    """str -> str that UTF-8 can hold: lone surrogates, which JSON escapes and command lines may carry, become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_text(path, named, notes):
    """The whole file as one document; a binary file is refused when the user named it, else counted."""
    raw = path.read_bytes()
    if b"\0" not in raw[:8192]:
        yield decode(raw, notes)
    elif named:
        raise UserError(f"{path} is a binary file (or UTF-16); name UTF-8 text, .jsonl or .parquet files")
    else:
        notes["binary_files"] += 1


def read_jsonl(path, named, notes):
    """The "text" of every line."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                text = json.loads(decode(line, notes))["text"] if line.strip() else None
            except (ValueError, TypeError, KeyError, IndexError, RecursionError):
                raise UserError(f'{path}, line {number}: every line must be a JSON object with a key "text"') from None
            if text is not None and not isinstance(text, str):
                raise UserError(f'{path}, line {number}: "text" is a {type(text).__name__}; it must be a string')
            mended = text and mend(text)
            notes["invalid_utf8"] += mended != text
            yield mended


def read_parquet(path, named, notes):
    """The rows of the column "text"."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    try:
        with pq.ParquetFile(path) as table:
            if "text" not in table.schema_arrow.names:
                raise UserError(f'{path} has no column "text" (it has {", ".join(table.schema_arrow.names)})')
            kind = table.schema_arrow.field("text").type
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)):
                raise UserError(f'{path}: column "text" holds {kind}; it must hold strings')
            for batch in table.iter_batches(batch_size=4096, columns=["text"]):
                # Through bytes: a file may hold invalid UTF-8, on which a direct conversion would stop.
                column = batch.column(0)
                column = column.cast(plain) if plain != kind else column
                column = column.cast(pa.binary_view()).cast(pa.large_binary()) if pa.types.is_string_view(plain) else column.cast(pa.large_binary())
                for raw in column.to_pylist():
                    yield None if raw is None else decode(raw, notes)
    except (pa.ArrowException, OSError, KeyError):  # KeyError: two columns named text
        raise UserError(f"{path} is not a readable parquet file (truncated?); replace it or leave it out") from None


READERS = {".jsonl": read_jsonl, ".parquet": read_parquet}  # every other name is read as text


def read_documents(files, notes):
    """Yield the documents of [(path, named by the user?), ...] as str; blank ones are skipped and counted in notes.

    UserError at the end when more than 1 % of the characters had to be replaced: text of another encoding would train, and would
    score low, since a letter that became U+FFFD counts three bytes and is easily guessed.
    """
    chars, first, before = 0, None, notes["replaced"]   # before: of other files that share these notes
    for path, named in files:
        if named and not path.stat().st_size:
            raise UserError(f"{path} is empty; name a file with text in it")
        for text in READERS.get(path.suffix.lower(), read_text)(path, named, notes):
            chars += len(text or "")
            first = first or (path if notes["replaced"] > before else None)
            if text is None or not text.strip():
                notes["blank"] += 1
            else:
                yield text
    if (replaced := notes["replaced"] - before) > MOST_REPLACED * chars:
        raise UserError(f"{first} is not UTF-8 ({replaced / chars:.0%} of the corpus cannot be read as such); "
                        "convert it, with iconv -f WINDOWS-1251 -t UTF-8 or the like")


def walk(folder, skip=frozenset()):
    """Every file under the folder that is not hidden nor in a folder of a skipped name, sorted by its path relative to it."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [d for d in folders if not d.startswith(".") and d not in skip]
        found += [Path(root, n) for n in names if not n.startswith(".")]
    return sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(folder).as_posix())


def stdlib_files():
    """[(path, False), ...]: the .py files of the running Python, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [(p, False) for p in walk(root, SKIPPED_FOLDERS) if p.suffix == ".py"]
    if not files:
        raise UserError(f"this Python keeps no .py files under {root}; use --corpus PATH")
    return files


def path_files(paths):
    """([(path, named), ...], fingerprint): the fingerprint changes when a file is added, removed, renamed or edited."""
    files, listing = [], []
    for path in map(Path, paths):
        if not path.is_dir() and not path.is_file():
            raise UserError(f"{path}: no such file or folder; a corpus is stdlib, climbmix or paths of texts")
        inside = walk(path) if path.is_dir() else [path]
        files += [(p, p == path) for p in inside]
        listing += [(os.path.relpath(p, path), sha256_of(p)) for p in inside]
    return files, hashlib.sha256(json.dumps([[Path(p).name for p in paths], listing]).encode()).hexdigest()[:16]


def sha256_of(path):
    """Hex digest of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            sha.update(block)
    return sha.hexdigest()


# ---- climbmix from the hub ----

def check_shard(path, size):
    """UserError, and the file gone from the cache, unless it has the announced size and the sha256 that the hub names it by."""
    blob = Path(path).resolve()
    named_by_sha = re.fullmatch("[0-9a-f]{64}", blob.name)
    if size not in (None, blob.stat().st_size) or (named_by_sha and sha256_of(blob) != blob.name):
        blob.unlink()
        raise UserError(f"{Path(path).name} arrived damaged and was deleted; run again to fetch it anew")


def fetch_shard(index, repo=CLIMBMIX):
    """Path of one parquet shard in the hub's cache, downloaded if it is not there.

    huggingface_hub resumes a broken connection and obeys HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE; shards that are complete are
    never fetched twice. UserError when the hub cannot be reached or what came is damaged.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    name, size = f"shard_{index:05d}.parquet", None
    try:
        try:
            path = hub.hf_hub_download(repo, name, repo_type="dataset", local_files_only=True)
        except LocalEntryNotFoundError:
            # Asked for here because it gives up at once where the download would first retry for half a minute.
            size = hub.get_hf_file_metadata(hub.hf_hub_url(repo, name, repo_type="dataset")).size
            path = hub.hf_hub_download(repo, name, repo_type="dataset")
    except Exception as err:  # the hub raises a dozen types from three libraries
        reason = f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
        raise UserError(f"cannot fetch {name} of {repo} ({reason}); run again to continue, or use --corpus stdlib, which needs no network") from None
    check_shard(path, size)
    return Path(path)


# ---- splits ----

def survey(files, seen, notes, label="reading"):
    """16-byte digest of every document, None where it repeats one in `seen` (which grows); counts characters in notes."""
    digests = []
    for text in tqdm(read_documents(files, notes), desc=label, unit="doc", disable=None):
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        repeated = digest in seen
        notes["duplicates"] += repeated
        digests.append(None if repeated else digest)
        seen.add(digest)
        notes["chars"] += len(text)
    return digests


def assign(digests):
    """Split of every document from its digest alone, so that neither order nor file names matter; None -> DROP."""
    def split(digest):
        share = int.from_bytes(digest[:8], "big") / 2**64
        return VAL if share < 0.05 else HELDOUT if share < 0.10 else TRAIN
    kept = sorted(d for d in digests if d)
    codes = {d: split(d) for d in kept}
    if len(set(codes.values())) < 3:  # few documents and bad luck: the lowest 5 % of the digests, at least one, and the next
        n = max(1, len(kept) // 20)
        codes = {d: VAL if i < n else HELDOUT if i < 2 * n else TRAIN for i, d in enumerate(kept)}
    return [codes[d] if d else DROP for d in digests]


def planned(files, plan):
    """Yield (split, text) of the documents that the plan keeps."""
    try:
        for split, text in zip(plan, read_documents(files, Counter()), strict=True):
            if split != DROP:
                yield split, text
    except ValueError:
        raise UserError("the corpus changed while it was being read; run again") from None


def spans(texts):
    """[(split, text), ...]: contiguous 90/5/5 % of the characters; a document that crosses a cut becomes two."""
    total, parts, before = sum(map(len, texts)), [], 0
    cuts = [0, total * 90 // 100, total * 95 // 100, total]
    for text in texts:
        for split in (TRAIN, VAL, HELDOUT):
            part = text[max(cuts[split] - before, 0):max(cuts[split + 1] - before, 0)]
            if part:
                parts.append((split, part))
        before += len(text)
    return parts


def split_documents(files, pinned, notes):
    """A function that yields (split, text) of all kept documents, the same ones at every call. Pinned files are all VAL."""
    seen = set()
    first = survey(pinned, seen, notes, "reading the evaluation shard") if pinned else []
    digests = survey(files, seen, notes)
    notes["distinct"] = len(seen)
    if not seen:
        raise UserError(f"no text in the corpus ({notes['blank']} blank documents, {notes['binary_files']} binary files); name one that has some")
    if pinned:
        plan = [VAL if d else DROP for d in first] + [TRAIN if d else DROP for d in digests]
    elif len(seen) < MIN_HASHED:
        keep = [TRAIN if d else DROP for d in digests]
        parts = spans([text for _, text in planned(files, keep)])
        return lambda: iter(parts)
    else:
        plan = assign(digests)
    return lambda: planned([*pinned, *files], plan)


# ---- tokenizer ----

def cut_document(text, size=CHUNK_CHARS):
    """Pieces of about `size` characters whose token ids, joined, are those of the whole text."""
    start = 0
    while m := SAFE_CUT.search(text, start + size):
        yield text[start:m.end()]
        start = m.end()
    yield text[start:]


def train_tokenizer(texts, vocab_size):
    """Byte-level BPE over an iterable of str with vocab_size ids, the last four special. UserError when the text is too small."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRE_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    n_text = vocab_size - len(SPECIALS)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=n_text, min_frequency=2, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[], show_progress=sys.stderr.isatty()))
    if (got := tokenizer.get_vocab_size()) < n_text:
        raise UserError(f"the corpus is too small for {vocab_size} ids: it yields {got + len(SPECIALS)}; pass --vocab_size {got + len(SPECIALS)} or less")
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer, text):
    """str -> list of int; never a special id, whatever the text says."""
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(mend(text), add_special_tokens=False).ids


def count_token_bytes(tokenizer):
    """int64 [vocab_size]: bytes that each id stands for, 0 for special ids.

    A byte-level token is spelled with one character per byte, so its length is its byte count even inside a character.
    """
    n = tokenizer.get_vocab_size()
    return np.array([len(tokenizer.id_to_token(i)) if i < n - len(SPECIALS) else 0 for i in range(n)], dtype=np.int64)


# ---- stores ----

def batched(parts, tokenizer, bar):
    """Yield (split, starts a document?, ids int64) of (split, text) pairs, encoded in parallel, one batch in memory at a time."""
    def encode_all(batch):
        found = tokenizer.encode_batch_fast([piece for _, _, piece in batch], add_special_tokens=False)
        yield from ((split, first, np.array(e.ids, dtype=np.int64)) for (split, first, _), e in zip(batch, found))
        bar.update(sum(len(piece) for _, _, piece in batch))

    batch, size = [], 0
    for split, text in parts:
        for i, piece in enumerate(cut_document(text)):
            batch.append((split, i == 0, piece))
            size += len(piece)
            if size >= BATCH_CHARS:
                yield from encode_all(batch)
                batch, size = [], 0
    yield from encode_all(batch)


def write_tokens(folder, parts, tokenizer, token_bytes, total_chars, limit=None):
    """Write the three .bin files; returns {split name: {"documents", "tokens", "bytes"}}.

    limit: val takes exactly this many tokens of what is marked VAL, heldout as many from the next document on.
    """
    dtype, bos = np.dtype("<u2" if len(token_bytes) <= 65536 else "<u4"), np.array([len(token_bytes) - len(SPECIALS)])
    stats = [{"documents": 0, "tokens": 0, "bytes": 0} for _ in SPLITS]
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in SPLITS]
        bar = stack.enter_context(tqdm(total=total_chars, desc="encoding", unit="char", unit_scale=True, disable=None))
        to = None
        for split, first, ids in batched(parts, tokenizer, bar):
            if first:
                to = HELDOUT if limit and split == VAL and stats[VAL]["tokens"] == limit else split
                ids = np.concatenate([bos, ids])
            if limit and split == VAL:
                ids = ids[:limit - stats[to]["tokens"]]
            files[to].write(ids.astype(dtype).tobytes())
            stats[to]["documents"] += first and len(ids) > 0
            stats[to]["tokens"] += len(ids)
            stats[to]["bytes"] += int(token_bytes[ids].sum())
    return dict(zip(SPLITS, stats))


def digest_of(files):
    """16 hex digits that stand for corpus and tokenizer, from the "files" of meta.json."""
    return hashlib.sha256("".join(files[name]["sha256"] for name in sorted(files)).encode()).hexdigest()[:16]


class Store:
    """A prepared folder: .train .val .heldout (memory-mapped 1-D uint16, or uint32), .token_bytes (int64 [vocab_size]),
    .tokenizer, .meta, .vocab_size, .bos, .digest (str that stands for corpus and tokenizer). UserError when it is not whole."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.meta = self._read_meta()
        for name, known in self.meta["files"].items():
            path = self.folder / name
            # Large token files would take long to hash at every start; their size shows a broken copy.
            whole = path.is_file() and path.stat().st_size == known["bytes"]
            if not whole or (known["bytes"] <= HASHED_AT_START and sha256_of(path) != known["sha256"]):
                state = "is missing" if not path.is_file() else "was cut or changed"
                raise UserError(f"{path} {state}; delete {self.folder} and prepare it again with data.py")
        self.vocab_size, self.digest = self.meta["settings"]["vocab_size"], self.meta["digest"]
        self.bos = self.vocab_size - len(SPECIALS)
        self.token_bytes = np.load(self.folder / "token_bytes.npy", allow_pickle=False)
        if len(self.token_bytes) != self.vocab_size:
            raise UserError(f"{self.folder / 'meta.json'} was changed: it says {self.vocab_size} ids, the store has {len(self.token_bytes)};"
                            " prepare it again with data.py")
        dtype = "<u2" if self.vocab_size <= 65536 else "<u4"
        self.train, self.val, self.heldout = (np.memmap(self.folder / f"{s}.bin", dtype=dtype, mode="r") for s in SPLITS)

    def _read_meta(self):
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such store; prepare one with python data.py --out {self.folder}")
        try:
            meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            if meta["format"] == STORE_FORMAT and set(meta["files"]) == STORE_FILES and meta["digest"] == digest_of(meta["files"]):
                return meta
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            pass
        raise UserError(f"{self.folder} is not a store of this project (meta.json is missing, broken or foreign); name another folder")

    @functools.cached_property
    def tokenizer(self):
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        # The file does not keep it: without it the text "<|bos|>" inside a document would become the special id.
        tokenizer.encode_special_tokens = True
        return tokenizer


def already_there(out, settings):
    """True when `out` is a whole store with these settings, False when nothing is there, else UserError."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not out.is_dir():
        raise UserError(f"{out} is a file; name a folder with --out")
    there = Store(out).meta["settings"]
    differs = [k for k in {**there, **settings} if there.get(k) != settings.get(k)]
    if differs:
        k = differs[0]
        if differs == ["fingerprint"]:
            raise UserError(f"{out} holds the store of another text (files were edited, or others have their names); delete it, or name another with data.py --out")
        raise UserError(f"{out} holds another store ({k} {there.get(k)}, asked for {settings.get(k)}); delete it, or name another with data.py --out")
    return True


def make_store(folder, settings, files, pinned, limit):
    """Everything from documents to meta.json, inside a fresh folder."""
    import tokenizers
    notes, vocab_size = Counter(), settings["vocab_size"]
    parts = split_documents(files, pinned, notes)

    def train_text(room=settings["tokenizer_chars"]):
        for split, text in parts():
            for piece in cut_document(text) if split == TRAIN else ():
                yield piece
                if (room := room - len(piece)) <= 0:
                    return
    tokenizer = train_tokenizer(tqdm(train_text(), desc="tokenizer", unit="piece", disable=None), vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    token_bytes = count_token_bytes(tokenizer)
    np.save(folder / "token_bytes.npy", token_bytes, allow_pickle=False)
    splits = write_tokens(folder, parts(), tokenizer, token_bytes, notes["chars"], limit)
    for name, s in splits.items():
        if s["tokens"] < (limit if limit and name != "train" else 1):
            raise UserError(f"the corpus is too small: {s['tokens']} tokens are left for {name}; add text")
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in sorted(folder.iterdir())}
    write_json(folder / "meta.json", {
        "format": STORE_FORMAT, "settings": settings, "splits": splits, "files": files,
        "digest": digest_of(files),
        "dropped": {k: notes[k] for k in ("duplicates", "blank", "binary_files")},
        "distinct_documents": notes["distinct"], "invalid_utf8_documents": notes["invalid_utf8"],
        "versions": {"python": platform.python_version(), "tokenizers": tokenizers.__version__, "numpy": np.__version__}})


def build(out, settings, files, pinned=(), limit=None):
    """make_store in a temporary folder beside `out`, then rename. Of two processes at once the first one's store stays."""
    real = Path(os.path.realpath(out))
    tmp = real.parent / f".{real.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        tmp.mkdir()
        make_store(tmp, settings, files, list(pinned), limit)
        for path in tmp.iterdir():
            with open(path, "rb+") as f:
                os.fsync(f.fileno())
        try:
            os.rename(tmp, real)
        except OSError:
            if not already_there(out, settings):
                raise
    except OSError as err:
        raise UserError(f"cannot prepare {out}: {err}") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return out


def prepare_climbmix(vocab_size, shards, out, tokenizer_chars=TOKENIZER_CHARS, eval_tokens=EVAL_TOKENS, pinned=PINNED_SHARD):
    """prepare() for climbmix. The pinned shard is read first, so that a training document that repeats one of its is dropped."""
    settings = {"corpus": "climbmix", "vocab_size": vocab_size, "tokenizer_chars": tokenizer_chars, "shards": shards, "eval_tokens": eval_tokens}
    if already_there(out, settings):
        return out
    last, *train = [(fetch_shard(i), True) for i in tqdm([pinned, *range(shards)], desc="shards", disable=None)]
    return build(out, settings, train, [last], eval_tokens)


def prepare(corpus="stdlib", vocab_size=8192, shards=None, out=None, tokenizer_chars=TOKENIZER_CHARS):
    """Prepare a corpus and return its store's folder (Path); at once when the same store is already there.

    corpus: "stdlib", "climbmix", a path or a list of paths. shards: training shards of climbmix (default 10).
    out: the folder, by default stores/<name>-<vocab_size>. tokenizer_chars: train text that the tokenizer sees at most.
    UserError for what cannot be read, is too small, or when another store lies at `out`.
    """
    paths = [str(corpus)] if isinstance(corpus, (str, Path)) else [str(p) for p in corpus]
    if "" in paths or out is not None and not str(out):
        raise UserError("an empty path would mean the current folder; write . for it")
    name = paths[0] if len(paths) == 1 and paths[0] in ("stdlib", "climbmix") else None
    if vocab_size < 256 + len(SPECIALS):
        raise UserError(f"--vocab_size {vocab_size} is too small; the least is {256 + len(SPECIALS)} (256 bytes and {len(SPECIALS)} special ids)")
    if shards is not None and name != "climbmix":
        raise UserError("--shards belongs to --corpus climbmix; leave it out")
    shards = DEFAULT_SHARDS if shards is None else shards
    if not 1 <= shards <= PINNED_SHARD:
        raise UserError(f"--shards {shards}: climbmix has 1 to {PINNED_SHARD} training shards")
    settings = {"corpus": name or [Path(p).resolve().name for p in paths], "vocab_size": vocab_size, "tokenizer_chars": tokenizer_chars}
    if name is None:
        files, settings["fingerprint"] = path_files(paths)
        name = Path(paths[0]).resolve().stem + (f"+{len(paths) - 1}" if len(paths) > 1 else "")
    out = Path(out) if out is not None else Path("stores") / f"{name}-{vocab_size}"
    inside = [p for p in paths if isinstance(settings["corpus"], list) and Path(p).is_dir() and out.resolve().is_relative_to(Path(p).resolve())]
    if inside:
        raise UserError(f"{out} lies inside the corpus {inside[0]} and would become part of it; name another with data.py --out")
    if settings["corpus"] == "climbmix":
        return prepare_climbmix(vocab_size, shards, out, tokenizer_chars)
    if already_there(out, settings):
        return out
    return build(out, settings, stdlib_files() if settings["corpus"] == "stdlib" else files)


DEFAULT_STORE = "stores/stdlib-8192"


def open_store(folder):
    """Store(folder); the default one is prepared first where it is missing."""
    if str(folder) == DEFAULT_STORE and not Path(folder).exists():
        print("preparing the default corpus (Python's standard library), once", file=sys.stderr)
        prepare("stdlib", out=folder)
    return Store(folder)


# ---- batches ----

def find_pieces(tokens, bos, seq_len):
    """(start int64 [P], length int32 [P]) of every piece of a token stream: `length - 1` tokens from `start`, behind a bos.

    A document of more than seq_len tokens is cut into pieces of seq_len, so that none of its text is lost: a corpus of long
    files would otherwise only ever show how files begin.
    """
    step = 1 << 24
    at = np.concatenate([np.flatnonzero(tokens[i:i + step] == bos) + i for i in range(0, len(tokens), step)])
    if not len(at) or at[0] > 0:  # a stream that opens in the middle of a document
        at = np.insert(at, 0, -1)
    starts, ends = at + 1, np.append(at[1:], len(tokens))
    n = np.maximum(1, -(-(ends - starts) // seq_len))
    within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    start = np.repeat(starts, n) + within * seq_len
    return start, (np.minimum(seq_len, np.repeat(ends, n) - start) + 1).astype(np.int32)


def to_batch(rows):
    """int64 [B, T+1] -> inputs and targets, LongTensors [B, T]."""
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def check_length(tokens, seq_len):
    """UserError when a split cannot fill one row."""
    if len(tokens) < seq_len + 1:
        raise UserError(f"the train split has {len(tokens)} tokens, one row needs {seq_len + 1}; use more text or a smaller --seq_len")


def check_state(state, expected):
    """UserError when a saved state belongs to another stream of batches."""
    for key, value in expected.items():
        if state.get(key) != value:
            raise UserError(f"the saved batch state has {key} {state.get(key)}, this run {value}; resume with the same data and settings")


class BestFitBatches:
    """Endless batches whose rows all start with bos and are packed from whole pieces of documents (see find_pieces).

    Every row of T+1 tokens takes the largest piece of the buffer that fits the space left (of equals the one that came first);
    when none fits, the shortest is cropped to fill it and its rest dropped. Pieces enter in a new order every epoch. A function
    of the tokens, seq_len, seed and buffer_size alone: the rows do not depend on how they are grouped into batches.
    """

    def __init__(self, tokens, bos, batch_size, seq_len, seed, buffer_size=1000):
        check_length(tokens, seq_len)
        self.tokens = np.asarray(tokens)  # slicing the memmap object itself costs several times more
        self.bos, self.batch_size, self.seq_len, self.seed, self.buffer_size = bos, batch_size, seq_len, seed, buffer_size
        self.starts, self.lengths = find_pieces(self.tokens, bos, seq_len)
        self.arrivals = 0   # pieces that have entered the buffer: arrival a is piece a % P of epoch a // P
        self.buffer = []    # sorted (length, -arrival, piece)
        self._order = (None, None)

    @property
    def epoch(self):
        return self.arrivals // len(self.starts)

    def _entry(self, arrival):
        epoch, position = divmod(arrival, len(self.starts))
        if self._order[0] != epoch:
            # Sorting raw draws: numpy promises that these never change, which it does not of permutation().
            draws = np.random.PCG64(derive_seed("bestfit", self.seed, epoch)).random_raw(len(self.starts))
            self._order = (epoch, np.argsort(draws, kind="stable"))
        piece = int(self._order[1][position])
        return int(self.lengths[piece]), -arrival, piece

    def _fill(self, row):
        filled, size = 0, len(row)
        while filled < size:
            while len(self.buffer) < self.buffer_size:
                insort(self.buffer, self._entry(self.arrivals))
                self.arrivals += 1
            i = bisect_right(self.buffer, (size - filled, 1)) - 1
            if i < 0:
                i = bisect_right(self.buffer, (self.buffer[0][0], 1)) - 1
            length, _, piece = self.buffer.pop(i)
            n, start = min(length, size - filled), int(self.starts[piece])
            row[filled] = self.bos
            row[filled + 1:filled + n] = self.tokens[start:start + n - 1]
            filled += n

    def next(self):
        """(inputs, targets), LongTensors [B, T] on the CPU; targets are the inputs one token later."""
        rows = np.empty((self.batch_size, self.seq_len + 1), dtype=np.int64)
        for row in rows:
            self._fill(row)
        return to_batch(rows)

    def _identity(self):
        return {"packing": "bestfit", "seed": self.seed, "seq_len": self.seq_len, "buffer_size": self.buffer_size,
                "pieces": len(self.starts)}

    def state_dict(self):
        """Plain ints and a list of at most buffer_size ints."""
        epoch, position = divmod(self.arrivals, len(self.starts))
        return {**self._identity(), "epoch": epoch, "position": position, "buffer": sorted(-entry[1] for entry in self.buffer)}

    def load_state_dict(self, state):
        check_state(state, self._identity())
        self.arrivals = state["epoch"] * len(self.starts) + state["position"]
        self.buffer = sorted(self._entry(arrival) for arrival in sorted(state["buffer"]))


class RandomBatches:
    """Endless batches of uniform crops (nanoGPT's), a function of the tokens, seed and step alone."""

    def __init__(self, tokens, batch_size, seq_len, seed):
        check_length(tokens, seq_len)
        self.tokens, self.batch_size, self.seq_len, self.seed, self.step = np.asarray(tokens), batch_size, seq_len, seed, 0

    @property
    def epoch(self):
        return self.step * self.batch_size * self.seq_len // len(self.tokens)

    def next(self):
        """(inputs, targets), LongTensors [B, T] on the CPU."""
        draws = np.random.PCG64(derive_seed("random", self.seed, self.step)).random_raw(self.batch_size)
        starts = (draws % np.uint64(len(self.tokens) - self.seq_len)).astype(np.int64)
        self.step += 1
        return to_batch(self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64))

    def _identity(self):
        return {"packing": "random", "seed": self.seed, "seq_len": self.seq_len, "batch_size": self.batch_size, "tokens": len(self.tokens)}

    def state_dict(self):
        return {**self._identity(), "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        check_state(state, self._identity())
        self.step = state["step"]


# ---- evaluation ----

def eval_batches(tokens, bos, batch_size, seq_len, max_tokens=None, rank=0, world=1):
    """Fixed windows: yields (inputs, targets), LongTensors [B, T].

    Targets of row r are tokens r T .. r T + T - 1, inputs are bos and all of these but the last: every token of the split (of its
    first max_tokens) is a target exactly once and every row starts as in training. Rank k of `world` gets the rows k, k + world, ...
    What the last row and the last batch lack is filled with target -1 and input bos. B is batch_size, or the number of rows if less.
    """
    tokens = np.asarray(tokens[:max_tokens])
    rows = range(rank, -(-len(tokens) // seq_len), world)
    size = max(1, min(batch_size, len(rows)))
    for i in range(0, len(rows), size):
        y = np.full((size, seq_len), -1, dtype=np.int64)
        for j, r in enumerate(rows[i:i + size]):
            chunk = tokens[r * seq_len:(r + 1) * seq_len]
            y[j, :len(chunk)] = chunk
        x = np.full_like(y, bos)
        x[:, 1:] = np.where(y[:, :-1] < 0, bos, y[:, :-1])
        yield torch.from_numpy(x), torch.from_numpy(y)


@torch.no_grad()
def evaluate_bpb(model, batches, token_bytes, device="cpu", progress=None, world=1):
    """Bits per byte of a model over (inputs, targets) batches.

    model(idx, targets, reduction="none") gives nats [B, T]; targets of -1 do not count. bpb = nats / (ln 2 x bytes), where nats are
    summed in float64 over the targets that stand for bytes (special ids do not) and bytes are theirs. loss is the mean over all
    targets, special ids included, tokens their number. progress: label of a progress bar, None for none. world: ranks that share the
    batches and whose sums are added up.
    Returns {"bpb", "loss", "nats", "bytes", "tokens"}; bpb and loss are NaN where there was nothing to count.
    """
    token_bytes = torch.as_tensor(np.asarray(token_bytes), dtype=torch.int64)
    nats = total = 0.0
    n_bytes = n_tokens = 0
    training = model.training
    model.eval()
    try:
        for x, y in tqdm(batches, desc=progress, leave=False, disable=None if progress else True):
            loss = model(x.to(device), y.to(device), reduction="none").to("cpu", torch.float64).view(-1)
            y = y.view(-1)
            counts = torch.where(y >= 0, token_bytes[y.clamp(min=0)], 0)
            nats += loss[counts > 0].sum().item()
            total += loss[y >= 0].sum().item()
            n_bytes += counts.sum().item()
            n_tokens += (y >= 0).sum().item()
    finally:
        model.train(training)
    sums = torch.tensor([nats, total, n_bytes, n_tokens], dtype=torch.float64, device=device if world > 1 else "cpu")
    all_sum([sums], world)
    nats, total, n_bytes, n_tokens = sums[0].item(), sums[1].item(), int(sums[2]), int(sums[3])
    return {"bpb": nats / (math.log(2) * n_bytes) if n_bytes else math.nan, "loss": total / n_tokens if n_tokens else math.nan,
            "nats": nats, "bytes": n_bytes, "tokens": n_tokens}


def evaluate_splits(model, store, batch_size, max_tokens=0, device="cpu", rank=0, world=1):
    """evaluate_bpb on val and heldout in rows of model.cfg.sequence_len; max_tokens: score only the first ones of each, 0 is all.
    The rows are split over `world` ranks; every rank returns the whole result.

    Returns {"val_bpb", "val_loss", "val_nats", "val_bytes", "val_tokens", and the same five for heldout}.
    """
    metrics = {}
    for name in ("val", "heldout"):
        batches = eval_batches(getattr(store, name), store.bos, batch_size, model.cfg.sequence_len, max_tokens or None, rank, world)
        found = evaluate_bpb(model, batches, store.token_bytes, device, name if rank == 0 else None, world)
        metrics.update({f"{name}_{key}": value for key, value in found.items()})
    return metrics


# ---- command line ----

@dataclass(frozen=True)
class DataConfig:
    """The options of data.py."""
    vocab_size: int = flag(8192, "token ids, four special ones included", low=256 + len(SPECIALS), high=2**20)
    shards: Optional[int] = flag(None, f"climbmix only: training shards, of about 60 million tokens each (default: {DEFAULT_SHARDS})", low=1, high=PINNED_SHARD)
    tokenizer_chars: int = flag(TOKENIZER_CHARS, "train the tokenizer on about this many characters of train at most", low=1)
    out: Optional[str] = flag(None, "folder of the store (default: stores/<name>-<vocab_size>)")


def summary(folder):
    """What a store holds, as text."""
    store = Store(folder)
    lines = [f"{folder}  vocabulary {store.vocab_size}, digest {store.digest}",
             f"{'':8}{'documents':>12}{'tokens':>15}{'bytes':>17}{'bytes/token':>13}"]
    for name, s in store.meta["splits"].items():
        lines.append(f"{name:8}{s['documents']:12,}{s['tokens']:15,}{s['bytes']:17,}{s['bytes'] / s['tokens']:13.3f}")
    dropped, invalid = store.meta["dropped"], store.meta["invalid_utf8_documents"]
    lines.append(f"dropped: {dropped['duplicates']} duplicates, {dropped['blank']} blank, {dropped['binary_files']} binary files;"
                 f" documents with invalid UTF-8 replaced: {invalid}")
    return "\n".join(lines)


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--corpus", nargs="+", action="append", metavar="CORPUS",
                        help="stdlib, climbmix, or paths of text, .jsonl, .parquet files and folders of them"
                             " (default: stdlib; a folder of that name is ./stdlib)")
    add_flags(parser, DataConfig)
    args = vars(parser.parse_args(argv))
    corpus = args.pop("corpus", [["stdlib"]])
    if len(corpus) > 1:
        raise UserError("--corpus is given twice; name several paths after one --corpus")
    config = DataConfig(**args)
    check_bounds(config)
    print(summary(prepare(corpus[0], config.vocab_size, config.shards, config.out, config.tokenizer_chars)))


if __name__ == "__main__":
    cli(main)
