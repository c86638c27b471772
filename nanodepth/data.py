"""What lies in a data folder: shards of tokens, meta.json, and the tokenizers that made them. Needs numpy alone.

    data = load_data("data/pystdlib")
    data.train.window(1000, 257)            # 257 tokens from position 1000 on, int64, whatever shard they lie in
    data.tokenizer.decode(data.val.window(0, 80))

A shard is the llm.c and modded-nanogpt format: a header of 256 int32 (magic, version, token count, zeros), then the
tokens. So a folder of their .bin files, which has no meta.json, loads too.
"""
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanodepth.files import UserError

SPLITS = ("train", "val", "test")
FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}      # magic, version -> the tokens' type
HEADER_BYTES = 256 * 4
MAPPED = 64                     # shards of a split; a system may allow 256 open files

# ---------------------------------------------------------------------------------------------------------------------
# shards

def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 while every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")

def shard_header(count: int, dtype: np.dtype) -> bytes:
    """The 1,024 bytes in front of `count` tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = *next(key for key, value in FORMATS.items() if value == dtype), count
    return header.tobytes()

def read_shard(path) -> np.ndarray:
    """The tokens of a shard, (n,) uint16 or uint32, mapped and not read. UserError when it is no whole shard."""
    path = Path(path)
    try:
        size = path.stat().st_size
        header = np.fromfile(path, "<i4", 256)
    except FileNotFoundError:
        raise UserError(f"{path} is missing. Prepare the data again, in an empty folder.") from None
    dtype = FORMATS.get(tuple(int(x) for x in header[:2])) if len(header) == 256 else None
    if dtype is None:
        raise UserError(f"{path} is not a token shard, of version 20240520, 1 or 20240801, 7. Use prepare_data.py.")
    count = int(header[2])
    want = HEADER_BYTES + count * dtype.itemsize
    if count < 0 or size != want:
        raise UserError(f"{path} is {'cut short' if size < want else 'damaged'}: {size:,} bytes, where its header's "
                        f"{count:,} tokens need {want:,}. Delete its folder and prepare it again.")
    return np.memmap(path, dtype, "r", HEADER_BYTES, (count,)) if count else np.empty(0, dtype)

class Tokens:
    """One split as one long sequence over its shards, of which at most MAPPED are open at a time."""

    def __init__(self, paths):
        self.paths = paths = [Path(p) for p in paths]
        self.shard = functools.lru_cache(MAPPED)(lambda i: read_shard(paths[i]))            # (n,) of shard i
        self.lengths = [len(self.shard(i)) for i in range(len(paths))]
        self.starts = np.cumsum([0] + self.lengths)                             # where each shard starts, and the end

    def __len__(self) -> int:
        return int(self.starts[-1])

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start + length, (length,) int64; IndexError when they are not all there."""
        start, stop = int(start), int(start) + int(length)
        if start < 0 or stop > len(self) or stop < start:
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        parts = []
        i = int(np.searchsorted(self.starts, start, side="right")) - 1         # the shard that holds `start`
        while start < stop:
            end = min(stop, int(self.starts[i + 1]))
            parts.append(self.shard(i)[start - self.starts[i]:end - self.starts[i]].astype(np.int64))
            start, i = end, i + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def largest(self, most: int = 100_000) -> int:
        """The largest id among the first `most` tokens of each shard: does a vocabulary fit? -1 when there is none."""
        return max((int(self.shard(i)[:most].max()) for i, n in enumerate(self.lengths) if n), default=-1)

# ---------------------------------------------------------------------------------------------------------------------
# tokenizers. Each has encode, decode, decode_bytes, vocab_size, end (an id or None) and describe.

def utf8(text: str, encoding: str = "utf-8") -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as e:             # half of a surrogate pair: from JSON, or a prompt in another encoding
        raise UserError(f"the text has the lone surrogate U+{ord(text[e.start]):04X} at character {e.start}.") from None

def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())

