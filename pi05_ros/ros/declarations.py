"""What parameters the policy node has: one table, from which they are declared, documented and made launch arguments.

Launch files and the documentation read it too, so it imports neither torch nor rclpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pi05_ros.robot.execution import STRATEGIES


@dataclass(frozen=True)
class Spec:
    """A parameter: default, what it means, and what it may be.

    choices: legal values. low, high: bounds of a number. running: may be changed after configure.
    """

    name: str
    default: Any
    description: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    running: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        return (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)

    @property
    def words(self) -> tuple[str, ...]:
        """What may be written on a command line, where only some words may."""
        return ("true", "false", "True", "False") if isinstance(self.default, bool) else self.choices

    @property
    def legal(self) -> str:
        """The choices or the range, as a user reads them; "" if any value of the default's type may be."""
        if self.choices:
            return ", ".join(choice or "(empty)" for choice in self.choices)
        if isinstance(self.default, bool):
            return "true, false"
        if self.low is None or self.high is None:
            return ""
        return f"{self.low} or more" if self.high > 2**31 else f"{self.low} to {self.high}"

    def parse(self, text: str) -> Any:
        """The value that a command line gives as text. Raises ValueError: it is not of the default's type."""
        kind = type(self.default)
        if kind is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError(f"{self.name}: expected true or false, got {text!r}.")
            return text.lower() == "true"
        try:
            return kind(text)
        except ValueError as error:
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"{self.name}: expected {wanted}, got {text!r}.") from error


PARAMETERS = (
    Spec("checkpoint", "", "Folder (or .safetensors file) of a checkpoint in LeRobot or openpi layout."),
    Spec("robot", "aloha_ros2", "Robot profile: a name in config/robots or the path of a YAML file."),
    Spec("prompt", "", "The instruction. ~/prompt replaces it; while there is none, the node waits.", running=True),
    Spec("device", "auto", "auto (CUDA if there is a GPU), cuda, cuda:<index> or cpu."),
    Spec(
        "precision",
        "openpi",
        "Of weights and activations. fp8: as openpi, with the MLPs of the prefix in float8 (GPUs of compute capability "
        "8.9 or more).",
        choices=("openpi", "float32", "bfloat16", "fp8"),
    ),
    Spec(
        "compile_mode",
        "graphs",
        "How the network is run. graphs: kernels in captured CUDA graphs (on a CPU: as eager); eager: the same, not "
        "captured; plain: the readable reference.",
        choices=("graphs", "eager", "plain"),
    ),
    Spec("num_steps", 0, "Denoise steps of a chunk; 0: as the checkpoint says (10).", low=0, high=1000),
    Spec("seed", -1, "Seed of every chunk's noise, to repeat a run; -1: fresh noise each time.", low=-1, high=2**62),
    Spec("prefix_cache", 8, "Prefixes that are kept; 0: none.", low=0, high=1024),
    Spec(
        "adapt_to_pi",
        "",
        "Flip joints and convert grippers to pi's convention (ALOHA): true or false; empty: as the profile says. "
        "An openpi checkpoint on an ALOHA needs it said.",
        choices=("", "true", "false"),
    ),
    Spec("tokenizer", "", "Tokenizer file; empty: the one in the checkpoint folder."),
    Spec("norm_stats", "", "File of normalisation statistics; empty: the checkpoint's."),
    Spec("normalization", "", "none: leave states and actions as they are.", choices=("", "none")),
    Spec("resize", "", "Image resizing; empty: as the checkpoint's layout is.", choices=("", "lerobot", "openpi")),
    Spec(
        "time_grid",
        "",
        "Flow times; empty: as the checkpoint's layout is.",
        choices=("", "lerobot", "openpi", "sglang"),
    ),
    Spec(
        "strategy",
        "receding",
        "How one chunk follows another. receding: the new one takes over; ensemble: what overlaps is averaged; rtc: "
        "the new one takes over and is guided to begin as the old one goes on (real-time chunking).",
        choices=STRATEGIES,
    ),
    Spec(
        "replan_steps",
        25,
        "Rows of a chunk that are played before the next one is asked for; fewer where it would else come too late.",
        low=1,
        high=1000,
    ),
    Spec(
        "ensemble_decay",
        0.01,
        "(ensemble) m of the weights exp(-m i) of chunks that overlap, i = 0 the oldest; 0: all count the same.",
        low=0.0,
        high=10.0,
    ),
    Spec(
        "execution_horizon",
        10,
        "(rtc) Rows of a chunk until the pull to the previous one has faded out; those that pass during inference are "
        "fixed, and it is twice as many at least.",
        low=1,
        high=1000,
    ),
    Spec("max_ahead", 0.2, "Seconds of a chunk that are sent ahead in one trajectory.", low=0.01, high=2.0),
    Spec("dry_run", False, "true: infer, publish, limit and count as ever, and command nothing."),
    Spec(
        "max_start_error",
        0.0,
        "Radians between the measured pose and the first target of a motion, beyond which it does not begin; 0: as the "
        "profile says.",
        low=0.0,
        high=6.28,
    ),
    Spec("late_after", 1.0, "Seconds after the last row of a chunk until a late one is held for.", low=0.1, high=60.0),
    Spec("http_host", "127.0.0.1", "Address that the HTTP server listens on; 0.0.0.0: on every IPv4 interface."),
    Spec(
        "http_port", 8000, "Port of the HTTP server: status page, action API, websockets; 0: none.", low=0, high=65535
    ),
    Spec("http_origins", "", "Web pages that may call the HTTP server besides its own: origins, comma separated."),
    Spec(
        "http_token_file",
        "",
        "File with the token that HTTP clients must send; empty: as the environment variable PI05_ROS_TOKEN says, "
        "else none.",
    ),
    Spec("http_certificate", "", "PEM file of the HTTP server's certificate: TLS, together with http_key."),
    Spec("http_key", "", "PEM file of the certificate's private key."),
)
