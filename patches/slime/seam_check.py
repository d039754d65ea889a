"""A look at slime, in the place of a patch: for features that replace nothing because slime's flags name their functions."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.patches.patch import PatchState
from rl_accel.patches.slime import seams


@dataclass(frozen=True)
class SeamCheck:
    """Stands in a module's ``PATCHES`` for a feature that changes nothing. "Applied" means that this slime fits.

    Attributes:
        name, feature, target: as a patch has them.
        functions: parameters by function of slime, as the feature expects them.
        fields: of ``Sample`` that it reads.
    """

    name: str
    feature: str
    target: str
    functions: Mapping[str, tuple[str, ...]]
    fields: Sequence[str]

    def state(self) -> PatchState:
        """Return what slime's own modules say."""
        if self.target.partition(":")[0] not in sys.modules:
            return PatchState.PENDING
        return PatchState.PENDING if seams.problem(self.feature, self.functions, self.fields) else PatchState.APPLIED

    def apply(self, _settings: Any) -> None:
        """Look whether everything is there.

        Raises:
            PatchRefused: names what is wanted and what was found.
        """
        if problem := seams.problem(self.feature, self.functions, self.fields):
            raise PatchRefused(problem)

    def revert(self) -> None:
        """There is nothing to undo."""
