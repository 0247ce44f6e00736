// Putting the parts together: snapshots, theme, keys, printing.

const KEYS = [
  ["/", "search"], ["[ and ]", "snapshot before, next snapshot"], ["d", "theme"], ["?", "these keys"],
  ["in the picture: drag, arrows, Page Up, Page Down", "move"], ["wheel (after a click), Ctrl+wheel, + −, pinch", "move, zoom"], ["0", "fit the width"],
  ["j and k", "next call, call before, in running order"], ["Enter", "go to the facts of the selected call"], ["Esc", "select nothing"],
  ["Home, End", "top, bottom"], ["in a chart: ← → (Shift: 10), Home, End, p", "select a moment; the peak"],
];

let graph;

/** Show a snapshot in the picture; the slider and what is written beside it follow. */
function showSnapshot(index) {
  byId("slider").value = index;
  if (graph.snapshot.index !== index) graph.show(index);
  const { label, stage } = graph.snapshot;
  replaceChildren(byId("snapshot"), `${index + 1} of ${data.snapshots.length} · ${stage} stage · `, element("b", {}, brief(label, 300)));
  byId("changed").textContent = changedText(graph.snapshot);
  byId("earlier").disabled = index === 0;
  byId("later").disabled = index === data.snapshots.length - 1;
  showDetails(graph.snapshot, graph.selected);
  if (byId("search").value.trim()) {
    const open = !byId("found").hidden;
    showFound();
    byId("found").hidden = !open;
  }
}

function changedText({ compared, counts, ids }) {
  const calls = plural(ids.reduce((sum, id) => sum + !isInput(id), 0), "call");
  if (data.snapshots.length === 1) return calls;
  if (!compared) return `${calls}; the first snapshot of its stage, with nothing to compare with`;
  const { created, erased, moved, rewired } = counts;
  return `${calls}; against the snapshot before: + ${countText(created)} created, − ${countText(erased)} erased, ↕ ${countText(moved)} moved, Δ ${countText(rewired)} that read other values`;
}

/** Move to another snapshot with the slider; from the first time on, what changed is set off from the rest. */
function slideTo(index) {
  if (index < 0 || index >= data.snapshots.length) return;
  if (!slideTo.used) byId("pale").checked = slideTo.used = true;
  showSnapshot(index);
}

const stepSnapshot = (step) => slideTo(graph.snapshot.index + step);

function startSnapshots() {
  const slider = byId("slider");
  slider.max = data.snapshots.length - 1;
  for (const id of ["earlier", "slider", "later"]) byId(id).hidden = data.snapshots.length === 1;
  byId("pale-label").hidden = data.snapshots.length === 1;
  byId("pale").addEventListener("change", () => { slideTo.used = true; graph.redraw(); });
  slider.addEventListener("input", () => slideTo(Number(slider.value)));
  byId("earlier").addEventListener("click", () => stepSnapshot(-1));
  byId("later").addEventListener("click", () => stepSnapshot(1));
}

function startTools() {
  const actions = {
    "zoom-in": () => graph.zoom(1.25), "zoom-out": () => graph.zoom(0.8), fit: () => graph.fit(),
    "open-all": () => graph.rearranged(openEverything), "close-all": () => graph.rearranged(openAtFirst),
    "help-button": toggleHelp, theme: nextTheme,
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  replaceChildren(byId("help"), KEYS.map(([key, what]) => element("div", {}, element("kbd", {}, key), ` ${what}`)));
}

function toggleHelp() {
  const help = byId("help");
  help.hidden = !help.hidden;
  byId("help-button").setAttribute("aria-expanded", String(!help.hidden));
}

function drawLegend() {
  const used = new Set(records.phase.filter((_, id) => !isInput(id)));
  const marks = data.phases.map((phase, i) => ({ phase, i })).filter(({ i }) => used.has(i)).map(({ phase, i }) => {
    const canvas = element("canvas", { width: 44, height: 32 });
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    context.beginPath();
    context.roundRect(1, 1, 20, 14, 3);
    context.fillStyle = ink.tint[i];
    context.fill();
    context.strokeStyle = ink.phase[i];
    context.stroke();
    drawMark(context, i, 11, 8, 4);
    return element("span", {}, canvas, phase);
  });
  const signs = data.snapshots.some((snapshot) => snapshot.changes) ? "+ created · − erased (dashed, its place stays empty) · ↕ moved · Δ reads other values" : "";
  replaceChildren(byId("legend"), ...marks, element("span", {}, "→ kept for backward (predicted bytes)"), element("span", {}, signs));
}

// --- theme ------------------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme(printing = false) {
  const root = document.documentElement;
  const theme = root.dataset.theme;
  const dark = !printing && (theme === "dark" || (theme === "auto" && systemDark.matches));
  root.toggleAttribute("data-dark", dark);
  readColours();
}

