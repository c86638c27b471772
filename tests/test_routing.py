"""routing.py: every source under its name, statistics by hand, masks that renormalise, means over seeds, errors."""
import json
import math
import re
import shutil
import sys

import pytest
import torch

import reference
from lab import report, routing
from nanodepth.files import UserError
from model import GPT, ROUTERS, WAV, Block, GPTConfig, depth_read
from lab import routing_report as shows
from lab.routing import Watch, entropy, js_divergence, made_of
from tiny import checkpoint, data_folder, go
from toys import Recorder, build, label, problem, settings, toy_sublayers

READING = list(reference.MIXING)                                        # ADDITIVE is a part of it
CASES = [settings(router, 4, 3) for router in READING]                  # blocks of 2, 1 and 1 layers
CASES += [settings("wav", 4, 2, details="split,phase", head_details=True), settings("wav", 3, 2, details="none"),
          settings("block", 3, 2, decouple_v=True, null_source=True),
          settings("delta", 3, null_source=True, route_gate=0.5), settings("rd", 3, rd_control="average"),
          settings("rd", 3, rd_control="tied"), settings("attnres", 8)]

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

def by_name(name, c, l, e, updates):
    """The source called `name`, for read l, from the embedding and the updates that there are by then."""
    sizes = [2 * (c.n_layer // c.n_blocks + (b < c.n_layer % c.n_blocks)) for b in range(c.n_blocks)]
    starts = [sum(sizes[:b]) for b in range(c.n_blocks + 1)]
    if name in ("e", "null"):
        return e if name == "e" else torch.zeros_like(e)
    if name[0] == "u":
        return updates[int(name[1:])]
    if name[0] == "h":
        return e + sum(updates[:int(name[1:])])
    which, _, detail = name.partition(".")
    b = next(b for b in range(c.n_blocks) if starts[b] <= l < starts[b + 1]) if which == "PC" else int(which[1:])
    part = range(starts[b], min(starts[b + 1], l))
    total = sum(updates[i] for i in part)
    if not detail:
        return total
    plus = (lambda i: i % 2 == 0) if detail == "phase" else (lambda i: i < starts[b] + sizes[b] // 2)
    return sum(updates[i] if plus(i) else -updates[i] for i in part)

@pytest.mark.parametrize("c", CASES, ids=label)
def test_every_source_has_its_name(c):
    e, w, p, _ = problem(c)
    router, recorder, seen = build(c, p, plain_read=True), Recorder(toy_sublayers(w)), []
    want = router(e, toy_sublayers(w))
    with torch.no_grad(), Watch(router, lambda *read: seen.append((*read, len(recorder.updates)))):
        got = router(e, recorder.sublayers)
    assert torch.equal(got, want) and not {"read", "reader"} & vars(router).keys()
    assert [l for l, *_ in seen] == list(range(2 * c.n_layer + (c.router not in reference.ADDITIVE)))
    for l, sources, alphas, done in seen:
        names = routing.source_names(router, l, len(sources))
        assert len(set(names)) == len(names) == len(sources) and done == l
        for name, source in zip(names, sources, strict=True):
            assert torch.allclose(source, by_name(name, c, l, e, recorder.updates), rtol=1e-12, atol=1e-12), (l, name)
        two = l % 2 == 0 and l < router.head and (c.router == "rd" or c.decouple_v) and c.rd_control != "tied"
        assert len(alphas) == 1 + two
        assert all(torch.allclose(a.sum(0), torch.ones_like(a[0])) for a in alphas)

def test_what_sources_are_made_of():
    """Found by running: the formulas of --sources, and by them the names."""
    of = lambda router, **flags: made_of(GPTConfig(n_embd=6, n_head=1, router=router, **flags))
    wav = of("wav", n_layer=4, n_blocks=2)
    assert wav[5] == {"e": "e", "C0": "u0 + u1 + u2 + u3", "C0.phase": "u0 - u1 + u2 - u3",
                      "C0.split": "u0 + u1 - u2 - u3", "PC": "u4", "PC.phase": "u4", "PC.split": "u4"}
    assert list(wav) == list(range(9)) and wav[8] == {"e": "e", "C0": wav[5]["C0"], "C1": "u4 + u5 + u6 + u7"}
    assert of("cumulative", n_layer=4)[7]["h7"] == "e + u0 + .. + u6"
    assert of("block", n_layer=12, n_blocks=2)[24]["C1"] == "u12 + u13 + .. + u23"
    assert of("wav", n_layer=12, n_blocks=2)[12]["C0.split"] == "u0 + u1 + .. + u5 - u6 - u7 - .. - u11"
    assert of("delta", n_layer=2, null_source=True) == {
        0: {"null": "0", "e": "e"}, 1: {"null": "0", "e": "e", "u0": "u0"},
        2: {"null": "0", "e": "e", "u0": "u0", "u1": "u1"},
        3: {"null": "0", "e": "e", "u0": "u0", "u1": "u1", "u2": "u2"}, 4: {"h": "e + u0 + .. + u3"}}
    assert of("residual", n_layer=1) == {0: {"h": "e"}, 1: {"h": "e + u0"}, 2: {"h": "e + u0 + u1"}}
    assert set().union(*(read.values() for read in of("rezero", n_layer=2).values())) == {"e"}      # its gates are 0
    assert of("layerscale", n_layer=1, layerscale_init=0.1)[2] == {"h": "e + 0.1 u0 + 0.1 u1"}

def test_names_are_not_made_up(monkeypatch):
    class More(Block):
        """One more source, made by a method that Block's forward calls."""
        def first_sources(self, e):
            return [e.relu(), e]
    class Signs(WAV):
        def signs(self, l, block):
            return [1, 1, 1]
    monkeypatch.setitem(ROUTERS, "More", More)
    monkeypatch.setitem(ROUTERS, "Signs", Signs)
    of = lambda router: made_of(GPTConfig(n_embd=6, n_head=1, n_layer=2, n_blocks=1, router=router))
    more = of("More")[2]                                                # relu(e) is no sum, and looks like none
    assert more.pop("s0").count("0.") > 3 and more == {"s1": "e", "s2": "u0 + u1"}
    assert of("Signs")[2] == {"s0": "e", "s1": "u0 + u1", "s2": "u0 + u1", "s3": "u0 + u1"}

# ---------------------------------------------------------------------------------------------------------------------
# statistics

def test_divergence_and_entropy_of_known_distributions():
    d = lambda *p: torch.tensor(p, dtype=torch.float64)
    assert js_divergence(d(1, 0), d(0, 1)).item() == pytest.approx(math.log(2))
    half, m = math.log(2) / 2, -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert js_divergence(d(0.5, 0.5), d(1, 0)).item() == pytest.approx(m - half)        # 0.2158 nats
    assert js_divergence(d(0.3, 0.7), d(0.3, 0.7)).item() == 0
    assert entropy(d(0.25, 0.25, 0.25, 0.25)).item() == pytest.approx(math.log(4)) and entropy(d(1, 0)).item() == 0

def small(router, n_layer=3, **flags):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=11, seq_len=6, n_layer=n_layer, n_head=2, n_embd=8, router=router, plain_read=True,
                         **flags)).eval()

def model_of(router, n_layer=3, scale=0.0, **flags):
    """A small model that reads plainly; its queries are random numbers of this scale."""
    model = small(router, n_layer, **flags)
    with torch.no_grad():
        for q in (model.router.query, model.router.query_v):
            if q is not None and q.requires_grad:
                q.normal_(0, scale) if scale else q.zero_()
        for s in model.sublayers[1::2]:                                 # updates as large as the embedding
            s.down_proj.weight.mul_(20)
    return model

def measure(model, batches) -> list[dict]:
    """The reads of a model."""
    return [row for row in routing.measure(model, batches)[1] if row["n"]]

def inputs(model, batches) -> dict[int, dict]:
    """What reaches each sublayer, and the head."""
    return {row["read"]: {k: v for k, v in row.items() if k.endswith(("rms", "passed"))}
            for row in routing.measure(model, batches)[1]}

def tokens(n=5):
    return torch.randint(11, (n, 7), generator=torch.Generator().manual_seed(1))

@pytest.mark.parametrize("router", READING)
def test_untrained_weights_are_uniform(router):
    for read in measure(model_of(router, n_blocks=2), [tokens()]):
        n = len(read["sources"])
        plain = [x for x in read["sources"] if "." not in x]
        each = 1 / (len(plain) + math.exp(-2) * (n - len(plain)))       # wav: a detail weighs exp(-2) of a sum
        want = [each * (math.exp(-2) if "." in x else 1) for x in read["sources"]]
        assert read["weights"] == pytest.approx(want, abs=1e-6)
        assert read["sharpness"] == pytest.approx(each, abs=1e-6)
        assert read["share_e"] == pytest.approx(each, abs=1e-6)
        assert read.get("share_details", 0) == pytest.approx(each * math.exp(-2) * (n - len(plain)), abs=1e-6)
        if n == len(plain):
            assert read["entropy"] == pytest.approx(math.log(n), abs=1e-6)
            assert n == 1 or read["relative_entropy"] == pytest.approx(1)
        assert ("js_nats" in read) == (router == "rd" and read["read"] in (0, 2, 4)) and read.get("js_nats", 0) == 0

@pytest.mark.parametrize("flags", [{"rd_control": "tied"}, {"rd_control": "none"}, {"rd_control": "average"},
                                   {"rd_control": "frozen_v"}], ids=lambda f: f["rd_control"])
def test_divergence_of_decoupled_reads(flags):
    model, batch = model_of("rd", scale=2.0, **flags), tokens()
    measured, reads = routing.measure(model, [batch])
    seen = {}
    with torch.no_grad(), Watch(model.router, lambda l, sources, alphas: seen.update({l: (sources, alphas)})):
        loss = model(batch[:, :-1], batch[:, 1:])[1].item()
    assert measured == pytest.approx(loss)
    divergences = []
    for l in range(2, 6, 2):
        sources = torch.stack(seen[l][0]).double()                      # (n, B, T, D)
        routes = []
        for query in model.router.queries(l):
            logit = (sources * query.double()).sum(-1) / (sources.square().mean(-1) + 1e-6).sqrt()
            routes.append(logit.softmax(0))
        p, q = routes[0], routes[-1]
        m = (p + q) / 2
        js = ((p * (p / m).log()).sum(0) + (q * (q / m).log()).sum(0)) / 2
        divergences.append(js.mean().item())
        read = reads[l]
        assert read["js_nats"] == pytest.approx(divergences[-1], abs=1e-6)
        assert read["weights"] == pytest.approx(p.mean((1, 2)).tolist(), abs=1e-5)
        assert read["v_weights"] == pytest.approx(q.mean((1, 2)).tolist(), abs=1e-5)
        assert read["sharpness"] == pytest.approx(p.amax(0).mean().item(), abs=1e-5)
        assert read["v_entropy"] == pytest.approx(-(q * q.log()).sum(0).mean().item(), abs=1e-5)
    if flags["rd_control"] == "tied":
        assert all(read.get("js_nats", 0) == 0 for read in reads)
    else:
        assert sum(divergences) / 2 > 0.05

def test_means_are_over_tokens_however_they_are_batched():
    model, batch = model_of("wav", scale=1.0), tokens()
    (loss, one), (other, two) = routing.measure(model, [batch]), routing.measure(model, [batch[:4], batch[4:]])
    assert loss == pytest.approx(other, abs=1e-6)
    for a, b in zip(one, two, strict=True):
        for name in ("weights", "sharpness", "entropy", "cosine", "rms"):
            assert a.get(name) == pytest.approx(b.get(name), abs=1e-5)

@pytest.mark.parametrize("router, newest", [("attnres", [-2, -1]), ("cumulative", [-2, -1]), ("wav", [-6, -3])])
def test_cosine_of_the_newest_two_by_hand(router, newest):
    model, batch, seen = model_of(router, scale=1.0, n_blocks=1), tokens(), {}
    model.double()
    with torch.no_grad(), Watch(model.router, lambda l, sources, alphas: seen.update({l: sources})):
        model(batch[:, :-1])
    reads = measure(model, [batch])
    assert "cosine" not in reads[0]
    a, b = (seen[5][i] for i in ([0, 1] if router == "wav" else newest))        # wav: e, and C without its details
    cosine = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    assert reads[5]["cosine"] == pytest.approx(cosine.mean().item(), abs=1e-6)  # measured in float32

INPUTS = [{"router": "attnres"}, {"router": "residual"}, {"router": "rd"}, {"router": "rd", "rd_control": "average"},
          {"router": "rd", "rd_control": "tied"}, {"router": "delta", "decouple_v": True}]

@pytest.mark.parametrize("flags", INPUTS, ids=lambda f: " ".join(map(str, f.values())))
def test_what_reaches_a_sublayer_by_hand(flags):
    """Against what the router calls its sublayers with, and sums by numpy; in float64, so to 1e-12."""
    model = (model_of(**flags, scale=1.0) if flags["router"] != "residual" else small("residual")).double()
    batch, forward, recorder = tokens(), model.router.forward, Recorder([])
    def noting(e, sublayers):
        recorder.sublayers = [recorder.noting(f) for f in sublayers]
        h = forward(e, recorder.sublayers)
        recorder.inputs.append((h,))
        return h
    model.router.forward = noting
    with torch.no_grad():
        model(batch[:, :-1], batch[:, 1:])
    del model.router.forward
    got = inputs(model, [batch[:3], batch[3:4], batch[4:]])
    assert list(got) == list(range(7))
    two = flags["router"] in ("rd", "delta") and flags.get("rd_control") not in ("average", "tied")
    for l, hs in enumerate(recorder.inputs):
        assert len(hs) == 1 + (two and l % 2 == 0 and l < 6 and not (flags["router"] == "delta" and l == 0))
        want = {}
        for route, h in zip(("", "v_"), hs):
            square = (h.numpy() ** 2).mean(-1)
            want |= {route + "rms": (square ** 0.5).mean(),
                     route + "passed": (square / (square + model.config.norm_eps)).__pow__(0.5).mean()}
        assert got[l] == pytest.approx(want, rel=1e-12)

def test_what_passes_the_epsilon_of_48_layers_at_first():
    """rms of what the last MLP reads, and how much of it its norm lets through: a mean of 96 updates is small."""
    for router, rms, passed in [("attnres", 0.00022, 0.211), ("block", 0.0024, 0.921), ("wav", 0.00196, 0.889),
                                ("residual", 0.0217, 0.999)]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(router=router, n_layer=48, n_embd=64)).eval()
        last = inputs(model, [torch.randint(96, (1, 65), generator=torch.Generator().manual_seed(0))])[95]
        assert last["rms"] == pytest.approx(rms, rel=0.05) and last["passed"] == pytest.approx(passed, abs=0.01)

