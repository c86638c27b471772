"""sweep.py: cells and flags, and sweeps that skip, fail, go on, share their cells and leave nothing behind."""
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

import train
from lab import report, sweep
from nanodepth.files import UserError
from tiny import ROOT, data_folder, digest, fake_run, go, log, rows_of

SMALL = "--n_head 2 --n_embd 16 --seq_len 16 --batch_size 4 --eval_iters 2 --device cpu".split()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

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
    assert c.settings["rd_control"] == "tied" and c.settings["router_lr"] == 0.1

@pytest.mark.parametrize("flags, message", [
    ("--n_layers 4", "there is no flag --n_layers. Did you mean --"),
    ("--n_layer 4", "--n_layer differs from run to run here: give --depths."),
    ("--router wav", "give --routers"),
    ("--seed 1", "give --seeds"),
    ("--block_size 4", "the context length is --seq_len"),
    ("--init_from resume", "a sweep goes on by itself"),
    ("--routers blok --depths 2", "the cell blok at 2 layers: router is 'blok'; did you mean block?"),
    ("--routers rd:rd_contrl=tied", "there is no flag --rd_contrl. Did you mean --rd_control?"),
    ("--routers rd:tied", "rd:tied: settings of a cell look like rd:rd_control=tied, each of them once."),
    ("--routers block:seed=3", "block:seed=3: seed cannot be a setting of one cell."),
    ("--routers ,", "--routers is ','"),
    ("--depths 2,x", "--depths is '2,x'; it must be whole numbers"),
    ("--depths 2 --n_blocks 3", "n_blocks is 3; it must be from 1 to n_layer (2)"),
    ("--jobs 0", "--jobs is 0"),
    ("--depths 2 --baseline blok", "--baseline is 'blok', and no router is called blok. Did you mean block?"),
    ("--vary learning_rate", "residual:learning_rate=: settings of a cell look like rd:rd_control=tied, each of them"),
    ("--vary rho=1,,", "residual:rho=: settings of a cell look like rd:rd_control=tied"),
    ("--routers block --vary lerning_rate=1", "there is no flag --lerning_rate. Did you mean --learning_rate?"),
    ("--routers block:rho=1 --vary rho=1,2", "block:rho=1:rho=1: settings of a cell look like rd:rd_control=tied, each"),
    ("--routers block --vary seed=1,2", "seed cannot be a setting of one cell."),
    ("--routers block --depths 5 --vary n_blocks=n_layer/2", "5 layers: n_layer/2 is no whole number at 5 layers."),
    ("--routers block --depths 4 --vary n_blocks=n_layer//2", "--n_blocks is 'n_layer//2'; it must be a whole number."),
    ("--routers block --depths 4 --vary n_blocks=__import__('os')", "it must be a whole number."),
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

def cells_of(tmp_path, given=(), **flags):
    s = sweep.SweepConfig(**{"routers": "block", "depths": "4", "seeds": "0", "out_dir": str(tmp_path)} | flags)
    return sweep.plan(s, {"n_embd": 16, "max_iters": 20} | dict(given))

def test_any_setting_is_an_axis(tmp_path):
    cells = cells_of(tmp_path, routers="block,wav:details=split", vary="learning_rate=1e-3,2e-3 n_blocks=n_layer/2,4",
                     depths="4,8")
    assert len(cells) == 2 * 2 * 4 and len({c.folder for c in cells}) == 16
    assert [c.label for c in cells[:2]] == ["block:learning_rate=1e-3:n_blocks=n_layer/2",
                                            "wav:details=split:learning_rate=1e-3:n_blocks=n_layer/2"]
    assert [(c.settings["n_blocks"], c.settings["learning_rate"]) for c in cells[::2]] == [
        (2, 1e-3), (4, 1e-3), (2, 2e-3), (4, 2e-3), (4, 1e-3), (4, 1e-3), (4, 2e-3), (4, 2e-3)]
    labels = {c.label for c in cells}
    assert all(report.against(x, labels, "block") == x.replace("wav:details=split", "block")
               for x in labels if x.startswith("wav"))
    s, _ = sweep.read_settings(["--vary", "a=1", "--vary", "b=2,3"])
    assert s.vary == "a=1 b=2,3"
    (tmp_path / "x.toml").write_text("vary = 'learning_rate=1e-3,2e-3'")
    assert sweep.read_settings([str(tmp_path / "x.toml")])[0].vary == "learning_rate=1e-3,2e-3"

@pytest.mark.parametrize("text, want", [
    ("n_layer/2", "6"), ("n_layer", "12"), ("7", "7"), ("n_layer*2", "n_layer*2"), ("n_layer/0", "n_layer/0"),
    ("n_layer/2/2", "n_layer/2/2"), ("tied", "tied")])
def test_values_by_depth(text, want):
    assert sweep.reckoned(text, 12) == want

def test_a_folder_s_name_gives_its_label_back(tmp_path):
    for label, own in (("block", {}), ("rd:rd_control=tied:router_lr=0.1", {"rd_control": "tied", "router_lr": 0.1}),
                       ("wav:n_blocks=n_layer/2", {"n_blocks": 2}), ("Größe", {}), ("wav:rho=1e-3", {"rho": 0.001})):
        name = report.folder_name(label, 4, 16, 3)
        assert not set(name) & set('<>:"/\\|?* ')                       # Windows would refuse them
        path = fake_run(tmp_path, label, 4, 3, [3.0, 2.0], **own)
        if path.name != name:
            path.rename(tmp_path / name)
        assert report.read_run(tmp_path / name).label == label
    assert report.folder_name("rd:rd_control=tied", 12, 64, 0) == "rd+rd_control=tied-12x64-s0"

def test_a_router_s_file_runs_once_in_a_plan(tmp_path):
    (tmp_path / "mine.py").write_text(f"""
open({str(tmp_path / "ran")!r}, "a").write("x")
from model import Residual
class Mine(Residual): pass
""")
    mine = f"{tmp_path / 'mine.py'}:Mine"
    cells = cells_of(tmp_path, routers=f"block,{mine},{mine}:norm_eps=1e-5", depths="2,4", seeds="0,1")
    assert len(cells) == 12 and (tmp_path / "ran").read_text() == "x"

@pytest.fixture
def there(tmp_path, data):
    """A cell whose run is there already, as today's code and data would make it."""
    [cell] = cells_of(tmp_path, {"dataset": data})
    facts = train.data_facts(train.open_data(data))
    router, model = train.code_digests("block", sweep.ROUTERS, train.CODE, None)
    now = {"data": facts["digest"], "router": router, "model": model, "torch": sweep.torch.__version__}
    def write(mark=(), **settings):
        fake_run(tmp_path, "block", 4, 0, [3.0, 2.0, 1.5], dataset=data, **{"tokens_per_step": 1024} | settings,
                 mark=None if mark is None else now | dict(mark))
        return cells_of(tmp_path, {"dataset": data, "device": "cpu"}, seeds="0,1")
    return write

def test_a_run_without_a_checkpoint_is_done(there):
    """config.json and log.jsonl are enough, as in results/."""
    assert [c.seed for c in sweep.todo(there())] == [1]

@pytest.mark.parametrize("mark, settings, message", [
    ({"router": "0" * 16}, {}, "code of the router 00000000, not "),
    (None, {}, "has no fingerprint: it was trained by an older version"),
    ({"data": "0" * 32}, {}, "data 00000000, not "),
    ({"start": "0" * 32}, {}, "starting weights a checkpoint, not none. It is another run"),
    ({"dtype": "bfloat16"}, {}, "dtype bfloat16, not float32."),
    ({"device": "cuda"}, {}, "device cuda, not cpu."),
    ({"torch": "2.12.0"}, {}, "torch 2.12.0, not "),
    ({"model": "0" * 16}, {}, "model.py 00000000, not "),               # edited since
    ({}, {"learning_rate": 0.5}, "learning_rate 0.5, not 0.002. It is another run than this cell: give its settings, or"),
    ({}, {"tokens_per_step": 512}, "512 tokens a step, not 1024."),     # another --batch_size
], ids=["router", "older", "data", "start", "dtype", "device", "torch", "model", "setting",
        "batch"])
def test_a_run_that_is_another_is_refused(there, mark, settings, message):
    with pytest.raises(UserError) as e:
        sweep.todo(there(mark, **settings)[:1])
    assert message in str(e.value) and "block-4x16-s0" in str(e.value)

def test_each_job_has_its_card_or_its_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7), raising=False)
    def env(slot, jobs, device="auto"):
        found = sweep.place(slot, jobs, device)
        return found.get("CUDA_VISIBLE_DEVICES"), found.get("OMP_NUM_THREADS")
    assert [env(i, 3) for i in range(3)] == [("0", "2"), ("1", "2"), ("0", "2")]
    assert env(1, 2, "cpu") == (None, "3") and env(1, 2, "cuda:1") == (None, "3") and env(0, 1) == (None, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,MIG-a")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert [env(i, 2) for i in range(2)] == [("5", "1"), ("MIG-a", "1")]

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

# ---------------------------------------------------------------------------------------------------------------------
# sweeps that run

@pytest.mark.slow                       # processes
def test_a_failed_cell_is_not_fatal_and_a_done_one_is_skipped(data, tmp_path, capsys):
    flags = ["--dataset", data, "--depths", "1", "--seeds", "3", "--out_dir", str(tmp_path / "s"), *SMALL]
    with pytest.raises(UserError) as e:
        sweep.main(["--routers", "delta:vocab_size=10,block", "--max_iters", "2", "--jobs", "2", *flags])
    assert "1 of 2 runs failed: delta+vocab_size=10-1x16-s3: --vocab_size is 10; the vocabulary of" in str(e.value)
    kept = tmp_path / "s" / "delta+vocab_size=10-1x16-s3" / "output.txt"
    assert f"(exit code 2, {kept})" in str(e.value) and "train.py: --vocab_size is 10" in kept.read_text()
    assert len(str(e.value).splitlines()) == 2
    run = tmp_path / "s" / "block-1x16-s3"
    out = capsys.readouterr().out
    assert "block-1x16-s3: val loss" in out and "delta+vocab_size=10-1x16-s3 failed: --vocab_size" in out
    config = json.loads((run / "config.json").read_text())["settings"]
    assert (config["router"], config["n_layer"], config["seed"], config["max_iters"]) == ("block", 1, 3, 2)
    assert "| block | 1 | 128 | 3 |" in (tmp_path / "s" / "results.md").read_text()

    assert {p.name for p in run.iterdir()} == {"config.json", "log.jsonl", "ckpt.pt", "best.pt"}
    before = {p: p.stat().st_mtime_ns for p in run.iterdir()}
    sweep.main(["--routers", "block", "--max_iters", "2", *flags])
    assert "1 of 1 runs are there already" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in run.iterdir()}
    with pytest.raises(UserError, match="max_iters 2, not 3. It is another run than this cell"):
        sweep.main(["--routers", "block", "--max_iters", "3", *flags])

