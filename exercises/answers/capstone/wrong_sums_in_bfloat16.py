"""or it follows param_dtype"""

import torch


def capstone(model, fully_shard, MixedPrecisionPolicy):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return {"worst moment": 2, "twice the ranks": 3, "float32 sums": 1}
