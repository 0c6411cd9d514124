// A launch script or a configuration file: what the server reads of it opens as a configuration, or in the form as a search for a
// better one, compared with it.

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
  location.assign(part.dataset.opens === "form" ? `/searches/new?${new URLSearchParams(leaves(answer.search))}` : `/configurations?${whole}`);
});

// A query's values by dotted path, as the form's fields are named.
function leaves(value, path = "") {
  if (value === null) return [];
  const branch = typeof value === "object" && !Array.isArray(value);
  if (!branch) return [[path, typeof value === "string" ? value : JSON.stringify(value)]];
  return Object.entries(value).flatMap(([name, inner]) => leaves(inner, path ? `${path}.${name}` : name));
}
