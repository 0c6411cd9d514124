// Numbers formatted as in service/dashboard/formats.py; a test compares the two.

export const ABSENT = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 }); // created once: toLocaleString creates one per number

export function seconds(value) {
  if (value == null) return ABSENT;
  if (value !== 0 && Math.abs(value) < 1e-3) return `${digits(value * 1e6)} µs`;
  return Math.abs(value) < 1 ? `${digits(value * 1e3)} ms` : `${significant(value)} s`;
}

export function count(value) {
  return value == null ? ABSENT : significant(value);
}

export function gib(value) {
  if (!value) return value == null ? ABSENT : "0 GiB";
  return value >= 0.1 * 2 ** 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
}

export function percent(value) {
  if (value == null) return ABSENT;
  const text = (value * 100).toFixed(1);
  return `${text.startsWith("-") ? text.replace("-", "−") : `+${text}`} %`;
}

// Three significant digits without trailing zeros.
function digits(value) {
  return String(Number(value.toPrecision(3)));
}

function significant(value) {
  if (Math.abs(value) >= 99.95 || Number.isInteger(value)) return grouped.format(Math.round(value));
  return Math.abs(value) < 0.01 ? digits(value) : value.toPrecision(3);
}
