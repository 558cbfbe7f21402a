const names = data.layers.map((layer) => layer.name);
const PARTS = ["clipping", "flooring", "unevenness", "inherited"];

function overTime() {
  const steps = data.agreement_over_time.map((_, i) => i + 1);
  const line = (y, name, hue, dash) => ({ x: steps, y, name, mode: "lines+markers", line: { color: color(hue), dash } });
  const traces = [];
  if (data.accuracy_over_time.length) {
    traces.push(line(data.accuracy_over_time, "accuracy of the SNN", "snn"));
    traces.push({ ...line(steps.map(() => data.ann_accuracy), "accuracy of the ANN", "ann", "dash"), mode: "lines" });
  }
  traces.push(line(data.agreement_over_time, "same answer as the ANN", "inherited", "dot"));
  draw("time", traces, { xaxis: { title: { text: "steps" } }, yaxis: { tickformat: ".0%", rangemode: "tozero" } });
}

function overWork() {
  const quality = data.accuracy_over_time.length ? data.accuracy_over_time : data.agreement_over_time;
  const last = data.operations_over_time[data.operations_over_time.length - 1];
  const costs = Object.entries(data.energy[$("constants").value].break_even);
  const names = (some) => some.map(([name, x]) => `the ${name} ANN${x > 0 ? " below " + Math.round(x).toLocaleString("en") : ""}`).join(", ");
  const never = costs.filter(([, x]) => x <= 0), sometimes = costs.filter(([, x]) => x > 0);
  $("break-even").textContent = (sometimes.length ? `Synaptic operations that would make it cheaper than the ANN: ${names(sometimes)}. ` : "") +
    (never.length ? `Never cheaper than ${names(never)}: what does not depend on spikes costs more.` : "");
  const even = costs.filter(([, x]) => x > 0 && x < 5 * last);
  const lines = even.map(([, x]) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: color("bad"), dash: "dash" } }));
  const labels = even.map(([name, x]) => ({ x, y: 1, yref: "paper", text: `${name} ANN`, showarrow: false, textangle: -90, xshift: 9, yanchor: "top" }));
  const ann = data.ann_accuracy === null ? [] : [{ x: [0, last], y: [data.ann_accuracy, data.ann_accuracy], mode: "lines",
    line: { color: color("ann"), dash: "dash" }, showlegend: false, hoverinfo: "skip" }];
  draw("work", [...ann, { x: data.operations_over_time, y: quality, mode: "lines+markers", line: { color: color("snn") }, showlegend: false }], {
    shapes: lines, annotations: labels, xaxis: { title: { text: "synaptic operations so far" }, rangemode: "tozero" },
    yaxis: { tickformat: ".0%", rangemode: "tozero" },
  });
}

function layerAxis() {
  return { tickvals: names.map((_, i) => i), ticktext: names.map(plain), tickangle: names.length > 12 ? -60 : 0 };
}

function bars(id, series, layout) {
  const traces = series.map(([name, y, hue, more]) => ({
    type: "bar", x: names.map((_, i) => i), y, name, marker: { color: color(hue) }, hovertext: names.map(plain), ...more,
  }));
  draw(id, traces, { xaxis: layerAxis(), ...layout });
}

function layerCharts() {
  const of = (key) => data.layers.map((layer) => layer[key]);
  const before = data.layers.some((layer) => layer.before !== null) ? [["before calibration", of("before"), "inherited"]] : [];
  bars("errors", [...before, [before.length ? "calibrated" : "error", of("after"), "snn"]], { yaxis: { title: { text: "error" } } });
  bars("parts", PARTS.map((part) => [part, data.layers.map((layer) => layer.parts[part]), part]), {});
  const rates = data.layers.map((layer) => layer.channel_rates);
  const spread = {
    error_y: {
      type: "data", symmetric: false, color: color("soft"), thickness: 1,
      array: data.layers.map((layer, i) => rates[i][4] - layer.firing_rate),
      arrayminus: data.layers.map((layer, i) => layer.firing_rate - rates[i][0]),
    },
  };
  draw("steps", [{
    type: "heatmap", z: data.layers.map((layer) => layer.rates_over_time), x: data.layers[0]?.rates_over_time.map((_, t) => t + 1),
    y: names.map((_, i) => i), colorscale: [[0, color("back")], [1, color("snn")]], hovertemplate: "%{text}<br>step %{x}: %{z:.3f}<extra></extra>",
    text: data.layers.map((layer) => layer.rates_over_time.map(() => plain(layer.name))), colorbar: { thickness: 10 },
  }], { xaxis: { title: { text: "step of the layer" } }, yaxis: { ...layerAxis(), tickangle: 0, autorange: "reversed" } });
  bars("rates", [["firing rate", of("firing_rate"), "snn", spread]], { yaxis: { rangemode: "tozero" }, showlegend: false });
}

