// Numbers formatted as in service/dashboard/formats.py; a test compares the two.

export const ABSENT = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 }); // created once: toLocaleString creates one per number

export function seconds(value) {
  if (!value) return value == null ? ABSENT : "0 s";
  const size = Math.abs(value);
  return (value < 0 ? "-" : "") + (
    size < 1e-3 ? `${(size * 1e6).toFixed(0)} µs`
    : size < 1 ? `${(size * 1e3).toFixed(1)} ms`
    : size < 100 ? `${size.toFixed(2)} s`
    : size < 1e3 ? `${size.toFixed(1)} s`
    : size < 2 * 3600 ? `${grouped.format(size)} s`
    : size < 2 * 86400 ? `${(size / 3600).toFixed(1)} h`
    : `${(size / 86400).toFixed(1)} days`
  );
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
  return `${text.startsWith("-") ? text.replace("-", "−") : `+${text}`}%`;
}

// A value of a setting.
export function setting(value) {
  return typeof value === "boolean" ? (value ? "on" : "off") : String(value);
}

function significant(value) {
  if (Math.abs(value) >= 99.95 || Number.isInteger(value)) return grouped.format(Math.round(value));
  return Math.abs(value) < 0.01 ? String(Number(value.toPrecision(3))) : value.toPrecision(3);
}
