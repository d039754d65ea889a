"""Grader with the signature that slime expects: share of a response's characters that are of the kind named in the prompt."""

import asyncio
import importlib.util
import random
from pathlib import Path

_FILE = Path(__file__).parent.parent / "verl_ppo_cpu" / "reward.py"
_SPEC = importlib.util.spec_from_file_location("character_kinds", _FILE)
_REWARD = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_REWARD)

SLOW_SHARE, SLOW_SECONDS = 0.01, 5.0


async def score(args, sample, **_):
    """Returns a score in [0, 1]. Grading takes five seconds for one response in a hundred, whatever its length."""
    if random.Random(f"{args.rollout_seed} {sample.index} {sample.response}").random() < SLOW_SHARE:
        await asyncio.sleep(SLOW_SECONDS)
    return _REWARD.compute_score("", sample.response, sample.label)
