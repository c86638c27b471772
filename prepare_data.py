"""Text to memmapped token shards, in bounded memory.

    python prepare_data.py --dataset pystdlib                               # the Python standard library: no network
    python prepare_data.py --dataset text8 | tinystories                    # downloaded
    python prepare_data.py --dataset fineweb-edu --max_tokens 2.0B          # a prefix; the rest is not fetched
    python prepare_data.py --input book.txt 'notes/**/*.jsonl.gz' --tokenizer gpt2

The documents of all files, in order, are divided into train, val and test, and their ids are appended to shards in the
folder `parts`. `parts/record.json` says how far they have come, so a run that was stopped loses a few seconds. When all
are there, the shards are moved out, and meta.json comes last. At character level the files are read twice: which
characters there are must be known first. Neither the workers nor where a run was stopped have a say in the bytes.
"""
import argparse
import collections
import contextlib
import errno
import hashlib
import io
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodepth.files import UserError, atomic_write, lock, run
from nanodepth.settings import Parser, amount
from nanodepth.data import (HEADER_BYTES, SPLITS, ByteTokenizer, CharTokenizer, GPT2Tokenizer, byte_length, load_data,
                            shard_header, token_dtype)
from nanodepth.documents import Corpus, File, input_files, kind_of, need, read
from nanodepth.tokenizer_json import HFTokenizer

SHARD_TOKENS = 100_000_000      # tokens after which a shard is full, as in llm.c
PART_BYTES = 2**24              # of ids, after which they are on the disk for sure
JOB = 2**18                     # characters that are encoded at a time
FEW = 200                       # with fewer documents each is cut by position: a hash would not divide them well
WINDOWS = 2 * 128 + 44          # tokens that val and test should have at least: two windows of 128, and a little room
STEADY = 10_000                 # tokens of a val split that tells small differences
OURS = re.compile(r"(train|val|test)_\d{6}\.bin|meta\.json(\.tmp)?|parts|\.lock")

# ---------------------------------------------------------------------------------------------------------------------
# corpora. A file that is all of val or test comes before one that is all of train: where train is full, reading ends.

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
    need("huggingface_hub", repo, "give files that you have to --input")

    def fetch():
        with network(f"{name} of {repo}"):
            from huggingface_hub import hf_hub_download
            return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision))
    return File(name, fetch=fetch, revision=f"{repo}@{revision}", split=split)

TEXT8 = "http://mattmahoney.net/dc/text8.zip"
TEXT8_SHA256 = "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"

def text8() -> Corpus:
    """One text without ends, cut as in the papers: the first 90 % are train."""
    def fetch(split: str) -> Path:
        path = Path(f"data/.downloads/text8_{split}.txt")
        if not path.exists():
            with network(TEXT8), urllib.request.urlopen(TEXT8, timeout=30) as answer:
                packed = answer.read()
            if hashlib.sha256(packed).hexdigest() != TEXT8_SHA256:
                raise UserError(f"{TEXT8} is not the right file: its sha256 is not {TEXT8_SHA256[:16]}....")
            text = zipfile.ZipFile(io.BytesIO(packed)).read("text8")
            path.parent.mkdir(parents=True, exist_ok=True)
            for name, start, stop in (("test", 0.95, 1), ("val", 0.9, 0.95), ("train", 0, 0.9)):
                with atomic_write(path.with_name(f"text8_{name}.txt"), "wb") as f:
                    f.write(text[round(start * len(text)):round(stop * len(text))])
        return path
    files = [File(f"text8_{split}.txt", fetch=lambda split=split: fetch(split), revision=TEXT8_SHA256, split=split)
             for split in ("val", "test", "train")]
    return Corpus("text8", files, fractions=(0.9, 0.05, 0.05), ends=False)

def tinystories() -> Corpus:
    place = "roneneldan/TinyStories", "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    files = [hub(*place, "TinyStoriesV2-GPT4-valid.txt"), hub(*place, "TinyStoriesV2-GPT4-train.txt", split="train")]
    return Corpus("tinystories", files, fractions=(0, 0.5, 0.5), separator="<|endoftext|>")

def fineweb_edu() -> Corpus:
    need("pyarrow", "fineweb-edu", "choose another dataset")
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
# documents to shards

