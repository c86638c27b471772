"""The tables and pictures of routing.py, from what it has measured; no model runs here.

A frame has a row for each run and read, as --csv writes it. A cell is a set of runs that differ in their seed alone:
its figures are means over seeds, and ± is half of a 95 % t-interval.
"""
import math
from itertools import product
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pandas as pd
from scipy.stats import t as student

from lab.report import signed, table
from nanodepth.files import UserError, atomic_write

ROWS = 12                                # of the table of one run; deeper stacks are averaged in bands
BESIDE = 6                               # cells beside each other in a table of --compare
PRINTED = 20                             # sources of a cell in the table of --ablate
FACTS = ["cell", "run", "router", "n_layer", "n_embd", "seed", "iter", "dataset", "tokens", "loss"]

def frame_of(results: list[dict]) -> pd.DataFrame:
    """The frame of routing.look_at's results: facts of the run, and what was measured of the read but its weights."""
    rows = []
    for r in results:
        facts = {k: r[k] for k in FACTS} | {"run": Path(r["run"]).resolve().name}
        label = unquote(r["cell"].removesuffix(f"-{r['n_layer']}x{r['n_embd']}").replace("+", ":"))     # as lab.sweep's
        of_stack = r.get("sources", {"read": None})                             # of one read alone
        reads = {read["read"]: read for read in r["reads"]}
        for reaching in r["inputs"]:
            read = reads.get(reaching["read"], {"sources": [], "choice": False})
            n = len(read["sources"])
            row = {"label": label, **facts, **reaching, "n": n, "equal": 1 / n if n else None}
            row |= {k: v for k, v in read.items() if not isinstance(v, list) and k != "js_bits"}
            if row["name"] == of_stack["read"]:
                row |= {"adjacent_cosine": np.mean(of_stack["adjacent_cosine"] or [math.nan]),
                        "effective_rank": of_stack["effective_rank"]}
            rows.append(row)
    return pd.DataFrame(rows)

def read_frame(path: str) -> pd.DataFrame:
    """What --csv wrote."""
    try:
        frame = pd.read_csv(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}.") from None
    except ValueError:                                                          # pandas' own are ValueErrors
        frame = pd.DataFrame()
    if not {"label", *FACTS, "read", "choice", "rms"} <= {*frame}:
        raise UserError(f"{path} is not a table that lab.routing has written with --csv.")
    return frame

# ---------------------------------------------------------------------------------------------------------------------
# tables

