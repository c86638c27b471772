"""What is recorded of a run is what was run; and which weights and files are kept."""
import json
import os
import subprocess
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from model import GPT, GPTConfig
from nanodepth import runs
from corpora import write_shard
from nanodepth.data import load_data
from nanodepth.files import UserError, load_checkpoint
from prepare_data import prepare
from tiny import ROOT, SIZE, checkpoint, data_folder, go, log, same_weights


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"))

@pytest.fixture(scope="session")
def delta(data, tmp_path_factory):
    """A run of delta whose gates have moved."""
    out = tmp_path_factory.mktemp("delta")
    go("--dataset", data, "--out_dir", out, "--router", "delta", "--route_gate", 1, "--max_iters", 3,
       "--warmup_iters", 0)
    return out

def config(out) -> dict:
    return json.loads((Path(out) / "config.json").read_text())

def resume(out, *flags):
    train.main(["--init_from", "resume", "--out_dir", str(out), *map(str, flags)])

# ---------------------------------------------------------------------------------------------------------------------
# the record

SETTINGS = set("""dataset out_dir init_from eval_only seed vocab_size tokenizer max_iters max_tokens batch_size
    gradient_accumulation_steps learning_rate min_lr warmup_iters lr_decay_iters router_lr weight_decay beta1 beta2
    grad_clip eval_interval eval_iters log_interval device dtype compile recompute fsdp""".split())

def test_every_setting_is_recorded(data, tmp_path):
    """A new setting belongs into this list, and with a value of its own into the record."""
    assert {f.name for f in fields(train.TrainConfig)} == SETTINGS
    assert set(train.RESUME_MAY_CHANGE) <= SETTINGS | {"plain_read"}
    given = {"max_iters": 2, "learning_rate": 0.003, "min_lr": 0.001, "warmup_iters": 7, "lr_decay_iters": 9,
             "router_lr": 0.02,
             "weight_decay": 0.2, "beta1": 0.8, "beta2": 0.95, "grad_clip": 0.7, "eval_interval": 2, "log_interval": 1,
             "router": "wav", "rho": 0.5, "seed": 4, "dtype": "bfloat16", "recompute": True}
    go("--dataset", data, "--out_dir", tmp_path, *(f"--{k}={v}" for k, v in given.items()))
    for record in (config(tmp_path), checkpoint(tmp_path)):
        assert set(record["settings"]) == SETTINGS | {f.name for f in fields(GPTConfig)} | {"router_sha256"}
        assert {k: record["settings"][k] for k in given} == given

# what a pair of runs must have in common

def mark(out) -> dict:
    return config(out)["fingerprint"]

def test_runs_of_two_routers_differ_in_the_router_s_code_alone(data, tmp_path):
    for router in ("block", "wav"):
        go("--dataset", data, "--out_dir", tmp_path / router, "--router", router, "--max_iters", 1)
        go("--dataset", data, "--out_dir", tmp_path / f"from-{router}", "--router", router, "--max_iters", 1,
           "--init_from", tmp_path / "block")
    for start in ("", "from-"):
        a, b = mark(tmp_path / f"{start}block"), mark(tmp_path / f"{start}wav")
        assert {k for k in a if a[k] != b[k]} == {"router"}
        assert a["data"] == config(tmp_path / "block")["data"]["digest"] and a["torch"] == str(torch.__version__)
    assert mark(tmp_path / "block")["start"] is None
    assert mark(tmp_path / "from-wav")["start"] == runs.weights_digest(checkpoint(tmp_path / "block")["model"])
    go("--dataset", data, "--out_dir", tmp_path / "third", "--max_iters", 1, "--init_from", tmp_path / "wav")
    assert mark(tmp_path / "third")["start"] not in (None, mark(tmp_path / "from-wav")["start"])

def test_a_resume_with_other_settings_shows_in_the_fingerprint(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path / "a", "--max_iters", 2)
    before = mark(tmp_path / "a")
    resume(tmp_path / "a", "--log_interval", 1, "--batch_size", 2, "--gradient_accumulation_steps", 2)
    assert mark(tmp_path / "a") == before and before["changed"] == []
    resume(tmp_path / "a", "--learning_rate", 1e-3, "--max_iters", 3)
    assert mark(tmp_path / "a") == before | {"changed": [{"iter": 2, "max_iters": 3, "learning_rate": 1e-3}]}
    resume(tmp_path / "a", "--dtype", "bfloat16", "--max_iters", 4)
    now = mark(tmp_path / "a")
    assert now["dtype"] == "float32, bfloat16" and now["changed"][1] == {"iter": 3, "max_iters": 4}

