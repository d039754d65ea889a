"""Which features exist, what each may change, and by name (never by import) which patches carry it out."""

import importlib.util
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A feature of the pack: a section of :class:`rl_accel.config.RlAccelConfig` and what carries it out.

    ``lossless`` features cannot change training results. A bare ``rl_accel.enable()`` turns them on, unless they are
    ``by_name_only``.
    ``patches`` are modules with a ``PATCHES`` tuple, by framework; they are imported only when the feature is on. A tuple
    may also hold a :class:`~rl_accel.patches.registration.Registration`: an integration on official seams has its switch
    and its state there.
    """

    name: str
    summary: str
    lossless: bool
    patches: dict[str, tuple[str, ...]]
    by_name_only: bool = False

    @property
    def automatic(self) -> bool:
        """Whether a bare ``rl_accel.enable()`` turns it on."""
        return self.lossless and not self.by_name_only


FEATURES: tuple[Feature, ...] = (
    Feature(
        name="gae",
        summary="GAE as a scan instead of a loop over tokens",
        lossless=True,
        patches={"verl": ("rl_accel.patches.verl.gae",), "slime": ("rl_accel.patches.slime.gae",)},
    ),
    Feature(
        name="advantages",
        summary="the other per-token and per-sample advantage loops, vectorised",
        lossless=True,
        patches={
            "verl": (
                "rl_accel.patches.verl.outcome",
                "rl_accel.patches.verl.reinforce_plus_plus",
                "rl_accel.patches.verl.optimal_token_baseline",
                "rl_accel.patches.verl.whiten",
            ),
            "slime": ("rl_accel.patches.slime.reinforce_plus_plus",),
        },
    ),
    Feature(
        name="sampler",
        summary="adaptive waiting for finished rollouts instead of a 2 s poll",
        lossless=True,
        patches={"verl": ("rl_accel.patches.verl.sampler",)},
    ),
    Feature(
        name="tail_batching",
        summary="short rounds that do not wait for the longest responses, and lose no prompt",
        lossless=False,
        patches={
            "verl": ("rl_accel.integrations.verl.tail_batching.mode",),
            "slime": ("rl_accel.patches.slime.requests",),
        },
    ),
    Feature(
        name="reward_timeout",
        summary="executions of rewards that end soon after correct ones have, and are killed then",
        lossless=False,
        patches={
            "verl": ("rl_accel.integrations.verl.reward_timeout.mode",),
            "slime": ("rl_accel.patches.slime.reward_seams",),
        },
    ),
    Feature(
        name="telemetry",
        summary="where a step's time goes: stages, idle share of generation, completion times, preemptions",
        lossless=True,
        patches={"verl": ("rl_accel.integrations.verl.telemetry.mode",)},
        by_name_only=True,  # it speeds nothing up and leaves a file
    ),
    Feature(
        name="tp_replan",
        summary="a tensor-parallel size of the rollout that follows its preemptions",
        lossless=False,
        patches={
            "verl": ("rl_accel.integrations.verl.tp_replan.mode",),
            "slime": ("rl_accel.patches.slime.rollout_log_seams",),
        },
    ),
)


def is_installed(framework: str) -> bool:
    """Whether the package ``framework`` can be imported here; does not import it."""
    if framework in sys.modules:
        return True
    try:
        return importlib.util.find_spec(framework) is not None
    except (ImportError, ValueError):
        return False
