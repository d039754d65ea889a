"""Tests ``rl-accel profile`` on runs with hand-made seconds."""

import errno
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rl_accel.__main__ import main
from rl_accel.config import describe_flags
from rl_accel.errors import RlAccelError
from rl_accel.features import FEATURES
from rl_accel.plan.answers import Range
from rl_accel.plan.profile_report import _table_of_savings, profile
from rl_accel.plan.savings import EQUAL, NOTICING, REUSE, REWARDS, VALIDATING, WAITING, Saving, find_savings, levers
from rl_accel.plan.setup import setup_of
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.stage_clock import CANCELLED, FILE_NAME, ResponseTimes

TIMEOUT = "+rl_accel.reward_timeout.enable=True"
TIMINGS = {"timing_s/step": 20.0, "timing_s/gen": 12.0, "timing_s/adv": 1.0, "timing_s/update_actor": 6.0}


def batch(step, cancelled=False):
    """Ten prompts of one response: nine of a second, one that takes until 0.5 or 1.5 seconds before the end of the stage."""
    last = 11.5 if step % 2 else 10.5
    responses = [ResponseTimes(f"p{n}", 0.0, 1.0, 1.25, 1.25, 10, "s0") for n in range(9)]
    if cancelled:
        return [*responses, ResponseTimes("p9", 0.0, None, None, 2.0, 12, "s1", CANCELLED)]
    return [*responses, ResponseTimes("p9", 0.0, last - 1.0, last, last, 90, "s1")]


def write_log(path, steps=4, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 0, "data": {"val/acc": 0.5}}]
    lines += [{"step": n, "data": {**TIMINGS, **more}} for n in range(1, steps + 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder, responses_of=batch, window_known=True, **more):
    """Four steps with telemetry: what verl's logger and the file of responses have of them."""
    lines = []
    for step in range(1, 5):
        responses = responses_of(step)
        numbers = stage_clock.completion(responses) | {"share/gen": 0.6}
        if window_known:
            numbers |= stage_clock.generation(responses, TIMINGS["timing_s/gen"])
        data = {**TIMINGS, **{f"rl_accel/telemetry/{name}": value for name, value in numbers.items()}, **more}
        lines.append(json.dumps({"step": step, "data": data}) + "\n")
        stage_clock.keep(folder / "checkpoints" / FILE_NAME, step, responses)
    (folder / "metrics.jsonl").write_text("".join(lines))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    return tmp_path


def savings_of(found):
    return {saving.name: saving for saving in find_savings(found)}


def write_rollouts(folder, scores, text="x"):
    """A file of ``trainer.rollout_data_dir``, as verl writes it: of each prompt, the scores of responses of this text."""
    folder.mkdir()
    rows = [{"input": f"p{n}", "output": text, "score": score} for n, group in enumerate(scores) for score in group]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "1.jsonl").write_text("".join(lines), encoding="utf-8")


def test_groups_with_equal_rewards_have_a_price_where_verl_stored_its_responses(run):
    assert EQUAL not in savings_of(read_run(run))
    write_rollouts(run / "rollouts", [(1, 1), (0, 1), (0, 0), (1, 0), (1,)])
    (run / "rollouts" / "2.jsonl").write_text('{"input": ')
    saving = savings_of(read_run(run))[EQUAL]
    assert saving.at_most == saving.seconds == pytest.approx(6.0 * 4 / 9)
    assert saving.arithmetic.startswith("at most: 2 of 5 groups, 44% of the text")


@pytest.mark.parametrize(
    "name",
    [
        "timing_s/values",
        "timing_s/update_critic",
        "rl_accel/skip_zero/applied",
        "actor/kl_loss",
        "actor/entropy_loss",
        "actor/reward_kl_penalty",
    ],
)
def test_groups_have_no_price_where_they_are_left_out_or_influence_training(tmp_path, name):
    write_run(tmp_path, **{name: 1.0})
    write_rollouts(tmp_path / "rollouts", [(1, 1)])
    assert EQUAL not in savings_of(read_run(tmp_path))


