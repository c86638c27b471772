"""The corpora: their facts, their layouts, and how they come from a host on this machine that is like the real ones."""
import errno
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path

import pytest
import tiktoken

import prepare_data
from corpora import (all_bytes, byte_documents, fake_hub, hub_of_stories, meta, split_tokens, stories, toy_gpt2,
                     write_stories)
from nanodepth.data import SPLITS, load_data
from nanodepth.files import UserError
from prepare_data import DATASETS, Unfinished, prepare

ROOT = Path(prepare_data.__file__).resolve().parent

def test_the_facts_of_the_corpora():
    """Where they are, which revision, which sum: a wrong one gives another corpus, or none."""
    text8, stories, fineweb = DATASETS["text8"](), DATASETS["tinystories"](), DATASETS["fineweb-edu"]()
    assert prepare_data.TEXT8 == "http://mattmahoney.net/dc/text8.zip"
    assert {f.revision for f in text8.files} == {prepare_data.TEXT8_SHA256} == {
        "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"}
    assert [f.split for f in text8.files] == ["val", "test", "train"]
    assert [(f.name, f.split, f.revision) for f in stories.files] == [
        (f"TinyStoriesV2-GPT4-{n}.txt", s, "roneneldan/TinyStories@f54c09fd23315a6f9c86f9dc80f725de7d8f9c64")
        for n, s in (("valid", None), ("train", "train"))]
    assert stories.separator == "<|endoftext|>" and stories.fractions == (0, 0.5, 0.5)
    assert [f.name for f in fineweb.files] == [f"sample/10BT/{i:03d}_00000.parquet" for i in range(14)]
    assert {f.revision for f in fineweb.files} == {"HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"}
    assert (fineweb.tokenizer, fineweb.fractions) == ("gpt2", (0.99, 0.005, 0.005))

# ---------------------------------------------------------------------------------------------------------------------
# text8

TEXT8 = (" the cat sat on a mat and anarchism originated as a term of abuse zyx qwj kvb phi pg dfl " * 200)[:10_000]

