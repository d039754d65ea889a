"""Trains a tiny model to write responses with the lengths published for a 14B model on mathematics, scaled to a small limit.

Each prompt contains one of twelve marks (A to L). The first token of a response is also a mark (M to X): with probability 0.5
the mark of the prompt, otherwise a random mark. The mark of the response determines the distribution of its length. Thus each
prompt has a typical length, its responses differ, and all lengths together follow the published distribution.
"""

import bisect
import itertools
import random
import string
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

LIMIT = 1024
"""Default limit of response tokens. The published lengths have a limit of 16,384."""
MEANS = (0.0089, 0.0184, 0.0247, 0.0304, 0.036, 0.0422, 0.0501, 0.063, 0.0896, 0.1733, 0.592, None)
"""Mean length of each mark as a share of the limit; None: the response never ends.

From RollPacker (NSDI'26), Fig. 2a, mathematics. The first ten values are quantiles of the lower 96%. The figure ends at 25% of
the limit, so 0.592 is assumed. 1% of the responses reach the limit."""
SHARES = (*[0.096] * 10, 0.03, 0.01)
"""Probability of each mark, in the order of ``MEANS``."""
PROMPT_MARKS = string.ascii_uppercase[: len(MEANS)]
RESPONSE_MARKS = string.ascii_uppercase[len(MEANS) : 2 * len(MEANS)]
FROM_PROMPT = 0.5
"""Probability that the mark of a response is the mark of its prompt."""
SMALLEST_LIMIT = 512
"""Smallest limit that was tried. Below 436, the short rows of the training hold no response after a prompt of 15 tokens."""
SHAPE = 2.5
"""Shape parameter of the Weibull distribution of response lengths with one mark. The standard deviation is 0.43 of the mean."""
NEVER = 1e-5
"""Small probability that stands for 0: the text ends after a token where it should not end."""
Writer = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Function that draws a random text of n characters. Returns the text, shape (n,), and the distribution from which each character
was drawn, shape (n, vocabulary)."""
STAGES = ((250, 64, 40), (50, 16, 160), (60, 4, LIMIT))
"""Stages of the training: number of steps, rows per step, and tokens per row (for the limit ``LIMIT``). The model first learns the
meaning of the marks from short rows, then to attend to a mark over a long distance."""


def marks_of_prompts(count: int, rng: random.Random) -> list[str]:
    """Returns ``count`` marks in random order, with exactly the counts that ``SHARES`` gives.

    Independent draws would vary too much: 200 prompts could have none, or five, with the mark that never ends.
    """
    bounds = list(itertools.accumulate(SHARES))
    marks = [PROMPT_MARKS[bisect.bisect(bounds, (i + 0.5) / count)] for i in range(count)]
    rng.shuffle(marks)
    return marks


def ending(limit: int) -> torch.Tensor:
    """Returns the probability that a response ends after n characters, for each mark and each n: shape (marks, limit)."""
    n = torch.arange(limit, dtype=torch.float64)
    rows = []
    for mean in MEANS:
        if mean is None:
            rows.append(torch.full_like(n, NEVER))
            continue
        scale = mean * limit / torch.tensor(1 + 1 / SHAPE, dtype=torch.float64).lgamma().exp()
        rows.append(-torch.expm1((n / scale) ** SHAPE - ((n + 1) / scale) ** SHAPE).clamp(max=-NEVER))
    return torch.stack(rows).float()


def teach(
    network: Qwen2ForCausalLM,
    tok: PreTrainedTokenizerFast,
    rng: random.Random,
    head: Callable[[int], tuple[list[int], "Writer"]],
    limit: int,
) -> float:
    """Trains ``network`` to write responses with the lengths of their marks, and returns the last loss.

    The target of each position is the whole distribution of the next token. This needs far fewer rows than sampled tokens would.

    Args:
        head: function of the index of a mark; returns the tokens of a prompt with this mark, and the writer of its responses.
        limit: tokens of the longest response.
    """
    marks = torch.tensor(tok.convert_tokens_to_ids(list(RESPONSE_MARKS)))
    by_chance = torch.zeros(network.config.vocab_size)
    by_chance[marks] = (1 - FROM_PROMPT) * torch.tensor(SHARES)
    ends = ending(limit)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=0.0)
    total = sum(steps for steps, _, _ in STAGES)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=total)
    loss = torch.zeros(())
    for steps, rows, tokens in STAGES:
        width = tokens * limit // LIMIT
        # Short marks are left out of long rows, which would train the model to continue after the end.
        taught = [mark for mark, mean in enumerate(MEANS) if mean is None or 8 * mean * limit > width]
        for _ in range(steps):
            ids, targets, weights = [], [], []
            for _ in range(rows):
                asked, own = rng.randrange(len(MEANS)), rng.choice(taught)
                prompt, write = head(asked)
                count = width - len(prompt) - 1
                body, characters = write(count)
                end = ends[own, :count, None]
                ids.append(torch.cat([torch.tensor(prompt), marks[own : own + 1], body]))
                first = by_chance.clone()
                first[marks[asked]] += FROM_PROMPT
                following = characters * (1 - end)
                following[:, tok.eos_token_id] = end[:, 0]
                nothing = torch.zeros(len(prompt) - 1, characters.shape[1])
                targets.append(torch.cat([nothing, first[None], following, following[-1:]])[:width])
                weights.append(torch.tensor([0.0] * (len(prompt) - 1) + [20.0] + [1.0] * count + [0.0])[:width])
            loss = _loss(network(input_ids=torch.stack(ids)).logits, torch.stack(targets), torch.stack(weights), tok)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return loss.item()


def _loss(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, tok: PreTrainedTokenizerFast
) -> torch.Tensor:
    """Returns the Kullback-Leibler divergence plus the error of the log-odds of an end, so that even rare ends are learned."""
    log_probs = logits.log_softmax(-1)
    divergence = (torch.special.xlogy(targets, targets) - targets * log_probs).sum(-1)
    in_body = weights == 1
    ends, log_ends = targets[..., tok.eos_token_id][in_body], log_probs[..., tok.eos_token_id][in_body]
    error = torch.logit(ends, 1e-9) - (log_ends - torch.log1p(-log_ends.exp().clamp(max=1 - 1e-6)))
    return (divergence * weights).sum() / weights.sum() + 0.05 * error.abs().mean()
