"""this rank has the state of rank 0"""

import torch
import torch.distributed as dist


def state_of_rank_0():
    state = torch.get_rng_state()
    dist.broadcast(state, src=0)
    return state


def exact_resume(run, state=None):
    if state is None:
        return {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "schedule": run.schedule.state_dict(),
            "place": [run.loader.epoch, run.loader.position],
            "random": state_of_rank_0(),
        }
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.schedule.load_state_dict(state["schedule"])
    run.loader.epoch, run.loader.position = state["place"]
    torch.set_rng_state(state["random"])
