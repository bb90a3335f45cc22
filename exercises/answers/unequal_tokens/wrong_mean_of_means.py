"""the mean of the ranks' means"""


def unequal_tokens(grads, tokens, rank, world, dist):
    for grad in grads:
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
