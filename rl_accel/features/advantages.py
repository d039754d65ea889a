"""Vectorised twins of the other per-token and per-sample advantage loops. Lossless."""

from dataclasses import dataclass

from rl_accel.feature import ENABLE_AUTOMATIC, Feature, SlimeHooks, flag


@dataclass
class AdvantagesFlags:
    """Flags of ``rl_accel.advantages``."""

    enable: bool | None = flag(None, ENABLE_AUTOMATIC)


ADVANTAGES = Feature(
    name="advantages",
    summary="the other per-token and per-sample advantage loops, vectorised",
    flags=AdvantagesFlags,
    lossless=True,
    automatic=True,
    switches={
        "verl": ("rl_accel.patches.verl.advantages",),
        "slime": ("rl_accel.patches.slime.reinforce_plus_plus",),
    },
    slime=SlimeHooks({"custom_megatron_init_path": "rl_accel.integrations.slime.hooks.megatron_init"}),
)
