// Beneath a select, say what its chosen option stands for.

for (const select of document.querySelectorAll("select[data-about]")) {
  select.addEventListener("change", () => {
    document.getElementById(select.dataset.about).textContent = select.selectedOptions[0].dataset.about ?? "";
  });
}
