import sys
from types import SimpleNamespace

import torch

from rl_accel.lab.verl_cpu.vllm import EXPAND, correct_expansion


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
