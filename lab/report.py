"""What a folder of runs says: which two of them are a pair, the statistics of the pairs, tables, CSV files, pictures.

Runs with one label, depth and seed stand in FOLDER/LABEL-LxD-sSEED (`folder_name`); config.json and log.jsonl are all
that is read of them. A difference is taken between two runs that are equal in everything but the router and what their
labels name (`unlike`); whatever is left out of a table is named in its last column, with the reason.
"""
import json
import math
import re
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, unquote

try:
    import pandas as pd
    from scipy import stats
except ImportError:
    pd = stats = None

import train
from nanodepth.files import UserError, atomic_write, router_name
from nanodepth.runs import NO_MATTER, iter_of
from nanodepth.settings import amount, convert
from model import ROUTERS, GPTConfig

NEAR = 0.05                              # a milestone is the evaluation nearest to it, at most this share of it away
FINGERPRINT = {"data": "data", "start": "starting weights", "torch": "torch", "dtype": "dtype", "device": "device",
               "changed": "settings changed on the way", "model": "model.py", "router": "code of the router"}
KINDS = {f.name: f.type for f in (*fields(GPTConfig), *fields(train.TrainConfig))}

def needed() -> None:
    """UserError when the tables could not be made: said before anything is trained."""
    if pd is None:
        raise UserError("The tables need pandas and scipy: pip install -r requirements-extra.txt")

# ---------------------------------------------------------------------------------------------------------------------
# a run

@dataclass
class Run:
    label: str
    depth: int
    seed: int
    config: dict                         # config.json
    evals: list[dict]                    # evaluation lines of log.jsonl
    steps: list[dict]                    # training lines
    folder: Path
    odd: str | None = None               # how it differs from most runs of its cell, so that it counts in no mean

    @property
    def done(self) -> bool:
        return bool(self.evals) and self.evals[-1]["iter"] >= self.config["settings"]["max_iters"]

    def facts(self) -> dict:
        """The columns of the CSV files by which a reader may group."""
        s, mark = train.DEFAULTS | self.config["settings"], self.config.get("fingerprint") or {}
        router, *own = self.label.split(":")
        return {"label": self.label, "router": router, "settings": " ".join(own), "depth": self.depth,
                "seed": self.seed, "n_embd": s["n_embd"], "params": self.config["params"], "dataset": s["dataset"],
                "learning_rate": s["learning_rate"], "init_from": s["init_from"],
                **{name: mark.get(name) for name in ("torch", "device", "dtype")},
                **{f"{name}_digest": mark.get(name) for name in ("data", "start", "model", "router")},
                "run": self.folder.name, "odd": self.odd}

    @cached_property
    def row(self) -> dict:
        """Its line of results.csv. tok_per_s is the median of the log's lines, peak_mem_mb their largest, in MiB."""
        steps = pd.DataFrame(self.steps, columns=["tok_per_s", "peak_mem_mb", "elapsed_s"]).astype(float)
        return self.facts() | {name: self.evals[-1].get(name) for name in EVALUATED} | {
            "tok_per_s": steps.tok_per_s.median(), "peak_mem_mb": steps.peak_mem_mb.max(),
            "elapsed_s": steps.elapsed_s.max()}

EVALUATED = ["iter", "tokens", "val_loss", "val_bpb", "train_loss"]

def folder_name(label: str, depth: int, width: int, seed: int) -> str:
    """rd:rd_control=tied at 12 layers of 64, seed 0 -> rd+rd_control=tied-12x64-s0"""
    return f"{quote(label, safe=':=').replace(':', '+')}-{depth}x{width}-s{seed}"

def read_run(folder: Path) -> Run | None:
    """A run's settings and log; None where none has begun. A last line that a kill has cut short does not count."""
    name = re.fullmatch(r"(.+)-(\d+)x(\d+)-s(\d+)", folder.name)
    if not name or not (folder / "config.json").exists():
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        s = config["settings"]
        router, depth, width, seed = router_name(s["router"]), s["n_layer"], s["n_embd"], s["seed"]
        s["max_iters"] + config["params"]
        label = unquote(name[1].replace("+", ":"))
        own = dict(x.split("=", 1) for x in label.split(":")[1:] if "n_layer" not in x)
        false = [k for k, v in own.items() if convert(KINDS[k], v, k) != s.get(k, train.DEFAULTS[k])]
        with open(folder / "log.jsonl", "rb") as f:
            lines = [json.loads(line) for line in f if iter_of(line) < math.inf]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder} is damaged: its config.json or log.jsonl cannot be read. "
                        f"Delete it and run it again.") from None
    if false or [label.split(":")[0], *map(int, name.groups()[1:])] != [router, depth, width, seed]:
        holds = ":".join([router, *(f"{k}={s.get(k)}" for k in false)])
        raise UserError(f"{folder} is not what it is called: it holds {folder_name(holds, depth, width, seed)}. "
                        f"Rename it.")
    evals, steps = ([x for x in lines if key in x] for key in ("val_loss", "loss"))
    return Run(label, depth, seed, config, evals, steps, folder)

