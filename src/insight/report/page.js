"use strict";
const WIDTH = 1000, HEIGHT = 400;
// Shares of a run's steps that a running mean is over.
const SMOOTHING = [0, 0.01, 0.025, 0.05, 0.1, 0.2], MIN_MEAN_STEPS = 3;
const UNITS = {
  step: [[1, "step"]],
  tokens: [[1e9, "G tokens"], [1e6, "M tokens"], [1e3, "k tokens"], [1, "tokens"]],
  time: [[86400, "days"], [3600, "hours"], [60, "min"], [1, "s"]],
};
const form = document.querySelector("form.controls");
const chosen = (name) => form.elements[name].value;
let axes, charts;

// The first place in a rising list that is not below a number, or the last place.
const place = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
};
const nearest = (xs, x) => {
  const at = place(xs, x);
  return at > 0 && x - xs[at - 1] < xs[at] - x ? at - 1 : at;
};
// A number on one horizontal axis as that on another, straight between the known places.
const convert = (from, to, x) => {
  if (from === to) return x;
  const at = Math.max(1, place(from, x)), share = (x - from[at - 1]) / (from[at] - from[at - 1] || 1);
  return to[at - 1] + Math.min(1, Math.max(0, share)) * (to[at] - to[at - 1]);
};
const ofStep = (step) => convert(axes.step, axes[chosen("x")], step);
const left = (step) => (ofStep(step) - axes.low) / (axes.high - axes.low);

const round = (number) => Number(number.toPrecision(10));
const ticks = (low, high, count) => {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5].find((factor) => factor * power >= rough * (1 - 1e-9)) ?? 10);
  const marks = [];
  for (let mark = Math.ceil(low / step - 1e-9); mark * step <= high + 1e-9 * step; mark += 1) marks.push(round(mark * step));
  return [marks, step];
};
const verticalAxis = (data, low, high) => {
  const isLog = data.may_be_log && low > 0 && (chosen("y") === "log" || (chosen("y") === "auto" && high / low > 8));
  const { divisor } = data;
  if (isLog) {
    [low, high] = [low / 1.1, high * 1.1];
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const marks = [];
    for (let power = first; power <= last; power += 1) {
      for (const factor of last - first > 3 ? [1] : [1, 2, 5]) marks.push(round(factor * 10 ** power));
    }
    const position = (y) => Math.log(y / low) / Math.log(high / low);
    return { isLog, position, marks: marks.filter((mark) => mark >= low && mark <= high) };
  }
  [low, high] = [data.may_be_log ? low : Math.min(low, 0), Math.max(high, data.at_least)];
  if (high <= low) high = low + (low === 0 ? 1 : Math.abs(low) * 0.1);
  const [, step] = ticks(low / divisor, high / divisor, 5);
  const size = step * divisor;
  low = Math.floor(low / size + 1e-9) * size;
  high = Math.max(Math.ceil(high / size - 1e-9) * size, low + size);
  const [marks] = ticks(low / divisor, high / divisor, (high - low) / size);
  return { isLog, position: (y) => (y - low) / (high - low), marks: marks.map((mark) => mark * divisor) };
};
const label = (data, number) =>
  data.is_scientific && number ? number.toExponential().replace("e+", "e") : round(number / data.divisor).toLocaleString("en", { maximumFractionDigits: 12 });
const text = (data, value) => {
  const scaled = value / data.divisor, size = Math.abs(scaled);
  const number = size >= 1000 ? Math.round(scaled).toLocaleString("en") :
    size > 0 && size < 1e-3 ? scaled.toExponential(3) : String(Number(scaled.toPrecision(4)));
  return number + data.suffix;
};

