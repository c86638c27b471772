"""
The numbers of model.py, quicker: the depth read, RMSNorm, rotation and SwiGLU, under the same names and with the
same calls. Their backward passes are derived in docs/depth-read.md.

The ladder, from the definitions up, and what each step is worth: the time and the peak memory of a training step
without it, in units of one with all of them (24 layers of 256, 4 x 256 tokens, float32, two cores; medians of 3 to
9 interleaved steps, times good to 0.03).
                                                                                        time    memory
  Reader    a read keeps its sources, which exist anyway, and a weight for each: no     block     1.08    1.36
            stack, no normed copy, no product (off: the definition)                     delta     3.53    2.36
  Pass      the reads of a run share passes over the sources that are old               block     1.17    1.02
                                                                                        delta     1.38    1.03
  clone     a mix that comes out of a pass as it is does not keep the others there      block     0.97    1.03
  RMSNorm   layer norm's fused backward pass on a CPU, mended by one term               residual  1.05    1.12
  rotation  nothing is kept, and the backward pass turns back                           residual  1.02    1.02
  SwiGLU    silu(gate), the widest tensor of a layer, is made again                     residual  0.97    1.07

Tried, worth less than 0.02, and gone: a sigmoid where one source is recent, passes in parts of 24 MiB, products in
memory that is still in the cache, and sources that come back from a read to collect their gradients.
"""
import functools

import torch
import torch.nn.functional as F
from torch.autograd import Function

PASS_READS = 12             # sublayers whose reads share a pass: at their turn the mixes should be in the cache

def wide(x):
    """x in float32 at least, as in model.py."""
    return x.float() if x.dtype.itemsize < 4 else x

def exact(function):
    """A forward or backward pass in float32 whatever surrounds it: no autocast, no TF32 or bfloat16 in products."""
    @functools.wraps(function)
    def in_float32(*args):
        if torch.compiler.is_compiling():                               # see `reader`
            return function(*args)
        if torch.is_grad_enabled():                                     # in a backward pass: create_graph
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

# --------------------------------------------------------------------------------------------------------------
# The depth read

def rms(s):
    """The root mean square of each vector: (..., D) -> (...). One pass over s: its squares would be a tensor more."""
    return (torch.linalg.vector_norm(wide(s), dim=-1).square() / s.size(-1) + 1e-6).sqrt()

def reader(router):
    """The `read` of one forward. By the definition where that is better: torch.compile on a card, or under autocast,
    fuses it, and then there is no product to be in TF32 or bfloat16; and decoding, one token is so few numbers that
    only operations count."""
    if torch.compiler.is_compiling():
        plain = router.query.is_cuda or torch.is_autocast_enabled("cpu")
    else:
        plain = torch.is_inference_mode_enabled()
    return router.read if plain else Reader(router)

class Reader:
    """Old sources are those in the list at the first read of a run. One pass over them serves up to 12 reads.

    It leaves for each of their queries one tensor, the mix of the old sources, and the log-sum-exp of their logits:
    from then on they are *one* source with that logit, beside the recent ones. Mixes wait in `begun` for their turn.
    """
    def __init__(self, router):
        self.router, self.run, self.begun, self.seen = router, None, {}, []
        self.runs = {l: run for run in router.runs() for l in run}

    def __call__(self, l, sources, bias=None, scale=None):
        """The inputs of sublayer l, as model.DepthRouter says."""
        sources = list(sources)
        scale = [None] * len(sources) if scale is None else list(scale)
        self.check_unchanged([*sources, *scale, bias])
        graph = torch.is_grad_enabled()
        if self.runs.get(l) != self.run:
            self.run, self.begun = self.runs.get(l), {}
            self.old, self.old_scale, self.with_these = sources, scale, (bias, graph)
        # not shared (the head; a window that has slid): one old source, and all others recent
        shared = (self.run is not None and len(sources) >= len(self.old) and same_objects(self.old, sources)
                  and same_objects(self.old_scale, scale) and same_objects(self.with_these, (bias, graph)))
        n = len(self.old) if shared else 1
        if not (shared and l in self.begun):
            reads = range(l, min(l + PASS_READS, self.run.stop)) if shared else range(l, l + 1)
            self.begin(reads, sources[:n], bias, scale[:n])
        mixes, logits = self.begun.pop(l)
        if len(sources) == n:
            mixes = [mix.clone() for mix in mixes]
        else:
            recent, scale = without_repeats(sources[n:]), stacked(scale[n:], sources)
            bias = None if bias is None else bias[l, n:len(sources)]
            mixes = [Read.apply(query, bias, scale, mix, logit, *recent)
                     for query, mix, logit in zip(self.router.queries(l), mixes, logits)]
        return self.router.inputs(mixes)

    def begin(self, reads, old, bias, scale):
        """Put into `begun` for each of `reads`, one or two for its queries: mixes of `old`, and their logits."""
        queries = [self.router.queries(l) for l in reads]                # (1, D) or (2, D) each
        routes, query = [len(q) for q in queries], torch.cat(queries)   # (R, D)
        if bias is not None:
            bias = torch.cat([bias[l, :len(old)].expand(r, -1) for l, r in zip(reads, routes)])      # (R, n)
        scale, (B, T, _) = stacked(scale, old), old[0].shape
        if len(old) == 1 and scale is None:                             # it is its own mix
            s = wide(old[0])
            mixes = [s.view_as(s) for _ in query]
            logits = torch.stack([(s * q).sum(-1) for q in query]) / rms(s)                 # (R, B, T)
            logits = logits if bias is None else logits + bias.unsqueeze(-1)
        else:
            scale = None if scale is None else scale.flatten(1).mT      # (n, B, T) -> (N, n), N = B T
            logits, *mixes = Pass.apply(query, bias, scale, *(s.flatten(0, 1) for s in without_repeats(old)))
            mixes = [mix.unflatten(0, (B, T)) for mix in mixes]         # R of (B, T, D)
            logits = logits.mT.unflatten(1, (B, T))                     # (N, R) -> (R, B, T)
        for l, own, logit in zip(reads, split(mixes, routes), logits.split(routes)):
            self.begun[l] = own, logit

    def check_unchanged(self, inputs):
        """What is written to after a read would be one thing in a pass and another by the definition."""
        if not torch.compiler.is_compiling():
            if any(s._version != version for s, version in self.seen):
                raise ValueError("a source, or what it is a view of, was changed in place after it was read "
                                 "(c += u); write c = c + u.")
            self.seen = [(s, s._version) for s in inputs if torch.is_tensor(s) and not s.is_inference()]

