// Draws what the selects choose. Data: {runs: [{name, steps, scalars, layers, distributions}], statistics}.
const data = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const chosen = (id) => document.getElementById(id).value;
const fit = { type: "fit-x", contains: "padding" };
const run = () => data.runs.find((r) => r.name === chosen("run"));

function config() {
  const [ink, soft, line] = dark.matches ? ["#ffffff", "#c3c2b7", "#3d3d3a"] : ["#0b0b0b", "#52514e", "#d5d4cf"];
  return {
    background: null, view: { stroke: line }, font: "system-ui, sans-serif",
    axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: line, tickColor: line },
    legend: { labelColor: soft, titleColor: soft, titleLimit: 400 }, title: { color: ink, anchor: "start" },
    header: { labelColor: soft, titleColor: soft },
    range: { category: dark.matches
      ? ["#4b95ee", "#e8703c", "#3fb950", "#d2a8ff", "#f2cc60", "#ff8a80"]
      : ["#2a78d6", "#c85a22", "#1a7f37", "#8250df", "#9a6700", "#b3261e"] },
  };
}

async function draw(id, spec) {
  const options = { actions: false, renderer: "svg", config: config() };
  const width = document.getElementById(id).clientWidth;
  return vegaEmbed("#" + id, { $schema: "https://vega.github.io/schema/vega-lite/v6.json", ...spec(width) }, options);
}

function fill(id, values, words = (v) => v) {
  const select = document.getElementById(id), before = select.value;
  select.replaceChildren(...values.map((v) => new Option(words(v), v)));
  if (values.includes(before)) select.value = before;
}

function losses() {
  const rows = data.runs.flatMap((r) => (r.scalars.loss || []).map((loss, i) => ({ run: r.name, step: r.steps[i], loss })));
  document.getElementById("loss-section").hidden = rows.length === 0;
  if (!rows.length) return;
  const colour = { field: "run", type: "nominal", scale: { domain: data.runs.map((r) => r.name) }, legend: { orient: "bottom", title: null } };
  draw("loss", (width) => ({
    width, autosize: fit, height: 220, data: { values: rows }, mark: { type: "line", tooltip: true },
    encoding: { x: { field: "step", type: "quantitative" }, y: { field: "loss", type: "quantitative", scale: { zero: false } }, color: colour },
  }));
  const first = new Map((data.runs[0].scalars.loss || []).map((loss, i) => [data.runs[0].steps[i], loss]));
  const gaps = rows.filter((r) => r.run !== data.runs[0].name && r.loss !== null && first.get(r.step))
    .map((r) => ({ ...r, gap: r.loss / first.get(r.step) - 1 }));
  if (!gaps.length) return;
  // A mean of a few records on each side; of few records in all it would be one flat line.
  const around = Math.min(5, Math.floor(first.size / 16)), few = first.size <= 40;
  const title = around ? [`gap to ${data.runs[0].name}`, `mean of ${2 * around + 1} records`] : `gap to ${data.runs[0].name}`;
  draw("gap", (width) => ({
    width, autosize: fit, height: 140, data: { values: gaps }, mark: { type: "line", point: few, tooltip: true },
    transform: [{ window: [{ op: "mean", field: "gap", as: "gap" }], frame: [-around, around], sort: [{ field: "step" }], groupby: ["run"] }],
    encoding: { x: { field: "step", type: "quantitative" }, color: colour,
      strokeDash: { condition: { test: "datum.run === " + JSON.stringify(data.noise_floor), value: [4, 4] }, value: [1, 0] },
      y: { field: "gap", type: "quantitative", axis: { format: "+.1%" }, title } },
  }));
}

