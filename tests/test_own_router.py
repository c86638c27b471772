"""Routers of one's own, written as somebody would who has read the README alone: with the fast read they are what they are by
the definition, with every flag, or a sentence says what to change."""
import pytest
import torch
import torch.nn as nn

from model import ROUTERS, GPT, Block, DepthRouter, GPTConfig, depth_read, wide
from lab.routing import Watch, measure, source_names
from toys import TOLERANCE, Recorder, agree, problem, settings, solve, toy_sublayers

class Loop(DepthRouter):
    """The obvious one: a loop over all reads that appends to its list."""
    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for l, f in enumerate(sublayers):
            sources.append(f(*read(l, sources)))
        return read(self.head, sources)[0]

class Window(DepthRouter):
    """The last four updates alone."""
    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for l, f in enumerate(sublayers):
            sources = sources + [f(*read(l, sources[-4:]))]
        return read(self.head, sources[-4:])[0]

class WindowAdded(DepthRouter):
    """A stream, and a mix of the last four updates; keywords, and a tuple for a list."""
    adds = True

    def forward(self, e, sublayers):
        read, updates, stream = self.reader(), (e,), e
        for l, f in enumerate(sublayers):
            u = f(*[stream + mix for mix in read(l=l, sources=updates[-4:])])
            stream, updates = stream + u, (*updates, u)
        return stream

class BlocksWithoutRuns(DepthRouter):
    """Block AttnRes by somebody who has not heard of runs: PC is replaced in the middle of a pass."""
    def forward(self, e, sublayers):
        read, sources, pc = self.reader(), self.first_sources(e), torch.zeros_like(e)
        for l, f in enumerate(sublayers):
            if l % 5 == 0:
                sources, pc = sources + [pc], torch.zeros_like(e)
            pc = pc + f(*read(l, [*sources, pc]))
        return read(self.head, [*sources, pc])[0]

class Recency(DepthRouter):
    """A learned slope on the age of a source: the bias of an old source is another at every read."""
    def __init__(self, config):
        super().__init__(config)
        self.slope = nn.Parameter(torch.full((2 * config.n_layer + 1,), 0.3))

    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for l, f in enumerate([*sublayers, None]):
            age = torch.arange(len(sources), 0, -1, dtype=e.dtype)
            h = read(l, sources, bias=-torch.outer(self.slope, age))
            if f is None:
                return h[0]
            sources = sources + [f(*h)]

class Quieter(DepthRouter):
    """Scales that change from read to read, and a source that comes twice."""
    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for l, f in enumerate(sublayers):
            scale = [None, *(torch.full_like(e[..., 0], 1 / (3 + l - i)) for i in range(len(sources)))]
            sources = sources + [f(*read(l, [e, *sources], scale=scale))]
        return read(self.head, sources)[0]

class ByTheMethod(DepthRouter):
    """Reads by the definition, without a reader."""
    def forward(self, e, sublayers):
        sources = self.first_sources(e)
        for l, f in enumerate(sublayers):
            sources = sources + [f(*self.read(l, sources))]
        return self.read(self.head, sources)[0]

class Backwards(DepthRouter):
    """Reads out of order, some twice."""
    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for l, f in enumerate(sublayers):
            read(self.head, sources)
            sources = sources + [f(*(a + b for a, b in zip(read(l, sources), read(l, sources))))]
        return read(self.head, sources)[0] + read(1, sources)[0]

OWN = [Loop, Window, WindowAdded, BlocksWithoutRuns, Recency, Quieter, ByTheMethod, Backwards]

@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for cls in (*OWN, InPlace, Drawing):
        monkeypatch.setitem(ROUTERS, cls.__name__, cls)

def solved(cls, L, plain, **flags):
    c = GPTConfig(vocab_size=11, n_layer=L, n_head=1, n_embd=6, router=cls.__name__, plain_read=plain, **flags)
    e, w, _, out = problem(settings("residual", L))
    router, g = cls(c).double(), torch.Generator().manual_seed(3)
    own = dict(router.named_parameters())
    with torch.no_grad():
        for p in own.values():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
    return solve(router, e, w, own, out)

@pytest.mark.parametrize("L", [1, 5, 12, 16])
@pytest.mark.parametrize("flags", [{}, {"decouple_v": True}, {"null_source": True},
                                   {"decouple_v": True, "rd_control": "average", "null_source": True}], ids=str)