const meanSteps = (points) => {
  const steps = SMOOTHING[chosen("smoothing")] * (axes.step.at(-1) - axes.step[0]);
  return steps < MIN_MEAN_STEPS ? 1 : Math.floor(steps / points.steps_each) * points.steps_each;
};
const runningMean = (points, steps) => {
  const width = Math.max(1, steps / points.steps_each);
  const y = points.y.map((_, at) => {
    const around = points.y.slice(Math.max(0, at - Math.floor(width / 2)), at + Math.ceil(width / 2));
    const finite = around.filter((value) => value !== null);
    return finite.length ? finite.reduce((a, b) => a + b) / finite.length : null;
  });
  return { x: points.x, y };
};
const pathOf = (points, position, asDots) => {
  let path = "", isOpen = false;
  points.y.forEach((y, at) => {
    if (y === null) { isOpen = false; return; }
    path += `${isOpen ? "L" : "M"}${(WIDTH * left(points.x[at])).toFixed(1)} ${(HEIGHT * (1 - position(y))).toFixed(1)}`;
    if (asDots || (!isOpen && (points.y[at + 1] ?? null) === null)) path += "h.01";
    isOpen = !asDots;
  });
  return path;
};
const marksInto = (element, marks, side) => element.replaceChildren(...marks.map(([share, name]) => {
  const mark = document.createElement("span");
  mark.textContent = name;
  mark.style[side] = 100 * share + "%";
  if (side === "left" && share > 0.96) mark.className = "end";
  return mark;
}));

function draw({ figure, data }) {
  const [divisor, unit] = UNITS[chosen("x")].find(([size]) => axes.high >= size) ?? UNITS[chosen("x")].at(-1);
  const [marks] = ticks(axes.low / divisor, axes.high / divisor, 5);
  marksInto(figure.querySelector(".xs"), marks.filter((mark) => unit !== "step" || Number.isInteger(mark)).map((mark) =>
    [(mark * divisor - axes.low) / (axes.high - axes.low), mark.toLocaleString("en")]), "left");
  figure.querySelector(".axis").textContent = unit;
  const shapes = data.columns ? columns(figure, data) : lines(figure, data);
  figure.querySelector(".area svg").replaceChildren(...shapes.map(([name, path]) => {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", "path");
    shape.setAttribute("class", name);
    shape.setAttribute("d", path);
    return shape;
  }));
}
function columns(figure, data) {
  const floors = data.columns.map(() => 0), top = (value) => (HEIGHT * (1 - Math.min(1, value / data.top))).toFixed(1);
  const edges = data.columns.map(([first, last]) => [first - 1, last].map((step) => (WIDTH * left(step)).toFixed(1)));
  const shapes = data.parts.map((part) => [part.class, part.y.map((y, at) => {
    const bottom = top(floors[at]);
    floors[at] += y;
    return `M${edges[at][0]} ${bottom}V${top(floors[at])}H${edges[at][1]}V${bottom}z`;
  }).join("")]);
  const beyond = edges.filter((_, at) => floors[at] > data.top);
  figure.querySelectorAll(".beyond").forEach((mark, at) => {
    mark.style.left = (Number(beyond[at]?.[0]) + Number(beyond[at]?.[1])) / 20 + "%";
  });
  return [["grid", figure.querySelector(".grid").getAttribute("d")], ...shapes];
}
function lines(figure, data) {
  const isAlone = data.lines.filter((line) => line.is_noisy).length === 1, how = [];
  const drawn = data.lines.flatMap((line) => {
    const points = line.means ?? line, steps = line.is_noisy ? meanSteps(points) : 1;
    if (steps === 1) return [[line.class, line]];
    how[0] = `mean of ${steps} steps`;
    const mean = [line.class, runningMean(points, steps)];
    return isAlone ? [[line.class + " pale", line], mean] : [mean];
  });
  const values = drawn.flatMap(([, points]) => points.y).filter((value) => value !== null);
  const axis = verticalAxis(data, Math.min(...values), Math.max(...values));
  if (axis.isLog) how.unshift("logarithmic");
  figure.querySelector(".how").textContent = how.join(", ");
  marksInto(figure.querySelector(".ys"), axis.marks.map((mark) => [axis.position(mark), label(data, mark)]), "bottom");
  const grid = axis.marks.map((mark) => `M0 ${(HEIGHT * (1 - axis.position(mark))).toFixed(1)}H${WIDTH}`).join("");
  return [
    ["grid", grid],
    ...data.marks.map((step) => ["mark", `M${(WIDTH * left(step)).toFixed(1)} 0V${HEIGHT}`]),
    ...drawn.map(([name, points]) => [name, pathOf(points, axis.position, false)]),
    ...drawn.filter(([name]) => name.endsWith(" dots")).map(([name, points]) =>
      [name.replace("line", "dot").replace(" dots", ""), pathOf(points, axis.position, true)]),
  ];
}

