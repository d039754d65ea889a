"""Response lengths as published for a 14B model on mathematics, scaled to a small limit, and a tiny model that keeps to them.

A prompt carries one of twelve marks (A to L). The first token of a response is a mark as well (M to X), every other
time the prompt's own, else a random one, and says how long the response tends to be. So a prompt has a typical length,
its responses still differ, and over all responses the lengths follow the published distribution.
"""

import bisect
import itertools
import random
import string
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

LIMIT = 1024
"""Tokens of the longest response unless another limit is given; the published lengths belong to one of 16,384."""
MEANS = (0.0089, 0.0184, 0.0247, 0.0304, 0.036, 0.0422, 0.0501, 0.063, 0.0896, 0.1733, 0.592, None)
"""Mean length of each mark as a share of the limit; None never ends. RollPacker (NSDI'26), Fig. 2a, mathematics: the first ten
are quantiles of the lower 96 %. The figure is not drawn from 25 % of the limit on, so 0.592 is our choice; 1 % end at the limit."""
SHARES = (*[0.096] * 10, 0.03, 0.01)
"""How often each mark occurs."""
PROMPT_MARKS = string.ascii_uppercase[: len(MEANS)]
RESPONSE_MARKS = string.ascii_uppercase[len(MEANS) : 2 * len(MEANS)]
FROM_PROMPT = 0.5
"""Share of responses whose mark is that of their prompt."""
SHAPE = 2.5
"""Weibull shape of the lengths within a mark: their deviation is 0.43 of their mean."""
NEVER = 1e-5
"""Probability of an end after each token where there should be none."""
Writer = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Returns a text of n characters, shape (n,), and the distribution that each is drawn from, shape (n, vocabulary)."""
STAGES = ((250, 64, 40), (50, 16, 160), (60, 4, LIMIT))
"""Steps, rows and tokens of a row at that limit: what a mark means is learned on short rows, then that it holds however far
away."""


def marks_of_prompts(count: int, rng: random.Random) -> list[str]:
    """Return ``count`` marks in random order, each as often as its share says: drawn one by one, 200 prompts may well have
    none or five of the mark that never ends.
    """
    bounds = list(itertools.accumulate(SHARES))
    marks = [PROMPT_MARKS[bisect.bisect(bounds, (i + 0.5) / count)] for i in range(count)]
    rng.shuffle(marks)
    return marks


def ending(limit: int) -> torch.Tensor:
    """Return the probability that a response of each mark ends after n characters, shape (marks, limit)."""
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
    """Train ``network`` to write characters and to end as the marks say; return the last loss.

    Every position is taught the whole distribution of the next token, which takes far fewer rows than samples from it.

    Args:
        head: returns, for the number of a mark, the tokens of a prompt with it and what writes its responses.
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
        # In a long row the short marks would teach how to go on after the end.
        taught = [mark for mark, mean in enumerate(MEANS) if mean is None or 8 * mean * limit > width]
        for _ in range(steps):
            ids, wanted, weight = [], [], []
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
                wanted.append(torch.cat([nothing, first[None], following, following[-1:]])[:width])
                weight.append(torch.tensor([0.0] * (len(prompt) - 1) + [20.0] + [1.0] * count + [0.0])[:width])
            loss = _loss(network(input_ids=torch.stack(ids)).logits, torch.stack(wanted), torch.stack(weight), tok)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return loss.item()


def _loss(
    logits: torch.Tensor, wanted: torch.Tensor, weight: torch.Tensor, tok: PreTrainedTokenizerFast
) -> torch.Tensor:
    """Kullback-Leibler divergence, and the error of the log-odds of an end: a rare one is the point of the exercise."""
    found = logits.log_softmax(-1)
    divergence = (torch.special.xlogy(wanted, wanted) - wanted * found).sum(-1)
    in_body = weight == 1
    ends, found_ends = wanted[..., tok.eos_token_id][in_body], found[..., tok.eos_token_id][in_body]
    error = torch.logit(ends, 1e-9) - (found_ends - torch.log1p(-found_ends.exp().clamp(max=1 - 1e-6)))
    return (divergence * weight).sum() / weight.sum() + 0.05 * error.abs().mean()
