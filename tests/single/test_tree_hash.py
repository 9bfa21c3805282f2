"""Which edits of a file make the records of long runs out of date."""

import ast

import pytest
from helpers.tree import ROOT, statements, tracked_files

PYTHON = '''"""A module."""

import os


class A:
    """A class: é."""

    def f(self, a="# no comment"):
        """One line."""
        return f"{a}#" + os.sep  # the separator


def g():
    """Only a docstring."""
'''
CPP = """// A file.
#include "base/a.h"

/* of
   two lines */
const char* kUrl = "https://a\\"b//c";  // an address
const char* kRaw = R"x(// " no comment)x";
int F(char c) { return c == '"' ? 1'000'000 : 0x1'f; }  // ' and "
"""


def python(text):
    return statements(".py", text.encode())


def cpp(text):
    return statements(".cc", text.encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""Another\n\ntext."""'),
        ('"""A class: é."""', "'another text'"),
        ('"""Only a docstring."""', '"""Another text."""  # and a comment'),
        ("  # the separator", ""),
        ("import os\n", "# a comment\nimport os\n\n"),
    ],
)
def test_comments_and_docstrings_of_python_do_not_count(old, new):
    assert PYTHON.count(old) == 1
    assert python(PYTHON.replace(old, new)) == python(PYTHON)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"# no comment"', '"# another text"'),
        ('f"{a}#"', 'f"{a}"'),
        ('        """One line."""\n', '        """One line."""\n        del a\n'),
        ("class A:", "class B:"),
    ],
)
def test_statements_of_python_count(old, new):
    assert PYTHON.count(old) == 1
    assert python(PYTHON.replace(old, new)) != python(PYTHON)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// A file.\n", ""),
        ("/* of\n   two lines */", "// another text: ' and \""),
        ("  // an address", ""),
        ("  // ' and \"", "  /* another */"),
    ],
)
def test_comments_of_cpp_do_not_count(old, new):
    assert CPP.count(old) == 1
    assert cpp(CPP.replace(old, new)) == cpp(CPP)


@pytest.mark.parametrize(
    ("old", "new"),
    [("//c", "//d"), ("no comment", "other"), ("1'000", "2'000"), ("'\"'", "'#'")],
)
def test_code_and_literals_of_cpp_count(old, new):
    assert CPP.count(old) == 1
    assert cpp(CPP.replace(old, new)) != cpp(CPP)


def test_of_other_files_every_byte_counts():
    text = b"# a comment\n\nkey = 1\n"
    assert statements(".toml", text) == text


def test_all_that_is_left_of_the_sources_is_still_code():
    files = [file for file in tracked_files(("tfdist/core",)) if file.suffix == ".py"]
    assert len(files) > 50
    for file in files:
        ast.parse(statements(".py", (ROOT / file).read_bytes()), str(file))
