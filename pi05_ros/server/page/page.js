// The status page: what the events say, where it stands on the page.

import { Cameras } from "./cameras.js";
import { JointChart, LatencyChart, brief, milliseconds, quantile, short } from "./draw.js";
import { $, build, el, put } from "./elements.js";
import { Link } from "./link.js";

const STAGES = {
  loading: ["busy", "loading", "The checkpoint is being loaded."],
  warming_up: ["busy", "warming up", "The policy is being warmed up."],
  ready: ["good", "ready", ""],
  error: ["bad", "error", "There is no policy."],
  closed: ["bad", "closed", "The server is closing."],
};
const ROBOT_TONES = { running: "good", error: "bad", waiting: "busy" };
/** Seconds without a word after which the page says that what it shows is old. */
const PATIENCE = 5;

const latencyChart = new LatencyChart();
const cameras = new Cameras();
let snapshot = null;
let received = 0;

/** Seconds since a moment of the server's clock. */
const since = (moment) => Math.max(0, snapshot.now - moment + (performance.now() - received) / 1000);
const ago = (seconds) =>
  seconds < 1.5
    ? "just now"
    : seconds < 100
      ? `${Math.round(seconds)} s ago`
      : seconds < 6000
        ? `${Math.round(seconds / 60)} min ago`
        : `${Math.round(seconds / 3600)} h ago`;

// ---- parts ----

/** A list of terms, made anew only when it says something else. */
function list(id, entries) {
  const key = JSON.stringify(entries);
  if ($(id).dataset.key === key) return;
  $(id).dataset.key = key;
  $(id).replaceChildren(
    ...entries.map(([term, value, note]) =>
      el(
        "div",
        {},
        el("dt", { textContent: term }),
        el("dd", {}, value, note ? el("small", { textContent: ` ${note}` }) : null),
      ),
    ),
  );
}

function showState({ stage, reason, metadata }) {
  const [tone, word, sentence] = STAGES[stage] ?? ["busy", stage, ""];
  put("stage", word);
  $("stage").dataset.tone = tone;
  put("model", metadata?.model ?? "");
  document.title = `${word} · ${metadata?.model ?? "pi05_ros"}`;
  return stage === "ready" ? "" : reason || sentence;
}

function showRobot({ robot, metadata }) {
  $("robot-state").hidden = !robot;
  if (robot) {
    put("robot-state", String(robot.state ?? "unknown"));
    $("robot-state").dataset.tone = ROBOT_TONES[robot.state] ?? "plain";
  }
  put(
    "robot-reason",
    robot ? String(robot.reason || "") : "Nothing is commanded from here: clients ask, and act themselves.",
  );
  const hz = metadata?.control_hz;
  list(
    "facts",
    metadata
      ? [
          ["profile", metadata.profile ?? "the checkpoint's own"],
          ["chunk", `${metadata.horizon} rows`, hz ? `${brief(metadata.horizon / hz)} s at ${brief(hz)} Hz` : ""],
          ["denoise steps", String(metadata.num_steps)],
          ["device", metadata.device, metadata.compile_mode],
          ["precision", metadata.precision],
          ...(robot?.prompt ? [["prompt", robot.prompt]] : []),
        ]
      : [],
  );
}

function showRequests({ counts, clients, engine, latencies, last }) {
  const looked = counts.cache_hits + counts.cache_misses;
  const recent = latencies.time.filter((moment) => since(moment) < 10).length;
  list("tiles", [
    ["answered", String(counts.answered), recent ? `${brief(recent / 10)} /s` : ""],
    [
      "median",
      milliseconds(quantile(latencies.total_ms, 0.5)),
      latencies.time.length ? `p95 ${milliseconds(quantile(latencies.total_ms, 0.95))}` : "",
    ],
    [
      "cache hits",
      looked ? `${Math.round((100 * counts.cache_hits) / looked)} %` : "–",
      looked ? `${counts.cache_hits} of ${looked}` : "",
    ],
    [
      "waiting",
      engine ? String(engine.waiting) : "–",
      engine ? (engine.running ? `${engine.running} running` : "idle") : "",
    ],
  ]);
  const batches = Object.entries(engine?.batches ?? {}).map(
    ([size, times]) => `${times} ${size === "1" ? "single" : `of ${size}`}`,
  );
  list("traffic", [
    ["clients", `${clients.http} HTTP, ${clients.realtime} realtime, ${clients.openpi} OpenPI`],
    ["batches", batches.join(", ") || "–"],
    ["last answer", last ? ago(since(last.time)) : "–"],
    ["refused", String(counts.refused)],
    ["failed", String(counts.failed)],
    ["late, cancelled", `${counts.late}, ${counts.cancelled}`],
  ]);
}

function showStateVector({ last, metadata }) {
  const { joint_names: names, units } = metadata;
  put("state-note", last.state ? ago(since(last.time)) : "");
  if (!last.state)
    return build("state", "changed", () => [el("p", { class: "empty", textContent: "It was changed by its owner." })]);
  const values = build("state", names.join() + last.state.length, () =>
    last.state.map((_, index) => {
      const name = names[index] ?? `state ${index}`;
      return el(
        "p",
        {},
        el("span", { textContent: name, title: name }),
        el("b"),
        el("small", { textContent: units?.[index] ?? "" }),
      );
    }),
  );
  last.state.forEach((value, index) => (values[index].children[1].textContent = short(value)));
}

