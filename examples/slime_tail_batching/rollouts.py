"""Runs rollouts of slime with a tiny model on the CPU, without a trainer: ``python rollouts.py steps=10 arm=tail task=FOLDER``.

slime's rollout function, data source and graders are unchanged. The server is SGLang behind ``sglang-router``, both from the
environment that ``make sglang`` builds. The report compares rollout seconds, tokens kept and prompts lost.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pandas as pd

from verl_on_cpu.sglang_servers import sglang_problem, sglang_router, sglang_server

PROMPTS, RESPONSES, LIMIT = 16, 4, 1024
ARMS = ("over_sampling", "sampler", "partial", "plain", "tail")


def options(words):
    """Parses the command line, words of the form ``key=value``, into a dict."""
    values = dict(word.split("=", 1) for word in words)
    if values.get("arm") not in ARMS:
        raise SystemExit(f"arm wants one of {', '.join(ARMS)}, found {values.get('arm')!r}")
    return values


def arguments(url, task, arm, steps, seed):
    """Returns all arguments that slime's rollout code reads, as slime's argument parser would return them."""
    host, port = url.removeprefix("http://").split(":")
    args = SimpleNamespace(
        hf_checkpoint=str(task / "model"),
        sglang_router_ip=host,
        sglang_router_port=int(port),
        sglang_server_concurrency=512,
        sglang_dp_size=1,
        rollout_num_engines=1,
        use_distributed_post=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=LIMIT,
        rollout_max_prompt_len=None,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=True,
        rollout_global_dataset=True,
        rollout_seed=seed,
        rollout_shuffle=True,
        prompt_data=str(task / "prompts.jsonl"),
        input_key="prompt",
        label_key="label",
        metadata_key="metadata",
        tool_key=None,
        multimodal_keys=None,
        apply_chat_template=True,
        apply_chat_template_kwargs={},
        dump_details=None,
        rollout_batch_size=PROMPTS,
        n_samples_per_prompt=RESPONSES,
        over_sampling_batch_size=PROMPTS if arm in ("plain", "tail") else PROMPTS * 5 // 4,
        buffer_filter_path=None,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        rollout_sample_hook_path=[],
        partial_rollout=arm == "partial",
        mask_offpolicy_in_partial_rollout=False,
        custom_generate_function_path=None,
        custom_rm_path="judge.score",
        rm_type=None,
        group_rm=False,
        reward_key=None,
        ci_test=False,
        use_rollout_routing_replay=False,
        router_policy=None,
        load=None,
        save="checkpoints",
        num_rollout=steps,
        num_epoch=None,
        rollout_function_path="slime.rollout.sglang_rollout.generate_rollout",
        eval_function_path="slime.rollout.sglang_rollout.generate_rollout",
        data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer",
    )
    if arm in ("tail", "sampler"):
        from rl_accel.integrations.slime.custom_config import make

        # slime sets the same attributes from the file of --custom-config-path.
        args.__dict__.update(make(["tail_batching" if arm == "tail" else "sampler"], {}))
    return args


def generated_tokens(url):
    """Returns the number of tokens that the server has generated so far."""
    lines = httpx.get(f"{url}/metrics", timeout=None).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:generation_tokens_total"))


def main():
    values = options(sys.argv[1:])
    root = os.environ.get("SLIME_ROOT", "")
    if not (Path(root) / "slime" / "rollout").is_dir():
        raise SystemExit(f"SLIME_ROOT must name a checkout of https://github.com/THUDM/slime, found {root!r}")
    if reason := sglang_problem():
        raise SystemExit(reason)
    sys.path[:0] = [root, str(Path(__file__).parent)]
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    arm, steps, seed, task = values["arm"], int(values["steps"]), int(values.get("seed", 0)), Path(values["task"])
    frame = pd.read_parquet(task / "train.parquet")
    rows = [
        {"prompt": row.prompt[0]["content"], "label": row.reward_model["ground_truth"], "metadata": {"row": index}}
        for index, row in enumerate(frame.itertuples())
    ]
    (task / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with sglang_server(task / "model", random_seed=seed) as (url, _), sglang_router([url]) as router:
        args = arguments(router, task, arm, steps, seed)
        roll_out(args, url, steps, Path(os.environ["VERL_FILE_LOGGER_PATH"]))


def roll_out(args, url, steps, log):
    """Runs ``steps`` rollouts and writes the metrics of each to ``log``."""
    from slime.rollout.base_types import call_rollout_fn
    from slime.utils.http_utils import init_http_client
    from slime.utils.misc import load_function

    init_http_client(args)
    data_source = load_function(args.data_source_path)(args)
    function = load_function(args.rollout_function_path)
    trained = set()
    with log.open("w", buffering=1) as file:
        for step in range(1, steps + 1):
            before, began = generated_tokens(url), time.monotonic()
            output = call_rollout_fn(function, args, step - 1, data_source, evaluation=False)
            seconds, generated = time.monotonic() - began, generated_tokens(url) - before
            samples = [sample for group in output.samples for sample in group]
            kept = sum(sample.response_length for sample in samples)
            trained |= {sample.group_index for sample in samples}
            waiting = len(data_source.supply.payloads) if hasattr(data_source, "supply") else len(data_source.buffer)
            metrics = {
                **(output.metrics or {}),
                "timing_s/gen": seconds,
                "timing_s/step": seconds,
                "rollout/tokens_generated": generated,
                # A continued response counts in the step that keeps it, with tokens of earlier steps. The number can be below zero.
                "rollout/tokens_wasted": generated - kept,
                "rollout/prompts_lost": data_source.sample_group_index - len(trained) - waiting,
                "critic/score/mean": sum(sample.reward for sample in samples) / len(samples),
                "response_length/mean": kept / len(samples),
                "response_length/max": max(sample.response_length for sample in samples),
            }
            file.write(json.dumps({"step": step, "data": metrics}) + "\n")


if __name__ == "__main__":
    main()
