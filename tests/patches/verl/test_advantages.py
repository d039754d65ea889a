"""Tests the advantage patches on real verl: applied and reverted at every binding, the same bits through verl's entry points."""

import statistics
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional as verl_functional

from rl_accel.patches.verl import advantages
from rl_accel.patches.verl.verl_run import WHITENING_ESTIMATORS
from rl_accel.telemetry import metrics

CONFIG = OmegaConf.create({"gamma": 0.98, "norm_adv_by_std_in_grpo": True})


@pytest.fixture
def apply():
    """Apply the patches, with no numbers waiting; they are reverted at the end whatever happens."""

    def apply() -> None:
        for patch in advantages.SWITCHES:
            patch.apply(None)
        metrics.drain()

    yield apply
    for patch in reversed(advantages.SWITCHES):
        patch.revert()


def advantages_of(c: SimpleNamespace, estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns by verl's ``compute_advantage``, for a random ragged batch of ``make_case``."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    rows = len(c.mask)
    index = np.array([f"prompt-{n % max(1, rows // 7)}" for n in range(rows)], dtype=object)
    np.random.RandomState(rows).shuffle(index)
    tensors = {"token_level_rewards": c.rewards, "values": c.values, "response_mask": c.mask}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": index})
    config = None if estimator == "gdpo" else CONFIG
    result = compute_advantage(data, adv_estimator=estimator, config=config).batch
    return result["advantages"], result["returns"]


@pytest.mark.slow  # imports verl's Ray trainer
@pytest.mark.parametrize("name", WHITENING_ESTIMATORS)
def test_bits_of_the_function_it_replaces_where_verl_calls_it(apply, same_bits, make_case, name):
    expected = [advantages_of(make_case(seed), name) for seed in range(100)]
    apply()
    for seed, wanted in enumerate(expected):
        assert [*map(same_bits, advantages_of(make_case(seed), name), wanted)] == [True, True], seed
    assert metrics.drain().keys() == {"rl_accel/advantages/calls"}, "a case went to verl's own function"


def test_a_whole_number_on_the_command_line_is_a_discount(apply):
    random = torch.Generator().manual_seed(0)
    given = {"token_level_rewards": torch.randn(6, 9, generator=random)}
    given |= {"response_mask": (torch.rand(6, 9, generator=random) < 0.7).long()}
    configs = [OmegaConf.create({"gamma": gamma}) for gamma in (1, 0)]
    expected = [outcome_of("reinforce_plus_plus", {**given, "config": config}) for config in configs]
    apply()
    for config, wanted in zip(configs, expected, strict=True):
        result = outcome_of("reinforce_plus_plus", {**given, "config": config})
        assert all(map(torch.equal, result, wanted))
    assert metrics.drain().keys() == {"rl_accel/advantages/calls"}


@pytest.mark.full
def test_a_batch_of_eight_million_tokens_takes_less_time_and_has_the_same_bits(apply):
    """Prints how many times less time the replacements take: the numbers of docs/benchmarks/advantages.md."""
    generator = torch.Generator().manual_seed(0)
    rows, tokens = 1024, 8192
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).long()
    rewards = torch.zeros(rows, tokens).scatter_(1, lengths - 1, torch.rand(rows, 1, generator=generator))

    def run() -> dict[str, tuple[tuple, float]]:
        results = {}
        whiten = verl_functional.masked_whiten
        estimate = core_algos.get_adv_estimator_fn("reinforce_plus_plus")
        for name, call in {
            "whitening": lambda: (whiten(rewards, mask),),
            "REINFORCE++": lambda: estimate(token_level_rewards=rewards, response_mask=mask, config=CONFIG),
        }.items():
            call()  # compiles kernels
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                result = call()
                seconds.append(time.perf_counter() - began)
            results[name] = result, statistics.median(seconds)
        return results

    stock = run()
    apply()
    for name, (result, seconds) in run().items():
        assert all(map(torch.equal, result, stock[name][0]))
        print(f"{name}: {stock[name][1]:.2f} s become {seconds:.3f} s ({stock[name][1] / seconds:.1f}x)")


def outcome_of(name: str, arguments: dict) -> tuple:
    """What the estimator returns, or the type and the words of its error."""
    try:
        return core_algos.get_adv_estimator_fn(name)(**arguments)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("reinforce_plus_plus", {"response_mask": torch.full((4, 2), 0.5)}),
        ("reinforce_plus_plus", {"token_level_rewards": torch.randn(4, 2, dtype=torch.bfloat16)}),
        ("reinforce_plus_plus", {"token_level_rewards": torch.randn(4, 2, dtype=torch.float64)}),
        # errors
        ("reinforce_plus_plus", {"config": None}),
        ("reinforce_plus_plus", {"response_mask": torch.ones(4, 1)}),
        ("reinforce_plus_plus_baseline", {"response_mask": torch.zeros(4, 2, dtype=torch.int64)}),
    ],
)
def test_outside_the_domain_verls_own_function_does_the_work_and_its_errors_are_its_own(apply, name, change):
    arguments = {"token_level_rewards": torch.randn(4, 2), "response_mask": torch.ones(4, 2, dtype=torch.int64)}
    arguments |= {"index": np.array([0, 0, 1, 1]), "config": CONFIG, **change}
    expected = outcome_of(name, arguments)
    apply()
    result = outcome_of(name, arguments)
    assert metrics.drain()["rl_accel/advantages/stock_calls"] >= 1
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
