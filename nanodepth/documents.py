"""Any file as a stream of documents: .txt, .jsonl and .parquet, plain or in .gz, .zip or .zst, in bounded memory.

    for split, text, last in pieces(corpus, folder): ...

A document longer than BLOCK characters comes in pieces; `last` tells that it ends. `jobs` bundles pieces.
"""
import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from nanodepth.files import UserError
from nanodepth.data import SPLITS

BLOCK = 2**20                   # characters of a job, and at most of one piece of a document
LINE_LIMIT = 2**26              # bytes of one JSON line

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
    running: int = 0                        # bytes of one running text, which is cut by position; 0: many documents
    read: Callable = lambda: 0              # bytes of the files read so far, for the bar
    full: bool = False                      # train has its max_tokens

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
            raise UserError(f"{f.path}: this kind of file is not read. Unpack or convert it to .txt, .jsonl or "
                            f".parquet (each also .gz, .zip or .zst).")
        f.size = f.path.stat().st_size
    return files

# ---------------------------------------------------------------------------------------------------------------------
# files as streams, streams as documents, documents as pieces

class Zst(io.RawIOBase):
    """A .zst file as a stream. Unlike zstandard's own reader it notices a file that is cut short."""

    def __init__(self, raw):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{raw.name} needs zstandard: pip install zstandard, or unpack it first "
                            f"with zstd -d.") from None
        self.new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        self.raw, self.frame, self.ready = raw, None, memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.ready:
            data = self.raw.read(2**14)
            if not data:
                if self.frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            parts = []
            while data:                                                         # a file may have several frames
                self.frame = self.frame or self.new()
                parts.append(self.frame.decompress(data))
                data = self.frame.unused_data if self.frame.eof else b""
                if self.frame.eof:
                    self.frame = None
            self.ready = memoryview(b"".join(parts))
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
            raise UserError(f"{name} is damaged, cut short, or not what its name says: {reason}. "
                            f"Get it again.") from None
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
            if chunk is not None and after + 2 > len(rest):                     # its line break may be still to come
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
            raise UserError(f"{where} is not a JSON object but {str(row)[:40]!r}. "
                            f"A line looks like {{\"text\": \"...\"}}.")
        if corpus.text_key not in row:
            there = ", ".join(map(repr, list(row)[:9])) or "nothing"
            raise UserError(f"{where} has no {corpus.text_key!r}, only {there}. Name the text with --text_key.")
        text = row[corpus.text_key]
        if not isinstance(text, str):
            raise UserError(f"{where}: {corpus.text_key!r} is {str(text)[:40]!r}, which is not text. "
                            f"Choose --text_key.")
        try:
            text.encode()
        except UnicodeEncodeError as e:                                         # "\ud800" is JSON, but no character
            if corpus.errors == "strict":
                raise UserError(f"{where}: the text has half a character, \\u{ord(text[e.start]):04x}, which is not "
                                f"UTF-8. Use --errors replace, which puts U+FFFD there.") from None
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
                there = ", ".join(map(repr, f.schema_arrow.names))
                raise UserError(f"{name} has no column {column!r}, only {there}.{flag}")
            kind = str(f.schema_arrow.field(column).type)
            if not re.match(r"(large_)?string|dictionary<values=(large_)?string", kind):
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

@contextlib.contextmanager
def reading(corpus: Corpus):
    """Before a file is closed, note how far it was read."""
    try:
        yield
    finally:
        at = corpus.read()
        corpus.read = lambda: at

def file_pieces(file: File, corpus: Corpus, folder: Path):
    """(key, text, last) of all documents of one file; `key` (or, when it is None, the text) decides the split."""
    before, part = corpus.read(), None
    with open(file.path, "rb") as raw, damage(file.path), reading(corpus):
        size = os.fstat(raw.fileno()).st_size
        corpus.read = lambda: before + (raw.tell() if part is None else int(size * part))
        for name, kind, stream in streams(file.path, raw):
            if kind == "text":
                for text, last in text_documents(decoded(stream, name, corpus.errors), corpus.separator):
                    yield file.key, text, last
            elif kind == "jsonl":
                for text, key in json_documents(stream, name, corpus):
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
                    for piece, last in long_document(text):
                        yield key, piece, last
                spare.unlink(missing_ok=True)
        part = 1.0                                                              # the whole file

def split_of(key: str, fractions) -> str:
    """The split of a document: bits 64 to 127 of sha256(key), as a number in [0, 1), and the fractions decide."""
    u = int.from_bytes(hashlib.sha256(key.encode()).digest()[8:16]) / 2**64
    train, val, _ = fractions
    return "val" if u < val else "train" if u < val + train else "test"

def pieces(corpus: Corpus, folder: Path, place=None, split_of=split_of):
    """(split, text, last) of everything in a corpus, in order. A document with nothing but white space is left out.

    A document goes by its file's split, by its key, or by its content, that is by its first piece (2**20 characters).
    """
    first, corpus.read = True, lambda: 0
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
            yield job, corpus.read()
            job, size = [], 0
    if job:
        yield job, corpus.read()
