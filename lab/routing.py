"""What a router has learned, in numbers and pictures, from a checkpoint and validation text.

    python -m lab.routing out/rd-48x64-s0 --png rd.png --json rd.json
    python -m lab.routing --compare out/cumulative-24x64-s0 out/delta-24x64-s0 --png collapse.png
    python -m lab.routing out/block-12x64-s0 --ablate all       # what the loss becomes without a source

For every depth read, means over all tokens of the validation windows:

    weight       alpha_i of each source: e the embedding; u17 the update of sublayer 17; h17 the state before it (in
                 cumulative); C3 the sum of block 3, PC that of the block in progress; C3.phase, C3.split: details
    sharpness    max_i alpha_i: 1 reads one source, 1/n is what n equal weights have
    entropy      H = -sum_i alpha_i log alpha_i, in nats; as a share of log n, 1 is uniform
    divergence   of the two routes of a decoupled read: H((p + q) / 2) - (H(p) + H(q)) / 2, from 0 to log 2 nats, 1 bit

A mean over reads or layers leaves out those with a single source: they have nothing to choose from.
"""
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from nanodepth.files import UserError, atomic_write, load_checkpoint, load_model, newest_run, router_name, router_of, run
from nanodepth.machine import pick_device, settle_kernels
from nanodepth.settings import Parser
from model import GPT, GPTConfig, ROUTERS, AttnRes, Block, Cumulative, Delta, DeltaBlock, DepthRouter, WAV, depth_read
from lab.sweep import signed, table
from train import open_data, windows


@dataclass
class RoutingConfig:
    windows: int = 64                    # validation windows of seq_len tokens, evenly spaced
    dataset: str | None = None           # a folder under data/, or the path of one; none: what the run was trained on
    device: str = "auto"                 # auto, cpu, cuda, cuda:N or mps
    json: str | None = None              # write everything that was measured to this file
    png: str | None = None               # draw it in this file (needs matplotlib)
    ablate: str | None = None            # mask a source: all (in every read), each (in one), or a read: 13, head
    router: str | None = None            # FILE.py:Class, for a run with a router of one's own; several with commas

BATCH_TOKENS = 2048                      # tokens at a time: a read stacks its sources, (n, tokens, D)
RANK_TOKENS = 1024                       # tokens of which the effective rank is taken, evenly spaced
ROWS = 12                                # of the table on the screen; deeper stacks are averaged in bands
PRINTED = 20                             # sources in the table of --ablate

# ---------------------------------------------------------------------------------------------------------------------
# reading along

def has_choice(router, l: int, n: int) -> bool:
    """Does read l choose between its n sources? Not with one source, nor where Delta has h_0 = e whatever the mix is."""
    return n > 1 and not (isinstance(router, Delta) and l == 0)

def read_name(router, l: int) -> str:
    return "head" if l == router.head else f"{'mlp' if l % 2 else 'attn'} {l // 2}"

def source_names(router, l: int, n: int) -> list[str]:
    """The names of the n sources of read l, in the router's order: those of its own `source_names(l)`, those of the router
    in model.py whose `forward` it has, or s0, s1, ..."""
    forward = next(cls for cls in type(router).__mro__ if {"forward", "source_names"} & vars(cls).keys())
    if "source_names" in vars(forward):
        names = router.source_names(l)
        if len(names) != n:
            raise UserError(f"source_names({l}) of the router gives {len(names)} names; its read {l} has {n} sources.")
        return names
    return names_of(forward, router, l) or [f"s{i}" for i in range(n)]

def names_of(forward, router, l: int) -> list[str]:
    """What the sources of read l are in the class of model.py that has this forward; none for another."""
    config, first = router.config, ["null"] * router.config.null_source + ["e"]
    b = next((b for b, block in enumerate(router.blocks) if l in block), len(router.blocks))    # the head is after all
    if forward is Cumulative:
        return first + [f"h{j}" for j in range(1, l + 1)]
    if forward in (AttnRes, Delta):
        return first + [f"u{j}" for j in range(l)]
    if forward in (Block, DeltaBlock, WAV):
        sums = [f"C{i}" for i in range(b)]
        if forward is not DeltaBlock and l < router.head and l > router.blocks[b].start:
            sums.append("PC")
        with_details = forward is WAV and (l < router.head or config.head_details)
        details = ["", *(f".{name}" for name in config.detail_names)] if with_details else [""]
        return first + [c + d for c in sums for d in details]
    return []

