"""Models as folders and on a hub: a round trip through a folder, and through a server of the test's own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

import capsnet
from capsnet import UserError
from capsnet.io import hub
from tiny_models import tiny

SHA = "0123456789abcdef0123456789abcdef01234567"


class Server(ThreadingHTTPServer):
    """The parts of the hub's interface that up- and downloads use; files are kept in memory by repository and path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.claimed: dict[str, int] = {}  # sizes that differ from the truth

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None: ...

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"content-length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply(self, record: Any) -> None:
        self.answer(json.dumps(record).encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.lstrip("/").replace("/resolve/main/", "/")
        if path in self.server.files:
            body = self.server.files[path]
            size = self.server.claimed.get(path, len(body))
            headers = {
                "etag": f'"{hashlib.sha256(body).hexdigest()}"',
                "x-repo-commit": SHA,
                "content-length": str(size),
            }
            self.answer(body, **headers)
        else:
            known = any(name.startswith("/".join(path.split("/")[:2]) + "/") for name in self.server.files)
            self.answer(b"", 404, **{"x-error-code": "EntryNotFound" if known else "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.endswith("/create"):
            self.reply({"url": f"{self.server.address}/me/digits", "name": "me/digits", "id": "1"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self.reply({"files": files})
        elif "/commit/" in self.path:
            self.keep(body)
            self.reply({"commitUrl": f"{self.server.address}/me/digits/commit/{SHA}", "commitOid": SHA})
        else:  # the check of the card's YAML
            self.reply({"errors": [], "warnings": []})

    def keep(self, body: bytes) -> None:
        repository = "/".join(self.path.split("/")[3:5])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.files[f"{repository}/{line['value']['path']}"] = base64.b64decode(line["value"]["content"])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def run(code: str, server: Server, home: Path) -> str:
    """Python with the hub at the server's address, which huggingface_hub reads on import."""
    place = {"HF_ENDPOINT": server.address, "HF_HOME": str(home), "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | place, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- Folders -----------------------------------------------------------------------------------------------------


def test_a_folder_holds_everything_a_model_needs(tmp_path: Path) -> None:
    model = tiny().eval()
    model.classes = ("ant", "bee", "cat")
    model.save_pretrained(tmp_path / "insects", title="Insects", license="mit")
    assert {path.name for path in (tmp_path / "insects").iterdir()} == {"model.safetensors", "config.json", "README.md"}
    images = torch.rand(2, 1, 12, 12)
    for again in (capsnet.CapsNet.from_pretrained(tmp_path / "insects"), capsnet.load(tmp_path / "insects")):
        assert again.classes == model.classes
        assert torch.equal(again(images).activations, model(images).activations)


def test_the_card_is_one_that_the_hub_reads_and_has_the_birth_certificate(tmp_path: Path) -> None:
    model = capsnet.load("quick-mnist")
    card = ModelCard.load(model.save_pretrained(tmp_path) / "README.md")
    assert card.data.library_name == "capsnet"
    assert card.data.datasets == ["mnist"]
    assert card.data.eval_results[0].metric_value == pytest.approx(0.9954)
    assert "55,000 images" in card.text
    assert capsnet.load(tmp_path).certificate == model.certificate


def test_a_card_that_somebody_wrote_is_kept(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    tiny().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_model_of_another_kind_and_a_file_in_the_way_are_named(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "tiny")
    with pytest.raises(UserError, match="is a CapsNet, not a CNN"):
        capsnet.CNN.from_pretrained(tmp_path / "tiny")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not write"):
        tiny().save_pretrained(tmp_path / "file")


# --- The hub -----------------------------------------------------------------------------------------------------


def test_a_model_goes_to_the_hub_and_comes_back(server: Server, tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "tiny")
    code = (
        "import capsnet, torch\n"
        "model = capsnet.load('tiny')\n"
        "print(model.push_to_hub('me/digits', card={'license': 'mit'}))\n"
        "for again in (capsnet.load('hf-hub:me/digits'), capsnet.Model.from_pretrained('me/digits')):\n"
        "    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))\n"
    )
    assert run(code, server, tmp_path).endswith(SHA)
    assert set(server.files) == {f"me/digits/{name}" for name in ("model.safetensors", "config.json", "README.md")}
    assert b'license: "mit"' in server.files["me/digits/README.md"]


def test_what_cannot_be_fetched_is_said_in_a_sentence(server: Server, tmp_path: Path) -> None:
    server.files |= {"me/other/weights.bin": b"x", "me/huge/model.safetensors": b"x"}
    server.claimed["me/huge/model.safetensors"] = hub.MOST_BYTES + 1
    code = (
        "import capsnet\n"
        "for name in ('me/none', 'me/other', 'me/huge', 'a/b/c'):\n"
        "    try: capsnet.load(f'hf-hub:{name}')\n"
        "    except capsnet.UserError as error: print(error)\n"
    )
    none, other, huge, strange = run(code, server, tmp_path).splitlines()
    assert "there is no hf-hub:me/none on the hub" in none
    assert "has no model.safetensors" in other
    assert "2,000,000,001 bytes" in huge
    assert "write hf-hub:user/name" in strange


def test_without_a_connection_it_is_said_in_a_sentence(server: Server, tmp_path: Path) -> None:
    server.server_close()
    tiny().save_pretrained(tmp_path / "tiny")
    code = (
        "import capsnet\n"
        "for reach, name in ((capsnet.load, 'hf-hub:me/digits'), (capsnet.load('tiny').push_to_hub, 'me/digits')):\n"
        "    try: reach(name)\n"
        "    except capsnet.UserError as error: print(error)\n"
    )
    down, up = run(code, server, tmp_path).splitlines()
    assert "cannot be downloaded" in down
    assert "cannot be uploaded" in up


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'capsnet\[hub\]'"):
        capsnet.load("hf-hub:me/digits")
