// Asks for what is new and draws it, curves by uPlot. All text comes from outside: it goes in by textContent
// alone. What stays as it was is not touched: nobody's selection, scroll position or open list is lost.
"use strict";

// uPlot formats numbers in the browser's language as it is loaded, after this; "en-US@posix", under LC_ALL=C, is none.
try { Intl.getCanonicalLocales(navigator.language); } catch { Object.defineProperty(navigator, "language", { value: "en" }); }

const PERIOD_MS = 400;
const LOG_CHARACTERS = 400000, LOG_LINES = 2000;
const MOST_CHANGES = 60, MOST_FAULTS = 100, MOST_DEVICES = 200, MOST_IN_BANNER = 4;
const STATES = { ".": ["--line", "not selected"], t: ["--good", "trained"], l: ["--two", "left out"], f: ["--bad", "failed"] };
const known = { after: 0, log: 0 }, charts = {};
let rounds = [], state = null, logText = "", presentShown = "", misses = 0, lastAnswer = Date.now();

const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isNumber = (value) => value !== null && value !== undefined;

function set(node, text, name = node.className) {
  if (node.textContent !== String(text)) node.textContent = text;
  if (node.className !== name) node.className = name;
}

function element(name, attributes, ...content) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  return size >= 1e5 || (size > 0 && size < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  const power = value < 1000 ? 0 : value < 1e6 ? 1 : value < 1e9 ? 2 : 3;
  return `${+(value / 1000 ** power).toPrecision(3)} ${["B", "kB", "MB", "GB"][power]}`;
}

// The largest value that a picture is drawn up to. The first predictions know only what a scenario declares, and a
// round may wait for a cluster: up to a twentieth of the values, one at least, leave the picture where it would be flat.
function ceiling(values) {
  const sorted = values.filter(isNumber).sort((a, b) => a - b), last = sorted.length - 1;
  const most = sorted[last - Math.max(1, Math.floor(sorted.length / 20))];
  return last > 2 && most > 0 && sorted[last] > 2 * most ? 1.2 * most : sorted[last];
}

function drawOutside(id, series) {
  const outside = series.flatMap(([, of, right]) => {
    const limit = ceiling(series.filter((s) => s[2] === right).flatMap(([, each]) => rounds.map(each)));
    return rounds.map((r) => [of(r), r.round]).filter(([v]) => isNumber(v) && v > limit);
  });
  const [value, round] = outside.reduce((a, b) => (b[0] > a[0] ? b : a), [0, 0]);
  set(document.querySelector(`#${id}-outside`), outside.length ? `${outside.length} outside, the largest ${short(value)} in round ${round}` : "");
}

// Curves over rounds: [name, value of a round, whether its axis is that on the right].
function chart(id, ...series) {
  const names = series.map(([name]) => name).join(), data = [rounds.map((r) => r.round), ...series.map(([, of]) => rounds.map(of))];
  if (id !== "loss") drawOutside(id, series);
  if (charts[id]?.names === names) return charts[id].plot.setData(data);
  charts[id]?.plot.destroy();
  // What the pointer is at, else the newest.
  const value = (plot, v, s, at) => short(isNumber(at) ? v : plot.data[s].findLast(isNumber));
  const line = { stroke: colour("--line"), width: 1 }, compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 6 });
  const axis = { stroke: colour("--text"), font: "12px system-ui, sans-serif", grid: line, ticks: line, values: (_, at) => at.map((v) => compact.format(v)) };
  const plot = new uPlot({
    width: $(id).clientWidth,
    height: 180,
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time: false }, ...(id === "loss" ? {} : { left: { range: range(series, false) }, right: { range: range(series, true) } }) },
    axes: [{ ...axis, size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }, { ...axis, scale: "left" }, ...(series.some(([, , right]) => right) ? [{ ...axis, scale: "right", side: 1, grid: { show: false } }] : [])],
    series: [{ label: "round", value }, ...series.map(([name, , right], i) => ({ label: name, value, scale: right ? "right" : "left", stroke: colour(i ? "--two" : "--one"), width: 1.5, spanGaps: true }))],
  }, data, $(id));
  charts[id] = { names, plot };
}

// The range of an axis, by the values that stay in the picture.
const range = (series, isRight) => (plot, low, high) => {
  const values = series.flatMap(([, , right], i) => (Boolean(right) === isRight ? plot.data[i + 1] : []));
  return uPlot.rangeNum(low ?? 0, Math.max(ceiling(values) ?? high ?? 1, low ?? 0), 0.1, true);
};

