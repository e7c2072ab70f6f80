"""The HTTP server under the tests' stand-ins for endpoints."""

import sys
from http.server import ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Says nothing of a client that hangs up, which is part of many tests.

    The traceback that the standard library would print parses source, in the thread of the request. When two
    threads parse, Python 3.11.7 may raise ``SystemError: AST constructor recursion depth mismatch``
    (python/cpython#106905), and pytest parses when it shows an error.
    """

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]