class Tokenizer:
    def ids(self, ids) -> np.ndarray:
        """ids (n,) int64, without the end tokens. UserError for one that is not in the vocabulary."""
        ids = np.atleast_1d(np.asarray(ids, np.int64))
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(wrong):
            raise UserError(f"token {wrong[0]} is outside the vocabulary of {self.vocab_size}.")
        return ids if self.end is None else ids[ids != self.end]

    def encode_all(self, texts: list[str], ends: bool) -> np.ndarray:
        """The ids of texts, one after the other, with the end token after each if `ends`."""
        end = np.array([self.end] * ends, token_dtype(self.vocab_size))
        return np.concatenate([end[:0], *(ids for text in texts for ids in (self.encode(text), end))])

    def describe(self) -> dict:
        return {"kind": self.kind}

    def decode(self, ids) -> str:
        """The text; an end token is nothing, and half a character is U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

class JoinedTokenizer(Tokenizer):
    """One that texts can be joined for: then many short ones are quick."""

    def encode_all(self, texts: list[str], ends: bool) -> np.ndarray:
        ids = self.encode("".join(texts))
        return np.insert(ids, np.cumsum([*map(self.length, texts)], dtype=int), self.end) if ends else ids

class ByteTokenizer(JoinedTokenizer):
    """Ids 0..255 are the bytes of the UTF-8 text; 256 ends a text."""
    kind, vocab_size, end, length = "byte", 257, 256, staticmethod(byte_length)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids) -> bytes:
        return self.ids(ids).astype(np.uint8).tobytes()

def code_points(text: str) -> np.ndarray:
    """What Unicode numbers the characters of a text with, (len(text),) uint32."""
    return np.frombuffer(utf8(text, "utf-32-le"), "<u4")

class CharTokenizer(JoinedTokenizer):
    """Ids in code-point order of the characters, then (unless with_end is False) one that ends a text."""
    length = len

    def __init__(self, chars: str, with_end: bool = True):
        self.chars = "".join(sorted(set(chars)))
        self.end = len(self.chars) if with_end else None
        self.vocab_size = len(self.chars) + with_end
        self.dtype = token_dtype(self.vocab_size)
        self.table = np.full(0x110000, -1, np.int32)                            # code point -> id; -1: unknown
        self.table[code_points(self.chars)] = np.arange(len(self.chars))
        self.ascii = self.table[:256].astype(np.uint8).tobytes()                # of ASCII; 255: unknown

    def encode(self, text: str) -> np.ndarray:
        """Ids (len(text),). UserError names the first character that is not in the vocabulary."""
        if text.isascii() and b"\xff" not in (quick := text.encode().translate(self.ascii)):
            return np.frombuffer(quick, np.uint8).astype(self.dtype)
        ids = self.table[code_points(text)]
        if len(ids) and ids.min() < 0:
            c = text[int(np.argmax(ids < 0))]
            raise UserError(f"the character {c!r} (U+{ord(c):04X}) is not in this vocabulary of {len(self.chars)} "
                            f"characters. Leave it out, or prepare and train with --tokenizer byte, which knows all.")
        return ids.astype(self.dtype)

    def decode_bytes(self, ids) -> bytes:
        return "".join(self.chars[i] for i in self.ids(ids).tolist()).encode()

    def describe(self) -> dict:
        return {"kind": "char", "chars": self.chars, "with_end": self.end is not None}

class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pairs by tiktoken; 50256 ends a text. The ranks are fetched once and kept by tiktoken."""
    kind, vocab_size, end = "gpt2", 50257, 50256

    @functools.cached_property
    def bpe(self):
        """tiktoken's encoding. UserError when its ranks are not at hand and cannot be fetched."""
        try:
            import tiktoken
            return tiktoken.get_encoding("gpt2")
        except Exception as e:                  # requests, ssl, a bad cache, ...: all of them mean "no ranks"
            raise UserError(f"the gpt2 tokenizer needs its ranks once from openaipublic.blob.core.windows.net "
                            f"({type(e).__name__}). Connect, set TIKTOKEN_CACHE_DIR to a folder that has them, or use "
                            f"--tokenizer byte.") from None

    def encode(self, text: str) -> np.ndarray:
        """Ids (n,) of the text as plain text: '<|endoftext|>' in it is nothing special."""
        text.isascii() or utf8(text)
        return self.bpe.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode_bytes(self, ids) -> bytes:
        return self.bpe.decode_bytes(self.ids(ids).tolist())

def tokenizer_from(described: dict):
    """The tokenizer whose describe() gave this dict, from a meta.json or a checkpoint."""
    try:
        kind = described["kind"]
        if kind == "char":
            return CharTokenizer(described["chars"], described["with_end"])
        if kind == "tokenizer.json":
            from nanodepth.tokenizer_json import HFTokenizer
            return HFTokenizer.from_description(described)
        return {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}[kind]()
    except (KeyError, TypeError):
        raise UserError(f"no tokenizer is known by this description: {str(described)[:80]}") from None

