"""The server as a thread of the process that has the policy."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from pi05_ros.errors import Pi05Error
from pi05_ros.server.access import Access
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.limits import Limits
from pi05_ros.server.routes import ActionRoutes, on_exception, on_http_exception
from pi05_ros.server.service import ActionService
from pi05_ros.server.sockets import Sockets
from pi05_ros.server.status import status_routes

logger = logging.getLogger(__name__)

PING_SECONDS = 20.0
"""Between pings to a websocket, and what its answer may take: a half-open connection is dropped then."""

KEEP_ALIVE_SECONDS = 30
BACKLOG = 256

TICK = 0.05
"""Seconds between looks at whether the server is to end; uvicorn does the same."""


@dataclass(frozen=True)
class ServerSettings:
    """host, port: where to listen; port 0: any that is free. token: "" lets everybody in.

    origins: of web pages that may call the server, besides its own ("https://lab.example").
    certificate, key: PEM files; both or none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = field(default="", repr=False)
    origins: tuple[str, ...] = ()
    certificate: str = ""
    key: str = ""
    limits: Limits = field(default_factory=Limits)


class Sidecar:
    """HTTP and websockets for a PolicyHost, on a thread of its own. It listens before there is a policy."""

    def __init__(self, host: PolicyHost, settings: ServerSettings) -> None:
        """Binds the address. Raises Pi05Error: it cannot be bound, or the TLS files or origins cannot be used."""
        _check_certificate(settings)
        _check_origins(settings.origins)
        self._socket = _bind(settings.host, settings.port)
        port = self._socket.getsockname()[1]
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{'https' if settings.certificate else 'http'}://{name}:{port}"
        self._service = ActionService(host, settings.limits)
        self._host = host
        self._server = uvicorn.Server(_config(_app(self._service, settings), settings))
        self._thread = threading.Thread(target=self._run, name="pi05-server", daemon=True)
        self._listening, self._closing = threading.Event(), threading.Event()
        self._patience = 0.0
        if not settings.token and not _is_loopback(settings.host):
            logger.warning(
                "The server listens on %s without a token: whoever reaches this machine can see what the cameras see "
                "and use the policy. Set a token, or bind 127.0.0.1.",
                self.url,
            )

    def start(self) -> None:
        """Serve. Returns when requests are answered; Pi05Error if the server ended instead."""
        self._thread.start()
        self._listening.wait()
        if not self._server.started:
            raise Pi05Error(f"The server on {self.url} did not start; the log says why.")
        logger.info("Serving on %s", self.url)

    @property
    def serving(self) -> bool:
        """False before start, after close, and if the server has failed."""
        return self._thread.is_alive()

    @property
    def clients(self) -> dict[str, int]:
        """Clients that are connected now, by kind: "http", "realtime", "openpi"."""
        return self._service.monitor.clients

    def close(self, timeout: float = 5.0) -> None:
        """Begin nothing more, let what is in flight end within half of the timeout, refuse the rest, break off what
        does not even take that, and join. Idempotent.
        """
        self._service.monitor.close()  # whose readers would else be waited for
        self._patience = timeout / 2
        self._server.config.timeout_graceful_shutdown = timeout / 4  # type: ignore[assignment]
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("The server has not ended within %g s.", timeout)
        self._socket.close()
        self._service.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException:
            logger.exception("The server failed.")
        finally:
            self._listening.set()

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._listening.set()
        while not self._closing.is_set() and not serving.done():
            await asyncio.sleep(TICK)
        # First what is in flight: the server library breaks off websockets as soon as it is told to end.
        await self._service.finish(self._patience)
        self._server.should_exit = True
        await serving


def _app(service: ActionService, settings: ServerSettings) -> ASGIApp:
    app = Starlette(
        routes=[
            *ActionRoutes(service).routes(),
            *Sockets(service).routes(),
            *status_routes(service.monitor, settings.limits),
        ],
        exception_handlers={HTTPException: on_http_exception, Exception: on_exception},
    )
    only_local = _is_loopback(settings.host) and not settings.token
    return Access(app, settings.token, settings.origins, settings.limits, only_local)


def _config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,  # its loggers go where the process's go
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        ws_max_size=settings.limits.body,
        ws_max_queue=2,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        ws_per_message_deflate=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=BACKLOG,
        ssl_certfile=settings.certificate or None,
        ssl_keyfile=settings.key or None,
    )


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:  # the system would take a port of as many bits as fit
        raise Pi05Error(f"The server cannot listen on {host}, port {port}: expected 0 to 65535.")
    listener: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        # By its protocol asyncio knows a TCP socket, where it does not hold replies back for more to send.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise Pi05Error(f"The server cannot listen on {host}, port {port}: {error}.") from error
    return listener


def _check_certificate(settings: ServerSettings) -> None:
    if not settings.certificate and not settings.key:
        return
    for name, path in (("certificate", settings.certificate), ("key", settings.key)):
        if not path or not Path(path).is_file():
            raise Pi05Error(f"{name}: expected a PEM file beside the other, got {path!r}.")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.certificate, settings.key)
    except (ssl.SSLError, OSError) as error:
        raise Pi05Error(
            f"certificate, key: {settings.certificate} and {settings.key} cannot be used: {error}"
        ) from error


def _check_origins(origins: tuple[str, ...]) -> None:
    """One that is written otherwise than browsers do would never fit."""
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if not scheme or not host or "/" in host or origin != origin.lower():
            raise Pi05Error(f"origins: expected one as browsers send it, as https://lab.example, got {origin!r}.")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
