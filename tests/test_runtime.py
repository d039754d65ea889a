"""enable, disable, status and enabled, on a made-up ``verl`` package whose every detail the test controls."""

import json

import pytest

FAKE_TORCH_FUNCTIONAL = """
import torch
def masked_mean(values, mask):
    return values.masked_fill(mask == 0, 0).sum() / (mask.sum() + 1e-8)
def masked_whiten(values, mask, shift_mean=True):
    mean, count = masked_mean(values, mask), mask.sum()
    var = masked_mean((values - mean) ** 2, mask) * (count / (count - 1))
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    return whitened if shift_mean else whitened + mean
"""

FAKE_CORE_ALGOS = """
import torch
import verl.utils.torch_functional as verl_F
ADV_ESTIMATOR_REGISTRY = {}
def compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam):
    with torch.no_grad():
        nextvalues = 0
        lastgaelam = 0
        advantages_reversed = []
        for t in reversed(range(token_level_rewards.shape[-1])):
            delta = token_level_rewards[:, t] + gamma * nextvalues - values[:, t]
            lastgaelam_ = delta + gamma * lam * lastgaelam
            nextvalues = values[:, t] * response_mask[:, t] + (1 - response_mask[:, t]) * nextvalues
            lastgaelam = lastgaelam_ * response_mask[:, t] + (1 - response_mask[:, t]) * lastgaelam
            advantages_reversed.append(lastgaelam)
        advantages = torch.stack(advantages_reversed[::-1], dim=1)
        returns = advantages + values
        advantages = verl_F.masked_whiten(advantages, response_mask)
    return advantages, returns
ADV_ESTIMATOR_REGISTRY["gae"] = compute_gae_advantage_return
"""


@pytest.fixture
def fake_verl(tmp_path):
    """A package ``verl`` 0.9.1 that holds only the advantage module; ``edit(old, new)`` changes its source."""
    package = tmp_path / "verl" / "trainer" / "ppo"
    package.mkdir(parents=True)
    utils = tmp_path / "verl" / "utils"
    utils.mkdir()
    (utils / "torch_functional.py").write_text(FAKE_TORCH_FUNCTIONAL)
    for folder in (package, package.parent, package.parent.parent, utils):
        (folder / "__init__.py").write_text('__version__ = "0.9.1"\n')
    (package / "core_algos.py").write_text(FAKE_CORE_ALGOS)

    def edit(old: str, new: str) -> None:
        path = package / "core_algos.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return edit


def test_nothing_is_imported_and_patches_wait_for_the_framework(fake_verl, python):
    done = python("""
        import sys, rl_accel
        assert rl_accel.status()["gae"].requested == "off"
        status = rl_accel.enable(gae=True)
        assert "verl" not in sys.modules, "enable() must not import the framework"
        assert {p.state for p in status["gae"].patches} == {"waiting"}, status
        from verl.trainer.ppo import core_algos
        assert rl_accel.status()["gae"].applied, str(rl_accel.status())
        assert core_algos.ADV_ESTIMATOR_REGISTRY["gae"] is core_algos.compute_gae_advantage_return
        original = core_algos.compute_gae_advantage_return.__wrapped__
        rl_accel.disable()
        assert core_algos.compute_gae_advantage_return is original
        assert core_algos.ADV_ESTIMATOR_REGISTRY["gae"] is original
        assert rl_accel.status()["gae"].patches == ()
    """)
    assert done.returncode == 0, done.stderr


def test_a_bare_enable_is_automatic_and_explicit_names_are_exact(fake_verl, python):
    done = python("""
        import rl_accel
        requested = lambda: {f.name: f.requested for f in rl_accel.status().features}
        rl_accel.enable()
        found = requested()
        never = ("tail_batching", "reward_timeout", "telemetry", "tp_replan", "balance", "drafts")
        semantic = {name: found.pop(name) for name in never}
        assert set(semantic.values()) == {"off"}, "neither what changes training nor what only observes is automatic"
        assert set(found.values()) == {"automatically"}, found
        others = {**semantic, "final_output": "off"}
        rl_accel.enable(sampler=False)
        assert requested()["sampler"] == "off" and requested()["gae"] == "automatically"
        rl_accel.enable(gae=dict(backend="numba"))
        assert requested() == {"gae": "by name", "advantages": "off", "sampler": "off", **others}
        with rl_accel.enabled(sampler=True):
            assert requested() == {"gae": "off", "advantages": "off", "sampler": "by name", **others}
        assert requested() == {"gae": "by name", "advantages": "off", "sampler": "off", **others}
    """)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_new_settings_reach_an_applied_patch(fake_verl, python):
    done = python("""
        import rl_accel
        from verl.trainer.ppo import core_algos
        original = core_algos.compute_gae_advantage_return
        rl_accel.enable(gae=True)
        first = core_algos.compute_gae_advantage_return
        rl_accel.enable(gae=dict(backend="chunk"))
        second = core_algos.compute_gae_advantage_return
        assert len({id(original), id(first), id(second)}) == 3
        assert second.__wrapped__ is original, "a second enable() must not stack"
        rl_accel.enable(gae=dict(backend="chunk"))
        assert core_algos.compute_gae_advantage_return is second
    """)
    assert done.returncode == 0, done.stderr


CHANGED_SIGNATURE = ("response_mask, gamma, lam):", "response_mask, gamma, lam, new_argument=None):")
CHANGED_RESULT = ("returns = advantages + values", "returns = advantages - values")


