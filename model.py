"""
A GPT whose residual connection is a choice: five learned depth routers, and the rules that they
are measured against.

What is unusual about it:
- A *router* drives the stack. It gets the token embedding and the list of 2L sublayers, runs them
  in order and decides what each one reads. An ordinary residual connection is one of four lines.
- Sublayers (attention, MLP) only return their update u. They know nothing of routing, and a router
  knows nothing of attention, of caches or of the loss.
- The depth read: a softmax over earlier outputs *of the same token*, by a learned query of its own
  for each sublayer.
- The rest is Qwen3's block, so that its weights load: RMSNorm, rotary positions, RMS norm on each
  head's queries and keys, grouped-query attention, SwiGLU, no biases.
- This file is complete; beside the folder nanodepth it takes quicker forms of its definitions.

Sources: Attention Residuals (arXiv 2603.15031), RD-AttnRes (2608.01075), Delta AttnRes
(2605.18855), WAV v1 (2606.06564).

Shapes: B sequences, T tokens, D = n_embd, L layers, so 2L sublayers: even ones attention, odd MLP.
"""
import difflib
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from nanodepth import fast
except ModuleNotFoundError as missing:      # this file by itself; an error inside fast.py surfaces
    if missing.name != "nanodepth":
        raise
    fast = None

@dataclass
class GPTConfig:
    vocab_size: int = 96                # tokens the model knows
    seq_len: int = 128                  # the longest context, in tokens
    n_layer: int = 12                   # L: layers, each one attention and one MLP
    n_head: int = 4                     # query heads
    n_kv_head: int | None = None        # key and value heads; none: n_head
    n_embd: int = 64                    # D: the width
    head_dim: int | None = None         # width of a head; none: n_embd / n_head
    mlp_hidden: int | None = None       # width inside an MLP; none: 8/3 n_embd, to a multiple of 64
    router: str = "block"               # block rd delta delta_block wav, residual .., FILE.py:Class
    n_blocks: int | None = None         # depth blocks, where there are any; none: min(8, n_layer)
    decouple_v: bool = False            # values read depth by a query of their own, as in rd
    rd_control: str = "none"            # a control of decoupled reads: none tied average frozen_v
    details: str = "phase,split"        # wav's details: phase, split, both in either order, or none
    detail_bias: float = -2.0           # first value of the bias on a detail's logit
    rho: float = 1.0                    # the most by which a detail is scaled, to match its C
    head_details: bool = False          # wav: the head's read sees the details too
    null_source: bool = False           # one more source, all zeros, in every depth read
    route_gate: float | None = None     # delta's: first value of a gate on each mix; none: no gate
    layerscale_init: float | None = None  # first value of its gains; none: by depth, as in CaiT
    plain_read: bool = False            # the definitions here, and nothing of nanodepth/fast.py
    dropout: float = 0.0                # on the embedding, attention weights and updates
    tie_embeddings: bool = True         # the head is the embedding transposed
    rope_theta: float = 10000.0         # base of the rotary frequencies
    norm_eps: float = 1e-6              # in the norms of sublayers and head, not in the depth read

    def __post_init__(self):
        def check(ok, name, do):
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; {do}.")
        for name in ("vocab_size", "seq_len", "n_layer", "n_head", "n_embd"):
            check(getattr(self, name) >= 1, name, "it must be at least 1")
        if self.head_dim is None:
            check(self.n_embd % self.n_head == 0, "n_embd",
                  f"it must be a multiple of n_head ({self.n_head}), or set head_dim")
            self.head_dim = self.n_embd // self.n_head
        check(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", "rotary positions turn "
              "pairs, so it must be even (without head_dim it is n_embd / n_head)")
        self.n_kv_head = self.n_kv_head if self.n_kv_head is not None else self.n_head
        check(self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0, "n_kv_head",
              f"it must divide n_head ({self.n_head})")
        if self.mlp_hidden is None:
            self.mlp_hidden = 64 * math.ceil(8 * self.n_embd / 3 / 64)
        self.n_blocks = self.n_blocks if self.n_blocks is not None else min(8, self.n_layer)
        check(1 <= self.n_blocks <= self.n_layer, "n_blocks",
              f"it must be from 1 to n_layer ({self.n_layer})")
        for name in ("mlp_hidden", "rho", "norm_eps", "rope_theta"):
            check(getattr(self, name) > 0, name, "it must be above 0")
        check(0 <= self.dropout < 1, "dropout", "it must be from 0 to below 1")

        near = difflib.get_close_matches(str(self.router), ROUTERS, n=1, cutoff=0.3)
        check(self.router in ROUTERS, "router", (f"did you mean {near[0]}? The" if near else "the")
              + " routers are " + " ".join(ROUTERS) + ", or FILE.py:Class")
        router = ROUTERS[self.router]
        for name in ("decouple_v", "null_source"):
            check(not getattr(self, name) or issubclass(router, DepthRouter), name,
                  f"it is for a depth read, and the router {self.router} has none")
        check(self.rd_control in ("none", "tied", "average", "frozen_v"), "rd_control",
              "choose of none tied average frozen_v")
        decoupled = self.decouple_v or getattr(router, "decouple_v", False)
        check(decoupled or self.rd_control == "none", "rd_control",
              "it controls a decoupled read: choose router rd, or set decouple_v")
        check(self.route_gate is None or issubclass(router, Delta), "route_gate",
              "it gates a mix that is added to a stream: choose router delta or delta_block (one "
              "that replaces the stream is normed at once, and a gate on it does nothing)")
        names = self.detail_names
        check(set(names) <= {"phase", "split"} and len(set(names)) == len(names), "details",
              "choose of phase split phase,split none")

    @property
    def detail_names(self) -> list[str]:
        return [] if self.details in ("", "none") else [x.strip() for x in self.details.split(",")]

    @property
    def blocks(self) -> list[range]:
        """The sublayers of each depth block: layers split evenly, the longer blocks first."""
        short, longer = divmod(self.n_layer, self.n_blocks)
        sizes = [2 * (short + (b < longer)) for b in range(self.n_blocks)]      # so each is even
        return [range(sum(sizes[:b]), sum(sizes[:b + 1])) for b in range(self.n_blocks)]

