"""Text to memmapped token shards, in bounded memory.

    python prepare_data.py --dataset pystdlib                               # the Python standard library: no network
    python prepare_data.py --dataset text8 | tinystories                    # downloaded, checked
    python prepare_data.py --dataset fineweb-edu --max_tokens 2.0B          # a prefix; the rest is not fetched
    python prepare_data.py --input book.txt 'notes/**/*.jsonl.gz' --tokenizer gpt2
    python prepare_data.py --info data/pystdlib

Three steps: documents.py reads any corpus as a stream of documents, each with its split; threads encode jobs of about
a million characters (tiktoken and numpy let go of Python's lock while they work); shards are written in the order of
the jobs. So the bytes do not depend on the number of workers, and a run that was stopped goes on from its last saved
job. What is written is described in data.py; how it is fetched, in download.py.
"""
import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.files import UserError, atomic_write, run
from nanodepth.settings import Parser
from nanodepth.data import (HEADER_BYTES, SPLITS, ByteTokenizer, CharTokenizer, GPT2Tokenizer, load_data, shard_header,
                  token_dtype, tokenizer_from)
from nanodepth.documents import KINDS, PACKED, Corpus, File, by_position, input_files, jobs, kind_of, pieces
from nanodepth.download import Unfinished, check_sum, digest, fetch, length, lock, save

SHARD_TOKENS = 100_000_000      # tokens of a full shard, as in llm.c
SAVE_SECONDS = 10               # between two saves of the progress
OURS = re.compile(r"(train|val|test)_\d{6}\.bin(\.tmp)?|(meta|progress)\.json(\.tmp)?|input\.tmp|\.lock")

# ---------------------------------------------------------------------------------------------------------------------
# corpora

def hub(repo: str, revision: str, name: str, **kwargs) -> File:
    return File(name, url=f"https://huggingface.co/datasets/{repo}/resolve/{revision}/{name}", **kwargs)

def text8() -> Corpus:
    zip_file = File("text8.zip", url="http://mattmahoney.net/dc/text8.zip", size=31_344_016,
                    sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
                    unpacked=(100_000_000, "3bea1919949baf155f99411df5fada7e"))
    return Corpus("text8", [zip_file], fractions=(0.9, 0.05, 0.05), ends=False,
                  chars=" abcdefghijklmnopqrstuvwxyz")

def tinystories() -> Corpus:
    place = "roneneldan/TinyStories", "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    files = [hub(*place, "TinyStoriesV2-GPT4-train.txt", split="train"), hub(*place, "TinyStoriesV2-GPT4-valid.txt")]
    return Corpus("tinystories", files, fractions=(0, 0.5, 0.5), separator="<|endoftext|>")

def fineweb_edu() -> Corpus:
    place = "HuggingFaceFW/fineweb-edu", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
    files = [hub(*place, f"sample/10BT/{i:03d}_00000.parquet") for i in range(14)]
    files[-1].size, files[-1].sha256 = 540_632_672, "b393f51fefab26cd6f4c8f65707c1924f6666c4961a0ebebe04bb57f7ec832de"
    return Corpus("fineweb-edu", files, "gpt2", (0.99, 0.005, 0.005), id_key="id", total=28_518_193_415)

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

def locate(file: File, source: str | None, cache: Path, check: bool) -> Path:
    """The path of a corpus's file: found in the folder (or as the file) --source, or downloaded to the cache."""
    name = Path(file.name).name
    bare = source and names_a_file(source) and Path(source).suffix != Path(name).suffix         # not packed
    size, known = (file.unpacked if bare else (file.size, file.sha256)) if check else (None, None)
    if source and "://" not in source:
        path = local(file, source)
        if path is None:
            raise Unfinished(f"--source {source}: there is no such file or folder." if not os.path.isdir(source) else
                             f"--source {source}: there is no {file.name} in this folder. --no_check goes on without.")
        if size and length(path) != size:
            raise UserError(f"{path} has {length(path):,} bytes, and the right file has {size:,}. "
                            f"Get the right one, or take this as it is with --no_check.")
        check_sum(path, path, known)
        return path
    url = file.url
    if source:                                                                  # a file, or where the files are
        url = source if names_a_file(source) else f"{source.rstrip('/')}/{file.name}"
        cache = cache.with_name(f"{cache.name}-{hashlib.sha256(source.encode()).hexdigest()[:8]}")
    path = cache / name
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with lock(cache, "downloading to"):
            if not path.exists():
                fetch(url, path, size, known, check)
    finally:
        remove_empty([cache, cache.parent])
    return path

