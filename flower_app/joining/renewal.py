"""A box that has joined asks now and then whether it still is of its cluster, and by which secret and certificates.

When another box of the cluster is revoked, the edge server gives the others new ones: their programs start again with
these, and who was revoked has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from client_pipeline.link.hosts import split_address
from flower_app.joining.join_call import JoinRefused, NotThere, ask
from flower_app.joining.join_folder import APPROVED, REVOKED
from flower_app.joining.newcomer import BoxFolder

POLL_S = 5.0
"""Between two questions [s]."""


class MembershipWatch:
    """Asks once when it is made, and then in a thread of its own until :meth:`stop`.

    Parameters
    ----------
    folder : what the box keeps; gets what is new
    say : told when somebody who is not the edge server answers
    poll_s : between two questions [s]
    """

    def __init__(self, folder: BoxFolder, say: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self._folder, self._say, self._poll_s = folder, say, poll_s
        self._authority = folder.files.ca.read_text(encoding="ascii")
        address = str(folder.box().get("joining", ""))
        # A box that joined by an older release does not know where to ask.
        self._service = split_address("joining", address) if address else None
        self._ends = threading.Event()
        self._reason = ""
        self.is_renewed = False
        """Whether the folder has got new secrets."""
        # Whoever was revoked while it was off starts nothing.
        if not self.look():
            threading.Thread(target=self._follow, name="membership", daemon=True).start()

    def reason(self) -> str:
        """Why the box's programs have to end; empty as long as nothing has changed."""
        return self._reason

    def look(self) -> str:
        """Ask once; returns :meth:`reason`."""
        if self._service is None:
            return self._reason
        try:
            answer = ask(self._service, self._folder.renewal_question(), self._authority)
        except NotThere:
            # The edge server may be down for as long as it likes: who is here goes on.
            return self._reason
        except JoinRefused as error:
            self._say(f"warning: {error}")
            return self._reason
        if answer["status"] == REVOKED:
            self._reason = "this box was revoked on the edge server"
        elif answer["status"] == APPROVED and self._folder.keep_of_cluster(answer):
            self.is_renewed = True
            self._reason = "the boxes of this cluster have a new secret, as one of them was revoked"
        return self._reason

    def stop(self) -> None:
        """Ask no longer."""
        self._ends.set()

    def _follow(self) -> None:
        while not self._ends.wait(self._poll_s) and not self.look():
            pass
