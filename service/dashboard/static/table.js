// The table of configurations that ran, a page of it at a time: ten thousand rows in the document would cost seconds.

import { faded } from "./charts.js";
import { element } from "./elements.js";
import { ABSENT, seconds } from "./numbers.js";

export const ROWS_A_PAGE = 25;

const look = (column) => [column.number && "number", column.look].filter(Boolean).join(" ") || null;

// The header: a button for each column that sorts by it.
export function head(place, columns, { sort, sortBy }) {
  const [by, descending] = [sort.replace(/^-/, ""), sort.startsWith("-")];
  const says = columns.map((column) => column.name).join() + sort;
  if (place.dataset.says === says) return;
  place.dataset.says = says;
  const focused = document.activeElement?.closest("th")?.dataset.column;
  const cells = columns.map((column) => {
    const chosen = column.name === by;
    const next = chosen && !descending ? `-${column.name}` : column.name;
    const arrow = element("span", { "aria-hidden": "true" }, chosen ? (descending ? "\u00a0↓" : "\u00a0↑") : "");
    const button = element("button", { type: "button", title: column.title, onclick: () => sortBy(next) }, column.label, arrow);
    const order = chosen ? (descending ? "descending" : "ascending") : null;
    return element("th", { scope: "col", class: look(column), "data-column": column.name, "aria-sort": order }, button);
  });
  place.replaceChildren(element("tr", {}, ...cells));
  if (focused) place.querySelector(`[data-column="${CSS.escape(focused)}"] button`)?.focus();
}

// One page of the trials at `indices`, each with its configuration's other runs on request. `state`: {page, picked, open, marked},
// the sets by index; `act`: {pick(i), toggle(i), mark(i), href(run) is its page's address, log(run) promises the end of a log, command(run) that of its launch
// command, or is null}.
export function show(body, trials, columns, indices, state, act) {
  const focused = document.activeElement?.closest("tr")?.dataset.key;
  const control = document.activeElement?.dataset.control;
  const before = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const kept = (row) => {
    const old = before.get(row.dataset.key);
    if (old && old.dataset.says === row.dataset.says) return old; // keeps fetched logs and the focus
    for (const box of old?.querySelectorAll("details[open]") ?? []) row.querySelector(`[data-text="${box.dataset.text}"]`)?.setAttribute("open", "");
    return row;
  };
  const part = indices.slice(state.page * ROWS_A_PAGE, (state.page + 1) * ROWS_A_PAGE);
  body.replaceChildren(...part.flatMap((i) => [kept(row(i)), ...(state.open.has(i) ? [kept(more(i))] : [])]));
  if (focused && !body.contains(document.activeElement)) {
    body.querySelector(`[data-key="${CSS.escape(focused)}"] [data-control="${control ?? "toggle"}"]`)?.focus();
  }

  function row(i) {
    const best = i === trials.best;
    const cells = columns.map((column) => (column.name === "run" ? heading(i, best) : cell(column, i)));
    const look = [best ? "chosen" : faded(trials, i) ? "faded" : null, state.marked === i ? "marked" : null].filter(Boolean).join(" ");
    const made = element("tr", { "data-key": trials.run_id[i], class: look || null }, ...cells);
    const names = columns.map((column) => column.name).join();
    made.dataset.says = `${look}|${made.textContent}|${state.picked.has(i)}|${state.open.has(i)}|${names}`;
    return made;
  }

  function heading(i, best) {
    const number = trials.number[i] + 1;
    const pick = element("input", { type: "checkbox", checked: state.picked.has(i), "aria-label": `Select run ${number}`, "data-control": "pick", "data-compare": act.href(trials.run_id[i]), "data-label": `Run ${number}: ${trials.arithmetic[i]}`, onchange: () => act.pick(i) });
    const shown = element("button", {
      type: "button", class: "plain", title: "Show it in the charts", "aria-pressed": String(state.marked === i), "data-control": "mark", onclick: () => act.mark(i),
    }, String(number));
    const open = state.open.has(i);
    const toggle = element("button", {
      type: "button", class: "plain", "aria-expanded": String(open), "aria-label": `Runs, log and command of run ${number}`, "data-control": "toggle", onclick: () => act.toggle(i),
    }, open ? "▾" : "▸");
    return element("th", { scope: "row", class: "whole" }, element("span", {}, toggle, pick, shown, best ? element("span", { class: "state good" }, "best") : null));
  }

  function cell(column, i) {
    const shown = column.cell(i);
    return element("td", { class: look(column), "data-heading": column.label, "data-none": [shown, shown.textContent].includes(ABSENT) }, shown);
  }

  // All runs of a configuration: when and why each was chosen, what came out, its log, and how to launch it.
  function more(i) {
    const runs = [...trials.run_id.keys()].filter((each) => trials.counts[each] === trials.counts[i]);
    const items = runs.map((each) => element("li", {},
      element("strong", {}, `Run ${trials.number[each] + 1}`),
      ` ${trials.state[each]}${trials.measured_step_s[each] == null ? "" : `, ${seconds(trials.measured_step_s[each])}`}`,
      `${trials.calibrated_step_s[each] == null ? "" : `, expected ${seconds(trials.calibrated_step_s[each])}`}${trials.reduced[each] ? ", reduced" : ""}`,
      runs.length > 1 && trials.counts[i] === each ? element("span", { class: "state good" }, "representative") : null,
      trials.why[each] ? element("div", { class: "soft small" }, `Chosen because: ${trials.why[each]}`) : null,
      trials.cause[each] ? element("div", { class: "small" }, trials.cause[each]) : null,
      ...(trials.serving?.misses[each] ?? []).map((miss) => element("div", { class: "small missed" }, miss)),
      faded(trials, each) && trials.state[each] !== "abandoned" ? fetched("End of the log", trials.run_id[each], () => act.log(trials.run_id[each])) : null,
    ));
    const command = act.command ? fetched("Launch command", "command", () => act.command(trials.run_id[i])) : null;
    const made = element("tr", { class: "more", "data-key": `${trials.run_id[i]}:more` },
      element("td", { colspan: columns.length }, element("p", { class: "soft small" }, trials.details[i]), element("ul", {}, ...items), command));
    made.dataset.says = `${made.textContent}|${columns.length}`;
    return made;
  }
}

// Text that is asked for when it is opened; `name` is its own within the row.
function fetched(summary, name, text) {
  const place = element("pre", { tabindex: 0 });
  const fill = async () => {
    if (!box.open || place.textContent) return;
    place.textContent = await text().catch(() => "The text could not be loaded; close and open this section to try again.");
  };
  const box = element("details", { class: "small", "data-text": name, ontoggle: fill }, element("summary", {}, summary), place);
  return box;
}
