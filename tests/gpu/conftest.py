"""Checks on a GPU as tests: options, processes, and the JSON file of results.

A test with the marker ``gpu`` receives a ``Check`` and runs in a process of its own, which sees the GPUs that all other
tests do not see. Checks run in the order of their parts and numbers. Arguments of the marker:

- ``number`` and ``part``.
- ``limit_s``: seconds after which the check fails; it may also use the time that earlier checks of its part have left.
  A rehearsal has the limit of a part, because its machine may be busy.
- ``functions``: expected number of functions that are compiled on a GPU if the cache is empty.
- ``work_s``: expected seconds of all further work that a rehearsal does not do: steps of large models on a GPU, their
  data and checkpoints, and contexts of CUDA.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt4d.runtime import compile_cache
from tests.gpu.check import Check
from tests.gpu.isolation import run_isolated
from tests.gpu.results import FAIL, NOT_POSSIBLE, PART_S, PASS, REPOSITORY, Results, table
from tests.gpu.test_hardware import describe
from tests.support.environment import HIDDEN

_DESCRIBE_LIMIT_S = 60.0
_COMPILE_THREADS = "4"  # each is a process, which takes memory and a CPU core
_MISSING = pytest.StashKey[str]()  # why no check can run on this machine
_RESULTS = pytest.StashKey[Results]()
_STARTS = pytest.StashKey[dict[int, float]]()  # time.monotonic of each part's first check


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "checks on a GPU (tests/gpu)")
    group.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with tiny models")
    group.addoption("--part", type=int, choices=(1, 2, 3), help="one of the three parts, of at most eight minutes each")
    group.addoption("--fresh", action="store_true", help="discard earlier results")
    group.addoption("--out", type=Path, help="JSON file of results")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[_STARTS] = {}
    part = config.getoption("--part")
    items[:] = [item for item in items if not part or _settings(item).get("part", part) == part]
    items.sort(key=lambda item: _order(item) if _settings(item) else (0, 0))


def _order(item: pytest.Item) -> tuple[int, int]:
    return _settings(item)["part"], _settings(item)["number"]


def _settings(item: pytest.Item) -> dict:
    """Return the arguments of a test's marker ``gpu``; none if the test is not a check."""
    marker = item.get_closest_marker("gpu")
    return marker.kwargs if marker else {}


def environment(device_type: str) -> dict[str, str]:
    """Return the environment of a check: as pytest was started, with the cache of training runs, or without GPUs."""
    variables = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    if device_type == "cpu":
        # Tiny models: with several threads each, ranks wait for each other's threads.
        return variables | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    variables |= {name: value for name, value in HIDDEN.items() if value is not None}
    compile_cache.set_environment(variables)
    return {"TORCHINDUCTOR_COMPILE_THREADS": _COMPILE_THREADS} | variables


@pytest.fixture(scope="session")
def device_type(request) -> str:
    return request.config.getoption("--device", default="cuda")


@pytest.fixture(scope="session")
def results(request, device_type, tmp_path_factory) -> Results:
    config, machine = request.config, Check(device_type, tmp_path_factory.mktemp("machine"))
    found = run_isolated(describe, machine, _DESCRIBE_LIMIT_S, environment(device_type))
    if found.problems:
        config.stash[_MISSING] = "; ".join(found.problems)
        pytest.skip(config.stash[_MISSING])
    default = REPOSITORY / ("benchmarks/results" if device_type == "cuda" else "runs") / "gpu_check.json"
    path = config.getoption("--out") or default
    config.stash[_RESULTS] = Results(path, device_type, found.values, config.getoption("--fresh"))
    return config.stash[_RESULTS]


@pytest.fixture
def check(request, device_type, results) -> Iterator[Check]:
    if results.passed(number := _settings(request.node)["number"]):
        pytest.skip(f"passed earlier: {results.checks[str(number)]['figure']}")
    # A directory that is removed at once: a checkpoint has 20 GB.
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as directory:
        yield Check(device_type, Path(directory), results.values())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a check in a process of its own and record its result."""
    if not (settings := _settings(pyfuncitem)):
        return None
    check, results, started = pyfuncitem.funcargs["check"], pyfuncitem.funcargs["results"], time.monotonic()
    begun = pyfuncitem.config.stash[_STARTS].setdefault(settings["part"], started)
    left_s = PART_S if check.rehearsal else _limit_s(pyfuncitem) - (started - begun)
    done = run_isolated(pyfuncitem.obj, check, left_s, environment(check.device_type))
    entry = {
        "name": pyfuncitem.name.removeprefix("test_").replace("_", " "),
        "status": NOT_POSSIBLE if done.missing else FAIL if done.problems else PASS,
        "problems": done.problems,
        "missing": done.missing,
        "figure": done.figure,
        "seconds": round(time.monotonic() - started, 2),
        "budget": {name: value for name, value in settings.items() if name != "number"},
        "rehearsal": check.rehearsal,
        "values": done.values,
    }
    results.add(settings["number"], entry)
    if done.missing:
        pytest.skip(f"{NOT_POSSIBLE}: {done.missing}")
    pyfuncitem.user_properties.append(("figure", done.figure))
    if done.problems:
        pytest.fail("\n".join(done.problems), pytrace=False)
    return True


def _limit_s(check: pytest.Item) -> float:
    """Return the seconds from the start of a part within which a check must end."""
    part, number = _order(check)
    others = (_settings(item) for item in check.session.items)
    return sum(other["limit_s"] for other in others if other and other["part"] == part and other["number"] <= number)


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Print the figures of a check after its name."""
    figure = dict(getattr(report, "user_properties", ())).get("figure")
    if figure is None or report.when != "call":
        return None
    letter, verdict = (".", PASS) if report.passed else ("F", FAIL)
    return report.outcome, letter, f"{figure}  {verdict}"


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if _MISSING in config.stash:
        terminalreporter.write_line(f"checks on a GPU were skipped: {config.stash[_MISSING]}")
    if _RESULTS not in config.stash:
        return
    results = config.stash[_RESULTS]
    for number, entry in results.checks.items():
        if entry["missing"]:
            terminalreporter.write_line(f"check {number} neither passed nor failed: {NOT_POSSIBLE}: {entry['missing']}")
    if results.device_type == "cpu":
        terminalreporter.write_line(table(results.checks))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let ``make gpu-check`` fail on a machine without a GPU."""
    if _MISSING in session.config.stash:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
