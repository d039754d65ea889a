"""The SGLang servers behind slime's router, as far as tail batching speaks to them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from slime.backends.sglang_utils.server_control import num_requests_from_load
from slime.utils.http_utils import get, post

logger = logging.getLogger("rl_accel")

IDLE_SECONDS = 30.0
"""A server that still holds requests so long after everything was aborted is reported, and the rollout ends."""
POLL_SECONDS = 0.05


class Engines:
    """Aborts requests. Always at the servers: the router knows no ``/abort_request``."""

    def __init__(self, args: Any) -> None:
        self._router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests wherever they run. A server that does not know one ignores it."""
        urls = await self._urls()
        await asyncio.gather(*(_tell(url, {"rid": request_id}) for url in urls for request_id in request_ids))

    async def abort_all(self) -> None:
        """Abort whatever the servers hold."""
        await asyncio.gather(*(_tell(url, {"abort_all": True}) for url in await self._urls()))

    async def drain(self) -> None:
        """Return once no server holds a request; what a closed connection left behind is aborted."""
        give_up = time.monotonic() + IDLE_SECONDS
        while busy := await self._busy():
            if time.monotonic() > give_up:
                logger.warning("rl-accel: %s still hold requests of cancelled responses", ", ".join(busy))
                return
            await self.abort_all()
            await asyncio.sleep(POLL_SECONDS)

    async def _busy(self) -> list[str]:
        urls = await self._urls()
        counts = await asyncio.gather(*map(_requests, urls))
        return [url for url, count in zip(urls, counts, strict=True) if count]

    async def _urls(self) -> list[str]:
        return [worker["url"] for worker in (await get(f"{self._router}/workers"))["workers"]]


async def _tell(url: str, payload: dict[str, Any]) -> None:
    try:
        await post(f"{url}/abort_request", payload, max_retries=1)
    except Exception as error:  # a dead server holds no request any more
        logger.warning("rl-accel: %s could not be told to abort: %s", url, error)


async def _requests(url: str) -> int:
    try:
        return int(num_requests_from_load(await get(f"{url}/v1/loads?include=core")))
    except Exception as error:
        logger.warning("rl-accel: %s does not tell its load: %s", url, error)
        return 0
