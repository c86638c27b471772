"""What the checks run: random problems in float64, the student's function beside the checker's answer, and what to say
where they differ. A run is a list of places (the input of sublayer 0, of 1, .., what the head sees, gradients): the
first one that differs is told of, with the idea of the typical mistake that gives just that, if one does."""
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from exercises import answers
from exercises.answers import MISTAKES, mistaken, rms

class NotWritten(Exception):
    """The function is as it came."""

class Wrong(Exception):
    """What is told of a wrong answer: the idea, and where, what was expected and what came, if there is more to say."""
    def __init__(self, idea, where="", expected="", came=""):
        super().__init__(idea)
        self.lines = {"idea": idea, "where": where, "expected": expected, "came": came}

@dataclass
class Place:
    """One thing to compare: x, (.., numbers). reads: the sources that were read for it, a list for each read."""
    where: str
    x: torch.Tensor
    symbol: str = ""
    reads: list = field(default_factory=list)

B, T, D = 2, 3, 5
TOLERANCE = 1e-9            # of the largest entry: float64 has 16 digits, a dozen small sums lose three; a 1e-6 counts

def close(a, b, tolerance=TOLERANCE):
    return torch.allclose(a, b, rtol=0, atol=tolerance * max(1.0, b.nan_to_num().abs().max().item()), equal_nan=True)

# ---------------------------------------------------------------------------------------------------------------------
# what comes back from a student

def kind_of(x) -> str:
    """'a tensor (2, 3, 5)', 'a list'"""
    return f"a tensor {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"

def tensor(x, shape, what):
    """x, if it is a float64 tensor of that shape."""
    if x is None:
        raise NotWritten(f"{what} is None; is a `return` missing?")
    if not isinstance(x, torch.Tensor):
        raise Wrong(f"{what} must be a tensor, {tuple(shape)}.", came=kind_of(x))
    if x.shape != torch.Size(shape):
        raise Wrong(f"{what} has the wrong shape.", expected=str(tuple(shape)), came=str(tuple(x.shape)))
    if x.dtype != torch.float64:
        raise Wrong(f"{what} must keep the number format of what goes in, float64: a tensor made without dtype= is "
                    f"float32, as after .float().", came=str(x.dtype).removeprefix("torch."))
    return x

def items(x, n, what):
    """x, if it is a list or a tuple of n."""
    if x is None:
        raise NotWritten(f"{what} is None; is a `return` missing?")
    if not isinstance(x, (list, tuple)):
        raise Wrong(f"{what} must be a list or a tuple of {n}.", came=kind_of(x))
    if len(x) != n:
        raise Wrong(f"{what} must have {n} members.", came=f"{len(x)}")
    return x

def line_of(error, path) -> str:
    """Where in the student's file an exception came from: 'ex2_block.py, line 31'."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{Path(path).name}, line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{Path(path).name}, line {frames[-1].lineno}: {frames[-1].line}" if frames else Path(path).name

def sentence(error, path) -> Wrong:
    """A student's exception, told as a wrong answer is."""
    if isinstance(error, SystemExit):
        return Wrong("The function must return; yours ends the program (exit, quit or sys.exit).", line_of(error, path))
    first = (str(error).splitlines() or [""])[0][:300]
    return Wrong(f"The code stops with {type(error).__name__}: {first}", line_of(error, path))

# ---------------------------------------------------------------------------------------------------------------------
# toys: sublayers and a read that take notes

