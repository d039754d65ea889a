"""What tail batching leaves on disk: a sidecar of each checkpoint, and a log of settled prompts."""

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from rl_accel.errors import RlAccelError
from rl_accel.files import write_atomically
from rl_accel.rollout.driver import PromptSupply, StepResult
from rl_accel.rollout.tail_batching import TailBatching

FOLDER = "tail_batching"


class ResumeError(RlAccelError, ValueError):
    """A checkpoint holds no state of tail batching, or one that does not fit."""


def save(folder: Path, step: int, core: dict[str, Any], fetched: int, payloads: dict[str, dict[str, Any]]) -> None:
    """Write ``folder``, the sidecar of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(payloads, folder / "prompts.pt")
    (folder / "state.json").write_text(json.dumps({"step": step, "rows_fetched": fetched, "core": core}))


def restore(folder: Path, step: int, core: TailBatching, supply: PromptSupply) -> None:
    """Give ``core`` and ``supply`` the state that :func:`save` wrote.

    Raises:
        ResumeError: the sidecar is missing, damaged, of another version or step, or of another run (P0, R0, data or its order).
            Nothing has changed then.
    """
    if not (folder / "state.json").exists():
        raise ResumeError(
            f"{folder.parent} was saved without tail batching: {folder / 'state.json'} is missing. Resume it "
            "without rl_accel.tail_batching"
        )
    try:
        state = json.loads((folder / "state.json").read_text())
        payloads = torch.load(folder / "prompts.pt", weights_only=False)
        saved_step, fetched, saved_core = state["step"], int(state["rows_fetched"]), state["core"]
    except (OSError, EOFError, RuntimeError, UnpicklingError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
    if saved_step != step:
        raise ResumeError(f"{folder} must be of step {step}, found {saved_step}")
    restored = TailBatching(core.run)
    try:
        restored.load_state_dict(saved_core)
    except ValueError as error:
        raise ResumeError(f"{folder} does not fit this run: {error}") from error
    if differ := sorted(payloads.keys() ^ set(restored.unsettled_prompts())):
        raise ResumeError(
            f"{folder} is damaged: the queue and the saved rows differ in {len(differ)} prompts, such as {differ[0]}"
        )
    if len(payloads) + restored.settled != fetched:
        raise ResumeError(
            f"{folder} is damaged: {len(payloads)} prompts are open and {restored.settled} settled, but {fetched} rows "
            "were fetched"
        )
    core.load_state_dict(saved_core)
    supply.restore(fetched, payloads)


class SettlementLog:
    """``tail_batching/ledger.jsonl`` beside the checkpoints: one line a step with every prompt that it settled.

    ``trained``, ``rejected`` (by the group filter) and ``failed`` (after the last retry) map prompt ids, ``epoch:row`` of the
    data, to the data set's own index of the row; ``errors`` has the last error of each failed prompt.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / FOLDER / "ledger.jsonl"

    def rewind(self, step: int) -> None:
        """Drop what came after ``step``: the run goes on from there."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = []
        for line in lines:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:  # the last line of a run that was killed while it wrote
                continue
        write_atomically(self.path, "".join(kept))

    def add(self, step: int, result: StepResult) -> None:
        """Append what a step settled."""
        line = {"step": step, "round": result.batch.number, "kind": result.batch.kind}
        line |= {name: getattr(result, name) for name in ("trained", "rejected", "failed", "errors")}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