# ---------------------------------------------------------------------------------------------------------------------
# masks

def test_a_masked_source_has_weight_0_and_the_others_are_renormalised():
    c = settings("wav", 4, 2)
    e, w, p, _ = problem(c)
    router, seen = build(c, p, plain_read=True), []
    with Watch(router, lambda l, sources, alphas: seen.append((sources, alphas[0])), hidden={5: [1, 3]}):
        router(e, toy_sublayers(w))
    sources, alpha = seen[5]
    bias = [0, *[0, *router.detail_bias[5].tolist()] * 2]               # e; C0 and its details; PC and its details
    free = depth_read(router.query[5], sources, torch.tensor(bias, dtype=torch.float64))[1]
    keep = [i for i in range(len(sources)) if i not in (1, 3)]
    assert (alpha[[1, 3]] == 0).all() and torch.allclose(alpha[keep], free[keep] / free[keep].sum(0), rtol=1e-12)
    assert (seen[4][1] > 0).all() and (seen[6][1] > 0).all()

def test_ablations_put_weight_and_effect_side_by_side():
    model, batch = model_of("attnres", scale=1.0), tokens()
    reads = measure(model, [batch])
    every = routing.ablate(model, [batch], reads)
    assert {r["source"]: r["reads"] for r in every} == {"e": 6, "u0": 6, "u1": 5, "u2": 4, "u3": 3, "u4": 2, "u5": 1}
    e = next(r for r in every if r["source"] == "e")
    assert e["weight"] == pytest.approx(sum(read["weights"][0] for read in reads[1:]) / 6)
    # without e everywhere: read 1 sees u0 alone, and so on; the same by a router that is told so
    biased = model_of("attnres", scale=1.0)
    router = biased.router
    router.reader = lambda: lambda l, s: [depth_read(
        router.query[l], s, torch.tensor([-1e9 if len(s) > 1 else 0.0] + [0.0] * (len(s) - 1)))[0]]
    base = model(batch[:, :-1], batch[:, 1:])[1].item()
    assert e["loss"] == pytest.approx(biased(batch[:, :-1], batch[:, 1:])[1].item(), abs=1e-6)
    assert e["effect"] == pytest.approx(e["loss"] - base, abs=1e-6)

