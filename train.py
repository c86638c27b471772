"""Train a GPT with any depth router: the settings, a few functions, then the loop, to be read from top to bottom.

    python train.py --router wav --n_layer 48                       # prepares its corpus, trains, shows a bar
    python train.py configs/quick.toml --router delta_block         # defaults, then the file, then flags
    python train.py --init_from resume --out_dir out/wav-48x64-s0   # goes on from the last checkpoint
    python train.py --init_from out/wav-48x64-s0 --eval_only        # train, val and test loss of its last weights
    python train.py --init_from Qwen3-0.6B --router delta_block --route_gate 0 --dataset NAME   # converts Qwen3 weights
    torchrun --standalone --nproc_per_node=2 train.py --n_layer 48  # the same batch, shared by two processes

What is unusual:
- The batch of step i depends on (seed, i) and the data alone: not on the router, nor on how it is split into micro
  batches and over processes, nor on where a run was stopped. So runs are paired, and a resumed run is the run that
  never stopped. Dropout depends on (seed, i) and on the split.
- The evaluation windows are the same for every run on the same data with the same seq_len.
- ckpt.pt is whole or absent, and holds the last weights whose loss was finite; best.pt those of the lowest val loss.
- config.json and each checkpoint say what was run: settings, data, machine, code.
"""
import math
import shlex
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint as recomputed

from nanodepth import qwen3, several
from nanodepth.data import load_data
from nanodepth.files import (UserError, check_named, explain, load_checkpoint, own_router, router_name,
                             run as run_script)
from nanodepth.machine import (autocast, compile_error, compiled, keep_freed_memory, peak_mem_mb, pick_device,
                               pick_dtype, settle_kernels)
from nanodepth.runs import (Folder, Screen, Stop, carried, code_digests, data_facts, described, fingerprint, git_commit,
                            history, known_as, same_data, start_from, unfilled, weights_digest)
from nanodepth.settings import Parser, amount, nearest
from model import GPT, GPTConfig, ROUTERS


@dataclass
class TrainConfig:
    # The names are nanoGPT's. The comment beside a setting is its help text. The defaults are for a laptop.
    dataset: str = "pystdlib"            # a folder under data/, or the path of one
    out_dir: str | None = None           # where the run is written; none: out/ROUTER-LxD-sSEED
    init_from: str = "scratch"           # scratch, resume, or whose weights it takes: a run, or a Qwen3 folder
    eval_only: bool = False              # say the train, val and test loss, and write nothing
    seed: int = 0                        # of the first weights, the batches and the dropout
    # the model's other flags are GPTConfig's
    vocab_size: int | None = None        # tokens the model knows; none: what the data says
    tokenizer: str | None = None         # of shards made elsewhere whose names do not say it: byte or gpt2
    # the steps; each has batch_size * gradient_accumulation_steps windows, shared by the processes
    max_iters: int = 400                 # optimizer steps
    max_tokens: str | None = None        # instead of max_iters: tokens to train on, as 2.0B, 500M or 20k
    batch_size: int = 8                  # windows in a micro batch, at most
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
    eval_iters: int = 10                 # an evaluation is 16 times as many windows of train and of val
    log_interval: int = 10               # steps from one line of log.jsonl to the next
    # the machine
    device: str = "auto"                 # auto, cpu, cuda, cuda:N or mps
    dtype: str = "auto"                  # float32, bfloat16, float16 (loss scaled); auto: a card's (T4, V100: float16)
    compile: bool = False                # torch.compile the model: slow to start, then faster
    recompute: bool = False              # run each sublayer again in the backward pass: less memory, more time
    fsdp: bool = False                   # under torchrun: weights, gradients and AdamW's memory in shards

MODEL_FIELDS = [f.name for f in fields(GPTConfig)]
DEFAULTS = {f.name: f.default for f in (*fields(GPTConfig), *fields(TrainConfig))}
BACKBONE = ["vocab_size", "seq_len", "n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "mlp_hidden",
            "tie_embeddings", "rope_theta", "norm_eps"]                         # the router's reads are not in it
