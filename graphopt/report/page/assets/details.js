// Beside the picture: the facts of the selected call, and the search.

const MOST_LISTED = 60;
const MOST_FOUND = 50;

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

/** The facts of a record, in a snapshot; without one, what to do. */
function showDetails(snapshot, id) {
  const panel = byId("details");
  if (id === null) {
    replaceChildren(panel, element("p", { class: "dim" }, "Click a call to see its shape, bytes, source line and origin. Click a module to open or fold it."));
    return;
  }
  const facts = element("dl");
  const phase = data.phases[records.phase[id]];
  const change = CHANGE_NAMES[snapshot.changeOf(id)];
  fact(facts, "names", ...namesOf(id).flatMap((name, i) => (i ? [", ", element("span", { class: "code" }, name)] : [element("span", { class: "code" }, name)])));
  fact(facts, "call", ...(text(records.call[id]) ? [element("code", {}, ...callPieces(snapshot, id, recordLink))] : [""]));
  fact(facts, "type", element("code", {}, text(records.type[id]) || "no tensor"));
  fact(facts, "bytes", ...bytesFact(id));
  fact(facts, "phase", isInput(id) ? `input: ${text(records.role[id])}` : phase + (text(records.role[id]) ? `, ${text(records.role[id])}` : ""));
  fact(facts, "module", ...(isInput(id) ? [""] : [element("span", { class: "code" }, text(records.module[id]) || "outside of the model's modules")]));
  fact(facts, "source", element("span", { class: "code" }, text(records.source[id]) || "none of the user's lines"));
  fact(facts, "origin", text(records.origin[id]));
  fact(facts, "decision", text(records.policy[id]));
  fact(facts, "change on the way to this snapshot", change);
  lifeFact(facts, snapshot, id);
  const inputs = [...new Set(snapshot.inputs(id))], users = snapshot.users(id);
  if (inputs.length) fact(facts, `reads (${inputs.length})`, recordList(inputs));
  fact(facts, `users (${users.length})`, users.length ? recordList(users) : "none");
  replaceChildren(panel, element("h3", {}, text(records.name[id])), facts);
}

function bytesFact(id) {
  const bytes = records.bytes[id];
  if (!text(records.type[id])) return [""];
  if (!bytes) return ["0: a view of another tensor's storage"];
  return [`${bytesText(bytes)} (${countText(bytes)} bytes)`];
}

/** From which call to which a value's storages live, where the timeline of this snapshot is on the page. */
function lifeFact(facts, snapshot, id) {
  const timeline = timelines.find((one) => one.snapshot === snapshot.index);
  if (!timeline) return;
  const { storages } = timeline.given;
  const at = storages.record.indexOf(id);
  if (at < 0) return;
  const first = storages.first[at], last = Math.min(storages.last[at], timeline.size - 1);
  const from = first < 0 ? "the start" : `call ${countText(first + 1)}`;
  const until = storages.last[at] >= timeline.size ? "the end" : `call ${countText(last + 1)}`;
  const show = link("show the last moment", () => {
    selectMoment(timeline, Math.max(last, 0));
    byId("memory").scrollIntoView();
  });
  fact(facts, "alive, predicted", `from ${from} to ${until} · `, show);
}

/** Select a record in the picture and bring the picture into view. */
function showRecord(index, id) {
  showSnapshot(index);
  graph.reveal(id);
  byId("program").scrollIntoView();
}

// --- search -----------------------------------------------------------------------------------------------------------

/** The records of a snapshot whose node name, tensor names, op or module hold a text; the best come first. */
function search(snapshot, wanted) {
  const needle = wanted.trim().toLowerCase();
  if (!needle) return [];
  const found = [];
  for (const id of snapshot.ids) {
    const rank = rankOf(id, needle);
    if (rank) found.push([rank, id]);
  }
  return found.sort((one, other) => one[0] - other[0]).map(([, id]) => id);
}

/** 1 for a name that is the text, 2 for one that starts with it, 3 for one that holds it, 4 for op or module; else 0. */
function rankOf(id, needle) {
  let best = 0;
  for (const name of [text(records.name[id]), ...namesOf(id)]) {
    const at = name.toLowerCase().indexOf(needle);
    if (at < 0) continue;
    const rank = at > 0 ? 3 : name.length === needle.length ? 1 : 2;
    best = best ? Math.min(best, rank) : rank;
  }
  if (best) return best;
  return text(records.op[id]).toLowerCase() === needle || text(records.module[id]).toLowerCase().includes(needle) ? 4 : 0;
}

const finder = { found: [], at: 0 };

function showFound() {
  const list = byId("found");
  const wanted = byId("search").value;
  finder.found = search(graph.snapshot, wanted);
  finder.at = 0;
  graph.matches = new Set(finder.found);
  graph.redraw();
  list.hidden = !wanted.trim();
  const items = finder.found.slice(0, MOST_FOUND).map((id, i) => element(
    "li", { "aria-selected": String(i === 0) },
    link(`${brief(nameOf(id), 160)}  ·  ${brief(text(records.op[id]), 40)}, ${isInput(id) ? "input" : data.phases[records.phase[id]]}`, () => choose(i)),
  ));
  const total = finder.found.length;
  const shown = total > MOST_FOUND ? `the best ${MOST_FOUND} of ${countText(total)}` : total ? `${countText(total)} found` : "nothing found";
  replaceChildren(list, element("li", { class: "dim" }, shown), items);
}

function choose(index) {
  if (finder.found[index] === undefined) return;
  finder.at = index;
  byId("found").hidden = true;
  graph.reveal(finder.found[index]);
}

function moveChoice(step) {
  const items = [...byId("found").querySelectorAll("li[aria-selected]")];
  if (!items.length) return;
  items[finder.at]?.setAttribute("aria-selected", "false");
  finder.at = (finder.at + step + items.length) % items.length;
  items[finder.at].setAttribute("aria-selected", "true");
  items[finder.at].scrollIntoView({ block: "nearest" });
}

function startSearch() {
  const field = byId("search");
  field.addEventListener("input", showFound);
  field.addEventListener("focus", () => { if (field.value.trim()) byId("found").hidden = false; });
  field.addEventListener("keydown", (event) => {
    const actions = {
      Enter: () => choose(finder.at), ArrowDown: () => moveChoice(1), ArrowUp: () => moveChoice(-1),
      Escape: () => { field.value = ""; showFound(); },
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".search")) byId("found").hidden = true;
  });
}
