"""The tables and pictures of routing.py, from what it has measured; no model runs here.

A frame has a row for each run and read, as --csv writes it. Runs of one cell differ in their seed alone: its figures
are means over seeds, and ± is half of a 95 % t-interval.
"""
import math
from itertools import product
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from lab.report import MARKS, paired, pd, signed, table
from nanodepth.files import UserError

ROWS = 16                                # of the table of one run; deeper stacks are averaged in bands
BESIDE = 6                               # cells beside each other in a table of --compare
PRINTED = 20                             # sources of a cell in the table of --ablate
FACTS = ["cell", "run", "router", "n_layer", "n_embd", "seed", "iter", "dataset", "tokens", "loss"]

def frame_of(results: list[dict]) -> "pd.DataFrame":
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

# ---------------------------------------------------------------------------------------------------------------------
# tables

def number(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.3f}" if abs(x) >= 0.01 or x == 0 else f"{x:#.2g}"

def with_interval(values: "pd.Series", form=number) -> str:
    """The mean of one value for each seed, and half of its 95 % t-interval."""
    p = paired(values.dropna())
    return "" if not p["n"] else form(p["mean"]) + (f" ± {form(p['bar']).lstrip('+')}" if p["bar"] > 0 else "")

def with_n(cell: str, n: int) -> str:
    return cell + (f" ({n} seeds)" if n > 1 else "")

COLUMNS = {"n": "sources", "sharpness": "sharpness", "v_sharpness": "V sharpness", "relative_entropy": "H / log n",
           "share_e": "e", "share_details": "details", "js_nats": "JS, nats", "cosine": "cosine", "rms_first":
           "rms at first", "rms": "rms", "passed_first": "passed at first", "passed": "passed"}

def summary(frame: "pd.DataFrame") -> str:
    """The tables of one run: its reads, in at most ROWS bands of neighbours, and their means."""
    band = np.arange(len(frame)) * min(ROWS, len(frame)) // len(frame)
    rows = frame.reindex(columns=[*COLUMNS]).astype(float)
    rows.loc[~frame["choice"], ["sharpness", "v_sharpness", "share_e", "share_details", "js_nats"]] = math.nan
    rows = rows.drop(columns="share_details" if not rows["share_details"].any() else []).groupby(band).mean()
    rows = rows.dropna(axis=1, how="all").map(number).assign(n=rows["n"].map("{:g}".format))
    ends = [" .. ".join(dict.fromkeys([names.iloc[0], names.iloc[-1]])) for _, names in frame["name"].groupby(band)]
    text = table(["reads", *map(COLUMNS.get, rows)], [[end, *row] for end, row in zip(ends, rows.values.tolist())])
    if not frame["n"].any():
        text += f"{frame['router'].iloc[0]} has no depth read, or none by self.reader(): no choice is seen.\n"
    elif not frame["choice"].any():
        text += "Every read has a single source: there is nothing to choose from.\n"
    return f"{text}\n{comparison(frame)}"

def of_runs(frame: "pd.DataFrame") -> "pd.DataFrame":
    """What --compare lays side by side: a row for each run, (cell, run), and a column for each line of its table."""
    by, chosen = ["cell", "run"], frame[frame["choice"]]
    eighth = (4 * chosen["read"] // chosen["n_layer"]).clip(upper=7)            # the head's read is in the last
    columns = {f"sharpness, depth {k}/8 to {k + 1}/8": chosen[eighth == k].groupby(by)["sharpness"].mean()
               for k in range(8) if "sharpness" in frame}
    means = {"mean sharpness": "sharpness", "mean of equal weights": "equal", "mean H / log n": "relative_entropy",
             "mean weight of e": "share_e", "divergence of Q/K and V, nats": "js_nats",
             "cosine of the newest two": "cosine"}
    columns |= {title: chosen.groupby(by)[name].mean() for title, name in means.items() if name in frame}
    columns |= {name.replace("_", " "): frame.groupby(by)[name].mean()
                for name in ("adjacent_cosine", "effective_rank", "loss") if name in frame}
    columns |= {title: frame.groupby(by)[name].min() for title, name in
                {"least passed, at first": "passed_first", "least passed": "passed"}.items() if name in frame}
    return pd.DataFrame(columns, index=frame.groupby(by, sort=False).size().index)

def comparison(frame: "pd.DataFrame") -> str:
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

SHARP = {0.2: "0.2\ncumulative,\ndeep layers", 0.6: "0.6\ndelta"}       # in the Delta paper (2605.18855)
DIVERGENCE = {0.218: "0.218\nRD's paper"}                       # mean over layers at 120M (2608.01075), unit not said

def references(axis, lines: dict[float, str]) -> None:
    """Thin lines, and beside the axes what they are."""
    for y, text in lines.items():
        axis.axhline(y, color="0.4", linewidth=0.7, linestyle=(0, (1, 2)))
        axis.annotate(text, (1, y), xycoords=("axes fraction", "data"), xytext=(2, 0), textcoords="offset points",
                      va="center", fontsize=6)
    axis.set_ylim(0, max(axis.get_ylim()[1], 1.1 * max(lines)))

def every(points: int) -> int:
    """How many points of a line there are to a marker."""
    return max(1, points // 12)

def heat_map(axis, rows: list[tuple[str, dict]], columns: list[str], title: str, gap=False) -> None:
    """Reads down, sources across; hatched where a read does not have the source. rows: (name, {source: weight})."""
    from matplotlib.colors import PowerNorm
    grid = np.array([[weights.get(name, math.nan) for name in columns] for _, weights in rows])
    reach = np.nanmax(np.abs(grid)) or 1
    style = {"cmap": "cividis", "vmin": -reach, "vmax": reach} if gap else {"cmap": "viridis",
                                                                            "norm": PowerNorm(0.5, 0, 1)}
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
    frame, reads, L = frame_of([result]), result["reads"], result["n_layer"]
    figure = plt.figure(figsize=(17, 10.5), layout="constrained")
    figure.suptitle(f"{result['run']}: {result['router']}, {L} layers of {result['n_embd']}, iteration {result['iter']}"
                    f"; means over {result['tokens']:,} validation tokens of {result['dataset']}", fontsize=10)
    above, below = figure.subfigures(2, 1, height_ratios=[1.5, 1])
    choices(plt, frame, below)
    names = list(dict.fromkeys(name for read in reads for name in read["sources"]))
    names.sort(key=lambda name: name.startswith("PC"))                          # the block in progress last
    def weights(odd, route=""):
        return [(read["name"], dict(zip(read["sources"], read[route + "weights"]))) for read in reads
                if odd == (read["read"] % 2 == 1 or read["read"] == 2 * L)]
    maps = {"attention": weights(False)}
    if "mean_js_nats" in result:
        maps = {"attention, Q/K": maps["attention"], "attention, V": weights(False, "v_")}
        maps["V minus Q/K"] = [(name, {source: v[source] - qk[source] for source in v})
                               for (name, qk), (_, v) in zip(*maps.values())]
    maps["MLPs, head"] = weights(True)
    for axis, (title, rows) in zip(above.subplots(1, len(maps)), maps.items()):
        heat_map(axis, rows, names, title, gap=" minus" in title)
    return figure

def panels(plt, frame: "pd.DataFrame", columns: dict[str, tuple[str, dict]], note: str, figure=None):
    """A row for each size of model, and a column for each {measure: (title, settings of the axis)}: by layer, the mean
    of every cell over the seeds that all have, in a band of its interval; attention and MLPs apart."""
    sizes, labels = frame.groupby(["n_layer", "n_embd"]), list(dict.fromkeys(frame["label"]))
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.75, len(labels)))
    figure = figure or plt.figure(figsize=(4.3 * len(columns), 1.2 + 3 * len(sizes)), layout="constrained")
    axes, legend = figure.subplots(len(sizes), len(columns), squeeze=False), {}
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
                points = pd.DataFrame([paired(x) for _, x in part.groupby("read")[measure]])
                x, k, step = np.array(sorted({*part["read"]})) / 2, labels.index(label), every(part["read"].nunique())
                style = {"linewidth": 1, "alpha": 0.6}
                if line == "-":
                    style = {"marker": MARKS[k % len(MARKS)], "markersize": 4, "markevery": (k % step, step)}
                    bands.append((x, points["low"], points["high"], colours[k]))
                drawn, = axis.plot(x, points["mean"], line, color=colours[k], label=label, **style)
                legend.setdefault(label, drawn)
            axis.set(title=f"{title}\n{n_layer} layers of {n_embd}, {n}", **settings)
            axis.title.set_fontsize(8)
            axis.set_xlabel("layer", fontsize=8)
            axis.grid(alpha=0.3)
            limits = axis.get_ylim()                                            # few seeds make wide bands
            for *band, colour in bands:
                axis.fill_between(*band, color=colour, alpha=0.15, linewidth=0)
            axis.set_ylim(limits)
    tokens, data, iterations = (" or ".join(map(str, sorted({*frame[name]}))) for name in ("tokens", "dataset", "iter"))
    if any(f"v_{name}" in frame for name in columns):
        note += "; dots: values of attention"
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=6, fontsize=8, title_fontsize=8,
                  title=f"Means over {tokens} validation tokens of {data} at iteration {iterations}, then over seeds, "
                        f"in a band of 95 %. Lines with markers: attention; dashes: MLPs{note}.")
    return figure, axes

