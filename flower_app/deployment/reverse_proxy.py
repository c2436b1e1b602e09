"""A reverse proxy for HTTP/1.1 under TLS, in which everything that a peer may ask for is bounded.

Both ends of each request are parsed and written anew by ``h11``. A request that two parsers could read in two ways
therefore never reaches the program behind: its length is a number, its path one that the proxy knows, and of its
headers only those that Flower reads are passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import h11

from client_pipeline.link.hosts import HostPort
from strategies.decoder.limits import Allowance

HEAD_BYTES = 16 * 1024
"""Longest request line with its headers."""
LOOKED_AT_BYTES = 64 * 1024
"""Longest body of a request whose answer is looked at, and by default of that answer."""
_PASSED_HEADERS = (b"content-type", b"accept", b"user-agent", b"date")
_FLOWER = b"flwr-"
"""Prefix of the headers by which Flower's programs sign a request and give their version."""
_PIECE_BYTES = 64 * 1024
_REUSED_S = 3.0
"""Longest rest of a connection to the program behind before a new one is made: uvicorn closes it after 5 s [s]."""
_LINGER_S = 2.0
_LOG_LINES, _LOG_LINES_PER_S = 50, 2.0
_PEERS = 1024

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of one proxy."""

    connections: int = 384
    """Most connections of all peers; each may have one more to the program behind."""
    connections_per_peer: int = 64
    handshake_s: float = 10.0
    head_s: float = 10.0
    """Time from the first byte of a request to the end of its headers, and from the handshake to that byte."""
    idle_s: float = 75.0
    """Time between two requests."""
    body_s: float = 20.0
    """Time for a body, beside that of its length at ``bytes_per_s``, and for each piece of an answer."""
    bytes_per_s: int = 32 * 1024
    """Slowest rate at which a body may arrive."""
    body_bytes: int = 64 * 2**20
    """Longest body of a request or an answer. Flower sends arrays in pieces of 5 MiB."""
    pending_bytes_per_peer: int = 128 * 2**20
    """Most bytes of bodies on their way at the same time, of one peer."""
    pending_bytes: int = 512 * 2**20
    requests_per_s: float = 100.0
    """Most requests of one peer, in the long run."""
    request_burst: float = 500.0
    answer_s: float = 60.0
    """Time for the program behind to answer."""


@dataclass(frozen=True)
class Request:
    """Request as received, without its body."""

    peer: str
    """Address of the sender."""
    method: str
    path: str
    headers: Headers
    """Names in lower case."""
    length: int
    """Length of the body [byte]."""

    def header(self, name: bytes) -> bytes:
        """Return a header's value; empty if there is none."""
        return next((value for key, value in self.headers if key == name), b"")


@dataclass(frozen=True)
class Answer:
    """Answer of the program behind, read whole if it is short."""

    status: int
    headers: Headers
    body: bytes | None
    """Body; None if it is too long to be looked at."""


