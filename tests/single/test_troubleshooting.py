"""The pages of the docs that explain messages quote what the code really prints."""

import re
from pathlib import Path

from tfdist.launch.remote import SSH_COMMAND

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HOSTS = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
NODES = (ROOT / "docs" / "hosts-without-ssh.md").read_text(encoding="utf-8")


def quotes(page: str) -> list[str]:
    """What the headings quote."""
    return [
        quote
        for heading in re.findall(r"^### (.+)$", page, re.MULTILINE)
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
    assert len(quotes(PAGE)) > 20 and len(quotes(HOSTS)) > 10 and len(quotes(NODES)) > 3
    found = quotes(PAGE) + quotes(HOSTS) + quotes(NODES)
    missing = [quote for quote in found if quote not in text]
    assert missing == []


def test_the_default_ssh_command_is_the_one_that_is_documented():
    assert f"\n{SSH_COMMAND}\n" in HOSTS.replace(" \\\n    ", " ")


def test_every_section_of_the_list_exists():
    linked = re.findall(r"^- \[(.+)\]", PAGE, re.MULTILINE)
    assert linked == re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
