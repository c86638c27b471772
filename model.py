"""
A GPT whose residual connection is a choice. Five learned depth routers, and the rules they are measured against.

What is unusual about it:
- a *router* drives the stack: it gets the token embedding and the list of 2L sublayers, runs them in order and decides
  what each one reads; an ordinary residual connection is the router of four lines
- sublayers (attention, MLP) only return their update u; they know nothing of routing, and routers nothing of attention
- depth read: a softmax over earlier outputs *of the same token*, by a learned query of its own for each sublayer
- the rest is Qwen3's block, so that its weights load: RMSNorm, rotary positions, RMS norm on each head's queries and
  keys, grouped-query attention, SwiGLU, no biases

Sources: Attention Residuals (arXiv 2603.15031), RD-AttnRes (2608.01075), Delta AttnRes (2605.18855), WAV v1 (2606.06564).

Shapes: B sequences, T tokens, D = n_embd, L layers, so 2L sublayers: l even is attention, l odd an MLP.
"""
import difflib
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-6                              # in every rms: rms(s) = sqrt(mean over D of s^2 + EPS)

# MKL settles on a kernel in the first call of each function. Where several threads make that call together, one may get
# a coarse kernel, right to 1e-4 (pytorch issue 188792), so that one seed would not be one result. One number has one thread.
for one in (torch.ones(1), torch.ones(1, dtype=torch.float64)):
    one.exp(), one.log(), one.sqrt(), one.cos(), one.sin()

@dataclass
class GPTConfig:
    vocab_size: int = 96                # tokens the model knows
    seq_len: int = 128                  # the longest context, in tokens
    n_layer: int = 12                   # L: layers, each one attention and one MLP
    n_head: int = 4                     # query heads
    n_kv_head: int | None = None        # key and value heads; none: n_head
    n_embd: int = 64                    # D: the width
    head_dim: int | None = None         # width of a head; none: n_embd / n_head
    mlp_hidden: int | None = None       # width inside an MLP; none: 8/3 n_embd, rounded up to a multiple of 64
    router: str = "block"               # residual rezero layerscale attnres cumulative block rd delta delta_block wav
    n_blocks: int | None = None         # depth blocks of block, rd, delta_block and wav; none: min(8, n_layer)
    decouple_v: bool = False            # values read depth by a query of their own (rd is block with this on)
    rd_control: str = "none"            # none, or a control of decoupled reads: tied, average, frozen_v
    details: str = "phase,split"        # wav's details: phase, split, both in either order, or none
    detail_bias: float = -2.0           # first value of the bias on a detail's logit
    rho: float = 1.0                    # the most by which a detail is scaled to be as loud as its block's sum
    head_details: bool = False          # wav: the head's read sees the details too
    null_source: bool = False           # one more source, all zeros, in every depth read
    route_gate: float | None = None     # delta, delta_block: first value of a learned gate on each mix; none: no gate
    layerscale_init: float | None = None  # first value of layerscale's gains; none: by depth, as in CaiT
    plain_read: bool = False            # read depth by the definition, not by the fast path: the same numbers
    dropout: float = 0.0                # on the embedding, attention weights and updates
    tie_embeddings: bool = True         # the head is the embedding transposed
    rope_theta: float = 10000.0         # base of the rotary frequencies

    def __post_init__(self):
        def check(ok, name, do):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; {do}.")
        for name in ("vocab_size", "seq_len", "n_layer", "n_head", "n_embd"):
            check(getattr(self, name) >= 1, name, "it must be at least 1")
        if self.head_dim is None:
            check(self.n_embd % self.n_head == 0, "n_embd", f"it must be a multiple of n_head ({self.n_head}), "
                  "or set head_dim")
            self.head_dim = self.n_embd // self.n_head
        check(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim",
              "rotary positions turn pairs, so it must be even (without head_dim it is n_embd / n_head)")
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        check(self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0, "n_kv_head",
              f"it must divide n_head ({self.n_head})")
        if self.mlp_hidden is None:
            self.mlp_hidden = 64 * math.ceil(8 * self.n_embd / 3 / 64)
        check(self.mlp_hidden >= 1, "mlp_hidden", "it must be at least 1")
        near = difflib.get_close_matches(str(self.router), ROUTERS, n=1, cutoff=0.3)
        check(self.router in ROUTERS, "router", (f"did you mean {near[0]}? " if near else "") + "The routers are "
              + " ".join(ROUTERS))
        self.n_blocks = min(8, self.n_layer) if self.n_blocks is None else self.n_blocks
        check(1 <= self.n_blocks <= self.n_layer, "n_blocks", f"it must be from 1 to n_layer ({self.n_layer})")
        reads = issubclass(ROUTERS[self.router], DepthRouter)
        check(reads or not self.decouple_v, "decouple_v", f"the router {self.router} has no depth read to decouple")
        check(self.rd_control in ("none", "tied", "average", "frozen_v"), "rd_control",
              "choose of none tied average frozen_v")
        check(self.decouple_v or self.router == "rd" or self.rd_control == "none", "rd_control",
              "it controls a decoupled read: choose router rd, or set decouple_v")
        names = self.detail_names
        check(set(names) <= {"phase", "split"} and len(set(names)) == len(names), "details",
              "choose of phase split phase,split none")
        check(self.rho > 0, "rho", "it must be above 0")
        check(reads or not self.null_source, "null_source", f"the router {self.router} has no depth read to add it to")
        check(self.route_gate is None or self.router in ("delta", "delta_block"), "route_gate",
              "it gates a mix that is added to a stream: choose router delta or delta_block")
        check(0 <= self.dropout < 1, "dropout", "it must be from 0 to below 1")

    @property
    def detail_names(self) -> list[str]:
        return [] if self.details in ("", "none") else [name.strip() for name in self.details.split(",")]

    @property
    def blocks(self) -> list[range]:
        """The sublayers of each depth block. L layers split as evenly as they go, the longer blocks first."""
        short, longer = divmod(self.n_layer, self.n_blocks)
        sizes = [2 * (short + (b < longer)) for b in range(self.n_blocks)]       # in sublayers, so each one is even
        ends = [sum(sizes[:b + 1]) for b in range(self.n_blocks)]
        return [range(end - size, end) for end, size in zip(ends, sizes)]

