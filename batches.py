"""What every run reads: a prepared corpus, its batches, its evaluation windows, bits per byte.

data.py writes a store once; from then on only this file touches it. A batch is a pair (inputs,
targets) of LongTensors [B, T] on the CPU, the targets being the inputs one token later. Training
batches never end and depend on the tokens, the seed and the step alone; they have a state_dict()
from which they go on exactly. Evaluation windows are the same for every model.
"""
import functools
import hashlib
import json
import math
import re
from bisect import bisect_right, insort
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common import UserError, all_sum, derive_seed

BOS = "<|bos|>"
SPECIALS = (BOS, "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>")
SPLITS = ("train", "val", "heldout")
STORE_FORMAT = "nanoarms-store-1"
STORE_FILES = {*(f"{split}.bin" for split in SPLITS), "token_bytes.npy", "tokenizer.json"}
DEFAULT_STORE = "stores/stdlib-8192"
# Larger token files would take long to hash at every start; their size shows a broken copy.
HASHED_AT_START = 64 << 20   # bytes


# ---- stores ----

def sha256_of(path):
    """Hex digest of a file."""
    sha = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            sha.update(block)
    return sha.hexdigest()


def digest_of(files):
    """16 hex digits that stand for corpus and tokenizer, from the "files" of meta.json."""
    joined = "".join(files[name]["sha256"] for name in sorted(files))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def label_of(names, digest):
    """A corpus as part of a run's name: what it is called and six digits of its digest."""
    called = "+".join(Path(name).stem for name in names)
    safe = re.sub(r"[^\w.+-]+", "-", called)[:23].strip(".-")
    return f"{safe or 'corpus'}-{digest[:6]}"


def token_dtype(vocab_size):
    """The numpy type of token ids in a file."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


class Store:
    """A prepared folder, opened for reading. UserError when it is not whole.

    train, val, heldout: token ids, 1-D, memory-mapped (uint16, or uint32 above 65,536 ids).
    vocab_size, bos (the id before each document), token_bytes (int64 [vocab_size]: how many bytes
    an id stands for), tokenizer, meta (what meta.json says).
    digest: a str that stands for corpus and tokenizer. label: the corpus in a run's name.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.meta = self._read_meta()
        for name, known in self.meta["files"].items():
            self._check_file(self.folder / name, known)
        self.vocab_size, self.digest = self.meta["settings"]["vocab_size"], self.meta["digest"]
        self.bos = self.vocab_size - len(SPECIALS)
        self.token_bytes = np.load(self.folder / "token_bytes.npy", allow_pickle=False)
        if (found := len(self.token_bytes)) != self.vocab_size:
            said = f"it says {self.vocab_size} ids, the store has {found}"
            meta = self.folder / "meta.json"
            raise UserError(f"{meta} was changed: {said}; prepare it again with data.py")
        dtype = token_dtype(self.vocab_size)
        paths = [self.folder / f"{split}.bin" for split in SPLITS]
        self.train, self.val, self.heldout = (np.memmap(p, dtype=dtype, mode="r") for p in paths)

    def _read_meta(self):
        if not self.folder.is_dir():
            how = f"prepare one with python data.py --out {self.folder}"
            raise UserError(f"{self.folder}: no such store; {how}")
        try:
            meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            files = meta["files"]
            known = meta["format"] == STORE_FORMAT and set(files) == STORE_FILES
            if known and meta["digest"] == digest_of(files):
                return meta
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            pass
        why = "is not a store of this project (meta.json is missing, broken or foreign)"
        raise UserError(f"{self.folder} {why}; name another folder")

    def _check_file(self, path, known):
        whole = path.is_file() and path.stat().st_size == known["bytes"]
        if whole and known["bytes"] <= HASHED_AT_START:
            whole = sha256_of(path) == known["sha256"]
        if not whole:
            state = "was cut or changed" if path.is_file() else "is missing"
            how = f"delete {self.folder} and prepare it again with data.py"
            raise UserError(f"{path} {state}; {how}")

    @property
    def label(self):
        """The corpus as part of a run's name: "" for the default one, else <names>-<digest>."""
        corpus = self.meta["settings"]["corpus"]
        if corpus == "stdlib" and self.vocab_size == 8192:
            return ""
        return label_of([corpus] if isinstance(corpus, str) else corpus, self.digest)

    @functools.cached_property
    def tokenizer(self):
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        # The file does not keep it: "<|bos|>" in a document would become the special id.
        tokenizer.encode_special_tokens = True
        return tokenizer


# ---- training batches ----

def to_batch(rows):
    """int64 [B, T+1] -> inputs and targets, LongTensors [B, T]."""
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def check_length(tokens, seq_len):
    """UserError when a split cannot fill one row."""
    if len(tokens) < seq_len + 1:
        why = f"the train split has {len(tokens)} tokens, one row needs {seq_len + 1}"
        raise UserError(f"{why}; use more text or a smaller --seq_len")


