"""
Identity 10: the fast depth read equals the plain one (stack, softmax, sum), which is its definition.
Both are reached through the routers: `plain_read` chooses.
"""
import doctest
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import model
import reference
from nanodepth import fast
import toys
from toys import (ADDITIVE, D, MIXING, TOLERANCE, Recorder, agree, build, by_model, by_reference, error, label, problem,
                  settings, toy_sublayers)

def reads():
    for router in MIXING:
        yield settings(router, 1, 1, null_source=True)
        yield settings(router, 5, 3)
        yield settings(router, 5, 3, decouple_v=True)
        yield settings(router, 12, 5, decouple_v=True, rd_control="average")
        yield settings(router, 12, 12, decouple_v=True, rd_control="frozen_v", null_source=True)
        if router == "wav":
            yield settings(router, 12, 12, decouple_v=True, head_details=True, null_source=True, rho=3.0)
        if router in ADDITIVE:
            yield settings(router, 12, 7, decouple_v=True, route_gate=1.0, null_source=True)
    yield settings("delta", 24)                         # 49 sources: whatever a fast read groups, it has several groups

READS = list(reads())

@pytest.mark.parametrize("c", READS, ids=label)
def test_fast_is_plain(c):
    case = problem(c, seed=2)
    agree(by_model(c, *case), by_model(c, *case, plain_read=True))

@pytest.mark.parametrize("c", READS, ids=label)
def test_fast_is_plain_in_float32(c):
    """Seven digits, of which the same two to three go."""
    case = problem(c, seed=2, dtype=torch.float32)
    want = by_model(c, *case, plain_read=True)
    agree(by_model(c, *case), want, tolerance=1e-4)
    assert error(want[0].double(), by_model(c, *problem(c, seed=2))[0]) <= 1e-4

@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
def test_by_hand(plain):
    """attnres with one layer: e = (3, 4), u_0 = (1, -1), u_1 = (0, 2)."""
    c = settings("attnres", 1, n_embd=2)
    query = torch.tensor([[5.0, 7.0], [0.5, -1.0], [1.0, 0.25]], dtype=torch.float64)
    e, u0, u1 = [torch.tensor(x, dtype=torch.float64).view(1, 1, 2) for x in ([3.0, 4.0], [1.0, -1.0], [0.0, 2.0])]
    toys = Recorder([lambda *h: u0, lambda *h: u1])
    head = build(c, {"query": query}, plain_read=plain)(e, toys.sublayers)
    assert error(toys.inputs[0][0].detach(), e) <= TOLERANCE

    rms = [math.sqrt(12.5 + 1e-6), math.sqrt(1.0 + 1e-6), math.sqrt(2.0 + 1e-6)]
    a, b = math.exp((1.5 - 4.0) / rms[0]), math.exp((0.5 + 1.0) / rms[1])
    want = torch.tensor([(3 * a + b) / (a + b), (4 * a - b) / (a + b)], dtype=torch.float64).view(1, 1, 2)
    assert error(toys.inputs[1][0].detach(), want) <= TOLERANCE

    a, b, d = math.exp((3.0 + 1.0) / rms[0]), math.exp((1.0 - 0.25) / rms[1]), math.exp(0.5 / rms[2])
    want = torch.tensor([3 * a + b, 4 * a - b + 2 * d], dtype=torch.float64).view(1, 1, 2) / (a + b + d)
    assert error(head.detach(), want) <= TOLERANCE

@pytest.mark.parametrize("router", MIXING)
def test_gradcheck(router):
    """The fast read's own backward pass against differences of values."""
    # a detail's factor min(rms(C) / rms(D), rho) is detached, which differences cannot know: a small rho is always the
    # smaller of the two, and is constant
    c = settings(router, 2, 2, decouple_v=True, null_source=True, rho=0.05, n_embd=4, head_details=True,
                 route_gate=1.0 if router in ADDITIVE else None)
    e, w, p, _ = problem(c, B=1, T=2)
    model = build(c, p)
    names = [k for k, x in model.named_parameters() if x.numel()]
    def f(e, w, *own):
        return torch.func.functional_call(model, dict(zip(names, own)), (e, toy_sublayers(w)))
    inputs = [x.detach().clone().requires_grad_() for x in [e, w, *[p[name] for name in names]]]
    assert torch.autograd.gradcheck(f, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)

@pytest.mark.parametrize("router", MIXING)
def test_second_derivatives(router):
    """The plain read has them. The fast one says that it has not: what it keeps for its backward pass is constant to autograd."""
    for plain in (True, False):
        c = settings(router, 2, 2, rho=0.05, n_embd=4, plain_read=plain)
        e, w, p, _ = problem(c, B=1, T=2)
        model, e = build(c, p), e.detach().requires_grad_()
        f = lambda e: model(e, toy_sublayers(w))
        if plain:
            assert torch.autograd.gradgradcheck(f, e, eps=1e-6, atol=1e-5, rtol=1e-5)      # differences of differences
        else:
            with pytest.raises(RuntimeError, match="differentiation|inplace"):
                first, = torch.autograd.grad(f(e).square().sum(), e, create_graph=True)
                torch.autograd.grad(first.sum(), e)

