"""Qwen3 weights and a tokenizer.json from a Hugging Face folder."""
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
import train
from model import GPT, GPTConfig
from nanodepth import qwen3
from nanodepth.data import load_data, tokenizer_from
from nanodepth.files import UserError, load_model
from nanodepth.runs import weights_digest
from nanodepth.tokenizer_json import HFTokenizer
from prepare_data import prepare
from corpora import stories
from tiny import ROOT, checkpoint, log

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 301, "hidden_size": 24,
          "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-4, "rope_theta": 5000,
          "rope_scaling": None, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
          "tie_word_embeddings": True}

def weights(dtype=torch.float32, **changes) -> dict:
    """Random tensors in the names and shapes of a Qwen3."""
    c = CONFIG | changes
    V, D, H, head = (c[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"))
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    layer = {"input_layernorm": (D,), "self_attn.q_proj": (q, D), "self_attn.k_proj": (kv, D),
             "self_attn.v_proj": (kv, D), "self_attn.o_proj": (D, q), "self_attn.q_norm": (head,),
             "self_attn.k_norm": (head,), "post_attention_layernorm": (D,), "mlp.gate_proj": (H, D),
             "mlp.up_proj": (H, D), "mlp.down_proj": (D, H)}
    shapes = {"model.embed_tokens": (V, D), "model.norm": (D,)} | {
        f"model.layers.{i}.{name}": shape for i in range(c["num_hidden_layers"]) for name, shape in layer.items()}
    if not c["tie_word_embeddings"]:
        shapes["lm_head"] = (V, D)
    torch.manual_seed(0)
    return {f"{name}.weight": (torch.randn(shape) * 0.1 + (len(shape) == 1)).to(dtype)
            for name, shape in shapes.items()}

def write(path: Path, tensors: dict, shards: int = 1, **changes) -> Path:
    """A Hugging Face folder of these tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    names = sorted(tensors)
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path

@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Stories at byte level: 257 tokens, which any model of more can read."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "a.txt").write_text("".join(stories(2000)), encoding="utf-8")
    return str(prepare(input=[folder / "a.txt"], tokenizer="byte", out=folder / "byte", num_proc=1, split="80/10/10"))

def start(folder, out, data, *flags) -> dict:
    """The checkpoint of a run that starts from `folder` and takes no step."""
    train.main(["--init_from", str(folder), "--out_dir", str(out), "--dataset", data, "--max_iters", "0", "--device",
                "cpu", "--eval_iters", "1", "--batch_size", "4", *map(str, flags)])
    return checkpoint(out)

# ---------------------------------------------------------------------------------------------------------------------
# weights

@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_are_those_of_transformers(tmp_path, data, tied):
    """Several shards, 4 query heads on 2, heads wider than n_embd / n_head. 1e-4 in float32: logits of a few units,
    that two orders of summation have rounded."""
    import transformers
    torch.manual_seed(3)
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=301, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, rms_norm_eps=1e-3, initializer_range=0.2,
        max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "norm" in name:                                          # else all ones, whichever is whose
                p.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    c = start(tmp_path / "hf", tmp_path / "run", data, "--seq_len", 40)
    ours = load_model(c, GPT, GPTConfig).eval()
    assert ours.config.router == "residual" and ours.config.tie_embeddings == tied
    idx = torch.randint(0, 301, (2, 40))
    with torch.no_grad():
        want = theirs(idx).logits                                       # (2, 40, 301)
        got = torch.cat([ours(idx[:, :t])[0] for t in range(1, 41)], 1)
    assert want.std() > 1 and (got - want).abs().max() < 1e-4
    assert {p.dtype for p in ours.parameters()} == {torch.float32}

def test_settings_of_config_json(tmp_path):
    old = qwen3.model_config(write(tmp_path / "old", weights()))
    new = {k: v for k, v in CONFIG.items() if not k.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    (tmp_path / "old" / "config.json").write_text(json.dumps(new))
    assert old == qwen3.model_config(tmp_path / "old")                  # before transformers 5, and since
    assert old == {"vocab_size": 301, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 24, "head_dim": 8,
                   "mlp_hidden": 40, "norm_eps": 1e-4, "rope_theta": 5000.0, "tie_embeddings": True, "seq_len": 64,
                   "router": "residual"}

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_as_it_is(tmp_path, data, dtype):
    tensors = weights(dtype)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()       # as in Qwen3-0.6B, tied all the same
    c = start(write(tmp_path / "hf", tensors), tmp_path / "run", data)
    assert c["model"]["sublayers.3.down_proj.weight"].equal(tensors["model.layers.1.mlp.down_proj.weight"].float())
    assert c["model"]["sublayers.2.norm.weight"].equal(tensors["model.layers.1.input_layernorm.weight"].float())
    assert c["model"]["lm_head.weight"].equal(tensors["lm_head.weight"].float())

def test_a_run_from_a_folder_is_like_any_other(tmp_path, data):
    """Every router starts from it; its shards do not count for the digest, its weights do; it resumes."""
    tensors = weights()
    one, three = write(tmp_path / "one", tensors), write(tmp_path / "three", tensors, shards=3)
    plain = start(one, tmp_path / "residual", data)
    gated = start(three, tmp_path / "gated", data, "--router", "delta_block", "--route_gate", 0)
    assert gated["val"]["val_loss"] == plain["val"]["val_loss"]         # bitwise
    assert plain["fingerprint"]["start"] == gated["fingerprint"]["start"] == weights_digest(qwen3.load(one)["model"])
    rd = start(one, tmp_path / "rd", data, "--router", "rd", "--norm_eps", 1e-12)
    bare = start(one, tmp_path / "bare", data, "--norm_eps", 1e-12)
    assert rd["val"]["val_loss"] == pytest.approx(bare["val"]["val_loss"], abs=2e-6)        # identity 12, in float32
    assert not rd["model"]["router.query_v"].any()
    tensors["model.norm.weight"][0] += 1
    other = start(write(tmp_path / "other", tensors), tmp_path / "changed", data)
    assert other["fingerprint"]["start"] != plain["fingerprint"]["start"]
    shutil.rmtree(one)
    train.main(["--init_from", "resume", "--out_dir", str(tmp_path / "residual"), "--max_iters", "2"])
    assert checkpoint(tmp_path / "residual")["iter"] == 2
    assert checkpoint(tmp_path / "residual")["fingerprint"]["start"] == plain["fingerprint"]["start"]

# ---------------------------------------------------------------------------------------------------------------------
# what is refused

def refused(folder, data, monkeypatch, words, *flags):
    """One or two lines with these words, and nothing is written."""
    monkeypatch.chdir(folder.parent)
    before = sorted(os.listdir("."))
    with pytest.raises(UserError) as e:
        start(folder, "run", data, *flags)
    assert words in str(e.value) and len(str(e.value).splitlines()) <= 2 and len(str(e.value)) < 500, str(e.value)
    assert sorted(os.listdir(".")) == before

@pytest.mark.parametrize("changes, words", [
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "holds LlamaForCausalLM"),
    ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "holds Qwen2ForCausalLM"),
    ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "holds Qwen3MoeForCausalLM"),
    ({"architectures": None, "model_type": None}, "a model of no name"),
    ({"use_sliding_window": True, "sliding_window": 16}, "sliding windows"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaled rotary positions (rope_scaling"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaled rotary positions (rope_scaling"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}}, "positions (rope_parameters"),
    ({"attention_bias": True}, "attention biases"),
    ({"hidden_act": "gelu"}, "the activation gelu"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
    ({"num_hidden_layers": 10**9}, "1,000,000,000 layers"),
    ({"num_hidden_layers": "2"}, "does not say a sensible num_hidden_layers"),
    ({"hidden_size": 10**8}, "has the shape"),
    ({"rms_norm_eps": None}, "does not say a sensible rms_norm_eps"),
    ({"architectures": 5}, "config.json is damaged"),
    ({"layer_types": 5}, "config.json is damaged"),
    ({"rope_parameters": "default"}, "scaled rotary positions (rope_parameters"),
])
def test_settings_that_our_model_has_not(tmp_path, data, monkeypatch, changes, words):
    refused(write(tmp_path / "hf", weights(), **changes), data, monkeypatch, words)

def spoil(name, folder, tensors):
    """Make a good folder of three shards bad in one way."""
    shard, index = folder / "model-00002-of-00003.safetensors", folder / "model.safetensors.index.json"
    def point_to(file):
        names = json.loads(index.read_text())
        names["weight_map"]["model.norm.weight"] = file
        index.write_text(json.dumps(names))
    def change(file, **changes):
        save_file({k: v for k, v in (load_file(folder / file) | changes).items() if v is not None}, folder / file)
    norm = next(f.name for f in sorted(folder.glob("*.safetensors")) if "model.norm.weight" in load_file(f))
    {"a missing shard": lambda: shard.unlink(),
     "a shard outside": lambda: point_to("../model.safetensors"),
     "an absolute shard": lambda: point_to(str(folder.parent / "x.safetensors")),
     "a shard of another kind": lambda: point_to("config.json"),
     "an empty index": lambda: index.write_text("{}"),
     "an index that is no JSON": lambda: index.write_text("["),
     "a shard cut short": lambda: shard.write_bytes(shard.read_bytes()[:-10]),
     "a header without end": lambda: shard.write_bytes((2**62).to_bytes(8, "little") + b"{}"),
     "a header that is no JSON": lambda: shard.write_bytes((8).to_bytes(8, "little") + b"\xff" * 8),
     "an empty shard": lambda: shard.write_bytes(b""),
     "a missing tensor": lambda: change(norm, **{"model.norm.weight": None}),
     "another tensor": lambda: change(norm, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
     "a third layer": lambda: change(norm, **{"model.layers.2.mlp.up_proj.weight": torch.zeros(40, 24)}),
     "a tensor in two shards": lambda: [change(f.name, **{"model.norm.weight": torch.ones(24)})
                                        for f in sorted(folder.glob("*.safetensors"))],
     "a wrong shape": lambda: change(norm, **{"model.norm.weight": torch.ones(25)}),
     "a type of integers": lambda: change(norm, **{"model.norm.weight": torch.ones(24, dtype=torch.int8)}),
     "another head": lambda: change(norm, **{"lm_head.weight": torch.ones(301, 24)}),
     "no config.json": lambda: (folder / "config.json").unlink(),
     "a config.json that is no JSON": lambda: (folder / "config.json").write_text("{'a': 1}"),
     "a config.json that is no object": lambda: (folder / "config.json").write_text("[" * 10**5),
     "pickles alone": lambda: [index.unlink(), *[f.unlink() for f in folder.glob("*.safetensors")],
                               torch.save(tensors, folder / "pytorch_model.bin")]}[name]()

@pytest.mark.parametrize("name, words", [
    ("a missing shard", "lacks model-00002-of-00003.safetensors, which its model.safetensors.index.json names"),
    ("a shard outside", "names '../model.safetensors', which is no .safetensors file of this folder"),
    ("an absolute shard", "which is no .safetensors file of this folder"),
    ("a shard of another kind", "names 'config.json', which is no .safetensors file"),
    ("an empty index", "it names no files"),
    ("an index that is no JSON", "it is not a JSON object"),
    ("a shard cut short", "model-00002-of-00003.safetensors is damaged"),
    ("a header without end", "model-00002-of-00003.safetensors is damaged"),
    ("a header that is no JSON", "model-00002-of-00003.safetensors is damaged"),
    ("an empty shard", "model-00002-of-00003.safetensors is damaged"),
    ("a missing tensor", "lacks the tensor model.norm.weight"),
    ("another tensor", "holds model.layers.0.self_attn.q_proj.bias, which a Qwen3"),
    ("a third layer", "holds model.layers.2.mlp.up_proj.weight, which a Qwen3"),
    ("a tensor in two shards", "model.norm.weight is both in model-00001"),
    ("a wrong shape", "model.norm.weight has the shape (25,), and config.json makes it (24,)"),
    ("a type of integers", "model.norm.weight is in I8"),
    ("another head", "lm_head.weight is not model.embed_tokens.weight"),
    ("no config.json", "has no config.json"),
    ("a config.json that is no JSON", "it is not a JSON object"),
    ("a config.json that is no object", "it is not a JSON object"),
    ("pickles alone", "only pytorch_model.bin, a pickle"),
])
def test_folders_that_are_not_whole(tmp_path, data, monkeypatch, name, words):
    tensors = weights()
    folder = write(tmp_path / "hf", tensors, shards=3)
    (tmp_path / "model.safetensors").write_bytes(b"not to be read")
    spoil(name, folder, tensors)
    refused(folder, data, monkeypatch, words)

def test_flags_and_libraries(tmp_path, data, monkeypatch):
    folder = write(tmp_path / "hf", weights())
    refused(folder, data, monkeypatch, "do not fit this model: sublayers.4", "--n_layer", 3)
    refused(folder, data, monkeypatch, "the vocabulary of", "--vocab_size", 100)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(folder, data, monkeypatch, "needs safetensors: pip install safetensors")
    with pytest.raises(UserError, match="must be scratch, resume, or the folder of a run or of Qwen3 weights"):
        start(tmp_path / "nothing", tmp_path / "run", data)

# ---------------------------------------------------------------------------------------------------------------------
# a tokenizer.json

TEXT = "the cat<|endoftext|> sat <|other|>é 東京 \x00\x7f\xad ñ\n\n😀 <think>"

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small Qwen3 with a byte-level tokenizer of 400 tokens, of which its vocabulary has 70,000."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.decoder = normalizers.NFC(), decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(stories(300), trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|other|>", "<|endoftext|>"]))
    bpe.add_tokens(["<think>"])                                         # an added token that is not special
    path = write(tmp_path_factory.mktemp("hf") / "hf", weights(vocab_size=70_000), vocab_size=70_000)
    bpe.enable_truncation(3)                                            # some files have that
    bpe.save(str(path / "tokenizer.json"))
    return path

def test_a_tokenizer_json(folder):
    from tokenizers import Tokenizer
    tok = HFTokenizer.from_file(folder / "tokenizer.json")
    ids = tok.encode(TEXT)
    assert ids.dtype == np.uint32 and tok.vocab_size == 70_000 and tok.end == 1
    assert not {0, 1} & {*ids.tolist()} and ids[-1] == 400              # special tokens are plain text, <think> a token
    assert tok.decode(ids) == TEXT
    assert tok.decode(tok.encode("e\u0301")) == unicodedata.normalize("NFC", "e\u0301")     # as its makers want
    assert tok.decode([5, 1, 69_999]) == tok.decode([5])                # an end, and a row without a token, are nothing
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    for text in stories(50) + ["", "  a\n\n b"]:
        ids = tok.encode(text)
        assert ids.tolist() == theirs.encode(text).ids and len(tok.decode_bytes(ids)) == tok.lengths[ids].sum()
    with pytest.raises(UserError, match="lone surrogate"):
        tok.encode("\ud800")
    again = tokenizer_from(json.loads(json.dumps(tok.describe())))      # as from meta.json
    assert again.describe() == tok.describe() and again.encode(TEXT).tolist() == tok.encode(TEXT).tolist()

def test_from_a_folder_to_text(folder, tmp_path, capsys):
    """Prepare, convert, train, speak: when the folder is gone too."""
    (tmp_path / "a.txt").write_text("".join(stories(2000)) + TEXT, encoding="utf-8")
    shutil.copytree(folder, tmp_path / "hf")
    again = lambda: prepare(input=[tmp_path / "a.txt"], tokenizer=tmp_path / "hf/tokenizer.json",
                            out=tmp_path / "data", num_proc=1, split="80/10/10")
    again()
    data = load_data(tmp_path / "data")
    assert data.vocab_size == 70_000 and data.test.window(len(data.test) - 1, 1) == 1           # the end of a text
    assert data.tokenizer.decode(data.test.window(0, len(data.test))).endswith(TEXT)
    splits = data.meta["splits"]
    assert sum(splits[s]["bytes"] for s in splits) == (tmp_path / "a.txt").stat().st_size
    again()
    assert "is there already" in capsys.readouterr().out
    c = start(tmp_path / "hf", tmp_path / "run", str(tmp_path / "data"), "--seq_len", 16, "--router", "block",
              "--max_iters", 1)
    assert log(tmp_path / "run")[0]["val_bpb"] > 0
    assert (tmp_path / "run/config.json").stat().st_size < 10_000      # the tokenizer by its digest
    assert c["data"]["tokenizer"]["sha256"] == data.tokenizer.sha256
    shutil.rmtree(tmp_path / "hf")
    shutil.rmtree(tmp_path / "data")
    sample.main(["--out_dir", str(tmp_path / "run"), "--prompt", "<|endoftext|>", "--num_samples", "1",
                 "--max_new_tokens", "4", "--device", "cpu"])
    assert "<|endoftext|>" in capsys.readouterr().out

def test_data_of_another_tokenizer(folder, data, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "hf")
    refused(tmp_path / "hf", data, monkeypatch, "Prepare the data with the same tokenizer")

def test_the_end_of_a_text(folder, tmp_path):
    """<|endoftext|>; where there is none, what tokenizer_config.json calls eos_token, if it is an added token."""
    text = (folder / "tokenizer.json").read_text(encoding="utf-8").replace("<|endoftext|>", "<|stop|>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="nothing could end a text"):
        HFTokenizer.from_file(tmp_path / "tokenizer.json")
    for eos in ("<|stop|>", {"content": "<|stop|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        tok = HFTokenizer.from_file(tmp_path / "tokenizer.json")
        assert tok.end == 1 and tok.vocab_size == 401                   # without config.json: as many as there are
    assert tokenizer_from(tok.describe()).end == 1

@pytest.mark.parametrize("change, words", [
    (lambda path: path.write_text("{"), "is damaged, or no tokenizer.json"),
    (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8"),
    (lambda path: path.unlink(), "there is no tokenizer"),
    (lambda path: path.with_name("config.json").write_text('{"vocab_size": 300}'), "not of one model"),
    (lambda path: path.write_text(path.read_text(encoding="utf-8").replace('"type": "ByteLevel"', '"type": "Fuse"'),
                                  encoding="utf-8"), "damaged, or no tokenizer.json"),
    (lambda path: path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"decoder": {
        "type": "Fuse"}}), encoding="utf-8"), "is not byte level"),
    (lambda path: sys.modules.__setitem__("tokenizers", None), "needs tokenizers: pip install tokenizers"),
])
def test_tokenizers_that_are_refused(folder, tmp_path, monkeypatch, change, words):
    import tokenizers
    monkeypatch.setitem(sys.modules, "tokenizers", tokenizers)          # so that it comes back
    shutil.copytree(folder, tmp_path / "hf")
    (tmp_path / "a.txt").write_text("text\n" * 999)
    change(tmp_path / "hf/tokenizer.json")
    with pytest.raises(UserError) as e:
        prepare(input=[tmp_path / "a.txt"], tokenizer=tmp_path / "hf/tokenizer.json", out=tmp_path / "data")
    assert words in str(e.value) and not (tmp_path / "data").exists()

def test_a_tokenizer_that_loses_text(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    bpe = Tokenizer(models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2}, []))
    bpe.decoder, bpe.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.add_special_tokens(["<|endoftext|>"])
    tok = HFTokenizer(bpe.to_str())
    assert tok.encode("abba").tolist() == [0, 1, 1, 0]
    with pytest.raises(UserError, match="does not give 'abc' back"):
        tok.encode("abc")

# ---------------------------------------------------------------------------------------------------------------------
# memory

PEAK = """
import re, sys
sys.path.insert(0, {root!r})
import train
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
base = peak()                           # torch is imported
settings, checkpoint = train.read_settings(sys.argv[1:])
run = train.set_up(settings, checkpoint, train.several.Group())
print((peak() - base) / (4 * run.record["params"]))
"""

@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_loading_the_0_6b_shape(tmp_path, data):
    """From the flags to the optimizer, bfloat16 weights on the disk: 1.2 times the float32 model at most."""
    shape = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    write(tmp_path / "hf", weights(torch.bfloat16, **shape), **shape)
    flags = ["--init_from", tmp_path / "hf", "--dataset", data, "--router", "delta_block", "--route_gate", "0",
             "--eval_iters", "1", "--out_dir", tmp_path / "run"]
    done = subprocess.run([sys.executable, "-c", PEAK.format(root=str(ROOT)), *map(str, flags)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert 1 < float(done.stdout) <= 1.2
