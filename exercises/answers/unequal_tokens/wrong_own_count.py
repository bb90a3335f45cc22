"""divided by the number of this rank's own tokens"""


def unequal_tokens(grads, tokens, rank, world, dist):
    for grad in grads:
        grad *= tokens
        dist.all_reduce(grad)
        grad /= max(tokens, 1)
