"""Files as documents: .txt, .jsonl and .parquet, the first two also in .gz and .zip, in bounded memory.

    for text, stretch in read(file, corpus): ...

A text is UTF-8 bytes, at most LONG of them, and not blank. A longer one comes in stretches of that length, each a
document of its own; so long a line of JSON or row of parquet is refused. A byte order mark is no text. Everything else
stays as it is, carriage returns too, but for a line break, \\n or \\r\\n, around a separator.
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

LONG = 2**24                    # bytes of the longest document
PAGE = 2**26                    # bytes of the largest page of a parquet file, which its library reads as a whole

@dataclass
class File:
    name: str                               # in messages, and in the record of what was read
    path: Path | None = None                # None: `fetch` gives it
    fetch: Callable | None = None
    revision: str = ""                      # of what is fetched
    split: str | None = None                # all its documents go there, or
    key: str | None = None                  # the hash of this decides, not that of the content
    member: str | None = None               # the file in a .zip
    position: Callable = lambda: 0          # bytes of the file read so far, for the bar

@dataclass
class Corpus:
    name: str
    files: list[File]
    tokenizer: str = "char"                 # unless --tokenizer says otherwise
    fractions: tuple = (0.95, 0.025, 0.025) # of train, val and test
    few: bool = False                       # too few documents for hashes: each is cut by position
    ends: bool = True                       # an end token after each document
    separator: str | None = None
    text_key: str = "text"

# ---------------------------------------------------------------------------------------------------------------------
# which files

KINDS = {".txt": "text", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
PACKED = (".tar", ".tar.gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".parquet.gz", ".parquet.zip")
LITTER = {"__MACOSX", "__pycache__", "node_modules"}
OURS = (["ckpt.pt"], ["config.json", "log.jsonl"], ["train_000000.bin"], ["parts/record.json"], ["pyvenv.cfg"])

def suffix_of(name) -> str:
    """The suffix of a name in small letters, without .gz or .zip after it."""
    return PurePosixPath(re.sub(r"(?<=.)\.(gz|zip)$", "", str(name).lower())).suffix

def kind_of(name) -> str:
    """'text', 'json' or 'parquet'; a suffix that says nothing is text. Only a .json that is named is read."""
    return KINDS.get(suffix_of(name), "json" if suffix_of(name) == ".json" else "text")

def litter(name: str) -> bool:
    return name.startswith(".") or name in LITTER

def made_by_us(folder) -> bool:
    """A run or a data folder, also an unfinished one; or a virtual environment."""
    return any(all(os.path.exists(os.path.join(folder, name)) for name in names) for names in OURS)

def walk(folder: Path):
    """The files in a folder, at any depth, that are not hidden, a system's or our own."""
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not litter(f) and not made_by_us(os.path.join(root, f))]
        yield from (Path(root, n) for n in names if not litter(n) and os.path.isfile(os.path.join(root, n)))

def input_files(patterns: list[str]) -> tuple[list[File], collections.Counter]:
    """The files that --input names, each once, and of each suffix how many are left out.

    What is named is read, as book.md or '*.py'; of a folder, of 'c/**' and of a .zip of several files, the text files.
    """
    found, others = {}, {}                                                      # by their real paths
    for pattern in patterns:
        exact = os.path.exists(pattern)
        named = [pattern] if exact else sorted(glob.glob(pattern, recursive=True))
        chosen = {}
        for path in map(Path, named):
            if not exact and (LITTER.intersection(path.parts) or made_by_us(path if path.is_dir() else path.parent)):
                continue
            asked = not path.is_dir() and (exact or Path(pattern).suffix)
            for p in [path] if not path.is_dir() else sorted(walk(path)):
                (chosen if asked or suffix_of(p) in KINDS else others)[os.path.realpath(p)] = p
        if not chosen:
            what = "there is no .txt, .jsonl or .parquet file in it" if named else "there is no such file or folder"
            raise UserError(f"--input {pattern}: {what}.")
        found |= chosen
    files, left_out = [], [p for place, p in others.items() if place not in found]
    for path in found.values():
        if path.name.lower().endswith(PACKED):
            raise UserError(f"{path}: this kind of file is not read. Unpack or convert it to .txt, .jsonl or .parquet.")
        if not path.is_file():
            raise UserError(f"{path} is a pipe or a device, which cannot be read a second time. Save it to a file.")
        if kind_of(path) == "parquet":
            need("pyarrow", path, "convert it to .jsonl")
        if path.suffix.lower() == ".zip":
            members, more = zip_members(path)
            files += [File(f"{path.name}: {name}", path, member=name) for name in members]
            left_out += more
        else:
            files.append(File(path.name, path))
    return files, collections.Counter(p.suffix or p.name for p in left_out)

