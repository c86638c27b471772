"""Depth x router x seed: train every cell, then one table, paired differences and pictures.

    python -m lab.sweep --routers residual,block,rd,delta_block,wav --depths 12,24,48 --seeds 0,1,2 --max_iters 1000
    python -m lab.sweep configs/sweep_rd_gpu.toml --jobs 2      # a file of settings, then flags; any flag of train.py goes
    python -m lab.sweep --init_from 'out/residual-12x64-s{seed}' --depths 12 --routers residual,delta:route_gate=0 --baseline residual
    python -m lab.sweep --report out/sweep                      # tables and pictures again, from what is there

A cell is a router, or a router with settings of its own after colons: `rd:rd_control=tied`, `wav:details=split`,
`delta:null_source=true:router_lr=0.1`. A router from a file, `mine.py:Mine`, is called by its class. Each cell, depth and
seed is one run of train.py in OUT_DIR/CELL-LxD-sSEED (a colon is a + there). A finished run is skipped and an interrupted one goes on, so the same command can be given again at
any time; one more seed or depth only adds to what is there. Seeds are the outer loop: after one the table is whole.
In --init_from, {seed} and {n_layer} are each cell's own; the table of iteration 0 then says what a conversion costs.

Each run is a process of its own: its peak memory is its own, a run that the system kills takes no other with it, and it
is the command one would type by hand.
"""
import csv
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

import train
from nanodepth.files import UserError, atomic_write, check_named, router_name, run
from nanodepth.runs import iter_of
from nanodepth.settings import Parser
from model import ROUTERS, GPTConfig


@dataclass
class SweepConfig:
    routers: str = "residual,block,rd,delta_block,wav"  # cells, with commas: ROUTER, or ROUTER:setting=value:...
    depths: str = "12,24,48"             # layers, with commas
    seeds: str = "0,1,2"                 # seeds, with commas; two cells with the same seed are a pair
    baseline: str = "block"              # the cell that the others are compared with, seed by seed
    at_tokens: str | None = None         # compare also after so many tokens: 0.5M,2M, or all evaluations
    jobs: int = 1                        # runs at a time
    out_dir: str = "out/sweep"           # where the runs, tables and pictures are written
    report: str | None = None            # a folder of runs: train nothing, make its tables and pictures again

SET_BY_THE_SWEEP = {"router": "routers", "n_layer": "depths", "seed": "seeds"}
# Two runs of one sweep may differ in these; any other difference makes them no pair.
MAY_DIFFER = ["router", "n_layer", "seed", "out_dir", "init_from", "device", "compile", "recompute", "fsdp", "plain_read",
              "log_interval"]
COLUMNS = ["router", "depth", "seed", "params", "tokens", "val_loss", "val_bpb", "tok_per_s", "peak_mem_mb",
           "elapsed_s", "run"]
NEAR = 0.05                              # a milestone is the evaluation nearest to it, at most this share of it away

# ---------------------------------------------------------------------------------------------------------------------
# the cells

@dataclass
class Cell:
    label: str                           # "block", "rd:rd_control=tied"
    depth: int
    seed: int
    flags: list[str]                     # of train.py, without --out_dir and --init_from
    settings: dict                       # every setting of train.py, with the defaults
    folder: Path
    start: str                           # its --init_from
    weights: str | None                  # the digest of the weights there

    @property
    def work(self) -> int:
        """What the bar counts: steps times layers."""
        return self.settings["max_iters"] * self.depth

