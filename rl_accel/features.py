"""Declarations of all features of rl-accel: the flags of each feature and the names of the modules that implement the feature.

A new feature needs a dataclass with the feature's flags, a :class:`Feature` and a position in :data:`FEATURES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

F = TypeVar("F")


def flag(default: Any, help: str, **limits: Any) -> Any:
    """Returns the dataclass field that declares one flag. ``help`` is the flag's line in ``rl-accel flags``.

    ``limits`` may be ``minimum`` and ``maximum``: inclusive bounds of a number; ``choices``: the allowed strings.
    """
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class SlimeHooks:
    """Changes to slime's arguments that a feature needs, and functions of the feature that rl-accel calls during a slime run.

    All functions except ``engine`` are given as dotted names.

    Attributes:
        file: slime arguments that the YAML file for slime's ``--custom-config-path`` must contain, with their values.
        arguments: slime arguments that rl-accel sets when a run begins, with their values. A list is appended to the user's list.
        unset: names of slime arguments that must be None.
        only_named_with: names of slime arguments. If the user sets one of them, the flag ``auto`` does not turn the feature on.
        check: function ``check(args, flags)`` that raises ConfigError if the feature does not work with slime's arguments ``args``.
            Called before the first rollout, after ``arguments`` are set.
        estimators: values of slime's ``--advantage-estimator`` that the feature supports. Empty: all values.
        metrics: function ``numbers_of(rollout)`` that returns metrics, by name. Called when slime logs a rollout.
        values: mapping from flag to the values that work on slime. Flags that are not listed may have any value.
        is_on_policy: whether each batch must come from the latest weights; slime's ``train_async.py`` is then refused.
        engine: function ``engine(flags)`` that returns the SGLang settings that the feature needs, by name of the slime argument.
    """

    file: Mapping[str, str]
    arguments: Mapping[str, str | list[str]] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    only_named_with: tuple[str, ...] = ()
    check: str = ""
    estimators: tuple[str, ...] = ()
    metrics: str = ""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    is_on_policy: bool = False
    engine: Callable[[Any], Mapping[str, Any]] = lambda _flags: {}


@dataclass
class ByNameFlags:
    """Flag ``enable`` of a feature that must be turned on by name: the flag ``auto`` leaves it off."""

    enable: bool | None = flag(None, "True: on, and an error if it cannot be; False or null: off")


@dataclass
class LosslessFlags:
    """Flag ``enable`` of a feature that cannot change training results. ``rl_accel.enable()`` turns all these features on."""

    enable: bool | None = flag(
        None, "True: on, and an error if it cannot be; False: off; null: on only with the flag auto"
    )


SLIME_MEGATRON = {"custom_megatron_init_path": "rl_accel.integrations.slime.hooks.megatron_init"}
SLIME_DATA = {"data_source_path": "rl_accel.integrations.slime.hooks.data_source"}


@dataclass(frozen=True)
class Feature(Generic[F]):
    """Declaration of one feature of rl-accel, such as ``gae``.

    Attributes:
        name: name of the feature, and of the section of its flags, ``rl_accel.<name>``.
        flags: dataclass with one field per flag: a subclass of :class:`LosslessFlags` or :class:`ByNameFlags`. An optional method
            ``validate()`` raises ValueError for flags that contradict each other.
        switches: mapping from framework to names of modules. Each module has a tuple ``SWITCHES`` of
            :class:`~rl_accel.switch.Switch`, and is imported only when the feature is on.
        verl: name of a module with a function ``wire(run, flags)``, which configures verl's extension points for the feature (see
            :mod:`rl_accel.patches.verl.config_intake`); "" for none.
        slime: changes to slime's arguments; None for none.
        engine: package of the only rollout engine that the feature supports on verl; "" for all engines.
    """

    name: str
    flags: type[F]
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    verl: str = ""
    slime: SlimeHooks | None = None
    engine: str = ""


@dataclass
class GaeFlags(LosslessFlags):
    """Flags of the feature ``gae``, which computes generalized advantage estimation as a scan instead of a loop over tokens."""

    backend: str = flag(
        "auto", "kernel; auto: numba on a CPU, triton on CUDA", choices=("auto", "naive", "chunk", "numba", "triton")
    )
    chunk_size: int | None = flag(None, "tokens per chunk for backend=chunk; null: chosen automatically", minimum=1)
    threads: int | None = flag(None, "CPU threads of the numba kernel; null: usable cores, at most 16", minimum=1)


GAE = Feature(
    name="gae",
    flags=GaeFlags,
    switches={"verl": ("rl_accel.patches.verl.gae",), "slime": ("rl_accel.patches.slime.gae",)},
    slime=SlimeHooks(SLIME_MEGATRON, estimators=("ppo",)),
)


ADVANTAGES = Feature(
    name="advantages",
    flags=LosslessFlags,
    switches={
        "verl": ("rl_accel.patches.verl.advantages",),
        "slime": ("rl_accel.patches.slime.reinforce_plus_plus",),
    },
    slime=SlimeHooks(SLIME_MEGATRON, estimators=("reinforce_plus_plus",)),
)
"""Speeds up REINFORCE++ and whitening, the last step of several advantage estimators."""


@dataclass
class SamplerFlags(LosslessFlags):
    """Flags of the feature ``sampler``, which polls for finished rollouts at adaptive intervals instead of every 2 seconds.

    On slime, shortens the wait of 3 seconds between checks whether an SGLang server has aborted all requests.
    """

    max_cpu_share: float = flag(0.05, "maximum share of one CPU core spent on polling", minimum=0.001, maximum=1.0)
    max_delay_s: float = flag(
        0.02, "maximum seconds after the last needed response, while polls are cheap", minimum=0.001, maximum=60.0
    )


SAMPLER = Feature(
    name="sampler",
    flags=SamplerFlags,
    switches={"verl": ("rl_accel.patches.verl.sampler",), "slime": ("rl_accel.patches.slime.abort",)},
    slime=SlimeHooks(
        SLIME_DATA,
        # a custom function may send requests after an abort; only slime's repeated aborts end them
        only_named_with=("custom_generate_function_path",),
        values={name: (getattr(SamplerFlags, name),) for name in ("max_cpu_share", "max_delay_s")},
    ),
)


FINAL_OUTPUT = Feature(
    name="final_output",
    flags=LosslessFlags,
    switches={"verl": ("rl_accel.patches.verl.final_output",)},
    engine="vllm",
)
"""Makes vLLM return a response to verl when the response is finished, not per token."""


SKIP_ZERO = Feature(
    name="skip_zero",
    flags=LosslessFlags,
    switches={"verl": ("rl_accel.patches.verl.skip_zero",)},
    verl="rl_accel.integrations.verl.skip_zero",
)
"""Leaves responses with advantage 0 out of the actor update."""


OVERLAP_VALIDATION = Feature(
    name="overlap_validation",
    flags=LosslessFlags,
    switches={"verl": ("rl_accel.patches.verl.overlap_validation",)},
    verl="rl_accel.patches.verl.overlap_validation",
)
"""Starts the rollout of the next step while a validation waits for its longest responses."""


REUSE_LOG_PROBS = Feature(
    name="reuse_log_probs",
    flags=LosslessFlags,
    switches={"verl": ("rl_accel.patches.verl.reuse_log_probs", "rl_accel.patches.verl.reuse_in_worker")},
    verl="rl_accel.patches.verl.reuse_log_probs",
)
"""Takes old log-probabilities from the update itself if a batch gets one optimizer step, without a separate forward pass."""


@dataclass
class StallFlags(LosslessFlags):
    """Flags of the feature ``stall``, which logs what a training step waits for if the step stands still."""

    patience: float | None = flag(
        None, "seconds that a stage of a step may take; null: 600, or 5 medians of the stage if more", minimum=1.0
    )


STALL = Feature(
    name="stall",
    flags=StallFlags,
    switches={"verl": ("rl_accel.integrations.verl.stall",), "slime": ("rl_accel.integrations.slime.stall",)},
    slime=SlimeHooks(SLIME_DATA),
)


@dataclass
class TailBatchingFlags(ByNameFlags):
    """Flags of the feature ``tail_batching``: most rollouts do not wait for the longest responses.

    Such a rollout ("short round") starts extra prompts and responses, and ends when enough have finished. Unfinished prompts run
    again in a later "long round", which waits for all responses, so that no prompt is lost.
    """

    prompt_ratio: float = flag(1.25, "prompts launched in a short round divided by prompts trained", minimum=1.0)
    response_ratio: float = flag(
        1.25, "responses launched per prompt in a short round divided by responses trained; 1 is unbiased", minimum=1.0
    )
    queue_threshold: int | None = flag(None, "deferred prompts that trigger a long round; null: a batch", minimum=1)
    max_deferrals: int = flag(1, "times that a prompt may be cut off before it waits for a long round", minimum=1)
    max_retries: int = flag(2, "number of times that a failed response is generated again", minimum=0)
    agent_loop_limit: float | None = flag(
        None, "seconds after which an agent loop, tools included, fails; null: no limit", minimum=0.1
    )
    cleanup_limit: float | None = flag(
        600.0, "seconds that a cancelled agent loop may clean up in the background; null: no limit", minimum=0.1
    )


SLIME_ROLLOUT = "rl_accel.integrations.slime.tail_batching.rollout.generate_rollout"
SLIME_DATA_SOURCE = "rl_accel.integrations.slime.tail_batching.rollout.TailDataSource"

TAIL_BATCHING = Feature(
    name="tail_batching",
    flags=TailBatchingFlags,
    switches={
        "verl": ("rl_accel.integrations.verl.tail_batching.wiring",),
        "slime": ("rl_accel.integrations.slime.tail_batching", "rl_accel.patches.slime.requests"),
    },
    verl="rl_accel.integrations.verl.tail_batching.wiring",
    slime=SlimeHooks(
        SLIME_DATA,
        {"rollout_function_path": SLIME_ROLLOUT, "data_source_path": SLIME_DATA_SOURCE},
        check="rl_accel.integrations.slime.tail_batching.check",
        is_on_policy=True,
    ),
)


@dataclass
class RewardTimeoutFlags(ByNameFlags):
    """Flags of the feature ``reward_timeout``, which limits the seconds of each execution of a reward function.

    The limits are learned from executions for correct answers.
    """

    scale: float = flag(1.5, "factor between the longest correct execution of a test case and its limit", minimum=1.0)
    slack: float = flag(0.5, "seconds added to the limit", minimum=0.0)
    minimum: float = flag(2.0, "lower bound of a limit, in seconds", minimum=0.0)
    maximum: float | None = flag(
        None,
        "the full budget, in seconds; null: the framework's own limit, else 300, and 30 for programs under test",
        minimum=0.001,
    )
    limit_waiting: bool = flag(False, "adaptive limits for coroutines and reward servers too, which mostly only wait")
    min_correct: int = flag(1, "number of correct executions of a test case before its limit adapts", minimum=1)
    probe_share: float = flag(0.02, "share of adapted limits replaced by the full budget", minimum=0.0, maximum=1.0)
    correct_above: float = flag(0.0, "scores above this value (or `acc`, if the grader returns it) count as correct")
    timeout_score: float = flag(0.0, "score of an answer whose execution was stopped")
    score_errors: bool = flag(
        False, "give timeout_score to an answer whose grader raises or returns no score; false: as without rl-accel"
    )
    early_stop: bool = flag(False, "skip the test cases after the first failure")
    workers: int | None = flag(None, "executions at once in a reward process; null: by the number of cores", minimum=1)
    grader: str | None = flag(None, "slime: dotted path of the grader; null: that of --custom-rm-path, else --rm-type")
    isolation: str = flag(
        "auto", "isolation of programs; auto: the strongest that works here", choices=("auto", "process", "bubblewrap")
    )
    memory_mb: int = flag(1024, "memory of a program under test, in MiB", minimum=16)

    def validate(self) -> None:
        """Raises ValueError if ``minimum`` is above ``maximum``."""
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum must be at least minimum = {self.minimum:g}, found {self.maximum:g}")


REWARD_TIMEOUT = Feature(
    name="reward_timeout",
    flags=RewardTimeoutFlags,
    switches={
        "verl": ("rl_accel.integrations.verl.reward_timeout",),
        "slime": ("rl_accel.integrations.slime.reward_timeout",),
    },
    verl="rl_accel.integrations.verl.reward_timeout",
    slime=SlimeHooks(
        SLIME_DATA,
        {
            "custom_rm_path": "rl_accel.integrations.slime.reward_timeout.rm_hook.grade",
            "rollout_sample_hook_path": ["rl_accel.integrations.slime.reward_timeout.rm_hook.mark_evaluation"],
            "custom_rollout_log_function_path": "rl_accel.integrations.slime.rollout_log.log",
        },
        check="rl_accel.integrations.slime.reward_timeout.check",
        metrics="rl_accel.integrations.slime.reward_timeout.rm_hook.numbers_of",
    ),
)


TELEMETRY = Feature(
    name="telemetry",
    flags=ByNameFlags,
    switches={"verl": ("rl_accel.integrations.verl.telemetry",)},
    verl="rl_accel.integrations.verl.telemetry",
)
"""Writes the times of each response to a file, and logs the share of each part of a training step."""


@dataclass
class TpReplanFlags(ByNameFlags):
    """Flags of the feature ``tp_replan``, which advises on or changes the rollout's tensor-parallel size."""

    action: str = flag(
        "advise", "advise: log a better size; restart: go on with it, under rl-accel run", choices=("advise", "restart")
    )
    min_tp: int = flag(1, "smallest tensor-parallel size", minimum=1)
    max_tp: int | None = flag(None, "largest tensor-parallel size; null: the GPUs of a node", minimum=1)

    def validate(self) -> None:
        """Raises ValueError if ``max_tp`` is below ``min_tp``."""
        if self.max_tp is not None and self.max_tp < self.min_tp:
            raise ValueError(f"max_tp must be at least min_tp = {self.min_tp}, found {self.max_tp}")


