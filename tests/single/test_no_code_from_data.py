"""Nothing turns bytes into code, opens all interfaces, or shows a secret.

A gate over the source: every rule is a function of a syntax tree or a text, and is
tried on a line that it must catch.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from helpers import launcher

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ("tfdist", "tests", "recipes", "docs", "benchmarks", ".ci", "setup.py")
NATIVE = ("tfdist_ops", "tests/cpp", "tests/fuzz", "benchmarks")

# Modules whose loaders run what they read, or that hide one which does.
MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill"),
    *("marshal", "shelve", "joblib", "jsonpickle", "copyreg", "code", "codeop"),
    *("xmlrpc", "telnetlib"),
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# Attribute calls by the last two names.
CALLS = {
    *("os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("torch.load", "pd.read_pickle", "pandas.read_pickle"),
    *("config.enable_unsafe_deserialization", "multiprocessing.connection"),
}
# Keyword arguments with a value that is not allowed (None: any value but a literal
# False).
KEYWORDS = {"allow_pickle": False, "shell": False, "safe_mode": True}
ADDRESSES = re.compile(r"(?<![\w.])0\.0\.0\.0(?![\w.])")
SECRET_OPTIONS = re.compile(r"^--?\w*(secret|password|token|key)", re.I)

# (file, what) that are right: tests that name what must be refused; and the one module
# that unpickles where a job has chosen so.
ALLOWED = {
    ("tfdist/core/pickling.py", "pickle"),
    ("tfdist/core/pickling.py", "cloudpickle"),
    ("tests/single/test_no_code_from_data.py", "0.0.0.0"),
    ("tests/single/test_launch_hosts.py", "0.0.0.0"),
    ("tests/single/test_rendezvous_secret.py", "0.0.0.0"),
    ("tests/single/test_rendezvous_store.py", "0.0.0.0"),
    ("tests/single/test_data.py", "exec"),  # runs the code blocks of a docstring
    ("tests/single/test_horovod_keras2_names.py", "exec"),  # import statements
    ("tests/single/test_deadlock.py", "compile"),  # frames of files that do not exist
    ("tests/single/test_deadlock.py", "exec"),
    ("tests/helpers/pages.py", "compile"),  # and of a page
    ("tests/helpers/pages.py", "exec"),
}


def names_of(node: ast.expr) -> str:
    """`a.b.c` → "b.c"."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts[:2]))


