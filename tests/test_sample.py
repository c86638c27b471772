"""sample.py: the text is what the model says, as it comes, and nothing more."""
import io
import os
import sys

import pytest
import torch

import sample
from nanodepth.files import UserError, explain, load_checkpoint, load_model
from nanodepth.data import ByteTokenizer, CharTokenizer, load_data
from model import GPT, GPTConfig
from tiny import checkpoint, data_folder, go, script


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    go("--dataset", data_folder(folder), "--out_dir", folder / "run", "--max_iters", 20, "--learning_rate", 1e-2)
    return folder / "run"

class Hostile:
    """A pickle that makes a folder when it is loaded."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)

def say(capsys, *flags):
    capsys.readouterr()
    sample.main([*map(str, flags), "--device", "cpu"])
    return capsys.readouterr().out

def with_tokenizer(run, folder, tokenizer, vocab_size=None):
    """The same run, with a tokenizer of another kind in its checkpoint."""
    c = checkpoint(run)
    c["tokenizer"] = tokenizer and tokenizer.describe()
    folder.mkdir()
    torch.save(c, folder / "ckpt.pt")
    return folder

def speaks(monkeypatch, tokens):
    """Let the model say these tokens, whatever it is asked; what it was asked is in the list that comes back."""
    asked = []

    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        asked.append((idx.tolist(), max_new_tokens, temperature, top_k))
        yield from (torch.full((len(idx), 1), t) for t in tokens[:max_new_tokens])

    monkeypatch.setattr(GPT, "stream", stream)
    return asked

def test_greedy_text_is_what_the_full_model_takes(run, capsys):
    prompt = "def main(self):\n"
    out = say(capsys, "--out_dir", run, "--prompt", prompt, "--temperature", 0, "--num_samples", 1,
              "--max_new_tokens", 8)
    c = load_checkpoint(run)
    model, tokenizer = load_model(c, GPT, GPTConfig).eval(), load_data(c["settings"]["dataset"]).tokenizer
    ids = tokenizer.encode(prompt).tolist()
    for _ in range(8):                                                  # without a cache; 16 tokens of context
        ids.append(model(torch.tensor([ids[-16:]]))[0].argmax().item())
        if len(ids) == len(prompt) + 1:
            first = tokenizer.decode(ids[-1:])
    assert out.startswith(prompt + first) and len(out) <= len(prompt) + 9

def test_seeds_and_samples(run, capsys):
    flags = ["--out_dir", run, "--max_new_tokens", 30]
    one, again = say(capsys, *flags), say(capsys, *flags)
    other = say(capsys, *flags, "--seed", 1)
    assert one == again != other
    texts = one.split("\n---------------\n")
    assert len(texts) == 3 and len(set(texts)) == 3
    assert len(say(capsys, *flags, "--num_samples", 1)) <= 31

def test_a_text_ends_at_its_end_token(run, capsys, monkeypatch):
    tokenizer = load_data(checkpoint(run)["settings"]["dataset"]).tokenizer
    asked = speaks(monkeypatch, [*tokenizer.encode("pass").tolist(), tokenizer.end, 3, 4])
    out = say(capsys, "--out_dir", run, "--prompt", "x = ", "--num_samples", 2)
    assert out == "x = pass\n\n---------------\nx = pass\n"
    assert asked == [([tokenizer.encode("x = ").tolist()] * 2, 500, 0.8, 50)]       # both at once
    say(capsys, "--out_dir", run, "--temperature", 1.5, "--top_k", 7, "--max_new_tokens", 3)
    assert asked[-1][1:] == (3, 1.5, 7)

def test_the_default_prompt_is_the_end_of_another_text(run, capsys, monkeypatch, tmp_path):
    asked = speaks(monkeypatch, [1, 2])
    say(capsys, "--out_dir", run, "--top_k", 0)
    tokenizer = load_data(checkpoint(run)["settings"]["dataset"]).tokenizer
    assert asked[0][0] == [[tokenizer.end]] * 3 and asked[0][3] is None
    no_end = CharTokenizer("abc def", with_end=False)                   # as in text8
    assert say(capsys, "--out_dir", with_tokenizer(run, tmp_path / "a", no_end)).startswith("ab")
    assert asked[-1][0] == [[0]] * 3 and no_end.decode([0]) == " "
    assert sample.first_token(CharTokenizer("abc\n", with_end=False)) == 0
    assert sample.first_token(CharTokenizer("abc", with_end=False)) == 0

def test_a_character_of_several_tokens_is_printed_when_it_is_whole(run, tmp_path, monkeypatch):
    folder = with_tokenizer(run, tmp_path / "bytes", ByteTokenizer())
    speaks(monkeypatch, [*"é→".encode(), 0xE2, 256])                    # the last character is never finished
    pieces = []
    monkeypatch.setattr(sys, "stdout", type("Out", (io.StringIO,), {"write": lambda self, s: pieces.append(s)})())
    sample.main(["--out_dir", str(folder), "--num_samples", "1", "--device", "cpu"])
    assert [p for p in pieces if p.strip()] == ["é", "→", "\ufffd"]

def test_ids_beyond_the_tokenizer_are_silent(run, capsys, tmp_path, monkeypatch):
    folder = with_tokenizer(run, tmp_path / "few", CharTokenizer("ab"))             # 2 is its end
    speaks(monkeypatch, [0, 50, 1])
    assert say(capsys, "--out_dir", folder, "--num_samples", 1) == "ab\n"

def test_the_newest_run(run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run under out/"):
        sample.main([])
    for i, name in enumerate(("new", "older", "sweep")):
        folder = tmp_path / "out" / name
        folder.mkdir(parents=True)
        (folder / "ckpt.pt").write_bytes((run / "ckpt.pt").read_bytes())
        os.utime(folder / "ckpt.pt", (1000 - i, 1000 - i))
    sample.main(["--max_new_tokens", "2"])
    assert "out/new, iteration 20" in capsys.readouterr().err

@pytest.mark.parametrize("flags, message", [
    (["--prompt", "caf\u00e9"], "'é'"),
    (["--temperature", "-1"], "--temperature is -1.0; it must be 0 or from 0.001 to 1000."),
    (["--temperature", "1e-40"], "--temperature is 1e-40; it must be 0 or from 0.001 to 1000."),
    (["--temperature", "1e40"], "--temperature is 1e+40; it must be 0 or from"),
    (["--temperature", "nan"], "--temperature is 'nan'; it must be a number."),
    (["--seed", "98765432109876543210"], "--seed is 98765432109876543210; it must have 18 digits at most."),
    (["--ckpt", "first"], "--ckpt is 'first'; it must be last or best."),
    (["--start", "x"], "--start is --prompt here"),
    (["--prompt", "FILE:/no/such.txt"], "there is no such file or folder"),
    (["--max_new_tokens", "0"], "--max_new_tokens is 0; it must be 1 or more."),
    (["--num_samples", "many"], "--num_samples is 'many'; it must be a whole number."),
    (["--top-k", "3"], "there is no flag --top-k. Did you mean --top_k?"),
    (["--device", "tpu"], "--device is 'tpu'"),
])
def test_wrong_flags(run, flags, message):
    with pytest.raises((UserError, OSError)) as e:
        sample.main(["--out_dir", str(run), *flags])
    said = explain(e.value) if isinstance(e.value, OSError) else str(e.value)
    assert message in said and len(said.splitlines()) == 1

def test_runs_that_cannot_speak(run, tmp_path):
    def refused(folder, message):
        with pytest.raises(UserError, match=message):
            sample.main(["--out_dir", str(folder), "--device", "cpu"])

    refused(tmp_path / "nowhere", "there is no checkpoint .*nowhere")
    refused(tmp_path, "there is no checkpoint .*ckpt.pt")
    whole = (run / "ckpt.pt").read_bytes()
    for name, content in {"cut": whole[:-1000], "half": whole[:len(whole) // 2], "empty": b"", "text": b"hello\n" * 99,
                          "flipped": whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "ckpt.pt").write_bytes(content)
        refused(tmp_path / name, "is damaged, or not a checkpoint of train.py")
    (tmp_path / "other").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "other" / "ckpt.pt")
    refused(tmp_path / "other", "is damaged, or not a checkpoint of train.py")
    (tmp_path / "code").mkdir()
    left = tmp_path / "left"
    # whole, but for what it does
    torch.save(checkpoint(run) | {"extra": Hostile(left)}, tmp_path / "code" / "ckpt.pt")
    refused(tmp_path / "code", "is damaged, or not a checkpoint of train.py")
    assert not left.exists()
    torch.load(tmp_path / "code" / "ckpt.pt", weights_only=False)       # trusted, it would have left a folder
    assert left.exists()
    refused(with_tokenizer(run, tmp_path / "none", None), "came without a tokenizer")
    c = checkpoint(run) | {"tokenizer": {"kind": "runes"}}
    torch.save(c, tmp_path / "other" / "ckpt.pt")
    refused(tmp_path / "other", "no tokenizer is known by this description")
    torch.save(checkpoint(run) | {"model_config": {"n_floors": 3}}, tmp_path / "other" / "ckpt.pt")
    refused(tmp_path / "other", "another version of model.py")

def test_what_is_drawn_follows_the_temperature(run):
    """By the probabilities themselves: the share of the likeliest next token in 4,000 draws is its softmax at T."""
    c = load_checkpoint(run)
    model = load_model(c, GPT, GPTConfig).eval()
    idx = torch.tensor([[5, 6, 7]])
    logits = model(idx)[0][0, -1].double()
    shares = []
    for temperature in (0.5, 1.0, 4.0):
        drawn = next(iter(model.stream(idx.expand(4000, -1), 1, temperature, None, torch.Generator().manual_seed(1))))
        p = (logits / temperature).softmax(-1)
        shares.append((drawn == p.argmax()).double().mean().item())
        assert shares[-1] == pytest.approx(p.max().item(), abs=4 * (p.max() * (1 - p.max()) / 4000).sqrt().item())
    assert shares[0] > shares[1] > shares[2]

def test_many_samples_go_in_batches(run, capsys, monkeypatch):
    asked = speaks(monkeypatch, [1, 2])
    out = say(capsys, "--out_dir", run, "--prompt", "x", "--num_samples", 20)
    assert [len(a[0]) for a in asked] == [16, 4] and len(out.split("\n---------------\n")) == 20
    assert len(set(out.strip().split("\n\n---------------\n"))) == 1     # this model says one thing

def test_each_text_ends_for_itself(run, capsys, tmp_path, monkeypatch):
    folder = with_tokenizer(run, tmp_path / "few", CharTokenizer("ab"))             # 2 ends a text
    def stream(self, idx, *args):
        yield from (torch.tensor(t)[:, None] for t in ([0, 1, 1], [2, 1, 0], [0, 2, 0], [0, 0, 2], [0, 0, 0]))
    monkeypatch.setattr(GPT, "stream", stream)
    assert say(capsys, "--out_dir", folder) == "a\n\n---------------\nbb\n\n---------------\nbaa\n"

def test_the_best_and_the_last(run, capsys, tmp_path):
    last, best = checkpoint(run), checkpoint(run)
    with torch.no_grad():
        best["model"]["embed.weight"] *= 0                              # it says id 0, whatever the prompt
    best["model"]["lm_head.weight"] = best["model"]["embed.weight"]
    torch.save(last, tmp_path / "ckpt.pt")
    torch.save(best, tmp_path / "best.pt")
    flags = ["--out_dir", tmp_path, "--temperature", 0, "--num_samples", 1, "--max_new_tokens", 5]
    a, b, default = say(capsys, *flags, "--ckpt", "last"), say(capsys, *flags, "--ckpt", "best"), say(capsys, *flags)
    assert a == default != b and b == load_data(last["settings"]["dataset"]).tokenizer.decode([0] * 5) + "\n"

def test_prompts(run, capsys, tmp_path, monkeypatch):
    tokenizer = load_data(checkpoint(run)["settings"]["dataset"]).tokenizer
    asked = speaks(monkeypatch, [])
    (tmp_path / "p.txt").write_text("def f(x):\n", encoding="utf-8")
    for prompt, text in ((f"FILE:{tmp_path / 'p.txt'}", "def f(x):\n"), ("--x", "--x"), ("-1", "-1"),
                         ("---\n", "---\n"),
                         ("FILE", "FILE")):
        assert say(capsys, "--out_dir", run, "--prompt", prompt, "--num_samples", 1) == text + "\n"
        assert asked[-1][0] == [tokenizer.encode(text).tolist()]
    assert say(capsys, "--prompt=--x", "--out_dir", run, "--num_samples", 1) == "--x\n"
    with pytest.raises(UserError, match="expected one argument"):
        sample.main(["--prompt", "--num_samples", "1"])
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="b.txt: the file is not UTF-8 text"):
        sample.main(["--out_dir", str(run), "--prompt", f"FILE:{tmp_path / 'b.txt'}", "--device", "cpu"])

def test_an_output_that_is_not_utf_8(run, tmp_path):
    folder = with_tokenizer(run, tmp_path / "greek", CharTokenizer("αβγ"), )
    r = script("sample.py", "--out_dir", folder, "--prompt", "αβ", "--num_samples", 1, "--max_new_tokens", 4,
               env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert r.returncode == 0 and r.stdout.startswith("??") and r.stderr == ""

def test_from_outside(run):
    r = script("sample.py", "--out_dir", run, "--num_samples", 1, "--max_new_tokens", 5)
    assert r.returncode == 0 and 1 <= len(r.stdout) <= 6 and r.stderr == ""
    r = script("sample.py", "--out_dir", run, "--prompt", "caf\u00e9")
    assert r.returncode == 2 and r.stdout == "" and "'é'" in r.stderr and len(r.stderr.splitlines()) <= 2