class Watch:
    """While open, `router` reads by the definition, and `see(l, sources, scale, alphas)` is called after every read.

    sources, scale: n tensors (B, T, D) and their scales, (B, T) or None. alphas: one (n, B, T) for each route, two where
    values read by a query of their own. hidden: {read: indices of sources whose weight is 0}; the others' weights are
    renormalised by their softmax.
    """
    def __init__(self, router, see=None, hidden=None):
        self.router, self.see, self.hidden = router, see, hidden or {}

    def read(self, l, sources, bias=None, scale=None):
        """In the place of model.DepthRouter's."""
        bias = None if bias is None else bias[l, :len(sources)]
        if l in self.hidden:
            bias = self.router.query.new_zeros(len(sources)) if bias is None else bias
            bias = bias.index_fill(0, torch.tensor(self.hidden[l], device=bias.device), -math.inf)
        mixes, alphas = zip(*(depth_read(query, sources, bias, scale) for query in self.router.queries(l)))
        if self.see:
            self.see(l, list(sources), scale or [None] * len(sources), list(alphas))
        return self.router.inputs(list(mixes))

    def __enter__(self):
        self.router.read = self.read                                            # these hide the methods of the class
        self.router.reader = lambda: self.read

    def __exit__(self, *error):
        del self.router.read, self.router.reader

# ---------------------------------------------------------------------------------------------------------------------
# statistics

def entropy(p):
    """In nats, over the first dimension."""
    return torch.special.entr(p).sum(0)

def js_divergence(p, q):
    """Jensen-Shannon divergence of two distributions over the first dimension, in nats: 0 to log 2."""
    return (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).clamp(min=0)

def effective_rank(s):
    """How many directions n vectors have, s (..., n, D) -> (...): exp of the entropy of their singular values, each
    divided by their sum (Roy and Vetterli, 2007). The vectors are scaled to length 1, as the logits see them: 1 when
    all point one way, n when all are orthogonal."""
    s = F.normalize(s, dim=-1)
    values = torch.linalg.eigvalsh(s @ s.mT).clamp(min=0).sqrt()                # (..., n): the singular values
    p = values / values.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()

class Sums:
    """Sums over tokens, to be means at the end: sums.add("sharpness", values), values (..., B, T)."""
    def __init__(self):
        self.total, self.count = {}, {}

    def add(self, name, values):
        values = values.detach().cpu().double().flatten(-2)                     # (..., B T)
        self.total[name] = self.total.get(name, 0) + values.sum(-1)
        self.count[name] = self.count.get(name, 0) + values.size(-1)

    def mean(self, name):
        return (self.total[name] / self.count[name]).tolist()

