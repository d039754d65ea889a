"""The programs of ``rl-accel bench reward``: how long they run, whether they are right, and which never end."""

import random
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from rl_accel.reward.program import Case

HANGING = 0.0505
"""Share of executions that run into a fixed limit of 30 s. RollPacker (NSDI'26), Fig. 7a: model-generated code, digitised."""
# fmt: off
SECONDS = (
    0.116, 0.147, 0.164, 0.185, 0.2, 0.252, 0.29, 0.361, 0.393, 0.441, 0.489, 0.565, 0.652, 0.694, 0.74, 0.788, 0.833, 0.955, 1.065,
    1.237, 1.62, 2.264, 2.79, 15.09, 23.55, 29.0,
)
SHARES = (
    0.0, 0.039, 0.077, 0.126, 0.165, 0.302, 0.446, 0.609, 0.642, 0.686, 0.73, 0.756, 0.798, 0.821, 0.85, 0.873, 0.89, 0.919, 0.931,
    0.936, 0.939, 0.9405, 0.943, 0.945, 0.947, 0.9495,
)
# fmt: on
"""The others, same figure: cumulative shares of executions. 0.9 % of them lie between 2 and 30 s."""
CORRECT = (0.2, 1.0)
"""Share of a prompt's responses that are correct: spread evenly over the prompts. Our choice; nothing is published."""
ANSWER = "42"

Kind = Literal["sleep", "busy"]


@dataclass(frozen=True)
class Response:
    """One program.

    Attributes:
        prompt: whose.
        code: what is executed.
        correct: whether it prints the answer, in the end.
        seconds: what it takes; None: it never ends.
    """

    prompt: str
    code: str
    correct: bool
    seconds: float | None


CASE = Case("stdin", "", ANSWER)


def workload(
    prompts: int,
    responses: int,
    epochs: int,
    batch: int,
    scale: float,
    spread: float,
    overhead: float = 0.0,
    seed: int = 0,
) -> list[list[Response]]:
    """Return batches of responses, ``batch`` prompts each, the prompts in a new order in every epoch.

    How long correct programs take is for the most part a matter of the prompt: its typical time is a quantile of the published
    distribution, and each response takes that times a log-normal factor. One prompt in 106 takes more than 2 s; with fewer prompts
    hardly one does. Wrong programs take as long, or for ever: so many of them that the published share of all does. Half of all
    wait, half compute.

    Args:
        scale: all seconds are multiplied by it.
        overhead: seconds that an execution takes beside its program, which are a part of those published.
        spread: standard deviation of the logarithm of that factor. 0.3: nine in ten are within 1.6 times the typical time.
    """
    rng = random.Random(seed)
    shares = [(i + 0.5) / prompts for i in range(prompts)]
    typical = [quantile(share) for share in shares]
    correct = [CORRECT[0] + (CORRECT[1] - CORRECT[0]) * share for share in shares]
    rng.shuffle(typical)
    rng.shuffle(correct)
    drawn = [
        [rng.random() < correct[prompt] for _ in range(responses)] for _ in range(epochs) for prompt in range(prompts)
    ]
    wrong = [(i, j) for i, row in enumerate(drawn) for j, right in enumerate(row) if not right]
    hanging = set(rng.sample(wrong, round(HANGING * len(drawn) * responses)))
    batches = []
    for epoch in range(epochs):
        order = list(range(prompts))
        rng.shuffle(order)
        for first in range(0, prompts, batch):
            made = []
            for prompt in order[first : first + batch]:
                row = epoch * prompts + prompt
                for place, right in enumerate(drawn[row]):
                    seconds = min(typical[prompt] * rng.lognormvariate(0, spread), SECONDS[-1]) * scale
                    own = None if (row, place) in hanging else max(seconds - overhead, 0.0)
                    kind: Kind = rng.choice(("sleep", "busy"))
                    code = program(kind, own, ANSWER if right else "41")
                    made.append(Response(f"prompt-{prompt}", code, right, own))
            rng.shuffle(made)
            batches.append(made)
    return batches


def quantile(share: float) -> float:
    """Return the seconds that so many of the executions that end stay below, as published."""
    wanted = share * SHARES[-1]
    right = min(max(bisect_left(SHARES, wanted), 1), len(SHARES) - 1)
    part = (wanted - SHARES[right - 1]) / (SHARES[right] - SHARES[right - 1])
    return SECONDS[right - 1] + part * (SECONDS[right] - SECONDS[right - 1])


def program(kind: Kind, seconds: float | None, answer: str) -> str:
    """Return Python that prints ``answer`` after it has slept for ``seconds``, or computed for so many seconds of a processor.

    None: it sleeps, or computes, for ever.
    """
    if seconds is None:
        return "import time\nwhile True:\n    time.sleep(9)" if kind == "sleep" else "while True:\n    pass"
    if kind == "sleep":
        return f"import time\ntime.sleep({seconds})\nprint({answer})"
    return f"import time\nwhile time.process_time() < {seconds}:\n    pass\nprint({answer})"
