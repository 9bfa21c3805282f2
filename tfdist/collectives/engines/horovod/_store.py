"""HTTP key/value store that Horovod's gloo controller needs.

Horovod's ranks publish their addresses with `PUT /scope/key`, and repeat
`GET /scope/key` until the key exists (until then, the answer is 404). Values are stored
unchanged and never parsed. The protocol has no authentication, so the store listens on
loopback if all ranks are on one host, and otherwise only on the address of this rank.
"""

from __future__ import annotations

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_VALUE_BYTES = 1 << 20
MAX_KEYS = 1 << 20
_REQUEST_S = 10.0


class Store:
    """HTTP server that runs on its own threads until `close`.

    Args:
        address: IP address to listen on.
    """

    def __init__(self, address: str) -> None:
        self.values: dict[str, bytes] = {}
        self._server = _Server((address, 0), _Handler)
        self._server.store = self
        self.lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="tfdist-horovod-store",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Returns the port on which the server listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024
    store: Store


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: _Server

    def do_GET(self) -> None:  # noqa: N802 - names of http.server
        """Returns the value of a key."""
        with self.server.store.lock:
            value = self.server.store.values.get(self.path)
        if value is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:  # noqa: N802
        """Sets the value of a key."""
        text = self.headers.get("Content-Length", "")
        if not text.isdecimal() or int(text) > MAX_VALUE_BYTES:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        value = self.rfile.read(int(text))
        store = self.server.store
        with store.lock:
            fits = self.path in store.values or len(store.values) < MAX_KEYS
            if fits:
                store.values[self.path] = value
        self._answer(HTTPStatus.OK if fits else HTTPStatus.INSUFFICIENT_STORAGE)

    def do_DELETE(self) -> None:  # noqa: N802
        """Deletes a key."""
        with self.server.store.lock:
            self.server.store.values.pop(self.path, None)
        self._answer(HTTPStatus.OK)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
