// Show moments in the reader's time zone; the title keeps UTC.

const shown = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

function localise(root) {
  for (const time of root.querySelectorAll("time[datetime]:not([title])")) {
    time.title = time.textContent;
    time.textContent = shown.format(new Date(time.dateTime));
  }
}

localise(document);
document.addEventListener("refreshed", () => localise(document)); // live.js replaced parts of the page