# ---------------------------------------------------------------------------------------------------------------------
# The depth read

def wide(x):
    """x in float32 at least: sums along depth and softmaxes over it stay in float32 under autocast."""
    return x.float() if x.dtype.itemsize < 4 else x

def inverse_rms(x):
    """1 / rms of each vector: (..., D) -> (...). In one pass over x: its squares would be a tensor more."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    return (norm * norm / x.size(-1) + EPS).rsqrt()

def mean_squares(tensors):
    """The mean of each vector's squares, of n tensors, (B, T, D) each: (n, B, T)."""
    norm = torch.stack([torch.linalg.vector_norm(x, dim=-1) for x in tensors])
    return norm * norm / tensors[0].size(-1)

def ratios(square, rho):
    """What scales n vectors of these mean squares, (n, B, T): 1 for the first, min(rms_0 / rms_i, rho) for the others."""
    ratio = ((square[0] + EPS) / (square + EPS)).sqrt().clamp(max=rho)
    ratio[0] = 1
    return ratio

def match(sources, rho):
    """n sources, (B, T, D) each, scaled to be as loud as the first, but by rho at most; the scales are detached."""
    with torch.no_grad():
        ratio = ratios(mean_squares(sources), rho)                              # (n, B, T)
    return [sources[0], *(s * r for s, r in zip(sources[1:], ratio[1:].unsqueeze(-1)))]

def plain_read(query, sources, bias=None):
    """The depth read by its definition (Attention Residuals, section 3, without the gain on its keys).

        logit_i = query . s_i / rms(s_i) + bias_i        alpha = softmax over i        mix = sum_i alpha_i s_i

    query: (D). sources: n tensors (B, T, D). bias: (n), or None for 0. Returns the mix, (B, T, D), and alpha, (n, B, T).
    """
    s = wide(torch.stack(sources))                                              # (n, B, T, D)
    logit = (s * query).sum(-1) / (s.square().mean(-1) + EPS).sqrt()            # (n, B, T)
    if bias is not None:
        logit = logit + bias[:, None, None]
    alpha = logit.softmax(0)
    return (alpha.unsqueeze(-1) * s).sum(0), alpha

# A router begins the reads of a run of sublayers together, with the sources that exist before the run. What remains of
# each is a function that finishes it when its turn comes, with the sources written since. Plainly, nothing happens before:

def begin_plain(queries, sources, bias):
    """Begin reads. queries: those of each, (1, D), or where values read apart (2, D). bias: (reads, n), on n sources."""
    return [functools.partial(finish_plain, query, sources, b) for query, b in zip(queries, bias)]

def finish_plain(query, sources, past_bias, recent, bias, rho):
    """A read's mixes, (B, T, D), one for each of its queries; and recent, as it is to be used from then on.

    recent: n sources written since the read began. bias: (n), theirs; None is 0. rho: match them to the first of them;
    None: take them as they are.
    """
    bias = query.new_zeros(len(recent)) if bias is None else bias
    matched = recent if rho is None else match(recent, rho)
    return [plain_read(q, [*sources, *matched], torch.cat((past_bias, bias)))[0] for q in query], recent

# The fast pair gives the same numbers, and may be skipped on a first reading. The queries are known in advance, so a
# run's reads share one pass over the older sources (Pass). It leaves for each query one tensor, their mix, and the
# log-sum-exp of their logits: from then on they are *one* source with that logit, beside the few recent ones (Read, and
# ReadOne for PC alone). The Kimi paper decodes so. Autograd keeps only the sources, which exist anyway, and a weight for
# each source and token: no stack, no normed copy, no product. A read returns its recent sources too: the gradients of their
# later uses then come through it, and it adds its own to them as it makes it, where autograd would need a pass more. Only
# the plain pair can be differentiated twice: here backward passes write into memory in place, and that raises an error.

