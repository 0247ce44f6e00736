// Beside the picture: the facts of the selected op or tensor.

const MOST_LISTED = 60;

/** A record as a link that selects it. */
function recordLink(id) {
  const label = text(records.name[id]);
  return link(label, () => graph.reveal(id), { class: "link code", title: brief(nameOf(id), 300) });
}

/** Links to records, the first ones; further ones at a click. */
function recordList(ids, limit = MOST_LISTED) {
  const list = element("ul", {}, ids.slice(0, limit).map((id) => element("li", {}, recordLink(id), ` ${brief(text(records.op[id]), 60)}`)));
  if (ids.length > limit) {
    const more = link(`and ${countText(ids.length - limit)} more`, () => list.replaceWith(recordList(ids, ids.length)));
    list.append(element("li", {}, more));
  }
  return list;
}

function fact(list, name, ...values) {
  if (!values.length || (values.length === 1 && values[0] === "")) return;
  list.append(element("dt", {}, name), element("dd", {}, ...values));
}

/** The name that was clicked, and of which record; a record has several names, and stays under this one while it is selected. */
const clicked = { id: null, name: "" };

/** The facts of a record, in a snapshot; without one, what to do. */
function showDetails(snapshot, id) {
  const panel = byId("details");
  if (id === null) {
    replaceChildren(panel, element("p", { class: "dim" }, "Click a module to open it, and an op in it to see its shape, bytes, source line and the pass that made it."));
    return;
  }
  const facts = element("dl");
  const phase = data.phases[records.phase[id]];
  const change = CHANGE_NAMES[snapshot.changeOf(id)];
  const title = clicked.id === id ? clicked.name : nameOf(id);
  const names = [...new Set([...namesOf(id), text(records.name[id])])].filter((name) => name !== title);
  fact(facts, "also called", ...names.flatMap((name, i) => [i ? ", " : "", element("span", { class: "code" }, name)]));
  fact(facts, "shares memory with", ...sharedMemory(snapshot, id));
  fact(facts, "call", ...(text(records.call[id]) ? [element("code", {}, ...callPieces(snapshot, id, recordLink))] : [""]));
  fact(facts, "type", element("code", {}, text(records.type[id]) || "no tensor"));
  fact(facts, "bytes", ...bytesFact(id));
  fact(facts, "phase", isInput(id) ? `input: ${text(records.role[id])}` : phase + (text(records.role[id]) ? `, ${text(records.role[id])}` : ""));
  fact(facts, "module", ...(isInput(id) ? [""] : [element("span", { class: "code" }, text(records.module[id]) || "outside of the model's modules")]));
  fact(facts, "source", element("span", { class: "code" }, text(records.source[id]) || "none of the user's lines"));
  fact(facts, "made by", text(records.origin[id]));
  fact(facts, "decision", text(records.policy[id]));
  fact(facts, "changed", change);
  lifeFact(facts, snapshot, id);
  const inputs = [...new Set(snapshot.inputs(id))], users = snapshot.users(id);
  if (inputs.length) fact(facts, `reads (${inputs.length})`, recordList(inputs));
  fact(facts, `users (${users.length})`, users.length ? recordList(users) : "none");
  replaceChildren(panel, element("h3", {}, title), facts);
}

/** The timeline of the program that a snapshot shows, where the page has it. */
const timelineOf = (snapshot) => timelines.find((one) => one.snapshot === snapshot.program);

/** The op that allocates the memory of a tensor, where that is another one. */
function sharedMemory(snapshot, id) {
  const timeline = timelineOf(snapshot);
  if (!timeline) return [];
  const { record, owner } = timeline.given.storages;
  const owners = new Set(record.flatMap((one, i) => (one === id && owner[i] !== id ? [owner[i]] : [])));
  return [...owners].flatMap((one, i) => [i ? ", " : "", recordLink(one)]);
}

function bytesFact(id) {
  const bytes = records.bytes[id];
  if (!text(records.type[id])) return [""];
  if (!bytes) return ["0: a view of another tensor's storage"];
  return [`${bytesText(bytes)} (${countText(bytes)} bytes)`];
}

/** From which op to which a value's storages live, where the timeline of this snapshot is on the page. */
function lifeFact(facts, snapshot, id) {
  const timeline = timelineOf(snapshot);
  if (!timeline) return;
  const { storages } = timeline.given;
  const at = storages.record.includes(id) ? storages.record.indexOf(id) : storages.owner.indexOf(id);
  if (at < 0) return;
  const first = storages.first[at], last = Math.min(storages.last[at], timeline.size - 1);
  const from = first < 0 ? "the start" : `op ${countText(first + 1)}`;
  const until = storages.last[at] >= timeline.size ? "the end" : `op ${countText(last + 1)}`;
  const show = link("show the last moment", () => {
    selectMoment(timeline, Math.max(last, 0));
    byId("memory").scrollIntoView();
  });
  fact(facts, "alive, predicted", `from ${from} to ${until} · `, show);
}

/**
 * Select a record in the picture and bring the picture into view.
 * @param index of the program that it is in; a picture that shows this program already stays
 * @param id the record
 * @param name what was clicked, where that is one of several names
 */
function showRecord(index, id, name = null) {
  Object.assign(clicked, { id: name === null ? null : id, name });
  if (graph.snapshot.program !== index) showSnapshot(index);
  graph.reveal(id);
  byId("program").scrollIntoView();
}
