// What is open and closed, and so how high every row of the picture is. Columns and places come with the data.

const HEAD = 24, FOOT = 6, BOX = 36, GAP = 14, CLOSED = BOX + GAP, PITCH = 22, PILL = 18, PAD = 6, INSET = 12;
const FEW_BANDS = 30, FEW_CALLS = 160;

const OUTSIDE_LANE = 0, FORWARD_LANE = 1, RECOMPUTE_LANE = 2, BACKWARD_LANE = 3;
const UPDATE_ROW = data.sheet.rows.length;

/** Widths on a wide canvas and on a narrow one, where modules are named inside of their boxes. */
const WIDE = { labels: 212, widths: [118, 288, 150, 288, 118], perLine: [1, 3, 1, 3, 1], laneGap: 16, keptGap: 128, arcs: 54, inside: false };
const NARROW = { labels: 8, widths: [62, 150, 78, 78, 62], perLine: [1, 1, 1, 1, 1], laneGap: 10, keptGap: 56, arcs: 16, inside: true };

/** The measures in force. */
let metrics = WIDE;

/** The columns, with their left edges; `used` are those in which any snapshot or any plan has something. */
const lanes = WIDE.widths.map((_, lane) => ({ x: 0, width: 0, used: laneIsUsed(lane), label: data.sheet.lanes[lane] }));
let worldRight = 0;

function laneIsUsed(lane) {
  if (lane === FORWARD_LANE) return true;
  const codes = data.frontier ? data.frontier.plans.join("") : "";
  if (lane === RECOMPUTE_LANE && codes.includes("r")) return true;
  if (lane === OUTSIDE_LANE && codes.includes("o")) return true;
  return Object.values(data.sheet.slots).some((slots) => slots.some((value, i) => i % 3 === 1 && value === lane));
}

/** Set the columns for a canvas of some width in pixels. */
function measureLanes(width) {
  metrics = width < 640 ? NARROW : WIDE;
  let x = 0;
  lanes.forEach((lane, number) => {
    if (!lane.used) return;
    if (number === FORWARD_LANE) x += metrics.arcs;
    Object.assign(lane, { x, width: metrics.widths[number] });
    x += lane.width + (number === FORWARD_LANE ? metrics.keptGap : number === BACKWARD_LANE ? metrics.arcs : metrics.laneGap);
  });
  worldRight = x + 4;
}

measureLanes(1280);

class Item {
  constructor([label, path, kind, first, end, children], parent = null) {
    this.label = text(label);
    this.path = text(path);
    this.kind = kind;
    this.first = first;
    this.end = end;
    this.parent = parent;
    this.depth = parent ? parent.depth + 1 : 0;
    this.children = children.map((child) => new Item(child, this));
    this.open = kind === "group";
    this.all = false;
  }

  /** The items shown inside: of a group that is drawn once, those of its first module. */
  get shown() {
    if (this.kind !== "group" || this.all) return this.children;
    const [first] = this.children;
    return first.kind === "visit" ? [first] : first.children;
  }

  get copies() {
    return this.kind === "group" ? this.children.length : 1;
  }
}

const tree = data.sheet.tree.map((item) => new Item(item));
const updateItem = Object.assign(new Item([0, 0, "visit", UPDATE_ROW, UPDATE_ROW + 1, []]), { label: "optimizer update" });

function eachItem(items, visit) {
  for (const item of items) {
    visit(item);
    eachItem(item.children, visit);
  }
}

/** The rows of the picture from top to bottom, and the frames around open modules. */
class Bands {
  constructor(stage, views) {
    this.stage = stage;
    this.slots = new Map();
    this.present = new Set();
    const slots = data.sheet.slots[stage];
    for (let i = 0; i < slots.length; i += 3) this.slots.set(slots[i] * 8 + slots[i + 1], slots[i + 2]);
    for (const key of this.slots.keys()) this.present.add(key >> 3);
    this.showViews(views);
    this.arrange();
  }

  /** Give the calls that are shown their places: all of them, or those that compute something. */
  showViews(views) {
    this.views = views;
    this.places = null;
    if (views) return;
    const taken = new Map();
    data.snapshots.forEach((snapshot, index) => {
      if (snapshot.stage !== this.stage) return;
      const { ids, ghosts } = snapshotAt(index);
      for (const id of [...ids, ...ghosts]) {
        if (isInput(id) || records.view[id]) continue;
        const key = records.row[id] * 8 + records.lane[id];
        if (!taken.has(key)) taken.set(key, new Set());
        taken.get(key).add(records.slot[id]);
      }
    });
    this.places = new Map();
    for (const [key, slots] of taken) this.places.set(key, new Map([...slots].sort((a, b) => a - b).map((slot, i) => [slot, i])));
  }

  /** The place of a call in its row and column; undefined where it is folded away. */
  slotOf(id) {
    if (this.views) return records.slot[id];
    return this.places.get(records.row[id] * 8 + records.lane[id])?.get(records.slot[id]);
  }

  /** How many places a row and column has. */
  slotsAt(key) {
    return this.views ? this.slots.get(key) || 0 : this.places.get(key)?.size || 0;
  }

  arrange() {
    this.list = [];
    this.frames = [];
    this.bandOfRow = new Int32Array(UPDATE_ROW + 1).fill(-1);
    this.twin = new Map();
    this.copy = new Int32Array(UPDATE_ROW + 1);
    this.group = new Int32Array(UPDATE_ROW + 1).fill(-1);
    this.y = 0;
    for (const item of [updateItem, ...tree]) this.add(item, 0);
    this.height = this.y;
  }

