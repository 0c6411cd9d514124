// A search's trials: one filter, order and choice of columns for the table and all charts, stored in the URL.

import { MOST_POINTS, accuracy, front, history, ring, tpot, ttft, waterfall } from "./charts.js";
import { columns as columnsOf, sorted } from "./columns.js";
import { element } from "./elements.js";
import { setting } from "./numbers.js";
import { draw as drawParallel } from "./parallel.js";
import { draw } from "./plot.js";
import { ROWS_A_PAGE, head, show } from "./table.js";
import { keep, ticked } from "./ticks.js";

const FEW = 8; // runs that need no filter
const root = document.querySelector("#trials");
const part = (name) => root.querySelector(`[data-part="${name}"]`);
const figures = Object.fromEntries(Object.entries({ history, ttft, tpot, accuracy, front, waterfall }).filter(([name]) => part(name)));
const pending = new Set(); // figures to draw once they become visible
const visible = new Set();
const picked = new Set(); // rows that are ticked: for comparison, and in a report to see them alone
const open = new Set();
const inFile = location.protocol === "file:"; // only the part after # can be changed
let trials = null;
let loads = 0;
let columns = [];
let selects = []; // of the filter: name, label and choices
let shown = []; // runs that match the filter
let order = []; // rows of the table
let page = 0;
let marked = null; // the row whose points are ringed

const text = (address) => fetch(address).then(async (answer) => (answer.ok ? answer.text() : (await answer.json()).detail));
const act = {
  pick, toggle, mark, href: (run) => root.dataset.runs && root.dataset.runs + run,
  log: (run) => (trials.logs ? Promise.resolve(trials.logs[run] ?? "No log was stored for this run.") : text(root.dataset.logs + run)),
  command: root.dataset.export ? (run) => text(`${root.dataset.export}?format=command&run=${run}`) : null,
};

async function load() {
  const mine = ++loads;
  const embedded = document.querySelector("#trial-table");
  if (embedded) {
    trials = JSON.parse(embedded.textContent);
  } else {
    const response = await fetch(root.dataset.href);
    if (!response.ok) throw new Error(`loading the trials failed: ${response.status}`);
    const answer = await response.json();
    if (mine !== loads) return; // asked again meanwhile: an answer that comes late is not the newest
    trials = answer;
  }
  trials.states = JSON.parse(root.dataset.states);
  tickedRows();
  columns = columnsOf(trials, { runs: root.dataset.runs });
  selects = [["state", "State", choices(trials.state)], ...trials.axes.map((axis) => [axis.name, axis.label, choices(axis.values)])].filter(([, , values]) => values.length > 1);
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
  set({ [name]: value });
  page = 0;
  controls();
  update();
}

function kept() {
  return new URLSearchParams(inFile ? location.hash.slice(1) : location.search);
}

// Changes parameters of the address; an empty value takes one out.
function set(values) {
  const parameters = kept();
  for (const [name, value] of Object.entries(values)) {
    if (value === "") parameters.delete(name);
    else parameters.set(name, value);
  }
  const url = new URL(location);
  url[inFile ? "hash" : "search"] = parameters;
  window.history.replaceState(null, "", url);
}

const sort = () => kept().get("sort") ?? "measured"; // the best first
const chosenColumns = () => {
  const names = kept().get("columns")?.split(".");
  return columns.filter((column) => column.name === "run" || (names ? names.includes(column.name) : !column.hidden));
};