async function heatmap() {
  const r = run(), tensor = chosen("tensor"), statistic = chosen("statistic"), layers = Object.keys(r.layers);
  const rows = layers.flatMap((layer) => ((r.layers[layer][tensor] || {})[statistic] || [])
    .map((value, i) => ({ layer, step: r.steps[i], value })));
  const result = await draw("heatmap", (width) => ({
    width, autosize: fit, height: 16 * layers.length,
    data: { values: rows }, mark: { type: "rect", tooltip: true },
    encoding: {
      x: { field: "step", type: "ordinal", axis: { labelOverlap: true } }, y: { field: "layer", type: "ordinal", sort: layers, title: null },
      color: { field: "value", type: "quantitative", title: data.statistics[statistic], scale: { scheme: dark.matches ? "viridis" : "blues" }, legend: { orient: "bottom" } },
    },
  }));
  result.view.addEventListener("click", (_, item) => {
    if (!item || !item.datum || !item.datum.layer) return;
    document.getElementById("layer").value = item.datum.layer;
    layer();
  });
}

function layer() {
  const r = run(), name = chosen("layer"), tensors = r.layers[name] || {};
  const rows = Object.entries(tensors).flatMap(([tensor, statistics]) => Object.entries(statistics)
    .flatMap(([statistic, values]) => values.map((value, i) => ({ tensor, statistic: data.statistics[statistic], step: r.steps[i], value }))))
    .filter((row) => row.value !== null);
  // A tensor has one colour; what another recipe would do to it is dashed.
  const parts = (row) => { const [of, label] = row.tensor.split(", "); return { ...row, of, under: label || "as trained" }; };
  const colour = { color: { field: "of", type: "nominal", legend: { orient: "bottom", columns: 2, title: null } },
    strokeDash: { field: "under", type: "nominal", sort: ["as trained"], legend: { orient: "bottom", title: null } } };
  draw("curves", (width) => ({
    data: { values: rows.map(parts) }, columns: Math.max(1, Math.floor(width / 340)),
    facet: { field: "statistic", type: "nominal", title: null, sort: Object.values(data.statistics) },
    spec: { width: Math.min(260, width - 80), height: 120, mark: { type: "line", tooltip: true },
      encoding: { x: { field: "step", type: "quantitative" }, y: { field: "value", type: "quantitative", title: null, scale: { zero: false } }, ...colour } },
    resolve: { scale: { y: "independent" } },
  }));
  for (const [id, title] of [["codes", "Codes of the latest record: 4-bit codes, or exponents of 8-bit floats"], ["scales", "Blocks by the octaves that their scale lies below the largest one"]]) {
    const shares = Object.entries(r.distributions[name] || {}).flatMap(([tensor, found]) => found[id].map((share, bin) => ({ tensor, bin, share })));
    document.getElementById(id).hidden = !shares.some((s) => s.share);
    if (!document.getElementById(id).hidden) draw(id, (width) => ({
      title, width, autosize: fit, height: 140, data: { values: shares.filter((s) => s.share).map(parts) }, mark: { type: "line", point: true, tooltip: true },
      encoding: { x: { field: "bin", type: "quantitative", title: null }, y: { field: "share", type: "quantitative", axis: { format: ".0%" }, title: null }, ...colour },
    }));
  }
}

// Offers what there are numbers of: the statistics of the run, and the tensors and layers that have the chosen one.
function choices() {
  const layers = Object.entries(run().layers);
  const has = (values) => (values || []).some((v) => v !== null);
  const there = Object.keys(data.statistics).filter((s) => layers.some(([, tensors]) => Object.values(tensors).some((t) => has(t[s]))));
  fill("statistic", there, (s) => data.statistics[s]);
  fill("tensor", [...new Set(layers.flatMap(([, tensors]) => Object.keys(tensors).filter((t) => has(tensors[t][chosen("statistic")]))))]);
  fill("layer", layers.map(([name]) => name));
}

function statistics() {
  if (!measured.length) return;
  choices();
  heatmap();
  layer();
}

function everything() {
  losses();
  statistics();
}

const measured = data.runs.filter((r) => Object.keys(r.layers).length);
for (const id of ["every-layer", "one-layer"]) document.getElementById(id).hidden = !measured.length;
fill("run", measured.map((r) => r.name));
document.getElementById("run").addEventListener("change", statistics);
document.getElementById("statistic").addEventListener("change", () => { choices(); heatmap(); });
document.getElementById("tensor").addEventListener("change", heatmap);
document.getElementById("layer").addEventListener("change", layer);
dark.addEventListener("change", everything);
let resized;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(everything, 200); });
everything();
