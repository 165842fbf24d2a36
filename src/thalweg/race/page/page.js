/* The page: what is chosen, and showing it. Words, the table and the figures come from Python. */

const { figures, log } = JSON.parse(document.getElementById("report").textContent);
const view = { log, clock: "step", dark: matchMedia("(prefers-color-scheme: dark)").matches };
const chips = [...document.querySelectorAll(".chip")];
const rows = [...document.querySelectorAll("tbody tr")];
const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isShown = (chip) => chip.getAttribute("aria-pressed") === "true";
const press = (button, is) => button.setAttribute("aria-pressed", String(is));

/** Everything that depends on a choice. */
function draw() {
  document.documentElement.dataset.theme = view.dark ? "dark" : "light";
  const shown = new Set(chips.filter(isShown).map((chip) => chip.dataset.contestant));
  for (const row of rows) row.classList.toggle("dim", !shown.has(row.dataset.contestant));
  for (const [id, is] of [["dark", view.dark], ["log", view.log], ["seconds", view.clock === "seconds"]]) {
    press(document.getElementById(id), is);
  }
  const colours = Object.fromEntries(chips.map((chip, place) => [chip.dataset.contestant, tone(`--tint-${place}`)]));
  if (figures.loss) figures.loss.layout.yaxis.type = view.log ? "log" : "linear";
  for (const [id, figure] of Object.entries(figures)) if (figure) drawFigure(id, figure, shown, colours);
}

/** A figure in the colours of the theme; plotly changes what is there rather than draw anew. */
function drawFigure(id, { data, layout }, shown, colours) {
  const traces = data.map((trace) => {
    const colour = colours[trace.meta.contestant];
    const lines = { ...trace.line, color: colour };
    const marks = { ...trace.marker, color: colour, line: { color: colour, width: 1.5 } };
    const more = { visible: shown.has(trace.meta.contestant), line: lines, marker: marks, fillcolor: `${colour}26` };
    return { ...trace, ...more, x: trace.meta[view.clock] ?? trace.x }; // by steps, by seconds, or by rate
  });
  const axis = {
    gridcolor: tone("--faint"), linecolor: tone("--strong"), showline: true, zeroline: false, automargin: true,
    tickfont: { color: tone("--quiet") },
  };
  const clock = layout.xaxis.title ? {} : { title: { text: view.clock === "step" ? "steps" : "seconds" } };
  const shapes = (layout.shapes ?? []).map((shape) => ({
    ...shape, line: { ...shape.line, color: tone("--quiet") }, label: { ...shape.label, font: { color: tone("--quiet") } },
  }));
  const frame = {
    ...layout, shapes, xaxis: { ...axis, ...clock, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    font: { family: tone("--type"), size: 14, color: tone("--ink") }, showlegend: false, margin: { l: 8, r: 14, t: 22, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: tone("--quiet"), activecolor: tone("--ink") },
    hoverlabel: { bgcolor: tone("--paper"), bordercolor: tone("--strong"), font: { color: tone("--ink") } },
  };
  Plotly.react(id, traces, frame, { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] });
}

for (const chip of chips) chip.addEventListener("click", () => { press(chip, !isShown(chip)); draw(); });
document.getElementById("dark").addEventListener("click", () => { view.dark = !view.dark; draw(); });
document.getElementById("log").addEventListener("click", () => { view.log = !view.log; draw(); });
document.getElementById("seconds").addEventListener("click", () => {
  view.clock = view.clock === "step" ? "seconds" : "step";
  draw();
});
draw();
