"""The whole model: the backbone, causality, cached decoding, first values, parameter counts, refused settings."""
import math
import shutil
import subprocess
import sys

import pytest
import torch

import reference
from nanodepth import fast
from toys import ADDITIVE, MIXING, TOLERANCE, error
import model as model_py
from model import GPT, GPTConfig, ROUTERS, RMSNorm

ALL = ("residual", "rezero", "layerscale") + MIXING
SMALL = dict(vocab_size=13, seq_len=12, n_layer=3, n_blocks=2, n_head=4, n_kv_head=2, n_embd=16, mlp_hidden=24)

def variants():
    """(router, flags): every router, and every flag that changes what one does."""
    for router in ALL:
        yield router, {}
    for router in MIXING:
        yield router, dict(decouple_v=True)
        yield router, dict(null_source=True)
    for control in ("tied", "average", "frozen_v"):
        yield "rd", dict(rd_control=control)
        yield "delta", dict(decouple_v=True, rd_control=control)
    for router in ADDITIVE:
        yield router, dict(route_gate=1.0)
    for details in ("split,phase", "split", "phase", "none"):
        yield "wav", dict(details=details, head_details=True, decouple_v=True)

VARIANTS = list(variants())

def label(x):
    return x if isinstance(x, str) else " ".join(f"{k}={v}" for k, v in x.items())

each = pytest.mark.parametrize("router, flags", VARIANTS, ids=label)

def config(router, flags={}, **more):
    return GPTConfig(**{**SMALL, "router": router, **flags, **more})

def build(router, flags={}, seed=0, **more):
    """In float64, and with every parameter far from its first value: all nonlinear parts work."""
    model = GPT(config(router, flags, **more)).double().eval()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * (0.3 if p.dim() > 1 else 0.1) + (p == 1))
        for name, p in model.router.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
    return model

def tokens(T=10, B=2, V=13, seed=1):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))

# ---------------------------------------------------------------------------------------------------------------------
# the backbone

