"""Small things to try a router on: settings, random parameters, sublayers of a few numbers each."""
from types import SimpleNamespace

import torch
import reference

# float64 carries 16 digits. A read adds up to 37 sources and their exponentials, and 24 sublayers with a softmax each
# pass an error on: two to three digits go, measured against the largest entry. 1e-10 leaves three more, and any other
# formula (a source too many, another eps, a bias on the wrong source) is off by far more than that.
TOLERANCE = 1e-10

MIXING, ADDITIVE = reference.MIXING, reference.ADDITIVE

D = 6

def settings(router, n_layer=2, n_blocks=None, **flags):
    """A field for each of GPTConfig's, so that it goes to the reference as it is, and to GPTConfig by `vars`."""
    c = dict(vocab_size=11, seq_len=8, n_layer=n_layer, n_head=1, n_embd=D, router=router,
             n_blocks=min(8, n_layer) if n_blocks is None else n_blocks, decouple_v=False, rd_control="none",
             details="phase,split", rho=1.0, head_details=False, null_source=False, route_gate=None)
    return SimpleNamespace(**{**c, **flags})

def label(c):
    """A short name for a case: what differs from the defaults."""
    usual = vars(settings(c.router, c.n_layer, c.n_blocks))
    return " ".join([c.router, f"{c.n_layer}/{c.n_blocks}"] + [f"{k}={v}" for k, v in vars(c).items() if v != usual[k]])

def random_parameters(c, g):
    """Queries of this size make logits of about +-2.5, so weights are neither uniform nor one-hot."""
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in reference.shapes(c).items()}

def normed(h):
    return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()

def toy_attention(a, b):
    """One causal head: tokens mix, as in attention, so a leak from a later token or from h_v to h shows."""
    def f(h, h_v=None):
        h, h_v = normed(h), normed(h if h_v is None else h_v)
        later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
        scores = (h @ a @ h.transpose(1, 2)).masked_fill(later, float("-inf"))  # (B, T, T)
        return torch.tanh(scores.softmax(-1) @ h_v @ b)
    return f

def toy_mlp(a, b):
    def f(h):
        return torch.tanh(normed(h) @ a) @ b
    return f

def toy_sublayers(w):
    """w (2L, 2, D, D) -> 2L sublayers."""
    return [(toy_mlp if l % 2 else toy_attention)(*w[l]) for l in range(len(w))]

def problem(c, seed=0, B=2, T=3, dtype=torch.float64):
    """e, the toys' weights, the router's parameters, and a direction in which the output is differentiated."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    e, w, out = draw(B, T, c.n_embd), draw(2 * c.n_layer, 2, c.n_embd, c.n_embd) * 0.4, draw(B, T, c.n_embd)
    p = random_parameters(c, g)
    return e.to(dtype), w.to(dtype), {k: v.to(dtype) for k, v in p.items()}, out.to(dtype)

def solve(function, e, w, p, out):
    """h = function(e, sublayers), and the gradients of (h * out).sum() by e, by the sublayers' weights and by p.
    The weights' gradients show what reaches each update."""
    leaves = {"e": e.detach().clone().requires_grad_(), "w": w.detach().clone().requires_grad_(), **p}
    for x in p.values():
        x.grad = None
    h = function(leaves["e"], toy_sublayers(leaves["w"]))
    (h * out).sum().backward()
    # a parameter that nothing depends on may have no gradient or one of zeros
    return h.detach(), {k: torch.zeros_like(x) if x.grad is None else x.grad for k, x in leaves.items()}

def by_reference(c, e, w, p, out):
    p = {k: x.detach().clone().requires_grad_() for k, x in p.items()}
    return solve(lambda e, f: reference.ROUTERS[c.router](p, c, e, f), e, w, p, out)

def build(c, p=None, dtype=torch.float64, **more):
    """The router of model.py that c describes, holding the parameters p (or its own first ones)."""
    from model import GPTConfig, ROUTERS
    router = ROUTERS[c.router](GPTConfig(**{**vars(c), **more})).to(dtype)
    own = {k: x for k, x in router.named_parameters() if x.numel()}
    assert {k: tuple(x.shape) for k, x in own.items()} == reference.shapes(c)
    if p is not None:
        with torch.no_grad():
            for name, x in own.items():
                x.copy_(p[name])
    return router

def by_model(c, e, w, p, out, **more):
    router = build(c, p, e.dtype, **more)
    return solve(router, e, w, {k: x for k, x in router.named_parameters() if x.numel()}, out)

def error(got, want):
    """The largest difference, in units of the largest entry (or absolute, if that is below 1)."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape, got.dtype, want.dtype)
    if not got.numel():
        return 0.0
    difference = (got - want).abs().max().item()
    return difference / max(1.0, want.abs().max().item())

def agree(got, want, tolerance=TOLERANCE):
    """Both are (h, gradients)."""
    assert error(got[0], want[0]) <= tolerance, f"values differ by {error(got[0], want[0]):.2e}"
    assert got[1].keys() == want[1].keys()
    for name in want[1]:
        difference = error(got[1][name], want[1][name])
        assert difference <= tolerance, f"the gradient of {name} differs by {difference:.2e}"

def identical(got, want):
    """Bit for bit."""
    assert torch.equal(got[0], want[0])
    for name in got[1].keys() & want[1].keys():
        assert torch.equal(got[1][name], want[1][name]), name

class Recorder:
    """Sublayers that note what they were given (`inputs`, a tuple each) and what they returned (`updates`)."""
    def __init__(self, sublayers):
        self.inputs, self.updates = [], []
        self.sublayers = [self.noting(f) for f in sublayers]

    def noting(self, f):
        def g(*h):
            self.inputs.append(h)
            self.updates.append(f(*h))
            return self.updates[-1]
        return g
