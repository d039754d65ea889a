"""Command ``rl-accel serve-cpu``: serves the CPU engine over the HTTP endpoints of SGLang that slime's rollout code uses.

A real ``sglang-router`` can run in front of this server (:mod:`rl_accel.lab.cpu_engine.router`). Request and response bodies follow
SGLang's native API (``/generate`` and others).
"""

import asyncio
import socket
import time
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
from rl_accel.lab.cpu_engine.scheduler import EngineError, EngineStats, Generation

_TEXT_OPTIONS = {"no_stop_trim": True, "spaces_between_special_tokens": False, "skip_special_tokens": None}
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
        self.engine = engine
        self.tokenizer = tokenizer

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self.engine.stats())

    async def generate(self, request: Request) -> Response:
        """Handles ``POST /generate``. The body holds ``input_ids`` or ``text``.

        The keys ``sampling_params``, ``rid`` (the request id) and ``return_logprob`` are optional.
        """
        body = await request.json()
        try:
            call = _Call(self, body)
        except (ValueError, KeyError, TypeError) as error:
            return _error(f"{type(error).__name__}: {error}")
        except EngineError as error:
            return _error(str(error), 503)
        gone = asyncio.create_task(_disconnected(request))
        first: list[asyncio.Future[Any]] = [call.done, gone]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not call.done.done():
                call.done.cancel()
                return Response(status_code=499)
            return JSONResponse(call.answer(call.done.result()))
        except EngineError as error:
            return _error(str(error), 500)
        finally:
            gone.cancel()

    async def abort_request(self, request: Request) -> Response:
        """Handles ``POST /abort_request`` with the body ``{"rid": ...}`` or ``{"abort_all": true}``. An unknown request id is no
        error.

        Responds at once. The abort follows ``seconds_per_step`` seconds later, because SGLang's scheduler sees an abort only after
        the current decoding step.
        """
        body = await request.json()
        later = asyncio.get_running_loop().call_later
        if body.get("abort_all"):
            later(self.engine.seconds_per_step, self.engine.abort_all)
        elif body.get("rid"):
            later(self.engine.seconds_per_step, self.engine.abort, body["rid"])
        return Response()

    async def loads(self, _: Request) -> Response:
        """Handles ``GET /v1/loads``: returns numbers of requests and the use of the key-value cache."""
        stats = await self.stats()
        load: dict[str, float] = {
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": stats.running + stats.waiting,
            "num_used_tokens": stats.kv_used,
        }
        if stats.kv_tokens is not None:
            load |= {"max_total_num_tokens": stats.kv_tokens, "token_usage": stats.kv_used / stats.kv_tokens}
        return JSONResponse({"loads": [load]})

    async def metrics(self, _: Request) -> Response:
        """Handles ``GET /metrics``. If the key-value cache has no limit, the limit and the share in use are omitted."""
        stats = await self.stats()
        values: dict[str, float] = {
            "num_running_reqs gauge": stats.running,
            "num_queue_reqs gauge": stats.waiting,
            "num_used_tokens gauge": stats.kv_used,
            "generation_tokens_total counter": stats.tokens,
            "num_aborted_requests_total counter": stats.aborted,
            "num_retracted_requests_total counter": stats.preemptions,
        }
        if stats.kv_tokens is not None:
            values |= {
                "max_total_num_tokens gauge": stats.kv_tokens,
                "token_usage gauge": stats.kv_used / stats.kv_tokens,
            }
        lines = [f"# TYPE sglang:{name}\nsglang:{name.split()[0]} {value}" for name, value in values.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def ok(self, _: Request) -> Response:
        """Handles ``GET /health``."""
        return JSONResponse({"success": True})


class _Call:
    """A ``/generate`` request in progress."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        params = {
            key: value for key, value in dict(body.get("sampling_params") or {}).items() if key not in _TEXT_OPTIONS
        }
        for name in _NOT_DONE:
            if params.pop(name, None) not in (None, [], False) or body.get(name) not in (None, [], False):
                raise ValueError(f"{name} is not supported by the CPU engine")
        if "sampling_seed" in params:
            params["seed"] = params.pop("sampling_seed")
        params["logprobs"] = True
        prompt = body.get("input_ids")
        if prompt is None:
            prompt = service.tokenizer.encode(body["text"])
        self._service = service
        self._params = SamplingParams.from_dict(params, max_tokens=128)
        self._skip_special = bool((body.get("sampling_params") or {}).get("skip_special_tokens", True))
        self._logprobs_wanted = bool(body.get("return_logprob"))
        self._rid = body.get("rid") or uuid.uuid4().hex
        self._prompt_tokens = len(prompt)
        self._began = time.monotonic()
        self.done = asyncio.wrap_future(service.engine.submit(self._rid, prompt, self._params))

    def answer(self, generation: Generation) -> dict[str, Any]:
        """Returns the body of the HTTP response for the finished ``generation``."""
        reason: dict[str, Any]
        tokens = generation.token_ids
        if generation.stop_reason == "aborted":
            reason = {"type": "abort", "message": "Aborted"}
        elif self._service.engine.ends(tokens[-1], self._params):
            reason = {"type": "stop", "matched": tokens[-1]}
        else:
            reason = {"type": "length", "length": len(tokens)}  # max_tokens reached, or the context is full
        meta = {
            "id": self._rid,
            "finish_reason": reason,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": "default",
            "e2e_latency": time.monotonic() - self._began,
            "num_retractions": generation.preemptions,
        }
        if self._logprobs_wanted:
            pairs = zip(tokens, generation.logprobs or [], strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for token, logprob in pairs]
        text = self._service.tokenizer.decode(tokens, skip_special_tokens=self._skip_special)
        return {"text": text, "output_ids": tokens, "meta_info": meta}


def _error(message: str, status: int = 400) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def application(service: Service) -> Starlette:
    """Returns the ASGI application that routes HTTP requests to the handlers of ``service``."""
    return Starlette(
        routes=[
            Route("/generate", service.generate, methods=["POST"]),
            Route("/abort_request", service.abort_request, methods=["POST"]),
            Route("/v1/loads", service.loads),
            Route("/metrics", service.metrics),
            Route("/health", service.ok),
        ]
    )


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
        app = application(Service(engine, tokenizer))
        # Connections are not kept alive. With a hundred connections, slime's HTTP client spends CPU seconds on the search for an
        # idle connection.
        config = uvicorn.Config(app, log_level="warning", headers=[("Connection", "close")])
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            engine.close()
