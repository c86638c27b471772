"""Text to memmapped token shards, in bounded memory.

    python prepare_data.py --dataset pystdlib                               # the Python standard library: no network
    python prepare_data.py --dataset text8 | tinystories                    # downloaded, checked
    python prepare_data.py --dataset fineweb-edu --max_tokens 2.0B          # a prefix; the rest is not fetched
    python prepare_data.py --input book.txt 'notes/**/*.jsonl.gz' --tokenizer gpt2
    python prepare_data.py --info data/pystdlib

Three steps: `pieces` reads any corpus as a stream of documents, each with its split; threads encode jobs of about a million
characters (tiktoken and numpy let go of Python's lock while they work); shards are written in the order of the jobs. So the
bytes do not depend on the number of workers, and a run that was stopped goes on from its last saved job.
The format of what is written stands in data.py.
"""
import codecs
import contextlib
import errno
import fcntl
import glob
import gzip
import hashlib
import http.client
import io
import json
import os
import platform
import re
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import Parser, UserError, atomic_write, run
from data import (HEADER_BYTES, SPLITS, ByteTokenizer, CharTokenizer, GPT2Tokenizer, load_data, shard_header,
                  token_dtype, tokenizer_from)

BLOCK = 2**20                   # characters of a job, and at most of one piece of a document
LINE_LIMIT = 2**26              # bytes of one JSON line
SHARD_TOKENS = 100_000_000      # tokens of a full shard, as in llm.c
SAVE_SECONDS = 10               # between two saves of the progress
OURS = re.compile(r"(train|val|test)_\d{6}\.bin(\.tmp)?|(meta|progress)\.json(\.tmp)?|input\.tmp|\.lock")

# ---------------------------------------------------------------------------------------------------------------------
# corpora

@dataclass
class File:
    name: str                               # as it counts: for kind, order and hash
    path: Path | None = None                # on this machine; None: still to be fetched from url
    url: str = ""
    size: int | None = None                 # of the download, where known
    sha256: str | None = None
    unpacked: tuple = (None, None)          # size and md5 of what is in it
    split: str | None = None                # all its documents go there, or
    key: str | None = None                  # the hash of this decides, not the hash of the content

@dataclass
class Corpus:
    name: str
    files: list[File]
    tokenizer: str = "char"                 # unless --tokenizer says otherwise
    fractions: tuple = (0.95, 0.025, 0.025)
    ends: bool = True                       # an end token after each document
    chars: str | None = None                # the vocabulary at character level; None: what is found
    separator: str | None = None
    text_key: str = "text"
    id_key: str | None = None               # the column whose hash decides the split
    total: int | None = None                # bytes of all files; None: all of them are fetched first
    errors: str = "strict"
    max_tokens: int | None = None
    running: int = 0                        # bytes of a corpus that is one running text, cut by position; 0: it is many documents
    read: int = 0                           # bytes of the files read so far, for the bar
    full: bool = False                      # train has its max_tokens

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

    Left out: tests, vendored packages, the tables of encodings, the application idlelib, and what newer Pythons have dropped.
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

KINDS = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
PACKED = (".gz", ".zip", ".zst")
FOREIGN = (".tar", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".lz4", ".pdf", ".docx", ".bin", ".npy")

def suffix_of(name: str) -> str:
    """The suffix of a name, in small letters, without .gz, .zip or .zst after it."""
    path = Path(name)
    return (path.with_suffix("") if path.suffix.lower() in PACKED else path).suffix.lower()

def kind_of(name: str) -> str:
    """'text', 'jsonl' or 'parquet'; a suffix that says nothing is text."""
    return KINDS.get(suffix_of(name), "text")