class Refusal(Exception):
    """Refusal of a request, with a status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _End:
    """One end of a connection: HTTP over a stream."""

    def __init__(
        self,
        role: type[h11.CLIENT] | type[h11.SERVER],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.http = h11.Connection(role, max_incomplete_event_size=HEAD_BYTES)
        self.reader, self.writer = reader, writer
        self.used_at = time.monotonic()

    async def receive(self) -> None:
        self.http.receive_data(await self.reader.read(_PIECE_BYTES))

    async def event(self) -> h11.Event:
        while (event := self.http.next_event()) is h11.NEED_DATA:
            await self.receive()
        if not isinstance(event, h11.Event):
            raise h11.RemoteProtocolError("more was sent than one message")
        return event

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self.event(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionError("the message is cut")

    async def send(self, event: h11.Event) -> None:
        if data := self.http.send(event):
            self.writer.write(data)
            await self.writer.drain()

    async def finish(self) -> None:
        # Asyncio leaves a writer without a transport when a connection goes during its handshake.
        with contextlib.suppress(OSError, TimeoutError, AttributeError, asyncio.CancelledError):
            async with asyncio.timeout(_LINGER_S):
                self.writer.close()
                await self.writer.wait_closed()
        with contextlib.suppress(AttributeError):
            self.writer.transport.abort()


class ReverseProxy:
    """Proxy that passes requests on to one program; a subclass admits them, and may look at answers."""

    looked_at_bytes = LOOKED_AT_BYTES
    """Longest body of an answer that :meth:`look` sees; of a longer one it sees the head."""

    def __init__(
        self,
        behind: HostPort,
        behind_tls: ssl.SSLContext,
        tls: ssl.SSLContext,
        bounds: Bounds,
        say: Callable[[str], None],
    ) -> None:
        self._behind, self._behind_tls, self._tls, self.bounds = behind, behind_tls, tls, bounds
        self._say = say
        self._log_lines = Allowance(_LOG_LINES_PER_S, _LOG_LINES)
        self._num_unsaid = 0
        self._connections: dict[asyncio.StreamWriter, str] = {}
        """Peer of each connection, the oldest first."""
        self._pending_bytes: Counter[str] = Counter()
        self._rates: OrderedDict[str, Allowance] = OrderedDict()

    @property
    def num_connections(self) -> int:
        """Connections of all peers."""
        return len(self._connections)

    def admit(self, request: Request) -> None:
        """Raise :class:`Refusal` for a request that is not passed on."""

    def done(self, request: Request, status: int) -> None:
        """Note the end of a request that was admitted; status 0 if no answer came."""

    def is_looked_at(self, request: Request) -> bool:
        """Return whether :meth:`look` is to see the answer."""
        return False

    async def look(self, request: Request, answer: Answer, ask_again: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return what the peer receives in place of an answer; without a body, that of the program behind."""
        return answer

    async def serve(self, address: HostPort, ready: Callable[[int], None] = lambda port: None) -> None:
        """Serve until the task is cancelled.

        Parameters
        ----------
        address : where to listen; port 0 takes any that is free
        ready : called with the port
        """
        server = await asyncio.start_server(self._attend, address.bare_host, address.port, backlog=256)
        async with server:
            ready(server.sockets[0].getsockname()[1])
            await server.serve_forever()

    def refuse(self, peer: str, what: str, status: int, reason: str) -> None:
        """Log a refusal, unless too many were logged just now."""
        if self._log_lines.empty:
            self._num_unsaid += 1
            return
        self._log_lines.take()
        unsaid = f" ({self._num_unsaid} refusals before it were not logged)" if self._num_unsaid else ""
        self._num_unsaid = 0
        self._say(f"refused: {peer}: {what}: {status or 'closed'}: {reason}{unsaid}")

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("unknown",))[0])
        inbound, behind = _End(h11.SERVER, reader, writer), _Behind(self)
        try:
            self._enter(peer, writer)
            # Only now: a peer that connects and says nothing is counted, too.
            await writer.start_tls(self._tls, ssl_handshake_timeout=self.bounds.handshake_s)
            wait_s = self.bounds.head_s
            while await self._exchange(peer, inbound, behind, wait_s):
                wait_s = self.bounds.idle_s
        except Refusal as refusal:
            self.refuse(peer, "connection", 0, refusal.reason)
        except (OSError, EOFError, TimeoutError, h11.ProtocolError, asyncio.CancelledError):
            # No TLS, no request, nobody there any more, or the end of the proxy.
            pass
        finally:
            self._connections.pop(writer, None)
            behind.close()
            await inbound.finish()

    def _enter(self, peer: str, writer: asyncio.StreamWriter) -> None:
        """Take a connection in, if need be in place of the oldest of the peer that has most."""
        peers = Counter(self._connections.values())
        if peers[peer] >= self.bounds.connections_per_peer:
            raise Refusal(0, f"more than {self.bounds.connections_per_peer} connections of one address")
        if len(self._connections) >= self.bounds.connections:
            crowded = max(peers, key=lambda name: peers[name])
            oldest = next(writer for writer, name in self._connections.items() if name == crowded)
            del self._connections[oldest]
            oldest.transport.abort()
            self.refuse(crowded, "connection", 0, f"more than {self.bounds.connections} connections; the oldest goes")
        self._connections[writer] = peer

    async def _exchange(self, peer: str, inbound: _End, behind: _Behind, wait_s: float) -> bool:
        """Answer one request; returns whether another may follow."""
        what = "request"
        try:
            head = await self._head(inbound, wait_s)
            if head is None:
                return False
            what = f"{head.method.decode('ascii')} {head.target[:100]!r}"
            request = self._read(peer, head)
            self._pending_bytes[peer] += request.length
            try:
                await self._pass_on(request, inbound, behind)
            finally:
                self._pending_bytes[peer] -= request.length
                # A counter keeps its zeros.
                self._pending_bytes += Counter()
        except Refusal as refusal:
            self.refuse(peer, what, refusal.status, refusal.reason)
            await self._answer_refusal(inbound, refusal)
            return False
        except h11.RemoteProtocolError as error:
            self.refuse(peer, what, error.error_status_hint, str(error))
            await self._answer_refusal(inbound, Refusal(error.error_status_hint, "no HTTP/1.1 request"))
            return False
        if inbound.http.our_state is not h11.DONE or inbound.http.their_state is not h11.DONE:
            return False
        inbound.http.start_next_cycle()
        return True

    async def _head(self, inbound: _End, wait_s: float) -> h11.Request | None:
        if not inbound.http.trailing_data[0]:
            async with asyncio.timeout(wait_s):
                await inbound.receive()
        try:
            async with asyncio.timeout(self.bounds.head_s):
                event = await inbound.event()
        except TimeoutError as error:
            raise Refusal(408, f"no end of the headers within {self.bounds.head_s:g} s") from error
        return event if isinstance(event, h11.Request) else None

    def _read(self, peer: str, head: h11.Request) -> Request:
        headers = list(head.headers)
        names = {name for name, _ in headers}
        # h11 holds those to its limit that come in pieces; one that comes at once is whole before it looks.
        if len(head.target) + sum(len(name) + len(value) for name, value in headers) > HEAD_BYTES:
            raise Refusal(431, f"expected a request line and headers of at most {HEAD_BYTES} bytes")
        if head.http_version != b"1.1":
            raise Refusal(505, "expected HTTP/1.1")
        if b"transfer-encoding" in names:
            raise Refusal(411, "expected a body with a Content-Length, found Transfer-Encoding")
        if b"upgrade" in names:
            raise Refusal(400, "no other protocol is spoken here")
        if b"expect" in names:
            raise Refusal(417, "no expectation is met here")
        length = next((int(value) for name, value in headers if name == b"content-length"), 0)
        request = Request(peer, head.method.decode("ascii"), head.target.decode("ascii"), headers, length)
        if length > self.bounds.body_bytes:
            raise Refusal(413, f"a body of {length} bytes; expected at most {self.bounds.body_bytes}")
        if self.is_looked_at(request) and length > LOOKED_AT_BYTES:
            raise Refusal(413, f"a body of {length} bytes; expected at most {LOOKED_AT_BYTES} at this path")
        rate = self._rates.setdefault(peer, Allowance(self.bounds.requests_per_s, self.bounds.request_burst))
        self._rates.move_to_end(peer)
        if len(self._rates) > _PEERS:
            self._rates.popitem(last=False)
        # Flower's programs ask again after 503, and after no other status of these.
        if rate.empty:
            raise Refusal(503, f"more than {self.bounds.requests_per_s:g} requests a second")
        rate.take()
        if (
            self._pending_bytes[peer] + length > self.bounds.pending_bytes_per_peer
            or self._pending_bytes.total() + length > self.bounds.pending_bytes
        ):
            raise Refusal(503, "too many bytes are on their way")
        return request

    async def _pass_on(self, request: Request, inbound: _End, behind: _Behind) -> None:
        body_s = self.bounds.body_s + request.length / self.bounds.bytes_per_s
        try:
            async with asyncio.timeout(body_s):
                try:
                    self.admit(request)
                except Refusal:
                    # A sender that still writes would not read the answer.
                    async for _ in inbound.body():
                        pass
                    raise
                status = 0
                try:
                    if self.is_looked_at(request):
                        body = b"".join([piece async for piece in inbound.body()])
                    else:
                        await behind.send(request, inbound.body())
                except BaseException:
                    self.done(request, 0)
                    raise
        except TimeoutError as error:
            raise Refusal(408, f"no end of the body within {body_s:.0f} s") from error
        try:
            if self.is_looked_at(request):

                async def ask() -> Answer:
                    if inbound.reader.at_eof():
                        raise ConnectionError("nobody waits for the answer any more")
                    await behind.send(request, _once(body))
                    return await behind.answer(self.looked_at_bytes)

                answer = await self.look(request, await ask(), ask)
            else:
                answer = await behind.answer(0)
            # Before the answer is on its way: the peer may hang up now, and what it pushed has been taken.
            status = answer.status
            if answer.body is None:
                await behind.stream(answer, inbound)
            else:
                await self._send_answer(inbound, answer.status, answer.headers, answer.body)
        finally:
            self.done(request, status)

    async def _send_answer(self, inbound: _End, status: int, headers: Headers, body: bytes) -> None:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        async with asyncio.timeout(self.bounds.body_s + len(body) / self.bounds.bytes_per_s):
            await inbound.send(h11.Response(status_code=status, headers=headers))
            await inbound.send(h11.Data(data=body))
            await inbound.send(h11.EndOfMessage())

    async def _answer_refusal(self, inbound: _End, refusal: Refusal) -> None:
        """Send the reason, and read on for a moment: a connection that is closed over unread bytes loses the answer."""
        if inbound.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
        with contextlib.suppress(OSError, EOFError, TimeoutError, h11.ProtocolError):
            await self._send_answer(inbound, refusal.status, headers, f"{refusal.reason}\n".encode())
            async with asyncio.timeout(_LINGER_S):
                while await inbound.reader.read(_PIECE_BYTES):
                    pass


