"""train.py: what it learns, what it writes, and that a stopped run goes on as if it had never been stopped."""
import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from nanodepth.files import UserError
from nanodepth.runs import claim
from nanodepth.settings import comments
from corpora import write_shard
from nanodepth.data import load_data
from model import GPT, GPTConfig
from tiny import ROOT, SIZE, checkpoint, data_folder, go, log, same_weights, script


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

# ---------------------------------------------------------------------------------------------------------------------
# what it learns, and what it writes

def test_learns_and_writes_what_the_contract_says(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    go("--dataset", data, "--router", "wav", "--max_iters", 250, "--eval_interval", 100, "--n_embd", 32,
       "--learning_rate", 1e-2, "--warmup_iters", 10, "--log_interval", 50)
    run = tmp_path / "out" / "wav-2x32-s0"
    assert sorted(p.name for p in run.iterdir()) == ["best.pt", "ckpt.pt", "config.json", "log.jsonl"]

    lines = log(run, seconds=True)
    training, evaluations = [x for x in lines if "loss" in x], [x for x in lines if "val_loss" in x]
    assert len(lines) == len(training) + len(evaluations)
    assert [x["iter"] for x in training] == [50, 100, 150, 200, 250]
    assert [x["iter"] for x in evaluations] == [0, 100, 200, 250]
    assert all(list(x) == ["iter", "tokens", "loss", "lr", "tok_per_s", "peak_mem_mb", "elapsed_s"] for x in training)
    assert all(list(x) == ["iter", "tokens", "val_loss", "val_bpb", "train_loss"] for x in evaluations)
    assert all(x["tokens"] == x["iter"] * 4 * 16 for x in lines)
    assert all(x["tok_per_s"] > 0 and x["peak_mem_mb"] > 50 for x in training)
    assert all(a["elapsed_s"] < b["elapsed_s"] for a, b in zip(training, training[1:]))

    loaded = load_data(data)
    counts = np.bincount(loaded.val.window(0, len(loaded.val)), minlength=loaded.vocab_size)
    p = counts[counts > 0] / counts.sum()
    unigram = -(p * np.log(p)).sum()
    assert evaluations[0]["val_loss"] == pytest.approx(math.log(loaded.vocab_size), abs=0.2)
    assert evaluations[-1]["val_loss"] < unigram - 0.2                  # it has learned more than frequencies
    for x in evaluations:                                               # the end token is a token of no bytes
        bytes_per_token = loaded.meta["splits"]["val"]["bytes"] / len(loaded.val)
        assert x["val_bpb"] == pytest.approx(x["val_loss"] / math.log(2) / bytes_per_token, rel=1e-12)

    config = json.loads((run / "config.json").read_text())
    model = GPT(GPTConfig(**config["model"]))
    assert config["params"] == model.num_params() == sum(p.numel() for p in model.parameters())
    assert config["settings"]["max_iters"] == 250 and config["model"]["router"] == "wav"
    every = {f.name for c in (train.TrainConfig, GPTConfig) for f in fields(c)}
    assert set(config["settings"]) == every | {"router_sha256"}
    assert config["data"]["tokenizer"] == loaded.meta["tokenizer"] and config["torch"] == torch.__version__
    c = checkpoint(run)
    assert c["iter"] == 250 and c["model_config"] == config["model"] and c["tokenizer"] == loaded.meta["tokenizer"]

    out = capsys.readouterr().out                                       # no terminal: plain lines, and no bar
    assert "wav 2x32" in out and f"{config['params']:,} parameters" in out and "64 tokens a step" in out
    assert f"done: val loss {evaluations[-1]['val_loss']:.4f}" in out and f"sample.py --out_dir out/{run.name}" in out

def test_val_loss_is_the_mean_over_the_windows(data):
    tokens = load_data(data).val
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=97, seq_len=16, n_layer=1, n_embd=16, dropout=0.5))
    starts = train.eval_starts(len(tokens), 16, 16)
    windows = train.windows(tokens, starts, 16, 97)                     # (16, 17)
    got = train.evaluate(model, windows, 5, "cpu", "float32")           # 5 does not divide 16
    assert model.training
    model.eval()
    losses = [F.cross_entropy(model(w[None, :-1], w[None, 1:])[0][0], w[1:]).item() for w in windows]
    assert got == pytest.approx(sum(losses) / 16, rel=1e-5)

def test_eval_windows_are_spread_evenly_without_overlap():
    starts = train.eval_starts(10_001, 20, 64)
    assert len(starts) == 64 and starts[0] == 0 and starts[-1] == 10_001 - 21
    assert (np.diff(starts) >= 20).all() and np.ptp(np.diff(starts)) <= 1
    assert train.eval_starts(21, 20, 64).tolist() == [0]                 # just one window
    assert train.eval_starts(101, 20, 64).tolist() == [0, 20, 40, 60, 80]

