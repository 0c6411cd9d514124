// Charts of a search for plot.js, from the trials' columns and the indices of those that match the filter.

import { seconds, count, gib } from "./numbers.js";

export const MOST_POINTS = 150; // per trace; a note below the charts says how many are drawn
const MOST_INTERVALS = 60; // each is an SVG element, and many of them hide the points
const OUTLIER_RATIO = 3; // of the 80th percentile: beyond it, a point would flatten all others
const GIB = 2 ** 30;

// Measurements by run, the best so far, and each run's prediction when it was chosen. Of a configuration that ran again the run
// that counts is drawn with the range of all.
export function history(trials, shown) {
  const measured = (i) => trials.measured_step_s[i];
  const ok = shown.filter((i) => measured(i) != null);
  const failed = shown.filter((i) => measured(i) == null && faded(trials, i) && expected(trials, i) != null);
  const number = (i) => trials.number[i] + 1;
  const last = shown.length ? number(shown.at(-1)) : 0;
  const awaited = sample(shown.filter((i) => expected(trials, i) != null && !faded(trials, i)), trials);
  const line = bestSoFar(trials, shown);
  const again = ok.filter((i) => trials.num_runs[i] > 1 && trials.counts[i] === i);
  const ranged = sample(again, trials);
  const ends = [ranged.map((i) => trials.low_s[i]), ranged.map((i) => trials.high_s[i])];
  return clipped({
    traces: [
      dashes("Expected", awaited, number, (i) => expected(trials, i), trials, "--series-2"),
      points("Failed (at its expected time)", sample(failed, trials), number, (i) => expected(trials, i), trials, { symbol: "cross", color: "--ink-faint" }),
      points("Measured", sample(ok, trials), number, measured, trials, { color: "--series-1" }),
      points("Range of its runs", ranged, number, measured, trials, { color: "--series-1", ends }),
      { mode: "lines", name: "Best so far", steps: true, color: "--good", x: [...line.map(([i]) => number(i)), ...(line.length ? [last] : [])], y: [...line, ...line.slice(-1)].map(([, seconds]) => seconds) },
      star(trials, shown, number, measured),
    ],
    zoom: true,
    x: { title: "Run", whole: true },
    y: { title: axis(trials, "") },
  });
}

// A figure whose y axis ends a little above its usual values: slower points are arrows at the top, labelled with their seconds.
function clipped(figure) {
  const values = figure.traces.flatMap((trace) => trace.y).filter((y) => y != null).sort((a, b) => a - b);
  const usual = OUTLIER_RATIO * values[Math.floor(0.8 * (values.length - 1))];
  if (!values.length || values.at(-1) <= usual) return figure;
  const top = 1.1 * values.findLast((y) => y <= usual);
  const cut = (list) => list?.map((y) => (y > usual ? top : y));
  const above = new Map(figure.traces.flatMap(({ keys = [], x, y, text }) => keys.flatMap((key, n) => (y[n] > usual ? [[key, { key, x: x[n], y: y[n], text: text[n] }]] : []))));
  const points = [...above.values()];
  const outside = { mode: "points", name: "Slower, not to scale", symbol: "arrow", size: 10, color: "--warn", x: points.map(({ x }) => x), y: points.map(() => top), text: points.map(({ text }) => text), keys: points.map(({ key }) => key), labels: points.map(({ y }) => seconds(y)) };
  const traces = figure.traces.map((trace) => ({ ...trace, y: trace.y.map((y) => (y > usual ? null : y)), ends: trace.ends?.map(cut) }));
  return { ...figure, traces: [...traces, outside] };
}

// [run, seconds of the best configuration from then on] wherever it changes: a repeat that was slower takes the place of the run
// before, and so does a whole run of what was only seen reduced.
function bestSoFar(trials, shown) {
  const known = new Map(); // by configuration
  const whole = new Set();
  const line = [];
  let best = Infinity;
  for (const i of shown) {
    const [seconds, which] = [trials.measured_step_s[i], trials.counts[i]];
    const before = known.get(which);
    if (seconds != null && !(trials.reduced[i] && whole.has(which))) known.set(which, seconds);
    else if (seconds == null && faded(trials, i) && !trials.reduced[i] && trials.state[i] !== "timeout" && !whole.has(which)) known.delete(which);
    if (seconds != null && !trials.reduced[i]) whole.add(which);
    const now = known.get(which) ?? Infinity;
    const next = now <= best ? now : before === best ? Math.min(...known.values()) : best;
    if (next !== best && next < Infinity) line.push([i, next]);
    best = next;
  }
  return line;
}

