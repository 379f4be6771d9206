"""The job's store: a view of torch's TCPStore that accepts only values from ranks with the job's key."""

import hmac
from datetime import timedelta

import torch.distributed as dist

_TAG_BYTES = 32


class JobStore(dist.Store):
    """A private store of one job's ranks on a server that other processes may reach.

    The server answers every client. So each key is stored under a keyed hash, which other processes cannot guess. Each
    value has an authentication code, and a value without the right code counts as missing. Counters (``add``) have no
    code.

    Args:
        store: the connection to the server.
        key: the job's key (``identity.job_key``).
    """

    def __init__(self, store: dist.Store, key: bytes):
        super().__init__()
        self._store, self._key = store, key

    def for_process_groups(self) -> dist.Store:
        """Return the store of torch's process groups, whose keys begin with a secret prefix.

        Threads of torch call it, even while Python shuts down, so it must not run Python code. Values have no
        authentication code.
        """
        return dist.PrefixStore(self._name("process groups"), self._store)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._name(key), self._seal(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return a value, and wait for it if necessary. Raises RuntimeError if another job has written it."""
        value = self._open(key, self._store.get(self._name(key)))
        if value is None:
            raise RuntimeError(f"{key} in the store was not written by this job")
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether the store contains all ``keys`` with values of this job."""
        names = [self._name(key) for key in keys]
        if not self._store.check(names):
            return False
        return all(self._open(key, self._store.get(name)) is not None for key, name in zip(keys, names, strict=True))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        names = [self._name(key) for key in keys]
        self._store.wait(names, *([timeout] if timeout else []))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._name(key), value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set ``key`` if its value is ``expected_value``, where empty means a missing key. Return the stored value."""
        name, sealed = self._name(key), self._seal(key, desired_value)
        expected = self._seal(key, expected_value) if expected_value else b""
        value = self._open(key, self._store.compare_set(name, expected, sealed))  # type: ignore[arg-type]
        if value is None:
            self._store.set(name, sealed)  # type: ignore[arg-type]
            return desired_value.encode()
        return value

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._name(key))

    def _name(self, key: str) -> str:
        return hmac.digest(self._key, b"key " + key.encode(), "sha256").hex()

    def _seal(self, key: str, value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else bytes(value)
        return self._tag(key, value) + value

    def _open(self, key: str, sealed: bytes) -> bytes | None:
        tag, value = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
        return value if hmac.compare_digest(tag, self._tag(key, value)) else None

    def _tag(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._key, b"value %d " % len(name) + name + value, "sha256")