def test_learning_rate_schedule():
    s = SimpleNamespace(learning_rate=1.0, min_lr=None, warmup_iters=3, max_iters=13, lr_decay_iters=None)
    assert [train.lr_at(i, s) for i in range(3)] == [0.25, 0.5, 0.75]
    assert train.lr_at(3, s) == 1.0
    assert train.lr_at(8, s) == pytest.approx(0.55)                     # half way from 1 to a tenth
    assert train.lr_at(13, s) == train.lr_at(50, s) == pytest.approx(0.1)
    assert train.lr_at(23, SimpleNamespace(**{**vars(s), "lr_decay_iters": 43, "min_lr": 0.0})) == pytest.approx(0.5)
    short = SimpleNamespace(**{**vars(s), "warmup_iters": 100})         # it ends while warming up
    assert train.lr_at(12, short) == pytest.approx(13 / 101)

@pytest.mark.parametrize("router", ["wav", "rd", "layerscale", "residual"])
def test_decay_groups(router):
    model = GPT(GPTConfig(n_layer=2, n_embd=16, router=router))
    groups = model.param_groups(0.1, 1e-3, router_lr=1e-1)
    names = {p: name for name, p in model.named_parameters()}
    assert sorted(names[p] for g in groups for p in g["params"]) == sorted(names.values())
    for g in groups:
        for p in g["params"]:
            is_router = names[p].startswith("router.")
            assert g["weight_decay"] == (0.1 if p.dim() == 2 and not is_router else 0.0)
            assert g["lr_scale"] == pytest.approx(100 if is_router else 1)

def test_router_lr_and_weight_decay_reach_the_optimizer(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path, "--router", "block", "--max_iters", 2, "--warmup_iters", 0,
       "--router_lr", 0.5, "--weight_decay", 0.3)
    groups = checkpoint(tmp_path)["optimizer"]["param_groups"]
    assert [g["weight_decay"] for g in groups] == [0.3, 0.0, 0.0]
    lr = log(tmp_path)[-2]["lr"]
    assert [g["lr"] for g in groups] == [lr, lr, pytest.approx(lr * 0.5 / train.TrainConfig.learning_rate)]

# ---------------------------------------------------------------------------------------------------------------------
# batches

def seen(monkeypatch, *flags):
    """The training batches of a run of 3 steps, and its evaluation windows."""
    batches, original = [], train.windows
    monkeypatch.setattr(train, "windows", lambda *args: batches.append(original(*args)) or batches[-1])
    go("--max_iters", 3, *flags)
    monkeypatch.setattr(train, "windows", original)
    return torch.stack(batches[2:5]), batches[0]

def test_batches_depend_on_seed_and_step_alone(data, tmp_path, monkeypatch):
    base = ["--dataset", data, "--out_dir", tmp_path / "a"]
    batches, evaluation = seen(monkeypatch, *base)
    assert batches.shape == (3, 4, 17) and not torch.equal(batches[0], batches[1])
    for flags in (["--router", "wav"], ["--router", "residual"], ["--n_embd", 32], ["--learning_rate", 1e-4],
                  ["--batch_size", 2, "--gradient_accumulation_steps", 2], ["--dropout", 0.5]):
        others = seen(monkeypatch, *base, *flags)
        assert torch.equal(batches, others[0]) and torch.equal(evaluation, others[1])
    others = seen(monkeypatch, *base, "--seed", 1, "--batch_size", 8)
    assert not torch.equal(batches, others[0][:, :4]) and torch.equal(evaluation, others[1])

def test_accumulation_does_not_change_the_step(data, tmp_path):
    for name, batch_size, accumulation in (("one", 8, 1), ("four", 2, 4)):
        go("--dataset", data, "--out_dir", tmp_path / name, "--max_iters", 4, "--log_interval", 1,
           "--batch_size", batch_size, "--gradient_accumulation_steps", accumulation)
    one, four = log(tmp_path / "one"), log(tmp_path / "four")
    assert [x["tokens"] for x in one] == [x["tokens"] for x in four]
    for a, b in zip(one, four):
        assert a.get("loss", a.get("val_loss")) == pytest.approx(b.get("loss", b.get("val_loss")), rel=1e-4)

# ---------------------------------------------------------------------------------------------------------------------
# stopping and going on

STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

def heeded(number, frame):
    raise AssertionError("the run does not hear this signal")