def test_the_digests_of_the_code(tmp_path):
    """An edited router is another router; an edited read is another model; a comment is nothing."""
    source = (ROOT / "model.py").read_text(encoding="utf-8")

    def digests(router, old="", new=""):
        assert old in source
        (tmp_path / "model.py").write_text(source.replace(old, new, 1) if old else source, encoding="utf-8")
        return runs.code_digests(router, train.ROUTERS, [tmp_path / "model.py"], None)
    plain = {router: digests(router) for router in train.ROUTERS}
    assert len({own for own, _ in plain.values()}) == len(plain) and len({rest for _, rest in plain.values()}) == 1
    for router, edits in (("wav", ("sign > 0", "sign < 0")), ("block", ("pc[0] + u", "pc[0] - u")),
                          ("delta", ("stream + (mix if", "stream - (mix if"))):
        changed = {name for name in plain if digests(name, *edits) != plain[name]}
        assert changed == {cls for cls in plain if issubclass(train.ROUTERS[cls], train.ROUTERS[router])}
        assert digests(router, *edits)[1] == plain[router][1]
    for edits in (("logit.softmax(0)", "logit.softmax(1)"), ("F.silu(gate) * up", "F.silu(up) * gate")):
        for name in plain:
            own, rest = digests(name, *edits)
            assert own == plain[name][0] and rest != plain[name][1]
    for edits in (("\nimport math", "\n# a comment\nimport math"), ("The rule that everybody uses", "The rule"),
                  ("it must divide n_head", "choose one that divides n_head"), ('"wav": WAV', '"wave": WAV')):
        assert all(digests(name, *edits) == plain[name] for name in plain)
    assert runs.code_digests("wav", train.ROUTERS, [], "of a file")[0] != \
        runs.code_digests("wav", train.ROUTERS, [], "of another")[0]

def test_the_machine_and_the_code_are_recorded(data, tmp_path):
    threads = torch.get_num_threads()
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 3, "--dtype", "auto", "--device", "auto",
       "--n_embd", 32)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    for record in (config(tmp_path), checkpoint(tmp_path)):
        assert record["device"] in ("cpu", "mps", "cuda") and record["dtype"] in ("float32", "bfloat16", "float16")
        assert record["threads"] == torch.get_num_threads() and record["processes"] == 1
        assert record["torch"] == torch.__version__ and type(record["torch"]) is str
        assert record["git"] is None if not commit else record["git"].removesuffix("-dirty") == commit
    assert config(tmp_path)["model"] == checkpoint(tmp_path)["model_config"]
    assert checkpoint(tmp_path)["tokens"] == 3 * 4 * 16 == log(tmp_path)[-1]["tokens"]
    torch.set_num_threads(threads)

def test_a_folder_without_git_says_none(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "nanodepth" / "runs.py"))
    assert runs.git_commit() is None
    (tmp_path / ".git").mkdir()                                         # git that fails, or is not there
    assert runs.git_commit() is None
    monkeypatch.setenv("PATH", "")
    assert runs.git_commit() is None

def test_each_part_of_a_run_is_in_its_history(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 2)
    resume(tmp_path, "--max_iters", 4, "--learning_rate", 5e-4, "--dtype", "bfloat16")
    for history in (config(tmp_path)["history"], checkpoint(tmp_path)["history"]):
        assert [(h["iter"], h["dtype"]) for h in history] == [(0, "float32"), (2, "bfloat16")]
        assert history[0]["changed"] == {} and history[1]["changed"] == {
            "init_from": "resume", "max_iters": 4, "learning_rate": 5e-4, "dtype": "bfloat16"}

def test_router_lr_holds_after_another_learning_rate(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path, "--router", "block", "--max_iters", 2, "--router_lr", 0.5,
       "--lr_decay_iters", 4,
       "--warmup_iters", 0)
    resume(tmp_path, "--max_iters", 3, "--learning_rate", 1e-3, "--min_lr", 1e-3)
    groups = checkpoint(tmp_path)["optimizer"]["param_groups"]
    assert [g["lr"] for g in groups] == pytest.approx([1e-3, 1e-3, 0.5])            # the schedule is flat
    resume(tmp_path, "--max_iters", 4, "--router_lr", 0.25)
    assert checkpoint(tmp_path)["optimizer"]["param_groups"][2]["lr"] == pytest.approx(0.25)
    assert checkpoint(tmp_path)["settings"]["router_lr"] == 0.25

