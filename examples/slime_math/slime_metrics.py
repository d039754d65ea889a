"""Makes slime write the metrics that ``rl-accel ab`` reads: ``--custom-rollout-log-function-path slime_metrics.log_rollout``."""

import json
import os
import time

_previous: list[float] = []


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    """Appends a line with the metrics of a rollout, under verl's names. A step is the time between the ends of two rollouts.

    Returns False, so that slime also logs the rollout.
    """
    now = time.monotonic()
    lengths = [sample.response_length for sample in samples]
    metrics = {
        **(rollout_extra_metrics or {}),
        "timing_s/gen": rollout_time,
        "timing_s/step": now - _previous[-1] if _previous else rollout_time,
        "critic/score/mean": sum(sample.get_reward_value(args) for sample in samples) / len(samples),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": max(lengths),
    }
    _previous[:] = [now]
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "a") as file:
        file.write(json.dumps({"step": rollout_id + 1, "data": metrics}, default=float) + "\n")
    return False
