"""Launchers: the variables by which torchrun, jsrun, mpirun, Flux, Slurm and PALS tell a process its rank in a job."""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpt4d.runtime.errors import ConfigError
from gpt4d.runtime.files import read_regular

LARGEST_DEVICES = 1_000_000  # limit of devices to plan for
Environment = Mapping[str, str]

_TORCH_PORT = 29500  # the default of torchrun
LARGEST_PORT = 65535
_LARGEST_ID = 10**12  # largest id of a job or of a step
_FIRST_PORT, _PORTS = 20000, 12000  # below the kernel's ephemeral ports
_RESTART_PORTS = 4999  # distance between the ports of a Slurm job's starts; not a multiple of the jobs' distance, 64


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. The functions take the environment of a process that it has started."""

    program: str  # the command that starts the processes
    markers: tuple[str, ...]  # variables that are set together only in these processes
    rank: str  # the variable with the rank in the job
    local_rank: str  # the variable with the rank among the processes of the node
    world_size: Callable[[Environment], int]  # returns the number of ranks of the job
    local_world_size: Callable[[Environment], int]  # returns the number of ranks on the node
    host: Callable[[Environment], str]  # returns the host of rank 0; "" if no variable contains the host
    start: Callable[[Environment], str]  # returns a name of this start, equal on all ranks; "" without a name
    port: Callable[[Environment], int]  # returns the port of rank 0, which differs between jobs that may share a node
    find_host: str = "hostname, on the node of rank 0"  # a shell command that prints that host, for messages

    def started(self, environment: Environment) -> bool:
        return all(name in environment for name in self.markers)

    def address(self, environment: Environment) -> str:
        """Return host and port of rank 0. ``MASTER_ADDR`` and ``MASTER_PORT`` replace the launcher's.

        Raises ConfigError if no variable contains the host and there are several nodes.
        """
        host = environment.get("MASTER_ADDR") or self.host(environment)
        if not host and self.world_size(environment) == self.local_world_size(environment):
            host = "localhost"
        if not host:
            raise ConfigError(
                f"MASTER_ADDR: not set, and {self.program} does not name the host of rank 0; set it to the output of "
                f"`{self.find_host}`"
            )
        if not _is_host(host):
            raise ConfigError(f"MASTER_ADDR={_shown(host)}: not the name of a host; set it to the host of rank 0")
        return f"{host}:{number(environment, 'MASTER_PORT', 0, 1, LARGEST_PORT) or self.port(environment)}"


def innermost(environment: Environment) -> Launcher | None:
    """Return the launcher that has started this process itself; None without a launcher.

    The processes of a launcher inherit the variables of all launchers around it.
    """
    return next((launcher for launcher in LAUNCHERS if launcher.started(environment)), None)


def number(
    environment: Environment,
    name: str,
    default: int | None = None,
    at_least: int = 0,
    at_most: int = LARGEST_DEVICES,
) -> int:
    """Return the number in a variable of a launcher; ``default`` if the variable is empty or not set.

    Raises ConfigError, which names variable, value and launcher, if it is no number within the limits. ``default``:
    None for a variable that must be set.
    """
    text = environment.get(name, "").strip()
    if not text and default is not None:
        return default
    if name not in environment:
        raise _wrong(name, None, "not set")
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise _wrong(name, text, "not a number")
    if not at_least <= int(text) <= at_most:
        raise _wrong(name, text, f"not a number from {at_least} to {at_most}")
    return int(text)


def first_host(nodes: str, name: str = "SLURM_STEP_NODELIST") -> str:
    """Return the first host of Slurm's compressed list: ``nid[001-004,7],login1`` → ``nid001``.

    Raises ConfigError, which names the variable ``name``, if it is no such list.
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    host = match[1] + (match[2] or "") + match[3] if match else ""
    if not _is_host(host):
        raise _wrong(name, nodes, "not a list of nodes")
    return host


def tasks_on_node(tasks_per_node: str, node: int, name: str = "SLURM_STEP_TASKS_PER_NODE") -> int:
    """Return the number of tasks on node ``node`` (from 0) of Slurm's compressed list: ``4(x2),3`` means 4, 4, 3.

    Raises ConfigError, which names the variable ``name``, if it is no such list or has no such node.
    """
    nodes = 0
    for entry in tasks_per_node.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,8})\))?", entry)
        if not match:
            raise _wrong(name, tasks_per_node, "not a list of tasks per node")
        nodes += int(match[2] or 1)
        if node < nodes:
            return int(match[1])
    raise _wrong(name, tasks_per_node, f"it has no node {node}")