def quick(definition, config):
    """A definition, or its quicker form, of the same name and call in nanodepth/fast.py."""
    return definition if fast is None or config.plain_read else getattr(fast, definition.__name__)

# --------------------------------------------------------------------------------------------------
# The depth read

def wide(x):
    """x in float32 at least: sums along depth and softmaxes over it stay so under autocast."""
    return x.float() if x.dtype.itemsize < 4 else x

def rms(s):
    """The root mean square of each vector: (..., D) -> (...)."""
    return (wide(s).square().mean(-1) + 1e-6).sqrt()

def depth_read(query, sources, bias=None, scale=None):
    """The depth read (Attention Residuals, section 3, without the gain on its keys).

        logit_i = query . s_i / rms(s_i) + bias_i
        alpha   = softmax over i, for each token                mix = sum_i alpha_i scale_i s_i

    query: (D). sources: n tensors (B, T, D). bias: (n), or None for 0. scale: n factors, (B, T) or
    None for 1; or None for no factors. Returns the mix, (B, T, D), and alpha, (n, B, T).

    >>> e, u = torch.tensor([[[3., 4.]]]), torch.tensor([[[2., -2.]]])      # one token, D = 2
    >>> mix, alpha = depth_read(torch.tensor([1., 0.]), [e, u])             # logits 3 / 3.54, 2 / 2
    >>> [round(x, 2) for x in (*alpha.flatten().tolist(), *mix.flatten().tolist())]
    [0.46, 0.54, 2.46, 0.77]
    """
    s = wide(torch.stack(sources))                                              # (n, B, T, D)
    logit = (s * query).sum(-1) / rms(s)                                        # (n, B, T)
    if bias is not None:
        logit = logit + bias[:, None, None]
    alpha = logit.softmax(0)                                                    # (n, B, T)
    weight = alpha
    if scale is not None:
        weight = torch.stack([a if r is None else a * r for a, r in zip(alpha, scale)])
    return (weight.unsqueeze(-1) * s).sum(0), alpha                             # (B, T, D)

