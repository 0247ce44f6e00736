// The search: names, ops and modules of the program that is shown; hits are counted, marked and stepped through.

const MOST_FOUND = 50;

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

const finder = { found: [], at: -1 };

function showFound() {
  const list = byId("found");
  const wanted = byId("search").value;
  finder.found = search(graph.snapshot, wanted);
  finder.at = -1;
  graph.matches = new Set(finder.found);
  graph.redraw();
  list.hidden = !wanted.trim();
  const items = finder.found.slice(0, MOST_FOUND).map((id, i) => element(
    "li", { class: i === 0 ? "current" : "" },
    link(`${brief(nameOf(id), 160)}  ·  ${brief(text(records.op[id]), 40)}, ${isInput(id) ? "input" : data.phases[records.phase[id]]}`, () => choose(i)),
  ));
  const total = finder.found.length;
  const more = total > MOST_FOUND ? [element("li", { class: "dim" }, `and ${countText(total - MOST_FOUND)} more: Enter steps through all`)] : [];
  replaceChildren(list, items, total ? more : [element("li", { class: "dim" }, "nothing found")]);
  tellHits();
}

/** "3 of 17" beside the field. */
function tellHits() {
  const total = finder.found.length;
  const shown = !byId("search").value.trim() ? "" : !total ? "no hit" : finder.at < 0 ? plural(total, "hit") : `${countText(finder.at + 1)} of ${countText(total)}`;
  byId("hits").textContent = shown;
}

/** Go to a hit: open what is around it, and bring it to the middle of the picture. */
function choose(index) {
  const total = finder.found.length;
  if (!total) return;
  finder.at = (index + total) % total;
  byId("found").hidden = true;
  graph.reveal(finder.found[finder.at]);
  tellHits();
}

function moveChoice(step) {
  const items = [...byId("found").querySelectorAll("li:not(.dim)")];
  if (!items.length) return;
  byId("found").hidden = false;
  const now = items.findIndex((item) => item.classList.contains("current"));
  items[now]?.classList.remove("current");
  const next = items[(now + step + items.length) % items.length];
  next.classList.add("current");
  next.scrollIntoView({ block: "nearest" });
}

/** The hit that Enter goes to: the one that is marked in the list while that is open, else the next one. */
function nextHit(back) {
  if (!byId("found").hidden && !back) {
    const marked = [...byId("found").querySelectorAll("li:not(.dim)")].findIndex((item) => item.classList.contains("current"));
    if (marked >= 0) return marked;
  }
  return finder.at < 0 && back ? finder.found.length - 1 : finder.at + (back ? -1 : 1);
}

function startSearch() {
  const field = byId("search");
  field.addEventListener("input", showFound);
  field.addEventListener("focus", () => { if (field.value.trim()) byId("found").hidden = false; });
  field.addEventListener("keydown", (event) => {
    const actions = {
      Enter: () => choose(nextHit(event.shiftKey)), ArrowDown: () => moveChoice(1), ArrowUp: () => moveChoice(-1),
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
