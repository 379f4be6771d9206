"""An emulated cluster on one Linux machine: hosts are network namespaces, their uplinks are shaped.

    python -m benchmarks.cluster hosts=2 ranks=4 mbit=400 -- python train.py parallel.gx=4

runs the command once for each rank, with torchrun's variables. Needs root and iproute2. What is real: processes, the
gloo transport, the order and size of messages, the shared uplink of each host. What is not: the ranks share this
machine's cores, so they compute slower than on hosts of their own; ranks of one host talk at memory speed.
"""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from gpt4d.config import ConfigError, from_arguments
from gpt4d.runtime.errors import one_line_errors

_SUBNET = "10.201.0"
_BURST_MS = 1.0  # what a shaped uplink may send at once
_QUEUE_MS = 50.0
# Jumbo frames, as clusters have: with small ones the shaping itself takes the cores that the ranks compute on.
_MTU = 9000


@dataclass
class ClusterConfig:
    hosts: int = 2
    ranks: int = 4  # on each host
    mbit: float = 400.0  # per second, of each host's uplink, each way


class Cluster:
    """A context in which ``run`` starts a command on every rank. Takes down what it set up, whatever happens."""

    def __init__(self, config: ClusterConfig):
        self.config = config
        tag = f"g4d{os.getpid()}"
        self.switch = f"{tag}s"
        self.hosts = [f"{tag}h{host}" for host in range(config.hosts)]

    def __enter__(self) -> "Cluster":
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
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            _ip(f"netns add {host}")
            _ip(f"-n {host} link set lo up")
            _ip(f"-n {host} link add uplink mtu {_MTU} type veth peer name {port} mtu {_MTU} netns {self.switch}")
            _ip(f"-n {host} addr add {_SUBNET}.{number + 1}/24 dev uplink")
            _ip(f"-n {host} link set uplink up")
            self._as_in_a_cluster(host, f"{_SUBNET}.{number + 1}")
            _ip(f"-n {self.switch} link set {port} master bridge up")
            self._shape(host, "uplink")  # what the host sends
            self._shape(self.switch, port)  # what it receives

    def _as_in_a_cluster(self, host: str, address: str) -> None:
        """Congestion control that does not depend on what this machine is tuned for.

        BBR, made for the internet, estimates a link by itself and paces even what stays inside a host. And a connection
        that rested during a computation goes on at the speed it had.
        """
        cubic = f"src {address} congctl cubic"
        _ip(f"-n {host} route replace {_SUBNET}.0/24 dev uplink {cubic}")
        _ip(f"-n {host} route replace local {address} dev lo table local scope host {cubic}")
        _ip(f"netns exec {host} sysctl -qw net.ipv4.tcp_slow_start_after_idle=0")

    def _shape(self, namespace: str, device: str) -> None:
        bytes_per_ms = self.config.mbit * 125
        burst = max(int(bytes_per_ms * _BURST_MS), 2 * _MTU)
        queue = max(int(bytes_per_ms * _QUEUE_MS), 500_000)
        rate = f"{int(self.config.mbit * 1000)}kbit"
        _command(f"tc -n {namespace} qdisc add dev {device} root tbf rate {rate} burst {burst} limit {queue}")

    def __exit__(self, *_) -> None:
        for namespace in (*self.hosts, self.switch):
            found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
            for pid in found.stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)

    def start(self, command: list[str], port: int = 29400, **pipes) -> list[subprocess.Popen]:
        """The command's processes, one for each rank, rank 0 first. Whoever starts them ends them.

        ``port`` is one of the first host's namespace: nothing outside can hold it. ``pipes`` are Popen's.
        """
        address, ranks, started = f"{_SUBNET}.1", self.config.ranks, []
        for rank in range(self.config.hosts * ranks):
            host, local = divmod(rank, ranks)
            variables = _variables(rank, self.config.hosts * ranks, local, ranks, address, port)
            words = ["ip", "netns", "exec", self.hosts[host], *command]
            environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": "uplink"}
            started.append(subprocess.Popen(words, env=environment, text=True, **pipes))
        return started

    def run(self, command: list[str], timeout_s: float = 600) -> list[str]:
        """What each rank wrote to standard output, once all ended well. RuntimeError with what a rank said if not."""
        started = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            outputs = [process.communicate(timeout=timeout_s) for process in started]
        finally:
            for process in started:
                process.kill()
        for rank, (process, (_, errors)) in enumerate(zip(started, outputs, strict=True)):
            if process.returncode:
                raise RuntimeError(f"rank {rank} of {' '.join(command)} ended with {process.returncode}:\n{errors}")
        return [out for out, _ in outputs]


class LocalHost:
    """Ranks of this machine as it is: what ``Cluster.start`` does, without an emulated network."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def start(self, command: list[str], port: int = 0, **pipes) -> list[subprocess.Popen]:
        """A ``port`` asked for is not insisted on: here anyone may hold it."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = []
        for rank in range(self.ranks):
            environment = {**os.environ, **_variables(rank, self.ranks, rank, self.ranks, "127.0.0.1", port)}
            started.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return started


def _variables(
    rank: int, world_size: int, local: int, local_world_size: int, address: str, port: int
) -> dict[str, str]:
    """torchrun's variables of one rank, which has one thread to compute with."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in variables.items()}


def _ip(words: str) -> None:
    _command(f"ip {words}")


def _command(words: str) -> None:
    done = subprocess.run(words.split(), capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{words}: {done.stderr.strip()}; an emulated cluster needs Linux, root and iproute2")


def main(arguments: list[str]) -> None:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[split + 1 :]
    if not command:
        raise ConfigError("what to run comes after --, as in: python -m benchmarks.cluster hosts=2 -- python train.py")
    with Cluster(from_arguments(ClusterConfig, arguments[:split])) as cluster:
        print(cluster.run(command)[0], end="")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
