"""Actor update whose old log-probabilities are the update's own, in verl's workers (feature ``reuse_log_probs``).

If a batch gets one optimizer step, the policy that is updated is that of ``old_log_prob``. The wrapped loss takes the update's
log-probabilities, without their gradient, in place of those of a separate forward pass. The update returns them to the trainer,
with the entropy, as verl's forward pass does.

The trainer asks before it relies on that (:data:`KEY`): the first update of a run is verl's, and returns :data:`WORKS`.
"""

import logging
import weakref
from typing import Any

import torch

from rl_accel.errors import ConfigError, refuse
from rl_accel.log import warn_once
from rl_accel.patches.patch import Patch
from rl_accel.patches.verl import trials

FLAG = "rl_accel.reuse_log_probs"
KEY = "rl_accel_reuse_log_probs"
"""Name of the value that the trainer adds to the batch of an update: :data:`ASK` or :data:`REUSE`."""
ASK = "ask"
REUSE = "reuse"
WORKS = "rl_accel/reuse_log_probs/works"
"""Metric of an update with :data:`ASK`: 1 if the workers can reuse its log-probabilities, else 0."""
SHARE = "rl_accel/reuse_log_probs/share"
"""Metric of an update with :data:`REUSE`: share of the tokens that were trained. ``skip_zero`` leaves out the others."""
_ROW = "rl_accel_row"
_ENGINES = ("FSDPEngineWithLMHead", "MegatronEngineWithLMHead")


def require_no_jump(loss_function: Any) -> None:
    """Raises ConfigError if the loss trains otherwise where old and new log-probabilities are equal (:func:`trials.find_jump`)."""
    if reason := trials.find_jump(loss_function):
        _, mode = trials.config_and_mode(loss_function)
        refuse(FLAG, trials.LOSS_MODE, "a loss that is smooth there", mode or repr(loss_function), reason)


def _require_reusable(worker: Any, settings: Any) -> None:
    """Raises ConfigError if the update's log-probabilities may differ from those of a separate forward pass."""
    engine = worker.engine
    if (name := type(engine).__name__) not in _ENGINES:
        refuse(FLAG, "the training engine", " or ".join(_ENGINES), name, "others were not tried")
    if getattr(engine, "_qat_enabled", False):
        refuse(FLAG, "actor.fsdp_config.qat.enable", False, True, "quantisation observes each forward pass")
    for module in engine.module if isinstance(engine.module, list) else [engine.module]:
        if part := next(trials.random_parts(module), ""):
            refuse(FLAG, "dropout of the model", 0, part, "verl's forward pass has none, the update has")
    if not settings.enable:
        trials.require_verls(worker.loss_fn, FLAG)
    require_no_jump(worker.loss_fn)


