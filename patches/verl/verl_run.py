"""Facts about a verl run that decide which features work in the run: trainer, engine, advantage estimator, group filter, replicas.

``trainer.use_v1`` is True by default, even for verl's entry points that ignore this key. A trainer is therefore identified by its
class or, before it is built, by the sections of the configuration.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl_accel.errors import refuse
from rl_accel.features import FEATURES
from rl_accel.patches.verl.trials import gives_zero_advantages

ON_POLICY = ("V1 sync", "V1 tail_batching")
"""Trainers (values of :attr:`VerlRun.trainer_kind`) whose rollouts begin and end within one training step."""
TRAINERS = {
    "sampler": ("V1",),
    "overlap_validation": ON_POLICY,
    "reuse_log_probs": (*ON_POLICY, "V1 colocate_async", "legacy"),
    "tail_batching": ON_POLICY,
    "reward_timeout": ("V1", "legacy"),
    "telemetry": ("V1", "legacy", "one_step_off"),
    "tp_replan": ON_POLICY,
    "drafts": ("V1",),
}
"""Mapping from feature to the trainers that the feature supports, as values of :attr:`VerlRun.trainer_kind`. "V1" stands for verl's
V1 trainer in any mode. Features that are not listed work with all trainers."""
_ENGINES = {feature.name: feature.engine for feature in FEATURES if feature.engine}
WHITENING_ESTIMATORS = ("gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""verl's advantage estimators that call ``masked_whiten`` at the end. The feature ``advantages`` has no effect with others."""

_IDLE_WITH_GROUP_FILTER = {
    "sampler": "which prompts are launched depends on when verl looks",
    "skip_zero": "no group has equal rewards",
}
"""Mapping from feature to the reason why the feature has no effect with verl's group filter."""

_IDLE_WITHOUT_TRAINING = (
    "gae",
    "advantages",
    "skip_zero",
    "overlap_validation",
    "reuse_log_probs",
    "tail_batching",
    "telemetry",
    "tp_replan",
)
"""Features that have no effect if verl only validates. The others also act on the responses of a validation."""

ROLLOUT = "actor_rollout_ref.rollout"
"""Section of verl's configuration for the rollout."""
ROUTER_KEY = f"{ROLLOUT}.router_config_path"
FILTER_KEY = "algorithm.filter_groups.enable"
MAINS = {
    "verl.trainer.main_ppo": ("trainer/config", "ppo_trainer"),
    "verl.experimental.fully_async_policy.fully_async_main": (
        "experimental/fully_async_policy/config",
        "fully_async_ppo_trainer",
    ),
    "verl.experimental.one_step_off_policy.main_ppo": (
        "experimental/one_step_off_policy/config",
        "one_step_off_ppo_trainer",
    ),
}
"""Mapping from verl's entry-point module to the folder (in the package ``verl``) and the name of its hydra configuration."""

RAY_TRAINER_CLASS = ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer")


