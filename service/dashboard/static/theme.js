// Light or dark as the reader chose; loaded before the page is drawn.

const kept = localStorage.getItem("theme");
if (kept) document.documentElement.dataset.theme = kept;
addEventListener("click", ({ target }) => {
  if (!target.closest?.("[data-theme-switch]")) return;
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  localStorage.setItem("theme", (document.documentElement.dataset.theme = dark ? "light" : "dark"));
});