def test_delta_has_nothing_to_choose_at_its_first_sublayer():
    model = model_of("delta", n_layer=2, null_source=True)
    reads = measure(model, [tokens()])
    assert reads[0]["sources"] == ["null", "e"] and [read["choice"] for read in reads] == [False, True, True, True]
    masks = routing.ablate(model, [tokens()], reads)
    assert {mask["source"]: mask["reads"] for mask in masks} == {"null": 3, "e": 3, "u0": 3, "u1": 2, "u2": 1}

# ---------------------------------------------------------------------------------------------------------------------
# the script

@pytest.fixture(scope="session")
def runs(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for router, seed in [("rd", 0), ("rd", 1), ("cumulative", 0), ("residual", 0)]:
        go("--dataset", data, "--router", router, "--out_dir", folder / f"{router}-2x16-s{seed}", "--max_iters", 3,
           "--router_lr", 0.5, "--seed", seed)
    return folder

def routed(*argv):
    routing.main([*map(str, argv), "--windows", "8", "--device", "cpu"])

def csv(path):
    """What --csv has written, lists of names and weights as lists."""
    import pandas as pd
    frame = pd.read_csv(path)
    for name in {"sources", "weights", "v_weights"} & {*frame}:
        frame[name] = [json.loads(x) if isinstance(x, str) else x for x in frame[name]]
    return frame

def test_one_run(runs, tmp_path, capsys):
    rd = runs / "rd-2x16-s0"
    routed(rd, "--csv", tmp_path / "r.csv", "--png", tmp_path / "r.png", "--rms_png", tmp_path / "h.png",
           "--ablate")
    out, reads = capsys.readouterr().out, csv(tmp_path / "r.csv")
    first = {"label": "rd", "cell": "rd-2x16", "run": "rd-2x16-s0", "router": "rd", "n_layer": 2, "n_embd": 16, "seed": 0,
             "iter": 3, "dataset": "tiny", "tokens": 8 * 16, "name": "attn 0", "n": 1, "choice": False}
    assert len(reads) == 5 and first.items() <= reads.iloc[0].to_dict().items()
    assert f"loss {reads.loss[0]:.4f} on 128 validation tokens" in out
    js = reads.js_nats[2]                                               # attn 0 has nothing to choose from
    assert f"| divergence of Q/K and V, nats | {shows.number(js)} |" in out and js > 0
    assert [line.split(" | ")[0] for line in out.splitlines() if line.startswith(("| attn", "| mlp", "| head"))] == [
        "| attn 0", "| mlp 0", "| attn 1", "| mlp 1", "| head"]
    assert all(f"\n| {source} | " in out.split("A source masked")[1] for source in ("e", "C0", "C1", "PC"))
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("r.png", "h.png"))
    routed("--out_dir", rd, "--ablate")
    assert capsys.readouterr().out == out

