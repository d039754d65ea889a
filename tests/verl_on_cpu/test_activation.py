"""Tests the effects of the CPU platform on a process that imports verl, and that there are none without the platform."""

import pytest

pytestmark = pytest.mark.slow


def test_a_verl_that_is_not_told_of_it_imports_nothing_of_it(python):
    result = python(
        """
        import os, sys
        import verl
        from verl.plugin.platform.platform_manager import PlatformRegistry
        assert PlatformRegistry.get("cpu") is None
        assert [name for name in sys.modules if name.startswith(("rl_accel.lab", "verl_on_cpu"))] == []
        assert "prometheus_client" not in sys.modules, "every process of everybody would pay for it"
        assert "VERL_ENGINE_DEVICE" not in os.environ
        print("nothing was imported")
        """,
        fork=True,
    )
    assert result.stdout == "nothing was imported\n", result.stderr


def test_with_it_verl_finds_every_part_and_a_run_that_cannot_work_stops_before_a_cluster_starts(python, model_folder):
    result = python(
        """
        import os, sys, torch
        import verl
        from verl.utils import device
        assert device.get_device_name() == device.get_device_id() == "cpu"
        assert device.get_resource_name() == "GPU" and device.get_nccl_backend() == "gloo"
        assert device.get_torch_device().is_available() is False
        assert os.environ["VERL_ENGINE_DEVICE"] == "cuda"
        assert "verl.workers.rollout.base" not in sys.modules, "importing verl must stay cheap"

        import verl.trainer.main_ppo, verl.trainer.ppo.v1, verl.workers.engine.fsdp
        from verl_on_cpu import activate
        from verl_on_cpu.patches import SWITCHES
        activate()  # a second time changes nothing
        for patch in SWITCHES:
            of_vllm = ".vllm_rollout." in patch.target  # cannot be imported without vLLM
            assert of_vllm or patch.state().value == "applied", patch
            assert patch.no_seam

        from transformers import AutoConfig
        from verl.utils.model import load_valuehead_model
        folder = os.environ["MODEL"]
        config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa", num_labels=1)
        model = load_valuehead_model(folder, torch.float32, config, False)
        assert model.config._attn_implementation == "sdpa", "the value model has the attention of its configuration"
        assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 1)
        print("every part was found")

        sys.argv = ["main_ppo", "actor_rollout_ref.rollout.name=vllm", "hydra.run.dir=.", "hydra.output_subdir=null"]
        verl.trainer.main_ppo.main()
        """,
        fork=True,
        code=None,
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES="verl_on_cpu.plugin",
        MODEL=str(model_folder),
    )
    assert "every part was found" in result.stdout, result.stderr
    assert result.returncode != 0
    assert "this run cannot work with VERL_PLATFORM=cpu" in result.stderr
    assert "actor_rollout_ref.rollout.name=hf_cpu" in result.stderr
    assert "ray init" not in result.stdout
