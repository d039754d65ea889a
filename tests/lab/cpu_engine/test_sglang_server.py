"""The CPU server speaks SGLang's HTTP: answers, aborts, closed connections and refusals; a process of its own."""

import functools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from rl_accel.__main__ import cli

pytestmark = pytest.mark.slow

PACE = ("--seconds-per-step", "0.005", "--max-running-requests", "8", "--context-length", "256")
PROMPT = [10, 11, 12]
ENDLESS = {"max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def serve(clean_environment, model_folder):
    """``serve("--seconds-per-step", "0.01")`` returns the address of a server; the same options share one."""
    with ExitStack() as running:

        @functools.cache
        def start(*options):
            command = [sys.executable, "-m", "rl_accel", "serve-cpu", "--model", str(model_folder), *options]
            process = running.enter_context(
                subprocess.Popen(command, env=clean_environment, stdout=subprocess.PIPE, text=True)
            )
            running.callback(process.terminate)
            line = process.stdout.readline()
            found = re.search(r"at (http://\S+)", line)
            assert found is not None, f"the server did not start: {line!r}"
            return found[1]

        yield start


@pytest.fixture
def client(serve):
    with httpx.Client(base_url=serve(*PACE), timeout=60) as client:
        yield client


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def generate(client, **body):
    body = {"input_ids": PROMPT, "return_logprob": True, **body}
    return client.post("/generate", json=body).raise_for_status().json()


def counters(client):
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def load(client):
    load = client.get("/v1/loads").json()["loads"][0]
    assert load["num_total_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"]
    return load


def test_a_response_has_text_tokens_and_their_log_probabilities_and_an_end_token_stops_it(client):
    params = {"max_new_tokens": 7, "ignore_eos": True, "sampling_seed": 3}
    answer = generate(client, sampling_params=params, rid="mine")
    meta = answer["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 7)
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob < 0 for logprob, _, _ in meta["output_token_logprobs"])
    again = generate(client, sampling_params=params)
    assert (again["output_ids"], again["text"]) == (answer["output_ids"], answer["text"])
    assert meta["num_retractions"] == 0
    assert client.get("/health").status_code == 200
    assert counters(client)["sglang:generation_tokens_total"] >= 14
    tokens = answer["output_ids"]
    stopped = generate(client, sampling_params={**params, "stop_token_ids": [tokens[2]]})
    assert stopped["output_ids"] == tokens[: tokens.index(tokens[2]) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[2]}


def test_a_request_is_aborted_by_id_with_all_others_or_by_its_connection_and_later_ones_are_not(client, pool, wait_for):
    def two_running():
        futures = [pool.submit(generate, client, sampling_params=ENDLESS, rid=f"r{i}") for i in range(2)]
        wait_for(lambda: load(client)["num_running_reqs"] == 2, "both requests")
        return futures

    both = two_running()
    for rid in ("r1", "nobody"):
        client.post("/abort_request", json={"rid": rid})
    whole, aborted = (future.result() for future in both)
    assert whole["meta_info"]["finish_reason"]["type"] == "length"
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(aborted["output_ids"]) < 200, "it answers with what it has"
    both = two_running()
    client.post("/abort_request", json={"abort_all": True})
    assert {future.result()["meta_info"]["finish_reason"]["type"] for future in both} == {"abort"}
    later = generate(client, sampling_params={"max_new_tokens": 2, "ignore_eos": True})
    assert later["meta_info"]["completion_tokens"] == 2
    with httpx.Client(base_url=client.base_url, timeout=0.2) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post("/generate", json={"input_ids": PROMPT, "sampling_params": ENDLESS})
    wait_for(lambda: load(client)["num_total_reqs"] == 0, "the end of the request")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {"max_new_tokens": 0}}, "max_tokens wants an integer of at least 1"),
        ({"sampling_params": {"stop": ["\n"]}}, "stop is not supported"),
        ({"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "custom_params is not supported"),
        ({"stream": True}, "stream is not supported"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": None}, "TypeError"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_in_words(client, body, message):
    answer = client.post("/generate", json={"input_ids": PROMPT, "sampling_params": {}, **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_server_with_little_memory_retracts_and_counts_requests_and_refuses_what_never_fits(client, pool, serve):
    params = [{"max_new_tokens": 100, "ignore_eos": True, "sampling_seed": i} for i in range(8)]
    free = list(pool.map(lambda its: generate(client, sampling_params=its), params))
    with httpx.Client(base_url=serve(*PACE, "--kv-tokens", "250"), timeout=60) as tight:
        preempted = list(pool.map(lambda its: generate(tight, sampling_params=its), params))
        assert [one["output_ids"] for one in preempted] == [one["output_ids"] for one in free]
        retractions = sum(one["meta_info"]["num_retractions"] for one in preempted)
        assert retractions > 0
        assert counters(tight)["sglang:num_retracted_requests_total"] == retractions
        refused = tight.post("/generate", json={"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 248}})
        assert refused.status_code == 400
        assert "do not fit into kv_tokens=250" in refused.json()["error"]["message"]
    assert {one["meta_info"]["num_retractions"] for one in free} == {0}
    assert counters(client)["sglang:num_retracted_requests_total"] == 0


def test_a_folder_without_a_model_is_a_clear_error(invoke):
    assert "does not exist" in invoke(cli, "serve-cpu", "--model", "nowhere", code=2)
