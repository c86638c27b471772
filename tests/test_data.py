"""Shards, tokenizers and data folders."""
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import sample
from nanodepth import data
from nanodepth.files import UserError
from corpora import raw_tokens, toy_gpt2, write_shard
from prepare_data import append, finish
from tiny import checkpoint, go
from nanodepth.data import (ByteTokenizer, CharTokenizer, GPT2Tokenizer, Tokens, load_data, read_shard, token_dtype,
                            tokenizer_from)

# ---------------------------------------------------------------------------------------------------------------------
# shards

@pytest.mark.parametrize("ids, magic, version, size", [
    ([0, 1, 65535], 20240520, 1, 2), ([0, 1, 65536, 2**31], 20240801, 7, 4)])
def test_a_shard_is_its_format_and_comes_back(tmp_path, ids, magic, version, size):
    path, dtype = tmp_path / "train_000000.bin", token_dtype(max(ids) + 1)
    (tmp_path / "parts").mkdir()
    counts = [[len(ids), 1, 9], [0, 0, 0], [0, 0, 0]]
    none = np.empty(0, dtype)
    halves = [[np.array(x, dtype), none, none] for x in (ids[:1], ids[1:])]
    record = {"shards": [[], [], []]}
    append(tmp_path / "parts", record, halves, np.array(counts), (1, 0))
    assert record["shards"] == [[len(ids)], [], []]
    assert finish(tmp_path, "train", [len(ids)], dtype) == [
        {"file": path.name, "tokens": len(ids), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]
    raw = path.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4")
    assert list(header[:3]) == [magic, version, len(ids)] and not header[3:].any()
    assert len(raw) == 1024 + size * len(ids)
    assert list(raw_tokens(path)) == ids == list(read_shard(path))
    assert finish(tmp_path, "val", [], dtype) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts", path.name]

def test_a_shard_is_mapped_and_not_read(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(10))
    assert isinstance(read_shard(tmp_path / "a.bin"), np.memmap)

@pytest.mark.parametrize("change, words", [
    (lambda raw: raw[:-2], "cut short"), (lambda raw: raw[:1000], "not a token shard"),
    (lambda raw: b"", "not a token shard"),
    (lambda raw: raw + b"xx", "damaged"), (lambda raw: b"PK" + raw[2:], "not a token shard"),
    (lambda raw: raw[:8] + b"\xff\xff\xff\xff" + raw[12:], "damaged"), (lambda raw: bytes(1024), "not a token shard")])
def test_no_broken_shard_is_read(tmp_path, change, words):
    path = tmp_path / "val_000000.bin"
    write_shard(path, np.arange(50))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"val_000000.bin.*{words}"):
        read_shard(path)

def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(UserError, match="train_000007.bin is missing"):
        read_shard(tmp_path / "train_000007.bin")

def test_windows_cross_shards(tmp_path):
    paths = [tmp_path / f"train_{i:06d}.bin" for i in range(4)]
    for path, part in zip(paths, ([0, 1, 2], [3], [], [4, 5, 6, 7])):
        write_shard(path, part)
    tokens = Tokens(paths)
    assert len(tokens) == 8
    for start in range(9):
        for length in range(9 - start):
            window = tokens.window(start, length)
            assert window.dtype == np.int64 and list(window) == list(range(start, start + length))
    for start, length in ((-1, 2), (7, 2), (9, 0), (0, 9)):
        with pytest.raises(IndexError):
            tokens.window(start, length)
    assert tokens.largest() == 7

# ---------------------------------------------------------------------------------------------------------------------
# tokenizers

TEXTS = ["", "a", "plain ascii\n", "été — 東京 🙂\r\n", "\x00\x7f\u0080\uffff\U0010ffff", "<|endoftext|>"]

