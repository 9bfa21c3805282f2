"""Runs all measurements of a benchmark on one rank; rank 0 prints and writes."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence

from tfdist.core import native, runtime, tuning
from tfdist.tools.bench import limits, picture, report, tune
from tfdist.tools.bench.calls import Agreement
from tfdist.tools.bench.measure import AUTO, Cell, Result
from tfdist.tools.bench.operations import DTYPES, OPERATIONS, Operation, Place
from tfdist.tools.bench.options import ALL

_DRIFT = 0.2  # a larger relative change of memory rates during the run gives a warning


def algorithms_of(operation: Operation, names: str) -> list[str]:
    """Returns the algorithms to measure; `names` is auto, all, or a list of names."""
    if names == ALL:
        return operation.algorithms()
    known = [AUTO, *operation.algorithms()]
    return [name for name in names.split(",") if name in known]


def unknown(operations: Sequence[str], names: str) -> str:
    """Returns an error for an unknown algorithm in the list; "" if there is none."""
    known = {AUTO, ALL}
    for name in operations:
        known.update(OPERATIONS[name].algorithms())
    for name in names.split(","):
        if name not in known:
            choices = ", ".join(sorted(known))
            return f"--algorithms: expected some of {choices}; got {name!r}"
    return ""


class Sweep:
    """One run of `tfdist bench` on one rank."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        topology = runtime.check_initialized()
        self._place = Place(topology.rank, topology.size)
        self._host_of = topology.host_of
        self._results: list[Result] = []
        # (operation, type) → size → algorithm that auto chooses
        self._auto_choices: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)

    def _say(self, *lines: str) -> None:
        if self._place.rank == 0:
            print(*lines, sep="\n", flush=True)

    def run(self) -> int:
        """Runs the measurements; returns 1 if a result is wrong or there is no result.

        Raises:
            CoreError: a rank failed.
        """
        options = self._options
        self._agreement = Agreement(self._place)
        line = options.link_rate * 1e9 / 8 if options.link_rate else None
        self._limits = limits.measure(self._place, self._host_of, self._agreement, line)
        links = {link["transport"] for link in native.counters()["links"]}
        self._say(*report.heading(self._limits, sorted(links)))
        for operation in options.operations:
            for dtype in options.dtypes:
                self._measure(OPERATIONS[operation], dtype)
        if not self._results:
            self._say(
                f"# nothing was measured or written: --algorithms "
                f"{options.algorithms} contains no algorithm for these ranks; use "
                "all, or different algorithms from docs/algorithms.md"
            )
            return 1
        self._check_drift()
        if self._place.rank == 0:
            self._conclude()
        self._agreement.meet()
        return 1 if any(result.wrong for result in self._results) else 0

    def _measure(self, operation: Operation, dtype: str) -> None:
        self._say(f"#\n# {operation.name}", report.HEADER)
        names = algorithms_of(operation, self._options.algorithms)
        for size_bytes in self._options.sizes:
            cell = Cell(operation, DTYPES[dtype], size_bytes, self._place)
            choices = self._auto_choices[operation.name, dtype]
            if cell.size_bytes in choices:
                continue  # two sizes are equal after rounding
            choices[cell.size_bytes] = cell.algorithm_of("") or ""
            for result in cell.measure(
                names, self._agreement, cap_s=self._options.cap_s
            ):
                self._results.append(result)
                self._say(report.line(result, self._limits))

    def _check_drift(self) -> None:
        add, copy = limits.memory_rates(self._agreement)
        for name, before, after in (
            ("d=a+b", self._limits.add, add),
            ("copy", self._limits.copy, copy),
        ):
            if abs(after / before - 1.0) > _DRIFT:
                self._say(
                    f"# warning: the memory rate of {name} was {before / 1e9:.2f} GB/s "
                    f"before and {after / 1e9:.2f} GB/s after the measurement; other "
                    "programs use this machine"
                )

    # ---- on rank 0 ----

    def _times(self) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
        """Returns (operation, type) → algorithm → bytes → seconds."""
        found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
        for result in self._results:
            series = found.setdefault((result.operation, result.dtype), {})
            measured = series.setdefault(result.algorithm, {})
            measured[result.size_bytes] = result.seconds
        return found

    def _conclude(self) -> None:
        options = self._options
        series = self._times()
        choices = {}
        if options.algorithms != AUTO:
            for key, times in series.items():
                choices[key] = tune.choose(times)
                self._say("#", *tune.explain(*key, choices[key]))
                self._say(self._about_auto(key, times))
        wrong = sum(result.wrong for result in self._results)
        self._say(f"#\n# wrong elements: {wrong}")
        if options.json:
            report.write(options.json, report.as_json(self._results, self._limits))
        if options.picture:
            title = f"{self._place.size} ranks, on each host: "
            title += ", ".join(map(str, self._limits.hosts))
            picture.draw(options.picture, title, series, choices)
        if options.tune and not wrong:
            self._write_tuning(choices)

    def _about_auto(
        self, key: tuple[str, str], times: dict[str, dict[int, float]]
    ) -> str:
        ratios = [
            (times[name][size] / min(found[size] for found in times.values()), size)
            for size, name in self._auto_choices[key].items()
            if name in times
        ]
        if not ratios:
            return "#   auto now: uses algorithms that were not measured"
        ratio, size = max(ratios)
        return (
            f"#   auto now: worst {ratio:.2f} of the best, at {size} B, where it uses "
            f"{self._auto_choices[key][size]}"
        )

    def _write_tuning(self, choices: dict[tuple[str, str], tune.Choice]) -> None:
        path = self._options.tune
        hosts = self._limits.hosts
        rows = [
            tune.row(operation, hosts, DTYPES[dtype].half, choice)
            for (operation, dtype), choice in choices.items()
        ]
        fits = {
            " ".join(key): {
                name: {"alpha_s": line.alpha, "beta_s_per_byte": line.beta}
                for name, line in choice.lines.items()
            }
            for key, choice in choices.items()
        }
        measured = {**report.machine(), "fits": fits}
        report.write(path, tune.document(rows, measured))
        tuning_file = tuning.read(str(path))
        self._say(
            f"# wrote {path} ({tuning_file.hash}); use it with {tuning.VARIABLE}={path}"
        )
