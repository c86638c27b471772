"""A run: its folder, what is recorded of it, what it says on the screen, and the signals that it hears."""
import ast
import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch
from tqdm import tqdm

from nanodepth.files import UserError, atomic_write, lock, save_checkpoint

# ---------------------------------------------------------------------------------------------------------------------
# the folder

class Folder:
    """The folder of a run, held by this process: config.json, log.jsonl, ckpt.pt (the last) and best.pt (of the lowest
    val loss). `saved` is the iteration of ckpt.pt, None where there is none."""

    def __init__(self, path):
        self.path, self.log, self.held, self.saved = Path(path), None, None, None

    def claim(self, resume_at: int | None, config: dict) -> None:
        """Take the folder for this run alone, and write config.json. UserError when another run has it."""
        (self.log, self.held), self.saved = claim(self.path, resume_at), resume_at
        try:
            with atomic_write(self.path / "config.json") as f:
                json.dump(config, f, indent=1)
        except OSError:                                                 # a full disk: leave no empty run behind
            self.close()
            if resume_at is None:
                (self.path / "log.jsonl").unlink()
                with contextlib.suppress(OSError):
                    self.path.rmdir()
            raise

    def write(self, line: dict) -> None:
        """One more line of log.jsonl."""
        if self.log:
            self.log.write(json.dumps(line) + "\n")
            self.log.flush()

    def save(self, checkpoint: dict) -> None:
        """Write ckpt.pt; when it is the best so far, it is best.pt too: one file of two names, where the system can."""
        if self.log:
            save_checkpoint(checkpoint, self.path / "ckpt.pt")
            self.keep_best(checkpoint["best"], checkpoint["iter"])
        self.saved = checkpoint["iter"]

    def keep_best(self, best: dict, i: int) -> None:
        """ckpt.pt, of iteration i, becomes best.pt if it is the best. Also on resuming: a kill may come between."""
        last, name = self.path / "ckpt.pt", self.path / "best.pt"
        if best.get("iter") != i or name.exists() and name.samefile(last):
            return
        tmp = self.path / "best.pt.tmp"
        tmp.unlink(missing_ok=True)                                     # of a run that was killed just here
        try:
            os.link(last, tmp)
            os.replace(tmp, name)
        except OSError:                                                 # a file system without links
            with atomic_write(name, "wb") as f, open(last, "rb") as whole:
                shutil.copyfileobj(whole, f)

    def kept(self) -> str:
        """What there is to go on from, as a part of a sentence."""
        last = self.path / "ckpt.pt"
        return f"{last} is of iteration {self.saved}" if self.saved is not None else "there is no checkpoint yet"

    def close(self) -> None:
        if self.log:
            with contextlib.suppress(OSError):                          # the disk may be full
                self.log.close()
            self.held.release()

def claim(out_dir: Path, resume_at: int | None):
    """log.jsonl opened, and the lock that keeps other runs from this folder. A resumed run drops the lines after its
    checkpoint; a new run moves the files of an earlier one to OUT_DIR/oldN, so that nothing is lost by typing the same
    command twice."""
    out_dir.mkdir(parents=True, exist_ok=True)
    held = lock(out_dir, f"another run is writing to {out_dir}; choose another --out_dir.")
    path = out_dir / "log.jsonl"
    if resume_at is None and (path.exists() or (out_dir / "ckpt.pt").exists()):
        old = next(o for n in range(1, 10**6) if not (o := out_dir / f"old{n}").exists())
        old.mkdir()
        for name in ("log.jsonl", "config.json", "ckpt.pt", "best.pt"):
            if (out_dir / name).exists():
                (out_dir / name).rename(old / name)
        print(f"{out_dir} held an earlier run: its files are in {old} now")
    log = open(path, "a", encoding="utf-8")
    if resume_at is not None:
        with open(path, "rb") as f:                                     # iterations only grow along the file
            log.truncate(sum(map(len, takewhile(lambda line: iter_of(line) <= resume_at, f))))
    return log, held

