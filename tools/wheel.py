"""Build the wheel twice, compare the bytes, and use it in an empty environment.

    python tools/wheel.py dist         also the source distribution; --no-install skips the empty environment

The environment gets the wheel, its dependencies and nothing else, with the versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 60_000_000
USED = """
import importlib.metadata, sys, numpy, capsnet
assert "site-packages" in capsnet.__file__, capsnet.__file__
assert importlib.metadata.version("capsnet") == capsnet.__version__
model = capsnet.load("quick-mnist")
seen = model.predict(numpy.zeros((2, 28, 28), numpy.uint8), trace=True)
assert seen.trace.couplings.shape[1] == 2
absent = {"matplotlib", "fastapi", "optuna", "sklearn", "huggingface_hub", "numba"}
assert not absent & set(sys.modules)
"""


def run(*command: str | Path, **environment: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), cwd=ROOT, env=clean | environment, check=True, stdout=subprocess.DEVNULL)


def commit_time() -> str:
    """The time that all files of a build get: that of the last commit."""
    command = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def build(folder: Path, kind: str = "--wheel") -> Path:
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or commit_time()
    run(sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", folder, SOURCE_DATE_EPOCH=epoch)
    return next(folder.glob("*.whl" if kind == "--wheel" else "*.tar.gz"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_content(wheel: Path) -> None:
    """Size, typing marker, page, weights and metadata."""
    size = wheel.stat().st_size
    assert size < MOST_BYTES, f"the wheel has {size:,} bytes, more than {MOST_BYTES:,}: move weights out of it"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    wanted = {"capsnet/py.typed", "capsnet/lab/static/index.html", "capsnet/weights/quick-mnist.safetensors"}
    assert wanted <= names, wanted - names
    assert not [name for name in names if name.startswith(("tests", "tools"))]
    for line in ("License-Expression: MIT", "Requires-Python: >=3.11", "Project-URL: Paper"):
        assert line in metadata, line


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel in an empty environment, predict in Python and on the command line."""
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = (programs / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    run(*pip, torch)
    run(*pip, "--constraint", "constraints.txt", wheel)
    run(programs / "python", "-c", USED)
    run(programs / "capsnet", "models")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "dist", help="folder for the distributions")
    parser.add_argument("--no-install", action="store_true", help="only build, compare and look inside")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        wheel, again = build(flags.out.absolute()), build(Path(scratch))
        assert sha256(wheel) == sha256(again), "two builds of the same commit differ"
        build(flags.out.absolute(), "--sdist")
        check_content(wheel)
        if not flags.no_install:
            use(wheel, Path(scratch) / "env")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, SHA-256 {sha256(wheel)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