class _Behind:
    """The connection of one peer's connection to the program behind."""

    def __init__(self, proxy: ReverseProxy) -> None:
        self._proxy, self._bounds = proxy, proxy.bounds
        self._end: _End | None = None
        self._length: int | None = None
        """Length of the body of the answer that was read last; None if it has none."""

    async def send(self, request: Request, body: AsyncIterator[bytes]) -> None:
        """Send a request with its body."""
        end = await self._connected()
        headers = [(b"host", str(self._proxy._behind).encode()), *_flower_headers(request.headers)]
        headers.append((b"content-length", str(request.length).encode()))
        try:
            await end.send(h11.Request(method=request.method, target=request.path, headers=headers))
            async for piece in body:
                await end.send(h11.Data(data=piece))
            await end.send(h11.EndOfMessage())
        except h11.LocalProtocolError as error:
            raise ConnectionError("the body has another length than was said") from error

    async def answer(self, most: int) -> Answer:
        """Read an answer; its body if it has ``most`` bytes or fewer, else :meth:`stream` passes that on."""
        head = await self._head()
        headers = _flower_headers(list(head.headers))
        self._length = next((int(value) for name, value in head.headers if name == b"content-length"), None)
        if self._length is None or self._length > most:
            return Answer(head.status_code, headers, None)
        return Answer(head.status_code, headers, b"".join([piece async for piece in self._pieces()]))

    async def stream(self, answer: Answer, inbound: _End) -> None:
        """Pass the body of an answer on piece by piece."""
        length = [] if self._length is None else [(b"content-length", str(self._length).encode())]
        async with asyncio.timeout(self._bounds.body_s):
            await inbound.send(h11.Response(status_code=answer.status, headers=[*answer.headers, *length]))
        size = 0
        async for piece in self._pieces():
            if (size := size + len(piece)) > self._bounds.body_bytes:
                raise ConnectionError("the answer is too long")
            async with asyncio.timeout(self._bounds.body_s):
                await inbound.send(h11.Data(data=piece))
        await inbound.send(h11.EndOfMessage())

    def close(self) -> None:
        """Close the connection."""
        if self._end is not None:
            self._end.writer.transport.abort()
            self._end = None

    async def _connected(self) -> _End:
        end = self._end
        if (
            end is not None
            and end.http.our_state is h11.DONE
            and end.http.their_state is h11.DONE
            and not end.reader.at_eof()
            and time.monotonic() - end.used_at < _REUSED_S
        ):
            end.http.start_next_cycle()
            return end
        self.close()
        try:
            async with asyncio.timeout(self._bounds.handshake_s):
                place = self._proxy._behind
                reader, writer = await asyncio.open_connection(
                    place.bare_host, place.port, ssl=self._proxy._behind_tls, server_hostname=place.bare_host
                )
        except (OSError, TimeoutError) as error:
            raise Refusal(503, f"no connection to {self._proxy._behind}: {error or 'no answer'}") from error
        self._end = _End(h11.CLIENT, reader, writer)
        return self._end

    async def _head(self) -> h11.Response:
        assert self._end is not None
        try:
            async with asyncio.timeout(self._bounds.answer_s):
                while not isinstance(event := await self._end.event(), h11.Response):
                    if not isinstance(event, h11.InformationalResponse):
                        raise ConnectionError("no answer")
        except TimeoutError as error:
            raise Refusal(504, f"{self._proxy._behind} has not answered in time") from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise Refusal(502, f"{self._proxy._behind} has not answered: {error}") from error
        return event

    async def _pieces(self) -> AsyncIterator[bytes]:
        assert self._end is not None
        pieces = self._end.body()
        while True:
            try:
                async with asyncio.timeout(self._bounds.body_s):
                    piece = await anext(pieces, b"")
            except h11.RemoteProtocolError as error:
                raise ConnectionError("the answer is cut") from error
            if not piece:
                self._end.used_at = time.monotonic()
                return
            yield piece


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _flower_headers(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name in _PASSED_HEADERS or name.startswith(_FLOWER)]


def server_tls(certificate: str, key: str) -> ssl.SSLContext:
    """Return the settings of a proxy's own end: TLS 1.3 alone, and no session is resumed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.load_cert_chain(certificate, key)
    return context


def client_tls(authority: str) -> ssl.SSLContext:
    """Return the settings of the other end: a certificate of this authority for the address that was called."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    return context
