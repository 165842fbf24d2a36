/* The page: what is chosen, and showing it. Words, tables and figures come from Python. */

const report = JSON.parse(document.getElementById("report").textContent);
const view = { course: 0, hidden: new Set(), log: report.log, clock: false, sort: { title: "", ascending: true } };
const TOUCH = matchMedia("(pointer: coarse)").matches; // there a finger on a chart scrolls the page
const NARROW = 700; // pixels; names at the ends of curves find no room, and the chips must do
const CONFIG = {
  displaylogo: false,
  displayModeBar: TOUCH ? false : "hover",
  modeBarButtons: [["toImage", "resetScale2d"]],
  toImageButtonOptions: { format: "svg", filename: "thalweg-race" },
};

const at = (id) => document.getElementById(id);
const tones = () => report.themes[isDark() ? "dark" : "light"];
const pressed = (id, is) => at(id).setAttribute("aria-pressed", String(is));

/** A copy in the colours of the theme; what belongs to an optimizer keeps its name. */
function tinted(figure) {
  const names = tones();
  const tint = (key, value) => (typeof value === "string" && value[0] === "@" && key !== "contestant" && key !== "name"
    ? names[value.slice(1)] ?? value : value);
  return JSON.parse(JSON.stringify(figure), tint);
}

/** A figure in its place; plotly changes what is there rather than draw anew. */
function show(place, figure, config = CONFIG) {
  const { data, layout } = tinted(figure);
  for (const trace of data) trace.visible = !view.hidden.has(trace.contestant);
  const labels = layout.annotations ?? [];
  const shown = labels.filter(({ name }) => !name || (place.clientWidth >= NARROW && !view.hidden.has(name)));
  if (labels.length) layout.margin = { l: 8, r: shown.some(({ name }) => name) ? 96 : 14, t: 22, b: 8 };
  if (figure.follows && data.some((trace) => !trace.visible)) { // the axis follows what is seen
    delete layout.yaxis.range;
    layout.yaxis.autorange = true;
  }
  const family = getComputedStyle(document.body).fontFamily;
  const template = tinted(report.template);
  template.layout.xaxis.fixedrange = template.layout.yaxis.fixedrange = TOUCH;
  Object.assign(template.layout, { dragmode: TOUCH ? false : "zoom" });
  template.layout.font.family = template.layout.hoverlabel.font.family = family;
  const uirevision = [view.course, view.log, view.clock].join(" ");
  Plotly.react(place, data, { ...layout, annotations: shown, template, uirevision }, config);
  const { width, height } = place._fullLayout;
  if (width !== place.clientWidth || height !== place.clientHeight) Plotly.Plots.resize(place);
}

/** Everything on the page that depends on a choice. */
function draw() {
  const { words, figures } = report.courses[view.course];
  for (const [id, text] of Object.entries(words)) at(id).textContent = text;
  for (const [place, name] of Object.keys(report.places).entries()) {
    document.documentElement.style.setProperty(`--tint-${place}`, tones()[place]);
    document.querySelector(`.chip:nth-child(${place + 1})`).setAttribute("aria-pressed", String(!view.hidden.has(name)));
  }
  showTable();
  showChart("map", figures.map);
  drawCurves();
  showChart("sweep", figures.sweep);
  at("batch-pair").hidden = !figures["batch-loss"];
  showChart("batch-loss", figures["batch-loss"]);
  showChart("batch-score", figures["batch-score"]);
  showPanels("update", figures.update);
  showPanels("trust", figures.trust);
}

/** What the switches for the axes change. */
function drawCurves() {
  const { loss, score } = report.courses[view.course].figures;
  const clock = view.clock ? "seconds" : "steps";
  pressed("log", view.log);
  pressed("by-steps", !view.clock);
  pressed("by-seconds", view.clock);
  showChart("loss", loss[`${view.log ? "log" : "linear"} ${clock}`]);
  showChart("score", score?.[clock]);
}

/** A chart with its section, if it has one of its own; what is hidden has no size and is not drawn. */
function showChart(id, figure) {
  const section = at(`${id}-section`);
  if (section) section.hidden = !figure;
  if (figure) show(at(id), figure);
  else Plotly.purge(id);
}

