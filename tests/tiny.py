"""A small data set, a small model and short runs of it, for the tests of the scripts."""
import argparse
import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import torch

import train
from prepare_data import prepare

ROOT = Path(train.__file__).parent
SIZE = ["--n_layer", "2", "--n_head", "2", "--n_embd", "16", "--seq_len", "16", "--batch_size", "4",
        "--eval_iters", "2", "--device", "cpu"]
SECONDS = ("tok_per_s", "peak_mem_mb", "elapsed_s")                     # of a log line; these differ from run to run

def data_folder(folder, name="tiny") -> str:
    """100,000 characters of Python at character level; the last 20,000 are for validation and test."""
    text = "".join(c for c in Path(argparse.__file__).read_text() if c.isascii())
    path = folder / f"{name}.txt"
    path.write_text(text)
    return str(prepare(input=[str(path)], tokenizer="char", out=folder / name, split="80/10/10", num_proc=1))

def go(*flags):
    """train.py in this process, at the small size unless the flags say otherwise."""
    train.main([*SIZE, *map(str, flags)])

def script(name, *flags, **kwargs):
    """A script in a process of its own, as a user runs it."""
    kwargs = {"capture_output": True, "text": True, "timeout": 120} | kwargs
    return subprocess.run([sys.executable, str(ROOT / name), *map(str, flags)], **kwargs)

def checkpoint(out_dir) -> dict:
    return torch.load(Path(out_dir) / "ckpt.pt", weights_only=True)

def log(out_dir, seconds=False) -> list[dict]:
    lines = [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]
    return lines if seconds else [{k: v for k, v in line.items() if k not in SECONDS} for line in lines]

def same_weights(a, b) -> bool:
    a, b = checkpoint(a), checkpoint(b)
    flat = [[*c["model"].values(), *(v for s in c["optimizer"]["state"].values() for v in s.values())] for c in (a, b)]
    return a["iter"] == b["iter"] and len(flat[0]) == len(flat[1]) and all(map(torch.equal, *flat))

def fake_run(folder, label, depth, seed, losses, max_iters=None, every=10, mark=(), tokens_per_step=100, **settings):
    """A run's folder as a sweep leaves it, without training: an evaluation every 10 steps of 100 tokens, one training
    line. mark: what is another in its fingerprint; None: it has none. settings: those that are no defaults."""
    iters, router = [every * k for k in range(len(losses))], label.split(":")[0]
    s = train.DEFAULTS | {"router": router, "n_layer": depth, "seed": seed, "n_embd": 16, "dataset": "tiny",
                          "max_iters": max_iters or iters[-1]} | settings
    path = folder / f"{label.replace(':', '+')}-{depth}x{s['n_embd']}-s{seed}"
    path.mkdir(parents=True, exist_ok=True)
    fingerprint = {"data": "d" * 32, "start": None, "torch": "2.13.0", "dtype": "float32", "device": "cpu",
                   "changed": [], "model": "b" * 16, "router": digest(router)}
    config = {"settings": s, "model": {"n_blocks": min(8, depth)}, "params": 1000 + depth,
              "tokens_per_step": tokens_per_step}
    if mark is not None:
        config["fingerprint"] = fingerprint | dict(mark)
    (path / "config.json").write_text(json.dumps(config))
    lines = [{"iter": i, "tokens": 100 * i, "val_loss": x, "val_bpb": x / math.log(2)} for i, x in zip(iters, losses)]
    lines += [{"iter": iters[-1], "tokens": 100 * iters[-1], "loss": 1.0, "lr": 0.1, "tok_per_s": 50.0 + seed,
               "peak_mem_mb": 300.0 + seed, "elapsed_s": 7.0}]
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

def rows_of(text, title) -> list[list[str]]:
    """The cells of the first table under a line that begins with `title`."""
    part = next(x for x in text[text.index(title):].split("\n\n")[1:] if x.startswith("|"))
    lines = [line.strip() for line in part.splitlines()[2:] if line.startswith("|")]
    return [[x.strip() for x in line[1:-1].split("|")] for line in lines]