def number(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.3f}" if abs(x) >= 0.01 or x == 0 else f"{x:#.2g}"

def over_seeds(values: pd.Series) -> tuple[float, float]:
    """The mean, and half of its 95 % t-interval, NaN with one seed. values: one for each seed."""
    values = values.dropna()
    return values.mean(), values.sem() * student.ppf(0.975, len(values) - 1) if len(values) > 1 else math.nan

def with_interval(values: pd.Series, form=number) -> str:
    mean, half = over_seeds(values)
    return "" if math.isnan(mean) else form(mean) + (f" ± {form(half).lstrip('+')}" if half > 0 else "")

def with_n(cell: str, n: int) -> str:
    return cell + (f" ({n} seeds)" if n > 1 else "")

def banded(reads: list[dict], columns: dict[str, str], routes=()) -> str:
    """The reads in at most ROWS bands of neighbours: means of columns {key: title}, and for each of the routes, "" or
    "v_", the source with the largest mean weight."""
    band = np.arange(len(reads)) * min(ROWS, len(reads)) // len(reads)
    frame = pd.DataFrame(reads, index=band)
    shown = frame[list(columns)].astype(float).groupby(level=0).mean().map(number).rename(columns=columns)
    ends = frame["name"].groupby(level=0).agg(["first", "last"])
    shown.insert(0, "reads", [" .. ".join(dict.fromkeys(pair)) for pair in ends.values.tolist()])
    for route in routes:
        there = frame.dropna(subset=[route + "weights"])
        pairs = there[["sources", route + "weights"]].values
        weights = pd.DataFrame([dict(zip(*pair)) for pair in pairs], there.index).fillna(0).groupby(level=0).mean()
        most = weights.idxmax(axis=1) + weights.max(axis=1).map(" {:.2f}".format)
        shown["V heaviest" if route else "heaviest"] = most.reindex(shown.index, fill_value="")
    return table([*shown], shown.values.tolist())

def summary(result: dict) -> str:
    """The tables of one run: what its reads choose, and what reaches its sublayers."""
    reads, decoupled = [read for read in result["reads"] if read["choice"]], "mean_js_nats" in result
    if reads:
        columns = {"sharpness": "sharpness", "relative_entropy": "H / log n", "share_e": "e"}
        if any("." in name for read in reads for name in read["sources"]):
            columns["share_details"] = "details"
        columns |= {"v_sharpness": "V sharpness", "v_share_e": "V e", "js_nats": "JS, nats"} if decoupled else {}
        text = banded(reads, columns, ["", "v_"] if decoupled else [""])
        text += f"\nMean of {len(reads)} reads: sharpness {result['mean_sharpness']:.3f} (equal weights: " \
                f"{np.mean([1 / len(read['sources']) for read in reads]):.3f}), " \
                f"H / log n {result['mean_relative_entropy']:.3f}" \
                + (f", e {result['mean_share_e']:.3f}" if "mean_share_e" in result else "") + "\n"
        if decoupled:
            text += f"Divergence of the Q/K and V routes, mean of {sum('js_nats' in read for read in reads)} layers: " \
                    f"{result['mean_js_nats']:.4f} nats, {result['mean_js_bits']:.4f} bits\n"
        s = result["sources"]
        cosine = number(np.mean(s["adjacent_cosine"] or [math.nan])) or "-"
        text += f"The {len(s['names'])} sources of {s['read']}: mean adjacent cosine {cosine}, effective rank " \
                f"{s['effective_rank']:.2f}, norms {min(s['norms']):.2f} to {max(s['norms']):.2f}\n"
    elif "sources" in result:
        text = "Every read has a single source: there is nothing to choose from.\n"
    else:
        text = f"{result['router']} has no depth read, or none by self.reader(): no choice along depth is seen.\n"
    columns = {name + when: name + title for name in ("rms", "v_rms", "passed", "v_passed")
               for when, title in (("_first", " at first"), ("", ""))
               if any(name + when in row for row in result["inputs"])}
    return f"{text}\nWhat reaches the sublayers, before their norm\n\n{banded(result['inputs'], columns)}"

def of_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """What --compare lays side by side: a row for each run, (cell, run), and a column for each line of its table."""
    by, chosen = ["cell", "run"], frame[frame["choice"]]
    eighth = (4 * chosen["read"] // chosen["n_layer"]).clip(upper=7)            # the head's read is in the last
    columns = {f"sharpness, depth {k}/8 to {k + 1}/8": chosen[eighth == k].groupby(by)["sharpness"].mean()
               for k in range(8) if "sharpness" in frame}
    means = {"mean sharpness": "sharpness", "mean of equal weights": "equal", "mean H / log n": "relative_entropy",
             "divergence of Q/K and V, nats": "js_nats", "cosine of the newest two": "cosine"}
    columns |= {title: chosen.groupby(by)[name].mean() for title, name in means.items() if name in frame}
    columns |= {name.replace("_", " "): frame.groupby(by)[name].mean()
                for name in ("adjacent_cosine", "effective_rank", "loss") if name in frame}
    columns |= {title: frame.groupby(by)[name].min() for title, name in
                {"least passed, at first": "passed_first", "least passed": "passed"}.items() if name in frame}
    return pd.DataFrame(columns, index=frame.groupby(by, sort=False).size().index)

def comparison(frame: pd.DataFrame) -> str:
    """The cells side by side; more than BESIDE in one table after another."""
    cells = [(cell, runs) for cell, runs in of_runs(frame).groupby(level="cell", sort=False)]
    texts = []
    for part in (cells[i:i + BESIDE] for i in range(0, len(cells), BESIDE)):
        forms = {title: "{:.4f}".format if title == "loss" else number for title in part[0][1]}
        rows = [[title, *(with_interval(runs[title], form) for _, runs in part)] for title, form in forms.items()]
        head = ["", *(with_n(cell, len(runs)) for cell, runs in part)]
        texts.append(table(head, [row for row in rows if any(row[1:])]))
    return "\n".join(texts)

def ablation_text(results: list[dict]) -> str:
    """For each cell its sources, the largest mean effect first."""
    text = "A source masked out, the rest renormalised; effect: the loss minus that without a mask, nats a token\n"
    frame = pd.DataFrame([{"cell": r["cell"], "run": r["run"], **a} for r in results for a in r["ablations"]])
    if frame.empty:
        return "Nothing to mask: no read has a choice.\n"
    for cell, masks in frame.groupby("cell", sort=False):
        groups = list(masks.groupby(["source", "masked_in"], sort=False))
        groups.sort(key=lambda group: -group[1]["effect"].mean())
        forms = {"weight": number, "loss": "{:.4f}".format, "effect": signed}
        rows = [[*names, *(with_interval(x[name], form) for name, form in forms.items())] for names, x in groups]
        text += f"\n{with_n(cell, masks['run'].nunique())}\n\n" + table(["source", "masked in", *forms], rows[:PRINTED])
        text += f"and {len(rows) - PRINTED} more; --json has them all\n" if len(rows) > PRINTED else ""
    return text

# ---------------------------------------------------------------------------------------------------------------------
# pictures. Colours go from dark to light, and cells have markers too, so that grey paper tells them apart.

MARKERS = "os^Dvx*P<>"
SHARP = {0.2: "0.2\ncumulative,\ndeep layers", 0.6: "0.6\ndelta"}       # in the Delta paper (2605.18855)
DIVERGENCE = {0.218: "0.218\nRD's paper"}                       # mean over layers at 120M (2608.01075), unit not said

def pyplot(flag: str):
    try:
        import matplotlib
        matplotlib.use("Agg")                                                   # no window
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError(f"--{flag} needs matplotlib: pip install matplotlib. Without --{flag} it is not needed."
                        ) from None
    return plt

def write(plt, path: str, figure) -> None:
    with atomic_write(path, "wb") as f:
        figure.savefig(f, dpi=100, format="png")
    plt.close(figure)

def references(axis, lines: dict[float, str]) -> None:
    """Thin lines, and beside the axes what they are."""
    for y, text in lines.items():
        axis.axhline(y, color="0.4", linewidth=0.7, linestyle=(0, (1, 2)))
        axis.annotate(text, (1, y), xycoords=("axes fraction", "data"), xytext=(2, 0), textcoords="offset points",
                      va="center", fontsize=6)
    axis.set_ylim(0, max(axis.get_ylim()[1], 1.1 * max(lines)))

def by_layer(figure, axes, note: str, most: int) -> None:
    """What panels over layers share: grid, labels, and one legend below them all, with a note."""
    found = {}
    for axis in axes:
        axis.set_xlabel("layer", fontsize=8)
        axis.grid(alpha=0.3)
        axis.title.set_fontsize(8)
        found |= {text: line for line, text in zip(*axis.get_legend_handles_labels())}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=most, fontsize=8, title=note,
                  title_fontsize=8)

def every(points: int) -> int:
    """How many points of a line there are to a marker."""
    return max(1, points // 12)

def heat_map(axis, rows: list[tuple[str, dict]], columns: list[str], title: str, gap=False) -> None:
    """Reads down, sources across; hatched where a read does not have the source. rows: (name, {source: weight})."""
    from matplotlib.colors import PowerNorm
    grid = np.array([[weights.get(name, math.nan) for name in columns] for _, weights in rows])
    reach = np.nanmax(np.abs(grid)) or 1
    style = {"cmap": "viridis", "norm": PowerNorm(0.5, 0, 1)}
    if gap:
        style = {"cmap": "cividis", "vmin": -reach, "vmax": reach}
    axis.patch.set(facecolor="white", edgecolor="0.8", hatch="////")
    image = axis.imshow(grid, aspect="auto", interpolation="nearest", **style)
    places = [*range(0, len(columns) - 1, math.ceil(len(columns) / 24)), len(columns) - 1]      # the last is PC, if any
    axis.set_xticks(places, [columns[i] for i in places], fontsize=7, rotation=90)
    places = range(0, len(rows), math.ceil(len(rows) / 24))
    axis.set_yticks(places, [rows[i][0] for i in places], fontsize=7)
    axis.set_title(title, fontsize=9)
    bar = axis.figure.colorbar(image, ax=axis, orientation="horizontal", shrink=0.9, pad=0.02,
                               ticks=None if gap else [0, 0.05, 0.2, 0.5, 1])
    bar.ax.tick_params(labelsize=7)

def one_run(plt, result: dict):
    """Above, the weights: a row for each layer, the same in every map. Below, what was measured of them, by layer."""
    reads, L = result["reads"], result["n_layer"]
    chosen = [read for read in reads if read["choice"]]
    if not chosen:
        raise UserError(f"--png: {result['router']} has no read with a choice; --rms_png draws what it hands on.")
    names = list(dict.fromkeys(name for read in reads for name in read["sources"]))
    names.sort(key=lambda name: name.startswith("PC"))                          # the block in progress last
    attention = [read for read in reads if read["read"] % 2 == 0 and read["read"] < 2 * L]
    mlps, decoupled = [read for read in reads if read not in attention], "mean_js_nats" in result
    def weights(read, route):
        return dict(zip(read["sources"], read[route + "weights"]))
    maps = {f"attention{', Q/K' * decoupled}": [(read["name"], weights(read, "")) for read in attention]}
    if decoupled:
        maps["attention, V"] = [(read["name"], weights(read, "v_")) for read in attention]
        maps["V minus Q/K"] = [(name, {source: v[source] - qk[source] for source in v})
                               for (name, qk), (_, v) in zip(*maps.values())]
    maps["MLPs, head"] = [(read["name"], weights(read, "")) for read in mlps]

    figure = plt.figure(figsize=(4.2 * max(3, len(maps)), 9), layout="constrained")
    figure.suptitle(f"{result['run']}: {result['router']}, {L} layers of {result['n_embd']}, iteration {result['iter']}"
                    f"; means over {result['tokens']:,} validation tokens of {result['dataset']}", fontsize=10)
    above, below = figure.subfigures(2, 1, height_ratios=[1.7, 1])
    for axis, (title, rows) in zip(above.subplots(1, len(maps)), maps.items()):
        heat_map(axis, rows, names, "weights: " * (" minus" not in title) + title, gap=" minus" in title)

    lines = {f"attention{', Q/K' * decoupled}": (attention, "", "o-", "C0")}
    lines |= {"attention, V": (attention, "v_", "s--", "C1")} if decoupled else {}
    lines["MLPs, head"] = mlps, "", "^:", "C2"
    def draw(axis, name, title, **limits):
        for label, (part, route, style, colour) in lines.items():
            points = [(read["read"] / 2, read[route + name]) for read in part
                      if read["choice"] and route + name in read]
            if points:
                axis.plot(*zip(*points), style, color=colour, linewidth=1.2, markersize=4, markevery=every(len(points)),
                          label=label)
        axis.set(title=title, **limits)
    axes = below.subplots(1, 3 + decoupled)
    draw(axes[0], "sharpness", "sharpness: mean of the largest weight", ylim=(0, 1))
    axes[0].plot([read["read"] / 2 for read in chosen], [1 / len(read["sources"]) for read in chosen], color="0.6",
                 linewidth=1, label="equal weights")
    references(axes[0], SHARP)
    draw(axes[1], "relative_entropy", "entropy / log n: 1 is uniform", ylim=(0, 1.05))
    draw(axes[2], "cosine", "cosine of the newest source and the one before", ylim=(None, 1.02))
    if decoupled:
        draw(axes[3], "js_nats", f"divergence of Q/K and V: mean {result['mean_js_nats']:.3f} nats", ylim=(0, None))
        references(axes[3], DIVERGENCE)
    by_layer(below, axes, None, 6)
    return figure

def panels(plt, frame: pd.DataFrame, columns: dict[str, tuple[str, dict]], note: str):
    """A row for each size of model, and a column for each {measure: (title, settings of the axis)}: by layer, the mean
    of every cell over the seeds that all have, in a band of its interval; attention and MLPs apart."""
    sizes, labels = frame.groupby(["n_layer", "n_embd"]), list(dict.fromkeys(frame["label"]))
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.75, len(labels)))
    figure, axes = plt.subplots(len(sizes), len(columns), figsize=(4.3 * len(columns), 1.2 + 3 * len(sizes)),
                                layout="constrained", squeeze=False)
    for row, ((n_layer, n_embd), size) in zip(axes, sizes):
        seeds = sorted(set.intersection(*(set(part["seed"]) for _, part in size.groupby("label"))))
        size = size[size["seed"].isin(seeds)] if seeds else size
        n = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else "each cell other seeds"
        for axis, (name, (title, settings)) in zip(row, columns.items()):
            bands, kinds = [], [("-", name, 0), ("--", name, 1), (":", f"v_{name}", 0)]     # attention, MLPs, values
            for (line, measure, parity), label in product(kinds, labels):
                part = size[(size["label"] == label) & (size["read"] % 2 == parity) & (size["read"] < 2 * n_layer)]
                part = part.dropna(subset=[measure]) if measure in size else part[:0]
                if part.empty:
                    continue
                x, values = zip(*part.groupby("read")[measure])
                middle, half = np.array([over_seeds(value) for value in values]).T
                x, k, step = np.array(x) / 2, labels.index(label), every(len(x))
                style = {"linewidth": 1, "alpha": 0.6}
                if line == "-":
                    style = {"label": label, "marker": MARKERS[k % len(MARKERS)], "markersize": 4,
                             "markevery": (k % step, step)}
                    bands.append((x, middle - half, middle + half, colours[k]))
                axis.plot(x, middle, line, color=colours[k], **style)
            axis.set(title=f"{title}\n{n_layer} layers of {n_embd}, {n}", **settings)
            limits = axis.get_ylim()                                            # few seeds make wide bands
            for *band, colour in bands:
                axis.fill_between(*band, color=colour, alpha=0.15, linewidth=0)
            axis.set_ylim(limits)
    tokens, data, iterations = (" or ".join(map(str, sorted({*frame[name]}))) for name in ("tokens", "dataset", "iter"))
    if any(f"v_{name}" in frame for name in columns):
        note += "; dots: values of attention"
    by_layer(figure, axes.flat, f"Means over {tokens} validation tokens of {data} at iteration {iterations}, then over "
             f"seeds, in a band of 95 %. Lines with markers: attention; dashes: MLPs{note}.", 6)
    return figure, axes

