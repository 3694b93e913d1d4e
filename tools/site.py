"""MkDocs hooks: pictures under results/ and an exported Lab become part of the site, other links plain text.

The pages under docs/ are also read on code hosting sites, so their links are relative to the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")
PICTURES = "pictures"  # where the site keeps what lies under results/
LAB = ROOT / "build" / "lab"  # where `make docs` exports the Lab
OPEN_LAB = "<!-- open: lab -->"  # replaced by a link if there is one


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every picture under results/ as pictures/…, and the Lab as lab/…"""
    for path in sorted((ROOT / "results").rglob("*.png")):
        name = f"{PICTURES}/{path.relative_to(ROOT / 'results').as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted(LAB.rglob("*.*")):
        name = f"lab/{path.relative_to(LAB).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links that leave docs/."""
    here = Path(config.docs_dir, page.file.src_uri).parent

    def rewritten(found: re.Match[str]) -> str:
        mark, text, target, _ = found.groups()
        path = Path(os.path.normpath(here / target))
        if path.is_relative_to(config.docs_dir):
            return found[0]
        if mark and path.is_relative_to(ROOT / "results"):
            inside = Path(config.docs_dir, PICTURES, path.relative_to(ROOT / "results"))
            return f"![{text}]({Path(os.path.relpath(inside, here)).as_posix()})"
        return text

    if files.get_file_from_path("lab/index.html"):
        markdown = markdown.replace(OPEN_LAB, "\n[Open the Lab in this browser](lab/index.html)\n")
    return LINK.sub(rewritten, markdown)
