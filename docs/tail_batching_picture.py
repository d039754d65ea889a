"""``python docs/tail_batching_picture.py``: draws docs/tail-batching.png, five batches with and without tail batching.

Drawn completion times of prompts, log-normal; P0 = 8, prompt_ratio 1.25. A prompt that was cut off takes its
whole time again in the long round.
"""

import random
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

P0, LAUNCHED, BATCHES = 8, 10, 5
TRAINED, CUT_OFF, SECOND = "#3b78b5", "#c9c9c9", "#e08a2e"


def main() -> None:
    """Draw both timelines on one axis of time."""
    rng = random.Random(11)
    times = [rng.lognormvariate(0, 0.8) for _ in range(P0 * BATCHES)]
    figure, (stock, tail) = pyplot.subplots(2, 1, figsize=(10, 5.2), sharex=True, layout="constrained")

    now = 0.0
    for batch in range(BATCHES):
        own = times[batch * P0 : (batch + 1) * P0]
        for row, seconds in enumerate(own):
            stock.barh(row, seconds, left=now, height=0.8, edgecolor="white", linewidth=1.5, color=TRAINED)
        now += max(own)
        stock.axvline(now, color="black", linewidth=0.8)
    stock_ends = now

    now, fresh, queue = 0.0, list(times), []
    for _ in range(BATCHES - 1):
        own, fresh = fresh[:LAUNCHED], fresh[LAUNCHED:]
        ends = sorted(own)[P0 - 1]
        for row, seconds in enumerate(own):
            tail.barh(
                row,
                min(seconds, ends),
                left=now,
                height=0.8,
                edgecolor="white",
                linewidth=1.5,
                color=TRAINED if seconds <= ends else CUT_OFF,
            )
        queue += [seconds for seconds in own if seconds > ends]
        now += ends
        tail.axvline(now, color="black", linewidth=0.8)
    for row, seconds in enumerate(queue):
        tail.barh(row, seconds, left=now, height=0.8, edgecolor="white", linewidth=1.5, color=SECOND)
    begins, now = now, now + max(queue)
    tail.axvline(now, color="black", linewidth=0.8)

    stock.set_title("without: each batch waits for its slowest prompt", loc="left", fontsize=11)
    tail.set_title(
        "with: four short rounds leave the slowest two prompts each to one long round", loc="left", fontsize=11
    )
    for axes, end in ((stock, stock_ends), (tail, now)):
        axes.set(yticks=[], ylim=(LAUNCHED - 0.4, -0.6), xlim=(0, max(stock_ends, now) * 1.02))
        axes.set_ylabel("prompts")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.annotate(
            f"5 batches: {end:.0f}", (end, LAUNCHED - 1.2), xytext=(-6, 0), textcoords="offset points", ha="right"
        )
    tail.annotate("long round", (begins, LAUNCHED - 1.2), xytext=(6, 0), textcoords="offset points")
    tail.set_xlabel("time; a black line is a training step (its own duration is left out)")
    kinds = (
        (TRAINED, "trained"),
        (CUT_OFF, "cut off: done again in the long round"),
        (SECOND, "trained in the long round"),
    )
    figure.legend(
        handles=[Patch(color=c, label=n) for c, n in kinds], loc="outside lower center", ncol=3, frameon=False
    )
    figure.savefig(Path(__file__).with_name("tail-batching.png"), dpi=130)


if __name__ == "__main__":
    main()