function nameOf(n) {
  const name = state.newest?.clusters.find((c) => c.cluster === n)?.name;
  return name ? `${n} ${name}` : `cluster ${n}`;
}

// Names at the left of their rows; every few rows where these are narrow.
function drawNames(clusters, rowHeight) {
  const svg = $("names"), every = Math.ceil(15 / rowHeight), parts = [];
  for (let n = 0; n < clusters; n += every) {
    const name = nameOf(n), y = n * rowHeight + Math.min(Math.max(rowHeight / 2 + 4, 11), 12);
    parts.push(element("text", { x: 0, y }, name.length > 16 ? `${name.slice(0, 15)}…` : name, element("title", {}, name)));
  }
  svg.replaceChildren(...parts);
  svg.style.height = `${Math.max(clusters * rowHeight, 16)}px`;
}

// One pixel for what a cluster did in a round, fewer where the page is narrow: what went wrong is drawn last.
function drawStates() {
  const canvas = $("states"), clusters = numClusters(), pen = canvas.getContext("2d");
  canvas.width = Math.min(Math.max(rounds.length, 1), canvas.clientWidth || 1000);
  canvas.height = clusters;
  const rowHeight = Math.max(2, Math.min(16, Math.floor(288 / clusters)));
  canvas.style.height = `${clusters * rowHeight}px`;
  drawNames(clusters, rowHeight);
  const x = (i) => (i * canvas.width) / rounds.length;
  for (const [letter, [name]] of Object.entries(STATES)) {
    pen.fillStyle = colour(name);
    for (let n = 0; n < clusters; n++) {
      for (let from = 0, i = 1; i <= rounds.length; i++) {
        if (i < rounds.length && rounds[i].states[n] === rounds[from].states[n]) continue;
        if (rounds[from].states[n] === letter) pen.fillRect(Math.floor(x(from)), n, Math.ceil(x(i)) - Math.floor(x(from)), 1);
        from = i;
      }
    }
  }
}

const numClusters = () => rounds.reduce((most, r) => Math.max(most, r.states.length), 1);

function drawPipeline() {
  const svg = $("pipeline"), select = $("cluster"), clusters = state.timeline?.clusters ?? [];
  const isFirst = !select.options.length;
  for (let n = select.options.length; n < numClusters(); n++) select.add(new Option("", n));
  for (const option of select.options) set(option, nameOf(Number(option.value)));
  if (isFirst && clusters.length) select.value = clusters[0].cluster;
  const cluster = clusters.find((c) => String(c.cluster) === select.value), parts = [];
  const row = 18, left = 74, width = svg.clientWidth || 800;
  let y = 0;
  for (const name of cluster ? ["measured", "modelled"] : []) {
    const events = cluster[name], end = Math.max(...events.map((e) => e[4])) || 1, x = (t) => left + ((width - left - 4) * t) / end;
    if (!events.length) continue;
    parts.push(element("text", { x: 0, y: y + 14 }, `${name}, ${short(end)} s`));
    y += 20;
    cluster.order.forEach((device, stage) => parts.push(element("text", { x: 0, y: y + stage * row + 12 }, `device ${device}`)));
    for (const [kind, stage, micro, from, to] of events) {
      const box = { x: x(from).toFixed(1), y: y + stage * row, width: Math.max(x(to) - x(from), 0.5).toFixed(1), height: row - 3 };
      const look = { class: kind === "FB" ? "F" : kind, opacity: micro % 2 ? 0.7 : 1 };
      parts.push(element("rect", { ...box, ...look }, element("title", {}, `${kind}${micro}: ${short(from)} to ${short(to)} s`)));
    }
    y += cluster.order.length * row + 8;
  }
  if (!parts.length) parts.push(element("text", { x: 0, y: 14 }, "did not train in this round"));
  svg.replaceChildren(...parts);
  svg.setAttribute("viewBox", `0 0 ${width} ${y || 20}`);
  svg.style.height = `${y || 20}px`;
}

// Makes the rows of a list or a table: [key, class, a text for each cell].
function drawRows(parent, wanted) {
  const isTable = parent.tagName === "TBODY", shown = new Map([...parent.children].map((row) => [row.key, row]));
  const rows = wanted.map(([key, name, ...texts]) => {
    const row = shown.get(key) ?? document.createElement(isTable ? "tr" : "li");
    shown.delete(key);
    row.key = key;
    if (row.className !== name) row.className = name;
    texts.forEach((text, i) => set(isTable ? row.cells[i] ?? row.insertCell() : row, text));
    return row;
  });
  for (const row of shown.values()) row.remove();
  rows.forEach((row, i) => parent.children[i] === row || parent.insertBefore(row, parent.children[i]));
  while (parent.children.length > rows.length) parent.lastElementChild.remove();
}