# A resumed run may be told other values of these; any other would make it another run.
RESUME_MAY_CHANGE = ["dataset", "out_dir", "init_from", "eval_only", "max_iters", "max_tokens", "batch_size",
                     "gradient_accumulation_steps", "learning_rate", "min_lr", "warmup_iters", "lr_decay_iters",
                     "router_lr", "grad_clip", "eval_interval", "eval_iters", "log_interval", "device", "dtype",
                     "compile", "recompute", "fsdp", "plain_read"]
CODE = [Path(__file__).with_name("model.py"), Path(__file__).with_name("nanodepth") / "fast.py"]
EVAL_BATCH = 16                                                                 # windows for each of eval_iters
REFUSED = {                                                                     # nanoGPT's flags that are not ours
    "block_size": "--block_size is --seq_len here: the context length is --seq_len, and block means a depth block "
                  "(--n_blocks).",
    "always_save_checkpoint": "--always_save_checkpoint: every evaluation saves ckpt.pt, the best one best.pt too.",
    "bias": "--bias: no layer has a bias here.",
    "backend": "--backend: nccl on cards and gloo on CPUs, by --device.",
    "decay_lr": "--decay_lr: for a constant rate give --min_lr the value of --learning_rate.",
    "start": "--start is sample.py's, and --prompt there.",
    **{f"wandb_{name}": f"--wandb_{name}: the figures are in log.jsonl, an object a line, in the run's folder."
       for name in ("log", "project", "run_name")}}

# ---------------------------------------------------------------------------------------------------------------------
# settings

def read_settings(argv) -> tuple[dict, dict | None]:
    """Every setting by name, and the checkpoint to start from: the defaults, then the file, then the flags."""
    parser = Parser(prog="train.py", usage="python train.py [CONFIG.toml] [--flag value | --flag=value ...]",
                    description="Train a GPT with any depth router.", refused=REFUSED)
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="a file of settings, as in configs/")
    parser.add_fields(TrainConfig)
    parser.add_fields(GPTConfig, skip=[f.name for f in fields(TrainConfig)])
    flags = vars(parser.parse_args(argv))
    config = flags.pop("config")
    given = (parser.read_toml(config) if config else {}) | flags
    if "max_iters" in flags and "max_tokens" not in flags:
        given["max_tokens"] = None                                      # a flag beats the file
    elif given.get("max_tokens") is not None and "max_iters" in (flags if "max_tokens" in flags else given):
        raise UserError("--max_iters and --max_tokens both say how long to train; leave one out.")
    check(given)
    if config:
        check_named(str(given.get("router")), flags.get("router"), config)
    s, checkpoint = DEFAULTS | given, None
    if s["init_from"] == "resume":
        out_dir = s["out_dir"] or default_out_dir(s)
        if not (Path(out_dir) / "ckpt.pt").exists():
            raise UserError(f"there is nothing to resume in {out_dir}: it holds no ckpt.pt. "
                            f"Name the run with --out_dir, or leave out --init_from resume to start one.")
        checkpoint = load_checkpoint(out_dir)
        s = resumed_settings(checkpoint, given, out_dir)
        check_named(s["router"], flags.get("router"), out_dir)
    elif s["init_from"] != "scratch":
        if not Path(s["init_from"]).exists():
            raise UserError(f"--init_from is {s['init_from']!r}; it must be scratch, resume, or the folder of a run or "
                            f"of Qwen3 weights." + nearest(s["init_from"], ["scratch", "resume"]))
        is_run = not qwen3.is_folder(s["init_from"])
        checkpoint = load_checkpoint(s["init_from"]) if is_run else qwen3.load(s["init_from"])
        theirs = checkpoint["model_config"]                             # of another router, only the backbone counts
        same_router = given.get("router", theirs["router"]) == theirs["router"]
        inherited = [k for k in (MODEL_FIELDS if same_router else BACKBONE) if k in theirs]
        s = DEFAULTS | {k: theirs[k] for k in inherited} | given
        check_named(s["router"], flags.get("router"), s["init_from"])
        checkpoint["digest"] = weights_digest(checkpoint["model"])
        if is_run:                                                      # the others have no router's weights
            checkpoint["model"] = carried(checkpoint["model"], theirs, s, given)
    s["out_dir"] = s["out_dir"] or default_out_dir(s)
    if checkpoint and s["init_from"] != "resume" and not s["eval_only"]:
        start = Path(s["init_from"]).resolve()
        if Path(s["out_dir"]).resolve() == (start if start.is_dir() else start.parent):
            raise UserError(f"--out_dir {s['out_dir']} holds the run that this one starts from; name another.")
    if s["max_tokens"] is not None:
        s["max_iters"] = math.ceil(amount(s["max_tokens"], "--max_tokens") / (windows_a_step(s) * s["seq_len"]))
    if checkpoint and s["init_from"] == "resume" and checkpoint["iter"] > s["max_iters"]:
        raise UserError(f"--max_iters {s['max_iters']}: the run in {s['out_dir']} is already at {checkpoint['iter']}.")
    s["router_sha256"] = own_router(s["router"], ROUTERS)
    if s["init_from"] == "resume" and s["router_sha256"] != checkpoint["settings"].get("router_sha256"):
        raise UserError(f"{s['router']} has changed since the run in {s['out_dir']} began, so this would be another "
                        f"run. Start one from its weights with --init_from {s['out_dir']} --out_dir ANOTHER.")
    return s, checkpoint

