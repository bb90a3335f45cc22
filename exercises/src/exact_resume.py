# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 11b · Resume with the same bits: four omissions
#
# A run is saved, killed, and goes on from what was saved. It must go on **as if nothing had happened**: the same losses to the last bit.
# The function below saves and loads the weights. It forgets **four** things. Find them.
#
# `run` has
#
# - `run.model`: a small network with dropout, which draws from torch's own random generator. Every rank draws other numbers.
# - `run.optimizer`: Adam, with `exp_avg`, `exp_avg_sq` (lists of tensors), `step_count` and `lr`
# - `run.schedule`: a learning rate that falls with every step; `last_epoch` says how many there were
# - `run.loader`: the examples of this rank, shuffled anew in every epoch; `epoch` and `position` say where it is
#
# Model, optimizer and schedule have `state_dict()` and `load_state_dict(state)`.
#
# `exact_resume(run)` returns the state of **this rank's** run: dicts and lists of tensors, numbers and text, what a file can hold.
# `exact_resume(run, state)` puts it into a run that was just built, with other numbers everywhere.
#
# | judged | what counts |
# |---|---|
# | values | the weights come back; saving changes nothing; the losses go on with the same bits |
# | optimizer | moments and step count |
# | schedule | the learning rate of every later step |
# | data | the next batch is the one that would have come next |
# | random | each rank's own random numbers go on |
# | no hang | every rank comes to the end |
#
# About 30 minutes.

# %%
import torch

from fsdp_ref.lab import check


# %%
def exact_resume(run, state=None):
    """The state of this rank's run; with `state`, put it into `run`."""
    if state is None:
        saved = {"model": run.model.state_dict()}
        # BEGIN SOLUTION
        saved["optimizer"] = run.optimizer.state_dict()
        saved["schedule"] = run.schedule.state_dict()
        saved["place"] = [run.loader.epoch, run.loader.position]
        saved["random"] = torch.get_rng_state()
        # END SOLUTION
        return saved
    run.model.load_state_dict(state["model"])
    # BEGIN SOLUTION
    run.optimizer.load_state_dict(state["optimizer"])
    run.schedule.load_state_dict(state["schedule"])
    run.loader.epoch, run.loader.position = state["place"]
    torch.set_rng_state(state["random"])
    # END SOLUTION
    return None


# %% [markdown]
# The check runs your function on fresh ranks and says what it finds. Run it as often as you like.

# %% tags=["check"]
check("exact_resume", exact_resume)
