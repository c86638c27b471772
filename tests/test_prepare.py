"""From files of every kind to shards: what is read, which split it goes to, and what is said when it is wrong."""
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
from nanodepth import documents
from nanodepth.files import UserError
from corpora import all_bytes, byte_documents, meta, raw_tokens, split_tokens, stories, toy_gpt2
from nanodepth.data import SPLITS, load_data, write_shard
from prepare_data import prepare

def small(monkeypatch, piece=2000, part=1, shard=10**8) -> None:
    """Sizes that make a short text as many pieces, parts and shards as a long one has."""
    monkeypatch.setattr(documents, "PIECE", piece)
    monkeypatch.setattr(prepare_data, "PIECE", piece)
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
    out = prepare(input=[str(tmp_path / "a.txt")], separator=separator, tokenizer="byte", out=tmp_path / "out",
                  split="60/20/20")
    if len(want) == 1:                                          # a single document is cut by position
        assert b"".join(every_document(out)) == want[0].encode()
    else:
        assert sorted(every_document(out)) == sorted(w.encode() for w in want)

def test_chunks_and_blocks_do_not_matter(monkeypatch):
    rng = np.random.default_rng(1)
    for trial in range(300):
        text = "".join(rng.choice(list("ab \n\r") + ["<|>", "\n<|>\n", "word ", "  "], rng.integers(0, 60)))
        monkeypatch.setattr(documents, "BLOCK", int(rng.integers(4, 40)))
        whole = list(documents.text_documents([text], "<|>"))
        size = int(rng.integers(1, 9))
        assert list(documents.text_documents([text[i:i + size] for i in range(0, len(text), size)], "<|>")) == whole
        monkeypatch.setattr(documents, "BLOCK", 10**6)
        joined, open_text = [], ""
        for piece, last in whole:
            open_text += piece
            if last:
                joined, open_text = [*joined, open_text], ""
        assert joined == [t for t, _ in documents.text_documents([text], "<|>")] and open_text == ""

def test_a_long_text_is_cut_where_gpt2_cuts_too(monkeypatch):
    toy = toy_gpt2()
    rng = np.random.default_rng(2)
    monkeypatch.setattr(documents, "BLOCK", 40)
    for trial in range(200):
        text = "".join(rng.choice(["the cat", " at", "  ", "\n", "\n\n", "it's", " 12", "\u00a0", "\u3000", "東", " ",
                                   "\t"], 60))
        parts = [t for t, _ in documents.long_document(text)]
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

@pytest.mark.parametrize("tokenizer", ["byte", "char"])
@pytest.mark.parametrize("text", ["0123456789" * 100, "é東🙂x" * 250, "ab"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_one_document_is_cut_by_position(tmp_path, monkeypatch, tokenizer, text, name):
    monkeypatch.setattr(documents, "BLOCK", 64)
    raw = text.encode()
    (tmp_path / name).write_bytes(raw if name == "a.txt" else gzip.compress(raw))
    d = load_data(prepare(input=[str(tmp_path / name)], tokenizer=tokenizer, out=tmp_path / "out", split="80/10/10"))
    parts = [d.tokenizer.decode(t.window(0, len(t))) if t else "" for t in (d.train, d.val, d.test)]
    assert "".join(parts) == text
    if len(raw) >= 1000:
        assert [round(10 * len(p.encode()) / len(raw), 1) for p in parts] == [8, 1, 1]
        assert all(t.window(len(t) - 1, 1) == d.tokenizer.end for t in (d.train, d.val, d.test))

def test_workers_do_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 500)
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(400) + ["long words " * 1000]))
    for tokenizer in ("byte", "char", "gpt2"):
        outs = [prepare(input=[path], tokenizer=tokenizer, out=tmp_path / f"{tokenizer}{n}", num_proc=n,
                        shard_tokens=10000,
                        max_tokens=limit) for n, limit in ((1, None), (4, None))]
        assert all_bytes(outs[0]) == all_bytes(outs[1]) and len(list(outs[0].glob("train_*.bin"))) > 1
        outs = [prepare(input=[path], tokenizer=tokenizer, out=tmp_path / f"{tokenizer}{n}m", num_proc=n,
                        max_tokens="5k")
                for n in (1, 4)]
        assert all_bytes(outs[0]) == all_bytes(outs[1])

