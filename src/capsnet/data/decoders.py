"""Helper processes that decode images into the image cache.

Threads would wait for each other, because Pillow is mostly Python.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from capsnet.data.decode import Kind, damaged, pixels_of, size_of
from capsnet.errors import UserError
from capsnet.helper_process import Helper, serve

CHUNK = 256  # images of one request
MOST = 8  # processes; each needs some 300 MB, most of it for PyTorch
CODE = "from capsnet.data.decoders import serve_decoding; serve_decoding()"
ADVICE = "run the command again; it continues where it stopped"


class Decoders:
    """As many helper processes as there are cores, started when they are needed."""

    def __init__(self) -> None:
        self.size = min(MOST, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        self.idle: SimpleQueue[Helper] = SimpleQueue()
        self.helpers: list[Helper] = []
        self.threads = ThreadPoolExecutor(self.size)

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        for helper in self.helpers:
            helper.close()

    def sizes(self, paths: Sequence[str]) -> Iterator[set[tuple[int, int]]]:
        """The different sizes (h, w) in one part of the files after another."""
        parts = [{"paths": paths[start : start + CHUNK]} for start in range(0, len(paths), CHUNK)]
        for found in self._ask_all(parts):
            yield {(h, w) for h, w in found}

    def decode(
        self, into: Path, rows: np.ndarray, paths: Sequence[str], shape: tuple[int, ...], channels: int | None
    ) -> Iterator[tuple[list[int], list[tuple[int, int | str]]]]:
        """Decode the files of these rows into the rows of a file: some rows, and what was found for each."""
        parts = [rows[start : start + CHUNK].tolist() for start in range(0, len(rows), CHUNK)]
        fixed = {"into": str(into), "shape": shape, "channels": channels}
        requests = [{**fixed, "rows": part, "paths": [paths[row] for row in part]} for part in parts]
        yield from zip(parts, self._ask_all(requests), strict=True)

    def _ask_all(self, requests: list[dict[str, Any]]) -> Iterator[Any]:
        """The answers in the order of the requests."""
        for _ in range(min(self.size, len(requests)) - len(self.helpers)):
            helper = Helper("decoding", CODE, env={**os.environ, "OMP_NUM_THREADS": "1"}, advice=ADVICE)
            self.helpers.append(helper)
            self.idle.put(helper)
        return self.threads.map(self._ask, requests)

    def _ask(self, request: dict[str, Any]) -> Any:
        helper = self.idle.get()
        try:
            return helper.ask(**request)
        finally:
            self.idle.put(helper)


# ----------------------------------------------------------------------------------------- inside a helper process


def serve_decoding() -> None:
    """Answer requests for sizes and for images until the parent ends."""
    torch.set_num_threads(1)
    serve(answer)


def answer(request: dict[str, Any]) -> list[Any]:
    return _decode_into(**request) if "into" in request else _sizes_wanted(**request)


def _sizes_wanted(paths: list[str]) -> list[tuple[int, int]]:
    """The different sizes of these images; files that cannot be read have none."""
    found = {size_of(Path(path)) for path in paths}
    return [size for size in found if not isinstance(size, str)]


def _decode_into(
    into: str, rows: list[int], paths: list[str], shape: tuple[int, int, int], channels: int | None
) -> list[Any]:
    """Decode files into rows (c, h, w) of a file; the kind of each, and its checksum or what is wrong with it."""
    c, h, w = shape
    answers: list[Any] = []
    with open(into, "r+b") as file:
        for row, path in zip(rows, paths, strict=True):
            kind, found = _checked(Path(path), (h, w), channels)
            if isinstance(found, str):
                answers.append((kind, found))
                continue
            content = found.expand(c, h, w).contiguous().numpy().tobytes()
            file.seek(row * len(content))
            file.write(content)
            answers.append((kind, zlib.crc32(content)))
    return answers


def _checked(path: Path, size: tuple[int, int], channels: int | None) -> tuple[Kind, Tensor | str]:
    """One image or what is wrong with it; its header is checked first."""
    from capsnet.data.photo import open_bounded

    try:
        with open_bounded(path, str(path)) as image:
            try:
                pixels = pixels_of(image, size, channels)
            except Exception as error:  # decoders raise many kinds of errors for broken data
                return Kind.DAMAGED, damaged(path, error)
            return Kind.GREY if len(pixels) == 1 else Kind.COLOUR, pixels
    except UserError as error:
        return Kind.UNREADABLE, str(error)
