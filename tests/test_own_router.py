"""Routers of one's own, written as somebody would who has read the README alone: with the fast read they are what they are by
the definition, with every flag, or a sentence says what to change."""
import hashlib
import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn as nn

import sample
import train
from lab import bench, routing, sweep
from lab.routing import measure, source_names
from model import ROUTERS, GPT, Block, DepthRouter, GPTConfig
from nanodepth.files import UserError
from tiny import SIZE, checkpoint, data_folder, go
from toys import TOLERANCE, Recorder, agree, by_model, problem, settings, solve, toy_sublayers

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

class Scaled(DepthRouter):
    """Scales that are learned: of an update by itself, a number, and one for all tokens."""
    def __init__(self, config):
        super().__init__(config)
        self.v, self.first = nn.Parameter(torch.zeros(config.n_embd)), nn.Parameter(torch.ones(()))

    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        scale = [0.5] * (len(sources) - 1) + [self.first]
        for l, f in enumerate(sublayers):
            u = f(*read(l, sources, scale=scale))
            sources, scale = sources + [u], scale + [torch.sigmoid(u @ self.v)]
        return read(self.head, sources, scale=scale)[0]

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

OWN = [Loop, Window, WindowAdded, BlocksWithoutRuns, Recency, Quieter, Scaled, ByTheMethod, Backwards]

@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for cls in (*OWN, InPlace, Drawing):
        monkeypatch.setitem(ROUTERS, cls.__name__, cls)
    yield
    for name in [name for name in ROUTERS if ".py:" in name]:
        del ROUTERS[name]

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
    with pytest.raises(ValueError, match=r"changed in place .* write c = c \+ u"):
        solved(InPlace, 5, plain=False)

def test_a_scale_changed_in_place_is_a_sentence_too():
    c = GPTConfig(vocab_size=11, n_layer=5, n_head=1, n_embd=6, router="Loop")
    read, e = Loop(c).double().reader(), problem(settings("residual", 5))[0]
    scale = [torch.ones_like(e[..., 0])]
    read(0, [e], scale=scale)
    scale[0].mul_(2)
    with pytest.raises(ValueError, match="changed in place"):
        read(1, [e], scale=scale)

def test_a_pass_without_a_graph_serves_no_read_with_one():
    """A first read under no_grad (a frozen part of a stack), the later ones with gradients."""
    c = GPTConfig(vocab_size=11, n_layer=5, n_head=1, n_embd=6, router="Loop")
    router, (e, w, _, _) = Loop(c).double(), problem(settings("residual", 5))
    sources, gradients = [e.requires_grad_(), w[0, 0].sum(0) + 2 * e], []
    for read in (router.reader(), router.read):
        with torch.no_grad():
            read(0, sources)
        gradients.append(torch.autograd.grad(read(1, sources)[0].square().sum(), (e, router.query), retain_graph=True))
    for got, want in zip(*gradients):
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)

