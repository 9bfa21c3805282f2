"""Links between the pages: none is dead, and every page is linked."""

import re
import subprocess

import pytest
from helpers.tree import ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = sorted(
    name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    if (ROOT / name).is_file()
)


def text_of(name):
    """A page without its blocks of code."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors_of(name):
    """The anchors that GitHub makes from the headings."""
    heads = re.findall(r"^#+ (.+)$", text_of(name), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in heads]
    kept = [re.sub(r"[^\w\- ]", "", head.lower()) for head in plain]
    return {head.replace(" ", "-") for head in kept}


def targets_of(name):
    """File and anchor of each link to a file of the project."""
    for link in LINK.findall(text_of(name)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        yield link, path.resolve(), anchor


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    dead = []
    for link, path, anchor in targets_of(name):
        if not path.exists():
            dead.append(link)
        elif anchor and path.suffix == ".md":
            if anchor not in anchors_of(path.relative_to(ROOT)):
                dead.append(link)
    assert dead == []


def test_every_page_is_linked():
    linked = {path for name in PAGES for _, path, _ in targets_of(name)}
    alone = [
        n for n in PAGES if n != "README.md" and (ROOT / n).resolve() not in linked
    ]
    assert alone == []
