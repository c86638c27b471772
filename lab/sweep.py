"""Depth x router x seed: train every cell, then one table, paired differences and pictures (report.py).

    python -m lab.sweep --routers residual,block,rd,delta_block,wav --depths 12,24,48 --seeds 0,1,2 --max_iters 1000
    python -m lab.sweep configs/sweep_rd_gpu.toml --jobs 2      # a file of settings, then flags; any of train.py's goes
    python -m lab.sweep --vary learning_rate=1e-3,2e-3 --vary n_blocks=n_layer/2,8      # every router with each of them
    python -m lab.sweep --init_from 'out/residual-12x64-s{seed}' --depths 12 --routers residual,delta:route_gate=0 \\
      --baseline residual                                       # conversions, each from the run of its own seed
    python -m lab.sweep --report out/sweep                      # tables and pictures again, from what is there

A cell is a router, or a router with settings of its own after colons: `rd:rd_control=tied`, `wav:details=split`,
`delta:null_source=true:router_lr=0.1`. A value may be reckoned from the depth: n_layer or n_layer/2. --vary gives
every cell each of the values. A cell is compared with the baseline that has the same settings of its own, where there
is one. `block:plain_read=true` shows what rounding alone does. A router from a file, `mine.py:Mine`, is called by its
class. {seed} and {n_layer} in --init_from are those of the cell.

Each cell, depth and seed is one run of train.py in OUT_DIR/CELL-LxD-sSEED (a colon is a + there), in a process of its
own, so that its peak memory is its own. A finished run is skipped and an interrupted one goes on, so the same command
can be given again at any time, or twice at once: two sweeps in one folder share the cells. One more seed or depth only
adds to what is there. Seeds are the outer loop: after one the table is whole.
"""
import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from tqdm import tqdm

import train
from lab.report import Run, folder_name, needed, read_run, reckoned, report, unlike
from nanodepth.files import UserError, atomic_write, check_named, lock, router_name, run
from nanodepth.machine import pick_device, pick_dtype
from nanodepth.runs import Stop, code_digests, data_facts, iter_of
from nanodepth.settings import Parser, comments, nearest
from model import ROUTERS, GPTConfig


@dataclass
class SweepConfig:
    routers: str = "residual,block,rd,delta_block,wav"  # cells, with commas: ROUTER, or ROUTER:setting=value:...
    depths: str = "12,24,48"             # layers, with commas
    seeds: str = "0,1,2"                 # seeds, with commas; two cells with the same seed are a pair
    vary: str = ""                       # setting=value,value: every cell with each; more after a space, or given again
    baseline: str = "block"              # the cell that the others are compared with, seed by seed
    jobs: int = 1                        # runs at a time, each on a card of its own, or on its share of the cores
    out_dir: str = "out/sweep"           # where the runs, tables and pictures are written
    report: str | None = None            # a folder of runs: only its tables and pictures, of all cells or of --routers

SET_BY_THE_SWEEP = {"router": "routers", "n_layer": "depths", "seed": "seeds"}
BAR = "{n_fmt}/{total_fmt} runs |{bar}| {elapsed} gone, {remaining} left{postfix}"

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

