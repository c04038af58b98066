"""A real HTTP service on a port of its own, which answers what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Row = dict[str, object]
Content = dict[str, list[object]]
TRICKLE_S = 0.02
FOR_EVER_S = 20.0
"""Longer than any test waits."""


@dataclass(frozen=True)
class Answer:
    """One answer."""

    status: int = 200
    body: bytes | Callable[[Content], object] = b""
    """As it is, or made of the request and sent as JSON."""
    header: tuple[str, str] | None = None
    """One header more."""
    silent: bool = False
    """Never answer."""
    announced: int | None = None
    """A Content-Length that is not the body's."""
    trickle: bool = False
    """Send a blank again and again before the body."""


def lengths(content: Content) -> object:
    """The length of each response."""
    return {"scores": [len(str(response)) for response in content["responses"]]}


LENGTHS = Answer(body=lengths)


@dataclass
class Asked:
    """What a service was asked."""

    url: str
    contents: list[Content] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)


@contextmanager
def service(*answers: Answer) -> Iterator[Asked]:
    """Serve the answers one after the other, the last one for ever; what was asked is complete at the end."""
    left, over = list(answers), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.contents.append(json.loads(body, parse_constant=_refuse))
            asked.headers.append(dict(self.headers))
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer.silent:
                over.wait(FOR_EVER_S)
                return
            sent = answer.body if isinstance(answer.body, bytes) else _json(answer.body(asked.contents[-1]))
            self.send_response(answer.status)
            if answer.header is not None:
                self.send_header(*answer.header)
            if not answer.trickle:
                self.send_header("Content-Length", str(answer.announced or len(sent)))
            self.end_headers()
            try:
                for _ in range(int(FOR_EVER_S / TRICKLE_S) if answer.trickle else 0):
                    if over.wait(TRICKLE_S):
                        return
                    self.wfile.write(b" ")
                self.wfile.write(sent)
            except ConnectionError:  # the other side has lost patience
                return

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # closing it waits for them: a late one has counted its request then
    asked = Asked(f"http://127.0.0.1:{server.server_port}/score")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