class _Recorder:
    """verl's loss with old log-probabilities that equal the new ones. Collects log-probabilities and entropy, by row of the batch.

    Attributes:
        verls_loss: the loss of verl.
        outputs: ``log_probs`` and ``entropy`` of each row: float tensors of the length of prompt and response together.
        trained_tokens: number of tokens in the rows that were trained.
    """

    def __init__(self, verls_loss: Any, trains_entropy: bool) -> None:
        self.verls_loss = verls_loss
        self.trained_tokens = 0
        self.outputs: dict[str, dict[int, torch.Tensor]] = {"log_probs": {}, "entropy": {}}
        self._trains_entropy = trains_entropy

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        from verl.workers.utils.padding import no_padding_2_padding

        self.observe(model_output, data)
        log_probs = model_output["log_probs"].detach()
        self.trained_tokens += log_probs.values().numel()
        data["old_log_probs"] = no_padding_2_padding(log_probs, data)
        hidden = () if self._trains_entropy else ("entropy",)
        seen = {name: value for name, value in model_output.items() if name not in hidden}
        return self.verls_loss(model_output=seen, data=data, dp_group=dp_group)

    def observe(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        """Collects the outputs of rows that are not trained. Takes the arguments of a loss, and returns the loss 0."""
        rows = data[_ROW].tolist()
        for name, of_row in self.outputs.items():
            of_row.update(zip(rows, model_output[name].detach().unbind(), strict=True))
        return model_output["log_probs"].values().new_zeros(()), {}

    def nested(self, name: str, rows: int) -> torch.Tensor:
        """Returns the collected output ``name`` of all rows, in the order of the batch, on the CPU."""
        of_row = self.outputs[name]
        if missing := [row for row in range(rows) if row not in of_row]:
            raise RuntimeError(f"rl-accel: reuse_log_probs: the update has not seen rows {missing} of {rows}")
        return torch.nested.as_nested_tensor([of_row[row].cpu() for row in range(rows)], layout=torch.jagged)


def _with_entropy(prepare: Any) -> Any:
    """Returns a wrapper of the method ``prepare_model_outputs`` of verl's FSDP engine that adds the entropy, without gradient."""
    from verl.utils import tensordict_utils as tu

    def prepare_model_outputs(micro_batch: Any, **given: Any) -> Any:
        with torch.no_grad():
            asking = micro_batch.copy()
            tu.assign_non_tensor(asking, calculate_entropy=True)
            entropy = prepare(micro_batch=asking, **given)["entropy"]
        return {**prepare(micro_batch=micro_batch, **given), "entropy": entropy}

    return prepare_model_outputs


def _update(original: Any, worker: Any, data: Any) -> Any:
    """Carries out verl's update ``original`` of a batch that gets one optimizer step, with its own log-probabilities as old ones.

    Returns what ``original`` returns, with the fields ``log_probs`` and ``entropy``.
    """
    from verl.utils import tensordict_utils as tu

    engine = worker.engine
    rows = data.shape[0]
    ranks = engine.get_data_parallel_size()
    steps = (tu.get(data, "mini_batch_size"), tu.get(data, "epochs"))
    if steps != (rows * ranks, 1):
        raise RuntimeError(f"rl-accel: reuse_log_probs wants one step of {rows * ranks} rows, found {steps}")
    trains_entropy = bool(tu.get(data, "calculate_entropy", default=False))
    tokens = data["input_ids"].values().numel()
    data[_ROW] = torch.arange(rows)
    data["old_log_probs"] = torch.zeros_like(data["old_log_probs"])  # skip_zero wants finite numbers
    recorder = _Recorder(worker.loss_fn, trains_entropy)
    if not trains_entropy and type(engine).__name__ == _ENGINES[0]:
        engine.prepare_model_outputs = _with_entropy(engine.prepare_model_outputs)
    elif not trains_entropy:
        tu.assign_non_tensor(data, calculate_entropy=True)
    worker.loss_fn = recorder
    try:
        output = original(worker, data)
    finally:
        worker.loss_fn = recorder.verls_loss
        vars(engine).pop("prepare_model_outputs", None)
    if output is None:  # a rank without outputs
        return None
    metrics = {**tu.get(output, "metrics"), SHARE: [recorder.trained_tokens / tokens]}
    fields = {name: recorder.nested(name, rows) for name in recorder.outputs}
    return tu.get_tensordict(fields, {"metrics": metrics})


def _make(original: Any, settings: Any) -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    answers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def works(worker: Any) -> bool:
        if worker not in answers:
            try:
                _require_reusable(worker, settings)
                answers[worker] = True
            except ConfigError as error:
                if settings.enable:
                    raise
                answers[worker] = False
                if worker.rank == 0:
                    warn_once(str(error), "rl-accel: reuse_log_probs stays off: %s", error, level=logging.INFO)
        return answers[worker]

    def train_mini_batch(self: Any, data: Any) -> Any:
        if not isinstance(data, TensorDict):  # of a critic: a BatchMeta, whose rows only verl's method fetches
            return original(self, data)
        wanted = tu.pop(data, key=KEY, default=None)
        if wanted == REUSE:
            return _update(original, self, data)
        answer = works(self) if wanted == ASK else None
        output = original(self, data)
        if answer is None or output is None:
            return output
        return tu.get_tensordict({}, {"metrics": {**tu.get(output, "metrics"), WORKS: [float(answer)]}})

    return train_mini_batch


SWITCHES = (
    Patch(
        name="verl.reuse_log_probs.update",
        target="verl.workers.engine_workers:TrainingWorker.train_mini_batch",
        supports="verl>=0.9",
        params=("self", "data"),
        make=_make,
        no_seam="a registered policy loss cannot return log-probabilities to the trainer, and gets no entropy without gradient",
        upstream="https://github.com/verl-project/verl/issues/3996",
        remove_when="verl's V1 trainer reuses the log-probabilities of a batch with one optimizer step",
    ),
)
