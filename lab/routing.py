"""What a router has learned, in numbers and pictures, from checkpoints and validation text.

    python -m lab.routing out/rd-48x64-s0 --png rd.png --csv rd.csv
    python -m lab.routing out/block-12x64-s0 --ablate           # what the loss becomes without a source
    python -m lab.routing --compare out/cumulative-24x64-s* out/delta-24x64-s* --png collapse.png
    python -m lab.routing --compare out/sweep --csv routing.csv --rms_png rms.png       # every finished run in a folder
    python -m lab.routing --sources wav --n_layer 4             # what each read sees, without a checkpoint

For every depth read, means over all tokens of the validation windows:

    weight       alpha_i of each source: e the embedding; u17 the update of sublayer 17; h17 the state before it (in
                 cumulative); C3 the sum of block 3, PC that of the block in progress; C3.phase, C3.split: details
    sharpness    max_i alpha_i: 1 reads one source, 1/n is what n equal weights have
    entropy      H = -sum_i alpha_i log alpha_i, in nats; as a share of log n, 1 is uniform
    divergence   js: of the two routes of a decoupled read, H((p + q) / 2) - (H(p) + H(q)) / 2, 0 to log 2 nats, 1 bit
    cosine       of the newest source and the one before it, details left out: near 1, they can hardly be told apart

and of what each sublayer then gets, before its own norm (whose epsilon is --norm_eps), with any router:

    rms          sqrt(mean over D of h_l^2); v_rms of the value route; rms_first: of the first weights of the run's seed
    passed       rms / sqrt(rms^2 + norm_eps): the length that the norm gives h_l, 1 if not for its epsilon

A mean over reads or layers leaves out those with a single source: they have nothing to choose from. ± is half of a
95 % t-interval of the mean over seeds.
"""
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from lab import report, routing_report
from nanodepth.files import (UserError, atomic_write, load_checkpoint, load_model, newest_run, own_router, router_name,
                             router_of, run)
from nanodepth.machine import pick_device, settle_kernels
from nanodepth.runs import described, known_as
from nanodepth.settings import Parser
from model import GPT, GPTConfig, ROUTERS, AttnRes, Block, Cumulative, Delta, WAV, depth_read
from train import eval_starts, open_data, windows, windows_a_step


@dataclass
class RoutingConfig:
    out_dir: str | None = None           # the folder of a run, as without the flag; none: the newest under out/
    windows: int = 64                    # validation windows of seq_len tokens, evenly spaced
    dataset: str | None = None           # a folder under data/, or the path of one; none: what the run was trained on
    device: str = "auto"                 # auto, cpu, cuda, cuda:N or mps
    csv: str | None = None               # write what was measured in this file, a row for each run and read
    png: str | None = None               # draw what the reads choose in this file
    rms_png: str | None = None           # draw what reaches the sublayers in this file
    ablate: bool = False                 # the loss without each source, masked in every read that has it
    router: str | None = None            # FILE.py:Class, for a run with a router of one's own; several with commas

BATCH_TOKENS = 2048                      # tokens at a time: a read stacks its sources, (n, tokens, D)

# ---------------------------------------------------------------------------------------------------------------------
# reading along

def has_choice(router, l: int, n: int) -> bool:
    """Does read l choose between its n sources? Not with one, nor where Delta has h_0 = e whatever the mix is."""
    return n > 1 and not (isinstance(router, Delta) and l == 0)

def read_name(l: int, head: int) -> str:
    return "head" if l == head else f"{'mlp' if l % 2 else 'attn'} {l // 2}"

