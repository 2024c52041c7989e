"""Who may come in: tokens, browsers' origins, and how many at a time. ASGI middleware around everything else."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pi05_ros.errors import Pi05Error
from pi05_ros.server.errors import RequestError
from pi05_ros.server.limits import Limits

TOKEN_VARIABLE = "PI05_ROS_TOKEN"

OPEN_PATHS = ("/", "/docs", "/healthz", "/readyz", "/favicon.ico")
"""Without a token: they tell nothing of the robot. So do the page's own files, below /page/."""


def read_token(file: str | Path, option: str) -> str:
    """What the file holds; without a file, what the environment variable says; "" for none.

    option: what the file was given by. Raises Pi05Error that names it.
    """
    if not str(file):
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Pi05Error(f"{option}: {file} cannot be read: {error}") from error
    if not token:
        raise Pi05Error(f"{option}: {file} is empty; expected the token that clients send.")
    return token


class Access:
    """Middleware. token: "" lets everybody in. origins: of browsers, besides the server's own pages.

    only_local: refuse requests that name this machine by anything but localhost or an address.
    """

    def __init__(self, app: ASGIApp, token: str, origins: tuple[str, ...], limits: Limits, only_local: bool) -> None:
        self._app, self._token, self._origins, self._limits = app, token, origins, limits
        self._only_local = only_local
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except RequestError as error:
            await refuse(scope, receive, send, error)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_origin(headers)
        path = scope["path"]
        websocket = scope["type"] == "websocket"
        if websocket or not (path in OPEN_PATHS or path.startswith("/page/")):
            self._check_token(headers)
        if self._open >= self._limits.connections and path not in ("/healthz", "/readyz"):
            raise RequestError(503, f"The server has {self._open} clients, which is its limit.", code="busy")

    def _check_token(self, headers: Mapping[str, str]) -> None:
        if not self._token:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        known = kind.lower() in ("bearer", "api-key")
        if not (known and hmac.compare_digest(given.strip().encode("latin-1"), self._token.encode())):
            raise RequestError(
                401, 'A token is needed: header "Authorization: Bearer TOKEN" or "Authorization: Api-Key TOKEN".'
            )

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """A web page of somebody else, open in a browser here, may not talk to the robot behind its user's back.

        Nor may one whose name was made to point here, which the browser takes for a page of this server.
        """
        host = headers.get("host", "")
        if self._only_local and not _is_local(_split(f"//{host}").hostname or ""):
            raise RequestError(403, f"Host: expected localhost or an address, got {host[:100]!r}.", "Host")
        origin = headers.get("origin")
        if origin is None or origin in self._origins or _split(origin).netloc == host:
            return
        raise RequestError(403, f"Pages of {origin[:100]} may not call this server: they are not among its origins.")


def _split(url: str) -> SplitResult:
    """Of what is no URL, as "http://[", nothing: it is nobody's."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def _is_local(hostname: str) -> bool:
    """localhost or an address: no name that somebody could point elsewhere."""
    if hostname == "localhost" or hostname.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        return False
    return True


async def refuse(scope: Scope, receive: Receive, send: Send, error: RequestError) -> None:
    """Answer with the error, before anything of the request is read."""
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    prefix = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": error.message[:120]})
            return
        await receive()
        prefix = "websocket.http"
    await send({"type": f"{prefix}.response.start", "status": error.status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})