def iter_of(line: bytes) -> float:
    """The iteration of a line of log.jsonl; infinity for one that a kill has cut short."""
    try:
        return json.loads(line)["iter"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf

# ---------------------------------------------------------------------------------------------------------------------
# what is recorded

def data_facts(data) -> dict:
    """What tells one data set from another. The digest is of meta.json's sums; without them, as of shards from
    elsewhere, of each shard's size and both its ends: to read 20 GB would take minutes."""
    sums = hashlib.sha256()
    for split in ("train", "val"):
        shards = data.meta.get("splits", {}).get(split, {}).get("shards", [])
        if shards and all("sha256" in shard for shard in shards):
            sums.update(" ".join(f"{shard['tokens']} {shard['sha256']}" for shard in shards).encode())
        else:
            for path in getattr(data, split).paths:
                with open(path, "rb") as f:
                    size = f.seek(0, os.SEEK_END)
                    sums.update(str(size).encode())
                    for start in (0, max(0, size - 2**16)):             # with the header
                        f.seek(start)
                        sums.update(f.read(2**16))
        sums.update(split.encode())
    return {"train_tokens": len(data.train), "val_tokens": len(data.val), "vocab_size": data.vocab_size,
            "tokenizer": known_as(described(data)), "digest": sums.hexdigest()[:32]}

def described(data) -> dict | None:
    return data.tokenizer.describe() if data.tokenizer else None

def known_as(tokenizer: dict | None) -> dict | None:
    """A tokenizer's description as it is recorded and compared: a tokenizer.json, of megabytes, by its digest."""
    if tokenizer and tokenizer["kind"] == "tokenizer.json":
        return {"kind": "tokenizer.json", "sha256": tokenizer["sha256"]}
    return tokenizer

def same_data(facts: dict, was: dict, dataset: str, out_dir: str) -> None:
    """UserError, with both values, when a run was trained on other data than this."""
    for name, value in was.items():
        if facts.get(name, value) != value:
            raise UserError(f"{dataset} has {name} {str(facts[name])[:60]}: it is not the data that the run in "
                            f"{out_dir} was trained on,\nwhich has {str(value)[:60]}. Name that one with --dataset.")

def history(checkpoint: dict | None, i: int, place: dict, settings: dict) -> list[dict]:
    """The parts of a run, up to this one: the iteration of its start, where it ran, the settings it was given anew."""
    was = checkpoint["settings"] if checkpoint else settings
    changed = {name: value for name, value in settings.items() if was.get(name, value) != value}
    return [*(checkpoint or {}).get("history", []), {"iter": i, **place, "changed": changed}]

# Settings that change no number of a run, but by rounding: two runs that differ in them alone are still a pair.
NO_MATTER = ["router", "router_sha256", "out_dir", "init_from", "eval_only", "max_tokens", "dataset", "device", "dtype",
             "compile", "recompute", "fsdp", "plain_read", "batch_size", "gradient_accumulation_steps", "log_interval",
             "eval_interval"]

def fingerprint(record: dict, start: str | None, code: tuple[str, str]) -> dict:
    """What, besides its settings, must be the same in two runs that are compared; in those of one cell the router too.
    A run that was resumed elsewhere, or with other settings, has them all."""
    parts = record["history"]
    def each(name, of=str):
        return ", ".join(dict.fromkeys(of(part[name]) for part in parts))
    changed = [{"iter": part["iter"], **new} for part in parts
               if (new := {k: v for k, v in part["changed"].items() if k not in NO_MATTER})]
    return {"data": record["data"]["digest"], "start": start, "torch": each("torch"), "dtype": each("dtype"),
            "device": each("device", lambda at: at.split(":")[0]), "changed": changed,
            "model": code[1], "router": code[0]}

def weights_digest(weights) -> str:
    """A digest of a checkpoint's weights, tensors by name: what a run started from."""
    sums = hashlib.sha256()
    for name in sorted(weights):                                        # one at a time: they may lie in files still
        sums.update(name.encode())
        sums.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy())
    return sums.hexdigest()[:32]