def source_names(router, l: int, n: int) -> list[str]:
    """The names of the n sources of read l, in the router's order: those of its own `source_names(l)`, those that are
    known of the routers in model.py, or s0, s1, ..."""
    if hasattr(router, "source_names"):
        names = router.source_names(l)
        if len(names) != n:
            raise UserError(f"source_names({l}) of the router gives {len(names)} names; its read {l} has {n} sources.")
        return names
    if type(router).__module__ != GPT.__module__:
        return [f"s{i}" for i in range(n)]
    config, first = router.config, ["null"] * router.config.null_source + ["e"]
    if isinstance(router, Cumulative):
        return first + [f"h{j}" for j in range(1, l + 1)]
    if isinstance(router, AttnRes) or type(router) is Delta:
        return first + [f"u{j}" for j in range(l)]
    b = next((b for b, block in enumerate(router.blocks) if l in block), len(router.blocks))    # the head is after all
    sums = [f"C{i}" for i in range(b)]
    if isinstance(router, Block) and l < router.head and l > router.blocks[b].start:
        sums.append("PC")
    details = isinstance(router, WAV) and (l < router.head or config.head_details)
    return first + [c + d for c in sums for d in ["", *(f".{name}" for name in config.detail_names * details)]]

class Watch:
    """While open, `router` reads by the definition, and `see(l, sources, alphas)` is called after every read.

    sources: n tensors (B, T, D). alphas: one (n, B, T) for each route, two where values read by a query of their own.
    hidden: {read: indices of sources whose weight is 0}; the others' weights are renormalised by their softmax.
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
            self.see(l, list(sources), list(alphas))
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

def measure(model, batches) -> tuple[float, list[dict]]:
    """The loss of a model; and for each sublayer, and at last the head, what its read chooses and what it gets.
    batches: a list of (b, T + 1) int64."""
    router, names, eps = model.router, {}, model.config.norm_eps
    sums, counts = defaultdict(float), defaultdict(int)
    decoupled = getattr(router, "decouple_v", False) or model.config.decouple_v

    def add(l, name, values):                                                   # (..., B, T), to be a mean over tokens
        sums[l, name] += values.detach().cpu().double().flatten(-2).sum(-1)
        counts[l, name] += values.shape[-2:].numel()

    def see(l, sources, alphas):
        own = names.setdefault(l, source_names(router, l, len(sources)))
        if len(own) != len(sources):
            raise UserError(f"the router reads for sublayer {l} more than once, of {len(own)} and of {len(sources)} "
                            f"sources; that cannot be laid on one line.")
        if decoupled and l % 2 == 0 and l < router.head and len(alphas) == 1:
            alphas = alphas * 2                                                 # tied: one query for both routes
        alphas = [alpha.cpu().double() for alpha in alphas]
        for route, alpha in zip(("", "v_"), alphas):
            add(l, route + "weights", alpha)
            add(l, route + "sharpness", alpha.amax(0))
            add(l, route + "entropy", entropy(alpha))
        if len(alphas) == 2:
            add(l, "js_nats", js_divergence(*alphas))
        plain = [i for i, name in enumerate(own) if name != "null" and "." not in name]
        if len(plain) > 1:
            add(l, "cosine", F.cosine_similarity(sources[plain[-1]].float(), sources[plain[-2]].float(), dim=-1))

    def gets(l):
        def hook(module, hs):                                                   # (B, T, D) each: h, or h and h_v
            for route, h in zip(("", "v_"), hs):
                square = h.cpu().double().square().mean(-1)                     # (B, T)
                add(l, route + "rms", square.sqrt())
                add(l, route + "passed", (square / (square + eps)).sqrt())
        return hook

    parts = [*model.sublayers, model.norm]
    handles = [part.register_forward_pre_hook(gets(l)) for l, part in enumerate(parts)]
    try:
        for batch in tqdm(batches, disable=None, leave=False, unit="batch"):
            with torch.no_grad(), Watch(router, see):
                add(None, "loss", model(batch[:, :-1], batch[:, 1:])[1].expand(batch[:, 1:].shape))
    finally:
        for handle in handles:
            handle.remove()
    mean, rows = {key: (total / counts[key]).tolist() for key, total in sums.items()}, []
    for l in range(len(parts)):
        n = len(names.get(l, ()))
        row = {"read": l, "name": read_name(l, len(parts) - 1), "n": n, "choice": has_choice(router, l, n),
               **{name: value for (at, name), value in mean.items() if at == l}}
        if n:
            weights = dict(zip(names[l], row["weights"]))
            row |= {"sources": names[l], "equal": 1 / n, "share_e": weights.get("e")}
            if details := [w for name, w in weights.items() if "." in name]:
                row["share_details"] = sum(details)
        if n > 1:
            row |= {route + "relative_entropy": row[route + "entropy"] / math.log(n) for route in ("", "v_")
                    if route + "entropy" in row}
        rows.append(row)
    return mean[None, "loss"], rows

# ---------------------------------------------------------------------------------------------------------------------
# masks

def mean_loss(model, batches, hidden) -> float:
    """Nats a token, with sources hidden as in Watch."""
    with torch.no_grad(), Watch(model.router, hidden=hidden):
        losses = [(model(b[:, :-1], b[:, 1:])[1].item(), len(b)) for b in batches]
    return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)

def ablate(model, batches, reads: list[dict]) -> list[dict]:
    """Mask a source in every read that has it and others beside it, renormalise the rest, and measure the loss again.
    weight: the source's mean weight where it is masked, of both routes."""
    base, masks, weights, results = mean_loss(model, batches, {}), defaultdict(dict), defaultdict(list), []
    for read in reads:
        for i, name in enumerate(read["sources"] if read["choice"] else []):
            masks[name][read["read"]] = [i]
            weights[name] += [read[route][i] for route in ("weights", "v_weights") if route in read]
    for name, hidden in tqdm(masks.items(), disable=None, leave=False, unit="mask"):
        loss = mean_loss(model, batches, hidden)
        results.append({"source": name, "reads": len(hidden), "weight": float(np.mean(weights[name])), "loss": loss,
                        "effect": loss - base})
    return results

