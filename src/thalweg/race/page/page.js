/* The page: what is chosen, and everything drawn from it. */

const summary = JSON.parse(document.getElementById("summary").textContent);
const view = {
  course: 0,
  contestants: new Map(summary.contestants.map((contestant) => [contestant.name, contestant])),
  hidden: new Set(),
  log: !summary.courses.some(belowZero),
  clock: false,
  dark: false,
  sort: { title: "", ascending: true },
};

function at(id) {
  return document.getElementById(id);
}

/** Everything on the page that depends on a choice. */
function draw() {
  const course = summary.courses[view.course];
  view.dark = isDark();
  showChips();
  showWords(course);
  showTable(course, view, () => showTable(course, view, draw));
  showChart("map", course.contours !== null, () => mapFigure(course, view));
  drawCurves();
  showChart("sweep", true, () => sweepFigure(course, view));
  showBatches(course);
  showLayers("update", course, view);
  showLayers("trust", course, view);
}

/** What the switches for the axes change. */
function drawCurves() {
  const course = summary.courses[view.course];
  pressed("log", view.log);
  pressed("by-steps", !view.clock);
  pressed("by-seconds", view.clock);
  showChart("loss", true, () => lossFigure(course, view));
  showChart("score", hasScores(course), () => scoreFigure(course, view));
}

function pressed(id, is) {
  at(id).setAttribute("aria-pressed", String(is));
}

/** A chart with its section, if it has one of its own; what is hidden has no size and is not drawn. */
function showChart(id, wanted, figure) {
  const section = at(`${id}-section`);
  if (section) section.hidden = !wanted;
  if (wanted) show(id, figure());
  else Plotly.purge(id);
}

function hasScores(course) {
  return course.score_name !== null && course.results.some((result) => result.curve.score);
}

function showBatches(course) {
  const others = summary.courses.filter((other) => other.task === course.task && other.batch_size !== null);
  const several = new Set(others.map((other) => other.batch_size)).size > 1;
  const courses = others.sort((a, b) => a.batch_size - b.batch_size);
  at("batch-pair").hidden = !several;
  const words = scoreWords(course);
  showChart("batch-loss", several, () => batchFigure(courses, view, "loss", number, !courses.some(belowZero)));
  showChart("batch-score", several && hasScores(course), () => batchFigure(courses, view, "score", words, false));
}

function showWords(course) {
  const several = new Set(summary.courses.map((other) => other.title)).size > 1;
  at("title").textContent = several ? course.title : summary.title;
  at("verdict").textContent = course.verdict;
  at("about").textContent = course.about;
  const seeds = course.seeds.length > 1 ? `mean of ${count(course.seeds.length, "seed")}, and their range` : "one seed";
  const batches = course.batch_size === null ? "" : ` with batches of ${course.batch_size.toLocaleString("en")}`;
  const parameters = course.results.length ? `, ${count(course.results[0].parameters, "parameter")}` : "";
  const size = `${count(course.steps, "step")}${batches}${parameters}`;
  at("results-note").textContent = `${size}; ${seeds}. Each optimizer at the best of its learning rates. ${course.search}`;
  at("loss-title").textContent = course.loss_name;
  const others = summary.contestants.some(({ rival }) => rival) ? " Dashes and dots: other libraries." : "";
  at("loss-note").textContent = `${course.seeds.length > 1
    ? "Mean over seeds, in a band from the least to the largest. Dashed: baselines." : "Dashed: baselines."}${others}`;
  at("score-title").textContent = course.score_name ?? "";
  at("score-note").textContent = "Mean over seeds.";
  at("sweep-note").textContent =
    `Final ${course.loss_name} at each rate. Ringed: the one chosen. Crosses: diverged, or off the chart. `
    + "Hollow: stopped early, with the loss it had. Near the best, in the table: how far apart the rates around it are "
    + `that lose at most ${100 * summary.near}\u00a0% of what it won.`;
  at("batch-loss-title").textContent = `${course.loss_name} by batch size`;
  at("batch-score-title").textContent = `${course.score_name} by batch size`;
}

function showChips() {
  for (const chip of at("chips").children) {
    const { name, colour } = view.contestants.get(chip.dataset.contestant);
    chip.setAttribute("aria-pressed", String(!view.hidden.has(name)));
    chip.style.setProperty("--colour", shade(colour));
  }
}

function makeChips() {
  for (const { name, options } of summary.contestants) {
    const chip = element("button", "", at("chips"), "chip");
    chip.type = "button";
    chip.dataset.contestant = name;
    chip.title = options ?? "";
    element("span", "", chip, "dot");
    element("span", name, chip, "name");
    chip.addEventListener("click", () => {
      if (!view.hidden.delete(name)) view.hidden.add(name);
      draw();
    });
  }
}

function makeCourses() {
  for (const { title, batch_size: size } of summary.courses) {
    element("option", size === null ? title : `${title}, batches of ${size.toLocaleString("en")}`, at("course"));
  }
  at("course-choice").hidden = summary.courses.length < 2;
  at("course").addEventListener("change", (event) => {
    view.course = event.target.selectedIndex;
    draw();
  });
}

function makeSwitches() {
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
}

function sayOnce() {
  at("title").textContent = summary.title;
  at("missing").hidden = !summary.missing;
  at("missing").textContent = `${count(summary.missing, "run is", "runs are")} missing: this was drawn before the end.`;
  at("command").textContent = summary.command;
  const { gpu, cpu, cores, system } = summary.machine; // all missing where no run is recorded
  const made = new Date(summary.made);
  const date = Number.isNaN(made.getTime()) ? summary.made
    : `${made.toLocaleString("en-GB", { dateStyle: "long", timeStyle: "short", timeZone: "UTC" })} UTC`;
  const versions = Object.entries(summary.versions).map(([package_, version]) => `${package_} ${version}`);
  const all = [date, gpu, cpu, cores && count(cores, "core"), system, ...versions];
  at("surroundings").textContent = all.filter(Boolean).join(" · ");
}

let pending = 0;
addEventListener("resize", () => {
  clearTimeout(pending);
  pending = setTimeout(draw, 120);
});
watchTheme(at("dark"), draw);
sayOnce();
makeChips();
makeCourses();
makeSwitches();
draw();
