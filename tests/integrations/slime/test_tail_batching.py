"""Tests tail batching in slime's own rollout code on real SGLang servers and router. Needs a checkout in SLIME_ROOT."""

import copy
import itertools
import json
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from rl_accel.features import TAIL_BATCHING
from rl_accel.rollout.saved import ResumeError

pytestmark = pytest.mark.slow


@pytest.fixture
def plugins(slime_root):
    import slime_test_plugins

    slime_test_plugins.reset()
    return slime_test_plugins


@pytest.fixture
def start(start, serve, plugins):
    """``start(*urls, **changes)`` with tail batching; the data is shuffled unless told otherwise."""
    usual = {**TAIL_BATCHING.slime.arguments, "rl_accel": {"tail_batching": True}, "rollout_shuffle": True}
    return lambda *urls, **changes: start(*(urls or [serve()]), **{**usual, **changes})


def leaves(item):
    return [leaf for each in item for leaf in leaves(each)] if isinstance(item, list) else [item]


def check_batch(args, output):
    """Exactly P0 groups of R0 in slime's order, each sample complete and with an index of its own."""
    from slime.utils.types import Sample

    assert len(output.samples) == args.rollout_batch_size
    assert all(len(group) == args.n_samples_per_prompt for group in output.samples)
    samples = leaves(output.samples)
    assert len({s.index for s in samples}) == len(samples)
    firsts = [leaves(group)[0].index for group in output.samples]
    assert firsts == sorted(firsts)
    for group in output.samples:
        assert [s.index for s in leaves(group)] == sorted(s.index for s in leaves(group))
        assert len({s.group_index for s in leaves(group)}) == 1
    for s in samples:
        assert s.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        assert s.reward is not None
        assert s.generate_function_path is None
        assert len(s.rollout_log_probs) == s.response_length == len(s.loss_mask) > 0
        assert len(s.tokens) > s.response_length


def ledger(args):
    file = Path(args.save) / "rollout/tail_batching/ledger.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_every_prompt_trained_once(args):
    trained = Counter(prompt_id for line in ledger(args) for prompt_id in line["trained"])
    assert trained == Counter({f"1:{row}": 1 for row in range(1, 121)})


def servers_of(args):
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    return {worker["url"] for worker in httpx.get(f"{router}/workers").json()["workers"]}


NO_RETRY = {"tail_batching": {"enable": True, "max_retries": 0}}
"""A single failure that counts would give a prompt up."""


def kinds(output):
    return next(kind for kind in ("short", "long", "final") if output.metrics[f"rl_accel/tail_batching/{kind}_round"])


def test_rounds_return_exact_batches_and_train_every_prompt_once(start, requests_on):
    args, source, rollout = start(num_rollout=15)
    results = []
    for rollout_id in range(15):
        output = rollout(rollout_id)
        check_batch(args, output)
        assert requests_on(args.server) == 0, "nothing of the round is left on the server"
        results.append(kinds(output))
    assert {"short", "long"} <= set(results)
    assert results[-1] in ("long", "final"), "the run ends with nothing left"
    check_every_prompt_trained_once(args)
    assert source.supply.payloads == {}
    assert output.metrics["rl_accel/preemptions"] == 0.0


def test_a_cancelled_response_stops_at_the_server_and_its_tokens_count(start, requests_on, plugins, monkeypatch):
    from rl_accel.integrations.slime.tail_batching import responses

    monkeypatch.setattr(responses, "INSIST_SECONDS", 600.0)  # tokens of an answer that comes too late are estimated
    args, _, rollout = start(custom_generate_function_path=f"{plugins.__name__}.endless", rollout_shuffle=False)
    plugins.SLOW_ROWS.update({1, 4})

    def generated():
        lines = httpx.get(f"{args.server}/metrics", timeout=None).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:generation_tokens_total"))

    before = generated()
    output = rollout(0)
    assert output.metrics["rl_accel/tail_batching/prompts_deferred"] == 2
    assert requests_on(args.server) == 0
    # Aborted requests answer with what they have, so the count is exact: it is the server's own.
    assert 0 < output.metrics["rl_accel/tail_batching/tokens_generated"] == generated() - before < plugins.ENDLESS


