"""
Speed and memory of each router, as ratios to a plain residual.

    python -m lab.bench --routers block,rd,wav --n_layer 48 --n_embd 256 --seq_len 256 --batch_size 8

Each router runs in a process of its own, beside one with the baseline; the two take turns, a step each, so that what
else the machine does meets both. A step is a whole training step: forward, backward, AdamW. Absolute figures belong to
the machine they were measured on; ratios travel better. On a CPU, memory is the peak resident set of the process,
torch's own libraries (about 250 MiB) included; on a card, the peak of torch's allocator.
"""
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import statistics
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from nanodepth.files import UserError, atomic_write, own_router, run
from nanodepth.machine import autocast, keep_freed_memory, peak_mem_mb, pick_device, pick_dtype, settle_kernels
from nanodepth.settings import Parser
from model import GPT, ROUTERS, GPTConfig

@dataclass
class BenchConfig:
    routers: str = "block,rd,delta_block,wav,attnres,delta"  # routers to measure, with commas
    baseline: str = "residual"          # the router that the ratios are to
    rounds: int = 5                     # steps that each of the two takes
    batch_size: int = 8                 # sequences in a step
    device: str = "auto"                # auto, cpu, cuda or mps
    dtype: str = "auto"                 # auto, float32 or bfloat16
    compile: bool = False               # torch.compile the model
    json: str | None = None             # write everything measured to this file

# ---------------------------------------------------------------------------------------------------------------------
# in a process of its own: one model

def training(bench: BenchConfig, config: GPTConfig):
    """A model, and a function that takes a training step of it on random tokens and returns its loss."""
    torch.manual_seed(0)
    model = GPT(config).to(bench.device)
    optimizer = torch.optim.AdamW(model.param_groups(0.1, 1e-4), betas=(0.9, 0.95), fused=bench.device != "mps")
    tokens = torch.randint(config.vocab_size, (bench.batch_size, config.seq_len + 1)).to(bench.device)
    step_model = torch.compile(model) if bench.compile else model

    def step() -> float:
        with autocast(bench.device, bench.dtype):
            _, loss = step_model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()                                      # waits for a card
    return model, step

def begin(bench: BenchConfig, config: GPTConfig) -> int:
    """Make this process's model, and take its first step: compilation, allocations, optimizer state. Returns the number
    of parameters."""
    global device, step
    threading.Thread(target=end_with_the_parent, daemon=True).start()
    keep_freed_memory()
    settle_kernels()
    torch.set_float32_matmul_precision("high")
    own_router(config.router, ROUTERS)                          # this is another process
    try:
        device, (model, step) = bench.device, training(bench, config)
        step()
        return model.num_params()
    except RuntimeError as e:                                   # a compiler's errors do not travel between processes
        raise RuntimeError(f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200]}") from None

def end_with_the_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)

def turn() -> tuple[float, float]:
    """The seconds of one step, and the process's peak memory in MiB."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start, peak_mem_mb(device) or math.nan

# ---------------------------------------------------------------------------------------------------------------------

def pair(bench: BenchConfig, configs: list[GPTConfig], bar) -> dict:
    """Measure two models, the baseline and another, in turns. RuntimeError where one of them cannot run."""
    spawn = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(1, mp_context=spawn) for _ in configs]
    try:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a child inherits: Ctrl-C is for this process
        begun = [pool.submit(begin, bench, config) for pool, config in zip(pools, configs)]
        signal.signal(signal.SIGINT, handler)
        base_params, params = (one.result() for one in begun)
        turns = [], []
        for i in range(bench.rounds):
            for which in (0, 1) if i % 2 == 0 else (1, 0):      # neither is always the first of the two
                turns[which].append(pools[which].submit(turn).result())
            bar.update()
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)
    (base_seconds, base_mem), (seconds, mem) = ([*zip(*taken)] for taken in turns)
    return {"baseline_seconds": base_seconds, "seconds": seconds, "peak_mem_mb": mem[-1],
            "baseline_peak_mem_mb": base_mem[-1], "params": params, "baseline_params": base_params,
            "ratio": statistics.median(a / b for a, b in zip(base_seconds, seconds)),
            "memory_ratio": mem[-1] / base_mem[-1]}

def spread(values: list[float], form: str) -> str:
    """Median, and in brackets the least and the most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"

def main(argv):
    parser = Parser(description=__doc__.split("\n\n")[0].strip())
    parser.add_fields(BenchConfig)
    parser.add_fields(GPTConfig, skip=("router",))
    args = vars(parser.parse_args(argv))
    bench = BenchConfig(**{k: args.pop(k) for k in BenchConfig.__dataclass_fields__ if k in args})
    routers = [name for name in bench.routers.split(",") if name]
    for name in (*routers, bench.baseline):
        own_router(name, ROUTERS)
    try:
        base, *configs = [GPTConfig(**args | {"router": name}) for name in (bench.baseline, *routers)]
    except ValueError as e:
        raise UserError(str(e)) from None
    for name in ("rounds", "batch_size"):
        if getattr(bench, name) < 1:
            raise UserError(f"--{name} is {getattr(bench, name)}; it must be at least 1.")
    if bench.json and not Path(bench.json).resolve().parent.is_dir():
        raise UserError(f"--json {bench.json}: there is no such folder.")
    bench.device = pick_device(bench.device)
    bench.dtype = pick_dtype(bench.dtype, bench.device)

    card = bench.device.startswith("cuda")
    machine = torch.cuda.get_device_name(bench.device) if card else f"{cpu_name()}, {torch.get_num_threads()} threads"
    print(f"{machine}; torch {torch.__version__}; {bench.dtype}{', compiled' if bench.compile else ''}\n"
          f"{base.n_layer} layers, width {base.n_embd}, {base.n_head} heads, {base.n_blocks} blocks; "
          f"{bench.batch_size} x {base.seq_len} tokens a step\n\n"
          f"| router | tokens/s | ratio to {bench.baseline} | peak MiB | ratio | routing, % of the step |\n"
          f"|---|---|---|---|---|---|", flush=True)
    results, tokens = {}, bench.batch_size * base.seq_len
    with tqdm(total=bench.rounds * len(routers), disable=None, unit="round", leave=False) as bar:
        for name, config in zip(routers, configs):
            bar.set_description(name)
            try:
                r = results[name] = pair(bench, [base, config], bar)
            except RuntimeError as e:                           # out of memory, no compiler: the other routers go on
                tqdm.write(f"| {name} | failed: {e} | | | | |")
                results[name] = {"error": str(e)}
                continue
            speeds = [tokens / s for s in r["seconds"]]
            ratios = [a / b for a, b in zip(r["baseline_seconds"], r["seconds"])]
            tqdm.write(f"| {name} | {spread(speeds, '.0f')} | {spread(ratios, '.3f')} | {r['peak_mem_mb']:.0f} | "
                       f"{r['memory_ratio']:.3f} | {100 * (1 - r['ratio']):.1f} |")
    if bench.json:
        with atomic_write(bench.json) as f:
            json.dump({"machine": machine, "torch": torch.__version__, "bench": vars(bench), "model": vars(base),
                       "results": results}, f, indent=1)
            f.write("\n")

def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    told = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", told.read_text(encoding="utf-8")) if told.exists() else None
    return name[1] if name else platform.processor() or platform.machine()

if __name__ == "__main__":
    run(main)
