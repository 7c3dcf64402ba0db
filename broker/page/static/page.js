// Shows a run: the server sends everything once, and then what changes (server-sent events). All
// words and figures come from the server; this file places and draws them.

import { drawChart, short } from "/static/charts.js";

// Letter of a state -> its class and shape. Colour is never the only sign of a state.
const STATES = {
  t: ["training", "●"], j: ["joining", "◔"], p: ["paused", "❚❚"], s: ["silent", "○"],
  n: ["no steps", "◇"], l: ["lost", "✕"], x: ["left", "–"], k: ["key revoked", "⊘"],
  c: ["line cut", "!"],
};
const UNKNOWN = ["not known", "?"];
const KEPT_POINTS = 1200;
const KEPT_BINS = 120;
const KEPT_NOTICES = 40;
const OVERSCAN = 3;

const $ = (id) => document.getElementById(id);
const seen = { learners: {}, names: [], rates: [], curves: {}, band: [], notices: [], refusals: [], limits: [], bin: 0 };
const rows = new Map();

function element(name, className, text) {
  return Object.assign(document.createElement(name), { className, textContent: text });
}

function clock(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hourCycle: "h23" });
}

function cssName(word) {
  return word.replaceAll(" ", "-");
}

function drawHead(said) {
  seen.limits = said.limits;
  const sentence = $("sentence");
  // A screen reader reads the sentence again whenever it is set.
  if (sentence.textContent !== said.sentence.text) sentence.textContent = said.sentence.text;
  sentence.className = said.sentence.level;
  $("remedy").textContent = said.sentence.remedy;
  $("run").lastElementChild.textContent = said.run;
  document.title = said.sentence.level === "ok" ? "Narrows" : `${said.sentence.text} · Narrows`;
  $("figures").replaceChildren(...said.figures.map(([label, value, more]) => {
    const figure = document.createElement("div");
    const shown = element("dd", "", value);
    shown.append(element("small", "", more));
    figure.append(element("dt", "", label), shown);
    return figure;
  }));
  $("fragments").replaceChildren(...said.fragments.map(([text, round]) => (
    element("li", round ? "busy" : "", round ? `${text}, ${round}` : text)
  )));
}

function drawNotices() {
  const newestFirst = [...seen.notices, ...seen.refusals].toReversed().sort(([a], [b]) => b - a);
  $("notices").replaceChildren(...newestFirst.map(([at, text]) => {
    const item = element("li", "", "");
    item.append(element("time", "", clock(at)), text);
    return item;
  }));
}

function drawCharts() {
  const many = seen.band.length > 0;
  drawChart($("loss"), {
    lines: many
      ? [{ name: "median of all learners; the band holds 80% of them", points: seen.band.map(([x, , mid]) => [x, mid]) }]
      : Object.keys(seen.curves).sort().map((name) => ({ name, points: seen.curves[name] })),
    band: seen.band.map(([x, low, , high]) => [x, low, high]),
    formatX: short,
    empty: "No learner has told a loss yet: learner.log(tokens, loss) tells it.",
  });
  const mbits = (value) => (value === null ? null : value / 1e6);
  drawChart($("rate"), {
    lines: [
      { name: "up, to the broker", points: seen.rates.map(([at, up]) => [at, mbits(up)]) },
      { name: "down, to the learners", points: seen.rates.map(([at, , down]) => [at, mbits(down)]) },
    ],
    limits: seen.limits.map(({ name, bits_per_s }) => ({ name, value: mbits(bits_per_s) })),
    formatX: clock,
    fromZero: true,
    empty: "Nothing was measured yet.",
  });
}

// Only lanes in sight exist as elements: a thousand learners cost no more than a dozen.
function drawLanes() {
  const box = $("lanes");
  const height = matchMedia("(max-width: 760px)").matches ? 62 : 38;
  box.style.height = `${Math.min(seen.names.length * height, Math.max(152, innerHeight * 0.5)) + 4}px`;
  box.firstElementChild.style.height = `${seen.names.length * height}px`;
  const first = Math.max(0, Math.floor(box.scrollTop / height) - OVERSCAN);
  const last = first + Math.ceil(box.clientHeight / height) + 2 * OVERSCAN;
  const shown = new Set(seen.names.slice(first, last));
  for (const [name, row] of rows) {
    if (shown.has(name)) continue;
    row.remove();
    rows.delete(name);
  }
  const colours = getComputedStyle(document.documentElement);
  seen.names.slice(first, last).forEach((name, index) => {
    const row = rows.get(name) ?? makeRow(name);
    row.style.top = `${(first + index) * height}px`;
    drawRow(row, name, colours);
  });
}

function makeRow(name) {
  const row = element("div", "lane", "");
  const title = element("b", "", name);
  title.title = name;
  const lane = document.createElement("canvas");
  lane.setAttribute("role", "img");
  row.append(title, document.createElement("span"), lane);
  $("lanes").firstElementChild.append(row);
  rows.set(name, row);
  return row;
}

function drawRow(row, name, colours) {
  const learner = seen.learners[name];
  const [word, mark] = STATES[learner.states.at(-1)] ?? UNKNOWN;
  const [, told, lane] = row.children;
  const sign = element("span", `mark ${cssName(word)}`, mark);
  told.replaceChildren(sign, ` ${learner.text}`);
  told.title = learner.text;
  lane.setAttribute("aria-label", `${name}: ${learner.text}`);
  drawLane(lane, learner, colours);
}