def local(file: File, source: str) -> Path | None:
    """Where a file is in the folder `source`: under its whole name or its last part; or `source` itself is the file."""
    folder = Path(source)
    places = [folder / file.name, folder / Path(file.name).name] if folder.is_dir() else [folder]
    return next((p for p in places if p.is_file()), None)

def names_a_file(source: str) -> bool:
    """A mirror is either one file or the place, a folder or URL, that has the files under their names."""
    return Path(source).suffix in (*PACKED, *KINDS) if "://" in source else os.path.isfile(source)

def remove_empty(folders) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()

# ---------------------------------------------------------------------------------------------------------------------
# writing

class Writer:
    """The shards of one split. `done` is what progress.json knows of it; what is on the disk beyond that is cut off."""

    def __init__(self, folder: Path, split: str, dtype, shard_tokens: int, done: dict):
        self.folder, self.split, self.dtype, self.shard_tokens, self.done = folder, split, dtype, shard_tokens, done
        self.file = None
        if done["open"]:
            if self.path().exists():                                            # finished after the last save
                self.path().rename(self.tmp())
            self.file = open(self.tmp(), "r+b")
            self.file.truncate(HEADER_BYTES + done["open"] * dtype.itemsize)
            self.file.seek(0, os.SEEK_END)

    def path(self) -> Path:
        return self.folder / f"{self.split}_{len(self.done['shards']):06d}.bin"

    def tmp(self) -> Path:
        return self.path().with_suffix(".bin.tmp")

    def write(self, ids: np.ndarray, documents: int, size: int, inside: bool) -> None:
        """Append ids (n,): so many documents end in them, of `size` bytes of text; `inside`: the last one goes on."""
        self.done["inside"] = inside
        self.done["tokens"] += len(ids)
        self.done["documents"] += documents
        self.done["bytes"] += size
        while len(ids):
            if self.file is None:
                self.file = open(self.tmp(), "wb")
                save(self.file, bytes(HEADER_BYTES), self.tmp())                # zeros: no shard until it is finished
            part, ids = np.split(ids, [self.shard_tokens - self.done["open"]])
            save(self.file, np.ascontiguousarray(part, self.dtype), self.tmp())
            self.done["open"] += len(part)
            if self.done["open"] == self.shard_tokens:
                self.finish()

    def finish(self) -> None:
        """Put the header in front of the open shard and give it its name."""
        if self.file is None:
            return
        self.file.seek(0)
        save(self.file, shard_header(self.done["open"], self.dtype), self.tmp())
        self.sync()
        self.file.close()
        self.file, tmp, path = None, self.tmp(), self.path()
        sha256 = digest(tmp)
        os.replace(tmp, path)
        self.done["shards"].append({"file": path.name, "tokens": self.done["open"], "sha256": sha256})
        self.done["open"] = 0

    def sync(self) -> None:
        if self.file:
            try:
                self.file.flush()
                os.fsync(self.file.fileno())
            except OSError as e:
                raise OSError(e.errno, e.strerror, str(self.tmp())) from None

class Workers(ThreadPoolExecutor):
    def __init__(self, n: int):
        super().__init__(n)
        self.ahead = 2 * n + 1

    def __exit__(self, *error):
        self.shutdown(cancel_futures=True)

    def in_order(self, f, items):
        """(f(item), extra) for each (item, extra), in their order, and a few computed in advance."""
        waiting = deque()
        for item, extra in items:
            waiting.append((self.submit(f, item), extra))
            if len(waiting) >= self.ahead:
                future, extra = waiting.popleft()
                yield future.result(), extra
        for future, extra in waiting:
            yield future.result(), extra

