// A form that sends files: they may be dropped on it, and it shows how much was sent.

const form = document.querySelector("form[data-drop]");
const input = form.querySelector("input[type=file]");
const progress = form.querySelector("progress");
const says = form.querySelector("[data-says]");

const list = () => (says.textContent = [...input.files].map((file) => `${file.name} (${(file.size / 2 ** 20).toFixed(1)} MiB)`).join(", "));
input.addEventListener("change", list);
for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
  form.addEventListener(name, (event) => {
    event.preventDefault();
    form.classList.toggle("over", over);
    if (name !== "drop" || !event.dataTransfer.files.length) return;
    input.files = event.dataTransfer.files;
    list();
  });
}
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const request = new XMLHttpRequest();
  request.open("POST", form.action);
  request.upload.addEventListener("progress", ({ loaded, total }) => {
    progress.hidden = false;
    [progress.max, progress.value] = [total, loaded];
    says.textContent = loaded < total ? `${Math.round((100 * loaded) / total)}% sent` : "Sent. The server is analyzing the files.";
  });
  request.addEventListener("load", () => {
    document.querySelector("main").replaceWith(new DOMParser().parseFromString(request.responseText, "text/html").querySelector("main"));
    scrollTo(0, 0);
  });
  request.addEventListener("error", () => (says.textContent = "The server does not respond."));
  request.setRequestHeader("Accept", "text/html");
  request.send(new FormData(form));
});
