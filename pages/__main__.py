"""`python -m pages` writes the pages that are generated; with `--check` it only names those that are out of date."""

from __future__ import annotations

import sys

from pages.generated import ROOT, outdated

if __name__ == "__main__":
    texts = outdated()
    for path, text in texts.items():
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT), file=sys.stderr)
    if texts and "--check" in sys.argv:
        sys.exit("out of date: run `python -m pages`")