def by_split(job):
    """(split, texts, lasts) of a job's pieces."""
    for s in SPLITS:
        mine = [(text, last) for split, text, last in job if split == s]
        if mine:
            yield s, *map(list, zip(*mine))

def progress_bar(corpus: Corpus, what: str):
    """A bar of bytes read, or with max_tokens of tokens: that is what its end, and so the time left, is known by."""
    total, unit = (corpus.max_tokens, " tokens") if corpus.max_tokens else (corpus.total, "B")
    return tqdm(total=total, desc=what, unit=unit, unit_scale=True, disable=None, leave=False)

def show(bar, corpus: Corpus, read: int, tokens: int) -> None:
    bar.set_postfix_str(f"{human(read)}B" if corpus.max_tokens else f"{human(tokens)} tokens", refresh=False)
    bar.update((tokens if corpus.max_tokens else read) - bar.n)

def human(n: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.4g}{letter}"
    return str(int(n))

def number(text: str, flag: str) -> int:
    """2.0B, 500M, 20k or 123456 as a whole number above 0."""
    m = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmb]?)", str(text).replace("_", "").replace(",", "").lower())
    n = round(float(m.group(1)) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[m.group(2)]) if m else 0
    if n < 1:
        raise UserError(f"{flag} is {text!r}; it must be a number of tokens above 0, as 2.0B, 500M or 20000.")
    return n

def fractions_of(text: str) -> tuple:
    """'95/2.5/2.5' (or with commas, or as 0.95,0.025,0.025) as three fractions that add up to 1."""
    try:
        parts = [float(x) for x in re.split(r"[/,: ]+", text.strip())]
        if len(parts) != 3 or min(parts) < 0 or parts[0] <= 0 or not sum(parts) < float("inf"):
            raise ValueError
    except ValueError:
        raise UserError(f"--split is {text!r}; it must be three numbers, for train, val and test, "
                        f"as 95/2.5/2.5.") from None
    return tuple(p / sum(parts) for p in parts)

# ---------------------------------------------------------------------------------------------------------------------
# from a corpus to a data folder

def running_bytes(corpus: Corpus, folder: Path) -> int:
    """The bytes of a corpus that is one single document (text8, or one text file), else 0."""
    if corpus.id_key or any(f.split or f.key for f in corpus.files):
        return 0
    path = corpus.files[0].path
    plain = kind_of(path.name) == "text" and path.suffix.lower() not in PACKED and not corpus.separator
    if len(corpus.files) == 1 and plain and corpus.errors == "strict":
        return corpus.total                                                     # no need to look
    documents, size = 0, 0
    for _, text, last in pieces(corpus, folder):
        documents, size = documents + last, size + len(text if text.isascii() else text.encode())
        if documents > 1:
            return 0
    return size

def stops_when_full(corpus: Corpus) -> bool:
    """Once train is full, val and test end too, unless they come from a file of their own or from further on."""
    return not corpus.running and not any(f.split for f in corpus.files)

def find_characters(corpus: Corpus, make_jobs, workers: Workers) -> str:
    """Every character of the corpus, or of the part that max_tokens takes: the vocabulary of --tokenizer char."""
    known, characters, tokens = b"", set(), 0                                   # known: the ASCII among the characters

    def find(job):
        text = "".join(text for _, text, _ in job)
        rest = text.encode().translate(None, known).decode()                    # the known ones deleted: little is left
        new = np.unique(np.frombuffer(rest.encode("utf-32-le"), "<u4"))
        return set(map(chr, new)), sum(len(text) + (last and corpus.ends) for s, text, last in job if s == "train")

    with progress_bar(corpus, "finding characters") as bar:
        no_hashes = {} if corpus.max_tokens else {"split_of": lambda *_: "train"}            # splits do not matter here
        for (new, count), read in workers.in_order(find, make_jobs(**no_hashes)):
            characters |= new
            known = "".join(filter(str.isascii, characters)).encode()
            tokens += count
            show(bar, corpus, read, tokens)
            if corpus.max_tokens and tokens >= corpus.max_tokens and not corpus.full:
                corpus.full = True
                if stops_when_full(corpus):
                    break
    corpus.full = False
    return "".join(sorted(characters))

