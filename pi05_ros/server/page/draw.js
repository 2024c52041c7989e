// Charts, and how numbers are written.

import { el } from "./elements.js";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const quantile = (values, q) => {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : null;
};

/** A number in about three digits, with a real minus sign. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return value
    .toFixed(digits)
    .replace(/^-(0(\.0*)?)$/, "$1")
    .replace("-", "−");
}

/** The same for what is set rather than measured: 50, not 50.0. */
export const brief = (value) => String(Number(value.toPrecision(3)));

export const milliseconds = (value) =>
  value === null ? "–" : value >= 10000 ? `${short(value / 1000)} s` : `${short(value)} ms`;

const WIDTH = 200;
const HEIGHT = 60;
/** The least range that a joint's chart shows, so that noise does not look like motion. */
const LEAST_RANGE = 0.1;

/** One dimension of a chunk over time. */
export class JointChart {
  constructor(name, unit) {
    this.line = svg("polyline", { class: "line" });
    this.measured = svg("line", { class: "measured", x1: 0, x2: WIDTH });
    this.plot = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      this.measured,
      this.line,
    );
    [this.high, this.low, this.end] = ["high", "low", "end"].map((name) => el("span", { class: name }));
    this.name = name;
    this.unit = unit;
    this.node = el(
      "figure",
      { class: "joint" },
      el("figcaption", {}, el("b", { textContent: name, title: name }), el("span", { textContent: unit })),
      el("div", { class: "plot" }, this.plot, this.high, this.low),
      el("div", { class: "axis" }, el("span", { textContent: "0" }), this.end),
    );
  }

  /** values: by row, row i at (i + 1) periods. measured: where the joint was, null if that is not known. */
  update(values, measured, end) {
    const all = measured === null ? values : [...values, measured];
    const middle = (Math.max(...all) + Math.min(...all)) / 2;
    const range = Math.max(Math.max(...all) - Math.min(...all), LEAST_RANGE);
    const y = (value) => (HEIGHT * (0.5 - (0.9 * (value - middle)) / range)).toFixed(2);
    this.line.setAttribute(
      "points",
      values.map((value, row) => `${(((row + 1) * WIDTH) / values.length).toFixed(2)},${y(value)}`).join(" "),
    );
    this.measured.toggleAttribute("hidden", measured === null);
    for (const side of ["y1", "y2"]) this.measured.setAttribute(side, measured === null ? 0 : y(measured));
    this.high.textContent = short(middle + range / 2);
    this.low.textContent = short(middle - range / 2);
    this.end.textContent = end;
    this.plot.setAttribute(
      "aria-label",
      `${this.name}: from ${short(values[0])} to ${short(values.at(-1))} ${this.unit}, ` +
        `between ${short(Math.min(...values))} and ${short(Math.max(...values))}`,
    );
  }
}

export const STAGES = [
  ["queue_ms", "waiting"],
  ["cache_lookup_ms", "cache look-up"],
  ["preprocess_ms", "images"],
  ["prefix_ms", "prefix"],
  ["denoise_ms", "denoising"],
  ["postprocess_ms", "postprocessing"],
];
/** Requests for which there is room at least, so that a few do not look like many. */
const LEAST_BARS = 60;

/** Stages of every request, stacked, oldest to the left; with their medians and 95th percentiles. */
export class LatencyChart {
  constructor() {
    this.bars = STAGES.map(([key]) => svg("path", { class: `fill ${key}` }));
    this.grid = [0.25, 0.5, 0.75].map((at) =>
      svg("line", { class: "grid", x1: 0, x2: 600, y1: 150 * at, y2: 150 * at }),
    );
    this.plot = svg(
      "svg",
      { viewBox: "0 0 600 150", preserveAspectRatio: "none", role: "img" },
      ...this.grid,
      ...this.bars,
    );
    [this.high, this.half, this.left, this.right] = ["high", "half", "left", "right"].map((name) =>
      el("span", { class: name }),
    );
    this.cells = new Map();
    const rows = [...STAGES, ["total_ms", "total"]].map(([key, name]) => {
      const cells = [el("td"), el("td")];
      this.cells.set(key, cells);
      const label = el("th", { scope: "row" }, el("i", { class: `swatch ${key}` }), name);
      return el("tr", { class: key }, label, ...cells);
    });
    const heads = ["stage", "p50", "p95"].map((text) => el("th", { scope: "col", textContent: text }));
    this.node = el(
      "div",
      { class: "latency-body" },
      el(
        "div",
        {},
        el("div", { class: "plot" }, this.plot, this.high, this.half),
        el("div", { class: "axis" }, this.left, this.right),
      ),
      el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows)),
    );
  }

  /** latencies: columns by stage. Returns how many bars do not fit: one slow start is not to flatten all others. */
  update(latencies) {
    const totals = latencies.total_ms;
    const usual = quantile(totals, 0.95) ?? 0;
    const top = niceCeiling(Math.min(Math.max(...totals, 0.1), 2 * usual));
    const width = 600 / Math.max(totals.length, LEAST_BARS);
    const base = totals.map(() => 0);
    STAGES.forEach(([key], stage) => {
      let path = "";
      latencies[key].forEach((value, index) => {
        const from = Math.min(base[index], top);
        const to = Math.min((base[index] += value), top);
        if (to - from < top / 1000) return;
        const x = 600 - (totals.length - index) * width;
        const [y, height] = [150 * (1 - to / top), (150 * (to - from)) / top];
        const [left, bar] = [x.toFixed(2), (0.85 * width).toFixed(2)];
        path += `M${left} ${y.toFixed(2)}h${bar}v${height.toFixed(2)}h-${bar}z`;
      });
      this.bars[stage].setAttribute("d", path);
    });
    for (const [key, [median, high]] of this.cells) {
      median.textContent = milliseconds(quantile(latencies[key], 0.5));
      high.textContent = milliseconds(quantile(latencies[key], 0.95));
    }
    this.high.textContent = milliseconds(top);
    this.half.textContent = milliseconds(top / 2);
    const [median, high] = this.cells.get("total_ms").map((cell) => cell.textContent);
    this.plot.setAttribute(
      "aria-label",
      `Latency of ${totals.length} requests: median ${median}, 95th percentile ${high}`,
    );
    return totals.filter((total) => total > top).length;
  }
}

function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999);
}
