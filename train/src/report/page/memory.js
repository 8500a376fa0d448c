// Memory by category over one step, stacked; and which rank to show.

/** The indices to draw: all, or in each pixel column the one with the most bytes. */
function fullest(times, totals, from, to, columns) {
  const [low, high] = [Math.max(search(times, from) - 1, 0), Math.min(search(times, to) + 1, times.length)];
  const all = Array.from({ length: high - low }, (_, i) => low + i);
  if (all.length <= 2 * columns) return all;
  const best = new Map();
  for (const i of all) {
    const column = Math.floor(((times[i] - from) / (to - from)) * columns);
    if (!best.has(column) || totals[i] > totals[best.get(column)]) best.set(column, i);
  }
  return [...best.values()];
}

/** One rank's memory. */
class MemoryPlot {
  constructor(ranks, rank, body) {
    this.ranks = ranks;
    this.most = Math.max(...ranks.map(({ totals }) => totals.reduce((a, b) => Math.max(a, b), 0)), 1);
    const first = Math.min(...ranks.map(({ times_ms: t }) => t[0]));
    const last = Math.max(...ranks.map(({ times_ms: t }) => t[t.length - 1]));
    const view = new View(first, last, (last - first) / 1e4 || 1);
    this.readout = h("div", { class: "readout" });
    this.legend = h("ul", { class: "legend" });
    this.note = h("p", { class: "note" });
    this.frame = new Frame({
      view,
      readout: this.readout,
      label: "Memory over one step",
      margin: [10, 12, 34, 70],
      height: (width) => Math.round(Math.min(Math.max(width * 0.3, 220), 340)),
      draw: (frame, inside) => this.draw(frame, inside),
      hover: (at) => this.tell(at),
      next: (at, direction) => this.next(at, direction),
    });
    this.memory = rank;
    const select = ranks.length > 1 && this.select();
    const text = (from, to) => `${duration(from)} to ${duration(to)}`;
    const hint = h("span", { class: "hint" }, "Drag sideways to see a part.");
    body.append(
      h("p", { class: "about" }, `Bytes in tensors during step ${grouped(rank.step)}, by what they are for. `, hint),
      controls(view, text, select),
      h("figure", { class: "chart", style: "margin: 0" }, this.readout, this.frame.element, this.legend, this.note),
    );
  }

  select() {
    const label = ({ rank, totals }) => `rank ${rank}, at most ${bytes(totals.reduce((a, b) => Math.max(a, b), 0))}`;
    const options = this.ranks.map((memory, at) => h("option", { value: at, selected: memory === this.memory }, label(memory)));
    const select = h("select", {}, options);
    select.addEventListener("change", () => {
      this.memory = this.ranks[select.value];
      this.frame.render();
    });
    return h("label", {}, "Show", select);
  }

  /** The index that holds at a time. */
  index(at) {
    return Math.max(search(this.memory.times_ms, at + 1e-9) - 1, 0);
  }

  get peak() {
    const { totals } = this.memory;
    return totals.reduce((best, total, i) => (total > totals[best] ? i : best), 0);
  }

  next(at, direction) {
    const { times_ms: times } = this.memory;
    const index = Math.min(Math.max(this.index(at) + direction, 0), times.length - 1);
    return times[index];
  }

  draw(frame, inside) {
    const { times_ms: times, bytes: values, totals, limit_bytes: limit, rank } = this.memory;
    const near = limit > 0 && limit < 1.6 * this.most;
    const high = 1.08 * (near ? Math.max(limit, this.most) : this.most);
    const y = (value) => frame.bottom - (value / high) * (frame.bottom - frame.top);
    frame.axis("ms of the step");
    const places = ticks(0, high, (frame.bottom - frame.top) / 40, { base: 1024 });
    frame.levels(places, places.map(bytes), y);
    const shown = fullest(times, totals, ...frame.view.shown, Math.max(frame.right - frame.left, 1));
    const base = shown.map(() => 0);
    values.forEach((category, c) => {
      const top = base.map((from, k) => from + (category[shown[k]] ?? 0));
      inside.append(s("path", { class: `area c${(c % 8) + 1}`, d: this.area(frame, shown, base, top, y) }));
      top.forEach((value, k) => { base[k] = value; });
    });
    if (near) inside.append(s("line", { class: "limit", x1: frame.left, x2: frame.right, y1: y(limit), y2: y(limit) }));
    frame.svg.append(s("path", { class: "frame", d: `M${frame.left},${frame.top}V${frame.bottom}H${frame.right}` }));
    const most = totals[this.peak];
    const room = limit > 0 ? ` The device has ${bytes(limit)}${near ? " (dashed line)" : ""}.` : "";
    this.note.textContent = `Rank ${rank} has at most ${bytes(most)}, ${duration(times[this.peak])} into the step.${room}`;
    const parts = this.memory.categories.map((name, c) => `${name} ${bytes(values[c]?.[this.peak] ?? 0)}`);
    frame.describe(`Memory of rank ${rank} over one step. ${this.note.textContent} At that time: ${parts.join(", ")}.`);
  }

  /** Between two staircases: what holds from each time to the next. */
  area(frame, shown, base, top, y) {
    const { times_ms: times } = this.memory;
    const x = shown.map((i) => frame.x(times[i]).toFixed(1));
    const end = frame.x(times[times.length - 1]).toFixed(1);
    let d = `M${x[0]},${y(base[0]).toFixed(1)}`;
    top.forEach((value, k) => { d += `V${y(value).toFixed(1)}H${x[k + 1] ?? end}`; });
    for (let k = base.length - 1; k >= 0; k -= 1) d += `V${y(base[k]).toFixed(1)}H${x[k]}`;
    return `${d}Z`;
  }

  /** The bytes at the pointer, or at the peak. */
  tell(at) {
    const { times_ms: times, bytes: values, totals, categories } = this.memory;
    const i = at === null ? this.peak : this.index(at);
    const when = at === null ? "at the peak, " : "";
    this.readout.replaceChildren(h("span", {}, when, h("b", {}, duration(at ?? times[i])), " into the step: ", h("b", {}, bytes(totals[i]))));
    // The topmost area comes first.
    this.legend.replaceChildren(...categories.map((name, c) =>
      h("li", {}, swatch(`c${(c % 8) + 1}`), `${name} `, h("b", {}, bytes(values[c]?.[i] ?? 0)))).reverse());
  }
}

/** The memory of every rank that noted any; the fullest is shown first. */
function drawMemory(body, { memory }) {
  const ranks = memory.filter(({ times_ms: times }) => times.length).map((rank) => {
    const totals = rank.times_ms.map((_, i) => rank.bytes.reduce((sum, category) => sum + (category[i] ?? 0), 0));
    return { ...rank, totals };
  });
  const most = (rank) => rank.totals.reduce((a, b) => Math.max(a, b), 0);
  new MemoryPlot(ranks, ranks.reduce((a, b) => (most(b) > most(a) ? b : a)), body);
}