def read_runs(out_dir: Path) -> tuple[list[Run], list[str]]:
    """Every run in a folder, in the order of the tables, and a sentence for each that cannot be read."""
    if not out_dir.is_dir():
        raise UserError(f"there is no folder {out_dir}.")
    runs, damaged = [], []
    for folder in sorted(out_dir.iterdir()):
        try:
            if folder.is_dir() and (run := read_run(folder)):
                runs.append(run)
        except UserError as e:
            damaged.append(str(e))
    runs.sort(key=lambda r: (r.depth, order(r.label), r.seed))
    mark_odd(runs)
    return runs, damaged

def started(runs: list[Run]) -> bool:
    """Do some of them start from another run's weights?"""
    return any((r.config.get("fingerprint") or {}).get("start") for r in runs)

def order(label: str) -> tuple:
    """Rows come in the order of model.ROUTERS, a router's variants after it."""
    names, router = list(ROUTERS), label.split(":")[0]
    return names.index(router) if router in names else len(names), label

# ---------------------------------------------------------------------------------------------------------------------
# what is a pair

def named(label: str, other: str) -> set[str]:
    """The settings in which two labels differ: rd:rd_control=tied and block -> {rd_control}"""
    return {x.split("=")[0] for x in {*label.split(":")[1:]} ^ {*other.split(":")[1:]}}

def shown(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value).replace('"', "").replace("null", "none")
    return text[:8] if re.fullmatch("[0-9a-f]{16,}", text) else text[:60]

def unlike(a: Run, b: Run, one_cell: bool = False) -> str | None:
    """Why two runs may not be compared: the first thing in which they differ, and both values. None when they may.

    A setting may differ when their labels say so, and when it changes no number; in the runs of one cell the router's
    code must be the same too, but each seed may start from weights of its own.
    """
    marks = [r.config.get("fingerprint") for r in (a, b)]
    if not all(marks):
        return "no fingerprint: it was trained by an older version" if not marks[0] else \
            f"{b.folder.name} has no fingerprint: it was trained by an older version"
    by_depth = {x.split("=")[0] for x in a.label.split(":") if "n_layer" in x and a.depth != b.depth}
    may = named(a.label, b.label) | by_depth
    s, t = (train.DEFAULTS | r.config["settings"] for r in (a, b))
    m, n = (r.config.get("model", {}) for r in (a, b))                  # where n_blocks none is a number
    for name in s:
        if name not in {*may, *NO_MATTER, "n_layer", "seed"} and s[name] != t.get(name) and (
                name not in m or m[name] != n.get(name)):
            return f"{name} {shown(s[name])}, not {shown(t.get(name))}"
    for name, text in FINGERPRINT.items():
        v, w = (mark.get(name) for mark in marks)
        if name == "start" and one_cell:
            v, w = (x and "a checkpoint" for x in (v, w))
        if v != w and name not in may and (name != "router" or one_cell):
            return f"{text} {shown(v)}, not {shown(w)}"
    v, w = (r.config.get("tokens_per_step") for r in (a, b))
    return None if v == w else f"{v} tokens a step, not {w}"

def mark_odd(runs: list[Run]) -> None:
    """Of the runs of a cell (label and depth) those are `odd` that are unlike the one that is like most others."""
    for cell in {(r.label, r.depth): None for r in runs}:
        own = [r for r in runs if (r.label, r.depth) == cell]
        typical = max(own, key=lambda r: sum(not unlike(r, other, one_cell=True) for other in own))
        for r in own:
            r.odd = unlike(r, typical, one_cell=True) if r is not typical else None

