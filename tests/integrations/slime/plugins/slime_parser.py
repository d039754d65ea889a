"""Parses arguments with slime's own parser on a machine without Megatron."""

import argparse
from typing import Any
from unittest import mock

MEGATRON = ("--seed", "--lr", "--clip-grad", "--save", "--load", "--save-interval", "--micro-batch-size")
"""Megatron's flags that slime reads. Its own parser needs a package that is not on the index."""


def parsed(router: str, model: object, prompts: object, **flags: Any) -> argparse.Namespace:
    """Arguments of a run in batches of 8 prompts of 4 responses, behind ``router``; a list holds the words of a flag."""
    import slime.utils.arguments as slime_arguments

    host, port = router.removeprefix("http://").split(":")
    usual = {"hf_checkpoint": model, "prompt_data": prompts, "label_key": "label", "rollout_max_response_len": 64}
    usual |= {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "custom_rm_path": "slime_test_plugins.score"}
    usual |= {"sglang_router_ip": host, "sglang_router_port": port}
    words = ["train.py"]
    for name, value in {**usual, **flags}.items():
        words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    parser = argparse.ArgumentParser(conflict_handler="resolve", allow_abbrev=False)
    for flag in MEGATRON:
        parser.add_argument(flag, default=None)
    parser.add_argument("--global-batch-size", type=int)
    slime_arguments.get_slime_extra_args_provider()(parser)
    with mock.patch("sys.argv", words):
        args, _ = parser.parse_known_args()
        args.__dict__.update(vars(slime_arguments.sglang_parse_args()))
    return args
