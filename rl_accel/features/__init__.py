"""The features of the pack. A feature is declared once, in a file of its own, and listed here in one line.

The order is that of tables and messages, and the one in which features choose verl's extension points.
"""

from typing import Any

from rl_accel.feature import Feature
from rl_accel.features.advantages import ADVANTAGES
from rl_accel.features.gae import GAE
from rl_accel.features.reward_timeout import REWARD_TIMEOUT
from rl_accel.features.sampler import SAMPLER
from rl_accel.features.tail_batching import TAIL_BATCHING
from rl_accel.features.telemetry import TELEMETRY
from rl_accel.features.tp_replan import TP_REPLAN

FEATURES: tuple[Feature[Any], ...] = (
    GAE,
    ADVANTAGES,
    SAMPLER,
    TAIL_BATCHING,
    REWARD_TIMEOUT,
    TELEMETRY,
    TP_REPLAN,
)

FLAG_READERS = {"verl": "rl_accel.patches.verl.config_intake"}
"""By framework, the module with the switches that read flags from its configuration: all that is armed without a flag."""

LOGGERS = {"verl": "rl_accel.patches.verl.trainer_metrics"}
"""By framework, the module with the switch that adds our numbers to its log: armed while any feature is on."""
