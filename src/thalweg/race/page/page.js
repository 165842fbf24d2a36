/* The charts, and what is chosen. Words and the table come from Python. */

const { summary, log, share, baselines } = JSON.parse(document.getElementById("report").textContent);
const view = { log, clock: "step", dark: matchMedia("(prefers-color-scheme: dark)").matches };
const chips = [...document.querySelectorAll(".chip")];
const rows = [...document.querySelectorAll("tbody tr")];
const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isShown = (chip) => chip.getAttribute("aria-pressed") === "true";
const press = (button, is) => button.setAttribute("aria-pressed", String(is));

/** Everything that depends on a choice. */
function draw() {
  document.documentElement.dataset.theme = view.dark ? "dark" : "light";
  const looks = new Map(chips.map((chip, place) => [chip.dataset.contestant, {
    visible: isShown(chip), colour: tone(`--tint-${place}`),
    dash: baselines.includes(chip.dataset.contestant) ? "dash" : "solid",
  }]));
  for (const row of rows) row.classList.toggle("dim", !looks.get(row.dataset.contestant).visible);
  for (const [id, is] of [["dark", view.dark], ["log", view.log], ["seconds", view.clock === "seconds"]]) {
    press(document.getElementById(id), is);
  }
  const results = summary.results.map((result) => ({ ...result, ...looks.get(result.contestant) }));
  const highest = Math.max(...results.map((result) => Math.abs(result.curve.loss[0])));
  const number = { exponentformat: "power" };
  const time = { rangemode: "tozero", title: { text: view.clock === "step" ? "steps" : "seconds" } };
  const sweepScale = log ? "log" : "linear";
  drawFigure("loss", [...results.map(drawBand), ...results.map((result) => drawCurve(result, "loss", ".3~g"))], time,
    { ...number, type: view.log ? "log" : "linear", autorangeoptions: { clipmax: 10 * highest } }, drawTarget());
  drawFigure("score", results.filter((result) => result.curve.score).map(
    (result) => drawCurve(result, "score", share ? ".1%" : ".3~g")), time, { tickformat: share ? ".0%" : "" });
  drawFigure("sweep", results.flatMap(drawSweep), { ...number, type: "log", dtick: 1, title: { text: "learning rate" } },
    { ...number, type: sweepScale, autorangeoptions: { clipmax: 100 * highest } }, { hovermode: "closest" });
}

/** What traces of a contestant have in common. */
function begin({ contestant, visible, colour }, more) {
  return { name: contestant, visible, mode: "lines", ...more, line: { color: colour, width: 2.4, ...more.line } };
}

/** Mean over seeds, by steps or by seconds. */
function drawCurve(result, key, format) {
  const hovertemplate = `%{fullData.name} <b>%{y:${format}}</b><extra></extra>`;
  return begin(result, { x: result.curve[view.clock], y: result.curve[key], hovertemplate, line: { dash: result.dash } });
}

/** From the least to the largest loss of any seed, there and back. */
function drawBand(result) {
  const { [view.clock]: x, low, high } = result.curve;
  const look = { fill: "toself", fillcolor: `${result.colour}26`, hoverinfo: "skip", line: { width: 0 } };
  return begin(result, { x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], ...look });
}

/** Final loss by learning rate: the chosen one ringed, those that were stopped early hollow. */
function drawSweep(result) {
  const points = result.sweep.lr.map((lr, place) => ({ lr, y: result.sweep.loss[place], stopped: result.sweep.stopped[place] }));
  return [false, true].map((early) => {
    const some = points.filter(({ y, stopped }) => y !== null && (stopped !== null) === early);
    const is = (lr, ringed, other) => (lr === result.lr ? ringed : other);
    return begin(result, {
      x: some.map(({ lr }) => lr), y: some.map(({ y }) => y), mode: early ? "markers" : "lines+markers",
      hovertemplate: "%{fullData.name}, lr %{x:.3~g}: <b>%{y:.3~g}</b><extra></extra>", line: { width: 2, dash: result.dash },
      marker: {
        color: result.colour, line: { color: result.colour, width: 1.5 },
        size: early ? 7 : some.map(({ lr }) => is(lr, 13, 6)),
        symbol: early ? "circle-open" : some.map(({ lr }) => is(lr, "circle-open-dot", "circle")),
      },
    });
  });
}

/** A line at the loss that is worth reaching. */
function drawTarget() {
  if (summary.target === null) return {};
  const label = { text: `target ${summary.target}`, textposition: "start", font: { color: tone("--quiet") } };
  const line = { width: 1, dash: "dot", color: tone("--quiet") };
  const place = { xref: "paper", x0: 0, x1: 1, y0: summary.target, y1: summary.target };
  return { shapes: [{ type: "line", layer: "below", ...place, line, label }] };
}

/** A figure in the colours of the theme; plotly changes what is there rather than draw anew. */
function drawFigure(id, traces, xaxis, yaxis, more) {
  const axis = {
    gridcolor: tone("--faint"), linecolor: tone("--strong"), showline: true, zeroline: false, automargin: true,
    tickfont: { color: tone("--quiet") },
  };
  const layout = {
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, hovermode: "x unified", hoverdistance: -1,
    font: { family: tone("--type"), size: 14, color: tone("--ink") }, showlegend: false, margin: { l: 8, r: 14, t: 22, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: tone("--quiet"), activecolor: tone("--ink") },
    hoverlabel: { bgcolor: tone("--paper"), bordercolor: tone("--strong"), font: { color: tone("--ink") } }, ...more,
  };
  Plotly.react(id, traces, layout, { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] });
}

for (const chip of chips) chip.addEventListener("click", () => { press(chip, !isShown(chip)); draw(); });
document.getElementById("dark").addEventListener("click", () => { view.dark = !view.dark; draw(); });
document.getElementById("log").addEventListener("click", () => { view.log = !view.log; draw(); });
document.getElementById("seconds").addEventListener("click", () => {
  view.clock = view.clock === "step" ? "seconds" : "step";
  draw();
});
draw();
