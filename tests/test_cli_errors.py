"""What a user can get wrong with train.py: one or two lines that say what to do, exit code 2, nothing half-written."""
import os

import pytest

import train
from nanodepth.files import UserError, run
from prepare_data import prepare
from tiny import SIZE, checkpoint, data_folder, go, log, script


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    go("--dataset", data, "--out_dir", out, "--max_iters", 4)
    return out

WRONG = {
    "--block_size 64": "the context length is --seq_len, and block means a depth block",
    "--block_size=64": "the context length is --seq_len, and block means a depth block",
    "--n_layers 4": "there is no flag --n_layers. Did you mean --n_layer?",
    "--leraning_rate 1": "Did you mean --learning_rate?",
    "--router wave": "did you mean wav?",
    "--n_layer four": "--n_layer is 'four'; it must be a whole number.",
    "--n_layer 2.5": "--n_layer is '2.5'; it must be a whole number.",
    "--n_layer": "expected one argument",
    "--n_layer 0": "n_layer is 0; it must be at least 1",
    "--n_embd 30 --n_head 4": "n_embd is 30; it must be a multiple of n_head",
    "--n_blocks 3": "n_blocks is 3; it must be from 1 to n_layer (2)",
    "--rd_control tied": "choose router rd, or set decouple_v",
    "--dropout 1": "dropout is 1.0",
    "--batch_size 0": "--batch_size is 0; it must be 1 or more.",
    "--gradient_accumulation_steps 0": "--gradient_accumulation_steps is 0",
    "--max_iters -1": "--max_iters is -1; it must be 0 or more.",
    "--learning_rate -1e-3": "--learning_rate is -0.001; it must be more than 0.",
    "--learning_rate nan": "--learning_rate is 'nan'; it must be a number.",
    "--learning_rate 1e-3x": "--learning_rate is '1e-3x'; it must be a number.",
    "--min_lr -1": "--min_lr is -1.0",
    "--router_lr inf": "--router_lr is inf",
    "--beta2 1": "--beta2 is 1.0; it must be less than 1.",
    "--eval_interval 0": "--eval_interval is 0",
    "--log_interval 0": "--log_interval is 0",
    "--seed -1": "--seed is -1",
    "--compile maybe": "--compile is 'maybe'; it must be true or false.",
    "--device gpu": "--device is 'gpu'; it must be auto, cpu, cuda",
    "--dtype float8": "--dtype is 'float8'; it must be auto, float32, bfloat16 or float16.",
    "--init_from resmue": "Did you mean resume?",
    "--init_from resume": "there is nothing to resume in",
    "--seq_len 20000": "--seq_len 20000",
    "--vocab_size 10": "--vocab_size is 10; the vocabulary of",
    "--always_save_checkpoint": "every evaluation saves ckpt.pt",
    "--wandb_log=True": "the figures are in log.jsonl",
    "--wandb_project x": "the figures are in log.jsonl",
    "--bias False": "no layer has a bias",
    "--start x": "sample.py",
    "--backend gloo": "by --device",
    "--decay_lr False": "give --min_lr",
    "--seed 12345678901234567890": "--seed is 12345678901234567890; it must have 18 digits at most.",
    "--detail_bias nan": "--detail_bias is 'nan'; it must be a number.",
    "--rope_theta NaN": "--rope_theta is 'NaN'; it must be a number.",
    "--max_tokens 2.0X": "--max_tokens is '2.0X'; it must be a number of tokens, as 2.0B",
    "--max_tokens 1e999": "--max_tokens is '1e999'; it must be a number of tokens",
    "--max_tokens 2M --max_iters 5": "--max_iters and --max_tokens both say",
    "--fsdp": "start them with torchrun",
    "--tokenizer byte": "--tokenizer is byte, and",
    "nowhere.toml": "there is no config file nowhere.toml.",
}

@pytest.mark.parametrize("flags", WRONG)
def test_wrong_flags(data, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as e:
        go("--dataset", data, "--out_dir", tmp_path / "run", *flags.split())
    assert WRONG[flags] in str(e.value) and len(str(e.value).splitlines()) <= 2
    assert os.listdir(tmp_path) == []

@pytest.mark.parametrize("text, message", [
    ("n_layer 4", "is not a TOML file"),
    ("n_layers = 4", "there is no setting n_layers. Did you mean n_layer?"),
    ("block_size = 4", "the context length is --seq_len"),
    ("n_layer = 'four'", "n_layer is 'four'; it must be a whole number."),
    ("n_layer = true", "n_layer is True; it must be a whole number."),
    ("import os", "is not a TOML file"),
])
def test_wrong_config_files(tmp_path, text, message):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UserError) as e:
        train.main([str(tmp_path / "c.toml")])
    assert message in str(e.value) and "c.toml" in str(e.value)

