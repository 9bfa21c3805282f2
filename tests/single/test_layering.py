"""Who may include, import or read what (docs/architecture.md, dependency rule)."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "tfdist_ops"
PACKAGE = ROOT / "tfdist"

# A folder includes itself and what is listed.
FOLDERS = {
    "base": (),
    "transport": ("base",),
    "collective": ("base", "transport"),
    "membership": ("base",),
    "scheduler": ("base", "transport", "collective", "membership"),
    "runtime": ("base", "transport", "collective", "membership", "scheduler"),
    "tf": ("base", "transport", "collective", "membership", "scheduler", "runtime"),
    "xla": ("runtime",),
    "cuda": ("base",),
}
# Headers of other projects → the folders that may include them.
FOREIGN = {
    r"(tensorflow|tsl|xla|absl|third_party|unsupported|Eigen|google)/": ("tf", "xla"),
    r"(cuda|cublas|nccl|nvml|driver_types|device_launch)": ("cuda",),
}
# The entries of tfdist/ by floors: each imports from lower floors only, also inside
# functions. `errors` and `ray` are modules, all others are packages.
FLOORS = (
    ("core", "optimizers"),
    ("errors",),
    ("collectives", "launch"),
    ("gradients", "data", "tools"),
    ("layers",),
    ("elastic", "training"),
    ("callbacks",),
    ("horovod", "ray"),
)
FLOOR_OF = {entry: n for n, floor in enumerate(FLOORS) for entry in floor}
# So that the launcher and the start-up are quick, these packages need no TensorFlow.
WITHOUT_TENSORFLOW = ("core", "launch", "tools")
NEEDS_TENSORFLOW = "tfdist.core.exceptions"  # is imported where an error is raised


def native_files() -> list[Path]:
    suffixes = {".cc", ".h", ".cu"}
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in suffixes)


def includes(path: Path) -> list[str]:
    """The names in the #include lines, <...> and "..." alike."""
    lines = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)
    assert lines or path.name == "c_api.h", f"{path}: no include line found"
    return lines


def forbidden_includes(path: Path, names: list[str]) -> list[str]:
    """What is wrong with the includes of a file of tfdist_ops."""
    folder = path.relative_to(NATIVE).parts[0]
    wrong = []
    for name in names:
        for pattern, owners in FOREIGN.items():
            own = (NATIVE / name).is_file()
            if re.match(pattern, name) and not own and folder not in owners:
                wrong.append(f"{name}: only {owners} may include it")
        target = name.split("/")[0]
        own = target != "xla" or (NATIVE / name).is_file()  # XLA's headers: xla/...
        if own and target in FOLDERS and target not in (folder, *FOLDERS[folder]):
            wrong.append(f"{name}: {folder}/ may include {(folder, *FOLDERS[folder])}")
    return [f"{path.relative_to(ROOT)}: {line}" for line in wrong]


@functools.cache
def modules() -> dict[str, Path]:
    """The modules of tfdist and their files."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def modules_imported_by(path: Path) -> set[str]:
    return imports(path.read_text(), modules())


def imports(source: str, known: Collection[str]) -> set[str]:
    """The modules of tfdist that a file imports, also in functions, not for types."""
    found = set()
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
        waiting.extend(ast.iter_child_nodes(node))
    return found & set(known)


def entry(module: str) -> str:
    """`tfdist.callbacks.checkpoint` → `callbacks`; "" of `tfdist` itself."""
    return module.partition(".")[2].partition(".")[0]


def climbs(module: str, target: str) -> bool:
    """Whether an import goes to the same floor or up, out of its own package."""
    own, other = entry(module), entry(target)
    return own != other and other != "" and FLOOR_OF[other] >= FLOOR_OF[own]


def test_every_folder_of_tfdist_ops_has_a_place_in_the_order():
    folders = {path.relative_to(NATIVE).parts[0] for path in native_files()}
    assert folders <= set(FOLDERS), "a new folder? give it its place in FOLDERS"


@pytest.mark.parametrize("folder", FOLDERS)
def test_includes_go_to_the_left_only(folder):
    files = [p for p in native_files() if p.relative_to(NATIVE).parts[0] == folder]
    assert files, f"tfdist_ops/{folder} has no files"
    wrong = [w for path in files for w in forbidden_includes(path, includes(path))]
    assert wrong == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("base/status.cc", "transport/link.h"),
        ("collective/schedule.cc", "scheduler/engine.h"),
        ("membership/failure_consensus.cc", "transport/link.h"),
        ("runtime/runtime.cc", "tf/tf_bridge.h"),
        ("scheduler/engine.cc", "tensorflow/core/framework/op_kernel.h"),
        ("runtime/runtime.cc", "absl/status/status.h"),
        ("transport/shm_link.cc", "cuda_runtime_api.h"),
        ("tf/allreduce_op.cc", "cuda/pack_kernels.h"),
    ],
)
def test_the_rule_sees_a_forbidden_include(file, name):
    assert forbidden_includes(NATIVE / file, [name])


def test_only_the_configuration_table_reads_the_environment():
    readers = [
        str(path.relative_to(NATIVE))
        for path in native_files()
        if re.search(
            r"\b(secure_)?getenv\s*\(|::environ\b|\bsetenv\s*\(", path.read_text()
        )
    ]
    assert readers == ["base/config.cc"]


def test_every_module_stands_in_a_package_that_has_a_floor():
    assert {entry(module) for module in modules()} - {""} == set(FLOOR_OF)


def test_imports_of_python_modules_go_to_lower_floors():
    known = modules()
    wrong = [
        f"{module} imports {target}"
        for module, path in known.items()
        for target in sorted(modules_imported_by(path))
        if entry(module) and climbs(module, target)
    ]
    assert wrong == []


def test_python_modules_import_each_other_in_no_circle():
    known = modules()
    graph = {
        module: modules_imported_by(path) - {module} for module, path in known.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_the_rule_sees_an_import_that_climbs():
    known = modules()
    inside = "def f():\n    from tfdist.training import optimizer"
    assert imports(inside, known) == {"tfdist.training.optimizer"}
    assert imports("from tfdist.core import native, engines", known) == {
        "tfdist.core.native",
        "tfdist.core.engines",
    }
    assert climbs("tfdist.gradients.tape", "tfdist.training.optimizer")
    assert climbs("tfdist.gradients.tape", "tfdist.data.shard")  # the same floor
    assert not climbs("tfdist.training.optimizer", "tfdist.gradients.tape")
    assert not climbs("tfdist.gradients.tape", "tfdist.gradients.options")


def test_launcher_start_up_and_core_import_no_tensorflow():
    program = f"""
import importlib, pkgutil, sys
import tfdist
for name in {WITHOUT_TENSORFLOW!r}:
    module = importlib.import_module("tfdist." + name)
    for info in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
        if info.name != {NEEDS_TENSORFLOW!r} and not info.name.endswith("__main__"):
            importlib.import_module(info.name)
print(sorted({{"tensorflow", "keras", "jax", "torch"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
