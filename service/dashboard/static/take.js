// The drawer that shows how to run a configuration, and the bar of configurations that are selected for comparison.

import { element } from "./elements.js";
import { keep, ticked } from "./ticks.js";

const MOST = 5;
const NAMES = ["first", "second", "more", "more", "more"];

addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-run]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  const answer = await fetch(link.href, { headers: { Accept: "text/html" } }).catch(() => null);
  if (!answer?.ok) return location.assign(link.href);
  const ways = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-ways]");
  const heading = ways.querySelector("h1");
  heading.replaceWith(element("h2", { id: heading.id }, heading.textContent));
  const close = element("button", { type: "button", onclick: () => drawer.close() }, "Close");
  const drawer = element("dialog", { class: "drawer", "aria-labelledby": heading.id, onclose: () => drawer.remove(), onclick: ({ target }) => target === drawer && drawer.close() },
    element("div", { class: "stacked" }, element("div", { class: "head" }, element("a", { class: "button", href: link.href }, "Open as a page"), close), ways));
  document.body.append(drawer);
  drawer.showModal();
});

// The parameter of the page that compares: the address of a stored run, else the configuration's query.
function named(href) {
  const url = new URL(href, location);
  return url.searchParams.get("query") ?? url.pathname;
}

addEventListener("change", ({ target }) => {
  if (!target.matches("[data-compare]")) return;
  const { compare: href, label } = target.dataset;
  const others = ticked().filter((each) => each.href !== href);
  keep(target.checked ? [...others, { href, label }].slice(-MOST) : others);
});

// The bar at the bottom, and the ticks of this page.
export function shown() {
  const list = ticked();
  for (const box of document.querySelectorAll("[data-compare]")) box.checked = list.some(({ href }) => href === box.dataset.compare);
  document.querySelector(".tray")?.remove();
  if (!list.length) return;
  const query = new URLSearchParams(list.map(({ href }, n) => [NAMES[n], named(href)]));
  const compare = list.length > 1 ? element("a", { class: "button primary", href: `/compare?${query}` }, `Compare the ${list.length === 2 ? "two" : list.length}`) : element("span", { class: "soft" }, "Select another configuration to compare");
  document.body.append(element("aside", { class: "tray", "aria-label": "Selected for comparison" },
    element("span", {}, list.map(({ label }) => label).join(" · ")), compare, element("button", { type: "button", onclick: () => keep([]) }, "Clear")));
}

shown();
addEventListener("pageshow", shown);
document.addEventListener("ticked", shown);