def test_a_router_that_does_not_read_depth_has_its_inputs(runs, capsys):
    routed(runs / "residual-2x16-s0", "--ablate")
    out = capsys.readouterr().out
    assert out.endswith("Nothing to mask: no read has a choice.\n")
    assert "residual has no depth read" in out and "| read | sources | rms at first | rms | passed at first | passed |" in out
    routed("--compare", runs / "residual-2x16-s0")
    assert "| least passed | " in capsys.readouterr().out

def test_the_first_weights_are_those_of_the_seed(runs, data, tmp_path):
    """A run of no steps is stopped at its first weights: what reaches its sublayers is the same, to the bit."""
    go("--dataset", data, "--router", "rd", "--seed", 1, "--max_iters", 0, "--out_dir", tmp_path / "begun")
    for name, run in (("begun", tmp_path / "begun"), ("rd", runs / "rd-2x16-s1")):
        routed(run, "--csv", tmp_path / f"{name}.csv")
    begun, rd = (csv(tmp_path / f"{name}.csv").fillna(0) for name in ("begun", "rd"))
    for name in ("rms", "passed", "v_rms"):
        assert begun[name].equals(begun[name + "_first"]) and begun[name].equals(rd[name + "_first"])
        assert not begun[name].equals(rd[name])
    for given, more in (({"init_from": "out/x"}, {}), ({"init_from": "resume"}, {"fingerprint": {"start": "1f"}})):
        assert routing.first_model({"settings": given | {"seed": 0}, **more}, GPTConfig()) is None

