"""Tests our adapters against recorded facts of slime's source, and with a checkout, these facts against the checkout.

``python tests/integrations/slime/test_facts.py CHECKOUT`` prints ``facts.json`` anew.
"""

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_accel.errors import PatchRefused
from rl_accel.features import TAIL_BATCHING
from rl_accel.integrations.slime import interfaces, launch_line, reward_timeout, tail_batching
from rl_accel.patches import seams
from rl_accel.patches.slime import abort, gae, reinforce_plus_plus, requests
from rl_accel.switch import SwitchState

RECORDED = json.loads(Path(__file__).with_name("facts.json").read_text())
CHECKS = tuple(check for module in (tail_batching, reward_timeout) for check in module.SWITCHES)
SWITCHES = (*gae.SWITCHES, *reinforce_plus_plus.SWITCHES, *requests.SWITCHES, *abort.SWITCHES)


def _definition(patch):
    """The place where the function of a patch is defined: its target or one of its bindings imports it by name."""
    return next((where for where in patch.bindings if ".utils." in where), patch.target)


def _functions(interface):
    """Parameters, of modules' functions only, as facts name them."""
    target = seams._targets[interface]
    for name, function in seams._methods(interface).items() if ":" not in target else ():
        _, *params = inspect.signature(function).parameters.values()
        yield f"{target}:{name}", [p.name for p in params if p.kind is not p.VAR_POSITIONAL]


INTERFACES = {item for item in vars(interfaces).values() if isinstance(item, type) and item in seams._targets}
WANTED = {
    **dict(each for interface in INTERFACES for each in _functions(interface)),
    **{_definition(patch): [name for name in patch.params if name != "*"] for patch in SWITCHES},
}
"""Parameters by function, as our patches and adapters expect them."""
ARGUMENTS = """custom_rm_path rm_type group_rm reward_key eval_reward_key rollout_sample_hook_path
    custom_rollout_log_function_path custom_advantage_function_path custom_config_path
    custom_megatron_init_path advantage_estimator dynamic_sampling_filter_path"""
SAMPLE_FIELDS = {*interfaces.Sample.__annotations__, *seams._methods(interfaces.Sample)}
"""Fields and methods of ``Sample`` that features use."""


ROLLOUTS = (launch_line.STOCK["rollout_function_path"], launch_line.FINE_TUNING, launch_line.FULLY_ASYNC)
ABORTS = ["slime/backends/sglang_utils/server_control.py", "slime/rollout/sglang_rollout.py"]
"""The function that ``sampler`` replaces, and its only caller."""


def arguments():
    """slime's arguments that features read or set, but for those that Megatron's and SGLang's parsers add."""
    sources = Path(tail_batching.__file__).parent.glob("*.py")
    reads = re.compile(r"""args(?:\.|, ")(\w+)""")  # args.NAME and getattr(args, "NAME")
    read = {name for file in sources for name in reads.findall(file.read_text())}
    read = {name for name in read - {"load", "save"} if not name.startswith("sglang_")}
    return {*read, *ARGUMENTS.split(), *TAIL_BATCHING.slime.arguments}


def facts_of(root):
    """Read a checkout."""
    trees = {}

    def tree(module):
        if module not in trees:
            path = root / (module.replace(".", "/") + ".py")
            path = path if path.exists() else path.with_suffix("") / "__init__.py"
            trees[module] = ast.parse(path.read_text())
        return trees[module]

    functions = {}
    for where in sorted(WANTED):
        module, _, name = where.partition(":")
        node = next((n for n in tree(module).body if getattr(n, "name", None) == name), None)
        functions[where] = None if node is None else [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
    imported = {}
    for where in sorted({where for patch in SWITCHES for where in (patch.target, *patch.bindings)} - functions.keys()):
        module, _, name = where.partition(":")
        nodes = [n for n in tree(module).body if isinstance(n, ast.ImportFrom)]
        imported[where] = any(alias.name == name for node in nodes for alias in node.names)
    sample = _class(tree("slime.utils.types").body, "Sample")
    status = _class(sample.body, "Status")
    source = (root / "slime/utils/arguments.py").read_text()
    flags = re.findall(r'"--([a-z0-9][a-z0-9-]*)"', source)
    default = r'"--{}",\s+type=str,\s+default="(.*?)"'
    defaults = {key: re.findall(default.format(key.replace("_", "-")), source) for key in launch_line.STOCK}
    negated = {"rollout_global_dataset"} if "disable-rollout-global-dataset" in flags else set()
    members = {n.target.id for n in sample.body if isinstance(n, ast.AnnAssign)}
    members |= {n.name for n in sample.body if isinstance(n, ast.FunctionDef)}
    rollouts = {path.rpartition(".") for path in ROLLOUTS}
    sources = {file: file.read_text() for file in sorted((root / "slime").rglob("*.py"))}
    aborts = [file for file, text in sources.items() if re.search(r"abort_servers_until_idle\(|import abort\b", text)]
    return {
        "aborts": [str(file.relative_to(root)) for file in aborts],
        "rollouts": sorted(f"{m}.{f}" for m, _, f in rollouts if f in {getattr(n, "name", None) for n in tree(m).body}),
        "scripts": sorted(file.name for file in root.glob("train*.py")),
        "functions": functions,
        "imported_by_name": imported,
        "sample_fields": sorted(SAMPLE_FIELDS & members),
        "statuses": sorted(n.targets[0].id for n in status.body if isinstance(n, ast.Assign)),
        "defaults": {key: found[0] if found else None for key, found in defaults.items()},
        "flags": sorted(arguments() & {flag.replace("-", "_") for flag in flags} | negated),
    }


def _class(body, name):
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def test_functions_fields_states_and_flags_that_we_use_are_there():
    assert RECORDED["aborts"] == ABORTS
    assert RECORDED["rollouts"] == sorted(ROLLOUTS)
    assert RECORDED["scripts"] == ["train.py", launch_line.ASYNC_SCRIPT]
    assert RECORDED["functions"] == WANTED
    assert RECORDED["imported_by_name"]
    assert all(RECORDED["imported_by_name"].values()), "a patch writes to places that hold the function by name"
    assert RECORDED["sample_fields"] == sorted(SAMPLE_FIELDS)
    assert RECORDED["statuses"] == sorted(interfaces.SampleStatus.__annotations__)
    assert RECORDED["defaults"] == launch_line.STOCK
    assert RECORDED["flags"] == sorted({*arguments(), "rollout_global_dataset"})


def test_the_recorded_facts_are_those_of_the_checkout(slime_root):
    recorded = {key: value for key, value in RECORDED.items() if key != "commit"}
    assert facts_of(slime_root) == recorded, f"slime has changed since {RECORDED['commit']}"


def test_the_slime_that_is_imported_fits_and_one_that_has_changed_is_refused_by_name(slime_root, monkeypatch):
    from slime.rollout import sglang_rollout

    for check in CHECKS:
        check.apply(None)
        assert check.state() is SwitchState.APPLIED
        check.revert()
    monkeypatch.setattr(sglang_rollout, "generate_and_rm", lambda args, samples: None)
    pattern = r"generate_and_rm\(args, sample, sampling_params, evaluation=False\), found \(args, samp"
    with pytest.raises(PatchRefused, match=pattern):
        CHECKS[0].apply(None)


if __name__ == "__main__":
    checkout = sys.argv[1]
    git = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True)
    print(json.dumps({"commit": git.stdout.strip() or "unknown", **facts_of(Path(checkout))}, indent=1))
