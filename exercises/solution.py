"""model.py's own routers, as exercises 1 to 6 call theirs: what `check --solution` checks."""
import torch

import model
from lab.routing import js_divergence
from model import GPTConfig

def router(name, blocks, **parameters):
    """A router of model.py with these tensors for its parameters, so that gradients reach them."""
    L, D = (blocks[-1][-1] + 1) // 2, parameters["query"].size(1)
    rho = parameters.pop("rho", 1.0)
    gate = {"route_gate": 1.0} if "gate" in parameters else {}
    made = model.ROUTERS[name](GPTConfig(n_layer=L, n_blocks=len(blocks), n_head=1, head_dim=2, n_embd=D, rho=rho,
                                         router=name, **gate))
    for key, x in parameters.items():
        delattr(made, key)
        setattr(made, key, x)
    return made

depth_read = model.depth_read

def depth_read_backward(query, sources, g):
    query, *sources = (x.detach().requires_grad_() for x in (query, *sources))
    with torch.enable_grad():
        d_query, *d_sources = torch.autograd.grad((model.depth_read(query, sources)[0] * g).sum(), [query, *sources])
    return d_query, d_sources

def split_layers(n_layer, n_blocks):
    return GPTConfig(n_layer=n_layer, n_blocks=n_blocks).blocks

def block(e, sublayers, blocks, query, read):
    return router("block", blocks, query=query)(e, sublayers)

def inputs(l, sources, query, query_v, read):
    return router("rd", [range(2 * len(query_v))], query=query, query_v=query_v).read(l, sources)

def tied_query_v(query):
    tied = model.RD(GPTConfig(n_layer=len(query) // 2, n_head=1, head_dim=2, n_embd=query.size(1), rd_control="tied",
                              router="rd"))
    del tied.query
    tied.query = query
    return torch.cat([tied.queries(l) for l in range(0, tied.head, 2)])

divergence = js_divergence

def delta(e, sublayers, query, gate, read):
    return router("delta", [range(len(sublayers))], query=query, gate=gate)(e, sublayers)

def delta_block(e, sublayers, blocks, query, gate, read):
    return router("delta_block", blocks, query=query, gate=gate)(e, sublayers)

def signs(l, block):
    _, phase, split = model.WAV(GPTConfig(router="wav")).signs(l, block)
    return phase, split

def ratio(c, d, rho):
    return model.WAV(GPTConfig(router="wav", rho=rho)).scales([c, d])[1]

def wav(e, sublayers, blocks, query, detail_bias, rho, read):
    return router("wav", blocks, query=query, detail_bias=detail_bias, rho=rho)(e, sublayers)

Mine = model.Block
