"""Text to memmapped token shards, in bounded memory.

    python prepare_data.py --dataset pystdlib                               # the Python standard library: no network
    python prepare_data.py --dataset text8 | tinystories                    # downloaded
    python prepare_data.py --dataset fineweb-edu --max_tokens 2.0B          # a prefix; the rest is not fetched
    python prepare_data.py --input book.txt 'notes/**/*.jsonl.gz' --tokenizer gpt2

Two steps. First the documents of all files, in order, are divided into train, val and test, and written to `parts/`:
ids, or for char and byte the UTF-8 itself. A part appears when it is whole, and says where in the corpus to go on, so a
run that was stopped loses one part at most. Then, when the whole vocabulary is known, the parts become shards, and
meta.json comes last. Neither the number of workers nor where a run was stopped has a say in the bytes.
"""
import argparse
import collections
import contextlib
import errno
import hashlib
import json
import math
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

from nanodepth.files import UserError, atomic_write, lock, run
from nanodepth.settings import Parser, amount
from nanodepth.data import SPLITS, ByteTokenizer, CharTokenizer, GPT2Tokenizer, load_data, shard_header, token_dtype
from nanodepth.documents import Corpus, File, character, input_files, kind_of, need, pieces, read
from nanodepth.tokenizer_json import HFTokenizer

SHARD_TOKENS = 100_000_000      # tokens of a full shard, as in llm.c
PART_BYTES = 2**23
PIECE = 2**20                   # bytes that are encoded, and written, at a time
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
                         f"hub, give files that you have to --input, or use --dataset pystdlib.") from None

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
    return Corpus("fineweb-edu", files, "gpt2", (0.99, 0.005, 0.005))

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

# ---------------------------------------------------------------------------------------------------------------------
# step one: documents to parts

def divide(corpus: Corpus, file: File, text: bytes, stretch: bool) -> list[tuple[int, bytes]]:
    """(split, text) of a document: its file's split; by position if it is one of few, or a stretch of a longer text;
    else the hash of its file's key, or of its content, decides."""
    if file.split:
        return [(SPLITS.index(file.split), text)]
    train, val, _ = corpus.fractions
    if not (stretch or corpus.few):
        u = int.from_bytes(hashlib.sha256(file.key.encode() if file.key else text).digest()[8:16]) / 2**64
        return [(1 if u < val else 0 if u < val + train else 2, text)]
    bounds = [0, *(character(text, round(len(text) * f)) for f in (train, train + val)), len(text)]
    return [(i, text[a:b]) for i, (a, b) in enumerate(pairwise(bounds)) if a < b and corpus.fractions[i]]

class Encoder:
    """Documents to what parts are made of, units: ids; or for char and byte UTF-8, in which 0xFF ends a document."""

    def __init__(self, corpus: Corpus, tokenizer: str, tok=None):
        self.corpus, self.kind, self.tok = corpus, tokenizer, tok               # tok: of ids; None for char and byte
        self.by_file = any(f.split for f in corpus.files)                       # else val and test end with train
        self.dtype = token_dtype(self.tok.vocab_size) if self.tok else np.dtype("u1")
        self.end = np.array(self.tok.end if self.tok else 0xFF, self.dtype).tobytes() if corpus.ends else b""

    def encode(self, text: bytes, most: int | None = None) -> tuple[bytes, int, int]:
        """The units of a text, or of its first `most` tokens, and how many tokens and bytes they are."""
        if self.kind == "byte":
            return text[:most], len(text[:most]), len(text[:most])
        if self.kind == "char":
            text = text if most is None else text.decode()[:most].encode()
            return text, sum(len(piece.decode()) for piece in pieces(text, PIECE)), len(text)
        raw = b"".join(self.tok.encode(piece.decode()).astype(self.dtype, copy=False).tobytes()
                       for piece in pieces(text, PIECE))
        ids = np.frombuffer(raw, self.dtype)[:most]
        size = len(text) if most is None else len(self.tok.decode_bytes(ids))
        return raw[:ids.nbytes], len(ids), size

    def job(self, documents, room: float = math.inf):
        """The units of train, val and test; of each how many tokens, documents and bytes; and whether train is full: it
        gets `room` tokens at most, and its last document is cut there."""
        units, counts, full, ends = ([], [], []), np.zeros((3, 3), np.int64).tolist(), False, bool(self.end)
        for document in documents:
            if full and not self.by_file:                                            # no more of val and test either
                break
            for split, text in divide(self.corpus, *document):
                if full and split == 0:
                    continue
                (raw, tokens, size), end, count = self.encode(text), self.end, counts[split]
                if split == 0 and count[0] + tokens + ends > room:
                    full = True
                    (raw, tokens, size), end = self.encode(text, int(room) - count[0]), b""
                units[split].extend((raw, end))
                count[0], count[1], count[2] = count[0] + tokens + bool(end), count[1] + bool(end), count[2] + size
        return [b"".join(u) for u in units], np.array(counts), full

