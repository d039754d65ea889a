"""``import verl`` finds the plug-in through its entry point; nothing is switched on, costs much, or fails silently."""

import json

import pytest

READERS = {
    "verl.utils.config:validate_config",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer.__init__",
}
SNAPSHOT = """
    import importlib, json, sys, types

    def objects():
        \"\"\"Every function and class of verl's modules, and every attribute of its classes.\"\"\"
        found = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "verl" and module is not None:
                for key, value in list(vars(module).items()):
                    if isinstance(value, (types.FunctionType, type)):
                        found[f"{name}:{key}"] = value
                    if isinstance(value, type) and value.__module__ == name:
                        found.update({f"{name}:{key}.{inner}": item for inner, item in list(vars(value).items())})
        return found

    def import_trainers():
        for name in ("main_ppo", "ppo.ray_trainer", "ppo.v1", "ppo.core_algos"):
            importlib.import_module("verl.trainer." + name)
        importlib.import_module("verl.utils.tracking")
"""


@pytest.mark.slow
def test_without_a_flag_only_what_reads_flags_is_touched_and_disable_puts_it_back(python):
    done = python(
        SNAPSHOT
        + """
    import verl
    assert "rl_accel" not in sys.modules
    import_trainers()
    before = objects()
    import rl_accel.integrations.verl.plugin
    after = objects()
    changed = {name for name in before if after[name] is not before[name]}
    status = rl_accel.status()
    assert {reader.state for reader in status.flag_readers} == {"applied"}, status
    assert {reader.target for reader in status.flag_readers} == changed, status
    assert status.loggers == ()
    rl_accel.disable()
    again = objects()
    assert again.keys() == before.keys()
    assert [name for name in before if again[name] is not before[name]] == []
    assert rl_accel.status().flag_readers == ()
    print(json.dumps(sorted(changed)))
    """,
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == READERS


@pytest.mark.slow
def test_from_import_to_disable_nothing_is_touched_beyond_what_is_asked_for(python):
    """Processor time is asserted, not wall time: the machine is shared, and the work is all ours to count."""
    done = python(
        SNAPSHOT
        + """
    import time, verl, rl_accel

    def ours():
        return {name for name, item in objects().items() if hasattr(item, "__rl_accel_patch__")}

    assert "rl_accel.integrations.verl.plugin" in sys.modules
    assert all(feature.requested == "off" for feature in rl_accel.status().features)
    assert "verl.trainer.ppo.ray_trainer" not in sys.modules and "numba" not in sys.modules

    import_trainers()
    from verl.trainer.ppo import core_algos
    from verl.utils.tracking import Tracking
    log = Tracking.log
    assert not hasattr(core_algos.compute_gae_advantage_return, "__wrapped__")
    assert "verl.utils.config:validate_config" in ours()

    rl_accel.enable(gae=True, sampler=True)
    assert {"verl.utils.tracking:Tracking.log", "verl.trainer.ppo.core_algos:compute_gae_advantage_return"} <= ours()
    assert Tracking.log.__wrapped__ is log
    assert [logger.state for logger in rl_accel.status().loggers] == ["applied"]
    rl_accel.enable(sampler=False, gae=False, advantages=False, final_output=False)
    assert Tracking.log is log, "nothing is on"
    rl_accel.disable()
    assert ours() == set()

    for name in [name for name in sys.modules if name.startswith("rl_accel")]:
        del sys.modules[name]
    start = time.process_time()
    import rl_accel.integrations.verl.plugin
    assert time.process_time() - start < 0.050
    """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_environment_switches_features_on_and_flags_of_the_run_are_checked(python):
    done = python(
        """
        import verl, rl_accel, json
        from omegaconf import OmegaConf
        from verl.trainer.ppo import core_algos
        from verl.utils.config import validate_config
        print(json.dumps(rl_accel.status().to_dict()))
        validate_config(OmegaConf.create({"rl_accel": {"gae": {"enabel": True}}}), False, False)
        """,
        RL_ACCEL_CONFIG="gae: true",
    )
    assert done.returncode == 1
    gae = json.loads(done.stdout.splitlines()[-1])["features"][0]
    assert gae["requested"] == "by name"
    assert [patch["state"] for patch in gae["patches"]] == ["applied"]
    assert done.stderr.strip().splitlines()[-1] == (
        "rl_accel.errors.ConfigError: framework config: unknown key rl_accel.gae.enabel "
        "(did you mean rl_accel.gae.enable?); rl_accel.gae takes enable, backend, chunk_size, threads"
    )


@pytest.mark.slow
def test_an_error_in_the_loader_stops_the_process_with_one_line(python):
    done = python("import verl\nprint('unreachable')", RL_ACCEL_CONFIG="gea: true")
    assert done.returncode == 1
    assert "unreachable" not in done.stdout
    assert done.stderr.strip().splitlines()[-1] == (
        "rl-accel: environment RL_ACCEL_CONFIG: unknown key rl_accel.gea (did you mean rl_accel.gae?); "
        "rl_accel takes auto, gae, advantages, sampler, final_output, tail_batching, reward_timeout, telemetry, tp_replan, "
        "balance, drafts"
    )
