// Draws each part that the page has.

const data = JSON.parse(document.getElementById("data").textContent);
const PARTS = {
  curves: drawCurves,
  memory: drawMemory,
  timeline: drawTimeline,
  collectives: drawCollectives,
  operations: drawOperations,
};

for (const [name, draw] of Object.entries(PARTS)) {
  const body = document.querySelector(`#${name} .drawn`);
  if (body) draw(body, data);
}
frames.forEach((frame) => frame.render());

// Paper shows everything: folded texts are opened and tables have all their rows; afterwards the page is as it was.
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  folded.forEach((details) => details.setAttribute("open", ""));
  tables.forEach((table) => table.render(Infinity));
});
window.addEventListener("afterprint", () => {
  folded.forEach((details) => details.removeAttribute("open"));
  tables.forEach((table) => table.render());
});
follow();
