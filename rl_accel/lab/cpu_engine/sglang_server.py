"""The CPU engine behind the HTTP endpoints of an SGLang server that slime uses, router included: one process is a whole cluster.

``rl-accel serve-cpu --model FOLDER`` runs it. Bodies and answers follow SGLang's native API (``/generate`` and friends).
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from rl_accel.lab.cpu_engine.engine import Engine
from rl_accel.lab.cpu_engine.sampling import SamplingParams
from rl_accel.lab.cpu_engine.scheduler import EngineError, EngineStats, Generation

_TEXT_OPTIONS = {"no_stop_trim": True, "spaces_between_special_tokens": False, "skip_special_tokens": None}
"""How an answer is made into text; every value slime sends is accepted."""
_NOT_DONE = ("stop", "stop_regex", "json_schema", "regex", "ebnf", "custom_params", "image_data", "lora_path")


class Service:
    """An engine, its tokenizer, and the state an SGLang server has besides.

    Args:
        engine: generates.
        tokenizer: a transformers tokenizer.
        model_path: what ``/model_info`` says.
        url: under which ``/workers`` lists this server.
    """

    def __init__(self, engine: Engine, tokenizer: Any, model_path: str, url: str = "") -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_path = model_path
        self.url = url
        self.weight_version = "default"

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self.engine.stats())

    # Generation

    async def generate(self, request: Request) -> Response:
        """``POST /generate``: ``input_ids`` or ``text``, ``sampling_params``; may have ``rid``, ``stream``, ``return_logprob``."""
        body = await request.json()
        try:
            call = _Call(self, body)
        except (ValueError, KeyError, TypeError) as error:
            return _error(f"{type(error).__name__}: {error}")
        except EngineError as error:
            return _error(str(error), 503)
        if body.get("stream"):
            return StreamingResponse(call.stream(), media_type="text/event-stream")
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
        """``POST /abort_request``: ``{"rid": ...}`` or ``{"abort_all": true}``. An unknown id is no error.

        As SGLang's, the answer comes at once, and the scheduler sees the order after the decoding step it is in.
        """
        body = await request.json()
        later = asyncio.get_running_loop().call_later
        if body.get("abort_all"):
            later(self.engine.seconds_per_step, self.engine.abort_all)
        elif body.get("rid"):
            later(self.engine.seconds_per_step, self.engine.abort, body["rid"])
        return Response()

    # What a trainer does between rollouts

    async def pause_generation(self, _: Request) -> Response:
        """End every request and hold new ones."""
        await asyncio.wrap_future(self.engine.pause())
        return JSONResponse({"status": "ok", "message": "generation is paused"})

    async def continue_generation(self, _: Request) -> Response:
        """Go on after :meth:`pause_generation`."""
        await asyncio.wrap_future(self.engine.resume())
        return JSONResponse({"status": "ok", "message": "generation goes on"})

    async def update_weights_from_disk(self, request: Request) -> Response:
        """``{"model_path": folder, "weight_version": text}``. Everything or nothing is taken over; requests end first."""
        from transformers import AutoModelForCausalLM

        body = await request.json()
        try:
            weights = await asyncio.to_thread(
                lambda: AutoModelForCausalLM.from_pretrained(body["model_path"], dtype=torch.float32).state_dict()
            )
            await asyncio.wrap_future(self.engine.abort_all())
            await asyncio.wrap_future(self.engine.load_weights(weights))
        except (KeyError, OSError, ValueError, EngineError) as error:
            return JSONResponse({"success": False, "message": f"{type(error).__name__}: {error}"}, status_code=400)
        self.model_path = body["model_path"]
        self.weight_version = str(body.get("weight_version") or self.weight_version)
        return JSONResponse({"success": True, "message": "weights are taken over"})

    # What a server says of itself

    async def loads(self, _: Request) -> Response:
        """``GET /v1/loads``."""
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

    async def workers(self, _: Request) -> Response:
        """``GET /workers``, of the router: this server is its own only worker."""
        return JSONResponse({"workers": [{"id": "cpu-0", "url": self.url, "worker_type": "regular"}]})

    async def info(self, _: Request) -> Response:
        """``GET /server_info`` and ``/model_info``; ``internal_states`` has the engine's counts."""
        stats = await self.stats()
        return JSONResponse(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "served_model_name": self.model_path,
                "is_generation": True,
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "version": "rl-accel-cpu",
                "weight_version": self.weight_version,
                "max_total_num_tokens": stats.kv_tokens,
                "internal_states": [
                    {
                        "tokens": stats.tokens,
                        "completed": stats.completed,
                        "aborted": stats.aborted,
                        "retracted": stats.preemptions,
                        "kv_peak_share": stats.kv_peak_share,
                    }
                ],
            }
        )

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics``. A share of the key-value memory is missing where there is no limit to it."""
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
        """Health, and what concerns memory that a CPU engine does not hold."""
        return JSONResponse({"success": True, "weight_version": self.weight_version})


class _Call:
    """A request under way."""

    def __init__(self, service: Service, body: dict[str, Any]) -> None:
        params = {
            key: value for key, value in dict(body.get("sampling_params") or {}).items() if key not in _TEXT_OPTIONS
        }
        for name in _NOT_DONE:
            if params.pop(name, None) not in (None, []) or body.get(name) not in (None, []):
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
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._grown = asyncio.Event()
        loop = asyncio.get_running_loop()
        watch = self._watcher(loop) if body.get("stream") else None
        self.done = asyncio.wrap_future(service.engine.submit(self._rid, prompt, self._params, watch))

    def _watcher(self, loop: asyncio.AbstractEventLoop) -> Callable[[int, float], None]:
        def watch(token: int, logprob: float) -> None:
            self._tokens.append(token)
            self._logprobs.append(logprob)
            loop.call_soon_threadsafe(self._grown.set)

        return watch

    def answer(self, generation: Generation) -> dict[str, Any]:
        """Return the answer to a request that is over."""
        reason: dict[str, Any]
        tokens = generation.token_ids
        if generation.stop_reason == "aborted":
            reason = {"type": "abort", "message": "Aborted"}
        elif len(tokens) >= self._params.max_tokens and not self._ends(tokens[-1]):
            reason = {"type": "length", "length": len(tokens)}
        elif self._ends(tokens[-1]):
            reason = {"type": "stop", "matched": tokens[-1]}
        else:
            reason = {"type": "length", "length": len(tokens)}  # the context is full
        message = self._message(tokens, generation.logprobs or [], reason)
        message["meta_info"]["num_retractions"] = generation.preemptions
        return message

    def _ends(self, token: int) -> bool:
        return self._service.engine.ends(token, self._params)

    def _message(self, tokens: list[int], logprobs: list[float], reason: dict[str, Any] | None) -> dict[str, Any]:
        text = self._service.tokenizer.decode(tokens, skip_special_tokens=self._skip_special)
        meta = {
            "id": self._rid,
            "finish_reason": reason,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": self._service.weight_version,
            "e2e_latency": time.monotonic() - self._began,
        }
        if self._logprobs_wanted:
            meta["output_token_logprobs"] = [
                [logprob, token, None] for token, logprob in zip(tokens, logprobs, strict=True)
            ]
        return {"text": text, "output_ids": tokens, "meta_info": meta}

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the answer so far whenever it has grown, as server-sent events; each holds the whole answer up to there."""
        try:
            while not self.done.done():
                grown = asyncio.create_task(self._grown.wait())
                first: list[asyncio.Future[Any]] = [self.done, grown]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                grown.cancel()
                self._grown.clear()
                if not self.done.done():
                    count = len(self._logprobs)
                    yield _event(self._message(self._tokens[:count], self._logprobs[:count], None))
            yield _event(self.answer(self.done.result()))
            yield b"data: [DONE]\n\n"
        finally:
            self.done.cancel()


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def _error(message: str, status: int = 400) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=status)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def application(service: Service) -> Starlette:
    """Return the ASGI application of ``service``."""
    posts = {
        "/generate": service.generate,
        "/abort_request": service.abort_request,
        "/pause_generation": service.pause_generation,
        "/continue_generation": service.continue_generation,
        "/update_weights_from_disk": service.update_weights_from_disk,
    }
    gets = {
        "/v1/loads": service.loads,
        "/workers": service.workers,
        "/metrics": service.metrics,
        **dict.fromkeys(("/server_info", "/get_server_info", "/model_info", "/get_model_info"), service.info),
        **dict.fromkeys(("/health", "/health_generate", "/get_weight_version"), service.ok),
    }
    both = ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation")
    routes = [Route(path, function, methods=["POST"]) for path, function in posts.items()]
    routes += [Route(path, function, methods=["GET"]) for path, function in gets.items()]
    routes += [Route(path, service.ok, methods=["GET", "POST"]) for path in both]
    return Starlette(routes=routes)