def begin_fast(queries, sources, bias):
    if sources[0].numel() <= FEW and not torch.is_grad_enabled():               # decoding: what counts is how many operations
        return begin_plain(queries, sources, bias)
    routes = [len(query) for query in queries]
    query = torch.cat(queries)                                                  # (R, D)
    bias = torch.cat([b.expand(n, -1) for n, b in zip(routes, bias.split(1))])  # (reads, n) -> (R, n)
    with torch.autocast(query.device.type, enabled=False):                      # in float32
        if len(sources) == 1:                                                   # it is its own mix
            s = wide(sources[0])                                                # views, as one tensor may not come twice
            mixes, logit = [s.view_as(s) for _ in query], score(query, s) + bias.unsqueeze(-1)
        else:
            tokens = [s.flatten(0, 1) for s in sources]                         # (B, T, D) -> (N, D), N = B T
            parts = pieces(len(sources), sources[0])
            if parts == 1:
                outputs = apply(Pass, query, bias, *tokens)
            else:
                tokens = zip(*(s.chunk(parts) for s in tokens))
                outputs = [torch.cat(x) for x in zip(*(apply(Pass, query, bias, *part) for part in tokens))]
            logit, *mixes = (x.unflatten(0, sources[0].shape[:2]) for x in outputs)     # (B, T, R), R of (B, T, D)
            logit = logit.movedim(-1, 0)                                        # (R, B, T)
    mixes = iter(mixes)
    return [functools.partial(finish_fast, own, [next(mixes) for _ in range(n)], own_logit)
            for own, n, own_logit in zip(queries, routes, logit.split(routes))]

def finish_fast(query, past, past_logit, recent, bias, rho):
    if not recent:
        return past, recent
    with torch.autocast(query.device.type, enabled=False):
        sources, bias, where = (recent, bias, range(len(recent))) if rho is None else merged(recent, bias, rho)
        if len(sources) == 1:
            past_logit = past_logit if bias is None else past_logit - bias
            *mixes, source = apply(ReadOne, query, past_logit, *sources, *past)
            sources = [source]
        else:
            mixes = []
            for q, mix, logit in zip(query, past, past_logit):
                mix, *sources = apply(Read, q, bias, rho, mix, logit, *sources)
                mixes.append(mix)
        return mixes, [sources[i] for i in where]

def score(query, s):
    """The logits of a source: query . s / rms(s), (R, B, T) for query (R, D)."""
    return (s @ query.T).movedim(-1, 0) * inverse_rms(s)

def merged(recent, bias, rho):
    """Where a source comes again, as a detail of WAV does that has only added: it is one source with both weights.

    Returns the distinct sources, their biases, and which of them each of `recent` is.
    """
    if rho < 1:                                                                 # scaled, it is another source
        return [recent[0], *(s.view_as(s) for s in recent[1:])], bias, range(len(recent))
    first = [next(i for i, t in enumerate(recent) if t is s) for s in recent]
    distinct = [i for i, j in enumerate(first) if i == j]
    if len(distinct) == len(recent):
        return recent, bias, first
    bias = [functools.reduce(torch.logaddexp, [b for b, j in zip(bias.unbind(), first) if j == i]) for i in distinct]
    return [recent[i] for i in distinct], torch.stack(bias), [distinct.index(i) for i in first]

