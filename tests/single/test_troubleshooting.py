"""docs/troubleshooting.md quotes messages that the code really prints."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = [
    quote
    for heading in re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    for quote in re.findall(r'"([^"]+)"', heading)
]


def messages() -> str:
    """All sources, with literals that a line break cut in two joined again."""
    files = [ROOT / "setup.py", ROOT / ".ci" / "setup"]
    for folder, suffixes in (("tfdist", {".py"}), ("tfdist_ops", {".cc", ".h"})):
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    texts = (path.read_text(encoding="utf-8") for path in sorted(files))
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


def test_every_heading_quotes_a_message_of_the_code():
    text = messages()
    assert len(QUOTES) > 20
    assert [quote for quote in QUOTES if quote not in text] == []


def test_every_section_of_the_list_exists():
    linked = re.findall(r"^- \[(.+)\]", PAGE, re.MULTILINE)
    assert linked == re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
