// Curves over steps: loss, learning rate, gradient norm, throughput, MFU and what else a run measured.

/** Steps and values from `[first, distance, count]` runs. A step that was run again counts as it went the last time. */
function decode({ steps, values }) {
  const last = new Map();
  let [sorted, at, before] = [true, 0, -1];
  const all = [];
  for (const [first, by, count] of steps) {
    for (let i = 0; i < count && at < values.length; i += 1, at += 1) {
      const step = first + by * i;
      if (step <= before) sorted = false;
      before = step;
      all.push(step);
    }
  }
  if (sorted) return { x: all, y: all.map((_, i) => values[i] ?? NaN) };
  all.forEach((step, i) => last.set(step, values[i] ?? NaN));
  const x = [...last.keys()].sort((a, b) => a - b);
  return { x, y: x.map((step) => last.get(step)) };
}

/**
 * Each value as a mean over its neighbours of some `span` steps, the nearer the weightier: sums from the left and from the right that fade.
 * Values that a chart would cut off count as its upper end. Gaps stay.
 */
function smoothed({ x, y }, span, most) {
  const [sums, weights] = [new Float64Array(x.length), new Float64Array(x.length)];
  for (const direction of [1, -1]) {
    let [sum, weight, before] = [0, 0, null];
    for (let i = direction > 0 ? 0 : x.length - 1; i >= 0 && i < x.length; i += direction) {
      if (!Number.isFinite(y[i])) continue;
      const fade = before === null ? 0 : Math.exp((-2 * Math.abs(x[i] - before)) / span);
      sum *= fade;
      weight *= fade;
      sums[i] += sum;
      weights[i] += weight;
      const value = Math.min(y[i], most);
      if (direction > 0) {
        sums[i] += value;
        weights[i] += 1;
      }
      sum += value;
      weight += 1;
      before = x[i];
    }
  }
  return { x, y: y.map((value, i) => (Number.isFinite(value) ? sums[i] / weights[i] : NaN)) };
}

/** The indices from `from` to `to` that need drawing: in each pixel column the first, the last and the extremes. */
function visible({ x, y }, from, to, columns) {
  const [low, high] = [Math.max(search(x, from) - 1, 0), Math.min(search(x, to) + 1, x.length)];
  if (high - low <= 4 * columns) return Array.from({ length: high - low }, (_, i) => low + i);
  const list = [];
  const column = (i) => Math.floor(((x[i] - from) / (to - from)) * columns);
  for (let i = low; i < high;) {
    const here = column(i);
    let [end, least, most] = [i, i, i];
    for (; end < high && column(end) === here; end += 1) {
      if (!Number.isFinite(y[end])) continue;
      if (!(y[least] <= y[end])) least = end;
      if (!(y[most] >= y[end])) most = end;
    }
    list.push(...[...new Set([i, least, most, end - 1])].sort((a, b) => a - b));
    i = end;
  }
  return list;
}

/** A path through points, broken where a value is not finite; points that stand alone become dots. */
function path(data, indices, toX, toY) {
  let [line, dots, run] = ["", "", []];
  const flush = () => {
    if (run.length === 1) dots += `M${run[0]}h0`;
    else if (run.length) line += `M${run.join("L")}`;
    run = [];
  };
  for (const i of indices) {
    const y = toY(data.y[i]);
    if (Number.isFinite(y)) run.push(`${toX(data.x[i]).toFixed(1)},${y.toFixed(1)}`);
    else flush();
  }
  flush();
  return { line, dots };
}

/**
 * The range of values to draw. Where all but a few values (2 %, at least one) lie close together, those far above them are cut off, so that
 * one bad step does not flatten the curve.
 */