def test_stages_parts_and_what_would_save_how_much_are_found_printed_and_drawn(run, invoke):
    run_profile = read_run(run)
    assert list(run_profile.steps) == [3, 4], "the first two are warm-up"
    assert run_profile.stages == {"gen": 12.0, "adv": 1.0, "update_actor": 6.0, "other": 1.0}
    assert run_profile.step_seconds == 20.0
    parts = [run_profile.numbers[f"{part}_seconds"] for part in ("most", "waiting", "reward", "rest")]
    assert parts == [1.0, 9.0, 1.0, 1.0]
    assert run_profile.numbers["idle_share"] == pytest.approx(1 - (9 + 10) / (10 * 12))
    counter = "a server's own counter could not be read (vLLM: rollout.disable_log_stats=False)"
    assert run_profile.missing == [f"preemptions of 2 of 2 steps: {counter}"]
    savings = savings_of(run_profile)
    assert find_savings(run_profile)[0].name == WAITING
    assert savings[WAITING].seconds == 9.0
    assert 0 < savings[WAITING].gain.low < savings[WAITING].gain.mean < 11.0
    assert "20 responses, replayed by an engine that is fitted to them" in savings[WAITING].arithmetic
    assert (savings[NOTICING].seconds, savings[NOTICING].at_most) == (1.0, 1.0)
    assert savings[REWARDS].at_most == 0.0, "a second is within the least limit"
    output = invoke(profile, run)
    for line in (
        r"waiting for the longest .* 9 s .* 45\.0%",
        r"gen .* 12 s .* 60\.0%",
        r"preemptions a step: +unknown",
        r"a response and its reward, p50: +1\.25 s",
        r"Largest saving: waiting for the longest responses, 9 s a step",
    ):
        assert re.search(line, output), (line, output)
    assert (run / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_a_terminal_of_80_columns_shows_each_flag_in_one_piece(capsys):
    advice = [f"+rl_accel.{feature.name}.enable=True" for feature in FEATURES]
    savings = [Saving(REUSE, 812.5, flag, "", Range(123.4, 112.3, 134.5)) for flag in advice]
    Console(width=80).print(_table_of_savings(savings, 1000.0))
    lines = capsys.readouterr().out.splitlines()
    assert [flag for flag in advice if not any(f" {flag} " in line for line in lines)] == []
    assert max(map(len, lines)) == 80
    assert max(len(key) for key, _, _ in describe_flags()) < 40, "the first column of rl-accel flags"


def test_a_reward_that_takes_long_has_a_bound(tmp_path):
    def responses(_step):
        quick = [ResponseTimes(f"p{n}", 0.0, 1.0, 1.2, 1.2, 10) for n in range(19)]
        return [*quick, ResponseTimes("p", 0.0, 1.0, 11.0, 11.0, 10)]

    write_run(tmp_path, responses, **{"rl_accel/telemetry/preemptions": 3.0})
    run_profile = read_run(tmp_path)
    assert find_savings(run_profile)[0] == savings_of(run_profile)[REWARDS]
    assert (find_savings(run_profile)[0].seconds, find_savings(run_profile)[0].at_most) == (10.0, 10.0)
    assert (run_profile.numbers["preemptions"], run_profile.missing) == (3.0, [])


def test_features_that_are_on_are_not_advised(tmp_path):
    on = {f"rl_accel/{name}/applied": 1.0 for name in ("tail_batching", "reward_timeout", "sampler", "gae")}
    write_run(tmp_path, lambda step: batch(step, cancelled=True), **on)
    run_profile = read_run(tmp_path)
    assert all(saving.gain is None for saving in find_savings(run_profile))
    assert not any(saving.advice.startswith("+") for saving in find_savings(run_profile))


def test_without_telemetry_there_are_stages_of_all_but_the_first_steps_and_the_reason_for_no_more(tmp_path):
    write_log(tmp_path / "project" / "experiment.jsonl", steps=1)
    assert list(read_run(tmp_path).steps) == [1], "never without the last"
    write_log(tmp_path / "project" / "experiment.jsonl")
    run_profile = read_run(tmp_path)
    assert (run_profile.steps, run_profile.stages["gen"]) == ([3, 4], 12.0)
    assert not run_profile.numbers
    generation, rewards = find_savings(run_profile)
    assert (generation.name, rewards.name) == ("generation, waiting included", "rewards and advantages")
    assert (generation.gain, generation.at_most, rewards.at_most) == (None, None, 1.0)
    (missing,) = run_profile.missing
    assert "the run had no +rl_accel.telemetry.enable=True" in missing


def test_what_was_logged_is_there_without_the_file_of_responses_and_in_an_asynchronous_trainer(run):
    (run / "checkpoints" / FILE_NAME).unlink()
    run_profile = read_run(run)
    assert (run_profile.numbers["waiting_seconds"], run_profile.responses) == (9.0, {})
    assert savings_of(run_profile)[WAITING].gain is None
    assert f"0 files named {FILE_NAME} are here, not one" in run_profile.missing[0]
    write_run(run, window_known=False)
    run_profile = read_run(run)
    assert (run_profile.numbers["responses"], run_profile.responses) == (10, {})
    assert "responses are under way when the stage begins" in run_profile.missing[0]
    assert savings_of(run_profile) == {}


def test_the_console_is_read_where_there_is_no_other_log(tmp_path, invoke):
    step = " - ".join(f"{name}:np.float64({value})" for name, value in TIMINGS.items())
    console = tmp_path / "files" / "output.log"
    console.parent.mkdir()
    console.write_text("".join(f"(TaskRunner pid=7) step:{n} - {step}\n" for n in range(1, 4)))
    for path in (tmp_path, console):
        assert read_run(path).stages["gen"] == 12.0
        assert "Means of step 3" in invoke(profile, path, "--no-picture")
    write_log(tmp_path / "metrics.jsonl", steps=2)
    assert read_run(tmp_path).log == tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("value", [None, math.inf, -5.0])
@pytest.mark.parametrize("timer", ["gen", "step"])
def test_a_step_with_a_timer_that_is_no_duration_is_left_out_and_said(tmp_path, invoke, timer, value):
    write_log(tmp_path / "m.jsonl", steps=5, **{"rl_accel/telemetry/idle_share": 0.5})
    other = None if value == -5.0 else value
    odd = {f"timing_s/{timer}": value, "rl_accel/telemetry/idle_share": other}
    lines = (tmp_path / "m.jsonl").read_text().splitlines()
    lines.insert(5, json.dumps({"step": 4, "data": odd}))
    lines.append(json.dumps({"step": 5, "data": {"rl_accel/telemetry/idle_share": other}}))
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    output = invoke(profile, tmp_path, "--picture", tmp_path)
    assert "note: left out, because a stage or the step has an invalid duration: 4\n" in output
    run_profile = read_run(tmp_path)
    assert (run_profile.steps, run_profile.stages["gen"], run_profile.numbers["idle_share"]) == ([3, 5], 12.0, 0.5)


def test_of_two_starts_in_one_log_the_later_wins_and_is_said(tmp_path, invoke):
    write_log(tmp_path / "m.jsonl", steps=8)
    lines = (tmp_path / "m.jsonl").read_text()
    write_log(tmp_path / "m.jsonl", steps=4, **{"timing_s/gen": 2.0})
    (tmp_path / "m.jsonl").write_text(lines + (tmp_path / "m.jsonl").read_text())
    output = invoke(profile, tmp_path, "--no-picture")
    assert "note: the run began again at step 1: what was logged before from there on is left out" in output
    assert (list(read_run(tmp_path).steps), read_run(tmp_path).stages["gen"]) == ([3, 4], 2.0)


def test_a_file_that_cannot_be_read_or_written_is_one_line_after_the_table(tmp_path, monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr("sys.argv", ["rl-accel", "profile", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capsys.readouterr()

    write_log(tmp_path / "m.jsonl")
    output = call(tmp_path, "--picture", tmp_path / "absent" / "x.png")
    assert "share of the step" in output.out
    assert output.err == f"rl-accel: {tmp_path / 'absent' / 'x.png'}: No such file or directory\n"
    output = call(tmp_path, "--picture", tmp_path / "x.words")
    assert re.match(rf"rl-accel: {tmp_path}/x.words is no picture: Format 'words' is not supported", output.err)

    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.open", refuse)
    assert call(tmp_path).err == f"rl-accel: {tmp_path / 'm.jsonl'}: Permission denied\n"


def test_the_picture_is_in_the_working_folder_or_where_it_is_asked_for_and_never_beside_the_log(
    tmp_path, invoke, monkeypatch
):
    log = tmp_path / "run" / "m.jsonl"
    write_log(log)
    for given, file in ((tmp_path, "profile.png"), (tmp_path / "x", "x.png"), (tmp_path / "x.svg", "x.svg")):
        assert f"Picture: {tmp_path / file}\n" in invoke(profile, log, "--picture", given)
        assert (tmp_path / file).stat().st_size
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for given in (log, log.parent, f"{log},{log}"):
        assert "Picture: profile.png\n" in invoke(profile, given)
    assert [*Path().iterdir(), *log.parent.iterdir()] == [Path("profile.png"), log]


@pytest.mark.slow
def test_a_terminal_that_lacks_characters_or_is_gone_is_no_traceback(tmp_path, clean_environment):
    write_log(tmp_path / "märz.jsonl")
    command = f"{sys.executable} -m rl_accel profile {tmp_path}/märz.jsonl --no-picture"
    for shell, code, out, err in (
        (command, 0, "m?rz.jsonl: verl's file logger", ""),
        (f"{command} >&-", 0, "", ""),
        (f"{command} > /dev/full", 2, "", "rl-accel: No space left on device"),
    ):
        env = {**clean_environment, "PYTHONIOENCODING": "ascii"}
        done = subprocess.run(shell, shell=True, env=env, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, shell
        assert (done.returncode, out in done.stdout, err in done.stderr) == (code, True, True), done.stderr


def test_numbers_of_drafts_are_printed_where_there_are_any(tmp_path, invoke):
    def shown(**numbers):
        write_log(tmp_path / "m.jsonl", **{f"rl_accel/drafts/{name}": value for name, value in numbers.items()})
        return dict(re.findall(r"(\w+) +│ ([\d.]+) ", invoke(profile, tmp_path, "--no-picture")))

    rows = shown(drafted=40.0, acceptance_sibling=0.75, tokens_a_step_from_64=3.5, applied=1.0)
    assert (rows["acceptance_sibling"], rows["tokens_a_step_from_64"]) == ("0.75", "3.50")
    assert "applied" not in rows
    assert "drafted" not in shown(applied=1.0, drafted=0.0)


def test_a_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"input": "x"}\n')
    (tmp_path / "half.log").write_text("step:1 - timing_s/gen:4.2\n'timing_s/step' is not known yet\n")
    with pytest.raises(RlAccelError, match=r"holds no metrics of verl or slime; wanted what"):
        read_run(tmp_path / "other.jsonl")
    for path in (tmp_path, tmp_path / "half.log"):
        with pytest.raises(RlAccelError, match=r"verl's console, 1 step, no telemetry, but no step has its seconds"):
            read_run(path)
    write_log(tmp_path / "a" / "metrics.jsonl")
    (tmp_path / "a" / "folder.jsonl").mkdir()
    logs = [read_run(path).log for path in (tmp_path / "a", tmp_path / "a" / "metrics.jsonl")]
    assert logs == [tmp_path / "a" / "metrics.jsonl"] * 2


def test_the_command_draws_stages_alone_and_many_responses(tmp_path, invoke):
    write_log(tmp_path / "stages" / "metrics.jsonl")
    invoke(profile, tmp_path / "stages", "--picture", tmp_path)
    write_run(tmp_path / "many", lambda _: [ResponseTimes(str(n % 10), 0.0, 1.0, 1.0, 1.0, 1) for n in range(5000)])
    invoke(profile, tmp_path / "many", "--picture", tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize("other", ["\u2028", "\x85", "\u2029"])
def test_a_text_with_another_end_of_a_line_costs_no_group(tmp_path, other):
    write_run(tmp_path)
    write_rollouts(tmp_path / "rollouts", [(0.0, 0.0), (0.0, 1.0)] * 2, f"x{other}y")
    assert savings_of(read_run(tmp_path))[EQUAL].arithmetic.startswith("at most: 2 of 4 groups, 50% of the text")


def write_overlapping(path, framework):
    """Twelve steps that wait 20 s for rollouts of 90 s, of which 70 s overlap with training."""
    lengths = [100.0 * (2 + step % 3) for step in range(12)]
    lines = []
    for step, longest in enumerate(lengths, 1):
        if framework == "slime":
            tokens = {"rollout/response_len/mean": 90.0, "rollout/response_len/max": longest, "perf/rollout_time": 90.0}
            times = {"perf/train_wait_time": 20.0, "perf/train_time": 80.0, "perf/step_time": 100.0}
            times |= {"perf/update_weights_time": 2.0, "perf/actor_train_time": 79.0}
            lines += [f"x.py:1 - perf {step}: {numbers}" for numbers in (tokens, times)]
        else:
            numbers = {"timing_s/gen": 18.0, "timing_s/update_weights": 2.0, "timing_s/update_actor": 79.0}
            numbers |= {"timing_s/step": 100.0, "timing_s/save_checkpoint": 60.0, framework: 90.0}
            numbers |= {"response_length/mean": 90.0, "response_length/max": longest, "perf/total_num_tokens": 3200.0}
            lines.append(f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in numbers.items()))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "framework",
    [
        "slime",
        "timing_s/generate_async",
        "fully_async/trainer/idle_ratio",
        "training/off_policy/trajectory_staleness/mean",
    ],
)
def test_of_rollouts_beside_training_only_the_wait_counts_and_no_saving_is_named(tmp_path, framework, invoke):
    write_overlapping(tmp_path / "train.log", framework)
    run_profile = read_run(tmp_path)
    assert run_profile.overlaps
    saved = {"save_checkpoint": 60.0} if "off_policy" in framework else {}
    stages = {"gen": 18.0, "update_actor": 79.0, "update_weights": 2.0, **saved, "other": 1.0 - sum(saved.values())}
    assert dict(run_profile.stages) == stages
    assert (run_profile.step_seconds, run_profile.parts) == (100.0, {})
    (saving,) = find_savings(run_profile)
    assert (saving.name, saving.seconds, saving.gain) == ("waiting for rollouts", 18.0, None)
    output = invoke(profile, tmp_path, "--no-picture")
    assert "tail_batching" not in output
    assert "reward_timeout" not in output
    with pytest.raises(RlAccelError, match="wanted a run whose rollouts end with their step, found responses of older"):
        setup_of(run_profile, {})


@pytest.mark.parametrize(
    ("more", "launch", "advices"),
    [
        ({"timing_s/values": 1.0}, "", {"advantages": "gae"}),
        ({}, "algorithm.adv_estimator=reinforce_plus_plus", {"advantages": "advantages"}),
        ({}, "algorithm.adv_estimator=grpo", {}),
        ({"rl_accel/advantages/applied": 1.0}, "adv_estimator=reinforce_plus_plus", {"advantages": "advantages: on"}),
        ({"timing_s/old_log_prob": 2.0}, "", {REUSE: "reuse_log_probs"}),
        ({"timing_s/old_log_prob": 2.0}, "data.train_batch_size=64 ppo_mini_batch_size=64", {REUSE: "reuse_log_probs"}),
        ({"timing_s/old_log_prob": 2.0}, "data.train_batch_size=64 ppo_mini_batch_size=16", {}),
        ({"timing_s/old_log_prob": 2.0}, "train_batch_size=8 ppo_mini_batch_size=8 actor.ppo_epochs=2", {}),
        ({"timing_s/old_log_prob": 2.0, "actor/reward_kl_penalty": 0.1}, "", {}),
        ({"timing_s/testing": 40.0}, "", {VALIDATING: "overlap_validation"}),
    ],
)
def test_a_feature_is_named_where_the_log_and_the_launch_line_allow_it(tmp_path, more, launch, advices):
    write_log(
        tmp_path / "m.jsonl", **{"timing_s/reward": 0.0, "training/off_policy/trajectory_spans/mean": 1.0, **more}
    )
    (tmp_path / "train.log").write_text(launch)
    found = {name: saving.advice for name, saving in savings_of(read_run(tmp_path)).items()}
    always = {"generation, waiting included", NOTICING, "rewards"}
    wanted = {name: advice if ":" in advice else f"+rl_accel.{advice}.enable=True" for name, advice in advices.items()}
    assert {name: advice for name, advice in found.items() if name not in always} == wanted


@pytest.mark.parametrize("is_v1", [False, True])
def test_validation_is_a_row_of_its_own_and_no_part_of_a_step(tmp_path, invoke, is_v1):
    """verl's older trainer validates within a step, its V1 trainer after it."""
    steps = []
    for number in range(1, 7):
        metrics = dict(TIMINGS)
        if is_v1:
            metrics["training/off_policy/trajectory_staleness/mean"] = 0.0
        if number in (3, 6):
            metrics["timing_s/testing"] = 30.0
            metrics["timing_s/step"] += 0.0 if is_v1 else 30.0
        steps.append({"step": number, "data": metrics})
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, steps)))
    run = read_run(tmp_path)
    assert (run.step_seconds, run.stages["other"], run.validations) == (20.0, 1.0, [30.0, 30.0])
    saving = savings_of(run)[VALIDATING]
    assert (saving.seconds, saving.at_most) == (15.0, 15.0)
    output = invoke(profile, tmp_path, "--no-picture")
    assert re.search(r"validation +│ +30 s │ 2 times, no part of a step", output)


