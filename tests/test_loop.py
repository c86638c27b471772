"""What the loop of train.py promises, beside a plain one written here; and that it says so when it cannot be kept."""
import math
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from model import GPT, GPTConfig
from nanodepth import machine
from nanodepth.data import load_data
from nanodepth.files import UserError
from test_train import STOPS, heed, heeded, signals                            # noqa: F401, a fixture
from tiny import ROOT, SIZE, checkpoint, data_folder, go, log, same_weights


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

# ---------------------------------------------------------------------------------------------------------------------
# every step, by a plain loop

def plain_loop(data, steps, router="block", seed=0, n=4, lr=2e-3, warmup=50, max_iters=400, betas=(0.9, 0.99),
               decay=0.1, clip=1.0, router_lr=None, dtype=None, dropout=0.0):
    """The loss and the gradient's norm of each step, and the mean val loss over evenly spaced windows after them."""
    tokens = load_data(data)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=tokens.vocab_size, seq_len=16, n_layer=2, n_head=2, n_embd=16, router=router,
                          dropout=dropout))
    def loss_of(batch):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return model(batch[:, :-1], batch[:, 1:])[1]

    def cut(split, starts):
        return torch.from_numpy(np.stack([split.window(int(a), 17) for a in starts]))

    named = list(model.named_parameters())
    own = [p for name, p in named if name.startswith("router.")]
    rest = [p for name, p in named if not name.startswith("router.")]
    groups = [{"params": [p for p in rest if p.dim() == 2], "weight_decay": decay, "scale": 1.0},
              {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0, "scale": 1.0},
              {"params": own, "weight_decay": 0.0, "scale": (router_lr or lr) / lr}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas)
    losses, norms = [], []
    for i in range(steps):
        rate = lr * (i + 1) / (warmup + 1) if i < warmup else \
            lr / 10 + 0.45 * lr * (1 + math.cos(math.pi * (i - warmup) / (max_iters - warmup)))
        loss = loss_of(cut(tokens.train, np.random.default_rng((seed, i)).integers(len(tokens.train) - 16, size=n)))
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, clip / norm) if clip else 1.0
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    model.eval()
    with torch.no_grad():
        after = {name: loss_of(cut(split, np.linspace(0, len(split) - 17, 32).astype(int))).item()
                 for name, split in (("val_loss", tokens.val), ("train_loss", tokens.train))}
    return losses, norms, after

# name: flags, the same for the plain loop, and what the gradient's norms must be like for the case to tell anything

CASES = {
    "default": ([], {}, lambda norms: max(norms) > 1.05),
    "no clipping": (["--grad_clip", 0], {"clip": 0}, lambda norms: max(norms) > 1.05),
    "clipped": (["--grad_clip", 0.01], {"clip": 0.01}, lambda norms: min(norms) > 0.1),
    "betas": (["--beta1", 0.3, "--beta2", 0.5], {"betas": (0.3, 0.5)}, None),
    "decay": (["--weight_decay", 30], {"decay": 30}, None),
    "router_lr": (["--router_lr", 0.5, "--router", "wav"], {"router_lr": 0.5, "router": "wav"}, None),
    "cosine": (["--warmup_iters", 2], {"warmup": 2, "max_iters": 6}, None),
    "seed": (["--seed", 3], {"seed": 3}, None),
    "bfloat16": (["--dtype", "bfloat16"], {"dtype": torch.bfloat16}, None),
}

@pytest.mark.parametrize("case", CASES)
def test_every_step_is_a_plain_loops(data, tmp_path, case):
    flags, same, tells = CASES[case]
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 6, "--log_interval", 1, "--learning_rate", 1e-2,
       "--warmup_iters", 0, "--eval_interval", 6, *flags)
    warmup = same.pop("warmup", 0) if "warmup" in same else 0
    losses, norms, after = plain_loop(data, 6, **{"lr": 1e-2, "warmup": warmup, "max_iters": 6} | same)
    assert not tells or tells(norms)
    lines = log(tmp_path)
    tolerance = 2e-4 if case == "bfloat16" else 2e-5                    # float32 sums in another order, six steps on
    assert [x["loss"] for x in lines if "loss" in x] == pytest.approx(losses, rel=tolerance)
    assert lines[-1]["val_loss"] == pytest.approx(after["val_loss"], rel=tolerance)
    assert lines[-1]["train_loss"] == pytest.approx(after["train_loss"], rel=tolerance)
    if case != "bfloat16":                                              # one taken for the other would be seen
        assert abs(after["val_loss"] - after["train_loss"]) > 2 * tolerance * after["val_loss"]