def default_out_dir(s: dict) -> str:
    return f"out/{router_name(s['router'])}-{s['n_layer']}x{s['n_embd']}-s{s['seed']}"

def windows_a_step(s: dict) -> int:
    return s["batch_size"] * s["gradient_accumulation_steps"]

def resumed_settings(checkpoint: dict, given: dict, out_dir: str) -> dict:
    """The settings of the run in out_dir with what may change and is given. UserError where it would be another run."""
    was = DEFAULTS | {k: v for k, v in checkpoint["settings"].items() if k in DEFAULTS}     # or its default
    became = checkpoint["model_config"]                                 # n_blocks none became 8, for one
    for name, value in given.items():
        if name not in RESUME_MAY_CHANGE and value not in (was[name], became.get(name, was[name])):
            raise UserError(f"--{name} {value}: the run in {out_dir} has {was[name]}, and a resumed run keeps it. "
                            f"Start another from its weights with --init_from {out_dir} --out_dir ANOTHER.")
    s = was | given | {"out_dir": out_dir}
    if windows_a_step(s) != windows_a_step(was):
        raise UserError(f"--batch_size {s['batch_size']} times --gradient_accumulation_steps "
                        f"{s['gradient_accumulation_steps']} is {windows_a_step(s)} windows a step: the run in "
                        f"{out_dir} has {windows_a_step(was)}, and a resumed run keeps it.")
    return s

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

def windows(tokens, starts, seq_len: int, vocab_size: int) -> torch.Tensor:
    """The windows of seq_len inputs and one more target that begin at `starts`: (n, seq_len + 1)."""
    batch = np.stack([tokens.window(int(start), seq_len + 1) for start in starts])         # (n, T + 1)
    if batch.max() >= vocab_size:
        raise UserError(f"the data holds token {batch.max()}; --vocab_size must be at least {batch.max() + 1}.")
    return torch.from_numpy(batch)

def train_starts(n_tokens: int, seq_len: int, n: int, seed: int, i: int) -> np.ndarray:
    """Where the n windows of step i begin: anywhere, by (seed, i) alone."""
    return np.random.default_rng((seed, i)).integers(n_tokens - seq_len, size=n)

