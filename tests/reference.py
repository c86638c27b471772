"""
Every router a second time: slow, in float64, with plain loops over the table of the design page.

Nothing here is shared with model.py, so that an error has to be made twice to go unseen. A router is a function
`name(p, c, e, f)`: p holds its parameters by name, c its settings (a field for each flag), e is the embedding
(B, T, D), f the 2L sublayers. It returns what the head sees. Even sublayers are attention, odd ones MLPs.
"""
import torch

def rms(s):
    """(B, T, D) -> (B, T, 1)"""
    return (s.square().mean(-1, keepdim=True) + 1e-6).sqrt()

def total(tensors):
    result = tensors[0]
    for s in tensors[1:]:
        result = result + s
    return result

# ---------------------------------------------------------------------------------------------------------------------
# the depth read

def weights(w, sources, c, bias=None):
    """One weight (B, T, 1) for each source: softmax over i of w . s_i / rms(s_i) + b_i."""
    logits = []
    for i, s in enumerate(sources):
        logits.append((w * s).sum(-1, keepdim=True) / rms(s) + (bias[i] if bias else 0.0))
    if c.null_source:                   # one more source, all zeros: its logit is 0, and it adds nothing to a mix
        logits.append(torch.zeros_like(logits[0]))
    largest = torch.stack(logits).amax(0).detach()
    exps = [(x - largest).exp() for x in logits]
    return [x / total(exps) for x in exps]

def mix(w, sources, c, bias=None, scale=None):
    """scale: a factor (B, T, 1) for each source, in the sum alone."""
    alpha = weights(w, sources, c, bias)
    return total([alpha[i] * (scale[i] if scale else 1.0) * s for i, s in enumerate(sources)])

