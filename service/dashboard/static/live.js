// Keeps a page current: when the server says that something changed, or every `data-poll` milliseconds, fetch this page again
// and swap the parts that differ. The server stays the only place that renders them.

const LEAST_MS = 1000; // between two refreshes
const RETRY_MS = 2000; // after the server refused the stream
const source = document.body.dataset.events;
const poll = Number(document.body.dataset.poll ?? 0);
const came = new Map(parts(document)); // each part as the server sent it; scripts may have changed it since
let busy = false;
let again = false;

if (source) follow(source);
if (poll) setInterval(() => document.hidden || refresh(), poll);

function follow(url) {
  let away = false;
  listen(new EventSource(url));

  function listen(stream) {
    stream.addEventListener("open", () => {
      if (away && !whole()) location.reload();
      else if (away) refresh(); // whatever happened meanwhile
      away = false;
      note("");
    });
    stream.addEventListener("message", refresh);
    // The stream ends with the search; without this the browser would connect again for ever.
    stream.addEventListener("end", () => {
      stream.close();
      refresh();
    });
    stream.addEventListener("error", () => {
      away = true;
      note("The server is unreachable; trying again …");
      // The browser itself tries again where the connection broke, not where an answer was refused.
      if (stream.readyState === EventSource.CLOSED) setTimeout(() => listen(new EventSource(url)), RETRY_MS);
    });
  }
}

// A script that had not come when the server went away cannot be asked for again on the same page.
function whole() {
  const trials = document.querySelector("#trials");
  return !trials || "ready" in trials.dataset;
}

async function refresh() {
  again = true;
  if (busy) return;
  busy = true;
  while (again) {
    again = false;
    const started = performance.now();
    try {
      const response = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (response.ok) swap(new DOMParser().parseFromString(await response.text(), "text/html"));
    } catch (error) {
      console.info("not refreshed, the next event will", error); // the event source comes back with the server
    }
    // A page that is slow to make, because its search is large, is asked for less often.
    await new Promise((resolve) => setTimeout(resolve, Math.max(LEAST_MS, 4 * (performance.now() - started))));
  }
  busy = false;
}

function swap(fresh) {
  for (const part of document.querySelectorAll("[data-live]")) {
    const name = part.dataset.live;
    const next = fresh.querySelector(`[data-live="${CSS.escape(name)}"]`);
    if (!next || next.outerHTML === came.get(name)) continue;
    came.set(name, next.outerHTML);
    keep(part, next);
    part.replaceWith(next);
    next.querySelector("[data-focus]")?.focus();
  }
  document.dispatchEvent(new Event("refreshed"));
}

// What a reader opened stays open, and the focus stays where it was.
function keep(part, next) {
  const match = (selector) => [part, next].map((root) => [...root.querySelectorAll(selector)]);
  const [details, nextDetails] = match("details");
  details.forEach((each, n) => each.open && nextDetails[n]?.setAttribute("open", ""));
  const [places, nextPlaces] = match("a, button, select, summary");
  const focused = places.indexOf(document.activeElement);
  if (focused >= 0) nextPlaces[focused]?.setAttribute("data-focus", "");
}

function parts(root) {
  return [...root.querySelectorAll("[data-live]")].map((part) => [part.dataset.live, part.outerHTML]);
}

function note(text) {
  const place = document.querySelector("#connection");
  if (place) place.textContent = text;
}
