// Draws figures with Plotly, in the page's own colours and following light and dark. A figure is {data, layout} in Plotly's
// words; any string in it that begins with "--" is a custom property of tokens.css. An element with data-figure="name" shows
// `figures.name` of the page's JSON.

const dark = matchMedia("screen and (prefers-color-scheme: dark)");
const drawn = new Map(); // element -> figure
const tokens = new Map(); // of custom properties
let loading;
let onPaper = false;

// Plotly itself, fetched when the first figure needs it: 4.8 MB to parse is not for the first paint.
export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    if (window.Plotly) return resolve(window.Plotly);
    const meta = document.querySelector("meta[name=plotly]");
    // Plotly adds style elements, which the content policy refuses, unless elements with these ids exist.
    for (const id of ["plotly.js-style-global", ...meta.dataset.styles.split(" ")]) {
      const stands = document.createElement("template");
      stands.id = id;
      stands.className = "no-inline-styles";
      document.head.append(stands);
    }
    const script = document.createElement("script");
    script.src = meta.content;
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => {
      loading = undefined; // the server was unreachable: the next figure tries again
      reject(new Error("Plotly did not load"));
    });
    document.head.append(script);
  });
  return loading;
}

// Draws the figure, or changes the one that is there.
export async function draw(element, figure) {
  const Plotly = await plotly();
  const first = !drawn.has(element);
  if (first) element.replaceChildren(); // a placeholder
  drawn.set(element, figure);
  await Plotly.react(element, coloured(figure.data), coloured(layout(figure.layout)), { displayModeBar: false, responsive: true });
  if (first) element.on("plotly_afterplot", () => onPaper && scale(element));
  if (onPaper) scale(element);
}

// The page's JSON.
export async function twin() {
  const response = await fetch(document.querySelector("link[rel=alternate][type='application/json']").href);
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response.json();
}

// The value of a custom property, cached until the colour scheme changes.
function token(name) {
  if (!tokens.has(name)) tokens.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return tokens.get(name);
}

function layout(own = {}) {
  const axis = { gridcolor: "--line", linecolor: "--line", zeroline: false, title: { standoff: 8 } };
  const merged = {
    autosize: true,
    height: 340,
    margin: { l: 64, r: 16, t: 16, b: 44 }, // fixed, because fitting them to the labels costs a second layout
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: token("--font"), size: 12, color: "--ink-soft" },
    colorway: ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6", "--series-7", "--series-8"],
    hoverlabel: { bgcolor: "--surface-raised", bordercolor: "--line", font: { color: "--ink" }, align: "left" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    ...own,
  };
  for (const name of ["xaxis", "yaxis", ...Object.keys(own).filter((key) => /^[xy]axis\d+$/.test(key))]) {
    const given = own[name] ?? {};
    const title = typeof given.title === "string" ? { text: given.title } : given.title;
    merged[name] = { ...axis, ...given, title: { ...axis.title, ...title } };
  }
  return merged;
}

function coloured(value) {
  if (typeof value === "string") return value.startsWith("--") ? token(value) : value;
  if (Array.isArray(value)) return typeof value[0] === "number" || value[0] === null ? value : value.map(coloured);
  if (value === null || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
}

dark.addEventListener("change", () => {
  tokens.clear();
  for (const [element, figure] of drawn) if (element.isConnected) draw(element, figure);
});

// On paper a chart is scaled to the page's width: drawing it again would come too late. Plotly may still follow the new width.
function scale(element) {
  for (const svg of element.querySelectorAll(".main-svg")) {
    if (onPaper) svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
    else svg.removeAttribute("viewBox");
  }
}
for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    onPaper = printing;
    for (const element of drawn.keys()) scale(element);
  });
}

const declared = document.querySelectorAll("[data-figure]");
if (declared.length) {
  const { figures } = await twin();
  for (const element of declared) await draw(element, figures[element.dataset.figure]);
}
