"""A real Slurm on one machine: a controller and four virtual nodes, with their own directory and ports."""

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.jobs import free_ports

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = 4
_TIMEOUT_S = 300  # Slurm holds a requeued job back for two minutes


class NoSlurm(Exception):
    """The reason why Slurm cannot run here."""


def wait_until(condition: Callable, description: str, details: Callable[[], str] = str):
    """Call ``condition`` until its result is true, and return that result. Raises TimeoutError with ``details``."""
    end = time.monotonic() + _TIMEOUT_S
    while not (result := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{description}: not within {_TIMEOUT_S} s\n{details()}")
        time.sleep(0.1)
    return result


def install() -> None:
    """Install Slurm's packages unless they are present. Raises NoSlurm if that is impossible."""
    if all(shutil.which(program) for program in ("slurmctld", "slurmd", "sbatch", "munged", "setpriv")):
        return
    if os.geteuid():
        raise NoSlurm(f"not root, and not installed: {' '.join(PACKAGES)}")
    if not shutil.which("apt-get"):
        raise NoSlurm(f"no apt-get, and not installed: {' '.join(PACKAGES)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # RUNLEVEL=1 starts no services
    for arguments in ("update", f"install -y --no-install-recommends {' '.join(PACKAGES)}"):
        try:
            command = ["apt-get", "-qq", *arguments.split()]
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        except subprocess.TimeoutExpired:
            raise NoSlurm(f"apt-get {arguments}: not within three minutes") from None
        if result.returncode:
            raise NoSlurm(f"apt-get {arguments}: {result.stderr.strip()[-300:]}")


class SlurmCluster:
    """Slurm's daemons, which end with this process. Processes of jobs are recognized by their SLURM_CONF."""

    def __init__(self):
        if os.geteuid():
            raise NoSlurm("not root, which slurmd needs to start jobs as any user")
        self.directory = Path(tempfile.mkdtemp(prefix="gpt4d-slurm-", dir="/tmp"))
        self.directory.chmod(0o755)  # munge requires it
        self.names = [f"node{i}" for i in range(1, NODES + 1)]
        self.config = self.directory / "slurm.conf"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.environment["SLURM_CONF"] = str(self.config)
        self.processes: dict[str, subprocess.Popen] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        directory = self.directory
        for name in ("state", "spool", "log"):
            (directory / name).mkdir()
        key = directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        self._write_config()
        files = [f"--{name}-file={directory / ('munge.' + name)}" for name in ("key", "pid", "seed", "log")]
        munge_socket = directory / "munge.socket"
        self._start_daemon("munged", "--foreground", f"--socket={munge_socket}", "--num-threads=2", *files)
        wait_until(munge_socket.exists, "munged listens", self.logs)
        self._start_daemon("slurmctld", "-D", "-c")
        for name in self.names:
            (directory / "spool" / name).mkdir()
            self._start_daemon("slurmd", "-D", "-N", name, label=name)
        wait_until(lambda: self.query("sinfo", "-h", "-N", "-p", "batch", "-o", "%t").split() == ["idle"] * NODES,
                   "all nodes are idle", self.logs)  # fmt: skip

    def _write_config(self) -> None:
        directory, host = self.directory, socket.gethostname().partition(".")[0]
        ports = free_ports(NODES + 1)
        # As many cores and GPUs as the nodes of perlmutter.sh and frontier.sh, whatever this machine has.
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets=8 CoresPerSocket=8 "
            "ThreadsPerCore=2 RealMemory=1000 Gres=gpu:8 Feature=gpu"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        # Rank 0's port follows from the job id (launch.py). FirstJobId gives two test sessions on one machine different
        # ports and keeps them below the kernel's ephemeral ports.
        settings = f"""
            ClusterName=gpt4d
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={ports[0]}
            SlurmUser=root
            SlurmdUser=root
            AuthInfo=socket={directory}/munge.socket
            CommunicationParameters=NoInAddrAny
            StateSaveLocation={directory}/state
            SlurmdSpoolDir={directory}/spool/%n
            SlurmctldPidFile={directory}/slurmctld.pid
            SlurmdPidFile={directory}/slurmd-%n.pid
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            JobAcctGatherType=jobacct_gather/none
            AccountingStorageType=accounting_storage/none
            SwitchType=switch/none
            MpiDefault=none
            FirstJobId={1 + os.getpid() % 180}
            MailProg=/bin/true
            SelectType=select/cons_tres
            SelectTypeParameters=CR_CPU
            GresTypes=gpu
            SlurmdParameters=config_overrides
            ReturnToService=2
            SchedulerType=sched/builtin
            SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
            KillWait=30
            PreemptType=preempt/partition_prio
            PreemptMode=REQUEUE
            PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
            PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
        """
        lines = [line.strip() for line in settings.strip().splitlines()]
        first_partition = next(i for i, line in enumerate(lines) if line.startswith("PartitionName"))
        self.config.write_text("\n".join([*lines[:first_partition], *nodes, *lines[first_partition:]]) + "\n")
        (directory / "gpu").mkdir()
        for gpu in range(8):  # slurmd counts device files; these, copies of /dev/null, are never opened
            try:
                os.mknod(directory / "gpu" / str(gpu), stat.S_IFCHR | 0o600, os.makedev(1, 3))
            except OSError as error:
                raise NoSlurm(f"no device nodes in {directory}: {error.strerror}") from None
        (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu/[0-7]\n")

    def _start_daemon(self, name: str, *arguments: str, label: str = "") -> None:
        log = (self.directory / "log" / f"{label or name}.log").open("a")
        # The daemon ends with this process even if it is killed, but a terminal's Ctrl-C does not end it earlier.
        command = ["setpriv", "--pdeathsig", "TERM", name, *arguments]
        self.processes[label or name] = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def query(self, *command: str) -> str:
        """Return the output of a Slurm command, or "" if it fails because the controller is busy."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
        return result.stdout if result.returncode == 0 else ""

    def run(self, *command: str) -> str:
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
        return result.stdout

    def sbatch(self, *arguments: str, log: Path, environment: Mapping[str, str] = {}, cwd: Path = ROOT) -> "SlurmJob":
        """Submit a job. ``arguments`` are sbatch options, the script and the script's arguments."""
        command = ["sbatch", "--parsable", f"--output={log}", *arguments]
        result = subprocess.run(
            command, env={**self.environment, **environment}, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return SlurmJob(self, result.stdout.strip(), log)

    def logs(self) -> str:
        texts = (f"== {path.name}\n" + path.read_text()[-1500:] for path in sorted((self.directory / "log").iterdir()))
        return "\n".join(texts)

    def close(self) -> None:
        """End the jobs, then the daemons, then all processes that jobs have left running."""
        if "slurmctld" in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
                self.query("scancel", "--user=root")
                self.query("scancel", "--user=root", "--signal=KILL", "--full")
                wait_until(lambda: not self.query("squeue", "-h"), "all jobs have ended")
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self.left_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory)

    def left_running(self) -> list[int]:
        marker, pids = f"SLURM_CONF={self.config}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if marker in path.read_bytes():
                    pids.append(int(path.parent.name))
        return pids


class SlurmJob:
    def __init__(self, cluster: SlurmCluster, number: str, log: Path):
        self.cluster, self.number, self.log = cluster, number, log

    def show(self) -> dict[str, str]:
        shown = self.cluster.query("scontrol", "show", "job", self.number, "--oneliner")
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_until(self, condition: Callable, description: str):
        return wait_until(condition, f"job {self.number}: {description}", self.diagnostics)

    def wait_for_state(self, *states: str) -> dict[str, str]:
        return self.wait_until(lambda: (shown := self.show()).get("JobState") in states and shown, " or ".join(states))

    def wait_for_restart(self, count: int) -> None:
        """Wait for restart number ``count``, and shorten Slurm's delay of two minutes before it to two seconds.

        It cannot be zero: a node rejects a credential from the same second in which it revoked the last one.
        """
        self.wait_until(lambda: self.show().get("Restarts") == str(count), f"{count} restart(s)")
        self.wait_for_state("PENDING")
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+2seconds")

    def signal_batch(self, name: str) -> None:
        self.cluster.run("scancel", "--batch", f"--signal={name}", self.number)

    def cancel(self) -> None:
        self.cluster.run("scancel", self.number)

    def diagnostics(self) -> str:
        """Return everything known about the job, for the message of a failing test."""
        return f"{self.show()}\n{self.output()}\n{self.cluster.logs()}"

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else "(no output)"
