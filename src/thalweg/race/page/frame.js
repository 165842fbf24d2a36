/* What all charts have in common. */

const LEAST = 1e-16; // below, a loss counts as 0, which no logarithmic axis can show
const TOUCH = matchMedia("(pointer: coarse)").matches;
const CONFIG = {
  displaylogo: false,
  displayModeBar: TOUCH ? false : "hover",
  modeBarButtons: [["toImage", "resetScale2d"]],
  toImageButtonOptions: { format: "svg", filename: "thalweg-race" },
};

/** A layout in the tones of the page: the data in front, everything else quiet. */
function frame({ x = {}, y = {}, ...rest }) {
  const tone = tones();
  const axis = {
    gridcolor: tone.faint, linecolor: tone.strong, tickfont: { color: tone.quiet, size: 13 }, zeroline: false,
    spikecolor: tone.strong, spikethickness: 1, spikedash: "solid",
    automargin: true, fixedrange: TOUCH, exponentformat: "power", minexponent: 4,
    title: { font: { color: tone.quiet, size: 14 }, standoff: 12 },
  };
  return {
    font: { family: tone.type, size: 14, color: tone.ink },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 8, r: 14, t: 22, b: 8 },
    showlegend: false,
    dragmode: TOUCH ? false : "zoom", // on a phone a finger on a chart scrolls the page
    hoverlabel: {
      bgcolor: tone.paper, bordercolor: tone.strong, align: "left", namelength: -1,
      font: { color: tone.ink, size: 14, family: tone.type },
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: tone.quiet, activecolor: tone.ink },
    xaxis: { ...axis, ...x, title: { ...axis.title, ...x.title } },
    yaxis: { ...axis, ...y, title: { ...axis.title, ...y.title } },
    ...rest,
  };
}

/** One figure on the page; plotly changes what is there rather than draw anew. */
function show(id, figure, config = CONFIG) {
  Plotly.react(id, figure.data, figure.layout, config);
  const chart = typeof id === "string" ? document.getElementById(id) : id;
  const { width, height } = chart._fullLayout;
  if (width !== chart.clientWidth || height !== chart.clientHeight) Plotly.Plots.resize(chart);
}

/** A logarithmic axis with a label for each power of ten, or for every few of them, or plotly's own choice. */
function logAxis(range) {
  const decades = range ? range[1] - range[0] : 0;
  const labels = decades > 1.5 ? { dtick: Math.ceil(decades / 8) } : {};
  // plotly writes powers of ten a quarter larger than other labels
  return { type: "log", tickfont: { color: tones().quiet, size: 11 }, ...labels };
}

/** From the least to the largest with a little air, as an axis wants it; nothing where there is nothing to show. */
function around(values, log) {
  const shown = values.filter((value) => value !== null && Number.isFinite(value) && (!log || value > 0));
  if (!shown.length) return undefined;
  const scaled = log ? shown.map(Math.log10) : shown;
  const low = scaled.reduce((a, b) => Math.min(a, b));
  const high = scaled.reduce((a, b) => Math.max(a, b));
  const air = (high - low) * 0.04 || (log ? 0.5 : Math.abs(high) * 0.1 || 1);
  return [low - air, high + air];
}

/** Whether a course has losses that no logarithmic axis can show. */
function belowZero(course) {
  return course.results.some((result) => [...result.curve.low, ...(result.sweep?.loss ?? [])].some((loss) => loss < 0));
}

/** So many times the largest first loss; as far above it where it is negative. */
function aboveStart(results, times) {
  const starts = results.map((result) => result.curve.loss[0]).filter((start) => start); // neither null nor 0
  return starts.length ? Math.max(...starts.map((start) => start + (times - 1) * Math.abs(start))) : Infinity;
}

/** A number that a logarithmic axis can show. */
function liftedFrom(floor) {
  return (value) => (value === null ? null : Math.max(value, floor));
}

/** Everything a trace needs to belong to a contestant. */
function belongs(view, result) {
  const who = view.contestants.get(result.contestant);
  return {
    contestant: result.contestant, // not plotly's: for whoever asks whose trace this is
    name: plain(result.contestant),
    visible: !view.hidden.has(result.contestant),
    colour: shade(who.colour),
    dash: who.baseline ? "6px,4px" : who.rival ? "9px,3px,2px,3px" : "solid",
  };
}