def test_bfloat16_is_not_float32(data, tmp_path):
    for dtype in ("float32", "bfloat16"):
        go("--dataset", data, "--out_dir", tmp_path / dtype, "--max_iters", 2, "--log_interval", 1, "--dtype", dtype)
    a, b = log(tmp_path / "float32"), log(tmp_path / "bfloat16")
    assert a[1]["loss"] != b[1]["loss"] and a[0]["val_loss"] != b[0]["val_loss"]    # in training, and in evaluation
    assert a[1]["loss"] == pytest.approx(b[1]["loss"], rel=1e-2)

def test_dropout_is_of_the_seed_and_the_step(data, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        go("--dataset", data, "--out_dir", tmp_path / name, "--max_iters", 3, "--dropout", 0.5, "--seed", seed)
    go("--dataset", data, "--out_dir", tmp_path / "none", "--max_iters", 3)
    assert same_weights(tmp_path / "a", tmp_path / "b") and not same_weights(tmp_path / "a", tmp_path / "c")
    assert not same_weights(tmp_path / "a", tmp_path / "none")

@pytest.mark.parametrize("router", ["block", "rd", "wav", "delta", "delta_block", "attnres"])
def test_one_batch_however_it_is_split(data, tmp_path, router):
    """8 x 1, 4 x 2 and 1 x 8: the same losses to 1e-5 over ten steps; training amplifies float32's rounding."""
    for batch_size, steps in ((8, 1), (4, 2), (1, 8)):
        go("--dataset", data, "--out_dir", tmp_path / str(batch_size), "--router", router, "--max_iters", 10,
           "--log_interval", 1,
           "--batch_size", batch_size, "--gradient_accumulation_steps", steps, "--warmup_iters", 0)
    runs = [[x["loss"] for x in log(tmp_path / str(b)) if "loss" in x] for b in (8, 4, 1)]
    assert len(runs[0]) == 10
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], rel=1e-5)

def test_a_resumed_run_may_split_its_batch_anew(data, tmp_path):
    flags = ["--dataset", data, "--batch_size", 8, "--log_interval", 1, "--lr_decay_iters", 10]
    go(*flags, "--out_dir", tmp_path / "one", "--max_iters", 10)
    go(*flags, "--out_dir", tmp_path / "two", "--max_iters", 5)
    train.main(["--init_from", "resume", "--out_dir", str(tmp_path / "two"), "--max_iters", "10", "--batch_size", "2",
                "--gradient_accumulation_steps", "4"])
    one, two = ([x["loss"] for x in log(tmp_path / name) if "loss" in x] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5) and len(two) == 10
    assert [h["changed"].get("batch_size") for h in checkpoint(tmp_path / "two")["history"]] == [None, 2]

# ---------------------------------------------------------------------------------------------------------------------
# what it says

