"""Workload of a simulated run: response lengths, correlation of the lengths within a prompt, and reward times.

Each response has a score with a standard normal distribution. Its length is the quantile of all lengths that corresponds to the
score, so that all responses together keep the given distribution of lengths. The score is the sum of a part that all responses to
the prompt share and a part of its own. The shared part's fraction of the variance is the intraclass correlation ``alike`` (one-way
random-effects model, a Gaussian copula). A prompt with a high shared part has long responses in later rounds, too.
"""

import json
import math
import pickle
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_accel.errors import RlAccelError, first_line
from rl_accel.files import BAD_RECORD

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_MAX_NUMBER = 1_000_000_000
"""Largest number of tokens, or of seconds of a reward, that is accepted in a file of response lengths."""


@dataclass(frozen=True)
class Lengths:
    """Workload that draws random response lengths.

    A length follows from a random score. Responses to one prompt share a part of it, so that their lengths are similar (see the
    module's docstring).

    Args:
        tokens: equally likely response lengths in tokens, ascending.
        alike: intraclass correlation of the response lengths within a prompt, from 0 (independent) to below 1.
        known: for each observed prompt, mean and standard deviation of the score part that its responses share, in the order of
            the data, shape [P, 2]; None if no prompt was observed.
        seen: number of tokens of each observed response, shape [P, R]; 0: no response. The first draw for a prompt returns these
            numbers, and draws only the responses that are missing.
        prompt_tokens: number of tokens in each prompt.
        rewards: equally likely durations of a reward in seconds; empty: rewards take no time.
        source: where the data are from, for reports.
    """

    tokens: Ints
    alike: float
    known: Floats | None = None
    seen: Ints | None = None
    prompt_tokens: int = 0
    rewards: Floats = field(default_factory=lambda: np.empty(0))
    source: str = ""
    _scores: "array[float]" = field(default_factory=lambda: array("d"), init=False)  # by prompt; NaN: not drawn yet

    def lengths(self, prompts: Sequence[int], responses: int, rng: np.random.Generator) -> Ints:
        """Draws the lengths of ``responses`` new responses to each of ``prompts`` (indices from 0) in tokens, shape [P, R]."""
        from scipy.special import ndtr

        asked = np.array(prompts)
        self._scores.extend([math.nan] * (int(asked.max()) + 1 - len(self._scores)))
        scores = np.frombuffer(self._scores)
        is_new = np.isnan(scores[asked])
        new = asked[is_new]
        mean, deviation = (0.0, 1.0) if self.known is None else self.known[new % len(self.known)].T
        scores[new] = mean + deviation * rng.standard_normal(len(new))
        shared = scores[asked, None]
        own = rng.standard_normal((len(prompts), responses))
        ranks = ndtr(np.sqrt(self.alike) * shared + np.sqrt(1 - self.alike) * own)
        found: Ints = self.tokens[np.minimum((ranks * len(self.tokens)).astype(int), len(self.tokens) - 1)]
        if self.seen is not None:
            seen = self.seen[new % len(self.seen), :responses]
            drawn = found[is_new, : seen.shape[1]]
            found[is_new, : seen.shape[1]] = np.where(seen > 0, seen, drawn)
        return found

    def reward_seconds(self, count: int, rng: np.random.Generator) -> Floats | None:
        """Draws the durations of ``count`` rewards in seconds, shape [count]. Returns None if rewards take no time."""
        return rng.choice(self.rewards, count) if len(self.rewards) else None

    def drawn(self, seed: int) -> "Lengths":
        """Returns a copy that has drawn nothing yet. Observed prompts and their lengths are replaced by a bootstrap sample."""
        if self.known is None or self.seen is None:
            return replace(self)
        sample = np.random.default_rng(seed).integers(len(self.known), size=len(self.known))
        seen = self.seen[sample]
        return replace(self, known=self.known[sample], seen=seen, tokens=np.sort(seen[seen > 0]))


def from_groups(groups: Sequence[Sequence[float]], source: str, **more: Any) -> Lengths:
    """Returns a workload that is fitted to the response lengths of a run.

    The intraclass correlation of the lengths within a prompt is computed from the logarithms of the lengths.

    Args:
        groups: number of tokens of each response, one non-empty list per prompt, in the order of the data.
        source: where the lengths are from, for reports.
        more: values of further fields of :class:`Lengths`, such as ``rewards``.
    """
    from scipy.special import ndtri
    from scipy.stats import rankdata

    sizes = np.array([len(group) for group in groups])
    each = np.maximum(np.concatenate([np.asarray(group, float) for group in groups]).round(), 1)
    firsts = np.cumsum(sizes) - sizes
    # Intraclass correlation: mean product of two different responses of a group, over the variance of all responses.
    off = np.log(each) - np.log(each).mean()
    covariance = (np.add.reduceat(off, firsts) ** 2 - np.add.reduceat(off**2, firsts)).sum()
    variance = off.var()
    pairs = (sizes * (sizes - 1)).sum()
    alike = float(np.clip(covariance / pairs / variance, 0.0, 0.99)) if pairs and variance else 0.0
    # Mean and variance of the shared part of a group's normal scores, given these scores, with a normal prior.
    scores = ndtri((rankdata(each) - 0.5) / len(each))
    precision = 1 + (sizes - 1) * alike
    means = np.sqrt(alike) * np.add.reduceat(scores, firsts) / precision
    known = np.stack([means, np.sqrt((1 - alike) / precision)], axis=1)
    seen = np.zeros((len(groups), sizes.max()), np.int64)
    seen[np.arange(sizes.max()) < sizes[:, None]] = each
    return Lengths(np.sort(each).astype(np.int64), alike, known, seen, source=source, **more)