def apply(function, *args):
    """An autograd function; where no gradient is wanted, its forward alone, without a ctx: that is quicker."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(None, *args)

FEW = 2**13                             # numbers in a source, so few that the definition takes less time than the fast pair
PASS_READS = 12                         # sublayers whose reads share a pass: the mixes should be in the cache at their turn
PASS_NUMBERS = 6 * 2**20                # in each tensor of a pass, on a CPU: C libraries map larger ones anew each time

def pieces(count, s):
    """In how many pieces a pass makes a tensor as large as `count` of s."""
    return math.ceil(count * s.numel() / PASS_NUMBERS) if s.device.type == "cpu" else 1

class Pass(torch.autograd.Function):
    """R reads of the same n sources, (N, D) each, N tokens: the log-sum-exps of their logits, (N, R), and R mixes, (N, D)."""
    @staticmethod
    def forward(ctx, query, bias, *sources):
        s = wide(torch.stack(sources, 1))                                       # (N, n, D)
        scale = inverse_rms(s).unsqueeze(-1)                                    # (N, n, 1)
        dot = (s @ query.T) * scale                                             # (N, n, R)
        logit = dot + bias.T
        largest = logit.amax(1, keepdim=True)                                   # (N, 1, R)
        alpha = (logit - largest).exp_()                                        # (N, n, R)
        total = alpha.sum(1, keepdim=True)                                      # (N, 1, R)
        alpha.div_(total)
        group = math.ceil(len(query) / pieces(len(query), sources[0]))          # mixes in one tensor
        mixes = [mix for a in alpha.split(group, -1) for mix in (a.mT @ s).unbind(1)]       # R of (N, D)
        if ctx:
            ctx.group = group
            ctx.save_for_backward(query, scale, dot, alpha, *sources)
        return (largest + total.log()).squeeze(1), *mixes

    @staticmethod
    def backward(ctx, d_lse, *d_mixes):
        query, scale, dot, alpha, *sources = ctx.saved_tensors
        s, group = wide(torch.stack(sources, 1)), ctx.group                     # (N, n, D)
        gs = [torch.stack(d_mixes[i:i + group], 1) for i in range(0, len(query), group)]        # (N, group, D) each
        d_alpha = torch.cat([s @ g.mT for g in gs], -1)                         # (N, n, R)
        mean = (alpha * d_alpha).sum(1) - d_lse                                 # (N, R)
        d_logit = d_alpha.sub_(mean.unsqueeze(1)).mul_(alpha)                   # (N, n, R)
        d_dot = d_logit * scale
        through_rms = (d_dot * dot).sum(-1, keepdim=True) * scale / s.size(-1)  # (N, n, 1)
        d_query = d_dot.flatten(0, 1).T @ s.flatten(0, 1)                       # (R, N n) @ (N n, D)
        d_s = s.mul_(-through_rms)                                              # in place, here and below: n sources are large
        for a, g in zip(alpha.split(group, -1), gs):
            d_s.baddbmm_(a, g)
        d_s.view(-1, s.size(-1)).addmm_(d_dot.flatten(0, 1), query)
        return d_query, d_logit.sum(0).T, *d_s.unbind(1)

class Read(torch.autograd.Function):
    """One read of its past, a mix (B, T, D) with its logit (B, T), and of n recent sources, (B, T, D) each: (B, T, D).

    The sources come back beside it, and in the backward pass the gradients of their later uses, `through`.
    """
    @staticmethod
    def forward(ctx, query, bias, rho, past, past_logit, *sources):
        s = [wide(source) for source in sources]
        square = mean_squares(s)                                                # (n, B, T)
        if rho is None:
            scale = (square + EPS).rsqrt()                                      # 1 / rms
        else:                                                                   # `match` on weights: tensors are larger
            ratio = ratios(square, rho)
            scale = ratio * (ratio * ratio * square + EPS).rsqrt()
        dot = torch.stack([x @ query for x in s]) * scale                       # (n, B, T)
        logit = dot if bias is None else dot + bias[:, None, None]
        alpha = torch.cat((past_logit.unsqueeze(0), logit)).softmax(0)          # (1 + n, B, T)
        weight = alpha[1:] if rho is None else alpha[1:] * ratio                # (n, B, T)
        mix = past * alpha[0].unsqueeze(-1)                                     # (B, T, D)
        for x, w in zip(s, weight.unsqueeze(-1)):
            mix.addcmul_(x, w)
        if ctx:
            ctx.save_for_backward(query, bias, scale, dot, alpha, weight, mix, *sources)
            ctx.set_materialize_grads(False)                                    # the head's read is the last use of its sources
        return mix, *sources

    @staticmethod
    def backward(ctx, g, *through):
        if g is None:                                                           # a sublayer that does not look at its input
            return None, None, None, None, None, *through
        query, bias, scale, dot, alpha, weight, mix, *sources = ctx.saved_tensors
        s = [wide(source) for source in sources]
        product = torch.empty_like(mix)                                         # (B, T, D): made anew, it stays in the cache
        d_weight = torch.stack([torch.mul(g, x, out=product).sum(-1) for x in s])       # (n, B, T)
        d_logit = weight * d_weight - alpha[1:] * torch.mul(g, mix, out=product).sum(-1)        # (n, B, T)
        d_past = torch.mul(g, alpha[0].unsqueeze(-1), out=product)
        d_dot = d_logit * scale
        through_rms = d_dot * dot * scale / query.numel()                       # (n, B, T)
        d_sources = [(g * w if later is None else torch.addcmul(wide(later), g, w)).addcmul_(d, query).addcmul_(t, x, value=-1)
                     for later, x, w, d, t in zip(through, s, *(y.unsqueeze(-1) for y in (weight, d_dot, through_rms)))]
        d_query = sum(d.flatten() @ x.flatten(0, -2) for x, d in zip(s, d_dot))
        d_bias = None if bias is None else d_logit.flatten(1).sum(1)
        return d_query, d_bias, None, d_past, -d_logit.sum(0), *d_sources       # the logits' gradients add up to 0

class ReadOne(torch.autograd.Function):
    """The read of one recent source, (B, T, D), beside R pasts, mixes (B, T, D) with logits (R, B, T): R of (B, T, D).

    A softmax of two is a sigmoid, and the routes of a decoupled read have the source in common. It comes back, as in Read.
    """
    @staticmethod
    def forward(ctx, query, past_logit, source, *past):
        s = wide(source)
        scale = inverse_rms(s)                                                  # (B, T)
        dot = torch.stack([s @ q for q in query]) * scale                       # (R, B, T)
        weight = (dot - past_logit).sigmoid()                                   # (R, B, T)
        mixes = [torch.lerp(mix, s, w) for mix, w in zip(past, weight.unsqueeze(-1))]
        if ctx:
            ctx.save_for_backward(query, scale, dot, weight, source, *mixes)
        return *mixes, source

    @staticmethod
    def backward(ctx, *gs):
        *gs, through = gs
        query, scale, dot, weight, source, *mixes = ctx.saved_tensors
        s, weights = wide(source), weight.unsqueeze(-1).unbind()                # R of (B, T, 1)
        d_weight, d_past = [], []
        for g, mix, w in zip(gs, mixes, weights):
            product = (s - mix).mul_(g)                                         # (B, T, D)
            d_weight.append(product.sum(-1))
            d_past.append(torch.mul(g, 1 - w, out=product))                     # its memory is in the cache
        d_logit = weight * torch.stack(d_weight)                                # (R, B, T)
        d_dot = d_logit * scale
        through_rms = (d_dot * dot).sum(0) * scale / query.size(1)              # (B, T)
        d_s = torch.addcmul(wide(through), gs[0], weights[0])
        for g, w in zip(gs[1:], weights[1:]):
            d_s.addcmul_(g, w)
        for d, q in zip(d_dot.unsqueeze(-1), query):
            d_s.addcmul_(d, q)
        d_s.addcmul_(through_rms.unsqueeze(-1), s, value=-1)
        d_query = d_dot.flatten(1) @ s.flatten(0, -2)                           # (R, B T) @ (B T, D)
        return d_query, -d_logit, d_s, *d_past

# ---------------------------------------------------------------------------------------------------------------------
# The routers. forward(e, sublayers): e (B, T, D) is the token embedding, sublayers a list of 2L callables that return
# their update; what comes back, (B, T, D), is what the final norm and the head see.

class Residual(nn.Module):
    """The rule that everybody uses: h_l = e + u_0 + .. + u_{l-1}."""
    def __init__(self, config):
        super().__init__()

    def forward(self, e, sublayers):
        h = e
        for f in sublayers:                                     # attention, MLP, attention, MLP, ...
            h = h + f(h)
        return h

class ReZero(nn.Module):
    """Each update times a learned scalar, 0 at first: h_{l+1} = h_l + gate_l u_l (arXiv 2003.04887)."""
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(2 * config.n_layer))

    def forward(self, e, sublayers):
        h = e
        for gate, f in zip(self.gate, sublayers):
            h = h + gate * f(h)
        return h

class LayerScale(nn.Module):
    """Each update times a learned vector, small at first: h_{l+1} = h_l + gain_l * u_l (CaiT, arXiv 2103.17239)."""
    def __init__(self, config):
        super().__init__()
        L, first = config.n_layer, config.layerscale_init
        if first is None:
            first = 0.1 if L <= 18 else 1e-5 if L <= 24 else 1e-6               # CaiT, section 2
        self.gain = nn.Parameter(torch.full((2 * L, config.n_embd), first))

    def forward(self, e, sublayers):
        h = e
        for gain, f in zip(self.gain, sublayers):
            h = h + gain * f(h)
        return h

class DepthRouter(nn.Module):
    """What the routers with a depth read share: their queries, and how they read. Each has its own `forward`, and in it

        for l, past in self.reads(run, sources):                # begins the reads of a run of sublayers, from old sources
            inputs, recent = self.read(l, past, recent)         # finishes read l, with what the run has written
            u = sublayers[l](*inputs)
    """
    adds = False                        # Delta adds the mix to a stream that stays; else the mix replaces the stream
    decouple_v = False                  # RD: values read depth by a query of their own

    def __init__(self, config):
        super().__init__()
        L, D = config.n_layer, config.n_embd
        self.config, self.blocks, self.head = config, config.blocks, 2 * L      # the head's read is number 2L
        self.query = nn.Parameter(torch.zeros(2 * L + (not self.adds), D))      # 0: every source weighs the same
        query_v = torch.zeros(L, D)                             # row l // 2 is for the values of attention l
        if not (config.decouple_v or self.decouple_v) or config.rd_control == "tied":
            self.query_v = None
        elif config.rd_control == "frozen_v":
            self.register_buffer("query_v", query_v)            # stays 0: a uniform mix
        else:
            self.query_v = nn.Parameter(query_v)
        self.begin = begin_plain if config.plain_read else begin_fast

    def first_sources(self, e):
        """e; with null_source also a source of zeros, whose logit is 0."""
        return [torch.zeros_like(e), e] if self.config.null_source else [e]

    def queries(self, run):
        """The queries of these reads: for each (1, D), or at a decoupled attention (2, D), the second for values."""
        query = self.query[run.start:run.stop].split(1)
        if self.query_v is None or run.start == self.head:
            return query
        query_v = self.query_v[run.start // 2:(run.stop + 1) // 2].split(1)
        return [torch.cat((q, query_v[i // 2])) if i % 2 == 0 else q for i, q in enumerate(query)]

    def reads(self, run, sources, bias=None):
        """Begin the reads of a run of sublayers, a range that starts at an attention: yields each l with its past.

        sources: n tensors (B, T, D). bias: (len(run), n) on their logits; None is 0.
        """
        if bias is None:
            bias = self.query.new_zeros(len(run), len(sources))
        for part, b in zip(passes(run), bias.split(PASS_READS)):
            yield from zip(part, self.begin(self.queries(part), sources, b))

    def read(self, l, past, recent=(), bias=None, rho=None):
        """Finish read l with the sources that its run has written: the list of the sublayer's inputs, (B, T, D) each.

        One input, h, or at a decoupled attention two, h for queries and keys and h_v for values. bias: (len(recent)) on
        their logits. rho: match them to the first of them. With the inputs come the recent sources, to go on with.
        """
        mixes, recent = past(recent, bias, rho)
        if not (recent or self.adds):                           # the sublayer keeps its input: a view would keep all mixes
            mixes = [mix.clone() for mix in mixes]
        return [sum(mixes) / len(mixes)] if self.config.rd_control == "average" else mixes, recent

    def read_head(self, sources, bias=None):
        """The head's read of all sources, (B, T, D). bias: (1, n). No other read shares a pass: only the first is in one."""
        (l, past), = self.reads(range(self.head, self.head + 1), sources[:1], None if bias is None else bias[:, :1])
        (mix,), _ = self.read(l, past, sources[1:], None if bias is None else bias[0, 1:])
        return mix