def against(label: str, there: set[str], baseline: str) -> str | None:
    """Which label a label is compared with: of the baseline's router, and of what it names itself as much as there is,
    so that wav:learning_rate=1e-3 meets block:learning_rate=1e-3. None for a label that is a baseline itself."""
    router, *own = baseline.split(":")
    most = {*own, *label.split(":")[1:]}
    def fits(x):
        return x.split(":")[0] == router and {*own} <= {*x.split(":")[1:]} <= most
    found = [x for x in sorted(there) if fits(x) and x != label]
    return max(found, key=lambda x: x.count(":")) if found else None if fits(label) else baseline

def at(run: Run, tokens: int | None, near: float) -> dict | None:
    """A run's evaluation nearest to so many tokens, if it is near enough (a share of them); its last one for None."""
    if tokens is None:
        return run.evals[-1] if run.evals else None
    line = min(run.evals, key=lambda x: abs(x["tokens"] - tokens), default=None)
    return line if line and abs(line["tokens"] - tokens) <= near * tokens else None

PAIR = ["depth", "label", "against", "seed", "run", "tokens", "loss", "base", "difference", "why"]

def pairs(runs: list[Run], baseline: str, tokens: int | None = None, near: float = NEAR) -> "pd.DataFrame":
    """A row for each run that should have its baseline beside it. base: the baseline's loss; why: the reason where
    there is no difference. tokens, near: as of `at`; without them, finished runs count."""
    labels, there, rows = {}, {}, []
    for r in sorted(runs, key=lambda r: r.odd is None):                 # of two with one seed the one that is not odd
        labels.setdefault(r.depth, set()).add(r.label)
        there[r.label, r.depth, r.seed] = r

    def why_not(run, base, line, theirs, other):
        unfinished = [r for r in (run, base) if r and tokens is None and not r.done]
        if unfinished:
            return f"{unfinished[0].folder.name} is not finished"
        if run.odd or not theirs:
            return run.odd or f"no {other}"
        if base.odd:
            return f"{base.folder.name} is left out itself: {base.odd}"
        uneven = f"{line['tokens']:,} tokens, not {theirs['tokens']:,}" if line["tokens"] != theirs["tokens"] else None
        return unlike(run, base) or uneven

    for run in runs:
        other, line = against(run.label, labels[run.depth], baseline), at(run, tokens, near)
        if other and line:
            base = there.get((other, run.depth, run.seed))
            theirs = base and at(base, tokens, near)
            why = why_not(run, base, line, theirs, other)
            loss, its = line["val_loss"], math.nan if why else theirs["val_loss"]
            rows.append([run.depth, run.label, other, run.seed, run, line["tokens"], loss, its, loss - its, why])
    return pd.DataFrame(rows, columns=PAIR)

# ---------------------------------------------------------------------------------------------------------------------
# statistics

def paired(differences) -> dict:
    """n differences, one a seed: their mean, standard deviation (n - 1), the 95 % t-interval of the mean (low, high and
    bar, half its width), wins (how many are below 0) and `detectable`: the true mean that so many would show, by an
    interval without 0, in 80 of 100 repeats if they had this standard deviation: t(0.975) + t(0.8) standard errors
    (Bloom 1995, Evaluation Review 19(5)). What one difference cannot say is NaN."""
    d = pd.Series(list(differences), dtype=float)
    n, mean, error, t = len(d), d.mean(), d.sem(), stats.t(max(len(d) - 1, 1)).ppf
    bar = t(0.975) * error
    return {"n": n, "mean": mean, "sd": d.std(), "low": mean - bar, "high": mean + bar, "bar": bar,
            "wins": int((d < 0).sum()), "detectable": bar + t(0.8) * error}

def compared(rows: "pd.DataFrame") -> list[dict]:
    """For each depth and label of `pairs`: `paired`, the correlation r of the two losses over seeds (of 3 or more), and
    why pairs are left out."""
    found = []
    for (depth, label, other), group in rows.groupby(["depth", "label", "against"], sort=False):
        p = group[group.why.isna()]
        varied = len(p) > 2 and p[["loss", "base"]].std().min() > 0
        why = [" ".join(f"s{seed}" for seed in left.seed) + f": {text}"
               for text, left in group[group.why.notna()].groupby("why", sort=False)]
        found.append({"depth": depth, "label": label, "against": other, "tokens": group.tokens.max(),
                      **paired(p.difference), "r": p.loss.corr(p.base) if varied else math.nan,
                      "left_out": "; ".join(why)})
    return found

