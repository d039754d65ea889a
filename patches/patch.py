"""Patches: reversible replacements of one function in another package, described as data and checked before use."""

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_accel.errors import PatchRefused, RlAccelError
from rl_accel.patches import upstream
from rl_accel.patches.upstream import Location, find_location, repack, restore_copies, unpack
from rl_accel.switch import SwitchState

logger = logging.getLogger("rl_accel")


@dataclass(frozen=True)
class _Written:
    location: Location
    old: Any
    new: Any


_lock = threading.RLock()
# Mutable state of the patches, which are frozen dataclasses. Patches with equal data share one key.
_written: dict["Patch", tuple[_Written, ...]] = {}
_warned: set["Patch"] = set()


@dataclass(frozen=True)
class Patch:
    """Reversible replacement of one framework function.

    Attributes:
        name: unique name of the patch, such as ``"verl.gae"``.
        target: location of the function: ``"pkg.mod:attr"``, ``"pkg.mod:Class.attr"`` or ``"pkg.mod:DICT[key]"``. In a staticmethod
            or classmethod, the inner function is replaced.
        supports: supported versions as PEP 508 requirement (``"verl>=0.6.1"``), prereleases included; "" for a framework without a
            version.
        params: required parameter names of the function, in order. A final ``"*"`` allows further parameters.
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

    name: str
    target: str
    supports: str
    params: tuple[str, ...]
    make: Callable[[Any, Any], Any]
    bindings: tuple[str, ...] = ()
    fingerprints: tuple[str, ...] = ()
    probe: Callable[[Any, Any, Any], None] | None = None
    no_seam: str = ""
    upstream: str = "none"
    remove_when: str = ""
    independent: bool = False

    def apply(self, settings: Any = None) -> None:
        """Puts the replacement at all locations of the function, or at none. Imports nothing.

        While the patch is applied, further calls change nothing, even with other settings.

        Raises:
            PatchRefused: the function is absent, not imported, has other parameters, or is wrapped or replaced by other code; the
                framework version is unsupported; ``make`` or ``probe`` raised an exception; or a location could not be written.
            NotInThisVersion: the patch is ``independent``, and the function is absent or the framework version unsupported.
        """
        with _lock:
            if self._is_applied():
                return
            locations, original = self._inspect()
            replacement = self._build(original, settings)
            _written[self] = self._write(locations, original, replacement)

    def state(self) -> SwitchState:
        """Returns APPLIED if all locations hold the replacement, FOREIGN if other code has changed one, WAITING if not applied."""
        with _lock:
            written = self._record()
            if not written:
                return SwitchState.WAITING
            is_ours = all(w.location.read() is w.new for w in written)
            return SwitchState.APPLIED if is_ours else SwitchState.FOREIGN

    def revert(self) -> None:
        """Restores the original objects, also in modules of the framework that have imported the replacement by name.

        Raises:
            PatchRefused: other code has wrapped or overwritten the replacement; reverting would silently remove that change.
        """
        with _lock:
            if self._is_applied():
                for w in reversed(_written.pop(self)):
                    w.location.write(w.old)
                    restore_copies(self.target, w.new, w.old)

    def _record(self) -> tuple[_Written, ...]:
        written = _written.get(self, ())
        # A module that was dropped and imported again holds the original function; our replacement is gone with the old module.
        if any(not w.location.is_live() for w in written):
            del _written[self]
            return ()
        return written

    def _is_applied(self) -> bool:
        state = self.state()
        if state is SwitchState.FOREIGN:
            other = next(w.location for w in self._record() if w.location.read() is not w.new)
            holder = upstream.describe(other.read())
            raise PatchRefused(f"{self.name}: applied, but {other} now holds {holder}; undo that first")
        return state is SwitchState.APPLIED

    def _inspect(self) -> tuple[list[Location], Any]:
        try:
            locations = [find_location(self.target)]
            original = unpack(locations[0].read())
            upstream.require_version(self.supports, self.target)
            upstream.require_own(original, self.target)
            upstream.require_params(original, self.params, self.target)
            locations += [find_location(where) for where in self.bindings]
            for location in locations[1:]:
                if unpack(location.read()) is not original:
                    raise PatchRefused(
                        f"{location} holds {upstream.describe(location.read())}, not the object of {locations[0]}"
                    )
        except PatchRefused as error:
            kind = type(error) if self.independent else PatchRefused
            raise kind(f"{self.name}: {error}") from error
        return locations, original

    def _build(self, original: Any, settings: Any) -> Any:
        if self.fingerprints and self not in _warned and upstream.fingerprint(original) not in self.fingerprints:
            _warned.add(self)
            logger.warning("rl-accel: %s was not tested with this body of %s", self.name, self.target)
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

    def _write(self, locations: list[Location], original: Any, replacement: Any) -> tuple[_Written, ...]:
        plan = [_Written(location, location.read(), repack(location.read(), replacement)) for location in locations]
        done: list[_Written] = []
        try:
            for w in plan:
                w.location.write(w.new)
                done.append(w)
        except Exception as error:
            refused = plan[len(done)].location
            for w in reversed(done):
                w.location.write(w.old)
            raise PatchRefused(f"{self.name}: {refused} cannot be written, nothing stays patched: {error!r}") from error
        return tuple(plan)
