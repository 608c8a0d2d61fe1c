"use strict";

// The table: sorted by a click on a heading, filtered by what its rows hold. Rows without a value stay at the end.
const table = document.getElementById("table");
const body = table.tBodies[0];
const rows = [...body.rows];

function sort(heading) {
  const upwards = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of heading.parentNode.cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", upwards ? "ascending" : "descending");
  const value = (row) => row.cells[heading.cellIndex].dataset.value;
  const [known, none] = [rows.filter((row) => value(row) !== undefined), rows.filter((row) => value(row) === undefined)];
  const compare = heading.classList.contains("number") ? (a, b) => a - b : (a, b) => a.localeCompare(b);
  known.sort((a, b) => (upwards ? 1 : -1) * compare(value(a), value(b)));
  body.append(...known, ...none);
}

for (const heading of table.tHead.rows[0].cells) {
  heading.firstElementChild.addEventListener("click", () => sort(heading));
}

function filter(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) {
    const content = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => content.includes(word));
  }
  const left = rows.filter((row) => !row.hidden).length;
  document.getElementById("count").textContent = words.length ? `${left} of ${rows.length} rows` : "";
}

document.getElementById("filter").addEventListener("input", (event) => filter(event.target.value));

// A cue where a table is wider than the page.
function cue() {
  for (const area of document.querySelectorAll(".scroll")) {
    area.previousElementSibling.hidden = area.scrollWidth <= area.clientWidth + 1;
  }
}

new ResizeObserver(cue).observe(document.querySelector("main"));
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", cue);

// The charts: the point nearest to the mouse is marked, and a tip says which it is.
const tip = document.getElementById("tip");
const REACH = 60; // as far as the mouse may be from a point, in the drawing's units

function vertices(path) {
  const numbers = path.getAttribute("d").match(/-?[\d.]+(?:e[-+]?\d+)?/gi).map(Number);
  return numbers.filter((_, i) => i % 2 === 0).map((x, i) => [x, numbers[2 * i + 1]]);
}

function points(series) {
  const path = document.querySelector(`[id="${series.id}"] > path`);
  return vertices(path).map(([x, y], i) => ({ x, y, name: series.name, text: series.points[i], style: path.style }));
}

function nearest(all, at, by) {
  const distance = (p) => Math.hypot(by === "y" ? 0 : p.x - at.x, p.y - at.y);
  const best = all.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  return distance(best) < REACH ? best : null;
}

function place(event) {
  const gap = 14;
  const right = event.clientX + gap + tip.offsetWidth < innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX + gap : event.clientX - gap - tip.offsetWidth)}px`;
  tip.style.top = `${Math.max(4, event.clientY - gap - tip.offsetHeight)}px`;
}

function follow(figure, chart) {
  const drawing = figure.querySelector("svg");
  const all = chart.series.flatMap(points);
  const mark = document.createElementNS(drawing.namespaceURI, "circle");
  mark.setAttribute("class", "mark");
  mark.setAttribute("r", "4.5");
  const leave = () => { tip.hidden = true; mark.remove(); };
  drawing.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(drawing.getScreenCTM().inverse());
    const point = nearest(all, at, chart.by);
    if (!point) return leave();
    mark.setAttribute("cx", point.x);
    mark.setAttribute("cy", point.y);
    mark.style.stroke = point.style.stroke;
    drawing.append(mark);
    const name = document.createElement("b");
    name.textContent = point.name;
    tip.replaceChildren(name, point.text);
    tip.hidden = false;
    place(event);
  });
  drawing.addEventListener("pointerleave", leave);
}

const charts = JSON.parse(document.getElementById("charts").textContent);
for (const [id, chart] of Object.entries(charts)) if (chart.series.length) follow(document.getElementById(id), chart);