def check_state(state, expected):
    """UserError when a saved state belongs to another stream of batches."""
    for key, value in expected.items():
        if state.get(key) != value:
            why = f"the saved batch state has {key} {state.get(key)}, this run {value}"
            raise UserError(f"{why}; resume with the same data and settings")


def find_pieces(tokens, bos, seq_len):
    """(start int64 [P], length int32 [P]) of the pieces of a token stream.

    A piece is a bos and the `length - 1` tokens from `start`. A document of more than seq_len
    tokens is cut into pieces of seq_len, so that none of its text is lost: a corpus of long files
    would otherwise only ever show how files begin.
    """
    step = 1 << 24   # compared in blocks: the stream may be larger than memory
    blocks = range(0, len(tokens), step)
    at = np.concatenate([np.flatnonzero(tokens[i:i + step] == bos) + i for i in blocks])
    if not len(at) or at[0] > 0:  # a stream that opens in the middle of a document
        at = np.insert(at, 0, -1)
    starts, ends = at + 1, np.append(at[1:], len(tokens))
    n = np.maximum(1, -(-(ends - starts) // seq_len))
    within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    start = np.repeat(starts, n) + within * seq_len
    left = np.repeat(ends, n) - start
    return start, (np.minimum(seq_len, left) + 1).astype(np.int32)


class BestFitBatches:
    """Endless batches whose rows start with bos and are packed from pieces of documents.

    A row of T+1 tokens takes the largest piece of the buffer that fits the space left (of equals
    the one that came first); when none fits, the shortest is cropped to fill it and its rest is
    dropped. Pieces (see find_pieces) enter in a new order every epoch. The rows are a function of
    the tokens, seq_len, seed and buffer_size alone, however they are grouped into batches.
    """

    def __init__(self, tokens, bos, batch_size, seq_len, seed, buffer_size=1000):
        check_length(tokens, seq_len)
        self.tokens = np.asarray(tokens)  # slicing the memmap itself costs several times more
        self.bos, self.batch_size, self.seq_len = bos, batch_size, seq_len
        self.seed, self.buffer_size = seed, buffer_size
        self.starts, self.lengths = find_pieces(self.tokens, bos, seq_len)
        # arrival a is piece a % P of epoch a // P
        self.arrivals = 0
        self.buffer = []    # sorted (length, -arrival, piece)
        self._order = (None, None)

    @property
    def epoch(self):
        """How many times all pieces have entered the buffer."""
        return self.arrivals // len(self.starts)

    def _entry(self, arrival):
        epoch, position = divmod(arrival, len(self.starts))
        if self._order[0] != epoch:
            # Sorting raw draws: numpy promises that these never change, not so permutation().
            source = np.random.PCG64(derive_seed("bestfit", self.seed, epoch))
            draws = source.random_raw(len(self.starts))
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
            if i < 0:   # nothing fits: of the shortest ones, the first that came
                shortest = self.buffer[0][0]
                i = bisect_right(self.buffer, (shortest, 1)) - 1
            length, _, piece = self.buffer.pop(i)
            n, start = min(length, size - filled), int(self.starts[piece])
            row[filled] = self.bos
            row[filled + 1:filled + n] = self.tokens[start:start + n - 1]
            filled += n

    def next(self):
        """(inputs, targets), LongTensors [B, T]."""
        rows = np.empty((self.batch_size, self.seq_len + 1), dtype=np.int64)
        for row in rows:
            self._fill(row)
        return to_batch(rows)

    def _identity(self):
        return {"packing": "bestfit", "seed": self.seed, "seq_len": self.seq_len,
                "buffer_size": self.buffer_size, "pieces": len(self.starts)}

    def state_dict(self):
        """Plain ints and a list of at most buffer_size ints."""
        epoch, position = divmod(self.arrivals, len(self.starts))
        waiting = sorted(-entry[1] for entry in self.buffer)
        return {**self._identity(), "epoch": epoch, "position": position, "buffer": waiting}

    def load_state_dict(self, state):
        """Go on where the state was taken; UserError when it is of other batches."""
        check_state(state, self._identity())
        self.arrivals = state["epoch"] * len(self.starts) + state["position"]
        self.buffer = sorted(self._entry(arrival) for arrival in sorted(state["buffer"]))


class RandomBatches:
    """Endless batches of uniform crops, as nanoGPT draws them."""

    def __init__(self, tokens, batch_size, seq_len, seed):
        check_length(tokens, seq_len)
        self.tokens = np.asarray(tokens)
        self.batch_size, self.seq_len, self.seed, self.step = batch_size, seq_len, seed, 0

    @property
    def epoch(self):
        """How many times as many tokens were drawn as there are."""
        return self.step * self.batch_size * self.seq_len // len(self.tokens)

    def next(self):
        """(inputs, targets), LongTensors [B, T]."""
        source = np.random.PCG64(derive_seed("random", self.seed, self.step))
        room = np.uint64(len(self.tokens) - self.seq_len)
        starts = (source.random_raw(self.batch_size) % room).astype(np.int64)
        self.step += 1
        within = np.arange(self.seq_len + 1)
        return to_batch(self.tokens[starts[:, None] + within].astype(np.int64))

    def _identity(self):
        return {"packing": "random", "seed": self.seed, "seq_len": self.seq_len,
                "batch_size": self.batch_size, "tokens": len(self.tokens)}

    def state_dict(self):
        """Plain ints."""
        return {**self._identity(), "epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        """Go on where the state was taken; UserError when it is of other batches."""
        check_state(state, self._identity())
        self.step = state["step"]


# ---- evaluation ----

def eval_batches(tokens, bos, batch_size, seq_len, max_tokens=None, rank=0, world=1):
    """Yield (inputs, targets) of fixed windows in which every token is a target exactly once.

    Targets of row r are tokens r T .. r T + T - 1 of the split (of its first max_tokens), inputs
    are bos and all of these but the last, so that every row starts as in training. Rank k of
    `world` gets the rows k, k + world, ... What the last row and the last batch lack is filled
    with target -1 and input bos. B is batch_size, or the number of rows if less.
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


def fixed_windows(tokens, batch_size, seq_len, max_tokens=0):
    """Yield (inputs, targets) of consecutive windows, nanoGPT's x and y; 0 is all tokens.

    The last batch may have fewer rows; tokens that do not fill a row are left out.
    """
    last = min(len(tokens), max_tokens + 1) if max_tokens else len(tokens)
    rows = (last - 1) // seq_len
    for i in range(0, rows, batch_size):
        n = min(batch_size, rows - i)
        part = np.asarray(tokens[i * seq_len:(i + n) * seq_len + 1]).astype(np.int64)
        x, y = part[:-1].reshape(n, seq_len), part[1:].reshape(n, seq_len)
        yield torch.from_numpy(x), torch.from_numpy(y)


@torch.no_grad()
def evaluate_bpb(model, batches, token_bytes, device="cpu", progress=None, world=1):
    """Bits per byte of a model over (inputs, targets) batches.

    model(idx, targets, reduction="none") gives nats [B, T]; targets of -1 do not count.
    bpb = nats / (ln 2 x bytes), where nats are summed in float64 over the targets that stand for
    bytes (special ids do not) and bytes are theirs. loss is the mean over all targets, special ids
    included, tokens their number. progress: label of a progress bar, None for none.
    world: ranks that share the batches and whose sums are added up.
    Returns {"bpb", "loss", "nats", "bytes", "tokens"}; bpb and loss are NaN where nothing counts.
    """
    token_bytes = torch.as_tensor(np.asarray(token_bytes), dtype=torch.int64)
    nats = total = 0.0
    n_bytes = n_tokens = 0
    training = model.training
    model.eval()
    try:
        for x, y in tqdm(batches, desc=progress, leave=False, disable=None if progress else True):
            loss = model(x.to(device), y.to(device), reduction="none")
            loss = loss.to("cpu", torch.float64).view(-1)
            y = y.view(-1)
            counts = torch.where(y >= 0, token_bytes[y.clamp(min=0)], 0)
            nats += loss[counts > 0].sum().item()
            total += loss[y >= 0].sum().item()
            n_bytes += counts.sum().item()
            n_tokens += (y >= 0).sum().item()
    finally:
        model.train(training)
    sums = torch.tensor([nats, total, n_bytes, n_tokens], dtype=torch.float64)
    if world > 1:   # only then on the device, where a message can be sent
        sums = sums.to(device)
        all_sum([sums], world)
    nats, total = sums[0].item(), sums[1].item()
    n_bytes, n_tokens = int(sums[2]), int(sums[3])
    return {"bpb": nats / (math.log(2) * n_bytes) if n_bytes else math.nan,
            "loss": total / n_tokens if n_tokens else math.nan,
            "nats": nats, "bytes": n_bytes, "tokens": n_tokens}


def evaluate_splits(model, store, batch_size, max_tokens=0, device="cpu", rank=0, world=1):
    """evaluate_bpb on val and heldout, in rows of model.cfg.sequence_len.

    max_tokens: score only the first ones of each; 0 is all. The rows are split over `world` ranks,
    and every rank returns the whole result.
    Returns {"val_bpb", "val_loss", "val_nats", "val_bytes", "val_tokens"} and the five of heldout.
    """
    metrics, seq_len, limit = {}, model.cfg.sequence_len, max_tokens or None
    for name in ("val", "heldout"):
        tokens, label = getattr(store, name), name if rank == 0 else None
        batches = eval_batches(tokens, store.bos, batch_size, seq_len, limit, rank, world)
        found = evaluate_bpb(model, batches, store.token_bytes, device, label, world)
        metrics.update({f"{name}_{key}": value for key, value in found.items()})
    return metrics