// From the ideal compute of the best configuration's step to its measured seconds; of serving, the parts of a request.
export function waterfall(trials, shown, place) {
  const parts = JSON.parse(place.dataset.parts).map(([name, seconds, color]) => ({ name, seconds, color }));
  const whole = trials.serving ? "request" : "step";
  let sum = 0;
  const bases = parts.map((part) => (sum += part.seconds) - part.seconds);
  const bars = [...parts.map((part, n) => ({ ...part, base: bases[n] })), { name: whole, seconds: sum, color: "--good", base: 0 }].reverse();
  return {
    traces: [{
      mode: "bars", y: bars.map((bar) => bar.name), x: bars.map((bar) => bar.base + bar.seconds), from: bars.map((bar) => bar.base),
      colors: bars.map((bar) => bar.color), labels: bars.map((bar) => seconds(bar.seconds)),
    }],
    x: { title: `Seconds of a ${whole}`, zero: true },
    y: { left: 170 },
  };
}

// Adds a ring around the points of one row to a figure.
export function ring(figure, i, trials) {
  for (const trace of [...figure.traces]) {
    const at = trace.keys?.indexOf(i) ?? -1;
    if (at >= 0) figure.traces.push({ mode: "points", name: `Run ${trials.number[i] + 1}`, x: [trace.x[at]], y: [trace.y[at]], symbol: "ring", size: 20, color: "--accent" });
  }
}

// Predicted against measured; predictions on the line are exact.
export function accuracy(trials, shown) {
  const both = sample(shown.filter((i) => trials.measured_step_s[i] != null), trials);
  const measured = (i) => trials.measured_step_s[i];
  const all = both.flatMap((i) => [measured(i), trials.predicted_step_s[i], trials.calibrated_step_s[i]]).filter((s) => s != null);
  const ends = all.length ? [Math.min(...all) * 0.9, Math.max(...all) * 1.1] : [];
  const known = both.filter((i) => trials.calibrated_step_s[i] != null);
  const calibrated = (i) => trials.calibrated_step_s[i];
  const after = points("Expected", known, measured, calibrated, trials, { color: "--series-1" });
  if (known.length <= MOST_INTERVALS) after.ends = ["low", "high"].map((end) => known.map((i) => trials[`calibrated_${end}_s`][i] ?? calibrated(i)));
  const log = ends.length > 0 && ends[1] > 10 * ends[0];
  return {
    traces: [
      { mode: "lines", name: "Predicted = measured", x: ends, y: ends, color: "--ink-faint", width: 1, dash: true },
      points("Cost model", both, measured, (i) => trials.predicted_step_s[i], trials, { symbol: "ring", color: "--series-2" }),
      after,
    ],
    x: { title: axis(trials, "Measured "), log },
    y: { title: axis(trials, "Predicted "), log },
  };
}

// Throughput against memory: up and to the left is better; the line is the Pareto front.
export function front(trials, shown) {
  const memory = (i) => (trials.peak_memory_bytes[i] ?? trials.predicted_memory_bytes[i]) / GIB;
  const rate = (i) => trials.tokens_per_second_per_gpu[i];
  const ok = shown.filter((i) => trials.counts[i] === i && rate(i) != null && memory(i) > 0); // each configuration once
  const line = pareto(ok, memory, rate);
  return {
    traces: [
      points("Measured", sample(ok, trials), memory, rate, trials, { color: "--series-1" }),
      { mode: "lines", name: "Pareto front", x: line.map(memory), y: line.map(rate), color: "--series-3" },
      star(trials, shown, memory, rate),
    ],
    x: { title: `Peak memory per ${trials.quantity.device}, GiB` },
    y: { title: trials.quantity.rate },
  };
}

