"""A pipeline without processes: a test says which devices are there, and what is asked is written down."""

from types import SimpleNamespace

from client_pipeline.runtime.transport.faults import KILLED


class FakePipeline:
    """The part of :class:`Pipeline` that :class:`Recovery` uses."""

    def __init__(self, num_devices=3):
        self.name = "collapipe/1/cluster-7"
        self.dead = {}
        """Devices that do not answer, and how; whoever asks finds them lost."""
        self.returns_after = {}
        """Looks at a lost device until it is found to be back."""
        self.asked = []
        self.moved_by_plan = 0
        self.pool = SimpleNamespace(lost={}, patience_s=0.05, runtime=SimpleNamespace(timeout=5.0))
        self.placement = SimpleNamespace(restored_bytes=0, moved_bytes=0, can_move=True, is_committed=True)
        self.deadline = SimpleNamespace(waited_s=0.0, begin=lambda: self.asked.append("deadline"))
        self._num_devices = num_devices

    def apply_plan(self, plan, decoder_wait_s):
        self.asked.append((plan, decoder_wait_s))
        self.placement.moved_bytes += self.moved_by_plan

    def give_up_silent(self):
        self.asked.append("give up silent")
        lost_now = {device: kind for device, kind in self.dead.items() if device not in self.pool.lost}
        self.pool.lost |= lost_now
        return lost_now

    def usable(self, devices):
        for device in [d for d in self.pool.lost if d in self.returns_after]:
            self.returns_after[device] -= 1
            if self.returns_after[device] <= 0:
                del self.pool.lost[device], self.returns_after[device]
                self.dead.pop(device, None)
        return [device for device in devices if device not in self.pool.lost]

    def kill(self, *devices, kind=KILLED):
        self.dead |= dict.fromkeys(devices, kind)

    @property
    def plans(self):
        return [entry[0] for entry in self.asked if isinstance(entry, tuple)]