# ---------------------------------------------------------------------------------------------------------------------
# --sources

def made_of(config: GPTConfig) -> dict[int, dict[str, str]]:
    """{read: {source: what it is the sum of}}, found by running the router on toy sublayers: e and their updates are
    orthonormal, so that a source's products with them say how often it holds each. Of a sublayer that reads no depth,
    its input h."""
    head, found = 2 * config.n_layer, {}
    router = ROUTERS[config.router](replace(config, n_embd=head + 2, n_head=1, n_kv_head=1))
    parts = torch.linalg.qr(torch.randn(head + 2, head + 2, generator=torch.Generator().manual_seed(0)))[0]

    def note(l, names, sources):
        found.setdefault(l, {name: formula((parts @ s.flatten()).tolist()) for name, s in zip(names, sources)})

    def toy(l):
        def sublayer(h, h_v=None):
            note(l, ["h"], [h])                                                 # unless its read is noted
            return parts[1 + l].view(1, 1, -1)
        return sublayer

    with torch.no_grad(), Watch(router, lambda l, sources, _: note(l, source_names(router, l, len(sources)), sources)):
        note(head, ["h"], [router(parts[0].view(1, 1, -1), [toy(l) for l in range(head)])])
    return dict(sorted(found.items()))

def formula(amounts: list[float]) -> str:
    """Of e, u0, u1, ..: 'e + 0.5 u1 - u2'; five or more of one amount in a row as 'u0 + u1 + .. + u11'."""
    words = []
    for x, part in groupby(range(len(amounts)), key=lambda k: round(amounts[k], 3)):
        if x:
            sign, times = "+-"[x < 0], "" if abs(x) == 1 else f"{abs(x):g} "
            terms = [f"{sign} {times}{f'u{k - 1}' if k else 'e'}" for k in part]
            words += terms if len(terms) < 5 else [*terms[:2], f"{sign} ..", terms[-1]]
    return " ".join(words).removeprefix("+ ") or "0"

