"""Breaks the project on purpose, one line at a time, and checks which test fails.

    python tests/mutants/run.py            # all that today's tree has no record of
    python tests/mutants/run.py --only id  # one, whatever the record says
    python tests/mutants/run.py --suites cpp  # those that need no Python test
    python tests/mutants/run.py --table    # the table of the records

Mutants are listed in mutants.toml: a file, a text that occurs in it exactly once, its
replacement, and the suites of which one must fail. Each is applied to a copy of the
tree. A mutant that does not compile or whose text is gone is an error of the list, not
a catch. Two records, cpp/results.json and python/results.json, contain the hash of the
code they were made with: the C++ tests and simulations depend on less code than the
Python tests. With another hash a record starts anew; a mutant that has changed is tried
again. Exit status 0: all caught.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.record import Record  # noqa: E402
from helpers.tree import tracked_files  # noqa: E402

CODE = {
    "cpp": ("tfdist_ops", "tests/cpp", "tests/sim"),
    "python": ("tfdist", "tfdist_ops", "tests", "setup.py", "pyproject.toml"),
}
WORK = ROOT / "build" / "mutants"
SUITE_TIMEOUT_S = 240
SIMULATIONS = {"sim": 10_000, "engine_sim": 10_000}  # suite → seeds
FAILED_LINE = re.compile(r"^FAILED (seed \d+|\S+)", re.MULTILINE)


class ListError(Exception):
    """The list of mutants does not fit the code."""


def copy_tree(files: list[pathlib.Path], tree: pathlib.Path) -> None:
    """Makes `tree` equal to the working tree, touching only what differs."""
    wanted = {tree / f for f in files}
    for file in files:
        target = tree / file
        target.parent.mkdir(parents=True, exist_ok=True)
        content = (ROOT / file).read_bytes()
        if not target.exists() or target.read_bytes() != content:
            target.write_bytes(content)
    for old in tree.rglob("*"):
        if old.is_file() and old not in wanted and old.suffix in {".py", ".cc", ".h"}:
            old.unlink()


def shell(command: list[str], cwd: pathlib.Path, timeout_s: float) -> tuple[int, str]:
    """Runs a command in its own session, killed as a whole at the deadline.

    Returns:
        Exit status (124 for the deadline) and output.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("TFDIST_")}
    env["PYTHONPATH"] = str(cwd)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    process = subprocess.Popen(
        command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return 124, output + f"\nFAILED deadline of {timeout_s:.0f} s\n"


def program_of(suite: str) -> str | None:
    """The C++ program that runs a suite; None: pytest does."""
    if suite in SIMULATIONS:
        return suite
    return suite.removeprefix("cpp:") if suite.startswith("cpp:") else None


def record_of(mutant: dict) -> str:
    """The record of a mutant's row: "python" if pytest runs any of its suites."""
    return "cpp" if all(program_of(s) for s in mutant["suites"]) else "python"


class Bench:
    """A copy of the tree with its builds."""

    def __init__(self, files: list[pathlib.Path]) -> None:
        self.files = files
        self.tree = WORK / "tree"
        self.cpp = WORK / "cpp"
        self.cmake = shutil.which("cmake") or str(
            pathlib.Path(sys.executable).parent / "cmake"
        )

    def reset(self) -> None:
        copy_tree(self.files, self.tree)

    def build(self, suites: list[str]) -> None:
        """Builds what `suites` run; raises ListError when it does not compile."""
        programs = [name for s in suites if (name := program_of(s))]
        if programs:
            source = str(self.tree / "tfdist_ops")
            command = [self.cmake, "-S", source, "-B", str(self.cpp)]
            status, output = shell([*command, "-DTFDIST_TESTS=ON"], self.tree, 120)
            if status == 0:
                command = [self.cmake, "--build", str(self.cpp), "-j2", "--target"]
                status, output = shell([*command, *programs], self.tree, 600)
            if status != 0:
                raise ListError(f"does not build:\n{output[-3000:]}")
        if len(programs) < len(suites):
            command = [sys.executable, "setup.py", "build_ext", "--inplace"]
            status, output = shell(command, self.tree, 900)
            if status != 0:
                raise ListError(f"does not build:\n{output[-3000:]}")

    def run(self, suite: str) -> str | None:
        """Runs one suite; the name of the test that failed, or None."""
        program = program_of(suite)
        if program in SIMULATIONS:
            seeds = str(SIMULATIONS[program])
            command = [str(self.cpp / program), "--seeds", seeds]
        elif program:
            command = [str(self.cpp / program), "-x"]
        else:
            flags = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-rf"]
            command = [sys.executable, "-m", "pytest", *flags, *suite.split()]
        status, output = shell(command, self.tree, SUITE_TIMEOUT_S)
        if status == 0:
            return None
        found = FAILED_LINE.search(output)
        if found is None and status != 124 and not program:
            raise ListError(f"{suite}: status {status}, no test:\n{output[-3000:]}")
        name = found.group(1) if found else f"(exit status {status})"
        return f"{program}: {name}" if program else name


def check_suites(bench: Bench, suites: list[str], passed: set[str]) -> str | None:
    """Runs those that are not in `passed` yet; the name of a test that failed."""
    new = [suite for suite in suites if suite not in passed]
    if new:
        bench.build(new)
    for suite in new:
        if failed := bench.run(suite):
            return failed
        passed.add(suite)
    return None


def try_mutant(bench: Bench, mutant: dict) -> dict:
    """Applies one mutant and returns its row of the record."""
    begin = time.monotonic()
    file = bench.tree / mutant["file"]
    text = file.read_text()
    if text.count(mutant["find"]) != 1:
        count = text.count(mutant["find"])
        raise ListError(
            f"{mutant['id']}: expected its text once in {mutant['file']}, got {count}"
        )
    file.write_text(text.replace(mutant["find"], mutant["replace"]))
    try:
        bench.build(mutant["suites"])
        caught = None
        for suite in mutant["suites"]:
            caught = bench.run(suite)
            if caught:
                break
    except ListError as error:
        raise ListError(f"{mutant['id']}: {error}") from None
    finally:
        file.write_text(text)
    return {
        "mutant": mutant,
        "caught_by": caught,
        "seconds": round(time.monotonic() - begin, 1),
    }


def row_of(mutant: dict, record: Record) -> dict | None:
    """The recorded row of this mutant, unless the mutant has changed since."""
    row = record.rows.get(mutant["id"])
    return row if row and row["mutant"] == mutant else None


def print_table(rows: list[dict]) -> None:
    for row in rows:
        name, what = row["mutant"]["id"], row["mutant"]["what"]
        print(f"{name:28} {row['caught_by'] or 'SURVIVED'}\n    {what}")
    caught = sum(1 for row in rows if row["caught_by"])
    print(f"{caught} of {len(rows)} mutants caught")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="id of one mutant to try again")
    parser.add_argument("--suites", choices=CODE, help="only this record")
    parser.add_argument("--table", action="store_true", help="print the records")
    options = parser.parse_args()
    records = {
        name: Record(HERE / name / "results.json", code) for name, code in CODE.items()
    }
    mutants = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
    mutants = [
        m for m in mutants
        if options.only in (None, m["id"]) and options.suites in (None, record_of(m))
    ]  # fmt: skip
    if not mutants:
        parser.error("no mutant in mutants.toml matches --only and --suites")
    if not options.table:
        todo = [
            m for m in mutants
            if options.only or row_of(m, records[record_of(m)]) is None
        ]  # fmt: skip
        bench = Bench(tracked_files())
        bench.reset()
        passed: set[str] = set()  # suites that pass without any mutant
        for mutant in todo:
            if failed := check_suites(bench, mutant["suites"], passed):
                print(f"without any mutant, {failed} fails; fix that first")
                return 2
            record = records[record_of(mutant)]
            row = try_mutant(bench, mutant)
            record.rows[mutant["id"]] = row
            record.save()
            result = row["caught_by"] or "SURVIVED"
            print(f"{mutant['id']:28} {row['seconds']:6.1f} s  {result}", flush=True)
    for name, record in records.items():
        print(f"{name}: code {record.tree}")
    found = [row_of(m, records[record_of(m)]) for m in mutants]
    rows = [row for row in found if row]
    print_table(rows)
    caught = len(rows) == len(mutants) and all(row["caught_by"] for row in rows)
    return 0 if caught else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ListError as error:
        sys.exit(f"mutants.toml: {error}")
