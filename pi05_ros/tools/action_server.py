"""``action_server``: the policy over HTTP and websockets, without ROS."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi05_ros.errors import Pi05Error
from pi05_ros.tools.command_line import progress_bar, run

if TYPE_CHECKING:
    from pi05_ros.server.sidecar import ServerSettings

DESCRIPTION = """\
Serve a checkpoint over HTTP (/v1/actions/generations, /v1/actions/metadata), the realtime websocket
(/v1/actions/realtime) and OpenPI's websocket (/openpi/policy, /). A page at / shows what it does."""

EPILOG = """\
example:
  make_checkpoint --preset tiny --output /tmp/tiny
  action_server --checkpoint /tmp/tiny --robot aloha_sim --device cpu
then: curl http://127.0.0.1:8000/v1/actions/metadata, and http://127.0.0.1:8000/ in a browser.

A token comes from --token-file or the environment variable PI05_ROS_TOKEN; on the command line (--token) everybody on
this machine can read it."""

CLOSE_TIMEOUT = 3.0
"""Seconds that a running inference gets to end."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="action_server",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_policy_options(parser)
    _add_server_options(parser)
    run(parser, serve)


def serve(arguments: argparse.Namespace) -> None:
    """Listen, load, warm up, and serve until SIGINT or SIGTERM. Raises Pi05Error."""
    from pi05_ros.policy import Policy
    from pi05_ros.server.host import PolicyHost
    from pi05_ros.server.sidecar import Sidecar

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def unless_stopped(draw: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def progress(done: int, total: int) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            draw(done, total)

        return progress

    host = PolicyHost()
    sidecar = Sidecar(host, _settings(arguments))  # an address that is taken is known before weights are read
    sidecar.start()
    policy: Policy | None = None
    try:
        host.tell("loading", str(arguments.checkpoint))
        with progress_bar("Loading", "tensors") as draw:
            policy = Policy.from_checkpoint(
                arguments.checkpoint,
                arguments.device,
                arguments.precision,
                None if arguments.robot == "none" else arguments.robot,
                **_policy_options(arguments),
                progress=unless_stopped(draw),
            )
        if policy.compiles and not arguments.no_warm_up:
            host.tell("warming_up", "Kernels are compiled and graphs captured.")
            with progress_bar("Warming up", "batches") as draw:
                batches = range(1, policy.engine.max_batch + 1)
                policy.warm_up(batches=batches, progress=unless_stopped(draw))
        host.serve(policy)
        logging.getLogger(__name__).info("Ready: %s", sidecar.url)
        stop.wait()
    except KeyboardInterrupt:
        pass
    finally:
        host.tell("closed")
        sidecar.close()
        if policy is not None:
            policy.close(timeout=CLOSE_TIMEOUT)


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policy")
    group.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="LeRobot or openpi layout")
    group.add_argument(
        "--robot",
        default="aloha_ros2",
        help="profile by name or path (default: aloha_ros2); raw: model space in and out; none: the checkpoint's own "
        "features",
    )
    group.add_argument("--device", default="auto", help="auto, cuda, cuda:1 or cpu (default: auto)")
    group.add_argument("--precision", default="openpi", help="openpi, float32, bfloat16 or fp8 (default: openpi)")
    group.add_argument("--compile-mode", default="graphs", help="graphs, eager or plain (default: graphs)")
    group.add_argument("--prefix-cache", type=int, default=8, metavar="N", help="prefixes kept (default: 8; 0: none)")
    group.add_argument("--batching-max-size", type=int, default=4, metavar="N", help="requests in a batch (default: 4)")
    group.add_argument(
        "--batching-delay-ms", type=float, default=3.0, metavar="MS", help="that a batch waits for company (default: 3)"
    )
    group.add_argument("--adapt-to-pi", choices=("true", "false"), help="for openpi checkpoints on an ALOHA")
    group.add_argument("--tokenizer", metavar="FILE", help="instead of the one in the checkpoint")
    group.add_argument("--norm-stats", metavar="FILE", help="instead of the checkpoint's statistics")
    group.add_argument("--normalization", choices=("none",), help="none: states and actions stay as they are")
    group.add_argument("--no-warm-up", action="store_true", help="on a GPU: the first requests wait for compilation")


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any that is free")
    group.add_argument("--token", default="", help="that clients must send; see below")
    group.add_argument("--token-file", default="", metavar="FILE", help="file with the token")
    group.add_argument(
        "--origin", action="append", default=[], metavar="URL", help="web pages that may call the server; repeatable"
    )
    group.add_argument("--certificate", default="", metavar="FILE", help="TLS certificate, PEM")
    group.add_argument("--key", default="", metavar="FILE", help="its key, PEM")
    group.add_argument("--max-connections", type=int, default=256, metavar="N", help="default: 256")
    group.add_argument("--max-body-mib", type=int, default=64, metavar="MIB", help="of one request (default: 64)")
    group.add_argument(
        "--request-seconds", type=float, default=60.0, metavar="S", help="a request waits for its turn (default: 60)"
    )


def _policy_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "compile_mode": arguments.compile_mode,
        "prefix_cache": arguments.prefix_cache,
        "max_batch": arguments.batching_max_size,
        "batch_delay_ms": arguments.batching_delay_ms,
        "adapt_to_pi": None if arguments.adapt_to_pi is None else arguments.adapt_to_pi == "true",
        "tokenizer": arguments.tokenizer,
        "norm_stats": arguments.norm_stats,
        "normalization": arguments.normalization,
    }


def _settings(arguments: argparse.Namespace) -> ServerSettings:
    from pi05_ros.server.access import read_token
    from pi05_ros.server.limits import Limits
    from pi05_ros.server.sidecar import ServerSettings

    for name, value in (
        ("--max-connections", arguments.max_connections),
        ("--max-body-mib", arguments.max_body_mib),
        ("--request-seconds", arguments.request_seconds),
    ):
        if not value > 0:
            raise Pi05Error(f"{name}: expected more than 0, got {value}.")
    limits = replace(
        Limits(),
        body=arguments.max_body_mib << 20,
        connections=arguments.max_connections,
        request_seconds=arguments.request_seconds,
    )
    return ServerSettings(
        arguments.host,
        arguments.port,
        arguments.token or read_token(arguments.token_file, "--token-file"),
        tuple(arguments.origin),
        arguments.certificate,
        arguments.key,
        limits,
    )


if __name__ == "__main__":
    main()
