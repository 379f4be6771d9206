"""A real Slurm on this one machine: a controller and four virtual nodes, in a directory and on ports of their own."""

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

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = 4
_PATIENCE_S = 120  # nothing here takes that long unless it never happens


class NoSlurm(Exception):
    """Why there can be none here."""


def until(true: Callable, what: str, detail: Callable[[], str] = str):
    """What ``true`` returns, as soon as it is something."""
    end = time.monotonic() + _PATIENCE_S
    while not (result := true()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {_PATIENCE_S} s\n{detail()}")
        time.sleep(0.1)
    return result


def install() -> None:
    """Slurm's packages, where they are missing. NoSlurm if they cannot be had."""
    if all(shutil.which(program) for program in ("slurmctld", "slurmd", "sbatch", "munged", "setpriv")):
        return
    if os.geteuid():
        raise NoSlurm(f"not root, and not installed: {' '.join(PACKAGES)}")
    if not shutil.which("apt-get"):
        raise NoSlurm(f"no apt-get, and not installed: {' '.join(PACKAGES)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # RUNLEVEL: no services are started
    for words in ("update", f"install -y --no-install-recommends {' '.join(PACKAGES)}"):
        try:
            done = subprocess.run(
                ["apt-get", "-qq", *words.split()], env=quiet, capture_output=True, text=True, timeout=180
            )
        except subprocess.TimeoutExpired:
            raise NoSlurm(f"apt-get {words}: not within three minutes") from None
        if done.returncode:
            raise NoSlurm(f"apt-get {words}: {done.stderr.strip()[-300:]}")


class Cluster:
    """Daemons in the foreground, which end with this process; what a job leaves running carries our SLURM_CONF."""

    def __init__(self):
        if os.geteuid():
            raise NoSlurm("not root: slurmd starts jobs as any user")
        self.directory = Path(tempfile.mkdtemp(prefix="gpt4d-slurm-", dir="/tmp"))
        self.directory.chmod(0o755)  # munge insists
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
        at = self.directory
        for name in ("state", "spool", "log"):
            (at / name).mkdir()
        key = at / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        self._write_config()
        files = [f"--{name}-file={at / ('munge.' + name)}" for name in ("key", "pid", "seed", "log")]
        self._daemon("munged", "--foreground", f"--socket={at / 'munge.socket'}", "--num-threads=2", *files)
        until((at / "munge.socket").exists, "munged listens", self.logs)
        self._daemon("slurmctld", "-D", "-c")
        for name in self.names:
            self.start_node(name)
        until(lambda: self.ask("sinfo", "-h", "-N", "-p", "batch", "-o", "%t").split() == ["idle"] * NODES,
              "all nodes are idle", self.logs)  # fmt: skip

    def _write_config(self) -> None:
        at, host = self.directory, socket.gethostname().partition(".")[0]
        ports = _free_ports(NODES + 1)
        # As large as the nodes of perlmutter.sh and frontier.sh, whatever this machine has.
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Sockets=8 CoresPerSocket=8 "
            "ThreadsPerCore=2 RealMemory=1000 Gres=gpu:8 Feature=gpu"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        # Where rank 0 listens follows from the job's number (launch.py): this keeps two sessions of tests on one
        # machine apart, and below the ports that the kernel gives out.
        settings = f"""
            ClusterName=gpt4d
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={ports[0]}
            SlurmUser=root
            SlurmdUser=root
            AuthInfo=socket={at}/munge.socket
            CommunicationParameters=NoInAddrAny
            StateSaveLocation={at}/state
            SlurmdSpoolDir={at}/spool/%n
            SlurmctldPidFile={at}/slurmctld.pid
            SlurmdPidFile={at}/slurmd-%n.pid
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
        at_nodes = next(i for i, line in enumerate(lines) if line.startswith("PartitionName"))
        self.config.write_text("\n".join([*lines[:at_nodes], *nodes, *lines[at_nodes:]]) + "\n")
        (at / "gpu").mkdir()
        for gpu in range(8):  # slurmd counts devices; nobody opens these, of /dev/null's kind
            try:
                os.mknod(at / "gpu" / str(gpu), stat.S_IFCHR | 0o600, os.makedev(1, 3))
            except OSError as error:
                raise NoSlurm(f"no device nodes in {at}: {error.strerror}") from None
        (at / "gres.conf").write_text(f"Name=gpu File={at}/gpu/[0-7]\n")

    def _daemon(self, name: str, *words: str, label: str = "") -> None:
        log = (self.directory / "log" / f"{label or name}.log").open("a")
        # It ends with us, even if we are killed; and a terminal's Ctrl-C does not end it before us.
        command = ["setpriv", "--pdeathsig", "TERM", name, *words]
        self.processes[label or name] = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def start_node(self, name: str) -> None:
        (self.directory / "spool" / name).mkdir(exist_ok=True)
        self._daemon("slurmd", "-D", "-N", name, label=name)

    def ask(self, *command: str) -> str:
        """What a command of Slurm's prints; nothing if it fails: the controller may be busy."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
        return done.stdout if done.returncode == 0 else ""

    def tell(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def sbatch(self, *words: str, log: Path, environment: Mapping[str, str] = {}, cwd: Path = ROOT) -> "Job":
        """A job from a script and what goes before and after it."""
        command = ["sbatch", "--parsable", f"--output={log}", *words]
        done = subprocess.run(
            command, env={**self.environment, **environment}, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), log)

    def logs(self) -> str:
        texts = (f"== {path.name}\n" + path.read_text()[-1500:] for path in sorted((self.directory / "log").iterdir()))
        return "\n".join(texts)

    def close(self) -> None:
        """Ends the jobs, then the daemons, then whatever of ours is still there."""
        if "slurmctld" in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
                self.ask("scancel", "--user=root")
                self.ask("scancel", "--user=root", "--signal=KILL", "--full")
                until(lambda: not self.ask("squeue", "-h"), "all jobs have ended")
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
        mark, found = f"SLURM_CONF={self.config}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


class Job:
    def __init__(self, cluster: Cluster, number: str, log: Path):
        self.cluster, self.number, self.log = cluster, number, log

    def show(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.ask("scontrol", "show", "job", self.number, "--oneliner")))

    def until(self, true: Callable, what: str):
        return until(true, f"job {self.number}: {what}", self.told)

    def until_state(self, *states: str) -> dict[str, str]:
        return self.until(lambda: (shown := self.show()).get("JobState") in states and shown, " or ".join(states))

    def until_restarted(self, times: int) -> None:
        """Slurm lets a job that is back in the queue wait two minutes; here two seconds.

        Not none: a node refuses a job whose credential is of the very second in which it revoked the last one.
        """
        self.until(lambda: self.show().get("Restarts") == str(times), f"{times} restart(s)")
        self.until_state("PENDING")
        self.cluster.tell("scontrol", "update", f"JobId={self.number}", "StartTime=now+2seconds")

    def signal_batch(self, name: str) -> None:
        self.cluster.tell("scancel", "--batch", f"--signal={name}", self.number)

    def cancel(self) -> None:
        self.cluster.tell("scancel", self.number)

    def told(self) -> str:
        """All there is to know, for the message of a test that fails."""
        return f"{self.show()}\n{self.said()}\n{self.cluster.logs()}"

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else "(no output)"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listening in sockets:
            listening.bind(("127.0.0.1", 0))
        return [listening.getsockname()[1] for listening in sockets]
