"""A worked example for exercise 6: a router without queries. DenseFormer's depth-weighted average (arXiv 2402.02622).

After each layer the stream is replaced by a weighted sum of e and of what every layer so far has returned:

    X_0 = e     X_j = what layer j-1 makes of its input     input of layer i = sum over j = 0..i of weight[i-1, j] X_j

The weights are learned numbers, one for each pair: the same for every token, whatever is in it, and they need not sum
to 1. At first each row takes the newest X alone, which is a residual connection, exactly.
"""
import torch
import torch.nn as nn

class DenseFormer(nn.Module):
    def __init__(self, config):
        super().__init__()
        L = config.n_layer
        self.weight = nn.Parameter(torch.eye(L + 1)[1:])                        # (L, L + 1); row i: X_0 .. X_{i+1}

    def forward(self, e, sublayers):
        states, h = [e], e
        for weight, attention, mlp in zip(self.weight, sublayers[0::2], sublayers[1::2]):
            h = h + attention(h)
            h = h + mlp(h)
            states = states + [h]
            h = sum(w * x for w, x in zip(weight, states))                      # (B, T, D)
        return h