def integers(text: str, name: str) -> list[int]:
    """'12,24' -> [12, 24]"""
    try:
        numbers = [int(x) for x in text.split(",") if x.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise UserError(f"--{name} is {text!r}; it must be whole numbers with commas, as in --{name} 1,2,3.")
    return list(dict.fromkeys(numbers))

def milestones(text: str | None) -> list[float] | str:
    """'0.5M,2M' -> [5e5, 2e6]; 'all' stays."""
    if text in (None, "", "all"):
        return text or []
    unit = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
    found = [re.fullmatch(r"([\d.]+(?:e\d+)?)([kmbg]?)", x.strip().lower()) for x in text.split(",")]
    try:
        return [float(m[1]) * unit[m[2]] for m in found]
    except (TypeError, ValueError):
        raise UserError(f"--at_tokens is {text!r}; it must be numbers of tokens, as in 0.5M,2M, or all.") from None

def parts_of(cell: str) -> tuple[str, list[str]]:
    """'rd:rd_control=tied' -> ('rd', ['rd_control=tied']); the router may be FILE.py:Class."""
    router, own = re.fullmatch(r"(.+?\.py:\w+|[^:]*)(.*)", cell).groups()
    return router, [x for x in own.split(":") if x]

def label_of(cell: str) -> str:
    """A cell's name in tables and folders."""
    router, own = parts_of(cell)
    return ":".join([router_name(router), *own])

def flag(name: str, value) -> str:
    return f"--{name}={str(value).lower() if value is None or isinstance(value, bool) else value}"

def plan(sweep: SweepConfig, given: dict) -> list[Cell]:
    """Every cell, checked as train.py itself would. given: settings of train.py that hold for all of them."""
    labels = list(dict.fromkeys(x.strip() for x in sweep.routers.split(",") if x.strip()))
    if not labels:
        raise UserError(f"--routers is {sweep.routers!r}; choose of {' '.join(ROUTERS)}.")
    cells, routers = [], {}
    for seed in integers(sweep.seeds, "seeds"):
        for depth in integers(sweep.depths, "depths"):
            for cell in labels:
                (router, own), label = parts_of(cell), label_of(cell)
                if routers.setdefault(router_name(router), router) != router:
                    raise UserError(f"{routers[router_name(router)]} and {router} have one name in the tables; rename a class.")
                if bare := [x for x in own if "=" not in x]:
                    raise UserError(f"{label}: {bare[0]} is no setting; one looks like rd:rd_control=tied.")
                own = dict(x.split("=", 1) for x in own)
                if wrong := own.keys() & {*SET_BY_THE_SWEEP, "out_dir", "init_from"}:
                    raise UserError(f"{label}: {min(wrong)} cannot be a setting of one cell.")
                chosen = given | own | {"router": router, "n_layer": depth, "seed": seed}
                flags = [flag(name, value) for name, value in chosen.items() if name != "init_from"]
                start = given.get("init_from", "scratch").replace("{seed}", str(seed)).replace("{n_layer}", str(depth))
                try:
                    settings, checkpoint = train.read_settings([*flags, flag("init_from", start)])
                    train.model_config(settings, 1)
                    if checkpoint and (layers := checkpoint["model_config"]["n_layer"]) != depth:
                        raise UserError(f"{start} has {layers} layers.")
                except UserError as e:
                    raise UserError(f"the cell {label} at {depth} layers: {e}") from None
                name = re.sub(r"[^\w.=+-]", "_", label.replace(":", "+"))
                folder = Path(sweep.out_dir) / f"{name}-{depth}x{settings['n_embd']}-s{seed}"
                weights = checkpoint["digest"] if checkpoint else None
                cells.append(Cell(label, depth, seed, flags, settings, folder, start, weights))
    return cells

# ---------------------------------------------------------------------------------------------------------------------
# what a run has written

@dataclass
class Run:
    label: str
    depth: int
    seed: int
    config: dict                         # config.json
    evals: list[dict]                    # evaluation lines of log.jsonl
    steps: list[dict]                    # training lines
    folder: Path

    @property
    def done(self) -> bool:
        return bool(self.evals) and self.evals[-1]["iter"] >= self.config["settings"]["max_iters"]

    def row(self) -> dict:
        """Its line of results.csv. tok_per_s is the median of the log's lines, peak_mem_mb their largest, in MiB."""
        last = self.evals[-1]
        median = statistics.median(x["tok_per_s"] for x in self.steps) if self.steps else None
        return dict(zip(COLUMNS, (
            self.label, self.depth, self.seed, self.config["params"], last["tokens"], last["val_loss"], last["val_bpb"],
            median, max((x["peak_mem_mb"] or 0 for x in self.steps), default=0) or None,
            self.steps[-1]["elapsed_s"] if self.steps else None, self.folder.name)))

def read_run(folder: Path) -> Run | None:
    """A run's settings and log; None where none has begun. A last line that a kill has cut short does not count."""
    name = re.fullmatch(r"(.+)-\d+x\d+-s\d+", folder.name)
    if not name or not (folder / "config.json").exists():
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = config["settings"]
        depth, seed, _ = settings["n_layer"], settings["seed"], (settings["max_iters"], config["params"])
        with open(folder / "log.jsonl", "rb") as f:
            lines = [json.loads(line) for line in f if iter_of(line) < math.inf]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} is damaged: its config.json or log.jsonl cannot be read. "
                        f"Delete it and run it again.") from None
    return Run(name[1].replace("+", ":"), depth, seed, config, [x for x in lines if "val_loss" in x],
               [x for x in lines if "loss" in x], folder)

