"""The policy in the loop: observation -> chunk -> setpoints, with a reason whenever it does not act.

Two threads meet here: the inference thread, which this class owns, and the control thread, which calls ``tick``. One
lock keeps the player; inference runs outside of it, so a tick never waits for the network. No clock of its own: time
comes from ``now_ns``, whatever clock stamps the robot's messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pi05_ros.errors import Pi05Error
from pi05_ros.model import RtcGuidance
from pi05_ros.policy import ActionChunk, Observation, Policy, RobotProfile
from pi05_ros.robot.assembly import AssembledObservation, ObservationAssembler
from pi05_ros.robot.execution import ChunkPlayer, Setpoints
from pi05_ros.robot.latency import Latency
from pi05_ros.robot.refusal import Refusal
from pi05_ros.robot.safety import SafetyFilter, SafetySettings, hold_target, velocity_mask

logger = logging.getLogger(__name__)

SECOND = 1_000_000_000
PRIORITY = 100
"""Of the robot's own requests: they go before those of any other client of the same policy."""
IDLE_WAIT = 0.05
"""Seconds between two looks at the inputs while nothing arrives."""
RETRY_AFTER = 1.0
"""Seconds before inference is tried again after it failed."""
FRAME_WAIT = 0.05
"""Seconds that an inference which is due may wait for the next set of frames."""
INFERENCE_PATIENCE = 10.0
"""Seconds after which a running inference is worth a word in the status."""
LATENCIES = 100


@dataclass(frozen=True)
class LoopSettings:
    """How to infer and play.

    strategy: one of ``STRATEGIES``. ensemble_decay: (ensemble) of the weights, see ``execution.ensemble``.
    execution_horizon: (rtc) rows until the pull to the previous chunk has faded out; at least twice those that are
        fixed because they pass while the chunk is made.
    replan_steps: rows played of a chunk before the next is asked for; fewer where it would else come too late.
    max_ahead: seconds of rows in one command.
    safety: what is refused, and when a late chunk is held for.
    num_steps: denoise steps, None: the checkpoint's. seed: of the noise of every chunk, None: fresh noise.
    """

    strategy: str = "receding"
    ensemble_decay: float = 0.01
    execution_horizon: int = 10
    replan_steps: int = 25
    max_ahead: float = 0.2
    safety: SafetySettings = field(default_factory=SafetySettings)
    num_steps: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class LoopChunk:
    """A chunk, and what it was made from."""

    chunk: ActionChunk
    sequence: int
    prompt: str
    stamp_ns: int
    age_ms: float


@dataclass(frozen=True)
class LoopState:
    """What the loop is doing: "waiting", "disabled", "running" or "error", why not more, and counters.

    key: equal as long as state and kind of reason are (ages within the reason move on).
    """

    state: str
    reason: str = ""
    key: object = None
    chunks: int = 0
    refused_observations: int = 0
    refused_chunks: int = 0
    corrupt_images: int = 0
    clamps: int = 0
    underruns: int = 0
    rows_left: int = 0
    latencies_ms: tuple[float, ...] = ()


