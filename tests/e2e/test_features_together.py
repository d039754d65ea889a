"""Tests one run of the tail batching recipe with graders of the code recipe, reward limits, telemetry and validations.

Its model has the long tail that the recipe promises, each trained prompt is in the ledger once, each trained response has the
score of the grader itself, and the stage clock accounts for every response and second. In make test,
test_tail_batching.py and test_reward_timeout.py cover the features separately.
"""

import json
import string
import zlib

import pytest
import yaml

from rl_accel.lab.ab.stats import kind_of
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.logs import read_log
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.stage_clock import read_kept

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

STEPS, P0, R0, VALIDATED = 5, 16, 4, 4
LAUNCHED = {"short": 20 * 5, "long": P0 * R0, "final": P0 * R0}
"""Responses begun in a round, by its kind."""
ONE_IN = 12
"""One answer in so many never ends."""
SLOWER_MACHINE = (
    # A limit is known once other answers of the prompt have run; on a busy machine that is long after a hanging one began.
    ("reward_kwargs.seconds=12", "reward_kwargs.seconds=40"),
    ("reward.timeout=15", "reward.timeout=50"),
    ("maximum=12", "maximum=40"),
    ("minimum=0.8", "minimum=3"),  # longer than a right answer takes
)


def recipe(repo):
    """The recipe of tail batching with one arm, graders that may hang, and their limits as in the recipe of code rewards."""
    examples = repo / "examples"
    code = yaml.safe_load((examples / "verl_code_reward" / "recipe.yaml").read_text())
    rewards = [override for override in code["overrides"] if override.startswith(("reward.", "+reward."))]
    rewards += code["arms"]["adaptive"]["overrides"]
    for recipes, ours in (("${recipe_dir}", str(examples / "verl_code_reward")), *SLOWER_MACHINE):
        assert any(recipes in override for override in rewards), recipes
        rewards = [override.replace(recipes, ours) for override in rewards]
    prepare = f"python {examples}/verl_ppo_cpu/prepare.py ${{out}}/task --lengths published --prompts 200"
    return {
        "extends": str(examples / "verl_tail_batching" / "recipe.yaml"),
        "prepare": prepare.split(),
        "overrides": [
            *rewards,
            f"+reward.custom_reward_function.reward_kwargs.one_in={ONE_IN}",
            "trainer.test_freq=2",
            f"data.val_max_samples={VALIDATED}",
        ],
        "arms": {"tail": {"overrides": ["+rl_accel.tail_batching.enable=True"]}},
        "baseline": "tail",
        "seeds": [0],
        "rollout": {"faster": {}, "wasted_tokens": {}, "same_reward": None},
    }


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("together") / "ab"


@pytest.fixture(scope="module", autouse=True)
def summary(ab, repo, out):
    file = out.with_name("recipe.yaml")
    file.write_text(yaml.safe_dump(recipe(repo)))
    return ab(file, out, f"--steps={STEPS}")


@pytest.fixture(scope="module")
def run(out):
    return out / "tail-seed0"


@pytest.fixture(scope="module")
def steps(run):
    """Metrics by step."""
    return read_log(run / "metrics.jsonl")


def total(steps, name):
    return sum(metrics.get(f"rl_accel/reward_timeout/{name}", 0.0) for metrics in steps.values())


# -- tail batching ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kinds(steps):
    return [kind_of(metrics) for metrics in steps.values()]


