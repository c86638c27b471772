"""Files as documents: .txt, .jsonl and .parquet, and text or JSON lines in .gz and .zip, in bounded memory.

    for key, text, last in read(file, corpus): ...

A text is UTF-8 bytes. A document that is longer than PIECE comes in pieces, and `last` tells that it ends; a line of
JSON or a row of parquet has at most LONG bytes. A byte order mark is no text. Everything else stays as it is, carriage
returns too, but for a line break, \\n or \\r\\n, around a separator.
"""
import codecs
import collections
import contextlib
import glob
import gzip
import importlib.util
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath

from nanodepth.files import UserError

PIECE = 2**20                   # bytes of a long text that are read, and encoded, at a time
LONG = 2**24                    # bytes of the longest line of JSON and the longest row of parquet
PAGE = 96 * 2**20               # bytes of the largest page of a parquet file, which its library reads as a whole

@dataclass
class File:
    name: str                               # in messages, and in the record of what was read
    path: Path | None = None                # None: `fetch` gives it
    fetch: Callable | None = None
    revision: str = ""                      # on the hub: repository and commit
    sha256: str | None = None
    split: str | None = None                # all its documents go there, or
    key: str | None = None                  # the hash of this decides, not that of the content
    members: list[str] | None = None        # of a .zip: the files that are read
    span: tuple | None = None               # from this byte of its text to that one
    position: Callable = lambda: 0          # bytes of the file read so far, for the bar

@dataclass
class Corpus:
    name: str
    files: list[File]
    tokenizer: str = "char"                 # unless --tokenizer says otherwise
    fractions: tuple = (0.95, 0.025, 0.025) # of train, val and test
    widen: bool = False                     # the fractions of val and test may grow, when they would be too small
    ends: bool = True                       # an end token after each document
    chars: str | None = None                # the vocabulary at character level; None: what is found
    separator: str | None = None
    text_key: str = "text"
    id_key: str | None = None               # the column whose hash decides the split
    errors: str = "strict"
    max_tokens: int | None = None

# ---------------------------------------------------------------------------------------------------------------------
# which files

KINDS = {".txt": "text", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
FOREIGN = (".tar", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".lz4", ".pdf", ".docx", ".epub", ".bin", ".npy")

def suffix_of(name) -> str:
    """The suffix of a name in small letters, without .gz or .zip after it."""
    return PurePosixPath(re.sub(r"(?<=.)\.(gz|zip)$", "", str(name).lower())).suffix

def kind_of(name) -> str:
    """'text', 'json' or 'parquet'; a suffix that says nothing is text. Only a .json that is named is read."""
    return KINDS.get(suffix_of(name), "json" if suffix_of(name) == ".json" else "text")

LITTER = {"__MACOSX", "__pycache__", "node_modules"}

def litter(name: str) -> bool:
    return name.startswith(".") or name in LITTER

def made_by_us(folder: Path) -> bool:
    """A data folder or a run, also an unfinished one; or a virtual environment."""
    try:
        there = set(os.listdir(folder))
    except OSError:                                                             # not ours to read
        return False
    return not there.isdisjoint({"ckpt.pt", "pyvenv.cfg"}) or {"config.json", "log.jsonl"} <= there or \
        {"meta.json", "train_000000.bin"} <= there or "parts" in there and Path(folder, "parts/record.json").exists()

def walk(folder: Path):
    """The files in a folder, at any depth, that are not hidden, a system's or our own."""
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not litter(f) and not made_by_us(Path(root, f))]
        yield from (Path(root, n) for n in names if not litter(n) and os.path.isfile(os.path.join(root, n)))

