// Drawing the visible part of the picture. What is small is drawn as plain rectangles, all of one colour at once.

const READABLE = 6.2;
const VERBOSE = /^_*(native_)?|_for_cpu|_legit(_functional)?|_with_indices/g;
const PHASE = Object.fromEntries(data.phases.map((phase, i) => [phase, i]));

/** What is left of an op's name in a small box. */
const opLabel = (number) => text(number).replace("scaled_dot_product", "sdp").replace(VERBOSE, "") || text(number);

/** A shape for each phase, so that phases are told apart without colour. The path is left to be filled or stroked. */
function markPath(context, phase, x, y, r) {
  const shapes = {
    forward: [[-1, -0.8], [1, -0.8], [0, 1]],
    backward: [[-1, 0.8], [1, 0.8], [0, -1]],
    transfer: [[0, -1.1], [1.1, 0], [0, 1.1], [-1.1, 0]],
    sync: [[-1, -1], [1, 1], [0, 0], [1, -1], [-1, 1], [0, 0]],
    update: [[-0.85, -0.85], [0.85, -0.85], [0.85, 0.85], [-0.85, 0.85]],
  };
  context.beginPath();
  const corners = shapes[data.phases[phase]];
  if (corners) {
    corners.forEach(([dx, dy], i) => context[i ? "lineTo" : "moveTo"](x + dx * r, y + dy * r));
    context.closePath();
  } else {
    context.arc(x, y, r, 0, 2 * Math.PI);
    context.moveTo(x + r * 0.45, y);
    context.arc(x, y, r * 0.45, 0, 2 * Math.PI, true);
  }
}

function drawMark(context, phase, x, y, r) {
  markPath(context, phase, x, y, r);
  context.fillStyle = ink.phase[phase];
  context.fill();
  if (phase === PHASE.sync) {
    context.strokeStyle = ink.phase[phase];
    context.lineWidth = 1.6;
    context.stroke();
    context.lineWidth = 1;
  }
}

/** Draws text in the monospaced font, cut to a width; `end` keeps the end rather than the start. */
class Pen {
  constructor(context) {
    this.context = context;
    this.sizes = new Map();
  }

  use(size, weight = "") {
    this.context.font = `${weight} ${size}px ${ink.mono}`;
    if (!this.sizes.has(size)) this.sizes.set(size, this.context.measureText("0").width);
    this.advance = this.sizes.get(size);
  }

  /** The largest size up to `most` at which a text is not wider than `width`; at least `least`, at which it may be. */
  fitting(value, width, most, least) {
    this.use(most);
    return Math.max(least, Math.min(most, (most * width) / (this.advance * Math.max(value.length, 1))));
  }

  write(value, x, y, width, end = false) {
    const room = Math.floor(width / this.advance);
    if (room < 2) return 0;
    let shown = value.length > 400 ? (end ? value.slice(-400) : value.slice(0, 400)) : value;
    shown = visible(shown);
    if (shown.length > room) shown = end ? `…${shown.slice(-room + 1)}` : `${shown.slice(0, room - 1)}…`;
    this.context.fillText(shown, x, y, width);
    return shown.length * this.advance;
  }
}

class Painter {
  constructor(graph, context, width, height) {
    Object.assign(this, { graph, context, width, height });
    this.scale = graph.camera.scale;
    this.snapshot = graph.snapshot;
    this.bands = graph.bands;
    this.pen = graph.pen;
    this.pen.context = context;
    this.text = this.scale * 11 >= READABLE;
    this.faded = this.snapshot.changed && byId("pale").checked;
    this.measure = MEASURES[graph.measure];
    this.wires = new WirePainter(this, graph.wiring);
    this.batches = new Map();
  }

  draw() {
    const { context, graph } = this;
    const { x, y } = graph.camera;
    context.save();
    context.scale(this.scale, this.scale);
    context.translate(-x, -y);
    this.top = y;
    this.bottom = y + this.height / this.scale;
    context.textBaseline = "middle";
    context.textAlign = "left";
    this.frames();
    this.wires.ribbons();
    this.wires.flows();
    this.edges();
    for (const band of this.bands.list.slice(this.bands.at(this.top), this.bands.at(this.bottom) + 1)) this.band(band);
    this.flush();
    if (this.text) this.wires.sizes();
    if (graph.place !== null) this.detours();
    this.laneNames();
    this.current();
    this.neighbours();
    context.restore();
  }

  laneNames() {
    if (!this.text) return;
    this.pen.use(11);
    this.context.fillStyle = ink.dim;
    for (const lane of lanes.filter((one) => one.used)) {
      const arrow = lane.label.startsWith("backward") ? "↑" : "↓";
      this.pen.write(`${lane.label.split(" ").pop()} ${arrow}`, lane.x + 2, -10, lane.width + metrics.laneGap);
    }
  }