function rangeOf(values, { zero, log, uncut }) {
  const finite = Float64Array.from(values.filter((v) => Number.isFinite(v) && (!log || v > 0))).sort();
  if (!finite.length) return null;
  let [low, high] = [finite[0], finite[finite.length - 1]];
  if (!log && !uncut && finite.length >= 5) {
    const few = Math.max(1, Math.floor(finite.length * 0.02));
    const usual = finite[finite.length - 1 - few];
    const reach = 10 * Math.max(usual - finite[Math.min(few, finite.length - 1)], 0.05 * Math.abs(usual));
    if (high > usual + reach) high = finite[search(finite, usual + reach) - 1];
  }
  const top = finite[finite.length - 1];
  if (zero && low > 0 && !log) low = 0;
  if (log) {
    const room = Math.max((high / low) ** 0.05, 1.05);
    return { low: low / room, high: high * room, top, cut: false };
  }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return { low: zero && low === 0 ? 0 : low - room, high: high + room, top, cut: high < top };
}

const MARKS = {
  checkpoint: ["c7", "checkpoint"],
  resumed: ["c1", "resumed"],
  skipped: ["c5", "step skipped"],
  rolled_back: ["c2", "rolled back"],
  failed: ["c2", "failed"],
  early_stop: ["c4", "stopped early"],
  other: ["c8", "event"],
};

/** One chart: its head, its readout and its frame. */
class Curve {
  constructor(options, view, marks) {
    this.options = options;
    this.marks = marks;
    this.logarithmic = false;
    this.span = 1;
    this.series = options.series.map(([name, series, colour]) => ({ name, colour, data: decode(series), raw: null }));
    this.readout = h("div", { class: "readout" });
    this.note = h("p", { class: "note" });
    const wide = options.wide;
    this.frame = new Frame({
      view,
      readout: this.readout,
      label: options.title,
      margin: [10, 12, 34, 62],
      height: (width) => (wide ? Math.round(Math.min(Math.max(width * 0.36, 240), 380)) : 190),
      draw: (frame, inside) => this.draw(frame, inside),
      hover: (at) => this.tell(at),
      next: (at, direction) => this.next(at, direction),
    });
    const positive = this.series.some(({ data }) => data.y.some((v) => v > 0));
    const head = h("div", { class: "chart-head" },
      h("h3", {}, options.title, " ", h("span", { class: "unit" }, options.unit ?? "")),
      options.log && positive && this.logToggle());
    this.element = h("figure", { class: wide ? "chart wide" : "chart", style: "margin: 0" }, head, this.readout, this.frame.element, this.note);
  }

  logToggle() {
    const box = h("input", { type: "checkbox" });
    box.addEventListener("change", () => {
      this.logarithmic = box.checked;
      this.frame.render();
    });
    return h("label", {}, box, "Log scale");
  }

  /** Smooths over so many steps; 1 shows values as they are. What was measured rarely stays. */
  smooth(span) {
    if (!this.options.smooth || span === this.span) return;
    this.span = span;
    for (const series of this.series) {
      if (series.name === "validation") continue;
      series.raw ??= series.data;
      const most = rangeOf(series.raw.y, this.options)?.high ?? Infinity;
      series.data = span > 1 ? smoothed(series.raw, span, most) : series.raw;
    }
    this.frame.render();
  }

  /** The step after `at` that has a value. */
  next(at, direction) {
    const { x } = this.series.reduce((a, b) => (b.data.x.length > a.data.x.length ? b : a)).data;
    const here = search(x, at);
    const index = direction < 0 ? here - 1 : here + (x[here] === at ? 1 : 0);
    return x[Math.min(Math.max(index, 0), x.length - 1)];
  }

  format(value) {
    return this.options.percent && Number.isFinite(value) ? percent(value) : number(value);
  }