const placeOf = (f) => [["cluster", f.cluster], ["device", f.device]].filter(([, v]) => isNumber(v)).map(([k, v]) => `${k} ${v}`).join(", ");

function faultRow(f, name, when = "") {
  const end = f.recovered ? (f.seconds === null ? "over" : `over after ${short(f.seconds)} s`) : "not over";
  return [[when, f.round, f.step, f.kind, placeOf(f)].join(), name, `${when}round ${f.round}, step ${f.step}: ${f.kind} (${placeOf(f) || "server"}), ${end}: ${f.reason}`];
}

function drawLists() {
  const changes = rounds.flatMap((r) => r.changes.map((c) => [`${r.round}/${c.cluster}`, c.taken ? "" : "dim", `round ${r.round}, cluster ${c.cluster}${c.taken ? "" : ", not taken"}: ${c.reason}`]));
  drawRows($("changes"), changes.slice(-MOST_CHANGES).reverse());
  const past = rounds.flatMap((r) => r.faults.map((f) => faultRow(f, f.recovered ? "" : "bad")));
  const signs = state.signs_now.map((sign) => [`sign ${placeOf(sign)}`, "bad", `now: ${sign.text}`]);
  drawRows($("faults"), [...signs, ...state.faults_now.map((f) => faultRow(f, "bad", "now: ")), ...past.slice(-MOST_FAULTS).reverse()]);
}

function drawDevices() {
  if (!state.newest) return;
  const faults = new Map(), words = new Map(), times = new Map();
  for (const f of rounds.slice(-200).flatMap((r) => r.faults)) f.kind === "joined" ? faults.delete(placeOf(f)) : faults.set(placeOf(f), f);
  const health = (f) => `${f.kind} in round ${f.round}`;
  for (const f of state.faults_now) if (!f.recovered) words.set(placeOf(f), health(f));
  for (const sign of state.signs_now) words.set(placeOf(sign), sign.text.replace(/^.*?: /, ""));
  const silent = new Set(state.signs_now.filter((sign) => sign.device === null).map((sign) => sign.cluster));
  for (const c of state.newest.clusters) for (let k = 0; k < c.num_devices; k++) {
    const place = placeOf({ cluster: c.cluster, device: k });
    if (words.has(place) || !(c.lost || silent.has(c.cluster))) continue;
    words.set(place, c.lost ? `unknown: its control unit is lost since round ${c.lost}` : "unknown: its control unit gives no sign of life");
  }
  for (const e of state.newest.estimates) for (const t of e.times) times.set(placeOf({ cluster: e.cluster, device: t.place }), t);
  let wanted = state.newest.clusters.flatMap((c) => Array.from({ length: c.num_devices }, (_, k) => {
    const place = placeOf({ cluster: c.cluster, device: k }), d = c.devices[k], t = times.get(place);
    const wrong = words.get(place) ?? (!d?.blocks && faults.has(place) ? health(faults.get(place)) : undefined), isNew = c.round === state.newest.round;
    return [place, wrong ? "bad" : "", c.name ? `${c.cluster} ${c.name}` : c.cluster, k, d ? d.blocks : 0, d && isNew ? `${short(d.busy_s)} s` : "–", bytes(d?.bytes), t ? `${short(1000 * t.fixed_s)} + ${short(1000 * t.sample_s)} ms` : "–", wrong ?? (isNew ? (d ? "trains" : "idle") : "not in this round")];
  }));
  set($("omitted"), wanted.length > MOST_DEVICES ? `${MOST_DEVICES} of ${wanted.length}: those in trouble, then those of the cluster chosen above` : "");
  if (wanted.length > MOST_DEVICES) {
    const rank = ([place, name]) => (name ? 2 : 0) + (place.startsWith(`cluster ${$("cluster").value},`) ? 1 : 0);
    wanted = wanted.sort((a, b) => rank(b) - rank(a)).slice(0, MOST_DEVICES);
  }
  drawRows($("devices").tBodies[0], wanted);
}

const isAtEnd = () => $("log").scrollTop + $("log").clientHeight > $("log").scrollHeight - 30;

