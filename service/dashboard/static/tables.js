// A CSV file of every table that has none from the server: the text of its cells.

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
  const link = document.createElement("a");
  Object.assign(link, { href: "#", download: `${document.title.split(" ·")[0]}.csv`, textContent: "CSV" });
  link.addEventListener("click", () => (link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(csv(table))}`));
  const line = document.createElement("p");
  line.className = "small csv";
  line.append(link);
  place.after(line);
}
