// Sends a launch script or a configuration file to the server and opens its query: as a configuration, or as a search for a better
// layout that is compared with the script's.

const part = document.querySelector("#import");
const wrong = part?.querySelector(".wrong");

part?.querySelector("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = new FormData(event.target);
  const overrides = Object.fromEntries(["cluster.gpu", "model"].filter((name) => given.get(name)).map((name) => [name, given.get(name)]));
  const body = { command: given.get("command"), overrides, ...(given.get("num_gpus") && { num_gpus: Number(given.get("num_gpus")) }) };
  const headers = { "Content-Type": "application/json" };
  const response = await fetch("/v1/imports", { method: "POST", headers, body: JSON.stringify(body) }).catch(() => null);
  const answer = (await response?.json().catch(() => null)) ?? { detail: "The server does not respond." };
  wrong.textContent = response?.ok ? "" : answer.detail;
  if (!response?.ok) return;
  const whole = new URLSearchParams({ query: JSON.stringify(answer.query) });
  location.assign(event.submitter.value === "search" ? `/searches/new?${new URLSearchParams(leaves(answer.search))}` : `/configurations?${whole}`);
});

// The query's values by dotted path.
function leaves(value, path = "") {
  if (value === null) return [];
  const branch = typeof value === "object" && !Array.isArray(value);
  if (!branch) return [[path, typeof value === "string" ? value : JSON.stringify(value)]];
  return Object.entries(value).flatMap(([name, inner]) => leaves(inner, path ? `${path}.${name}` : name));
}
