/* Numbers as people write them, and names as plotly may be given them. */

const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A few digits; powers of ten for what is very small or very large; a dash for what is not there. */
function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0 || (size >= 1e-3 && size < 1e6)) {
    const rounded = size >= 1000 ? Math.round(value) : Number(value.toPrecision(digits));
    return rounded.toLocaleString("en", { maximumFractionDigits: 10 });
  }
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const power = [...String(Number(exponent))].map((sign) => RAISED[sign] ?? "⁻").join("");
  return Number(mantissa) === 1 ? `10${power}` : `${Number(mantissa)}×10${power}`;
}

function lossWords(loss) {
  return loss === null ? "diverged" : number(loss);
}

function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
}

/** Scores between 0 and 1 are shares of something right. */
function scoreWords(course) {
  const scores = course.results.flatMap((result) => result.curve.score ?? []);
  return scores.every((score) => score === null || (score >= 0 && score <= 1)) ? percent : number;
}

function count(many, one, more = `${one}s`) {
  return `${many.toLocaleString("en")} ${many === 1 ? one : more}`;
}

/** As plain text: plotly reads tags, entities and, between dollars, formulas. */
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
}

/** Long names lose their middle: their ends tell more. */
function shortened(text, most = 26) {
  if (text.length <= most) return text;
  const half = Math.floor((most - 1) / 2);
  return `${text.slice(0, half)}…${text.slice(text.length - half)}`;
}
