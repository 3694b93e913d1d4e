"""Who may ask, and for how much: Host and Origin, size of bodies, security headers, and no traceback to the client.

A page in the same browser must not be able to use the Lab: a name that leads to 127.0.0.1 by a trick of the DNS is
refused by its Host, a request from another page by its Origin or Sec-Fetch-Site.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import traceback
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SMALL = 64 * 1024  # bytes of a body where nothing else is said
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Guard:
    """ASGI middleware around the whole application.

    `host` and `port` are what the server is bound to; `body_limits` gives the most bytes that a path takes; `close`
    ends what goes on in the background.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, body_limits: Mapping[str, int], close: Callable[[], None]
    ) -> None:
        self.app, self.host, self.port, self.body_limits, self.close = app, host, port, body_limits, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there is nothing else here, neither a websocket nor a lifespan
            return
        answer = Answer(send)
        refusal = self.refusal(scope)
        if refusal:
            await answer.refuse(*refusal)
            return
        limited = Bounded(receive, self.body_limits.get(scope["path"], SMALL))
        try:
            await self.app(scope, limited, answer)
        except Exception:
            print(f"capsnet lab: {scope['method']} {scope['path']} failed", file=sys.stderr)
            traceback.print_exc()
            await answer.refuse(500, "The Lab made a mistake; its terminal says more.")

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and sentence for a request that is not let in."""
        headers = scope["headers"]
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self.knows(hosts[0]):
            return 403, f"This Lab answers to {self.names()} only: open that address."
        origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
        if any(origin != f"{scope['scheme']}://{hosts[0]}" for origin in origins):
            return 403, "This Lab answers to its own page only, and another page has asked."
        sites = {value for name, value in headers if name == b"sec-fetch-site"}
        if scope["path"].startswith("/api/") and not sites <= {b"same-origin", b"none"}:
            return 403, "This Lab answers to its own page only, and another page has asked."
        sizes = [value for name, value in headers if name == b"content-length"]
        limit = self.body_limits.get(scope["path"], SMALL)
        if any(not size.isdigit() or int(size) > limit for size in sizes):
            return 413, too_large(limit)
        return None

    def names(self) -> str:
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else bracketed(self.host)}:{self.port}"

    def knows(self, host: str) -> bool:
        """Whether a Host header means this server: loopback, the host it is bound to, or, bound to all, any address."""
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "80")
        if not name:
            name, port = host, "80"
        if port != str(self.port):
            return False
        if name in LOOPBACK or name == bracketed(self.host.lower()):
            return True
        return is_everywhere(self.host) and (is_address(name) or name == socket.gethostname().lower())


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_everywhere(host: str) -> bool:
    return host in ("0.0.0.0", "::", "")


def is_address(name: str) -> bool:
    """An address in numbers cannot be bent to lead elsewhere, as a name can."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def too_large(limit: int) -> str:
    return f"The request's body is too large: at most {limit:,} bytes are read here."


class Bounded:
    """A body that is cut off with 413 when it turns out longer than it may be, whatever its header says."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self.receive, self.limit, self.seen = receive, limit, 0

    async def __call__(self) -> Message:
        message = await self.receive()
        self.seen += len(message.get("body", b""))
        if self.seen > self.limit:
            raise HTTPException(413, too_large(self.limit))
        return message


class Answer:
    """What goes out: every response with the security headers, and a refusal if nothing has gone out yet."""

    def __init__(self, send: Send) -> None:
        self.send, self.started = send, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            present = {name.lower() for name, _ in message.get("headers", [])}
            extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            kept = [pair for pair in extra if pair[0] not in present]
            message = {**message, "headers": [*message.get("headers", []), *kept]}
        await self.send(message)

    async def refuse(self, status: int, sentence: str) -> None:
        if self.started:
            return
        body = json.dumps({"detail": sentence}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})
