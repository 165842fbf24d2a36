/* Who won, in words. */

function verdict(course) {
  const finished = course.results.filter((result) => result.loss !== null);
  if (!course.results.length) return "No run of this course is recorded yet.";
  if (!finished.length) return "Every run of this course diverged.";
  const lowest = finished.reduce((best, result) => (result.loss < best.loss ? result : best));
  const ended = `the least ${course.loss_name}, ${number(lowest.loss)}`;
  if (course.target === null) return `${lowest.contestant} ended with ${ended}${runnerUp(finished, lowest)}.`;

  const goal = `a ${course.loss_name} of ${number(course.target)}`;
  const arrived = course.results.filter((result) => result.steps_to_target !== null);
  if (!arrived.length) return `Nobody reached ${goal}. ${lowest.contestant} ended with ${ended}.`;
  const first = least(arrived, "steps_to_target");
  const also = first === lowest ? " and ended" : `; ${lowest.contestant} ended`;
  return `${first.contestant} reached ${goal} first, in ${count(first.steps_to_target, "step")},${also} with ${ended}.`
    .replace(",;", ";") + byTheClock(arrived, first);
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
  const quickest = timed.length ? least(timed, "seconds_to_target") : first;
  return quickest === first ? "" : ` By the clock ${quickest.contestant} was first, after ${number(quickest.seconds_to_target)} s.`;
}

function least(results, key) {
  return results.reduce((best, result) => (result[key] < best[key] ? result : best));
}
