"""Script that runs slime's RolloutManager actor on a Ray cluster without GPUs, with slime's parser and a YAML file of ours.

``python manager.py URL MODEL PROMPTS FOLDER`` prints JSON. ``rewards``: what slime has logged of each rollout and of an evaluation,
while the store of anchors is killed. ``tail``: the samples of each rollout of a run that is killed and resumed.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import ray
from slime_parser import parsed

from rl_accel.integrations.ray.reward_anchors import store_name

URL, MODEL, PROMPTS, FOLDER = sys.argv[1:]
ROLLOUTS = 6


def manager(folder, features, load=None, **flags):
    """Start slime's actor on arguments that slime's own checks have passed, with the YAML of ``rl-accel slime-config``."""
    import slime.utils.arguments as slime_arguments
    from slime.ray.rollout import RolloutManager
    from slime.ray.utils import add_default_ray_env_vars

    config = Path(FOLDER) / "rl_accel.yaml"
    command = [sys.executable, "-m", "rl_accel", "slime-config", *features.split()]
    config.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    cluster = {"rollout_num_gpus": 0, "global_batch_size": 32, "num_rollout": ROLLOUTS}
    args = parsed(URL, MODEL, PROMPTS, custom_config_path=config, **cluster, **flags)
    off = {"debug_rollout_only": False, "debug_train_only": False, "load_debug_rollout_data": None, "ref_load": None}
    given = {"train_backend": "megatron", "micro_batch_size": 1, "save": f"{FOLDER}/{folder}", "load": load}
    args.__dict__.update(off | given)
    slime_arguments.slime_validate_args(args)
    slime_arguments.sglang_validate_args(args)
    args.load = load
    args.rollout_num_engines = 1
    env = {"env_vars": add_default_ray_env_vars()}
    actor = RolloutManager.options(num_cpus=1, num_gpus=0, runtime_env=env).remote(args, None)
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    ray.get(actor.set_train_parallel_config.remote(parallel))
    return actor


def generate(actor, rollout_id):
    ranks = [ray.get(ref.inner) for ref in ray.get(actor.generate.remote(rollout_id))]
    indices = [index for rank in ranks for index in rank["sample_indices"]]
    return {"rollout": rollout_id, "samples": len(indices), "unique": len(set(indices))}


def train_and_resume():
    first = manager("tail", "--enable gae,tail_batching")
    ray.get(first.load.remote(-1))
    before = [generate(first, rollout_id) for rollout_id in range(3)]
    ray.get(first.save.remote(1))  # one behind, as train_async does
    ray.kill(first)
    second = manager("tail", "--enable gae,tail_batching", load=f"{FOLDER}/tail")
    ray.get(second.load.remote(1))
    return before + [generate(second, rollout_id) for rollout_id in range(2, ROLLOUTS)]


def grade_and_lose_the_store():
    features = "--enable reward_timeout"  # the grader is that of the launch line
    limits = "--set reward_timeout.min_correct=1 --set reward_timeout.maximum=5 --set reward_timeout.score_errors=true"
    evaluation = {"eval_interval": 1, "n_samples_per_eval_prompt": 1, "eval_max_response_len": 16}
    evaluation["eval_prompt_data"] = ["few", PROMPTS]
    actor = manager("rewards", f"{features} {limits}", custom_rm_path="slime_test_graders.by_row", **evaluation)
    seen = []
    for rollout_id in range(3):
        ray.get(actor.generate.remote(rollout_id))
        if rollout_id == 0:
            ray.kill(ray.get_actor(store_name()), no_restart=False)
        if rollout_id == 1:
            ray.get(ray.get_actor(store_name()).__ray_ready__.remote())
        seen.append(logged(f"perf {rollout_id}: "))
    ray.get(actor.eval.remote(2))
    seen.append(logged("eval 2: "))
    ray.kill(actor)
    return seen


def logged(start):
    """The numbers in the line of slime's log that begins with ``start``."""
    for file in Path(FOLDER).glob("session_*/logs/worker-*.err"):
        for line in file.read_text().splitlines():
            if start in line:
                return ast.literal_eval(line.partition(start)[2])
    raise RuntimeError(f"{start!r} was not logged")


if __name__ == "__main__":
    env = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", num_cpus=3, object_store_memory=10**8, _temp_dir=FOLDER, runtime_env=env, **quiet)
    try:  # the rewards first: only then is a line of the log certain to be theirs
        print(json.dumps({"rewards": grade_and_lose_the_store(), "tail": train_and_resume()}))
    finally:
        ray.shutdown()
