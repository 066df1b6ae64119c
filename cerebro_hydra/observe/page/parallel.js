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
    // Where the axes have no room side by side, they lie below one another.
    const W = box.clientWidth, turned = W < 120 * axes.length;
    const H = turned ? 64 * axes.length : 270;
    const along = turned ? [34, W - 34] : [H - 16, 34];
    const across = turned ? [30, H - 34] : [66, W - 74];
    const between = ([from, to], share) => Number((from + share * (to - from)).toFixed(1));
    const at = (number, share) => {
      const ends = [between(across, axes.length === 1 ? 0.5 : number / (axes.length - 1)), between(along, share)];
      return turned ? ends.reverse() : ends;
    };
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `parameters and ${data.metric}` });
    lines.forEach(({ trial, index }, line) => {
      const points = axes.map((axis, number) => at(number, axis.shares[line]).join(" "));
      const group = element("g", { "data-trial": index, "data-line": "" });
      group.append(element("path", { class: "curve", d: `M${points.join("L")}`, stroke: colour(trial) }));
      group.addEventListener("pointerenter", () => point(index));
      group.addEventListener("pointerleave", () => point(null));
      explain(group, [trial.id, ...axes.map((axis) => `${axis.name}   ${shown(axis.values[line])}`)].join("\n"));
      svg.append(group);
    });
    axes.forEach((axis, number) => {
      const [[x1, y1], [x2, y2]] = [at(number, 0), at(number, 1)];
      svg.append(element("line", { class: "axis", x1, x2, y1, y2 }));
      const heading = turned ? { x: x1, y: y1 - 10 } : { x: x1, y: 14, "text-anchor": "middle" };
      const name = element("text", { class: "name", ...heading }, clipped(axis.name, turned ? 40 : 18));
      name.append(element("title", {}, axis.name));
      svg.append(name);
      const first = number === 0, last = number === axes.length - 1; // they have room beside the lines
      const most = turned ? Math.max(4, Math.floor(W / 8 / axis.marks.length)) : first ? 9 : last ? 11 : 16;
      for (const [text, share] of axis.marks) {
        const [x, y] = at(number, share);
        const beside = turned ? { x, y: y + 15, "text-anchor": "middle" }
          : first ? { x: x - 6, y: y + 4, "text-anchor": "end" } : { x: x + 6, y: y + 4 };
        svg.append(element("text", { class: "mark", ...beside }, clipped(text, most)));
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
