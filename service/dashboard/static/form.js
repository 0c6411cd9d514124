// The new search's form: show the cost model's answer as the user types, and each error at its field.

import { drawAll } from "./plot.js";
import { shown } from "./take.js";

const WAIT_MS = 250; // after the last keystroke
const form = document.querySelector("#query");
const place = document.querySelector("#preview");
const [start, starts] = [document.querySelector("#start"), document.querySelector("#starts")];
const usual = starts.textContent;
let timer = null;
let latest = 0;

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(preview, WAIT_MS);
});

async function preview() {
  const mine = ++latest;
  const values = filled();
  history.replaceState(null, "", `/searches/new?${values}`); // which Back and a reload come to again
  place.setAttribute("aria-busy", "true");
  const response = await fetch("/searches/new/preview", { method: "POST", body: values }).catch(() => null);
  const text = response?.ok ? await response.text() : null;
  if (mine !== latest) return; // a later request is under way
  place.setAttribute("aria-busy", "false");
  if (text === null) return say("The server does not respond; the next change tries again.");
  const open = [...place.querySelectorAll("details")].map((each) => each.open);
  place.replaceChildren(...new DOMParser().parseFromString(text, "text/html").body.children);
  place.querySelectorAll("details").forEach((each, n) => (each.open = open[n] ?? each.open));
  shown();
  const refused = place.querySelector("[data-refused]");
  start.disabled = Boolean(refused);
  starts.textContent = refused ? "No search with real runs, for the reason above the ranking." : usual;
  keepInSight(() => mark(place.querySelector("[data-code]")));
  drawAll();
}

// A line that comes or goes above the focused field does not push it out of the window.
function keepInSight(change) {
  const focused = form.querySelector(":focus");
  const { top, bottom } = focused?.getBoundingClientRect() ?? {};
  change();
  if (bottom > 0 && top < innerHeight) focused.scrollIntoView({ block: "nearest" });
}

// Show the error at its field. A missing field is not an error while the user types.
function mark(error) {
  for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  for (const line of form.querySelectorAll("[data-error]")) line.textContent = "";
  if (!error || error.dataset.code === "missing_field") return;
  const { field, message } = error.dataset;
  const name = nearest(field);
  if (name) {
    form.elements[name].setAttribute("aria-invalid", "true");
    form.elements[name].closest("details")?.setAttribute("open", "");
  }
  form.querySelector(`[data-error="${CSS.escape(name ?? "")}"]`).textContent = message;
}

// The input of a field: its own, else the one that holds it, else the first of its parts.
function nearest(field) {
  const names = [...form.elements].map((input) => input.name).filter(Boolean);
  const holds = names.filter((each) => `${field}.`.startsWith(`${each}.`)).sort((a, b) => b.length - a.length);
  return holds[0] ?? names.find((each) => each.startsWith(`${field}.`));
}

function say(text) {
  form.querySelector('[data-error=""]').textContent = text;
}

function filled() {
  const values = new URLSearchParams();
  for (const [name, value] of new FormData(form)) if (value.trim()) values.append(name, value);
  return values;
}

// Switching the kind of query keeps the fields that both kinds have.
for (const tab of form.querySelectorAll("[data-kind]")) {
  tab.addEventListener("click", (event) => {
    event.preventDefault();
    const values = filled();
    values.set("kind", tab.dataset.kind);
    const other = /^(training|inference|targets|objective|constraints\.max|search\.|extra)/;
    for (const name of [...values.keys()]) if (other.test(name)) values.delete(name);
    location.assign(`/searches/new?${values}`);
  });
}

if (filled().size > 1) preview();
