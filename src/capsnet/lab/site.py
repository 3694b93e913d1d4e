"""The Lab as a folder for any static host: the page of the served Lab, with an engine that computes in the browser.

    index.html, static/     the page; static/js/engine.js names the engine, static/ort/ is onnxruntime-web
    lab.json                models, routing algorithms, test images: what the server would answer
    models/NAME/            graph.bin (ONNX), layers.bin and decoder.bin (frames), loaded when the model is chosen
    samples/DATASET/        labels.bin and test images in parts
    service-worker.js       keeps what was loaded, for visits without a network

Every .bin is compressed by zlib, because hosts differ in what they compress.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from capsnet import data
from capsnet.data.photo import digit_box
from capsnet.errors import UserError
from capsnet.lab import graphs, inference, policy, protocol, runtime
from capsnet.lab.hand import offers, prepared
from capsnet.lab.models import Entry, Shelf, dataset_of, folder_of
from capsnet.lab.samples import mistaken, recorded_mistakes
from capsnet.notice import say
from capsnet.terminal import Counter

PAGE = Path(__file__).resolve().parent / "static"
SERVER_ONLY = ("engine-server.js",)
MARKS = ("lab.json", "service-worker.js")  # a folder with these is an exported Lab
MOST_SAMPLES = 10_000  # test images of a dataset
PART = 500  # test images in a file
BATCH = 100
HEAD = '<meta charset="utf-8">'
MAIN = '  <script type="module" src="static/js/main.js"></script>'
ENGINE = 'export { Engine } from "./engine-static.js";\n'
WORKER_ONLY = ("engine-worker.js", "network.js", "photo.js")
LOWER, UPPER = range(2, 7), range(2, 5)  # capsules of the view by hand


@dataclass(frozen=True)
class Written:
    """An exported Lab: its folder, the models in it, and its size."""

    folder: Path
    models: tuple[str, ...]
    bytes: int


def export_site(folder: Path, models: Sequence[str] = (), samples: int = MOST_SAMPLES) -> Written:
    """Write the Lab with these models, by default the shipped ones, as a folder for a static host.

    `samples` is the largest number of test images of a dataset.
    """
    check_target(folder)
    shelf = Shelf(models)
    files = runtime.load_runtime()  # first, because it may be refused
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        site = Site(partial, shelf, samples)
        site.write(files, list(dict.fromkeys(shelf.given or shelf.entries)))
        partial.chmod(0o755)
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Written(folder, tuple(site.written), size)


def check_target(folder: Path) -> None:
    """Refuse to replace anything but an exported Lab, or the folder that the user is in."""
    if Path.cwd().is_relative_to(folder.resolve()):
        raise UserError(f"the site replaces {folder}, which contains the current folder: name another, such as site.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not all((folder / mark).is_file() for mark in MARKS):
        raise UserError(f"{folder} exists and is not an exported Lab: choose another folder, or delete it first.")


def replace_folder(new: Path, folder: Path) -> None:
    """Put a complete folder in place; what was there stays until then."""
    old = new.with_name(f"{new.name}-old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


class Site:
    """The folder while it is being written."""

    def __init__(self, folder: Path, shelf: Shelf, most_samples: int) -> None:
        self.folder, self.shelf, self.most_samples = folder, shelf, most_samples
        self.written: dict[str, dict[str, Any]] = {}
        self.samples: dict[str, dict[str, Any]] = {}
        self._tests: dict[str, data.Dataset | str] = {}  # by dataset; a sentence if there is none

    def write(self, files: runtime.Runtime, names: Sequence[str]) -> None:
        self.write_page()
        self.write_runtime(files)
        with Counter("exporting models") as counter:
            for done, name in enumerate(names):
                counter(done, len(names))
                self.add(self.shelf.find(name))
            counter(len(names), len(names))
        if not self.written:
            raise UserError(
                "none of the models can run in a browser: choose others, or use `capsnet lab` without --export."
            )
        self.write_description()
        self.write_service_worker()

    # ------------------------------------------------------------------------------------------------ files

    def put(self, path: str, content: bytes | str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def put_compressed(self, path: str, content: bytes) -> None:
        """By the quickest level: weights become at most a tenth smaller by the others."""
        self.put(path, zlib.compress(content, 1))

    def write_page(self) -> None:
        """The page as it is served, with its policy in a meta tag, and the other engine."""
        index = (PAGE / "index.html").read_text(encoding="utf-8")
        meta = f'{HEAD}\n  <meta http-equiv="Content-Security-Policy" content="{policy.STATIC}">'
        self.put("index.html", index.replace(HEAD, meta, 1).replace(MAIN, preloads() + MAIN, 1))
        for file in sorted(PAGE.rglob("*.*")):
            if file.name not in ("index.html", "service-worker.js", *SERVER_ONLY):
                self.put(f"static/{file.relative_to(PAGE).as_posix()}", file.read_bytes())
        self.put("static/js/engine.js", ENGINE)

    def write_runtime(self, files: runtime.Runtime) -> None:
        self.put("static/ort/ort.wasm.bundle.min.js", files.script)
        self.put_compressed("static/ort/ort.wasm.bin", files.wasm)
        self.put("static/ort/LICENSE.txt", runtime.LICENCE)

    def write_description(self) -> None:
        default = self.shelf.default if self.shelf.default in self.written else next(iter(self.written))
        described = {
            "default": default,
            "models": list(self.written.values()),
            "routings": routings(),
            "samples": self.samples,
        }
        self.put("lab.json", json.dumps(described, ensure_ascii=False, allow_nan=False))

    def write_service_worker(self) -> None:
        """The service worker knows every file and its checksum, and which ones are needed at once."""
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        sums = {
            path.relative_to(self.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in paths
        }
        default = json.loads((self.folder / "lab.json").read_text(encoding="utf-8"))["default"]
        first = [path for path in sums if path.startswith(("index", "lab", "static/", f"models/{default}/"))]
        source = (PAGE / "service-worker.js").read_text(encoding="utf-8")
        for name, empty, value in (("FILES", "{}", sums), ("FIRST", "[]", first)):
            source = source.replace(f"const {name} = {empty};", f"const {name} = {json.dumps(value)};", 1)
        self.put("service-worker.js", source)

    # ------------------------------------------------------------------------------------------------ models

    def add(self, entry: Entry) -> None:
        """Write a model; one that cannot run in a browser is left out."""
        try:
            model = self.shelf.load(entry.name)
            parts = graphs.divided(model)
            self.put_compressed(f"models/{entry.name}/graph.bin", graphs.to_graph(model))
        except UserError as error:
            say(f"capsnet: {entry.name} is left out of the site: {str(error).rstrip('.')}.")
            shutil.rmtree(self.folder / "models" / entry.name, ignore_errors=True)
            return
        if parts is not None:
            self.put_compressed(f"models/{entry.name}/layers.bin", graphs.to_layers(parts))
        if entry.description["has_decoder"]:
            weights = protocol.pack(*inference.decoder_weights(model))
            self.put_compressed(f"models/{entry.name}/decoder.bin", weights)
        digit = digit_box(entry.image_shape, entry.trained_on)  # how image files are prepared
        samples = self.samples_for(entry)
        examples = samples["samples"] is not None
        self.written[entry.name] = {**entry.description, "digit": digit, "examples": examples, **samples}

    def samples_for(self, entry: Entry) -> dict[str, Any]:
        """The test images that suit a model and its mistakes among them."""
        try:
            name = dataset_of(entry)
        except UserError as error:
            return {"samples": None, "no_samples": str(error), "mistakes": []}
        test = self.test_images(name)
        if isinstance(test, str):
            return {"samples": None, "no_samples": test, "mistakes": []}
        return {"samples": folder_of(name), "mistakes": [n for n in self.mistakes(entry, test) if n < len(test)]}

    def test_images(self, name: str) -> data.Dataset | str:
        """The first test images of a dataset, written on first use; a sentence if they cannot be had."""
        if name not in self._tests:
            try:
                whole = data.load(name, validation=0).test.in_memory()
                self._tests[name] = test = whole.subset(torch.arange(min(len(whole), self.most_samples)))
                self.write_samples(folder_of(name), test)
            except (UserError, OSError) as error:
                self._tests[name] = f"The test images are not part of this site ({error})."
        return self._tests[name]

    def write_samples(self, name: str, test: data.Dataset) -> None:
        self.put_compressed(f"samples/{name}/labels.bin", test.labels.numpy().astype("<u2").tobytes())
        for number, start in enumerate(range(0, len(test), PART)):
            images = test.images[start : start + PART].contiguous().numpy().tobytes()
            self.put_compressed(f"samples/{name}/{number}.bin", images)
        self.samples[name] = {"count": len(test), "part": PART, "shape": list(test.image_shape)}

    def mistakes(self, entry: Entry, test: data.Dataset) -> list[int]:
        """From the model's card, or counted."""
        recorded = recorded_mistakes(entry, test)
        if recorded is not None:
            return recorded
        model, wrong = self.shelf.load(entry.name), list[int]()
        with Counter(f"counting the mistakes of {entry.name}") as counter:
            for start in range(0, len(test), BATCH):
                counter(start, len(test))
                images, labels = (x[start : start + BATCH] for x in (test.images, test.labels))
                wrong += [start + n for n in mistaken(model, images, labels)]
        return wrong


def preloads() -> str:
    """Links that load all modules of the page at once instead of one import after the other."""
    names = [file.name for file in sorted((PAGE / "js").glob("*.js")) if file.name not in SERVER_ONLY + WORKER_ONLY]
    return "".join(f'  <link rel="modulepreload" href="static/js/{name}">\n' for name in names)


def routings() -> list[dict[str, Any]]:
    """The algorithms of the view by hand, with the parameters that they start with for each number of capsules."""
    return [
        {**asdict(offer), "parameters": {f"{i}×{j}": initial(offer.name, i, j) for i in LOWER for j in UPPER}}
        for offer in offers()
        if offer.name in graphs.ROUTINGS
    ]


def initial(name: str, lower: int, upper: int) -> dict[str, list[float]]:
    """Parameters by name, each as a flat list."""
    state = prepared(name, {}, lower, upper).state_dict()
    return {key: tensor.flatten().tolist() for key, tensor in state.items()}