def test_inference_tensors_outside_of_inference_mode():
    c = GPTConfig(vocab_size=11, n_layer=5, n_head=1, n_embd=6, router="Loop")
    router = Loop(c).double()
    with torch.inference_mode():
        e = torch.ones(1, 2, 6, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(router.reader()(1, [e, 3 * e])[0], router.read(1, [e, 3 * e])[0])

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
    loss, rows = measure(model, [batch])
    reads = [row for row in rows if row["n"]]
    assert [r["read"] for r in reads] == list(range(16 + (not cls.adds)))
    last = reads[-1]
    n = len(last["sources"])
    assert last["sources"] == [f"s{i}" for i in range(n)]                       # nobody has named them
    if cls is Recency:                                                          # queries are 0: the bias alone weighs
        want = torch.softmax(-0.3 * torch.arange(n, 0, -1), 0)
        assert last["weights"] == pytest.approx(want.tolist(), abs=1e-6)
    else:
        assert last["weights"] == pytest.approx([1 / n] * n, abs=1e-6)
    assert loss == pytest.approx(model(batch[:, :-1], batch[:, 1:])[1].item(), abs=1e-6)

def test_names_are_of_model_py_s_own_routers_alone():
    class Other(Block):
        """A class of one's own with as many sources: Block's names would be made up."""
    class Named(Other):
        def source_names(self, l):
            return ["mine", "yours"]
    c = GPTConfig(n_layer=4, n_blocks=2)
    assert source_names(Block(c), 1, 2) == ["e", "PC"]
    assert source_names(Other(c), 1, 2) == ["s0", "s1"] and source_names(Named(c), 1, 2) == ["mine", "yours"]
    with pytest.raises(UserError, match=r"source_names\(4\) of the router gives 2 names; its read 4 has 3"):
        source_names(Named(c), 4, 3)

@pytest.mark.parametrize("L, n", [(8, 1), (24, 3), (48, 1)])
def test_blocks_longer_than_a_pass(L, n):
    """More than 12 sublayers in a block: a later pass of the block must not take PC for an old source."""
    for router in ("block", "rd", "delta_block", "wav"):
        c = settings(router, L, n)
        agree(by_model(c, *problem(c)), by_model(c, *problem(c), plain_read=True))

# ---------------------------------------------------------------------------------------------------------------------
# from a file

MINE = '''
from model import DepthRouter

class Mine(DepthRouter):
    """The stream, and a mix of the last two updates."""
    adds = True

    def forward(self, e, sublayers):
        read, sources, stream = self.reader(), self.first_sources(e), e
        for l, f in enumerate(sublayers):
            u = f(*[stream + mix for mix in read(l, sources[-2:])])
            stream, sources = stream + u, sources + [u]
        return stream

class Helper:
    pass
'''

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return f"{tmp_path / 'mine.py'}:Mine"

def digest(name):
    return hashlib.sha256(Path(name.rpartition(":")[0]).read_bytes()).hexdigest()

def refused(words, function, *argv):
    with pytest.raises(UserError) as e:
        function([*map(str, argv)])
    assert words in str(e.value) and len(str(e.value).splitlines()) <= 2, str(e.value)

def test_a_router_from_a_file_everywhere(mine, data, tmp_path, capsys):
    run = tmp_path / "run"
    go("--dataset", data, "--router", mine, "--out_dir", run, "--max_iters", 2, "--decouple_v", "--null_source")
    out = capsys.readouterr().out
    assert f"python sample.py --out_dir {run} --router {mine}" in out
    settings = json.loads((run / "config.json").read_text())["settings"]
    assert settings["router"] == mine and settings["router_sha256"] == digest(mine)
    assert set(checkpoint(run)["model"]) >= {"router.query", "router.query_v"}

    go("--dataset", data, "--router", mine, "--init_from", "resume", "--out_dir", run, "--max_iters", 3)
    sample.main(["--out_dir", str(run), "--router", mine, "--num_samples", "1", "--max_new_tokens", "5", "--device", "cpu"])
    routing.main([str(run), "--router", mine, "--csv", str(tmp_path / "r.csv"), "--windows", "4", "--device", "cpu"])
    reads = pd.read_csv(tmp_path / "r.csv")
    assert reads.n.tolist() == [2, 2, 2, 2, 0] and reads.sources[0] == '["s0", "s1"]'
    assert reads.v_weights.notna().tolist() == [True, False, True, False, False]
    bench.main(["--routers", mine, "--n_layer", "2", "--n_embd", "16", "--n_head", "2", "--seq_len", "8", "--batch_size", "2",
                "--device", "cpu", "--rounds", "1"])
    assert f"| {mine} |" in capsys.readouterr().out

@pytest.mark.slow                       # processes
def test_a_sweep_with_a_router_from_a_file(mine, data, tmp_path, capsys):
    flags = ["--routers", f"block,{mine},{mine}:null_source=true", "--depths", "2", "--seeds", "0", "--dataset", data,
             "--max_iters", "2", "--out_dir", tmp_path / "sweep", *SIZE[2:]]
    sweep.main([*map(str, flags)])
    assert {p.name for p in (tmp_path / "sweep").glob("*-2x16-s0")} == {
        "block-2x16-s0", "Mine-2x16-s0", "Mine+null_source=true-2x16-s0"}
    out = capsys.readouterr().out
    assert "| Mine | 2 |" in out and "| Mine:null_source=true | 2 |" in out
    sweep.main([*map(str, flags), "--baseline", mine])                          # all are there: only the tables
    assert "| block | Mine | 2 | 128 | 1 |" in capsys.readouterr().out
    path = Path(mine.rpartition(":")[0])
    path.write_text(MINE.replace("[-2:]", "[-3:]"), encoding="utf-8")
    refused("code of the router", sweep.main, *flags)            # an edited router is another cell
    other = tmp_path / "other.py"
    other.write_text(MINE, encoding="utf-8")
    refused("have one name in the tables", sweep.main, "--routers", f"{mine},{other}:Mine", *flags[2:])

def test_code_runs_only_where_the_command_names_it(mine, data, tmp_path):
    run, toml = tmp_path / "run", tmp_path / "x.toml"
    go("--dataset", data, "--router", mine, "--out_dir", run, "--max_iters", 1)
    path = Path(mine.rpartition(":")[0])
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + MINE, encoding="utf-8")
    toml.write_text(f"router = '{mine}'\ndataset = '{data}'\n", encoding="utf-8")
    add = f"It runs only where the command names it: add --router {mine}."
    refused(add, train.main, toml)
    refused(add, train.main, "--init_from", "resume", "--out_dir", run)
    refused(add, train.main, "--init_from", run, "--dataset", data, "--out_dir", tmp_path / "b")
    refused(add, sample.main, "--out_dir", run)
    refused(add, routing.main, run)
    toml.write_text(f"routers = 'block,{mine}'\n", encoding="utf-8")
    refused("add --routers", sweep.main, toml)
    assert not (tmp_path / "ran").exists()
    refused("has changed since the run", train.main, "--init_from", "resume", "--out_dir", run, "--router", mine)

