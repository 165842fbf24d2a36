/* What the choices did: maps of the ground, learning rates, batch sizes. */

function mapFigure(course, view) {
  const { x, y, value, minima, log } = course.contours;
  const tone = tones();
  const walked = course.results.filter((result) => result.path);
  const height = log ? value.map((row) => row.map(logarithm)) : value;
  const ground = {
    type: "contour", x, y, z: height, hoverinfo: "skip", showscale: false, autocontour: false, contours: levels(height.flat()),
    colorscale: [[0, tone.strong], [0.6, tone.faint], [1, tone.paper]], line: { color: tone.strong, width: 0.7, smoothing: 1 },
  };
  const start = walked.length ? [walked[0].path[0]] : [];
  const data = [
    ground,
    ...walked.flatMap((result) => trail(result, view)),
    marks(minima, { symbol: "x-thin", size: 13, line: { color: tone.ink, width: 2.5 } }, "minimum"),
    marks(start, { symbol: "circle", size: 12, color: tone.paper, line: { color: tone.ink, width: 2 } }, "start"),
  ];
  return {
    data,
    layout: frame({
      x: { range: [x[0], x[x.length - 1]], showgrid: false, ticks: "" },
      y: { range: [y[0], y[y.length - 1]], showgrid: false, ticks: "" },
      hovermode: "closest",
      uirevision: course.name,
    }),
  };
}

function logarithm(value) {
  return value === null ? null : Math.log10(Math.max(value, LEAST));
}

/** Evenly spaced, from above the lowest ground, which a grid cannot resolve, to the highest. */
function levels(heights) {
  const known = heights.filter((height) => height !== null).sort((a, b) => a - b);
  const [start, end] = [known[Math.floor(known.length * 0.03)], known[known.length - 1]];
  return { start, end, size: (end - start) / 18 || 1 };
}

function trail(result, view) {
  const { colour, dash, ...owner } = belongs(view, result);
  const path = result.path.map((point) => point ?? [null, null]);
  const [x, y] = [path.map((point) => point[0]), path.map((point) => point[1])];
  const last = path.filter((point) => point[0] !== null).slice(-1);
  const said = "%{fullData.name}<br>x %{x:.4~g}, y %{y:.4~g}<extra></extra>";
  return [
    { ...owner, type: "scatter", mode: "lines", x, y, line: { color: colour, width: 2.4, dash }, hovertemplate: said },
    { ...owner, type: "scatter", mode: "markers", x: last.map((point) => point[0]), y: last.map((point) => point[1]),
      marker: { color: colour, size: 10, line: { color: tones().paper, width: 1.5 } }, hovertemplate: `${said.replace("<br>", ", at the end<br>")}` },
  ];
}

function marks(points, marker, name) {
  return { type: "scatter", mode: "markers", name, x: points.map((point) => point[0]), y: points.map((point) => point[1]),
    marker, hovertemplate: `${name}<br>x %{x:.4~g}, y %{y:.4~g}<extra></extra>` };
}

/** Final loss by learning rate, the chosen one ringed; what diverged stands as a cross at the top. */
function sweepFigure(course, view) {
  const shown = course.results.filter((result) => result.sweep && result.sweep.lr.length);
  const floor = liftedFrom(LEAST);
  const seen = shown.filter((result) => !view.hidden.has(result.contestant));
  const range = around(seen.flatMap((result) => result.sweep.loss.map(floor)), true) ?? [-1, 1];
  const top = range[1] + (range[1] - range[0]) * 0.05;
  const lrs = seen.flatMap((result) => result.sweep.lr);
  return {
    data: shown.flatMap((result) => sweepTraces(result, view, floor, 10 ** top)),
    layout: frame({
      x: { title: { text: "learning rate" }, ...logAxis(around(lrs, true)) },
      y: { ...logAxis(range), range: [range[0], top + (range[1] - range[0]) * 0.05] },
      hovermode: "closest",
      uirevision: course.name,
    }),
  };
}

function sweepTraces(result, view, floor, top) {
  const { colour, dash, ...owner } = belongs(view, result);
  const { lr, loss } = result.sweep;
  const chosen = lr.map((rate) => Math.abs(rate - result.lr) <= 1e-9 * Math.abs(rate));
  const failed = lr.filter((_, at) => loss[at] === null);
  return [
    { ...owner, type: "scatter", mode: "lines+markers", x: lr, y: loss.map(floor), customdata: loss.map((value) => number(value)),
      line: { color: colour, width: 2, dash },
      marker: { opacity: 1, color: chosen.map((is) => (is ? tones().paper : colour)), size: chosen.map((is) => (is ? 11 : 6)), line: { color: colour, width: chosen.map((is) => (is ? 3 : 0)) } },
      hovertemplate: "%{fullData.name}<br>lr %{x:.3~g}: <b>%{customdata}</b><extra></extra>" },
    { ...owner, type: "scatter", mode: "markers", x: failed, y: failed.map(() => top), marker: { symbol: "x-thin", size: 8, line: { color: colour, width: 2 } },
      hovertemplate: "%{fullData.name}<br>lr %{x:.3~g}: <b>diverged</b><extra></extra>" },
  ];
}

/** One number at the end of each course of a task, by batch size. */
function batchFigure(courses, view, key, words, log) {
  const names = [...view.contestants.keys()];
  const sizes = courses.map((course) => course.batch_size);
  const data = names.map((name) => batchTrace(name, courses, view, key, words)).filter((trace) => trace.x.length);
  return {
    data,
    layout: frame({
      x: { title: { text: "batch size" }, type: "log", tickmode: "array", tickvals: sizes, ticktext: sizes.map((size) => size.toLocaleString("en")) },
      y: log ? logAxis(around(data.flatMap((trace) => trace.y), true)) : { tickformat: words === percent ? ".1%" : "" },
      hovermode: "x unified",
      hoverdistance: -1,
      uirevision: courses[0].task,
    }),
  };
}

function batchTrace(name, courses, view, key, words) {
  const { colour, dash, ...owner } = belongs(view, { contestant: name });
  const points = courses.flatMap((course) => {
    const result = course.results.find((found) => found.contestant === name);
    return result && result[key] !== null ? [{ size: course.batch_size, value: result[key], low: result[`${key}_low`], high: result[`${key}_high`] }] : [];
  });
  const reach = (end) => points.map((point) => (point[end] === null ? 0 : Math.abs(point[end] - point.value)));
  return {
    ...owner, type: "scatter", mode: "lines+markers", x: points.map((point) => point.size), y: points.map((point) => point.value),
    error_y: { type: "data", symmetric: false, array: reach("high"), arrayminus: reach("low"), color: translucent(colour, 0.5), thickness: 1.5, width: 0 },
    line: { color: colour, width: 2.4, dash }, marker: { color: colour, size: 8 },
    customdata: points.map((point) => words(point.value)),
    hovertemplate: "%{fullData.name} <b>%{customdata}</b><extra></extra>",
  };
}