@pytest.mark.slow                       # processes
def test_an_interrupted_sweep_goes_on(data, tmp_path, capsys):
    flags = ["--routers", "block", "--depths", "1", "--seeds", "0", "--dataset", data, "--out_dir", str(tmp_path / "s"),
             "--max_iters", "2000", "--eval_interval", "1500", "--log_interval", "10", *SMALL]
    run = tmp_path / "s" / "block-1x16-s0"
    signal.signal(signal.SIGINT, signal.default_int_handler)            # a shell's background job ignores it, and so would we

    def interrupt():
        for _ in range(2000):
            if sweep.last_line(run).get("iter", 0) >= 10:
                return os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="stopped: 0 of 1 runs are done, and what was running has saved"):
        sweep.main(flags)
    thread.join()
    reached = log(run)[-1]["iter"]
    assert 10 <= reached < 2000 and (run / "ckpt.pt").exists()
    sweep.main(flags)
    assert "[1/1] block-1x16-s0: val loss" in capsys.readouterr().out
    assert [x["iter"] for x in log(run) if "val_loss" in x] == [0, 1500, 2000]
    assert not list(run.glob("old*"))                                   # it was resumed, not begun again
    assert json.loads((run / "config.json").read_text())["fingerprint"]["changed"] == []    # so it is a pair still

