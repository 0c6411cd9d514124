// Update the explorer when a control changes: fetch the page again and replace the parts that show results. Only the server
// computes and draws. Without this script the form has a button.

import { drawAll } from "./plot.js";
import { shown } from "./take.js";

const form = document.querySelector("form[data-follow]");
const findings = document.querySelector(".findings");
const here = form.getAttribute("action");
const software = '[name="training.framework"], [name="training.recipe"]';
const anew = `[data-anew], ${software}`;
const whole = `${anew}, textarea, input:not([type])`; // text is read when it is complete
const machine = /^(precision$|inference\.precision$|cluster\.(?!gpu$|num_gpus$)|parallel\.)/; // what suits one model and cluster, and perhaps not another
let asking;
let moved = ""; // the control of the newest entry of the history: moving it on replaces that entry

// On a phone the controls begin closed, unless one of them is wrong.
if (matchMedia("(max-width: 37.5rem)").matches && !form.querySelector("[aria-invalid]")) form.closest("details").open = false;

for (const select of form.querySelectorAll("select[data-slider]")) slider(select);
document.querySelector("[data-unscripted]").hidden = true;

document.addEventListener("input", (event) => {
  if (event.target.form !== form) return; // the sentence stands before the form
  if (!form.reportValidity()) return;
  if (event.target.matches(whole)) return; // handled when the change is complete, see below
  follow(filled(), event.target);
});

// Another model, cluster, framework or recipe has other options: load the page at its fastest configuration.
document.addEventListener("change", (event) => {
  if (event.target.form !== form || !event.target.matches(whole) || !form.reportValidity()) return;
  if (!event.target.matches(anew)) return follow(filled(), event.target);
  const values = filled();
  const dropped = [...form.elements].filter((input) => input.closest("[data-layout]")).map((input) => input.name);
  for (const name of dropped) values.delete(name);
  // What the ranking put in for the old question is not asked for the new one.
  const asked = new URLSearchParams(location.search);
  if ("ranked" in form.dataset) for (const name of [...values.keys()]) if (name.includes(".") && name !== event.target.name && !asked.has(name)) values.delete(name);
  if (!event.target.matches(software)) for (const name of [...values.keys()]) if (machine.test(name)) values.delete(name);
  findings.setAttribute("aria-busy", "true");
  location.assign(`${here}?${values}`);
});

form.addEventListener("submit", (event) => {
  event.preventDefault();
  follow(filled());
});

function filled() {
  return new URLSearchParams([...new FormData(form)].filter(([, value]) => value.trim()));
}

// Add a slider over the select's options; the select remains to show the value and to choose one directly.
function slider(select) {
  const range = document.createElement("input");
  Object.assign(range, { type: "range", min: 0, max: select.options.length - 1, step: 1, value: select.selectedIndex });
  range.disabled = select.options.length < 2;
  range.setAttribute("aria-labelledby", `label-${select.name}`);
  const say = () => range.setAttribute("aria-valuetext", select.selectedOptions[0].text);
  range.addEventListener("input", () => {
    select.selectedIndex = range.valueAsNumber;
    say();
  });
  for (const change of ["input", "restored"]) {
    select.addEventListener(change, () => {
      range.value = select.selectedIndex;
      say();
    });
  }
  say();
  select.before(range);
}

// Another workload is ranked anew, which takes longer than the figures of one configuration: these are shown first.
async function follow(parameters, changed) {
  asking?.abort(); // only the latest request counts
  asking = new AbortController();
  findings.setAttribute("aria-busy", "true");
  const address = `${here}?${parameters}`;
  try {
    const { signal } = asking;
    const layout = changed?.closest("[data-layout]");
    if ("ranked" in form.dataset && !layout) show(await fetched(`${address}&listed=false`, signal), ":not([data-part=best])");
    show(await fetched(address, signal));
    history[changed && changed.name === moved ? "replaceState" : "pushState"](null, "", address);
    moved = changed?.name ?? "";
    settled();
  } catch (error) {
    if (error.name === "AbortError") return;
    settled(`The server is unreachable: showing ${findings.querySelector(".arithmetic")?.textContent ?? "nothing"}. The next change tries again.`);
  }
}

function settled(trouble = "") {
  findings.setAttribute("aria-busy", "false");
  document.querySelector("#connection").textContent = trouble;
}

// Back takes back what was moved last.
addEventListener("popstate", async () => {
  asking?.abort();
  moved = "";
  findings.setAttribute("aria-busy", "true");
  try {
    const fresh = await fetched(location.href);
    for (const control of form.elements) {
      const then = [...fresh.querySelector("form[data-follow]").elements, ...fresh.querySelectorAll("[form=ask]")].find((each) => each.name === control.name && each.type === control.type && (each.type !== "checkbox" || each.value === control.value));
      if (!then || !control.name) continue;
      control.value = then.value;
      control.checked = then.checked;
      control.dispatchEvent(new Event("restored"));
    }
    show(fresh);
    settled();
  } catch {
    location.reload();
  }
});

async function fetched(address, signal) {
  const response = await fetch(address, { signal, headers: { Accept: "text/html" } });
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return new DOMParser().parseFromString(await response.text(), "text/html");
}

function show(fresh, only = "") {
  for (const part of document.querySelectorAll(`[data-part]${only}`)) {
    const next = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
    const open = part.querySelectorAll("details"); // keep tables open that the reader opened
    const opened = [...open].map((details) => details.open);
    part.replaceChildren(...next.childNodes);
    part.querySelectorAll("details").forEach((details, index) => (details.open = opened[index] ?? false));
  }
  drawAll();
  shown();
  for (const selector of ["link[rel=alternate]", ".foot a"]) document.querySelector(selector).href = fresh.querySelector(selector).href;
}
