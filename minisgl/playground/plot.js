// A small line plot as SVG. It begins with the first value, one to five minutes ago.

import { el, svg } from "./dom.js";

const [WIDTH, HEIGHT] = [300, 80];
const MINUTE_MS = 60_000;

/** A figure with a title, the newest value of each line, and the plot. */
export class Plot {
  constructor(title, note, format) {
    this.format = format;
    this.values = el("dl");
    this.scale = el("span", { class: "scale" });
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.title = title;
    const frame = el("div", { class: "frame" }, this.scale, this.drawing);
    this.begin = el("span");
    const foot = el("div", { class: "axis", "aria-hidden": "true" }, this.begin, el("span", {}, "now"));
    this.node = el("figure", { "data-plot": title }, el("figcaption", {}, el("h3", {}, title), el("p", {}, note)), this.values, frame, foot);
  }

  /** lines: [name, [[time in ms, value or null], ...]]. least: the smallest height of the scale. */
  draw(lines, now, least) {
    const all = lines.flatMap(([, points]) => points.map(([, value]) => value)).filter((value) => value !== null);
    const top = nice(Math.max(least, ...all));
    this.scale.textContent = this.format(top);
    const age = now - (lines[0][1][0]?.[0] ?? now);
    const minutes = Math.min(Math.max(Math.ceil(age / MINUTE_MS), 1), 5);
    this.begin.textContent = `${minutes} min ago`;
    const x = (at) => WIDTH * (1 - (now - at) / (minutes * MINUTE_MS));
    const y = (value) => HEIGHT - 1 - (HEIGHT - 2) * (value / top);
    this.drawing.replaceChildren(...lines.map(([, points], at) => svg("path", { class: `line${at}`, d: path(points, x, y) })));
    const newest = lines.map(([name, points]) => [name, points.at(-1)?.[1] ?? null]);
    this.values.replaceChildren(
      ...newest.map(([name, value], at) =>
        el("div", { class: `line${at}` }, el("dt", {}, name), el("dd", {}, value === null ? "\u2013" : this.format(value))),
      ),
    );
    const spoken = newest.map(([name, value]) => `${name} ${value === null ? "none" : this.format(value)}`);
    this.drawing.setAttribute("aria-label", `${this.title}: ${spoken.join(", ")}. Scale to ${this.format(top)}.`);
  }
}

/** Line segments between neighbouring values. A null ends the line. */
function path(points, x, y) {
  let isDown = false;
  return points
    .map(([at, value]) => {
      const step = value === null ? "" : `${isDown ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      const dot = value !== null && !isDown ? "h3" : "";
      isDown = value !== null;
      return step + dot;
    })
    .join("");
}

/** The next of 1, 2 and 5 times a power of ten. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999);
}