def sources_text(config: GPTConfig) -> str:
    """A line for each read: its name, the number of its sources, and each, with what it is the sum of where new."""
    known, text = {}, ""
    for l, sources in made_of(config).items():
        words = [name if made == known.get(name, name) else f"{name} = {made}" for name, made in sources.items()]
        known |= sources
        text += f"{read_name(l, 2 * config.n_layer):8} {len(words):3}   {', '.join(words)}\n"
    return text

# ---------------------------------------------------------------------------------------------------------------------
# runs

def validation(checkpoint: dict, path: str, s: RoutingConfig):
    """s.windows validation windows (n, T + 1) of a run's data, or of --dataset, and the name of the data."""
    data = open_data(s.dataset or checkpoint["settings"]["dataset"])
    if known_as(described(data)) != known_as(checkpoint["tokenizer"]):
        raise UserError(f"the tokenizer of {data.path} is not the one of {path}: its weights would read other symbols. "
                        f"Give the run's own data with --dataset.")
    T, vocab_size = (checkpoint["model_config"][name] for name in ("seq_len", "vocab_size"))
    data.check_window(T, splits=("val",))
    return windows(data.val, eval_starts(len(data.val), T, s.windows), T, vocab_size), Path(data.path).name

def first_model(checkpoint: dict, config: GPTConfig):
    """The model before its first step, made anew from the seed; None where it began from other weights."""
    begun = checkpoint["settings"].get("init_from", "scratch")
    if begun not in ("scratch", "resume") or checkpoint.get("fingerprint", {}).get("start") is not None:
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(checkpoint["settings"]["seed"])
        return GPT(config).eval()

