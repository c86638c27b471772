"""A small data set, a small model and short runs of it, for the tests of the scripts."""
import argparse
import json
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
