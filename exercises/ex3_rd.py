"""Exercise 3: RD, a second route. The page is ex3_rd.md; to check: python -m exercises.check 3

The bookkeeping of exercise 2 is the checker's: each read is handed its sources.
"""
import torch

def inputs(l, sources, query, query_v, read):
    """The inputs of read l, l = 0 .. 2L: a list, [h] or [h, h_v], each (B, T, D). Read number 2L is the head's.

    sources: a list of tensors (B, T, D). query: (2L + 1, D). query_v: (L, D), a row for each attention.
    read(row, sources) is the right depth read: a row, (D), and a list of sources give the mix, (B, T, D).
    """
    raise NotImplementedError("not written yet")

def tied_query_v(query):
    """The query_v, (L, D), with which RD computes what exercise 2 does. query: (2L + 1, D)."""
    raise NotImplementedError("not written yet")

def divergence(p, q):
    """The Jensen-Shannon divergence of the weights of two routes, in nats: (n, B, T) and (n, B, T) -> (B, T)."""
    raise NotImplementedError("not written yet")
