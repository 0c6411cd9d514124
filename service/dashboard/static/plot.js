// Draws figures of points, lines and bars as SVG. A figure is {traces, x, y, right, shapes}; each colour in it is a custom property
// of tokens.css, so a drawing follows light and dark by itself, and a viewBox lets paper scale it.
//
// A trace: {name, x, y, mode: "points" | "lines" | "both" | "bars", color, text (a line break between lines) and keys by point,
// labels (words beside points, where there is room), symbol: "ring" | "cross" | "star" | "arrow", size, dash, steps, opacity, ends: [lows,
// highs], from (where bars begin), right (its y axis), plain (without a legend)}. An axis: {title, log, zero, whole, percent, times
// (1000 writes seconds as ms), time, ticks, labels, left (pixels for its labels)}. A shape:
// {to} shades up to an x, {at} is a dashed line there; with `color` and `label`.
// An element with data-figure="name" shows `figures.name` of the page's JSON.

import { element, svg } from "./elements.js";

const HEIGHT = 340;
const NARROW = 480; // pixels below which the names of bars stand above them
const LEAST_DRAG = 12; // pixels
const NEAR = 24; // pixels from the pointer to a point that is told about
const drawn = new Map(); // element -> figure
const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => target.dataset.width !== String(target.clientWidth) && paint(target)));
const colour = (name) => `var(${name})`;
const date = { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", timeZone: "UTC" };
const time = new Intl.DateTimeFormat("en-GB", date);
const clock = new Intl.DateTimeFormat("en-GB", { ...date, day: undefined, month: undefined, second: "2-digit", fractionalSecondDigits: 1 });
const MINUTES = 5 * 60_000; // below which an axis of time tells seconds

// Draws the figure, or changes the one that is there. A press on a point that has a key is the element's event "pick".
export function draw(place, figure) {
  if (!drawn.has(place)) {
    resized.observe(place);
    place.addEventListener("pointermove", tell);
    place.addEventListener("pointerleave", tell);
    place.addEventListener("pointerdown", zoom);
    place.addEventListener("dblclick", () => showRange(place, null));
    place.addEventListener("click", (event) => {
      const { key } = nearest(place, event) ?? {};
      if (key != null) place.dispatchEvent(new CustomEvent("pick", { detail: key }));
    });
  }
  drawn.set(place, figure);
  place.figure = figure; // for tests and the console
  paint(place);
}

// A range of x that is dragged over becomes the whole axis; a double click shows all again.
function zoom(event) {
  const place = event.currentTarget;
  if (!drawn.get(place).zoom || event.button || !event.target.closest("svg")) return;
  const image = place.querySelector(":scope > svg");
  const at = ({ clientX }) => clientX - image.getBoundingClientRect().left;
  const from = at(event);
  const band = svg("rect", { class: "band", y: 0, height: HEIGHT });
  const drag = (move) => {
    if (!band.isConnected) image.append(band);
    band.setAttribute("x", Math.min(from, at(move)));
    band.setAttribute("width", Math.abs(at(move) - from));
  };
  addEventListener("pointermove", drag);
  addEventListener("pointerup", (up) => {
    removeEventListener("pointermove", drag);
    band.remove();
    const ends = [from, at(up)].sort((a, b) => a - b);
    if (ends[1] - ends[0] > LEAST_DRAG) showRange(place, ends.map(place.axis.of));
  }, { once: true });
}

// Shows x from one value to another; null: all.
function showRange(place, range) {
  place.range = range;
  paint(place);
}

// The page's JSON.
export async function twin() {
  const response = await fetch(document.querySelector("link[rel=alternate][type='application/json']").href);
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response.json();
}

function paint(place) {
  const figure = drawn.get(place);
  const width = place.clientWidth;
  if (!width) return; // it is hidden, and drawn when it is seen
  const traces = figure.traces.filter((trace) => trace.y.length).map((trace) => within(trace, place.range));
  const right = traces.filter((trace) => trace.right);
  const of = (list, name) => list.flatMap((trace) => [trace[name], trace.from && name === "x" ? trace.from : [], name === "y" && trace.ends ? trace.ends.flat() : []].flat());
  const bars = traces.some((trace) => trace.mode === "bars"); // whose labels stand behind them
  const above = bars && width < NARROW;
  const box = { left: above ? 4 : (figure.y?.left ?? 64), right: width - (right.length || bars ? 72 : 16), top: 10, bottom: HEIGHT - 44 };
  const moments = (values) => (figure.x?.time ? values.map((value) => Date.parse(value)) : values);
  const bands = bars ? traces[0].y : null;
  const x = axis(figure.x, moments(of(traces, "x")), [box.left, box.right]);
  const y = bands ? banded(bands, [box.bottom, box.top], above) : axis(figure.y, of(traces.filter((trace) => !trace.right), "y"), [box.bottom, box.top]);
  const second = right.length ? axis(figure.right, of(right, "y"), [box.bottom, box.top]) : null;
  const [points, words] = [[], []];
  const layers = traces.map((trace) => {
    const up = trace.right ? second : y;
    const at = moments(trace.x).map((value, i) => (value == null || trace.y[i] == null ? null : [x.at(value), up.at(trace.y[i])]));
    if (trace.labels && trace.mode === "points") at.forEach((each, i) => each && trace.labels[i] && words.push({ at: each, text: trace.labels[i] }));
    if (trace.text) at.forEach((each, i) => each && points.push({ at: each, text: trace.text[i], key: trace.keys?.[i] }));
    return layer(trace, at, x, up);
  });
  const image = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" },
    ...(figure.shapes ?? []).map((shape) => shaped(shape, x, box)), ...x.ticks.map((tick) => vertical(tick, box)),
    ...y.ticks.map((tick) => (above ? svg("text", { x: box.left, y: tick.at - y.half - 4 }, tick.text) : horizontal(tick, box))), ...(second?.ticks ?? []).map((tick) => label(tick, box)), ...layers, ...beside(words, points, box), ...titles(figure, box, width));
  const all = place.range && element("button", { type: "button", class: "small", onclick: () => showRange(place, null) }, "Show all");
  place.replaceChildren(legend(traces, all, figure.zoom), image);
  place.axis = x;
  place.dataset.width = width;
  place.points = points;
}

