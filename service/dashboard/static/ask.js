// Update the answer when the question or a control changes: fetch the page again and replace its parts. Only the server computes
// and draws. Without this script both forms have a button.

import { drawAll } from "./plot.js";
import { shown } from "./take.js";

const WAIT_MS = 200; // after the last keystroke
const findings = document.querySelector(".findings");
const typed = "textarea, input:not([type])"; // text is read when it is complete
let asking, timer;
let moved = ""; // what made the newest entry of the history: moving it on replaces that entry

prepare(document);

document.addEventListener("input", ({ target }) => target.matches(typed) || changed(target, target.type === "number" ? WAIT_MS : 0));
document.addEventListener("change", ({ target }) => target.matches(typed) && changed(target, 0));

function changed(control, wait) {
  const form = control.closest("[data-part=question], [data-part=layout]");
  if (!form) return;
  clearTimeout(timer);
  timer = setTimeout(() => form.reportValidity() && follow(addressed(form), { part: form.dataset.part, name: control.name }), wait);
}

document.addEventListener("submit", (event) => {
  if (!event.target.matches("[data-part]")) return;
  event.preventDefault();
  clearTimeout(timer);
  follow(addressed(event.target), { part: event.target.dataset.part });
});

// Links of rows and bars lead to this page with another configuration.
document.addEventListener("click", (event) => {
  const link = event.target.closest(".findings a[href^='/explorer?']");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  follow(link.getAttribute("href"));
});

// A changed question starts at its best configuration; a changed control keeps the question.
function addressed(form) {
  const filled = (part) => [...new FormData(document.querySelector(`[data-part=${part}]`))].filter(([, value]) => value.trim());
  const layout = form.dataset.part === "layout" ? filled("layout").filter(([name]) => name.startsWith("at.")) : [];
  return `/explorer?${new URLSearchParams([...filled("question"), ...layout])}`;
}

async function follow(address, { part, name } = {}) {
  const fresh = await fetched(address);
  if (!fresh) return;
  history[name && name === moved ? "replaceState" : "pushState"](null, "", address);
  moved = name ?? "";
  show(fresh, part);
}

// The Back button shows the previous answer.
addEventListener("popstate", async () => {
  moved = "";
  const fresh = await fetched(location.href);
  if (fresh) show(fresh);
});

// Resolves to the page at an address, or to null if a later request replaced this one or the server does not respond.
async function fetched(address) {
  asking?.abort();
  const mine = (asking = new AbortController());
  findings.setAttribute("aria-busy", "true");
  try {
    const response = await fetch(address, { signal: mine.signal, headers: { Accept: "text/html" } });
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    settled();
    return page;
  } catch {
    if (asking === mine) settled(`The server is unreachable. Still showing ${findings.querySelector(".arithmetic")?.textContent ?? "the previous answer"}; the next change tries again.`);
    return null;
  }
}

function settled(trouble = "") {
  findings.setAttribute("aria-busy", "false");
  document.querySelector("#connection").textContent = trouble;
}

// Replaces all parts of the page except the one in use.
function show(fresh, used = "") {
  for (const part of document.querySelectorAll("[data-part]")) {
    const next = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
    if (part.dataset.part === used) {
      showErrors(part, next);
      continue;
    }
    const opened = [...part.querySelectorAll("details")].map((details) => details.open); // keep what the reader opened
    part.replaceChildren(...next.childNodes);
    part.hidden = next.hidden;
    part.querySelectorAll("details").forEach((details, index) => (details.open ||= opened[index] ?? false));
    prepare(part);
  }
  drawAll();
  shown();
  for (const selector of ["link[rel=alternate]", ".foot a[href*='.json']"]) document.querySelector(selector).href = fresh.querySelector(selector).href;
}

// Of the part in use, only the errors at its fields change.
function showErrors(part, next) {
  for (const line of part.querySelectorAll(".field [data-error]")) {
    const { error } = line.dataset;
    line.textContent = next.querySelector(`.field [data-error="${CSS.escape(error)}"]`)?.textContent ?? "";
    const input = part.querySelector(`[name="${CSS.escape(error)}"]`);
    if (line.textContent) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
    for (let box = line.textContent && line.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  }
}

// Hides buttons that only pages without scripts need, and adds a slider to each select whose options have an order.
function prepare(place) {
  for (const button of place.querySelectorAll("[data-unscripted]")) button.hidden = true;
  for (const select of place.querySelectorAll("select[data-slider]")) {
    const range = document.createElement("input");
    Object.assign(range, { type: "range", min: 0, max: select.options.length - 1, step: 1, value: select.selectedIndex });
    range.disabled = select.options.length < 2;
    range.setAttribute("aria-labelledby", `label-${select.name}`);
    const say = () => range.setAttribute("aria-valuetext", select.selectedOptions[0].text);
    range.addEventListener("input", (event) => {
      event.stopPropagation();
      select.selectedIndex = range.valueAsNumber;
      say();
      changed(select, 0);
    });
    select.addEventListener("input", () => {
      range.value = select.selectedIndex;
      say();
    });
    say();
    select.before(range);
  }
}
