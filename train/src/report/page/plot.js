// A plot that can be zoomed: the part of an axis that several plots show together, and the frame of one plot.

/** The part of an axis that is shown, and the place that is pointed at. Plots that share a view move together. */
class View {
  /** Shows `from` to `to` at first; zooming stops at a width of `least`. */
  constructor(from, to, least) {
    this.whole = [from, to > from ? to : from + least];
    this.shown = this.whole;
    this.least = Math.min(least, this.whole[1] - from);
    this.cursor = null;
    this.onShow = [];
    this.onPoint = [];
  }

  /** Shows a part. */
  show(from, to) {
    const [first, last] = this.whole;
    const width = Math.min(Math.max(to - from, this.least), last - first);
    const start = Math.min(Math.max((from + to - width) / 2, first), last - width);
    this.shown = [start, start + width];
    this.onShow.forEach((call) => call());
    this.point(this.cursor);
  }

  /** Everything. */
  reset() {
    this.show(...this.whole);
  }

  /** Shows a part that is `factor` times as wide, around the cursor or the middle. */
  zoom(factor) {
    const [from, to] = this.shown;
    const about = this.cursor ?? (from + to) / 2;
    this.show(about - (about - from) * factor, about + (to - about) * factor);
  }

  /** Moves by a share of what is shown. */
  pan(share) {
    const by = (this.shown[1] - this.shown[0]) * share;
    const [from, to] = this.shown;
    if (by > 0) this.show(Math.min(from + by, this.whole[1] - (to - from)), Math.min(to + by, this.whole[1]));
    else this.show(Math.max(from + by, this.whole[0]), Math.max(to + by, this.whole[0] + (to - from)));
  }

  /** Points at a place, or at none. */
  point(at, y = null, source = null) {
    this.cursor = at;
    this.onPoint.forEach((call) => call(at, y, source));
  }

  get isWhole() {
    return this.shown[0] <= this.whole[0] && this.shown[1] >= this.whole[1];
  }
}

/** Buttons for a view, and a text that says what is shown. */
function controls(view, what, ...more) {
  const range = h("span", { class: "range", "aria-live": "polite" });
  const button = (text, title, act) => {
    const element = h("button", { type: "button", title, "aria-label": title }, text);
    element.addEventListener("click", act);
    return element;
  };
  const left = button("◀", "Move left", () => view.pan(-0.5));
  const right = button("▶", "Move right", () => view.pan(0.5));
  const out = button("−", "Zoom out", () => view.zoom(2));
  const inwards = button("+", "Zoom in", () => view.zoom(0.5));
  const all = button("Show all", "Show everything", () => view.reset());
  const update = () => {
    range.textContent = what(...view.shown);
    [left.disabled, right.disabled] = [view.shown[0] <= view.whole[0], view.shown[1] >= view.whole[1]];
    out.disabled = all.disabled = view.isWhole;
    inwards.disabled = view.shown[1] - view.shown[0] <= view.least * 1.0001;
  };
  view.onShow.push(update);
  update();
  return h("div", { class: "controls" }, h("span", { class: "buttons" }, out, inwards, left, right, all), range, ...more);
}

/** Frames to draw again when the window changes, and before printing. */
const frames = [];

/**
 * A plot. `options`: `view`; `margin` as [top, right, bottom, left]; `height(width)` of the whole picture; `draw(frame, inside)`, which adds
 * elements; `hover(x, y)`, which tells what is there; `next(x, direction)`, the place that an arrow key goes to; `label`, what it is; `readout`, the
 * element that `hover` writes to, which is read aloud while the plot has the focus.
 */
class Frame {
  constructor(options) {
    this.options = options;
    this.view = options.view;
    this.svg = s("svg", { role: "img" });
    this.element = h("div", {
      class: "plot",
      tabindex: "0",
      role: "group",
      "aria-label": `${options.label}. Arrow keys move the cursor; plus and minus zoom; Escape shows everything.`,
    }, this.svg);
    this.fixed = null;
    this.view.onShow.push(() => this.render());
    this.view.onPoint.push((at, y, source) => this.point(at, source === this ? y : null));
    this.listen();
    frames.push(this);
  }

  /** Where a value of the shared axis is. */
  x(value) {
    const [from, to] = this.view.shown;
    return this.left + ((value - from) / (to - from)) * (this.right - this.left);
  }

  /** The value at a place. */
  at(x) {
    const [from, to] = this.view.shown;
    return from + ((x - this.left) / (this.right - this.left)) * (to - from);
  }

