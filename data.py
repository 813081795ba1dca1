"""From a corpus to a store: documents, splits, BPE tokenizer, token files. This is what runs once.

    python data.py                                  Python's standard library, about 12 MB of text
    python data.py --corpus climbmix --shards 10    the OE paper's corpus, from the Hugging Face hub
    python data.py --corpus my_texts/ more.jsonl    your own: text, jsonl (key "text"), parquet
                                                    (column "text"), and folders of them

A store is a folder that appears whole or not at all; batches.py reads it:

    train.bin val.bin heldout.bin   token ids, little-endian uint16 (uint32 above 65,536 ids), with
                                    the id of <|bos|> before each document
    tokenizer.json                  byte-level BPE trained on train only; the last four ids are
                                    special, bos first of them
    token_bytes.npy                 true bytes of every id, 0 for the special ones
    meta.json                       settings, sizes, what was dropped, digests, versions

Splits: exact duplicates are dropped first, then a hash of each document's bytes sends it to train,
val or heldout (90/5/5 %). Under 20 documents the text is cut into contiguous 90/5/5 % spans.
climbmix evaluates on its pinned last shard. A process that is killed on the way leaves a hidden
.NAME.*.tmp folder beside the store: it is never read, delete it when you like.
"""
import codecs
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
from tqdm import tqdm

from batches import (DEFAULT_STORE, SPECIALS, SPLITS, STORE_FORMAT, Store, digest_of, label_of,
                     sha256_of, token_dtype)
from common import UserError, add_flags, check_bounds, cli, flag, make_parser, write_json

TRAIN, VAL, HELDOUT, DROP = range(4)   # the first three are places in SPLITS

MIN_HASHED = 20                  # fewer documents than this are cut into spans instead
TOKENIZER_CHARS = 1_000_000_000  # the tokenizer is trained on at most this much of train
CHUNK_CHARS = 1 << 18            # long documents are encoded in pieces of about this size
BATCH_CHARS = 1 << 22            # characters handed to the encoder at a time
MOST_REPLACED = 0.01             # share of characters that may be invalid UTF-8
# folders of the standard library that are no part of the corpus
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

CLIMBMIX = "karpathy/climbmix-400b-shuffle"
PINNED_SHARD = 6542
EVAL_TOKENS = 20_971_520   # 320 batches of 32 x 2048 targets, the OE paper's evaluation
# The OE paper trains on 499,646,464 tokens. A shard is about 250 MB of text, some 60 million
# tokens, of which packing drops 3 %.
DEFAULT_SHARDS = 10

# GPT-4's pre-split with digit runs of at most two, and other runs of at most 256: BPE takes time
# quadratic in the length of a run, and some files are one run. No alternative reaches over a
# newline into a character that is not white space: cut_document() relies on it.
PRE_SPLIT = "|".join([
    r"'(?i:s|d|m|t|ll|ve|re)",                   # English contractions
    r"[^\r\n\p{L}\p{N}]?\p{L}{1,256}",           # a word with the character before it
    r"\p{N}{1,2}",
    r" ?[^\s\p{L}\p{N}]{1,256}[\r\n]{0,256}",    # punctuation
    r"\s{0,256}[\r\n]{1,256}",
    r"\s{1,256}(?!\S)",
    r"\s{1,256}",
])
SAFE_CUT = re.compile(r"\n(?=\S)")


# ---- documents ----

def decode(raw, notes):
    """bytes -> str: invalid UTF-8 becomes U+FFFD and is counted, a byte order mark goes.

    Line ends stay as they are.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        notes["invalid_utf8"] += 1
        # those that the text had itself are no fault
        notes["replaced"] += text.count("\ufffd") - raw.count("\ufffd".encode())
        return text


def mend(text):
    """str -> str that UTF-8 can hold: lone surrogates become U+FFFD.

    JSON escapes and command lines may carry them.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_text(path, named, notes):
    """The whole file as one document; a binary file is refused when the user named it."""
    raw = path.read_bytes()
    if b"\0" not in raw[:8192]:
        yield decode(raw, notes)
    elif named:
        how = "name UTF-8 text, .jsonl or .parquet files"
        raise UserError(f"{path} is a binary file (or UTF-16); {how}")
    else:
        notes["binary_files"] += 1


