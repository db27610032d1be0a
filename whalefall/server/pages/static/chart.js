// SPDX-License-Identifier: Apache-2.0
// One line chart as SVG. It draws what it is given; numbers for people who do not see it stand in the page's table.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 132;
const BOX = { left: 44, right: 6, top: 8, bottom: 20 };

export class Chart {
  /** lines: [{name, className}]; format writes a value of the axis; max fixes the top, else it follows the values. */
  constructor(place, { lines, format, max = null }) {
    Object.assign(this, { place, lines, format, max });
    this.width = 320;
    this.svg = add(place, "svg", { height: HEIGHT, "aria-hidden": "true", class: "chart" });
    this.grid = add(this.svg, "g");
    this.paths = lines.map(({ className }) => add(this.svg, "path", { class: `line ${className}` }));
    this.cursor = add(this.svg, "g", { visibility: "hidden" });
    this.ruler = add(this.cursor, "line", { class: "ruler", y1: BOX.top, y2: HEIGHT - BOX.bottom });
    this.tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    place.append(this.tip);
    new ResizeObserver(([{ contentRect }]) => this.resize(contentRect.width)).observe(place);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  /** points: [{time_s, values}], oldest first, values one per line, null where there is none; the right edge is now_s. */
  draw(points, now_s, span_s) {
    Object.assign(this, { points, now_s, span_s });
    const highest = Math.max(0, ...points.flatMap(({ values }) => values.filter((value) => value !== null)));
    this.top = this.max ?? niceCeiling(highest);
    this.drawGrid();
    this.lines.forEach((_, i) => this.paths[i].setAttribute("d", this.outline(i)));
    if (this.pointed !== undefined) this.point(this.pointed);
  }

  outline(i) {
    let text = "";
    let is_down = false;
    for (const { time_s, values } of this.points) {
      if (values[i] === null) is_down = false;
      else {
        text += `${is_down ? "L" : "M"}${this.x(time_s).toFixed(1)} ${this.y(values[i]).toFixed(1)}`;
        if (!is_down) text += "h.01"; // a lone point is seen too
        is_down = true;
      }
    }
    return text;
  }

  drawGrid() {
    const right = this.width - BOX.right;
    this.grid.replaceChildren();
    for (const share of [0, 0.5, 1]) {
      const y = this.y(this.top * share);
      add(this.grid, "line", { class: "rule", x1: BOX.left, x2: right, y1: y, y2: y });
      add(this.grid, "text", { x: BOX.left - 6, y: y + 3.5, "text-anchor": "end" }, this.format(this.top * share));
    }
    add(this.grid, "text", { x: BOX.left, y: HEIGHT - 5 }, `${this.span_s / 60} min ago`);
    add(this.grid, "text", { x: right, y: HEIGHT - 5, "text-anchor": "end" }, "now");
  }

  /** Show the values at this distance from the left edge; null hides them. */
  point(left) {
    const near = left === null || !this.points?.length ? null : this.points.reduce((best, point) =>
      Math.abs(this.x(point.time_s) - left) < Math.abs(this.x(best.time_s) - left) ? point : best);
    this.pointed = near ? left : undefined;
    this.cursor.setAttribute("visibility", near ? "visible" : "hidden");
    this.tip.hidden = !near;
    if (!near) return;
    const x = this.x(near.time_s);
    this.ruler.setAttribute("x1", x);
    this.ruler.setAttribute("x2", x);
    const values = this.lines.map(({ name }, i) => `${name} ${near.values[i] === null ? "–" : this.format(near.values[i])}`);
    this.tip.textContent = `${Math.round(this.now_s - near.time_s)} s ago: ${values.join(", ")}`;
  }

  resize(width) {
    this.width = Math.max(160, width);
    this.svg.setAttribute("width", this.width);
    if (this.points) this.draw(this.points, this.now_s, this.span_s);
  }

  x(time_s) {
    return this.width - BOX.right - ((this.now_s - time_s) / this.span_s) * (this.width - BOX.left - BOX.right);
  }

  y(value) {
    return HEIGHT - BOX.bottom - (value / (this.top || 1)) * (HEIGHT - BOX.top - BOX.bottom);
  }
}

/** The next of 1, 2, 5, 10 ... at or above the value, so that the axis stays still while values wander. */
export function niceCeiling(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((bound) => bound >= value * 0.9999);
}

function add(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
  return made;
}
