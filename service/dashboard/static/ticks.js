// Configurations selected for comparison: [{href of the configuration's page, label}], stored until the tab is closed.

const KEY = "compare";

export const ticked = () => JSON.parse(sessionStorage.getItem(KEY) ?? "[]");

// Stores the selection and dispatches "ticked".
export function keep(list) {
  sessionStorage.setItem(KEY, JSON.stringify(list));
  document.dispatchEvent(new Event("ticked"));
}