/** One heat map for each optimizer, and the scale that all of them share. */
function showPanels(kind, layers) {
  at(`${kind}-section`).hidden = !layers;
  const panels = at(kind);
  if (panels.dataset.course !== String(view.course)) {
    for (const heat of panels.querySelectorAll(".heat")) Plotly.purge(heat);
    panels.replaceChildren(...(layers?.panels ?? []).map(makePanel));
    panels.dataset.course = view.course;
  }
  if (!layers) return;
  for (const [place, panel] of [...panels.children].entries()) {
    panel.hidden = view.hidden.has(panel.dataset.contestant);
    const drawn = [isDark(), panel.clientWidth].join(" "); // no other choice changes it
    if (panel.hidden || panel.dataset.drawn === drawn) continue;
    panel.dataset.drawn = drawn;
    show(panel.querySelector(".heat"), layers.panels[place], { ...CONFIG, displayModeBar: false }); // it would cover cells
  }
  at(`${kind}-scale`).innerHTML = "<span></span><span class=\"ramp\"></span><span></span>";
  const [low, ramp, high] = at(`${kind}-scale`).children;
  [low.textContent, high.textContent] = layers.scale;
  ramp.style.background = `linear-gradient(90deg, ${report.ramp.join(", ")})`;
}

function makePanel({ contestant, height }) {
  const panel = document.createElement("div");
  panel.className = `panel tint-${report.places[contestant]}`;
  panel.innerHTML = '<h3><span class="dot"></span><span class="name"></span></h3><div class="heat"></div>';
  panel.dataset.contestant = contestant;
  panel.querySelector(".name").textContent = contestant;
  panel.querySelector(".heat").style.height = `${height}px`;
  return panel;
}

function showTable() {
  const table = at("results");
  if (table.dataset.course !== String(view.course)) {
    table.innerHTML = report.courses[view.course].table; // Python has escaped every text in it
    table.dataset.course = view.course;
    for (const button of table.querySelectorAll("thead button")) button.addEventListener("click", () => sortBy(button));
    sortRows(table);
  }
  for (const row of table.tBodies[0].rows) row.classList.toggle("dim", view.hidden.has(row.dataset.contestant));
}

function sortBy(button) {
  const again = view.sort.title === button.textContent;
  const ascending = again ? !view.sort.ascending : button.dataset.best !== "most";
  view.sort = { title: button.textContent, ascending };
  sortRows(at("results"));
}

/** In the order of the column that was asked for, what is missing last; at first as they came: best loss first. */
function sortRows(table) {
  const heads = [...table.tHead.rows[0].cells];
  const place = heads.findIndex((cell) => cell.textContent === view.sort.title);
  for (const [here, cell] of heads.entries()) {
    if (here === place) cell.setAttribute("aria-sort", view.sort.ascending ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  }
  if (place < 0) return;
  const value = (row) => row.cells[place].dataset.value;
  const order = (a, b) => (Number.isNaN(Number(a)) ? a.localeCompare(b) : a - b) * (view.sort.ascending ? 1 : -1);
  const rows = [...table.tBodies[0].rows];
  const known = rows.filter((row) => value(row) !== undefined).sort((a, b) => order(value(a), value(b)));
  table.tBodies[0].append(...known, ...rows.filter((row) => value(row) === undefined));
}

for (const chip of at("chips").children) {
  chip.classList.add(`tint-${report.places[chip.dataset.contestant]}`);
  chip.addEventListener("click", () => {
    const name = chip.dataset.contestant;
    if (!view.hidden.delete(name)) view.hidden.add(name);
    draw();
  });
}
at("course").addEventListener("change", (event) => {
  view.course = event.target.selectedIndex;
  draw();
});
at("log").addEventListener("click", () => {
  view.log = !view.log;
  drawCurves();
});
for (const [id, clock] of [["by-steps", false], ["by-seconds", true]]) {
  at(id).addEventListener("click", () => {
    view.clock = clock;
    drawCurves();
  });
}
let pending = 0;
addEventListener("resize", () => {
  clearTimeout(pending);
  pending = setTimeout(draw, 120);
});
watchTheme(at("dark"), draw);
draw();
