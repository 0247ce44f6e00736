// What is open and closed, and so how high every row of the picture is. Columns and places come with the data.

const LABELS = 250, LANE_GAP = 14, KEPT_GAP = 104;
const HEAD = 24, FOOT = 6, CLOSED = 36, PITCH = 22, PILL = 18, PAD = 4, INSET = 12;
const FEW_BANDS = 60, FEW_CALLS = 160;

const LANE_WIDTHS = [124, 312, 208, 312, 124];
const PER_LINE = [1, 3, 2, 3, 1];
const FORWARD_LANE = 1;

/** The columns that any snapshot uses, with their left edges. */
const lanes = (() => {
  const used = new Set([FORWARD_LANE]);
  for (const slots of Object.values(data.sheet.slots)) for (let i = 1; i < slots.length; i += 3) used.add(slots[i]);
  const found = [];
  let x = 0;
  for (let lane = 0; lane < LANE_WIDTHS.length; lane++) {
    found.push({ x, width: LANE_WIDTHS[lane], used: used.has(lane), label: data.sheet.lanes[lane] });
    if (used.has(lane)) x += LANE_WIDTHS[lane] + (lane === FORWARD_LANE ? KEPT_GAP : LANE_GAP);
  }
  return found;
})();

const WORLD_RIGHT = Math.max(...lanes.filter((lane) => lane.used).map((lane) => lane.x + lane.width)) + 8;
const UPDATE_ROW = data.sheet.rows.length;

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
  constructor(stage) {
    this.stage = stage;
    this.slots = new Map();
    const slots = data.sheet.slots[stage];
    for (let i = 0; i < slots.length; i += 3) this.slots.set(slots[i] * 8 + slots[i + 1], slots[i + 2]);
    this.arrange();
  }

  arrange() {
    this.list = [];
    this.frames = [];
    this.bandOfRow = new Int32Array(UPDATE_ROW + 1).fill(-1);
    this.twin = new Map();
    this.y = 0;
    for (const item of [updateItem, ...tree]) this.add(item, 0);
    this.height = this.y;
  }

  /** Whether any call of this stage stands in an item's rows. */
  holds(item) {
    for (let at = item.first; at < item.end; at++) {
      for (let lane = 0; lane < lanes.length; lane++) if (this.slots.has(at * 8 + lane)) return true;
    }
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
    const height = kind === "calls" ? Math.max(this.lines(item.first) * PITCH + 2 * PAD, PITCH + 2 * PAD) : CLOSED;
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
    for (const other of group.children.slice(1)) {
      for (let step = 0; step < other.end - other.first; step++) {
        this.bandOfRow[other.first + step] = this.bandOfRow[first.first + step];
        this.twin.set(other.first + step, first.first + step);
      }
    }
  }

  /** How many lines of calls a row has, in its fullest column. */
  lines(rowNumber) {
    return Math.max(1, ...PER_LINE.map((per, lane) => Math.ceil((this.slots.get(rowNumber * 8 + lane) || 0) / per)));
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
    if (band.kind !== "calls") {
      return { x: lanes[lane].x, y: band.y + 2, width: lanes[lane].width, height: CLOSED - 4, band, folded, closed: true };
    }
    return { ...pillAt(lane, records.slot[id], band), band, folded, closed: false };
  }
}

/** The rectangle of a call in an open row. */
function pillAt(lane, slot, band) {
  const per = PER_LINE[lane], step = lanes[lane].width / per;
  return { x: lanes[lane].x + (slot % per) * step, y: band.y + PAD + Math.floor(slot / per) * PITCH, width: step - 5, height: PILL };
}

/** Open modules level by level as long as the rows stay few, and rows where the calls are few. */
function openAtFirst() {
  eachItem(tree, (item) => { item.open = item.kind === "group"; item.all = false; });
  updateItem.open = false;
  const count = (items) => items.reduce((sum, item) => sum + (item.open && item.kind !== "visit" ? 1 + count(item.shown) : 1), 0);
  for (let depth = 0; depth < 12; depth++) {
    const opened = [];
    eachItem(tree, (item) => { if (item.depth === depth && item.kind === "module") opened.push(item); });
    opened.forEach((item) => { item.open = true; });
    if (count(tree) > FEW_BANDS) {
      opened.forEach((item) => { item.open = false; });
      break;
    }
  }
  if (snapshotAt(data.after).ids.length <= FEW_CALLS) openCalls();
}

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
