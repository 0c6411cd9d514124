// A search's trials: one filter for the table and all charts, stored in the URL.

import { MOST_POINTS, accuracy, front, history } from "./charts.js";
import { element } from "./elements.js";
import { tpot, ttft } from "./latency.js";
import { draw as drawParallel } from "./parallel.js";
import { draw } from "./plot.js";
import { ROWS_A_PAGE, show } from "./table.js";

const root = document.querySelector("#trials");
const part = (name) => root.querySelector(`[data-part="${name}"]`);
const figures = Object.fromEntries(Object.entries({ history, ttft, tpot, accuracy, front }).filter(([name]) => part(name)));
const pending = new Set(); // figures to draw once they become visible
const visible = new Set();
const picked = new Set();
const inFile = location.protocol === "file:"; // only the part after # can be changed
let trials = null;
let selects = []; // of the filter: name, label and choices
let shown = [];
let page = 0;

const logs = (run) =>
  trials.logs ? Promise.resolve(trials.logs[run] ?? "No log was stored for this run.") : fetch(root.dataset.logs + run).then((answer) => answer.text());

async function load() {
  const embedded = document.querySelector("#trial-table");
  if (embedded) {
    trials = JSON.parse(embedded.textContent);
  } else {
    const response = await fetch(root.dataset.href);
    if (!response.ok) throw new Error(`loading the trials failed: ${response.status}`);
    trials = await response.json();
  }
  selects = [["state", "State", choices(trials.state)], ...trials.axes.map((axis) => [axis.name, axis.label, choices(axis.values)])];
  controls();
  update();
}

// The filter: a value, or "" for any, by axis name and for the state.
function wanted() {
  const given = kept();
  const names = ["state", ...trials.axes.map((axis) => axis.name)];
  return new Map(names.map((name) => [name, given.get(name) ?? ""]).filter(([, value]) => value !== ""));
}

function choose(name, value) {
  const filter = kept();
  if (value === "") filter.delete(name);
  else filter.set(name, value);
  keep(filter);
  page = 0;
  controls();
  update();
}

function kept() {
  return new URLSearchParams(inFile ? location.hash.slice(1) : location.search);
}

function keep(filter) {
  const url = new URL(location);
  url[inFile ? "hash" : "search"] = filter;
  window.history.replaceState(null, "", url);
}

// A select for each axis and the state; recreated only if the options change, so that the focus stays.
function controls() {
  const filter = wanted();
  const says = JSON.stringify(selects);
  const form = part("filter");
  if (form.dataset.says !== says) {
    form.dataset.says = says;
    form.replaceChildren(
      ...selects.map(([name, label, values]) => {
        const options = [["", "Any"], ...values.map((value) => [String(value), String(value)])];
        const select = element("select", { name, onchange: (event) => choose(name, event.target.value) });
        select.append(...options.map(([value, text]) => element("option", { value }, text)));
        return element("label", {}, label, select);
      }),
      element("button", { type: "button", onclick: reset }, "Clear"),
    );
  }
  for (const select of form.querySelectorAll("select")) select.value = filter.get(select.name) ?? "";
}

function reset() {
  keep(new URLSearchParams());
  page = 0;
  controls();
  update();
}

function choices(values) {
  return [...new Set(values)].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));
}

function passing() {
  const filter = wanted();
  const tests = trials.axes.filter((axis) => filter.has(axis.name)).map((axis) => [axis.values, filter.get(axis.name)]);
  if (filter.has("state")) tests.push([trials.state, filter.get("state")]);
  return [...trials.run_id.keys()].filter((i) => tests.every(([values, value]) => String(values[i]) === value));
}

function update() {
  shown = passing();
  table();
  for (const name of [...Object.keys(figures), "parallel"]) pending.add(name);
  return drawVisible();
}

async function drawVisible() {
  for (const name of [...pending].filter((each) => visible.has(each))) {
    pending.delete(name);
    if (name === "parallel") {
      drawParallel(part(name), trials, shown, { chosen: (axis) => wanted().get(axis), choose });
    } else {
      await draw(part(name), figures[name](trials, shown));
    }
  }
  root.dataset.drawn = String(shown.length);
}

function table() {
  const newest = part("order").value === "newest";
  const fastest = part("order").value === "fastest";
  const step = (i) => trials.measured_step_s[i] ?? Infinity;
  const order = fastest ? [...shown].sort((a, b) => step(a) - step(b) || a - b) : newest ? [...shown].reverse() : shown;
  const pages = Math.max(1, Math.ceil(order.length / ROWS_A_PAGE));
  page = Math.min(page, pages - 1);
  show(part("rows"), trials, order, { page, log: logs, picked, pick, runs: root.dataset.runs });
  const [from, to] = [page * ROWS_A_PAGE + 1, Math.min(order.length, (page + 1) * ROWS_A_PAGE)];
  const of = shown.length < trials.run_id.length ? ` (of ${trials.run_id.length.toLocaleString("en-US")})` : "";
  part("count").textContent = `${shown.length.toLocaleString("en-US")} run${shown.length === 1 ? "" : "s"}${of}`;
  part("range").textContent = order.length > ROWS_A_PAGE ? `${from}–${to}` : "";
  part("pager").hidden = order.length <= ROWS_A_PAGE;
  part("earlier").disabled = page === 0;
  part("later").disabled = page === pages - 1;
  part("empty").textContent = trials.run_id.length === 0 ? "No runs yet." : shown.length === 0 ? "No matching runs." : "";
  part("sampled").hidden = shown.length <= MOST_POINTS;
  compare();
}

function pick(i) {
  if (!picked.delete(i)) picked.add(i);
  if (picked.size > 2) picked.delete([...picked][0]);
  table();
}

// Link to the comparison of two configurations.
function compare() {
  const link = part("compare");
  if (!link) return;
  const [a, b] = [...picked];
  link.hidden = b === undefined;
  if (b !== undefined) link.href = `${root.dataset.compare}?a=${trials.run_id[a]}&b=${trials.run_id[b]}`;
}

part("order").addEventListener("change", () => {
  page = 0;
  table();
});
for (const [name, by] of [["earlier", -1], ["later", 1]]) {
  part(name).addEventListener("click", () => {
    page += by;
    table();
  });
}

// Draw figures when they become visible.
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) visible.add(entry.target.dataset.part);
    else visible.delete(entry.target.dataset.part);
  }
  if (trials) drawVisible();
});
for (const name of [...Object.keys(figures), "parallel"]) watch.observe(part(name));

// Paper shows every chart, also those that nobody has scrolled to.
matchMedia("print").addEventListener("change", ({ matches }) => {
  if (matches && trials) [...Object.keys(figures), "parallel"].forEach((name) => visible.add(name)), drawVisible();
});

addEventListener("popstate", () => trials && (controls(), update()));
document.addEventListener("refreshed", () => load().catch((error) => console.info(error)));
root.dataset.ready = ""; // see live.js
load().catch((error) => {
  console.info(error); // a live page tries again
  if (!document.body.dataset.events) part("empty").textContent = "The runs could not be loaded; reload the page.";
});
