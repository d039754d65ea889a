import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rl_accel.ops.group_advantages import gpg, group_std, grpo, opo, passk, rloo

CASES = 210
OURS = {"grpo": grpo, "rloo": rloo, "opo": opo, "gpg": gpg}
GOOD = (torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.int64), np.array([0, 0, 1, 1]))


def labels(random: np.random.RandomState, rows: int, smallest: int = 1) -> np.ndarray:
    """Ragged group labels: lone rows, huge groups, missing responses; as strings, objects or integers."""
    groups = max(1, rows // max(smallest, random.randint(1, 20)))
    numbers = random.randint(0, groups, rows)
    if smallest > 1:
        numbers = np.arange(rows) % groups
    random.shuffle(numbers)
    kind = random.randint(4)
    if kind == 0:
        return numbers
    words = [f"prompt-{n}" for n in numbers]
    return np.array(words, dtype=object if kind < 3 else str)


def case(seed: int, smallest: int = 1) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Rewards, mask and labels: 0/1 scores with ties, dense and sparse rewards, huge values, holes, empty rows."""
    random = np.random.RandomState(seed)
    rows, tokens = random.randint(2 if smallest > 1 else 0, 80), random.randint(0 if seed % 9 == 0 else 1, 50)
    rewards = torch.from_numpy(random.randn(rows, tokens)).to(torch.float64 if seed % 4 == 3 else torch.float32)
    style = random.randint(5)
    if style == 0:
        rewards = (rewards > 0).to(rewards.dtype)
    elif style == 1 and tokens:
        rewards[:, :-1] = 0
    elif style == 2:
        rewards *= torch.from_numpy(10.0 ** random.randint(-30, 30, (rows, 1)))
    elif style == 3:
        rewards = rewards.t().contiguous().t()
    mask = torch.arange(tokens) < torch.from_numpy(random.randint(0, tokens + 1, (rows, 1)))
    if seed % 2:
        mask = mask & (torch.from_numpy(random.rand(rows, tokens)) < 0.7)
    mask_type = (torch.int64, torch.int64, torch.bool, torch.float32, torch.float64, torch.int32)[seed % 6]
    return rewards, mask.to(mask_type), labels(random, rows, smallest)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("grpo", grpo, {}),
        ("grpo", lambda *a: grpo(*a, normalise=False), {"norm_adv_by_std_in_grpo": False}),
        ("grpo", lambda *a: grpo(*a, epsilon=1e-3), {"epsilon": 1e-3}),
        ("rloo", rloo, {}),
        ("opo", opo, {}),
        ("gpg", gpg, {}),
        ("gpg", lambda *a: gpg(*a, f_norm=3.0), {"f_norm": 3.0}),
        ("grpo_passk", passk, {"norm_adv_by_std_in_grpo": True}),
        ("grpo_passk", lambda *a: passk(*a, normalise=False), {"norm_adv_by_std_in_grpo": False}),
    ],
)
def test_bits_of_verl_and_arguments_are_left_alone(core_algos, name, ours, theirs, same_bits):
    if name == "grpo_passk":
        theirs = {"config": OmegaConf.create(theirs)}
    for seed in range(CASES):
        rewards, mask, index = case(seed, smallest=2 if name == "grpo_passk" else 1)
        before = rewards.clone(), mask.clone(), index.copy()
        found = ours(rewards, mask, index)
        assert same_bits(rewards, before[0])
        assert torch.equal(mask, before[1])
        assert (index == before[2]).all()
        expected, returns = core_algos.ADV_ESTIMATOR_REGISTRY[name](rewards, mask, index, **theirs)
        assert expected is returns
        assert same_bits(found, expected), f"case {seed}: off by {(found - expected).abs().max()}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg"])
def test_values_that_are_not_finite_stay_in_their_group(core_algos, name, value):
    rewards, mask = torch.randn(12, 3), torch.ones(12, 3, dtype=torch.int64)
    rewards[5, 1] = value
    index = np.arange(12) // 4
    found, expected = OURS[name](rewards, mask, index), core_algos.ADV_ESTIMATOR_REGISTRY[name](rewards, mask, index)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not found[4:8].isfinite().all()
    assert found[:4].isfinite().all()


@pytest.mark.parametrize("size", [2, 3, 7, 8, 9, 16, 31, 64, 65, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_std_has_the_bits_of_one_call_a_group(size, dtype, same_bits):
    generator = torch.Generator().manual_seed(size)
    for groups in (1, 2, 300):
        scores = torch.randn(groups, size, dtype=dtype, generator=generator) * 50
        assert same_bits(group_std(scores), torch.stack([torch.std(line.clone()) for line in scores]))


@pytest.mark.parametrize(
    ("position", "value", "error", "names"),
    [
        (0, torch.zeros(4, 3, dtype=torch.float16), TypeError, "token_level_rewards"),
        (0, torch.zeros(4, 3, dtype=torch.int64), TypeError, "token_level_rewards"),
        (0, [[0.0]], TypeError, "token_level_rewards"),
        (0, torch.zeros(4), ValueError, "token_level_rewards"),
        (0, torch.zeros(4, 3, requires_grad=True), ValueError, "token_level_rewards"),
        (0, torch.zeros(4, 3, device="meta"), ValueError, "token_level_rewards"),
        (1, torch.ones(4, 2), ValueError, "response_mask"),
        (1, None, TypeError, "response_mask"),
        (2, np.array([0.0, 0.0, 1.0, 1.0]), TypeError, "index"),
        (2, [0, 0, 1, 1], TypeError, "index"),
        (2, np.array([0, 0, 1]), ValueError, "index"),
    ],
)
@pytest.mark.parametrize("function", [grpo, rloo, opo, gpg, passk])
def test_bad_input_is_named(function, position, value, error, names):
    arguments = list(GOOD)
    arguments[position] = value
    with pytest.raises(error, match=f"^{names} wants .* found "):
        function(*arguments)


def test_a_lone_response_unhashable_labels_and_another_default_dtype_are_refused():
    rewards, mask, _ = GOOD
    with pytest.raises(ValueError, match="at least 2 responses"):
        passk(rewards, mask, np.array([0, 0, 0, 1]))
    index = np.empty(4, dtype=object)
    index[:] = [[0], [0], [1], [1]]
    with pytest.raises(TypeError, match="unhashable"):
        grpo(rewards, mask, index)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ValueError, match="default dtype"):
            grpo(*GOOD)
    finally:
        torch.set_default_dtype(torch.float32)