// A select for each axis and the state; recreated only if the options change, so that the focus stays.
function controls() {
  const filter = wanted();
  const says = JSON.stringify([selects, columns.map((column) => column.name)]);
  const form = part("filter");
  if (form.dataset.says !== says) {
    form.dataset.says = says;
    form.replaceChildren(
      ...selects.map(([name, label, values]) => {
        const options = [["", "Any"], ...values.map((value) => [String(value), name === "state" ? trials.states[value].label : setting(value)])];
        const select = element("select", { name, onchange: (event) => choose(name, event.target.value) });
        select.append(...options.map(([value, text]) => element("option", { value }, text)));
        return element("label", {}, label, select);
      }),
      ...(selects.length ? [element("button", { type: "button", onclick: reset }, "Clear")] : []),
    );
    for (const each of [form, part("fold")]) each.hidden = !filter.size && (!selects.length || trials.run_id.length < FEW);
    part("columns").replaceChildren(...columns.slice(1).map((column) => element(
      "label", {}, element("input", { type: "checkbox", name: column.name, onchange: chooseColumns }), column.title ? `${column.label}: ${column.title}` : column.label,
    )));
  }
  for (const select of form.querySelectorAll("select")) select.value = filter.get(select.name) ?? "";
  const names = new Set(chosenColumns().map((column) => column.name));
  for (const box of part("columns").querySelectorAll("input")) box.checked = names.has(box.name);
}

function chooseColumns() {
  const names = [...part("columns").querySelectorAll("input:checked")].map((box) => box.name);
  set({ columns: names.join(".") || "run" });
  table();
}

