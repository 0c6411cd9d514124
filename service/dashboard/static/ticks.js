// What is ticked for comparison: [{href of the configuration's page, label}], kept from page to page until the tab is closed.

const KEY = "compare";

export const ticked = () => JSON.parse(sessionStorage.getItem(KEY) ?? "[]");

// Whoever shows ticks hears "ticked".
export function keep(list) {
  sessionStorage.setItem(KEY, JSON.stringify(list));
  document.dispatchEvent(new Event("ticked"));
}