def passes(run):
    """A range of sublayers, cut where a new pass begins."""
    return [run[i:i + PASS_READS] for i in range(0, len(run), PASS_READS)]

class AttnRes(DepthRouter):
    """Attention Residuals: every earlier update is a source, and the mix replaces the stream (arXiv 2603.15031).

        h_l = mix over e, u_0, .., u_{l-1}
    """
    def forward(self, e, sublayers):
        sources = self.first_sources(e)
        for run in passes(range(self.head)):
            recent = []
            for l, past in self.reads(run, sources):
                inputs, recent = self.read(l, past, recent)
                recent = [*recent, sublayers[l](*inputs)]
            sources = sources + recent
        return self.read_head(sources)

class Cumulative(DepthRouter):
    """The same over states: adjacent sources are nearly equal, so the weights collapse (Delta AttnRes, section 3).

        h_l = mix over e, e + u_0, .., e + u_0 + .. + u_{l-1}
    """
    def forward(self, e, sublayers):
        sources, state = self.first_sources(e), e
        for run in passes(range(self.head)):
            recent = []
            for l, past in self.reads(run, sources):
                inputs, recent = self.read(l, past, recent)
                state = state + sublayers[l](*inputs)
                recent = [*recent, state]
            sources = sources + recent
        return self.read_head(sources)

