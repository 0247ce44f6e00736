// The snapshots of the program: which records they hold, who reads whom, and what changed on the way to each.
// Where passes took several steps, the last one compares the program after all of them with the one without any.

const records = data.records;
const REWIRED = 1, MOVED = 2, CREATED = 3, ERASED = 4;
const CHANGE_NAMES = ["", "rewired", "moved", "created", "erased"];
const CHANGE_SIGNS = ["", "Δ", "↕", "+", "−"];

/** Where the values of each record start in a column of several values each. */
function starts(column) {
  const found = new Int32Array(column.counts.length + 1);
  column.counts.forEach((count, i) => { found[i + 1] = found[i] + count; });
  return found;
}

const readsStart = starts(records.reads);
const namesStart = starts(records.names);

/** The numbers of the names of the nodes that a record reads, in the order of its arguments. */
const readsOf = (id) => records.reads.values.slice(readsStart[id], readsStart[id + 1]);

/** The names for users of a record. */
const namesOf = (id) => records.names.values.slice(namesStart[id], namesStart[id + 1]).map(text);

/** The best name of a record: the one for users, else the node's. */
const nameOf = (id) => (namesStart[id] < namesStart[id + 1] ? text(records.names.values[namesStart[id]]) : text(records.name[id]));

const isInput = (id) => records.lane[id] < 0;

class Snapshot {
  constructor(index) {
    const given = data.snapshots[index];
    this.index = index;
    this.program = given.program;
    this.label = given.label;
    this.stage = given.stage;
    this.ids = fromRuns(given.nodes);
    this.kept = given.kept.record.map((record, i) => ({ record, bytes: given.kept.bytes[i], reader: given.kept.reader[i] }));
    this.compared = given.changes !== null;
    this.change = new Map();
    this.ghosts = this.compared ? fromRuns(given.changes.erased) : new Int32Array(0);
    this.counts = {};
    for (const [kind, name] of [[REWIRED, "rewired"], [MOVED, "moved"], [CREATED, "created"]]) {
      const changed = this.compared ? fromRuns(given.changes[name]) : [];
      for (const id of changed) this.change.set(id, kind);
      this.counts[name] = changed.length;
    }
    this.counts.erased = this.ghosts.length;
    this.changed = this.change.size + this.ghosts.length > 0;
    this.summaries = new Map();
  }

  /** Which rows and columns read which others on their side of the U: `[row, column, row, column]` each, once. */
  get flows() {
    if (!this._flows) {
      const found = new Map();
      for (const id of this.ids) if (!isInput(id)) for (const source of this.inputs(id)) this.flow(found, source, id);
      this._flows = [...found.values()];
    }
    return this._flows;
  }

  flow(found, source, id) {
    if (isInput(source)) return;
    const from = records.row[source] * 8 + records.lane[source], to = records.row[id] * 8 + records.lane[id];
    const early = records.lane[source] < 2, late = records.lane[id] >= 2;
    const key = from * 1e6 + to;
    if (from !== to && early !== late && !found.has(key)) found.set(key, [from >> 3, from & 7, to >> 3, to & 7]);
  }

  /** The record of each node, by the number of its name. */
  get byName() {
    if (!this._byName) {
      this._byName = new Map();
      for (const id of this.ids) this._byName.set(records.name[id], id);
    }
    return this._byName;
  }

  /** The record that a node's or a tensor's name stands for, or that of an erased op; undefined where there is none. */
  named(name) {
    if (!this._named) {
      this._named = new Map();
      for (const id of [...this.ghosts, ...this.ids]) this._named.set(text(records.name[id]), id);
      for (const id of this.ids) for (const known of namesOf(id)) this._named.set(known, id);
    }
    return this._named.get(name);
  }

  /** The place in the order of running of each record. */
  position(id) {
    if (!this._position) {
      this._position = new Map();
      this.ids.forEach((found, i) => this._position.set(found, i));
    }
    return this._position.get(id);
  }

  inputs(id) {
    return readsOf(id).map((name) => this.byName.get(name)).filter((found) => found !== undefined);
  }

  /** The records that read a record, in the order of running. */
  users(id) {
    if (!this._users) {
      this._users = new Map();
      for (const reader of this.ids) {
        for (const source of new Set(this.inputs(reader))) {
          if (!this._users.has(source)) this._users.set(source, []);
          this._users.get(source).push(reader);
        }
      }
    }
    return this._users.get(id) || [];
  }

  /** The ops of each row, those that were erased included; rows by number. */
  get rows() {
    if (!this._rows) {
      this._rows = Array.from({ length: data.sheet.rows.length + 1 }, () => []);
      for (const id of this.ids) if (!isInput(id)) this._rows[records.row[id]].push(id);
      for (const id of this.ghosts) this._rows[records.row[id]].push(id);
    }
    return this._rows;
  }

  isGhost(id) {
    if (!this._ghosts) this._ghosts = new Set(this.ghosts);
    return this._ghosts.has(id);
  }

  changeOf(id) {
    return this.isGhost(id) ? ERASED : this.change.get(id) || 0;
  }

  /** The record that stands for the same op as one of another snapshot: by name, else by place. */
  counterpart(id) {
    const found = this.byName.get(records.name[id]);
    if (found !== undefined) return found;
    return this.ghosts.find((ghost) => records.name[ghost] === records.name[id]);
  }
}

const snapshots = data.snapshots.map(() => null);

/** A snapshot, made when it is first asked for. */
function snapshotAt(index) {
  if (!snapshots[index]) snapshots[index] = new Snapshot(index);
  return snapshots[index];
}

/** The op's call as text, with each argument that is another call's result replaced by `show` of its record. */
function callPieces(snapshot, id, show) {
  const parts = text(records.call[id]).split(data.reference);
  const names = readsOf(id);
  const pieces = [parts[0]];
  names.forEach((name, i) => {
    const source = snapshot.byName.get(name);
    pieces.push(source === undefined ? text(name) : show(source), parts[i + 1]);
  });
  return pieces;
}