def choices(plt, frame: "pd.DataFrame", figure=None):
    """What the reads of one or several runs choose."""
    frame = frame[frame["choice"]]
    if frame.empty:
        raise UserError("--png: no read has a choice here; --rms_png draws what a router hands on.")
    columns = {"sharpness": ("sharpness: mean of the largest weight", {"ylim": (0, 1)}),
               "relative_entropy": ("entropy / log n: 1 is uniform", {"ylim": (0, 1.05)}),
               "cosine": ("cosine of the newest source and the one before", {})}
    if "js_nats" in frame and frame["js_nats"].notna().any():
        columns["js_nats"] = "divergence of the Q/K and V routes, nats", {"ylim": (0, None)}
    figure, axes = panels(plt, frame, columns, "; grey: equal weights", figure)
    for row, (_, size) in zip(axes, frame.groupby(["n_layer", "n_embd"])):
        for _, equal in size.drop_duplicates(["label", "read"]).groupby("label"):
            row[0].plot(equal["read"] / 2, equal["equal"], color="0.6", linewidth=0.8, zorder=1)
        references(row[0], SHARP)
        for axis in row[3:]:
            references(axis, DIVERGENCE)
    return figure

def reaching(plt, frame: "pd.DataFrame"):
    """rms of what sublayers read, and how much of it passes their norm, with the first weights and now."""
    titles = {"rms": ("rms of h_l", {"yscale": "log"}),
              "passed": ("share that passes the norm's epsilon", {"ylim": (0, 1.05)})}
    columns = {name + when: (f"{title}, {words}", settings) for name, (title, settings) in titles.items()
               for when, words in (("_first", "first weights"), ("", "trained")) if name + when in frame}
    return panels(plt, frame, columns, "")[0]