def in_order(f, items, n: int):
    """(item, f(item[0])) for each item, in their order. `n` threads, which tiktoken and hashlib let run at once, work a
    few items ahead."""
    pool, waiting = ThreadPoolExecutor(n), collections.deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(f, item[0])))
            if len(waiting) > n + 1:
                item, future = waiting.popleft()
                yield item, future.result()
        for item, future in waiting:
            yield item, future.result()
    finally:
        pool.shutdown(cancel_futures=True)

def jobs(corpus: Corpus, parts):
    """Runs of documents, a million bytes each, from where the parts end: (documents, where to go on after them, bytes
    of the files read so far)."""
    job, size, before, (start, done) = [], 0, 0, parts.at
    for i, file in enumerate(corpus.files):
        if i < start or parts.full and file.split == "train":
            continue
        file.path = file.path or file.fetch()
        if file.sha256 and (got := digest(file.path)) != file.sha256:
            raise UserError(f"{file.path} is not the right file: its sha256 is {got[:16]}..., and should be "
                            f"{file.sha256[:16]}.... Delete it, and get it again.")
        for n, (text, stretch) in enumerate(read(file, corpus), 1):
            if n <= done and i == start or not text or text.isspace():
                continue
            job.append((file, text, stretch))
            size += len(text)
            if size >= PIECE or len(job) >= 2**14:
                yield job, (i, n), before + file.position()
                job, size = [], 0
                if parts.full and file.split == "train":
                    break
        before += os.path.getsize(file.path)
    yield job, (len(corpus.files), 0), before