def test_comparison(runs, tmp_path, capsys):
    """Means over seeds with their intervals, and those of effects; t of one degree of freedom is 12.706."""
    few = [runs / name for name in ("rd-2x16-s0", "rd-2x16-s1", "cumulative-2x16-s0")]
    for run in few:                                                     # each alone, for what they are means of
        routed(run, "--ablate", "--csv", tmp_path / f"{run.name}.csv")
    alone = [out.split("A source masked")[1] for out in capsys.readouterr().out.split("validation tokens")[1:]]
    effects = [float(re.search(r"\| e \| 4 .* ([+-][\d.]+) \|", text)[1]) for text in alone[:2]]
    routed("--compare", *few, "--ablate", "--csv", tmp_path / "c.csv")
    out, reads = capsys.readouterr().out, csv(tmp_path / "c.csv")
    assert list(reads.run.unique()) == [path.name for path in few]
    assert reads.cell.tolist() == ["rd-2x16"] * 10 + ["cumulative-2x16"] * 5
    lines = {line.split(" | ")[0]: [x.rstrip(" |").split(" ± ") for x in line.split(" | ")[1:]]
             for line in out.split("A source")[0].splitlines()}
    assert "|  | rd-2x16 (2 seeds) | cumulative-2x16 |" in out
    for title, name in (("| mean sharpness", "sharpness"), ("| divergence of Q/K and V, nats", "js_nats"), ("| loss", "loss")):
        a, b, *one = (csv(tmp_path / f"{run.name}.csv").query("choice")[name].mean() for run in few
                      if name != "js_nats" or "rd" in run.name)
        (mean, bar), *other = lines[title]
        assert float(mean) == pytest.approx((a + b) / 2, rel=0.06)     # two digits, where it is small
        assert float(bar) == pytest.approx(12.7062 * abs(a - b) / 2, rel=0.06)
        assert not one or float(other[0][0]) == pytest.approx(one[0], abs=6e-4)
    mean, bar = re.search(r"\| e \| 4 .* ([+-][\d.]+) ± ([\d.]+) \|\n", out).groups()
    assert float(mean) == pytest.approx(sum(effects) / 2, abs=2e-4)     # of rounded figures
    assert float(bar) == pytest.approx(12.7062 * abs(effects[0] - effects[1]) / 2, abs=2e-3)
    assert reads.sources[14] == ["e", "h1", "h2", "h3", "h4"]

