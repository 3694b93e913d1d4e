"""An exported Lab for the tests, served as `python -m http.server` serves a folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Host:
    """A folder on a port of its own; `sent` counts the bytes of every file that was sent."""

    server: ThreadingHTTPServer
    folder: Path
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The site lies below the root, as on many hosts."""
        return f"http://127.0.0.1:{self.server.server_port}/{self.folder.name}/"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(SimpleHTTPRequestHandler):
    """The handler of `python -m http.server`, which counts instead of printing."""

    host: Host

    def log_message(self, format: str, *args: object) -> None:
        pass

    def send_header(self, keyword: str, value: str) -> None:
        if keyword.lower() == "content-length":
            self.host.sent[self.path] = self.host.sent.get(self.path, 0) + int(value)
        super().send_header(keyword, value)


@contextmanager
def hosted(folder: Path) -> Iterator[Host]:
    """Serve a folder until the block ends, or until the test stops it."""
    handler = type("Counting", (Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder.parent)))
    host = Host(server, folder)
    handler.host = host  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield host
    finally:
        host.stop()
