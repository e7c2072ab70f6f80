"""The HTTP server under the tests' stand-ins for endpoints."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Serves at ``url`` until it is closed. Says nothing of a client that hangs up, which is part of many
    tests: a traceback parses source, and when two threads parse, Python 3.11.7 may raise a ``SystemError``
    (python/cpython#106905)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    """Answers by ``post`` and ``get``."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.post()

    def do_GET(self) -> None:
        self.get()

    do_HEAD = do_GET

    def post(self) -> None:
        raise AssertionError("nothing is posted here")

    def get(self) -> None:
        raise AssertionError("nothing is to be had here")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, code: int, content: Any, headers: Any = ()) -> bool:
        """Reply with bytes, a text or something for JSON, and say that it is done."""
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        sent = text if isinstance(text, bytes) else text.encode()
        self.send_response(code)
        for name, value in (("Content-Type", "application/json"), *headers):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else sent)
        return True

    def log_message(self, *_: object) -> None:
        """Nothing."""
