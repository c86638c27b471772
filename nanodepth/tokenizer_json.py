"""A tokenizer.json, as it lies in a Hugging Face folder, by the tokenizers library: byte level, as Qwen3's is."""
import base64
import functools
import hashlib
import json
import zlib
from pathlib import Path

import numpy as np

from nanodepth.data import Tokenizer as OurTokenizer, token_dtype, utf8
from nanodepth.documents import need
from nanodepth.files import UserError

END = "<|endoftext|>"                   # what ends a text in Qwen3's training

class HFTokenizer(OurTokenizer):
    """The tokens of a byte-level tokenizer.json. Special tokens in a text are plain text. `vocab_size` is the model's,
    which may have more rows than there are tokens; `end` is <|endoftext|>, or else the eos_token."""

    def __init__(self, text: str, vocab_size: int | None = None, eos: str | None = None, name="tokenizer.json"):
        """text: what stands in the file. vocab_size: None for as many as there are tokens."""
        need("tokenizers", f"--tokenizer {name}", "choose char, byte or gpt2")
        from tokenizers import Tokenizer
        try:
            self.bpe, decoder = Tokenizer.from_str(text), json.loads(text)["decoder"]
        except Exception as e:                                          # the library's own is a bare Exception
            raise UserError(f"{name} is damaged, or no tokenizer.json ({str(e)[:100]}). Get it again.") from None
        if (kind := (decoder or {}).get("type")) != "ByteLevel":
            raise UserError(f"{name} is not byte level, as Qwen3's is (its decoder is {kind}), so its tokens would not "
                            f"give each text back. Choose another.")
        self.bpe.encode_special_tokens = True                           # '<|endoftext|>' in a text is nothing special
        self.bpe.no_truncation()
        self.bpe.no_padding()
        self.text, self.eos, self.name = text, eos, name
        self.added = {i: token.content for i, token in self.bpe.get_added_tokens_decoder().items()}
        self.end = min((i for i, token in self.added.items() if token == END), default=None)
        if self.end is None:
            self.end = min((i for i, token in self.added.items() if token == eos), default=None)
        if self.end is None:
            raise UserError(f"{name} has no {END} among its added tokens, nor the eos_token of a tokenizer_config.json "
                            f"beside it, so nothing could end a text.")
        known = 1 + max(self.bpe.get_vocab().values())
        self.vocab_size = vocab_size or known
        if not known <= self.vocab_size < 2**24:
            raise UserError(f"{name} has {known:,} tokens, and the config.json beside it a vocab_size of "
                            f"{vocab_size:,}: they are not of one model.")
        self.dtype = token_dtype(self.vocab_size)

    @classmethod
    def from_file(cls, path):
        """With the vocab_size of the config.json and the eos_token of the tokenizer_config.json beside it."""
        def beside(name, key):
            try:
                value = json.loads(Path(path).with_name(name).read_text(encoding="utf-8"))[key]
            except (OSError, ValueError, LookupError, TypeError):
                return None
            return value.get("content") if isinstance(value, dict) else value
        size, eos = beside("config.json", "vocab_size"), beside("tokenizer_config.json", "eos_token")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"there is no tokenizer {path}.") from None
        except UnicodeDecodeError:
            raise UserError(f"{path} is no tokenizer.json: it is not UTF-8 text.") from None
        return cls(text, size if type(size) is int else None, eos, path)

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @functools.cached_property
    def packed(self) -> str:
        return base64.b64encode(zlib.compress(self.text.encode())).decode()

    def describe(self) -> dict:
        """All of it, packed: a run speaks also where the folder is not."""
        return {"kind": "tokenizer.json", "sha256": self.sha256, "vocab_size": self.vocab_size, "eos": self.eos,
                "packed": self.packed}

    @classmethod
    def from_description(cls, described: dict):
        try:
            packed = base64.b64decode(described["packed"])
            text = zlib.decompressobj().decompress(packed, 2**28).decode()      # no more, whatever it says
        except (zlib.error, ValueError) as e:
            raise UserError(f"this description of a tokenizer is damaged: {e}") from None
        return cls(text, described["vocab_size"], described["eos"])

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of each token, (vocab_size,); b"" where there is none. In the file a byte that is no visible
        character stands as one from U+0100 on, in order."""
        from tokenizers.pre_tokenizers import ByteLevel
        symbols = sorted(ByteLevel.alphabet())
        visible = {c: ord(c) for c in symbols if ord(c) < 256}
        byte = visible | dict(zip(symbols[len(visible):], sorted({*range(256)} - {*visible.values()})))
        found = [b""] * self.vocab_size
        for token, i in self.bpe.get_vocab().items():
            plain = i in self.added or not byte.keys() >= {*token}
            found[i] = token.encode() if plain else bytes(byte[c] for c in token)
        return found

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(t) for t in self.token_bytes])

    def encode(self, text: str) -> np.ndarray:
        """Ids (n,) of the text, without any token before or after it. UserError where they would not give it back."""
        utf8(text)
        ids = np.array(self.bpe.encode(text, add_special_tokens=False).ids, self.dtype)
        normed = self.bpe.normalizer.normalize_str(text) if self.bpe.normalizer else text      # Qwen3's: NFC
        if self.lengths[ids].sum() != len(normed.encode()):
            raise UserError(f"{self.name} does not give {text[:40]!r} back: it lacks tokens for some of its bytes. "
                            f"Choose another tokenizer.")
        return ids

    def decode_bytes(self, ids) -> bytes:
        return b"".join(self.token_bytes[i] for i in self.ids(ids).tolist())
