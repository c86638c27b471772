"""Qwen3 weights from a Hugging Face folder: config.json, and model.safetensors or its shards. No transformers needed.

    checkpoint = load("Qwen3-0.6B")             # what train.py starts from; no weight has been read yet
    checkpoint["model"]["embed.weight"]         # reads this one, from its file

What the folder says is checked before any weight is read or any model is made: the architecture, the settings that our
model has no counterpart of, and each tensor's name, shape and type. Nothing in it is executed: pickles are not read.
"""
import json
from collections.abc import Mapping
from pathlib import Path

from nanodepth.documents import need
from nanodepth.files import UserError

# model_config's names, and config.json's
SIZES = {"vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
         "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size", "head_dim": "head_dim",
         "mlp_hidden": "intermediate_size"}
TYPES = ("F32", "BF16", "F16")
SAVED = "Get the folder again, or save it with transformers' save_pretrained."

def is_folder(path) -> bool:
    """Whether `path` is a Hugging Face folder. A run has a config.json too, and a log.jsonl or ckpt.pt beside it."""
    path = Path(path)
    ours = (path / "log.jsonl").exists() or (path / "ckpt.pt").exists()
    return path.is_dir() and not ours and ((path / "config.json").exists() or any(path.glob("*.safetensors")))

def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}. {SAVED}") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object. {SAVED}")
    return value

def model_config(path: Path) -> dict:
    """GPTConfig's fields from config.json. UserError names what our model does not have."""
    config = read_json(path / "config.json")

    def refuse(what):
        raise UserError(f"{path} {what}; --init_from reads Qwen3ForCausalLM, with full attention, plain rotary "
                        f"positions and no biases.")

    architecture = (config.get("architectures") or [config.get("model_type")])[0]
    if config.get("model_type") != "qwen3" or architecture not in ("Qwen3ForCausalLM", "qwen3"):
        refuse(f"holds {architecture or 'a model of no name'}")
    if config.get("use_sliding_window") or set(config.get("layer_types") or []) - {"full_attention"}:
        refuse("has sliding windows (use_sliding_window, layer_types)")
    if config.get("attention_bias"):
        refuse("has attention biases (attention_bias)")
    if config.get("hidden_act", "silu") != "silu":
        refuse(f"has the activation {config['hidden_act']} (hidden_act)")
    if config.get("quantization_config"):
        refuse("has quantized weights (quantization_config)")
    rope = config.get("rope_parameters") or {}                          # since transformers 5; before, two settings:
    scaling = config.get("rope_scaling") or {}
    for name, found in (("rope_parameters", rope), ("rope_scaling", scaling)):
        kind = found.get("rope_type", found.get("type", "default")) if isinstance(found, dict) else found
        if kind != "default" or set(found) - {"rope_type", "type", "rope_theta"}:
            refuse(f"has scaled rotary positions ({name}: {str(found)[:80]})")

    config["rope_theta"] = (rope or scaling).get("rope_theta", config.get("rope_theta"))
    for name in ("rms_norm_eps", "rope_theta", *SIZES.values()):
        value, kinds = config.get(name), (int,) if name in SIZES.values() else (int, float)
        if type(value) not in kinds or not 0 < value < 2**31:
            raise UserError(f"{path / 'config.json'} is damaged: it does not say a sensible {name}. {SAVED}")
    longest = config.get("max_position_embeddings")
    return {**{ours: config[theirs] for ours, theirs in SIZES.items()}, "router": "residual",
            "norm_eps": config["rms_norm_eps"], "rope_theta": config["rope_theta"],
            "tie_embeddings": bool(config.get("tie_word_embeddings")),
            **({"seq_len": longest} if type(longest) is int and 1 <= longest < 128 else {})}

def tensors(c: dict) -> dict[str, tuple[str, tuple]]:
    """Every tensor of such a model, in our names: its name in the folder, and its shape (out, in)."""
    V, D, H = c["vocab_size"], c["n_embd"], c["mlp_hidden"]
    q, kv, head = c["n_head"] * c["head_dim"], c["n_kv_head"] * c["head_dim"], c["head_dim"]
    attention = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q), "q_norm": (head,),
                 "k_norm": (head,)}
    mlp = {"gate_proj": (H, D), "up_proj": (H, D), "down_proj": (D, H)}
    found = {"embed": ("model.embed_tokens", (V, D)), "norm": ("model.norm", (D,)), "lm_head": ("lm_head", (V, D))}
    for i in range(c["n_layer"]):
        theirs = f"model.layers.{i}"
        for l, norm, part, shapes in ((2 * i, "input_layernorm", "self_attn", attention),
                                      (2 * i + 1, "post_attention_layernorm", "mlp", mlp)):
            found[f"sublayers.{l}.norm"] = f"{theirs}.{norm}", (D,)
            found |= {f"sublayers.{l}.{name}": (f"{theirs}.{part}.{name}", shape) for name, shape in shapes.items()}
    return {f"{ours}.weight": (f"{theirs}.weight", shape) for ours, (theirs, shape) in found.items()}

