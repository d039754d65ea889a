"""Tests SGLang on the CPU platform: impossible settings are refused, missing parts have stand-ins, changed parts are named."""

import copy
import importlib
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing
from omegaconf import OmegaConf

from rl_accel.errors import RlAccelError
from rl_accel.integrations import gpu_packages
from verl_on_cpu import sglang
from verl_on_cpu.patches import find_problems

ROLLOUT = "actor_rollout_ref.rollout"
KWARGS = f"{ROLLOUT}.engine_kwargs.sglang"
SHORTCUT = ["hydra.searchpath=[pkg://verl_on_cpu]", "+run_on=cpu", f"{ROLLOUT}.name=sglang"]


@pytest.fixture
def advice(configured, monkeypatch):
    """``advice(*overrides)``: what the platform says that a run lacks, with the tried SGLang installed."""
    monkeypatch.setattr(sglang, "installed_version", lambda: sglang.TRIED[0])
    return lambda *given: dict(find_problems(configured(*SHORTCUT, *given)))


@pytest.mark.parametrize(("engine", "frees"), [("sglang", False), ("vllm", True), ("hf_cpu", True)])
def test_the_cache_is_kept_with_sglang_only(configured, engine, frees):
    config = configured(*SHORTCUT, f"{ROLLOUT}.name={engine}")
    rollout = copy.deepcopy(config.actor_rollout_ref.rollout)  # as Ray's workers get it
    assert rollout.free_cache_engine is frees
    OmegaConf.resolve(config)
    assert config.actor_rollout_ref.rollout.free_cache_engine is frees


@pytest.mark.parametrize(
    ("given", "override"),
    [
        (f"{ROLLOUT}.free_cache_engine=True", f"{ROLLOUT}.free_cache_engine=False"),
        (f"{KWARGS}.attention_backend=fa3", f"++{KWARGS}.attention_backend=torch_native"),
        (f"{KWARGS}.enable_memory_saver=True", f"++{KWARGS}.enable_memory_saver=False"),
        (f"{KWARGS}.max_total_tokens=1024", f"++{KWARGS}.max_total_tokens=1025"),
        ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_rank=0"),
    ],
)
def test_the_shortcut_is_enough_and_a_setting_that_fails_is_refused_until_the_advice_is_taken(advice, given, override):
    assert advice() == {}
    assert list(advice(given)) == [override]
    assert advice(override) == {}


@pytest.fixture
def stubs(monkeypatch):
    finder = gpu_packages._Stubs()
    finder._names = ["sgl_kernel"]
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


def test_a_package_for_gpus_can_be_imported_and_says_why_it_cannot_be_called(stubs):
    assert gpu_packages._Stubs().find_spec("torchvision") is None, "before SGLang is imported there are none"
    kernel = importlib.import_module("sgl_kernel.elementwise")
    assert kernel.types.float8.name  # read while SGLang is imported
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.elementwise\.rms_norm needs a GPU"):
        kernel.rms_norm(1)
    with pytest.raises(AttributeError):
        kernel.__version__  # noqa: B018 - what others ask to see whether it is a package


def test_tensors_of_a_cpu_pass_and_those_of_a_gpu_are_changed_as_before(monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "set_sharing_strategy", lambda name: None)
    module = SimpleNamespace(
        __name__="patch_torch",
        monkey_patch_torch_reductions=None,
        _modify_tuple=lambda t, index, modifier: (*t[:index], modifier(t[index]), *t[index + 1 :]),
    )
    sglang._send_cpu_tensors(module)
    assert module._modify_tuple((1, 2), 6, str) == (1, 2)
    assert module._modify_tuple((1, 2), 1, str) == (1, "2")


def test_memory_is_not_pinned():
    module = SimpleNamespace(__name__="logits_processor", torch=torch)
    sglang._pin_no_memory(module)
    assert module.torch.tensor([1], dtype=module.torch.int64, pin_memory=True).tolist() == [1]


@pytest.mark.parametrize(
    "repair",
    [
        sglang._send_cpu_tensors,
        gpu_packages._skip_images,
        sglang._name_requests,
        sglang._pin_no_memory,
        sglang._prepare_children,
    ],
)
def test_a_sglang_that_lacks_what_is_repaired_is_named(repair):
    with pytest.raises(RlAccelError, match=r"this SGLang has no changed\.\w+"):
        repair(SimpleNamespace(__name__="changed"))


def test_processes_that_sglang_spawns_prepare_themselves_first(monkeypatch):
    prepared = []
    monkeypatch.setattr(sglang, "activate", lambda: prepared.append(1))
    monkeypatch.setitem(sglang._CHILDREN, "run_scheduler_process", "math")
    monkeypatch.setattr("math.run_scheduler_process", "SGLang's function", raising=False)
    engine = SimpleNamespace(run_scheduler_process=None, run_detokenizer_process=None)
    sglang._prepare_children(engine)
    assert pickle.loads(pickle.dumps(engine.run_scheduler_process)) == "SGLang's function"
    assert prepared