def input_files(patterns: list[str]) -> list[File]:
    """The files that --input names: files, globs, and folders with all .txt, .jsonl and .parquet in them, sorted."""
    files = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise UserError(f"--input {pattern}: there is no such file or folder.")
        for path in map(Path, found):
            if not path.is_dir():
                files.append(File(path.name, path))
                continue
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith(".")
                      and suffix_of(p.name) in KINDS]
            if not inside and len(found) == 1:
                raise UserError(f"--input {pattern}: the folder has no .txt, .jsonl or .parquet file in it.")
            files += [File(p.relative_to(path).as_posix(), p) for p in inside]
    for f in files:
        if f.path.suffix.lower() in FOREIGN or ".tar." in f.name.lower():
            raise UserError(f"{f.path}: this kind of file is not read. Unpack or convert it to .txt, .jsonl or .parquet "
                            f"(each also .gz, .zip or .zst).")
        f.size = f.path.stat().st_size
    return files

# ---------------------------------------------------------------------------------------------------------------------
# reading: any file as a stream of pieces of documents

class Zst(io.RawIOBase):
    """A .zst file as a stream. Unlike zstandard's own reader it notices a file that is cut short."""

    def __init__(self, raw):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{raw.name} needs zstandard: pip install zstandard, or unpack it first with zstd -d.") from None
        self.raw, self.new, self.ready = raw, zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj, b""
        self.frame = None

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.ready:
            data = self.raw.read(2**14)
            if not data:
                if self.frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            while data:
                self.frame = self.frame or self.new()
                self.ready += self.frame.decompress(data)
                data = self.frame.unused_data if self.frame.eof else b""
                if self.frame.eof:
                    self.frame = None
        n = min(len(buffer), len(self.ready))
        buffer[:n], self.ready = self.ready[:n], self.ready[n:]
        return n

@contextlib.contextmanager
def damage(name):
    """What a broken file makes its library raise, as one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        own = type(e).__module__.startswith(("zstd", "zstandard", "pyarrow")) or type(e) is OSError and e.errno is None
        if "encrypted" in str(e):
            raise UserError(f"{name} is encrypted. Unpack it first.") from None
        if own or isinstance(e, (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError)):
            reason = (str(e) or type(e).__name__).splitlines()[0][:200]
            raise UserError(f"{name} is damaged, cut short, or not what its name says: {reason}. Get it again.") from None
        raise

def streams(path: Path, raw):
    """(name, kind, binary stream) of a file: itself, unpacked, or each file in a .zip. `raw` is the open file."""
    suffix = path.suffix.lower()
    if suffix == ".zip":
        with zipfile.ZipFile(raw) as z:
            for info in sorted(z.infolist(), key=lambda i: i.filename):
                if not info.is_dir() and not info.filename.startswith("__MACOSX/"):
                    with z.open(info) as f:
                        yield f"{path}: {info.filename}", kind_of(info.filename), f
    elif suffix == ".gz":
        yield path, kind_of(path.name), gzip.GzipFile(fileobj=raw)
    elif suffix == ".zst":
        yield path, kind_of(path.name), io.BufferedReader(Zst(raw), 2**18)
    else:
        yield path, kind_of(path.name), raw

def not_utf8(name, error: UnicodeDecodeError, offset: int) -> UserError:
    return UserError(f"{name} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset:,}. Convert it "
                     f"(iconv -f ENCODING -t UTF-8), or use --errors replace, which puts U+FFFD there.")

def decoded(stream, name, errors: str):
    """The text of a binary stream, chunk by chunk; UserError gives the offset of the first byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    read = 0
    while True:
        raw = stream.read(2**18)
        waiting = len(decoder.getstate()[0])                                    # bytes of a character begun before
        try:
            yield decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as e:
            raise not_utf8(name, e, read - waiting + e.start) from None
        read += len(raw)
        if not raw:
            return

