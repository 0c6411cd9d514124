// Browsers offer service workers only to secure origins, which include loopback.
navigator.serviceWorker?.register("/offline.js").catch((error) => console.info("no page for when the service is away", error));