  frames() {
    const { context } = this;
    for (const frame of [...this.bands.frames].reverse()) {
      if (frame.y > this.bottom || frame.y + frame.height < this.top) continue;
      const inset = Math.min(frame.depth, 6) * 6;
      context.beginPath();
      context.roundRect(-metrics.labels - 8 + inset, frame.y, worldRight + metrics.labels + 12 - 2 * inset, frame.height, 6);
      context.fillStyle = frame.depth % 2 ? ink.paper : ink.frame;
      context.fill();
      context.strokeStyle = ink["frame-line"];
      context.lineWidth = 1 / Math.max(this.scale, 0.3);
      context.stroke();
      context.lineWidth = 1;
    }
  }

  band(band) {
    if (this.text && (!metrics.inside || band.kind === "head")) this.label(band);
    if (band.kind === "head") return;
    if (band.kind === "calls") {
      for (const id of this.snapshot.rows[band.item.first]) this.call(id, band);
    } else {
      this.closed(band);
    }
  }

  // --- labels -----------------------------------------------------------------------------------------------------

  label(band) {
    const { context, pen } = this;
    const { item } = band;
    const x = -metrics.labels + band.depth * INSET;
    const y = band.y + (band.kind === "calls" ? PAD + PILL / 2 : band.height / 2);
    this.triangle(x + 4, y, item.open);
    pen.use(11, band.kind === "head" ? "bold" : "");
    context.fillStyle = ink.ink;
    const badge = item.kind === "group" ? `×${item.copies}` : "";
    const wide = band.kind === "head" ? metrics.labels + 200 : metrics.labels - 12;
    const room = wide - band.depth * INSET - (badge.length + 2) * 7 - 14;
    const taken = pen.write(item.label, x + 14, y, room, true);
    if (badge) this.badge(band, badge, x + 14 + taken + 8, y);
  }

  triangle(x, y, open) {
    const { context } = this;
    context.beginPath();
    const corners = open ? [[-4, -2.5], [4, -2.5], [0, 4]] : [[-2.5, -4], [-2.5, 4], [4, 0]];
    corners.forEach(([dx, dy], i) => context[i ? "lineTo" : "moveTo"](x + dx, y + dy));
    context.fillStyle = ink.dim;
    context.fill();
  }

  badge(band, badge, x, y) {
    const { context, pen } = this;
    const label = band.item.open ? `${badge} ${band.item.all ? "shown all" : "drawn once"}` : badge;
    const width = label.length * pen.advance + 10;
    context.beginPath();
    context.roundRect(x, y - 8, width, 16, 8);
    context.fillStyle = ink.mark;
    context.fill();
    context.fillStyle = ink.ink;
    context.fillText(label, x + 5, y + 0.5);
    band.badge = { x, width };
  }

  // --- closed modules ---------------------------------------------------------------------------------------------

  closed(band) {
    const boxes = summarise(this.snapshot, ...rowsOf(band.item));
    for (let lane = 0; lane < lanes.length; lane++) {
      const mine = boxes.filter((box) => box.lane === lane);
      mine.forEach((box, i) => {
        const width = lanes[lane].width / mine.length;
        this.box(box, lanes[lane].x + i * width, band.y + GAP / 2, width - (mine.length > 1 ? 3 : 0), band);
      });
    }
  }

  box(box, x, y, width, band) {
    const { context } = this;
    const dim = this.faded && !box.changes.slice(1).some(Boolean);
    if (!this.text) {
      this.batch(ink.phase[box.phase], dim ? 0.25 : 0.85).push(x, y, width, BOX);
      return;
    }
    context.globalAlpha = dim ? 0.55 : 1;
    this.outlined(x, y, width, BOX, box.calls ? ink.tint[box.phase] : ink.paper, ink.phase[box.phase], box.calls ? [] : [4, 3]);
    this.bar(box, x, y, width);
    drawMark(context, box.phase, x + 10, y + 11, 4.5);
    this.words(box, x, y, width, band);
    context.globalAlpha = 1;
  }

  outlined(x, y, width, height, fill, stroke, dash) {
    const { context } = this;
    context.beginPath();
    context.roundRect(x, y, width, height, 4);
    context.fillStyle = fill;
    context.fill();
    context.strokeStyle = stroke;
    context.setLineDash(dash);
    context.stroke();
    context.setLineDash([]);
  }

  /** A bar along the bottom of a box, as long as its share of the largest box: by bytes made, or by seconds. */
  bar(box, x, y, width) {
    const share = this.measure.of(box) / this.graph.largest();
    if (!(share > 0)) return;
    this.context.fillStyle = ink.phase[box.phase];
    this.context.fillRect(x + 3, y + BOX - 5, Math.max(1, (width - 6) * Math.min(share, 1)), 3);
  }