def front(tok, ids: np.ndarray, room: int, documents: int, size: int, done: dict):
    """What of a job fits in `room` tokens, as (ids, documents, bytes): whole ones, or any part of a running text."""
    if len(ids) == room:
        return ids, documents, size
    ids = ids[:room]
    stops = np.flatnonzero(ids == tok.end) if tok.end is not None else ()
    if len(stops) or done["tokens"] and not done["inside"]:
        ids = ids[:stops[-1] + 1 if len(stops) else 0]
        return ids, len(stops), len(tok.decode_bytes(ids))
    return ids, 1, len(tok.decode_bytes(ids))

def write_shards(corpus: Corpus, out: Path, tok, make_jobs, workers: Workers, saved: dict, shard_tokens: int) -> None:
    """Encode all jobs but those already done, and write what comes of them; `saved` keeps count, here and on disk."""
    def encode(job):
        return {s: (tok.encode_all(texts, [last and corpus.ends for last in lasts]), sum(lasts),
                    sum(len(t if t.isascii() else t.encode()) for t in texts), not lasts[-1])
                for s, texts, lasts in by_split(job) if not (corpus.full and s == "train")}

    splits, done, last_save = saved["splits"], saved["jobs"], time.monotonic()
    writers = {s: Writer(out, s, token_dtype(tok.vocab_size), shard_tokens, splits[s]) for s in SPLITS}
    todo = (((), read) if i < done else (job, read) for i, (job, read) in enumerate(make_jobs()))
    with progress_bar(corpus, "tokenizing") as bar:
        for i, (encoded, read) in enumerate(workers.in_order(encode, todo)):
            for s, (ids, documents, size, inside) in encoded.items():
                if s == "train" and corpus.full:
                    continue
                room = corpus.max_tokens - splits[s]["tokens"] if s == "train" and corpus.max_tokens else np.inf
                if len(ids) >= room:
                    ids, documents, size = front(tok, ids, room, documents, size, splits[s])
                    corpus.full = True
                writers[s].write(ids, documents, size, inside)
            counted = ("train",) if corpus.max_tokens else SPLITS
            show(bar, corpus, read, sum(splits[s]["tokens"] for s in counted))
            if corpus.full and stops_when_full(corpus):
                break
            # No save once train is full: when the reader then leaves the train file is chance, and so are the jobs.
            if i >= done and not corpus.full and time.monotonic() - last_save > SAVE_SECONDS:
                for writer in writers.values():
                    writer.sync()
                saved["jobs"] = i + 1
                write_json(out / "progress.json", saved)
                last_save = time.monotonic()
    for writer in writers.values():
        writer.finish()

def make(corpus: Corpus, out: Path, tokenizer: str, settings: dict, newest: int, num_proc: int, shard_tokens: int,
         place) -> dict:
    """Shards and meta.json in `out`, going on from progress.json where that fits. Returns meta.

    `place(file)`: the path of a file that is not on this machine yet. `newest`: when the input was last changed, ns.
    """
    saved = read_progress(out, settings, newest)
    if not saved:
        clear(out)
        saved = {"settings": settings, "newest": newest, "jobs": 0, "tokenizer": None, "running": None,
                 "splits": {s: {"tokens": 0, "documents": 0, "bytes": 0, "shards": [], "open": 0, "inside": False}
                            for s in SPLITS}}
        write_json(out / "progress.json", saved)                                # from now on, what is in `out` is ours
    if corpus.total is None:
        for f in corpus.files:
            f.path = f.path or place(f)
        corpus.total = sum(f.path.stat().st_size for f in corpus.files)
    if saved["running"] is None:
        saved["running"] = running_bytes(corpus, out)
    corpus.running = saved["running"]

    def make_jobs(**kwargs):
        stream = pieces(corpus, out, place, **kwargs)
        return jobs(by_position(stream, corpus.running, corpus.fractions) if corpus.running else stream, corpus)

    with Workers(num_proc) as workers:
        if saved["tokenizer"] is None:
            kinds = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer,
                     "char": lambda: CharTokenizer(corpus.chars or find_characters(corpus, make_jobs, workers),
                                                   corpus.ends)}
            saved["tokenizer"] = kinds[tokenizer]().describe()
        tok = tokenizer_from(saved["tokenizer"])
        write_shards(corpus, out, tok, make_jobs, workers, saved, shard_tokens)

    counts = {s: {k: saved["splits"][s][k] for k in ("tokens", "documents", "bytes", "shards")} for s in SPLITS}
    if not counts["train"]["tokens"]:
        where = str(corpus.files[0].path or corpus.name) + " and the other files" * (len(corpus.files) > 1)
        raise UserError("no document fell into train: there are too few of them. Give more text, or another --split."
                        if any(counts[s]["tokens"] for s in SPLITS) else f"there is no text in {where}.")
    meta = {"dataset": corpus.name, "tokenizer": tok.describe(), "vocab_size": tok.vocab_size, "splits": counts,
            "settings": settings}
    if corpus.name == "pystdlib":
        meta["python"] = platform.python_version()
    write_json(out / "meta.json", meta)
    (out / "progress.json").unlink()
    return meta

