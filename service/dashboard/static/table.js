// The table of trials, a page of it at a time: ten thousand rows in the document would cost seconds.

import { faded } from "./charts.js";
import { element } from "./elements.js";
import { count, gib, percent, seconds } from "./numbers.js";

export const ROWS_A_PAGE = 25;

// Shows one page of the trials at `indices`. `log(run id)` promises the end of a log, `pick` marks configurations to compare,
// `runs` is the address before a run's id, where there are pages to look closer.
export function show(body, trials, indices, { page, log, picked, pick, runs }) {
  const open = new Set([...body.querySelectorAll("details[open]")].map((log) => log.dataset.run));
  const part = indices.slice(page * ROWS_A_PAGE, (page + 1) * ROWS_A_PAGE);
  const focused = document.activeElement?.closest("tr")?.dataset.key;
  const before = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const rows = part.map((i) => {
    const row = made(trials, i, { log, picked, pick, runs, open: open.has(trials.run_id[i]) });
    const old = before.get(trials.run_id[i]);
    return old && old.dataset.says === row.dataset.says ? old : row; // keeps opened logs and the focus
  });
  body.replaceChildren(...rows);
  if (focused && !body.contains(document.activeElement)) body.querySelector(`[data-key="${CSS.escape(focused)}"] summary`)?.focus();
}

function made(trials, i, { log, picked, pick, runs, open }) {
  const [measured, predicted, calibrated] = ["measured_step_s", "predicted_step_s", "calibrated_step_s"].map((name) => trials[name][i]);
  const best = i === trials.best;
  const number = trials.number[i] + 1;
  const run = trials.run_id[i];
  const state = trials.state[i];
  const error = (guess) => (guess && measured ? guess / measured - 1 : null);
  const cells = [
    element(
      "th", { scope: "row", class: "whole", "data-label": "Run" },
      element("span", {}, runs ? pickBox() : null, String(number), best ? element("span", { class: "state good" }, "best") : null),
    ),
    element(
      "td", { class: "wide", "data-label": "Configuration" },
      configuration(), element("br"), element("span", { class: "soft small" }, trials.details[i]),
    ),
    element(
      "td", { class: "wide", "data-label": "State" },
      element("span", { class: `state ${trials.tones[state] ?? ""}` }, state),
      trials.cause[i] ? element("div", { class: "small" }, trials.cause[i]) : null,
      ...(trials.serving?.misses[i] ?? []).map((miss) => element("div", { class: "small missed" }, miss)),
      faded(trials, i) && state !== "abandoned" ? logBox() : null,
    ),
    figure("Predicted", seconds(predicted), ...off(predicted)),
    figure("After calibration", seconds(calibrated), ...off(calibrated)),
    figure("Measured", element("strong", {}, seconds(measured)), trials.reduced[i] && measured != null ? element("div", { class: "soft small" }, "extrapolated") : null),
    ...(trials.serving ? latencies() : [figure("Error before", percent(error(predicted))), figure("Error after", percent(error(calibrated)))]),
    figure(trials.quantity.rate, count(trials.tokens_per_second_per_gpu[i])),
    figure("Peak memory", gib(trials.peak_memory_bytes[i])),
  ];
  const row = element("tr", { "data-key": run, class: best ? "chosen" : faded(trials, i) ? "faded" : null }, ...cells);
  row.dataset.says = `${row.className}|${row.textContent}|${picked.has(i)}`;
  if (open) row.querySelector("details")?.setAttribute("open", "");
  return row;

  function configuration() {
    return runs ? element("a", { class: "whole", href: runs + run }, trials.arithmetic[i]) : element("span", { class: "whole" }, trials.arithmetic[i]);
  }

  // For serving, latencies take the errors' columns.
  function off(guess) {
    return trials.serving && error(guess) != null ? [element("div", { class: "soft small" }, percent(error(guess)))] : [];
  }

  function latencies() {
    return [["TTFT", "ttft_s"], ["TPOT", "tpot_s"]].map(([label, name]) => {
      const guess = element("div", { class: "soft small" }, `predicted ${seconds(trials.serving[`predicted_${name}`][i])}`);
      return figure(label, element("div", {}, seconds(trials.serving[name][i])), guess);
    });
  }

  function pickBox() {
    const label = `Compare run ${number}`;
    return element("input", { type: "checkbox", checked: picked.has(i), "aria-label": label, title: label, onchange: () => pick(i) });
  }

  function logBox() {
    const text = element("pre", { tabindex: 0 });
    const fill = async () => {
      if (!box.open || text.textContent) return;
      text.textContent = await log(run).catch(() => "The log could not be loaded.");
    };
    const box = element("details", { class: "small", "data-run": run, ontoggle: fill }, element("summary", {}, "End of the log"), text);
    return box;
  }
}

function figure(label, ...content) {
  return element("td", { class: "number", "data-label": label }, element("div", {}, ...content));
}