function drawLog() {
  const words = $("filter").value.toLowerCase();
  set($("log"), logText.split("\n").filter((line) => line.toLowerCase().includes(words)).slice(-LOG_LINES).join("\n"));
  $("log").scrollTop = $("log").scrollHeight;
}

function drawHead() {
  const seconds = state.left_s, rest = seconds < 120 ? `${short(seconds)} s` : `${Math.round(seconds / 60)} min`;
  const counter = `${state.last_round} of ${Math.max(state.num_rounds, state.last_round)}`;
  set($("run"), state.run);
  set($("status"), state.status, `badge ${state.status}`);
  set($("progress"), `round ${counter}${seconds ? `, ${rest} left` : ""}`);
  set($("settings"), Object.entries(state.settings).map(([k, v]) => `${k} ${v}`).join(" · "));
  set(document.querySelector("title"), `${counter} ${state.run}`);
}

function drawBanner() {
  const waits = Object.entries(state.waiting).map(([n, why]) => `waiting for cluster ${n}: ${why}`);
  const faults = state.faults_now.filter((f) => !f.recovered).map((f) => `${f.kind}: ${placeOf(f) || "server"}`);
  const texts = [...(state.summary?.error ? [state.summary.error] : []), ...state.signs_now.map((sign) => sign.text), ...faults, ...waits];
  const more = texts.length > MOST_IN_BANNER ? [`and ${texts.length - MOST_IN_BANNER} more`] : [];
  set($("banner"), [...texts.slice(0, MOST_IN_BANNER), ...more].join(" · "));
}

function drawPresent() {
  drawBanner();
  const present = JSON.stringify([state.signs_now, state.faults_now]);
  if (present === presentShown) return;
  presentShown = present;
  drawLists();
  drawDevices();
}

function draw() {
  const metric = rounds.flatMap((r) => Object.keys(r.metrics)).find((name) => name !== "loss");
  chart("loss", ["loss", (r) => r.loss], ...(metric ? [[metric, (r) => r.metrics[metric], true]] : []));
  if (rounds.some((r) => isNumber(r.measured_s))) chart("seconds", ["predicted", (r) => r.predicted_s], ["measured", (r) => r.measured_s]);
  else chart("seconds", ["virtual latency", (r) => r.latency_s], ["round", (r) => r.round_s, true]);
  chart("queue", ["longest queue", (r) => r.queue]);
  chart("energy", ["joules", (r) => r.energy_j]);
  drawStates();
  drawPipeline();
  drawLists();
  drawDevices();
}

async function ask() {
  try {
    const answer = await fetch(`state?after=${known.after}&log=${known.log}`);
    if (!answer.ok) throw new Error(await answer.text());
    const next = await answer.json(), isFirst = state === null;
    misses = 0;
    lastAnswer = Date.now();
    // The newest round's details come with it alone.
    state = { ...state, ...next };
    if (next.last_round < known.after) { known.after = 0; rounds = []; return; }
    rounds = [...rounds, ...next.rounds];
    known.after = next.last_round;
    known.log = next.log.offset;
    logText = (logText + next.log.text).slice(-LOG_CHARACTERS);
    // Who reads further up is left alone, until the end is scrolled to.
    if (next.log.text && isAtEnd()) drawLog();
    drawHead();
    if (isFirst || next.rounds.length) draw();
    drawPresent();
  } catch (error) {
    misses += 1;
    if (misses > 1) {
      set($("status"), "no sign of life", "badge gone");
      set($("banner"), `collapipe watch has not answered for ${Math.round((Date.now() - lastAnswer) / 1000)} s: ${error.message}`);
    }
  } finally {
    setTimeout(ask, PERIOD_MS);
  }
}

function redraw() {
  for (const drawn of Object.values(charts)) drawn.names = null;
  if (state) draw();
}

$("filter").addEventListener("input", drawLog);
$("log").addEventListener("scroll", () => isAtEnd() && drawLog());
$("cluster").addEventListener("change", () => { drawPipeline(); drawDevices(); });
$("states").addEventListener("mousemove", ({ target, offsetX, offsetY }) => {
  const r = rounds[Math.floor((offsetX / target.clientWidth) * rounds.length)], n = Math.floor((offsetY / target.clientHeight) * target.height);
  target.title = r ? `round ${r.round}, cluster ${n}: ${STATES[r.states[n]]?.[1] ?? "not there"}` : "";
});
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(redraw, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("DOMContentLoaded", ask);
