// A CSV file of every table that has none from the server: the text of its cells. On a narrow screen the style sheet shows the
// rows of tables with `data-rows` as blocks, and with each cell its `data-heading`.

import { element } from "./elements.js";
import { ABSENT } from "./numbers.js";

const LEAST_COLUMNS = 4; // fewer fit a phone, which hides columns of class `spare`
const FORMULA = /^[=+\-@\t\r]/; // a spreadsheet calculates a text that begins with one of these

function csv(table) {
  const cell = (each) => {
    const text = each.innerText.trim().replaceAll(/\s*\n\s*/g, "; ");
    return `"${(FORMULA.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };
  return [...table.rows].map((row) => [...row.cells].map(cell).join()).join("\r\n");
}

for (const table of document.querySelectorAll(".scroll > table:not(.runs)")) {
  const place = table.parentElement;
  if (place.nextElementSibling?.querySelector("a[download]") || place.closest(".prose")) continue;
  const onclick = ({ target }) => (target.href = `data:text/csv;charset=utf-8,${encodeURIComponent(csv(table))}`);
  place.after(element("p", { class: "small csv" }, element("a", { href: "#", download: `${document.title.split(" ·")[0]}.csv`, onclick }, "CSV")));
}

// Label the cells of each table that has no labels from the server.
function label() {
  for (const table of document.querySelectorAll("table:has(thead):not([data-rows])")) {
    const columns = [...table.tHead.rows[0].cells];
    if (columns.filter((each) => !each.classList.contains("spare")).length < LEAST_COLUMNS) continue;
    table.dataset.rows = "";
    for (const cell of table.querySelectorAll("tbody td:not([colspan])")) {
      const heading = columns[cell.cellIndex];
      if (!heading || heading.querySelector(".unseen")) continue;
      cell.dataset.heading = heading.textContent.trim();
      if (["", ABSENT].includes(cell.textContent.trim())) cell.dataset.none = "";
    }
  }
}

label();
new MutationObserver(label).observe(document.body, { childList: true, subtree: true }); // live parts are replaced
