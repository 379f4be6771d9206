"""The definitions of Docker and Apptainer describe one image. Its steps run with stand-ins for apt-get and pip."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support.environment import REPOSITORY
from tests.support.pages import pinned_versions

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
INDEX = "https://index.example.org/whl"

# Each program that changes a system records its arguments, and pip also the requirements that it reads.
_STAND_IN = """#!/bin/bash
{ echo "$(basename "$0") $*"; [ "${*: -1}" != /dev/stdin ] || sed 's/^/< /'; } >> "$LOG"
"""
_PROGRAMS = "apt-get", "pip", "rm", "useradd"


class Image(NamedTuple):
    """The parts of a definition that both formats have."""

    base: str
    copied: dict[str, str]  # paths in the image by paths in the repository
    steps: list[str]  # shell scripts, each of which starts in /opt/gpt4d
    entry: list[str]


def read_dockerfile() -> tuple[Image, list[list[str]]]:
    """Return the image of the Dockerfile, and all its instructions."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "containers/Dockerfile").read_text(), flags=re.MULTILINE)
    instructions = [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    base, copied, steps, entry, directory = "", {}, [], [], ""
    for name, value in instructions:
        if name == "FROM":
            base = value
        elif name == "WORKDIR":
            directory = value
        elif name == "COPY":
            *sources, target = value.split()
            for source in sources:
                path = Path(directory, target, Path(source).name if target.endswith("/") else "")
                copied[source] = os.path.normpath(path)
        elif name == "RUN":
            steps.append(value)
        elif name == "ENTRYPOINT":
            entry = json.loads(value)
        else:
            assert name in ("ARG", "USER"), name
    return Image(base, copied, steps, entry), instructions


def read_apptainer() -> Image:
    """Return the image of the Apptainer definition."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "containers/gpt4d.def").read_text(), flags=re.MULTILINE)
    header, *sections = re.split(r"^%", text, flags=re.MULTILINE)
    fields = dict(line.split(": ") for line in header.splitlines() if line)
    bodies = {name: body for name, _, body in (section.partition("\n") for section in sections)}
    assert fields["Bootstrap"] == "docker" and bodies.keys() == {"arguments", "files", "post", "runscript"}
    copied = dict(line.split() for line in bodies["files"].splitlines() if line.strip())
    program, *arguments, rest = shlex.split(bodies["runscript"])
    assert (program, rest) == ("exec", "$@")
    return Image(fields["From"], copied, [bodies["post"]], arguments)


def build(image: Image, root: Path) -> list[str]:
    """Copy the files of an image below ``root`` and run its steps. Return the calls of the programs in _PROGRAMS."""
    for source, target in image.copied.items():
        path = root / target.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / source).is_dir():
            shutil.copytree(REPOSITORY / source, path, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / source, path)
    programs, log = root / "programs", root / "log"
    programs.mkdir()
    for name in _PROGRAMS:
        (programs / name).write_text(_STAND_IN)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(log), "TORCH_INDEX": INDEX}
    for step in image.steps:
        script = step.replace("{{ TORCH_INDEX }}", INDEX).replace("/opt/gpt4d", str(root / "opt/gpt4d"))
        subprocess.run(["bash", "-euc", script], cwd=root / "opt/gpt4d", env=environment, check=True, timeout=60)
    return log.read_text().splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Image, Path, list[str]]:
    """Return the Dockerfile's image, the directory of its files and the calls of its steps.

    The image of the Apptainer definition is equal.
    """
    (docker, _), apptainer = read_dockerfile(), read_apptainer()
    assert docker._replace(steps=[]) == apptainer._replace(steps=[])
    root = tmp_path_factory.mktemp("docker")
    calls = build(docker, root)
    assert calls == [*build(apptainer, tmp_path_factory.mktemp("apptainer")), "useradd --create-home --uid 1000 gpt4d"]
    return docker, root, calls


def test_both_definitions_describe_one_image_with_the_python_that_the_project_is_tested_on(built):
    name, version = re.fullmatch(r"(\w+):(\d+\.\d+\.\d+)-slim-\w+", built[0].base).groups()
    assert name == "python" and version in SpecifierSet(PROJECT["project"]["requires-python"])
    assert version.rpartition(".")[0] == PROJECT["tool"]["mypy"]["python_version"]


def test_pip_installs_torch_from_its_index_and_then_every_other_pin_but_triton(built):
    torch, packages, *read, project = [call for call in built[2] if call.startswith(("pip ", "< "))]
    pins = pinned_versions()
    assert torch == f"pip install --no-cache-dir --index-url {INDEX} torch=={pins.pop('torch')}"
    assert packages == "pip install --no-cache-dir -r /dev/stdin"
    found = [Requirement(line.partition("#")[0]) for line in (line[2:] for line in read) if line[:1] not in ("", "#")]
    assert {each.name for each in found} == {"torch", *pins} - {"triton"}
    assert project == "pip install --no-cache-dir --no-deps ."


def test_the_entry_point_of_an_image_runs_with_the_files_that_are_copied(built):
    image, root, _ = built
    program, *arguments = image.entry
    assert program == "python3"
    command = [sys.executable, *arguments, "train", "--help"]
    done = subprocess.run(command, cwd=root / "opt/gpt4d", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model=" in done.stdout


def test_the_docker_image_does_not_run_as_root():
    _, instructions = read_dockerfile()
    names = [name for name, _ in instructions]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")
    assert dict(instructions)["USER"] == "1000"