class VerlRun:
    """Facts about one verl run, read from verl's configuration and, once built, from the trainer object.

    Args:
        config: verl's whole configuration.
        trainer: the trainer object; None before it is built.
        in_driver: True in the driver process, before the run starts other processes. Every key of ``config`` can still be changed.

    Attributes:
        trainer_kind: name of the trainer: ``V1 <mode>``; ``legacy`` (RayPPOTrainer or a subclass that does not override
            ``init_workers``); ``one_step_off``; ``fully_async``; or ``recipe`` (any other trainer).
    """

    @classmethod
    def compose(cls, main: str, overrides: Sequence[str], folder: Path | None = None, name: str = "") -> "VerlRun":
        """Returns the run that ``python -m <main> <overrides>`` would start, with a configuration composed by hydra.

        ``folder`` (``--config-path``) and ``name`` (``--config-name``) replace those of ``main`` in :data:`MAINS`. Raises hydra's
        own exceptions for an override that the configuration does not accept.
        """
        import verl
        from hydra import compose, initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra

        root = Path(verl.__file__).resolve().parent
        own_folder, own_name = MAINS[main]
        # The entry points in verl.experimental look for verl's base configuration in the working directory.
        search = [f"hydra.searchpath=[file://{root / 'trainer/config'}]"] if own_name != "ppo_trainer" or folder else []
        GlobalHydra.instance().clear()
        with initialize_config_dir(str((folder or root / own_folder).resolve()), version_base=None):
            return cls(compose(name or own_name, [*search, *overrides]), in_driver=True)

    def __init__(self, config: Any, trainer: Any = None, in_driver: bool = False) -> None:
        self.config = config
        self.trainer = trainer
        self.in_driver = in_driver
        self.trainer_kind = self._kind_by_sections() if trainer is None else self._kind_by_class(type(trainer))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of the dotted ``key`` in verl's configuration, or ``default`` if the key is absent or null."""
        value = OmegaConf.select(self.config, key, default=None)
        return default if value is None else value

    def set(self, key: str, value: Any) -> None:
        """Sets the value of the dotted ``key`` in verl's configuration, also of a key that verl itself does not have."""
        OmegaConf.update(self.config, key, value, merge=False, force_add=True)

    @property
    def is_v1(self) -> bool:
        """True for verl's V1 trainer in any mode. Its agent loops pass responses to the trainer through TransferQueue."""
        return self.trainer_kind.startswith("V1 ")

    @property
    def has_critic(self) -> bool:
        """True if verl trains a critic."""
        return bool(self.get("critic.enable", self.get("algorithm.adv_estimator") == "gae"))

    @property
    def filters_groups(self) -> bool:
        """True if the trainer has a group filter (DAPO), and it is on. It drops prompts whose responses all score the same."""
        return bool(self.get(FILTER_KEY, False)) and not self.ignores_group_filter

    @property
    def ignores_group_filter(self) -> bool:
        """True if the group filter is on, and the trainer is verl's own legacy trainer, which has none.

        Its subclasses in recipes may filter, and are known once they are built.
        """
        is_verls_own = type(self.trainer).__name__ in ("NoneType", RAY_TRAINER_CLASS[1])
        return bool(self.get(FILTER_KEY, False)) and self.trainer_kind == "legacy" and is_verls_own

    @property
    def checkpoint_to_resume(self) -> Path | None:
        """Checkpoint folder from which the run will resume. None if the run starts anew or this machine's disk lacks the folder."""
        if (mode := self.get("trainer.resume_mode")) == "resume_path":
            folder = Path(self.get("trainer.resume_from_path", ""))
        else:
            root = Path(self.get("trainer.default_local_dir", ""))
            latest = root / "latest_checkpointed_iteration.txt"
            folder = root / f"global_step_{latest.read_text().strip() if mode == 'auto' and latest.exists() else ''}"
        return folder if "global_step_" in folder.name and folder.is_dir() else None

    @property
    def gpus(self) -> int:
        """Number of GPUs of the trainer: GPUs per node times nodes."""
        return self._number("trainer.n_gpus_per_node") * self._number("trainer.nnodes")

    @property
    def dp_times_pp(self) -> int:
        """Data-parallel times pipeline-parallel size of a rollout replica: its GPUs divided by its tensor-parallel size."""
        return self._number(f"{ROLLOUT}.data_parallel_size") * self._number(f"{ROLLOUT}.pipeline_model_parallel_size")

    @property
    def generates_within_stage(self) -> bool:
        """True if every generation request of a step starts within the stage ``gen`` of this step, as the trainer times it."""
        if not self.is_v1:
            return self.trainer_kind == "legacy"
        return (
            self.trainer_kind in ON_POLICY
            and self.get(f"trainer.v1.{self.trainer_kind[3:]}.parameter_sync_step", 1) == 1
        )

    def require(self, feature: str) -> None:
        """Raises ConfigError unless ``feature`` supports the trainer and the rollout engine of this run."""
        flag = f"rl_accel.{feature}"
        wanted = TRAINERS.get(feature, (self.trainer_kind,))
        if self.trainer_kind not in wanted and not (self.is_v1 and "V1" in wanted):
            names = [name for name in wanted if name != "V1 tail_batching"]  # our own wiring chooses this mode
            if self.is_v1:
                refuse(flag, "trainer.v1.trainer_mode", names[0].removeprefix("V1 "), self.trainer_kind[3:])
            kind = self.trainer_kind if self.trainer is None else f"{self.trainer_kind} ({type(self.trainer).__name__})"
            reason = "trainer.use_v1 = False" if self.get("trainer.use_v1") is False else ""
            refuse(flag, "the trainer", " or ".join(names), kind, reason)
        if feature in _ENGINES and self.get(f"{ROLLOUT}.name") != _ENGINES[feature]:
            refuse(flag, f"{ROLLOUT}.name", _ENGINES[feature], self.get(f"{ROLLOUT}.name"))

    def require_chosen(self, flag: str, key: str, value: Any) -> None:
        """Raises ConfigError in the trainer process if ``key`` of verl's configuration is not ``value``, which a feature needs.

        rl-accel sets the key in the driver process, inside verl's ``validate_config``, which some drivers do not call.
        """
        if not self.in_driver and self.get(key) != value:
            reason = "verl's validate_config sets it, which the driver must call before the trainer starts"
            refuse(flag, key, value, self.get(key), reason)

    def require_off(self, flag: str, key: str, reason: str = "") -> None:
        """Raises ConfigError if the boolean ``key`` of the configuration is on."""
        if self.get(key, False):
            refuse(flag, key, False, True, reason)

    def idle(self, feature: str) -> str:
        """Returns the reason why ``feature`` would have no effect in this run, or "" if there is none."""
        estimator = self.get("algorithm.adv_estimator")
        is_idle_with_estimator = {
            "gae": estimator != "gae",
            "advantages": estimator not in WHITENING_ESTIMATORS,
        }
        if is_idle_with_estimator.get(feature):
            return f"algorithm.adv_estimator = {estimator}"
        if feature in _IDLE_WITHOUT_TRAINING and self.get("trainer.val_only", False):
            return "trainer.val_only = True: nothing is trained"
        if feature == "skip_zero" and (key := self._key_without_zero_advantages()):
            return f"{key} = {self.get(key)}: no response has advantage 0"
        if feature == "reuse_log_probs" and (reason := self._reason_for_forward_passes()):
            return reason
        if feature == "final_output" and self.get(f"{ROLLOUT}.disaggregation.enabled", False):
            return f"{ROLLOUT}.disaggregation.enabled = True: its servers return responses as in verl"
        if feature == "overlap_validation" and (frequency := self.get("trainer.test_freq", -1)) <= 0:
            return f"trainer.test_freq = {frequency}"
        if self.filters_groups and feature in _IDLE_WITH_GROUP_FILTER:
            return f"{FILTER_KEY} = True: {_IDLE_WITH_GROUP_FILTER[feature]}"
        return ""

    def _key_without_zero_advantages(self) -> str:
        """Returns the key of the configuration because of which no response can have advantage 0, or "" if one can."""
        algorithm = self.get("algorithm", {})
        group_size = self._number(f"{ROLLOUT}.n")
        if not gives_zero_advantages(algorithm, group_size):
            return "algorithm.adv_estimator"
        has_kl = self.get("algorithm.use_kl_in_reward", False)
        if has_kl and not gives_zero_advantages(algorithm, group_size, with_kl=True):
            return "algorithm.use_kl_in_reward"
        return ""

    def _reason_for_forward_passes(self) -> str:
        """Returns the reason why no batch can do without a separate forward pass for old log-probabilities, or ""."""
        if self.get("algorithm.rollout_correction.bypass_mode", False):
            return "algorithm.rollout_correction.bypass_mode = True: verl computes no old log-probabilities"
        actor = "actor_rollout_ref.actor"
        mini_batches = self._number("data.train_batch_size") / self._number(f"{actor}.ppo_mini_batch_size")
        if (steps := mini_batches * self._number(f"{actor}.ppo_epochs")) > 1:
            return f"a batch gets {steps:g} optimizer steps (data.train_batch_size, {actor}.ppo_mini_batch_size, ppo_epochs)"
        return ""

    def _number(self, key: str) -> int:
        return int(self.get(key, 1) or 1)

    def _kind_by_sections(self) -> str:
        if self.get("async_training") is not None:
            return "fully_async"
        if self.get("rollout.nnodes") is not None:
            return "one_step_off"
        mode = self.get("trainer.v1.trainer_mode") if self.get("trainer.use_v1", False) else None
        return f"V1 {mode}" if mode else "legacy"

    def _kind_by_class(self, cls: type) -> str:
        bases = {(base.__module__, base.__qualname__): base for base in cls.__mro__}
        if ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer") in bases:
            return f"V1 {self.get('trainer.v1.trainer_mode')}"
        for trainer in ("fully_async", "one_step_off"):
            if any(module.startswith(f"verl.experimental.{trainer}_policy") for module, _ in bases):
                return trainer
        verls: Any = bases.get(RAY_TRAINER_CLASS)
        return "legacy" if verls and cls.init_workers is verls.init_workers else "recipe"  # type: ignore[attr-defined]
