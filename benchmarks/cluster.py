"""An emulated cluster on one Linux machine: hosts are network namespaces with rate-limited uplinks.

    python -m benchmarks.cluster hosts=2 ranks=4 mbit=400 -- python train.py parallel.gx=4

runs the command once per rank, with torchrun's environment variables. Needs root and iproute2. Real are the processes,
the gloo transport, the order and size of messages, and the uplink that a host's ranks share. Not real: all ranks share
this machine's cores, so they compute slower than on separate hosts, and ranks of one host communicate at memory speed.
"""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from gpt4d.config import ConfigError, from_arguments
from gpt4d.config.commands import one_line_errors

_SUBNET = "10.201.0"
_BURST_MS = 1.0  # how much of the rate an uplink may send at once
_QUEUE_MS = 50.0
# Jumbo frames, as clusters use: with small frames, the shaping itself occupies the cores on which the ranks compute.
_MTU = 9000


@dataclass
class EmulatedClusterConfig:
    hosts: int = 2
    ranks: int = 4  # per host
    mbit: float = 400.0  # Mbit/s of each host's uplink, in each direction


class EmulatedCluster:
    """Context manager that builds the namespaces and links, and always removes them and kills their processes."""

    def __init__(self, config: EmulatedClusterConfig):
        self.config = config
        tag = f"g4d{os.getpid()}"
        self.switch = f"{tag}s"
        self.hosts = [f"{tag}h{host}" for host in range(config.hosts)]

    def __enter__(self) -> "EmulatedCluster":
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        _ip(f"netns add {self.switch}")
        _ip(f"-n {self.switch} link add bridge mtu {_MTU} type bridge stp_state 0 forward_delay 0")
        _ip(f"-n {self.switch} link set bridge up")
        for index, host in enumerate(self.hosts):
            port = f"port{index}"
            _ip(f"netns add {host}")
            _ip(f"-n {host} link set lo up")
            _ip(f"-n {host} link add uplink mtu {_MTU} type veth peer name {port} mtu {_MTU} netns {self.switch}")
            _ip(f"-n {host} addr add {_SUBNET}.{index + 1}/24 dev uplink")
            _ip(f"-n {host} link set uplink up")
            self._set_congestion_control(host, f"{_SUBNET}.{index + 1}")
            _ip(f"-n {self.switch} link set {port} master bridge up")
            self._limit_rate(host, "uplink")  # traffic from the host
            self._limit_rate(self.switch, port)  # traffic to the host

    def _set_congestion_control(self, host: str, address: str) -> None:
        """Set the host's TCP congestion control, so that results do not depend on this machine's tuning.

        BBR, made for the internet, estimates the bandwidth itself and paces even traffic inside a host. A connection
        that was idle during a computation keeps its congestion window.
        """
        cubic = f"src {address} congctl cubic"
        _ip(f"-n {host} route replace {_SUBNET}.0/24 dev uplink {cubic}")
        _ip(f"-n {host} route replace local {address} dev lo table local scope host {cubic}")
        _ip(f"netns exec {host} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")

    def _limit_rate(self, namespace: str, device: str) -> None:
        bytes_per_ms = self.config.mbit * 125
        burst = max(int(bytes_per_ms * _BURST_MS), 2 * _MTU)
        queue = max(int(bytes_per_ms * _QUEUE_MS), 500_000)
        rate = f"{int(self.config.mbit * 1000)}kbit"
        _run_command(f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate} burst {burst} limit {queue}")

    def __exit__(self, *_) -> None:
        for namespace in (*self.hosts, self.switch):
            pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
            for pid in pids.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)

    def start(self, command: list[str], port: int = 29400, **pipes) -> list[subprocess.Popen]:
        """Start the command once per rank and return the processes, rank 0 first. The caller ends them.

        ``port`` belongs to the first host's namespace, so no process outside can hold it. ``pipes`` go to Popen.
        """
        address, ranks, processes = f"{_SUBNET}.1", self.config.ranks, []
        for rank in range(self.config.hosts * ranks):
            host, local_rank = divmod(rank, ranks)
            variables = _rank_variables(rank, self.config.hosts * ranks, local_rank, ranks, address, port)
            host_command = ["ip", "netns", "exec", self.hosts[host], *command]
            environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "uplink"}
            processes.append(subprocess.Popen(host_command, env=environment, text=True, **pipes))
        return processes

    def run(self, command: list[str], timeout_s: float = 600) -> list[str]:
        """Run the command on every rank and return each rank's standard output.

        Raises RuntimeError with a rank's standard error if that rank fails.
        """
        processes = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            outputs = [process.communicate(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
            if process.returncode:
                raise RuntimeError(f"rank {rank} of {' '.join(command)} exited with {process.returncode}:\n{errors}")
        return [out for out, _ in outputs]


class LocalHost:
    """Ranks on this machine, started like ``EmulatedCluster.start`` does, without an emulated network."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def start(self, command: list[str], port: int = 0, **pipes) -> list[subprocess.Popen]:
        """Start the command once per rank. ``port`` is ignored: any process here may hold it, so a free one is used."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(self.ranks):
            environment = {**os.environ, **_rank_variables(rank, self.ranks, rank, self.ranks, "127.0.0.1", port)}
            processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return processes


def _rank_variables(
    rank: int, world_size: int, local_rank: int, local_world_size: int, address: str, port: int
) -> dict[str, str]:
    """Return torchrun's environment variables of one rank, which computes with one thread."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in variables.items()}


def _ip(arguments: str) -> None:
    _run_command(f"ip {arguments}")


def _run_command(command: str) -> None:
    """Run a command line without quoting. Raises ConfigError if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{command}: {done.stderr.strip()}; run on Linux as root, with iproute2 installed")


def main(arguments: list[str]) -> None:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[split + 1 :]
    if not command:
        raise ConfigError("no command; pass it after --: python -m benchmarks.cluster hosts=2 -- python train.py")
    with EmulatedCluster(from_arguments(EmulatedClusterConfig, arguments[:split])) as cluster:
        print(cluster.run(command)[0], end="")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
