"""
Speed and memory of each router, as ratios to a plain residual.

    python -m lab.bench --routers block,rd,wav --n_layer 48 --n_embd 256 --seq_len 256 --batch_size 8

Each router runs in a process of its own, beside one with the baseline; the two take turns, a few steps each, so that what
else the machine does meets both. A step is a whole training step: forward, backward, AdamW. Absolute figures belong to the
machine they were measured on; ratios travel better. On a CPU, memory is the peak resident set of the process, torch's own
libraries (about 250 MiB) included; on a card, the peak of torch's allocator.
"""
import json
import math
import multiprocessing
import platform
import signal
import statistics
import sys
import time
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
    rounds: int = 5                     # turns that each of the two takes
    steps: int = 1                      # training steps in a turn
    batch_size: int = 8                 # sequences in a step
    device: str = "auto"                # auto, cpu, cuda or mps
    dtype: str = "auto"                 # auto, float32 or bfloat16
    compile: bool = False               # torch.compile the model
    threads: int = 0                    # CPU threads of torch; 0: its own choice
    json: str | None = None             # write everything measured to this file

def worker(pipe, bench: BenchConfig, config: GPTConfig):
    """Answers each request with the seconds a turn took; 'memory' with the peak in MiB and the number of parameters."""
    try:
        if bench.threads:
            torch.set_num_threads(bench.threads)
        keep_freed_memory()
        settle_kernels()
        own_router(config.router, ROUTERS)                      # this is another process
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        model = GPT(config).to(bench.device)
        data = torch.Generator().manual_seed(0)
        turn = training(model, bench, data)
        turn()                                                  # warm-up: compilation, allocations, optimizer state
        pipe.send("ready")
        while (request := pipe.recv()) != "end":
            if request == "memory":
                pipe.send((peak_mem_mb(bench.device) or math.nan, model.num_params()))
            else:
                start = time.perf_counter()
                turn()
                pipe.send(time.perf_counter() - start)
    except (RuntimeError, MemoryError) as e:                    # out of memory, no compiler: the other routers go on
        pipe.send(f"{type(e).__name__}: {str(e).strip().splitlines()[0][:200]}")
    except (EOFError, ConnectionError):                         # the process that asked is gone
        pass

def training(model, bench, data):
    """A function that trains for `steps` steps on random tokens."""
    config = model.config
    optimizer = torch.optim.AdamW(model.param_groups(0.1, 1e-4), betas=(0.9, 0.95), fused=bench.device != "mps")
    tokens = torch.randint(config.vocab_size, (bench.batch_size, config.seq_len + 1), generator=data).to(bench.device)
    step_model = torch.compile(model) if bench.compile else model

    def turn():
        for _ in range(bench.steps):
            with autocast(bench.device, bench.dtype):
                _, loss = step_model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()                                             # waits for a card
    return turn

def pair(bench: BenchConfig, configs, bar):
    """Measure two models in turns: for each, the seconds of its turns, its peak memory and its parameters."""
    spawn = multiprocessing.get_context("spawn")
    workers = []
    for config in configs:
        here, there = spawn.Pipe()
        workers.append((spawn.Process(target=worker, args=(there, bench, config), daemon=True), here))

    def ask(process, pipe, request):
        if request:
            pipe.send(request)
        while not pipe.poll(0.2):
            if not process.is_alive() and not pipe.poll():
                return "the process was killed (out of memory?)"
        return pipe.recv()

    try:
        for process, pipe in workers:
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)      # which a child inherits: Ctrl-C is for this process
            process.start()
            signal.signal(signal.SIGINT, handler)
            if (answer := ask(process, pipe, None)) != "ready":
                return answer
        seconds = [[], []]
        for i in range(bench.rounds):
            for which in (0, 1) if i % 2 == 0 else (1, 0):      # neither is always the first of the two
                answer = ask(*workers[which], "turn")
                if isinstance(answer, str):
                    return answer
                seconds[which].append(answer)
            bar.update()
        return [(s, *ask(*w, "memory")) for s, w in zip(seconds, workers)]
    finally:
        for process, pipe in workers:
            if process.is_alive():
                pipe.send("end")                                # the processes of its compiler end with it
                process.join(1)
                process.kill()
                process.join()

def spread(values, form):
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
    for name in ("rounds", "steps", "batch_size"):
        if getattr(bench, name) < 1:
            raise UserError(f"--{name} is {getattr(bench, name)}; it must be at least 1.")
    if bench.json and not Path(bench.json).resolve().parent.is_dir():
        raise UserError(f"--json {bench.json}: there is no such folder.")
    bench.device = pick_device(bench.device)
    bench.dtype = pick_dtype(bench.dtype, bench.device)

    machine = f"{cpu_name()}, {bench.threads or torch.get_num_threads()} threads"
    if bench.device.startswith("cuda"):
        machine = torch.cuda.get_device_name(bench.device)
    print(f"{machine}; torch {torch.__version__}; {bench.dtype}{', compiled' if bench.compile else ''}\n"
          f"{base.n_layer} layers, width {base.n_embd}, {base.n_head} heads, {base.n_blocks} blocks; "
          f"{bench.batch_size} x {base.seq_len} tokens a step\n\n"
          f"| router | tokens/s | ratio to {bench.baseline} | peak MiB | ratio | routing, % of the step |\n"
          f"|---|---|---|---|---|---|")
    results, tokens = {}, bench.batch_size * base.seq_len * bench.steps
    with tqdm(total=bench.rounds * len(routers), disable=None, unit="round", leave=False) as bar:
        for name, config in zip(routers, configs):
            bar.set_description(name)
            answer = pair(bench, (base, config), bar)
            if isinstance(answer, str):
                tqdm.write(f"| {name} | failed: {answer} | | | | |")
                results[name] = {"error": answer}
                continue
            (base_s, base_mem, base_params), (s, mem, params) = answer
            ratios = [b / a for a, b in zip(s, base_s)]
            ratio = statistics.median(ratios)
            tqdm.write(f"| {name} | {spread([tokens / x for x in s], '.0f')} | {spread(ratios, '.3f')} | {mem:.0f} | "
                       f"{mem / base_mem:.3f} | {100 * (1 - ratio):.1f} |")
            results[name] = {"tokens_a_turn": tokens, "seconds": s, "baseline_seconds": base_s, "ratio": ratio,
                             "peak_mem_mb": mem, "baseline_peak_mem_mb": base_mem, "memory_ratio": mem / base_mem,
                             "params": params, "baseline_params": base_params}
    if bench.json:
        with atomic_write(bench.json) as f:
            json.dump({"machine": machine, "torch": torch.__version__, "bench": vars(bench), "model": vars(base),
                       "results": results}, f, indent=1)
            f.write("\n")

def cpu_name():
    """The processor's name, as the system tells it."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

if __name__ == "__main__":
    run(main)