# ---------------------------------------------------------------------------------------------------------------------
# a data folder

@dataclass
class Data:
    path: Path
    meta: dict                              # meta.json, or {} for ready-made shards
    vocab_size: int | None                  # None: ready-made shards that do not say
    tokenizer: object | None
    train: Tokens
    val: Tokens | None
    test: Tokens | None

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of text for each token of a split, end tokens counted; None when that is not known."""
        counts = self.meta.get("splits", {}).get(split)
        return counts["bytes"] / counts["tokens"] if counts and counts["tokens"] else None

    def check_window(self, seq_len: int, splits=("train", "val")) -> None:
        """UserError when a split has not even one window of seq_len inputs and their targets."""
        for split in splits:
            n = len(getattr(self, split) or ())
            if n < seq_len + 1:
                raise UserError(f"{self.path}: the {split} split has {n:,} tokens, and one window of --seq_len "
                                f"{seq_len} takes {seq_len + 1:,}. Prepare more text, or use a smaller --seq_len.")

def load_data(path, tokenizer: str | None = None) -> Data:
    """A data folder, checked: every shard is whole and has the tokens that meta.json says. UserError otherwise.

    `tokenizer`: byte or gpt2, for shards that were made elsewhere and whose names do not say.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"there is no data folder {path}. Make it with prepare_data.py (--help shows how).")
    if not (path / "meta.json").exists():
        return load_ready_made(path, tokenizer)
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        vocab_size, described, splits = int(meta["vocab_size"]), meta["tokenizer"], {}
        for s in SPLITS:
            said, shards = meta["splits"][s], meta["splits"][s]["shards"]
            splits[s] = tokens = Tokens([path / shard["file"] for shard in shards])
            for shard, n in zip(shards, tokens.lengths):
                if n != shard["tokens"]:
                    raise UserError(f"{path / shard['file']} has {n:,} tokens, and meta.json says {shard['tokens']:,}; "
                                    f"delete {path} and prepare it again.")
            if len(tokens) != said["tokens"] or said["bytes"] < 0:
                raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path / 'meta.json'} is damaged. Delete {path} and prepare it again.") from None
    if tokenizer not in (None, described["kind"]):
        raise UserError(f"--tokenizer is {tokenizer}, and {path} was made with {described['kind']}. Leave it out.")
    if not splits["train"]:
        raise UserError(f"{path} has no training tokens. Delete it and prepare it again.")
    return Data(path, meta, vocab_size, tokenizer_from(described), **{s: t or None for s, t in splits.items()})

def load_ready_made(path: Path, tokenizer: str | None) -> Data:
    """A folder of llm.c or modded-nanogpt .bin files: the split is in each name, the order is the names'."""
    if (path / "parts").exists():
        raise UserError(f"{path} is not ready. Run the same prepare_data.py command again, to its end.")
    splits = {s: Tokens(sorted(p for p in path.glob("*.bin") if re.search(rf"(^|[_-]){s}[_.-]", p.name)))
              for s in SPLITS}
    if not splits["train"]:
        raise UserError(f"{path} has neither a meta.json nor shards like x_train_000001.bin. Use prepare_data.py.")
    if tokenizer not in (None, "byte", "gpt2"):
        raise UserError(f"--tokenizer is {tokenizer!r}; for shards made elsewhere it can be byte or gpt2.")
    # Under these names both write GPT-2 tokens, as uint16. Other names do not say.
    theirs = re.compile(r"(edu_)?fineweb(edu)?_|tiny_?shakespeare_|tiny_?stories_", re.I)
    known = all(theirs.match(p.name) for t in splits.values() for p in t.paths)
    tok = tokenizer_from({"kind": tokenizer or "gpt2"}) if tokenizer or known else None
    largest = max(t.largest() for t in splits.values())
    if tok and largest >= tok.vocab_size:
        if tokenizer:
            raise UserError(f"--tokenizer is {tokenizer}, which has {tok.vocab_size:,} tokens; {path} has token "
                            f"{largest:,}.")
        tok = None
    return Data(path, {}, tok and tok.vocab_size, tok, **{s: t or None for s, t in splits.items()})
