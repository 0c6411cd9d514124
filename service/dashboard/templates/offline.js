// A service worker that shows one page where the service cannot be reached. It touches nothing else.
const PAGE = "/offline";
const WHOLE = [PAGE, "/static/{{ assets }}/tokens.css", "/static/{{ assets }}/app.css"];

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(caches.open("{{ assets }}").then((cache) => cache.addAll(WHOLE)));
});

self.addEventListener("activate", (event) => {
  const outdated = (names) => Promise.all(names.filter((name) => name !== "{{ assets }}").map((name) => caches.delete(name)));
  event.waitUntil(caches.keys().then(outdated));
});

self.addEventListener("fetch", (event) => {
  const cached = WHOLE.some((path) => event.request.url === new URL(path, location).href);
  if (event.request.mode === "navigate" || cached) {
    event.respondWith(fetch(event.request).catch(() => caches.match(cached ? event.request : PAGE)));
  }
});