# ---------------------------------------------------------------------------------------------------------------------
# the data

def test_two_texts_of_equal_length_are_two(tmp_path):
    base = "".join(np.random.default_rng(0).choice(list("abcdefgh \n"), 20_000))
    for name, text in (("a", base), ("b", base[:500] + ("a" if base[500] != "a" else "b") + base[501:]), ("c", base)):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare(input=[str(tmp_path / f"{name}.txt")], tokenizer="char", out=tmp_path / name, split="80/10/10",
                num_proc=1)
    facts = {name: runs.data_facts(load_data(tmp_path / name)) for name in "abc"}
    assert {**facts["a"], "digest": 0} == {**facts["b"], "digest": 0}              # their counts do not tell them apart
    assert facts["a"]["digest"] != facts["b"]["digest"] and facts["a"] == facts["c"]
    go("--dataset", tmp_path / "a", "--out_dir", tmp_path / "run", "--max_iters", 1)
    with pytest.raises(UserError) as e:
        resume(tmp_path / "run", "--max_iters", 2, "--dataset", tmp_path / "b")
    assert facts["a"]["digest"] in str(e.value) and facts["b"]["digest"] in str(e.value)       # both values
    assert len(str(e.value).splitlines()) <= 2
    resume(tmp_path / "run", "--max_iters", 2, "--dataset", tmp_path / "c")

def test_the_digest_of_shards_from_elsewhere(tmp_path, monkeypatch):
    """Their sizes, headers and both ends; of a shard of 20 GB no more than 128 KiB is read."""
    rng, tokens = np.random.default_rng(0), {}
    for split in ("train", "val"):
        tokens[split] = rng.integers(0, 50, 200_000).astype(np.uint16)
        write_shard(tmp_path / f"mine_{split}_000000.bin", tokens[split])
    digest = lambda: runs.data_facts(load_data(tmp_path))["digest"]
    first = digest()
    for split, place in (("train", 0), ("train", -1), ("val", 5)):
        changed = tokens[split].copy()
        changed[place] += 1
        write_shard(tmp_path / f"mine_{split}_000000.bin", changed)
        assert digest() != first
        write_shard(tmp_path / f"mine_{split}_000000.bin", tokens[split])
    assert digest() == first
    write_shard(tmp_path / "mine_train_000000.bin", tokens["train"][:-1])
    assert digest() != first

# ---------------------------------------------------------------------------------------------------------------------
# versions

def test_a_setting_that_a_newer_version_added(data, tmp_path):
    """An older checkpoint lacks settings, facts and files of today; one of a newer version has some unknown here."""
    go("--dataset", data, "--out_dir", tmp_path / "whole", "--max_iters", 6, "--lr_decay_iters", 6)
    go("--dataset", data, "--out_dir", tmp_path / "run", "--max_iters", 3, "--lr_decay_iters", 6)
    c = checkpoint(tmp_path / "run")
    old = {k: c[k] for k in ("model", "iter", "val", "model_config", "tokenizer", "elapsed_s")}
    added = ("max_tokens", "recompute", "fsdp", "eval_only")
    old["settings"] = {k: v for k, v in c["settings"].items() if k not in added} | {"gone": 1}
    old["data"] = {k: v for k, v in c["data"].items() if k != "digest"}
    groups = [{k: v for k, v in g.items() if k != "param_names"} for g in c["optimizer"]["param_groups"]]
    old["optimizer"] = {"state": c["optimizer"]["state"], "param_groups": groups}
    torch.save(old, tmp_path / "run" / "ckpt.pt")
    (tmp_path / "run" / "best.pt").unlink()
    resume(tmp_path / "run", "--max_iters", 6, "--recompute", "false")
    assert same_weights(tmp_path / "run", tmp_path / "whole") and "gone" not in checkpoint(tmp_path / "run")["settings"]
    assert (tmp_path / "run" / "best.pt").exists()

def test_the_optimizers_memory_goes_by_names(data, tmp_path):
    """Should another version order its parameters otherwise, each still gets its own."""
    go("--dataset", data, "--out_dir", tmp_path / "whole", "--max_iters", 6, "--lr_decay_iters", 6)
    go("--dataset", data, "--out_dir", tmp_path / "run", "--max_iters", 3, "--lr_decay_iters", 6)
    c = checkpoint(tmp_path / "run")
    for group in c["optimizer"]["param_groups"]:
        group["params"], group["param_names"] = group["params"][::-1], group["param_names"][::-1]
    torch.save(c, tmp_path / "run" / "ckpt.pt")
    resume(tmp_path / "run", "--max_iters", 6)
    assert same_weights(tmp_path / "run", tmp_path / "whole")

