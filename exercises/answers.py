"""The checker's own answers to exercises 1 to 5, and under each its typical mistakes. If you solve them, stop here.

A mistake is the idea that it breaks, and the answer with an edit: (idea, this text, that text, ...). The checker
compares a student's numbers with those of the answer and, where they differ, with those of every mistake.
"""
import functools
import inspect

import torch

text_of = functools.cache(inspect.getsource)

@functools.cache
def mistaken(answer, *edits):
    """The function `answer` with its text edited: edits are old, new, old, new, .., each old one in it once."""
    text = text_of(answer)
    for old, new in zip(edits[0::2], edits[1::2]):
        assert text.count(old) == 1, (answer.__name__, old)
        text = text.replace(old, new)
    names = dict(globals())
    exec(text, names)
    return names[answer.__name__]

def rms(s):
    return (s.square().mean(-1) + 1e-6).sqrt()

# ---------------------------------------------------------------------------------------------------------------------
# 1: the depth read

def depth_read(query, sources):
    s = torch.stack(sources)                                            # (n, B, T, D)
    logit = (s * query).sum(-1) / rms(s)                                # (n, B, T)
    alpha = logit.softmax(0)
    mix = (alpha[..., None] * s).sum(0)                                 # (B, T, D)
    return mix, alpha

def depth_read_backward(query, sources, g):
    s = torch.stack(sources)
    inv = 1 / rms(s)                                                    # (n, B, T)
    dot = (s * query).sum(-1) * inv
    alpha = dot.softmax(0)
    by_alpha = (g * s).sum(-1)
    d_logit = alpha * (by_alpha - (alpha * by_alpha).sum(0))
    d_query = (d_logit[..., None] * s * inv[..., None]).sum((0, 1, 2))
    d_s = alpha[..., None] * g + d_logit[..., None] * (
        inv[..., None] * query - (dot * inv.square())[..., None] * s / s.size(-1))
    return d_query, list(d_s)

MISTAKES = {"depth_read": [
    ("The weights must sum to 1 over depth for each token; yours sum to 1 over tokens.", "softmax(0)", "softmax(2)"),
    ("The weights must sum to 1 over depth for each token; yours sum to 1 over the sequences of the batch.",
     "softmax(0)", "softmax(1)"),
    ("The weights must sum to 1 over depth for each token; yours sum to 1 over depth, batch and tokens together.",
     "logit.softmax(0)", "logit.flatten().softmax(0).view_as(logit)"),
    ("A loud source is not a better one: each logit is divided by its source's rms. Yours is not.", " / rms(s)", ""),
    ("rms is the root of the *mean* of the squares over D; yours is the root of their sum.", "rms(s)",
     "s.norm(dim=-1)"),
    ("The rms divides once: it is the root. Yours divides by the mean square.", "rms(s)", "rms(s).square()"),
    ("The 1e-6 of the rms is missing: without it a source of zeros has no direction, and gives nan.",
     "rms(s)", "s.square().mean(-1).sqrt()"),
    ("The 1e-6 stands under the root; yours is added after it.", "rms(s)", "(s.square().mean(-1).sqrt() + 1e-6)"),
    ("The rms is one number for each source and token, over D alone; yours is taken over more than that.",
     "rms(s)", "(s.square().mean((1, 2, 3), keepdim=True)[..., 0] + 1e-6).sqrt()"),
    ("The logit is not divided by sqrt(D): there is one query, learned, and no need to.",
     "/ rms(s)", "/ rms(s) / query.numel() ** 0.5"),
    ("A softmax takes the exponentials first; yours divides the logits by their sum.",
     "logit.softmax(0)", "logit / logit.sum(0)"),
    ("A large logit means a large weight; yours means a small one.", "logit.softmax(0)", "(-logit).softmax(0)"),
    ("The query chooses; in yours every source weighs the same, whatever the query is.",
     "logit.softmax(0)", "torch.full_like(logit, 1 / len(sources))"),
    ("The mix takes each source as it is; the rms is in the choice alone. Yours mixes normed sources.",
     "alpha[..., None] * s", "alpha[..., None] * s / rms(s)[..., None]"),
    ("The weights add up to 1 already; yours are divided by n once more.", "* s).sum(0)", "* s).mean(0)"),
    ("The mix weighs each source by its alpha; yours by its logit.", "alpha[..., None] * s", "logit[..., None] * s"),
], "depth_read_backward": [
    ("A constant on all logits changes no weight, so over the sources d logit must add up to 0 for each token; yours "
     "does not: the softmax's own share is missing.", " - (alpha * by_alpha).sum(0)", ""),
    ("What is taken away is the mean *under alpha*; yours is the plain mean over the sources.",
     "(alpha * by_alpha).sum(0)", "by_alpha.mean(0)"),
    ("d logit is alpha times a difference; yours has no alpha before it.", "alpha * (by_alpha", "(by_alpha"),
    ("A source is reached in two ways, through the mix and through its logit; the first, alpha_i g, is missing.",
     "alpha[..., None] * g + ", ""),
    ("A source is reached in two ways, through the mix and through its logit; the second is missing: a source that "
     "changes is also chosen otherwise.", "alpha[..., None] * g + d_logit", "alpha[..., None] * g + 0 * d_logit"),
    ("rms(s) depends on s as well; yours takes it for a constant.",
     "(dot * inv.square())[..., None] * s / s.size(-1)", "0 * s"),
    ("The rms has a *mean* over D in it, so its gradient has 1/D; yours has not.", " / s.size(-1)", ""),
    ("The term that comes through the rms is taken away (more length, smaller logit); yours is added.",
     "query - (dot", "query + (dot"),
    ("The term that comes through the rms has 1/rms twice, beside the logit; in yours a 1/rms is too few or too many.",
     "inv.square()", "inv"),
    ("The query's logit has s / rms(s) in it, so its gradient has too; in yours the rms is missing.",
     "* s * inv[..., None]).sum", "* s).sum"),
    ("One query serves every token of every sequence, so its gradient is the *sum* over them; yours is a mean.",
     "inv[..., None]).sum((0, 1, 2))", "inv[..., None]).sum(0).mean((0, 1))"),
]}