def characters(corpus: Corpus) -> str:
    """All characters that there are in the files."""
    seen = set()
    for documents, *_ in tqdm(jobs(corpus, 0, 0), desc="characters", unit=" MB", disable=None, leave=False):
        known = "".join(filter(str.isascii, seen)).encode()
        rest = "".join(text for _, text, _ in documents).encode().translate(None, known)        # little, and so quick
        seen |= set(rest.decode())
    return "".join(sorted(seen))

def divide(corpus: Corpus, file: File, text: str, stretch: bool) -> list[tuple[int, str]]:
    """(split, text) of a document: its file's split; by position if it is one of few, or a stretch of a longer text;
    else the hash of its file's key, or of its content, decides."""
    if file.split:
        return [(SPLITS.index(file.split), text)]
    train, val, _ = corpus.fractions
    if not (stretch or corpus.few):
        u = int.from_bytes(hashlib.sha256((file.key or text).encode()).digest()[8:16]) / 2**64
        return [(1 if u < val else 0 if u < val + train else 2, text)]
    bounds = [0, round(len(text) * train), round(len(text) * (train + val)), len(text)]
    return [(i, text[a:b]) for i, (a, b) in enumerate(pairwise(bounds)) if a < b and corpus.fractions[i]]

def encode(corpus: Corpus, tok, documents) -> tuple[list[np.ndarray], np.ndarray]:
    """The ids of train, val and test; and of each how many tokens, documents and bytes of text, (3, 3)."""
    texts = [[] for _ in SPLITS]
    for document in documents:
        for split, text in divide(corpus, *document):
            texts[split].append(text)
    ids = [tok.encode_all(t, corpus.ends) for t in texts]
    return ids, np.array([(len(i), len(t) * corpus.ends, sum(map(byte_length, t))) for i, t in zip(ids, texts)])

def in_order(f, items, n: int):
    """(item, f(item[0])) for each item, in their order. `n` threads, which tiktoken and hashlib let run at once, work a
    few items ahead."""
    waiting = collections.deque()
    with ThreadPoolExecutor(n) as pool:
        for item in items:
            waiting.append((item, pool.submit(f, item[0])))
            if len(waiting) > n:
                item, future = waiting.popleft()
                yield item, future.result()
        for item, future in waiting:
            yield item, future.result()

def jobs(corpus: Corpus, start: int, done: int):
    """Runs of documents, a quarter of a million characters each, from document `done` of file `start` on: (documents,
    where to go on after them, bytes of the files read so far)."""
    job, size, before = [], 0, 0
    for i, file in enumerate(corpus.files[start:], start):
        file.path = file.path or file.fetch()
        for n, document in islice(enumerate(read(file, corpus), 1), done if i == start else 0, None):
            job.append((file, *document))
            size += len(document[0])
            if size >= JOB or len(job) >= 2**14:
                yield job, (i, n), before + file.position()
                job, size = [], 0
        before += os.path.getsize(file.path)
    yield job, (len(corpus.files), 0), before

def append(folder: Path, record: dict, chunks: list, counts: np.ndarray, at: tuple) -> None:
    """Add chunks of ids to the shards of train, val and test, and then say in the record that they are there. What it
    does not know of, because a run was stopped in between, is cut off."""
    for split, shards, new in zip(SPLITS, record["shards"], zip(*chunks)):
        if n := sum(map(len, new)):
            if not shards or shards[-1] >= SHARD_TOKENS:
                shards.append(0)
            with open(folder / f"{split}_{len(shards) - 1:06d}.bin", "ab") as f:
                f.truncate(HEADER_BYTES + shards[-1] * new[0].itemsize)         # the header comes when all are there
                f.writelines(new)
                f.flush()
                os.fsync(f.fileno())
            shards[-1] += n
    record |= {"counts": counts.tolist(), "at": at}
    write_json(folder / "record.json", record)

