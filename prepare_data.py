"""Text to memmapped token shards, in bounded memory.

    python prepare_data.py --dataset pystdlib                               # the Python standard library: no network
    python prepare_data.py --dataset text8 | tinystories                    # downloaded
    python prepare_data.py --dataset fineweb-edu --max_tokens 2.0B          # a prefix; the rest is not fetched
    python prepare_data.py --input book.txt 'notes/**/*.jsonl.gz' --tokenizer gpt2
    python prepare_data.py --info data/pystdlib

Two steps. First the documents of all files, in order, are written to `parts/`, undivided: gpt2 tokens, or for char and
byte the UTF-8 itself, and a row of facts for each document. A part appears when it is finished, and says where in the
corpus to go on, so a run that was stopped loses one part at most. Then, when the whole corpus is known, the parts are
divided into train, val and test and written as shards, and meta.json comes last. Neither the number of workers nor
where a run was stopped has a say in the bytes.
"""
import argparse
import collections
import contextlib
import errno
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.files import UserError, atomic_write, lock, run, sync_folder
from nanodepth.settings import Parser, amount
from nanodepth.data import (HEADER_BYTES, SPLITS, ByteTokenizer, CharTokenizer, GPT2Tokenizer, load_data, shard_header,
                            token_dtype)
from nanodepth.documents import LONG, PIECE, Corpus, File, input_files, need, read
from nanodepth.tokenizer_json import HFTokenizer

SHARD_TOKENS = 100_000_000      # tokens of a full shard, as in llm.c
PART_BYTES, PART_ROWS = 2**26, 2**20
FEW = 200                       # with fewer documents each is cut by position: a hash would not divide them well
WINDOWS = 2 * 128 + 44          # tokens that val and test should have at least: two windows of 128, and a little room
STEADY = 10_000                 # tokens of a val split that tells small differences
OURS = re.compile(r"(train|val|test)_\d{6}\.bin(\.tmp)?|meta\.json(\.tmp)?|parts|\.lock")

# ---------------------------------------------------------------------------------------------------------------------
# corpora

class Unfinished(UserError):
    """The network's fault: what has been done is kept, and the same command goes on."""

@contextlib.contextmanager
def network(name):
    """What a network, a host or its library raises, as one sentence; what the disk raises stays as it is."""
    try:
        yield
    except Exception as e:
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        why = (str(e).strip() or type(e).__name__).splitlines()[0][:200]
        raise Unfinished(f"{name} did not come: {why} Run the same command again, set HF_ENDPOINT to a mirror of the "
                         f"hub, name a folder that has the file with --source, or use --dataset pystdlib.") from None

def hub(repo: str, revision: str, name: str, split=None) -> File:
    """A file of a data set on the Hugging Face hub, whose library keeps it, goes on with it and checks it."""
    def fetch():
        with network(f"{name} of {repo}"):
            from huggingface_hub import hf_hub_download
            return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision))
    return File(name, fetch=fetch, revision=f"{repo}@{revision}", split=split)

TEXT8 = "http://mattmahoney.net/dc/text8.zip"

def text8() -> Corpus:
    def fetch():
        path = Path("data/.downloads/text8.zip")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with network(TEXT8), urllib.request.urlopen(TEXT8, timeout=30) as answer, atomic_write(path, "wb") as f:
                shutil.copyfileobj(answer, f)
        return path
    spans = {"train": (0, 90_000_000), "val": (90_000_000, 95_000_000), "test": (95_000_000, 100_000_000)}
    sha256 = "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"
    files = [File("text8.zip", fetch=fetch, sha256=sha256, split=split, members=["text8"], span=span)
             for split, span in spans.items()]
    return Corpus("text8", files, fractions=(0.9, 0.05, 0.05), ends=False, chars=" abcdefghijklmnopqrstuvwxyz")

def tinystories() -> Corpus:
    place = "roneneldan/TinyStories", "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    files = [hub(*place, "TinyStoriesV2-GPT4-train.txt", split="train"), hub(*place, "TinyStoriesV2-GPT4-valid.txt")]
    return Corpus("tinystories", files, fractions=(0, 0.5, 0.5), separator="<|endoftext|>")

