"""Access to the locations of framework functions, and checks that a function is the framework's own and unchanged."""

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from rl_accel.errors import NotInThisVersion, PatchRefused

MARK = "__rl_accel_patch__"
"""Name of the attribute that marks a replacement function. The attribute's value is the name of the patch."""

_DECORATOR_HOMES = frozenset({"torch", *sys.stdlib_module_names}) - {"unittest", "__main__"}
"""Packages whose decorators may wrap a framework's function (``torch.no_grad``, ``functools.lru_cache``). A function that another
package has wrapped counts as patched by that package."""

_FORM = re.compile(r"(?P<module>[\w.]+):(?P<path>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)(\[(?P<key>[^\[\]]+)\])?")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Location:
    """Location of an object in a framework: attribute ``name`` of the class or module ``owner``, or item ``name`` of a dict.

    ``where`` is the location as text, ``"pkg.mod:Class.attr"`` or ``"pkg.mod:DICT[key]"``.
    """

    where: str
    owner: Any
    name: str

    def read(self) -> Any:
        """Returns the object now at this location, or None if absent. Does not unwrap staticmethod and classmethod objects."""
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner)).get(self.name)

    def write(self, value: Any) -> None:
        """Puts ``value`` at this location."""
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def is_live(self) -> bool:
        """Returns whether ``where`` still leads to ``owner``. False after the framework's module was unloaded or imported again."""
        try:
            return _locate(self.where).owner is self.owner
        except PatchRefused:
            return False


def find_location(where: str) -> Location:
    """Returns the location that ``where`` names, such as ``"pkg.mod:Class.attr"`` or ``"pkg.mod:DICT[key]"``.

    Raises:
        ValueError: ``where`` has another form.
        NotInThisVersion: there is no object at this location. Inherited attributes do not count.
        PatchRefused: the module is not imported, or the object is not held by a dict, class or module.
    """
    location = _locate(where)
    if location.read() is None:
        inherited = isinstance(location.owner, type) and hasattr(location.owner, location.name)
        raise NotInThisVersion(f"{where} {'is inherited, not defined there' if inherited else 'does not exist'}")
    return location


def restore_copies(target: str, new: Any, old: Any) -> None:
    """Replaces ``new`` by ``old`` in all modules of ``target``'s package that have imported ``new`` by ``from x import f``."""
    package = _package(target)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and isinstance(module, ModuleType):
            for attribute in [key for key, value in vars(module).items() if value is new]:
                setattr(module, attribute, old)


def unpack(raw: Any) -> Any:
    """Returns the function inside a staticmethod or classmethod object ``raw``; any other ``raw`` unchanged."""
    return raw.__func__ if type(raw) in (staticmethod, classmethod) else raw


def repack(raw: Any, function: Any) -> Any:
    """Returns ``function`` as a staticmethod or classmethod if ``raw`` is such an object; else unchanged."""
    return type(raw)(function) if type(raw) in (staticmethod, classmethod) else function


def require_own(function: Any, target: str) -> None:
    """Checks that no other package has replaced or wrapped ``function``, which was found at the location ``target``.

    Decorators of torch and of the standard library are allowed. Raises PatchRefused, which names the replacement or wrapper. Also
    raises PatchRefused if the innermost function is no Python function.
    """
    layers = [function]
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None and inner not in layers:
        layers.append(inner)
    for layer in layers:
        allowed = {_package(target)} | (_DECORATOR_HOMES if layer is not layers[-1] else set())
        if _package(_home(layer)) not in allowed:
            what = "wrapped" if len(layers) > 1 else "replaced"
            raise PatchRefused(f"{target} is already {what} by {describe(layer)}")
    if type(layers[-1]) is not FunctionType:
        raise PatchRefused(f"{target} is a {type(layers[-1]).__name__}, wanted a function")


def require_params(function: Callable[..., Any], params: tuple[str, ...], target: str) -> None:
    """Raises PatchRefused unless the parameter names of ``function`` are ``params``, in this order. A final "*" allows more."""
    names = tuple(inspect.signature(function).parameters)
    if (*names[: len(params) - 1], "*") != params and names != params:
        raise PatchRefused(f"{target} takes ({', '.join(names)}), wanted ({', '.join(params)})")


