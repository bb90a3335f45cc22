"""the largest unit holds 100 % of the weights"""

import torch


def capstone(model, fully_shard, MixedPrecisionPolicy):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    return {"worst moment": 2, "twice the ranks": 3, "float32 sums": 1}
