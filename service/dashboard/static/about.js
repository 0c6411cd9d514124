// Beneath a select, say what its chosen option stands for.

document.addEventListener("change", ({ target }) => {
  if (target.matches("select[data-about]")) document.getElementById(target.dataset.about).textContent = target.selectedOptions[0].dataset.about ?? "";
});