def write_json(path: Path, value: dict) -> None:
    with atomic_write(path) as f:
        json.dump(value, f, indent=1)
        f.write("\n")

def read_progress(out: Path, settings: dict, newest: int) -> dict | None:
    """The saved progress, when it is of the same settings and input, and all that it needs is still there."""
    try:
        saved = json.loads((out / "progress.json").read_text(encoding="utf-8"))
        if saved["settings"] != settings or saved["newest"] != newest or not saved["jobs"]:
            return None
        size = token_dtype(tokenizer_from(saved["tokenizer"]).vocab_size).itemsize
        for s, done in saved["splits"].items():
            path = out / f"{s}_{len(done['shards']):06d}.bin"
            there = max(length(path), length(path.with_suffix(".bin.tmp")))
            if done["open"] and there < HEADER_BYTES + size * done["open"]:
                return None
            if any(length(out / d["file"]) != HEADER_BYTES + size * d["tokens"] for d in done["shards"]):
                return None
        return saved
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None

def clear(out: Path) -> None:
    """Remove what a preparation has written; progress.json last, since it says that the rest is ours."""
    for path in sorted(out.iterdir(), key=lambda p: p.name == "progress.json"):
        if OURS.fullmatch(path.name) and path.name not in (".lock", "meta.json"):
            path.unlink()

def same_again(out: Path, settings: dict, newest: int) -> None:
    """Say that `out` is ready, or raise: it was made with other settings, or its input has changed."""
    meta = load_data(out).meta
    (out / "progress.json").unlink(missing_ok=True)
    old = meta.get("settings", {})
    other = [k for k in {**old, **settings} if old.get(k) != settings.get(k)]
    if other:
        k = other[0]
        made = "from other files" if k in ("files", "bytes", "names") else \
            f"with {k} {old.get(k)!r}, and this is {settings.get(k)!r}"
        raise UserError(f"{out} is there already, made {made}. Choose another --out, or delete that folder.")
    if newest > (out / "meta.json").stat().st_mtime_ns:
        raise UserError(f"{out} is older than its input. Choose another --out, or delete that folder.")
    print(f"{out} is there already: {summary(meta)}")

def summary(meta: dict) -> str:
    counts = ", ".join(f"{s} {meta['splits'][s]['tokens']:,}" for s in SPLITS)
    return f"{meta['tokenizer']['kind']} level, vocabulary {meta['vocab_size']:,}, tokens: {counts}"

# ---------------------------------------------------------------------------------------------------------------------
# the command

