// Charts of a search as Plotly's JSON, from the trials' columns and the indices of those that match the filter.

import { seconds, count, gib } from "./numbers.js";

export const MOST_POINTS = 150; // per trace; a note below the charts says how many are drawn
const MOST_INTERVALS = 60; // each is an SVG element, and many of them hide the points
const GIB = 2 ** 30;
const DECADES = Array.from({ length: 12 }, (_, n) => 10 ** (n - 6)).flatMap((one) => [one, 2 * one, 5 * one].map((tick) => Number(tick.toPrecision(1)))); // of log axes
const FEW = 12; // runs up to which every run has its own tick

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
  const ranges = points("Range of its runs", sample(again, trials), number, measured, trials, { color: "--series-1", size: 6 });
  ranges.error_y = {
    type: "data", symmetric: false, thickness: 1.5, width: 4, color: "--series-1",
    array: ranges.customdata.map((i) => trials.high_s[i] - measured(i)), arrayminus: ranges.customdata.map((i) => measured(i) - trials.low_s[i]),
  };
  return {
    data: [
      dashes("Expected when chosen", awaited, number, (i) => expected(trials, i), trials, "--series-2"),
      points("Failed, at its expectation", sample(failed, trials), number, (i) => expected(trials, i), trials, { symbol: "x", color: "--ink-faint", size: 6 }),
      points("Measured", sample(ok, trials), number, measured, trials, { color: "--series-1", size: 6 }),
      ...(again.length ? [ranges] : []),
      {
        type: "scatter", mode: "lines", name: "Best so far", hoverinfo: "skip", line: { shape: "hv", color: "--good", width: 2 },
        x: [...line.map(([i]) => number(i)), last], y: [...line, line.at(-1) ?? []].map(([, seconds]) => seconds),
      },
      star(trials, shown, number, measured),
    ],
    layout: { xaxis: { title: "Run", ...(last <= FEW ? { dtick: 1 } : {}) }, yaxis: { title: axis(trials, "") } },
  };
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
  const parts = JSON.parse(place.dataset.parts).map(([name, seconds]) => ({ name, seconds }));
  const whole = trials.serving ? "request" : "step";
  let sum = 0;
  const bases = parts.map((part) => (sum += part.seconds) - part.seconds);
  const bars = [...parts.map((part, n) => ({ ...part, base: bases[n] })), { name: whole, seconds: sum, base: 0 }].reverse();
  const colour = (bar) => (bar.name === whole ? "--good" : bar.name === "ideal compute" ? "--series-1" : "--series-2");
  return {
    data: [{
      type: "bar", orientation: "h", y: bars.map((bar) => bar.name), x: bars.map((bar) => bar.seconds), base: bars.map((bar) => bar.base),
      marker: { color: bars.map(colour) }, text: bars.map((bar) => seconds(bar.seconds)), textposition: "outside", cliponaxis: false, hoverinfo: "skip",
    }],
    layout: { margin: { l: 170, r: 70, t: 8, b: 44 }, xaxis: { title: `Seconds of a ${whole}`, rangemode: "tozero" }, yaxis: { automargin: true } },
  };
}

// Adds a ring around the points of one row to a figure.
export function ring(figure, i, trials) {
  for (const trace of [...figure.data]) {
    const at = trace.customdata?.indexOf(i) ?? -1;
    if (at < 0) continue;
    figure.data.push({
      type: "scatter", mode: "markers", name: `Run ${trials.number[i] + 1}`, x: [trace.x[at]], y: [trace.y[at]], hoverinfo: "skip",
      showlegend: !figure.data.some((each) => each.name === `Run ${trials.number[i] + 1}`), marker: { symbol: "circle-open", size: 20, color: "--accent", line: { width: 3 } },
    });
  }
}

// Predicted against measured; predictions on the line are exact.
export function accuracy(trials, shown) {
  const both = sample(shown.filter((i) => trials.measured_step_s[i] != null), trials);
  const measured = (i) => trials.measured_step_s[i];
  const all = both.flatMap((i) => [measured(i), trials.predicted_step_s[i], trials.calibrated_step_s[i]]).filter((s) => s != null);
  const ends = all.length ? [Math.min(...all) * 0.9, Math.max(...all) * 1.1] : [];
  const known = both.filter((i) => trials.calibrated_step_s[i] != null);
  const after = points("Expected when chosen", known, measured, (i) => trials.calibrated_step_s[i], trials, { color: "--series-1", size: 6 });
  if (known.length <= MOST_INTERVALS) {
    after.error_y = {
      type: "data", symmetric: false, thickness: 1, width: 2, color: "--series-1",
      array: known.map((i) => (trials.calibrated_high_s[i] ?? trials.calibrated_step_s[i]) - trials.calibrated_step_s[i]),
      arrayminus: known.map((i) => trials.calibrated_step_s[i] - (trials.calibrated_low_s[i] ?? trials.calibrated_step_s[i])),
    };
  }
  const scale = ends.length && ends[1] > 10 * ends[0] ? { type: "log", tickvals: DECADES.filter((s) => s >= ends[0] && s <= ends[1]) } : { type: "linear" };
  return {
    data: [
      { type: "scatter", mode: "lines", name: "Predicted = measured", x: ends, y: ends, hoverinfo: "skip", line: { color: "--ink-faint", width: 1, dash: "dot" } },
      points("Cost model alone", both, measured, (i) => trials.predicted_step_s[i], trials, { symbol: "circle-open", color: "--series-2", size: 6 }),
      after,
    ],
    layout: { xaxis: { title: axis(trials, "Measured "), ...scale }, yaxis: { title: axis(trials, "Predicted "), ...scale } },
  };
}

