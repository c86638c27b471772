"""
The numbers of model.py, quicker: the depth read, RMSNorm, rotation and SwiGLU, under the same names and with the same calls.

LADDER
"""
import functools

import torch
import torch.nn.functional as F
from torch.autograd import Function

PASS_READS = 12                         # sublayers whose reads share a pass: their mixes should be in the cache at their turn

def wide(x):
    """x in float32 at least, as in model.py."""
    return x.float() if x.dtype.itemsize < 4 else x

def exact(function):
    """The function in float32 whatever surrounds it: without autocast, and without TF32 or bfloat16 in matrix products."""
    @functools.wraps(function)
    def in_float32(*args):
        if torch.compiler.is_compiling():                                       # autocast is off there; see `reader`
            return function(*args)
        if torch.is_grad_enabled():                                             # in a backward pass: with create_graph
            raise RuntimeError("the quick depth read has no second differentiation; set plain_read for that.")
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        was = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
                return function(*args)
        finally:
            for backend, precision in zip(backends, was):
                backend.fp32_precision = precision
    return in_float32

def inverse_rms(x):
    """1 / rms of each vector: (..., D) -> (...). In one pass over x: its squares would be a tensor more."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    return (norm * norm / x.size(-1) + 1e-6).rsqrt()

# ---------------------------------------------------------------------------------------------------------------------
# The depth read

def reader(router):
    """The `read` of one forward. The definition where it is better: torch.compile on a card fuses it, and then no product
    can be in TF32; decoding, one token is so few numbers that only operations count."""
    if torch.compiler.is_compiling():
        return router.read if router.query.is_cuda else Reader(router)
    return router.read if torch.is_inference_mode_enabled() else Reader(router)

class Reader:
    """The reads of a run share passes over the sources that are old: that are there at the first read of the run.

    A pass leaves for each query one tensor, the old sources' mix, and the log-sum-exp of their logits: from then on they
    are *one* source with that logit, beside the recent ones. The mixes wait in `begun` for the turns of their reads.
    """
    def __init__(self, router):
        self.router, self.run, self.begun, self.seen = router, None, {}, []
        self.runs = {l: run for run in router.runs() for l in run}

    def __call__(self, l, sources, bias=None, scale=None):
        """The inputs of sublayer l: see model.DepthRouter."""
        sources, scale = list(sources), [None] * len(sources) if scale is None else list(scale)
        self.check_unchanged(sources)
        if self.runs.get(l) != self.run:
            self.run, self.begun = self.runs.get(l), {}
            self.old, self.old_scale, self.bias = sources, scale, bias
        shared = (self.run is not None and bias is self.bias and len(sources) >= len(self.old)
                  and same(self.old, sources) and same(self.old_scale, scale))  # a router of one's own may slide a window
        n = len(self.old) if shared else 1                                      # sources in the pass; a read by itself: the first
        if not (shared and l in self.begun):
            part = range(l, min(l + PASS_READS, self.run.stop)) if shared else range(l, l + 1)
            self.begin(part, sources[:n], bias, scale[:n])
        mixes, logit = self.begun.pop(l)
        recent, query = distinct(sources[n:]), self.router.queries(l)
        r = factors(scale[n:], recent)
        if not recent:                                                          # a view would keep the others in memory
            mixes = [mix.clone() for mix in mixes]
        else:
            b = None if bias is None else bias[l, n:n + len(recent)]
            mixes = [Read.apply(q, b, r, mix, own, *recent) for q, mix, own in zip(query, mixes, logit)]
        return self.router.inputs(list(mixes))

    def begin(self, part, sources, bias, scale):
        """Put into `begun`, for each read of `part`: the mixes of these sources and their logits, (routes, B, T)."""
        queries = [self.router.queries(l) for l in part]                        # (1, D) or (2, D) each
        routes, query = [len(q) for q in queries], torch.cat(queries)           # (R, D)
        if bias is not None:
            bias = torch.cat([bias[l, :len(sources)].expand(k, -1) for l, k in zip(part, routes)])      # (R, n)
        r, shape = factors(scale, sources), sources[0].shape[:2]
        if len(sources) == 1 and r is None:                                     # it is its own mix
            s = wide(sources[0])
            logit = torch.stack([(s * q).sum(-1) for q in query]) * inverse_rms(s)      # (R, B, T)
            logit = logit if bias is None else logit + bias.unsqueeze(-1)
            mixes = [s.view_as(s) for _ in query]
        else:
            tokens = [s.flatten(0, 1) for s in distinct(sources)]               # (N, D), N = B T
            r = None if r is None else r.flatten(1).T                           # (N, n)
            lse, *mixes = Pass.apply(query, bias, r, *tokens)
            mixes = [mix.unflatten(0, shape) for mix in mixes]
            logit = lse.unflatten(0, shape).movedim(-1, 0)                      # (N, R) -> (R, B, T)
        mixes = iter(mixes)
        self.begun |= {l: ([next(mixes) for _ in own], own) for l, own in zip(part, logit.split(routes))}

    def check_unchanged(self, sources):
        """A source that is written to after a read would be one thing in a pass and another by the definition."""
        if torch.compiler.is_compiling():                                       # which makes copies of such
            return
        if any(s._version != version for s, version in self.seen):
            raise ValueError("a source was changed in place after it was read (c += u). Write c = c + u, which makes a new one.")
        self.seen = [(s, s._version) for s in sources]

def same(old, new):
    return all(x is y for x, y in zip(old, new))

def distinct(sources):
    """The same, a second mention of a tensor as a view: torch.compile refuses one twice in an autograd function."""
    return [s.view_as(s) if any(s is t for t in sources[:i]) else s for i, s in enumerate(sources)]

def factors(scale, sources):
    """The scales of n sources as one tensor, (n, B, T), or None where all are 1."""
    if all(r is None for r in scale):
        return None
    one = torch.ones_like(next(r for r in scale if r is not None))
    return torch.stack([one if r is None else r for r in scale])

class Pass(Function):
    """R reads of the same n sources, (N, D) each, N tokens: the log-sum-exps of their logits, (N, R), and R mixes, (N, D)."""
    @staticmethod
    @exact
    def forward(ctx, query, bias, factor, *sources):
        s = wide(torch.stack(sources, 1))                                       # (N, n, D)
        scale = inverse_rms(s).unsqueeze(-1)                                    # (N, n, 1)
        dot = (s @ query.T) * scale                                             # (N, n, R)
        logit = dot if bias is None else dot + bias.T
        lse = logit.logsumexp(1, keepdim=True)                                  # (N, 1, R)
        alpha = (logit - lse).exp()                                             # (N, n, R)
        weight = alpha if factor is None else alpha * factor.unsqueeze(-1)
        mixes = weight.mT @ s                                                   # (N, R, n) @ (N, n, D)
        ctx.save_for_backward(query, bias, factor, scale, dot, alpha, *sources)
        return lse.squeeze(1), *mixes.unbind(1)

    @staticmethod
    @exact
    def backward(ctx, d_lse, *d_mixes):
        query, bias, factor, scale, dot, alpha, *sources = ctx.saved_tensors
        s, g = wide(torch.stack(sources, 1)), torch.stack(d_mixes, 1)           # (N, n, D), (N, R, D)
        d_alpha = s @ g.mT                                                      # (N, n, R)
        weight = alpha
        if factor is not None:
            weight = alpha * factor.unsqueeze(-1)
            d_alpha.mul_(factor.unsqueeze(-1))
        mean = (alpha * d_alpha).sum(1) - d_lse                                 # (N, R)
        d_logit = d_alpha.sub_(mean.unsqueeze(1)).mul_(alpha)                   # (N, n, R)
        d_dot = d_logit * scale
        through_rms = (d_dot * dot).sum(-1, keepdim=True) * scale / s.size(-1)  # (N, n, 1)
        d_query = d_dot.flatten(0, 1).T @ s.flatten(0, 1)                       # (R, N n) @ (N n, D)
        d_s = s.mul_(-through_rms)                                              # in place, here and below: n sources are large
        d_s.baddbmm_(weight, g)
        d_s.view(-1, s.size(-1)).addmm_(d_dot.flatten(0, 1), query)
        return d_query, None if bias is None else d_logit.sum(0).T, None, *d_s.unbind(1)

class Read(Function):
    """One read of its past, a mix (B, T, D) with its logit (B, T), and of n recent sources, (B, T, D) each: (B, T, D)."""
    @staticmethod
    @exact
    def forward(ctx, query, bias, factor, past, past_logit, *sources):
        s = [wide(source) for source in sources]
        scale = torch.stack([inverse_rms(x) for x in s])                        # (n, B, T)
        dot = torch.stack([x @ query for x in s]) * scale                       # (n, B, T)
        logit = dot if bias is None else dot + bias[:, None, None]
        alpha = torch.cat((past_logit.unsqueeze(0), logit)).softmax(0)          # (1 + n, B, T)
        weight = alpha[1:] if factor is None else alpha[1:] * factor            # (n, B, T)
        mix = past * alpha[0].unsqueeze(-1)                                     # (B, T, D)
        for x, w in zip(s, weight.unsqueeze(-1)):
            mix.addcmul_(x, w)
        ctx.save_for_backward(query, bias, scale, dot, alpha, weight, mix, *sources)
        return mix

    @staticmethod
    @exact
    def backward(ctx, g):
        query, bias, scale, dot, alpha, weight, mix, *sources = ctx.saved_tensors
        s = [wide(source) for source in sources]
        d_weight = torch.stack([(g * x).sum(-1) for x in s])       # (n, B, T)
        d_logit = weight * d_weight - alpha[1:] * (g * mix).sum(-1)        # (n, B, T)
        d_past = g * alpha[0].unsqueeze(-1)
        d_dot = d_logit * scale
        through_rms = d_dot * dot * scale / query.numel()                       # (n, B, T)
        d_sources = [(g * w).addcmul_(d, query).addcmul_(t, x, value=-1)
                     for x, w, d, t in zip(s, *(y.unsqueeze(-1) for y in (weight, d_dot, through_rms)))]
        d_query = sum(d.flatten() @ x.flatten(0, -2) for x, d in zip(s, d_dot))
        d_bias = None if bias is None else d_logit.flatten(1).sum(1)
        return d_query, d_bias, None, d_past, -d_logit.sum(0), *d_sources       # the logits' gradients add up to 0

# ---------------------------------------------------------------------------------------------------------------------
# The sublayers

def rms_norm(x, weight, eps):
    x = wide(x)
    if x.device.type == "cpu" and torch.is_grad_enabled():
        return CPURMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)

class CPURMSNorm(Function):
    """On CPUs F.rms_norm is not fused; layer norm is, and its backward pass with mean 0 lacks one term of this one's."""
    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm * norm / x.size(-1) + eps).rsqrt()                        # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, g):
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():       # it is to be differentiated again
            y = F.rms_norm(x, weight.shape, weight, ctx.eps)
            return *torch.autograd.grad(y, (x, weight), g, create_graph=True), None
        d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            g, x, weight.shape, torch.zeros_like(scale), scale, weight, None, (True, True, False))
        mean = (g @ weight).unsqueeze(-1) / x.size(-1)                          # layer norm takes it away, rms norm does not
        return d_x.add_(mean * scale), d_weight, None

def rotate(x, cos, sin):
    return Rotate.apply(x, cos, sin)

class Rotate(Function):
    """Nothing but the table is kept for the backward pass, which turns back."""
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return turn(g, cos, -sin), None, None

def turn(x, cos, sin):
    y = (x.unflatten(-1, (2, -1)) * cos.unsqueeze(-2)).flatten(-2)              # (..., head_dim)
    (x1, x2), (y1, y2) = x.chunk(2, -1), y.chunk(2, -1)                         # (..., head_dim / 2)
    y1.addcmul_(x2, sin, value=-1)                                              # y1 = x1 cos - x2 sin
    y2.addcmul_(x1, sin)                                                        # y2 = x2 cos + x1 sin
    return y

def swiglu(gate, up):
    return SwiGLU.apply(gate, up)

class SwiGLU(Function):
    """Autograd would keep silu(gate) too, the widest tensor in a layer; here it is made again."""
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, g):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(g, gate).mul_(up), F.silu(gate).mul_(g)