def unlike(cell: Cell, config: dict) -> str | None:
    """The first setting in which a run that is there differs from its cell."""
    was = config["settings"]
    return next((name for name, value in cell.settings.items()
                 if name not in MAY_DIFFER and was.get(name, value) != value), None)

# ---------------------------------------------------------------------------------------------------------------------
# running

def command(cell: Cell) -> list[str]:
    """How to run or resume a cell: a command that could be typed."""
    start = "resume" if (cell.folder / "ckpt.pt").exists() else cell.start
    script = str(Path(train.__file__))
    return [sys.executable, script, *cell.flags, flag("init_from", start), flag("out_dir", cell.folder)]

def steps_done(folder: Path) -> int:
    """The iteration that the log of a run has come to."""
    try:
        with open(folder / "log.jsonl", "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 2000))
            reached = [i for line in f if (i := iter_of(line)) < math.inf]
        return reached[-1] if reached else 0
    except OSError:
        return 0

def sentence(returncode: int, stderr: str) -> str:
    """Why a run failed, in one line."""
    if returncode < 0:
        return f"killed by signal {-returncode}" + (" (out of memory?)" if returncode == -signal.SIGKILL else "")
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [i for i, line in enumerate(lines) if line.startswith("train.py: ")]
    if said:
        return " ".join(lines[said[-1]:]).removeprefix("train.py: ")
    return lines[-1][:400] if lines else f"exit code {returncode}"

def progress(cells: list[Cell]) -> int:
    """Steps times layers that are behind us."""
    return sum(min(steps_done(cell.folder), cell.settings["max_iters"]) * cell.depth for cell in cells)

def todo(cells: list[Cell]) -> list[Cell]:
    """The cells that are not done. UserError when a run that is there is not the one that was asked for."""
    left = []
    for cell in cells:
        there = read_run(cell.folder)
        name = unlike(cell, there.config) if there else None
        if name == "router_sha256":
            raise UserError(f"{cell.folder} was trained with {cell.settings['router']} as it was before a change. "
                            f"Give another --out_dir, or delete the folder.")
        if name:
            raise UserError(f"{cell.folder} was trained with {flag(name, there.config['settings'].get(name))}, not "
                            f"{cell.settings[name]}. Give that flag, or another --out_dir.")
        if there and there.config.get("fingerprint", {}).get("start") != cell.weights:
            raise UserError(f"{cell.folder} did not start from the weights of --init_from {cell.start} as they are now. "
                            f"Give another --out_dir.")
        if not (there and there.done):
            left.append(cell)
    return left

def run_cells(cells: list[Cell], jobs: int) -> dict[str, str]:
    """Run what is not done yet, `jobs` at a time. Returns the sentence of each failed run, by its folder's name."""
    waiting, running, failed = todo(cells), {}, {}
    finished = len(cells) - len(waiting)
    if finished:
        print(f"{finished} of {len(cells)} runs are there already", flush=True)
    for dataset in sorted({cell.settings["dataset"] for cell in waiting}):
        train.open_data(dataset)                                        # a sentence; or the built-in corpus, made once
    env = dict(os.environ)
    if jobs > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))

    def stop(number, frame):
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    total, begun, began = sum(cell.work for cell in cells), progress(cells), time.time()
    bar = tqdm(total=total, initial=begun, disable=None, dynamic_ncols=True,
               bar_format="{percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left{postfix}")

    def tell(text):
        ended, left, now = finished + len(failed), "", progress(cells)
        if bar.disable and ended < len(cells) and now > begun:
            seconds = (total - now) * (time.time() - began) / (now - begun)
            left = f"; {tqdm.format_interval(seconds)} left"
        tqdm.write(f"[{ended}/{len(cells)}] {text}{left}")
        sys.stdout.flush()

    def draw():
        bar.total, bar.n = total, progress(cells)
        now = " ".join(cell.folder.name for cell, *_ in running.values())
        bar.set_postfix_str(f"{finished}/{len(cells)} runs, now {now}")

    drawn = 0.0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell, err = waiting.pop(0), tempfile.TemporaryFile("w+", errors="replace")
                process = subprocess.Popen(command(cell), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                           stderr=err, env=env, start_new_session=True)     # Ctrl-C is ours to pass on
                running[process] = cell, err, time.time()
            time.sleep(0.1)
            for process in [p for p in running if p.poll() is not None]:
                cell, err, since = running.pop(process)
                err.seek(0)
                if process.returncode == 0:
                    finished += 1
                    tell(f"{cell.folder.name}: val loss {read_run(cell.folder).evals[-1]['val_loss']:.4f}, "
                         f"{tqdm.format_interval(time.time() - since)}")
                else:
                    failed[cell.folder.name] = sentence(process.returncode, err.read())
                    total -= cell.work - progress([cell])               # nothing more will come of it
                    tell(f"{cell.folder.name} failed: {failed[cell.folder.name]}")
                err.close()
            if not bar.disable and (time.time() - drawn > 1 or not (waiting or running)):
                draw()
                drawn = time.time()
        return failed
    except KeyboardInterrupt:
        end(running)
        again = shlex.join(["python", "-m", "lab.sweep", *sys.argv[1:]])
        raise KeyboardInterrupt(f"stopped: {finished} of {len(cells)} runs are done, and what was running has saved. "
                                f"The same command goes on:\n    {again}") from None
    finally:
        bar.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)