  /** Draws everything anew. */
  render() {
    const width = this.fixed ?? this.element.clientWidth;
    if (!width) return;
    const { margin: [top, right, bottom, left], height, draw } = this.options;
    this.width = width;
    this.height = height(width);
    Object.assign(this, { left, top, right: width - right, bottom: this.height - bottom });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.replaceChildren();
    // A picture within the picture cuts off what lies outside; dots at its edge stay whole.
    const edge = this.view.isWhole ? 5 : 0;
    const box = [left - edge, top - 3, Math.max(this.right - left, 1) + 2 * edge, this.bottom - top + 6];
    this.inside = s("svg", { x: box[0], y: box[1], width: box[2], height: box[3], viewBox: box.join(" "), overflow: "hidden" });
    draw(this, this.inside);
    this.svg.append(this.inside);
    this.line = s("line", { class: "cursor", y1: top, y2: this.bottom, visibility: "hidden" });
    this.chosen = s("rect", { class: "chosen", y: top, height: this.bottom - top, visibility: "hidden" });
    this.svg.append(this.chosen, this.line);
    this.point(this.view.cursor, null);
  }

  /** What the picture shows, for those who do not see it. */
  describe(text) {
    this.svg.setAttribute("aria-label", text);
  }

  /** The lower axis: ticks, their text and a name. */
  axis(name, whole) {
    const [from, to] = this.view.shown;
    const places = ticks(from, to, Math.max(2, (this.right - this.left) / 70), { whole });
    const texts = tickText(places);
    places.forEach((place, at) => {
      const x = this.x(place);
      this.svg.append(s("line", { class: "grid", x1: x, x2: x, y1: this.top, y2: this.bottom }));
      const last = x > this.right - 14;
      this.svg.append(s("text", { x: last ? this.right : x, y: this.bottom + 15, "text-anchor": last ? "end" : "middle" }, texts[at]));
    });
    this.svg.append(s("text", { x: this.right, y: this.bottom + 29, "text-anchor": "end" }, name));
  }

  /** Lines across and their text at the left. */
  levels(places, texts, y) {
    places.forEach((place, at) => {
      this.svg.append(s("line", { class: "grid", x1: this.left, x2: this.right, y1: y(place), y2: y(place) }));
      this.svg.append(s("text", { x: this.left - 6, y: y(place) + 4, "text-anchor": "end" }, texts[at]));
    });
  }

  /** Shows the cursor at a value. */
  point(at, y) {
    if (!this.line) return;
    const visible = at !== null && at >= this.view.shown[0] && at <= this.view.shown[1];
    this.line.setAttribute("visibility", visible ? "visible" : "hidden");
    if (visible) {
      this.line.setAttribute("x1", this.x(at));
      this.line.setAttribute("x2", this.x(at));
    }
    this.options.hover?.(visible ? at : null, y);
  }

  /** Pointer and keys. A sideways drag chooses a part; fingers still scroll the page up and down. */
  listen() {
    const { element, view } = this;
    let start = null;
    const place = (event) => {
      const box = this.svg.getBoundingClientRect();
      const scale = this.width / box.width;
      const x = Math.min(Math.max((event.clientX - box.left) * scale, this.left), this.right);
      return [x, (event.clientY - box.top) * scale];
    };
    const choose = (x) => {
      this.chosen.setAttribute("visibility", start === null ? "hidden" : "visible");
      if (start === null) return;
      this.chosen.setAttribute("x", Math.min(start, x));
      this.chosen.setAttribute("width", Math.abs(x - start));
    };
    element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      [start] = place(event);
      element.setPointerCapture(event.pointerId);
    });
    element.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (start !== null) choose(x);
      view.point(this.at(x), y, this);
    });
    element.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [x, y] = place(event);
      const [low, high] = [Math.min(start, x), Math.max(start, x)];
      start = null;
      choose(x);
      if (high - low > 6) view.show(this.at(low), this.at(high));
      else view.point(this.at(x), y, this);
    });
    element.addEventListener("pointercancel", () => {
      start = null;
      choose(0);
    });
    element.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && start === null) view.point(null);
    });
    element.addEventListener("dblclick", () => view.reset());
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("focus", () => this.options.readout.setAttribute("aria-live", "polite"));
    element.addEventListener("blur", () => this.options.readout.removeAttribute("aria-live"));
  }

  key(event) {
    const { view } = this;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (direction && event.shiftKey) {
      view.pan(0.25 * direction);
    } else if (direction) {
      const [from, to] = view.shown;
      const now = view.cursor ?? (direction > 0 ? from : to);
      const next = this.options.next?.(now, direction) ?? now + (direction * (to - from)) / 100;
      view.point(Math.min(Math.max(next, view.whole[0]), view.whole[1]), null, this);
      if (view.cursor < from || view.cursor > to) view.pan(0.5 * direction);
    } else if (event.key === "+" || event.key === "=") view.zoom(0.5);
    else if (event.key === "-") view.zoom(2);
    else if (event.key === "Escape" || event.key === "0") view.reset();
    else return;
    event.preventDefault();
  }
}

/** Draws all frames when their width changes. On paper they are as wide as a page, so that text keeps its size. */
function follow() {
  const seen = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const frame = frames.find((frame) => frame.element === target);
      if (frame.fixed === null && frame.width !== target.clientWidth) frame.render();
    }
  });
  const print = (before) => {
    for (const frame of frames) {
      frame.fixed = before ? (frame.element.closest(".charts > :not(.wide)") ? 340 : 700) : null;
      frame.render();
    }
  };
  frames.forEach((frame) => seen.observe(frame.element));
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
}
