"""From files of every kind to shards: what is read, which split it goes to, and what is said when something is wrong."""
import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import prepare_data
from common import UserError
from corpora import all_bytes, byte_documents, meta, split_tokens, stories, toy_gpt2
from data import SPLITS, load_data
from prepare_data import prepare

ROOT = Path(__file__).resolve().parent.parent

def command(*args, cwd, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "prepare_data.py", *map(str, args)], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, **env}, timeout=60)

def every_document(folder) -> list[bytes]:
    return [d for s in SPLITS for d in byte_documents(folder, s)]

def write_jsonl(path: Path, texts, key="text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: t}) + "\n" for i, t in enumerate(texts)))
    return path

# ---------------------------------------------------------------------------------------------------------------------
# the built-in corpus

def toy_stdlib(root: Path) -> Path:
    for i in range(60):
        name = ["", "email/", "xml/dom/"][i % 3] + f"module{i}.py"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# file {i}\n" + "x = 1\n" * i)
    for name in ("test/test_a.py", "email/test/b.py", "unittest/tests/c.py", "site-packages/pip/d.py", "ensurepip/_bundled/e.py",
                 "encodings/f.py", "__pycache__/g.py", "config-3.11-linux/h.py", "_sysconfigdata__linux.py", "lib2to3/i.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("# not this\n")
    (root / "accents.py").write_text("# é\n")
    (root / "empty.py").write_text("")
    (root / "dangling.py").symlink_to(root / "nothing.py")
    return root

def test_pystdlib_takes_ascii_files_and_splits_by_name(tmp_path, monkeypatch):
    folders = []
    for where in ("one", "two"):
        monkeypatch.setattr(prepare_data.sysconfig, "get_path", lambda _, root=toy_stdlib(tmp_path / where): str(root))
        folders.append(prepare(dataset="pystdlib", tokenizer="byte", out=tmp_path / f"data_{where}"))
        if where == "one":                                      # the rest stays where it was, whatever comes and goes
            (tmp_path / "two").mkdir()
    assert all_bytes(folders[0]) == all_bytes(folders[1])
    documents = every_document(folders[0])
    assert len(documents) == 60 and not any(b"not this" in d for d in documents)
    names = {d.split(b"\n")[0]: ["", "email/", "xml/dom/"][i % 3] + f"module{i}.py" for i in range(60)
             for d in [b"# file %d\n" % i]}
    order = [names[d.split(b"\n")[0]] for d in byte_documents(folders[0], "train")]
    assert order == sorted(order, key=lambda n: hashlib.sha256(n.encode()).digest())
    before = {names[d.split(b"\n")[0]]: s for s in SPLITS for d in byte_documents(folders[0], s)}
    (tmp_path / "two/module0.py").unlink()
    out = prepare(dataset="pystdlib", tokenizer="byte", out=tmp_path / "data_less")
    after = {names[d.split(b"\n")[0]]: s for s in SPLITS for d in byte_documents(out, s)}
    assert after == {k: v for k, v in before.items() if k != "module0.py"} and len(set(after.values())) == 3

def test_the_real_standard_library(tmp_path):
    d = load_data(prepare(dataset="pystdlib", out=tmp_path / "d"))
    counts = d.meta["splits"]
    total = sum(counts[s]["bytes"] for s in SPLITS)
    assert 4e6 < total < 12e6 and d.vocab_size <= 129 and d.tokenizer.end == d.vocab_size - 1
    for s, share in zip(SPLITS, (0.9, 0.05, 0.05)):
        assert abs(counts[s]["bytes"] / total - share) < 0.04
        assert counts[s]["tokens"] == counts[s]["bytes"] + counts[s]["documents"] == len(getattr(d, s))
    # A bigram table knows about as much of it as the README says.
    train, val, v = d.train.window(0, len(d.train)), d.val.window(0, len(d.val)), d.vocab_size
    table = np.bincount(train[:-1] * v + train[1:], minlength=v * v).reshape(v, v) + 0.1
    loss = -np.log((table / table.sum(1, keepdims=True))[val[:-1], val[1:]]).mean()
    assert 2.2 < loss < 2.6

def test_a_python_without_its_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data.sysconfig, "get_path", lambda _: str(tmp_path / "no"))
    with pytest.raises(UserError, match="no source files.*--input"):
        prepare(dataset="pystdlib", out=tmp_path / "d")

# ---------------------------------------------------------------------------------------------------------------------
# kinds of files

def zst(path: Path, raw: bytes, frames: int = 1):
    zstandard = pytest.importorskip("zstandard")
    step = -(-len(raw) // frames)
    path.write_bytes(b"".join(zstandard.compress(raw[i:i + step]) for i in range(0, len(raw), step)))

def parquet(path: Path, texts, column="text", **columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    pq.write_table(pa.table({column: texts, **columns}), path, row_group_size=50)
    return path

@pytest.mark.parametrize("kind", ["txt", "txt.gz", "txt.zip", "txt.zst", "jsonl", "jsonl.gz", "jsonl.zip", "jsonl.zst", "ndjson",
                                  "parquet", "parquet.gz", "parquet.zip", "parquet.zst"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, kind):
    texts = stories(300)
    plain = tmp_path / f"corpus.{kind.split('.')[0]}"
    if plain.suffix == ".txt":
        plain.write_bytes("\n---\n".join(texts).encode())
    elif plain.suffix == ".parquet":
        parquet(plain, texts)
    else:
        write_jsonl(plain, texts)
    path, raw = tmp_path / f"corpus.{kind}", plain.read_bytes()
    if kind.endswith("gz"):
        path.write_bytes(gzip.compress(raw[:1000]) + gzip.compress(raw[1000:]))                # two members are one file
    if kind.endswith("zst"):
        zst(path, raw, frames=3)
    if kind.endswith("zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
            z.write(plain, plain.name)
    out = prepare(input=[str(path)], separator="---", tokenizer="byte", out=tmp_path / "out", split="80/10/10")
    reference = prepare(input=[str(write_jsonl(tmp_path / "reference.jsonl", texts))], tokenizer="byte", out=tmp_path / "ref",
                        split="80/10/10")
    for s in SPLITS:
        assert byte_documents(out, s) == byte_documents(reference, s) != []
    assert sorted(every_document(out)) == sorted(t.encode() for t in texts)
    assert sorted(p.name for p in out.iterdir()) == ["meta.json", "test_000000.bin", "train_000000.bin", "val_000000.bin"]
    counts = meta(out)["splits"]
    assert sum(counts[s]["documents"] for s in SPLITS) == 300
    assert sum(counts[s]["bytes"] for s in SPLITS) == sum(len(t.encode()) for t in texts)

def test_folders_and_globs(tmp_path):
    texts = stories(40)
    for i, t in enumerate(texts):
        path = tmp_path / "in" / ["", "deep/er"][i % 2] / f"{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(t)
    (tmp_path / "in/notes.md").write_text("not asked for")
    (tmp_path / "in/.hidden.txt").write_text("not asked for")
    (tmp_path / "in/picture.txt.png").write_bytes(b"\xff")
    folder = prepare(input=[str(tmp_path / "in")], tokenizer="byte", out=tmp_path / "a")
    pattern = prepare(input=[str(tmp_path / "in/**/*.txt")], tokenizer="byte", out=tmp_path / "b")
    assert sorted(every_document(folder)) == sorted(every_document(pattern)) == sorted(t.encode() for t in texts)
    one = prepare(input=[str(tmp_path / "in/notes.md")], tokenizer="byte", out=tmp_path / "c")  # named, so it is text
    assert b"".join(every_document(one)) == b"not asked for"

def test_a_zip_of_several_files(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as z:
        z.writestr("b/two.txt", "second")
        z.writestr("a/one.jsonl", '{"text": "first"}\n\n{"text": "another"}')
        z.writestr("__MACOSX/._one.jsonl", b"\xff\xff")
    out = prepare(input=[str(tmp_path / "all.zip")], tokenizer="byte", out=tmp_path / "out")
    assert sorted(every_document(out)) == [b"another", b"first", b"second"]

@pytest.mark.parametrize("separator, text, want", [
    ("<|endoftext|>", "one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\n", ["one", "two\nlines"]),
    ("<|endoftext|>", "one\r\n<|endoftext|>\r\n\r\ntwo<|endoftext|>three\n", ["one", "\r\ntwo", "three\n"]),
    ("<|endoftext|>", "<|endoftext|>\n \n<|endoftext|>\none", ["one"]),
    ("\\n\\n", "one\n\ntwo\n\n\n\nthree\n", ["one", "two", "three\n"]),
    ("東", "a東b\n東\nc", ["a", "b", "c"]), ("aa", "baaab", ["b", "ab"])])
def test_separators(tmp_path, monkeypatch, separator, text, want):
    (tmp_path / "a.txt").write_bytes(text.encode())
    out = prepare(input=[str(tmp_path / "a.txt")], separator=separator, tokenizer="byte", out=tmp_path / "out", split="60/20/20")
    if len(want) == 1:                                          # a single document is cut by position
        assert b"".join(every_document(out)) == want[0].encode()
    else:
        assert sorted(every_document(out)) == sorted(w.encode() for w in want)

def test_chunks_and_blocks_do_not_matter(monkeypatch):
    rng = np.random.default_rng(1)
    for trial in range(300):
        text = "".join(rng.choice(list("ab \n\r") + ["<|>", "\n<|>\n", "word ", "  "], rng.integers(0, 60)))
        monkeypatch.setattr(prepare_data, "BLOCK", int(rng.integers(4, 40)))
        whole = list(prepare_data.text_documents([text], "<|>"))
        size = int(rng.integers(1, 9))
        assert list(prepare_data.text_documents([text[i:i + size] for i in range(0, len(text), size)], "<|>")) == whole
        monkeypatch.setattr(prepare_data, "BLOCK", 10**6)
        joined, open_text = [], ""
        for piece, last in whole:
            open_text += piece
            if last:
                joined, open_text = [*joined, open_text], ""
        assert joined == [t for t, _ in prepare_data.text_documents([text], "<|>")] and open_text == ""

def test_a_long_text_is_cut_where_gpt2_cuts_too(monkeypatch):
    toy = toy_gpt2()
    rng = np.random.default_rng(2)
    monkeypatch.setattr(prepare_data, "BLOCK", 40)
    for trial in range(200):
        text = "".join(rng.choice(["the cat", " at", "  ", "\n", "\n\n", "it's", " 12", "\u00a0", "\u3000", "東", " ", "\t"], 60))
        parts = [t for t, _ in prepare_data.long_document(text)]
        assert "".join(parts) == text and all(0 < len(p) <= 40 for p in parts)
        cuts_safe = all(p[-1:].isspace() is False for p in parts[:-1] if len(p) < 40)
        assert cuts_safe
        if all(len(p) < 40 for p in parts[:-1]):
            assert [i for p in parts for i in toy.encode_ordinary(p)] == toy.encode_ordinary(text)

# ---------------------------------------------------------------------------------------------------------------------
# splits

def test_documents_go_by_their_content(tmp_path):
    texts = stories(1500)
    a = prepare(input=[str(write_jsonl(tmp_path / "a.jsonl", texts))], tokenizer="byte", out=tmp_path / "out_a")
    half = [str(write_jsonl(tmp_path / "b1.jsonl", texts[:20:-1])), str(write_jsonl(tmp_path / "b2.jsonl", texts[20::-1]))]
    b = prepare(input=half, tokenizer="byte", out=tmp_path / "out_b")
    for s, share in zip(SPLITS, (0.95, 0.025, 0.025)):
        assert set(byte_documents(a, s)) == set(byte_documents(b, s))
        assert abs(len(byte_documents(a, s)) / 1500 - share) < 0.015
    train = set(byte_documents(a, "train"))
    order = [d for d in map(str.encode, texts) if d in train]
    assert byte_documents(a, "train") == order                  # and stay in their order
    wide = prepare(input=[str(tmp_path / "a.jsonl")], tokenizer="byte", out=tmp_path / "out_c", split="0.5,0.3,0.2")
    assert abs(len(byte_documents(wide, "val")) / 1500 - 0.3) < 0.05
    twice = prepare(input=[str(write_jsonl(tmp_path / "d.jsonl", texts[:300] * 2))], tokenizer="byte", out=tmp_path / "out_d")
    assert not set(byte_documents(twice, "train")) & set(byte_documents(twice, "val"))

@pytest.mark.parametrize("tokenizer", ["byte", "char"])
@pytest.mark.parametrize("text", ["0123456789" * 100, "é東🙂x" * 250, "ab"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_one_document_is_cut_by_position(tmp_path, monkeypatch, tokenizer, text, name):
    monkeypatch.setattr(prepare_data, "BLOCK", 64)
    raw = text.encode()
    (tmp_path / name).write_bytes(raw if name == "a.txt" else gzip.compress(raw))
    d = load_data(prepare(input=[str(tmp_path / name)], tokenizer=tokenizer, out=tmp_path / "out", split="80/10/10"))
    parts = [d.tokenizer.decode(t.window(0, len(t))) if t else "" for t in (d.train, d.val, d.test)]
    assert "".join(parts) == text
    if len(raw) >= 1000:
        assert [round(10 * len(p.encode()) / len(raw), 1) for p in parts] == [8, 1, 1]
        assert all(t.window(len(t) - 1, 1) == d.tokenizer.end for t in (d.train, d.val, d.test))

def test_workers_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "BLOCK", 500)
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(400) + ["long words " * 1000]))
    for tokenizer in ("byte", "char", "gpt2"):
        outs = [prepare(input=[path], tokenizer=tokenizer, out=tmp_path / f"{tokenizer}{n}", num_proc=n, shard_tokens=10000,
                        max_tokens=limit) for n, limit in ((1, None), (4, None))]
        assert all_bytes(outs[0]) == all_bytes(outs[1]) and len(list(outs[0].glob("train_*.bin"))) > 1
        outs = [prepare(input=[path], tokenizer=tokenizer, out=tmp_path / f"{tokenizer}{n}m", num_proc=n, max_tokens="5k")
                for n in (1, 4)]
        assert all_bytes(outs[0]) == all_bytes(outs[1])

@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_max_tokens_takes_whole_documents_from_the_front(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(prepare_data, "BLOCK", 500)
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    path = str(write_jsonl(tmp_path / "a.jsonl", ["a b c d e f g h"] + stories(300)))
    everything = prepare(input=[path], tokenizer="byte", out=tmp_path / "all")
    some = load_data(prepare(input=[path], tokenizer=tokenizer, out=tmp_path / "some", max_tokens="4k"))
    assert 4000 - 200 < len(some.train) <= 4000
    text = some.tokenizer.decode(some.train.window(0, len(some.train)))
    counts = some.meta["splits"]["train"]
    assert text.encode() == b"".join(byte_documents(everything, "train")[:counts["documents"]])
    assert counts["bytes"] == len(text.encode()) and some.train.window(len(some.train) - 1, 1) == some.tokenizer.end

def test_max_tokens_of_one_running_text_is_exact(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 1000)
    out = prepare(input=[str(tmp_path / "a.txt")], tokenizer="byte", out=tmp_path / "out", max_tokens=123)
    counts = meta(out)["splits"]
    assert split_tokens(out, "train") == list((b"0123456789" * 13)[:123]) and counts["train"]["bytes"] == 123
    assert counts["val"]["tokens"] == counts["test"]["tokens"] == 251

def test_vocabularies_beyond_16_bits_are_written_wide(tmp_path):
    chars = "".join(chr(c) for c in range(32, 70000) if not 0xD800 <= c < 0xE000) * 2
    (tmp_path / "a.txt").write_bytes(chars.encode())
    d = load_data(prepare(input=[str(tmp_path / "a.txt")], tokenizer="char", out=tmp_path / "out", split="60/20/20"))
    assert d.vocab_size == 70000 - 32 - 2048 + 1 and d.train.shards[0].dtype == np.uint32
    assert "".join(d.tokenizer.decode(t.window(0, len(t))) for t in (d.train, d.val, d.test)) == chars
