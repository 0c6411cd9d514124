// Buttons that copy an element's text, or the text behind an address.

document.addEventListener("click", async ({ target }) => {
  const button = target.closest("[data-copy], [data-copy-href]");
  if (!button) return;
  const { copy, copyHref } = button.dataset; // a selector or "address", or the address of a text
  const response = copyHref && (await fetch(copyHref).catch(() => null));
  const text = copy === "address" ? location.href : copy ? document.querySelector(copy).textContent : await response?.text();
  if (copy || response?.ok) await copied(text);
  const place = copyHref ? button.closest("p").querySelector("[data-copied]") : button;
  const before = button.textContent;
  place.textContent = copy ? "Copied" : response?.ok ? `Copied the ${before}.` : problem(text);
  if (copy) setTimeout(() => (place.textContent = before), 1500);
});

// Browsers offer the clipboard only to secure origins, which include loopback.
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function problem(text) {
  try {
    return JSON.parse(text).detail;
  } catch {
    return "The server does not respond.";
  }
}
