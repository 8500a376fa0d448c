// Tables whose rows are sorted by a click on a column's head: communication and operations.

/**
 * A table. A column has `title`, `value(row)` to sort by, `text(row)` to show, perhaps `kind: "text"`, `share(row)` for a bar and `total(rows)`
 * for the last line. Rows come sorted by the column of index `by`, the largest first.
 */
const tables = [];

class Table {
  constructor(columns, by, caption) {
    this.columns = columns;
    this.by = by;
    this.down = columns[by].kind !== "text";
    this.limit = 30;
    tables.push(this);
    this.head = columns.map((column, at) => {
      const button = h("button", { type: "button", title: `Sort by ${column.title}` }, column.title);
      button.addEventListener("click", () => this.sort(at));
      return h("th", { scope: "col", class: column.kind }, button);
    });
    this.body = h("tbody");
    this.foot = h("tfoot");
    this.rest = h("button", { type: "button" });
    this.rest.addEventListener("click", () => {
      this.limit = Infinity;
      this.render();
    });
    this.element = h("div", {},
      h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
        h("table", {}, h("thead", {}, h("tr", {}, this.head)), this.body, this.foot)),
      this.rest);
  }

  show(rows) {
    this.rows = rows;
    this.render();
    return this.element;
  }

  sort(at) {
    this.down = at === this.by ? !this.down : this.columns[at].kind !== "text";
    this.by = at;
    this.render();
  }

  render(limit = this.limit) {
    if (!this.rows) return;
    const { value, kind } = this.columns[this.by];
    const order = (a, b) => (kind === "text" ? String(value(a)).localeCompare(String(value(b))) : (value(a) ?? -1) - (value(b) ?? -1));
    const sorted = [...this.rows].sort((a, b) => (this.down ? order(b, a) : order(a, b)));
    this.head.forEach((cell, at) => {
      if (at === this.by) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    this.body.replaceChildren(...sorted.slice(0, limit).map((row) => h("tr", {}, this.columns.map((column) => {
      const share = column.share?.(row);
      const bar = share === undefined ? {} : { style: `--share: ${(100 * share).toFixed(1)}%` };
      return h("td", { class: `${column.kind ?? ""}${share === undefined ? "" : " bar"}`, ...bar }, column.text(row) ?? "");
    }))));
    this.rest.hidden = sorted.length <= limit;
    this.rest.textContent = `Show all ${grouped(sorted.length)}`;
    const total = (column, at) => h("td", { class: column.kind }, at === 0 ? "Total" : column.total?.(this.rows) ?? "");
    this.foot.replaceChildren(...(this.rows.length > 1 ? [h("tr", {}, this.columns.map(total))] : []));
  }
}

const sum = (rows, value) => rows.reduce((all, row) => all + value(row), 0);

/** Adds up rows that have the same key. */
function together(rows, key, fields) {
  const groups = new Map();
  for (const row of rows) {
    const name = key(row);
    const group = groups.get(name);
    if (!group) groups.set(name, { ...row });
    else for (const field of fields) group[field] += row[field];
  }
  return [...groups.values()];
}

/** A list of ranks to choose from; null stands for all of them. */
function rankSelect(rows, change) {
  const ranks = [...new Set(rows.map(({ rank }) => rank))].sort((a, b) => a - b);
  if (ranks.length < 2) return undefined;
  const select = h("select", {}, h("option", { value: "" }, `all ${ranks.length} ranks, added up`), ranks.map((rank) => h("option", { value: rank }, `rank ${rank}`)));
  select.addEventListener("change", () => change(select.value === "" ? null : Number(select.value)));
  return h("p", { class: "controls" }, h("label", {}, "Show", select));
}

const calls = { title: "Calls", value: (row) => row.calls, text: (row) => grouped(row.calls), total: (rows) => grouped(sum(rows, (row) => row.calls)) };
const time = { title: "Time", value: (row) => row.ms, text: (row) => duration(row.ms), total: (rows) => duration(sum(rows, (row) => row.ms)) };
const moved = { title: "Bytes", value: (row) => row.bytes, text: (row) => bytes(row.bytes), total: (rows) => bytes(sum(rows, (row) => row.bytes)) };

function drawCollectives(body, { collectives, waited_for }) {
  const fields = ["calls", "bytes", "ms"];
  const among = collectives.some(({ group }) => group);
  const each = { title: "Time a call", value: (row) => row.ms / row.calls, text: (row) => (row.calls ? duration(row.ms / row.calls) : "") };
  const kinds = new Table([
    { title: "Call", kind: "text", value: (row) => row.kind, text: (row) => row.kind },
    ...(among ? [{ title: "Among", kind: "text", value: (row) => row.group, text: (row) => row.group }] : []),
    calls, moved, time, each,
  ], among ? 4 : 3, "Communication by kind");
  const key = ({ kind, group }) => `${kind}\n${group}`;
  const show = (rank) => kinds.show(together(collectives.filter((row) => rank === null || row.rank === rank), key, fields));
  const ranks = new Table([
    { title: "Rank", kind: "text", value: (row) => String(row.rank).padStart(9), text: (row) => `rank ${row.rank}` },
    calls, moved, time,
    ...(waited_for.length ? [{ title: "Waited for", value: (row) => waited_for[row.rank], text: (row) => `${(100 * waited_for[row.rank]).toFixed(1)} %` }] : []),
  ], 0, "Communication by rank");
  const byRank = together(collectives, ({ rank }) => rank, fields);
  body.append(
    h("p", { class: "about" }, "Calls of the whole run. Time is from a call's start until its tensors are free again, so it includes waiting for others. A rank is waited for in the share of time that the other ranks, on average, waited for it last."),
    h("div", { class: "tables" },
      h("div", {}, h("h3", {}, "By kind"), rankSelect(collectives, show) ?? "", show(null)),
      h("div", {}, h("h3", {}, "By rank"), ranks.show(byRank))),
  );
}

const PASSES = { forward: "forward", recompute: "recompute", backward: "backward", step: "outside" };

function drawOperations(body, { profile }) {
  let [all, peaks] = [1, [0, 0]];
  const rate = (row, field) => (row[field] > 0 && row.ms > 0 ? (1000 * row[field]) / row.ms : undefined);
  const some = (field) => profile.operations.some((row) => row[field] > 0);
  const share = (row) => row.ms / all;
  const si = (value, unit) => scaled(value, 1000, ["", "K", "M", "G", "T"]) + unit;
  const ofPeak = (row, field, at) => (rate(row, field) === undefined || !(peaks[at] > 0) ? undefined : rate(row, field) / peaks[at]);
  const of = (title, field, unit, at) => [
    { title, value: (row) => rate(row, field), text: (row) => (rate(row, field) === undefined ? "" : si(rate(row, field), unit)) },
    { title: "of peak", value: (row) => ofPeak(row, field, at), text: (row) => (ofPeak(row, field, at) === undefined ? "" : percent(ofPeak(row, field, at))) },
  ];
  const perStep = Math.max(profile.steps, 1);
  const table = new Table([
    { title: "Operation", kind: "text", value: (row) => row.name, text: (row) => row.name },
    { title: "Pass", kind: "text", value: (row) => PASSES[row.pass], text: (row) => PASSES[row.pass] },
    { ...calls, text: (row) => (row.calls ? grouped(row.calls) : "") },
    { title: "Time", value: (row) => row.ms, text: (row) => duration(row.ms), total: (rows) => duration(sum(rows, (row) => row.ms)) },
    { title: "Share", value: share, text: (row) => percent(share(row)), share },
    ...(some("flops") ? of("Arithmetic", "flops", "FLOP/s", 0) : []),
    ...(some("bytes") ? of("Memory", "bytes", "B/s", 1) : []),
  ], 3, "Operations");
  const about = h("span");
  const show = (rank) => {
    const ranks = profile.ranks.filter((row) => rank === null || row.rank === rank);
    const mean = (field) => sum(ranks, (row) => row[field]) / Math.max(ranks.length, 1);
    peaks = [mean("peak_flops_per_s"), mean("peak_bytes_per_s")];
    const rows = together(profile.operations.filter((row) => rank === null || row.rank === rank), ({ name, pass }) => `${name}\n${pass}`, ["calls", "ms", "flops", "bytes"]);
    all = sum(rows, (row) => row.ms) || 1;
    const most = [peaks[0] > 0 && si(peaks[0], "FLOP/s"), peaks[1] > 0 && si(peaks[1], "B/s")].filter(Boolean);
    const steps = `${grouped(profile.steps)} ${profile.steps === 1 ? "step" : "steps"} of ${duration(mean("ms") / perStep)}. `;
    about.textContent = `${steps}${most.length ? `A rank can do ${most.join(" and ")} at most, as measured. ` : ""}`;
    return table.show(rows);
  };
  const shown = show(null);
  body.append(
    h("p", { class: "about" }, about, h("span", { class: "hint" }, "Click on a column's head to sort by it.")),
    rankSelect(profile.operations, show) ?? "",
    shown,
  );
}
