"""A reversible replacement of one function of another package, described as data and checked before it is applied."""

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_accel.errors import PatchRefused, RlAccelError
from rl_accel.patches import upstream
from rl_accel.patches.upstream import Place, find, repack, restore_copies, unpack
from rl_accel.switch import SwitchState

logger = logging.getLogger("rl_accel")


@dataclass(frozen=True)
class _Written:
    place: Place
    old: Any
    new: Any


_lock = threading.RLock()
# State of patches, which are frozen. Keyed by the patch itself: equal data is the same patch.
_written: dict["Patch", tuple[_Written, ...]] = {}
_warned: set["Patch"] = set()


@dataclass(frozen=True)
class Patch:
    """One function of a framework and its replacement.

    Attributes:
        name: unique name, such as ``"verl.gae"``.
        target: location of the function: ``"pkg.mod:attr"``, ``"pkg.mod:Class.attr"`` or ``"pkg.mod:DICT[key]"``.
            A staticmethod or classmethod keeps its kind; ``make`` gets the function inside.
        supports: supported versions as PEP 508 requirement (``"verl>=0.6.1"``); prereleases count. Compared with
            ``__version__`` of the imported package, if any; the dist-info of another installed copy may differ.
            Empty for a framework that is run from a checkout and has no version: parameters and probe decide.
        params: required parameter names of the function, in order.
        make: ``make(original, settings) -> replacement``.
        bindings: other places that hold the same function. Their modules must be imported before the patch is applied;
            otherwise the patch is refused. Nothing is patched later without notice.
        fingerprints: :func:`~rl_accel.patches.upstream.fingerprint` of the function bodies this patch was tested with. An
            unknown body only causes one warning; ``probe`` decides whether the patch is applied.
        probe: ``probe(original, replacement, settings)`` compares both before the first write; any exception refuses the patch.
        no_seam: reason why no official extension point can be used.
        upstream: URL of an issue or pull request on the same problem, or "none".
        remove_when: upstream change after which the patch can be removed.
        independent: whether the feature's other patches are useful without this patch. If so, a framework version that
            lacks the function, or is outside ``supports``, does not stop the feature.
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

    def check(self) -> None:
        """Checks whether the patch can be applied now. Writes nothing; imports nothing.

        Raises:
            PatchRefused: the target or a binding is absent, is not imported, is already wrapped or replaced by someone
                else or has other parameters; or the package has an unsupported version. If the patch is
                ``independent``, absence and an unsupported version raise NotInThisVersion.
        """
        with _lock:
            if not self._is_applied():
                self._inspect()

    def apply(self, settings: Any = None) -> None:
        """Writes the replacement to all places, or to none. A second call does nothing, whatever its settings.

        Raises:
            PatchRefused: as :meth:`check`; ``make`` or ``probe`` refused; a write failed (all writes are undone); or someone
                else has wrapped the replacement since the patch was applied.
        """
        with _lock:
            if self._is_applied():
                return
            places, original = self._inspect()
            replacement = self._build(original, settings)
            _written[self] = self._write(places, original, replacement)

    def state(self) -> SwitchState:
        """Returns the state, read from the places that hold the function."""
        with _lock:
            written = self._record()
            if not written:
                return SwitchState.PENDING
            ours = all(w.place.read() is w.new for w in written)
            return SwitchState.APPLIED if ours else SwitchState.FOREIGN

    def revert(self) -> None:
        """Restores the identical original objects, also in framework modules that have since imported the replacement by name.

        Does nothing if the patch is not applied.

        Raises:
            PatchRefused: someone else wrapped or overwrote the replacement; reverting would silently remove that change.
        """
        with _lock:
            if self._is_applied():
                for w in reversed(_written.pop(self)):
                    w.place.write(w.old)
                    restore_copies(self.target, w.new, w.old)

    def _record(self) -> tuple[_Written, ...]:
        written = _written.get(self, ())
        # A module that was dropped and imported again has new, unpatched places; our writes are gone with the old module.
        if any(not w.place.is_live() for w in written):
            del _written[self]
            return ()
        return written

    def _is_applied(self) -> bool:
        state = self.state()
        if state is SwitchState.FOREIGN:
            other = next(w.place for w in self._record() if w.place.read() is not w.new)
            found = upstream.describe(other.read())
            raise PatchRefused(f"{self.name}: applied, but {other} now holds {found}; undo that first")
        return state is SwitchState.APPLIED

    def _inspect(self) -> tuple[list[Place], Any]:
        try:
            places = [find(self.target)]
            original = unpack(places[0].read())
            upstream.require_version(self.supports, self.target)
            upstream.require_own(original, self.target)
            upstream.require_params(original, self.params, self.target)
            places += [find(where) for where in self.bindings]
            for place in places[1:]:
                if unpack(place.read()) is not original:
                    raise PatchRefused(
                        f"{place} holds {upstream.describe(place.read())}, not the object of {places[0]}"
                    )
        except PatchRefused as error:
            kind = type(error) if self.independent else PatchRefused
            raise kind(f"{self.name}: {error}") from error
        return places, original

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
        except Exception as error:  # make() may fail in any way on an unknown version
            raise PatchRefused(f"{self.name}: cannot be made for this version ({error!r})") from error
        if self.probe is not None:
            try:
                self.probe(original, replacement, settings)
            except Exception as error:
                raise PatchRefused(f"{self.name}: parity probe against {self.target} failed: {error}") from error
        return replacement

    def _write(self, places: list[Place], original: Any, replacement: Any) -> tuple[_Written, ...]:
        plan = [_Written(place, place.read(), repack(place.read(), replacement)) for place in places]
        done: list[_Written] = []
        try:
            for w in plan:
                w.place.write(w.new)
                done.append(w)
        except Exception as error:
            refused = plan[len(done)].place
            for w in reversed(done):
                w.place.write(w.old)
            raise PatchRefused(f"{self.name}: {refused} cannot be written, nothing stays patched: {error!r}") from error
        return tuple(plan)
