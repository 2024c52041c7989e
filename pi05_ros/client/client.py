"""``ActionClient``: what a program calls."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pi05_ros.client.errors import ClientError, ServerUnavailable, Timeout
from pi05_ros.client.http import HttpTransport
from pi05_ros.client.messages import Actions, Observation, make_request, read_reply
from pi05_ros.client.realtime import RealtimeTransport

TRANSPORTS = ("realtime", "http")
POLL_PERIOD = 0.25  # s


class ActionClient:
    """A client of one action server.

    Thread-safe, but one request at a time: a call waits for that of another thread. Programs that want several at once
    (a server batches them) use a client for each.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        timeout: float = 30.0,
        transport: str = "realtime",
        ca_file: str | Path | None = None,
    ) -> None:
        """Connects with the first request, and again when the server was gone.

        url: "http://host:8000", or https. token: what the server was started with.
        timeout: seconds that a call may take, all in all, unless it says otherwise.
        transport: "realtime" (a websocket, faster) or "http". Proxies of the environment are not used by either.
        ca_file: PEM certificates to trust instead of the system's, for https.

        Raises ClientError: url, timeout or transport is none; OSError, ssl.SSLError: ca_file cannot be read.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ClientError(f"url: expected http://HOST:PORT or https://HOST:PORT, got {url!r}.")
        if transport not in TRANSPORTS:
            raise ClientError(f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}.")
        self.url, self.timeout = url.rstrip("/"), _positive(timeout)
        context = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        self._http = HttpTransport(self.url, token, context)
        self._transport: HttpTransport | RealtimeTransport = self._http
        if transport == "realtime":
            self._transport = RealtimeTransport(self.url, token, context)
        self._turn = threading.Lock()
        self._closed = False

    def infer(
        self,
        images: Mapping[str, Any],
        state: Any,
        prompt: str,
        *,
        noise: Any = None,
        seed: int | None = None,
        num_steps: int | None = None,
        image_masks: Mapping[str, bool] | None = None,
        prefix_cache: bool | None = None,
        id: str | None = None,
        stamp: float | None = None,
        timeout: float | None = None,
    ) -> Actions:
        """One action chunk. The arguments of the observation are explained at ``Observation``.

        seed: of the noise; num_steps: denoise steps, None: the checkpoint's. prefix_cache: False neither looks up nor
        stores. timeout: seconds, None: the client's.

        Raises ServerRefusal: the server will not, and names the field; Timeout; ServerUnavailable: no connection, or
        it broke; ObservationError: a value that cannot be sent; ClientError: the client is closed, the reply is none.
        """
        observation = Observation(images, state, prompt, image_masks, noise, stamp, id)
        return self.infer_batch(
            [observation], seed=seed, num_steps=num_steps, prefix_cache=prefix_cache, timeout=timeout
        )[0]

    def infer_batch(
        self,
        observations: Sequence[Observation],
        *,
        seed: int | None = None,
        num_steps: int | None = None,
        prefix_cache: bool | None = None,
        timeout: float | None = None,
    ) -> list[Actions]:
        """``infer`` for several at once, in their order. Options count for all; one that is refused refuses all."""
        if not observations:
            return []
        deadline = time.monotonic() + (self.timeout if timeout is None else _positive(timeout))
        if not self._turn.acquire(timeout=deadline - time.monotonic()):
            raise Timeout("The client is still busy with a request of another thread.")
        try:
            if self._closed:
                raise ClientError("The client is closed.")
            request = make_request(
                observations,
                seed=seed,
                num_steps=num_steps,
                prefix_cache=prefix_cache,
                seconds=max(deadline - time.monotonic(), 1e-3),
            )
            return read_reply(self._transport.exchange(request, deadline), request, len(observations))
        finally:
            self._turn.release()

    def metadata(self, timeout: float | None = None) -> dict[str, Any]:
        """What the policy expects and gives: cameras, joints, units, sizes. Raises as ``infer``."""
        deadline = time.monotonic() + (self.timeout if timeout is None else _positive(timeout))
        return self._http.send("GET", "/v1/actions/metadata", deadline).map()

    def wait_until_ready(self, timeout: float) -> None:
        """Return when the server can answer. It may be starting, or not be there yet.

        Raises Timeout, which says what it was waiting for; ServerRefusal: there will be no policy, the server says why.
        """
        deadline = time.monotonic() + _positive(timeout)
        waits_for = "nothing was heard of it."
        while True:
            pause = POLL_PERIOD
            try:
                response = self._http.send("GET", "/readyz", deadline)
                stage = (response.body or {}).get("status")
                if response.status != 503 or stage == "error":
                    response.map()
                    return
                pause = _seconds(response.headers.get("Retry-After"), POLL_PERIOD)
                waits_for = str((response.body or {}).get("detail") or stage)
            except ServerUnavailable as error:
                waits_for = str(error)
            except Timeout:
                pass
            left = deadline - time.monotonic()
            if left <= 0:
                raise Timeout(f"{self.url} was not ready within {timeout:g} s: {waits_for}")
            time.sleep(min(pause, left))

    def close(self) -> None:
        """A request that waits in another thread raises ServerUnavailable or is still answered. Idempotent."""
        self._closed = True
        self._transport.close()
        with self._turn:  # one that was connecting has opened another connection
            self._transport.close()
        self._http.close()

    def __enter__(self) -> ActionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _positive(timeout: float) -> float:
    if not 0 < timeout < threading.TIMEOUT_MAX:
        raise ClientError(f"timeout: expected seconds, more than 0, got {timeout!r}.")
    return timeout


def _seconds(text: str | None, default: float) -> float:
    """Of a Retry-After header, which may also hold a date."""
    return float(text) if text is not None and text.isdecimal() else default
