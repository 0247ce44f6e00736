// What lies between the boxes: who reads whom on one side of the U, and what forward saves for backward.

/** A ribbon of the largest box is as thick as the box; all others are thinner in proportion. */
const THICKEST = BOX;
const HAIRLINE = 0.75;

/** The edges between the bands of a picture, as they are folded, for one snapshot or one plan. */
class Wiring {
  /**
   * @param bands the rows as they are open and closed
   * @param snapshot whose calls are drawn
   * @param values what backward needs: `{ row, lane, toRow, toLane, bytes, kind }` each
   * @param scale pixels of a ribbon's width for a byte; 0 to find one
   * @param same a wiring of the same bands and snapshot, which differs in values alone
   */
  constructor(bands, snapshot, values, scale = 0, same = null) {
    this.bands = bands;
    this.snapshot = snapshot;
    this.columns = same ? same.columns : this.occupied();
    this.flows = same ? same.flows : this.gather(snapshot.flows);
    this.weigh(values, scale);
  }

  /** For each column the bands that have a box there, top to bottom, and the place of each among them. */
  occupied() {
    const found = lanes.map(() => new Set());
    const { rows } = this.snapshot;
    rows.forEach((ids, row) => {
      const band = this.bands.bandOfRow[row];
      if (band >= 0) for (const id of ids) found[records.lane[id]].add(band);
    });
    return found.map((bands) => new Map([...bands].sort((a, b) => a - b).map((band, place) => [band, place])));
  }

  /** Edges between rows as edges between bands, each once; those from one of several equal blocks to the next are left out. */
  gather(flows) {
    const { bands } = this;
    const found = new Map();
    for (const [fromRow, fromLane, toRow, toLane] of flows) {
      const from = bands.bandOfRow[fromRow], to = bands.bandOfRow[toRow];
      if (from < 0 || to < 0 || (from === to && fromLane === toLane) || this.crosses(fromRow, toRow)) continue;
      const key = (from * 8 + fromLane) * 1e6 + to * 8 + toLane;
      if (!found.has(key)) found.set(key, { from, fromLane, to, toLane });
    }
    return [...found.values()];
  }

  crosses(one, other) {
    const { group, copy } = this.bands;
    return group[one] >= 0 && group[one] === group[other] && copy[one] !== copy[other];
  }

  /** What backward needs, as ribbons between bands: bytes add up, ends are stacked in the order of the other ends. */
  weigh(values, scale) {
    const { bands } = this;
    const found = new Map();
    for (const { row, lane, toRow, toLane, bytes, kind } of values) {
      const from = bands.bandOfRow[row], to = bands.bandOfRow[toRow];
      if (from < 0 || to < 0) continue;
      const key = `${from} ${lane} ${to} ${toLane} ${kind}`;
      if (!found.has(key)) found.set(key, { from, fromLane: lane, to, toLane, kind, bytes: 0, count: 0 });
      const ribbon = found.get(key);
      ribbon.bytes += bytes;
      ribbon.count += 1;
    }
    this.ribbons = [...found.values()].sort((one, other) => other.bytes - one.bytes);
    this.scale = scale || THICKEST / Math.max(1, this.fullest("from", "fromLane"), this.fullest("to", "toLane"));
    for (const ribbon of this.ribbons) ribbon.width = Math.max(HAIRLINE, ribbon.bytes * this.scale);
    this.stack("from", "fromLane", "to", "start");
    this.stack("to", "toLane", "from", "end");
  }

  /** The most bytes that start or end at one box. */
  fullest(band, lane) {
    const sums = new Map();
    for (const ribbon of this.ribbons) {
      if (ribbon.kind === "again") continue;
      const key = ribbon[band] * 8 + ribbon[lane];
      sums.set(key, (sums.get(key) || 0) + ribbon.bytes);
    }
    return Math.max(0, ...sums.values());
  }

  stack(band, lane, other, name) {
    const boxes = new Map();
    for (const ribbon of this.ribbons) {
      const key = ribbon[band] * 8 + ribbon[lane];
      if (!boxes.has(key)) boxes.set(key, []);
      boxes.get(key).push(ribbon);
    }
    for (const [key, ribbons] of boxes) {
      ribbons.sort((one, two) => one[other] - two[other]);
      const box = this.bands.boxAt(key >> 3, key & 7);
      let y = box.y + Math.min(box.height, BOX) / 2 - ribbons.reduce((sum, ribbon) => sum + ribbon.width, 0) / 2;
      for (const ribbon of ribbons) {
        ribbon[name] = y + ribbon.width / 2;
        y += ribbon.width;
      }
    }
  }

  /** What a plan does in each row beside what is there: bytes that are recomputed, and that are offloaded. */
  detours() {
    const found = { again: new Map(), away: new Map() };
    for (const { from, fromLane, kind, bytes, count } of this.ribbons) {
      if (kind === "kept" || fromLane !== FORWARD_LANE) continue;
      const old = found[kind].get(from) || { bytes: 0, count: 0 };
      found[kind].set(from, { bytes: old.bytes + bytes, count: old.count + count });
    }
    return found;
  }

