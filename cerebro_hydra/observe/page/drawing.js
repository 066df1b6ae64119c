  let data;
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

  // A scale from values to 0..1 with its ticks; logarithmic, if it may be, where they span decades.
  function scaleOf(numbers, wanted, mayBeLog = true) {
    let low = numbers.reduce((a, b) => Math.min(a, b), Infinity);
    let high = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!numbers.length) [low, high] = [0, 1];
    if (mayBeLog && low > 0 && high >= 20 * low) {
      const [from, to] = [Math.log10(low), Math.log10(high)];
      const step = Math.max(1, Math.ceil((to - from) / wanted)), marks = [];
      for (let power = Math.floor(from / step) * step; power <= to; power += step) {
        for (const digit of to - from < 2.5 ? [1, 2, 5] : [1]) marks.push(digit * 10 ** power);
      }
      return { log: true, ticks: marks.filter((mark) => mark >= low && mark <= high), at: (value) => (Math.log10(value) - from) / (to - from) };
    }
    // Also where they differ by rounding alone: steps that small would not count up.
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) [low, high] = [low - Math.abs(low) / 10 - 0.01, high + Math.abs(high) / 10 + 0.01];
    return { log: false, ticks: ticks(low, high, wanted), at: (value) => (value - low) / (high - low) };
  }

  // Points at one trial everywhere: the others fade.
  function point(trial) {
    for (const each of document.querySelectorAll("svg [data-trial]")) {
      each.classList.toggle("faint", trial !== null && each.dataset.trial !== String(trial));
    }
  }