def same_objects(old, new):
    return all(x is y for x, y in zip(old, new))

def split(items, sizes):
    """A list in stretches of these lengths."""
    items = iter(items)
    return [[next(items) for _ in range(size)] for size in sizes]

def without_repeats(sources):
    """Where a tensor comes again, a view of it: torch.compile takes none twice into an autograd function."""
    return [s.view_as(s) if any(s is t for t in sources[:i]) else s for i, s in enumerate(sources)]

def stacked(scale, sources):
    """n scales, (B, T) each or None for 1: (n, B, T), or None where all are 1."""
    if all(r is None for r in scale):
        return None
    one = torch.ones_like(sources[0][..., 0], dtype=wide(sources[0]).dtype)
    return torch.stack([one if r is None else one * r for r in scale])

class Pass(Function):
    """R reads of the same n sources, (N, D) each: log-sum-exps of their logits, (N, R), and R mixes, (N, D).

    query: (R, D). bias: (R, n) or None. scale: (N, n) or None.
    """
    @staticmethod
    @exact
    def forward(ctx, query, bias, scale, *sources):
        s = wide(torch.stack(sources, 1))                               # (N, n, D)
        inv_rms = 1 / rms(s).unsqueeze(-1)                              # (N, n, 1)
        dot = (s @ query.mT) * inv_rms                                  # (N, n, R)
        logit = dot if bias is None else dot + bias.mT
        lse = logit.logsumexp(1, keepdim=True)                          # (N, 1, R)
        alpha = (logit - lse).exp()                                     # (N, n, R)
        weight = alpha if scale is None else alpha * scale.unsqueeze(-1)
        ctx.save_for_backward(query, bias, scale, inv_rms, dot, alpha, *sources)
        return lse.squeeze(1), *(weight.mT @ s).unbind(1)               # (N, R, D) -> R of (N, D)

    @staticmethod
    @exact
    def backward(ctx, d_lse, *d_mixes):
        query, bias, scale, inv_rms, dot, alpha, *sources = ctx.saved_tensors
        s, g = wide(torch.stack(sources, 1)), torch.stack(d_mixes, 1)   # (N, n, D), (N, R, D)
        weight, d_alpha, d_scale = alpha, s @ g.mT, None                # (N, n, R)
        if scale is not None:
            d_scale = (alpha * d_alpha).sum(-1) if ctx.needs_input_grad[2] else None    # (N, n)
            weight, d_alpha = alpha * scale.unsqueeze(-1), d_alpha * scale.unsqueeze(-1)
        mean = (alpha * d_alpha).sum(1, keepdim=True)                   # (N, 1, R): g . mix
        d_logit = alpha * (d_alpha - mean + d_lse.unsqueeze(1))         # (4)
        by_w = d_logit * inv_rms
        by_s = (by_w * dot).sum(-1, keepdim=True) * inv_rms / s.size(-1)      # (N, n, 1)
        d_query = by_w.flatten(0, 1).mT @ s.flatten(0, 1)               # (R, N n) @ (N n, D)
        d_s = s.mul_(-by_s).baddbmm_(weight, g)                         # (6), in place: n sources are large
        d_s.view(-1, s.size(-1)).addmm_(by_w.flatten(0, 1), query)
        return d_query, None if bias is None else d_logit.sum(0).mT, d_scale, *d_s.unbind(1)