function repaint() {
  drawCharts();
  drawLegend();
  graph.draw();
}

function nextTheme() {
  const root = document.documentElement;
  root.dataset.theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
  byId("theme").textContent = `Theme: ${root.dataset.theme}`;
  applyTheme();
  repaint();
}

// --- start ------------------------------------------------------------------------------------------------------------

function keys(event) {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox" && event.target.type !== "range";
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    "/": () => byId("search").focus(), "[": () => stepSnapshot(-1), "]": () => stepSnapshot(1), d: nextTheme, "?": toggleHelp,
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

function start() {
  applyTheme();
  document.querySelector("main").hidden = false;
  byId("title").textContent = brief(data.title, 2000);
  startPasses();
  startDiffs();
  startActivations();
  startOrigin();
  startCharts();
  graph = new Graph(byId("graph"));
  startSnapshots();
  startTools();
  startSearch();
  showSnapshot(data.after);
  graph.fit();
  repaint();
  document.addEventListener("keydown", keys);
  new ResizeObserver(() => repaint()).observe(byId("graph"));
  new ResizeObserver(() => drawCharts()).observe(byId("charts"));
  systemDark.addEventListener("change", () => { applyTheme(); repaint(); });
  addEventListener("beforeprint", () => { applyTheme(true); repaint(); });
  addEventListener("afterprint", () => { applyTheme(); repaint(); });
}

/** What scripts and tests can ask the page: where a node is drawn, and what is shown. */
window.graphoptPage = {
  place: (name) => {
    const id = graph.snapshot.named(name);
    const found = id === undefined ? null : graph.bands.place(id);
    if (!found) return null;
    const box = graph.canvas.getBoundingClientRect();
    const { x, y, scale } = graph.camera;
    const middle = { x: box.left + (found.x + found.width / 2 - x) * scale, y: box.top + (found.y + found.height / 2 - y) * scale };
    return { ...middle, world: [found.x, found.y], closed: found.closed, folded: found.folded };
  },
  label: (path) => {
    const band = graph.bands.list.find((one) => one.item.path === path || one.item.label === path);
    if (!band) return null;
    const box = graph.canvas.getBoundingClientRect();
    const { x, y, scale } = graph.camera;
    const top = box.top + (band.y + band.height / 2 - y) * scale;
    return { x: box.left + (-LABELS + band.depth * INSET + 4 - x) * scale, y: top, kind: band.kind, open: band.item.open };
  },
  selected: () => (graph.selected === null ? null : text(records.name[graph.selected])),
  hovered: () => (graph.hovered === null ? null : text(records.name[graph.hovered])),
  changes: () => Object.fromEntries([CREATED, ERASED, MOVED, REWIRED].map((kind) => [
    CHANGE_NAMES[kind], [...graph.snapshot.ids, ...graph.snapshot.ghosts].filter((id) => graph.snapshot.changeOf(id) === kind).map((id) => text(records.name[id])),
  ])),
  bands: () => graph.bands.list.map((band) => [band.item.label, band.kind]),
  draw: () => graph.draw(),
  pan: (dx, dy) => graph.pan(dx, dy),
};

start();
