"""Run as a process of its own: slime's argument parser, our YAML, and the real RolloutManager actor on a Ray cluster without GPUs.

``python manager.py URL MODEL PROMPTS FOLDER tail`` prints a line of JSON for each rollout of a run that is killed and resumed;
with ``rewards`` instead of ``tail``, for each rollout what slime has logged of it, while the store of anchors is killed.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL, PROMPTS, FOLDER, WHAT = sys.argv[1:6]
ROLLOUTS = 6
FEATURES = {
    "tail": ["--enable", "gae,tail_batching"],
    "rewards": [
        *("--enable", "reward_timeout", "--set", "reward_timeout.grader=slime_test_graders.by_row"),
        *("--set", "reward_timeout.min_correct=1", "--set", "reward_timeout.maximum=5"),
    ],
}
WORDS = {
    "tail": {"--custom-rm-path": "slime_test_plugins.score"},
    "rewards": {
        "--custom-rm-path": "slime_test_graders.by_row",
        "--eval-interval": 1,
        "--n-samples-per-eval-prompt": 1,
        "--eval-max-response-len": 16,
    },
}


def parse(load):
    """slime's own parser and checks; Megatron's flags, whose package is not on the index, are set by hand."""
    import slime.utils.arguments as slime_arguments

    config = Path(FOLDER) / "rl_accel.yaml"
    command = [sys.executable, "-m", "rl_accel", "slime-config", *FEATURES[WHAT]]
    config.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    host, port = URL.removeprefix("http://").split(":")
    words = {
        "--custom-config-path": config,
        "--hf-checkpoint": MODEL,
        "--prompt-data": PROMPTS,
        "--input-key": "input",
        "--label-key": "label",
        "--metadata-key": "metadata",
        "--rollout-batch-size": 8,
        "--n-samples-per-prompt": 4,
        "--global-batch-size": 32,
        "--num-rollout": ROLLOUTS,
        "--rollout-max-response-len": 128,
        "--rollout-num-gpus": 0,
        "--rollout-num-gpus-per-engine": 1,
        "--sglang-router-ip": host,
        "--sglang-router-port": port,
        "--sglang-server-concurrency": 512,
        **WORDS[WHAT],
    }
    sys.argv = ["train.py", *(str(word) for pair in words.items() for word in pair)]
    if "--eval-interval" in words:
        sys.argv += ["--eval-prompt-data", "few", PROMPTS]
    parser = argparse.ArgumentParser(conflict_handler="resolve", allow_abbrev=False)
    for flag in ("--seed", "--lr", "--clip-grad", "--save", "--load", "--save-interval", "--micro-batch-size"):
        parser.add_argument(flag, default=None)
    parser.add_argument("--global-batch-size", type=int)
    slime_arguments.get_slime_extra_args_provider()(parser)
    args, _ = parser.parse_known_args()
    args.__dict__.update(vars(slime_arguments.sglang_parse_args()))
    args.__dict__.update(
        train_backend="megatron",
        debug_rollout_only=False,
        debug_train_only=False,
        load_debug_rollout_data=None,
        ref_load=None,
        micro_batch_size=1,
        save=f"{FOLDER}/checkpoints",
        load=load,
    )
    slime_arguments.slime_validate_args(args)
    slime_arguments.sglang_validate_args(args)
    args.load = load
    args.rollout_num_engines = 1
    return args


def manager(args):
    import ray
    from slime.ray.rollout import RolloutManager
    from slime.ray.utils import add_default_ray_env_vars

    actor = RolloutManager.options(num_cpus=1, num_gpus=0, runtime_env={"env_vars": add_default_ray_env_vars()}).remote(
        args, None
    )
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    ray.get(actor.set_train_parallel_config.remote(parallel))
    return actor


def generate(actor, rollout_id):
    import ray

    ranks = [ray.get(ref.inner) for ref in ray.get(actor.generate.remote(rollout_id))]
    indices = sorted(index for rank in ranks for index in rank["sample_indices"])
    tokens = sum(len(each) for rank in ranks for each in rank["tokens"])
    print(
        json.dumps({"rollout": rollout_id, "samples": len(indices), "unique": len(set(indices)), "tokens": tokens}),
        flush=True,
    )


def train_and_resume():
    import ray

    first = manager(parse(None))
    ray.get(first.load.remote(-1))
    for rollout_id in range(3):
        generate(first, rollout_id)
    ray.get(first.save.remote(1))  # one behind, as train_async does
    ray.kill(first)
    second = manager(parse(f"{FOLDER}/checkpoints"))
    ray.get(second.load.remote(1))
    for rollout_id in range(2, ROLLOUTS):
        generate(second, rollout_id)


def grade_and_lose_the_store():
    import ray

    actor = manager(parse(None))
    for rollout_id in range(3):
        ray.get(actor.generate.remote(rollout_id))
        if rollout_id == 0:
            ray.kill(ray.get_actor("rl_accel_reward_anchors"), no_restart=False)
        if rollout_id == 1:
            ray.get(ray.get_actor("rl_accel_reward_anchors").__ray_ready__.remote())
        print(json.dumps(logged(f"perf {rollout_id}: ")), flush=True)
    ray.get(actor.eval.remote(2))
    print(json.dumps(logged("eval 2: ")), flush=True)


def logged(start):
    """What slime has logged in a line that begins so."""
    for file in Path(FOLDER).glob("session_*/logs/worker-*.err"):
        for line in file.read_text().splitlines():
            if start in line:
                return ast.literal_eval(line.partition(start)[2])
    raise RuntimeError(f"{start!r} was not logged")


def main():
    import ray

    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        _temp_dir=FOLDER,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    try:
        {"tail": train_and_resume, "rewards": grade_and_lose_the_store}[WHAT]()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
