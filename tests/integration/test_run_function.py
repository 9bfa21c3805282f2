"""tfdist.run: a function on several ranks, from a program, a prompt and a notebook."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.launcher import clean_environment
from helpers.pages import blocks_of

import tfdist

ROOT = Path(__file__).resolve().parents[2]


def run_python(text, *, how="program", folder, timeout_s=120):
    """Runs lines of Python as a program, or types them at a prompt."""
    environ = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    if how == "program":
        file = folder / "program.py"
        file.write_text(text)
        command, typed = [sys.executable, str(file)], None
    else:
        command, typed = [sys.executable, "-i", "-q"], text
    return subprocess.run(
        command,
        input=typed,
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture
def alone(monkeypatch):
    """No launcher's variables."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    "how", ["prompt", pytest.param("program", marks=pytest.mark.slow)]
)
def test_results_are_in_rank_order_and_output_is_printed(how, tmp_path):
    done = run_python(
        "import tfdist\n"
        "\n"
        "def total(start, step=1):\n"
        "    from tfdist.core import runtime, world\n"
        "    world.start()\n"
        "    print('rank', runtime.rank(), 'of', runtime.size())\n"
        "    return start + step * runtime.rank(), total.__module__\n"
        "\n"
        "if True:\n"
        "    print(tfdist.run(total, 3, args=(5,), kwargs={'step': 10}))\n"
        "\n",
        how=how,
        folder=tmp_path,
    )
    assert "[(5, '__main__'), (15, '__main__'), (25, '__main__')]" in done.stdout, done
    assert "[rank 2] rank 2 of 3" in done.stdout


@pytest.mark.slow
def test_a_function_trains_and_returns_weights(alone, tmp_path):
    (tmp_path / "trains.py").write_text(
        "def train(epochs):\n"
        "    import keras, numpy as np, tfdist\n"
        "    tfdist.init()\n"
        "    keras.utils.set_random_seed(tfdist.rank())\n"
        "    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "    sgd = tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1))\n"
        "    model.compile(sgd, 'mse')\n"
        "    x = np.random.rand(8, 3)\n"
        "    model.fit(x, x.sum(axis=1), epochs=epochs, verbose=0,\n"
        "              callbacks=[tfdist.callbacks.BroadcastInitialState()])\n"
        "    return model.get_weights()\n"
    )
    alone.syspath_prepend(str(tmp_path))
    import trains

    first, second = tfdist.run(trains.train, np=2, args=(2,))
    assert first[0].shape == (3, 1)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_the_program_of_the_page_trains_on_two_ranks(tmp_path):
    [program] = blocks_of("notebooks.md")
    done = run_python(f"{program}    print(len(losses))\n", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "3"


def fails_on(rank):
    if int(os.environ["TFDIST_RANK"]) == rank:
        raise ValueError(f"no data on {rank}")
    return rank


def ends(rank):
    if int(os.environ["TFDIST_RANK"]) == rank:
        os.kill(os.getpid(), 9)


def test_an_exception_has_the_traceback_of_its_rank(alone, capsys):
    with pytest.raises(RuntimeError, match="failed on rank 1") as caught:
        tfdist.run(fails_on, 2, args=(1,))
    assert 'raise ValueError(f"no data on {rank}")' in str(caught.value)
    assert str(caught.value).endswith("ValueError: no data on 1\n")
    assert "function_files" not in str(caught.value)
    assert "no data on 1" in capsys.readouterr().out  # tfdistrun's report


def test_a_killed_rank_is_an_error_with_the_exit_code(alone, capsys):
    with pytest.raises(
        RuntimeError, match="exit code 137, and the function has raised"
    ):
        tfdist.run(ends, 2, args=(0,))


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank(alone, capsys):
    with pytest.raises(RuntimeError, match="can be pickled"):
        tfdist.run(threading.Lock, 1)


@pytest.mark.parametrize("np", [0, -1, True, 1.5, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(np):
    with pytest.raises(ValueError, match="to be an integer of at least 1"):
        tfdist.run(max, np)


def test_a_rank_cannot_start_ranks(alone):
    alone.setenv("TFDIST_RANK", "0")
    with pytest.raises(RuntimeError, match="was called on a rank of a job"):
        tfdist.run(max, 2)


def test_a_notebook_runs_ranks_twice_with_an_error_between(alone, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [
        "import tfdist\n"
        "def square(x):\n"
        "    import os\n"
        "    rank = int(os.environ['TFDIST_RANK'])\n"
        "    print('squares on', rank)\n"
        "    return rank, x / (x - rank) ** 0",
        "tfdist.run(square, 2, args=(3,))",
        "def broken():\n    return 1 / 0\ntfdist.run(broken, 2)",
        "tfdist.run(square, 2, args=(4,))",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text) for text in cells]
    )
    alone.setenv("PYTHONPATH", str(ROOT))
    alone.setenv("IPYTHONDIR", str(tmp_path))
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True
    )
    client.execute(cwd=str(tmp_path))
    _, first, error, second = notebook.cells
    texts = [out["text"] for out in first.outputs if out.output_type == "stream"]
    assert "[rank 1] squares on 1" in "".join(texts)
    [result] = [out for out in first.outputs if out.output_type == "execute_result"]
    assert result["data"]["text/plain"] == "[(0, 3.0), (1, 3.0)]"
    [raised] = [out for out in error.outputs if out.output_type == "error"]
    assert raised["ename"] == "RuntimeError"
    assert "ZeroDivisionError: division by zero" in raised["evalue"]
    [result] = [out for out in second.outputs if out.output_type == "execute_result"]
    assert result["data"]["text/plain"] == "[(0, 4.0), (1, 4.0)]"
