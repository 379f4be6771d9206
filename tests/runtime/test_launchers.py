"""Rank, world size and address from the variables of each launcher, and of launchers inside jobs of other launchers."""

import os
import random
import re

import pytest

from gpt4d.config import ConfigError
from gpt4d.runtime.launch import ArrayTask, Launch
from gpt4d.runtime.launchers import first_host, innermost, tasks_on_node
from gpt4d.runtime.machine import ranks_and_nodes
from gpt4d.training.sweep import job_environment
from tests.support.commands import wrong_messages
from tests.support.jobs import SLURM_STEP

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "nid001",
    "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
# Recorded from mpirun of Open MPI 5.0.11, with the numbers of a job on two nodes.
MPIRUN = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_UNIVERSE_SIZE": "8",
    "PMIX_NAMESPACE": "prterun-vm-22724@1", "PMIX_RANK": "5",
}  # fmt: skip
# Recorded on the second of two nodes in Slurm 22.05: a process of mpirun inherits the variables of its daemon, which
# srun has started, and which has another rank.
MPIRUN_IN_SLURM = MPIRUN | {
    "SLURM_JOB_ID": "166", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
# Documented by Flux (job-environment-variables.rst); on an HPE system the plugin cray-pals adds variables of PALS.
FLUX = {
    "FLUX_JOB_ID": "f2fXJSYU4Y", "FLUX_JOB_NNODES": "2", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_TMPDIR": "/var/tmp/user/flux-Tg0bRw/jobtmp-0-f2fXJSYU4Y", "FLUX_TASK_RANK": "5",
    "FLUX_URI": "local:///var/tmp/user/flux-Tg0bRw/local-0", "PALS_APID": "4127195136", "PALS_NODEID": "1",
    "PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8",
}  # fmt: skip
# An LSF job of two nodes with six GPUs each, and of a launch node. jsrun also sets Open MPI's variables.
JSRUN = {
    "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "6", "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12", "LSB_JOBID": "2920901", "LSB_MCPU_HOSTS": "batch5 1 h35n12 42 h36n01 42",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "6", "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "12", "PMIX_NAMESPACE": "1", "PMIX_RANK": "7",
}  # fmt: skip
# The variables of a PBS job with mpiexec of PALS 1.8 and PMIx (Aurora): there is no number of all ranks.
PALS = {
    "PALS_APID": "5f0c9f31-5d0f-4c5c-a64a-9f1b1c1d5e6f", "PALS_DEPTH": "1", "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "1", "PALS_PMI": "pmix", "PALS_RANKID": "5", "PALS_TRANSFER": "0",
    "PBS_JOBID": "8824786.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov", "PMIX_RANK": "5",
    "PBS_NODEFILE": "/var/spool/pbs/aux/8824786.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
}  # fmt: skip
PBS_NODES = ["x4102c5s2b0n0.hsn.cm.aurora.alcf.anl.gov", "x4102c5s3b0n0.hsn.cm.aurora.alcf.anl.gov"]
# Recorded in Slurm 22.05: task 3 of `sbatch --array=2-4`, whose tasks have job numbers 80, 81 and 79.
ARRAY_TASK = {
    "SLURM_ARRAY_JOB_ID": "79", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "4",
    "SLURM_ARRAY_TASK_MIN": "2", "SLURM_ARRAY_TASK_STEP": "1", "SLURM_JOB_ID": "81",
}  # fmt: skip


@pytest.fixture
def pbs_job(tmp_path):
    """Return the variables of a PBS job on two nodes."""
    (tmp_path / "nodes").write_text("".join(f"{node}\n" for node in PBS_NODES))
    return {"PBS_NODEFILE": str(tmp_path / "nodes")}


def place_of(launch):
    return launch.rank, launch.world_size, launch.local_rank, launch.local_world_size


def port_of(launch):
    return int(launch.master.rpartition(":")[2])


@pytest.mark.parametrize(
    ("environment", "place", "start", "host"),
    [
        (TORCHRUN, (5, 8, 1, 4), "a.1", "nid001"),
        (SLURM_STEP, (9, 12, 1, 4), "71.0.0", "nid001003"),
        (JSRUN, (7, 12, 1, 6), "2920901.1", "h35n12"),
        (FLUX | {"MASTER_ADDR": "tuolumne1001"}, (5, 8, 1, 4), "f2fXJSYU4Y", "tuolumne1001"),
        (MPIRUN | {"MASTER_ADDR": "a1"}, (5, 8, 1, 4), "prterun-vm-22724@1", "a1"),
        (MPIRUN_IN_SLURM, (5, 8, 1, 4), "prterun-vm-22724@1", "node1"),
        (MPIRUN | {"LSB_MCPU_HOSTS": "a1 1 a2 4"}, (5, 8, 1, 4), "prterun-vm-22724@1", "a1"),
    ],
    ids=["torchrun", "srun", "jsrun", "flux", "mpirun", "mpirun in Slurm", "mpirun in LSF"],
)
def test_each_launcher_tells_place_and_host(environment, place, start, host):
    launch = Launch.from_environment(environment)
    assert place_of(launch) == place and launch.start == start
    assert launch.master.rpartition(":")[0] == host
    assert environment is TORCHRUN or 20000 <= port_of(launch) < 32000
    errors = Launch.for_errors(environment)
    assert (errors.rank, errors.local_rank) == (launch.rank, launch.local_rank)


def test_the_port_of_the_environment_counts():
    assert Launch.from_environment(TORCHRUN) == Launch(5, 8, 1, 4, "nid001:29400", start="a.1")
    assert Launch.from_environment(FLUX | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}).master == "a:7"


