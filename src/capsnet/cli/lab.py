"""capsnet lab: open the interactive Lab."""

from __future__ import annotations

import errno
import json
import socket
import threading
import webbrowser
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from capsnet.cli.flags import MaybeInt, MaybePath, Switch, parse
from capsnet.errors import UserError
from capsnet.notice import say

FIRST_PORT, LAST_PORT = 8700, 8799


@dataclass(frozen=True)
class Lab:
    """Open the interactive Lab: draw a digit and follow it through a capsule network. Ctrl-C stops it.

    It listens on this machine only unless --host is given, and works offline once the test digits are downloaded.

    Examples:
      capsnet lab
      capsnet lab runs/demo
      capsnet lab runs/capsules runs/cnn          compare two models
      capsnet lab --no-browser --port 8700
      capsnet lab --export site/                  a folder for any static host
    """

    models: Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL…", help_behavior_hint="")] = ()
    """Run folders, .safetensors files or model names; the page opens with the first and lists all shipped models."""
    port: MaybeInt = None
    """Port (default: the first free one from 8700)."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 makes the Lab available to your whole network."""
    no_browser: Switch = False
    """Print the address without opening a browser."""
    json: Switch = False
    """Print {"url": …} as the first line of output; with --export, a record of what was written."""
    export: MaybePath = None
    """Write the Lab into this folder instead of serving it: the shipped models, or only the given ones, run in the
    browser, and any static host can serve the folder."""


def lab(argv: list[str]) -> int:
    flags = parse(Lab, "lab", argv)
    if flags.export is not None:
        return write_site(flags, flags.export)
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise UserError("the Lab needs FastAPI and uvicorn: pip install 'capsnet[lab]'.")
    listening = listen(flags.host, flags.port)
    try:
        serve(flags, listening)
    except KeyboardInterrupt:  # the usual way to stop it
        pass
    finally:
        listening.close()
    return 0


def write_site(flags: Lab, folder: Path) -> int:
    """Export the Lab as a static site."""
    from capsnet.lab.site import export_site

    written = export_site(folder, flags.models)
    if flags.json:
        print(json.dumps({"folder": str(folder), "models": list(written.models), "bytes": written.bytes}))
        return 0
    count, size = len(written.models), written.bytes / 1e6
    print(f"The Lab with {count} model{'s' if count > 1 else ''} is in {folder} ({size:.0f} MB).")
    print(f"Try it with `python -m http.server --bind 127.0.0.1 --directory {folder}`, or upload the folder.")
    return 0


def serve(flags: Lab, listening: socket.socket) -> None:
    """Serve until Ctrl-C."""
    import uvicorn

    from capsnet.lab.server import Options, create_app

    port = listening.getsockname()[1]
    app = create_app(Options(flags.models, flags.host, port))
    url = f"http://{url_host(flags.host)}:{port}/"
    print(json.dumps({"url": url}) if flags.json else f"The Lab is running at {url} (Ctrl-C stops it)", flush=True)
    if flags.host not in ("127.0.0.1", "localhost", "::1"):
        say(f"capsnet: everyone who can reach {flags.host} can use this Lab; omit --host to keep it private.")
    if not flags.no_browser:  # the socket is listening already
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, ws="none", lifespan="off", http="h11",
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        app.close()


def url_host(host: str) -> str:
    """The host as it appears in a URL."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on the given port, or on the first free one."""
    if port is not None:
        if not 0 <= port <= 65535:
            raise UserError(f"--port must be from 0 to 65535, got {port}.")
        return bind(host, port)
    for candidate in range(FIRST_PORT, LAST_PORT):
        try:
            return bind(host, candidate)
        except PortTaken:
            continue
    return bind(host, LAST_PORT)


class PortTaken(UserError):
    """The port is in use."""


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"cannot listen on {host} ({error.strerror}): try --host 127.0.0.1.") from None
    try:
        # on Windows REUSEADDR would let two programs listen on one port
        option = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
        listening.setsockopt(socket.SOL_SOCKET, option, 1)
        listening.bind((host, port))
        listening.listen(512)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} is in use: choose another --port or omit it.") from None
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}): choose another address or port.") from None
    return listening