# ---------------------------------------------------------------------------------------------------------------------
# 2: Block AttnRes

def split_layers(n_layer, n_blocks):
    edges = [sum(2 * (n_layer // n_blocks + (j < n_layer % n_blocks)) for j in range(b)) for b in range(n_blocks + 1)]
    return [range(first, last) for first, last in zip(edges, edges[1:])]

def block(e, sublayers, blocks, query, read):
    sources = [e]
    for block in blocks:
        pc = None
        for l in block:
            h = read(query[l], sources if pc is None else [*sources, pc])
            u = sublayers[l](h)
            pc = u if pc is None else pc + u
        sources = sources + [pc]
    return read(query[-1], sources)

MISTAKES |= {"split_layers": [
    ("l counts sublayers, and a layer has two (attention and MLP); yours counts layers.",
     "2 * (n_layer // n_blocks + (j < n_layer % n_blocks))", "n_layer // n_blocks + (j < n_layer % n_blocks)"),
    ("The longer blocks come first; yours come last.", "j < n_layer % n_blocks", "j >= n_blocks - n_layer % n_blocks"),
    ("Every sublayer belongs to a block; in yours the last ones belong to none.", " + (j < n_layer % n_blocks)", ""),
    ("Layers are split as evenly as they go; yours gives all that is left over to one block.",
     "(j < n_layer % n_blocks)", "(n_layer % n_blocks if j == n_blocks - 1 else 0)"),
    ("Layers are split as evenly as they go; yours gives all that is left over to one block.",
     "(j < n_layer % n_blocks)", "(n_layer % n_blocks if j == 0 else 0)"),
    ("A block is made of whole layers, so it has an even number of sublayers; yours cuts a layer in two.",
     "2 * (n_layer // n_blocks + (j < n_layer % n_blocks))",
     "(2 * n_layer // n_blocks + (j < 2 * n_layer % n_blocks))"),
    ("l counts from 0; yours counts from 1.", "range(first, last)", "range(first + 1, last + 1)"),
], "block": [
    ("PC is the sum of the block in progress, so it begins anew with each block; yours goes on.",
     "pc = None\n", "pc = None if block[0] == 0 else pc\n"),
    ("PC is reset too late: a block's first sublayer must not see the last block's PC beside its C.",
     "pc = None\n", "pc = None if block[0] == 0 else pc\n", "pc = u if pc is None",
     "pc = u if pc is None or l == block[0]"),
    ("There is no PC before the block's first update; yours is a source of zeros, whose logit is 0 and which takes its "
     "share of the weight.", "sources if pc is None else [*sources, pc]",
     "[*sources, torch.zeros_like(e) if pc is None else pc]"),
    ("The block in progress is a source too, as PC; yours reads e and the C of completed blocks alone.",
     "sources if pc is None else [*sources, pc]", "sources"),
    ("PC is the *sum* of the block's updates so far; yours is the last update alone.", "else pc + u", "else u"),
    ("C_b is the *sum* of the block's updates; yours is their mean.", "sources + [pc]", "sources + [pc / len(block)]"),
    ("C_b holds block b's updates alone; yours is a running sum over e and all blocks so far, a state.",
     "sources + [pc]", "sources + [sources[-1] + pc]"),
    ("C_b holds block b's updates alone; yours has e in it.", "pc = u if pc is None", "pc = e + u if pc is None"),
    ("e stays a source to the end; in yours it is gone after the first block.",
     "sources + [pc]", "[s for s in sources if s is not e] + [pc]"),
    ("All completed blocks stay sources; yours keeps e and the last one alone.", "sources + [pc]", "[e, pc]"),
    ("Every sublayer has a read of its own; in yours an MLP gets what its attention got.",
     "h = read(query[l], sources if pc is None else [*sources, pc])",
     "h = h if l % 2 else read(query[l], sources if pc is None else [*sources, pc])"),
    ("Sublayer l reads by row l of query; yours by the row of its layer, so two sublayers share one.",
     "query[l]", "query[l // 2]"),
    ("Sublayer l reads by row l of query, counted from 0; yours by the next row.", "query[l]", "query[l + 1]"),
    ("All sublayers read by the same row of query in yours; each has its own.", "query[l]", "query[0]"),
    ("The mix replaces the stream; yours adds it to the stream (that is exercise 4).", "u = sublayers[l](h)",
     "u = sublayers[l](h + sum(sources) + (0 if pc is None else pc))"),
    ("The head reads by a query of its own, the last row; yours by another row.", "query[-1]", "query[-2]"),
    ("The head reads by a query of its own, the last row; yours by another row.", "query[-1]", "query[0]"),
    ("What the head sees is a mix as well, by the last row of query; yours is the plain sum, the stream.",
     "read(query[-1], sources)", "sum(sources)"),
    ("What the head sees is a mix as well, by the last row of query; yours is the last update.",
     "read(query[-1], sources)", "u"),
    ("What the head sees is a mix as well, by the last row of query; yours is the last block's sum.",
     "read(query[-1], sources)", "pc"),
    ("What the head sees is a mix as well, by the last row of query; yours is the input of the last sublayer.",
     "read(query[-1], sources)", "h"),
    ("For the head every block is complete; yours does not read the last C.", "query[-1], sources)",
     "query[-1], sources[:-1])"),
    ("The last PC has become a C; yours is both, so the head reads it twice.",
     "query[-1], sources)", "query[-1], [*sources, pc])"),
    ("e is a source of the head too; yours reads the C alone.", "query[-1], sources)", "query[-1], sources[1:])"),
]}

# ---------------------------------------------------------------------------------------------------------------------
# 3: RD

def inputs(l, sources, query, query_v, read):
    if l % 2 or l == 2 * len(query_v):
        return [read(query[l], sources)]
    h, h_v = read(query[l], sources), read(query_v[l // 2], sources)
    return [h, h_v]

def tied_query_v(query):
    return query[:-1:2]

def divergence(p, q):
    entropy = lambda p: -torch.xlogy(p, p).sum(0)                       # 0 log 0 is 0
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2

MISTAKES |= {"inputs": [
    ("h, by `query`, is for queries and keys and stands first; h_v, by `query_v`, is for values. Yours are "
     "the other way round.", "[h, h_v]", "[h_v, h]"),
    ("Queries and keys read by `query`; in yours the value route feeds them too.", "[h, h_v]", "[h_v, h_v]"),
    ("Values read by a query of their own; in yours both routes read by `query`, which is exercise 2.",
     "[h, h_v]", "[h, h]"),
    ("The two routes stay apart; yours are averaged (a control of the paper: --rd_control average).",
     "[h, h_v]", "[(h + h_v) / 2, (h + h_v) / 2]"),
    ("The two routes stay apart; yours are averaged (a control of the paper: --rd_control average).",
     "[h, h_v]", "[(h + h_v) / 2]"),
    ("Each route is a mix by itself; in yours h_v is added to h.", "[h, h_v]", "[h, h + h_v]"),
    ("An attention has two inputs, h and h_v; yours gets one.", "[h, h_v]", "[h]"),
    ("query_v has a row for each *attention*, so attention l reads by row l // 2; yours by row l.",
     "query_v[l // 2]", "query_v[l % len(query_v)]"),
    ("query_v has a row for each *attention*, so attention l reads by row l // 2; yours by one and the same row.",
     "query_v[l // 2]", "query_v[0]"),
    ("The value route is the attention's alone; an MLP has one input. Yours gets two.",
     "l % 2 or l == 2", "l == 2"),
    ("The head's read is number 2L. That is even, but the head is no attention and has one input; yours gets two.",
     "l % 2 or l == 2 * len(query_v)", "l % 2", "query_v[l // 2]", "query_v[min(l // 2, len(query_v) - 1)]"),
    ("Even l are attention, odd l are MLPs; yours has them the other way round.",
     "l % 2 or", "l % 2 == 0 or"),
    ("Values read their own mix of the same sources; in yours they see fewer.",
     "read(query_v[l // 2], sources)", "read(query_v[l // 2], sources[:-1] or sources)"),
], "tied_query_v": [
    ("Attention i is sublayer 2i, so its row of query is row 2i; yours takes the first L rows.",
     "query[:-1:2]", "query[:len(query) // 2]"),
    ("Attention i is sublayer 2i, so its row of query is row 2i; yours takes the MLPs' rows.", "query[:-1:2]",
     "query[1::2]"),
    ("The last row of query is the head's, which is no attention; leave it out.", "query[:-1:2]", "query[::2]"),
    ("Tied means equal to `query`, whatever it is; yours is zero (a control of the paper: --rd_control frozen_v).",
     "query[:-1:2]", "torch.zeros_like(query[:-1:2])"),
    ("Attention i is sublayer 2i; yours begins with the MLP after it, and ends with the head.", "query[:-1:2]",
     "query[2::2]"),
], "divergence": [
    ("The entropy is -sum p log p: with this sign the divergence would be below 0.", "-torch.xlogy", "torch.xlogy"),
    ("The divergence is 0 for equal weights: half of each entropy is taken away; yours takes both in full.",
     "(entropy(p) + entropy(q)) / 2", "(entropy(p) + entropy(q))"),
    ("The middle of the two is (p + q) / 2, again weights that sum to 1; yours is their sum.", "(p + q) / 2",
     "(p + q)"),
    ("It is in nats: the natural logarithm. Yours is in bits.",
     "(entropy(p) + entropy(q)) / 2", "(entropy(p) + entropy(q)) / 2 + (1 / 0.6931471805599453 - 1) * "
     "(entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2)"),
    ("It is the same from p to q as from q to p; yours is the Kullback-Leibler divergence, which is not.",
     "entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2", "torch.xlogy(p, p / q).sum(0)"),
    ("0 log 0 counts as 0 (a weight can be 0 in floating point); yours is nan.", "torch.xlogy(p, p)", "(p * p.log())"),
    ("Its root is a distance; what is asked for, and what the paper reports, is without the root.",
     "entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2",
     "(entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2).sqrt()"),
    ("The sum goes over depth, one number for each token; yours goes over tokens.",
     "xlogy(p, p).sum(0)", "xlogy(p, p).sum(2)"),
]}

# ---------------------------------------------------------------------------------------------------------------------
# 4: Delta

def delta(e, sublayers, query, gate, read):
    stream, sources = e, [e]
    for l, f in enumerate(sublayers):
        mix = read(query[l], sources)
        u = f(stream + gate[l] * mix if l else stream)
        stream = stream + u
        sources = sources + [u]
    return stream

def delta_block(e, sublayers, blocks, query, gate, read):
    stream, sources = e, [e]
    for block in blocks:
        c = 0
        for l in block:
            mix = read(query[l], sources)
            u = sublayers[l](stream + gate[l] * mix if l else stream)
            stream = stream + u
            c = c + u
        sources = sources + [c]
    return stream

BOTH = [
    ("The mix is added to the stream; yours replaces it (that is exercise 2).", "stream + gate[l] * mix if l",
     "mix if l"),
    ("The mix is added to the stream; yours replaces it (that is exercise 2).",
     "stream + gate[l] * mix if l", "gate[l] * mix if l"),
    ("The stream is e and all updates, and nothing else: a mix is what one sublayer gets to see. Yours stays in the "
     "stream.", "stream = stream + u", "stream = stream + u + (gate[l] * mix if l else 0)"),
    ("h_0 = e: there is nothing to choose from yet. Yours adds the read of e, and feeds the first sublayer with more "
     "than e.", "stream + gate[l] * mix if l else stream", "stream + gate[l] * mix"),
    ("The gate multiplies the mix; yours is missing.", "gate[l] * mix", "mix"),
    ("The gate multiplies the mix alone; yours multiplies the stream too.",
     "stream + gate[l] * mix if l", "gate[l] * (stream + mix) if l"),
    ("The gate multiplies the mix alone; yours multiplies the update as well.",
     "stream = stream + u", "stream = stream + gate[l] * u"),
    ("Sublayer l has gate l, counted from 0; yours is another's.", "gate[l] * mix", "gate[l - 1] * mix"),
    ("The mix is added in full; yours is a weighted mean of stream and mix.",
     "stream + gate[l] * mix if l", "(1 - gate[l]) * stream + gate[l] * mix if l"),
    ("e is a source as well; in yours it is none.", "sources = e, [e]", "sources = e, []",
     "mix = read(query[l], sources)", "mix = read(query[l], sources or [e])"),
    ("The head sees the stream; yours is the input of the last sublayer.",
     "return stream", "return stream - u + gate[l] * mix"),
    ("The head sees the stream; yours adds one more mix.", "return stream", "return stream + read(query[-1], sources)"),
    ("The head sees the stream; yours is one more mix.", "return stream", "return read(query[-1], sources)"),
    ("The head sees the stream, e and all updates; in yours e is missing.", "return stream", "return stream - e"),
    ("The stream is e and *all* updates; yours is e and the last one.", "stream = stream + u", "stream = e + u"),
    ("Sublayer l reads by row l of query, counted from 0; yours by another row.", "query[l]", "query[l - 1]"),
    ("Sublayer l reads by row l of query, counted from 0; yours by the row of its layer.", "query[l]", "query[l // 2]"),
]
MISTAKES |= {"delta": BOTH + [
    ("What is kept is the update, the *change*; yours keeps the states of the stream, which are nearly equal, so that "
     "nothing is left to choose.", "sources + [u]", "sources + [stream]"),
    ("All earlier updates are sources; yours keeps e and the last one alone.", "sources + [u]", "[e, u]"),
    ("The mix of sublayer l is of what was there before it, u_0 .. u_{l-1}; in yours the newest update is missing.",
     "read(query[l], sources)", "read(query[l], sources[:-1] if l else sources)"),
], "delta_block": BOTH + [
    ("Sources are *completed* blocks: what the block in progress has done is in the stream already. Yours reads it as "
     "a source too.", "read(query[l], sources)", "read(query[l], sources if l == block[0] else [*sources, c])"),
    ("A source is the sum of a *block*; yours keeps every update (that is `delta`).",
     "        sources = sources + [c]\n", "",
     "            c = c + u\n", "            sources = sources + [u]\n"),
    ("A source is what block b has *changed*, C_b; yours is the state of the stream after it.",
     "sources + [c]", "sources + [stream]"),
    ("A source is what block b has changed, the stream now minus the stream before the block; yours takes away the "
     "previous *source*.", "sources + [c]", "sources + [stream - sources[-1]]"),
    ("C_b is the *sum* of the block's updates; yours is the last update alone.", "c = c + u", "c = u"),
    ("C_b is the *sum* of the block's updates; yours is their mean.", "sources + [c]", "sources + [c / len(block)]"),
    ("C_b begins anew with each block; yours goes on.", "        c = 0\n", "        c = 0 if block[0] == 0 else c\n"),
    ("All completed blocks stay sources; yours keeps e and the last one alone.", "sources + [c]", "[e, c]"),
]}

# ---------------------------------------------------------------------------------------------------------------------
# 5: WAV

def signs(l, block):
    phase = 1 if l % 2 == 0 else -1
    split = 1 if l - block[0] < len(block) // 2 else -1
    return phase, split

def ratio(c, d, rho):
    r = (rms(c) / rms(d)).clamp(max=rho)                                # (B, T)
    return r.detach()

def wav(e, sublayers, blocks, query, detail_bias, rho, read):
    def look(l, blocks):
        sources, bias, scale = [e], [0.0], [1.0]
        for c, phase, split in blocks:
            sources += [c, phase, split]
            bias += [0.0, detail_bias[l, 0], detail_bias[l, 1]]
            scale += [1.0, ratio(c, phase, rho), ratio(c, split, rho)]
        return read(query[l], sources, bias, scale)

    done = []                                                           # (C, D_phase, D_split) of each block
    for block in blocks:
        own = None
        for l in block:
            u = sublayers[l](look(l, done if own is None else [*done, own]))
            a, s = signs(l, block)
            c, phase, split = (0, 0, 0) if own is None else own
            own = c + u, phase + a * u, split + s * u
        done = done + [own]
    sums = [e, *(c for c, _, _ in done)]
    return read(query[-1], sums, [0.0] * len(sums), [1.0] * len(sums))

SCALES = "ratio(c, phase, rho), ratio(c, split, rho)"
MISTAKES |= {"signs": [
    ("The phase is +1 for attention (l even) and -1 for an MLP; yours is the other way round.",
     "1 if l % 2 == 0 else -1", "-1 if l % 2 == 0 else 1"),
    ("The split is +1 in the first half and -1 in the second; yours is the other way round.", "return phase, split",
     "return phase, -split"),
    ("Phase first, then split; yours are the other way round.", "return phase, split", "return split, phase"),
    ("The halves are of *this block*: count from its first sublayer. Yours counts l from the start of the model.",
     "l - block[0]", "l"),
    ("The halves have m/2 sublayers each, also where m/2 is odd and a layer is cut in two; yours keeps layers whole.",
     "len(block) // 2 ", "2 * (len(block) // 4) "),
    ("The halves have m/2 sublayers each, also where m/2 is odd and a layer is cut in two; yours keeps layers whole.",
     "len(block) // 2 ", "2 * -(-len(block) // 4) "),
    ("The first half has m/2 sublayers, i = 0 .. m/2 - 1; yours has one more.", "< len(block)", "<= len(block)"),
    ("The split changes once, in the middle of the block; yours is another.", "len(block) // 2", "len(block)"),
], "ratio": [
    ("r makes a detail as loud as its C: rms(C) / rms(D). Yours is upside down.", "rms(c) / rms(d)", "rms(d) / rms(c)"),
    ("r is at most rho, so that a detail near 0 is not blown up; yours has no limit.", ".clamp(max=rho)", ""),
    ("rho is the most that r may be; yours makes it the least.", "clamp(max=rho)", "clamp(min=rho)"),
    ("r is at most rho; yours is multiplied by it.", ".clamp(max=rho)", " * rho"),
    ("r is at most rho, whatever rho is; yours is at most 1.", "clamp(max=rho)", "clamp(max=1)"),
    ("r is a matched loudness and no path for a gradient: it must be detached, and yours is not.", "r.detach()", "r"),
    ("rms is the root of the *mean* square plus 1e-6; the 1e-6 is missing, or stands elsewhere.",
     "rms(c) / rms(d)", "c.norm(dim=-1) / d.norm(dim=-1)"),
    ("The 1e-6 stands under the root of both rms, by the mean square; yours stands elsewhere.",
     "rms(c) / rms(d)", "c.square().mean(-1).sqrt() / (d.square().mean(-1).sqrt() + 1e-6)"),
    ("rms is a root; yours compares mean squares.", "rms(c) / rms(d)", "(rms(c) / rms(d)).square()"),
], "wav": [
    ("r must be detached: yours lets a gradient through.", SCALES,
     "(rms(c) / rms(phase)).clamp(max=rho), (rms(c) / rms(split)).clamp(max=rho)"),
    ("A detail itself is not detached, only its r; yours lets no gradient through the details.",
     "sources += [c, phase, split]", "sources += [c, phase.detach(), split.detach()]"),
    ("A detail enters the mix as r D; in yours r is missing.", SCALES, "1.0, 1.0"),
    ("r makes a detail as loud as its C, rms(C) / rms(D); yours is upside down.",
     SCALES, "ratio(phase, c, rho), ratio(split, c, rho)"),
    ("r is in the mix alone, by `scale`; yours scales the source itself, and the epsilon of its logit with it.",
     "sources += [c, phase, split]",
     "sources += [c, ratio(c, phase, rho)[..., None] * phase, ratio(c, split, rho)[..., None] * split]",
     SCALES, "1.0, 1.0"),
    ("r is for details; yours scales C too.", "scale += [1.0,", "scale += [rho * 0 + ratio(c, phase, rho),"),
    ("A detail's logit has its learned bias; in yours there is none.", "detail_bias[l, 0], detail_bias[l, 1]",
     "0.0, 0.0"),
    ("Column 0 of detail_bias is the phase's, column 1 the split's; yours are the other way round.",
     "detail_bias[l, 0], detail_bias[l, 1]", "detail_bias[l, 1], detail_bias[l, 0]"),
    ("Each kind of detail has its own column of detail_bias; yours share one.",
     "detail_bias[l, 0], detail_bias[l, 1]", "detail_bias[l, 0], detail_bias[l, 0]"),
    ("A read has its own row of detail_bias, row l; yours takes another.", "detail_bias[l, 0], detail_bias[l, 1]",
     "detail_bias[0, 0], detail_bias[0, 1]"),
    ("The bias is on the details; yours is on C as well.", "bias += [0.0,", "bias += [detail_bias[l, 0],"),
    ("The block in progress has its details as well, beside PC; in yours they come when it is complete.",
     "sources += [c, phase, split]\n            bias += [0.0, detail_bias[l, 0], detail_bias[l, 1]]\n"
     "            scale += [1.0, ratio(c, phase, rho), ratio(c, split, rho)]",
     "now = own is not None and c is own[0]\n            sources += [c] if now else [c, phase, split]\n"
     "            bias += [0.0] if now else [0.0, detail_bias[l, 0], detail_bias[l, 1]]\n"
     "            scale += [1.0] if now else [1.0, ratio(c, phase, rho), ratio(c, split, rho)]"),
    ("Completed blocks keep their details as sources; in yours only the block in progress has them.",
     "sources += [c, phase, split]\n            bias += [0.0, detail_bias[l, 0], detail_bias[l, 1]]\n"
     "            scale += [1.0, ratio(c, phase, rho), ratio(c, split, rho)]",
     "now = own is not None and c is own[0]\n            sources += [c, phase, split] if now else [c]\n"
     "            bias += [0.0, detail_bias[l, 0], detail_bias[l, 1]] if now else [0.0]\n"
     "            scale += [1.0, ratio(c, phase, rho), ratio(c, split, rho)] if now else [1.0]"),
    ("C and its details begin anew with each block; yours go on.", "own = None\n",
     "own = None if block[0] == 0 else own\n"),
    ("There is nothing of a block before its first update; yours has three sources of zeros.",
     "done if own is None else [*done, own]", "[*done, own or (torch.zeros_like(e),) * 3]"),
    ("The details begin anew with each block; yours go on.", "c, phase, split = (0, 0, 0) if own is None else own",
     "c, phase, split = (0, *(done[-1][1:] if done else (0, 0))) if own is None else own"),
    ("Both details are kept; yours has the phase alone.", "[c, phase, split]", "[c, phase]",
     "detail_bias[l, 0], detail_bias[l, 1]", "detail_bias[l, 0]", SCALES, "ratio(c, phase, rho)"),
    ("Both details are kept; yours has the split alone.", "[c, phase, split]", "[c, split]",
     "detail_bias[l, 0], detail_bias[l, 1]", "detail_bias[l, 1]", SCALES, "ratio(c, split, rho)"),
    ("Beside the details a block keeps its sum C; yours has none.", "[c, phase, split]", "[phase, split]",
     "[0.0, detail_bias", "[detail_bias", "[1.0, ratio", "[ratio"),
    ("The first update of a block has its signs too, and they are +; yours begins the details with 0.",
     "own = c + u, phase + a * u, split + s * u",
     "own = c + u, phase + (own is not None) * a * u, split + (own is not None) * s * u"),
    ("Phase and split are different signs; yours adds both details with the phase's.", "split + s * u",
     "split + a * u"),
    ("The head sees e and every C, without details; yours sees the details too.",
     "read(query[-1], sums, [0.0] * len(sums), [1.0] * len(sums))", "look(-1, done)"),
    ("The head sees e and every C, without details; yours sees the details too.",
     "*(c for c, _, _ in done)", "*(x for own in done for x in own)"),
    ("The head has no bias, as it sees no details, and reads e and every C by the last row of query; yours does not.",
     "return read(query[-1], sums,", "return read(query[-2], sums,"),
    ("The head sees a mix; yours is the plain sum, the stream.",
     "read(query[-1], sums, [0.0] * len(sums), [1.0] * len(sums))", "sum(sums)"),
]}