def measure(model, batches) -> dict:
    """Everything this script tells about a model with a depth read. batches: a list of (b, T + 1) int64."""
    router = model.router
    reads, sources_sums, loss_sums = {}, Sums(), Sums()
    most = []                                                                   # of the last read with the most sources
    every = max(1, sum(batch[:, 1:].numel() for batch in batches) // RANK_TOKENS)
    decoupled = router.decouple_v or router.config.decouple_v

    def see(l, sources, scale, alphas):
        nonlocal most
        n, sums = reads.setdefault(l, (len(sources), Sums()))
        if n != len(sources):
            raise UserError(f"the router reads for sublayer {l} more than once, of {n} and of {len(sources)} sources; that "
                            f"cannot be laid on one line.")
        if decoupled and l % 2 == 0 and l < router.head and len(alphas) == 1:
            alphas = alphas * 2                                                 # tied: one query for both routes
        alphas = [alpha.cpu().double() for alpha in alphas]
        for route, alpha in zip(("", "v_"), alphas):
            sums.add(route + "weights", alpha)
            sums.add(route + "sharpness", alpha.amax(0))
            sums.add(route + "entropy", entropy(alpha))
        if len(alphas) == 2:
            sums.add("js", js_divergence(*alphas))
        own = [s if r is None else s * torch.as_tensor(r, device=s.device).expand(s.shape[:2]).unsqueeze(-1)
               for s, r, name in zip(sources, scale, source_names(router, l, n)) if name != "null"]
        most = own if len(own) >= len(most) else most

    for batch in tqdm(batches, disable=None, leave=False, unit="batch"):
        with torch.no_grad(), Watch(router, see):
            _, loss = model(batch[:, :-1], batch[:, 1:])
        loss_sums.add("loss", loss.expand(len(batch), 1))
        if not most:
            raise UserError(f"the router {model.config.router} does not read by self.reader(), so there is nothing to watch.")
        s = torch.stack(most, -2).float()                                       # (B, T, n, D)
        sources_sums.add("norms", s.norm(dim=-1).movedim(-1, 0))
        sources_sums.add("adjacent_cosine", F.cosine_similarity(s[..., 1:, :], s[..., :-1, :], dim=-1).movedim(-1, 0))
        some = s.flatten(0, 1)[::every].cpu().double()                          # (tokens, n, D)
        sources_sums.add("effective_rank", effective_rank(some).unsqueeze(0))
        most = []

    result = {"loss": loss_sums.mean("loss"), "reads": []}
    for l, (n, sums) in sorted(reads.items()):
        names = source_names(router, l, n)
        read = {"read": l, "name": read_name(router, l), "sources": names, "choice": has_choice(router, l, n)}
        for route in ("", "v_") if "v_weights" in sums.total else ("",):
            weights = sums.mean(route + "weights")
            read |= {route + "weights": weights, route + "sharpness": sums.mean(route + "sharpness"),
                     route + "entropy": sums.mean(route + "entropy"),
                     route + "relative_entropy": sums.mean(route + "entropy") / math.log(n) if n > 1 else None,
                     route + "share_e": sum(w for name, w in zip(names, weights) if name == "e") if "e" in names else None,
                     route + "share_details": sum(w for name, w in zip(names, weights) if "." in name)}
        if "js" in sums.total:
            read |= {"js_nats": sums.mean("js"), "js_bits": sums.mean("js") / math.log(2)}
        result["reads"].append(read)
    chosen = [read for read in result["reads"] if read["choice"]]
    for name in ("sharpness", "relative_entropy", "share_e", "share_details", "v_sharpness", "v_relative_entropy",
                 "js_nats", "js_bits"):
        values = [read[name] for read in chosen if read.get(name) is not None]
        if values:
            result["mean_" + name] = statistics.mean(values)
    last = max(result["reads"], key=lambda read: (len(read["sources"]), read["read"]))
    result["sources"] = {"read": last["name"], "names": [name for name in last["sources"] if name != "null"],
                         **{name: sources_sums.mean(name) for name in ("norms", "adjacent_cosine", "effective_rank")}}
    return result

def mean_loss(model, batches, hidden) -> float:
    """Nats a token, with sources hidden as in Watch."""
    with torch.no_grad(), Watch(model.router, hidden=hidden):
        losses = [(model(b[:, :-1], b[:, 1:])[1].item(), len(b)) for b in batches]
    return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)

def ablations(reads: list[dict], which: str) -> list[tuple[str, str, dict]]:
    """(source, where, hidden) of every ablation: `all`, `each`, or the name or number of one read. A read without a
    choice cannot lose its source."""
    places = [(read, i, name) for read in reads if read["choice"] for i, name in enumerate(read["sources"])]
    if which == "all":
        found = {}
        for read, i, name in places:
            found.setdefault(name, {})[read["read"]] = [i]
        return [(name, f"{len(hidden)} read{'s' * (len(hidden) > 1)}", hidden) for name, hidden in found.items()]
    chosen = [p for p in places if which in ("each", p[0]["name"], str(p[0]["read"]))]
    if not chosen:
        numbers = [read["read"] for read, *_ in places] or ["none"]
        raise UserError(f"--ablate is {which!r}; it must be all, each, head, or the number of a read with a choice: "
                        f"{numbers[0]} to {numbers[-1]}.")
    return [(name, read["name"], {read["read"]: [i]}) for read, i, name in chosen]

