"""Exercise 1: the depth read. The page is ex1_depth_read.md; to check: python -m exercises.check 1

Sizes: n sources, B sequences, T tokens, width D. Everything is float64; give back what you get.
"""
import torch

def depth_read(query, sources):
    """The depth read, written out: no torch.softmax here, only exp, sums and products.

    query: (D). sources: a list of n tensors, (B, T, D) each.
    Returns (mix, alpha): the mix, (B, T, D), and the weights, (n, B, T).
    """
    raise NotImplementedError("not written yet")

def depth_read_backward(query, sources, g):
    """Its gradient by hand, without autograd. g: the gradient of the loss by the mix, (B, T, D).

    You may call `depth_read`: while this function is checked, it is the right one.
    Returns (d_query, d_sources): (D), and a list of n tensors (B, T, D).
    """
    raise NotImplementedError("not written yet")
