"""The tables and pictures of routing.py, from what it has measured; no model runs here.

A frame has a row for each run and read, as --csv writes it. Runs of one cell differ in their seed alone: its figures
are means over seeds, and ± is half of a 95 % t-interval.
"""
import math
from itertools import product

import numpy as np

from lab.report import MARKS, Figure, matplotlib, paired, pd, signed, table
from nanodepth.files import UserError

# ---------------------------------------------------------------------------------------------------------------------
# tables

COLUMNS = {"n": "sources", "sharpness": "sharpness", "v_sharpness": "V sharpness", "relative_entropy": "H / log n",
           "share_e": "e", "share_details": "details", "js_nats": "JS, nats", "cosine": "cosine", "rms_first":
           "rms at first", "rms": "rms", "passed_first": "passed at first", "passed": "passed"}
MEANS = {"mean sharpness": "sharpness", "mean of equal weights": "equal", "mean H / log n": "relative_entropy",
         "mean weight of e": "share_e", "divergence of Q/K and V, nats": "js_nats",
         "cosine of the newest two": "cosine"}
LEAST = {"least passed, at first": "passed_first", "least passed": "passed"}

def number(x: float) -> str:
    return "" if math.isnan(x) else f"{x:.3f}" if abs(x) >= 0.01 or x == 0 else f"{x:#.2g}"

def with_interval(values: "pd.Series", form=number) -> str:
    """The mean of one value for each seed, and half of its 95 % t-interval."""
    p = paired(values.dropna())
    return "" if not p["n"] else form(p["mean"]) + (f" ± {form(p['bar']).lstrip('+')}" if p["bar"] > 1e-12 else "")

def with_n(cell: str, n: int) -> str:
    return cell + (f" ({n} seeds)" if n > 1 else "")

def reads(frame: "pd.DataFrame") -> str:
    """The table of one run: a row for each read."""
    rows = frame.reindex(columns=COLUMNS).astype(float)
    rows.loc[~frame["choice"], ["sharpness", "v_sharpness", "share_e", "share_details", "js_nats"]] = math.nan
    rows = rows.dropna(axis=1, how="all")
    text = table(["read", *map(COLUMNS.get, rows)], [[name, f"{n:g}", *map(number, row)]
                                                     for name, (n, *row) in zip(frame["name"], rows.values.tolist())])
    if not frame["n"].any():
        text += f"{frame['router'].iloc[0]} has no depth read, or none by self.reader(): no choice is seen.\n"
    return text