def test_time_and_speed_by_a_clock_of_our_own(data, tmp_path, monkeypatch):
    """A batch takes 2 seconds and an evaluation of a split 100: speed is of steps alone, elapsed time of everything."""
    class Clock:
        now = 1000.0
        def time(self):
            return self.now

    clock, made, looked = Clock(), train.train_batch, train.evaluate
    def slow(seconds, f):
        def call(*args):
            clock.now += seconds
            return f(*args)
        return call

    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train, "train_batch", slow(2, made))
    monkeypatch.setattr(train, "evaluate", slow(100, looked))
    monkeypatch.setattr(train, "peak_mem_mb", lambda device: 321.0)
    flags = ["--dataset", data, "--out_dir", tmp_path, "--log_interval", 3, "--eval_interval", 4, "--lr_decay_iters", 6]
    go(*flags, "--max_iters", 6)
    steps = [x for x in log(tmp_path, seconds=True) if "loss" in x]
    assert [x["tok_per_s"] for x in steps] == [4 * 16 / 2] * 2 and [x["peak_mem_mb"] for x in steps] == [321.0] * 2
    assert [x["elapsed_s"] for x in steps] == [2 + 200 + 3 * 2, 2 + 400 + 6 * 2]
    assert checkpoint(tmp_path)["elapsed_s"] == 2 + 600 + 6 * 2
    clock.now += 5000                                                   # a pause is not training
    go(*flags, "--max_iters", 9, "--init_from", "resume")
    assert log(tmp_path, seconds=True)[-2]["elapsed_s"] == 614 + 2 + 200 + 3 * 2

@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
def test_peak_memory_is_the_systems():
    status = Path("/proc/self/status").read_text()
    assert machine.peak_mem_mb("cpu") == pytest.approx(int(status.split("VmHWM:")[1].split()[0]) / 1024, rel=0.02)

def test_compile_is_asked_for_and_used_in_training_alone(data, tmp_path, monkeypatch):
    calls = []

    def compiled(model):
        def forward(*args):
            calls.append(model.training)
            return model(*args)
        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    go("--dataset", data, "--out_dir", tmp_path / "a", "--max_iters", 3, "--gradient_accumulation_steps", 2,
       "--compile")
    assert calls == [True] * 6
    go("--dataset", data, "--out_dir", tmp_path / "b", "--max_iters", 3)
    assert len(calls) == 6

@pytest.mark.parametrize("error, said", [
    (RuntimeError("Dynamo is not supported on Python 3.99+"), "Dynamo is not supported on Python 3.99+; leave it out."),
    (RuntimeError("torch.compile: TorchInductor failed\nNo working C++ compiler found: (None, 'g++')"),
     "compiler found: (None, 'g++')"),
    (RuntimeError("Cannot find a working triton installation to compile"), "triton installation"),
])
def test_a_compile_that_refuses(data, tmp_path, monkeypatch, error, said):
    def refuse(model):
        raise error
    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(UserError, match="--compile does not work here: ") as e:
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 2, "--compile")
    assert said in str(e.value) and len(str(e.value).splitlines()) == 1

def test_another_error_is_not_compiles(data, tmp_path, monkeypatch):
    def broken(*args):
        raise ValueError("a fault of ours")
    monkeypatch.setattr(train, "evaluate", broken)
    with pytest.raises(ValueError, match="a fault of ours"):
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 2, "--compile")