class Block(DepthRouter):
    """Block AttnRes: a source is the sum of a block's updates (arXiv 2603.15031; RD-AttnRes, section 3).

        h_l = mix over e, C_0, .., C_{b-1}, PC        C_b = sum of block b's updates, PC = the sum so far of l's block
    """
    def forward(self, e, sublayers):
        sources = self.first_sources(e)
        for block in self.blocks:
            pc = []                                             # PC: no source before its first update; C when the block ends
            for l, past in self.reads(block, sources):
                inputs, pc = self.read(l, past, pc)
                u = wide(sublayers[l](*inputs))
                pc = [pc[0] + u if pc else u]
            sources = [*sources, *pc]
        return self.read_head(sources)

class RD(Block):
    """RD-AttnRes: Block AttnRes in which values read depth by a query of their own (arXiv 2608.01075).

        attention: h = mix by query_l for queries and keys, h_v = mix by query_v_l for values        MLP: as Block

    Both queries are in `queries`, and a read has a mix for each.
    """
    decouple_v = True

class Delta(DepthRouter):
    """Delta AttnRes: the mix of all earlier updates is added to a stream that stays (arXiv 2605.18855).

        h_l = e + u_0 + .. + u_{l-1} + gate_l * mix over e, u_0, .., u_{l-1}        h_0 = e        (no gate: gate_l = 1)
    """
    adds = True

    def __init__(self, config):
        super().__init__(config)
        gate = None if config.route_gate is None else torch.full((2 * config.n_layer,), config.route_gate)
        self.gate = gate if gate is None else nn.Parameter(gate)

    def add(self, l, stream, mixes):
        """The inputs of sublayer l: the stream and what is routed to it."""
        if l == 0:
            return [stream]                                     # nothing to choose from yet
        return [stream + (mix if self.gate is None else self.gate[l] * mix) for mix in mixes]

    def forward(self, e, sublayers):
        sources, stream = self.first_sources(e), e
        for run in passes(range(self.head)):
            recent = []
            for l, past in self.reads(run, sources):
                mixes, recent = self.read(l, past, recent)
                u = sublayers[l](*self.add(l, stream, mixes))
                stream = stream + u
                recent = [*recent, u]
            sources = sources + recent
        return stream

class DeltaBlock(Delta):
    """Delta Block: the same with a source for each completed block; the block in progress is in the stream already.

        h_l = e + u_0 + .. + u_{l-1} + gate_l * mix over e, C_0, .., C_{b-1}        h_0 = e
    """
    def forward(self, e, sublayers):
        sources, stream = self.first_sources(e), e
        for block in self.blocks:
            c = torch.zeros_like(e)
            for l, past in self.reads(block, sources):
                mixes, _ = self.read(l, past)
                u = sublayers[l](*self.add(l, stream, mixes))
                stream, c = stream + u, c + u
            sources = [*sources, c]
        return stream

class WAV(DepthRouter):
    """WAV v1: a block keeps directional details beside its sum, as sources with a bias of their own (arXiv 2606.06564).

        h_l = mix over e and, of every completed block and of the one in progress, C, D~phase, D~split
        D_phase = sum a_i u_i, a = +1 attention, -1 MLP     D_split = sum r_i u_i, r = +1 in the first half, -1 after
        D~ = D * min(rms(C) / rms(D), rho), the ratio detached     logit of D~: query . D~ / rms(D~) + detail_bias
    """
    def __init__(self, config):
        super().__init__(config)
        reads = 2 * config.n_layer + config.head_details
        self.detail_bias = nn.Parameter(torch.full((reads, len(config.detail_names)), config.detail_bias))

    def signs(self, l, block):
        """+1 or -1 for each detail: how it counts the update of sublayer l of its block."""
        sign = {"phase": 1 if l % 2 == 0 else -1, "split": 1 if l - block.start < len(block) // 2 else -1}
        return [sign[name] for name in self.config.detail_names]

    def written(self, own, u, signs):
        """C and its details after one more update: a detail that has only added stays the same tensor as C."""
        c = own[0] + u
        return [c, *(c if d is own[0] and sign > 0 else torch.add(d, u, alpha=sign) for d, sign in zip(own[1:], signs))]

    def past_bias(self, bias, blocks):
        """The biases on e and on the sources of so many completed blocks: (reads, 1 + details) -> (reads, n)."""
        return F.pad(bias.repeat(1, blocks), (1 + self.config.null_source, 0))

    def forward(self, e, sublayers):
        sources, sums, rho = self.first_sources(e), self.first_sources(e), self.config.rho
        bias = F.pad(self.detail_bias, (1, 0))                                  # (reads, 1 + details): a sum has bias 0
        for b, block in enumerate(self.blocks):
            own = [torch.zeros_like(e)] * bias.size(1)          # C and its details: one tensor while they have only added
            for l, past in self.reads(block, sources, self.past_bias(bias[block.start:block.stop], b)):
                inputs, recent = self.read(l, past, *((own, bias[l], rho) if l > block.start else ()))
                u = sublayers[l](*inputs)
                own = self.written(recent or own, u, self.signs(l, block))
            sources, sums = [*sources, *match(own, rho)], [*sums, own[0]]
        if self.config.head_details:
            return self.read_head(sources, self.past_bias(bias[self.head:], len(self.blocks)))
        return self.read_head(sums)

ROUTERS = {
    "residual": Residual, "rezero": ReZero, "layerscale": LayerScale,           # fixed or learned weights on updates
    "attnres": AttnRes, "cumulative": Cumulative,                               # a source for every sublayer
    "block": Block, "rd": RD, "delta": Delta, "delta_block": DeltaBlock, "wav": WAV,    # the five of the papers
}

# ---------------------------------------------------------------------------------------------------------------------
# The sublayers: Qwen3's attention and MLP, each with its pre-norm inside. They return their update.

class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = wide(x)
        if x.device.type == "cpu" and torch.is_grad_enabled():
            return CPURMSNorm.apply(x, self.weight)
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)

