"""Starts real SGLang servers on this CPU and the real ``sglang-router`` in front of them, for slime's rollout code.

A server runs in the environment that ``make sglang`` builds, the router in the environment of this process. They exchange HTTP
requests. If this module runs as a program, it starts SGLang's own server (``launch_server``), after the changes for CPUs in
:mod:`verl_on_cpu.sglang`: ``.venv-sglang/bin/python -m verl_on_cpu.sglang_servers --model-path FOLDER --device cpu``.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

from rl_accel.errors import RlAccelError
from rl_accel.processes import end_with_parent
from verl_on_cpu import sglang

PYTHON = Path(os.environ.get("SGLANG_PYTHON", Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python"))
"""Python interpreter of the environment with SGLang, which ``make sglang`` builds."""

_START_SECONDS = 600.0
"""Maximum seconds for the start of a server or router: ten times what it takes on two free cores."""
_OPTIONS = {
    "host": "127.0.0.1",
    "mem_fraction_static": 0.1,
    "max_total_tokens": 131072,
    "max_running_requests": 256,
    "log_level": "warning",
}


def sglang_problem() -> str:
    """Returns the reason why no SGLang server can run on this machine, or ''."""
    return "" if PYTHON.exists() else f"SGLang is absent: there is no {PYTHON}, which `make sglang` builds"


@contextmanager
def sglang_server(model: Path, **options: object) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Runs an SGLang server during the ``with`` block. Yields the server's URL and process.

    Args:
        model: folder with weights and a tokenizer, as transformers saves them.
        options: further flags of SGLang's server, such as ``max_total_tokens=600``.

    Raises:
        RlAccelError: SGLang is not installed, or the server did not start. The message contains the end of the server's output.
    """
    if reason := sglang_problem():
        raise RlAccelError(reason)
    (port,) = _free_ports(1)
    engine = {name: value for name, value in sglang.ENGINE_KWARGS.items() if isinstance(value, str)}
    flags = {**_OPTIONS, "port": port, "model_path": model, **engine, **options}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    command = [str(PYTHON), "-m", __name__, *words, "--skip-server-warmup", "--enable-metrics", "--sleep-on-idle"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # packages of this environment
    env = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with _running(command, url, lambda client: client.get("/health").is_success, env) as process:
        yield url, process


@contextmanager
def sglang_router(servers: Sequence[str]) -> Iterator[str]:
    """Runs a router in front of ``servers`` (URLs) during the ``with`` block. Yields the router's URL.

    Raises:
        RlAccelError: the router did not start or does not list all servers. The message contains the end of its output.
    """
    port, prometheus = _free_ports(2)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(prometheus), "--worker-urls", *servers, "--log-level", "warn"]
    command += ["--disable-circuit-breaker", "--disable-health-check"]  # slime sets the same two options

    def lists_all(client: httpx.Client) -> bool:
        answer = client.get("/workers")
        return answer.is_success and len(answer.json()["workers"]) == len(servers)

    with _running(command, url, lists_all):
        yield url


@contextmanager
def _running(
    command: Sequence[str], url: str, serves: Callable[[httpx.Client], bool], env: dict[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs the server ``command`` until the ``with`` block or this process ends. Yields the server's process.

    Waits first until ``serves(client)`` is true for an HTTP client of ``url``.
    """
    with (
        tempfile.TemporaryFile("w+") as output,  # an unread pipe would fill up and block the process
        subprocess.Popen(
            command,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent(os.getpid()),
        ) as process,
    ):
        try:
            if not _begins(process, url, serves):
                output.seek(0)
                raise RlAccelError(f"{command[2]} does not serve at {url}: {output.read()[-2000:]}")
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _begins(process: "subprocess.Popen[bytes]", url: str, serves: Callable[[httpx.Client], bool]) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    with httpx.Client(base_url=url) as client:
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.TransportError):
                if serves(client):
                    return True
            time.sleep(0.2)
    return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


if __name__ == "__main__":
    sglang.activate()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
