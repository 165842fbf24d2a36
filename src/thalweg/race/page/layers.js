/* Heat maps: one for each optimizer, layers from top to bottom, steps from left to right, one colour scale for all. */

/** Pixels. With more layers than fit, rows get lower and only some are named. */
const [LOWEST, HIGHEST] = [112, 620];

/** Panels for all results that have these numbers. */
function showLayers(kind, course, view) {
  const shown = course.results.filter((result) => result.layers && says(result.layers[kind], kind));
  const section = document.getElementById(`${kind}-section`);
  const panels = document.getElementById(kind);
  section.hidden = !shown.length;
  const range = shown.length ? bulk(shown.flatMap((result) => result.layers[kind].flat())) : null;
  fitPanels(panels, shown.length);
  shown.forEach((result, at) => showPanel(panels.children[at], kind, course, result, range, view));
  if (range) showScale(document.getElementById(`${kind}-scale`), range);
}

/** A trust ratio that is 1 throughout is one that was turned off. */
function says(values, kind) {
  return values !== null && (kind !== "trust" || values.flat().some((value) => value !== 1));
}

function fitPanels(panels, wanted) {
  while (panels.children.length > wanted) {
    Plotly.purge(panels.lastElementChild.querySelector(".heat"));
    panels.lastElementChild.remove();
  }
  while (panels.children.length < wanted) {
    const panel = document.createElement("div");
    panel.className = "panel";
    panel.innerHTML = '<h3><span class="dot"></span><span class="name"></span></h3><div class="heat"></div>';
    panels.append(panel);
  }
}

function showPanel(panel, kind, course, result, range, view) {
  panel.dataset.contestant = result.contestant;
  panel.style.setProperty("--colour", belongs(view, result).colour);
  panel.querySelector(".name").textContent = result.contestant;
  panel.hidden = view.hidden.has(result.contestant);
  if (panel.hidden) return; // what has no size cannot be drawn
  const heat = panel.querySelector(".heat");
  const drawn = [course.name, result.contestant, view.dark, panel.clientWidth].join(" ");
  if (heat.dataset.drawn === drawn) return; // no other choice changes it
  heat.dataset.drawn = drawn;
  heat.style.height = `${Math.min(HIGHEST, Math.max(LOWEST, result.layers.names.length * 26 + 64))}px`;
  show(heat, heatFigure(kind, result, range), { ...CONFIG, displayModeBar: false }); // it would cover cells
}

function heatFigure(kind, result, range) {
  const { names, step } = result.layers;
  const values = result.layers[kind];
  const every = Math.ceil((names.length * 15) / (HIGHEST - 64));
  const named = names.map((_, at) => at).filter((at) => at % every === 0);
  return {
    data: [{
      contestant: result.contestant, name: plain(result.contestant), type: "heatmap",
      x: step, y: names.map((_, at) => at), z: values.map((row) => row.map(order)), customdata: values,
      text: values.map((row, at) => row.map((value) => `${plain(names[at])}<br><b>${number(value)}</b>`)),
      colorscale: RAMP.map((colour, at) => [at / (RAMP.length - 1), colour]),
      zmin: range[0], zmax: range[1], showscale: false,
      hoverongaps: false, hovertemplate: "%{text} at step %{x}<extra></extra>", xgap: 0, ygap: 1,
    }],
    layout: frame({
      x: { title: { text: "steps" }, showgrid: false },
      y: {
        autorange: "reversed", showgrid: false, ticks: "", ticklabelstandoff: 6,
        tickmode: "array", tickvals: named, ticktext: named.map((at) => plain(shortened(names[at]))),
      },
      margin: { l: 8, r: 8, t: 8, b: 8 },
      minreducedheight: 20, // one layer is a chart too
      hovermode: "closest",
    }),
  };
}

/** Colours stand for powers of ten; what has none is left blank. */
function order(value) {
  return value === null || value <= 0 ? null : Math.log10(value);
}

/** From where the colours reach to where: all but the outermost hundredths. */
function bulk(values) {
  const sorted = values.map(order).filter((value) => value !== null).sort((a, b) => a - b);
  if (!sorted.length) return [-1, 1];
  const [low, high] = [sorted[Math.floor(sorted.length * 0.01)], sorted[Math.ceil(sorted.length * 0.99) - 1]];
  return low < high ? [low, high] : [low - 0.5, low + 0.5];
}

function showScale(legend, range) {
  legend.innerHTML = '<span></span><span class="ramp"></span><span></span>';
  const [low, ramp, high] = legend.children;
  low.textContent = number(10 ** range[0], 2);
  high.textContent = number(10 ** range[1], 2);
  ramp.style.background = `linear-gradient(90deg, ${RAMP.join(", ")})`;
}