class Toys:
    """2L sublayers u = tanh(h / rms(h) A_l), token by token, a `read`, and what was done with them.

    calls: (l, h, the reads before it) in order. Whatever was read or handed out is looked at again in `check`.
    """
    def __init__(self, weights, query):
        self.weights, self.query, self.calls, self.reads, self.seen = weights, query, [], [], []
        self.sublayers = [lambda h, l=l: self.sublayer(l, h) for l in range(len(weights))]

    def note(self, x, what):
        self.seen.append((x, x._version, what))
        return x

    def sublayer(self, l, h):
        if not isinstance(h, torch.Tensor) or h.shape != (B, T, D):
            raise Wrong(f"Sublayer {l} takes one tensor, {(B, T, D)}.", came=kind_of(h))
        self.calls.append((l, self.note(h, f"the input of sublayer {l}"), self.reads))
        self.reads = []
        return self.note(torch.tanh(h / rms(h)[..., None] @ self.weights[l]) * (0.3 + l % 3),
                         f"the update of sublayer {l}")

    def read(self, query, sources, bias=None, scale=None):
        """The mix, (B, T, D), of the sources by a row of query; bias, scale: a number, or (B, T), for each source."""
        if not isinstance(query, torch.Tensor) or query.shape != (D,):
            raise Wrong(f"`read` takes one row of query, ({D},), and a list of sources.", came=kind_of(query))
        sources = list(sources) if isinstance(sources, (list, tuple, torch.Tensor)) else [sources]
        if not sources or any(not isinstance(s, torch.Tensor) or s.shape != (B, T, D) for s in sources):
            raise Wrong(f"`read` takes a list of one source or more, each {(B, T, D)}.",
                        came=f"[{', '.join(map(kind_of, sources))}]")
        n = len(sources)
        for name, x in (("bias", bias), ("scale", scale)):
            if x is not None and len(x) != n:
                raise Wrong(f"`{name}` has a number for each source.", expected=f"{n}", came=f"{len(x)}")
        row = next((i for i, w in enumerate(self.query) if torch.equal(w, query)), None)
        s = torch.stack(sources)                                        # (n, B, T, D)
        logit = (s * query).sum(-1) / rms(s)                            # (n, B, T)
        numbers = lambda given, none: torch.stack([torch.as_tensor(none if x is None else x, dtype=s.dtype).expand(B, T)
                                                   for x in ([None] * n if given is None else given)])
        given = {"bias": numbers(bias, 0.0), "scale": numbers(scale, 1.0)}          # (n, B, T)
        self.reads = [*self.reads, (row, [self.note(x, f"source {i} of a read") for i, x in enumerate(sources)], given)]
        weight = (logit + given["bias"]).softmax(0) * given["scale"]
        return (weight[..., None] * s).sum(0)

    def check(self):
        order = [l for l, _, _ in self.calls]
        if order != list(range(len(self.weights))):
            raise Wrong("Every sublayer runs once, in order, from 0 to 2L-1.",
                        expected=str(list(range(len(self.weights)))), came=str(order))
        unchanged(self.seen)

def unchanged(seen):
    """Wrong if one of (tensor, its version then, its name) has been changed in place."""
    for x, version, what in seen:
        if x._version != version:
            raise Wrong(f"Nothing that was read or handed out may change later; yours changes {what} in place. Write "
                        f"c = c + u, which makes a new tensor, and not c += u.")

# ---------------------------------------------------------------------------------------------------------------------
# the problems: cases(draw) gives the inputs, run(f, case) the places

def draws(seed):
    """A function of a shape that draws normal numbers of float64."""
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)

def sources_of(draw, n, small=False):
    """n sources of different loudness; small: the third is as at the start of training, where the epsilon counts."""
    return [draw(B, T, D) * (1e-3 if small and i == 2 else 0.5 + i) for i in range(n)]

def copies(case):
    """The case with new tensors, so that nobody changes those of others, and their versions."""
    new = {k: [x.clone() for x in v] if isinstance(v, list) and isinstance(v[0], torch.Tensor) else
           v.clone() if isinstance(v, torch.Tensor) else v for k, v in vars(case).items()}
    seen = [(x, x._version, name) for name, v in new.items() for x in (v if isinstance(v, list) else [v])
            if isinstance(x, torch.Tensor)]
    return SimpleNamespace(**new), seen

def read_cases(draw):
    cases = [SimpleNamespace(query=draw(D), sources=sources_of(draw, n, small), g=draw(B, T, D))
             for n, small in ((2, False), (3, False), (4, True))]
    zero = SimpleNamespace(query=draw(D), sources=[draw(B, T, D), torch.zeros(B, T, D).double()], g=draw(B, T, D))
    return [*cases, zero, SimpleNamespace(query=1e4 * draw(D), sources=sources_of(draw, 3), g=draw(B, T, D))]