def faults(source: str) -> list[tuple[int, str]]:
    """Line and name of everything in a Python source that is not allowed."""
    found = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
            found += [(line, name) for name in names if name in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            name = node.module.split(".")[0]
            found += [(line, name)] if name in MODULES and node.level == 0 else []
        elif isinstance(node, ast.Call):
            found += [(line, what) for what in call_faults(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if ADDRESSES.search(node.value):
                found.append((line, "0.0.0.0"))
    return found


def call_faults(node: ast.Call) -> list[str]:
    found = []
    if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
        found.append(node.func.id)
    name = names_of(node.func)
    if name in CALLS:
        found.append(name)
    if name.endswith("import_module") and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and first.value in MODULES:
            found.append(str(first.value))
    if name.endswith("add_argument"):
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        found += [f"option {t}" for t in texts if SECRET_OPTIONS.search(str(t))]
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS:
            value = keyword.value
            good = KEYWORDS[keyword.arg]
            if not (isinstance(value, ast.Constant) and value.value is good):
                found.append(str(keyword.arg))
    return found


def native_faults(source: str) -> list[tuple[int, str]]:
    """The same for C++, comments apart."""
    rules = {
        "all interfaces": r"\bINADDR_ANY\b|\bin6addr_any\b|\"0\.0\.0\.0\"",
        "a shell": r"\b(system|popen|execl|execvp?)\s*\(",
        "dlopen": r"\bdlopen\s*\(",
        "no bound": r"\b(strcpy|strcat|sprintf|gets|alloca)\s*\(",
    }
    found = []
    blocks = re.compile(r"/\*.*?\*/", re.S)
    source = blocks.sub(lambda block: "\n" * block[0].count("\n"), source)
    for number, line in enumerate(source.splitlines(), 1):
        code = line.split("//")[0]
        for what, pattern in rules.items():
            if re.search(pattern, code):
                found.append((number, what))
    return found


def files(folders: tuple[str, ...], suffixes: set[str]) -> list[Path]:
    found = []
    for name in folders:
        path = ROOT / name
        found += [path] if path.is_file() else list(path.rglob("*"))
    return sorted(p for p in found if p.suffix in suffixes)


def test_no_python_file_turns_bytes_into_code():
    sources = files(PYTHON, {".py"})
    assert len(sources) > 60
    wrong = []
    for path in sources:
        name = str(path.relative_to(ROOT))
        wrong += [
            f"{name}:{line}: {what}"
            for line, what in faults(path.read_text())
            if (name, what) not in ALLOWED
        ]
    assert wrong == []


def test_one_module_unpickles_and_only_what_is_asked_for_uses_it():
    assert {file for file, what in ALLOWED if what in MODULES} == {
        "tfdist/core/pickling.py"
    }
    users = [
        str(path.relative_to(ROOT / "tfdist"))
        for path in files(("tfdist",), {".py"})
        if re.search("import .*pickling", path.read_text())
    ]
    of_run = ["launch/function_files.py", "launch/run_function.py"]
    assert users == [
        "collectives/objects.py",
        "horovod/runner/__init__.py",
        *of_run,
    ]


def test_no_native_file_opens_a_shell_or_all_interfaces():
    sources = files(NATIVE, {".cc", ".h", ".cu"})
    assert len(sources) > 60
    wrong = []
    for path in sources:
        name = str(path.relative_to(ROOT))
        allowed = {"dlopen"} if name == "tfdist_ops/transport/sha256.cc" else set()
        wrong += [
            f"{name}:{line}: {what}"
            for line, what in native_faults(path.read_text())
            if what not in allowed
        ]
    assert wrong == []


def test_no_shell_script_runs_what_it_downloads():
    for path in [ROOT / "Makefile", *(ROOT / ".ci").iterdir()]:
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"(curl|wget)[^\n]*\|\s*(ba)?sh|\beval\b", text), path


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, cloudpickle as cp",
        "from dill import loads",
        "def f():\n    import marshal",
        "import shelve.x",
        "importlib.import_module('pickle')",
        "eval(text)",
        "exec(code, {})",
        "__import__(name)",
        "yaml.load(file)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "subprocess.run(line, shell=True)",
        "keras.models.load_model(path, safe_mode=False)",
        "os.system('ls')",
        "sock.bind(('0.0.0.0', 80))",
        "parser.add_argument('--secret')",
        "parser.add_argument('--token-file')",
    ],
)
def test_the_python_rules_see_what_is_forbidden(line):
    assert faults(line)


@pytest.mark.parametrize(
    "line",
    [
        "re.compile('x')",
        "model.compile(loss='mse')",
        "np.load(path, allow_pickle=False)",
        "def evaluate(): pass",
        "version = '10.0.0.0.1'",
        "import tfdist.code",
    ],
)
def test_the_python_rules_leave_the_rest_alone(line):
    assert faults(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "address.sin_addr.s_addr = htonl(INADDR_ANY);",
        'system("ls");',
        'popen ("ls", "r");',
        "strcpy(a, b);",
        'dlopen("x", 0);',
    ],
)
def test_the_native_rules_see_what_is_forbidden(line):
    assert native_faults(line)


# A rank that looks for the secret where everybody could see it.
LOOK = """
import os, sys
from pathlib import Path
from tfdist.core import world
from tfdist.core.rendezvous.secret import read_secret_file
secret = read_secret_file(os.environ["TFDIST_SECRET_FILE"])
world.start()
forms = [secret, secret.hex().encode(), repr(secret)[2:-1].encode()]
for path in Path("/proc").glob("[0-9]*"):
    for name in ("cmdline", "environ"):
        try:
            text = (path / name).read_bytes()
        except OSError:
            continue
        if any(form in text for form in forms):
            sys.exit(f"the secret stands in {path / name}")
print("looked", flush=True)
print("secret " + secret.hex(), file=open(sys.argv[1] + os.environ["TFDIST_RANK"], "w"))
"""


def test_the_secret_is_in_no_command_line_environment_or_log(tmp_path):
    program = tmp_path / "look.py"
    program.write_text(LOOK)
    command = [sys.executable, str(program), str(tmp_path / "secret.")]
    done = launcher.run(tmp_path, "-np", "2", "--", *command, TFDIST_LOG_LEVEL="debug")
    assert done.code == 0, done.stderr
    assert done.stdout.count("looked") == 2
    secret = (tmp_path / "secret.0").read_text().split()[1]
    assert secret == (tmp_path / "secret.1").read_text().split()[1]
    logs = [p.read_text() for p in tmp_path.rglob("tfdist-logs/**/*") if p.is_file()]
    assert logs
    for text in (done.stdout, done.stderr, *logs):
        assert secret not in text