def fineweb_edu() -> Corpus:
    place = "HuggingFaceFW/fineweb-edu", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
    files = [hub(*place, f"sample/10BT/{i:03d}_00000.parquet") for i in range(14)]
    return Corpus("fineweb-edu", files, "gpt2", (0.99, 0.005, 0.005), id_key="id")

def pystdlib() -> Corpus:
    """The standard library's pure ASCII source files, in the order of their names' hashes.

    Left out: tests, vendored packages, the tables in encodings, the application idlelib, what newer Pythons lack.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = re.compile(r"(^|/)(tests?|idle_test|__pycache__|_bundled|site-packages|dist-packages|pip|setuptools)/"
                      r"|^(encodings|idlelib|lib2to3|distutils|config-[^/]*)/|(^|/)_sysconfigdata")
    files = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        with contextlib.suppress(OSError):                                      # unreadable: as if it were not there
            if not skip.search(name) and path.read_bytes().isascii():
                files.append(File(name, path, key=name))
    if not files:
        raise UserError(f"this Python has no source files of its standard library in {root}. Use --input FILE.")
    files.sort(key=lambda f: hashlib.sha256(f.name.encode()).digest())
    return Corpus("pystdlib", files, fractions=(0.9, 0.05, 0.05))

DATASETS = {"pystdlib": pystdlib, "text8": text8, "tinystories": tinystories, "fineweb-edu": fineweb_edu}

def from_source(corpus: Corpus, source: str) -> None:
    """Let a downloaded corpus be read from a folder on this machine."""
    for f in corpus.files:
        places = [Path(source, f.name), Path(source, Path(f.name).name)]
        f.path = next((p for p in places if p.is_file()), None)
        if f.path is None:
            raise UserError(f"--source {source}: there is no {f.name} in this folder.")

# ---------------------------------------------------------------------------------------------------------------------
# step one: documents to parts

ROW = np.dtype([("u", "<f8"), ("split", "i1"), ("last", "?"), ("tokens", "<i8"), ("bytes", "<i8")])

def bpe_of(tokenizer: str):
    """The tokenizer that is called gpt2, or that lies in a tokenizer.json; None for char and byte."""
    if tokenizer.endswith(".json"):
        return HFTokenizer.from_file(tokenizer)
    return GPT2Tokenizer() if tokenizer == "gpt2" else None

class Units:
    """What parts are made of: a BPE's tokens; or for char and byte UTF-8, in which 0xFF ends a document."""

    def __init__(self, tokenizer: str, bpe):
        self.kind, self.bpe = tokenizer, bpe
        if bpe:
            texts = bpe.token_bytes
            self.dtype, self.end = token_dtype(bpe.vocab_size), bpe.end
            self.lengths = np.array([len(t) for t in texts])
            self.inside = np.array([0x80 <= t[0] < 0xC0 if t else False for t in texts])
        else:
            self.dtype, self.end = np.dtype("u1"), 0xFF
            self.inside = np.arange(256) & 0xC0 == 0x80                         # goes on with a character begun before

    def encode(self, job, ends: bool) -> tuple[bytes, np.ndarray]:
        """The units of a job, as bytes, and a row for each of its pieces."""
        splits, keys, texts, lasts = zip(*job)
        rows, end = np.zeros(len(job), ROW), np.array([self.end], self.dtype).tobytes()
        hashes = b"".join(hashlib.sha256(t if k is None else k).digest() for k, t in zip(keys, texts))
        rows["u"] = np.frombuffer(hashes, ">u8")[1::4] / 2**64                  # bits 64 to 127
        rows["split"], rows["last"], rows["bytes"] = splits, lasts, [len(t) for t in texts]
        units = [self.bpe.encode(t.decode()) for t in texts] if self.bpe else texts
        rows["tokens"] = [len(t.decode()) for t in texts] if self.kind == "char" else [len(u) for u in units]
        if ends:
            rows["tokens"] += rows["last"]
            units = [x for u, last in zip(units, lasts) for x in ((u, end) if last else (u,))]
        return b"".join(units), rows

    def at_character(self, units: np.ndarray, i: int) -> int:
        """i, or where the next character begins."""
        while i < len(units) and self.inside[units[i]]:
            i += 1
        return min(i, len(units))

    def cut(self, units: np.ndarray, room: int) -> np.ndarray:
        """What of the units is at most so many tokens."""
        if self.kind != "char":
            return units[:room]
        starts = np.flatnonzero(~self.inside[units])
        return units[:starts[room]] if room < len(starts) else units

    def tokens(self, units: np.ndarray) -> int:
        return len(units) - int(np.count_nonzero(self.inside[units]) if self.kind == "char" else 0)

    def count(self, units: np.ndarray) -> tuple[int, int]:
        """Documents that end in the units, and bytes of text."""
        text = units[units != self.end]
        return len(units) - len(text), int(self.lengths[text].sum()) if self.bpe else len(text)