  draw(frame, inside) {
    const [from, to] = frame.view.shown;
    const columns = Math.max(Math.floor(frame.right - frame.left), 1);
    const shown = this.series.map((series) => visible(series.data, from, to, columns));
    const within = ({ x, y }) => [...y.slice(search(x, from), search(x, to + 1e-9)), between({ x, y }, from), between({ x, y }, to)];
    const values = this.series.flatMap(({ data, raw }) => within(this.span > 1 && raw ? raw : data));
    const range = rangeOf(values, { ...this.options, log: this.logarithmic });
    frame.axis("step", true);
    const scale = this.logarithmic ? Math.log : (v) => v;
    const [low, high] = range ? [scale(range.low), scale(range.high)] : [0, 1];
    const y = (value) => frame.bottom - ((scale(value) - low) / (high - low)) * (frame.bottom - frame.top);
    if (range) this.levels(frame, range, y);
    frame.svg.append(s("path", { class: "frame", d: `M${frame.left},${frame.top}V${frame.bottom}H${frame.right}` }));
    this.drawMarks(frame, inside);
    this.series.forEach((series, i) => {
      if (this.span > 1 && series.raw) {
        const faint = path(series.raw, visible(series.raw, from, to, columns), (v) => frame.x(v), y);
        inside.append(s("path", { class: `curve faint ${series.colour}`, d: faint.line }));
      }
      const { line, dots } = path(series.data, shown[i], (v) => frame.x(v), y);
      inside.append(s("path", { class: `curve ${series.colour}`, d: line }));
      inside.append(s("path", { class: `dots ${series.colour}`, d: dots }));
      if (series.data.x.length <= 80 && series.data.x.length > 1) this.drawPoints(inside, series, shown[i], frame, y);
    });
    const gaps = this.drawGaps(frame, inside, from, to);
    this.note.textContent = [...this.cutNote(frame, inside, range, from, to), ...gaps].join(" ");
    this.summarise(frame);
  }

  levels(frame, range, y) {
    const count = Math.max(2, (frame.bottom - frame.top) / 34);
    const unit = this.options.percent ? 100 : 1;
    const list = (this.logarithmic ? logTicks : ticks)(range.low * unit, range.high * unit, count);
    const texts = this.logarithmic ? list.map((tick) => number(tick, 3)) : tickText(list);
    frame.levels(list.map((tick) => tick / unit), texts.map((text) => text + (unit > 1 ? " %" : "")), y);
  }

  /** Dots on a curve of few points, so that one sees where it was measured. */
  drawPoints(inside, { data, colour }, indices, frame, y) {
    const points = indices.filter((i) => Number.isFinite(y(data.y[i])));
    const d = points.map((i) => `M${frame.x(data.x[i]).toFixed(1)},${y(data.y[i]).toFixed(1)}h0`).join("");
    inside.append(s("path", { class: `dots ${colour}`, d }));
  }

  drawMarks(frame, inside) {
    const [from, to] = frame.view.shown;
    let before = {};
    for (const { step, kind } of this.marks) {
      if (step < from || step > to) continue;
      const x = Math.round(frame.x(step));
      if (before[kind] === x) continue;
      before[kind] = x;
      const colour = MARKS[kind][0];
      inside.append(s("line", { class: `mark ${colour}`, x1: x, x2: x, y1: frame.top, y2: frame.bottom }));
      inside.append(s("path", { class: `mark-head ${colour}`, d: `M${x - 3.5},${frame.top}h7l-3.5,6z` }));
    }
  }

  /** Crosses at the bottom where a value was not finite, and a sentence on them. */
  drawGaps(frame, inside, from, to) {
    const notes = [];
    for (const { name, colour, data: now, raw } of this.series) {
      const data = raw ?? now;
      const lost = [];
      for (let i = search(data.x, from); i < data.x.length && data.x[i] <= to; i += 1) {
        if (!Number.isFinite(data.y[i]) || (this.logarithmic && data.y[i] <= 0)) lost.push(data.x[i]);
      }
      if (!lost.length) continue;
      const places = [...new Set(lost.map((step) => Math.round(frame.x(step))))];
      const bottom = frame.bottom - 5;
      const d = places.map((x) => `M${x - 3},${bottom - 3}l6,6m0,-6l-6,6`).join("");
      inside.append(s("path", { class: `lost ${colour}`, d }));
      const steps = lost.slice(0, 5).map(grouped).join(", ") + (lost.length > 5 ? " and more" : "");
      const kind = this.logarithmic ? "positive and finite" : "finite";
      const curve = name ? name[0].toUpperCase() + name.slice(1) : this.options.title;
      notes.push(`${curve}: no ${kind} value at ${lost.length === 1 ? "step" : `${grouped(lost.length)} steps:`} ${steps}.`);
    }
    return notes;
  }