def test_equal_rewards_that_float32_cannot_hold_promise_nothing(run):
    rewards = torch.full((8,), 0.1)
    assert (rewards - rewards.mean()).any(), "verl's advantages are not 0"
    write_rollouts(run / "rollouts", [(0.1,) * 8, (0.0, 1.0)])
    assert EQUAL not in savings_of(read_run(run))
    write_rollouts(run / "more", [(0.5,) * 8])
    assert savings_of(read_run(run))[EQUAL].arithmetic.startswith("at most: 1 of 3 groups")


@pytest.mark.parametrize(
    ("timings", "launch", "keys"),
    [
        ({"update_actor": 15.0}, "main_ppo actor_rollout_ref.actor.use_dynamic_bsz=True", ["use_fused_kernels"]),
        ({"update_actor": 15.0}, "'use_dynamic_bsz': False, 'use_fused_kernels': True", ["use_dynamic_bsz"]),
        ({"update_actor": 15.0}, "", []),
        ({"gen": 15.0}, "main_ppo actor_rollout_ref.rollout.enable_prefix_caching=False", ["enable_prefix_caching"]),
        ({"gen": 15.0}, "main_ppo", []),
        ({"save_checkpoint": 5.0}, "main_ppo actor_rollout_ref.actor.strategy=megatron", ["async_save"]),
        ({"save_checkpoint": 5.0}, "main_ppo", []),
        ({"old_log_prob": 5.0}, "train_batch_size=8 ppo_mini_batch_size=4", ["bypass_mode"]),
        ({"old_log_prob": 5.0}, "train_batch_size=8 ppo_mini_batch_size=8", []),
    ],
)
def test_settings_of_verl_are_named_where_they_are_off_and_their_stage_takes_long(tmp_path, timings, launch, keys):
    stages = {f"timing_s/{name}": value for name, value in timings.items()}
    write_log(tmp_path / "m.jsonl", **{"timing_s/gen": 1.0, "timing_s/update_actor": 1.0, **stages})
    (tmp_path / "train.log").write_text(launch)
    sentence = " ".join(levers(read_run(tmp_path)))
    known = ("use_dynamic_bsz", "use_fused_kernels", "enable_prefix_caching", "async_save", "bypass_mode")
    assert [key for key in known if key in sentence] == keys
    assert "bypass_mode" not in keys or "changes the loss" in sentence


def test_several_runs_on_one_console_get_no_advice(tmp_path, invoke):
    line = " - ".join(f"{name}:{value}" for name, value in TIMINGS.items())
    lines = [f"(TaskRunner pid={1 + number % 2}) step:{number} - {line}" for number in range(1, 7)]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    output = invoke(profile, tmp_path, "--no-picture")
    assert "runs on one console cannot be told apart" in output
    assert "rl_accel." not in output.replace("rl_accel.telemetry.enable", "")


@pytest.mark.parametrize(
    ("page", "log"),
    [("profile.md", "tests/plan/ab_tail/stock"), ("your-log.md", "tests/telemetry/data/tail_stock.jsonl")],
)
def test_a_page_quotes_what_the_command_prints_of_the_kept_run(page, log, invoke):
    root = Path(__file__).parents[2]
    text = " ".join((root / "docs" / page).read_text().split())
    assert f"rl-accel profile {log}" in text
    assert invoke(profile, root / log, "--no-picture").splitlines()[-1] in text