def in_order(f, items, n: int):
    """(f(item), *rest) for each (item, *rest), in their order. `n` threads, which tiktoken and hashlib let run at once,
    work a few items ahead."""
    pool, waiting = ThreadPoolExecutor(n), collections.deque()
    try:
        for item, *rest in items:
            waiting.append((pool.submit(f, item), *rest))
            if len(waiting) > 2 * n:
                future, *rest = waiting.popleft()
                yield future.result(), *rest
        for future, *rest in waiting:
            yield future.result(), *rest
    finally:
        pool.shutdown(cancel_futures=True)

def jobs(corpus: Corpus, start: list, is_full):
    """Runs of pieces, a million bytes each: (pieces, where to go on after them, bytes of the files read so far).

    `start`: the file to go on with, and how many of its documents are done.
    """
    job, size, before = [], 0, 0
    for i, file in enumerate(corpus.files):
        if i < start[0] or is_full() and file.split == "train":
            continue
        file.path = file.path or file.fetch()
        if file.sha256 and (got := digest(file.path)) != file.sha256:
            raise UserError(f"{file.path} is not the right file: its sha256 is {got[:16]}..., and should be "
                            f"{file.sha256[:16]}.... Delete it, and get it again.")
        done, skip, first = 0, start[1] if i == start[0] else 0, True
        split = SPLITS.index(file.split) if file.split else -1
        for key, text, last in read(file, corpus):
            if first and last and (not text or text.isspace()):
                continue                                                        # nothing but white space
            first, done = last, done + last
            if done - last < skip:
                continue
            job.append((split, key, text, last))
            size += len(text)
            if size >= PIECE or len(job) >= 2**14:
                yield job, [i, done], before + file.position()
                job, size = [], 0
                if last and file.split == "train" and is_full():
                    break
        before += os.path.getsize(file.path)
    if job:
        yield job, [len(corpus.files), 0], before

