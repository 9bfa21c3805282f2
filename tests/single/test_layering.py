"""Who may include, import or read what (docs/architecture.md, dependency rule)."""

import ast
import re
import subprocess
import sys
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
# A Python module or package imports what stands before it. Those of the first list
# import no TensorFlow, so that the launcher and the start-up are quick.
WITHOUT_TENSORFLOW = [
    *(
        "_core",
        "_engine",
        "tuning",
        "buckets",
        "bucket_order",
        "rendezvous",
        "_host_memory",
        "_last_words",
        "waits",
        "_runtime",
    ),
    *("_pickled", "_process_sets", "launch", "_own_name", "local_variables"),
    *("variable_groups", "progress", "timeline", "tools"),
]
WITH_TENSORFLOW = [
    *(
        "errors",
        "_names",
        "_call_order",
        "_library",
        "_parallel_maps",
        "_operations",
        "_gradients",
        "collectives",
    ),
    "engines",
    *("compression", "_xla", "reduce_options", "agreement", "_ready_levels"),
    *("_origins", "_reduced", "plain_data", "objects", "consistency"),
    *("_bucket_plan", "_bucket_reduction", "sparse", "weights"),
    *("_weighted_accumulation", "groups", "finite", "torn"),
    *("split_step", "_reducing_optimizer", "_added_scale"),
    *("_adapted", "variables", "_together", "data", "device"),
    *("tape", "optimizer"),
    *("metric_states", "_dealing", "evaluation", "prediction"),
    *("layers", "optimizers", "callbacks"),
    "restoration",
    "horovod",
]
ORDER = WITHOUT_TENSORFLOW + WITH_TENSORFLOW


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


def unit(module: str) -> str:
    """`tfdist.callbacks.checkpoint` → `callbacks`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_at_load(path: Path) -> list[str]:
    """The tfdist modules a file imports when it is loaded, not later or for types."""
    found = []
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "tfdist":
            found += [f"tfdist.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        waiting.extend(ast.iter_child_nodes(node))
    return [name for name in found if name.split(".")[0] == "tfdist"]


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
        ("membership/verdict.cc", "transport/link.h"),
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


def test_python_modules_import_what_stands_before_them():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(["tfdist", *path.relative_to(PACKAGE).with_suffix("").parts])
        own = unit(module)
        if own == "__init__":
            continue
        assert own in ORDER, f"{module}: give it its place in ORDER"
        for name in imports_at_load(path):
            target = unit(name)
            if target in ORDER and ORDER.index(target) > ORDER.index(own):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_launcher_start_up_and_core_import_no_tensorflow():
    program = f"""
import importlib, pkgutil, sys
import tfdist
for name in {WITHOUT_TENSORFLOW!r}:
    module = importlib.import_module("tfdist." + name)
    inside = getattr(module, "__path__", ())
    for info in pkgutil.walk_packages(inside, module.__name__ + "."):
        if not info.name.endswith("__main__"):
            importlib.import_module(info.name)
print(sorted({{"tensorflow", "keras", "jax", "torch"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
