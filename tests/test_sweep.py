"""sweep.py: its statistics by hand, its tables against its CSV, and sweeps that skip, fail and go on."""
import csv
import json
import math
import os
import signal
import statistics
import sys
import threading
import time
import types

import pytest

import train
from lab import sweep
from nanodepth.files import UserError
from tiny import ROOT, data_folder, go, log

SMALL = "--n_head 2 --n_embd 16 --seq_len 16 --batch_size 4 --eval_iters 2 --device cpu".split()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

def fake(folder, label, depth, seed, losses, max_iters=None, **settings):
    """A run's folder as train.py leaves it: an evaluation every 10 steps of 100 tokens, one training line."""
    iters = [10 * k for k in range(len(losses))]
    path = folder / f"{label.replace(':', '+')}-{depth}x16-s{seed}"
    path.mkdir(parents=True)
    s = {"router": label.split(":")[0], "n_layer": depth, "seed": seed, "max_iters": max_iters or iters[-1]} | settings
    (path / "config.json").write_text(json.dumps({"settings": s, "params": 1000 + depth}))
    lines = [{"iter": i, "tokens": 100 * i, "val_loss": x, "val_bpb": x / math.log(2)} for i, x in zip(iters, losses)]
    lines += [{"iter": iters[-1], "tokens": 100 * iters[-1], "loss": 1.0, "lr": 0.1, "tok_per_s": 50.0 + seed,
               "peak_mem_mb": 300.0 + seed, "elapsed_s": 7.0}]
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

BLOCK = [[3.0, 2.0, 1.5], [3.1, 2.2, 1.6], [2.9, 1.9, 1.4]]
# wav minus block: -0.2, -0.1, +0.05 at the end; +0.1, 0, -0.1 half way
WAV = [[3.0, 2.1, 1.3], [3.1, 2.2, 1.5], [2.9, 1.8, 1.45]]

@pytest.fixture
def runs(tmp_path):
    for label, losses in (("wav", WAV), ("block", BLOCK)):
        for seed in (2, 0, 1):
            fake(tmp_path, label, 4, seed, losses[seed])
    fake(tmp_path, "rd:rd_control=tied", 4, 0, BLOCK[0], rd_control="tied")
    return tmp_path

def rows_of(text, title):
    """The cells of the table under a line that begins with `title`."""
    part = text[text.index(title):].split("\n\n")[1]
    return [[x.strip() for x in line.strip("|").split("|")] for line in part.splitlines()[2:]]

# ---------------------------------------------------------------------------------------------------------------------
# statistics

@pytest.mark.parametrize("df, p, want", [
    (1, 0.975, 12.7062), (2, 0.975, 4.30265), (3, 0.975, 3.18245), (4, 0.975, 2.77645), (5, 0.975, 2.57058),
    (9, 0.975, 2.26216), (30, 0.975, 2.04227), (120, 0.975, 1.97993), (1, 0.75, 1.0), (5, 0.95, 2.01505),
    (4, 0.995, 4.60409)])
def test_t_quantile(df, p, want):
    assert sweep.t_quantile(df, p) == pytest.approx(want, abs=2e-5 * want)

def test_paired_by_hand():
    p = sweep.paired([-0.1, -0.2, -0.3])                                # mean -0.2, standard deviation 0.1
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert p["n"] == p["wins"] == 3 and p["mean"] == pytest.approx(-0.2)
    assert p["interval"] == pytest.approx((-0.2 - half, -0.2 + half), rel=1e-6)
    assert p["perplexity"] == pytest.approx(100 * (math.exp(-0.2) - 1))
    p = sweep.paired([0.0])
    assert p["interval"] is None and p["wins"] == 0 and p["n"] == 1     # a tie is no win

