"""Jobs that share a port, and clients without the secret, change nothing in a job."""

import functools
import os
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from gpt4d.config import ConfigError, commands
from gpt4d.runtime import rendezvous
from gpt4d.runtime.errors import NodeError, PortTaken
from gpt4d.runtime.launch import Launch
from gpt4d.runtime.rendezvous import Connector, JobStore, job_key
from gpt4d.runtime.watchdog import Watchdog
from tests.support.data_files import one_line
from tests.support.faults import at_step, losses, shorten_timeouts
from tests.support.grids import train_in_rank
from tests.support.jobs import TIMEOUT_S, LaunchedJob, free_port

RUN = ["parallel.gz=2", "train.steps=4"]


def wait_for_file(path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop_at_step_3(released, port_s, rank):
    """On a rank: wait in step 3 for the file ``released``, and for the port ``port_s`` seconds."""
    shorten_timeouts()
    rendezvous.PORT_S, rendezvous.ANSWER_S, commands.PRINT_GRACE_S = port_s, min(1.0, port_s), 0.0
    at_step(3, lambda _: wait_for_file(released))


@pytest.fixture
def start(ranks, tiny, tmp_path):
    """Return a function that starts a job of two ranks, given its run directory and its port (0: a free port)."""

    def start_job(name: str, port: int = 0, port_s: float = 60.0) -> LaunchedJob:
        config = tiny(*RUN, f"run.dir={tmp_path / name}")
        prepare = functools.partial(stop_at_step_3, tmp_path / "go", port_s)
        return LaunchedJob(ranks.context, config, 2, prepare, {"MASTER_PORT": str(port or free_port())})

    return start_job


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return []


@pytest.fixture
def assert_undisturbed(ranks, tiny, expected, tmp_path):
    """Return a function that lets jobs continue, and asserts that they end with the losses of a run alone."""

    def check(*jobs: LaunchedJob) -> None:
        (tmp_path / "go").touch()
        if not expected:
            config = tiny(*RUN, f"run.dir={tmp_path / 'alone'}")
            ranks.run(2, train_in_rank, config)
            expected.extend(losses(config))
        for job in jobs:
            assert job.exit_codes() == [0, 0], job.outputs()
            assert [line["loss"] for line in job.metric_lines() if "event" not in line] == expected

    return check


def test_a_job_is_undisturbed_by_strangers_and_jobs_with_its_port_say_so_or_wait(start, assert_undisturbed):
    """A thousand messages change nothing. A requeued job has the port of its previous start, which may still end."""
    with start("a") as first:
        first.wait_for_step(2)
        with start("b", first.port, port_s=0.2) as second:
            assert second.exit_codes() == [75, 75], second.outputs()
            message = f"error: MASTER_PORT={first.port}: another process uses this port of {socket.gethostname()}; set "
            assert message in second.outputs()[0] and "Traceback" not in "".join(second.outputs())
        send_random_messages(first.port, 1000)
        with start("c", first.port) as third:
            assert_undisturbed(first, third)


@pytest.mark.full
@pytest.mark.parametrize("repetition", range(50))
def test_of_two_jobs_that_start_together_one_trains(start, assert_undisturbed, repetition):
    port = free_port()
    with start("a", port, port_s=1.0) as one, start("b", port, port_s=1.0) as other:
        while all(process.is_alive() for job in (one, other) for process in job.processes):
            time.sleep(0.01)
        loser, winner = (one, other) if not all(process.is_alive() for process in one.processes) else (other, one)
        assert loser.exit_codes() == [75, 75], loser.outputs()
        assert_undisturbed(winner)


KEYS = ("failure", "hang", "alive/1", "host/0", "process/1", "all left")
GUESSED = [*KEYS, *(f"gpt4d/0/0/{key}" for key in KEYS)]


def send_random_messages(port: int, count: int) -> None:
    """Send messages of a port scanner, and of a client of torch's store that knows gpt4d's keys."""
    draw = random.Random(0)
    client = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    forged = '{"rank": 1, "host": "elsewhere", "cause": "a stranger said so"}'
    for number in range(count):
        key = draw.choice(GUESSED)
        if number % 2:
            calls = (client.set, key, forged), (client.compare_set, key, "", forged), (client.delete_key, key)
            call, *arguments = draw.choice([*calls, (client.add, f"count {draw.randrange(9)}", 1)])
            call(*arguments)
            continue
        with socket.create_connection(("localhost", port)) as raw:
            if number % 4:  # as a client whose query makes no sense: magic number, kind of query, length
                raw.sendall(struct.pack("=BI", 0, 0x3C85F7CE))
                raw.sendall(struct.pack("=BQ", draw.randrange(20), draw.choice([0, 1, 1 << 20, 1 << 40, 1 << 63])))
            with suppress(ConnectionError):  # the server closes the connection to a client that it does not understand
                raw.sendall(draw.randbytes(draw.randrange(1, 300)))


def name_of(server: dist.Store, store: JobStore, key: str) -> str:
    """Return the name under which a job stores a new key, as a client that lists all names finds it."""
    before = {*server.list_keys()}
    store.set(key, "any")
    (name,) = {*server.list_keys()} - before
    return name


def test_a_value_without_the_jobs_key_counts_as_missing():
    server = dist.HashStore()
    ours, strangers = JobStore(server, b"ours"), JobStore(server, b"strangers")
    theirs = name_of(server, strangers, "failure")
    assert not ours.check(["failure"]), "two jobs must not share keys"
    name, other = (name_of(server, ours, key) for key in ("failure", "other"))
    for forged in (b"", b"no", server.get(theirs), server.get(other)):
        server.set(name, forged)
        assert not ours.check(["failure"])
        with pytest.raises(RuntimeError, match="failure in the store was not written by this job"):
            ours.get("failure")
        assert ours.compare_set("failure", "", "true") == b"true" == ours.get("failure")
    assert ours.compare_set("failure", "", "later") == b"true" and ours.get("other") == b"any"
    assert ours.compare_set("failure", "true", "changed") == b"changed" == ours.get("failure")


def test_a_forged_failure_does_not_end_a_job():
    server = dist.HashStore()
    store = JobStore(server, b"key")
    watchdog = Watchdog(store, 0, 2, "nid1", lambda failure: None)
    forged = '{"rank": 1, "host": "elsewhere", "cause": "a stranger said so"}'
    server.set(name_of(server, store, "failure"), forged)
    assert watchdog.first_failure() is None
    assert watchdog.fail("the true cause", may_be_secondary=False).cause == "the true cause"
    assert (failure := watchdog.first_failure()) and (failure.rank, failure.cause) == (0, "the true cause")


def test_a_rank_that_is_started_twice_ends():
    store = JobStore(dist.HashStore(), b"key")
    rendezvous.claim_rank(store, 1)
    rendezvous.claim_rank(store, 0)
    with pytest.raises(ConfigError, match=f"rank 1 of this job runs already, on {socket.gethostname()}; wait until"):
        rendezvous.claim_rank(store, 1)


def test_the_key_belongs_to_one_start_of_one_job(tmp_path, monkeypatch):
    start = Launch(1, 4, 1, 4, "h:1", 0, "71.0.0")
    starts = [start, Launch(1, 4, 1, 4, "h:1", 0, "71.0.1"), Launch(1, 4, 1, 4, "h:1", 2, "71.0.0"), Launch(1, 8, 1, 4)]
    keys = {job_key(launch, directory) for launch in starts for directory in (tmp_path / "a", tmp_path / "b")}
    assert len(keys) == 8
    assert job_key(Launch(3, 4, 0, 2, "h:1", 0, "71.0.0"), tmp_path / "a") == job_key(start, tmp_path / "a")
    monkeypatch.setenv(rendezvous.VARIABLE, "secret")
    assert job_key(start, tmp_path / "a") == job_key(start, tmp_path / "c") not in keys
    assert not (tmp_path / "c").exists()


def test_ranks_that_start_together_create_one_secret_that_only_the_user_can_read(tmp_path):
    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(lambda rank: job_key(Launch(), tmp_path / "run"), range(64)))) == 1
    assert (tmp_path / "run" / ".secret").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_cannot_be_used_is_reported_with_its_path_and_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/\.secret: .*; make the directory writable and the file"):
        job_key(Launch(), tmp_path / "file")
    monkeypatch.setattr(rendezvous, "WRITTEN_S", 0.0)
    (tmp_path / ".secret").write_text("abc")
    (tmp_path / ".secret").chmod(0o600)
    with pytest.raises(ConfigError, match=r"\.secret: incomplete; remove it"):
        job_key(Launch(), tmp_path)