def look_at(path: str, s: RoutingConfig, device: str) -> tuple[report.Run, list[dict], list[dict]]:
    """A run, without its log; what is measured of it, a row for each read; its ablations."""
    checkpoint = load_checkpoint(path)
    settings, name = checkpoint["settings"], checkpoint["model_config"]["router"]
    named = [x for x in (s.router or "").split(",") if ".py:" in name and router_name(x) == router_name(name)]
    router = router_of(checkpoint, named[0] if named else None, ROUTERS)
    model = load_model(checkpoint, GPT, GPTConfig, router=router, plain_read=True).to(device).eval()
    config, folder, seed = model.config, Path(path).resolve(), settings["seed"]
    tokens, dataset = validation(checkpoint, path, s)
    batches = tokens.to(device).split(max(1, BATCH_TOKENS // config.seq_len))
    cell = folder.name.removesuffix(f"-s{seed}")
    label = unquote(cell.removesuffix(f"-{config.n_layer}x{config.n_embd}").replace("+", ":"))          # as lab.sweep's
    facts = checkpoint | {"tokens_per_step": windows_a_step(settings) * config.seq_len}
    run = report.Run(label, config.n_layer, seed, facts, [{"iter": checkpoint["iter"]}], folder)

    loss, reads = measure(model, batches)
    first = first_model(checkpoint, config)
    before = measure(first.to(device), batches)[1] if first else [{} for _ in reads]
    facts = {"label": label, "cell": cell, "run": folder.name, "router": router_name(name), "n_layer": config.n_layer,
             "n_embd": config.n_embd, "seed": seed, "iter": checkpoint["iter"], "dataset": dataset,
             "tokens": tokens[:, 1:].numel(), "loss": loss}
    rows = [facts | read | {f"{name}_first": x for name, x in then.items() if name.endswith(("rms", "passed"))}
            for read, then in zip(reads, before)]
    return run, rows, [facts | a for a in ablate(model, batches, reads)] if s.ablate else []

def look_at_all(paths: list[str], s: RoutingConfig, device: str) -> tuple["pd.DataFrame", "pd.DataFrame"]:
    """The rows and the ablations of runs, and of every run in a folder; a note on those in it that cannot be measured.
    UserError where runs of one cell, by their folders' names, differ in more than the seed."""
    runs = {}                                                                   # {path: whether a folder gave it}
    for path in paths:
        inside = [] if (Path(path) / "ckpt.pt").exists() else sorted(Path(path).glob("*/ckpt.pt"))
        runs |= {str(p.parent): True for p in inside} or {path: False}
    frame, ablations, cells = [], [], defaultdict(list)
    for path, inside in tqdm(runs.items(), disable=None, leave=False, unit="run"):
        try:
            run, rows, masks = look_at(path, s, device)
            if inside and not run.done:
                raise UserError(f"{path} has not ended.")
        except UserError as e:
            if not inside:
                raise
            tqdm.write(f"left out: {e}", file=sys.stderr)
            continue
        for other in cells[rows[0]["cell"]]:
            if why := (other.seed == run.seed and "one seed twice" or other.evals != run.evals and "other iterations"
                       or report.unlike(run, other, one_cell=True)):
                raise UserError(f"{path} and {other.folder} are no runs of one cell: {why}. Compare them apart.")
        cells[rows[0]["cell"]].append(run)
        frame += rows
        ablations += masks
    if not frame:
        raise UserError(f"no run in {' '.join(paths)} could be measured.")
    return report.pd.DataFrame(frame), report.pd.DataFrame(ablations)

# ---------------------------------------------------------------------------------------------------------------------

def main(argv) -> None:
    parser = Parser(prog="python -m lab.routing", description="What a router has learned, in numbers and pictures.")
    parser.add_argument("run", nargs="?", help="the folder of a run (default: the newest under out/)")
    parser.add_argument("--compare", nargs="+", metavar="RUN",
                        help="runs, or folders of runs, side by side, seeds together")
    parser.add_argument("--sources", metavar="ROUTER", help="say what each read sees, with any flag of the model")
    parser.add_fields(RoutingConfig)
    own = RoutingConfig.__dataclass_fields__
    parser.add_fields(GPTConfig, skip=own)
    flags = vars(parser.parse_args(argv))
    one, several, sources = flags.pop("run"), flags.pop("compare"), flags.pop("sources")
    s = RoutingConfig(**{name: flags.pop(name) for name in own if name in flags})
    if sources:
        own_router(sources, ROUTERS)
        try:
            return print(sources_text(GPTConfig(**flags | {"router": sources})), end="")
        except ValueError as e:
            raise UserError(str(e)) from None
    if flags:
        raise UserError(f"--{min(flags)} is a flag of a model; it goes with --sources. A run has its own.")
    if s.windows < 1:
        raise UserError(f"--windows is {s.windows}; it must be 1 or more.")
    if sum(map(bool, (one, several, s.out_dir))) > 1:
        raise UserError("name one run, or several after --compare: python -m lab.routing --compare RUN RUN.")
    for name in ("csv", "png", "rms_png"):                                      # before the work, not after
        if getattr(s, name) and not Path(getattr(s, name)).resolve().parent.is_dir():
            raise UserError(f"--{name} {getattr(s, name)}: there is no such folder.")
    report.needed()
    settle_kernels()

    paths = several or [one or s.out_dir or str(newest_run())]
    frame, ablations = look_at_all(paths, s, pick_device(s.device))
    if not several and frame["run"].nunique() == 1:
        r = frame.iloc[0]
        print(f"{paths[0]}: {r['router']} {r['n_layer']}x{r['n_embd']}, iteration {r['iter']}, loss {r['loss']:.4f} on "
              f"{r['tokens']:,} validation tokens\n\n{routing_report.reads(frame)}")
    print(routing_report.comparison(frame), end="")
    if s.ablate:
        print("\n" + routing_report.ablation_text(ablations), end="")
    if s.csv:
        with atomic_write(s.csv) as f:
            flat = frame.map(lambda x: json.dumps(x) if isinstance(x, list) else x)
            flat.to_csv(f, index=False, float_format="%.6g", lineterminator="\n")
    if s.png:
        report.save(s.png, routing_report.choices(frame))
    if s.rms_png:
        report.save(s.rms_png, routing_report.lines(frame, routing_report.REACHING))


if __name__ == "__main__":
    run(main)