@pytest.fixture(autouse=True)
def signals():
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

LONG = ["--max_iters", "14", "--eval_interval", "5", "--log_interval", "2", "--dropout", "0.2", "--router", "wav",
        "--gradient_accumulation_steps", "2"]

@pytest.fixture(scope="session")
def never_stopped(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("never_stopped")
    go("--dataset", data, "--out_dir", out, *LONG)
    return out

@pytest.mark.parametrize("at", [3, 5, 9, 13])
def test_a_killed_run_goes_on_bit_for_bit(data, tmp_path, never_stopped, monkeypatch, at):
    original = train.train_starts

    def killed(n_tokens, seq_len, n, seed, i):
        if i == at:
            raise KeyboardInterrupt                                     # at once, with nothing saved, as by kill -9
        return original(n_tokens, seq_len, n, seed, i)

    monkeypatch.setattr(train, "train_starts", killed)
    with pytest.raises(KeyboardInterrupt):
        go("--dataset", data, "--out_dir", tmp_path, *LONG)
    monkeypatch.setattr(train, "train_starts", original)
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"iter": 1')                                           # a line cut short
    train.main(["--init_from", "resume", "--out_dir", str(tmp_path)])
    assert same_weights(tmp_path, never_stopped)
    assert log(tmp_path) == log(never_stopped)

@pytest.mark.parametrize("number", STOPS)
def test_ctrl_c_finishes_the_step_and_saves(data, tmp_path, never_stopped, monkeypatch, number):
    signal.signal(number, heeded)                                       # it may be ignored where the tests run
    original = train.train_starts

    def interrupted(n_tokens, seq_len, n, seed, i):
        if i == 8:                                                      # the batch of step 8 is made in step 7
            signal.raise_signal(number)
        return original(n_tokens, seq_len, n, seed, i)

    monkeypatch.setattr(train, "train_starts", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"iteration 8 of 14.*\n.*train.py --init_from resume --out_dir"):
        go("--dataset", data, "--out_dir", tmp_path, *LONG)
    monkeypatch.setattr(train, "train_starts", original)
    assert signal.getsignal(number) is heeded
    assert checkpoint(tmp_path)["iter"] == 8
    train.main(["--init_from", "resume", "--out_dir", str(tmp_path)])
    assert same_weights(tmp_path, never_stopped)
    assert log(tmp_path) == log(never_stopped)

def heed():
    """Ctrl-C is heard in a new process, though it may be ignored in this one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

@pytest.mark.slow                       # processes
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_from_outside(data, tmp_path):
    out = tmp_path / "run"
    flags = [*SIZE, "--dataset", data, "--out_dir", out, "--max_iters", 10**6, "--log_interval", 1,
             "--eval_interval", 10**6]
    p = subprocess.Popen([sys.executable, ROOT / "train.py", *map(str, flags)], stderr=subprocess.PIPE,
                         stdout=subprocess.DEVNULL, text=True, preexec_fn=heed)
    end, path = time.time() + 60, out / "log.jsonl"
    while time.time() < end and not (path.exists() and len(path.read_text().splitlines()) > 3):
        time.sleep(0.05)
    p.send_signal(signal.SIGINT)
    error = p.communicate(timeout=60)[1]
    assert p.returncode == 2 and "stopped at iteration" in error and "Traceback" not in error
    at = checkpoint(out)["iter"]
    assert at >= 3 and f"iteration {at} of" in error
    assert sorted(x.name for x in out.iterdir()) == ["best.pt", "ckpt.pt", "config.json", "log.jsonl"]
    r = script("train.py", "--init_from", "resume", "--out_dir", out, "--max_iters", at + 2)
    assert r.returncode == 0 and f"from iteration {at}" in r.stdout
    assert [x["iter"] for x in log(out) if "loss" in x] == list(range(1, at + 3))

def test_a_longer_run_and_its_first_part(data, tmp_path):
    """With the cosine's end held still, a run of 4 steps that goes on to 8 is a run of 8 steps."""
    flags = ["--dataset", data, "--eval_interval", 4, "--lr_decay_iters", 8]
    go(*flags, "--out_dir", tmp_path / "a", "--max_iters", 8)
    go(*flags, "--out_dir", tmp_path / "b", "--max_iters", 4)
    go(*flags, "--out_dir", tmp_path / "b", "--max_iters", 8, "--init_from", "resume")
    assert same_weights(tmp_path / "a", tmp_path / "b")

def test_resuming_a_finished_run_changes_nothing(data, tmp_path, capsys):
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 2)
    lines = log(tmp_path, seconds=True)
    train.main(["--init_from", "resume", "--out_dir", str(tmp_path)])
    assert log(tmp_path, seconds=True) == lines and "done: val loss" in capsys.readouterr().out

