"""routing.py: every source under its name, statistics by hand, masks that renormalise, wrong calls."""
import json
import math
import shutil
import sys

import pytest
import torch

import reference
from lab import routing
from nanodepth.files import UserError
from model import GPT, GPTConfig, depth_read
from lab.routing import Watch, effective_rank, entropy, js_divergence, measure
from tiny import data_folder, go
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

def rms(x):
    return (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

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
    signed = sum(updates[i] if plus(i) else -updates[i] for i in part)
    return signed * (rms(total) / rms(signed)).clamp(max=c.rho)

@pytest.mark.parametrize("c", CASES, ids=label)
def test_every_source_has_its_name(c):
    e, w, p, _ = problem(c)
    router, recorder, seen = build(c, p, plain_read=True), Recorder(toy_sublayers(w)), []
    want = router(e, toy_sublayers(w))
    with torch.no_grad(), Watch(router, lambda *read: seen.append((*read, len(recorder.updates)))):
        got = router(e, recorder.sublayers)
    assert torch.equal(got, want) and not {"read", "reader"} & vars(router).keys()        # watching changes nothing, and leaves nothing
    assert [l for l, *_ in seen] == list(range(2 * c.n_layer + (c.router not in reference.ADDITIVE)))
    for l, sources, scale, alphas, done in seen:
        names = routing.source_names(router, l, len(sources))
        assert len(set(names)) == len(names) == len(sources) and done == l
        for name, source, factor in zip(names, sources, scale, strict=True):
            source = source if factor is None else source * factor.unsqueeze(-1)
            assert torch.allclose(source, by_name(name, c, l, e, recorder.updates), rtol=1e-12, atol=1e-12), (l, name)
        two = l % 2 == 0 and l < router.head and (c.router == "rd" or c.decouple_v) and c.rd_control != "tied"
        assert len(alphas) == 1 + two
        assert all(torch.allclose(a.sum(0), torch.ones_like(a[0])) for a in alphas)

# ---------------------------------------------------------------------------------------------------------------------
# statistics

def test_divergence_and_entropy_of_known_distributions():
    d = lambda *p: torch.tensor(p, dtype=torch.float64)
    assert js_divergence(d(1, 0), d(0, 1)).item() == pytest.approx(math.log(2))
    half, m = math.log(2) / 2, -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert js_divergence(d(0.5, 0.5), d(1, 0)).item() == pytest.approx(m - half)        # 0.2158 nats
    assert js_divergence(d(0.3, 0.7), d(0.3, 0.7)).item() == 0
    assert entropy(d(0.25, 0.25, 0.25, 0.25)).item() == pytest.approx(math.log(4)) and entropy(d(1, 0)).item() == 0

def test_effective_rank_of_known_vectors():
    eye = torch.eye(5, dtype=torch.float64)
    assert effective_rank(eye[:3] * torch.tensor([[1.0], [5.0], [0.1]])).item() == pytest.approx(3)     # of any length
    assert effective_rank(torch.stack([eye[0], 2 * eye[0], -eye[0]])).item() == pytest.approx(1, abs=1e-6)
    two = torch.stack([eye[0], eye[0], eye[1]])                         # singular values sqrt(2), 1
    p = math.sqrt(2) / (math.sqrt(2) + 1)
    assert effective_rank(two).item() == pytest.approx(math.exp(-p * math.log(p) - (1 - p) * math.log(1 - p)), abs=1e-6)

def model_of(router, n_layer=3, scale=0.0, **flags):
    """A small model that reads plainly; its queries are random numbers of this scale."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, seq_len=6, n_layer=n_layer, n_head=2, n_embd=8, router=router, plain_read=True,
                          **flags))
    with torch.no_grad():
        for q in (model.router.query, model.router.query_v):
            if q is not None and q.requires_grad:
                q.normal_(0, scale) if scale else q.zero_()
        for s in model.sublayers[1::2]:                                 # updates as large as the embedding
            s.down_proj.weight.mul_(20)
    return model.eval()

def tokens(n=5):
    return torch.randint(11, (n, 7), generator=torch.Generator().manual_seed(1))

@pytest.mark.parametrize("router", READING)
def test_untrained_weights_are_uniform(router):
    result = measure(model_of(router, n_blocks=2), [tokens()])
    for read in result["reads"]:
        n = len(read["sources"])
        plain = [x for x in read["sources"] if "." not in x]
        each = 1 / (len(plain) + math.exp(-2) * (n - len(plain)))       # wav: a detail weighs exp(-2) of a sum
        want = [each * (math.exp(-2) if "." in x else 1) for x in read["sources"]]
        assert read["weights"] == pytest.approx(want, abs=1e-6)
        assert read["sharpness"] == pytest.approx(each, abs=1e-6)
        assert read["share_e"] == pytest.approx(each, abs=1e-6)
        assert read["share_details"] == pytest.approx(each * math.exp(-2) * (n - len(plain)), abs=1e-6)
        if n == len(plain):
            assert read["entropy"] == pytest.approx(math.log(n), abs=1e-6)
            assert n == 1 or read["relative_entropy"] == pytest.approx(1)
    assert ("mean_js_nats" in result) == (router == "rd")
    assert result.get("mean_js_nats", 0) == 0

@pytest.mark.parametrize("flags", [{"rd_control": "tied"}, {"rd_control": "none"}, {"rd_control": "average"},
                                   {"rd_control": "frozen_v"}], ids=lambda f: f["rd_control"])
def test_divergence_of_decoupled_reads(flags):
    model, batch = model_of("rd", scale=2.0, **flags), tokens()
    result = measure(model, [batch])
    seen = {}
    with torch.no_grad(), Watch(model.router, lambda l, sources, scale, alphas: seen.update({l: (sources, alphas)})):
        loss = model(batch[:, :-1], batch[:, 1:])[1].item()
    assert result["loss"] == pytest.approx(loss)
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
        read = result["reads"][l]
        assert read["js_nats"] == pytest.approx(divergences[-1], abs=1e-6)
        assert read["js_bits"] == pytest.approx(read["js_nats"] / math.log(2))
        assert read["weights"] == pytest.approx(p.mean((1, 2)).tolist(), abs=1e-5)
        assert read["v_weights"] == pytest.approx(q.mean((1, 2)).tolist(), abs=1e-5)
        assert read["sharpness"] == pytest.approx(p.amax(0).mean().item(), abs=1e-5)
        assert read["v_entropy"] == pytest.approx(-(q * q.log()).sum(0).mean().item(), abs=1e-5)
    assert result["mean_js_nats"] == pytest.approx(sum(divergences) / 2, abs=1e-6)
    if flags["rd_control"] == "tied":
        assert result["mean_js_nats"] == 0 and all(read.get("js_nats", 0) == 0 for read in result["reads"])
    else:
        assert result["mean_js_nats"] > 0.05

def test_means_are_over_tokens_however_they_are_batched():
    model, batch = model_of("wav", scale=1.0), tokens()
    one, two = measure(model, [batch]), measure(model, [batch[:4], batch[4:]])
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    for a, b in zip((*one["reads"], one["sources"]), (*two["reads"], two["sources"]), strict=True):
        for name in ("weights", "sharpness", "entropy", "norms", "adjacent_cosine", "effective_rank"):
            assert a.get(name) == pytest.approx(b.get(name), abs=1e-5)

@pytest.mark.parametrize("null", [False, True], ids=["", "null_source"])
def test_sources_by_hand(null):
    model, batch, most = model_of("block", scale=1.0, null_source=null), tokens(), []
    with torch.no_grad(), Watch(model.router, lambda l, sources, scale, alphas: most.append(torch.stack(sources[null:]))):
        model(batch[:, :-1])
    s = most[-1].double()                                               # the head's, without the null source
    got = measure(model, [batch])["sources"]
    assert got["read"] == "head" and got["names"] == ["e", "C0", "C1", "C2"]
    norms = s.square().sum(-1).sqrt()
    assert got["norms"] == pytest.approx(norms.mean((1, 2)).tolist(), rel=1e-5)
    cosine = (s[1:] * s[:-1]).sum(-1) / (norms[1:] * norms[:-1])
    assert got["adjacent_cosine"] == pytest.approx(cosine.mean((1, 2)).tolist(), abs=1e-5)
    sigma = torch.linalg.svdvals((s / norms.unsqueeze(-1)).movedim(0, -2))                          # (B, T, n)
    p = sigma / sigma.sum(-1, keepdim=True)
    assert got["effective_rank"] == pytest.approx((-(p * p.log()).sum(-1)).exp().mean().item(), rel=1e-5)

# ---------------------------------------------------------------------------------------------------------------------
# masks

def test_a_masked_source_has_weight_0_and_the_others_are_renormalised():
    c = settings("wav", 4, 2)
    e, w, p, _ = problem(c)
    router, seen = build(c, p, plain_read=True), []
    with Watch(router, lambda l, sources, scale, alphas: seen.append((sources, alphas[0])), hidden={5: [1, 3]}):
        router(e, toy_sublayers(w))
    sources, alpha = seen[5]
    bias = [0, *[0, *router.detail_bias[5].tolist()] * 2]               # e; C0 and its details; PC and its details
    free = depth_read(router.query[5], sources, torch.tensor(bias, dtype=torch.float64))[1]
    keep = [i for i in range(len(sources)) if i not in (1, 3)]
    assert (alpha[[1, 3]] == 0).all() and torch.allclose(alpha[keep], free[keep] / free[keep].sum(0), rtol=1e-12)
    assert (seen[4][1] > 0).all() and (seen[6][1] > 0).all()

def test_ablations_put_weight_and_effect_side_by_side():
    model, batch = model_of("attnres", scale=1.0), tokens()
    reads = measure(model, [batch])["reads"]
    every = routing.ablate(model, [batch], reads, "all")
    assert {r["source"]: r["masked_in"] for r in every} == {
        "e": "6 reads", "u0": "6 reads", "u1": "5 reads", "u2": "4 reads", "u3": "3 reads", "u4": "2 reads",
        "u5": "1 read"}
    assert [r["effect"] for r in every] == sorted((r["effect"] for r in every), reverse=True)
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

    one = routing.ablate(model, [batch], reads, "head")
    assert len(one) == 7 and {r["masked_in"] for r in one} == {"head"}
    assert routing.ablate(model, [batch], reads, "6") == one            # its number
    assert len(routing.ablate(model, [batch], reads, "each")) == 2 + 3 + 4 + 5 + 6 + 7
    with pytest.raises(UserError, match="--ablate is 'none'; it must be all, each, head, or the number of a read"):
        routing.ablate(model, [batch], reads, "none")

def test_delta_has_nothing_to_choose_at_its_first_sublayer():
    model = model_of("delta", n_layer=2, null_source=True)
    reads = measure(model, [tokens()])["reads"]
    assert reads[0]["sources"] == ["null", "e"] and [read["choice"] for read in reads] == [False, True, True, True]
    assert {l for *_, hidden in routing.ablations(reads, "all") for l in hidden} == {1, 2, 3}

# ---------------------------------------------------------------------------------------------------------------------
# the script

@pytest.fixture(scope="session")
def runs(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for router in ("rd", "cumulative", "delta", "residual"):
        go("--dataset", data, "--router", router, "--out_dir", folder / router, "--max_iters", 3, "--router_lr", 0.5)
    return folder

def test_one_run(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    routing.main([str(runs / "rd"), "--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png"),
                  "--windows", "8", "--ablate", "all", "--device", "cpu"])
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["router"] == "rd" and result["tokens"] == 8 * 16 and len(result["reads"]) == 5 and result["iter"] == 3
    assert f"loss {result['loss']:.4f} on 128 validation tokens" in out
    assert f"mean of 1 layers: {result['mean_js_nats']:.4f} nats" in out and result["mean_js_nats"] > 0
    assert {r["source"] for r in result["ablations"]} == {"e", "C0", "C1", "PC"} and "| e | 4 reads |" in out
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")

def test_comparison(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    routing.main(["--compare", str(runs / "cumulative"), str(runs / "delta"), "--device", "cpu",
                  "--json", str(tmp_path / "c.json"), "--png", str(tmp_path / "c.png")])
    out = capsys.readouterr().out
    assert "| depth | cumulative | delta |" in out and "| 0.875 .. 1.000 |" in out
    results = json.loads((tmp_path / "c.json").read_text())
    assert list(results) == ["cumulative", "delta"] and (tmp_path / "c.png").stat().st_size > 10000
    assert "| mean sharpness | {:.3f} | {:.3f} |".format(*(r["mean_sharpness"] for r in results.values())) in out
    assert results["cumulative"]["reads"][4]["sources"] == ["e", "h1", "h2", "h3", "h4"]

def wrong(message, *argv):
    with pytest.raises(UserError) as e:
        routing.main([*map(str, argv), "--device", "cpu"])
    assert message in str(e.value) and len(str(e.value).splitlines()) <= 2

def test_what_a_user_can_get_wrong(runs, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong("has no depth read: it chooses nothing along depth. These do: attnres", runs / "residual")
    wrong("there is no checkpoint nowhere", "nowhere")
    wrong("there is no run under out/ yet")
    wrong("--windows is 0", runs / "rd", "--windows", 0)
    wrong("there is no flag --windws. Did you mean --windows?", runs / "rd", "--windws", 2)
    wrong("--compare takes its runs after it", runs / "rd", "--compare", runs / "delta")
    wrong("--ablate is 'e'; it must be all, each, head, or the number of a read with a choice: 1 to 4.", runs / "rd",
          "--ablate", "e")
    wrong("there is no data set data/gone", runs / "rd", "--dataset", "gone")
    damaged = tmp_path / "damaged"
    shutil.copytree(runs / "rd", damaged)
    (damaged / "ckpt.pt").write_bytes((damaged / "ckpt.pt").read_bytes()[:-2000])
    wrong("is damaged, or not a checkpoint", damaged)
    wrong("the tokenizer of", runs / "rd", "--dataset", other_data(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wrong("--png needs matplotlib: pip install matplotlib", runs / "rd", "--png", "x.png")

def other_data(folder):
    from prepare_data import prepare
    (folder / "other.txt").write_text("to be or not to be\n" * 500)
    return prepare(input=[str(folder / "other.txt")], tokenizer="char", out=folder / "o", split="80/10/10", num_proc=1)
