"""Exercise 5: WAV. The page is ex5_wav.md; to check: python -m exercises.check 5

While one function is checked, the other two of this file are the right ones, so `wav` may call them.
"""
import torch

def signs(l, block):
    """The signs with which sublayer l's update enters the details of its block: (phase, split), each +1 or -1.

    block: the range of the block's sublayers; l is one of them, counted from the start of the model.
    """
    raise NotImplementedError("not written yet")

def ratio(c, d, rho):
    """r, by which a detail d is matched to its C, c: at most rho, and detached. (B, T, D) and (B, T, D) -> (B, T)."""
    raise NotImplementedError("not written yet")

def wav(e, sublayers, blocks, query, detail_bias, rho, read):
    """WAV: runs all sublayers, and returns what the head sees, (B, T, D).

    e, sublayers, blocks: as in exercise 2. query: (2L + 1, D). detail_bias: (2L, 2), row l for read l: phase, split.
    read(query[l], sources, bias, scale) is the right depth read; bias and scale are lists, an entry for each source:
    a number that is added to its logit (0 for e and C), and 1 or a tensor (B, T) that multiplies it in the mix.
    Keep sums, not updates: three tensors for each block, whatever its length.
    """
    raise NotImplementedError("not written yet")
