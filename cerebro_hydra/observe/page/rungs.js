  // ------------------------------------------------------------------ rungs

  // A row per rung: each trial that came there lies where it had measured what it had.
  function drawRungs() {
    const box = document.getElementById("rungs");
    if (!box) return;
    const came = data.trials.flatMap((trial, index) => trial.rungs.map(([rung, left]) =>
      ({ trial, index, rung, left, wentOn: left === null, value: (trial.history[data.metric] || [])[rung - 1] })));
    const rungs = [...new Set(came.map(({ rung }) => rung))].sort((a, b) => a - b);
    const scale = scaleOf(came.map(({ value }) => value).filter(isNumber), 5, data.direction === "min");
    const style = getComputedStyle(box);
    const W = box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    const [row, end] = [46, 8];
    const H = row * rungs.length + 34;
    const x = (value) => end + scale.at(value) * (W - 2 * end);
    const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${data.metric} at rungs` });
    for (const value of scale.ticks) {
      svg.append(element("line", { class: "grid", x1: x(value), x2: x(value), y1: 20, y2: H - 30 }));
      svg.append(element("text", { x: x(value), y: H - 16, "text-anchor": "middle" }, shown(value)));
    }
    svg.append(element("text", { x: W - end, y: H - 1, "text-anchor": "end" }, data.metric + (scale.log ? ", log axis" : "")));
    rungs.forEach((rung, number) => {
      const there = came.filter((each) => each.rung === rung);
      const on = there.filter(({ wentOn }) => wentOn).length;
      const without = there.filter(({ value }) => !isNumber(value)).length;
      const words = `after epoch ${rung}: ${there.length} came, ${on} went on` + (without ? `, ${without} without a number` : "");
      svg.append(element("text", { class: "name", x: end, y: row * number + 14 }, words));
      const y = row * number + 32;
      there.filter(({ value }) => isNumber(value)).sort((a, b) => place(b.trial) - place(a.trial)).forEach(({ trial, index, left, wentOn, value }) => {
        const group = element("g", { "data-trial": index, "data-rung": rung });
        const stroke = trial.colour < 0 ? "var(--soft)" : colour(trial); // a thin ring of the usual grey is hard to see
        group.append(element("circle", { cx: x(value), cy: y, r: 5, stroke, fill: wentOn ? stroke : "transparent" }));
        group.addEventListener("pointerenter", () => point(index));
        group.addEventListener("pointerleave", () => point(null));
        explain(group, `${trial.id}, epoch ${rung}\n${data.metric}   ${shown(value)}\n${wentOn ? "went on" : left}`);
        svg.append(group);
      });
    });
    box.replaceChildren(svg);
  }
