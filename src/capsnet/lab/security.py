"""Access control: Host and Origin checks, size limits for bodies, security headers, and no tracebacks to clients.

Other pages in the same browser must not be able to use the Lab. The Host header rejects DNS rebinding, and Origin and
Sec-Fetch-Site reject requests of other pages.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import traceback
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from capsnet.lab import policy

SMALL = 64 * 1024  # bytes of a body unless another limit is set
HEADERS = {
    "Content-Security-Policy": policy.SERVED,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Guard:
    """ASGI middleware around the whole application.

    `host` and `port` are what the server is bound to, `body_limits` gives the maximum body size of a path in bytes, and
    `close` stops background work.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, body_limits: Mapping[str, int], close: Callable[[], None]
    ) -> None:
        self.app, self.host, self.port, self.body_limits, self.close = app, host, port, body_limits, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # neither websockets nor lifespan events
            return
        answer = Answer(send)
        refusal = self.refusal(scope)
        if refusal:
            await answer.refuse(*refusal)
            return
        limited = Bounded(receive, self.body_limits.get(scope["path"], SMALL))
        try:
            await self.app(scope, limited, answer)
        except ClientDisconnect:  # the page was closed or reloaded during an upload
            return
        except Exception:
            print(f"capsnet lab: {scope['method']} {scope['path']} failed", file=sys.stderr)
            traceback.print_exc()
            await answer.refuse(500, "Internal error: see the terminal of the Lab.")

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and sentence for a request that is rejected."""
        headers = scope["headers"]
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self.knows(hosts[0]):
            return 403, f"This Lab only answers at {self.names()}: open that address."
        origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
        if any(origin != f"{scope['scheme']}://{hosts[0]}" for origin in origins):
            return 403, "This Lab only answers its own page, and this request came from another one."
        sites = {value for name, value in headers if name == b"sec-fetch-site"}
        if scope["path"].startswith("/api/") and not sites <= {b"same-origin", b"none"}:
            return 403, "This Lab only answers its own page, and this request came from another one."
        sizes = [value for name, value in headers if name == b"content-length"]
        limit = self.body_limits.get(scope["path"], SMALL)
        if any(not size.isdigit() or int(size) > limit for size in sizes):
            return 413, too_large(limit)
        return None

    def names(self) -> str:
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else bracketed(self.host)}:{self.port}"

    def knows(self, host: str) -> bool:
        """Whether a Host header means this server: loopback, its own host, or any IP address if bound to all."""
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
    """Unlike a name, a numeric address cannot be rebound by DNS."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def too_large(limit: int) -> str:
    return f"The request body is too large: the limit is {limit:,} bytes."


class Bounded:
    """A body that is cut off with 413 once it exceeds its limit, whatever its header says."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self.receive, self.limit, self.seen = receive, limit, 0

    async def __call__(self) -> Message:
        message = await self.receive()
        self.seen += len(message.get("body", b""))
        if self.seen > self.limit:
            raise HTTPException(413, too_large(self.limit))
        return message


class Answer:
    """Adds the security headers to every response, and sends a rejection if nothing has been sent yet."""

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