@pytest.mark.parametrize(("change", "reason"), [(CHANGED_SIGNATURE, "new_argument"), (CHANGED_RESULT, "differs")])
def test_by_name_a_changed_verl_stops_with_one_clear_error(fake_verl, python, change, reason):
    fake_verl(*change)
    done = python("""
        import rl_accel
        from rl_accel.errors import PatchRefused
        from verl.trainer.ppo import core_algos
        original = core_algos.compute_gae_advantage_return
        try:
            rl_accel.enable(gae=True)
        except PatchRefused as error:
            print(error)
        assert core_algos.compute_gae_advantage_return is original
        assert core_algos.ADV_ESTIMATOR_REGISTRY["gae"] is original
        assert rl_accel.status()["gae"].requested == "off", "a failed call must leave nothing behind"
    """)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout
    assert len(done.stdout.strip().splitlines()) == 1


@pytest.mark.slow
def test_by_name_a_changed_verl_fails_the_import_when_enabled_before(fake_verl, python):
    fake_verl(*CHANGED_SIGNATURE)
    done = python(
        "import rl_accel\nrl_accel.enable(gae=True)\nimport verl.trainer.ppo.core_algos\nprint('unreachable')"
    )
    assert done.returncode == 1
    assert "unreachable" not in done.stdout
    assert done.stderr.strip().splitlines()[-1].startswith("rl_accel.errors.PatchRefused: verl.gae")


def test_automatically_a_changed_verl_is_one_warning(fake_verl, python):
    fake_verl(*CHANGED_SIGNATURE)
    done = python("""
        import rl_accel
        rl_accel.enable(sampler=False, advantages=False)
        from verl.trainer.ppo import core_algos
        (patch,) = rl_accel.status()["gae"].patches
        assert patch.state == "refused" and "new_argument" in patch.reason
        assert not rl_accel.status()["gae"].applied
        assert not hasattr(core_algos.compute_gae_advantage_return, "__wrapped__")
    """)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("verl.gae stays off") == 1


def test_without_any_framework_a_name_is_refused_and_automatic_is_quiet(python):
    block = """
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("verl", "slime"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Block())
    """
    done = python(
        block
        + """
        import rl_accel
        rl_accel.enable()
        try:
            rl_accel.enable(gae=True)
        except rl_accel.errors.PatchRefused as error:
            print(error)
    """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "gae was asked for, but none of verl, slime is installed here"


def test_wrong_arguments_change_nothing(fake_verl, python):
    done = python("""
        import rl_accel
        from rl_accel.errors import ConfigError
        rl_accel.enable(gae=True)
        for wrong in (dict(gea=True), dict(gae=dict(backend="nunba")), dict(gae=dict(threads=-1)), dict(gae=3)):
            try:
                rl_accel.enable(**wrong)
            except ConfigError as error:
                assert str(error).startswith("rl_accel.enable(): "), error
            else:
                raise SystemExit(f"{wrong} was accepted")
        assert rl_accel.status()["gae"].requested == "by name"
    """)
    assert done.returncode == 0, done.stderr


def test_status_is_plain_data_and_readable(fake_verl, python):
    done = python("""
        import json, rl_accel
        rl_accel.enable(gae=True)
        print(json.dumps(rl_accel.status().to_dict()))
        print(rl_accel.status())
    """)
    assert done.returncode == 0, done.stderr
    first, *text = done.stdout.splitlines()
    assert json.loads(first)["features"][0]["patches"][0]["state"] == "waiting"
    assert any("waiting" in line and "verl.gae" in line for line in text)


@pytest.mark.slow
def test_an_upstream_that_lacks_a_part_is_one_warning_or_one_error(fake_verl, python, tmp_path):
    (tmp_path / "verl" / "utils" / "torch_functional.py").unlink()
    fake_verl("import verl.utils.torch_functional as verl_F", "verl_F = None")
    done = python("""
        import rl_accel
        from rl_accel.errors import PatchRefused
        from verl.trainer.ppo import core_algos
        rl_accel.enable(sampler=False, advantages=False)
        (patch,) = rl_accel.status()["gae"].patches
        assert patch.state == "refused", patch
        try:
            rl_accel.enable(gae=True)
        except PatchRefused as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verl.gae: cannot be made for this version")
    assert done.stderr.count("verl.gae stays off") == 1


def test_a_patch_that_is_not_for_this_version_leaves_the_rest_of_its_feature_on(fake_verl, python):
    done = python("""
        import rl_accel
        from verl.trainer.ppo import core_algos
        from rl_accel.errors import PatchRefused
        status = rl_accel.enable(advantages=True)["advantages"]
        states = {p.name: p.state for p in status.patches}
        assert states.pop("verl.masked_whiten") == "applied", states
        assert set(states.values()) == {"unsupported"}, states
        assert status.applied
        rl_accel.disable()
        del core_algos.verl_F.masked_whiten
        try:
            rl_accel.enable(advantages=True)
        except PatchRefused as error:
            print(error)
        print(rl_accel.status()["advantages"].patches)
    """)
    assert done.returncode == 0, done.stderr
    assert "verl.masked_whiten: verl.utils.torch_functional:masked_whiten does not exist" in done.stdout
    assert done.stdout.endswith("()\n")


@pytest.mark.slow
def test_doctor_shows_the_verl_that_is_imported(fake_verl, python, tmp_path):
    (tmp_path / "verl" / "__init__.py").write_text('__version__ = "7.8.9"\n')
    done = python("""
        from rl_accel.doctor import diagnose
        diagnosis = diagnose()
        print(diagnosis["versions"]["verl"])
        print({check["verdict"] for check in diagnosis["checks"] if check["patch"].startswith("verl.tail_batching")})
    """)
    assert done.returncode == 0, done.stderr
    version, verdicts = done.stdout.splitlines()
    assert version == "7.8.9"
    assert "works" not in verdicts, "this verl has no trainer"
