"""What a folder of runs says: which two of them are a pair, the statistics of the pairs, tables, CSV files, pictures.

Runs with one label, depth and seed stand in FOLDER/LABEL-LxD-sSEED (`folder_name`); config.json and log.jsonl are all
that is read of them. A difference is taken between two runs that are equal in everything but the router and what their
labels name (`unlike`); whatever is left out of a table is named in its last column, with the reason.
"""
import json
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import quote, unquote

try:
    import matplotlib
    import pandas as pd
    from matplotlib.figure import Figure
    from scipy import stats
except ImportError:
    matplotlib = Figure = pd = stats = None

import train
from nanodepth.files import UserError, atomic_write, router_name
from nanodepth.runs import NO_MATTER, iter_of
from nanodepth.settings import convert
from model import ROUTERS, GPTConfig

FINGERPRINT = {"data": "data", "start": "starting weights", "torch": "torch", "dtype": "dtype", "device": "device",
               "changed": "settings changed on the way", "model": "model.py", "router": "code of the router"}
KINDS = {f.name: f.type for f in (*fields(GPTConfig), *fields(train.TrainConfig))}

def needed() -> None:
    """UserError when the tables and pictures could not be made: said before anything is trained."""
    if pd is None:
        raise UserError("Tables and pictures need pandas, scipy and matplotlib: pip install -r requirements-extra.txt")

# ---------------------------------------------------------------------------------------------------------------------
# a run

@dataclass
class Run:
    label: str                           # "block", "rd:rd_control=tied"
    depth: int
    seed: int
    config: dict                         # config.json
    evals: list[dict]                    # the evaluations in log.jsonl
    folder: Path
    odd: str | None = None               # how it differs from most runs of its cell, so that it counts in no mean

    @property
    def done(self) -> bool:
        return bool(self.evals) and self.evals[-1]["iter"] >= (train.DEFAULTS | self.config["settings"])["max_iters"]

    @property
    def on_the_way(self) -> list[dict]:
        """Its evaluations, but for that at its end."""
        return self.evals[:-1] if self.done else self.evals

    @property
    def mark(self) -> dict:
        return self.config.get("fingerprint") or {}

    def row(self, line: dict) -> dict:
        """A line of evaluations.csv: an evaluation, and what a reader may group it by."""
        s, mark = train.DEFAULTS | self.config["settings"], self.mark
        router, *own = self.label.split(":")
        return {"label": self.label, "router": router, "settings": " ".join(own), "depth": self.depth,
                "seed": self.seed, **{name: s[name] for name in ("n_embd", "dataset", "learning_rate", "init_from")},
                "params": self.config["params"], **{name: mark.get(name) for name in ("torch", "device", "dtype")},
                **{f"{name}_digest": mark.get(name) for name in ("data", "start", "model", "router")},
                "run": self.folder.name, "odd": self.odd,
                **{name: line.get(name) for name in ("iter", "tokens", "val_loss", "val_bpb", "train_loss")}}

def folder_name(label: str, depth: int, width: int, seed: int) -> str:
    """rd:rd_control=tied at 12 layers of 64, seed 0 -> rd+rd_control=tied-12x64-s0"""
    return f"{quote(label, safe=':=').replace(':', '+')}-{depth}x{width}-s{seed}"

def settings_in(label: str) -> dict:
    """rd:rd_control=tied -> {"rd_control": "tied"}"""
    return dict(x.split("=", 1) for x in label.split(":")[1:])

