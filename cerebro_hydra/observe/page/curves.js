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
    const scale = scaleOf(numbers, 5, data.falling.includes(name));
    const x = (epoch) => left + (epochs === 1 ? 0.5 : epoch / (epochs - 1)) * (W - left - right);
    const y = (value) => top + (0.96 - 0.92 * scale.at(value)) * (H - top - bottom);

    const figure = html("figure", { class: "card", "data-curve": name });
    const caption = html("figcaption", {}, name);
    if (name === data.metric) {
      caption.append(html("small", {}, data.direction === "min" ? " · lower is better" : " · higher is better"));
    }
    if (scale.log) caption.append(html("small", {}, " · log axis"));
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${name} by epoch` });
    for (const value of scale.ticks) {
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

  let namesAll = false; // whether the legend has the grey ones, too

  function drawLegend() {
    const legend = document.getElementById("legend");
    legend.replaceChildren();
    const order = data.trials.map((trial, index) => ({ trial, index }));
    order.sort((a, b) => place(a.trial) - place(b.trial));
    const most = 8;
    for (const { trial, index } of namesAll ? order : order.slice(0, most)) {
      const button = html("button", { "aria-pressed": String(!hidden.has(index)), title: "show or hide its curves" });
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
    if (!namesAll && order.length > most) {
      const more = html("button", {}, `and ${order.length - most} more`);
      more.addEventListener("click", () => { namesAll = true; drawLegend(); });
      legend.append(more);
    }
  }