def read_lengths(path: Path, tokenizer: str | None = None) -> Lengths:
    """Returns a workload that is fitted to the response lengths of a run, read from a file or folder.

    A file has lines ``{"prompt": id, "tokens": n}`` in the order of the data, optionally with ``reward_seconds``. A folder holds
    one of

    - files of this form,
    - files of responses that verl saved (``trainer.rollout_data_dir``),
    - rollouts that slime saved (``--save-debug-rollout-data FOLDER/{rollout_id}.pt``).

    Args:
        path: file or folder.
        tokenizer: name or folder of the tokenizer that counts the tokens of texts. None: characters are counted instead.

    Raises:
        RlAccelError: a file or the tokenizer cannot be read, or the content of a file has another format.
    """
    wanted = 'wanted lines such as {"prompt": "17", "tokens": 812}, with "reward_seconds" if rewards take time'
    files = sorted(path.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem)) if path.is_dir() else [path]
    if not files:
        return from_groups(_rollouts_of_slime(path), str(path))
    groups: dict[tuple[Any, str], list[float]] = {}
    rewards: list[float] = []
    count, unit = _counter(tokenizer)
    has_texts = False
    for file in files:
        try:
            lines = file.read_text("utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise RlAccelError(f"--lengths: cannot read {file}: {error}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                prompt = entry["input"] if "input" in entry else entry["prompt"]
                if "tokens" not in entry and isinstance(entry.get("output"), str):
                    has_texts = True
                    entry["tokens"] = max(count(entry["output"]), 1)
                groups.setdefault((entry.get("step"), str(prompt)), []).append(_number(entry, "tokens", 1))
                rewards += [_number(entry, "reward_seconds", 0)] if "reward_seconds" in entry else []
            except BAD_RECORD as error:
                raise RlAccelError(f"--lengths: {file}, line {number}: {wanted}, found {error!r}") from error
    if not groups:
        raise RlAccelError(f"--lengths: {path} holds no lengths: {wanted}")
    source = f"{path}, {unit}" if has_texts else str(path)
    return from_groups(list(groups.values()), source, rewards=np.array(rewards))


def _counter(tokenizer: str | None) -> tuple[Callable[[str], int], str]:
    """Returns a function that counts the tokens of a text, and a phrase that names the unit of the counts, for reports."""
    if tokenizer is None:
        return len, "in characters instead of tokens (--tokenizer counts tokens)"
    from transformers import AutoTokenizer

    try:
        encode = AutoTokenizer.from_pretrained(tokenizer).encode
    except (OSError, ValueError) as error:
        raise RlAccelError(f"--tokenizer: cannot read {tokenizer}: {first_line(error)}") from error
    return lambda text: len(encode(text, add_special_tokens=False)), f"tokens of {tokenizer}"


def _number(entry: dict[str, Any], field: str, least: int) -> float:
    """Returns the number in ``entry[field]``. Raises ValueError unless it is from ``least`` to ``_MAX_NUMBER``."""
    value = entry[field]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= _MAX_NUMBER:
        raise ValueError(f"{field} must be at least {least} and at most {_MAX_NUMBER:,}, found {value!r:.40}")
    return number


def _rollouts_of_slime(folder: Path) -> list[list[float]]:
    """Returns the number of tokens of each response in slime's saved rollouts, one list per prompt, in rollout order."""
    import torch

    wanted = "a rollout of slime, as --save-debug-rollout-data FOLDER/{rollout_id}.pt saves it"
    groups: dict[int, list[float]] = {}
    files = [path for path in folder.glob("*.pt") if path.stem.isdecimal()]  # eval_0.pt holds a validation
    if not files:
        raise RlAccelError(f"--lengths: {folder}: wanted {wanted}, found none")
    for path in sorted(files, key=lambda path: int(path.stem)):
        try:
            for sample in torch.load(path, weights_only=True)["samples"]:
                groups.setdefault(sample["group_index"], []).append(max(int(sample["response_length"]), 1))
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, struct.error, *BAD_RECORD) as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0]
            raise RlAccelError(f"--lengths: {path}: wanted {wanted}, found {found}") from error
    if not groups:
        raise RlAccelError(f"--lengths: {folder}: wanted {wanted}, found no responses")
    return list(groups.values())