def ablate(model, batches, reads: list[dict], which: str) -> list[dict]:
    """Mask a source, renormalise the rest, and measure the loss again: the largest effect first. weight: the source's
    mean weight in the reads it is masked in (of both routes, where there are two)."""
    base, results = mean_loss(model, batches, {}), []
    weights = {(read["read"], i): statistics.mean(read[k][i] for k in ("weights", "v_weights") if k in read)
               for read in reads for i in range(len(read["sources"]))}
    for source, where, hidden in tqdm(ablations(reads, which), disable=None, leave=False, unit="mask"):
        loss = mean_loss(model, batches, hidden)
        results.append({"source": source, "masked_in": where, "loss": loss, "effect": loss - base,
                        "weight": statistics.mean(weights[l, i] for l, (i,) in hidden.items())})
    return sorted(results, key=lambda r: -r["effect"])

# ---------------------------------------------------------------------------------------------------------------------
# on the screen

def bands(reads: list[dict], rows: int = ROWS) -> list[list[dict]]:
    """The reads in at most `rows` groups of neighbours."""
    return [list(part) for part in np.array_split(np.array(reads, dtype=object), min(rows, len(reads)))]

def band_name(band: list[dict]) -> str:
    return band[0]["name"] + (f" .. {band[-1]['name']}" if len(band) > 1 else "")

def heaviest(band: list[dict], route: str = "") -> str:
    """The source with the largest mean weight in a band of reads, with that weight."""
    total = {}
    for read in band:
        for name, weight in zip(read["sources"], read.get(route + "weights", ())):
            total[name] = total.get(name, 0) + weight / sum(route + "weights" in r for r in band)
    name = max(total, key=total.get, default=None)
    return f"{name} {total[name]:.2f}" if name else ""

def column(band: list[dict], name: str, form: str = ".3f") -> str:
    values = [read[name] for read in band if read.get(name) is not None]
    return f"{statistics.mean(values):{form}}" if values else ""

def summary(result: dict) -> str:
    reads = [read for read in result["reads"] if read["choice"]]
    if not reads:
        return "Every read has a single source: there is nothing to choose from.\n"
    columns = {"sharpness": "sharpness", "relative_entropy": "H / log n", "share_e": "e"}
    if result["mean_share_details"] or any("." in name for read in reads for name in read["sources"]):
        columns["share_details"] = "details"
    if "mean_js_nats" in result:
        columns |= {"v_sharpness": "V sharpness", "v_share_e": "V e", "js_nats": "JS, nats"}
    text = table(["reads", *columns.values(), "heaviest"] + (["V heaviest"] if "mean_js_nats" in result else []),
                 [[band_name(band), *(column(band, name) for name in columns), heaviest(band)]
                  + ([heaviest(band, "v_")] if "mean_js_nats" in result else []) for band in bands(reads)])
    text += f"\nMean of {len(reads)} reads: sharpness {result['mean_sharpness']:.3f} (equal weights: " \
            f"{statistics.mean(1 / len(read['sources']) for read in reads):.3f}), " \
            f"H / log n {result['mean_relative_entropy']:.3f}" \
            + (f", e {result['mean_share_e']:.3f}" if "mean_share_e" in result else "") + "\n"
    if "mean_js_nats" in result:
        layers = sum("js_nats" in read for read in reads)
        text += f"Divergence of the Q/K and V routes, mean of {layers} layers: {result['mean_js_nats']:.4f} nats, " \
                f"{result['mean_js_bits']:.4f} bits\n"
    s = result["sources"]
    cosine = f"{statistics.mean(s['adjacent_cosine']):.3f}" if s["adjacent_cosine"] else "-"
    text += f"The {len(s['names'])} sources of {s['read']}: mean adjacent cosine {cosine}, effective rank " \
            f"{s['effective_rank']:.2f}, norms {min(s['norms']):.2f} to {max(s['norms']):.2f}\n"
    return text