def small_text8(monkeypatch, folder: Path, text=TEXT8) -> Path:
    """text8, ten thousand times smaller: its zip in `folder`."""
    with zipfile.ZipFile(folder / "text8.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("text8", text)
    sha256 = hashlib.sha256((folder / "text8.zip").read_bytes()).hexdigest()
    monkeypatch.setattr(prepare_data, "TEXT8_SHA256", sha256)
    return folder / "text8.zip"

@pytest.fixture
def server(tmp_path, monkeypatch):
    """The files in a folder, over HTTP; `seen` has the paths that were asked for."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder, seen = tmp_path / "served", []
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.hub() if "/resolve/" in self.path else super().do_HEAD()

        def do_GET(self):
            seen.append(self.path)
            self.hub(body=True) if "/resolve/" in self.path else super().do_GET()

        def hub(self, body=False):
            """/datasets/REPO/resolve/REVISION/PATH with the headers that the hub's library asks for."""
            repo, _, rest = self.path.removeprefix("/datasets/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            path = folder / repo / name
            if not path.exists():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            raw = path.read_bytes()
            self.send_response(200)
            for key, value in {"X-Repo-Commit": revision, "ETag": f'"{hashlib.sha256(raw).hexdigest()}"',
                               "Content-Length": str(len(raw)), "Accept-Ranges": "bytes"}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(raw)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield types.SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", folder=folder, seen=seen)
    server.shutdown()
    server.server_close()

def test_text8(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_text8(monkeypatch, server.folder)
    monkeypatch.setattr(prepare_data, "TEXT8", f"{server.url}/text8.zip")
    out = prepare(dataset="text8")
    assert out == Path("data/text8") and len(list(Path("data/.downloads").iterdir())) == 3
    assert meta(out)["vocab_size"] == 27 and meta(out)["tokenizer"] == {
        "kind": "char", "chars": " abcdefghijklmnopqrstuvwxyz", "with_end": False}
    ids = [0 if c == " " else ord(c) - 96 for c in TEXT8]
    assert [split_tokens(out, s) for s in SPLITS] == [ids[:9000], ids[9000:9500], ids[9500:]]
    assert load_data(out).bytes_per_token("val") == 1
    again = prepare(dataset="text8", out="data/again")                          # the download is kept
    assert {n: b for n, b in all_bytes(again).items() if n.endswith("bin")} == \
        {n: b for n, b in all_bytes(out).items() if n.endswith("bin")} and server.seen == ["/text8.zip"]
    byte = prepare(dataset="text8", tokenizer="byte", out="data/bytes")
    assert bytes(sum((split_tokens(byte, s) for s in SPLITS), [])) == TEXT8.encode() and meta(byte)["vocab_size"] == 257
    for tokenizer in ("char", "byte"):
        few = prepare(dataset="text8", max_tokens="1k", tokenizer=tokenizer, out=f"data/few-{tokenizer}")
        assert [len(split_tokens(few, s)) for s in SPLITS] == [1000, 500, 500]

def test_another_text8_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = small_text8(monkeypatch, server.folder)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(prepare_data, "TEXT8", f"{server.url}/text8.zip")
    with pytest.raises(UserError, match="text8.zip is not the right file: its sha256 is"):
        prepare(dataset="text8")
    assert not Path("data/text8").exists()

def test_no_network_and_no_file_are_a_sentence(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url, words in ((f"{server.url}/no.zip", "404"), ("http://127.0.0.1:9/text8.zip", "refused"),
                       ("http://no-such-host.invalid/f", "urlopen error")):
        monkeypatch.setattr(prepare_data, "TEXT8", url)
        with pytest.raises(Unfinished, match=f"{url} did not come.*{words}.*--input, or use --dataset pystdlib") as e:
            prepare(dataset="text8")
        assert "\n" not in str(e.value) and not Path("data/text8").exists()
        assert not Path("data").exists()

def test_a_full_disk_is_not_taken_for_the_network():
    with pytest.raises(OSError) as e, prepare_data.network("a file"):
        raise OSError(errno.ENOSPC, "No space left on device", "f")
    assert e.value.errno == errno.ENOSPC

# ---------------------------------------------------------------------------------------------------------------------
# the hub

@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_tinystories(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    train, valid = stories(300), stories(400, seed=1)
    hub_of_stories(monkeypatch, tmp_path / "hub", train, valid)
    same = dict(dataset="tinystories", tokenizer=tokenizer)
    out = prepare(**same, out=tmp_path / "d")
    d = load_data(out)
    assert meta(out)["splits"]["train"]["documents"] == 300
    texts = {s: d.tokenizer.decode(getattr(d, s).window(0, len(getattr(d, s)))) for s in SPLITS}
    assert texts["train"] == "".join(train) and len(texts["val"]) + len(texts["test"]) == sum(map(len, valid))
    assert 150 < meta(out)["splits"]["val"]["documents"] < 250
    if tokenizer == "byte":
        assert byte_documents(out, "train") == [t.encode() for t in train]
        assert sorted(byte_documents(out, "val") + byte_documents(out, "test")) == sorted(t.encode() for t in valid)
    few = load_data(prepare(**same, max_tokens=3000, out=tmp_path / "few"))
    assert len(few.train) == 3000 and texts["train"].startswith(few.tokenizer.decode(few.train.window(0, 3000)))
    for s in ("val", "test"):
        ids = getattr(few, s)
        assert few.tokenizer.decode(ids.window(0, len(ids))) == texts[s]

def test_the_hub_by_its_own_library(server, tmp_path):
    """HF_ENDPOINT and HF_HOME are the library's own; so are its cache, its token and its going on."""
    pytest.importorskip("huggingface_hub")
    train = stories(300)
    write_stories(server.folder / "roneneldan/TinyStories", train, stories(400, seed=1))
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, ROOT / "prepare_data.py", "--dataset", "tinystories", "--tokenizer", "byte", "--out"]
    for i in range(2):
        done = subprocess.run([*command, f"d{i}"], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert byte_documents(tmp_path / f"d{i}", "train") == [t.encode() for t in train]
    revision = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    place = f"/datasets/roneneldan/TinyStories/resolve/{revision}/TinyStoriesV2-GPT4"
    assert [path for path in server.seen if "/resolve/" in path] == [f"{place}-valid.txt", f"{place}-train.txt"]
    (server.folder / "roneneldan/TinyStories/TinyStoriesV2-GPT4-valid.txt").unlink()
    done = subprocess.run([*command, "d3"], cwd=tmp_path, env={**env, "HF_HOME": str(tmp_path / "other")},
                          capture_output=True, text=True)
    assert done.returncode == 2 and "TinyStoriesV2-GPT4-valid.txt of roneneldan/TinyStories did not come" in done.stderr
    assert "Traceback" not in done.stderr

def fineweb(folder: Path, n_files: int = 14) -> list[list[str]]:
    """Files in the layout of the 10BT sample; returns their texts."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    texts = [stories(300, seed=i) for i in range(n_files)]
    for i, t in enumerate(texts):
        n = len(t)
        table = pa.table({"text": t, "id": [f"<urn:uuid:{i}-{j}>" for j in range(n)], "dump": ["CC"] * n,
                          "url": ["u"] * n, "score": [3.1] * n, "int_score": pa.array([3] * n, pa.int64())})
        path = folder / f"sample/10BT/{i:03d}_00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=100)
    return texts

def test_fineweb_edu(tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", toy_gpt2)
    texts = fineweb(tmp_path / "hub")
    asked = fake_hub(monkeypatch, tmp_path / "hub")
    out = prepare(dataset="fineweb-edu", out=tmp_path / "all")
    assert meta(out)["tokenizer"] == {"kind": "gpt2"} and len(asked) == 14
    everything = load_data(prepare(dataset="fineweb-edu", tokenizer="byte", out=tmp_path / "bytes"))
    found = {s: byte_documents(tmp_path / "bytes", s) for s in SPLITS}
    assert sum(map(len, found.values())) == 14 * 300
    assert everything.meta["splits"]["train"]["documents"] == len(found["train"])

    # The split hangs on the text alone: here it is once more, from its definition.
    def where(text):
        u = int.from_bytes(hashlib.sha256(text).digest()[8:16]) / 2**64
        return "val" if u < 0.005 else "train" if u < 0.995 else "test"
    for s in SPLITS:
        assert found[s] == [t.encode() for ts in texts for t in ts if where(t.encode()) == s]

    asked.clear()
    monkeypatch.setattr(prepare_data, "JOB", 3000)
    some = prepare(dataset="fineweb-edu", max_tokens=20_000, out=tmp_path / "some")
    assert len(load_data(some).train) == 20_000 and len(asked) <= 3             # the rest was not fetched
    for s in ("train", "val"):
        assert split_tokens(some, s) == split_tokens(out, s)[:len(split_tokens(some, s))]

def test_fineweb_edu_cut_in_the_middle_goes_on(tmp_path, monkeypatch):
    for name in ("JOB", "PART_BYTES"):
        monkeypatch.setattr(prepare_data, name, 3000)
    fineweb(tmp_path / "hub", 3)
    same = dict(dataset="fineweb-edu", tokenizer="byte", max_tokens=40_000)
    fake_hub(monkeypatch, tmp_path / "hub")
    whole = prepare(**same, out=tmp_path / "whole")
    fake_hub(monkeypatch, tmp_path / "hub", fails_at=2)
    with pytest.raises(Unfinished, match="001_00000.parquet of HuggingFaceFW/fineweb-edu did not come: the line is"):
        prepare(**same, out=tmp_path / "out")
    assert (tmp_path / "out/parts/record.json").exists()         # what was done is kept
    asked = fake_hub(monkeypatch, tmp_path / "hub")
    assert all_bytes(prepare(**same, out=tmp_path / "out")) == all_bytes(whole)
    assert "sample/10BT/001_00000.parquet" in asked
