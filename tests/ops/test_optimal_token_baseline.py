import numpy as np
import pytest
import torch

from rl_accel.ops import optimal_token_baseline as module
from rl_accel.ops.optimal_token_baseline import optimal_token_baseline


@pytest.fixture(scope="module")
def stock(core_algos):
    names = {False: "optimal_token_baseline", True: "tir_optimal_token_baseline"}
    return {multi_turn: core_algos.ADV_ESTIMATOR_REGISTRY[name] for multi_turn, name in names.items()}


def case(seed: int, rows: int, tokens: int, mask_types: tuple[torch.dtype, ...] = (torch.int64,)) -> dict:
    """Groups of any size with lone, empty, equally long and turn-taking (holed) responses."""
    random = np.random.RandomState(seed)
    mask = np.arange(tokens) < random.randint(0, tokens + 1, (rows, 1))
    if seed % 2:
        mask &= random.rand(rows, tokens) < 0.7
    rewards = random.randn(rows, tokens) if seed % 3 else np.eye(tokens)[random.randint(0, tokens, rows)]
    numbers = random.randint(0, max(1, rows // random.randint(1, 40)), rows)
    return {
        "token_level_rewards": torch.from_numpy(rewards).float(),
        "response_mask": torch.from_numpy(mask).to(mask_types[seed % len(mask_types)]),
        "index": numbers if seed % 4 == 0 else np.array([f"prompt-{n}" for n in numbers], dtype=object),
        "old_log_probs": torch.from_numpy(-4 * random.rand(rows, tokens)).float(),
        "sum_pi_squared": torch.from_numpy(random.rand(rows, tokens)).float(),
        "rollout_is_weights": torch.from_numpy(2 * random.rand(rows, tokens)).float() if seed % 5 == 0 else None,
        "handle_zero_tail": seed % 7 != 0,
    }


MASKS = (torch.int64, torch.int64, torch.bool, torch.int32, torch.float32)


@pytest.mark.parametrize("multi_turn", [False, True])
def test_bits_of_verl(stock, multi_turn, same_bits):
    for seed in range(200):
        random = np.random.RandomState(seed)
        arguments = case(seed, random.randint(1, 90), random.randint(1, 70), MASKS)
        for name in ("token_level_rewards", "old_log_probs") if seed % 8 > 5 else ():
            arguments[name] = arguments[name].t().contiguous().t()
        expected = stock[multi_turn](**arguments)
        found = optimal_token_baseline(**arguments, multi_turn=multi_turn)
        assert same_bits(found[0], expected[0]), f"advantages of case {seed}"
        assert same_bits(found[1], expected[1]), f"returns of case {seed}"


@pytest.mark.parametrize("multi_turn", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_blocks_or_threads(stock, monkeypatch, multi_turn, threads, same_bits):
    arguments = case(5, 120, 900)
    expected = stock[multi_turn](**arguments)
    monkeypatch.setattr(module, "BLOCK", 30 * 900)
    found = optimal_token_baseline(**arguments, multi_turn=multi_turn, num_threads=threads)
    assert same_bits(found[0], expected[0])
    assert same_bits(found[1], expected[1])


@pytest.mark.parametrize(("rows", "tokens"), [(0, 4), (3, 0)])
def test_empty_batches(rows, tokens):
    arguments = case(1, max(rows, 1), max(tokens, 1))
    empty = {k: v[:rows, :tokens] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    empty["index"] = np.arange(rows)
    for multi_turn in (False, True):
        advantages, returns = optimal_token_baseline(**empty, multi_turn=multi_turn)
        assert advantages.shape == returns.shape == (rows, tokens)


@pytest.mark.parametrize("multi_turn", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_spread_as_in_verl(stock, multi_turn, value):
    arguments = case(1, 30, 20)
    arguments["token_level_rewards"][7, 3] = value
    arguments["sum_pi_squared"][11, 2] = value
    expected = stock[multi_turn](**arguments)
    found = optimal_token_baseline(**arguments, multi_turn=multi_turn)
    assert not expected[0].isfinite().all()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("token_level_rewards", torch.zeros(6, 4, dtype=torch.float64), TypeError),
        ("old_log_probs", torch.zeros(6, 3), ValueError),
        ("sum_pi_squared", None, TypeError),
        ("rollout_is_weights", torch.zeros(5, 4), ValueError),
        ("response_mask", torch.full((6, 4), 0.5), ValueError),
        ("response_mask", torch.full((6, 4), 2), ValueError),
        ("response_mask", torch.ones(6, 4, dtype=torch.float64), TypeError),
        ("index", np.arange(5), ValueError),
        ("index", np.arange(6.0), TypeError),
    ],
)
def test_bad_input_is_named(name, value, error):
    with pytest.raises(error, match=f"^{name} wants .* found "):
        optimal_token_baseline(**{**case(1, 6, 4), name: value})