def test_a_folder_of_runs(runs, tmp_path, capsys):
    """All that have ended; the damaged and the unfinished are named and left out."""
    folder = tmp_path / "sweep"
    shutil.copytree(runs, folder)
    (folder / "cumulative-2x16-s0" / "ckpt.pt").write_bytes(b"PK")
    unfinished = checkpoint(folder / "rd-2x16-s0")
    unfinished["settings"]["max_iters"] = 4
    torch.save(unfinished, folder / "rd-2x16-s0" / "ckpt.pt")
    routed("--compare", folder, "--csv", tmp_path / "f.csv")
    out, err = capsys.readouterr()
    assert "|  | rd-2x16 | residual-2x16 |" in out and len(csv(tmp_path / "f.csv")) == 10
    assert "rd-2x16-s0 has not ended" in err and "cumulative-2x16-s0/ckpt.pt is damaged" in err.replace("\\", "/")

def test_only_equal_runs_are_one_cell(runs, data, tmp_path):
    """Runs of one name that differ in more than their seed have no common mean."""
    go("--dataset", data, "--router", "rd", "--out_dir", tmp_path / "rd-2x16-s2", "--max_iters", 3, "--router_lr", 0.1,
       "--seed", 2)
    wrong("are no runs of one cell: router_lr 0.1, not 0.5. Compare them apart.", "--compare", runs / "rd-2x16-s0",
          tmp_path / "rd-2x16-s2")
    unended = checkpoint(tmp_path / "rd-2x16-s2")
    unended["iter"] = 2
    torch.save(unended, tmp_path / "rd-2x16-s2" / "ckpt.pt")
    wrong("one cell: other iterations", "--compare", runs / "rd-2x16-s0", tmp_path / "rd-2x16-s2")
    shutil.copytree(runs / "rd-2x16-s0", tmp_path / "rd-2x16-s0")
    wrong("are no runs of one cell: one seed twice", "--compare", runs / "rd-2x16-s0", tmp_path / "rd-2x16-s0")