def run_read(f, case):
    c, seen = copies(case)
    n = len(c.sources)
    mix, alpha = items(f(c.query, c.sources), 2, "What depth_read returns, (mix, alpha),")
    if isinstance(alpha, torch.Tensor) and alpha.isnan().any() and c.query.abs().max() > 1e3:
        raise Wrong("exp overflows above 709: take the largest logit away from all of them first. It changes no "
                    "weight, as it stands above and below.", "a query of size 10,000", "weights that sum to 1", "nan")
    unchanged(seen)
    return [Place(f"the weights of {n} sources", tensor(alpha, (n, B, T), "alpha").movedim(0, -1), "alpha"),
            Place(f"the mix of {n} sources", tensor(mix, (B, T, D), "The mix"), "mix")]

def run_backward(f, case):
    c, seen = copies(case)
    d_query, d_s = items(f(c.query, c.sources, c.g), 2, "What depth_read_backward returns, (d_query, d_sources),")
    if isinstance(d_s, torch.Tensor):
        d_s = list(d_s)
    d_s = items(d_s, len(c.sources), "d_sources")
    unchanged(seen)
    found = [Place(f"the gradient by source {i} of {len(d_s)}", tensor(x, (B, T, D), "A source's gradient"), f"d s_{i}")
             for i, x in enumerate(d_s)]
    return [*found, Place("the gradient by the query", tensor(d_query, (D,), "d_query"), "d query")]

def run_split(f, case):
    blocks = f(case.n_layer, case.n_blocks)
    try:
        blocks = [list(map(int, b)) for b in items(blocks, case.n_blocks, f"split_layers{case.n_layer, case.n_blocks}")]
    except TypeError:
        raise Wrong("Each block is a range of sublayers.", came=repr(blocks)[:100]) from None
    sizes = [0] * (2 * case.n_layer)                                    # a number for each sublayer: its block
    for b, block in enumerate(blocks):
        for l in block:
            if not 0 <= l < len(sizes):
                raise Wrong("l counts the 2L sublayers from 0 to 2L-1.", f"{case.n_layer} layers in {case.n_blocks} "
                            f"blocks, block {b}", f"l below {len(sizes)}", f"l = {l}")
            sizes[l] = sizes[l] + b + 1
    return [Place(f"{case.n_layer} layers in {case.n_blocks} blocks (numbers: 1 + the block of each sublayer)",
                  torch.tensor(sizes).double(), "blocks")]

def router_cases(draw):
    """5 layers in blocks of 3 and 2 (half of the first is not a whole layer); 3 in blocks of 2 and 1; 4 in 4."""
    for L, N in ((5, 2), (3, 2), (4, 4)):
        yield SimpleNamespace(e=draw(B, T, D), weights=draw(2 * L, D, D), query=draw(2 * L + 1, D), gate=draw(2 * L),
                              detail_bias=draw(2 * L, 2) / 2, out=draw(B, T, D), blocks=answers.split_layers(L, N),
                              rho=0.8)

def run_router(f, case, names):
    """names: what f takes between the sublayers and `read`."""
    c, _ = copies(case)
    if "gate" in names:
        c.query = c.query[:-1].clone()                                  # the head sees the stream, and reads not
    leaves = {k: getattr(c, k) for k in ("e", "weights", *names) if isinstance(getattr(c, k), torch.Tensor)}
    for x in leaves.values():
        x.requires_grad_()
    toys = Toys(c.weights, c.query)
    e = toys.note(c.e * 1, "e")
    h = tensor(f(e, toys.sublayers, *(getattr(c, k) for k in names), toys.read), (B, T, D), "What comes back")
    toys.check()
    found = []
    for l, x, reads in toys.calls:
        kind = "MLP" if l % 2 else "attention"
        if "blocks" in names:
            kind += f", block {next(b for b, block in enumerate(c.blocks) if l in block)}"
        found.append(Place(f"the input of sublayer {l} ({kind})", x.detach(), f"h_{l}", reads))
    found.append(Place("what the head sees", h.detach(), "h", toys.reads))
    for k, d in zip(leaves, gradients((h * c.out).sum(), leaves.values())):
        found.append(Place(f"the gradient by {'what the sublayers return' if k == 'weights' else k}", d, "gradient"))
    return found

def gradients(loss, leaves):
    """Zeros where none arrives."""
    leaves = list(leaves)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, grads)]

def input_cases(draw):
    for L in (3, 2):
        shared = dict(query=draw(2 * L + 1, D), query_v=draw(L, D), sources=sources_of(draw, 3), g=draw(2, B, T, D),
                      L=L)
        yield from (SimpleNamespace(**shared, l=l) for l in range(2 * L + 1))