# ---------------------------------------------------------------------------------------------------------------------
# starting from another run

def start(data, start_from, out, *flags):
    """The weights that a run starts with: it takes no step."""
    train.main([*map(str, flags), "--init_from", str(start_from), "--out_dir", str(out), "--dataset", data,
                "--max_iters", "0",
                "--device", "cpu", "--eval_iters", "1", "--batch_size", "4"])
    return checkpoint(out)

def test_a_gate_that_is_given_is_not_copied_over(data, delta, tmp_path):
    trained = checkpoint(delta)["model"]
    assert (trained["router.gate"][1:] != 1).all()                      # the first gates nothing
    c = start(data, delta, tmp_path / "given", "--route_gate", 0)
    assert (c["model"]["router.gate"] == 0).all() and c["settings"]["route_gate"] == 0
    assert torch.equal(c["model"]["router.query"], trained["router.query"])
    c = start(data, delta, tmp_path / "inherited")
    assert torch.equal(c["model"]["router.gate"], trained["router.gate"])

def test_what_a_rezero_learned_is_no_gate_of_delta(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path / "rezero", "--router", "rezero", "--max_iters", 3, "--warmup_iters", 0)
    theirs = checkpoint(tmp_path / "rezero")["model"]["router.gate"]
    c = start(data, tmp_path / "rezero", tmp_path / "delta", "--router", "delta", "--route_gate", 0.5)
    assert theirs.shape == c["model"]["router.gate"].shape and (c["model"]["router.gate"] == 0.5).all()

def test_biases_of_other_details_are_not_taken_over(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path / "wav", "--router", "wav", "--details", "phase", "--max_iters", 3,
       "--warmup_iters", 0)
    theirs = checkpoint(tmp_path / "wav")["model"]
    assert (theirs["router.detail_bias"] != -2).any()
    for name, flags, kept in (("same", [], True), ("split", ["--details", "split"], False),
                              ("given", ["--detail_bias", "-2"], False)):
        c = start(data, tmp_path / "wav", tmp_path / name, *flags)["model"]
        assert torch.equal(c["router.detail_bias"], theirs["router.detail_bias"]) == kept
        assert torch.equal(c["router.query"], theirs["router.query"])

def test_a_frozen_query_stays_zero(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path / "rd", "--router", "rd", "--max_iters", 3, "--warmup_iters", 0)
    assert checkpoint(tmp_path / "rd")["model"]["router.query_v"].abs().sum() > 0
    c = start(data, tmp_path / "rd", tmp_path / "frozen", "--rd_control", "frozen_v")
    assert (c["model"]["router.query_v"] == 0).all()

def test_a_blocks_queries_go_to_its_rd(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path / "block", "--router", "block", "--max_iters", 3, "--warmup_iters", 0)
    c = start(data, tmp_path / "block", tmp_path / "rd", "--router", "rd")
    assert torch.equal(c["model"]["router.query"], checkpoint(tmp_path / "block")["model"]["router.query"])

def test_the_default_folder_is_made_from_the_sizes_it_has(data, delta, tmp_path, monkeypatch):
    """And not from the defaults: that would move a stranger's run aside."""
    monkeypatch.chdir(tmp_path)
    defaults = Path("out") / "{router}-{n_layer}x{n_embd}-s0".format(**train.DEFAULTS)
    defaults.mkdir(parents=True)
    (defaults / "ckpt.pt").write_text("a stranger's")
    train.main(["--init_from", str(delta), "--dataset", data, "--max_iters", "0", "--device", "cpu", "--seed", "5"])
    assert sorted(p.name for p in Path("out").iterdir()) == sorted([defaults.name, "delta-2x16-s5"])
    assert os.listdir(defaults) == ["ckpt.pt"]

def test_a_run_does_not_start_from_its_own_folder(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main([*SIZE, "--dataset", data, "--max_iters", "1"])
    folder = Path("out/block-2x16-s0")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for init_from in (folder, folder / "best.pt", folder.resolve()):
        with pytest.raises(UserError, match="holds the run that this one starts from"):
            train.main(["--init_from", str(init_from), "--dataset", data, "--max_iters", "1"])
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}

# ---------------------------------------------------------------------------------------------------------------------
# best and last, and looking without touching

