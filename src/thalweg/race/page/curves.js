/* What happened over time: curves of loss and score, and paths on a map. */

function lossFigure(course, view) {
  const seen = course.results.filter((result) => !view.hidden.has(result.contestant));
  const range = lossRange(seen, view.log);
  const lift = liftedFrom(view.log ? leastPositive(course.results) : -Infinity);
  const data = [
    ...course.results.map((result) => band(result, view, lift)),
    ...course.results.map((result) => line(result, view, result.curve.loss, lift, number)),
  ];
  const annotations = endLabels(seen, view, range);
  const layout = timeFrame(course, view, {
    y: view.log ? { ...logAxis(range), range } : { type: "linear", range },
    annotations,
    margin: { l: 8, r: annotations.length ? 96 : 14, t: 22, b: 8 },
  });
  if (course.target !== null) addTarget(layout, course.target, view.log);
  return { data, layout };
}

function scoreFigure(course, view) {
  const words = scoreWords(course);
  const scored = course.results.filter((result) => result.curve.score);
  const data = scored.map((result) => line(result, view, result.curve.score, (value) => value, words));
  const seen = scored.filter((result) => !view.hidden.has(result.contestant));
  const range = around(seen.flatMap((result) => result.curve.score), false);
  return { data, layout: timeFrame(course, view, { y: { range, tickformat: words === percent ? ".0%" : "" } }) };
}

function timeFrame(course, view, { y, ...rest }) {
  const [title, moment] = view.clock ? ["seconds", "%{x:.3~g} s"] : ["steps", "step %{x}"];
  const ends = course.results.flatMap((result) => times(result, view).slice(-1));
  const last = ends.length ? Math.max(...ends) : 1;
  return frame({
    x: { title: { text: title }, range: [0, last], unifiedhovertitle: { text: moment } },
    y,
    hovermode: "x unified",
    hoverdistance: -1, // by the clock no two curves have a point at the same time: take the nearest of each
    uirevision: `${course.name} ${view.log} ${view.clock}`,
    ...rest,
  });
}

function times(result, view) {
  return view.clock ? result.curve.seconds : result.curve.step;
}

/** The mean over seeds. Hovering shows the number itself, even where the axis cannot. */
function line(result, view, values, lift, words) {
  const { colour, dash, ...owner } = belongs(view, result);
  return {
    ...owner, type: "scatter", mode: "lines", x: times(result, view), y: values.map(lift),
    line: { color: colour, width: 2.4, dash }, customdata: values.map((value) => words(value)),
    hovertemplate: "%{fullData.name} <b>%{customdata}</b><extra></extra>",
  };
}

/** From the least to the largest over seeds: one closed shape for each stretch without a gap. */
function band(result, view, lift) {
  const { colour, dash, ...owner } = belongs(view, result);
  const [x, y] = [[], []];
  for (const stretch of stretches(result.curve)) {
    const [time, high, low] = [times(result, view), result.curve.high, result.curve.low];
    const back = stretch.slice().reverse();
    x.push(...stretch.map((at) => time[at]), ...back.map((at) => time[at]), null);
    y.push(...stretch.map((at) => lift(high[at])), ...back.map((at) => lift(low[at])), null);
  }
  return {
    ...owner, type: "scatter", mode: "lines", fill: "toself", x, y, hoverinfo: "skip",
    line: { width: 0 }, fillcolor: translucent(colour, view.dark ? 0.2 : 0.13),
  };
}

/** Where the mean is known: of the rest some seeds have diverged, and a range without them would flatter. */
function stretches(curve) {
  const found = [[]];
  curve.loss.forEach((loss, at) => {
    if (loss === null) found.push([]);
    else found[found.length - 1].push(at);
  });
  return found.filter((stretch) => stretch.length > 1);
}

/** All of what was learned; of what diverged, only the beginning. */
function lossRange(results, log) {
  const values = results.flatMap((result) => [...result.curve.low, ...result.curve.high, ...result.curve.loss]);
  const limit = aboveStart(results, log ? 10 : 1.5);
  const floor = log ? leastPositive(results) : -Infinity;
  return around(values.filter((value) => value !== null && value <= limit).map(liftedFrom(floor)), log);
}

function leastPositive(results) {
  const values = results.flatMap((result) => [...result.curve.low, ...result.curve.loss]);
  const least = values.reduce((a, b) => (b !== null && b > 0 ? Math.min(a, b) : a), Infinity);
  return Math.max(LEAST, least);
}

function addTarget(layout, target, log) {
  const tone = tones();
  layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: target, y1: target, layer: "below",
    line: { color: tone.quiet, width: 1.2, dash: "2px,4px" } }];
  layout.annotations.push({ xref: "paper", x: 0, y: log ? Math.log10(target) : target, text: `target ${number(target)}`,
    showarrow: false, xanchor: "left", yanchor: "bottom", font: { color: tone.quiet, size: 13 } });
}

/** Names beside the ends of the curves, moved apart where they would overlap; on a phone the chips must do. */
function endLabels(results, view, range) {
  const box = document.getElementById("loss").getBoundingClientRect();
  if (!range || box.width < 700) return [];
  const height = box.height - 80;
  const lift = liftedFrom(view.log ? LEAST : -Infinity);
  const ends = results.filter((result) => result.loss !== null).map((result) => {
    const loss = lift(result.curve.loss[result.curve.loss.length - 1] ?? result.loss);
    const y = view.log ? Math.log10(loss) : loss;
    return { result, y, pixel: ((y - range[0]) / (range[1] - range[0])) * height };
  }).sort((a, b) => a.pixel - b.pixel);
  const pixels = spread(ends.map((end) => end.pixel), 18);
  return ends.map(({ result, y, pixel }, index) => ({
    x: times(result, view)[result.curve.step.length - 1], y, yshift: pixels[index] - pixel, xshift: 6, xanchor: "left",
    text: plain(shortened(result.contestant, 14)), showarrow: false,
    font: { color: belongs(view, result).colour, size: 14, weight: 600 },
  }));
}

/** The nearest heights, in the same order from below, with at least that gap between them. */
function spread(heights, gap) {
  const pools = [];
  heights.forEach((height, index) => {
    let pool = { total: height - index * gap, size: 1 };
    while (pools.length && pools[pools.length - 1].total / pools[pools.length - 1].size >= pool.total / pool.size) {
      const below = pools.pop();
      pool = { total: pool.total + below.total, size: pool.size + below.size };
    }
    pools.push(pool);
  });
  const levels = pools.flatMap((pool) => Array(pool.size).fill(pool.total / pool.size));
  return levels.map((level, index) => level + index * gap);
}