def digest(path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

class Parts:
    """The finished parts: for each k a file k.bin of units and, written last, k.npz: its rows, and where to go on."""

    def __init__(self, folder: Path, dtype, fractions: tuple):
        self.folder, self.dtype, self.fractions = folder, dtype, fractions
        self.n, self.at, self.file, self.rows, self.new = 0, [0, 0], None, [], []
        self.documents = self.tokens = 0                                        # tokens: of train, at least
        while self.path(self.n, "npz").exists():
            with np.load(self.path(self.n, "npz")) as saved:
                self.at = saved["at"].tolist()
            self.count(self.load(self.n)[0])
            self.n += 1

    def path(self, k: int, suffix: str) -> Path:
        return self.folder / f"{k:06d}.{suffix}"

    def load(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """A row for each document of part k, and its units, mapped."""
        with np.load(self.path(k, "npz")) as saved:
            return documents_of(saved["rows"]), np.memmap(self.path(k, "bin"), self.dtype, "r").view(np.ndarray)

    def count(self, documents: np.ndarray) -> None:
        code, tokens = split_of(documents, self.fractions, few=False), documents["tokens"]
        self.documents += len(documents)
        self.tokens += int(tokens[code == 0].sum() + tokens[code == CUT].sum() * self.fractions[0])

    def append(self, data: bytes, rows: np.ndarray, at: list) -> None:
        self.file = self.file or open(self.path(self.n, "tmp"), "wb")
        save(self.file, data)
        self.new.append(rows)
        if rows["last"][-1]:                                                    # no part ends within a document
            new, self.new, self.at = np.concatenate(self.new), [], at
            self.count(documents_of(new))
            self.rows.append(new)
            if self.file.tell() >= PART_BYTES or sum(map(len, self.rows)) >= PART_ROWS:
                self.finish()

    def finish(self) -> None:
        if self.file:
            finish(self.file, self.path(self.n, "bin"))
            with atomic_write(self.path(self.n, "npz"), "wb") as f:
                np.savez(f, rows=np.concatenate(self.rows), at=self.at)
            self.n, self.file, self.rows = self.n + 1, None, []

def save(f, data) -> None:
    """Write, with the file's name in the error: a write says nothing of where the disk is full."""
    try:
        f.write(data)
    except OSError as e:
        raise OSError(e.errno, e.strerror, f.name) from None

def finish(f, path: Path) -> None:
    """Give a temporary file that is wholly written its name."""
    try:
        f.flush()
        os.fsync(f.fileno())
    except OSError as e:
        raise OSError(e.errno, e.strerror, f.name) from None
    f.close()
    os.replace(f.name, path)

def fill(corpus: Corpus, parts: Parts, units: Units, num_proc: int) -> None:
    """Read what is not in the parts yet: everything, or until train has its max_tokens."""
    def is_full():
        return corpus.max_tokens and parts.tokens >= corpus.max_tokens and parts.documents >= FEW
    all_at_once = not any(f.split for f in corpus.files)                        # train full: then val and test end too
    total = corpus.max_tokens or sum(f.path.stat().st_size for f in corpus.files if f.path) or None
    unit = " tokens" if corpus.max_tokens else "B"
    encode = functools.partial(units.encode, ends=corpus.ends)
    if is_full() and all_at_once:
        return
    with tqdm(total=total, desc="reading", unit=unit, unit_scale=True, disable=None, leave=False) as bar, \
            contextlib.closing(in_order(encode, jobs(corpus, parts.at, is_full), num_proc)) as encoded:
        for (data, rows), at, position in encoded:
            parts.append(data, rows, at)
            bar.update((parts.tokens if corpus.max_tokens else position) - bar.n)
            if is_full() and all_at_once:
                break
        parts.finish()

# ---------------------------------------------------------------------------------------------------------------------
# step two: parts to shards

CUT = 3                         # instead of a split: this document is cut by position

def documents_of(rows: np.ndarray) -> np.ndarray:
    """A row for each document, from a row for each of its pieces; the first piece decides its split."""
    stops = np.flatnonzero(rows["last"])
    starts = np.concatenate([[0], stops[:-1] + 1])[:len(stops)]
    documents = rows[starts]
    for name in ("tokens", "bytes"):
        documents[name] = np.add.reduceat(rows[name], starts) if len(starts) else 0
    return documents

def split_of(documents: np.ndarray, fractions: tuple, few: bool) -> np.ndarray:
    """0, 1, 2 or CUT for each: its file's split; by position when it is long or one of few; else its hash decides."""
    u, given, (train, val, _) = documents["u"], documents["split"], fractions
    by_hash = np.where(u < val, 1, np.where(u < val + train, 0, 2))
    return np.where(given >= 0, given, np.where(few | (documents["bytes"] > LONG), CUT, by_hash))

def settle(corpus: Corpus, parts: Parts) -> bool:
    """Whether there are only a few documents. corpus.fractions become such that val and test are not too small."""
    few = sum(np.count_nonzero(parts.load(k)[0]["split"] < 0) for k in range(parts.n)) < FEW
    while corpus.widen:
        tokens = np.zeros(3)
        for k in range(parts.n):
            documents = parts.load(k)[0]
            code = split_of(documents, corpus.fractions, few)
            tokens += [documents["tokens"][code == s].sum() for s in range(3)]
            tokens += documents["tokens"][code == CUT].sum() * np.array(corpus.fractions)
        train, *rest = corpus.fractions
        if min(tokens[1:]) >= WINDOWS or train < 0.5:
            break
        rest = [f * 1.2 if n < WINDOWS else f for f, n in zip(rest, tokens[1:])]
        corpus.fractions = (1 - sum(rest), *rest)
    return few

def divided(corpus: Corpus, parts: Parts, units: Units, few: bool):
    """(split, units) of everything that the shards hold, in order, a million units of whole characters at a time."""
    room, full = corpus.max_tokens or float("inf"), False
    end = np.array([units.end] if corpus.ends else [], units.dtype)

    def chunks(split, data):
        nonlocal room
        start = 0
        while start < len(data):
            stop = units.at_character(data, start + PIECE)
            chunk, start = data[start:stop], stop
            if split == 0 and corpus.max_tokens:
                chunk = units.cut(chunk, room)
                room -= units.tokens(chunk)
            if len(chunk):
                yield split, chunk

    for k in range(parts.n):
        documents, data = parts.load(k)
        stops = np.cumsum(documents["tokens"] if units.bpe else documents["bytes"] + corpus.ends)
        code = split_of(documents, corpus.fractions, few)
        if corpus.max_tokens:
            taken = np.cumsum(np.where(code == 0, documents["tokens"], 0))
            over = np.flatnonzero((code == 0) & (full | (taken > room)))
            if len(over):
                first = over[0] + (room == corpus.max_tokens and taken[over[0]] == documents["tokens"][over[0]])
                code[first:][code[first:] == 0] = -1                            # a first document alone is not left out
                if not any(f.split for f in corpus.files):
                    code[first:] = -1
                full = True
        edges = [0, *(np.flatnonzero(np.diff(code) | (code[1:] == CUT)) + 1), len(code)]
        for a, b in pairwise(edges):
            start, stop = stops[a - 1] if a else 0, stops[b - 1]
            if code[a] == CUT:
                text = data[start:stop - len(end)]
                inner = (round(len(text) * f) for f in np.cumsum(corpus.fractions)[:2])
                bounds = [0, *(units.at_character(text, i) for i in inner), len(text)]
                for split, (i, j) in enumerate(pairwise(bounds)):
                    if i < j and corpus.fractions[split]:
                        yield from chunks(split, text[i:j])
                        yield from chunks(split, end)
            elif code[a] >= 0:
                yield from chunks(code[a], data[start:stop])

def characters(chunks) -> str:
    """Every character in UTF-8 chunks (n,) uint8: the vocabulary of --tokenizer char."""
    known, found = b"\xff", set()
    for _, chunk in chunks:
        found.update(chunk.tobytes().translate(None, known).decode())           # the known ones deleted: little is left
        known = b"\xff" + "".join(filter(str.isascii, found)).encode()
    return "".join(sorted(found))

class Writer:
    """The shards of one split."""

    def __init__(self, folder: Path, split: str, dtype):
        self.folder, self.split, self.dtype, self.file, self.size = folder, split, dtype, None, 0
        self.counts = {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}

    def write(self, ids: np.ndarray) -> None:
        while len(ids):
            if self.file is None:
                name = f"{self.split}_{len(self.counts['shards']):06d}.bin.tmp"
                self.file, self.size = open(self.folder / name, "wb"), 0
                save(self.file, bytes(HEADER_BYTES))                            # zeros: no shard until it is finished
            room = SHARD_TOKENS - self.size
            part, ids = ids[:room], ids[room:]
            save(self.file, np.ascontiguousarray(part, self.dtype))
            self.size += len(part)
            if self.size == SHARD_TOKENS:
                self.finish()

    def finish(self) -> None:
        """Put the header in front of the open shard and give it its name."""
        if self.file:
            self.file.seek(0)
            save(self.file, shard_header(self.size, self.dtype))
            path = Path(self.file.name.removesuffix(".tmp"))
            finish(self.file, path)
            self.counts["shards"].append({"file": path.name, "tokens": self.size, "sha256": digest(path)})
            self.counts["tokens"] += self.size
            self.file = None

def write_shards(corpus: Corpus, out: Path, parts: Parts, units: Units):
    """Everything in the parts as shards. Returns the tokenizer, and the counts of each split."""
    for path in out.glob("*_*.bin*"):
        path.unlink()                                                           # of a run that was stopped here
    few = settle(corpus, parts)
    if units.bpe:
        tok = units.bpe
    elif units.kind == "byte":
        tok = ByteTokenizer()
    else:
        tok = CharTokenizer(corpus.chars or characters(divided(corpus, parts, units, few)), corpus.ends)
    writers = [Writer(out, s, token_dtype(tok.vocab_size)) for s in SPLITS]
    size = sum(parts.path(k, "bin").stat().st_size for k in range(parts.n))
    with tqdm(total=size, desc="writing", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for split, chunk in divided(corpus, parts, units, few):
            writer = writers[split]
            documents, length = units.count(chunk)
            writer.counts["documents"] += documents
            writer.counts["bytes"] += length
            writer.write(chunk if units.bpe else tok.from_utf8(chunk))
            bar.update(chunk.nbytes)
    for writer in writers:
        writer.finish()
    sync_folder(out)
    return tok, {s: w.counts for s, w in zip(SPLITS, writers)}

# ---------------------------------------------------------------------------------------------------------------------
# a data folder

def fractions_of(text: str) -> tuple:
    """'95/2.5/2.5' (or with blanks, or as 0.95/0.025/0.025) as three fractions that add up to 1."""
    try:
        parts = [float(x) for x in re.split(r"[/,: ]+", text.strip())]
        if len(parts) != 3 or min(parts) < 0 or parts[0] <= 0 or not sum(parts) < float("inf"):
            raise ValueError
    except ValueError:
        raise UserError(f"--split is {text!r}; it must be three numbers, for train, val and test, "
                        f"as 95/2.5/2.5.") from None
    return tuple(p / sum(parts) for p in parts)

def corpus_of(dataset, input: list[str], split, separator, text_key, source) -> Corpus:
    """The corpus that the flags name. UserError when they do not go together."""
    if bool(dataset) == bool(input):
        raise UserError(f"give one of --dataset ({', '.join(DATASETS)}) and --input FILE...")
    if input:
        if source:
            raise UserError("--source is for --dataset; --input names the files themselves.")
        fractions = fractions_of(split or "95/2.5/2.5")
        files, left_out = input_files(input)
        if left_out:
            most = ", ".join(f"{n} {suffix}" for suffix, n in left_out.most_common(5))
            print(f"{left_out.total()} files are not .txt, .jsonl or .parquet, and are not read ({most}); "
                  f"name them, as in '*.py', to have them read", file=sys.stderr)
        name = Path(input[0]).resolve().name.split(".")[0] if len(files) == 1 or os.path.isdir(input[0]) else "input"
        if separator:
            separator = separator.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")
        return Corpus(name or "input", files, fractions=fractions, separator=separator, text_key=text_key or "text")
    if dataset not in DATASETS:
        hint = "a folder of shards needs no preparation: train.py --dataset PATH" if os.path.isdir(dataset) else \
            "for files of your own: --input"
        raise UserError(f"there is no dataset {dataset!r}, only {', '.join(DATASETS)}; {hint}.")
    for flag, value in (("split", split), ("separator", separator), ("text_key", text_key)):
        if value is not None:
            raise UserError(f"--{flag} is for --input; the layout of {dataset} is known.")
    if dataset == "pystdlib" and source:
        raise UserError("--source is for datasets that are downloaded; pystdlib is on this machine.")
    corpus = DATASETS[dataset]()
    if source:
        from_source(corpus, source)
    elif any(f.revision for f in corpus.files):
        need("huggingface_hub", f"--dataset {dataset}", "name a folder that has its files with --source")
    if any(f.name.endswith(".parquet") for f in corpus.files):
        need("pyarrow", f"--dataset {dataset}", "choose another dataset")
    return corpus

def sources(corpus: Corpus) -> str:
    """A digest of what is read: the files' names, and of those on this machine the content; of a long one its first
    million bytes, its size and the time of its last change."""
    all_files = hashlib.sha256()
    for f in corpus.files:
        facts = [f.name, f.revision, f.key, f.split, f.span, f.members]
        if f.path:
            with open(f.path, "rb") as raw:
                status = os.fstat(raw.fileno())
                facts += [status.st_size, status.st_mtime_ns if status.st_size > 2**20 else 0]
                all_files.update(raw.read(2**20))
        all_files.update(repr(facts).encode(errors="surrogateescape"))
    return all_files.hexdigest()[:16]

def code() -> str:
    """A digest of the code that decides the bytes: parts of another version are not gone on with."""
    import nanodepth.data, nanodepth.documents, nanodepth.tokenizer_json
    files = (__file__, nanodepth.data.__file__, nanodepth.documents.__file__, nanodepth.tokenizer_json.__file__)
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()[:16]

def make(corpus: Corpus, out: Path, tokenizer: str, bpe, settings: dict, num_proc: int) -> dict:
    """Shards and meta.json in `out`, going on from the parts that are there when they are of the same. Returns meta."""
    units = Units(tokenizer, bpe)
    folder, record = out / "parts", {"settings": settings, "code": code()}
    try:
        same = json.loads((folder / "record.json").read_text(encoding="utf-8")) == record
    except (OSError, ValueError):
        same = False
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_json(folder / "record.json", record)
    parts = Parts(folder, units.dtype, corpus.fractions)
    fill(corpus, parts, units, num_proc)
    tok, counts = write_shards(corpus, out, parts, units)
    if not counts["train"]["tokens"]:
        where = str(corpus.files[0].path) + " and the other files" * (len(corpus.files) > 1)
        raise UserError(f"there is no text in {where}.")
    meta = {"dataset": corpus.name, "tokenizer": tok.describe(), "vocab_size": tok.vocab_size, "splits": counts,
            "fractions": [round(f, 6) for f in corpus.fractions], "settings": settings}
    if corpus.name == "pystdlib":
        meta["python"] = platform.python_version()
    write_json(out / "meta.json", meta)
    shutil.rmtree(folder, ignore_errors=True)
    return meta

def write_json(path: Path, value: dict) -> None:
    with atomic_write(path) as f:
        json.dump(value, f, indent=1)
        f.write("\n")

def same_again(out: Path, settings: dict) -> None:
    """Say that `out` is ready, or raise: it was made with other settings, or from other files."""
    meta = load_data(out).meta
    shutil.rmtree(out / "parts", ignore_errors=True)                            # stopped between meta.json and this
    old = meta.get("settings", {})
    for k in {**settings, **old}:
        if old.get(k) != settings.get(k):
            made = "from other files, or they have changed" if k == "sources" else \
                f"with {k} {old.get(k)!r}, and this is {settings.get(k)!r}"
            raise UserError(f"{out} is there already, made {made}. Choose another --out, or delete that folder.")
    print(f"{out} is there already: {summary(meta)}")

def summary(meta: dict) -> str:
    counts = ", ".join(f"{s} {meta['splits'][s]['tokens']:,}" for s in SPLITS)
    return f"{meta['tokenizer']['kind']} level, vocabulary {meta['vocab_size']:,}, tokens: {counts}"

def prepare(dataset: str | None = None, input=None, tokenizer: str | None = None, out=None, num_proc: int | None = None,
            max_tokens=None, split: str | None = None, separator: str | None = None, text_key: str | None = None,
            errors: str = "strict", source: str | None = None) -> Path:
    """Make the data folder `out` (default data/NAME) and return its path; nothing is done when it is there already.

    The arguments are the flags of the command line. UserError for whatever the user can put right.
    """
    tokenizer = tokenizer and str(tokenizer)
    if tokenizer not in (None, "char", "byte", "gpt2") and not tokenizer.endswith(".json"):
        raise UserError(f"--tokenizer is {tokenizer!r}; it must be char, byte or gpt2, or a path of a "
                        f"tokenizer.json.")
    max_tokens = amount(max_tokens, "--max_tokens") if max_tokens is not None else None
    if num_proc is None:
        num_proc = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if num_proc < 1:
        raise UserError(f"--num_proc is {num_proc}; it must be at least 1.")
    input = [str(p) for p in ([input] if isinstance(input, (str, os.PathLike)) else input or [])]
    corpus = corpus_of(dataset, input, split, separator, text_key, source)
    corpus.errors, corpus.max_tokens, tokenizer = errors, max_tokens, tokenizer or corpus.tokenizer
    corpus.widen = bool(input) and split is None and max_tokens is None
    # What the tokens depend on. A folder made with other settings is not taken for this one.
    bpe = bpe_of(tokenizer)
    named = f"{bpe.sha256[:16]} of {bpe.vocab_size} tokens" if tokenizer.endswith(".json") else tokenizer
    settings = {"dataset": dataset or "input", "tokenizer": named, "max_tokens": max_tokens,
                "split": [round(f, 6) for f in corpus.fractions], "widen": corpus.widen, "errors": errors,
                "separator": corpus.separator, "text_key": corpus.text_key, "sources": sources(corpus)}

    out = Path(out or Path("data") / corpus.name)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; choose a folder.")
    if tokenizer == "gpt2" and not (out / "meta.json").exists():
        bpe.load()                                                              # can it be had? before anything is made
    new = [p for p in (out, *out.parents) if not p.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with lock(out, f"another run is preparing {out}. Wait for it, or choose another --out."):
            if (out / "meta.json").exists():
                same_again(out, settings)
                return out
            strange = sorted(p.name for p in out.iterdir() if not OURS.fullmatch(p.name)
                             or p.suffix == ".bin" and not (out / "parts").exists())
            if strange:
                raise UserError(f"{out} holds other files ({strange[0]}). Choose another --out, or empty it.")
            try:
                meta = make(corpus, out, tokenizer, bpe, settings, num_proc)
            except UserError as e:
                if not isinstance(e, Unfinished) or not list((out / "parts").glob("*.npz")):
                    for path in out.glob("*.bin*"):
                        path.unlink()
                    shutil.rmtree(out / "parts", ignore_errors=True)
                raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; the same command goes on with {out}") from None
    except UserError:
        with contextlib.suppress(OSError):                                      # leave no empty folder behind
            for folder in new:
                folder.rmdir()
        raise
    print(f"{out}: {summary(meta)}")
    tokens = meta["splits"]["val"]["tokens"]
    if corpus.fractions[1] and tokens < STEADY:
        print(f"{out}: val has only {tokens:,} tokens, so its loss will not be steady. Give more text, or more of it "
              f"to val with --split 80/10/10.", file=sys.stderr)
    return out

def info(path) -> None:
    """Print what a data folder holds. UserError when a shard is not what meta.json says."""
    data = load_data(path)
    splits = data.meta.get("splits", {})
    name = data.meta.get("dataset", "shards made elsewhere")
    kind = data.tokenizer.describe()["kind"] if data.tokenizer else "unknown"
    print(f"{data.path}: {name}, {kind} level, vocabulary {data.vocab_size or 'unknown'}")
    for s in SPLITS:
        facts = "".join(f", {splits[s][k]:,} {k}" for k in ("documents", "bytes") if s in splits)
        print(f"{s:<5} {len(getattr(data, s) or ()):>15,} tokens{facts}")
    shards = [shard for s in splits.values() for shard in s["shards"]]
    bad = [shard["file"] for shard in tqdm(shards, desc="checking", disable=None, leave=False)
           if digest(data.path / shard["file"]) != shard["sha256"]]
    if bad:
        raise UserError(f"{data.path}: {', '.join(bad)} is not what meta.json says (its sha256 differs). "
                        f"Delete the folder and prepare it again.")
    print("every shard matches meta.json" if shards else "every shard has the length that its header says")
    if data.tokenizer:
        with contextlib.suppress(UserError):                                    # gpt2 without its ranks
            print(f"train begins: {data.tokenizer.decode(data.train.window(0, min(len(data.train), 100)))!r}")

# ---------------------------------------------------------------------------------------------------------------------
# the command

def main(argv) -> None:
    p = Parser(description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS)
    p.add_argument("--dataset", metavar="NAME", help=", ".join(DATASETS))
    p.add_argument("--input", nargs="+", metavar="FILE",
                   help=".txt, .jsonl, .parquet, the first two also in .gz and .zip; folders; globs")
    p.add_argument("--tokenizer", help="char, byte, gpt2, or the path of a tokenizer.json; by default what is usual for "
                                       "the dataset")
    p.add_argument("--out", help="the data folder; data/NAME when not given")
    p.add_argument("--num_proc", type=int, help="workers; all cores when not given")
    p.add_argument("--max_tokens", help="at most so many tokens in train, as 2.0B, 500M or 20000; whole documents")
    p.add_argument("--split", help="--input: the shares of train, val and test; 95/2.5/2.5 when not given, and more "
                                   "for val and test where that is too little")
    p.add_argument("--separator", help="--input: what ends a document in a text file, as '<|endoftext|>' or '\\n\\n'")
    p.add_argument("--text_key", help="--input: the field or column with the text; 'text' when not given")
    p.add_argument("--errors", choices=("strict", "replace"),
                   help="what to do with bytes that are not UTF-8; strict when not given")
    p.add_argument("--source", metavar="FOLDER", help="--dataset: where its files lie on this machine")
    p.add_argument("--info", metavar="FOLDER", help="print what a data folder holds, and check it")
    args = vars(p.parse_args(argv))
    if "info" in args:
        if len(args) > 1:
            raise UserError("--info stands alone: it reads a folder and makes none.")
        return info(args["info"])
    prepare(**args)

if __name__ == "__main__":
    run(main)