def read_jsonl(path, named, notes):
    """The "text" of every line."""
    malformed = (ValueError, TypeError, KeyError, IndexError, RecursionError)
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            where = f"{path}, line {number}"
            try:
                text = json.loads(decode(line, notes))["text"] if line.strip() else None
            except malformed:
                why = 'every line must be a JSON object with a key "text"'
                raise UserError(f"{where}: {why}") from None
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise UserError(f'{where}: "text" is a {kind}; it must be a string')
            mended = text and mend(text)
            notes["invalid_utf8"] += mended != text
            yield mended


def read_parquet(path, named, notes):
    """The rows of the column "text"."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    try:
        with pq.ParquetFile(path) as table:
            plain = string_type(path, table.schema_arrow)
            for batch in table.iter_batches(batch_size=4096, columns=["text"]):
                column = batch.column(0)
                if column.type != plain:   # a dictionary
                    column = column.cast(plain)
                if pa.types.is_string_view(plain):
                    column = column.cast(pa.binary_view())
                # Through bytes: a direct conversion would stop at invalid UTF-8.
                for raw in column.cast(pa.large_binary()).to_pylist():
                    yield None if raw is None else decode(raw, notes)
    except (pa.ArrowException, OSError, KeyError):  # KeyError: two columns named text
        why = "is not a readable parquet file (truncated?)"
        raise UserError(f"{path} {why}; replace it or leave it out") from None


def string_type(path, schema):
    """The Arrow type of the strings in the column "text"; UserError where there are none."""
    import pyarrow as pa
    if "text" not in schema.names:
        raise UserError(f'{path} has no column "text" (it has {", ".join(schema.names)})')
    kind = schema.field("text").type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    known = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_kind(plain) for is_kind in known):
        raise UserError(f'{path}: column "text" holds {kind}; it must hold strings')
    return plain


READERS = {".jsonl": read_jsonl, ".parquet": read_parquet}  # every other name is read as text


def read_documents(files, notes):
    """Yield the documents of [(path, named by the user?), ...] as str.

    Blank ones are skipped and counted in notes. UserError at the end when more than 1 % of the
    characters had to be replaced: text of another encoding would train, and would score low, since
    a letter that became U+FFFD counts three bytes and is easily guessed.
    """
    before = notes["replaced"]   # of other files that share these notes
    chars, first_damaged = 0, None
    for path, named in files:
        if named and not path.stat().st_size:
            raise UserError(f"{path} is empty; name a file with text in it")
        read = READERS.get(path.suffix.lower(), read_text)
        for text in read(path, named, notes):
            chars += len(text or "")
            if first_damaged is None and notes["replaced"] > before:
                first_damaged = path
            if text is None or not text.strip():
                notes["blank"] += 1
            else:
                yield text
    replaced = notes["replaced"] - before
    if replaced > MOST_REPLACED * chars:
        why = f"is not UTF-8 ({replaced / chars:.0%} of the corpus cannot be read as such)"
        how = "convert it, with iconv -f WINDOWS-1251 -t UTF-8 or the like"
        raise UserError(f"{first_damaged} {why}; {how}")


# ---- files ----

def walk(folder, skip=frozenset()):
    """Every file under the folder, sorted by its path relative to it.

    Hidden files are left out, and what lies in hidden folders or in those of a skipped name.
    """
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [d for d in folders if not d.startswith(".") and d not in skip]
        found += [Path(root, n) for n in names if not n.startswith(".")]
    files = [p for p in found if p.is_file()]
    return sorted(files, key=lambda p: p.relative_to(folder).as_posix())


def stdlib_files():
    """[(path, False), ...]: the running Python's .py files, without tests and packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [(p, False) for p in walk(root, SKIPPED_FOLDERS) if p.suffix == ".py"]
    if not files:
        raise UserError(f"this Python keeps no .py files under {root}; use --corpus PATH")
    return files


