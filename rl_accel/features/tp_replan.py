"""A tensor-parallel size that follows preemptions. It changes how responses are batched, so it is never automatic."""

from dataclasses import dataclass

from rl_accel.features.feature import ENABLE, Feature, SlimeHooks, flag

ACTIONS = ("advise", "restart", "live")


@dataclass
class TpReplanFlags:
    """Flags of ``rl_accel.tp_replan``."""

    enable: bool | None = flag(None, ENABLE)
    action: str = flag(
        "advise",
        "advise: say what would be better; restart: save, stop, start anew; live: new servers within the run",
        choices=ACTIONS,
    )
    threshold: float = flag(1.05, "preemptions over their reference from which on TP doubles", minimum=1.0)
    calm_steps: int = flag(4, "steps in a row without a preemption after which TP halves", minimum=1)
    cooldown: int = flag(4, "steps after a change in which none is asked for", minimum=0)
    min_tp: int = flag(1, "the smallest size", minimum=1)
    max_tp: int | None = flag(None, "the largest size; null: a node", minimum=1)
    memory_gb: float | None = flag(None, "GiB of one GPU; null: memory bounds nothing", minimum=0.1)
    memory_share: float | None = flag(
        None, "share of it for rollout; null: the framework's own setting", minimum=0.01, maximum=1.0
    )
    min_sequences: int = flag(4, "sequences of the greatest length that a server's cache must hold", minimum=1)
    gpus_per_node: int | None = flag(None, "null: what the framework says", minimum=1)
    max_changes: int = flag(6, "changes in a run, one of which is kept for rolling back", minimum=0)
    reference_steps: int = flag(10, "steps that the reference of a round kind remembers", minimum=1)
    confirm_steps: int = flag(2, "latest steps, the least of which is held against the reference", minimum=1)
    least_reference: float = flag(10.0, "fewer preemptions than this count as this", minimum=1.0)
    kv_limit: float = flag(0.9, "TP halves only if the cache would be no fuller", minimum=0.0, maximum=1.0)
    check_steps: int = flag(3, "steps of each round kind after a change before it is judged", minimum=2)
    check_limit: int = flag(20, "steps after which it is judged by the round kinds that came", minimum=1)
    slower: float = flag(0.03, "rise of rollout seconds per token that has a change rolled back", minimum=0.0)
    retry_steps: int = flag(25, "steps until the same change is tried again; doubles each time", minimum=1)
    config_file: str | None = flag(
        None, "slime: the file for its --sglang-config that advice writes; null: rl_accel_sglang_config.yaml in --save"
    )

    def validate(self) -> None:
        """Raise ValueError if no size lies between the bounds, or a change could never be judged."""
        if self.max_tp is not None and self.max_tp < self.min_tp:
            raise ValueError(f"max_tp must be at least min_tp = {self.min_tp}, found {self.max_tp}")
        if self.check_limit < self.check_steps:
            raise ValueError(f"check_limit must be at least check_steps = {self.check_steps}, found {self.check_limit}")


TP_REPLAN = Feature(
    name="tp_replan",
    summary="a tensor-parallel size of the rollout that follows its preemptions",
    flags=TpReplanFlags,
    lossless=False,
    switches={
        "verl": ("rl_accel.integrations.verl.tp_replan.mode",),
        "slime": ("rl_accel.integrations.slime.tp_replan.seams",),
    },
    verl="rl_accel.integrations.verl.tp_replan.wiring",
    slime=SlimeHooks(
        {
            "custom_megatron_init_path": "rl_accel.integrations.slime.hooks.megatron_init",
            "custom_rollout_log_function_path": "rl_accel.integrations.slime.rollout_log.log",
            "custom_eval_rollout_log_function_path": "rl_accel.integrations.slime.rollout_log.log_evaluation",
        },
        check="rl_accel.integrations.slime.tp_replan.arguments.check",
        metrics="rl_accel.integrations.slime.tp_replan.replan.numbers_of",
        values={"action": ("advise",)},
        after_evaluation="rl_accel.integrations.slime.tp_replan.replan.set_aside",
    ),
)