@pytest.mark.slow
def test_a_lost_compiler_is_named(data, tmp_path):
    r = subprocess.run([sys.executable, ROOT / "train.py", *SIZE, "--dataset", data, "--out_dir", tmp_path / "run",
                        "--max_iters", "2", "--compile"], capture_output=True, text=True, timeout=300,
                       env={**os.environ, "CXX": "no-such-c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert r.returncode == 2 and "--compile does not work here" in r.stderr and "no-such-c++" in r.stderr
    assert len(r.stderr.splitlines()) == 1, r.stderr

# ---------------------------------------------------------------------------------------------------------------------
# what is not finite, and what stops a run

def with_loss(monkeypatch, change):
    """GPT.forward with another loss: change(loss, model, number of training calls so far)."""
    original, calls = GPT.forward, []

    def forward(self, idx, targets=None, cache=None):
        logits, loss = original(self, idx, targets, cache)
        calls.extend([0] * self.training)
        return logits, change(loss, self, len(calls))
    monkeypatch.setattr(GPT, "forward", forward)

def stops_at(data, tmp_path, message, kept=5):
    with pytest.raises(UserError, match=message):
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 20, "--eval_interval", 5)
    c = checkpoint(tmp_path)
    assert c["iter"] == kept and all(v.isfinite().all() for v in c["model"].values())

def test_a_gradient_that_is_not_finite(data, tmp_path, monkeypatch):
    def change(loss, model, calls):
        if model.training and calls == 8:
            loss.register_hook(lambda g: g * math.inf)                  # the loss itself is as ever
        return loss
    with_loss(monkeypatch, change)
    stops_at(data, tmp_path, "the gradient at iteration 7 is not finite.*ckpt.pt is of iteration 5")

def test_a_val_loss_that_is_not_finite(data, tmp_path, monkeypatch):
    with_loss(monkeypatch, lambda loss, model, calls: loss * math.nan if not model.training and calls >= 10 else loss)
    stops_at(data, tmp_path, "the val loss at iteration 10 is not finite")

@pytest.mark.parametrize("value", [math.nan, 3e38])
@pytest.mark.parametrize("stopped", [True, False])
def test_weights_that_are_spoilt_never_replace_good_ones(data, tmp_path, monkeypatch, value, stopped):
    """In the step in which they are, also when it is the one in which Ctrl-C comes."""
    signal.signal(signal.SIGINT, heeded)
    original, steps = torch.optim.AdamW.step, []

    def step(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        steps.append(0)
        if len(steps) == 8:
            with torch.no_grad():
                for gain in self.param_groups[1]["params"]:             # the norms': finite, and the loss is not
                    gain.fill_(value)
        return result
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    if stopped:
        interrupt(monkeypatch, signal.SIGINT, at=8)                     # the batch of step 8 is made in step 7
    stops_at(data, tmp_path, "the (val loss|loss|gradient) at iteration [89] is not finite.*ckpt.pt is of iteration 5")

def test_a_weight_that_no_token_reads_counts_too(data, tmp_path, monkeypatch):
    original = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        original(self, *args, **kwargs)
        with torch.no_grad():
            self.param_groups[0]["params"][0][-1] = math.nan            # the embedding of a token that the text lacks
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(UserError, match="is not finite"):
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 20, "--eval_interval", 1, "--tie_embeddings",
           "false")
    assert checkpoint(tmp_path)["iter"] == 0

FOREVER = ["--max_iters", 10**6, "--log_interval", 1, "--eval_interval", 10**6]

def interrupt(monkeypatch, number, at=8, times=1):
    original = train.train_starts

    def interrupted(n_tokens, seq_len, n, seed, i):
        for _ in range(times if i == at else 0):
            signal.raise_signal(number)
        return original(n_tokens, seq_len, n, seed, i)
    monkeypatch.setattr(train, "train_starts", interrupted)

def test_a_second_ctrl_c_ends_at_once(data, tmp_path, monkeypatch):
    signal.signal(signal.SIGINT, heeded)
    interrupt(monkeypatch, signal.SIGINT, times=2)
    with pytest.raises(KeyboardInterrupt, match="stopped without saving; .*ckpt.pt is of iteration 5"):
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 20, "--eval_interval", 5)
    assert checkpoint(tmp_path)["iter"] == 5

def test_a_second_sigterm_does_not(data, tmp_path, monkeypatch):
    signal.signal(signal.SIGTERM, heeded)
    interrupt(monkeypatch, signal.SIGTERM, times=2)                     # as schedulers send it
    with pytest.raises(KeyboardInterrupt, match="stopped at iteration 8 of 20, and saved"):
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 20, "--eval_interval", 5)
    assert checkpoint(tmp_path)["iter"] == 8

@pytest.mark.parametrize("number", STOPS)
def test_what_is_ignored_stays_ignored(data, tmp_path, monkeypatch, number):
    # as nohup does, and a shell for its background jobs
    signal.signal(number, signal.SIG_IGN)
    interrupt(monkeypatch, number)
    try:
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 12)
    except KeyboardInterrupt:
        pytest.fail("an ignored signal was heard")
    assert checkpoint(tmp_path)["iter"] == 12

