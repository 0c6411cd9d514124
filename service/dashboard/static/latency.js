// Throughput against a latency of serving configurations: up and to the left is better; the shaded region meets the target.

import { points, sample, star } from "./charts.js";

const NAMES = { ttft_s: "Time to first token, s", tpot_s: "Time per output token, s" };

export const ttft = (trials, shown) => against("ttft_s", trials, shown);
export const tpot = (trials, shown) => against("tpot_s", trials, shown);

function against(name, trials, shown) {
  const { serving } = trials;
  const latency = (i) => serving[name][i];
  const rate = (i) => trials.tokens_per_second_per_gpu[i];
  const [guess, guessedRate] = [serving[`predicted_${name}`], serving.predicted_tokens_per_second_per_gpu];
  const ok = shown.filter((i) => trials.counts[i] === i && latency(i) != null && rate(i) != null);
  const [kept, missed] = [ok.filter((i) => !serving.misses[i].length), ok.filter((i) => serving.misses[i].length)];
  const guessed = shown.filter((i) => guess[i] != null && guessedRate[i] != null);
  const line = front(ok, latency, rate);
  return {
    data: [
      points("Cost model alone", sample(guessed, trials), (i) => guess[i], (i) => guessedRate[i], trials, { symbol: "circle-open", color: "--series-2", size: 6 }),
      points("Measured, misses a target", sample(missed, trials), latency, rate, trials, { symbol: "x", color: "--ink-faint", size: 7 }),
      points("Measured", sample(kept, trials), latency, rate, trials, { color: "--series-1", size: 7 }),
      { type: "scatter", mode: "lines", name: "Pareto front", hoverinfo: "skip", x: line.map(latency), y: line.map(rate), line: { color: "--series-3", width: 2 } },
      star(trials, shown, latency, rate),
    ].filter((trace) => trace.x.length),
    layout: { xaxis: { title: NAMES[name], rangemode: "tozero" }, yaxis: { title: trials.quantity.rate, rangemode: "tozero" }, ...target(serving.targets[name]) },
  };
}

// The Pareto front.
function front(indices, latency, rate) {
  const best = [];
  for (const i of [...indices].sort((a, b) => latency(a) - latency(b) || rate(b) - rate(a))) {
    if (!best.length || rate(i) > rate(best.at(-1))) best.push(i);
  }
  return best;
}

// The region to the left of the limit.
function target(limit) {
  if (limit == null) return {};
  const edge = { xref: "x", yref: "paper", x1: limit, y0: 0, y1: 1, layer: "below" };
  return {
    shapes: [
      { ...edge, type: "rect", x0: 0, fillcolor: "--good-surface", line: { width: 0 } },
      { ...edge, type: "line", x0: limit, line: { color: "--good", width: 1, dash: "dash" } },
    ],
    annotations: [{ xref: "x", yref: "paper", x: limit, y: 1, xanchor: "left", yanchor: "top", showarrow: false, text: "target", font: { color: "--good" } }],
  };
}