@pytest.mark.parametrize("plant", ["readable", "link", "other user", "FIFO", "directory"])
def test_a_secret_that_others_can_know_is_one_line(tmp_path, monkeypatch, plant):
    secret, known = tmp_path / ".secret", tmp_path / "known"
    known.write_text("a" * 64)
    known.chmod(0o600)
    if plant == "link":
        secret.symlink_to(known)
    elif plant == "FIFO":
        os.mkfifo(secret, 0o600)
    elif plant == "directory":
        secret.mkdir(0o700)
    else:
        known.rename(secret)
    if plant == "readable":
        secret.chmod(0o604)
    if plant == "other user":
        monkeypatch.setattr(os, "geteuid", lambda: secret.stat().st_uid + 1)
    with one_line(rf"^{tmp_path}/\.secret: "):
        job_key(Launch(), tmp_path)


def accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 10).close()
    except ConnectionRefusedError:
        return False
    return True


def test_the_store_listens_on_the_jobs_address_only(capfd, monkeypatch):
    port = free_port()
    server = rendezvous.serve("127.0.0.1", port, False, timedelta(seconds=10))
    assert accepts("127.0.0.1", port) and not accepts("127.0.0.2", port)
    assert server.add("a", 1) == 1 and capfd.readouterr().err == ""
    with pytest.raises(OSError, match="in use"):
        rendezvous.serve("127.0.0.1", port, False, timedelta(seconds=10))


