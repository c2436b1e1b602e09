// Asks for what is new every second and draws it. All text comes from outside: it goes in by textContent alone.
"use strict";

const POINTS = 400; // of a curve; more rounds are thinned out
const PERIOD_MS = 1000;
const NOW_MS = 400; // what happens in the round under way is asked for more often, and is little
const LOG_CHARACTERS = 400000;
const known = { after: 0, log: 0 };
let rounds = [], state = null, logText = "", chosen = null, misses = 0, lastAnswer = Date.now();

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function short(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  return size >= 1e5 || (size > 0 && size < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000 || unit === "GB") return `${+value.toPrecision(3)} ${unit}`;
    value /= 1000;
  }
}

function thinned(points) {
  if (points.length <= POINTS) return points;
  const step = points.length / POINTS;
  return Array.from({ length: POINTS }, (_, i) => points[Math.min(Math.floor((i + 1) * step) - 1, points.length - 1)]);
}

// Curves of a few series over rounds, each with its own colour; all share the axis unless they say otherwise.
function chart(id, series) {
  const svg = $(id), width = svg.clientWidth || 400, height = svg.clientHeight || 170;
  const left = 46, right = series.some((s) => s.own) ? 46 : 8, top = 16, bottom = 18;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const last = rounds.length ? rounds[rounds.length - 1].round : 1;
  const first = rounds.length ? rounds[0].round : 1;
  const x = (round) => left + (width - left - right) * (last === first ? 0.5 : (round - first) / (last - first));
  const drawn = series.map((s) => thinned(rounds.map((r) => [r.round, s.of(r)]).filter(([, v]) => v !== null && v !== undefined && isFinite(v))));
  const shared = drawn.filter((_, i) => !series[i].own).flat().map(([, v]) => v);
  series.forEach((s, i) => {
    const values = s.own ? drawn[i].map(([, v]) => v) : shared;
    if (!drawn[i].length) return;
    let low = Math.min(...values), high = Math.max(...values);
    if (low === high) { low -= 0.5; high += 0.5; }
    const y = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low));
    svg.append(element("polyline", { points: drawn[i].map(([r, v]) => `${x(r).toFixed(1)},${y(v).toFixed(1)}`).join(" "), class: `curve c${i}` }));
    const [round, value] = drawn[i][drawn[i].length - 1];
    svg.append(element("circle", { cx: x(round), cy: y(value), r: 2.5, class: `f${i}` }));
    svg.append(element("text", { x: left + 150 * i, y: 11, class: `f${i}` }, `${s.name} ${short(value)}`));
    if (i === 0 || s.own) {
      const at = s.own ? { x: width - right + 4 } : { x: left - 4, "text-anchor": "end" };
      svg.append(element("text", { ...at, y: top + 8 }, short(high)), element("text", { ...at, y: height - bottom }, short(low)));
    }
  });
  svg.append(element("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }));
  svg.append(element("text", { x: left, y: height - 4 }, `round ${first}`), element("text", { x: width - right, y: height - 4, "text-anchor": "end" }, last));
}

function drawStates() {
  const canvas = $("states"), clusters = Math.max(1, ...rounds.map((r) => r.states.length));
  const cell = Math.max(2, Math.min(14, Math.floor(240 / clusters))), columns = Math.max(rounds.length, 1);
  canvas.width = Math.max(columns, 60);
  canvas.height = clusters;
  canvas.style.height = `${cell * clusters}px`;
  const style = getComputedStyle(document.documentElement), pen = canvas.getContext("2d");
  const colour = { t: style.getPropertyValue("--good").trim(), f: style.getPropertyValue("--bad").trim(), l: style.getPropertyValue("--two").trim(), ".": "#8882" };
  const wide = canvas.width / columns;
  rounds.forEach((r, i) => {
    for (let n = 0; n < r.states.length; n++) {
      pen.fillStyle = colour[r.states[n]] || "#0000";
      pen.fillRect(Math.floor(i * wide), n, Math.max(1, Math.ceil(wide)), 1);
    }
  });
}

function drawPipeline() {
  const svg = $("pipeline"), select = $("cluster"), clusters = state.timeline ? state.timeline.clusters : [];
  const numbers = clusters.map((c) => String(c.cluster));
  if ([...select.options].map((o) => o.value).join() !== numbers.join()) {
    select.replaceChildren(...clusters.map((c) => new Option(c.name ? `${c.cluster} (${c.name})` : `cluster ${c.cluster}`, c.cluster)));
  }
  if (!numbers.includes(chosen)) chosen = numbers[0] || null;
  if (chosen !== null) select.value = chosen;
  const cluster = clusters.find((c) => String(c.cluster) === chosen);
  svg.replaceChildren();
  if (!cluster) return;
  const width = svg.clientWidth || 800, row = 16, left = 70, parts = [["measured", cluster.measured], ["modelled", cluster.modelled]].filter(([, events]) => events.length);
  let y = 4;
  for (const [name, events] of parts) {
    const end = Math.max(...events.map((e) => e[4])) || 1, x = (t) => left + ((width - left - 4) * t) / end;
    svg.append(element("text", { x: 0, y: y + 11 }, `${name}, ${short(end)} s`));
    y += 16;
    cluster.order.forEach((device, stage) => {
      svg.append(element("text", { x: 0, y: y + stage * row + 11 }, `device ${device}`));
    });
    for (const [kind, stage, micro, from, to] of events) {
      const box = element("rect", { x: x(from).toFixed(1), y: y + stage * row, width: Math.max(x(to) - x(from), 0.5).toFixed(1), height: row - 3, class: kind === "B" ? "f1" : kind === "W" ? "f2" : "f0", opacity: micro % 2 ? 0.7 : 1 });
      box.append(element("title", {}, `${kind}${micro}: ${short(from)} to ${short(to)} s`));
      svg.append(box);
    }
    y += cluster.order.length * row + 8;
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${y}`);
  svg.style.height = `${y}px`;
}

function items(id, texts) {
  const list = $(id);
  if (list.dataset.shown === JSON.stringify(texts)) return;
  list.dataset.shown = JSON.stringify(texts);
  list.replaceChildren(...texts.map(([text, name]) => {
    const item = document.createElement("li");
    item.textContent = text;
    item.className = name;
    return item;
  }));
}

function faultText(f) {
  const place = [["cluster", f.cluster], ["device", f.device]].filter(([, v]) => v !== null && v !== undefined).map(([k, v]) => `${k} ${v}`).join(", ");
  const end = f.recovered ? (f.seconds === null ? "over" : `over after ${short(f.seconds)} s`) : "not over";
  return `round ${f.round}, step ${f.step}: ${f.kind} (${place}), ${end}: ${f.reason}`;
}

function drawLists() {
  const changes = rounds.flatMap((r) => r.changes.map((c) => [`round ${r.round}, cluster ${c.cluster}: ${c.reason}`, c.taken ? "" : "dim"]));
  items("changes", changes.slice(-60).reverse());
  const past = rounds.flatMap((r) => r.faults.map((f) => [faultText(f), f.recovered ? "" : "bad"]));
  items("faults", [...state.signs_now.map((sign) => [`now: ${sign.text}`, "bad"]), ...state.faults_now.map((f) => [`now: ${faultText(f)}`, "bad"]), ...past.slice(-200).reverse()]);
}

function drawDevices() {
  const body = document.querySelector("#devices tbody"), newest = state.newest;
  if (!newest) return;
  const now = new Map(state.faults_now.filter((f) => f.device !== null && !f.recovered).map((f) => [`${f.cluster}/${f.device}`, f]));
  const silent = new Map(state.signs_now.filter((sign) => sign.device !== null).map((sign) => [`${sign.cluster}/${sign.device}`, sign]));
  const lost = new Map();
  for (const r of rounds.slice(-200)) {
    for (const f of r.faults) {
      if (f.device === null || f.device === undefined) continue;
      if (f.kind === "joined") lost.delete(`${f.cluster}/${f.device}`);
      else lost.set(`${f.cluster}/${f.device}`, f);
    }
  }
  const time = new Map(newest.estimates.flatMap((e) => e.times.filter((t) => t.kind === "device").map((t) => [`${e.cluster}/${t.place}`, t])));
  const rows = newest.clusters.flatMap((c) => (c.plan ? c.plan.delta : []).map((_, k) => [c, String(k)]));
  body.replaceChildren(...rows.slice(0, 1500).map(([c, k]) => {
    const device = c.devices[k], key = `${c.cluster}/${k}`, fault = now.get(key) || (device ? null : lost.get(key)), t = time.get(key);
    const cells = [c.name || c.cluster, k, device ? device.blocks : 0, device ? `${short(device.busy_s)} s` : "–", device ? bytes(device.bytes) : "–",
      t ? `${short(1000 * t.fixed_s)} + ${short(1000 * t.sample_s)} ms` : "–", silent.has(key) ? silent.get(key).text.replace(/^.*?: /, "") : fault ? `${fault.kind} in round ${fault.round}` : device ? "trains" : "idle"];
    const row = document.createElement("tr");
    cells.forEach((text, i) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (i === 6 && (fault || silent.has(key))) cell.className = "bad";
      row.append(cell);
    });
    return row;
  }));
}

function drawLog() {
  const words = $("filter").value.toLowerCase(), pre = $("log"), atEnd = pre.scrollTop + pre.clientHeight > pre.scrollHeight - 30;
  const lines = logText.split("\n");
  pre.textContent = (words ? lines.filter((line) => line.toLowerCase().includes(words)) : lines).slice(-2000).join("\n");
  if (atEnd) pre.scrollTop = pre.scrollHeight;
}

function drawHead() {
  const status = $("status"), last = rounds[rounds.length - 1];
  $("run").textContent = state.run;
  document.title = `${state.last_round}/${state.num_rounds} ${state.run}`;
  status.textContent = state.status;
  status.className = `badge ${state.status}`;
  const per = last && rounds.length > 1 ? rounds.slice(-10).reduce((sum, r) => sum + (r.round_s || 0), 0) / Math.min(rounds.length, 10) : 0;
  const left = state.status === "running" && per ? `, ${short(per * (state.num_rounds - state.last_round))} s left` : "";
  $("progress").textContent = `round ${state.last_round} of ${state.num_rounds}${left}`;
  $("settings").textContent = Object.entries(state.settings).map(([k, v]) => `${k} ${v}`).join(" · ");
  drawBanner();
}

function drawBanner() {
  const waits = Object.entries(state.waiting).map(([n, why]) => `waiting for cluster ${n}: ${why}`);
  const error = state.summary && state.summary.error ? [state.summary.error] : [];
  $("banner").textContent = [...state.signs_now.map((sign) => sign.text), ...state.faults_now.filter((f) => !f.recovered).map((f) => `${f.kind}: cluster ${f.cluster}${f.device === null ? "" : `, device ${f.device}`}`), ...waits, ...error].join(" · ");
}

function draw() {
  const metric = [...new Set(rounds.flatMap((r) => Object.keys(r.metrics)))].find((name) => name !== "loss");
  chart("loss", [{ name: "loss", of: (r) => r.loss }, ...(metric ? [{ name: metric, of: (r) => r.metrics[metric], own: true }] : [])]);
  const measured = rounds.some((r) => r.measured_s !== null && r.measured_s !== undefined);
  chart("seconds", measured
    ? [{ name: "predicted", of: (r) => r.predicted_s }, { name: "measured", of: (r) => r.measured_s }]
    : [{ name: "virtual latency", of: (r) => r.latency_s }, { name: "round", of: (r) => r.round_s, own: true }]);
  chart("queue", [{ name: "longest queue", of: (r) => r.queue }]);
  chart("energy", [{ name: "joules", of: (r) => r.energy_j }]);
  drawStates();
  drawPipeline();
  drawLists();
  drawDevices();
}

async function ask() {
  try {
    const answer = await fetch(`state?after=${known.after}&log=${known.log}`);
    if (!answer.ok) throw new Error(await answer.text());
    const next = await answer.json();
    const begun = state === null, before = state;
    state = next;
    misses = 0;
    lastAnswer = Date.now();
    const first = next.rounds.length ? next.rounds[0].round : Infinity;
    if (next.last_round < known.after) { known.after = 0; rounds = []; return; }
    rounds = [...rounds.filter((r) => r.round < first), ...next.rounds];
    known.after = next.last_round;
    known.log = next.log.offset;
    if (next.log.text) { logText = (logText + next.log.text).slice(-LOG_CHARACTERS); drawLog(); }
    drawHead();
    const changed = begun || next.rounds.length || JSON.stringify(before.faults_now) !== JSON.stringify(next.faults_now);
    if (changed) draw();
  } catch (error) {
    misses += 1;
    if (misses > 1) {
      $("status").textContent = "no sign of life";
      $("status").className = "badge gone";
      $("banner").textContent = `collapipe watch has not answered for ${Math.round((Date.now() - lastAnswer) / 1000)} s: ${error.message}`;
    }
  } finally {
    setTimeout(ask, PERIOD_MS);
  }
}

async function askNow() {
  try {
    if (state && state.status === "running") {
      const answer = await fetch("now");
      if (answer.ok) {
        const before = JSON.stringify([state.signs_now, state.faults_now]);
        Object.assign(state, await answer.json());
        if (JSON.stringify([state.signs_now, state.faults_now]) !== before) { drawBanner(); drawLists(); drawDevices(); }
      }
    }
  } catch { /* ask() tells that nobody answers */ } finally {
    setTimeout(askNow, NOW_MS);
  }
}

$("filter").addEventListener("input", drawLog);
$("cluster").addEventListener("change", (event) => { chosen = event.target.value; drawPipeline(); });
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => state && draw(), 150); });
ask();
askNow();
