"""report.py: what is no pair is left out and said; statistics against scipy and numpy; tables against the CSV."""
import json
import math
import shutil
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import train
from lab import report, sweep
from nanodepth.files import UserError
from nanodepth.runs import NO_MATTER
from tiny import digest, fake_run, rows_of

BLOCK = [[3.0, 2.0, 1.5], [3.1, 2.2, 1.6], [2.9, 1.9, 1.4]]
# wav minus block: -0.2, -0.1, +0.05 at the end; +0.1, 0, -0.1 half way
WAV = [[3.0, 2.1, 1.3], [3.1, 2.2, 1.5], [2.9, 1.8, 1.45]]

@pytest.fixture
def runs(tmp_path):
    for label, losses in (("wav", WAV), ("block", BLOCK)):
        for seed in (2, 0, 1):
            fake_run(tmp_path, label, 4, seed, losses[seed])
    return tmp_path

def tell(folder, *flags, drawn=False) -> str:
    """results.md of a folder."""
    with mock.patch.object(report, "pictures", report.pictures if drawn else lambda *args: []):      # they take seconds
        sweep.main(["--report", str(folder), *flags])
    return (folder / "results.md").read_text(encoding="utf-8")

MEANS, AGAINST = "Val loss: mean ±", "Val loss minus that of the baseline"

def rows(text, label, title=AGAINST, depth="4") -> list[dict]:
    """The rows of a label, one for each point in time, the end last."""
    head = ["router", "against", "layers", "tokens", *report.PAIRED]
    return [dict(zip(head, r)) for r in rows_of(text, title) if r[0] == label and r[2] == depth]

def row(text, label):
    [found] = rows(text, label)
    return found

# ---------------------------------------------------------------------------------------------------------------------
# statistics

@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_statistics_against_scipy_and_numpy(n):
    rng = np.random.default_rng(n)
    base = rng.normal(1.5, 0.05, n)
    loss = base + rng.normal(-0.01, 0.02, n)
    p = report.paired(loss - base)
    interval = stats.ttest_rel(loss, base).confidence_interval(0.95)
    d = loss - base
    assert (p["low"], p["high"]) == pytest.approx(tuple(interval), rel=1e-12)
    assert p["mean"] == pytest.approx(np.mean(d), rel=1e-12) and p["sd"] == pytest.approx(np.std(d, ddof=1), rel=1e-12)
    assert (p["n"], p["wins"]) == (n, sum(d < 0))

def test_what_few_pairs_cannot_say():
    p = report.paired([0.0])
    assert p["n"] == 1 and p["wins"] == 0 and all(math.isnan(p[k]) for k in ("sd", "low", "high", "detectable"))
    one = report.paired_table(report.compared(frame([1.5], [1.5])))
    assert one.endswith("| wav | block | 4 | 100 | 1 | +0.0000 | - | - | 0 of 1 | - | - |  |\n")
    assert report.paired([])["n"] == 0
    equal = report.paired([0.0, 0.0, 0.0])                              # rd tied against block, on a CPU
    assert (equal["low"], equal["high"], equal["wins"]) == (0, 0, 0)