/** Bins of some seconds from left to right. Height: pushes merged. Else the shape of the state. */
function drawLane(canvas, { states, merged }, colours) {
  const width = canvas.clientWidth * devicePixelRatio;
  const height = canvas.clientHeight * devicePixelRatio;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const bins = canvas.clientWidth < 500 ? 60 : 120;
  const step = width / bins;
  const most = Math.max(1, ...merged.slice(-bins));
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  [...states.slice(-bins)].forEach((letter, index, all) => {
    if (!(letter in STATES)) return;
    const left = (bins - all.length + index) * step;
    const wide = Math.max(1, step - devicePixelRatio);
    pen.fillStyle = colours.getPropertyValue(`--${cssName(STATES[letter][0])}`);
    const pushes = merged[merged.length - all.length + index];
    const bar = (height - 2) * (0.25 + 0.75 * pushes / most);
    if (pushes > 0) pen.fillRect(left, height - bar, wide, bar);
    if (letter === "t") pen.fillRect(left, height - height / 10, wide, height / 10);
    if (letter === "j") pen.fillRect(left, height - height / 4, wide, height / 10);
    if (letter === "p") pen.fillRect(left, height / 3, wide / 2, height / 3);
    if (letter === "s") pen.fillRect(left, height / 2 - height / 5, wide, height / 14);
    if (letter === "s") pen.fillRect(left, height / 2 + height / 5, wide, height / 14);
    if (letter === "n") pen.fillRect(left, height / 2 - height / 14, wide, height / 7);
    if (letter === "l" || letter === "k") pen.fillRect(left, height / 2 - height / 12, step, height / 6);
    if (letter === "c") pen.fillRect(left, 0, wide, height / 8);
    if (letter === "x") pen.fillRect(left, height - height / 20, wide / 2, height / 20);
  });
}

function keep(points, more) {
  points.push(...more);
  // Every second point goes, so that a tab that is open for a month stays small.
  return points.length > KEPT_POINTS ? points.filter((_, index) => index % 2 === 1) : points;
}

/** Entries by a learner's name, which may be one that every object has, such as "constructor". */
function byName(entries) {
  return Object.assign(Object.create(null), entries);
}

/** Everything that the server knows: at first, and when the run has another shape. */
function takeAll(said) {
  Object.assign(seen, {
    learners: byName(said.learners), rates: said.rates, curves: byName(said.curves),
    band: said.band, notices: said.notices, refusals: said.refusals, bin: said.bin,
  });
  seen.names = Object.keys(seen.learners).sort();
  $("legend").replaceChildren(
    ...Object.values(STATES).map(([word, mark]) => {
      const item = element("span", "", "");
      item.append(element("span", `mark ${cssName(word)}`, mark), ` ${word}`);
      return item;
    }),
    element("span", "", `Now is at the right. A bar is as high as the pushes merged in ${said.bin_s} s.`),
  );
  drawHead(said);
  drawNotices();
  drawCharts();
  drawLanes();
}

/** What is new since the last event. */
function takeChange(said) {
  // The clock of the server may have leapt: older bins are not kept.
  for (seen.bin = Math.max(seen.bin, said.bin - KEPT_BINS); seen.bin < said.bin; seen.bin += 1) {
    for (const learner of Object.values(seen.learners)) {
      learner.states = (learner.states + learner.states.at(-1)).slice(-KEPT_BINS);
      learner.merged = [...learner.merged, 0].slice(-KEPT_BINS);
    }
  }
  for (const [name, { state, text, merged }] of Object.entries(said.learners)) {
    const learner = (seen.learners[name] ??= { states: "?", merged: [0] });
    learner.text = text;
    learner.states = learner.states.slice(0, -1) + state;
    learner.merged[learner.merged.length - 1] = merged;
  }
  const names = Object.keys(seen.learners);
  if (names.length !== seen.names.length) seen.names = names.sort();
  seen.rates = keep(seen.rates, said.rates);
  seen.band = keep(seen.band, said.band);
  for (const [name, points] of Object.entries(said.curves)) {
    seen.curves[name] = keep(seen.curves[name] ?? [], points);
  }
  if (said.notices.length > 0 || String(said.refusals) !== String(seen.refusals)) {
    seen.notices = [...seen.notices, ...said.notices].slice(-KEPT_NOTICES);
    seen.refusals = said.refusals;
    drawNotices();
  }
  drawHead(said);
  drawLanes();
  drawCharts();
}

// The browser connects again by itself; the first event is then everything.
const stream = new EventSource("/events");
for (const [kind, take] of [["all", takeAll], ["change", takeChange]]) {
  stream.addEventListener(kind, (event) => {
    const began = performance.now();
    take(JSON.parse(event.data));
    window.lastUpdate = { ms: performance.now() - began, bytes: event.data.length };
  });
}
stream.onerror = () => {
  $("sentence").className = "bad";
  $("sentence").textContent = "The server of this page does not answer.";
  $("remedy").textContent = "Start `narrows page` again; this page tries every few seconds.";
};
$("lanes").addEventListener("scroll", drawLanes, { passive: true });
const redraw = () => {
  drawLanes();
  drawCharts();
};
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