def test_judges_of_dropped_samples_are_not_waited_for_even_if_they_cannot_be_cancelled(start, plugins, monkeypatch):
    """Those judges never end."""
    from rl_accel.integrations.slime.tail_batching import responses

    monkeypatch.setattr(responses, "INSIST_SECONDS", 1.0)
    args, _, rollout = start(rollout_shuffle=False)
    plugins.SLOW_ROWS.update({1, 4})
    output = rollout(0)
    check_batch(args, output)
    assert not {plugins.row_of(s) for s in leaves(output.samples)} & plugins.SLOW_ROWS
    assert output.metrics["rl_accel/tail_batching/prompts_deferred"] == 2
    assert {entry[1] for entry in plugins.SEEN if entry[0] == "judge"} >= plugins.SLOW_ROWS, "they had been generated"
    plugins.STUBBORN_ROWS.add(12)
    check_batch(args, rollout(1))
    assert ("refused to stop", 12) in plugins.SEEN
    plugins.reset()
    check_batch(args, rollout(2))


def test_filters_and_hooks_are_called_in_slimes_order(start, plugins):
    name = plugins.__name__
    filters = {"dynamic_sampling_filter_path": f"{name}.varies", "rollout_sample_filter_path": f"{name}.sample_filter"}
    filters |= {"rollout_all_samples_process_path": f"{name}.process_all", "rollout_sample_hook_path": [f"{name}.hook"]}
    args, _, rollout = start(rollout_shuffle=False, **filters)
    plugins.CONSTANT_ROWS.update({0, 3})
    output = rollout(0)
    check_batch(args, output)
    assert not {plugins.row_of(s) for s in leaves(output.samples)} & plugins.CONSTANT_ROWS
    rejected = int(output.metrics["rollout/dynamic_filter/drop_constant"])
    assert rejected >= 1
    assert ledger(args)[0]["rejected"].keys() <= {"1:1", "1:4"}
    order = [entry[0] for entry in plugins.SEEN]
    assert order[-2:] == ["sample filter", "all samples"]
    assert plugins.SEEN[-1] == ("all samples", 8 + rejected)
    for sample in leaves(output.samples):
        index = plugins.SEEN.index(("hook", plugins.row_of(sample), sample.index))
        judged = plugins.SEEN.index(("judge", plugins.row_of(sample), sample.index))
        assert index < judged < order.index("sample filter")


def test_a_fallback_filter_keeps_what_a_batch_needs(start, plugins):
    fallback = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
    args, _, rollout = start(dynamic_sampling_filter_path=fallback, custom_rm_path=f"{plugins.__name__}.score")
    plugins.CONSTANT_ROWS.update(range(120))
    output = rollout(0)
    check_batch(args, output)
    assert output.metrics["rl_accel/tail_batching/prompts_rejected"] == 2, "10 launched, 8 needed"


def test_a_group_judge_sees_the_first_responses_of_a_prompt_together(start, plugins):
    args, _, rollout = start(group_rm=True, custom_rm_path=f"{plugins.__name__}.score_group", rollout_shuffle=False)
    plugins.SLOW_ROWS.update({5, 7})  # so the batch needs all the others
    plugins.BROKEN_ROWS.add(2)
    output = rollout(0)
    check_batch(args, output)
    assert output.metrics["rl_accel/tail_batching/responses_failed"] == 4, "those of the group whose judge failed"
    assert output.metrics["rl_accel/tail_batching/prompts_failed"] == 0
    assert {entry[2] for entry in plugins.SEEN if entry[0] == "group judge"} == {4}
    for group in output.samples:
        assert [s.reward for s in group] == [0.0, 1.0, 2.0, 3.0]
        assert plugins.row_of(group[0]) not in plugins.SLOW_ROWS


