"""Tries slime's own launch lines with every feature that works on slime, for ``docs/corpus.py --slime-root``.

Shell scripts run as ``launch_lines.py`` describes. Python scripts run unchanged, but their commands run in the same way as shell
scripts. Each launch line goes through slime's own parser (``make test-slime`` installs its requirements), then through the checks
of rl-accel before the first rollout. An existing model folder replaces those in the launch lines.
"""

import contextlib
import copy
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch_lines import launch_lines

from rl_accel import config
from rl_accel.errors import ConfigError
from rl_accel.integrations.slime.custom_config import SLIME_ARGUMENTS, make, messages_of_run, parsed
from rl_accel.integrations.slime.launch_line import read_flags

GIVEN = {"MASTER_ADDR": "127.0.0.1", "BASE_DIR": "/h", "BASE_FOLDER": "/h", "WANDB_KEY": "k"}
"""Environment variables that some scripts expect their user to set."""
FOLDERS = ("scripts", "examples", "tests")
MODELS = ("--hf-checkpoint", "--ref-load", "--opd-teacher-load")
OF_THIS_SGLANG = {f"--sglang-cuda-graph-{name}": f"--sglang-cuda-graph-{name}-decode" for name in ("bs", "max-bs")}
"""Flags of an older SGLang that scripts use, each with its name in the installed SGLang."""
SIZES = {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 2, "vocab_size": 64}
MODEL = {"model_type": "qwen2", **SIZES, "num_attention_heads": 64, "num_key_value_heads": 64}
RUN_PYTHON = """
import contextlib, runpy, subprocess, sys
import slime.utils.misc as misc

def run(command, capture_output=False):
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True)
    return "8" if capture_output else done.stdout

misc.exec_command = run
for script in sys.argv[1:]:
    sys.argv = [script]
    with contextlib.suppress(BaseException):  # what it wants to read may be absent
        runpy.run_path(script, run_name="__main__")
"""


def slime_lines(root: Path) -> Iterator[list[str]]:
    """Yields the launch lines of the shell and Python scripts of a checkout: the words from ``train.py`` on."""
    files = sorted(file for name in FOLDERS for file in (root / name).rglob("*.py"))
    python = [str(file) for file in files if "execute_train(" in file.read_text()]
    given = {**GIVEN, "PYTHONPATH": str(root)}
    given["BASH_FUNC_source%%"] = f'() {{ builtin source "${{1/#\\/root\\/slime/{root}}}"; }}'
    for words in launch_lines(root, given, [sys.executable, "-c", RUN_PYTHON, *python], folders=FOLDERS):
        at = [n for n, word in enumerate(words) if re.search(r"(^|/)train(_async)?\.py$", word)]
        if at:
            yield [OF_THIS_SGLANG.get(word, word) for word in words[at[-1] :]]


def verdicts(root: Path) -> Iterator[tuple[list[str], str, str, str]]:
    """Tries each launch line with slime's own parser and with each feature of rl-accel.

    Yields the launch line, the feature ("" for slime's parser), the outcome (accepted, refused, without effect or crash), and the
    messages to the user.
    """
    sys.path.insert(0, str(root))
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        for line in slime_lines(root):
            line = [model if before in MODELS else word for before, word in zip(["", *line], line, strict=False)]
            try:
                with contextlib.redirect_stderr(io.StringIO()) as errors:
                    args, messages = parsed(line, {})
            except SystemExit:
                yield line, "", "refused", errors.getvalue().strip().splitlines()[-1]
                continue
            yield line, "", "accepted", "; ".join(messages)
            for feature in SLIME_ARGUMENTS:
                yield line, feature, *_verdict(copy.deepcopy(args), feature, line, checked=not messages)


def _verdict(args: object, feature: str, line: list[str], checked: bool) -> tuple[str, str]:
    content = make([feature], {})
    vars(args).update(content)
    try:
        flags = config.resolve([("file", content["rl_accel"])])
        messages = messages_of_run(args, flags, read_flags([*line, "--custom-config-path=ours"]), idle=checked)
    except ConfigError as error:
        return "refused", str(error)
    except Exception as error:
        return "crash", repr(error)
    return "without effect" if "nothing to do" in "".join(messages[:1]) else "accepted", "; ".join(messages)


def corpus(root: Path, counts: Any) -> Any:
    """Tries every launch line below ``root``. Adds the outcomes to ``counts``, a ``Corpus`` of docs/corpus.py, and returns it."""
    for _, feature, outcome, message in verdicts(root):
        if not feature:
            counts.lines[
                f"{outcome} by slime's parser" + (", not by its checks" if message and outcome == "accepted" else "")
            ] += 1
            continue
        flags = ", ".join(f"`{flag}`" for flag in dict.fromkeys(re.findall(r"--[a-z][a-z-]+", message)))
        counts.add(feature, outcome, flags or re.split(", found|: TP", message)[0])  # without the values of a script
    return counts