def ablation_table(results: list[dict]) -> str:
    text = table(["source", "masked in", "weight", "loss", "effect"],
                 [[r["source"], r["masked_in"], f"{r['weight']:.3f}", f"{r['loss']:.4f}", signed(r["effect"], 4)]
                  for r in results[:PRINTED]])
    if len(results) > PRINTED:
        text += f"and {len(results) - PRINTED} more; --json has them all\n"
    return text

def comparison(results: dict[str, dict]) -> str:
    """Mean sharpness in each eighth of the depth, run by run; in brackets what equal weights would have."""
    rows = []
    for k in range(8):
        row = [f"{k / 8:.3f} .. {(k + 1) / 8:.3f}"]
        for result in results.values():
            reads = result["reads"]
            part = [r for r in reads if r["choice"] and min(7, 8 * r["read"] // (2 * result["n_layer"])) == k]
            equal = statistics.mean(1 / len(r["sources"]) for r in part) if part else 0
            row.append(f"{column(part, 'sharpness')} ({equal:.3f})" if part else "")
        rows.append(row)
    for name, title in (("mean_sharpness", "mean sharpness"), ("mean_relative_entropy", "mean H / log n")):
        rows.append([title, *(f"{r[name]:.3f}" if name in r else "" for r in results.values())])
    for name in ("adjacent_cosine", "effective_rank"):
        rows.append([name.replace("_", " "), *(f"{np.mean(r['sources'][name]):.3f}" if r["sources"][name] else "-" for r in results.values())])
    return table(["depth", *results], rows)

# ---------------------------------------------------------------------------------------------------------------------
# pictures

def pyplot():
    try:
        import matplotlib
        matplotlib.use("Agg")                                                   # no window
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("--png needs matplotlib: pip install matplotlib. Without --png it is not needed.") from None
    return plt

def columns_of(reads: list[dict]) -> list[str]:
    """The sources of all reads in one order: as they appear, the block in progress last."""
    names = list(dict.fromkeys(name for read in reads for name in read["sources"]))
    return [n for n in names if not n.startswith("PC")] + [n for n in names if n.startswith("PC")]

def ticks(axis, which: str, names: list[str], most: int, **style) -> None:
    """As many of the names as fit."""
    places = list(range(0, len(names), math.ceil(len(names) / most)))
    places[-1] = len(names) - 1 if len(places) > 1 else places[-1]              # PC, or the head
    getattr(axis, f"set_{which}ticks")(places, [names[i] for i in places], fontsize=7, **style)

def from_0_to_1(axis, **texts) -> None:
    """Room for a legend above, so that it hides no line."""
    axis.set(ylim=(0, 1.2), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1], **texts)
    axis.legend(fontsize=8, ncols=3, loc="upper center")

def heat_map(axis, reads: list[dict], columns: list[str], route: str, most: int):
    """Reads down, sources across; grey where a read does not have the source."""
    from matplotlib.colors import PowerNorm
    grid = np.full((len(reads), len(columns)), np.nan)
    for i, read in enumerate(reads):
        for name, weight in zip(read["sources"], read[route + "weights"]):
            grid[i, columns.index(name)] = weight
    axis.set_facecolor("0.88")
    image = axis.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis", norm=PowerNorm(0.5, 0, 1))
    ticks(axis, "x", columns, most, rotation=90)
    ticks(axis, "y", [read["name"] for read in reads], 36)
    axis.set(xlabel="source")
    return image

def picture(plt, result: dict, title: str):
    """Heat maps (two where values read by a query of their own), sharpness by read, divergence by layer (or shares)."""
    reads = result["reads"]
    v_reads, columns = [read for read in reads if "v_weights" in read], columns_of(reads)
    maps, width = 2 if v_reads else 1, 5.0 if v_reads else 8.0                  # inches of a heat map
    figure = plt.figure(figsize=(maps * width + 5, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    grid = figure.add_gridspec(2, maps + 1, width_ratios=[width] * maps + [5])
    most = int(width * 7)
    axis = figure.add_subplot(grid[:, 0])
    image = heat_map(axis, reads, columns, "", most)
    axis.set(title="weights, Q/K route and MLPs" if v_reads else "weights", ylabel="read")
    if v_reads:
        axis = figure.add_subplot(grid[:, 1])
        heat_map(axis, v_reads, columns, "v_", most)
        axis.set(title="weights, V route")
    bar = figure.colorbar(image, ax=axis, shrink=0.6, pad=0.02, ticks=[0, 0.05, 0.2, 0.5, 1])
    bar.set_label("mean weight (square-root scale)", fontsize=8)

    chosen = [read for read in reads if read["choice"]]
    axis = figure.add_subplot(grid[0, -1])
    x = [read["read"] for read in chosen]
    axis.plot(x, [read["sharpness"] for read in chosen], ".-", linewidth=1, label="Q/K, MLPs" if v_reads else "reads")
    if v_reads:
        v_chosen = [read for read in chosen if "v_weights" in read]
        axis.plot([read["read"] for read in v_chosen], [read["v_sharpness"] for read in v_chosen], ".-", linewidth=1,
                  label="V")
    axis.plot(x, [1 / len(read["sources"]) for read in chosen], "--", color="grey", linewidth=1, label="equal weights")
    from_0_to_1(axis, title="sharpness: mean of the largest weight", xlabel="read (sublayer)")

    axis = figure.add_subplot(grid[1, -1])
    if v_reads:
        layers = [read for read in v_reads if read["choice"]]
        axis.plot([read["read"] // 2 for read in layers], [read["js_nats"] for read in layers], ".-", linewidth=1)
        axis.axhline(result.get("mean_js_nats", 0), color="grey", linestyle="--", linewidth=1)
        axis.set(title=f"divergence of Q/K and V: mean {result.get('mean_js_nats', 0):.3f} nats", xlabel="layer",
                 ylabel="Jensen-Shannon, nats", ylim=(0, None))
    else:
        axis.plot(x, [read["share_e"] for read in chosen], ".-", linewidth=1, label="e")
        if any("." in name for name in columns):
            axis.plot(x, [read["share_details"] for read in chosen], ".-", linewidth=1, label="details")
        axis.plot(x, [read["relative_entropy"] for read in chosen], color="grey", linewidth=1, label="entropy / log n")
        from_0_to_1(axis, title="shares of the weight, and entropy", xlabel="read (sublayer)")
    for axis in figure.axes[-2:]:
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure

def comparison_picture(plt, results: dict[str, dict]):
    """Sharpness, and entropy as a share of log n, against the depth of the read; dashed: that of equal weights."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for i, (name, result) in enumerate(results.items()):
        reads = [read for read in result["reads"] if read["choice"]]
        x = [read["read"] / (2 * result["n_layer"]) for read in reads]
        left.plot(x, [read["sharpness"] for read in reads], ".-", linewidth=1, color=f"C{i}", label=name)
        left.plot(x, [1 / len(read["sources"]) for read in reads], "--", linewidth=1, color=f"C{i}", alpha=0.6)
        right.plot(x, [read["relative_entropy"] for read in reads], ".-", linewidth=1, color=f"C{i}", label=name)
    from_0_to_1(left, title="sharpness: mean of the largest weight", xlabel="depth of the read (dashed: equal weights)")
    from_0_to_1(right, title="entropy / log n (1: equal weights)", xlabel="depth of the read")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    return figure

# ---------------------------------------------------------------------------------------------------------------------

def load(path: str, s: RoutingConfig, device: str):
    """A run's model, reading plainly, its validation windows in batches of (b, T + 1) int64, and its checkpoint."""
    checkpoint = load_checkpoint(path)
    name = checkpoint["model_config"]["router"]
    named = [x for x in (s.router or "").split(",") if ".py:" in name and router_name(x) == router_name(name)]
    router = router_of(checkpoint, named[0] if named else None, ROUTERS)
    if not issubclass(ROUTERS.get(router, DepthRouter), DepthRouter):
        reading = [name for name, cls in ROUTERS.items() if issubclass(cls, DepthRouter)]
        raise UserError(f"the router of {path}, {router}, has no depth read: it chooses nothing along "
                        f"depth. These do: {' '.join(reading)}.")
    model = load_model(checkpoint, GPT, GPTConfig, router=router, plain_read=True).to(device).eval()
    data = open_data(s.dataset or checkpoint["settings"]["dataset"])
    described = data.tokenizer.describe() if data.tokenizer else None
    if described != checkpoint["tokenizer"]:
        raise UserError(f"the tokenizer of {data.path} is not the one of {path}: its weights would read other symbols. "
                        f"Give the run's own data with --dataset.")
    T = model.config.seq_len
    data.check_window(T, splits=("val",))
    n = min(s.windows, (len(data.val) - 1) // T)
    starts = np.linspace(0, len(data.val) - T - 1, n).astype(np.int64)
    tokens = windows(data.val, starts, T, model.config.vocab_size).to(device)   # (n, T + 1)
    return model, tokens.split(max(1, BATCH_TOKENS // T)), checkpoint

def main(argv) -> None:
    parser = Parser(prog="python -m lab.routing", description="What a router has learned, in numbers and pictures.")
    parser.add_argument("run", nargs="?", help="the folder of a run (default: the newest under out/)")
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="lay the sharpness of several runs side by side")
    parser.add_fields(RoutingConfig)
    flags = vars(parser.parse_args(argv))
    one, several = flags.pop("run"), flags.pop("compare")
    s = RoutingConfig(**flags)
    if s.windows < 1:
        raise UserError(f"--windows is {s.windows}; it must be 1 or more.")
    if several and (one or s.ablate):
        raise UserError("--compare takes its runs after it, and goes without --ablate: python -m lab.routing --compare RUN RUN.")
    plt = pyplot() if s.png else None                                           # before the work, not after
    device = pick_device(s.device)
    settle_kernels()
    runs = several or [one or str(newest_run())]
    short = [Path(run).resolve().name for run in runs]
    names = short if len(set(short)) == len(runs) else runs
    results = {}
    for name, path in zip(names, runs):
        model, batches, checkpoint = load(path, s, device)
        config = model.config
        results[name] = {"run": path, "router": config.router, "n_layer": config.n_layer, "iter": checkpoint["iter"],
                         "tokens": sum(batch[:, 1:].numel() for batch in batches), **measure(model, batches)}
    result = results[names[0]]
    if several:
        print(comparison(results), end="")
    else:
        print(f"{path}: {config.router} {config.n_layer}x{config.n_embd}, iteration {checkpoint['iter']}, loss "
              f"{result['loss']:.4f} on {result['tokens']:,} validation tokens\n\n{summary(result)}", end="")
        if s.ablate:
            result["ablations"] = ablate(model, batches, result["reads"], s.ablate)
            print(f"\nA source masked out, the rest renormalised; effect: loss minus {result['loss']:.4f}, nats a token"
                  f"\n\n{ablation_table(result['ablations'])}", end="")
    if s.json:
        with atomic_write(s.json) as f:
            json.dump(results if several else result, f, indent=1)
            f.write("\n")
    if plt:
        title = f"{names[0]}: {result['router']}, iteration {result['iter']}, {result['tokens']:,} validation tokens"
        figure = comparison_picture(plt, results) if several else picture(plt, result, title)
        with atomic_write(s.png, "wb") as f:
            figure.savefig(f, dpi=100, format="png")
        plt.close(figure)


if __name__ == "__main__":
    run(main)
