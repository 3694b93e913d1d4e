"""Write the tables of README.md and docs/*.md from results/*.json, between the markers that name them.

    python docs/generate.py           writes them
    python docs/generate.py --check   exits with 1 if any is not what the JSON files say

A block looks like this, and whatever stands between its markers is replaced:

    <!-- table: demo -->
    <!-- end -->
"""

from __future__ import annotations

import re
import sys

from tables import ROOT, models, search, speed

BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES = models.TABLES | search.TABLES | speed.TABLES


def filled(text: str) -> str:
    """A page with every block written anew."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], text)


def main(check: bool) -> int:
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        before = page.read_text()
        after = filled(before)
        if after != before:
            stale.append(page.name)
            if not check:
                page.write_text(after)
    if stale:
        print(f"{'not up to date' if check else 'written'}: {', '.join(stale)}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