def test_tables_and_csv(runs, capsys):
    sweep.main(["--report", str(runs), "--at_tokens", "1k,5k"])
    text = (runs / "results.md").read_text()
    assert text in capsys.readouterr().out
    with open(runs / "results.csv") as f:
        rows = list(csv.DictReader(f))
    assert [(r["router"], r["seed"]) for r in rows] == [
        *(("block", s) for s in "012"), ("rd:rd_control=tied", "0"), *(("wav", s) for s in "012")]
    assert list(rows[0]) == sweep.COLUMNS
    first = {"router": "block", "depth": "4", "seed": "0", "params": "1004", "tokens": "2000", "val_loss": "1.5",
             "val_bpb": str(1.5 / math.log(2)), "tok_per_s": "50.0", "peak_mem_mb": "300.0", "elapsed_s": "7.0",
             "run": "block-4x16-s0"}
    assert rows[0] == first

    # the tables, recomputed from the CSV
    loss = {(r["router"], r["seed"]): float(r["val_loss"]) for r in rows}
    block, wav = ([loss[label, str(seed)] for seed in range(3)] for label in ("block", "wav"))
    assert rows_of(text, "Mean ±")[0] == ["block", "4", "3", "1,004",
                                          f"{statistics.mean(block):.4f} ± {statistics.stdev(block):.4f}",
                                          "2.1640 ± 0.1443", "51", "301"]
    assert rows_of(text, "Mean ±")[1][4] == "1.5000 ± -"                # one seed has no deviation
    d = [a - b for a, b in zip(wav, block)]
    mean, half = sum(d) / 3, 4.302653 * statistics.stdev(d) / math.sqrt(3)
    assert rows_of(text, "Against `block`") == [
        ["rd:rd_control=tied", "4", "1", "+0.0000", "-", "+0.00 %", "0 of 1"],
        ["wav", "4", "3", f"{mean:+.4f}", f"{mean - half:+.4f} .. {mean + half:+.4f}",
         f"{100 * math.expm1(mean):+.2f} %", "2 of 3"]]
    half = 4.302653 * 0.1 / math.sqrt(3)                                # half way: +0.1, 0, -0.1
    assert rows_of(text, "The same on the way")[1] == [
        "wav", "4", "1,000", "3", "+0.0000", f"{-half:+.4f} .. {half:+.4f}", "+0.00 %", "1 of 3"]
    assert len(rows_of(text, "The same on the way")) == 2               # nothing was evaluated near 5,000 tokens
    with open(runs / "evaluations.csv") as f:
        assert len(list(csv.DictReader(f))) == 7 * 3

def test_report_keeps_what_the_sweep_compared(runs):
    (runs / "sweep.json").write_text(json.dumps({"baseline": "wav", "at_tokens": "all"}))
    sweep.main(["--report", str(runs)])
    text = (runs / "results.md").read_text()
    assert "Against `wav`" in text and len(rows_of(text, "The same on the way")) == 2 * 2
    sweep.main(["--report", str(runs), "--baseline", "delta"])
    assert "No pairs" in (runs / "results.md").read_text()

def test_what_is_no_pair_is_said(runs):
    fake(runs, "rd", 4, 0, BLOCK[0], max_iters=50)
    with open(fake(runs, "delta", 4, 0, BLOCK[0], learning_rate=0.5) / "log.jsonl", "a") as f:
        f.write('{"iter": 30, "tok')                                    # cut short by a kill
    sweep.main(["--report", str(runs)])
    text = (runs / "results.md").read_text()
    assert "rd-4x16-s0 is not finished: iteration 20 of 50." in text and "| rd |" not in text
    assert "The runs differ in learning_rate: 0.5 in delta-4x16-s0; None in block-4x16-s0 and 7 more." in text
    assert "rd_control" not in text.split("The runs differ")[1]         # tied is the cell's own, and in its name