def tokenizers(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    return [ByteTokenizer(), CharTokenizer("".join(TEXTS)), CharTokenizer("".join(TEXTS), with_end=False),
            GPT2Tokenizer()]

def test_what_is_encoded_is_decoded(monkeypatch):
    for tok in tokenizers(monkeypatch):
        for text in TEXTS:
            ids = tok.encode(text)
            assert tok.decode(ids) == text and tok.decode_bytes(ids) == text.encode()
            assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < tok.vocab_size
            assert tok.end is None or tok.end not in ids
            again = tokenizer_from(json.loads(json.dumps(tok.describe())))
            assert (again.vocab_size, again.end) == (tok.vocab_size, tok.end) and list(again.encode(text)) == list(ids)

def test_the_ids_are_the_contract_s(monkeypatch):
    byte, char, no_end, gpt2 = tokenizers(monkeypatch)
    assert (byte.vocab_size, byte.end, gpt2.vocab_size, gpt2.end) == (257, 256, 50257, 50256)
    assert list(byte.encode("é")) == [0xC3, 0xA9]
    assert list(CharTokenizer("zaéb東").encode("abzé東")) == [0, 1, 2, 3, 4]
    assert CharTokenizer("ab").end == 2 and CharTokenizer("ab").vocab_size == 3
    text8 = CharTokenizer(" abcdefghijklmnopqrstuvwxyz", with_end=False)
    assert text8.vocab_size == 27 and text8.end is None and list(text8.encode(" z")) == [0, 26]

def test_more_than_256_characters():
    chars = "".join(map(chr, range(32, 1500)))
    tok = CharTokenizer(chars)
    assert list(tok.encode(chars)) == list(range(len(chars))) and tok.decode(tok.encode(chars[::-1])) == chars[::-1]

@pytest.mark.parametrize("text, words", [("abX", r"'X' \(U\+0058\)"), ("aéb", r"'é' \(U\+00E9\)"),
                                         ("ab\n", r"'\\n' \(U\+000A\)"),
                                         ("a\ud800", "surrogate U.D800")])
def test_an_unknown_character_is_named(text, words):
    with pytest.raises(UserError, match=words):
        CharTokenizer("ab").encode(text)

def test_a_lone_surrogate_is_refused_by_all(monkeypatch):
    for tok in tokenizers(monkeypatch):
        with pytest.raises(UserError, match="U.DC80 at character 2"):
            tok.encode("ab\udc80")

def test_half_a_character_and_a_wrong_id():
    assert ByteTokenizer().decode([0x61, 0xC3, 256]) == "a\ufffd"
    for tok in (ByteTokenizer(), CharTokenizer("ab")):
        with pytest.raises(UserError, match="outside the vocabulary"):
            tok.decode([0, tok.vocab_size])

def test_texts_at_once_are_texts_one_by_one(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    texts = ["one ", "", "é東🙂", "two", ""]
    for tok in (ByteTokenizer(), CharTokenizer("".join(texts)), GPT2Tokenizer()):
        for some in (texts, texts[:1], []):
            for ends in (True, False):
                want = [i for t in some for i in [*tok.encode(t).tolist(), tok.end][:None if ends else -1]]
                ids = tok.encode_all(some, ends)
                assert ids.tolist() == want and ids.dtype == token_dtype(tok.vocab_size)

@pytest.mark.parametrize("described", [{}, {"kind": "bpe"}, {"kind": "char"}, None, "char"])
def test_an_unknown_description(described):
    with pytest.raises(UserError, match="no tokenizer"):
        tokenizer_from(described)

def test_gpt2_without_its_ranks_is_a_sentence(monkeypatch):
    def offline(name):
        raise ConnectionError("no route\nto host")
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="gpt2 tokenizer needs its ranks.*TIKTOKEN_CACHE_DIR.*--tokenizer byte") as e:
        GPT2Tokenizer().encode("text")
    assert "\n" not in str(e.value)

# ---------------------------------------------------------------------------------------------------------------------
# data folders

def make_folder(folder):
    folder.mkdir()
    parts = {"train": [[0, 1, 2, 0, 2], [1, 1, 2]], "val": [[0, 2]], "test": []}
    splits = {}
    for s, shards in parts.items():
        for i, ids in enumerate(shards):
            write_shard(folder / f"{s}_{i:06d}.bin", ids)
        splits[s] = {"tokens": sum(map(len, shards)), "documents": 1, "bytes": 2 * sum(map(len, shards)),
                     "shards": [{"file": f"{s}_{i:06d}.bin", "tokens": len(ids)} for i, ids in enumerate(shards)]}
    meta = {"vocab_size": 3, "tokenizer": {"kind": "char", "chars": "ab", "with_end": True}, "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta))
    return meta

def test_a_folder_is_loaded(tmp_path):
    make_folder(tmp_path / "d")
    d = load_data(tmp_path / "d")
    assert (d.vocab_size, len(d.train), len(d.val), d.test) == (3, 8, 2, None)
    assert list(d.train.window(3, 4)) == [0, 2, 1, 1] and d.tokenizer.decode(d.train.window(0, 8)) == "ababb"
    assert d.bytes_per_token("train") == 2 and d.bytes_per_token("test") is None
    d.check_window(1)
    with pytest.raises(UserError, match="val split has 2 tokens.*--seq_len 2 takes 3"):
        d.check_window(2)
    with pytest.raises(UserError, match="test split has 0 tokens"):
        d.check_window(1, ("test",))

@pytest.mark.parametrize("harm, words", [
    (lambda d, m: (d / "train_000001.bin").unlink(), "train_000001.bin is missing"),
    (lambda d, m: write_shard(d / "train_000001.bin", [1, 1]), "has 2 tokens, and meta.json says 3"),
    (lambda d, m: (d / "meta.json").write_text("{"), "meta.json is damaged"),
    (lambda d, m: (d / "meta.json").write_text("[]"), "meta.json is damaged"),
    (lambda d, m: (d / "meta.json").write_bytes(b"\xff\xfe"), "meta.json is damaged"),
    (lambda d, m: (d / "meta.json").write_text(json.dumps({**m, "splits": {}})), "meta.json is damaged"),
    (lambda d, m: (d / "meta.json").write_text(json.dumps(m).replace('"tokens": 8', '"tokens": 9')), "meta.json is damaged"),
    (lambda d, m: [p.unlink() for p in d.iterdir()], "neither a meta.json nor shards"),
    (lambda d, m: ((d / "meta.json").unlink(), (d / "parts").mkdir()), "not ready")])
def test_a_damaged_folder_is_a_sentence(tmp_path, harm, words):
    meta = make_folder(tmp_path / "d")
    harm(tmp_path / "d", meta)
    with pytest.raises(UserError, match=words):
        load_data(tmp_path / "d")

def test_no_folder_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no data folder"):
        load_data(tmp_path / "nothing")

@pytest.mark.parametrize("prefix", ["fineweb", "finewebedu", "edu_fineweb", "tiny_shakespeare", "tinystories"])
def test_ready_made_shards_load_as_they_are(tmp_path, prefix):
    """llm.c's and modded-nanogpt's names say that the tokens are GPT-2's."""
    for name, ids in ((f"{prefix}_train_000002.bin", [5, 6]), (f"{prefix}_train_000001.bin", [50256, 3, 4]),
                      (f"{prefix}_val_000000.bin", [9])):
        write_shard(tmp_path / name, ids)
    d = load_data(tmp_path)
    assert list(d.train.window(0, 5)) == [50256, 3, 4, 5, 6] and list(d.val.window(0, 1)) == [9] and d.test is None
    assert d.vocab_size == 50257 and d.tokenizer.describe() == {"kind": "gpt2"} and d.bytes_per_token("val") is None

def test_ready_made_shards_that_do_not_tell_their_vocabulary(tmp_path):
    write_shard(tmp_path / "mine_train_0.bin", [5, 6])
    d = load_data(tmp_path)
    assert d.vocab_size is None and d.tokenizer is None and d.val is None and d.train.largest() == 6
    for kind, size in (("gpt2", 50257), ("byte", 257)):
        d = load_data(tmp_path, kind)
        assert d.vocab_size == size and d.tokenizer.describe() == {"kind": kind}
    with pytest.raises(UserError, match="--tokenizer is 'char'; .*it can be byte or gpt2"):
        load_data(tmp_path, "char")
    write_shard(tmp_path / "mine_train_0.bin", [5, 300])
    with pytest.raises(UserError, match="--tokenizer is byte, which has 257 tokens; .* has token 300"):
        load_data(tmp_path, "byte")
    write_shard(tmp_path / "fineweb_train_000001.bin", [60000])
    (tmp_path / "mine_train_0.bin").unlink()
    assert load_data(tmp_path).vocab_size is None               # the name says GPT-2, the tokens say no
    write_shard(tmp_path / "fineweb_train_000001.bin", [100000])
    assert load_data(tmp_path).vocab_size is None and load_data(tmp_path).tokenizer is None

def test_a_prepared_folder_keeps_its_tokenizer(tmp_path):
    make_folder(tmp_path / "d")
    with pytest.raises(UserError, match="--tokenizer is gpt2, and .* was made with char"):
        load_data(tmp_path / "d", "gpt2")

def test_more_shards_than_files_may_be_open(tmp_path):
    """256 open files are what macOS allows; FineWeb-Edu's sample has 100 shards, its whole 13,000."""
    pytest.importorskip("resource")
    for i in range(300):
        write_shard(tmp_path / f"x_train_{i:06d}.bin", [i, i + 1])
    code = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.path.insert(0, {str(Path(data.__file__).parent.parent)!r})
import numpy as np
from nanodepth.data import load_data
train = load_data({str(tmp_path)!r}).train
assert list(train.window(0, 600)) == [t for i in range(300) for t in (i, i + 1)]
for i in np.random.default_rng(0).integers(300, size=1000):
    assert list(train.window(2 * i, 2)) == [i, i + 1]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

def test_foreign_shards_train_and_speak(tmp_path, capsys):
    """A folder of llm.c's format with names of its own: what sample.py then needs is in the checkpoint."""
    text = np.frombuffer(b"the cat sat on a mat " * 200, np.uint8)
    (tmp_path / "shards").mkdir()
    for name in ("corpus_train_000001.bin", "corpus_val_000000.bin"):
        write_shard(tmp_path / "shards" / name, text)
    with pytest.raises(UserError, match="how many tokens its vocabulary has; give --vocab_size or --tokenizer"):
        go("--dataset", tmp_path / "shards", "--out_dir", tmp_path / "run", "--max_iters", 1)
    go("--dataset", tmp_path / "shards", "--out_dir", tmp_path / "run", "--max_iters", 1, "--tokenizer", "byte")
    for f in (tmp_path / "shards").iterdir():
        f.unlink()                                              # the data is not needed any more
    assert checkpoint(tmp_path / "run")["tokenizer"] == {"kind": "byte"}
    capsys.readouterr()
    sample.main(["--out_dir", str(tmp_path / "run"), "--prompt", "the ", "--num_samples", "1", "--max_new_tokens", "5",
                 "--device", "cpu"])
    assert capsys.readouterr().out.startswith("the ")