@pytest.mark.slow                       # processes
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_output_that_nobody_reads_stops_and_saves(data, tmp_path):
    out = tmp_path / "run"
    flags = [*SIZE, "--dataset", data, "--out_dir", out, *FOREVER]
    p = subprocess.Popen([sys.executable, ROOT / "train.py", *map(str, flags)], stderr=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    assert "parameters" in p.stdout.readline()
    p.stdout.close()                                                    # as by `| head -1`
    error = p.communicate(timeout=100)[1]
    at = checkpoint(out)["iter"]
    assert p.returncode == 2 and f"stopped at iteration {at} of" in error
    assert "Traceback" not in error and "Exception" not in error

@pytest.mark.slow                       # processes
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="terminals")
def test_a_closed_terminal_stops_and_saves(data, tmp_path):
    out, (ours, theirs) = tmp_path / "run", os.openpty()
    flags = [*SIZE, "--dataset", data, "--out_dir", out, *FOREVER]

    def terminal():
        import fcntl
        import termios
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    p = subprocess.Popen([sys.executable, ROOT / "train.py", *map(str, flags)], stdin=theirs, stdout=theirs,
                         stderr=theirs, preexec_fn=terminal)
    os.close(theirs)
    path = out / "log.jsonl"
    while not (path.exists() and path.read_text().count("\n") > 4):
        if select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 4096)                                         # the bar
    os.close(ours)                                                      # the window is closed
    assert p.wait(timeout=100) == 2
    c = checkpoint(out)
    assert c["iter"] >= 3 and c["iter"] == max(x["iter"] for x in log(out))

# ---------------------------------------------------------------------------------------------------------------------
# recompute, float16, max_tokens

@pytest.mark.parametrize("router", ["residual", "block", "rd", "wav", "delta", "delta_block", "attnres"])
def test_recompute_gives_the_same_gradients(data, tmp_path, router):
    """Bit for bit: the same operations on the same numbers, dropout's noise included."""
    for name, flag in (("kept", "false"), ("again", "true")):
        go("--dataset", data, "--out_dir", tmp_path / name, "--router", router, "--max_iters", 3, "--recompute", flag,
           "--dropout", 0.2, "--learning_rate", 1e-2)
    assert same_weights(tmp_path / "kept", tmp_path / "again") and log(tmp_path / "kept") == log(tmp_path / "again")

def test_recompute_runs_each_sublayer_twice(data, tmp_path, monkeypatch):
    import model as model_module
    original, calls = model_module.MLP.forward, []
    counted = lambda self, h: calls.append(torch.is_grad_enabled()) or original(self, h)
    monkeypatch.setattr(model_module.MLP, "forward", counted)
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 3, "--recompute")
    assert sum(calls) == 3 * 2 * 2                                      # steps, layers, there and back

def test_float16_scales_its_loss(data, tmp_path):
    flags = ["--dataset", data, "--log_interval", 1, "--warmup_iters", 0, "--lr_decay_iters", 12]
    go(*flags, "--out_dir", tmp_path / "half", "--max_iters", 12, "--dtype", "float16")
    go(*flags, "--out_dir", tmp_path / "full", "--max_iters", 12)
    half, full = ([x["loss"] for x in log(tmp_path / name) if "loss" in x] for name in ("half", "full"))
    # float16 has 11 bits; the first steps may be skipped
    assert half != full and half == pytest.approx(full, rel=2e-2)
    assert checkpoint(tmp_path / "half")["scaler"]["scale"] >= 1 and checkpoint(tmp_path / "full")["scaler"] == {}
    assert checkpoint(tmp_path / "half")["dtype"] == "float16"
    go(*flags, "--out_dir", tmp_path / "part", "--max_iters", 5, "--dtype", "float16")
    train.main(["--init_from", "resume", "--out_dir", str(tmp_path / "part"), "--max_iters", "12"])
    assert same_weights(tmp_path / "part", tmp_path / "half")

def test_gradients_are_clipped_at_their_own_size_under_float16(data, tmp_path, monkeypatch):
    """Not at that of the scaled loss, 2^16 times as large."""
    norms, original = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(original(*args)) or norms[-1])
    for dtype in ("float16", "float32"):
        go("--dataset", data, "--out_dir", tmp_path / dtype, "--max_iters", 3, "--dtype", dtype)
    assert len(norms) == 6 and [n.item() for n in norms[:3]] == pytest.approx([n.item() for n in norms[3:]], rel=2e-2)

