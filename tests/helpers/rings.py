"""Members of a cluster's group in threads of one process."""

import threading

from client_pipeline.runtime.transport.meeting_point import MeetingPoint
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.tls_transport import TlsTransport
from client_pipeline.runtime.transport.transport import GlooTransport, GroupAddress, open_store
from helpers.certificates import certificate

TIMEOUT_S = 100.0


class Threads:
    """Runs functions at once and hands their results over, so that a failure in a thread fails the test."""

    def __init__(self, *functions):
        self.results = [None] * len(functions)
        self.threads = [
            threading.Thread(target=self._run, args=(i, function), daemon=True) for i, function in enumerate(functions)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, i, function):
        try:
            self.results[i] = function()
        except Exception as error:
            self.results[i] = error

    def join(self):
        for thread in self.threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive(), "a member of the group hangs"
        return self.results


def make_ring(size, timeout_s=TIMEOUT_S, tls=None):
    """Transports of all ranks, each made in a thread of its own because joining waits for the others.

    ``tls`` has the files of each rank; None: they speak gloo.
    """
    store = MeetingPoint("127.0.0.1", tls[0], TIMEOUT_S) if tls else open_store("127.0.0.1", TIMEOUT_S)
    address = GroupAddress(
        host="127.0.0.1", port=store.port, generation=1, size=size, timeout_s=timeout_s, join_s=TIMEOUT_S
    )

    def join(rank):
        if tls:
            return TlsTransport(address, rank, tls[rank])
        return GlooTransport(address, rank, store if rank == 0 else None)

    ring = Threads(*(lambda r=rank: join(r) for rank in range(size))).join()
    for member in ring:
        assert not isinstance(member, Exception), member
    return ring


def cluster_tls(folder, names, authority="authority"):
    """Certificates of a cluster's machines, by one authority."""
    issuer = certificate(folder, authority)
    for name in names:
        certificate(folder, name, issuer)
    return [
        NodeTls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / f"{authority}.pem")
        for name in names
    ]