@pytest.mark.parametrize(
    ("found", "on_one_host", "listens_everywhere"),
    [
        (["127.0.1.1"], False, True),  # its own name in /etc/hosts: other hosts know another address
        (["127.0.1.1"], True, False),
        (["203.0.113.9"], False, True),  # no address of this node
        (["203.0.113.9", "127.0.0.1"], True, False),
    ],
)
def test_the_store_listens_everywhere_only_if_the_jobs_address_is_unknown(
    capfd, monkeypatch, found, on_one_host, listens_everywhere
):
    port, resolve = free_port(), socket.getaddrinfo
    resolved = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: resolved if host == "n1" else resolve(host, *a, **k)
    )
    server = rendezvous.serve("n1", port, on_one_host, timedelta(seconds=10))
    assert server.add("a", 1) == 1 and accepts("127.0.0.2", port) == listens_everywhere
    assert ("rank 0 listens on all of its interfaces" in capfd.readouterr().err) == listens_everywhere


def test_a_port_whose_process_never_answers_is_reported_in_time(capfd, monkeypatch):
    monkeypatch.setattr(rendezvous, "PORT_S", 0.1)
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.1)
    with socket.create_server(("localhost", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(PortTaken, match=f"MASTER_PORT={port}: another job uses this port of localhost; set"):
            Connector(Launch(1, 2, 1, 2, f"localhost:{port}"), b"key", 60.0).connect()
        with pytest.raises(PortTaken, match=f"MASTER_PORT={port}: another process uses this port"):
            Connector(Launch(0, 2, 0, 2, f"localhost:{port}"), b"key", 60.0).connect()
    for thread in threading.enumerate():
        if thread.name == "connect":
            thread.join()  # torch reports that the process has closed the port


@pytest.mark.parametrize("launcher_serves", [False, True])
def test_a_rank_with_another_secret_of_the_same_start_says_so(monkeypatch, launcher_serves):
    port, serving = free_port(), None
    if launcher_serves:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        serving = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(rendezvous, "ANSWER_S", 1.0)
    ranks = [Launch(rank, 2, 0, 1, f"localhost:{port}", start="71.0.0") for rank in range(2)]
    first, _ = Connector(ranks[0], b"one", 60.0).connect()
    assert Connector(ranks[1], b"one", 60.0).connect()[0].check(["greeting"])
    with pytest.raises(NodeError, match=r"rank 1 on .* has another secret than rank 0; choose a run\.dir"):
        Connector(ranks[1], b"other", 60.0).connect()
    del first, serving