def path_files(paths):
    """([(path, named), ...], fingerprint) of files and folders.

    The fingerprint changes when a file is added, removed, renamed or edited.
    """
    files, listing = [], []
    for path in map(Path, paths):
        if not path.is_dir() and not path.is_file():
            what = "a corpus is stdlib, climbmix or paths of texts"
            raise UserError(f"{path}: no such file or folder; {what}")
        inside = walk(path) if path.is_dir() else [path]
        files += [(p, p == path) for p in inside]
        listing += [(os.path.relpath(p, path), sha256_of(p)) for p in inside]
    names = [Path(p).name for p in paths]
    digest = hashlib.sha256(json.dumps([names, listing]).encode())
    return files, digest.hexdigest()[:16]


# ---- climbmix from the hub ----

def check_shard(path, size):
    """UserError, and the file gone from the cache, when it is not what the hub announced.

    size: bytes, None where the hub was not asked. The hub names a file by its sha256.
    """
    blob = Path(path).resolve()
    whole = size in (None, blob.stat().st_size)
    if whole and re.fullmatch("[0-9a-f]{64}", blob.name):
        whole = sha256_of(blob) == blob.name
    if not whole:
        blob.unlink()
        why = "arrived damaged and was deleted"
        raise UserError(f"{Path(path).name} {why}; run again to fetch it anew")


def fetch_shard(index, repo=CLIMBMIX):
    """Path of one parquet shard in the hub's cache, downloaded if it is not there.

    huggingface_hub resumes a broken connection and obeys HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE;
    complete shards are never fetched twice. UserError when the hub cannot be reached or what came
    is damaged.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    name, size = f"shard_{index:05d}.parquet", None
    try:
        try:
            path = hub.hf_hub_download(repo, name, repo_type="dataset", local_files_only=True)
        except LocalEntryNotFoundError:
            # Asked for here because it gives up at once where the download would first retry
            # for half a minute.
            url = hub.hf_hub_url(repo, name, repo_type="dataset")
            size = hub.get_hf_file_metadata(url).size
            path = hub.hf_hub_download(repo, name, repo_type="dataset")
    except Exception as err:  # the hub raises a dozen types from three libraries
        reason = f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
        how = "run again to continue, or use --corpus stdlib, which needs no network"
        raise UserError(f"cannot fetch {name} of {repo} ({reason}); {how}") from None
    check_shard(path, size)
    return Path(path)


# ---- splits ----

def digest_document(text):
    """The 16 bytes that stand for a document."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def survey(files, seen, notes, label="reading"):
    """Digest of every document, None where it repeats one in `seen`, which grows.

    Counts duplicates and characters in notes.
    """
    digests = []
    for text in tqdm(read_documents(files, notes), desc=label, unit="doc", disable=None):
        digest = digest_document(text)
        repeated = digest in seen
        notes["duplicates"] += repeated
        digests.append(None if repeated else digest)
        seen.add(digest)
        notes["chars"] += len(text)
    return digests


def split_of(digest):
    """Where a document goes by its digest: 5 % to val, 5 % to heldout."""
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < 0.05:
        return VAL
    return HELDOUT if share < 0.10 else TRAIN


