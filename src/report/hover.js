"use strict";
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area"), rule = figure.querySelector(".rule"), tip = figure.querySelector(".tip");
  const number = (value) => {
    const scaled = value / data.divisor, size = Math.abs(scaled);
    const text = size >= 1000 ? Math.round(scaled).toLocaleString("en") :
      size > 0 && size < 1e-3 ? scaled.toExponential(3) : String(Number(scaled.toPrecision(4)));
    return text + data.suffix;
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  const rows = (x) => {
    if (data.columns) {
      const at = nearest(data.columns.map((column) => column[1]), x);
      const column = data.columns[x <= data.columns[at][1] + 0.5 ? at : Math.min(at + 1, data.columns.length - 1)];
      const index = data.columns.indexOf(column);
      const name = column[0] === column[1] ? "step " + column[0] : "steps " + column[0] + " to " + column[1];
      return [(column[0] + column[1]) / 2, name, data.parts.map((part) => part.name + ": " + number(part.y[index]))];
    }
    const longest = data.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    const at = longest.x[nearest(longest.x, x)];
    const reach = (data.high - data.low) / 50;
    const texts = [];
    for (const line of data.lines) {
      const place = nearest(line.x, at);
      if (line.y[place] === null || Math.abs(line.x[place] - at) > reach) continue;
      const where = line.x[place] === at ? "" : " (step " + line.x[place] + ")";
      texts.push(line.name + where + ": " + number(line.y[place]));
    }
    return [at, "step " + at, texts];
  };
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const [x, head, texts] = rows(data.low + share * (data.high - data.low));
    const left = 100 * (x - data.low) / (data.high - data.low);
    rule.style.left = left + "%";
    tip.replaceChildren(...[head, ...texts].map((text, index) => {
      const line = document.createElement(index ? "div" : "b");
      line.textContent = text;
      return line;
    }));
    tip.style.left = left < 50 ? "calc(" + left + "% + 8px)" : "";
    tip.style.right = left < 50 ? "" : "calc(" + (100 - left) + "% + 8px)";
    rule.hidden = tip.hidden = false;
  });
  area.addEventListener("pointerleave", () => { rule.hidden = tip.hidden = true; });
}
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details.print:not([open])")];
  for (const details of closed) details.open = true;
});
addEventListener("afterprint", () => { for (const details of closed) details.open = false; });
