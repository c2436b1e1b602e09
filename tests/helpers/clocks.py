"""A clock that a test moves."""


class Clock:
    """Stands still unless somebody sleeps or a test moves it; set it in the place of a module's ``time``."""

    def __init__(self, now=100.0):
        self.now = now
        self.slept = []

    def monotonic(self):
        return self.now

    time = perf_counter = monotonic

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds
        self.slept.append(seconds)
