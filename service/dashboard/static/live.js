// Keeps a page current: when the server says that something changed, fetch this page again and
// swap the parts that differ. The server stays the only place that renders; nothing is built from data here.

const source = document.body.dataset.events;
if (source) follow(source);

function follow(url) {
  const events = new EventSource(url);
  let busy = false;
  let again = false;

  async function refresh() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      do {
        again = false;
        const response = await fetch(location.href, { headers: { Accept: "text/html" } });
        if (response.ok) swap(new DOMParser().parseFromString(await response.text(), "text/html"));
      } while (again);
    } catch (error) {
      console.info("not refreshed, the next event will", error); // the server is away; the event source comes back with it
    } finally {
      busy = false;
    }
  }

  events.addEventListener("message", refresh);
  // The stream ends with the search; without this the browser would connect again for ever.
  events.addEventListener("end", () => {
    events.close();
    refresh();
  });
}

function swap(fresh) {
  for (const part of document.querySelectorAll("[data-live]")) {
    const next = fresh.querySelector(`[data-live="${CSS.escape(part.dataset.live)}"]`);
    if (!next || next.outerHTML === part.outerHTML) continue;
    if (part.tagName === "TBODY") swapRows(part, next);
    else part.replaceWith(next);
  }
}

// Rows are matched by key, so that an opened log stays open while other rows change.
function swapRows(body, next) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  body.replaceChildren(
    ...[...next.children].map((row) => {
      const before = old.get(row.dataset.key);
      return before && plain(before) === plain(row) ? before : row;
    }),
  );
}

function plain(row) {
  const copy = row.cloneNode(true);
  for (const open of copy.querySelectorAll("details[open]")) open.removeAttribute("open");
  return copy.outerHTML;
}