TP_REPLAN = Feature(
    name="tp_replan",
    flags=TpReplanFlags,
    switches={"verl": ("rl_accel.integrations.verl.tp_replan",)},
    verl="rl_accel.integrations.verl.tp_replan",
)


@dataclass
class DraftsFlags(ByNameFlags):
    """Flags of the feature ``drafts``: speculative decoding with draft tokens taken from other responses.

    The distribution of sampled responses does not change.
    """

    max_tokens: int = flag(8, "maximum number of tokens of a draft", minimum=1)
    batch_limit: int = flag(32, "number of running requests above which an engine makes no drafts", minimum=1)
    memory_mb: int = flag(200, "memory for earlier responses in each engine, in MiB", minimum=1)
    epochs: int = flag(2, "number of past epochs whose responses are used in addition to the current one", minimum=0)
    save: bool = flag(False, "save earlier responses in checkpoints, so that a resumed run starts with them")


DRAFTS = Feature(
    name="drafts",
    flags=DraftsFlags,
    switches={"verl": ("rl_accel.integrations.verl.drafts", "rl_accel.patches.verl.collective_rpc"), "slime": ()},
    verl="rl_accel.integrations.verl.drafts",
    engine="vllm",
    slime=SlimeHooks(
        SLIME_DATA,
        # arguments of other speculative decoding algorithms
        unset=tuple(f"sglang_speculative_{name}" for name in ("num_steps", "eagle_topk", "draft_model_path")),
        # SGLang lacks these flags: only their defaults are allowed
        values={name: (getattr(DraftsFlags, name),) for name in ("batch_limit", "memory_mb", "epochs", "save")},
        engine=lambda flags: {
            "sglang_speculative_algorithm": "NGRAM",
            "sglang_speculative_num_draft_tokens": flags.max_tokens + 1,  # SGLang counts the token before the draft
            "sglang_speculative_ngram_max_bfs_breadth": 1,  # no trees, which some attention backends refuse
        },
    ),
)


FEATURES: tuple[Feature[Any], ...] = (
    SKIP_ZERO,
    REUSE_LOG_PROBS,
    OVERLAP_VALIDATION,
    SAMPLER,
    FINAL_OUTPUT,
    GAE,
    ADVANTAGES,
    STALL,
    TAIL_BATCHING,
    REWARD_TIMEOUT,
    TELEMETRY,
    TP_REPLAN,
    DRAFTS,
)
"""All features, in the order in which they are listed and configured."""

FLAG_READER = "rl_accel.patches.verl.config_intake"
"""Module whose switches (changes to verl) read flags from verl's configuration. They are applied even if no feature is on, because
only they see the flags that turn features on."""

METRICS_LOGGER = "rl_accel.patches.verl.trainer_metrics"
"""Module whose switches (changes to verl) add rl-accel's metrics to verl's log. They are applied while any feature is on."""