def test_detectable_is_shown_in_80_of_100_repeats():
    """Normal differences with a true mean of the expected detectable size: the interval is without 0 in 80 % of 20,000
    samples. The standard error of that share is 0.003; sd is replaced by the true one, so the formula is exact only for
    large n (n = 5: 0.79)."""
    for n, tolerance in ((5, 0.02), (30, 0.01)):
        t = stats.t(n - 1)
        size = (t.ppf(0.975) + t.ppf(0.8)) / math.sqrt(n)
        assert report.paired(np.array([1.0, -1.0] * (n // 2) + [0.0] * (n % 2)))["detectable"] == pytest.approx(
            size * np.std([1.0, -1.0] * (n // 2) + [0.0] * (n % 2), ddof=1), rel=1e-12)
        d = np.random.default_rng(0).normal(size, 1, (20000, n))
        half = t.ppf(0.975) * d.std(1, ddof=1) / math.sqrt(n)
        assert np.mean(np.abs(d.mean(1)) > half) == pytest.approx(0.8, abs=tolerance)

def frame(loss, base, depth=4):
    return pd.DataFrame([{"depth": depth, "label": "wav", "against": "block", "seed": i, "tokens": 100, "loss": a,
                          "base": b, "difference": a - b, "why": None, "run": None}
                         for i, (a, b) in enumerate(zip(loss, base))])

def test_correlation_of_pairs():
    loss, base = [1.3, 1.5, 1.45, 1.2], [1.5, 1.6, 1.4, 1.3]
    assert report.compared(frame(loss, base)).r[0] == pytest.approx(np.corrcoef(loss, base)[0, 1], rel=1e-12)
    for n in (1, 2):                                                    # two points always lie on a line
        assert math.isnan(report.compared(frame(loss[:n], base[:n])).r[0])
    assert math.isnan(report.compared(frame(loss, [1.5] * 4)).r[0])

def test_the_trend_over_depth_is_paired_by_seed(runs):
    deep = [[3.0, 2.1, 1.2], [3.1, 2.2, 1.45], [2.9, 1.8, 1.3]]
    for seed in range(3):
        fake_run(runs, "block", 8, seed, BLOCK[seed])
        fake_run(runs, "wav", 8, seed, deep[seed])
        fake_run(runs, "rd", 4, seed, WAV[seed])                        # at one depth: no trend
    fake_run(runs, "wav", 8, 3, deep[0])                                # a seed that 4 layers have not
    fake_run(runs, "block", 8, 3, BLOCK[0])
    [trend] = rows_of(tell(runs), "Does it change with depth?")
    change = [deep[i][2] - WAV[i][2] for i in range(3)]                 # the baseline's losses are equal here
    interval = stats.ttest_1samp(change, 0).confidence_interval(0.95)
    assert trend[:7] == ["wav", "block", "4 to 8", "2,000", "3", f"{np.mean(change):+.4f}",
                         f"{interval.low:+.4f} .. {interval.high:+.4f}"]

def test_tables_and_csv(runs):
    text = tell(runs)
    frame = pd.read_csv(runs / "results.csv")
    assert list(zip(frame.label, frame.seed)) == [(label, seed) for label in ("block", "wav") for seed in range(3)]
    first = {"label": "block", "router": "block", "depth": 4, "seed": 0, "n_embd": 16, "params": 1004,
             "dataset": "tiny", "iter": 20, "tokens": 2000, "val_loss": 1.5, "torch": "2.13.0", "device": "cpu", "dtype": "float32", "data_digest": "d" * 32,
             "run": "block-4x16-s0"}
    assert first.items() <= frame.iloc[0].to_dict().items()
    assert frame.iloc[0].val_bpb == pytest.approx(1.5 / math.log(2), rel=1e-12)
    assert len(pd.read_csv(runs / "evaluations.csv")) == 6 * 3

    # the tables, recomputed from the CSV
    block, wav = (frame[frame.label == label].val_loss.to_numpy() for label in ("block", "wav"))
    assert rows_of(text, MEANS) == [
        [label, "4", "2,000", "0 1 2", "1,004", f"{np.mean(x):.4f} ± {np.std(x, ddof=1):.4f}", ""]
        for label, x in (("block", block), ("wav", wav))]
    interval = stats.ttest_rel(wav, block).confidence_interval(0.95)
    got = row(text, "wav")
    assert got["difference"] == f"{np.mean(wav - block):+.4f}" and got["left out"] == "" and got["n"] == "3"
    assert got["95 % interval"] == f"{interval.low:+.4f} .. {interval.high:+.4f}"
    assert (got["wins"], got["r"]) == ("2 of 3", f"{np.corrcoef(wav, block)[0, 1]:.2f}")
    half = 4.302653 * 0.1 / math.sqrt(3)                                # +0.1, 0, -0.1
    assert "Intervals of 95 % shown: 1. If no router made a difference, 0.1 of them" in text
    pairs = pd.read_csv(runs / "pairs.csv")                             # at every evaluation
    assert pairs.tokens.tolist() == [0, 1000, 2000]
    assert pairs["mean"].tolist()[1:] == pytest.approx([0, np.mean(wav - block)], abs=1e-12)
    assert [pairs.low[1], pairs.high[1]] == pytest.approx([-half, half], rel=1e-6)

def test_report_keeps_what_the_sweep_compared(runs):
    (runs / "sweep.json").write_text(json.dumps({"baseline": "wav"}))
    assert row(tell(runs), "block")["against"] == "wav"
    got = rows(tell(runs, "--baseline", "delta"), "wav")[-1]
    assert got["left out"] == "s0 s1 s2: no delta" and got["difference"] == "-"
    fake_run(runs, "rd", 4, 0, BLOCK[0])
    assert "| rd |" in tell(runs) and "| rd |" not in tell(runs, "--routers", "block,wav")
    (runs / "sweep.json").write_text("{")
    with pytest.raises(UserError, match="sweep.json is damaged; delete it"):
        tell(runs)

# ---------------------------------------------------------------------------------------------------------------------
# what is no pair

UNEQUAL = [                                                             # another wav: what differs; the reason
    ({"n_embd": 32}, {}, "n_embd 32, not 16"),
    ({"learning_rate": 0.001}, {}, "learning_rate 0.001, not 0.002"),
    ({"max_iters": 10}, {}, "max_iters 10, not 20"),
    ({"eval_iters": 3}, {}, "eval_iters 3, not 10"),
    ({}, {"data": "e" * 32}, "data eeeeeeee, not dddddddd"),            # a corpus prepared anew
    ({"init_from": "b"}, {"start": "f" * 32}, "starting weights a checkpoint, not none"),
    ({}, {"torch": "2.12.0"}, "torch 2.12.0, not 2.13.0"),
    ({}, {"dtype": "bfloat16"}, "dtype bfloat16, not float32"),
    ({}, {"device": "cpu, cuda"}, "device cpu, cuda, not cpu"),
    ({}, {"model": "a" * 16}, "model.py aaaaaaaa, not bbbbbbbb"),
    ({}, {"changed": [{"iter": 10, "learning_rate": 0.1}]},
     "settings changed on the way [{iter: 10, learning_rate: 0.1}], not []"),
    ({}, None, "no fingerprint: it was trained by an older version"),
    ({"tokens_per_step": 95}, {}, "95 tokens a step, not 100"),
]

@pytest.mark.parametrize("settings, mark, reason", UNEQUAL, ids=[reason for *_, reason in UNEQUAL])
def test_an_unequal_run_is_in_no_difference(tmp_path, settings, mark, reason):
    """In a cell with others like it, it is left out with its reason, of mean and of pairs; alone, the row is empty."""
    for seed in range(3):
        fake_run(tmp_path, "block", 4, seed, BLOCK[seed])
        if seed:
            fake_run(tmp_path, "wav", 4, seed, WAV[seed])
    losses = WAV[0][:2] if "max_iters" in settings else WAV[0]
    odd = fake_run(tmp_path, "wav", 4, 0, losses, mark=mark, **settings)
    text = tell(tmp_path)
    reason = f"{odd.name} has {reason}" if mark is None else reason
    on_the_way = pd.read_csv(tmp_path / "pairs.csv").query("label == 'wav' and tokens == 1000")
    assert (on_the_way.left_out.tolist(), on_the_way.n.tolist()) == ([f"s0: {reason}"], [2]) or "max_iters" in settings
    got = rows(text, "wav")[-1]
    assert got["left out"] == f"s0: {reason}" and got["n"] == "2"
    d = [WAV[s][2] - BLOCK[s][2] for s in (1, 2)]
    assert got["difference"] == f"{np.mean(d):+.4f}"
    mean = rows_of(text, MEANS)[-1]
    assert mean[3] == "1 2" and f"{odd.name}: {reason}" in mean[-1] and "other seeds than 0 1 2" in mean[-1]

    for seed in (1, 2):
        shutil.rmtree(tmp_path / f"wav-4x16-s{seed}")
    got = rows(tell(tmp_path), "wav")[-1]
    assert got["left out"] == f"s0: {reason}".replace("a checkpoint", "ffffffff") and got["n"] == "0"
    assert {got[x] for x in report.PAIRED[1:-1]} == {"-"}

def test_unequal_tokens(tmp_path):
    """95k against 100k tokens: no pair at the end, and none on the way but where both were evaluated."""
    fake_run(tmp_path, "block", 4, 0, BLOCK[0], every=20)
    fake_run(tmp_path, "wav", 4, 0, WAV[0], every=19)
    got = row(tell(tmp_path), "wav")
    assert (got["n"], got["difference"], got["left out"]) == ("0", "-", "s0: max_iters 38, not 40")
    path = tmp_path / "wav-4x16-s0" / "config.json"
    config = json.loads(path.read_text())
    config["settings"]["max_iters"] = 40
    path.write_text(json.dumps(config))
    log = tmp_path / "wav-4x16-s0" / "log.jsonl"
    log.write_text(log.read_text().replace('"iter": 38', '"iter": 40'))
    got = row(tell(tmp_path), "wav")
    assert (got["n"], got["difference"], got["left out"]) == ("0", "-", "s0: 3,800 tokens, not 4,000")
    assert pd.read_csv(tmp_path / "pairs.csv").query("n > 0").tokens.tolist() == [0]

def test_a_control_that_was_stopped_early(runs):
    shutil.rmtree(runs / "block-4x16-s1")
    with open(fake_run(runs, "block", 4, 1, BLOCK[1][:2], max_iters=20) / "log.jsonl", "a") as f:
        f.write('{"iter": 20, "val_lo')                                 # cut short by a kill
    text = tell(runs)
    got = row(text, "wav")
    assert got["n"] == "2" and got["left out"] == "s1: block-4x16-s1 has not come so far"
    assert "block-4x16-s1 is not finished: iteration 10 of 20." in text
    # means of other seeds are not to be compared, and not drawn side by side
    assert [r[3] for r in rows_of(text, MEANS)] == ["0 2", "0 1 2"]
    assert rows_of(text, MEANS)[1][-1] == "other seeds than 0 2: see the pairs"
    cells = report.means(report.read_runs(runs)[0], "block")
    assert list(zip(cells.label, cells.why == "")) == [("block", True), ("wav", False)]

def test_means_that_are_no_pair_do_not_stand_side_by_side(runs):
    """A whole cell of another kind: its seeds are the same, and there is no other run of it to be odd beside."""
    for seed in range(3):
        fake_run(runs, "delta", 4, seed, WAV[seed], mark={"data": "e" * 32})
    text = tell(runs)
    assert {r[0]: r[-1] for r in rows_of(text, MEANS)} == {"block": "", "wav": "", "delta": "data eeeeeeee, not dddddddd"}
    left, right = report.drawn(report.read_runs(runs)[0], "block", [None])
    assert set(left.label) == {"block", "wav"} and set(right.label) == {"wav"}

def test_a_trend_is_of_equal_baselines(runs):
    for seed in range(3):
        fake_run(runs, "block", 8, seed, BLOCK[seed], learning_rate=0.1)
        fake_run(runs, "rd:learning_rate=1e-3", 4, seed, WAV[seed], learning_rate=1e-3)
        fake_run(runs, "rd:learning_rate=1e-3", 8, seed, WAV[seed], learning_rate=1e-3)
    [trend] = rows_of(tell(runs), "Does it change with depth?")
    assert (trend[0], trend[4], trend[-1]) == ("rd:learning_rate=1e-3", "0", "learning_rate 0.1, not 0.002")

def test_of_two_with_one_seed_fewer_the_stranger_is_odd(tmp_path):
    for seed in range(2):
        fake_run(tmp_path, "block", 4, seed, BLOCK[seed])
        fake_run(tmp_path, "wav", 4, seed, WAV[seed], learning_rate=0.002 if seed else 0.5)
    got = row(tell(tmp_path), "wav")
    assert (got["n"], got["left out"]) == ("1", "s0: learning_rate 0.5, not 0.002")

def test_an_end_beside_a_longer_run_is_drawn(tmp_path):
    """Where one run ends and the other is on its way there is no pair: nothing is drawn of it, and the rest is."""
    fake_run(tmp_path, "block", 4, 0, BLOCK[0])
    fake_run(tmp_path, "block:max_iters=40", 4, 0, [3.0, 2.0, 1.5, 1.4, 1.3], max_iters=40)
    text = tell(tmp_path, drawn=True)
    assert row(text, "block:max_iters=40")["n"] == "1" and (tmp_path / "curves.png").exists()

def test_a_cell_s_runs_have_one_router_s_code(runs):
    shutil.rmtree(runs / "wav-4x16-s2")
    fake_run(runs, "wav", 4, 2, WAV[2], mark={"router": "0" * 16})
    got = row(tell(runs), "wav")
    assert got["n"] == "2" and got["left out"] == "s2: code of the router 00000000, not "+ digest("wav")[:8]

def test_what_may_differ(runs):
    """What a label names, and what changes no number; every seed may start from weights of its own."""
    for seed in range(3):
        fake_run(runs, "rd:rd_control=tied:learning_rate=0.1", 4, seed, BLOCK[seed], rd_control="tied",
                 learning_rate=0.1)
        fake_run(runs, "block:plain_read=true", 4, seed, BLOCK[seed], plain_read=True, log_interval=7, compile=True)
        fake_run(runs, "wav", 4, seed, WAV[seed], n_blocks=4)           # as none is at 4 layers
        fake_run(runs, "delta:max_iters=10", 4, seed, WAV[seed][:2], max_iters=10)      # another length, and says so
    text = tell(runs)
    for label in ("rd:rd_control=tied:learning_rate=0.1", "block:plain_read=true", "wav", "delta:max_iters=10"):
        assert (row(text, label)["n"], row(text, label)["left out"]) == ("3", "")
    for seed in range(3):
        for label, losses in (("block", BLOCK), ("wav", WAV)):
            fake_run(runs / "started", label, 4, seed, losses[seed], mark={"start": f"{seed}" * 32},
                     init_from=f"b{seed}")
    text = tell(runs / "started")
    assert [(r["tokens"], r["n"]) for r in rows(text, "wav")] == [("0", "3"), ("2,000", "3")]

def test_every_setting_is_compared(tmp_path):
    """Any setting that is not in NO_MATTER makes two runs no pair, also one that comes later."""
    a = report.read_run(fake_run(tmp_path, "block", 4, 0, BLOCK[0]))
    for name in train.DEFAULTS.keys() - {*NO_MATTER, "seed", "n_layer"}:
        b = report.read_run(fake_run(tmp_path, "block", 4, 0, BLOCK[0]))
        b.config["settings"][name] = b.config["model"][name] = "other"
        b.label = "wav"
        assert report.unlike(a, b).startswith(f"{name} ") and "not other" in report.unlike(a, b)
        b.label = f"wav:{name}=other"
        assert report.unlike(a, b) is None
        a.label, a.config["settings"][name] = f"block:{name}=other", "another"         # in spite of their labels
        assert report.unlike(a, b).startswith(f"{name} another, not other")
        a = report.read_run(fake_run(tmp_path, "block", 4, 0, BLOCK[0]))

@pytest.mark.parametrize("label, there, baseline, want", [
    ("wav", "block wav", "block", "block"),
    ("block", "block wav", "block", None),
    ("wav:learning_rate=1e-3", "block block:learning_rate=1e-3 block:learning_rate=4e-3", "block",
     "block:learning_rate=1e-3"),
    ("wav:learning_rate=2e-3", "block block:learning_rate=1e-3", "block", "block"),
    ("wav:details=split:learning_rate=1e-3", "block block:learning_rate=1e-3", "block", "block:learning_rate=1e-3"),
    ("block:learning_rate=1e-3", "block:learning_rate=1e-3 wav", "block", None),
    ("block:plain_read=true", "block block:plain_read=true", "block", "block"),
    ("wav", "wav", "block", "block"),                                   # which is not there: the row says so
    ("rd", "rd:rd_control=tied rd block", "rd:rd_control=tied", "rd:rd_control=tied"),
])
def test_which_baseline(label, there, baseline, want):
    assert report.against(label, set(there.split()), baseline) == want

def edit(folder, change) -> None:
    """config.json and the lines of log.jsonl, changed in place."""
    config, log = folder / "config.json", folder / "log.jsonl"
    c, lines = json.loads(config.read_text()), [json.loads(x) for x in log.read_text().splitlines()]
    change(c, lines)
    config.write_text(json.dumps(c))
    log.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))

@pytest.mark.parametrize("change", [
    lambda c, lines: c.update(fingerprint="abc"), lambda c, lines: c["settings"].update(router=None),
    lambda c, lines: c["settings"].update(max_iters="many"), lambda c, lines: lines[1].pop("tokens"),
    lambda c, lines: lines[1].update(val_loss=None), lambda c, lines: lines[2].update(val_loss="1.5"),
    lambda c, lines: lines[2].update(val_loss=math.nan), lambda c, lines: lines.insert(1, "{"),
    lambda c, lines: c.pop("params")], ids=range(9))
def test_whatever_is_damaged_is_one_run(runs, change):
    edit(runs / "wav-4x16-s1", change)
    text = tell(runs)
    assert row(text, "wav")["n"] == "2" and f"{runs / 'wav-4x16-s1'} is damaged: " in text

def test_a_run_is_counted_once(runs):
    """A copy under another name of one seed, or with another number of blocks than its name says, is not a run."""
    shutil.copytree(runs / "wav-4x16-s0", runs / "wav-4x16-s00")
    fake_run(runs, "wav:n_blocks=n_layer", 4, 0, WAV[0], n_blocks=1)
    text = tell(runs)
    assert row(text, "wav")["n"] == "3" and "wav-4x16-s00 is not what it is called" in text
    assert "s0 is not what it is called: it holds wav-4x16-s0 with n_blocks 1. Rename it." in text

def test_one_damaged_folder_is_named_and_the_rest_reported(runs):
    (runs / "rd-4x16-s0").mkdir()
    (runs / "rd-4x16-s0" / "config.json").write_text("{")
    fake_run(runs, "delta", 4, 0, BLOCK[0]).rename(runs / "residual-4x16-s0")
    fake_run(runs, "wav:learning_rate=1e-3", 4, 0, BLOCK[0], learning_rate=5e-3)
    (fake_run(runs, "rd", 4, 1, BLOCK[0]) / "log.jsonl").write_text("")             # has only begun
    text = tell(runs, drawn=True)
    assert row(text, "wav")["n"] == "3"
    assert "rd-4x16-s0 is damaged: its config.json or log.jsonl cannot be read." in text
    assert "residual-4x16-s0 is not what it is called: it holds delta-4x16-s0." in text
    assert "s0 is not what it is called: it holds wav-4x16-s0 with learning_rate 0.005." in text
    assert "rd-4x16-s1 is not finished: iteration 0 of 20." in text
    for path in runs.iterdir():
        shutil.rmtree(path) if path.is_dir() and path.name != "rd-4x16-s0" else None
    with pytest.raises(UserError, match="rd-4x16-s0 is damaged"):
        tell(runs)

# ---------------------------------------------------------------------------------------------------------------------
# what may be missing, pictures

def test_without_pandas_a_sentence_before_anything(runs, monkeypatch):
    monkeypatch.setattr(report, "pd", None)
    with pytest.raises(UserError, match="pip install -r requirements-extra.txt"):
        sweep.main(["--out_dir", str(runs / "new")])
    assert not (runs / "new").exists()

def test_pictures(runs, monkeypatch):
    """What is drawn is what the tables say, and no mean of other seeds is beside the rest."""
    fake_run(runs, "block", 8, 0, BLOCK[0])
    fake_run(runs, "wav", 8, 0, WAV[0])
    fake_run(runs, "rd", 4, 0, WAV[0])                                  # one seed of three
    drawn, save = {}, report.save
    monkeypatch.setattr(report, "save", lambda path, figure: save(path, drawn.setdefault(path.name, figure)))
    tell(runs, drawn=True)
    for name in ("depth.png", "curves.png"):
        assert (runs / name).read_bytes().startswith(b"\x89PNG") and (runs / name).stat().st_size > 10000
    curves, depth = drawn["curves.png"], drawn["depth.png"]
    assert depth.get_suptitle() == "tiny, 2,000 tokens, width 16"
    texts = [t.get_text() for t in depth.legends[0].get_texts()]
    assert texts == ["block", "rd, n = 1", "wav, n = 3, 1"]
    left, right = ({c.get_label().split(",")[0]: c[0].get_ydata() for c in axis.containers} for axis in depth.axes)
    assert left["block"] == pytest.approx([1.5, 1.5]) and len(left["rd"]) == 0
    assert right["wav"] == pytest.approx([-0.25 / 3, -0.2]) and right["rd"] == pytest.approx([-0.2])
    styles = {(c[0].get_marker(), c[0].get_linestyle()) for c in depth.axes[1].containers}
    assert len(styles) == 3                                             # told apart without colour
    below = {line.get_label(): line for line in curves.axes[2].lines}
    assert list(below["wav"].get_xdata()) == [1000, 2000]               # the second half
    assert below["wav"].get_ydata() == pytest.approx([0, -0.25 / 3], abs=1e-12)
    half = 4.302653 * 0.1 / math.sqrt(3)
    band = curves.axes[2].collections[1].get_paths()[0].vertices        # rd's is the first
    assert band[:, 1].max() == pytest.approx(half, rel=1e-5)
