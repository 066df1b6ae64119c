"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const hidden = new Set();
  const colour = (trial) => `var(--c${trial.colour < 0 ? "x" : trial.colour})`;
  const place = (trial) => (trial.colour < 0 ? 99 : trial.colour);
  const isNumber = (value) => typeof value === "number";
  const shown = (value) => (isNumber(value) ? String(Number(value.toPrecision(4))) : String(value));

  // Text only ever enters as text, so that nothing in a run's folder is read as markup.
  function filled(made, attributes, text) {
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  }
  const SVG = "http://www.w3.org/2000/svg";
  const element = (name, attributes = {}, text = null) => filled(document.createElementNS(SVG, name), attributes, text);
  const html = (name, attributes = {}, text = null) => filled(document.createElement(name), attributes, text);

  function explain(target, words) {
    target.addEventListener("pointermove", (event) => {
      tip.textContent = typeof words === "function" ? words(event) : words;
      tip.hidden = false;
      const { width, height } = tip.getBoundingClientRect();
      const right = event.clientX + 14 + width > innerWidth;
      tip.style.left = `${Math.max(4, right ? event.clientX - 14 - width : event.clientX + 14)}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
    });
    target.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((each) => power * each >= rough * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
    return found;
  }

  // Points at one trial everywhere: the others fade.
  function point(trial) {
    for (const each of document.querySelectorAll("svg [data-trial]")) {
      each.classList.toggle("faint", trial !== null && each.dataset.trial !== String(trial));
    }
  }

  // ------------------------------------------------------------------ learning curves

  function drawCurves() {
    const box = document.getElementById("curves");
    box.replaceChildren(...data.measured.map(curveOf));
  }

  function curveOf(name) {
    const [W, H, left, right, top, bottom] = [380, 230, 46, 12, 8, 30];
    const lines = data.trials
      .map((trial, index) => ({ trial, index, values: trial.history[name] || [] }))
      .filter((line) => line.values.length && !hidden.has(line.index))
      .sort((a, b) => place(b.trial) - place(a.trial)); // the best on top
    const numbers = lines.flatMap((line) => line.values.filter(isNumber));
    const epochs = Math.max(1, ...lines.map((line) => line.values.length));
    let low = numbers.reduce((a, b) => Math.min(a, b), Infinity);
    let high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!numbers.length) [low, high] = [0, 1];
    // Also where they differ by rounding alone: steps that small would not count up.
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = [low - Math.abs(low) / 10 - 0.01, high + Math.abs(high) / 10 + 0.01];
    const pad = (high - low) * 0.05;
    [low, high] = [low - pad, high + pad];
    const x = (epoch) => left + (epochs === 1 ? 0.5 : epoch / (epochs - 1)) * (W - left - right);
    const y = (value) => top + (1 - (value - low) / (high - low)) * (H - top - bottom);

    const figure = html("figure", { class: "card", "data-curve": name });
    const caption = html("figcaption", {}, name);
    if (name === data.metric) {
      caption.append(html("small", {}, data.direction === "min" ? " · lower is better" : " · higher is better"));
    }
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${name} by epoch` });
    for (const value of ticks(low, high, 4)) {
      svg.append(element("line", { class: "grid", x1: left, x2: W - right, y1: y(value), y2: y(value) }));
      svg.append(element("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, shown(value)));
    }
    for (const epoch of epochs === 1 ? [0] : ticks(0, epochs - 1, 6).filter(Number.isInteger)) {
      svg.append(element("text", { x: x(epoch), y: H - bottom + 17, "text-anchor": "middle" }, epoch + 1));
    }
    svg.append(element("text", { x: W - right, y: H - 1, "text-anchor": "end" }, "epoch"));
    for (const { trial, index, values } of lines) {
      const group = element("g", { "data-trial": index });
      let path = "", pen = "M";
      values.forEach((value, epoch) => {
        if (isNumber(value)) { path += `${pen}${x(epoch).toFixed(1)} ${y(value).toFixed(1)}`; pen = "L"; } else pen = "M";
      });
      group.append(element("path", { class: "curve", d: path, stroke: colour(trial) }));
      values.forEach((value, epoch) => {
        if (!isNumber(value)) return;
        const result = epoch === trial.result;
        group.append(element("circle", { class: "point", cx: x(epoch), cy: y(value), r: result ? 4 : epochs > 40 ? 0.8 : 2.4, fill: colour(trial) }));
      });
      svg.append(group);
    }
    const cursor = element("line", { class: "cursor", y1: top, y2: H - bottom, visibility: "hidden" });
    svg.append(cursor);
    const glass = element("rect", { x: left - 6, y: top, width: W - left - right + 12, height: H - top - bottom, fill: "transparent" });
    explain(glass, (event) => {
      const at = (event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width * W;
      const share = (at - left) / (W - left - right);
      const epoch = Math.max(0, Math.min(epochs - 1, Math.round(share * (epochs - 1))));
      cursor.setAttribute("x1", x(epoch)); cursor.setAttribute("x2", x(epoch));
      cursor.setAttribute("visibility", "visible");
      const here = lines.filter((line) => epoch in line.values)
        .sort((a, b) => a.index - b.index)
        .map((line) => `${line.trial.id}   ${shown(line.values[epoch])}`);
      const most = 16;
      if (here.length > most) here.splice(most, here.length, `and ${here.length - most} more`);
      return [`${name}, epoch ${epoch + 1}`, ...here].join("\n");
    });
    glass.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
    svg.append(glass);
    figure.append(caption, svg);
    return figure;
  }

  function drawLegend() {
    const legend = document.getElementById("legend");
    const order = data.trials.map((trial, index) => ({ trial, index }));
    order.sort((a, b) => place(a.trial) - place(b.trial));
    for (const { trial, index } of order) {
      const button = html("button", { "aria-pressed": "true", title: "show or hide its curves" });
      button.append(html("span", { class: `dot c${trial.colour < 0 ? "x" : trial.colour}` }), trial.id);
      button.addEventListener("click", () => {
        const hide = !hidden.has(index);
        if (hide) hidden.add(index); else hidden.delete(index);
        button.setAttribute("aria-pressed", String(!hide));
        drawCurves();
      });
      button.addEventListener("pointerenter", () => point(index));
      button.addEventListener("pointerleave", () => point(null));
      legend.append(button);
    }
  }

  // ------------------------------------------------------------------ timeline

  const WORDS = { repeated: "counted until its state was lost, then repeated", failed: "failed", cancelled: "taken back", lost: "lost with its worker", running: "not over when the journal ends" };
  const seconds = (value) => (value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`);
  const whole = [0, Math.max(data.seconds, 1e-3)];
  let view = whole;

  function drawTimeline() {
    const box = document.getElementById("timeline");
    const W = Math.max(320, box.clientWidth), left = 84, axis = 24, thick = 24, thin = 6, gap = 14;
    const [from, to] = view;
    const x = (time) => left + (time - from) / (to - from) * (W - left - 4);
    const lanes = new Map();
    let height = 2;
    for (const { worker } of data.workers) {
      const hops = Math.max(1, ...data.tasks.filter((t) => t.worker === worker && t.hop).map((t) => t.hop.lane + 1));
      lanes.set(worker, height);
      height += thick + hops * (thin + 2) + gap;
    }
    const svg = element("svg", { viewBox: `0 0 ${W} ${height + axis}`, height: height + axis, role: "img", "aria-label": "what each worker did when" });
    const defs = element("defs");
    const hatch = element("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    hatch.append(element("line", { x1: 0, y1: 0, x2: 0, y2: 6, stroke: "var(--bad)", "stroke-width": 1.4, "stroke-opacity": 0.55 }));
    const clip = element("clipPath", { id: "lanes" });
    clip.append(element("rect", { x: left, y: 0, width: W - left, height: height + axis }));
    defs.append(hatch, clip);
    svg.append(defs);
    const inner = element("g", { "clip-path": "url(#lanes)" });
    for (const time of ticks(from, to, Math.max(3, Math.floor(W / 130)))) {
      inner.append(element("line", { class: "grid", x1: x(time), x2: x(time), y1: 0, y2: height }));
      inner.append(element("text", { x: x(time), y: height + 15, "text-anchor": time === 0 ? "start" : "middle" }, `${Number(time.toPrecision(6))} s`));
    }
    for (const [worker, y] of lanes) {
      svg.append(element("text", { x: 0, y: y + 16 }, `worker ${worker}`));
      inner.append(element("rect", { class: "laneback", x: left, y, width: W - left, height: thick, rx: 3 }));
    }
    const bar = (parent, start, end, y, h, attributes) => {
      const made = element("rect", { x: x(start).toFixed(2), y, width: Math.max(1, x(end) - x(start)).toFixed(2), height: h, ...attributes });
      parent.append(made);
      return made;
    };
    for (const absence of data.absences) {
      const made = bar(inner, absence.start, absence.end, lanes.get(absence.worker), thick, { class: "absent" });
      explain(made, `worker ${absence.worker} lost for ${seconds(absence.end - absence.start)}\n${absence.reason}`);
    }
    for (const task of data.tasks) {
      const trial = data.trials[task.trial], y = lanes.get(task.worker), fill = colour(trial);
      const group = element("g", { "data-trial": task.trial, "data-task": task.kind, "data-outcome": task.outcome });
      if (task.start > task.assigned) bar(group, task.assigned, task.start, y + thick / 2 - 1, 2, { class: "wait" });
      const made = bar(group, task.start, task.end, y, thick, { class: `bar ${task.kind} ${task.outcome}`, fill, stroke: fill });
      const what = task.kind === "train" ? "sub-epoch" : "evaluation";
      const lines = [`${trial.id}: ${what}, epoch ${task.epoch + 1}, partition ${task.partition}`, `${seconds(task.end - task.start)}, from ${seconds(task.start)}`];
      if (task.start - task.assigned > 0.005) lines.push(`waited ${seconds(task.start - task.assigned)}`);
      if (task.loss !== null) lines.push(`loss ${shown(task.loss)}`);
      if (task.outcome in WORDS) lines.push(WORDS[task.outcome]);
      explain(made, lines.join("\n"));
      if (x(task.end) - x(task.start) > 30 && task.kind === "train") {
        const middle = (Math.max(x(task.start), left) + Math.min(x(task.end), W)) / 2;
        group.append(element("text", { class: `inbar on${trial.colour < 0 ? "x" : trial.colour}`, x: middle, y: y + 16, "text-anchor": "middle" }, trial.id.replace("trial-", "")));
      }
      if (task.hop) {
        const hop = task.hop, from = hop.source === null ? "the store" : `worker ${hop.source}`;
        const made = bar(group, hop.start, hop.end, y + thick + 2 + hop.lane * (thin + 2), thin - 1, { class: "hopbar", "data-hop": "", fill });
        explain(made, `${trial.id}: ${hop.source === null ? "load" : "hop"} from ${from}\n${hop.moved} moved, ${hop.saved} saved\n${seconds(hop.end - hop.start)}`);
      }
      group.addEventListener("pointerenter", () => point(task.trial));
      group.addEventListener("pointerleave", () => point(null));
      inner.append(group);
    }
    svg.append(inner);
    brush(svg, left, W, height, (pixel) => from + (pixel - left) / (W - left - 4) * (to - from));
    box.replaceChildren(svg);
  }

  function brush(svg, left, W, height, timeAt) {
    const pixel = (event) => {
      const box = svg.getBoundingClientRect();
      return Math.max(left, Math.min(W, (event.clientX - box.left) / box.width * W));
    };
    svg.addEventListener("pointerdown", (event) => {
      const begun = pixel(event);
      const shade = element("rect", { class: "brush", x: begun, y: 0, width: 0, height });
      svg.append(shade);
      const move = (moved) => {
        shade.setAttribute("x", Math.min(begun, pixel(moved)));
        shade.setAttribute("width", Math.abs(pixel(moved) - begun));
      };
      const done = (ended) => {
        removeEventListener("pointermove", move);
        removeEventListener("pointerup", done);
        shade.remove();
        const ends = [timeAt(begun), timeAt(pixel(ended))].sort((a, b) => a - b);
        if (Math.abs(pixel(ended) - begun) > 6) zoomTo(...ends);
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", done);
    });
  }

  function zoomTo(from, to) {
    const width = Math.min(Math.max(to - from, 1e-3), whole[1]);
    const start = Math.max(0, Math.min(from, whole[1] - width));
    view = [start, start + width];
    drawTimeline();
  }
  function zoomBy(factor) {
    const middle = (view[0] + view[1]) / 2, half = (view[1] - view[0]) / 2 * factor;
    zoomTo(middle - half, middle + half);
  }

  // ------------------------------------------------------------------ tables

  function sortable(table) {
    const headings = [...table.tHead.rows[0].cells];
    const keyOf = (row, column) => {
      const cell = row.cells[column];
      const text = cell.dataset.sort ?? cell.textContent.trim();
      return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
    };
    // Numbers before words, and what has no number last whichever way the column is sorted.
    const compare = (a, b, sign) => {
      if (isNumber(a) !== isNumber(b)) return isNumber(a) ? -1 : 1;
      return sign * (isNumber(a) ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    };
    headings.forEach((heading, column) => {
      heading.querySelector("button").addEventListener("click", () => {
        const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        for (const other of headings) other.setAttribute("aria-sort", "none");
        heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => compare(keyOf(a, column), keyOf(b, column), sign));
        table.tBodies[0].append(...rows);
      });
    });
  }

  drawLegend();
  drawCurves();
  drawTimeline();
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.getElementById("zoom-in").addEventListener("click", () => zoomBy(0.5));
  document.getElementById("zoom-out").addEventListener("click", () => zoomBy(2));
  document.getElementById("zoom-all").addEventListener("click", () => zoomTo(...whole));
  let resized = 0;
  addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(drawTimeline); });
  addEventListener("beforeprint", drawTimeline);
})();