class PolicyLoop:
    """Runs a policy on a robot's streams until it is stopped."""

    def __init__(
        self,
        policy: Policy,
        profile: RobotProfile,
        assembler: ObservationAssembler,
        now_ns: Callable[[], int],
        on_chunk: Callable[[LoopChunk], None],
        settings: LoopSettings,
        prompt: str = "",
    ) -> None:
        """on_chunk is called on the inference thread with every chunk that was accepted."""
        self.period_ns = round(SECOND / profile.control_hz)
        self._policy, self._profile, self._assembler = policy, profile, assembler
        self._now_ns, self._on_chunk, self._settings = now_ns, on_chunk, settings
        self._rows_ahead = max(int(settings.max_ahead * SECOND / profile.command_period_ns), 1)
        self._lock = threading.Lock()
        velocities = velocity_mask(profile) if profile.action_names is None else np.zeros(profile.action_dim, bool)
        self._safety = SafetyFilter(profile, settings.safety, profile.command_period_ns)
        self._player = ChunkPlayer(
            self.period_ns,
            velocities,
            profile.command_period_ns,
            settings.ensemble_decay if settings.strategy == "ensemble" else None,
        )
        self._prompt, self._enabled = prompt.strip(), True
        self._epoch = 0  # counts what makes a running inference worthless
        self._chunk_epoch = 0  # of the chunk that is played
        self._state = LoopState("waiting", "The first observation has not come yet.")
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._ran_out_ns: int | None = None  # when the rows of the present chunk were found to have run out
        self._latency = Latency()
        self._last_refusal: object = None
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # ---- from outside ----

    def start(self) -> None:
        """Begin to infer and play. Raises Pi05Error: the inference that ran at the last stop has not ended yet."""
        if self._thread is not None and self._thread.is_alive():
            raise Pi05Error("The inference that ran when the node was stopped has not ended yet; try again later.")
        self._stop.clear()
        with self._lock:
            self._safety.forget()
            if self._enabled:
                self._set_state("waiting", "The first chunk has not come yet.")
            elif self._state.state == "error":  # what failed before has begun anew; to go on is for the operator to say
                self._set_state("disabled", f"Not enabled since: {self._state.reason}")
        self._thread = threading.Thread(target=self._run, name="pi05-inference", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """From now on no chunk is accepted. Then ``final_hold`` says how to stand still."""
        self._stop.set()
        self._wake.set()

    def stop(self, timeout: float = 3.0) -> None:
        """End the inference thread and abandon a running inference."""
        self.end()
        if self._thread is not None:
            self._thread.join(timeout)

    def notify(self) -> None:
        """New data has come. Cheap; for callbacks. An inference that is due begins once a set of frames is complete."""
        if self._assembler.completes_set():
            self._wake.set()

    @property
    def prompt(self) -> str:
        return self._prompt

    def set_prompt(self, prompt: str) -> None:
        """From the next chunk on. A blank one is none."""
        prompt = prompt.strip()
        with self._lock:
            if prompt != self._prompt:
                self._prompt = prompt
                self._epoch += 1
        self._wake.set()

    def set_enabled(self, enabled: bool, reason: str = "Disabled by ~/enable.") -> None:
        """False: hold at once, also while an inference runs, whose chunk is then thrown away. It outlasts a stop."""
        with self._lock:
            if self._enabled and not enabled:
                self._hold()
                self._set_state("disabled", reason)
            elif enabled and not self._enabled:
                self._set_state("waiting", "Enabled again; the first chunk has not come yet.")
            self._enabled = enabled
        self._wake.set()

    def fail(self, reason: str) -> None:
        """What commands the robot has failed: hold, in state "error", until it is enabled again. It outlasts a stop."""
        with self._lock:
            self._hold()
            self._set_state("error", reason)
            self._enabled = False

    def reset(self) -> None:
        """Forget chunk, samples and cached prefixes; hold until new ones have come."""
        with self._lock:
            self._hold()
            self._assembler.reset()
        self._policy.reset()

    def state(self) -> LoopState:
        with self._lock:
            return replace(
                self._state,
                clamps=self._safety.clamps,
                underruns=self._player.underruns,
                rows_left=self._player.rows_left(self._now_ns()),
                latencies_ms=tuple(self._latencies),
            )

    # ---- the control thread ----

    def tick(self) -> Setpoints | None:
        """What to command now; None: nothing. Never waits for inference."""
        now_ns = self._now_ns()
        refusal = self._assembler.check(now_ns) or self._assembler.check_joints()
        with self._lock:
            if refusal is not None and not refusal.is_passing:
                was_playing = self._player.playing
                self._hold()  # or, where nothing is played, what is inferred of earlier inputs is worthless
                if was_playing:
                    self._refused(refusal)
            elif self._is_late(now_ns):
                self._hold(abandon=not self._too_slow())  # who is too slow asked when the arm had come to rest
                after = f"{self._settings.safety.late_after:g} s"
                self._set_state("waiting", f"The next chunk is late: rows ran out more than {after} ago; holding.")
            return self._limited(self._player.next(now_ns, self._rows_ahead), now_ns)

    def final_hold(self) -> Setpoints | None:
        """After ``stop``: the last command, which replaces whatever is still under way. None: nothing was commanded."""
        now_ns = self._now_ns()
        with self._lock:
            if self._player.playing:
                self._hold()
            return self._limited(self._player.next(now_ns, 1), now_ns)

    # ---- under the lock ----

    def _limited(self, setpoints: Setpoints | None, now_ns: int) -> Setpoints | None:
        """What may be commanded of that. Everything that leaves the loop leaves it here."""
        if setpoints is None:
            return None
        measured = self._assembler.standing_state(now_ns) if self._safety.needs_measured else None
        return self._safety.apply(setpoints, now_ns, measured)

    def _hold(self, abandon: bool = True) -> None:
        """Latch a hold, once: where the robot was measured now. abandon: a running inference is worthless."""
        self._epoch += abandon
        self._ran_out_ns = None
        if not self._player.playing:
            return
        measured = self._assembler.standing_state(self._now_ns())
        target = hold_target(self._profile, measured, self._safety.commanded)
        if target is not None:
            self._safety.begin(target)  # to hold is to go nowhere
        self._player.hold(target)

    def _is_late(self, now_ns: int) -> bool:
        """True if the rows of the present chunk ran out too long ago."""
        if not self._player.playing or self._player.rows_left(now_ns) > 0:
            self._ran_out_ns = None
            return False
        self._ran_out_ns = now_ns if self._ran_out_ns is None else min(self._ran_out_ns, now_ns)
        return now_ns - self._ran_out_ns > self._settings.safety.late_after * SECOND

    def _rows_needed(self) -> int:
        """Rows of a chunk that pass until the next one has come, if that is asked for now."""
        return self._latency.rows(self.period_ns, round(FRAME_WAIT * SECOND))

    def _too_slow(self) -> bool:
        """True if a chunk that is asked for while the last one plays would come when all of its rows have passed."""
        return self._rows_needed() >= self._policy.horizon

    def _replan_at(self) -> int:
        """Rows of a chunk that are played before the next one is asked for, which then comes before they run out."""
        horizon = self._policy.horizon
        return horizon if self._too_slow() else min(self._settings.replan_steps, horizon - self._rows_needed())

    def _set_state(self, state: str, reason: str = "", key: object = None, **counts: Any) -> None:
        self._state = replace(self._state, state=state, reason=reason, key=(state, key or reason), **counts)

    def _refused(self, refusal: Refusal) -> None:
        state = "running" if self._player.playing else "waiting"  # a passing fault does not stop the arm
        if refusal.key != self._last_refusal:  # counted once, not for every look at the same bad message
            self._last_refusal = refusal.key
            counted = self._state
            self._set_state(
                state,
                refusal.reason,
                refusal.key,
                refused_observations=counted.refused_observations + (not refusal.is_waiting),
                corrupt_images=counted.corrupt_images + refusal.has("corrupt"),
            )
        else:
            self._set_state(state, refusal.reason, refusal.key)

    # ---- the inference thread ----

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(IDLE_WAIT)
            self._wake.clear()
            try:
                self._infer_if_due()
            except Exception as error:
                if not isinstance(error, Pi05Error):  # not foreseen: whoever mends it wants to know where
                    logger.exception("Inference failed.")
                with self._lock:
                    self._hold()
                    if self._enabled:
                        self._set_state("error", f"Inference failed: {error}")
                self._stop.wait(RETRY_AFTER)

    def _infer_if_due(self) -> None:
        """One inference, if the loop is enabled, the inputs are good and the present chunk is played far enough."""
        now_ns = self._now_ns()
        with self._lock:
            prompt, epoch = self._prompt, self._epoch
            if not self._enabled:
                return
            if not prompt:
                self._hold()
                self._set_state("waiting", "There is no prompt: set the parameter or publish one on ~/prompt.")
                return
            if self._player.playing and self._player.rows_played(now_ns) < self._replan_at():
                return
        observed = self._assembler.assemble(now_ns)
        if isinstance(observed, Refusal):
            with self._lock:
                if self._enabled:
                    if not observed.is_passing:  # else the present chunk goes on, until its rows run out
                        self._hold()
                    self._refused(observed)
            self._stop.wait(IDLE_WAIT)  # decoding again at every message would bring no news
            return
        with self._lock:
            if self._too_slow() and self._player.rows_left(observed.stamp_ns):
                return  # the frames still show the arm moving
            follows = epoch == self._epoch == self._chunk_epoch
            remaining = self._player.remaining(observed.stamp_ns) if follows else None
        future = self._policy.submit(
            Observation(observed.images, observed.state, prompt, stamp=observed.stamp_ns / SECOND),
            num_steps=self._settings.num_steps,
            seed=self._settings.seed,
            rtc=self._guidance(remaining, observed.state),
            priority=PRIORITY,
        )
        chunk = self._await(future)
        if chunk is not None:
            self._accept(chunk, observed, prompt, epoch, (now_ns - observed.stamp_ns) / 1e6)

    def _guidance(self, remaining: np.ndarray | None, state: np.ndarray) -> RtcGuidance | None:
        """By what is left of the present chunk, as the model would have said it of this state; None: nothing is."""
        if self._settings.strategy != "rtc" or remaining is None:
            return None
        delay = self._latency.rows(self.period_ns)
        return RtcGuidance(
            prev_chunk=self._policy.actions_to_model(remaining, state),  # type: ignore[arg-type]  # an array will do
            inference_delay=delay,
            execution_horizon=max(self._settings.execution_horizon, 2 * delay),  # to end at once would be a jump again
        )

    def _await(self, future: Future[ActionChunk]) -> ActionChunk | None:
        """The chunk; None if the loop was stopped meanwhile."""
        began = time.monotonic()
        while not wait([future], timeout=0.05).done:
            if self._stop.is_set():
                future.cancel()
                return None
            if time.monotonic() - began > INFERENCE_PATIENCE:
                with self._lock:
                    if self._enabled:
                        self._set_state("waiting", f"An inference runs for more than {INFERENCE_PATIENCE:g} s.")
        return future.result()

    def _accept(
        self, chunk: ActionChunk, observed: AssembledObservation, prompt: str, epoch: int, age_ms: float
    ) -> None:
        """Play and publish a chunk, unless it is no good or what it was asked for is over."""
        problem = self._safety.chunk_problem(chunk.actions)
        with self._lock:
            if epoch != self._epoch or self._stop.is_set():
                self._wake.set()
                return
            begins = not self._player.playing
            now_ns = self._now_ns()
            measured = self._assembler.standing_state(now_ns)
            start = np.where(np.isfinite(measured), measured, observed.state)
            if problem is None and begins:
                problem = self._safety.start_problem(chunk.actions[0], start)
            if problem is not None:
                self._hold()
                self._set_state("error", problem, refused_chunks=self._state.refused_chunks + 1)
                return
            if begins:
                self._safety.begin(start)
            latency_ns = now_ns - observed.stamp_ns
            self._latency.add(latency_ns)
            # A robot that stood still when it was seen is where it was seen: nothing of the chunk has passed. That
            # makes the first chunk start without a jump, and lets a machine that is slower than its chunks act at all.
            stood_still = self._player.rows_left(observed.stamp_ns) == 0
            if not stood_still and latency_ns >= len(chunk.actions) * self.period_ns:
                self._set_state("running", "A chunk came when all of its rows had passed; it is not played.")
                self._wake.set()
                return
            stamp_ns = now_ns if stood_still else observed.stamp_ns
            self._player.play(chunk.actions, stamp_ns, follows=epoch == self._chunk_epoch)
            self._chunk_epoch = epoch
            self._last_refusal = None
            self._latencies.append(chunk.timings["total_ms"])
            self._set_state("running", chunks=self._state.chunks + 1)
            sequence = self._state.chunks
        self._on_chunk(LoopChunk(chunk, sequence, prompt, observed.stamp_ns, age_ms))