def run_inputs(f, case):
    c, _ = copies(case)
    kind = "the head's read" if c.l == 2 * c.L else "an MLP's" if c.l % 2 else "an attention's"
    which = f"l = {c.l}, {kind} of {c.L} layers"
    leaves = [x.requires_grad_() for x in (c.query, c.query_v, *c.sources)]
    toys = Toys([], torch.cat((c.query, c.query_v)))
    sources = [toys.note(s * 1, f"source {i}") for i, s in enumerate(c.sources)]
    kept = list(sources)
    try:
        h = f(c.l, sources, c.query, c.query_v, toys.read)
    except IndexError as error:
        if c.l == 2 * c.L:
            raise Wrong("The head's read is number 2L. That is even, but the head is no attention: no row of query_v.",
                        which, came=f"IndexError: {error}") from None
        raise
    if len(kept) != len(sources) or any(a is not b for a, b in zip(kept, sources)):
        raise Wrong("The list of sources belongs to the router; yours adds to it, or takes from it.")
    unchanged(toys.seen)
    if h is not None and (not isinstance(h, (list, tuple)) or len(h) not in (1, 2)):
        raise Wrong("`inputs` returns a list: [h], or [h, h_v].", which, came=kind_of(h))
    h = [tensor(x, (B, T, D), "h") for x in items(h, 1 if h is None else len(h), "What `inputs` returns")]
    found = [Place(f"the number of inputs, {which}", torch.tensor([len(h)]).double(), "inputs")]
    reads = toys.reads if len(toys.reads) == len(h) else []
    for i, (name, x) in enumerate(zip(("h", "h_v"), h)):
        found.append(Place(f"{name} of {which}", x.detach(), name, reads[i:i + 1]))
    loss = sum((x * g).sum() for x, g in zip(h, c.g))
    return found + [Place(f"the gradient by a query or a source, {which}", d, "gradient")
                    for d in gradients(loss, leaves)]

def run_tied(f, case):
    c, _ = copies(case)
    query_v = tensor(f(c.query), (c.L, D), "The tied query_v")
    toys = Toys([], c.query)
    places = [Place(f"row {i}, of the attention of layer {i}", row, f"query_v[{i}]") for i, row in enumerate(query_v)]
    for l in range(2 * c.L + 1):                                        # so tied, rd is exercise 2
        block = toys.read(c.query[l], c.sources)
        for name, x in zip(("h", "h_v"), answers.inputs(l, c.sources, c.query, query_v, toys.read)):
            places.append(Place(f"{name} of l = {l}, minus exercise 2's h", x - block, "difference"))
    return places

def weight_cases(draw):
    p, q = draw(4, B, T).softmax(0), draw(4, B, T).softmax(0)
    sharp = torch.zeros(4, B, T).double()
    sharp[0] = 1
    return [SimpleNamespace(p=draw(2, B, T).softmax(0), q=draw(2, B, T).softmax(0)), SimpleNamespace(p=p, q=q),
            SimpleNamespace(p=p, q=sharp)]

def run_divergence(f, case):
    c, seen = copies(case)
    x = tensor(f(c.p, c.q), (B, T), "The divergence")
    unchanged(seen)
    return [Place(f"token b={b}, t={t}, {len(c.p)} sources, p = {numbers(c.p[:, b, t])}, q = {numbers(c.q[:, b, t])}",
                  x[b, t].view(1), "JS") for b in range(B) for t in range(T)]

def run_signs(f, case):
    places = []
    for block in case.blocks:
        for l in block:
            a, s = items(f(l, block), 2, "What signs returns, (phase, split),")
            where = f"sublayer {l}, the {l - block[0]}th (from 0) of a block of {len(block)}"
            try:
                places.append(Place(where, torch.tensor([float(a), float(s)]).double(), "phase, split"))
            except (TypeError, ValueError):
                raise Wrong("A sign is the number +1 or -1.", where, came=repr((a, s))[:100]) from None
    return places

def ratio_cases(draw):
    for rho in (0.7, 1.6):
        yield SimpleNamespace(c=draw(B, T, D), d=draw(B, T, D), rho=rho)
        yield SimpleNamespace(c=draw(B, T, D) * 1e-3, d=draw(B, T, D) * 1e-3, rho=rho)