def test_pals_and_mpirun_read_the_nodes_of_a_pbs_job(pbs_job):
    for environment in (PALS, MPIRUN):
        launch = Launch.from_environment(environment | pbs_job)
        assert place_of(launch) == (5, 8, 1, 4)
        assert launch.master.rpartition(":")[0] == PBS_NODES[0]
        assert ranks_and_nodes(environment | pbs_job) == (4, 2)


def test_the_number_of_ranks_that_pmi_or_the_batch_script_tells_counts(pbs_job):
    assert Launch.from_environment(PALS | pbs_job | {"PMI_SIZE": "6"}).world_size == 6
    assert Launch.from_environment(PALS | pbs_job | {"WORLD_SIZE": "7"}).world_size == 7


def test_the_hosts_of_an_lsf_job_are_also_in_a_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("batch5\n" + "h35n12\n" * 42 + "h36n01\n" * 42)
    environment = JSRUN | {"LSB_MCPU_HOSTS": "", "LSB_DJOB_HOSTFILE": str(file)}
    assert Launch.from_environment(environment).master.startswith("h35n12:")


@pytest.mark.parametrize(
    ("inner", "outer", "program"),
    [
        *((TORCHRUN, outer, "torchrun") for outer in (SLURM_STEP, PALS, FLUX)),
        (MPIRUN_IN_SLURM, {}, "mpirun"),
        *((FLUX, outer, "flux run") for outer in (SLURM_STEP, JSRUN)),
        ({}, JSRUN, "jsrun"),
        (SLURM_STEP, {"PALS_RANKID": "9", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "12"}, "srun"),
    ],
)
def test_the_innermost_launcher_counts(inner, outer, program):
    assert innermost(outer | inner).program == program


def test_without_a_launcher_and_in_a_batch_script_there_is_one_rank():
    for environment in ({}, {"PBS_NODEFILE": "/nodes"}, {"FLUX_URI": "local://x"}, {"LSB_JOBID": "1"}):
        assert Launch.from_environment(environment) == Launch() and ranks_and_nodes(environment) == (None, 1)
    # There SLURM_NTASKS is set although srun has not started any tasks.
    assert Launch.from_environment({"SLURM_JOB_ID": "71", "SLURM_NTASKS": "12", "SLURM_PROCID": "0"}) == Launch()