  /** Whether any call of this stage stands in an item's rows. */
  holds(item) {
    for (let at = item.first; at < item.end; at++) if (this.present.has(at)) return true;
    return false;
  }

  add(item, depth) {
    if (!this.holds(item)) return;
    if (!item.open || item.kind === "visit") {
      this.band(item, depth, item.kind === "visit" && item.open ? "calls" : "closed");
      return;
    }
    const top = this.y;
    const head = this.push({ item, depth, kind: "head", height: HEAD });
    for (const inside of item.shown) this.add(inside, depth + 1);
    this.y += FOOT;
    this.frames.push({ head, depth, y: top, height: this.y - top - 2 });
    if (item.kind === "group" && !item.all) this.fold(item);
  }

  band(item, depth, kind) {
    const height = kind === "calls" ? this.lines(item.first) * PITCH + 2 * PAD : CLOSED;
    const index = this.push({ item, depth, kind, height });
    for (let at = item.first; at < item.end; at++) this.bandOfRow[at] = index;
    if (item.kind === "group") this.fold(item);
  }

  push(band) {
    this.list.push({ ...band, y: this.y });
    this.y += band.height;
    return this.list.length - 1;
  }

  /** Let the rows of a group's other modules stand for those of its first. */
  fold(group) {
    const [first] = group.children;
    group.children.forEach((other, number) => {
      for (let step = 0; step < other.end - other.first; step++) {
        const at = other.first + step;
        this.group[at] = group.first;
        this.copy[at] = number;
        if (!number) continue;
        this.bandOfRow[at] = this.bandOfRow[first.first + step];
        this.twin.set(at, first.first + step);
      }
    });
  }

  /** How many lines of calls a row has, in its fullest column. */
  lines(rowNumber) {
    return Math.max(1, ...metrics.perLine.map((per, lane) => Math.ceil(this.slotsAt(rowNumber * 8 + lane) / per)));
  }

  /** The index of the band at a height; the last that starts above it. */
  at(y) {
    let low = 0, high = this.list.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.list[middle].y <= y) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Where a record is drawn: the rectangle of its call, or of the closed module that it is in. */
  place(id) {
    const lane = records.lane[id];
    const index = lane < 0 ? -1 : this.bandOfRow[records.row[id]];
    if (index < 0) return null;
    const band = this.list[index], folded = this.twin.has(records.row[id]);
    const slot = band.kind === "calls" ? this.slotOf(id) : undefined;
    if (slot === undefined) return { ...this.boxAt(index, lane), band, folded, closed: true };
    return { ...pillAt(lane, slot, band), band, folded, closed: false };
  }

  /** The rectangle that a band has in a column. */
  boxAt(index, lane) {
    const band = this.list[index];
    const { x, width } = lanes[lane];
    if (band.kind !== "calls") return { x, y: band.y + GAP / 2, width, height: BOX };
    const first = band.item.first;
    const lines = Math.max(1, Math.ceil(this.slotsAt(first * 8 + lane) / metrics.perLine[lane]));
    return { x, y: band.y + PAD, width: width - 5, height: lines * PITCH - (PITCH - PILL) };
  }
}

/** The rectangle of a call in an open row. */
function pillAt(lane, slot, band) {
  const per = metrics.perLine[lane], step = lanes[lane].width / per;
  return { x: lanes[lane].x + (slot % per) * step, y: band.y + PAD + Math.floor(slot / per) * PITCH, width: step - 5, height: PILL };
}

/** How many rows some items take, as they are open and closed. */
const rowsTaken = (items) => items.reduce((sum, item) => sum + (item.open && item.kind !== "visit" ? 1 + rowsTaken(item.shown) : 1), 0);

/** Open some items, unless the rows become too many; says whether they are open. */
function openIfFew(items) {
  items.forEach((item) => { item.open = true; });
  if (rowsTaken(tree) <= FEW_BANDS) return true;
  items.forEach((item) => { item.open = false; });
  return false;
}

/** Open modules level by level as long as the rows stay few, groups of equal ones first; and rows where the calls are few. */
function openAtFirst() {
  eachItem(tree, (item) => { item.open = item.all = false; });
  updateItem.open = false;
  for (let depth = 0; depth < 12; depth++) {
    const level = [];
    eachItem(tree, (item) => { if (item.depth === depth && item.kind !== "visit" && isShown(item)) level.push(item); });
    if (!openIfFew(level) && !openIfFew(level.filter((item) => item.kind === "group"))) break;
  }
  if (snapshotAt(data.after).ids.length <= FEW_CALLS) openCalls();
}

/** Whether all that is around an item is open. */
const isShown = ({ parent }) => parent === null || (parent.open && isShown(parent));

function openCalls() {
  eachItem(tree, (item) => { if (item.kind === "visit") item.open = true; });
  updateItem.open = true;
}

function openEverything() {
  eachItem(tree, (item) => { item.open = true; item.all = true; });
  updateItem.open = true;
}

/** Open all that is around a row, and the row itself. */
function openRow(rowNumber) {
  if (rowNumber === UPDATE_ROW) {
    updateItem.open = true;
    return;
  }
  const walk = (items) => {
    for (const item of items) {
      if (rowNumber < item.first || rowNumber >= item.end) continue;
      item.open = true;
      if (item.kind === "group" && rowNumber >= item.children[0].end) item.all = true;
      walk(item.children);
    }
  };
  walk(tree);
}
