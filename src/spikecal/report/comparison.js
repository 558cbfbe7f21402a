const DASHES = ["solid", "dash", "dot", "dashdot"];
const HUES = ["snn", "ann", "flooring", "bad", "inherited", "soft"];
const quality = (net) => net.accuracy ?? net.agreement;
const operations = (net, key) => net.operations.layers.reduce((total, layer) => total + layer[key], 0);
const energyBy = (name) => (net) => net.energy.find((e) => e.constants.name === name).spiking / 1000;
const likely = (net) => (quality(net) * net.images + 1) / (net.images + 2); // an error is not 0 where all were right
const error = (net) => Math.sqrt((likely(net) * (1 - likely(net))) / net.images);
const nets = data.networks;
const labelled = nets.every((net) => net.accuracy !== null);
const AGAINST = [
  ["firing window T", (net) => net.T], ["latency in steps", (net) => net.latency],
  ["synaptic operations", (net) => operations(net, "synaptic_operations")],
  ...nets[0].energy.map((e) => [`nanojoule by ${e.constants.name}`, energyBy(e.constants.name), e.ann]),
];
const recipes = [...new Set(nets.map((net) => net.recipe_title))];
const hue = (i) => color(HUES[i % HUES.length]);

function ann(from, to) {
  const height = nets[0].ann_accuracy;
  return labelled ? [{ x: [from, to], y: [height, height], name: "ANN", mode: "lines", line: { color: color("ink"), dash: "dash" } }] : [];
}

function tradeoff() {
  const [label, value, costs] = AGAINST[$("against").value];
  const traces = recipes.map((recipe, i) => {
    const some = nets.filter((net) => net.recipe_title === recipe).sort((a, b) => value(a) - value(b));
    return {
      x: some.map(value), y: some.map(quality), name: plain(recipe), mode: "lines+markers", marker: { size: 9, color: hue(i) },
      line: { color: hue(i) }, hovertext: some.map((net) => `${plain(net.name)}, T=${net.T}, latency ${net.latency}`), error_y: { type: "data", array: some.map(error), thickness: 1 },
    };
  });
  const xs = nets.map(value);
  const even = Object.entries(costs ?? {}).filter(([name]) => !name.endsWith("-bit")).map(([name, pj]) => [name, Math.log10(pj / 1000)]);
  draw("tradeoff", [...traces, ...ann(Math.min(...xs), Math.max(...xs))], {
    shapes: even.map(([, x]) => ({ type: "line", x0: 10 ** x, x1: 10 ** x, y0: 0, y1: 1, yref: "paper", line: { color: color("bad"), dash: "dot" } })),
    annotations: even.map(([name, x]) => ({ x, y: 1, yref: "paper", text: `${name} ANN`, showarrow: false, textangle: -90, xshift: 9, yanchor: "top" })),
    xaxis: { title: { text: label }, type: "log", ...(label.includes("nanojoule") || label.includes("operations") ? {} : { tickvals: xs }) }, yaxis: { tickformat: ".1%", title: { text: labelled ? "accuracy" : "agreement with the ANN" } },
  });
}

function overTime() {
  const traces = nets.map((net, i) => {
    const y = labelled ? net.accuracy_over_time : net.agreement_over_time;
    const dash = DASHES[nets.slice(0, i).filter((other) => other.recipe_title === net.recipe_title).length % DASHES.length];
    return { x: y.map((_, t) => t + 1), y, name: plain(net.name), mode: "lines", line: { color: hue(recipes.indexOf(net.recipe_title)), dash } };
  });
  draw("time", [...traces, ...ann(1, Math.max(...nets.map((net) => net.latency)))], {
    xaxis: { title: { text: "steps" } }, yaxis: { tickformat: ".0%", rangemode: "tozero" },
  });
}

const COLUMNS = [
  ["network", (net) => net.name], ["recipe", (net) => net.recipe_title], ["T", (net) => net.T], ["latency", (net) => net.latency],
  ["accuracy %", (net) => (net.accuracy === null ? null : 100 * net.accuracy), 1], ["agreement %", (net) => 100 * net.agreement, 1],
  ["synaptic operations", (net) => Math.round(operations(net, "synaptic_operations"))],
  ["multiply-accumulates", (net) => Math.round(operations(net, "multiply_accumulates"))], ["nanojoule", energyBy("45 nm, FP32"), 1],
];

$("title").textContent = data.title;
$("verdict").textContent = data.verdict;
$("command").textContent = data.command;
tiles([["networks", nets.length], ["images", nets[0].images.toLocaleString("en")], ...(labelled ? [["accuracy, ANN", percent(nets[0].ann_accuracy)]] : [])]);
AGAINST.forEach(([name], i) => { element("option", name, $("against")).value = i; });
$("against").onchange = tradeoff;
sortable($("networks"), COLUMNS, nets);
function charts() { tradeoff(); overTime(); }
charts();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts);
