"""docs/from-horovod.md: its lines run, and its tables leave out nothing."""

import re
import sys

import pytest
from helpers.pages import DOCS, blocks_of, run_page

import tfdist
from tfdist.horovod._alias import AliasFinder
from tfdist.launch.horovod import flags, variables

PAGE = (DOCS / "from-horovod.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def clean():
    yield
    tfdist.shutdown()
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, AliasFinder)]
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        del sys.modules[name]


def test_the_lines_run():
    assert len(blocks_of("from-horovod.md")) == 2
    names = run_page("from-horovod.md")
    assert names["hvd"] is sys.modules["tfdist.horovod.tensorflow"]
    assert int(names["optimizer"].iterations) == 2 * 256 // 32


def test_the_migration_is_five_lines():
    (_, block) = blocks_of("from-horovod.md")
    assert re.findall(r"# (\d)", block) == ["1", "2", "3", "4", "5"]


def test_every_variable_with_a_meaning_is_in_the_table():
    honoured = [name for name, m in variables.TABLE.items() if not m.note]
    missing = [n for n in honoured if f"`{n}`" not in PAGE and n != "HOSTNAME"]
    assert missing == []
    for name, meaning in variables.TABLE.items():
        if meaning.becomes:
            (row,) = [
                line for line in PAGE.splitlines() if re.match(rf"\|.*`{name}`", line)
            ]
            assert f"`{meaning.becomes}`" in row or "TFDIST_STALL_WARNING_S" in row


def test_the_flags_it_names_exist():
    section = PAGE[PAGE.index("## horovodrun") : PAGE.index("## Variables")]
    known = {name for a in flags.parser()._actions for name in a.option_strings}
    known |= {"--log-dir", "--timestamps", "--ssh-command", "-x", "--horovod", "--tune"}
    for row in re.findall(r"^\| (.*?) \|", section, re.MULTILINE):
        for name in re.findall(r"(?<![\w-])--?[a-z][a-z-]*\*?", row):
            if name.endswith("*"):
                assert any(k.startswith(name[:-1]) for k in known), name
            else:
                assert name in known or name == "-prefix-timestamp", name


def test_the_names_of_tfdist_exist():
    section = PAGE[PAGE.index("## Names") : PAGE.index("## Advantages")]
    for path in re.findall(r"`tfdist\.([\w.]+)", section):
        found = tfdist
        for part in path.split("."):
            found = getattr(found, part)
