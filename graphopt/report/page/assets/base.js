// Data, small helpers for the document, and how numbers are written.

const data = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);

/** The text behind a number of the data's table. */
const text = (number) => data.strings[number];

const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** A text with everything that is invisible, or turns the order of writing around, written out. */
function visible(value) {
  return String(value).replace(HIDDEN, (c) => (c === "\n" ? c : `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`));
}

/** A visible text of at most `room` characters. */
function brief(value, room) {
  const shown = visible(String(value).slice(0, room + 1));
  return shown.length > room ? `${shown.slice(0, room - 1)}…` : shown;
}

/** An element with attributes and children; texts become text and nothing else. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().map((child) => (child instanceof Node ? child : visible(child))));
  return made;
}

function replaceChildren(parent, ...children) {
  parent.replaceChildren(...children.flat());
}

function link(label, action, attributes = {}) {
  return element("button", { type: "button", class: "link", ...attributes, onclick: action }, label);
}

/** A number with one decimal, ties to even, as Python writes it. */
function oneDecimal(value) {
  const tie = (value * 4) % 2 === 1 || (value * 4) % 2 === -1;
  if (!tie) return value.toFixed(1);
  const low = Math.floor(value * 10);
  return ((low % 2 === 0 ? low : low + 1) / 10).toFixed(1);
}

/** Bytes in powers of ten, such as 67.1 MB; the same text as graphopt.values.format_bytes. */
function bytesText(count) {
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(count) >= factor) return `${oneDecimal(count / factor)} ${unit}`;
  }
  return `${count.toFixed(0)} B`;
}

/** Seconds to three figures. */
function secondsText(seconds) {
  if (seconds === 0) return "0 s";
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    if (seconds * factor >= 1 || unit === "µs") return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
  }
  return "";
}

const grouped = new Intl.NumberFormat("en-US");
const countText = (count) => grouped.format(count);

/** "1 op", "2 ops". */
const plural = (count, what) => `${countText(count)} ${what}${count === 1 ? "" : "s"}`;

/** Numbers from runs of consecutive ones: first, length, first, length, … */
function fromRuns(runs) {
  let total = 0;
  for (let i = 1; i < runs.length; i += 2) total += runs[i];
  const found = new Int32Array(total);
  let at = 0;
  for (let i = 0; i < runs.length; i += 2) {
    for (let step = 0; step < runs[i + 1]; step++) found[at++] = runs[i] + step;
  }
  return found;
}

/** A table's row of cells; `kinds` are the classes of the columns. */
function row(cells, kinds = [], tag = "td") {
  return element("tr", {}, cells.map((cell, i) => element(tag, { class: kinds[i] }, cell)));
}

/** Give each cell the head of its column, for narrow screens, where the cells of a row stand below each other. */
function labelCells(table) {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  for (const line of table.querySelectorAll("tbody tr, tfoot tr")) {
    [...line.cells].forEach((cell, i) => { if (heads[i]) cell.dataset.head = heads[i]; });
  }
  table.classList.add("cards");
  return table;
}

/** The file and line without the folder. */
const shortSource = (source) => source.replace(/^.*[/\\]/, "");

// --- colours --------------------------------------------------------------------------------------------------------

/** The colours in force, from the style sheet. */
const ink = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "panel", "line", "ink", "dim", "mark", "frame", "frame-line", "kept", "kept-ink", "flow", "mono", "sans"]) {
    ink[name] = style.getPropertyValue(`--${name}`).trim();
  }
  ink.phase = data.phases.map((phase) => style.getPropertyValue(`--${phase}`).trim());
  ink.tint = data.phases.map((phase) => style.getPropertyValue(`--${phase}-tint`).trim());
}

/** Give a canvas the pixels that it covers, and return its context in CSS pixels, with width and height. */
function prepareCanvas(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const real = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== real[0] || canvas.height !== real[1]) [canvas.width, canvas.height] = real;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