@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_max_tokens_takes_whole_documents_from_the_front(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(documents, "BLOCK", 500)
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

# ---------------------------------------------------------------------------------------------------------------------
# stopped, and started again

DRIVER = """
import sys
sys.path.insert(0, {root!r})
import prepare_data
from nanodepth import documents
documents.BLOCK, prepare_data.SAVE_SECONDS = 2000, 0
prepare_data.prepare(input=[sys.argv[1]], tokenizer=sys.argv[2], out=sys.argv[3], num_proc=2, shard_tokens=20000)
"""

def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", stories(1500))
    args = [sys.executable, "-c", DRIVER.format(root=str(ROOT)), str(path), "char"]
    subprocess.run([*args, str(tmp_path / "whole")], check=True, capture_output=True)
    out, rng = tmp_path / "out", np.random.default_rng(3)
    for i in range(5):
        run = subprocess.Popen([*args, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if i % 2:                                               # at any moment, or after something was written
            time.sleep(rng.uniform(0, 0.5))
        while i % 2 == 0 and run.poll() is None and not list(out.glob("train_*")):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        run.kill()
        run.wait()
        for shard in out.glob("*.bin"):                         # what has a shard's name is one
            assert len(raw_tokens(shard))
        if (out / "meta.json").exists():
            break
        if out.exists():
            with pytest.raises(UserError):
                load_data(out)
    done = subprocess.run([*args, str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all_bytes(out) == all_bytes(tmp_path / "whole")

def test_a_stopped_run_goes_on_and_does_not_start_over(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 2000)
    monkeypatch.setattr(prepare_data, "SAVE_SECONDS", 0)
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(300)))
    write, calls = prepare_data.Writer.write, []
    monkeypatch.setattr(prepare_data.Writer, "write",
                        lambda *a: calls.append(0) or write(*a) if len(calls) < 9 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(input=[path], tokenizer="byte", out=tmp_path / "out")
    kept = json.loads((tmp_path / "out/progress.json").read_text())
    assert kept["jobs"] >= 4 and kept["splits"]["train"]["open"] > 5000
    monkeypatch.setattr(prepare_data.Writer, "write", lambda *a: calls.append(0) or write(*a))
    calls.clear()
    out = prepare(input=[path], tokenizer="byte", out=tmp_path / "out")
    again = len(calls)
    calls.clear()
    assert all_bytes(out) == all_bytes(prepare(input=[path], tokenizer="byte", out=tmp_path / "whole"))
    assert again <= len(calls) - 4

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
        os.replace, os.fsync, Path.unlink, Path.rename = map(counted, (os.replace, os.fsync, Path.unlink, Path.rename))
        try:
            prepare(**arguments)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

def test_stopped_between_any_two_changes_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 2000)
    monkeypatch.setattr(prepare_data, "SAVE_SECONDS", 0)
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(300)))
    same = dict(input=[path], tokenizer="char", shard_tokens=4000, num_proc=2)
    whole = all_bytes(prepare(**same, out=tmp_path / "whole"))
    step = 0
    while dies_at(step, **same, out=tmp_path / f"{step}"):
        dies_at(7, **same, out=tmp_path / f"{step}")            # and once more on the way
        assert all_bytes(prepare(**same, out=tmp_path / f"{step}")) == whole
        step += 9
    assert step > 60

def test_stopped_after_train_was_full(tmp_path, monkeypatch):
    """Once train has its max_tokens the reader leaves the train file, so jobs are no longer what they were."""
    monkeypatch.setattr(documents, "BLOCK", 2000)
    monkeypatch.setattr(prepare_data, "SAVE_SECONDS", 0)
    for name, n in (("train", 400), ("valid", 200)):
        (tmp_path / f"TinyStoriesV2-GPT4-{name}.txt").write_text("".join(t + "\n<|endoftext|>\n" for t in stories(n)))
    same = dict(dataset="tinystories", source=str(tmp_path), no_check=True, max_tokens=9000)
    whole = all_bytes(prepare(**same, out=tmp_path / "whole"))
    step = 0
    while dies_at(step, **same, out=tmp_path / f"{step}"):
        assert all_bytes(prepare(**same, out=tmp_path / f"{step}")) == whole
        step += 5
    assert step > 20

def test_a_changed_input_starts_over(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 1000)
    monkeypatch.setattr(prepare_data, "SAVE_SECONDS", 0)
    path = write_jsonl(tmp_path / "a.jsonl", stories(300))
    write, calls = prepare_data.Writer.write, []
    monkeypatch.setattr(prepare_data.Writer, "write",
                        lambda *a: calls.append(0) or write(*a) if len(calls) < 9 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(input=[str(path)], tokenizer="byte", out=tmp_path / "out")
    monkeypatch.setattr(prepare_data.Writer, "write", write)
    assert json.loads((tmp_path / "out/progress.json").read_text())["jobs"] > 2
    write_jsonl(path, stories(300, seed=1))
    out = prepare(input=[str(path)], tokenizer="byte", out=tmp_path / "out")
    assert sorted(every_document(out)) == sorted(t.encode() for t in stories(300, seed=1))

def test_a_full_disk_is_a_sentence_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(300)))
    monkeypatch.setattr(documents, "BLOCK", 1000)
    monkeypatch.setattr(prepare_data, "SAVE_SECONDS", 0)
    room, write = 20_000, prepare_data.Writer.write

    def full(self, ids, *rest):
        nonlocal room
        room -= 2 * len(ids)
        if room < 0:
            self.file.close()
            self.file = open("/dev/full", "wb", buffering=0)
        write(self, ids, *rest)
    monkeypatch.setattr(prepare_data.Writer, "write", full)
    flags = ["--input", path, "--tokenizer", "byte", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *flags])
    with pytest.raises(SystemExit) as e:
        prepare_data.run(prepare_data.main)
    assert e.value.code == 2
    assert "train_000000.bin.tmp: the disk is full" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.bin"))
    monkeypatch.setattr(prepare_data.Writer, "write", write)
    out = prepare(input=[path], tokenizer="byte", out=tmp_path / "out")
    assert all_bytes(out) == all_bytes(prepare(input=[path], tokenizer="byte", out=tmp_path / "whole"))