def losses(monkeypatch, values):
    """Evaluations whose val losses are these; those of train are 9."""
    turn = iter([x for v in values for x in (v, 9.0)])
    monkeypatch.setattr(train, "evaluate", lambda *args: next(turn))

def test_the_best_and_the_last_are_kept(data, tmp_path, monkeypatch):
    losses(monkeypatch, [5.0, 3.0, 4.0, 2.0, 3.5])
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 8, "--eval_interval", 2)
    best, last = load_checkpoint(tmp_path, "best.pt"), load_checkpoint(tmp_path)
    assert (best["iter"], last["iter"]) == (6, 8) and best["best"] == last["best"] == {"iter": 6, "val_loss": 2.0}
    assert best["val"]["val_loss"] == 2.0 and not torch.equal(best["model"]["embed.weight"],
                                                              last["model"]["embed.weight"])
    losses(monkeypatch, [2.5, 1.5])
    resume(tmp_path, "--max_iters", 10)                                 # worse than before the stop: not the best
    assert load_checkpoint(tmp_path, "best.pt")["iter"] == 6
    resume(tmp_path, "--max_iters", 12)
    assert load_checkpoint(tmp_path, "best.pt")["iter"] == 12

def test_a_kill_between_the_last_and_the_best(data, tmp_path):
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 4, "--learning_rate", 1e-2, "--warmup_iters", 0)
    assert checkpoint(tmp_path)["best"]["iter"] == 4
    (tmp_path / "best.pt").unlink()
    resume(tmp_path)
    assert (tmp_path / "best.pt").read_bytes() == (tmp_path / "ckpt.pt").read_bytes()

def test_a_file_system_without_links(data, tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(os, "link", refuse)
    losses(monkeypatch, [5.0, 3.0, 4.0])
    go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 4, "--eval_interval", 2)
    assert load_checkpoint(tmp_path, "best.pt")["iter"] == 2
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "ckpt.pt", "config.json", "log.jsonl"]

def test_an_earlier_runs_best_is_moved_aside_with_it(data, tmp_path):
    for _ in range(2):
        go("--dataset", data, "--out_dir", tmp_path, "--max_iters", 1)
    assert sorted(os.listdir(tmp_path / "old1")) == ["best.pt", "ckpt.pt", "config.json", "log.jsonl"]

def test_eval_only_says_three_losses_and_touches_nothing(data, tmp_path, capsys, monkeypatch):
    go("--dataset", data, "--out_dir", tmp_path / "run", "--max_iters", 3)
    state = lambda: {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "run").iterdir()}
    last, before = log(tmp_path / "run")[-1], state()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for flags in (["--init_from", "resume", "--out_dir", "run"], ["--init_from", "run"],
                  ["--init_from", "run/best.pt"]):
        train.main([*flags, "--eval_only", "--dataset", data, "--device", "cpu", "--eval_iters", "2"])
        said = dict(line.split(" loss ") for line in capsys.readouterr().out.splitlines())
        assert list(said) == ["val", "train", "test"]
        assert said["val"] == (f"{last['val_loss']:.4f} nats a token ({last['val_bpb']:.4f} bits a byte), "
                               "32 windows of 16")
        assert said["train"].startswith(f"{last['train_loss']:.4f} nats")
        tokens = load_data(data)
        model = GPT(GPTConfig(**checkpoint("run")["model_config"]))
        model.load_state_dict(checkpoint("run")["model"])
        starts = np.linspace(0, len(tokens.test) - 17, 32).astype(int)
        test = torch.from_numpy(np.stack([tokens.test.window(int(a), 17) for a in starts]))
        with torch.no_grad():
            loss = model.eval()(test[:, :-1], test[:, 1:])[1].item()
        assert float(said["test"].split()[0]) == pytest.approx(loss, abs=6e-5)              # four digits are shown
    assert state() == before
    assert os.listdir(tmp_path) == ["run"]

def test_train_is_looked_at_in_as_many_windows_as_val(tmp_path):
    """Also where val is too short for all of them."""
    rng = np.random.default_rng(0)
    for split, n in (("train", 5000), ("val", 16 * 7 + 1)):
        write_shard(tmp_path / f"mine_{split}_000000.bin", rng.integers(0, 50, n))
    s, _ = train.read_settings([*SIZE, "--dataset", str(tmp_path), "--vocab_size", "50"])
    splits = train.set_up(s, None, train.several.Group()).splits
    assert {k: len(v) for k, v in splits.items()} == {"val": 7, "train": 7}