@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("router", MIXING)
def test_autocast(router, plain):
    """Updates in bfloat16, as a sublayer gives them under autocast: sources, weights and sums stay in float32."""
    c = settings(router, 5, 3, decouple_v=True)
    e, _, p, out = problem(c, dtype=torch.float32)
    updates = torch.randn(10, *e.shape, generator=torch.Generator().manual_seed(3)).bfloat16()

    def run(function, own, dtype, update_dtype):
        """Every input of a sublayer, then the head's; and the gradients of the sum of all of them, times `out`."""
        x = e.to(dtype).requires_grad_()
        us = [u.to(update_dtype).requires_grad_() for u in updates]
        toys = Recorder([lambda *h, u=u: u for u in us])
        head = function(x, toys.sublayers)
        hs = [h for l in range(10) for h in toys.inputs[l]] + [head]
        sum((h * out).sum() for h in hs).backward()
        return hs, [x.grad] + [y.grad for y in own.values()], [u.grad for u in us]

    leaves = {k: x.double().requires_grad_() for k, x in p.items()}
    hs, gradients, update_gradients = run(lambda e, f: reference.ROUTERS[router](leaves, c, e, f), leaves,
                                          torch.float64, torch.float64)
    model = build(c, p, torch.float32, plain_read=plain)
    own = dict(model.named_parameters())
    def under_autocast(e, f):
        with torch.autocast("cpu", torch.bfloat16):
            return model(e, f)
    got = run(under_autocast, {k: own[k] for k in p}, torch.float32, torch.bfloat16)
    # bfloat16 anywhere in a sum or a weight would be an error of 4e-3
    assert all(h.dtype is torch.float32 for h in got[0])
    for h, want in zip(got[0], hs, strict=True):
        assert error(h.detach().double(), want.detach()) <= 1e-5
    for gradient, want in zip(got[1], gradients, strict=True):
        assert error(gradient.double(), want) <= 1e-4
    for gradient, want in zip(got[2], update_gradients, strict=True):
        assert gradient.dtype is torch.bfloat16 and error(gradient.double(), want) <= 1e-2

class Products(TorchDispatchMode):
    """Notes how precise each matrix product was to be."""
    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if any(x in name for x in ("mm", "mv", "dot")):
            precision = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
            self.seen.setdefault(name, set()).add(precision)
        return function(*args, **(kwargs or {}))

@pytest.mark.parametrize("router", MIXING)
def test_no_product_of_a_read_is_in_tf32(router):
    """Emulates a card under set_float32_matmul_precision: what the flags are at each product, forward and backward. The
    definition has no products, so that the two agree there too."""
    c = settings(router, 8, 3, decouple_v=True)
    e, _, p, out = problem(c, dtype=torch.float32)
    bend = lambda h, h_v=None: torch.tanh(h) if h_v is None else torch.tanh(h) * h_v       # no products of its own
    torch.set_float32_matmul_precision("medium")
    try:
        for plain in (False, True):
            with Products() as products:
                (build(c, p, torch.float32, plain_read=plain)(e.requires_grad_(), [bend] * 16) * out).sum().backward()
            if plain:
                assert not products.seen
            else:
                assert {"bmm", "mm"} <= products.seen.keys()
                assert all(precisions == {("ieee", "ieee")} for precisions in products.seen.values()), products.seen
        assert torch.get_float32_matmul_precision() == "medium"                     # left as it was
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")

def test_the_worked_example():
    results = doctest.DocTestRunner().run(doctest.DocTestFinder(recurse=False).find(
        model.depth_read, "depth_read", globs={"torch": torch, "depth_read": model.depth_read})[0])
    assert results.attempted == 3 and results.failed == 0

@pytest.mark.parametrize("router", MIXING)
def test_strided_sources(router):
    """e as a transposed view, and updates that are one number expanded."""
    c = settings(router, 3, 2)
    e, _, p, _ = problem(c)
    view = e.transpose(0, 1).contiguous().transpose(0, 1)
    assert not view.is_contiguous()
    updates = [lambda *h, l=l: torch.tensor(0.1 * l + 0.1, dtype=torch.float64).expand(e.shape) for l in range(6)]
    want = reference.ROUTERS[router](p, c, e, updates)
    assert error(build(c, p)(view, updates).detach(), want) <= TOLERANCE

@pytest.mark.parametrize("router", MIXING)
def test_sublayers_that_do_not_look_at_their_input(router, monkeypatch):
    """A read that nothing depends on still hands on the gradients of what its sources are used for later."""
    monkeypatch.setattr(toys, "toy_sublayers", lambda w: [lambda *h, u=u: u[0].reshape(2, 3, D) for u in w])
    c = settings(router, 5, 3, decouple_v=True)
    case = problem(c)
    agree(by_model(c, *case), by_reference(c, *case))

@pytest.mark.parametrize("decoding", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("router", MIXING)
def test_without_gradients(router, decoding):
    """Evaluation goes by the fast read, decoding by the definition."""
    c = settings(router, 5, 3, decouple_v=True, null_source=True)
    e, w, p, _ = problem(c)
    want = reference.ROUTERS[router](p, c, e, toy_sublayers(w))
    model = build(c, p)
    with torch.inference_mode() if decoding else torch.no_grad():
        assert isinstance(model.reader(), fast.Reader) == (not decoding)
        assert error(model(e, toy_sublayers(w)).clone(), want) <= TOLERANCE

@pytest.mark.parametrize("B, T", [(1, 1), (3, 1), (1, 5)])
def test_shapes(B, T):
    for router in MIXING:
        c = settings(router, 3, 2)
        case = problem(c, B=B, T=T)
        agree(by_model(c, *case), by_reference(c, *case))

@pytest.mark.parametrize("router", MIXING)
def test_backward_twice(router):
    """What a read keeps for its backward pass is not used up or written over by it."""
    c = settings(router, 3, 2)
    e, w, p, out = problem(c)
    model = build(c, p)
    e.requires_grad_()
    h = (model(e, toy_sublayers(w)) * out).sum()
    inputs = [e, model.query]
    first = torch.autograd.grad(h, inputs, retain_graph=True)
    model(e * 2, toy_sublayers(w)).sum().backward()                 # another pass between the two
    second = torch.autograd.grad(h, inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, second))
