"""Links between the pages: none is dead, and every page is linked and on the site."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from helpers.tree import ROOT

SPEC = importlib.util.spec_from_file_location("docs_conf", ROOT / "docs" / "conf.py")
conf = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(conf)
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


def listed_on(name):
    """The pages that a page of contents lists, in order."""
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for _, links in conf.sections(text) for link in links]
    return [((ROOT / name).parent / link).resolve() for link in links]


def test_the_navigation_of_the_site_has_every_page_once():
    listed = listed_on(f"{conf.INDEX}.md")
    for name in conf.CONTENTS:
        listed += [
            p
            for p in listed_on(f"{name}.md")
            if p.parent.samefile(ROOT / Path(name).parent)
        ]
    guides = (ROOT / conf.GUIDES).glob("*.py")
    pages = {*PAGES, *(str(path.relative_to(ROOT)) for path in guides)}
    on_top = {f"{conf.root_doc}.md", f"{conf.INDEX}.md"}
    names = [str(path.relative_to(ROOT)) for path in listed]
    assert sorted(names) == sorted(pages - on_top)


def test_the_navigation_has_the_groups_of_the_readme():
    text = (ROOT / f"{conf.INDEX}.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    groups = [title for title, _ in conf.sections(text)]
    assert groups == ["Start", "Train", "Run", "Understand", "Reference"]
    assert re.findall(r"^- \*\*(\w+)\.\*\* \[", readme, re.MULTILINE) == groups