// A trace without the points outside the range of x.
function within(trace, range) {
  if (!range) return trace;
  const [low, high] = range;
  const inside = trace.x.map((x) => x == null || (x >= low && x <= high));
  const kept = (list) => list?.filter((_, i) => inside[i]);
  const [x, y, text, keys, ends] = [kept(trace.x), kept(trace.y), kept(trace.text), kept(trace.keys), trace.ends?.map(kept)];
  if (!trace.steps || !x.length) return { ...trace, x, y, text, keys, ends };
  const before = trace.x.findLastIndex((each) => each < low); // the line goes on from there
  return before < 0 ? { ...trace, x, y } : { ...trace, x: [low, ...x], y: [trace.y[before], ...y] };
}

// {at(value) in pixels, of(pixels), ticks: [{at, text}]}
function axis(spec = {}, values, [from, to]) {
  const known = values.filter((value) => Number.isFinite(value) && (!spec.log || value > 0));
  const f = spec.log ? Math.log10 : (value) => value;
  let [low, high] = known.length ? [Math.min(...known), Math.max(...known)].map(f) : [0, 1];
  if (spec.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const pad = 0.05 * (high - low) || Math.abs(0.1 * high) || 1;
  [low, high] = [spec.zero && low === 0 ? 0 : low - pad, high + pad];
  const at = (value) => from + ((f(value) - low) / (high - low)) * (to - from);
  const most = Math.max(spec.time ? 2 : 4, Math.floor(Math.abs(to - from) / (spec.time ? 150 : 80)));
  const ticks = (spec.ticks ?? (spec.log ? decades(low, high, most) : steps(low, high, most, spec.whole))).filter((value) => f(value) >= low && f(value) <= high);
  const write = spec.time ? (value) => (high - low < MINUTES ? clock : time).format(value) : spec.percent ? (value) => `${(100 * value).toLocaleString("en-US", { maximumSignificantDigits: 3 })}%`
    : (value) => (value * (spec.times ?? 1)).toLocaleString("en-US", { maximumSignificantDigits: 5 });
  const named = ticks.map((value) => ({ at: at(value), text: spec.labels?.[spec.ticks.indexOf(value)] ?? write(value) }));
  const of = (pixels) => low + ((pixels - from) / (to - from)) * (high - low); // of a linear axis
  return { at, of, ticks: named.filter(({ text }, n) => text !== named[n - 1]?.text) }; // of moments within a minute, one
}

function banded(names, [from, to], above) {
  const size = (to - from) / names.length;
  const at = (name) => from + size * (names.indexOf(name) + (above ? 0.25 : 0.5));
  return { at, half: Math.abs(size) * (above ? 0.2 : 0.38), ticks: names.map((name) => ({ at: at(name), text: name })) };
}

// Round values between two, at most so many, or as few more as make two.
function steps(low, high, most, whole) {
  const ticks = rounded(low, high, most, whole);
  return ticks.length > 1 || most > 5 ? ticks : steps(low, high, most + 1, whole);
}

function rounded(low, high, most, whole) {
  const rough = (high - low) / most;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(whole ? 1 : 0, [1, 2, 2.5, 5, 10].map((each) => each * ten).find((each) => each >= rough && !(whole && each % 1)) ?? 1);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

function decades(low, high, most) {
  const tens = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, n) => 10 ** (Math.floor(low) + n));
  const sets = [[1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1]].map((factors) => tens.flatMap((ten) => factors.map((factor) => Number((factor * ten).toPrecision(2)))));
  const inside = (values) => values.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
  const few = sets.map(inside).find((values) => values.length <= most) ?? [];
  return few.length > 2 ? few : steps(10 ** low, 10 ** high, most);
}

