// What the boxes of closed modules stand for: how many calls of which ops, their bytes and seconds, and what changed.

/** What runs in some rows: for each column and phase how many calls of which ops, and what changed. */
function summarise(snapshot, first, end) {
  const key = first * 1e6 + end;
  if (!snapshot.summaries.has(key)) {
    const boxes = new Map();
    for (let at = first; at < end; at++) for (const id of snapshot.rows[at]) count(boxes, snapshot, id);
    snapshot.summaries.set(key, [...boxes.values()].sort((a, b) => a.lane - b.lane || a.phase - b.phase));
  }
  return snapshot.summaries.get(key);
}

function count(boxes, snapshot, id) {
  const lane = records.lane[id], phase = records.phase[id], key = lane * 16 + phase;
  if (!boxes.has(key)) boxes.set(key, { lane, phase, calls: 0, bytes: 0, seconds: 0, ops: new Map(), changes: [0, 0, 0, 0, 0] });
  const box = boxes.get(key);
  const change = snapshot.changeOf(id);
  box.changes[change] += 1;
  if (change === ERASED) return;
  box.calls += 1;
  box.bytes += records.bytes[id];
  if (frontier) box.seconds += secondsOf(id);
  const op = box.ops.get(records.op[id]) || { calls: 0, bytes: 0 };
  op.calls += 1;
  op.bytes += records.bytes[id];
  box.ops.set(records.op[id], op);
}

/** "addmm ×2, gelu": which ops run how often, those with the largest results first; views only where there is nothing else. */
function opsText(box) {
  const all = [...box.ops.entries()];
  const real = all.filter(([op, { bytes }]) => bytes > 0 && text(op) !== "getitem");
  return (real.length ? real : all)
    .sort((one, other) => other[1].bytes - one[1].bytes)
    .map(([op, { calls }]) => (calls > 1 ? `${opLabel(op)} ×${calls}` : opLabel(op)))
    .join(", ");
}

/** Signs and numbers of what changed in a box: "+12 −3". */
function changesText(box) {
  return [CREATED, ERASED, MOVED, REWIRED].filter((kind) => box.changes[kind]).map((kind) => `${CHANGE_SIGNS[kind]}${box.changes[kind]}`).join(" ");
}

/** The rows that a band stands for; of a group drawn once, those of its first module. */
function rowsOf(item) {
  const shown = item.kind === "group" ? item.children[0] : item;
  return [shown.first, shown.end];
}

/** By what the bars in boxes are long: what each says of a box, and how it is written. */
const MEASURES = {
  bytes: { of: (box) => box.bytes, write: (box) => bytesText(box.bytes) },
  seconds: { of: (box) => box.seconds, write: (box) => secondsText(box.seconds) },
};
