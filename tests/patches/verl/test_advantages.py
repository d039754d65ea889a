"""The advantage patches on real verl: in and out of every binding, same bits through verl's own entry points."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rl_accel.patches.verl import advantages
from rl_accel.telemetry import metrics

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
SWITCHES = {patch.name.removeprefix("verl."): patch for patch in advantages.SWITCHES}
ESTIMATORS = [name for name in SWITCHES if name != "masked_whiten"]
CONFIG = OmegaConf.create({"gamma": 0.98, "norm_adv_by_std_in_grpo": True})


@pytest.fixture
def apply():
    """Apply patches by name; they are reverted at the end whatever happens."""
    applied = []

    def apply(*names: str) -> None:
        for name in names:
            applied.append(SWITCHES[name])
            SWITCHES[name].apply(None)

    yield apply
    for patch in reversed(applied):
        patch.revert()


def batch(seed: int, estimator: str) -> dict:
    """What verl's compute_advantage hands to an estimator, for a random ragged batch without lone responses."""
    random = np.random.RandomState(seed)
    rows, tokens = random.randint(4, 60), random.randint(2, 40)
    mask = np.arange(tokens) < random.randint(1, tokens + 1, (rows, 1))
    if seed % 2:
        mask &= random.rand(rows, tokens) < 0.8
    mask[0, :2] = True
    index = np.array([f"prompt-{n % max(1, rows // 7)}" for n in range(rows)], dtype=object)
    random.shuffle(index)
    arguments = {
        "token_level_rewards": torch.from_numpy(random.randn(rows, tokens)).float(),
        "response_mask": torch.from_numpy(mask).long(),
        "index": index,
        "config": CONFIG,
    }
    if "token_baseline" in estimator:
        arguments["old_log_probs"] = torch.from_numpy(-3 * random.rand(rows, tokens)).float()
        arguments["sum_pi_squared"] = torch.from_numpy(random.rand(rows, tokens)).float()
        arguments["rollout_is_weights"] = None if seed % 3 else torch.from_numpy(random.rand(rows, tokens)).float()
    return arguments


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("name", [*ESTIMATORS, "gdpo"])
def test_bits_of_the_function_it_replaces(apply, name):
    """GDPO calls GRPO for each reward, and verl gives neither of them its configuration."""
    stock = core_algos.get_adv_estimator_fn(name)
    cases = [batch(seed, name) for seed in range(200)]
    if name in ("grpo", "gdpo"):
        cases = [{key: value for key, value in arguments.items() if key != "config"} for arguments in cases]
    expected = [stock(**arguments) for arguments in cases]
    apply("grpo" if name == "gdpo" else name, "masked_whiten")
    metrics.drain()
    for seed, (arguments, wanted) in enumerate(zip(cases, expected, strict=True)):
        found = core_algos.get_adv_estimator_fn(name)(**arguments)
        assert same_bits(found[0], wanted[0]), f"advantages of case {seed}"
        assert same_bits(found[1], wanted[1]), f"returns of case {seed}"
    assert metrics.drain() == {}, "a case went to verl's own function"


@pytest.mark.slow  # imports verl's Ray trainer
@pytest.mark.parametrize("name", ESTIMATORS)
def test_bits_through_verls_compute_advantage(apply, name):
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    def run(seed: int):
        arguments = batch(seed, name)
        index = arguments.pop("index")
        del arguments["config"]
        tensors = {key: value for key, value in arguments.items() if value is not None}
        data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": index})
        return compute_advantage(data, adv_estimator=name, config=CONFIG).batch

    expected = [run(seed) for seed in range(5)]
    apply(*SWITCHES)
    for seed, wanted in enumerate(expected):
        found = run(seed)
        assert same_bits(found["advantages"], wanted["advantages"])
        assert same_bits(found["returns"], wanted["returns"])


def small(change: dict) -> dict:
    return {
        "token_level_rewards": torch.randn(4, 2),
        "response_mask": torch.ones(4, 2, dtype=torch.int64),
        "index": np.array([0, 0, 1, 1]),
        "config": CONFIG,
        **change,
    }


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grpo_passk", {"token_level_rewards": torch.randn(4, 2, dtype=torch.bfloat16)}),
        ("opo", {"index": np.array([0.0, 0.0, 1.0, 1.0])}),
        ("rloo", {"index": [0, 0, 1, 1]}),
        ("opo", {"response_mask": torch.ones(4, 1)}),
        ("gpg", {"f_norm": torch.tensor(2.0)}),
        ("optimal_token_baseline", {"response_mask": torch.full((4, 2), 0.5)}),
        ("reinforce_plus_plus", {"response_mask": torch.full((4, 2), 0.5)}),
    ],
)
def test_outside_the_domain_verls_own_function_does_the_work(apply, name, change):
    arguments = small(change)
    if name == "optimal_token_baseline":
        arguments |= {"old_log_probs": -torch.rand(4, 2), "sum_pi_squared": torch.rand(4, 2)}
    expected = core_algos.get_adv_estimator_fn(name)(**arguments)
    apply(name)
    metrics.drain()
    found = core_algos.get_adv_estimator_fn(name)(**arguments)
    assert metrics.drain() == {"rl_accel/advantages/stock_calls": 1.0}
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grpo_passk", {"index": np.array([0, 0, 0, 1])}),
        ("grpo_passk", {"config": None}),
        ("reinforce_plus_plus", {"config": None}),
        ("reinforce_plus_plus_baseline", {"response_mask": torch.zeros(4, 2, dtype=torch.int64)}),
        ("grpo", {"index": None}),
        ("rloo", {"index": np.array([0, 0, 1])}),
        ("rloo", {"token_level_rewards": torch.ones(4, 2, dtype=torch.int64)}),
    ],
)
def test_errors_are_verls_own(apply, name, change):
    arguments = small(change)
    if arguments["index"] is None:
        del arguments["index"]
    with pytest.raises(Exception) as stock:
        core_algos.get_adv_estimator_fn(name)(**arguments)
    apply(name, "masked_whiten")
    with pytest.raises(stock.type) as ours:
        core_algos.get_adv_estimator_fn(name)(**arguments)
    assert str(ours.value) == str(stock.value)
