// The memory timelines: bytes alive at each op, stacked by category; selecting a moment says what is alive there.

const CATEGORY_STYLES = {
  "parameters": ["#6e7781", ""], "buffers": ["#8c959f", "cross"], "optimizer state": ["#afb8c1", "rise"],
  "pass state": ["#9467bd", "fall"], "inputs": ["#c8ced4", "dots"], "gradients": ["#d55e00", "rise"],
  "activations": ["#56b4e9", ""], "recomputed": ["#009e73", "dots"], "backward": ["#e69f00", "fall"],
  "in flight": ["#cc79a7", "flat"], "update": ["#0072b2", "upright"], "temporaries": ["#f0e442", "cross"],
};

const HATCHES = {
  rise: [[0, 6, 6, 0], [-1, 1, 1, -1], [5, 7, 7, 5]], fall: [[0, 0, 6, 6], [-1, 5, 1, 7], [5, -1, 7, 1]],
  flat: [[0, 3, 6, 3]], upright: [[3, 0, 3, 6]], cross: [[0, 0, 6, 6], [0, 6, 6, 0]], dots: [[2, 3, 4, 3]],
};

const MARGIN = { left: 66, right: 8, top: 14, bottom: 24 };

/** Fill the current path with a category's colour, and the hatch that tells it apart without one. */
function fillCategory(context, category) {
  const [colour, hatch] = CATEGORY_STYLES[category] || ["#7f7f7f", "cross"];
  context.fillStyle = colour;
  context.fill();
  if (!hatch) return;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = "rgb(255 255 255 / 60%)";
  for (const [x, y, toX, toY] of HATCHES[hatch]) {
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(toX, toY);
    pen.stroke();
  }
  context.fillStyle = context.createPattern(tile, "repeat");
  context.fill();
}

/** One program's bytes: totals at each op, by category, and what is alive when. */
class Timeline {
  constructor(name, given) {
    this.name = name;
    this.snapshot = name === "before" ? data.before : data.after;
    this.given = given;
    this.size = given.calls.length;
    this.series = this.count();
    this.total = new Float64Array(this.size);
    for (const values of this.series) values.forEach((value, i) => { this.total[i] += value; });
    this.selected = given.peak_at;
  }

  /** Bytes of each category at each op. */
  count() {
    const { storages, temporaries, categories } = this.given;
    const change = categories.map(() => new Float64Array(this.size + 1));
    storages.bytes.forEach((bytes, i) => {
      const from = Math.max(storages.first[i], 0), to = Math.min(storages.last[i] + 1, this.size);
      if (to <= from) return;
      change[storages.category[i]][from] += bytes;
      change[storages.category[i]][to] -= bytes;
    });
    const series = change.map((values) => {
      const summed = new Float64Array(this.size);
      let alive = 0;
      for (let i = 0; i < this.size; i++) summed[i] = (alive += values[i]);
      return summed;
    });
    const own = series[categories.indexOf("temporaries")];
    for (const [position, bytes] of temporaries) own[position] += bytes;
    return series;
  }

  /** What is alive while an op runs, largest first: name, bytes, category and record. */
  alive(position) {
    const { storages, temporaries, categories, calls } = this.given;
    const found = [];
    for (let i = 0; i < storages.bytes.length; i++) {
      if (storages.first[i] <= position && position <= storages.last[i]) {
        const category = categories[storages.category[i]];
        found.push({ name: text(storages.name[i]), bytes: storages.bytes[i], category, record: storages.record[i], source: records.source[storages.owner[i]] });
      }
    }
    const own = temporaries.find((pair) => pair[0] === position);
    if (own) {
      const id = calls[position];
      found.push({ name: `${text(records.name[id])} (inside the op)`, bytes: own[1], category: "temporaries", record: id, source: records.source[id] });
    }
    return found.sort((one, other) => other.bytes - one.bytes);
  }

  /** Bytes by category while an op runs, in the order of the chart. */
  categoriesAt(position) {
    return this.given.categories
      .map((name, i) => ({ name, bytes: this.series[i][position] || 0 }))
      .filter((category) => category.bytes > 0);
  }
}

const timelines = Object.entries(data.timelines).map(([name, given]) => new Timeline(name, given));
let activeTimeline = timelines[timelines.length - 1];
let listed = 10;  // how many of the tensors alive are listed

/** For each pixel of a chart, the op that it stands for: the one with the most bytes of those that fall on it. */
function callsOfPixels(timeline, width) {
  const calls = new Int32Array(width);
  for (let x = 0; x < width; x++) {
    const from = Math.floor((x * timeline.size) / width);
    const to = Math.max(from + 1, Math.floor(((x + 1) * timeline.size) / width));
    let best = from;
    for (let i = from; i < to; i++) if (timeline.total[i] > timeline.total[best]) best = i;
    calls[x] = best;
  }
  return calls;
}