def zip_members(path: Path) -> tuple[list[str], list[PurePosixPath]]:
    """The files in a .zip that are read: the text files, or the only one; and the others."""
    with damage(path), zipfile.ZipFile(path) as z:
        infos = {i.filename: i for i in z.infolist()
                 if not i.is_dir() and not any(map(litter, PurePosixPath(i.filename).parts))}
    members = sorted(name for name in infos if len(infos) == 1 or suffix_of(name) in KINDS)
    for name in members:
        if infos[name].flag_bits & 1:
            raise UserError(f"{path} is encrypted. Unpack it first.")
        if name.lower().endswith((".gz", ".zip", ".parquet", *PACKED)):
            raise UserError(f"{path} has {name} in it, which is packed itself. Unpack {path.name} first.")
    return members, [PurePosixPath(name) for name in infos if name not in members]

def need(module: str, what, otherwise: str) -> None:
    """UserError when a library that only some inputs need is missing; asked before work begins."""
    if module in sys.modules and sys.modules[module] is None or not importlib.util.find_spec(module):
        raise UserError(f"{what} needs {module}: pip install {module}, or {otherwise}.")

# ---------------------------------------------------------------------------------------------------------------------
# what is wrong with a file

@contextlib.contextmanager
def damage(name):
    """What a broken file makes its library raise, as one sentence; what the disk raises stays as it is."""
    try:
        yield
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError) as e:
        if getattr(e, "errno", None):
            raise
        reason = (str(e) or type(e).__name__).splitlines()[0][:200]
        raise UserError(f"{name} is damaged, cut short, or not what its name says: {reason}. Get it again.") from None

def not_utf8(name, byte: int, offset: int) -> UserError:
    if offset == 0 and byte in b"\xff\xfe":
        return UserError(f"{name} is UTF-16 inside, not UTF-8 text. Save it as UTF-8.")
    return UserError(f"{name} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}. Unpack it if it is packed, convert "
                     f"it (iconv -f ENCODING -t UTF-8), or drop such bytes (iconv -c -f UTF-8 -t UTF-8).")

# ---------------------------------------------------------------------------------------------------------------------
# the documents in a file

def utf8_chunks(stream, name):
    """A binary stream as chunks of whole characters, checked."""
    decoder, offset, raw = codecs.getincrementaldecoder("utf-8-sig")(), 0, b"."
    while raw:
        raw = stream.read(2**18)
        waiting = len(decoder.getstate()[0])                                    # bytes of a character begun before
        try:
            yield decoder.decode(raw, final=not raw).encode()
        except UnicodeDecodeError as e:
            raise not_utf8(name, e.object[e.start], offset - waiting + e.start) from None
        offset += len(raw)

def character(text: bytes, i: int, step: int = 1) -> int:
    """i, or the first place after it (step -1: before it) where a character begins."""
    while i < len(text) and text[i] & 0xC0 == 0x80:
        i += step
    return i

