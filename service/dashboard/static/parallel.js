// Parallel coordinates: an axis for each setting in which trials differ, a line for each trial; faster trials are darker.

import { faded } from "./charts.js";
import { svg } from "./elements.js";
import { count, setting } from "./numbers.js";

const LEAST = 130; // between two axes, for their titles; on smaller screens the drawing scrolls
const HEIGHT = 300;
const TOP = 36;
const BOTTOM = 18;
const SIDE = 60;
const CLASSES = 4; // of speed
const MOST_LINES = 1500;

// `choose(axis name, value)` is called when a value on an axis is pressed; `chosen` tells which are.
export function draw(place, trials, shown, { chosen, choose }) {
  const rate = trials.tokens_per_second_per_gpu;
  shown = shown.filter((i) => trials.counts[i] === i); // each configuration once
  const known = shown.filter((i) => rate[i] != null);
  const axes = trials.axes.map((axis) => categorical(axis));
  if (!axes.length) {
    place.replaceChildren("The trials do not differ yet.");
    return;
  }
  const rates = known.map((i) => rate[i]).sort((a, b) => a - b);
  const [low, high] = [rates[0] ?? 0, rates.at(-1) ?? 1];
  const slower = new Map(rates.map((each, n) => [each, n]).reverse()); // how many are slower
  const width = Math.max(LEAST * (axes.length + 1), place.clientWidth);
  const across = (n) => SIDE + (n * (width - 2 * SIDE)) / axes.length;
  const down = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const speed = (i) => down(high > low ? (rate[i] - low) / (high - low) : 0.5);
  const line = (i) => {
    const path = axes.map((axis, n) => `${n ? "L" : "M"}${across(n)} ${down(axis.place(i)).toFixed(1)}`).join("");
    return rate[i] == null ? path : `${path}L${across(axes.length)} ${speed(i).toFixed(1)}`;
  };
  // One path for each class: thousands of elements would be slow.
  const strokes = new Map([["faded", new Set()], ...Array.from({ length: CLASSES }, (_, n) => [`speed-${n}`, new Set()])]);
  const stride = Math.max(1, shown.length / MOST_LINES);
  for (let n = 0; n < shown.length; n += stride) {
    const i = shown[Math.floor(n)];
    const rank = rate[i] == null ? null : Math.floor((CLASSES * slower.get(rate[i])) / rates.length);
    if (rank != null) strokes.get(`speed-${rank}`).add(line(i));
    else if (faded(trials, i)) strokes.get("faded").add(line(i));
  }
  const drawing = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": "Parallel coordinates; values are filters" });
  for (const [name, lines] of strokes) drawing.append(svg("path", { class: `line ${name}`, d: [...lines].join("") }));
  if (shown.includes(trials.best)) drawing.append(svg("path", { class: "line best", d: line(trials.best) }));
  axes.forEach((axis, n) => drawing.append(scale(axis, across(n), down, { chosen, choose })));
  drawing.append(speedScale(across(axes.length), down, low, high, trials.quantity.rate));
  place.replaceChildren(drawing);
}

function categorical(axis) {
  const order = [...new Set(axis.values)].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));
  const share = new Map(order.map((value, n) => [value, order.length > 1 ? n / (order.length - 1) : 0.5]));
  return { ...axis, order, share, place: (i) => share.get(axis.values[i]) };
}

function scale(axis, x, down, { chosen, choose }) {
  const title = svg("text", { x, y: 14, class: "title" }, axis.label);
  const ticks = axis.order.map((value) => {
    const pressed = chosen(axis.name) === String(value);
    const press = () => choose(axis.name, pressed ? "" : String(value));
    return svg(
      "text",
      {
        x: x - 6, y: down(axis.share.get(value)) + 4, class: pressed ? "tick chosen" : "tick", role: "button", tabindex: 0,
        "aria-pressed": String(pressed), "aria-label": `${axis.label} ${setting(value)}`, onclick: press,
        onkeydown: (event) => ["Enter", " "].includes(event.key) && (event.preventDefault(), press()),
      },
      setting(value),
    );
  });
  return svg("g", {}, svg("line", { class: "axis", x1: x, x2: x, y1: down(0), y2: down(1) }), title, ...ticks);
}

function speedScale(x, down, low, high, rate) {
  const label = (share, value) => svg("text", { x: x + 6, y: down(share) + 4, class: "tick end" }, count(value));
  const title = svg("text", { x: x + SIDE - 4, y: 14, class: "title last" }, rate);
  const ticks = high > low ? [label(0, low), label(1, high)] : [];
  return svg("g", {}, svg("line", { class: "axis", x1: x, x2: x, y1: down(0), y2: down(1) }), title, ...ticks);
}