# --------------------------------------------------------------------------------------------------
# The routers. forward(e, sublayers): e (B, T, D) is the token embedding, sublayers 2L callables
# that return their update; what comes back, (B, T, D), is what the final norm and the head see.

class Residual(nn.Module):
    """The rule that everybody uses: h_l = e + u_0 + .. + u_{l-1}."""
    def __init__(self, config):
        super().__init__()

    def forward(self, e, sublayers):
        h = e
        for f in sublayers:                                 # attention, MLP, attention, MLP, ...
            h = h + f(h)
        return h

class ReZero(nn.Module):
    """Each update times a learned scalar, 0 at first: h_{l+1} = h_l + gate_l u_l (2003.04887)."""
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(2 * config.n_layer))

    def forward(self, e, sublayers):
        h = e
        for gate, f in zip(self.gate, sublayers):
            h = h + gate * f(h)
        return h

class LayerScale(nn.Module):
    """Each update times a learned vector, small at first: h_{l+1} = h_l + gain_l * u_l (CaiT)."""
    def __init__(self, config):
        super().__init__()
        L, first = config.n_layer, config.layerscale_init
        if first is None:
            first = 0.1 if L <= 18 else 1e-5 if L <= 24 else 1e-6       # 2103.17239, section 2
        self.gain = nn.Parameter(torch.full((2 * L, config.n_embd), float(first)))

    def forward(self, e, sublayers):
        h = e
        for gain, f in zip(self.gain, sublayers):
            h = h + gain * f(h)
        return h

def reader(router):
    """The `read` of one forward: here the definition; fast.py's is an object, made anew."""
    return router.read

