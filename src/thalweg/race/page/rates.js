/* What the choices did: maps of the ground, learning rates, batch sizes. */

const PLACE = "x %{x:.4~g}, y %{y:.4~g}<extra></extra>";

function mapFigure(course, view) {
  const { x, y, value, minima, log } = course.contours;
  const tone = tones();
  const walked = course.results.filter((result) => result.path);
  const height = log ? value.map((row) => row.map(logarithm)) : value;
  const ground = {
    type: "contour", x, y, z: height, hoverinfo: "skip", showscale: false,
    autocontour: false, contours: levels(height.flat()), line: { color: tone.strong, width: 0.7, smoothing: 1 },
    colorscale: [[0, tone.strong], [0.6, tone.faint], [1, tone.paper]],
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
  return [
    { ...owner, type: "scatter", mode: "lines", x, y, line: { color: colour, width: 2.4, dash },
      hovertemplate: `%{fullData.name}<br>${PLACE}` },
    { ...marks(last, { color: colour, size: 10, line: { color: tones().paper, width: 1.5 } }), ...owner,
      hovertemplate: `%{fullData.name}, at the end<br>${PLACE}` },
  ];
}

function marks(points, marker, name) {
  const [x, y] = [points.map((point) => point[0]), points.map((point) => point[1])];
  return { type: "scatter", mode: "markers", name, x, y, marker, hovertemplate: `${name}<br>${PLACE}` };
}

/** Final loss by learning rate, the chosen one ringed; what diverged stands as a cross at the top. */
function sweepFigure(course, view) {
  const shown = course.results.filter((result) => result.sweep && result.sweep.lr.length);
  const seen = shown.filter((result) => !view.hidden.has(result.contestant));
  const worst = aboveStart(course.results, 100); // a finite number, but nothing was learned
  const log = !belowZero(course);
  const lift = (loss) => (loss === null || loss > worst ? null : Math.max(loss, log ? LEAST : -Infinity));
  const range = around(seen.flatMap((result) => result.sweep.loss.map(lift)), log) ?? [-1, 1];
  const air = (range[1] - range[0]) * 0.05;
  const top = range[1] + air;
  return {
    data: shown.flatMap((result) => sweepTraces(result, view, lift, log ? 10 ** top : top)),
    layout: frame({
      x: { title: { text: "learning rate" }, ...logAxis(around(seen.flatMap((result) => result.sweep.lr), true)) },
      y: { ...(log ? logAxis(range) : {}), range: [range[0], range[1] + 2 * air] },
      hovermode: "closest",
      uirevision: course.name,
    }),
  };
}

function sweepTraces(result, view, lift, top) {
  const { colour, dash, ...owner } = belongs(view, result);
  const { lr, loss, stopped } = result.sweep;
  const ringed = (yes, no) => lr.map((rate) => (Math.abs(rate - result.lr) <= 1e-9 * Math.abs(rate) ? yes : no));
  const places = lr.map((_, at) => at);
  const failed = places.filter((at) => lift(loss[at]) === null);
  const early = places.filter((at) => stopped[at] !== null && !failed.includes(at));
  const hovertemplate = "%{fullData.name}<br>lr %{x:.3~g}: <b>%{customdata}</b><extra></extra>";
  return [
    { ...owner, type: "scatter", mode: "lines+markers", x: lr, y: places.map((at) => (stopped[at] === null ? lift(loss[at]) : null)), customdata: loss.map(lossWords),
      line: { color: colour, width: 2, dash }, connectgaps: true, hovertemplate,
      marker: {
        opacity: 1, color: ringed(tones().paper, colour), size: ringed(11, 6),
        line: { color: colour, width: ringed(3, 0) },
      } },
    { ...owner, type: "scatter", mode: "markers", x: failed.map((at) => lr[at]), y: failed.map(() => top),
      customdata: failed.map((at) => lossWords(loss[at])), hovertemplate,
      marker: { symbol: "x-thin", size: 8, line: { color: colour, width: 2 } } },
    { ...owner, type: "scatter", mode: "markers", x: early.map((at) => lr[at]), y: early.map((at) => lift(loss[at])),
      customdata: early.map((at) => `${lossWords(loss[at])}, stopped at step ${stopped[at]}`), hovertemplate,
      marker: { symbol: "circle-open", size: 7, color: colour } },
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
      x: {
        title: { text: "batch size" }, type: "log",
        tickmode: "array", tickvals: sizes, ticktext: sizes.map((size) => size.toLocaleString("en")),
      },
      y: log ? logAxis(around(data.flatMap((trace) => trace.y), true)) : { tickformat: words === percent ? ".1%" : "" },
      hovermode: "x unified",
      hoverdistance: -1,
      uirevision: courses[0].task,
    }),
  };
}

function batchTrace(name, courses, view, key, words) {
  const { colour, dash, ...owner } = belongs(view, { contestant: name });
  const there = courses.filter((course) => (resultOf(name, course)?.[key] ?? null) !== null);
  const results = there.map((course) => resultOf(name, course));
  const reach = (end) => results.map((result) => Math.abs((result[`${key}_${end}`] ?? result[key]) - result[key]));
  return {
    ...owner, type: "scatter", mode: "lines+markers",
    x: there.map((course) => course.batch_size), y: results.map((result) => result[key]),
    error_y: {
      type: "data", symmetric: false, array: reach("high"), arrayminus: reach("low"),
      color: translucent(colour, 0.5), thickness: 1.5, width: 0,
    },
    line: { color: colour, width: 2.4, dash }, marker: { color: colour, size: 8 },
    customdata: results.map((result) => words(result[key])),
    hovertemplate: "%{fullData.name} <b>%{customdata}</b><extra></extra>",
  };
}

function resultOf(name, course) {
  return course.results.find((result) => result.contestant === name);
}