// The step under the pointer, what to call it, and a class and a text for each number there.
function numbers(data, step) {
  if (data.columns) {
    const at = place(data.columns.map(([, last]) => last), step);
    const [first, last] = data.columns[at];
    const name = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    return [(first - 1 + last) / 2, name, data.parts.map((part) => [part.class, `${part.name}: ${text(data, part.y[at])}`])];
  }
  const longest = data.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const at = longest.x[nearest(longest.x, step)], reach = (axes.step.at(-1) - axes.step[0]) / 50;
  const texts = data.lines.flatMap((line) => {
    const near = nearest(line.x, at);
    if (line.y[near] === null || Math.abs(line.x[near] - at) > reach) return [];
    const where = line.x[near] === at ? "" : ` (step ${line.x[near]})`;
    return [[line.class, `${line.name}${where}: ${text(data, line.y[near])}`]];
  });
  return [at, `step ${at}`, texts];
}
function point({ figure, data }, share) {
  const [step, name, texts] = numbers(data, convert(axes[chosen("x")], axes.step, axes.low + share * (axes.high - axes.low)));
  const at = 100 * left(step), tip = figure.querySelector(".tip");
  tip.replaceChildren(...[["", name], ...texts].map(([key, content]) => {
    const line = document.createElement("div");
    if (key) {
      const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      swatch.setAttribute("viewBox", "0 0 16 10");
      swatch.innerHTML = `<path class="${key}" d="${data.columns ? "M3 0H13V10H3z" : "M0 5H16"}"/>`;
      line.append(swatch);
    }
    line.append(content);
    return line;
  }));
  tip.hidden = false;
  const { clientWidth } = tip.parentElement, { offsetWidth } = tip, x = clientWidth * at / 100;
  tip.style.left = Math.max(0, Math.min(clientWidth - offsetWidth, at < 50 ? x + 8 : x - 8 - offsetWidth)) + "px";
  // The same step in every chart.
  for (const rule of document.querySelectorAll(".rule")) [rule.style.left, rule.hidden] = [at + "%", false];
}
function drawAll() {
  const numbersOf = axes[chosen("x")];
  axes.low = chosen("x") === "step" ? axes.range[0] : numbersOf[0];
  axes.high = Math.max(chosen("x") === "step" ? axes.range[1] : numbersOf.at(-1), axes.low + 1e-9);
  charts.forEach(draw);
}
function start() {
  axes = JSON.parse(document.querySelector("#axes").textContent);
  axes.range = [axes.low, axes.high];
  for (const option of form.elements.x.options) option.disabled = !axes[option.value];
  charts = [...document.querySelectorAll("figure.chart")].map((figure) =>
    ({ figure, data: JSON.parse(figure.querySelector("script").textContent) }));
  for (const chart of charts) {
    const area = chart.figure.querySelector(".area");
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      point(chart, Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
    });
    area.addEventListener("pointerleave", () => {
      for (const shown of document.querySelectorAll(".rule, .tip")) shown.hidden = true;
    });
  }
  form.hidden = !charts.length;
  // Without a choice of the reader the charts are drawn already.
  if (["x", "y"].some((name) => chosen(name) !== form.elements[name].querySelector("[selected]").value) ||
      chosen("smoothing") !== form.elements.smoothing.defaultValue) drawAll();
}
form.addEventListener("input", drawAll);
start();
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details.print:not([open])")];
  for (const details of closed) details.open = true;
});
addEventListener("afterprint", () => { for (const details of closed) details.open = false; });