// Throughput against memory: up and to the left is better; the line is the Pareto front.
export function front(trials, shown) {
  const memory = (i) => (trials.peak_memory_bytes[i] ?? trials.predicted_memory_bytes[i]) / GIB;
  const rate = (i) => trials.tokens_per_second_per_gpu[i];
  const ok = shown.filter((i) => trials.counts[i] === i && rate(i) != null && memory(i) > 0); // each configuration once
  const best = [];
  for (const i of [...ok].sort((a, b) => memory(a) - memory(b) || rate(b) - rate(a))) {
    if (!best.length || rate(i) > rate(best.at(-1))) best.push(i);
  }
  return {
    data: [
      points("Measured", sample(ok, trials), memory, rate, trials, { color: "--series-1", size: 6 }),
      { type: "scatter", mode: "lines", name: "Pareto front", hoverinfo: "skip", x: best.map(memory), y: best.map(rate), line: { color: "--series-3", width: 2 } },
      star(trials, shown, memory, rate),
    ],
    layout: { xaxis: { title: "Peak memory per GPU, GiB" }, yaxis: { title: "Tokens/s per GPU", automargin: true } },
  };
}

// Whether a trial can no longer become the best.
export function faded(trials, i) {
  return !["ok", "intended", "submitted"].includes(trials.state[i]);
}

// Axis title of the time that runs are compared by.
function axis(trials, before) {
  const { seconds, charged } = trials.quantity;
  const name = before ? before + seconds.toLowerCase() : seconds;
  return charged ? `${name} + penalty, s` : `${name}, s`;
}

function expected(trials, i) {
  return trials.calibrated_step_s[i] ?? trials.predicted_step_s[i];
}

// An even sample of at most MOST_POINTS trials that includes the best.
export function sample(indices, trials) {
  if (indices.length <= MOST_POINTS) return indices;
  const stride = indices.length / MOST_POINTS;
  const kept = Array.from({ length: MOST_POINTS }, (_, n) => indices[Math.floor(n * stride)]);
  return trials.best != null && indices.includes(trials.best) && !kept.includes(trials.best) ? [...kept, trials.best] : kept;
}

export function points(name, indices, x, y, trials, marker) {
  return {
    type: "scatter", mode: "markers", name, marker, x: indices.map(x), y: indices.map(y), customdata: indices,
    text: indices.map((i) => about(trials, i)), hovertemplate: "%{text}<extra></extra>",
  };
}

// Short horizontal lines in one SVG element; markers would need one element each.
function dashes(name, indices, x, y, trials, color) {
  const all = indices.map(x);
  const half = Math.max(0.1, (Math.max(...all) - Math.min(...all)) / 250);
  const triple = (values) => values.flatMap((value) => [value, value, null]);
  return {
    type: "scatter", mode: "lines", name, line: { color, width: 2 }, text: triple(indices.map((i) => about(trials, i))), hovertemplate: "%{text}<extra></extra>",
    x: all.flatMap((at) => [at - half, at + half, null]), y: triple(indices.map(y)), connectgaps: false,
  };
}

export function star(trials, shown, x, y) {
  const best = trials.best != null && shown.includes(trials.best) && y(trials.best) != null ? [trials.best] : [];
  return points("Best", best, x, y, trials, { symbol: "star", color: "--good", size: 15, line: { color: "--surface-raised", width: 1 } });
}

// Plotly interprets some tags in labels; the only user input here are numbers of a configuration.
function about(trials, i) {
  const lines = [`<b>Run ${trials.number[i] + 1}</b> · ${trials.state[i]}`, trials.arithmetic[i], trials.details[i]];
  if (trials.num_runs[i] > 1) lines.push(`${trials.num_runs[i]} runs, ${seconds(trials.low_s[i])} to ${seconds(trials.high_s[i])}; ${trials.counts[i] === i ? "this one counts" : "another one counts"}`);
  lines.push(`measured ${seconds(trials.measured_step_s[i])}, expected ${seconds(expected(trials, i))}`);
  if (trials.serving?.ttft_s[i] != null) lines.push(`TTFT ${seconds(trials.serving.ttft_s[i])}, TPOT ${seconds(trials.serving.tpot_s[i])}`);
  if (trials.tokens_per_second_per_gpu[i] != null) lines.push(`${count(trials.tokens_per_second_per_gpu[i])} ${trials.serving ? "output " : ""}tokens/s per GPU`);
  if (trials.peak_memory_bytes[i] != null) lines.push(`${gib(trials.peak_memory_bytes[i])} peak memory`);
  return lines.join("<br>");
}