def eval_starts(n_tokens: int, seq_len: int, n: int) -> np.ndarray:
    """Where n evaluation windows begin: evenly spaced, without overlap; fewer than asked for in a short split."""
    n = min(n, (n_tokens - 1) // seq_len)
    return np.linspace(0, n_tokens - seq_len - 1, n).astype(np.int64)


# ---------------------------------------------------------------------------------------------------------------------
# a run

@dataclass
class Run:
    """A run as it stands: what is trained, on what, where, and how far it has come."""
    s: TrainConfig
    config: GPTConfig
    record: dict                         # what config.json and every checkpoint say of it
    data: object                         # of nanodepth/data.py
    group: several.Group                 # the processes that share its batches
    device: str
    dtype: str
    model: GPT
    net: torch.nn.Module                 # the model as the processes train it together; alone, the model
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler         # of the loss, under float16
    folder: Folder
    splits: dict                         # the evaluation windows of val and train, (n, T + 1)
    i: int                               # steps done
    val: dict                            # the last evaluation
    best: dict                           # iteration and val loss of the best one
    began: float                         # when it would have begun if it had never stopped, in seconds

def set_up(settings: dict, checkpoint: dict | None, group: several.Group) -> Run:
    """The run that these settings and this checkpoint make; nothing is written yet, but the built-in corpus."""
    s = TrainConfig(**{f.name: settings[f.name] for f in fields(TrainConfig)})
    resumed = s.init_from == "resume"
    device = group.card(pick_device(s.device))
    dtype = pick_dtype(s.dtype, device)
    config = model_config(settings, s.vocab_size or 1)                  # refused before any data is made
    if windows_a_step(settings) % group.size:
        raise UserError(f"--batch_size times --gradient_accumulation_steps is {windows_a_step(settings)} windows a "
                        f"step, which {group.size} processes cannot share evenly.")
    if device == "cpu" and s.batch_size * config.seq_len * config.n_embd <= 2**16:
        torch.set_num_threads(1)        # too small a step to share: two threads gain a little on two free cores, and on
                                        # busy ones they wait for each other: several times as long a step
    # data
    if group.rank > 0:
        group.wait()                                                    # the first process may have to prepare it
    data = open_data(s.dataset, s.tokenizer)
    if group.rank == 0:
        group.wait()
    vocab_size = s.vocab_size or data.vocab_size
    if vocab_size is None:
        raise UserError(f"{s.dataset} does not say how many tokens its vocabulary has; give --vocab_size or "
                        f"--tokenizer.")
    if data.vocab_size is not None and vocab_size < data.vocab_size:
        raise UserError(f"--vocab_size is {vocab_size}; the vocabulary of {s.dataset} has {data.vocab_size} tokens.")
    data.check_window(config.seq_len)
    facts = data_facts(data)
    if resumed:
        same_data(facts, checkpoint["data"], s.dataset, s.out_dir)
    elif checkpoint and known_as(checkpoint["tokenizer"]) != facts["tokenizer"]:
        if checkpoint["tokenizer"] or not qwen3.is_folder(s.init_from):
            raise UserError(f"the tokenizer of {s.dataset} is not the one of {s.init_from}: its weights would read "
                            f"other symbols. Prepare the data with the same tokenizer (of a Qwen3 folder: --tokenizer "
                            f"FOLDER/tokenizer.json).")
        if group.rank == 0:
            print(f"note: {s.init_from} has no tokenizer.json, so whether its tokens are those of {s.dataset} is not "
                  f"known", file=sys.stderr)
    config = replace(config, vocab_size=vocab_size)
    splits = eval_windows(data, s, config)

    # model and optimizer
    keep_freed_memory()
    settle_kernels()
    torch.manual_seed(s.seed)
    model = GPT(config) if not checkpoint or resumed else unfilled(GPT, config)
    params, start = model.num_params(), None
    if checkpoint:
        start = checkpoint.get("fingerprint", {}).get("start") if resumed else checkpoint["digest"]
        start_from(model, checkpoint["model"], s.out_dir if resumed else s.init_from, whole=resumed)
    if s.recompute:
        for f in model.sublayers:                                       # kept of each is its input
            f.forward = partial(recomputed, f.forward, use_reentrant=False)
    net = several.spread(model if s.fsdp else model.to(device), group, device, s.fsdp)
    optimizer = torch.optim.AdamW(model.param_groups(s.weight_decay, s.learning_rate, s.router_lr), lr=s.learning_rate,
                                  betas=(s.beta1, s.beta2), fused=device != "mps")
    names = {p: name for name, p in model.named_parameters()}
    for params_of in optimizer.param_groups:
        params_of["param_names"] = [names[p] for p in params_of["params"]]
    scaler = torch.amp.GradScaler(device.split(":")[0], enabled=dtype == "float16")
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")                      # TF32
    i, val, best, elapsed = 0, {}, {}, 0.0
    if resumed:
        several.load_optimizer(optimizer, model, checkpoint["optimizer"])
        if scaler.is_enabled() and checkpoint.get("scaler"):
            scaler.load_state_dict(checkpoint["scaler"])
        i, val = checkpoint["iter"], checkpoint["val"]
        best = checkpoint.get("best", val if val.get("iter") == i else {})      # an older version kept no best one
        elapsed = checkpoint["elapsed_s"]

    at = device.split(":")[0] if group.size > 1 else device
    place = {"device": at, "dtype": dtype, "threads": torch.get_num_threads(), "processes": group.size,
             "torch": str(torch.__version__), "git": git_commit()}
    record = {"settings": settings, "model": asdict(config), "params": params, "data": facts,
              "tokens_per_step": windows_a_step(settings) * config.seq_len, **place,
              "history": history(checkpoint if resumed else None, i, place, settings)}
    code = code_digests(config.router, ROUTERS, CODE, settings["router_sha256"])
    record["fingerprint"] = fingerprint(record, start, code)
    return Run(s, config, record, data, group, device, dtype, model, net, optimizer, scaler, Folder(s.out_dir), splits,
               i, val, best, time.time() - elapsed)

def train_batch(run: Run, i: int) -> torch.Tensor:
    """This process's windows of step i, (n, T + 1), on its device."""
    s, data, size, T = run.s, run.data, run.group.size, run.config.seq_len
    starts = train_starts(len(data.train), T, s.batch_size * s.gradient_accumulation_steps, s.seed, i)
    batch = windows(data.train, np.split(starts, size)[run.group.rank], T, run.config.vocab_size)
    card = run.device.startswith("cuda")
    return batch.pin_memory().to(run.device, non_blocking=True) if card else batch.to(run.device)

def eval_windows(data, s: TrainConfig, config: GPTConfig) -> dict:
    """The evaluation windows of val, train and, for eval_only, test, (n, T + 1): of no split more than of val."""
    found, n = {}, s.eval_iters * EVAL_BATCH
    for split in ("val", "train", "test")[:3 if s.eval_only else 2]:
        tokens = getattr(data, split)
        if tokens is not None and len(tokens) > config.seq_len:
            starts = eval_starts(len(tokens), config.seq_len, n)
            found[split] = windows(tokens, starts, config.seq_len, config.vocab_size)
            n = min(n, len(starts))
    return found

@torch.no_grad()
def evaluate(model, windows: torch.Tensor, batch_size: int, device: str, dtype: str, group=several.Group()) -> float:
    """Mean loss over the evaluation windows, in nats a token; the processes share them."""
    training, total = model.training, 0.0
    model.eval()
    for batch in windows.split(batch_size * group.size):                # as many turns for each process, as fsdp wants
        own = batch[group.rank::group.size]                             # (b, T + 1), in the last turn perhaps none
        counted, own = len(own), (own if len(own) else batch[:1]).to(device)
        with autocast(device, dtype):
            _, loss = model(own[:, :-1], own[:, 1:])
        total += loss.item() * counted
    model.train(training)
    return group.sum(total)[0] / len(windows)

def bits_per_byte(run: Run, split: str, loss: float) -> float | None:
    bytes_per_token = run.data.bytes_per_token(split)
    return loss / math.log(2) / bytes_per_token if bytes_per_token else None

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

def save(run: Run) -> None:
    """ckpt.pt, and best.pt if this is the best. UserError, and the earlier ones stay, when it is not finite."""
    model = several.whole(run.model.state_dict(), keep=run.group.rank == 0)
    optimizer = several.optimizer_state(run.optimizer, keep=run.group.rank == 0)
    memory = [v for state in optimizer["state"].values() for v in state.values()]
    if not all(v.isfinite().all() for v in (*model.values(), *memory) if v is not None):
        raise not_finite(run, "a weight")
    run.folder.save({**run.record, "model": model, "model_config": run.record["model"], "optimizer": optimizer,
                     "scaler": run.scaler.state_dict(), "tokenizer": described(run.data), "iter": run.i,
                     "tokens": run.i * run.record["tokens_per_step"], "val": run.val, "best": run.best,
                     "elapsed_s": time.time() - run.began})
    run.group.wait()

def not_finite(run: Run, what: str) -> UserError:
    return UserError(f"{what} at iteration {run.i} is not finite, so the run stops; {run.folder.kept()}.\n"
                     f"Try a lower --learning_rate, a longer --warmup_iters or another --seed.")

def folder_flags(run: Run) -> str:
    """The flags by which train.py and sample.py find a run."""
    own = f" --router {shlex.quote(run.config.router)}" if run.record["settings"]["router_sha256"] else ""
    return f"--out_dir {shlex.quote(run.s.out_dir)}{own}"

def how_to_resume(run: Run) -> str:
    return f"python train.py --init_from resume {folder_flags(run)}"

# ---------------------------------------------------------------------------------------------------------------------
# the loop

def train(run: Run, stop: Stop, screen: Screen) -> None:
    """Evaluate and save, take a step, tell of it, until max_iters, or until it is asked to stop."""
    s, group, device, dtype = run.s, run.group, run.device, run.dtype
    tokens_per_step = run.record["tokens_per_step"]
    net = compiled(run.net) if s.compile else run.net                   # the same weights; evaluated without it
    batch, stopping = train_batch(run, run.i), False
    trained_s, trained_tokens, loss, tok_per_s = 0.0, 0, math.nan, math.nan
    run.model.train()
    while True:
        # evaluate, and keep what there is
        if (run.i % s.eval_interval == 0 or run.i == s.max_iters) and run.val.get("iter") != run.i:
            losses = {split: evaluate(run.model, windows, s.batch_size, device, dtype, group)
                      for split, windows in run.splits.items()}
            for split, value in losses.items():
                if not math.isfinite(value):
                    raise not_finite(run, f"the {split} loss")
            run.val = {"iter": run.i, "tokens": run.i * tokens_per_step, "val_loss": losses["val"],
                       "val_bpb": bits_per_byte(run, "val", losses["val"]), "train_loss": losses["train"]}
            if losses["val"] < run.best.get("val_loss", math.inf):
                run.best = {"iter": run.i, "val_loss": losses["val"]}
            run.folder.write(run.val)
            save(run)
            screen.show(loss, run.val["val_loss"], tok_per_s)
            screen.tell(f"iter {run.i}/{s.max_iters}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if run.i >= s.max_iters:
            return
        if stopping:
            if run.folder.saved != run.i:
                few = run.splits["val"][:EVAL_BATCH]                    # finite weights may have no finite loss
                if not math.isfinite(evaluate(run.model, few, s.batch_size, device, dtype, group)):
                    raise not_finite(run, "the val loss")
                save(run)
            raise KeyboardInterrupt(f"stopped at iteration {run.i} of {s.max_iters}, and saved. To go on:\n"
                                    f"    {how_to_resume(run)}")

        # one step
        t0 = time.time()
        lr = lr_at(run.i, s)
        for params in run.optimizer.param_groups:
            params["lr"] = lr * params["lr_scale"]
        noise = np.random.SeedSequence((s.seed, run.i, 1 + group.rank)).generate_state(1)
        torch.manual_seed(int(noise[0]))                                # for dropout
        loss, micros = 0.0, batch.split(s.batch_size)                   # (batch_size, T + 1) each
        for k, micro in enumerate(micros):
            with several.summing(run.net, now=k == len(micros) - 1):
                with autocast(device, dtype):
                    _, micro_loss = net(micro[:, :-1], micro[:, 1:])
                    micro_loss = micro_loss * (len(micro) / len(batch))
                run.scaler.scale(micro_loss).backward()
            loss = loss + micro_loss.detach()
        batch = train_batch(run, run.i + 1)                             # while a card is still at work
        run.scaler.unscale_(run.optimizer)
        norm = several.whole(torch.nn.utils.clip_grad_norm_(run.model.parameters(), s.grad_clip or math.inf))
        loss, norm = torch.stack([loss, norm.to(loss.device)]).tolist()
        loss, asked = group.sum(loss / group.size, stop.asked)
        stopping = asked > 0                                            # in all processes after the same step
        skipped = run.scaler.is_enabled() and not math.isfinite(norm) and run.scaler.get_scale() > 1
        if not math.isfinite(loss) or not math.isfinite(norm) and not skipped:
            raise not_finite(run, "the gradient" if math.isfinite(loss) else "the loss")
        run.scaler.step(run.optimizer)                                  # no step where float16 has overflowed
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
        run.i += 1

        # tell
        trained_s, trained_tokens = trained_s + time.time() - t0, trained_tokens + tokens_per_step
        screen.bar.update()
        if run.i % s.log_interval == 0 or run.i == s.max_iters:
            tok_per_s = trained_tokens / trained_s
            trained_s, trained_tokens = 0.0, 0
            run.folder.write({"iter": run.i, "tokens": run.i * tokens_per_step, "loss": loss, "lr": lr,
                              "tok_per_s": tok_per_s, "peak_mem_mb": peak_mem_mb(device),
                              "elapsed_s": time.time() - run.began})
            screen.show(loss, run.val["val_loss"], tok_per_s)
            screen.tell(f"iter {run.i}/{s.max_iters}: loss {loss:.4f}, {tok_per_s:,.0f} tok/s")

def say_losses(run: Run, screen: Screen) -> None:
    """--eval_only: the loss of each split there is."""
    for split, windows in run.splits.items():
        loss = evaluate(run.model, windows, run.s.batch_size, run.device, run.dtype, run.group)
        bpb = bits_per_byte(run, split, loss)
        screen.say(f"{split} loss {loss:.4f} nats a token" + (f" ({bpb:.4f} bits a byte)" if bpb else "")
                   + f", {len(windows)} windows of {run.config.seq_len}")

def main(argv) -> None:
    with several.processes() as group:
        settings, checkpoint = read_settings(argv)
        run = set_up(settings, checkpoint, group)
        del checkpoint                                                  # its weights are in the model now
        with Stop() as stop, Screen(run.s.max_iters, run.i, stop, silent=group.rank > 0) as screen:
            if run.s.eval_only:
                say_losses(run, screen)
            else:
                whole_run(run, stop, screen)

def whole_run(run: Run, stop: Stop, screen: Screen) -> None:
    """The loop in its folder, with a sentence for what ends it before its time."""
    s, config, folder, resumed = run.s, run.config, run.folder, run.s.init_from == "resume"
    folder.saved = run.i if resumed else None
    if run.group.rank == 0:
        folder.claim(run.i if resumed else None, run.record)
        if resumed:
            folder.keep_best(run.best, run.i)
    screen.say(f"{config.router} {config.n_layer}x{config.n_embd}, {run.record['params']:,} parameters, "
               f"{run.record['tokens_per_step']:,} tokens a step, {run.device} {run.dtype}, {s.out_dir}"
               + (f", {run.group.size} processes" if run.group.size > 1 else "")
               + (f", from iteration {run.i}" if resumed else ""))
    try:
        train(run, stop, screen)
    except KeyboardInterrupt as e:
        raise e if e.args else KeyboardInterrupt(f"stopped without saving; {folder.kept()}")
    except OSError as e:                                                # most likely a full disk
        raise UserError(f"iteration {run.i}: {explain(e)}\n{folder.kept()}" + (
            f"; to go on from there: {how_to_resume(run)}" if folder.saved is not None else "")) from None
    except Exception as e:
        if s.compile and (sentence := compile_error(e)):
            raise UserError(f"--compile does not work here: {sentence}; leave it out.") from None
        raise
    finally:
        folder.close()
    minutes, seconds = divmod(round(time.time() - run.began), 60)
    bpb = f" ({run.val['val_bpb']:.4f} bits a byte)" if run.val["val_bpb"] is not None else ""
    screen.say(f"done: val loss {run.val['val_loss']:.4f} nats a token{bpb}, {minutes} min {seconds} s\n"
               f"Hear it: python sample.py {folder_flags(run)}")


if __name__ == "__main__":
    run_script(main)
