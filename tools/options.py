"""Write the table of options into the documentation, from the declarations in ``infeed.options``.

python tools/options.py           # write the tables
python tools/options.py --check   # fail if a table differs from the declarations
"""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING
from pathlib import Path

from infeed.options import OPTIONS

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "tuning.md"
BEGIN, END = "<!-- options: written by tools/options.py -->\n", "<!-- /options -->\n"
TITLES = {
    "torch": "As in torch",
    "workers": "Workers",
    "reproducibility": "Reproducibility",
    "ranks": "Several ranks",
    "memory": "Memory",
    "faults": "Faults",
    "device": "Device",
    "observing": "Observing",
}


def options_table() -> str:
    """Return one Markdown table per topic."""
    lines = []
    topic = None
    for option in OPTIONS:
        about = option.metadata
        if about["topic"] != topic:
            topic = about["topic"]
            lines += ["", f"**{TITLES[topic]}**", "", "| option | default | meaning |", "|---|---|---|"]
        default = "" if option.default is MISSING else f"`{option.default!r}`".replace("'", '"')
        text = about["doc"].replace("``", "`")
        lines.append(f"| `{option.name}` | {default} | {text[0].upper() if text[0].isalpha() else text[0]}{text[1:]} |")
    return "\n".join(lines[1:]) + "\n"


def written(page: str) -> str:
    """Return the page with the current table."""
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{options_table()}\n{END}", page, flags=re.DOTALL
    )


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        return int(written(page) != page)
    PAGE.write_text(written(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
