"""Generate the tables of README.md, docs/ and research/ from JSON files.

    python tools/generate.py           update the pages
    python tools/generate.py --check   exit with 1 if a page is out of date

A page names a table in a pair of markers; everything between them is replaced:

    <!-- table: demo -->
    <!-- end -->
"""

from __future__ import annotations

import re
import sys

from tables import ROOT, arena, models, research, scaling, speed, synchrony

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES = arena.TABLES | models.TABLES | research.TABLES | scaling.TABLES | speed.TABLES | synchrony.TABLES


def filled(text: str) -> str:
    """A page with every table regenerated."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def main(check: bool) -> int:
    stale = []
    pages = [path for folder in ("docs", "research") for path in sorted((ROOT / folder).rglob("*.md"))]
    for page in [ROOT / "README.md", *pages]:
        before = page.read_text()
        after = filled(before)
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after)
    if stale:
        print(f"{'out of date' if check else 'updated'}: {', '.join(stale)}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
