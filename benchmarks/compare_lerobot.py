"""Our engine beside LeRobot's own PyTorch Pi0.5: same weights, images, prompts and noise, in one process.

    pip install 'lerobot[pi]==0.6.1' 'transformers==5.5.4'      # Python 3.12
    python benchmarks/compare_lerobot.py --markdown

Both are timed from uint8 images and token ids on the host to actions on the host, and held against our float32
reference, which LeRobot in float32 has to agree with. LeRobot runs as it comes, not compiled, in its own bfloat16
option (which keeps the vision tower in float32), and once more with TF32 allowed. Needs about 40 GB of device memory,
for at times the weights exist twice. Without --checkpoint they are random; nothing is written to disk. What fails is
said and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pi05_ros.checkpoint.layout import is_dropped, model_name
from pi05_ros.engine import EngineRequest
from pi05_ros.engine.roofline import has_fp8
from pi05_ros.errors import Pi05Error
from pi05_ros.model import Pi05Config, Pi05Model
from pi05_ros.policy.loading import resolve_device
from pi05_ros.tools.benchmark_rows import BASE, PROBES, Case, Requests, Weights, relative_error
from pi05_ros.tools.benchmark_run import Run, say
from pi05_ros.tools.benchmark_table import draw, environment, rounded
from pi05_ros.tools.command_line import run

INSTALL = "pip install 'lerobot[pi]==0.6.1' 'transformers==5.5.4'"
THEIRS = (("float32", "highest"), ("bfloat16", "highest"), ("bfloat16", "high"))
"""LeRobot's dtype option, and PyTorch's precision of float32 matrix products ("high" allows TF32)."""
CASES = (BASE, Case(batch=4))


@dataclasses.dataclass
class Line:
    """A row. Times in ms, of the whole batch; memory in GiB; errors against the float32 reference, by seed."""

    who: str
    request: str
    batch: int
    n: int
    median: float
    p95: float
    memory: float | None
    errors: tuple[float, ...] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="weights, of pi05_base size (default: random)")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:<index> or cpu (default: auto)")
    parser.add_argument(
        "--repeats", type=int, default=50, help="timed requests of ours; LeRobot gets half (default: 50)"
    )
    parser.add_argument("--num-steps", type=int, default=10, help="denoise steps (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and inputs (default: 0)")
    parser.add_argument(
        "--layers", type=int, help="cut both networks to so many layers, to try this on a small machine"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to a JSON file")
    run(parser, compare)


def compare(arguments: argparse.Namespace) -> None:
    try:
        from lerobot.policies.pi05 import modeling_pi05 as modeling
    except ImportError as error:
        raise Pi05Error(f"LeRobot cannot be imported ({error}). On Python 3.12: {INSTALL}") from error
    device = resolve_device(arguments.device)
    weights = Weights.of(arguments.checkpoint, "pi05_base", arguments.seed)
    if weights.config.architecture() != Pi05Config.pi05_base().architecture():
        raise Pi05Error(f"{arguments.checkpoint}: expected the size of pi05_base, the only one that LeRobot has.")
    if arguments.layers is not None:
        weights = cut(weights, arguments.layers, modeling)
    ours = Run(
        weights=weights,
        device=device,
        precisions=("openpi", "bfloat16", *(("fp8",) if has_fp8(device) else ())),
        paths=("plain", "eager", "graphs") if device.type == "cuda" else ("plain", "eager"),
        quick=True,
        repeats=arguments.repeats,
        num_steps=arguments.num_steps,
        seed=arguments.seed,
        with_error=True,
    )
    theirs, actions = run_lerobot(modeling, ours, max(1, arguments.repeats // 2))
    report = ours.report()
    if ours.oracle is not None:
        for line in theirs:
            pairs = zip(actions[line.who], ours.oracle, strict=True)
            line.errors = tuple(relative_error(one, reference) for one, reference in pairs)
    errors = {(found.precision, found.path): found.error for found in report.fidelity}
    lines = theirs + [
        Line(
            f"ours, {row.precision} {row.path}",
            row.case.name,
            row.case.batch,
            row.n,
            row.median,
            row.p95,
            row.memory,
            errors.get((row.precision, row.path)),
        )
        for row in report.rows
    ]
    versions = {name: metadata.version(name) for name in ("lerobot", "transformers")}
    versions = environment(device) | {"LeRobot": "{lerobot}, transformers {transformers}".format(**versions)}
    if arguments.json is not None:
        rows = [dataclasses.asdict(line) for line in lines]
        found = {"environment": versions, "setting": report.setting, "rows": rows, "notes": list(report.notes)}
        arguments.json.write_text(json.dumps(rounded(found), indent=1) + "\n", encoding="utf-8")
    print("\n".join(f"{'- ' if arguments.markdown else ''}{name}: {value}" for name, value in versions.items()))
    print(f"\n{report.setting}\n\n{draw(table(lines), arguments.markdown)}\n")
    print(
        "Milliseconds of the whole batch; error: relative, of the actions against our float32 reference, mean and "
        "largest of the seeds; GiB of device memory reserved at most."
    )
    for note in report.notes:
        print(f"\nNote: {note}")
    if report.failed:
        raise SystemExit(1)


def cut(weights: Weights, layers: int, modeling: Any) -> Weights:
    """Fewer layers of Gemma and expert, for both networks."""
    whole = modeling.get_gemma_config

    def shallow(variant: str) -> Any:
        config = whole(variant)
        config.depth = layers
        return config

    modeling.get_gemma_config = shallow
    prefix = dataclasses.replace(weights.config.prefix, layers=layers)
    config = dataclasses.replace(weights.config, prefix=prefix)
    return dataclasses.replace(weights, config=config, name=f"{weights.name}, cut to {layers} layers")


def run_lerobot(modeling: Any, ours: Run, repeats: int) -> tuple[list[Line], dict[str, np.ndarray]]:
    """Rows, without errors, and actions [PROBES, H, A] of every LeRobot variant. What fails is noted in ours."""
    lines: list[Line] = []
    actions: dict[str, np.ndarray] = {}
    draw_requests = Requests(ours.weights.config, ours.num_steps, ours.seed)
    probes = [draw_requests.one(BASE) for _ in range(PROBES)]
    for dtype, products in THEIRS:
        who = f"LeRobot, {dtype}" + (", TF32" if products == "high" else "")
        say(who)
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = dtype == "bfloat16"  # for convolutions, as PyTorch has it; not for an oracle
        with ours.tolerated(who):
            free_unused(ours.device)
            network = LeRobot(modeling, ours.weights.model(ours.device, "float32"), dtype, ours.device)
            free_unused(ours.device)
            actions[who] = np.concatenate([network.infer([request]) for request in probes])
            if dtype == "float32":  # only to be agreed with
                lines.append(network.time(who, BASE, draw_requests, 3))
            else:
                lines += [network.time(who, case, draw_requests, repeats) for case in CASES]
        network = None  # type: ignore[assignment]  # its memory is the next one's
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    free_unused(ours.device)
    return lines, actions


class LeRobot:
    """LeRobot's network with our weights."""

    def __init__(self, modeling: Any, source: Pi05Model, dtype: str, device: torch.device) -> None:
        sizes = source.config
        config = modeling.PI05Config(
            dtype=dtype,
            device=device.type,
            chunk_size=sizes.horizon,
            n_action_steps=sizes.horizon,
            max_action_dim=sizes.action_dim,
            min_period=sizes.min_period,
            max_period=sizes.max_period,
        )
        self.device = device
        with torch.device(device):
            self.network = modeling.PI05Pytorch(config)
        copy_weights(self.network, source)
        self.network.to(device).eval().requires_grad_(False)

    def infer(self, requests: Sequence[EngineRequest]) -> np.ndarray:
        """uint8 images, tokens and noise on the host -> actions float32 [B, H, A] on the host."""
        batch = len(requests)
        images = np.stack([np.stack(request.images) for request in requests])  # [B, N, h, w, 3]
        pixels = torch.from_numpy(images).to(self.device).permute(1, 0, 4, 2, 3).float() / 255.0 * 2.0 - 1.0
        tokens = torch.from_numpy(np.stack([request.tokens for request in requests])).to(self.device)
        noise = torch.from_numpy(np.stack([request.noise for request in requests])).to(self.device)
        present = torch.ones(batch, dtype=torch.bool, device=self.device)
        actions = self.network.sample_actions(
            list(pixels),
            [present] * len(pixels),
            tokens,
            torch.ones_like(tokens, dtype=torch.bool),
            noise=noise,
            num_steps=requests[0].num_steps,
        )
        return actions.float().cpu().numpy()

    def time(self, who: str, case: Case, draw_requests: Requests, repeats: int) -> Line:
        for _ in range(3 if self.device.type == "cuda" else 1):
            self.infer(draw_requests.batch(case))
        took = []
        for _ in range(repeats):
            requests = draw_requests.batch(case)
            began = time.perf_counter()
            self.infer(requests)
            took.append((time.perf_counter() - began) * 1e3)
        cuda = self.device.type == "cuda"
        memory = torch.cuda.max_memory_reserved(self.device) / 2**30 if cuda else None
        median, p95 = statistics.median(took), float(np.percentile(took, 95))
        say(f"{who} {case.name}: {median:.1f} ms, p95 {p95:.1f}")
        return Line(who, case.name, case.batch, repeats, median, p95, memory)