  words(box, x, y, width, band) {
    const { context, pen } = this;
    const note = changesText(box);
    const noteWidth = note ? note.length * 6.4 + 8 : 0;
    const named = metrics.inside && box.lane === FORWARD_LANE;
    const count = band.item.kind === "group" ? ` each ×${band.item.copies}` : "";
    const label = `${band.item.label}${band.item.kind === "group" ? ` ×${band.item.copies}` : ""}`;
    const ops = metrics.inside ? plural(box.calls, "op") : opsText(box);  // names of ops have no room in a narrow picture
    const first = named ? label : box.calls ? ops : "erased";
    const size = this.measure.of(box) ? ` · ${this.measure.write(box)}` : "";
    context.fillStyle = ink.ink;
    pen.use(named ? pen.fitting(first, width - 22, 10.5, 7.5) : 10.5, named ? "bold" : "");
    pen.write(first, x + 19, y + 11, width - 22, named);
    context.fillStyle = ink.dim;
    pen.use(10);
    const second = metrics.inside ? size.slice(3) : `${plural(box.calls, "op")}${size}${count}`;
    const beside = note && (!metrics.inside || second.length * pen.advance + noteWidth < width - 22);
    pen.write(second, x + 19, y + 23.5, width - 22 - (beside ? noteWidth : 0));
    if (!beside) return;
    context.fillStyle = ink.ink;
    pen.use(10.5, "bold");
    context.fillText(note, x + width - noteWidth, y + 23.5);
  }

  /** What the plan of the slider would do beside what is drawn: recomputed in the middle, offloaded at the left. */
  detours() {
    const { again, away } = this.graph.wiring.detours();
    for (const [found, lane, phase] of [[again, RECOMPUTE_LANE, PHASE.recompute], [away, OUTSIDE_LANE, PHASE.transfer]]) {
      for (const [band, { bytes, count }] of found) {
        const box = this.bands.boxAt(band, lane);
        const y = box.y + Math.min(box.height, BOX) / 2 - BOX / 2;
        if (y > this.bottom || y + BOX < this.top) continue;
        if (!this.text) {
          this.batch(ink.phase[phase], 0.85).push(box.x, y + 4, lanes[lane].width, BOX - 8);
          continue;
        }
        this.outlined(box.x, y, lanes[lane].width, BOX, ink.tint[phase], ink.phase[phase], [5, 3]);
        drawMark(this.context, phase, box.x + 10, y + 11, 4.5);
        this.context.fillStyle = ink.ink;
        this.pen.use(10.5);
        this.pen.write(bytesText(bytes), box.x + 19, y + 11, lanes[lane].width - 22);
        this.context.fillStyle = ink.dim;
        this.pen.use(10);
        this.pen.write(metrics.inside ? countText(count) : plural(count, "tensor"), box.x + 19, y + 24, lanes[lane].width - 22);
      }
    }
    this.flush();
  }

  /** The ring around the row that keys act on, while the picture has the focus. */
  current() {
    const band = this.graph.current === null ? undefined : this.bands.list[this.graph.current];
    if (!band || document.activeElement !== this.graph.canvas) return;
    this.outline({ x: -metrics.labels - 2, y: band.y + 2, width: worldRight + metrics.labels, height: band.height - 4 }, 2);
  }

  // --- calls ------------------------------------------------------------------------------------------------------

  call(id, band) {
    const lane = records.lane[id], slot = this.bands.slotOf(id);
    if (slot === undefined) return;
    const { x, y, width, height } = pillAt(lane, slot, band);
    if (y > this.bottom || y + height < this.top) return;
    const change = this.snapshot.changeOf(id), phase = records.phase[id];
    const found = this.graph.matches.has(id);
    const dim = this.faded && !change && !found;
    if (!this.text) {
      if (change === ERASED) this.batch(ink.dim, 0.35).push(x, y + height / 2 - 2, width, 4);
      else this.batch(found ? ink.ink : ink.phase[phase], dim ? 0.25 : 0.9).push(x, y, width, height);
      return;
    }
    this.pill(id, x, y, width, height, change, phase, dim, found);
  }

