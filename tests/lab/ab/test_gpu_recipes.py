"""Tests GPU recipes without a GPU: verl composes and validates the configuration of each arm, or slime parses its arguments."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner

from rl_accel.integrations.slime.custom_config import check, make
from rl_accel.lab.ab import preflight
from rl_accel.lab.ab.recipe import load, plan_runs
from rl_accel.patches.verl.verl_run import VerlRun

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
VERL = ("verl_gsm8k", "verl_dapo_math", "verl_code", "verl_async")
SLIME_ROOT = os.environ.get("SLIME_ROOT", "")


def plans_of(name, platform=None, steps=None):
    """One run of each arm."""
    path = EXAMPLES / name / "recipe.yaml"
    recipe = load(path, platform)
    return plan_runs(recipe, path.parent, Path("/out"), seeds=[recipe.seeds[0]], steps=steps)


def arms_of(*names, platform=None):
    plans = [(name, plan) for name in names for plan in plans_of(name, platform)]
    return [pytest.param(plan, platform, id=f"{name}-{plan.arm}") for name, plan in plans]


@pytest.fixture
def verl(monkeypatch):
    """A vLLM that drafts were tried with, which they ask for."""
    from rl_accel.integrations.verl import drafts

    monkeypatch.setattr(drafts, "_vllm_version", lambda: drafts.TRIED[0])


ON_CPU = arms_of("verl_dapo_math", "verl_code", platform="cpu")


@pytest.mark.parametrize(("plan", "platform"), arms_of(*VERL) + ON_CPU[-4::3])
def test_verl_takes_every_key_and_value_of_an_arm(plan, platform, verl):
    config = preflight.compose_verl(plan)
    preflight.validate_verl(config)
    if platform == "cpu":
        assert (config.trainer.device, config.actor_rollout_ref.rollout.name) == ("cpu", "vllm")
        assert "Qwen/" not in str(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batchsize=8", "train_batchsize"),
        ("+actor_rollout_ref.rollout.gpu_memory=0.5", "gpu_memory"),
        ("+actor_rollout_ref.actor.clip=0.2", "clip"),
        ("+actor_rollout_ref.model.rope=1", "rope"),
        ("+algorithm.lambda=1", "lambda"),
        ("actor_rollout_ref.actor.loss_agg_mode=token", "loss_agg_mode"),
        ("+rl_accel.tail_baching.enable=True", r"did you mean rl_accel\.tail_batching"),
        ("+rl_accel.tail_batching.enable=True trainer.v1.trainer_mode=colocate_async", "trainer_mode"),
        ("+rl_accel.final_output.enable=True actor_rollout_ref.rollout.name=sglang", "name = vllm, found sglang"),
    ],
)
def test_a_key_or_value_that_does_not_fit_is_found(override, message, verl):
    plan = plans_of("verl_gsm8k")[0]
    wrong = replace(plan, command=(*plan.command, *override.split()))
    with pytest.raises(Exception, match=message):
        preflight.validate_verl(preflight.compose_verl(wrong))


@pytest.mark.parametrize(
    "flags",
    [
        "--config-path=config --config-name=ppo_megatron_trainer.yaml",
        "-cp config -cn ppo_megatron_trainer",
        "--config-path {config} --config-name ppo_megatron_trainer",
    ],
)
def test_hydra_s_flags_choose_the_configuration(flags):
    import verl

    config = Path(verl.__file__).parent / "trainer" / "config"
    words = ("python", "-m", "verl.trainer.main_ppo", *flags.format(config=config).split(), "~data.train_files")
    result = preflight.compose_verl(replace(plans_of("verl_gsm8k")[0], command=words))
    assert result.actor_rollout_ref.actor.strategy == "megatron"
    assert "train_files" not in result.data


@pytest.mark.parametrize("main", ["train.py", "train_async.py"])
def test_a_launch_line_of_slime_may_have_values_in_words_of_their_own(tmp_path, main):
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    (tmp_path / "slime" / "utils" / "arguments.py").touch()
    recipe = load(EXAMPLES / "slime_math" / "recipe.yaml")

    def rows(words):
        plan = replace(plans_of("verl_gsm8k")[0], command=("python", str(tmp_path / main), *words.split()))
        return {what: verdict for what, *verdict in preflight._rows(recipe, [plan], False)}

    result = rows("--hf-checkpoint /nowhere/m --prompt-data /nowhere/d")
    assert result["model /nowhere/m"][0] == result["file /nowhere/d"][0] == "missing"


def test_a_feature_that_has_nothing_to_do_in_a_run_is_idle(verl):
    plan = plans_of("verl_gsm8k")[0]
    with_gae = replace(plan, command=(*plan.command, "+rl_accel.gae.enable=True", "algorithm.adv_estimator=grpo"))
    rows = [row for row in preflight._verl(with_gae, cpu=False, prepared=True) if row[1] == "idle"]
    assert rows == [(f"gae in {plan.arm}", "idle", "algorithm.adv_estimator = grpo")]


@pytest.fixture
def slime_places(monkeypatch, tmp_path):
    for name in ("SLIME_ROOT", "MODEL_DIR", "DATA", "PYTHONPATH"):
        monkeypatch.setenv(name, str(tmp_path / name))
    if SLIME_ROOT:
        monkeypatch.setenv("SLIME_ROOT", SLIME_ROOT)


def flags_in(words):
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_the_file_of_slimes_arm_is_what_slime_config_writes():
    file = EXAMPLES / "slime_math" / "tail.yaml"
    assert yaml.safe_load(file.read_text()) == make(["tail_batching"], {})
    assert check(file, Path(SLIME_ROOT) if SLIME_ROOT else None) == []


PARSE = """
import argparse, json, sys
sys.argv = ["train.py", *json.loads(sys.argv[1])]
from slime.backends.sglang_utils.arguments import sglang_parse_args
from slime.utils.arguments import get_slime_extra_args_provider
servers = sglang_parse_args()
parser = get_slime_extra_args_provider()(argparse.ArgumentParser(conflict_handler="resolve", allow_abbrev=False))
ours, others = parser.parse_known_args()
print(json.dumps({"others": others, "tp": ours.rollout_num_gpus_per_engine, "share": servers.sglang_mem_fraction_static}))
"""


needs_slime = pytest.mark.skipif(not SLIME_ROOT, reason="SLIME_ROOT names no checkout of slime")


@needs_slime
@pytest.mark.parametrize("arm", [0, 1], ids=["plain", "tail"])
def test_slimes_own_parser_takes_every_argument(arm, slime_places):
    """Its parsers of slime's and SGLang's arguments; what they leave is Megatron's, which slime's script for the model has too."""
    words = json.dumps(plans_of("slime_math")[arm].command[2:])
    env = {**os.environ, "PYTHONPATH": SLIME_ROOT}
    done = subprocess.run([sys.executable, "-c", PARSE, words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert (document["tp"], document["share"]) == (2, 0.7)
    scripts = [Path(SLIME_ROOT, "scripts", name).read_text() for name in ("run-qwen3-4B.sh", "models/qwen3-4B.sh")]
    known = set("\n".join(scripts).replace("=", " ").split())
    left = {flag for flag in flags_in(document["others"]) if not flag.startswith("--sglang-")}
    assert left <= known | {"--seed", "--no-save-optim"}  # Megatron's own
    assert len(left) > 20


@needs_slime
def test_what_slimes_script_sets_and_the_recipe_does_not_is_known(slime_places):
    """Places, checkpoints and evaluation; all else is as in slime's own script for the model."""
    lines = Path(SLIME_ROOT, "scripts", "run-qwen3-4B.sh").read_text().splitlines()
    theirs = flags_in(word for line in lines if not line.strip().startswith("#") for word in line.split())
    ray = "--head --node-ip-address --num-gpus --disable-usage-stats --address --runtime-env-json --format --force --"
    of_one = {f"--{name}-parallel-size" for name in ("pipeline-model", "context", "expert-model", "expert-tensor")}
    left_out = theirs - flags_in(plans_of("slime_math")[0].command) - of_one - {*ray.split(), "--load"}
    assert [flag for flag in left_out if not flag.startswith(("--eval", "--n-samples-per-eval", "--dashboard"))] == []