def test_the_same_command_twice_loses_nothing(data, tmp_path, capsys):
    for _ in range(3):
        go("--dataset", data, "--out_dir", tmp_path / "run", "--max_iters", 2)
    for old in ("old1", "old2"):
        assert same_weights(tmp_path / "run", tmp_path / "run" / old)
        assert log(tmp_path / "run") == log(tmp_path / "run" / old)
    assert f"its files are in {tmp_path / 'run' / 'old2'} now" in capsys.readouterr().out

def test_two_runs_in_one_folder(data, tmp_path):
    with claim(tmp_path, None)[1]:
        with pytest.raises(UserError, match="another run is writing"):
            go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 2)
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 2)

# ---------------------------------------------------------------------------------------------------------------------
# starting from another run's weights

def test_a_residual_becomes_a_delta_block_that_computes_the_same(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path / "residual", "--router", "residual", "--max_iters", 5)
    train.main(["--dataset", data, "--out_dir", str(tmp_path / "delta"), "--init_from", str(tmp_path / "residual"),
                "--router", "delta_block", "--route_gate", "0", "--max_iters", "2", "--device", "cpu",
                "--eval_iters", "2", "--batch_size", "4"])
    before, after = log(tmp_path / "residual"), log(tmp_path / "delta")
    assert after[0]["iter"] == 0 and after[0]["val_loss"] == before[-1]["val_loss"]
    assert checkpoint(tmp_path / "delta")["model_config"]["n_embd"] == 16           # the size comes from the run
    assert checkpoint(tmp_path / "delta")["model"]["router.gate"].abs().sum() > 0   # and the gate has begun to open

def test_a_conversion_costs_nothing_at_zero_queries(data, tmp_path):
    """Identity 12 as a user meets it: at step 0 the residual run's loss, as norm_eps goes to 0 (float32: 2e-6)."""
    go("--dataset", data, "--out_dir", tmp_path / "residual", "--router", "residual", "--max_iters", 20, "--norm_eps",
       1e-12, "--learning_rate", 2e-2, "--warmup_iters", 0)
    before, after = log(tmp_path / "residual")[-1]["val_loss"], {}
    for router in ("block", "rd", "attnres", "delta", "cumulative"):
        go("--dataset", data, "--out_dir", tmp_path / router, "--init_from", tmp_path / "residual", "--router", router,
           "--max_iters", 0)
        first = log(tmp_path / router)[0]
        assert first["iter"] == 0
        after[router] = abs(first["val_loss"] - before)
    assert after.pop("cumulative") > 1e-3 and max(after.values()) < 2e-6

def test_weights_that_do_not_fit(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path / "a", "--max_iters", 1)
    with pytest.raises(UserError, match="do not fit this model"):
        go("--dataset", data, "--out_dir", tmp_path / "b", "--init_from", tmp_path / "a", "--n_layer", 3)
    assert not (tmp_path / "b").exists()

# ---------------------------------------------------------------------------------------------------------------------
# a loss that is not finite, and data of other kinds

def test_a_loss_that_is_not_finite(data, tmp_path, monkeypatch):
    original, calls = GPT.forward, []

    def forward(self, idx, targets=None, cache=None):
        logits, loss = original(self, idx, targets, cache)
        if self.training:
            calls.append(0)
        return logits, loss * math.nan if self.training and len(calls) == 8 else loss

    monkeypatch.setattr(GPT, "forward", forward)
    message = r"the loss at iteration 7 is not finite.*ckpt.pt is of iteration 5.\n.*--learning_rate"
    with pytest.raises(UserError, match=message):
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 20, "--eval_interval", 5, "--log_interval", 1)
    c = checkpoint(tmp_path)
    assert c["iter"] == 5 and all(v.isfinite().all() for v in c["model"].values())
    assert max(x["iter"] for x in log(tmp_path)) == 7
    json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)       # no NaN in it

