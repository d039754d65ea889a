"""Runs the real ``sglang-router`` in front of CPU engine servers, with the same options as slime."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO

import httpx

from rl_accel.errors import RlAccelError

_START_SECONDS = 120.0


@contextmanager
def sglang_router(servers: Sequence[str]) -> Iterator[str]:
    """Runs a router in front of the servers at the addresses ``servers`` during the ``with`` block. Yields the address of the
    router.

    Raises:
        RlAccelError: the router did not start or does not list all servers. The message contains the end of the router's output.
    """
    port, prometheus = _free_ports(2)
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(prometheus), "--worker-urls", *servers, "--log-level", "warn"]
    command += ["--disable-circuit-breaker", "--disable-health-check"]  # slime sets the same two options
    with (
        tempfile.TemporaryFile("w+") as output,  # an unread pipe would fill up and block the router
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            _wait(process, address, len(servers), output)
            yield address
        finally:
            process.kill()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def _wait(process: "subprocess.Popen[bytes]", address: str, servers: int, output: IO[str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            answer = httpx.get(f"{address}/workers")
            if answer.is_success and len(answer.json()["workers"]) == servers:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    process.kill()
    process.wait()
    output.seek(0)
    raise RlAccelError(f"sglang-router did not start before {servers} servers: {output.read()[-2000:]}")