  /** Arrows at the top where values are cut off, and a sentence on them. */
  cutNote(frame, inside, range, from, to) {
    if (!range?.cut) return [];
    let [count, where, d, drawn] = [0, 0, "", new Set()];
    for (const { data: now, raw } of this.series) {
      const data = raw ?? now;
      for (let i = search(data.x, from); i < data.x.length && data.x[i] <= to; i += 1) {
        if (!(data.y[i] > range.high) || !Number.isFinite(data.y[i])) continue;
        count += 1;
        if (data.y[i] === range.top) where = data.x[i];
        const x = Math.round(frame.x(data.x[i]));
        if (!drawn.has(x)) d += `M${x},${frame.top}l4,7h-8z`;
        drawn.add(x);
      }
    }
    inside.append(s("path", { class: "cut c2", d }));
    const values = count === 1 ? "one value lies" : `${grouped(count)} values lie`;
    return [`Cut off at ${this.format(range.high)}: ${values} above, the largest ${this.format(range.top)} at step ${grouped(where)}.`];
  }

  /** Under the pointer: the step and each curve's value at it or before it. */
  tell(at) {
    const parts = [];
    if (at === null) {
      for (const { name, colour, data: now, raw } of this.series) {
        const data = raw ?? now;
        const last = data.y.length - 1;
        if (last >= 0) parts.push(h("span", {}, swatch(colour), name && `${name} `, h("b", {}, this.format(data.y[last])), ` at step ${grouped(data.x[last])}`));
      }
    } else {
      const near = nearest(this.series.reduce((a, b) => (b.data.x.length > a.data.x.length ? b : a)).data.x, at);
      parts.push(h("span", {}, "step ", h("b", {}, grouped(near))));
      for (const { name, colour, data, raw } of this.series) {
        const index = search(data.x, near + 1) - 1;
        if (index < 0) continue;
        const there = data.x[index] === near ? "" : ` (step ${grouped(data.x[index])})`;
        const value = raw && this.span > 1 ? [h("b", {}, this.format(raw.y[index])), ` smoothed ${this.format(data.y[index])}`]
          : [h("b", {}, this.format(data.y[index]))];
        parts.push(h("span", {}, swatch(colour), name && `${name} `, ...value, there));
      }
      const pixel = (this.frame.view.shown[1] - this.frame.view.shown[0]) / Math.max(this.frame.right - this.frame.left, 1);
      for (const { step, kind, text } of this.marks) {
        if (this.options.wide && Math.abs(step - at) <= Math.max(3 * pixel, 0.5)) {
          parts.push(h("span", {}, swatch(MARKS[kind][0]), `${MARKS[kind][1]}${text ? `: ${text}` : ""} (step ${grouped(step)})`));
        }
      }
    }
    this.readout.replaceChildren(...parts);
  }

  summarise(frame) {
    const parts = this.series.filter(({ data }) => data.x.length).map(({ name, data: now, raw }) => {
      const data = raw ?? now;
      const finite = data.y.filter(Number.isFinite);
      const ends = `${this.format(data.y[0])} at step ${grouped(data.x[0])} to ${this.format(data.y.at(-1))} at step ${grouped(data.x.at(-1))}`;
      const reach = finite.length ? `, lowest ${this.format(finite.reduce((a, b) => Math.min(a, b)))}, highest ${this.format(finite.reduce((a, b) => Math.max(a, b)))}` : "";
      return `${name || this.options.title}: ${data.x.length === 1 ? `${this.format(data.y[0])} at step ${grouped(data.x[0])}` : ends + reach}`;
    });
    frame.describe(`Chart of ${this.options.title} over steps. ${parts.join(". ")}.`);
  }
}

/** Where the line from the point before a step to the one after it is. */
function between({ x, y }, step) {
  const after = search(x, step);
  if (after === 0 || after === x.length) return NaN;
  const share = (step - x[after - 1]) / (x[after] - x[after - 1]);
  return y[after - 1] + share * (y[after] - y[after - 1]);
}

/** The value of a sorted list that is closest. */
function nearest(sorted, value) {
  const after = Math.min(search(sorted, value), sorted.length - 1);
  return after > 0 && value - sorted[after - 1] < sorted[after] - value ? sorted[after - 1] : sorted[after];
}

