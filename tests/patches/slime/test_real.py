"""Tests the patches in real slime: advantages of one rank and of two context-parallel ranks, in processes that run this file."""

import math
import os
import random
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
NAMES = ("get_advantages_and_returns_batch", "get_reinforce_plus_plus_returns")


def close(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (a, b)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


def compare():
    """Compares our advantage functions with slime's, in slime's own module, and prints a line."""
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=RANK, world_size=WORLD)
    from megatron.core import mpu

    mpu.initialize_model_parallel(context_parallel_size=WORLD)
    from slime.backends.megatron_utils import cp_utils, loss
    from slime.utils import ppo_utils
    from slime.utils.misc import load_function

    import rl_accel.errors

    stock = {name: getattr(loss, name) for name in NAMES}
    hook = load_function("rl_accel.integrations.slime.hooks.megatron_init")
    with pytest.raises(rl_accel.errors.ConfigError, match=r"did you mean rl_accel\.gae\.enable"):
        hook(SimpleNamespace(rl_accel={"gae": {"enabel": True}}))
    hook(SimpleNamespace(rl_accel={"gae": True, "advantages": True}))
    for name, function in stock.items():
        assert getattr(loss, name) is not function, f"{name} is still slime's"
        assert getattr(ppo_utils, name) is getattr(loss, name)

    draw = random.Random(0)
    compared = 0
    for batch, last_reward in ((1, 0.5), (2, 0.5), (7, 0.5), (16, 0.5), (2, math.inf), (7, -math.inf)):
        lengths = [draw.choice([2, 3, 17, 128, 129, 300]) for _ in range(batch)]
        totals = [length + draw.randrange(4, 40) for length in lengths]
        torch.manual_seed(batch)
        full = {name: [torch.randn(n) for n in lengths] for name in ("values", "rewards", "kl")}
        full["rewards"][-1][-1] = last_reward
        masks = [(torch.rand(n) < 0.7).int() for n in lengths]
        for mask in masks:
            mask[draw.randrange(len(mask))] = 1

        def mine(name, lengths=lengths, totals=totals, full=full):
            if WORLD == 1:
                return [each.clone() for each in full[name]]
            return list(map(cp_utils.slice_log_prob_with_cp, full[name], totals, lengths))

        for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (1.0, 0.0)):
            arguments = (totals, lengths, mine("values"), mine("rewards"), gamma, lam)
            both = (stock["get_advantages_and_returns_batch"], loss.get_advantages_and_returns_batch)
            for wanted, found in zip(*(function(*arguments) for function in both), strict=True):
                close(found, wanted)
                compared += 1
            scores = torch.randn(batch, generator=torch.Generator().manual_seed(batch))
            scores[-1] = last_reward
            keywords = {"rewards": scores, "kl": mine("kl"), "loss_masks": masks, "response_lengths": lengths}
            keywords |= {"total_lengths": totals, "kl_coef": 0.05, "gamma": gamma}
            wanted = stock["get_reinforce_plus_plus_returns"](**keywords)
            close(loss.get_reinforce_plus_plus_returns(**keywords), wanted)
            compared += 1

    hook(SimpleNamespace(rl_accel={}))
    for name, function in stock.items():
        assert getattr(loss, name) is function, f"{name} did not come back"
        assert getattr(ppo_utils, name) is function
    print(f"{compared} comparisons agree on rank {RANK} of {WORLD}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_advantages_are_slimes_in_slimes_own_module(slime_root, ranks):
    pytest.importorskip("megatron", reason="megatron-core is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(slime_root), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = []
    try:
        for rank in range(ranks):
            command = [sys.executable, __file__]
            processes.append(subprocess.Popen(command, env={**env, "RANK": str(rank)}, **output))
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0, output[-4000:]
            assert f"54 comparisons agree on rank {rank} of {ranks}" in output
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    try:
        compare()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
