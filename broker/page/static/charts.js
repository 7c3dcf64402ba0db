// Draws a line chart as SVG: axes, lines, a band, a limit. Colours are classes of page.css, so that
// a change between light and dark needs no drawing.

const SVG = "http://www.w3.org/2000/svg";
const PAD = { left: 48, right: 12, top: 8, bottom: 22 };
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const COLOURS = ["training", "lost", "series-3", "paused", "silent", "series-4"];

function make(parent, name, attributes, text) {
  const node = parent.appendChild(document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** 1234567 -> "1.23 M". */
export function short(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${trim(value / unit)} ${name}`;
  }
  return trim(value);
}

function trim(value) {
  const size = Math.abs(value);
  if (size >= 100) return value.toFixed(0);
  return String(Number(value.toFixed(size >= 10 ? 1 : 2)));
}

/** About `count` round numbers that lie between two values. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

function stroke(index) {
  return { stroke: `var(--${COLOURS[index % COLOURS.length]})`,
    "stroke-dasharray": DASHES[Math.floor(index / COLOURS.length) % DASHES.length] };
}

/** A path through the points [x, y]; a y of null ends the line, and the next point begins another. */
function path(points, place) {
  let open = false;
  let drawn = "";
  for (const [x, y] of points) {
    if (y === null) {
      open = false;
      continue;
    }
    const [left, top] = place(x, y);
    drawn += `${open ? "L" : "M"}${left.toFixed(1)} ${top.toFixed(1)}`;
    open = true;
  }
  return drawn;
}

/**
 * Draws into `box`: `lines` [{name, points: [[x, y]]}], `band` [[x, low, high]], `limits` [{name,
 * value}], each of them perhaps empty. `formatX` makes the text of a tick; `fromZero` keeps 0 on the y axis.
 */
export function drawChart(box, { lines, band = [], limits = [], formatX, fromZero, empty }) {
  const points = lines.flatMap((line) => line.points).filter(([, y]) => y !== null);
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y).concat(band.flatMap(([, low, high]) => [low, high]));
  ys.push(...limits.map((limit) => limit.value));
  if (xs.length < 2 || Math.min(...xs) === Math.max(...xs)) {
    box.replaceChildren(Object.assign(document.createElement("p"), { className: "dim", textContent: empty }));
    return;
  }
  const width = box.clientWidth;
  const height = 230;
  const range = { left: Math.min(...xs), right: Math.max(...xs),
    low: fromZero ? 0 : Math.min(...ys), high: Math.max(...ys) };
  const margin = (range.high - range.low || 1) * 0.06;
  range.high += margin;
  if (!fromZero) range.low -= margin;

  const inner = { width: width - PAD.left - PAD.right, height: height - PAD.top - PAD.bottom };
  const place = (x, y) => [
    PAD.left + ((x - range.left) / (range.right - range.left)) * inner.width,
    PAD.top + ((range.high - y) / (range.high - range.low)) * inner.height,
  ];
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", summary(lines));
  drawAxes(svg, range, place, { width, height, formatX });
  if (band.length > 1) {
    const upper = path(band.map(([x, , high]) => [x, high]), place);
    const lower = path(band.map(([x, low]) => [x, low]).reverse(), place).replace("M", "L");
    make(svg, "path", { class: "band", d: `${upper}${lower}Z`, fill: "var(--training)" });
  }
  for (const limit of limits) {
    const [, top] = place(range.left, limit.value);
    make(svg, "line", { class: "limit", x1: PAD.left, x2: width - PAD.right, y1: top, y2: top });
    make(svg, "text", { x: width - PAD.right, y: top - 4, "text-anchor": "end" }, limit.name);
  }
  lines.forEach((line, index) => {
    make(svg, "path", { class: "line", d: path(line.points, place), ...stroke(index) });
  });
  box.replaceChildren(svg, key(lines));
}

function drawAxes(svg, range, place, { width, height, formatX }) {
  for (const value of ticks(range.low, range.high, 4)) {
    const [, top] = place(range.left, value);
    make(svg, "line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: top, y2: top });
    make(svg, "text", { x: PAD.left - 8, y: top + 4, "text-anchor": "end" }, short(value));
  }
  for (const value of ticks(range.left, range.right, Math.max(2, width / 140))) {
    const [left] = place(value, range.low);
    make(svg, "text", { x: left, y: height - 4, "text-anchor": "middle" }, formatX(value));
  }
}

function key(lines) {
  const list = document.createElement("ul");
  lines.forEach((line, index) => {
    const item = list.appendChild(document.createElement("li"));
    const sample = make(item, "svg", { viewBox: "0 0 26 8", "aria-hidden": "true" });
    make(sample, "line", { class: "line", x1: 0, x2: 26, y1: 4, y2: 4, ...stroke(index) });
    item.append(line.name);
  });
  return list;
}

function summary(lines) {
  const last = lines.map((line) => {
    const point = line.points.findLast(([, y]) => y !== null);
    return `${line.name} ${point ? short(point[1]) : "has no value yet"}`;
  });
  return `Newest values: ${last.join(", ")}`;
}