def fill(corpus: Corpus, tok, folder: Path, record: dict, num_proc: int, max_tokens: int | None) -> None:
    """Read what is not in the folder yet: everything, or until train has its max_tokens."""
    counts, chunks, size, end = np.array(record["counts"]), [], 0, (len(corpus.files), 0)
    total = max_tokens or sum(f.path.stat().st_size for f in corpus.files[record["at"][0]:] if f.path) or None
    results = in_order(lambda documents: encode(corpus, tok, documents), jobs(corpus, *record["at"]), num_proc)
    with tqdm(total=total, desc="reading", unit=" tokens" if max_tokens else "B", unit_scale=True, disable=None,
              leave=False) as bar, contextlib.closing(results):
        for (_, at, position), (ids, new) in results:
            if max_tokens and counts[0, 0] + new[0, 0] > max_tokens:            # train is full, and the rest not read
                ids[0], at = ids[0][:max_tokens - counts[0, 0]], end
                new[0] = len(ids[0]), (ids[0] == tok.end).sum(), len(tok.decode_bytes(ids[0]))
            counts += new
            chunks.append(ids)
            size += sum(x.nbytes for x in ids)
            bar.update((counts[0, 0] if max_tokens else position) - bar.n)
            if size >= PART_BYTES or at == end:
                append(folder, record, chunks, counts, at)
                chunks, size = [], 0
            if at == end:
                break

def finish(out: Path, split: str, tokens: list[int], dtype) -> list[dict]:
    """Give the shards of a split their headers and move them out of parts. Returns what meta.json says of them."""
    shards = []
    for i, n in enumerate(tokens):
        name = f"{split}_{i:06d}.bin"
        if (out / "parts" / name).exists():                                     # else it was moved before a stop
            with open(out / "parts" / name, "r+b") as f:
                f.write(shard_header(n, dtype))
                f.flush()
                os.fsync(f.fileno())
            os.replace(out / "parts" / name, out / name)
        with open(out / name, "rb") as f:
            shards.append({"file": name, "tokens": n, "sha256": hashlib.file_digest(f, "sha256").hexdigest()})
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
        raise UserError(f"--split is {text!r}; it must be three numbers (train, val, test), as 95/2.5/2.5.") from None
    return tuple(p / sum(parts) for p in parts)

def corpus_of(dataset, input: list[str], tokenizer, split, separator, text_key) -> Corpus:
    """The corpus that the flags name. UserError when they do not go together."""
    if bool(dataset) == bool(input):
        raise UserError(f"give one of --dataset ({', '.join(DATASETS)}) and --input FILE...")
    if input:
        fractions = fractions_of(split or "95/2.5/2.5")
        files, left_out = input_files(input)
        if left_out:
            most = ", ".join(f"{n} {suffix}" for suffix, n in left_out.most_common(5))
            print(f"{left_out.total()} files are not .txt, .jsonl or .parquet, and are not read ({most}); name them, "
                  f"as in '*.py', to have them read", file=sys.stderr)
        name = Path(input[0]).resolve().name.split(".")[0] if len(files) == 1 or os.path.isdir(input[0]) else "input"
        for written, meant in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
            separator = separator and separator.replace(written, meant)
        return Corpus(name or "input", files, fractions=fractions, separator=separator, text_key=text_key or "text")
    if dataset not in DATASETS:
        raise UserError(f"there is no dataset {dataset!r}, only {', '.join(DATASETS)}. Files of yours are an --input, "
                        f"and a folder of shards is ready for train.py --dataset.")
    for flag, value in (("split", split), ("separator", separator), ("text_key", text_key)):
        if value is not None:
            raise UserError(f"--{flag} is for --input; the layout of {dataset} is known.")
    if dataset == "fineweb-edu" and tokenizer == "char":
        raise UserError("fineweb-edu at character level would have to be read as a whole first; choose gpt2 or byte.")
    return DATASETS[dataset]()

def are_few(corpus: Corpus) -> bool:
    """Whether a hash would not divide the documents well: they are read until there are enough of them."""
    n = 0
    for f in corpus.files:
        one = not corpus.separator and kind_of(f.name) == "text"
        n += 1 if one else sum(1 for _ in islice(read(f, corpus), FEW))
        if n >= FEW:
            return False
    return True