# By the beginning of a variable's name: the program that sets it.
_PROGRAMS = {
    "FLUX_": "flux run", "JSM_": "jsrun", "LSB_": "LSF", "OMPI_": "mpirun", "SLURM_ARRAY_": "sbatch --array",
    "SLURM_": "Slurm", "PALS_": "mpiexec", "PMI_": "mpiexec", "GPT4D_": "the sweep",
}  # fmt: skip


def _wrong(name: str, value: str | None, problem: str) -> ConfigError:
    program = next((program for prefix, program in _PROGRAMS.items() if name.startswith(prefix)), "torchrun")
    given = "" if value is None else f"={_shown(value)}"
    return ConfigError(f"{name}{given}: {problem}; {program} sets it")


def _is_host(text: str) -> bool:
    """Return whether a text can be the name or address of a host, which torch's store encodes as labels of a domain."""
    labels = text.removesuffix(".").split(".")
    return text.isascii() and text.isprintable() and " " not in text and all(0 < len(label) < 64 for label in labels)


def _shown(value: str) -> str:
    """Return a value of limited length for a message."""
    return value if len(value) <= 80 else f"{value[:80]}…"


def _number(*names: str, default: int = 1) -> Callable[[Environment], int]:
    """Return a function that reads the first variable that is set, a number of ranks."""

    def read(environment: Environment) -> int:
        name = next((name for name in names if environment.get(name)), names[-1])
        return number(environment, name, default, at_least=1)

    return read


def _text(*names: str) -> Callable[[Environment], str]:
    """Return a function that joins the variables that are set, as ASCII."""
    return lambda environment: ascii(".".join(environment[name] for name in names if environment.get(name)))[1:-1]


def _port_of(start: Callable[[Environment], str]) -> Callable[[Environment], int]:
    """Return a function that derives the port from the name of the start; a start without a name has torch's port."""

    def port(environment: Environment) -> int:
        name = start(environment)
        return _FIRST_PORT + zlib.crc32(name.encode()) % _PORTS if name else _TORCH_PORT

    return port


def _torchrun_start(environment: Environment) -> str:
    run = _text("TORCHELASTIC_RUN_ID")(environment)
    return f"{run}.{number(environment, 'TORCHELASTIC_RESTART_COUNT', 0)}" if run else ""


def _slurm_numbers(environment: Environment) -> tuple[int, int, int]:
    """Return the numbers of the job, of its step and of its restart."""
    names = ("JOB_ID", "STEP_ID", "RESTART_COUNT")
    job, step, restart = (number(environment, f"SLURM_{name}", 0, at_most=_LARGEST_ID) for name in names)
    return job, step, restart


def _slurm_port(environment: Environment) -> int:
    """Return a port that neighboring jobs do not have. A restart has another port, in case the first one was taken."""
    job, step, restart = _slurm_numbers(environment)
    return _FIRST_PORT + (job * 64 + step + _RESTART_PORTS * restart) % _PORTS


def _lines(environment: Environment, name: str) -> list[str]:
    """Return the lines of the file that a variable names; none if this node has no such regular file."""
    with suppress(OSError):
        if environment.get(name):
            return read_regular(Path(environment[name])).decode(errors="replace").split()
    return []


def _lsf_hosts(environment: Environment) -> dict[str, int]:
    """Return the slots of each host of an LSF job, in order."""
    if words := environment.get("LSB_MCPU_HOSTS", "").split():
        slots_known = all(re.fullmatch("[0-9]{1,9}", word) for word in words[1::2])
        if len(words) % 2 or not slots_known or not all(map(_is_host, words[::2])):
            raise _wrong("LSB_MCPU_HOSTS", environment["LSB_MCPU_HOSTS"], "not a list of hosts and slots")
        return dict(zip(words[::2], map(int, words[1::2]), strict=True))
    return Counter(_lines(environment, "LSB_DJOB_HOSTFILE"))


def _jsrun_host(environment: Environment) -> str:
    """Return the first host after the launch node, which has one slot and runs only the batch script."""
    hosts = _lsf_hosts(environment)
    names = list(hosts)
    has_launch_node = len(names) > 1 and hosts[names[0]] == 1 < hosts[names[1]]
    return (names[1:] if has_launch_node else [*names, ""])[0]


