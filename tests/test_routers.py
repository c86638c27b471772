"""
Identities 1 to 6 of the design page, on toy sublayers (7 and 8 need a whole model: test_model.py).

The first part holds model.py's routers to tests/reference.py. The second holds either of them to rules that need no
reference, so the reference is tested as well.
"""
from itertools import product

import pytest
import torch

import reference
from toys import (ADDITIVE, D, MIXING, Recorder, TOLERANCE, agree, build, by_model, by_reference, error, identical,
                  label, problem, settings, solve, toy_sublayers)

ALL = ("residual", "rezero", "layerscale") + MIXING
BLOCKS = ("block", "rd", "wav", "delta_block")             # the routers that n_blocks matters to
CONTROLS = ("none", "tied", "average", "frozen_v")
INF = float("inf")

# ---------------------------------------------------------------------------------------------------------------------
# identity 6: every router, every depth, every number of blocks, every flag

def reads(router):
    """Every way in which a mixing router can read."""
    routes = [dict(decouple_v=True, rd_control=k) for k in CONTROLS]
    routes = [{}] + routes if router != "rd" else [dict(rd_control=k) for k in CONTROLS]
    more = [{}]
    if router in ADDITIVE:
        more = [dict(route_gate=gate) for gate in (None, 1.0, 0.0)]
    if router == "wav":
        more = [dict(details=details, head_details=head, rho=rho) for (details, rho), head in product(
            [("phase,split", 1.0), ("split,phase", 0.7), ("phase", 2.0), ("split", 1.0), ("none", 1.0)], [False, True])]
    return [dict(**r, **m, null_source=null) for r, m, null in product(routes, more, [False, True])]

def every_depth():
    for router in ALL:
        for L in (1, 2, 5, 12):
            for n in range(1, L + 1) if router in BLOCKS else [1]:
                yield settings(router, L, n)

def every_flag():
    for router in MIXING:
        for i, flags in enumerate(reads(router)):
            yield settings(router, 3, 2, **flags)           # 3 layers in 2 blocks: 2 and 1

def several_flags():
    """A few flags at once at other depths: a different set for each."""
    for router in MIXING:
        flags = reads(router)
        shapes = [(1, 1), (2, 1), (2, 2), (5, 2), (5, 3), (5, 5), (12, 5)]
        for i, (L, n) in enumerate(shapes):
            yield settings(router, L, n, **flags[(7 * i + 5) % len(flags)])

CASES = list(every_depth()) + list(every_flag()) + list(several_flags())

@pytest.mark.parametrize("c", CASES, ids=label)
def test_equals_the_reference(c):
    case = problem(c, seed=1)
    want = by_reference(c, *case)
    agree(by_model(c, *case), want)
    if c.router in MIXING:
        agree(by_model(c, *case, plain_read=True), want)

@pytest.mark.parametrize("bias", [-2.0, 0.0, 1.5, -INF])
@pytest.mark.parametrize("read", [dict(), dict(decouple_v=True), dict(head_details=True)], ids=str)
def test_first_detail_bias(bias, read):
    c = settings("wav", 3, 2, **read)
    e, w, p, out = problem(c)
    p["detail_bias"].fill_(bias)
    router = build(c, detail_bias=bias)
    assert torch.equal(router.detail_bias, p["detail_bias"])
    agree(by_model(c, e, w, p, out), by_reference(c, e, w, p, out))

@pytest.mark.parametrize("router", MIXING)
@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
def test_sharp_reads(router, plain):
    """Logits of several hundred: no exponential may overflow, no weight may become nan."""
    c = settings(router, 3, 2, null_source=True)
    e, w, p, out = problem(c)
    p["query"] *= 300
    # a logit of 600 carries an error of 1e-13, which is then a relative error of the weight
    agree(by_model(c, e, w, p, out, plain_read=plain), by_reference(c, e, w, p, out), tolerance=1e-7)

