  // ------------------------------------------------------------------ timeline

  const outcomes = () => ({ repeated: "counted until its state was lost, then repeated", failed: "failed", cancelled: "taken back", lost: "lost with its worker", running: data.running ? "goes on" : "not over when the journal ends" });
  const seconds = (value) => (value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`);
  const whole = () => [data.first_task, Math.max(data.seconds, data.first_task + 1e-3)];
  let zoomed = null; // what is shown of the whole, if not all

  function drawTimeline() {
    const box = document.getElementById("timeline");
    const W = Math.max(320, box.clientWidth), left = 84, axis = 24, thick = 24, thin = 6, gap = 14;
    const [from, to] = zoomed ?? whole(), words = outcomes();
    const x = (time) => left + (time - from) / (to - from) * (W - left - 4);
    const lanes = new Map(), small = 20;
    let height = 2;
    for (const { worker, residents } of data.workers) {
      const hops = Math.max(1, ...data.tasks.filter((t) => t.worker === worker && t.hop).map((t) => t.hop.lane + 1));
      const tasks = residents * (thick + 2) - 2;
      const devices = data.devices.filter((device) => device.worker === worker && (device.computes || device.moves.length));
      lanes.set(worker, { y: height, tasks, devices });
      height += tasks + hops * (thin + 2);
      for (const device of devices) {
        device.y = height;
        height += (device.computes ? small + 2 : 0) + thin + 4;
      }
      height += gap;
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
      inner.append(element("text", { x: x(time), y: height + 15, "text-anchor": x(time) < left + 12 ? "start" : "middle" }, `${Number(time.toPrecision(6))} s`));
    }
    for (const [worker, { y, tasks }] of lanes) {
      svg.append(element("text", { x: 0, y: y + 16 }, `worker ${worker}`));
      inner.append(element("rect", { class: "laneback", x: left, y, width: W - left, height: tasks, rx: 3 }));
    }
    const bar = (parent, start, end, y, h, attributes) => {
      const made = element("rect", { x: x(start).toFixed(2), y, width: Math.max(1, x(end) - x(start)).toFixed(2), height: h, ...attributes });
      parent.append(made);
      return made;
    };
    const share = (work, start, end) => work.reduce((sum, [, each]) => sum + each, 0) / Math.max(end - start, 1e-9);
    for (const { devices } of lanes.values()) for (const { y, name, computes, tasks, moves } of devices) {
      const below = y + (computes ? small + 2 : 0);
      svg.append(element("text", { x: 12, y: computes ? y + 14 : y + 7 }, computes ? name : "disk"));
      const busy = (work, start, end) => work.map(([trial, each]) => `${data.trials[trial].id}   ${Math.round(100 * each / Math.max(end - start, 1e-9))} %`);
      if (computes) inner.append(element("rect", { class: "laneback", x: left, y, width: W - left, height: small, rx: 2 }));
      for (const [start, end, work] of tasks) {
        const most = Math.max(1, share(work, start, end)), words = [`${name} computes for`, ...busy(work, start, end), `${seconds(end - start)}, from ${seconds(start)}`].join("\n");
        let top = y + small;
        for (const [trial, each] of work) {
          const high = small * each / Math.max(end - start, 1e-9) / most;
          top -= high;
          explain(bar(inner, start, end, top, high, { class: "device", "data-trial": trial, fill: colour(data.trials[trial]) }), words);
        }
      }
      for (const [start, end, work] of moves) {
        const made = bar(inner, start, end, below, thin - 1, { class: "move", "fill-opacity": Math.max(0.25, Math.min(1, share(work, start, end))).toFixed(2) });
        explain(made, [computes ? `${name} copies shards of` : "shards move between DRAM and disk", ...busy(work, start, end), `${seconds(end - start)}, from ${seconds(start)}`].join("\n"));
      }
    }
    for (const absence of data.absences) {
      const made = bar(inner, absence.start, absence.end, lanes.get(absence.worker).y, lanes.get(absence.worker).tasks, { class: "absent" });
      explain(made, `worker ${absence.worker} lost for ${seconds(absence.end - absence.start)}\n${absence.reason}`);
    }
    for (const task of data.tasks) {
      const trial = data.trials[task.trial], fill = colour(trial), worker = lanes.get(task.worker);
      const y = worker.y + task.lane * (thick + 2), middle = y + thick / 2, [waits, goes] = task.wait;
      const group = element("g", { "data-trial": task.trial, "data-task": task.kind, "data-outcome": task.outcome });
      const ready = (start, end) => end > start && group.append(element("line", { class: "ready", x1: x(start), x2: x(end), y1: middle, y2: middle }));
      ready(task.assigned, waits);
      ready(goes, task.start);
      if (goes > waits) bar(group, waits, goes, middle - 1, 2, { class: "wait" });
      const made = bar(group, task.start, task.end, y, thick, { class: `bar ${task.kind} ${task.outcome}`, fill, stroke: fill });
      const what = task.kind === "train" ? "sub-epoch" : "evaluation";
      const lines = [`${trial.id}: ${what}, epoch ${task.epoch + 1}, partition ${task.partition}`, `${seconds(task.end - task.start)}, from ${seconds(task.start)}`];
      if (goes - waits > 0.005) lines.push(`waited ${seconds(goes - waits)} for shards`);
      const before = task.start - task.assigned - (goes - waits);
      if (before > 0.005) lines.push(`made ready in ${seconds(before)}`);
      if (task.loss !== null) lines.push(`loss ${shown(task.loss)}`);
      if (task.outcome in words) lines.push(words[task.outcome]);
      explain(made, lines.join("\n"));
      if (x(task.end) - x(task.start) > 30 && task.kind === "train") {
        const centre = (Math.max(x(task.start), left) + Math.min(x(task.end), W)) / 2;
        group.append(element("text", { class: `inbar on${trial.colour < 0 ? "x" : trial.colour}`, x: centre, y: y + 16, "text-anchor": "middle" }, trial.id.replace("trial-", "")));
      }
      if (task.hop) {
        const hop = task.hop, from = hop.source === null ? "the store" : `worker ${hop.source}`;
        const made = bar(group, hop.start, hop.end, worker.y + worker.tasks + 2 + hop.lane * (thin + 2), thin - 1, { class: "hopbar", "data-hop": "", fill });
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
    const [begin, end] = whole(), width = Math.min(Math.max(to - from, 1e-3), end - begin);
    const start = Math.max(begin, Math.min(from, end - width));
    zoomed = [start, start + width];
    drawTimeline();
  }
  function zoomBy(factor) {
    const [from, to] = zoomed ?? whole(), middle = (from + to) / 2, half = (to - from) / 2 * factor;
    zoomTo(middle - half, middle + half);
  }