def code_digests(router: str, routers: dict, files: list, own_file: str | None) -> tuple[str, str]:
    """Of the router's own classes (and its own file, by that file's digest), and of all other code in these files that
    numbers come from. Comments, docstrings, checks of settings and other routers do not count."""
    own, rest = hashlib.sha256((own_file or "").encode()), hashlib.sha256()
    base = {cls.__name__ for cls in routers[router].__mro__}
    names = {cls.__name__ for cls in routers.values()}
    for file in files:
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROUTERS":
                continue
            for inner in ast.walk(node):
                if isinstance(body := getattr(inner, "body", None), list):
                    inner.body = [x for x in body if getattr(x, "name", "") != "__post_init__" and not (
                        isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
            name = getattr(node, "name", None)
            if name not in names:
                rest.update(ast.unparse(node).encode())
            elif name in base:
                own.update(ast.unparse(node).encode())
    return own.hexdigest()[:16], rest.hexdigest()[:16]

def git_commit() -> str | None:
    """The commit of this code, with -dirty where files differ from it; None where it is no git checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():                                    # a copy inside some other checkout
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

# ---------------------------------------------------------------------------------------------------------------------
# starting from another run's weights

FIRST_VALUES = {"route_gate": "router.gate", "detail_bias": "router.detail_bias", "layerscale_init": "router.gain"}

def carried(weights: dict, theirs: dict, s: dict, given: dict) -> dict:
    """Another run's weights, without those of its router that would mean something else here.

    A query asks the same of any sources; a gate, a gain or a bias is of one router alone. A first value that is given
    wins over a trained one, and frozen_v's query stays at zero.
    """
    same = all(theirs.get(name) == s[name] for name in ("router", "details"))
    fresh = {FIRST_VALUES[name] for name in given if name in FIRST_VALUES}
    if s["rd_control"] == "frozen_v":
        fresh.add("router.query_v")
    return {name: w for name, w in weights.items() if not name.startswith("router.") or
            name not in fresh and (same or name in ("router.query", "router.query_v"))}

def unfilled(GPT, config):
    """GPT(config) whose embedding and head are still to be filled. GPT itself gives a tied model a head of its own for
    a moment, which is a quarter of Qwen3-0.6B's memory."""
    small = replace(config, vocab_size=1)
    model = GPT(small)
    small.vocab_size = config.vocab_size                                # the model's own config from now on
    empty = lambda: torch.empty(config.vocab_size, config.n_embd)
    model.embed = torch.nn.Embedding.from_pretrained(empty(), freeze=False)
    model.lm_head.out_features = config.vocab_size
    model.lm_head.weight = model.embed.weight if config.tie_embeddings else torch.nn.Parameter(empty())
    return model

@torch.no_grad()
def start_from(model, state, path: str, whole: bool = False) -> None:
    """Copy weights, tensors by name, into a model; all of them if `whole`, else router parameters that do not fit stay
    as they are. A few million numbers at a time: what has been read of a file counts as memory until it is closed."""
    own = model.state_dict()
    fits = [k for k in state if k in own and state[k].shape == own[k].shape]
    wrong = [k for k in sorted(own.keys() | state.keys()) if k not in fits and (whole or not k.startswith("router."))]
    if wrong:
        raise UserError(f"the weights of {path} do not fit this model: {wrong[0]}. " + (
            "It is of another version of model.py." if whole else "Leave out the flags of its size."))
    for k in fits:
        mine = torch.atleast_1d(own[k])
        rows = max(1, 2**23 * len(mine) // max(1, mine.numel()))
        for a in range(0, len(mine), rows):
            mine[a:a + rows].copy_(torch.atleast_1d(state[k])[a:a + rows])

# ---------------------------------------------------------------------------------------------------------------------
# what is heard and said

class Stop:
    """Ctrl-C, SIGTERM and a closed terminal (SIGHUP) ask a run to end after its step; a second Ctrl-C ends it at once.

    What is ignored stays ignored, as SIGHUP is under nohup. Used as a context.
    """
    def __init__(self):
        self.asked, self.before = False, {}

    def __enter__(self):
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):        # the last is Windows'
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self.before[number] = signal.signal(number, self.hear)
        return self

    def hear(self, number, frame):
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

class Screen:
    """A bar where stderr is a terminal, else plain lines; of several processes only the first speaks. Output that
    nobody reads any more (a closed pipe) asks the run to stop."""

    def __init__(self, total: int, initial: int, stop: Stop, silent: bool):
        self.stop, self.silent, self.watched = stop, silent, sys.stderr.isatty() and not silent
        self.bar = tqdm(total=total, initial=initial, disable=not self.watched, dynamic_ncols=True,
                        bar_format="{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt}, {remaining} left{postfix}")

    def say(self, text: str) -> None:
        if self.silent:
            return
        try:
            print(text, flush=True)
        except OSError:
            self.stop.asked = True
            with contextlib.suppress(OSError):                          # what remains in the buffer goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def tell(self, text: str) -> None:
        """A line where there is no bar."""
        if not self.watched:
            self.say(text)

    def show(self, loss: float, val_loss: float, tok_per_s: float) -> None:
        """What stands beside the bar."""
        self.bar.set_postfix_str(f"loss {loss:.3f}, val {val_loss:.3f}, {tok_per_s:,.0f} tok/s")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bar.close()