  /** What is saved by the ops of a band, and offloaded. */
  keptBy(band) {
    let here = 0, away = 0;
    for (const ribbon of this.ribbons) {
      if (ribbon.from !== band || ribbon.kind === "again") continue;
      if (ribbon.kind === "away") away += ribbon.bytes;
      else here += ribbon.bytes;
    }
    return { here, away };
  }
}

/** What a snapshot keeps for backward, as values for `Wiring`. */
function valuesOf(snapshot) {
  return snapshot.kept.map(({ record, bytes, reader }) => ({
    row: records.row[record], lane: records.lane[record], toRow: records.row[reader], toLane: records.lane[reader], bytes,
    kind: data.phases[records.phase[record]] === "transfer" ? "away" : "kept",
  }));
}

/** Draws a wiring; the painter has the canvas and the part of the picture that is in view. */
class WirePainter {
  constructor(painter, wiring) {
    Object.assign(this, { painter, wiring, context: painter.context, bands: wiring.bands });
    this.line = 1 / Math.max(painter.scale, 0.4);
  }

  seen(one, other) {
    return Math.max(one, other) >= this.painter.top && Math.min(one, other) <= this.painter.bottom;
  }

  // --- ribbons ------------------------------------------------------------------------------------------------------

  ribbons() {
    for (const ribbon of this.wiring.ribbons) if (this.seen(ribbon.start, ribbon.end)) this.ribbon(ribbon);
    this.context.globalAlpha = 1;
  }

  ribbon(ribbon) {
    const { context } = this;
    const from = lanes[ribbon.fromLane], to = lanes[ribbon.toLane];
    const x = from.x + from.width, bendFrom = Math.max(x, lanes[FORWARD_LANE].x + lanes[FORWARD_LANE].width);
    const tip = to.x, half = ribbon.width / 2;
    const bend = Math.min((tip - bendFrom) / 2, 150);
    context.beginPath();
    if (ribbon.kind === "again") {
      this.middle(x, bendFrom, bend, tip, ribbon);
      context.globalAlpha = 0.55;
      context.strokeStyle = ink.phase[PHASE.recompute];
      context.lineWidth = 1.2 * this.line;
      context.setLineDash([2, 4]);
      context.stroke();
      context.setLineDash([]);
      context.lineWidth = 1;
      return;
    }
    context.moveTo(x, ribbon.start - half);
    context.lineTo(bendFrom, ribbon.start - half);
    context.bezierCurveTo(bendFrom + bend, ribbon.start - half, tip - bend, ribbon.end - half, tip, ribbon.end - half);
    context.lineTo(tip, ribbon.end + half);
    context.bezierCurveTo(tip - bend, ribbon.end + half, bendFrom + bend, ribbon.start + half, bendFrom, ribbon.start + half);
    context.lineTo(x, ribbon.start + half);
    context.closePath();
    const colour = ribbon.kind === "away" ? ink.phase[PHASE.transfer] : ink.kept;
    context.globalAlpha = ribbon.kind === "away" ? 0.16 : 0.42;
    context.fillStyle = colour;
    context.fill();
    if (ribbon.kind !== "away") return;
    context.globalAlpha = 0.9;
    context.strokeStyle = colour;
    context.setLineDash([6, 4]);
    context.stroke();
    context.setLineDash([]);
  }

  middle(x, bendFrom, bend, tip, { start, end }) {
    const { context } = this;
    context.moveTo(x, start);
    context.lineTo(bendFrom, start);
    context.bezierCurveTo(bendFrom + bend, start, tip - bend, end, tip, end);
  }

  /** Bytes, written where ribbons start: of each box once. */
  sizes() {
    const { painter, context } = this;
    const sums = new Map();
    for (const ribbon of this.wiring.ribbons) {
      if (ribbon.kind === "again" || (ribbon.kind === "away" && ribbon.fromLane === FORWARD_LANE)) continue;
      const key = ribbon.from * 8 + ribbon.fromLane;
      sums.set(key, (sums.get(key) || 0) + ribbon.bytes);
    }
    painter.pen.use(10.5);
    for (const [key, bytes] of sums) {
      const band = key >> 3, lane = lanes[key & 7];
      const box = this.bands.boxAt(band, key & 7);
      const y = box.y + Math.min(box.height, BOX) / 2;
      if (!this.seen(y, y)) continue;
      const label = bytesText(bytes), width = label.length * painter.pen.advance + 8;
      context.fillStyle = ink.paper;
      context.globalAlpha = 0.8;
      context.beginPath();
      context.roundRect(lane.x + lane.width + 6, y - 8, width, 16, 8);
      context.fill();
      context.globalAlpha = 1;
      context.fillStyle = ink["kept-ink"];
      context.fillText(label, lane.x + lane.width + 10, y + 0.5);
    }
  }

  // --- who reads whom -----------------------------------------------------------------------------------------------