def mixes(p, c, l, sources, bias=None, scale=None):
    """What sublayer l is fed with: [mix], or [mix, mix_v] if it is an attention that reads its values apart."""
    h = mix(p["query"][l], sources, c, bias, scale)
    decoupled = c.decouple_v or c.router == "rd"
    if not decoupled or l % 2 == 1 or c.rd_control == "tied":
        return [h]
    if c.rd_control == "frozen_v":
        h_v = mix(torch.zeros_like(p["query"][l]), sources, c, bias, scale)
    else:
        h_v = mix(p["query_v"][l // 2], sources, c, bias, scale)
    if c.rd_control == "average":
        return [(h + h_v) / 2]
    return [h, h_v]

# ---------------------------------------------------------------------------------------------------------------------
# plain rules

def residual(p, c, e, f):
    stream = e
    for l in range(2 * c.n_layer):
        stream = stream + f[l](stream)
    return stream

def rezero(p, c, e, f):
    stream = e
    for l in range(2 * c.n_layer):
        stream = stream + p["gate"][l] * f[l](stream)
    return stream

def layerscale(p, c, e, f):
    stream = e
    for l in range(2 * c.n_layer):
        stream = stream + p["gain"][l] * f[l](stream)
    return stream

# ---------------------------------------------------------------------------------------------------------------------
# the mix replaces the stream

def attnres(p, c, e, f):
    sources = [e]
    for l in range(2 * c.n_layer):
        sources = sources + [f[l](*mixes(p, c, l, sources))]
    return mix(p["query"][2 * c.n_layer], sources, c)

def cumulative(p, c, e, f):
    sources = [e]
    for l in range(2 * c.n_layer):
        sources = sources + [sources[-1] + f[l](*mixes(p, c, l, sources))]
    return mix(p["query"][2 * c.n_layer], sources, c)

def block_lengths(c):
    """Layers of each block: as even as they go, the longer blocks first."""
    lengths = [0] * c.n_blocks
    for i in range(c.n_layer):
        lengths[i % c.n_blocks] += 1
    return lengths

def block(p, c, e, f, lengths=None):
    """`lengths` counts sublayers; it is given only to try the rule with other blocks."""
    done, l = [], 0
    for m in lengths or [2 * layers for layers in block_lengths(c)]:
        us = []
        for i in range(m):
            sources = [e] + done
            if us:
                sources = sources + [total(us)]                     # PC
            us = us + [f[l](*mixes(p, c, l, sources))]
            l += 1
        done = done + [total(us)]                                   # C_b
    return mix(p["query"][l], [e] + done, c)

rd = block                                                          # `mixes` decouples it

def kinds(c):
    return [] if c.details in ("", "none") else c.details.split(",")

def sign(kind, i, m):
    """The sign of sublayer i of a block of m sublayers."""
    if kind == "phase":
        return 1 if i % 2 == 0 else -1
    return 1 if i < m // 2 else -1

def wav(p, c, e, f):

    def summary(us, m):
        """C and its details, each with its factor, of a block of m sublayers, of which these have run."""
        C = total(us)
        tensors = [(C, 1.0)]
        for kind in kinds(c):
            D = total([sign(kind, i, m) * u for i, u in enumerate(us)])
            tensors.append((D, (rms(C) / rms(D)).clamp(max=c.rho).detach()))
        return tensors

    def row(l, summaries):
        """The read's biases: e, and with every summary C and its details."""
        b = [0.0]
        for tensors in summaries:
            b = b + [0.0] + [p["detail_bias"][l, k] for k in range(len(tensors) - 1)]
        return b

    def flat(summaries):
        """The sources and their factors."""
        pairs = [(e, 1.0)] + [pair for tensors in summaries for pair in tensors]
        return [s for s, _ in pairs], [r for _, r in pairs]

    done, l = [], 0
    for layers in block_lengths(c):
        us, m = [], 2 * layers
        for i in range(m):
            summaries = done + [summary(us, m)] if us else done
            sources, scale = flat(summaries)
            us = us + [f[l](*mixes(p, c, l, sources, row(l, summaries), scale))]
            l += 1
        done = done + [summary(us, m)]
    if not c.head_details:
        done = [[tensors[0]] for tensors in done]
    sources, scale = flat(done)
    return mix(p["query"][l], sources, c, row(l, done), scale)

# ---------------------------------------------------------------------------------------------------------------------
# the mix is added to the stream

def added(p, c, l, stream, sources):
    """What sublayer l is fed with; h_0 = e."""
    if l == 0:
        return [stream]
    gate = 1.0 if c.route_gate is None else p["gate"][l]
    return [stream + gate * m for m in mixes(p, c, l, sources)]

def delta(p, c, e, f):
    stream, us = e, []
    for l in range(2 * c.n_layer):
        u = f[l](*added(p, c, l, stream, [e] + us))
        us, stream = us + [u], stream + u
    return stream

def delta_block(p, c, e, f):
    stream, done, l = e, [], 0
    for layers in block_lengths(c):
        us = []
        for i in range(2 * layers):
            u = f[l](*added(p, c, l, stream, [e] + done))
            us, stream = us + [u], stream + u
            l += 1
        done = done + [total(us)]
    return stream

ROUTERS = {f.__name__: f for f in (residual, rezero, layerscale, attnres, cumulative, block, delta, delta_block, wav)}
ROUTERS["rd"] = rd

MIXING = ("attnres", "cumulative", "block", "rd", "wav", "delta", "delta_block")
ADDITIVE = ("delta", "delta_block")

def shapes(c):
    """The parameters of a router: name -> shape."""
    L, D = c.n_layer, c.n_embd
    if c.router == "residual":
        return {}
    if c.router == "rezero":
        return {"gate": (2 * L,)}
    if c.router == "layerscale":
        return {"gain": (2 * L, D)}
    result = {"query": (2 * L if c.router in ADDITIVE else 2 * L + 1, D)}
    if (c.decouple_v or c.router == "rd") and c.rd_control in ("none", "average"):
        result["query_v"] = (L, D)
    if c.router == "wav" and kinds(c):
        result["detail_bias"] = (2 * L + 1 if c.head_details else 2 * L, len(kinds(c)))
    if c.route_gate is not None:
        result["gate"] = (2 * L,)
    return result

# ---------------------------------------------------------------------------------------------------------------------
# the backbone: Qwen3's block, one head at a time. s is the model's state dict.

def norm(x, weight):
    return x / rms(x) * weight

def turned(x, theta):
    """Rotary positions, (B, T, head_dim): element i and element i + head_dim / 2 are a pair. The model keeps the table
    in float32, as checkpoints expect, so it is rounded here too."""
    T, half = x.shape[1], x.shape[2] // 2
    angle = torch.tensor([[t * theta ** (-i / half) for i in range(half)] for t in range(T)], dtype=torch.float64)
    cos, sin = angle.cos().float().to(x.dtype), angle.sin().float().to(x.dtype)     # (T, head_dim / 2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

def attention(s, c, h, h_v):
    x, x_v = norm(h, s["norm.weight"]), norm(h_v, s["norm.weight"])
    T, width = h.shape[1], c.head_dim
    rows = lambda weight, head: weight[head * width:(head + 1) * width].T           # (D, head_dim)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    heads = []
    for head in range(c.n_head):
        kv = head // (c.n_head // c.n_kv_head)
        q = turned(norm(x @ rows(s["q_proj.weight"], head), s["q_norm.weight"]), c.rope_theta)
        k = turned(norm(x @ rows(s["k_proj.weight"], kv), s["k_norm.weight"]), c.rope_theta)
        scores = (q @ k.transpose(1, 2) / width ** 0.5).masked_fill(later, float("-inf"))
        heads.append(scores.softmax(-1) @ (x_v @ rows(s["v_proj.weight"], kv)))
    return torch.cat(heads, -1) @ s["o_proj.weight"].T

def mlp(s, h):
    x = norm(h, s["norm.weight"])
    gate, up = x @ s["gate_proj.weight"].T, x @ s["up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ s["down_proj.weight"].T

def gpt(s, c, idx):
    """The logits of every position, (B, T, V)."""
    def below(prefix):
        return {k.removeprefix(prefix): x for k, x in s.items() if k.startswith(prefix)}
    def sublayer(l):
        own = below(f"sublayers.{l}.")
        if l % 2 == 0:
            return lambda h, h_v=None: attention(own, c, h, h if h_v is None else h_v)
        return lambda h: mlp(own, h)
    h = ROUTERS[c.router](below("router."), c, s["embed.weight"][idx], [sublayer(l) for l in range(2 * c.n_layer)])
    return norm(h, s["norm.weight"]) @ s["embed.weight" if c.tie_embeddings else "lm_head.weight"].T
