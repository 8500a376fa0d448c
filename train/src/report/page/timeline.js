// What ran when in one step: a lane for each rank's computing and one for its communication.

const KINDS = {
  forward: ["c1", "forward"],
  backward: ["c2", "backward"],
  backward_input: ["c2", "backward of inputs"],
  backward_weight: ["c5", "backward of weights"],
  recompute: ["c6", "recomputation"],
  optimizer: ["c3", "optimizer"],
  data: ["c8", "data"],
  communication: ["c4", "communication"],
  wait: ["c0", "waiting"],
  other: ["c7", "other"],
};

/** Lanes that are shown before the rest is asked for. */
const LANES = 32;

/** Puts spans that overlap into rows below each other. */
function rows(spans) {
  const ends = [];
  const sorted = spans.map((span) => ({ ...span })).sort((a, b) => a.start_ms - b.start_ms || b.ms - a.ms);
  for (const span of sorted) {
    let row = ends.findIndex((end) => end <= span.start_ms + 1e-6);
    if (row < 0) row = ends.length;
    ends[row] = span.start_ms + span.ms;
    span.row = row;
  }
  return { sorted, count: Math.max(ends.length, 1) };
}

const COMPUTING = ["forward", "backward", "backward_input", "backward_weight", "recompute", "optimizer"];

/** The milliseconds in which a rank computed. */
function busy(spans) {
  let [sum, until] = [0, -Infinity];
  for (const { start_ms: start, ms, kind } of spans) {
    if (!COMPUTING.includes(kind)) continue;
    sum += Math.max(0, start + ms - Math.max(start, until));
    until = Math.max(until, start + ms);
  }
  return sum;
}

class TimelinePlot {
  constructor(timeline, body) {
    this.all = timeline.lanes.filter((lane) => lane.spans.length).map((lane) => ({ ...lane, ...rows(lane.spans) }));
    this.lanes = this.all.slice(0, LANES);
    const spans = this.all.flatMap((lane) => lane.sorted);
    const first = spans.reduce((least, span) => Math.min(least, span.start_ms), 0);
    const last = spans.reduce((most, span) => Math.max(most, span.start_ms + span.ms), -Infinity);
    this.length = last - first;
    const view = new View(first, last, this.length / 1e4 || 1);
    this.readout = h("div", { class: "readout" });
    this.frame = new Frame({
      view,
      readout: this.readout,
      label: `Timeline of step ${timeline.step}`,
      margin: [6, 12, 34, 62],
      height: () => this.heights(),
      draw: (frame, inside) => this.draw(frame, inside, timeline),
      hover: (at, y) => this.tell(at, y),
      next: (at, direction) => this.next(at, direction),
    });
    const kinds = Object.entries(KINDS).filter(([kind]) => spans.some((span) => span.kind === kind));
    const rest = this.all.length - this.lanes.length;
    const hint = h("span", { class: "hint" }, "Drag sideways to see a part.");
    body.append(
      h("p", { class: "about" }, `What ran when during step ${grouped(timeline.step)}. ${timeline.note}${timeline.note && " "}`, hint),
      controls(view, (from, to) => `${duration(from)} to ${duration(to)}`, rest > 0 && this.more(rest)),
      h("figure", { class: "chart", style: "margin: 0" }, this.readout, this.frame.element,
        h("ul", { class: "legend" }, kinds.map(([, [colour, name]]) => h("li", {}, swatch(colour), name))),
        h("p", { class: "note" }, this.shares())),
    );
  }

  /** A button for the lanes that are not shown yet. */
  more(rest) {
    const button = h("button", { type: "button" }, `Show ${rest} more lanes`);
    button.addEventListener("click", () => {
      this.lanes = this.all;
      button.remove();
      this.frame.render();
    });
    return button;
  }

  /** How busy each rank was. */
  shares() {
    const lanes = this.all.filter((lane) => busy(lane.sorted) > 0);
    if (!lanes.length || !(this.length > 0)) return "";
    const share = (lane) => busy(lane.sorted) / this.length;
    if (lanes.length <= 8) return `Share of the step spent computing: ${lanes.map((lane) => `rank\u00a0${lane.rank} ${percent(share(lane))}`).join(", ")}.`;
    const list = lanes.map(share);
    return `Share of the step spent computing: ${percent(Math.min(...list))} to ${percent(Math.max(...list))} over ${lanes.length} ranks.`;
  }

  /** Gives each lane its place; the height of all. */
  heights() {
    let top = this.frame.options.margin[0];
    this.lanes.forEach((lane, at) => {
      const small = at > 0 && this.lanes[at - 1].rank === lane.rank;
      if (at > 0) top += small ? 2 : 9;
      lane.small = small;
      lane.each = (small ? 10 : 20) / (lane.count > 3 ? 1.6 : 1);
      lane.top = top;
      top += lane.each * lane.count;
    });
    return top + 4 + this.frame.options.margin[2];
  }