@pytest.fixture(scope="module")
def trained(run):
    """Rows of the trained responses, by step."""
    files = [run / "rollouts" / f"{step}.jsonl" for step in range(1, STEPS + 1)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_short_and_long_rounds_train_every_prompt_once(summary, kinds):
    checks = {check["name"]: check for check in summary["checks"]}
    assert checks["completed"]["status"] == checks["ledger"]["status"] == "green", checks
    (ledger,) = summary["rollout"]["ledgers"]
    assert sum(epoch["once"] for epoch in ledger["epochs"]) == P0 * STEPS
    assert kinds.count("short") >= 3
    assert set(kinds) - {"short"} <= {"long", "final"}
    assert kinds[-1] != "short", "what was deferred is trained before the run ends"


def test_lengths_have_the_published_tail(trained):
    lengths = sorted(len(row["output"]) for rows in trained for row in rows)
    assert len(lengths) == P0 * R0 * STEPS
    assert 25 <= lengths[len(lengths) // 2] <= 65  # published: 0.04 of the limit of 1,024
    assert lengths[-1] > 200, "several times the median"
    assert lengths[0] < 20, "and far below it"


# -- rewards ------------------------------------------------------------------------------------------------------------


def test_every_trained_response_has_the_score_of_the_grader_itself(trained):
    """The grader's program is evaluated here, without its process; one that never ends scores 0 in stock as well."""
    hung = []
    for rows in trained:
        assert len(rows) == P0 * R0
        for row in rows:
            answer = row["output"].strip()
            wanted = string.digits if row["gts"] == "digits" else string.ascii_lowercase
            share = sum(character in wanted for character in answer) / max(len(answer), 1)
            hangs = answer and zlib.crc32(answer.encode()) % ONE_IN == 0
            hung.append(hangs)
            assert row["score"] == pytest.approx(0.0 if hangs else share), row
    assert sum(map(bool, hung)) >= 3


def test_a_step_counts_all_rewards_of_its_validation(steps):
    counted = {step: metrics["rl_accel/reward_timeout/eval_executions"] for step, metrics in steps.items()}
    assert counted == {1: 0, 2: VALIDATED, 3: 0, 4: VALIDATED, STEPS: VALIDATED}


def test_answers_that_hang_are_stopped_long_before_the_full_budget(steps):
    timeouts, full = total(steps, "timeouts"), total(steps, "timeouts_full")
    assert total(steps, "executions") >= P0 * R0 * STEPS
    assert timeouts >= 3
    assert full < timeouts
    assert total(steps, "saved_seconds") > 0
    assert total(steps, "errors") == 0


# -- telemetry ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(run):
    """Records of responses by step."""
    return read_kept(run / "checkpoints" / "rl_accel_telemetry.jsonl")


def test_stages_and_shares_add_up_to_the_step(steps):
    for metrics in steps.values():
        timed = [metrics[f"timing_s/{stage}"] for stage in stage_clock.STAGES if f"timing_s/{stage}" in metrics]
        assert sum(timed) >= 0.9 * metrics["timing_s/step"], "timers overlap with nothing and leave little out"
        ours = {name.rpartition("telemetry/")[2]: value for name, value in metrics.items() if "telemetry/" in name}
        assert sum(value for name, value in ours.items() if name.startswith("share/")) == pytest.approx(1.0, abs=0.02)
        assert 0 < ours["idle_share"] < 1
        parts = ("most", "waiting", "reward", "rest")
        assert sum(ours[f"{part}_seconds"] for part in parts) == pytest.approx(metrics["timing_s/gen"], rel=1e-6)


def test_every_response_is_recorded(steps, kept, kinds):
    assert list(kept) == list(steps) == list(range(1, STEPS + 1))
    for kind, (step, responses) in zip(kinds, kept.items(), strict=True):
        telemetry = {name: steps[step][f"rl_accel/telemetry/{name}"] for name in ("responses", "cancelled", "tokens")}
        assert len(responses) == telemetry["responses"] == LAUNCHED[kind]
        # Some surplus responses end by themselves before they are stopped.
        assert telemetry["cancelled"] <= steps[step]["rl_accel/tail_batching/responses_cancelled"]
        assert telemetry["responses"] - telemetry["cancelled"] >= P0 * R0
        assert telemetry["tokens"] == steps[step]["rl_accel/tail_batching/tokens_generated"]
        assert {response.server for response in responses if response.tokens} == {"hf_cpu_server_0"}
        assert all(r.began <= r.generated <= r.rewarded <= r.ended for r in responses if r.outcome == "completed")


def test_profile_reads_the_run(run, kept):
    profile = read_run(run)
    assert list(profile.steps) == list(range(3, STEPS + 1))
    assert len(profile.last) == len(kept[STEPS])
    (missing,) = profile.missing
    assert missing.startswith("preemptions of"), "the CPU engine has no counter of them"
