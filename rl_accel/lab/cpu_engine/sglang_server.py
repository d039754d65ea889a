"""Command ``rl-accel serve-cpu``: serves the CPU engine over the HTTP endpoints of SGLang that slime's rollout code uses.

A real ``sglang-router`` can run in front of this server (:mod:`rl_accel.lab.cpu_engine.router`). Request and response bodies follow
SGLang's native API (``/generate`` and others).
"""

import asyncio
import socket
import uuid
from pathlib import Path
from typing import Any

import click
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_accel.errors import ConfigError
from rl_accel.lab.cpu_engine.engine import Engine
from rl_accel.lab.cpu_engine.sampling import SamplingParams
from rl_accel.lab.cpu_engine.scheduler import EngineError, Generation

_TEXT_OPTIONS = ("no_stop_trim", "spaces_between_special_tokens", "skip_special_tokens")
"""Detokenization options among a request's sampling parameters. The engine does not get them. Only ``skip_special_tokens`` has an
effect here."""
_NOT_DONE = ("stream", "stop", "stop_regex", "json_schema", "regex", "ebnf", "custom_params", "image_data", "lora_path")


class Service:
    """HTTP handlers of a server with SGLang's API.

    Args:
        engine: generation engine.
        tokenizer: transformers tokenizer of the engine's model.
    """

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def generate(self, request: Request) -> Response:
        """Handles ``POST /generate``. The body holds ``input_ids``.

        The keys ``sampling_params``, ``rid`` (the request id) and ``return_logprob`` are optional.
        """
        body = await request.json()
        try:
            params = _sampling_params(body)
            rid = body.get("rid") or uuid.uuid4().hex
            answer = asyncio.wrap_future(self._engine.submit(rid, body["input_ids"], params))
        except (ValueError, KeyError, TypeError) as error:
            return _error(f"{type(error).__name__}: {error}")
        except EngineError as error:
            return _error(str(error), 503)
        gone = asyncio.create_task(_disconnected(request))
        first: list[asyncio.Future[Any]] = [answer, gone]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                return Response(status_code=499)
            return JSONResponse(self._answer(body, rid, params, answer.result()))
        except EngineError as error:
            return _error(str(error), 500)
        finally:
            gone.cancel()

    def _answer(self, body: dict[str, Any], rid: str, params: SamplingParams, generation: Generation) -> dict[str, Any]:
        """Returns the body of the HTTP response for a finished request."""
        reason: dict[str, Any]
        tokens = generation.token_ids
        if generation.stop_reason == "aborted":
            reason = {"type": "abort", "message": "Aborted"}
        elif self._engine.ends(tokens[-1], params):
            reason = {"type": "stop", "matched": tokens[-1]}
        else:
            reason = {"type": "length", "length": len(tokens)}  # max_tokens reached, or the context is full
        meta = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "num_retractions": generation.preemptions,
        }
        if body.get("return_logprob"):
            pairs = zip(tokens, generation.logprobs or [], strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for token, logprob in pairs]
        skip_special = bool((body.get("sampling_params") or {}).get("skip_special_tokens", True))
        text = self._tokenizer.decode(tokens, skip_special_tokens=skip_special)
        return {"text": text, "output_ids": tokens, "meta_info": meta}

    async def abort_request(self, request: Request) -> Response:
        """Handles ``POST /abort_request`` with the body ``{"rid": ...}`` or ``{"abort_all": true}``. An unknown request id is no
        error.

        Responds at once. The abort follows ``seconds_per_step`` seconds later, because SGLang's scheduler sees an abort only after
        the current decoding step.
        """
        body = await request.json()
        later = asyncio.get_running_loop().call_later
        if body.get("abort_all"):
            later(self._engine.seconds_per_step, self._engine.abort_all)
        elif body.get("rid"):
            later(self._engine.seconds_per_step, self._engine.abort, body["rid"])
        return Response()

    async def loads(self, _: Request) -> Response:
        """Handles ``GET /v1/loads``: returns numbers of requests."""
        stats = await asyncio.wrap_future(self._engine.stats())
        load = {
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": stats.running + stats.waiting,
        }
        return JSONResponse({"loads": [load]})

    async def metrics(self, _: Request) -> Response:
        """Handles ``GET /metrics``: returns counters in Prometheus' format."""
        stats = await asyncio.wrap_future(self._engine.stats())
        counters = {"generation_tokens": stats.tokens, "num_aborted_requests": stats.aborted}
        counters["num_retracted_requests"] = stats.preemptions
        lines = [f"# TYPE sglang:{name}_total counter\nsglang:{name}_total {n}" for name, n in counters.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def ok(self, _: Request) -> Response:
        """Handles ``GET /health``."""
        return JSONResponse({"success": True})


def _sampling_params(body: dict[str, Any]) -> SamplingParams:
    """Returns the sampling parameters in the body of a ``/generate`` request.

    Raises:
        ValueError: the body asks for something that the engine does not do.
    """
    params = {key: value for key, value in (body.get("sampling_params") or {}).items() if key not in _TEXT_OPTIONS}
    for name in _NOT_DONE:
        if params.pop(name, None) not in (None, [], False) or body.get(name) not in (None, [], False):
            raise ValueError(f"{name} is not supported by the CPU engine")
    if "sampling_seed" in params:
        params["seed"] = params.pop("sampling_seed")
    params["logprobs"] = True
    return SamplingParams.from_dict(params, max_tokens=128)


def _error(message: str, status: int = 400) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@click.command("serve-cpu")
@click.option("--model", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 takes a free one; the first line of output names it.")
@click.option("--max-running-requests", default=64, show_default=True, help="Requests decoded together.")
@click.option("--context-length", default=4096, show_default=True, help="Largest prompt and response together.")
@click.option(
    "--seconds-per-step", default=0.0, show_default=True, help="Least time of a decoding step, as of a GPU's."
)
@click.option(
    "--kv-tokens",
    type=int,
    help="Most tokens that running requests hold together; above it the youngest is preempted. [default: no limit]",
)
@click.option("--random-seed", default=0, show_default=True)
def serve_cpu(
    model: Path,
    host: str,
    port: int,
    max_running_requests: int,
    context_length: int,
    seconds_per_step: float,
    kv_tokens: int | None,
    random_seed: int,
) -> None:
    """Serve a transformers model on this CPU over the part of SGLang's API that slime's rollout code uses.

    For demonstrations and tests. Computes in float32 on one thread.
    """
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ends = network.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    try:
        engine = Engine(
            network,
            ends if isinstance(ends, list) else [ends],
            max_num_seqs=max_running_requests,
            max_model_len=context_length,
            seed=random_seed,
            seconds_per_step=seconds_per_step,
            kv_tokens=kv_tokens,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with socket.create_server((host, port)) as listener:
        url = f"http://{host}:{listener.getsockname()[1]}"
        click.echo(f"serving {model} at {url}")
        service = Service(engine, tokenizer)
        app = Starlette(
            routes=[
                Route("/generate", service.generate, methods=["POST"]),
                Route("/abort_request", service.abort_request, methods=["POST"]),
                Route("/v1/loads", service.loads),
                Route("/metrics", service.metrics),
                Route("/health", service.ok),
            ]
        )
        # Connections are not kept alive. With a hundred connections, slime's HTTP client spends CPU seconds on the search for an
        # idle connection.
        config = uvicorn.Config(app, log_level="warning", headers=[("Connection", "close")])
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            engine.close()