def test_slime_writes_what_the_report_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    log = runpy.run_path(str(EXAMPLES / "slime_math" / "slime_metrics.py"))["log_rollout"]

    sample = SimpleNamespace(response_length=4, get_reward_value=lambda args: 0.5)
    for number in range(2):
        assert log(number, None, [sample, sample], {"a/b": 1}, 2.5) is False
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (rows[0]["data"]["critic/score/mean"], rows[0]["data"]["timing_s/step"]) == (0.5, 2.5)
    assert rows[1]["data"]["response_length/max"] == 4


@pytest.fixture
def prepare(monkeypatch):
    """The script that fetches, with a hub that has a few rows."""
    datasets = pytest.importorskip("datasets")
    row = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
    solved = [{"question": "How many?", "answer": "many\n#### 1,234"}, {"question": "Less?", "answer": "#### -5"}]
    dapo, aime = ([{**row, "data_source": "math_dapo", "extra_info": {"index": i}} for i in s] for s in ("abab", "c"))
    eurus = [{**row, "data_source": "taco", "ability": ability} for ability in ("math", "code")]
    hub = {
        "openai/gsm8k": ("train test", solved),
        "BytedTsinghua-SIA/DAPO-Math-17k": ("train", dapo),
        "BytedTsinghua-SIA/AIME-2024": ("train", aime),
        "PRIME-RL/Eurus-2-RL-Data": ("train validation", eurus),
    }

    def load_dataset(name, configuration=None, split=None):
        splits, rows = hub[name]
        parts = dict.fromkeys(splits.split(), datasets.Dataset.from_list(rows))
        return parts if split is None else parts[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return runpy.run_path(str(EXAMPLES / "verl_gsm8k" / "from_hub.py"))["prepare"]


@pytest.mark.parametrize("name", ["gsm8k", "dapo_math", "code"])
def test_data_from_the_hub_get_the_columns_that_verl_reads(name, prepare, tmp_path):
    import pandas as pd

    (tmp_path / "model").mkdir()
    prepare(name, tmp_path / "data", str(tmp_path / "model"))
    train = pd.read_parquet(tmp_path / "data" / "train.parquet")
    assert {"data_source", "prompt", "reward_model"} <= set(train.columns)
    assert (tmp_path / "data" / "val.parquet").exists()
    if name == "gsm8k":
        from verl.utils.reward_score import default_compute_score

        truths = [row["ground_truth"] for row in train["reward_model"]]
        assert truths == ["1234", "-5"]
        assert default_compute_score(train["data_source"][0], "so it is\n#### 1234", truths[0]) == 1.0
    else:
        assert len(train) == {"dapo_math": 2, "code": 1}[name]


@pytest.fixture
def doctor():
    """``doctor(*words)``: the exit code, and by what is asked for the verdict and why; the environment is as before after it."""
    from rl_accel.__main__ import cli

    def run(*words):
        with mock.patch.dict(os.environ):
            result = CliRunner().invoke(cli, ["doctor", "--json", *map(str, words)])
        assert result.output.startswith("["), (result.output, result.exception)
        return result.exit_code, {what: (verdict, why) for what, verdict, why in json.loads(result.output)}

    return run


def test_doctor_says_what_a_recipe_lacks_here(doctor, tmp_path, verl):
    shutil.copytree(EXAMPLES / "verl_gsm8k", tmp_path / "verl_gsm8k")
    file = tmp_path / "verl_gsm8k" / "recipe.yaml"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    file.write_text(file.read_text().replace("model.path=Qwen/Qwen2.5-0.5B-Instruct", f"model.path={model}"))
    code, rows = doctor("--recipe", file.parent)
    assert code == 1
    assert {rows[f"configuration of {arm}"][0] for arm in ("stock", "lossless", "tail")} == {"works"}
    assert (rows["package flash_attn"][0], rows[f"model {model}"][0]) == ("missing", "works")
    (data,) = [row for what, row in rows.items() if what.startswith("data ") and what.endswith("train.parquet")]
    assert data == ("unknown", "the recipe's prepare command makes it")


def test_doctor_asks_for_no_gpu_on_a_cpu_nor_a_model_to_check_a_critic_and_names_what_is_wrong(doctor, tmp_path, verl):
    _, rows = doctor("--recipe", EXAMPLES / "verl_gsm8k", "--platform", "cpu")
    assert rows["configuration of tail"][0] == "works"
    assert not any("GPU" in what for what in rows)
    _, rows = doctor("--recipe", EXAMPLES / "verl_ppo_cpu")
    assert rows["configuration of stock"] == ("works", "composed and validated by verl")
    wrong = tmp_path / "recipe.yaml"
    for recipe, changes, key in (
        ("verl_gsm8k", "platforms: {gpu: {overrides: [data.wrong=1]}}", "data.wrong"),
        ("verl_ppo_cpu", "overrides: [+critic.model.rope=1]", "rope"),
    ):
        wrong.write_text(f"extends: {EXAMPLES}/{recipe}/recipe.yaml\n{changes}\n")
        code, rows = doctor("--recipe", wrong)
        verdict, why = rows["configuration of stock"]
        assert (code, verdict, key in why) == (1, "wrong", True)


SAVES = ["trainer.save_freq=10", "actor_rollout_ref.actor.checkpoint.async_save=True"]
GROUPER = ["actor_rollout_ref.actor.use_prefix_grouper=True"]
FILTER = "algorithm.filter_groups.enable=True"
SHORT = ["ray_kwargs.ray_init.num_cpus=8"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["ray_kwargs.ray_init.num_cpus=9"], []),
        (SHORT, [("num_data_storage_units", "wrong")]),
        ([*SHORT, "trainer.nnodes=2"], []),
        ([*SAVES, "ray_kwargs.ray_init.num_cpus=9"], [("async_save", "wrong")]),
        ([*SAVES, "trainer.use_v1=False"], [("async_save", "wrong")]),
        ([*SAVES, "actor_rollout_ref.actor.strategy=megatron", "trainer.nnodes=2"], []),
        ([*GROUPER, "trainer.nnodes=2"], [("use_prefix_grouper", "idle")]),
        ([*GROUPER, "trainer.use_v1=False"], []),
        (["trainer.use_v1=False", FILTER], [("enable", "idle")]),
        ([FILTER, "trainer.nnodes=2"], []),
    ],
)
def test_doctor_names_settings_that_do_not_do_what_they_say(given, wanted, verl, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = VerlRun.compose("verl.trainer.main_ppo", given)
    rows = preflight.misleading_settings(run)
    assert [(what.split(" ")[0].rpartition(".")[2], verdict) for what, verdict, _ in rows] == wanted


def test_doctor_finds_a_model_in_the_cache_and_asks_no_hub_for_another(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: calls.append(address))
    here = tmp_path / "models--made--here"
    (here / "snapshots/1").mkdir(parents=True)
    (here / "refs").mkdir()
    (here / "refs/main").write_text("1")
    (here / "snapshots/1/config.json").write_text('{"model_type": "qwen2"}')
    verdicts = [verdict for name in ("made/here", "not/here") for _, verdict, _ in preflight._model(name)]
    assert (verdicts, calls) == (["works", "unknown"], [])


def test_doctor_of_slime(doctor, slime_places):
    code, rows = doctor("--recipe", EXAMPLES / "slime_math")
    assert code == 1
    if SLIME_ROOT:
        assert rows["arguments of tail"] == ("unknown", "slime's parser needs Megatron-LM on PYTHONPATH")
        assert rows[f"file {EXAMPLES}/slime_math/tail.yaml"][0] == "works"
    else:
        assert rows["slime"][0] == "missing"
