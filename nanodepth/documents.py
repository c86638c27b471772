"""Files as documents: .txt, .jsonl and .parquet, the first two also in .gz and .zip, in bounded memory.

    for text, stretch in read(file, corpus): ...

A text is not blank. One of more than STRETCH characters comes in stretches of about that length, each a document of its
own; a line of JSON or row of parquet beyond LONG bytes is refused. A byte order mark is no text. Everything else stays
as it is, carriage returns too, but for a line break, \\n or \\r\\n, on either side of a separator.
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
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

from nanodepth.files import UserError

STRETCH = 2**20                 # characters, beyond which a document is cut
LONG = 2**24                    # bytes of the longest line of JSON or row of parquet
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
        names = [n for n in z.namelist() if n[-1] != "/" and not any(map(litter, PurePosixPath(n).parts))]
    members = sorted(n for n in names if n.lower().endswith((".txt", ".jsonl", ".ndjson"))
                     or len(names) == 1 and kind_of(n) != "parquet")
    if not members:
        raise UserError(f"{path} has no .txt or .jsonl file in it. If they are packed once more, unpack {path.name}.")
    return members, [PurePosixPath(n) for n in names if n not in members]

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
    except UnicodeDecodeError as e:
        if e.start == 0 and e.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise UserError(f"{name} is UTF-16 inside, not UTF-8 text. Save it as UTF-8.") from None
        near = e.object[max(e.start - 20, 0):][:40]
        raise UserError(f"{name} is not UTF-8: byte 0x{e.object[e.start]:02x} in {near}. Unpack it if it is packed, "
                        f"convert it (iconv -f ENCODING -t UTF-8), or drop such bytes (iconv -c -f UTF-8 -t "
                        f"UTF-8).") from None
    except (OSError, ValueError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as e:
        if getattr(e, "errno", None):
            raise
        reason = (str(e) or type(e).__name__).splitlines()[0][:200]
        raise UserError(f"{name} is damaged, cut short, or not what its name says: {reason}. Get it again.") from None

# ---------------------------------------------------------------------------------------------------------------------
# the documents in a file

def cut_point(text: str, start: int) -> int:
    """Where the stretch that begins at `start` ends: at a blank or newline after something visible, which gpt2 never
    joins, if there is one among its last 65,536 characters; else anywhere."""
    stop = start + STRETCH
    m = re.compile(r"(?s).*\S(?=[ \n])").match(text, stop - min(STRETCH // 2, 2**16), stop + 1)
    return m.end() if m else stop

def stretches(text: str, begun: bool = False):
    """(text, whether it is a stretch of a longer one): the text, or if it is long its stretches."""
    start = 0
    while len(text) - start > STRETCH:
        cut, begun = cut_point(text, start), True
        yield text[start:cut], True
        start = cut
    yield text[start:], begun

def text_documents(chunks, separator: str | None):
    """The stretches of the documents in the chunks of a text."""
    pattern = re.escape((separator or "").replace("\r\n", "\n")).replace("\\\n", "\r?\n").removeprefix("\r?")
    split = re.compile(pattern).split if separator else lambda text: [text]
    longest, rest, begun = 2 * len(separator or "") + 8, "\n", False             # with a line break before and after it
    for chunk in chain(chunks, [None]):
        rest += "\r\n" if chunk is None else chunk
        *texts, rest = [*split(rest), ""] if chunk is None else split(rest)
        for text in texts:
            text = text.removesuffix("\n").removesuffix("\r")
            text = text if begun else text.removeprefix("\r").removeprefix("\n")
            yield from stretches(text, begun) if len(text) > STRETCH else [(text, begun)]
            begun = False
        while len(rest) > STRETCH + longest:                                    # whose end may be half a separator
            rest = rest if begun else rest.removeprefix("\r").removeprefix("\n")
            cut, begun = cut_point(rest, 0), True
            yield rest[:cut], True
            rest = rest[cut:]

def json_documents(stream, name, key: str):
    """The texts in JSON lines."""
    parse = json.JSONDecoder().decode
    for number, raw in enumerate(iter(partial(stream.readline, LONG), b""), 1):
        if len(raw) >= LONG:
            raise UserError(f"{name}, line {number} is longer than {LONG >> 20} MiB. Make it a .txt file.")
        line = raw.decode().removeprefix("\ufeff")
        try:
            text = None if line.isspace() else parse(line)[key]
            if text is not None:
                text.isascii() or text.encode()
                yield text
        except UnicodeEncodeError:                                              # "\ud800" is JSON, but no character
            raise UserError(f"{name}, line {number} has half a character in its text. Leave the line out.") from None
        except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError):
            raise UserError(f"{name}, line {number} is no JSON object with a text under {key!r}: {line[:80].strip()}\n"
                            f"Name the text with --text_key; a line looks like {{\"text\": \"...\"}}.") from None

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
    for group in range(f.num_row_groups):
        column = f.metadata.row_group(group).column(leaf)
        average = column.total_uncompressed_size // max(column.num_values, 1) + 1
        if min(column.total_uncompressed_size, 1024 * average) > PAGE:          # writers count 1,024 rows, then bytes
            raise UserError(f"{name}: row group {group} has rows of {average / 1e6:.1f} MB in the mean, too much to "
                            f"read. Write it with row_group_size={max(PAGE // average, 1)} (pyarrow), or as .jsonl.")
        for batch in f.iter_batches(min(max(2**21 // average, 1), 256), [group], [key], use_threads=False):
            for text in batch.column(key).cast(pa.large_binary()):
                text = text.as_py() or b""
                if len(text) > LONG:
                    raise UserError(f"{name} has a row longer than {LONG >> 20} MiB. Make it a .txt file.")
                yield text.decode()

def read(file: File, corpus: Corpus):
    """(text, whether it is a stretch of a longer one) of all documents of one file."""
    name = f"{file.path}: {file.member}" if file.member else str(file.path)
    with open(file.path, "rb") as raw, damage(name), contextlib.ExitStack() as opened:
        file.position, stream = raw.tell, raw
        if file.member:
            stream = opened.enter_context(zipfile.ZipFile(raw)).open(file.member)
        elif name.lower().endswith(".gz"):
            stream = opened.enter_context(gzip.GzipFile(fileobj=raw))
        kind = kind_of(file.name)
        if kind == "text":
            chunks = codecs.iterdecode(iter(partial(stream.read, 2**20), b""), "utf-8-sig")
            documents = text_documents(chunks, corpus.separator)
        else:
            reader = json_documents if kind == "json" else parquet_documents
            documents = chain.from_iterable(map(stretches, reader(stream, name, corpus.text_key)))
        for text, stretch in documents:
            if text and not text.isspace():
                yield text, stretch
