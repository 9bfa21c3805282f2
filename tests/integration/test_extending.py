"""docs/extending.md is true: its code builds, is tested and is benchmarked."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- (file|after): (.+?) -->\n```cpp\n(.*?)```\n", re.DOTALL)


def apply_page(page: str, tree: pathlib.Path) -> int:
    """Applies the marked code blocks of `page` to `tree`; returns how many."""
    count = 0
    for kind, where, code in BLOCK.findall(page):
        if kind == "file":
            (tree / where).write_text(code)
        else:
            name, _, anchor = where.partition(": ")
            file = tree / name
            lines = file.read_text().splitlines(keepends=True)
            at = [i for i, line in enumerate(lines) if line.strip().startswith(anchor)]
            assert len(at) == 1, f"{anchor!r} stands {len(at)} times in {name}"
            lines.insert(at[0] + 1, code)
            file.write_text("".join(lines))
        count += 1
    return count


def run(*command: str, cwd: pathlib.Path, timeout_s: float) -> str:
    done = subprocess.run(
        command, cwd=cwd, timeout=timeout_s, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_algorithm_of_the_page_is_built_tested_and_timed(tmp_path):
    for folder in ("tfdist_ops", "tests/cpp", "tests/sim", "tests/fuzz", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    assert apply_page((ROOT / "docs/extending.md").read_text(), tmp_path) == 3
    bin_dir = pathlib.Path(sys.executable).parent
    cmake = shutil.which("cmake", path=f"{bin_dir}:/usr/bin:/usr/local/bin")
    assert cmake is not None, "cmake comes with `make setup`"
    build = tmp_path / "build"
    configure = [cmake, "-S", str(tmp_path / "tfdist_ops"), "-B", str(build)]
    run(*configure, "-DTFDIST_TESTS=ON", cwd=tmp_path, timeout_s=60)
    targets = ["schedule_test", "conformance_test", "collective_bench"]
    run(
        cmake, "--build", str(build), "-j2", "--target", *targets,
        cwd=tmp_path, timeout_s=240,
    )  # fmt: skip
    run(str(build / "schedule_test"), cwd=tmp_path, timeout_s=60)
    tested = run(str(build / "conformance_test"), cwd=tmp_path, timeout_s=60)
    assert "covered: allreduce/chain over tcp" in tested
    table = run(
        str(build / "collective_bench"), "--max-bytes", "16384", "--repeat", "3",
        cwd=tmp_path, timeout_s=60,
    )  # fmt: skip
    rows = [line.split() for line in table.splitlines() if "allreduce/chain" in line]
    assert len(rows) == 2
    assert all(row[-1] == "0" for row in rows), "wrong results"