  flows() {
    const { context, wiring } = this;
    context.strokeStyle = context.fillStyle = ink.flow;
    context.lineWidth = 1.1 * this.line;
    const updates = [];
    for (const flow of wiring.flows) {
      const from = this.bands.boxAt(flow.from, flow.fromLane), to = this.bands.boxAt(flow.to, flow.toLane);
      if (this.isUpdate(flow.to)) updates.push(from);
      else if (!this.isUpdate(flow.from) && this.seen(from.y, to.y)) this.flow(flow, from, to);
    }
    this.gradients(updates);
    this.turn();
    context.lineWidth = 1;
  }

  isUpdate(band) {
    return this.bands.list[band].item === updateItem;
  }

  flow({ from, fromLane, to, toLane }, start, end) {
    if (fromLane !== toLane) {
      this.across(start, end);
      return;
    }
    const places = this.wiring.columns[fromLane];
    const span = Math.abs(places.get(from) - places.get(to));
    if (span === 1) this.straight(start, end);
    else this.around(start, end, span, fromLane);
  }

  straight(start, end) {
    const down = end.y > start.y;
    const x = start.x + Math.min(start.width, end.width) / 2;
    const y = down ? start.y + start.height : start.y, tip = down ? end.y : end.y + end.height;
    this.path((context) => { context.moveTo(x, y); context.lineTo(x, tip); });
    this.head(x, tip, 0, down ? 1 : -1);
  }

  /** Past other boxes of the column: left of forward and recomputation, right of backward; the further, the wider. */
  around(start, end, span, lane) {
    const out = lane >= BACKWARD_LANE ? 1 : -1;
    const room = lane === FORWARD_LANE || lane === BACKWARD_LANE ? metrics.arcs : metrics.laneGap;
    const edge = (box) => (out > 0 ? box.x + box.width : box.x);
    const bulge = out * room * 1.25 * Math.min(1, 0.3 + span / 14);
    const y = start.y + start.height * (end.y > start.y ? 0.72 : 0.28), tip = end.y + end.height * (end.y > start.y ? 0.28 : 0.72);
    this.path((context) => {
      context.moveTo(edge(start), y);
      context.bezierCurveTo(edge(start) + bulge, y, edge(end) + bulge, tip, edge(end), tip);
    });
    this.head(edge(end), tip, -out, 0);
  }

  across(start, end) {
    const out = end.x > start.x ? 1 : -1;
    const x = out > 0 ? start.x + start.width : start.x, tip = out > 0 ? end.x : end.x + end.width;
    const y = start.y + start.height / 2, tipY = end.y + end.height / 2, middle = (x + tip) / 2;
    this.path((context) => {
      context.moveTo(x, y);
      context.bezierCurveTo(middle, y, middle, tipY, tip, tipY);
    });
    this.head(tip, tipY, out, 0);
  }

  /** One line up the right side to the update, for all the gradients that it reads. */
  gradients(sources) {
    const update = this.bands.list.findIndex((band) => band.item === updateItem);
    if (!sources.length || update < 0) return;
    const box = this.bands.boxAt(update, BACKWARD_LANE);
    const rail = lanes[BACKWARD_LANE].x + lanes[BACKWARD_LANE].width + metrics.arcs * 0.8, y = box.y + box.height / 2;
    let lowest = y;
    this.path((context) => {
      for (const source of sources) {
        const from = source.y + source.height / 2;
        lowest = Math.max(lowest, from);
        context.moveTo(source.x + source.width, from);
        context.lineTo(rail, from);
      }
      context.moveTo(rail, lowest);
      context.lineTo(rail, y);
      context.lineTo(box.x + box.width, y);
    });
    this.head(box.x + box.width, y, -1, 0);
  }

  /** The bottom of the U: from the last box of forward to the lowest of backward. */
  turn() {
    const [down, up] = [FORWARD_LANE, BACKWARD_LANE].map((lane) => [...this.wiring.columns[lane].keys()].pop());
    if (down === undefined || up === undefined || this.isUpdate(up)) return;
    const from = this.bands.boxAt(down, FORWARD_LANE), to = this.bands.boxAt(up, BACKWARD_LANE);
    const low = this.bands.height + 12, x = from.x + from.width / 2, end = to.x + to.width / 2;
    this.context.setLineDash([3, 4]);
    this.path((context) => {
      context.moveTo(x, from.y + from.height);
      context.lineTo(x, low - 10);
      context.quadraticCurveTo(x, low, x + 10, low);
      context.lineTo(end - 10, low);
      context.quadraticCurveTo(end, low, end, low - 10);
      context.lineTo(end, to.y + to.height);
    });
    this.context.setLineDash([]);
    this.head(end, to.y + to.height, 0, -1);
    if (!this.painter.text) return;
    this.painter.pen.use(10.5);
    this.context.fillText("the loss turns forward into backward", x + 16, low + 9, end - x - 32);
  }

  path(trace) {
    this.context.beginPath();
    trace(this.context);
    this.context.stroke();
  }

  /** An arrow's head at a point, pointing along a direction. */
  head(x, y, right, down) {
    const { context } = this;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - right * 6 - down * 3.2, y - down * 6 - right * 3.2);
    context.lineTo(x - right * 6 + down * 3.2, y - down * 6 + right * 3.2);
    context.fill();
  }
}
