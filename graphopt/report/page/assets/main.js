// Putting the parts together: snapshots, theme, keys, printing.

const KEYS = [
  ["/", "search; Enter: next hit, Shift+Enter: the one before"], ["[ and ]", "snapshot before, next snapshot"], ["d", "theme"], ["?", "these keys"],
  ["in the picture: ↑ ↓", "module above, module below"], ["Enter or Space", "open or fold it; with a selected op: go to its facts"], ["← →", "fold, open"],
  ["drag, Shift+arrows, Page Up, Page Down", "move"], ["wheel (after a click), Ctrl+wheel, + −, pinch", "move, zoom"], ["0", "fit the width"],
  ["j and k", "next op, op before, in running order"], ["Esc", "select nothing"], ["Home, End", "top, bottom"],
  ["in a chart: ← → (Shift: 10), Home, End, p", "select a moment; the peak"],
];

let graph;

/** Show a snapshot in the picture; the slider and what is written beside it follow. */
function showSnapshot(index) {
  if (graph.snapshot.index !== index) graph.show(index);
  tellSnapshot();
}

/** Write beside the slider which snapshot is shown, and what changed on the way to it. */
function tellSnapshot() {
  const { label, stage, index } = graph.snapshot;
  byId("slider").value = index;
  const planned = graph.place === null ? "" : " and what the plan of the budget would do";
  replaceChildren(byId("snapshot"), `${index + 1} of ${data.snapshots.length} · ${data.stage_names[stage]} · `, element("b", {}, brief(label, 300)), planned);
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

function changedText({ compared, counts, ids, index, program }) {
  const ops = plural(ids.reduce((sum, id) => sum + !isInput(id), 0), "op");
  if (data.snapshots.length === 1) return ops;
  if (!compared) return `${ops}; the first program of its kind, with nothing to compare with`;
  const { created, erased, moved, rewired } = counts;
  const against = index !== program || index - 1 === data.before ? "the program without passes" : "the program before";
  return `${ops}; compared with ${against}: + ${countText(created)} created, − ${countText(erased)} erased, ↕ ${countText(moved)} moved, Δ ${countText(rewired)} with other inputs`;
}

/** Move to another snapshot with the slider; from the first time on, what changed is set off from the rest. */
function slideTo(index) {
  if (index < 0 || index >= data.snapshots.length) return;
  if (!slideTo.used) byId("pale").checked = slideTo.used = true;
  graph.place = null;
  graph.changed(false);
  showSnapshot(index);
  if (budget) budget.say();
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
    "open-all": showEverything, "close-all": () => graph.rearranged(openAtFirst),
    "help-button": toggleHelp, theme: nextTheme, "by-bytes": () => measureBy("bytes"), "by-seconds": () => measureBy("seconds"),
  };
  byId("views").addEventListener("change", () => graph.showViews(byId("views").checked));
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  replaceChildren(byId("help"), KEYS.map(([key, what]) => element("div", {}, element("kbd", {}, key), ` ${what}`)));
}

/** Open all modules, and show every op. */
function showEverything() {
  graph.showHidden();
  graph.rearranged(openEverything);
}

/** Let the bars in boxes show bytes or seconds. */
function measureBy(what) {
  graph.measure = what;
  for (const name of ["bytes", "seconds"]) byId(`by-${name}`).setAttribute("aria-pressed", String(name === what));
  graph.changed(false);
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
  const signs = data.snapshots.some((snapshot) => snapshot.changes) ? "+ created · − erased (dashed, its place stays empty) · ↕ moved · Δ has other inputs" : "";
  const lines = [["kept", ["saved for backward", ", as thick as its bytes"]], ["flow", ["is read by"]]];
  if (frontier) lines.push(["again", ["recomputed"]]);
  if (data.phases.some((phase, i) => phase === "transfer" && used.has(i)) || lanes[OUTSIDE_LANE].used) lines.push(["away", ["offloaded"]]);
  const samples = lines.map(([kind, [word, more = ""]]) => element("span", {}, element("span", { class: `line ${kind}` }), WORDS[word] ? term(word) : word, more));
  replaceChildren(byId("legend"), ...marks, ...samples, element("span", {}, signs));
}

// --- the first numbers ------------------------------------------------------------------------------------------------

/** One large number, what it is, and what it was. */
function figure(label, value, note) {
  return element("div", { class: "figure" }, element("div", { class: "what" }, label), element("div", { class: "value" }, value), element("div", { class: "note" }, ...note));
}

