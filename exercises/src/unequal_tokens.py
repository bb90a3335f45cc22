# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The mean over all tokens, not the mean of means
#
# Every rank has computed its gradients from the **mean loss over its own tokens**. The ranks hold unequally many tokens: padding was left
# out, or the last batch was short. Change the gradients, on every rank, to those of the **mean loss over the tokens of all ranks**.
#
# `grads` is a list of tensors; change them in place. `tokens` is the number of this rank's tokens. A rank with none has zeros.
#
# With one parameter: rank 0 has 1 token and the gradient 4, rank 1 has 3 tokens and the gradient 8. The mean over all four tokens is
# (1 · 4 + 3 · 8) / 4 = 7. The mean of the means would be 6.
#
# | judged | what counts |
# |---|---|
# | values | the weighted mean, on every rank, for every gradient |
# | no hang | every rank takes part in every call, also one without tokens |
# | bytes | the gradients are reduced once; one more number travels |

# %%
import torch

from fsdp_ref.lab import check


# %%
def unequal_tokens(grads, tokens, rank, world, dist):
    """Change `grads` in place; `dist` is torch.distributed."""
    # BEGIN SOLUTION
    total = torch.tensor(float(tokens))
    dist.all_reduce(total)
    for grad in grads:
        grad *= tokens / total                       # this rank's share of all tokens
        dist.all_reduce(grad)
    # END SOLUTION


# %% tags=["check"]
check("unequal_tokens", unequal_tokens)