def _allocation_host(environment: Environment) -> str:
    """Return the first host of the job in which mpirun was called: mpirun starts rank 0 there."""
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        return first_host(nodes, "SLURM_JOB_NODELIST")
    return [*_lines(environment, "PBS_NODEFILE"), *_lsf_hosts(environment), ""][0]


def _pals_size(environment: Environment) -> int:
    """Return the number of ranks. With PMIx, as on Aurora, PALS sets only the number of ranks on the node."""
    hosts = len({*_lines(environment, "PBS_NODEFILE")})
    size = _number("PMI_SIZE", "WORLD_SIZE", default=hosts * _PALS_LOCAL(environment))(environment)
    if not size:
        raise ConfigError(
            "WORLD_SIZE: not set, and neither mpiexec nor PBS_NODEFILE contains the number of ranks; set it to the "
            "number after mpiexec -n"
        )
    return size


_FLUX_SIZE = _number("FLUX_JOB_SIZE")
_PALS_LOCAL = _number("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")

# A launcher comes before the launchers in whose jobs it runs. Some set variables of another one too, with equal values:
# jsrun sets Open MPI's, and the plugins of Slurm and Flux for Cray MPICH set some of PALS's.
LAUNCHERS = (
    Launcher(
        program="torchrun",
        markers=("RANK", "WORLD_SIZE"),
        rank="RANK",
        local_rank="LOCAL_RANK",
        world_size=_number("WORLD_SIZE"),
        local_world_size=_number("LOCAL_WORLD_SIZE"),
        host=lambda environment: "localhost",
        start=_torchrun_start,
        port=lambda environment: _TORCH_PORT,
    ),
    Launcher(
        program="flux run",
        markers=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        rank="FLUX_TASK_RANK",
        local_rank="FLUX_TASK_LOCAL_ID",
        world_size=_FLUX_SIZE,
        # Flux distributes tasks evenly; the first nodes have the remainder.
        local_world_size=lambda env: -(-_FLUX_SIZE(env) // number(env, "FLUX_JOB_NNODES", at_least=1)),
        host=lambda environment: "",
        start=_text("FLUX_JOB_ID"),
        port=_port_of(_text("FLUX_JOB_ID")),
        find_host="flux hostlist --expand --nth=0 local",
    ),
    Launcher(
        program="jsrun",
        markers=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        rank="JSM_NAMESPACE_RANK",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        world_size=_number("JSM_NAMESPACE_SIZE"),
        local_world_size=_number("JSM_NAMESPACE_LOCAL_SIZE"),
        host=_jsrun_host,
        start=_text("LSB_JOBID", "PMIX_NAMESPACE"),
        port=_port_of(_text("LSB_JOBID", "PMIX_NAMESPACE")),
        find_host="jsrun -n 1 hostname",
    ),
    Launcher(
        program="mpirun",
        markers=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        world_size=_number("OMPI_COMM_WORLD_SIZE"),
        local_world_size=_number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        host=_allocation_host,
        start=_text("PMIX_NAMESPACE"),
        port=_port_of(_text("PMIX_NAMESPACE")),
        find_host="mpirun -n 1 hostname",
    ),
    Launcher(
        program="srun",
        # Not SLURM_NTASKS: it is also set in the batch script itself, where srun has not started any tasks.
        markers=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        rank="SLURM_PROCID",
        local_rank="SLURM_LOCALID",
        world_size=_number("SLURM_STEP_NUM_TASKS"),
        local_world_size=lambda env: tasks_on_node(
            env.get("SLURM_STEP_TASKS_PER_NODE", ""), number(env, "SLURM_NODEID")
        ),
        host=lambda environment: first_host(environment.get("SLURM_STEP_NODELIST", "")),
        start=lambda environment: ".".join(map(str, _slurm_numbers(environment))),
        port=_slurm_port,
    ),
    Launcher(
        program="mpiexec",
        markers=("PALS_RANKID", "PALS_LOCAL_RANKID"),
        rank="PALS_RANKID",
        local_rank="PALS_LOCAL_RANKID",
        world_size=_pals_size,
        local_world_size=_PALS_LOCAL,
        host=lambda environment: [*_lines(environment, "PBS_NODEFILE"), ""][0],
        start=_text("PALS_APID"),
        port=_port_of(_text("PALS_APID")),
        find_host="head -n 1 $PBS_NODEFILE",
    ),
)