SWEEP = [sys.executable, "-m", "lab.sweep"]

def waited(true, seconds=90):
    """Until true() holds: is it so in time?"""
    end = time.time() + seconds
    while not (found := true()) and time.time() < end:
        time.sleep(0.1)
    return found

def processes_with(word) -> list[str]:
    """The command lines of all processes that name a path, on Linux."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text().replace("\0", " "))
        except OSError:
            pass
    return [line for line in found if str(word) in line]

@pytest.mark.slow                       # processes
@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="Linux")
def test_a_killed_sweep_leaves_no_orphans(data, tmp_path):
    """kill -9: what was running saves and ends; the settings of the report were stored at the start; the bar showed the
    loss of the run; the same command goes on."""
    import pty
    import termios
    out = tmp_path / "s"
    flags = ["--routers", "block,wav", "--depths", "1", "--seeds", "0", "--dataset", data, "--out_dir", out,
             "--jobs", "2", "--baseline", "wav", "--max_iters", "20000", "--eval_interval", "20000",
             "--log_interval", "10", *SMALL]
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 200))
    process = subprocess.Popen([*SWEEP, *map(str, flags)], cwd=ROOT, stderr=child, stdout=subprocess.DEVNULL)
    os.close(child)
    shown = []
    def read():
        with contextlib.suppress(OSError):
            while True:
                shown.append(os.read(parent, 4096))
    threading.Thread(target=read, daemon=True).start()
    try:
        assert waited(lambda: all(sweep.last_line(out / f"{x}-1x16-s0").get("iter", 0) >= 20 for x in ("block", "wav")))
        assert waited(lambda: b"block-1x16-s0 loss " in b"".join(shown))
        assert len(processes_with(out)) == 3
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    assert waited(lambda: not processes_with(out))
    assert json.loads((out / "sweep.json").read_text())["baseline"] == "wav"
    reached = [torch.load(out / f"{x}-1x16-s0" / "ckpt.pt", weights_only=True)["iter"] for x in ("block", "wav")]
    assert all(20 <= i < 20000 for i in reached)

@pytest.mark.slow                       # processes
def test_two_sweeps_share_the_cells(data, tmp_path):
    """Each cell is run once, by one of them; a run that was started by hand is waited for; both end with all tables."""
    out = tmp_path / "s"
    flags = ["--dataset", data, "--max_iters", "300", "--eval_interval", "100", *SMALL]
    by_hand = subprocess.Popen([sys.executable, ROOT / "train.py", "--router", "block", "--n_layer", "1", "--seed", "0",
                                "--out_dir", out / "block-1x16-s0", *flags], stdout=subprocess.DEVNULL)
    assert waited(lambda: (out / "block-1x16-s0" / "config.json").exists())
    command = [*SWEEP, "--routers", "block,wav", "--depths", "1", "--seeds", "0,1", "--out_dir", out, *flags]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert by_hand.wait() == 0 and [process.returncode for process in both] == [0, 0], said
    assert all("failed" not in text and "| wav | block | 1 | 19,200 | 2 |" in text for text in said)
    trained = [text.count(": val loss") for text in said]
    assert sum(trained) in (3, 4)                                       # by hand one, unless it had ended before
    assert {p.name for p in out.glob("*/*")} == {"config.json", "log.jsonl", "ckpt.pt", "best.pt"}

def test_cells_that_start_from_other_runs(data, tmp_path, monkeypatch, capsys):
    """{seed} in --init_from is the cell's own, and iteration 0 says what the weights are worth with each router."""
    for seed in (0, 1):
        go("--dataset", data, "--router", "residual", "--seed", seed, "--max_iters", 5, "--out_dir",
           tmp_path / f"b{seed}")
    flags = ["--routers", "residual,block,delta:route_gate=0", "--depths", "2", "--seeds", "0,1",
             "--baseline", "residual", "--max_iters", "0", "--dataset", data, "--out_dir", str(tmp_path / "s"), *SMALL]
    monkeypatch.setattr(sweep, "subprocess", types.SimpleNamespace(Popen=InProcess, PIPE=None, STDOUT=None))
    sweep.main([*flags, "--init_from", str(tmp_path / "b{seed}")])
    text = capsys.readouterr().out
    ends = [log(tmp_path / f"b{seed}")[-1]["val_loss"] for seed in (0, 1)]
    rows = rows_of(text, "Val loss: mean")[:3]                           # after 0 tokens
    assert [r[:3] for r in rows] == [[x, "2", "0"] for x in ("residual", "block", "delta:route_gate=0")]
    assert rows[0][5] == rows[2][5] == f"{statistics.mean(ends):.4f} ± {statistics.stdev(ends):.4f}"
    block, delta = rows_of(text, "Val loss minus")[:2]
    assert delta[3:6] == ["0", "2", "+0.0000"]                          # a gate of 0 changes nothing
    assert block[4] == "2" and block[5] != "+0.0000"

    with pytest.raises(UserError, match="-2x16-s0: other starting weights"):
        sweep.main([*flags, "--init_from", str(tmp_path / "b1")])
    with pytest.raises(UserError, match="the cell residual at 2 layers: --init_from is .*b2"):
        sweep.main([*flags, "--seeds", "2", "--init_from", str(tmp_path / "b{seed}")])

class InProcess:
    """A process of a sweep, run at once and in this one."""
    def __init__(self, command, **kwargs):
        train.main(command[2:])
        self.returncode, self.stdin = 0, types.SimpleNamespace(close=lambda: None)

    def poll(self):
        return 0