def corpus_of(dataset: str | None, input: list[str], split, separator, text_key, source, no_check) -> Corpus:
    """The corpus that the flags name. UserError when they do not go together."""
    if bool(dataset) == bool(input):
        raise UserError(f"give one of --dataset ({', '.join(DATASETS)}) and --input FILE...")
    if input:
        if source:
            raise UserError("--source is for --dataset; --input names the files themselves.")
        files = input_files(input)
        name = Path(input[0]).resolve().name.split(".")[0] if len(files) == 1 or os.path.isdir(input[0]) else "input"
        if separator:
            separator = separator.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t")
        return Corpus(name or "input", files, fractions=fractions_of(split or "95/2.5/2.5"), separator=separator,
                      text_key=text_key or "text", total=sum(f.size for f in files))
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
    if source and names_a_file(source) and len(corpus.files) > 1:
        if dataset != "fineweb-edu":
            raise UserError(f"--source {source} is one file; {dataset} is {len(corpus.files)}. "
                            f"Name the folder that has them.")
        corpus.files, corpus.total = [File(Path(source).name)], None            # one file of the sample is a corpus too
    if source and no_check and os.path.isdir(source):
        corpus.files, corpus.total = [f for f in corpus.files if local(f, source)] or corpus.files[:1], None
    return corpus