function reset() {
  set(Object.fromEntries(selects.map(([name]) => [name, ""])));
  picked.clear();
  if (root.dataset.runs) keep(ticked().filter(({ href }) => !href.startsWith(root.dataset.runs)));
  part("only").checked = false;
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

// The representative run of each configuration, or its last run that matches the filter.
function configurations() {
  const rows = new Map();
  for (const i of shown) if (rows.get(trials.counts[i]) !== trials.counts[i]) rows.set(trials.counts[i], i);
  return [...rows.values()];
}

function update() {
  shown = passing();
  blank();
  table();
  for (const name of [...Object.keys(figures), "parallel"]) pending.add(name);
  return drawVisible();
}

// Hides charts that have too few points.
function blank() {
  const some = (values) => values.some((each) => each != null);
  const measured = some(trials.measured_step_s);
  const two = (values) => values.filter((each) => each != null).length > 1; // a line or a cloud needs more than one
  const several = two(trials.measured_step_s);
  const shows = { history: measured && trials.run_id.length > 1, accuracy: several, front: several, parallel: several && trials.axes.length > 0, waterfall: true };
  for (const name of [...Object.keys(figures), "parallel"]) part(name).closest("figure").hidden = !(shows[name] ?? measured);
  part("more").hidden = ![...part("more").querySelectorAll("figure, section")].some((each) => !each.hidden);
  root.classList.toggle("none", !trials.run_id.length);
}

function drawVisible() {
  for (const name of [...pending].filter((each) => visible.has(each))) {
    pending.delete(name);
    if (name === "parallel") {
      drawParallel(part(name), trials, shown, { chosen: (axis) => wanted().get(axis), choose });
    } else {
      const figure = figures[name](trials, shown, part(name));
      if (marked != null) ring(figure, marked, trials);
      draw(part(name), figure);
    }
  }
  root.dataset.drawn = String(shown.length);
}

function table() {
  if (!picked.size) part("only").checked = false;
  const only = part("only").checked;
  const list = chosenColumns();
  const descending = sort().startsWith("-");
  const by = columns.find((column) => column.name === sort().replace(/^-/, "")) ?? columns[0];
  order = sorted(configurations().filter((i) => !only || picked.has(i)), by, descending);
  const pages = Math.max(1, Math.ceil(order.length / ROWS_A_PAGE));
  page = Math.min(page, pages - 1);
  head(part("head"), list, { sort: sort(), sortBy });
  sortChoices(list);
  show(part("rows"), trials, list, order, { page, picked, open, marked }, act);
  const [from, to] = [page * ROWS_A_PAGE + 1, Math.min(order.length, (page + 1) * ROWS_A_PAGE)];
  const of = shown.length < trials.run_id.length ? ` (of ${trials.run_id.length.toLocaleString("en-US")})` : "";
  const groups = order.length < shown.length && !only ? ` of ${order.length.toLocaleString("en-US")} configurations` : "";
  part("count").textContent = `${shown.length.toLocaleString("en-US")} run${shown.length === 1 ? "" : "s"}${of}${groups}`;
  part("range").textContent = order.length > ROWS_A_PAGE ? `${from}–${to} of ${order.length.toLocaleString("en-US")}` : "";
  part("pager").hidden = order.length <= ROWS_A_PAGE;
  part("earlier").disabled = page === 0;
  part("later").disabled = page === pages - 1;
  part("empty").textContent = trials.run_id.length === 0 ? "No runs yet." : order.length === 0 ? "No matching runs." : "";
  part("sampled").hidden = shown.length <= MOST_POINTS;
  part("only").closest("label").hidden = !picked.size;
}

// Options of the select that replaces the headings on phones.
function sortChoices(list) {
  const choices = list.flatMap(({ name, label }) => [[name, `${label} ↑`], [`-${name}`, `${label} ↓`]]);
  part("sort").closest("label").hidden = trials.run_id.length < 2;
  part("sort").replaceChildren(...choices.map(([value, text]) => element("option", { value, selected: value === sort() }, text)));
}

function sortBy(next) {
  set({ sort: next === "measured" ? "" : next });
  page = 0;
  table();
}

// Selects rows of a report, which has no bar for comparison.
function pick(i) {
  if (root.dataset.runs) return; // take.js hears the tick
  if (!picked.delete(i)) picked.add(i);
  table();
}

function tickedRows() {
  if (!root.dataset.runs) return;
  picked.clear();
  for (const { href } of ticked()) {
    const i = trials.run_id.indexOf(href.slice(root.dataset.runs.length));
    if (i >= 0 && href.startsWith(root.dataset.runs)) picked.add(i);
  }
}

function toggle(i) {
  if (!open.delete(i)) open.add(i);
  table();
}

// Adds or removes rings around a row's points in all charts.
function mark(i) {
  marked = marked === i ? null : i;
  for (const name of Object.keys(figures)) pending.add(name);
  table();
  drawVisible();
}

// Scrolls to the row of a selected point.
function reveal(i) {
  const row = order.includes(i) ? i : trials.counts[i];
  if (!order.includes(row)) return;
  page = Math.floor(order.indexOf(row) / ROWS_A_PAGE);
  marked = null;
  mark(row);
  part("rows").querySelector(`[data-key="${CSS.escape(trials.run_id[row])}"]`).scrollIntoView({ block: "center" });
}

part("only").addEventListener("change", () => {
  page = 0;
  table();
});
part("sort").addEventListener("change", ({ target }) => sortBy(target.value));
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
for (const name of [...Object.keys(figures), "parallel"]) {
  watch.observe(part(name));
  part(name).addEventListener("pick", ({ detail }) => reveal(detail));
}

// Redraws the parallel coordinates after a change of width; other charts do so themselves.
new ResizeObserver(() => trials && (pending.add("parallel"), drawVisible())).observe(part("parallel"));

// Prints all charts, including those that were not yet visible.
matchMedia("print").addEventListener("change", ({ matches }) => {
  if (matches) part("more").open = true;
  if (matches && trials) [...Object.keys(figures), "parallel"].forEach((name) => visible.add(name)), drawVisible();
});

document.addEventListener("ticked", () => trials && (tickedRows(), table()));
addEventListener("popstate", () => trials && (controls(), update()));
document.addEventListener("refreshed", () => {
  const drawn = part("waterfall"); // it comes with the search's end
  if (drawn && !("waterfall" in figures)) {
    figures.waterfall = waterfall;
    watch.observe(drawn);
  }
  load().catch((error) => console.info(error));
});
root.dataset.ready = ""; // see live.js
load().catch((error) => {
  console.info(error); // a live page tries again
  if (!document.body.dataset.events) part("empty").textContent = "The runs could not be loaded; reload the page.";
});