def copy_weights(network: nn.Module, source: Pi05Model) -> None:
    """Ours into LeRobot's network, by the names that its checkpoints have; every one of ours must find its place."""
    ours = dict(source.named_parameters())
    left = set(ours)
    for key, parameter in network.named_parameters():
        if is_dropped(key):
            continue  # in its checkpoints, and not used at inference
        name = model_name(key)
        if name not in ours or ours[name].shape != parameter.shape:
            raise Pi05Error(f"LeRobot's {key} {list(parameter.shape)} has no counterpart in our model.")
        parameter.data.copy_(ours[name])
        left.discard(name)
    if left:
        raise Pi05Error(f"LeRobot's network has no place for {', '.join(sorted(left))}.")


def free_unused(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def table(lines: Sequence[Line]) -> list[list[str]]:
    """Ratios are per request of equal batch, against LeRobot's bfloat16 option as it comes."""
    base = {line.batch: line.median for line in lines if line.who == "LeRobot, bfloat16"}
    head = ["engine", "request", "total", "p95", "n", "per request", "x LeRobot", "error", "largest", "GiB"]
    rows = [head]
    for line in lines:
        errors = line.errors
        rows.append(
            [
                line.who,
                line.request,
                f"{line.median:.2f}",
                f"{line.p95:.2f}",
                str(line.n),
                f"{line.median / line.batch:.2f}",
                f"{base[line.batch] / line.median:.1f}" if line.batch in base else "-",
                f"{statistics.mean(errors):.2e}" if errors else "-",
                f"{max(errors):.2e}" if errors else "-",
                f"{line.memory:.2f}" if line.memory is not None else "-",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