class DepthRouter(nn.Module):
    """What the routers below share: their queries, and `reader()`, the one way in which they read.

        read = self.reader()                                # once in a forward
        u = sublayers[l](*read(l, sources, bias, scale))
        h = read(self.head, sources)[0]                     # the head's read is number 2L

    read returns the inputs of sublayer l, (B, T, D) each: [h], or at a decoupled attention
    [h, h_v], h for queries and keys and h_v for values. sources: a list of n, (B, T, D) each. bias:
    None, or (reads, n or more): row l, its first n columns. scale: None, or a list of n, (B, T) or
    None for 1. null_source's zeros are source 0 and have their place in both. Nothing that was read
    is changed in place later: write c = c + u.
    """
    adds = False                # True: mixes are added to a stream; the head sees it, and reads not
    decouple_v = False          # True: decoupled always, as in rd

    def __init__(self, config):
        super().__init__()
        L, D = config.n_layer, config.n_embd
        self.config, self.blocks, self.head = config, config.blocks, 2 * L
        # queries start at 0: every source weighs the same
        self.query = nn.Parameter(torch.zeros(2 * L + (not self.adds), D))
        query_v = torch.zeros(L, D)                         # row l // 2: for values of attention l
        if not (config.decouple_v or self.decouple_v) or config.rd_control == "tied":
            self.query_v = None
        elif config.rd_control == "frozen_v":
            self.register_buffer("query_v", query_v)        # stays 0: a uniform mix
        else:
            self.query_v = nn.Parameter(query_v)

    def first_sources(self, e):
        """e; with null_source a source of zeros before it, whose logit is 0."""
        return [torch.zeros_like(e), e] if self.config.null_source else [e]

    def queries(self, l):
        """The queries of read l: (1, D), or at a decoupled attention (2, D), then for values."""
        if self.query_v is None or l % 2 or l == self.head:
            return self.query[l:l + 1]
        return torch.stack((self.query[l], self.query_v[l // 2]))

    def inputs(self, mixes):
        """The mixes of a read as a sublayer gets them: one for each query, or their mean."""
        return [sum(mixes) / len(mixes)] if self.config.rd_control == "average" else mixes

    def reader(self):
        """The call by which a forward reads depth: `reader` above, or fast.py's."""
        return quick(reader, self.config)(self)

    def read(self, l, sources, bias=None, scale=None):
        """The read by its definition. Not to be overridden: fast.py does not call it."""
        bias = None if bias is None else bias[l, :len(sources)]
        return self.inputs([depth_read(q, sources, bias, scale)[0] for q in self.queries(l)])

    def runs(self) -> list[range]:
        """Which reads may share work: fast.py reads the sources that exist at the first of a run
        once for all of it. No number depends on it. Here: 12 at a time."""
        return [range(l, min(l + 12, self.head)) for l in range(0, self.head, 12)]

class AttnRes(DepthRouter):
    """Attention Residuals: all updates are sources; the mix replaces the stream (2603.15031).

        h_l = mix over e, u_0, .., u_{l-1}
    """
    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for l, f in enumerate(sublayers):
            u = f(*read(l, sources))
            sources = sources + [u]
        return read(self.head, sources)[0]

class Cumulative(DepthRouter):
    """AttnRes over states, which are nearly equal: the weights collapse (2605.18855, section 3).

        h_l = mix over e, e + u_0, .., e + u_0 + .. + u_{l-1}
    """
    def forward(self, e, sublayers):
        read, sources, state = self.reader(), self.first_sources(e), e
        for l, f in enumerate(sublayers):
            state = state + f(*read(l, sources))
            sources = sources + [state]
        return read(self.head, sources)[0]

class Block(DepthRouter):
    """Block AttnRes: a source is the sum of a block's updates (2603.15031; RD-AttnRes, section 3).

        h_l = mix over e, C_0, .., C_{b-1}, PC
        C_b = sum of block b's updates          PC = the sum so far of the block in progress
    """
    def runs(self):
        return self.blocks

    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for block in self.blocks:
            pc = []                                         # no source before its first update
            for l in block:
                u = wide(sublayers[l](*read(l, sources + pc)))      # sums stay float32 in autocast
                pc = [pc[0] + u if pc else u]
            sources = sources + pc                          # the block is complete: PC is its C
        return read(self.head, sources)[0]

class RD(Block):
    """RD-AttnRes: Block AttnRes, and values read depth by a query of their own (2608.01075).

        attention: h = mix by query_l for queries and keys, h_v = mix by query_v_l for values
    """
    decouple_v = True                                       # `read` then returns both

class Delta(DepthRouter):
    """Delta AttnRes: the mix of all earlier updates is added to a stream that stays (2605.18855).

        h_l = e + u_0 + .. + u_{l-1} + gate_l * mix over e, u_0, .., u_{l-1}
        h_0 = e, as there is nothing to choose from             gate_l = 1, unless route_gate is set
    """
    adds = True

    def __init__(self, config):
        super().__init__(config)
        self.gate = None
        if config.route_gate is not None:
            self.gate = nn.Parameter(torch.full((2 * config.n_layer,), float(config.route_gate)))

    def add(self, l, stream, mixes):
        """The inputs of sublayer l: the stream, with what is routed to it."""
        if l == 0:
            return [stream]                                 # its read is not used
        return [stream + (mix if self.gate is None else self.gate[l] * mix) for mix in mixes]

    def forward(self, e, sublayers):
        read, sources, stream = self.reader(), self.first_sources(e), e
        for l, f in enumerate(sublayers):
            u = f(*self.add(l, stream, read(l, sources)))
            stream, sources = stream + u, sources + [u]
        return stream

class DeltaBlock(Delta):
    """Delta Block: the same with a source for each completed block (2605.18855).

        h_l = e + u_0 + .. + u_{l-1} + gate_l * mix over e, C_0, .., C_{b-1}            h_0 = e
    """
    def runs(self):
        return self.blocks

    def forward(self, e, sublayers):
        read, sources, stream = self.reader(), self.first_sources(e), e
        for block in self.blocks:
            c = 0                                           # no source yet: the stream has it
            for l in block:
                u = wide(sublayers[l](*self.add(l, stream, read(l, sources))))
                stream, c = stream + u, c + u
            sources = sources + [c]
        return stream

class WAV(Block):
    """WAV v1: a block keeps directional details beside its sum, as sources (2606.06564).

        h_l = mix over e and, of every block begun, C, D_phase and D_split
        D_phase = sum a_i u_i, a = +1 for attention, -1 for an MLP
        D_split = sum c_i u_i, c = +1 in the first half of the block, -1 in the second
        a detail D has bias detail_bias, and scale min(rms(C) / rms(D), rho), which is detached
    """
    def __init__(self, config):
        super().__init__(config)
        self.details, self.rms = config.detail_names, quick(rms, config)
        shape = 2 * config.n_layer + config.head_details, len(self.details)     # (reads, details)
        self.detail_bias = nn.Parameter(torch.full(shape, float(config.detail_bias)))

    def signs(self, l, block):
        """The signs with which C and the details add sublayer l's update; a block's first has +."""
        sign = {"phase": 1 if l % 2 == 0 else -1, "split": 1 if l < block[len(block) // 2] else -1}
        return [1, *(sign[name] for name in self.details)]

    @torch.no_grad()
    def scales(self, own):
        """The scales of a block's C and details: None and, for each detail, (B, T)."""
        c, *details = map(self.rms, own)
        return [None, *((c / d).clamp(max=self.config.rho) for d in details)]

    def forward(self, e, sublayers):
        read, sources, sums = self.reader(), self.first_sources(e), self.first_sources(e)
        scale = [None] * len(sources)
        # a column for each source: 0 for e and zeros, then of each block 0 for C, and its details'
        bias = F.pad(self.detail_bias, (1, 0)).repeat(1, len(self.blocks))
        bias = F.pad(bias, (len(sources), 0))                               # (reads, n)
        for block in self.blocks:
            own, own_scale = [], []                     # this block's C, D_phase and D_split
            for l in block:
                u = wide(sublayers[l](*read(l, sources + own, bias, scale + own_scale)))
                signs = self.signs(l, block)
                if own:
                    own = [s + u if sign > 0 else s - u for s, sign in zip(own, signs)]
                else:
                    own = [u] * len(signs)                  # C and its details all begin as u
                own_scale = self.scales(own)
            sources, scale, sums = sources + own, scale + own_scale, sums + own[:1]
        if self.config.head_details:
            return read(self.head, sources, bias, scale)[0]
        return read(self.head, sums)[0]

ROUTERS = {
    "residual": Residual, "rezero": ReZero, "layerscale": LayerScale,   # a stream alone
    "attnres": AttnRes, "cumulative": Cumulative,                   # a source for every sublayer
    "block": Block, "rd": RD, "delta": Delta, "delta_block": DeltaBlock, "wav": WAV,    # the five
}

# --------------------------------------------------------------------------------------------------
# The sublayers: Qwen3's attention and MLP, each with its pre-norm inside. They return their update.

def rms_norm(x, weight, eps):
    """x / rms(x) * weight, over the last dimension, in float32."""
    x = wide(x)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

def rotate(x, cos, sin):
    """Turn each pair x_i, x_{i + head_dim/2} of x, (B, T, heads, head_dim), by its angle."""
    x1, x2 = x.chunk(2, -1)                                                 # (..., head_dim / 2)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)

def swiglu(gate, up):
    return F.silu(gate) * up

class RMSNorm(nn.Module):
    def __init__(self, width, config):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), config.norm_eps
        self.rms_norm = quick(rms_norm, config)

    def forward(self, x):
        return self.rms_norm(x, self.weight, self.eps)

class Attention(nn.Module):
    """Causal attention. Queries and keys are made from h, values from h_v (None: from h too)."""
    def __init__(self, config):
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.grouped = config.n_head != config.n_kv_head
        self.rotate = quick(rotate, config)
        q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.norm = RMSNorm(config.n_embd, config)
        self.q_proj = nn.Linear(config.n_embd, q, bias=False)
        self.k_proj = nn.Linear(config.n_embd, kv, bias=False)
        self.v_proj = nn.Linear(config.n_embd, kv, bias=False)
        self.o_proj = nn.Linear(q, config.n_embd, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config)
        self.k_norm = RMSNorm(config.head_dim, config)

    def forward(self, h, h_v=None, *, rope, cache=None):
        """h, h_v: (B, T, D) -> (B, T, D). rope: these positions' cos and sin. cache: a KVCache."""
        x = self.norm(h)
        x_v = x if h_v is None else self.norm(h_v)
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))       # (B, T, n_head, head_dim)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))       # (B, T, n_kv_head, head_dim)
        v = self.v_proj(x_v).unflatten(-1, (-1, self.head_dim))     # (B, T, n_kv_head, head_dim)
        q, k = self.rotate(self.q_norm(q), *rope), self.rotate(self.k_norm(k), *rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))            # (B, heads, T, head_dim)
        q, k = q.to(v.dtype), k.to(v.dtype)                         # from float32, under autocast
        mask, causal = None, True
        if cache is not None:
            k, v = cache.append(k, v)                               # (B, n_kv_head, S, head_dim)
            T, S = q.size(2), k.size(2)
            causal = S == T                     # it lines up the first q and k: wrong with a past
            if 1 < T < S:
                mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        u = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0,
                                           causal, enable_gqa=self.grouped)
        u = self.o_proj(u.transpose(1, 2).flatten(2))                       # (B, T, D)
        return F.dropout(u, self.dropout, self.training)