/** Round numbers of bytes between two. */
function ticks(low, high) {
  const rough = (high - low) / 4;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
  return found;
}

class Chart {
  constructor(timeline) {
    this.timeline = timeline;
    this.caption = element("figcaption");
    this.canvas = element("canvas", { tabindex: "0", role: "application" });
    this.figure = element("figure", { id: `chart-${timeline.name}` }, this.caption, this.canvas);
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointermove", (event) => { if (event.buttons & 1) this.point(event); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.describe();
  }

  describe() {
    const { given, name } = this.timeline;
    const title = timelines.length === 1 ? "Bytes" : name === "before" ? "Baseline: without passes" : "With passes";
    const parts = [element("b", {}, title), ` peak ${bytesText(given.peak_bytes)} `, element("span", { class: "tag" }, "predicted")];
    parts.push(`, ${bytesText(given.resident_bytes)} of it `, term("persistent"));
    if (given.measured_bytes !== null) {
      const predicted = given.peak_bytes - given.resident_bytes;
      parts.push(`; above persistent memory ${bytesText(predicted)} `, element("span", { class: "tag" }, "predicted"));
      parts.push(`, ${bytesText(given.measured_bytes)} `, element("span", { class: "tag" }, "measured"));
    }
    replaceChildren(this.caption, ...parts);
    this.canvas.setAttribute("aria-label", `${title}: bytes over ${plural(this.timeline.size, "op")}, peak ${bytesText(given.peak_bytes)}, predicted`);
  }

  /** The range of the axis, the same for all charts. */
  get range() {
    const low = byId("crop").checked ? Math.min(...timelines.map((t) => t.given.resident_bytes)) : 0;
    const high = Math.max(...timelines.map((t) => t.given.peak_bytes));
    return [low, high > low ? high : low + 1];
  }

  draw() {
    const { context, width, height } = prepareCanvas(this.canvas);
    this.plot = { x: MARGIN.left, y: MARGIN.top, width: Math.max(width - MARGIN.left - MARGIN.right, 10), height: height - MARGIN.top - MARGIN.bottom };
    const [low, high] = this.range;
    this.level = (bytes) => this.plot.y + this.plot.height * (1 - (Math.max(bytes, low) - low) / (high - low));
    this.axis(context, low, high);
    if (this.timeline.size) {
      this.areas(context);
      this.sections(context);
      this.marks(context);
    }
  }

  axis(context, low, high) {
    context.font = `11px ${ink.sans}`;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const at of ticks(low, high)) {
      const y = Math.round(this.level(at)) + 0.5;
      context.fillStyle = ink.dim;
      context.fillText(bytesText(at), this.plot.x - 6, y);
      context.strokeStyle = ink.line;
      context.beginPath();
      context.moveTo(this.plot.x, y);
      context.lineTo(this.plot.x + this.plot.width, y);
      context.stroke();
    }
  }

  areas(context) {
    const { plot, timeline } = this;
    const width = Math.round(plot.width);
    const calls = callsOfPixels(timeline, width);
    const base = new Float64Array(width);
    timeline.series.forEach((values, i) => {
      if (!values.some((value) => value > 0)) return;
      context.beginPath();
      for (let x = width - 1; x >= 0; x--) this.step(context, x, base[x], true);
      for (let x = 0; x < width; x++) this.step(context, x, (base[x] += values[calls[x]]), false);
      context.closePath();
      fillCategory(context, timeline.given.categories[i]);
      context.strokeStyle = ink.paper;
      context.lineWidth = 0.6;
      context.stroke();
      context.lineWidth = 1;
    });
  }

  step(context, x, bytes, backwards) {
    const y = this.level(bytes), left = this.plot.x + x;
    context.lineTo(backwards ? left + 1 : left, y);
    context.lineTo(backwards ? left : left + 1, y);
  }

  sections(context) {
    const { plot, timeline } = this;
    context.textAlign = "left";
    context.textBaseline = "top";
    let free = 0;
    for (const [start, name] of timeline.given.sections) {
      const x = Math.round(plot.x + (start / timeline.size) * plot.width) + 0.5;
      context.strokeStyle = ink.dim;
      context.beginPath();
      context.moveTo(x, plot.y);
      context.lineTo(x, plot.y + plot.height + 6);
      context.stroke();
      const at = Math.max(Math.min(x + 3, plot.x + plot.width - context.measureText(name).width), free);
      context.fillStyle = ink.dim;
      context.fillText(name, at, plot.y + plot.height + 8);
      free = at + context.measureText(name).width + 8;
    }
  }

  /** The peak, and the selected moment. */
  marks(context) {
    const { plot, timeline } = this;
    const at = (position) => plot.x + ((position + 0.5) / timeline.size) * plot.width;
    const x = at(timeline.given.peak_at), y = this.level(timeline.given.peak_bytes);
    context.fillStyle = ink.ink;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - 5, y - 9);
    context.lineTo(x + 5, y - 9);
    context.fill();
    if (timeline !== activeTimeline || timeline.selected < 0) return;
    const line = Math.round(at(timeline.selected)) + 0.5;
    context.strokeStyle = ink.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(line, plot.y - 4);
    context.lineTo(line, plot.y + plot.height + 4);
    context.stroke();
    context.lineWidth = 1;
  }

  point(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left - this.plot.x;
    const width = Math.round(this.plot.width);
    const calls = callsOfPixels(this.timeline, width);
    if (this.timeline.size) selectMoment(this.timeline, calls[Math.min(Math.max(Math.floor(x), 0), width - 1)]);
  }

  key(event) {
    const { timeline } = this;
    const far = event.shiftKey ? 10 : 1;
    const now = timeline.selected;
    const goals = { ArrowLeft: now - far, ArrowRight: now + far, Home: 0, End: timeline.size - 1, p: timeline.given.peak_at };
    if (!(event.key in goals) || event.ctrlKey || event.metaKey || event.altKey || !timeline.size) return;
    event.preventDefault();
    selectMoment(timeline, Math.min(Math.max(goals[event.key], 0), timeline.size - 1));
  }
}