class Read(Function):
    """One read of its past, a mix (B, T, D) with its logit (B, T), and of n recent sources: (B, T, D).

    query: (D). bias: (n) or None. scale: (n, B, T) or None. All are of the recent sources.
    """
    @staticmethod
    @exact
    def forward(ctx, query, bias, scale, past, past_logit, *sources):
        s = [wide(source) for source in sources]
        inv_rms = 1 / torch.stack([rms(x) for x in s])                  # (n, B, T)
        dot = torch.stack([x @ query for x in s]) * inv_rms             # (n, B, T)
        logit = dot if bias is None else dot + bias[:, None, None]
        alpha = torch.cat((past_logit.unsqueeze(0), logit)).softmax(0)  # (1 + n, B, T)
        weight = alpha[1:] if scale is None else alpha[1:] * scale      # (n, B, T)
        mix = past * alpha[0].unsqueeze(-1)                             # (B, T, D)
        for x, w in zip(s, weight.unsqueeze(-1)):
            mix.addcmul_(x, w)
        ctx.save_for_backward(query, bias, scale, inv_rms, dot, alpha, weight, mix, *sources)
        return mix

    @staticmethod
    @exact
    def backward(ctx, g):
        query, bias, scale, inv_rms, dot, alpha, weight, mix, *sources = ctx.saved_tensors
        s = [wide(source) for source in sources]
        d_weight = torch.stack([(g * x).sum(-1) for x in s])            # (n, B, T)
        d_logit = weight * d_weight - alpha[1:] * (g * mix).sum(-1)     # (n, B, T): (2)
        by_w = d_logit * inv_rms
        by_s = by_w * dot * inv_rms / query.numel()                     # (n, B, T)
        d_s = [(g * w).addcmul_(d, query).addcmul_(t, x, value=-1)      # (6)
               for x, w, d, t in zip(s, *(y.unsqueeze(-1) for y in (weight, by_w, by_s)))]
        d_query = sum(d.flatten() @ x.flatten(0, 1) for x, d in zip(s, by_w))
        d_bias = None if bias is None else d_logit.sum((1, 2))
        d_scale = alpha[1:] * d_weight if ctx.needs_input_grad[2] else None
        return d_query, d_bias, d_scale, g * alpha[0].unsqueeze(-1), -d_logit.sum(0), *d_s     # (3)

# --------------------------------------------------------------------------------------------------------------
# The sublayers

def rms_norm(x, weight, eps):
    """x / rms(x) * weight: on a card F.rms_norm is one kernel; on a CPU it is not."""
    x = wide(x)
    if x.device.type == "cpu" and torch.is_grad_enabled():
        return CPURMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)

class CPURMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm * norm / x.size(-1) + eps).rsqrt()                # (..., 1)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, g):
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():       # to be differentiated again
            y = F.rms_norm(x, weight.shape, weight, ctx.eps)
            return *torch.autograd.grad(y, (x, weight), g, create_graph=True), None
        d_x, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            g, x, weight.shape, torch.zeros_like(scale), scale, weight, None, (True, True, False))
        mean = (g @ weight).unsqueeze(-1) / x.size(-1)                  # which an RMS norm does not take away
        return d_x.add_(mean * scale), d_weight, None

def rotate(x, cos, sin):
    """The pairs of x, (B, T, heads, head_dim), turned by cos and sin, (T, 1, head_dim / 2)."""
    return Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else turn(x, cos, sin)

class Rotate(Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return turn(g, cos, -sin), None, None

def turn(x, cos, sin):
    y = (x.unflatten(-1, (2, -1)) * cos.unsqueeze(-2)).flatten(-2)      # (..., head_dim)
    (x1, x2), (y1, y2) = x.chunk(2, -1), y.chunk(2, -1)                 # (..., head_dim / 2)
    y1.addcmul_(x2, sin, value=-1)                                      # y1 = x1 cos - x2 sin
    y2.addcmul_(x1, sin)                                                # y2 = x2 cos + x1 sin
    return y

def swiglu(gate, up):
    """silu(gate) * up"""
    return SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)

class SwiGLU(Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, g):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(g, gate).mul_(up), F.silu(gate).mul_(g)