def test_intervals_over_seeds_by_hand():
    import pandas as pd
    assert shows.with_interval(pd.Series([1.0, 2.0, 6.0, math.nan])) == \
        f"3.000 ± {4.302653 * math.sqrt(7 / 3):.3f}"                            # t, 2 degrees of freedom
    assert shows.with_interval(pd.Series([0.5])) == "0.500" and shows.with_interval(pd.Series([math.nan])) == ""

def test_pictures_show_what_was_measured(runs, tmp_path):
    routed(runs / "rd-2x16-s0", "--csv", tmp_path / "r.csv")
    frame = csv(tmp_path / "r.csv")
    figure = shows.choices(frame)
    qk, v, gap, mlps = (image.get_array() for axis in figure.axes for image in axis.get_images())
    assert qk.shape == v.shape == gap.shape == (2, 4) and mlps.shape == (3, 4)  # rows of layers; e, C0, C1, PC
    weights, v_weights = frame.weights[2], frame.v_weights[2]
    assert qk[1].tolist() == [*weights, None, None] and v[1].tolist() == [*v_weights, None, None]
    assert gap[1].tolist() == [b - a for a, b in zip(weights, v_weights)] + [None, None]
    texts = {text.get_text() for axis in figure.axes for text in axis.texts}
    assert texts == {"0.2\ncumulative,\ndeep layers", "0.6\ndelta", "0.218\nRD's paper"}
    figure = shows.lines(report.pd.concat([frame, frame.assign(seed=1, run="other")]), shows.REACHING)
    line = next(line for line in figure.axes[1].get_lines() if line.get_label() == "rd")
    assert line.get_xydata().tolist() == [[0, frame.rms[0]], [1, frame.rms[2]]]
    assert len(figure.axes) == 4 and "2 layers of 16, seeds 0, 1" in figure.axes[0].get_title()
    assert [line.get_linestyle() for line in figure.axes[1].get_lines()] == ["-", "--", ":"]   # attention, MLPs, values

