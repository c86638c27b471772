"""Train a GPT with any depth router: the settings, a few functions, then the loop, to be read from top to bottom.

    python train.py --router wav --n_layer 48                       # prepares its corpus, trains, shows a bar
    python train.py configs/quick.toml --router delta_block         # defaults, then the file, then flags
    python train.py --init_from resume --out_dir out/wav-48x64-s0   # goes on from the last checkpoint

What is unusual:
- The batch of step i, and the dropout in it, depend on (seed, i) and the data alone: not on the router, nor on how the
  batch is split, nor on where a run was stopped. So runs are paired, and a resumed run is the run that never stopped.
- The evaluation windows are the same for every run on the same data with the same seq_len.
- ckpt.pt is whole or absent, and holds the last weights whose loss was finite.
"""
import contextlib
import json
import math
import shlex
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from nanodepth.files import UserError, atomic_write, explain, load_checkpoint, lock, run, save_checkpoint
from nanodepth.machine import autocast, keep_freed_memory, peak_mem_mb, pick_device, pick_dtype
from nanodepth.settings import Parser, nearest
from nanodepth.data import load_data
from model import GPT, GPTConfig


@dataclass
class TrainConfig:
    # The names are nanoGPT's. The comment beside a setting is its help text. The defaults are for a laptop.
    dataset: str = "pystdlib"            # a folder under data/, or the path of one
    out_dir: str | None = None           # where the run is written; none: out/ROUTER-LxD-sSEED
    init_from: str = "scratch"           # scratch, resume, or the folder of another run, whose weights it starts from
    seed: int = 0                        # of the first weights, the batches and the dropout
    # the model's other flags are GPTConfig's
    vocab_size: int | None = None        # tokens the model knows; none: what the data says
    tokenizer: str | None = None         # of shards made elsewhere whose names do not say it: byte or gpt2
    # the steps
    max_iters: int = 400                 # optimizer steps
    batch_size: int = 8                  # windows in a micro batch
    gradient_accumulation_steps: int = 1 # micro batches in a step
    learning_rate: float = 2e-3          # the highest learning rate
    min_lr: float | None = None          # the lowest, at the end of the cosine; none: a tenth of learning_rate
    warmup_iters: int = 50               # steps of linear warm-up
    lr_decay_iters: int | None = None    # the step at which the cosine ends; none: max_iters
    router_lr: float | None = None       # the learning rate of the router's parameters; none: learning_rate
    weight_decay: float = 0.1            # on two-dimensional weights, but not on the router's
    beta1: float = 0.9                   # AdamW's memory of the gradient
    beta2: float = 0.99                  # AdamW's memory of its square
    grad_clip: float = 1.0               # largest norm of the gradient; 0: no clipping
    # looking at it
    eval_interval: int = 100             # steps from one evaluation and checkpoint to the next
    eval_iters: int = 10                 # an evaluation is 16 times as many windows, whatever batch_size is
    log_interval: int = 10               # steps from one line of log.jsonl to the next
    # the machine
    device: str = "auto"                 # auto, cpu, cuda, cuda:N or mps
    dtype: str = "auto"                  # auto, float32 or bfloat16 (autocast; weights stay float32)
    compile: bool = False                # torch.compile the model: slow to start, then faster

MODEL_FIELDS = [f.name for f in fields(GPTConfig)]
DEFAULTS = {f.name: f.default for f in (*fields(GPTConfig), *fields(TrainConfig))}
BACKBONE = ["vocab_size", "seq_len", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "mlp_hidden",
            "tie_embeddings", "rope_theta"]                                     # the router's reads are not in it
# A resumed run may be told other values of these; any other would make it another run.
RESUME_MAY_CHANGE = ["dataset", "out_dir", "init_from", "max_iters", "learning_rate", "min_lr", "warmup_iters",
                     "lr_decay_iters", "grad_clip", "eval_interval", "eval_iters", "log_interval", "device", "dtype",
                     "compile", "plain_read"]
EVAL_BATCH = 16                                                                 # windows for each of eval_iters

# ---------------------------------------------------------------------------------------------------------------------
# settings

