"""Exercise 6: what any router keeps to, whatever it computes: on toys of 2, 12 and 24 layers, then inside a GPT."""
import ast
import inspect

import torch

from exercises.checks import NotWritten, Wrong, draws, kind_of, sentence, unchanged
from model import GPT, GPTConfig, ROUTERS, DepthRouter
from nanodepth.files import UserError, own_router

D = 8

class Toys:
    """2L sublayers u = tanh(a h + b h_v), token by token. An MLP takes h alone."""
    def __init__(self, weights):
        self.weights, self.order, self.seen = weights, [], []
        self.sublayers = [self.attention(l) if l % 2 == 0 else self.mlp(l) for l in range(len(weights))]

    def attention(self, l):
        return lambda h, h_v=None: self.update(l, h, h if h_v is None else h_v)

    def mlp(self, l):
        return lambda h: self.update(l, h, h)

    def update(self, l, h, h_v):
        for x in (h, h_v):
            if not isinstance(x, torch.Tensor):
                raise Wrong("A sublayer takes tensors, and `read` returns a list of them: f(*read(l, sources)).",
                            f"sublayer {l}", came=kind_of(x))
        self.order.append(l)
        u = torch.tanh((h + 0.5 * h_v) * self.weights[l] / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt())
        self.seen += [(h, h._version, f"the input of sublayer {l}"), (u, u._version, f"the update of sublayer {l}")]
        return u

def load(path):
    """The router of a file, its class `Mine` or the last there is: its name for --router, and the class."""
    text = path.read_text(encoding="utf-8")
    names = [node.name for node in ast.parse(text, str(path)).body if isinstance(node, ast.ClassDef)
             and any(isinstance(x, ast.FunctionDef) and x.name == "forward" for x in node.body)]
    if not names:
        raise Wrong("A router is a class with forward(self, e, sublayers); the file has none.", path.name)
    name = f"{path}:{'Mine' if 'Mine' in names else names[-1]}"
    own_router(name, ROUTERS)
    return name, ROUTERS[name]

def run(router, e, weights):
    toys = Toys(weights)
    e = e * 1
    version = e._version
    h = router(e, toys.sublayers)
    where = f"{len(weights) // 2} layers"
    if h is None:
        raise NotWritten("`forward` returns None; is a `return` missing?")
    if isinstance(h, (list, tuple)):
        raise Wrong("forward returns one tensor, what the head sees; `read` returns a list: return read(self.head, "
                    "sources)[0].", where, kind_of(e), f"a {type(h).__name__} of {len(h)}")
    if not isinstance(h, torch.Tensor) or h.shape != e.shape:
        raise Wrong("forward returns what the head sees, one tensor as large as e.", where, kind_of(e), kind_of(h))
    if toys.order != list(range(len(weights))):
        raise Wrong("Every sublayer runs once, in order, from 0 to 2L-1.", where, f"{list(range(len(weights)))}",
                    f"{toys.order}")
    unchanged([(e, version, "e"), *toys.seen])
    if h.dtype != e.dtype:
        raise Wrong("The number format stays that of e.", where, str(e.dtype), str(h.dtype))
    if not h.isfinite().all():
        raise Wrong("What the head sees must be finite.", where, came="nan or infinity")
    return h

def check_layers(cls, name, L, draw):
    config = GPTConfig(vocab_size=11, seq_len=8, n_layer=L, n_head=2, n_embd=D, router=name)
    if len(inspect.signature(cls).parameters) != 1:
        raise Wrong("A router is built with the model's settings alone: def __init__(self, config).",
                    came=f"__init__{inspect.signature(cls.__init__)}")
    router = cls(config).double()
    where = f"{L} layers"
    with torch.no_grad():
        for p in router.parameters():
            p += 0.3 * draw(*p.shape)                               # at the zeros of the start all is a mean
    e, weights = draw(2, 3, D), 1 + 0.5 * draw(2 * L, D)
    weights.requires_grad_()
    h = run(router, e, weights)
    run(router, draw(1, 2, D), weights)
    if not torch.equal(h, run(router, e, weights)):
        raise Wrong("The same input must give the same output: yours draws random numbers in forward, or keeps "
                    "something from one forward to the next.", where)
    other = e.clone()
    other[1, 1] = draw(D)
    moved = (run(router, other, weights) - h).abs().amax(-1) > 1e-12
    if moved.sum() > moved[1, 1]:
        raise Wrong("A router chooses along depth, for each token by itself. In yours one token's embedding changes "
                    "what the head sees of another, so that the past could see the future.", where,
                    "token b=1, t=1 alone changes", f"{moved.sum().item()} of {moved.numel()} tokens change")
    (h * draw(2, 3, D)).sum().backward()
    lost = [l for l in range(2 * L) if weights.grad is None or not weights.grad[l].any()]
    if lost:
        raise Wrong("Every update must reach the head, by itself or through later sublayers; yours loses some, or "
                    "detaches them.", where, came=f"the updates of sublayers {lost}")
    reads_last = isinstance(router, DepthRouter) and not router.adds
    if reads_last and (router.query.grad is None or not router.query.grad[-1].any()):
        raise Wrong("The last row of query is the head's, and nothing reads by it: end in return read(self.head, "
                    "sources)[0], or say adds = True if the head sees a stream.", where)
    idle = [k for k, p in router.named_parameters() if p.numel() and (p.grad is None or not p.grad.any())]
    if idle:
        raise Wrong("Every parameter must have a say in the output; yours has idle ones.", where, came=", ".join(idle))

def check(path, seed, cls=None):
    """Wrong or NotWritten unless the router of the file (or cls) keeps the contract."""
    try:
        if cls is None:
            name, cls = load(path)
        else:
            name = next(k for k, v in ROUTERS.items() if v is cls)
        if len(inspect.signature(cls.forward).parameters) != 3:
            raise Wrong("forward takes self, e and sublayers.", came=str(inspect.signature(cls.forward)))
        draw = draws(seed)
        torch.manual_seed(seed)
        for L in (2, 12, 24):
            check_layers(cls, name, L, draw)
        losses = []
        for plain in (False, True):
            torch.manual_seed(seed)
            net = GPT(GPTConfig(vocab_size=11, seq_len=8, n_layer=12, n_head=2, n_embd=D, router=name,
                                plain_read=plain)).double()
            idx = torch.arange(16).view(2, 8) % 11
            losses.append(net(idx, idx)[1].item())
        if abs(losses[0] - losses[1]) > 1e-10:
            raise Wrong("The quick read and the definition give different losses, so your router does not read as "
                        "`read` is meant to be used.", "12 layers in a GPT", f"{losses[1]:.6f} (--plain_read)",
                        f"{losses[0]:.6f}")
    except (Wrong, NotWritten, NotImplementedError):
        raise
    except UserError as error:
        raise Wrong(f"train.py would say: {error}") from None
    except Exception as error:
        raise sentence(error, path) from None
