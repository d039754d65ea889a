"""A web server that stands for a service of somebody else's."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture
def web_server() -> Iterator[Callable[[Callable[[str, Any], str | None]], str]]:
    """``web_server(answer)``: the address of a server that gives what ``answer(path, JSON of the request)`` does, 404 for None."""
    with ExitStack() as servers:

        def start(answer: Callable[[str, Any], str | None]) -> str:
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    given = self.rfile.read(int(self.headers["Content-Length"] or 0))
                    body = answer(self.path, json.loads(given or "null"))
                    self.send_response(404 if body is None else 200)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write((body or "").encode())

                do_POST = do_GET

                def log_message(self, *_: Any) -> None:
                    pass

            server = servers.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            servers.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return f"http://127.0.0.1:{server.server_port}"

        yield start
