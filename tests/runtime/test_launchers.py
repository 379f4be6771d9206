"""The variables of each launcher, and of launchers inside the jobs of other launchers."""

import pytest

from gpt4d.config import ConfigError
from gpt4d.config.launchers import first_host, innermost, tasks_on_node
from gpt4d.config.machine import ranks_and_nodes
from gpt4d.runtime.launch import Launch
from tests.runtime.test_launch import SLURM_STEP

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "nid001",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "a",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
# Recorded from mpirun of Open MPI 5.0.11, with the numbers of a job on two nodes.
MPIRUN = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_UNIVERSE_SIZE": "8",
    "PMIX_NAMESPACE": "prterun-vm-22724@1",
    "PMIX_RANK": "5",
}
# Recorded on the second of two nodes in Slurm 22.05: a process of mpirun inherits the variables of its daemon, which
# srun has started, and which has another rank.
MPIRUN_IN_SLURM = MPIRUN | {
    "SLURM_JOB_ID": "166",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# Documented by Flux (job-environment-variables.rst); on an HPE system the plugin cray-pals adds variables of PALS.
FLUX = {
    "FLUX_JOB_ID": "f2fXJSYU4Y",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_SIZE": "8",
    "FLUX_JOB_TMPDIR": "/var/tmp/user/flux-Tg0bRw/jobtmp-0-f2fXJSYU4Y",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_TASK_RANK": "5",
    "FLUX_URI": "local:///var/tmp/user/flux-Tg0bRw/local-0",
    "PALS_APID": "4127195136",
    "PALS_NODEID": "1",
    "PALS_RANKID": "5",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
# An LSF job of two nodes with six GPUs each, and of a launch node. jsrun also sets Open MPI's variables.
JSRUN = {
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "LSB_JOBID": "2920901",
    "LSB_MCPU_HOSTS": "batch5 1 h35n12 42 h36n01 42",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "12",
    "PMIX_NAMESPACE": "1",
    "PMIX_RANK": "7",
}
# The variables of a PBS job with mpiexec of PALS 1.8 and PMIx (Aurora): there is no number of all ranks.
PALS = {
    "PALS_APID": "5f0c9f31-5d0f-4c5c-a64a-9f1b1c1d5e6f",
    "PALS_DEPTH": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_NODEID": "1",
    "PALS_PMI": "pmix",
    "PALS_RANKID": "5",
    "PALS_TRANSFER": "0",
    "PBS_JOBID": "8824786.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
    "PBS_NODEFILE": "/var/spool/pbs/aux/8824786.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
    "PMIX_RANK": "5",
}
PBS_NODES = ["x4102c5s2b0n0.hsn.cm.aurora.alcf.anl.gov", "x4102c5s3b0n0.hsn.cm.aurora.alcf.anl.gov"]


@pytest.fixture
def pbs_job(tmp_path):
    """Return the variables of a PBS job on two nodes."""
    (tmp_path / "nodes").write_text("".join(f"{node}\n" for node in PBS_NODES))
    return {"PBS_NODEFILE": str(tmp_path / "nodes")}


@pytest.mark.parametrize(
    ("environment", "place", "host"),
    [
        (TORCHRUN, (5, 8, 1, 4, "a.1"), "nid001"),
        (SLURM_STEP, (9, 12, 1, 4, "71.0.0"), "nid001003"),
        (JSRUN, (7, 12, 1, 6, "2920901.1"), "h35n12"),
        (FLUX | {"MASTER_ADDR": "tuolumne1001"}, (5, 8, 1, 4, "f2fXJSYU4Y"), "tuolumne1001"),
        (MPIRUN | {"MASTER_ADDR": "a1"}, (5, 8, 1, 4, "prterun-vm-22724@1"), "a1"),
        (MPIRUN_IN_SLURM, (5, 8, 1, 4, "prterun-vm-22724@1"), "node1"),
        (MPIRUN | {"LSB_MCPU_HOSTS": "a1 1 a2 4"}, (5, 8, 1, 4, "prterun-vm-22724@1"), "a1"),
    ],
    ids=["torchrun", "srun", "jsrun", "flux", "mpirun", "mpirun in Slurm", "mpirun in LSF"],
)
def test_each_launcher_tells_place_and_host(environment, place, host):
    launch = Launch.from_environment(environment)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, launch.start) == place
    assert launch.master.rpartition(":")[0] == host
    errors = Launch.for_errors(environment)
    assert (errors.rank, errors.local_rank) == (launch.rank, launch.local_rank)


def test_pals_and_mpirun_read_the_nodes_of_a_pbs_job(pbs_job):
    for environment in (PALS, MPIRUN):
        launch = Launch.from_environment(environment | pbs_job)
        assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (5, 8, 1, 4)
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
        (TORCHRUN, SLURM_STEP, "torchrun"),
        (TORCHRUN, PALS, "torchrun"),
        (TORCHRUN, FLUX, "torchrun"),
        (MPIRUN_IN_SLURM, {}, "mpirun"),
        (FLUX, SLURM_STEP, "flux run"),
        (FLUX, JSRUN, "flux run"),
        ({}, JSRUN, "jsrun"),
        (SLURM_STEP, {"PALS_RANKID": "9", "PALS_LOCAL_RANKID": "1", "PMI_SIZE": "12"}, "srun"),
    ],
)
def test_the_innermost_launcher_counts(inner, outer, program):
    assert innermost(outer | inner).program == program


