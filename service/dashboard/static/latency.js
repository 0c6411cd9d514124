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
    traces: [
      points("Cost model", sample(guessed, trials), (i) => guess[i], (i) => guessedRate[i], trials, { symbol: "ring", color: "--series-2" }),
      points("Measured, misses a target", sample(missed, trials), latency, rate, trials, { symbol: "cross", color: "--ink-faint", size: 7 }),
      points("Measured", sample(kept, trials), latency, rate, trials, { color: "--series-1", size: 7 }),
      { mode: "lines", name: "Pareto front", x: line.map(latency), y: line.map(rate), color: "--series-3" },
      star(trials, shown, latency, rate),
    ],
    x: { title: NAMES[name], zero: true },
    y: { title: trials.quantity.rate, zero: true },
    shapes: serving.targets[name] == null ? [] : [{ to: serving.targets[name], color: "--good", label: "target" }],
  };
}

// The Pareto front; none of one run.
function front(indices, latency, rate) {
  const best = [];
  for (const i of [...indices].sort((a, b) => latency(a) - latency(b) || rate(b) - rate(a))) {
    if (!best.length || rate(i) > rate(best.at(-1))) best.push(i);
  }
  return best.length > 1 ? best : []; // one point is no line
}