def test_the_second_run_on_a_folder_says_so(tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", stories(20)))
    (tmp_path / "out").mkdir()
    with download.lock(tmp_path / "out", "preparing"):
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
    os.utime(path, ns=(time.time_ns() + 10**9,) * 2)
    with pytest.raises(UserError, match="older than its input"):
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

def damaged_zst(path, raw):
    zst(path, raw)
    path.write_bytes(path.read_bytes()[:-20])

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
               r"a.txt is not UTF-8: byte 0xe9 at offset 8,003.*--errors replace"),
    "half a character": (with_bytes(".txt", lambda r: r + b"\xe6\x9d"),
                         "a.txt is not UTF-8: byte 0xe6 at offset 8,000"),
    "utf16": (with_bytes(".txt", lambda r: r.decode().encode("utf-16")), "not UTF-8: byte 0xff at offset 0"),
    "latin1 in json": (with_bytes(".jsonl", lambda r: r + b'{"text": "\xe9"}'),
                       r"a.jsonl, line 501 is not UTF-8: byte 0xe9 at offset 8,010"),
    "half a surrogate": (with_bytes(".jsonl", lambda r: r'{"text": "a\ud83d"}'.encode()),
                         r"line 1: .*\\ud83d.*--errors replace"),
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
    "flipped zip": (lambda f: with_zip(f, flipped), "a.zip is damaged.*CRC"),
    "locked zip": (lambda f: with_zip(f, lambda r: flag_encrypted(r)), "a.zip is encrypted"),
    "not json": (with_bytes(".jsonl", lambda r: r + b"{oh\n"), "a.jsonl, line 501 is not JSON: .*one object a line"),
    "json array": (with_bytes(".json", lambda r: b'[{"text": "a"}]'), "a.json, line 1 is not a JSON object"),
    "no field": (with_bytes(".jsonl", lambda r: b'{"body": "a", "id": 3}\n'),
                 "line 1 has no 'text', only 'body', 'id'.*--text_key"),
    "no text": (with_bytes(".jsonl", lambda r: b'{"text": 3}\n'), "line 1: 'text' is '3', which is not text"),
    "tar": (with_bytes(".tar.gz", lambda r: r), "this kind of file is not read"),
    "not there": (lambda f: f / "nothing*.txt", "nothing.*there is no such file or folder"),
    "empty folder": (lambda f: (f / "empty").mkdir() or f / "empty", "has no .txt, .jsonl or .parquet"),
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
    assert str(e.value).count("\n") == 0 and not (tmp_path / "out").exists()

@pytest.mark.parametrize("frames", [1, 3])
def test_a_cut_zst_is_noticed(tmp_path, frames):
    zst(tmp_path / "a.txt.zst", os.urandom(3000).hex().encode(), frames)
    (tmp_path / "a.txt.zst").write_bytes((tmp_path / "a.txt.zst").read_bytes()[:-20])
    with pytest.raises(UserError, match="a.txt.zst is damaged, cut short"):
        prepare(input=[str(tmp_path / "a.txt.zst")], tokenizer="byte", out=tmp_path / "out")
    (tmp_path / "a.txt.zst").write_bytes(b"not zst at all")
    with pytest.raises(UserError, match="a.txt.zst is damaged, cut short"):
        prepare(input=[str(tmp_path / "a.txt.zst")], tokenizer="byte", out=tmp_path / "out")

def test_broken_parquet(tmp_path):
    good = parquet(tmp_path / "a.parquet", stories(200), column="body", n=list(range(200)))
    for key, words in ((None, "has no column 'text', only 'body', 'n'.*--text_key"),
                       ("n", "the column 'n' is int64, which is not text")):
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
    texts = ["one", None, "two", "", "three"]
    for i, kind in enumerate((pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()))):
        pq.write_table(pa.table({"text": pa.array(texts).cast(kind)}), tmp_path / f"{i}.parquet")
        out = prepare(input=[str(tmp_path / f"{i}.parquet")], tokenizer="byte", out=tmp_path / f"out{i}")
        assert sorted(every_document(out)) == [b"one", b"three", b"two"]