@pytest.mark.parametrize("text, name, words", [
    (None, "Mine", "there is no file"), (MINE, "Mihne", "has no router Mihne, which is a torch.nn.Module with "
     "forward(self, e, sublayers). It has: Mine."), (MINE, "Helper", "has no router Helper"), ("x = 1\n1 / 0\n", "Mine", "line 2: ZeroDivisionError"),
    ("class Mine(:\n", "Mine", "line 1: SyntaxError")], ids=["no file", "no class", "no router", "error", "syntax"])
def test_a_file_that_is_no_router_is_a_sentence(text, name, words, tmp_path, data):
    if text is not None:
        (tmp_path / "x.py").write_text(text, encoding="utf-8")
    refused(words, train.main, "--router", f"{tmp_path / 'x.py'}:{name}", "--dataset", data, "--out_dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()

def test_old_checkpoints_load(data, tmp_path):
    """As they were before norm_eps was a setting and routers came from files: none of either is in them."""
    go("--dataset", data, "--router", "wav", "--out_dir", tmp_path / "run", "--max_iters", 2)
    old = checkpoint(tmp_path / "run")
    del old["model_config"]["norm_eps"], old["settings"]["norm_eps"], old["settings"]["router_sha256"]
    torch.save(old, tmp_path / "run" / "ckpt.pt")
    sample.main(["--out_dir", str(tmp_path / "run"), "--num_samples", "1", "--max_new_tokens", "5", "--device", "cpu"])
    routing.main([str(tmp_path / "run"), "--windows", "4", "--device", "cpu"])
    go("--dataset", data, "--init_from", tmp_path / "run", "--out_dir", tmp_path / "next", "--max_iters", 1)
    go("--init_from", "resume", "--out_dir", tmp_path / "run", "--max_iters", 3, "--norm_eps", 1e-6)
    refused("--norm_eps 0.001: the run in", train.main, "--init_from", "resume", "--out_dir", tmp_path / "run", "--norm_eps", 1e-3)
