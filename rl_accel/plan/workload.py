"""What a run has to generate: lengths of responses, how alike those of one prompt are, and how long rewards take.

Lengths are ranked, and the ranks cut into twelve classes, narrow at the top: tenths up to 0.9, then 0.96, 0.99, 1. A prompt has a
class. Each of its responses is of that class with probability ``alike``, else of any, by its share; within a class it takes any
rank. So all responses together keep the distribution, a prompt that is long stays long when tried again, and one that was long by
chance does not. The responses of a run tell the class of each of its prompts, more or less surely.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.rollout.simulation import Floats, Ints

EDGES = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99, 1.0])
_SHARES = np.diff(EDGES)
_POINTS = 20_000
PUBLISHED = {"math16k": "math", "code16k": "code", "judge16k": "judge"}
"""By name, the domain of a published distribution of lengths (RollPacker, NSDI'26, Fig. 2a; a 14B model, limit 16,384 tokens)."""
PUBLISHED_ALIKE = 0.38
"""Not published: fitted to RollPacker's ablation of rollouts, see docs/plan.md."""
PUBLISHED_LIMIT = 16384


@dataclass(frozen=True)
class Lengths:
    """A workload of drawn lengths; see the module's text.

    Args:
        tokens: ascending quantiles of all lengths, equally likely.
        alike: probability that a response is of its prompt's class.
        classes: of each prompt of the data, in their order, the probability of each class, shape [P, 12]; None: any number of
            prompts, each as likely of a class as responses are.
        prompt_tokens: of a prompt.
        rewards: seconds of rewards, equally likely; empty: no time.
        source: where it is from, in words.
    """

    tokens: Ints
    alike: float
    classes: Floats | None = None
    prompt_tokens: int = 0
    rewards: Floats = field(default_factory=lambda: np.empty(0))
    source: str = ""
    _known: dict[int, int] = field(default_factory=dict)

    def lengths(self, prompts: Sequence[int], responses: int, rng: np.random.Generator) -> Ints:
        """Draw tokens of new responses, shape [P, R]. A prompt keeps its class as long as this object lives."""
        new = [prompt for prompt in prompts if prompt not in self._known]
        if new:
            self._known.update(zip(new, self._draw_classes(new, rng).tolist(), strict=True))
        own = np.array([self._known[prompt] for prompt in prompts])[:, None]
        shape = (len(prompts), responses)
        any_class = np.searchsorted(EDGES, rng.random(shape), side="right") - 1
        at = np.where(rng.random(shape) < self.alike, own, any_class)
        ranks = EDGES[at] + _SHARES[at] * rng.random(shape)
        found: Ints = self.tokens[np.minimum((ranks * len(self.tokens)).astype(int), len(self.tokens) - 1)]
        return found

    def reward_seconds(self, count: int, rng: np.random.Generator) -> Floats | None:
        """Draw how long rewards take, shape [count]; None: no time."""
        return rng.choice(self.rewards, count) if len(self.rewards) else None

    def drawn(self) -> "Lengths":
        """Return the same workload with none of its prompts drawn yet."""
        return replace(self, _known={})

    def limited(self, limit: int) -> "Lengths":
        """Return the workload with no response longer than ``limit``."""
        return replace(self, tokens=np.minimum(self.tokens, limit), _known={})

    @property
    def limit(self) -> int:
        """Tokens of the longest response."""
        return int(self.tokens[-1])

    def _draw_classes(self, prompts: Sequence[int], rng: np.random.Generator) -> Ints:
        chance = rng.random((len(prompts), 1))
        if self.classes is None:
            return np.searchsorted(EDGES, chance[:, 0], side="right") - 1
        cumulative = np.cumsum(self.classes[np.array(prompts) % len(self.classes)], axis=1)
        found: Ints = np.minimum((cumulative < chance).sum(axis=1), len(_SHARES) - 1)
        return found


def from_groups(groups: Sequence[Sequence[float]], source: str, **more: Any) -> Lengths:
    """Return the workload of a run. How alike its responses are follows from the covariance of their log lengths within prompts.

    Args:
        groups: tokens of the responses of each prompt, at least one each, in the order of the data.
        source: where they are from.
        more: further fields of :class:`Lengths`.
    """
    every = np.sort(np.concatenate([np.asarray(group, float) for group in groups]))
    tokens: Ints = np.maximum(every.round(), 1).astype(np.int64)
    counts = np.zeros((len(groups), len(_SHARES)))
    size = np.log(tokens)
    pairs = together = 0.0
    for row, group in enumerate(groups):
        # A length that many responses have (the limit) spans several ranks: it counts with the middle one.
        low, high = (np.searchsorted(tokens, np.round(group), side=side) for side in ("left", "right"))
        ranks = (low + high) / (2 * len(tokens))
        np.add.at(counts[row], np.minimum(np.searchsorted(EDGES, ranks, side="right") - 1, len(_SHARES) - 1), 1)
        off = np.log(np.maximum(group, 1)) - size.mean()
        together += off.sum() ** 2 - (off**2).sum()
        pairs += len(off) * (len(off) - 1)
    bounds = (EDGES * len(tokens)).round().astype(int)
    of_classes = np.array([size[low:high].mean() if high > low else size.mean() for low, high in pairwise(bounds)])
    between = (_SHARES * (of_classes - size.mean()) ** 2).sum()
    alike = math.sqrt(min(max(together / pairs / between, 0.0), 1.0)) if pairs and between else 0.0
    return Lengths(tokens, alike, _posterior(counts, alike), source=source, **more)


def _posterior(counts: Floats, alike: float) -> Floats:
    """How likely a prompt is of each class, given how many of its responses are."""
    alike = min(alike, 0.999)
    ratio = np.log1p(alike / (1 - alike) / _SHARES)  # a response of the prompt's class against one of another
    logarithms = np.log(_SHARES) + counts * ratio
    likely = np.exp(logarithms - logarithms.max(1, keepdims=True))
    posterior: Floats = likely / likely.sum(1, keepdims=True)
    return posterior


def published(name: str, alike: float = PUBLISHED_ALIKE) -> Lengths:
    """Return a published workload, ``math16k``, ``code16k`` or ``judge16k``.

    Above a quarter of the limit the figure is not drawn: the density is taken to be level from there to the limit.

    Raises:
        RlAccelError: there is none of this name.
    """
    if name not in PUBLISHED:
        raise RlAccelError(f"--lengths published:{name}: wanted one of {', '.join(PUBLISHED)}, found {name!r}")
    data = load("response_length_cdf.json")
    domain = PUBLISHED[name]
    figure = data["domains"][domain]
    tokens = [0, *figure["tokens"], PUBLISHED_LIMIT]
    ranks = [0.0, *(share / 100 for share in figure["cum_pct"]), 1 - data["cap_pct"][domain] / 100]
    middle = (np.arange(_POINTS) + 0.5) / _POINTS
    quantiles = np.interp(middle, ranks, tokens).round().astype(np.int64)
    return Lengths(np.maximum(quantiles, 1), alike, source=f"{data['source']}; {domain}")


def load(name: str) -> dict[str, Any]:
    """Return a file of published numbers."""
    found: dict[str, Any] = json.loads(resources.files("rl_accel.plan").joinpath("data", name).read_text())
    return found


def read_lengths(path: Path) -> Lengths:
    """Read lengths from lines ``{"prompt": id, "tokens": n}``, in the order of the data; ``reward_seconds`` may be there too.

    Raises:
        RlAccelError: the file cannot be read or a line is none of these.
    """
    groups: dict[str, list[float]] = {}
    rewards: list[float] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RlAccelError(f"--lengths: cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            tokens = float(entry["tokens"])
            if not tokens >= 1:
                raise ValueError(f"tokens must be at least 1, found {tokens:g}")
            groups.setdefault(str(entry["prompt"]), []).append(tokens)
            if "reward_seconds" in entry:
                rewards.append(float(entry["reward_seconds"]))
        except (ValueError, TypeError, KeyError) as error:
            wanted = 'lines such as {"prompt": "17", "tokens": 812}, with "reward_seconds" if rewards take time'
            raise RlAccelError(f"--lengths: {path}, line {number}: wanted {wanted}, found {error!r}") from error
    if not groups:
        raise RlAccelError(
            f'--lengths: {path} holds no lengths: wanted lines such as {{"prompt": "17", "tokens": 812}}'
        )
    return from_groups(list(groups.values()), str(path), rewards=np.array(rewards))
