// Step time and cost of the fastest configuration on each number of GPUs, asked for when the reader opens it.

import { count, seconds } from "./numbers.js";
import { draw } from "./plot.js";

const box = document.querySelector("[data-scaling]");
const says = box?.querySelector("[role=status]");

const NEAR_CHEAPEST = 1.05;
const device = box?.dataset.device;
const SIZES = ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "data_parallel_size"];

box?.addEventListener("toggle", async () => {
  if (!box.open || says.textContent) return;
  says.textContent = `Ranking configurations on each number of ${device}s …`;
  let scaling;
  try {
    scaling = await points(JSON.parse(document.querySelector("#query-text").textContent));
  } catch (error) {
    says.textContent = error.message;
    return;
  }
  const cheapest = Math.min(...scaling.map((each) => each.gpu_seconds_per_step));
  const near = scaling.filter((each) => each.gpu_seconds_per_step <= NEAR_CHEAPEST * cheapest).map((each) => each.num_gpus);
  const [fewest, fastest] = [near[0], near.at(-1)];
  const alone = scaling.some((each) => each.calibrated) ? "" : " Uncalibrated: no run was measured on this cluster.";
  const gpus = (number) => `${count(number)} ${device}${number === 1 ? "" : "s"}`;
  const advice = !scaling.length ? `No configuration fits on up to this number of ${device}s.`
    : fewest === fastest ? `Cheapest: ${gpus(fewest)}. Any other number costs at least 5% more.`
      : `Cost within 5% of the lowest: ${gpus(fewest)} (fewest) to ${gpus(fastest)} (fastest).`;
  says.textContent = advice + alone;
  const place = box.querySelector(".plot");
  place.hidden = !scaling.length;
  if (scaling.length) draw(place, figure(scaling));
});

// The configuration to try on the cluster's number of GPUs, its half and so on, fewest first. A request each: all in one would
// exceed what a request may cost where a large space is calibrated.
async function points(query) {
  const found = [];
  let cluster = query.cluster;
  for (let number = cluster.num_gpus; number === undefined || Number.isInteger(number); number /= 2) {
    if (number !== undefined) cluster = typeof query.cluster === "string" ? { node_type: query.cluster, num_gpus: number } : { ...query.cluster, num_gpus: number };
    const best = (await ask({ ...query, cluster })).recommendations?.[0];
    if (!best && number === undefined) break;
    number ??= SIZES.reduce((all, name) => all * best.parallel[name], 1);
    const estimate = best?.calibrated_estimate ?? best?.estimate;
    if (estimate) found.unshift({ num_gpus: number, step_s: estimate.time.step_s, cost: estimate.cost, gpu_seconds_per_step: number * estimate.time.step_s, calibrated: Boolean(best.calibrated_estimate) });
  }
  return found;
}

// A problem without `recommendations` where the query is not possible on so few GPUs.
async function ask(query) {
  const response = await fetch("/v1/recommendations?top=1", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(query),
  }).catch(() => null);
  const answer = await response?.json().catch(() => null);
  if (answer && (response.ok || (response.status === 422 && answer.code !== "request_too_costly"))) return answer;
  throw new Error(answer?.detail ?? "The server does not respond.");
}

function figure(scaling) {
  const [x, costs] = [scaling.map((point) => point.num_gpus), scaling.map((point) => point.cost ?? point.gpu_seconds_per_step)];
  const money = scaling[0].cost != null;
  const trace = (name, y, color, text, more = {}) => ({ mode: "both", name, x, y, color, size: 7, text: text.map((each, n) => `${x[n]} ${device}s\n${each}`), ...more });
  const step = scaling.map((point) => point.step_s);
  return {
    traces: [
      trace("Step time", step, "--series-1", step.map(seconds)),
      trace(money ? "Cost of the training" : `${device}-seconds per step`, costs, "--series-2", costs.map((cost) => (money ? `$${count(cost)}` : count(cost))), { right: true }),
    ],
    x: { title: `${device}s`, log: true, ticks: x },
    y: { title: "Step time", log: true, ticks: step, labels: step.map(seconds) },
    right: { title: money ? "Cost, $" : `${device}-seconds per step`, zero: true },
  };
}
