"""Checks on a GPU as tests: options, processes, and the JSON file of results.

A test with ``@pytest.mark.gpu(number=…, part=…, limit_s=…)`` receives a ``Check`` and runs in a process of its own,
which sees the GPUs that all other tests do not see. Checks run in the order of their numbers.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.environment import HIDDEN
from tests.gpu.check import Check
from tests.gpu.isolation import run_isolated
from tests.gpu.results import FAIL, PASS, REPOSITORY, Results
from tests.gpu.test_hardware import describe

_DESCRIBE_LIMIT_S = 60.0
_MISSING = pytest.StashKey[str]()  # why no check can run on this machine


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "checks on a GPU (tests/gpu)")
    group.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with tiny models")
    group.addoption("--part", type=int, choices=(1, 2, 3), help="one of the three parts, of at most eight minutes each")
    group.addoption("--fresh", action="store_true", help="discard earlier results")
    group.addoption("--out", type=Path, help="JSON file of results")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    for item in [item for item in items if part and _settings(item).get("part", part) != part]:
        items.remove(item)
    places = [place for place, item in enumerate(items) if _settings(item)]
    checks = sorted((items[place] for place in places), key=lambda item: _settings(item)["number"])
    for place, item in zip(places, checks, strict=True):
        items[place] = item


def _settings(item: pytest.Item) -> dict:
    """Return the arguments of a test's marker ``gpu``; none if the test is not a check."""
    marker = item.get_closest_marker("gpu")
    return marker.kwargs if marker else {}


def environment(device_type: str) -> dict[str, str]:
    """Return the environment of a check: as pytest was started, or without GPUs."""
    variables = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    if device_type == "cpu":
        # Tiny models: with several threads each, ranks wait for each other's threads.
        return variables | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return variables | {name: value for name, value in HIDDEN.items() if value is not None}


@pytest.fixture(scope="session")
def device_type(request) -> str:
    return request.config.getoption("--device", default="cuda")


@pytest.fixture(scope="session")
def results(request, device_type, tmp_path_factory) -> Results:
    config = request.config
    found = run_isolated(
        describe, Check(device_type, tmp_path_factory.mktemp("machine")), _DESCRIBE_LIMIT_S, environment(device_type)
    )
    if found.problems:
        config.stash[_MISSING] = "; ".join(found.problems)
        pytest.skip(config.stash[_MISSING])
    default = tmp_path_factory.mktemp("results") / "gpu_check.json"  # of `make test-full`
    if _checks_were_asked_for(config):
        default = REPOSITORY / ("benchmarks/results" if device_type == "cuda" else "runs") / "gpu_check.json"
    path = config.getoption("--out") or default
    return Results(path, device_type, found.values, config.getoption("--fresh"))


def _checks_were_asked_for(config: pytest.Config) -> bool:
    """Return whether the command names tests/gpu, as ``make gpu-check`` does."""
    return all("tests/gpu" in argument for argument in config.args)


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
    done = run_isolated(pyfuncitem.obj, check, settings["limit_s"], environment(check.device_type))
    entry = {
        "name": pyfuncitem.name.removeprefix("test_").replace("_", " "),
        "status": FAIL if done.problems else PASS,
        "problems": done.problems,
        "figure": done.figure,
        "seconds": round(time.monotonic() - started, 2),
        "rehearsal": check.rehearsal,
        "values": done.values,
    }
    results.add(settings["number"], entry)
    pyfuncitem.user_properties.append(("figure", done.figure))
    if done.problems:
        pytest.fail("\n".join(done.problems), pytrace=False)
    return True


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Print the figures of a check after its name."""
    figure = dict(getattr(report, "user_properties", ())).get("figure")
    if figure is None or report.when != "call":
        return None
    verdict = PASS if report.passed else FAIL
    return report.outcome, "." if report.passed else "F", f"{figure}  {verdict}"


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if _MISSING in config.stash:
        terminalreporter.write_line(f"checks on a GPU were skipped: {config.stash[_MISSING]}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let ``make gpu-check`` fail on a machine without a GPU."""
    with suppress(KeyError):
        if session.config.stash[_MISSING] and _checks_were_asked_for(session.config):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
