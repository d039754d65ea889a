"""Token sampling that depends only on the seed, the position and the logits of a request.

A token is drawn by inverting the cumulative distribution at a uniform random number. This number is a hash of (seed, position), so
there is no generator state. The tokens of a request therefore do not depend on the other requests of the batch. After an abort, the
same tokens follow if the request is resumed with the tokens so far as part of the prompt.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_NEUTRAL = {
    "top_k": -1,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
}
"""Sampling parameters that this engine does not implement, each with the only value that it accepts: the one without effect."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. The names have the same meaning as in vLLM.

    A request without a seed gets one from the engine. ``logprobs`` asks for the log-probability of each sampled token under the
    distribution that the token was drawn from (after temperature; for greedy, the plain softmax).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.max_tokens, int) and self.max_tokens >= 1):
            raise ValueError(f"max_tokens wants an integer of at least 1, found {self.max_tokens!r}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature wants a finite value of at least 0, found {self.temperature!r}")

    @classmethod
    def from_dict(cls, params: Mapping[str, Any], **defaults: Any) -> "SamplingParams":
        """Builds parameters from ``params``, the sampling parameters that verl's agent loop sends with a request.

        ``defaults`` apply to keys of ``params`` that are absent or None.

        Raises:
            ValueError: a key is unknown, or a value is unsupported or out of range.
        """
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in defaults.items() if value is not None}
        for name, value in params.items():
            if name == "max_new_tokens":
                name = "max_tokens"
            if name in _NEUTRAL:
                if value is not None and value != _NEUTRAL[name]:
                    raise ValueError(f"sampling parameter {name}={value!r} is not supported by hf_cpu")
            elif name not in known:
                raise ValueError(f"unknown sampling parameter {name!r}; hf_cpu takes {', '.join(sorted(known))}")
            elif value is not None:
                values[name] = value
        if "stop_token_ids" in values:
            values["stop_token_ids"] = tuple(values["stop_token_ids"])
        # verl sends True or False. vLLM's value 0 also requests the log-probability of the drawn token.
        values["logprobs"] = values.get("logprobs", False) is not False
        return cls(**values)


def derive_seed(*parts: int | str | None) -> int:
    """Returns a 64-bit seed that depends only on ``parts``, so that it is the same in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns one random number per row, float64 [B], uniform in [0, 1).

    It is number ``positions[row]`` of the random generator SplitMix64 (Steele, Lea and Flood, 2014) with the seed ``seeds[row]``.
    """
    with np.errstate(over="ignore"):
        z: npt.NDArray[np.uint64] = seeds + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


class BatchSampler:
    """Sampler for the running requests of a batch, called at every decoding step and replaced when a request joins or leaves."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int]) -> None:
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        self._greedy = temperature == 0
        self._any_greedy = bool(self._greedy.any())
        self._scale = torch.where(self._greedy, torch.ones_like(temperature), temperature)[:, None]
        self._rescale = bool((self._scale != 1).any())
        self._seeds = np.array(seeds, dtype=np.uint64)

    def __call__(self, logits: torch.Tensor, positions: Sequence[int]) -> tuple[list[int], list[float]]:
        """Draws one token per row of ``logits`` [B, V] float32. ``positions`` [B]: index of each new token in prompt and response.

        Returns token ids and their log-probabilities, both of length B. A row whose logits are not finite gives token id -1.
        """
        if self._rescale:
            logits = logits / self._scale
        logprobs = torch.log_softmax(logits, dim=-1)
        cumulative = logprobs.double().exp_().cumsum_(dim=-1)
        u = torch.from_numpy(uniforms(self._seeds, np.asarray(positions, dtype=np.uint64)))
        # The target is strictly below the last cumulative sum despite rounding, and right=True finds the first cumulative sum
        # strictly above the target. A token of zero probability is therefore never drawn.
        mass = cumulative[:, -1]
        target = torch.minimum(u * mass, torch.nextafter(mass, torch.zeros_like(mass)))
        tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        if self._any_greedy:
            tokens = torch.where(self._greedy, logprobs.argmax(dim=-1), tokens)
        broken = ~torch.isfinite(mass)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        return tokens.masked_fill_(broken, -1).tolist(), chosen.tolist()
