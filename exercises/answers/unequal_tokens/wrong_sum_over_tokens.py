"""the sum over all tokens, not divided by their number"""


def unequal_tokens(grads, tokens, rank, world, dist):
    for grad in grads:
        grad *= tokens
        dist.all_reduce(grad)
