"""Tail batching: rounds that end with the first P0 prompts to complete, and lose no prompt (RollPacker, NSDI'26)."""

from collections.abc import Iterable, Mapping
from typing import Any

from rl_accel.rollout.tail_decisions import CheckGroup, Decision, Group, PromptFailed
from rl_accel.rollout.tail_prompts import Prompt, PromptPool, Response
from rl_accel.rollout.tail_rounds import Phase, Rounds
from rl_accel.rollout.tail_settings import DEFAULT_RATIO

_FORMAT = "rl_accel.tail_batching"
_VERSION = 1
_MUST_AGREE = ("format", "version", "prompts_per_step", "responses_per_prompt", "data_id")


class TailBatching(Rounds):
    """Decides what to launch, what to cancel and what to train on. No I/O and no clock: events in, decisions out.

    A **short** round launches more prompts than the P0 it needs, and more than R0 responses of each. The first R0
    responses of a prompt to finish *generating* are its group; the others are cancelled at once, so a slow judge cannot
    make a response look long. A prompt is complete when its R0 are scored; the first P0 complete prompts are the batch.
    Everything else is cancelled and launched anew in a later round: strictly on-policy. Prompts that were cut off wait
    in a queue. When it holds enough, a **long** round runs P0 of them with R0 responses each and waits for all. When the
    data is exhausted and too little is left for a short round, **final** rounds do so with the rest, deferred prompts
    first.

    Every prompt is trained, rejected or reported as failed exactly once, and every batch is P0 groups of R0. In the end
    fewer than P0 prompts can be left. A smaller batch would not fit the host's mini-batches, so they are named in
    ``Finished`` and stay in the queue. (A data loader that drops the last partial batch loses as many in every epoch.)

    **What the host does.** It calls ``begin_round``, carries out the decisions each call returns, in their order, and
    reports what happens. ``now`` is in seconds of one clock of its choice.

    - ``RequestPrompts``: ``offer`` new ids, ``end_epoch`` where an epoch ends, ``data_exhausted`` after the last one. An
      id is the key under which the host finds its payload; it is unique for each epoch and row, say ``"2:1017"``.
    - ``Launch``: each response ends in one of three ways. ``response_generated``, then ``response_scored``.
      ``response_failed`` (engine, agent loop or judge), which is retried. Or ``response_aborted`` once it is cancelled,
      which must come for each one, also if it had just finished or its server is gone.
    - ``CheckGroup`` (only with ``filter_groups``): ``group_kept`` or ``group_rejected``, which is refilled at once.
    - ``TrainBatch``: train on exactly these. ``RoundEnded``: all is settled; begin the next round after the update.

    Messages may be late: an event about a response that is settled already is ignored. Ids of responses never recur.

    **Save and resume.** ``state_dict`` works at any time. It holds prompts, not responses; a batch counts as trained
    from ``TrainBatch`` on, so save it with the checkpoint that contains the update. The host saves, as of the same
    moment, the payloads of ``unsettled_prompts`` and its position in the data. After ``load_state_dict`` no round is
    open: prompts that were in flight wait again, none deferred or lost by it. The host drops what is left of older
    responses, does not offer unsettled prompts again, and begins a round. That the data was exhausted is not saved: a
    resumed run may have more.
    """

    # Between rounds

    def begin_round(self, now: float) -> list[Decision]:
        """Open the next round.

        Raises:
            ValueError: the last round is not over.
        """
        if self._phase is not Phase.BETWEEN_ROUNDS:
            raise ValueError(f"begin_round must come between rounds, but {self._phase.value}")
        fixed = self.settings.prompt_ratio
        self._ratio = self._times.best_ratio(DEFAULT_RATIO, self.settings.auto_limit) if fixed == "auto" else fixed
        self._phase = Phase.FILLING
        return self._fill(now)

    def offer(self, prompt_ids: Iterable[str], now: float, domain: str = "") -> list[Decision]:
        """Take over new prompts, at any time and of any number. Without quotas the domain is not looked at.

        Raises:
            TypeError, ValueError: an id is no string, or is known already, or the domain has no quota.
        """
        self._pool.offer(prompt_ids, domain)
        self._exhausted = False
        return self._supply(now)

    def data_exhausted(self, now: float) -> list[Decision]:
        """There are no more prompts (until some are offered after all)."""
        self._exhausted = True
        return self._supply(now)

    def end_epoch(self) -> list[Decision]:
        """Count prompts offered from now on to the next epoch."""
        return list(self._pool.end_epoch())

    @property
    def is_settling(self) -> bool:
        """Whether the open round has its batch, or was given up, and only waits for cancelled responses."""
        return self._phase is Phase.SETTLING

    # Responses and groups

    def response_generated(self, response_id: int, tokens: int, now: float) -> list[Decision]:
        """Generation of a response has finished; its judge may still be at work.

        Raises:
            ValueError: no such response was launched, it had finished before, or ``tokens`` is negative.
        """
        response = self._find(response_id)
        _check_tokens(tokens)
        if response is None or response.cancelled:
            return []
        if response.tokens >= 0:
            raise ValueError(f"response_id must be of a response that is generating, but {response_id} had finished")
        response.tokens = tokens
        prompt = response.prompt
        prompt.generated.append(response_id)
        if len(prompt.generated) < self.settings.responses_per_prompt:
            return []
        return self._cancel(prompt, [i for i, r in prompt.responses.items() if r.tokens < 0])

    def response_scored(self, response_id: int, now: float) -> list[Decision]:
        """The reward of a generated response is there.

        Raises:
            ValueError: no such response was launched, it is still generating, or it was scored before.
        """
        response = self._find(response_id)
        if response is None or response.cancelled:
            return []
        if response.tokens < 0 or response.scored:
            found = "was scored before" if response.scored else "is still generating"
            raise ValueError(f"response_id must be of a response without a score, but {response_id} {found}")
        response.scored = True
        prompt = response.prompt
        prompt.scored_at.append(now)
        if len(prompt.scored_at) < self.settings.responses_per_prompt:
            return []
        self._observe(prompt)
        if not self.settings.filter_groups:
            return self._keep(prompt, now)
        prompt.awaits_verdict = True
        return [CheckGroup(Group(prompt.id, tuple(prompt.generated)))]

    def response_failed(self, response_id: int, tokens: int, now: float) -> list[Decision]:
        """The engine, the agent loop or the judge failed on a response, after ``tokens`` tokens.

        Raises:
            ValueError: no such response was launched, it was scored before, or ``tokens`` is negative.
        """
        response = self._find(response_id)
        _check_tokens(tokens)
        if response is None:
            return []
        if response.cancelled:
            return self.response_aborted(response_id, tokens, now)
        if response.scored:
            raise ValueError(f"response_id must be of a response without a score, but {response_id} was scored before")
        prompt = response.prompt
        del self._responses[response_id], prompt.responses[response_id]
        if response.tokens >= 0:
            prompt.generated.remove(response_id)
        self._tally.failed_responses += 1
        self._tally.wasted_tokens += tokens
        if response.retries < self.settings.max_retries:
            return [self._launch(prompt, 1, response.retries + 1)]
        if len(prompt.responses) >= self.settings.responses_per_prompt:
            return []
        decisions = self._cancel(prompt, list(prompt.responses))
        decisions.append(PromptFailed(prompt.id))
        self._tally.failed += 1
        decisions += self._pool.settle(prompt, "failed")
        return decisions + self._drop(prompt, now)

    def response_aborted(self, response_id: int, tokens: int, now: float) -> list[Decision]:
        """A cancelled response has stopped after ``tokens`` tokens and left nothing behind.

        Raises:
            ValueError: no such response was launched, it was not cancelled, or ``tokens`` is negative.
        """
        response = self._find(response_id)
        _check_tokens(tokens)
        if response is None:
            return []
        if not response.cancelled:
            raise ValueError(f"response_id must be of a cancelled response, but {response_id} was not cancelled")
        del self._responses[response_id]
        self._unacknowledged -= 1
        self._tally.wasted_tokens += tokens
        response.prompt.surplus_tokens.append(tokens)
        return self._end_if_settled()

    def group_kept(self, group: Group, now: float) -> list[Decision]:
        """The filter lets a complete group pass."""
        prompt = self._checked(group)
        return self._keep(prompt, now) if prompt else []

    def group_rejected(self, group: Group, now: float) -> list[Decision]:
        """The filter rejects a complete group; another prompt takes its place."""
        prompt = self._checked(group)
        if prompt is None:
            return []
        self._tally.rejected_tokens += self._release(prompt)
        self._tally.rejected += 1
        return [*self._pool.settle(prompt, "rejected"), *self._drop(prompt, now)]

    # Saving

    def unsettled_prompts(self) -> list[str]:
        """Return the ids of all prompts that were offered and are not trained, rejected or failed."""
        return list(self._pool.unsettled)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, ready for JSON."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "prompts_per_step": self.settings.prompts_per_step,
            "responses_per_prompt": self.settings.responses_per_prompt,
            "data_id": self.settings.data_id,
            "rounds": self._rounds - (self._phase is Phase.OPEN),
            "next_response": self._next_response,
            "pool": self._pool.state_dict(),
            "times": self._times.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, in place of any other. Ratios, thresholds and quotas may differ from the saved run's.

        Raises:
            ValueError: the state is of another kind, version, P0, R0 or data, or it is damaged; nothing has changed then.
        """
        wanted = {key: value for key, value in TailBatching(self.settings).state_dict().items() if key in _MUST_AGREE}
        for key, value in wanted.items():
            found = state.get(key) if isinstance(state, Mapping) else type(state).__name__
            if found != value:
                raise ValueError(f"state must have {key} = {value!r}, found {found!r}")
        resumed = TailBatching(self.settings)
        try:
            resumed._rounds, resumed._next_response = int(state["rounds"]), int(state["next_response"])
            resumed._pool = PromptPool.restored(self.settings, state["pool"])
            resumed._times.load_state_dict(state["times"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"state is damaged or does not fit: {type(error).__name__}: {error}") from error
        self.__dict__.update(resumed.__dict__)

    def _find(self, response_id: int) -> Response | None:
        """Return the response, or None if it is settled already."""
        response = self._responses.get(response_id)
        if response is None and not (isinstance(response_id, int) and 0 <= response_id < self._next_response):
            raise ValueError(f"response_id must be of a response that was launched, found {response_id!r}")
        return response

    def _checked(self, group: Group) -> Prompt | None:
        """Return the prompt whose group awaits a verdict, or None if the verdict comes too late."""
        if not self.settings.filter_groups:
            raise ValueError("filter_groups must be set for a group to be kept or rejected, found False")
        for response_id in group.response_ids:
            self._find(response_id)
        prompt = self._pool.unsettled.get(group.prompt_id)
        if prompt is None or not prompt.awaits_verdict or tuple(prompt.generated) != group.response_ids:
            return None
        if prompt.id not in self._pool.lane_of(prompt).active:
            return None
        prompt.awaits_verdict = False
        return prompt


def _check_tokens(tokens: int) -> None:
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, found {tokens}")