def compared(plt, frame: pd.DataFrame):
    """What the reads of several runs choose."""
    frame = frame[frame["choice"]]
    if frame.empty:
        raise UserError("--png: these runs have no read with a choice; --rms_png draws what their routers hand on.")
    columns = {"sharpness": ("sharpness: mean of the largest weight", {"ylim": (0, 1)}),
               "relative_entropy": ("entropy / log n: 1 is uniform", {"ylim": (0, 1.05)}),
               "cosine": ("cosine of the newest source and the one before", {})}
    if "js_nats" in frame and frame["js_nats"].notna().any():
        columns["js_nats"] = "divergence of the Q/K and V routes, nats", {"ylim": (0, None)}
    figure, axes = panels(plt, frame, columns, "; grey: equal weights")
    for row, (_, size) in zip(axes, frame.groupby(["n_layer", "n_embd"])):
        for _, equal in size.drop_duplicates(["label", "read"]).groupby("label"):
            row[0].plot(equal["read"] / 2, equal["equal"], color="0.6", linewidth=0.8, zorder=1)
        references(row[0], SHARP)
        for axis in row[3:]:
            references(axis, DIVERGENCE)
    return figure

def reaching(plt, frame: pd.DataFrame):
    """rms of what sublayers read, and how much of it passes their norm, with the first weights and now."""
    titles = {"rms": ("rms of h_l", {"yscale": "log"}),
              "passed": ("share that passes the norm's epsilon", {"ylim": (0, 1.05)})}
    columns = {name + when: (f"{title}, {words}", settings) for name, (title, settings) in titles.items()
               for when, words in (("_first", "first weights"), ("", "trained")) if name + when in frame}
    return panels(plt, frame, columns, "")[0]
