"""Builds the wheel and the source distribution in dist/, and tries them (`make wheel`).

    python .ci/build_wheel.py                   # all versions of TensorFlow
    python .ci/build_wheel.py 2.16 2.21         # a wheel for these alone

1. An environment with each TensorFlow, in build/wheel/ (kept, 1.5 GB each).
2. The source distribution, and from it the wheel, twice in different folders: both
   wheels must have the same bytes. auditwheel checks them for the platform.
3. In each environment, without a compiler on the PATH: the wheel is installed, and the
   example trains on two ranks, which must end with the same weights.
4. In the last one, the operations are removed. On first use, tfdist must report that
   there is no compiler, or compile them if there is one.

Python 3.11 to 3.13 are taken from the PATH as far as they are there. The exit code is 0
only if everything held.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
PLATFORM = "manylinux_2_34_x86_64"
# TensorFlow → the Python that it is tried with; each Python has its turn.
PYTHONS = {
    "2.16": "3.11",
    "2.17": "3.12",
    "2.18": "3.11",
    "2.19": "3.12",
    "2.20": "3.13",
    "2.21": "3.13",
}
MOST_BYTES = 3_000_000
INSTALL_S, COMPILE_S = 10.0, 60.0
TIMEOUT_S = 1800
EXAMPLE = """
import hashlib, keras, numpy as np, tensorflow as tf, tfdist

tfdist.init()
keras.utils.set_random_seed(tfdist.rank())
rng = np.random.default_rng(0)
images, labels = rng.normal(size=(512, 20)).astype("float32"), rng.integers(0, 4, 512)
train = tfdist.data.shard((images, labels), batch_size=32, shuffle=True)
model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
model.compile(
    tfdist.DistributedOptimizer(keras.optimizers.Adam(1e-3)),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
callbacks = [tfdist.callbacks.BroadcastInitialState()]
model.fit(train, epochs=2, callbacks=callbacks, verbose=0, shuffle=False)
weights = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
print("trained", tf.__version__, tfdist.size(), weights)
"""


class WheelError(Exception):
    """A requirement on the wheel is not met."""


def run(*command: str | Path, **options: object) -> str:
    """Runs a command; returns its output, or raises WheelError with the end of it."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        **options,
    )
    if done.returncode != 0:
        words = " ".join(map(str, command))
        raise WheelError(f"exit code {done.returncode}: {words}\n{done.stdout[-4000:]}")
    return done.stdout


def say(text: str) -> None:
    """Prints a line at once."""
    print(f"[wheel] {text}", flush=True)


def find_python(version: str) -> str:
    """The interpreter of this version on the PATH, or else the one that runs this."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    return sys.executable


def make_environment(minor: str) -> Path:
    """An environment with this TensorFlow; returns its interpreter."""
    folder = WORK / f"tensorflow-{minor}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.is_file():
        say(f"installing TensorFlow {minor} into {folder.relative_to(ROOT)}")
        shutil.rmtree(folder, ignore_errors=True)
        run(find_python(PYTHONS[minor]), "-m", "venv", folder)
        packages = (f"tensorflow-cpu=={minor}.*", "keras>=3.11")
        run(python, "-m", "pip", "install", "-q", "--no-compile", *packages)
        complete.touch()
    return python


def make_sdist() -> Path:
    """The source distribution, of the working tree."""
    build = (sys.executable, "-m", "build", "--no-isolation", "--sdist")
    run(*build, "--outdir", DIST, cwd=ROOT)
    return next(DIST.glob("tfdist-*.tar.gz"))


def make_wheel(sdist: Path, folder: Path, pythons: list[Path]) -> Path:
    """Builds a wheel from the source distribution alone, in a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob("tfdist-*"))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BUILD_PYTHONS": ":".join(map(str, pythons)),
        # The bytes depend neither on the folder nor on the time.
        "CXXFLAGS": f"-ffile-prefix-map={source}=. -frandom-seed=tfdist",
        "SOURCE_DATE_EPOCH": str(source_date()),
    }
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel")
    run(*build, "--outdir", folder / "built", cwd=source, env=environment)
    run(
        *(sys.executable, "-m", "auditwheel", "repair", "--strip", "--plat", PLATFORM),
        *("--exclude", "libtensorflow_framework.so.2", "--wheel-dir", folder),
        next((folder / "built").glob("*.whl")),
        env=environment,
    )
    return next(folder.glob("tfdist-*.whl"))


