import pytest

from rl_accel.lab.bench import rounds
from rl_accel.rollout.simulation import ReplayedLengths, play_rounds


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"ROUNDS": 10, "PROMPTS": 4, "RESPONSES": 3, "REPLICAS": 2}.items():
        monkeypatch.setattr(rounds, name, value)


def test_it_prints_both_kinds_of_runs(invoke):
    output = invoke(rounds.bench_rounds)
    assert "every response" in output
    assert "tail batching" in output


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda run, engine, *rest: play_rounds(run, rounds.ENGINE, *rest), "do not take the longest"),
        (
            lambda *args: play_rounds(*args, seed=0 if isinstance(args[3], ReplayedLengths) else next(SEEDS)),
            "other rounds",
        ),
    ],
)
def test_a_wrong_simulation_gets_no_number(monkeypatch, invoke, wrong, words):
    monkeypatch.setattr(rounds, "play_rounds", wrong)
    output = invoke(rounds.bench_rounds, code=1)
    assert words in output
    assert "ms a round" not in output


SEEDS = iter(range(1, 100))