def trends(rows: "pd.DataFrame") -> list[dict]:
    """How a label's difference changes from its least to its greatest depth: `paired` over the seeds that have both of
    difference(greatest) - difference(least), below 0 where the gain grows."""
    found = []
    for (label, other), group in rows.groupby(["label", "against"], sort=False):
        by_depth = dict(list(group[group.why.isna()].groupby("depth")))
        if len(by_depth) < 2:
            continue
        first, last = (by_depth[depth].set_index("seed") for depth in (min(by_depth), max(by_depth)))
        why = unlike(last.run.iloc[0], first.run.iloc[0], one_cell=True)
        change = [] if why else (last.difference - first.difference).dropna()
        found.append({"label": label, "against": other, "depth": f"{min(by_depth)} to {max(by_depth)}",
                      **paired(change), "left_out": why or "no seed has both" * (not len(change))})
    return found

# ---------------------------------------------------------------------------------------------------------------------
# tables

def signed(x: float) -> str:
    """+0.0123, and never -0.0000."""
    return f"{round(x, 4) + 0.0:+.4f}"

def table(head: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"

def plain(x: float, form: str = ".4f") -> str:
    return "-" if x is None or math.isnan(x) else f"{x:{form}}"

PAIRED = ["n", "difference", "95 % interval", "sd", "wins", "r", "detectable", "left out"]

def paired_cells(p: dict) -> list:
    if not p["n"]:
        return [0, *"------", p["left_out"]]
    interval = f"{signed(p['low'])} .. {signed(p['high'])}" if p["n"] > 1 else "-"
    return [p["n"], signed(p["mean"]), interval, plain(p["sd"]), f"{p['wins']} of {p['n']}",
            plain(p.get("r", math.nan), ".2f"), plain(p["detectable"]), p["left_out"]]

def paired_table(found: list[dict], tokens: bool = False) -> str:
    rows = [[p["label"], p["against"], p["depth"], *([f"{p['tokens']:,}"] if tokens else []), *paired_cells(p)]
            for p in found]
    return table(["router", "against", "layers", *["tokens"] * tokens, *PAIRED], rows)

def means(runs: list[Run], baseline: str, tokens: int | None = None) -> "pd.DataFrame":
    """A row for each depth and label: means and standard deviations over its finished runs (or those evaluated after so
    many tokens) that are not odd. `like`: the seeds of the baseline (else, of the largest cell); `alike`: this cell has
    them too, so that its mean may be drawn beside the others."""
    lines = [r.row | x for r in runs if not r.odd and (r.done or tokens is not None)
             for x in (r.evals[-1:] if tokens is None else r.evals) if tokens in (None, x["tokens"])]
    lines = pd.DataFrame(lines, columns=["depth", "label", "seed", "params", "val_loss"])
    found = lines.astype({"val_loss": float}).groupby(["depth", "label"], sort=False).agg(
        seeds=("seed", tuple), params=("params", "mean"), mean=("val_loss", "mean"), bar=("val_loss", "std"))
    found = found.reset_index()
    by_cell = found.set_index(["depth", "label"]).seeds
    like = {d: by_cell.get((d, baseline)) or max(by_cell[d], key=len) for d in {*found.depth}}
    found["like"] = [like[d] for d in found.depth]
    return found.assign(alike=found.seeds == found.like)

def mean_table(cells: "pd.DataFrame", runs: list[Run]) -> str:
    rows = []
    for c in cells.itertuples():
        notes = [f"{r.folder.name}: {r.odd}" for r in runs if r.odd and (r.label, r.depth) == (c.label, c.depth)]
        notes += [] if c.alike else [f"other seeds than {' '.join(map(str, c.like))}: see the pairs"]
        rows.append([c.label, c.depth, " ".join(map(str, c.seeds)), f"{c.params:,.0f}",
                     f"{plain(c.mean)} ± {plain(c.bar)}", "; ".join(notes)])
    head = ["router", "layers", "seeds", "parameters", "val loss", "left out"]
    return table(head, rows)

def milestones(text: str | None) -> list[int] | str:
    """'0.5M,2M' -> [500000, 2000000]; 'all' stays."""
    return text or [] if text in (None, "", "all") else [amount(x.strip(), "--at_tokens") for x in text.split(",")]

def report(out_dir: Path, baseline: str, at_tokens: str | None, only: set[str] | None = None) -> str:
    """Write results.csv, evaluations.csv, pairs.csv, results.md and the pictures of the runs in out_dir, or of those
    with these labels alone; returns the tables."""
    needed()
    runs, notes = read_runs(out_dir)
    runs = [r for r in runs if only is None or r.label in only]
    if not runs:
        raise UserError(notes[0] if notes else f"there are no runs in {out_dir}.")
    points = milestones(at_tokens)
    if points == "all":
        points = sorted({x["tokens"] for r in runs for x in r.evals if x["tokens"]})
    last = pairs(runs, baseline)
    at_end, trend, cells = compared(last), trends(last), means(runs, baseline)
    on_the_way = [p for tokens in points for p in compared(pairs(runs, baseline, tokens))]
    on_the_way.sort(key=lambda p: (p["depth"], order(p["label"]), p["tokens"]))
    before = compared(pairs(runs, baseline, 0)) if started(runs) else []
    finished = pd.DataFrame([r.row for r in runs if r.done])
    evaluated = pd.DataFrame([r.facts() | {k: x.get(k) for k in EVALUATED} for r in runs for x in r.evals])
    for name, frame in {"results.csv": finished, "evaluations.csv": evaluated,
                        "pairs.csv": pd.DataFrame(before + on_the_way + at_end)}.items():
        with atomic_write(out_dir / name) as f:
            frame.to_csv(f, index=False, lineterminator="\n")

    parts = []
    if len(cells):
        parts.append("Mean ± standard deviation over seeds, at the end of training.\n\n" + mean_table(cells, runs))
    if before:
        parts.append("Iteration 0, before any training: what the weights of --init_from are worth with each router.\n\n"
                     + mean_table(means(runs, baseline, 0), runs)
                     + "\nThe differences there, paired by seed.\n\n" + paired_table(before))
    if at_end:
        parts.append("Val loss minus that of the baseline, in nats a token (below 0 is better), paired by seed: the "
                     "mean of n differences, its 95 % t-interval, their standard deviation, how many are below 0, and "
                     "r, the correlation of the two losses over seeds. Detectable: the true difference that n such "
                     "pairs would show, by an interval without 0, in 80 of 100 repeats.\n\n" + paired_table(at_end))
    if trend:
        parts.append("Does it change with depth? The difference at the greatest depth minus that at the least, paired "
                     "by seed: below 0, a gain grows.\n\n" + paired_table(trend))
    if on_the_way:
        parts.append("The same on the way, at the evaluation nearest to so many tokens.\n\n"
                     + paired_table(on_the_way, tokens=True))
    if n := sum(p["n"] > 1 for p in [*before, *at_end, *trend, *on_the_way]):
        notes.append(f"Intervals of 95 % shown: {n}. If no router made a difference, {0.05 * n:.1f} of them would "
                     f"be without 0 by chance.")
    notes += [f"{r.folder.name} is not finished: iteration {r.evals[-1]['iter'] if r.evals else 0} of "
              f"{r.config['settings']['max_iters']}." for r in runs if not r.done]
    text = "\n".join(parts + (["\n".join(f"- {note}" for note in notes) + "\n"] if notes else []))
    with atomic_write(out_dir / "results.md") as f:
        f.write(text)
    return text + "\n" + pictures(out_dir, runs, cells, at_end, baseline)

# ---------------------------------------------------------------------------------------------------------------------
# pictures

MARKS = "os^Dv<>PX*hp"                   # with the lines below they tell cells apart without colour
LINES = ["-", "--", "-.", ":"]

def pyplot():
    import matplotlib
    matplotlib.use("Agg")                                               # no window
    import matplotlib.pyplot as plt
    return plt

def save(plt, path, figure) -> None:
    with atomic_write(path, "wb") as f:
        figure.savefig(f, dpi=110, format="png")
    plt.close(figure)

def pictures(out_dir: Path, runs: list[Run], cells: list[dict], at_end: list[dict], baseline: str) -> str:
    """depth.png and curves.png; returns the line that says so, or what is missing."""
    written = ["results.csv", "evaluations.csv", "pairs.csv", "results.md"]
    try:
        plt = pyplot()
    except ImportError:
        return f"{out_dir}: {', '.join(written)}. For pictures: pip install matplotlib, then --report {out_dir}"
    labels = sorted({r.label for r in runs}, key=order)
    colours = plt.get_cmap("tab20" if len(labels) > 10 else "tab10").colors
    styles = {label: {"color": colours[i % len(colours)], "marker": MARKS[i % len(MARKS)], "markersize": 5,
                      "linestyle": LINES[i % len(LINES)], "linewidth": 1.3} for i, label in enumerate(labels)}
    figures = {"curves.png": draw_curves(plt, runs, baseline, styles)}
    if len(cells):
        figures["depth.png"] = draw_depth(plt, runs, cells, at_end, baseline, styles)
    for name, figure in sorted(figures.items()):
        save(plt, out_dir / name, figure)
    return f"{out_dir}: {', '.join(written + sorted(figures))}"

def what(runs: list[Run]) -> str:
    """'pystdlib, 819,200 tokens, width 64': the data of a picture, by its first run that is done."""
    r = next((r for r in runs if r.done), runs[0])
    s = r.config["settings"]
    return f"{Path(s['dataset']).name}, {r.evals[-1]['tokens'] if r.evals else 0:,} tokens, width {s['n_embd']}"

def draw_depth(plt, runs, cells, at_end, baseline, styles):
    """Left: val loss against depth, mean and standard deviation, of cells with the same seeds at each depth. Right: the
    paired difference and its interval."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    depths = sorted({*cells.depth})
    right = pd.DataFrame([p for p in at_end if p["n"]], columns=["depth", "label", "mean", "bar", "n"])
    for k, (label, style) in enumerate(styles.items()):
        shift = min(0.7, 0.07 * len(styles)) * ((k + 0.5) / len(styles) - 0.5)                  # bars side by side
        n = ", ".join(map(str, right[right.label == label].n))
        for axis, points in zip(axes, (cells[cells.alike], right)):
            own = points[points.label == label]
            axis.errorbar([depths.index(d) + shift for d in own.depth], own["mean"], own.bar.fillna(0), capsize=3,
                          label=label + (f", n = {n}" if n else ""), **style)
    axes[0].set(ylabel="validation loss, nats a token", title="Validation loss (mean ± sd over the same seeds)")
    axes[1].axhline(0, color="black", linewidth=0.8)
    axes[1].set(ylabel="nats a token", title=f"Difference to {baseline}, paired (mean, 95 % interval)")
    for axis in axes:
        axis.set(xlabel="layers", xticks=range(len(depths)), xticklabels=depths, xlim=(-0.5, len(depths) - 0.5))
        axis.grid(alpha=0.3)
    figure.suptitle(what(runs))
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure

def draw_curves(plt, runs, baseline, styles):
    """A column for each depth, the second half of training (all of it, where runs start from a checkpoint). Above: val
    loss, mean and standard deviation, of cells with the same seeds. Below: the paired difference and its interval."""
    depths = sorted({r.depth for r in runs})
    figure, axes = plt.subplots(2, len(depths), figsize=(3.5 + 4.2 * len(depths), 7.5), layout="constrained",
                                squeeze=False, sharex="col")
    lines = {}                                                          # label -> its line, for the legend
    for column, depth in zip(axes.T, depths):
        there = [r for r in runs if r.depth == depth]
        ticks = sorted({x["tokens"] for r in there for x in r.evals})
        ticks = [x for x in ticks if started(runs) or x >= ticks[-1] / 2]
        above = [c | {"x": x} for x in ticks for c in means(there, baseline, x).to_dict("records") if c["alike"]]
        below = [p | {"x": x} for x in ticks for p in compared(pairs(there, baseline, x, near=0)) if p["n"]]
        for axis, points in zip(column, (above, below)):
            points = pd.DataFrame(points, columns=["label", "x", "mean", "bar"])
            for label, own in points.groupby("label", sort=False):
                lines[label], = axis.plot(own.x, own["mean"], **styles[label], label=label)
                bar = own.bar.fillna(0)
                axis.fill_between(own.x, own["mean"] - bar, own["mean"] + bar, color=styles[label]["color"], alpha=0.12,
                                  linewidth=0)
            axis.grid(alpha=0.3)
        column[0].set(title=f"{depth} layer{'s' * (depth > 1)}")
        column[1].axhline(0, color="black", linewidth=0.8)
        column[1].set(xlabel="tokens")
    axes[0, 0].set(ylabel="val loss, nats a token (mean ± sd)")
    axes[1, 0].set(ylabel="difference, paired (mean, 95 % interval)")
    figure.suptitle(what(runs))
    named = [label for label in styles if label in lines]
    figure.legend([lines[label] for label in named], named, loc="outside right upper", fontsize=8)
    return figure
