// The plans of the frontier: what each of them does with every tensor, and how that looks in the picture.

const frontier = data.frontier;

let knownSeconds = null;

/** The seconds that an op takes, where a pass knew them; what is recomputed takes as long as what it repeats. */
function secondsOf(id) {
  if (!knownSeconds) {
    knownSeconds = new Map();
    const calls = [...snapshotAt(frontier.snapshot).ids].filter((one) => !isInput(one));
    calls.forEach((one, i) => knownSeconds.set(one, frontier.calls[i] * 1e-9));
  }
  if (!knownSeconds.has(id)) {
    const planned = snapshotAt(frontier.snapshot);
    const same = planned.byName.get(records.name[id]) ?? planned.named(nameOf(id).replace(/'+$/, ""));
    knownSeconds.set(id, same === undefined || same === id ? 0 : knownSeconds.get(same) || 0);
  }
  return knownSeconds.get(id);
}

/** Peak, seconds and decisions of the plan at a place of the frontier. */
function planAt(place) {
  const codes = frontier.plans[place];
  const totals = { k: { bytes: 0, count: 0 }, r: { bytes: 0, count: 0 }, o: { bytes: 0, count: 0 } };
  for (let i = 0; i < codes.length; i++) {
    const total = totals[codes[i]];
    if (!total) continue;
    total.bytes += frontier.tensors.bytes[i];
    total.count += 1;
  }
  return { place, codes, peak: frontier.peaks[place], extra: frontier.extra[place], runs: frontier.runs[place], kept: totals.k, again: totals.r, away: totals.o };
}

/** The readers of what the planned snapshot keeps, by the records that make it. */
const readersOfPlanned = (() => {
  const found = new Map();
  if (frontier) for (const { record, reader } of snapshotAt(frontier.snapshot).kept) found.set(record, reader);
  return found;
})();

const KINDS = { k: "kept", r: "again", o: "away" };

/** What a plan does with what backward needs, as values for `Wiring`. */
function valuesOfPlan(place) {
  const codes = frontier.plans[place];
  const found = [];
  for (let i = 0; i < codes.length; i++) {
    const kind = KINDS[codes[i]];
    if (!kind) continue;
    const record = frontier.tensors.record[i], reader = readersOfPlanned.get(record);
    const row = records.row[record], lane = records.lane[record];
    // what only a plan saves is what other tensors are recomputed from
    const toRow = reader === undefined ? row : records.row[reader];
    const toLane = reader === undefined ? RECOMPUTE_LANE : records.lane[reader];
    found.push({ row, lane, toRow, toLane, bytes: frontier.tensors.bytes[i], kind });
  }
  return found;
}

/** What seconds are made of, explained: no step was timed as a whole. */
const timeSource = () => term(frontier.basis.startsWith("measured") ? "measured ops" : "roofline", frontier.basis);

/** The peak of the program without passes, in bytes; null where plans are of another stage, whose bytes do not compare. */
const baseline = frontier && data.timelines.before && data.snapshots[frontier.snapshot].stage === data.stage ? data.timelines.before.peak_bytes : null;

/** "+3.1 %": seconds on top of those without recomputation. */
function extraText(extra) {
  const share = frontier.seconds ? extra / frontier.seconds : 0;
  return share === 0 ? "+0 %" : share < 0.001 ? "+<0.1 %" : `+${oneDecimal(share * 100)} %`;
}
