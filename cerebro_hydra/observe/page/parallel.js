  // ------------------------------------------------------------------ parallel coordinates

  function drawParallel() {
    const box = document.getElementById("parallel");
    if (!box) return;
    const lines = data.trials.map((trial, index) => ({ trial, index }))
      .filter(({ trial }) => isNumber(trial.score))
      .sort((a, b) => place(b.trial) - place(a.trial)); // the best on top
    const names = [...new Set(data.trials.flatMap((trial) => Object.keys(trial.params)))];
    const axes = names.map((name) => axisOf(name, lines.map(({ trial }) => trial.params[name])))
      .filter((axis) => axis.distinct > 1);
    axes.push(axisOf(data.metric, lines.map(({ trial }) => trial.score), data.direction === "min"));
    const [H, top, bottom] = [270, 34, 16];
    const W = Math.max(box.clientWidth, 120 * axes.length), left = 66, right = 74;
    const x = (number) => left + (axes.length === 1 ? 0.5 : number / (axes.length - 1)) * (W - left - right);
    const y = (share) => top + (1 - share) * (H - top - bottom);
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `parameters and ${data.metric}` });
    svg.style.width = `${W}px`;
    lines.forEach(({ trial, index }, line) => {
      const points = axes.map((axis, number) => `${x(number).toFixed(1)} ${y(axis.shares[line]).toFixed(1)}`);
      const group = element("g", { "data-trial": index, "data-line": "" });
      group.append(element("path", { class: "curve", d: `M${points.join("L")}`, stroke: colour(trial) }));
      group.addEventListener("pointerenter", () => point(index));
      group.addEventListener("pointerleave", () => point(null));
      explain(group, [trial.id, ...axes.map((axis) => `${axis.name}   ${shown(axis.values[line])}`)].join("\n"));
      svg.append(group);
    });
    axes.forEach((axis, number) => {
      const most = number === axes.length - 1 ? 11 : 16;
      svg.append(element("line", { class: "axis", x1: x(number), x2: x(number), y1: top, y2: H - bottom }));
      const name = element("text", { class: "name", x: x(number), y: 14, "text-anchor": "middle" }, clipped(axis.name, 18));
      name.append(element("title", {}, axis.name));
      svg.append(name);
      for (const [text, share] of axis.marks) {
        const before = number === 0; // where there is room beside the lines
        const beside = before ? { x: x(number) - 6, "text-anchor": "end" } : { x: x(number) + 6 };
        svg.append(element("text", { class: "mark", y: y(share) + 4, ...beside }, clipped(text, before ? 9 : most)));
      }
    });
    box.replaceChildren(svg);
  }

  const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  // Numbers on a scale, words side by side; `falling` puts the low values on top.
  function axisOf(name, values, falling = false) {
    const distinct = [...new Set(values.map((value) => value ?? "–"))];
    if (distinct.every(isNumber)) {
      const scale = scaleOf(distinct, 5);
      const at = (value) => (falling ? 1 - scale.at(value) : scale.at(value));
      const few = distinct.length <= 4;
      const marks = few ? distinct : scale.ticks;
      return { name, values, distinct: distinct.length, shares: values.map(at), marks: marks.map((value) => [shown(value), at(value)]) };
    }
    const words = distinct.map(String).sort();
    const at = (value) => (words.length === 1 ? 0.5 : words.indexOf(String(value ?? "–")) / (words.length - 1));
    const every = Math.ceil(words.length / 12);
    const marks = words.filter((_, number) => number % every === 0).map((word) => [word, at(word)]);
    return { name, values: values.map((value) => value ?? "–"), distinct: distinct.length, shares: values.map(at), marks };
  }