function oneLayer() {
  const layer = data.layers[$("layer").value];
  const after = layer.error_over_time, follow = (name, of, more) => ({ x: after.map((e) => e.steps), y: after.map(of), name, mode: "lines+markers", ...more });
  draw("growth", [follow("error", (e) => e.error, { line: { color: color("ink"), width: 3 } }), ...PARTS.map((part) => follow(part, (e) => e.parts[part], { line: { color: color(part) } })),
    follow("1 − correlation", (e) => 1 - e.correlation, { line: { color: color("soft"), dash: "dot" } })], {
    xaxis: { title: { text: `after so many steps of the layer, ${data.profiled} images` }, type: "log", tickvals: after.map((e) => e.steps) }, yaxis: { title: { text: "error" }, rangemode: "tozero" },
  });
  if (data.sample) onImages(layer, layer.raster[$("image").value]);
}

function onImages(layer, [steps, rows]) {
  const centres = layer.edges.slice(1).map((edge, i) => (edge + layer.edges[i]) / 2);
  const bar = (y, name, hue) => ({ type: "bar", x: centres, y, name, opacity: 0.65, marker: { color: color(hue) } });
  const at = (x, hue) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: color(hue), dash: "dash" } });
  const bounds = layer.threshold_min === layer.threshold_max ? [layer.threshold] : [layer.threshold_min, layer.threshold_max];
  draw("histogram", [bar(layer.ann_histogram, "ANN activations", "ann"), bar(layer.snn_histogram, "mean spikes", "snn")], {
    barmode: "overlay", shapes: bounds.map((x) => at(x, "bad")), xaxis: { title: { text: "value (dashed: thresholds)" } },
    yaxis: { type: "log", title: { text: "neurons above zero" } },
  });
  const top = layer.edges[layer.edges.length - 1], height = layer.threshold;
  const inputs = Array.from({ length: 401 }, (_, i) => (i * top) / 400);
  const stairs = inputs.map((x) => Math.min(layer.most * height, (height / data.T) * Math.floor((data.T * x) / height + data.shift)));
  const curve = (y, name, hue) => ({ x: inputs, y, name, mode: "lines", line: { color: color(hue) } });
  draw("response", [curve(inputs, "ANN: ReLU", "ann"), curve(stairs, "neurons: clipped, in whole spikes", "snn")], {
    xaxis: { title: { text: "mean current (at the mean threshold)" } }, yaxis: { title: { text: "mean output" } },
  });
  draw("raster", [{ x: steps, y: rows, mode: "markers", marker: { symbol: "square", size: 4, color: color("snn") } }], {
    xaxis: { title: { text: "step of the layer" }, showgrid: false, range: [0.5, data.T + 0.5] }, yaxis: { title: { text: "neuron (some of " + layer.neurons + ")" } },
  });
}

// -- answers ------------------------------------------------------------------------------------------------------------

const nameOf = (i) => ([undefined, String(i)].includes(data.class_names[i]) ? String(i) : `${i} ${data.class_names[i]}`);

function confusion() {
  const wrong = data.confusion.filter(([label, answer]) => label !== answer);
  $("answers").hidden = !wrong.length;
  if (!wrong.length) return;
  const marker = { symbol: "square", size: wrong.map(([, , n]) => 4 + 2 * Math.min(n, 8)), color: color("bad") };
  const text = wrong.map(([label, answer, n]) => plain(`${nameOf(label)} taken for ${nameOf(answer)}: ${n}`));
  const classes = data.classes > 24 ? {} : { tickvals: [...Array(data.classes).keys()], ticktext: [...Array(data.classes).keys()].map((i) => plain(data.class_names[i] ?? String(i))) };
  const axis = (title, ...range) => ({ title: { text: title, standoff: 8 }, range, automargin: true, ...classes });
  draw("confusion", [{ x: wrong.map((w) => w[1]), y: wrong.map((w) => w[0]), mode: "markers", marker, text, hoverinfo: "text" }], {
    xaxis: axis("answer", -0.5, data.classes - 0.5), yaxis: axis("label", data.classes - 0.5, -0.5),
  });
  const most = [...wrong].sort((a, b) => b[2] - a[2]).slice(0, 12);
  sortable($("mistakes"), [["label", (w) => nameOf(w[0])], ["answer", (w) => nameOf(w[1])], ["images", (w) => w[2]]], most);
}