def check_against_the_reference(model, gradients):
    idx, c = tokens(), model.config
    leaves = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
    want = reference.gpt(leaves, c, idx)
    got = model(idx, idx)[0]
    assert error(got.detach(), want.detach()) <= TOLERANCE
    if gradients:
        out = torch.randn(want.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (want * out).sum().backward()
        (got * out).sum().backward()
        for name, p in model.named_parameters():
            right = leaves[name].grad if leaves[name].grad is not None else torch.zeros_like(p)
            assert error(p.grad if p.grad is not None else torch.zeros_like(p), right) <= TOLERANCE, name

@each
def test_equals_the_reference(router, flags):
    check_against_the_reference(build(router, flags), gradients=flags == {} or "decouple_v" in flags)

@pytest.mark.parametrize("shape", [
    dict(n_kv_head=4), dict(n_kv_head=1), dict(head_dim=6), dict(tie_embeddings=False), dict(rope_theta=1e6),
    dict(n_head=1, n_kv_head=1), dict(n_layer=1, n_blocks=1)], ids=label)
def test_shapes_of_the_backbone(shape):
    for router in ("residual", "rd"):
        check_against_the_reference(build(router, **shape), gradients=True)

def test_derivatives_of_the_norm():
    """The first by a backward pass of its own, the second by autograd's, against differences of values, in float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((3, 4), (4,)))
    norm = RMSNorm(4, GPTConfig()).double()
    f = lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x)
    assert torch.autograd.gradcheck(f, (x, weight), eps=1e-6, atol=1e-7)        # differences of step eps are right to eps^2
    assert torch.autograd.gradgradcheck(f, (x, weight), eps=1e-6, atol=1e-7)

def test_first_weights():
    """Normal, std 0.02; the two output projections 0.02 / sqrt(2L); norms 1."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=500, n_layer=8, n_head=4, n_embd=128, tie_embeddings=False))
    for name, p in model.named_parameters():
        if name.startswith("router."):
            continue
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        std = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        # of 16384 numbers or more: their std is known to 0.6 %, their mean to 0.8 % of a std
        assert abs(p.std().item() / std - 1) < 0.03 and abs(p.mean().item() / std) < 0.04, name

def test_dropout_is_off_in_eval():
    for router in ("residual", "rd", "delta"):
        model, idx = build(router, dropout=0.5), tokens()
        assert torch.equal(model(idx)[0], build(router)(idx)[0])
        model.train()
        assert not torch.equal(model(idx)[0], model(idx)[0])

# ---------------------------------------------------------------------------------------------------------------------
# identity 9: causality, and a cache

@each
def test_no_output_sees_a_later_token(router, flags):
    model, idx = build(router, flags), tokens()
    with torch.no_grad():
        want = model(idx, idx)[0]
        for t in (1, 5, 9):
            changed = idx.clone()
            changed[:, t:] = (changed[:, t:] + 5) % 13
            got = model(changed, changed)[0]
            assert error(got[:, :t], want[:, :t]) <= TOLERANCE
            assert (got[:, t] - want[:, t]).abs().max() > 1e-3

@each
def test_a_cache_gives_the_full_forward(router, flags):
    """What the head sees is noted at each step of `generate`, and compared with one pass over the whole text."""
    model, idx = build(router, flags), tokens(T=4)
    seen = []
    hook = model.router.register_forward_hook(lambda module, args, h: seen.append(h))
    torch.manual_seed(0)
    out = model.generate(idx, max_new_tokens=8, temperature=1.0, top_k=5)
    hook.remove()
    assert out.shape == (2, 12) and torch.equal(out[:, :4], idx)
    assert all(h.shape[1] == 1 for h in seen[1:]), "each step after the prompt feeds one token"
    seen = torch.cat(seen, 1)
    whole = []
    hook = model.router.register_forward_hook(lambda module, args, h: whole.append(h))
    with torch.no_grad():
        model(out)
    hook.remove()
    assert seen.shape[1] >= 11                                      # the last token need not be fed
    assert error(seen.clone(), whole[0][:, :seen.shape[1]]) <= TOLERANCE

@pytest.mark.parametrize("router", ALL)
def test_greedy_tokens(router):
    """With top_k = 1 each token is the largest logit of a full forward over what stands before it."""
    model, idx = build(router), tokens(T=3)
    out = model.generate(idx, max_new_tokens=9, top_k=1)
    for t in range(3, 12):
        logits, loss = model(out[:, :t])
        assert logits.shape == (2, 1, 13) and loss is None
        assert torch.equal(out[:, t], logits[:, 0].argmax(-1))
    assert out.dtype == torch.int64 and out.unique().numel() > 1
    assert torch.equal(model.generate(idx, max_new_tokens=9, temperature=0.0), out)
    assert model.generate(idx, max_new_tokens=20, top_k=1).shape == (2, 23)     # longer than the context: it goes on

def test_generate_samples():
    """The tokens come from softmax(logits / temperature), cut to the top_k largest."""
    model, idx = build("wav"), tokens(T=3, B=1)
    many = idx.expand(1500, 3).contiguous()
    logits = model(idx)[0][0, 0].detach()
    for temperature, top_k in [(1.0, None), (2.0, None), (0.7, 4)]:
        torch.manual_seed(0)
        out = model.generate(many, max_new_tokens=1, temperature=temperature, top_k=top_k)[:, -1]
        x = logits / temperature
        if top_k:
            x = x.masked_fill(x < x.topk(top_k).values[-1], float("-inf"))
        got = torch.bincount(out, minlength=13) / 1500
        want = x.softmax(-1)
        assert not got[want == 0].any()
        assert (got - want).abs().max() < 0.05                      # a share of 1500 draws has sigma 0.013 at most
        torch.manual_seed(0)
        again = model.generate(many, max_new_tokens=1, temperature=temperature, top_k=top_k)[:, -1]
        assert torch.equal(out, again)

def test_generate_leaves_no_trace():
    """Two calls are independent, and a forward in between sees no cache."""
    model, idx = build("rd"), tokens(T=5)
    logits = model(idx)[0]
    first = model.generate(idx, max_new_tokens=5, top_k=1)
    assert torch.equal(model(idx)[0], logits)
    assert torch.equal(model.generate(idx, max_new_tokens=5, top_k=1), first)
    assert torch.equal(model.generate(idx, max_new_tokens=0), idx)
    assert model.generate(idx, max_new_tokens=5, top_k=50).shape == (2, 10)      # more than the vocabulary has: all
    assert not first.requires_grad
    torch.manual_seed(0)
    every = model.generate(idx, max_new_tokens=5)
    torch.manual_seed(0)
    assert torch.equal(model.generate(idx, max_new_tokens=5, top_k=0), every)
    with pytest.raises(ValueError, match="idx has no token"):
        model.generate(idx[:, :0], max_new_tokens=5)

# ---------------------------------------------------------------------------------------------------------------------
# identities 11 and 12, and the choice of numbers

ALONE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import model
assert model.fast is None and "nanodepth" not in sys.modules, model.fast
results = {}
for key, config, state, idx in torch.load(sys.argv[2], weights_only=True):
    net = model.GPT(model.GPTConfig(**config)).double()
    net.load_state_dict(state)
    logits, loss = net(idx, idx)
    loss.backward()
    results[key] = logits.detach(), {k: p.grad for k, p in net.named_parameters()}, net.eval().generate(idx[:, :4], 4, top_k=1)
torch.save(results, sys.argv[3])
"""

def test_11_alone_in_a_folder_it_gives_the_same_numbers(tmp_path):
    """model.py by itself: every router and flag, logits, gradients, and greedy tokens, as beside fast.py."""
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(model_py.__file__, alone / "model.py")
    (alone / "try.py").write_text(ALONE)
    idx, cases, want = tokens(), [], {}
    for i, (router, flags) in enumerate(VARIANTS):
        net = build(router, flags)
        assert net.sublayers[1].swiglu is fast.swiglu
        logits, loss = net(idx, idx)
        loss.backward()
        want[i] = logits.detach(), {k: p.grad for k, p in net.named_parameters()}, net.generate(idx[:, :4], 4, top_k=1)
        cases.append((i, vars(config(router, flags)), net.state_dict(), idx))
    torch.save(cases, tmp_path / "cases.pt")
    subprocess.run([sys.executable, "-I", alone / "try.py", alone, tmp_path / "cases.pt", tmp_path / "got.pt"], check=True,
                   cwd=alone)
    got = torch.load(tmp_path / "got.pt", weights_only=True)
    for i, (router, flags) in enumerate(VARIANTS):
        assert error(got[i][0], want[i][0]) <= TOLERANCE and torch.equal(got[i][2], want[i][2]), (router, flags)
        for name, gradient in want[i][1].items():
            zeros = torch.zeros_like(net.get_parameter(name)) if gradient is None or got[i][1][name] is None else None
            a, b = (zeros if x is None else x for x in (got[i][1][name], gradient))
            assert error(a, b) <= TOLERANCE, (router, flags, name)

def test_an_error_inside_fast_py_surfaces(tmp_path):
    """Only an absent folder is a reason to go without it."""
    shutil.copy(model_py.__file__, tmp_path / "model.py")
    (tmp_path / "nanodepth").mkdir()
    (tmp_path / "nanodepth" / "__init__.py").touch()
    for text, words in (("import nothing_of_that_name", "nothing_of_that_name"), ("1 / 0", "ZeroDivisionError"), (None, "fast")):
        (tmp_path / "nanodepth" / "fast.py").unlink(missing_ok=True)
        if text:
            (tmp_path / "nanodepth" / "fast.py").write_text(text)
        done = subprocess.run([sys.executable, "-c", "import model"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and words in done.stderr.splitlines()[-1]

def test_plain_read_takes_nothing_of_fast_py(monkeypatch):
    for name in ("Reader", "rms_norm", "rotate", "swiglu"):
        monkeypatch.setattr(fast, name, None)                       # whoever calls it fails
    for router in ALL:
        model = build(router, plain_read=True)
        model(tokens(), tokens())[1].backward()

@pytest.mark.parametrize("flags", [{}, dict(null_source=True)], ids=str)
def test_12_at_zero_queries_a_mix_is_the_residual_stream(flags):
    """A plain mean of all updates is the stream over n, and norms take a scale away: exactly, as norm_eps goes to 0."""
    for router in ("block", "rd", "attnres", "delta"):
        model, plain = build(router, flags, norm_eps=1e-30), build("residual", norm_eps=1e-30)
        model.load_state_dict(plain.state_dict(), strict=False)
        with torch.no_grad():
            for p in model.router.parameters():
                p.zero_()
        assert error(model(tokens(), tokens())[0].detach(), plain(tokens(), tokens())[0].detach()) <= TOLERANCE, router
    other = build("residual", norm_eps=0.1)(tokens(), tokens())[0]
    assert (other - plain(tokens(), tokens())[0]).abs().max() > 1e-3        # and it is in the norms

# ---------------------------------------------------------------------------------------------------------------------
# forward

@pytest.mark.parametrize("router", ["residual", "delta", "wav"])
def test_loss_is_the_mean_cross_entropy(router):
    model, idx, targets = build(router), tokens(), tokens(seed=2)
    logits, loss = model(idx, targets)
    assert logits.shape == (2, 10, 13) and loss.shape == ()
    want = sum(-logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(10)) / 20
    assert abs(loss.item() - want.item()) < 1e-12
    last, none = model(idx)
    assert none is None and error(last.detach(), logits[:, -1:].detach()) <= TOLERANCE

@pytest.mark.parametrize("router", ALL)
def test_every_parameter_learns(router):
    """Save those of the reads that find only one source: they have nothing to choose from."""
    flags = dict(decouple_v=True) if router in MIXING else {}
    model, idx = build(router, flags), tokens()
    model(idx, tokens(seed=2))[1].backward()
    first = 4 if router == "delta_block" else 1 if router in MIXING else 0      # the first sublayer that has a choice
    for name, p in model.named_parameters():
        if name.startswith("router."):
            start = (first + 1) // 2 if name == "router.query_v" else first
            rows = p.grad.reshape(len(p), -1).any(-1)
            assert rows[start:].all() and not rows[:start].any(), name
        else:
            assert p.grad.any(), name

def test_too_long():
    model = build("block")
    with pytest.raises(ValueError, match="seq_len"):
        model(tokens(T=13))
    with pytest.raises(ValueError, match="seq_len"):
        model(tokens(T=13), tokens(T=13))

def test_a_first_loss_is_that_of_a_guess():
    for router in ALL:
        torch.manual_seed(0)
        model = GPT(config(router, vocab_size=50, n_embd=32))
        loss = model(tokens(V=50), tokens(V=50, seed=2))[1].item()
        assert abs(loss - math.log(50)) < 0.1

@pytest.mark.parametrize("router", ALL)
def test_autocast_keeps_the_stream_in_float32(router):
    torch.manual_seed(0)
    model, idx = GPT(config(router)), tokens()
    seen = []
    model.router.register_forward_hook(lambda module, args, h: seen.append((args[0].dtype, h.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)[1]
    loss.backward()
    assert seen == [(torch.float32, torch.float32)]
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())

# ---------------------------------------------------------------------------------------------------------------------
# identities 7 and 8: first values and counts

def test_7_shared_first_values_are_the_same_bits():
    torch.manual_seed(0)
    plain, state = dict(GPT(config("residual")).named_parameters()), torch.get_rng_state()
    for router, flags in VARIANTS + [("layerscale", dict(layerscale_init=0.3)), ("wav", dict(n_blocks=3)),
                                     ("wav", dict(detail_bias=-5.0)), ("delta", dict(plain_read=True))]:
        torch.manual_seed(0)
        other = dict(GPT(config(router, flags)).named_parameters())
        assert torch.equal(torch.get_rng_state(), state), "router parameters draw nothing"
        assert {k for k in other if not k.startswith("router.")} == plain.keys()
        assert all(torch.equal(other[k], x) for k, x in plain.items())
        assert not any(x.any() for k, x in other.items() if k.startswith("router.query"))
    torch.manual_seed(1)
    assert not all(torch.equal(x, plain[k]) for k, x in GPT(config("residual")).named_parameters())

@each
def test_counts(router, flags):
    """Exactly the parameters of the design page, and no more."""
    for tied in (True, False):
        c = config(router, flags, tie_embeddings=tied)
        V, L, D, H, hd, KV = 13, 3, 16, 4, 4, 2
        attention = D * hd * (H + 2 * KV) + H * hd * D + 2 * hd     # q, k, v, the output, and two norms of a head
        want = V * D * (2 - tied) + L * (attention + 3 * D * 24 + 2 * D) + D
        own = sum(math.prod(shape) for shape in reference.shapes(c).values())
        model = GPT(c)
        assert sum(p.numel() for p in model.parameters()) == want + own
        names = {k: tuple(p.shape) for k, p in model.named_parameters() if k.startswith("router.") and p.numel()}
        # weight decay and the router's learning rate go by these names
        assert names == {f"router.{k}": shape for k, shape in reference.shapes(c).items()}

@each
def test_weight_decay_is_for_matrices_alone(router, flags):
    model = GPT(config(router, flags))
    groups = model.param_groups(weight_decay=0.1, learning_rate=1e-3, router_lr=0.1)
    settings = {id(p): (group["weight_decay"], group["lr"]) for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(settings) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        if name.startswith("router."):
            want = (0.0, 0.1)
        else:
            want = (0.1 if name.endswith(("proj.weight", "embed.weight", "lm_head.weight")) else 0.0, 1e-3)
        assert settings[id(p)] == want, name

def test_first_router_values():
    for details, n in [("phase,split", 2), ("split", 1)]:
        bias = GPT(config("wav", dict(details=details))).router.detail_bias
        assert torch.equal(bias, torch.full((6, n), -2.0))
        bias = GPT(config("wav", dict(details=details, head_details=True, detail_bias=0.5))).router.detail_bias
        assert torch.equal(bias, torch.full((7, n), 0.5))

@pytest.mark.parametrize("L, D, heads", [(16, 576, 9), (24, 832, 13)])
def test_8_rd_costs_a_vector_a_layer(L, D, heads):
    def count(router):
        with torch.device("meta"):                                  # shapes alone: no memory, no time
            model = GPT(GPTConfig(vocab_size=50257, seq_len=64, n_layer=L, n_head=heads, n_embd=D, router=router))
        return sum(p.numel() for p in model.parameters())
    block, rd = count("block"), count("rd")
    assert rd - block == L * D and (rd - block) / block < 1e-4

def test_defaults_that_follow_from_others():
    c = GPTConfig(n_layer=12, n_embd=96, n_head=4)
    assert (c.n_blocks, c.head_dim, c.mlp_hidden, c.n_kv_head) == (8, 24, 256, 4)
    assert GPTConfig(n_layer=3).n_blocks == 3
    assert GPTConfig(n_embd=256, n_head=4).mlp_hidden == 704

# ---------------------------------------------------------------------------------------------------------------------
# what cannot work is refused

@pytest.mark.parametrize("settings, field, words", [
    (dict(n_embd=30, n_head=4), "n_embd", ["30", "4"]),
    (dict(n_embd=12, n_head=4), "head_dim", ["3"]),
    (dict(head_dim=5), "head_dim", ["5"]),
    (dict(n_kv_head=3), "n_kv_head", ["3", "4"]),
    (dict(n_kv_head=0), "n_kv_head", ["0"]),
    (dict(n_layer=0), "n_layer", ["0"]),
    (dict(vocab_size=0), "vocab_size", ["0"]),
    (dict(seq_len=0), "seq_len", ["0"]),
    (dict(n_blocks=0), "n_blocks", ["0", "3"]),
    (dict(n_blocks=4), "n_blocks", ["4", "3"]),
    (dict(router="blok"), "router", ["blok", "block"]),
    (dict(router="dleta_block"), "router", ["dleta_block", "delta_block"]),
    (dict(router="qqq"), "router", ["qqq", "block"]),
    (dict(router="rd", rd_control="tide"), "rd_control", ["tide", "tied"]),
    (dict(router="block", rd_control="tied"), "rd_control", ["tied", "decouple_v"]),
    (dict(router="residual", rd_control="frozen_v"), "rd_control", ["frozen_v"]),
    (dict(router="residual", decouple_v=True), "decouple_v", ["residual"]),
    (dict(router="rezero", decouple_v=True), "decouple_v", ["rezero"]),
    (dict(router="layerscale", null_source=True), "null_source", ["layerscale"]),
    (dict(router="block", route_gate=1.0), "route_gate", ["1.0", "delta", "a gate on it does nothing"]),
    (dict(router="wav", route_gate=0.0), "route_gate", ["0.0", "delta"]),
    (dict(router="rezero", route_gate=0.0), "route_gate", ["0.0", "delta"]),
    (dict(router="wav", details="phase,splt"), "details", ["splt", "split"]),
    (dict(router="wav", details="phase,phase"), "details", ["phase,phase"]),
    (dict(dropout=1.5), "dropout", ["1.5"]),
    (dict(norm_eps=0.0), "norm_eps", ["0.0"]),
    (dict(norm_eps=float("nan")), "norm_eps", ["nan"]),
    (dict(rope_theta=0.0), "rope_theta", ["0.0"]),
], ids=lambda x: label(x) if isinstance(x, dict) else "")
def test_refused(settings, field, words):
    with pytest.raises(ValueError) as caught:
        GPTConfig(**{**SMALL, **settings})
    message = str(caught.value)
    assert "\n" not in message and message[-1] in ".?"
    for word in [field, *words]:
        assert word in message, f"{word!r} is not in: {message}"

def test_accepted():
    for router, flags in VARIANTS:
        config(router, flags)
    for L in (1, 2, 7):
        for n in range(1, L + 1):
            assert GPTConfig(n_layer=L, n_blocks=n).n_blocks == n
    for details in ("", "none", "phase", "split", "split,phase"):
        config("wav", dict(details=details))
    assert set(ROUTERS) == set(ALL)
