"""onnxruntime-web for the Lab without a server: one version, fetched by npm, verified and kept in the cache.

npm is asked because it knows the registry that the user has configured. The archive must have the checksum below,
whatever the registry says; it is checked again whenever it is read.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from capsnet.data.sources.cache import cache_folder
from capsnet.errors import UserError
from capsnet.files import write_bytes
from capsnet.notice import say

NAME, VERSION = "onnxruntime-web", "1.30.0"
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # base64, as in npm
SCRIPT, WASM = "package/dist/ort.wasm.bundle.min.mjs", "package/dist/ort-wasm-simd-threaded.wasm"
SECONDS = 600
LICENCE = f"""{NAME} {VERSION}, from npm, unchanged. Copyright (c) Microsoft Corporation. MIT License.

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


@dataclass(frozen=True)
class Runtime:
    """The two files that a page needs."""

    script: bytes
    wasm: bytes


def load_runtime() -> Runtime:
    """The files of the pinned version, from the cache or from npm."""
    file = cache_folder() / "npm" / f"{NAME}-{VERSION}.tgz"
    archive = file.read_bytes() if file.is_file() else b""
    if not is_genuine(archive):
        archive = fetch()
        write_bytes(file, archive)
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        return Runtime(*(read(members, name) for name in (SCRIPT, WASM)))


def is_genuine(archive: bytes) -> bool:
    return base64.b64encode(hashlib.sha512(archive).digest()).decode() == SHA512


def read(members: tarfile.TarFile, name: str) -> bytes:
    found = members.extractfile(name)
    assert found is not None  # the checksum says which members there are
    return found.read()


def fetch() -> bytes:
    """Download the archive by `npm pack` and verify it."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(f"the Lab without a server needs {NAME} from npm, which is not installed: install Node.js.")
    say(f"fetching {NAME} {VERSION} from npm (33 MB, once)")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"{NAME}@{VERSION}", "--ignore-scripts", "--silent", "--pack-destination", folder]
        try:
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"npm did not fetch {NAME} within {SECONDS // 60} minutes: try again later.") from None
        files = list(Path(folder).glob("*.tgz"))
        if result.returncode or not files:
            why = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise UserError(f"npm could not fetch {NAME} {VERSION} ({why}): check the connection, then try again.")
        archive = files[0].read_bytes()
    if not is_genuine(archive):
        raise UserError(f"npm delivered another {NAME} {VERSION} than the expected one: check the registry it uses.")
    return archive