def run_ratio(f, case):
    c, seen = copies(case)
    r = tensor(f(c.c.requires_grad_(), c.d.requires_grad_(), c.rho), (B, T), "r")
    unchanged(seen)
    if r.requires_grad:
        raise Wrong("r is a matched loudness and no path for a gradient: it must be detached, and yours is not.")
    return [Place(f"r, at rho = {c.rho}", r[..., None], "r")]

def layers(*pairs):
    return lambda draw: [SimpleNamespace(n_layer=L, n_blocks=N) for L, N in pairs]

def router(*names):
    return router_cases, lambda f, case: run_router(f, case, names)

CHECKS = {
    1: {"depth_read": (read_cases, run_read), "depth_read_backward": (read_cases, run_backward)},
    2: {"split_layers": (layers((4, 4), (4, 2), (12, 8), (5, 3), (7, 3), (3, 1)), run_split),
        "block": router("blocks", "query")},
    3: {"inputs": (input_cases, run_inputs), "tied_query_v": (input_cases, run_tied),
        "divergence": (weight_cases, run_divergence)},
    4: {"delta": router("query", "gate"), "delta_block": router("blocks", "query", "gate")},
    5: {"signs": (router_cases, run_signs), "ratio": (ratio_cases, run_ratio),
        "wav": router("blocks", "query", "detail_bias", "rho")},
}

# ---------------------------------------------------------------------------------------------------------------------
# comparing

def check(number, name, f, seed):
    """Wrong or NotWritten unless the student's function f gives what the answer gives."""
    make, run = CHECKS[number][name]
    answer, cases = getattr(answers, name), list(make(draws(seed)))
    want, came = list(places(run, answer, cases)), []
    try:
        for place in places(run, f, cases):
            came.append(place)
            if differ(place, want[len(came) - 1]):
                break
        else:
            return
    except Exception as error:                                          # a wrong shape, say: what else ends so?
        idea = isinstance(error, Wrong) and same_end(name, answer, run, cases, error.lines)
        raise Wrong(**error.lines | {"idea": idea}) if idea else error
    k = len(came) - 1
    came += list(quietly(places(run, f, cases)))[k + 1:]                # what comes after, to tell mistakes apart
    raise told(came[k], want[k], idea_of(name, answer, run, cases, came, want, k))

def places(run, f, cases):
    """The places of all cases, one after another; a case is run when its first is asked for."""
    for case in cases:
        yield from run(f, case)

def quietly(generator):
    """Up to its first exception."""
    try:
        yield from generator
    except Exception:
        return

def differ(a, b, tolerance=TOLERANCE):
    return a.where != b.where or not close(a.x, b.x, tolerance)

def idea_of(name, answer, run, cases, came, want, k):
    """The typical mistake that agrees with what came the longest, from k on, where the answer does not; or None.

    One place may agree by chance (2 e is e twice, and a stream with the mix of e added to it), three do not.
    """
    enough = min(k + 3, len(came))
    far = differ(came[k], want[k], 1e-3)
    for tolerance in (TOLERANCE, 1e-4) if far else (TOLERANCE,):        # 1e-4: the mistake, but for an epsilon
        best, idea = enough - 1, None
        for text, *edits in MISTAKES[name]:
            agreed = 0
            for a, b in zip(came, quietly(places(run, mistaken(answer, *edits), cases))):
                if differ(a, b, tolerance):
                    break
                agreed += 1
            if agreed > best:
                best, idea = agreed, text
        if idea:
            return idea

def same_end(name, answer, run, cases, lines):
    """The typical mistake that ends in the same sentence; or None."""
    for text, *edits in MISTAKES[name]:
        try:
            for _ in places(run, mistaken(answer, *edits), cases):
                pass
        except Wrong as other:
            if other.lines == lines:
                return text
        except Exception:
            continue

def numbers(x, most=4, digits=3):
    return "(" + ", ".join(f"{v:.{digits}g}" for v in x[:most].tolist()) + (", ..)" if len(x) > most else ")")