def cut_point(text: str) -> int:
    """Where to cut a text longer than BLOCK: at a blank or newline after something visible, which gpt2 never joins."""
    i, lowest = BLOCK, BLOCK - min(BLOCK // 2, 2**16)
    while (i := max(text.rfind(" ", lowest, i), text.rfind("\n", lowest, i))) > 0:
        if not text[i - 1].isspace():
            return i
    return BLOCK                                                                # 65,536 characters without a blank

def text_documents(chunks, separator: str | None):
    """(text, last) pieces of the documents in a text. A line break on either side of a separator belongs to it."""
    edge = bool(separator) and separator.strip("\r\n") == separator
    margin = len(separator) + 4 if separator else 0                             # a separator that is only half read
    rest = ""
    for chunk in chain(chunks, [None]):
        rest += chunk or ""
        start = 0
        while separator and (i := rest.find(separator, start)) >= 0:
            stop, after = i, i + len(separator)
            if chunk is not None and after + 2 > len(rest):                     # its line break may come in the next chunk
                break
            if edge:
                stop -= 2 if rest.endswith("\r\n", start, i) else rest.endswith("\n", start, i)
                after += 2 if rest.startswith("\r\n", after) else rest.startswith("\n", after)
            yield from long_document(rest[start:stop])
            start = after
        rest = rest[start:]
        while chunk is not None and len(rest) > BLOCK + margin:
            cut = cut_point(rest)
            yield rest[:cut], False
            rest = rest[cut:]
    yield from long_document(rest)

def long_document(text: str):
    """One document as (text, last) pieces of at most BLOCK characters."""
    while len(text) > BLOCK:
        cut = cut_point(text)
        yield text[:cut], False
        text = text[cut:]
    yield text, True

def json_documents(stream, name, corpus: Corpus):
    """(text, key) of the objects in a .jsonl stream."""
    offset = 0
    for number in range(1, sys.maxsize):
        raw = stream.readline(LINE_LIMIT)
        if not raw:
            return
        where = f"{name}, line {number}"
        if len(raw) == LINE_LIMIT:
            raise UserError(f"{where} is longer than {LINE_LIMIT >> 20} MiB. Is this JSON lines, one object a line?")
        try:
            line = raw.decode(errors=corpus.errors)
        except UnicodeDecodeError as e:
            raise not_utf8(where, e, offset + e.start) from None
        offset += len(raw)
        if line.isspace():
            continue
        try:
            row = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as e:
            raise UserError(f"{where} is not JSON: {e}. Is this JSON lines, one object a line?") from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is not a JSON object but {str(row)[:40]!r}. A line looks like {{\"text\": \"...\"}}.")
        if corpus.text_key not in row:
            raise UserError(f"{where} has no {corpus.text_key!r}, only {', '.join(map(repr, row)) or 'nothing'}. "
                            f"Name the text with --text_key.")
        text = row[corpus.text_key]
        if not isinstance(text, str):
            raise UserError(f"{where}: {corpus.text_key!r} is {str(text)[:40]!r}, which is not text. Choose --text_key.")
        try:
            text.encode()
        except UnicodeEncodeError as e:                                         # "\ud800" is JSON, but no character
            if corpus.errors == "strict":
                raise UserError(f"{where}: the text has half a character, \\u{ord(text[e.start]):04x}, which is not UTF-8. "
                                f"Use --errors replace, which puts U+FFFD there.") from None
            text = re.sub("[\ud800-\udfff]", "\ufffd", text)
        yield text, None

def parquet_documents(path: Path, name, corpus: Corpus):
    """(text, key, part of the file read so far) of the rows of a parquet file, a few rows at a time."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{name} needs pyarrow: pip install pyarrow, or give --input .txt or .jsonl files.") from None
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as f:      # not a whole column chunk at once
        columns = [corpus.text_key] + ([corpus.id_key] if corpus.id_key else [])
        for column in columns:
            if column not in f.schema_arrow.names:
                flag = " Name the text with --text_key." if column == corpus.text_key else ""
                raise UserError(f"{name} has no column {column!r}, only {', '.join(map(repr, f.schema_arrow.names))}.{flag}")
            kind = f.schema_arrow.field(column).type
            if not any(str(kind).startswith(word) or f"values={word}" in str(kind) for word in ("string", "large_string")):
                raise UserError(f"{name}: the column {column!r} is {kind}, which is not text. Choose --text_key.")
        number, rows = 0, max(f.metadata.num_rows, 1)
        for batch in f.iter_batches(batch_size=64, columns=columns, use_threads=False):
            texts, *ids = (batch.column(c).cast(pa.large_binary()).to_pylist() for c in columns)
            for i, raw in enumerate(texts):
                number += 1
                if raw is None:
                    continue
                try:
                    text = raw.decode(errors=corpus.errors)
                except UnicodeDecodeError as e:
                    raise not_utf8(f"{name}, row {number}", e, e.start) from None
                key = ids[0][i].decode(errors="replace") if ids and ids[0][i] is not None else None
                yield text, key, number / rows

def file_pieces(file: File, corpus: Corpus, folder: Path):
    """(key, text, last) of all documents of one file; `key` (or, when it is None, the text) decides the split."""
    before = corpus.read
    with open(file.path, "rb") as raw, damage(file.path):
        size = os.fstat(raw.fileno()).st_size
        for name, kind, stream in streams(file.path, raw):
            if kind == "text":
                for text, last in text_documents(decoded(stream, name, corpus.errors), corpus.separator):
                    corpus.read = before + raw.tell()
                    yield file.key, text, last
            elif kind == "jsonl":
                for text, key in json_documents(stream, name, corpus):
                    corpus.read = before + raw.tell()
                    for piece, last in long_document(text):
                        yield key, piece, last
            else:
                path, spare = file.path, folder / "input.tmp"                   # parquet is not read from front to back
                if stream is not raw:
                    path = spare
                    with open(spare, "wb") as f:
                        while data := stream.read(2**20):
                            f.write(data)
                for text, key, part in parquet_documents(path, name, corpus):
                    corpus.read = before + int(size * part)
                    for piece, last in long_document(text):
                        yield key, piece, last
                spare.unlink(missing_ok=True)
        corpus.read = before + size

def split_of(key: str, fractions) -> str:
    """The split of a document: bits 64 to 127 of sha256(key), as a number in [0, 1), and the fractions decide."""
    u = int.from_bytes(hashlib.sha256(key.encode()).digest()[8:16]) / 2**64
    train, val, _ = fractions
    return "val" if u < val else "train" if u < val + train else "test"

def pieces(corpus: Corpus, folder: Path, place=None, split_of=split_of):
    """(split, text, last) of everything in a corpus, in order. A document with nothing but white space is left out.

    A document goes by its file's split, by its key, or by its content, that is by its first piece (2**20 characters).
    """
    first, corpus.read = True, 0
    for file in corpus.files:
        if corpus.full and file.split == "train":
            continue
        if file.path is None:
            file.path = place(file)
        for key, text, last in file_pieces(file, corpus, folder):
            if first and last and (not text or text.isspace()):
                continue
            if first:
                split = file.split or split_of(text if key is None else key, corpus.fractions)
            first = last
            yield split, text, last
            if corpus.full and file.split == "train":
                first = True
                break

def by_position(stream, total: int, fractions):
    """(split, text, last) of one running text of `total` bytes: cut at the fractions, at whole characters."""
    ends = [round(total * fractions[0]), round(total * (fractions[0] + fractions[1])), total]
    at, part = 0, 0
    for _, text, _ in stream:
        raw = text.encode()
        while part < 2 and at + len(raw) >= ends[part]:
            cut = max(ends[part] - at, 0)
            while cut < len(raw) and raw[cut] & 0xC0 == 0x80:                   # inside a character
                cut += 1
            if fractions[part] and cut:
                yield SPLITS[part], raw[:cut].decode(), True
            raw, at, part = raw[cut:], at + cut, part + 1
        at += len(raw)
        if raw:
            yield SPLITS[part], raw.decode(), at >= total

def jobs(stream, corpus: Corpus):
    """(pieces, bytes of the files read so far): runs of pieces, about BLOCK characters each."""
    job, size = [], 0
    for piece in stream:
        job.append(piece)
        size += len(piece[1])
        if size >= BLOCK:
            yield job, corpus.read
            job, size = [], 0
    if job:
        yield job, corpus.read

# ---------------------------------------------------------------------------------------------------------------------
# downloads

WAIT, TRIES, TIMEOUT = 1.0, 5, 30      # seconds before a second try (doubled each time), tries that bring nothing, seconds of silence
ELSEWHERE = "Get it from a mirror with --source URL|FILE, or use --dataset pystdlib, which needs no network."

class Unfinished(UserError):
    """The network's fault: what has been done is kept, and the same command goes on."""

class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and keeps what the hub tells only in its first answer: the file's size and sha256."""
    size = sha256 = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        size, etag = headers.get("X-Linked-Size", ""), headers.get("X-Linked-ETag", "").strip('"')
        self.size = int(size) if size.isdigit() else self.size
        self.sha256 = etag if re.fullmatch("[0-9a-f]{64}", etag) else self.sha256
        return super().redirect_request(req, fp, code, msg, headers, newurl)

def receive(url: str, part: Path, size: int | None, bar) -> tuple:
    """One request for what `part` still lacks of `url`. Returns the length and the sha256 of the whole file, None when unknown."""
    mark, redirects = part.with_name(part.name + ".etag"), Redirects()
    have = length(part)
    request = urllib.request.Request(url, headers={"User-Agent": "nanodepth", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if mark.exists():
            request.add_header("If-Range", mark.read_text())                    # a file that has changed is sent whole
    try:
        answer = urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        if e.code != 416:
            raise
        if e.headers.get("Content-Range") == f"bytes */{have}":                 # nothing is missing
            return have, redirects.sha256
        part.unlink(missing_ok=True)                                            # more is here than there: from the start
        return -1, None
    with answer:
        total = int(answer.headers.get("Content-Length") or -1)
        if answer.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
            if not span or int(span[1]) != have:
                part.unlink(missing_ok=True)
                return -1, None
            total = int(span[2])
        else:
            have = 0
        size = size or redirects.size
        if size and total not in (-1, size):
            raise UserError(f"{url} has {total:,} bytes, and the right file has {size:,}. {ELSEWHERE}")
        etag = answer.headers.get("ETag", "")
        mark.write_text("" if etag.startswith("W/") else etag)
        if not mark.stat().st_size:
            mark.unlink()
        bar.total, bar.n = (total if total > 0 else None), have
        with open(part, "ab" if have else "wb") as f:
            while data := answer.read(2**18):
                save(f, data, part)
                bar.update(len(data))
            f.flush()
            os.fsync(f.fileno())
    return (size if total < 0 else total), redirects.sha256

def length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

def fetch(url: str, path: Path, size: int | None = None, sha256: str | None = None, check: bool = True) -> None:
    """Download to `path`, which appears when it is whole and checked. A stopped download goes on where it was.

    `check`: also by the sha256 that the server itself tells.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--source {url}: only http:// and https:// are fetched; a file or folder is named by its path.")
    part, tries = path.with_name(path.name + ".part"), 0
    with tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        while True:
            before = length(part)
            try:
                total, linked = receive(url, part, size, bar)
                if length(part) and total in (None, length(part)):
                    break
                why = f"the connection was cut after {length(part):,} of {max(total or 0, 0):,} bytes"
            except urllib.error.HTTPError as e:
                why = f"the server answered {e.code} {e.reason}"
                if e.code < 500 and e.code not in (408, 429):
                    raise UserError(f"{url}: {why}. {ELSEWHERE}") from None
            except (OSError, http.client.HTTPException) as e:
                if isinstance(e, OSError) and (e.filename or e.errno in (errno.ENOSPC, errno.EDQUOT)):
                    raise                                                       # the disk's fault
                why = f"the connection failed ({getattr(e, 'reason', None) or str(e) or type(e).__name__})"
                if isinstance(e, urllib.error.URLError) and not length(part):
                    raise Unfinished(f"{url}: {why}. {ELSEWHERE}") from None    # there is no network: no use in waiting
            tries = 0 if length(part) > before else tries + 1
            if tries == TRIES:
                raise Unfinished(f"{url}: {why}. Run the same command again to go on. {ELSEWHERE}")
            time.sleep(WAIT * 2**tries)
    try:
        if size and length(part) != size:
            raise UserError(f"{url} has {length(part):,} bytes, and the right file has {size:,}. {ELSEWHERE}")
        check_sum(part, url, sha256 or (linked if check else None))
    except UserError:
        part.unlink()
        raise
    finally:
        part.with_name(part.name + ".etag").unlink(missing_ok=True)
    os.replace(part, path)

def save(f, data, path) -> None:
    """Write, with the file's name in the error: a write says nothing of where the disk is full."""
    try:
        f.write(data)
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from None

def digest(path, kind: str = "sha256") -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, kind).hexdigest()

def check_sum(path: Path, name, known: str | None) -> None:
    """UserError unless the file has the known sha256 or md5."""
    kind = "md5" if known and len(known) == 32 else "sha256"
    if known and (got := digest(path, kind)) != known:
        raise UserError(f"{name} was changed or damaged: its {kind} is {got[:16]}..., and the right file's {known[:16]}.... "
                        f"Get it elsewhere with --source URL|FILE, or take it as it is with --no_check.")

def locate(file: File, source: str | None, cache: Path, check: bool) -> Path:
    """The path of a corpus's file: found in the folder (or as the file) --source, or downloaded to the cache."""
    name = Path(file.name).name
    bare = source and names_a_file(source) and Path(source).suffix != Path(name).suffix         # not packed
    size, known = (file.unpacked if bare else (file.size, file.sha256)) if check else (None, None)
    if source and "://" not in source:
        places = [Path(source) / file.name, Path(source) / name] if os.path.isdir(source) else [Path(source)]
        path = next((p for p in places if p.is_file()), None)
        if path is None:
            raise Unfinished(f"--source {source}: there is no {file.name} in this folder." if os.path.isdir(source) else
                             f"--source {source}: there is no such file or folder.")
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

def names_a_file(source: str) -> bool:
    """A mirror is either one file or the place, a folder or URL, that has the files under their names."""
    return Path(source).suffix in (*PACKED, *KINDS) if "://" in source else os.path.isfile(source)

def remove_empty(folders) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()

@contextlib.contextmanager
def lock(folder: Path, doing: str):
    """One process at a time; the system lets go of the lock when that process ends, however it ends."""
    path = folder / ".lock"
    while True:
        f = open(path, "a")
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.close()
            raise UserError(f"another run is {doing} {folder}. Wait for it, or choose another --out.") from None
        if os.fstat(f.fileno()).st_nlink:                                       # 0: its last owner has just removed it
            break
        f.close()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        f.close()

# ---------------------------------------------------------------------------------------------------------------------
# writing

class Writer:
    """The shards of one split. `done` is what progress.json knows of it: what lies on the disk beyond that is cut off."""

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
        """Append ids (n,), with the documents that end in them and the bytes of their text; `inside`: the last one goes on."""
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
        raise UserError(f"--split is {text!r}; it must be three numbers for train, val and test, as 95/2.5/2.5.") from None
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
    """Once train is full, val and test end with it, unless they stand somewhere else: in a file of theirs, or further on."""
    return not corpus.running and not any(f.split for f in corpus.files)

def find_characters(corpus: Corpus, make_jobs, workers: Workers) -> str:
    """Every character of the corpus, or of the part that max_tokens takes: the vocabulary of --tokenizer char."""
    known, characters, tokens = b"", set(), 0                                   # known: the ASCII ones among the characters

    def find(job):
        text = "".join(text for _, text, _ in job)
        rest = text.encode().translate(None, known).decode()                    # the known ASCII deleted: little is left
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
    """What of a job fits in `room` tokens, as (ids, documents, bytes): whole documents, but a running text is cut anywhere."""
    if len(ids) == room:
        return ids, documents, size
    ids = ids[:room]
    stops = np.flatnonzero(ids == tok.end) if tok.end is not None else ()
    if len(stops) or done["tokens"] and not done["inside"]:
        ids = ids[:stops[-1] + 1 if len(stops) else 0]
        return ids, len(stops), len(tok.decode_bytes(ids))
    return ids, 1, len(tok.decode_bytes(ids))

def write_shards(corpus: Corpus, out: Path, tok, make_jobs, workers: Workers, saved: dict, shard_tokens: int) -> None:
    """Encode all jobs after the saved ones, and write what comes of them; `saved` is kept up to date, here and on the disk."""
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
            show(bar, corpus, read, splits["train"]["tokens"] if corpus.max_tokens else sum(splits[s]["tokens"] for s in SPLITS))
            if corpus.full and stops_when_full(corpus):
                break
            # No save once train is full: the reader has then left the train file, sooner or later, and jobs no longer count alike.
            if i >= done and not corpus.full and time.monotonic() - last_save > SAVE_SECONDS:
                for writer in writers.values():
                    writer.sync()
                saved["jobs"] = i + 1
                write_json(out / "progress.json", saved)
                last_save = time.monotonic()
    for writer in writers.values():
        writer.finish()

def make(corpus: Corpus, out: Path, tokenizer: str, settings: dict, newest: int, num_proc: int, shard_tokens: int, place) -> dict:
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
                     "char": lambda: CharTokenizer(corpus.chars or find_characters(corpus, make_jobs, workers), corpus.ends)}
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
        raise UserError(f"{out} is there already, made with {k} {old.get(k)!r}, and this is {settings.get(k)!r}. "
                        f"Choose another --out, or delete that folder.")
    if newest > (out / "meta.json").stat().st_mtime_ns:
        raise UserError(f"{out} is older than its input. Choose another --out, or delete that folder.")
    print(f"{out} is there already: {summary(meta)}")

def summary(meta: dict) -> str:
    counts = ", ".join(f"{s} {meta['splits'][s]['tokens']:,}" for s in SPLITS)
    return f"{meta['tokenizer']['kind']} level, vocabulary {meta['vocab_size']:,}, tokens: {counts}"

# ---------------------------------------------------------------------------------------------------------------------
# the command

def corpus_of(dataset: str | None, input: list[str], split, separator, text_key, source) -> Corpus:
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
        hint = " A folder of ready-made shards needs no preparation: train.py --dataset PATH." if os.path.isdir(dataset) else ""
        raise UserError(f"there is no dataset {dataset!r}; there are {', '.join(DATASETS)}. For files of your own: --input.{hint}")
    for flag, value in (("split", split), ("separator", separator), ("text_key", text_key)):
        if value is not None:
            raise UserError(f"--{flag} is for --input; the layout of {dataset} is known.")
    if dataset == "pystdlib" and source:
        raise UserError("--source is for datasets that are downloaded; pystdlib is on this machine.")
    corpus = DATASETS[dataset]()
    if source and names_a_file(source) and len(corpus.files) > 1:
        if dataset != "fineweb-edu":
            raise UserError(f"--source {source} is one file; {dataset} is {len(corpus.files)}. Name the folder that has them.")
        corpus.files, corpus.total = [File(Path(source).name)], None            # one file of the sample is a corpus too
    return corpus

def prepare(dataset: str | None = None, input=None, tokenizer: str | None = None, out=None, num_proc: int | None = None,
            max_tokens=None, split: str | None = None, separator: str | None = None, text_key: str | None = None,
            errors: str = "strict", source: str | None = None, no_check: bool = False, shard_tokens=SHARD_TOKENS) -> Path:
    """Make the data folder `out` (default data/NAME) and return its path; nothing is done when it is there already.

    The arguments are the flags of the command line. UserError for whatever the user can put right.
    """
    input = [str(p) for p in ([input] if isinstance(input, (str, os.PathLike)) else input or [])]
    corpus = corpus_of(dataset, input, split, separator, text_key, source)
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
        GPT2Tokenizer().load()                                                  # can it be had? before anything is written
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
            print(f"{out}: no document fell into {s}: there are too few of them for a split by hash.{hint}", file=sys.stderr)
    return out

def info(path) -> None:
    """Print what a data folder holds. UserError when a shard is not what meta.json says."""
    data = load_data(path)
    kind = data.tokenizer.describe()["kind"] if data.tokenizer else "an unknown tokenizer"
    print(f"{data.path}: {data.meta.get('dataset', 'ready-made shards')}, {kind}, vocabulary {data.vocab_size or 'unknown'}")
    print(f"{'split':<6} {'tokens':>15} {'documents':>12} {'text bytes':>16} {'bytes/token':>12} {'shards':>7}")
    for s in SPLITS:
        tokens, counts = getattr(data, s) or (), data.meta.get("splits", {}).get(s, {})
        ratio = data.bytes_per_token(s)
        print(f"{s:<6} {len(tokens):>15,} {counts.get('documents', '?'):>12} {counts.get('bytes', '?'):>16} "
              f"{f'{ratio:.4f}' if ratio else '?':>12} {len(tokens.paths) if tokens else 0:>7}")
    shards = [shard for s in SPLITS for shard in data.meta.get("splits", {}).get(s, {}).get("shards", [])]
    bad = [shard["file"] for shard in tqdm(shards, desc="checking", disable=None, leave=False)
           if digest(data.path / shard["file"]) != shard["sha256"]]
    if bad:
        raise UserError(f"{data.path}: {', '.join(bad)} is not what meta.json says (its sha256 differs). Delete the folder and "
                        f"prepare it again.")
    print("every shard matches meta.json" if data.meta else "every shard has the length that its header says; there is no meta.json")
    if data.tokenizer:
        ids = data.train.window(0, min(len(data.train), 400))
        stops = np.flatnonzero(ids == data.tokenizer.end) if data.tokenizer.end is not None else ()
        text = data.tokenizer.decode(ids[:stops[0]] if len(stops) else ids)
        print("the first document of train begins:\n" + "\n".join("    " + line for line in text.splitlines()[:5]))

def main(argv) -> None:
    p = Parser(description=__doc__.split("\n")[0])
    p.add_argument("--dataset", metavar="NAME", help=", ".join(DATASETS))
    p.add_argument("--input", nargs="+", metavar="FILE", help=".txt, .jsonl or .parquet, also .gz, .zip, .zst; folders; globs")
    p.add_argument("--tokenizer", help="char, byte or gpt2; by default what is usual for the dataset")
    p.add_argument("--out", help="the data folder; data/NAME when not given")
    p.add_argument("--num_proc", type=int, help="workers; all cores when not given")
    p.add_argument("--max_tokens", help="at most so many tokens in train, as 2.0B, 500M or 20000; whole documents")
    p.add_argument("--split", help="--input: the shares of train, val and test, as 95/2.5/2.5")
    p.add_argument("--separator", help="--input: what ends a document in a text file, as '<|endoftext|>' or '\\n\\n'")
    p.add_argument("--text_key", help="--input: the field or column with the text; 'text' when not given")
    p.add_argument("--errors", default="strict", choices=("strict", "replace"), help="what to do with bytes that are not UTF-8")
    p.add_argument("--source", metavar="URL|FILE", help="--dataset: a mirror, or the file or folder on this machine")
    p.add_argument("--no_check", action="store_true", help="take a download or --source though length or checksum differ")
    p.add_argument("--shard_tokens", default=SHARD_TOKENS, help="tokens of a full shard")
    p.add_argument("--info", metavar="FOLDER", help="print what a data folder holds, and check it")
    args = vars(p.parse_args(argv))
    folder = args.pop("info")
    if folder:
        if args["dataset"] or args["input"]:
            raise UserError("--info stands alone: it reads a folder and makes none.")
        return info(folder)
    prepare(**args)

if __name__ == "__main__":
    run(main)
