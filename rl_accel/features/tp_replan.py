"""A tensor-parallel size that follows preemptions. It changes how responses are batched, so it is never automatic."""

from dataclasses import dataclass

from rl_accel.feature import ENABLE, Feature, SlimeHooks, flag


@dataclass
class TpReplanFlags:
    """Flags of ``rl_accel.tp_replan``."""

    enable: bool | None = flag(None, ENABLE)
    action: str = flag(
        "advise",
        "advise: say what would be better; restart: save, stop, and start anew under rl-accel run",
        choices=("advise", "restart"),
    )
    min_tp: int = flag(1, "the smallest size", minimum=1)
    max_tp: int | None = flag(None, "the largest size; null: a node", minimum=1)
    memory_gb: float | None = flag(None, "GiB of one GPU; null: memory bounds nothing", minimum=0.1)
    max_changes: int = flag(6, "changes in a run, one of which is kept for rolling back", minimum=0)

    def validate(self) -> None:
        """Raise ValueError if no size lies between the bounds."""
        if self.max_tp is not None and self.max_tp < self.min_tp:
            raise ValueError(f"max_tp must be at least min_tp = {self.min_tp}, found {self.max_tp}")


TP_REPLAN = Feature(
    name="tp_replan",
    summary="a tensor-parallel size of the rollout that follows its preemptions",
    flags=TpReplanFlags,
    lossless=False,
    switches={
        "verl": ("rl_accel.integrations.verl.tp_replan",),
        "slime": ("rl_accel.integrations.slime.tp_replan",),
    },
    verl="rl_accel.integrations.verl.tp_replan",
    slime=SlimeHooks(
        {
            "custom_megatron_init_path": "rl_accel.integrations.slime.hooks.megatron_init",
            "custom_rollout_log_function_path": "rl_accel.integrations.slime.rollout_log.log",
            "custom_eval_rollout_log_function_path": "rl_accel.integrations.slime.rollout_log.log_evaluation",
        },
        check="rl_accel.integrations.slime.tp_replan.check",
        metrics="rl_accel.integrations.slime.tp_replan.numbers_of",
        values={"action": ("advise",)},
        after_evaluation="rl_accel.integrations.slime.tp_replan.set_aside",
    ),
)