class CPURMSNorm(torch.autograd.Function):
    """On CPUs F.rms_norm is not fused; layer norm is, and its backward pass with mean 0 lacks one term of this one's."""
    @staticmethod
    def forward(ctx, x, weight):
        scale = inverse_rms(x).unsqueeze(-1)                                    # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, g):
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():       # it is to be differentiated again
            return torch.autograd.grad(F.rms_norm(x, weight.shape, weight, EPS), (x, weight), g, create_graph=True)
        d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            g, x, weight.shape, torch.zeros_like(scale), scale, weight, None, (True, True, False))
        mean = (g @ weight).unsqueeze(-1) / x.size(-1)                          # layer norm takes it away, rms norm does not
        return d_x.add_(mean * scale), d_weight

def rotary_table(config):
    """cos and sin of each position's angles, (2, seq_len, 1, head_dim), those of a pair twice."""
    freqs = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    angles = torch.outer(torch.arange(config.seq_len).double(), freqs)          # (seq_len, head_dim / 2)
    return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).unsqueeze(2)

def rotate(x, cos, sin):
    """Turn each pair of x, (B, T, heads, head_dim), by its position's angle. As in Qwen3, a pair is x_i, x_{i + head_dim/2}."""
    return apply(Rotate, x, cos, sin)

class Rotate(torch.autograd.Function):
    """Nothing but the table is kept for the backward pass, which turns back."""
    @staticmethod
    def forward(ctx, x, cos, sin):
        if ctx:
            ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return turn(g, cos, -sin), None, None

def turn(x, cos, sin):
    y = x * cos
    (x1, x2), (y1, y2), (sin, _) = (t.chunk(2, -1) for t in (x, y, sin))        # (..., head_dim / 2)
    y1.addcmul_(x2, sin, value=-1)                                              # y1 = x1 cos - x2 sin
    y2.addcmul_(x1, sin)                                                        # y2 = x2 cos + x1 sin
    return y

class Attention(nn.Module):
    """Causal attention. Queries and keys are made from h, values from h_v, which is h unless the read is decoupled."""
    def __init__(self, config):
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.grouped = config.n_head != config.n_kv_head
        q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.norm = RMSNorm(config.n_embd)
        self.q_proj = nn.Linear(config.n_embd, q, bias=False)
        self.k_proj = nn.Linear(config.n_embd, kv, bias=False)
        self.v_proj = nn.Linear(config.n_embd, kv, bias=False)
        self.o_proj = nn.Linear(q, config.n_embd, bias=False)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)

    def forward(self, h, h_v=None, *, rope, cache=None):
        """h, h_v: (B, T, D) -> (B, T, D). rope: cos and sin of these positions. cache: this layer's KVCache."""
        x = self.norm(h)
        x_v = x if h_v is None else self.norm(h_v)
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))                   # (B, T, n_head, head_dim)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))                   # (B, T, n_kv_head, head_dim)
        v = self.v_proj(x_v).unflatten(-1, (-1, self.head_dim))                 # (B, T, n_kv_head, head_dim)
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)       # (B, heads, T, head_dim)
        q, k = q.to(v.dtype), k.to(v.dtype)                                     # under autocast they are float32 so far
        mask, causal = None, True
        if cache is not None:
            k, v = cache.append(k, v)                                           # (B, n_kv_head, S, head_dim): all positions
            T, S = q.size(2), k.size(2)
            causal = S == T                                                     # is_causal aligns the first positions
            if 1 < T < S:
                mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        u = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, causal,
                                           enable_gqa=self.grouped)
        u = self.o_proj(u.transpose(1, 2).flatten(2))                           # (B, T, n_head, head_dim) -> (B, T, D)
        return F.dropout(u, self.dropout, self.training)

class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.norm = RMSNorm(config.n_embd)
        self.gate_proj = nn.Linear(config.n_embd, config.mlp_hidden, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.mlp_hidden, bias=False)
        self.down_proj = nn.Linear(config.mlp_hidden, config.n_embd, bias=False)

    def forward(self, h):
        x = self.norm(h)
        u = self.down_proj(apply(SwiGLU, self.gate_proj(x), self.up_proj(x)))   # (B, T, D) -> mlp_hidden -> D
        return F.dropout(u, self.dropout, self.training)