def input_files(patterns: list[str]) -> tuple[list[File], collections.Counter]:
    """The files that --input names, each once, and of each suffix how many are left out.

    What is named is read, as book.md or '*.py'; of a folder, of 'c/**' and of a .zip of several files, the text files.
    """
    found, left_out = {}, {}
    for pattern in patterns:
        exact = os.path.exists(pattern)
        named = [pattern] if exact else sorted(glob.glob(pattern, recursive=True))
        paths = {}                                                              # path -> name, and whether asked for
        for path in map(Path, named):
            if path.is_dir():
                paths |= {p: (p.relative_to(path).as_posix(), False) for p in sorted(walk(path))}
            else:
                paths[path] = path.name, exact or bool(Path(pattern).suffix)
        if not exact:
            ours = {f for f in {p.parent for p in paths} if not LITTER.isdisjoint(f.parts) or made_by_us(f)}
            paths = {p: what for p, what in paths.items() if p.parent not in ours}
        chosen = {p: name for p, (name, asked) in paths.items() if asked or suffix_of(name) in KINDS}
        if not chosen:
            what = "there is no .txt, .jsonl or .parquet file in it" if named else "there is no such file or folder"
            raise UserError(f"--input {pattern}: {what}.")
        for p, name in chosen.items():
            found.setdefault(os.path.realpath(p), File(name, p))
        left_out |= {os.path.realpath(p): p.suffix or p.name for p in paths if p not in chosen}
    for f in found.values():
        suffix, packed_parquet = f.path.suffix.lower(), f.path.name.lower().endswith((".parquet.gz", ".parquet.zip"))
        if suffix in FOREIGN or ".tar." in f.path.name.lower() or packed_parquet:
            raise UserError(f"{f.path}: this kind of file is not read. Unpack or convert it to .txt, .jsonl or "
                            f".parquet (.txt and .jsonl also in .gz or .zip).")
        if not f.path.is_file():
            raise UserError(f"{f.path} is a pipe or a device, which cannot be read a second time. Save it to a file.")
        if kind_of(f.name) == "parquet":
            need("pyarrow", f.path, "convert it to .jsonl")
        if suffix == ".zip":
            f.members, others = zip_members(f.path)
            left_out |= {f"{f.path}: {name}": PurePosixPath(name).suffix or name for name in others}
    return list(found.values()), collections.Counter(suffix for path, suffix in left_out.items() if path not in found)

def zip_members(path: Path) -> tuple[list[str], set[str]]:
    """The files in a .zip that are read, sorted: the text files, or the only one; and the others."""
    with damage(path), zipfile.ZipFile(path) as z:
        infos = {i.filename: i for i in z.infolist()
                 if not i.is_dir() and not any(map(litter, PurePosixPath(i.filename).parts))}
    members = sorted(name for name in infos if len(infos) == 1 or suffix_of(name) in KINDS)
    for name in members:
        if infos[name].flag_bits & 1:
            raise UserError(f"{path} is encrypted. Unpack it first.")
        if name.lower().endswith((".gz", ".zip", ".parquet", *FOREIGN)):
            raise UserError(f"{path} has {name} in it, which is packed itself. Unpack {path.name} first.")
    return members, infos.keys() - set(members)

def need(module: str, what, otherwise: str) -> None:
    """UserError when a library that only some inputs need is missing; asked before work begins."""
    if module in sys.modules and sys.modules[module] is None or not importlib.util.find_spec(module):
        raise UserError(f"{what} needs {module}: pip install {module}, or {otherwise}.")

# ---------------------------------------------------------------------------------------------------------------------
# files as documents