  draw(frame, inside, timeline) {
    frame.axis("ms of the step");
    for (const lane of this.lanes) {
      const bottom = lane.top + lane.each * lane.count;
      inside.append(s("rect", { class: "band", x: frame.left, y: lane.top, width: Math.max(frame.right - frame.left, 1), height: bottom - lane.top }));
      if (!lane.small) {
        frame.svg.append(s("text", { class: "name", x: frame.left - 8, y: lane.top + Math.min(lane.each, 20) / 2 + 4, "text-anchor": "end" }, `rank ${lane.rank}`));
      }
      this.drawLane(frame, inside, lane);
    }
    const kinds = Object.entries(KINDS).map(([kind, [, name]]) => [name, this.all.flatMap((lane) => lane.sorted).filter((span) => span.kind === kind).length]);
    const counts = kinds.filter(([, count]) => count).map(([name, count]) => `${grouped(count)} ${name}`);
    frame.describe(`Timeline of step ${timeline.step}, ${duration(this.length)}, ${this.all.length} lanes. Spans: ${counts.join(", ")}. ${this.shares()}`);
  }

  /** Spans that fall into the same pixel as the one before them, with the same colour, are left out. */
  drawLane(frame, inside, lane) {
    const [from, to] = frame.view.shown;
    const last = [];
    for (const span of lane.sorted) {
      if (span.start_ms > to || span.start_ms + span.ms < from) continue;
      const [x, end] = [Math.max(frame.x(span.start_ms), frame.left - 2), Math.min(frame.x(span.start_ms + span.ms), frame.right + 2)];
      const before = last[span.row];
      if (before && before.kind === span.kind && end < before.end + 0.4) continue;
      last[span.row] = { kind: span.kind, end };
      const y = lane.top + span.row * lane.each;
      const class_ = `span ${KINDS[span.kind][0]}`;
      const width = Math.max(end - x, 0.8);
      const rect = s("rect", { class: class_, x: x.toFixed(2), y, width: width.toFixed(2), height: lane.each, rx: width > 4 ? 1.5 : 0 });
      span.rect = rect;
      inside.append(rect);
      const text = this.caption(span, width);
      if (text && lane.each >= 12 && span.kind !== "wait") {
        inside.append(s("text", { class: `on ${KINDS[span.kind][0]}`, x: x + width / 2, y: y + lane.each / 2 + 4, "text-anchor": "middle" }, text));
      }
    }
  }

  /** As much text as fits into a span: its name and micro-batch, the micro-batch, or nothing. */
  caption({ name, micro_batch: batch }, width) {
    const texts = batch === undefined ? [name] : [`${name} ${batch}`, String(batch)];
    return texts.find((text) => text.length * 6.3 + 6 < width);
  }

  /** The span at a place: the innermost, or in the given lane. */
  find(at, y) {
    const lane = this.lanes.find((lane) => y >= lane.top && y < lane.top + lane.each * lane.count);
    const row = lane && Math.floor((y - lane.top) / lane.each);
    const pixel = (this.frame.view.shown[1] - this.frame.view.shown[0]) / Math.max(this.frame.right - this.frame.left, 1);
    const gap = (span) => Math.max(span.start_ms - at, at - span.start_ms - span.ms, 0);
    const near = lane?.sorted.filter((span) => span.row === row && gap(span) <= pixel) ?? [];
    return { lane, span: near.sort((a, b) => gap(a) - gap(b))[0] };
  }

  /** Where the next span begins or ends in any lane. */
  next(at, direction) {
    const places = this.lanes.flatMap((lane) => lane.sorted.map((span) => span.start_ms)).filter((place) => (direction > 0 ? place > at + 1e-9 : place < at - 1e-9));
    return places.reduce((best, place) => (Math.abs(place - at) < Math.abs(best - at) ? place : best), places[0] ?? at);
  }

  tell(at, y) {
    this.hit?.classList.remove("hit");
    this.hit = null;
    const say = (...parts) => this.readout.replaceChildren(...parts);
    if (at === null) return say(h("span", {}, "The step took ", h("b", {}, duration(this.length)), ". ", h("span", { class: "hint" }, "Point at a span for its details.")));
    const when = h("span", {}, "at ", h("b", {}, duration(at)));
    if (y === null) {
      const running = this.lanes.filter((lane) => !lane.small).map((lane) => [lane, lane.sorted.findLast((span) => span.start_ms <= at + 1e-9 && span.start_ms + span.ms >= at)]);
      return say(when, ...running.filter(([, span]) => span).slice(0, 8).map(([lane, span]) => h("span", {}, swatch(KINDS[span.kind][0]), `rank ${lane.rank} `, h("b", {}, this.full(span)))));
    }
    const { lane, span } = this.find(at, y);
    if (!span) return say(when, lane && h("span", {}, `rank ${lane.rank}, ${lane.name}: nothing`) || "");
    this.hit = span.rect;
    this.hit?.classList.add("hit");
    say(h("span", {}, swatch(KINDS[span.kind][0]), `rank ${lane.rank}, ${lane.name}: `, h("b", {}, this.full(span))),
      h("span", {}, h("b", {}, duration(span.ms)), `, from ${duration(span.start_ms)} to ${duration(span.start_ms + span.ms)}`),
      span.detail ? h("span", {}, span.detail) : "");
  }

  full({ name, micro_batch: batch, stage }) {
    return [name, batch !== undefined && `micro-batch ${batch}`, stage !== undefined && `stage ${stage}`].filter(Boolean).join(", ");
  }
}

function drawTimeline(body, { timeline }) {
  new TimelinePlot(timeline, body);
}
