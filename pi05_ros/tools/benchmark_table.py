"""The benchmark's report: as text for a terminal, as Markdown, as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pi05_ros import __version__
from pi05_ros.engine.roofline import Ceilings
from pi05_ros.tools.benchmark_rows import BASE, STAGES, Fidelity, Row, Startup

Table = list[list[str]]


@dataclass(frozen=True)
class Report:
    """All that a run found. setting: what rows have in common; notes: what is missing, and why; failed: by an error."""

    environment: dict[str, str]
    setting: str
    ceilings: Ceilings
    rows: Sequence[Row]
    startups: Sequence[Startup]
    fidelity: Sequence[Fidelity]
    notes: Sequence[str]
    failed: bool

    def text(self, markdown: bool) -> str:
        parts = [
            "\n".join(f"{'- ' if markdown else ''}{name}: {value}" for name, value in self.environment.items()),
            self.setting,
            draw(_speed(self._shown()), markdown),
            "Milliseconds of the whole batch: medians of each stage and of the total (submission to result); x plain: "
            "times as fast as the plain path; x floor: times the floor; GiB: device memory reserved at most so far.",
            f"Floor: {_ceilings(self.ceilings)}.",
        ]
        if self.startups:
            parts += [
                draw(_startups(self.startups), markdown),
                "Seconds until the weights are on the device, then until the engine is built, then until its first "
                "request is answered.",
            ]
        if self.fidelity:
            parts += [
                draw(_errors(self.fidelity), markdown),
                "Error: ||a - oracle|| / ||oracle|| of model-space actions against the float32 plain path on the same "
                "weights, images and noise, mean and largest of the seeds. Random weights say nothing about a task.",
            ]
        parts += [f"Note: {note}" for note in self.notes]
        return "\n\n".join(parts) + "\n"

    def _shown(self) -> list[Row]:
        """Of the plain path, which others are held against, one row suffices where there are others."""
        others = any(row.path != "plain" for row in self.rows)
        return [row for row in self.rows if row.path != "plain" or row.case == BASE or not others]

    def json(self) -> str:
        content = {
            "environment": self.environment,
            "setting": self.setting,
            "ceilings": {"flops_per_s": dict(self.ceilings.flops), "bytes_per_s": self.ceilings.bandwidth},
            "rows": [
                {**dataclasses.asdict(row), "name": row.case.name, "per_request": row.per_request} for row in self.rows
            ],
            "startup": [dataclasses.asdict(one) for one in self.startups],
            "fidelity": [dataclasses.asdict(found) for found in self.fidelity],
            "notes": list(self.notes),
        }
        return json.dumps(rounded(content), indent=1) + "\n"


def environment(device: torch.device) -> dict[str, str]:
    """Versions and names that figures depend on."""
    found = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found["driver"] = f"{_driver()}, CUDA {torch.version.cuda}"
    found["processor"] = f"{_processor()}, {torch.get_num_threads()} threads"
    found["versions"] = (
        f"pi05_ros {__version__}, PyTorch {torch.__version__}, Triton {_version('triton')}, "
        f"Python {platform.python_version()}"
    )
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    if program := shutil.which("nvidia-smi"):
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.splitlines()[0].strip()
    return "unknown (nvidia-smi does not say)"


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def _speed(rows: Sequence[Row]) -> Table:
    head = ["precision", "path", "request", *STAGES, "total", "p95", "n", "per request", "x plain", "floor", "x floor"]
    return [[*head, "GiB"], *(_speed_line(row) for row in rows)]


def _speed_line(row: Row) -> list[str]:
    return [
        row.precision,
        row.path,
        row.case.name,
        *(_number(row.stages[stage]) for stage in STAGES),
        _number(row.median),
        _number(row.p95),
        str(row.n),
        _number(row.per_request),
        "-" if row.plain is None else f"{row.plain / row.median:.1f}",
        _number(row.floor),
        f"{row.median / row.floor:.2f}",
        "-" if row.memory is None else f"{row.memory:.2f}",
    ]


def _startups(startups: Sequence[Startup]) -> Table:
    lines = ([one.precision, one.path, *(f"{s:.1f}" for s in (one.weights, one.engine, one.first))] for one in startups)
    return [["precision", "path", "weights", "engine", "first request"], *lines]


def _errors(found: Sequence[Fidelity]) -> Table:
    table = [["precision", "path", "error", "largest", "graphs - eager", "hit - miss", "batch of 4 / single"]]
    for one in found:
        error = one.error
        table.append(
            [
                one.precision,
                one.path,
                "-" if error is None else f"{sum(error) / len(error):.2e}",
                "-" if error is None else f"{max(error):.2e}",
                "-" if one.graphs_eager is None else f"{one.graphs_eager:.1e}",
                f"{one.hit_miss:.1e}",
                f"{one.batch_single:.1e}",
            ]
        )
    return table


def _ceilings(ceilings: Ceilings) -> str:
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s {kind}" for kind, rate in ceilings.flops.items())
    return (
        f"{rates} (large matrix product on random data) and {ceilings.bandwidth / 1e12:.3g} TB/s (copy, read and "
        "written), measured in this run; the stages' least time at these rates, one after the other"
    )


def _number(milliseconds: float) -> str:
    """Three figures where they mean something; a stage that did not run is a dash."""
    if milliseconds == 0:
        return "-"
    return f"{milliseconds:.0f}" if milliseconds >= 1000 else f"{milliseconds:.{1 if milliseconds >= 100 else 2}f}"


def draw(table: Table, markdown: bool) -> str:
    """A table, its first row the heading, as Markdown or aligned with spaces; columns of numbers to the right."""
    return _markdown(table) if markdown else _plain(table)


def _markdown(table: Table) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    columns = zip(*table, strict=True)
    rule = "|".join("---:" if _numeric(column[1:]) else "---" for column in columns)
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _plain(table: Table) -> str:
    columns = list(zip(*table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [_numeric(column[1:]) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    )


def _numeric(cells: Sequence[str]) -> bool:
    return all(re.fullmatch(r"-|[\d.e+-]+", cell) for cell in cells)


def rounded(value: Any) -> Any:
    """Floats with six significant digits, all the way down."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value
