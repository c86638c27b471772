"""Exercise 4: Delta. The page is ex4_delta.md; to check: python -m exercises.check 4

e: (B, T, D). sublayers: a list of 2L functions; u = sublayers[l](h) is the update, (B, T, D).
query: (2L, D), a row for each sublayer and none for the head. gate: (2L), a number for each sublayer.
read(query[l], sources) is the right depth read: a row and a list of sources give the mix, (B, T, D).
"""

def delta(e, sublayers, query, gate, read):
    """Delta AttnRes: a source for every update. Returns what the head sees, (B, T, D)."""
    raise NotImplementedError("not written yet")

def delta_block(e, sublayers, blocks, query, gate, read):
    """Delta Block: a source for every completed block. blocks: a list of ranges of l. Returns what the head sees."""
    raise NotImplementedError("not written yet")
