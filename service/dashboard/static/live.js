// Keep a page current: after an event from the server, or every `data-poll` milliseconds, fetch the page again and replace the
// parts that changed. Only the server renders them.

const LEAST_MS = 1000; // minimum between two refreshes
const RETRY_MS = 2000; // after the server refused the stream
const source = document.body.dataset.events;
const poll = Number(document.body.dataset.poll ?? 0);
const came = new Map(parts(document)); // each part as the server sent it; scripts may have changed it
let running = null; // the refresh under way
let again = false;

if (source) {
  follow(source);
  setInterval(tick, 1000);
}
if (poll) setInterval(() => document.hidden || refresh(), poll);

function follow(url) {
  let away = false;
  listen(new EventSource(url));

  function listen(stream) {
    stream.addEventListener("open", () => {
      if (away && !whole()) location.reload();
      else if (away) refresh(); // there may have been changes meanwhile
      away = false;
      note("");
    });
    stream.addEventListener("message", refresh);
    // The stream ends with the search; otherwise the browser would reconnect forever.
    stream.addEventListener("end", async () => {
      stream.close();
      await refresh();
      ended();
    });
    stream.addEventListener("error", () => {
      away = true;
      note("The server is unreachable; trying again …");
      // The browser reconnects after a broken connection, but not after an error response.
      if (stream.readyState === EventSource.CLOSED) setTimeout(() => listen(new EventSource(url)), RETRY_MS);
    });
  }
}

// Reports the end of a search in the tab's title and, if requested, in a notification.
function ended() {
  const [name, state] = ["h1", "h1 ~ .state"].map((each) => document.querySelector(each)?.textContent ?? "");
  document.title = `${state}: ${document.title}`;
  if (document.querySelector("[data-notify]")?.checked) new Notification(`${name} ${state}`, { body: document.querySelector(".headline")?.textContent });
}
document.addEventListener("change", async ({ target }) => {
  if (target.matches("[data-notify]") && target.checked) target.checked = (await Notification.requestPermission()) === "granted";
});

// Updates the seconds since a run was submitted, and its share of the usual duration.
function tick() {
  for (const place of document.querySelectorAll("[data-since]")) {
    const seconds = Math.max(0, Math.round((Date.now() - Date.parse(place.dataset.since)) / 1000));
    if (place.tagName === "PROGRESS") place.value = Math.min(seconds, place.max);
    else place.textContent = seconds < 90 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
  }
}

// A script that failed to load cannot be loaded again on the same page.
function whole() {
  const trials = document.querySelector("#trials");
  return !trials || "ready" in trials.dataset;
}

// Fetch the page again, once more if asked meanwhile; resolves when the page shows the newest answer.
function refresh() {
  again = true;
  running ??= refreshed().finally(() => (running = null));
  return running;
}

async function refreshed() {
  while (again) {
    again = false;
    const started = performance.now();
    try {
      const response = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (response.ok) swap(new DOMParser().parseFromString(await response.text(), "text/html"));
    } catch (error) {
      console.info("refresh failed, the next event tries again", error); // the event source reconnects
    }
    // Refresh a page less often if a large search makes it slow.
    await new Promise((resolve) => setTimeout(resolve, Math.max(LEAST_MS, 4 * (performance.now() - started))));
  }
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

// Keeps opened sections, typed values and the focus.
function keep(part, next) {
  const match = (selector) => [part, next].map((root) => [...root.querySelectorAll(selector)]);
  const [details, nextDetails] = match("details");
  details.forEach((each, n) => each.open && nextDetails[n]?.setAttribute("open", ""));
  const [places, nextPlaces] = match("a, button, select, summary, input, textarea");
  places.forEach((each, n) => {
    const next = nextPlaces[n];
    if (next && "defaultValue" in each && each.value !== each.defaultValue) next.value = each.value;
  });
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