def weight_files(path: Path) -> list[Path]:
    """The folder's .safetensors files: the only one, or those that the index names."""
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    index = path / "model.safetensors.index.json"
    if not index.exists():
        pickles = sorted(p.name for p in path.glob("*.bin"))
        raise UserError(f"{path} has no model.safetensors" + (
            f", only {pickles[0]}, a pickle, which could run code and is not read. Save it with save_pretrained."
            if pickles else f". {SAVED}"))
    named = read_json(index).get("weight_map")
    if not named or not isinstance(named, dict):
        raise UserError(f"{index} is damaged: it names no files. {SAVED}")
    names = sorted({str(name) for name in named.values()})
    for name in names:
        if Path(name).name != name or "\\" in name or ":" in name or not name.endswith(".safetensors"):
            raise UserError(f"{index} names {name[:80]!r}, which is no .safetensors file of this folder. {SAVED}")
        if not (path / name).exists():
            raise UserError(f"{path} lacks {name}, which its {index.name} names. {SAVED}")
    return [path / name for name in names]

class Weights(Mapping):
    """Tensors by our names, each read from its file when it is asked for. The file is open only for that long: what has
    been read of a mapped file counts as this process's memory until it is closed."""

    def __init__(self, places: dict[str, tuple[Path, str]]):
        self.places = places

    def __getitem__(self, name):
        file, theirs = self.places[name]
        with opened(file) as f:
            return f.get_tensor(theirs)

    def __iter__(self):
        return iter(self.places)

    def __len__(self):
        return len(self.places)

def opened(file: Path):
    """A .safetensors file, whose header its library has checked."""
    from safetensors import SafetensorError, safe_open
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as e:
        raise UserError(f"{file} is damaged, or no .safetensors file ({str(e)[:100]}). {SAVED}") from None

def load(path) -> dict:
    """The folder as a checkpoint to start from: `model_config`, `model`, whose tensors are read one by one when they
    are asked for, and `tokenizer`, a description as in any checkpoint, or None where the folder has none."""
    path = Path(path)
    need("safetensors", f"--init_from {path}", "start from a run")
    try:
        config = model_config(path)
    except (TypeError, AttributeError, LookupError):                    # a list where a word should be, and the like
        raise UserError(f"{path / 'config.json'} is damaged. {SAVED}") from None
    found = {}                                                          # their name -> file, shape, type
    for file in weight_files(path):
        with opened(file) as f:
            for name in f.keys():
                if name in found:
                    raise UserError(f"{path}: {name} is both in {found[name][0].name} and in {file.name}. {SAVED}")
                part = f.get_slice(name)
                found[name] = file, tuple(part.get_shape()), part.get_dtype()
    if 11 * config["n_layer"] > len(found):                             # before a name is made for each of 10^9 layers
        raise UserError(f"{path}: its config.json says {config['n_layer']:,} layers, of 11 tensors each, and its files "
                        f"hold {len(found)} tensors. {SAVED}")
    wanted = tensors(config)
    if config["tie_embeddings"] and "lm_head.weight" not in found:
        wanted["lm_head.weight"] = wanted["embed.weight"]
    shapes = dict(wanted.values())
    for name in sorted(shapes.keys() | found.keys()):
        if name not in found:
            raise UserError(f"{path} lacks the tensor {name}. {SAVED}")
        file, shape, kind = found[name]
        if name not in shapes:
            raise UserError(f"{file} holds {name[:80]}, which a Qwen3 of its config.json does not have. {SAVED}")
        if shape != shapes[name]:
            raise UserError(f"{file}: {name} has the shape {shape}, and config.json makes it {shapes[name]}. {SAVED}")
        if kind not in TYPES:
            raise UserError(f"{file}: {name} is in {kind}; weights in {', '.join(TYPES)} are read.")
    weights = Weights({ours: (found[theirs][0], theirs) for ours, (theirs, _) in wanted.items()})
    own_head = config["tie_embeddings"] and "lm_head.weight" in found   # a copy of the embedding, as in Qwen3-0.6B
    if own_head and not weights["lm_head.weight"].equal(weights["embed.weight"]):
        raise UserError(f"{path}: its config.json says tie_word_embeddings, but lm_head.weight is not "
                        f"model.embed_tokens.weight. Set it to false, or remove lm_head.weight.")
    tokenizer = None
    if (path / "tokenizer.json").exists():
        from nanodepth.tokenizer_json import HFTokenizer
        tokenizer = HFTokenizer.from_file(path / "tokenizer.json").describe()
    return {"model_config": config, "model": weights, "tokenizer": tokenizer}
