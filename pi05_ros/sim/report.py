"""The demo's report folder: what the cameras saw, what the joints did, and the numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from pi05_ros.errors import Pi05Error
from pi05_ros.sim.recording import Recording

MOMENTS = 5  # columns of the camera strip
CAPTION_HEIGHT, MARGIN, LABEL_WIDTH = 30, 6, 34
INK, PAPER = (32, 32, 32), (255, 255, 255)


class ReportError(Pi05Error):
    """There is nothing to report, or what draws it is not installed."""


def write_report(recording: Recording, folder: Path, facts: dict[str, Any]) -> list[Path]:
    """Write cameras.png, joints.png and summary.json, and return their paths.

    facts: what else summary.json is to say, in front of the recording's own numbers.
    Raises ReportError: nothing was recorded, or matplotlib or Pillow is missing.
    """
    if not recording.measured:
        raise ReportError("There is nothing to report: no joint state was recorded.")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("cameras.png", "joints.png", "summary.json")]
    try:
        draw_cameras(recording, paths[0])
        draw_joints(recording, paths[1])
    except ModuleNotFoundError as error:
        raise ReportError(f"The report needs {error.name}: pip install 'pi05_ros[sim]'.") from error
    paths[2].write_text(json.dumps({**facts, **recording.summary()}, indent=2) + "\n", encoding="utf-8")
    return paths


def draw_cameras(recording: Recording, path: Path) -> None:
    """One row a camera, one column a moment, the time over each column."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), 17)
    cameras = [camera for camera in recording.camera_names if recording.frames.get(camera)]
    if not cameras:
        raise ReportError("There is nothing to report: no camera frame was recorded.")
    height, width = recording.frames[cameras[0]][0][1].shape[:2]
    first, last = recording.frames[cameras[0]][0][0], recording.frames[cameras[0]][-1][0]
    moments = np.linspace(first, last, MOMENTS) if last > first else np.array([first])

    strip = Image.new(
        "RGB",
        (
            LABEL_WIDTH + len(moments) * (width + MARGIN),
            CAPTION_HEIGHT + len(cameras) * (height + MARGIN),
        ),
        PAPER,
    )
    draw = ImageDraw.Draw(strip)
    for column, moment in enumerate(moments):
        left = LABEL_WIDTH + column * (width + MARGIN)
        caption = f"{max(0.0, moment - recording.start):.1f} s"
        draw.text((left + width / 2, CAPTION_HEIGHT / 2), caption, fill=INK, font=font, anchor="mm")
        for row, camera in enumerate(cameras):
            _, frame = min(recording.frames[camera], key=lambda kept: abs(kept[0] - moment))
            strip.paste(Image.fromarray(frame), (left, CAPTION_HEIGHT + row * (height + MARGIN)))
    for row, camera in enumerate(cameras):
        label = Image.new("RGB", (height, LABEL_WIDTH), PAPER)
        ImageDraw.Draw(label).text((height / 2, LABEL_WIDTH / 2), camera, fill=INK, font=font, anchor="mm")
        strip.paste(label.rotate(90, expand=True), (0, CAPTION_HEIGHT + row * (height + MARGIN)))
    strip.save(path)


def draw_joints(recording: Recording, path: Path) -> None:
    """One plot a joint: what was commanded and what was measured, with a mark where a chunk arrived."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured_times, measured = _table(recording.measured, recording.start)
    commanded_times, commanded = _table(recording.commanded, recording.start)
    rows = math.ceil(len(recording.joint_names) / 2)
    figure = Figure(figsize=(13, 1.75 * rows + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for index, name in enumerate(recording.joint_names):
        plot = axes[index % rows, index // rows]  # arms side by side, their joints on one line
        for chunk in recording.chunks:
            plot.axvline(chunk.time - recording.start, color="0.88", linewidth=1, zorder=0)
        plot.plot(commanded_times, commanded[:, index], color="#ffa64d", linewidth=1.8, label="commanded")
        plot.plot(measured_times, measured[:, index], color="tab:blue", linewidth=1.0, label="measured")
        gripper = name.endswith("gripper")
        plot.set_ylabel("0 closed, 1 open" if gripper else "rad", fontsize=9)
        plot.set_title(name, fontsize=10, loc="left", pad=3)
        _at_least(plot, 0.1)
        plot.tick_params(labelsize=8)
        plot.margins(x=0.01)
        plot.grid(axis="y", color="0.93")
        for side in ("top", "right"):
            plot.spines[side].set_visible(False)
    for plot in axes[-1]:
        plot.set_xlabel("simulated time since the first chunk, s", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=10)
    figure.suptitle(
        f"{len(recording.joint_names)} joints, {len(recording.chunks)} chunks (a grey line where one arrived)",
        fontsize=12,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=100)


def _table(samples: list[tuple[float, np.ndarray]], start: float) -> tuple[np.ndarray, np.ndarray]:
    """times [n] since the start, values [n, dim]."""
    return np.array([time for time, _ in samples]) - start, np.array([values for _, values in samples])


def _at_least(plot: Any, span: float) -> None:
    """Widen the y range of a joint that hardly moved, so that noise does not look like motion."""
    low, high = plot.get_ylim()
    if high - low < span:
        middle = (low + high) / 2
        plot.set_ylim(middle - span / 2, middle + span / 2)
