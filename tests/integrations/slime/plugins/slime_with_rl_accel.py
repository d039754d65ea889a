"""Pytest plugin that runs slime's own tests with our features on, as ``--custom-megatron-init-path`` turns them on."""

from types import SimpleNamespace


def pytest_configure(config):
    from rl_accel.integrations.slime.hooks import megatron_init

    megatron_init(SimpleNamespace(rl_accel={"gae": True, "advantages": True, "tail_batching": True}))
