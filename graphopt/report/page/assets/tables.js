// The tables and texts around the picture: passes, diffs, activations, build.

// --- passes -----------------------------------------------------------------------------------------------------------

const NUMERICS = { bitwise: "bitwise: results equal to the last bit", tolerant: "tolerant: equal within the tolerance that the pass states", changes: "changes results" };

function startPasses() {
  const place = byId("passes-table");
  if (!data.passes.length) {
    replaceChildren(place, element("p", { class: "dim" }, data.pipeline ? "The program is shown as these passes left it; what each of them did is not known here." : "No pass ran: the program is shown as it was captured."));
    return;
  }
  const head = ["pass and its options", "stage", "changes", "ops", "peak (predicted)", "took (measured)", "numerics", "notes"];
  const kinds = ["", "", "", "number", "number", "number", "", ""];
  replaceChildren(place, labelCells(element(
    "table", {}, element("thead", {}, row(head, kinds, "th")), element("tbody", {}, data.passes.map((one) => row(passCells(one), kinds))),
  )));
}

function passCells(one) {
  const index = data.snapshots.findIndex((snapshot) => snapshot.pass === data.passes.indexOf(one));
  const name = link(one.name, () => {
    showSnapshot(index);
    byId("program").scrollIntoView();
  });
  const written = one.options.filter(([, , standard]) => !standard).map(([option, value]) => element("div", {}, element("b", {}, `${option}=${value}`)));
  const others = one.options.filter(([, , standard]) => standard).map(([option, value]) => element("div", {}, `${option}=${value}`));
  const folded = others.length ? [element("details", {}, element("summary", {}, plural(others.length, "default option")), ...others)] : [];
  const spec = one.options.length ? [...written, ...folded] : one.spec === one.name ? [] : [one.spec];
  return [
    element("span", {}, element("b", {}, name), element("div", { class: "options" }, ...spec)),
    data.stage_names[one.stage],
    element("span", { class: one.done ? undefined : "warning" }, one.changed),
    one.ops ? difference(one.ops[0], one.ops[1], countText) : "not counted",
    one.peaks[0] === null ? "not counted" : difference(one.peaks[0], one.peaks[1], bytesText),
    secondsText(one.seconds),
    element("span", { title: NUMERICS[one.numerics] }, one.numerics),
    linesCell(one),
  ];
}

/** How many notes of a pass are shown unfolded. */
const MOST_NOTES = 4;

/** "before → after", or one number where they are equal. */
const difference = (before, after, write) => (before === after ? write(before) : `${write(before)} → ${write(after)}`);

function linesCell(one) {
  if (!one.lines.length && !one.tensors.length) return "";
  const isRow = (line) => /\S {2,}\S/.test(line);
  const said = one.lines.filter((line) => line && !isRow(line)), rows = one.lines.filter(isRow);
  const list = (lines) => element("ul", {}, lines.map((line) => element("li", {}, line)));
  const shown = said.length > MOST_NOTES + 1 ? MOST_NOTES : said.length;
  const cell = element("span", {}, shown ? list(said.slice(0, shown)) : "");
  if (shown < said.length) cell.append(element("details", {}, element("summary", {}, plural(said.length - shown, "further note")), list(said.slice(shown))));
  if (rows.length) cell.append(element("details", {}, element("summary", {}, `table of ${plural(rows.length - 1, "row")}`), element("pre", {}, rows.join("\n"))));
  if (one.tensors.length) {
    const names = element("ul", { tabindex: "0", "aria-label": "Tensors" }, one.tensors.map((name) => element("li", { class: "code" }, name)));
    cell.append(element("details", {}, element("summary", {}, `${plural(one.tensors.length, "tensor")} decided about`), names));
  }
  return cell;
}

// --- diffs ------------------------------------------------------------------------------------------------------------

const LINE_KINDS = { "+": "plus", "-": "minus" };

function startDiffs() {
  const place = byId("diffs");
  if (!data.diffs.length) replaceChildren(place, element("p", { class: "dim" }, "There is nothing to compare: no pass ran."));
  else replaceChildren(place, data.diffs.map(diffElement));
}

function diffElement(one) {
  const { stage } = data.snapshots[one.snapshot];
  const lines = one.lines.map(text);
  const summary = element("summary", {}, element("b", {}, brief(one.label, 300)), ` (${data.stage_names[stage]}): ${lines[0]} (peaks predicted)`);
  const box = element("details", {}, summary);
  box.addEventListener("toggle", () => {
    if (!box.open || box.querySelector(".hunks")) return;
    box.append(hunksElement(lines.slice(1)));
    if (!one.cut && !one.rest) return;
    const cut = one.cut ? `${plural(one.cut, "line")} more are left out here.` : "Long lines are cut here.";
    box.append(element("p", { class: "cut" }, cut, ...(one.rest ? [" All of it: ", element("code", {}, one.rest)] : [])));
  });
  return box;
}

/** The hunks of a diff, each folded under its header; a short diff is open. */
function hunksElement(lines) {
  const hunks = [];
  for (const line of lines) {
    if (line.startsWith("@@")) hunks.push({ head: line, lines: [] });
    else if (hunks.length) hunks[hunks.length - 1].lines.push(line);
  }
  const folded = hunks.map((hunk) => hunkElement(hunk));
  const all = element("button", { type: "button" }, "Open all");
  all.addEventListener("click", () => {
    const open = all.textContent === "Open all";
    for (const hunk of folded) hunk.open = open;
    all.textContent = open ? "Fold all" : "Open all";
  });
  if (lines.length <= SHORT_DIFF) for (const hunk of folded) hunk.open = true;
  return element("div", { class: "hunks" }, ...(lines.length <= SHORT_DIFF || !hunks.length ? [] : [all]), ...folded);
}