function layer(trace, at, x, y) {
  const paint = { stroke: colour(trace.color), fill: "none", "stroke-width": trace.width ?? 2, "stroke-dasharray": trace.dash ? "2 4" : null };
  const made = [];
  if (trace.mode === "bars") made.push(...at.map(([end, middle], i) => bar(trace, end, middle, x, y, i)));
  if (trace.mode === "lines" || trace.mode === "both") made.push(svg("path", { d: path(at, trace.steps), ...paint }));
  if (trace.ends) made.push(svg("path", { ...paint, "stroke-width": 1, d: at.map((each, i) => each && ended(each[0], y.at(trace.ends[0][i]), y.at(trace.ends[1][i]))).join("") }));
  if (trace.mode === "points" || trace.mode === "both") made.push(...at.filter(Boolean).map((each) => mark(trace, each)));
  return svg("g", { opacity: trace.opacity, "data-trace": trace.name }, ...made);
}

function bar(trace, end, middle, x, y, i) {
  const begin = x.at(trace.from[i]);
  const [left, right] = [Math.min(begin, end), Math.max(begin, end)];
  return svg("g", {}, svg("rect", { x: left, y: middle - y.half, width: Math.max(1, right - left), height: 2 * y.half, fill: colour(trace.colors[i]) }),
    svg("text", { x: right + 4, y: middle + 4 }, trace.labels[i]));
}

function path(at, stepped) {
  let before = null;
  return at.map((each) => {
    const d = !each ? "" : !before ? `M${each}` : stepped ? `H${each[0]}V${each[1]}` : `L${each}`;
    before = each;
    return d;
  }).join("");
}

// Words beside their points: on the first side with room and nothing in the way.
function beside(words, points, box) {
  const taken = points.map(({ at: [x, y] }) => [x - 4, x + 4, y - 4, y + 4]);
  return words.flatMap(({ at: [x, y], text }) => {
    const long = 6.4 * text.length;
    const sides = [[x + 8, y + 4], [x - 8 - long, y + 4], [x + 8, y - 10], [x - 8 - long, y - 10], [x + 8, y + 18], [x - 8 - long, y + 18], [x - long / 2, y - 12], [x - long / 2, y + 20]];
    const clear = ([left, bottom]) => left >= box.left && left + long <= box.right && bottom <= box.bottom && bottom - 12 >= 0
      && !taken.some(([a, b, c, d]) => a < left + long && b > left && c < bottom && d > bottom - 12);
    const place = sides.find(clear);
    if (!place) return [];
    taken.push([place[0], place[0] + long, place[1] - 12, place[1]]);
    return [svg("text", { x: place[0], y: place[1] }, text)];
  });
}

function ended(x, low, high) {
  return `M${x - 3} ${low}h6m-3 0V${high}m-3 0h6`;
}

const STAR = "M0-1 .23-.31 .95-.31 .37.12 .59.81 0 .38-.59.81-.37.12-.95-.31-.23-.31Z";

function mark({ symbol, color, size = 6 }, [x, y]) {
  const r = size / 2;
  if (symbol === "star") return svg("path", { d: STAR, transform: `translate(${x} ${y}) scale(${r})`, fill: colour(color) });
  if (symbol === "arrow") return svg("path", { d: `M${x - r} ${y + r}h${size}l${-r} ${-size}Z`, fill: colour(color) });
  if (symbol === "cross") return svg("path", { d: `M${x - r} ${y - r}l${size} ${size}m0-${size}l-${size} ${size}`, stroke: colour(color), "stroke-width": 1.5 });
  const look = symbol === "ring" ? { fill: "none", stroke: colour(color), "stroke-width": size > 12 ? 3 : 1 } : { fill: colour(color) };
  return svg("circle", { cx: x, cy: y, r, ...look });
}