def digest(path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

class Parts:
    """The finished parts: 000000.bin, the units of train, val and test, and 000000.json, written last: how many bytes
    each has, and how far it has come by then: `counts` (of each split its tokens, documents and bytes), `chars` (found
    so far), `at` (the file to go on with, how many of its documents are done), `full` (train has its max_tokens)."""

    def __init__(self, folder: Path, dtype):
        self.folder, self.dtype, self.n, self.units = folder, dtype, 0, []      # units: of the part to come
        self.counts, self.chars, self.at, self.full = np.zeros((3, 3), np.int64), "", (0, 0), False
        while self.path(self.n, "json").exists():
            self.n += 1
        if self.n:
            last = json.loads(self.path(self.n - 1, "json").read_text(encoding="utf-8"))
            self.counts, self.chars = np.array(last["counts"]), last["chars"]
            self.at, self.full = last["at"], last["full"]

    def path(self, k: int, suffix: str) -> Path:
        return self.folder / f"{k:06d}.{suffix}"

    def load(self, k: int, split: int) -> np.ndarray:
        sizes = json.loads(self.path(k, "json").read_text(encoding="utf-8"))["sizes"]
        count = sizes[split] // self.dtype.itemsize
        return np.memmap(self.path(k, "bin"), self.dtype, "r", sum(sizes[:split]), count) if count else np.array([])

    def append(self, units: list[bytes], counts: np.ndarray, at: tuple, look: bool) -> None:
        self.units.append(units)
        self.counts, self.at = self.counts + counts, at
        for text in slices(b"".join(units)) if look else ():
            known = "".join(filter(str.isascii, self.chars)).encode() + b"\xff"
            new = {*text.translate(None, known).decode()}.difference(self.chars)           # little is left to decode
            self.chars = "".join(sorted({*self.chars, *new})) if new else self.chars

    def finish(self) -> None:
        if not self.units:
            return
        splits = list(zip(*self.units))
        with atomic_write(self.path(self.n, "bin"), "wb") as f:
            for units in splits:
                f.writelines(units)
        write_json(self.path(self.n, "json"), {
            "sizes": [sum(map(len, units)) for units in splits], "counts": self.counts.tolist(), "chars": self.chars,
            "at": self.at, "full": self.full})
        self.n, self.units = self.n + 1, []

def slices(units):
    """Units a million at a time; of UTF-8 whole characters."""
    start, wide = 0, getattr(units, "itemsize", 1) > 1
    while start < len(units):
        stop = start + PIECE if wide else character(units, start + PIECE)
        yield units[start:stop]
        start = stop

def fill(corpus: Corpus, parts: Parts, encoder: Encoder, num_proc: int, max_tokens: int | None) -> None:
    """Read what is not in the parts yet: everything, or until train has its max_tokens."""
    total = max_tokens or sum(f.path.stat().st_size for f in corpus.files if f.path) or None
    size = 0
    with tqdm(total=total, desc="reading", unit=" tokens" if max_tokens else "B", unit_scale=True, disable=None,
              leave=False) as bar, contextlib.closing(in_order(encoder.job, jobs(corpus, parts), num_proc)) as done:
        for (documents, at, position), (units, counts, _) in done:
            room = (0 if parts.full else max_tokens - parts.counts[0, 0]) if max_tokens else math.inf
            if counts[0, 0] > room:
                units, counts, parts.full = encoder.job(documents, room)
            parts.append(units, counts, at, look=encoder.kind == "char")
            size += sum(map(len, units))
            bar.update((parts.counts[0, 0] if max_tokens else position) - bar.n)
            if parts.full and not encoder.by_file:
                parts.at = len(corpus.files), 0
                break
            if size >= PART_BYTES:
                parts.finish()
                size = 0
        parts.finish()

# ---------------------------------------------------------------------------------------------------------------------
# step two: parts to shards

def ids_of(parts: Parts, split: int, tok, bar):
    """The ids of a split, (n,), about a million at a time."""
    for k in range(parts.n):
        for units in slices(parts.load(k, split)):
            ids = tok.from_utf8(units) if parts.dtype.itemsize == 1 else units
            bar.update(len(ids))
            yield ids

def write_shards(out: Path, split: str, chunks, total: int, dtype) -> list[dict]:
    """Chunks of ids, (n,) each, as shards; returns what meta.json says of each."""
    shards, chunk = [], np.empty(0, dtype)
    for start in range(0, total, SHARD_TOKENS):
        path, left, sums = out / f"{split}_{len(shards):06d}.bin", min(SHARD_TOKENS, total - start), hashlib.sha256()
        shards.append({"file": path.name, "tokens": left})
        with atomic_write(path, "wb") as f:
            data = shard_header(left, dtype)
            while len(data):
                f.write(data)
                sums.update(data)
                chunk = chunk if len(chunk) or not left else next(chunks)
                data, chunk = np.ascontiguousarray(chunk[:left], dtype), chunk[left:]
                left -= len(data)
        shards[-1]["sha256"] = sums.hexdigest()
    return shards

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

def corpus_of(dataset, input: list[str], split, separator, text_key) -> Corpus:
    """The corpus that the flags name. UserError when they do not go together."""
    if bool(dataset) == bool(input):
        raise UserError(f"give one of --dataset ({', '.join(DATASETS)}) and --input FILE...")
    if input:
        fractions = fractions_of(split or "95/2.5/2.5")
        files, left_out = input_files(input)
        if left_out:
            most = ", ".join(f"{n} {suffix}" for suffix, n in left_out.most_common(5))
            print(f"{left_out.total()} files are not .txt, .jsonl or .parquet, and are not read ({most}); "
                  f"name them, as in '*.py', to have them read", file=sys.stderr)
        name = Path(input[0]).resolve().name.split(".")[0] if len(files) == 1 or os.path.isdir(input[0]) else "input"
        for written, meant in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
            separator = separator and separator.replace(written, meant)
        return Corpus(name or "input", files, fractions=fractions, separator=separator, text_key=text_key or "text")
    if dataset not in DATASETS:
        hint = "a folder of shards needs no preparation: train.py --dataset PATH" if os.path.isdir(dataset) else \
            "for files of your own: --input"
        raise UserError(f"there is no dataset {dataset!r}, only {', '.join(DATASETS)}; {hint}.")
    for flag, value in (("split", split), ("separator", separator), ("text_key", text_key)):
        if value is not None:
            raise UserError(f"--{flag} is for --input; the layout of {dataset} is known.")
    corpus = DATASETS[dataset]()
    if any(f.revision for f in corpus.files):
        need("huggingface_hub", f"--dataset {dataset}", "give files that you have to --input")
    if any(f.name.endswith(".parquet") for f in corpus.files):
        need("pyarrow", f"--dataset {dataset}", "choose another dataset")
    return corpus

def are_few(corpus: Corpus) -> bool:
    """Whether a hash would not divide the documents well: they are read until there are enough of them."""
    n = 0
    for f in corpus.files:
        names = f.members or [f.name]
        if not corpus.separator and all(kind_of(name) == "text" for name in names):     # one document each
            n += len(names)
            continue
        for text, _ in read(f, corpus):
            n += bool(text) and not text.isspace()
            if n >= FEW:
                return False
    return n < FEW

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

def make(corpus: Corpus, out: Path, tokenizer: str, tok, settings: dict, num_proc: int) -> dict:
    """Shards and meta.json in `out`, going on from the parts that are there when they are of the same. Returns meta."""
    folder, encoder = out / "parts", Encoder(corpus, tokenizer, tok)
    corpus.few = settings["dataset"] == "input" and are_few(corpus)
    while True:
        record = {"settings": settings, "code": code(), "fractions": corpus.fractions}
        try:
            same = json.loads((folder / "record.json").read_text(encoding="utf-8")) == json.loads(json.dumps(record))
        except (OSError, ValueError):
            same = False
        if not same:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            write_json(folder / "record.json", record)
        parts = Parts(folder, encoder.dtype)
        fill(corpus, parts, encoder, num_proc, settings["max_tokens"])
        tokens, (train, *rest) = parts.counts[:, 0], corpus.fractions
        if not settings["widen"] or min(tokens[1:]) >= WINDOWS or train < 0.5:
            break
        rest = [f * 1.2 if n < WINDOWS else f for f, n in zip(rest, tokens[1:])]
        corpus.fractions = (1 - sum(rest), *rest)                           # and once more, with more for val or test
    if not tokens[0]:
        where = str(corpus.files[0].path) + " and the other files" * (len(corpus.files) > 1)
        raise UserError(f"there is no text in {where}.")

    for path in out.glob("*_*.bin*"):
        path.unlink()                                                           # of a run that was stopped here
    if not tok:
        tok = ByteTokenizer() if tokenizer == "byte" else CharTokenizer(parts.chars + corpus.chars, corpus.ends)
    splits = {}
    with tqdm(total=int(tokens.sum()), desc="writing", unit=" tokens", unit_scale=True, disable=None,
              leave=False) as bar:
        for i, split in enumerate(SPLITS):
            chunks = ids_of(parts, i, tok, bar)
            splits[split] = dict(zip(("tokens", "documents", "bytes"), parts.counts[i].tolist()))
            splits[split]["shards"] = write_shards(out, split, chunks, int(tokens[i]), token_dtype(tok.vocab_size))
    meta = {"dataset": corpus.name, "tokenizer": tok.describe(), "vocab_size": tok.vocab_size, "splits": splits,
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
            max_tokens=None, split: str | None = None, separator: str | None = None,
            text_key: str | None = None) -> Path:
    """Make the data folder `out` (default data/NAME) and return its path; nothing is done when it is there already.

    The arguments are the flags of the command line. UserError for whatever the user can put right.
    """
    tokenizer = tokenizer and str(tokenizer)
    if tokenizer not in (None, "char", "byte", "gpt2") and not tokenizer.endswith(".json"):
        raise UserError(f"--tokenizer is {tokenizer!r}; it must be char, byte, gpt2 or the path of a tokenizer.json.")
    if num_proc is not None and num_proc < 1:
        raise UserError(f"--num_proc is {num_proc}; it must be at least 1.")
    num_proc = num_proc or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    max_tokens = amount(max_tokens, "--max_tokens") if max_tokens is not None else None
    input = [str(p) for p in ([input] if isinstance(input, (str, os.PathLike)) else input or [])]
    corpus = corpus_of(dataset, input, split, separator, text_key)
    tokenizer = tokenizer or corpus.tokenizer
    tok, named = None, tokenizer
    if tokenizer.endswith(".json"):
        tok = HFTokenizer.from_file(tokenizer)
        named = f"{tok.sha256[:16]} of {tok.vocab_size} tokens"
    # What the tokens depend on. A folder made with other settings is not taken for this one.
    settings = {"dataset": dataset or "input", "tokenizer": named, "max_tokens": max_tokens,
                "split": [round(f, 6) for f in corpus.fractions], "separator": corpus.separator,
                "widen": bool(input) and split is None and max_tokens is None, "text_key": corpus.text_key,
                "sources": sources(corpus)}
    out = Path(out or Path("data") / corpus.name)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; choose a folder.")
    if tokenizer == "gpt2" and not (out / "meta.json").exists():
        tok = GPT2Tokenizer()
        tok.bpe                                                                 # can it be had? before anything is made
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
                meta = make(corpus, out, tokenizer, tok, settings, num_proc)
            except UserError as e:
                if not isinstance(e, Unfinished) or not list((out / "parts").glob("0*.json")):
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

# ---------------------------------------------------------------------------------------------------------------------
# the command

def main(argv) -> None:
    p = Parser(description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS)
    p.add_argument("--dataset", metavar="NAME", help=", ".join(DATASETS))
    p.add_argument("--input", nargs="+", metavar="FILE",
                   help=".txt, .jsonl, .parquet, the first two also in .gz and .zip; folders; globs")
    p.add_argument("--tokenizer", help="char, byte, gpt2 or a tokenizer.json; by default what is usual for the dataset")
    p.add_argument("--out", help="the data folder; data/NAME when not given")
    p.add_argument("--num_proc", type=int, help="workers; all cores when not given")
    p.add_argument("--max_tokens", help="at most so many tokens in train, as 2.0B, 500M or 20000")
    p.add_argument("--split", help="--input: the shares of train, val and test; 95/2.5/2.5 when not given, and more "
                                   "for val and test where that is too little")
    p.add_argument("--separator", help="--input: what ends a document in a text file, as '<|endoftext|>' or '\\n\\n'")
    p.add_argument("--text_key", help="--input: the field or column with the text; 'text' when not given")
    prepare(**vars(p.parse_args(argv)))

if __name__ == "__main__":
    run(main)
