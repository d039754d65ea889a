"""Tests that interfaces of verl declare all that we override, and that a changed copy of verl is refused with the member's name."""

import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl_accel.integrations import verl as adapters
from rl_accel.integrations.verl import agent_loop
from rl_accel.patches import seams
from rl_accel.patches.verl.interfaces import NEEDS

VERL = Path(importlib.util.find_spec("verl").origin).parent
AGENT_LOOP, SERVERS = "experimental/agent_loop/agent_loop.py", "workers/rollout/llm_server.py"
TQ, SYNC, TRAINER = (f"trainer/ppo/v1/{name}.py" for name in ("agent_loop_tq", "trainer_sync", "trainer_base"))
RELEASE = "_release_server(self, server_id: str, request_id: str | None = None)"


def test_each_method_of_verl_that_our_classes_override_is_in_an_interface_that_a_feature_needs():
    names = [name for _, name, _ in pkgutil.walk_packages(adapters.__path__, f"{adapters.__name__}.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("drafts.worker")]  # needs vLLM
    classes = {seams._without_ray(value) for module in modules for value in vars(module).values() if callable(value)}
    declared = {
        (seams._targets[interface].rpartition(":")[2], name)
        for needed in NEEDS.values()
        for interface in needed
        for name in seams._methods(interface)
    }
    worker, checked = agent_loop.worker_class(OmegaConf.create()), set()
    for cls in (cls for cls in classes if isinstance(cls, type) and cls.__module__ in names):
        bases = worker.__mro__ if issubclass(cls, agent_loop.WorkerPart) else cls.__mro__
        own = {name for name, value in vars(cls).items() if callable(value)} - {"__init__"}
        theirs = [base for base in bases if base.__module__.startswith("verl.")]
        for name in own:
            holders = {base.__name__ for base in theirs if name in vars(base)}
            if holders:
                assert any((base.__name__, name) in declared for base in theirs), (cls, name)
                checked.add(cls.__name__)
    assert checked >= {"TailBatchingTrainer", "ValidationTag", "SiblingRouter", "RewardTimeoutManager"}
    assert "TailLLMServerClient" in checked


def test_the_page_lists_all_files_that_name_verls_v1_trainer_or_transfer_queue(repo):
    page = (repo / "docs/architecture.md").read_text()
    section = page.partition("V1 trainer and TransferQueue?")[2].partition("\n## ")[0]
    listed = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", section)}
    files = [*repo.glob("patches/**/*.py"), *repo.glob("integrations/**/*.py")]
    named = {file.name for file in files if re.search(r"verl\.trainer\.ppo\.v1|transfer_queue", file.read_text())}
    assert named == listed


TEACHER = ("_compute_teacher_logprobs", "_score_by_teacher")
ASYNC, PLAIN = {SYNC: "on_sample_end", TRAINER: "_save_checkpoint"}, "to be a plain function"
CHANGES = {
    "renamed": (
        {AGENT_LOOP: TEACHER, TQ: TEACHER},
        {"tail_batching": "AgentLoopWorkerTQ._compute_teacher_logprobs, which is not there"},
    ),
    "signature": (
        {SERVERS: (RELEASE, "_release_server(self, lease, request_id=None)")},
        {"tail_batching": "Client._release_server(server_id, request_id=None), found (lease, request_id=None)"},
    ),
    "async": (
        {file: (f"def {name}", f"async def {name}") for file, name in ASYNC.items()},
        {"tail_batching": f"PPOTrainerSync.on_sample_end {PLAIN}", "tp_replan": f"PPOTrainer._save_checkpoint {PLAIN}"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "named"), CHANGES.values(), ids=CHANGES)
def test_a_changed_verl_is_named_by_doctor_and_no_feature_starts(python, tmp_path, monkeypatch, edits, named):
    shutil.copytree(VERL, tmp_path / "verl", copy_function=os.symlink)
    for file, (old, new) in edits.items():
        source, changed = VERL.joinpath(file).read_text(), tmp_path / "verl" / file
        assert old in source
        changed.unlink()
        changed.write_text(source.replace(old, new))
    done = python(
        """
        import json, sys
        from omegaconf import OmegaConf
        from rl_accel.doctor import diagnose
        from rl_accel.errors import PatchRefused
        checks = {check["switch"]: (check["verdict"], check["reason"]) for check in diagnose()["checks"]}
        from rl_accel.patches.verl import config_intake
        refused = {}
        for feature in sys.argv[1:]:
            trainer = {"use_v1": True, "v1": {"trainer_mode": "sync"}}
            try:
                config_intake.in_trainer(OmegaConf.create({"trainer": trainer, "rl_accel": {feature: True}}))
            except PatchRefused as error:
                refused[feature] = str(error)
        print(json.dumps([checks, refused]))
        """,
        *named,
        fork=True,  # finds verl beside its script
    )
    checks, refused = json.loads(done.stdout.splitlines()[-1])
    assert checks["verl.gae"] == ["works", ""]
    for feature, problem in named.items():
        verdict, reason = checks[f"verl.{feature}"]
        assert verdict == "cannot"
        assert problem in reason
        assert problem in refused[feature]
    unharmed = {"tp_replan"} - named.keys()
    assert {checks[f"verl.{feature}"][0] for feature in unharmed} <= {"works"}
