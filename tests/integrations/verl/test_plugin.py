"""Tests that ``import verl`` finds the plug-in by its entry point, and that nothing is switched on, slow, or fails silently."""

import json

import pytest

READERS = {"verl.utils.config:validate_config", "verl.trainer.main_ppo:run_ppo"}
READERS |= {f"verl.trainer.ppo.ray_trainer:RayPPOTrainer.{name}" for name in ("__init_subclass__", "__init__")}
READERS |= {"verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__", "verl.utils.tracking:Tracking.__init__"}
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
    changed = {name for name in after if after[name] is not before.get(name)}
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
        fork=True,
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert set(json.loads(done.stdout.splitlines()[-1])) == READERS


@pytest.mark.slow
def test_from_import_to_disable_nothing_is_touched_beyond_what_is_asked_for(python):
    python(
        SNAPSHOT
        + """
    import verl, rl_accel

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
    import rl_accel.integrations.verl.plugin
    heavy = ("drafts", "lab", "ops", "parallel", "plan", "reward", "rollout")  # every process of verl imports the plugin
    assert not [name for name in sys.modules if name.startswith(tuple(f"rl_accel.{part}" for part in heavy))]
    """
    )


@pytest.mark.slow
def test_every_trainer_that_is_built_from_a_configuration_reads_its_flags_and_decides(python):
    python(
        """
        import pytest, ray, rl_accel
        from omegaconf import OmegaConf
        from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
        from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer
        from verl.trainer.main_ppo import run_ppo
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        from verl.utils.tracking import Tracking
        from rl_accel.errors import ConfigError
        from rl_accel.integrations.verl import agent_loop
        from rl_accel.patches.verl import config_intake
        from rl_accel.patches.verl.verl_run import VerlRun

        class Plain(RayPPOTrainer):
            pass

        class OwnConstructor(RayPPOTrainer):
            def __init__(self, config, *args):
                self.config = config

        class OwnWorkers(OwnConstructor):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)

            def init_workers(self):
                pass

        class Separate(OneStepOffRayTrainer):
            def __init__(self, other, config):
                self.config = config

        Fully = FullyAsyncTrainer.__ray_metadata__.modified_class
        shipped = ray.cloudpickle.loads(ray.cloudpickle.dumps(Fully))  # as Ray ships the class of an actor
        kinds = {Plain: "legacy", OwnConstructor: "legacy", OwnWorkers: "recipe", Separate: "one_step_off", shipped: "fully_async"}

        def said(build, **flags):
            config = OmegaConf.create({"trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}}, "rl_accel": flags})
            config.actor_rollout_ref = {"rollout": {"name": "vllm", "agent": {}}}
            try:
                build(config)
            except Exception as error:  # also verl's own, of a configuration with nothing in it
                return type(error).__name__, str(error), config
            return "", "", config

        unread = {"rl_accel": {"gae": {"enable": True}}}
        for tracked in (unread, OmegaConf.create(unread)):  # as sft_trainer and others hand it to verl's logger
            with pytest.raises(SystemExit, match="framework config: this trainer reads no flags of rl_accel"):
                Tracking("p", "e", default_backend="console", config=tracked)
            Tracking("p", "e", "console", {**tracked, "rl_accel": None})

        for cls, kind in kinds.items():
            build = (lambda config: Separate(1, config)) if cls is Separate else lambda config: cls(config, None, {}, None)
            name, message, _ = said(build, gea=True)
            assert name == "ConfigError" and "unknown key rl_accel.gea (did you mean" in message, (cls, message)
            name, message, _ = said(build, tp_replan=True)
            found = f"wants the trainer = V1 sync, found {kind} ({cls.__name__})"
            assert name == "ConfigError" and message == f"rl_accel.tp_replan {found}", (cls, message)
            assert said(build, gae=True)[0] != "ConfigError", cls
            assert rl_accel.status()["gae"].applied
            Tracking("p", "e", "console", unread)
            name, message, config = said(build, telemetry=True)
            assert (name == "ConfigError") == (kind in ("recipe", "fully_async")), (cls, message)
            if name != "ConfigError":
                assert OmegaConf.select(config, agent_loop.KEY) == agent_loop.LEGACY_MANAGER, cls
        assert said(lambda config: run_ppo(config, None), gea=True)[0] == "ConfigError"
        deep = "actor_rollout_ref.rollout.rl_accel"
        for misplaced, flag in (
            *((place, f"{place}.gae.enable") for place in ("rl_acel", "RL_ACCEL", "trainer.rl_accel", deep)),
            ("gae.enable", "gae.enable"),
            *((key, key) for key in ("gae", "rl_accel_auto", "RL_ACCEL", "rlaccel", "trainer.rl_accel_auto")),
        ):
            with pytest.raises(ConfigError, match=f"flags of rl-accel belong in rl_accel, found {misplaced}"):
                config_intake.in_driver(OmegaConf.from_dotlist([f"{flag}=True"]))
        config_intake._require_section_name(OmegaConf.create({"gae": {"lam": 1}, "rl_accelerator": 1, "sampler": "x"}))
        assert not ray.is_initialized()

        rl_accel.disable()
        for cls in (RayPPOTrainer, Plain, OwnConstructor, OwnWorkers, Separate, Fully):
            assert not {"__rl_accel_original__", "__rl_accel_patch__"} & vars(cls.__init__).keys(), cls
        assert "__init_subclass__" not in vars(RayPPOTrainer)
        """,
        fork=True,
    )


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
        fork=True,
        code=1,
        RL_ACCEL="gae",
    )
    features = json.loads(done.stdout.splitlines()[-1])["features"]
    (gae,) = (feature for feature in features if feature["requested"] == "by name")
    assert gae["name"] == "gae"
    assert [switch["state"] for switch in gae["switches"]] == ["applied"]
    assert done.stderr.strip().splitlines()[-1] == (
        "rl_accel.errors.ConfigError: framework config: unknown key rl_accel.gae.enabel "
        "(did you mean rl_accel.gae.enable?); rl_accel.gae takes enable, backend, chunk_size, threads"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drivers", "variables", "on"),
    [
        ({"framework config": {"sampler": True}}, {"RL_ACCEL": "gae"}, ["sampler", "gae"]),
        ({"environment RL_ACCEL": {}}, {"RL_ACCEL": "gae"}, []),
        ({"environment RL_ACCEL_CONFIG": {"gae": True}}, {"RL_ACCEL_CONFIG": "of/the/driver.yaml"}, ["gae"]),
    ],
)
def test_variables_of_a_runtime_env_count_beside_the_flags_of_the_driver(python, drivers, variables, on):
    script = "import json, verl, rl_accel\nprint(json.dumps(rl_accel.status().to_dict()))"
    done = python(script, fork=True, RL_ACCEL_SOURCES=json.dumps(drivers), **variables)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])["features"]
    assert [feature["name"] for feature in result if feature["requested"] == "by name"] == on