@pytest.mark.parametrize("router", ALL)
def test_zero_sources(router):
    """e = 0 and updates of 0: rms has its 1e-6, so nothing is divided by 0."""
    c = settings(router, 2, 2)
    e, w, p, out = problem(c)
    w[1:] = 0
    e[0] = 0
    want, got = by_reference(c, e, w, p, out), by_model(c, e, w, p, out)
    assert all(x.isfinite().all() for x in [got[0], *got[1].values()])
    agree(got, want)

@pytest.mark.parametrize("router", ALL)
def test_sublayers_may_return_their_input(router):
    """An update may be the very tensor that the router passed, or the same one each time."""
    c = settings(router, 3, 2)
    e, _, p, out = problem(c)
    for f in (lambda h, h_v=None: h, lambda h, h_v=None: e):
        want = reference.ROUTERS[router](p, c, e, [f] * 6)
        before = e.clone()
        assert error(build(c, p)(e, [f] * 6).detach(), want) <= TOLERANCE
        assert torch.equal(e, before)

@pytest.mark.parametrize("router", ALL)
def test_inputs_and_updates_stay_as_they_were(router):
    """What a sublayer got or gave may be kept by it (a cache, a hook): the router does not write into it later."""
    c = settings(router, 3, 2)
    e, w, p, out = problem(c)
    copies = []
    def noting(f):
        def g(*h):
            u = f(*h)
            copies.extend((x, x.clone()) for x in (*h, u))
            return u
        return g
    with torch.no_grad():
        build(c, p)(e, [noting(f) for f in toy_sublayers(w)])
    assert all(torch.equal(x, y) for x, y in copies)

@pytest.mark.parametrize("router", ALL)
def test_without_gradients(router):
    c = settings(router, 3, 2)
    e, w, p, out = problem(c)
    model = build(c, p)
    want = by_reference(c, e, w, p, out)[0]
    with torch.no_grad():
        assert error(model(e, toy_sublayers(w)), want) <= TOLERANCE
    with torch.inference_mode():
        assert error(model(e, toy_sublayers(w)).clone(), want) <= TOLERANCE

@pytest.mark.parametrize("router", MIXING)
def test_one_trained_thing_at_a_time(router):
    """Frozen parameters (or a frozen trunk) leave the gradients of the others as they are."""
    c = settings(router, 2, 2, null_source=True)
    e, w, p, out = problem(c)
    want = by_reference(c, e, w, p, out)[1]
    model = build(c, p)
    own = {k: x for k, x in model.named_parameters() if x.numel()}
    for name in ["e", "w", *own]:
        leaves = {"e": e.clone(), "w": w.clone(), **own}
        for k, x in leaves.items():
            x.requires_grad_(k == name)
            x.grad = None
        (model(leaves["e"], toy_sublayers(leaves["w"])) * out).sum().backward()
        assert error(leaves[name].grad, want[name]) <= TOLERANCE, name
        assert all(x.grad is None for k, x in leaves.items() if k != name)

# ---------------------------------------------------------------------------------------------------------------------
# the other identities, of model.py and of the reference

@pytest.fixture(params=["model", "reference"])
def by(request):
    return by_model if request.param == "model" else by_reference

@pytest.mark.parametrize("L, n", [(1, 1), (2, 1), (5, 3), (12, 8)])
def test_1_rd_tied_is_block(by, L, n):
    block, tied = settings("block", L, n), settings("rd", L, n, rd_control="tied")
    case = problem(block)
    identical(by(tied, *case), by(block, *case))

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_1_tied_is_shared_for_every_router(dtype):
    for router in MIXING:
        shared = settings(router, 5, 3)
        case = problem(shared, dtype=dtype)
        tied = settings(router, 5, 3, decouple_v=router != "rd", rd_control="tied")
        if router == "rd":
            shared = settings("block", 5, 3)
        identical(by_model(tied, *case), by_model(shared, *case))