class SwiGLU(torch.autograd.Function):
    """silu(gate) * up. Autograd would keep silu(gate) too, the widest tensor in a layer; here it is made again."""
    @staticmethod
    def forward(ctx, gate, up):
        if ctx:
            ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, g):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(g, gate).mul_(up), F.silu(gate).mul_(g)

class KVCache:
    """One layer's keys and values of the positions so far, (B, n_kv_head, seq_len, head_dim), filled from the front."""
    def __init__(self, config):
        self.length, self.seq_len, self.kv = 0, config.seq_len, None

    def append(self, k, v):
        if self.kv is None:
            B, heads, _, width = k.shape
            self.kv = k.new_empty(2, B, heads, self.seq_len, width)
        for new, old in zip((k, v), self.kv.narrow(3, self.length, k.size(2))):
            old.copy_(new)
        self.length += k.size(2)
        return self.kv.narrow(3, 0, self.length)

# ---------------------------------------------------------------------------------------------------------------------
# The model

class GPT(nn.Module):
    """Embedding, a router over 2L sublayers, norm, head."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.sublayers = nn.ModuleList(f(config) for _ in range(config.n_layer) for f in (Attention, MLP))
        self.router = ROUTERS[config.router](config)
        self.norm = RMSNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self.register_buffer("rope", rotary_table(config).float(), persistent=False)
        self.init_weights()

    def init_weights(self):
        """Normal, std 0.02; the two output projections of a layer std 0.02 / sqrt(2L), as in GPT-2.

        Drawn in one order that no router takes part in: one seed gives the same weights under every router.
        """
        for name, p in self.named_parameters():
            if p.dim() == 2 and not name.startswith("router."):
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if out else 0.02)

    def forward(self, idx, targets=None, cache=None):
        """idx, targets: (B, T) int64, T <= seq_len; a target of -1 does not count. cache: one KVCache a layer, for decoding.

        Returns the logits and the mean cross-entropy, in nats a token: (B, T, V) and a scalar with targets, without them
        (B, 1, V), the last position's, and None.
        """
        start = cache[0].length if cache else 0
        stop = start + idx.size(1)
        if stop > self.config.seq_len:
            raise ValueError(f"{stop} tokens are longer than the model's context; seq_len is {self.config.seq_len}.")
        rope = self.rope[:, start:stop].unbind()                                # cos and sin, (T, 1, head_dim) each
        attention = [functools.partial(f, rope=rope, cache=cache[i] if cache else None)
                     for i, f in enumerate(self.sublayers[0::2])]
        sublayers = [f for layer in zip(attention, self.sublayers[1::2]) for f in layer]

        e = F.dropout(self.embed(idx), self.config.dropout, self.training)     # (B, T, D)
        h = self.norm(self.router(e, sublayers))                                # (B, T, D)
        if targets is None:
            return self.lm_head(h[:, -1:]), None                                # (B, 1, V)
        logits = self.lm_head(h)                                                # (B, T, V)
        return logits, F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx, (B, T) int64, token by token: yields (B, 1) int64 a step.

        One token a step goes through the model, with the keys and values of the others kept. When the context is full, it
        goes on from the last half of it. temperature 0 takes the likeliest token; top_k: draw from the k likeliest only.
        generator: the torch.Generator to draw with. Call eval() first if the model has dropout.
        """
        cache, feed = None, idx
        for _ in range(max_new_tokens):
            if cache is None or cache[0].length == self.config.seq_len:
                keep = self.config.seq_len if cache is None else max(1, self.config.seq_len // 2)
                cache, feed = [KVCache(self.config) for _ in range(self.config.n_layer)], idx[:, -keep:]
            logits = self(feed, cache=cache)[0][:, -1].float()                  # (B, V)
            if top_k is not None and top_k < logits.size(-1):
                logits[logits < logits.topk(top_k).values[:, -1:]] = -math.inf
            if temperature == 0:
                feed = logits.argmax(-1, keepdim=True)                          # (B, 1)
            else:
                feed = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)     # (B, 1)
            idx = torch.cat((idx, feed), 1)
            yield feed

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """idx, (B, T) int64, with max_new_tokens more, (B, T + max_new_tokens). See `stream`."""
        return torch.cat((idx, *self.stream(idx, max_new_tokens, temperature, top_k, generator)), 1)

    def num_params(self):
        """The number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def param_groups(self, weight_decay, learning_rate, router_lr=None):
        """Three groups for AdamW: matrices decay; gains do not; nor do router parameters, which may have their own rate.

        Each group has `lr` and `lr_scale` = lr / learning_rate, for a schedule to multiply.
        """
        router = list(self.router.parameters())
        rest = [p for name, p in self.named_parameters() if not name.startswith("router.")]
        router_lr = learning_rate if router_lr is None else router_lr
        groups = [
            {"params": [p for p in rest if p.dim() == 2], "weight_decay": weight_decay, "lr": learning_rate},
            {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0, "lr": learning_rate},
            {"params": router, "weight_decay": 0.0, "lr": router_lr},
        ]
        return [{**group, "lr_scale": group["lr"] / learning_rate} for group in groups if group["params"]]