let charts = [];
function showChunk({ last, metadata }) {
  const { action_names: names, action_units: units, control_hz: hz, joint_names: joints } = metadata;
  const [rows, dims] = [last.actions.length, last.actions[0].length];
  build("chunk", `${names.join()} ${dims}`, () => {
    charts = last.actions[0].map((_, index) => new JointChart(names[index] ?? `action ${index}`, units?.[index] ?? ""));
    $("chunk").style.setProperty(
      "--columns",
      dims <= 8 ? dims : ([7, 8, 6, 5].find((columns) => dims % columns === 0) ?? 8),
    );
    return charts.map((chart) => chart.node);
  });
  const end = hz ? `${brief(rows / hz)} s` : `${rows} rows`;
  // A state can stand in the chart of an action only where both are the same quantity.
  const same = (index) => joints[index] === names[index] && !(units?.[index] ?? "").endsWith("/s");
  charts.forEach((chart, index) => {
    const measured = last.state && same(index) ? (last.state[index] ?? null) : null;
    chart.update(
      last.actions.map((row) => row[index]),
      measured,
      end,
    );
  });
  const dashed = same(0) ? "; dashed: where the joint was" : "";
  put("chunk-note", `${rows} × ${dims}, ${last.num_steps} steps, ${ago(since(last.time))}${dashed}`);
}

function showLatency({ latencies }) {
  const count = latencies.time.length;
  build("latency", "chart", () => [latencyChart.node]);
  const cut = latencyChart.update(latencies);
  const longest = milliseconds(Math.max(...latencies.total_ms));
  put("latency-note", cut ? `${cut} beyond the scale, the longest ${longest}` : "");
  latencyChart.left.textContent =
    count > 1 ? `${count} requests, the first ${ago(since(latencies.time[0]))}` : "1 request";
  latencyChart.right.textContent = ago(since(latencies.time.at(-1)));
}

/** The message, without the field that stands before it. */
const sentence = ({ field, message }) =>
  field && message.startsWith(`${field}: `) ? message.slice(field.length + 2) : message;

function showRefusals({ refusals, counts }) {
  put("refusals-note", counts.refused > refusals.length ? `the last ${refusals.length} of ${counts.refused}` : "");
  const key = JSON.stringify(refusals);
  build("refusals", key, () =>
    refusals.length
      ? refusals.map((one) =>
          el(
            "li",
            {},
            el("time", { textContent: new Date(1000 * one.time).toLocaleTimeString() }),
            el("code", { textContent: one.route }),
            el("span", {
              class: "pill",
              "data-tone": one.status < 500 ? "busy" : "bad",
              textContent: `${one.status} ${one.code}`,
            }),
            el(
              "p",
              {},
              one.field ? el("code", { textContent: one.field }) : null,
              el("span", { textContent: sentence(one) }),
            ),
          ),
        )
      : [el("li", { class: "empty", textContent: "No request has been refused." })],
  );
}

// ---- all of it ----

function show() {
  const silent = link.age > PATIENCE;
  const lost = link.state === "lost" || (link.state === "open" && silent);
  document.body.dataset.link = link.state === "locked" ? "locked" : lost ? "lost" : link.state;
  put("link", lost ? "disconnected" : ({ open: "live", locked: "locked" }[link.state] ?? "connecting"));
  const sentences = [];
  if (lost) {
    const what = snapshot ? " What you see is old." : "";
    sentences.push(
      silent
        ? `No answer for ${Math.floor(link.age)} s; trying again.${what}`
        : "The server has closed the connection; trying again.",
    );
  }
  $("main").hidden = !snapshot || link.state === "locked";
  if (snapshot) {
    sentences.push(showState(snapshot));
    showRobot(snapshot);
    showRequests(snapshot);
    $("nothing").hidden = snapshot.last !== null || snapshot.stage !== "ready";
    for (const id of ["cameras", "state", "chunk", "latency"]) $(id).closest("section").hidden = !snapshot.last;
    if (snapshot.last) {
      cameras.show(snapshot);
      showStateVector(snapshot);
      showChunk(snapshot);
      showLatency(snapshot);
    }
    showRefusals(snapshot);
  }
  const sentence = sentences.filter(Boolean).join(" ");
  put("banner", sentence);
  $("banner").hidden = !sentence;
  $("banner").dataset.tone = lost || STAGES[snapshot?.stage]?.[0] === "bad" ? "bad" : "busy";
}

let due = false;
const link = new Link("status/events", (message) => {
  snapshot = message;
  received = performance.now();
  if (due) return;
  due = true; // what comes faster than the screen, or while the tab is hidden, is not drawn
  requestAnimationFrame(() => ((due = false), show()));
});
link.follow();
setInterval(show, 1000);