def test_sources_without_a_checkpoint(tmp_path, capsys):
    routing.main(["--sources", "wav", "--n_layer", "2", "--n_blocks", "1", "--details", "split"])
    assert capsys.readouterr().out.splitlines() == [
        "attn 0     1   e", "mlp 0      3   e, PC = u0, PC.split = u0",
        "attn 1     3   e, PC = u0 + u1, PC.split = u0 + u1",
        "mlp 1      3   e, PC = u0 + u1 + u2, PC.split = u0 + u1 - u2", "head       2   e, C0 = u0 + u1 + u2 + u3"]
    mine = tmp_path / "mine.py"
    mine.write_text("""
from model import DepthRouter
class Mine(DepthRouter):
    def forward(self, e, sublayers):
        read, sources = self.reader(), self.first_sources(e)
        for l, f in enumerate(sublayers):
            sources = sources + [f(*read(l, sources[-2:]))]
        return read(self.head, sources[-2:])[0]
""", encoding="utf-8")
    try:
        routing.main(["--sources", f"{mine}:Mine", "--n_layer", "1", "--null_source"])
    finally:
        ROUTERS.pop(f"{mine}:Mine", None)
    assert capsys.readouterr().out.splitlines() == ["attn 0     2   s0 = 0, s1 = e", "mlp 0      2   s0 = e, s1 = u0",
                                                    "head       2   s0 = u0, s1 = u1"]
    wrong("router is 'wv'; did you mean wav?", "--sources", "wv")
    wrong("n_blocks is 9; it must be from 1 to n_layer (2).", "--sources", "wav", "--n_layer", 2, "--n_blocks", 9)

def wrong(message, *argv):
    with pytest.raises(UserError) as e:
        routing.main([*map(str, argv), "--device", "cpu"])
    assert message in str(e.value) and len(str(e.value).splitlines()) <= 2

def test_pictures_of_a_router_that_adds_with_routes_far_apart(data, tmp_path, monkeypatch):
    """Its head reads nothing; a divergence above the paper's is inside its axis."""
    go("--dataset", data, "--router", "delta", "--decouple_v", "--out_dir", tmp_path / "delta-2x16-s0", "--max_iters", 1)
    drawn = []
    monkeypatch.setattr(report, "save", lambda path, figure: drawn.append(figure))
    monkeypatch.setattr(routing, "js_divergence", lambda p, q: p[0] * 0 + 0.6)
    routed(tmp_path / "delta-2x16-s0", "--png", tmp_path / "d.png")
    maps = [axis for axis in drawn[0].axes if axis.get_images()]
    assert [axis.get_title() for axis in maps] == ["attention, Q/K", "attention, V", "V minus Q/K", "MLPs, head"]
    assert [label.get_text() for label in maps[-1].get_yticklabels()] == ["mlp 0", "mlp 1"]
    js = next(axis for axis in drawn[0].axes if "divergence" in axis.get_title())
    assert js.get_ylim()[0] == 0 and 0.6 < js.get_ylim()[1] < 0.7

def test_what_a_user_can_get_wrong(runs, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rd, residual = runs / "rd-2x16-s0", runs / "residual-2x16-s0"
    wrong("no read has a choice here; --rms_png", residual, "--png", "x.png")
    wrong("there is no checkpoint nowhere", "nowhere")
    wrong("there is no run under out/ yet")
    wrong("--windows is 0", rd, "--windows", 0)
    wrong("there is no flag --windws. Did you mean --windows?", rd, "--windws", 2)
    wrong("name one run, or several after --compare", rd, "--compare", rd)
    wrong("name one run, or several after --compare", rd, "--out_dir", rd)
    wrong("--n_layer is a flag of a model; it goes with --sources", rd, "--n_layer", 2)
    wrong("--ablate is 'e'; it must be true or false.", rd, "--ablate", "e")
    wrong("there is no data set data/gone", rd, "--dataset", "gone")
    wrong("--csv no/r.csv: there is no such folder.", rd, "--csv", "no/r.csv")
    damaged = tmp_path / "damaged"
    shutil.copytree(rd, damaged)
    (damaged / "ckpt.pt").write_bytes((damaged / "ckpt.pt").read_bytes()[:-2000])
    wrong("is damaged, or not a checkpoint", damaged)
    wrong("the tokenizer of", rd, "--dataset", other_data(tmp_path))
    assert not list(tmp_path.glob("*.png")) + list(tmp_path.glob("*.tmp"))
    monkeypatch.setattr(report, "pd", None)
    wrong("Tables and pictures need pandas, scipy and matplotlib: pip install -r requirements-extra.txt", rd)

def other_data(folder):
    from prepare_data import prepare
    (folder / "other.txt").write_text("to be or not to be\n" * 500)
    return prepare(input=[str(folder / "other.txt")], tokenizer="char", out=folder / "o", split="80/10/10", num_proc=1)
