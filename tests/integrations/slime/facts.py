"""What our adapters need to know of slime, read from a checkout without importing it.

``python facts.py CHECKOUT`` prints it as JSON, for ``facts.json``; ``python facts.py CHECKOUT --compare`` shows what has changed.
"""

import ast
import difflib
import json
import re
import subprocess
import sys
from pathlib import Path

from rl_accel.features import TAIL_BATCHING
from rl_accel.integrations.slime import reward_timeout as reward_seams
from rl_accel.integrations.slime import tail_batching, tp_replan
from rl_accel.patches.slime import gae, reinforce_plus_plus, requests

FILE = Path(__file__).with_name("facts.json")
SEAMS = (tail_batching, reward_seams, tp_replan)
CHECKS = tuple(check for module in SEAMS for check in module.SWITCHES)
SWITCHES = (*gae.SWITCHES, *reinforce_plus_plus.SWITCHES, *requests.SWITCHES)


def wanted():
    """Parameters by function, as our patches and adapters expect them."""
    patched = {_definition(patch): patch.params for patch in SWITCHES}
    parameters = {where: params for check in CHECKS for where, params in check.seams.items()}
    return {where: list(params) for where, params in {**parameters, **patched}.items()}


def sample_fields():
    """Fields of ``Sample`` that features read."""
    return {name for check in CHECKS for name in check.attributes["slime.utils.types:Sample"]}


def arguments():
    """slime's arguments that features read or set, but for those that Megatron's and SGLang's parsers add."""
    sources = Path(tail_batching.__file__).parent.glob("*.py")
    read = {name for file in sources for name in re.findall(r"args\.(\w+)", file.read_text())}
    read -= {"load", "save", "sglang_router_ip", "sglang_router_port"}
    named = {name for module in (reward_seams, tp_replan) for name in module.ARGUMENTS}
    return read | named | {*TAIL_BATCHING.slime.arguments, "custom_config_path", "custom_megatron_init_path"}


def _definition(patch):
    """Where the function of a patch is defined: its target or one of its bindings imports it by name."""
    return next(where for where in (patch.target, *patch.bindings) if ".utils." in where)


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
    for where in wanted():
        module, _, name = where.partition(":")
        node = next((n for n in tree(module).body if getattr(n, "name", None) == name), None)
        functions[where] = None if node is None else [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
    imported = {}
    for patch in SWITCHES:
        for where in (patch.target, *patch.bindings):
            module, _, name = where.partition(":")
            if where not in functions:
                nodes = [n for n in tree(module).body if isinstance(n, ast.ImportFrom)]
                imported[where] = any(alias.name == name for node in nodes for alias in node.names)
    utils = {node.name for node in tree("slime.utils.ppo_utils").body if isinstance(node, ast.FunctionDef)}
    sample = _class(tree("slime.utils.types").body, "Sample")
    status = _class(sample.body, "Status")
    flags = re.findall(r'"--([a-z0-9][a-z0-9-]*)"', (root / "slime/utils/arguments.py").read_text())
    return {
        "functions": functions,
        "imported_by_name": imported,
        "scans": sorted({"chunked_gae", "chunked_discounted_returns"} & utils),
        "sample_fields": sorted(sample_fields() & {n.target.id for n in sample.body if isinstance(n, ast.AnnAssign)}),
        "statuses": sorted(n.targets[0].id for n in status.body if isinstance(n, ast.Assign)),
        "flags": sorted(arguments() & {flag.replace("-", "_") for flag in flags} | _negated(flags)),
    }


def _class(body, name):
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)


def _negated(flags):
    return {"rollout_global_dataset"} if "disable-rollout-global-dataset" in flags else set()


def main():
    root = Path(sys.argv[1])
    if not (root / "slime/utils/arguments.py").is_file():
        raise SystemExit(f"{root} is no checkout of slime")
    found = facts_of(root)
    if "--compare" in sys.argv:
        recorded = {key: value for key, value in json.loads(FILE.read_text()).items() if key != "commit"}
        before, after = (json.dumps(facts, indent=1).splitlines() for facts in (recorded, found))
        changes = list(difflib.unified_diff(before, after, "recorded", "checkout", lineterm="", n=1))
        print("\n".join(changes) or "nothing has changed")
        raise SystemExit(bool(changes))
    commit = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    print(json.dumps({"commit": commit or "unknown", **found}, indent=1))


if __name__ == "__main__":
    main()
