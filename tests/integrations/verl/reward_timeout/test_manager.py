"""Rewards of real responses through verl's own loading of managers and functions: the same as without us, but for time."""

import time


ECHO = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(solution_str == ground_truth)
"""

TROUBLE = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "die":
        import os; os._exit(3)
    if solution_str == "raise":
        raise ValueError("no such thing")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "none":
        return None
    return {"score": 1.0 if solution_str == ground_truth else 0.25, "acc": solution_str == ground_truth, "pred": solution_str}
"""

ASYNC = """
import asyncio
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        await asyncio.sleep(600)
    if solution_str == "raise":
        raise asyncio.TimeoutError("of an http client")
    return float(solution_str == ground_truth)
"""


def test_a_hanging_function_is_killed_and_all_samples_have_the_same_keys(configure, manager_of, responses, score):
    config = configure(TROUBLE, {"maximum": 1.0, "minimum": 0.5, "timeout_score": -1.0, "workers": 4})
    manager = manager_of(config)
    began = time.monotonic()
    texts = ["7", "8", "hang", "die", "raise", "nan", "none"]
    good, bad, *troubles = score(manager, responses("7", "8")) + score(manager_of(config), responses(*texts))[2:]
    assert time.monotonic() - began < 20
    assert good == {"reward_score": 1.0, "reward_extra_info": {"score": 1.0, "acc": True, "pred": "7"}}
    assert bad["reward_score"] == 0.25
    for trouble in troubles:
        assert trouble["reward_score"] == -1.0