def test_a_generate_function_may_fan_out(start, plugins):
    _, _, rollout = start(custom_generate_function_path=f"{plugins.__name__}.two_turns")
    output = rollout(0)
    assert [len(group) for group in output.samples] == [4] * 8
    assert all(len(pair) == 2 and pair[0].rollout_id == pair[0].index for group in output.samples for pair in group)
    assert len({pair[0].index for group in output.samples for pair in group}) == 32


@pytest.mark.parametrize(
    ("generate", "limit", "error"),
    [
        ("broken", None, "OSError: no such tool"),
        ("refused", None, "HTTPStatusError: Client error '400 Bad Request'"),
        ("stuck", 6.0, "TimeoutError: its agent loop was not over after 6.0 s (agent_loop_limit)"),
    ],
)
def test_a_response_that_fails_is_retried_then_reported_and_the_rollout_goes_on(start, plugins, generate, limit, error):
    flags = {"tail_batching": {"enable": True, "agent_loop_limit": limit}}
    function = f"{plugins.__name__}.{generate}"
    args, _, rollout = start(custom_generate_function_path=function, rollout_shuffle=False, rl_accel=flags)
    plugins.BROKEN_ROWS.add(6)
    for rollout_id in range(6):  # one of them is long, and has to wait for it
        check_batch(args, rollout(rollout_id))
    failed = {prompt_id: line["errors"] for line in ledger(args) for prompt_id in line["failed"]}
    assert list(failed) == list(failed["1:7"]) == ["1:7"]
    assert failed["1:7"]["1:7"].startswith(error)
    assert servers_of(args) == {args.server}, "the server is still there"


def test_what_a_generate_function_gives_up_is_handed_over_as_slime_would(start, plugins):
    args, _, rollout = start(custom_generate_function_path=f"{plugins.__name__}.gives_up", rollout_shuffle=False)
    plugins.BROKEN_ROWS.update({5, 6, 7})
    aborted, failed, rollout_id = [], [], 0
    while rollout_id < 6 and (len(aborted) < 8 or not failed):  # a round may end before a prompt is given up
        aborted += [s for s in leaves(rollout(rollout_id).samples) if s.status.value == "aborted"]
        failed = [prompt_id for line in ledger(args) for prompt_id in line["failed"]]
        rollout_id += 1
    assert Counter(map(plugins.row_of, aborted)) == {6: 4, 7: 4}
    assert {(plugins.row_of(s), s.reward, s.remove_sample) for s in aborted} == {(6, 0.0, False), (7, None, True)}
    assert failed == ["1:6"], "row 5 has no reward, and would be trained on"
    (error,) = [line["errors"]["1:6"] for line in ledger(args) if line["failed"]]
    assert error.endswith("the generate function aborted the response after 4 tokens")


def test_dead_servers_cost_what_they_generate_and_then_a_run_is_resumed(start, requests_on, start_server, plugins):
    """The first server dies as a whole. Of the second, the process with the model dies, after which SGLang ends the others."""
    servers = dict(start_server() for _ in range(2))
    args, source, rollout = start(*servers, num_rollout=15, rl_accel=NO_RETRY)
    dead = []

    def kill_the_busiest():
        dead.append(max(servers, key=requests_on))
        servers[dead[0]].kill()

    plugins.THEN[10] = kill_the_busiest  # of fifty responses, so that it has many to lose
    lost = 0
    for rollout_id in range(4):
        output = rollout(rollout_id)
        check_batch(args, output)
        assert [requests_on(url) for url in servers.keys() - dead] == [0]
        lost += output.metrics["rl_accel/tail_batching/responses_failed"]
    assert lost >= 1
    (last,) = servers.keys() - dead
    assert servers_of(args) == {last}
    source.save(3)

    def kill_the_model():
        children = psutil.Process(servers[last].pid).children()
        next(child for child in children if child.name().startswith("sglang::sched")).kill()

    plugins.THEN[len(plugins.SEEN) + 10] = kill_the_model
    with pytest.raises(RuntimeError, match=r"tail_batching: no rollout server is left .*\. Start again with --load"):
        rollout(4)
    args, source, rollout = start(num_rollout=15, load=args.save)
    source.load(3)
    for rollout_id in range(4, 15):
        check_batch(args, rollout(rollout_id))
    assert [line["failed"] for line in ledger(args)] == [{}] * 15
    check_every_prompt_trained_once(args)
    assert source.supply.payloads == {}


