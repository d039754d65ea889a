"""Tests enable, disable, status and enabled on a made-up ``verl`` package."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl_accel import __version__, doctor
from rl_accel.__main__ import cli
from rl_accel.errors import ConfigError, PatchRefused
from rl_accel.runtime import Runtime, enable

CHANGED_SIGNATURE = ("lam: torch.Tensor,\n", "lam: torch.Tensor,\n    new_argument=None,\n")
CHANGED_RESULT = ("returns = advantages + values", "returns = advantages - values")
MISSING_PART = ("import verl.utils.torch_functional as verl_F", "verl_F = None")


@pytest.fixture
def check(python):
    """``check(source)`` runs a script beside the made-up ``verl``; asserts its exit code and returns stdout and stderr."""

    def run(source: str, code: int = 0) -> tuple[str, str]:
        done = python(source, fork=True, code=code)
        return done.stdout, done.stderr

    return run


def functions(module: str, *names: str) -> str:
    """These functions of the installed verl, as they are written there, without decorators."""
    text = (Path(find_spec("verl").origin).parent / module).read_text()
    result = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    return "\n".join(ast.get_source_segment(text, result[name]) for name in names)


CORE_ALGOS = f"""
import torch
import verl.utils.torch_functional as verl_F
ADV_ESTIMATOR_REGISTRY = {{}}
{functions("trainer/ppo/core_algos.py", "compute_gae_advantage_return")}
ADV_ESTIMATOR_REGISTRY["gae"] = compute_gae_advantage_return
"""
MASKED = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
TORCH_FUNCTIONAL = f"import torch\n{functions('utils/torch_functional.py', *MASKED)}"


@pytest.fixture
def fake_verl(tmp_path):
    """A package ``verl`` 0.9.1 that holds only what GAE needs of the real one; ``edit(old, new)`` changes its source."""
    package = tmp_path / "verl" / "trainer" / "ppo"
    package.mkdir(parents=True)
    utils = tmp_path / "verl" / "utils"
    utils.mkdir()
    (utils / "torch_functional.py").write_text(TORCH_FUNCTIONAL)
    for folder in (package, package.parent, package.parent.parent, utils):
        (folder / "__init__.py").write_text('__version__ = "0.9.1"\n')
    (package / "core_algos.py").write_text(CORE_ALGOS)

    def edit(old: str, new: str) -> None:
        path = package / "core_algos.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return edit


def test_nothing_is_imported_and_patches_wait_for_the_framework(fake_verl, check):
    """And the status, as plain data and as text, says so."""
    stdout, _ = check("""
        import json, sys, rl_accel
        assert rl_accel.status()["gae"].requested == "off"
        status = rl_accel.enable(gae=True)
        assert "verl" not in sys.modules, "enable() must not import the framework"
        assert {p.state for p in status["gae"].switches} == {"waiting"}, status
        assert json.loads(__import__("os").environ["RL_ACCEL_SOURCES"])["version"] == rl_accel.__version__
        print(json.dumps(status.to_dict()))
        print(status)
        from verl.trainer.ppo import core_algos
        assert rl_accel.status()["gae"].applied, str(rl_accel.status())
        assert core_algos.ADV_ESTIMATOR_REGISTRY["gae"] is core_algos.compute_gae_advantage_return
        original = core_algos.compute_gae_advantage_return.__wrapped__
        rl_accel.disable()
        assert core_algos.compute_gae_advantage_return is original
        assert core_algos.ADV_ESTIMATOR_REGISTRY["gae"] is original
        assert rl_accel.status()["gae"].switches == ()
    """)
    first, *text = stdout.splitlines()
    (gae,) = (feature for feature in json.loads(first)["features"] if feature["name"] == "gae")
    assert gae["switches"][0]["state"] == "waiting"
    assert any("waiting" in line and "verl.gae" in line for line in text)


def test_a_bare_enable_is_automatic_and_explicit_names_are_exact(fake_verl, check):
    check("""
        import rl_accel
        requested = lambda: {f.name: f.requested for f in rl_accel.status().features}
        rl_accel.enable()
        found = requested()
        never = ("tail_batching", "reward_timeout", "telemetry", "tp_replan", "drafts")
        semantic = {name: found.pop(name) for name in never}
        assert set(semantic.values()) == {"off"}, "neither what changes training nor what only observes is automatic"
        assert set(found.values()) == {"automatically"}, found
        others = {**semantic, "final_output": "off", "skip_zero": "off"}
        others |= dict.fromkeys(("reuse_log_probs", "overlap_validation", "stall"), "off")
        rl_accel.enable(auto=True, sampler=False)
        assert requested()["sampler"] == "off" and requested()["gae"] == "automatically"
        rl_accel.enable(gae=False)
        assert set(requested().values()) == {"off"}, "to turn one off turns no other on"
        rl_accel.enable("gae", advantages=dict(enable=False))
        assert requested() == {"gae": "by name", "advantages": "off", "sampler": "off", **others}
        rl_accel.enable(gae=dict(backend="numba"))
        assert requested() == {"gae": "by name", "advantages": "off", "sampler": "off", **others}
        with rl_accel.enabled("sampler"):
            assert requested() == {"gae": "off", "advantages": "off", "sampler": "by name", **others}
        assert requested() == {"gae": "by name", "advantages": "off", "sampler": "off", **others}
    """)


def test_new_settings_reach_an_applied_patch_and_wrong_ones_change_nothing(fake_verl, check):
    check(r"""
        import pytest, rl_accel
        from rl_accel.errors import ConfigError, PatchRefused
        from verl.trainer.ppo import core_algos
        original = core_algos.compute_gae_advantage_return
        rl_accel.enable(gae=True)
        first = core_algos.compute_gae_advantage_return
        rl_accel.enable(gae=dict(backend="chunk"))
        second = core_algos.compute_gae_advantage_return
        assert len({id(original), id(first), id(second)}) == 3
        assert second.__wrapped__ is original, "a second enable() must not stack"
        rl_accel.enable(gae=dict(backend="chunk"))
        wrongs = (dict(gea=True), dict(gae=dict(backend="nunba")), dict(gae=dict(threads=-1)), dict(gae=3))
        for names, wrong in (*(((), wrong) for wrong in wrongs), (("gae",), dict(gae=False))):
            with pytest.raises(ConfigError, match=r"^rl_accel.enable\(\): "):
                rl_accel.enable(*names, **wrong)
        assert rl_accel.status()["gae"].requested == "by name"
        assert core_algos.compute_gae_advantage_return is second
    """)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (CHANGED_SIGNATURE, "new_argument"),
        (CHANGED_RESULT, "the outputs differ"),
        (MISSING_PART, "verl.gae: cannot be made for"),
    ],
)
def test_a_changed_verl_is_one_warning_automatically_and_one_error_by_name(fake_verl, check, tmp_path, change, reason):
    fake_verl(*change)
    if change is MISSING_PART:
        (tmp_path / "verl" / "utils" / "torch_functional.py").unlink()
    refused, warned = check("""
        import pytest, rl_accel
        from rl_accel.errors import PatchRefused
        from verl.trainer.ppo import core_algos
        original = core_algos.compute_gae_advantage_return
        rl_accel.enable(auto=True, sampler=False, advantages=False)
        (patch,) = rl_accel.status()["gae"].switches
        assert patch.state == "refused" and not rl_accel.status()["gae"].applied
        reason = patch.reason
        rl_accel.disable()
        with pytest.raises(PatchRefused) as refused:
            rl_accel.enable(gae=True)
        print(refused.value)
        assert reason in str(refused.value)
        assert core_algos.compute_gae_advantage_return is original
        assert core_algos.ADV_ESTIMATOR_REGISTRY["gae"] is original
        assert rl_accel.status()["gae"].requested == "off", "a failed call must leave nothing behind"
    """)
    assert reason in refused
    assert len(refused.strip().splitlines()) == 1
    assert warned.count("verl.gae stays off") == 1


def test_by_name_a_changed_verl_fails_the_import_when_enabled_before(fake_verl, check):
    fake_verl(*CHANGED_SIGNATURE)
    script = "import rl_accel\nrl_accel.enable(gae=True)\nimport verl.trainer.ppo.core_algos\nprint('unreachable')"
    stdout, stderr = check(script, code=1)
    assert stdout == ""
    assert stderr.strip().splitlines()[-1].startswith("rl_accel.errors.PatchRefused: verl.gae")


def test_without_any_framework_a_name_is_refused_and_automatic_is_quiet(check):
    _, stderr = check("""
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("verl", "slime"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Block())
        import pytest, rl_accel
        rl_accel.enable()
        with pytest.raises(rl_accel.errors.PatchRefused, match="^gae was asked for, but none of verl, slime is installed here$"):
            rl_accel.enable(gae=True)
    """)
    assert stderr == ""


def test_a_patch_that_is_not_for_this_version_leaves_the_rest_of_its_feature_on(fake_verl, check):
    check("""
        import pytest, rl_accel
        from verl.trainer.ppo import core_algos
        from rl_accel.errors import PatchRefused
        status = rl_accel.enable(advantages=True)["advantages"]
        states = {p.name: p.state for p in status.switches}
        assert states.pop("verl.masked_whiten") == "applied", states
        assert set(states.values()) == {"unsupported"}, states
        assert status.applied
        rl_accel.disable()
        del core_algos.verl_F.masked_whiten
        with pytest.raises(PatchRefused, match="verl.masked_whiten: verl.utils.torch_functional:masked_whiten does not exist"):
            rl_accel.enable(advantages=True)
        assert rl_accel.status()["advantages"].switches == ()
    """)


def test_a_feature_whose_engine_is_absent_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("rl_accel.runtime.is_installed", lambda name: name == "verl")
    for named in ({"final_output": True}, {"drafts": {"max_tokens": 4}}):
        with pytest.raises(PatchRefused, match="was asked for, but vllm is not installed here"):
            enable(**named)


def test_doctor_shows_the_verl_that_is_imported(fake_verl, check, tmp_path):
    """And which of its features cannot work there, observers included. Its exit code says so, too."""
    (tmp_path / "verl" / "__init__.py").write_text('__version__ = "7.8.9"\n')
    log = "class Tracking:\n    def log(self, data, step, backend): pass\n"
    (tmp_path / "verl" / "utils" / "tracking.py").write_text(log)
    stdout, _ = check(
        """
        import sys
        from rl_accel.__main__ import main
        sys.argv = ["rl-accel", "doctor", "--json"]
        main()
        """,
        code=1,
    )
    document = json.loads(stdout)
    checks = {check["switch"]: check for check in document["checks"]}
    assert document["versions"]["verl"] == "7.8.9"
    assert checks["verl.gae"] == {**checks["verl.gae"], "verdict": "works", "upstream": "none"}
    for observer in ("telemetry.observer", "tp_replan.observer", "trainer_mode.tail_batching"):
        assert checks[f"verl.{observer}"]["verdict"] == "cannot", "this verl has no trainer"


@pytest.mark.parametrize(("named", "cannot"), [("auto", 0), ("mine, rl_accel", 0), ("mine", 1), ("none", 1)])
def test_doctor_says_that_verl_does_not_load_our_plug_in(monkeypatch, named, cannot):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", named)
    monkeypatch.setattr(doctor, "is_installed", lambda name: name == "verl")
    assert [check["verdict"] for check in doctor._check_plugin()] == ["cannot"] * cannot
    monkeypatch.setattr(doctor, "find_spec", lambda _: find_spec("yaml"))  # looks for no plug-ins, as verl before 0.9
    (check,) = doctor._check_plugin()
    assert "ignores every flag without VERL_USE_EXTERNAL_MODULES=rl_accel.integrations.verl.plugin" in check["reason"]
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", f"mine,{doctor.PLUGIN}")
    assert not list(doctor._check_plugin())


def test_doctor_says_on_which_versions_of_an_engine_nothing_was_run(monkeypatch, repo):
    def rows(**versions):
        monkeypatch.setattr(doctor, "version_of", versions.get)
        return {check["switch"]: (check["verdict"], check["reason"]) for check in doctor._check_engines()}

    for engine, tried in doctor.ENGINES.items():
        were = ", ".join(tried)
        assert rows(**{engine: "9.9+cu1"}) == {f"{engine} 9.9+cu1": ("works", f"not run here; {were} were")}
        assert rows(**{f"{engine}-cpu": tried[0]}) == {f"{engine} {tried[0]}": ("works", "")}
        assert all(version in (repo / "docs/versions.md").read_text() for version in tried)
    assert rows() == {}


@pytest.mark.parametrize("damaged", ['{"half', "[]", '"gae"', "7"])
def test_flags_of_a_driver_that_are_damaged_or_of_another_version_are_one_line(monkeypatch, invoke, damaged):
    monkeypatch.setenv("RL_ACCEL_SOURCES", damaged)
    assert f"RL_ACCEL_SOURCES wants what rl-accel writes there, found {damaged!r}: unset it" in invoke(
        cli, "status", code=None
    )
    with pytest.raises(
        ConfigError, match=r"driver of this job has rl-accel 0\.0\.7, this node .*: all nodes want one version"
    ):
        Runtime().adopt('{"environment RL_ACCEL": {"gae": true}, "version": "0.0.7"}')
    Runtime().adopt(f'{{"environment RL_ACCEL": {{}}, "version": "{__version__}"}}')


def test_off_stays_off_when_verl_and_its_plug_in_come_later(fake_verl, check):
    check("""
        import os, rl_accel
        os.environ["RL_ACCEL_CONFIG"] = "gae: true"
        rl_accel.disable()
        import rl_accel.integrations.verl.plugin
        from verl.trainer.ppo import core_algos
        assert not hasattr(core_algos.compute_gae_advantage_return, "__wrapped__")
        assert rl_accel.status().flag_readers == ()
        with rl_accel.enabled(gae=True):
            assert rl_accel.status()["gae"].applied
        assert not hasattr(core_algos.compute_gae_advantage_return, "__wrapped__")
        assert rl_accel.status().flag_readers == ()
    """)


@pytest.mark.slow
def test_after_any_sequence_of_calls_the_last_one_holds(fake_verl, check):
    """In this process, wherever in the sequence it imports verl, and in a Ray worker that starts then: a runtime that adopts what
    was published, and writes no patch."""
    check("""
        import contextlib, importlib, itertools, os, sys
        os.environ["RL_ACCEL_CONFIG"] = "advantages: true"
        import rl_accel
        from rl_accel.integrations.ray.propagate import received
        from rl_accel.runtime import RUNTIME, Runtime

        def functions():
            return core_algos.compute_gae_advantage_return, core_algos.verl_F.masked_whiten

        def drop():  # the modules of before are garbage, and so is what was written to them
            global core_algos
            core_algos = None
            for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
                del sys.modules[name]

        def load():  # as it is on disk: what is patched at import has its original in ``__wrapped__``
            global core_algos, originals
            if core_algos is None:
                core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
                originals = tuple(getattr(function, "__wrapped__", function) for function in functions())

        def plug_in():
            RUNTIME.adopt(received())

        def wrong_flag():
            with contextlib.suppress(rl_accel.errors.ConfigError):
                rl_accel.enable(gea=True)

        def changed_framework():
            load()
            registered = core_algos.ADV_ESTIMATOR_REGISTRY["gae"]
            if registered is originals[0]:  # else there is nothing to refuse
                core_algos.ADV_ESTIMATOR_REGISTRY["gae"] = print
                with contextlib.suppress(rl_accel.errors.PatchRefused):
                    rl_accel.enable(gae=True, advantages=False)
                core_algos.ADV_ESTIMATOR_REGISTRY["gae"] = registered

        def both():
            rl_accel.enable(gae=True)

        def one():
            rl_accel.enable(gae=dict(backend="chunk"), advantages=False)

        CALLS = (both, one, rl_accel.disable, plug_in, wrong_flag, changed_framework, load)
        for number, calls in enumerate(itertools.product(CALLS, repeat=3)):
            RUNTIME.restore({})
            RUNTIME._reads_flags = False
            if load in calls or not number:
                drop()
            wanted, published, reads = set(), {"advantages"}, True
            for call in calls:
                call()
                if call in (both, one, rl_accel.disable):
                    wanted = published = {both: {"gae", "advantages"}, one: {"gae"}}.get(call, set())
                    reads = call is not rl_accel.disable
                elif call is plug_in and reads:
                    wanted = published
            load()
            written = {name for name, new, old in zip(("gae", "advantages"), functions(), originals) if new is not old}
            assert core_algos.ADV_ESTIMATOR_REGISTRY["gae"] is functions()[0], calls
            assert written == wanted, (calls, written)
            worker = Runtime()
            worker._replace_switches = lambda: []  # writes no patch
            worker.adopt(received())
            assert {f.name for f in worker.status().features if f.requested != "off"} == published, calls
            assert bool(list(worker._wanted())) == reads, calls
    """)


def test_what_features_remember_ends_with_the_last_of_them(fake_verl, check):
    """And not before: the numbers of a step are of all features."""
    check("""
        import rl_accel
        from rl_accel import log
        from rl_accel.telemetry import metrics, server_counters
        for off in (rl_accel.disable, lambda: rl_accel.enable(gae=False)):
            rl_accel.enable(gae=True, advantages=True)
            metrics.put("example", 1.0)
            server_counters.ask_endpoints({"a": "ftp://a"}, ["count"])
            rl_accel.enable(gae=True)
            assert (metrics._values, len(log._warned)) == ({"example": 1.0}, 1)
            off()
            assert (metrics._values, log._warned) == ({}, set())
    """)


def test_another_thread_may_import_the_framework_meanwhile(fake_verl, check):
    fake_verl("ADV_ESTIMATOR_REGISTRY = {}", "import gate\nADV_ESTIMATOR_REGISTRY = {}")
    check("""
        import importlib, pathlib, sys, threading, time, traceback
        import rl_accel

        def is_importing(thread):
            frames = traceback.walk_stack(sys._current_frames()[thread.ident])
            return any(frame.f_code.co_filename.startswith("<frozen importlib") for frame, _ in frames)

        pathlib.Path("gate.py").write_text("import __main__ as main; main.began.set(); main.opened.wait(60)")
        sys.modules["__main__"].began, sys.modules["__main__"].opened = began, opened = threading.Event(), threading.Event()
        rl_accel.enable(gae=True)  # its hook waits for the module that is imported now
        imports = threading.Thread(target=importlib.import_module, args=("verl.trainer.ppo.core_algos",), daemon=True)
        imports.start()
        assert began.wait(60)
        enables = threading.Thread(target=rl_accel.enable, kwargs={"gae": {"backend": "chunk"}}, daemon=True)
        enables.start()
        deadline = time.monotonic() + 60
        while not is_importing(enables) and time.monotonic() < deadline:
            time.sleep(0.01)
        opened.set()
        for thread in (imports, enables):
            thread.join(30)
            assert not thread.is_alive(), "each waits for the other"
        assert rl_accel.status()["gae"].applied
    """)
