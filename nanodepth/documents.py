"""Files as documents: .txt, .jsonl and .parquet, the first two also in .gz and .zip, in bounded memory.

    for text, stretch in read(file, corpus): ...

A text is UTF-8 bytes, at most LONG of them. A longer one comes in stretches of that length, each a document of its own;
so long a line of JSON or row of parquet is refused. A byte order mark is no text. Everything else stays as it is,
carriage returns too, but for a line break, \\n or \\r\\n, around a separator.
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
    few: bool = False                       # too few documents for hashes: each is cut by position
    ends: bool = True                       # an end token after each document
    chars: str = ""                         # of the vocabulary at character level, beside those that are found
    separator: str | None = None
    text_key: str = "text"

# ---------------------------------------------------------------------------------------------------------------------
# which files

KINDS = {".txt": "text", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
FOREIGN = (".tar", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar", ".lz4", ".pdf", ".docx", ".epub", ".bin", ".npy",
           ".parquet.gz", ".parquet.zip")
LITTER = {"__MACOSX", "__pycache__", "node_modules"}

def suffix_of(name) -> str:
    """The suffix of a name in small letters, without .gz or .zip after it."""
    return PurePosixPath(re.sub(r"(?<=.)\.(gz|zip)$", "", str(name).lower())).suffix

def kind_of(name) -> str:
    """'text', 'json' or 'parquet'; a suffix that says nothing is text. Only a .json that is named is read."""
    return KINDS.get(suffix_of(name), "json" if suffix_of(name) == ".json" else "text")

def litter(name: str) -> bool:
    return name.startswith(".") or name in LITTER

def made_by_us(folder) -> bool:
    """A data folder or a run, also an unfinished one; or a virtual environment."""
    try:
        there = set(os.listdir(folder))
    except OSError:                                                             # not ours to read
        return False
    return bool(there & {"ckpt.pt", "pyvenv.cfg"}) or {"config.json", "log.jsonl"} <= there or \
        {"meta.json", "train_000000.bin"} <= there or "parts" in there and Path(folder, "parts/record.json").exists()

def walk(folder: Path):
    """The files in a folder, at any depth, that are not hidden, a system's or our own."""
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not litter(f) and not made_by_us(Path(root, f))]
        yield from (Path(root, n) for n in sorted(names) if not litter(n) and os.path.isfile(Path(root, n)))

def input_files(patterns: list[str]) -> tuple[list[File], collections.Counter]:
    """The files that --input names, each once, and of each suffix how many are left out.

    What is named is read, as book.md or '*.py'; of a folder, of 'c/**' and of a .zip of several files, the text files.
    """
    found, left_out = {}, {}
    for pattern in patterns:
        exact = os.path.exists(pattern)
        named = [pattern] if exact else sorted(glob.glob(pattern, recursive=True))
        there = []                                                              # (path, name, whether asked for)
        for path in map(Path, named):
            folder = path if path.is_dir() else path.parent
            if not exact and (LITTER.intersection(path.parts) or made_by_us(folder)):
                continue
            if path.is_dir():
                there += [(p, p.relative_to(path).as_posix(), False) for p in sorted(walk(path))]
            else:
                there.append((path, path.name, exact or bool(Path(pattern).suffix)))
        chosen = {os.path.realpath(p): File(name, p) for p, name, asked in there if asked or suffix_of(name) in KINDS}
        if not chosen:
            what = "there is no .txt, .jsonl or .parquet file in it" if named else "there is no such file or folder"
            raise UserError(f"--input {pattern}: {what}.")
        found = found | {place: f for place, f in chosen.items() if place not in found}
        left_out |= {os.path.realpath(p): p.suffix or p.name for p, *_ in there}
    for f in found.values():
        if f.path.name.lower().endswith(FOREIGN) or ".tar." in f.path.name.lower():
            raise UserError(f"{f.path}: this kind of file is not read. Unpack or convert it to .txt, .jsonl or "
                            f".parquet (.txt and .jsonl also in .gz or .zip).")
        if not f.path.is_file():
            raise UserError(f"{f.path} is a pipe or a device, which cannot be read a second time. Save it to a file.")
        if kind_of(f.name) == "parquet":
            need("pyarrow", f.path, "convert it to .jsonl")
        if f.path.suffix.lower() == ".zip":
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
# what is wrong with a file

@contextlib.contextmanager
def damage(name):
    """What a broken file makes its library raise, as one sentence."""
    try:
        yield
    except Exception as e:
        library = type(e).__module__.startswith("pyarrow") or type(e) is OSError and e.errno is None
        if library or isinstance(e, (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError)):
            reason = (str(e) or type(e).__name__).splitlines()[0][:200]
            raise UserError(f"{name} is damaged, cut short, or not what its name says: {reason}. "
                            f"Get it again.") from None
        raise

MAGIC = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PK\x03\x04": "a .zip", b"PAR1": "parquet",
         b"\x28\xb5\x2f\xfd": "zstd", b"%PDF": "a .pdf"}

def check_start(raw: bytes, name) -> None:
    for magic, what in MAGIC.items():
        if raw.startswith(magic):
            do = "Save it as UTF-8" if what == "UTF-16" else "Unpack or convert it first"
            raise UserError(f"{name} is {what} inside, not UTF-8 text. {do}.")

