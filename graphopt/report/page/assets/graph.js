// The picture: camera, what is pointed at and selected, and how it answers to pointer and keys.

const SMALLEST = 0.004, LARGEST = 3;

class Graph {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.pen = new Pen(this.context);
    this.camera = { x: -metrics.labels - 16, y: -24, scale: 1 };
    this.selected = null;
    this.hovered = null;
    this.matches = new Set();
    this.pointers = new Map();
    this.snapshot = snapshotAt(data.first_shown);
    this.place = null;
    this.current = null;
    this.measure = "bytes";
    this.views = false;
    openAtFirst();
    this.bands = new Bands(this.snapshot.stage, this.views);
    this.listen();
  }

  /** The edges of what is shown, found when they are first drawn after a change. */
  get wiring() {
    if (!this._wiring) {
      const values = this.place === null ? valuesOf(this.snapshot) : valuesOfPlan(this.place);
      const base = snapshotAt(data.before);
      if (!this.ribbonScale && base.stage === this.snapshot.stage) this.ribbonScale = new Wiring(this.bands, base, valuesOf(base)).scale;
      this._wiring = new Wiring(this.bands, this.snapshot, values, this.ribbonScale, this.same);
      this.same = this._wiring;
    }
    return this._wiring;
  }

  /** The most that any box has of what bars show. */
  largest() {
    if (!this._largest) {
      const { of } = MEASURES[this.measure];
      const drawn = this.bands.list.filter((band) => band.kind === "closed");
      this._largest = Math.max(1e-12, ...drawn.flatMap((band) => summarise(this.snapshot, ...rowsOf(band.item)).map(of)));
    }
    return this._largest;
  }

  /** Forget what was found for the rows, the snapshot or the plan of before. */
  changed(rows = true) {
    this._wiring = this._largest = this.same = null;
    if (rows) this.ribbonScale = 0;
    this.redraw();
  }

  /** Show what a plan of the frontier would do, on the program that it was found for; null for programs as they are. */
  showPlan(place) {
    this.place = place;
    if (place !== null && this.snapshot.index !== frontier.snapshot) this.show(frontier.snapshot);
    this._wiring = null;
    this.redraw();
  }

  showViews(views) {
    this.views = views;
    this.rearranged(() => this.bands.showViews(views));
  }

  // --- what is shown ------------------------------------------------------------------------------------------------

  /** Show another snapshot. Within a stage nothing moves; between stages the row at the top stays at the top. */
  show(index) {
    const next = snapshotAt(index);
    const selected = this.selected === null ? undefined : next.counterpart(this.selected);
    if (next.stage !== this.bands.stage) this.rearranged(() => { this.bands = new Bands(next.stage, this.views); });
    this.snapshot = next;
    this.selected = selected === undefined ? null : selected;
    this.hovered = null;
    if (this.place !== null && index !== frontier.snapshot) this.place = null;
    this.changed(false);
  }

  /** Change the heights of rows; the row at the top of the view stays there. */
  rearranged(change) {
    const top = this.bands.list[this.bands.at(this.camera.y)];
    const offset = top ? this.camera.y - top.y : 0;
    change();
    this.bands.arrange();
    const same = top && this.bands.list.find((band) => band.item === top.item);
    if (same && this.camera.y > 0) this.camera.y = same.y + offset;
    this.current = null;
    this.grow();
    this.clamp();
    this.changed();
  }

  toggle(band, onBadge) {
    const { item } = band;
    this.rearranged(() => {
      if (onBadge && item.open) item.all = !item.all;
      else item.open = !item.open;
    });
  }

  /** Bring a record into view, opening what is around it, and select it. */
  reveal(id) {
    if (!isInput(id)) {
      if (records.view[id] && !this.views) this.showHidden();
      this.rearranged(() => openRow(records.row[id]));
      const place = this.bands.place(id);
      if (place) this.center(place);
    }
    this.select(id);
  }

  center({ x, y, width, height }) {
    const view = this.size();
    if (this.camera.scale * 11 < READABLE) this.camera.scale = 0.75;
    const { scale } = this.camera;
    this.camera.y = y + height / 2 - view.height / scale / 2;
    const left = this.camera.x, right = left + view.width / scale;
    if (x < left || x + width > right) this.camera.x = x + width / 2 - view.width / scale / 2;
    this.clamp();
  }

  select(id) {
    this.selected = id;
    this.current = null;
    showDetails(this.snapshot, id);
    this.redraw();
  }

  /** Show views as well, because one of them is wanted. */
  showHidden() {
    byId("views").checked = true;
    this.showViews(true);
  }

  // --- camera -------------------------------------------------------------------------------------------------------

  size() {
    return { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
  }

  /** Be as high as what is drawn, within what the style allows; higher than before only, unless it is fitted anew. */
  grow(anew = false) {
    const wanted = Math.ceil((this.bands.height + 70) * this.camera.scale);
    const now = anew ? 0 : Number.parseFloat(this.canvas.style.height) || 0;
    if (wanted > now) this.canvas.style.height = `${wanted}px`;
  }

  /** Take the measures of a wide or a narrow canvas. */
  resize() {
    const before = metrics;
    measureLanes(this.size().width);
    if (metrics === before) return;
    this.rearranged(() => {});
    this.fit();
  }

  fit() {
    const { width } = this.size();
    const whole = worldRight + metrics.labels + 24;
    this.camera.scale = Math.min(Math.max(width / whole, 0.62), 1.1);
    this.camera.x = -metrics.labels - 14;
    this.grow(true);
    this.clamp();
    this.redraw();
  }

  /** Keep some of the picture in view. */
  clamp() {
    const { width, height } = this.size();
    const { camera } = this;
    const margin = 60 / camera.scale;
    camera.y = Math.min(Math.max(camera.y, -24 - margin), Math.max(this.bands.height + margin - height / camera.scale, -24));
    camera.x = Math.min(Math.max(camera.x, -metrics.labels - 16 - width / camera.scale / 2), worldRight - margin);
  }

  pan(dx, dy) {
    this.camera.x -= dx / this.camera.scale;
    this.camera.y -= dy / this.camera.scale;
    this.clamp();
    this.redraw();
  }

  zoom(factor, x = this.size().width / 2, y = this.size().height / 2) {
    const { camera } = this;
    const scale = Math.min(Math.max(camera.scale * factor, SMALLEST), LARGEST);
    camera.x += x / camera.scale - x / scale;
    camera.y += y / camera.scale - y / scale;
    camera.scale = scale;
    this.clamp();
    this.redraw();
  }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
    });
  }

  draw() {
    const { context, width, height } = prepareCanvas(this.canvas);
    new Painter(this, context, width, height).draw();
  }

  // --- pointing -----------------------------------------------------------------------------------------------------

  /** Where a point of the canvas is in the picture. */
  world(x, y) {
    return { x: this.camera.x + x / this.camera.scale, y: this.camera.y + y / this.camera.scale };
  }

  /** What is at a point of the canvas: a band, and a record or a column where there is one. */
  hit(clientX, clientY) {
    const box = this.canvas.getBoundingClientRect();
    const { x, y } = this.world(clientX - box.left, clientY - box.top);
    if (y < 0 || y >= this.bands.height) return null;
    const band = this.bands.list[this.bands.at(y)];
    if (y >= band.y + band.height) return null;
    const onBadge = Boolean(band.badge && x >= band.badge.x && x < band.badge.x + band.badge.width);
    const lane = lanes.findIndex((one) => one.used && x >= one.x && x < one.x + one.width);
    const id = lane >= 0 && band.kind === "calls" ? this.callAt(band, lane, x, y) : undefined;
    return { band, lane, id, onBadge, label: x < 0 };
  }

  callAt(band, lane, x, y) {
    const per = metrics.perLine[lane];
    const cell = Math.min(per - 1, Math.floor((x - lanes[lane].x) / (lanes[lane].width / per)));
    const slot = Math.floor((y - band.y - PAD) / PITCH) * per + cell;
    const here = this.snapshot.rows[band.item.first].filter((id) => records.lane[id] === lane && this.bands.slotOf(id) === slot);
    return here.find((id) => !this.snapshot.isGhost(id)) ?? here[0];
  }

  /** Say what is pointed at, and mark its neighbours. */
  hover(event) {
    const found = this.hit(event.clientX, event.clientY);
    const id = found && found.id !== undefined ? found.id : null;
    this.canvas.classList.toggle("over", Boolean(found && (found.id !== undefined || found.label || found.band.kind !== "calls")));
    byId("hovered").textContent = found ? this.tell(found) : "";
    if (id !== this.hovered) {
      this.hovered = id;
      this.redraw();
    }
  }

  tell({ band, lane, id }) {
    if (id !== undefined) {
      const change = CHANGE_NAMES[this.snapshot.changeOf(id)];
      const size = records.bytes[id] ? `, ${bytesText(records.bytes[id])}` : "";
      return brief(`${nameOf(id)}: ${text(records.op[id])} ${text(records.type[id])}${size}${change ? ` (${change})` : ""}`, 400);
    }
    const { item } = band;
    const where = brief(item.path || item.label, 200);
    const boxes = summarise(this.snapshot, ...rowsOf(item)).filter((box) => lane < 0 || box.lane === lane);
    const parts = boxes.map((box) => `${data.phases[box.phase]}: ${plural(box.calls, "op")}${changesText(box) ? ` (${changesText(box)})` : ""}`);
    const { here } = this.wiring.keptBy(this.bands.list.indexOf(band));
    return `${where}${item.kind === "group" ? `, ×${item.copies}, each` : ""}: ${parts.join(", ")}${here ? `; keeps ${bytesText(here)} for backward (predicted)` : ""}`;
  }

  click(event) {
    const found = this.hit(event.clientX, event.clientY);
    if (!found) return;
    if (found.id !== undefined) this.select(found.id);
    else if (found.label || found.onBadge || found.band.kind !== "calls") this.toggle(found.band, found.onBadge);
  }

  // --- events -------------------------------------------------------------------------------------------------------

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => {
      byId("hovered").textContent = "";
      this.hovered = null;
      this.redraw();
    });
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => this.redraw());
  }

  down(event) {
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.travelled = this.pointers.size > 1 ? Infinity : 0;
  }

  move(event) {
    const last = this.pointers.get(event.pointerId);
    if (!last) {
      this.hover(event);
      return;
    }
    const now = { x: event.clientX, y: event.clientY };
    if (this.pointers.size === 2) this.pinch(event.pointerId, now);
    else this.drag(now.x - last.x, now.y - last.y);
    this.pointers.set(event.pointerId, now);
  }

  drag(dx, dy) {
    this.travelled += Math.abs(dx) + Math.abs(dy);
    if (this.travelled > 4) {
      this.canvas.classList.add("dragging");
      this.pan(dx, dy);
    }
  }

  pinch(moved, now) {
    const [other] = [...this.pointers].filter(([id]) => id !== moved).map(([, point]) => point);
    const last = this.pointers.get(moved);
    const distance = (one) => Math.hypot(one.x - other.x, one.y - other.y) || 1;
    const box = this.canvas.getBoundingClientRect();
    this.zoom(distance(now) / distance(last), (now.x + other.x) / 2 - box.left, (now.y + other.y) / 2 - box.top);
    this.pan((now.x - last.x) / 2, (now.y - last.y) / 2);
  }

  up(event) {
    const known = this.pointers.delete(event.pointerId);
    this.canvas.classList.remove("dragging");
    if (known && event.type === "pointerup" && this.travelled <= 4) this.click(event);
  }

  /** The wheel scrolls the page, until the picture is clicked or reached by Tab; with Ctrl it zooms. */
  wheel(event) {
    const box = this.canvas.getBoundingClientRect();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY * unit * 0.0025), event.clientX - box.left, event.clientY - box.top);
    else if (document.activeElement === this.canvas) this.pan(-event.deltaX * unit, -event.deltaY * unit);
    else return;
    event.preventDefault();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowUp: [0, 80], ArrowDown: [0, -80], ArrowLeft: [80, 0], ArrowRight: [-80, 0] };
    const actions = {
      ArrowUp: () => this.step(-1), ArrowDown: () => this.step(1), ArrowLeft: () => this.unfold(false), ArrowRight: () => this.unfold(true),
      PageUp: () => this.pan(0, this.size().height * 0.9), PageDown: () => this.pan(0, -this.size().height * 0.9),
      Home: () => this.pan(0, 1e9), End: () => this.pan(0, -1e9),
      "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(0.8), 0: () => this.fit(),
      j: () => this.neighbour(1), k: () => this.neighbour(-1), Escape: () => this.clear(),
      Enter: () => this.enter(), " ": () => this.unfold(),
    };
    const action = event.shiftKey && event.key in moves ? () => this.pan(...moves[event.key]) : actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  /** Make another row the current one, and bring it into view. */
  step(by) {
    const { list } = this.bands;
    if (!list.length) return;
    const start = this.current === null ? this.bands.at(Math.max(this.camera.y, 0)) - (by > 0 ? 1 : 0) : this.current;
    this.current = Math.min(Math.max(start + by, 0), list.length - 1);
    this.keepInView(list[this.current]);
    this.tellCurrent();
    this.redraw();
  }

  keepInView({ y, height }) {
    const view = this.size().height / this.camera.scale, margin = Math.min(60, view / 4);
    if (y - margin < this.camera.y) this.camera.y = y - margin;
    else if (y + height + margin > this.camera.y + view) this.camera.y = y + height + margin - view;
    this.clamp();
  }

  tellCurrent() {
    const band = this.bands.list[this.current];
    const state = band.kind === "closed" ? "folded" : "open";
    byId("hovered").textContent = `${state}: ${this.tell({ band, lane: -1 })}`;
  }

  /** Open or fold the current row; without a wish, the other of what it is. */
  unfold(open) {
    const band = this.current === null ? undefined : this.bands.list[this.current];
    if (!band || band.item.open === open) return;
    this.toggle(band, false);
    this.current = Math.max(0, this.bands.list.findIndex((one) => one.item === band.item));
    this.tellCurrent();
  }

  enter() {
    if (this.selected !== null && this.current === null) byId("details").querySelector("button")?.focus();
    else this.unfold();
  }

  /** Select the next or the previous op, in the order of running. */
  neighbour(step) {
    const { ids } = this.snapshot;
    let at = this.selected === null ? (step > 0 ? -1 : ids.length) : this.snapshot.position(this.selected) ?? -1;
    do at += step; while (at >= 0 && at < ids.length && isInput(ids[at]));
    if (at >= 0 && at < ids.length) this.reveal(ids[at]);
  }

  clear() {
    this.selected = this.current = null;
    this.matches = new Set();
    showDetails(this.snapshot, null);
    this.redraw();
  }
}
