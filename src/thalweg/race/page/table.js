/* The results in a table that can be sorted. */

function columns(course) {
  const words = scoreWords(course);
  const all = [
    { title: "optimizer", value: (r) => r.contestant },
    { title: "learning rate", value: (r) => r.lr, words: number },
    { title: "near the\u00a0best", value: (r) => r.near && r.near.high / r.near.low, cell: nearWords, best: "most" },
    { title: course.loss_name, value: (r) => r.loss, words: lossWords, best: "least", range: "loss", always: true },
    { title: course.score_name, value: (r) => r.score, words, best: "most", range: "score" },
    { title: "steps to\u00a0target", value: (r) => r.steps_to_target, words: number, best: "least" },
    { title: "time to\u00a0target", value: (r) => r.seconds_to_target, words: seconds, best: "least" },
    { title: "time", value: (r) => r.seconds, words: seconds, best: "least" },
    { title: "state / parameter", value: (r) => r.state_bytes / r.parameters, words: bytes, best: "least" },
    { title: "memory", value: (r) => r.peak_bytes && r.peak_bytes / 1e6, words: (mb) => `${number(mb)}\u00a0MB`, best: "least" },
    { title: "engine", value: (r) => r.engine },
  ];
  const known = (column) => course.results.some((result) => (column.value(result) ?? null) !== null);
  return all.filter((column) => column.title && (column.always || known(column)));
}

/** The rates that lose little, and the factor between them, of which more may lie beyond. */
function nearWords({ near }) {
  return near === null ? "–" : `${near.open ? "≥\u00a0" : ""}${number(near.high / near.low, 2)}×`;
}

function bytes(value) {
  return `${number(value)}\u00a0B`;
}

function seconds(value) {
  return value === null ? "–" : `${number(value)}\u00a0s`;
}

function showTable(course, view, changed) {
  const table = document.getElementById("results");
  const shown = columns(course);
  const focused = [...table.querySelectorAll("thead button")].indexOf(document.activeElement);
  table.replaceChildren(head(shown, view, changed), body(shown, course, view));
  if (focused >= 0) table.querySelectorAll("thead button")[focused]?.focus();
}

function head(shown, view, changed) {
  const row = document.createElement("tr");
  for (const column of shown) {
    const cell = element("th", "", row);
    cell.scope = "col";
    const direction = view.sort.ascending ? "ascending" : "descending";
    if (view.sort.title === column.title) cell.setAttribute("aria-sort", direction);
    const button = element("button", column.title, cell);
    button.type = "button";
    button.addEventListener("click", () => {
      const again = view.sort.title === column.title;
      view.sort = { title: column.title, ascending: again ? !view.sort.ascending : column.best !== "most" };
      changed();
    });
  }
  const made = document.createElement("thead");
  made.append(row);
  return made;
}

function body(shown, course, view) {
  const made = document.createElement("tbody");
  for (const result of sorted(shown, course.results, view.sort)) {
    const row = element("tr", "", made);
    row.dataset.contestant = result.contestant;
    row.classList.toggle("dim", view.hidden.has(result.contestant));
    nameCell(element("th", "", row), result, view);
    for (const column of shown.slice(1)) fill(element("td", "", row), column, result, course);
  }
  return made;
}

function nameCell(cell, result, view) {
  const { baseline, options, given } = view.contestants.get(result.contestant);
  cell.scope = "row";
  cell.style.setProperty("--colour", belongs(view, result).colour);
  const who = element("span", "", cell, "who");
  element("span", "", who, "dot");
  element("span", result.contestant, who, "name");
  const note = element("small", baseline ? ["baseline", given].filter(Boolean).join(": ") : "", cell);
  cell.title = options ?? "";
  if (options && !baseline) note.textContent = options;
}

function fill(cell, column, result, course) {
  const value = column.value(result) ?? null;
  const text = column.cell ? column.cell(result) : column.words ? column.words(value) : value ?? "–";
  cell.classList.toggle("best", isBest(column, result, course.results));
  element(cell.classList.contains("best") ? "b" : "span", text, cell);
  const [low, high] = [result[`${column.range}_low`] ?? null, result[`${column.range}_high`] ?? null];
  if (low === null || high === null || (low === high && value !== null)) return;
  element("small", value === null ? "in some seeds" : `${column.words(low)} to ${column.words(high)}`, cell);
}

/** Best of its column, alone or with others; where all are equal nobody is, and who diverged is never. */
function isBest(column, result, results) {
  const finished = results.filter((other) => other.loss !== null);
  const values = finished.map((other) => column.value(other) ?? null).filter((value) => value !== null);
  if (!column.best || !finished.includes(result) || values.every((value) => value === values[0])) return false;
  return column.value(result) === (column.best === "least" ? Math.min(...values) : Math.max(...values));
}

/** In the order of the column that was asked for, what is missing last; at first as they came: best loss first. */
function sorted(shown, results, { title, ascending }) {
  const column = shown.find((candidate) => candidate.title === title);
  if (!column) return results;
  const present = results.filter((result) => (column.value(result) ?? null) !== null);
  const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b) * (ascending ? 1 : -1);
  present.sort((a, b) => order(column.value(a), column.value(b)));
  return [...present, ...results.filter((result) => !present.includes(result))];
}

/** A new element with this text, at the end of its parent. Text is never read as HTML. */
function element(tag, text, parent, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  parent.append(made);
  return made;
}