  pill(id, x, y, width, height, change, phase, dim, found) {
    const { context, pen } = this;
    context.globalAlpha = dim ? 0.5 : 1;
    context.beginPath();
    context.roundRect(x, y, width, height, 3);
    context.fillStyle = change === ERASED ? ink.paper : found ? ink.mark : ink.tint[phase];
    context.fill();
    context.strokeStyle = change ? ink.ink : ink.phase[phase];
    context.lineWidth = change === CREATED || change === MOVED ? 1.8 : 1;
    if (change === ERASED) context.setLineDash([3, 3]);
    if (change === MOVED) context.setLineDash([7, 3]);
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
    drawMark(context, phase, x + 9, y + height / 2, 4);
    const sign = CHANGE_SIGNS[change];
    context.fillStyle = change === ERASED ? ink.dim : ink.ink;
    pen.use(10.5);
    const taken = pen.write(opLabel(records.op[id]), x + 17, y + height / 2 + 0.5, width - (sign ? 30 : 20));
    if (change === ERASED) context.fillRect(x + 16, y + height / 2, taken + 2, 1);
    if (sign) {
      pen.use(11, "bold");
      context.fillStyle = ink.ink;
      context.fillText(sign, x + width - 11, y + height / 2 + 0.5);
    }
    context.globalAlpha = 1;
  }

  /** Rectangles that are drawn together: x, y, width, height, … */
  batch(colour, alpha) {
    const key = `${colour} ${alpha}`;
    if (!this.batches.has(key)) this.batches.set(key, { colour, alpha, list: [] });
    return this.batches.get(key).list;
  }

  flush() {
    const { context } = this;
    for (const { colour, alpha, list } of this.batches.values()) {
      context.globalAlpha = alpha;
      context.fillStyle = colour;
      context.beginPath();
      for (let i = 0; i < list.length; i += 4) context.rect(list[i], list[i + 1], list[i + 2], list[i + 3]);
      context.fill();
    }
    context.globalAlpha = 1;
    this.batches.clear();
  }

  // --- neighbours -------------------------------------------------------------------------------------------------

  /** What is selected and what is pointed at, each with the places of what it reads and of what reads it. */
  get marked() {
    const { graph, snapshot, bands } = this;
    const ids = [graph.selected, graph.hovered].filter((id, i, both) => id !== null && id !== undefined && both.indexOf(id) === i);
    return ids.map((id) => {
      const ghost = snapshot.isGhost(id);
      const inputs = ghost ? [] : [...new Set(snapshot.inputs(id))], users = ghost ? [] : snapshot.users(id);
      const placed = (others) => others.map((other) => bands.place(other)).filter(Boolean);
      return { place: bands.place(id), inputs: placed(inputs), users: placed(users), line: id === graph.selected ? 2.5 : 1.5 };
    }).filter(({ place }) => place);
  }

  /** Edges pass behind the boxes, whose names stay readable. */
  edges() {
    for (const { place, inputs, users } of this.marked) {
      for (const source of inputs) this.edge(source, place, "reads");
      for (const user of users) this.edge(place, user, "read by");
    }
  }

  neighbours() {
    for (const { place, inputs, users, line } of this.marked) {
      for (const other of [...inputs, ...users]) this.outline(other, 1.2);
      this.outline(place, line);
    }
  }

  outline({ x, y, width, height }, line) {
    const { context } = this;
    context.lineWidth = line;
    context.strokeStyle = ink.ink;
    context.beginPath();
    context.roundRect(x - 1.5, y - 1.5, width + 3, height + 3, 5);
    context.stroke();
    context.lineWidth = 1;
  }

  edge(from, to, kind) {
    const { context } = this;
    const right = to.x > from.x + from.width;
    const x = right ? from.x + from.width : from.x + from.width / 2;
    const y = right ? from.y + from.height / 2 : from.y + (to.y > from.y ? from.height : 0);
    const tipX = right ? to.x - 2 : to.x + to.width / 2;
    const tipY = right ? to.y + to.height / 2 : to.y + (to.y > from.y ? -2 : to.height + 2);
    const bend = right ? Math.max(24, (tipX - x) / 2) : 0;
    const lift = right ? 0 : Math.sign(tipY - y) * Math.max(14, Math.abs(tipY - y) / 3);
    context.beginPath();
    context.moveTo(x, y);
    context.bezierCurveTo(x + bend, y + lift, tipX - bend, tipY - lift, tipX, tipY);
    context.strokeStyle = ink.ink;
    context.globalAlpha = 0.75;
    context.lineWidth = (kind === "reads" ? 1.6 : 1.1) / Math.max(this.scale, 0.4);
    if (from.folded || to.folded) context.setLineDash([2, 3]);
    else if (kind === "read by") context.setLineDash([6, 3]);
    context.stroke();
    context.setLineDash([]);
    this.tip(tipX, tipY, right ? 0 : Math.sign(tipY - y));
    context.globalAlpha = 1;
    context.lineWidth = 1;
  }

  /** An arrow's head: to the right, or up or down. */
  tip(x, y, down) {
    const { context } = this;
    context.fillStyle = ink.ink;
    context.beginPath();
    context.moveTo(x, y);
    const wings = down ? [[-3.5, -6 * down], [3.5, -6 * down]] : [[-6, -3.5], [-6, 3.5]];
    for (const [dx, dy] of wings) context.lineTo(x + dx, y + dy);
    context.fill();
  }
}