// Throughput against a latency of serving configurations: up and to the left is better; the shaded region meets the target.
const against = (name, title) => (trials, shown) => {
  const { serving } = trials;
  const latency = (i) => serving[name][i];
  const rate = (i) => trials.tokens_per_second_per_gpu[i];
  const [guess, guessedRate] = [serving[`predicted_${name}`], serving.predicted_tokens_per_second_per_gpu];
  const ok = shown.filter((i) => trials.counts[i] === i && latency(i) != null && rate(i) != null);
  const [kept, missed] = [ok.filter((i) => !serving.misses[i].length), ok.filter((i) => serving.misses[i].length)];
  const guessed = shown.filter((i) => guess[i] != null && guessedRate[i] != null);
  const line = pareto(ok, latency, rate);
  return {
    traces: [
      points("Cost model", sample(guessed, trials), (i) => guess[i], (i) => guessedRate[i], trials, { symbol: "ring", color: "--series-2" }),
      points("Measured, misses a target", sample(missed, trials), latency, rate, trials, { symbol: "cross", color: "--ink-faint", size: 7 }),
      points("Measured", sample(kept, trials), latency, rate, trials, { color: "--series-1", size: 7 }),
      { mode: "lines", name: "Pareto front", x: line.map(latency), y: line.map(rate), color: "--series-3" },
      star(trials, shown, latency, rate),
    ],
    x: { title, zero: true },
    y: { title: trials.quantity.rate, zero: true },
    shapes: serving.targets[name] == null ? [] : [{ to: serving.targets[name], color: "--good", label: "target" }],
  };
};
export const ttft = against("ttft_s", "Time to first token, s");
export const tpot = against("tpot_s", "Time per output token, s");

// Pareto front: indices with a higher rate than all others at less x; empty if there is only one.
function pareto(indices, x, rate) {
  const best = [];
  for (const i of [...indices].sort((a, b) => x(a) - x(b) || rate(b) - rate(a))) if (!best.length || rate(i) > rate(best.at(-1))) best.push(i);
  return best.length > 1 ? best : [];
}

// Returns whether a trial ended without a result.
export function faded(trials, i) {
  return trials.states[trials.state[i]].failed;
}

// Title of the axis of the compared time.
function axis(trials, before) {
  const { seconds, charged } = trials.quantity;
  const name = before ? before + seconds.toLowerCase() : seconds;
  return charged ? `${name} + penalty, s` : `${name}, s`;
}

function expected(trials, i) {
  return trials.calibrated_step_s[i] ?? trials.predicted_step_s[i];
}

// An even sample of at most MOST_POINTS trials that includes the best.
function sample(indices, trials) {
  if (indices.length <= MOST_POINTS) return indices;
  const stride = indices.length / MOST_POINTS;
  const kept = Array.from({ length: MOST_POINTS }, (_, n) => indices[Math.floor(n * stride)]);
  return trials.best != null && indices.includes(trials.best) && !kept.includes(trials.best) ? [...kept, trials.best] : kept;
}

function points(name, indices, x, y, trials, look) {
  return { mode: "points", name, ...look, x: indices.map(x), y: indices.map(y), keys: indices, text: indices.map((i) => about(trials, i)) };
}

// Short horizontal lines in one SVG element; markers would need one element each.
function dashes(name, indices, x, y, trials, color) {
  const all = indices.map(x);
  const half = Math.max(0.1, (Math.max(...all) - Math.min(...all)) / 250);
  return {
    mode: "lines", name, color, x: all.flatMap((at) => [at - half, at + half, null]), y: indices.flatMap((i) => [y(i), y(i), null]),
    text: indices.flatMap((i) => [about(trials, i), about(trials, i), null]),
  };
}

function star(trials, shown, x, y) {
  const best = trials.best != null && shown.includes(trials.best) && y(trials.best) != null ? [trials.best] : [];
  return points("Best", best, x, y, trials, { symbol: "star", color: "--good", size: 15 });
}

function about(trials, i) {
  const lines = [`Run ${trials.number[i] + 1} · ${trials.state[i]}`, trials.arithmetic[i], trials.details[i]];
  if (trials.num_runs[i] > 1) lines.push(`${trials.num_runs[i]} runs, ${seconds(trials.low_s[i])} to ${seconds(trials.high_s[i])}${trials.counts[i] === i ? "; this run represents them" : ""}`);
  lines.push(`measured ${seconds(trials.measured_step_s[i])}, expected ${seconds(expected(trials, i))}`);
  if (trials.serving?.ttft_s[i] != null) lines.push(`TTFT ${seconds(trials.serving.ttft_s[i])}, TPOT ${seconds(trials.serving.tpot_s[i])}`);
  if (trials.tokens_per_second_per_gpu[i] != null) lines.push(`${count(trials.tokens_per_second_per_gpu[i])} ${trials.serving ? "output " : ""}tokens/s per ${trials.quantity.device}`);
  if (trials.peak_memory_bytes[i] != null) lines.push(`${gib(trials.peak_memory_bytes[i])} peak memory`);
  return lines.join("\n");
}