def integers(text: str, name: str) -> list[int]:
    """'12,24' -> [12, 24]"""
    try:
        numbers = [int(x) for x in text.split(",") if x.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise UserError(f"--{name} is {text!r}; it must be whole numbers with commas, as in --{name} 1,2,3.")
    return list(dict.fromkeys(numbers))

def named(cell: str) -> tuple[str, str, list[str]]:
    """'mine.py:Mine:rho=2' -> ('mine.py:Mine', 'Mine:rho=2', ['rho=2']): the router, the label in tables and folders,
    and the settings."""
    router, own = re.fullmatch(r"(.+?\.py:\w+|[^:]*)(.*)", cell.strip()).groups()
    return router, router_name(router) + own, own.split(":")[1:]

def varied(text: str) -> list[str]:
    """'a=1,2 b=3' -> [':a=1:b=3', ':a=2:b=3']: what is added to every cell."""
    axes = [axis.partition("=") for axis in text.split()]
    return ["".join(x) for x in itertools.product(*([f":{name}={value}" for value in values.split(",")]
                                                    for name, _, values in axes))]

def flag(name: str, value) -> str:
    return f"--{name}={str(value).lower() if value is None or isinstance(value, bool) else value}"

def plan(sweep: SweepConfig, given: dict) -> list[Cell]:
    """Every cell, checked as train.py itself would. given: settings of train.py that hold for all of them."""
    names = [x.strip() for x in sweep.routers.split(",") if x.strip()]
    if not names:
        raise UserError(f"--routers is {sweep.routers!r}; choose of {' '.join(ROUTERS)}.")
    cells, routers = [], {}
    for seed, depth, extra, name in itertools.product(integers(sweep.seeds, "seeds"), integers(sweep.depths, "depths"),
                                                      varied(sweep.vary), dict.fromkeys(names)):
        router, label, own = named(name + extra)
        if routers.setdefault(router_name(router), router) != router:
            raise UserError(f"{routers[router_name(router)]} and {router} have one name in the tables; rename a class.")
        values = dict(x.partition("=")[::2] for x in own)
        if len(values) < len(own) or not all(values.values()):
            raise UserError(f"{label}: settings of a cell look like rd:rd_control=tied, each of them once.")
        if wrong := values.keys() & {*SET_BY_THE_SWEEP, "out_dir", "init_from"}:
            raise UserError(f"{label}: {min(wrong)} cannot be a setting of one cell.")
        start = given.get("init_from", "scratch").replace("{seed}", str(seed)).replace("{n_layer}", str(depth))
        try:
            chosen = given | {k: reckoned(v, depth) for k, v in values.items()} | {
                "router": router, "n_layer": depth, "seed": seed}
            flags = [flag(name, value) for name, value in chosen.items() if name != "init_from"]
            settings, checkpoint = train.read_settings([*flags, flag("init_from", start)])
            train.model_config(settings, 1)
        except UserError as e:
            raise UserError(f"the cell {label} at {depth} layers: {e}") from None
        folder = Path(sweep.out_dir) / folder_name(label, depth, settings["n_embd"], seed)
        cells.append(Cell(label, depth, seed, flags, settings, folder, start, checkpoint and checkpoint["digest"]))
    if (base := sweep.baseline.split(":")[0]) not in (known := {*ROUTERS, *routers}):
        raise UserError(f"--baseline is {sweep.baseline!r}, and no router is called {base}.{nearest(base, known)}")
    return cells

# ---------------------------------------------------------------------------------------------------------------------
# what is there already

def todo(cells: list[Cell]) -> list[Cell]:
    """The cells that are not done. UserError when a run that is there is not the one that was asked for."""
    @functools.cache                                                    # the built-in corpus is made here
    def data(dataset, tokenizer):
        return data_facts(train.open_data(dataset, tokenizer))["digest"]

    left = []
    for cell in cells:
        s = cell.settings
        router, model = code_digests(s["router"], ROUTERS, train.CODE, s["router_sha256"])
        device = pick_device(s["device"])
        now = {"data": data(s["dataset"], s["tokenizer"]), "start": cell.weights, "torch": torch.__version__,
               "dtype": pick_dtype(s["dtype"], device), "device": device.split(":")[0], "changed": [], "model": model,
               "router": router}
        if run := read_run(cell.folder):
            config = {"settings": s, "fingerprint": now, "tokens_per_step": train.windows_a_step(s) * s["seq_len"]}
            why = unlike(run, Run(cell.label, cell.depth, cell.seed, config, [], cell.folder), one_cell=True)
            if not why and run.mark.get("start") != cell.weights:
                why = "other starting weights"
            if why:
                raise UserError(f"{cell.folder}: {why}. It is another run than this cell: give its settings, or "
                                f"another --out_dir.")
        if not run or not run.done:
            left.append(cell)
    return left

def last_line(folder: Path) -> dict:
    """The last line of a run's log: where it is. Empty where there is none."""
    try:
        with open(folder / "log.jsonl", "rb") as f:
            return json.loads(([line for line in f if iter_of(line) < math.inf] or ["{}"])[-1])
    except OSError:
        return {}

# ---------------------------------------------------------------------------------------------------------------------
# running

def place(slot: int, jobs: int, device: str) -> dict:
    """The environment of the run in this slot: a card of its own (in turn), or its share of the cores."""
    env = dict(os.environ)
    named = env.get("CUDA_VISIBLE_DEVICES")
    cards = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if jobs > 1 and device in ("auto", "cuda") and cards:
        env["CUDA_VISIBLE_DEVICES"] = cards[slot % len(cards)]
    if jobs > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))
    return env