@pytest.mark.parametrize("environment", [{}, {"PBS_NODEFILE": "/nodes"}, {"FLUX_URI": "local://x"}, {"LSB_JOBID": "1"}])
def test_in_a_batch_script_there_is_one_rank(environment):
    assert Launch.from_environment(environment) == Launch() and ranks_and_nodes(environment) == (None, 1)


@pytest.mark.parametrize(
    ("environment", "size"), [(MPIRUN, "OMPI_COMM_WORLD_SIZE"), (FLUX, "FLUX_JOB_SIZE"), (TORCHRUN, "WORLD_SIZE")]
)
def test_a_single_rank_needs_no_address(environment, size):
    assert Launch.from_environment({**environment, size: "1"}) == Launch()


def test_the_ranks_of_one_node_need_no_address():
    assert Launch.from_environment(FLUX | {"FLUX_JOB_NNODES": "1"}).master.startswith("localhost:")
    assert Launch.from_environment(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}).master.startswith("localhost:")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (FLUX, r"^MASTER_ADDR: not set, and flux run does not name .*`flux hostlist --expand --nth=0 local`$"),
        (MPIRUN, r"^MASTER_ADDR: not set, and mpirun does not name .*`mpirun -n 1 hostname`$"),
        (JSRUN | {"LSB_MCPU_HOSTS": ""}, r"^MASTER_ADDR: not set, and jsrun does not name .*`jsrun -n 1 hostname`$"),
        (PALS | {"PMI_SIZE": "8"}, r"^MASTER_ADDR: not set, and mpiexec does not name .*`head -n 1 \$PBS_NODEFILE`$"),
        (PALS, "^WORLD_SIZE: not set, and neither mpiexec nor PBS_NODEFILE contains .*; set it to the number"),
    ],
)
def test_a_missing_variable_is_one_line_that_names_it(environment, message):
    with pytest.raises(ConfigError, match=message):
        Launch.from_environment(environment)
    assert Launch.for_errors(environment).rank in (5, 7)


def test_jobs_on_one_node_have_different_ports():
    """Each start has a name, from which the port follows."""
    for environment, name in (
        (MPIRUN, "PMIX_NAMESPACE"),
        (FLUX, "FLUX_JOB_ID"),
        (PALS | {"PMI_SIZE": "8"}, "PALS_APID"),
    ):
        starts = [
            Launch.from_environment(environment | {"MASTER_ADDR": "a", name: f"start{number}"}) for number in range(9)
        ]
        ports = {int(launch.master.partition(":")[2]) for launch in starts}
        assert len(ports) == 9 and all(20000 <= port < 32000 for port in ports)
    assert Launch.from_environment(FLUX | {"MASTER_ADDR": "a", "MASTER_PORT": "7"}).master == "a:7"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("nid[001-004,7],login1", "nid001"), ("n1", "n1"), ("a,b", "a"), ("gpu[3,5]-ib", "gpu3-ib"), ("x-[09]", "x-09")],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_tasks_on_node():
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