def told(came, want, idea):
    """The sentence, and what was expected and came: for the token that differs most, and for two sources."""
    if came.where != want.where:                                        # one has more of something
        return Wrong(idea or "The number of inputs is not right.", want.where, want.symbol, came.symbol)
    gap = (came.x - want.x).nan_to_num(nan=torch.inf).abs()
    at = divmod(gap.flatten().argmax().item(), gap.shape[-1])[0]        # the worst row
    a, b = came.x.reshape(-1, gap.shape[-1])[at], want.x.reshape(-1, gap.shape[-1])[at]
    row = f", token b={at // T}, t={at % T}" if gap.shape[:-1] == (B, T) else f", row {at}" if gap.dim() > 1 else ""
    where = want.where + row
    near = close(came.x, want.x, 1e-5)
    if near and want.symbol != "gradient":
        idea = idea or ("Nearly right, by less than 1e-5: an epsilon that is missing or stands elsewhere, or something "
                        "in float32.")
    digits = 10 if near else 4
    if want.symbol == "alpha":                                          # two sources, the worst of them among them
        i, total = gap.reshape(-1, gap.shape[-1])[at].argmax().item(), a.sum().item()
        if not idea and not close(came.x.sum(-1), torch.ones(B, T).double()):
            sums = {"tokens": came.x.sum(1), "the sequences of the batch": came.x.sum(0)}
            over = [f"sum to 1 over {axis}." for axis, x in sums.items() if close(x, torch.ones_like(x))]
            idea = f"The weights must sum to 1 over depth for each token; yours {over[0] if over else 'do not.'}"
        pair = sorted({i, 0 if i else 1})
        show = lambda x: ", ".join(f"alpha_{j} = {x[j]:.{digits}g}" for j in pair)
        more = "" if abs(total - 1) < 1e-9 else f" (and all {len(a)} sum to {total:.4g})"
        return Wrong(idea or "These are not the weights of the page's equation.", where, show(b), show(a) + more)
    expected, got = (f"{want.symbol} = {numbers(x, 24 if want.symbol == 'blocks' else 4, digits - 1)}" for x in (b, a))
    if want.symbol == "gradient":
        return Wrong(idea or "The values are right and the gradient is not: something is detached, or left autograd "
                             "(.detach(), .data, .item(), torch.tensor(..), no_grad).", where, expected, got)
    if want.reads and came.reads:
        (row, theirs, given), (right_row, ours, right_given) = came.reads[-1], want.reads[-1]
        missing, extra = without(ours, theirs), without(theirs, ours)
        by = lambda r: "no row" if r is None else f"row {r}"
        expected, got = (f"{text}\nread by {by(r)} of query from {len(s)} source{'s' * (len(s) > 1)}: {two(s, odd, at)}"
                         for text, r, s, odd in ((expected, right_row, ours, missing), (got, row, theirs, extra)))
        if not idea and (missing or extra or len(ours) != len(theirs)):
            idea = ("This read has other sources than in the page's equation. "
                    f"Missing, of {len(ours)}: {len(missing)}. Not belonging there, of yours: {len(extra)}.")
        if not idea and row != right_row:
            idea = "The sources are right, and the row of query that reads them is not."
        for kind in given:                                              # of an order like ours
            same = len(ours) == len(theirs) and all(map(close, theirs, ours))
            if same and not idea and not close(given[kind], right_given[kind]):
                i, b, t = divmod_all((given[kind] - right_given[kind]).abs().argmax().item())
                idea = f"The sources are right, and the {kind} of one is not."
                where = f"{want.where}, token b={b}, t={t}"
                expected, got = (f"{kind} of s_{i} = {x[kind][i, b, t]:.4g}" for x in (right_given, given))
    return Wrong(idea or f"This is not {want.symbol} of the page's equation.", where, expected, got)

def divmod_all(at):
    """The place in a tensor (n, B, T) of its flat index."""
    return at // (B * T), at // T % B, at % T

def without(sources, others):
    """Which of the sources are none of the others, each of which counts once."""
    others, odd = list(others), []
    for i, s in enumerate(sources):
        j = next((j for j, t in enumerate(others) if close(s, t)), None)
        if j is None:
            odd.append(i)
        else:
            others.pop(j)
    return odd

def two(sources, odd, at):
    """Two sources at one token; those in `odd`, which the other side has not, before others."""
    chosen = sorted([*odd, *(i for i in range(len(sources)) if i not in odd)][:2])
    return ", ".join(f"s_{i} = {numbers(sources[i].detach().reshape(-1, D)[at])}" for i in chosen)