const SHORT_DIFF = 60;

function hunkElement({ head, lines }) {
  const count = (sign) => lines.filter((line) => line[0] === sign).length;
  const [, where, place] = head.match(/^@@ ?(.*?) ?@@ ?(.*)$/) || ["", "", head];
  const signs = [["+", count("+")], ["−", count("-")]].filter(([, many]) => many).map(([sign, many]) => `${sign}${countText(many)}`).join(" ");
  const box = element("details", { class: "hunk" }, element("summary", {}, element("span", {}, place || where), element("span", { class: "dim" }, place ? ` ${where} · ${signs}` : ` ${signs}`)));
  box.addEventListener("toggle", () => {
    if (box.open && !box.querySelector("pre")) box.append(element("pre", {}, ...lines.map((line) => element("span", { class: LINE_KINDS[line[0]] }, line || " "))));
  });
  return box;
}

// --- activations ------------------------------------------------------------------------------------------------------

const COLUMNS = [
  { head: "tensor", of: (r) => r[0], kind: "name" }, { head: "×", of: (r) => r[1], kind: "number" },
  { head: "type", of: (r) => r[2], kind: "code" }, { head: "saved, baseline", of: (r) => r[3], kind: "number" },
  { head: data.before === data.after ? "saved" : "saved with passes", of: (r) => r[4], kind: "number" }, { head: "strategy", of: (r) => r[5], kind: "" },
  { head: "source", of: (r) => r[6], kind: "code" },
].filter((column) => data.before !== data.after || (column.head !== "saved, baseline" && column.head !== "strategy"));

const sorting = { column: -1, down: true, limit: 200 };

function startActivations() {
  if (!data.activations.length) {
    replaceChildren(byId("activations-table"), element("p", { class: "dim" }, "This program saves nothing for backward."));
    return;
  }
  const sum = (at) => data.activations.reduce((total, one) => total + one[at], 0);
  const both = data.before === data.after ? bytesText(sum(4)) : difference(sum(3), sum(4), bytesText);
  replaceChildren(byId("activations-sum"), `Saved for backward: ${both} in all `, element("span", { class: "tag" }, "predicted"));
  drawActivations();
}

function drawActivations() {
  const rows = [...data.activations];
  if (sorting.column >= 0) {
    const { of } = COLUMNS[sorting.column];
    const order = (one, other) => (of(one) < of(other) ? -1 : of(one) > of(other) ? 1 : 0);
    rows.sort((one, other) => (sorting.down ? -order(one, other) : order(one, other)));
  }
  const kinds = COLUMNS.map((column) => column.kind);
  const body = rows.slice(0, sorting.limit).map((one) => row(COLUMNS.map((column) => activationCell(column, one)), kinds));
  const table = element("table", {}, element("thead", {}, element("tr", {}, COLUMNS.map(sortHead))), element("tbody", {}, body));
  const more = rows.length > sorting.limit ? [link(`and ${countText(rows.length - sorting.limit)} more lines`, () => {
    sorting.limit = rows.length;
    drawActivations();
  })] : [];
  replaceChildren(byId("activations-table"), labelCells(table), ...more);
}

function activationCell(column, one) {
  const value = column.of(one);
  if (column.head.startsWith("saved")) return value ? bytesText(value) : "–";
  if (column.head === "×") return String(value);
  if (column.head !== "tensor") return value;
  const show = () => showRecord(one[4] || data.before === data.after ? data.after : data.before, one[7], one[1] > 1 ? null : value);
  return link(value, show, { title: brief(value, 300) });
}

function sortHead(column, index) {
  const sorted = sorting.column === index;
  const mark = sorted ? (sorting.down ? " ▾" : " ▴") : "";
  const sort = () => {
    Object.assign(sorting, sorted ? { down: !sorting.down } : { column: index, down: column.kind === "number" });
    drawActivations();
  };
  return element(
    "th", { class: column.kind === "number" ? "number" : "", "aria-sort": sorted ? (sorting.down ? "descending" : "ascending") : "none" },
    element("button", { type: "button", onclick: sort }, column.head + mark),
  );
}

// --- build ------------------------------------------------------------------------------------------------------------

function startBuild() {
  const place = byId("build-body");
  const facts = element("dl");
  for (const [name, value] of Object.entries(data.environment)) facts.append(element("dt", {}, name), element("dd", {}, value));
  replaceChildren(place, facts);
  if (data.pipeline) copyable(place, "The passes, as text for passes= and --passes", data.pipeline);
  if (data.command) copyable(place, "This page again", data.command);
  const formats = element("dl");
  for (const { name, suffix, help } of data.formats) {
    formats.append(element("dt", {}, name), element("dd", {}, `${help} (${suffix})`));
  }
  place.append(element("h3", {}, "Other formats, for program.to() and graphopt dump --format"), formats);
}

function copyable(place, title, value) {
  const block = element("pre", {}, value);
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => copy(value, block, button));
  place.append(element("h3", {}, `${title} `, button), block);
}

/** Copy a text; where the browser does not allow it, select it so that Ctrl+C does. */
async function copy(value, block, button) {
  try {
    await navigator.clipboard.writeText(value);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(block);
    button.textContent = "Selected: press Ctrl+C";
  }
}