def test_a_single_rank_and_the_ranks_of_one_node_need_no_address():
    for environment, size in ((MPIRUN, "OMPI_COMM_WORLD_SIZE"), (FLUX, "FLUX_JOB_SIZE"), (TORCHRUN, "WORLD_SIZE")):
        assert Launch.from_environment({**environment, size: "1"}) == Launch()
    for one_node in (FLUX | {"FLUX_JOB_NNODES": "1"}, MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}):
        assert Launch.from_environment(one_node).master.startswith("localhost:")


def test_a_missing_variable_and_an_array_with_gaps_are_one_line():
    no_address = "^MASTER_ADDR: not set, and {} does not name "
    cases = [
        (FLUX, no_address.format("flux run"), "`flux hostlist --expand --nth=0 local`"),
        (MPIRUN, no_address.format("mpirun"), "`mpirun -n 1 hostname`"),
        (JSRUN | {"LSB_MCPU_HOSTS": ""}, no_address.format("jsrun"), "`jsrun -n 1 hostname`"),
        (PALS | {"PMI_SIZE": "8"}, no_address.format("mpiexec"), "`head -n 1 $PBS_NODEFILE`"),
        (PALS, "^WORLD_SIZE: not set, and neither mpiexec nor PBS_NODEFILE contains ", "; set it to the number"),
    ]
    pairs = [(environment, message) for environment, *messages in cases for message in messages]
    assert not wrong_messages(pairs, Launch.from_environment)
    assert {Launch.for_errors(environment).rank for environment, *_ in cases} == {5, 7}
    gaps = "^--array: 2 task ids from 2 to 4 have gaps; use --array=0-1, whose"
    assert not wrong_messages([(ARRAY_TASK | {"SLURM_ARRAY_TASK_COUNT": "2"}, gaps)], ArrayTask.from_environment)


def test_the_tasks_of_an_array_take_each_job_once():
    assert ArrayTask.from_environment({"SLURM_JOB_ID": "81"}) is None
    tasks = [ArrayTask.from_environment({**ARRAY_TASK, "SLURM_ARRAY_TASK_ID": str(number)}) for number in (2, 3, 4)]
    assert [[job for job in range(7) if task.takes(job)] for task in tasks] == [[0, 3, 6], [1, 4], [2, 5]]


def test_each_start_of_a_slurm_job_has_a_name_and_a_port_of_its_own():
    starts = [Launch.from_environment({**SLURM_STEP, "SLURM_RESTART_COUNT": str(restart)}) for restart in range(1, 4)]
    starts.append(Launch.from_environment(SLURM_STEP))
    assert [launch.start for launch in starts] == ["71.0.1", "71.0.2", "71.0.3", "71.0.0"]
    assert len({launch.master for launch in starts}) == 4


def test_jobs_on_one_node_have_different_ports():
    """Each start has a name, from which the port follows."""
    pals = PALS | {"PMI_SIZE": "8"}
    for environment, name in ((MPIRUN, "PMIX_NAMESPACE"), (FLUX, "FLUX_JOB_ID"), (pals, "PALS_APID")):
        named = [environment | {"MASTER_ADDR": "a", name: f"start{number}"} for number in range(9)]
        ports = {port_of(Launch.from_environment(variables)) for variables in named}
        assert len(ports) == 9 and all(20000 <= port < 32000 for port in ports)


def test_tasks_of_an_array_on_one_node_have_different_ports_whichever_job_of_the_sweep_they_train(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    launches = [Launch.from_environment({**SLURM_STEP, "SLURM_JOB_ID": str(job)}) for job in range(79, 79 + 128)]
    ports = [job_environment(launch, number)["MASTER_PORT"] for launch in launches for number in (1, 2)]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("nid[001-004,7],login1", "nid001"), ("n1", "n1"), ("a,b", "a"), ("gpu[3,5]-ib", "gpu3-ib"), ("x-[09]", "x-09")],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_tasks_on_node():
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]


class ReadVariables(dict):
    """An environment that notes the names of the variables that are read."""

    def __init__(self, environment):
        super().__init__(environment)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)


