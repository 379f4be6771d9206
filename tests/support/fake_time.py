"""A source of time for virtual devices."""


class FakeTime:
    """A source of time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 4

    def sleep(self, seconds: float) -> None:
        self.now += seconds
