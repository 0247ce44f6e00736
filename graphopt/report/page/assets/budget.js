// The budget: the chart of all plans, the slider over them, and the table of the one that is chosen.

const FRONTIER_MARGIN = { left: 52, right: 14, top: 16, bottom: 34 };

/** Tensors whose names differ in numbers alone, and that are equally large, share a row. */
const planRows = (() => {
  if (!frontier) return [];
  const rows = new Map();
  const { name, bytes } = frontier.tensors;
  name.forEach((number, i) => {
    const pattern = text(number).replace(/_\d+/g, "_*").replace(/(^|\.)\d+(?=\.|:|$)/g, "$1*");
    const key = `${pattern} ${bytes[i]}`;
    if (!rows.has(key)) rows.set(key, { pattern, bytes: bytes[i], seconds: frontier.tensors.seconds[i], tensors: [] });
    rows.get(key).tensors.push(i);
  });
  return [...rows.values()].sort((one, other) => other.bytes * other.tensors.length - one.bytes * one.tensors.length);
})();

class Budget {
  constructor() {
    this.mostExtra = Math.max(...frontier.extra) || 1;
    this.movesAny = frontier.plans.some((codes) => codes.includes("o"));
    this.place = frontier.chosen;
    this.inView = true;
    this.canvas = byId("frontier");
    this.slider = byId("budget-slider");
    this.slider.max = frontier.peaks.length - 1;
    replaceChildren(byId("budget-ticks"), frontier.peaks.map((_, place) => element("option", { value: place })));
    this.told = [element("b"), element("b"), element("span"), element("span", { class: "tag" })];
    replaceChildren(byId("budget-figures"), this.told);
    this.table();
    this.listen();
    this.say();
  }