def require_names(function: Callable[..., Any], names: tuple[str, ...], target: str) -> None:
    """Raises PatchRefused unless the body of ``function`` uses the attributes or global functions ``names``."""
    used = inspect.unwrap(function).__code__.co_names
    if missing := [name for name in names if name not in used]:
        raise PatchRefused(f"{target} no longer uses {' and '.join(missing)}")


def require_version(supports: str, target: str) -> None:
    """Checks that the package of ``target`` has a version allowed by the PEP 508 requirement ``supports``. "" allows any version.

    Raises:
        NotInThisVersion: the version is outside ``supports``.
        PatchRefused: the version is unknown.
    """
    if not supports:
        return
    wanted = Requirement(supports)
    package = _package(target)
    version = version_of(package)
    try:
        fits = wanted.specifier.contains(version or "none", prereleases=True)
    except InvalidVersion as error:
        raise PatchRefused(f"supports {supports}, but the version of {package} is unknown ({error})") from error
    if not fits:
        raise NotInThisVersion(f"supports {supports}, running {version}")


def version_of(package: str) -> str | None:
    """Returns ``__version__`` of the imported ``package``, else the installed version; None if the package is not installed."""
    version = getattr(sys.modules.get(package), "__version__", None)
    try:
        return version if isinstance(version, str) else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def fingerprint(function: Callable[..., Any]) -> str | None:
    """Returns the SHA-256 of the syntax tree of ``function``, or None if the source code cannot be read.

    The hash ignores formatting, comments, docstrings, decorators and annotations. It is the same on every Python version.
    """
    try:
        source = inspect.getsource(inspect.unwrap(function))
        # The source code of a method is indented. Dedenting would also shift the lines of multi-line strings.
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            node.decorator_list = []
            return hashlib.sha256(repr(_canonical(node)).encode()).hexdigest()
    return None


def describe(item: Any) -> str:
    """Returns the origin of ``item`` for messages: its real module and name, or the patch if it is a replacement by rl-accel."""
    if item is None:
        return "nothing"
    inner = unpack(item)
    if mark := getattr(inner, MARK, None):
        return f"rl-accel's patch {mark}"
    code: Any = getattr(inner, "__code__", None)
    name = getattr(code, "co_qualname", None) or getattr(code, "co_name", type(inner).__qualname__)
    return f"{_home(inner)}.{name}"


def _locate(where: str) -> Location:
    match = _FORM.fullmatch(where)
    if match is None:
        raise ValueError(f"a location is 'pkg.mod:attr', 'pkg.mod:Class.attr' or 'pkg.mod:DICT[key]', found {where!r}")
    module = sys.modules.get(match["module"])
    if module is None:
        raise PatchRefused(f"{match['module']} is not imported")
    parents = match["path"].split(".")
    name = match["key"] or parents.pop()
    try:
        owner = functools.reduce(getattr, parents, module)
    except AttributeError as error:
        raise NotInThisVersion(f"{where} does not exist ({error})") from error
    if match["key"]:
        if not isinstance(owner, dict):
            raise PatchRefused(f"{where}: wanted a dict, found {type(owner).__name__}")
    elif not isinstance(owner, type | ModuleType):
        raise PatchRefused(f"{where}: wanted a class or module to hold it, found {type(owner).__name__}")
    return Location(where, owner, name)


def _package(where: str) -> str:
    return re.split(r"[.:]", where)[0]


def _home(layer: Any) -> str:
    if type(layer) is FunctionType:  # functools.wraps copies __module__ from the wrapped function
        return str(layer.__globals__.get("__name__", "?"))
    return type(layer).__module__


def _canonical(node: Any) -> Any:
    # The text of ast.dump is not the same on every Python version.
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return "Assign", (("targets", [_canonical(node.target)]), ("value", _canonical(node.value)))
    if isinstance(node, ast.AST):
        fields = {
            name: value for name, value in ast.iter_fields(node) if name not in ("annotation", "returns", "ctx", "kind")
        }
        if isinstance(node, _FUNCTIONS) and ast.get_docstring(node, clean=False) is not None:
            fields["body"] = node.body[1:]
        parts = ((name, _canonical(value)) for name, value in fields.items())
        return type(node).__name__, tuple((name, part) for name, part in parts if part not in (None, []))
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    return repr(node) if node is not None else None