def test_pictures(runs, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    fake(runs, "wav", 8, 0, WAV[0])
    sweep.main(["--report", str(runs)])
    for name in ("depth.png", "curves.png"):
        assert (runs / name).read_bytes().startswith(b"\x89PNG") and (runs / name).stat().st_size > 10000
    assert "curves.png, depth.png" in capsys.readouterr().out

def test_tables_without_matplotlib(runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sweep.main(["--report", str(runs)])
    assert "For pictures: pip install matplotlib" in capsys.readouterr().out
    assert (runs / "results.md").exists() and not list(runs.glob("*.png"))

# ---------------------------------------------------------------------------------------------------------------------
# cells and flags

def test_cells(tmp_path):
    given = {"max_iters": 7, "n_embd": 16, "compile": False, "min_lr": None}
    s = sweep.SweepConfig("block,rd:rd_control=tied:router_lr=0.1,block", "2,4", "1,0", out_dir=str(tmp_path))
    cells = sweep.plan(s, given)
    assert [(c.seed, c.depth, c.label) for c in cells] == [
        (seed, depth, label) for seed in (1, 0) for depth in (2, 4)
        for label in ("block", "rd:rd_control=tied:router_lr=0.1")]
    c = cells[1]
    assert c.folder == tmp_path / "rd+rd_control=tied+router_lr=0.1-2x16-s1"
    assert c.flags == ["--max_iters=7", "--n_embd=16", "--compile=false", "--min_lr=none", "--rd_control=tied",
                       "--router_lr=0.1", "--router=rd", "--n_layer=2", "--seed=1"]
    assert c.settings["rd_control"] == "tied" and c.settings["router_lr"] == 0.1 and c.work == 14

@pytest.mark.parametrize("flags, message", [
    ("--n_layers 4", "there is no flag --n_layers. Did you mean --"),
    ("--n_layer 4", "--n_layer differs from run to run here: give --depths."),
    ("--router wav", "give --routers"),
    ("--seed 1", "give --seeds"),
    ("--block_size 4", "the context length is --seq_len"),
    ("--init_from resume", "a sweep goes on by itself"),
    ("--routers blok --depths 2", "the cell blok at 2 layers: router is 'blok'; did you mean block?"),
    ("--routers rd:rd_contrl=tied", "there is no flag --rd_contrl. Did you mean --rd_control?"),
    ("--routers rd:tied", "rd:tied: tied is no setting; one looks like rd:rd_control=tied."),
    ("--routers block:seed=3", "block:seed=3: seed cannot be a setting of one cell."),
    ("--routers ,", "--routers is ','"),
    ("--depths 2,x", "--depths is '2,x'; it must be whole numbers"),
    ("--depths 2 --n_blocks 3", "n_blocks is 3; it must be from 1 to n_layer (2)"),
    ("--jobs 0", "--jobs is 0"),
    ("--at_tokens soon", "--at_tokens is 'soon'"),
    ("--max_iters x", "--max_iters is 'x'; it must be a whole number."),
    ("--dataset nowhere", "there is no data set data/nowhere"),
    ("--report nowhere", "there is no folder nowhere."),
    ("nowhere.toml", "there is no config file nowhere.toml."),
])
def test_wrong_flags(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as e:
        sweep.main(flags.split())
    assert message in str(e.value) and len(str(e.value).splitlines()) <= 2
    assert os.listdir(tmp_path) == []

@pytest.mark.parametrize("name, cells, milestones", [("sweep_cpu", 45, None), ("sweep_wav_gpu", 45, None),
                                                     ("sweep_rd_gpu", 25, [0.25e9, 0.5e9, 1e9, 2e9])])
def test_configs(name, cells, milestones):
    """Every cell of the files in configs/ is one that train.py takes, and every milestone is evaluated."""
    s, given = sweep.read_settings([str(ROOT / "configs" / f"{name}.toml")])
    planned = sweep.plan(s, given)
    assert len(planned) == len({c.folder for c in planned}) == cells
    assert any(c.label == s.baseline for c in planned)
    c = planned[0].settings
    step = c["batch_size"] * c["gradient_accumulation_steps"] * c["seq_len"]
    for tokens in milestones or []:
        assert abs(round(tokens / step / c["eval_interval"]) * c["eval_interval"] * step - tokens) < 0.01 * tokens
    assert sweep.milestones(s.at_tokens) == milestones or milestones is None

# ---------------------------------------------------------------------------------------------------------------------
# sweeps that run

@pytest.mark.slow                       # processes
def test_a_failed_cell_is_not_fatal_and_a_done_one_is_skipped(data, tmp_path, capsys):
    flags = ["--dataset", data, "--depths", "1", "--seeds", "3", "--out_dir", str(tmp_path / "s"), *SMALL]
    with pytest.raises(UserError) as e:
        sweep.main(["--routers", "delta:vocab_size=10,block", "--max_iters", "2", "--jobs", "2", *flags])
    assert "1 of 2 runs failed: delta+vocab_size=10-1x16-s3: --vocab_size is 10; the vocabulary of" in str(e.value)
    assert len(str(e.value).splitlines()) == 2
    run = tmp_path / "s" / "block-1x16-s3"
    out = capsys.readouterr().out
    assert "block-1x16-s3: val loss" in out and "delta+vocab_size=10-1x16-s3 failed: --vocab_size" in out
    config = json.loads((run / "config.json").read_text())["settings"]
    assert (config["router"], config["n_layer"], config["seed"], config["max_iters"]) == ("block", 1, 3, 2)
    assert "| block | 1 | 1 |" in (tmp_path / "s" / "results.md").read_text()

    before = {p: p.stat().st_mtime_ns for p in run.iterdir()}
    sweep.main(["--routers", "block", "--max_iters", "2", *flags])
    assert "1 of 1 runs are there already" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in run.iterdir()}
    with pytest.raises(UserError, match="was trained with --max_iters=2, not 3. Give that flag, or another --out_dir."):
        sweep.main(["--routers", "block", "--max_iters", "3", *flags])

@pytest.mark.slow                       # processes
def test_an_interrupted_sweep_goes_on(data, tmp_path, capsys):
    flags = ["--routers", "block", "--depths", "1", "--seeds", "0", "--dataset", data, "--out_dir", str(tmp_path / "s"),
             "--max_iters", "300", "--eval_interval", "250", "--log_interval", "10", *SMALL]
    run = tmp_path / "s" / "block-1x16-s0"

    def interrupt():
        for _ in range(2000):
            if sweep.steps_done(run) >= 10:
                return os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="stopped: 0 of 1 runs are done, and what was running has saved"):
        sweep.main(flags)
    thread.join()
    reached = log(run)[-1]["iter"]
    assert 10 <= reached < 300 and (run / "ckpt.pt").exists()
    sweep.main(flags)
    assert "[1/1] block-1x16-s0: val loss" in capsys.readouterr().out
    assert [x["iter"] for x in log(run) if "val_loss" in x] == [0, 250, 300]
    assert not list(run.glob("old*"))                                   # it was resumed, not begun again

def test_cells_that_start_from_other_runs(data, tmp_path, monkeypatch, capsys):
    """{seed} in --init_from is the cell's own, and iteration 0 says what the weights are worth with each router."""
    for seed in (0, 1):
        go("--dataset", data, "--router", "residual", "--seed", seed, "--max_iters", 5, "--out_dir", tmp_path / f"b{seed}")
    flags = ["--routers", "residual,block,delta:route_gate=0", "--depths", "2", "--seeds", "0,1", "--baseline", "residual",
             "--max_iters", "0", "--dataset", data, "--out_dir", str(tmp_path / "s"), *SMALL]
    monkeypatch.setattr(sweep, "subprocess", types.SimpleNamespace(Popen=InProcess, DEVNULL=None))
    sweep.main([*flags, "--init_from", str(tmp_path / "b{seed}")])
    text = capsys.readouterr().out
    ends = [log(tmp_path / f"b{seed}")[-1]["val_loss"] for seed in (0, 1)]
    rows = rows_of(text, "Iteration 0, before any training")
    assert [r[0] for r in rows] == ["residual", "block", "delta:route_gate=0"]
    assert rows[0][2] == rows[2][2] == f"{statistics.mean(ends):.4f} ± {statistics.stdev(ends):.4f}"
    assert rows[2][3:5] == ["2", "+0.0000"]                             # a gate of 0 changes nothing
    assert rows[1][4] not in ("+0.0000", "")

    with pytest.raises(UserError, match="did not start from the weights of --init_from"):
        sweep.main([*flags, "--init_from", str(tmp_path / "b1")])
    with pytest.raises(UserError, match="the cell residual at 2 layers: --init_from is .*b2"):
        sweep.main([*flags, "--seeds", "2", "--init_from", str(tmp_path / "b{seed}")])
    with pytest.raises(UserError, match="the cell residual at 3 layers: .*b0 has 2 layers."):
        sweep.main([*flags, "--depths", "3", "--init_from", str(tmp_path / "b{seed}")])

class InProcess:
    """A process of a sweep, run at once and in this one."""
    def __init__(self, command, **kwargs):
        train.main(command[2:])
        self.returncode = 0

    def poll(self):
        return 0
