// The search box of every page: Ctrl-K goes to it, results appear below it, the arrows choose one.

import { element } from "./elements.js";

const MOST = 10;
const form = document.querySelector("form.find");
const [box, list] = [form.querySelector("input"), form.querySelector("ul")];
let asked = 0;

async function fill() {
  const mine = ++asked;
  const answer = await fetch(`/find.json?q=${encodeURIComponent(box.value)}`).catch(() => null);
  if (!answer?.ok || mine !== asked) return;
  const { found } = await answer.json();
  list.replaceChildren(...found.slice(0, MOST).map(({ kind, name, href }) => element("li", {}, element("a", { href }, name, element("span", { class: "soft small" }, kind)))));
  list.hidden = !found.length || !form.contains(document.activeElement);
}

addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "k") return;
  event.preventDefault();
  box.focus();
  box.select();
});
box.addEventListener("focus", fill);
box.addEventListener("input", fill);
form.addEventListener("focusout", ({ relatedTarget }) => (list.hidden = !form.contains(relatedTarget)));
form.addEventListener("keydown", (event) => {
  const links = [...list.querySelectorAll("a")];
  const at = links.indexOf(document.activeElement);
  if (event.key === "Escape") [list.hidden] = [true, box.blur()];
  const to = { ArrowDown: links[at + 1], ArrowUp: at > 0 ? links[at - 1] : box }[event.key];
  if (!to) return;
  event.preventDefault();
  to.focus();
});
form.addEventListener("submit", (event) => {
  const first = list.querySelector("a");
  if (!first || list.hidden || !box.value) return;
  event.preventDefault();
  location.assign(first.href);
});