@pytest.mark.slow
def test_an_error_in_the_loader_stops_the_process_with_one_line(python):
    def error(**environment):
        done = python("import verl\nprint('unreachable')", fork=True, code=1, **environment)
        assert "unreachable" not in done.stdout  # verl logs an exception of any other kind where nobody sees it
        return done.stderr.strip().splitlines()[-1]

    assert error(RL_ACCEL="sampler, gea") == (
        "rl-accel: environment RL_ACCEL: unknown key rl_accel.gea (did you mean rl_accel.gae?); "
        "rl_accel takes auto, skip_zero, reuse_log_probs, overlap_validation, sampler, final_output, gae, advantages, "
        "stall, tail_batching, reward_timeout, telemetry, tp_replan, drafts"
    )
    unreadable = error(RL_ACCEL_SOURCES='{"half of the flags')
    wanted = "rl-accel: RL_ACCEL_SOURCES wants what rl-accel writes there, found '{\"half of the flags': unset it"
    assert unreadable == wanted


def test_a_command_whose_flags_a_program_that_has_called_disable_takes_away_says_so(python):
    flag = "+rl_accel.gae.enable=True"
    line = "the flags of this command are ignored, because the program that started it has called disable()"
    for words, sources, said in (([flag], "null", 1), ([flag], "{}", 0), ([], "null", 0)):
        assert python("import verl", *words, fork=True, RL_ACCEL_SOURCES=sources).stderr.count(line) == said


@pytest.mark.slow
def test_flags_of_a_command_that_nothing_reads_are_one_line_at_its_end(python):
    """As those of main_eval are. Trainers of other programs read them in an actor, and a wrong flag has been read, too."""
    script = """
    import contextlib, sys
    import ray, verl
    from omegaconf import OmegaConf
    from rl_accel.patches.verl import config_intake

    def read(**flags):
        with contextlib.suppress(ValueError):
            config_intake.in_driver(OmegaConf.create({"rl_accel": flags}))

    @ray.remote
    def read_in_task():
        import verl
        read(gae=True)

    if sys.argv[1] != "no cluster":
        ray.init(num_cpus=1, include_dashboard=False)
    if sys.argv[1] == "wrong flag":
        read(gea=True)
    if sys.argv[1] == "task":
        ray.get(read_in_task.remote())
    """
    flag = "+rl_accel.gae.enable=True"
    for case, count in (("nothing", 1), ("task", 0), ("wrong flag", 0), ("no cluster", 0)):
        stderr = python(script, case, flag).stderr
        assert stderr.count(f"rl-accel: nothing in this program has read {flag}") == count, (case, stderr)
