"""``python docs/reward_timeout_picture.py``: draws docs/reward-timeout.png, eight responses of one prompt under both limits.

The limits are those of the policy itself, with its defaults; the times are made up: a slow test case, one hanging program.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

from rl_accel.features import RewardTimeoutFlags
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout

CORRECT, WRONG = (3.0, 3.6, 4.1, 4.4, 5.0), (2.2, 3.9)
RIGHT, FALSE, STOPPED, SAVED = "#3b78b5", "#c9c9c9", "#e08a2e", "#f6dcc0"


def limits(correct: tuple[float, ...]) -> list[float]:
    """Returns the limit before the first correct result, after it, after the second, and so on."""
    policy = AdaptiveTimeout(RewardTimeoutFlags(probe_share=0.0, maximum=30.0))
    found = [policy.limit("a").wall]
    for seconds in correct:
        policy.record("a", seconds, seconds, correct=True)
        found.append(policy.limit("a").wall)
    return found


def main() -> None:
    """Draw the executions and the limit they lead to, and how the limit of a quick and of a slow test case goes on."""
    figure, (bars, steps) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    ends = limits(CORRECT)[-1]
    rows = [*((seconds, RIGHT) for seconds in CORRECT), *((seconds, FALSE) for seconds in WRONG)]
    bars.barh(0, 30.0, color=SAVED)
    bars.barh(0, ends, color=STOPPED)
    for row, (seconds, color) in enumerate(sorted(rows, reverse=True), 1):
        bars.barh(row, seconds, color=color)
    bars.axvline(30, color="black", linewidth=0.8, linestyle=":")
    bars.axvline(ends, color="black", linewidth=0.8)
    bars.annotate("fixed limit", (30, 6.7), xytext=(-4, 0), textcoords="offset points", ha="right")
    bars.annotate(f"adaptive limit, {ends:.1f} s", (ends, 6.7), xytext=(4, 0), textcoords="offset points")
    bars.set(yticks=[], xlabel="seconds", xlim=(0, 31), ylim=(-0.6, 7.6))
    bars.set_title("eight responses of one prompt, executed together", loc="left", fontsize=11)
    kinds = ((RIGHT, "correct"), (FALSE, "wrong"), (STOPPED, "never ends: stopped"), (SAVED, "saved"))
    bars.legend(handles=[Patch(color=c, label=n) for c, n in kinds], loc=(0.5, 0.4), frameon=False)

    many = tuple(CORRECT[i % len(CORRECT)] for i in range(5, 17))
    for each, label in (((*CORRECT, *many), "5 s at most"), ((0.31,) * 17, "0.3 s")):
        found = limits(each)
        steps.step(range(len(found)), found, where="post", label=f"correct answers take {label}")
    steps.set(ylim=(0, 31.5), xlim=(0, 17), xlabel="correct results of the test case so far", ylabel="limit, seconds")
    steps.set_title("the limit follows the longest correct one", loc="left", fontsize=11)
    steps.legend(frameon=False)
    for axes in (bars, steps):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("reward-timeout.png"), dpi=130)


if __name__ == "__main__":
    main()
