"""Command ``rl-accel bench rounds``: measures how fast ``rl-accel plan`` simulates rollout rounds on one core."""

import time

import click
import numpy as np
from rich.table import Table

from rl_accel.features import TailBatchingFlags
from rl_accel.lab.bench.measure import console_of_benchmark, met
from rl_accel.plan.answers import PLAIN
from rl_accel.rollout.simulation import EngineModel, ReplayedLengths, Round, play_rounds
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.rollout.workload import published

ROUNDS, PROMPTS, RESPONSES, REPLICAS = 1000, 512, 16, 64
"""Rounds of each kind of run, prompts of a batch, responses of a prompt, and replicas of the engine."""
GOAL_S = 60.0
"""Maximum CPU seconds that the simulation of 1,000 rounds should take."""
ENGINE = EngineModel({1: 0.013, 64: 0.02}, cached_token_seconds=1e-8)


@click.command("rounds")
def bench_rounds() -> None:
    """Time simulated rollout rounds with published response lengths, with and without tail batching.

    The command checks three properties. Rounds without tail batching take exactly as long as the longest response of each batch.
    The same seed gives the same rounds. Each round trains a whole batch. If a check fails, no number is printed, and the exit
    status is 1. A missed goal is shown but does not change the exit status.
    """
    console = console_of_benchmark()
    lengths = published("math16k")
    table = lengths.drawn().lengths(range(3 * PROMPTS), RESPONSES, np.random.default_rng(0))
    level = EngineModel({1: 0.01})
    longest = 0.01 * table.reshape(3, -1).max(axis=1)
    played = play_rounds(TailRun(PROMPTS, RESPONSES, PLAIN), level, REPLICAS, ReplayedLengths(table), 3)
    if not np.allclose([one.metrics.rollout_seconds for one in played], longest):
        raise click.ClickException("rounds without tail batching do not take the longest of each batch")
    shown = Table("", "rounds", "seconds", "ms a round", "responses a second", f"1,000 rounds in {GOAL_S:.0f} s")
    for name, flags in (("every response", PLAIN), ("tail batching", TailBatchingFlags())):
        run = TailRun(PROMPTS, RESPONSES, flags)

        def play(count: int, run: TailRun = run) -> list[Round]:
            return play_rounds(run, ENGINE, REPLICAS, lengths.drawn(), count)

        first = play(6)
        if play(6) != first:
            raise click.ClickException(f"{name}: the same seed gave other rounds")
        began = time.process_time()
        played = play(ROUNDS)
        seconds = time.process_time() - began
        if played[:6] != first or any(one.metrics.prompts_trained != PROMPTS for one in played):
            raise click.ClickException(f"{name}: a round did not train a whole batch")
        ended = sum(len(one.ends) for one in played)
        per_round = seconds / ROUNDS
        numbers = (f"{ROUNDS:,}", f"{seconds:.1f}", f"{1000 * per_round:.1f}", f"{ended / seconds:,.0f}")
        shown.add_row(name, *numbers, met(per_round * 1000 <= GOAL_S))
    console.print(shown)