// -- words and tables ----------------------------------------------------------------------------------------------------

function words() {
  $("title").textContent = data.title;
  $("verdict").textContent = data.verdict;
  for (const line of data.advice) element("li", line, $("advice"));
  $("sample").textContent = data.sample;
  for (const shown of document.querySelectorAll(".pictured")) shown.hidden = !data.sample;
  const facts = [["steps in which a layer fires", `T = ${data.T}`], ...(data.latency > data.T ? [["steps of latency", data.latency]] : []), ["same answer as ANN", percent(data.agreement)]];
  if (data.accuracy !== null) facts.unshift(["accuracy, SNN", percent(data.accuracy)], ["accuracy, ANN", percent(data.ann_accuracy)]);
  tiles([...facts, ["images", data.images.toLocaleString("en")], ["recipe", data.recipe_title]]);
  const error = data.standard_error === null ? "" : ` Standard error of the accuracy: ${(100 * data.standard_error).toFixed(1)} points.`;
  $("time-note").textContent = `Mean output of the steps so far, ${data.images} images.${error}`;
  $("command").textContent = data.command || "sc.write_report(...)";
  $("recipe").textContent = JSON.stringify(data.recipe_json, null, 2);
  $("environment").textContent = Object.entries(data.environment).map(([key, value]) => `${key} ${value}`).join("\n");
}

function energy() {
  const baselines = Object.keys(data.energy[0].ann), head = element("tr", undefined, element("thead", undefined, $("energy")));
  for (const name of ["constants (pJ: MAC, addition, neuron)", "nanojoule", ...baselines.map((b) => `of the ${b} ANN`)]) element("th", name, head);
  const body = element("tbody", undefined, $("energy"));
  for (const row of data.energy) {
    const c = row.constants, line = element("tr", undefined, body);
    const label = `${c.name} (${c.multiply_accumulate}, ${c.accumulate}, ${c.neuron_update})`;
    element("td", label, line).title = c.source;
    element("td", (row.spiking / 1000).toLocaleString("en", { maximumFractionDigits: 1 }), line);
    for (const b of baselines) element("td", row.ratios[b].toFixed(2) + " ×", line);
  }
  const o = data.operations, sum = (key) => o.layers.reduce((total, layer) => total + layer[key], 0);
  const n = (x) => Math.round(x).toLocaleString("en");
  $("energy-note").textContent = `Counted: ${n(sum("synaptic_operations"))} ± ${n(o.synaptic_operations_std)} synaptic operations ` +
    `(${data.totals.spikes_per_synapse.toFixed(2)} per synapse; published break-even points lie at 0.15 to 1.38), ` +
    `${n(sum("multiply_accumulates"))} multiply-accumulates where the input is not binary, ${n(o.neuron_updates)} neuron updates; ` +
    `the ANN has ${n(sum("ann_multiply_accumulates"))} multiply-accumulates. Weights take ${n(o.weight_bytes)} bytes and potentials ` +
    `${n(o.state_bytes)}. These are estimates: memory traffic, which often costs most, is not in them, and the image is taken to be ` +
    "multiplied once, not at every step.";
}

const COLUMNS = [
  ["layer", (l) => l.name], ["neurons", (l) => l.neurons], ["threshold", (l) => l.threshold, 3], ["firing rate", (l) => l.firing_rate, 4],
  ...(data.sample ? [["error before*", (l) => l.before, 4], ["error*", (l) => l.after, 4]] : []), ["error", (l) => l.error, 4], ...PARTS.map((part) => [part, (l) => l.parts[part], 4]),
  ["correlation", (l) => l.correlation, 3], ["silent", (l) => l.dead_share, 3], ["saturated", (l) => l.saturated_share, 3],
];
const order = { column: -1, down: false };

function layerTable() {
  const find = $("find").value.toLowerCase();
  sortable($("layers"), COLUMNS, data.layers.filter((layer) => layer.name.toLowerCase().includes(find)), order);
}

function charts() { overTime(); overWork(); layerCharts(); oneLayer(); confusion(); }

words();
energy();
names.forEach((name, i) => { element("option", name, $("layer")).value = i; });
(data.layers[0]?.raster ?? []).forEach((_, i) => { element("option", i + 1, $("image")).value = i; });
data.energy.forEach((e, i) => { element("option", e.constants.name, $("constants")).value = i; });
$("constants").onchange = overWork;
$("layer").onchange = $("image").onchange = oneLayer;
$("find").oninput = layerTable;
layerTable();
charts();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts);