def read_settings(argv) -> tuple[dict, dict | None]:
    """Every setting by name, and the checkpoint to start from: the defaults, then the file, then the flags."""
    parser = Parser(prog="train.py", usage="python train.py [CONFIG.toml] [--flag value | --flag=value ...]",
                    description="Train a GPT with any depth router.", refused={
        "block_size": "--block_size is --seq_len here: the context length is --seq_len, and block means a depth block "
                      "(--n_blocks)."})
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="a file of settings, as in configs/")
    parser.add_fields(TrainConfig)
    parser.add_fields(GPTConfig, skip=[f.name for f in fields(TrainConfig)])
    flags = vars(parser.parse_args(argv))
    config = flags.pop("config")
    given = (parser.read_toml(config) if config else {}) | flags
    check(given)
    s = DEFAULTS | given
    default_out_dir = "out/{router}-{n_layer}x{n_embd}-s{seed}".format(**s)
    checkpoint = None
    if s["init_from"] == "resume":
        out_dir = s["out_dir"] or default_out_dir
        if not (Path(out_dir) / "ckpt.pt").exists():
            raise UserError(f"there is nothing to resume in {out_dir}: it holds no ckpt.pt. "
                            f"Name the run with --out_dir, or leave out --init_from resume to start one.")
        checkpoint = load_checkpoint(out_dir)
        was, became = checkpoint["settings"], checkpoint["model_config"]        # n_blocks none became 8, for one
        for name, value in given.items():
            if name not in RESUME_MAY_CHANGE and value not in (was[name], became.get(name, was[name])):
                raise UserError(f"--{name} {value}: the run in {out_dir} has {was[name]}, and a resumed run keeps it. "
                                f"Start another from its weights with --init_from {out_dir} --out_dir ANOTHER.")
        s = checkpoint["settings"] | given | {"out_dir": out_dir}
        if checkpoint["iter"] > s["max_iters"]:
            raise UserError(f"--max_iters {s['max_iters']}: the run in {out_dir} is already at {checkpoint['iter']}.")
    elif s["init_from"] != "scratch":
        if not Path(s["init_from"]).exists():
            raise UserError(f"--init_from is {s['init_from']!r}; it must be scratch, resume, or the folder of a run."
                            + nearest(s["init_from"], ["scratch", "resume"]))
        checkpoint = load_checkpoint(s["init_from"])
        theirs = checkpoint["model_config"]                             # of another router, only the backbone counts
        same_router = given.get("router", theirs["router"]) == theirs["router"]
        s = DEFAULTS | {k: theirs[k] for k in (MODEL_FIELDS if same_router else BACKBONE)} | given
    s["out_dir"] = s["out_dir"] or default_out_dir
    return s, checkpoint

def check(given: dict) -> None:
    """UserError for a training setting that no run can have; the model's own are GPTConfig's to refuse."""
    bounds = {"batch_size": 1, "gradient_accumulation_steps": 1, "eval_interval": 1, "eval_iters": 1, "log_interval": 1,
              "max_iters": 0, "warmup_iters": 0, "lr_decay_iters": 0, "seed": 0, "vocab_size": 1,
              "min_lr": 0, "router_lr": 0, "weight_decay": 0, "grad_clip": 0, "beta1": 0, "beta2": 0}
    for name, low in bounds.items():
        value = given.get(name)
        if value is not None and not low <= value < math.inf:
            raise UserError(f"--{name} is {value}; it must be {low} or more.")
    if not 0 < given.get("learning_rate", 1) < math.inf:
        raise UserError(f"--learning_rate is {given['learning_rate']}; it must be more than 0.")
    for name in ("beta1", "beta2"):
        if given.get(name, 0) >= 1:
            raise UserError(f"--{name} is {given[name]}; it must be less than 1.")

def model_config(s: dict, vocab_size: int) -> GPTConfig:
    try:
        return GPTConfig(**{k: s[k] for k in MODEL_FIELDS} | {"vocab_size": vocab_size})
    except ValueError as e:
        raise UserError(str(e)) from None

# ---------------------------------------------------------------------------------------------------------------------
# data

def open_data(name: str, tokenizer: str | None = None):
    """The data set in data/NAME, or at a path. The built-in corpus is prepared when it is not there."""
    path = Path("data") / name                                          # Path gives way to an absolute name
    if name == "pystdlib" and not (path / "meta.json").exists():
        from prepare_data import prepare
        prepare(dataset="pystdlib", out=path)
    if not path.is_dir() and Path(name).is_dir():
        path = Path(name)
    if not path.is_dir():
        there = [p.parent.name for p in Path("data").glob("*/meta.json")]
        raise UserError(f"there is no data set {path}; make it with prepare_data.py.{nearest(name, there)}")
    return load_data(path, tokenizer)