def prepare(dataset: str | None = None, input=None, tokenizer: str | None = None, out=None, num_proc: int | None = None,
            max_tokens=None, split: str | None = None, separator: str | None = None, text_key: str | None = None,
            errors: str = "strict", source: str | None = None, no_check: bool = False,
            shard_tokens=SHARD_TOKENS) -> Path:
    """Make the data folder `out` (default data/NAME) and return its path; nothing is done when it is there already.

    The arguments are the flags of the command line. UserError for whatever the user can put right.
    """
    input = [str(p) for p in ([input] if isinstance(input, (str, os.PathLike)) else input or [])]
    corpus = corpus_of(dataset, input, split, separator, text_key, source, no_check)
    corpus.errors = errors
    corpus.max_tokens = number(max_tokens, "--max_tokens") if max_tokens is not None else None
    shard_tokens = number(shard_tokens, "--shard_tokens")
    tokenizer = tokenizer or corpus.tokenizer
    if tokenizer not in ("char", "byte", "gpt2"):
        raise UserError(f"--tokenizer is {tokenizer!r}; it must be char, byte or gpt2.")
    if num_proc is None:
        num_proc = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if num_proc < 1:
        raise UserError(f"--num_proc is {num_proc}; it must be at least 1.")

    # What the tokens depend on. A folder made with other settings is not taken for this one.
    settings = {"dataset": dataset or "input", "tokenizer": tokenizer, "max_tokens": corpus.max_tokens,
                "split": [round(f, 6) for f in corpus.fractions], "errors": errors, "shard_tokens": shard_tokens}
    newest = 0
    if input:
        names = "\n".join(f"{f.name} {f.size}" for f in corpus.files)
        settings |= {"files": len(corpus.files), "bytes": corpus.total, "separator": corpus.separator,
                     "text_key": corpus.text_key, "names": hashlib.sha256(names.encode()).hexdigest()[:16]}
        newest = max(f.path.stat().st_mtime_ns for f in corpus.files)
    if source and (no_check or dataset == "fineweb-edu" and len(corpus.files) == 1):
        settings["source"] = Path(source).name                                  # not the known corpus

    out = Path(out or Path("data") / corpus.name)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; choose a folder.")
    if tokenizer == "gpt2" and not (out / "meta.json").exists():
        GPT2Tokenizer().load()                                                  # can it be had? before anything is made
    new = [p for p in (out, *out.parents) if not p.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with lock(out, "preparing"):
            if (out / "meta.json").exists():
                same_again(out, settings, newest)
                return out
            strange = sorted(p.name for p in out.iterdir() if not OURS.fullmatch(p.name))
            if not (out / "progress.json").exists():
                strange += sorted(p.name for p in out.glob("*.bin"))
            if strange:
                raise UserError(f"{out} holds other files ({strange[0]}). Choose another --out, or empty it.")
            cache = out.parent / ".downloads" / corpus.name
            try:
                meta = make(corpus, out, tokenizer, settings, newest, num_proc, shard_tokens,
                            lambda file: locate(file, source, cache, not no_check))
            except UserError as e:
                if not (isinstance(e, Unfinished) and read_progress(out, settings, newest)):
                    clear(out)
                raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; the same command goes on with {out}") from None
    except UserError:
        remove_empty(new)
        raise
    print(f"{out}: {summary(meta)}")
    for s, fraction in zip(SPLITS, corpus.fractions):
        if fraction and not meta["splits"][s]["tokens"]:
            hint = " --split gives it more, and a single document is cut by position." if input else ""
            print(f"{out}: no document fell into {s}: there are too few of them for a split by hash.{hint}",
                  file=sys.stderr)
    return out

def info(path) -> None:
    """Print what a data folder holds. UserError when a shard is not what meta.json says."""
    data = load_data(path)
    kind = data.tokenizer.describe()["kind"] if data.tokenizer else "an unknown tokenizer"
    name, vocab_size = data.meta.get("dataset", "ready-made shards"), data.vocab_size or "unknown"
    print(f"{data.path}: {name}, {kind}, vocabulary {vocab_size}")
    print(f"{'split':<6} {'tokens':>15} {'documents':>12} {'text bytes':>16} {'bytes/token':>12} {'shards':>7}")
    for s in SPLITS:
        tokens, counts = getattr(data, s) or (), data.meta.get("splits", {}).get(s, {})
        ratio = data.bytes_per_token(s)
        documents, size = (f"{counts[k]:,}" if counts else "?" for k in ("documents", "bytes"))
        print(f"{s:<6} {len(tokens):>15,} {documents:>12} {size:>16} "
              f"{f'{ratio:.4f}' if ratio else '?':>12} {len(tokens.paths) if tokens else 0:>7}")
    shards = [shard for s in SPLITS for shard in data.meta.get("splits", {}).get(s, {}).get("shards", [])]
    bad = [shard["file"] for shard in tqdm(shards, desc="checking", disable=None, leave=False)
           if digest(data.path / shard["file"]) != shard["sha256"]]
    if bad:
        raise UserError(f"{data.path}: {', '.join(bad)} is not what meta.json says (its sha256 differs). "
                        f"Delete the folder and prepare it again.")
    print("every shard matches meta.json" if data.meta else
          "every shard has the length that its header says; there is no meta.json")
    if data.tokenizer:
        ids = data.train.window(0, min(len(data.train), 400))
        stops = np.flatnonzero(ids == data.tokenizer.end) if data.tokenizer.end is not None else ()
        try:
            text = data.tokenizer.decode(ids[:stops[0]] if len(stops) else ids)
        except UserError as e:                                                  # gpt2 without its ranks
            return print(f"the text cannot be shown: {e}")
        print("the first document of train begins:\n" + "\n".join("    " + line for line in text.splitlines()[:5]))

def main(argv) -> None:
    p = Parser(description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS)
    p.add_argument("--dataset", metavar="NAME", help=", ".join(DATASETS))
    p.add_argument("--input", nargs="+", metavar="FILE",
                   help=".txt, .jsonl, .parquet, each also .gz, .zip, .zst; folders; globs")
    p.add_argument("--tokenizer", help="char, byte or gpt2; by default what is usual for the dataset")
    p.add_argument("--out", help="the data folder; data/NAME when not given")
    p.add_argument("--num_proc", type=int, help="workers; all cores when not given")
    p.add_argument("--max_tokens", help="at most so many tokens in train, as 2.0B, 500M or 20000; whole documents")
    p.add_argument("--split", help="--input: the shares of train, val and test, as 95/2.5/2.5")
    p.add_argument("--separator", help="--input: what ends a document in a text file, as '<|endoftext|>' or '\\n\\n'")
    p.add_argument("--text_key", help="--input: the field or column with the text; 'text' when not given")
    p.add_argument("--errors", choices=("strict", "replace"),
                   help="what to do with bytes that are not UTF-8; strict when not given")
    p.add_argument("--source", metavar="URL|FILE", help="--dataset: a mirror, or the file or folder on this machine")
    p.add_argument("--no_check", action="store_true", default=argparse.SUPPRESS,
                   help="take a download or --source though length or checksum differ")
    p.add_argument("--shard_tokens", help="tokens of a full shard; 100M when not given")
    p.add_argument("--info", metavar="FOLDER", help="print what a data folder holds, and check it")
    args = vars(p.parse_args(argv))
    if "info" in args:
        if len(args) > 1:
            raise UserError("--info stands alone: it reads a folder and makes none.")
        return info(args["info"])
    prepare(**args)

if __name__ == "__main__":
    run(main)
