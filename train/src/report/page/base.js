// Elements, numbers as text, ticks.

const SVG = "http://www.w3.org/2000/svg";

/** Adds attributes and children. Strings become text, which is never read as HTML. */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== undefined && child !== false));
  return element;
}

/** An HTML element. */
function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An SVG element. */
function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** A small square in a class's colour. */
function swatch(colour) {
  return h("span", { class: `swatch ${colour}` });
}

/** 1234567 as 1,234,567. */
function grouped(value) {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** A value with some digits, without zeros at its end. */
function number(value, digits = 4) {
  if (!Number.isFinite(value)) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e15) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 10 ** digits) return (value < 0 ? "-" : "") + grouped(size);
  const text = value.toPrecision(digits);
  const short = text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  return size >= 1000 ? short.replace(/\B(?=(\d{3})+(\.|$))/, ",") : short;
}

/** A value in the largest unit that leaves it at least 1. */
function scaled(value, base, units, digits = 3) {
  let at = 0;
  while (at + 1 < units.length && Math.abs(value) >= base * 0.9995) {
    value /= base;
    at += 1;
  }
  return `${number(value, Math.abs(value) >= 1000 ? 4 : digits)} ${units[at]}`;
}

const bytes = (value) => scaled(value, 1024, ["bytes", "KiB", "MiB", "GiB", "TiB"]);
const percent = (share) => `${number(100 * share, 3)}\u00a0%`;

/** Milliseconds as a reader wants them. */
function duration(ms) {
  if (ms >= 60000) return `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`;
  if (ms >= 1000) return `${number(ms / 1000, 3)} s`;
  return ms >= 1 || ms === 0 ? `${number(ms, 3)} ms` : `${number(1000 * ms, 3)} µs`;
}

/** Round numbers from `low` to `high`, some `count` of them, at distances of 1, 2 or 5 times a power of `base`. */
function ticks(low, high, count, { whole = false, base = 10 } = {}) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(count, 1);
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const steps = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  let step = power * steps.find((factor) => factor * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const list = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) list.push(at * step);
  return list;
}

/** Ticks for a logarithmic axis. */
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return ticks(low, high, count);
  const factors = decades < 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  const list = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) list.push(tick);
    }
  }
  return list;
}

/** Ticks as text, all with as many decimals as their distance needs. */
function tickText(list) {
  const step = list.length > 1 ? Math.min(...list.slice(1).map((tick, at) => tick - list[at])) : 0;
  const largest = Math.max(...list.map(Math.abs));
  if (largest >= 1e6) return list.map((tick) => scaled(tick, 1000, ["", "K", "M", "G", "T"]).trim());
  if (largest < 0.01) return list.map((tick) => (tick === 0 || Math.abs(tick) < step / 2 ? "0" : tick.toExponential(1).replace(".0e", "e")));
  if (!(step > 0)) return list.map((tick) => number(tick, 3));
  const decimals = Math.max(0, Math.min(9, -Math.floor(Math.log10(step) + 1e-9)));
  return list.map((tick) => (decimals ? tick.toFixed(decimals) : (tick < 0 ? "-" : "") + grouped(Math.abs(tick))));
}

/** The first index whose value is not below `value`, in a sorted list. */
function search(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