def test_no_such_data(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(os.path.dirname(data))
    with pytest.raises(UserError, match="no data set data/tinny; make it with prepare_data.py. Did you mean tiny?"):
        go("--dataset", "tinny")
    go("--dataset", "tiny", "--max_iters", 0)

def test_from_outside(data, tmp_path):
    r = script("train.py", *SIZE, "--dataset", data, "--out_dir", tmp_path / "run", "--n_layers", 3)
    assert r.returncode == 2 and r.stdout == "" and not (tmp_path / "run").exists()
    assert r.stderr == "train.py: there is no flag --n_layers. Did you mean --n_layer?\n"

def test_help(capsys):
    with pytest.raises(SystemExit) as e:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0 and "the highest learning rate" in out and "--detail_bias" in out

def test_exit_code_and_stderr(capsys):
    with pytest.raises(SystemExit) as e:
        run(lambda argv: train.main(["--router", "wave"]))
    assert e.value.code == 2 and "did you mean wav?" in capsys.readouterr().err

# ---------------------------------------------------------------------------------------------------------------------
# resuming

@pytest.mark.parametrize("flags, name", [
    ("--seed 1", "seed"), ("--router delta", "router"), ("--n_layer 3", "n_layer"), ("--batch_size 8", "batch_size"),
    ("--seq_len 8", "seq_len"), ("--dropout 0.1", "dropout"), ("--weight_decay 0", "weight_decay"),
    ("--gradient_accumulation_steps 2", "batch_size 4 times --gradient_accumulation_steps 2"),
    ("--vocab_size 200", "vocab_size"),
])
def test_a_resumed_run_keeps_its_settings(finished, flags, name):
    with pytest.raises(UserError, match=f"--{name} .*a resumed run keeps it"):
        train.main(["--init_from", "resume", "--out_dir", str(finished), "--max_iters", "6", *flags.split()])
    assert checkpoint(finished)["iter"] == 4

def test_a_resumed_run_may_be_told_the_same_again(finished, data, capsys):
    go("--dataset", data, "--out_dir", finished, "--max_iters", 4, "--init_from", "resume", "--n_blocks", 2,
       "--vocab_size", checkpoint(finished)["model_config"]["vocab_size"], "--log_interval", 3)
    assert "done: val loss" in capsys.readouterr().out

def test_nothing_to_go_on_with(finished, tmp_path):
    with pytest.raises(UserError, match="already at 4"):
        train.main(["--init_from", "resume", "--out_dir", str(finished), "--max_iters", "3"])
    whole = (finished / "ckpt.pt").read_bytes()
    (tmp_path / "ckpt.pt").write_bytes(whole[:len(whole) // 2])
    for init_from, out_dir in (("resume", tmp_path), (tmp_path, tmp_path / "run")):
        with pytest.raises(UserError, match="ckpt.pt is damaged"):
            train.main(["--init_from", str(init_from), "--out_dir", str(out_dir)])
    assert os.listdir(tmp_path) == ["ckpt.pt"]

def test_other_data(finished, tmp_path):
    path = tmp_path / "b.txt"
    path.write_text("another text, with other letters\n" * 200)
    other = str(prepare(input=[str(path)], tokenizer="char", out=tmp_path / "b", split="80/10/10", num_proc=1))
    with pytest.raises(UserError, match="it is not the data that the run in"):
        train.main(["--init_from", "resume", "--out_dir", str(finished), "--max_iters", "6", "--dataset", other])
    with pytest.raises(UserError, match="Prepare the data with the same tokenizer"):
        train.main(["--init_from", str(finished), "--out_dir", str(tmp_path / "run"), "--dataset", other])
    assert not (tmp_path / "run").exists()

# ---------------------------------------------------------------------------------------------------------------------
# disks and folders

def test_an_out_dir_that_cannot_be(data, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(SystemExit) as e:
            run(lambda argv: go("--dataset", data, "--out_dir", out, "--max_iters", 2))
        error = capsys.readouterr().err
        assert e.value.code == 2 and str(tmp_path / "file") in error and len(error.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"

@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(data, tmp_path):
    tmp_path.chmod(0o500)
    r = script("train.py", *SIZE, "--dataset", data, "--out_dir", tmp_path / "run", "--max_iters", 2)
    assert r.returncode == 2 and "permission denied" in r.stderr and len(r.stderr.splitlines()) == 1

def test_a_full_disk_keeps_the_last_checkpoint(data, tmp_path):
    """A limit on the size of a file stands for the full disk; the log may still be written, the checkpoint may not."""
    resource = pytest.importorskip("resource")
    go("--dataset", data, "--out_dir", tmp_path / "run", "--max_iters", 2)
    before = (tmp_path / "run" / "ckpt.pt").read_bytes()
    few = len(before) // 2
    r = script("train.py", "--init_from", "resume", "--out_dir", tmp_path / "run", "--max_iters", 4,
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (few, few)))
    assert r.returncode == 2 and "Traceback" not in r.stderr and len(r.stderr.splitlines()) <= 2, r.stderr
    assert "iteration 4: " in r.stderr and "larger than this system allows" in r.stderr
    assert (tmp_path / "run" / "ckpt.pt").read_bytes() == before
    assert sorted(os.listdir(tmp_path / "run")) == ["best.pt", "ckpt.pt", "config.json", "log.jsonl"]
    train.main(["--init_from", "resume", "--out_dir", str(tmp_path / "run"), "--max_iters", "4"])
    assert [x["iter"] for x in log(tmp_path / "run") if "val_loss" in x] == [0, 2, 4]
