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
follow();
