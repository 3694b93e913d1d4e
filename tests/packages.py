"""What pip leaves of an installed package, for tests of entry points."""

from __future__ import annotations

from pathlib import Path


def install_package(folder: Path, module: str, group: str, code: str, entry: str) -> None:
    """A package of one module, version 2.5, with one entry point, such as "circle = round_shapes:Circle"."""
    (folder / f"{module}.py").write_text(code)
    record = folder / f"{module}-2.5.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 2.5\n")
    (record / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