def not_utf8(name, byte: int, offset: int) -> UserError:
    return UserError(f"{name} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}. Convert it "
                     f"(iconv -f ENCODING -t UTF-8), or drop such bytes (iconv -c -f UTF-8 -t UTF-8).")

# ---------------------------------------------------------------------------------------------------------------------
# the documents in a file

def utf8_chunks(stream, name, span=None):
    """A binary stream as chunks of whole characters, checked."""
    read, stop = span or (0, float("inf"))
    if read:
        stream.seek(read)
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    while True:
        raw = stream.read(min(2**18, stop - read))
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

def cut_point(text: bytes, size: int) -> int:
    """Where to cut a longer text: at a blank or newline after something visible, which gpt2 never joins, if the last
    65,536 of `size` bytes have one; else before a character."""
    i, lowest = size, size - min(size // 2, 2**16)
    while (i := max(text.rfind(b" ", lowest, i), text.rfind(b"\n", lowest, i))) > 0:
        if not text[max(i - 4, 0):i].decode(errors="ignore")[-1:].isspace():
            return i
    return character(text, size, -1)

def character(text: bytes, i: int, step: int = 1) -> int:
    """i, or the first place after it (step -1: before it) where a character begins."""
    while i < len(text) and text[i] & 0xC0 == 0x80:
        i += step
    return i

def pieces(text: bytes, size: int):
    """A text in pieces of at most `size` bytes."""
    while len(text) > size:
        cut = cut_point(text, size)
        yield text[:cut]
        text = text[cut:]
    yield text

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

def json_documents(stream, name, corpus: Corpus):
    """The texts in JSON lines."""
    offset, number = 0, 0
    while raw := stream.readline(LONG):
        number += 1
        where, at = f"{name}, line {number}", offset
        offset += len(raw)
        if number == 1:
            check_start(raw, name)
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if len(raw) >= LONG:
            raise UserError(f"{where} is longer than {LONG >> 20} MiB. Is this JSON lines, one object a line? "
                            f"A text as long as that can be a .txt file.")
        if raw.isspace():
            continue
        try:
            text = json.loads(raw.decode())[corpus.text_key]
            if text is not None:
                yield text.encode()
        except UnicodeDecodeError as e:
            raise not_utf8(where, raw[e.start], at + e.start) from None
        except UnicodeEncodeError as e:                                         # "\ud800" is JSON, but no character
            raise UserError(f"{where} has half a character, \\u{ord(text[e.start]):04x}, in its text, which is not "
                            f"UTF-8. Leave the line out, or put \\ufffd there.") from None
        except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError):
            shown = raw[:80].decode(errors="replace").strip()
            raise UserError(f"{where} is no JSON object with a text under {corpus.text_key!r}: {shown}\nName the text "
                            f"with --text_key; a line looks like {{\"text\": \"...\"}}.") from None

def parquet_documents(file: File, corpus: Corpus, size: int):
    """The texts in the rows of a parquet file, about two million bytes at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=2**20) as f:   # not a whole column chunk at once
        key, types = corpus.text_key, {field.name: str(field.type) for field in f.schema_arrow}
        if not re.match(r"(large_)?string|dictionary<values=(large_)?string", types.get(key, "")):
            what = f"the column {key!r} is {types[key]}, which is not text" if key in types else \
                f"there is no column {key!r}, only {', '.join(map(repr, types))}"
            raise UserError(f"{file.path}: {what}. Name the text with --text_key.")
        leaf = next(i for i in range(f.metadata.num_columns) if f.metadata.schema.column(i).path == key)
        number = 0
        for group in range(f.num_row_groups):
            column = f.metadata.row_group(group).column(leaf)
            average = column.total_uncompressed_size // max(column.num_values, 1) + 1
            if min(column.total_uncompressed_size, 1024 * average) > PAGE:      # writers count 1,024 rows, then bytes
                raise UserError(f"{file.path}: row group {group} has rows of {average / 1e6:.1f} MB in the mean, and "
                                f"{column.total_uncompressed_size / 1e6:,.0f} MB must be read at once. Write it again "
                                f"with row_group_size={max(PAGE // average, 1)} (pyarrow), or as .jsonl.")
            for batch in f.iter_batches(min(max(2**21 // average, 1), 256), [group], [key], use_threads=False):
                for text in batch.column(key).cast(pa.large_binary()):
                    number, text = number + 1, text.as_py() or b""
                    if len(text) > LONG:
                        raise UserError(f"{file.path}, row {number} is longer than {LONG >> 20} MiB. Leave it out, or "
                                        f"make it a .txt file.")
                    try:
                        text.isascii() or text.decode()
                    except UnicodeDecodeError as e:
                        raise not_utf8(f"{file.path}, row {number}", text[e.start], e.start) from None
                    yield text
                file.position = lambda: size * number // f.metadata.num_rows

def read(file: File, corpus: Corpus):
    """(text, whether it is a stretch of a longer one) of all documents of one file."""
    with open(file.path, "rb") as raw, damage(file.path):
        size, file.position = os.fstat(raw.fileno()).st_size, raw.tell
        if kind_of(file.path.name) == "parquet":
            yield from ((text, False) for text in parquet_documents(file, corpus, size))
        else:
            for name, stream in streams(file, raw):
                if kind_of(name) == "json":
                    yield from ((text, False) for text in json_documents(stream, name, corpus))
                else:
                    yield from text_documents(utf8_chunks(stream, name, file.span), corpus.separator)
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
