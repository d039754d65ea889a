import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from verl_on_cpu.vllm import EXPAND, accept_precision, correct_expansion


def test_each_drafted_token_gets_the_value_of_its_request():
    module = SimpleNamespace(_expand_kernel_impl=None, _FuncWrapper=lambda function: {(4,): function})
    correct_expansion(module)
    output = torch.full((5,), 7.0)
    ends = torch.tensor([2, 3, 3, 5], dtype=torch.int32)
    module.expand_kernel[(4,)](output, torch.tensor([0.5, 0.0, 3.0, 2.0]), ends, 0, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0]
    counts = torch.zeros(5, dtype=torch.int32)
    module.expand_kernel[(4,)](counts, torch.tensor([4, 0, 3, 2], dtype=torch.int32), ends, 0, 0, MAX_NUM_TOKENS=128)
    assert counts.tolist() == [4, 4, 0, 2, 2]
    correct_expansion(SimpleNamespace())  # a vLLM without that function is left alone


def test_from_0_31_on_the_kernel_is_registered_anew_if_an_engine_has_begun(monkeypatch):
    registered = {}
    for begun in ({}, {EXPAND: "vLLM's own"}):
        dispatcher = SimpleNamespace(_registry=begun, register_kernels=registered.update)
        monkeypatch.setitem(sys.modules, "vllm.triton_utils.dispatcher", dispatcher)
        module = SimpleNamespace(_expand_kernel_impl=None)
        correct_expansion(module)
        assert registered == ({EXPAND: module._expand_kernel_impl} if begun else {})
    output = torch.zeros(3)
    module._expand_kernel_impl(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 0, 1, 128)  # by position there
    assert output.tolist() == [0.5, 2.0, 2.0]


def test_a_sampler_that_takes_no_precision_is_called_without():
    calls = []
    module = SimpleNamespace(
        _sample_recovered_tokens_kernel_impl=lambda output, *, NO_DRAFT_PROBS: calls.append((output, NO_DRAFT_PROBS)),
        _FuncWrapper=lambda function: {(4,): function},
    )
    accept_precision(module)
    module.sample_recovered_tokens_kernel[(4,)]("output", NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=False)
    assert calls == [("output", True)]
    for newer in (SimpleNamespace(), SimpleNamespace(_sample_recovered_tokens_kernel_impl=lambda USE_FP64_GUMBEL: 0)):
        accept_precision(newer)
        assert not hasattr(newer, "sample_recovered_tokens_kernel")


WEIGHTS = """
import asyncio, os, sys, threading
import torch
import verl
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

socket, ends, got = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock", {}, {}
for run in sys.argv[1:]:
    os.environ["RAY_TMPDIR"] = run
    receiver = BucketedWeightReceiver(socket, device=torch.device("cpu"), use_shm=True)
    ends[run] = BucketedWeightSender(socket, bucket_size_mb=1, use_shm=True), receiver

def send(run):
    asyncio.run(ends[run][0].async_send_weights(iter([(run, torch.ones(2))])))

def receive(run):
    ends[run][1].receive_weights(lambda weights, is_last: got.setdefault(run, []).extend(name for name, _ in weights))

threads = [threading.Thread(target=end, args=(run,)) for run in ends for end in (send, receive)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert got == {run: [run] for run in ends}, got
"""


@pytest.mark.slow
@pytest.mark.vllm
def test_two_runs_on_one_machine_update_the_weights_of_their_own_engines(repo, clean_environment, short_tmp):
    """Each has a Ray cluster of its own, and so verl's name of the socket for weights is the same in both."""
    python = os.environ.get("VLLM_PYTHON", repo / ".venv-vllm" / "bin" / "python")
    if not os.path.exists(python):
        pytest.skip("real vllm is absent: `make vllm` builds its environment")
    runs = [short_tmp / "a", short_tmp / "b"]
    for run in runs:
        run.mkdir()
    on_cpu = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.plugin"}
    done = subprocess.run(
        [python, "-c", WEIGHTS, *runs], env={**clean_environment, **on_cpu}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
