"""What stands between Flower and a node's training: messages are unpacked, and the mod that ``[privacy]`` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod

from strategies.flower_internals import ClientAppCallable, Mod
from strategies.grid.parcels import packed_messages, unpack_message

_CLIPPING: dict[str, Mod] = {"client-fixed": fixedclipping_mod, "client-adaptive": adaptiveclipping_mod}


def packed_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let what follows see the records that were sent; its answer is packed where its order was.

    Raises
    ------
    UnfitPack
        If they cannot be unpacked.
    """
    if not unpack_message(message):
        return call_next(message, context)
    (reply,) = packed_messages([call_next(message, context)])
    return reply


def chosen_mods(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Pass a message through the mod that ``[privacy]`` names; through none by default."""
    return mod_of(context.run_config)(message, context, call_next)


def mod_of(flat: Mapping[str, Any]) -> Mod:
    """Return Flower's mod for a run's configuration."""
    if flat.get("privacy.secure-aggregation"):
        from strategies.aggregation.secagg import secure_mod

        return secure_mod
    return _CLIPPING.get(str(flat.get("privacy.update-mechanism")), _pass_through)


def _pass_through(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    return call_next(message, context)
