"""What the tests of the data scripts share: shards read by the format's definition, a GPT-2 tokenizer without network."""
import json
import struct
import sys
import types
from pathlib import Path

import numpy as np
import tiktoken

WORDS = "the cat sat on a mat and saw that it was not his hat but one of ours , so he went home to eat fish".split()

def raw_tokens(path: Path) -> np.ndarray:
    """The tokens of one shard, read with nothing but the definition: 256 int32, then uint16 or uint32."""
    raw = Path(path).read_bytes()
    magic, version, count, *zeros = struct.unpack("<256i", raw[:1024])
    assert (magic, version) in ((20240520, 1), (20240801, 7)) and not any(zeros)
    tokens = np.frombuffer(raw[1024:], "<u2" if version == 1 else "<u4")
    assert len(tokens) == count
    return tokens

def write_shard(path: Path, ids) -> None:
    """Ids as one shard, by the same definition: uint16 while all are below 65,536."""
    ids = np.asarray(ids)
    wide = ids.max(initial=0) >= 2**16 or ids.dtype == np.uint32
    head = struct.pack("<256i", *((20240801, 7) if wide else (20240520, 1)), len(ids), *[0] * 253)
    Path(path).write_bytes(head + ids.astype("<u4" if wide else "<u2").tobytes())

def split_tokens(folder, split: str) -> list[int]:
    return [int(i) for p in sorted(Path(folder).glob(f"{split}_*.bin")) for i in raw_tokens(p)]

def byte_documents(folder, split: str) -> list[bytes]:
    """The documents of a split of a byte level folder."""
    ids = split_tokens(folder, split)
    assert not ids or ids[-1] == 256
    documents, start = [], 0
    for i, token in enumerate(ids):
        if token == 256:
            documents.append(bytes(ids[start:i]))
            start = i + 1
    return documents

def all_bytes(folder) -> dict[str, bytes]:
    """Every file of a folder: what two runs are compared by."""
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}

def meta(folder) -> dict:
    return json.loads((Path(folder) / "meta.json").read_text())

def stories(n: int, seed: int = 0) -> list[str]:
    """n different short texts with some accents and blank lines in them."""
    rng = np.random.default_rng(seed)
    ends = ["\n\nÉté — ñ 東京.\n", ".", "."]
    return [f"Story {i}: " + " ".join(rng.choice(WORDS, 12)) + ends[i % 3] for i in range(n)]

def write_stories(folder: Path, train: list[str], valid: list[str]) -> None:
    """The files of TinyStories, with these texts."""
    folder.mkdir(parents=True)
    for name, texts in (("train", train), ("valid", valid)):
        raw = "".join(t + "\n<|endoftext|>\n" for t in texts).encode()
        (folder / f"TinyStoriesV2-GPT4-{name}.txt").write_bytes(raw)

def fake_hub(monkeypatch, folder: Path, fails_at: int | None = None) -> list:
    """A huggingface_hub whose files lie in a folder; the list that comes back has every file that was asked for."""
    asked = []

    def hf_hub_download(repo, name, repo_type, revision):
        assert repo in ("HuggingFaceFW/fineweb-edu", "roneneldan/TinyStories") and repo_type == "dataset"
        assert len(revision) == 40
        asked.append(name)
        if len(asked) == fails_at:
            raise ConnectionError("the line is cut")
        return str(folder / name)
    module = types.ModuleType("huggingface_hub")
    module.hf_hub_download, module.__spec__ = hf_hub_download, types.SimpleNamespace(name="huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked

def hub_of_stories(monkeypatch, folder: Path, train: list[str], valid: list[str]) -> None:
    write_stories(folder, train, valid)
    fake_hub(monkeypatch, folder)

def toy_gpt2(name: str = "gpt2"):
    """A tiktoken encoding that cuts text as GPT-2's does, and knows a few of its merges."""
    ranks = {bytes([i]): i for i in range(256)}
    for word in (b" t", b"he", b" the", b" a", b"at", b"in", b"\n\n", b"  ", b"    ", b" c", b" cat", b"it", b"'s",
                 b"12"):
        ranks[word] = len(ranks)
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    return tiktoken.Encoding("toy", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