@contextlib.contextmanager
def damage(name):
    """What a broken file makes its library raise, as one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        own = type(e).__module__.startswith("pyarrow") or type(e) is OSError and e.errno is None
        if own or isinstance(e, (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError)):
            reason = (str(e) or type(e).__name__).splitlines()[0][:200]
            raise UserError(f"{name} is damaged, cut short, or not what its name says: {reason}. "
                            f"Get it again.") from None
        raise

MAGIC = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PK\x03\x04": "a .zip", b"PAR1": "parquet",
         b"\x28\xb5\x2f\xfd": "zstd", b"%PDF": "a .pdf"}

def check_start(raw: bytes, name) -> None:
    what = next((what for magic, what in MAGIC.items() if raw.startswith(magic)), None)
    if what:
        raise UserError(f"{name} is {what} inside, not UTF-8 text. " +
                        ("Save it as UTF-8." if what == "UTF-16" else "Unpack or convert it first."))

def not_utf8(name, byte: int, offset: int) -> UserError:
    return UserError(f"{name} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}. Convert it "
                     f"(iconv -f ENCODING -t UTF-8), or use --errors replace, which puts U+FFFD there.")

def utf8_chunks(stream, name, errors: str, span=None):
    """A binary stream as chunks of whole characters, checked."""
    start, stop = span or (0, float("inf"))
    if start:
        stream.seek(start)
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    read = start
    while True:
        raw = stream.read(min(2**18, stop - read) if span else 2**18)
        if read == 0:
            check_start(raw, name)
        waiting = len(decoder.getstate()[0])                                    # bytes of a character begun before
        try:
            yield decoder.decode(raw, final=not raw).encode()
        except UnicodeDecodeError as e:
            raise not_utf8(name, e.object[e.start], read - waiting + e.start) from None
        read += len(raw)
        if not raw:
            return

def cut_point(text: bytes) -> int:
    """Where to cut a text longer than PIECE: at a blank or newline after something visible, which gpt2 never joins."""
    i, lowest = PIECE, PIECE - min(PIECE // 2, 2**16)
    while (i := max(text.rfind(b" ", lowest, i), text.rfind(b"\n", lowest, i))) > 0:
        if not text[max(i - 4, 0):i].decode(errors="ignore")[-1:].isspace():
            return i
    i = PIECE                                                                   # 65,536 bytes without a blank
    while text[i] & 0xC0 == 0x80:                                               # inside a character
        i -= 1
    return i

def text_documents(chunks, separator: str | None):
    """(text, last) pieces of the documents in a text. A line break on either side of a separator belongs to it."""
    separator = (separator or "").replace("\r\n", "\n")
    find = re.compile(re.escape(separator.encode()).replace(b"\\\n", b"\r?\n").removeprefix(b"\r?")).search
    edge, margin = separator.strip("\n") == separator, 2 * len(separator.encode()) + 4
    rest = b""
    for chunk in chain(chunks, [None]):
        rest += chunk or b""
        start = 0
        while separator and (m := find(rest, start)):
            stop, after = m.span()
            if chunk is not None and after + 2 > len(rest):                     # its line break may be still to come
                break
            if edge:
                stop -= rest.endswith(b"\n", start, stop)
                after += 2 if rest.startswith(b"\r\n", after) else rest.startswith(b"\n", after)
            if stop < m.start() or separator[0] == "\n":
                stop -= rest.endswith(b"\r", start, stop)
            yield from pieces(rest[start:stop])
            start = after
        *begun, (rest, _) = pieces(rest[start:], margin if chunk is not None else 0)
        yield from begun
    yield rest, True

def pieces(text: bytes, margin: int = 0):
    """A document as (text, last) pieces of at most PIECE bytes; the last one may have `margin` more."""
    while len(text) > PIECE + margin:
        cut = cut_point(text)
        yield text[:cut], False
        text = text[cut:]
    yield text, True

def json_documents(stream, name, corpus: Corpus):
    """The texts in JSON lines."""
    offset, number = 0, 0

    def wrong(what):
        return UserError(f"{name}, line {number} {what}")

    while raw := stream.readline(LONG):
        number += 1
        if number == 1:
            check_start(raw, name)
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if len(raw) >= LONG:
            raise wrong(f"is longer than {LONG >> 20} MiB. Is this JSON lines, one object a line? "
                        f"A text as long as that can be a .txt file.")
        try:
            row = json.loads(raw.decode(errors=corpus.errors))
            text = row[corpus.text_key]
            if text is not None:
                yield text.encode()
        except UnicodeDecodeError as e:
            raise not_utf8(f"{name}, line {number}", raw[e.start], offset + e.start) from None
        except UnicodeEncodeError as e:                                         # "\ud800" is JSON, but no character
            if corpus.errors == "strict":
                raise wrong(f"has half a character, \\u{ord(text[e.start]):04x}, in its text, which is not UTF-8. "
                            f"Use --errors replace, which puts U+FFFD there.") from None
            yield re.sub("[\ud800-\udfff]", "\ufffd", text).encode()
        except (ValueError, RecursionError) as e:
            if raw and not raw.isspace():
                raise wrong(f"is not JSON: {e}. Is this JSON lines, one object a line?") from None
        except (KeyError, TypeError, IndexError, AttributeError):
            if not isinstance(row, dict):
                raise wrong(f"is not a JSON object but {str(row)[:40]!r}. "
                            f"A line looks like {{\"text\": \"...\"}}.") from None
            if corpus.text_key in row:
                raise wrong(f"has {str(text)[:40]!r} for {corpus.text_key!r}, which is not text. "
                            f"Choose --text_key.") from None
            there = ", ".join(map(repr, list(row)[:9])) or "nothing"
            raise wrong(f"has no {corpus.text_key!r}, only {there}. Name the text with --text_key.") from None
        offset += len(raw)

def parquet_documents(file: File, corpus: Corpus, size: int):
    """(key, text) of the rows of a parquet file, about two million bytes at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=2**20) as f:   # not a whole column chunk at once
        columns = [corpus.text_key] + ([corpus.id_key] if corpus.id_key else [])
        types = {field.name: str(field.type) for field in f.schema_arrow}
        for column in columns:
            if column not in types:
                raise UserError(f"{file.path} has no column {column!r}, only {', '.join(map(repr, types))}. "
                                f"Name the text with --text_key.")
            if not re.match(r"(large_)?string|dictionary<values=(large_)?string", types[column]):
                raise UserError(f"{file.path}: the column {column!r} is {types[column]}, which is not text. "
                                f"Choose --text_key.")
        leaf = next(i for i in range(f.metadata.num_columns) if f.metadata.schema.column(i).path == corpus.text_key)
        number = 0
        for group in range(f.num_row_groups):
            column = f.metadata.row_group(group).column(leaf)
            average = column.total_uncompressed_size // max(column.num_values, 1) + 1
            if min(column.total_uncompressed_size, 1024 * average) > PAGE:      # writers count 1,024 rows, then bytes
                raise UserError(f"{file.path}: row group {group} has rows of {average / 1e6:.1f} MB in the mean, and "
                                f"{column.total_uncompressed_size / 1e6:,.0f} MB must be read at once. Write it again "
                                f"with row_group_size={max(PAGE // average, 1)} (pyarrow), or as .jsonl.")
            for batch in f.iter_batches(min(max(2**21 // average, 1), 256), [group], columns, use_threads=False):
                texts, *ids = (batch.column(c).cast(pa.large_binary()) for c in columns)
                for i, text in enumerate(texts):
                    number, text = number + 1, text.as_py()
                    if text is None:
                        continue
                    if len(text) > LONG:
                        raise UserError(f"{file.path}, row {number} is longer than {LONG >> 20} MiB. Leave it out, or "
                                        f"make it a .txt file.")
                    try:
                        decoded = text.decode(errors=corpus.errors)
                    except UnicodeDecodeError as e:
                        raise not_utf8(f"{file.path}, row {number}", text[e.start], e.start) from None
                    yield ids[0][i].as_py() if ids else None, text if corpus.errors == "strict" else decoded.encode()
                file.position = lambda: size * number // f.metadata.num_rows

def read(file: File, corpus: Corpus):
    """(key, text, last) of all documents of one file; `key` or, when it is None, the text decides the split."""
    key = file.key.encode() if file.key else None
    with open(file.path, "rb") as raw, damage(file.path):
        size, file.position = os.fstat(raw.fileno()).st_size, raw.tell
        if kind_of(file.path.name) == "parquet":
            for key, text in parquet_documents(file, corpus, size):
                yield from ((key, piece, last) for piece, last in pieces(text))
        else:
            for name, stream in streams(file, raw):
                if kind_of(name) == "json":
                    for text in json_documents(stream, name, corpus):
                        if len(text) <= PIECE:
                            yield key, text, True
                        else:
                            yield from ((key, piece, last) for piece, last in pieces(text))
                else:
                    chunks = utf8_chunks(stream, name, corpus.errors, file.span)
                    for text, last in text_documents(chunks, corpus.separator):
                        yield key, text, last
        file.position = lambda: size

def streams(file: File, raw):
    """(name, binary stream) of a file: itself, unpacked, or each file in a .zip. `raw` is the open file."""
    suffix = file.path.suffix.lower()
    if suffix == ".zip":
        with zipfile.ZipFile(raw) as z:
            for member in file.members:
                with z.open(member) as f:
                    yield f"{file.path}: {member}", f
    elif suffix == ".gz":
        with gzip.GzipFile(fileobj=raw) as f:
            yield file.path, f
    else:
        yield file.path, raw