@pytest.mark.parametrize(("losses", "failed"), [(3, []), (0, ["1:7"])])
def test_what_somebody_else_aborts_is_made_again_but_not_for_ever(start, plugins, monkeypatch, losses, failed):
    from rl_accel.integrations.slime.tail_batching import responses

    monkeypatch.setattr(responses, "LOSSES", losses)
    flags = {"tail_batching": {"enable": True, "max_retries": 0, "prompt_ratio": 1.0, "response_ratio": 1.0}}
    generate = f"{plugins.__name__}.endless"
    args, _, rollout = start(custom_generate_function_path=generate, rollout_shuffle=False, rl_accel=flags)
    plugins.SLOW_ROWS.add(6)

    def abort():
        plugins.SLOW_ROWS.clear()
        httpx.post(f"{args.server}/abort_request", json={"abort_all": True})

    plugins.THEN[7 * 4] = abort  # all others are graded
    check_batch(args, rollout(0))
    (line,) = ledger(args)
    assert (list(line["failed"]), len(line["trained"])) == (failed, 8)


def test_a_checkpoint_of_another_run_is_refused(start):
    args, source, rollout = start()
    rollout(0)
    source.save(0)
    with pytest.raises(RuntimeError, match="the state after rollout 7 is not known"):
        source.save(7)
    _, other, _ = start(rollout_batch_size=10, over_sampling_batch_size=10, load=args.save)
    with pytest.raises(ResumeError, match="prompts_per_step = 10, found 8"):
        other.load(0)
    for file in Path(args.save).glob("rollout/tail_batching_0/*"):
        file.unlink()
    _, other, _ = start(load=args.save)
    with pytest.raises(ResumeError, match="was saved without tail batching"):
        other.load(0)


def test_a_run_that_reads_its_rollouts_from_files_saves_and_is_resumed(start):
    given = {"load_debug_rollout_data": "rollouts", "debug_train_only": True}
    args, source, _ = start(**given)
    source.load(-1)
    source.save(0)
    start(load=args.save, **given)[1].load(0)


def test_a_run_that_is_killed_while_it_saves_leaves_a_checkpoint_to_resume_or_one_line(start, killed_at, tmp_path):
    args, source, rollout = start()
    rollout(0)
    queue = dict(source.supply.payloads)
    assert queue
    other = type(source)(copy.copy(args))
    refusals = set()
    for write in itertools.count():
        folder = source.args.save = other.args.load = str(tmp_path / str(write))
        was_killed = killed_at(write, lambda: source.save(0))
        try:
            other.load(0)
        except ResumeError as error:
            refusals.add(str(error).replace(folder, "FOLDER"))
        else:
            assert (other.supply.payloads, other.sample_offset) == (queue, source.sample_offset)
        if not was_killed:
            break
    (refusal,) = refusals
    assert refusal.startswith("FOLDER has no global_dataset_state_dict_0.pt: its run was ended while it saved. Resume")
    assert other.supply.payloads == queue, "of the last one"


def test_evaluation_is_slimes_own_and_another_data_source_is_named(start, evaluation_of, prompts_file, plugins):
    from slime.rollout.data_source import RolloutDataSource

    from rl_accel.errors import ConfigError
    from rl_accel.integrations.slime.tail_batching.rollout import generate_rollout

    args, source, _ = start(**evaluation_of(prompts_file, custom_rm_path=f"{plugins.__name__}.score"))
    assert len(generate_rollout(args, 0, source, evaluation=True).data["few"]["samples"]) == 120
    assert source.supply.fetched == 0
    with pytest.raises(ConfigError, match=r"--data-source-path to be .*TailDataSource, found slime\.rollout"):
        generate_rollout(args, 0, RolloutDataSource(args))
    with pytest.raises(RuntimeError, match="samples cannot be added"):
        source.add_samples([[]])
