"""Writes every tensor out by hand, as lists of numbers; sets what it read in place."""

import torch


def exact_resume(run, state=None):
    params = list(run.model.parameters())
    if state is None:
        slots = [run.optimizer.state[param] for param in params]
        return {
            "weights": [param.detach().clone() for param in params],
            "exp_avg": [slot["exp_avg"].clone() for slot in slots],
            "exp_avg_sq": [slot["exp_avg_sq"].clone() for slot in slots],
            "count": [int(slot["step"]) for slot in slots],
            "rate": run.optimizer.param_groups[0]["lr"],
            "schedule": run.schedule.last_epoch,
            "epoch": run.loader.epoch,
            "position": run.loader.position,
            "random": bytes(torch.get_rng_state().tolist()),
        }
    with torch.no_grad():
        for param, value in zip(params, state["weights"]):
            param.copy_(value)
    for index, param in enumerate(params):
        run.optimizer.state[param] = {"step": torch.tensor(float(state["count"][index])), "exp_avg": state["exp_avg"][index],
                                      "exp_avg_sq": state["exp_avg_sq"][index]}
    run.optimizer.param_groups[0]["lr"] = state["rate"]
    run.schedule.last_epoch = state["schedule"]
    run.loader.epoch = state["epoch"]
    run.loader.position = state["position"]
    torch.set_rng_state(torch.tensor(list(state["random"]), dtype=torch.uint8))