@pytest.mark.parametrize("L, n", [(1, 1), (2, 2), (5, 3)])
def test_1_two_equal_queries_share_the_gradient(by, L, n):
    block, rd = settings("block", L, n), settings("rd", L, n)
    e, w, p, out = problem(block)
    want = by(block, e, w, p, out)
    h, got = by(rd, e, w, {**p, "query_v": p["query"][0:2 * L:2].clone()}, out)
    together = got.pop("query")
    together[0:2 * L:2] += got.pop("query_v")
    agree((h, {**got, "query": together}), want)

def test_1_controls():
    """`tied` has no second query; `frozen_v` has one that is zero and not trained."""
    assert build(settings("rd", rd_control="tied")).query_v is None
    frozen = build(settings("rd", rd_control="frozen_v"))
    assert torch.equal(frozen.query_v, torch.zeros(2, D, dtype=torch.float64))
    assert "query_v" in dict(frozen.named_buffers()) and "query_v" not in dict(frozen.named_parameters())

def test_rd_is_block_decoupled(by):
    for control in CONTROLS:
        rd = settings("rd", 5, 3, rd_control=control)
        block = settings("block", 5, 3, decouple_v=True, rd_control=control)
        case = problem(rd)
        identical(by(rd, *case), by(block, *case))

@pytest.mark.parametrize("L, n", [(1, 1), (2, 1), (5, 3), (12, 8)])
@pytest.mark.parametrize("head", [False, True], ids=["", "head_details"])
def test_2_wav_without_details_is_block(by, L, n, head):
    block, wav, none = [settings(router, L, n, details=details, head_details=head)
                        for router, details in [("block", "phase,split"), ("wav", "phase,split"), ("wav", "none")]]
    e, w, p, out = problem(wav)
    shut = {"query": p["query"], "detail_bias": torch.full_like(p["detail_bias"], -INF)}
    want = by(block, e, w, {"query": p["query"]}, out)
    agree(by(none, e, w, {"query": p["query"]}, out), want)
    h, gradients = by(wav, e, w, shut, out)
    assert not gradients.pop("detail_bias").any()
    agree((h, gradients), want)

@pytest.mark.parametrize("L", [1, 2, 5, 12])
def test_3_attnres_is_a_block_for_every_sublayer(by, L):
    c = settings("attnres", L)
    e, w, p, out = problem(c)
    leaves = {"query": p["query"].clone().requires_grad_()}
    rule = lambda e, f: reference.block(leaves, c, e, f, lengths=[1] * (2 * L))
    agree(by(c, e, w, p, out), solve(rule, e, w, leaves, out))

def run(by, c, p, e, sublayers):
    if by is by_reference:
        return reference.ROUTERS[c.router](p, c, e, sublayers)
    return build(c, p)(e, sublayers).detach()

@pytest.mark.parametrize("router", ADDITIVE)
@pytest.mark.parametrize("L, n", [(1, 1), (5, 3), (12, 5)])
@pytest.mark.parametrize("flags", [{}, dict(decouple_v=True), dict(null_source=True)], ids=str)
def test_4_delta_keeps_the_stream(by, router, L, n, flags):
    c = settings(router, L, n, **flags)
    e, w, p, out = problem(c)
    toys = Recorder(toy_sublayers(w))
    h = run(by, c, p, e, toys.sublayers)
    assert error(h, sum(toys.updates, start=e)) <= TOLERANCE
    # h_0 = e, and what a sublayer gets beyond the stream is a mean of e and of deltas: no longer than the longest
    assert all(torch.equal(x, e) for x in toys.inputs[0])
    sizes = [e.norm(dim=-1)]
    stream = e
    for l in range(1, 2 * c.n_layer):
        stream = stream + toys.updates[l - 1]
        if c.router == "delta":
            sizes.append(toys.updates[l - 1].norm(dim=-1))
            for x in toys.inputs[l]:
                assert ((x - stream).norm(dim=-1) <= torch.stack(sizes).amax(0) + 1e-9).all()

