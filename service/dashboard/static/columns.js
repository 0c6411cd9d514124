// Columns of the table of runs: label, sort key and cell of each.

import { element } from "./elements.js";
import { count, gib, percent, seconds, setting } from "./numbers.js";

const SPARE = ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "data_parallel_size"]; // by the arithmetic
const CAUSE = 90; // characters of an error's first line

// {name, label, title, number, hidden (unless chosen), value(i) to sort by, cell(i) to show}
export function columns(trials, { runs }) {
  const { quantity, serving } = trials;
  const from = (values) => (i) => values[i];
  const none = (values) => values.every((value) => value == null);
  const off = (guess) => (i) => (guess[i] && trials.measured_step_s[i] ? guess[i] / trials.measured_step_s[i] - 1 : null);
  const time = (name, label, title, values, more = {}) => ({ name, label, title, number: true, value: from(values), cell: (i) => seconds(values[i]), ...more });
  const ended = trials.final_step_s.some((value) => value != null); // by then the last calibration says more
  const list = [
    {
      name: "configuration", label: "Configuration", look: "title", value: from(trials.arithmetic),
      cell: (i) => (runs ? element("a", { class: "whole", href: runs + trials.run_id[i], title: trials.details[i] }, trials.arithmetic[i]) : trials.arithmetic[i]),
    },
    { name: "details", label: "Details", hidden: true, value: from(trials.details), cell: from(trials.details) },
    ...trials.axes.map((axis) => ({
      name: axis.name, label: axis.label, look: SPARE.includes(axis.name) && "spare", number: typeof axis.values[0] === "number",
      value: from(axis.values), cell: (i) => setting(axis.values[i]),
    })),
    {
      name: "state", label: "State", value: from(trials.state),
      cell: (i) => element("div", {},
        element("span", { class: `state ${trials.states[trials.state[i]].tone}` }, trials.now[i] ?? trials.states[trials.state[i]].label),
        trials.cause[i] ? element("div", { class: "small cause", title: trials.cause[i] }, firstLine(trials.cause[i])) : null),
    },
    { name: "num_runs", label: "Runs", title: "Number of runs behind the measured time", number: true, hidden: true, value: from(trials.num_runs), cell: (i) => String(trials.num_runs[i]) },
    time("predicted", "Cost model", `${quantity.seconds} by the cost model alone`, trials.predicted_step_s, { hidden: true }),
    time("expected", "Expected", `${quantity.seconds} expected when the run was chosen`, trials.calibrated_step_s, { hidden: ended || none(trials.calibrated_step_s) }),
    ...(ended ? [time("calibrated", "Calibrated", `${quantity.seconds} calibrated by all runs of the search, with its 90% interval`, trials.final_step_s, {
      cell: (i) => lines(seconds(trials.final_step_s[i]), trials.final_low_s[i] != null && between(trials.final_low_s[i], trials.final_high_s[i])),
    })] : []),
    time("measured", "Measured", `${quantity.seconds} of the representative run, with the range of all runs`, trials.measured_step_s, {
      cell: (i) => lines(
        element("strong", {}, seconds(trials.measured_step_s[i])),
        trials.reduced[i] && trials.measured_step_s[i] != null && "extrapolated",
        trials.num_runs[i] > 1 && `${trials.num_runs[i]} runs, ${between(trials.low_s[i], trials.high_s[i])}`,
      ),
    }),
    { name: "error", label: "Error", title: "Expected relative to measured", number: true, hidden: Boolean(serving) || ended || none(trials.calibrated_step_s), value: off(trials.calibrated_step_s), cell: (i) => percent(off(trials.calibrated_step_s)(i)) },
    ...(serving ? [["ttft", "Time to first token"], ["tpot", "Time per output token"]].map(([name, label]) => time(name, label, "", serving[`${name}_s`], {
      cell: (i) => lines(seconds(serving[`${name}_s`][i]), serving[`predicted_${name}_s`][i] != null && `cost model ${seconds(serving[`predicted_${name}_s`][i])}`),
    })) : []),
    ...(serving ? [{ name: "misses", label: "Targets missed", hidden: !serving.misses.some((each) => each.length), value: (i) => serving.misses[i].join("; "), cell: (i) => serving.misses[i].join("; ") }] : []),
    { name: "rate", label: quantity.rate, number: true, hidden: none(trials.tokens_per_second_per_gpu), value: from(trials.tokens_per_second_per_gpu), cell: (i) => count(trials.tokens_per_second_per_gpu[i]) },
    { name: "memory", label: "Peak memory", title: `Per ${quantity.device}`, number: true, hidden: none(trials.peak_memory_bytes), value: from(trials.peak_memory_bytes), cell: (i) => gib(trials.peak_memory_bytes[i]) },
    { name: "why", label: "Chosen because", hidden: true, value: from(trials.why), cell: from(trials.why) },
    { name: "cause", label: "Cause", hidden: true, value: (i) => trials.cause[i] ?? "", cell: (i) => trials.cause[i] ?? "" },
  ];
  return [{ name: "run", label: "Run", number: false, value: (i) => trials.number[i] + 1, cell: (i) => String(trials.number[i] + 1) }, ...list];
}

// Sorts indices by the values of a column; missing values come last.
export function sorted(indices, column, descending) {
  const keys = new Map(indices.map((i) => [i, column.value(i)]));
  const sign = descending ? -1 : 1;
  return [...indices].sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    if (x == null || y == null) return (x == null) - (y == null) || a - b;
    return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b;
  });
}

function firstLine(text) {
  const [line] = text.split("\n");
  return line.length > CAUSE ? `${line.slice(0, CAUSE)} …` : line;
}

function between(low, high) {
  return `${seconds(low)} – ${seconds(high)}`;
}

function lines(first, ...more) {
  return element("div", {}, first, ...more.filter(Boolean).map((text) => element("div", { class: "soft small" }, text)));
}
