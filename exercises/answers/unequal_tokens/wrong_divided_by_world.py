"""weighted by tokens, but divided by the number of ranks"""


def unequal_tokens(grads, tokens, rank, world, dist):
    for grad in grads:
        grad *= tokens
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