def test_ready_made_shards(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "shards"
    folder.mkdir()
    for split in ("train", "val"):
        write_shard(folder / f"mine_{split}_000000.bin", rng.integers(0, 50, 2000))
    flags = ["--dataset", folder, "--out_dir", tmp_path / "run", "--max_iters", 2]
    with pytest.raises(UserError, match="--vocab_size"):
        go(*flags)
    with pytest.raises(UserError, match="holds token .* --vocab_size must be at least"):
        go(*flags, "--vocab_size", 20)
    assert not (tmp_path / "run").exists()
    go(*flags, "--vocab_size", 64)
    assert log(tmp_path / "run")[-1]["val_bpb"] is None

def test_bfloat16(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path / "a", "--max_iters", 3, "--dtype", "bfloat16")
    go("--dataset", data, "--out_dir", tmp_path / "b", "--max_iters", 3, "--dtype", "float32")
    a, b = log(tmp_path / "a")[-1]["val_loss"], log(tmp_path / "b")[-1]["val_loss"]
    assert a != b and a == pytest.approx(b, rel=1e-2)
    assert all(v.dtype == torch.float32 for v in checkpoint(tmp_path / "a")["model"].values())

def test_the_built_in_corpus_is_prepared_when_it_is_not_there(tmp_path, monkeypatch):
    asked = []

    def prepare(dataset, out):
        asked.append((dataset, str(out)))
        data_folder(tmp_path, "data/pystdlib")

    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prepare_data.prepare", prepare)
    go("--max_iters", 1)
    go("--max_iters", 1)
    assert asked == [("pystdlib", "data/pystdlib")]

# ---------------------------------------------------------------------------------------------------------------------
# configs and settings

CONFIGS = {"quick": (97, 1e6, 0), "wav_48l": (27, 0, 0), "block_48l": (27, 0, 0), "rd_s": (50257, 2.0e9, 120e6),
           "rd_m": (50257, 2.0e9, 343e6), "delta_220m": (50257, 0, 124e6)}      # vocabulary, tokens, parameters

def test_every_config_is_known_here():
    assert {p.stem for p in (ROOT / "configs").glob("*.toml") if not p.stem.startswith("sweep")} == set(CONFIGS)

@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name, monkeypatch):
    path = ROOT / "configs" / f"{name}.toml"
    lines = path.read_text().splitlines()
    assert all("#" in line for line in lines if line) and all(len(line) <= 120 for line in lines)
    s, _ = train.read_settings([str(path)])
    assert {k: s[k] for k in tomllib.loads(path.read_text())} == tomllib.loads(path.read_text())
    vocab_size, tokens, params = CONFIGS[name]
    if tokens:
        step = s["batch_size"] * s["gradient_accumulation_steps"] * s["seq_len"]
        assert s["max_iters"] * step == pytest.approx(tokens, rel=0.03)
    if params:
        monkeypatch.setattr(GPT, "init_weights", lambda self: None)
        with torch.device("meta"):
            model = GPT(train.model_config(s, vocab_size))
        assert model.num_params() == pytest.approx(params, rel=0.01)
        if s["router"] == "rd":                                         # what the paper says of its cost
            assert model.router.query_v.numel() == s["n_layer"] * s["n_embd"] < 1e-4 * model.num_params()

@pytest.mark.parametrize("name", CONFIGS)
def test_configs_run(data, tmp_path, name):
    """Three steps of each, its sizes cut down; on a CPU, not compiled, in the number format that it names."""
    s, _ = train.read_settings([str(ROOT / "configs" / f"{name}.toml")])
    cut = {"dataset": data, "out_dir": tmp_path, "n_layer": 4, "n_embd": 8 * s["n_head"], "mlp_hidden": 32, "n_blocks": 2,
           "seq_len": 16, "batch_size": 2, "gradient_accumulation_steps": min(2, s["gradient_accumulation_steps"]),
           "max_iters": 3, "log_interval": 1, "eval_iters": 1, "compile": "false", "device": "cpu"}
    train.main([str(ROOT / "configs" / f"{name}.toml"), *(f"--{k}={v}" for k, v in cut.items())])
    c = checkpoint(tmp_path)
    assert c["iter"] == 3 and c["model_config"]["router"] == s["router"]
    assert c["dtype"] == ("float32" if s["dtype"] == "auto" else s["dtype"])
    assert [x["lr"] for x in log(tmp_path) if "loss" in x] == [
        pytest.approx(s["learning_rate"] * i / (s["warmup_iters"] + 1)) for i in (1, 2, 3)]

def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path):
    (tmp_path / "c.toml").write_text('n_layer = 3  # layers\nrouter = "rd"\nlearning_rate = 1\nmin_lr = 0\n')
    s, _ = train.read_settings([str(tmp_path / "c.toml"), "--router=delta", "--compile"])
    assert (s["n_layer"], s["router"], s["n_embd"]) == (3, "delta", GPTConfig.n_embd)
    assert s["learning_rate"] == 1.0 and type(s["learning_rate"]) is float and s["compile"] is True
    assert s["out_dir"] == f"out/delta-3x{s['n_embd']}-s0"

def test_every_setting_is_explained():
    assert set(comments(train.TrainConfig)) == {f.name for f in fields(train.TrainConfig)}