def of_run(part: "pd.DataFrame") -> "pd.Series":
    """What --compare lays side by side, of the reads of one run: means over those that have a choice."""
    chosen = part[part["choice"]]
    eighth = (4 * chosen["read"] // chosen["n_layer"]).clip(upper=7)            # the head's read is in the last
    deep = {f"sharpness, depth {k}/8 to {k + 1}/8": chosen["sharpness"][eighth == k].mean() for k in {*eighth}}
    return pd.Series(deep | {title: chosen[name].mean() for title, name in MEANS.items() if name in chosen} | {
        title: part[name].min() for title, name in LEAST.items() if name in part} | {"loss": part["loss"].iloc[0]})

def comparison(frame: "pd.DataFrame") -> str:
    """The cells side by side, a table for each size of model."""
    texts = []
    for _, size in frame.groupby(["n_layer", "n_embd"]):
        cells = {cell: pd.DataFrame([of_run(run) for _, run in part.groupby("run", sort=False)])
                 for cell, part in size.groupby("cell", sort=False)}
        titles = list(dict.fromkeys(title for runs in cells.values() for title in runs))
        rows = [[title, *(with_interval(runs[title], "{:.4f}".format if title == "loss" else number)
                          if title in runs else "" for runs in cells.values())] for title in titles]
        texts.append(table(["", *(with_n(cell, len(runs)) for cell, runs in cells.items())], rows))
    return "\n".join(texts)

def ablation_text(ablations: "pd.DataFrame") -> str:
    """For each cell its sources, the largest mean effect first."""
    if ablations.empty:
        return "Nothing to mask: no read has a choice.\n"
    text = "A source masked out, the rest renormalised; effect: the loss minus that without a mask, nats a token\n"
    for cell, masks in ablations.groupby("cell", sort=False):
        groups = sorted(masks.groupby(["source", "reads"], sort=False), key=lambda x: -x[1]["effect"].mean())
        forms = {"weight": number, "loss": "{:.4f}".format, "effect": signed}
        rows = [[*names, *(with_interval(x[name], form) for name, form in forms.items())] for names, x in groups]
        text += f"\n{with_n(cell, masks['run'].nunique())}\n\n" + table(["source", "masked in reads", *forms], rows)
    return text

# ---------------------------------------------------------------------------------------------------------------------
# pictures. Colours go from dark to light, and cells have markers too, so that grey paper tells them apart.

SHARP = {0.2: "0.2\ncumulative,\ndeep layers", 0.6: "0.6\ndelta"}       # in the Delta paper (2605.18855)
DIVERGENCE = {0.218: "0.218\nRD's paper"}                       # mean over layers at 120M (2608.01075), unit not said
CHOICES = {"sharpness": ("sharpness: mean of the largest weight", {"ylim": (0, 1)}, SHARP),
           "relative_entropy": ("entropy / log n: 1 is uniform", {"ylim": (0, 1.05)}, {}),
           "cosine": ("cosine of the newest source and the one before", {}, {}),
           "js_nats": ("divergence of the Q/K and V routes, nats", {"ylim": (0, None)}, DIVERGENCE)}
REACHING = {"rms_first": ("rms of h_l, first weights", {"yscale": "log"}, {}),
            "rms": ("rms of h_l, trained", {"yscale": "log"}, {}),
            "passed_first": ("share that passes the norm's epsilon, first weights", {"ylim": (0, 1.05)}, {}),
            "passed": ("share that passes the norm's epsilon, trained", {"ylim": (0, 1.05)}, {})}

def by_layer(axis, size: "pd.DataFrame", name: str, settings: dict, colours: dict) -> dict:
    """A measure by layer, a mean over seeds: attention with markers in a band of its interval, MLPs in dashes, and what
    values read in dots. Returns {label: its line}."""
    drawn, bands = {}, []
    kinds = [("-", name, 0), ("--", name, 1), (":", f"v_{name}", 0)]
    for (line, measure, parity), (k, label) in product(kinds, enumerate(colours)):
        own = size[(size["label"] == label) & (size["read"] % 2 == parity) & (size["read"] < 2 * size["n_layer"])]
        own = own.dropna(subset=measure) if measure in own else own[:0]
        if own.empty:
            continue
        reads = own.groupby("read")
        x, y, style = [l / 2 for l, _ in reads], pd.DataFrame(map(paired, (x for _, x in reads[measure]))), {}
        if line == "-":
            step = max(1, len(x) // 12)
            style = {"marker": MARKS[k % len(MARKS)], "markersize": 4, "markevery": (k % step, step)}
            bands.append((x, y["low"], y["high"], colours[label]))
        one, = axis.plot(x, y["mean"], line, color=colours[label], label=label, linewidth=1, **style)
        drawn.setdefault(label, one)
        if name == "sharpness":                                                 # that of equal weights, in grey
            axis.plot(x, reads["equal"].mean(), color="0.6", linewidth=0.8, zorder=1)
    axis.set(**settings)
    limits = axis.get_ylim()                                                    # few seeds make wide bands
    for *band, colour in bands:
        axis.fill_between(*band, color=colour, alpha=0.15, linewidth=0)
    axis.set_ylim(limits)
    return drawn

def lines(frame: "pd.DataFrame", columns: dict, figure=None):
    """A row of axes for each size of model, a column for each measure there is: `by_layer` of every cell, over the
    seeds that all have. columns: {measure: (title, settings of axis, references)}."""
    columns = {name: column for name, column in columns.items() if name in frame and frame[name].notna().any()}
    if not columns:
        raise UserError("--png: no read has a choice here; --rms_png draws what a router hands on.")
    sizes, labels, legend = frame.groupby(["n_layer", "n_embd"]), list(dict.fromkeys(frame["label"])), {}
    colours = dict(zip(labels, matplotlib.colormaps["viridis"](np.linspace(0, 0.75, len(labels)))))
    figure = figure or Figure(figsize=(4.3 * len(columns), 1.2 + 3 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(sizes), len(columns), squeeze=False)
    for row, ((n_layer, n_embd), size) in zip(axes, sizes):
        seeds = sorted(set.intersection(*(set(part["seed"]) for _, part in size.groupby("label"))))
        size = size[size["seed"].isin(seeds)] if seeds else size
        n = f"seeds {', '.join(map(str, seeds))}" if seeds else "each cell other seeds"
        for axis, (name, (title, settings, references)) in zip(row, columns.items()):
            legend |= by_layer(axis, size, name, settings, colours)
            axis.set_title(f"{title}\n{n_layer} layers of {n_embd}, {n}", fontsize=8)
            axis.set_xlabel("layer", fontsize=8)
            axis.grid(alpha=0.3)
            for y, text in references.items():                                  # thin, and named beside the axis
                axis.axhline(y, color="0.4", linewidth=0.7, linestyle=(0, (1, 2)))
                axis.annotate(text, (1, y), xycoords=("axes fraction", "data"), va="center", fontsize=6)
            axis.set_ylim(top=max([axis.get_ylim()[1], *(1.1 * y for y in references)]))
    tokens, data, iterations = (" or ".join(map(str, sorted({*frame[name]}))) for name in ("tokens", "dataset", "iter"))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=6, fontsize=8, title_fontsize=8,
                  title=f"Means over {tokens} validation tokens of {data} at iteration {iterations}, then over seeds, "
                        f"in a band of 95 %.\nMarkers: attention; dashes: MLPs; dots: values of attention"
                        f"{'; grey: equal weights' * ('sharpness' in columns)}.")
    return figure

def maps(figure, frame: "pd.DataFrame") -> None:
    """The weights of one run: reads down, the same in every map of attention, sources across; hatched where a read does
    not have the source."""
    frame = frame[frame["n"] > 0]                                               # the head may read nothing
    names = list(dict.fromkeys(name for names in frame["sources"] for name in names))
    names.sort(key=lambda name: name.startswith("PC"))                          # the block in progress last
    attention = (frame["read"] % 2 == 0) & (frame["read"] < 2 * frame["n_layer"])

    def grid(rows, weights):
        found = (dict(zip(*pair)) for pair in zip(rows["sources"], rows[weights]))
        return list(rows["name"]), np.array([[weight.get(name, math.nan) for name in names] for weight in found])

    shown = {"attention": grid(frame[attention], "weights"), "MLPs, head": grid(frame[~attention], "weights")}
    if "js_nats" in frame:
        rows, qk = shown.pop("attention")
        v = grid(frame[attention], "v_weights")[1]
        shown = {"attention, Q/K": (rows, qk), "attention, V": (rows, v), "V minus Q/K": (rows, v - qk), **shown}
    for axis, (title, (rows, weights)) in zip(figure.subplots(1, len(shown)), shown.items()):
        reach = np.nanmax(np.abs(weights)) or 1
        signs = {"cmap": "cividis", "vmin": -reach, "vmax": reach}
        style = signs if "minus" in title else {"norm": matplotlib.colors.PowerNorm(0.5, 0, 1)}
        axis.patch.set(facecolor="white", edgecolor="0.8", hatch="////")
        image = axis.imshow(weights, aspect="auto", interpolation="nearest", **style)
        for ticks, words in ((axis.set_xticks, names), (axis.set_yticks, rows)):
            step = math.ceil(len(words) / 24)
            ticks(range(0, len(words), step), words[::step], fontsize=7)
        axis.tick_params("x", rotation=90)
        axis.set_title(title, fontsize=9)
        axis.figure.colorbar(image, ax=axis, orientation="horizontal", shrink=0.9, pad=0.02).ax.tick_params(labelsize=7)

def choices(frame: "pd.DataFrame"):
    """What reads choose, by layer; of a single run its weights above."""
    chosen = frame[frame["choice"]]
    if frame["run"].nunique() > 1 or chosen.empty:
        return lines(chosen, CHOICES)
    figure, r = Figure(figsize=(17, 10.5), layout="constrained"), frame.iloc[0]
    figure.suptitle(f"{r['run']}: {r['router']}, {r['n_layer']} layers of {r['n_embd']}", fontsize=10)
    above, below = figure.subfigures(2, 1, height_ratios=[1.5, 1])
    maps(above, frame)
    lines(chosen, CHOICES, below)
    return figure
