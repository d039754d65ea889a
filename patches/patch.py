"""A reversible replacement of one function of another package, described as data and checked before it is made."""

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
# What a frozen Patch must remember. Keyed by the patch itself: equal data is the same patch.
_written: dict["Patch", tuple[_Written, ...]] = {}
_warned: set["Patch"] = set()


@dataclass(frozen=True)
class Patch:
    """One function of a framework and what to put in its place.

    Attributes:
        name: unique, ``"verl.gae"``.
        target: where the function lives: ``"pkg.mod:attr"``, ``"pkg.mod:Class.attr"`` or ``"pkg.mod:DICT[key]"``.
            A staticmethod or classmethod stays one; ``make`` sees the function inside.
        supports: versions it is meant for, PEP 508 (``"verl>=0.6.1"``); prereleases count. Compared with
            ``__version__`` of the imported package, not with an installed dist-info that may lie beside a checkout.
            Empty for a framework that is run from a checkout and has no version: parameters and probe decide.
        params: parameter names the function must have, in order.
        make: ``make(original, settings) -> replacement``.
        bindings: further places that hold the same function. Their modules must be imported when the patch is
            applied, or it is refused; nothing is patched later behind the user's back.
        fingerprints: :func:`~rl_accel.patches.upstream.fingerprint` of the bodies this patch was tested with. An
            unknown body costs one warning; whether the patch goes on is up to ``probe``.
        probe: ``probe(original, replacement, settings)`` compares both before the first write; whatever it raises refuses.
        no_seam: why no official extension point serves.
        upstream: address of an issue or pull request on the same matter, or "none".
        remove_when: what must have happened upstream for the patch to go.
        independent: the other patches of the feature are of use without this one, so that a version of the framework
            without its function, or outside ``supports``, does not stop the feature.
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
        """Say whether the patch could be applied now. Writes nothing; imports nothing.

        Raises:
            PatchRefused: the target or a binding is absent or not imported, not upstream's own function (already
                wrapped or replaced by someone), has other parameters, or its package has an unsupported version.
                Absence and version are a NotInThisVersion where the patch is ``independent``.
        """
        with _lock:
            if not self._is_applied():
                self._inspect()

    def apply(self, settings: Any = None) -> None:
        """Put the replacement in every place, or in none. A second call, whatever its settings, does nothing.

        Raises:
            PatchRefused: as :meth:`check`; or ``make`` or ``probe`` refused, or a write failed (all undone), or ours
                was overlaid by someone else since it was applied.
        """
        with _lock:
            if self._is_applied():
                return
            places, original = self._inspect()
            replacement = self._build(original, settings)
            _written[self] = self._write(places, original, replacement)

    def state(self) -> SwitchState:
        """Return the state as the places show it now, not as we remember it."""
        with _lock:
            written = self._record()
            if not written:
                return SwitchState.PENDING
            ours = all(w.place.read() is w.new for w in written)
            return SwitchState.APPLIED if ours else SwitchState.FOREIGN

    def revert(self) -> None:
        """Put back the very objects that were there, also where a module of the framework has imported ours by name since.

        Does nothing if the patch is not applied.

        Raises:
            PatchRefused: someone wrapped or replaced ours; undoing would silently remove theirs.
        """
        with _lock:
            if self._is_applied():
                for w in reversed(_written.pop(self)):
                    w.place.write(w.old)
                    restore_copies(self.target, w.new, w.old)

    def _record(self) -> tuple[_Written, ...]:
        written = _written.get(self, ())
        # A module that was dropped and imported anew has fresh, unpatched places: what we wrote is gone with the old.
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
        except Exception as error:  # what make() needs of an unknown upstream may be missing in any way
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
