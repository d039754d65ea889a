"""Adaptive waiting for finished rollouts in place of a fixed 2-second poll. Lossless."""

from dataclasses import dataclass

from rl_accel.feature import ENABLE_AUTOMATIC, Feature, flag


@dataclass
class SamplerFlags:
    """Flags of ``rl_accel.sampler``."""

    enable: bool | None = flag(None, ENABLE_AUTOMATIC)
    max_cpu_share: float = flag(0.05, "largest share of one core that polling may cost", minimum=0.001, maximum=1.0)
    max_delay_s: float = flag(
        0.02, "seconds added at most after the last needed response while a poll is cheap", minimum=0.001, maximum=60.0
    )


SAMPLER = Feature(
    name="sampler",
    summary="adaptive waiting for finished rollouts instead of a 2 s poll",
    flags=SamplerFlags,
    lossless=True,
    automatic=True,
    switches={"verl": ("rl_accel.patches.verl.sampler",)},
)