@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_autocast_is_to_the_dtype(dtype):
    with machine.autocast("cpu", dtype):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is getattr(torch, dtype)

def test_the_noise_of_a_step_is_by_seed_and_step(data, tmp_path, monkeypatch):
    """What dropout draws: another at each step and for each seed, the same in a run resumed in the middle."""
    seeds, original = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or original(seed))

    def noise(name, *flags):
        seeds.clear()
        go("--dataset", data, "--out_dir", tmp_path / name, "--dropout", 0.1, *flags)
        return seeds[1:]                                                        # the first is of the weights
    zero, one = noise("zero", "--max_iters", 4), noise("one", "--max_iters", 4, "--seed", 1)
    assert len({*zero, *one}) == 8
    assert noise("part", "--max_iters", 2) + noise("part", "--max_iters", 4, "--init_from", "resume") == zero

def test_float16_skips_a_step_that_overflows(data, tmp_path, monkeypatch):
    def change(loss, model, calls):
        if model.training and calls == 3:
            loss.register_hook(lambda g: g * math.inf)
        return loss
    with_loss(monkeypatch, change)
    weights, original = [], torch.amp.GradScaler.step
    def step(self, optimizer, *args):
        p = optimizer.param_groups[0]["params"][0]
        before = p.detach().clone()
        original(self, optimizer, *args)
        weights.append(torch.equal(before, p))
    monkeypatch.setattr(torch.amp.GradScaler, "step", step)
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 5, "--dtype", "float16", "--learning_rate", 1e-2,
       "--warmup_iters", 0)
    assert weights == [False, False, True, False, False]
    assert checkpoint(tmp_path)["scaler"]["scale"] == 2.0**15           # from 2^16, halved once

def test_float16_that_never_fits_ends(data, tmp_path, monkeypatch):
    def change(loss, model, calls):
        if model.training:
            loss.register_hook(lambda g: g * math.inf)
        return loss
    with_loss(monkeypatch, change)
    with pytest.raises(UserError, match="the gradient at iteration 16 is not finite"):
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 50, "--dtype", "float16")

@pytest.mark.parametrize("bf16, dtype", [(True, "bfloat16"), (False, "float16")])
def test_auto_dtype(monkeypatch, bf16, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    assert machine.pick_dtype("auto", "cuda") == machine.pick_dtype("auto", "cuda:1") == dtype
    assert machine.pick_dtype("auto", "cpu") == machine.pick_dtype("auto", "mps") == "float32"
    assert machine.pick_dtype("bfloat16", "cuda") == "bfloat16"

@pytest.mark.parametrize("text, iters", [("1k", 16), ("1024", 16), ("1025", 17), ("0.5M", 7813), ("2.0B", 31_250_000),
                                         ("1e3", 16)])
def test_max_tokens(text, iters):
    s, _ = train.read_settings([*SIZE, "--max_tokens", text])           # 64 tokens a step
    assert s["max_iters"] == iters and s["max_tokens"] == text

def test_max_tokens_and_max_iters(data, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text('max_iters = 7\n')
    assert train.read_settings([str(config), *SIZE, "--max_tokens", "1k"])[0]["max_iters"] == 16
    config.write_text('max_tokens = "1k"\n')
    s, _ = train.read_settings([str(config), *SIZE, "--max_iters", "3"])
    assert s["max_iters"] == 3 and s["max_tokens"] is None
    go("--dataset", data, "--out_dir", tmp_path / "run", "--max_tokens", "128")
    assert checkpoint(tmp_path / "run")["tokens"] == 128
    train.main(["--init_from", "resume", "--out_dir", str(tmp_path / "run"), "--max_tokens", "256"])
    c = checkpoint(tmp_path / "run")
    assert (c["iter"], c["tokens"], c["settings"]["max_iters"]) == (4, 256, 4)
