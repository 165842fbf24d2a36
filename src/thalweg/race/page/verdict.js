/* Who won, in words. */

function verdict(course) {
  const finished = course.results.filter((result) => result.loss !== null);
  if (!course.results.length) return "No run of this course is recorded yet.";
  if (!finished.length) return "Every run of this course diverged.";
  const lowest = least(finished, "loss");
  const ended = `with the least ${course.loss_name}, ${number(lowest.loss)}`;
  const arrived = finished.filter((result) => result.steps_to_target !== null);
  const next = runnerUp(finished, lowest);
  if (course.target === null) return `${lowest.contestant} ended ${ended}${next}.${failures(course)}`;
  const goal = `a ${course.loss_name} of ${number(course.target)}`;
  if (!arrived.length) return `Nobody reached ${goal}. ${lowest.contestant} ended ${ended}.${failures(course)}`;
  const steps = least(arrived, "steps_to_target").steps_to_target;
  const first = arrived.filter((result) => result.steps_to_target === steps);
  const alone = first.length === 1 && first[0] === lowest;
  const end = alone ? `, and ended ${ended}` : `; ${lowest.contestant} ended ${ended}`;
  const won = `${all(first)} reached ${goal} first, in ${count(steps, "step")}`;
  return `${won}${end}.${byTheClock(arrived, first)}${failures(course)}`;
}

function runnerUp(finished, lowest) {
  const others = finished.filter((result) => result !== lowest);
  if (!others.length) return "";
  const next = least(others, "loss");
  return `; ${next.contestant} came next, with ${number(next.loss)}`;
}

/** Fewer steps are not less time: say so where somebody else was faster. */
function byTheClock(arrived, first) {
  const timed = arrived.filter((result) => result.seconds_to_target !== null);
  if (!timed.length) return "";
  const quickest = least(timed, "seconds_to_target");
  if (first.length === 1 && quickest === first[0]) return "";
  return ` By the clock ${quickest.contestant} was first, after ${number(quickest.seconds_to_target)}\u00a0s.`;
}

function failures(course) {
  const failed = course.results.filter((result) => result.loss === null);
  return failed.length ? ` ${all(failed)} diverged.` : "";
}

function all(results) {
  return new Intl.ListFormat("en").format(results.map((result) => result.contestant));
}

function least(results, key) {
  return results.reduce((best, result) => (result[key] < best[key] ? result : best));
}
