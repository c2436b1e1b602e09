"""Proxy of a control unit: the SuperNode reaches the server through it, and receives no app that may not run here.

``python -m flower_app.deployment.app_proxy HOST:PORT SERVER:PORT AUTHORITY FOLDER DIGEST ...`` listens on the loopback.
``DIGEST`` are those of the apps that may run (:func:`~flower_app.deployment.app_digest.app_digest`), the first that of
the release that is installed here. ``FOLDER`` has what :func:`write_credentials` makes.

The proxy signs an app that may run, by a key of its own; the SuperNode takes no other signature
(``--trusted-entities``). It answers the order of any other app with an error, before a file of that app is unpacked.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from client_pipeline.link.hosts import split_address
from flower_app.deployment.app_digest import MAX_UNPACKED_BYTES, app_digest
from flower_app.deployment.certificate_authority import Authority, write_public, write_secret
from flower_app.deployment.reverse_proxy import Answer, Bounds, Refusal, Request, ReverseProxy, client_tls, server_tls

GET_APP = "/v1/fleet/get-fab"
KEY_ID = "collapipe"
"""Name of the proxy's key among the SuperNode's trusted entities."""
_DAYS = 3650


class ProxyFiles:
    """Files of one start of a control unit's proxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate, self.key, self.authority = folder / "proxy.pem", folder / "proxy.key", folder / "ca.pem"
        self.signing_key, self.trusted = folder / "signing.key", folder / "trusted.yaml"


def write_credentials(folder: Path, host: str) -> ProxyFiles:
    """Make a certificate for the proxy's address, and the key by which it signs apps."""
    files, authority = ProxyFiles(folder), Authority.create(_DAYS, "CollaPipe proxy")
    certificate, key = authority.issue_server([host], _DAYS)
    write_public(files.authority, authority.pem)
    write_public(files.certificate, certificate)
    write_secret(files.key, key)
    signing = ed25519.Ed25519PrivateKey.generate()
    write_secret(files.signing_key, signing.private_bytes_raw())
    public = signing.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_public(files.trusted, f"{KEY_ID}: {public.decode('ascii')}\n".encode())
    return files


class AppProxy(ReverseProxy):
    """Proxy that passes everything on, and signs the apps that may run.

    Parameters
    ----------
    digests : digests of the apps that may run; the first is that of the release that is installed here
    signing_key : key of the proxy
    options : those of :class:`ReverseProxy`
    """

    looked_at_bytes = MAX_UNPACKED_BYTES

    def __init__(self, digests: Sequence[str], signing_key: ed25519.Ed25519PrivateKey, **options: Any) -> None:
        super().__init__(**options)
        self._digests, self._signing_key = digests, signing_key

    def is_looked_at(self, request: Request) -> bool:
        """See ReverseProxy."""
        return request.path == GET_APP

    async def look(self, request: Request, answer: Answer, ask_again: Callable[[], Awaitable[Answer]]) -> Answer:
        """Sign an app that may run; another is passed on without its files, and without a signature."""
        if answer.status != 200:
            return answer
        if answer.body is None:
            raise Refusal(502, f"the app has more than {self.looked_at_bytes} bytes")
        try:
            content = bytes(APP_ANSWER.FromString(answer.body).fab.content)
        except DecodeError as error:
            raise Refusal(502, "the server's answer is no app") from error
        app = APP_ANSWER()
        app.fab.hash_str = hashlib.sha256(content).hexdigest()
        app.fab.verifications["valid_license"] = "yes"
        if reason := self._reason(content):
            self.refuse(request.peer, "app", 403, reason)
        else:
            app.fab.content = content
            # As Flower's SuperNode verifies: eight bytes of time before the digest.
            signed_at = int(time.time())
            signature = self._signing_key.sign(signed_at.to_bytes(8, "big") + hashlib.sha256(content).digest())
            app.fab.verifications[KEY_ID] = json.dumps(
                {"signed_at": signed_at, "signature": base64.urlsafe_b64encode(signature).decode("ascii")}
            )
        return Answer(200, answer.headers, app.SerializeToString())

    def _reason(self, content: bytes) -> str:
        try:
            digest = app_digest(content)
        except ValueError as error:
            return f"this control unit does not run this app: {error}"
        if digest in self._digests:
            return ""
        return (
            f"this control unit does not run this app, whose digest is {digest}: it runs its own release's, "
            f"{self._digests[0]}; install the same release on the server and all control units, or, if you have read "
            f"that app's code, start the control unit with collapipe join --allow-app {digest}"
        )


_SCHEMA = """
name: "collapipe/fab.proto" package: "collapipe" syntax: "proto3"
message_type {
  name: "Fab"
  field { name: "hash_str" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "content" number: 2 type: TYPE_BYTES label: LABEL_OPTIONAL }
  field {
    name: "verifications" number: 3 type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".collapipe.Fab.VerificationsEntry"
  }
  nested_type {
    name: "VerificationsEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
  }
}
message_type {
  name: "GetFabResponse"
  field { name: "fab" number: 1 type: TYPE_MESSAGE label: LABEL_OPTIONAL type_name: ".collapipe.Fab" }
}
"""
"""Flower's ``GetFabResponse``: importing that would keep all of Flower in this process."""
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
APP_ANSWER: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName("collapipe.GetFabResponse"))
"""Class of the message that holds an app: ``fab`` with ``hash_str``, ``content`` and ``verifications``."""


def main() -> None:
    """Serve until told to end."""
    address, server, authority, folder, *digests = sys.argv[1:]
    files = ProxyFiles(Path(folder))
    print(f"apps that may run here: {', '.join(digests)}", flush=True)
    proxy = AppProxy(
        digests,
        ed25519.Ed25519PrivateKey.from_private_bytes(files.signing_key.read_bytes()),
        behind=split_address("app_proxy", server),
        behind_tls=client_tls(authority),
        tls=server_tls(str(files.certificate), str(files.key)),
        bounds=Bounds(),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    asyncio.run(proxy.serve(split_address("app_proxy", address)))


if __name__ == "__main__":
    main()