def assign(digests):
    """Split of every document from its digest alone; None -> DROP.

    Neither order nor file names matter, and a document that is added moves no other.
    """
    kept = sorted(d for d in digests if d)
    codes = {d: split_of(d) for d in kept}
    if len(set(codes.values())) < 3:
        # few documents and bad luck: the lowest 5 % of the digests, at least one, and the next
        n = max(1, len(kept) // 20)
        codes = dict.fromkeys(kept, TRAIN)
        codes.update(dict.fromkeys(kept[n:2 * n], HELDOUT))
        codes.update(dict.fromkeys(kept[:n], VAL))
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
    """[(split, text), ...]: contiguous 90/5/5 % of the characters.

    A document that crosses a cut becomes two.
    """
    total, parts, before = sum(map(len, texts)), [], 0
    cuts = [0, total * 90 // 100, total * 95 // 100, total]
    for text in texts:
        for split in (TRAIN, VAL, HELDOUT):
            start, end = (max(cut - before, 0) for cut in cuts[split:split + 2])
            if part := text[start:end]:
                parts.append((split, part))
        before += len(text)
    return parts


def split_documents(files, pinned, notes):
    """A function that yields (split, text) of all kept documents, the same ones at every call.

    files, pinned: [(path, named), ...]; pinned ones are all VAL and are read first.
    """
    seen = set()
    first = survey(pinned, seen, notes, "reading the evaluation shard") if pinned else []
    digests = survey(files, seen, notes)
    notes["distinct"] = len(seen)
    if not seen:
        found = f"{notes['blank']} blank documents, {notes['binary_files']} binary files"
        raise UserError(f"no text in the corpus ({found}); name one that has some")
    keep = [TRAIN if d else DROP for d in digests]
    if pinned:
        plan = [VAL if d else DROP for d in first] + keep
    elif len(seen) < MIN_HASHED:
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
    """Byte-level BPE over an iterable of str with vocab_size ids, the last four special.

    UserError when the text is too small for so many.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence([Split(Regex(PRE_SPLIT), behavior="isolated"),
                                        ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    n_text = vocab_size - len(SPECIALS)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=n_text, min_frequency=2, initial_alphabet=sorted(ByteLevel.alphabet()),
        special_tokens=[], show_progress=sys.stderr.isatty()))
    if (got := tokenizer.get_vocab_size()) < n_text:
        most = got + len(SPECIALS)
        why = f"the corpus is too small for {vocab_size} ids: it yields {most}"
        raise UserError(f"{why}; pass --vocab_size {most} or less")
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path):
    """A tokenizer.json that data.py wrote; UserError for any other file."""
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as err:  # tokenizers raises plain Exception
        reason = " ".join(str(err).split())[:80]
        raise UserError(f"--tokenizer {path} is no tokenizer.json ({reason})") from None
    n = tokenizer.get_vocab_size()
    last = tuple(tokenizer.id_to_token(i) for i in range(n - len(SPECIALS), n))
    if last != SPECIALS:
        why = f"its last ids are not {', '.join(SPECIALS)}"
        raise UserError(f"--tokenizer {path} was not written by data.py ({why})")
    tokenizer.encode_special_tokens = True   # the file does not keep it
    return tokenizer


def encode(tokenizer, text):
    """str -> list of int; never a special id, whatever the text says."""
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(mend(text), add_special_tokens=False).ids


def count_token_bytes(tokenizer):
    """int64 [vocab_size]: bytes that each id stands for, 0 for special ids.

    A byte-level token is spelled with one character per byte, so its length is its byte count even
    inside a character.
    """
    n = tokenizer.get_vocab_size()
    lengths = [len(tokenizer.id_to_token(i)) for i in range(n - len(SPECIALS))]
    return np.array(lengths + [0] * len(SPECIALS), dtype=np.int64)


# ---- stores ----

def encoded(parts, tokenizer, bar):
    """Yield (split, begins a document?, ids int64) of (split, text) pairs.

    They are encoded in parallel, with one batch in memory at a time.
    """
    def encode_all(batch):
        pieces = [piece for _, _, piece in batch]
        found = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        for (split, first, _), encoding in zip(batch, found):
            yield split, first, np.array(encoding.ids, dtype=np.int64)
        bar.update(sum(map(len, pieces)))

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

    limit: val takes exactly this many tokens of what is marked VAL, heldout as many from the next
    document on.
    """
    dtype, bos = token_dtype(len(token_bytes)), np.array([len(token_bytes) - len(SPECIALS)])
    sizes = [{"documents": 0, "tokens": 0, "bytes": 0} for _ in SPLITS]
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{name}.bin", "wb")) for name in SPLITS]
        bar = stack.enter_context(tqdm(total=total_chars, desc="encoding", unit="char",
                                       unit_scale=True, disable=None))
        to = None
        for split, first, ids in encoded(parts, tokenizer, bar):
            if first:
                val_is_full = limit and split == VAL and sizes[VAL]["tokens"] == limit
                to = HELDOUT if val_is_full else split
                ids = np.concatenate([bos, ids])
            if limit and split == VAL:
                ids = ids[:limit - sizes[to]["tokens"]]
            files[to].write(ids.astype(dtype).tobytes())
            sizes[to]["documents"] += first and len(ids) > 0
            sizes[to]["tokens"] += len(ids)
            sizes[to]["bytes"] += int(token_bytes[ids].sum())
    return dict(zip(SPLITS, sizes))


def already_there(out, settings):
    """True when `out` is a whole store with these settings, False when nothing is there.

    UserError for anything else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not out.is_dir():
        raise UserError(f"{out} is a file; name a folder with --out")
    there = Store(out).meta["settings"]
    differs = [k for k in {**there, **settings} if there.get(k) != settings.get(k)]
    if not differs:
        return True
    k, how = differs[0], "delete it, or name another with data.py --out"
    if differs == ["fingerprint"]:
        why = "holds the store of another text (files were edited, or others have their names)"
    else:
        why = f"holds another store ({k} {there.get(k)}, asked for {settings.get(k)})"
    raise UserError(f"{out} {why}; {how}")


def make_store(folder, settings, files, pinned, limit):
    """Everything from documents to meta.json, inside a fresh folder."""
    import tokenizers
    notes, vocab_size = Counter(), settings["vocab_size"]
    parts = split_documents(files, pinned, notes)

    def train_text(room=settings["tokenizer_chars"]):
        for text in (text for split, text in parts() if split == TRAIN):
            for piece in cut_document(text):
                yield piece
                room -= len(piece)
                if room <= 0:
                    return

    texts = tqdm(train_text(), desc="tokenizer", unit="piece", disable=None)
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    token_bytes = count_token_bytes(tokenizer)
    np.save(folder / "token_bytes.npy", token_bytes, allow_pickle=False)
    splits = write_tokens(folder, parts(), tokenizer, token_bytes, notes["chars"], limit)
    for name, size in splits.items():
        needed = limit if limit and name != "train" else 1
        if size["tokens"] < needed:
            left = f"{size['tokens']} tokens are left for {name}"
            raise UserError(f"the corpus is too small: {left}; add text")
    written = sorted(folder.iterdir())
    sizes = {p.name: {"bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in written}
    versions = {"python": platform.python_version(), "tokenizers": tokenizers.__version__,
                "numpy": np.__version__}
    write_json(folder / "meta.json", {
        "format": STORE_FORMAT, "settings": settings, "splits": splits, "files": sizes,
        "digest": digest_of(sizes),
        "dropped": {k: notes[k] for k in ("duplicates", "blank", "binary_files")},
        "distinct_documents": notes["distinct"],
        "invalid_utf8_documents": notes["invalid_utf8"], "versions": versions})


def build(out, settings, files, pinned=(), limit=None):
    """make_store in a temporary folder beside `out`, then rename.

    Of two processes at once the first one's store stays.
    """
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


def prepare_climbmix(vocab_size, shards, out, tokenizer_chars=TOKENIZER_CHARS,
                     eval_tokens=EVAL_TOKENS, pinned=PINNED_SHARD):
    """prepare() for climbmix; the pinned shard is val and heldout.

    It is read first, so that a training document that repeats one of its is dropped.
    """
    settings = {"corpus": "climbmix", "vocab_size": vocab_size, "tokenizer_chars": tokenizer_chars,
                "shards": shards, "eval_tokens": eval_tokens}
    if already_there(out, settings):
        return out
    wanted = tqdm([pinned, *range(shards)], desc="shards", disable=None)
    last, *train = [(fetch_shard(i), True) for i in wanted]
    return build(out, settings, train, [last], eval_tokens)


def check_outside(out, paths):
    """UserError when the store would lie in one of the folders it is made of."""
    for path in paths:
        if Path(path).is_dir() and out.resolve().is_relative_to(Path(path).resolve()):
            why = f"lies inside the corpus {path} and would become part of it"
            raise UserError(f"{out} {why}; name another with data.py --out")


def prepare(corpus="stdlib", vocab_size=8192, shards=None, out=None,
            tokenizer_chars=TOKENIZER_CHARS):
    """Prepare a corpus and return its store's folder (Path).

    Returns at once when the same store is already there.
    corpus: "stdlib", "climbmix", a path or a list of paths. shards: training shards of climbmix
    (default 10). out: the folder, by default stores/<name>-<vocab_size>.
    tokenizer_chars: train text that the tokenizer sees at most.
    UserError for what cannot be read, is too small, or when another store lies at `out`.
    """
    paths = [corpus] if isinstance(corpus, (str, Path)) else corpus
    paths = [str(p) for p in paths]
    if "" in paths or out is not None and not str(out):
        raise UserError("an empty path would mean the current folder; write . for it")
    if shards is not None and paths != ["climbmix"]:
        raise UserError("--shards belongs to --corpus climbmix; leave it out")
    settings = {"vocab_size": vocab_size, "tokenizer_chars": tokenizer_chars}
    if paths in (["stdlib"], ["climbmix"]):
        name = paths[0]
        settings = {"corpus": name, **settings}
    else:
        files, fingerprint = path_files(paths)
        called = [Path(p).resolve() for p in paths]
        settings = {"corpus": [p.name for p in called], **settings, "fingerprint": fingerprint}
        name = called[0].stem + (f"+{len(paths) - 1}" if len(paths) > 1 else "")
    out = Path("stores") / f"{name}-{vocab_size}" if out is None else Path(out)
    if settings["corpus"] == "climbmix":
        return prepare_climbmix(vocab_size, shards or DEFAULT_SHARDS, out, tokenizer_chars)
    if settings["corpus"] == "stdlib":
        return out if already_there(out, settings) else build(out, settings, stdlib_files())
    check_outside(out, paths)
    return out if already_there(out, settings) else build(out, settings, files)


def prepare_default():
    """The default corpus, with a word on stderr, since nobody asked for the wait."""
    print("preparing the default corpus (Python's standard library), once", file=sys.stderr)
    return prepare("stdlib", out=DEFAULT_STORE)


# ---- a store, or text under a tokenizer that is given ----

@dataclass(frozen=True)
class Corpus:
    """Text under a given tokenizer, in memory; the attributes are a Store's."""
    train: np.ndarray          # token ids, 1-D
    val: np.ndarray
    heldout: np.ndarray
    token_bytes: np.ndarray    # int64 [vocab_size]
    digest: str                # that of a store with the same files
    label: str
    tokenizer: object

    @property
    def vocab_size(self):
        return len(self.token_bytes)

    @property
    def bos(self):
        return self.vocab_size - len(SPECIALS)


def encode_text(path, tokenizer_path):
    """Corpus of a text file, or of a folder of them, split as a store's documents are."""
    tokenizer, notes = load_tokenizer(tokenizer_path), Counter()
    token_bytes = count_token_bytes(tokenizer)
    files, _ = path_files([path])
    parts = split_documents(files, [], notes)
    with tempfile.TemporaryDirectory() as folder:
        folder, dtype = Path(folder), token_dtype(len(token_bytes))
        write_tokens(folder, parts(), tokenizer, token_bytes, notes["chars"])
        np.save(folder / "token_bytes.npy", token_bytes, allow_pickle=False)
        written = {p.name: {"sha256": sha256_of(p)} for p in folder.iterdir()}
        written["tokenizer.json"] = {"sha256": sha256_of(tokenizer_path)}
        digest = digest_of(written)
        splits = [np.fromfile(folder / f"{name}.bin", dtype=dtype) for name in SPLITS]
    warn_of_bytes(notes["invalid_utf8"], path)
    label = label_of([Path(path).resolve().name], digest)
    return Corpus(*splits, token_bytes, digest, label, tokenizer)


def warn_of_bytes(documents, path):
    """Say on stderr that some documents were no UTF-8."""
    if documents:
        where = f"in {documents} documents of {path}"
        print(f"note: invalid UTF-8 was replaced {where}", file=sys.stderr)


def looks_like_a_store(path):
    """Is this folder meant as a store, even if as a broken one?"""
    marks = ("meta.json", "train.bin", "token_bytes.npy")
    return str(path) == DEFAULT_STORE or any((Path(path) / name).exists() for name in marks)


def open_corpus(data, tokenizer="", vocab_size=None):
    """Store or Corpus of what a user names.

    data: a store's folder (the default store is prepared when it is missing), or text, which
    becomes a store under stores/, or a Corpus where a tokenizer.json of data.py is given.
    tokenizer: beside a store it must be the store's own. vocab_size: of a tokenizer to be trained
    on text (None: 8192). UserError for combinations that contradict each other.
    """
    if looks_like_a_store(data):
        if vocab_size:
            why = f"is for a tokenizer trained on text; the store {data} has its own"
            raise UserError(f"--vocab_size {why}: leave the flag out, or name text with --data")
        if data == DEFAULT_STORE and not Path(data).exists():
            prepare_default()
        store = Store(data)
        if tokenizer:
            load_tokenizer(tokenizer)
            if sha256_of(tokenizer) != store.meta["files"]["tokenizer.json"]["sha256"]:
                why = f"is not the one that the store {data} was encoded with"
                raise UserError(f"--tokenizer {tokenizer} {why}; leave it out, or give text")
        return store
    if tokenizer and vocab_size:
        why = "is for a tokenizer trained on --data"
        raise UserError(f"--vocab_size {why}; --tokenizer brings its own")
    if tokenizer:
        return encode_text(data, tokenizer)
    store = Store(prepare([data], vocab_size or 8192))
    warn_of_bytes(store.meta["invalid_utf8_documents"], data)
    return store


# ---- command line ----

@dataclass(frozen=True)
class DataConfig:
    """The options of data.py."""
    vocab_size: int = flag(8192, "token ids, four special ones included",
                           low=256 + len(SPECIALS), high=2**20)
    shards: Optional[int] = flag(
        None, "climbmix only: training shards, of about 60 million tokens each "
        f"(default: {DEFAULT_SHARDS})", low=1, high=PINNED_SHARD)
    tokenizer_chars: int = flag(
        TOKENIZER_CHARS, "most characters of train that the tokenizer is trained on, about", low=1)
    out: Optional[str] = flag(None, "folder of the store (default: stores/<name>-<vocab_size>)")


def summary(store):
    """What a store holds, as text."""
    lines = [f"{store.folder}  vocabulary {store.vocab_size}, digest {store.digest}",
             f"{'':8}{'documents':>12}{'tokens':>15}{'bytes':>17}{'bytes/token':>13}"]
    for name, size in store.meta["splits"].items():
        documents, tokens, n_bytes = size["documents"], size["tokens"], size["bytes"]
        lines.append(f"{name:8}{documents:12,}{tokens:15,}{n_bytes:17,}{n_bytes / tokens:13.3f}")
    dropped, invalid = store.meta["dropped"], store.meta["invalid_utf8_documents"]
    counts = (f"{dropped['duplicates']} duplicates, {dropped['blank']} blank, "
              f"{dropped['binary_files']} binary files")
    lines.append(f"dropped: {counts}; documents with invalid UTF-8 replaced: {invalid}")
    if store.label:   # the default corpus needs no flag
        folder = shlex.quote(str(store.folder))
        lines.append(f"train on it: python train_oe.py --preset laptop --data {folder}")
    return "\n".join(lines)


def main(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--corpus", nargs="+", action="append", metavar="CORPUS",
                        help="stdlib, climbmix, or paths of text, .jsonl, .parquet files and "
                             "folders of them (default: stdlib; a folder of that name is ./stdlib)")
    add_flags(parser, DataConfig)
    args = vars(parser.parse_args(argv))
    corpus = args.pop("corpus", [["stdlib"]])
    if len(corpus) > 1:
        raise UserError("--corpus is given twice; name several paths after one --corpus")
    config = DataConfig(**args)
    check_bounds(config)
    folder = prepare(corpus[0], config.vocab_size, config.shards, config.out,
                     config.tokenizer_chars)
    print(summary(Store(folder)))


if __name__ == "__main__":
    cli(main)
