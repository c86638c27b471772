"""bench.py: what it says of a tiny pair of models; never how fast they were."""
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab import bench
from model import GPTConfig
from nanodepth.files import UserError

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--n_layer", "2", "--n_embd", "16", "--n_head", "2", "--seq_len", "8", "--batch_size", "2", "--device", "cpu"]

@pytest.mark.slow                       # processes
def test_a_pair(tmp_path):
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "lab.bench", "--routers", "block", *TINY, "--rounds", "3", "--json", out]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    written = json.loads(out.read_text())
    block = written["results"]["block"]
    assert len(block["seconds"]) == len(block["baseline_seconds"]) == 3
    assert block["ratio"] == statistics.median(b / s for s, b in zip(block["seconds"], block["baseline_seconds"]))
    assert block["params"] - block["baseline_params"] == 5 * 16                 # 2L + 1 queries
    assert block["peak_mem_mb"] > 50 and block["memory_ratio"] == block["peak_mem_mb"] / block["baseline_peak_mem_mb"]
    row = next(line for line in shown.splitlines() if line.startswith("| block |"))
    assert f"| {block['ratio']:.3f} (" in row and f"| {block['memory_ratio']:.3f} |" in row

@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_ctrl_c(tmp_path):
    """A terminal sends it to the measuring processes too: one line is said, and none of them stays."""
    command = [sys.executable, "-m", "lab.bench", "--routers", "block", *TINY, "--rounds", "1000000",
               "--json", tmp_path / "x.json"]
    pipe = subprocess.PIPE
    heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)                # a shell's background jobs ignore it
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=heeds,
                          cwd=ROOT) as process:
        for line in process.stdout:
            if line.startswith("|---"):                                         # the header: the measuring begins
                break
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)                               # until no process holds stderr any more
    assert process.returncode == 2 and said == "bench.py: stopped by Ctrl-C\n"
    assert list(tmp_path.iterdir()) == []

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_turn_is_a_whole_training_step_in_the_dtype(dtype):
    """Forward, backward and AdamW, under autocast where the dtype says so: none of them may be left out."""
    settings = bench.BenchConfig(batch_size=2, device="cpu", dtype=dtype)
    model, step = bench.training(settings, GPTConfig(vocab_size=11, seq_len=8, n_layer=2, n_head=2, n_embd=16))
    seen, before = [], {name: p.detach().clone() for name, p in model.named_parameters()}
    model.register_forward_hook(lambda m, args, out: seen.append((out[0].dtype, tuple(args[0].shape), len(args))))
    step()
    assert seen == [(getattr(torch, dtype), (2, 8), 2)]                         # logits; idx and targets
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == before.keys() and all(p.grad is None for p in model.parameters())

@pytest.mark.slow                       # processes
def test_a_router_that_cannot_run_is_a_row(capsys, tmp_path):
    """Out of memory, no compiler, killed: one line, and the other routers are measured."""
    (tmp_path / "bad.py").write_text("""
import os
from model import Residual
class Fails(Residual):
    def forward(self, e, sublayers):
        raise RuntimeError("CUDA out of memory.\\nTried to allocate")
class Killed(Residual):
    def forward(self, e, sublayers):
        os._exit(9)
""", encoding="utf-8")
    fails, killed = (f"{tmp_path / 'bad.py'}:{name}" for name in ("Fails", "Killed"))
    bench.main([*TINY, "--routers", f"{fails},{killed},block", "--rounds", "1"])
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert rows[0] == f"| {fails} | failed: RuntimeError: CUDA out of memory. | | | | |"
    assert rows[1].startswith(f"| {killed} | failed: ") and rows[2].startswith("| block | ") and "failed" not in rows[2]

@pytest.mark.parametrize("flags, words", [
    (["--rounds", "0"], "--rounds is 0; it must be at least 1"), (["--json", "/no/such/folder/x.json"], "there is no such folder"),
    (["--routers", "blok"], "did you mean block"),
    (["--n_blocks", "3"], "n_blocks is 3; it must be from 1 to n_layer")])
def test_errors(flags, words):
    with pytest.raises(UserError, match=words):
        bench.main([*TINY, *flags])
