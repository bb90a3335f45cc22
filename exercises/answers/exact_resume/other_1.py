"""Writes every tensor out by hand, as lists of numbers; sets what it read in place."""

import torch


def exact_resume(run, state=None):
    params = list(run.model.parameters())
    if state is None:
        return {
            "weights": [param.detach().clone() for param in params],
            "exp_avg": [mean.clone() for mean in run.optimizer.exp_avg],
            "exp_avg_sq": [square.clone() for square in run.optimizer.exp_avg_sq],
            "count": run.optimizer.step_count,
            "rate": run.optimizer.lr,
            "schedule": run.schedule.last_epoch,
            "epoch": run.loader.epoch,
            "position": run.loader.position,
            "random": torch.get_rng_state().tolist(),
        }
    with torch.no_grad():
        for param, value in zip(params, state["weights"], strict=True):
            param.copy_(value)
    run.optimizer.exp_avg, run.optimizer.exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    run.optimizer.step_count = state["count"]
    run.optimizer.lr = state["rate"]
    run.schedule.last_epoch = state["schedule"]
    run.loader.epoch = state["epoch"]
    run.loader.position = state["position"]
    torch.set_rng_state(torch.tensor(state["random"], dtype=torch.uint8))
