"""Patches: reversible replacements of one function in another package, described as data and checked before use."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rl_accel.errors import PatchRefused, RlAccelError
from rl_accel.log import warn_once
from rl_accel.patches import upstream
from rl_accel.patches.upstream import Location, find_location, repack, restore_copies, unpack
from rl_accel.switch import Switch, SwitchState

_lock = threading.RLock()


@dataclass(frozen=True)
class Patch(Switch):
    """Reversible replacement of one framework function.

    Attributes:
        target: location of the function: ``"pkg.mod:attr"``, ``"pkg.mod:Class.attr"`` or ``"pkg.mod:DICT[key]"``. In a staticmethod
            or classmethod, the inner function is replaced.
        supports: supported versions as PEP 508 requirement (``"verl>=0.6.1"``), prereleases included; "": all versions.
        params: required parameter names of the function, in order. A final ``"*"`` allows further parameters.
        uses: attributes and functions that the body of the function must use, because the replacement relies on them.
        make: function ``make(original, settings)`` that returns the replacement. ``settings`` are the feature's flags.
        bindings: other locations of the same function, which are replaced too. Their modules must be imported already.
        fingerprints: hashes of the tested function bodies, see :func:`~rl_accel.patches.upstream.fingerprint`. An unknown body only
            causes a warning.
        probe: function ``probe(original, replacement, settings)`` that compares both functions before anything is replaced. Any
            exception refuses the patch.
        no_seam: reason why no official extension point of the framework can be used.
        upstream: URL of the framework's issue or pull request on the same problem, or "none".
        remove_when: change to the framework that makes the patch unnecessary.
        independent: True if only this patch stays off when the framework version lacks the function or is not supported; False if
            the whole feature stays off.
    """

    params: tuple[str, ...]
    make: Callable[[Any, Any], Any]
    supports: str = ""
    uses: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()
    probe: Callable[[Any, Any, Any], None] | None = None
    no_seam: str = ""
    upstream: str = "none"
    remove_when: str = ""
    independent: bool = False
    # Each location that was written, with the object before and the object now there.
    _written: list[tuple[Location, Any, Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    def apply(self, settings: Any = None) -> None:
        """Puts the replacement at all locations of the function, or at none. Imports nothing.

        Raises:
            PatchRefused: the function is absent, not imported, has other parameters, or is wrapped or replaced by other code; the
                framework version is unsupported; ``make`` or ``probe`` raised an exception; or a location could not be written.
            NotInThisVersion: the patch is ``independent``, and the function is absent or the framework version unsupported.
        """
        with _lock:
            if not self._is_applied():
                locations, original = self._inspect()
                self._write(locations, self._build(original, settings))

    def state(self) -> SwitchState:
        with _lock:
            # A module that was dropped and imported again holds the original function; our replacement is gone with the old module.
            if not all(location.is_live() for location, _, _ in self._written):
                self._written.clear()
            if not self._written:
                return SwitchState.WAITING
            return SwitchState.FOREIGN if self._changed_by_others() else SwitchState.APPLIED

    def revert(self) -> None:
        """Restores the original objects, also in modules of the framework that have imported the replacement by name.

        Raises PatchRefused if other code has wrapped or overwritten the replacement: reverting would remove that change.
        """
        with _lock:
            if self._is_applied():
                self._restore()

    def _changed_by_others(self) -> list[Location]:
        return [location for location, _, new in self._written if location.read() is not new]

    def _is_applied(self) -> bool:
        state = self.state()
        if state is SwitchState.FOREIGN:
            other = self._changed_by_others()[0]
            holder = upstream.describe(other.read())
            raise PatchRefused(f"{self.name}: applied, but {other.where} now holds {holder}; undo that first")
        return state is SwitchState.APPLIED

    def _inspect(self) -> tuple[list[Location], Any]:
        try:
            locations = [find_location(where) for where in (self.target, *self.bindings)]
            original = unpack(locations[0].read())
            upstream.require_version(self.supports, self.target)
            upstream.require_own(original, self.target)
            upstream.require_params(original, self.params, self.target)
            upstream.require_names(original, self.uses, self.target)
            for location in locations:
                if unpack(held := location.read()) is not original:
                    raise PatchRefused(f"{location.where} holds {upstream.describe(held)}, not that of {self.target}")
        except PatchRefused as error:
            kind = type(error) if self.independent else PatchRefused
            raise kind(f"{self.name}: {error}") from error
        return locations, original

    def _build(self, original: Any, settings: Any) -> Any:
        if self.fingerprints and upstream.fingerprint(original) not in self.fingerprints:
            warn_once(self, "rl-accel: %s was not tested with this body of %s", self.name, self.target)
        try:
            replacement = self.make(original, settings)
            if replacement is original:
                raise PatchRefused("make() returned the original")
            functools.update_wrapper(replacement, original)
            setattr(replacement, upstream.MARK, self.name)
        except RlAccelError as error:
            raise PatchRefused(f"{self.name}: {error}") from error
        except Exception as error:  # make() may fail in any way on an unknown framework version
            raise PatchRefused(f"{self.name}: cannot be made for this version ({error!r})") from error
        if self.probe is not None:
            try:
                self.probe(original, replacement, settings)
            except Exception as error:
                raise PatchRefused(f"{self.name}: parity probe against {self.target} failed: {error}") from error
        return replacement

    def _write(self, locations: list[Location], replacement: Any) -> None:
        for location in locations:
            old = location.read()
            new = repack(old, replacement)
            try:
                location.write(new)
            except Exception as error:
                self._restore()
                raise PatchRefused(
                    f"{self.name}: {location.where} cannot be written, nothing stays patched: {error!r}"
                ) from error
            self._written.append((location, old, new))

    def _restore(self) -> None:
        for location, old, new in reversed(self._written):
            location.write(old)
            restore_copies(self.target, new, old)
        self._written.clear()