ENVIRONMENTS = {
    "torchrun": TORCHRUN, "srun": SLURM_STEP, "jsrun": JSRUN, "flux": FLUX | {"MASTER_ADDR": "a1"}, "mpirun": MPIRUN,
    "mpirun in Slurm": MPIRUN_IN_SLURM, "mpirun in LSF": MPIRUN | {"LSB_MCPU_HOSTS": "a1 1 a2 4"}, "PALS": PALS,
    "sweep": TORCHRUN | {"GPT4D_SWEEP_JOB": "3"}, "array": ARRAY_TASK, "batch": {"SLURM_TASKS_PER_NODE": "4"},
}  # fmt: skip
HOSTILE = [
    "", " ", "abc", "-1", "0", "1e9", "65536", "70000000", "9" * 30, "9" * 5000, "２", "1_0", "2(x999999999)", "2(x0)",
    "4(x", "999999999(x9)", "[", ",", "[1-2]", "a 1 b", "a 1 b c", "a" * 300, "a..b", "a b", "\udcff", "a\nb", "ü",
    "/dev/zero", "/",
]  # fmt: skip


def read_all(environment):
    """Read every variable of a launcher, and check that the values can be used."""
    launch = Launch.from_environment(environment)
    ranks_and_nodes(environment)
    ArrayTask.from_environment(environment)
    assert launch.rank >= 0 and launch.local_rank >= 0 and launch.local_world_size >= 1 and launch.start.isascii()
    assert launch.master is None or 0 < port_of(launch) < 65536


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_a_wrong_variable_of_a_launcher_is_one_line_that_names_it(tmp_path, pbs_job, launcher):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    given = ENVIRONMENTS[launcher] | pbs_job
    variables = ReadVariables(given)
    read_all(variables)
    wrong = []
    for name in sorted(variables.names):
        for value in [*HOSTILE, str(fifo)]:
            environment = given | {name: value}
            Launch.for_errors(environment)
            try:
                read_all(environment)
            except ConfigError as error:
                line = str(error)
                named = re.match("[A-Z0-9_]+[=:]|--array: ", line)
                if not named or not line.isprintable() or len(line) > 250:
                    wrong.append((name, value[:20], line))
            except Exception as error:
                wrong.append((name, value[:20], repr(error)))
    assert not wrong


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "abc"}, "^RANK=abc: not a number; torchrun sets it"),
        ({"WORLD_SIZE": "0"}, "^WORLD_SIZE=0: not a number from 1 to 1000000; torchrun sets it"),
        ({"MASTER_PORT": "65536"}, "^MASTER_PORT=65536: not a number from 1 to 65535; torchrun sets it"),
        ({"MASTER_ADDR": "a..b"}, "^MASTER_ADDR=a..b: not the name of a host; set it to the host of rank 0"),
        (FLUX | {"FLUX_TASK_RANK": ""}, "^FLUX_TASK_RANK=: not a number; flux run sets it"),
        (SLURM_STEP | {"SLURM_NODEID": "7"}, "^SLURM_STEP_TASKS_PER_NODE=4(x3): it has no node 7; Slurm sets it"),
    ],
)
def test_the_line_of_a_wrong_variable(variables, line):
    environment = variables if "SLURM_NODEID" in variables or "FLUX_JOB_ID" in variables else TORCHRUN | variables
    assert not wrong_messages([(environment, line)], Launch.from_environment)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_random_variables_of_launchers_are_accepted_or_one_line(pbs_job, seed):
    draw = random.Random(seed)
    for _ in range(2000):
        environment = {**pbs_job}
        for _ in range(draw.choice((1, 1, 2))):
            environment |= draw.choice([*ENVIRONMENTS.values()])
        for name in draw.sample(sorted(environment), min(len(environment), draw.randrange(1, 4))):
            text = "".join(draw.choices("0123456789(x),[]-ab .\n\udc80", k=draw.randrange(12)))
            if (value := draw.choice([*HOSTILE, text, text, None])) is None:
                del environment[name]
            else:
                environment[name] = value
        Launch.for_errors(environment)
        try:
            read_all(environment)
        except ConfigError as error:
            assert str(error).isprintable() and len(str(error)) < 300, environment
