"""A real Lab for the tests: `capsnet lab` in its own process on its own port."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from capsnet import plugins
from capsnet.io import checkpoint
from capsnet.io.records import Certificate
from capsnet.models.branched import BranchedConfig
from capsnet.models.config import CapsNetConfig, CNNConfig, ModelConfig
from capsnet.models.registry import MODELS, build
from capsnet.registry import Registry
from capsnet.routing.base import ROUTINGS, options_for
from capsnet.routing.options import DynamicOptions


@dataclass
class Running:
    """A running Lab and requests to it."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def ask(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, bytes, HTTPResponse]:
        """Status, body and response of a request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read(), response
        finally:
            connection.close()

    def json(self, path: str, value: object = None) -> dict:
        """The JSON answer; `value` is posted as JSON."""
        body = None if value is None else json.dumps(value).encode()
        status, answer, _ = self.ask(path, body, {"Content-Type": "application/json"} if body else None)
        assert status == 200, answer
        return json.loads(answer)

    def memory(self, kind: str = "VmRSS") -> float:
        """Megabytes that the process uses (VmRSS), or its peak (VmHWM)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024

    def forget_peak(self) -> float:
        """Reset VmHWM and return the megabytes that the process uses now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.memory()


@contextmanager
def running_lab(*words: str) -> Iterator[Running]:
    """`capsnet lab` with these arguments until the block ends."""
    command = [sys.executable, "-m", "capsnet", "lab", *words, "--no-browser", "--json", "--plugin", str(PLUGIN)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the Lab did not start"
        yield Running(json.loads(line)["url"], process)
    finally:
        process.terminate()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def write_model(folder: Path, config: ModelConfig, data: str = "mnist", multi_label: bool = False) -> str:
    """A small network with random weights as a run folder."""
    torch.manual_seed(0)
    model = build(config)
    model.multi_label = multi_label
    checkpoint.save_model(folder / checkpoint.MODEL_FILE, model, Certificate(config={"data": data}))
    return str(folder)


LEAKY = DynamicOptions(leaky=True)
SMALL = {"stem_channels": (4,), "stem_kernels": (9,), "stem_strides": (2,), "primary_types": 2, "primary_dim": 4}


BRANCHED = {
    "stem_channels": (4, 8), "stem_kernels": (9, 3), "stem_strides": (2, 1), "branches": 2, "trunk": 1,
    "primary_types": 4, "primary_dim": 4, "primary_kernel": 5, "class_dim": 6,
}  # fmt: skip


TRACED = ("em", "kuramoto")  # their traces have more than couplings
PLUGIN = Path(__file__).with_name("lab_plugin.py")


def traced(name: str) -> CapsNetConfig:
    return CapsNetConfig(**SMALL, routing=options_for(name), decoder=(8,))


@contextmanager
def known_plugin() -> Iterator[None]:
    """What PLUGIN registers is known inside, and to no other test."""
    plugins._loaded.pop(PLUGIN.resolve(), None)
    plugins.load_plugin(PLUGIN)
    try:
        yield
    finally:
        plugins._loaded.pop(PLUGIN.resolve(), None)
        registries: list[Registry[Any]] = [ROUTINGS, MODELS]
        for registry in registries:
            for name in [name for name, origin in registry._origins.items() if origin == PLUGIN.name]:
                del registry._entries[name], registry._origins[name]


def write_models(folder: Path) -> list[str]:
    """One model of every kind that the page must handle; the last two need PLUGIN."""
    with known_plugin():
        return [
            write_model(folder / "no-decoder", CapsNetConfig(**SMALL, decoder=())),
            write_model(folder / "small-cnn", CNNConfig(channels=(4,), kernels=(5,), pool=(4,), hidden=(8,))),
            write_model(
                folder / "leaky", CapsNetConfig(**SMALL, routing=DynamicOptions(leaky=True), class_dim=1, decoder=(8,))
            ),
            write_model(folder / "deep", CapsNetConfig(**SMALL, hidden_caps=((6, 5),), decoder=(8,))),
            write_model(folder / "branched", BranchedConfig(**BRANCHED, decoder=(8,))),
            write_model(folder / "two-digits", CapsNetConfig((1, 36, 36), **SMALL, decoder=(8,)), "multimnist", True),
            write_model(
                folder / "colour", CapsNetConfig((3, 32, 32), 3, **SMALL, decoder=(8,)), "folder:/secret/place"
            ),
            write_model(folder / "gated", CapsNetConfig(**SMALL, routing=options_for("gates"), decoder=(8,))),
            *(
                write_model(folder / name, CapsNetConfig(**SMALL, routing=options_for(name), decoder=(8,)))
                for name in TRACED
            ),
            write_model(folder / "linear", MODELS.get("linear").Config()),
        ]
