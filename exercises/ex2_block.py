"""Exercise 2: Block AttnRes. The page is ex2_block.md; to check: python -m exercises.check 2

L layers are 2L sublayers, l = 0 .. 2L-1: even l are attention, odd l are MLPs. All counts begin with 0.
"""

def split_layers(n_layer, n_blocks):
    """The sublayers of each block: layers are split as evenly as they go, the longer blocks first.

    Returns a list of n_blocks ranges of l: 3 layers in 2 blocks are [range(0, 4), range(4, 6)].
    """
    raise NotImplementedError("not written yet")

def block(e, sublayers, blocks, query, read):
    """Block AttnRes: runs all sublayers, and returns what the head sees, (B, T, D).

    e: the embedding, (B, T, D). sublayers: a list of 2L functions; u = sublayers[l](h) is the update, (B, T, D).
    blocks: what split_layers returns. query: (2L + 1, D), a row for each sublayer and the last for the head.
    read(query[l], sources) is the right depth read: a row of query and a list of sources give the mix, (B, T, D).
    """
    raise NotImplementedError("not written yet")
