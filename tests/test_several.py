"""Several processes on one batch are one, in losses and checkpoint; a run killed at any moment goes on bit for bit."""
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import train
from tiny import ROOT, SIZE, checkpoint, data_folder, go, log, same_weights

pytestmark = pytest.mark.slow
ROUTERS = ["block", "rd", "delta", "delta_block", "wav"]
FLAGS = ["--batch_size", 4, "--gradient_accumulation_steps", 2, "--log_interval", 1, "--warmup_iters", 0,
         "--lr_decay_iters", 10]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

def torchrun(*flags, n=2, code=0, env={}):
    """train.py in n processes, as a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}",
               str(ROOT / "train.py")]
    r = subprocess.run([*command, *map(str, flags)], capture_output=True, text=True, timeout=300,
                       env={**os.environ, **env})
    assert bool(r.returncode) == bool(code), r.stderr
    return r

def losses(out):
    return [(x["iter"], x.get("loss", x.get("val_loss"))) for x in log(out)]

def sentences(r):
    """What train.py itself has said on stderr; torchrun has a report of its own."""
    return [line for line in r.stderr.splitlines() if line.startswith("train.py: ")]

@pytest.mark.parametrize("router", ROUTERS)
def test_two_processes_are_one(data, tmp_path, router):
    """DDP, fully_shard and one process: the same losses to 1e-5 over ten steps (training amplifies float32's rounding),
    one log, and a checkpoint that each of them resumes."""
    common = [*SIZE, "--dataset", data, "--router", router, *FLAGS, "--eval_interval", 5]
    ways = {"one": [], "ddp": [], "fsdp": ["--fsdp"]}
    for name, flags in ways.items():
        command = [*common, *flags, "--out_dir", tmp_path / name, "--max_iters", 6]
        r = torchrun(*command) if name != "one" else train.main(list(map(str, command)))
        if r:
            assert r.stdout.count("parameters") == r.stdout.count("done: val loss") == 1 and "2 processes" in r.stdout
            assert checkpoint(tmp_path / name)["processes"] == 2
    one = losses(tmp_path / "one")
    for name in ("ddp", "fsdp"):
        assert [i for i, _ in losses(tmp_path / name)] == [i for i, _ in one]
        assert [x for _, x in losses(tmp_path / name)] == pytest.approx([x for _, x in one], rel=1e-5)
        a, b = checkpoint(tmp_path / "one"), checkpoint(tmp_path / name)
        assert a["model"].keys() == b["model"].keys() and a["tokens"] == b["tokens"]
        assert all(torch.allclose(b["model"][k], v, atol=2e-4) for k, v in a["model"].items())
        state = lambda c: [{k: v.shape for k, v in s.items()} for s in c["optimizer"]["state"].values()]
        assert state(a) == state(b)
    # each is resumed by another
    go(*common, "--out_dir", tmp_path / "whole", "--max_iters", 10)
    whole = losses(tmp_path / "whole")
    go_on = ["--init_from", "resume", "--max_iters", 10]
    torchrun(*go_on, "--out_dir", tmp_path / "one", "--fsdp")
    train.main([*map(str, go_on), "--out_dir", str(tmp_path / "fsdp"), "--fsdp", "false"])
    torchrun(*go_on, "--out_dir", tmp_path / "ddp")
    for name in ways:
        end = [(i, x) for i, x in losses(tmp_path / name) if i > 6]
        assert [x for _, x in end] == pytest.approx([x for i, x in whole if i > 6], rel=1e-5), name

@pytest.mark.parametrize("flags", [["--rd_control", "tied"], ["--rd_control", "frozen_v"], ["--rd_control", "average"],
                                   ["--router", "wav", "--details", "none"], ["--router", "rezero"],
                                   ["--router", "attnres"], ["--recompute", "--dropout", "0.1"],
                                   ["--dtype", "bfloat16"], ["--dtype", "float16"]],
                         ids=lambda flags: "_".join(flags).replace("--", ""))
@pytest.mark.parametrize("fsdp", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_other_shapes_train_too(data, tmp_path, flags, fsdp):
    refused = bool(fsdp) and "none" in flags                            # an empty detail_bias has no shards
    r = torchrun(*SIZE, "--dataset", data, "--router", "rd", *flags, *fsdp, *FLAGS, "--max_iters", 2, "--out_dir",
                 tmp_path, code=refused)
    if refused:
        assert len(sentences(r)) == 1 and "take --router block" in r.stderr
        return
    assert checkpoint(tmp_path)["iter"] == 2

def test_a_failed_process_ends_all_with_one_sentence(data, tmp_path):
    common = [*SIZE, "--dataset", data, *FLAGS, "--out_dir", tmp_path / "run"]
    r = torchrun(*common, "--n_layers", 3, code=1)
    assert sentences(r) == ["train.py: there is no flag --n_layers. Did you mean --n_layer?"]
    r = torchrun(*common, n=3, code=1)
    assert sentences(r) == ["train.py: --batch_size times --gradient_accumulation_steps is 8 windows a step, which "
                            "3 processes cannot share evenly."] and not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")                                  # only the first process sees this one
    r = torchrun(*common, "--out_dir", tmp_path / "file" / "run", code=1)
    assert len(sentences(r)) == 1 and str(tmp_path / "file") in r.stderr

@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_all(data, tmp_path, killed):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py",
               *SIZE, "--dataset", data, *FLAGS, "--out_dir", out, "--max_iters", 10**6, "--eval_interval", 20]
    p = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in p.stdout:
        if line.startswith("iter 30/"):
            break
    ranks = subprocess.run(["ps", "--ppid", str(p.pid), "-o", "pid="], capture_output=True, text=True).stdout.split()
    by_rank = {}
    for pid in ranks:
        env = dict(x.split("=", 1) for x in open(f"/proc/{pid}/environ").read().split("\0") if "=" in x)
        by_rank[env.get("RANK")] = int(pid)
    os.kill(by_rank[str(killed)], signal.SIGKILL)
    error = p.communicate(timeout=100)[1]
    said = [line for line in error.splitlines() if line.startswith("train.py: ")]
    assert p.returncode and said == [
        "train.py: another process of this run has ended, killed perhaps, or out of memory; this ends the run. "
        "Its last checkpoint is whole: go on with --init_from resume."]
    assert checkpoint(out)["iter"] >= 20

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_once(data, tmp_path, number):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py",
               *SIZE, "--dataset", data, *FLAGS, "--out_dir", out, "--max_iters", 10**6, "--eval_interval", 10**6]
    p = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    for line in p.stdout:
        if line.startswith("iter 10/"):
            break
    p.send_signal(number)
    error = p.communicate(timeout=100)[1]
    at = checkpoint(out)["iter"]
    said = [line for line in error.splitlines() if line.startswith("train.py: ")]
    assert said == [f"train.py: stopped at iteration {at} of 1000000, and saved. To go on:"] and at >= 10
    r = torchrun("--init_from", "resume", "--out_dir", out, "--max_iters", at + 2)
    assert f"from iteration {at}" in r.stdout

# ---------------------------------------------------------------------------------------------------------------------
# kills

def begin(flags):
    os.setsid()
    sys.stdout = sys.stderr = open(os.devnull, "w")
    train.main(list(map(str, flags)))

def test_a_hundred_kills(data, tmp_path, monkeypatch):
    """kill -9 at a hundred random moments, in runs that go on: each ends bit for bit as if never stopped."""
    torch.set_num_threads(1)
    flags = [*SIZE, "--dataset", data, "--router", "wav", "--dropout", 0.2, "--max_iters", 30, "--eval_interval", 3,
             "--log_interval", 2]
    go(*flags, "--out_dir", tmp_path / "whole")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "tests"))))
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["train"])
    took, kills, k, draw = None, 0, 0, random.Random(0)
    while kills < 100:
        k += 1
        out = tmp_path / f"run{k}"
        while True:
            resumed = ["--init_from", "resume"] if (out / "ckpt.pt").exists() else []
            began = time.time()
            p = processes.Process(target=begin, args=([*flags, "--out_dir", out, *resumed],))
            p.start()
            p.join(None if took is None else draw.uniform(0, took))
            if p.exitcode == 0:
                took = took or time.time() - began
                break
            assert p.exitcode is None, p.exitcode
            p.kill()
            p.join()
            kills += 1
        assert same_weights(out, tmp_path / "whole") and log(out) == log(tmp_path / "whole")
        best = [torch.load(o / "best.pt", weights_only=True) for o in (out, tmp_path / "whole")]
        assert best[0]["iter"] == best[1]["iter"] and best[0]["best"] == best[1]["best"]
        files = sorted(x.name for x in out.iterdir() if not x.name.startswith("old"))
        assert files == ["best.pt", "ckpt.pt", "config.json", "log.jsonl"]