def hold(cell: Cell) -> contextlib.ExitStack | None:
    """The cell for this sweep alone, until it is closed; None while another sweep, or a run by hand, has it."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(UserError), contextlib.ExitStack() as held:
        held.enter_context(lock(cell.folder, "another sweep has it", ".lock-sweep"))
        with lock(cell.folder, "a run by hand has it"):                 # train.py's own lock
            return held.pop_all()

class Job:
    """A cell's run, in a process of its own. What it says is in output.txt in its folder, and stays when it fails."""

    def __init__(self, cell: Cell, held: contextlib.ExitStack, slot: int, jobs: int):
        self.cell, self.held, self.output = cell, held, cell.folder / "output.txt"
        start = "resume" if (cell.folder / "ckpt.pt").exists() else cell.start
        command = [sys.executable, str(Path(__file__).with_name("child.py")), *cell.flags, flag("init_from", start),
                   flag("out_dir", cell.folder)]
        alone = {"creationflags": 0x200} if os.name == "nt" else {"start_new_session": True}    # Ctrl-C is the sweep's
        with open(self.output, "wb") as f:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=f, stderr=subprocess.STDOUT,
                                            env=place(slot, jobs, cell.settings["device"]), **alone)

    def said(self) -> str:
        """Of a run that failed: why, in one line."""
        text = self.output.read_text(encoding="utf-8", errors="replace").strip()
        text = text.rpartition("train.py: " if "train.py: " in text else "\n")[2]
        return f"{' '.join(text.split())[:400]} (exit code {self.process.returncode}, {self.output})"

    def close(self, keep: bool = False) -> None:
        self.process.stdin.close()
        if not keep:
            self.output.unlink(missing_ok=True)
        self.held.close()

def run_cells(cells: list[Cell], waiting: list[Cell], jobs: int) -> dict[str, str]:
    """Run the waiting cells, `jobs` at a time. Returns why some failed, by their folders' names."""
    running, failed, done = {}, {}, len(cells) - len(waiting)           # running: {slot: job}
    if done:
        print(f"{done} of {len(cells)} runs are there already", flush=True)
    with Stop() as stop, tqdm(total=len(cells), initial=done, disable=None, dynamic_ncols=True, bar_format=BAR) as bar:
        try:
            while (waiting or running) and not stop.asked:
                for cell in [*waiting]:
                    if len(running) == jobs or not (held := hold(cell)):
                        continue
                    waiting.remove(cell)
                    if (there := read_run(cell.folder)) and there.done:         # by another sweep
                        held.close()
                        done += 1
                        bar.update()
                        continue
                    slot = min({*range(jobs)} - running.keys())
                    running[slot] = Job(cell, held, slot, jobs)
                time.sleep(0.2)
                for slot, job in [*running.items()]:
                    if (code := job.process.poll()) is None:
                        continue
                    name, line = job.cell.folder.name, last_line(job.cell.folder)
                    if code:
                        failed[name] = job.said()
                        text = f"{name} failed: {failed[name]}"
                    else:
                        done += 1
                        text = f"{name}: val loss {line['val_loss']:.4f}"
                    bar.update()
                    tqdm.write(f"[{done + len(failed)}/{len(cells)}] {text}")
                    sys.stdout.flush()
                    job.close(keep=code != 0)
                    del running[slot]
                now = [(job.cell.folder.name, last_line(job.cell.folder)) for job in running.values()]
                bar.set_postfix_str(", ".join(f"{name} loss {line.get('loss', math.nan):.3f} at {line.get('iter', 0)}"
                                              for name, line in now) or "waiting for another sweep")
        finally:
            for job in running.values():
                job.process.stdin.close()                               # it ends its step and saves
            lost = [job.cell.folder.name for job in running.values() if job.process.wait() not in (0, 2)]
            for job in running.values():
                job.close(keep=job.cell.folder.name in lost)
    if stop.asked:
        again = shlex.join(["python", "-m", "lab.sweep", *sys.argv[1:]])
        raise KeyboardInterrupt(f"stopped: {done} of {len(cells)} runs are done, and what was running has saved"
                                f"{', but not ' * bool(lost)}{', '.join(lost)}. The same command goes on:\n    {again}")
    return failed