@pytest.mark.parametrize("L, n", [(1, 1), (5, 3), (12, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_4_a_gate_of_zero_is_the_residual(by, L, n, dtype):
    residual = settings("residual", L, n)
    e, w, _, out = problem(residual, dtype=dtype)
    want = by(residual, e, w, {}, out)
    for router in ADDITIVE:
        for flags in [{}, dict(decouple_v=True), dict(null_source=True)]:
            c = settings(router, L, n, route_gate=0.0, **flags)
            p = problem(c, dtype=dtype)[2]
            p["gate"].zero_()
            got = by(c, e, w, p, out)
            assert torch.equal(got[0], want[0])
            # 0 * x has a gradient of 0 for x, so here too only the gates learn
            assert error(got[1]["e"], want[1]["e"]) <= (TOLERANCE if dtype is torch.float64 else 1e-5)
            assert not got[1]["query"].any()
            assert L == 1 or got[1]["gate"][1:].all()

def test_4_first_gates():
    for router, value in product(ADDITIVE, (0.0, 1.0, 0.3)):
        assert torch.equal(build(settings(router, 3, route_gate=value)).gate, torch.full((6,), value).double())
        assert getattr(build(settings(router, 3)), "gate", None) is None

@pytest.mark.parametrize("L", [1, 5, 12])
def test_5_rezero_starts_with_e(L):
    c = settings("rezero", L)
    e, w, p, out = problem(c)
    assert torch.equal(build(c)(e, toy_sublayers(w)), e)

@pytest.mark.parametrize("L, first", [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (48, 1e-6)])
def test_5_layerscale_starts_as_in_cait(L, first):
    gain = build(settings("layerscale", L)).gain
    assert torch.equal(gain, torch.full((2 * L, D), first).double()) or (gain - first).abs().max() < 1e-8
    given = build(settings("layerscale", L, layerscale_init=0.25)).gain
    assert torch.equal(given, torch.full((2 * L, D), 0.25).double())

@pytest.mark.parametrize("router", MIXING)
@pytest.mark.parametrize("null", [False, True], ids=["", "null_source"])
@pytest.mark.parametrize("decouple", [False, True], ids=["", "decouple_v"])
def test_5_a_first_read_is_a_plain_mean(router, null, decouple):
    """5 layers in 3 blocks: sublayers 0-3, 4-7 and 8-9. Each source's weight is written out here."""
    c = settings(router, 5, 3, null_source=null, decouple_v=decouple)
    e, w, _, out = problem(c)
    toys = Recorder(toy_sublayers(w))
    model = build(c)
    assert not any(x.any() for name, x in model.named_parameters() if name.startswith("query"))
    head = model(e, toys.sublayers)
    u = toys.updates
    for l in range(11):
        starts = [s for s in (0, 4, 8, 10) if s <= l]
        groups = [u[a:b] for a, b in zip(starts, starts[1:])] + ([u[starts[-1]:l]] if l > starts[-1] else [])
        if router in ("attnres", "delta"):
            sources = [e] + u[:l]
        elif router == "cumulative":
            sources = [e + sum(u[:j]) for j in range(l + 1)]
        elif router == "delta_block":
            sources = [e] + [sum(u[a:b]) for a, b in zip(starts, starts[1:])]
        else:
            sources = [e] + [sum(us) for us in groups]
        amounts = [1.0] * len(sources)
        if router == "wav" and l < 10:
            for b, us in enumerate(groups):
                m = (4, 4, 2)[b]
                phase = sum((1, -1)[i % 2] * x for i, x in enumerate(us))
                split = sum((1 if 2 * i < m else -1) * x for i, x in enumerate(us))
                for detail in (phase, split):
                    ratio = (sum(us).pow(2).mean(-1) + 1e-6).sqrt() / (detail.pow(2).mean(-1) + 1e-6).sqrt()
                    sources.append(detail * ratio.clamp(max=1.0)[..., None])
                    amounts.append(0.1353352832366127)                      # exp(-2)
        want = sum(a * s for a, s in zip(amounts, sources)) / (sum(amounts) + null)
        if router in ADDITIVE:
            want = e if l == 0 else want + e + sum(u[:l])
            if l == 10:
                want = e + sum(u)
        for h in [head] if l == 10 else toys.inputs[l]:
            assert error(h.detach(), want.detach()) <= TOLERANCE, l

@pytest.mark.parametrize("router", MIXING)
def test_calls(router):
    """Attention gets h and h_v when the read is decoupled and the two differ, everything else gets h alone."""
    for control, two in [(None, False), ("none", True), ("frozen_v", True), ("average", False)]:
        flags = {} if control is None else dict(decouple_v=True, rd_control=control)
        if control is None and router == "rd":
            continue
        c = settings(router, 2, 2, **flags)
        e, w, p, out = problem(c)
        toys = Recorder(toy_sublayers(w))
        build(c, p)(e, toys.sublayers)
        assert all(len(h) == 1 for h in toys.inputs[1::2])
        first, second = toys.inputs[0], toys.inputs[2]
        assert all(error(x, e) <= TOLERANCE for x in first)          # there is only e to read
        if two:
            assert len(second) == 2 and not torch.allclose(*second)
        else:
            assert all(torch.equal(x, second[0]) for x in second)

@pytest.mark.parametrize("router", ALL)
def test_9_no_output_sees_a_later_token(router):
    """On causal toys: the gradient of token t by a later token is exactly 0."""
    c = settings(router, 3, 2, **({} if router not in MIXING else dict(decouple_v=True)))
    e, w, p, out = problem(c, T=4)
    e.requires_grad_()
    h = build(c, p)(e, toy_sublayers(w))
    for t in range(4):
        gradient, = torch.autograd.grad(h[:, t].sum(), e, retain_graph=True)
        assert not gradient[:, t + 1:].any() and gradient[:, t].any()

@pytest.mark.parametrize("router", ALL)
def test_9_one_token_at_a_time(router):
    """Token by token, each sublayer keeping what it has seen: a router itself remembers nothing between calls."""
    c = settings(router, 3, 2)
    e, w, p, out = problem(c, T=4)
    model = build(c, p)
    def cached(f):
        past = []
        def g(*h):
            past.append(h)
            return f(*[torch.cat(x, 1) for x in zip(*past)])[:, -1:]
        return g
    with torch.no_grad():
        want = model(e, toy_sublayers(w))
        toys = [cached(f) for f in toy_sublayers(w)]
        got = torch.cat([model(e[:, t:t + 1], toys) for t in range(4)], 1)
    assert error(got, want) <= TOLERANCE

def test_detached_ratio():
    """The detail's factor is a constant to autograd: two updates of one token, by hand."""
    c = settings("wav", 1, 1, details="phase", rho=10.0, head_details=True)
    u = [torch.tensor([[[3.0, 1.0, 0.0, 0.0, 0.0, 1.0]]], dtype=torch.float64, requires_grad=True),
         torch.tensor([[[-1.0, 2.0, 0.5, 0.0, 1.0, 0.0]]], dtype=torch.float64, requires_grad=True)]
    e = torch.zeros(1, 1, D, dtype=torch.float64)
    p = {"query": torch.zeros(3, D), "detail_bias": torch.zeros(3, 1)}
    h = build(c, p)(e, [lambda *h: u[0], lambda *h: u[1]])
    rms = lambda s: (s.detach().pow(2).mean() + 1e-6).sqrt()
    factor = rms(u[0] + u[1]) / rms(u[0] - u[1])
    assert 0.5 < factor < 0.9 or 1.1 < factor < 2
    assert error(h.detach(), ((u[0] + u[1] + factor * (u[0] - u[1])) / 3).detach()) <= TOLERANCE
    h.sum().backward()
    assert error(u[0].grad, ((1 + factor) / 3).expand_as(e)) <= TOLERANCE
    assert error(u[1].grad, ((1 - factor) / 3).expand_as(e)) <= TOLERANCE