/** All curves, which move together. */
function drawCurves(body, { curves, marks }) {
  const filled = (series) => series.filter(([, { steps, values }]) => steps.length && values.length);
  const options = [
    { title: "Loss", unit: curves.loss_unit, wide: true, log: true, smooth: true,
      series: [["training", curves.loss, "c1"], ["validation", curves.validation, "c2"]] },
    { title: "Learning rate", uncut: true, zero: true, series: [["", curves.lr, "c3"]] },
    { title: "Gradient norm", log: true, smooth: true, zero: true, series: [["", curves.grad_norm, "c4"]] },
    { title: "Throughput", unit: curves.throughput_unit, zero: true, smooth: true, series: [["", curves.throughput, "c1"]] },
    { title: "FLOP/s used (MFU)", unit: "share of the measured peak", percent: true, zero: true, smooth: true, series: [["PaLM's formula", curves.mfu, "c5"], ["Megatron-LM's", curves.megatron_mfu, "c2"]] },
    { title: "FLOP/s by Megatron-LM's formula", unit: "FLOP/s, recomputed ones too", zero: true, smooth: true, series: [["", curves.flops, "c1"]] },
    ...curves.more.map((chart) => ({ title: chart.title, unit: chart.unit, log: true, smooth: true,
      series: chart.series.map(([name, series], at) => [name, series, `c${(at % 8) + 1}`]) })),
  ].map((chart) => ({ ...chart, series: filled(chart.series) })).filter((chart) => chart.series.length);
  const ends = options.flatMap((chart) => chart.series.flatMap(([, { steps }]) => steps.map(([first, by, count]) => [first, first + by * (count - 1)])));
  const first = ends.reduce((least, [from]) => Math.min(least, from), Infinity);
  const last = ends.reduce((most, [, to]) => Math.max(most, to), -Infinity);
  const view = first < last ? new View(first, last, 2) : new View(first - 0.5, first + 0.5, 1);
  const charts = options.map((chart) => new Curve(chart, view, marks));
  const text = (from, to) => `Steps ${grouped(Math.ceil(from))} to ${grouped(Math.floor(to))}`;
  fill(body, {}, [
    first < last && h("p", { class: "about hint" }, "Drag sideways over a curve to see a part of the run; double-click to see all of it."),
    first < last && controls(view, text, ...(last - first >= 10 ? [smoothing(charts, last - first)] : [])),
    h("div", { class: "charts" }, charts.map((chart) => chart.element)),
    markLegend(marks),
  ]);
}

/**
 * A slider that sets over how many steps curves are smoothed: none to a quarter of the run. A run of many steps begins smoothed, since its
 * curve would be a broad band.
 */
function smoothing(charts, steps) {
  const slider = h("input", { type: "range", min: "0", max: "20", value: steps > 2000 ? "10" : "0", "aria-label": "Smoothing" });
  const said = h("span", { class: "range" });
  const update = () => {
    const span = Math.round((steps / 4) ** (slider.value / 20));
    said.textContent = span > 1 ? `over ${grouped(span)} steps` : "off";
    slider.setAttribute("aria-valuetext", said.textContent);
    charts.forEach((chart) => chart.smooth(span));
  };
  slider.addEventListener("input", update);
  update();
  return h("label", {}, "Smoothing", slider, said);
}

/** Which mark is which, with their numbers. */
function markLegend(marks) {
  const items = Object.entries(MARKS).map(([kind, [colour, name]]) => {
    const these = marks.filter((mark) => mark.kind === kind);
    if (!these.length) return undefined;
    const steps = these.slice(0, 6).map(({ step, text }) => grouped(step) + (text ? ` (${text})` : "")).join(", ");
    const where = `${these.length > 1 ? "steps" : "step"} ${steps}${these.length > 6 ? ` and ${these.length - 6} more` : ""}`;
    return h("li", {}, h("span", { class: `line ${colour}` }), h("b", {}, name), ` at ${where}`);
  });
  return h("ul", { class: "legend", "aria-label": "Marks" }, items);
}