def source_date() -> int:
    """Time of the last commit, or of 1980, the first year of a zip file."""
    command = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 315_532_800


def without_compiler(python: Path, **more: str) -> dict[str, str]:
    """The variables of a user who has this environment and no compiler."""
    kept = re.compile("HOME|LANG|TMPDIR|PIP_.*|.*_proxy", re.IGNORECASE)
    environment = {k: v for k, v in os.environ.items() if kept.fullmatch(k)}
    quiet = {"PATH": str(python.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return environment | quiet | more


def train(python: Path, environment: dict[str, str]) -> str:
    """The example on two ranks; returns what they print."""
    program = WORK / "example.py"
    program.write_text(EXAMPLE)
    launcher = python.parent / "tfdistrun"
    output = run(*(launcher, "-np", "2", python, program), cwd=WORK, env=environment)
    hashes = re.findall(r"trained \S+ 2 (\w{64})", output)
    if len(hashes) != 2 or len(set(hashes)) != 1:
        raise WheelError(f"the ranks did not end with the same weights:\n{output}")
    return output


def try_wheel(wheel: Path, python: Path, minor: str) -> None:
    """Installs the wheel into an environment and trains with it."""
    environment = without_compiler(python)
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "uninstall", "-q", "-y", "tfdist", env=environment)
    begin = time.monotonic()
    run(*pip, "install", "-q", wheel, env=environment)
    install_s = time.monotonic() - begin
    output = train(python, environment)
    tried = re.search(r"trained (\S+)", output)[1]
    version = run(python, "--version").split()[1]
    say(f"TensorFlow {tried}, Python {version}: installed in {install_s:.1f} s")
    if not tried.startswith(minor) or "compiling" in output or install_s > INSTALL_S:
        raise WheelError(f"expected TensorFlow {minor} within {INSTALL_S} s:\n{output}")


def try_first_use(python: Path) -> None:
    """Removes the installed operations; tries to train without and with a compiler."""
    show = "import tfdist, pathlib; print(pathlib.Path(tfdist.__file__).parent)"
    # Elsewhere than in the source folder, from which Python would import tfdist.
    told = run(python, "-c", show, env=without_compiler(python), cwd=WORK)
    folder = Path(told.split()[-1])
    for library in (folder / "_native").glob("libtfdist_tf-*.so"):
        if library.stem.endswith(python.parents[1].name.partition("-")[2]):
            library.unlink()
    cache = WORK / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    environment = without_compiler(python, XDG_CACHE_HOME=str(cache))
    try:
        train(python, environment)
    except WheelError as error:
        if "no C++17 compiler was found" not in str(error):
            raise
    else:
        raise WheelError("expected an error without compiler and operations, got none")
    environment["PATH"] += f":{os.environ['PATH']}"
    begin = time.monotonic()
    output = train(python, environment)
    first_s = time.monotonic() - begin
    begin = time.monotonic()
    train(python, environment)
    compile_s = first_s - (time.monotonic() - begin)
    say(f"without its operations: compiled on first use in {compile_s:.0f} s, trained")
    if output.count("compiling tfdist's operations") != 1 or compile_s > COMPILE_S:
        raise WheelError(f"expected one compilation within {COMPILE_S} s:\n{output}")


def main() -> int:
    """Builds and tries everything; the exit code."""
    minors = sys.argv[1:] or list(PYTHONS)
    WORK.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(DIST, ignore_errors=True)
    pythons = [make_environment(minor) for minor in minors]
    say("building the source distribution, and the wheel twice")
    sdist = make_sdist()
    first = make_wheel(sdist, WORK / "first", pythons)
    second = make_wheel(sdist, WORK / "again", pythons)
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)]
    if hashes[0] != hashes[1]:
        raise WheelError(f"two builds have different bytes: {first}, {second}")
    wheel = Path(shutil.copy(first, DIST))
    size = wheel.stat().st_size
    say(f"{wheel.name}: {size:,} bytes, SHA-256 {hashes[0]}, twice the same")
    if size > MOST_BYTES:
        raise WheelError(f"the wheel has more than {MOST_BYTES:,} bytes")
    for minor, python in zip(minors, pythons, strict=True):
        try_wheel(wheel, python, minor)
    try_first_use(pythons[-1])
    say(f"everything held; {DIST.relative_to(ROOT)}/ has {wheel.name} and {sdist.name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WheelError as failure:
        sys.exit(f"make wheel: {failure}")
