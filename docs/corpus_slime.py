"""Tries slime's own launch lines with every feature that has a part for slime, for ``docs/corpus.py --slime-root``.

Scripts run with stubs for every program; Python scripts run unchanged except that their commands are only recorded. Each recorded
launch line goes through slime's own parser (``make test-slime`` installs its requirements), then through the steps of a run before
its first rollout. Model folders are replaced by one that exists.
"""

import contextlib
import copy
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_accel import config
from rl_accel.errors import ConfigError
from rl_accel.integrations.slime.custom_config import HOOKS, make, parsed
from rl_accel.integrations.slime.launch_line import put_in_place, put_init_in_place, read

RECORDED = ("python", "python3", "ray", "nohup", "torchrun")
SILENT = (
    "rm pkill kill killall sudo pip git wget curl hf docker ssh scp mkdir mv cp chmod sleep rsync touch ln nvidia-smi"
)
REAL = "bash sh cat dirname basename date sed awk grep head tail wc env seq sort cut tr printf hostname"
FOLDERS = ("scripts", "examples", "tests")
MODELS = ("--hf-checkpoint", "--ref-load", "--opd-teacher-load")
OF_THIS_SGLANG = {f"--sglang-cuda-graph-{name}": f"--sglang-cuda-graph-{name}-decode" for name in ("bs", "max-bs")}
"""Flags that an older SGLang had, and those that the installed one has for them."""
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


def launch_lines(root: Path) -> Iterator[list[str]]:
    """Run each launch script of a checkout and yield the words after ``train.py`` of what it would launch, without repetitions."""
    scripts = sorted(path for name in FOLDERS for path in (root / name).rglob("*.sh"))
    python = sorted(
        path for name in FOLDERS for path in (root / name).rglob("*.py") if "execute_train(" in path.read_text()
    )
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        for name in RECORDED:
            _stub(folder, name, f"import json\nopen({str(record)!r}, 'a').write(json.dumps(sys.argv) + '\\n')")
        for name in SILENT.split():
            _stub(folder, name, "print('megatron-core 0 /h')" if name == "pip" else "")
        for name in REAL.split():
            Path(folder, name).symlink_to(shutil.which(name, path="/usr/bin:/bin") or "/bin/true")
        environment = {"PATH": folder, "HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(root)}
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "BASE_DIR": "/h",
            "BASE_FOLDER": "/h",
            "WANDB_KEY": "k",
        }  # which some want of their user
        environment["BASH_FUNC_ulimit%%"] = "() { :; }"
        environment["BASH_FUNC_source%%"] = f'() {{ builtin source "${{1/#\\/root\\/slime/{root}}}"; }}'
        environment["BASH_FUNC_cd%%"] = '() { builtin cd "$@" 2>/dev/null || :; }'
        for command in (*(["/bin/bash", script] for script in scripts), [sys.executable, "-c", RUN_PYTHON, *python]):
            subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=300)
            yield from _recorded(record)


def _stub(folder: str, name: str, body: str) -> None:
    Path(folder, name).write_text(f"#!{sys.executable} -S\nimport sys\n{body}\n")
    Path(folder, name).chmod(0o755)


def _recorded(record: Path) -> Iterator[list[str]]:
    """Yield what has been recorded since the last call, without repetitions: scripts of several nodes launch once for each."""
    for call in dict.fromkeys(record.read_text().splitlines() if record.exists() else ()):
        words = [OF_THIS_SGLANG.get(word, word) for word in json.loads(call)]
        at = [n for n, word in enumerate(words, 1) if re.search(r"(^|/)train(_async)?\.py$", word)]
        if at:
            yield words[at[-1] :]
    record.unlink(missing_ok=True)


def verdicts(root: Path) -> Iterator[tuple[list[str], str, str, str]]:
    """Yield launch line, feature ("" for slime's own parser), outcome and what a user is told.

    Outcomes are accepted, refused, without effect, and crash.
    """
    sys.path.insert(0, str(root))
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        for line in launch_lines(root):
            line = [model if before in MODELS else word for before, word in zip(["", *line], line, strict=False)]
            try:
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    args, told = parsed(line, {})
            except SystemExit:
                yield line, "", "refused", said.getvalue().strip().splitlines()[-1]
                continue
            yield line, "", "accepted", "; ".join(told)
            for feature in HOOKS:
                yield line, feature, *_verdict(copy.deepcopy(args), feature, line)


def _verdict(args: object, feature: str, line: list[str]) -> tuple[str, str]:
    content = make([feature], {})
    vars(args).update(content)
    try:
        flags = config.resolve([("file", content["rl_accel"])])
        named = read([*line, "--custom-config-path=ours"])
        told = [*put_init_in_place(args, flags, named), *put_in_place(args, flags, named)]
    except ConfigError as error:
        return "refused", str(error)
    except Exception as error:
        return "crash", repr(error)
    return "without effect" if told and "nothing to do" in told[0] else "accepted", "; ".join(told)


def corpus(root: Path, counts: Any) -> Any:
    """Count the outcomes of every launch line below ``root`` in ``counts``, a ``Corpus`` of docs/corpus.py, and return it."""
    for _, feature, outcome, told in verdicts(root):
        if not feature:
            counts.lines[
                f"{outcome} by slime's parser" + (", not by its checks" if told and outcome == "accepted" else "")
            ] += 1
            continue
        flags = ", ".join(f"`{flag}`" for flag in dict.fromkeys(re.findall(r"--[a-z][a-z-]+", told)))
        counts.add(feature, outcome, flags or re.split(", found|: TP", told)[0])  # without the values of a script
    return counts