function shaped(shape, x, box) {
  const at = x.at(shape.to ?? shape.at);
  return svg("g", {}, shape.to == null ? null : svg("rect", { x: box.left, y: box.top, width: Math.max(0, Math.min(at, box.right) - box.left), height: box.bottom - box.top, fill: colour("--good-surface") }),
    at > box.right ? null : svg("path", { d: `M${at} ${box.top}V${box.bottom}`, stroke: colour(shape.color), "stroke-dasharray": "5 4" }),
    shape.label && at <= box.right ? svg("text", { x: at + 4, y: box.bottom - 6, fill: colour(shape.color) }, shape.label) : null);
}

function vertical({ at, text }, box) {
  return svg("g", {}, svg("path", { class: "grid", d: `M${at} ${box.top}V${box.bottom}` }), svg("text", { x: at, y: box.bottom + 16, "text-anchor": "middle" }, text));
}

function horizontal({ at, text }, box) {
  return svg("g", {}, svg("path", { class: "grid", d: `M${box.left} ${at}H${box.right}` }), svg("text", { x: box.left - 6, y: at + 4, "text-anchor": "end" }, text));
}

function label({ at, text }, box) {
  return svg("text", { x: box.right + 6, y: at + 4 }, text);
}

function titles(figure, box, width) {
  const middle = (box.top + box.bottom) / 2;
  const turned = (x, text) => text && svg("text", { class: "title", transform: `translate(${x} ${middle}) rotate(-90)`, "text-anchor": "middle" }, text);
  return [svg("text", { class: "title", x: width < NARROW ? width / 2 : (box.left + box.right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, figure.x?.title ?? ""),
    turned(14, figure.y?.title), turned(box.right + 66, figure.right?.title)].filter(Boolean);
}

function legend(traces, all, zooms) {
  const named = [...new Map(traces.filter((trace) => trace.name && !trace.plain).map((trace) => [trace.name, trace])).values()];
  const drawing = (trace) => trace.mode === "lines" ? svg("path", { d: "M0 6H12", stroke: colour(trace.color), "stroke-width": 2, "stroke-dasharray": trace.dash ? "2 3" : null }) : mark({ ...trace, size: 9 }, [6, 6]);
  const items = named.length > 1 ? named.map((trace) => element("li", {}, svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, drawing(trace)), trace.name)) : [];
  return element("ul", { class: "legend" }, ...items, zooms ? element("li", { class: "zoomed" }, all || "Drag to zoom") : null);
}

function nearest(place, { offsetX, offsetY, target }) {
  if (!target.closest?.("svg") || target.closest(".legend") || !place.points) return null;
  const scale = Number(place.dataset.width) / place.clientWidth;
  const [x, y] = [offsetX * scale, offsetY * scale];
  const away = (point) => Math.hypot(point.at[0] - x, point.at[1] - y);
  const best = place.points.reduce((one, each) => (one && away(one) <= away(each) ? one : each), null);
  return best && away(best) <= NEAR ? best : null;
}

// The text of the point under the pointer, beside it.
function tell(event) {
  const place = event.currentTarget;
  const point = event.type === "pointermove" ? nearest(place, event) : null;
  place.querySelector(".tip")?.remove();
  if (!point) return;
  const tip = svg("foreignObject", { class: "tip", x: Math.max(0, Math.min(point.at[0] + 8, place.clientWidth - 260)), y: Math.max(0, point.at[1] > HEIGHT / 2 ? point.at[1] - 110 : point.at[1] + 8), width: 260, height: 110 });
  tip.append(element("div", {}, ...point.text.split("\n").flatMap((line, n) => (n ? [element("br"), line] : [element("strong", {}, line)]))));
  place.querySelector(":scope > svg").append(tip);
}

// Figures that stand in the page.
export function drawAll() {
  for (const place of document.querySelectorAll("[data-plot]")) if (!drawn.has(place)) draw(place, JSON.parse(place.dataset.plot));
}

drawAll();
document.addEventListener("refreshed", drawAll);
const declared = document.querySelectorAll("[data-figure]");
if (declared.length) {
  const { figures } = await twin();
  for (const place of declared) draw(place, figures[place.dataset.figure]);
}
