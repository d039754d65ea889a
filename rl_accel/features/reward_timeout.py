"""Executions that end soon after correct ones have, and are killed then. Changes rewards, so it is never automatic."""

from dataclasses import dataclass

from rl_accel.feature import ENABLE, Feature, SlimeHooks, flag

ISOLATION = ("auto", "process", "bubblewrap")


@dataclass
class RewardTimeoutFlags:
    """Flags of ``rl_accel.reward_timeout``; seconds throughout."""

    enable: bool | None = flag(None, ENABLE)
    scale: float = flag(1.5, "the limit over the longest correct execution of the test case", minimum=1.0)
    slack: float = flag(0.5, "seconds added to the limit", minimum=0.0)
    minimum: float = flag(2.0, "the least limit, in seconds", minimum=0.0)
    maximum: float = flag(30.0, "the greatest limit, in seconds, and the limit while little is known", minimum=0.001)
    min_correct: int = flag(1, "correct executions of a test case before its limit adapts", minimum=1)
    probe_share: float = flag(
        0.02, "share of executions that get the greatest limit all the same", minimum=0.0, maximum=1.0
    )
    correct_above: float = flag(0.0, "a score above this is of a correct answer (its `acc`, if it has one)")
    timeout_score: float = flag(0.0, "the score of an answer whose execution was stopped")
    early_stop: bool = flag(False, "leave out the test cases after the first that fails")
    workers: int | None = flag(
        None, "executions at once in each reward process; null: its share of the cores", minimum=1
    )
    grader: str | None = flag(None, "slime: dotted path of the grader that --custom-rm-path named; null: by --rm-type")
    isolation: str = flag("auto", "of programs under test; auto takes the best that works", choices=ISOLATION)
    memory_mb: int = flag(1024, "memory of a program under test, in MiB", minimum=16)

    def validate(self) -> None:
        """Raise ValueError if the least limit is above the greatest."""
        if self.maximum < self.minimum:
            raise ValueError(f"maximum must be at least minimum = {self.minimum:g}, found {self.maximum:g}")


REWARD_TIMEOUT = Feature(
    name="reward_timeout",
    summary="executions of rewards that end soon after correct ones have, and are killed then",
    flags=RewardTimeoutFlags,
    lossless=False,
    switches={
        "verl": ("rl_accel.integrations.verl.reward_timeout.wiring",),
        "slime": ("rl_accel.integrations.slime.reward_timeout.wiring",),
    },
    verl="rl_accel.integrations.verl.reward_timeout.wiring",
    slime=SlimeHooks(
        {
            "custom_rm_path": "rl_accel.integrations.slime.reward_timeout.rm_hook.grade",
            "rollout_sample_hook_path": ["rl_accel.integrations.slime.reward_timeout.rm_hook.mark_evaluation"],
            "custom_rollout_log_function_path": "rl_accel.integrations.slime.rollout_log.log",
        },
        metrics="rl_accel.integrations.slime.reward_timeout.rm_hook.numbers_of",
    ),
)
