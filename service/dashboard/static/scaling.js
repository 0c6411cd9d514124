// Step time and cost of the fastest configuration on each number of GPUs, asked for when the reader opens it.

import { count, seconds } from "./numbers.js";
import { draw } from "./plot.js";

const box = document.querySelector("[data-scaling]");
const says = box?.querySelector("[role=status]");

box?.addEventListener("toggle", async () => {
  if (!box.open || says.textContent) return;
  says.textContent = "Ranking the space on each number of GPUs …";
  const response = await fetch("/v1/recommendations?top=1&sensitivity=true", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: document.querySelector("#query-text").textContent,
  }).catch(() => null);
  const answer = response ? await response.json().catch(() => null) : null;
  if (!response?.ok || !answer) {
    says.textContent = answer?.detail ?? "The server does not respond.";
    return;
  }
  const { scaling, fewest_gpus_near_cheapest: fewest, fastest_gpus_near_cheapest: fastest } = answer.sensitivity;
  const alone = answer.recommendations[0]?.calibrated_estimate ? "" : " By the cost model alone: the cluster has no calibration.";
  const gpus = (number) => `${count(number)} GPU${number === 1 ? "" : "s"}`;
  const advice = !scaling.length ? "Nothing fits on any number of GPUs up to the cluster's."
    : fewest === fastest ? `The cheapest: ${gpus(fewest)}; any other number costs over 5 % more.`
      : `The fewest within 5 % of the lowest cost: ${gpus(fewest)}; the fastest for that money: ${gpus(fastest)}.`;
  says.textContent = advice + alone;
  const place = box.querySelector(".plot");
  place.hidden = !scaling.length;
  if (scaling.length) await draw(place, figure(scaling));
});

function figure(scaling) {
  const [x, costs] = [scaling.map((point) => point.num_gpus), scaling.map((point) => point.cost ?? point.gpu_seconds_per_step)];
  const money = scaling[0].cost != null;
  const trace = (name, y, color, text, more = {}) => ({
    type: "scatter", mode: "lines+markers", name, x, y, text, hovertemplate: "%{x} GPUs: %{text}<extra></extra>", line: { color, width: 2 }, marker: { color, size: 7 }, ...more,
  });
  const step = scaling.map((point) => point.step_s);
  return {
    data: [
      trace("Step time", step, "--series-1", step.map(seconds)),
      trace(money ? "Cost of the training" : "GPU-seconds per step", costs, "--series-2", costs.map((cost) => (money ? `$${count(cost)}` : count(cost))), { yaxis: "y2" }),
    ],
    layout: {
      margin: { l: 64, r: 72, t: 16, b: 44 },
      xaxis: { title: "GPUs", type: "log", tickvals: x },
      yaxis: { title: "Step time, s", type: "log" },
      yaxis2: { title: money ? "Cost, $" : "GPU-seconds per step", overlaying: "y", side: "right", rangemode: "tozero", showgrid: false },
    },
  };
}
