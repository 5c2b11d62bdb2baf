// Small charts, drawn as SVG. A kind of event is one path, so that a chart of a quarter of an hour is a few elements.
import { count, clock, rate } from "./panels.js";

const SVG = "http://www.w3.org/2000/svg";
export const KINDS = ["insert", "update", "replace", "delete", "other"];

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The chart of a console that has just begun would be empty on the left: it shows the last three minutes.
export const minutes = (activity) => (activity.until - activity.since < 170 ? 3 : 15);

// For each kind its numbers, one for each step, oldest first.
export function series(activity) {
  const steps = minutes(activity) * 60 / activity.step;
  const first = activity.until - (steps - 1) * activity.step;
  const found = Object.fromEntries(KINDS.map((kind) => [kind, new Array(steps).fill(0)]));
  for (const [kind, counts] of Object.entries(activity.kinds)) {
    const into = found[kind] || found.other;
    for (const [at, number] of counts) {
      const place = Math.round((at - first) / activity.step);
      if (place >= 0 && place < steps) into[place] += number;
    }
  }
  return { first, steps, kinds: found };
}

// A top of the scale that people can divide: 1, 2 or 5 times a power of ten.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value) * power;
}

// Bars of events a second by kind, stacked. `pointed` is told of the step under the pointer, or null.
export function bars(activity, width, height, pointed) {
  const { first, steps, kinds } = series(activity);
  const left = 44, bottom = 20, top = 6;
  const inner = width - left, high = height - bottom - top;
  const totals = Array.from({ length: steps }, (_, i) => KINDS.reduce((sum, kind) => sum + kinds[kind][i], 0));
  const most = ceiling(Math.max(...totals) / activity.step);
  const root = shape("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Events a second by kind in the last ${minutes(activity)} minutes` });
  for (const part of [0, 0.5, 1]) {
    const y = Math.round(top + high * (1 - part)) + 0.5;
    root.append(shape("line", { class: "grid", x1: left, x2: width, y1: y, y2: y }));
    const label = shape("text", { x: left - 8, y: y + 4, "text-anchor": "end" });
    label.textContent = rate(most * part);
    root.append(label);
  }
  const step = inner / steps, gap = step > 4 ? 1 : 0.4;
  const whole = minutes(activity);
  for (let ago = whole; ago >= 0; ago -= whole / 3) {
    const x = width - (ago * 60 / activity.step) * step;
    const label = shape("text", { x: Math.max(left, x), y: height - 4, "text-anchor": ago === 0 ? "end" : ago === whole ? "start" : "middle" });
    label.textContent = ago === 0 ? "now" : `${ago} min ago`;
    root.append(label);
  }
  const base = new Array(steps).fill(0);
  for (const kind of KINDS) {
    let path = "";
    kinds[kind].forEach((number, i) => {
      if (!number) return;
      const size = Math.max(0.7, (number / activity.step / most) * high);
      const y = top + high - base[i] - size;
      path += `M${(left + i * step + gap / 2).toFixed(1)} ${y.toFixed(1)}h${(step - gap).toFixed(1)}v${size.toFixed(1)}h-${(step - gap).toFixed(1)}z`;
      base[i] += size;
    });
    if (path) root.append(shape("path", { class: `k-${kind}`, d: path }));
  }
  const cursor = shape("rect", { class: "cursor", visibility: "hidden", x: left, y: top, width: Math.max(step, 1), height: high });
  root.append(cursor);
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    const place = Math.floor(((event.clientX - box.left) * (width / box.width) - left) / step);
    if (place < 0 || place >= steps) return;
    cursor.setAttribute("x", left + place * step);
    cursor.setAttribute("visibility", "visible");
    pointed({ at: clock(first + place * activity.step), counts: Object.fromEntries(KINDS.map((kind) => [kind, kinds[kind][place]])) });
  });
  root.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); pointed(null); });
  return root;
}

// A line without scales: how the last minutes went.
export function spark(activity) {
  const { steps, kinds } = series(activity);
  const totals = Array.from({ length: steps }, (_, i) => KINDS.reduce((sum, kind) => sum + kinds[kind][i], 0)).slice(-61, -1);
  const most = Math.max(1, ...totals);
  const points = totals.map((number, i) => `${((i / (totals.length - 1)) * 100).toFixed(1)},${(20 - (number / most) * 18).toFixed(1)}`);
  const root = shape("svg", { class: "spark", viewBox: "0 0 100 22", preserveAspectRatio: "none", "aria-hidden": "true" });
  root.append(shape("polyline", { points: points.join(" "), class: "line" }));
  return root;
}

export function legend(entries) {
  const root = document.createElement("div");
  root.className = "legend";
  for (const [kind, number] of entries) {
    const item = document.createElement("span"), mark = document.createElement("i"), value = document.createElement("b");
    mark.className = `k-${kind}`;
    value.textContent = count(number);
    item.append(mark, kind, value);
    root.append(item);
  }
  return root;
}
