// Buttons that copy an element's text, or the text behind an address.

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const { copy } = button.dataset; // a selector, or the page's address
  await copied(copy === "address" ? location.href : document.querySelector(copy).textContent);
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1500);
});

// The text behind an address, such as the launch command of a configuration.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy-href]");
  if (!button) return;
  const place = (button.closest("p") ?? button.parentElement).querySelector("[data-copied]");
  const response = await fetch(button.dataset.copyHref).catch(() => null);
  const text = response ? await response.text() : "";
  if (response?.ok) await copied(text);
  place.textContent = response?.ok ? `Copied the ${button.textContent}.` : problem(text);
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