def test_a_missing_library_is_named(tmp_path, monkeypatch):
    for module, name in (("zstandard", "a.txt.zst"), ("pyarrow", "a.parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match=f"{name} needs {module}: pip install {module}, or"):
            prepare(input=[str(tmp_path / name)], tokenizer="byte", out=tmp_path / "out")

def test_errors_replace_goes_on(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 40)
    out = prepare(input=[str(tmp_path / "a.txt")], tokenizer="byte", errors="replace", out=tmp_path / "out")
    assert b"".join(every_document(out)).decode() == "caf\ufffd " * 40
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "\\ud83d."}\n{"text": "\\ud83d\\ude42"}')
    out = prepare(input=[str(tmp_path / "a.jsonl")], tokenizer="byte", errors="replace", out=tmp_path / "out2")
    assert sorted(d.decode() for d in every_document(out)) == ["caf\ufffd", "\ufffd.", "🙂"]

@pytest.mark.parametrize("args, words", [
    ({}, "give one of --dataset"), ({"dataset": "text8", "input": ["a"]}, "give one of --dataset"),
    ({"dataset": "text9"}, "no dataset 'text9', only pystdlib, text8"),
    ({"dataset": "text8", "split": "1/1/1"}, "--split is for --input"),
    ({"dataset": "pystdlib", "source": "x"}, "--source is for datasets that are downloaded"),
    ({"dataset": "pystdlib", "tokenizer": "bpe"}, "--tokenizer is 'bpe'; it must be char, byte or gpt2"),
    ({"dataset": "pystdlib", "max_tokens": "many"}, "--max_tokens is 'many'"),
    ({"dataset": "pystdlib", "num_proc": -1}, "--num_proc is -1"),
    ({"input": ["x"], "split": "90/10"}, "x: there is no such file"),
    ({"input": [__file__], "split": "90/10"}, "--split is '90/10'"),
    ({"input": [__file__], "split": "0/1/1"}, "--split is '0/1/1'"),
    ({"input": [__file__], "source": "x"}, "--source is for --dataset")])
def test_wrong_arguments(tmp_path, args, words):
    with pytest.raises(UserError, match=words):
        prepare(**args, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()

def test_sizes_in_words():
    assert [prepare_data.number(t, "--max_tokens") for t in ("2.0B", "500M", "20k", "1_000", "2e9", 7)] == \
        [2 * 10**9, 5 * 10**8, 20_000, 1000, 2 * 10**9, 7]
    for bad in ("0", "-1", "B", "1.5.2M", "nan"):
        with pytest.raises(UserError, match="--max_tokens"):
            prepare_data.number(bad, "--max_tokens")

def test_the_command_itself(tmp_path):
    (tmp_path / "book.txt").write_text("A book of some length.\n" * 50)
    done = command("--input", "book.txt", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("data/book: char level, vocabulary 1")
    shown = command("--info", "data/book", cwd=tmp_path)
    assert shown.returncode == 0 and "every shard matches meta.json" in shown.stdout
    assert "    A book of some length." in shown.stdout and "train" in shown.stdout
    for args, words in ((["--inptu", "x"], "there is no flag --inptu. Did you mean --input?"),
                        (["--input", "nothing.txt"], "no such file"),
                        (["--info", "data/nothing"], "there is no data folder data/nothing"),
                        (["--num_proc", "two"], "--num_proc"),
                        (["--input", "book.txt", "--out", "book.txt"], "book.txt is a file"),
                        (["--input", "book.txt", "--out", "/proc/no/such"], "/proc/no")):
        done = command(*args, cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") <= 2
        assert "Traceback" not in done.stderr

def test_info_sees_a_changed_token(tmp_path, capsys):
    out = prepare(input=[str(write_jsonl(tmp_path / "a.jsonl", stories(400)))], tokenizer="byte", out=tmp_path / "out")
    prepare_data.info(out)
    shown = capsys.readouterr().out
    assert "every shard matches" in shown and "    Story 0:" in shown and "byte" in shown
    counts = meta(out)["splits"]["train"]
    assert f"{counts['tokens']:,}" in shown and f"{counts['bytes'] / counts['tokens']:.4f}" in shown
    raw = bytearray((out / "val_000000.bin").read_bytes())
    raw[1024] ^= 1
    (out / "val_000000.bin").write_bytes(raw)
    with pytest.raises(UserError, match="val_000000.bin is not what meta.json says"):
        prepare_data.info(out)

def test_info_of_ready_made_shards(tmp_path, capsys):

    write_shard(tmp_path / "x_train_0.bin", [1, 2, 3])
    prepare_data.info(tmp_path)
    assert "vocabulary unknown" in capsys.readouterr().out
