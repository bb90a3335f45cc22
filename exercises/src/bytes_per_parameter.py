# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What one parameter costs on one rank
#
# Training keeps weights, gradients and the optimizer's state. Write a function that says how many **bytes a parameter** each of the three
# takes on one rank, at the moment between backward and the optimizer's step.
#
# | `precision` | weights | gradients | what the optimizer keeps |
# |---|---|---|---|
# | `"fp32"` | fp32 | as the weights | its moments, in fp32 |
# | `"mixed"` | bf16 | as the weights | an fp32 copy of the weights (the *master copy*), and moments in fp32 |
# | `"bf16"` | bf16 | as the weights | its moments, in the weights' dtype |
#
# `optimizer` is `"sgd"` (no moment), `"momentum"` (one) or `"adam"` (two). `stage` is `"ddp"` (everything whole on every rank), `"zero1"`
# (the optimizer's part sharded over `world` ranks), `"zero2"` (gradients too) or `"zero3"` (weights too). Padding does not count.
#
# | judged | what counts |
# |---|---|
# | values | the bytes of whole tensors |
# | sharding | what each stage divides |

# %%
from fsdp_ref.lab import check


# %%
def bytes_per_parameter(precision, optimizer, stage, world):
    """{"weights": bytes, "gradients": bytes, "optimizer": bytes} of one parameter on one rank; fractions are right."""
    # BEGIN SOLUTION
    weight = {"fp32": 4, "mixed": 2, "bf16": 2}[precision]
    moment = {"fp32": 4, "mixed": 4, "bf16": 2}[precision]
    master = 4 if precision == "mixed" else 0
    held = {"weights": weight, "gradients": weight, "optimizer": master + moment * ["sgd", "momentum", "adam"].index(optimizer)}
    sharded = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[stage]          # counted from the optimizer's part upwards
    for part in ("optimizer", "gradients", "weights")[:sharded]:
        held[part] = held[part] / world
    return held
    # END SOLUTION


# %% tags=["check"]
check("bytes_per_parameter", bytes_per_parameter)