def end(running) -> None:
    """Let runs end their step and save; a second Ctrl-C ends them at once."""
    for process in running:
        process.terminate()
    try:
        for process in running:
            process.wait()
    finally:
        for process in running:
            process.kill()

# ---------------------------------------------------------------------------------------------------------------------
# statistics

def t_quantile(df: int, p: float = 0.975) -> float:
    """Student's t: the value that a t with df degrees of freedom is below with probability p > 0.5.

    The distribution has a finite form for whole df (Abramowitz and Stegun, 26.7.3 and 26.7.4); inverted by bisection.
    """
    odd = df % 2

    def inside(t):                                                      # P(-t < T < t)
        angle = math.atan(t / math.sqrt(df))
        s, c = math.sin(angle), math.cos(angle)
        term, total = c if odd else 1.0, 0.0
        for j in range(1, df // 2 + 1):                                 # 1 + c^2 1/2 + ..; for odd df c + c^3 2/3 + ..
            total += term
            term *= c * c * (2 * j - 1 + odd) / (2 * j + odd)
        return 2 / math.pi * (angle + s * total) if odd else s * total

    low, high = 0.0, 1.0
    while inside(high) < 2 * p - 1:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 2 * p - 1 else (low, middle)
    return high

def paired(differences: list[float]) -> dict:
    """Differences of val loss, one a seed, in nats a token: their mean, the 95 % t-interval of the mean (None with one
    seed), the change in perplexity in %, and how many are below 0."""
    n, mean = len(differences), statistics.mean(differences)
    half = t_quantile(n - 1) * statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    return {"n": n, "mean": mean, "interval": (mean - half, mean + half) if n > 1 else None,
            "perplexity": 100 * math.expm1(mean), "wins": sum(d < 0 for d in differences)}

def order(label: str) -> tuple:
    """Rows come in the order of model.ROUTERS, a router's variants after it."""
    names, router = list(ROUTERS), label.split(":")[0]
    return names.index(router) if router in names else len(names), label

def by_cell(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Rows of one depth and router together: {(depth, label): rows by seed}, in the order of the tables."""
    key = lambda row: (row["depth"], row["router"])
    rows = sorted(rows, key=lambda row: (row["depth"], order(row["router"]), row["seed"]))
    return {cell: list(group) for cell, group in groupby(rows, key)}

def against(rows: list[dict], baseline: str) -> dict[tuple, list[tuple[int, float]]]:
    """{(depth, label): [(seed, val loss minus the baseline's with the same depth and seed)]}, where both are there."""
    base = {(row["depth"], row["seed"]): row["val_loss"] for row in rows if row["router"] == baseline}
    pairs = {}
    for (depth, label), group in by_cell(rows).items():
        found = [(r["seed"], r["val_loss"] - base[depth, r["seed"]]) for r in group if (depth, r["seed"]) in base]
        if label != baseline and found:
            pairs[depth, label] = found
    return pairs

def at(run: Run, tokens: float) -> dict | None:
    """A run's evaluation nearest to so many tokens, if it is near enough."""
    line = min(run.evals, key=lambda x: abs(x["tokens"] - tokens), default=None)
    return line if line and abs(line["tokens"] - tokens) <= NEAR * tokens else None

# ---------------------------------------------------------------------------------------------------------------------
# tables

def signed(x: float, digits: int) -> str:
    """+0.0123, and never -0.0000."""
    return f"{round(x, digits) + 0.0:+.{digits}f}"

def spread(values: list[float], form: str) -> str:
    """Mean and standard deviation (n - 1) over seeds; a dash for the latter with one seed."""
    if any(x is None for x in values):
        return "-"
    return f"{statistics.mean(values):{form}} ± " + (f"{statistics.stdev(values):{form}}" if len(values) > 1 else "-")

def table(head: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"

def main_table(rows: list[dict]) -> str:
    def mean(group, name):
        values = [row[name] for row in group if row[name] is not None]
        return f"{statistics.mean(values):,.0f}" if values else "-"
    return table(["router", "layers", "seeds", "parameters", "val loss", "bits a byte", "tok/s", "peak MiB"],
                 [[label, depth, len(group), mean(group, "params"), spread([r["val_loss"] for r in group], ".4f"),
                   spread([r["val_bpb"] for r in group], ".4f"), mean(group, "tok_per_s"), mean(group, "peak_mem_mb")]
                  for (depth, label), group in by_cell(rows).items()])

def paired_cells(differences: list[tuple[int, float]]) -> list[str]:
    p = paired([d for _, d in differences])
    interval = " .. ".join(signed(x, 4) for x in p["interval"]) if p["interval"] else "-"
    return [p["n"], signed(p["mean"], 4), interval, signed(p["perplexity"], 2) + " %", f"{p['wins']} of {p['n']}"]

PAIRED_HEAD = ["pairs", "difference", "95 % interval", "perplexity", "wins"]

def paired_table(rows: list[dict], baseline: str) -> str:
    return table(["router", "layers", *PAIRED_HEAD],
                 [[label, depth, *paired_cells(d)] for (depth, label), d in against(rows, baseline).items()])

def milestone_rows(runs: list[Run], tokens: float) -> list[dict]:
    """Rows as of results.csv, but of the evaluation at so many tokens; unfinished runs count as well."""
    return [{"router": r.label, "depth": r.depth, "seed": r.seed, **line} for r in runs if (line := at(r, tokens))]

def milestone_table(runs: list[Run], points: list[float], baseline: str) -> str:
    found = []                                                          # (order, table row)
    for tokens in points:
        rows = milestone_rows(runs, tokens)
        real = sorted({row["tokens"] for row in rows})
        found += [((depth, order(label), tokens), [label, depth, " / ".join(f"{x:,}" for x in real), *paired_cells(d)])
                  for (depth, label), d in against(rows, baseline).items()]
    return table(["router", "layers", "tokens", *PAIRED_HEAD], [row for _, row in sorted(found, key=lambda x: x[0])])

def first_table(rows: list[dict], baseline: str) -> str:
    pairs, none = against(rows, baseline), [""] * len(PAIRED_HEAD)
    return table(["router", "layers", "val loss", *PAIRED_HEAD],
                 [[label, depth, spread([r["val_loss"] for r in group], ".4f"),
                   *(paired_cells(pairs[depth, label]) if (depth, label) in pairs else none)]
                  for (depth, label), group in by_cell(rows).items()])

def unequal(runs: list[Run]) -> list[str]:
    """A line for each setting in which runs differ that should be alike; a cell's own settings are in its label."""
    notes = []
    for name in sorted({k for r in runs for k in r.config["settings"]} - {*MAY_DIFFER, "router_sha256"}):
        values = {}
        for r in runs:
            if not any(x.startswith(name + "=") for x in r.label.split(":")[1:]):
                values.setdefault(repr(r.config["settings"].get(name)), []).append(r.folder.name)
        if len(values) > 1:
            notes.append(f"The runs differ in {name}: " + "; ".join(
                f"{value} in {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                for value, names in sorted(values.items())) + ".")
    return notes

def write_csv(path: Path, columns: list[str], rows: list[dict]) -> None:
    with atomic_write(path) as f:
        writer = csv.DictWriter(f, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

def report(out_dir: Path, baseline: str, at_tokens: str | None) -> str:
    """Write results.csv, evaluations.csv, results.md and the pictures of every run in out_dir; returns the tables."""
    if not out_dir.is_dir():
        raise UserError(f"there is no folder {out_dir}.")
    runs = [r for folder in sorted(out_dir.iterdir()) if folder.is_dir() and (r := read_run(folder))]
    runs.sort(key=lambda r: (r.depth, order(r.label), r.seed))
    if not runs:
        raise UserError(f"there are no runs in {out_dir}.")
    rows = [r.row() for r in runs if r.done]
    points = milestones(at_tokens)
    if points == "all":
        points = sorted({x["tokens"] for r in runs for x in r.evals if x["tokens"]})
    write_csv(out_dir / "results.csv", COLUMNS, rows)
    write_csv(out_dir / "evaluations.csv", COLUMNS[:3] + ["iter", "tokens", "val_loss", "val_bpb"],
              [{"router": r.label, "depth": r.depth, "seed": r.seed, **x} for r in runs for x in r.evals])
    parts = []
    if rows:
        parts.append("Mean ± standard deviation over seeds, at the end of training.\n\n" + main_table(rows))
    if against(rows, baseline):
        parts.append(f"Against `{baseline}`, paired by seed: val loss minus the baseline's, in nats a token (below 0 is"
                     f" better), and the 95 % t-interval of its mean.\n\n" + paired_table(rows, baseline))
    elif {row["router"] for row in rows} - {baseline}:
        parts.append(f"No pairs: no finished run has the seed and depth of a finished `{baseline}` (--baseline).\n")
    if any(r.config.get("fingerprint", {}).get("start") for r in runs) and (first := milestone_rows(runs, 0)):
        parts.append("Iteration 0, before any training: what the weights of --init_from are worth with each router. Mean "
                     "± standard deviation of val loss over seeds, and the difference to "
                     f"`{baseline}`, paired by seed.\n\n" + first_table(first, baseline))
    if points:
        parts.append("The same on the way, at the evaluation nearest to so many tokens.\n\n"
                     + milestone_table(runs, points, baseline))
    notes = unequal(runs) + [f"{r.folder.name} is not finished: iteration {r.evals[-1]['iter'] if r.evals else 0} of "
                             f"{r.config['settings']['max_iters']}." for r in runs if not r.done]
    parts += ["\n".join(notes) + "\n"] if notes else []
    text = "\n".join(parts)
    with atomic_write(out_dir / "results.md") as f:
        f.write(text)
    return text + "\n" + pictures(out_dir, runs, rows, baseline)

# ---------------------------------------------------------------------------------------------------------------------
# pictures

def pictures(out_dir: Path, runs: list[Run], rows: list[dict], baseline: str) -> str:
    """depth.png and curves.png; returns the line that says so, or what is missing."""
    written = ["results.csv", "evaluations.csv", "results.md"]
    try:
        import matplotlib
        matplotlib.use("Agg")                                           # no window
        import matplotlib.pyplot as plt
    except ImportError:
        return f"{out_dir}: {', '.join(written)}. For pictures: pip install matplotlib, then --report {out_dir}"
    labels = sorted({r.label for r in runs}, key=order)
    colours = {label: plt.get_cmap("tab10" if len(labels) <= 10 else "tab20")(i) for i, label in enumerate(labels)}
    figures = {"curves.png": draw_curves(plt, runs, baseline, colours)}
    if rows:
        figures["depth.png"] = draw_depth(plt, rows, baseline, colours)
    for name, figure in sorted(figures.items()):
        with atomic_write(out_dir / name, "wb") as f:
            figure.savefig(f, dpi=100, format="png")
        plt.close(figure)
    return f"{out_dir}: {', '.join(written + sorted(figures))}"

def draw_depth(plt, rows, baseline, colours):
    """Left: val loss against depth, mean and standard deviation. Right: the paired difference and its interval."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    depths = sorted({row["depth"] for row in rows})
    cells, pairs = by_cell(rows), against(rows, baseline)
    for k, (label, colour) in enumerate(colours.items()):
        shift = 0.05 * (k - (len(colours) - 1) / 2) / max(1, len(colours) / 6)         # bars side by side
        for axis, values in zip(axes, (cells, pairs)):
            at = [i for i, depth in enumerate(depths) if (depth, label) in values]
            if not at:
                continue
            if values is cells:
                each = [[row["val_loss"] for row in cells[depths[i], label]] for i in at]
                middle = [statistics.mean(x) for x in each]
                bars = [statistics.stdev(x) if len(x) > 1 else 0 for x in each]
            else:
                each = [paired([d for _, d in pairs[depths[i], label]]) for i in at]
                middle = [p["mean"] for p in each]
                bars = [p["mean"] - p["interval"][0] if p["interval"] else 0 for p in each]
            axis.errorbar([i + shift for i in at], middle, bars, marker="o", markersize=4, capsize=3, linewidth=1.2,
                          color=colour, label=label)
    axes[0].set(ylabel="validation loss, nats a token", title="Validation loss (mean ± sd over seeds)")
    axes[1].axhline(0, color=colours.get(baseline, "grey"), linewidth=1)
    axes[1].set(ylabel=f"difference to {baseline}, nats a token", title="Paired difference (mean, 95 % interval)")
    for axis in axes:
        axis.set(xlabel="layers", xticks=range(len(depths)), xticklabels=depths, xlim=(-0.4, len(depths) - 0.6))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure

def draw_curves(plt, runs, baseline, colours):
    """A column for each depth. Above: val loss, the seeds' mean in a band from least to most. Below: paired."""
    depths = sorted({r.depth for r in runs})
    figure, axes = plt.subplots(2, len(depths), figsize=(2 + 4.2 * len(depths), 7), layout="constrained", squeeze=False,
                                sharex="col")
    for column, depth in zip(axes.T, depths):
        there = [r for r in runs if r.depth == depth]
        losses, differences = {}, {}                                    # label -> tokens -> a value for each seed
        for tokens in sorted({x["tokens"] for r in there for x in r.evals}):
            rows = [{"router": r.label, "depth": depth, "seed": r.seed, **x} for r in there for x in r.evals
                    if x["tokens"] == tokens]
            for (_, label), group in by_cell(rows).items():
                losses.setdefault(label, {})[tokens] = [row["val_loss"] for row in group]
            for (_, label), found in against(rows, baseline).items():
                differences.setdefault(label, {})[tokens] = [d for _, d in found]
        for axis, curves, shown in ((column[0], losses, []), (column[1], differences, [0.0])):
            for label, curve in curves.items():
                x = list(curve)
                axis.plot(x, [statistics.mean(v) for v in curve.values()], color=colours[label], linewidth=1.2,
                          label=label)
                axis.fill_between(x, [min(v) for v in curve.values()], [max(v) for v in curve.values()],
                                  color=colours[label], alpha=0.15, linewidth=0)
                shown += [y for tokens, v in curve.items() if tokens >= 0.15 * x[-1] for y in v]  # not the start
            if len(shown) > 1:
                margin = 0.05 * (max(shown) - min(shown)) or 0.01
                axis.set_ylim(min(shown) - margin, max(shown) + margin)
        column[0].set(title=f"{depth} layer{'s' * (depth > 1)}")
        column[1].axhline(0, color=colours.get(baseline, "grey"), linewidth=1)
        column[1].set(xlabel="tokens")
        for axis in column:
            axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="validation loss, nats a token")
    axes[1, 0].set(ylabel=f"difference to {baseline}, paired")
    axes[0, -1].legend(fontsize=8)
    return figure

# ---------------------------------------------------------------------------------------------------------------------

def read_settings(argv) -> tuple[SweepConfig, dict]:
    """The sweep's own settings, and those of train.py that were given: the file, then the flags."""
    refused = {one: f"--{one} differs from run to run here: give --{many}." for one, many in SET_BY_THE_SWEEP.items()}
    refused["block_size"] = ("--block_size is --seq_len here: the context length is --seq_len, and block means a depth "
                             "block (--n_blocks).")
    parser = Parser(prog="python -m lab.sweep", description="Depth x router x seed: train all, then one table.", refused=refused)
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings, the sweep's and train.py's")
    own = [f.name for f in fields(SweepConfig)]
    parser.add_fields(SweepConfig)
    parser.add_fields(train.TrainConfig, skip=[*own, *SET_BY_THE_SWEEP, "eval_only"])
    parser.add_fields(GPTConfig, skip=[*own, *SET_BY_THE_SWEEP, *(f.name for f in fields(train.TrainConfig))])
    flags = vars(parser.parse_args(argv))
    config = flags.pop("config")
    given = (parser.read_toml(config) if config else {}) | flags
    sweep = SweepConfig(**{name: given.pop(name) for name in own if name in given})
    check_named(sweep.routers, flags.get("routers"), config, "routers")
    sweep.baseline = label_of(sweep.baseline)
    if sweep.report is not None:                                        # the sweep that made them said what to compare
        sweep.out_dir, kept = sweep.report, Path(sweep.report) / "sweep.json"
        if kept.exists():
            try:
                was = json.loads(kept.read_text(encoding="utf-8"))
                sweep.baseline = sweep.baseline if "baseline" in flags else str(was["baseline"])
                sweep.at_tokens = sweep.at_tokens if "at_tokens" in flags else was["at_tokens"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{kept} is damaged; delete it, and give --baseline and --at_tokens.") from None
    if sweep.jobs < 1:
        raise UserError(f"--jobs is {sweep.jobs}; it must be 1 or more.")
    if given.get("init_from") == "resume":
        raise UserError("--init_from resume is not needed: a sweep goes on by itself.")
    milestones(sweep.at_tokens)
    return sweep, given

def main(argv) -> None:
    sweep, given = read_settings(argv)
    out_dir = Path(sweep.out_dir)
    failed = {}
    if sweep.report is None:
        cells = plan(sweep, given)
        failed = run_cells(cells, sweep.jobs)
        out_dir.mkdir(parents=True, exist_ok=True)                      # there is none yet when every run has failed
        with atomic_write(out_dir / "sweep.json") as f:
            json.dump(vars(sweep) | {"train": given}, f, indent=1)
    if not failed or len(failed) < len(cells):
        print("\n" + report(out_dir, sweep.baseline, sweep.at_tokens))
    if failed:
        first = next(iter(failed))
        raise UserError(f"{len(failed)} of {len(cells)} runs failed: {first}: {failed[first]}\n"
                        f"The tables are of the others. The same command tries again.")


if __name__ == "__main__":
    run(main)