@pytest.mark.parametrize("cls", OWN)
def test_the_fast_read_is_the_definition(cls, flags, L):
    agree(solved(cls, L, plain=False, **flags), solved(cls, L, plain=True, **flags))

def test_a_window_sees_what_it_is_given():
    c = GPTConfig(vocab_size=11, n_layer=8, n_head=1, n_embd=6, router="Window")
    router, (e, w, _, _) = Window(c).double(), problem(settings("residual", 8))
    toys = Recorder(toy_sublayers(w))
    router(e, toys.sublayers)                                                   # queries are 0: plain means
    for l in range(4, 16):
        torch.testing.assert_close(toys.inputs[l][0], sum(toys.updates[l - 4:l]) / 4, rtol=0, atol=TOLERANCE)

class InPlace(DepthRouter):
    """A sum that is written to after it was read."""
    def forward(self, e, sublayers):
        read, sources, c = self.reader(), self.first_sources(e), torch.zeros_like(e)
        for l, f in enumerate(sublayers):
            c += f(*read(l, sources + [c]))
        return read(self.head, sources + [c])[0]

def test_a_source_changed_in_place_is_a_sentence():
    with pytest.raises(ValueError, match=r"changed in place .* Write c = c \+ u"):
        solved(InPlace, 5, plain=False)

class Drawing(Block):
    """With first values of its own, drawn at random."""
    def __init__(self, config):
        super().__init__(config)
        self.map = nn.Linear(config.n_embd, config.n_embd)
        nn.init.normal_(self.query)

def test_a_router_that_draws_leaves_the_other_weights_as_they_are():
    def weights(router):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=11, n_layer=2, n_head=1, n_embd=8, router=router, tie_embeddings=False))
        return {k: p for k, p in model.named_parameters() if not k.startswith("router.")}, torch.get_rng_state(), model
    (plain, state, _), (own, own_state, model) = weights("residual"), weights("Drawing")
    assert plain.keys() == own.keys() and all(torch.equal(plain[k], own[k]) for k in plain)
    assert torch.equal(state, own_state) and model.router.query.abs().sum() > 0

@pytest.mark.parametrize("cls", [c for c in OWN if c is not Backwards])
@pytest.mark.parametrize("flags", [{}, {"decouple_v": True, "null_source": True}], ids=str)
def test_routing_watches_it(cls, flags):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, seq_len=6, n_layer=8, n_head=1, n_embd=8, router=cls.__name__, **flags)).eval()
    batch = torch.randint(11, (3, 7))
    result = measure(model, [batch])
    assert [r["read"] for r in result["reads"]] == list(range(16 + (not cls.adds)))
    last = result["reads"][-1]
    n = len(last["sources"])
    assert last["sources"] == [f"s{i}" for i in range(n)]                       # nobody has named them
    if cls is Recency:                                                          # queries are 0: the bias alone weighs
        want = torch.softmax(-0.3 * torch.arange(n, 0, -1), 0)
        assert last["weights"] == pytest.approx(want.tolist(), abs=1e-6)
    else:
        assert last["weights"] == pytest.approx([1 / n] * n, abs=1e-6)
    assert result["loss"] == pytest.approx(model(batch[:, :-1], batch[:, 1:])[1].item(), abs=1e-6)

def test_names_belong_to_the_forward_that_has_the_sources():
    class Same(Block):
        """Block's forward, so Block's names."""
    class Other(Block):
        """Its own forward with as many sources: Block's names would be made up."""
        def forward(self, e, sublayers):
            return super().forward(e, sublayers)
    class Named(Other):
        def source_names(self, l):
            return ["mine", "yours"]
    c = GPTConfig(n_layer=4, n_blocks=2)
    assert source_names(Same(c), 1, 2) == source_names(Block(c), 1, 2) == ["e", "PC"]
    assert source_names(Other(c), 1, 2) == ["s0", "s1"] and source_names(Named(c), 1, 2) == ["mine", "yours"]
    assert source_names(Named(c), 4, 3) == ["s0", "s1", "s2"]                   # not as many as there are

@pytest.mark.parametrize("L, n", [(8, 1), (24, 3), (48, 1)])
def test_blocks_longer_than_a_pass(L, n):
    """More than 12 sublayers in a block: a later pass of the block must not take PC for an old source."""
    for router in ("block", "rd", "delta_block", "wav"):
        c = settings(router, L, n)
        from toys import by_model
        agree(by_model(c, *problem(c)), by_model(c, *problem(c), plain_read=True))