# ---------------------------------------------------------------------------------------------------------------------

def read_settings(argv) -> tuple[SweepConfig, dict]:
    """The sweep's own settings, and those of train.py that were given: the file, then the flags."""
    refused = {one: f"--{one} differs from run to run here: give --{many}." for one, many in SET_BY_THE_SWEEP.items()}
    refused["block_size"] = train.REFUSED["block_size"]
    parser = Parser(prog="python -m lab.sweep", refused=refused,
                    description="Depth x router x seed: train all, then one table.")
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="settings, the sweep's and train.py's")
    own = [f.name for f in fields(SweepConfig)]
    parser.add_fields(SweepConfig, skip=["vary"])
    parser.add_argument("--vary", action="append", default=argparse.SUPPRESS, help=comments(SweepConfig)["vary"])
    parser.add_fields(train.TrainConfig, skip=[*own, *SET_BY_THE_SWEEP, "eval_only"])
    parser.add_fields(GPTConfig, skip=[*own, *SET_BY_THE_SWEEP, *(f.name for f in fields(train.TrainConfig))])
    flags = vars(parser.parse_args(argv))
    config = flags.pop("config")
    parser.kinds["vary"] = str                                          # in a file; as a flag it may come twice
    if "vary" in flags:
        flags["vary"] = " ".join(flags["vary"])
    given = (parser.read_toml(config) if config else {}) | flags
    if "report" in given:                                               # the sweep that made them said what to compare
        kept = Path(given["report"]) / "sweep.json"
        try:
            was = json.loads(kept.read_text(encoding="utf-8"))["baseline"] if kept.exists() else SweepConfig.baseline
            given = {"routers": "", "baseline": was, **given}
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{kept} is damaged; delete it, and give --baseline.") from None
    sweep = SweepConfig(**{name: given.pop(name) for name in own if name in given})
    check_named(sweep.routers, flags.get("routers"), config, "routers")
    sweep.baseline = named(sweep.baseline)[1]
    if sweep.jobs < 1:
        raise UserError(f"--jobs is {sweep.jobs}; it must be 1 or more.")
    if given.get("init_from") == "resume":
        raise UserError("--init_from resume is not needed: a sweep goes on by itself.")
    return sweep, given

def main(argv) -> None:
    sweep, given = read_settings(argv)
    needed()
    out_dir, failed, cells = Path(sweep.report or sweep.out_dir), {}, []
    if not sweep.report:
        cells = plan(sweep, given)
        waiting = todo(cells)
        out_dir.mkdir(parents=True, exist_ok=True)
        with lock(out_dir, None, ".lock-tables"), atomic_write(out_dir / "sweep.json") as f:
            json.dump(vars(sweep) | {"train": given}, f, indent=1)
        failed = run_cells(cells, waiting, sweep.jobs)
    if not failed or len(failed) < len(cells):
        only = {named(x)[1] for x in sweep.routers.split(",")} if sweep.report and sweep.routers else None
        if not out_dir.is_dir():
            raise UserError(f"there is no folder {out_dir}.")
        with lock(out_dir, None, ".lock-tables"):                       # one sweep at a time
            print("\n" + report(out_dir, sweep.baseline, only))
    if failed:
        first = next(iter(failed))
        raise UserError(f"{len(failed)} of {len(cells)} runs failed: {first}: {failed[first]}\n"
                        f"The tables are of the others. The same command tries again.")


if __name__ == "__main__":
    run(main)
