/* Light or dark: decided before anything is painted. */

const systemTheme = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = remembered();
applyTheme();

/** As the switch says, or as the system does where it was not used. */
function applyTheme() {
  document.documentElement.dataset.theme = chosenTheme ?? (systemTheme.matches ? "dark" : "light");
}

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

function watchTheme(button, changed) {
  const apply = () => {
    applyTheme();
    button.setAttribute("aria-pressed", String(isDark()));
    changed();
  };
  button.setAttribute("aria-pressed", String(isDark()));
  systemTheme.addEventListener("change", apply);
  button.addEventListener("click", () => {
    chosenTheme = isDark() ? "light" : "dark";
    remember(chosenTheme);
    apply();
  });
}

function remembered() {
  try {
    const theme = localStorage.getItem("thalweg-theme");
    return theme === "dark" || theme === "light" ? theme : null;
  } catch {
    return null; // some browsers give a file no memory
  }
}

function remember(theme) {
  try {
    localStorage.setItem("thalweg-theme", theme);
  } catch {
    // then it lasts until the page is closed
  }
}
