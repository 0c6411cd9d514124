// Shows the description of the selected option below the select.

document.addEventListener("change", ({ target }) => {
  if (target.matches("select[data-about]")) document.getElementById(target.dataset.about).textContent = target.selectedOptions[0].dataset.about ?? "";
});