def facts(data) -> dict:
    """What tells one data set from another."""
    return {"train_tokens": len(data.train), "val_tokens": len(data.val), "vocab_size": data.vocab_size,
            "tokenizer": data.tokenizer.describe() if data.tokenizer else None}

def windows(tokens, starts, seq_len: int, vocab_size: int) -> torch.Tensor:
    """The windows of seq_len inputs and one more target that begin at `starts`."""
    batch = np.stack([tokens.window(int(start), seq_len + 1) for start in starts])         # (n, T + 1)
    if batch.max() >= vocab_size:
        raise UserError(f"the data holds token {batch.max()}; --vocab_size must be at least {batch.max() + 1}.")
    return torch.from_numpy(batch)

def train_starts(n_tokens: int, seq_len: int, n: int, seed: int, i: int) -> np.ndarray:
    """Where the n windows of step i begin: anywhere, by (seed, i) alone."""
    return np.random.default_rng((seed, i)).integers(n_tokens - seq_len, size=n)

def eval_starts(n_tokens: int, seq_len: int, eval_iters: int) -> np.ndarray:
    """Where the evaluation windows begin: evenly spaced, without overlap; fewer than asked for in a short split."""
    n = min(eval_iters * EVAL_BATCH, (n_tokens - 1) // seq_len)
    return np.linspace(0, n_tokens - seq_len - 1, n).astype(np.int64)

# ---------------------------------------------------------------------------------------------------------------------
# pieces of the loop

def lr_at(i: int, s) -> float:
    """The learning rate of step i, counted from 0: linear warm-up, then a cosine down to min_lr. As in nanoGPT."""
    min_lr = s.learning_rate / 10 if s.min_lr is None else s.min_lr
    end = s.max_iters if s.lr_decay_iters is None else s.lr_decay_iters
    if i < s.warmup_iters:
        return s.learning_rate * (i + 1) / (s.warmup_iters + 1)
    if i >= end:
        return min_lr
    along = (i - s.warmup_iters) / (end - s.warmup_iters)               # 0 to 1
    return min_lr + 0.5 * (1 + math.cos(math.pi * along)) * (s.learning_rate - min_lr)

@torch.no_grad()
def evaluate(model, windows: torch.Tensor, batch_size: int, device: str, dtype: str) -> float:
    """Mean loss over the evaluation windows, in nats a token."""
    training, total = model.training, 0.0
    model.eval()
    for batch in windows.split(batch_size):                             # (b, T + 1)
        batch = batch.to(device)
        with autocast(device, dtype):
            _, loss = model(batch[:, :-1], batch[:, 1:])
        total += loss.item() * len(batch)
    model.train(training)
    return total / len(windows)

def start_from(model, state: dict, path: str) -> None:
    """Another run's weights. Its router may be another: router parameters that do not fit stay as they are."""
    own = model.state_dict()
    fits = {k: v for k, v in state.items() if k in own and v.shape == own[k].shape}
    wrong = [k for k in sorted(own.keys() | state.keys()) if k not in fits and not k.startswith("router.")]
    if wrong:
        raise UserError(f"the weights of {path} do not fit this model: {wrong[0]}. Leave out the flags of its size.")
    model.load_state_dict(fits, strict=False)

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
        for name in ("log.jsonl", "config.json", "ckpt.pt"):
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
# the run

def main(argv) -> None:
    settings, checkpoint = read_settings(argv)
    s = TrainConfig(**{f.name: settings[f.name] for f in fields(TrainConfig)})
    resumed = s.init_from == "resume"
    out_dir = Path(s.out_dir)
    device = pick_device(s.device)
    dtype = pick_dtype(s.dtype, device)
    config = model_config(settings, s.vocab_size or 1)                  # what cannot work is refused before data is made
    seq_len = config.seq_len
    if device == "cpu" and s.batch_size * seq_len * config.n_embd <= 2**16:
        torch.set_num_threads(1)        # too small a step to share: two threads gain a little on two free cores, and on busy
                                        # ones they wait for each other, and the step takes several times as long

    # data
    data = open_data(s.dataset, s.tokenizer)
    vocab_size = s.vocab_size or data.vocab_size
    if vocab_size is None:
        raise UserError(f"{s.dataset} does not say how many tokens its vocabulary has; give --vocab_size or "
                        f"--tokenizer.")
    if data.vocab_size is not None and vocab_size < data.vocab_size:
        raise UserError(f"--vocab_size is {vocab_size}; the vocabulary of {s.dataset} has {data.vocab_size} tokens.")
    data.check_window(seq_len)
    data_facts = facts(data)
    if resumed and data_facts != checkpoint["data"]:
        raise UserError(f"{s.dataset} is not the data that the run in {out_dir} was trained on.")
    if checkpoint and not resumed and checkpoint["tokenizer"] != data_facts["tokenizer"]:
        raise UserError(f"the tokenizer of {s.dataset} is not the one of {s.init_from}: its weights would read other "
                        f"symbols. Prepare the data with the same tokenizer.")
    bytes_per_token = data.bytes_per_token("val")
    starts = eval_starts(len(data.val), seq_len, s.eval_iters)
    val_windows = windows(data.val, starts, seq_len, vocab_size)        # (eval_iters * 16, T + 1)

    def batch_of(i):                                                    # all windows of step i, (n, T + 1)
        n = s.batch_size * s.gradient_accumulation_steps
        batch = windows(data.train, train_starts(len(data.train), seq_len, n, s.seed, i), seq_len, vocab_size)
        return batch.pin_memory().to(device, non_blocking=True) if device.startswith("cuda") else batch.to(device)

    # model and optimizer
    config = replace(config, vocab_size=vocab_size)
    keep_freed_memory()
    torch.manual_seed(s.seed)
    model = GPT(config).to(device)
    if resumed:
        model.load_state_dict(checkpoint["model"])
    elif checkpoint:
        start_from(model, checkpoint["model"], s.init_from)
    groups = model.param_groups(s.weight_decay, s.learning_rate, s.router_lr)
    optimizer = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=not device == "mps")
    i, val_line, elapsed = 0, {}, 0.0
    if resumed:
        optimizer.load_state_dict(checkpoint["optimizer"])
        i, val_line, elapsed = checkpoint["iter"], checkpoint["val"], checkpoint["elapsed_s"]
    checkpoint = None                                                   # its weights are in the model now
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")                      # TF32
    net = torch.compile(model) if s.compile else model                  # the same weights; evaluated without it

    # the folder of the run
    tokens_per_step = s.batch_size * s.gradient_accumulation_steps * seq_len
    resume_command = f"python train.py --init_from resume --out_dir {shlex.quote(s.out_dir)}"
    log, held = claim(out_dir, i if resumed else None)
    try:
        with atomic_write(out_dir / "config.json") as f:
            json.dump({"settings": settings, "model": asdict(config), "params": model.num_params(), "data": data_facts,
                       "tokens_per_step": tokens_per_step, "device": device, "dtype": dtype,
                       "torch": torch.__version__}, f, indent=1)
    except OSError:                                                     # a full disk: leave no empty run behind
        log.close()
        held.release()
        if not resumed:
            (out_dir / "log.jsonl").unlink()
            with contextlib.suppress(OSError):
                out_dir.rmdir()
        raise
    saved = i if resumed else None                                      # the iteration of ckpt.pt

    def save():
        nonlocal saved
        save_checkpoint({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter": i, "val": val_line,
                         "settings": settings, "model_config": asdict(config), "data": data_facts,
                         "tokenizer": data_facts["tokenizer"], "elapsed_s": elapsed + time.time() - began},
                        out_dir / "ckpt.pt")
        saved = i

    def write(line):
        log.write(json.dumps(line) + "\n")
        log.flush()

    def diverged(what):
        kept = f"{out_dir / 'ckpt.pt'} is of iteration {saved}" if saved is not None else "there is no checkpoint yet"
        return UserError(f"{what} at iteration {i} is not finite, so the run stops; {kept}.\n"
                         f"Try a lower --learning_rate, a longer --warmup_iters or another --seed.")

    # the loop
    print(f"{config.router} {config.n_layer}x{config.n_embd}, {model.num_params():,} parameters, {tokens_per_step:,} "
          f"tokens a step, {device} {dtype}, {out_dir}" + (f", from iteration {i}" if resumed else ""), flush=True)
    stop = []

    def on_signal(number, frame):                                       # one ends after the step, a second at once
        if stop:
            raise KeyboardInterrupt(f"stopped without saving; the last checkpoint is of iteration {saved}")
        stop.append(number)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    watched = sys.stderr.isatty()
    bar = tqdm(total=s.max_iters, initial=i, disable=not watched, dynamic_ncols=True,
               bar_format="{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt}, {remaining} left{postfix}")
    began, trained_s, trained_tokens, batch = time.time(), 0.0, 0, None
    loss = tok_per_s = math.nan

    def show():
        bar.set_postfix_str(f"loss {loss:.3f}, val {val_line.get('val_loss', math.nan):.3f}, {tok_per_s:,.0f} tok/s")

    model.train()
    try:
        while True:
            # evaluate, and keep what there is
            if (i % s.eval_interval == 0 or i == s.max_iters) and val_line.get("iter") != i:
                val_loss = evaluate(model, val_windows, s.batch_size, device, dtype)
                if not math.isfinite(val_loss):
                    raise diverged("the validation loss")
                val_bpb = val_loss / math.log(2) / bytes_per_token if bytes_per_token else None
                val_line = {"iter": i, "tokens": i * tokens_per_step, "val_loss": val_loss, "val_bpb": val_bpb}
                write(val_line)
                save()
                show()
                if not watched:
                    print(f"iter {i}/{s.max_iters}: val loss {val_loss:.4f}", flush=True)
            if i >= s.max_iters:
                break
            if stop:
                if saved != i:
                    save()
                raise KeyboardInterrupt(f"stopped at iteration {i} of {s.max_iters}, and saved. To go on:\n"
                                        f"    {resume_command}")

            # one step
            t0 = time.time()
            lr = lr_at(i, s)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            torch.manual_seed(int(np.random.SeedSequence((s.seed, i, 1)).generate_state(1)[0]))        # for dropout
            batch = batch_of(i) if batch is None else batch
            loss = 0.0
            for micro in batch.split(s.batch_size):                     # (batch_size, T + 1)
                with autocast(device, dtype):
                    _, micro_loss = net(micro[:, :-1], micro[:, 1:])
                    micro_loss = micro_loss / s.gradient_accumulation_steps
                micro_loss.backward()
                loss = loss + micro_loss.detach()
            batch = batch_of(i + 1)                                     # while a card is still at work
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
            loss, norm = torch.stack([loss, norm]).tolist()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise diverged("the loss" if not math.isfinite(loss) else "the gradient")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            i += 1

            # tell
            trained_s, trained_tokens = trained_s + time.time() - t0, trained_tokens + tokens_per_step
            bar.update()
            if i % s.log_interval == 0 or i == s.max_iters:
                tok_per_s = trained_tokens / trained_s
                trained_s, trained_tokens = 0.0, 0
                write({"iter": i, "tokens": i * tokens_per_step, "loss": loss, "lr": lr, "tok_per_s": tok_per_s,
                       "peak_mem_mb": peak_mem_mb(device), "elapsed_s": elapsed + time.time() - began})
                show()
                if not watched:
                    print(f"iter {i}/{s.max_iters}: loss {loss:.4f}, {tok_per_s:,.0f} tok/s", flush=True)
    except OSError as e:                                                # most likely a full disk
        raise UserError(f"iteration {i}: {explain(e)}" + (f"\n{out_dir / 'ckpt.pt'} is of iteration {saved}; "
                        f"to go on from there: {resume_command}" if saved is not None else "")) from None
    except Exception as e:
        if s.compile and type(e).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise UserError(f"--compile does not work here ({type(e).__name__}: {str(e).splitlines()[0]}); "
                            f"leave it out.") from None
        raise
    finally:
        bar.close()
        with contextlib.suppress(OSError):                              # the disk may be full
            log.close()
        held.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)

    minutes, seconds = divmod(round(elapsed + time.time() - began), 60)
    bpb = f" ({val_line['val_bpb']:.4f} bits a byte)" if val_line["val_bpb"] is not None else ""
    print(f"done: val loss {val_line['val_loss']:.4f} nats a token{bpb}, {minutes} min {seconds} s\n"
          f"Hear it: python sample.py --out_dir {shlex.quote(s.out_dir)}")


if __name__ == "__main__":
    run(main)