class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    def __init__(self, config):
        super().__init__()
        self.dropout, self.swiglu = config.dropout, quick(swiglu, config)
        self.norm = RMSNorm(config.n_embd, config)
        self.gate_proj = nn.Linear(config.n_embd, config.mlp_hidden, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.mlp_hidden, bias=False)
        self.down_proj = nn.Linear(config.mlp_hidden, config.n_embd, bias=False)

    def forward(self, h):
        x = self.norm(h)
        u = self.down_proj(self.swiglu(self.gate_proj(x), self.up_proj(x)))     # (B, T, D)
        return F.dropout(u, self.dropout, self.training)

class KVCache:
    """One layer's keys and values so far: (B, n_kv_head, seq_len, head_dim), filled in order."""
    def __init__(self, config):
        self.length, self.seq_len, self.kv = 0, config.seq_len, None

    def append(self, k, v):
        if self.kv is None:
            B, heads, _, width = k.shape
            self.kv = k.new_empty(2, B, heads, self.seq_len, width)
        start, self.length = self.length, self.length + k.size(2)
        for old, new in zip(self.kv, (k, v)):
            old[:, :, start:self.length] = new
        return self.kv[:, :, :, :self.length]

# --------------------------------------------------------------------------------------------------
# The model

class GPT(nn.Module):
    """Embedding, a router over 2L sublayers, norm, head."""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.sublayers = nn.ModuleList(
            f(config) for _ in range(config.n_layer) for f in (Attention, MLP))
        with torch.random.fork_rng(devices=[]):     # one that draws leaves the other weights alone
            self.router = ROUTERS[config.router](config)
        self.norm = RMSNorm(config.n_embd, config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        pairs = torch.arange(0, config.head_dim, 2).double() / config.head_dim
        angles = torch.outer(torch.arange(config.seq_len).double(), config.rope_theta ** -pairs)
        rope = torch.stack((angles.cos(), angles.sin())).unsqueeze(2)       # (2, seq_len, 1, pairs)
        self.register_buffer("rope", rope.float(), persistent=False)
        self.init_weights()

    def init_weights(self):
        """Normal, std 0.02; the two output projections of a layer std 0.02 / sqrt(2L), as in GPT-2.

        Drawn in one order that no router takes part in: a seed gives every router the same weights.
        """
        for name, p in self.named_parameters():
            if p.dim() == 2 and not name.startswith("router."):
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer) if out else 0.02)

    def forward(self, idx, targets=None, cache=None):
        """idx, targets: (B, T) int64, T <= seq_len; a target of -1 does not count. cache: one
        KVCache a layer, for decoding.

        Returns the logits and the mean cross-entropy, in nats a token: (B, T, V) and a scalar with
        targets, without them (B, 1, V), the last position's, and None.
        """
        start = cache[0].length if cache else 0
        stop = start + idx.size(1)
        if stop > self.config.seq_len:
            raise ValueError(f"{stop} tokens are longer than the model's context; seq_len is "
                             f"{self.config.seq_len}.")
        rope = self.rope[:, start:stop].unbind()                            # (T, 1, pairs) each
        attention = [functools.partial(f, rope=rope, cache=cache[i] if cache else None)
                     for i, f in enumerate(self.sublayers[0::2])]
        sublayers = [f for layer in zip(attention, self.sublayers[1::2]) for f in layer]

        e = F.dropout(self.embed(idx), self.config.dropout, self.training)  # (B, T, D)
        h = self.norm(self.router(e, sublayers))                            # (B, T, D)
        if targets is None:
            return self.lm_head(h[:, -1:]), None                            # (B, 1, V)
        logits = self.lm_head(h)                                            # (B, T, V)
        loss = F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Continue idx, (B, T) int64, token by token: yields (B, 1) int64 a step.

        One token a step goes through the model, with the keys and values of the others kept. When
        the context is full, it goes on from the last half of it. temperature 0 takes the likeliest
        token; top_k: draw from the k likeliest only (None, 0: from all). generator: to draw with.
        Call eval() first if the model has dropout.
        """
        if idx.size(1) == 0:
            raise ValueError("idx has no token to go on from; begin with the end-of-text token.")
        cache, feed = None, idx
        for _ in range(max_new_tokens):
            if cache is None or cache[0].length == self.config.seq_len:
                keep = self.config.seq_len if cache is None else max(1, self.config.seq_len // 2)
                cache = [KVCache(self.config) for _ in range(self.config.n_layer)]
                feed = idx[:, -keep:]
            logits = self(feed, cache=cache)[0][:, -1].float()              # (B, V)
            if top_k and top_k < logits.size(-1):
                logits[logits < logits.topk(top_k).values[:, -1:]] = -math.inf
            if temperature == 0:
                feed = logits.argmax(-1, keepdim=True)                      # (B, 1)
            else:
                logits = logits - logits.amax(-1, keepdim=True)     # no overflow, however cold
                p = (logits / temperature).softmax(-1)
                feed = torch.multinomial(p, 1, generator=generator)         # (B, 1)
            idx = torch.cat((idx, feed), 1)
            yield feed

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """idx, (B, T) int64, with max_new_tokens more, (B, T + max_new_tokens). See `stream`."""
        return torch.cat((idx, *self.stream(idx, max_new_tokens, temperature, top_k, generator)), 1)

    def num_params(self):
        """The number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def param_groups(self, weight_decay, learning_rate, router_lr=None):
        """Three groups for AdamW: matrices decay; gains do not; nor do router parameters, which may
        have their own rate. Each has `lr`, and `lr_scale` = lr / learning_rate for a schedule."""
        router = list(self.router.parameters())
        rest = [p for name, p in self.named_parameters() if not name.startswith("router.")]
        router_lr = learning_rate if router_lr is None else router_lr
        groups = [
            ([p for p in rest if p.dim() == 2], weight_decay, learning_rate),
            ([p for p in rest if p.dim() == 1], 0.0, learning_rate),
            (router, 0.0, router_lr),
        ]
        return [{"params": params, "weight_decay": decay, "lr": lr, "lr_scale": lr / learning_rate}
                for params, decay, lr in groups if params]
