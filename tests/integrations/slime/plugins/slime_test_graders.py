"""Graders as users write them, for the flag ``grader``. The metadata of a sample hold its score and what its grading does."""

import asyncio
import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from slime.utils.types import Sample


def _leave_word(sample):
    """Say in a file which processes grade: this one and a child of it in a session of its own."""
    if "pids" in sample.metadata:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(sample.metadata["pids"], f"{os.getpid()}-{child.pid}").touch()


def _act(sample):
    what = sample.metadata.get("does", "")
    time.sleep(sample.metadata.get("seconds", 0.0))
    if what == "hang":
        _leave_word(sample)
        time.sleep(600)
    elif what == "spin":
        while True:
            pass
    elif what == "raise":
        raise KeyError("no such answer")
    elif what == "exit":
        os._exit(3)
    elif what == "quit":
        sys.exit(3)
    elif what == "wait":
        folder, end = Path(sample.metadata["folder"]), time.monotonic() + 60
        (folder / "began").touch()
        while not (folder / "answer").exists():
            if time.monotonic() > end:
                raise TimeoutError("nobody has answered")
            time.sleep(0.01)
    return {"nan": float("nan"), "inf": float("inf"), "none": None}.get(what, float(sample.metadata.get("score", 1.0)))


def plain(args, sample):
    return _act(sample)


async def without_await(args, sample, **kwargs):
    """What slime's users write today: async because slime wants it, blocking all the same."""
    if isinstance(sample, list):
        return [_act(each) for each in sample]
    return _act(sample)


async def awaiting(args, sample, **kwargs):
    if sample.metadata.get("does") == "hang":
        await asyncio.sleep(600)
    if sample.metadata.get("does") == "refuse":
        for _ in range(40):
            try:
                await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                sample.metadata["refused"] = True
    await asyncio.sleep(0.01)
    return _act(sample)


class _Instance:
    async def __call__(self, args, sample, **kwargs):
        return await awaiting(args, sample)


instance = _Instance()


def returning(args, sample):
    """A plain function whose value is to be awaited."""
    return awaiting(args, sample)


async def comprehending(args, sample, **kwargs):
    """It awaits, without the word."""

    async def scores():
        await asyncio.sleep(0)
        yield _act(sample)

    (reward,) = [score async for score in scores()]
    return reward


async def together(args, samples, **kwargs):
    """A judge for --group-rm, which compares."""
    best = max(each.metadata["score"] for each in samples)
    await asyncio.sleep(0)
    return [float(each.metadata["score"] == best) for each in samples]


def as_dict(args, sample):
    return {"score": _act(sample), "acc": True, "pred": "42", "steps": 3, "where": None}


def changing(args, sample):
    """Graders write into samples, and slime reads it: ``raw_reward``."""
    sample.metadata["raw_reward"] = 7.0
    sample.remove_sample = True
    sample.note = f"{args.rm_note} of {sample.tool_call_count} calls"
    return 1.0


def by_row(args, sample):
    """For rollouts: row 2 hangs, row 5 raises, the others score by their index."""
    row = sample.metadata["row"]
    if row in sample.metadata.get("hanging", (2,)):
        _leave_word(sample)
        time.sleep(600)
    if row == 5:
        raise OSError("no such tool")
    return float(sample.index % 2)


async def reading(args, sample, **kwargs):
    """What a grader reads beside the texts: parts of a sample, and slime's arguments, that may not cross to another process."""
    sample.metadata["parsed"] = sample.label
    if sample.metadata.get("uses") == "lock":
        sample.metadata["lock"].acquire()
    if sample.metadata.get("uses") == "args":
        args.unpicklable.acquire()
    return {"score": sample.metadata["check"](sample.response), "log_probs": len(sample.rollout_log_probs or ())}


class OwnSample(Sample):
    pass


_session = {}


def with_session(args, sample):
    """A plain function whose coroutine keeps something that belongs to the event loop, as an HTTP client does."""

    async def ask():
        loop = _session.setdefault("loop", asyncio.get_running_loop())
        assert loop is asyncio.get_running_loop(), "the session belongs to another loop"
        assert type(sample) is OwnSample
        _session["calls"] = _session.get("calls", 0) + 1
        return float(_session["calls"])

    return ask()


async def for_evaluations(args, sample, evaluation=False, **kwargs):
    """It awaits nothing, and is told what slime itself does not tell."""
    return 0.25 if evaluation else 0.75


async def of_one(args, sample, **kwargs):
    """It takes no list."""
    return float(sample.metadata["score"])


def _decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


decorated = _decorated(together)


async def as_array(args, samples, **kwargs):
    return np.array([each.metadata["score"] for each in samples])


async def with_acc(args, sample, **kwargs):
    return {"acc": 1.0}


def tasks(args, sample):
    """A plain function whose futures belong to the event loop that runs."""
    return asyncio.get_running_loop().create_task(awaiting(args, sample))


def gathering(args, sample):
    return asyncio.gather(awaiting(args, sample), awaiting(args, sample))


async def sorting(args, samples, **kwargs):
    """It awaits nothing."""
    samples.sort(key=lambda sample: -sample.metadata["score"])
    return [_act(sample) for sample in samples]


async def of_lists(args, groups, **kwargs):
    return [[_act(sample) for sample in group] for group in groups]


def by_arguments(args, sample):
    """slime's arguments hold a schedule of the user's rollout, and a count of this grader."""
    args.graded = getattr(args, "graded", 0) + 1
    return {"weight": args.schedule["weight"], "step": getattr(args, "step", None), "graded": args.graded}


def by_tokenizer(args, sample):
    return float(vars(args)["tokenizer"]["vocabulary"])
