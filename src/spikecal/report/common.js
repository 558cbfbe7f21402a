"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const percent = (x) => (100 * x).toFixed(1) + " %";

function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text; // never as markup: names come from files
  if (parent) parent.append(made);
  return made;
}

// -- charts -----------------------------------------------------------------------------------------------------------

// plotly reads a little markup in labels
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

function draw(id, traces, layout) {
  const axis = { gridcolor: color("line"), zerolinecolor: color("line"), automargin: true };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("ink"), size: 13 },
    margin: { l: 55, r: 15, t: 40, b: 45 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, hovermode: "closest",
  };
  const whole = { ...base, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
  Plotly.react(id, traces, whole, { displayModeBar: false, responsive: true });
}

function tiles(entries) {
  for (const [name, value] of entries) {
    const tile = element("div", undefined, $("tiles"));
    tile.className = "tile";
    element("b", value, tile);
    element("span", name, tile).className = "soft";
  }
}

// A table whose columns, [name, value of a row, digits], sort it.
function sortable(table, columns, rows, order = { column: -1, down: false }) {
  table.replaceChildren();
  const head = element("tr", undefined, element("thead", undefined, table));
  columns.forEach(([name], i) => {
    const mark = order.column === i ? (order.down ? " ↓" : " ↑") : "";
    const button = element("button", name + mark, element("th", undefined, head));
    button.onclick = () => {
      Object.assign(order, { column: i, down: order.column === i ? !order.down : i > 0 });
      sortable(table, columns, rows, order);
    };
  });
  const value = order.column < 0 ? () => 0 : columns[order.column][1], sign = order.down ? -1 : 1;
  const sorted = [...rows].sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
  const body = element("tbody", undefined, table);
  for (const row of sorted) {
    const line = element("tr", undefined, body);
    for (const [, of, digits] of columns) {
      const found = of(row);
      element("td", found === null ? "" : digits ? found.toFixed(digits) : found.toLocaleString("en"), line);
    }
  }
}
