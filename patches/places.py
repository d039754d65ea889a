"""The places a function can be bound to: a module or class attribute, or an entry of a dict."""

import functools
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rl_accel.errors import NotInThisVersion, PatchRefused

_FORM = re.compile(r"(?P<module>[\w.]+):(?P<path>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)(\[(?P<key>[^\[\]]+)\])?")


@dataclass(frozen=True)
class Place:
    """One binding, found: ``owner`` holds the object under ``name`` (an attribute, or a key if ``keyed``)."""

    where: str
    owner: Any
    name: str
    keyed: bool

    def __str__(self) -> str:
        return self.where

    def read(self) -> Any:
        """Return what is there now, raw (a staticmethod stays a staticmethod), or None."""
        return self.owner.get(self.name) if self.keyed else vars(self.owner).get(self.name)

    def write(self, value: Any) -> None:
        """Bind ``value``, raw."""
        if self.keyed:
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def is_live(self) -> bool:
        """Whether ``where`` still leads to this owner: false after its module was dropped or imported anew."""
        try:
            return _owner(self.where)[0] is self.owner
        except PatchRefused:
            return False


def find(where: str) -> Place:
    """Return the place that ``where`` (``"pkg.mod:Class.attr"``, ``"pkg.mod:DICT[key]"``) names.

    Raises:
        ValueError: ``where`` has another form.
        NotInThisVersion: the object is not there (a class must hold it itself).
        PatchRefused: its module is not imported.
    """
    owner, name, keyed = _owner(where)
    place = Place(where, owner, name, keyed)
    if place.read() is None:
        inherited = not keyed and isinstance(owner, type) and hasattr(owner, name)
        raise NotInThisVersion(f"{where} {'is inherited, not defined there' if inherited else 'does not exist'}")
    return place


def restore_copies(target: str, new: Any, old: Any) -> None:
    """Put ``old`` wherever a module of the target's package holds ``new``: ``from x import f`` copies what is there then."""
    package = target.partition(":")[0].partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and isinstance(module, ModuleType):
            for attribute in [key for key, value in vars(module).items() if value is new]:
                setattr(module, attribute, old)


def unpack(raw: Any) -> Any:
    """Return the function inside ``raw``: bare, or inside a staticmethod or classmethod."""
    return raw.__func__ if type(raw) in (staticmethod, classmethod) else raw


def repack(raw: Any, function: Any) -> Any:
    """Return ``function`` as the kind of object ``raw`` is: staticmethod, classmethod or bare."""
    return type(raw)(function) if type(raw) in (staticmethod, classmethod) else function


def _owner(where: str) -> tuple[Any, str, bool]:
    match = _FORM.fullmatch(where)
    if match is None:
        raise ValueError(f"a place is 'pkg.mod:attr', 'pkg.mod:Class.attr' or 'pkg.mod:DICT[key]', found {where!r}")
    module = sys.modules.get(match["module"])
    if module is None:
        raise PatchRefused(f"{match['module']} is not imported")
    parents = match["path"].split(".")
    attribute = None if match["key"] else parents.pop()
    try:
        owner = functools.reduce(getattr, parents, module)
    except AttributeError as error:
        raise NotInThisVersion(f"{where} does not exist ({error})") from error
    if attribute is None:
        if not isinstance(owner, dict):
            raise PatchRefused(f"{where}: wanted a dict, found {type(owner).__name__}")
        return owner, match["key"], True
    if not isinstance(owner, type | ModuleType):
        raise PatchRefused(f"{where}: wanted a class or module to hold it, found {type(owner).__name__}")
    return owner, attribute, False
