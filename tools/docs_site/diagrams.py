"""Diagrams of the site, drawn once: a git host draws `mermaid` blocks itself, the site shows the drawing kept for them.

So the site needs no library of three megabytes and no one's server. A drawing is named after its source; where a
block changes, `python -m tools.docs_site.diagrams MERMAID_JS` draws it again (`npm pack mermaid@11`, its `dist/mermaid.min.js`;
MIT) in Chromium.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWINGS = ROOT / "docs" / "pictures" / "diagrams"
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLOURS = {
    "#010101": "var(--md-default-fg-color)",
    "#020202": "var(--md-default-fg-color--light)",
    "#030303": "var(--md-code-bg-color)",
    "#040404": "var(--md-default-bg-color)",
}
"""What Mermaid is told to draw with, and what the site puts in its place, so that a drawing is dark where the page is."""


def file_of(source: str) -> Path:
    """Return where the drawing of a block is kept."""
    return DRAWINGS / f"{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


def drawn(source: str) -> str:
    """Return the HTML of a block's drawing. Raises FileNotFoundError where there is none, with the remedy."""
    file = file_of(source)
    if not file.exists():
        raise FileNotFoundError(
            f"There is no drawing of the mermaid block that begins {source[:60]!r}: make {file.name} with "
            "`python -m tools.docs_site.diagrams path/to/mermaid.min.js`."
        )
    return f'<div class="diagram">{file.read_text(encoding="utf-8").strip()}</div>'


def blocks() -> list[str]:
    """Return the source of every diagram in docs/."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [source for page in pages for source in BLOCK.findall(page.read_text(encoding="utf-8"))]


def draw(library: Path) -> None:
    """Draw what has no drawing yet, and remove drawings of what is gone."""
    from playwright.sync_api import sync_playwright

    DRAWINGS.mkdir(exist_ok=True)
    wanted = {file_of(source): source for source in blocks()}
    for old in set(DRAWINGS.glob("*.svg")) - set(wanted):
        old.unlink()
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.set_content("<body></body>")
        page.add_script_tag(path=library)
        for number, (file, source) in enumerate(wanted.items()):
            if not file.exists():
                svg = page.evaluate(SCRIPT, {"id": f"diagram-{number}-{file.stem}", "source": source})
                for told, used in COLOURS.items():
                    svg = svg.replace(told, used).replace(_rgb(told), used)
                file.write_text(svg.strip() + "\n", encoding="utf-8")
        browser.close()


def _rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


SCRIPT = """
async ({id, source}) => {
  mermaid.initialize({
    startOnLoad: false, securityLevel: "strict", theme: "base", htmlLabels: false, flowchart: {htmlLabels: false},
    themeVariables: {
      fontFamily: "system-ui, sans-serif", fontSize: "14px", background: "#040404", mainBkg: "#030303",
      primaryColor: "#030303", primaryTextColor: "#010101", primaryBorderColor: "#020202", lineColor: "#020202",
      textColor: "#010101", nodeTextColor: "#010101", edgeLabelBackground: "#040404", clusterBkg: "#040404",
      clusterBorder: "#020202", titleColor: "#010101",
    },
  });
  return (await mermaid.render(id, source)).svg;
}
"""

if __name__ == "__main__":
    draw(Path(sys.argv[1]))