const charts = timelines.map((timeline) => new Chart(timeline));
const drawCharts = () => charts.forEach((chart) => chart.draw());

function selectMoment(timeline, position) {
  activeTimeline = timeline;
  timeline.selected = position;
  showMoment(timeline, position);
  drawCharts();
}

function swatch(category) {
  const canvas = element("canvas", { class: "swatch", width: 14, height: 14 });
  const context = canvas.getContext("2d");
  context.rect(0, 0, 14, 14);
  fillCategory(context, category);
  return canvas;
}

/** Say what is alive at a moment: by category, and one by one. */
function showMoment(timeline, position) {
  if (!timeline.size) {
    replaceChildren(byId("moment-head"), `No ops; ${bytesText(timeline.given.resident_bytes)} are persistent.`);
    return;
  }
  const call = timeline.given.calls[position];
  const where = timelines.length === 1 ? "" : timeline.name === "before" ? "Baseline: " : "With passes: ";
  const peak = position === timeline.given.peak_at ? ", the peak" : "";
  replaceChildren(
    byId("moment-head"), `${where}op ${countText(position + 1)} of ${countText(timeline.size)}, in ${data.phases[records.phase[call]]}: `,
    link(nameOf(call), () => showRecord(timeline.snapshot, call), { class: "link code" }),
    ` · ${bytesText(timeline.total[position])} alive${peak} `, element("span", { class: "tag" }, "predicted"),
  );
  showCategories(timeline, position);
  showAlive(timeline, position);
}

function showCategories(timeline, position) {
  const found = timeline.categoriesAt(position);
  const total = timeline.total[position];
  const rows = [...found].reverse().map(({ name, bytes }) => row(
    [element("span", {}, swatch(name), name), bytesText(bytes), `${oneDecimal((100 * bytes) / total)} %`], ["", "number", "number"],
  ));
  replaceChildren(
    byId("moment-categories"), element("thead", {}, row(["category", "bytes", "share"], ["", "number", "number"], "th")),
    element("tbody", {}, rows), element("tfoot", {}, row(["alive, predicted", bytesText(total), ""], ["", "number", "number"])),
  );
}

function showAlive(timeline, position) {
  const found = timeline.alive(position);
  const kinds = ["name", "number", "", ""];
  const rows = found.slice(0, listed).map((item) => row([
    link(item.name, () => showRecord(timeline.snapshot, item.record, item.category === "temporaries" ? null : item.name), { title: brief(item.name, 300) }),
    bytesText(item.bytes), item.category, shortSource(text(item.source)),
  ], kinds));
  if (found.length > listed) {
    const rest = found.slice(listed).reduce((sum, item) => sum + item.bytes, 0);
    const more = link(`and ${countText(found.length - listed)} more`, () => {
      listed = Infinity;
      showMoment(timeline, position);
    });
    rows.push(row([more, bytesText(rest), "", ""], kinds));
  }
  replaceChildren(
    byId("moment-alive"), element("thead", {}, row(["alive at this moment", "bytes", "category", "source"], kinds.map((k) => (k === "name" ? "" : k)), "th")),
    element("tbody", {}, rows),
  );
  labelCells(byId("moment-alive"));
}

function startCharts() {
  replaceChildren(byId("charts"), charts.map((chart) => chart.figure));
  byId("crop").addEventListener("change", drawCharts);
  showMoment(activeTimeline, activeTimeline.selected);
}