def reckoned(value: str, depth: int) -> str:
    """'n_layer/2' at 12 layers -> '6'; what is no such expression stays as it is."""
    m = re.fullmatch(r"n_layer(?:/([1-9]\d*))?", value)
    if m and depth % int(m[1] or 1):
        raise UserError(f"{value} is no whole number at {depth} layers.")
    return str(depth // int(m[1] or 1)) if m else value

def read_run(folder: Path) -> Run | None:
    """A run's settings and log; None where none has begun. A last line that a kill has cut short does not count."""
    name = re.fullmatch(r"(.+)-\d+x\d+-s\d+", folder.name)
    if not name or not (folder / "config.json").exists():
        return None
    label = unquote(name[1].replace("+", ":"))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        s = train.DEFAULTS | config["settings"]
        holds = [router_name(s["router"]), s["n_layer"], s["n_embd"], s["seed"]]
        false = [f"{k} {s[k]}" for k, v in settings_in(label).items()
                 if convert(KINDS[k], reckoned(v, s["n_layer"]), k) != s[k]]
        with open(folder / "log.jsonl", "rb") as f:
            *whole, last = [b"{}", *f]
        lines = [json.loads(line) for line in whole + [last] * (iter_of(last) < math.inf)]
        run = Run(label, s["n_layer"], s["seed"], config, [x for x in lines if "val_loss" in x], folder)
        figures = [x[name] for x in run.evals for name in ("iter", "tokens", "val_loss")]
        if not all(map(math.isfinite, [s["max_iters"], *figures])):
            raise ValueError
        run.row({})
    except UserError as e:
        raise UserError(f"{folder} is not what it is called: {e}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder} is damaged: its config.json or log.jsonl cannot be read. "
                        f"Delete it and run it again.") from None
    if false or folder.name != folder_name(":".join([holds[0], *label.split(":")[1:]]), *holds[1:]):
        raise UserError(f"{folder} is not what it is called: it holds {folder_name(*holds)}"
                        f"{' with ' * bool(false)}{', '.join(false)}. Rename it.")
    return run

def read_runs(out_dir: Path) -> tuple[list[Run], list[str]]:
    """Every run in a folder, in the order of the tables, and a sentence for each that cannot be read."""
    runs, damaged = [], []
    for folder in sorted(out_dir.iterdir()):
        try:
            if run := read_run(folder):
                runs.append(run)
        except UserError as e:
            damaged.append(str(e))
    runs.sort(key=lambda r: (r.depth, order(r.label), r.seed))
    for label, depth in {(r.label, r.depth): None for r in runs}:       # odd: unlike the one that most are like
        own = [r for r in runs if (r.label, r.depth) == (label, depth)]
        others = [r for r in runs if r.depth == depth and r.label != label]
        typical = max(own, key=lambda r: (sum(not unlike(r, other, one_cell=True) for other in own),
                                          sum(not unlike(r, other) for other in others)))
        for r in own:
            r.odd = None if r is typical else unlike(r, typical, one_cell=True)
    return runs, damaged

def order(label: str) -> tuple:
    """Rows come in the order of model.ROUTERS, a router's variants after it."""
    names, router = list(ROUTERS), label.split(":")[0]
    return names.index(router) if router in names else len(names), label

# ---------------------------------------------------------------------------------------------------------------------
# what is a pair

def shown(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value).replace('"', "").replace("null", "none")
    return text[:8] if re.fullmatch("[0-9a-f]{16,}", text) else text[:60]

def unlike(a: Run, b: Run, one_cell: bool = False) -> str | None:
    """Why two runs may not be compared: the first thing in which they differ, and both values. None when they may.

    A setting may differ when their labels say so, and when it changes no number; in the runs of one cell the router's
    code must be the same too, but each seed may start from weights of its own.
    """
    for r in (a, b):
        if FINGERPRINT.keys() - r.mark.keys() or "tokens_per_step" not in r.config:
            return f"{r.folder.name} has no fingerprint: it was trained by an older version"
    mine, theirs = settings_in(a.label), settings_in(b.label)
    may = {k for k in mine | theirs if mine.get(k) != theirs.get(k) or "n_layer" in mine[k] and a.depth != b.depth}
    s, t = (train.DEFAULTS | r.config["settings"] for r in (a, b))
    m, n = (r.config.get("model", {}) for r in (a, b))                  # n_blocks none is a number there
    for name in s:
        if name not in {*may, *NO_MATTER, "n_layer", "seed"} and s[name] != t.get(name) and (
                name not in m or m[name] != n.get(name)):
            return f"{name} {shown(s[name])}, not {shown(t.get(name))}"
    for name, text in FINGERPRINT.items():
        v, w = a.mark.get(name), b.mark.get(name)
        if name == "start" and one_cell:
            v, w = (x and "a checkpoint" for x in (v, w))
        if v != w and name not in may and (name != "router" or one_cell):
            return f"{text} {shown(v)}, not {shown(w)}"
    v, w = (r.config["tokens_per_step"] for r in (a, b))
    return None if v == w else f"{v} tokens a step, not {w}"

def against(label: str, there: set[str], baseline: str) -> str | None:
    """Which label a label is compared with: of the baseline's router, and of what it names itself as much as there is,
    so that wav:learning_rate=1e-3 meets block:learning_rate=1e-3. None for a label that is a baseline itself."""
    router, *own = baseline.split(":")
    most = {*own, *label.split(":")[1:]}
    def fits(x):
        return x.split(":")[0] == router and {*own} <= {*x.split(":")[1:]} <= most
    found = [x for x in sorted(there) if fits(x) and x != label]
    return max(found, key=lambda x: x.count(":")) if found else None if fits(label) else baseline

def at(run: Run, tokens: int | None) -> dict | None:
    """A run's evaluation on the way, after so many tokens; for None that at its end. None where there is none."""
    if tokens is None:
        return run.evals[-1] if run.done else None
    return next((x for x in run.on_the_way if x["tokens"] == tokens), None)

def ticks(runs: list[Run]) -> list[int]:
    """After how many tokens there are evaluations on the way."""
    return sorted({x["tokens"] for r in runs for x in r.on_the_way})

def pairs(runs: list[Run], baseline: str, tokens: int | None = None) -> "pd.DataFrame":
    """A row for each run that should have its baseline beside it: both losses (of `at`) and their difference, or why
    there is none."""
    there, rows = {}, []
    for r in sorted(runs, key=lambda r: r.odd is None):                 # of two with one seed the one that is not odd
        there[r.label, r.depth, r.seed] = r

    for run in runs:
        other = against(run.label, {label for label, depth, _ in there if depth == run.depth}, baseline)
        base = there.get((other, run.depth, run.seed))
        line, its = at(run, tokens), base and at(base, tokens)
        if not other or tokens is not None and not (line and its):
            continue
        why = (run.odd or not base and f"no {other}" or base.odd and f"{base.folder.name} is left out: {base.odd}"
               or not line and f"{run.folder.name} is not finished"
               or not its and f"{base.folder.name} has not come so far" or unlike(run, base)
               or line["tokens"] != its["tokens"] and "max_iters" not in settings_in(run.label)     # else it says so
               and f"{line['tokens']:,} tokens, not {its['tokens']:,}" or None)
        loss, its_loss = (math.nan, math.nan) if why else (line["val_loss"], its["val_loss"])
        rows.append([run.depth, run.label, other, run.seed, run, base, line["tokens"] if line else math.nan, loss,
                     its_loss, loss - its_loss, why])
    return pd.DataFrame(rows, columns=["depth", "label", "against", "seed", "run", "base_run", "tokens", "loss", "base",
                                       "difference", "why"])

# ---------------------------------------------------------------------------------------------------------------------
# statistics

def means(runs: list[Run], baseline: str, tokens: int | None = None) -> "pd.DataFrame":
    """A row for each depth and label: mean and standard deviation (bar) of the losses (of `at`) of its runs that are
    not odd. why: what forbids that the mean is drawn beside that of the baseline (else, of the first cell): other
    seeds, or runs that are no pair."""
    kept = [(r, line) for r in runs if not r.odd and (line := at(r, tokens))]
    lines = pd.DataFrame([r.row(line) for r, line in kept],
                         columns=["depth", "label", "tokens", "seed", "params", "val_loss"])
    found = lines.astype({"val_loss": float}).groupby(["depth", "label"], sort=False).agg(
        tokens=("tokens", "max"), seeds=("seed", tuple), params=("params", "mean"), mean=("val_loss", "mean"),
        bar=("val_loss", "std"))
    why, cells = [], {key: {r.seed: r for r, _ in kept if (r.depth, r.label) == key} for key in found.index}
    for (depth, _), own in cells.items():
        base = cells.get((depth, baseline)) or next(x for (d, _), x in cells.items() if d == depth)
        no_pair = [text for seed in own if seed in base and (text := unlike(own[seed], base[seed]))]
        other = f"other seeds than {' '.join(map(str, base))}: see the pairs" * (own.keys() != base.keys())
        why.append(no_pair[0] if no_pair else other)
    return found.reset_index().assign(why=why)

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

COMPARED = ["depth", "label", "against", "tokens", "n", "mean", "sd", "low", "high", "bar", "wins", "detectable", "r",
            "left_out"]

def compared(rows: "pd.DataFrame") -> "pd.DataFrame":
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
    return pd.DataFrame(found, columns=COMPARED)

def trends(rows: "pd.DataFrame") -> "pd.DataFrame":
    """How a label's difference changes from its least to its greatest depth: `paired` over the seeds that have both of
    difference(greatest) - difference(least), below 0 where the gain grows."""
    found = []
    for (label, other), group in rows.groupby(["label", "against"], sort=False):
        by_depth = dict(list(group[group.why.isna()].groupby("depth")))
        if len(by_depth) < 2:
            continue
        first, last = (by_depth[depth].set_index("seed") for depth in (min(by_depth), max(by_depth)))
        why = (unlike(last.run.iloc[0], first.run.iloc[0], one_cell=True)
               or unlike(last.base_run.iloc[0], first.base_run.iloc[0], one_cell=True))
        change = [] if why else (last.difference - first.difference).dropna()
        found.append({"label": label, "against": other, "depth": f"{min(by_depth)} to {max(by_depth)}",
                      "tokens": last.tokens.max(), **paired(change),
                      "left_out": why or "no seed has both" * (not len(change))})
    return pd.DataFrame(found, columns=COMPARED)

# ---------------------------------------------------------------------------------------------------------------------
# tables

def signed(x: float) -> str:
    """+0.0123, and never -0.0000."""
    return f"{round(x, 4) + 0.0:+.4f}"

def plain(x: float, form: str = ".4f") -> str:
    return "-" if math.isnan(x) else f"{x:{form}}"

def table(head: list[str], rows: list[list]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"

PAIRED = ["n", "difference", "95 % interval", "sd", "wins", "r", "detectable", "left out"]

def paired_table(found: "pd.DataFrame") -> str:
    rows = []
    for p in found.itertuples():
        interval = f"{signed(p.low)} .. {signed(p.high)}" if p.n > 1 else "-"
        row = [signed(p.mean), interval, plain(p.sd), f"{p.wins} of {p.n}", plain(p.r, ".2f"), plain(p.detectable)]
        rows.append([p.label, p.against, p.depth, plain(p.tokens, ",.0f"), p.n, *(row if p.n else "------"),
                     p.left_out])
    return table(["router", "against", "layers", "tokens", *PAIRED], rows)

def mean_table(cells: "pd.DataFrame", runs: list[Run]) -> str:
    rows = []
    for c in cells.itertuples():
        notes = [f"{r.folder.name}: {r.odd}" for r in runs if r.odd and (r.label, r.depth) == (c.label, c.depth)]
        notes += [c.why] * bool(c.why)
        rows.append([c.label, c.depth, f"{c.tokens:,}", " ".join(map(str, c.seeds)), f"{c.params:,.0f}",
                     f"{plain(c.mean)} ± {plain(c.bar)}", "; ".join(notes)])
    return table(["router", "layers", "tokens", "seeds", "parameters", "val loss", "note"], rows)

def together(frames) -> "pd.DataFrame":
    """Frames below each other. An empty one would make objects of the others' numbers."""
    frames = list(frames)
    return pd.concat([x for x in frames if len(x)] or frames[:1])

def report(out_dir: Path, baseline: str, only: set[str] | None = None) -> str:
    """Write results.csv, evaluations.csv, pairs.csv, results.md and the pictures of the runs in out_dir, or of those
    with these labels alone; returns the tables, which are of the end, and of the start where that is a checkpoint."""
    runs, notes = read_runs(out_dir)
    runs = [r for r in runs if only is None or r.label in only]
    if not runs:
        raise UserError(notes[0] if notes else f"there are no runs in {out_dir}.")
    at_end = pairs(runs, baseline)
    every = {x: compared(pairs(runs, baseline, x)) for x in ticks(runs)} | {None: compared(at_end)}
    started = any(r.mark.get("start") for r in runs)
    told = [x for x in every if x is None or (x == 0 and started)]
    cells, found = together(means(runs, baseline, x) for x in told), together(every[x] for x in told)
    trend = trends(at_end)
    frames = {"results": pd.DataFrame([r.row(r.evals[-1]) for r in runs if r.done]),
              "evaluations": pd.DataFrame([r.row(line) for r in runs for line in r.evals]),
              "pairs": together(every.values())}
    for name, frame in frames.items():
        with atomic_write(out_dir / f"{name}.csv") as f:
            frame.to_csv(f, index=False, lineterminator="\n")

    parts = []
    if len(cells):
        parts.append("Val loss: mean ± standard deviation over seeds.\n\n" + mean_table(cells, runs))
    if len(found):
        parts.append("Val loss minus that of the baseline, in nats a token (below 0 is better), paired by seed: the "
                     "mean of n differences, its 95 % t-interval, their standard deviation, how many are below 0, and "
                     "r, the correlation of the two losses over seeds. Detectable: the true difference that n such "
                     "pairs would show, by an interval without 0, in 80 of 100 repeats.\n\n" + paired_table(found))
    if len(trend):
        parts.append("Does it change with depth? The difference at the greatest depth minus that at the least, paired "
                     "by seed: below 0, a gain grows.\n\n" + paired_table(trend))
    if n := (found.n > 1).sum() + (trend.n > 1).sum():
        notes.append(f"Intervals of 95 % shown: {n}. If no router made a difference, {0.05 * n:.1f} of them would "
                     f"be without 0 by chance.")
    notes += [f"{r.folder.name} is not finished: iteration {r.evals[-1]['iter'] if r.evals else 0} of "
              f"{r.config['settings']['max_iters']}." for r in runs if not r.done]
    text = "\n".join(parts) + "".join(f"\n- {note}" for note in notes) + "\n"
    with atomic_write(out_dir / "results.md") as f:
        f.write(text)
    written = [*(f"{name}.csv" for name in frames), "results.md", *pictures(out_dir, runs, baseline)]
    return f"{text}\n{out_dir}: {', '.join(written)}"

# ---------------------------------------------------------------------------------------------------------------------
# pictures

MARKS = "os^Dv<>PX*h"                    # 11, with the 4 lines below: they tell 44 cells apart without colour
LINES = ["-", "--", "-.", ":"]

def save(path, figure) -> None:
    with atomic_write(path, "wb") as f:
        figure.savefig(f, dpi=110, format="png")

def pictures(out_dir: Path, runs: list[Run], baseline: str) -> list[str]:
    """Draw depth.png and curves.png; returns their names."""
    labels = sorted({r.label for r in runs}, key=order)
    colours = matplotlib.colormaps["tab20" if len(labels) > 10 else "tab10"].colors
    styles = {label: {"color": colours[i % len(colours)], "marker": MARKS[i % len(MARKS)], "markersize": 5,
                      "linestyle": LINES[i % len(LINES)], "linewidth": 1.3} for i, label in enumerate(labels)}
    figures = {"curves.png": draw_curves(runs, baseline, styles), "depth.png": draw_depth(runs, baseline, styles)}
    r = next((r for r in runs if r.done), runs[0])
    s, tokens = r.config["settings"], r.evals[-1]["tokens"] if r.evals else 0
    for name, figure in figures.items():
        figure.suptitle(f"{Path(s['dataset']).name}, {tokens:,} tokens, width {s['n_embd']}", x=0.02, ha="left")
        save(out_dir / name, figure)
    return list(figures)

def drawn(runs: list[Run], baseline: str, points: list) -> list["pd.DataFrame"]:
    """What stands in a picture, after so many tokens each: means that may stand side by side, and differences."""
    cells = together(means(runs, baseline, x) for x in points)
    found = together(compared(pairs(runs, baseline, x)) for x in points)
    return [cells[cells.why == ""], found[found.n > 0]]

def draw_depth(runs, baseline, styles):
    """Left: val loss against depth, mean and standard deviation. Right: the paired difference and its interval."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    axes = figure.subplots(1, 2)
    depths = sorted({r.depth for r in runs})
    left, right = drawn(runs, baseline, [None])
    for k, (label, style) in enumerate(styles.items()):
        shift = min(0.7, 0.07 * len(styles)) * ((k + 0.5) / len(styles) - 0.5)                  # bars side by side
        n = ", ".join(map(str, right[right.label == label].n))
        for axis, points in zip(axes, (left, right)):
            own = points[points.label == label]
            axis.errorbar([depths.index(d) + shift for d in own.depth], own["mean"], own.bar.fillna(0), capsize=3,
                          label=label + (f", n = {n}" if n else ""), **style)
    axes[0].set(ylabel="validation loss, nats a token", title="Validation loss (mean ± sd over the same seeds)")
    axes[1].axhline(0, color="black", linewidth=0.8)
    axes[1].set(ylabel="nats a token", title=f"Difference to {baseline}, paired (mean, 95 % interval)")
    for axis in axes:
        axis.set(xlabel="layers", xticks=range(len(depths)), xticklabels=depths, xlim=(-0.5, len(depths) - 0.5))
        axis.grid(alpha=0.3)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure

def draw_curves(runs, baseline, styles):
    """A column for each depth, the second half of training (all of it, where runs start from a checkpoint). Above: val
    loss, mean and standard deviation, of cells with the same seeds. Below: the paired difference and its interval."""
    depths = sorted({r.depth for r in runs})
    figure = Figure(figsize=(3.5 + 4.2 * len(depths), 7.5), layout="constrained")
    axes = figure.subplots(2, len(depths), squeeze=False, sharex="col")
    lines = {}                                                          # label -> its line, for the legend
    for column, depth in zip(axes.T, depths):
        own = [r for r in runs if r.depth == depth]
        half = max([x["tokens"] for r in own for x in r.evals if not r.mark.get("start")], default=0) / 2
        for axis, points in zip(column, drawn(own, baseline, [*(x for x in ticks(own) if x >= half), None])):
            for label, part in points.groupby("label", sort=False):
                lines[label], = axis.plot(part.tokens, part["mean"], **styles[label], label=label)
                low, high = (part["mean"] + sign * part.bar.fillna(0) for sign in (-1, 1))
                axis.fill_between(part.tokens, low, high, color=styles[label]["color"], alpha=0.12, linewidth=0)
            axis.grid(alpha=0.3)
        column[0].set(title=f"{depth} layer{'s' * (depth > 1)}")
        column[1].axhline(0, color="black", linewidth=0.8)
        column[1].set(xlabel="tokens")
    axes[0, 0].set(ylabel="val loss, nats a token (mean ± sd)")
    axes[1, 0].set(ylabel="difference, paired (mean, 95 % interval)")
    named = [label for label in styles if label in lines]
    figure.legend([lines[label] for label in named], named, loc="outside right upper", fontsize=8)
    return figure