/** Peak memory before and after, and what it costs in time or, where that is not known, what is saved for backward. */
function startFigures() {
  const { before, after } = data.timelines;
  const place = byId("figures");
  if (data.stage === "forward") {
    place.hidden = true;
    return;
  }
  const was = before ? before.peak_bytes : after.peak_bytes, now = after.peak_bytes;
  const peak = was === now ? [bytesText(now)] : [element("span", { class: "was" }, bytesText(was)), " → ", bytesText(now)];
  const change = was === now ? "" : `${now < was ? "−" : "+"}${oneDecimal(Math.abs(100 * (now / was - 1)))} %, `;
  const figures = [figure(["Peak memory of a step"], peak, [change, term("predicted")])];
  const keeps = (at) => data.activations.reduce((total, one) => total + one[at], 0);
  if (frontier) {
    const extra = frontier.extra[frontier.chosen];
    figures.push(figure(["Time of a step"], [extraText(extra)], [`${secondsText(extra)} on top of ${secondsText(frontier.seconds)}, estimated from `, timeSource()]));
  } else if (data.activations.length) {
    const [old, left] = [keeps(3), keeps(4)];
    const value = before && old !== left ? [element("span", { class: "was" }, bytesText(old)), " → ", bytesText(left)] : [bytesText(left)];
    figures.push(figure([term("saved for backward", "Saved for backward")], value, [term("predicted")]));
  }
  replaceChildren(place, figures);
}

/** The picture in words, for those who do not see it. */
function describePicture() {
  const outer = tree.map((item) => (item.kind === "group" ? `${item.label}, ${item.copies} equal ones` : item.label)).slice(0, 40);
  const { here, away } = graph.snapshot.kept.reduce((sum, one) => {
    sum[data.phases[records.phase[one.record]] === "transfer" ? "away" : "here"] += one.bytes;
    return sum;
  }, { here: 0, away: 0 });
  const moved = away ? `, ${bytesText(away)} are offloaded` : "";
  byId("graph-words").textContent = visible(`Forward runs down the left through ${outer.join("; ")}. Backward runs up the right through the same modules. ${bytesText(here)} are saved for backward${moved}.`);
  const recomputes = lanes[RECOMPUTE_LANE].used ? ", recomputed between them" : "";
  byId("program-words").textContent = `forward down the left, backward up the right${recomputes}; bands are what is saved for backward`;
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
  if (budget) budget.draw(true);
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
  startFigures();
  startPasses();
  startWords();
  startDiffs();
  startActivations();
  startBuild();
  startCharts();
  graph = new Graph(byId("graph"));
  startSnapshots();
  startTools();
  startSearch();
  startBudget();
  showSnapshot(data.first_shown);
  describePicture();
  graph.resize();
  graph.fit();
  repaint();
  document.addEventListener("keydown", keys);
  new ResizeObserver(() => { graph.resize(); repaint(); }).observe(byId("graph"));
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
    return { x: box.left + (-metrics.labels + band.depth * INSET + 4 - x) * scale, y: top, kind: band.kind, open: band.item.open };
  },
  selected: () => (graph.selected === null ? null : text(records.name[graph.selected])),
  hovered: () => (graph.hovered === null ? null : text(records.name[graph.hovered])),
  changes: () => Object.fromEntries([CREATED, ERASED, MOVED, REWIRED].map((kind) => [
    CHANGE_NAMES[kind], [...graph.snapshot.ids, ...graph.snapshot.ghosts].filter((id) => graph.snapshot.changeOf(id) === kind).map((id) => text(records.name[id])),
  ])),
  ribbons: () => graph.wiring.ribbons.map(({ from, to, bytes, width, kind }) => ({
    from: graph.bands.list[from].item.path, to: graph.bands.list[to].item.path, bytes, width, kind,
  })),
  flows: () => graph.wiring.flows.length,
  plan: () => (budget ? { place: budget.place, shown: graph.place } : null),
  choosePlan: (place) => budget.choose(place),
  current: () => (graph.current === null ? null : graph.bands.list[graph.current].item.label),
  bands: () => graph.bands.list.map((band) => [band.item.label, band.kind]),
  draw: () => graph.draw(),
  pan: (dx, dy) => graph.pan(dx, dy),
};

start();