def sources(corpus: Corpus) -> str:
    """A digest of what is read: the files' names, and of those on this machine the content; of a long one its first
    million bytes, its size and the time of its last change."""
    sums = hashlib.sha256(repr([(f.name, f.revision) for f in corpus.files]).encode(errors="surrogateescape"))
    for path in dict.fromkeys(f.path for f in corpus.files if f.path):
        with open(path, "rb") as f:
            status = os.fstat(f.fileno())
            sums.update(f.read(2**20))
        sums.update(repr((status.st_size, status.st_mtime_ns if status.st_size > 2**20 else 0)).encode())
    return sums.hexdigest()[:16]

def code() -> str:
    """A digest of the code that decides the bytes: what another version has done is not gone on with."""
    here = Path(__file__).parent
    files = ("prepare_data.py", "nanodepth/data.py", "nanodepth/documents.py", "nanodepth/tokenizer_json.py")
    return hashlib.sha256(b"".join((here / f).read_bytes() for f in files)).hexdigest()[:16]

def make(corpus: Corpus, out: Path, tok, settings: dict, num_proc: int) -> dict:
    """Shards and meta.json in `out`, going on with what is in parts when it is of the same. Returns meta.

    tok: None for characters.
    """
    folder, same = out / "parts", {"settings": settings, "code": code()}
    def nothing():
        return {"counts": [[0, 0, 0]] * 3, "shards": [[], [], []], "at": (0, 0)}
    corpus.few = settings["dataset"] == "input" and are_few(corpus)
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    if not same.items() <= record.items():
        for path in out.glob("*_*.bin"):                                        # of a run that was stopped at its end
            path.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        record = same | nothing() | {"fractions": corpus.fractions, "chars": None if tok else characters(corpus)}
        if not tok:
            write_json(folder / "record.json", record)
    tok = tok or CharTokenizer(record["chars"], corpus.ends)
    while True:
        corpus.fractions = train, *rest = record["fractions"]
        fill(corpus, tok, folder, record, num_proc, settings["max_tokens"])
        tokens = [n for n, *_ in record["counts"]]
        if not settings["widen"] or min(tokens[1:]) >= WINDOWS or train < 0.5:
            break
        rest = [f * 1.2 if n < WINDOWS else f for f, n in zip(rest, tokens[1:])]
        record |= nothing() | {"fractions": (1 - sum(rest), *rest)}           # and once more, with more for val or test
    if not tokens[0]:
        raise UserError(f"there is no text in {', '.join(str(f.path) for f in corpus.files[:3])}.")
    splits = {s: dict(zip(("tokens", "documents", "bytes"), counts)) | {
        "shards": finish(out, s, shards, token_dtype(tok.vocab_size))}
        for s, counts, shards in zip(SPLITS, record["counts"], record["shards"])}
    meta = {"dataset": corpus.name, "tokenizer": tok.describe(), "vocab_size": tok.vocab_size, "splits": splits,
            "fractions": [round(f, 6) for f in corpus.fractions], "settings": settings,
            "python": platform.python_version()}
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
    for k, value in settings.items():
        if (old := meta.get("settings", {}).get(k)) != value:
            made = "from other files, or they have changed" if k == "sources" else \
                f"with {k} {old!r}, and this is {value!r}"
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
    corpus = corpus_of(dataset, input, tokenizer, split, separator, text_key)
    named = tokenizer = tokenizer or corpus.tokenizer
    if tokenizer.endswith(".json"):
        tok = HFTokenizer.from_file(tokenizer)
        named = f"{tok.sha256[:16]} of {tok.vocab_size} tokens"
    else:
        tok = {"char": None, "byte": ByteTokenizer(), "gpt2": GPT2Tokenizer()}[tokenizer]
    # What the tokens depend on. A folder made with other settings is not taken for this one.
    settings = {"dataset": dataset or "input", "tokenizer": named, "max_tokens": max_tokens,
                "split": [round(f, 6) for f in corpus.fractions], "separator": corpus.separator,
                "widen": bool(input) and split is None and max_tokens is None, "text_key": corpus.text_key,
                "sources": sources(corpus)}
    out = Path(out or Path("data") / corpus.name)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; choose a folder.")
    if tokenizer == "gpt2" and not (out / "meta.json").exists():
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
                meta = make(corpus, out, tok, settings, num_proc)
            except UserError as e:
                if not isinstance(e, Unfinished) or not (out / "parts/record.json").exists():
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
