"""From files of every kind to shards: what is read, which split it goes to, and what is said when it is wrong."""
import errno
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import prepare_data
from nanodepth import documents, files
from nanodepth.settings import amount
from nanodepth.files import UserError, lock
from corpora import all_bytes, byte_documents, hub_of_stories, meta, raw_tokens, split_tokens, stories, toy_gpt2
from nanodepth.data import SPLITS, load_data
from prepare_data import prepare

def small(monkeypatch, job=2000, part=1, shard=10**8) -> None:
    """Sizes that make a short text as many jobs, parts and shards as a long one has."""
    monkeypatch.setattr(prepare_data, "JOB", job)
    monkeypatch.setattr(prepare_data, "PART_BYTES", part)
    monkeypatch.setattr(prepare_data, "SHARD_TOKENS", shard)

ROOT = Path(__file__).resolve().parent.parent

def command(*args, cwd, **env) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "prepare_data.py", *map(str, args)], cwd=cwd, capture_output=True,
                          text=True,
                          env={**os.environ, **env}, timeout=60)

def every_document(folder) -> list[bytes]:
    return [d for s in SPLITS for d in byte_documents(folder, s)]

def write_jsonl(path: Path, texts, key="text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: t}) + "\n" for i, t in enumerate(texts)))
    return path

# ---------------------------------------------------------------------------------------------------------------------
# the built-in corpus

def toy_stdlib(root: Path) -> Path:
    for i in range(260):
        name = ["", "email/", "xml/dom/"][i % 3] + f"module{i}.py"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# file {i}\n" + "x = 1\n" * i)
    for name in ("test/test_a.py", "email/test/b.py", "unittest/tests/c.py", "site-packages/pip/d.py",
                 "ensurepip/_bundled/e.py",
                 "encodings/f.py", "__pycache__/g.py", "config-3.11-linux/h.py", "_sysconfigdata__linux.py",
                 "lib2to3/i.py"):
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
    assert len(documents) == 260 and not any(b"not this" in d for d in documents)
    names = {d.split(b"\n")[0]: ["", "email/", "xml/dom/"][i % 3] + f"module{i}.py" for i in range(260)
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
        assert abs(counts[s]["bytes"] / total - share) < 0.06               # few documents, some of them long
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

def parquet(path: Path, texts, column="text", **columns):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    pq.write_table(pa.table({column: texts, **columns}), path, row_group_size=50)
    return path

@pytest.mark.parametrize("kind", ["txt", "txt.gz", "txt.zip", "jsonl", "jsonl.gz", "jsonl.zip", "ndjson", "parquet"])
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
        path.write_bytes(gzip.compress(raw[:1000]) + gzip.compress(raw[1000:]))    # two members are one file
    if kind.endswith("zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
            z.write(plain, plain.name)
    out = prepare(input=[str(path)], separator="---", tokenizer="byte", out=tmp_path / "out", split="80/10/10")
    reference = prepare(input=[str(write_jsonl(tmp_path / "reference.jsonl", texts))], tokenizer="byte",
                        out=tmp_path / "ref",
                        split="80/10/10")
    for s in SPLITS:
        assert byte_documents(out, s) == byte_documents(reference, s) != []
    assert sorted(every_document(out)) == sorted(t.encode() for t in texts)
    assert sorted(p.name for p in out.iterdir()) == ["meta.json", "test_000000.bin", "train_000000.bin",
                                                     "val_000000.bin"]
    counts = meta(out)["splits"]
    assert sum(counts[s]["documents"] for s in SPLITS) == 300
    assert sum(counts[s]["bytes"] for s in SPLITS) == sum(len(t.encode()) for t in texts)

def everything(folder) -> bytes:
    """Train, val and test of a byte level folder, one after the other, without the ends."""
    return b"".join(every_document(folder))

def put(path: Path, content: str | bytes = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path

def pieces_of(folder) -> list[bytes]:
    """The documents of a folder that were cut by position, each put together again from its three parts."""
    return sorted(map(b"".join, zip(*(byte_documents(folder, s) for s in SPLITS))))

def numbered(n: int) -> str:
    return f"{n} " * 400

def test_a_folder_gives_its_texts_and_nothing_else(tmp_path, monkeypatch, capsys):
    """Own outputs, hidden folders, checkpoints of editors, litter of a Mac, facts about a data set, environments."""
    monkeypatch.chdir(tmp_path)
    put(Path("a.txt"), numbered(1))
    put(Path("deep/parts/b.txt"), numbered(2))
    put(Path("c.jsonl"), json.dumps({"text": numbered(3)}))
    for name in (".git/x.txt", ".hidden.txt", ".ipynb_checkpoints/a-checkpoint.txt", "__MACOSX/a.txt", "._a.txt",
                 "node_modules/x.txt", "env/pyvenv.cfg", "env/x.txt", "out/run/log.jsonl", "out/run/config.json",
                 "out/run/ckpt.pt", "a.txt~"):
        put(Path(name), "not this ")
    for name in ("notes.md", "picture.png", "dataset_info.json", "readme.md"):
        put(Path(name), b"\xff")
    if sys.platform != "win32":
        os.symlink("nowhere", "dangling.txt")
    first = prepare(input=["."], tokenizer="byte")
    assert pieces_of(first) == sorted(numbered(i).encode() for i in (1, 2, 3))
    said = capsys.readouterr().err
    assert "5 files are not .txt, .jsonl or .parquet, and are not read (2 .md, " in said
    assert all(f"1 {x}" in said for x in (".png", ".json", ".txt~"))
    again = prepare(input=["."], tokenizer="byte", out="data/again")                # the first one lies in it now
    assert {k: v for k, v in all_bytes(again).items() if k != "meta.json"} == \
        {k: v for k, v in all_bytes(first).items() if k != "meta.json"}
    put(tmp_path / "data/broken/parts/record.json")
    put(tmp_path / "data/broken/x.txt", "not this ")
    assert pieces_of(prepare(input=["."], tokenizer="byte", out="data/third")) == pieces_of(first)

@pytest.mark.parametrize("patterns", [["c/**"], ["c", "c"], ["c/**/*.txt"], ["c/a.txt", "c", "c/b/../b/b.txt"],
                                      ["c/**", "c/**"]])
def test_no_file_is_taken_twice(tmp_path, monkeypatch, patterns):
    monkeypatch.chdir(tmp_path)
    put(Path("c/a.txt"), numbered(1))
    put(Path("c/b/b.txt"), numbered(2))
    put(Path("c/b/x/c.txt"), numbered(3))
    put(Path("c/b/picture.png"), b"\xff")
    put(Path("c/b/x/__MACOSX/d.txt"), numbered(4))
    out = prepare(input=patterns, tokenizer="byte", out="out")
    assert pieces_of(out) == sorted(numbered(i).encode() for i in (1, 2, 3))

def test_what_is_named_is_read(tmp_path):
    put(tmp_path / "notes.md", numbered(1))
    put(tmp_path / "data.json", json.dumps({"text": numbered(2)}))
    for name, n in (("notes.md", 1), ("*.md", 1), ("data.json", 2)):
        out = prepare(input=[tmp_path / name], tokenizer="byte", out=tmp_path / "out" / name.replace("*", "x"))
        assert everything(out) == numbered(n).encode()

@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file names are Unicode there")
def test_names_that_are_not_utf8(tmp_path):
    name = os.path.join(os.fsencode(tmp_path), b"in", b"caf\xe9.txt")
    os.mkdir(os.path.dirname(name))
    with open(name, "wb") as f:
        f.write(numbered(1).encode())
    for i, given in enumerate((tmp_path / "in", os.fsdecode(name))):
        cwd = put(tmp_path / f"{i}/x").parent
        done = command("--input", given, "--tokenizer", "byte", cwd=cwd, PYTHONIOENCODING="ascii")
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    with open(name, "ab") as f:
        f.write(b"\xff")
    done = command("--input", tmp_path / "in", "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 2 and "caf" in done.stderr and "is not UTF-8: byte 0xff" in done.stderr

def test_a_zip_is_a_folder(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as z:
        for name, text in (("b/two.txt", numbered(2)), ("a/one.jsonl", json.dumps({"text": numbered(1)})),
                           ("__MACOSX/a/._one.jsonl", b"\xff"), ("a/.DS_Store", b"\xff"), ("a/._one.jsonl", b"\xff"),
                           ("b/picture.png", b"\xff"), ("dataset_info.json", b"{}"), ("x.tar.gz", b"\x1f\x8b")):
            z.writestr(name, text)
    out = prepare(input=[str(tmp_path / "all.zip")], tokenizer="byte", out=tmp_path / "out")
    assert pieces_of(out) == [numbered(1).encode(), numbered(2).encode()]
    assert "3 files" in capsys.readouterr().err
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as z:
        z.writestr("LICENSE", numbered(5))                      # the only file needs no suffix
    out = prepare(input=[tmp_path / "one.zip"], tokenizer="byte", out=tmp_path / "one")
    assert everything(out) == numbered(5).encode()

@pytest.mark.parametrize("name, content, words", [
    ("a.zip", {"x.txt.gz": b"\x1f\x8b", "y.zip": b"PK"}, "has no .txt or .jsonl file in it.*unpack a.zip"),
    ("a.zip", {"x.parquet": b"PAR1", "y.parquet": b"PAR1"}, "has no .txt or .jsonl file in it"),
    ("a.zip", {"x.parquet": b"PAR1"}, "has no .txt or .jsonl file in it"),
    ("a.zip", {"x.zip": b"PK\x03\x04\xff"}, "a.zip: x.zip is not UTF-8: byte 0xff .*Unpack it"),
    ("a.txt.gz", gzip.compress(gzip.compress(b"text")), "is not UTF-8: byte 0x8b in b'.x1f.x8b.*Unpack it"),
    ("a.txt", b"PK\x03\x04\xff...", "is not UTF-8: byte 0xff in b'PK.x03.x04.xff...'. Unpack it"),
    ("a.jsonl", gzip.compress(b"{}"), "is not UTF-8: byte 0x8b in .*Unpack it"),
    ("a.txt", "text".encode("utf-16"), "is UTF-16 inside.*Save it as UTF-8"),
    ("a.jsonl", "{}".encode("utf-16"), "is UTF-16 inside"), ("a.txt.zst", b"", "kind of file is not read"),
    ("a.parquet.gz", b"", "kind of file is not read"), ("a.tar.gz", b"", "kind of file is not read")])
def test_archives_in_archives_and_other_encodings_are_a_sentence(tmp_path, name, content, words):
    if isinstance(content, dict):
        with zipfile.ZipFile(tmp_path / name, "w") as z:
            for k, v in content.items():
                z.writestr(k, v)
    else:
        put(tmp_path / name, content)
    with pytest.raises(UserError, match=words):
        prepare(input=[tmp_path / name], tokenizer="byte", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()

@pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
def test_a_pipe_is_a_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    done = subprocess.run([sys.executable, ROOT / "prepare_data.py", "--input", "/dev/stdin"], cwd=tmp_path,
                          input=b"text", capture_output=True)
    assert done.returncode == 2 and b"/dev/stdin is a pipe or a device" in done.stderr
    with pytest.raises(UserError, match="pipe.txt is a pipe or a device.*Save it to a file"):
        prepare(input=[tmp_path / "pipe.txt"], out=tmp_path / "out")

@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz", "a.zip"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    raw = b"\xef\xbb\xbf" + (json.dumps({"text": numbered(1)}) if name == "a.jsonl" else numbered(1)).encode()
    if name.endswith("zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as z:
            z.writestr("a.txt", raw)
    else:
        put(tmp_path / name, gzip.compress(raw) if name.endswith("gz") else raw)
    assert everything(prepare(input=[tmp_path / name], tokenizer="byte", out=tmp_path / "out")) == numbered(1).encode()

def test_null_rows_are_left_out_in_every_format(tmp_path):
    texts = [None if i % 3 == 0 else t for i, t in enumerate(stories(600))]
    kept = sorted(t.encode() for t in texts if t)
    for path in (write_jsonl(tmp_path / "a.jsonl", texts), parquet(tmp_path / "a.parquet", texts)):
        assert sorted(every_document(prepare(input=[path], tokenizer="byte", out=tmp_path / path.suffix[1:]))) == kept

@pytest.mark.parametrize("separator, text, want", [
    ("<|endoftext|>", "one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\n", ["one", "two\nlines"]),
    ("<|endoftext|>", "one\r\n<|endoftext|>\r\n\r\ntwo<|endoftext|>three\n", ["one", "\r\ntwo", "three\n"]),
    ("<|endoftext|>", "<|endoftext|>\n \n<|endoftext|>\none", ["one"]),
    ("\\n\\n", "one\n\ntwo\n\n\n\nthree\n", ["one", "two", "three"]),
    ("\\n\\n", "one\r\n\r\ntwo\r\nlines\n\nthree\r\n\r\n", ["one", "two\r\nlines", "three"]),
    ("---\\n", "one\r\n---\r\ntwo---\nthree", ["one", "two", "three"]),
    ("\\n\\n", "\none\n\n\ntwo", ["one", "two"]),
    (None, "\none\r", ["\none\r"]), (None, "\r\none\n\n", ["\r\none\n\n"]),
    ("東", "a東b\n東\nc", ["a", "b", "c"]), ("aa", "baaab", ["b", "ab"])])
def test_separators(tmp_path, monkeypatch, separator, text, want):
    monkeypatch.setattr(prepare_data, "FEW", 0)                 # not by position: the documents whole
    put(tmp_path / "a.txt", text)
    out = prepare(input=[str(tmp_path / "a.txt")], separator=separator, tokenizer="byte", out=tmp_path / "out",
                  split="1/0/0")
    assert byte_documents(out, "train") == [w.encode() for w in want]

def test_chunks_and_pieces_do_not_matter(monkeypatch):
    rng = np.random.default_rng(1)
    for trial in range(400):
        words = [*"ab \n\ré", "<|>", "\n<|>\n", "\r\n<|>", "word ", "  "]
        text = "".join(rng.choice(words, rng.integers(0, 60)))
        separator = ["<|>", "\n", "a\n"][trial % 3]
        monkeypatch.setattr(documents, "STRETCH", int(rng.integers(4, 40)))
        whole = list(documents.text_documents([text], separator))
        size = int(rng.integers(1, 9))
        assert list(documents.text_documents([text[i:i + size] for i in range(0, len(text), size)], separator)) == whole
        longest = documents.STRETCH
        assert all(len(t) <= longest for t, _ in whole)
        monkeypatch.setattr(documents, "STRETCH", 10**6)
        texts = [t for t, _ in documents.text_documents([text], separator)]
        monkeypatch.setattr(documents, "STRETCH", longest)
        assert [d for d in whole if d[0]] == [d for t in texts for d in documents.stretches(t) if d[0]]

def test_a_long_text_is_cut_where_gpt2_cuts_too(monkeypatch):
    toy = toy_gpt2()
    monkeypatch.setattr(documents, "STRETCH", 60)
    rng, checked = np.random.default_rng(2), 0
    for trial in range(200):
        text = "".join(rng.choice(["the cat", " at", "  ", "\n", "\n\n", "it's", " 12", "\u00a0", "\u3000", "東", " ",
                                   "\t"], 60))
        parts = [t for t, _ in documents.stretches(text)]
        assert "".join(parts) == text and all(0 < len(p) <= 60 for p in parts)
        starts = [0, *np.cumsum([len(p) for p in parts])]
        good = [b[0] in " \n" and not a[-1].isspace() for a, b in pairwise(parts)]
        assert good == [bool(re.search(r"\S[ \n]", text[i + 30:i + 61])) for i in starts[:len(good)]]
        if all(good):                                           # there was a blank to cut at
            checked += 1
            assert [i for p in parts for i in toy.encode_ordinary(p)] == toy.encode_ordinary(text)
    assert checked > 20

# ---------------------------------------------------------------------------------------------------------------------
# splits

def test_documents_go_by_their_content(tmp_path):
    texts = stories(1500)
    a = prepare(input=[str(write_jsonl(tmp_path / "a.jsonl", texts))], tokenizer="byte", out=tmp_path / "out_a")
    half = [str(write_jsonl(tmp_path / "b1.jsonl", texts[:20:-1])),
            str(write_jsonl(tmp_path / "b2.jsonl", texts[20::-1]))]
    b = prepare(input=half, tokenizer="byte", out=tmp_path / "out_b")
    for s, share in zip(SPLITS, (0.95, 0.025, 0.025)):
        assert set(byte_documents(a, s)) == set(byte_documents(b, s))
        assert abs(len(byte_documents(a, s)) / 1500 - share) < 0.015
    train = set(byte_documents(a, "train"))
    order = [d for d in map(str.encode, texts) if d in train]
    assert byte_documents(a, "train") == order                  # and stay in their order
    wide = prepare(input=[str(tmp_path / "a.jsonl")], tokenizer="byte", out=tmp_path / "out_c", split="0.5,0.3,0.2")
    assert abs(len(byte_documents(wide, "val")) / 1500 - 0.3) < 0.05
    twice = prepare(input=[str(write_jsonl(tmp_path / "d.jsonl", texts[:300] * 2))], tokenizer="byte",
                    out=tmp_path / "out_d")
    assert not set(byte_documents(twice, "train")) & set(byte_documents(twice, "val"))

@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
@pytest.mark.parametrize("text", ["0123456789" * 100, "é東🙂x" * 250, "ab"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_one_document_is_cut_by_position(tmp_path, monkeypatch, tokenizer, text, name):
    small(monkeypatch, 64)
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    raw = text.encode()
    (tmp_path / name).write_bytes(raw if name == "a.txt" else gzip.compress(raw))
    d = load_data(prepare(input=[str(tmp_path / name)], tokenizer=tokenizer, out=tmp_path / "out", split="80/10/10"))
    parts = [d.tokenizer.decode(t.window(0, len(t))) if t else "" for t in (d.train, d.val, d.test)]
    assert "".join(parts) == text                               # so no character is cut in two
    if len(raw) >= 1000:
        assert [round(10 * len(p.encode()) / len(raw), 1) for p in parts] == [8, 1, 1]
        assert all(t.window(len(t) - 1, 1) == d.tokenizer.end for t in (d.train, d.val, d.test))

@pytest.mark.parametrize("n", [1, 2, 6, 60, 199, 200, 250])
@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_few_documents_give_two_windows_in_each_split(tmp_path, monkeypatch, capsys, n, tokenizer):
    """A few thousand tokens, as one document or as many."""
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    rng = np.random.default_rng(n)
    texts = ["".join(rng.choice(list("xyzw uvé.,"), -(-4000 // n))) for _ in range(n)]
    for i, t in enumerate(texts):
        put(tmp_path / f"a/{i:03d}.txt", t)
    write_jsonl(tmp_path / "b.jsonl", texts)
    for source in ("a", "b.jsonl"):                             # files of their own, or lines of one
        out = prepare(input=[tmp_path / source], tokenizer=tokenizer, out=tmp_path / f"out{source}")
        d = load_data(out)
        d.check_window(128, SPLITS)
        assert all(len(getattr(d, s)) >= 2 * 128 + 1 for s in SPLITS) and len(d.train) > 2000
        assert "val has only" in capsys.readouterr().err
        if n < 100:                                             # every document has a part in every split
            assert all(meta(out)["splits"][s]["documents"] == n for s in SPLITS)
        elif n >= 200:
            assert sum(meta(out)["splits"][s]["documents"] for s in SPLITS) == n

def test_enough_text_is_divided_as_it_says_and_not_warned_of(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [t * 60 for t in stories(300)])
    counts = meta(prepare(input=[path], tokenizer="byte", out=tmp_path / "out"))
    assert counts["fractions"] == [0.95, 0.025, 0.025] and capsys.readouterr().err == ""

@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_very_long_document_among_many_is_cut_too(tmp_path, monkeypatch, kind):
    """In stretches, each of which is a document."""
    monkeypatch.setattr(documents, "STRETCH", 5001)
    small(monkeypatch)
    long = put(tmp_path / "long.txt", "word " * 4000)
    if kind == "jsonl":
        long = write_jsonl(tmp_path / "long.jsonl", ["word " * 4000])
    out = prepare(input=[write_jsonl(tmp_path / "a.jsonl", stories(300)), long], tokenizer="byte",
                  out=tmp_path / "out", split="80/10/10")
    cut = [[d for d in byte_documents(out, s) if not d.startswith(b"Story")] for s in SPLITS]
    assert [len(c) for c in cut] == [4, 4, 4] and sum(len(byte_documents(out, s)) for s in SPLITS) == 312
    assert b"".join(a + b + c for a, b, c in zip(*cut)) == b"word " * 4000
    assert all(abs(len(b"".join(c)) / 20_000 - share) < 0.001 for c, share in zip(cut, (0.8, 0.1, 0.1)))

def test_workers_do_not_matter(tmp_path, monkeypatch):
    small(monkeypatch, 500, 3000, 10_000)
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(400) + ["long words " * 1000]))
    for tokenizer in ("byte", "char", "gpt2"):
        for limit in (None, "5k"):
            outs = [prepare(input=[path], tokenizer=tokenizer, out=tmp_path / f"{tokenizer}{n}{limit}", num_proc=n,
                            max_tokens=limit) for n in (1, 4)]
            assert all_bytes(outs[0]) == all_bytes(outs[1])
            assert (len(list(outs[0].glob("train_*.bin"))) > 1) == (limit is None)

@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_max_tokens_takes_documents_from_the_front_and_cuts_the_last(tmp_path, monkeypatch, tokenizer):
    small(monkeypatch, 500)
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    path = str(write_jsonl(tmp_path / "a.jsonl", ["a b c d e f g h"] + stories(300)))
    everything = prepare(input=[path], tokenizer="byte", out=tmp_path / "all", split="95/2.5/2.5")
    some = load_data(prepare(input=[path], tokenizer=tokenizer, out=tmp_path / "some", max_tokens="4k"))
    assert len(some.train) == 4000
    text = some.tokenizer.decode(some.train.window(0, len(some.train)))
    counts = some.meta["splits"]["train"]
    documents = byte_documents(everything, "train")
    whole = b"".join(documents[:counts["documents"]])
    cut = text.encode().removeprefix(whole)
    assert text.encode().startswith(whole) and documents[counts["documents"]].startswith(cut) and cut
    assert counts["bytes"] == len(text.encode())

def test_max_tokens_of_one_running_text_is_exact(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 1000)
    out = prepare(input=[str(tmp_path / "a.txt")], tokenizer="byte", out=tmp_path / "out", max_tokens=123,
                  split="95/2.5/2.5")
    counts = meta(out)["splits"]
    assert split_tokens(out, "train") == list((b"0123456789" * 13)[:123]) and counts["train"]["bytes"] == 123
    assert counts["val"]["tokens"] == counts["test"]["tokens"] == 251

def test_vocabularies_beyond_16_bits_are_written_wide(tmp_path):
    chars = "".join(chr(c) for c in range(32, 70000) if not 0xD800 <= c < 0xE000) * 2
    (tmp_path / "a.txt").write_bytes(chars.encode())
    d = load_data(prepare(input=[str(tmp_path / "a.txt")], tokenizer="char", out=tmp_path / "out", split="60/20/20"))
    assert d.vocab_size == 70000 - 32 - 2048 + 1 and d.train.shard(0).dtype == np.uint32
    assert "".join(d.tokenizer.decode(t.window(0, len(t))) for t in (d.train, d.val, d.test)) == chars

# ---------------------------------------------------------------------------------------------------------------------
# stopped, and started again

DRIVER = """
import sys
sys.path.insert(0, {root!r})
import prepare_data
prepare_data.JOB = 2000
prepare_data.PART_BYTES, prepare_data.SHARD_TOKENS = 20000, 20000
prepare_data.prepare(input=[sys.argv[1]], tokenizer=sys.argv[2], out=sys.argv[3], num_proc=2)
"""

def kill_and_go_on(args, out, whole, rng, times: int) -> None:
    """A preparation that is killed a few times, at any moment of it, ends with the bytes of `whole`."""
    for _ in range(times):
        run = subprocess.Popen([*args, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while run.poll() is None and not out.exists():          # Python is still starting
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.2))
        run.kill()
        run.wait()
        for shard in out.glob("*.bin"):                         # what has a shard's name is one
            assert len(raw_tokens(shard))
        if (out / "meta.json").exists():
            break
        with pytest.raises(UserError, match="not ready|neither"):
            load_data(out)
    done = subprocess.run([*args, str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all_bytes(out) == whole

@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", stories(1500) + ["a long one " * 5000] + stories(1500, seed=1))
    args, rng = [sys.executable, "-c", DRIVER.format(root=str(ROOT)), str(path), tokenizer], np.random.default_rng(3)
    subprocess.run([*args, str(tmp_path / "whole")], check=True, capture_output=True)
    for i in range(8):
        kill_and_go_on(args, tmp_path / f"{i}", all_bytes(tmp_path / "whole"), rng, times=5)

def stop_at(monkeypatch, n: int):
    """The n-th append to the parts ends the run. Returns the list of all appends."""
    append, calls = prepare_data.append, []

    def counted(*args, **kwargs):
        calls.append(0)
        return append(*args, **kwargs) if len(calls) < n else 1 / 0
    monkeypatch.setattr(prepare_data, "append", counted)
    return calls

def test_a_stopped_run_goes_on_and_does_not_start_over(tmp_path, monkeypatch):
    small(monkeypatch)
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(300)))
    stop_at(monkeypatch, 9)
    with pytest.raises(ZeroDivisionError):
        prepare(input=[path], tokenizer="byte", out=tmp_path / "out")
    assert json.loads((tmp_path / "out/parts/record.json").read_text())["at"][1] > 0
    monkeypatch.undo()
    small(monkeypatch)
    calls = stop_at(monkeypatch, 10**6)
    out = prepare(input=[path], tokenizer="byte", out=tmp_path / "out")
    again = len(calls)
    assert all_bytes(out) == all_bytes(prepare(input=[path], tokenizer="byte", out=tmp_path / "whole"))
    assert again == len(calls) - again - 8

def dies_at(step: int, **arguments) -> bool:
    """prepare() in a child process that is gone before its step-th change on the disk; False: it ended."""
    child = os.fork()
    if child == 0:
        def counted(change):
            def f(*args, **kwargs):
                nonlocal step
                step -= 1
                if step < 0:
                    os._exit(9)
                return change(*args, **kwargs)
            return f
        for name in ("replace", "fsync", "unlink", "mkdir", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            prepare(**arguments)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")

@needs_fork
@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
def test_stopped_between_any_two_changes_on_the_disk(tmp_path, monkeypatch, tokenizer):
    small(monkeypatch, 2000, 4000, 4000)
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(300)))
    same = dict(input=[path], tokenizer=tokenizer, num_proc=2)
    whole = all_bytes(prepare(**same, out=tmp_path / "whole"))
    step = 0
    while dies_at(step, **same, out=tmp_path / f"{step}"):
        dies_at(7, **same, out=tmp_path / f"{step}")            # and once more on the way
        assert all_bytes(prepare(**same, out=tmp_path / f"{step}")) == whole
        step += 9
    assert step > 40

@needs_fork
def test_stopped_after_train_was_full(tmp_path, monkeypatch):
    """How far the reader is when train has its max_tokens is chance, and says nothing in the bytes."""
    small(monkeypatch)
    hub_of_stories(monkeypatch, tmp_path / "hub", stories(400), stories(200))
    same = dict(dataset="tinystories", max_tokens=9000)
    whole = all_bytes(prepare(**same, out=tmp_path / "whole"))
    step = 0
    while dies_at(step, **same, out=tmp_path / f"{step}"):
        assert all_bytes(prepare(**same, out=tmp_path / f"{step}")) == whole
        step += 13
    assert step > 20

@pytest.mark.parametrize("what", ["content", "same size and time", "setting", "code", "other file"])
def test_a_restart_with_anything_else_starts_over(tmp_path, monkeypatch, what):
    """What decides the bytes is in the record; another source, content, setting or version is no restart."""
    for i in range(2):
        write_jsonl(tmp_path / f"{i}.jsonl", stories(300, seed=i))
    path = tmp_path / "a.jsonl"
    path.write_bytes((tmp_path / "0.jsonl").read_bytes())
    time_before = path.stat().st_mtime_ns
    first = dict(input=[path], separator="---")
    small(monkeypatch)
    stop_at(monkeypatch, 9)
    with pytest.raises(ZeroDivisionError):
        prepare(**first, tokenizer="byte", out=tmp_path / "out")
    assert json.loads((tmp_path / "out/parts/record.json").read_text())["at"][1] > 0
    monkeypatch.undo()
    small(monkeypatch)
    if what in ("content", "same size and time"):
        text = path.read_text()
        path.write_text(text.replace("Story 0", "Story X") if "same" in what else (tmp_path / "1.jsonl").read_text())
        if "same" in what:
            os.utime(path, ns=(time_before, time_before))
    second = {"setting": first | {"separator": "==="}, "other file": first | {"input": [tmp_path / "1.jsonl"]}}.get(what, first)
    if what == "code":
        monkeypatch.setattr(prepare_data, "code", lambda: "another version")
    calls = stop_at(monkeypatch, 10**6)
    out = prepare(**second, tokenizer="byte", out=tmp_path / "out")
    again = len(calls)
    whole = prepare(**second, tokenizer="byte", out=tmp_path / "whole")
    assert all_bytes(out) == all_bytes(whole) and again == len(calls) - again

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
@pytest.mark.parametrize("name", ["a shard", "parts/record.json.tmp", "out/meta.json.tmp"])
def test_a_full_disk_is_a_sentence_and_the_run_goes_on(tmp_path, monkeypatch, capsys, name):
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(300)))
    small(monkeypatch)
    real = open

    def full(path, *args, **kwargs):
        return real("/dev/full" if str(path).endswith(name) else path, *args, **kwargs)
    monkeypatch.setattr(files, "open", full, raising=False)
    if name == "a shard":
        def no_room(number):
            raise OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(os, "fsync", no_room)
    flags = ["--input", path, "--tokenizer", "byte", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *flags])
    with pytest.raises(SystemExit) as e:
        prepare_data.run(prepare_data.main)
    assert e.value.code == 2
    assert "the disk is full" in capsys.readouterr().err
    assert not (tmp_path / "out/meta.json").exists()
    monkeypatch.undo()
    out = prepare(input=[path], tokenizer="byte", out=tmp_path / "out")
    assert all_bytes(out) == all_bytes(prepare(input=[path], tokenizer="byte", out=tmp_path / "whole"))

def test_the_second_run_on_a_folder_says_so(tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(20)))
    (tmp_path / "out").mkdir()
    with lock(tmp_path / "out", "held"):
        second = command("--input", path, "--out", tmp_path / "out", cwd=tmp_path)
    assert second.returncode == 2 and second.stderr == \
        f"prepare_data.py: another run is preparing {tmp_path / 'out'}. Wait for it, or choose another --out.\n"
    prepare(input=[path], out=tmp_path / "out")

def test_prepared_already(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", stories(100))
    out = prepare(input=[str(path)], out=tmp_path / "out")
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    prepare(input=[str(path)], out=out, num_proc=1)
    assert "is there already" in capsys.readouterr().out
    with pytest.raises(UserError, match="with tokenizer 'char', and this is 'byte'. Choose another --out"):
        prepare(input=[str(path)], tokenizer="byte", out=out)
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before
    with pytest.raises(UserError, match="made from other files"):
        prepare(input=[str(write_jsonl(tmp_path / "b.jsonl", stories(9)))], out=out)
    os.utime(path, ns=(time.time_ns() + 10**9,) * 2)            # copied, say
    prepare(input=[str(path)], out=out)
    path.write_text(path.read_text().replace("Story 7", "Story 8"))
    with pytest.raises(UserError, match="from other files, or they have changed. Choose another --out"):
        prepare(input=[str(path)], out=out)

def test_a_folder_with_other_files_is_left_alone(tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(20)))
    for name in ("thesis.txt", "train_000000.bin"):
        (tmp_path / name[:3]).mkdir()
        (tmp_path / name[:3] / name).write_text("mine")
        with pytest.raises(UserError, match="holds other files.*Choose another --out"):
            prepare(input=[path], out=tmp_path / name[:3])
        assert all_bytes(tmp_path / name[:3]) == {name: b"mine"}

# ---------------------------------------------------------------------------------------------------------------------
# errors

def with_bytes(suffix, change):
    def make(folder):
        raw = (json.dumps({"text": "one"}) + "\n").encode() * 500 if "jsonl" in suffix else b"some plain text\n" * 500
        path = folder / f"a{suffix}"
        path.write_bytes(change(raw))
        return path
    return make

def with_zip(folder, harm):
    with zipfile.ZipFile(folder / "a.zip", "w") as z:
        z.writestr("a.txt", b"some plain text\n" * 500)
    raw = bytearray((folder / "a.zip").read_bytes())
    (folder / "a.zip").write_bytes(harm(raw))
    return folder / "a.zip"

def flipped(raw, at=100):
    raw[at] ^= 0xFF
    return raw

BROKEN = {
    "latin1": (with_bytes(".txt", lambda r: r + b"caf\xe9 au lait"),
               r"a.txt is not UTF-8: byte 0xe9 in b'.*plain text.ncaf.xe9 au lait'.*iconv -c"),
    "half a character": (with_bytes(".txt", lambda r: r + b"\xe6\x9d"),
                         "a.txt is not UTF-8: byte 0xe6 in b'.*.xe6.x9d'"),
    "utf16": (with_bytes(".txt", lambda r: r.decode().encode("utf-16")), "is UTF-16 inside, not UTF-8 text"),
    "latin1 in json": (with_bytes(".jsonl", lambda r: r + b'{"text": "\xe9"}'),
                       r"""a.jsonl is not UTF-8: byte 0xe9 in b'{"text": ".xe9"}'"""),
    "half a surrogate": (with_bytes(".jsonl", lambda r: r'{"text": "a\ud83d"}'.encode()),
                         r"line 1 has half a character.*Leave the line out"),
    "empty": (with_bytes(".txt", lambda r: b""), "there is no text in .*a.txt"),
    "blank": (with_bytes(".txt", lambda r: b" \n\n"), "there is no text in .*a.txt"),
    "empty jsonl": (with_bytes(".jsonl", lambda r: b""), "there is no text in .*a.jsonl"),
    "empty gz": (with_bytes(".txt.gz", lambda r: gzip.compress(b"")), "there is no text in"),
    "bad gz": (with_bytes(".txt.gz", lambda r: r), "a.txt.gz is damaged, cut short, or not what its name says"),
    "cut gz": (with_bytes(".txt.gz", lambda r: gzip.compress(r)[:-9]), "a.txt.gz is damaged, cut short"),
    "flipped gz": (with_bytes(".txt.gz", lambda r: bytes(flipped(bytearray(gzip.compress(r)), 30))),
                   "a.txt.gz is damaged"),
    "bad zip": (with_bytes(".zip", lambda r: r), "a.zip is damaged, cut short, or not what its name says"),
    "cut zip": (lambda f: with_zip(f, lambda r: r[:-50]), "a.zip is damaged"),
    "flipped zip": (lambda f: with_zip(f, flipped), "a.zip: a.txt is damaged.*CRC"),
    "locked zip": (lambda f: with_zip(f, lambda r: flag_encrypted(r)), "a.zip: a.txt is .*encrypted"),
    "not json": (with_bytes(".jsonl", lambda r: r + b"{oh\n"),
                 r"a.jsonl, line 501 is no JSON object with a text under 'text': {oh\nName the text with --text_key"),
    "json array": (with_bytes(".json", lambda r: b'[{"text": "a"}]'),
                   r"a.json, line 1 is no JSON object with a text under 'text': .{.text.: .a.}."),
    "no field": (with_bytes(".jsonl", lambda r: b'{"body": "a", "id": 3}\n'), "line 1 is no .*: {.body.: .a., .id.: 3}"),
    "no text": (with_bytes(".jsonl", lambda r: b'{"text": 3}\n'), "line 1 is no JSON object with a text under"),
    "tar": (with_bytes(".tar.gz", lambda r: r), "this kind of file is not read"),
    "not there": (lambda f: f / "nothing*.txt", "nothing.*there is no such file or folder"),
    "empty folder": (lambda f: (f / "empty").mkdir() or f / "empty", "there is no .txt, .jsonl or .parquet file in it"),
}

def flag_encrypted(raw):
    for i in (raw.index(b"PK\x03\x04") + 6, raw.index(b"PK\x01\x02") + 8):
        raw[i] |= 1
    return raw

@pytest.mark.parametrize("tokenizer", ["char", "byte"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_input_is_a_sentence_and_leaves_nothing(tmp_path, name, tokenizer):
    make, words = BROKEN[name]
    path = make(tmp_path)
    with pytest.raises(UserError, match=words) as e:
        prepare(input=[str(path)], tokenizer=tokenizer, out=tmp_path / "out")
    assert str(e.value).count("\n") <= 1 and not (tmp_path / "out").exists()

def test_broken_parquet(tmp_path):
    good = parquet(tmp_path / "a.parquet", stories(200), column="body", n=list(range(200)))
    for key, words in ((None, "no text in a column 'text', only 'body' .string., 'n' .int64.*--text_key"),
                       ("n", "no text in a column 'n', only .*--text_key")):
        with pytest.raises(UserError, match=words):
            prepare(input=[str(good)], text_key=key, tokenizer="byte", out=tmp_path / "out")
    assert len(every_document(prepare(input=[str(good)], text_key="body", tokenizer="byte",
                                      out=tmp_path / "ok"))) == 200
    raw = good.read_bytes()
    for bad in (raw[:-100], b"", b"PAR1", raw[:200] + bytes(1500) + raw[1700:]):
        (tmp_path / "b.parquet").write_bytes(bad)
        with pytest.raises(UserError, match="b.parquet is damaged, cut short"):
            prepare(input=[str(tmp_path / "b.parquet")], text_key="body", tokenizer="byte", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()

def test_parquet_texts_of_every_type(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    texts = ["one", None, "two", "", "three"] * 60
    for i, kind in enumerate((pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))):
        pq.write_table(pa.table({"text": pa.array(texts).cast(kind)}), tmp_path / f"{i}.parquet", row_group_size=7)
        out = prepare(input=[str(tmp_path / f"{i}.parquet")], tokenizer="byte", out=tmp_path / f"out{i}", split="1/0/0")
        assert byte_documents(out, "train") == [b"one", b"two", b"three"] * 60

def test_a_missing_library_is_named_before_work_begins(tmp_path, monkeypatch):
    put(tmp_path / "a.txt", "x" * 10**6)
    put(tmp_path / "b.parquet", b"x")
    for module, words, flags in (("pyarrow", "b.parquet needs pyarrow: pip install pyarrow, or", {"input": [tmp_path]}),
                                 ("pyarrow", "fineweb-edu needs pyarrow: pip install", {"dataset": "fineweb-edu"}),
                                 ("huggingface_hub", "TinyStories needs huggingface_hub: pip install .*--input",
                                  {"dataset": "tinystories"})):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=words):
            prepare(**flags, tokenizer="byte", out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
        monkeypatch.undo()

@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_beyond_the_limit_is_a_sentence(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(documents, "LONG", 10_000)
    texts = ["short", "word " * 2001]
    path = (write_jsonl if kind == "jsonl" else parquet)(tmp_path / f"a.{kind}", texts)
    with pytest.raises(UserError, match="(line 2 is|has a row) longer than .* MiB.*a .txt file"):
        prepare(input=[path], out=tmp_path / "out")

def test_parquet_that_must_be_read_at_once_is_a_sentence(tmp_path, monkeypatch):
    """The library reads a page as a whole, and a page has up to 1,024 rows."""
    monkeypatch.setattr(documents, "PAGE", 10**6)
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(33, 127, 40_000))) for _ in range(50)]
    with pytest.raises(UserError, match=r"row group 0 has rows of 0.0 MB in the mean.*row_group_size=2\d "):
        prepare(input=[parquet(tmp_path / "a.parquet", texts)], out=tmp_path / "out")

PEAK = """
import sys
sys.path.insert(0, {root!r})
from prepare_data import prepare
prepare(input=[sys.argv[1]], tokenizer=sys.argv[2], out=sys.argv[3], num_proc=2, separator=sys.argv[4] or None)
print("peak", next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""

def wide_parquet(path):
    """Rows of 10 MB, three to a group; then 60 of 1 MB, which is as much as a page may have."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as w:
        for i in range(3):
            w.write_table(pa.table({"text": [f"{i} " * 5_000_000] * 3}))
        for i in range(2):
            w.write_table(pa.table({"text": [os.urandom(500_000).hex() for _ in range(60)]}))

def zip_that_unpacks_to_much(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for i in range(12):
            z.writestr(f"{i}.txt", "é small file of one word repeated " * 700_000)

def tiny_documents(path):
    with open(path, "w") as f:
        f.writelines(f'{{"text": "{i}"}}\n' for i in range(4_000_000))

def one_line(path):
    path.write_text("東京🙂 " * 12_000_000, encoding="utf-8")

@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells the peak of one process")
@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
@pytest.mark.parametrize("name, make, separator", [
    ("a.parquet", wide_parquet, ""), ("a.zip", zip_that_unpacks_to_much, ""), ("a.jsonl", tiny_documents, ""),
    ("a.txt", one_line, ""), ("b.txt", one_line, "---")])
def test_memory_stays_below_500_MB(tmp_path, name, make, separator, tokenizer):
    make(tmp_path / name)
    code = PEAK.format(root=str(ROOT))
    if tokenizer == "gpt2":
        code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n" \
               "import tiktoken\nfrom corpora import toy_gpt2\n" \
               "tiktoken.get_encoding = toy_gpt2\n" + code
    done = subprocess.run([sys.executable, "-c", code, tmp_path / name, tokenizer, tmp_path / "out", separator],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split("peak ")[1])
    print(f"{name} {make.__name__} {tokenizer}: {peak} MB")
    assert peak < 500

@pytest.mark.parametrize("args, words", [
    ({}, "give one of --dataset"), ({"dataset": "text8", "input": ["a"]}, "give one of --dataset"),
    ({"dataset": "text9"}, "no dataset 'text9', only pystdlib, text8"),
    ({"dataset": "text8", "split": "1/1/1"}, "--split is for --input"),
    ({"dataset": "pystdlib", "tokenizer": "bpe"}, "--tokenizer is 'bpe'; it must be char, byte, gpt2 or the path"),
    ({"dataset": "pystdlib", "max_tokens": "many"}, "--max_tokens is 'many'"),
    ({"dataset": "pystdlib", "num_proc": -1}, "--num_proc is -1"),
    ({"input": ["x"]}, "x: there is no such file"),
    ({"input": [__file__], "split": "90/10"}, "--split is '90/10'"),
    ({"input": [__file__], "split": "0/1/1"}, "--split is '0/1/1'")])
def test_wrong_arguments(tmp_path, args, words):
    with pytest.raises(UserError, match=words):
        prepare(**args, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()

def test_sizes_in_words():
    assert [amount(t, "--max_tokens") for t in ("2.0B", "500M", "20k", "1_000", "2e9", 7)] == \
        [2 * 10**9, 5 * 10**8, 20_000, 1000, 2 * 10**9, 7]
    for bad in ("0", "-1", "B", "1.5.2M", "nan", "1,5B", "2,000"):      # a comma is a point to some people
        with pytest.raises(UserError, match="--max_tokens"):
            amount(bad, "--max_tokens")

def test_the_command_itself(tmp_path):
    (tmp_path / "book.txt").write_text("A book of some length.\n" * 20_000)
    done = command("--input", "book.txt", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("data/book: char level, vocabulary 1")
    for args, words in ((["--inptu", "x"], "there is no flag --inptu. Did you mean --input?"),
                        (["--input", "nothing.txt"], "no such file"),
                        (["--num_proc", "two"], "--num_proc"),
                        (["--input", "book.txt", "--out", "book.txt"], "book.txt is a file"),
                        *[(["--input", "book.txt", "--out", "/proc/no/such"], "/proc/no")] * (sys.platform == "linux")):
        done = command(*args, cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") <= 2
        assert "Traceback" not in done.stderr