def cut_point(text: bytes, size: int) -> int:
    """Where to cut a longer text: at a blank or newline after something visible, which gpt2 never joins, if the last
    65,536 of `size` bytes have one; else before a character."""
    i, lowest = size, size - min(size // 2, 2**16)
    while (i := max(text.rfind(b" ", lowest, i), text.rfind(b"\n", lowest, i))) > 0:
        if not text[max(i - 4, 0):i].decode(errors="ignore")[-1:].isspace():
            return i
    return character(text, size, -1)

def pieces(text: bytes, size: int):
    """A text in pieces of at most `size` bytes."""
    start = 0
    while len(text) - start > size:
        cut = cut_point(text[start:start + size + 1], size)
        yield text[start:start + cut]
        start += cut
    yield text[start:]

def text_documents(chunks, separator: str | None):
    """(text, whether it is a stretch of a longer one) of the documents in the chunks of a text."""
    separator = (separator or "").replace("\r\n", "\n")
    pattern = re.escape(separator.encode()).replace(b"\\\n", b"\r?\n")
    if separator.strip("\n") == separator:                                      # line breaks around it belong to it
        pattern = b"(?:\r?\n)?" + pattern + b"(?:\r?\n)?"
    find, longest = re.compile(pattern).search, 2 * len(separator.encode()) + 8
    rest, stretch, seen = bytearray(), False, 0                                 # no separator begins before `seen`
    for chunk in chain(chunks, [None]):
        rest += chunk or b""
        start = 0
        while separator and (m := find(rest, max(start, seen))):
            if chunk is not None and m.end() + 2 > len(rest):                   # its line break may be still to come
                break
            *long, text = pieces(bytes(memoryview(rest)[start:m.start()]), LONG)
            yield from ((t, True) for t in long)
            yield text, stretch or bool(long)
            start, stretch = m.end(), False
        del rest[:start]
        while len(rest) > LONG + (longest if chunk is not None else 0):
            cut, stretch = cut_point(rest, LONG), True
            yield bytes(memoryview(rest)[:cut]), True
            del rest[:cut]
        seen = max(0, len(rest) - longest)
    yield bytes(rest), stretch

def json_documents(stream, name, key: str):
    """The texts in JSON lines."""
    offset, number, parse = 0, 0, json.JSONDecoder().decode
    while raw := stream.readline(LONG):
        number += 1
        if len(raw) >= LONG:
            raise UserError(f"{name}, line {number} is longer than {LONG >> 20} MiB. Make it a .txt file.")
        try:
            line = raw.decode() if offset else raw.decode("utf-8-sig")
            text = None if line.isspace() else parse(line)[key]
            if text is not None:
                yield text.encode()
        except UnicodeDecodeError as e:
            raise not_utf8(f"{name}, line {number}", e.object[e.start], offset + e.start) from None
        except UnicodeEncodeError:                                              # "\ud800" is JSON, but no character
            raise UserError(f"{name}, line {number} has half a character in its text. Leave the line out.") from None
        except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError):
            raise UserError(f"{name}, line {number} is no JSON object with a text under {key!r}: {line[:80].strip()}\n"
                            f"Name the text with --text_key; a line looks like {{\"text\": \"...\"}}.") from None
        offset += len(raw)

def parquet_documents(raw, name, key: str):
    """The texts in the rows of a parquet file, about two million bytes at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    f = pq.ParquetFile(raw, pre_buffer=False, buffer_size=2**20)                # not a whole column chunk at once
    types = {field.name: str(field.type) for field in f.schema_arrow}
    if not re.match(r"(large_)?string|dictionary<values=(large_)?string", types.get(key, "")):
        columns = ", ".join(f"{k!r} ({v})" for k, v in types.items())
        raise UserError(f"{name}: there is no text in a column {key!r}, only {columns}. Name it with --text_key.")
    leaf = next(i for i in range(f.metadata.num_columns) if f.metadata.schema.column(i).path == key)
    number = 0
    for group in range(f.num_row_groups):
        column = f.metadata.row_group(group).column(leaf)
        average = column.total_uncompressed_size // max(column.num_values, 1) + 1
        if min(column.total_uncompressed_size, 1024 * average) > PAGE:          # writers count 1,024 rows, then bytes
            raise UserError(f"{name}: row group {group} has rows of {average / 1e6:.1f} MB in the mean, too much to "
                            f"read. Write it with row_group_size={max(PAGE // average, 1)} (pyarrow), or as .jsonl.")
        for batch in f.iter_batches(min(max(2**21 // average, 1), 256), [group], [key], use_threads=False):
            for text in batch.column(key).cast(pa.large_binary()):
                number, text = number + 1, text.as_py() or b""
                if len(text) > LONG:
                    raise UserError(f"{name}, row {number} is longer than {LONG >> 20} MiB. Make it a .txt file.")
                try:
                    text.isascii() or text.decode()
                except UnicodeDecodeError as e:
                    raise not_utf8(f"{name}, row {number}", text[e.start], e.start) from None
                yield text

def read(file: File, corpus: Corpus):
    """(text, whether it is a stretch of a longer one) of all documents of one file."""
    with open(file.path, "rb") as raw, damage(file.path), contextlib.ExitStack() as opened:
        file.position, name, stream = raw.tell, str(file.path), raw
        if file.member:
            name, stream = f"{name}: {file.member}", opened.enter_context(zipfile.ZipFile(raw)).open(file.member)
        elif name.lower().endswith(".gz"):
            stream = opened.enter_context(gzip.GzipFile(fileobj=raw))
        kind = kind_of(file.name)
        if kind == "text":
            documents = text_documents(utf8_chunks(stream, name), corpus.separator)
        else:
            reader = json_documents if kind == "json" else parquet_documents
            documents = ((text, False) for text in reader(stream, name, corpus.text_key))
        yield from (document for document in documents if document[0] and not document[0].isspace())
