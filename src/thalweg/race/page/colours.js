/* Colours: those of the page come from its style, those of the optimizers from the summary. */

/** Viridis, which the colour-blind can read. */
const RAMP = ["#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725"];

function tones() {
  const style = getComputedStyle(document.documentElement);
  const tone = (name) => style.getPropertyValue(`--${name}`).trim();
  return { paper: tone("paper"), raised: tone("raised"), ink: tone("ink"), quiet: tone("quiet"), faint: tone("faint"),
    strong: tone("strong"), type: tone("type"), dark: isDark() };
}

/** A contestant's colour on this page: on dark paper black turns white, and what is dim gets brighter. */
function shade(colour, dark = isDark()) {
  let channels = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  if (channels.some(Number.isNaN)) return colour;
  if (dark && luminance(channels) < 0.05) channels = channels.map((channel) => 255 - channel);
  while (dark && luminance(channels) < 0.2) channels = channels.map((channel) => channel + (255 - channel) * 0.1);
  return `#${channels.map((channel) => Math.round(channel).toString(16).padStart(2, "0")).join("")}`;
}

/** As WCAG defines it: 0 for black, 1 for white. */
function luminance(channels) {
  const [red, green, blue] = channels.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function translucent(colour, alpha) {
  return `${colour}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;
}