  listen() {
    this.slider.addEventListener("input", () => this.choose(Number(this.slider.value)));
    new IntersectionObserver((entries) => {
      this.inView = entries[entries.length - 1].isIntersecting;
      this.draw();
    }).observe(this.canvas);
    byId("budget-less").addEventListener("click", () => this.choose(this.place - 1));
    byId("budget-more").addEventListener("click", () => this.choose(this.place + 1));
    byId("budget-back").addEventListener("click", () => this.choose(frontier.chosen));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) this.point(event); });
    this.canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };
      if (!(event.key in steps)) return;
      event.preventDefault();
      this.choose(this.place + steps[event.key]);
    });
  }

  /** Show another plan, once for each frame however fast the slider moves. */
  choose(place) {
    this.place = Math.min(Math.max(place, 0), frontier.peaks.length - 1);
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      showPlan(this.place);
      this.say();
      this.draw();
    });
  }

  // --- numbers and table --------------------------------------------------------------------------------------------

  say() {
    const plan = planAt(this.place);
    const words = this.words(plan);
    if (Number(this.slider.value) !== this.place) this.slider.value = this.place;
    this.slider.setAttribute("aria-valuetext", `peak ${bytesText(plan.peak)}, ${extraText(plan.extra)} time; ${words}`);
    const kind = this.place === frontier.chosen ? "the plan that was applied" : this.place === frontier.plain ? "nothing recomputed" : "a plan, not applied";
    const told = [`peak ${bytesText(plan.peak)}`, `time ${extraText(plan.extra)}`, words, kind];
    told.forEach((value, i) => { this.told[i].textContent = value; });
    byId("budget-less").disabled = this.place === 0;
    byId("budget-more").disabled = this.place === frontier.peaks.length - 1;
    byId("budget-back").hidden = graph === undefined || graph.place === null;
    this.fill(plan);
  }

  words({ kept, again, away }) {
    const parts = [`saved ${bytesText(kept.bytes)}`, `recomputed ${bytesText(again.bytes)}`];
    if (this.movesAny) parts.push(`offloaded ${bytesText(away.bytes)}`);
    return parts.join(" · ");
  }

  table() {
    this.rows = planRows.map((one) => {
      const bars = ["k", "r", "o"].map((code) => element("span", { class: `share-${code}` }));
      const cells = { what: element("span"), bytes: element("span") };
      const name = one.tensors.length > 1 ? `${one.pattern} × ${one.tensors.length}` : text(frontier.tensors.name[one.tensors[0]]);
      const show = link(name, () => showRecord(frontier.snapshot, frontier.tensors.record[one.tensors[0]], text(frontier.tensors.name[one.tensors[0]])), { title: brief(name, 300) });
      const size = one.tensors.length > 1 ? `${one.tensors.length} × ${bytesText(one.bytes)}` : bytesText(one.bytes);
      const tr = row([show, size, element("span", { class: "share", "aria-hidden": "true" }, ...bars), cells.what, cells.bytes, secondsText(one.seconds)], ["name", "number", "", "", "number", "number"]);
      return { one, tr, bars, cells };
    });
    this.sum = element("span");
    const head = row(["tensor", "bytes", "", "in this plan", "saved", "time"], ["", "number", "", "", "number", "number"], "th");
    replaceChildren(byId("plan-table"), labelCells(element("table", {}, element("thead", {}, head), element("tbody", {}, this.rows.map(({ tr }) => tr)), element("tfoot", {}, row(["all tensors", "", "", "", this.sum, ""], ["", "number", "", "", "number", "number"])))));
  }

  fill({ codes, kept }) {
    for (const { one, tr, bars, cells } of this.rows) {
      const counts = { k: 0, r: 0, o: 0, ".": 0 };
      for (const i of one.tensors) counts[codes[i]] += 1;
      const shown = `${counts.k} ${counts.r} ${counts.o}`;
      if (tr.dataset.shown === shown) continue;
      tr.dataset.shown = shown;
      ["k", "r", "o"].forEach((code, i) => { bars[i].style.width = `${(100 * counts[code]) / one.tensors.length}%`; });
      const all = (count, word) => (count === 0 ? "" : count === one.tensors.length ? word : `${count} ${word}`);
      const words = [all(counts.k, "saved"), all(counts.r, "recomputed"), all(counts.o, "offloaded"), all(counts["."], "not needed")];
      cells.what.textContent = words.filter(Boolean).join(", ");
      cells.bytes.textContent = counts.k ? bytesText(counts.k * one.bytes) : "–";
    }
    this.sum.textContent = bytesText(kept.bytes);
  }

  // --- chart --------------------------------------------------------------------------------------------------------

  /** Where a plan is in the chart. */
  at(place) {
    const { y, height } = this.plot;
    return { x: this.across(frontier.peaks[place]), y: y + height * (1 - frontier.extra[place] / this.mostExtra) };
  }

  /** Where a number of bytes is in the chart, which reaches up to the program without passes. */
  across(bytes) {
    const [low, high] = this.range;
    return this.plot.x + (this.plot.width * (bytes - low)) / (high - low);
  }

  get range() {
    const low = frontier.peaks[0];
    return [low, Math.max(frontier.peaks[frontier.plain], baseline || 0, low + 1)];
  }

  /** A line at the peak of the program without passes, which the figures above and the first chart have, too. */
  baselineMark(context) {
    const { y, height } = this.plot;
    const x = Math.round(this.across(baseline)) + 0.5;
    context.strokeStyle = context.fillStyle = ink.dim;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x, y + height);
    context.stroke();
    context.setLineDash([]);
    context.font = `11px ${ink.sans}`;
    context.textAlign = "right";
    context.textBaseline = "top";
    context.fillText("baseline", x - 4, y);
  }

  point(event) {
    const left = this.canvas.getBoundingClientRect().left;
    const distance = (place) => Math.abs(this.at(place).x - (event.clientX - left));
    this.choose(frontier.peaks.reduce((best, _, place) => (distance(place) < distance(best) ? place : best), 0));
  }

  /** Draw the chart; while it is out of view only where `always`, since it is drawn when it comes into view. */
  draw(always = false) {
    if (!this.inView && !always) return;
    const { context, width, height } = prepareCanvas(this.canvas);
    const { left, right, top, bottom } = FRONTIER_MARGIN;
    this.plot = { x: left, y: top, width: Math.max(width - left - right, 10), height: height - top - bottom };
    this.axes(context);
    context.strokeStyle = ink.kept;
    context.lineWidth = 1.5;
    context.beginPath();
    frontier.peaks.forEach((_, place) => {
      const { x, y } = this.at(place);
      if (place) context.lineTo(x, this.at(place - 1).y);
      context[place ? "lineTo" : "moveTo"](x, y);
    });
    context.stroke();
    context.fillStyle = ink.kept;
    frontier.peaks.forEach((_, place) => this.dot(context, place, 2.4));
    this.named(context, frontier.chosen, "applied");
    if (baseline === null) this.named(context, frontier.plain, "nothing recomputed");
    else this.baselineMark(context);
    context.fillStyle = context.strokeStyle = ink.ink;
    this.dot(context, this.place, 6);
    const { x, y } = this.at(this.place);
    context.setLineDash([2, 3]);
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x, this.plot.y + this.plot.height);
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  dot(context, place, radius) {
    const { x, y } = this.at(place);
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    context.fill();
  }

  named(context, place, label) {
    const { x, y } = this.at(place);
    context.strokeStyle = ink.ink;
    context.beginPath();
    context.arc(x, y, 6, 0, 2 * Math.PI);
    context.stroke();
    context.fillStyle = ink.ink;
    context.font = `11px ${ink.sans}`;
    context.textBaseline = "bottom";
    const room = context.measureText(label).width;
    context.textAlign = "left";
    context.fillText(label, Math.min(x - 4, this.plot.x + this.plot.width + 8 - room), y - 9);
  }

  axes(context) {
    const { x, y, width, height } = this.plot;
    context.font = `11px ${ink.sans}`;
    context.fillStyle = ink.dim;
    context.strokeStyle = ink.line;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      const level = Math.round(y + height * (1 - share)) + 0.5;
      context.fillText(extraText(this.mostExtra * share), x - 6, level);
      context.beginPath();
      context.moveTo(x, level);
      context.lineTo(x + width, level);
      context.stroke();
    }
    context.textBaseline = "top";
    const [low, high] = this.range;
    [[low, "left"], [(low + high) / 2, "center"], [high, "right"]].forEach(([bytes, align]) => {
      context.textAlign = align;
      context.fillText(bytesText(bytes), x + (width * (bytes - low)) / Math.max(high - low, 1), y + height + 6);
    });
    context.textAlign = "center";
    context.fillText("peak", x + width / 2, y + height + 20);
  }
}

let budget = null;

/** Show a plan in the picture; the plan that was applied is shown as the program that came of it. */
function showPlan(place) {
  const before = graph.snapshot.index, planned = graph.place !== null;
  graph.showPlan(place === frontier.chosen ? null : place);
  if (place === frontier.chosen) showSnapshot(data.first_shown);
  else if (!planned || graph.snapshot.index !== before) tellSnapshot();
}

function startBudget() {
  for (const id of ["budget", "budget-bar", "budget-link", "by-seconds"]) byId(id).hidden = !frontier;
  if (!frontier) return;
  replaceChildren(byId("frontier-caption"), `${countText(frontier.peaks.length)} plans: `, term("peak"), " across, extra time up, estimated from ", timeSource());
  byId("frontier").setAttribute("aria-label", `Peak and extra time of ${frontier.peaks.length} plans, from ${bytesText(frontier.peaks[0])} at ${extraText(frontier.extra[0])} to ${bytesText(frontier.peaks[frontier.plain])} at no extra time; the slider below steps through them`);
  budget = new Budget();
}
